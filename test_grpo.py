"""Tests of grpo.py: identities, mostly, on small models. No network, no GPU: `python -m pytest -q`.
They stand in the order of grpo.py."""
import json, math, operator, os, re, runpy, shutil, subprocess, sys, warnings
from pathlib import Path
from unittest import mock

# The tests compare with tensors on the CPU, and start processes by forking: CUDA survives neither.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import diffusers, pytest, torch
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageColor
from pytest import approx
from safetensors.torch import save_file

import grpo
from examples.make import tiny as make_tiny
from examples.toy import Toy

# A library that renames an argument warns first: that is a failing test here, and never a user's.
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

def make_trainer(out, rewards=None, wrapper=None, targets=None, prompts=None, **settings):
    """Two of three prompts x 4 images a step. If the folder has a run, it goes on with that."""
    own = dict(out=str(out))
    if (out / "checkpoint.pt").exists():
        own = json.loads((out / "config.json").read_text()) | dict(resume=str(out))
    config = make_config(**own | settings)
    prompts = prompts or ["a red fox", "some yellow thing here", "green"]
    wrapper = wrapper or make_wrapper(config=config)
    return grpo.GRPOTrainer(config, wrapper, prompts, rewards, targets)

def make_toy(Wrapper=Toy, **own):
    """A wrapper that is done in no time, with attributes of its own."""
    toy = Wrapper("toy", make_config())
    vars(toy).update(own)
    return toy

def roll(wrapper):
    """A Rollout: two groups of three samples, of prompts of which one is padded."""
    return wrapper.sample(["a red fox on a wall", "yellow"], 3, seeds=[1, 2])

ADVANTAGES = torch.tensor([1.2, -0.4, -0.8, -1.2, 0.4, 0.8])  # of such a rollout

def tensors_of(*modules):
    """Parameters and buffers."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

def gradient_of(lora):
    """All of it, in one vector."""
    return torch.cat([weight.grad.flatten() for weight in lora.weights.values()])

def blank(n):
    """Images, prompts and targets for rewards that do not look at them."""
    images = [Image.new("RGB", (8, 8)) for _ in range(n)]
    return images, [f"prompt {i}" for i in range(n)], [None] * n

def read_files(folder):
    """-> {name: bytes}, without what Python keeps of a module."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

def rows_of(out):
    """metrics.jsonl without what the clock says."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) | dict(seconds=0) for line in lines]

def assert_same_run(one, other):
    """Every file of two runs, bit for bit, but for seconds and settings without an effect."""
    runs = []
    for out in (one, other):
        files = read_files(out)
        state = torch.load(out / "checkpoint.pt")
        files["checkpoint.pt"] = json.dumps(state, default=torch.Tensor.tolist)
        files["metrics.jsonl"] = rows_of(out)
        files["config.json"] = json.loads(files["config.json"]) | dict(offload=None, prompts=None)
        runs.append(files)
    assert runs[0].keys() == runs[1].keys()
    assert [name for name in runs[0] if runs[0][name] != runs[1][name]] == []

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of three steps with two updates each."""
    out = tmp_path_factory.mktemp("finished") / "run"
    make_trainer(out, num_iterations=2).train()
    return out

