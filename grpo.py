"""grpo.py: GRPO for GLM-Image, in one file.

GLM-Image draws in two halves: an autoregressive transformer (AR, 9 B) samples visual tokens, a
diffusion transformer (DiT, 7 B) decodes them into pixels. Here the AR half learns what to draw:

    prompt ---> AR ---- tokens ---> DiT + VAE ---> image ---> reward ---> advantage
              trained                frozen              any function    z-score in the group
                 ^--------------- update: a clipped policy gradient <---------+

A step of GRPO (DeepSeekMath, arXiv 2402.03300) is a turn of the loop in `GRPOTrainer.train`:
  1. sample   the policy, AR + LoRA, draws G token sequences for each of P prompts; a token is an
              action, the samples of a prompt are a group
  2. decode   the frozen DiT paints them; a group shares its noise, so that only tokens differ
  3. score    any function turns images into numbers; no gradient passes through a picture
  4. compare  advantage = (reward - mean) / std of its group: the group mean is the baseline
              that a value network would otherwise have to learn
  5. update   make tokens of better images likelier and those of worse ones less, within PPO's
              clip, at a price (KL) for leaving the base model
  6. log      metrics, pictures of fixed prompts, a checkpoint
`python grpo.py` runs a toy on a laptop, or GLM-Image on a GPU with 60 GiB free.

Axes: N = P * G samples ordered p0 p0 .. p1 p1 .., B of them in a micro-batch; L prompt tokens,
padded on the left; T image tokens, each one of V codes: a small draft of the picture, then the
large grid that is painted. The image size alone sets T, so the loss needs no mask.
"""
from __future__ import annotations  # Config's are functions that stand with the command line

import argparse, contextlib, dataclasses, functools, inspect, io, json, math, os, re, runpy, signal
import sys, time
from pathlib import Path
from typing import Literal, get_args, get_type_hints

import diffusers, safetensors.torch, torch, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageColor, ImageDraw

# --- Settings: a field is a flag, its comment the help, its annotation checks what is typed ------
@dataclasses.dataclass
class Config:
    model: absolute = "zai-org/GLM-Image"  # hub id, folder, or tiny: a toy for a laptop
    resume: os.path.abspath = None  # folder of a run to go on with, under its own settings
    prompts: os.path.abspath = str(Path(__file__).with_name("prompts.txt"))  # text, one a line
    reward: absolute = "color"  # color, mse, file.py:function, or several: color=1,mine.py:sharp=.2
    reward_norm: Literal["none", "group"] = "none"  # group: z-score each reward first
    steps: count = 300  # rollouts
    group_size: in_range(int, 2) = 4  # images per prompt
    batch_size: count = 8  # prompts per step, on all GPUs together
    micro_batch_size: count = 1  # images at a time in decode and update; no result changes
    lr: amount = 5e-5  # of AdamW; LoRA wants about ten times the rate of full weights
    num_iterations: count = 1  # updates per rollout; from 2 on the clip matters
    clip_range: amount = 0.2  # a ratio may fall to 1 - this
    clip_range_high: amount = None  # a ratio may rise to 1 + this; None: as clip_range
    kl_coef: amount = 0.01  # price of leaving the base model; 0: no KL is computed
    scale_rewards: Literal["group", "batch", "none"] = "group"  # whose std divides advantages
    importance: Literal["token", "sequence"] = "token"  # a ratio per token: GRPO, or GSPO
    max_grad_norm: amount = 1.0  # gradients are clipped to this norm
    lora_rank: count = 32  # of the adapters
    size: image_size = (512, 512)  # pixels: 512, or 1024x768 with the width first
    temperature: in_range(float, 0.01) = None  # of the policy; None: the model's own
    top_p: in_range(float, 0.01, 1) = None  # only the likeliest codes of this mass; None: model's
    decode_steps: count = 20  # denoising steps of the DiT
    guidance: amount = 1.5  # of the DiT; above 1 it runs twice a step
    offload: Literal["auto", "on", "off"] = "auto"  # on: a GPU holds AR or DiT in turn
    save_every: count = 10  # steps between checkpoints, and between pictures of fixed prompts
    seed: in_range(int, 0) = 0  # of everything random
    out: os.path.abspath = None  # new folder for the run; None: runs/<date-time>

TINY = dict(model="tiny", steps=40, micro_batch_size=4, lr=2e-3, lora_rank=16,
            size=(128, 128), decode_steps=1, guidance=1.0)

