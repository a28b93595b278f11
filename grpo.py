"""grpo.py: GRPO for GLM-Image in one file. It fine-tunes the model on any reward you can compute.

GLM-Image draws in two halves: an autoregressive transformer (AR, 9 B weights) writes visual tokens,
and a diffusion transformer (DiT, 7 B weights) paints them. The AR half is what learns here:

    prompt ---> AR ---- tokens ---> DiT + VAE ---> image ---> reward ---> advantage
              trained                frozen              any function    z-score in the group
                 ^--------------- update: a clipped policy gradient <---------+

A step of GRPO (DeepSeekMath, arXiv 2402.03300) is one iteration of the loop in `GRPOTrainer.train`:
  1. sample   the policy, AR + LoRA, draws G token sequences per prompt; each token is an action
  2. decode   the frozen DiT paints them; the G images of a prompt, a group, share the same noise
  3. score    any function turns images into numbers, which need not be differentiable
  4. compare  advantage = (reward - mean) / std of its group; the mean replaces a value network
  5. update   tokens of better images become likelier, within PPO's clip, near the base model (KL)
  6. log      metrics, pictures of fixed prompts, a checkpoint

Axes: P prompts per GPU, G samples of each, N = P * G samples in the order p0 p0 p1 p1, B samples in
      a micro-batch; L prompt tokens, padded on the left; T image tokens, each one of V codes. T
      is the same for all images, so no sample needs padding or a mask.

A first reading may stop after the trainer: then come the files of a run, GLM-Image itself, and the
command line. Written for torch 2.11 to 2.15, transformers 5.23 and diffusers 0.42."""
import collections, contextlib, dataclasses, functools, inspect, json, math
import os, re, runpy, sys, time
from pathlib import Path
from typing import Literal
import diffusers, safetensors.torch, torch, tqdm, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageColor
from torch import nn

RANK = int(os.environ.get("RANK", 0))  # torchrun starts one process per GPU and numbers them
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
GPU_GIB = torch.cuda.get_device_properties(0).total_memory / 2**30 if CUDA else 0
HERE = Path(__file__).parent
progress = functools.partial(tqdm.tqdm, leave=False, disable=None)  # a bar in a terminal, else none

class BadInput(ValueError):
    """The user's input is invalid. `main` prints the message in one line."""

@contextlib.contextmanager
def input_errors(what, kinds=Exception):
    """Inside `with input_errors("--prompts p.txt"):` errors are reported as invalid input."""
    try:
        yield
    except kinds as error:
        raise BadInput(f"{what}: {error}") from error

# --- Settings -------------------------------------------------------------------------------------
# Each field is a flag: `python grpo.py --group-size 8`. A model's folder may have a file grpo.json
# with defaults of its own. The small GLM-Image has one. It is trained where no GPU has more than
# 22 GiB: training the real one takes 20.
SMALL_MODEL = os.path.relpath(HERE / "examples/tiny-glm-image")

def flag(default, help):
    return transformers.hf_argparser.HfArg(default=default, help=help)

@dataclasses.dataclass
class Config:
    # What is trained, and on what
    model: str = flag("zai-org/GLM-Image" if GPU_GIB > 22 else SMALL_MODEL, "hub id or folder")
    adapter: str = flag(None, "folder of LoRA weights to begin with")
    prompts: str = flag(None, "text file, one prompt a line; None: prompts.txt")
    reward: str = flag("color", "color, mse, file.py:function; weighted: color=1,mine.py:sharp=.2")
    # GRPO
    steps: int = flag(100, "steps, each of one rollout and its updates")
    group_size: int = flag(4, "images per prompt")
    batch_size: int = flag(8, "prompts per step, shared by all GPUs")
    micro_batch_size: int = flag(4, "images that a GPU decodes or updates at a time")
    num_iterations: int = flag(1, "updates per rollout; with 1 no ratio is ever clipped")
    lr: float = flag(5e-5, "learning rate of AdamW")
    clip_range: float = flag(0.2, "ratios are clipped to 1 - this .. 1 + this")
    kl_coef: float = flag(0.01, "weight of the KL to the base model; 0: it is not computed")
    max_grad_norm: float = flag(1.0, "longer gradients are scaled down to this")
    lora_rank: int = flag(32, "rank of the adapters")
    # The model
    width: int = flag(512, "pixels, a multiple of 32")
    height: int = flag(512, "pixels, a multiple of 32")
    temperature: float = flag(None, "logits are divided by it; None: the model's own")
    top_p: float = flag(None, "draw from the likeliest codes with this mass; None: the model's own")
    decode_steps: int = flag(20, "denoising steps of the DiT")
    guidance: float = flag(1.5, "classifier-free guidance of the DiT; 1 is off")
    offload: Literal["auto", "on", "off"] = flag("auto", "one half at a time; auto: below 60 GiB")
    # The run
    out: str = flag(None, "new folder for the run; None: runs/<date-time>")
    resume: str = flag(None, "folder of a run to continue with its own settings")
    save_every: int = flag(10, "steps between saved pictures and adapters")
    seed: int = flag(0, "seed of everything random")

    def __post_init__(self):
        # Counts are at least 1 and other numbers at least 0, with these exceptions.
        lowest = dict(group_size=2, seed=0, max_grad_norm=1e-9, temperature=0.01, top_p=0.01)
        for name, kind in inspect.get_annotations(Config).items():
            value = getattr(self, name)
            low = lowest.get(name, 1 if kind is int else 0)
            if kind in (int, float) and value is not None and not low <= value < 2**40:
                raise BadInput(f"--{name} {value}: must be {low} or more, and finite")
        if self.top_p is not None and self.top_p > 1:
            raise BadInput(f"--top_p {self.top_p}: must be 1 or less")
        if self.width % 32 or self.height % 32:
            raise BadInput("--width and --height must be multiples of 32")
        if self.batch_size % WORLD_SIZE:
            raise BadInput(f"--batch_size must be a multiple of the number of GPUs, {WORLD_SIZE}")
        if "" in (self.resume, self.adapter):  # an empty variable of the shell
            raise BadInput("--resume and --adapter must name a folder")

