"""GLM-Image's two halves, trained in turn: `DiT` trains the one that paints, `AR` the other again.

    python grpo.py --decode-steps 4 --reward examples/rewards.py:even --out runs/ar
    python grpo.py --wrapper examples/flow.py:DiT --model runs/ar --out runs/dit ..
    python grpo.py --wrapper examples/flow.py:AR --model runs/dit --out runs/ar2 ..

--model may be a model, the folder of a run, which stands for its newest adapter, or that of an
adapter. Each adapter names what it was trained over: a model, or the other half's adapter. The
other half is frozen with its adapter, and a half goes on with its own, if it has one. Settings of
drawing that are not typed, such as --width, are those of the run.

The DiT learns by Flow-GRPO (arXiv 2505.05470), in the trainer of grpo.py. An action is a denoising
step. The pipeline's Euler steps are deterministic. Here some steps add noise, and a drift that
compensates for it. The latents keep the same distribution, and each noisy step has a log-prob, that
of a Gaussian.

Axes: N = P * G samples, B of them per micro-batch; W noisy steps; latents [C, h, w].
"""
import json, math, types
from pathlib import Path

import numpy as np
import torch
from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift

import grpo
from examples.runs import find_adapters, load_adapter, read_adapter_config

NOISE_LEVEL = 0.7  # "a" in the paper: how much the images of a group differ
WINDOW = 2  # W: the number of denoising steps that have noise and are trained

# --- The maths of noisy steps ---------------------------------------------------
def denoise(latents, velocity, sigma, next_sigma, noise_level):
    """One step -> mean [B, C, h, w] and std of the next latents. Latents are (1 - sigma) * image +
    sigma * noise; velocity is noise - image. At level 0 this is an Euler step, and the std is 0."""
    dt = next_sigma - sigma  # negative
    rest = 1 - sigma if sigma < 1 else 1 - next_sigma  # the first sigma is 1: avoids division by 0
    scale = noise_level * (sigma / rest) ** 0.5
    drift = scale**2 / (2 * sigma)
    mean = latents * (1 + drift * dt) + velocity * (1 + drift * (1 - sigma)) * dt
    return mean, scale * (-dt) ** 0.5

def score(latents, mean, std):
    """Log-prob of a step [B], a mean over pixels: with a sum, ratios would be 0 or infinite."""
    return torch.distributions.Normal(mean, std).log_prob(latents).mean(dim=(1, 2, 3))

# --- What --model names ---------------------------------------------------------
AR_LAYERS = grpo.GLMImageWrapper.lora_layers
DIT_LAYERS = r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)"

# Defaults that nobody types: `prepare` puts the settings of the run below in their place.
UNTYPED = dict(width=0, height=0, decode_steps=0, guidance=-1.0,
               temperature=None, top_k=None, top_p=None)

def find_halves(path):
    """-> the model, and {lora_layers: adapter} of the halves that have one, the last trained first.
    An adapter names its model, or the other half's adapter, which names another, and so on."""
    adapters = {}
    while True:
        folder = [Path(path), *find_adapters(Path(path)).values()][-1]
        if not (folder / "adapter_config.json").exists():
            return str(path), adapters
        saved = read_adapter_config(folder)
        adapters.setdefault(saved["target_modules"], folder)
        path = saved["base_model_name_or_path"]

def prepare(path, config, own):
    """Completes the settings of a run that trains the half with these layers -> the model, and the
    other half's adapter or None. The run's config.json will have all that this finds."""
    model, adapters = find_halves(path)
    files = [folder.parent / "config.json" for folder in adapters.values()]
    saved = json.loads(files[0].read_bytes()) if files and files[0].exists() else {}
    for name, value in UNTYPED.items():
        if getattr(config, name) == value:
            setattr(config, name, saved.get(name, getattr(grpo.Config, name)))
    begin = adapters.pop(own, None)
    if begin and not config.adapter:
        config.adapter = str(begin)
    frozen = next(iter(adapters.values()), None)
    config.model = str(frozen or model)  # what the new adapters will name
    return model, frozen

class AR(grpo.GLMImageWrapper):
    """The AR half, whose tokens are painted by a DiT with an adapter. It is not merged into the
    weights, as in bf16 small differences would be lost."""
    defaults = UNTYPED | dict(model=grpo.TINY_MODEL)

    @classmethod
    def from_pretrained(cls, path, config):
        model, frozen = prepare(path, config, AR_LAYERS)
        wrapper = super().from_pretrained(model, config)
        if frozen:
            dit = types.SimpleNamespace(policy=wrapper.pipe.transformer, lora_layers=DIT_LAYERS)
            load_adapter(dit, frozen)
        return wrapper

