"""Tests of examples/flow.py, identities mostly, on a small GLM-Image of random weights."""
import json
from pathlib import Path

import diffusers, pytest, torch

import grpo
from conftest import perturb
from examples import flow
from examples.make import tiny

QUOTED = ['a red fox that says "STOP HERE"', "yellow"]  # of the second no word is to be painted

def make_pipeline():
    """Random weights, always the same, with a scale of latents and sigmas that depend on the size of the image, as they
    may be in GLM-Image. A draft of 2 x 2 tokens, as that of 16 x 16 takes its time. No dropout, as when loaded."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS)
    pipe.processor._get_target_shape = lambda height, width: (height // 32, width // 32, 2, 2)
    pipe.vae.register_to_config(latents_mean=[0.5] * 16, latents_std=[2.0] * 16)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, time_shift_type="linear", base_shift=0.25, max_shift=0.75)
    torch.nn.ModuleList([pipe.vision_language_encoder, pipe.text_encoder, pipe.transformer, pipe.vae]).eval()
    return pipe

def make_painter(**settings):
    """64 wide and 128 high: 4 x 2 tokens after those of the draft."""
    settings = dict(width=64, height=128, batch_size=2, steps=4, kl_coef=0.0, decode_steps=8) | settings
    return flow.Painter(grpo.GLMImageWrapper(make_pipeline(), grpo.Config(**tiny.SETTINGS | settings)))

def make_rollout(trainer, step=1):
    """What `train` hands to `train_step`, where the reward is the mean of the latents."""
    places, seeds = grpo.choose_prompts(step, len(QUOTED), trainer.config)
    rollout = trainer.wrapper.sample([QUOTED[i] for i in places], trainer.config.group_size, seeds)
    rewards = rollout.tokens[:, -1].double().mean((1, 2, 3))
    return rollout, grpo.compute_advantages(rewards, trainer.config.group_size)

def make_painting(out, **settings):
    """A trainer of the painter; its adapters do something."""
    painter = make_painter(**dict(out=str(out), max_grad_norm=1e9, height=64) | settings)
    trainer = grpo.GRPOTrainer(painter.config, painter, QUOTED)
    perturb(trainer.lora)
    return trainer

@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_painter_at_level_0_is_the_stock_pipeline(monkeypatch, guidance):
    """Other sigmas, times, conditions or noise than the pipeline's would train what nobody uses."""
    painter = make_painter(guidance=guidance)
    saved = painter.sample(QUOTED, 1, [1, 2]).tokens  # of the log's pictures, without noise
    monkeypatch.setattr(flow, "NOISE_LEVEL", 1e-7)
    quiet = painter.sample(QUOTED, 2, [1, 2]).tokens[::2]
    stock = make_pipeline()
    for i in range(2):
        expected = stock(
            QUOTED[i], prior_token_ids=stock._upsample_token_ids(saved[i, 4:], 4, 2), height=128, width=64,
            num_inference_steps=8, guidance_scale=guidance, output_type="latent",
            generator=torch.Generator().manual_seed(~(1 + i))).images
        assert (quiet[i, -1] - expected).abs().max() < 1e-5
    kept, pictures = [grpo.pil_to_tensor(painter.decode(QUOTED, tokens, [1, 2])) for tokens in (saved, quiet)]
    assert (pictures - kept).abs().max() < 1.5 / 255

@pytest.mark.parametrize("sigma", [0.9, 0.5, 0.1])
def test_noise_and_drift_make_up_for_each_other(sigma):
    """A wrong sign or factor lets latents leave the distribution that the DiT knows. Of one image,
    3, all is known: latents at sigma are 3 (1 - sigma) + sigma noise, the velocity noise - 3."""
    noise = torch.tensor([0.0, 1.0], dtype=torch.float64)
    latents = 3 * (1 - sigma) + sigma * noise
    mean, std = flow.denoise(latents, noise - 3, sigma, sigma - 1e-4, noise_level=0.7)
    still, moved = mean.tolist()
    assert still == pytest.approx(3 * (1 - sigma + 1e-4), abs=1e-12)
    assert (moved - still) ** 2 + std**2 == pytest.approx((sigma - 1e-4) ** 2, abs=1e-6)
    assert std**2 > 1e-6  # or there is no noise to make up for

def test_what_a_group_of_paintings_shares(monkeypatch):
    """Rewards differ by the painting alone; all chance is in the group's seed, not in its batch."""
    painter = make_painter(group_size=6)
    assert painter.config.micro_batch_size == 2  # of 16: batches end where groups do
    rollout = painter.sample(["red", "a blue thing", "red"], 3, [1, 2, 3])
    for group, codes in zip(rollout.tokens.split(3), rollout.allowed.split(3)):
        assert torch.equal(codes[0], codes[2]) and (group[0, 0] - group[2, 0]).abs().max() < 1e-5
        assert (group[0, 1] - group[2, 1]).abs().mean() > 0.1
    alone = painter.sample(["red"], 3, [3])
    assert torch.allclose(alone.tokens, rollout.tokens[6:], atol=1e-5) and alone.allowed.equal(rollout.allowed[6:])
    monkeypatch.setattr(painter, "paint", lambda *_: (torch.zeros(1), torch.zeros(1)))
    starts = [next(painter.sample_group("red", alone.allowed[:1, 1:], seed))[2][0, 0] for seed in range(12)]
    assert set(map(int, starts)) == {0, 1, 2}  # the window lies in the first half of 8 steps

