"""Tests of examples/flow.py and halves.py, identities mostly, on a small GLM-Image of random weights, or the tiny one."""
import functools, json, os, runpy, shutil
from pathlib import Path

import diffusers, pytest, torch, transformers

import grpo
from conftest import ROOT, perturb
from examples import flow, halves
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

def make_dit(**settings):
    """64 wide and 128 high: 4 x 2 tokens after those of the draft. It explores, as with a trainer."""
    settings = dict(width=64, height=128, batch_size=2, steps=4, kl_coef=0.0, decode_steps=8) | settings
    dit = flow.DiT(grpo.GLMImageWrapper(make_pipeline(), grpo.Config(**tiny.SETTINGS | settings)))
    dit.config = dit.config
    return dit

def make_rollout(trainer, step=1):
    """What `train` hands to `train_step`, where the reward is the mean of the latents."""
    places, seeds = grpo.choose_prompts(step, len(QUOTED), trainer.config)
    rollout = trainer.wrapper.sample([QUOTED[i] for i in places], trainer.config.group_size, seeds)
    rewards = rollout.tokens[:, -1].double().mean((1, 2, 3))
    return rollout, grpo.compute_advantages(rewards, trainer.config.group_size)

def make_trainer(out, **settings):
    """A trainer of the DiT; its adapters do something."""
    dit = make_dit(**dict(out=str(out), max_grad_norm=1e9, height=64) | settings)
    trainer = grpo.GRPOTrainer(dit.config, dit, QUOTED)
    perturb(trainer.lora)
    return trainer

@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_dit_at_level_0_is_the_stock_pipeline(monkeypatch, guidance):
    """Other sigmas, times, conditions or noise than the pipeline's would train what nobody uses."""
    dit = make_dit(guidance=guidance)
    saved = dit.sample(QUOTED, 1, [1, 2]).tokens  # of the log's pictures, without noise
    monkeypatch.setattr(flow, "NOISE_LEVEL", 1e-7)
    quiet = dit.sample(QUOTED, 2, [1, 2]).tokens[::2]
    stock = make_pipeline()
    for i in range(2):
        expected = stock(
            QUOTED[i], prior_token_ids=stock._upsample_token_ids(saved[i], 4, 2), height=128, width=64,
            num_inference_steps=8, guidance_scale=guidance, output_type="latent",
            generator=torch.Generator().manual_seed(~(1 + i))).images
        assert (quiet[i, -1] - expected).abs().max() < 1e-5
    kept, pictures = [grpo.pil_to_tensor(dit.decode(QUOTED, tokens, [1, 2])) for tokens in (saved, quiet)]
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
    dit = make_dit(group_size=6)
    assert dit.config.micro_batch_size == 2  # of 16: batches end where groups do
    rollout = dit.sample(["red", "a blue thing", "red"], 3, [1, 2, 3])
    for group, codes in zip(rollout.tokens.split(3), rollout.allowed.split(3)):
        assert torch.equal(codes[0], codes[2]) and (group[0, 0] - group[2, 0]).abs().max() < 1e-5
        assert (group[0, 1] - group[2, 1]).abs().mean() > 0.1
    alone = dit.sample(["red"], 3, [3])
    assert torch.allclose(alone.tokens, rollout.tokens[6:], atol=1e-5) and alone.allowed.equal(rollout.allowed[6:])
    monkeypatch.setattr(dit, "paint", lambda *_: (torch.zeros(1), torch.zeros(1)))
    starts = [next(dit.sample_group("red", alone.allowed[:1, 1:], seed))[2][0, 0] for seed in range(12)]
    assert set(map(int, starts)) == {0, 1, 2}  # the window lies in the first half of 8 steps

