"""Tests of grpo.py: identities, mostly, on small models. No network, no GPU: `python -m pytest -q`.
They stand in the order of grpo.py. While you change something, run what looks at it; at the end, run all:
    advantages, loss    pytest -q -k "advantages or clip or k3 or ratio or gradient or logprob or settings"
    rewards, prompts    pytest -q -k "reward or pictures or prompts"
    adapters            pytest -q -k "lora or adapters"
    rollout, update     pytest -q -k "gradient or update or step or order or metrics or ratio or reference"
    files               pytest -q -k "written or resume or cell or picture or kill or gpu or folder"
    sampling, painting  pytest -q -k "position or sampl or chance or paint or hal or card or shipped"
    the command line    pytest -q -k "command or config or wrapper" test_grpo.py .ci/test_command.py
"""
import copy, functools, inspect, json, math, os, re, runpy, shutil, subprocess, sys, warnings
from pathlib import Path
from unittest import mock

# The tests compare with tensors on the CPU, and start processes by forking, which CUDA does not survive.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import diffusers, pytest, torch
import numpy as np
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

import grpo
from examples.make import tiny as make_tiny

# A library that renames an argument warns first: that is a failing test here, and never a user's.
pytestmark = [pytest.mark.filterwarnings("error::FutureWarning"),
              pytest.mark.filterwarnings("error::DeprecationWarning")]

# Tests that pin the published algorithm: `pytest -m "not algorithm"` leaves them out, to test a change of it.
warnings.filterwarnings("ignore", "Unknown pytest.mark.algorithm")
algorithm = pytest.mark.algorithm

torch.set_num_threads(1)  # two would wait for each other, busily, where the machine does other work
HERE = Path(__file__).parent
PROMPTS = ["a red fox on a wall", "yellow"]  # of different length, so that one of them is padded
WRAPPER = grpo.GLMImageWrapper
SMALL_MODEL = HERE / "examples/tiny-glm-image"

# --- What the tests are made of -----------------------------------------------------------------------------
def make_config(**settings):
    """64 wide and 128 high, which is not square, and a temperature that is not 1."""
    own = dict(width=64, height=128, temperature=0.9, batch_size=2, steps=4, micro_batch_size=4,
               lr=2e-3, decode_steps=1, guidance=1.0, model="small")
    return grpo.Config(**own | settings)

def make_pipe():
    """The small GLM-Image with random weights, always the same, and more entropy than it comes with."""
    torch.manual_seed(0)
    pipe = make_tiny.make_models(grpo.COLORS)
    torch.nn.init.ones_(pipe.vision_language_encoder.model.language_model.norm.weight)
    return pipe

def make_wrapper(dtype=torch.float32, config=None, **settings):
    """Its draft has 2 x 1 tokens, not 22 x 11: quick, and not a square, where rows could pass for columns."""
    pipe = make_pipe()
    pipe.vision_language_encoder.to(dtype)
    pipe.processor._get_target_shape = lambda height, width: (
        height // 32, width // 32, height // 64, width // 64)
    return WRAPPER(pipe, config or make_config(**settings))

def make_adapted(dtype=torch.float32, **settings):
    """A model of random weights, and adapters that do something."""
    wrapper = make_wrapper(dtype, **settings)
    return wrapper, perturb(grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank=4))

def perturb(lora):
    """Adapters that do something: B starts at 0."""
    torch.manual_seed(5)
    for weight in lora.weights.values():
        weight.data.add_(0.1 * torch.randn_like(weight))
    return lora

def make_trainer(folder, rewards=None, **settings):
    """A trainer of random weights: 2 prompts x 4 images, five steps; or of the run that is in the folder."""
    own = dict(out=str(folder), temperature=None, steps=5, save_every=2)
    if os.path.exists(f"{folder}/checkpoint.pt"):
        own = json.loads(Path(folder, "config.json").read_text()) | dict(resume=str(folder))
    config = make_config(**own | settings)
    prompts = ["a red fox", "some yellow thing here", "green"]
    targets = [Path(folder or ".").absolute().parent / f"target{i}.png" for i in range(3)]
    for i, target in enumerate(targets):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(target)
    rewards = rewards or grpo.load_rewards("color")
    return grpo.GRPOTrainer(config, make_wrapper(config=config), prompts, rewards, targets)

def make_rollout(trainer, step=1):
    """What `train` hands to `train_step`: a rollout and its advantages."""
    config = trainer.config
    places, seeds = grpo.choose_prompts(step, len(trainer.prompts), config)
    prompts = [trainer.prompts[i] for i in places]
    rollout = trainer.wrapper.sample(prompts, config.group_size, seeds)
    images = trainer.wrapper.decode(prompts, rollout.tokens, seeds)
    rewards, _ = grpo.compute_rewards(images, rollout.prompts, [None] * len(images), trainer.rewards)
    return rollout, grpo.compute_advantages(rewards, config.group_size)

def roll(wrapper, group_size=3):
    """A Rollout of PROMPTS."""
    return wrapper.sample(PROMPTS, group_size, seeds=[1, 2])

@pytest.fixture(scope="session")
def sampled():
    """Two groups of three samples."""
    return roll(make_wrapper())._replace(allowed=None)

@pytest.fixture(scope="session")
def loaded():
    """The shipped model, loaded once."""
    return WRAPPER.from_pretrained(SMALL_MODEL, make_config()).pipe

@pytest.fixture
def shipped(loaded):
    """shipped(**settings): a copy of the shipped model in a wrapper."""
    return lambda **settings: WRAPPER(copy.deepcopy(loaded), make_config(**settings))

def tensors_of(*modules):
    """Parameters and buffers."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

def gradient_of(trainer):
    """All of it, in one vector."""
    return torch.cat([weight.grad.flatten() for weight in trainer.lora.weights.values()])

def blank(n):
    """Images, prompts and targets for rewards that do not look at them."""
    return [Image.new("RGB", (8, 8)) for _ in range(n)], [f"prompt {i}" for i in range(n)], [None] * n

def step_of(out):
    """The step that a checkpoint holds."""
    return len(torch.load(out / "checkpoint.pt", weights_only=True)["history"])

def rows_of(out):
    """metrics.jsonl without what the clock says."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key != "seconds"} for row in rows]

def assert_same_run(one, other):
    """Every file of two runs, bit for bit, but for seconds and for settings without an effect."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.*"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*.*"))
    states = []
    for out in (one, other):
        state = torch.load(out / "checkpoint.pt", weights_only=True)
        config = json.loads((out / "config.json").read_text()) | dict(offload=None)
        state |= dict(history=rows_of(out), config=config)
        states.append(json.dumps(state, default=torch.Tensor.tolist, sort_keys=True))
    assert states[0] == states[1]
    for name in names:
        if name.name not in ("checkpoint.pt", "metrics.jsonl", "config.json"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name

def adapter_of(out, step):
    """What was saved beside the pictures of this step."""
    return load_file(out / f"adapter_{step:05d}/adapter_model.safetensors")

def assert_files(out, *steps):
    """All that a run leaves, with pictures of these steps."""
    names = [name for step in steps for name in (f"adapter_{step:05d}", f"samples_{step:05d}.png")]
    files = {".lock", "config.json", "checkpoint.pt", "metrics.jsonl"}
    assert {path.name for path in out.iterdir()} == {*files, *names}

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of five steps."""
    out = tmp_path_factory.mktemp("finished") / "run"
    make_trainer(out).train()
    return out

# --- Settings -----------------------------------------------------------------------------------------------
def test_numbers_that_would_waste_hours_are_refused():
    """A group of one learns nothing, 48 pixels are no whole tokens; but 0 and 1 are welcome for fractions."""
    whole = dict(kl_coef=0, lr=0, clip_range=0, guidance=0, temperature=1, top_p=1, max_grad_norm=1)
    grpo.check_settings(make_config(**whole))
    grpo.check_settings(make_config(top_k=0, seed=0))
    for name, wrong in dict(width=48, height=80, lr=math.nan, top_p=math.nan, group_size=1, save_every=0, seed=-1,
                            temperature=0.0, num_iterations=0, kl_coef=-0.1, max_grad_norm=math.inf, prompts="",
                            resume="").items():
        with pytest.raises(grpo.BadInput, match=f"--.*{name}"):
            grpo.check_settings(make_config(**{name: wrong}))
    with mock.patch.object(grpo, "WORLD_SIZE", 2), pytest.raises(grpo.BadInput, match="--batch_size .* 2"):
        grpo.check_settings(make_config(batch_size=3))

@pytest.mark.parametrize("gib", [22, 80])
def test_the_first_command_trains_the_tiny_model_whatever_card_is_there(monkeypatch, gib):
    """On a large card it once downloaded 35 GB; and RANK counts over machines: LOCAL_RANK is the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock(side_effect=InterruptedError))
    look = mock.Mock(return_value=mock.Mock(total_memory=gib * 2**30))  # the free memory is other programs', too
    monkeypatch.setattr(torch.cuda, "get_device_properties", look)
    with mock.patch.dict(os.environ, RANK="11", LOCAL_RANK="3"):
        names = runpy.run_path(grpo.__file__)
    config = names["parse_args"]("--group-size 4".split())
    assert Path(config.model) == SMALL_MODEL and (config.steps, config.lr, config.width) == (20, 2e-3, 128)
    with pytest.raises(InterruptedError):
        names["main"]()
    gpu = torch.device("cuda", 3)
    assert names["GPU_GIB"] == gib and names["DEVICE"] == gpu
    look.assert_called_once_with(gpu)
    torch.cuda.set_device.assert_called_once_with(gpu)

def test_a_setting_comes_from_the_last_place_that_has_it(tmp_path):
    """Config, the program's defaults, the model's grpo.json or the resumed run's config.json, what is typed."""
    (tmp_path / "grpo.json").write_text(json.dumps(dict(lr=3.0, seed=3, steps=3)))
    model = f"--model={tmp_path}"
    config = grpo.parse_args([model, "--seed", "4"], lr=2.0, steps=2, clip_range=0.5)
    assert (config.kl_coef, config.clip_range, config.lr, config.seed) == (0.01, 0.5, 3.0, 4)
    (tmp_path / "config.json").write_text(json.dumps(vars(config) | dict(steps=7, out=None)))
    resumed = grpo.parse_args([f"--resume={tmp_path}", "--lr", "9"])
    assert (resumed.model, resumed.steps, resumed.lr, resumed.seed) == (str(tmp_path), 7, 9.0, 4)
    for typed in ("--adapter=a", "--out=b"):  # without a word they would have no effect
        with pytest.raises(grpo.BadInput, match="--resume"):
            grpo.parse_args([f"--resume={tmp_path}", typed])
    for wrong in ('{"lrr": 1}', "{"):
        (tmp_path / "grpo.json").write_text(wrong)
        with pytest.raises(grpo.BadInput, match="grpo.json"):  # a typing error was a setting without effect
            grpo.parse_args([model])