def test_each_phase_asks_for_its_half(monkeypatch):
    """With offloading the weights of the other one are elsewhere. A second trainer's schedule was that of the first."""
    painter = make_painter(decode_steps=2)
    painter.config = make_painter(decode_steps=8).config
    assert len(painter.times) == 8 and painter.ar.config is painter.config
    asked = []
    monkeypatch.setattr(painter.ar, "move_to_gpu", lambda half: asked.append(half))
    rollout = painter.sample(QUOTED, 2, [1, 2])
    painter.decode(QUOTED, rollout.tokens, [1, 2])
    painter.compute_logprobs(rollout.part(slice(1)))
    assert set(asked[:-3]) == {painter.ar.ar} and set(asked[-3:]) == {painter.ar.dit}  # each token asks for its half

@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_painter_and_trainer_agree_exactly(tmp_path, guidance):
    """The same steps, scored by another pass, schedule or level, would start off ratio 1. The gradient must reach all
    of the DiT's adapter, and not depend on the micro-batch."""
    trainer = make_painting(tmp_path / "run", guidance=guidance)
    rollout, advantages = make_rollout(trainer)
    assert rollout.logprobs.std() > 0 and rollout.logprobs.abs().max() < 5  # a mean of pixels
    gradients = []
    trainer.optimizer.step = lambda: gradients.append([w.grad.clone() for w in trainer.lora.weights.values()])
    for trainer.config.micro_batch_size in (1, 2, 4):
        metrics = trainer.train_step(rollout, advantages)
    assert metrics["ratio_mean"] == 1 and metrics["sampler_gap"] == 0  # with 4, as they were sampled
    for one, *others in zip(*gradients):
        assert all((one - other).abs().max() < 1e-4 * one.abs().max() for other in others)

def test_adapters_of_both_halves(tmp_path, monkeypatch):
    """--model must bring the AR half as it was trained; into the stock pipeline, docs/painter.md must bring the DiT."""
    peft = pytest.importorskip("peft")
    trainer = make_painting(tmp_path / "run")
    ar = trainer.wrapper.ar
    plain = ar.sample(QUOTED, 3, [1, 2]).tokens
    lora = grpo.LoRA(ar.policy, ar.lora_layers, rank=4)
    perturb(lora)
    lora.save(tmp_path / "ar", "small")
    trainer.lora.save(tmp_path / "dit", str(tmp_path / "ar"))
    other = make_painter(height=64).ar
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", lambda path, _: other if path == "small" else None)
    drawn = flow.Painter.from_pretrained(str(tmp_path / "ar"), ar.config).ar.sample(QUOTED, 3, [1, 2]).tokens
    assert torch.equal(drawn, ar.sample(QUOTED, 3, [1, 2]).tokens) and not torch.equal(drawn, plain)
    stock = make_pipeline()
    peft.PeftModel.from_pretrained(stock.transformer, tmp_path / "dit")  # in place
    settings = dict(prior_token_ids=torch.arange(16)[None] % 8, latents=torch.randn(1, 16, 8, 8), height=64, width=64,
                    num_inference_steps=2, guidance_scale=1.0, output_type="latent")
    trained = ar.pipe("red", **settings).images
    assert (stock("red", **settings).images - trained).abs().max() < 1e-5
    trainer.lora.enabled = False
    assert (ar.pipe("red", **settings).images - trained).abs().max() > 0.01

@pytest.mark.parametrize("flags, message", [
    ("--kl-coef 0.01", "--kl_coef must be 0"), ("--decode-steps 1", "--decode_steps must be at least 2"),
    ("--model dit", "dit: is no adapter of grpo.py for the AR half")])
def test_settings_that_the_painter_refuses(refuse, flags, message):
    """A KL that does nothing, too few steps, an adapter of the DiT."""
    Path("dit").mkdir()
    Path("dit/adapter_config.json").write_text(json.dumps(dict(target_modules=flow.Painter.lora_layers)))
    assert message in refuse("flow", f"--decode-steps 4 {flags} --out refused")

def test_painter_learns(tmp_path):
    """A sign that is wrong in the log-prob or the step would make the latents smaller."""
    trainer = make_painting(tmp_path / "run", decode_steps=2, group_size=8, lr=0.03, max_grad_norm=1.0)
    before = make_rollout(trainer, 9)[0].tokens[:, -1].mean()
    for step in range(1, 9):
        trainer.train_step(*make_rollout(trainer, step))
    assert make_rollout(trainer, 9)[0].tokens[:, -1].mean() > before + 0.05
