"""Tests of grpo.py, in its order: identities, mostly, on small models. No network, no GPU."""
import json, math, os, pickle, re, shutil, subprocess, sys, warnings
from pathlib import Path
from unittest import mock

# The tests compare with tensors on the CPU, and start processes by forking: CUDA survives neither.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import diffusers, pytest, torch
import numpy as np
from PIL import Image
from pytest import approx
from safetensors.torch import save_file

import grpo
from examples.make import tiny as make_tiny
from examples.toy import Toy

# A library that renames an argument warns first, and that is a failing test here.
pytestmark = [pytest.mark.filterwarnings("error::FutureWarning"),
              pytest.mark.filterwarnings("error::DeprecationWarning")]

# Tests that pin the published algorithm: `pytest -m "not algorithm"` leaves them out.
warnings.filterwarnings("ignore", "Unknown pytest.mark.algorithm")
algorithm = pytest.mark.algorithm

torch.set_num_threads(1)  # two would wait for each other where the machine does other work
HERE = Path(__file__).parent

# --- What the tests are made of -------------------------------------------------------------------
def make_config(**settings):
    """64 wide and 128 high, which is not square, and a temperature that is not 1."""
    own = dict(
        model="small", width=64, height=128, temperature=0.9, decode_steps=1, guidance=1.0,
        batch_size=2, steps=3, save_every=2, lr=2e-3, warmup_steps=0)
    return grpo.Config(**own | settings)

def make_pipe():
    """The small GLM-Image with random weights, and more entropy than it comes with."""
    torch.manual_seed(0)
    pipe = make_tiny.make_models(grpo.COLORS)
    torch.nn.init.ones_(pipe.vision_language_encoder.model.language_model.norm.weight)
    return pipe

def make_wrapper(dtype=torch.float32, config=None, **settings):
    """Its draft has 2 x 1 tokens, not 22 x 11: quick, and rows could not pass for columns."""
    pipe = make_pipe()
    pipe.vision_language_encoder.to(dtype)
    pipe.processor._get_target_shape = lambda height, width: (
        height // 32, width // 32, height // 64, width // 64)
    return grpo.GLMImageWrapper(pipe, config or make_config(**settings))

def perturb(lora):
    """Adapters that do something: B starts at 0."""
    torch.manual_seed(5)
    for weight in lora.weights.values():
        weight.data.add_(0.1 * torch.randn_like(weight))
    return lora

def make_trainer(out, rewards=None, wrapper=None, **settings):
    """Two of three prompts x 4 images a step. If the folder has a run, it goes on with that."""
    own = dict(out=str(out))
    if (out / "checkpoint.pt").exists():
        own = json.loads((out / "config.json").read_text()) | dict(resume=str(out))
    config = make_config(**own | settings)
    prompts = ["a red fox", "some yellow thing here", "green"]
    return grpo.GRPOTrainer(config, wrapper or make_wrapper(config=config), prompts, rewards)

def make_toy():
    """A wrapper that is done in no time."""
    return Toy.from_pretrained("toy", make_config())

def roll(wrapper):
    """A Rollout: two groups of three samples, of prompts of which one is padded."""
    return wrapper.sample(["a red fox on a wall", "yellow"], 3, seeds=[1, 2])

ADVANTAGES = torch.tensor([1.2, -0.4, -0.8, -1.2, 0.4, 0.8])  # of such a rollout

def gradient_of(lora):
    """All of it, in one vector."""
    return torch.cat([weight.grad.flatten() for weight in lora.weights.values()])

def blank(n):
    """Images and prompts for rewards that do not look at them."""
    return [Image.new("RGB", (8, 8)) for _ in range(n)], [f"prompt {i}" for i in range(n)]

def read_files(folder):
    """-> {name: bytes}, without what Python keeps of a module."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

def rows_of(out):
    """metrics.jsonl without what the clock says."""
    return [json.loads(line) | dict(seconds=0) for line in open(out / "metrics.jsonl")]

def assert_same_run(one, other):
    """Every file of two runs, bit for bit, but for seconds and settings without an effect."""
    runs = []
    for out in (one, other):
        files = read_files(out)
        state = torch.load(out / "checkpoint.pt")
        files["checkpoint.pt"] = json.dumps(state, default=torch.Tensor.tolist)
        files["metrics.jsonl"] = rows_of(out)
        files["config.json"] = json.loads(files["config.json"]) | dict(offload=None)
        runs.append(files)
    assert runs[0].keys() == runs[1].keys()
    assert [name for name in runs[0] if runs[0][name] != runs[1][name]] == []

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of three steps with two updates each."""
    trainer = make_trainer(tmp_path_factory.mktemp("finished") / "run", num_iterations=2)
    trainer.train()
    return trainer.out

@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A test in tmp_path, after which all that it imports is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with mock.patch.dict(sys.modules), mock.patch.dict(os.environ):
        yield

@pytest.fixture
def command(modules, capsys):
    """command("--steps 2"): `python grpo.py` in tmp_path -> what ended it, or 0, and its stdout."""
    def run(flags):
        capsys.readouterr()
        try:
            code = grpo.main(flags.split()) or 0
        except SystemExit as stop:
            code = stop.code
        out, error = capsys.readouterr()
        return error.splitlines()[-1] if code == 2 else code, out  # which argparse has printed

    return run

# Flags of a quick run, for `command`: three steps of the toy, which is done in no time.
TOY = f"--wrapper {HERE}/examples/toy.py:Toy --steps 3 --batch-size 2 --group-size 4 "

# --- The maths ------------------------------------------------------------------------------------
def test_no_chance_falls_out_of_the_nucleus():
    """Chance 0 would draw code 0, and one next to 1 a code behind the last, as sums round."""
    probs = torch.tensor([[0.0, 0.25, 0.74, 0.0]]).repeat(5, 1)  # their sum is far from 1 here
    chances = torch.tensor([0.0, 0.2, 0.3, 0.9, 1 - 2**-24])
    codes = grpo.sample_codes(probs.log(), chances[:, None])
    assert codes.flatten().tolist() == [1, 1, 2, 2, 2]

@algorithm
def test_advantages_by_hand():
    """In fp32 1e8 + 0.25 is 1e8; and the mean of 13 equal numbers is another, over a tiny std."""
    groups = np.array([[1, 2, 3, 4, 10, 14], [7, 6, 5, -1, 0, 0], [0, 0, 0, 0, 0, 1e-5]])
    groups = np.concatenate([groups, groups[:1] / 4 + 1e8])
    means = groups.mean(1, keepdims=True)
    stds = groups.std(1, ddof=1, keepdims=True)
    by_hand = (groups - means) / (stds + 1e-6)
    advantages = grpo.compute_advantages(groups.flatten(), 6)
    assert advantages.dtype == torch.float32
    assert advantages.numpy() == approx(by_hand.flatten(), rel=1e-4, abs=1e-6)
    for reward in (0.3, -7.7, 1e8 + 0.3):
        assert not grpo.compute_advantages([reward] * 13, 13).any()  # their mean is not exact

@algorithm
def test_a_ratio_beyond_all_measure_gives_no_nan():
    """exp(100) is infinite in fp32, and infinity times 0 is NaN."""
    new = torch.tensor([[100.0, -100.0, 0.5]] * 3, requires_grad=True)
    loss, _ = grpo.compute_grpo_loss(new, torch.zeros(3, 3), torch.tensor([1.0, -1.0, 0.0]))
    loss.backward()
    assert loss.isfinite() and new.grad.isfinite().all()

@algorithm
@pytest.mark.parametrize("delta, kl", [
    (0.0, 0.0), (1.0, math.e - 2), (-2.0, math.exp(-2) + 1), (-1000.0, 999.0),
    (1e-5, 5e-11),  # exp(delta) - delta - 1 rounds to 0
    (1000.0, math.exp(20) - 21)])  # clamped at 20: exp(1000) is inf, and so the loss of the batch
def test_k3_by_hand_and_at_the_extremes(delta, kl):
    """Guards the sign of ref - new, in the value and in the gradient, and the KL's weight."""
    new = torch.zeros(1, 1, requires_grad=True)
    ref = torch.tensor([[delta]])
    loss, metrics = grpo.compute_grpo_loss(new, new, torch.ones(1), 0.2, ref, kl_coef=0.5)
    gradient, = torch.autograd.grad(loss, new)
    slope = 1 - math.exp(delta) if delta < 20 else 0
    assert gradient.item() + 1 == approx(0.5 * slope, rel=0.01, abs=1e-7)
    assert metrics["kl"] == approx(kl, rel=0.02 if delta == 1e-5 else 1e-5)
    assert metrics["loss"] == loss.item() == approx(0.5 * metrics["kl"] - 1)
    assert metrics["policy_loss"] == -1  # `loss += kl` put the KL into it

@algorithm
def test_gradient_at_the_old_policy_is_reinforce():
    """Why a loss of 0 still learns; and only `new` carries a gradient."""
    new, ref = torch.randn(2, 6, 5, requires_grad=True)
    advantages = grpo.compute_advantages(torch.rand(6), 3).requires_grad_()
    loss, _ = grpo.compute_grpo_loss(new, new, advantages, ref_logprobs=ref, kl_coef=0.0)
    ours, *others = torch.autograd.grad(loss, [new, ref, advantages], allow_unused=True)
    by_hand, = torch.autograd.grad(-(advantages[:, None] * new).mean(), new)
    assert abs(loss.item()) < 1e-6
    assert others == [None, None]
    assert ours.any() and torch.allclose(ours, by_hand, atol=1e-7)

@algorithm
@pytest.mark.parametrize("shape", [(70,), (1,), (60, 90), (70, 1)])
def test_the_loss_is_that_of_the_formula(shape):
    """The smaller surrogate of each log-prob counts. One log-prob and advantage of each sample were
    a table [N, N] once; advantages of other samples, or turned ones [T, N], are an error."""
    new, old, ref = torch.randn(3, *shape, dtype=torch.float64)
    for A in (torch.randn(shape[0]).double(), torch.randn(shape).double()):
        a = A if A.shape == shape else torch.stack([A] * shape[1], dim=1)
        x, y = new.clone().requires_grad_(), new.clone().requires_grad_()
        loss, metrics = grpo.compute_grpo_loss(x, old, A, 0.3, ref, kl_coef=0.7)
        free, clipped = (y - old).exp() * a, (y - old).exp().clamp(0.7, 1.3) * a
        kl = ((ref - y).exp() - (ref - y) - 1).mean()
        by_hand = 0.7 * kl - torch.where(free < clipped, free, clipped).mean()
        gradients = [torch.autograd.grad(total, z)[0] for total, z in ((loss, x), (by_hand, y))]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-12)
        values = by_hand.item(), kl.item(), (clipped < free).double().mean().item()
        assert (metrics["loss"], metrics["kl"], metrics["clip_frac"]) == approx(values)
    for wrong in (shape[::-1], (shape[0] - 1,), (shape[0] + 1,), (1,), (1, *shape), (*shape, 1)):
        if wrong not in (shape, shape[:1]):
            with pytest.raises(AssertionError, match="Size"):
                grpo.compute_grpo_loss(new, old, torch.ones(wrong))

