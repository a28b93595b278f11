"""Tests of examples/flow.py: identities, on a small GLM-Image of random weights."""
import re, shutil
from pathlib import Path

import diffusers, peft, pytest, torch

import grpo
from conftest import ROOT, perturb
from examples import flow, runs
from examples.make import tiny

PROMPTS = [grpo.Prompt('a red fox that says "STOP HERE"', target="a.png"), grpo.Prompt("yellow", target="b.png")]
pytestmark = pytest.mark.usefixtures("small_draft")

def make_pipeline():
    """Random weights, with a scale of latents and sigmas that depend on the size of the image, as in GLM-Image."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS)
    pipe.vae.register_to_config(latents_mean=[0.5] * 16, latents_std=[2.0] * 16)
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, time_shift_type="linear", base_shift=0.25, max_shift=0.75)
    return pipe

def make_trainer(**settings):
    settings = dict(width=64, height=128, batch_size=2, kl_coef=0.0, decode_steps=8) | settings
    dit = flow.DiT(grpo.GLMImageWrapper(make_pipeline(), grpo.Config(**tiny.SETTINGS | settings)))
    dit.config = dit.ar.config
    trainer = grpo.GRPOTrainer(dit.config, dit, PROMPTS)
    perturb(trainer.lora)
    return trainer

@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_dit_at_level_0_is_the_stock_pipeline(monkeypatch, guidance):
    """Other sigmas, times, conditions or noise would train what nobody uses. The log and programs use the pipeline."""
    dit = make_trainer(guidance=guidance).wrapper
    codes = dit.sample(PROMPTS, 1, [1, 2]).tokens
    monkeypatch.setattr(flow, "NOISE_LEVEL", 1e-7)
    quiet = dit.sample(PROMPTS, 3, [1, 2]).tokens[1::3]
    for i in range(2):
        expected = dit.pipe(
            PROMPTS[i], prior_token_ids=dit.pipe._upsample_token_ids(codes[i, -8:], 4, 2), height=128, width=64,
            num_inference_steps=8, guidance_scale=guidance, output_type="latent",
            generator=torch.Generator().manual_seed(~(1 + i))).images
        assert (quiet[i, -1] - expected).abs().max() < 1e-5
    stock, ours = [grpo.pil_to_tensor(dit.decode(PROMPTS, tokens, [1, 2])) for tokens in (codes, quiet)]
    assert (ours - stock).abs().max() < 1.5 / 255
    dit.explores = False  # no trainer has set a config
    assert torch.equal(dit.sample(PROMPTS, 3, [1, 2]).tokens, dit.ar.sample(PROMPTS, 3, [1, 2]).tokens)

@pytest.mark.parametrize("sigma", [0.9, 0.5, 0.1])
def test_noise_and_drift_make_up_for_each_other(sigma):
    """Latents keep the distribution that the DiT knows. Of one image, 3, it is that of 3 (1 - sigma) + sigma noise."""
    noise = torch.tensor([0.0, 1.0], dtype=torch.float64)
    mean, std = flow.denoise(3 * (1 - sigma) + sigma * noise, noise - 3, sigma, sigma - 1e-4, noise_level=0.7)
    still, moved = mean.tolist()
    assert still == pytest.approx(3 * (1 - sigma + 1e-4), abs=1e-12) and std > 1e-3
    assert (moved - still) ** 2 + std**2 == pytest.approx((sigma - 1e-4) ** 2, abs=1e-6)

def test_what_a_group_of_paintings_shares():
    """Rewards differ by painting alone. All chance is in the group's seed, also where the window starts."""
    dit = make_trainer(group_size=6).wrapper
    assert dit.config.micro_batch_size == 2  # of 32: batches end where groups do
    rollout = dit.sample([*PROMPTS, PROMPTS[1]], 3, [1, 2, 3])
    assert [Path(prompt.target).name for prompt in rollout.prompts] == ["a.png"] * 3 + ["b.png"] * 6
    for group, given in zip(rollout.tokens.split(3), rollout.allowed.split(3)):
        assert torch.equal(given[0], given[2]) and (group[0, 0] - group[2, 0]).abs().max() < 1e-5
        assert (group[0, 1] - group[2, 1]).abs().mean() > 0.1
    dit.references["a step"] = "its means"
    alone = dit.sample(PROMPTS[1:], 3, [3])
    assert torch.allclose(alone.tokens, rollout.tokens[6:], atol=1e-5) and alone.allowed.equal(rollout.allowed[6:])
    assert {*dit.sample(PROMPTS * 6, 2, range(12)).allowed[:, 0].tolist()} == {0, 1, 2} and not dit.references

