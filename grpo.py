"""grpo.py: GRPO for GLM-Image, in one file. It draws in two halves: an autoregressive transformer (AR, 9 B)
writes visual tokens, a diffusion transformer (DiT, 7 B) paints them. Here the AR half learns what to write:

    prompt ---> AR ---- tokens ---> DiT + VAE ---> image ---> reward ---> advantage
              trained                frozen              any function    z-score in the group
                 ^--------------- update: a clipped policy gradient <---------+

One step of GRPO (DeepSeekMath, arXiv 2402.03300); the numbers come back in `GRPOTrainer`:
  1. the policy, AR + LoRA, writes G sequences for each of P prompts: P groups; each token is an action
  2. the frozen DiT paints them, all images of a group from the same noise
  3. any function scores the images; no gradient passes through it
  4. advantage: (reward - mean) / std of its own group: the mean is the baseline a value network would learn
  5. make tokens of better images likelier and those of worse ones less: PPO's clip, a KL to the base model
  6. log, keep pictures and a checkpoint
Left out on purpose: loss masks (the image size sets the number of tokens), a value network, training the DiT.
    python grpo.py --group-size 4           # without 60 GiB on a GPU: a toy learns colours in a minute
    torchrun --nproc-per-node 8 grpo.py --model zai-org/GLM-Image   # on 8 GPUs; on one: python grpo.py ..
Axes: P prompts, G samples of each (a group), N = P * G, ordered p0 p0 .. p1 p1 .., n of them on one GPU, B at
a time to paint and learn; L prompt tokens, padded left; T image tokens, V codes that each can be; D width."""
import argparse, contextlib, functools, io, json, math, os, re, runpy, signal, sys, time
from pathlib import Path
import diffusers, numpy as np, tokenizers, torch, torch.nn as nn, torch.nn.functional as F, tqdm, transformers
from PIL import Image, ImageDraw, ImageFont, ImageOps
from safetensors.torch import load_file, save_file