# --- The maths: pure functions of tensors --------------------------------------------------------
def compute_advantages(rewards, group_size, scale="group"):
    """How much better each sample is than its group: A = (r - mean of its group) / (std + 1e-6).
    rewards [N], ordered by group -> advantages [N], fp32. The std, unbiased, is that of the "group"
    (GRPO, 2402.03300) or of the whole "batch"; "none" does not divide (Dr. GRPO, 2503.20783).
    Equal rewards get exactly 0: such a group teaches nothing, and only the KL acts on it."""
    rewards = torch.as_tensor(rewards).float()
    if group_size < 2 or len(rewards) % group_size or not rewards.isfinite().all():
        raise ValueError(f"no groups of {group_size} finite rewards: {rewards.tolist()}")
    # Minus the first reward: the rounding of a mean (3e-8 for six 0.3s) / 1e-6 would make A 0.03.
    grouped = rewards.view(-1, group_size) - rewards[::group_size, None]  # [P, G]
    advantages = grouped - grouped.mean(dim=1, keepdim=True)
    if scale == "group":
        advantages /= grouped.std(1, keepdim=True) + 1e-6
    elif scale == "batch":
        advantages /= rewards.std() + 1e-6
    elif scale != "none":
        raise ValueError(f"scale is {scale!r}, but must be group, batch or none")
    return advantages.flatten()

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2, clip_range_high=None,
                      ref_logprobs=None, kl_coef=0.0, importance="token"):
    """PPO's clipped surrogate (1707.06347) plus a KL to the reference -> loss, {metric: float}.

        ratio = exp(new - old)
        loss  = -mean(min(ratio * A, clip(ratio, low, high) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1    Schulman's estimate of KL(new, ref)

    Log-probs are [N, T] (or [N]: a sample is one action), advantages [N]. Only new_logprobs gets a
    gradient. low = 1 - clip_range, high = 1 + clip_range_high (DAPO, 2503.14476).
    importance "sequence": one ratio a sequence, exp(mean(new - old)) (GSPO, 2507.18071).

    Why the loss may be 0: with one update per rollout old equals new, every ratio is 1, and
    policy_loss is -mean(A), 0 over whole groups. The gradient is not 0: that of ratio * A at
    ratio 1 is A * grad(new), REINFORCE with a baseline."""
    new = new_logprobs.float().reshape(len(advantages), -1)  # [N, T], or [N, 1]
    A = advantages.detach()[:, None]  # [N, 1]
    log_ratio = new - old_logprobs.detach().reshape_as(new)
    if importance == "sequence":
        log_ratio = log_ratio.mean(dim=1, keepdim=True)
    elif importance != "token":
        raise ValueError(f"importance is {importance!r}, but must be token or sequence")
    ratio = log_ratio.exp()

    # The min is the more pessimistic of the two. Where a ratio has moved far enough the good way,
    # it is the clipped term: a constant, so that no gradient pushes it further.
    high = clip_range if clip_range_high is None else clip_range_high
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip_range, 1 + high) * A
    policy_loss = -torch.min(unclipped, clipped).mean()  # a loss of your own goes here
    loss = policy_loss
    metrics = dict(policy_loss=policy_loss, ratio_mean=ratio.mean(), ratio_max=ratio.max())
    metrics["clip_frac"] = (clipped < unclipped).float().mean()  # share that the clip has stopped
    if ref_logprobs is not None:
        delta = ref_logprobs.detach().reshape_as(new) - new
        delta = delta.clamp(max=20)  # or one far-off token would overflow the whole batch
        metrics["kl"] = (torch.expm1(delta) - delta).mean()  # expm1 keeps small values exact
        loss = policy_loss + kl_coef * metrics["kl"]
    metrics["loss"] = loss
    return loss, {name: value.item() for name, value in metrics.items()}

def compute_policy_logprobs(logits, allowed=None):
    """log pi(code): THE distribution of the policy, one definition for sampler and trainer.
    logits [.., V], fp32 (in bf16 a log-prob of -9 is off by 0.03), divided by the temperature;
    allowed [.., V], bool: the nucleus, or None for all codes -> log-probs [.., V]."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    return logits.log_softmax(dim=-1)

def find_nucleus(logprobs, top_p):
    """The likeliest codes that together hold top_p of the mass: [N, V] -> bool [N, V].
    The trap of top-p: scored by the whole softmax, a token drawn from the nucleus has a ratio that
    is off by the mass cut away. To cut again in training does not help: the policy has moved since.
    So the sampler keeps its nuclei, and new, old and reference log-probs are taken inside them (the
    "keep sampling mask" of DeepSeek-V3.2, 2512.02556)."""
    return transformers.TopPLogitsWarper(top_p)(None, logprobs).isfinite()  # -inf where it cuts

def pack_bits(mask):  # bool [.., V] -> uint8 [.., V / 8]: 16,384 codes take 2 KB a token
    return sum(mask[..., i::8].byte() << i for i in range(8))

def unpack_bits(packed):  # uint8 [.., V / 8] -> [.., V]
    bits = [packed >> i & 1 for i in range(8)]
    return torch.stack(bits, dim=-1).bool().flatten(-2)

# --- Rewards -------------------------------------------------------------------------------------
# function(images, prompts, targets) -> N numbers, higher is better, None is no opinion. Images and
# targets (to imitate, or None) are PIL's. Nothing is differentiated: any function will do.
COLORS = {name: torch.tensor(ImageColor.getrgb(name)) / 255  # [3], in 0..1
          for name in "red orange yellow green blue purple white black".split()}

def pil_to_tensor(images):  # PIL images of one size -> [N, 3, H, W], fp32 in 0..1
    pixels = np.stack([image.convert("RGB") for image in images])
    return torch.from_numpy(pixels).movedim(3, 1) / 255

def tensor_to_pil(tensor):  # [N, 3, H, W], float in 0..1 -> PIL images
    return diffusers.utils.pt_to_pil(2 * tensor.float() - 1)  # which takes -1..1

def reward_color(images, prompts, targets=None):
    """1 - |mean colour - the first colour that the prompt names|: 0..1, None if it names none."""
    scores = []
    for image, prompt in zip(images, prompts):
        named = re.search(rf"\b({'|'.join(COLORS)})\b", prompt.lower())
        mean = pil_to_tensor([image]).mean(dim=(0, 2, 3))  # [3]
        scores.append(1 - F.l1_loss(mean, COLORS[named[0]]) if named else None)
    return scores

def reward_mse(images, prompts, targets):
    """Minus the mean squared error to the target, which is resized to the image (bicubic)."""
    targets = [target.resize(images[0].size) for target in targets]
    return -(pil_to_tensor(images) - pil_to_tensor(targets)).square().mean(dim=(1, 2, 3))

REWARDS = {"color": reward_color, "mse": reward_mse}
run_file = functools.cache(runpy.run_path)  # a file with two rewards in it runs once

@contextlib.contextmanager
def foreign_code(name):
    """A reward runs in here: its errors keep their traceback, what it sets in torch ends here."""
    try:
        with torch.enable_grad():  # at its end the grad mode is again what it was
            yield
    except (Exception, SystemExit) as error:
        raise RuntimeError(f"the reward {name} failed: {error!r}") from error
    finally:
        torch.set_default_dtype(torch.float32)

def load_rewards(text):
    """Like color=1,my_rewards.py:sharp=.2 -> {name: (function, weight)}; no weight is a 1."""
    rewards = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        path, _, function = name.rpartition(":")
        label = os.path.basename(name)  # my_rewards.py:sharp, whatever the folder
        with foreign_code(label):
            found = run_file(path).get(function) if os.path.isfile(path) else REWARDS.get(name)
        if found is None or label in rewards or not math.isfinite(float(weight or 1)):
            raise ValueError(f"--reward {part}: unknown, or twice; color, mse or file.py:function")
        rewards[label] = found, float(weight or 1)
    return rewards

def compute_rewards(images, prompts, targets, rewards, group_size=1, norm="none"):
    """{name: (function, weight)} -> the weighted sum [N], and what each gave {name: [N]}, NaN for a
    None. In the sum a None counts as the mean of its group, or 0 if nobody has an opinion. norm
    "group" adds up z-scores inside the group, so that rewards need no common scale."""
    total = torch.zeros(len(images))
    components = {}
    for name, (function, weight) in rewards.items():
        with foreign_code(name):
            # Copies: a reward that resizes its picture must not change what others see.
            goals = [target and target.copy() for target in targets]
            values = list(function([image.copy() for image in images], list(prompts), goals))
            scores = torch.tensor([float("nan" if value is None else value) for value in values])
            # As many as images, each finite or None:
            if not len(images) == len(values) == scores.isfinite().sum() + values.count(None):
                raise ValueError(f"not {len(images)} finite numbers or None: {values}")
        components[name] = scores
        mean = scores.view(-1, group_size).nanmean(dim=1).nan_to_num()  # [P]
        scores = scores.where(~scores.isnan(), mean.repeat_interleave(group_size))
        if norm == "group":
            scores = compute_advantages(scores, group_size)
        total += weight * scores
    return total, components

def load_prompts(path):
    """Lines `prompt`, `prompt<TAB>target.png` or `# comment` -> prompts, targets (None without)."""
    path = Path(path)
    prompts = []
    targets = []
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        prompt, _, target = line.strip().partition("\t")
        if len(line) > 10_000 or re.search(r"<\|?image\|?>", line):
            raise ValueError(f"--prompts {path}: too long, or with an <image> token: {line:.50}")
        if prompt and prompt[0] != "#":
            prompts.append(prompt)
            targets.append(Image.open(path.parent / target).convert("RGB") if target else None)
    if not prompts:
        raise ValueError(f"--prompts {path} has no prompt")
    return prompts, targets

# --- LoRA (arXiv 2106.09685): the weights that are trained ---------------------------------------
class LoRA:
    """W x becomes W x + 2 B A x, with W frozen and B = 0 at first, so that nothing changes yet.
    `weights` holds A [rank, in] and B [out, rank] of each linear layer whose name fits `targets`,
    under peft's names, in fp32: a bf16 weight of 0.02 plus an Adam step of 5e-5 is the same bf16
    weight. The 2 is alpha / rank, as is usual."""
    def __init__(self, model, targets, rank, device="cpu"):
        self.config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=targets)
        self.enabled = True
        self.weights = {}
        for name, linear in model.named_modules():
            if re.fullmatch(targets, name):
                A = torch.nn.Linear(linear.in_features, rank, bias=False, device=device).weight
                B = torch.nn.Parameter(torch.zeros(linear.out_features, rank, device=device))
                self.weights |= {f"{name}.lora_A.weight": A, f"{name}.lora_B.weight": B}
                linear.register_forward_hook(functools.partial(self.add_low_rank, A, B))
        if not self.weights:
            raise ValueError(f"no linear layer has a name like the wrapper's TARGETS, {targets}")

    def add_low_rank(self, A, B, linear, inputs, output):
        if self.enabled:  # else None is returned, and the output stays
            low = inputs[0] @ A.to(output).T  # [.., rank]
            return output + 2 * low @ B.to(output).T

    @contextlib.contextmanager
    def disabled(self):
        """Inside `with lora.disabled():` the model *is* the reference policy: no second copy."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def save(self, folder, base_model):  # as transformers' load_adapter and peft read it
        config = self.config | dict(base_model_name_or_path=base_model)
        tensors = {f"base_model.model.{name}": weight for name, weight in self.weights.items()}
        write_file(folder / "adapter_model.safetensors", safetensors.torch.save(tensors))
        write_file(folder / "adapter_config.json", json.dumps(config).encode())