@pytest.mark.parametrize("color, prompt, reward", [
    ("red", "A RED thing", 1), ("red", "a blue thing", 1 / 3),
    ("green", "a green wall of red bricks", 1), ("purple", "a tired, reddish purple", 1)])
def test_color_reward_is_of_the_mean_and_of_the_first_whole_word(color, prompt, reward):
    """"tired" is no red; and a prompt without a color is no zero."""
    image = Image.new("RGB", (4, 4), color)
    assert grpo.reward_color([image], [prompt])[0] == approx(reward)
    assert grpo.reward_color([Image.linear_gradient("L")], ["white"])[0] == approx(0.5)
    with pytest.raises(grpo.BadInput, match="color: .*'a tired fox'"):
        grpo.reward_color([image] * 2, [prompt, "a tired fox"])

@pytest.mark.parametrize("values", [
    [0.5, -math.inf], [math.nan, 1], [], [0.5] * 3, [None, 1], None, 0.5, ["1", "2"],
    {"a": 1, "b": 2}, [[1, 2]], torch.ones(2, 1), [10**400, 1]])
def test_a_reward_without_a_finite_number_for_each_image_is_named(values):
    """A column [N, 1] plus an [N], for one, would be broadcast to [N, N]."""
    rewards = {"fine": (lambda *_: [1, 2], 1.0), "broken": (lambda *_: values, 0.0)}
    with pytest.raises(grpo.BadInput, match="--reward broken: .* 2 finite numbers, and gave "):
        grpo.compute_rewards(*blank(2), rewards)

