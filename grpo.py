"""grpo.py: GRPO for GLM-Image, in one file.

GLM-Image draws in two halves: an autoregressive transformer (AR, 9 B) samples visual tokens, a
diffusion transformer (DiT, 7 B) decodes them into pixels. Here the AR half learns what to draw:

    prompt ---> AR ---- tokens ---> DiT + VAE ---> image ---> reward ---> advantage
              trained                frozen              any function    z-score in the group
                 ^--------------- update: a clipped policy gradient <---------+

A step of GRPO (DeepSeekMath, arXiv 2402.03300) is a turn of the loop in `GRPOTrainer.train`:
  1. sample   the policy, AR + LoRA, draws G token sequences per prompt; each token is an action
  2. decode   the frozen DiT paints them; all G of a prompt, a group, start from the same noise
  3. score    any function turns images into numbers; no gradient passes through a picture
  4. compare  advantage = (reward - mean) / std of its group: the group mean is the baseline
              that a value network would otherwise have to learn
  5. update   make tokens of better images likelier, within PPO's clip, near the base model (KL)
  6. log      a checkpoint, metrics, pictures of fixed prompts
`python grpo.py` trains a toy on a laptop, or GLM-Image on a GPU with 60 GiB free. With less, down
to 24 GB, type `--model zai-org/GLM-Image` (calculated, not measured); the host needs 38 GiB.

Axes: P prompts, G samples of each, N = P * G in the order p0 p0 .. p1 p1 .., B in a micro-batch;
L prompt tokens, padded on the left; T image tokens, each one of V codes: a small draft first, then
the large grid, which alone is painted. One image size means one T: the loss needs no mask.
"""
import argparse, contextlib, dataclasses, functools, inspect, json, math, os, re, runpy, sys, time
from pathlib import Path
from typing import Literal
import diffusers, safetensors.torch, torch, tqdm, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageColor

CUDA = torch.cuda.is_available()
RANK = int(os.environ.get("RANK", 0))  # torchrun starts a process for each GPU and numbers them
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if CUDA else "cpu")
FREE_GIB = torch.cuda.mem_get_info(DEVICE)[0] / 2**30 if CUDA else 0  # GLM-Image wants 60
progress = functools.partial(tqdm.tqdm, leave=False, disable=RANK > 0 or None)  # None: if no tty

# --- Settings: a field is a flag, and its comment the help ---------------------------------------
@dataclasses.dataclass
class Config:
    model: str = "zai-org/GLM-Image"  # hub id, folder, or tiny: a toy, the default below 60 GiB
    resume: str = None  # folder of a run to continue; what is typed wins over its settings
    prompts: str = str(Path(__file__).with_name("prompts.txt"))  # text, one a line
    reward: str = "color"  # color, mse, file.py:function, or several: color=1,mine.py:sharp=.2
    reward_norm: Literal["none", "group"] = "none"  # group: z-score each reward first
    steps: int = 300  # rollouts
    group_size: int = 4  # images per prompt
    batch_size: int = 8  # prompts per step, of all GPUs
    micro_batch_size: int = 1  # images at a time in decode and update: memory, not result
    lr: float = 5e-5  # of AdamW; LoRA wants about ten times the rate of full weights
    num_iterations: int = 1  # updates per rollout; from 2 on the clip matters
    clip_range: float = 0.2  # clips ratios to 1 - this ..
    clip_range_high: float = None  # 1 + this; None: same
    kl_coef: float = 0.01  # price of leaving the base model; 0: no KL is computed
    scale_rewards: Literal["group", "batch", "none"] = "group"  # the std that divides advantages
    max_grad_norm: float = 1.0  # gradients are clipped
    lora_rank: int = 32  # of the adapters
    size: str = "512"  # pixels; 1024x768: width first
    temperature: float = None  # None: the model's own
    top_p: float = None  # only the likeliest codes of this mass; None: the model's own
    decode_steps: int = 20  # denoising steps of the DiT
    guidance: float = 1.5  # classifier-free; 1: off
    offload: Literal["auto", "on", "off"] = "auto"  # on: the GPU holds AR or DiT in turn
    save_every: int = 10  # steps between pictures; checkpoints come every step
    seed: int = 0  # of everything random
    out: str = None  # new folder; None: runs/<date-time>

    def __post_init__(self):  # ValueError for what cannot be right, before a model is loaded
        least = dict(group_size=2, seed=0, temperature=0.01, top_p=0.01)  # else 1, or 0.0
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low = least.get(field.name, 1 if field.type is int else 0)
            high = 1 if field.name == "top_p" else 1e9
            if isinstance(value, (int, float)) and not low <= value <= high:  # NaN fails too
                raise ValueError(f"--{field.name} {value} is not from {low} to {high:g}")
        if self.batch_size % WORLD_SIZE:
            raise ValueError(f"--batch-size must be a multiple of the {WORLD_SIZE} GPUs")
        width, _, height = self.size.partition("x")
        self.width = int(width)
        self.height = int(height or width)
        if min(self.width, self.height) < 32 or self.width % 32 or self.height % 32:
            raise ValueError(f"--size {self.size}: like 512 or 1024x768, in multiples of 32")
        self.out = self.resume or self.out or time.strftime("runs/%Y%m%d-%H%M%S")