@pytest.fixture
def modules(tmp_path, monkeypatch):
    """A test in tmp_path, after which all that it imports is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with mock.patch.dict(sys.modules), mock.patch.dict(os.environ):
        yield

@pytest.fixture
def command(modules, capsys):
    """command("--steps 2"): `python grpo.py` in tmp_path -> exit code, stdout, stderr."""
    def run(flags):
        capsys.readouterr()
        code = 0
        try:
            grpo.main(flags.split())
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run

@pytest.fixture
def refused(command, tmp_path):
    """refused("--steps 0"): one line, exit code 2, and no file is changed -> the line."""
    def run(flags):
        before = read_files(tmp_path)
        code, printed, error = command(flags)
        assert (code, printed) == (2, "")
        assert re.fullmatch("[^\n]*: error: [^\n]+\n", error)
        assert read_files(tmp_path) == before
        return error

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
    """In fp32 1e8 + 0.25 is 1e8; and the mean of six 0.3s is not 0.3, but over a tiny std .03."""
    groups = np.array([[1, 2, 3, 4, 10, 14], [7, 6, 5, -1, 0, 0], [0, 0, 0, 0, 0, 1e-5]])
    groups = np.concatenate([groups, groups[:1] / 4 + 1e8])
    means = groups.mean(1, keepdims=True)
    stds = groups.std(1, ddof=1, keepdims=True)
    by_hand = (groups - means) / (stds + 1e-6)
    advantages = grpo.compute_advantages(groups.flatten(), 6)
    assert advantages.dtype == torch.float32
    assert advantages.numpy() == approx(by_hand.flatten(), rel=1e-4, abs=1e-6)
    for reward in (0.3, -7.7, 1e8 + 0.3):
        assert not grpo.compute_advantages([reward] * 6, 6).any()

@algorithm
@pytest.mark.parametrize("advantage, clip_range, ratios, surrogates", [
    (1.0, 0.2, [1.5, 0.5], [1.2, 0.5]),  # better: likelier by far is clipped, rarer is pulled
    (-1.0, 0.2, [1.5, 0.5], [-1.5, -0.8]),  # worse: likelier is pushed back, rarer by far clipped
    (1.0, 0.1, [1.15, 0.85], [1.1, 0.85]), (-1.0, 0.1, [1.15, 0.85], [-1.15, -0.9]),
    (1.0, 0.4, [1.3], [1.3]), (1.0, 0, [1.3], [1.0])])  # 0 is a bound, too
def test_the_clip_by_hand(advantage, clip_range, ratios, surrogates):
    """Guards the min: with max, or with the clip alone, the first two are wrong. And a ratio is of
    a token: that of a whole sequence (GSPO) has a loss of -.866 in the first."""
    new = torch.tensor([ratios]).log().requires_grad_()
    loss, metrics = grpo.compute_grpo_loss(new, 0 * new, torch.tensor([advantage]), clip_range)
    loss.backward()
    is_clipped = [ratio * advantage != value for ratio, value in zip(ratios, surrogates)]
    assert (new.grad[0] == 0).tolist() == is_clipped
    mean = -np.mean(surrogates)
    assert metrics == approx(dict(  # and no KL
        loss=mean, policy_loss=mean, ratio_mean=np.mean(ratios), clip_frac=np.mean(is_clipped)))

@algorithm
def test_a_ratio_beyond_all_measure_gives_no_nan():
    """exp(100) is infinite in fp32, and infinity times 0 is NaN: the step was lost."""
    new = torch.tensor([[100.0, -100.0, 0.5]] * 3, requires_grad=True)
    loss, metrics = grpo.compute_grpo_loss(new, torch.zeros(3, 3), torch.tensor([1.0, -1.0, 0.0]))
    loss.backward()
    assert math.isfinite(sum(metrics.values()))
    assert new.grad.isfinite().all()

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
def test_advantages_are_one_for_each_sample():
    """As [N, T] the gradient was once 1e-9, and the loss looked fine. Log-probs may be [N], too."""
    new, old, advantages = torch.randn(3, 4)
    whole = grpo.compute_grpo_loss(new, old, advantages)
    assert whole == grpo.compute_grpo_loss(new[:, None], old[:, None], advantages)
    for shape in ((4, 4), (3,), (5,), ()):
        with pytest.raises(RuntimeError, match="shape"):
            grpo.compute_grpo_loss(torch.ones(4, 4), torch.ones(4, 4), torch.ones(shape))

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
    assert ours.any()
    assert torch.allclose(ours, by_hand, atol=1e-7)

# --- Rewards --------------------------------------------------------------------------------------
def test_pictures_are_opened_as_their_owner_sees_them(tmp_path):
    """What is transparent was learnt as black, and a photo lying on its side."""
    palette = Image.new("P", (1, 1), 1)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    photo = Image.new("RGB", (2, 1), "blue")
    photo.putpixel((1, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: its left is above
    for name, image, options, colors in [
            ("glass.png", Image.new("RGBA", (1, 1), (0, 0, 255, 128)), {}, ["#7f7fff"]),
            ("hidden.png", palette, dict(transparency=1), ["white"]),
            ("palette.gif", palette, {}, ["blue"]),
            ("ink.tiff", Image.new("CMYK", (1, 1), (0, 255, 255, 0)), {}, ["red"]),
            ("turned.png", photo, dict(exif=exif), ["blue", "red"])]:
        image.save(tmp_path / name, **options)
        opened = grpo.open_image(tmp_path / name)
        assert opened.mode == "RGB"
        column = [opened.getpixel((0, y)) for y in range(opened.height)]
        assert column == [ImageColor.getrgb(color) for color in colors], name

@pytest.mark.parametrize("color, prompt, reward", [
    ("red", "A RED thing", 1), ("red", "a blue thing", 1 / 3),
    ("green", "a green wall of red bricks", 1), ("purple", "a tired, reddish purple", 1)])
def test_color_reward_is_of_the_mean_and_of_the_first_whole_word(color, prompt, reward):
    """"tired" is no red; and where there is no color, it trained on zeros for hours."""
    image = Image.new("RGB", (4, 4), color)
    assert grpo.reward_color([image], [prompt])[0] == approx(reward)
    assert grpo.reward_color([Image.linear_gradient("L")], ["white"])[0] == approx(0.5)
    with pytest.raises(grpo.BadInput, match="color: .*'a tired fox'"):
        grpo.reward_color([image] * 2, [prompt, "a tired fox"])

def test_mse_reward_is_of_pixels():
    """Not of mean colors; and it is the target that is resized, as the image is judged."""
    half = Image.new("RGB", (32, 16))
    half.paste("white", (0, 0, 16, 16))
    black = Image.new("RGB", (1, 1))
    gray = Image.new("RGB", (8, 8), (51, 51, 51))
    rewards = grpo.reward_mse([half] * 3, [""] * 3, [half, black, gray])
    assert rewards.tolist() == approx([0, -0.5, -(0.8**2 + 0.2**2) / 2])
    with pytest.raises(grpo.BadInput, match="every line .* needs a target"):
        grpo.reward_mse([half] * 2, [""] * 2, [half, None])

@pytest.mark.parametrize("values", [
    (True, 2.0), range(1, 3), np.array([1, 2], np.float16), [torch.tensor(1.0), np.float32(2)],
    torch.tensor([1.0, 2.0], requires_grad=True)])
def test_rewards_take_any_sequence_of_numbers(values):
    """And the sum is in double precision, whatever they are in."""
    rewards = {"a": (lambda *_: values, 1.0), "b": (lambda *_: [10.0, 20.0], -0.5)}
    total, metrics = grpo.compute_rewards(*blank(2), rewards)
    assert total.dtype == torch.float64
    assert total.tolist() == [-4.0, -8.0]
    assert metrics == {"reward/a": 1.5, "reward/b": 15.0, "reward": -6.0}

@pytest.mark.parametrize("values, told", [
    ([0.5, -math.inf], "-inf for image 2, 'prompt 1'"), ([math.nan, 1], "nan for image 1, 'prompt"),
    ([], ""), ([0.5] * 3, ""), ([None, 1], ""), (None, ""), (0.5, ""), (["1", "2"], ""),
    ({"a": 1, "b": 2}, ""), ([[1, 2]], ""), (torch.ones(2, 1), ""), ([10**400, 1], "")])
def test_a_reward_without_a_finite_number_for_each_image_is_named(values, told):
    """It trained on nonsense: a column [N, 1] plus an [N] was broadcast to [N, N]. Of 128 values
    200 letters were shown, and the NaN was not among them."""
    rewards = {"fine": (lambda *_: [1, 2], 1.0), "broken": (lambda *_: values, 0.0)}
    with pytest.raises(grpo.BadInput, match=f"--reward broken: .* 2 finite numbers .*gave {told}"):
        grpo.compute_rewards(*blank(2), rewards)

def test_each_reward_gets_copies_of_its_own_and_no_graph(tmp_path):
    """One sorted its prompts: the update scored tokens under others; one drew on its targets."""
    Image.new("RGBA", (8, 8)).save(tmp_path / "t.png")  # of glass, which is opened as white
    given = blank(2)[0], ["b", "a"], [tmp_path / "t.png", None]
    seen = []

    def spoil(images, prompts, targets):
        colors = [image.getpixel((0, 0)) for image in (images[0], targets[0])]
        seen.append((*colors, *prompts))
        images[0].paste("red", (0, 0, 8, 8))
        targets[0].paste("red", (0, 0, 8, 8))
        prompts.sort()
        targets.clear()
        return [torch.is_grad_enabled(), 0.0]

    rewards = {"x": (spoil, 1.0), "y": (spoil, 1.0)}
    for _ in range(2):  # the next step meets the same targets
        _, metrics = grpo.compute_rewards(*given, rewards)
    assert seen == [((0, 0, 0), (255, 255, 255), "b", "a")] * 4
    assert metrics["reward"] == 0

# --- LoRA -----------------------------------------------------------------------------------------
def make_lora(*names):
    """Adapters that do something, of a model that has a linear layer for each name."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in names})
    return perturb(grpo.LoRA(model, "[ab]", rank=4))

def test_lora_by_hand():
    """Twice B A x at any rank, 0 at first, and A as peft draws it. With other lora_layers, those of
    an earlier trainer stayed in the policy, and in the KL."""
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
    grpo.LoRA(model, "ab", rank=4)
    assert torch.equal(model["a"](x), base)
    lora.attach()
    assert torch.allclose(model["a"](x), trained)
    lora.enabled = False
    assert torch.equal(model["a"](x), base)

@pytest.mark.parametrize("step", [5e-5, 2e-4])
@pytest.mark.parametrize("width, out, bias, rows", [
    (4096, 4096, True, 4), (4096, 512, True, 300), (13696, 4096, False, 64),
    (2048, 5632, False, 1)])
def test_small_updates_are_not_swallowed_in_bf16(step, width, out, bias, rows):
    """In layers of GLM-Image's AR and DiT and of Janus. Two roundings, of W x and of the sum, give
    slopes of .1 to .5: most of a first update did nothing."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(width, out, bias, dtype=torch.bfloat16).requires_grad_(False)
    lora = grpo.LoRA(torch.nn.ModuleDict(dict(a=linear)), "a", rank=32)
    A, B = lora.weights.values()
    x = torch.randn(rows, width).bfloat16()
    with torch.no_grad():
        base = linear(x)
        B.copy_(step * torch.randn_like(B).sign())
        change = (linear(x) - base).float()
    truth = 2 * x.float() @ A.bfloat16().float().T @ B.bfloat16().float().T
    slope = (change * truth).sum() / truth.square().sum()
    error = ((change - truth).square().mean() / truth.square().sum()).sqrt()
    assert abs(slope - 1) < 0.05 + 3 * error, f"{slope:.3f} +- {error:.3f}"
    assert error < 0.06

@pytest.mark.parametrize("bias", [True, False])
def test_gradients_of_lora_are_those_of_its_formula(bias):
    """The product is made in place, and without activations: autograd must see through both."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(70, 90, bias), torch.nn.Linear(90, 50, bias))
    lora = perturb(grpo.LoRA(layers.double().requires_grad_(False), "[01]", rank=32))
    x = torch.randn(3, 5, 70, dtype=torch.float64, requires_grad=True)
    weights = [x, *lora.weights.values()]
    hidden = x
    for linear, (A, B) in lora.pairs.items():
        hidden = F.linear(hidden, linear.weight + 2 * B.double() @ A.double(), linear.bias)
    wanted = torch.autograd.grad(hidden.sin().sum(), weights)
    again = torch.utils.checkpoint.checkpoint(layers, x, use_reentrant=False)
    for output in (layers(x), again):
        got = torch.autograd.grad(output.sin().sum(), weights)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)