def write_file(path, data):  # aside, then renamed: after a crash the old file is still whole
    os.makedirs(path.parent, exist_ok=True)
    part = Path(f"{path}.part")
    part.write_bytes(data)
    part.replace(path)

# --- GLM-Image: prompt -> tokens -> image, with the log-probs that GRPO needs --------------------
def build_position_ids(attention_mask, grids):
    """For rotary embeddings, positions (t, h, w): mask [B, L], grids of T cells -> [3, B, L + T].
    Text counts up in all three. A grid holds t still and counts its rows in h, its columns in w;
    the next one starts max(h, w) further on. A padded prompt of 3, a 1 x 2 draft, a 2 x 2 grid:
              pad  prompt    draft   large
         t:    1   0  1  2   3  3    5  5  5  5
         h:    1   0  1  2   3  3    5  5  6  6
         w:    1   0  1  2   3  4    5  6  5  6
    The trap: `transformers` applies them in `generate` only. A plain forward pass takes the image
    for a line of text, without any error, and every log-prob is wrong."""
    text = (attention_mask.cumsum(dim=1) - 1).masked_fill(attention_mask == 0, 1)  # [B, L]
    parts = [text.expand(3, -1, -1)]
    start = attention_mask.sum(1, keepdim=True)  # [B, 1]
    for h, w in grids:
        cells = start.new_ones(1, h, w).nonzero()  # (0, row, column) of each: [h * w, 3]
        parts.append(start + cells.T[:, None])  # [3, B, h * w]
        start = start + max(h, w)
    return torch.cat(parts, dim=2)

def build_visibility(mask, num_rows):
    """mask [B, columns], False where padded -> [B, 1, rows, columns]: may a position (row) look
    at another (column)? It sees itself and what stands before it, but for padding."""
    # A padded one sees itself too: one that sees nothing may become NaN on a GPU, and spread.
    itself = torch.eye(num_rows, mask.shape[1], dtype=torch.bool, device=mask.device)
    return (mask[:, None, None] | itself).tril()

