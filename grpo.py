"""grpo.py: GRPO for GLM-Image in one file. `python grpo.py` trains it, or a toy on a laptop.
GLM-Image draws in two halves: an autoregressive transformer (AR, 9 B) writes visual tokens, and a
diffusion transformer (DiT, 7 B) paints them. Here the AR half learns what to draw:

    prompt ---> AR ---- tokens ---> DiT + VAE ---> image ---> reward ---> advantage
              trained                frozen              any function    z-score in the group
                 ^--------------- update: a clipped policy gradient <---------+

A step of GRPO (DeepSeekMath, arXiv 2402.03300) is a turn of the loop in `GRPOTrainer.train`:
  1. sample   the policy, AR + LoRA, draws G token sequences per prompt; each token is an action
  2. decode   the frozen DiT paints them; all G of a prompt, a group, start from the same noise
  3. score    any function turns images into numbers; no gradient passes through a picture
  4. compare  advantage = (reward - mean) / std of its group; the mean replaces a value network
  5. update   make tokens of better images likelier, within PPO's clip, near the base model (KL)
  6. log      metrics, pictures of fixed prompts, a checkpoint
Axes:  P prompts, G samples of each, N = P * G in the order p0 p0 .. p1 p1 .., B in a micro-batch,
       L prompt tokens, padded on the left, T image tokens of V codes, equally many for all: no mask
Written for torch 2.11 to 2.15, transformers 5.23 and diffusers 0.42."""
import argparse, contextlib, dataclasses, functools, inspect, json, math, os, re, runpy, sys, time
from pathlib import Path
import diffusers, safetensors.torch, torch, tqdm, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageColor
from torch import nn

RANK = int(os.environ.get("RANK", 0))  # torchrun numbers its processes, one a GPU
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
GPU_GIB = torch.cuda.get_device_properties(0).total_memory / 2**30 if CUDA else 0
progress = functools.partial(tqdm.tqdm, leave=False, disable=None)  # shown in a terminal only

# --- Settings: each field is a flag, and --help shows its comment ---
@dataclasses.dataclass
class Config:
    model: str = "zai-org/GLM-Image" if GPU_GIB >= 60 else "tiny"  # hub id, folder, or the toy
    adapter: str = None  # folder of adapters to begin with: runs/mine/adapter_00010
    prompts: str = None  # text file, one prompt a line; None: prompts.txt beside this file
    reward: str = "color"  # color, mse or file.py:function; weighted: color=1,mine.py:sharp=.2
    steps: int = 300  # rollouts, with their updates
    group_size: int = 4  # images per prompt
    batch_size: int = 8  # prompts per step; several GPUs share them
    micro_batch_size: int = 1  # images that a GPU decodes or updates at a time
    lr: float = 5e-5  # learning rate of AdamW
    num_iterations: int = 1  # updates per rollout; above 1, the clip matters
    clip_range: float = 0.2  # ratios are clipped to 1 - clip_range .. 1 + clip_range
    kl_coef: float = 0.01  # price of leaving the base model; 0 computes no KL
    max_grad_norm: float = 1.0  # longer gradients are shortened to this
    lora_rank: int = 32  # rank of the adapters
    width: int = 512  # pixels, a multiple of 32
    height: int = 512  # pixels, a multiple of 32
    temperature: float = None  # of the policy; None: the model's
    top_p: float = None  # smallest set of codes with this probability; None: the model's
    decode_steps: int = 20  # denoising steps
    guidance: float = 1.5  # classifier-free guidance of the DiT; 1 is off
    offload: str = "auto"  # on: one half on the GPU at a time; off; auto: on below 60 GiB
    save_every: int = 10  # steps between saved pictures and adapters
    seed: int = 0  # of everything random
    out: str = None  # a new folder for the run; None: runs/<date-time>
    resumed = False  # not a setting: see from_run

    def __post_init__(self):  # it fails early, before a model is loaded
        lowest = dict(
            steps=1, group_size=2, batch_size=1, micro_batch_size=1, lr=0, num_iterations=1,
            clip_range=0, kl_coef=0, max_grad_norm=1e-9, lora_rank=1, width=32, height=32,
            temperature=0.01, top_p=0.01, decode_steps=1, guidance=0, save_every=1, seed=0)
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:  # a NaN fails
                raise ValueError(f"--{name} {value}: must be {low} or more")
        if self.top_p is not None and self.top_p > 1:
            raise ValueError(f"--top_p {self.top_p}: must be 1 at most")
        if self.width % 32 or self.height % 32:
            raise ValueError("--width, --height: must be multiples of 32")
        if self.batch_size % WORLD_SIZE:
            raise ValueError(f"--batch_size must be a multiple of {WORLD_SIZE}, the GPUs")
        if self.offload not in ("auto", "on", "off"):
            raise ValueError(f"--offload {self.offload}: must be auto, on or off")
        self.out = self.out or time.strftime("runs/%Y%m%d-%H%M%S")

    @classmethod
    def from_run(cls, folder, **changes):
        """The settings of a run, with these changes. A trainer with them continues it."""
        saved = read_checkpoint(folder)["config"]
        for name in ("model", "seed", "lora_rank", "adapter", "out"):
            if name in changes and changes[name] != saved.get(name):
                raise ValueError(f"--{name}: the run keeps {saved.get(name)}")
        config = cls(**saved | changes | dict(out=str(folder)))
        config.resumed = True
        return config

