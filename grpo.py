"""grpo.py: GRPO for GLM-Image in one file. It fine-tunes the model on any reward you can compute.

GLM-Image has two halves: an autoregressive transformer (AR, 9 B weights) writes image tokens, and
a diffusion transformer (DiT, 7 B weights) paints them. Only the AR half is trained:

    prompt ---> AR ---- tokens ---> DiT + VAE ---> image ---> reward ---> advantage
              trained                frozen              any function    z-score in the group
                 ^--------------- update: a clipped policy gradient <---------+

One step of GRPO (arXiv 2402.03300), in the loop of `GRPOTrainer.train`:
  1. sample   the policy, AR + LoRA, draws G token sequences per prompt; each token is an action
  2. decode   the frozen DiT paints them; the G images of a prompt share their noise
  3. score    a reward function, which need not be differentiable, gives each image a number
  4. compare  advantage = (reward - mean) / std of its group; the mean replaces a value network
  5. update   tokens of better images become likelier; a clip and a KL keep the policy from leaping
  6. log      metrics, pictures of fixed prompts, a checkpoint

Axes  P  prompts of a step on this GPU   N  = P * G samples, grouped by prompt: p0 p0 p1 p1
      G  samples per prompt, a group     B  samples per micro-batch
      L  prompt tokens, padded left      T  image tokens, the same number for every image
      V  codes; an image token is a code, 0 .. V - 1
Run `python grpo.py` or `torchrun --nproc-per-node 8 grpo.py`. requirements.txt has its packages."""
import collections, contextlib, dataclasses, functools, inspect, json, math
import os, re, runpy, sys, time, typing
from pathlib import Path
import diffusers, safetensors.torch, torch, transformers
import numpy as np
from PIL import Image, ImageColor
from torch import nn

RANK = int(os.environ.get("RANK", 0))  # torchrun sets these variables
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
GPU_GIB = torch.cuda.get_device_properties(0).total_memory / 2**30 if CUDA else 0

class BadInput(ValueError):
    """The user's input is invalid. `main` prints the message on one line."""

@contextlib.contextmanager
def input_errors(what, kinds=Exception):
    """Inside the `with` block, errors of these kinds mean that the input `what` is invalid."""
    try:
        yield
    except kinds as error:
        raise BadInput(f"{what}: {error}") from error

# --- Settings -----------------------------------------------------------------
# Each field is a flag: `python grpo.py --group-size 8`, or --group_size. A file grpo.json in the
# model's folder may have other defaults. A GPU of 22 GiB or less gets a small GLM-Image by default.
SMALL_MODEL = os.path.relpath(Path(__file__).parent / "examples/tiny-glm-image")

def flag(default, text):
    return transformers.hf_argparser.HfArg(default=default, help=text)

@dataclasses.dataclass
class Config:
    # What is trained, and on what
    model: str = flag("zai-org/GLM-Image" if GPU_GIB > 22 else SMALL_MODEL, "hub id or folder")
    adapter: str | None = flag(None, "folder of LoRA weights to begin with")
    prompts: str | None = flag(None, "text file, one prompt a line; None: prompts.txt")
    reward: str = flag("color", "color, mse or file.py:function; several: color=1,my.py:f=.2")
    # GRPO
    steps: int = flag(100, "training steps")
    group_size: int = flag(4, "images per prompt")
    batch_size: int = flag(8, "prompts per step, shared by all GPUs")
    micro_batch_size: int = flag(4, "images decoded, or trained on, at a time")
    num_iterations: int = flag(1, "updates per rollout")
    lr: float = flag(5e-5, "learning rate of AdamW")
    clip_range: float = flag(0.2, "epsilon of PPO's clip")
    kl_coef: float = flag(0.01, "weight of the KL to the base model")
    max_grad_norm: float = flag(1.0, "largest norm of a gradient")
    lora_rank: int = flag(32, "rank of the LoRA")
    # The model
    width: int = flag(512, "multiple of 32 pixels")
    height: int = flag(512, "multiple of 32 pixels")
    temperature: float | None = flag(None, "logits are divided by it; None: the model's")
    top_p: float | None = flag(None, "nucleus sampling; None: the model's")
    decode_steps: int = flag(20, "denoising steps of the DiT")
    guidance: float = flag(1.5, "classifier-free guidance of the DiT; 1 is off")
    offload: typing.Literal["auto", "on", "off"] = flag("auto", "one half at a time; auto: <60 GiB")
    # The run
    out: str | None = flag(None, "new folder for the run; None: runs/<date-time>")
    resume: str | None = flag(None, "folder of a run to continue")
    save_every: int = flag(10, "steps between saves of pictures and adapters")
    seed: int = flag(0, "seed of everything random")