# --- The maths of GRPO: pure functions of tensors -------------------------------------------------
def compute_advantages(rewards, group_size):
    """A = (r - mean of its group) / (std of its group + 1e-6). rewards [N] -> advantages [N]."""
    # In single precision the mean of equal rewards can be 1e-7 off by rounding, and 1e-7 divided by
    # 1e-6 is an advantage of 0.1. In double precision it is 0.
    groups = torch.as_tensor(rewards).double().view(-1, group_size)  # [P, G]
    advantages = groups - groups.mean(1, keepdim=True)
    advantages /= groups.std(1, keepdim=True) + 1e-6  # Dr. GRPO (2503.20783) omits this division
    return advantages.flatten().float()

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2,
                      ref_logprobs=None, kl_coef=0.0):
    """PPO's clipped surrogate (1707.06347) plus a KL to the reference -> loss, {metric: float}.
        ratio = exp(new - old), clipped to 1 - clip_range .. 1 + clip_range
        loss  = -mean(min(ratio * A, clip(ratio) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1
    The mean of k3 is KL(new, ref) if `new` drew the tokens (Schulman, "Approximating KL
    Divergence"). From the second update of a rollout on this is an approximation.
    Log-probs are [N, T], or [N] (one action each), advantages [N]. Only `new` gets a gradient.
    Why the loss may be 0: with one update per rollout every ratio is 1 and policy_loss is -mean(A),
    which is 0 over whole groups. Its gradient is not: -mean(A * grad(new)), as in REINFORCE."""
    if advantages.shape != new_logprobs.shape[:1]:  # [N, T] would broadcast silently
        raise ValueError(f"advantages must be [N], one for each row: {advantages.shape}")
    new = new_logprobs.float().reshape(len(advantages), -1)  # [N, T]
    old = old_logprobs.detach().reshape_as(new)
    A = advantages.detach().to(new)[:, None]  # [N, 1]
    ratio = (new - old).exp()
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * A
    # The minimum is constant, and its gradient 0, in two cases: the token is better (A > 0) and its
    # ratio above the clip already, or it is worse (A < 0) and its ratio below.
    loss = -torch.min(unclipped, clipped).mean()  # a loss of your own goes here
    stopped = clipped < unclipped  # where the minimum takes the clipped ratio
    metrics = dict(
        policy_loss=loss, ratio_mean=ratio.mean(), clip_frac=stopped.float().mean())
    if ref_logprobs is not None:
        delta = ref_logprobs.detach().reshape_as(new) - new
        delta = delta.clamp(max=20)  # exp of an outlier would overflow; clamped, it has no gradient
        kl = (torch.expm1(delta) - delta).mean()  # expm1(x) = exp(x) - 1, exact near 0
        metrics["kl"] = kl
        loss = loss + kl_coef * kl
    metrics["loss"] = loss
    return loss, {name: value.item() for name, value in metrics.items()}

# --- Rewards and prompts --------------------------------------------------------------------------
# A reward is any function that gives each image a finite number, higher is better. Only differences
# within a group matter. For example, `--reward mine.py:bright` takes this one from mine.py:
#     def bright(images, prompts, targets):  # PIL images, texts, PIL images to imitate or None
#         return [image.convert("L").resize((1, 1)).getpixel((0, 0)) for image in images]
COLORS = {name: torch.tensor(ImageColor.getrgb(name)) / 255  # [3], in 0..1
          for name in "red orange yellow green blue purple white black".split()}

def pil_to_tensor(images):
    """PIL images of one size -> [N, 3, H, W], fp32 in 0..1."""
    pixels = np.stack([image.convert("RGB") for image in images])
    return torch.tensor(pixels).movedim(3, 1) / 255

def find_color(prompt):
    """The first of COLORS that the prompt names -> [3]."""
    for word in re.findall(r"\w+", prompt.lower()):
        if word in COLORS:
            return COLORS[word]
    raise BadInput(f"--reward color: there is no colour word in {prompt!r}")

def reward_color(images, prompts, targets=None):
    """1 - |mean colour of the image - colour that its prompt names|, in 0..1."""
    mean_colors = pil_to_tensor(images).mean((2, 3))  # [N, 3]
    return [1 - F.l1_loss(mean_color, find_color(prompt))
            for mean_color, prompt in zip(mean_colors, prompts)]