# --- The maths: pure functions of tensors ---
def compute_advantages(rewards, group_size):
    """A = (r - mean of its group) / (std + 1e-6). Rewards [N], by group -> [N], fp32."""
    if group_size < 2:
        raise ValueError("a group of one has nothing to compare")
    groups = torch.as_tensor(rewards).double().view(-1, group_size)  # [P, G]
    advantages = groups - groups.mean(1, keepdim=True)  # in fp64 equal rewards give 0
    advantages /= groups.std(1, keepdim=True) + 1e-6  # Dr. GRPO (2503.20783) leaves this out
    return advantages.flatten().float()

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2,
                      ref_logprobs=None, kl_coef=0.0):
    """PPO's clipped surrogate (1707.06347) plus a KL to the reference -> loss, {metric: float}.
        ratio = exp(new - old), clipped to 1 - clip_range .. 1 + clip_range
        loss  = -mean(min(ratio * A, clip(ratio) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1    Schulman's estimate of KL(new, ref)
    k3 expects samples of `new`. In later updates of a rollout they are older: it is biased.
    Log-probs are [N, T], or [N] (an action each), advantages [N]. Only new_logprobs get a gradient.
    Why the loss may be 0: with one update per rollout every ratio is 1 and policy_loss is -mean(A),
    which is 0 over whole groups. Its gradient is not: -mean(A * grad(new)), as in REINFORCE."""
    if advantages.shape != new_logprobs.shape[:1]:  # [N, T] would broadcast silently
        raise ValueError(f"advantages must be [N], one a row: {advantages.shape}")
    new = new_logprobs.float().reshape(len(advantages), -1)  # [N, T], or [N, 1]
    old = old_logprobs.detach().reshape_as(new)
    A = advantages.detach().to(new)[:, None]  # [N, 1]
    ratio = (new - old).exp()
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * A
    # Where a ratio is past the clip and A would push it further, the min is constant: no gradient.
    loss = -torch.min(unclipped, clipped).mean()  # a loss of your own goes here
    metrics = dict(policy_loss=loss, ratio_mean=ratio.mean(), ratio_max=ratio.max(),
                   clip_frac=(clipped < unclipped).float().mean())  # share stopped by the clip
    if ref_logprobs is not None:
        delta = ref_logprobs.detach().reshape_as(new) - new
        delta = delta.clamp(max=20)  # an outlier would overflow; it gets no gradient
        metrics["kl"] = (torch.expm1(delta) - delta).mean()  # expm1 is accurate near 0
        loss = loss + kl_coef * metrics["kl"]  # `+=` would change policy_loss
    metrics["loss"] = loss
    return loss, {name: value.item() for name, value in metrics.items()}

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
    """The inverse CDF: logprobs [N, V], random numbers in 0..1 [N, 1] -> codes [N, 1]. With
    `torch.multinomial` a sample would depend on what else is in the batch."""
    mass = logprobs.double().exp().cumsum(1)
    point = uniform * mass[:, -1:]  # the last mass is 1 up to rounding
    return torch.searchsorted(mass, point, right=True)  # the first code with mass > point