@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_sampler_trainer_and_reference(guidance):
    """The ratio begins at 1. Log-probs and KL are those of the Gaussians, the KL to the model without adapter."""
    trainer = make_trainer(guidance=guidance, kl_coef=1e3)
    rollout = trainer.wrapper.sample(PROMPTS, 4, [1, 2])
    steps = []
    predict = trainer.wrapper.predict
    trainer.wrapper.predict = lambda *args: steps.append(torch.distributions.Normal(*predict(*args))) or predict(*args)
    trainer.optimizer.step = lambda: None
    trainer.config.micro_batch_size = 4
    metrics = trainer.train_step(rollout, rollout.tokens[:, -1].mean((1, 2, 3)))
    assert metrics["ratio_mean"] == 1 and metrics["sampler_gap"] == 0
    exact = sum([torch.distributions.kl_divergence(new, ref).mean().item() for ref, new in zip(steps[:4], steps[4:])])
    assert metrics["kl"] == pytest.approx(exact / 4, rel=1e-4) and exact > 1e-4  # of two steps of two groups
    assert trainer.wrapper.compute_logprobs(rollout.part(slice(4)))[2].requires_grad
    expected = [steps[4 + k].log_prob(rollout.tokens[:4, k + 1]).mean((1, 2, 3)) for k in range(2)]
    assert torch.allclose(rollout.logprobs[:4], torch.stack(expected, 1), atol=1e-6)

def test_each_round_begins_with_the_pictures_of_the_last(run, monkeypatch):
    """A run that is resumed or drawn from knows by its folder what lies below it. With top-k 1, the stock pipeline draws
    the same by peft."""
    rounds = dict(ar="--model base --width 96 --height 128 --temperature 3 --top-k 9 --decode-steps 3 --guidance 1.5",
                  dit=f"--wrapper {ROOT}/examples/flow.py:DiT --model ar --kl-coef 0.1",
                  ar2=f"--wrapper {ROOT}/examples/flow.py:AR --model dit",
                  dit2=f"--wrapper {ROOT}/examples/flow.py:DiT --model ar2/adapter_00002")
    make_pipeline().save_pretrained("base")
    Path("two.txt").write_text("red\nblue\n")
    for name, flags in rounds.items():
        grpo.main(f"{flags} --prompts two.txt --batch-size 2 --lr 0.03 --warmup-steps 0 --steps 1 --out {name}".split())
        grpo.main(f"--resume {name} --steps 2".split())
    pictures = [[Path(name, f"samples_{step:05}.png").read_bytes() for step in (0, 2)] for name in rounds]
    assert all(first != last for first, last in pictures)
    assert [last for _, last in pictures[:-1]] == [first for first, _ in pictures[1:]]
    for name, wanted in (("ar2", "AR, as it was trained over /.*/dit/adapter_00002"), ("dit", "DiT")):
        shutil.copytree(f"{name}/adapter_00002", f"alone/{name}")
        assert re.search(f"type --wrapper.* examples/flow.py:{wanted}$", run("generate", f"alone/{name} --prompt red")[2])
    monkeypatch.chdir("ar")
    opened = runs.open_run("../dit2", top_k=1)
    wrapper = opened.Wrapper.from_pretrained(opened.config.model, opened.config)
    runs.load_adapter(wrapper, opened.adapters[2])
    pipe = diffusers.GlmImagePipeline.from_pretrained("../base")
    pipe.vision_language_encoder.generation_config.update(temperature=3.0, top_k=1)
    draw = lambda: pipe("red", height=128, width=96, num_inference_steps=3, guidance_scale=1.5,
                        generator=torch.Generator().manual_seed(~5)).images
    images = [*next(runs.draw(wrapper, [grpo.Prompt("red")], 1, [5])), *draw()]
    pipe.vision_language_encoder.load_adapter("../ar2/adapter_00002")
    peft.PeftModel.from_pretrained(pipe.transformer, "../dit2/adapter_00002")  # in place
    ours, plain, theirs = 255 * grpo.pil_to_tensor([*images, *draw()])
    assert (ours - theirs).abs().max() <= 2 < 9 < (ours - plain).abs().max()