def test_each_reward_gets_copies_of_its_own_and_no_graph(tmp_path):
    """One that sorts its prompts or draws on its targets changes nothing for others."""
    Image.new("L", (8, 8), 255).save(tmp_path / "t.png")
    given = blank(2)[0], [grpo.Prompt("b", tmp_path / "t.png"), "a"]
    seen = []
    def spoil(images, prompts, targets):
        colors = [image.getpixel((0, 0)) for image in (images[0], targets[0])]
        seen.append((*colors, *prompts))
        images[0].paste("red", (0, 0, 8, 8))
        targets[0].paste("red", (0, 0, 8, 8))
        prompts.sort()
        targets.clear()
        return [torch.is_grad_enabled(), 0.0]

    rewards = {"x": (spoil, 1.0), "y": (spoil, 1.0), "z": (lambda *_: np.float16([1, 2]), -0.5)}
    for _ in range(2):  # and the next step meets the same
        total, metrics = grpo.compute_rewards(*given, rewards)
    assert seen == [((0, 0, 0), (255, 255, 255), "b", "a")] * 4
    assert (total.dtype, total.tolist()) == (torch.float64, [-0.5, -1])
    assert metrics == {"reward/x": 0, "reward/y": 0, "reward/z": 1.5, "reward": -0.75}

# --- LoRA -----------------------------------------------------------------------------------------
def make_lora(*names, rank=4):
    """Adapters that do something, of a model that has a linear layer for each name."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in names})
    return model, perturb(grpo.LoRA(model, "[ab]", rank))

def test_lora_by_hand(monkeypatch):
    """Twice B A x, 0 at first, A as peft draws it; the last LoRA of a model; plain layers alone."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "ab": torch.nn.Linear(3, 2)})
    x = torch.randn(5, 3)
    base = model["a"](x)
    lora = grpo.LoRA(model, "a", rank=4)  # "ab" is no "a"
    assert torch.equal(model["a"](x), base)
    A, B = lora.weights.values()
    assert not B.any()
    assert A.abs().max() <= 3 ** -0.5 < 5 * A.std()  # uniform
    perturb(lora)
    trained = base + 2 * (x @ A.T) @ B.T
    assert torch.allclose(model["a"](x), trained)
    assert torch.allclose(model["a"](x[0]), trained[0])
    assert model["a"](x[:0]).shape == (0, 2)  # an expert without a token
    with monkeypatch.context() as patch:
        patch.setattr(grpo.LoRALinear, "enabled", False)
        assert torch.equal(model["a"](x), base)
        model["a"].enabled = True  # there is one switch for all
        assert torch.equal(model["a"](x), base)
    model["a"].enabled = False
    assert torch.allclose(model["a"](x), trained)
    grpo.LoRA(model, "ab", rank=4)
    assert torch.equal(model["a"](x), base)

@pytest.mark.parametrize("step", [5e-5, 2e-4])
@pytest.mark.parametrize("width, out, bias, rows", [
    (4096, 4096, True, 4), (4096, 512, True, 300), (13696, 4096, False, 64),
    (2048, 5632, False, 1)])
def test_small_updates_are_not_swallowed_in_bf16(step, width, out, bias, rows):
    """In layers of GLM-Image and Janus. With two roundings most of an update would do nothing."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, out, bias, dtype=torch.bfloat16))
    A, B = grpo.LoRA(model, "0", rank=32).weights.values()
    x = torch.randn(rows, width).bfloat16()
    with torch.no_grad():
        base = model(x)
        B.copy_(step * torch.randn_like(B).sign())
        change = (model(x) - base).float()
    truth = 2 * x.float() @ A.bfloat16().float().T @ B.bfloat16().float().T
    slope = (change * truth).sum() / truth.square().sum()
    error = ((change - truth).square().mean() / truth.square().sum()).sqrt()
    assert abs(slope - 1) < 0.05 + 3 * error, f"{slope:.3f} +- {error:.3f}"
    assert error < 0.06

def test_saved_adapters_are_loaded_as_they_were(tmp_path):
    """In place, and in fp32. Those of other layers, ranks or peft's own alpha are refused."""
    _, lora = make_lora("a", "b")
    lora.save(tmp_path, "some/model")
    halved = {name: weight.bfloat16() for name, weight in lora.weights.items()}
    save_file(halved, tmp_path / "adapter_model.safetensors")
    places = [weight.data_ptr() for weight in lora.weights.values()]
    lora.load(lora.read(tmp_path))
    assert [weight.data_ptr() for weight in lora.weights.values()] == places
    saved = {name: weight.float() for name, weight in halved.items()}
    torch.testing.assert_close(lora.weights, saved, rtol=0, atol=0)
    for other in (make_lora("a")[1], make_lora("b", "a", rank=8)[1]):
        with pytest.raises((grpo.BadInput, RuntimeError), match="other layers|size"):
            other.load(lora.weights)
    one_row = {name: weight[:1] for name, weight in lora.weights.items()}
    with pytest.raises(RuntimeError, match="size"):  # it would be broadcast
        lora.load(one_row)
    path = tmp_path / "adapter_config.json"
    for setting in (dict(lora_alpha=4), dict(use_dora=True), dict(target_modules="a"), dict(r=9)):
        path.write_text(json.dumps(lora.config | setting))
        with pytest.raises(grpo.BadInput, match=f"needs --lora-rank {setting.get('r', 4)}, this"):
            lora.read(tmp_path)

@algorithm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapters_train(dtype):
    """All else is frozen; they are fp32, as in bf16 0.02 plus a step of 5e-5 is 0.02."""
    wrapper = make_wrapper(dtype, top_p=0.6)
    lora = perturb(grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank=4))
    logprobs, entropy = wrapper.compute_logprobs(roll(wrapper))
    assert entropy.isfinite().all()  # 0 * log 0 outside the nucleus
    assert not entropy.requires_grad
    logprobs.sum().backward()
    assert len(lora.weights) == 6 * 2  # A and B of q, k, v, o, gate_up, down in one layer
    for weight in lora.weights.values():
        assert weight.dtype == weight.grad.dtype == torch.float32
        assert weight.grad.isfinite().all() and weight.grad.any()
    trained = [weight for half in (wrapper.policy, wrapper.dit) for weight in half.parameters()
               if weight.requires_grad]
    assert {*trained} == {*lora.weights.values()}

# --- The trainer: which prompts, how it begins, an update -----------------------------------------
def choose(step, gpus=1, **settings):
    """The turns of a step on all its GPUs -> [(seed, index of the prompt)], of 8 prompts."""
    config = make_config(**dict(batch_size=6) | settings)
    turns = []
    for rank in range(gpus):
        with mock.patch.multiple(grpo, RANK=rank, WORLD_SIZE=gpus):
            indices, seeds = grpo.choose_prompts(step, 8, config)
        turns += zip(seeds, indices, strict=True)
    return sorted(turns)