# --- The DiT as the policy ------------------------------------------------------
class DiT:
    """A wrapper of the DiT. Its `tokens` are latents [N, W + 2, C, h, w]: before the first noisy
    step, after each noisy step, and at the end. A rollout's `allowed` has the conditions, `given`
    [N, 1 + K]: the index of the first noisy step, then the codes."""
    defaults = UNTYPED | dict(model=grpo.TINY_MODEL, kl_coef=0.0, clip_range=2e-4)
    lora_layers = DIT_LAYERS

    @classmethod
    def from_pretrained(cls, path, config):
        model, frozen = prepare(path, config, DIT_LAYERS)
        if config.decode_steps < WINDOW:
            raise grpo.BadInput(f"--decode-steps must be {WINDOW} or more, as so many have noise")
        ar = grpo.GLMImageWrapper.from_pretrained(model, config)
        if frozen:
            load_adapter(ar, frozen)
        return cls(ar)

    def __init__(self, ar):
        self.ar = ar  # the wrapper of grpo.py: it samples tokens, and is frozen
        self.pipe = ar.pipe
        self.policy = ar.pipe.transformer
        self.policy.enable_gradient_checkpointing()
        self.explores = False  # a trainer does
        self.references = {}  # means [B, W, C, h, w] of each micro-batch, for the KL

    @property
    def config(self):
        return self.ar.config

    @config.setter
    def config(self, config):
        """Only a trainer sets this: who just draws does not explore."""
        # A micro-batch has one prompt: with two, the DiT would see the shorter glyphs' padding.
        config.micro_batch_size = math.gcd(config.micro_batch_size, config.group_size)
        self.ar.config = config
        self.explores = True
        self.set_schedule()

    def set_schedule(self):
        """Times and sigmas as the pipeline sets them. A trap: for large images the sigmas, which
        step the latents, are shifted; the times, which are inputs of the DiT, are not."""
        scheduler = self.pipe.scheduler
        own = scheduler.config
        patches = self.config.height * self.config.width // 256  # patches of the DiT
        shift = calculate_shift(patches, own.base_image_seq_len, own.base_shift, own.max_shift)
        last = own.num_train_timesteps
        times = np.linspace(last, 1, self.config.decode_steps + 1)[:-1].astype(int)
        scheduler.set_timesteps(timesteps=times, sigmas=times / last, mu=shift)
        self.times = scheduler.timesteps.tolist()  # one per step
        self.sigmas = scheduler.sigmas.tolist()  # one before each step, and 0 at the end

    def call_dit(self, latents, i, glyphs, codes, drop):
        """-> the velocity at step i [B, C, h, w], fp32. `drop` ignores the codes."""
        B = len(latents)
        size = torch.tensor([[self.config.height, self.config.width]] * B).to(glyphs)
        output = self.policy(
            hidden_states=latents.to(glyphs),
            encoder_hidden_states=glyphs.repeat(B, 1, 1),
            prior_token_id=codes,
            prior_token_drop=torch.full_like(codes, drop).bool(),
            timestep=torch.full((B,), self.times[i] - 1, device=grpo.DEVICE),
            target_size=size, crop_coords=torch.zeros_like(size))
        return output.sample.float()

    def predict(self, latents, i, text, codes, noise_level):
        """Step i of the policy; sampler and trainer share this definition -> mean, std."""
        glyphs, no_glyphs = text  # encodings of the quoted text, and of no text
        velocity = self.call_dit(latents, i, glyphs, codes, drop=False)
        if self.config.guidance > 1:
            base = self.call_dit(latents, i, no_glyphs, codes, drop=True)
            velocity = base + self.config.guidance * (velocity - base)
        return denoise(latents, velocity, self.sigmas[i], self.sigmas[i + 1], noise_level)

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """P prompts, a seed per group -> a Rollout. In training a group shares its codes and its
        initial noise: its rewards differ only because of the denoising. The samples of others,
        and those for the log, have codes of their own, which `decode` paints without noise."""
        explores = self.explores and group_size > 1
        drawn = self.ar.sample(prompts, 1 if explores else group_size, seeds)
        if not explores:
            return drawn
        self.references.clear()
        self.ar.move_to_gpu(self.ar.dit)
        h = self.config.height // 32
        w = self.config.width // 32
        codes = drawn.tokens[:, -h * w:].view(-1, h, w)  # without the draft, which is not painted
        codes = codes.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)  # [P, K]
        samples = []
        for prompt, row, seed in zip(prompts, codes, self.pipe.progress_bar(seeds)):
            samples += self.sample_group(prompt, row.repeat(group_size, 1), seed)
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        return grpo.Rollout(prompts, *[torch.cat(parts) for parts in zip(*samples)])

    def sample_group(self, prompt, codes, seed):
        """The seed decides all that is random: initial noise, start of the window, its noise."""
        rng = torch.Generator().manual_seed(~seed)  # as in grpo.py, unlike the tokens' seed
        shape = self.policy.config.in_channels, self.config.height // 8, self.config.width // 8
        first = torch.randn(1, *shape, generator=rng)  # as in the pipeline
        latest = max(self.config.decode_steps // 2 - WINDOW, 0)  # early steps matter most
        start = torch.randint(latest + 1, (1, 1), generator=rng)
        noise = torch.randn(len(codes), WINDOW, *shape, generator=rng)
        given = torch.cat([start.repeat(len(codes), 1), codes], 1)
        size = self.config.micro_batch_size
        for part, own in zip(given.split(size), noise.split(size)):
            path, logprobs = self.paint(prompt, first.repeat(len(part), 1, 1, 1), own, part)
            yield path.cpu(), logprobs.cpu(), part

    def paint(self, prompt, latents, noise, given):
        """Denoises from the initial noise -> latents to keep, log-probs [B, W]."""
        text = self.pipe.encode_prompt(prompt, self.config.guidance > 1)
        start = given[0, 0].item()
        codes = given[:, 1:].to(grpo.DEVICE)
        latents = latents.to(grpo.DEVICE)
        window = range(start, start + WINDOW)
        path = [latents]
        logprobs = []
        for i in range(len(self.times)):
            if i in window:
                mean, std = self.predict(latents, i, text, codes, NOISE_LEVEL)
                latents = mean + std * noise[:, i - start].to(grpo.DEVICE)
                logprobs.append(score(latents, mean, std))
            else:
                latents, _ = self.predict(latents, i, text, codes, 0.0)
            path.append(latents)
        kept = [path[i] for i in (*window, window.stop, -1)]
        return torch.stack(kept, dim=1), torch.stack(logprobs, dim=1)

    def compute_logprobs(self, rollout):
        """Repeats the noisy steps -> log-probs with a gradient, entropy [B, W]; and, if the
        reference has scored the same part before, the exact KL to it [B, W]. KL of Gaussians that
        share their std, as a mean over pixels: mean((mean - ref_mean)^2) / (2 std^2)."""
        self.ar.move_to_gpu(self.ar.dit)
        text = self.pipe.encode_prompt(rollout.prompts[0], self.config.guidance > 1)
        start = rollout.allowed[0, 0].item()
        codes = rollout.allowed[:, 1:].to(grpo.DEVICE)
        latents = rollout.tokens.to(grpo.DEVICE)
        steps = [self.predict(latents[:, k], start + k, text, codes, NOISE_LEVEL)
                 for k in range(WINDOW)]
        logprobs = torch.stack([score(latents[:, k + 1], *steps[k]) for k in range(WINDOW)], dim=1)
        means = torch.stack([mean / std for mean, std in steps], dim=1)
        entropy = -logprobs.detach()  # the std is fixed: entropy is not learned
        part = rollout.tokens.data_ptr()
        if not grpo.LoRALinear.enabled:
            self.references[part] = means
        if part not in self.references:
            return logprobs, entropy
        kl = (means - self.references[part]).square().mean(dim=(2, 3, 4)) / 2
        return logprobs, entropy, kl

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        """The latents are finished: only the VAE is applied. Codes [N, T] are painted by the
        pipeline without added noise, as for its users."""
        if tokens.dim() == 2:
            return self.ar.decode(prompts, tokens, seeds)
        self.ar.move_to_gpu(self.ar.dit)
        vae = self.pipe.vae
        images = []
        for latents in tokens[:, -1:].to(grpo.DEVICE):
            mean = torch.tensor(vae.config.latents_mean).to(latents)[:, None, None]
            std = torch.tensor(vae.config.latents_std).to(latents)[:, None, None]
            image = vae.decode((latents * std + mean).to(vae.dtype)).sample
            images += self.pipe.image_processor.postprocess(image)
        return images