def test_each_phase_asks_for_its_half(monkeypatch):
    """With offloading the weights of the other one are elsewhere. A second trainer's schedule was that of the first."""
    dit = make_dit(decode_steps=2)
    dit.config = make_dit(decode_steps=8).config
    assert len(dit.times) == 8 and dit.ar.config is dit.config
    asked = []
    monkeypatch.setattr(dit.ar, "move_to_gpu", lambda half: asked.append(half))
    rollout = dit.sample(QUOTED, 2, [1, 2])
    dit.decode(QUOTED, rollout.tokens, [1, 2])
    dit.compute_logprobs(rollout.part(slice(1)))
    assert set(asked[:-3]) == {dit.ar.ar} and set(asked[-3:]) == {dit.ar.dit}  # each token asks for its half

@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_sampler_and_trainer_agree_exactly(tmp_path, guidance):
    """The same steps, scored by another pass, schedule or level, would start off ratio 1. The gradient must reach all
    of the DiT's adapter, and not depend on the micro-batch."""
    trainer = make_trainer(tmp_path / "run", guidance=guidance)
    rollout, advantages = make_rollout(trainer)
    assert rollout.logprobs.std() > 0 and rollout.logprobs.abs().max() < 5  # a mean of pixels
    gradients = []
    trainer.optimizer.step = lambda: gradients.append([w.grad.clone() for w in trainer.lora.weights.values()])
    for trainer.config.micro_batch_size in (1, 2, 4):
        metrics = trainer.train_step(rollout, advantages)
    assert metrics["ratio_mean"] == 1 and metrics["sampler_gap"] == 0  # with 4, as they were sampled
    for one, *others in zip(*gradients):
        assert all((one - other).abs().max() < 1e-4 * one.abs().max() for other in others)

def test_the_kl_of_noisy_steps(tmp_path):
    """A brake of another scale, of the wrong pass as the reference, or without a gradient, stops nothing. Against the
    closed form, finite differences and what the trainer makes of it."""
    trainer = make_trainer(tmp_path / "run", kl_coef=1e3)
    rollout, advantages = make_rollout(trainer)
    part = rollout.part(slice(2))
    steps = []
    predict = trainer.wrapper.predict
    trainer.wrapper.predict = lambda *args: steps.append(predict(*args)) or steps[-1]
    trainer.lora.enabled = False
    with torch.no_grad():
        trainer.wrapper.compute_logprobs(part)
    trainer.lora.enabled = True

    def measure():
        return trainer.wrapper.compute_logprobs(part)[2]

    kl = measure()
    old, new = [[torch.distributions.Normal(mean, std) for mean, std in pair] for pair in (steps[:2], steps[2:])]
    exact = [torch.distributions.kl_divergence(a, b).mean((1, 2, 3)) for a, b in zip(new, old)]
    assert torch.allclose(kl, torch.stack(exact, dim=1), rtol=1e-3) and kl.min() > 1e-4
    kl.mean().backward()
    weights = [*trainer.lora.weights.values()]
    slope = torch.cat([weight.grad.flatten() for weight in weights]).norm()
    moved = []
    for way in (0.5, -1.0):
        for weight in weights:
            weight.data.add_(weight.grad, alpha=way * 1e-2 / slope.item())
        moved.append(measure().mean().item())
    assert (moved[0] - moved[1]) / 1e-2 == pytest.approx(slope.item(), rel=0.01)
    kls = [trainer.train_step(rollout, 0 * advantages)["kl"] for _ in range(4)]
    assert kls == sorted(kls, reverse=True) and kls[0] > 1.1 * kls[-1]

def test_dit_learns(tmp_path):
    """A sign that is wrong in the log-prob or the step would make the latents smaller."""
    trainer = make_trainer(tmp_path / "run", decode_steps=2, group_size=8, lr=0.03, max_grad_norm=1.0)
    before = make_rollout(trainer, 9)[0].tokens[:, -1].mean()
    for step in range(1, 9):
        trainer.train_step(*make_rollout(trainer, step))
    assert make_rollout(trainer, 9)[0].tokens[:, -1].mean() > before + 0.05

# --- Both halves --------------------------------------------------------------
@functools.cache
def load_tiny():
    return grpo.GLMImageWrapper.from_pretrained(grpo.TINY_MODEL, grpo.Config())