def test_prompts_go_round_in_laps_that_follow_from_seed_and_step():
    """Each prompt comes once a lap, on any number of GPUs, and no state can be lost."""
    turns = [turn for step in range(1, 29) for turn in choose(step)]  # 168
    assert turns[18:24] == choose(4) == choose(4, gpus=2) == choose(4, gpus=3)
    assert turns[20:40] == choose(2, batch_size=20)  # also where there are fewer prompts
    indices = [index for _, index in turns]
    laps = [tuple(indices[i:i + 8]) for i in range(0, 168, 8)]
    assert [sorted(lap) for lap in laps] == [list(range(8))] * 21
    assert len(set(laps)) == 21
    assert [index for _, index in choose(1, seed=1)] != indices[:6]
    # No seed is used twice, by runs of other --seeds or for the saved pictures.
    seeds = [*range(8), *[turn[0] for seed in range(6) for step in range(1, 101)
                          for turn in choose(step, seed=seed)]]
    assert len({*seeds}) == 8 + 6 * 100 * 6

def test_an_older_trainer_of_a_model_stops(tmp_path):
    """Its adapters are no longer in the model: it would train nothing."""
    wrapper = make_toy()
    first, second = [make_trainer(tmp_path / name, wrapper=wrapper) for name in "ab"]
    with pytest.raises(grpo.BadInput, match="--wrapper: .* got no gradient: .*1.lora_A"):
        first.train()
    second.train()

@algorithm
def test_prompts_rewards_and_tokens_stay_in_one_order(tmp_path):
    """A reward that reads the prompt must meet the image of that prompt, all the way. A group has
    its own object as its prompt, also where three prompts have five places."""
    spy = mock.Mock(return_value=torch.arange(20))
    trainer = make_trainer(tmp_path / "run", {"spy": (spy, 1.0)}, steps=4, batch_size=5)
    trainer.step = 3  # the prompts of step 4 are not in the order of the file
    trainer.log = trainer.save = mock.Mock()
    trainer.train_step = mock.Mock(return_value={})
    decode = trainer.wrapper.decode
    trainer.wrapper.decode = mock.Mock(wraps=decode)
    trainer.train()
    rollout, advantages = trainer.train_step.call_args.args
    images, prompts, _ = spy.call_args.args
    chosen, seeds = grpo.choose_prompts(4, 3, trainer.config)
    assert chosen != sorted(chosen)
    assert prompts == rollout.prompts == [trainer.prompts[i] for i in chosen for _ in range(4)]
    assert [[a is b for b in prompts] for a in prompts] == [
        [i // 4 == j // 4 for j in range(20)] for i in range(20)]
    assert advantages.tolist() == approx([-1.1619, -0.3873, 0.3873, 1.1619] * 5, rel=1e-3)
    trainer.wrapper.decode.assert_called_once_with(prompts[::4], rollout.tokens, seeds)
    assert images == decode(prompts[::4], rollout.tokens, seeds)

def test_gradient_does_not_depend_on_the_micro_batch(tmp_path):
    """Each averaged on its own, or the last one alone, would give another gradient, or log. A norm
    of 0 is none. One advantage for each token may be had; four for six samples may not."""
    trainer = make_trainer(tmp_path / "run", max_grad_norm=1e9, kl_coef=0.1)
    perturb(trainer.lora)
    rollout = roll(trainer.wrapper)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer.lora))
    whole = trainer.train_step(rollout, ADVANTAGES)  # 4 at a time
    for size, norm, A in ((1, 1e9, ADVANTAGES), (3, 0, ADVANTAGES),
                          (8, 1e9, ADVANTAGES[:, None].repeat(1, rollout.tokens.shape[1]))):
        trainer.config.micro_batch_size = size
        trainer.config.max_grad_norm = norm
        assert trainer.train_step(rollout, A) == approx(whole, rel=1e-4, abs=1e-5)
        for count in (3, 4, 5, 9):
            with pytest.raises(AssertionError, match=f"^{count} advantages"):
                trainer.train_step(rollout, torch.ones(count))
    assert gradients[0].abs().max() > 1e-4
    for gradient in gradients:
        assert torch.allclose(gradient, gradients[0], rtol=1e-4, atol=1e-6)

@pytest.mark.parametrize("top_p, dtype, gap", [
    (None, torch.float32, 1e-5), (0.6, torch.float32, 1e-5), (None, torch.bfloat16, 0.05)])
def test_until_the_first_update_the_ratio_is_one_and_the_kl_0(tmp_path, top_p, dtype, gap):
    """And where top-p is forgotten, or the reference is rounded otherwise, they are not."""
    wrapper = make_wrapper(dtype, top_p=top_p)
    trainer = make_trainer(tmp_path / "run", wrapper=wrapper, lr=5e-3, clip_range=0.0)  # all but 1
    once = trainer.train_step(roll(wrapper), ADVANTAGES)
    assert (once["ratio_mean"], once["kl"], once["clip_frac"]) == (1, 0, 0)
    trainer.config.num_iterations = 2
    twice = trainer.train_step(roll(wrapper), ADVANTAGES)
    assert twice["ratio_mean"] != 1 and twice["clip_frac"] > 0
    assert 0 < twice["kl"] < 100
    assert max(once["sampler_gap"], twice["sampler_gap"]) < gap

@pytest.mark.parametrize("kl_coef, passes", [(0.1, 6), (0.0, 4)])
def test_the_reference_is_the_policy_with_its_adapters_off(tmp_path, kl_coef, passes):
    """With the last policy as reference the run drifts away; it is computed once a rollout."""
    trainer = make_trainer(tmp_path / "run", kl_coef=kl_coef, lr=0.0, num_iterations=2)
    perturb(trainer.lora)
    rollout = roll(trainer.wrapper)
    compute = trainer.wrapper.compute_logprobs
    with mock.patch.object(grpo.LoRALinear, "enabled", False), torch.no_grad():
        reference, _ = compute(rollout)
    delta = reference - rollout.logprobs
    kl = (delta.exp() - delta - 1).mean().item()
    assert kl > 1e-3
    spy = trainer.wrapper.compute_logprobs = mock.Mock(side_effect=compute)
    metrics = trainer.train_step(rollout, ADVANTAGES)
    own = [call for call in spy.mock_calls if call.args[0].prompts[0]]  # a patch has empty ones
    assert len(own) == passes
    assert metrics.get("kl") == (approx(kl, rel=1e-3) if kl_coef else None)
    # A group without spread still counts for the KL.
    assert trainer.train_step(rollout, 0 * ADVANTAGES).get("kl") == metrics.get("kl")

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_whose_gradient_is_not_finite_is_left_out(tmp_path, bad, capsys):
    """It would stay in every weight and in Adam's moments; the norm in the log and a line tell."""
    one = make_trainer(tmp_path / "one", kl_coef=0.0, micro_batch_size=8)
    two = make_trainer(tmp_path / "two", kl_coef=0.0, micro_batch_size=8, num_iterations=2)
    rollout = roll(one.wrapper)
    one.train_step(rollout, ADVANTAGES)
    added = [bad, 0.0]  # to the gradients of the two updates
    last = list(two.lora.weights.values())[-1]
    last.register_hook(lambda gradient: gradient + added.pop(0))
    metrics = two.train_step(rollout, ADVANTAGES)
    assert not math.isfinite(metrics["grad_norm"])  # a mean without it would hide it
    assert capsys.readouterr().out == "update skipped: its gradient is not finite\n"
    torch.testing.assert_close(one.lora.weights, two.lora.weights, rtol=0, atol=0)