@pytest.mark.parametrize("change", [
    lambda lora: lora.load({name: weight + 1 for name, weight in lora.weights.items()}),
    lambda lora: [weight.add_(1) for weight in lora.weights.values()],
    lambda lora: torch.optim.AdamW(lora.weights.values(), lr=1.0).step()])
def test_the_sampler_draws_with_the_weights_that_there_are(change):
    """It keeps copies in bf16, as each token needs them: not those of the last step."""
    lora = make_lora("a", "b")
    linear = list(lora.pairs)[0].bfloat16()
    x = torch.ones(7, 3, dtype=torch.bfloat16)
    for weight in lora.weights.values():
        weight.grad = torch.ones_like(weight)
    with torch.no_grad():
        before = linear(x)
        change(lora)
        after = linear(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, linear(x))  # with gradients, nothing is kept
    assert not lora.copies

def test_saved_adapters_are_loaded_as_they_were(tmp_path):
    """`weight.data = saved` trained in bf16 what a bf16 file held, and on the CPU."""
    lora = make_lora("a", "b")
    lora.save(tmp_path, "some/model")
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 1  # safetensors wrote 0600, whatever the umask
    halved = {name: weight.bfloat16() for name, weight in lora.weights.items()}
    save_file(halved, tmp_path / "adapter_model.safetensors")
    places = [weight.data_ptr() for weight in lora.weights.values()]
    lora.load_folder(tmp_path)
    assert [weight.data_ptr() for weight in lora.weights.values()] == places
    saved = {name: weight.float() for name, weight in halved.items()}
    torch.testing.assert_close(lora.weights, saved, rtol=0, atol=0)

@pytest.mark.parametrize("setting, change", [
    (dict(lora_alpha=4), torch.clone), (dict(r=8), torch.clone), (dict(use_dora=True), torch.clone),
    (dict(target_modules="a"), torch.clone), ({}, lambda weight: weight[:, :1]), ({}, torch.log)])
def test_adapters_of_another_kind_are_refused(tmp_path, setting, change):
    """peft's own alpha came in at twice its strength, rank 1 was broadcast to 4, NaN was loaded."""
    lora = make_lora("a", "b")
    lora.save(tmp_path, "some/model")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    changed = {name: change(weight).contiguous() for name, weight in lora.weights.items()}
    save_file(changed, tmp_path / "adapter_model.safetensors")
    with pytest.raises(grpo.BadInput, match="must be of this program|shape, or is not finite"):
        lora.load_folder(tmp_path)

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
        assert weight.grad.isfinite().all()
        assert weight.grad.any()
    for weight in (*wrapper.ar.parameters(), *wrapper.dit.parameters()):
        assert not weight.requires_grad

def test_peft_and_transformers_load_the_adapters(tmp_path):
    """Both must give the policy that was trained, not the base, nor half of what it learned."""
    peft = pytest.importorskip("peft")
    ours, one, two = make_wrapper(), make_wrapper(), make_wrapper()
    rollout = roll(ours)
    perturb(grpo.LoRA(ours.policy, ours.lora_layers, rank=4)).save(tmp_path, "some/model")
    with warnings.catch_warnings(action="ignore"):  # peft's own calls
        peft.PeftModel.from_pretrained(one.policy, tmp_path)
        two.policy.load_adapter(tmp_path)
    trained, *others = [wrapper.compute_logprobs(rollout)[0] for wrapper in (ours, one, two)]
    assert (trained - rollout.logprobs).abs().max() > 0.01
    torch.testing.assert_close(others, [trained] * 2, rtol=0, atol=1e-5)

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
    """Drawn at random, one came 2 to 14 times in 40 steps; and a state might be lost."""
    turns = [turn for step in range(1, 29) for turn in choose(step)]  # 168
    assert turns[18:24] == choose(4) == choose(4, gpus=2) == choose(4, gpus=3)
    assert turns[20:40] == choose(2, batch_size=20)  # also where there are fewer prompts
    indices = [index for _, index in turns]
    laps = [tuple(indices[i:i + 8]) for i in range(0, 168, 8)]
    assert [sorted(lap) for lap in laps] == [list(range(8))] * 21
    assert len(set(laps)) == 21
    assert [index for _, index in choose(1, seed=1)] != indices[:6]

def test_no_two_steps_share_a_seed_nor_runs_nor_saved_pictures():
    """Runs of other --seeds drew the same samples, and trained those of the saved pictures."""
    seeds = list(range(8))  # of the saved pictures
    for seed in range(6):
        for step in range(1, 101):
            seeds += [turn[0] for turn in choose(step, seed=seed, batch_size=8)]
    assert len(set(seeds)) == 8 + 6 * 100 * 8

def test_the_first_adapters_come_from_the_seed_alone(tmp_path):
    """A run is its command, whatever was drawn before; GPUs would begin with different ones."""
    toy = make_toy()
    drawn = []
    for seed in (5, 5, 6):
        trainer = make_trainer(tmp_path / "run", wrapper=toy, seed=seed)
        drawn.append([weight.tolist() for weight in trainer.lora.weights.values()])
    assert drawn[0] == drawn[1] != drawn[2]

def make_reader(change):
    """A toy whose own load_prompts gives what `change` makes of the lines of a file."""
    def load_prompts(path):
        prompts = change(Path(path).read_text().splitlines())
        return prompts, [None] * len(prompts)

    return make_toy(load_prompts=load_prompts)

@pytest.mark.parametrize("given, told", [
    # What no file can hold, or no model read: the run died in step 4, or others were resumed.
    *[(dict(prompts=["a red fox", prompt]), re.escape(f"{prompt!r}")) for prompt in (
        "a\tfox", "a fox\n", "a\nfox", "a\rfox", "# a fox", " a fox", "a fox ", "",
        "<|tiny_image|>")],
    # A wrapper must read what a run writes: 8 prompts became 4, 2, 1; or a traceback after hours.
    (dict(wrapper=make_reader(lambda lines: [f"A photo of {line}" for line in lines])),
     "--wrapper: its load_prompts .*A photo of a red fox"),
    (dict(wrapper=make_reader(lambda lines: lines[::2])), "makes 2 other ones"),
    (dict(wrapper=make_reader(lambda lines: [json.loads(line) for line in lines])), "Expecting"),
    (dict(wrapper=make_toy(lora_layers="none")), "--wrapper: .*lora_layers match"),
    (dict(targets=[None] * 2), "zip.* shorter"),  # the third prompt was lost, in silence
    (dict(rewards={"bright": print}), "rewards: must be"), (dict(group_size=1), "--group_size")])
def test_a_start_that_fails_leaves_no_folder(tmp_path, given, told):
    """It did, and the mended cell of a notebook was refused: "must be a new folder"."""
    with pytest.raises(ValueError, match=told):
        make_trainer(tmp_path / "run", **given)
    assert not list(tmp_path.iterdir())

def test_two_trainers_never_share_a_new_folder(tmp_path, monkeypatch):
    """Of two with one --out one log was lost; two of one second had one name."""
    wrapper = make_toy()
    first, second = [make_trainer(tmp_path / "new", wrapper=wrapper, steps=1) for _ in range(2)]
    assert not list(tmp_path.iterdir())
    first.train()
    files = read_files(tmp_path)
    with pytest.raises(grpo.BadInput, match="--out.*exists"):
        second.train()
    assert read_files(tmp_path) == files
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo.time, "strftime", lambda name: name)  # all in one second
    unnamed = [grpo.GRPOTrainer(make_config(), wrapper, ["green"]).out for _ in range(2)]
    assert [out.parent for out in unnamed] == [tmp_path / "runs"] * 2
    assert unnamed[0] != unnamed[1]

def make_altered(name, change):
    """A toy of which the results of one method are changed."""
    method = getattr(make_toy(), name)
    return make_toy(**{name: lambda *args: change(method(*args))})

class Idle(Toy):
    """It has a layer that is never called as a module, as in nn.MultiheadAttention."""
    def __init__(self, path, config):
        super().__init__(path, config)
        self.policy[1].idle = torch.nn.Linear(8, 8)