TINY = dict(model="tiny", steps=40, micro_batch_size=16, lr=2e-3, lora_rank=16,
            size="128", decode_steps=1, guidance=1.0)

# --- The maths: pure functions of tensors --------------------------------------------------------
def compute_advantages(rewards, group_size, scale="group"):
    """How much better each sample is than its group: A = (r - mean of its group) / (std + 1e-6).
    rewards [N], ordered by group -> advantages [N], fp32. The std, unbiased, is that of the "group"
    (GRPO, 2402.03300) or of the whole "batch"; "none" does not divide (Dr. GRPO, 2503.20783).
    Equal rewards get exactly 0: such a group teaches nothing, and only the KL acts on it."""
    rewards = torch.as_tensor(rewards).float()
    if group_size < 2 or len(rewards) % group_size or not rewards.isfinite().all():
        raise ValueError(f"no groups of {group_size} finite rewards: {rewards.tolist()}")
    groups = rewards.double().view(-1, group_size)  # [P, G]; fp32 adds up exactly in double
    advantages = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        advantages /= groups.std(1, keepdim=True) + 1e-6
    elif scale == "batch":
        advantages /= groups.std() + 1e-6
    return advantages.flatten().float()

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2, clip_range_high=None,
                      ref_logprobs=None, kl_coef=0.0):
    """PPO's clipped surrogate (1707.06347) plus a KL to the reference -> loss, {metric: float}.
        ratio = exp(new - old), clipped to 1 - clip_range .. 1 + clip_range_high (DAPO, 2503.14476)
        loss  = -mean(min(ratio * A, clip(ratio) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1    Schulman's estimate of KL(new, ref)
    Log-probs are [N, T], or [N] (an action each), advantages [N]. Only new_logprobs get a gradient.
    Why the loss may be 0: with one update per rollout old equals new, every ratio is 1, and
    policy_loss is -mean(A), 0 over whole groups. The gradient is not 0: that of ratio * A at
    ratio 1 is A * grad(new), REINFORCE with a baseline."""
    new = new_logprobs.float().reshape(len(advantages), -1)  # [N, T], or [N, 1]
    A = advantages.detach()[:, None]  # [N, 1]
    ratio = (new - old_logprobs.detach().reshape_as(new)).exp()
    high = clip_range if clip_range_high is None else clip_range_high
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip_range, 1 + high) * A
    # Past the clip, on the side that A favours, the min is a constant: no gradient pushes further.
    loss = -torch.min(unclipped, clipped).mean()  # a loss of your own goes here
    metrics = dict(policy_loss=loss, ratio_max=ratio.max())
    metrics["clip_frac"] = (clipped < unclipped).float().mean()  # share that the clip has stopped
    if ref_logprobs is not None:
        delta = ref_logprobs.detach().reshape_as(new) - new
        delta = delta.clamp(max=20)  # an outlier would overflow; it gets no gradient
        metrics["kl"] = (torch.expm1(delta) - delta).mean()  # expm1 is accurate near 0
        loss = loss + kl_coef * metrics["kl"]
    metrics["loss"] = loss
    return loss, {name: value.item() for name, value in metrics.items()}