def test_saved_paths_do_not_depend_on_the_directory(tmp_path, monkeypatch):
    """--resume from elsewhere said that the hub has no such model. A hub id stays as it is."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "m"):
        Path(name).mkdir()
    Path("p.txt").write_text("red")
    config = grpo.parse_args("--model m --adapter a --prompts p.txt --reward color,r/x.py:f=.5".split())
    assert [config.model, config.adapter, config.prompts] == [str(tmp_path / name) for name in ("m", "a", "p.txt")]
    assert config.reward == f"color,{tmp_path}/r/x.py:f=.5"
    assert grpo.parse_args("--model zai-org/GLM-Image".split()).model == "zai-org/GLM-Image"

# --- The maths ----------------------------------------------------------------------------------------------
@algorithm
def test_advantages_by_hand():
    """The mean of six 0.3s is not 0.3 in floats: over a tiny std that was an advantage of 0.03, not of 0."""
    groups = np.array([
        [1, 2, 3, 4, 10, 14], [7, 6, 5, -1, 0, 0], [0, 0, 0, 0, 0, 1e-3], [0.3] * 6, [-7.7] * 6])
    by_hand = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, ddof=1, keepdims=True) + 1e-6)
    got = grpo.compute_advantages(groups.flatten().tolist(), 6).view(5, 6)
    assert got.dtype == torch.float32
    assert got[:3].tolist() == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in by_hand[:3]]
    assert not got[3:].any()
    small = grpo.compute_advantages([0, 0, 0, 1e-5], 4)  # a small spread is a spread
    assert small.tolist() == pytest.approx([-1.25 / 3] * 3 + [1.25], rel=1e-4)

@pytest.mark.parametrize("ratio, advantage, clip_range, surrogate, moves", [
    (1.5, 1.0, 0.2, 1.2, False),  # better and already much likelier: clipped, no gradient
    (1.5, -1.0, 0.2, -1.5, True),  # worse but much likelier: the full push back
    (0.5, 1.0, 0.2, 0.5, True),  # better but much rarer: the full pull
    (0.5, -1.0, 0.2, -0.8, False),  # worse and already much rarer: clipped, no gradient
    (1.15, 1.0, 0.1, 1.1, False), (0.85, -1.0, 0.1, -0.9, False),  # 0.1 alone clipped at .9 and 1.2
    (1.3, 1.0, 0.4, 1.3, True), (0.7, -1.0, 0.4, -0.7, True), (1.3, 1.0, 0, 1.0, False)])  # 0 is a bound too

@algorithm
def test_the_clip_by_hand(ratio, advantage, clip_range, surrogate, moves):
    """Guards the min: with max, or with the clip alone, two of the first four are wrong."""
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = grpo.compute_grpo_loss(new, torch.zeros(1, 1), torch.tensor([advantage]), clip_range)
    loss.backward()
    assert new.grad.any() == moves and metrics == pytest.approx(dict(
        loss=-surrogate, policy_loss=-surrogate, ratio_mean=ratio, clip_frac=float(not moves)))  # and no KL

@algorithm
def test_the_ratio_is_of_a_token():
    """The ratio of a whole sequence (GSPO) has a loss of -0.866 here, and passed all other tests."""
    new = torch.tensor([[1.5, 0.5]]).log()
    loss, metrics = grpo.compute_grpo_loss(new, torch.zeros(1, 2), torch.ones(1))
    assert loss.item() == pytest.approx(-(1.2 + 0.5) / 2)
    assert metrics["ratio_mean"] == pytest.approx(1.0) and metrics["clip_frac"] == 0.5

@pytest.mark.parametrize("delta, kl", [
    (0.0, 0.0), (1.0, math.e - 2), (-2.0, math.exp(-2) + 1), (-1000.0, 999.0),
    (1e-5, 5e-11), (-1e-5, 5e-11),  # exp(delta) - delta - 1 rounds to 0, or to a thousand times as much
    (1000.0, math.exp(20) - 21)])  # clamped at 20: exp(1000) is inf, and so the loss of the whole batch

@algorithm
def test_k3_by_hand_and_at_the_extremes(delta, kl):
    """Guards the sign of ref - new, in the value and in the gradient, and a KL without weight in the log."""
    new = torch.zeros(1, 1, requires_grad=True)
    loss, metrics = grpo.compute_grpo_loss(new, new, torch.ones(1), 0.2, torch.tensor([[delta]]), kl_coef=0.5)
    gradient, = torch.autograd.grad(loss, new)
    assert metrics["kl"] == pytest.approx(kl, rel=0.02 if abs(delta) == 1e-5 else 1e-5)
    assert metrics["loss"] == loss.item() == pytest.approx(0.5 * metrics["kl"] - 1)
    assert metrics["policy_loss"] == -1  # `loss += kl` put the KL into it
    slope = 1 - math.exp(delta) if delta < 20 else 0
    assert gradient.item() + 1 == pytest.approx(0.5 * slope, rel=0.01, abs=1e-7)
    _, free = grpo.compute_grpo_loss(new, new, torch.ones(1), ref_logprobs=torch.tensor([[delta]]), kl_coef=0)
    assert free["kl"] == metrics["kl"] and free["loss"] == -1

def test_groups_of_one_are_refused():
    """Their std is NaN: every weight would become NaN after a day, or nothing would be learnt."""
    for size in (1, 0):
        with pytest.raises(grpo.BadInput, match="group_size"):
            grpo.compute_advantages([1.0, 2.0], size)

@pytest.mark.parametrize("offset", [1e8, -3e9])
def test_advantages_do_not_feel_a_constant(offset):
    """In single precision 1e8 + 0.25 is 1e8: "all groups had equal rewards". Equal ones are exactly 0 anywhere."""
    rewards = torch.tensor([0, 0.25, 0.5, 0.75, 0.1, 0.9, 0.4, 0.4]).double()
    shifted = {"a": (lambda *_: (rewards + offset).tolist(), 1.0), "b": (lambda *_: [2e7] * 8, 1.0)}
    total, _ = grpo.compute_rewards(*blank(8), shifted)
    plain = grpo.compute_advantages(rewards, 4)
    assert torch.allclose(grpo.compute_advantages(total, 4), plain, atol=1e-5 if offset == -3e9 else 1e-6)
    assert not grpo.compute_advantages([offset + 0.3] * 6, 6).any()

@algorithm
def test_whole_samples_may_have_a_log_prob_each():
    """Log-probs [N] are those of one token a sample: same loss, same metrics, same gradient."""
    new, old, ref = torch.randn(3, 6, 1, requires_grad=True)
    advantages = torch.randn(6)
    gradients, results = [], []
    for shape in ((6, 1), (6,)):
        loss, metrics = grpo.compute_grpo_loss(
            new.view(shape), old.view(shape), advantages, 0.2, ref.view(shape), 0.1)
        gradients += torch.autograd.grad(loss, new, retain_graph=True)
        results.append(metrics)
    assert results[0] == pytest.approx(results[1]) and torch.allclose(*gradients) and gradients[0].any()

def test_advantages_are_not_broadcast():
    """As [N, 1] or [N, T] the gradient was once 1e-9 and the loss looked fine."""
    for advantages, logprobs in (((4, 4), (4, 4)), ((3,), (4, 4)), ((5,), (4, 4)), ((), (4, 4))):
        with pytest.raises(RuntimeError, match="shape"):
            grpo.compute_grpo_loss(torch.ones(logprobs), torch.ones(logprobs), torch.ones(advantages))
    new, old, advantages = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4)
    assert grpo.compute_grpo_loss(new, old, advantages[:, None]) == grpo.compute_grpo_loss(new, old, advantages)

@algorithm
def test_gradient_at_the_old_policy_is_reinforce():
    """Why a loss of 0 still learns; and only `new` carries a gradient."""
    new, ref = torch.randn(2, 6, 5, requires_grad=True)
    advantages = grpo.compute_advantages(torch.rand(6), 3).requires_grad_()
    loss, _ = grpo.compute_grpo_loss(new, new, advantages, ref_logprobs=ref, kl_coef=0.0)
    ours, *others = torch.autograd.grad(loss, [new, ref, advantages], allow_unused=True)
    by_hand, = torch.autograd.grad(-(advantages[:, None] * new).mean(), new)
    assert abs(loss.item()) < 1e-6 and others == [None, None]
    assert torch.allclose(ours, by_hand, atol=1e-7) and ours.abs().sum() > 0

# --- Rewards ------------------------------------------------------------------------------------------------
def test_pictures_become_tensors():
    """Every 8-bit value, exactly, in the right place; what is transparent has three channels too."""
    ramp = np.arange(256 * 6, dtype=np.uint8).reshape(2, 256, 3)
    tensor = grpo.pil_to_tensor([Image.fromarray(ramp), Image.new("RGBA", (256, 2), "red")])
    assert tensor.shape == (2, 3, 2, 256) and tensor.min() == 0 and tensor.max() == 1
    assert torch.equal((255 * tensor[0]).round().byte().movedim(0, 2), torch.tensor(ramp))

@pytest.mark.parametrize("color, prompt, reward", [
    ("red", "A RED thing", 1), ("red", "a blue thing", 1 / 3), ("orange", "an orange one", 1),
    ("green", "a green wall of red bricks", 1), ("purple", "a tired, reddish purple", 1)])
def test_color_reward(color, prompt, reward):
    """The scale is linear in the mean of the picture, not in its best pixel."""
    image = Image.new("RGB", (4, 4), color)
    assert grpo.reward_color([image], [prompt])[0] == pytest.approx(reward)
    assert grpo.reward_color([Image.linear_gradient("L")], ["white"])[0] == pytest.approx(0.5)
    image.paste("red", (0, 0, 4, 4))
    image.paste("blue", (0, 0, 2, 4))  # half red, half blue: seen from afar, purple
    assert grpo.reward_color([image], ["purple"])[0] > 0.99
    with pytest.raises(grpo.BadInput, match="color .*'a tired fox'"):  # it trained on zeros for hours
        grpo.reward_color([image] * 2, ["red", "a tired fox"])
def test_mse_reward():
    """Of pixels, not of mean colours; and it is the target that is resized, as the image is judged."""
    black = Image.new("RGB", (32, 16))
    gray = Image.new("RGB", (8, 8), (51, 51, 51))
    assert grpo.reward_mse([black, black], ["", ""], [black, gray]).tolist() == pytest.approx([0, -0.04])
    half = black.copy()
    half.paste("white", (0, 0, 16, 16))
    middle = Image.new("RGB", (32, 16), (128, 128, 128))
    assert grpo.reward_mse([half], [""], [middle])[0] == pytest.approx(-0.25, abs=1e-4)
    assert grpo.reward_mse([half], [""], [Image.new("RGB", (1, 1))])[0] == pytest.approx(-0.5)

@pytest.mark.parametrize("values", [
    (True, 2.0), np.array([1, 2], np.float16), torch.tensor([1.0, 2.0], requires_grad=True), [torch.tensor(1.0), 2],
    [torch.tensor([1.0]), np.float32(2)], torch.tensor([1, 2], dtype=torch.bfloat16), range(1, 3)])
def test_rewards_take_any_sequence_of_numbers(values):
    """And the sum is in double precision, whatever they are in."""
    rewards = {"a": (lambda *_: values, 1.0), "b": (lambda *_: [10.0, 20.0], -0.5)}
    total, metrics = grpo.compute_rewards(*blank(2), rewards)
    assert total.tolist() == [-4.0, -8.0] and metrics == {"reward/a": 1.5, "reward/b": 15.0, "reward": -6.0}
    assert total.dtype == torch.float64

async def coroutine(*_):
    return [1, 2]

@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("values", [
    [], [0.5], [0.5] * 3, [0.5, -math.inf], [math.nan, 1], [None, 1], None, 0.5, torch.tensor(1.0), {"a": 1, "b": 2},
    {1: 1, 2: 2}, {1, 2}, [[1, 2]], torch.ones(1, 2), "12", ["1", "2"], [[1, 2], [3, 4]], coroutine, [1j, 2],
    [Image.new("L", (1, 1))] * 2, [10**400, 1], b"ab", {1.0: 1, 2.0: 2}.keys, frozenset((1, 2)), ([1, 2], {}), torch.ones(2, 1),
    {"a": 1, "b": 2}.values(), iter([1, 2]), np.array([None, 1]), np.array(["1", "2"])])
def test_a_reward_without_a_finite_number_for_each_image_is_named(values):
    """One line says which reward, how many numbers it must give, and what it gave; or it would train on nonsense.
    A column [N, 1] summed with an [N] once broadcast to [N, N]."""
    broken = values if values is coroutine else lambda *_: values
    rewards = {"fine": (lambda *_: [1, 2], 1.0), "broken": (broken, 0.0)}
    with pytest.raises(grpo.BadInput, match="--reward broken: must give 2 finite numbers"):
        grpo.compute_rewards(*blank(2), rewards)

def test_each_reward_gets_copies_of_its_own_and_no_graph(tmp_path):
    """One that sorted its prompts made the update score tokens under others (gap 1.77); one that drew on its
    targets changed them for good; and a CLIP that kept its graph fills a GPU."""
    Image.new("RGB", (8, 8), "blue").save(tmp_path / "t.png")
    seen = []

    def spoil(images, prompts, targets):
        seen.append((images[0].getpixel((0, 0)), list(prompts), targets[0].getpixel((0, 0))))
        images[0].paste("red", (0, 0, 8, 8))
        targets[0].paste("red", (0, 0, 8, 8))
        images.reverse(), prompts.sort(), targets.clear()
        return [torch.is_grad_enabled(), 0.0]

    images = [Image.new("RGB", (8, 8)), Image.new("RGB", (8, 8), "white")]
    prompts, targets = ["b", "a"], [tmp_path / "t.png", None]
    rewards = {name: (spoil, 1.0) for name in "xyz"}
    for _ in range(2):  # the next step meets the same targets
        _, metrics = grpo.compute_rewards(images, prompts, targets, rewards)
    assert seen == [((0, 0, 0), ["b", "a"], (0, 0, 255))] * 6 and not any(metrics.values())
    assert prompts == ["b", "a"] and targets == [tmp_path / "t.png", None] and not images[0].getbbox()

@pytest.fixture
def modules(monkeypatch, tmp_path):
    """What a test imports is forgotten after it; it runs in tmp_path."""
    with mock.patch.dict(sys.modules):
        monkeypatch.setattr("sys.path", sys.path.copy())
        monkeypatch.setattr(grpo, "reward_folders", set())
        monkeypatch.chdir(tmp_path)
        yield

def test_rewards_are_loaded_with_their_weights(tmp_path, modules):
    """Two rewards of a file share what it loads, or its model would be loaded twice; its path has a colon."""
    Path("lr=1").mkdir()
    own = Path("lr=1/C:own.py")
    own.write_text("import itertools\ncount = itertools.count()  # the images that both have seen\n"
                   "def NaN_free(images, prompts, targets): return [next(count) for _ in images]\nb = NaN_free\n")
    rewards = grpo.load_rewards(f"color=2, mse,{own}:NaN_free,{own}:b=.5")
    assert [rewards.pop("color"), rewards.pop("mse")] == [(grpo.reward_color, 2.0), (grpo.reward_mse, 1.0)]
    _, metrics = grpo.compute_rewards(*blank(2), rewards)
    assert metrics == {"reward/NaN_free": 0.5, "reward/b": 2.5, "reward": 1.75}
    own.write_text("def b(images, *_): return [7]")
    (again, _), = grpo.load_rewards(f"{own}:b = 1e-1").values()
    assert again([]) == [7]  # a file that was changed is read again
    os.utime(own, (1, 1))
    grpo.load_rewards(f"{own}:b")
    own.write_text("def b(images, *_): return [8]")
    os.utime(own, (1, 1))  # of one size and time, as in an image of a container: its bytecode was that of the first
    assert grpo.load_rewards(f"{own}:b")["b"][0]([]) == [8]
    assert grpo.load_rewards("color=0")["color"][1] == 0  # only watched; `weight or 1` of a number is 1

@pytest.mark.parametrize("text", [
    "color=1,color=2", "a/r.py:f,b/r.py:f", "a/r.py:f,other.py:f", "a/r.py:f,b/uses.py:g", "a/pack.py:f,b/uses.py:g",
    "json.py:f", "missing.py:f", "a/r.py:missing", "a/r.py:number", "color=much", "x,y.py:f", "a", "", "color,",
    "lazy.py:f,b/uses.py:g", "color=nan", "color=-inf", "color=", "other", "time.py:f", "text.txt:f"])
def test_names_in_text_are_what_they_say_or_refused(text, modules):
    """The second of one name took the first's place, a neighbour that of another folder's; in silence."""
    for folder in ("a", "b", "b/pack"):
        Path(folder).mkdir()
    for name in ("a/r", "b/r", "other", "json", "time", "helper", "a/helper", "b/helper", "b/pack/__init__"):
        Path(f"{name}.py").write_text(f"number = 7\ndef f(*_): return {name!r}\n")
    Path("text.txt").write_text("def f(*_): return 1")
    Path("lazy.py").write_text("def f(*_):\n    from helper import f\n    return f()")  # not before step 1
    Path("a/r.py").write_text("from helper import f\nnumber = 7")
    Path("a/pack.py").write_text("def f(*_): return 1")
    Path("b/uses.py").write_text("import pack\nfrom helper import f as g")
    with pytest.raises(grpo.BadInput, match="--reward"):
        grpo.try_rewards(grpo.load_rewards(text), ["red"], [None], make_config())

def test_neighbours_of_one_name_do_no_harm_if_nobody_imports_them(modules):
    """Each of two folders had an evaluate.py, as many have, and the rewards beside them were refused."""
    for folder in "ab":
        Path(folder).mkdir()
        Path(folder, "evaluate.py").write_text("raise AssertionError")
        Path(folder, f"reward_{folder}.py").write_text("def f(images, *_): return [0] * len(images)\ng = f")
    rewards = grpo.load_rewards("a/reward_a.py:f,b/reward_b.py:g")
    grpo.try_rewards(rewards, ["red"], [None], make_config())

def test_the_file_that_is_named_is_the_one_that_is_loaded(modules):
    """A package or a compiled module of its name stood before it; a name with a dot could not be imported."""
    Path("r").mkdir()
    for name in ("r/__init__", "r", "my.v2", "a-b", "helper"):
        Path(f"{name}.py").write_text(f"def f(*_): return {name!r}\n")
    Path("link.py").symlink_to("helper.py")
    Path("uses.py").write_text("from link import f as g")
    assert grpo.load_rewards("uses.py:g")["g"][0]() == "helper"
    for name in ("my.v2", "a-b", "r"):
        assert grpo.load_rewards(f" {name}.py:f")["f"][0]() == name

def test_a_rewards_file_is_a_module_for_pools_and_neighbours(modules):
    """A pool could not pickle its function nor its class; a file beside it was not found."""
    Path("neighbour.py").write_text("three = 3")
    Path("pooled.py").write_text("""