def make_run(half, **settings):
    """`run`, as a training of this half leaves it, whose --model is no more where it was. Both adapters do something."""
    wrapper = load_tiny()
    loras = dict(AR=grpo.LoRA(wrapper.policy, halves.AR_LAYERS, 4),
                 DiT=grpo.LoRA(wrapper.pipe.transformer, halves.DIT_LAYERS, 4))
    own = loras.pop(half)
    other, = loras.values()
    os.mkdir("run")
    own.save(Path("run/adapter_00003"), "/away")  # an older one
    perturb(own)
    perturb(other)
    own.save(Path("run/adapter_100000"), "/away")
    other.save(Path("run/frozen"), grpo.TINY_MODEL)
    own.enabled = other.enabled = False
    file = dict(AR="halves.py", DiT="flow.py")[half]
    settings = dict(width=64, height=96, decode_steps=3) | settings
    config = grpo.Config(model="/away", kl_coef=0.0, wrapper=f"{ROOT}/examples/{file}:{half}", **settings)
    Path("run/config.json").write_text(json.dumps(vars(config)))

DRAWING = dict(width=(96, 160), height=(160, 96), temperature=(0.7, 1.3), top_k=(3, 0), top_p=(0.5, 0.9),
               decode_steps=(3, 30), guidance=(2.5, 1.0))

@pytest.mark.parametrize("name", DRAWING)
@pytest.mark.parametrize("half, other", [("AR", "flow.py:DiT"), ("DiT", "halves.py:AR")])
def test_settings_of_the_run_arrive(run, monkeypatch, half, other, name):
    """A half would be trained on other tokens than those that the run draws. What is typed counts."""
    value, typed = DRAWING[name]
    make_run(half, **{name: value})
    given = []
    monkeypatch.setattr(grpo, "main", lambda **defaults: given.append(grpo.parse_args(**defaults)))
    for model in ("run", "run/adapter_00003"):
        run("flow", f"--model {model}")
    run("flow", f"--model=run --{name} {typed}")
    assert [getattr(config, name) for config in given] == [value, value, typed]
    assert given[0].wrapper == f"{ROOT}/examples/{other}"
    assert given[0].lr == (0.002 if half == "DiT" else grpo.Config.lr)  # the tiny model's own is for its AR half

ROUNDS = dict(dit="ar", ar2="dit", dit2="ar2")  # and the run over which each is trained