# --- The maths: pure functions of tensors -------------------------------------------------------------------
def compute_advantages(rewards, group_size, scale="group"):
    """How much better each sample is than its group: A_i = (r_i - mean of its group) / (std + 1e-6).
    rewards [N], ordered by group -> advantages [N], fp32. std, unbiased, of the "group" (GRPO, 2402.03300) or
    of the whole "batch"; "none" does not divide (Dr. GRPO, 2503.20783). ValueError if one is not finite."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)                         # [N]
    check(group_size > 1 and len(rewards) % group_size == 0, f"{len(rewards)} are no groups of {group_size}")
    check(rewards.isfinite().all(), f"a reward is not a finite number: {rewards.tolist()}")
    # less the first of its group: six times 0.3 has a float mean beside 0.3 and would get advantages of 0.03
    grouped = rewards.view(-1, group_size) - rewards[::group_size, None]    # [P, G]; equal ones get exactly 0
    stds = {"group": grouped.std(1, keepdim=True) + 1e-6, "batch": rewards.std() + 1e-6, "none": 1.0}
    check(scale in stds, f"scale is {scale!r}, but must be one of {', '.join(stds)}")
    return ((grouped - grouped.mean(1, keepdim=True)) / stds[scale]).flatten()      # [N]

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2, clip_range_high=None,
                      ref_logprobs=None, kl_coef=0.0, importance="token"):
    """PPO's clipped surrogate (1707.06347) plus a price for leaving the reference -> (loss, {metric: float}).
        ratio = exp(new - old)
        loss  = -mean(min(ratio * A, clip(ratio, low, high) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1       estimates KL(new, ref), never below 0 (Schulman, 2020)
    Log-probs are [N] (of sequences) or [N, T] (of tokens), advantages [N]; only new_logprobs gets a gradient.
    high: 1 + clip_range_high, if set (DAPO, 2503.14476). "sequence": exp(mean(new - old)) (GSPO, 2507.18071).
    Why the loss may be 0: with one update per rollout old equals new, every ratio is 1, the clip is inert and
    policy_loss -mean(A), 0 over a step (loss adds the KL). Its gradient is REINFORCE's, of -mean(A * new)."""
    ref = (new_logprobs if ref_logprobs is None else ref_logprobs).detach()
    new, old, ref = (x.float().reshape(len(x), -1) for x in (new_logprobs, old_logprobs.detach(), ref))
    A = advantages.detach().float()[:, None]            # [N, 1]; the others [N, T], with T = 1 for sequences
    ratio = {"token": new - old, "sequence": (new - old).mean(1, keepdim=True)}[importance].exp()  # or [N, 1]
    low, high = 1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high)
    policy_loss = -torch.min(ratio * A, ratio.clamp(low, high) * A).mean()  # a loss of your own goes here
    delta = (ref - new).clamp(max=20)           # or one far-off token would overflow the whole batch
    kl = (torch.expm1(delta) - delta).mean()    # expm1 keeps small values exact
    loss = policy_loss + kl_coef * kl
    clipped = ((ratio < low) & (A < 0)) | ((ratio > high) & (A > 0))    # where the clip stops the gradient
    values = torch.stack([loss, policy_loss, kl, ratio.mean(), ratio.max(), clipped.float().mean()]).tolist()
    return loss, dict(zip(("loss", "policy_loss", "kl", "ratio_mean", "ratio_max", "clip_frac"), values))

def compute_policy_logprobs(logits, temperature, codebook_size, allowed=None):
    """log pi(code), THE distribution of the policy: one definition, for the sampler and the trainer.
    logits [..., vocab], allowed [..., V] -> [..., V], fp32: in bf16 a log-prob of -9 is off by up to 0.03."""
    logits = logits[..., :codebook_size].float() / temperature      # [..., V]: all that the DiT can paint
    return F.log_softmax(logits if allowed is None else logits.masked_fill(~allowed, -math.inf), dim=-1)

# --- Rewards ------------------------------------------------------------------------------------------------
# fn(images: list[PIL.Image], prompts: list[str], targets: list[PIL.Image or None]) -> N numbers, higher is
# better, None is no opinion. Nothing is differentiated, so any function will do: --reward my_rewards.py:name
COLORS = {"red": (1, 0, 0), "orange": (1, .6, 0), "yellow": (1, 1, 0), "green": (0, 1, 0), "blue": (0, 0, 1),
          "purple": (.6, 0, 1), "white": (1, 1, 1), "black": (0, 0, 0)}

def pil_to_tensor(images):      # PIL images of one size -> [N, 3, H, W], float in 0..1
    return torch.stack([torch.from_numpy(np.array(i.convert("RGB"))) for i in images]).movedim(-1, 1) / 255

def tensor_to_pil(tensor):      # [N, 3, H, W], float in 0..1 -> PIL images; the exact inverse
    array = (tensor.float().clamp(0, 1) * 255).round().byte().movedim(1, -1).cpu().numpy()  # [N, H, W, 3]
    return [Image.fromarray(image) for image in array]

def reward_color(images, prompts, targets=None):    # 1 - |mean colour - first colour the prompt names|: 0..1
    words = [next((w for w in re.findall("[a-z]+", p.lower()) if w in COLORS), None) for p in prompts]
    means = [pil_to_tensor([image]).mean((0, 2, 3)) for image in images]            # N of [3]
    return [w and 1 - (m - torch.tensor(COLORS[w])).abs().mean().item() for m, w in zip(means, words)]

def reward_jpeg(images, prompts, targets=None):     # compressibility: 1 - JPEG bytes / raw bytes
    files = [io.BytesIO() for _ in images]
    for image, file in zip(images, files):
        image.convert("RGB").save(file, "JPEG", quality=95)
    return [1 - file.tell() / (3 * image.width * image.height) for image, file in zip(images, files)]

def reward_mse(images, prompts, targets):   # minus the mean squared error to the target, resized (bicubic)
    pairs = [pil_to_tensor([i, t.resize(i.size, Image.BICUBIC)]) for i, t in zip(images, targets)]
    return [-F.mse_loss(image, target).item() for image, target in pairs]           # each [3, H, W]

REWARDS = {"color": reward_color, "jpeg": reward_jpeg, "mse": reward_mse}
run_file = functools.cache(runpy.run_path)      # two rewards of one file share what it has loaded

def compute_rewards(images, prompts, targets, weights, group_size=1, norm="none"):
    """{name: weight} -> the weighted sum [N], and the components {name: [N]}, raw. None (NaN there) counts as
    the mean of its group, or 0. norm "group" adds up z-scores, so that components need no common scale."""
    total, components = torch.zeros(len(images)), {}                                # [N]
    for name, weight in weights.items():
        with blame(f"--reward {name}"):
            values = list(REWARDS[name](images, prompts, targets))
            check(len(values) == len(images), f"{len(values)} values for {len(images)} images")
            for i, value in enumerate(values):
                check(value is None or math.isfinite(value), f"{value} for sample {i}, {prompts[i]!r}")
            components[name] = torch.tensor([math.nan if v is None else float(v) for v in values])  # [N]
        grouped = components[name].view(-1, group_size)                             # [P, G]
        filled = grouped.where(~grouped.isnan(), grouped.nanmean(1, keepdim=True).nan_to_num()).flatten()
        total += weight * (compute_advantages(filled, group_size) if norm == "group" else filled)
    return total, components

# --- LoRA (arXiv 2106.09685): the weights that are trained --------------------------------------------------
class LoRA(nn.ParameterDict):
    """W x becomes W x + alpha / rank * B A x, with W frozen and B = 0 at first: nothing changes yet. A, B are
    fp32: a bf16 weight of 0.02 plus an Adam step of 5e-5 is the same bf16 weight."""
    TARGETS = r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate_up|down)_proj)"
    def __init__(self, model, rank, alpha):
        super().__init__()
        self.rank, self.alpha, self.enabled = rank, alpha, True
        for name, linear in list(model.named_modules()):
            if re.fullmatch(self.TARGETS, name):
                key = name.replace(".", "/")        # torch allows no dots in a parameter's name
                A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, linear.in_features), a=5**0.5))
                B = nn.Parameter(torch.zeros(linear.out_features, rank))
                self[key + "/lora_A/weight"], self[key + "/lora_B/weight"] = A, B
                linear.register_forward_hook(functools.partial(self.add_low_rank, A, B))
        check(len(self), f"LoRA.TARGETS, {self.TARGETS}, is the name of no linear layer")

    def add_low_rank(self, A, B, linear, inputs, output):
        if self.enabled:
            return output + self.alpha / self.rank * F.linear(F.linear(inputs[0], A.to(output)), B.to(output))

    @contextlib.contextmanager
    def disabled(self):     # inside `with lora.disabled():` the model *is* the reference policy
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def save(self, folder, base_model):     # as transformers' `load_adapter` and peft's `PeftModel` read it
        folder.mkdir(exist_ok=True)
        weights = {"base_model.model." + k.replace("/", "."): v.detach().cpu() for k, v in self.items()}
        save_file(weights, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "base_model_name_or_path": base_model, "target_modules": self.TARGETS,
                  "r": self.rank, "lora_alpha": self.alpha, "bias": "none", "inference_mode": True}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))

    def load(self, folder):     # what `save` wrote, of the same rank and alpha
        config = json.loads((folder / "adapter_config.json").read_text())
        check([config["r"], config["lora_alpha"]] == [self.rank, self.alpha], "it has another rank or alpha")
        weights = load_file(folder / "adapter_model.safetensors")
        self.load_state_dict({k: weights["base_model.model." + k.replace("/", ".")] for k in self})