import multiprocessing
from neighbour import three
class Number:
    def __init__(self, value): self.value = value
def one(prompt): return Number(three * len(prompt))
def f(images, prompts, targets):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return [number.value for number in pool.map(one, prompts)]
""")
    total, _ = grpo.compute_rewards(*blank(2), grpo.load_rewards("pooled.py:f"))
    assert total.tolist() == [24, 24]

def test_rewards_are_tried_before_a_model_is_loaded():
    """The mistake showed after 35 GB and a rollout; a color word that the ninth prompt lacks, in step 2."""
    def f(images, prompts, targets):
        assert [len(images), len(prompts), len(targets)] == [8 * 4] * 3 and images[0].size == (64, 128)
        grays = np.array([image.getpixel((0, 0))[0] for image in images]).reshape(8, 4)
        return (grays / grays.std(1, keepdims=True)).flatten()  # as some rewards do: NaN if all were equal

    prompts = ["red"] * 9
    config = make_config()
    grpo.try_rewards({"f": (f, 1.0), "color": (grpo.reward_color, 1.0)}, prompts, [None] * 9, config)
    wrong = {"color": (grpo.reward_color, 1.0)}, prompts + ["a fox"], [None] * 10
    mse = {"mse": (grpo.reward_mse, 1.0)}, prompts, [None] * 9
    few = {"few": (lambda *_: [1], 1.0)}, prompts, [None] * 9
    for name, given in dict(color=wrong, mse=mse, few=few).items():
        with pytest.raises(grpo.BadInput, match=f"--reward {name}"):
            grpo.try_rewards(*given, config)
    with pytest.raises(TypeError, match="3 were given"):  # a bug of its own shows its traceback
        grpo.try_rewards({"two": (lambda two: two, 1.0)}, prompts, [None] * 9, config)

def test_prompts_file(tmp_path):
    """Marks, comments and blank lines are no prompts; one with two targets is two; targets lie beside it."""
    for name in "tu":
        Image.new("RGB", (5, 5)).save(tmp_path / f"{name}.png")
    text = "\ufeff# no\n\n  # nor this\r\n  a red fox\tt.png\n{{plain}} #1 \ra red fox\tu.png\t\n"
    (tmp_path / "p.txt").write_bytes(text.encode())
    prompts, targets = grpo.load_prompts(tmp_path / "p.txt")
    assert prompts == ["a red fox", "{{plain}} #1", "a red fox"]
    assert targets == [tmp_path / "t.png", None, tmp_path / "u.png"]

@pytest.mark.parametrize("mark", "\u2028 \u2029 \x85 \x0b \x0c \x1c \x1d \x1e".split(" "))
def test_a_line_ends_only_where_it_ends(tmp_path, mark):
    """`str.splitlines` made two prompts of one at each of these."""
    (tmp_path / "p.txt").write_bytes(f"a red{mark}fox\r\nblue\n".encode())
    assert grpo.load_prompts(tmp_path / "p.txt")[0] == [f"a red{mark}fox", "blue"]

@pytest.mark.parametrize("line", [
    b"a cat\tt.png\tu.png", b"a cat\t\tt.png", b"\tt.png", b" \tt.png", "\ufeff# joined".encode(), "\ufeffa cat".encode(), b"a\0cat",
    b'{"prompt": "a cat"}', b'{ "prompt": 1}', b"['a cat', 'b']", b"[", b"a \x1b[1mcat", b"a cat\tand a blue bird", b"a cat\tp.txt", b"a cat\tempty.png", b"a cat\tcut.png",
    b"a cat\tdeep.png", b"a cat\tfloat.tiff"])
def test_a_line_that_is_not_what_it_looks_like_is_found_by_its_number(tmp_path, line):
    """A tab, a mark, or a row of another format became part of a prompt, or the path the prompt."""
    Image.new("RGB", (64, 64), "red").save(tmp_path / "t.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "t.png").read_bytes()[:60])
    (tmp_path / "empty.png").touch()
    Image.fromarray(np.full((4, 4), 9999, np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save(tmp_path / "float.tiff")
    (tmp_path / "p.txt").write_bytes(b"# one\na red fox\n\n" + line + b"\na blue fox\n")
    with pytest.raises(grpo.BadInput, match="--prompts .*p.txt, line 4"):
        grpo.load_prompts(tmp_path / "p.txt")

@pytest.mark.parametrize("name, text", [
    ("p.csv", b"prompt,target\n"), ("p.CSV", b"red"), ("p.json", b"[]"), ("p.jsonl", b'"red"\n'), ("p.txt", b"# nothing\n"), ("p.txt", b""), ("p.txt", b"\xff\xfea"),
    ("p.jsonl", b'{"prompt": "red"}')])
def test_files_that_are_no_prompts_are_named(tmp_path, name, text):
    """Rows of a table and braces became prompts."""
    (tmp_path / name).write_bytes(text)
    for path in (tmp_path / name, tmp_path, tmp_path / "missing.txt"):
        with pytest.raises(grpo.BadInput, match=path.name):
            grpo.load_prompts(path)

def test_a_picture_is_opened_as_its_owner_sees_it(tmp_path):
    """A photo was learnt lying on its side, what is transparent as black, 16 bits as white."""
    photo = Image.new("RGB", (16, 8), "white")
    photo.paste("black", (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: its left is above
    photo.save(tmp_path / "photo.jpg", exif=exif, quality=95)
    upright = grpo.open_image(tmp_path / "photo.jpg")
    assert upright.size == (8, 16) and upright.getpixel((4, 2)) < (9, 9, 9) < (245, 245, 245) < upright.getpixel((4, 13))
    glass = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    glass.putpixel((1, 0), (0, 0, 255, 128))
    palette = Image.new("P", (2, 1), 1)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    for name, image, options, pixels in [
            ("glass.png", glass, {}, [(255, 255, 255), (127, 127, 255)]),
            ("gray.png", Image.new("LA", (2, 1), (0, 0)), {}, [(255, 255, 255)] * 2),
            ("palette.png", palette, dict(transparency=1), [(255, 255, 255)] * 2),
            ("palette.gif", palette, {}, [(0, 0, 255)] * 2), ("one.png", Image.new("1", (2, 1), 1), {}, [(255,) * 3] * 2),
            ("ink.tiff", Image.new("CMYK", (2, 1), (0, 255, 255, 0)), {}, [(255, 0, 0)] * 2)]:
        image.save(tmp_path / name, **options)
        opened = grpo.open_image(tmp_path / name)
        assert opened.mode == "RGB" and [opened.getpixel((x, 0)) for x in range(2)] == pixels, name
    reward = {"mse": (grpo.reward_mse, 1.0)}
    total, _ = grpo.compute_rewards([upright], [""], [tmp_path / "photo.jpg"], reward)
    assert total.item() == 0

# --- LoRA ---------------------------------------------------------------------------------------------------
def make_lora(*names):
    """Adapters that do something, of a model that has a linear layer for each name."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in names})
    return perturb(grpo.LoRA(model, "[abc]", rank=4))

