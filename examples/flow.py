"""GLM-Image's two halves, trained in turn: `--model RUN` trains the half that the run did not.

    python grpo.py --decode-steps 4 --reward examples/rewards.py:even --out runs/ar
    python -m examples.flow --model runs/ar --out runs/dit --reward examples/rewards.py:even \\
        --steps 30 --lr 5e-3 --warmup-steps 0 --group-size 8 --micro-batch-size 8
    python -m examples.flow --model runs/dit --out runs/ar2 --reward examples/rewards.py:even

It takes the flags of grpo.py. --model may be a model, the folder of a run, or that of an adapter.
Of a run it takes the newest adapter, which is frozen, the adapter with which the other half goes
on, and the settings of drawing, such as --width; typed flags override them. `python grpo.py
--wrapper examples/flow.py:DiT`, or `examples/halves.py:AR`, takes the same adapters, no settings.

The DiT learns by Flow-GRPO (arXiv 2505.05470), in the trainer of grpo.py. An action is a denoising
step. The pipeline's Euler steps are deterministic. Here some steps add noise, and a drift that
compensates for it. The latents keep the same distribution, and each noisy step has a log-prob, that
of a Gaussian.

Axes: N = P * G samples, B of them per micro-batch; W noisy steps; latents [C, h, w].
"""
import argparse, math, sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from grpo import DEVICE
from examples import halves
from examples.runs import PICTURE, fail, load_weights

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

def check(config):
    """Checks settings before a model is loaded. `main` prints a BadInput on one line."""
    if config.decode_steps < WINDOW:
        raise grpo.BadInput(f"--decode_steps must be at least {WINDOW}, the number of noisy steps")