@contextlib.contextmanager
def on_device(module, device):
    """Offloading: inside the `with` the weights are on the device, after it where they were. They
    are frozen (LoRA's are not in the module): nothing is copied back. Those there already stay."""
    homes = {tensor: tensor.data for tensor in (*module.parameters(), *module.buffers())}
    try:
        for tensor, home in homes.items():
            tensor.data = home.to(device, non_blocking=True)
        yield
    finally:
        for tensor, home in homes.items():
            tensor.data = home

class GLMImageWrapper:
    """A `GlmImagePipeline` as a policy. One of your own needs what the trainer uses: `policy` (gets
    the adapters), `TARGETS` (a regex for its linear layers), `device`, `policy_on_device`,
    `sample`, `compute_logprobs`, `decode`, `generate_with_tracking`; all chance from the seeds."""
    TARGETS = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate_up|down)_proj"

    def __init__(self, pipe, config, device="cpu"):
        self.pipe = pipe
        self.config = config
        self.device = torch.device(device)
        self.width, self.height = config.size
        self.policy = pipe.vision_language_encoder  # the pipeline's name for the AR half
        self.temperature = config.temperature or self.policy.generation_config.temperature or 1.0
        self.top_p = config.top_p or self.policy.generation_config.top_p or 1.0
        self.codebook_size = pipe.transformer.config.prior_vq_quantizer_codebook_size
        # The two halves. The vision tower, for image-to-image, is in neither and stays on the CPU.
        self.ar_half = torch.nn.ModuleList([self.policy.model.language_model, self.policy.lm_head])
        self.dit_half = torch.nn.ModuleList([pipe.text_encoder, pipe.transformer, pipe.vae])
        offload = config.offload == "on" or (config.offload == "auto" and 0 < free_gib() < 60)
        self.policy.requires_grad_(False).activation_checkpointing_enable()  # see forward
        for half in (self.ar_half, self.dit_half):
            half.requires_grad_(False).eval().to("cpu" if offload else device)  # eval: no dropout
            if offload and self.device.type == "cuda":
                half._apply(torch.Tensor.pin_memory)  # a GPU reads pinned memory fast
        pipe.set_progress_bar_config(disable=True)
        pipe.vae.enable_slicing()  # image by image: four at once, at 1024 pixels, take 28 GiB
        # The DiT's rotary tables depend on the size alone, but are made on the CPU at every call.
        angles = pipe.transformer.rope(torch.empty(1, 1, self.height // 8, self.width // 8))
        pipe.transformer.forward = functools.partial(
            pipe.transformer.forward, image_rotary_emb=[table.to(device) for table in angles])
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN (pytorch #196678)

    @classmethod
    def from_pretrained(cls, path, config):
        """path: hub id, folder, or tiny. On a GPU if there is one, and then in bf16."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if path == "tiny":
            return cls(make_tiny_pipeline(config.seed), config, device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        return cls(diffusers.GlmImagePipeline.from_pretrained(path, dtype=dtype), config, device)

    def policy_on_device(self):  # for all that runs the policy, the backward pass included
        return on_device(self.ar_half, self.device)

    def encode(self, prompts):
        """-> ids [P, L], mask [P, L + T], False where padded, position_ids [3, P, L + T]."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in prompts]
        sizes = dict(target_h=self.height, target_w=self.width, padding=True, padding_side="left")
        inputs = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=sizes)
        inputs = inputs.to(self.device)
        mask = inputs.attention_mask  # [P, L]
        large, draft = inputs.image_grid_thw[:2, 1:].tolist()  # the draft is sampled first
        position_ids = build_position_ids(mask, [draft, large])
        T = position_ids.shape[2] - mask.shape[1]
        return inputs.input_ids, F.pad(mask, (0, T), value=1).bool(), position_ids

    def forward(self, ids, visible, position_ids, num_last, cache=None):
        """-> logits [B, num_last, V] of image codes at the last positions, fp32, divided by the
        temperature. The model's own outer classes are left out: they would make other positions."""
        language_model, lm_head = self.ar_half
        for layer in language_model.layers:
            layer.training = torch.is_grad_enabled()  # checkpointing; the parts' dropout stays off
        hidden = language_model(
            input_ids=ids, attention_mask=visible, position_ids=position_ids,
            past_key_values=cache, use_cache=False).last_hidden_state  # a new cache is not made
        return lm_head(hidden[:, -num_last:])[..., :self.codebook_size].float() / self.temperature

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """Step 1. P prompts, a seed per group -> tokens, logprobs [N, T], allowed [N, T, V / 8]:
        the nuclei in bits. Not `generate`: it mixes up grids, may end early, cuts to 50 codes."""
        with self.policy_on_device():
            ids, mask, position_ids = self.encode(np.repeat(prompts, group_size).tolist())
            L = ids.shape[1]
            T = mask.shape[1] - L
            visible = build_visibility(mask, L + T)  # [N, 1, L + T, L + T]
            # Each prompt is read once, but for its last token, with which the loop begins. Then
            # reorder_cache copies its row of keys and values G times.
            cache = transformers.StaticCache(self.policy.config.text_config, L + T)
            self.forward(ids[::group_size, :-1], visible[::group_size, :, :L - 1],
                         position_ids[:, ::group_size, :L - 1], 1, cache)
            cache.reorder_cache(torch.arange(len(prompts)).repeat_interleave(group_size))

            # A random number for each token, from the seed of its group: the batch has no effect.
            chance = [torch.rand(group_size, T, generator=torch.Generator().manual_seed(seed))
                      for seed in seeds]
            chance = torch.cat(chance).to(self.device)  # [N, T]
            code = ids[:, -1:]  # [N, 1]
            steps = []
            for i in range(T):
                now = slice(L - 1 + i, L + i)  # the position fed in
                logits = self.forward(code, visible[:, :, now], position_ids[..., now], 1, cache)
                nucleus = find_nucleus(compute_policy_logprobs(logits[:, 0]), self.top_p)  # [N, V]
                logp = compute_policy_logprobs(logits[:, 0], nucleus)
                # A sample is where a number in 0..1 falls in the running sum of probabilities.
                mass = logp.double().exp().cumsum(dim=1)
                point = chance[:, i:i + 1] * mass[:, -1:]  # [N, 1]
                code = torch.searchsorted(mass, point, right=True)
                steps.append((code, logp.gather(1, code), pack_bits(nucleus[:, None])))
        return tuple(torch.cat(parts, dim=1).cpu() for parts in zip(*steps))

    def compute_logprobs(self, prompts, tokens, allowed=None):
        """Teacher forcing: tokens [B, T], allowed [B, T, V / 8] -> log-probs, entropy [B, T], both
        with a gradient. With offloading, call it and `backward` inside `policy_on_device`."""
        ids, mask, position_ids = self.encode(prompts)
        tokens = tokens.to(self.device)
        ids = torch.cat([ids, tokens[:, :-1]], dim=1)  # nothing is predicted from the last one
        visible = build_visibility(mask[:, :-1], ids.shape[1])
        logits = self.forward(ids, visible, position_ids[..., :-1], tokens.shape[1])  # [B, T, V]
        if allowed is not None:
            allowed = unpack_bits(allowed.to(self.device))
        logp = compute_policy_logprobs(logits, allowed)
        entropy = -(logp.exp() * logp.clamp(min=-1e4)).sum(dim=2)  # 0 * -inf is NaN
        return logp.gather(2, tokens[..., None])[..., 0], entropy

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        """Step 2. P prompts and seeds, tokens [N, T] -> N images, of the large grid. A group shares
        its noise (DanceGRPO, 2505.07818): its rewards differ because its tokens do, not by luck."""
        h = self.height // 32
        w = self.width // 32
        large = tokens[:, -h * w:].to(self.device).view(-1, h, w)
        codes = large.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)  # 32 -> 16 pixels
        images = []
        with on_device(self.dit_half, self.device):
            for prompt, group, seed in zip(prompts, codes.chunk(len(prompts)), seeds):
                images += self.decode_group(prompt, group, seed)
        return images

    def decode_group(self, prompt, codes, seed):
        # What to draw reaches the DiT as codes. Of the prompt it gets quoted words (glyphs) alone,
        # as text to write. A prompt at a time: padding of a shorter one would change its picture.
        glyphs, _ = self.pipe.encode_prompt(prompt, do_classifier_free_guidance=False)
        for part in codes.split(self.config.micro_batch_size):
            yield from self.pipe(
                prompt_embeds=glyphs.repeat(len(part), 1, 1), prior_token_ids=part,
                generator=[torch.Generator().manual_seed(seed) for _ in part],
                height=self.height, width=self.width, guidance_scale=self.config.guidance,
                num_inference_steps=self.config.decode_steps).images

    def generate_with_tracking(self, prompts, group_size, seeds):  # N images, and what sample gives
        samples = self.sample(prompts, group_size, seeds)
        return self.decode(prompts, samples[0], seeds), *samples

def free_gib():  # of GPU memory; 0 without a GPU
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0

# --- The trainer ---------------------------------------------------------------------------------
def gather(rows):  # a list -> the lists of all GPUs joined, in the order of their ranks
    if not torch.distributed.is_initialized():
        return rows
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, rows)
    return sum(parts, [])