# --- The trainer: the loop, then what a turn of it consists of ---
class GRPOTrainer:
    """GRPO on `wrapper.policy`. rewards: {name: (function, weight)}; targets: images to imitate."""
    def __init__(self, config, wrapper, prompts, rewards=None, targets=None):
        self.config = config
        self.wrapper = wrapper
        self.prompts = prompts
        self.targets = targets or [None] * len(prompts)
        self.rewards = rewards or load_rewards(config.reward)
        self.out = Path(config.out)
        self.history = []  # a row of metrics per step
        torch.manual_seed(config.seed)  # equal adapters on all GPUs
        self.lora = LoRA(wrapper.policy, wrapper.TARGETS, config.lora_rank)
        self.optimizer = torch.optim.AdamW(self.lora.weights.values(), config.lr, weight_decay=0.0)
        if config.resumed:
            self.load_checkpoint()
        elif config.adapter:
            self.lora.load(config.adapter)

    def train(self):
        first = len(self.history) + 1
        if RANK == 0 and first == 1:
            refuse_run(self.out)
            self.save_samples(0)  # before training
        for step in range(first, self.config.steps + 1):
            started = time.perf_counter()
            rollout, metrics = self.rollout(step)  # 1. sample, 2. decode, 3. score
            advantages = compute_advantages(rollout["rewards"], self.config.group_size)
            rollout["advantages"] = advantages  # 4. compare
            metrics |= self.train_step(rollout)  # 5. update
            metrics["seconds"] = time.perf_counter() - started
            self.log(step, metrics)  # 6. log

    def rollout(self, step):
        """Steps 1 to 3 for this GPU's share of the prompts -> {key: N values}, metrics."""
        config = self.config
        start = (step - 1) * config.batch_size  # counted from step 1 on
        counts = range(start, start + config.batch_size)[RANK::WORLD_SIZE]
        n = len(self.prompts)
        chosen = []
        for count in counts:  # prompts go round in laps, each in another random order
            lap = np.random.default_rng([config.seed, count // n]).permutation(n)
            chosen.append(lap[count % n])
        seeds = [config.seed * 1_000_003 + count for count in counts]  # the same if resumed
        group_prompts = [self.prompts[i] for i in chosen]  # P
        rollout = self.wrapper.generate_with_tracking(group_prompts, config.group_size, seeds)
        rows = np.repeat(chosen, config.group_size)  # N: p0 p0 .. p1 p1 ..
        prompts = [self.prompts[i] for i in rows]
        targets = [self.targets[i] for i in rows]
        rewards, metrics = compute_rewards(rollout["images"], prompts, targets, self.rewards)
        metrics["reward_std"] = rewards.view(-1, config.group_size).std(1).mean().item()
        return rollout | dict(prompts=prompts, rewards=rewards), metrics

    def train_step(self, rollout):
        """Step 5: one rollout -> metrics. Micro-batches only save memory."""
        config = self.config
        batches = list(split_rollout(rollout, config.micro_batch_size))
        if config.kl_coef > 0:
            self.add_ref_logprobs(batches)
        self.optimizer.zero_grad()  # Ctrl-C may have left some
        rows = []
        updates = []
        for _ in range(config.num_iterations):
            for batch in batches:
                new_logprobs, entropy = self.wrapper.compute_logprobs(
                    batch["prompts"], batch["tokens"], batch.get("nuclei"))  # [B, T] each
                # The trap of bf16: sampler and trainer round differently, their ratio is not 1.
                # So the old log-probs are not the sampler's, but those of the first pass here.
                old_logprobs = batch.setdefault("old_logprobs", new_logprobs.detach())
                loss, metrics = compute_grpo_loss(
                    new_logprobs, old_logprobs, batch["advantages"], clip_range=config.clip_range,
                    ref_logprobs=batch.get("ref_logprobs"), kl_coef=config.kl_coef)
                share = len(new_logprobs) / len(rollout["tokens"]) / WORLD_SIZE
                (loss * share).backward()
                gap = batch["logprobs"] - old_logprobs
                metrics["sampler_gap_max"] = gap.abs().max().item()
                metrics["entropy"] = entropy.mean().item()
                rows += [metrics] * len(new_logprobs)  # once a sample, for the mean
            updates.append(self.update_weights())
        return merge_rows(rows) | merge_rows(updates)

    @torch.no_grad()
    def add_ref_logprobs(self, batches):
        """The reference is the policy with its adapters off: no second model is needed."""
        with self.lora.disabled():
            for batch in batches:
                batch["ref_logprobs"], _ = self.wrapper.compute_logprobs(
                    batch["prompts"], batch["tokens"], batch.get("nuclei"))

    def update_weights(self):
        weights = list(self.lora.weights.values())
        if WORLD_SIZE > 1:
            for weight in weights:
                torch.distributed.all_reduce(weight.grad)  # the sum of all shares
        grad_norm = nn.utils.clip_grad_norm_(weights, self.config.max_grad_norm)
        if grad_norm.isfinite():  # a NaN would stay in Adam's moments
            self.optimizer.step()
        self.optimizer.zero_grad()
        return dict(grad_norm=grad_norm.item())

    def log(self, step, metrics):
        """Step 6. The checkpoint comes last: a crash before it loses this step only."""
        metrics["gpu_gib_max"] = torch.cuda.max_memory_allocated() / 2**30
        row = dict(step=step) | metrics  # of this GPU's images
        self.history.append(row)
        if RANK > 0:
            return
        if step % self.config.save_every == 0 or step == self.config.steps:
            self.save_samples(step)
        lines = [json.dumps(row) + "\n" for row in self.history]
        (self.out / "metrics.jsonl").write_text("".join(lines))  # whole, as a kill may tear a line
        self.save_checkpoint()
        keys = "step reward reward_std loss kl entropy grad_norm sampler_gap_max".split()
        print(*[f"{key} {row[key]:<8.4g}" for key in keys if key in row], flush=True)

    def save_samples(self, step):  # of fixed prompts and seeds
        self.lora.save(self.out / f"adapter_{step:05d}")  # makes the folder
        prompts = self.prompts[:8]
        images = self.wrapper.generate_with_tracking(prompts, 1, range(len(prompts)))["images"]
        row = diffusers.utils.make_image_grid(images, 1, len(images))
        row.save(self.out / f"samples_{step:05d}.png")

    def save_checkpoint(self):
        """Written aside, then renamed: a kill leaves the one of the step before."""
        state = dict(config=dataclasses.asdict(self.config), history=self.history,
                     adapter=self.lora.weights, optimizer=self.optimizer.state_dict())
        unfinished = self.out / "checkpoint.part"
        torch.save(state, unfinished)
        unfinished.replace(self.out / "checkpoint.pt")

    def load_checkpoint(self):
        state = read_checkpoint(self.out)
        self.history = state["history"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.config.lr  # --lr may differ
        for name, weight in self.lora.weights.items():
            weight.data.copy_(state["adapter"][name])

def split_rollout(rollout, size):
    """{key: N values} -> micro-batches. A key whose value is None is left out."""
    for start in range(0, len(rollout["tokens"]), size):
        yield {key: values[start:start + size]
               for key, values in rollout.items() if values is not None}

def merge_rows(rows):
    """Metrics of samples -> one row: the maximum if a name ends in _max, else the mean."""
    merged = {}
    for key in rows[0]:
        merge = np.max if key.endswith("_max") else np.mean
        merged[key] = float(merge([row[key] for row in rows]))
    return merged

def refuse_run(folder):  # one without a checkpoint, after a failure in step 1, may be used again
    if Path(folder, "checkpoint.pt").exists():
        raise ValueError(f"--out {folder} holds a run: name another, or --resume (from_run) it")

def read_checkpoint(folder):
    """What save_checkpoint wrote. `weights_only` runs no code, `mmap` reads what is used."""
    try:
        state = torch.load(Path(folder, "checkpoint.pt"), "cpu", weights_only=True, mmap=True)
        assert "config" in state
    except Exception as error:
        raise ValueError(f"{folder} holds no run: {error!r}")
    return state

# --- Rewards ---
# A reward is any function that gives each image a finite number, higher is better; only
# differences inside a group count. Yours may be this, for `--reward mine.py:bright`:
#     def bright(images, prompts, targets):  # PIL images, texts, PIL images to imitate or None
#         return [image.convert("L").resize((1, 1)).getpixel((0, 0)) for image in images]
COLORS = {name: torch.tensor(ImageColor.getrgb(name)) / 255  # [3], in 0..1
          for name in "red orange yellow green blue purple white black".split()}

def pil_to_tensor(images):
    """PIL images of one size -> [N, 3, H, W], fp32 in 0..1."""
    pixels = np.stack([image.convert("RGB") for image in images])
    return torch.tensor(pixels).movedim(3, 1) / 255

def reward_color(images, prompts, targets=None):
    """1 - |mean colour - the first colour that the prompt names|, 0..1."""
    scores = []
    for mean_color, prompt in zip(pil_to_tensor(images).mean((2, 3)), prompts):
        named = [word for word in re.findall(r"\w+", prompt.lower()) if word in COLORS]
        if not named:
            raise ValueError(f"--reward color: there is no colour word in {prompt!r}")
        scores.append(1 - F.l1_loss(mean_color, COLORS[named[0]]))
    return scores

def reward_mse(images, prompts, targets):
    """Minus the mean squared error to the target, which is resized to the image."""
    if None in targets:
        raise ValueError("--reward mse: every line of --prompts needs a target")
    targets = [target.resize(images[0].size) for target in targets]
    return -(pil_to_tensor(images) - pil_to_tensor(targets)).square().mean((1, 2, 3))

REWARDS = {"color": reward_color, "mse": reward_mse}

def load_rewards(text):
    """Text such as color=1,mine.py:sharp=.2 -> {name: (function, weight)}; no weight means 1."""
    rewards = {}
    run_once = functools.cache(run_file)  # for two rewards of a file
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        file, _, wanted = name.rpartition(":")
        weight = float(weight or 1)
        if os.path.isfile(file):
            function = run_once(file).get(wanted)
        else:
            function = REWARDS.get(name)
        if function is None or name in rewards or not math.isfinite(weight):
            raise ValueError(f"--reward {part}: not found, twice, or its weight is not finite")
        rewards[name] = function, weight
    return rewards

def run_file(path):  # `main` lets RuntimeErrors through: bugs are shown
    try:
        return runpy.run_path(path)
    except Exception as error:
        raise RuntimeError(f"{path} could not be run") from error

@torch.no_grad()
def compute_rewards(images, prompts, targets, rewards):
    """{name: (function, weight)} -> the weighted sum [N], means {metric: float}."""
    total = torch.zeros(len(images))
    metrics = {}
    for name, (function, weight) in rewards.items():
        copies = [image.copy() for image in images]  # a reward may paint over its images
        values = list(function(copies, prompts, targets))
        scores = torch.tensor([math.nan if value is None else float(value) for value in values])
        if len(scores) != len(images) or not scores.isfinite().all():  # NaN would spread
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
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        prompt, _, target = line.strip().partition("\t")
        if prompt and not prompt.startswith("#"):
            prompts.append(prompt)
            targets.append(Image.open(path.parent / target).convert("RGB") if target else None)
    if not prompts:
        raise ValueError(f"--prompts {path}: empty")
    return prompts, targets

# --- LoRA (arXiv 2106.09685): the weights that are trained ---
class LoRA:
    """W x becomes W x + 2 B A x: W is frozen, B begins at 0, and 2 is alpha / rank.
    `weights` holds A [rank, in] and B [out, rank] of the linear layers whose names fit `targets`,
    in fp32: a bf16 weight of 0.02 plus an Adam step of 5e-5 is the same bf16 weight."""
    def __init__(self, model, targets, rank):
        if hasattr(model, "lora"):
            model.lora.enabled = False  # of an earlier trainer
        model.lora = self
        self.config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=targets)
        self.enabled = True
        self.weights = {}  # under peft's names
        for name, linear in model.named_modules():
            if re.fullmatch(targets, name):
                A = nn.Linear(linear.in_features, rank, bias=False).to(DEVICE).weight
                B = nn.Parameter(torch.zeros(linear.out_features, rank, device=DEVICE))
                self.weights[f"base_model.model.{name}.lora_A.weight"] = A
                self.weights[f"base_model.model.{name}.lora_B.weight"] = B
                linear.register_forward_hook(functools.partial(self.add_low_rank, A, B))

    def add_low_rank(self, A, B, linear, inputs, output):
        """A hook: the layer's output plus 2 B A x. Without a return the output stays."""
        if self.enabled:
            low = inputs[0] @ A.to(output).T
            return torch.add(output, low @ B.to(output).T, alpha=2)  # one kernel for both

    @contextlib.contextmanager
    def disabled(self):  # inside `with lora.disabled():` the model is the reference
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def save(self, folder):  # as peft and transformers' load_adapter read it
        os.makedirs(folder, exist_ok=True)
        Path(folder, "adapter_config.json").write_text(json.dumps(self.config))
        safetensors.torch.save_file(self.weights, Path(folder, "adapter_model.safetensors"))

    def load(self, folder):  # a KeyError or a RuntimeError if it does not fit
        saved = safetensors.torch.load_file(Path(folder, "adapter_model.safetensors"))
        for name, weight in self.weights.items():
            weight.data.copy_(saved[name].view_as(weight))  # copy_ alone would broadcast

# --- GLM-Image: prompt -> tokens -> image. Five facts, from which the code follows: ---
#   1. It writes two grids: first a draft of about 16 x 16 codes, then the large grid, with a code
#      for each 32 x 32 pixels. Both are actions, but only the large one is painted.
#   2. A code is a token id from 0 to V - 1; ids above are image marks, padding and words.
#   3. A token's position is a triple (t, h, w), so that a code knows its row and column.
#   4. The DiT wants each code four times, as 2 x 2: its patches have 16 x 16 pixels.
#   5. Of the prompt the DiT reads only words in quotation marks, letter by letter (glyphs).
def build_position_ids(attention_mask, grids):
    """Positions (t, h, w): mask [B, L], (h, w) of grids -> [3, B, L + T]. In text t = h = w; a
    grid holds t still, counts rows in h and columns in w; the next starts max(h, w) further on:
              pad  prompt    1 x 2   2 x 2
         t:   -1   0  1  2   3  3    5  5  5  5
         h:   -1   0  1  2   3  3    5  5  6  6
         w:   -1   0  1  2   3  4    5  6  5  6
    The trap: `transformers` makes these in `generate` only. A plain forward pass takes the image
    for a line of text, without any error, and every log-prob is wrong."""
    parts = [(attention_mask.cumsum(1) - 1).expand(3, -1, -1)]  # text [3, B, L]
    start = attention_mask.sum(1, keepdim=True)
    for h, w in grids:
        cell = torch.arange(h * w, device=start.device)  # row by row
        row = start + cell // w  # [B, h * w]
        column = start + cell % w
        parts.append(torch.stack([start.expand_as(row), row, column]))
        start = start + max(h, w)
    return torch.cat(parts, 2)

class Halves:
    """`ar` samples and is trained, `dit` paints. With offloading they take turns on the GPU, and
    wait on the host. The vision tower, which reads pictures, stays on the host."""
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
            self.on_gpu = None  # if this fails, the next call begins anew
            self.both.to("cpu")
            torch.cuda.empty_cache()  # or fragments may leave no room for this half
            half.to(DEVICE)
            self.on_gpu = half

class GLMImageWrapper:
    """A `GlmImagePipeline` as a policy. A model of your own needs `policy` (gets the adapters),
    `TARGETS` (a regex for its linear layers), `compute_logprobs` and `generate_with_tracking`."""
    TARGETS = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate_up|down)_proj"

    def __init__(self, pipe, config):
        self.pipe = pipe
        self.config = config
        self.halves = Halves(pipe, config.offload)
        self.policy = pipe.vision_language_encoder  # the AR half
        self.policy.activation_checkpointing_enable()  # see `forward`
        own = self.policy.generation_config
        self.temperature = config.temperature or own.temperature or 1.0
        self.top_p_filter = transformers.TopPLogitsWarper(config.top_p or own.top_p or 1.0)
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN (pytorch #196678)
        pipe.set_progress_bar_config(disable=True)
        pipe.vae.enable_slicing()  # image by image: four at 1024 pixels take 28 GiB
        pipe.transformer.rope.register_forward_hook(move_tables)

    @classmethod
    def from_pretrained(cls, path, config):
        if path == "tiny":
            torch.set_num_threads(1)  # the toy is slower with two
            return cls(make_tiny_pipeline(config.seed), config)
        return cls(diffusers.GlmImagePipeline.from_pretrained(path, dtype=torch.bfloat16), config)

    def encode(self, prompts):
        """-> ids [B, L], position_ids [3, B, L + T], and bias [B, 1, L + T, L + T], which attention
        adds to its scores: 0 where token i (row) may see token j (column), else -inf."""
        texts = [dict(type="text", text=prompt) for prompt in prompts]
        chats = [[dict(role="user", content=[text])] for text in texts]
        inputs = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=dict(
                target_h=self.config.height, target_w=self.config.width,
                padding=True, padding_side="left")).to(DEVICE)
        large, draft = inputs.image_grid_thw[:2, 1:].tolist()  # (h, w), equal for all prompts
        position_ids = build_position_ids(inputs.attention_mask, [draft, large])
        real = position_ids[0] >= 0  # padding has -1
        # Padding sees padding: the softmax of a row of -inf alone would be NaN.
        alike = real[:, :, None] == real[:, None]
        bias = alike.tril()[:, None].to(self.policy.dtype).log()  # True -> 0, False -> -inf
        return inputs.input_ids, position_ids, bias

    def forward(self, ids, position_ids, bias, cache=None):
        """ids [B, n] -> logits / temperature [B, n, V]. `policy` would make its own positions."""
        language_model, lm_head = self.halves.ar
        language_model.train(torch.is_grad_enabled())  # computes activations twice, to save memory
        hidden = language_model(
            input_ids=ids, position_ids=position_ids, attention_mask=bias, past_key_values=cache,
            use_cache=False).last_hidden_state  # False: no cache but the given one
        codebook_size = self.pipe.transformer.config.prior_vq_quantizer_codebook_size
        return lm_head(hidden)[..., :codebook_size].float() / self.temperature

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """Step 1. P prompts, a seed for each -> tokens, logprobs [N, T], nuclei [N, T, V], bool.
        All N are drawn at once, so memory grows with --batch-size and --group-size."""
        self.halves.move_to_gpu(self.halves.ar)
        ids, position_ids, bias = self.encode(np.repeat(prompts, group_size).tolist())
        L = ids.shape[1]
        T = position_ids.shape[2] - L
        rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = torch.cat([torch.rand(group_size, T, generator=rng) for rng in rngs]).to(DEVICE)
        cache = transformers.StaticCache(self.policy.config.text_config, L + T)
        # First all prompts are fed, then code after code; the cache keeps all.
        fed = ids
        columns = slice(0, L)
        steps = []
        for i in progress(range(T), "sample"):
            logits = self.forward(fed, position_ids[..., columns], bias[:, :, columns], cache)
            nucleus = self.top_p_filter(None, logits[:, -1]).isfinite()  # it sets others to -inf
            all_logprobs = compute_policy_logprobs(logits[:, -1], nucleus)  # [N, V]
            codes = sample_codes(all_logprobs, uniform[:, i:i + 1])  # [N, 1]
            logprobs = all_logprobs.gather(1, codes)
            steps.append((codes, logprobs, nucleus[:, None].cpu()))  # nuclei are large
            fed = codes
            columns = slice(L + i, L + i + 1)
        return [torch.cat(parts, 1) for parts in zip(*steps)]  # tokens, logprobs, nuclei

    def compute_logprobs(self, prompts, tokens, nuclei):
        """Teacher forcing: tokens [B, T], nuclei [B, T, V] as sampled, or None for all codes
        -> log-probs with a gradient, entropy without, both [B, T]."""
        self.halves.move_to_gpu(self.halves.ar)
        ids, position_ids, bias = self.encode(prompts)
        tokens = tokens.to(DEVICE)
        logits = self.forward(torch.cat([ids, tokens], 1), position_ids, bias)
        self.halves.ar.eval()  # as the stock pipeline needs it, for its cache
        logits = logits[:, ids.shape[1] - 1:-1]  # [B, T, V]: place i predicts code i + 1
        all_logprobs = compute_policy_logprobs(logits, nuclei)
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
        codes = codes.view(len(prompts), -1, 4 * h * w)  # [P, G, 4 * h * w]
        groups = list(zip(prompts, codes, seeds, strict=True))
        images = []
        for prompt, group, seed in progress(groups, "decode"):
            for part in group.split(config.micro_batch_size):
                noise = [torch.Generator().manual_seed(seed) for _ in part]  # the same for all
                images += self.pipe(  # given codes, it skips its AR half
                    [prompt] * len(part), prior_token_ids=part, generator=noise,
                    height=config.height, width=config.width, guidance_scale=config.guidance,
                    num_inference_steps=config.decode_steps).images
        return images

    def generate_with_tracking(self, prompts, group_size, seeds):
        """Steps 1 and 2 -> N images, with tokens, logprobs and nuclei as in `sample`. The trainer
        gives tokens and nuclei to `compute_logprobs` as they are; nuclei may be None."""
        tokens, logprobs, nuclei = self.sample(prompts, group_size, seeds)
        images = self.decode(prompts, tokens, seeds)
        return dict(images=images, tokens=tokens, logprobs=logprobs, nuclei=nuclei)

def move_tables(rope, inputs, tables):  # made on the CPU, and fetched by each layer of the DiT
    return [table.to(DEVICE) for table in tables]

# --- The toy: the real classes with 0.7 M weights, fitted in seconds ---
# It cheats three times, so that a laptop sees it learn. Its vocabulary and its codes are the same
# words, the COLORS. Its painter is fitted beforehand, to paint a code as a square of its colour.
# Its policy is fitted, too: it sets 40 % of its tokens to the prompt's colour, the others to any.
TINY = dict(model="tiny", steps=40, micro_batch_size=16, lr=2e-3, lora_rank=16, width=128,
            height=128, decode_steps=1, guidance=1.0, offload="off")

def make_tiny_models(words=COLORS):
    """-> a GlmImagePipeline of random weights with a code for each word; it knows no others.
    AR: 128 wide, with more outputs than codes, as the real one. Painter: 8 wide. Rest: minimal."""
    V = len(words)
    names = "bos eos pad unk image grid_bos grid_eos".split()
    marks = {f"{name}_token": f"<|toy_{name}|>" for name in names}  # in no prompt
    ids = {word: i for i, word in enumerate([*words, *marks.values()])}
    tokenizer = transformers.BertTokenizer(
        ids, model_input_names=["input_ids", "attention_mask"], **marks)
    processor = transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessorPil(), tokenizer,
        chat_template="{{ messages[0].content[0].text }}")

    def choose_grids(height, width):  # -> rows, columns of the large grid, then of the draft
        return height // 32, width // 32, 2, 2
    processor._get_target_shape = choose_grids  # private; a draft of 16 x 16 is mostly noise
    ar = transformers.GlmImageForConditionalGeneration(transformers.GlmImageConfig(
        text_config=dict(
            vocab_size=len(tokenizer), vision_vocab_size=2 * V, initializer_range=0.1,
            hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id),
        vision_config=dict(depth=0, hidden_size=16), vq_config=dict(embed_dim=16, num_embeddings=V),
        image_start_token_id=tokenizer.bos_token_id, image_end_token_id=tokenizer.eos_token_id,
        image_token_id=processor.image_token_id))
    t5 = transformers.T5EncoderModel(transformers.T5Config(vocab_size=384, d_model=8, num_layers=0))
    dit = diffusers.GlmImageTransformer2DModel(
        num_layers=1, num_attention_heads=2, text_embed_dim=8, time_embed_dim=32, condition_dim=8,
        prior_vq_quantizer_codebook_size=V)
    vae = diffusers.AutoencoderKL(
        up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[8] * 4, layers_per_block=0,
        mid_block_add_attention=False, latent_channels=16, norm_num_groups=1,
        latents_mean=[0.0] * 16, latents_std=[1.0] * 16)
    return diffusers.GlmImagePipeline(
        transformers.ByT5Tokenizer(), processor, t5, ar, vae, dit,
        diffusers.FlowMatchEulerDiscreteScheduler())

