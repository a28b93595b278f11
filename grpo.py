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
"""
import argparse, contextlib, dataclasses, functools, inspect, json, math
import os, re, runpy, sys, time, traceback
from pathlib import Path
from typing import Literal

import diffusers, safetensors.torch, torch, tqdm, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageColor

RANK = int(os.environ.get("RANK", 0))  # torchrun numbers its processes, one a GPU
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
GPU_GIB = torch.cuda.get_device_properties(0).total_memory / 2**30 if CUDA else 0
progress = functools.partial(tqdm.tqdm, leave=False, disable=None)  # shown in a terminal only

# --- Settings: each field is a flag, and --help shows its comment --------------------------------
@dataclasses.dataclass
class Config:
    model: str = "zai-org/GLM-Image" if GPU_GIB >= 60 else "tiny"  # hub id, folder, or the toy
    resume: str = None  # folder of a run to continue; typed flags override its settings
    prompts: str = None  # text file, one prompt a line; None: prompts.txt beside this file
    reward: str = "color"  # color, mse, file.py:function; with weights: color=1,mine.py:sharp=.2
    steps: int = 300  # rollouts, with their updates
    group_size: int = 4  # images per prompt
    batch_size: int = 8  # prompts per step, all GPUs
    micro_batch_size: int = 1  # images decoded or updated at a time; changes memory, not results
    lr: float = 5e-5  # learning rate of AdamW
    num_iterations: int = 1  # updates per rollout; above 1, the clip matters
    clip_range: float = 0.2  # ratios are clipped below at 1 - clip_range
    clip_range_high: float = 0.2  # and above at 1 + clip_range_high
    kl_coef: float = 0.01  # price of leaving the base model; 0 computes no KL
    scale_rewards: Literal["group", "none"] = "group"  # divide advantages by the group's std
    max_grad_norm: float = 1.0  # longer gradients are shortened to this
    lora_rank: int = 32  # rank of the adapters
    width: int = 512  # pixels, a multiple of 32
    height: int = 512  # pixels, a multiple of 32
    temperature: float = None  # of the policy; None: the model's own
    top_p: float = None  # draw from the likeliest codes that sum to this; None: the model's own
    decode_steps: int = 20  # denoising steps
    guidance: float = 1.5  # classifier-free guidance of the DiT; 1 is off
    offload: Literal["auto", "on", "off"] = "auto"  # on: one half on the GPU; auto: below 60 GiB
    save_every: int = 10  # steps between saved pictures and adapters
    seed: int = 0  # of everything random
    out: str = None  # a new folder for the run; None: runs/<date-time>

    def __post_init__(self):  # a ValueError here comes before a model is loaded
        lowest = dict(seed=0, group_size=2, max_grad_norm=1e-9, temperature=0.01, top_p=0.01)
        for name, value in vars(self).items():
            low = lowest.get(name, 1 if isinstance(value, int) else 0)  # counts from 1
            high = 1 if name == "top_p" else 1e9
            if isinstance(value, (int, float)) and not low <= value <= high:  # a NaN fails
                raise ValueError(f"--{name} {value}: must be from {low} to {high:g}")
        if self.width % 32 or self.height % 32 or self.batch_size % WORLD_SIZE:
            raise ValueError("--width, --height: multiples of 32; --batch_size: of the GPU count")
        if self.resume is not None:
            saved = read_checkpoint(self.resume)["config"]
            if any(saved[name] != vars(self)[name] for name in ("model", "seed", "lora_rank")):
                raise ValueError("--resume: the run has another --model, --seed or --lora_rank")
        self.out = self.resume or self.out or time.strftime("runs/%Y%m%d-%H%M%S")

# --- The maths: pure functions of tensors --------------------------------------------------------
def compute_advantages(rewards, group_size, scale="group"):
    """How much better each sample is than its group: A = (r - mean of its group) / (std + 1e-6).
    rewards [N], by group -> [N], fp32; scale "none" does not divide (Dr. GRPO, 2503.20783)."""
    groups = torch.as_tensor(rewards).double().view(-1, group_size)  # [P, G]
    advantages = groups - groups.mean(1, keepdim=True)  # fp64: equal rewards give exactly 0
    if scale == "group":
        advantages /= groups.std(1, keepdim=True) + 1e-6
    elif scale != "none":
        raise ValueError(f'scale is "group" or "none", not {scale!r}')
    return advantages.flatten().float()

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2, clip_range_high=0.2,
                      ref_logprobs=None, kl_coef=0.0):
    """PPO's clipped surrogate (1707.06347) plus a KL to the reference -> loss, {metric: float}.
        ratio = exp(new - old), clipped to 1 - clip_range .. 1 + clip_range_high (DAPO, 2503.14476)
        loss  = -mean(min(ratio * A, clip(ratio) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1    Schulman's estimate of KL(new, ref)
    Log-probs are [N, T], or [N] (an action each), advantages [N]. Only new_logprobs get a gradient.
    Why the loss may be 0: with one update per rollout every ratio is 1 and policy_loss is -mean(A),
    which is 0 over whole groups. Its gradient is not: -mean(A * grad(new)), as in REINFORCE."""
    if advantages.shape != new_logprobs.shape[:1]:  # [N, T] would broadcast silently
        raise ValueError(f"advantages must be [N], one for each row: {advantages.shape}")
    new = new_logprobs.float().reshape(len(advantages), -1)  # [N, T], or [N, 1]
    old = old_logprobs.detach().reshape_as(new)
    A = advantages.detach().to(new)[:, None]  # [N, 1]
    ratio = (new - old).exp()
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range_high) * A
    # Where a ratio is past the clip and A would push it further, the min is constant: no gradient.
    loss = -torch.min(unclipped, clipped).mean()  # a loss of your own goes here
    metrics = dict(policy_loss=loss, ratio_mean=ratio.mean(), ratio_max=ratio.max(),
                   clip_frac=(clipped < unclipped).float().mean())  # share stopped by the clip
    if ref_logprobs is not None:
        delta = ref_logprobs.detach().reshape_as(new) - new
        delta = delta.clamp(max=20)  # an outlier would overflow; it gets no gradient
        metrics["kl"] = (torch.expm1(delta) - delta).mean()  # expm1 is accurate near 0
        loss = loss + kl_coef * metrics["kl"]
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

def sample_codes(logprobs, chance):
    """The inverse CDF: logprobs [N, V], chance [N, 1], uniform in 0..1 -> codes [N, 1]. With
    `torch.multinomial` a sample would depend on what else is in the batch."""
    mass = logprobs.double().exp().cumsum(1)
    point = chance * mass[:, -1:]  # 1 up to rounding
    return torch.searchsorted(mass, point, right=True)  # the first code with mass > point

# --- The trainer: the loop, then what a turn of it consists of -----------------------------------
class GRPOTrainer:
    """GRPO on `wrapper.policy`. rewards: {name: (function, weight)}, targets: images or None."""
    def __init__(self, config, wrapper, prompts, rewards=None, targets=None):
        self.config = config
        self.wrapper = wrapper
        self.prompts = prompts
        self.targets = targets or [None] * len(prompts)
        self.rewards = rewards or load_rewards(config.reward)
        self.out = Path(config.out)
        self.history = []  # a row of metrics per step
        torch.manual_seed(config.seed)  # the CPU draws adapters, equal on all GPUs
        self.lora = LoRA(wrapper.policy, wrapper.TARGETS, config.lora_rank)
        self.optimizer = torch.optim.AdamW(self.lora.weights.values(), config.lr, weight_decay=0.0)
        if config.resume:
            self.load_checkpoint(config.resume)

    def train(self):
        if RANK == 0 and not self.history:
            self.out.mkdir(parents=True)  # FileExistsError: a run is never overwritten
            self.save_samples(0)  # before training
        first = len(self.history) + 1
        for step in range(first, self.config.steps + 1):
            started = time.perf_counter()
            rollout, metrics = self.rollout(step)  # 1. sample, 2. decode, 3. score
            rollout["advantages"] = compute_advantages(  # 4. compare
                rollout["rewards"], self.config.group_size, self.config.scale_rewards)
            metrics |= self.train_step(rollout)  # 5. update
            metrics["seconds"] = time.perf_counter() - started
            self.log(step, metrics)  # 6. log

    def rollout(self, step):
        """Steps 1 to 3, on this GPU's share of the prompts -> {key: N values}, metrics."""
        config = self.config
        rng = np.random.default_rng([config.seed, step])  # a resumed run needs no random state
        repeat = len(self.prompts) < config.batch_size
        chosen = rng.choice(len(self.prompts), config.batch_size, replace=repeat)[RANK::WORLD_SIZE]
        seeds = rng.integers(2**63, size=config.batch_size)[RANK::WORLD_SIZE].tolist()
        group_prompts = [self.prompts[i] for i in chosen]  # P
        rollout = self.wrapper.generate_with_tracking(group_prompts, config.group_size, seeds)
        rows = np.repeat(chosen, config.group_size)  # N: p0 p0 .. p1 p1 ..
        prompts = [self.prompts[i] for i in rows]
        targets = [self.targets[i] for i in rows]
        rewards, metrics = compute_rewards(rollout["images"], prompts, targets, self.rewards)
        metrics["reward_std"] = rewards.view(-1, config.group_size).std(1).mean().item()
        return rollout | dict(prompts=prompts, rewards=rewards), metrics

    def train_step(self, rollout):
        """Step 5: one rollout -> metrics. Micro-batches weigh by size: it changes no result."""
        config = self.config
        N = len(rollout["tokens"])
        batches = list(split_rollout(rollout, config.micro_batch_size))
        if config.kl_coef > 0:
            self.add_ref_logprobs(batches)
        self.optimizer.zero_grad()  # an interrupted update may have left its gradients
        rows = []
        updates = []
        for _ in range(config.num_iterations):
            for batch in batches:
                new_logprobs, entropy = self.wrapper.compute_logprobs(
                    batch["prompts"], batch["tokens"], batch["nuclei"])  # [B, T] each
                # The trap of bf16: sampler and trainer round differently, their ratio is not 1.
                # So the old log-probs are not the sampler's, but those of the first pass here.
                batch.setdefault("old_logprobs", new_logprobs.detach())  # in the first alone
                loss, metrics = compute_grpo_loss(
                    new_logprobs, batch["old_logprobs"], batch["advantages"], config.clip_range,
                    config.clip_range_high, batch.get("ref_logprobs"), config.kl_coef)
                share = len(new_logprobs) / N / WORLD_SIZE
                (loss * share).backward()
                gap = batch["logprobs"] - batch["old_logprobs"]
                metrics["sampler_gap_max"] = gap.abs().max().item()
                metrics["entropy"] = entropy.mean().item()
                rows += [metrics] * len(new_logprobs)  # the mean is over samples
            updates.append(self.update_weights())
        return merge_rows(rows) | merge_rows(updates)

    @torch.no_grad()
    def add_ref_logprobs(self, batches):
        """The reference is the policy with its adapters off, so no second model is needed."""
        with self.lora.disabled():
            for batch in batches:
                batch["ref_logprobs"], _ = self.wrapper.compute_logprobs(
                    batch["prompts"], batch["tokens"], batch["nuclei"])

    def update_weights(self):
        weights = list(self.lora.weights.values())
        if WORLD_SIZE > 1:
            for weight in weights:
                torch.distributed.all_reduce(weight.grad)  # a sum, as each GPU had its share
        grad_norm = torch.nn.utils.clip_grad_norm_(weights, self.config.max_grad_norm)
        if grad_norm.isfinite():  # a NaN would stay in Adam's moments
            self.optimizer.step()
        self.optimizer.zero_grad()
        return dict(grad_norm=grad_norm.item(), skipped=float(not grad_norm.isfinite()))

    def log(self, step, metrics):
        """Step 6. The checkpoint is written last: a crash before it loses only this step."""
        metrics["gpu_gib_max"] = torch.cuda.max_memory_allocated() / 2**30
        rows = [metrics] * WORLD_SIZE
        if WORLD_SIZE > 1:
            torch.distributed.all_gather_object(rows, metrics)  # those of all GPUs
        row = dict(step=step) | merge_rows(rows)
        self.history.append(row)
        if RANK > 0:
            return
        if step % self.config.save_every == 0 or step == self.config.steps:
            self.save_samples(step)
        lines = [json.dumps(row) + "\n" for row in self.history]
        Path(self.out, "metrics.jsonl").write_text("".join(lines))
        self.save_checkpoint()
        keys = "step reward reward_std loss kl entropy grad_norm sampler_gap_max".split()
        if row["skipped"]:
            keys.append("skipped")
        print(*[f"{key} {row[key]:<8.4g}" for key in keys if key in row], flush=True)

    def save_samples(self, step):
        """Pictures of fixed prompts and seeds, and the adapter that drew them, to go back to."""
        prompts = self.prompts[:8]
        images = self.wrapper.generate_with_tracking(prompts, 1, range(len(prompts)))["images"]
        grid = diffusers.utils.make_image_grid(images, 1, len(images))
        grid.save(self.out / f"samples_{step:05d}.png")
        self.lora.save(self.out / f"adapter_{step:05d}")

    def save_checkpoint(self):
        """Written aside, then renamed: a kill in the middle leaves the file of the step before."""
        state = dict(config=vars(self.config), history=self.history,
                     adapter=self.lora.weights, optimizer=self.optimizer.state_dict())
        unfinished = self.out / "checkpoint.part"
        torch.save(state, unfinished)
        unfinished.replace(self.out / "checkpoint.pt")

    def load_checkpoint(self, folder):
        """Adapters, moments and history of a run; the learning rate is that of the config."""
        state = read_checkpoint(folder)
        self.history = state["history"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.config.lr
        for name, weight in self.lora.weights.items():
            weight.data.copy_(state["adapter"][name])

def split_rollout(rollout, size):  # {key: N values} -> micro-batches with the same keys
    for start in range(0, len(rollout["tokens"]), size):
        yield {key: values[start:start + size] for key, values in rollout.items()}

def merge_rows(rows):
    """Metrics of several samples or GPUs -> one row: maxima of names in _max, means of others."""
    merged = {}
    for key in rows[0]:
        merge = np.max if key.endswith("_max") else np.mean
        merged[key] = float(merge([row[key] for row in rows]))
    return merged

def read_checkpoint(folder):
    """What save_checkpoint wrote. `weights_only` runs no code, `mmap` reads only what is used."""
    try:
        state = torch.load(Path(folder, "checkpoint.pt"), "cpu", weights_only=True, mmap=True)
        assert "config" in state
        return state
    except Exception as error:
        raise ValueError(f"--resume: {folder} holds no run: {error!r}")

# --- Rewards -------------------------------------------------------------------------------------
# A reward is any function that gives each image a finite number, higher is better. Only differences
# inside a group count: without an opinion, give all the same. Yours, for `--reward mine.py:bright`:
#     def bright(images, prompts, targets):  # PIL images, texts, PIL images to imitate or None
#         return [image.convert("L").resize((1, 1)).getpixel((0, 0)) for image in images]
COLORS = {name: torch.tensor(ImageColor.getrgb(name)) / 255  # [3], in 0..1
          for name in "red orange yellow green blue purple white black".split()}

def pil_to_tensor(images):
    """PIL images of one size -> [N, 3, H, W], fp32 in 0..1."""
    pixels = np.stack([image.convert("RGB") for image in images])
    return torch.tensor(pixels).movedim(3, 1) / 255

def tensor_to_pil(tensor):
    """[N, 3, H, W] in 0..1 -> PIL images, for code of your own."""
    return diffusers.utils.pt_to_pil(2 * tensor.float() - 1)

def reward_color(images, prompts, targets=None):
    """1 - |mean colour - the first colour that the prompt names|, 0..1; 0 if it names none."""
    scores = []
    for image, prompt in zip(images, prompts):
        named = re.search(rf"\b({'|'.join(COLORS)})\b", prompt.lower())
        mean_color = pil_to_tensor([image]).mean((0, 2, 3))
        scores.append(1 - F.l1_loss(mean_color, COLORS[named[0]]) if named else 0.0)
    return scores

def reward_mse(images, prompts, targets):
    """Minus the mean squared error to the target, which is resized to the image."""
    targets = [target.resize(images[0].size) for target in targets]
    return -(pil_to_tensor(images) - pil_to_tensor(targets)).square().mean((1, 2, 3))

REWARDS = {"color": reward_color, "mse": reward_mse}

def load_rewards(text):
    """"color=1,mine.py:sharp=.2" -> {name: (function, weight)}; a bare name has weight 1."""
    rewards = {}
    run_once = functools.cache(runpy.run_path)  # for a file with two rewards in it
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        file, _, function_name = name.rpartition(":")
        function = REWARDS.get(name)
        if os.path.isfile(file):
            function = run_once(file).get(function_name)
        weight = float(weight or 1)
        if function is None or name in rewards or not math.isfinite(weight):
            raise ValueError(f"--reward {part}: not found, twice, or no finite weight; see --help")
        rewards[name] = function, weight
    return rewards

@torch.no_grad()
def compute_rewards(images, prompts, targets, rewards):
    """{name: (function, weight)} -> the weighted sum [N], and {metric: float}, the means."""
    total = torch.zeros(len(images))
    metrics = {}
    for name, (function, weight) in rewards.items():
        copies = [image.copy() for image in images]  # a reward may paint over its images
        values = list(function(copies, prompts, targets))
        scores = torch.tensor([float("nan" if value is None else value) for value in values])
        if len(scores) != len(images) or not scores.isfinite().all():  # a NaN ends all learning
            raise ValueError(f"the reward {name} gave not {len(images)} finite numbers: {values}")
        metrics[f"reward/{name}"] = scores.mean().item()
        total += weight * scores
    metrics["reward"] = total.mean().item()
    return total, metrics

def load_prompts(path):
    """Lines `prompt`, `prompt<TAB>target.png` or `# comment` -> prompts, targets (None without)."""
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

# --- LoRA (arXiv 2106.09685): the weights that are trained ---------------------------------------
class LoRA:
    """W x becomes W x + 2 B A x: W is frozen, B begins at 0, and 2 is alpha / rank.
    `weights` holds A [rank, in] and B [out, rank] of the linear layers whose names fit `targets`,
    in fp32: a bf16 weight of 0.02 plus an Adam step of 5e-5 is the same bf16 weight."""
    def __init__(self, model, targets, rank):
        if hasattr(model, "lora"):  # two would add up, and only one be switched off
            raise ValueError("this model has adapters already: load it anew for another trainer")
        model.lora = self
        self.config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=targets)
        self.enabled = True
        self.weights = {}  # under peft's names
        for name, linear in model.named_modules():
            if re.fullmatch(targets, name):
                A = torch.nn.Linear(linear.in_features, rank, bias=False).to(DEVICE).weight
                B = torch.nn.Parameter(torch.zeros(linear.out_features, rank, device=DEVICE))
                self.weights[f"base_model.model.{name}.lora_A.weight"] = A
                self.weights[f"base_model.model.{name}.lora_B.weight"] = B
                linear.register_forward_hook(functools.partial(self.add_low_rank, A, B))

    def add_low_rank(self, A, B, linear, inputs, output):
        """What the linear layer gives, plus 2 B A x; without a return PyTorch keeps the output."""
        if self.enabled:
            low = inputs[0] @ A.to(output).T  # [.., rank]
            return output + 2 * low @ B.to(output).T

    @contextlib.contextmanager
    def disabled(self):
        """Inside `with lora.disabled():` the model is the reference; an error ends that too."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def save(self, folder):  # as peft and transformers' load_adapter read it
        os.makedirs(folder, exist_ok=True)
        Path(folder, "adapter_config.json").write_text(json.dumps(self.config))
        safetensors.torch.save_file(self.weights, Path(folder, "adapter_model.safetensors"))

# --- GLM-Image: prompt -> tokens -> image. Five facts, from which the code follows: --------------
#   1. It writes two grids: a draft of about 16 x 16 codes, which sketches the picture, then the
#      large grid, a code for each 32 x 32 pixels. Both are actions; only the large one is painted.
#   2. A code is a token id from 0 to V - 1; ids above are image marks, padding and words.
#   3. The position of a token is a triple (t, h, w), so that a code knows its row and column.
#   4. The DiT wants each code four times, as 2 x 2: its patches have 16 x 16 pixels.
#   5. Of the prompt the DiT reads only words in quotation marks, letter by letter (glyphs).
class GLMImageWrapper:
    """A `GlmImagePipeline` as a policy. A model of your own needs `policy` (gets the adapters),
    `TARGETS` (a regex for its linear layers), `compute_logprobs` and `generate_with_tracking`."""
    TARGETS = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate_up|down)_proj"

    def __init__(self, pipe, config):
        self.pipe = pipe
        self.config = config
        self.policy = pipe.vision_language_encoder  # the pipeline's name for the AR half
        self.policy.activation_checkpointing_enable()
        own = self.policy.generation_config
        self.temperature = config.temperature or own.temperature or 1.0
        self.top_p_filter = transformers.TopPLogitsWarper(config.top_p or own.top_p or 1.0)
        self.ar_half = torch.nn.ModuleList([self.policy.model.language_model, self.policy.lm_head])
        self.dit_half = torch.nn.ModuleList([pipe.text_encoder, pipe.transformer, pipe.vae])
        pipe.set_progress_bar_config(disable=True)
        self.offload = config.offload == "on" or (config.offload == "auto" and 0 < GPU_GIB < 60)
        self.on_gpu = None  # ar_half or dit_half
        self.cpu_copies = []  # (tensor, its CPU data) of that half
        for half in (self.ar_half, self.dit_half):
            half.requires_grad_(False).eval().to("cpu" if self.offload else DEVICE)
            if self.offload and CUDA:
                half._apply(torch.Tensor.pin_memory)  # like `.to`; a GPU reads pinned memory fast

    @classmethod
    def from_pretrained(cls, path, config):
        if path == "tiny":
            torch.set_num_threads(1)  # two are slower
            pipe = make_tiny_pipeline(config.seed)
        else:
            pipe = diffusers.GlmImagePipeline.from_pretrained(path, dtype=torch.bfloat16)
        make_faster(pipe, config)
        return cls(pipe, config)

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """Step 1. P prompts, a seed for each -> tokens, logprobs [N, T], nuclei [N, T, V], bool.
        Transformers' `generate` mixes up grids in a batch, may end early, and has a top-k of 50."""
        self.move_to_gpu(self.ar_half)
        ids, position_ids, visible = self.encode(np.repeat(prompts, group_size).tolist())
        T = position_ids.shape[2] - ids.shape[1]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        chance = [torch.rand(group_size, T, generator=generator) for generator in generators]
        chance = torch.cat(chance).to(DEVICE)  # [N, T]
        cache = transformers.StaticCache(self.policy.config.text_config, position_ids.shape[2])
        start = 0
        tokens = []
        logprobs = []
        nuclei = []
        for i in progress(range(T), "sample"):
            logits = self.forward(ids, position_ids, visible, start, cache)[:, -1]  # [N, V]
            nucleus = self.top_p_filter(None, logits).isfinite()  # it sets all others to -inf
            all_logprobs = compute_policy_logprobs(logits, nucleus)
            codes = sample_codes(all_logprobs, chance[:, i:i + 1])  # [N, 1]
            tokens.append(codes)
            logprobs.append(all_logprobs.gather(1, codes))
            nuclei.append(nucleus[:, None].cpu())
            start += ids.shape[1]
            ids = codes  # first the prompt was fed, then codes; the cache keeps all
        return torch.cat(tokens, 1), torch.cat(logprobs, 1), torch.cat(nuclei, 1)

    def compute_logprobs(self, prompts, tokens, nuclei):
        """Teacher forcing: tokens [B, T], nuclei [B, T, V] as sampled, or None for all codes
        -> log-probs with a gradient, entropy without, both [B, T]."""
        self.move_to_gpu(self.ar_half)
        ids, position_ids, visible = self.encode(prompts)
        tokens = tokens.to(DEVICE)
        self.ar_half.train(torch.is_grad_enabled())  # recomputes activations in training only
        logits = self.forward(torch.cat([ids, tokens], 1), position_ids, visible)
        self.ar_half.eval()  # in training mode layers would drop the cache
        logits = logits[:, ids.shape[1] - 1:-1]  # [B, T, V], each predicted one place before
        logprobs = compute_policy_logprobs(logits, nuclei)
        entropy = torch.distributions.Categorical(logits=logprobs.detach()).entropy()
        return logprobs.gather(2, tokens[..., None])[..., 0], entropy

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        """Step 2. P prompts and seeds, tokens [N, T] -> N images, of the large grid. A group shares
        its noise (DanceGRPO, 2505.07818): its rewards differ because its tokens do, not by luck."""
        self.move_to_gpu(self.dit_half)
        config = self.config
        h = config.height // 32
        w = config.width // 32
        large = tokens[:, -h * w:].to(DEVICE).view(-1, h, w)
        codes = large.repeat_interleave(2, 1).repeat_interleave(2, 2)  # each as 2 x 2
        groups = list(zip(prompts, codes.flatten(1).chunk(len(prompts)), seeds, strict=True))
        images = []
        for prompt, group, seed in progress(groups, "decode"):  # a batch would pad shorter texts
            glyphs, _ = self.pipe.encode_prompt(prompt, do_classifier_free_guidance=False)
            for part in group.split(config.micro_batch_size):
                generators = [torch.Generator().manual_seed(seed) for _ in part]  # one noise
                images += self.pipe(
                    prompt_embeds=glyphs.repeat(len(part), 1, 1), prior_token_ids=part,
                    generator=generators, height=config.height, width=config.width,
                    guidance_scale=config.guidance, num_inference_steps=config.decode_steps).images
        return images

    def generate_with_tracking(self, prompts, group_size, seeds):
        """Steps 1 and 2 -> {"images": .., and what a trainer must know of them}."""
        tokens, logprobs, nuclei = self.sample(prompts, group_size, seeds)
        images = self.decode(prompts, tokens, seeds)
        return dict(images=images, tokens=tokens, logprobs=logprobs, nuclei=nuclei)

    def encode(self, prompts):
        """-> ids [B, L], position_ids [3, B, L + T] and visible [B, 1, L + T, L + T]: may row i see
        column j? If j <= i and both are real or both padding: a softmax over nothing may be NaN."""
        texts = [dict(type="text", text=prompt) for prompt in prompts]
        chats = [[dict(role="user", content=[text])] for text in texts]
        inputs = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=dict(
                target_h=self.config.height, target_w=self.config.width,
                padding=True, padding_side="left")).to(DEVICE)
        large, draft = inputs.image_grid_thw[:2, 1:].tolist()  # (h, w), equal for all prompts
        position_ids = build_position_ids(inputs.attention_mask, [draft, large])  # draft first
        real = position_ids[0] >= 0  # padding has -1
        visible = (real[:, :, None] == real[:, None]).tril()
        return inputs.input_ids, position_ids, visible[:, None]

    def forward(self, ids, position_ids, visible, start=0, cache=None):
        """ids [B, n] -> logits / temperature [B, n, V]. `policy` would make its own positions."""
        language_model, lm_head = self.ar_half
        span = slice(start, start + ids.shape[1])
        hidden = language_model(
            input_ids=ids, position_ids=position_ids[..., span], attention_mask=visible[:, :, span],
            past_key_values=cache, use_cache=False).last_hidden_state  # fills a given cache
        codebook_size = self.pipe.transformer.config.prior_vq_quantizer_codebook_size
        return lm_head(hidden)[..., :codebook_size].float() / self.temperature

    def move_to_gpu(self, half):
        """The other half leaves, this one comes. Both are frozen: nothing is ever copied back."""
        if self.offload and half is not self.on_gpu:
            for tensor, cpu_copy in self.cpu_copies:
                tensor.data = cpu_copy
            torch.cuda.empty_cache()  # or fragments may leave no room for this half
            tensors = [*half.parameters(), *half.buffers()]
            self.cpu_copies = [(tensor, tensor.data) for tensor in tensors]
            for tensor in tensors:
                tensor.data = tensor.to(DEVICE, non_blocking=True)
            self.on_gpu = half

def build_position_ids(attention_mask, grids):
    """Positions (t, h, w): mask [B, L], (h, w) of grids -> [3, B, L + T]. In text t = h = w; a
    grid holds t still, counts rows in h and columns in w; the next starts max(h, w) further on:
              pad  prompt    1 x 2   2 x 2
         t:   -1   0  1  2   3  3    5  5  5  5
         h:   -1   0  1  2   3  3    5  5  6  6
         w:   -1   0  1  2   3  4    5  6  5  6
    The trap: `transformers` makes these in `generate` only. A plain forward pass takes the image
    for a line of text, without any error, and every log-prob is wrong."""
    text = attention_mask.cumsum(1) - 1
    columns = [text.expand(3, -1, -1)]
    start = attention_mask.sum(1, keepdim=True)  # [B, 1]
    for h, w in grids:
        cells = start.new_ones(1, h, w).nonzero()  # (0, row, column) of each: [h * w, 3]
        columns.append(start + cells.T[:, None])
        start = start + max(h, w)
    return torch.cat(columns, 2)

def make_faster(pipe, config):
    """What makes the real model smaller or faster on a GPU, and changes no result."""
    pipe.vae.enable_slicing()  # image by image: four at once, at 1024 pixels, take 28 GiB
    # The DiT makes its rotary tables in each call, by 120 copies that block the GPU: here, once.
    latents = torch.empty(1, 1, config.height // 8, config.width // 8)
    tables = [table.to(DEVICE) for table in pipe.transformer.rope(latents)]
    pipe.transformer.forward = functools.partial(pipe.transformer.forward, image_rotary_emb=tables)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN (pytorch #196678)

# --- The toy: the real classes with 0.7 M weights, fitted in seconds -----------------------------
# It cheats three times, so that a laptop sees it learn. Its words are its codes: the 8 COLORS. Its
# painter is fitted beforehand, to paint a code as a square of its colour. Its policy is fitted too,
# to tokens of which 40 % have the prompt's colour. Nothing here is needed to understand GRPO.
TINY = dict(model="tiny", steps=40, micro_batch_size=16, lr=2e-3, lora_rank=16, width=128,
            height=128, decode_steps=1, guidance=1.0, offload="off")

def make_tiny_models(words=COLORS):
    """-> a GlmImagePipeline of random weights with a code for each word; it knows no other word."""
    V = len(words)
    marks = {f"{name}_token": f"<|toy_{name}|>"  # names that nobody writes in a prompt
             for name in "bos eos pad unk image grid_bos grid_eos".split()}
    tokenizer = transformers.BertTokenizer(
        {word: i for i, word in enumerate([*words, *marks.values()])},
        model_input_names=["input_ids", "attention_mask"], **marks)
    processor = transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessorPil(), tokenizer, "{{ messages[0].content[0].text }}")

    def choose_grids(height, width):  # -> rows, columns of the large grid, then of the draft
        return height // 32, width // 32, 2, 2
    processor._get_target_shape = choose_grids  # the library's draft is 16 x 16
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

def make_tiny_pipeline(seed=0, warmup_steps=200):
    """The toy after its fit, which takes some 20 seconds; all of it follows from the seed."""
    torch.manual_seed(seed)
    pipe = make_tiny_models()
    wrapper = GLMImageWrapper(pipe, Config(**TINY, batch_size=WORLD_SIZE))  # one prompt a GPU
    paint = diffusers.GlmImagePipeline.__call__.__wrapped__  # the pipeline without its no_grad
    palette = 2 * torch.stack(list(COLORS.values())).to(DEVICE) - 1  # [V, 3]
    V = len(palette)
    B = 8
    T = 2 * 2 + 4 * 4  # draft, large grid
    halves = torch.nn.ModuleList([wrapper.ar_half, wrapper.dit_half]).requires_grad_()
    optimizer = torch.optim.Adam(halves.parameters(), 3e-3)
    for _ in range(warmup_steps):
        named = torch.randint(V, (B, 1))  # the policy: 40 % of the tokens get the named colour
        other = torch.randint(V, (B, T))
        tokens = torch.where(torch.rand(B, T) < 0.4, named, other)
        prompts = [f"a {list(COLORS)[i]} thing" for i in named]
        logprobs, _ = wrapper.compute_logprobs(prompts, tokens, None)
        policy_loss = -logprobs.mean()
        codes = torch.randint(V, (B, 4)).to(DEVICE)  # the painter: squares of 16 x 16 pixels
        squares = F.interpolate(palette[codes].mT.unflatten(2, (2, 2)), 32)  # [B, 3, 32, 32]
        glyphs = torch.randn(B, 1, 8).to(DEVICE)  # random, to be ignored
        latents = paint(pipe, prompt_embeds=glyphs, prior_token_ids=codes, height=32, width=32,
                        num_inference_steps=1, guidance_scale=1.0, output_type="latent").images
        painter_loss = F.mse_loss(pipe.vae.decode(latents).sample, squares)
        optimizer.zero_grad()
        (policy_loss + painter_loss).backward()
        optimizer.step()
    return pipe

# --- The command line ----------------------------------------------------------------------------
def describe_flags():
    settings = inspect.getsource(Config).split("class Config:")[1].split("    def ")[0]
    return ("usage: python grpo.py [--group-size 4 ..]; each setting is a flag:\n"
            f"{settings}the toy has its own: {TINY}\n")

def parse_args(argv=None):
    """-> Config. What is typed wins over the run that is resumed, or over TINY."""
    parser = transformers.HfArgumentParser(Config, usage=argparse.SUPPRESS)
    parser.format_help = describe_flags  # the library's own names every flag twice
    typed = parser.parse_args(argv)
    if typed.resume:
        parser.set_defaults(**read_checkpoint(typed.resume)["config"])
    elif typed.model == "tiny":
        parser.set_defaults(**TINY)
    return Config(**vars(parser.parse_args(argv)))

def prepare(argv):
    """All that can be wrong before a model is loaded -> config, prompts, targets, rewards."""
    config = parse_args(argv)
    prompts, targets = load_prompts(config.prompts)
    rewards = load_rewards(config.reward)
    if "mse" in rewards and None in targets:
        raise ValueError(f"--reward mse: a line of {config.prompts} has no target")
    if config.model != "tiny":
        diffusers.GlmImagePipeline.load_config(config.model)  # is there such a model?
    if RANK == 0 and not config.resume:
        if os.path.exists(config.out):
            raise ValueError(f"--out {config.out} exists: name another folder, or --resume it")
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    return config, prompts, targets, rewards

def main(argv=None):
    if CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")  # NCCL would hang if one dies
    try:
        config, prompts, targets, rewards = prepare(argv)
    except (ValueError, TypeError, OSError) as error:
        if "runpy" in traceback.format_exc():  # a bug in a reward file shows where it is
            raise
        print("grpo.py: error:", *str(error).split(), file=sys.stderr)  # on one line
        sys.exit(2)
    if RANK == 0:
        print(f"model: {config.model} on {DEVICE}, files: {config.out}")
    wrapper = GLMImageWrapper.from_pretrained(config.model, config)
    trainer = GRPOTrainer(config, wrapper, prompts, rewards, targets)
    try:
        trainer.train()
    except KeyboardInterrupt:
        if not Path(config.out, "checkpoint.pt").exists():
            raise
        sys.exit(f"stopped; python grpo.py --resume {config.out} goes on after its last step")

if __name__ == "__main__":
    main()