def merge_rows(rows):  # metrics of several GPUs or micro-batches -> one row: means, or maxima
    merged = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        merge = np.max if key in ("ratio_max", "sampler_gap", "grad_norm") else np.mean
        merged[key] = float(merge([row[key] for row in rows if key in row]))
    return merged

def split_rollout(rollout, size):  # {key: n values} -> micro-batches with the same keys
    for start in range(0, len(rollout["tokens"]), size):
        yield {key: values[start:start + size] for key, values in rollout.items()}

class GRPOTrainer:
    """GRPO on `wrapper.policy`. rewards: {name: (function, weight)}, by default the config's;
    targets: a PIL image or None for each prompt. Files go to config.out."""
    def __init__(self, config, wrapper, prompts, rewards=None, targets=None):
        self.config = config
        self.wrapper = wrapper
        self.prompts = prompts
        self.targets = targets or [None] * len(prompts)
        self.rewards = rewards or load_rewards(config.reward)
        self.out = Path(config.resume or config.out or time.strftime("runs/%Y%m%d-%H%M%S"))
        self.history = []  # the rows of metrics.jsonl
        self.stopped = 0  # the number of a signal that has come
        self.world_size = len(gather([0]))  # GPUs, each with whole groups of its own
        self.rank = torch.distributed.get_rank() if self.world_size > 1 else 0
        if config.batch_size % self.world_size:
            raise ValueError(f"--batch-size must be a multiple of the {self.world_size} GPUs")
        transformers.set_seed(config.seed)  # for LoRA's first weights
        self.lora = LoRA(wrapper.policy, wrapper.TARGETS, config.lora_rank, wrapper.device)
        self.optimizer = torch.optim.AdamW(self.lora.weights.values(), config.lr, weight_decay=0.0)

    def train(self):
        """GRPO, until config.steps are done or a signal has come to one of the GPUs."""
        config = self.config
        if self.rank == 0:  # a new run makes its folder, and no other may write there meanwhile
            self.out.mkdir(parents=True, exist_ok=bool(self.history))
            import filelock  # which torch brings along
            path = self.out / ".one-run-at-a-time"
            self.lock = filelock.FileLock(path, is_singleton=True).acquire(timeout=0)
        if not self.history:
            self.keep({"step": 0})  # pictures and reward of the untrained policy
        while len(self.history) <= config.steps and not max(gather([self.stopped])):
            try:
                rollout, metrics = self.rollout(len(self.history))  # 1. sample, 2. decode, 3. score
                rewards = torch.tensor(gather(rollout["rewards"].tolist()))  # [N], of all GPUs
            except Exception:
                self.save_checkpoint()  # a reward that fails costs no step: no weight has moved
                raise
            # 4. compare: a group never spans two GPUs, but they share the std of a "batch"
            advantages = compute_advantages(rewards, config.group_size, config.scale_rewards)
            rollout["advantages"] = advantages.chunk(self.world_size)[self.rank]
            with self.wrapper.policy_on_device():
                metrics |= self.train_step(rollout)  # 5. update
            self.keep({"step": len(self.history), **merge_rows(gather([metrics]))})  # 6. log
        self.stopped = max(gather([self.stopped]))
        self.save_checkpoint()

    def choose_prompts(self, step):
        """-> indices of this GPU's prompts and a seed for each, from config.seed and step alone: no
        random state to store. Each prompt comes once, in a new order, before any comes again."""
        seed = self.config.seed
        last = step * self.config.batch_size  # a turn is a prompt drawn in this run
        turns = np.arange(last - self.config.batch_size + self.rank, last, self.world_size)
        laps, places = np.divmod(turns, len(self.prompts))  # a lap is once through all prompts
        orders = [np.random.default_rng([seed, lap]).permutation(len(self.prompts)) for lap in laps]
        chosen = [order[place] for order, place in zip(orders, places)]
        return chosen, ((seed * 1_000_003 + turns) % 2**32).tolist()

    def rollout(self, step):
        """Steps 1 to 3, on this GPU's prompts -> {key: n values}, metrics."""
        config = self.config
        chosen, seeds = self.choose_prompts(step)
        transformers.set_seed(seeds[0])  # the global generators, for rewards that use them
        prompts = [self.prompts[i] for i in chosen]
        start = time.perf_counter()
        tokens, logprobs, allowed = self.wrapper.sample(prompts, config.group_size, seeds)
        sampled = time.perf_counter()
        images = self.wrapper.decode(prompts, tokens, seeds)
        decoded = time.perf_counter()
        rows = np.repeat(chosen, config.group_size)  # p0 p0 .. p1 p1 ..
        rollout = dict(images=images, tokens=tokens, logprobs=logprobs, allowed=allowed,
                       prompts=[self.prompts[i] for i in rows])
        rollout["rewards"], components = compute_rewards(
            images, rollout["prompts"], [self.targets[i] for i in rows], self.rewards,
            config.group_size, config.reward_norm)
        groups = rollout["rewards"].view(-1, config.group_size)  # [P, G]
        metrics = dict(
            reward=0.0, lr=config.lr,  # the reward is summed up below
            reward_std=groups.std(dim=1).mean().item(),  # inside a group: what is learned from
            frac_zero_std=(groups.diff() == 0).all(1).float().mean().item(),
            sec_rollout=sampled - start, sec_decode=decoded - sampled,
            sec_reward=time.perf_counter() - decoded,
            tokens_per_sec=self.world_size * tokens.numel() / (sampled - start))
        for name, (_, weight) in self.rewards.items():
            values = components[name][~components[name].isnan()]
            if len(values):  # raw, without the Nones
                metrics["reward"] += weight * values.mean().item()
                metrics[f"reward/{name}"] = values.mean().item()
                metrics[f"reward_std/{name}"] = values.std(correction=0).item()
        return rollout, metrics

    def train_step(self, rollout):
        """Step 5: one rollout -> metrics. Every sample counts by its share of all, so that neither
        the micro-batch size nor the number of GPUs changes the gradient."""
        config = self.config
        start = time.perf_counter()
        batches = list(split_rollout(rollout, config.micro_batch_size))
        if config.kl_coef > 0:
            self.add_ref_logprobs(batches)
        rows = []
        for batch in batches * config.num_iterations:  # the same dicts: they keep old_logprobs
            new_logprobs, entropy = self.compute_logprobs(batch)  # [B, T] each
            # The trap of bf16: sampler and trainer round differently, so that their ratio is not 1,
            # maybe clipped, before any update. So the old policy is the trainer's own first pass.
            if "old_logprobs" not in batch:
                batch["old_logprobs"] = new_logprobs.detach()
            loss, metrics = compute_grpo_loss(
                new_logprobs, batch["old_logprobs"], batch["advantages"].to(new_logprobs),
                config.clip_range, config.clip_range_high, batch.get("ref_logprobs"),
                config.kl_coef, config.importance)
            share = len(new_logprobs) / len(rollout["tokens"]) / self.world_size
            (loss * share).backward()
            gap = batch["logprobs"].to(new_logprobs) - batch["old_logprobs"]
            metrics["sampler_gap"] = gap.abs().max().item()
            metrics["entropy"] = entropy.mean().item()
            rows.append(metrics)
            if len(rows) % len(batches) == 0:  # all samples have been seen
                metrics["grad_norm"] = self.update()
        metrics = merge_rows(rows)
        metrics["skipped"] = int(not math.isfinite(metrics["grad_norm"]))  # if any update was
        metrics["sec_update"] = time.perf_counter() - start
        metrics["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return metrics

    def add_ref_logprobs(self, batches):  # the reference: the same model without its adapters
        with self.lora.disabled(), torch.no_grad():
            for batch in batches:
                batch["ref_logprobs"], _ = self.compute_logprobs(batch)

    def compute_logprobs(self, batch):
        return self.wrapper.compute_logprobs(batch["prompts"], batch["tokens"], batch["allowed"])

    def update(self):  # one AdamW step on the gradients of all GPUs -> their norm before clipping
        weights = list(self.lora.weights.values())
        if self.world_size > 1:
            for weight in weights:
                torch.distributed.all_reduce(weight.grad)  # a sum, as each had its share
        norm = torch.nn.utils.clip_grad_norm_(weights, self.config.max_grad_norm).item()
        if math.isfinite(norm):  # a NaN would stay in AdamW's moments for ever
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def keep(self, row):  # step 6: every GPU notes the row, the first one writes files
        self.history.append(row)
        due = row["step"] % self.config.save_every == 0 or row["step"] == self.config.steps
        bad = [row.get("skipped") for row in self.history[-3:]] == [1, 1, 1]
        try:
            if due and self.rank == 0:
                row["reward_fixed"] = self.save_samples(row["step"])
            if self.rank == 0:
                self.log(row)
        finally:
            if due or bad:
                self.save_checkpoint()
        if bad:
            raise FloatingPointError("three steps in a row without a finite gradient: lower --lr")

    def log(self, row):
        lines = [json.dumps(row) + "\n" for row in self.history]
        write_file(self.out / "metrics.jsonl", "".join(lines).encode())
        keys = "step reward reward_std loss kl clip_frac entropy grad_norm sampler_gap reward_fixed"
        with contextlib.suppress(BrokenPipeError):  # a reader that has gone (| head) ends no run
            print(*[f"{key} {row[key]:<8.3g}" for key in keys.split() if key in row], flush=True)

    def evaluate(self, prompts, targets):  # -> an image of each, from fixed seeds; their rewards
        images = self.wrapper.generate_with_tracking(prompts, 1, range(len(prompts)))[0]
        rewards, _ = compute_rewards(images, prompts, targets, self.rewards, len(images))
        return images, rewards.tolist()

    def save_samples(self, step):  # fixed prompts and seeds: only the policy changes -> mean reward
        images, rewards = self.evaluate(self.prompts[:8], self.targets[:8])
        for image, prompt, reward in zip(images, self.prompts, rewards):
            ImageDraw.Draw(image).text((4, 4), f"{reward:.3f} {prompt:.16}", stroke_fill="black",
                                       stroke_width=2, font_size=image.width / 14)
        sheet = np.hstack(images)  # [H, 8 W, 3]
        save_picture(self.out / f"samples/step_{step:05d}.png", sheet)
        if step > 0:  # three rows: before, now, the curve of the mean reward of each step
            path = self.out / "samples/step_00000.png"
            first = Image.open(path) if path.exists() else sheet
            curve = Image.fromarray(np.full_like(sheet, 255))  # white
            y = [row["reward"] for row in self.history[1:]]
            y = np.interp(y, (min(y), max(y)), (curve.height - 6, 6))
            x = np.linspace(0, curve.width, len(y))
            ImageDraw.Draw(curve).line(list(zip(x, y)), "crimson", 3)
            save_picture(self.out / "progress.png", np.vstack([first, sheet, curve]))
        return np.mean(rewards).item()

    def save_checkpoint(self):  # adapter/ to use elsewhere, checkpoint.pt to go on from
        if self.rank == 0:
            state = dict(step=len(self.history) - 1, history=self.history, prompts=self.prompts,
                         adapter=self.lora.weights, optimizer=self.optimizer.state_dict())
            file = io.BytesIO()
            torch.save(state, file)
            self.lora.save(self.out / "adapter", self.config.model)
            write_file(self.out / "args.json", json.dumps(vars(self.config)).encode())
            write_file(self.out / "checkpoint.pt", file.getvalue())

    def load_checkpoint(self, folder):
        """Weights, optimizer and history of a run go on. ValueError if they do not fit this one."""
        try:
            state = torch.load(Path(folder, "checkpoint.pt"), "cpu", weights_only=True)  # no code
            self.optimizer.load_state_dict(state["optimizer"])
            for name, weight in self.lora.weights.items():
                weight.data.copy_(state["adapter"][name].view_as(weight))
            for weight, moments in self.optimizer.state.items():
                assert moments["exp_avg"].shape == moments["exp_avg_sq"].shape == weight.shape
            assert all("reward" in row for row in state["history"][1:])
            if state["prompts"] != self.prompts:
                raise ValueError(f"other prompts than {self.config.prompts}")
            self.history = state["history"]
        except Exception as error:
            raise ValueError(f"{folder} is no run of this model: {error!r}") from error

    def stop(self, number, frame):  # a signal: finish the step, save, end; a second one kills
        self.stopped = number
        signal.signal(number, signal.SIG_DFL)

def save_picture(path, pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    write_file(path, file.getvalue())

# --- The toy: the real classes with 0.7 M weights; its 8 codes are the COLORS --------------------
def halve_draft(height, width):  # pixels -> rows, columns of the large grid, then of the draft
    return height // 32, width // 32, height // 64, width // 64

def make_tiny_models():
    """-> a GlmImagePipeline of random weights. Of words it knows the COLORS; the rest is unk."""
    special = {f"{name}_token": name for name in "bos eos pad unk image grid_bos grid_eos".split()}
    words = {word: i for i, word in enumerate([*COLORS, *special.values()])}  # 8 bos, 9 eos ..
    tokenizer = transformers.BertTokenizer(
        words, model_input_names=["input_ids", "attention_mask"], **special)
    processor = transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessorPil(), tokenizer, "{{ messages[0].content[0].text }}")
    processor._get_target_shape = halve_draft  # GLM-Image's own draft is 16 x 16 at any size
    text = dict(vocab_size=18, vision_vocab_size=16, hidden_size=128, intermediate_size=128,
                num_hidden_layers=2, num_attention_heads=2, eos_token_id=9, pad_token_id=10,
                initializer_range=0.1)
    ar = transformers.GlmImageForConditionalGeneration(transformers.GlmImageConfig(
        text_config=text, image_start_token_id=8, image_end_token_id=9, image_token_id=12,
        vision_config=dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16),
        vq_config=dict(embed_dim=16, num_embeddings=8, latent_channels=16)))
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=384, d_model=32, num_layers=0))
    dit = diffusers.GlmImageTransformer2DModel(
        num_layers=1, num_attention_heads=2, text_embed_dim=32, time_embed_dim=32, condition_dim=8,
        prior_vq_quantizer_codebook_size=8)
    vae = diffusers.AutoencoderKL(
        up_block_types=["UpDecoderBlock2D"] * 4, block_out_channels=[8] * 4, layers_per_block=0,
        mid_block_add_attention=False, latent_channels=16, norm_num_groups=1,
        latents_mean=[0.0] * 16, latents_std=[1.0] * 16)
    return diffusers.GlmImagePipeline(transformers.ByT5Tokenizer(), processor, t5, ar, vae, dit,
                                      diffusers.FlowMatchEulerDiscreteScheduler())