def reward_mse(images, prompts, targets):
    """Minus the mean squared error to the target, which is resized to the image."""
    targets = [target.resize(images[0].size) for target in targets]
    return -(pil_to_tensor(images) - pil_to_tensor(targets)).square().mean((1, 2, 3))

REWARDS = {"color": reward_color, "mse": reward_mse}

def load_rewards(text):
    """Text such as color=1,mine.py:sharp=.2 -> {name: (function, weight)}; no weight means 1."""
    rewards = {}
    run_once = functools.cache(run_file)  # two rewards of a file share what it loads
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        path, _, function_name = name.rpartition(":")
        function = run_once(path).get(function_name) if path else REWARDS.get(name)
        if not callable(function):
            raise BadInput(f"--reward {name}: there is no such function")
        if name in rewards:
            raise BadInput(f"--reward {name}: it is named twice")
        with input_errors(f"--reward {part}: needs a function of three lists and a weight"):
            inspect.signature(function).bind("images", "prompts", "targets")  # fails if it cannot
            rewards[name] = function, float(weight or 1)
        if not math.isfinite(rewards[name][1]):
            raise BadInput(f"--reward {part}: the weight must be finite")
    return rewards

def run_file(path):
    """Runs a Python file, which may import its neighbours -> {name: value} of what it defines."""
    if not os.path.isfile(path):
        raise BadInput(f"--reward: there is no file {path}")
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    return runpy.run_path(path)

@torch.no_grad()
def compute_rewards(images, prompts, targets, rewards):
    """{name: (function, weight)} -> the weighted sum [N], the mean of each {metric: float}."""
    total = torch.zeros(len(images))
    metrics = {}
    for name, (function, weight) in rewards.items():
        copies = [image.copy() for image in images]  # a reward may paint over its images
        values = list(function(copies, prompts, targets))
        scores = torch.tensor([math.nan if value is None else float(value) for value in values])
        if len(scores) != len(images) or not scores.isfinite().all():  # a NaN would spread
            raise ValueError(f"{name} must give {len(images)} finite numbers: {values}")
        metrics[f"reward/{name}"] = scores.mean().item()
        total += weight * scores
    metrics["reward"] = total.mean().item()
    return total, metrics

def load_prompts(path):
    """A file with lines `prompt`, `prompt<TAB>target.png` or `# comment` -> prompts, targets. The
    target of a prompt without one is None."""
    path = Path(path or HERE / "prompts.txt")
    prompts = []
    targets = []
    with input_errors(f"--prompts {path}"):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    for number, line in enumerate(lines, start=1):
        prompt, tab, target = line.strip().partition("\t")
        if prompt and not prompt.startswith("#"):
            prompts.append(prompt)
            with input_errors(f"--prompts {path}, line {number}, the target after the tab"):
                targets.append(Image.open(path.parent / target).convert("RGB") if tab else None)
    if not prompts:
        raise BadInput(f"--prompts {path}: has no prompts")
    return prompts, targets