# --- The maths of GRPO: pure functions of tensors -----------------------------
def compute_advantages(rewards, group_size):
    """A = (r - mean of its group) / (std of its group + 1e-6). rewards [N] -> advantages [N]."""
    # In single precision the mean of equal rewards may be off by 1e-7, and 1e-7 / 1e-6 would be an
    # advantage of 0.1. In double precision it is 0.
    groups = torch.as_tensor(rewards).double().view(-1, group_size)  # [P, G]
    advantages = groups - groups.mean(1)[:, None]
    advantages /= groups.std(1)[:, None] + 1e-6  # Dr. GRPO (2503.20783) omits this division
    return advantages.flatten().float()

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2,
                      ref_logprobs=None, kl_coef=0):
    """PPO's clipped surrogate (1707.06347) plus a KL to the reference -> loss, {metric: float}.
        ratio = exp(new - old), clipped to 1 - clip_range .. 1 + clip_range
        loss  = -mean(min(ratio * A, clip(ratio) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1
    The mean of k3 is KL(new, ref) if `new` drew the tokens (Schulman, "Approximating KL
    Divergence"). After the first update of a rollout this is an approximation.
    Log-probs are [N, T], advantages [N]. Only `new_logprobs` gets a gradient.
    Why the loss may be 0: with one update per rollout every ratio is 1 and policy_loss is -mean(A),
    which is 0 over whole groups. Its gradient is not: -mean(A * grad(new)), as in REINFORCE."""
    if advantages.shape != new_logprobs.shape[:-1]:  # [N, T] would broadcast silently
        raise ValueError(f"advantages must be [N], one for each row: {advantages.shape}")
    A = advantages.detach().to(new_logprobs)[:, None]  # [N, 1]
    ratio = (new_logprobs - old_logprobs.detach()).exp()  # [N, T]
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * A
    # A token has no gradient if A > 0 and its ratio is above the clip, or if A < 0 and it is below,
    # as the minimum is constant.
    loss = -torch.min(unclipped, clipped).mean()  # a loss of your own goes here
    clip_frac = (clipped < unclipped).float().mean()  # where the minimum is clipped
    metrics = dict(policy_loss=loss, ratio_mean=ratio.mean(), clip_frac=clip_frac)
    if ref_logprobs is not None:
        delta = (ref_logprobs.detach() - new_logprobs).clamp(max=20)  # exp stays finite
        kl = (torch.expm1(delta) - delta).mean()  # expm1(x) = exp(x) - 1, exact near 0
        metrics["kl"] = kl
        loss = loss + kl_coef * kl
    metrics["loss"] = loss
    return loss, {name: value.item() for name, value in metrics.items()}

# --- Rewards and prompts ------------------------------------------------------
# A reward is any function that gives each image a finite number, higher is better. Only differences
# within a group matter. `--reward mine.py:bright` takes this one from mine.py:
#     def bright(images, prompts, targets):  # PIL images, texts, PIL images to imitate or None
#         return [image.convert("L").resize((1, 1)).getpixel((0, 0)) for image in images]
COLORS = {name: torch.tensor(ImageColor.getrgb(name)) / 255  # [3], in 0..1
          for name in "red orange yellow green blue purple white black".split()}

def pil_to_tensor(images):
    """PIL images of one size -> [N, 3, H, W], fp32 in 0..1."""
    pixels = np.stack([np.asarray(image.convert("RGB")) for image in images])
    return torch.tensor(pixels).movedim(3, 1) / 255

def find_color(prompt):
    """The first color word of the prompt -> [3], in 0..1."""
    for word in re.findall(r"\w+", prompt.lower()):
        if word in COLORS:
            return COLORS[word]
    raise BadInput(f"--reward color: there is no color word in {prompt!r}")

def reward_color(images, prompts, targets=None):
    """1 - |mean color of the image - color that its prompt names|, in 0..1."""
    mean_colors = pil_to_tensor(images).mean((2, 3))  # [N, 3]
    return [1 - nn.functional.l1_loss(mean_color, find_color(prompt))
            for mean_color, prompt in zip(mean_colors, prompts)]

def reward_mse(images, prompts, targets):
    """Minus the mean squared error to the target, which is resized to the image."""
    targets = [target.resize(images[0].size) for target in targets]
    return -(pil_to_tensor(images) - pil_to_tensor(targets)).square().mean((1, 2, 3))

REWARDS = {"color": reward_color, "mse": reward_mse}