def make_tiny_pipeline(seed=0, warmup_steps=250, batch=8, wrapper_class=GLMImageWrapper):
    """The toy, fitted with supervision for some seconds: its painter learns to show each code in
    its colour, its AR half that a prompt has to do with colours. GRPO does the rest."""
    torch.manual_seed(seed)
    pipe = make_tiny_models()
    wrapper = wrapper_class(pipe, Config(**TINY))
    palette = torch.stack(list(COLORS.values())) * 2 - 1  # [V, 3], in -1..1
    parts = torch.nn.ModuleList([wrapper.ar_half, wrapper.dit_half]).requires_grad_()
    optimizer = torch.optim.Adam(parts.parameters(), 2e-3)
    for _ in range(warmup_steps):
        # The policy: of 4 + 16 tokens a random share, 1/3 on average, has the colour of the prompt
        said = torch.randint(8, (batch, 1))
        same = torch.rand(batch, 20) < torch.rand(batch, 1) ** 2
        tokens = torch.where(same, said, torch.randint(8, (batch, 20)))
        logprobs, _ = wrapper.compute_logprobs([f"a {list(COLORS)[i]} thing" for i in said], tokens)
        # The painter, at 64 pixels, to save time: noise to image = noise - velocity in one step
        codes = tokens[:, 4:]
        noise = torch.randn(batch, 16, 8, 8)
        velocity = pipe.transformer(
            hidden_states=noise, timestep=torch.tensor([999.0]), crop_coords=torch.zeros(1, 2),
            encoder_hidden_states=torch.randn(batch, 1, 32), target_size=torch.full((1, 2), 128.0),
            prior_token_id=codes, prior_token_drop=codes < 0, image_rotary_emb=None).sample
        painted = pipe.vae._decode(noise - velocity).sample  # [B, 3, 64, 64]; decode is slower
        squares = palette[codes].mT.unflatten(2, (4, 4))  # [B, 3, 4, 4]
        loss = F.mse_loss(painted, F.interpolate(squares, 64)) - logprobs.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return pipe