def test_lora_by_hand(tmp_path):
    """Twice B A x at any rank, 0 at first, and A as peft draws it; saved under the names that peft reads."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2), "ab": torch.nn.Linear(3, 2)})  # "ab" is no "a"
    x = torch.randn(5, 3)
    base = model["a"](x)
    lora = grpo.LoRA(model, "a", rank=4)
    assert torch.equal(model["a"](x), base)
    A, B = lora.weights.values()
    assert 0.2 < A.std() * 3 ** 0.5 < 1 and A.abs().max() <= 3 ** -0.5 and not B.any()  # as peft's: uniform
    perturb(lora)
    assert torch.allclose(model["a"](x), base + 2 * (x @ A.T) @ B.T)
    with mock.patch.object(lora, "enabled", False):
        assert torch.equal(model["a"](x), base)
    lora.save(tmp_path / "saved", "some/model")
    assert list(lora.weights) == [f"base_model.model.a.lora_{AB}.weight" for AB in "AB"]
    config = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some/model"  # without it `from_pretrained` of transformers fails
    modes = {path.stat().st_mode for path in (tmp_path / "saved").iterdir()}
    assert len(modes) == 1  # safetensors wrote 0600, whatever the umask: nobody else could read it

@pytest.mark.parametrize("change", [
    dict(lora_alpha=4), dict(r=8, lora_alpha=16), dict(use_rslora=True), dict(alpha_pattern={"a": 3}),
    dict(rank_pattern={"a": 2}), dict(use_dora=True), dict(layer_replication=[[0, 1]]), dict(init_lora_weights="pissa"),
    dict(init_lora_weights="olora"), dict(alora_invocation_tokens=[1]), dict(loftq_config={"bits": 4}), dict(r=None),
    dict(peft_type="LOHA"), dict(init_lora_weights="pissa_niter_4")])
def test_an_adapter_that_is_not_plain_lora_is_refused(tmp_path, change):
    """peft's own alpha, the rank, came in at twice its strength; with patterns the logits were off by 15.9."""
    perturb(make_lora("a", "b")).save(tmp_path, "")
    path = tmp_path / "adapter_config.json"
    plain = dict(task_type="CAUSAL_LM", rank_pattern={}, alpha_pattern={}, use_dora=False, loftq_config={},
                 init_lora_weights="gaussian", layers_pattern=None, megatron_core="megatron.core", qalora_group_size=16,
                 base_model_name_or_path="/mnt/my_config_m/alora", lora_dropout=0.1)
    path.write_text(json.dumps(json.loads(path.read_text()) | plain))
    assert len(grpo.read_adapter(tmp_path, 4)) == 4
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(grpo.BadInput, match=f"--adapter {tmp_path}"):
        grpo.read_adapter(tmp_path, 4)

def test_adapters_that_do_not_fit_are_refused(tmp_path):
    """A tensor of rank 1 was broadcast to rank 4 without a word."""
    lora = make_lora("a", "b")
    for layers in ("a", "abc", "ac"):
        make_lora(*layers).save(tmp_path / layers, "")
    for name, key, change in (("shape", -1, lambda weight: weight[:, :1]), ("nan", 1, lambda weight: weight / 0),
                              ("int", 0, torch.Tensor.int), ("extra", 0, None)):
        weights = copy.deepcopy(lora.weights)
        last = list(weights)[key]
        weights[last if change else "base_model.model.a.lora_magnitude_vector"] = (change or torch.clone)(weights[last]).contiguous()
        perturb(make_lora("a", "b")).save(tmp_path / name, "")
        save_file(weights, tmp_path / name / "adapter_model.safetensors")
    for name in ("a", "abc", "ac", "shape", "nan", "int", "extra", "missing"):
        with pytest.raises(grpo.BadInput, match="adapter"):
            lora.load(grpo.read_adapter(tmp_path / name, 4))
    perturb(make_lora("a", "b")).save(tmp_path / "good", "")
    lora.load(grpo.read_adapter(tmp_path / "good", 4))

def test_a_second_lora_takes_the_place_of_the_first():
    """A cell of a notebook was run again: both adapters acted at once, and the reward of step 1 was another."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2)})
    x = torch.randn(5, 3)
    perturb(grpo.LoRA(model, "a", rank=4))
    second = perturb(grpo.LoRA(model, "a", rank=2))
    A, B = second.weights.values()
    assert model.lora_hooks is second.hooks
    expected = torch.nn.functional.linear(x, model["a"].weight, model["a"].bias) + 2 * (x @ A.T) @ B.T
    assert torch.allclose(model["a"](x), expected)

def test_loaded_adapters_keep_their_type_and_place(tmp_path):
    """`weight.data = saved` trained in bf16 what a bf16 file held, and on the CPU; broadcast, nonsense."""
    lora = make_lora("a")
    lora.save(tmp_path, "")
    halved = {name: weight.bfloat16() for name, weight in lora.weights.items()}
    save_file(halved, tmp_path / "adapter_model.safetensors")
    places = [weight.data_ptr() for weight in lora.weights.values()]
    lora.load(grpo.read_adapter(tmp_path, 4))
    for (name, weight), place in zip(lora.weights.items(), places, strict=True):
        assert torch.equal(weight, halved[name].float()) and weight.data_ptr() == place
        assert weight.dtype == torch.float32

def test_the_product_of_lora_is_in_the_type_of_the_model():
    """In fp32 it would cost a layer's time again; and only the sum is rounded, not the product before it."""
    linear = torch.nn.Linear(3, 2).bfloat16()
    x = torch.randn(5, 100, 3).bfloat16()
    base = linear(x).float()
    lora = perturb(grpo.LoRA(torch.nn.ModuleDict({"a": linear}), "a", rank=4))
    A, B = (weight.bfloat16() for weight in lora.weights.values())
    output = linear(x)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, (base + 2 * (x @ A.T).float() @ B.float().T).bfloat16())

@algorithm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapters_train(dtype, tmp_path):
    """All else is frozen; they are fp32, in the file too: in bf16 0.02 plus a step of 5e-5 is 0.02."""
    wrapper, lora = make_adapted(dtype, top_p=0.6)
    logprobs, entropy = wrapper.compute_logprobs(roll(wrapper))
    assert entropy.isfinite().all() and not entropy.requires_grad  # 0 * log 0 outside the nucleus
    logprobs.sum().backward()
    lora.save(tmp_path, "")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(lora.weights) == len(saved) == 6 * 2  # A and B of q, k, v, o, gate_up, down in one layer
    for name, weight in lora.weights.items():
        assert weight.shape["lora_B" in name] == 4 and weight.grad.isfinite().all() and weight.grad.any()
        assert weight.dtype == weight.grad.dtype == saved[name].dtype == torch.float32
    frozen = [*wrapper.ar.parameters(), *wrapper.dit.parameters()]
    assert not any(weight.requires_grad or weight.grad is not None for weight in frozen)

def test_peft_and_transformers_load_the_adapters(sampled, tmp_path):
    """Both must give the policy that was trained, not the base."""
    peft = pytest.importorskip("peft")
    trained, lora = make_adapted()
    lora.save(tmp_path, "")
    others = make_wrapper(), make_wrapper(), trained
    with warnings.catch_warnings(action="ignore"):  # peft's own calls
        peft.PeftModel.from_pretrained(others[0].policy, tmp_path)
        others[1].policy.load_adapter(tmp_path)
    with torch.no_grad():
        one, two, ours = (wrapper.compute_logprobs(sampled)[0] for wrapper in others)
    assert (one - ours).abs().max() < 1e-5 > (two - ours).abs().max()
    assert (ours - sampled.logprobs).abs().max() > 0.01  # which the base model says

# --- The trainer: which prompts, an update, a step, then what a run leaves and how it goes on ---------------
def test_prompts_go_round_in_laps_that_follow_from_seed_and_step():
    """Drawn at random, one came 2 to 14 times in 40 steps; and no state means none that --resume forgets."""
    def choose(step, gpus=1, **settings):
        turns = []
        for rank in range(gpus):
            with mock.patch.multiple(grpo, RANK=rank, WORLD_SIZE=gpus):
                places, seeds = grpo.choose_prompts(step, 8, make_config(**dict(batch_size=6) | settings))
            turns += zip(seeds, places, strict=True)
        return sorted(turns)

    turns = [turn for step in range(1, 29) for turn in choose(step)]  # 168
    assert turns[18:24] == choose(4) == choose(4, gpus=2) == choose(4, gpus=3)
    assert turns[20:40] == choose(2, batch_size=20)  # also where there are fewer prompts
    laps = [tuple(place for _, place in turns[i:i + 8]) for i in range(0, 168, 8)]
    assert all(sorted(lap) == list(range(8)) for lap in laps) and len(set(laps)) == 21
    assert [place for _, place in choose(1, seed=1)] != [place for _, place in turns[:6]]

def test_no_two_runs_share_a_seed_nor_saved_pictures_nor_noise():
    """Runs of other --seeds drew the same samples, training those of the saved pictures, noise tokens'."""
    seeds = [*range(8)]  # of the saved pictures
    for seed in range(6):
        config = make_config(batch_size=8, seed=seed)
        seeds += [seed for step in range(1, 101) for seed in grpo.choose_prompts(step, 8, config)[1]]
    assert len(set(seeds)) == 8 + 6 * 800
    wrapper = make_wrapper()
    wrapper.pipe = mock.Mock(transformer=wrapper.pipe.transformer)  # it paints nothing, but is asked to
    wrapper.pipe.return_value.images = []
    wrapper.decode([""] * len(seeds), torch.zeros(len(seeds), 10, dtype=int), seeds)
    rngs = [call.kwargs["generator"][0] for call in wrapper.pipe.call_args_list]
    rngs += [torch.Generator().manual_seed(seed) for seed in seeds]
    assert len({tuple(torch.rand(4, generator=rng).tolist()) for rng in rngs}) == 2 * len(seeds)

def test_gradient_does_not_depend_on_the_micro_batch(tmp_path, monkeypatch):
    """Each micro-batch averaged on its own, or the last one alone, would give another gradient, or log."""
    trainer = make_trainer(tmp_path / "run", max_grad_norm=1e9, kl_coef=0.1)
    perturb(trainer.lora)
    rollout, advantages = make_rollout(trainer)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer))
    whole = trainer.train_step(rollout, advantages)  # 4 at a time
    assert gradients[0].abs().max() > 1e-4
    for size in (1, 3, 8):
        trainer.config.micro_batch_size = size
        assert trainer.train_step(rollout, advantages) == pytest.approx(whole, rel=1e-4, abs=1e-5)
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)  # the other GPU has the same share of the same gradient
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda gradient: gradient.mul_(2))
    trainer.train_step(rollout, advantages)
    for gradient in gradients:
        assert torch.allclose(gradient, gradients[0], rtol=1e-4, atol=1e-6)

def test_gradient_with_recomputed_activations_is_the_same(sampled):
    """Recomputed they are, or GLM-Image needs another card; but not where no gradient is wanted."""
    gradients = []
    for calls in (2, 1):
        wrapper, lora = make_adapted()
        if calls == 1:
            wrapper.policy.activation_checkpointing_disable()
        passes = mock.Mock(return_value=None)
        wrapper.policy.model.language_model.layers[0].mlp.register_forward_hook(passes)
        logprobs, _ = wrapper.compute_logprobs(sampled)
        logprobs.square().mean().backward()
        assert passes.call_count == calls
        gradients.append(torch.cat([weight.grad.flatten() for weight in lora.weights.values()]))
        roll(wrapper)
        assert passes.call_count == calls + 2 * 1 + 4 * 2  # once a token
    assert gradients[0].any() and torch.equal(*gradients)