def load_rewards(text):
    """Text such as color=1,mine.py:sharp=.2 -> {name: (function, weight)}; no weight means 1."""
    rewards = {}
    run_once = functools.cache(run_file)  # once for all rewards of a file
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        path, _, attribute = name.rpartition(":")
        function = run_once(path).get(attribute) if path else REWARDS.get(name)
        if not callable(function):
            raise BadInput(f"--reward {name}: there is no such function")
        with input_errors(f"--reward {part}: needs a function of three lists and a weight"):
            inspect.signature(function).bind("images", "prompts", "targets")  # or raises
            rewards[name] = function, float(weight or 1)
    return rewards

def run_file(path):
    """Runs a Python file, which may import its neighbours -> {name: what it defines}."""
    if not os.path.isfile(path):
        raise BadInput(f"--reward: there is no file {path}")
    sys.path.append(os.path.dirname(os.path.abspath(path)))
    return runpy.run_path(path)

@torch.no_grad()
def compute_rewards(images, prompts, targets, rewards):
    """Calls each of {name: (function, weight)} -> their weighted sum [N], {metric: mean}."""
    total = torch.zeros(len(images))
    metrics = {}
    for name, (function, weight) in rewards.items():
        copies = [image.copy() for image in images]  # a reward may paint over them
        values = list(function(copies, prompts, targets))
        scores = torch.tensor([float(value) for value in values])
        if len(scores) != len(images) or not scores.isfinite().all():
            raise ValueError(f"{name} must give {len(images)} finite numbers: {values}")
        metrics[f"reward/{name}"] = scores.mean().item()
        total += weight * scores
    metrics["reward"] = total.mean().item()
    return total, metrics

def load_prompts(path):
    """Lines `prompt`, `prompt<TAB>target.png` or `# comment` -> prompts, targets or None."""
    path = Path(path or Path(__file__).with_name("prompts.txt"))
    prompts = []
    targets = []
    with input_errors(f"--prompts {path}"):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    for line in lines:
        prompt, tab, target = line.strip().partition("\t")
        if prompt and not prompt.startswith("#"):
            prompts.append(prompt)
            with input_errors(f"--prompts {path}: the target of {prompt!r}"):
                targets.append(Image.open(path.parent / target).convert("RGB") if tab else None)
    if not prompts:
        raise BadInput(f"--prompts {path}: has no prompts")
    return prompts, targets