@pytest.mark.parametrize("wrapper, told", [
    (make_altered("sample", lambda rollout: rollout._replace(prompts=rollout.prompts[::2] * 2)),
     "in the order p0 p0 p1 p1"),
    (make_altered("decode", lambda images: images + images[:len(images) // 8]), "image for each"),
    (make_toy(Idle, lora_layers=r"[13]|1\.idle"), "lora_layers .*1.idle.lora_A"),
    (make_toy(Idle, lora_layers=r"1\.idle"), "lora_layers .*1.idle.lora_A")])
def test_a_wrapper_that_breaks_its_contract_is_told(tmp_path, wrapper, told):
    """Samples in another order were trained in mixed groups, pictures were scored for others'
    tokens, and a layer was not trained, in silence; or "element 0 does not require grad"."""
    trainer = make_trainer(tmp_path / "run", wrapper=wrapper)
    with pytest.raises(grpo.BadInput, match=f"--wrapper: .*{told}"):
        trainer.train()

@algorithm
def test_prompts_rewards_and_tokens_stay_in_one_order(tmp_path):
    """A reward that reads the prompt must meet the image of that prompt, all the way."""
    targets = [tmp_path / f"{i}.png" for i in range(3)]
    for i, path in enumerate(targets):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(path)
    spy = mock.Mock(return_value=torch.arange(8))
    trainer = make_trainer(tmp_path / "run", {"spy": (spy, 1.0)}, targets=targets, steps=4)
    trainer.step = 3  # the prompts of step 4 are not in the order of the file
    trainer.log = trainer.save = mock.Mock()
    trainer.train_step = mock.Mock(return_value={})
    decode = trainer.wrapper.decode
    trainer.wrapper.decode = mock.Mock(wraps=decode)
    trainer.train()
    rollout, advantages = trainer.train_step.call_args.args
    images, prompts, targets = spy.call_args.args
    chosen, seeds = grpo.choose_prompts(4, 3, trainer.config)
    assert chosen != sorted(chosen)
    assert [target.getpixel((0, 0))[0] for target in targets] == np.repeat(chosen, 4).tolist()
    assert prompts == rollout.prompts == [trainer.prompts[i] for i in chosen for _ in range(4)]
    assert advantages.tolist() == approx([-1.1619, -0.3873, 0.3873, 1.1619] * 2, rel=1e-3)
    trainer.wrapper.decode.assert_called_once_with(prompts[::4], rollout.tokens, seeds)
    assert images == decode(prompts[::4], rollout.tokens, seeds)

def test_gradient_does_not_depend_on_the_micro_batch(tmp_path):
    """Each averaged on its own, or the last one alone, would give another gradient, or log."""
    trainer = make_trainer(tmp_path / "run", max_grad_norm=1e9, kl_coef=0.1)
    perturb(trainer.lora)
    rollout = roll(trainer.wrapper)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer.lora))
    whole = trainer.train_step(rollout, ADVANTAGES)  # 4 at a time
    for size in (1, 3, 8):
        trainer.config.micro_batch_size = size
        assert trainer.train_step(rollout, ADVANTAGES) == approx(whole, rel=1e-4, abs=1e-5)
    assert gradients[0].abs().max() > 1e-4
    for gradient in gradients:
        assert torch.allclose(gradient, gradients[0], rtol=1e-4, atol=1e-6)

def test_an_update_computes_activations_again():
    """Or GLM-Image needs another card; but not where no gradient is wanted."""
    wrapper = make_wrapper()
    grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank=4)
    passes = mock.Mock(return_value=None)
    wrapper.policy.model.language_model.layers[0].mlp.register_forward_hook(passes)
    rollout = roll(wrapper)
    assert passes.call_count == 2 * 1 + 4 * 2  # once a token
    logprobs, _ = wrapper.compute_logprobs(rollout)
    logprobs.sum().backward()
    assert passes.call_count == 10 + 2

@pytest.mark.parametrize("top_p, dtype, gap", [
    (None, torch.float32, 1e-5), (0.6, torch.float32, 1e-5), (None, torch.bfloat16, 0.05)])
def test_until_the_first_update_the_ratio_is_one_and_the_kl_0(tmp_path, top_p, dtype, gap):
    """Old log-probs from another pass, or a pass that forgets top-p, would start off 1. Another
    kernel for the reference rounds differently: in bf16 a kl of .001, and a pull."""
    wrapper = make_wrapper(dtype, top_p=top_p)
    trainer = make_trainer(tmp_path / "run", wrapper=wrapper, lr=5e-3, clip_range=0.0)  # all but 1
    once = trainer.train_step(roll(wrapper), ADVANTAGES)
    assert once["ratio_mean"] == 1
    assert once["kl"] == once["clip_frac"] == 0
    trainer.config.num_iterations = 2
    twice = trainer.train_step(roll(wrapper), ADVANTAGES)
    assert twice["ratio_mean"] != 1
    assert twice["clip_frac"] > 0
    assert 0 < twice["kl"] < 100
    assert max(once["sampler_gap"], twice["sampler_gap"]) < gap

@pytest.mark.parametrize("kl_coef, passes", [(0.1, 6), (0.0, 4)])
def test_the_reference_is_the_policy_with_its_adapters_off(tmp_path, kl_coef, passes):
    """With the last policy as reference the run drifts away; it is computed once a rollout."""
    trainer = make_trainer(tmp_path / "run", kl_coef=kl_coef, lr=0.0, num_iterations=2)
    perturb(trainer.lora)
    rollout = roll(trainer.wrapper)
    compute = trainer.wrapper.compute_logprobs
    with mock.patch.object(trainer.lora, "enabled", False), torch.no_grad():
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
def test_an_update_whose_gradient_is_not_finite_is_left_out(tmp_path, bad):
    """It would be in every weight and in Adam's moments for ever; the norm in the log tells."""
    one = make_trainer(tmp_path / "one", kl_coef=0.0, micro_batch_size=8)
    two = make_trainer(tmp_path / "two", kl_coef=0.0, micro_batch_size=8, num_iterations=2)
    rollout = roll(one.wrapper)
    one.train_step(rollout, ADVANTAGES)
    added = [bad, 0.0]  # to the gradients of the two updates
    last = list(two.lora.weights.values())[-1]
    last.register_hook(lambda gradient: gradient + added.pop(0))
    metrics = two.train_step(rollout, ADVANTAGES)
    assert not math.isfinite(metrics["grad_norm"])  # a mean without it would hide it
    torch.testing.assert_close(one.lora.weights, two.lora.weights, rtol=0, atol=0)

@algorithm
def test_settings_reach_the_update_and_the_log(tmp_path, monkeypatch):
    """A flag that is forgotten looks like one that does not help."""
    trainer = make_trainer(
        tmp_path / "run", steps=1, lr=0.003, warmup_steps=4, lora_rank=2, num_iterations=3,
        max_grad_norm=1e-3, clip_range=0.3, kl_coef=0.5)
    compute = grpo.compute_grpo_loss
    passes, norms = [], []

    def compute_grpo_loss(new, old, advantages, clip_range, ref, kl_coef):
        assert (clip_range, kl_coef) == (0.3, 0.5)
        passes.append(compute(new, old, advantages, clip_range, ref, kl_coef))
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
    assert group["lr"] == 0.003 / 4  # Adam's first updates would have full size
    assert group["weight_decay"] == 0
    for weight in trainer.lora.weights.values():
        assert min(weight.shape) == 2
        assert weight.grad is None  # no memory while the next step samples