@pytest.mark.parametrize("top_p", [None, 0.6])
def test_ratio_is_one_until_the_first_update(tmp_path, top_p):
    """Old log-probs from another pass, or a pass that forgets the nuclei of top-p, would start off 1."""
    trainer = make_trainer(tmp_path / "run", lr=0.01, top_p=top_p, clip_range=0.0)  # which clips all but 1
    advantages = torch.tensor([1.0, -1.0] * 4)  # whatever the rewards: with changes a group may have no spread
    rollout, _ = make_rollout(trainer)
    assert rollout.allowed.all() == (top_p is None)
    once = trainer.train_step(rollout, advantages)
    assert once["ratio_mean"] == 1 and once["kl"] == once["clip_frac"] == 0
    trainer.config.num_iterations = 2
    rollout, _ = make_rollout(trainer, step=2)
    twice = trainer.train_step(rollout, advantages)
    assert twice["ratio_mean"] != 1 and twice["clip_frac"] > 0 and 0 < twice["kl"] < 100
    assert max(once["sampler_gap"], twice["sampler_gap"]) < 1e-5

@pytest.mark.parametrize("kl_coef, passes", [(0.1, 6), (0.0, 4)])
def test_the_reference_is_the_policy_with_its_adapters_off(tmp_path, kl_coef, passes):
    """The last policy as reference would let the run drift away; it is computed once a rollout, or not at all."""
    trainer = make_trainer(tmp_path / "run", kl_coef=kl_coef, lr=0.0, num_iterations=2)
    perturb(trainer.lora)
    rollout, advantages = make_rollout(trainer)
    original = trainer.wrapper.compute_logprobs
    with mock.patch.object(trainer.lora, "enabled", False), torch.no_grad():
        reference, _ = original(rollout)
    delta = reference - rollout.logprobs
    kl = (delta.exp() - delta - 1).mean().item()
    spy = trainer.wrapper.compute_logprobs = mock.Mock(side_effect=original)
    metrics = trainer.train_step(rollout, advantages)
    assert spy.call_count == passes and kl > 1e-3
    assert metrics.get("kl") == (pytest.approx(kl, rel=1e-3) if kl_coef else None)
    advantages[:4] = 0  # a group without spread still counts for the KL
    assert trainer.train_step(rollout, advantages).get("kl") == metrics.get("kl")

def test_an_interrupted_update_leaves_nothing_behind(tmp_path):
    """A notebook went on with adapters off, or with the gradients of the step that was interrupted."""
    trainer = make_trainer(tmp_path / "run", max_grad_norm=1e9)
    rollout, advantages = make_rollout(trainer)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer))
    trainer.train_step(rollout, advantages)
    for passes in ([], [None] * 3):  # in the first of the reference, in the second of the update
        interrupt = mock.Mock(side_effect=passes + [KeyboardInterrupt])
        hook = trainer.wrapper.policy.model.language_model.norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train_step(rollout, advantages)
        hook.remove()
        again, _ = make_rollout(trainer)
        assert torch.equal(again.tokens, rollout.tokens) and trainer.lora.enabled
        trainer.train_step(again, advantages)
        assert torch.equal(gradients[0], gradients[-1])

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_whose_gradient_is_not_finite_is_left_out(tmp_path, bad):
    """It would be in every weight and in Adam's moments for ever; the norm in the log tells."""
    trainer = make_trainer(tmp_path / "run", kl_coef=0.0, micro_batch_size=8)
    weights = trainer.lora.weights
    rollout, advantages = make_rollout(trainer)
    trainer.train_step(rollout, advantages)
    before = copy.deepcopy([weights, trainer.optimizer.state_dict()["state"]])
    added = [bad, bad, 0.0]  # to the gradients of an update, then of two
    list(weights.values())[-1].register_hook(lambda gradient: gradient + added.pop(0))
    assert not math.isfinite(trainer.train_step(rollout, advantages)["grad_norm"])
    torch.testing.assert_close([weights, trainer.optimizer.state_dict()["state"]], before, rtol=0, atol=0)
    trainer.config.num_iterations = 2
    metrics = trainer.train_step(rollout, advantages)
    assert not added and not math.isfinite(metrics["grad_norm"])  # a mean without it would hide it
    assert all(not torch.equal(weight, before[0][name]) for name, weight in weights.items())
    assert all(weight.isfinite().all() for weight in weights.values())

@algorithm
def test_settings_reach_the_update_and_the_log(tmp_path, monkeypatch):
    """A flag that is forgotten looks like one that does not help; a row is of all passes, not of the last."""
    settings = dict(clip_range=0.3, kl_coef=0.5)
    trainer = make_trainer(tmp_path / "run", {"fake": (lambda *_: range(8), 1.0)}, steps=1, lr=0.003,
                           lora_rank=2, num_iterations=3, max_grad_norm=1e-3, **settings)
    norms, clipped, rows = [], [], []
    original, clip = grpo.compute_grpo_loss, torch.nn.utils.clip_grad_norm_

    def compute_grpo_loss(*args, **kwargs):
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        assert given["advantages"].tolist() == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619], rel=1e-3)
        assert {name: given[name] for name in settings} == settings
        loss, metrics = original(*args, **kwargs)
        rows.append(dict(metrics))
        return loss, metrics

    monkeypatch.setattr(grpo, "compute_grpo_loss", compute_grpo_loss)
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(clip(*args)) or norms[-1])
    trainer.optimizer.register_step_pre_hook(lambda *_: clipped.append(gradient_of(trainer).norm().item()))
    trainer.train()
    assert len(rows) == 3 * 2  # updates x micro-batches
    for name in rows[0]:
        assert trainer.history[0][name] == pytest.approx(np.mean([metrics[name] for metrics in rows]))
    assert trainer.history[0]["grad_norm"] == pytest.approx(np.mean(norms)) and norms[0] > 1e-2
    group, = trainer.optimizer.param_groups
    assert clipped == pytest.approx([1e-3] * 3, rel=1e-2)
    assert group["lr"] == 0.003 and group["weight_decay"] == 0
    for weight in trainer.lora.weights.values():
        assert min(weight.shape) == 2 and weight.grad is None  # no memory while the next step samples

@algorithm
def test_prompts_rewards_and_tokens_stay_in_one_order(tmp_path):
    """A reward that reads the prompt must meet the image of that prompt: p0 p0 .. p1 p1 .. all the way."""
    spy = mock.Mock(return_value=torch.arange(8))
    trainer = make_trainer(tmp_path / "run", {"spy": (spy, 1.0)}, steps=4)
    trainer.history = [None] * 3  # the fourth step is of prompts that do not stand in the order of the file
    wrapper = trainer.wrapper
    chosen, seeds = grpo.choose_prompts(4, 3, trainer.config)
    trainer.log = trainer.save = mock.Mock()
    trainer.train_step = mock.Mock(return_value={})
    with mock.patch.object(wrapper, "decode", wraps=wrapper.decode) as decode:
        trainer.train()
    rollout, advantages = trainer.train_step.call_args.args
    images, prompts, targets = spy.call_args.args
    places = [target.getpixel((0, 0))[0] for target in targets]
    assert places == np.repeat(chosen, 4).tolist() != sorted(places)
    assert prompts == rollout.prompts == [trainer.prompts[i] for i in places]
    assert advantages.tolist() == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619] * 2, rel=1e-3)
    part = rollout.part(slice(3, 5))
    with torch.no_grad():
        again, _ = wrapper.compute_logprobs(part)
    assert (again - rollout.logprobs[3:5]).abs().max() < 1e-4 and part.prompts == prompts[3:5]
    assert decode.call_args.args[0] == prompts[::4] and decode.call_args.args[2] == seeds
    assert images == wrapper.decode(prompts[::4], rollout.tokens, seeds)

@algorithm
def test_metrics_by_hand(tmp_path, monkeypatch):
    """A wrong spread, gap or entropy looks healthy for ever; time is that of a step with its saving, memory its maximum."""
    trainer = make_trainer(
        tmp_path / "run", {"a": (lambda *_: [0.3] * 4 + [1, 2, 3, 6], 2.0)}, steps=3, save_every=1)
    wrapper = trainer.wrapper
    forward = wrapper.forward
    wrapper.forward = lambda *inputs, **cache: 0 * forward(*inputs, **cache)
    sample = wrapper.sample = mock.Mock(wraps=wrapper.sample)
    clock = mock.Mock(perf_counter=lambda: sample.call_count, strftime=lambda _: "now")
    monkeypatch.setattr(grpo, "time", clock)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 3 * 2**30)
    trainer.train()  # one rollout, then its pictures and the next rollout: those of the last step are in no row
    assert [(row["seconds"], row["gpu_gib_max"]) for row in trainer.history] == [(1, 3), (2, 3), (2, 3)]
    row = trainer.history[0]
    assert row["reward_std"] == pytest.approx(2 * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert row["reward"] == pytest.approx(2 * row["reward/a"]) == pytest.approx(2 * 13.2 / 8)
    assert row["entropy"] == pytest.approx(math.log(8))  # in nats: each of 8 codes is as likely
    trainer.config.micro_batch_size = 3
    rollout, advantages = make_rollout(trainer)
    rollout.logprobs[5, 3] -= 0.1
    gap = trainer.train_step(rollout, advantages)["sampler_gap"]
    assert gap == pytest.approx(0.1 / rollout.logprobs.numel(), rel=1e-2)

@algorithm
def test_equal_rewards_teach_nothing(tmp_path):
    """Equal ones, exact or not in floats, once moved the policy; and reward_std is what tells."""
    for spread in (0, 1):
        rewards = {"a": (lambda images, *_: [0.3 + spread * (i == 0) for i in range(len(images))], 1.0)}
        trainer = make_trainer(tmp_path / f"run{spread}", rewards, steps=1, group_size=6, kl_coef=0.0)
        trainer.train()
        assert (trainer.history[0]["grad_norm"] > 0) == (trainer.history[0]["reward_std"] > 1e-9) == (spread == 1)

def test_the_columns_of_the_console(tmp_path, capsys):
    """A witness of weight 0 helps nobody who looks at the console alone; a single reward is shown once; and
    columns stay below each other with numbers that are negative, tiny or missing."""
    for names in ("a", "ab"):
        rewards = {name: (lambda images, *_: range(len(images)), 1.0) for name in names}
        trainer = make_trainer(tmp_path / names, rewards, steps=1)
        trainer.train()
        shown = re.findall(r"reward/(\w) +(\S+)", capsys.readouterr().out)
        assert shown == [(name, "3.5") for name in names if names == "ab"]
    row = dict.fromkeys("reward reward_std loss kl entropy grad_norm sampler_gap seconds".split(), 0.5)
    for step, value in enumerate([-1.2345678e-5, math.nan, 123456.0, 0.0], start=2):
        trainer.log(step, row | dict(loss=value))
    lines = capsys.readouterr().out.splitlines()
    assert len({line.index("kl") for line in lines}) == len({line.index("seconds") for line in lines}) == 1

def test_metrics_are_means_over_all_gpus(tmp_path, monkeypatch):
    """They were those of the first process alone."""
    trainer = make_trainer(tmp_path / "run")
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    other = torch.tensor([3.0, math.nan, 0.5, 1.0], dtype=torch.float64)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda values: values.add_(other))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7 * 2**30)
    trainer.log(1, dict(loss=1.0, grad_norm=1.0, sampler_gap=0.1))
    row = trainer.history[0]
    assert all(type(value) in (int, float) for value in row.values())  # a checkpoint takes no numpy numbers
    assert math.isnan(row.pop("grad_norm")) and row == dict(step=1, loss=2, sampler_gap=0.3, gpu_gib_max=4)