# --- LoRA (arXiv 2106.09685): the weights that are trained ----------------------------------------
class LoRA:
    """W x becomes W x + 2 B A x: W is frozen, B begins at 0, and 2 is alpha / rank.
    `layers` is a regex for the names of the linear layers. `weights` holds A [rank, in] and
    B [out, rank] of each, under the names that peft gives them. They are fp32, as the bf16 weight
    0.02 plus an Adam step of 5e-5 is the same bf16 weight. A model can have only one LoRA: its
    hooks are never removed."""
    def __init__(self, model, layers, rank):
        self.config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=layers)
        self.enabled = True
        self.weights = {}
        for name, linear in model.named_modules():
            if re.fullmatch(layers, name):
                self.add_adapter(name, linear, rank)

    def add_adapter(self, name, linear, rank):
        # Drawn on the CPU, so that it is equal on all GPUs, and from the distribution peft uses.
        A = nn.init.kaiming_uniform_(torch.empty(rank, linear.in_features), a=math.sqrt(5))
        A = nn.Parameter(A.to(DEVICE))
        B = nn.Parameter(torch.zeros(linear.out_features, rank, device=DEVICE))
        self.weights[f"base_model.model.{name}.lora_A.weight"] = A
        self.weights[f"base_model.model.{name}.lora_B.weight"] = B

        def add_low_rank(linear, inputs, output):
            if self.enabled:
                low = inputs[0] @ A.to(output).T
                output = torch.add(output, low @ B.to(output).T, alpha=2)  # one kernel for both
            return output

        linear.register_forward_hook(add_low_rank)

    @contextlib.contextmanager
    def disabled(self):
        """Inside `with lora.disabled():` the model is the base model, the reference of the KL."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def save(self, folder):
        """As peft and the `load_adapter` of transformers read it."""
        os.makedirs(folder, exist_ok=True)
        Path(folder, "adapter_config.json").write_text(json.dumps(self.config))
        safetensors.torch.save_file(self.weights, Path(folder, "adapter_model.safetensors"))

    def load(self, folder):
        check_adapter(folder, self.config["r"])
        self.copy_weights(safetensors.torch.load_file(Path(folder, "adapter_model.safetensors")))

    def copy_weights(self, saved):
        """Copies {name: weight} into the weights, if they are of the same layers."""
        shapes = {name: weight.shape for name, weight in self.weights.items()}
        if {name: weight.shape for name, weight in saved.items()} != shapes:
            raise BadInput("--adapter: these adapters are of other layers than the model's")
        for name, weight in self.weights.items():
            weight.data.copy_(saved[name])

def check_adapter(folder, rank):
    """Adapters of another rank do not fit, and those with another alpha would be scaled wrongly."""
    with input_errors(f"--adapter {folder} holds no adapters"):
        config = json.loads(Path(folder, "adapter_config.json").read_text())
        scale = config["lora_alpha"] / config["r"]
        safetensors.safe_open(Path(folder, "adapter_model.safetensors"), "pt")  # reads its header
    if config["r"] != rank or scale != 2 or config.get("use_rslora"):
        raise BadInput(f"--adapter {folder}: needs --lora_rank {config['r']} and alpha = 2 * rank")

# --- What the trainer asks of a model -------------------------------------------------------------
# To train another model, write a class like `Policy`. examples/toy.py is a small one, and below
# `GLMImageWrapper` is that of GLM-Image. The tensors of a rollout are on the CPU; those that
# `compute_logprobs` returns are on DEVICE.
@dataclasses.dataclass(frozen=True)
class Rollout:
    """What the sampler gives: N samples, in the order p0 p0 p1 p1."""
    prompts: list  # N texts
    images: list  # N PIL images
    tokens: torch.Tensor  # [N, T], the codes that were drawn
    logprobs: torch.Tensor  # [N, T], their log-probs at that time
    nuclei: torch.Tensor  # [N, T, V], bool: the codes that top-p allowed; None: all

    def part(self, rows):
        """The Rollout of the samples in a slice."""
        values = vars(self).values()
        return Rollout(*[None if value is None else value[rows] for value in values])

class Policy:
    """What `GRPOTrainer` uses of the model that it trains."""
    policy: nn.Module  # frozen; the trainer adds LoRA to it, and trains nothing else
    lora_layers: str  # a regex for the names of its linear layers that get LoRA

    def generate_with_tracking(self, prompts, group_size, seeds):
        """Steps 1 and 2: P prompts, and a seed for each -> a Rollout of P * group_size samples.
        Equal seeds give equal samples, whatever else is in the batch."""

    def compute_logprobs(self, rollout):
        """Log-probs of the rollout's tokens under the policy as it is now -> log-probs with a
        gradient, entropies without, both [B, T]."""

# --- The trainer ----------------------------------------------------------------------------------
def choose_prompts(step, num_prompts, config):
    """The prompts of a step that fall to this GPU -> P places in the list of prompts, P seeds.
    An epoch is a pass over all prompts, each in another random order. Everything follows from the
    run's seed and the step, so that a resumed run has no state to restore here."""
    places = []
    seeds = []
    end = step * config.batch_size
    for count in range(end - config.batch_size + RANK, end, WORLD_SIZE):
        epoch, place = divmod(count, num_prompts)
        order = np.random.default_rng([config.seed, epoch]).permutation(num_prompts)
        places.append(order[place])
        # A million seeds for each value of --seed. Those below are for the saved pictures.
        seeds.append(1_000_000 * (config.seed + 1) + count)
    return places, seeds