def compute_policy_logprobs(logits, allowed=None):
    """log pi(code): THE distribution of the policy, one definition for sampler and trainer.
    logits [.., V], already divided by the temperature, fp32 (a bf16 log-prob of -9 is off by 0.03);
    allowed [.., V], bool: the nucleus, or None for all codes -> log-probs [.., V].
    The trap of top-p: in the nucleus a token is likelier than in the whole softmax. A trainer that
    uses the latter, or computes the nucleus anew, improves another policy than was sampled. So the
    sampler keeps its nuclei; all log-probs, the reference's too, are inside them (2512.02556)."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -math.inf)
    return logits.log_softmax(dim=-1)

# --- Rewards -------------------------------------------------------------------------------------
# Any function of images that gives a number each, higher is better, or None for no opinion.
# Nothing is differentiated. Your own, in mine.py, for `--reward mine.py:bright`:
#     def bright(images, prompts, targets):  # PIL images, texts, PIL images to imitate or None
#         return [image.convert("L").resize((1, 1)).getpixel((0, 0)) for image in images]
COLORS = {name: torch.tensor(ImageColor.getrgb(name)) / 255  # [3], in 0..1
          for name in "red orange yellow green blue purple white black".split()}

def pil_to_tensor(images):  # PIL images of one size -> [N, 3, H, W], fp32 in 0..1
    pixels = np.stack([image.convert("RGB") for image in images])
    return torch.from_numpy(pixels).movedim(3, 1) / 255

def tensor_to_pil(tensor):  # [N, 3, H, W] in 0..1 -> PIL images, for code of your own
    return diffusers.utils.pt_to_pil(2 * tensor.float() - 1)

def reward_color(images, prompts, targets=None):
    """1 - |mean colour - the first colour that the prompt names|: 0..1, None if it names none."""
    scores = []
    for image, prompt in zip(images, prompts):
        named = re.search(rf"\b({'|'.join(COLORS)})\b", prompt.lower())
        mean = pil_to_tensor([image]).mean((0, 2, 3))
        scores.append(1 - F.l1_loss(mean, COLORS[named[0]]) if named else None)
    return scores

def reward_mse(images, prompts, targets):  # minus the squared error to the target, resized
    targets = [target.resize(images[0].size) for target in targets]
    return -(pil_to_tensor(images) - pil_to_tensor(targets)).square().mean((1, 2, 3))

REWARDS = {"color": reward_color, "mse": reward_mse}
run_file = functools.cache(runpy.run_path)  # a file with two rewards in it runs once

class RewardError(ValueError):
    """What a reward returned cannot be used."""

def load_rewards(text):  # "color=1,mine.py:sharp=.2" -> {name: (function, weight)}
    rewards = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        path, _, function = name.rpartition(":")
        found = REWARDS.get(name)
        if os.path.isfile(path):
            try:
                found = run_file(path).get(function)
            except Exception as error:  # no ValueError, which main would make one line
                raise RuntimeError(f"{path} failed") from error
        if found is None or name in rewards:
            raise ValueError(f"--reward {part}: unknown, or twice; color, mse, file.py:function")
        rewards[name] = found, float(weight or 1)
    return rewards

def compute_rewards(images, prompts, targets, rewards, group_size=1, norm="none"):
    """{name: (function, weight)} -> the weighted sum [N], and {metric: float}, the raw means.
    A None becomes the mean of its group, or 0 if all are None. A NaN is an error: else a broken
    reward would train nothing, silently. norm "group" adds up z-scores in the group instead."""
    total = torch.zeros(len(images))
    metrics = {"reward": 0.0}
    for name, (function, weight) in rewards.items():
        copies = [image.copy() for image in images]  # a reward may draw on them
        values = list(function(copies, prompts, targets))
        scores = torch.tensor([math.nan if value is None else float(value) for value in values])
        given = scores.isfinite()  # False: a None, or a NaN or inf, refused below
        if len(values) != len(images) or values.count(None) != sum(~given):
            raise RewardError(f"the reward {name} gave not {len(images)} finite numbers: {values}")
        if given.any():
            metrics[f"reward/{name}"] = scores[given].mean().item()
            metrics["reward"] += weight * metrics[f"reward/{name}"]
        mean = scores.view(-1, group_size).nanmean(dim=1).nan_to_num()  # [P]
        scores = scores.where(given, mean.repeat_interleave(group_size))
        if norm == "group":
            scores = compute_advantages(scores, group_size)
        total += weight * scores
    return total, metrics

def load_prompts(path):
    """Lines `prompt`, `prompt<TAB>target.png` or `# comment` -> prompts, targets (None without)."""
    prompts = []
    targets = []
    for line in Path(path).read_text(encoding="utf-8-sig").splitlines():
        prompt, _, file = line.strip().partition("\t")
        if prompt and prompt[0] != "#":
            prompts.append(prompt)
            targets.append(Image.open(Path(path).parent / file).convert("RGB") if file else None)
    if not prompts:
        raise ValueError(f"--prompts {path}: no prompt")
    return prompts, targets

# --- LoRA (arXiv 2106.09685): the weights that are trained ---------------------------------------
class LoRA:
    """W x becomes W x + 2 B A x, with W frozen and B = 0 at first, so that nothing changes yet.
    `weights` holds A [rank, in] and B [out, rank] of the linear layers whose names fit `targets`,
    in fp32: a bf16 weight of 0.02 plus an Adam step of 5e-5 is the same bf16 weight."""
    def __init__(self, model, targets, rank):
        self.config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=targets)
        self.enabled = True
        self.weights = {}  # under peft's names
        for name, linear in model.named_modules():
            if re.fullmatch(targets, name):
                A = torch.nn.Linear(linear.in_features, rank, bias=False, device=DEVICE).weight
                B = torch.nn.Parameter(torch.zeros(linear.out_features, rank, device=DEVICE))
                self.weights[f"{name}.lora_A.weight"] = A
                self.weights[f"{name}.lora_B.weight"] = B
                linear.register_forward_hook(functools.partial(self.add_low_rank, A, B))

    def add_low_rank(self, A, B, linear, inputs, output):
        if self.enabled:  # no return: no change
            low = inputs[0] @ A.to(output).T  # [.., rank]
            return output + 2 * low @ B.to(output).T

    @contextlib.contextmanager
    def disabled(self):  # inside `with lora.disabled():` the model *is* the reference: no copy
        self.enabled = False
        yield
        self.enabled = True

    def save(self, folder, base_model):  # as transformers' load_adapter and peft read it
        os.makedirs(folder, exist_ok=True)
        config = self.config | dict(base_model_name_or_path=base_model)
        Path(folder, "adapter_config.json").write_text(json.dumps(config))
        tensors = {f"base_model.model.{name}": weight for name, weight in self.weights.items()}
        safetensors.torch.save_file(tensors, Path(folder, "adapter_model.safetensors"))

# --- GLM-Image: prompt -> tokens -> image, with the log-probs that GRPO needs --------------------
def build_position_ids(attention_mask, grids):
    """For rotary embeddings, positions (t, h, w): mask [B, L], (h, w) of grids -> [3, B, L + T].
    Text counts up in all three. A grid holds t still and counts its rows in h, its columns in w;
    the next one starts max(h, w) further on. A padded prompt of 3, a 1 x 2 draft, a 2 x 2 grid:
              pad  prompt    draft   large
         t:    1   0  1  2   3  3    5  5  5  5
         h:    1   0  1  2   3  3    5  5  6  6
         w:    1   0  1  2   3  4    5  6  5  6
    The trap: `transformers` makes these in `generate` only. A plain forward pass takes the image
    for a line of text, without any error, and every log-prob is wrong."""
    text = (attention_mask.cumsum(1) - 1).masked_fill(attention_mask == 0, 1)  # as in transformers
    parts = [text.expand(3, -1, -1)]
    start = attention_mask.sum(1, keepdim=True)  # [B, 1]
    for h, w in grids:
        cells = start.new_ones(1, h, w).nonzero()  # (0, row, column) of each: [h * w, 3]
        parts.append(start + cells.T[:, None])
        start = start + max(h, w)
    return torch.cat(parts, 2)

class GLMImageWrapper:
    """A `GlmImagePipeline` as a policy. A model of your own needs what the trainer uses: `policy`
    (gets the adapters), `TARGETS` (a regex for its linear layers), `sample`, `compute_logprobs`,
    `decode`, `generate_with_tracking`. All chance comes from the seeds that it is given."""
    TARGETS = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate_up|down)_proj"

    def __init__(self, pipe, config):
        self.pipe = pipe
        self.config = config
        self.policy = pipe.vision_language_encoder  # the pipeline's name for the AR half
        own = self.policy.generation_config
        self.temperature = config.temperature or own.temperature or 1.0
        self.top_p_filter = transformers.TopPLogitsWarper(config.top_p or own.top_p or 1.0)
        self.ar_half = torch.nn.ModuleList([self.policy.model.language_model, self.policy.lm_head])
        self.dit_half = torch.nn.ModuleList([pipe.text_encoder, pipe.transformer, pipe.vae])
        self.held = None  # the half on the GPU
        self.homes = {}  # half -> weights, CPU copies
        offload = config.offload == "on" or (config.offload == "auto" and 0 < FREE_GIB < 60)
        for half in (self.ar_half, self.dit_half):
            half.requires_grad_(False).eval().to("cpu" if offload else DEVICE)
            if offload and CUDA:
                half._apply(torch.Tensor.pin_memory)  # a GPU reads pinned memory fast
            parts = [*half.parameters(), *half.buffers()]
            self.homes[half] = [(part, part.data) for part in parts if offload]
        self.policy.activation_checkpointing_enable()
        pipe.set_progress_bar_config(disable=True)
        pipe.vae.enable_slicing()  # image by image: four at once, at 1024 pixels, take 28 GiB
        # Rotary tables of the DiT, for H/8 x W/8 latents: made once, not on the CPU at every call.
        tables = pipe.transformer.rope(torch.empty(1, 1, config.height // 8, config.width // 8))
        pipe.transformer.forward = functools.partial(
            pipe.transformer.forward, image_rotary_emb=[table.to(DEVICE) for table in tables])
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN (pytorch #196678)

    @classmethod
    def from_pretrained(cls, path, config):  # path: hub id, folder, or tiny
        if path == "tiny":
            torch.set_num_threads(1)  # more are slower
            return cls(make_tiny_pipeline(config.seed), config)
        dtype = torch.bfloat16 if CUDA else torch.float32
        return cls(diffusers.GlmImagePipeline.from_pretrained(path, dtype=dtype), config)

    def hold(self, half):  # this half to the GPU, the other off it; frozen: none is copied back
        if half is not self.held:
            self.held = half
            for weight, home in sum(self.homes.values(), []):  # first, to free the GPU
                weight.data = home
            for weight, home in self.homes[half]:
                weight.data = home.to(DEVICE, non_blocking=True)

    def encode(self, prompts):
        """-> ids [B, L], position_ids [3, B, L + T] and visible [B, 1, L + T, L + T], bool: may a
        position (row) look at another (column)? At itself and at what stands before it."""
        texts = [dict(type="text", text=prompt) for prompt in prompts]
        chats = [[dict(role="user", content=[text])] for text in texts]
        settings = dict(target_h=self.config.height, target_w=self.config.width,
                        padding=True, padding_side="left")
        inputs = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs=settings).to(DEVICE)
        mask = inputs.attention_mask  # [B, L], 0: padding
        large, draft = inputs.image_grid_thw[:2, 1:].tolist()  # (h, w); large is listed first
        position_ids = build_position_ids(mask, [draft, large])  # the draft is sampled first
        T = position_ids.shape[2] - mask.shape[1]
        real = F.pad(mask.bool(), (0, T), value=True)
        # Padding sees itself too: a row that sees nothing may become NaN on a GPU, and spread.
        itself = torch.eye(real.shape[1], dtype=torch.bool, device=DEVICE)
        visible = (real[:, None, None] | itself).tril()
        return inputs.input_ids, position_ids, visible

    def forward(self, ids, position_ids, visible, start=0, cache=None):
        """ids [B, n], fed at the positions from start on -> logits [B, n, V] of image codes, ids 0
        to V - 1. It calls the inner model, as the outer class makes positions of its own."""
        language_model, lm_head = self.ar_half
        for layer in language_model.layers:
            layer.training = torch.is_grad_enabled() and self.config.model != "tiny"  # to recompute
        rows = slice(start, start + ids.shape[1])
        hidden = language_model(
            input_ids=ids, position_ids=position_ids[..., rows], attention_mask=visible[:, :, rows],
            past_key_values=cache, use_cache=False).last_hidden_state  # a given one is used
        codebook_size = self.pipe.transformer.config.prior_vq_quantizer_codebook_size
        return lm_head(hidden)[..., :codebook_size].float() / self.temperature

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """Step 1. P prompts, a seed for each -> tokens, logprobs [N, T], allowed [N, T, V]: the
        nuclei. Not `generate`: it mixes up grids in a batch, may end early, takes 50 codes."""
        self.hold(self.ar_half)
        feed, position_ids, visible = self.encode(np.repeat(prompts, group_size).tolist())
        T = position_ids.shape[2] - feed.shape[1]
        cache = transformers.StaticCache(self.policy.config.text_config, position_ids.shape[2])
        # Luck comes from the seed of each group, so that a sample does not depend on the batch.
        dice = [torch.Generator().manual_seed(seed) for seed in seeds]
        chance = torch.cat([torch.rand(group_size, T, generator=die) for die in dice]).to(DEVICE)
        start = 0
        steps = []
        for i in progress(range(T), "sample"):  # the prompt is fed at first, then code after code
            logits = self.forward(feed, position_ids, visible, start, cache)[:, -1]  # [N, V]
            nucleus = self.top_p_filter(None, logits).isfinite()  # [N, V]; all other codes are -inf
            logprobs = compute_policy_logprobs(logits, nucleus)
            # Inverse CDF: where a uniform number falls in the running sum of probabilities.
            mass = logprobs.double().exp().cumsum(1)
            point = chance[:, i:i + 1] * mass[:, -1:]
            code = torch.searchsorted(mass, point, right=True)  # [N, 1]
            steps.append([code, logprobs.gather(1, code), nucleus[:, None].cpu()])
            start += feed.shape[1]
            feed = code
        return [torch.cat(parts, 1).cpu() for parts in zip(*steps)]

    def compute_logprobs(self, prompts, tokens, allowed=None):
        """Teacher forcing: tokens [B, T], allowed [B, T, V] -> log-probs, entropy, both [B, T]."""
        self.hold(self.ar_half)
        ids, position_ids, visible = self.encode(prompts)
        tokens = tokens.to(DEVICE)
        logits = self.forward(torch.cat([ids, tokens], 1), position_ids, visible)
        logits = logits[:, ids.shape[1] - 1:-1]  # [B, T, V]: a token is predicted one place earlier
        logprobs = compute_policy_logprobs(logits, allowed)
        entropy = torch.distributions.Categorical(logits=logprobs).entropy()
        return logprobs.gather(2, tokens[..., None])[..., 0], entropy

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        """Step 2. P prompts and seeds, tokens [N, T] -> N images, of the large grid. A group shares
        its noise (DanceGRPO, 2505.07818): its rewards differ because its tokens do, not by luck."""
        self.hold(self.dit_half)
        config = self.config
        h = config.height // 32
        w = config.width // 32
        large = tokens[:, -h * w:].to(DEVICE).view(-1, h, w)
        codes = torch.kron(large, large.new_ones(1, 2, 2)).flatten(1)  # the DiT wants 2 x 2 of each
        groups = codes.chunk(len(prompts))
        images = []
        for prompt, group, seed in zip(prompts, groups, progress(seeds, "decode")):
            # The DiT reads only quoted words (glyphs). A prompt at a time: padding alters images.
            glyphs, _ = self.pipe.encode_prompt(prompt, do_classifier_free_guidance=False)
            for part in group.split(config.micro_batch_size):
                noise = [torch.Generator().manual_seed(seed) for _ in part]
                images += self.pipe(
                    prompt_embeds=glyphs.repeat(len(part), 1, 1), prior_token_ids=part,
                    generator=noise, height=config.height, width=config.width,
                    guidance_scale=config.guidance, num_inference_steps=config.decode_steps).images
        return images

    def generate_with_tracking(self, prompts, group_size, seeds):  # -> images, tokens ..
        samples = self.sample(prompts, group_size, seeds)
        return self.decode(prompts, samples[0], seeds), *samples

# --- The trainer ---------------------------------------------------------------------------------
def gather(rows):  # a list -> the lists of all GPUs joined, in the order of their ranks
    parts = [rows] * WORLD_SIZE
    if WORLD_SIZE > 1:
        torch.distributed.all_gather_object(parts, rows)
    return sum(parts, [])

def merge_rows(rows):  # metrics of several samples or GPUs -> one row: means, or maxima
    merged = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        maximum = key in ("ratio_max", "sampler_gap", "grad_norm", "skipped", "peak_gib")
        values = [row[key] for row in rows if key in row]
        merged[key] = float(np.max(values) if maximum else np.mean(values))
    return merged

def split_rollout(rollout, size):  # {key: n values} -> micro-batches with the same keys
    for start in range(0, len(rollout["tokens"]), size):
        yield {key: values[start:start + size] for key, values in rollout.items()}

def read_checkpoint(folder):  # -> what save_checkpoint wrote: data alone, no code in it is run
    try:
        return dict(torch.load(Path(folder, "checkpoint.pt"), "cpu", weights_only=True))
    except Exception as error:
        raise ValueError(f"--resume: {folder} holds no run: {error!r}")

class GRPOTrainer:
    """GRPO on `wrapper.policy`. rewards: {name: (function, weight)}, targets: images or None."""
    def __init__(self, config, wrapper, prompts, rewards=None, targets=None):
        self.config = config
        self.wrapper = wrapper
        self.prompts = prompts
        self.targets = targets or [None] * len(prompts)
        self.rewards = rewards or load_rewards(config.reward)
        self.out = Path(config.out)
        self.history = [{"step": 0}]  # rows of metrics.jsonl; 0 is untrained, so the length is next
        transformers.set_seed(config.seed)  # for LoRA
        self.lora = LoRA(wrapper.policy, wrapper.TARGETS, config.lora_rank)
        self.optimizer = torch.optim.AdamW(self.lora.weights.values(), config.lr, weight_decay=0.0)

    def train(self):  # until config.steps are done; whatever ends it, whole steps are saved
        config = self.config
        self.finish_step()  # step 0, the untrained policy, or the one resumed from
        while len(self.history) <= config.steps:
            rollout, metrics = self.rollout(len(self.history))  # 1. sample, 2. decode, 3. score
            rewards = gather(rollout["rewards"].tolist())  # 4. compare: [N], of all GPUs
            advantages = compute_advantages(rewards, config.group_size, config.scale_rewards)
            rollout["advantages"] = advantages.chunk(WORLD_SIZE)[RANK].to(DEVICE)
            metrics |= self.train_step(rollout)  # 5. update
            self.history.append({"step": len(self.history), **merge_rows(gather([metrics]))})
            self.finish_step()  # 6. log
            if [row.get("skipped") for row in self.history[-3:]] == [1, 1, 1]:
                raise FloatingPointError("gradients of three steps were not finite: lower --lr")

    def choose_prompts(self, step):
        """-> indices of a GPU's prompts, their seeds. A turn is a prompt's number in the run: seed
        and prompt follow from it alone. Each prompt comes once before any comes again."""
        config = self.config
        n = len(self.prompts)
        turns = range((step - 1) * config.batch_size + RANK, step * config.batch_size, WORLD_SIZE)
        orders = [np.random.default_rng([config.seed, turn // n]).permutation(n) for turn in turns]
        chosen = [order[turn % n] for order, turn in zip(orders, turns)]
        return chosen, [(config.seed * 1_000_003 + turn) % 2**32 for turn in turns]

    def rollout(self, step):  # steps 1 to 3, on this GPU's prompts -> {key: n values}, metrics
        config = self.config
        chosen, seeds = self.choose_prompts(step)
        transformers.set_seed(seeds[0])  # the global generators, for rewards that use them
        group_prompts = [self.prompts[i] for i in chosen]
        times = [time.perf_counter()]
        tokens, logprobs, allowed = self.wrapper.sample(group_prompts, config.group_size, seeds)
        times.append(time.perf_counter())
        images = self.wrapper.decode(group_prompts, tokens, seeds)
        times.append(time.perf_counter())
        prompts = np.repeat(group_prompts, config.group_size).tolist()  # p0 p0 .. p1 p1 ..
        targets = [self.targets[i] for i in np.repeat(chosen, config.group_size)]
        rewards, metrics = compute_rewards(
            images, prompts, targets, self.rewards, config.group_size, config.reward_norm)
        times.append(time.perf_counter())
        metrics |= zip(["sec_sample", "sec_decode", "sec_score"], np.diff(times))
        std = rewards.double().view(-1, config.group_size).std(1)  # [P]; 0: nothing to learn
        metrics["reward_std"] = std.mean().item()
        metrics["frac_zero_std"] = (std == 0).float().mean().item()
        rollout = dict(prompts=prompts, images=images, tokens=tokens, logprobs=logprobs,
                       allowed=allowed, rewards=rewards)
        return rollout, metrics

    def train_step(self, rollout):
        """Step 5: one rollout -> metrics. Every sample counts by its share of all, so that neither
        the micro-batch size nor the number of GPUs changes the gradient."""
        config = self.config
        start = time.perf_counter()
        weights = list(self.lora.weights.values())
        batches = list(split_rollout(rollout, config.micro_batch_size))
        with self.lora.disabled(), torch.no_grad():
            for batch in batches if config.kl_coef > 0 else []:
                batch["ref_logprobs"], _ = self.wrapper.compute_logprobs(
                    batch["prompts"], batch["tokens"], batch["allowed"])
        rows = []
        for _ in range(config.num_iterations):
            for batch in progress(batches, "update"):
                new_logprobs, entropy = self.wrapper.compute_logprobs(
                    batch["prompts"], batch["tokens"], batch["allowed"])  # [B, T] each
                # The trap of bf16: sampler and trainer round differently, their ratio is not 1.
                # So the old log-probs are those of this first pass, kept for later iterations.
                batch.setdefault("old_logprobs", new_logprobs.detach())
                loss, metrics = compute_grpo_loss(
                    new_logprobs, batch["old_logprobs"], batch["advantages"], config.clip_range,
                    config.clip_range_high, batch.get("ref_logprobs"), config.kl_coef)
                share = len(new_logprobs) / len(rollout["tokens"]) / WORLD_SIZE
                (loss * share).backward()
                gap = batch["logprobs"].to(DEVICE) - batch["old_logprobs"]
                metrics["sampler_gap"] = gap.abs().max().item()
                metrics["entropy"] = entropy.mean().item()
                rows += [metrics] * len(new_logprobs)  # a row a sample: the mean is over samples
            for weight in weights if WORLD_SIZE > 1 else []:
                torch.distributed.all_reduce(weight.grad)  # a sum, as each GPU had its share
            norm = torch.nn.utils.clip_grad_norm_(weights, config.max_grad_norm).item()
            finite = math.isfinite(norm)
            if finite:  # a NaN would stay in Adam's moments
                self.optimizer.step()
            self.optimizer.zero_grad()
            rows.append(dict(grad_norm=norm, skipped=1 - finite))
        return merge_rows(rows) | dict(sec_update=time.perf_counter() - start,
                                       peak_gib=torch.cuda.max_memory_allocated() / 2**30)

    def save_checkpoint(self):  # aside, then renamed: whatever ends a run, its last step is whole
        config = self.config
        state = dict(config=dataclasses.asdict(config), history=self.history,
                     adapter=self.lora.weights, optimizer=self.optimizer.state_dict(),
                     same=[config.model, config.lora_rank, config.seed, self.prompts])
        part = self.out / "checkpoint.part"
        torch.save(state, part)
        part.replace(self.out / "checkpoint.pt")

    def load_checkpoint(self, folder):  # a run goes on; the lr is that of the config
        state = read_checkpoint(folder)
        self.history = state["history"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0]["lr"] = self.config.lr
        for name, weight in self.lora.weights.items():
            weight.data.copy_(state["adapter"][name])

    def finish_step(self):  # step 6: the checkpoint comes before the pictures
        if RANK > 0:
            return
        self.lora.save(self.out / "adapter", self.config.model)  # which makes the folder
        self.save_checkpoint()
        row = self.history[-1]
        if row["step"] % self.config.save_every == 0 or row["step"] == self.config.steps:
            row["reward_fixed"] = self.save_samples(f"samples_{row['step']:05d}.png")
            self.save_checkpoint()  # now with reward_fixed
        lines = "\n".join(json.dumps(row) for row in self.history)
        (self.out / "metrics.jsonl").write_text(lines)
        keys = "step reward reward_std loss kl clip_frac entropy grad_norm sampler_gap reward_fixed"
        print(*[f"{key} {row[key]:<8.4g}" for key in keys.split() if key in row], flush=True)

    def save_samples(self, name):  # fixed prompts and seeds: only the policy changes -> mean reward
        prompts = self.prompts[:8]
        images = self.wrapper.generate_with_tracking(prompts, 1, range(len(prompts)))[0]
        transformers.set_seed(self.config.seed)  # for random rewards; below, all are one group
        rewards, _ = compute_rewards(images, prompts, self.targets[:8], self.rewards, len(images))
        diffusers.utils.make_image_grid(images, 1, len(images)).save(self.out / name)
        return rewards.mean().item()

# --- The toy: the real classes with 0.7 M weights; its 8 codes are the COLORS --------------------
def make_tiny_models():  # -> a GlmImagePipeline of random weights; it knows no word but COLORS
    names = [*COLORS, *"bos eos pad unk image grid_bos grid_eos".split()]  # Bert adds three
    special = {f"{name}_token": name for name in names[8:]}
    special["model_input_names"] = ["input_ids", "attention_mask"]
    tokenizer = transformers.BertTokenizer({name: i for i, name in enumerate(names)}, **special)
    processor = transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessorPil(), tokenizer, "{{ messages[0].content[0].text }}")
    def halve_draft(height, width):  # -> rows, columns of the large grid, then of the draft
        return height // 32, width // 32, height // 64, width // 64
    processor._get_target_shape = halve_draft  # else the draft is 16 x 16 at any size
    ar = transformers.GlmImageForConditionalGeneration(transformers.GlmImageConfig(
        text_config=dict(vocab_size=18, vision_vocab_size=16, hidden_size=128, num_hidden_layers=2,
                         num_attention_heads=2, intermediate_size=128, initializer_range=0.1,
                         eos_token_id=9, pad_token_id=10),
        vision_config=dict(depth=0, hidden_size=16), vq_config=dict(embed_dim=16, num_embeddings=8),
        image_start_token_id=8, image_end_token_id=9, image_token_id=12))
    t5 = transformers.T5EncoderModel(transformers.T5Config(vocab_size=384, d_model=8, num_layers=0))
    dit = diffusers.GlmImageTransformer2DModel(
        num_layers=1, num_attention_heads=2, text_embed_dim=8, time_embed_dim=32, condition_dim=8,
        prior_vq_quantizer_codebook_size=8)
    vae = diffusers.AutoencoderKL(
        up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[8] * 4, layers_per_block=0,
        mid_block_add_attention=False, latent_channels=16, norm_num_groups=1,
        latents_mean=[0.0] * 16, latents_std=[1.0] * 16)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    return diffusers.GlmImagePipeline(
        transformers.ByT5Tokenizer(), processor, t5, ar, vae, dit, scheduler)

def make_tiny_pipeline(seed=0, warmup_steps=200):
    """Fitted for seconds: the painter shows codes as COLORS, the AR half heeds colours a little."""
    torch.manual_seed(seed)
    pipe = make_tiny_models()
    wrapper = GLMImageWrapper(pipe, Config(**TINY, offload="off", batch_size=WORLD_SIZE))
    del pipe.transformer.forward  # made for 128 pixels
    pipe.vae.disable_slicing()  # which is quicker
    paint = diffusers.GlmImagePipeline.__call__.__wrapped__  # the pipeline, with gradients
    palette = 2 * torch.stack(list(COLORS.values())).to(DEVICE) - 1  # [V, 3]
    parts = torch.nn.ModuleList([wrapper.ar_half, wrapper.dit_half]).requires_grad_()
    optimizer = torch.optim.Adam(parts.parameters(), 3e-3)
    for _ in progress(range(warmup_steps)):
        # The policy: 40 % of 4 + 16 tokens get the colour of the prompt, the others are random.
        said = torch.randint(8, (8, 1))
        other = torch.randint(8, (8, 20))
        tokens = torch.where(torch.rand(8, 20) < 0.4, said, other)
        logprobs, _ = wrapper.compute_logprobs([f"a {list(COLORS)[i]} thing" for i in said], tokens)
        # The painter: 2 x 2 codes become squares of 16 pixels, from noise in one step.
        codes = torch.randint(8, (8, 4)).to(DEVICE)
        goals = F.interpolate(palette[codes].mT.unflatten(2, (2, 2)), 32)  # [B, 3, 32, 32]
        glyphs = torch.randn(8, 1, 8).to(DEVICE)
        latents = paint(
            pipe, prompt_embeds=glyphs, prior_token_ids=codes, height=32, width=32,
            num_inference_steps=1, guidance_scale=1.0, output_type="latent").images
        loss = F.mse_loss(pipe.vae.decode(latents).sample, goals) - logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return pipe

# --- The command line ----------------------------------------------------------------------------
def parse_args(argv=None):  # -> Config; what is typed wins over a resumed run or TINY
    parser = transformers.HfArgumentParser(
        Config, usage=argparse.SUPPRESS, epilog=inspect.getsource(Config).split("    def ")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(model=Config.model if FREE_GIB >= 60 else "tiny")
    typed = parser.parse_args(argv)
    if typed.resume is not None:
        parser.set_defaults(**read_checkpoint(typed.resume)["config"])
    elif typed.model == "tiny":
        parser.set_defaults(**TINY)
    return Config(**vars(parser.parse_args(argv)))

def main(argv=None):
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group("gloo")  # slower than NCCL, but no dead peer hangs it
    try:
        config = parse_args(argv)
        prompts, targets = load_prompts(config.prompts)
        rewards = load_rewards(config.reward)
        if "mse" in rewards and None in targets:
            raise ValueError(f"--reward mse: a line of {config.prompts} has no target")
        if not config.resume and RANK == 0 and os.path.exists(config.out):
            raise ValueError(f"--out {config.out} exists: name another folder, or --resume it")
        same = [config.model, config.lora_rank, config.seed, prompts]  # as in save_checkpoint
        if config.resume and read_checkpoint(config.resume)["same"] != same:
            raise ValueError("--resume: the run has another model, --lora-rank, --seed or prompts")
        print(f"model: {config.model} on {DEVICE}, files: {config.out}")
        wrapper = GLMImageWrapper.from_pretrained(config.model, config)
        trainer = GRPOTrainer(config, wrapper, prompts, rewards, targets)
        if config.resume:
            trainer.load_checkpoint(config.resume)
        trainer.train()
    except KeyboardInterrupt:
        sys.exit(f"stopped; python grpo.py --resume {config.out} goes on after its last step")
    except (ValueError, OSError, ImportError) as error:
        if "trainer" in locals() and not isinstance(error, (RewardError, ModuleNotFoundError)):
            raise  # a bug, where the traceback helps
        print("grpo.py: error:", *str(error).split(), file=sys.stderr)  # on one line
        sys.exit(2)

if __name__ == "__main__":
    main()