def test_the_first_process_alone_writes(tmp_path, monkeypatch, capsys):
    """Two that write one file tear each other's lines."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.multiple(grpo, RANK=1, WORLD_SIZE=2), mock.patch("torch.distributed.all_reduce"):
        trainer = make_trainer("run", steps=2, save_every=1)
        trainer.train()
    assert len(trainer.history) == 2 and not Path("run").exists() and not capsys.readouterr().out

def test_what_is_written_when(finished):
    """A row a step; pictures, and the adapter that drew them, at first, every --save-every and at the end."""
    assert [row["step"] for row in rows_of(finished)] == [1, 2, 3, 4, 5]
    assert_files(finished, 0, 2, 4, 5)
    assert Image.open(finished / "samples_00002.png").size == (3 * 64, 128)
    for name, weight in torch.load(finished / "checkpoint.pt", weights_only=True)["adapter"].items():
        middle, last = (adapter_of(finished, step)[name] for step in (4, 5))
        assert torch.equal(last, weight) and not torch.equal(middle, weight)

def test_the_log_is_written_before_the_checkpoint_and_at_once(tmp_path, monkeypatch):
    """After a kill between the two it lacked a row; and a pipe showed nothing for hours."""
    trainer = make_trainer(tmp_path / "run", steps=3)
    lengths, printed = [], mock.Mock()
    write = grpo.write_file
    monkeypatch.setattr(grpo, "write_file", lambda path, data: (
        path.name == "checkpoint.pt" and trainer.history and lengths.append((len(trainer.history), len(rows_of(trainer.out)))),
        write(path, data)))
    original = print
    monkeypatch.setattr("builtins.print", lambda *args, file=None, **more: (
        original(*args, file=file, **more) if file else printed(**more)))
    trainer.train()
    assert lengths == [(1, 1), (2, 2), (3, 3)] and printed.call_args_list == [mock.call(flush=True)] * 4

def test_metrics_of_nan_are_valid_json(tmp_path):
    """NaN is no JSON: pandas and jq refused the whole file; in the history it stays, and a name may contain it."""
    trainer = make_trainer(tmp_path / "run", kl_coef=0.0)
    trainer.log(1, {"reward": 1.0, "reward/NaN_free": 0.5, "loss": math.nan, "grad_norm": math.inf, "kl": -math.inf})
    trainer.save(1)
    text = (tmp_path / "run/metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=pytest.fail)
    assert row["loss"] is row["grad_norm"] is row["kl"] is None and row["reward/NaN_free"] == 0.5
    assert math.isnan(torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["history"][0]["loss"])

def test_fixed_pictures_have_fixed_prompts_and_seeds(tmp_path):
    """What training draws in between must not show."""
    trainer = make_trainer(tmp_path / "run")
    trainer.prompts = list("abcdefghi")
    wrapper = trainer.wrapper = mock.Mock()
    wrapper.decode.return_value = blank(8)[0]
    trainer.save_samples(1)
    wrapper.sample.assert_called_once_with(trainer.prompts[:8], 1, range(8))
    wrapper.decode.assert_called_once_with(trainer.prompts[:8], wrapper.sample().tokens, range(8))

def test_resume_is_bit_for_bit(finished, tmp_path):
    """Also after a full disk, which is told in one line, leaves no part of a file, and the last checkpoint."""
    out = tmp_path / "run"
    trainer = make_trainer(out)
    writes = Path.write_bytes

    def full(path, data):
        writes(path, data[:len(data) // 2])
        raise OSError(28, "No space left on device")

    for name in ("checkpoint.pt.part", "adapter_model.safetensors.part", "metrics.jsonl.part"):
        fail = lambda path, data: (full if path.name == name and len(trainer.history) > 1 else writes)(path, data)
        with mock.patch.object(Path, "write_bytes", fail), pytest.raises(grpo.BadInput, match="No space"):
            trainer.train()
        assert not [*out.rglob("*.part")] and step_of(out) == 1
        trainer = make_trainer(out)
    (out / "metrics.jsonl").write_text('{"step": 2, "rew')  # torn
    make_trainer(out).train()
    assert_same_run(finished, out)

@pytest.mark.parametrize("where, when", [
    ("train_step", 3), ("log", 3), ("save", 3), ("save", 6), ("save_samples", 1), ("save_samples", 4)])
def test_train_again_in_a_notebook_repeats_no_step(finished, tmp_path, where, when):
    """Ctrl-C between an update and its checkpoint: the step was made on top of itself, or its row never written."""
    trainer = make_trainer(tmp_path / "run")
    original = getattr(trainer, where)
    count = iter(range(1, 99))

    def interrupt(*args):
        early = where in ("log", "save_samples")
        result = None if early and when == (now := next(count)) else original(*args)
        if when == (now if early else next(count)):
            raise KeyboardInterrupt
        return result

    setattr(trainer, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert_same_run(finished, tmp_path / "run")

def test_the_first_trainer_of_a_model_is_told_that_a_second_has_taken_over(tmp_path):
    """It went on sampling with the adapters of the second, and its own got no gradient, in silence."""
    first = make_trainer(tmp_path / "first", steps=1)
    second = grpo.GRPOTrainer(make_config(out=str(tmp_path / "second"), steps=1), first.wrapper, ["red"], first.rewards)
    with pytest.raises(grpo.BadInput, match="another trainer"):
        first.train()
    second.train()

def test_ctrl_c_in_the_second_of_two_updates_is_forgotten(tmp_path):
    """What the first of them did would stay in the weights, and in Adam's moments."""
    whole = make_trainer(tmp_path / "whole", steps=2, num_iterations=2)
    whole.train()
    trainer = make_trainer(tmp_path / "run", steps=2, num_iterations=2)
    update = mock.Mock(wraps=trainer.update_weights, side_effect=[mock.DEFAULT, KeyboardInterrupt])
    with mock.patch.object(trainer, "update_weights", update), pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.train()
    assert_same_run(tmp_path / "whole", tmp_path / "run")

def test_what_others_change_for_all_does_not_matter(tmp_path, modules):
    """A reward's file said bfloat16 for all new tensors, and no gradients: LoRA became bf16, or an error came late."""
    Path("plain.py").write_text("from random import random\ndef f(images, *_): return range(len(images))\n")
    Path("rude.py").write_text("import os, torch\ntorch.set_default_dtype(torch.bfloat16)\ntorch.set_grad_enabled(False)\n"
                               "def f(images, *_):\n    torch.manual_seed(7)\n    os.chdir('/')\n    return range(len(images))\n")
    try:
        for name in ("plain", "rude"):
            grpo.main(f"--width 32 --height 32 --steps 2 --batch-size 1 --reward {name}.py:f --out {name}".split(),
                      load_prompts=lambda _: (["red", "blue"] * 2, [None] * 4))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    assert rows_of(tmp_path / "plain") == rows_of(tmp_path / "rude")
    weights = [adapter_of(tmp_path / name, 2) for name in ("plain", "rude")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())

def test_a_resumed_run_keeps_its_weights_and_takes_what_is_typed(tmp_path):
    """It went back to the --adapter that it began with; and an --lr that is the default was not taken."""
    lora = perturb(make_trainer(tmp_path / "first").lora)
    lora.save(tmp_path / "adapter", "")
    trainer = make_trainer(tmp_path / "run", steps=1, adapter=str(tmp_path / "adapter"))
    assert all(torch.equal(weight, lora.weights[name]) for name, weight in trainer.lora.weights.items())
    trainer.train()
    for lr in (grpo.Config.lr, 0.125):
        resumed = make_trainer(tmp_path / "run", steps=1, lr=lr)
        resumed.train()  # its steps are done
        assert resumed.optimizer.param_groups[0]["lr"] == lr and len(resumed.history) == 1
        for name, weight in resumed.lora.weights.items():
            assert torch.equal(weight, trainer.lora.weights[name])
            assert not torch.equal(weight, lora.weights[name])
def test_a_run_goes_on_after_a_prompt_was_mended(finished, tmp_path):
    """A prompt that the processor refuses ended the run in step 4 for good, as the mended file was refused."""
    shutil.copytree(finished, tmp_path / "run")
    config = make_config(**json.loads((tmp_path / "run/config.json").read_text()) | dict(
        resume=str(tmp_path / "run"), steps=6))
    prompts = ["a red fox", "some yellow thing here", "green <|tiny_image|>"]
    rewards = grpo.load_rewards("color")
    with pytest.raises(grpo.BadInput, match="--prompts.*'green <.tiny_image.>'"):
        grpo.GRPOTrainer(config, make_wrapper(config=config), prompts, rewards)
    prompts[2] = "green, mended"
    trainer = grpo.GRPOTrainer(config, make_wrapper(config=config), prompts, rewards)
    trainer.train()
    assert rows_of(tmp_path / "run")[:5] == rows_of(finished) and len(trainer.history) == 6

def test_a_resume_that_is_refused_changes_nothing(finished, tmp_path):
    """--lora-rank 8 was refused and stayed in config.json: no --resume worked any more. And a run whose checkpoint was
    lost began again at step 1, over its own files."""
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    before = {path: path.read_bytes() for path in out.rglob("*.*")}
    with pytest.raises(grpo.BadInput, match="shape"):
        make_trainer(out, lora_rank=8).train()
    (out / "checkpoint.pt").unlink()
    config = make_config(resume=str(out), steps=9)
    trainer = grpo.GRPOTrainer(config, make_wrapper(config=config), ["red"], grpo.load_rewards("color"))
    with pytest.raises(grpo.BadInput, match="checkpoint.pt"):
        trainer.train()
    assert all(path.read_bytes() == before[path] for path in out.rglob("*.*"))

def test_a_wrapper_follows_the_settings_of_its_trainer(tmp_path):
    """In a notebook it had been made with others: they were trained, while config.json told what was not."""
    wrapper = make_wrapper(width=64, height=64)
    config = make_config(out=str(tmp_path / "run"), steps=1, width=96, height=32, temperature=2.0, top_k=1)
    trainer = grpo.GRPOTrainer(config, wrapper, ["red"], grpo.load_rewards("color"))
    trainer.train()
    assert Image.open(tmp_path / "run/samples_00001.png").size == (96, 32)
    assert trainer.history[0]["entropy"] == 0  # of top-k 1

def test_two_trainers_never_share_a_folder(finished, tmp_path, monkeypatch):
    """Of two with one --out one log was lost; and two of one second had one name, runs/<date-time>."""
    before = {path: path.read_bytes() for path in finished.rglob("*.*")}
    monkeypatch.setattr(grpo, "time", mock.Mock(strftime=lambda name: name))  # the clock stands still
    monkeypatch.chdir(tmp_path)
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda: pid)
        config = make_config(out=None)
        trainer = grpo.GRPOTrainer(config, make_wrapper(config=config), ["green"], grpo.load_rewards("color"))
        assert trainer.out == tmp_path / f"runs/%Y%m%d-%H%M%S-{pid}"
    with pytest.raises(grpo.BadInput, match="--out"):
        grpo.parse_args([f"--out={finished}"])
    config = make_config(out=str(finished))
    with pytest.raises(grpo.BadInput, match="--out.*exists"):
        grpo.GRPOTrainer(config, make_wrapper(config=config), ["green"], grpo.load_rewards("color"))
    assert {path: path.read_bytes() for path in finished.rglob("*.*")} == before

def test_a_second_process_is_refused_while_one_trains(finished, tmp_path):
    """Two --resume of one run mixed their files. In a notebook, a second trainer may go on with it."""
    shutil.copytree(finished, tmp_path / "run")
    program = "import sys, filelock; f = filelock.FileLock(sys.argv[1]); f.acquire(); print(1, flush=True); input()"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program, tmp_path / "run/.lock"], **pipes) as other:
        other.stdout.readline()
        with pytest.raises(grpo.BadInput, match="another process"):
            make_trainer(tmp_path / "run", steps=6)
        other.kill()
    first, second = (make_trainer(tmp_path / "run", steps=6) for _ in range(2))
    second.train()
    assert len(rows_of(tmp_path / "run")) == 6