@algorithm
def test_settings_reach_the_update_and_the_log(tmp_path, monkeypatch):
    """A flag that is forgotten looks like one that does not help."""
    trainer = make_trainer(
        tmp_path / "run", steps=1, lr=0.003, warmup_steps=4, lora_rank=2, num_iterations=3,
        max_grad_norm=1e-3, clip_range=0.3, kl_coef=0.5)
    passes, norms = [], []
    def compute_grpo_loss(*args, compute=grpo.compute_grpo_loss):
        assert (args[3], args[5]) == (0.3, 0.5)  # clip_range, kl_coef
        passes.append(compute(*args))
        return passes[-1]

    monkeypatch.setattr(grpo, "compute_grpo_loss", compute_grpo_loss)
    trainer.optimizer.register_step_pre_hook(
        lambda *_: norms.append(gradient_of(trainer.lora).norm().item()))
    trainer.train()
    assert len(passes) == 3 * 2  # updates x micro-batches
    row = trainer.history[0]
    for name in passes[0][1]:  # of all passes, not of the last
        assert row[name] == approx(np.mean([metrics[name] for _, metrics in passes]))
    assert row["grad_norm"] > 1e-2  # before it is clipped
    assert norms == approx([1e-3] * 3, rel=1e-2)
    group, = trainer.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.003 / 4, 0)
    assert {min(weight.shape) for weight in trainer.lora.weights.values()} == {2}