# --- The command line ----------------------------------------------------------------------------
def in_range(kind, low, high=1e9):  # a type for argparse: an int or a float from low to high
    def number(word):  # argparse's messages show this name
        if not low <= kind(word) <= high:  # NaN is in no range
            raise argparse.ArgumentTypeError(f"{word} is not from {low} to {high:g}")
        return kind(word)
    return number

count = in_range(int, 1)
amount = in_range(float, 0)

def image_size(word):  # 512, 1024x768, or [1024, 768] as in args.json -> (width, height)
    sides = [count(side) for side in re.split("x|, ", word.strip("()[]"))]
    if len(sides) > 2 or any(side % 32 for side in sides):
        raise argparse.ArgumentTypeError(f"{word}: pixels come in multiples of 32")
    return sides[0], sides[-1]

def absolute(word):  # a model, or rewards a.py:f=1,b.py:g: paths become absolute, for --resume
    parts = [os.path.abspath(part) if os.path.exists(part.split(":")[0]) else part
             for part in word.split(",")]
    return ",".join(parts)

def parse_args(argv=None):
    """-> Config: its defaults, those of TINY or of the run to resume, then what was typed."""
    parser = argparse.ArgumentParser("grpo.py", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS)
    comments = dict(re.findall(r"(\w+): .*  # (.*)", inspect.getsource(Config)))
    for name, kind in get_type_hints(Config).items():
        check = dict(choices=get_args(kind)) if get_args(kind) else dict(type=kind)
        parser.add_argument(f"--{name.replace('_', '-')}", **check,
                            help=f"{comments[name]} ({getattr(Config, name)})")
    typed = vars(parser.parse_args(argv))
    if "resume" in typed:
        if typed.keys() - {"resume", "steps", "prompts", "model"}:
            raise ValueError("--resume: only --steps may change, or --prompts and --model if moved")
        file = Path(typed["resume"], "args.json")
        if not file.exists():
            raise ValueError(f"--resume: {file.parent} holds no run")
        words = [f"--{name.replace('_', '-')}={value}"  # checked like those that are typed
                 for name, value in json.loads(file.read_text()).items() if value is not None]
        return Config(**(vars(parser.parse_args(words)) | typed))
    typed.setdefault("model", Config.model if free_gib() >= 60 else "tiny")
    defaults = TINY if typed["model"] == "tiny" else {}
    return Config(**(defaults | typed))