# --- GLM-Image: prompt -> tokens -> image, with the log-probs GRPO needs ------------------------------------
def build_position_ids(attention_mask, grids):
    """Positions (t, h, w) of prompt and image tokens: mask [B, L], grids of T cells in all -> [3, B, L + T].
    Text counts up in all three. A grid holds t still and counts its rows in h and its columns in w; the next
    one starts max(h, w) further on. A padded prompt of 3, a draft of 1 x 2 and a large grid of 2 x 2:
              pad  prompt    draft   large
         t:    1   0  1  2   3  3    5  5  5  5
         h:    1   0  1  2   3  3    5  5  6  6
         w:    1   0  1  2   3  4    5  6  5  6
    The trap: `transformers` applies them in `generate` only. A plain forward pass takes the image for a line
    of text, without any error, and every log-prob is wrong."""
    text = (attention_mask.cumsum(1) - 1).masked_fill(attention_mask == 0, 1)       # [B, L]
    parts, start = [text.expand(3, -1, -1)], attention_mask.sum(1)[:, None]         # start [B, 1]
    for h, w in grids:
        cells = torch.cartesian_prod(torch.arange(1), torch.arange(h), torch.arange(w)) # [h * w, 3]
        parts.append(start + cells.T[:, None].to(start.device))                     # [3, B, h * w]
        start = start + max(h, w)
    return torch.cat(parts, dim=2)

def capture(step):      # records, without running it, its kernels: one launch in place of some thousands
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay

class GLMImageWrapper:
    """A `GlmImagePipeline` as a policy. height, width: pixels; temperature, top_p: None is the model's own.
    Another one needs `ar`, `device`, LoRA.TARGETS that fit, all methods but `place`, `encode`, `forward`."""
    def __init__(self, pipe, height, width, temperature=None, top_p=None, guidance=1.5, offload=False,
                 device="cpu"):
        self.pipe, self.ar, self.device = pipe, pipe.vision_language_encoder, torch.device(device)
        self.height, self.width, self.guidance, own = height, width, guidance, self.ar.generation_config
        self.temperature, self.top_p = temperature or own.temperature or 1.0, top_p or own.top_p or 1.0
        self.cut_nucleus = transformers.TopPLogitsWarper(self.top_p)
        self.codebook_size = pipe.transformer.config.prior_vq_quantizer_codebook_size
        torch.backends.cuda.enable_cudnn_sdp(False)         # its gradients can be NaN (pytorch #196678)
        pipe.set_progress_bar_config(disable=True)
        pipe.vae.to(memory_format=torch.channels_last)      # a sixth off the painting
        self.ar.model.language_model.activation_checkpointing_enable()
        self.ar.eval().requires_grad_(False)        # eval: dropout would score the same tokens differently
        phases = {"write": (self.ar.model.language_model, self.ar.lm_head),     # the vision tower is in none:
                  "paint": (pipe.text_encoder, pipe.transformer, pipe.vae)}     # it stays on the CPU
        for module in (*phases["write"], *phases["paint"]):
            module.eval().requires_grad_(False).to("cpu" if offload else device)
            if offload and self.device.type == "cuda":
                module._apply(torch.Tensor.pin_memory)      # in place: the GPU reads pinned memory fast
        self.phase, self.homes = None, {            # home: where a tensor waits while it is not needed
            phase: [(t, t.data) for module in modules for t in (*module.parameters(), *module.buffers())]
            for phase, modules in phases.items() if offload}

    @classmethod
    def from_pretrained(cls, path, dtype=torch.float32, seed=0, **settings):    # path: hub id, folder or tiny
        with blame(f"cannot load --model {path}; --model tiny needs no download"):
            load = functools.partial(diffusers.GlmImagePipeline.from_pretrained, dtype=dtype)
            return cls(make_tiny_pipeline(seed) if path == "tiny" else load(path), **settings)

    def place(self, phase=None):    # offloading; what leaves is not copied back: frozen weights never change
        if phase == self.phase:
            return
        for name in sorted(self.homes, key=lambda name: name == phase):   # out before in: both may not fit
            for tensor, home in self.homes[name]:
                tensor.data = home.to(self.device, non_blocking=True) if name == phase else home
            torch.cuda.empty_cache()
        self.phase = phase

    def encode(self, prompts):      # and "write" -> ids [B, L], mask [B, L + T], position_ids [3, B, L + T]
        self.place("write")
        chats = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in prompts]
        inputs = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=dict(
                target_h=self.height, target_w=self.width, padding=True, padding_side="left")).to(self.device)
        large, draft = inputs["image_grid_thw"][:2, 1:].tolist()    # listed large first, written draft first
        ids, mask = inputs["input_ids"], inputs["attention_mask"]                   # [B, L]
        position_ids = build_position_ids(mask, [draft, large])                     # [3, B, L + T]
        return ids, F.pad(mask, (0, position_ids.shape[2] - ids.shape[1]), value=1).bool(), position_ids

    def forward(self, ids, mask, position_ids, num_last, cache=None):
        model = self.ar.model.language_model        # the classes around it insert positions of their own
        for layer in model.layers:
            layer.training = torch.is_grad_enabled()    # for checkpointing; its dropout inside stays off
        hidden = model(input_ids=ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache,
                       use_cache=cache is not None).last_hidden_state               # [B, .., D]
        return self.ar.lm_head(hidden[:, -num_last:])       # [B, num_last, vocab]: no others need the head

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """P prompts, a seed for each -> tokens [N, T] (draft, then large grid), logprobs [N, T], allowed
        [N, T, V / 8] in bits. `generate` would mix up the grids of prompts, end early and cut to 50 codes."""
        ids, mask, position_ids = self.encode(prompts)              # [P, L], [P, L + T], [3, P, L + T]
        L, T = ids.shape[1], mask.shape[1] - ids.shape[1]
        cache = transformers.StaticCache(self.ar.config.text_config, L + T)
        self.forward(ids[:, :-1], mask, position_ids[:, :, :L - 1], 1, cache)   # read once for a whole group
        rows = torch.arange(len(prompts)).repeat_interleave(group_size)             # [N]: 0 0 .. 1 1 ..
        cache.reorder_cache(rows)
        ids, mask, position_ids = F.pad(ids[rows], (0, T)), mask[rows], position_ids[:, rows]   # [N, L + T]
        logprobs = torch.zeros(mask.shape, device=self.device)                                  # [N, L + T]
        allowed = torch.ones(*ids.shape, self.codebook_size, dtype=torch.bool, device=self.device)
        draws = torch.empty(len(prompts), group_size, self.codebook_size, device=self.device)   # [P, G, V]
        columns, at = torch.arange(L + T, device=self.device), torch.tensor([L - 1], device=self.device)
        def step():     # reads column `at`, writes the next, at fixed addresses: a CUDA graph can replay it
            visible = (mask & (columns <= at))[:, None, None]                       # [N, 1, 1, L + T]
            logits = self.forward(ids[:, at], visible, position_ids[:, :, at], 1, cache)[:, 0]
            # The trap of top-p: drawn from the nucleus but scored by the whole softmax, a ratio is off by the
            # mass cut away; and a policy that has moved would cut another nucleus. So the masks are kept, and
            # new, old and reference log-probs are all taken under them ("keep sampling mask", 2512.02556).
            logp = compute_policy_logprobs(logits, self.temperature, self.codebook_size)            # [N, V]
            nucleus = self.cut_nucleus(None, logp).isfinite()   # the likeliest with top_p of the mass  [N, V]
            logp = compute_policy_logprobs(logits, self.temperature, self.codebook_size, nucleus)   # [N, V]
            # argmax(p / Exponential(1)) draws from p, the Gumbel-max trick, without waiting for the CPU
            code = (logp - draws.flatten(0, 1).clamp(min=1e-30).log()).argmax(1, keepdim=True)      # [N, 1]
            at.add_(1)
            ids[:, at], logprobs[:, at], allowed[:, at] = code, logp.gather(1, code), nucleus[:, None]
        generators = [torch.Generator(self.device).manual_seed(seed) for seed in seeds]     # one per group
        for i in range(T):
            for group_draws, generator in zip(draws, generators):
                group_draws.exponential_(generator=generator)
            step()
            step = capture(step) if i == 0 and self.device.type == "cuda" else step
        return ids[:, L:].cpu(), logprobs[:, L:].cpu(), np.packbits(allowed[:, L:].cpu().numpy(), axis=-1)

    def compute_logprobs(self, prompts, tokens, allowed=None):
        """Teacher forcing: tokens [B, T], allowed (None: all) -> log-probs and, detached, entropy [B, T]."""
        ids, mask, position_ids = self.encode(prompts)              # [B, L], [B, L + T], [3, B, L + T]
        tokens = tokens.to(self.device)                                             # [B, T]
        if allowed is not None:
            allowed = torch.from_numpy(np.unpackbits(allowed, axis=-1)).bool().to(self.device)  # [B, T, V]
        ids = torch.cat([ids, tokens[:, :-1]], 1)                                   # [B, L + T - 1]
        logits = self.forward(ids, mask[:, :-1], position_ids[:, :, :-1], tokens.shape[1])  # [B, T, vocab]
        logp = compute_policy_logprobs(logits, self.temperature, self.codebook_size, allowed)   # [B, T, V]
        return logp.gather(2, tokens[:, :, None])[:, :, 0], torch.special.entr(logp.detach().exp()).sum(2)

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds, decode_steps=20, micro_batch_size=4):
        """P prompts and seeds, tokens [N, T], whose draft is not painted -> N PIL images. A group begins
        with the same noise (DanceGRPO, 2505.07818): its rewards differ because tokens do, not by luck."""
        self.place("paint")
        h, w, images = self.height // 32, self.width // 32, []
        codes = tokens[:, -h * w:].view(-1, h, 1, w, 1).expand(-1, h, 2, w, 2).flatten(1)   # [N, 4 * h * w]
        for prompt, group, seed in zip(prompts, codes.chunk(len(prompts)), seeds):  # one by one: no padding
            glyphs, _ = self.pipe.encode_prompt(prompt, False)                      # [1, any, D]
            for part in group.split(micro_batch_size):                              # [B, 4 * h * w] each
                same_noise = [torch.Generator().manual_seed(seed) for _ in part]
                images += tensor_to_pil(self.pipe(
                    prompt_embeds=glyphs.repeat(len(part), 1, 1), prior_token_ids=part.to(self.device),
                    generator=same_noise, height=self.height, width=self.width, output_type="pt",
                    num_inference_steps=decode_steps, guidance_scale=self.guidance).images) # [B, 3, H, W]
        self.place()            # leaves the device to the rewards
        return images

    def generate_with_tracking(self, prompts, group_size, seeds, decode_steps=20, micro_batch_size=4):
        """P prompts, a seed for each -> N PIL images, and what `sample` gave: tokens, logprobs, allowed."""
        tokens, logprobs, allowed = self.sample(prompts, group_size, seeds)
        return self.decode(prompts, tokens, seeds, decode_steps, micro_batch_size), tokens, logprobs, allowed