@algorithm
def test_metrics_by_hand(tmp_path, monkeypatch, capsys):
    """A wrong spread, entropy or gap looks healthy for ever."""
    rewards = {"a": (lambda *_: [0.3] * 4 + [1, 2, 3, 6], 2.0), "b": (lambda *_: [7] * 8, 0.0)}
    trainer = make_trainer(tmp_path / "run", rewards, steps=1, micro_batch_size=3)
    forward = trainer.wrapper.forward
    trainer.wrapper.forward = lambda *inputs, **cache: 0 * forward(*inputs, **cache)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7 * 2**30)
    sample = trainer.wrapper.sample = mock.Mock(wraps=trainer.wrapper.sample)
    monkeypatch.setattr(grpo.time, "perf_counter", lambda: sample.call_count)  # a rollout takes 1
    trainer.train()
    row = trainer.history[0]
    assert (row["seconds"], row["step"], row) == (1, 1, rows_of(trainer.out)[0] | dict(seconds=1))
    assert row["reward_std"] == approx(2 * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert row["entropy"] == approx(math.log(8))  # in nats: each of 8 codes is as likely
    assert (row["gpu_gib_max"], row["lr"]) == (7, 2e-3)
    assert re.search("reward/a 1.65 .*reward/b 7 ", capsys.readouterr().out)  # a witness, too
    assert trainer.config.reward == "a()=2.0,b()=0.0"
    rollout = roll(trainer.wrapper)
    rollout.logprobs[5, 3] -= 0.1
    metrics = trainer.train_step(rollout, ADVANTAGES)
    assert metrics["sampler_gap"] == approx(0.1 / rollout.logprobs.numel(), rel=1e-2)

# --- The trainer: what a run leaves, and how it goes on -------------------------------------------
@pytest.mark.parametrize("name", ["checkpoint.pt", "adapter_model.safetensors"])
def test_a_run_that_went_on_equals_an_undisturbed_one(finished, tmp_path, monkeypatch, name):
    """After a full disk, in a copy of its folder, whatever a reward draws and wherever it goes."""
    def wander(images, prompts, targets):
        torch.manual_seed(7)
        os.chdir("/")
        return grpo.reward_color(images, prompts)

    def fill(path, data, write=grpo.write_file):
        if path.name == name and len(trainer.history) == 2:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.chdir(tmp_path)  # and back, in the end
    monkeypatch.setitem(grpo.REWARDS, "color", wander)
    trainer = make_trainer(tmp_path / "run", num_iterations=2)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(grpo, "write_file", fill)
        trainer.train()
    assert torch.load(tmp_path / "run/checkpoint.pt")["step"] == 1
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    make_trainer(tmp_path / "copy").train()
    assert_same_run(finished, tmp_path / "copy")

@pytest.mark.parametrize("method, call", [
    ("compute_logprobs", 7),  # of the reference in step 2, with the adapters off
    ("compute_logprobs", 10),  # the second of an update, which adds to the gradients
    ("update_weights", 1), ("update_weights", 3),  # the first of two in step 1, in step 2
    ("log", 1), ("save", 1), ("save", 4)])
def test_a_cell_that_was_stopped_is_run_again(finished, tmp_path, method, call):
    """Ctrl-C in a notebook: no step is made on top of itself, and no row is lost or twice there."""
    trainer = make_trainer(tmp_path / "run", num_iterations=2)
    owner = trainer.wrapper if method == "compute_logprobs" else trainer
    spy = mock.Mock(wraps=getattr(owner, method))

    def interrupt(*args):
        result = spy(*args)
        if spy.call_count == call:
            raise KeyboardInterrupt
        return result

    setattr(owner, method, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert_same_run(finished, tmp_path / "run")

# --- The machine room: halves that take turns on a GPU --------------------------------------------
def test_offloading_changes_nothing_and_holds_one_half_at_a_time(finished, tmp_path, monkeypatch):
    """Nothing is copied back, which would be a tenth of a step; Ctrl-C in a move does no harm."""
    trainer = make_trainer(tmp_path / "run", offload="on", num_iterations=2)
    wrapper = trainer.wrapper
    # What is not on the GPU is NaN: the vision tower always, a half unless it was moved.
    values = {weight: weight.data for weight, _ in wrapper.cpu_copies}
    wrapper.cpu_copies = [(weight, torch.full_like(weight, math.nan)) for weight in values]
    for weight in wrapper.policy.model.visual.parameters():
        weight.data = torch.full_like(weight, math.nan)
    moves, interrupts = [], []
    def is_on_gpu(half):
        return [weight.isfinite().all().item() for weight in half.parameters() if weight in values]

    def to(half, device):
        moves.append("ar" if half is wrapper.ar else "dit")
        for weight in half.parameters():
            weight.data = values.get(weight, weight.data)  # that of an adapter is always there
            if interrupts:
                raise interrupts.pop()

    def empty_cache():
        assert not any(is_on_gpu(wrapper.ar) + is_on_gpu(wrapper.dit))  # they leave no room
        moves.append("empty")

    monkeypatch.setattr(torch.nn.ModuleList, "to", to)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    trainer.train()
    assert moves == ["empty", "ar", "empty", "dit"] * 6  # three steps, and pictures three times
    assert_same_run(finished, tmp_path / "run")
    for half in (wrapper.dit, wrapper.ar):
        interrupts.append(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            wrapper.move_to_gpu(wrapper.ar)
        wrapper.move_to_gpu(half)
        assert all(is_on_gpu(half))

@pytest.mark.parametrize("offload, gib, where", [
    ("on", 80, "cpu"), ("auto", 40, "cpu"), ("auto", 80, "meta"), ("off", 10, "meta")])
def test_where_the_halves_wait(monkeypatch, offload, gib, where):
    """And that they are in bf16 on a GPU."""
    load = mock.Mock(return_value=make_pipe())
    monkeypatch.setattr(diffusers.GlmImagePipeline, "from_pretrained", load)
    card = mock.Mock(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(grpo, "CUDA", True)
    monkeypatch.setattr(grpo, "DEVICE", torch.device("meta"))
    wrapper = grpo.GLMImageWrapper.from_pretrained("folder", make_config(offload=offload))
    assert load.call_args.kwargs["dtype"] == torch.bfloat16
    weights = [*wrapper.ar.parameters(), *wrapper.dit.parameters()]
    assert {weight.device.type for weight in weights} == {where}

# --- GLM-Image: what it reads, samples and paints -------------------------------------------------
def test_positions_are_those_of_the_docstring():
    """The drawing is what readers trust; it must be what the function does."""
    rows = re.findall(r"[thw]:((?:\s+-?\d+)+)", grpo.build_position_ids.__doc__)
    drawn = [[int(number) for number in row.split()] for row in rows]
    position_ids = grpo.build_position_ids(torch.tensor([[0, 1, 1, 1]]), [(1, 2), (2, 2)])
    assert position_ids[:, 0].tolist() == drawn

@pytest.mark.parametrize("top_p, top_k, dtype, bound", [
    (1.0, 0, torch.float32, 1e-5), (0.6, 7, torch.float32, 1e-5), (1.0, 3, torch.float32, 1e-5),
    (1.0, 0, torch.bfloat16, 0.05)])
def test_sampler_and_trainer_agree(top_p, top_k, dtype, bound):
    """THE test: cached steps and a teacher-forced pass agree, with padding and top-p."""
    wrapper = make_wrapper(dtype, top_p=top_p, top_k=top_k)
    rollout = roll(wrapper)
    assert rollout.tokens.shape == (6, 2 * 1 + 4 * 2) and rollout.logprobs.dtype == torch.float32
    with torch.no_grad():
        again, _ = wrapper.compute_logprobs(rollout)
        assert (again - rollout.logprobs).abs().max() < bound
        # The division by the temperature is in fp32.
        ids, mask, position_ids = wrapper.encode(rollout.prompts)
        inputs = torch.cat([ids, rollout.tokens], 1)
        logits = wrapper.forward(inputs, mask, position_ids, 10) * 0.9
        assert torch.allclose(logits, logits.to(dtype).float(), rtol=1e-6)

@pytest.mark.parametrize("top_p, top_k", [(0.6, 0), (1.0, 4)])
def test_sampling_is_transformers_own_decoding_row_by_row(top_p, top_k):
    """The witness is slow and plain: the public `forward`, no batch, codes kept by sorting."""
    wrapper = make_wrapper(top_p=top_p, top_k=top_k)
    # What is typed comes first, and 1 and 0 are typed, too.
    wrapper.policy.generation_config.update(temperature=0.5, top_p=0.5, top_k=2)
    rollout = roll(wrapper)
    stock = make_pipe().vision_language_encoder.eval()
    rngs = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    chances = torch.cat([torch.rand(3, 10, generator=rng) for rng in rngs])
    for row in range(6):
        ids, _, _ = wrapper.encode(rollout.prompts[row:row + 1])
        L = ids.shape[1]
        out = stock(
            input_ids=ids, use_cache=True, images_per_sample=torch.tensor([2]),
            attention_mask=torch.ones(1, L), image_grid_thw=torch.tensor([[1, 4, 2], [1, 2, 1]]))
        for i in range(10):
            logits = out.logits[0, -1, :8] / 0.9
            order = logits.argsort(descending=True)[:top_k or 8]
            probs = logits[order].softmax(dim=0)
            before = probs.cumsum(dim=0) - probs
            order = order[before < top_p]  # while what stands before holds too little
            allowed = torch.zeros(8).bool().scatter(0, order, True)
            logprobs = logits.masked_fill(~allowed, -math.inf).log_softmax(dim=0)
            cdf = logprobs.double().exp().cumsum(dim=0)
            code = torch.searchsorted(cdf, chances[row, i] * cdf[-1], right=True)
            assert code == rollout.tokens[row, i]
            assert abs(logprobs[code] - rollout.logprobs[row, i]) < 1e-5
            assert torch.equal(allowed, rollout.allowed[row, i])
            out = stock(
                input_ids=code.view(1, 1), attention_mask=torch.ones(1, L + i + 1),
                use_cache=True, cache=out.cache)

@pytest.mark.parametrize("settings, most", [({}, 50), (dict(top_k=0), 80), (dict(top_k=3), 3)])
def test_without_flags_sampling_is_that_of_the_stock_pipeline(settings, most):
    """What is trained is what is deployed: `generate` keeps 50 codes unless it is told, of 80."""
    torch.manual_seed(0)
    pipe = make_tiny.make_models([f"word{i}" for i in range(80)])
    pipe.processor._get_target_shape = lambda height, width: (2, 2, 1, 1)
    policy = pipe.vision_language_encoder
    torch.nn.init.constant_(policy.model.language_model.norm.weight, 0.5)
    policy.generation_config.update(
        temperature=0.7, top_p=0.95, output_scores=True, return_dict_in_generate=True, **settings)
    with mock.patch.object(policy, "generate", side_effect=KeyError) as generate:
        with pytest.raises(KeyError):
            pipe.generate_prior_tokens(["word3"], 64, 64)
    inputs = generate.call_args.kwargs
    stock = policy.generate(**inputs).scores[0][:, :80].softmax(dim=1)  # of the first code
    wrapper = grpo.GLMImageWrapper(pipe, grpo.Config(width=64, height=64))
    assert torch.equal(wrapper.encode(["word3"])[0], inputs["input_ids"])
    with mock.patch.object(grpo, "sample_codes", wraps=grpo.sample_codes) as sample_codes:
        wrapper.sample(["word3"], 1, [0])
    ours = sample_codes.call_args_list[0].args[0].exp()
    assert torch.allclose(ours, stock, atol=1e-6) and torch.equal(ours > 0, stock > 0)
    assert (ours > 0).sum() <= most

@pytest.mark.parametrize("guidance, size", [(4.0, 1), (1.0, 2), (4.0, 5)])
def test_painting_is_that_of_the_stock_pipeline(guidance, size):
    """One by one, but for a grey level; with a VAE that paints all at once no GPU would do."""
    prompts = ['a red fox on a wall that says "CLOSED TODAY"', 'a yellow "!"']
    all_tokens = torch.randint(8, (6, 2 * 1 + 4 * 2))
    ours = make_wrapper(guidance=guidance, decode_steps=3, micro_batch_size=size)
    inputs, painted = mock.Mock(return_value=None), mock.Mock(return_value=None)
    ours.pipe.transformer.register_forward_pre_hook(inputs, with_kwargs=True)
    ours.pipe.vae.decoder.register_forward_pre_hook(painted)
    images = ours.decode(prompts, all_tokens, seeds=[7, 8])  # two groups of three
    sizes = [len(call.args[2]["hidden_states"]) for call in inputs.call_args_list]
    assert (max(sizes), sum(sizes)) == (min(size, 3), 6 * 3 * (1 + (guidance > 1)))
    assert [len(call.args[1][0]) for call in painted.call_args_list] == [1] * 6

    stock = make_pipe()
    stock.text_encoder.eval()
    for i, (image, tokens) in enumerate(zip(images, all_tokens, strict=True)):
        noise = torch.randn(1, 16, 16, 8, generator=torch.Generator().manual_seed(~(7 + i // 3)))
        expected = stock(
            prompts[i // 3], prior_token_ids=stock._upsample_token_ids(tokens[2:], 4, 2),
            latents=noise, height=128, width=64, num_inference_steps=3,
            guidance_scale=guidance).images[0]
        difference = np.asarray(image, int) - np.asarray(expected, int)
        assert abs(difference).max() <= (size > 1)

# --- The command line: more of it, in processes, is in .ci/test_command.py ------------------------
def test_a_file_of_prompts(tmp_path):
    """Targets lie beside it; and what ends no line, as in `str.splitlines`, ends no prompt."""
    odd = "{{plain}} #1\u2028 \x85 \x0b\x1c."
    text = f"\ufeff# no\n\n  # nor this\r\n  a red  fox\tt.png\n{odd} \na red fox\t u.png\t\n"
    (tmp_path / "p.txt").write_bytes(text.encode())
    prompts = grpo.load_prompts(tmp_path / "p.txt")
    assert prompts == ["a red fox", " ".join(odd.split()), "a red fox"]
    assert [p.target for p in prompts] == [f"{tmp_path}/t.png", None, f"{tmp_path}/u.png"]
    assert all(copy.target == prompts[0].target for copy in pickle.loads(pickle.dumps(prompts[:1])))
    paths = ["#1 = ü, \u202f\xa0.png", "é\u0301 [x] %20.png", "a b.png"]
    trainer = make_trainer(tmp_path, wrapper=make_toy())
    trainer.prompts = [grpo.Prompt(f"fox {path}", tmp_path / path) for path in paths]
    trainer.save_settings()
    again = grpo.load_prompts(tmp_path / "prompts.txt")  # and from a run's own file as they were
    assert again == trainer.prompts
    assert [prompt.target for prompt in again] == [f"{tmp_path}/{path}" for path in paths]

@pytest.mark.parametrize("text, target", [
    ("", None), (" \n\t", None), ("#sunset", None), (" #1 DAD mug", "a.png"), ("\ud800", None),
    ("fox", "a\tb.png"), ("fox", "a\nb.png"), ("fox", "a\rb.png"), ("fox", "a.png "),
    ("fox", os.fsdecode(b"caf\xe9.png"))])
def test_a_prompt_that_its_run_could_not_write_is_refused(text, target):
    """The run would go on with others. Nor is one text a list: it would train on its letters."""
    with pytest.raises(grpo.BadInput, match="cannot hold"):
        grpo.Prompt(text, target)
    for letters in ("fox", "a red fox", grpo.TINY_MODEL):
        with pytest.raises(grpo.BadInput, match="must be a list of texts"):
            grpo.GRPOTrainer(make_config(), make_toy(), letters)

def test_rewards_are_loaded_with_their_weights(modules):
    """Two of a file share what it loads; and it can import its neighbours, if it finds them: not
    those of examples/, or of another file, which have their names."""
    for folder in ("mine", "other", "lr=1,v=2"):
        Path(folder).mkdir()
        Path(folder, "rewards.py").write_text(f"even = '{folder}'")
    Path("mine/own-one.py").write_text("from rewards import even as a\nb = a")
    text = f"color=0,{HERE}/examples/rewards.py:even,mine/own-one.py:a,mine/own-one.py:b=5e-1"
    rewards = grpo.load_rewards(text)
    assert rewards["color"] == (grpo.reward_color, 0.0)  # only watched
    assert rewards["even"][0].__module__ == "examples.rewards"
    assert (rewards["a"], rewards["b"]) == (("mine", 1.0), ("mine", 0.5))
    with pytest.raises(grpo.BadInput, match="rename .*/other/rewards.py, as .*/mine/rewards.py"):
        grpo.load_rewards("other/rewards.py:even")

def test_a_setting_comes_from_the_last_place_that_has_it(modules, tmp_path):
    """Config, wrapper, model's grpo.json or run's config.json, what is typed."""
    own = "class Mine:\n    defaults = dict(model='.', lr=2.0, seed=2, steps=2)\nclass Bare: pass"
    Path("mine.py").write_text(own)
    Path("grpo.json").write_text(json.dumps(dict(lr=3.0, seed=3)))
    Path("config.json").write_text(json.dumps(dict(lr=4.0, seed=4, steps=4)))
    for flags, values in (("--wrapper mine.py:Mine", (0.01, 2, 3.0, 5)),
                          ("--resume . --out .", (0.01, 4, 4.0, 5))):
        config = grpo.parse_args([*flags.split(), "--seed=5"])
        assert (config.kl_coef, config.steps, config.lr, config.seed) == values
    assert config.prompts == f"{tmp_path}/prompts.txt"
    assert grpo.parse_args("--resume new --out new".split()).model == grpo.TINY_MODEL  # it begins
    # The tiny GLM-Image and its settings are not for a wrapper that names no model.
    config = grpo.parse_args(["--wrapper=mine.py:Bare"])
    assert (config.model, config.warmup_steps) == (None, grpo.Config.warmup_steps)

@pytest.mark.parametrize("flags, told", [
    ("--group-size 1", "--group-size"), ("--width 48", "--width"), ("--offload maybe", "--offload"),
    ("--temperature 0", "--temperature"), ("--top-p 0", "--top-p"), ("--save-every 0", "--save-e"),
    ("--reward colr", "must be file.py:name"), ("--reward no.py:f", "no.py:f: .* no such file"),
    ("--reward color,color=2", "color"), ("--reward color=much", "much"),
    ("--reward json.py:f", "rename .*json.py"), ("--reward f.py:g", "f.py:g: .* no attribute 'g'"),
    ("--prompts missing.txt", "--prompts"), ("--prompts empty.txt", "--prompts: .*empty.txt has "),
    ("--out done", "--out"), ("--resume none", "--resume"), ("--lr -1", "--lr -1"),
    ("--resume done --out other", "--resume"), ("--resume bare", "checkpoint.pt"),
    ("--resume done --lora-rank 8", "done is of another model"),
    ("--adapter done", "--adapter: "), ("--wrapper f.py:Bare", "the layers nothing: .*empty"),
    ("--adapter done/adapter_00003 --lora-rank 8", "^[^{]*--adapter: needs --lora-rank 32, "),
    ("--adapter done/adapter_00003 --wrapper f.py:Wide", "--adapter: .*size")])
def test_bad_input_is_one_line_and_changes_nothing(command, tmp_path, flags, told):
    """Such as two rewards of one name, the name of a module, a log without its checkpoint."""
    Path("f.py").write_text("""
from examples.toy import Toy
class Bare(Toy):
    lora_layers = "nothing"
class Wide(Toy):
    def __init__(self, config):
        super().__init__(config)
        self.policy[1] = type(self.policy[1])(64, 96)
""")
    if "json.py" in flags:
        Path("json.py").write_text("def f(*_): return range(4)\n")
    Path("empty.txt").write_text("# nothing\n\n  \t\n")
    assert command(TOY + "--out done")[0] == 0
    shutil.copytree("done", "bare")
    Path("bare/checkpoint.pt").unlink()
    before = read_files(tmp_path)
    code, _ = command(flags if "--resume" in flags else TOY + flags)
    assert re.fullmatch(r"[^\n]*: error: [^\n]+", code) and re.search(told, code)
    assert read_files(tmp_path) == before and not Path("runs").exists()  # not even an empty folder

def test_a_run_goes_on_anywhere_with_each_prompts_own_target(command, tmp_path, monkeypatch):
    """Its folder has prompts, targets and settings; what is typed is taken."""
    Path("own.py").write_text("""
from examples.toy import Toy as Own
def see(images, prompts, targets):
    for prompt, target in zip(prompts, targets, strict=True):
        assert target.getpixel((0, 0))[0] == ["red", "blue", "green"].index(prompt), prompt
    return range(len(images))
""")
    for i in range(3):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(f"{i}.png")
    Path("p.txt").write_text("# three\nred\t0.png\nblue\t1.png\ngreen\t2.png\n")
    own = "--wrapper own.py:Own --prompts p.txt --reward own.py:see "
    assert command(TOY + own + "--steps 4 --out run")[0] == 0
    written = f"red\t{tmp_path}/0.png\nblue\t{tmp_path}/1.png\ngreen\t{tmp_path}/2.png\n"
    assert Path("run/prompts.txt").read_text() == written
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert command("--resume ../run --steps 8")[0] == 0
    assert len(rows_of(tmp_path / "run")) == 8
    files = read_files(tmp_path)
    assert command("--resume ../run --seed 9")[0] == 0
    assert read_files(tmp_path) == files  # nothing was left to do
    (tmp_path / "q.txt").write_text("blue\t1.png\n")
    shutil.copytree("../run", "../copy")
    flags = "--steps 9 --prompts ../q.txt --lr 1e-5 --resume "  # that is the default, and typed
    assert command(flags + "../run --adapter ../run/adapter_00004")[0] == 0  # for new ones
    assert command(flags + "../copy")[0] == 0
    one, two = [torch.load(tmp_path / name / "checkpoint.pt") for name in ("run", "copy")]
    torch.testing.assert_close(one["adapter"], two["adapter"], rtol=0, atol=0)
    assert one["optimizer"]["param_groups"][0]["lr"] == 1e-5
    assert (tmp_path / "run/prompts.txt").read_text() == f"blue\t{tmp_path}/1.png\n"

def test_a_run_of_a_notebook_goes_on_there_alone(command, tmp_path):
    """Even where its reward has the name of a built-in one, which is another."""
    rewards = {"color": (lambda images, *_: range(len(images)), 1.0)}
    make_trainer(tmp_path / "run", rewards, make_toy()).train()
    assert "color()" in command("--resume run --steps 5")[0]
    trainer = make_trainer(tmp_path / "run", rewards, make_toy(), steps=5)
    trainer.train()
    assert [row["reward/color"] for row in rows_of(trainer.out)] == [3.5] * 5

@algorithm
def test_the_first_command_learns_and_leaves_what_the_readme_says(tmp_path, monkeypatch):
    """Rewards rise by far more than luck, and all pictures but one at most get their color."""
    monkeypatch.chdir(tmp_path)
    argv = [sys.executable, HERE / "grpo.py", *"--group-size 4 --out out".split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=900)
    bars = re.split(r"[\r\n]|\x1b\[A", done.stderr)  # of the libraries, while they load the model
    known = "Loading ", "Failed to load CPU gemm_4bit"  # the second if bitsandbytes is installed
    assert [bar for bar in bars if bar and not bar.startswith(known)] == []
    assert re.match(r"model: .*/tiny-glm-image on cpu, 40 prompts\n"
                    "files: .*/out, at step 0 of 20\nstep 1 ", done.stdout)
    rewards = [row["reward"] for row in rows_of(tmp_path / "out")]
    assert np.mean(rewards[:5]) < 0.80
    assert np.mean(rewards[-5:]) > 0.92
    sheet = Image.open("out/samples_00020.png")
    pictures = [sheet.crop((i * 128, 0, i * 128 + 128, 128)) for i in range(8)]
    assert sorted(grpo.reward_color(pictures, grpo.load_prompts()[:8]))[1] > 0.85
    # A step more, and a run that begins with what it has learned.
    grpo.main("--resume out --steps 21".split())
    names = {"config.json", "prompts.txt", "metrics.jsonl", "checkpoint.pt"}
    for step in (0, 10, 20, 21):
        names |= {f"adapter_{step:05d}", f"samples_{step:05d}.png"}
    assert {path.name for path in Path("out").iterdir()} == names
    grpo.main("--adapter out/adapter_00020 --steps 1 --out more".split())
    again = Path("more/samples_00000.png").read_bytes()
    assert again == Path("out/samples_00020.png").read_bytes()