def make_tiny_pipeline(seed=0, fit_steps=200):
    """The toy after its fit of some ten seconds; all of it follows from the seed."""
    torch.manual_seed(seed)
    pipe = make_tiny_models()
    config = Config(**TINY, batch_size=WORLD_SIZE)  # for any number of GPUs
    wrapper = GLMImageWrapper(pipe, config)
    wrapper.policy.activation_checkpointing_disable()
    paint = diffusers.GlmImagePipeline.__call__.__wrapped__  # private: without its no_grad
    V = len(COLORS)
    palette = 2 * torch.stack(list(COLORS.values())).to(DEVICE) - 1  # [V, 3]
    named_code = torch.arange(V)[:, None]  # [V, 1]
    optimizer = torch.optim.Adam(wrapper.halves.both.requires_grad_().parameters(), 3e-3)
    for _ in progress(range(fit_steps), "fit"):
        drawn = torch.randint(V, (V, 20))  # the policy: a draft of 4, a large grid of 16
        tokens = torch.where(torch.rand(drawn.shape) < 0.4, named_code, drawn)
        logprobs, _ = wrapper.compute_logprobs([f"a {name} thing" for name in COLORS], tokens, None)
        codes = torch.randint(V, (V, 2, 2)).to(DEVICE)  # the painter: one code a patch
        squares = F.interpolate(palette[codes].movedim(3, 1), 32)  # [V, 3, 32, 32]
        glyphs = torch.randn(V, 1, 8).to(DEVICE)  # random, to be ignored
        latents = paint(pipe, prompt_embeds=glyphs, prior_token_ids=codes.flatten(1), height=32,
                        width=32, num_inference_steps=1, guidance_scale=1.0, output_type="latent")
        painter_loss = F.mse_loss(pipe.vae.decode(latents.images).sample, squares)
        optimizer.zero_grad()
        (painter_loss - logprobs.mean()).backward()
        optimizer.step()
    return pipe