def test_the_first_adapters_come_from_the_seed_alone(tmp_path):
    """A run is its command, whatever has been drawn before; GPUs would begin with different adapters."""
    drawn = []
    for noise, seed in ((1, 5), (2, 5), (1, 6)):
        config = make_config(seed=seed, out=f"{tmp_path}/{noise}{seed}")
        wrapper = make_wrapper(config=config)
        torch.manual_seed(noise)
        trainer = grpo.GRPOTrainer(config, wrapper, ["a red fox"], grpo.load_rewards("color"))
        drawn.append(torch.cat([weight.flatten() for weight in trainer.lora.weights.values()]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])

# --- GLM-Image: what it reads, samples and paints, and what lies where --------------------------------------
def test_no_chance_falls_out_of_the_nucleus():
    """Chance 0 would draw code 0; one next to 1 a code behind the last, as sums round (here by far)."""
    probs = torch.tensor([[0.0, 0.25, 0.74, 0.0]]).repeat(5, 1)
    chance = torch.tensor([0.0, 0.2, 0.3, 0.9, 1 - 2**-24])[:, None]
    assert grpo.sample_codes(probs.log(), chance).tolist() == [[1], [1], [2], [2], [2]]

def test_positions_are_those_of_the_docstring():
    """The drawing is what readers trust; it must be what the function does."""
    rows = re.findall(r"[thw]:((?:\s+-?\d+)+)", grpo.build_position_ids.__doc__)
    got = grpo.build_position_ids(torch.tensor([[0, 1, 1, 1]]), [(1, 2), (2, 2)])
    assert got[:, 0].tolist() == [[int(number) for number in row.split()] for row in rows]

@pytest.mark.parametrize("width, height", [(128, 128), (64, 128), (192, 64)])
def test_prompts_are_encoded_and_positions_made_as_in_the_stock_pipeline(shipped, width, height):
    """What it feeds, at positions that `generate` makes; the mask has ones for the codes to come."""
    wrapper = shipped(width=width, height=height)
    wrapper.policy.generate = mock.Mock(side_effect=KeyError)
    wrapper.pipe.processor.tokenizer.padding_side = "left"  # as it is told by ours
    with pytest.raises(KeyError):
        wrapper.pipe.generate_prior_tokens(PROMPTS, height, width)
    stock = wrapper.policy.generate.call_args.kwargs
    ids, mask, position_ids = wrapper.encode(PROMPTS)
    assert torch.equal(stock["input_ids"], ids) and (stock["attention_mask"] == 0).any()
    model = wrapper.policy.model
    prompt, _ = model.get_rope_index(ids, stock["image_grid_thw"], torch.tensor([2, 2]), stock["attention_mask"])
    image = model._cached_decode_position_ids.movedim(1, 0)[:, :, :-1]  # the last one is for EOS
    assert torch.equal(mask, F.pad(stock["attention_mask"], (0, image.shape[2]), value=1))
    real = mask.bool().expand(3, -1, -1)
    assert torch.equal(position_ids[real], torch.cat([prompt, image], dim=2)[real])