@algorithm
def test_metrics_by_hand(tmp_path, monkeypatch, capsys):
    """A wrong spread, entropy or gap looks healthy for ever."""
    rewards = {"a": (lambda *_: [0.3] * 4 + [1, 2, 3, 6], 2.0), "b": (lambda *_: [7] * 8, 0.0)}
    trainer = make_trainer(tmp_path / "run", rewards, steps=1, micro_batch_size=3)
    forward = trainer.wrapper.forward
    trainer.wrapper.forward = lambda *inputs, **cache: 0 * forward(*inputs, **cache)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7 * 2**30)
    trainer.train()
    row = trainer.history[0]
    assert row["reward_std"] == approx(2 * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert row["entropy"] == approx(math.log(8))  # in nats: each of 8 codes is as likely
    assert row["gpu_gib_max"] == 7
    assert re.search("reward/a 1.65 .*reward/b 7 ", capsys.readouterr().out)  # a witness, too
    assert trainer.config.reward == "color"  # another trainer may have the same Config
    rollout = roll(trainer.wrapper)
    rollout.logprobs[5, 3] -= 0.1
    metrics = trainer.train_step(rollout, ADVANTAGES)
    assert metrics["sampler_gap"] == approx(0.1 / rollout.logprobs.numel(), rel=1e-2)

# --- The trainer: what a run leaves, and how it goes on -------------------------------------------
def test_a_step_is_printed_at_once_with_its_seconds(tmp_path, monkeypatch):
    """A pipe showed nothing for hours, and whoever waited did not know for how long."""
    trainer = make_trainer(tmp_path / "run", steps=2, save_every=1)
    sample = trainer.wrapper.sample = mock.Mock(wraps=trainer.wrapper.sample)
    monkeypatch.setattr(grpo.time, "perf_counter", lambda: sample.call_count)
    with mock.patch("builtins.print") as printed:
        trainer.train()
    assert [call.kwargs["flush"] for call in printed.call_args_list] == [True] * 3
    # A rollout takes a second here: that of a step, and of the pictures of the step before.
    assert [row["seconds"] for row in trainer.history] == [1, 2]
    assert printed.call_args_list[1].args[-1] == "left 0:00:01"

def test_files_reach_the_disk_before_they_take_their_name(tmp_path, monkeypatch):
    """After a loss of power a checkpoint could have 0 bytes; two that write one file ended in a
    bare FileNotFoundError."""
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda _: sizes.append((tmp_path / "f.part").stat().st_size))
    grpo.write_file(tmp_path / "f", b"x" * 5000)
    assert sizes == [5000]
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=FileNotFoundError("gone")))
    with pytest.raises(grpo.BadInput, match="/f: gone"):
        grpo.write_file(tmp_path / "f", b"y")
    assert (tmp_path / "f").read_bytes() == b"x" * 5000

def test_a_step_of_a_long_run_writes_a_line_and_no_more(tmp_path):
    """Every step wrote the whole log again: 28 GB in 10,000 steps. A NaN, of which a name may have
    the letters, is no JSON: pandas and jq refused the file."""
    trainer = make_trainer(tmp_path / "run", steps=200)
    trainer.out.mkdir()
    odd = {"loss": math.nan, "kl": math.inf, "grad_norm": -math.inf, "reward/NaN_free": 0.5}
    with mock.patch.object(grpo, "write_file") as write:
        for step in range(1, 101):
            trainer.log(step, dict(reward=step / 7) if step < 100 else dict(odd))
    assert not write.called
    *rows, last = rows_of(trainer.out)
    assert rows == [row | dict(seconds=0) for row in trainer.history[:-1]]
    assert [last[name] for name in odd] == [None, None, None, 0.5]
    trainer.save(1)
    assert [*torch.load(trainer.out / "checkpoint.pt")] == "trainer step adapter optimizer".split()

@pytest.mark.parametrize("change, kept", [
    (lambda rows: "\r\n\n".join(rows), [1, 2, 3, 4]), (lambda rows: "", [4]),
    (lambda rows: "".join(rows * 2 + ['{"step": 3, "rew']), [1, 2, 3, 4]),
    (lambda rows: "\n".join([*rows[:2], rows[2][:-1] + ', "{own": {"a": [1]}}']), [1, 2, 3, 4]),
    (lambda rows: "\n".join([rows[2], "{", "3", rows[0], '{"step": 4}', '{"n": 3}']), [1, 3, 4])])
def test_a_damaged_log_keeps_the_rows_that_it_has(tmp_path, change, kept):
    """Edited, or cut by another process, it ended the run, or its rows got other steps."""
    make_trainer(tmp_path / "run", wrapper=make_toy()).train()
    log = tmp_path / "run/metrics.jsonl"
    log.write_text(change(log.read_text().splitlines()))
    resumed = make_trainer(tmp_path / "run", wrapper=make_toy(), steps=4)
    resumed.train()
    assert [row["step"] for row in resumed.history] == kept
    assert [row["step"] for row in rows_of(resumed.out)] == kept

def test_the_first_gpu_alone_writes(tmp_path, monkeypatch, capsys):
    """Two processes that write one file tear each other's lines."""
    for name in ("all_reduce", "broadcast_object_list"):
        monkeypatch.setattr(torch.distributed, name, mock.Mock())
    monkeypatch.setattr(torch.distributed, "all_gather_object",
                        lambda seen, own: operator.setitem(seen, slice(2), [own] * 2))
    with mock.patch.multiple(grpo, RANK=1, WORLD_SIZE=2):
        trainer = make_trainer(tmp_path / "run", steps=2)
        trainer.train()
    assert len(trainer.history) == 2
    assert not [*(tmp_path / "run").iterdir()]
    assert not capsys.readouterr().out