# --- LoRA (arXiv 2106.09685): the weights that are trained --------------------
class LoRA:
    """W x becomes W x + 2 B A x, where W is frozen, B begins at 0, and 2 is alpha / rank.
    `layers` is a regex for the names of linear layers. `weights` has the adapters A [rank, in] and
    B [out, rank] of each, under peft's names. They are fp32: in bf16, 0.02 + 5e-5, a weight and an
    Adam step, is 0.02. A model can have only one LoRA, as its hooks are never removed."""
    def __init__(self, model, layers, rank):
        self.config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=layers)
        self.enabled = True
        self.weights = {}
        for name, linear in model.named_modules():
            if re.fullmatch(layers, name):
                # Drawn on the CPU, so equal on all GPUs, and as in peft.
                A = nn.Linear(linear.in_features, rank, bias=False).to(DEVICE).weight
                B = nn.Parameter(torch.zeros(linear.out_features, rank, device=DEVICE))
                self.weights[f"base_model.model.{name}.lora_A.weight"] = A
                self.weights[f"base_model.model.{name}.lora_B.weight"] = B
                linear.register_forward_hook(functools.partial(self.add_low_rank, A, B))

    def add_low_rank(self, A, B, linear, inputs, output):
        if self.enabled:
            rows = inputs[0].flatten(0, -2)
            low = rows @ A.to(output).T
            output.view(len(rows), -1).addmm_(low, B.to(output).T, alpha=2)  # in place

    @contextlib.contextmanager
    def disabled(self):
        """Inside `with lora.disabled():` the model is the base model, the reference of the KL."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def save(self, folder):
        os.makedirs(folder, exist_ok=True)
        Path(folder, "adapter_config.json").write_text(json.dumps(self.config))
        safetensors.torch.save_file(self.weights, Path(folder, "adapter_model.safetensors"))

    def load(self, saved):
        if saved.keys() != self.weights.keys():
            raise BadInput("--adapter: its layers are not those of the model")
        for name, weight in self.weights.items():
            weight.data.copy_(saved[name])

def read_adapter(folder, rank):
    """The weights of a peft adapter, which must have this rank, and alpha = 2 * rank as in LoRA."""
    with input_errors(f"--adapter {folder}: cannot be read"):
        config = json.loads(Path(folder, "adapter_config.json").read_text())
        scale = config["lora_alpha"] / config["r"]
        weights = safetensors.torch.load_file(Path(folder, "adapter_model.safetensors"))
    if config["r"] != rank or scale != 2 or config.get("use_rslora"):
        raise BadInput(f"--adapter {folder}: needs --lora_rank {config['r']} and alpha = 2 * rank")
    return weights

# --- What the trainer asks of a model -----------------------------------------
@dataclasses.dataclass(frozen=True)
class Rollout:
    """What the sampler gives: N samples, in the order p0 p0 p1 p1."""
    prompts: list  # N texts
    images: list  # N PIL images
    tokens: torch.Tensor  # [N, T], the drawn codes
    logprobs: torch.Tensor  # [N, T], their log-probs at that time
    nuclei: torch.Tensor | None  # [N, T, V], bool: the codes that top-p kept; None: all

    def part(self, rows):
        values = vars(self).values()
        return Rollout(*[None if value is None else value[rows] for value in values])

class PolicyWrapper(typing.Protocol):
    """To train another model, write a class like this one; examples/toy.py has a small one. The
    tensors of a rollout are on the CPU; those that `compute_logprobs` returns are on DEVICE."""
    policy: nn.Module  # frozen; the trainer adds LoRA to it, and trains nothing else
    lora_layers: str  # a regex for the names of its linear layers that get LoRA

    def generate_with_tracking(self, prompts, group_size, seeds):
        """Steps 1 and 2, keeping what step 5 needs: P prompts, a seed for each -> a Rollout of N
        samples. Equal seeds give equal samples, whatever else is in the batch."""

    def compute_logprobs(self, rollout):
        """Scores the rollout's tokens under the current policy -> log-probs with a gradient,
        entropies without, both [B, T]."""

# --- The trainer --------------------------------------------------------------
def choose_prompts(step, num_prompts, config):
    """Indices of this GPU's P prompts in a step (1, 2, ..), and a seed for each. An epoch is a pass
    over the list. Its order follows from the run's seed, so resuming needs no saved state."""
    indices = []
    seeds = []
    first = (step - 1) * config.batch_size  # in the count of the whole run
    for count in range(first + RANK, first + config.batch_size, WORLD_SIZE):
        epoch, place = divmod(count, num_prompts)
        order = np.random.default_rng([config.seed, epoch]).permutation(num_prompts)
        indices.append(order[place])
        # A million seeds for each value of --seed. The first million is for `save_samples`.
        seeds.append(1_000_000 * (config.seed + 1) + count)
    return indices, seeds