# --- The DiT as the policy ------------------------------------------------------
class DiT:
    """A wrapper of the DiT. Its `tokens` are latents [N, W + 2, C, h, w]: before the first noisy
    step, after each noisy step, and at the end. A rollout's `allowed` has the conditions, `given`
    [N, 1 + K]: the index of the first noisy step, then the codes."""
    defaults = dict(kl_coef=0.0, clip_range=2e-4)
    lora_layers = halves.DIT_LAYERS
    frozen = None  # the LoRA of the AR half

    def __init__(self, ar):
        self.ar = ar  # the wrapper of grpo.py: it samples tokens, and is frozen
        self.pipe = ar.pipe
        self.policy = ar.pipe.transformer
        self.policy.enable_gradient_checkpointing()
        self.config = ar.config
        self.explores = False  # a trainer does
        self.references = {}  # means [B, W, C, h, w] of each micro-batch, for the KL

    @classmethod
    def from_pretrained(cls, path, config):
        check(config)
        model, adapter = halves.choose_frozen(path, config, halves.DIT_LAYERS)
        wrapper = cls(grpo.GLMImageWrapper.from_pretrained(model, config))
        wrapper.frozen = adapter and load_weights(wrapper.ar, adapter)
        wrapper.model = model
        return wrapper

    @property
    def config(self):
        return self.ar.config

    @config.setter
    def config(self, config):
        """A trainer sets its own, which may not be those with which the model was loaded. Who only
        draws does not, and does not explore."""
        # A micro-batch has one prompt: with two, the DiT would see the shorter glyphs' padding.
        config.micro_batch_size = math.gcd(config.micro_batch_size, config.group_size)
        self.ar.config = config
        self.explores = True
        self.set_schedule()

    def set_schedule(self):
        """Times and sigmas as the pipeline sets them. A trap: for large images the sigmas, which
        step the latents, are shifted; the times, which are inputs of the DiT, are not."""
        scheduler = self.pipe.scheduler
        # Imported here, as it takes seconds.
        from diffusers.pipelines.glm_image.pipeline_glm_image import calculate_shift
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
            timestep=torch.full((B,), self.times[i] - 1, device=DEVICE),
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

    def encode(self, prompts):
        return self.ar.encode(prompts)

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """P prompts, a seed per group -> a Rollout. In training a group shares its codes and its
        initial noise: its rewards differ only because of the denoising. The samples of others,
        and those for the log, have codes of their own, which `decode` paints without noise."""
        explores = self.explores and group_size > 1
        drawn = self.ar.sample(prompts, 1 if explores else group_size, seeds)
        h = self.config.height // 32
        w = self.config.width // 32
        large = drawn.tokens[:, -h * w:]  # without the draft, which is not painted
        if not explores:
            return drawn._replace(tokens=large)
        self.references.clear()
        self.ar.move_to_gpu(self.ar.dit)
        large = large.view(-1, h, w)
        codes = torch.kron(large, large.new_ones(1, 2, 2)).flatten(1)  # [P, K]
        samples = []
        for prompt, row, seed in zip(prompts, codes, self.pipe.progress_bar(seeds)):
            samples += self.sample_group(prompt, row.repeat(group_size, 1), seed)
        repeated = np.repeat(prompts, group_size).tolist()
        return grpo.Rollout(repeated, *[torch.cat(parts) for parts in zip(*samples)])

    def sample_group(self, prompt, codes, seed):
        """The seed decides all that is random: initial noise, start of the window, its noise."""
        rng = torch.Generator().manual_seed(~seed)  # as in grpo.py, unlike the tokens' seed
        shape = self.policy.config.in_channels, self.config.height // 8, self.config.width // 8
        first = torch.randn(1, *shape, generator=rng)  # as in the pipeline
        latest = max(self.config.decode_steps // 2 - WINDOW, 0)  # early steps matter most
        start = torch.randint(latest + 1, (1, 1), generator=rng)
        noise = torch.randn(len(codes), WINDOW, *shape, generator=rng)
        start = start.to(codes).repeat(len(codes), 1)
        given = torch.cat([start, codes], dim=1)
        size = self.config.micro_batch_size
        for part, own in zip(given.split(size), noise.split(size)):
            path, logprobs = self.paint(prompt, first.repeat(len(part), 1, 1, 1), own, part)
            yield path.cpu(), logprobs.cpu(), part

    def paint(self, prompt, latents, noise, given):
        """Denoises from the initial noise -> latents to keep, logprobs [B, W]."""
        text = self.pipe.encode_prompt(prompt, self.config.guidance > 1)
        start = given[0, 0].item()
        codes = given[:, 1:].to(DEVICE)
        latents = latents.to(DEVICE)
        window = range(start, start + WINDOW)
        path = [latents]
        logprobs = []
        for i in range(len(self.times)):
            if i in window:
                mean, std = self.predict(latents, i, text, codes, NOISE_LEVEL)
                latents = mean + std * noise[:, i - window.start].to(DEVICE)
                logprobs.append(score(latents, mean, std))
            else:
                latents, _ = self.predict(latents, i, text, codes, 0.0)
            path.append(latents)
        kept = [path[i] for i in (*window, window.stop, -1)]
        return torch.stack(kept, dim=1), torch.stack(logprobs, dim=1)

    def compute_logprobs(self, rollout):
        """Repeats the noisy steps -> log-probs with a gradient, entropy [B, W]; and the exact KL of
        each step to the reference [B, W], if this has scored the same part before, without a
        gradient, as it does for a trainer that has a --kl-coef. KL of Gaussians that share their
        std, as a mean over pixels: mean((mean - ref_mean)^2) / (2 std^2)."""
        if rollout.tokens.dim() == 2:
            raise grpo.BadInput("the DiT has log-probs of its latents, and none of codes")
        halves.keep_frozen(self)
        self.ar.move_to_gpu(self.ar.dit)
        text = self.pipe.encode_prompt(rollout.prompts[0], self.config.guidance > 1)
        start = rollout.allowed[0, 0].item()
        codes = rollout.allowed[:, 1:].to(DEVICE)
        latents = rollout.tokens.to(DEVICE)
        steps = [self.predict(latents[:, k], start + k, text, codes, NOISE_LEVEL)
                 for k in range(WINDOW)]
        logprobs = torch.stack(
            [score(latents[:, k + 1], *steps[k]) for k in range(WINDOW)], dim=1)
        means = torch.stack([mean / std for mean, std in steps], dim=1)
        key = rollout.tokens.data_ptr()
        entropy = -logprobs.detach()  # the std is fixed: entropy is not learned
        if not torch.is_grad_enabled():
            self.references[key] = means
        if key not in self.references:
            return logprobs, entropy
        kl = (means - self.references[key]).square().mean(dim=(2, 3, 4)) / 2
        return logprobs, entropy, kl

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        """The latents are finished: only the VAE is applied. Codes [N, h w] are drawn by the
        pipeline without added noise, as for its users."""
        if tokens.dim() == 2:
            return self.ar.decode(prompts, tokens, seeds)
        self.ar.move_to_gpu(self.ar.dit)
        vae = self.pipe.vae
        images = []
        for latents in tokens[:, -1:].to(DEVICE):
            mean = torch.tensor(vae.config.latents_mean).to(latents)[:, None, None]
            std = torch.tensor(vae.config.latents_std).to(latents)[:, None, None]
            image = vae.decode((latents * std + mean).to(vae.dtype)).sample
            images += self.pipe.image_processor.postprocess(image)
        return images

# --- The command --------------------------------------------------------------
def find_defaults(argv=None):
    """What --model brings -> defaults: the half that was not trained last, and the settings of
    drawing. Those of training that a model has in its grpo.json are for its AR half."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=grpo.TINY_MODEL)
    parser.add_argument("--resume")
    typed, _ = parser.parse_known_args(argv)
    if typed.resume and Path(typed.resume, "config.json").is_file():  # the run knows all itself
        return {}
    model, adapters, settings = halves.find_halves(typed.model)
    tuned = halves.read_json(Path(model, "grpo.json"))
    is_painted = [*adapters][-1:] == [halves.DIT_LAYERS]
    wrapper = f"{halves.__file__}:AR" if is_painted else f"{__file__}:DiT"
    if not is_painted:
        tuned = {name: value for name, value in tuned.items() if name in PICTURE}
    return dict(wrapper=wrapper) | tuned | settings

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)  # before the flags
    try:
        DEFAULTS = find_defaults()
    except grpo.BadInput as error:
        fail(error)
    grpo.main(**DEFAULTS)