def test_resume_is_bit_for_bit_also_after_a_full_disk(finished, tmp_path, monkeypatch):
    """It is told in one line, and the last checkpoint is safe."""
    out = tmp_path / "run"
    write = Path.write_bytes

    def write_bytes(path, data):
        if path.name != f"{name}.part" or len(trainer.history) < 2:
            return write(path, data)
        write(path, data[:len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    for name in ("checkpoint.pt", "adapter_model.safetensors"):
        trainer = make_trainer(out, num_iterations=2)
        with pytest.raises(grpo.BadInput, match=f"{name}: .*No space"):
            trainer.train()
        assert torch.load(out / "checkpoint.pt")["step"] == 1
    monkeypatch.undo()
    make_trainer(out).train()
    assert_same_run(finished, out)

@pytest.mark.parametrize("method, call", [
    ("compute_logprobs", 7),  # of the reference in step 2, with the adapters off
    ("compute_logprobs", 10),  # the second of an update, which adds to the gradients
    ("update_weights", 3),  # the first of two in step 2
    ("log", 1), ("log", 2), ("save_samples", 1), ("save_samples", 3), ("save", 4)])
def test_train_again_in_a_notebook_repeats_no_step(finished, tmp_path, method, call):
    """After Ctrl-C a step was made on top of itself, or its row never written, or written twice."""
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

def test_two_trainers_of_a_model_in_a_notebook_train_as_if_alone(tmp_path):
    """Both adapters acted at once; or the first went on with the second's, or its settings."""
    settings = dict(
        first=dict(save_every=1),
        second=dict(width=64, height=64, temperature=2.0, top_k=3, lora_rank=8, steps=2))
    wrapper = make_wrapper()
    first, second = [
        make_trainer(tmp_path / name, wrapper=wrapper, **settings[name]) for name in settings]
    first.config.steps = 1
    first.train()
    second.train()
    first.config.steps = 3
    first.train()
    for name in settings:
        make_trainer(tmp_path / "alone" / name, **settings[name]).train()
        assert_same_run(tmp_path / "alone" / name, tmp_path / name)

def test_what_a_reward_changes_for_all_does_not_matter(finished, tmp_path, monkeypatch, request):
    """Its file said bfloat16 for all new tensors, and no gradients: LoRA became bf16."""
    def rude(images, prompts, targets):
        torch.manual_seed(7)
        os.chdir("/")
        return grpo.reward_color(images, prompts)

    monkeypatch.chdir(tmp_path)  # and back, in the end
    monkeypatch.setitem(grpo.REWARDS, "color", rude)
    wrapper = make_wrapper()
    request.addfinalizer(lambda: torch.set_default_dtype(torch.float32))
    torch.set_default_dtype(torch.bfloat16)
    with torch.no_grad():
        make_trainer(tmp_path / "run", wrapper=wrapper, num_iterations=2).train()
    assert_same_run(finished, tmp_path / "run")

def test_a_resumed_run_keeps_its_weights_and_takes_what_is_typed(finished, tmp_path):
    """It went back to the --adapter that it began with; an --lr that is the default was lost."""
    first = torch.load(finished / "checkpoint.pt")["adapter"]
    trainer = make_trainer(tmp_path / "run", adapter=str(finished / "adapter_00003"), steps=1)
    trainer.train()
    resumed = make_trainer(tmp_path / "run", lr=grpo.Config.lr, steps=2)
    resumed.optimizer.step = mock.Mock()  # it moves no weight
    resumed.train()
    assert resumed.optimizer.param_groups[0]["lr"] == grpo.Config.lr != trainer.config.lr
    torch.testing.assert_close(resumed.lora.weights, trainer.lora.weights, rtol=0, atol=0)
    for name, weight in resumed.lora.weights.items():
        assert not torch.equal(weight, first[name])

# --- The machine room: halves that take turns on a GPU --------------------------------------------
def test_offloading_changes_nothing_and_holds_one_half_at_a_time(finished, tmp_path, monkeypatch):
    """31 GiB copied back were a tenth of a step; and Ctrl-C in a move left parts of both."""
    trainer = make_trainer(tmp_path / "run", offload="on", num_iterations=2)
    wrapper = trainer.wrapper
    # What is not on the GPU is NaN: the vision tower always, a half unless it was moved.
    values = {weight: weight.data for weight, _ in wrapper.cpu_copies}
    wrapper.cpu_copies = [(weight, torch.full_like(weight, math.nan)) for weight in values]
    for tensor in tensors_of(wrapper.policy.model.visual):
        tensor.data = torch.full_like(tensor, math.nan)
    moves, interrupts = [], []

    def is_on_gpu(half):
        return [weight.isfinite().all().item() for weight in half.parameters()]

    def to(half, device):
        moves.append("ar" if half is wrapper.ar else "dit")
        for weight in half.parameters():
            weight.data = values[weight]
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
def test_where_the_halves_wait_and_adapters_are_drawn(monkeypatch, offload, gib, where):
    """Drawn on two kinds of GPU, adapters differ, and their gradients would be added up."""
    load = mock.Mock(return_value=make_pipe())
    monkeypatch.setattr(diffusers.GlmImagePipeline, "from_pretrained", load)
    card = mock.Mock(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(grpo, "CUDA", True)
    monkeypatch.setattr(grpo, "DEVICE", torch.device("meta"))
    torch.backends.cuda.enable_cudnn_sdp(True)
    wrapper = grpo.GLMImageWrapper.from_pretrained("folder", make_config(offload=offload))
    assert load.call_args.kwargs["dtype"] == torch.bfloat16
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # its gradients can be NaN
    halves = tensors_of(wrapper.ar, wrapper.dit)
    assert {tensor.device.type for tensor in halves} == {where}
    assert not any(tensor.is_meta for tensor in tensors_of(wrapper.policy.model.visual))
    # The rotary tables go to the GPU once a pass: each of 30 layers fetched them, 19 GiB a step.
    assert all(table.is_meta for table in wrapper.pipe.transformer.rope(torch.zeros(1, 16, 8, 8)))
    before = torch.get_rng_state()
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank=4)
    assert all(weight.is_meta for weight in lora.weights.values())
    assert not torch.equal(torch.get_rng_state(), before)  # that of the CPU

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
    assert rollout.tokens.shape == rollout.logprobs.shape == (6, 2 * 1 + 4 * 2)
    assert rollout.logprobs.dtype == torch.float32
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
        grids = torch.tensor([[1, 4, 2], [1, 2, 1]])
        out = stock(
            input_ids=ids, attention_mask=torch.ones(1, L), use_cache=True,
            image_grid_thw=grids, images_per_sample=torch.tensor([2]))
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
    assert torch.allclose(ours, stock, atol=1e-6)
    assert torch.equal(ours > 0, stock > 0)
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
    assert max(sizes) == min(size, 3)
    assert sum(sizes) == 6 * 3 * (1 + (guidance > 1))
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
    with pytest.raises((IndexError, ValueError)):
        ours.decode(prompts, all_tokens, seeds=[7])  # pictures were dropped without a word

def test_the_shipped_model_takes_any_prompt_and_the_smallest_size():
    """A prompt with the word "image", then a mark, ended the run; at 32 pixels no draft was."""
    prompts = ["image bos eos pad unk grid_bos cls sep mask", "[PAD] [UNK] <|image|> <image> #"]
    config = make_config(width=32, height=32)
    wrapper = grpo.GLMImageWrapper.from_pretrained(grpo.TINY_MODEL, config)
    assert wrapper.policy.dtype == torch.float32  # on a CPU
    rollout = wrapper.sample(prompts, 1, [0, 1])
    assert rollout.tokens.shape == (2, 256 + 1)
    assert wrapper.decode(prompts, rollout.tokens, [0, 1])[0].size == (32, 32)

# --- What the user brings: prompts, rewards, wrappers ---------------------------------------------
def test_a_file_of_prompts(tmp_path):
    """A mark or a comment became a prompt; and `str.splitlines` cut one at what ends no line."""
    for name in "tu":
        Image.new("RGB", (5, 5)).save(tmp_path / f"{name}.png")
    odd = "{{plain}} #1\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e."
    text = f"\ufeff# no\n\n  # nor this\r\n  a red fox\t\tt.png\n{odd} \ra red fox\t u.png\t\n"
    (tmp_path / "p.txt").write_bytes(text.encode())
    prompts, targets = grpo.load_prompts(tmp_path / "p.txt")
    assert prompts == ["a red fox", odd, "a red fox"]
    assert targets == [tmp_path / "t.png", None, tmp_path / "u.png"]  # they lie beside it

@pytest.mark.parametrize("name, text, told", [
    *[("p.txt", f"# one\na red fox\n\n{line}\na blue fox\n", "p.txt, line 4: ") for line in (
        "a cat\tt.png\tu.png", "a cat\tand a blue bird", "a cat\tp.txt", "a cat\tcut.png",
        "a cat\tdeep.png")],
    ("p.txt", "a red fox\n\tt.png\n", "p.txt: "),
    ("p.csv", "prompt,target\n", "p.csv: "), ("p.jsonl", '{"prompt": "red"}', "p.jsonl: "),
    ("p.txt", "# nothing\n", "p.txt: "), ("p.txt", "\udcff", "p.txt: ")])
def test_prompts_that_are_none_and_wrong_targets_are_named(tmp_path, name, text, told):
    """Rows of a table became prompts, and so did paths, or were "too long"; 16 bits were white."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "t.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "t.png").read_bytes()[:60])
    Image.fromarray(np.full((4, 4), 9999, np.uint16)).save(tmp_path / "deep.png")
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(grpo.BadInput, match=told):
        grpo.load_prompts(tmp_path / name)

def test_rewards_are_loaded_with_their_weights(modules):
    """Two rewards of a file share what it loads, or its model would be loaded twice."""
    Path("lr=1").mkdir()  # its name and that of the file have marks of their own
    Path("lr=1/C:own.py").write_text("def a(*_): return 7\nb = a\n")
    rewards = grpo.load_rewards("color=0, mse,lr=1/C:own.py:a,lr=1/C:own.py:b = 5e-1")
    assert rewards["color"] == (grpo.reward_color, 0.0)  # only watched
    assert rewards["mse"] == (grpo.reward_mse, 1.0)
    assert rewards["a"] == (rewards["b"][0], 1.0)
    assert rewards["b"][1] == 0.5

@pytest.mark.parametrize("text", [
    "color=1,color=2", "a/r.py:f,b/r.py:f", "missing.py:f", "a/r:f", "a:f", "text.txt:f",
    "a/r.py:missing", "a/r.py:number", "color=much", "color=", "color=nan",
    "x,y.py:f", "other", "", "color,", "ends.py:f"])
def test_names_of_rewards_are_what_they_say_or_refused(modules, text):
    """The second of one name took the first's place, in silence. A file that parses the program's
    own flags ended it with exit code 0."""
    function = "number = 7\ndef f(*_): return range(4)\n"
    files = {"a/r.py": function, "b/r.py": function, "text.txt": function, "ends.py": "exit()"}
    for name, code in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(code)
    with pytest.raises(grpo.BadInput, match="--reward"):
        grpo.load_rewards(text)

def test_a_rewards_file_is_a_module_for_pools_and_neighbours(modules):
    """A pool could not pickle its function nor its class; a file beside it was not found."""
    Path("neighbour.py").write_text("from multiprocessing import get_context\n")
    Path("pooled.py").write_text("""
from neighbour import get_context
class Own(int): pass
def measure(prompt): return Own(len(prompt))
def f(images, prompts, targets):
    with get_context("fork").Pool(2) as pool:
        return pool.map(measure, prompts)
""")
    total, _ = grpo.compute_rewards(*blank(2), grpo.load_rewards("pooled.py:f"))
    assert total.tolist() == [8, 8]

def test_files_of_rewards_hide_nothing_and_are_hidden_by_nothing(modules):
    """Two of one stem, a toy.py beside examples/toy.py, names of packages and of no module were
    refused; and a file that imports a package got one of the same name in its folder."""
    names = ["my/rewards", "your/rewards", "random", "wave", "toy", "reward.v2"]
    Path("reward").mkdir()
    for number, name in enumerate(names):
        Path(name).parent.mkdir(exist_ok=True)
        Path(f"{name}.py").write_text(f"def f{number}(images, *_): return [{number}] * len(images)")
    Path("my/imports.py").write_text("import colorsys, wave\ndef g(*_): return wave.open, colorsys")
    Path("my/colorsys.py").write_text("1 / 0\n")
    text = ",".join(f"{name}.py:f{number}=1" for number, name in enumerate(names))
    rewards = grpo.load_rewards(text)
    total, _ = grpo.compute_rewards(*blank(3), rewards)
    assert total.tolist() == [sum(range(6))] * 3
    assert grpo.import_name("my/imports.py:g")()[0] is __import__("wave").open
    again = grpo.load_rewards(text)
    assert [again[name][0] is rewards[name][0] for name in rewards] == [True] * 6  # imported once

@pytest.mark.parametrize("code, error", [
    ("import no_such_package", "ModuleNotFoundError"), ("{}['key']", "KeyError"),
    ("torch", "NameError"), ("(", "SyntaxError"), ("assert 1 > 2", "AssertionError")])
@pytest.mark.parametrize("flag, name", [("--reward", "f"), ("--wrapper", "F")])
def test_a_bug_in_a_file_of_ones_own_is_shown_with_its_place(command, code, error, flag, name):
    """`the model cannot read 'A red fox': 'A red fox'`: one line, and no place."""
    Path("buggy.py").write_text(f"x = 1\n{code}\n")
    code, _, printed = command(f"{flag} buggy.py:{name} --out run")
    *above, last = printed.splitlines()
    assert code == 2
    assert re.search(rf"error: {flag} \S*buggy.py:{name}: .*{error}", last)
    assert any('buggy.py", line 2' in line for line in above)
    assert not Path("run").exists()
    # Mended, it is imported anew. Python takes a file of equal size and second for the same file.
    Path("buggy.py").write_text(f"def {name}(*images, **others): pass\n")
    assert grpo.import_name(f"buggy.py:{name}")

# --- The command line: more of it, in processes, is in .ci/test_command.py ------------------------
def test_threads_are_told_not_to_spin_on_before_torch_is_imported(tmp_path):
    """On a busy machine the quick start took ten times as long; a user's own word stands."""
    (tmp_path / "torch.py").write_text("import os, sys\nsys.exit(os.environ['GOMP_SPINCOUNT'])\n")
    bare = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    for own, count in (({}, "10000"), (dict(GOMP_SPINCOUNT="7"), "7")):
        env = bare | own | dict(PYTHONPATH=str(tmp_path))
        argv = [sys.executable, HERE / "grpo.py"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True)
        assert done.stderr == f"{count}\n"

def test_the_command_trains_the_tiny_model_whatever_card_is_there(monkeypatch):
    """On a large card it downloaded 35 GB; and LOCAL_RANK, not RANK, is the GPU."""
    use = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", use)
    with mock.patch.dict(os.environ, RANK="11", LOCAL_RANK="3"):
        names = runpy.run_path(grpo.__file__)
    config = names["parse_args"]([])
    assert Path(config.model) == HERE / "examples/tiny-glm-image"
    assert (config.steps, config.lr, config.width) == (20, 2e-3, 128)
    with pytest.raises(InterruptedError):
        names["main"]([])
    use.assert_called_once_with(torch.device("cuda", 3))

def test_a_setting_of_the_command_comes_from_the_last_place_that_has_it(modules):
    """Config, program, wrapper, model's grpo.json or run's config.json, what is typed."""
    Path("mine.py").write_text("class Mine:\n    defaults = dict(steps=3, lr=3.0, seed=3)\n")
    Path("grpo.json").write_text(json.dumps(dict(lr=4.0, seed=4)))
    Path("config.json").write_text(json.dumps(dict(steps=6, lr=6.0, seed=6, batch_size=8)))
    defaults = dict(wrapper="mine.py:Mine", model=".", group_size=2, steps=2, lr=2.0, seed=2)
    for resume, values in ([], (0.01, 2, 3, 4.0, 5)), (["--resume=."], (0.01, 2, 6, 6.0, 5)):
        config = grpo.parse_args([*resume, "--seed=5"], **defaults)
        got = config.kl_coef, config.group_size, config.steps, config.lr, config.seed
        assert got == values
    # The grpo.json of the tiny GLM-Image is not for a wrapper that names no model.
    config = grpo.parse_args(["--wrapper=mine.py:Mine"])
    assert (config.lr, config.warmup_steps) == (3.0, grpo.Config.warmup_steps)

@pytest.mark.parametrize("name, value", [
    ("width", 48), ("height", 80), ("lr", math.nan), ("max_grad_norm", math.inf),
    ("group_size", 1), ("save_every", 0), ("num_iterations", 0), ("temperature", 0.0),
    ("kl_coef", -0.1), ("top_p", 1.5), ("seed", -1), ("seed", 2**63), ("prompts", ""),
    ("resume", "")])
def test_settings_that_would_waste_hours_are_refused(name, value):
    """A group of one learns nothing, 48 pixels are no whole tokens, a seed may overflow."""
    limits = dict.fromkeys("kl_coef lr clip_range guidance top_k seed".split(), 0)
    limits |= dict(temperature=1, top_p=1, max_grad_norm=1)
    config = make_config(**limits)  # they are welcome
    setattr(config, name, value)  # as a notebook may, later
    with pytest.raises(grpo.BadInput, match=f"--.*{name}"):
        grpo.GRPOTrainer(config, make_toy(), ["red"])

def test_a_run_keeps_where_its_files_are(modules, tmp_path):
    """Resumed in another directory, it looked for its model on the hub. In processes, and with
    wrappers, this is tested in .ci."""
    for name in ("weights", "wrapper.py", "adapter", "prompts"):
        Path(name).write_text("class Own: pass")
    config = grpo.parse_args(
        "--model weights --wrapper wrapper.py:Own --adapter adapter --prompts prompts --out run "
        "--reward color,reward.py:f=.5".split())
    kept = [config.model, config.wrapper, config.adapter, config.prompts, config.out]
    assert kept == [f"{tmp_path}/{name}" for name in (
        "weights", "wrapper.py:Own", "adapter", "prompts", "run")]
    assert config.reward == f"color,{tmp_path}/reward.py:f=.5"
    assert grpo.parse_args(["--model", "zai-org/GLM-Image"]).model == "zai-org/GLM-Image"
    for name in ("out", "resume", "adapter", "prompts", "wrapper"):  # of a variable that is not set
        with pytest.raises(grpo.BadInput, match=f"--{name} must not be ''"):
            grpo.parse_args([f"--{name}=", "--resume="])

@pytest.mark.parametrize("settings", [
    dict(stepz=3), dict(steps=2.5), dict(steps=None), dict(offload="never"), dict(lr=[1e-3])])
def test_settings_of_a_file_are_told_with_their_place(refused, settings):
    """They blamed a grpo.json that was not there, or a traceback came after a folder was made."""
    (name, value), = settings.items()
    Path("mine.py").write_text(f"class Mine:\n    defaults = {settings}\n")
    Path("model").mkdir()
    Path("model/grpo.json").write_text(json.dumps(settings))
    for flags, place in (("--wrapper mine.py:Mine", "mine.py:Mine"),
                         ("--model model", "model/grpo.json")):
        error = refused(f"{flags} --out run")
        assert place in error and name in error, error
        assert value is None or str(value) in error

@pytest.mark.parametrize("value, told", [
    ("nan", "2"), ("1 / 0", "division by zero"), ("exit()", "A reward .* SystemExit.*")])
def test_whatever_ends_a_run_its_last_line_says_how_to_go_on(modules, capsys, value, told):
    """A NaN or a bug of the user's reward ended step 57, and no line said what to do. With an exit
    code of 0, a scheduler took the run for done."""
    Path("mine.py").write_text(f"""
from math import nan
steps = []
def f(images, *_):
    steps.append(1)
    return [1 if len(steps) < 3 else {value}] * len(images)
""")
    with pytest.raises((SystemExit, ZeroDivisionError), match=told) as caught:
        grpo.main((TOY + "--reward mine.py:f --out run").split())
    notes = getattr(caught.value, "__notes__", [])  # Python prints them last
    said = "\n".join([str(caught.value), *notes, capsys.readouterr().err])
    file = os.path.relpath(HERE / "grpo.py")  # from here
    assert said.strip().endswith(f"To go on: python {file} --resume '{Path('run').absolute()}'")
    assert len(rows_of(Path("run"))) == 2

def test_help_shows_each_flag_once(command):
    """And no `(default: None)`."""
    _, printed, _ = command("--help")
    for name in grpo.Config.__dataclass_fields__:
        assert len(re.findall(rf"^  --{name.replace('_', '-')} ", printed, re.MULTILINE)) == 1, name
    assert "None" not in printed and "_size " not in printed

def test_prompts_are_kept_in_the_folder_of_a_run_and_mended_there(command, tmp_path):
    """A ninth one without a color stops it where it is met; the mended file was refused, or, where
    the job types --prompts, the mended word was lost in silence."""
    Path("data").mkdir()
    Image.new("RGB", (8, 8)).save("data/t.png")
    Path("data/p.txt").write_text("# nine\n" + "a red fox\tt.png\n" * 8 + "a grene {} '#1'\n")
    flags = TOY + f"--prompts data/p.txt --steps 6 --out run --resume {tmp_path}/run"
    code, _, error = command(flags)
    assert code == 2
    assert os.environ["RUN"] == f"{tmp_path}/run"  # for rewards that keep files
    assert "none of red, orange, yellow" in error and "in \"a grene {} '#1'\"" in error
    assert 0 < len(rows_of(tmp_path / "run")) < 6
    Path("data/p.txt").unlink()
    prompts = tmp_path / "run/prompts.txt"
    target = tmp_path / "data/t.png"
    assert prompts.read_text() == f"a red fox\t{target}\n" * 8 + "a grene {} '#1'\n"
    mended = "# mended\n" + prompts.read_text().replace("grene", "green") + " \n"
    prompts.write_text(mended)
    code, printed, _ = command(flags)
    assert code == 0
    assert f"prompts: those of {prompts}" in printed
    assert prompts.read_text() == mended  # comments, too
    assert len(rows_of(tmp_path / "run")) == 6

@pytest.mark.parametrize("flags, told", [
    ("--steps 2", "has 3 steps of GRPOTrainer, and 2 of GRPOTrainer are asked for"),
    ("--lora-rank 8", "checkpoint.pt is of another model, wrapper or --lora_rank"),
    ("--wrapper less.py:Less", "or --lora_rank: the adapter is of other layers"),
    ("--batch-size 4", "a run keeps"), ("--out other", "a run keeps"),
    ("--adapter run/adapter_00003", "a run keeps"), ("--prompts missing.txt", "a run keeps"),
    ("--reward other.py:f", "of a file that is there")])
def test_a_resume_that_is_refused_changes_nothing(command, refused, flags, told):
    """--lora-rank 8 stayed in config.json: no --resume worked any more; prompts came twice; of
    layers that a deeper model has the first were taken, in silence."""
    Path("less.py").write_text(
        "from examples.toy import Toy\nclass Less(Toy):\n    lora_layers = '3'\n")
    assert command(TOY + "--out run")[0] == 0
    assert told in refused(f"--resume run {flags}")

def test_a_run_that_is_not_whole_cannot_be_resumed(command, refused):
    """It began at step 1, over its own files; or a traceback."""
    assert command(TOY + "--out run")[0] == 0
    Path("run/checkpoint.pt").unlink()
    assert "checkpoint.pt" in refused("--resume run --steps 5")
    for text in ('{"model": "toy", "wra', '["steps"]', '{"stepz": 3}'):
        Path("run/config.json").write_text(text)
        assert "config.json: " in refused("--resume run")
    Path("run/config.json").unlink()
    assert "must be the folder of a run" in refused("--resume run")

@pytest.mark.parametrize("name", ["bright", "color"])
def test_a_run_of_a_notebook_is_resumed_there_alone(refused, tmp_path, name):
    """The command went on with its own `color`: a reward of .996 became .257."""
    rewards = {name: (lambda images, *_: range(len(images)), 1.0)}
    own = make_toy(type("Own", (Toy,), dict(__module__="__main__")))
    make_trainer(tmp_path / "run", rewards, own).train()
    assert f"--reward {name}()" in refused("--resume run --steps 5")
    assert "--wrapper Own(): must be" in refused("--resume run --steps 5 --reward color")
    trainer = make_trainer(tmp_path / "run", rewards, own, prompts=["green"], steps=5)
    trainer.train()
    assert [row[f"reward/{name}"] for row in rows_of(trainer.out)] == [3.5] * 5
    assert (trainer.out / "prompts.txt").read_text() == "green\n"
    shutil.rmtree(trainer.out)
    trainer.config.steps = 7
    trainer.train()
    assert [row["step"] for row in rows_of(trainer.out)] == [1, 2, 3, 4, 5, 6, 7]

@algorithm
def test_the_first_command_learns_and_leaves_what_the_readme_says(tmp_path, monkeypatch):
    """Rewards rise by far more than luck, and all pictures but one at most get their color."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    argv = [sys.executable, HERE / "grpo.py", *"--group-size 4 --out out".split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    bars = re.split(r"[\r\n]|\x1b\[A", done.stderr)  # of the libraries, while they load the model
    # The second is bitsandbytes, where it is installed.
    known = "Loading ", "Failed to load CPU gemm_4bit"
    assert [bar for bar in bars if bar and not bar.startswith(known)] == []
    assert done.returncode == 0
    assert re.match(r"model: .*/tiny-glm-image on cpu\n"
                    "files: .*/out, at step 0 of 20\nstep 1 ", done.stdout)
    rows = rows_of(out)
    assert np.isfinite([list(row.values()) for row in rows]).all()
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[:5]) < 0.80
    assert np.mean(rewards[-5:]) > 0.92
    sheet = Image.open(out / "samples_00020.png")
    pictures = [sheet.crop((i * 128, 0, i * 128 + 128, 128)) for i in range(8)]
    prompts, _ = grpo.load_prompts(None)
    assert sorted(grpo.reward_color(pictures, prompts))[1] > 0.85
    # A step more, and a run that begins with what it has learned.
    grpo.main("--resume out --steps 21".split())
    names = {"config.json", "prompts.txt", "metrics.jsonl", "checkpoint.pt"}
    for step in (0, 10, 20, 21):
        names |= {f"adapter_{step:05d}", f"samples_{step:05d}.png"}
    assert {path.name for path in out.iterdir()} == names
    grpo.main("--adapter out/adapter_00020 --steps 1 --out more".split())
    again = Path("more/samples_00000.png").read_bytes()
    assert again == (out / "samples_00020.png").read_bytes()