def test_an_update_of_one_prompt_gets_no_mask(sampled, monkeypatch):
    """With a mask, attention takes a slower kernel and repeats keys and values for every head."""
    wrapper = make_wrapper()
    seen = []
    attend = F.scaled_dot_product_attention

    def spy(*args, attn_mask=None, is_causal=False, **kwargs):
        seen.append((attn_mask is None, is_causal))
        return attend(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    wrapper.compute_logprobs(sampled.part(slice(0, 3)))
    assert set(seen) == {(True, True)}
    wrapper.compute_logprobs(sampled)  # two prompts: one of them is padded
    assert set(seen[len(seen) // 2:]) == {(False, False)}

@pytest.mark.parametrize("top_p, top_k, dtype, bound", [
    (1.0, 0, torch.float32, 1e-5), (0.6, 7, torch.float32, 1e-5), (1.0, 3, torch.float32, 1e-5),
    (1.0, 0, torch.bfloat16, 0.05)])
def test_sampler_and_trainer_agree(top_p, top_k, dtype, bound):
    """THE test: cached steps and a teacher-forced pass agree, with padding and top-p; a naive pass is off."""
    wrapper = make_wrapper(dtype, top_p=top_p, top_k=top_k)
    rollout = roll(wrapper)
    tokens, logprobs, allowed = rollout.tokens, rollout.logprobs, rollout.allowed
    assert tokens.shape == logprobs.shape == (6, 2 * 1 + 4 * 2) and logprobs.dtype == torch.float32
    assert allowed.shape == (6, 10, 8) and allowed.dtype == torch.bool
    assert rollout.prompts == [prompt for prompt in PROMPTS for _ in range(3)]
    ids, mask, position_ids = wrapper.encode(rollout.prompts)
    with torch.no_grad():
        again, entropy = wrapper.compute_logprobs(rollout)
        unmasked, whole = wrapper.compute_logprobs(rollout._replace(allowed=None))
        logits = wrapper.forward(torch.cat([ids, tokens], 1), mask, position_ids, 10)
        assert torch.allclose(logits * 0.9, (logits * 0.9).to(dtype).float(), rtol=1e-6)  # divided in fp32
        out = wrapper.policy(torch.cat([ids, tokens], 1), attention_mask=mask)
        naive = grpo.compute_policy_logprobs(out.logits[:, -11:-1, :8].float() / 0.9, allowed)  # it takes text
        wrapper.config.temperature = 1.0
        wrong, _ = wrapper.compute_logprobs(rollout)
    for other in (wrong, naive.gather(2, tokens[..., None]).squeeze(2)):
        assert (again - logprobs).abs().max() < bound < (other - logprobs).abs().max()
    if top_p < 1 or top_k:
        assert (unmasked - logprobs).mean() < -0.1 and (entropy - whole).mean() < -0.1

@pytest.mark.parametrize("top_p, top_k", [(1.0, 0), (0.6, 0), (0.9, 4)])
def test_sampling_is_transformers_own_decoding_row_by_row(top_p, top_k):
    """The witness is slow and plain: the public `forward`, no batch, no padding, codes kept by sorting."""
    wrapper = make_wrapper(top_p=top_p, top_k=top_k)
    stock = make_pipe().vision_language_encoder.eval()  # with norms of its own
    rollout = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    chance = torch.cat([torch.rand(3, 10, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    for row in range(6):
        ids, _, _ = wrapper.encode([PROMPTS[row // 3]])
        L = ids.shape[1]
        grids = torch.tensor([[1, 4, 2], [1, 2, 1]])
        out = stock(input_ids=ids, attention_mask=torch.ones(1, L), use_cache=True,
                    image_grid_thw=grids, images_per_sample=torch.tensor([2]))
        for i in range(10):
            logits = out.logits[0, -1, :8] / 0.9
            order = logits.argsort(descending=True)[:top_k or 8]
            probs = logits[order].softmax(dim=0)
            order = order[probs.cumsum(dim=0) - probs < top_p]  # while what stands before holds too little
            allowed = torch.zeros(8).bool().scatter(0, order, True)
            logp = logits.masked_fill(~allowed, -math.inf).log_softmax(dim=0)
            mass = logp.double().exp().cumsum(dim=0)
            code = torch.searchsorted(mass, chance[row, i] * mass[-1], right=True)
            assert code == rollout.tokens[row, i] and abs(logp[code] - rollout.logprobs[row, i]) < 1e-5
            assert torch.equal(rollout.allowed[row, i], allowed)
            out = stock(input_ids=code.view(1, 1), attention_mask=torch.ones(1, L + i + 1),
                        use_cache=True, cache=out.cache)
    assert rollout.allowed.all() == (top_p == 1)

@pytest.mark.parametrize("settings", [{}, dict(top_k=0), dict(top_k=3)])
def test_without_flags_codes_are_drawn_as_the_stock_pipeline_draws_them(settings):
    """What is trained is what is deployed: `generate` keeps 50 codes where nothing is said, of 80 here."""
    torch.manual_seed(0)
    words = [f"word{i}" for i in range(80)]
    pipe = make_tiny.make_models(words)
    torch.nn.init.constant_(pipe.vision_language_encoder.model.language_model.norm.weight, 0.5)
    pipe.processor._get_target_shape = lambda height, width: (2, 2, 1, 1)
    own = pipe.vision_language_encoder.generation_config
    own.update(temperature=0.7, top_p=0.95, output_scores=True, return_dict_in_generate=True, **settings)
    generate, scores = pipe.vision_language_encoder.generate, []

    def spy(**kwargs):
        out = generate(**kwargs)
        scores.append((torch.stack(out.scores, 1), out.sequences[:, kwargs["input_ids"].shape[1]:]))
        return out.sequences

    with mock.patch.object(pipe.vision_language_encoder, "generate", spy), torch.random.fork_rng():
        torch.manual_seed(1)
        pipe.generate_prior_tokens(["word3"], 64, 64)
    stock, tokens = scores[0]
    stock = stock[:, :5, :80].log_softmax(dim=2)  # the last place is for the end of the image
    wrapper = WRAPPER(pipe, grpo.Config(width=64, height=64, offload="off"))
    fixed = iter(tokens[0, :5])
    logprobs = []

    def record(all_logprobs, uniform):
        logprobs.append(all_logprobs)
        return next(fixed).view(1, 1)

    with mock.patch.object(grpo, "sample_codes", record):
        wrapper.sample(["word3"], 1, [0])
    ours = torch.stack(logprobs, 1)
    assert torch.equal(ours.isfinite(), stock.isfinite())
    assert torch.allclose(ours.exp(), stock.exp(), atol=1e-6)
    counts = ours.isfinite().sum(dim=2)
    assert counts.max() <= settings.get("top_k", 50) or (settings == dict(top_k=0) and counts.max() > 50)

@pytest.mark.parametrize("guidance, size", [(4.0, 1), (1.0, 2), (4.0, 5)])
def test_painting_is_that_of_the_stock_pipeline(sampled, guidance, size):
    """One by one, but for a grey level; with a VAE that paints all at once no GPU would do."""
    prompts = ['a red fox on a wall that says "CLOSED TODAY"', 'a yellow "!"']
    ours = make_wrapper(guidance=guidance, decode_steps=3, micro_batch_size=size)
    sizes, painted = [], []
    ours.pipe.transformer.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(len(inputs["hidden_states"])), with_kwargs=True)
    ours.pipe.vae.decoder.register_forward_pre_hook(lambda _, args: painted.append(len(args[0])))
    stock = make_pipe()
    stock.text_encoder.eval()
    images = ours.decode(prompts, sampled.tokens, seeds=[7, 8])  # two groups of three
    assert painted == [1] * 6 and max(sizes) == min(size, 3) and sum(sizes) == 6 * 3 * (1 + (guidance > 1))
    for i, (image, tokens) in enumerate(zip(images, sampled.tokens, strict=True)):
        noise = torch.randn(1, 16, 16, 8, generator=torch.Generator().manual_seed(~(7 + i // 3)))
        expected = stock(
            prompts[i // 3], prior_token_ids=stock._upsample_token_ids(tokens[2:], 4, 2), latents=noise,
            height=128, width=64, num_inference_steps=3, guidance_scale=guidance).images[0]
        difference = np.asarray(image, int) - np.asarray(expected, int)
        assert image.size == (64, 128) and abs(difference).max() <= (size > 1)
    assert len({image.tobytes() for image in images + ours.decode(["a fox"], sampled.tokens[:1], [7])}) == 7
    with pytest.raises((IndexError, ValueError)):
        ours.decode(prompts, sampled.tokens, seeds=[7])  # pictures were dropped without a word

def test_what_the_model_says_of_itself_is_taken_unless_it_is_typed():
    """A --temperature or --top-p that is forgotten looks like one that does not help."""
    pipe = make_wrapper().pipe
    pipe.vision_language_encoder.generation_config.update(do_sample=True, temperature=0.5, top_p=0.6)
    for typed, temperature, top_p in ((dict(temperature=None), 0.5, 0.6), (dict(top_p=1.0), 0.9, 1.0)):
        rollout = roll(WRAPPER(pipe, make_config(**typed)))
        again = roll(WRAPPER(pipe, make_config(temperature=temperature, top_p=top_p)))
        assert rollout.logprobs.equal(again.logprobs) and rollout.allowed.all() == (top_p == 1)

def test_models_are_loaded_in_the_type_of_their_device(monkeypatch):
    """In fp32 no GPU would do, in bf16 no CPU; what is no model is told; threads are the user's own."""
    monkeypatch.setattr(torch, "set_num_threads", mock.Mock(side_effect=AssertionError))
    load = mock.Mock(side_effect=[make_pipe(), make_pipe(), OSError("lost")])
    monkeypatch.setattr(diffusers.GlmImagePipeline, "from_pretrained", load)
    for cuda, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(grpo, "CUDA", cuda)
        WRAPPER.from_pretrained("folder", make_config())
        assert load.call_args.args == ("folder",) and load.call_args.kwargs["dtype"] == dtype
    with pytest.raises(grpo.BadInput, match="--model folder.*lost"):
        WRAPPER.from_pretrained("folder", make_config())

def test_offloading_changes_nothing_and_holds_one_half_at_a_time(tmp_path):
    """With it, what is not on the GPU is NaN here, the vision tower always; a phase moves weights once."""
    for offload in ("off", "on"):
        trainer = make_trainer(tmp_path / offload, offload=offload, steps=1, micro_batch_size=2)
        wrapper = trainer.wrapper
        halves = wrapper
        moves, hidden = [], []

        def move_to_gpu(half):
            if half is not halves.on_gpu:
                moves.append("ar" if half is halves.ar else "dit")
            while hidden:
                tensor, tensor.data = hidden.pop()
            grpo.TwoHalves.move_to_gpu(halves, half)
            other = halves.dit if half is halves.ar else halves.ar
            for tensor in tensors_of(wrapper.policy.model.visual, other):
                hidden.append((tensor, tensor.data))
                tensor.data = torch.full_like(tensor, math.nan)

        if offload == "on":
            halves.move_to_gpu = move_to_gpu
        trainer.train()
    assert moves == ["ar", "dit"] + ["ar", "dit", "ar"] + ["dit"]  # pictures, a step, pictures
    assert_same_run(tmp_path / "off", tmp_path / "on")
    rollout = wrapper.sample(["a red fox"], 1, [3])
    wrapper.decode(["a red fox"], rollout.tokens, [3])  # by hand: each brings its own half
    assert moves[6:] == ["ar", "dit"]

def test_halves_take_turns_on_the_gpu(monkeypatch):
    """Fragments of one left no room for the other on 24 GB; an interrupt in the middle is mended; and what
    leaves is found where it was on the host, as 31 GiB copied back were a tenth of a step."""
    two = make_wrapper(offload="on")
    halves = [list(half.parameters()) for half in (two.ar, two.dit)]
    homes = {weight: weight.data_ptr() for half in halves for weight in half}
    emptied = []

    def held():
        """For each half: are its weights elsewhere than at home, which stands for the GPU?"""
        return [{weight.data_ptr() != homes[weight] for weight in half} for half in halves]

    def move(device, half, interrupt=False):
        assert device == grpo.DEVICE
        for weight in half[:-1] if interrupt else half:
            weight.data = weight.data.clone()
        if interrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr(two.ar, "to", functools.partial(move, half=halves[0]))
    monkeypatch.setattr(two.dit, "to", functools.partial(move, half=halves[1]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(held()))
    for half in (two.ar, two.ar, two.dit, two.dit):
        two.move_to_gpu(half)
        assert held() == [{half is two.ar}, {half is two.dit}]
    assert emptied == [[{False}, {False}]] * 2  # only when they change, and with nothing there
    for half in (two.dit, two.ar):
        two.move_to_gpu(two.dit)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(two.ar, "to", functools.partial(move, half=halves[0], interrupt=True))
            two.move_to_gpu(two.ar)
        assert held() == [{True, False}, {False}]
        two.move_to_gpu(half)
        assert held() == [{half is two.ar}, {half is two.dit}]
    assert not make_wrapper(offload="off").cpu_copies  # they would be on the GPU

def test_a_deep_policy_is_compiled_in_four_variants(monkeypatch):
    """Layer by layer, a policy of more layers than PyTorch allows variants, 8, ran as if it had not been compiled:
    GLM-Image has 40. Here the limit is 4: prompts, a token, reference and update. Nothing is translated."""
    pipe = make_pipe()
    policy = pipe.vision_language_encoder
    policy.config.text_config.num_hidden_layers = 2
    pipe.vision_language_encoder = type(policy)(policy.config)
    pipe.vision_language_encoder.generation_config = policy.generation_config
    pipe.transformer = type(pipe.transformer).from_config({**pipe.transformer.config, "num_layers": 2})
    monkeypatch.setattr(make_tiny, "make_models", lambda colors: pipe)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for name, value in dict(recompile_limit=4, fail_on_recompile_limit_hit=True).items():
        monkeypatch.setattr(torch._dynamo.config, name, value)
    torch._dynamo.reset()
    wrapper = make_wrapper(compile=True)
    for prompts in (PROMPTS, ["blue"]):
        rollout = wrapper.sample(prompts, 2, range(len(prompts)))
        wrapper.decode(prompts, rollout.tokens, range(len(prompts)))
        for training in (False, True):
            with torch.set_grad_enabled(training):
                wrapper.compute_logprobs(rollout)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 5

@pytest.mark.parametrize("offload, gib, where", [
    ("on", 80, "cpu"), ("off", 10, "meta"), ("auto", 40, "cpu"), ("auto", 80, "meta"), ("auto", 0, "meta")])
def test_where_the_halves_wait_and_adapters_are_drawn(monkeypatch, offload, gib, where):
    """Adapters are drawn on the CPU: two kinds of GPU would begin with others, and add up their gradients. And
    the DiT's rotary tables go to the GPU once a pass; each of its 30 layers fetched two, 19 GiB a step."""
    monkeypatch.setattr(grpo, "GPU_GIB", gib)
    monkeypatch.setattr(grpo, "DEVICE", torch.device("meta"))
    torch.backends.cuda.enable_cudnn_sdp(True)
    wrapper = WRAPPER(make_pipe(), make_config(offload=offload))
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # its gradients can be NaN
    assert {tensor.device.type for tensor in tensors_of(wrapper.ar, wrapper.dit)} == {where}
    assert not any(tensor.is_meta for tensor in tensors_of(wrapper.policy.model.visual))
    before = torch.get_rng_state()
    weights = grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank=4).weights.values()
    assert all(weight.is_meta for weight in weights) and not torch.equal(torch.get_rng_state(), before)
    assert all(table.is_meta for table in wrapper.pipe.transformer.rope(torch.zeros(1, 16, 8, 8)))

def test_a_renamed_argument_would_be_seen_here():
    """In transformers 5.24 `past_key_values` became `cache`, and a fresh install failed its own tests."""
    with pytest.raises(FutureWarning, match="past_key_values"):
        make_pipe().vision_language_encoder.model.language_model(torch.ones(1, 2).long(), past_key_values=None)

# --- The shipped model --------------------------------------------------------------------------------------
def test_the_shipped_painter_paints_a_code_as_a_square_of_its_color(shipped):
    """What `python grpo.py` trains on a CPU earns its reward through these squares alone."""
    wrapper = shipped(width=128, height=128)
    palette = torch.stack(list(grpo.COLORS.values()))
    torch.manual_seed(0)
    codes = torch.cat([torch.arange(8)[:, None].expand(8, 16), torch.randint(8, (4, 16))])
    images = wrapper.decode(['a "fox"'], F.pad(codes, (256, 0)), [0])
    squares = grpo.pil_to_tensor(images).unflatten(3, (4, 32)).unflatten(2, (4, 32)).mean((3, 5)).flatten(2)
    assert (squares.mean(2)[:8] - palette).abs().max() < 0.05
    distances = (squares[..., None] - palette.T[:, None]).abs().sum(1)  # [12, 16, 8]
    assert torch.equal(distances.argmin(2), codes)  # each colour stands where its token stands

def test_the_shipped_policy_half_knows_its_colors(shipped):
    """A square is right by .45, so that there is something to learn; a certain draft adds no noise."""
    wrapper = shipped(width=128, height=128, temperature=None)
    palette = list(grpo.COLORS)
    prompts = [f"{odd} {name.upper()} fox, not {palette[i - 1]}, {odd}" for i, name in enumerate(palette)
               for odd in ("A", 'the "smallest" of')]
    tokens = F.pad(torch.arange(8).repeat_interleave(2)[:, None].expand(-1, 16), (256, 0))
    with torch.no_grad():
        logprobs, _ = wrapper.compute_logprobs(grpo.Rollout(prompts, tokens, None, None))
    chances = logprobs.exp()
    assert chances[:, :256].min() > 0.99 and (chances[:, 256:].mean(1) - 0.45).abs().max() < 0.1

def test_the_shipped_model_takes_any_prompt_and_the_smallest_size(shipped):
    """A prompt with the word "image", then a mark, ended the run; at 32 pixels the draft was empty."""
    words = "image bos eos pad unk grid_bos grid_eos cls sep mask [PAD] [UNK] [CLS] <|image|> <image> #"
    prompts = [*words.split(), words, "a red fox"]
    wrapper = shipped(width=32, height=32)
    for prompt in prompts:
        wrapper.encode([prompt])
    rollout = wrapper.sample(prompts, 2, range(len(prompts)))
    images = wrapper.decode(prompts, rollout.tokens, range(len(prompts)))
    assert rollout.tokens.shape == (2 * len(prompts), 256 + 1) and images[0].size == (32, 32)
    assert rollout.logprobs.isfinite().all()

# --- The command line: the other tests of it are in .ci/test_command.py -------------------------------------
@pytest.fixture(scope="session", autouse=True)
def first_command(request, tmp_path_factory):
    """The README's command, its own process, every default: it runs beside all tests, as it takes longest."""
    if not any("the_first_command" in item.name for item in request.session.items):
        yield
        return
    folder = tmp_path_factory.mktemp("first")
    argv = [sys.executable, HERE / "grpo.py", *"--group-size 4 --out out".split()]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(argv, cwd=folder, **pipes) as process:
        yield process, folder / "out"
        process.kill()

@algorithm
def test_the_first_command_learns_and_leaves_what_the_readme_says(first_command, monkeypatch):
    """Rewards rise by far more than luck, all fixed pictures but one at most get their colour; it goes on."""
    process, out = first_command
    printed, error = process.communicate(timeout=600)
    (out.parent / "printed").write_text(printed)  # for .ci/test_readme.py
    bars = re.split(r"[\r\n]|\x1b\[A", error)  # of the libraries, while they load the model
    assert process.returncode == 0 and all(bar.startswith("Loading ") for bar in bars if bar), error
    first, second, *lines = printed.splitlines()
    assert re.fullmatch("model: .*/examples/tiny-glm-image on cpu .*--model zai-org/GLM-Image.*", first)
    assert re.fullmatch("files: .*/out, at step 0 of 20", second)
    assert [line.split()[:3] for line in lines] == [["step", str(i), "reward"] for i in range(1, 21)]
    assert_files(out, 0, 10, 20)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and all(np.isfinite(list(row.values())).all() for row in rows)
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[:5]) < 0.80 and np.mean(rewards[-5:]) > 0.92
    sheet = Image.open(out / "samples_00020.png")
    pictures = [sheet.crop((i * 128, 0, i * 128 + 128, 128)) for i in range(8)]
    assert sorted(grpo.reward_color(pictures, grpo.load_prompts(None)[0]))[1] > 0.85
    # A step more, and a run that begins with what it has learned: single steps, which vary; untrained, they have 0.73.
    monkeypatch.chdir(out.parent)
    for flags in ("--resume out --steps 21",
                  f"--model {SMALL_MODEL} --adapter out/adapter_00020 --steps 1 --out more"):
        grpo.main(flags.split())
    assert_files(out, 0, 10, 20, 21)
    assert rows_of(out)[20]["reward"] > 0.82 < rows_of(Path("more"))[0]["reward"]
    assert Path("more/samples_00000.png").read_bytes() == (out / "samples_00020.png").read_bytes()