class GRPOTrainer:
    """Trains `wrapper`, a Policy. rewards: {name: (function, weight)}; targets: images to imitate.
    It begins a run in a new folder, or continues the one in `config.resume`."""
    def __init__(self, config, wrapper, prompts, rewards, targets=None):
        self.config = config
        self.wrapper = wrapper
        self.prompts = prompts
        self.rewards = rewards
        self.targets = targets or [None] * len(prompts)
        self.history = []  # a row of metrics for each step
        torch.manual_seed(config.seed)  # the first adapters are equal on all GPUs
        self.lora = LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
        self.optimizer = torch.optim.AdamW(self.lora.weights.values(), config.lr, weight_decay=0.0)
        if config.resume:
            self.load_checkpoint()
        elif config.adapter:
            self.lora.load(config.adapter)
        if RANK == 0:  # the first process alone writes files
            self.out = Path(config.resume or claim_folder(config.out))
            self.save_checkpoint()

    def train(self):
        config = self.config
        if RANK == 0 and not self.history:
            self.save_samples(0)  # before training
        for step in range(len(self.history) + 1, config.steps + 1):
            started = time.perf_counter()
            places, seeds = choose_prompts(step, len(self.prompts), config)
            prompts = [self.prompts[i] for i in places]
            targets = [self.targets[i] for i in np.repeat(places, config.group_size)]
            # 1. Sample and 2. decode.
            rollout = self.wrapper.generate_with_tracking(prompts, config.group_size, seeds)
            # 3. Score.
            images = rollout.images
            rewards, metrics = compute_rewards(images, rollout.prompts, targets, self.rewards)
            # 4. Compare.
            advantages = compute_advantages(rewards, config.group_size)
            # 5. Update.
            metrics |= self.train_step(rollout, advantages)
            # 6. Log.
            groups = rewards.double().view(-1, config.group_size)
            metrics["reward_std"] = groups.std(1).mean().item()
            metrics["seconds"] = time.perf_counter() - started
            self.log(step, metrics)

    def train_step(self, rollout, advantages):
        """Step 5: the updates from one rollout; advantages [N] -> {metric: float}. Micro-batches
        only save memory: each counts by its share of the samples, so the gradient is the same."""
        config = self.config
        N = len(advantages)
        size = config.micro_batch_size
        micro_batches = [slice(start, start + size) for start in range(0, N, size)]
        ref_logprobs = self.compute_ref_logprobs(rollout, micro_batches)
        old_logprobs = torch.empty(rollout.logprobs.shape, device=DEVICE)  # [N, T]
        totals = collections.Counter()  # its `update` adds
        self.optimizer.zero_grad()  # a step interrupted in a notebook leaves its gradients
        for iteration in range(config.num_iterations):
            for rows, ref in zip(micro_batches, ref_logprobs):
                new_logprobs, entropy = self.wrapper.compute_logprobs(rollout.part(rows))  # [B, T]
                # The trap of bf16: sampler and trainer round differently, so their ratio is not 1.
                # The old log-probs are therefore those of the first pass here.
                old = new_logprobs.detach() if iteration == 0 else old_logprobs[rows]
                old_logprobs[rows] = old
                loss, metrics = compute_grpo_loss(
                    new_logprobs, old, advantages[rows], config.clip_range, ref, config.kl_coef)
                metrics["entropy"] = entropy.mean().item()
                share = len(new_logprobs) / N
                (loss * share / WORLD_SIZE).backward()
                weight = share / config.num_iterations
                totals.update({name: weight * value for name, value in metrics.items()})
            totals["grad_norm"] += self.update_weights() / config.num_iterations
        gap = rollout.logprobs.to(DEVICE) - old_logprobs
        totals["sampler_gap_max"] = gap.abs().max().item()
        return dict(totals)

    @torch.no_grad()
    def compute_ref_logprobs(self, rollout, micro_batches):
        """Log-probs of each micro-batch under the reference, or None where the KL has no weight.
        The reference is the policy without its adapters, so no second model is needed."""
        if self.config.kl_coef == 0:
            return [None] * len(micro_batches)
        with self.lora.disabled():
            return [self.wrapper.compute_logprobs(rollout.part(rows))[0] for rows in micro_batches]

    def update_weights(self):
        """One step of the optimizer -> the norm of the gradient."""
        weights = list(self.lora.weights.values())
        if WORLD_SIZE > 1:
            for weight in weights:
                torch.distributed.all_reduce(weight.grad)  # a sum; the losses were divided
        grad_norm = nn.utils.clip_grad_norm_(weights, self.config.max_grad_norm)
        if grad_norm.isfinite():  # a NaN would stay in Adam's moments for ever
            self.optimizer.step()
        self.optimizer.zero_grad()
        return grad_norm.item()

    def log(self, step, metrics):
        """Step 6. The checkpoint is saved last, after every step, so that a failure costs at most
        one step."""
        metrics["gpu_gib_max"] = torch.cuda.max_memory_allocated() / 2**30
        row = dict(step=step) | merge_over_gpus(metrics)
        self.history.append(row)
        if RANK > 0:
            return
        if step % self.config.save_every == 0 or step == self.config.steps:
            self.save_samples(step)
        save_metrics(self.out, self.history)
        self.save_checkpoint()
        names = "step reward reward_std loss kl entropy grad_norm sampler_gap_max".split()
        print(*[f"{name} {row[name]:<8.4g}" for name in names if name in row], flush=True)
        if row["reward_std"] == 0:
            print("All groups had equal rewards: this step taught nothing.", flush=True)

    def save_samples(self, step):
        """Pictures of the first prompts, always with the same seeds, and the adapters they show."""
        prompts = self.prompts[:8]
        rollout = self.wrapper.generate_with_tracking(prompts, 1, range(len(prompts)))
        sheet = diffusers.utils.make_image_grid(rollout.images, 1, len(prompts))
        sheet.save(self.out / f"samples_{step:05d}.png")
        self.lora.save(self.out / f"adapter_{step:05d}")

    def save_checkpoint(self):
        """Written aside, then renamed: a kill leaves the checkpoint of the step before."""
        state = dict(config=vars(self.config), prompts=self.prompts, history=self.history,
                     adapter=self.lora.weights, optimizer=self.optimizer.state_dict())
        unfinished = self.out / "checkpoint.part"
        torch.save(state, unfinished)
        unfinished.replace(self.out / "checkpoint.pt")

    def load_checkpoint(self):
        state = read_checkpoint(self.config.resume)
        check_resume(state, self.config, self.prompts)
        self.history = state["history"]
        self.lora.copy_weights(state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.config.lr  # which may change

# --- The files of a run ---------------------------------------------------------------------------
def claim_folder(out):
    """Makes the folder of a new run. `mkdir` fails if it exists, so that two runs never share one,
    not even if they begin at the same moment."""
    while True:
        folder = Path(out or time.strftime("runs/%Y%m%d-%H%M%S"))
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if out:
                raise BadInput(f"--out {out}: must be a new folder")
            time.sleep(1)  # another run began in this second, so the next one gives the name

def save_metrics(folder, history):
    """Rewrites the whole file, since a kill may have left half a row. JSON has no NaN but null."""
    with open(folder / "metrics.jsonl", "w") as file:
        for row in history:
            row = {name: value if math.isfinite(value) else None for name, value in row.items()}
            print(json.dumps(row), file=file)

def read_checkpoint(folder):
    """What `save_checkpoint` wrote. `weights_only` lets a file run no code, `mmap` reads from it
    only what is used."""
    with input_errors(f"--resume {folder} holds no run, or its settings are others"):
        state = torch.load(Path(folder, "checkpoint.pt"), "cpu", weights_only=True, mmap=True)
        Config(**state["config"])  # fails if a setting is unknown
    return state

def check_resume(state, config, prompts):
    """Other settings may change; these would change the weights, or the order of the prompts."""
    for name in "model adapter batch_size lora_rank seed".split():
        if getattr(config, name) != state["config"][name]:
            raise BadInput(f"--{name}: was {state['config'][name]} and cannot change")
    if state["prompts"] != prompts:
        raise BadInput("--prompts: they differ from those of the run")
    if len(state["history"]) >= config.steps:
        raise BadInput(f"--resume {config.resume}: its steps are done; raise --steps")

def merge_over_gpus(metrics):
    """The metrics of all processes -> one row: the mean, and of two metrics the maximum."""
    rows = [metrics] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(rows, metrics)
    merged = {}
    for name in metrics:
        merge = np.max if name in ("sampler_gap_max", "gpu_gib_max") else np.mean
        merged[name] = merge([row[name] for row in rows]).item()
    return merged

# --- The distribution of the policy ---------------------------------------------------------------
def compute_policy_logprobs(logits, nucleus=None):
    """log pi(code): THE distribution of the policy, one definition for sampler and trainer.
    logits [.., V], fp32; nucleus [.., V], bool: what top-p leaves, or None -> log-probs [.., V].
    The trap of top-p: pi(code) = softmax(code) / (sum of the softmax over the nucleus). A trainer
    without the division, or with a nucleus of its own, improves another policy than the one that
    sampled. So the sampler keeps its nuclei, and the reference uses them too (2512.02556)."""
    if nucleus is not None:
        logits = logits.masked_fill(~nucleus.to(logits.device), -math.inf)
    return logits.log_softmax(dim=-1)

def sample_codes(logprobs, uniform):
    """Inverse-CDF sampling: logprobs [N, V], random numbers in 0..1 [N, 1] -> codes [N, 1].
    Each sample has random numbers of its own, so it does not depend on what else is in the batch,
    as it would with `torch.multinomial`."""
    cdf = logprobs.double().exp().cumsum(1)
    point = uniform * cdf[:, -1:]  # the last value is 1 only up to rounding
    # right=True finds the first code whose cdf is above the point: never a code of chance 0.
    return torch.searchsorted(cdf, point, right=True)

# --- GLM-Image: prompt -> tokens -> image ---------------------------------------------------------
# Five facts, from which the code follows:
#   1. It writes two grids: first a draft of about 16 x 16 codes, then the large grid, with a code
#      for each 32 x 32 pixels. Both are actions, but only the large one is painted.
#   2. A code is a token id from 0 to V - 1; ids above are image marks, padding and words.
#   3. A token's position is a triple (t, h, w), so that a code knows its row and column.
#   4. The DiT wants each code four times, as 2 x 2: its patches have 16 x 16 pixels.
#   5. Of the prompt the DiT reads only words in quotation marks, letter by letter (glyphs).
def build_position_ids(attention_mask, grids):
    """Positions (t, h, w): mask [B, L] of the prompts, (height, width) of grids -> [3, B, L + T].
    In text t, h and w all count the tokens. Inside a grid t stands still, h counts rows and w
    columns; the next part starts max(height, width) after the grid's start:
              pad  prompt    1 x 2   2 x 2
         t:   -1   0  1  2   3  3    5  5  5  5
         h:   -1   0  1  2   3  3    5  5  6  6
         w:   -1   0  1  2   3  4    5  6  5  6
    The trap: `transformers` makes these in `generate` only. A plain forward pass takes the image
    for a line of text, without any error, and every log-prob is wrong."""
    parts = [(attention_mask.cumsum(1) - 1).expand(3, -1, -1)]  # text [3, B, L]
    start = attention_mask.sum(1, keepdim=True)  # [B, 1]
    for height, width in grids:
        cell = torch.arange(height * width, device=start.device)  # row by row
        row = start + cell // width  # [B, height * width]
        column = start + cell % width
        parts.append(torch.stack([start.expand_as(row), row, column]))
        start = start + max(height, width)
    return torch.cat(parts, 2)

class Halves:
    """`ar` samples and is trained, `dit` paints. With offloading they take turns on the GPU, and
    wait on the host. The vision tower, which reads pictures, always stays on the host."""
    def __init__(self, pipe, offload):
        model = pipe.vision_language_encoder
        self.ar = nn.ModuleList([model.model.language_model, model.lm_head])
        self.dit = nn.ModuleList([pipe.text_encoder, pipe.transformer, pipe.vae])
        self.both = nn.ModuleList([self.ar, self.dit]).requires_grad_(False).eval()
        self.offload = offload == "on" or (offload == "auto" and 0 < GPU_GIB < 60)
        self.both.to("cpu" if self.offload else DEVICE)
        self.on_gpu = None  # ar or dit

    def move_to_gpu(self, half):
        if self.offload and half is not self.on_gpu:
            self.on_gpu = None  # if a move is interrupted, the next call begins anew
            self.both.to("cpu")
            torch.cuda.empty_cache()  # or fragments may leave no room for this half
            half.to(DEVICE)
            self.on_gpu = half

class GLMImageWrapper(Policy):
    """A diffusers `GlmImagePipeline` as a Policy."""
    lora_layers = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate_up|down)_proj"

    def __init__(self, pipe, config):
        self.pipe = pipe
        self.config = config
        self.policy = pipe.vision_language_encoder  # the AR half
        self.halves = Halves(pipe, config.offload)
        own = self.policy.generation_config
        self.temperature = config.temperature or own.temperature or 1.0
        self.top_p_filter = transformers.TopPLogitsWarper(config.top_p or own.top_p or 1.0)
        # Activation checkpointing: the backward pass computes the activations again, which saves
        # most of their memory. transformers does so in training mode only.
        self.policy.activation_checkpointing_enable()
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN (pytorch #196678)
        pipe.set_progress_bar_config(disable=True)
        pipe.vae.enable_slicing()  # image by image: four at 1024 pixels take 28 GiB
        pipe.transformer.rope.register_forward_hook(move_tables)

    @classmethod
    def from_pretrained(cls, path, config):
        """Loads a hub id or a folder. On a CPU, where bf16 is slow, in fp32."""
        with input_errors(f"--model {path}", (OSError, ValueError)):
            pipe = diffusers.GlmImagePipeline.from_pretrained(
                path, dtype=torch.bfloat16 if CUDA else torch.float32,
                low_cpu_mem_usage=diffusers.utils.is_accelerate_available())  # needs accelerate
        return cls(pipe, config)

    def encode(self, prompts):
        """-> ids [B, L], position_ids [3, B, L + T], bias [B, 1, L + T, L + T]. The bias is added
        to the scores of attention: 0 if token i (row) may see token j (column), else -inf."""
        texts = [dict(type="text", text=prompt) for prompt in prompts]
        chats = [[dict(role="user", content=[text])] for text in texts]
        inputs = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=dict(
                target_h=self.config.height, target_w=self.config.width,
                padding=True, padding_side="left")).to(DEVICE)
        # A row of image_grid_thw is (1, height, width). All prompts have the same two grids.
        large = inputs.image_grid_thw[0, 1:].tolist()
        draft = inputs.image_grid_thw[1, 1:].tolist()
        position_ids = build_position_ids(inputs.attention_mask, [draft, large])
        T = math.prod(draft) + math.prod(large)
        real = F.pad(inputs.attention_mask, (0, T), value=1)  # [B, L + T], 0 where padding is
        # A token sees itself and what stands before it. Padding sees the padding before it, as the
        # softmax of a row of -inf alone would be NaN.
        visible = (real[:, None, :, None] == real[:, None, None, :]).tril()
        bias = torch.where(visible, 0.0, -math.inf).to(self.policy.dtype)
        return inputs.input_ids, position_ids, bias

    def forward(self, ids, position_ids, bias, cache=None):
        """ids [B, n] -> logits / temperature [B, n, V], fp32. Not through `self.policy`, as that
        would make positions of its own."""
        language_model, lm_head = self.halves.ar
        hidden = language_model(
            input_ids=ids, position_ids=position_ids, attention_mask=bias, past_key_values=cache,
            use_cache=False).last_hidden_state  # False: no other cache than the one given
        codebook_size = self.pipe.transformer.config.prior_vq_quantizer_codebook_size
        return lm_head(hidden)[..., :codebook_size].float() / self.temperature

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """Step 1. P prompts, a seed for each -> tokens, logprobs [N, T], nuclei [N, T, V], on the
        CPU. All N are drawn at once, so memory grows with --batch-size and --group-size."""
        self.halves.move_to_gpu(self.halves.ar)
        self.policy.eval()  # an interrupted update may have left it in training mode
        ids, position_ids, bias = self.encode(np.repeat(prompts, group_size).tolist())
        L = ids.shape[1]
        T = position_ids.shape[2] - L
        rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = torch.cat([torch.rand(group_size, T, generator=rng) for rng in rngs]).to(DEVICE)
        # The prompts pass first. Then each code that is drawn gives the logits of the next one. The
        # cache holds the keys and values of all that has passed, and has L + T places.
        cache = transformers.StaticCache(self.policy.config.text_config, L + T)
        logits = self.forward(ids, position_ids[..., :L], bias[:, :, :L], cache)
        columns = []
        for i in progress(range(T), "sample"):
            # The filter sets the logits of codes outside the nucleus to -inf.
            kept = self.top_p_filter(input_ids=None, scores=logits[:, -1])
            nucleus = kept.isfinite()  # [N, V]
            all_logprobs = compute_policy_logprobs(logits[:, -1], nucleus)
            codes = sample_codes(all_logprobs, uniform[:, i:i + 1])  # [N, 1]
            logprobs = all_logprobs.gather(1, codes)
            columns.append((codes.cpu(), logprobs.cpu(), nucleus[:, None].cpu()))
            if i < T - 1:
                place = slice(L + i, L + i + 1)
                logits = self.forward(codes, position_ids[..., place], bias[:, :, place], cache)
        tokens, logprobs, nuclei = zip(*columns)
        return torch.cat(tokens, 1), torch.cat(logprobs, 1), torch.cat(nuclei, 1)

    def compute_logprobs(self, rollout):
        """Teacher forcing, one pass over prompts and tokens -> log-probs with a gradient, entropies
        without, both [B, T]. A model with dropout would need it switched off here."""
        self.halves.move_to_gpu(self.halves.ar)
        ids, position_ids, bias = self.encode(rollout.prompts)
        tokens = rollout.tokens.to(DEVICE)
        self.policy.train(torch.is_grad_enabled())  # for activation checkpointing
        logits = self.forward(torch.cat([ids, tokens], 1), position_ids, bias)
        self.policy.eval()  # in training mode sampling would have no cache
        logits = logits[:, ids.shape[1] - 1:-1]  # [B, T, V]: each place predicts the next code
        all_logprobs = compute_policy_logprobs(logits, rollout.nuclei)
        entropy = torch.distributions.Categorical(logits=all_logprobs.detach()).entropy()
        return all_logprobs.gather(2, tokens[:, :, None]).squeeze(2), entropy

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        """Step 2. P prompts and seeds, tokens [N, T] -> N images. A group shares its noise
        (DanceGRPO, 2505.07818): its rewards differ because its tokens do, not by luck."""
        self.halves.move_to_gpu(self.halves.dit)
        config = self.config
        h = config.height // 32
        w = config.width // 32
        codes = tokens[:, -h * w:].to(DEVICE).view(-1, h, w)  # without the draft
        codes = codes.repeat_interleave(2, 1).repeat_interleave(2, 2)  # each as 2 x 2
        groups = codes.view(len(prompts), -1, 4 * h * w)  # [P, G, 4 * h * w]
        images = []
        for i, group in enumerate(progress(groups, "decode")):
            for part in group.split(config.micro_batch_size):
                # ~seed, which is -seed - 1, gives other random numbers than those of the tokens.
                noise = [torch.Generator().manual_seed(~seeds[i]) for _ in part]  # all the same
                images += self.pipe(  # given codes, it skips its AR half
                    [prompts[i]] * len(part), prior_token_ids=part, generator=noise,
                    height=config.height, width=config.width, guidance_scale=config.guidance,
                    num_inference_steps=config.decode_steps).images
        return images

    def generate_with_tracking(self, prompts, group_size, seeds):
        tokens, logprobs, nuclei = self.sample(prompts, group_size, seeds)
        images = self.decode(prompts, tokens, seeds)
        repeated = np.repeat(prompts, group_size).tolist()
        return Rollout(repeated, images, tokens, logprobs, nuclei)