class GRPOTrainer:
    """Trains a PolicyWrapper. rewards: {name: (function, weight)}; targets: images to imitate."""
    def __init__(self, config, wrapper, prompts, rewards, targets=None):
        self.config = config
        self.wrapper = wrapper
        self.prompts = prompts
        self.rewards = rewards
        self.targets = targets or [None] * len(prompts)
        self.history = []  # one row a step
        torch.manual_seed(config.seed)  # the first adapters are equal on all GPUs
        self.lora = LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
        self.optimizer = torch.optim.AdamW(self.lora.weights.values(), config.lr, weight_decay=0.0)
        if config.resume:
            self.load_checkpoint()
        elif config.adapter:
            self.lora.load(read_adapter(config.adapter, config.lora_rank))
        if RANK == 0:  # only one process writes
            default = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            self.out = Path(config.resume or config.out or default)
            # `mkdir` fails if the folder exists, so that two runs never share one.
            with input_errors("--out must be a new folder"):
                self.out.mkdir(parents=True, exist_ok=bool(config.resume))
            self.save_checkpoint()  # so that step 1 can be resumed
            print(f"model: {config.model} on {DEVICE}, files: {self.out}", flush=True)

    def train(self):
        config = self.config
        if RANK == 0 and not self.history:
            self.save_samples(0)  # before training
        for step in range(len(self.history) + 1, config.steps + 1):
            started = time.perf_counter()
            indices, seeds = choose_prompts(step, len(self.prompts), config)
            prompts = [self.prompts[i] for i in indices]
            targets = [self.targets[i] for i in np.repeat(indices, config.group_size)]
            # 1. Sample and 2. decode.
            rollout = self.wrapper.generate_with_tracking(prompts, config.group_size, seeds)
            # 3. Score.
            rewards, metrics = compute_rewards(
                rollout.images, rollout.prompts, targets, self.rewards)
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
        old_logprobs = {}  # {start: [B, T]}
        totals = collections.Counter()  # `update` adds to it
        self.optimizer.zero_grad()  # drops those of an interrupted step
        for iteration in range(config.num_iterations):
            for start in range(0, N, config.micro_batch_size):
                rows = slice(start, start + config.micro_batch_size)
                part = rollout.part(rows)
                ref = self.compute_ref_logprobs(part)  # [B, T]
                new_logprobs, entropy = self.wrapper.compute_logprobs(part)  # [B, T]
                # The trap of bf16: the sampler rounds differently, so with its log-probs the ratio
                # would not begin at 1. The old log-probs are those of the first pass here.
                old = old_logprobs.setdefault(start, new_logprobs.detach())
                loss, metrics = compute_grpo_loss(
                    new_logprobs, old, advantages[rows], config.clip_range, ref, config.kl_coef)
                metrics["entropy"] = entropy.mean().item()
                share = len(new_logprobs) / N
                (loss * share / WORLD_SIZE).backward()
                totals.update({name: share * value for name, value in metrics.items()})
            totals["grad_norm"] += self.update_weights()
        metrics = {name: total / config.num_iterations for name, total in totals.items()}
        # How far the sampler and the trainer disagree: by rounding only, if all is well.
        gap = rollout.logprobs - torch.cat([*old_logprobs.values()]).cpu()
        metrics["sampler_gap_max"] = gap.abs().max().item()
        return metrics

    @torch.no_grad()
    def compute_ref_logprobs(self, rollout):
        """The reference is the policy without its adapters, so that no second model is needed."""
        if self.config.kl_coef == 0:
            return None
        with self.lora.disabled():
            return self.wrapper.compute_logprobs(rollout)[0]

    def update_weights(self):
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
        """Step 6. There is a checkpoint after every step, so that a failure costs at most one."""
        metrics["gpu_gib_max"] = torch.cuda.max_memory_allocated() / 2**30
        row = dict(step=step) | merge_over_gpus(metrics)
        self.history.append(row)
        if RANK > 0:
            return
        if step % self.config.save_every == 0 or step == self.config.steps:
            self.save_samples(step)
        # The whole file anew, as a kill may have cut its last row. JSON has null for NaN.
        rows = [re.sub("NaN|-?Infinity", "null", json.dumps(row)) for row in self.history]
        (self.out / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        self.save_checkpoint()
        names = "step reward reward_std loss kl entropy grad_norm sampler_gap_max".split()
        names += [f"reward/{name}" for name in self.rewards if len(self.rewards) > 1]
        print(*[f"{name} {row[name]:<8.4g}" for name in names if name in row], flush=True)
        if row.get("reward_std") == 0:
            print("All groups had equal rewards: this step taught nothing.", flush=True)

    def save_samples(self, step):
        """Pictures of the first prompts, always from the same seeds, and the adapter they show."""
        prompts = self.prompts[:8]
        rollout = self.wrapper.generate_with_tracking(prompts, 1, range(len(prompts)))
        sheet = diffusers.utils.make_image_grid(rollout.images, 1, len(prompts))
        sheet.save(self.out / f"samples_{step:05d}.png")
        self.lora.save(self.out / f"adapter_{step:05d}")

    def save_checkpoint(self):
        """Written under another name first, so that a kill cannot leave half a checkpoint."""
        state = dict(config=vars(self.config), prompts=self.prompts, history=self.history,
                     adapter=self.lora.weights, optimizer=self.optimizer.state_dict())
        partial = self.out / "checkpoint.part"
        torch.save(state, partial)
        partial.replace(self.out / "checkpoint.pt")

    def load_checkpoint(self):
        state = read_checkpoint(self.config.resume)
        check_resume(state, self.config, self.prompts)
        self.history = state["history"]
        self.lora.load(state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.config.lr  # it may be typed anew

# --- The files and metrics of a run -------------------------------------------
def read_checkpoint(folder):
    """What `save_checkpoint` wrote. With `weights_only` the file cannot run code."""
    with input_errors(f"--resume {folder}: holds no run of this grpo.py"):
        state = torch.load(Path(folder, "checkpoint.pt"), "cpu", weights_only=True)
        Config(**state["config"])  # fails if a setting is unknown
    return state

def check_resume(state, config, prompts):
    """The weights or the order of the prompts depend on these settings. Others may change."""
    for name in "model adapter batch_size lora_rank seed".split():
        if getattr(config, name) != state["config"][name]:
            raise BadInput(f"--{name}: was {state['config'][name]} and cannot change")
    if state["prompts"] != prompts:
        raise BadInput("--prompts: they differ from those of the run")
    if len(state["history"]) >= config.steps:
        raise BadInput(f"--resume {config.resume}: its steps are done; raise --steps")

def merge_over_gpus(metrics):
    """Merges the metrics of all processes: two by their maximum, the others by their mean."""
    rows = [metrics] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(rows, metrics)
    merged = {}
    for name in metrics:
        merge = np.max if name in ("sampler_gap_max", "gpu_gib_max") else np.mean
        merged[name] = merge([row[name] for row in rows]).item()
    return merged

# --- The distribution of the policy -------------------------------------------
def compute_policy_logprobs(logits, nucleus=None):
    """log pi(code), the distribution of the policy, defined once for sampler and trainer.
    logits [.., V], fp32; nucleus [.., V], bool: what top-p leaves, or None -> log-probs [.., V].
    The trap of top-p: pi(code) = softmax(code) / (sum of the softmax over the nucleus). A trainer
    without the division, or with a nucleus of its new weights, has the log-probs of a policy that
    did not sample. So the sampler keeps its nuclei; the reference uses them too (2512.02556)."""
    if nucleus is not None:
        logits = logits.masked_fill(~nucleus.to(logits.device), -math.inf)
    return logits.log_softmax(dim=-1)

def sample_codes(logprobs, uniform):
    """Inverse-CDF sampling: logprobs [N, V], random numbers in 0..1 [N, 1] -> codes [N, 1].
    A sample with random numbers of its own does not depend on what else is in the batch."""
    cdf = logprobs.double().exp().cumsum(1)
    point = uniform * cdf[:, -1:]  # the last value is 1 only up to rounding
    # right=True finds the first code whose cdf is above the point. Its chance is not 0.
    return torch.searchsorted(cdf, point, right=True)

# --- GLM-Image: prompt -> tokens -> image -------------------------------------
# Four facts, from which the code follows:
#   1. It writes two grids: first a draft of some 256 codes, then the large grid, with a code for
#      each 32 x 32 pixels. Both are actions, but only the large one is painted.
#   2. A code is a token id from 0 to V - 1; higher ids are words and marks.
#   3. A token's position is a triple (t, h, w), so that a code knows its row and column.
#   4. The DiT wants each code four times, as 2 x 2: its patches have 16 x 16 pixels.
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
    start = attention_mask.sum(1)[:, None]  # [B, 1]
    for height, width in grids:
        cell = torch.arange(height * width, device=start.device)  # row by row
        row = start + cell // width  # [B, cells]
        column = start + cell % width
        parts.append(torch.stack([start.expand_as(row), row, column]))
        start = start + max(height, width)
    return torch.cat(parts, 2)

def build_bias(position_ids, dtype):
    """What is added to the scores of attention, [B, 1, L + T, L + T]: 0 if token i (row) may see
    token j (column), else -inf. Its rows lie a multiple of 8 apart, or each layer would copy it."""
    real = position_ids[0] >= 0  # padding is at -1
    # Causal. Tokens see tokens; padding sees padding, as a softmax of -inf alone is NaN.
    visible = (real[:, None, :, None] == real[:, None, None, :]).tril()
    bias = torch.where(visible, 0.0, -math.inf).to(dtype)
    length = real.shape[1]
    return nn.functional.pad(bias, (0, -length % 8))[..., :length]

class GLMImageWrapper(PolicyWrapper):
    """A diffusers `GlmImagePipeline`. All linear layers of attention and MLP get LoRA."""
    lora_layers = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate_up|down)_proj"

    def __init__(self, pipe, config):
        self.pipe = pipe
        self.config = config
        self.policy = pipe.vision_language_encoder  # its vision tower is not used here
        self.ar = nn.ModuleList([self.policy.model.language_model, self.policy.lm_head])
        self.dit = nn.ModuleList([pipe.text_encoder, pipe.transformer, pipe.vae])
        self.both = nn.ModuleList([self.ar, self.dit]).requires_grad_(False).eval()
        # PyTorch's RMSNorm is one kernel where that of `transformers` is eight.
        for name, norm in self.ar.named_modules():
            if hasattr(norm, "variance_epsilon"):
                fused = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                fused.weight = norm.weight
                self.ar.set_submodule(name, fused)
        self.offload = config.offload == "on" or (config.offload == "auto" and 0 < GPU_GIB < 60)
        self.both.to("cpu" if self.offload else DEVICE)
        self.homes = [(weight, weight.data) for weight in self.both.parameters()]
        self.on_gpu = None  # ar or dit
        defaults = self.policy.generation_config
        self.temperature = config.temperature or defaults.temperature or 1.0
        self.top_p_filter = transformers.TopPLogitsWarper(config.top_p or defaults.top_p or 1.0)
        # In training mode, transformers computes activations again in the backward pass, and has no
        # KV cache. So `sample` needs eval mode.
        self.policy.activation_checkpointing_enable()
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN (pytorch #196678)
        pipe.set_progress_bar_config(leave=False, disable=None)  # shown in a terminal only
        pipe.vae.enable_slicing()  # four images at 1024 pixels take 28 GiB

    @classmethod
    def from_pretrained(cls, path, config):
        """Loads a hub id or a folder: in bf16 on a GPU, in fp32 on a CPU."""
        with input_errors(f"--model {path}", (OSError, ValueError)):
            pipe = diffusers.GlmImagePipeline.from_pretrained(
                path, dtype=torch.bfloat16 if CUDA else torch.float32,
                low_cpu_mem_usage=diffusers.utils.is_accelerate_available())
        return cls(pipe, config)

    def move_to_gpu(self, part):
        """With offloading, `ar` and `dit` take turns on the GPU. What is trained would be lost."""
        if self.offload and part is not self.on_gpu:
            self.on_gpu = None  # so that an interrupted move begins anew
            for weight, home in self.homes:
                weight.data = home  # it is frozen, so nothing is copied back
            torch.cuda.empty_cache()  # its fragments may leave no room
            part.to(DEVICE)
            self.on_gpu = part

    def encode(self, prompts):
        """-> ids [B, L], position_ids [3, B, L + T], bias [B, 1, L + T, L + T]."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in prompts]
        batch = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=dict(
                target_h=self.config.height, target_w=self.config.width,
                padding=True, padding_side="left")).to(DEVICE)
        # image_grid_thw has rows (1, height, width): each prompt's large grid, then its draft.
        large, draft = batch.image_grid_thw[:2, 1:].tolist()
        position_ids = build_position_ids(batch.attention_mask, [draft, large])
        return batch.input_ids, position_ids, build_bias(position_ids, self.policy.dtype)

    def forward(self, ids, position_ids, bias, cache=None):
        """ids [B, n] -> logits / temperature [B, n, V]. `self.policy` would ignore position_ids."""
        language_model, lm_head = self.ar
        hidden = language_model(
            input_ids=ids, position_ids=position_ids, attention_mask=bias, past_key_values=cache,
            use_cache=False).last_hidden_state  # but a cache that is given is used
        codebook_size = self.pipe.transformer.config.prior_vq_quantizer_codebook_size
        return lm_head(hidden)[..., :codebook_size].float() / self.temperature

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """Step 1. P prompts, P seeds -> tokens, logprobs [N, T], nuclei [N, T, V], on the CPU."""
        self.move_to_gpu(self.ar)
        self.policy.eval()
        ids, position_ids, bias = self.encode(np.repeat(prompts, group_size).tolist())
        L = ids.shape[1]
        T = position_ids.shape[2] - L
        rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = torch.cat([torch.rand(group_size, T, generator=rng) for rng in rngs]).to(DEVICE)
        # The first pass reads the prompts into the cache, each later one the codes just drawn.
        cache = transformers.StaticCache(self.policy.config.text_config, L + T)
        place = slice(L)
        columns = []
        for i in self.pipe.progress_bar(range(T)):
            logits = self.forward(ids, position_ids[..., place], bias[:, :, place], cache)
            nucleus = self.top_p_filter(None, logits[:, -1]).isfinite()  # others are -inf
            all_logprobs = compute_policy_logprobs(logits[:, -1], nucleus)
            ids = sample_codes(all_logprobs, uniform[:, i:i + 1])  # [N, 1]
            logprobs = all_logprobs.gather(1, ids)
            columns.append((ids.cpu(), logprobs.cpu(), nucleus[:, None].cpu()))
            place = slice(L + i, L + i + 1)
        return [torch.cat(column, 1) for column in zip(*columns)]

    def compute_logprobs(self, rollout):
        """Teacher forcing: one pass -> log-probs with a gradient, entropies without, [B, T]."""
        self.move_to_gpu(self.ar)
        ids, position_ids, bias = self.encode(rollout.prompts)
        tokens = rollout.tokens.to(DEVICE)
        self.policy.train()  # there is no dropout
        logits = self.forward(torch.cat([ids, tokens], 1), position_ids, bias)
        self.policy.eval()
        logits = logits[:, ids.shape[1] - 1:-1]  # [B, T, V]: each place predicts the next code
        all_logprobs = compute_policy_logprobs(logits, rollout.nuclei)
        entropy = torch.distributions.Categorical(logits=all_logprobs.detach()).entropy()
        return all_logprobs.gather(2, tokens[:, :, None]).squeeze(2), entropy

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds, **pipe_inputs):
        """Step 2. P prompts and seeds, tokens [N, T] -> N images. A group shares its noise
        (DanceGRPO, 2505.07818): its rewards differ because its tokens do, not by luck."""
        self.move_to_gpu(self.dit)
        config = self.config
        h = config.height // 32
        w = config.width // 32
        codes = tokens[:, -h * w:].to(DEVICE).view(-1, h, w)  # without the draft
        codes = codes.repeat_interleave(2, 1).repeat_interleave(2, 2)  # each as 2 x 2
        groups = codes.view(len(prompts), -1, 4 * h * w)  # [P, G, 4 * h * w]
        images = []
        for prompt, seed, group in zip(prompts, seeds, groups, strict=True):
            for part in group.split(config.micro_batch_size):
                # ~seed is -seed - 1: the noise has other random numbers than the tokens.
                noise = [torch.Generator().manual_seed(~seed) for _ in part]
                images += self.pipe(  # given codes, it skips its AR half
                    [prompt] * len(part), prior_token_ids=part, generator=noise,
                    height=config.height, width=config.width, guidance_scale=config.guidance,
                    num_inference_steps=config.decode_steps, **pipe_inputs).images
        return images

    def generate_with_tracking(self, prompts, group_size, seeds):
        tokens, logprobs, nuclei = self.sample(prompts, group_size, seeds)
        images = self.decode(prompts, tokens, seeds)
        return Rollout(np.repeat(prompts, group_size).tolist(), images, tokens, logprobs, nuclei)

# --- The command line ---------------------------------------------------------
def parse_args(argv=None, **defaults):
    """-> Config. Each setting comes from the first of these that has it: what is typed; the run to
    resume, or else grpo.json in the model's folder; `defaults`; Config."""
    parser = transformers.HfArgumentParser(
        Config, allow_abbrev=False, usage="python grpo.py [--group-size 8 ..]")
    parser.set_defaults(**defaults)
    typed, _ = parser.parse_known_args(argv)  # to learn --resume, --model
    path = Path(typed.model, "grpo.json")
    if typed.resume is not None:
        parser.set_defaults(**read_checkpoint(typed.resume)["config"] | dict(out=None))
    elif path.is_file():
        with input_errors(path):
            parser.set_defaults(**json.loads(path.read_text()))
    config = Config(**vars(parser.parse_args(argv)))
    check_settings(config)
    return config

def check_settings(config):
    # Counts are at least 1 and other numbers at least 0, with these exceptions.
    lowest = dict(group_size=2, seed=0, temperature=0.01, top_p=0.01, max_grad_norm=1e-9)
    for name, kind in inspect.get_annotations(Config).items():
        value = getattr(config, name)
        if isinstance(value, (int, float)):
            low = lowest.get(name, 1 if kind is int else 0)
            high = 1 if name == "top_p" else 1e9
            if not low <= value <= high:
                raise BadInput(f"--{name} {value}: must be from {low} to {high:g}")
    if config.width % 32 or config.height % 32:
        raise BadInput("--width and --height must be multiples of 32")
    if config.batch_size % WORLD_SIZE:
        raise BadInput(f"--batch_size must be a multiple of the number of GPUs, {WORLD_SIZE}")

def check_before_loading(config, prompts, targets, rewards):
    """What can be checked before a model is loaded, which may take minutes."""
    if "color" in rewards:
        for prompt in prompts:
            find_color(prompt)  # or raises
    if "mse" in rewards and None in targets:
        raise BadInput("--reward mse: every line of --prompts needs a target")
    if config.resume:
        check_resume(read_checkpoint(config.resume), config, prompts)
    elif config.adapter is not None:
        read_adapter(config.adapter, config.lora_rank)
    if config.out and (config.resume or os.path.exists(config.out)):
        raise BadInput(f"--out {config.out}: must be a new folder; a resumed run has its own")

def main(argv=None, load_model=GLMImageWrapper.from_pretrained,
         load_prompts=load_prompts, load_rewards=load_rewards, **defaults):
    """What follows `argv` is for programs that train other models: examples/toy.py, edit.py."""
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        torch.set_num_threads(1)  # more are hardly faster here
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")  # with NCCL, one failure hangs all
    try:
        config = parse_args(argv, **defaults)
        prompts, targets = load_prompts(config.prompts)
        rewards = load_rewards(config.reward)
        check_before_loading(config, prompts, targets, rewards)
        wrapper = load_model(config.model, config)
        GRPOTrainer(config, wrapper, prompts, rewards, targets).train()
    except BadInput as error:
        print("grpo.py: error:", *str(error).split(), file=sys.stderr)  # on one line
        sys.exit(2)
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()

if __name__ == "__main__":
    main()