# --- The trainer, and the pictures it keeps -----------------------------------------------------------------
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # of this GPU; how many
LIMITS = {"sampler_gap": 1, "ratio_max": 100, "kl": 10, "grad_norm": 1000}  # beyond: named if updates fail
class GRPOTrainer:
    """args as from `parse_args`, prompts and targets as from `load_prompts`; results go to args.out."""
    def __init__(self, args, wrapper, prompts, targets):
        self.args, self.wrapper, self.prompts, self.targets = args, wrapper, prompts, targets
        self.out, self.history, self.stopped = Path(args.out), [], 0    # history: the metrics of each step
        torch.manual_seed(args.seed)                                    # for LoRA's first weights
        self.lora = LoRA(wrapper.ar, args.lora_rank, args.lora_alpha).to(wrapper.device)
        if args.init_adapter and not args.resume:       # the reference is still the model without it
            with blame(f"--init-adapter {args.init_adapter}"):
                self.lora.load(Path(args.init_adapter))
        self.optimizer = torch.optim.AdamW(self.lora.parameters(), lr=args.lr, weight_decay=0.0)

    def train(self):        # all of GRPO, until args.steps are done or a signal has come
        args = self.args
        RANK == 0 and not self.history and self.keep()              # before training
        for step in tqdm.tqdm(range(len(self.history) + 1, args.steps + 1), disable=RANK > 0 or None):
            *samples, rewards, metrics = self.rollout()             # 1. write, 2. paint, 3. score
            advantages = compute_advantages(rewards, args.group_size, args.scale_rewards)   # 4. compare: [N]
            metrics |= self.train_step(*samples, advantages.chunk(WORLD)[RANK])             # 5. update
            self.history += [{"step": step, **metrics, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}]
            stop = self.stopped = max(gather([self.stopped]))       # all or none: they wait for each other
            RANK == 0 and self.keep()                               # 6. log: one does it for all
            ill = [(r["step"], k, r[k]) for r in self.history for k in LIMITS if not r[k] <= LIMITS[k]]
            check(sum(r["skipped"] for r in self.history[-3:]) < 3, f"gradients not finite, since {ill[:1]}")
            if stop:
                break

    def rollout(self):      # 1. to 3. -> n prompts, tokens, logprobs, allowed; the rewards of all N; metrics
        args, P, G, wrapper = self.args, self.args.batch_size, self.args.group_size, self.wrapper
        rng = torch.Generator().manual_seed(args.seed * 1_000_003 + len(self.history))  # seed and step alone
        order = torch.randperm(max(P, len(self.prompts)), generator=rng)[:P] % len(self.prompts)    # [P]
        seeds = torch.randint(2**31, (P,), generator=rng)                           # [P], one for each group
        order, seeds = order.chunk(WORLD)[RANK], seeds.chunk(WORLD)[RANK].tolist()  # the share of this GPU
        transformers.set_seed(seeds[0])                     # the global generators, for rewards that use them
        drawn, start = [self.prompts[i] for i in order], time.perf_counter()
        tokens, logprobs, allowed = wrapper.sample(drawn, G, seeds)                 # 1. write: [n, T] each
        written = time.perf_counter()
        images = wrapper.decode(drawn, tokens, seeds, args.decode_steps, args.micro_batch_size)   # 2. paint
        painted = time.perf_counter()
        prompts, targets = ([x[i] for i in order for _ in range(G)] for x in (self.prompts, self.targets))
        total, parts = compute_rewards(images, prompts, targets, args.reward, G, args.reward_norm)
        table = torch.stack([total, *parts.values()], 1).tolist()                   # 3. score: [n, 1 + parts]
        with blame("another GPU has failed"):       # and no weight has moved: the checkpoint can be saved
            rewards, *raw = torch.tensor(gather(table)).T.contiguous()              # of all GPUs: [N] each
        groups, names = rewards.view(P, G), [Path(name).name for name in parts]
        return prompts, tokens, logprobs, allowed, rewards, {
            "reward": sum(w * v.nanmean().nan_to_num().item() for w, v in zip(args.reward.values(), raw)),
            "reward_std": groups.std(1).mean().item(), "lr": args.lr,   # within groups; next: over all N
            **{f"reward/{name}": values.nanmean().item() for name, values in zip(names, raw)},
            **{f"reward_std/{name}": np.nanstd(values).item() for name, values in zip(names, raw)},
            "frac_zero_std": (groups == groups[:, :1]).all(1).float().mean().item(),
            "sec_rollout": written - start, "tokens_per_sec": WORLD * tokens.numel() / (written - start),
            "sec_decode": painted - written, "sec_reward": time.perf_counter() - painted}

    def train_step(self, prompts, tokens, logprobs, allowed, advantages):   # 5., on one rollout -> metrics
        args, rows, norms, old_logprobs, ref_logprobs, start = self.args, [], [], {}, {}, time.perf_counter()
        chunks = [slice(i, i + args.micro_batch_size) for i in range(0, len(tokens), args.micro_batch_size)]
        logp_of = lambda chunk: self.wrapper.compute_logprobs(prompts[chunk], tokens[chunk], allowed[chunk])
        if args.kl_coef:
            with self.lora.disabled(), torch.no_grad():
                ref_logprobs = {chunk.start: logp_of(chunk)[0] for chunk in chunks} # [B, T] each
        for _ in range(args.num_iterations):
            self.optimizer.zero_grad()
            for chunk in chunks:
                new, entropy = logp_of(chunk)                                       # [B, T] each
                # The trap of bf16: sampler and trainer round differently, exp(new - logprobs) is not 1, maybe
                # even clipped, before any update. So old is the trainer's own first pass; the gap is logged
                old = old_logprobs.setdefault(chunk.start, new.detach())            # [B, T]
                loss, metrics = compute_grpo_loss(
                    new, old, advantages[chunk].to(new.device), args.clip_range, args.clip_range_high,
                    ref_logprobs.get(chunk.start), args.kl_coef, args.importance)
                (loss * len(new) / len(tokens) / WORLD).backward()  # so that B and GPUs change no gradient
                gap = (logprobs[chunk].to(new.device) - old).abs().max()
                rows.append({**metrics, "entropy": entropy.mean().item(), "sampler_gap": gap.item()})
            norms.append(self.update())
        rows = gather(rows)
        metrics = {key: max(row[key] for row in rows) if key in ("ratio_max", "sampler_gap")
                   else np.mean([row[key] for row in rows]).item() for key in rows[0]}
        return {**metrics, "grad_norm": np.max(norms).item(), "skipped": int(not np.isfinite(norms).all()),
                "sec_update": time.perf_counter() - start}

    def update(self):       # one AdamW step on the gradients of all GPUs, clipped -> their norm before
        grads = [p.grad for p in self.lora.values()]
        if WORLD > 1:
            flat = nn.utils.parameters_to_vector(grads)     # one message instead of hundreds
            torch.distributed.all_reduce(flat)              # the sum: each GPU has its share of the samples
            nn.utils.vector_to_parameters(flat, grads)
        norm = nn.utils.clip_grad_norm_(self.lora.values(), self.args.max_grad_norm).item()
        if math.isfinite(norm):                             # AdamW would never forget one that is not
            self.optimizer.step()
        return norm

    def stop(self, number, frame):      # Ctrl-C, SIGTERM: finish the step, save, end. A second one kills.
        self.stopped = number
        signal.signal(number, signal.SIG_DFL)

    def keep(self):     # step 6: the log, and now and then pictures and a checkpoint
        step, args = len(self.history), self.args
        if step:
            with open(self.out / "metrics.jsonl", "a") as file:
                file.write(json.dumps(self.history[-1]) + "\n")
            shown = "step reward reward_std loss kl clip_frac entropy grad_norm sampler_gap".split()
            tqdm.tqdm.write(" ".join(f"{key} {self.history[-1][key]:<8.3g}" for key in shown))
        if step % 10 == 0 and [row["frac_zero_std"] for row in self.history[-10:]] == [1.0] * 10:
            tqdm.tqdm.write("warning: every group had equal rewards for ten steps: all advantages are 0")
        if step % args.sample_every == 0 or step == args.steps:
            self.save_samples()
        if step % args.save_every == 0 or step == args.steps or self.stopped:
            self.save_checkpoint()

    def save_samples(self):     # fixed prompts and seeds: from picture to picture only the policy differs
        prompts, args = self.prompts[:8], self.args
        settings = args.eval_decode_steps, args.micro_batch_size
        images, *_ = self.wrapper.generate_with_tracking(prompts, 1, range(len(prompts)), *settings)
        rewards, _ = compute_rewards(images, prompts, self.targets[:8], args.reward)    # [8]
        now = draw_grid(images, [f"{p[:20]}\n{r:.3f}" for p, r in zip(prompts, rewards.tolist())])
        now.save(self.out / f"samples/step_{len(self.history):05d}.png")
        if self.history:
            files = sorted((self.out / "samples").glob("step_*.png"))
            draw_progress(files, [r["reward"] for r in self.history]).save(self.out / "progress.png")

    def save_checkpoint(self):      # adapter/ to use elsewhere, checkpoint.pt to go on from
        self.lora.save(self.out / "adapter", self.args.model)
        state = {"step": len(self.history), "history": self.history, "adapter": self.lora.state_dict(),
                 "optimizer": self.optimizer.state_dict(), "args": vars(self.args), "prompts": self.prompts}
        with open(self.out / "checkpoint.tmp", "wb") as file:
            torch.save(state, file)
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")       # never half written

    def load_checkpoint(self, path):    # weights, optimizer and history go on
        with blame(f"--resume: {path} does not go on with this run"):
            state = torch.load(path, map_location="cpu", weights_only=True)     # data, never code
            check(state["prompts"] == self.prompts, f"the prompts in {self.args.prompts} have changed since")
            self.lora.load_state_dict(state["adapter"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.history = state["history"]
            check(len(self.history) < self.args.steps, "it is finished; a larger --steps would go on")

def gather(rows):       # the rows of all GPUs, in the order of their ranks: a list -> a list
    parts = [rows] * WORLD
    WORLD > 1 and torch.distributed.all_gather_object(parts, rows)
    return sum(parts, [])

def draw_grid(images, captions):    # images of one size in two rows, if that fits; captions of two lines
    px = max(12, images[0].width // 20)                                             # height of a letter
    cells, font = [ImageOps.expand(i, (2, 2, 2, 3 * px), "white") for i in images], ImageFont.load_default(px)
    for c, caption in zip(cells, captions):
        ImageDraw.Draw(c).text((c.width // 2, c.height - 3 * px // 2), caption, 0, font, "mm", align="center")
    return diffusers.utils.make_image_grid(cells, rows := 2 - len(cells) % 2, len(cells) // rows)

def draw_progress(files, rewards):      # the first, middle and last of these pictures; the rewards as a curve
    cells = {file.stem: Image.open(file) for file in (files[0], files[len(files) // 2], files[-1])}
    (w, h), low, high = cells[files[0].stem].size, min(rewards), max(rewards)
    points = zip(np.linspace(0, w, len(rewards)), np.interp(rewards, (low, high), (h - 4, 4)))     # in pixels
    ImageDraw.Draw(curve := Image.new("RGB", (w, h), "white")).line(list(points), "crimson", w // 150)
    cells[f"mean reward of steps 1 to {len(rewards)}\nlowest {low:.3f}, highest {high:.3f}"] = curve
    return draw_grid([*cells.values()], cells).reduce(max(1, w // 700))

# --- The same without the download: tiny, for a laptop ------------------------------------------------------
def make_pipeline():    # the real classes, 0.5 M random weights; of words it knows COLORS, else <unk>
    special = {f"{name}_token": f"<{name}>" for name in "bos eos pad unk image grid_bos grid_eos".split()}
    words = {word: i for i, word in enumerate([*special.values(), *COLORS], start=64)}   # behind the 64 codes
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    processor = transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessorPil(), transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, padding_side="left", **special), "{{ messages[0].content[0].text }}")
    text = dict(vocab_size=80, vision_vocab_size=72, hidden_size=64, intermediate_size=128, eos_token_id=65,
                pad_token_id=66, num_hidden_layers=2, num_attention_heads=4, rope_parameters=dict(
                    rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=(1, 1, 2)))
    ar = transformers.GlmImageForConditionalGeneration(transformers.GlmImageConfig(
        text_config=text, vision_config=dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16),
        vq_config=dict(embed_dim=16, num_embeddings=64, latent_channels=16), image_start_token_id=64,
        image_end_token_id=65, image_token_id=68))
    t5 = transformers.T5EncoderModel(transformers.T5Config(vocab_size=384, d_model=32, num_layers=0))
    dit = diffusers.GlmImageTransformer2DModel(
        in_channels=3, out_channels=3, num_layers=1, attention_head_dim=16, num_attention_heads=4,
        text_embed_dim=32, time_embed_dim=32, condition_dim=8, prior_vq_quantizer_codebook_size=64)
    vae = diffusers.AutoencoderKL(
        3, 3, ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4, (8,) * 4, layers_per_block=0,
        latent_channels=3, norm_num_groups=1, latents_mean=(0.,) * 3, latents_std=(1.,) * 3,
        mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear")
    return diffusers.GlmImagePipeline(transformers.ByT5Tokenizer(), processor, t5, ar, vae, dit, scheduler)

def make_tiny_pipeline(seed=0, warmup_steps=300, batch=16):     # fitted, supervised, for some seconds
    torch.manual_seed(seed)
    pipe = make_pipeline()
    pipe.vision_language_encoder.model.language_model.norm.weight.data.fill_(4)     # or no code can be likely
    pipe.text_encoder.encoder.final_layer_norm.weight.data.zero_()      # this painter ignores quoted words
    # GLM-Image drafts about 16 x 16 tokens at any size, too much noise for a toy: here half the large grid
    pipe.processor._get_target_shape = lambda **size: [x // k for k in (32, 64) for x in size.values()]
    wrapper, dit, vae = GLMImageWrapper(pipe, 128, 128), pipe.transformer, pipe.vae
    palette = torch.cartesian_prod(*[torch.linspace(0, 1, 4)] * 3)      # [V, 3]: each code is an RGB colour
    weights = [p.requires_grad_() for module in (dit, vae, wrapper.ar) for p in module.parameters()]
    optimizer = torch.optim.Adam(weights, lr=2e-3)
    for _ in tqdm.tqdm(range(warmup_steps), "warming up the toy", disable=None, leave=False):
        codes = torch.randint(64, (batch, 2, 2)).repeat_interleave(2, 1).repeat_interleave(2, 2) # [B, 4, 4]
        latents = F.interpolate(palette[codes].movedim(3, 1) * 2 - 1, scale_factor=2)  # colours [B, 3, 8, 8]
        noise, t = torch.randn_like(latents), torch.rand(batch)                 # t = 0: clean, 1: all noise
        glyphs = torch.zeros(batch, int(torch.randint(1, 30, ())), 32)              # [B, any, D]
        drop = (torch.rand(batch, 1) < 0.1).expand(batch, 16)       # now and then no codes, for guidance > 1
        velocity = dit(torch.lerp(latents, noise, t.view(-1, 1, 1, 1)), glyphs, codes.flatten(1), drop,
                       t * 1000 - 1, torch.full((batch, 2), 64.), torch.zeros(batch, 2)).sample # [B, 3, 8, 8]
        painted = vae.decode(latents[:4] + 0.1 * noise[:4]).sample                  # [4, 3, 64, 64]
        picks = [(list(COLORS)[k], i, j) for k, i, j in torch.randint(len(COLORS), (batch, 3)).tolist()]
        prompts = ["a " * i + color + " thing" * j for color, i, j in picks]  # a fourth of the tokens show it
        colors = torch.tensor([COLORS[color] for color, _, _ in picks]).float()     # [B, 3]
        shown = torch.cdist(colors, palette).argmin(1, keepdim=True)                # [B, 1]
        tokens = torch.where(torch.rand(batch, 20) < 0.25, shown, torch.randint(64, (batch, 20)))   # [B, T]
        loss = (F.mse_loss(velocity, noise - latents) - wrapper.compute_logprobs(prompts, tokens)[0].mean()
                + F.mse_loss(painted, F.interpolate(latents[:4], scale_factor=8)))
        optimizer.zero_grad()      # losses: flow matching of the DiT, likelihood of the AR, pixels of the VAE
        loss.backward()
        optimizer.step()
    return pipe

# --- The command line ---------------------------------------------------------------------------------------
class Trouble(ValueError):
    """What the user can mend: `main` prints its one line, without a traceback."""

def check(ok, message):
    if not ok:
        raise Trouble(message)

@contextlib.contextmanager
def blame(what):        # whatever goes wrong inside becomes Trouble, with `what` in front
    try:
        yield
    except Exception as error:
        raise Trouble(f"{what}: {error if isinstance(error, (Trouble, OSError)) else repr(error)}") from error

def parse_reward(text):     # "color=1, mine.py:sharp=.2" -> {"color": 1.0, "/where/it/is/mine.py:sharp": 0.2}
    parts = [part.strip().partition("=") for part in text.split(",")]
    return {os.path.abspath(name) if ":" in name else name: float(weight or 1) for name, _, weight in parts}

def parse_size(text):       # "512" or "1024x768", width first -> [height, width]
    return [int(n) for n in reversed(text.split("x") if "x" in text else (text, text))]

def load_target(path):      # -> RGB, upright as its EXIF says, white where it is transparent
    image = ImageOps.exif_transpose(Image.open(path)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")

def load_prompts(path):     # lines: prompt, prompt<TAB>target.png, # comment -> prompts, targets (or None)
    with blame(f"--prompts {path}"):
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
        rows = [line.partition("\t") for line in lines if line[:1] not in ("", "#")]
        check(rows and max(map(len, lines)) < 10000, "it holds no prompt, or a line of 10,000 characters")
        targets = [load_target(Path(path).parent / target) if target else None for _, _, target in rows]
        return [prompt for prompt, _, _ in rows], targets

def add_flags(add, tiny):       # a flag a line; some defaults differ for the toy
    add("--prompts", type=os.path.abspath, default=__file__ + "/../prompts.txt", help="one a line")
    add("--reward", type=parse_reward, default="color", help="or weighted: color=1,my_rewards.py:sharp=.2")
    add("--reward-norm", default="none", choices=("none", "group"), help="group: add up z-scores")
    add("--steps", type=int, default=40 if tiny else 300, help="rollouts")
    add("--group-size", type=int, default=4, help="images per prompt")
    add("--batch-size", type=int, default=8, help="prompts per step, on all GPUs together")
    add("--micro-batch-size", type=int, default=4 if tiny else 1, help="images painted or learnt at a time")
    add("--lr", type=float, default=2e-3 if tiny else 5e-5, help="AdamW learning rate")
    add("--num-iterations", type=int, default=1, help="updates per rollout; above 1 the clip matters")
    add("--clip-range", type=float, default=0.2, help="a ratio may fall to 1 - this")
    add("--clip-range-high", type=float, help="a ratio may rise to 1 + this; None: --clip-range")
    add("--kl-coef", type=float, default=0.01, help="price of leaving the base model; 0: no KL")
    add("--scale-rewards", default="group", choices=("group", "batch", "none"), help="std to divide by")
    add("--importance", default="token", choices=("token", "sequence"), help="one ratio for each")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to this norm")
    add("--lora-rank", type=int, default=16 if tiny else 32, help="rank of the adapters")
    add("--lora-alpha", type=float, default=32.0 if tiny else 64.0, help="times alpha / rank")
    add("--init-adapter", type=os.path.abspath, metavar="DIR", help="begin with the adapter of another run")
    add("--size", type=parse_size, default="128" if tiny else "512", help="pixels: 512 or WIDTHxHEIGHT")
    add("--temperature", type=float, help="of the sampling; None: the model's own")
    add("--top-p", type=float, help="draw from the likeliest codes of this mass; None: the model's own")
    add("--decode-steps", type=int, default=4 if tiny else 20, help="denoising steps of the DiT, in training")
    add("--eval-decode-steps", type=int, default=4 if tiny else 50, help="the same, for the pictures kept")
    add("--guidance", type=float, default=1.5, help="of the DiT; above 1 it runs twice a step")
    add("--offload", default="auto", choices=("auto", "on", "off"), help="GPU holds only what a phase needs")
    add("--sample-every", type=int, default=10, help="steps between pictures of fixed prompts")
    add("--save-every", type=int, default=10, help="steps between checkpoints")
    add("--seed", type=int, default=0, help="of everything random")
    add("--out", default=time.strftime("runs/%Y%m%d-%H%M%S"), help="folder for the run")
    add("-h", "--help", action="help", help="show this and exit")

def parse_args(argv=None):      # some defaults depend on --model; a resumed run brings its settings
    parser = argparse.ArgumentParser("grpo.py", usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", help="hub id, folder, tiny; None: GLM-Image if a GPU has room, else tiny")
    parser.add_argument("--resume", metavar="RUN_DIR", help="go on with this run, with its own settings")
    asked, _ = parser.parse_known_args(argv)        # first these two: the other defaults depend on them
    room = torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0
    saved = {"model": asked.model or ("zai-org/GLM-Image" if room >= 60 else "tiny")}
    if asked.resume:
        with blame(f"--resume: {asked.resume} holds no run"):
            saved = torch.load(f"{asked.resume}/checkpoint.pt", "cpu", weights_only=True, mmap=True)["args"]
            saved["resume"] = saved["out"] = asked.resume
    add_flags(parser.add_argument, tiny=saved["model"] == "tiny")
    args = parser.parse_args(argv, argparse.Namespace(**saved))
    for name in saved.keys() - {"steps", "save_every", "sample_every"}:
        check(getattr(args, name) == saved[name], f"--resume keeps --{name.replace('_', '-')} {saved[name]}")
    print(f"model: {args.model} ({room:.0f} GiB of GPU memory free, GLM-Image wants 60)")
    return args

def prepare(args):      # checks the arguments, loads what they name, and only then makes a folder -> trainer
    lows = {"seed": 0, "group_size": 2, "temperature": 0.01, "top_p": 0.01}
    for name, value in vars(args).items():
        low, high = lows.get(name, int(isinstance(value, int))), 1 if name == "top_p" else 1e12
        check(not isinstance(value, (int, float)) or low <= value <= high,
              f"--{name.replace('_', '-')} is {value}, but must be from {low} to {high:g}")
    check(all(map(math.isfinite, args.reward.values())), "--reward has a weight that is not finite")
    check(len(args.size) == 2 and not any(n % 32 or n < 1 for n in args.size), "--size: multiples of 32 only")
    P, G, B = args.batch_size, args.group_size, args.micro_batch_size
    check(not (P % WORLD or (n := P * G // WORLD) % B), f"{P} x {G} / {WORLD} GPUs: no micro-batches of {B}")
    check(args.resume or RANK or not Path(args.out, "checkpoint.pt").exists(), "--out is a run: --resume it")
    folder = next(path for path in (Path(args.out).absolute() / "_").parents if path.exists())
    check(folder.is_dir() and os.access(folder, os.W_OK), f"--out: cannot write into {folder}")
    print(f"{P} prompts x {G} images = {P * G} images a step, {n} a rank, {n // B} micro-batches of {B}")
    for name in args.reward.keys() - REWARDS.keys():
        path, _, function = name.rpartition(":")
        with blame(f"--reward {name}: neither {', '.join(REWARDS)}, nor file.py:function"):
            REWARDS[name] = run_file(path)[function]
    prompts, targets = load_prompts(args.prompts)
    check("mse" not in args.reward or all(targets), f"--reward mse: a line of {args.prompts} has no target")
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    scarce = args.offload == "auto" and device == "cuda" and torch.cuda.mem_get_info()[0] < 60 * 2**30
    wrapper = GLMImageWrapper.from_pretrained(
        args.model, dtype, args.seed, height=args.size[0], width=args.size[1], temperature=args.temperature,
        top_p=args.top_p, guidance=args.guidance, device=device, offload=scarce or args.offload == "on")
    trainer = GRPOTrainer(args, wrapper, prompts, targets)
    args.resume and trainer.load_checkpoint(trainer.out / "checkpoint.pt")
    if RANK == 0:
        (trainer.out / "samples").mkdir(parents=True, exist_ok=True)
        (trainer.out / "args.json").write_text(json.dumps(vars(args), indent=2))
        (trainer.out / "grpo.py").write_text(Path(__file__).read_text())
        (trainer.out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in trainer.history))
    return trainer

def main(argv=None):
    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    trainer = None
    try:
        if WORLD > 1:                                           # under torchrun: a process for each GPU
            torch.distributed.init_process_group()
            torch.cuda.is_available() and torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            sys.stdout = open(os.devnull, "w") if RANK > 0 else sys.stdout      # only one talks
        trainer = prepare(parse_args(argv))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, trainer.stop)
        trainer.train()
        WORLD > 1 and (gather([]), torch.distributed.destroy_process_group())   # once all are here
    except torch.OutOfMemoryError:
        sys.exit("grpo.py: error: out of GPU memory; try --offload on, then a smaller --group-size or --size")
    except (Trouble, OSError) as error:
        if trainer and isinstance(error, Trouble) and RANK == 0:
            trainer.save_checkpoint()       # of the last whole step: no weight has moved since
        argparse.ArgumentParser("grpo.py", usage=argparse.SUPPRESS).error(" ".join(str(error).split()))
    print(f"pictures and curve: {trainer.out}/progress.png\nto use the adapter, with peft installed: "
          f'pipe.vision_language_encoder.load_adapter("{trainer.out}/adapter")')
    if trainer.stopped and len(trainer.history) < trainer.args.steps:
        print(f"stopped after step {len(trainer.history)}: --resume {trainer.out} goes on")
        sys.exit(128 + trainer.stopped)

if __name__ == "__main__":
    main()