def move_tables(rope, inputs, tables):
    """The DiT makes its rotary tables on the CPU, and each of its layers would copy them."""
    return [table.to(DEVICE) for table in tables]

# --- The command line -----------------------------------------------------------------------------
def parse_args(argv=None, **defaults):
    """-> Config. The first of these that has a setting decides: what is typed; the run to resume,
    or else grpo.json in the model's folder; the defaults given here; those of Config."""
    parser = transformers.HfArgumentParser(
        Config, allow_abbrev=False, usage="python grpo.py [--group-size 8 ..]")
    parser.set_defaults(**defaults)
    typed, _ = parser.parse_known_args(argv)
    path = Path(typed.model, "grpo.json")
    if typed.resume:
        parser.set_defaults(**read_checkpoint(typed.resume)["config"] | dict(out=None))
    elif path.is_file():
        with input_errors(f"{path} has wrong settings"):
            parser.set_defaults(**json.loads(path.read_text()))
            Config(**vars(parser.parse_args([])))
    return Config(**vars(parser.parse_args(argv)))

def check_before_loading(config, prompts, targets, rewards):
    """What can be checked before a model is loaded, which may take minutes."""
    if "color" in rewards:
        for prompt in prompts:
            find_color(prompt)
    if "mse" in rewards and None in targets:
        raise BadInput("--reward mse: every line of --prompts needs a target")
    if config.resume:
        check_resume(read_checkpoint(config.resume), config, prompts)
    elif config.adapter:
        check_adapter(config.adapter, config.lora_rank)
    if config.out:
        if config.resume or os.path.exists(config.out):
            raise BadInput(f"--out {config.out}: must be a new folder; a resumed run has its own")
        with input_errors(f"--out {config.out}"):
            Path(config.out).parent.mkdir(parents=True, exist_ok=True)

def main(argv=None, load_model=GLMImageWrapper.from_pretrained, **defaults):
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        torch.set_num_threads(1)  # a small model gains little from more, and a busy machine loses
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")  # NCCL would wait for a process that failed
    try:
        config = parse_args(argv, **defaults)
        prompts, targets = load_prompts(config.prompts)
        rewards = load_rewards(config.reward)
        check_before_loading(config, prompts, targets, rewards)
        wrapper = load_model(config.model, config)
        trainer = GRPOTrainer(config, wrapper, prompts, rewards, targets)
        if RANK == 0:
            print(f"model: {config.model} on {DEVICE}, files: {trainer.out}", flush=True)
        trainer.train()
    except BadInput as error:
        print("grpo.py: error:", *str(error).split(), file=sys.stderr)  # in one line
        sys.exit(2)
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()  # or a process may abort at the end

if __name__ == "__main__":
    main()