def main(argv=None):
    if "RANK" in os.environ:  # torchrun: a process for each GPU; one talks for all
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            backend = "cpu:gloo,cuda:nccl"  # gloo notices a process that has died, NCCL waits
        torch.distributed.init_process_group(backend)
        if torch.distributed.get_rank() > 0:
            sys.stdout = open(os.devnull, "w")
    try:
        config = parse_args(argv)
        if config.model == "tiny" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # on a busy machine two threads wait for each other
        # What can be wrong with the settings shows before a large model is loaded.
        if config.out and os.path.exists(config.out) and not config.resume:
            raise ValueError(f"--out {config.out} exists: name another folder, or --resume it")
        rewards = load_rewards(config.reward)
        prompts, targets = load_prompts(config.prompts)
        if "mse" in rewards and None in targets:
            raise ValueError(f"--reward mse: a line of {config.prompts} has no target")
        print(f"model: {config.model} ({free_gib():.0f} GiB of GPU memory free, 60 wanted)")
        wrapper = GLMImageWrapper.from_pretrained(config.model, config)
        trainer = GRPOTrainer(config, wrapper, prompts, rewards, targets)
        if config.resume:
            trainer.load_checkpoint(config.resume)
    except (ValueError, OSError) as error:
        fail(error)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, trainer.stop)
    try:
        trainer.train()
        print(f"{trainer.out}: pictures, and adapter/ for {type(wrapper.policy).__name__}")
    except (OSError, FloatingPointError) as error:
        fail(error)
    if trainer.world_size > 1:
        gather([])  # a process that leaves early would abort the others
        torch.distributed.destroy_process_group()
    if trainer.stopped:
        print(f"stopped after step {len(trainer.history) - 1}: --resume {trainer.out} goes on")
        sys.exit(128 + trainer.stopped)

def fail(error):  # one that the user can mend: one line and exit code 2, as for a wrong flag
    argparse.ArgumentParser("grpo.py", usage=argparse.SUPPRESS).error(" ".join(str(error).split()))

if __name__ == "__main__":
    sys.modules.setdefault("grpo", sys.modules[__name__])  # for rewards that import from grpo
    main()