def test_each_round_begins_with_the_pictures_of_the_last(run, monkeypatch):
    """Other tokens, an adapter that is not attached, or settings that do not arrive change a picture. A run that is
    resumed in a folder that has moved, in which none of its paths hold, goes on as if nothing had happened."""
    monkeypatch.setattr(transformers.GlmImageProcessor, "_get_target_shape",
                        lambda self, height, width: (height // 32, width // 32, 2, 2))
    make_pipeline().save_pretrained("base")
    Path("words.txt").write_text("red\nblue\n")
    settings = f"--prompts {Path('words.txt').absolute()} --batch-size 2 --group-size 4 --lr 0.01 --warmup-steps 0"
    settings += f" --reward {ROOT}/examples/rewards.py:sharpness --save-every 1"
    drawing = "--width 96 --height 128 --temperature 3 --top-k 9 --top-p 0.98 --decode-steps 3 --guidance 1.5 --model ../base"
    os.mkdir("here")
    os.chdir("here")
    assert run("grpo", f"{settings} {drawing} --steps 2 --out ar")[0] == 0
    for name, model in ROUNDS.items():
        for typed in (f"--steps 2 --out {name}", f"--steps 1 --out half_{name}"):
            code, _, error = run("flow", f"{settings} --model {model} {typed}")
            assert code == 0, error
    run("generate", "dit2 --prompt red --samples 2 --out drawn")
    os.chdir("..")
    os.rename("here", "there")
    folder = Path("there")
    pictures = [[(folder / name / f"samples_{step:05}.png").read_bytes() for step in (0, 2)]
                for name in ("ar", *ROUNDS)]
    assert all(first != last for first, last in pictures)
    assert [last for _, last in pictures[:-1]] == [first for first, _ in pictures[1:]]
    shutil.rmtree("there/ar/adapter_00002")  # as if this run had gone on; dit has a copy
    for name, typed in zip(ROUNDS, ("flow --model there/ar --out there/half_dit", "grpo", "grpo")):
        program, _, flags = typed.partition(" ")
        assert run(program, f"{flags} --resume there/half_{name} --steps 2")[0] == 0
        for file in ("adapter_00002/adapter_model.safetensors", "samples_00002.png"):
            assert (folder / name / file).read_bytes() == (folder / f"half_{name}" / file).read_bytes(), name
    run("generate", "there/dit2 --prompt red --samples 2 --out drawn")
    first, second = [Path("drawn", f"000_{i}.png").read_bytes() for i in range(2)]
    assert first != second  # their tokens differ, as no trainer draws them
    assert [first, second] == [(folder / f"drawn/000_{i}.png").read_bytes() for i in range(2)]
    code, out, error = run("evaluate", "there/ar there/dit there/ar2 there/dit2 --prompts words.txt --samples 2")
    assert code == 0 and out.count("there/dit2, step 2") == 3 and "codes differ" in out, error

@pytest.mark.parametrize("half", ["AR", "DiT"])
def test_the_stock_pipeline_draws_the_same(run, monkeypatch, half):
    """With both adapters, loaded by peft as draw.py has it. Of the likeliest codes alone, no random number decides."""
    make_run(half, top_k=1, guidance=1.5)
    monkeypatch.setenv("RUN", os.path.abspath("elsewhere"))  # of a shell; only trainers keep a copy there
    assert run("generate", "run --prompt red --samples 1 --out drawn")[0] == 0
    assert run("halves", "run --out pair")[0] == 0 and not Path("elsewhere").exists()
    assert json.loads(Path("pair/dit/adapter_config.json").read_text())["base_model_name_or_path"] == grpo.TINY_MODEL
    stock = runpy.run_path("pair/draw.py")
    generator = torch.Generator().manual_seed(~0)
    images = [grpo.open_image("drawn/000_0.png"), grpo.open_image("fox.png"),
              *stock["pipe"]("red", generator=generator, **stock["settings"]).images]
    ours, fox, theirs = 255 * grpo.pil_to_tensor(images)
    assert (ours - theirs).abs().max() <= 2
    assert (ours - fox).abs().max() > 2

def test_an_adapter_under_an_adapter(tmp_path):
    """Without the runs in which they were made. Of two for one half, the upper one counts."""
    below = "hub/model"
    for name, layers in zip("abcd", [halves.AR_LAYERS, halves.DIT_LAYERS] * 2):
        (tmp_path / name).mkdir()
        config = dict(target_modules=layers, r=4, base_model_name_or_path=below)
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        below = str(tmp_path / name)
    found = halves.find_halves(below)
    assert found == ("hub/model", {halves.AR_LAYERS: tmp_path / "c", halves.DIT_LAYERS: tmp_path / "d"}, {})
    assert [*found.adapters] == [halves.AR_LAYERS, halves.DIT_LAYERS]

@pytest.mark.parametrize("flags, message", [
    ("--decode-steps 1", "--decode_steps must be at least 2"),
    ("--model edits", "has an adapter of another wrapper"), ("--model edits/adapter_00003", "of another wrapper"),
    ("--model toy", "toy: must be a model"), ("--model run", "its last step, 100007, has no adapter")])
def test_what_is_refused(refuse, flags, message):
    """Too few steps, a run that edits, an adapter of neither half; of a run that was stopped between two adapters, the
    older one would be taken for what it draws with."""
    make_run("AR")
    shutil.copytree("run", "edits")
    file = Path("edits/config.json")
    file.write_text(file.read_text().replace("halves.py:AR", "edit.py:EditWrapper"))
    os.mkdir("toy")
    Path("toy/adapter_config.json").write_text(json.dumps(dict(target_modules="[13]")))
    torch.save(dict(step=100_007, adapter={"A": torch.ones(2)}), "run/checkpoint.pt")
    assert message in refuse("flow", f"--decode-steps 4 {flags} --out refused")