# --- The command line ---
def parse_args(argv=None):
    """-> Config. What is typed wins over the run that is resumed, or over TINY."""
    types = inspect.get_annotations(Config)
    fields = re.findall(r"^    \w+: .*\n", inspect.getsource(Config), re.MULTILINE)
    parser = argparse.ArgumentParser(
        description="usage: python grpo.py [--group-size 4 ..]; each setting is a flag:\n"
                    f"{''.join(fields)}the toy has its own: {TINY}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS, argument_default=argparse.SUPPRESS)
    parser.add_argument("--resume", metavar="RUN", help="go on with the run in this folder")
    for name, kind in types.items():
        flags = f"--{name}", f"--{name}".replace("_", "-")
        parser.add_argument(*flags, type=kind, help=argparse.SUPPRESS)
    typed = vars(parser.parse_args(argv))
    if "resume" in typed:
        return Config.from_run(typed.pop("resume"), **typed)
    if typed.get("model", Config.model) == "tiny":
        typed = TINY | typed
    return Config(**typed)

def main(argv=None):
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")  # NCCL would wait for the dead
    try:  # what can be checked before a model is loaded
        config = parse_args(argv)
        prompts, targets = load_prompts(config.prompts)
        rewards = load_rewards(config.reward)
        blank = [Image.new("RGB", (32, 32))] * len(prompts)
        for name in rewards.keys() & REWARDS.keys():
            REWARDS[name](blank, prompts, targets)  # raises if something is missing
        if config.model != "tiny":
            diffusers.GlmImagePipeline.load_config(config.model)  # raises if there is none
        if not config.resumed:
            refuse_run(config.out)
        elif len(read_checkpoint(config.out)["history"]) >= config.steps:
            raise ValueError(f"--resume {config.out}: its steps are done; raise --steps")
        if config.adapter and not config.resumed:
            rank = json.loads(Path(config.adapter, "adapter_config.json").read_text()).get("r")
            if rank != config.lora_rank:
                raise ValueError(f"--adapter {config.adapter}: has --lora_rank {rank}")
        if RANK == 0:
            os.makedirs(config.out, exist_ok=True)
    except (ValueError, TypeError, OSError) as error:
        print("grpo.py: error:", *str(error).split(), file=sys.stderr)  # on one line
        sys.exit(2)
    if RANK == 0:
        print(f"model: {config.model} on {DEVICE}, files: {config.out}")
    wrapper = GLMImageWrapper.from_pretrained(config.model, config)
    GRPOTrainer(config, wrapper, prompts, rewards, targets).train()
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()  # or it may abort at the end

if __name__ == "__main__":
    main()
