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
import copy, dataclasses, functools, inspect, json, math, os, re, runpy, subprocess, sys
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
from examples import make_tiny

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
        own = grpo.read_checkpoint(folder)["config"] | dict(out=None, resume=str(folder))
    config = make_config(**own | settings)
    prompts = ["a red fox", "some yellow thing here", "green"]
    targets = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(3)]
    rewards = rewards or grpo.load_rewards("color")
    return grpo.GRPOTrainer(config, make_wrapper(config=config), prompts, rewards, targets)

def make_rollout(trainer, step=1):
    """What `train` hands to `train_step`: a rollout and its advantages."""
    config = trainer.config
    places, seeds = grpo.choose_prompts(step, len(trainer.prompts), config)
    prompts = [trainer.prompts[i] for i in places]
    rollout = trainer.wrapper.generate_with_tracking(prompts, config.group_size, seeds)
    rewards, _ = grpo.compute_rewards(rollout.images, rollout.prompts, None, trainer.rewards)
    return rollout, grpo.compute_advantages(rewards, config.group_size)

def roll(wrapper, group_size=3, nuclei=True):
    """A Rollout of PROMPTS that is not painted."""
    tokens, logprobs, kept = wrapper.sample(PROMPTS, group_size, seeds=[1, 2])
    prompts = [prompt for prompt in PROMPTS for _ in range(group_size)]
    return grpo.Rollout(prompts, [None] * len(prompts), tokens, logprobs, kept if nuclei else None)

@pytest.fixture(scope="session")
def sampled():
    """Two groups of three samples."""
    return roll(make_wrapper(), nuclei=False)

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
        config = state["config"] | dict(out=None, resume=None, offload=None)
        state |= dict(history=rows_of(out), config=config)
        states.append(json.dumps(state, default=torch.Tensor.tolist, sort_keys=True))
    assert states[0] == states[1]
    for name in names:
        if name.name not in ("checkpoint.pt", "metrics.jsonl"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name

def adapter_of(out, step):
    """What was saved beside the pictures of this step."""
    return load_file(out / f"adapter_{step:05d}/adapter_model.safetensors")

def assert_files(out, *steps):
    """All that a run leaves, with pictures of these steps."""
    names = [name for step in steps for name in (f"adapter_{step:05d}", f"samples_{step:05d}.png")]
    assert {path.name for path in out.iterdir()} == {"checkpoint.pt", "metrics.jsonl", *names}

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of five steps."""
    out = tmp_path_factory.mktemp("finished") / "run"
    make_trainer(out).train()
    return out

# --- Settings -----------------------------------------------------------------------------------------------
def test_whole_numbers_are_welcome_where_fractions_are_meant():
    """In a notebook kl_coef=0 was taken for a count: "must be from 1"; and 48 pixels are no whole tokens."""
    whole = dict(kl_coef=0, lr=0, clip_range=0, guidance=0, temperature=1, top_p=1, max_grad_norm=1)
    grpo.check_settings(make_config(**whole))
    for name, wrong in dict(width=48, height=80, top_p=1.5, lr=math.nan, group_size=1).items():
        with pytest.raises(grpo.BadInput, match=f"--.*{name}"):
            grpo.check_settings(make_config(**{name: wrong}))
    with mock.patch.object(grpo, "WORLD_SIZE", 2), pytest.raises(grpo.BadInput, match="--batch_size .* 2"):
        grpo.check_settings(make_config(batch_size=3))  # the answer was about width and height

def test_which_gpu_is_looked_at(monkeypatch):
    """The free memory is that of other programs too; and RANK counts over machines: LOCAL_RANK is the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gib, model in ((22, grpo.SMALL_MODEL), (64, "zai-org/GLM-Image")):
        memory = mock.Mock(total_memory=gib * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
        names = runpy.run_path(grpo.__file__)
        assert (names["GPU_GIB"], names["Config"]().model) == (gib, model)
    monkeypatch.setattr(torch.cuda, "set_device", mock.Mock(side_effect=InterruptedError))
    with mock.patch.dict(os.environ, RANK="11", LOCAL_RANK="3"), pytest.raises(InterruptedError):
        names["main"]()
    torch.cuda.set_device.assert_called_once_with(3)

# --- The maths ----------------------------------------------------------------------------------------------
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

def test_the_clip_by_hand(ratio, advantage, clip_range, surrogate, moves):
    """Guards the min: with max, or with the clip alone, two of the first four are wrong."""
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = grpo.compute_grpo_loss(new, torch.zeros(1, 1), torch.tensor([advantage]), clip_range)
    loss.backward()
    assert new.grad.any() == moves and metrics == pytest.approx(dict(
        loss=-surrogate, policy_loss=-surrogate, ratio_mean=ratio, clip_frac=float(not moves)))  # and no KL

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

def test_advantages_are_not_broadcast():
    """As [N, 1] or [N, T], or with log-probs [N], the gradient was once 1e-9 and the loss looked fine."""
    for advantages, logprobs in (
            ((4, 1), (4, 4)), ((4, 4), (4, 4)), ((3,), (4, 4)), ((5,), (4, 4)), ((), (4, 4)), ((4,), (4,))):
        with pytest.raises(ValueError, match="advantages"):
            grpo.compute_grpo_loss(torch.ones(logprobs), torch.ones(logprobs), torch.ones(advantages))

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
    (True, 2.0), np.array([1, 2], np.float16), torch.tensor([[1.0], [2.0]]), [torch.tensor(1.0), 2]])
def test_rewards_take_any_sequence_of_numbers(values):
    """A column [N, 1] summed with an [N] once broadcast to [N, N], and was trained on as nonsense."""
    rewards = {"a": (lambda *_: values, 1.0), "b": (lambda *_: [10.0, 20.0], -0.5)}
    total, metrics = grpo.compute_rewards(*blank(2), rewards)
    assert total.tolist() == [-4.0, -8.0] and metrics == {"reward/a": 1.5, "reward/b": 15.0, "reward": -6.0}

@pytest.mark.parametrize("values", [[], [0.5], [0.5] * 3, [0.5, -math.inf], [math.nan, 1]])
def test_a_reward_without_a_finite_number_for_each_image_is_named(values):
    """It would train silently on something else."""
    rewards = {"fine": (lambda *_: [1, 2], 1.0), "broken": (lambda *_: values, 0.0)}
    with pytest.raises(ValueError, match="broken"):
        grpo.compute_rewards(*blank(2), rewards)

@pytest.mark.parametrize("alone", [True, False])
def test_each_reward_gets_its_own_pictures_and_no_graph(alone):
    """What one paints over no other sees, nor who saves them; and a CLIP that kept its graph fills a GPU."""
    spoil = lambda images, *_: [images[0].paste("red", (0, 0, 8, 8)) or torch.is_grad_enabled()]
    red = lambda images, *_: [images[0].getpixel((0, 0))[0]]
    rewards = {"spoil": (spoil, 1.0)} if alone else {"spoil": (spoil, 1.0), "red": (red, 1.0)}
    images, prompts, targets = blank(1)
    _, metrics = grpo.compute_rewards(images, prompts, targets, rewards)
    assert not any(metrics.values()) and not images[0].getbbox()

def test_rewards_are_loaded_with_their_weights(tmp_path):
    """Two rewards of a file share what it loads, or its model would be loaded twice; its path has a colon."""
    own = tmp_path / "C:own.py"
    own.write_text("import itertools\ncount = itertools.count()  # the images that both have seen\n"
                   "def a(images, prompts, targets): return [next(count) for _ in images]\nb = a\n")
    rewards = grpo.load_rewards(f"color=2, mse,{own}:a,{own}:b=.5")
    assert [rewards.pop("color"), rewards.pop("mse")] == [(grpo.reward_color, 2.0), (grpo.reward_mse, 1.0)]
    _, metrics = grpo.compute_rewards(*blank(2), rewards)
    assert metrics == {f"reward/{own}:a": 0.5, f"reward/{own}:b": 2.5, "reward": 1.75}
    own.write_text("def a(images, *_): return [7]")
    (again, _), = grpo.load_rewards(f"{own}:a").values()
    assert again([]) == [7]  # a file that was changed is read again
    assert grpo.load_rewards("color=0")["color"][1] == 0  # only watched; `weight or 1` of a number is 1

def test_a_file_of_rewards_may_import_its_neighbour_and_is_checked_before_training(tmp_path, monkeypatch):
    """"No module named neighbour"; and a reward of two parameters failed after the first rollout only."""
    monkeypatch.setattr("sys.path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    Path("neighbour.py").write_text("three = 3")
    Path("own.py").write_text(
        "from neighbour import three\ndef a(images, prompts, targets=None): return [three]\nnumber = 7\n"
        "def short(images, prompts): return [1]\ndef long(images, prompts, targets, more): return [1]\n")
    assert grpo.load_rewards("own.py:a")["own.py:a"][0]([None], [""]) == [3]
    for name in ("short", "long", "number", "missing", "a=much"):
        with pytest.raises(grpo.BadInput, match=r"own\.py:"):
            grpo.load_rewards(f"own.py:{name}")

def test_prompts_file(tmp_path):
    """Marks, comments and blank lines are no prompts; one with two targets is two; targets lie beside it."""
    Image.new("L", (3, 3)).save(tmp_path / "t.png")
    Image.new("RGB", (5, 5)).save(tmp_path / "u.png")
    text = "\ufeff# no\n\n  # nor this\n  a red fox\tt.png\nplain #1 \na red fox\tu.png\n"
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    prompts, (target, none, other) = grpo.load_prompts(tmp_path / "p.txt")
    assert prompts == ["a red fox", "plain #1", "a red fox"] and none is None
    assert target.mode == "RGB" and [target.size, other.size] == [(3, 3), (5, 5)]
    (tmp_path / "q.txt").write_text("# no\na red fox\n\na cat\tand a blue bird\n")
    with pytest.raises(grpo.BadInput, match=r"q\.txt: .* 'a cat'.*and a blue bird"):  # "No such file", it said
        grpo.load_prompts(tmp_path / "q.txt")

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
    with lora.disabled():
        assert torch.equal(model["a"](x), base)
    lora.save(tmp_path)
    assert list(lora.weights) == [f"base_model.model.a.lora_{AB}.weight" for AB in "AB"]

def test_adapters_that_do_not_fit_are_refused_before_anything_is_copied(tmp_path):
    """peft's own alpha, the rank, came in at twice its strength; others were half copied."""
    lora = make_lora("a", "b")
    before = copy.deepcopy(lora.weights)
    for name, change in dict(good={}, alpha=dict(lora_alpha=4), rank=dict(r=8, lora_alpha=16),
                             rslora=dict(use_rslora=True)).items():
        perturb(lora).save(tmp_path / name)
        path = tmp_path / name / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    for layers in ("a", "abc", "ac"):
        make_lora(*layers).save(tmp_path / layers)
    lora.load(before)
    for name in ("alpha", "rank", "rslora", "a", "abc", "ac", "missing"):
        with pytest.raises(grpo.BadInput, match="--adapter"):
            lora.load(grpo.read_adapter(tmp_path / name, 4))
        assert all(torch.equal(weight, before[key]) for key, weight in lora.weights.items())
    lora.load(grpo.read_adapter(tmp_path / "good", 4))
    assert not any(torch.equal(weight, before[key]) for key, weight in lora.weights.items())

def test_loaded_adapters_keep_their_type_and_place(tmp_path):
    """`weight.data = saved` trained in bf16 what a bf16 file held, and on the CPU; broadcast, nonsense."""
    lora = make_lora("a")
    lora.save(tmp_path)
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

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapters_train(dtype, tmp_path):
    """All else is frozen; they are fp32, in the file too: in bf16 0.02 plus a step of 5e-5 is 0.02."""
    wrapper, lora = make_adapted(dtype, top_p=0.6)
    logprobs, entropy = wrapper.compute_logprobs(roll(wrapper))
    assert entropy.isfinite().all() and not entropy.requires_grad  # 0 * log 0 outside the nucleus
    logprobs.sum().backward()
    lora.save(tmp_path)
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
    lora.save(tmp_path)
    others = make_wrapper(), make_wrapper(), trained
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
    """Recomputed they are, or GLM-Image needs another card; and eval mode is back, for the stock pipeline."""
    gradients = []
    for calls in (2, 1):
        wrapper, lora = make_adapted()
        if calls == 1:
            wrapper.policy.activation_checkpointing_disable()
        passes = mock.Mock(return_value=None)
        wrapper.policy.model.language_model.layers[0].mlp.register_forward_hook(passes)
        logprobs, _ = wrapper.compute_logprobs(sampled)
        assert not any(module.training for module in wrapper.ar.modules())
        logprobs.square().mean().backward()
        assert passes.call_count == calls
        gradients.append(torch.cat([weight.grad.flatten() for weight in lora.weights.values()]))
    assert gradients[0].any() and torch.equal(*gradients)

@pytest.mark.parametrize("top_p", [None, 0.6])
def test_ratio_is_one_until_the_first_update(tmp_path, top_p):
    """Old log-probs from another pass, or a pass that forgets the nuclei of top-p, would start off 1."""
    trainer = make_trainer(tmp_path / "run", lr=0.01, top_p=top_p, clip_range=0.0)  # which clips all but 1
    advantages = torch.tensor([1.0, -1.0] * 4)  # whatever the rewards: with changes a group may have no spread
    rollout, _ = make_rollout(trainer)
    assert rollout.nuclei.all() == (top_p is None)
    once = trainer.train_step(rollout, advantages)
    assert once["ratio_mean"] == 1 and once["kl"] == once["clip_frac"] == 0
    trainer.config.num_iterations = 2
    rollout, _ = make_rollout(trainer, step=2)
    twice = trainer.train_step(rollout, advantages)
    assert twice["ratio_mean"] != 1 and twice["clip_frac"] > 0 and 0 < twice["kl"] < 100
    assert max(once["sampler_gap_max"], twice["sampler_gap_max"]) < 1e-4

@pytest.mark.parametrize("kl_coef, passes", [(0.1, 4), (0.0, 2)])
def test_the_reference_is_the_policy_with_its_adapters_off(tmp_path, kl_coef, passes):
    """The last policy as reference would let the run drift away; at --kl-coef 0 its pass would be wasted."""
    trainer = make_trainer(tmp_path / "run", kl_coef=kl_coef, lr=0.0)
    perturb(trainer.lora)
    rollout, advantages = make_rollout(trainer)
    original = trainer.wrapper.compute_logprobs
    with trainer.lora.disabled(), torch.no_grad():
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
    """A notebook went on with adapters off, old gradients, or in training mode, where no cache is kept."""
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

def test_prompts_rewards_and_tokens_stay_in_one_order(tmp_path):
    """A reward that reads the prompt must meet the image of that prompt: p0 p0 .. p1 p1 .. all the way."""
    spy = mock.Mock(return_value=torch.arange(8))
    trainer = make_trainer(tmp_path / "run", {"spy": (spy, 1.0)}, steps=4)
    trainer.history = [None] * 3  # the fourth step is of prompts that do not stand in the order of the file
    wrapper = trainer.wrapper
    chosen, seeds = grpo.choose_prompts(4, 3, trainer.config)
    trainer.log = mock.Mock()
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
    assert images == rollout.images == wrapper.decode(prompts[::4], rollout.tokens, seeds)

def test_metrics_by_hand(tmp_path, monkeypatch):
    """A wrong spread, gap or entropy looks healthy for ever; time is that of a step, memory its maximum."""
    trainer = make_trainer(
        tmp_path / "run", {"a": (lambda *_: [0.3] * 4 + [1, 2, 3, 6], 2.0)}, steps=3, save_every=1)
    wrapper = trainer.wrapper
    forward = wrapper.forward
    wrapper.forward = lambda *inputs, **cache: 0 * forward(*inputs, **cache)
    generate = wrapper.generate_with_tracking = mock.Mock(wraps=wrapper.generate_with_tracking)
    monkeypatch.setattr(grpo, "time", mock.Mock(perf_counter=lambda: generate.call_count))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 3 * 2**30)
    trainer.train()
    assert [(row["seconds"], row["gpu_gib_max"]) for row in trainer.history] == [(1, 3)] * 3
    row = trainer.history[0]
    assert row["reward_std"] == pytest.approx(2 * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert row["reward"] == pytest.approx(2 * row["reward/a"]) == pytest.approx(2 * 13.2 / 8)
    assert row["entropy"] == pytest.approx(math.log(8))  # in nats: each of 8 codes is as likely
    rollout, advantages = make_rollout(trainer)
    rollout.logprobs[5, 3] -= 0.1
    assert trainer.train_step(rollout, advantages)["sampler_gap_max"] == pytest.approx(0.1, rel=1e-3)

@pytest.mark.parametrize("spread", [0, 1])
def test_a_step_without_any_spread_says_so(tmp_path, capsys, spread):
    """Equal rewards, exact or not in floats, teach nothing, and no word said why the policy stood still."""
    rewards = {"a": (lambda images, *_: [0.3 + spread * (i == 0) for i in range(len(images))], 1.0)}
    trainer = make_trainer(tmp_path / "run", rewards, steps=1, group_size=6, kl_coef=0.0)
    trainer.train()
    assert ("taught nothing" in capsys.readouterr().out) == (spread == 0)
    assert (trainer.history[0]["grad_norm"] > 0) == (trainer.history[0]["reward_std"] > 0) == (spread == 1)

def test_each_of_several_rewards_is_shown(tmp_path, capsys):
    """A witness of weight 0 helps nobody who looks at the console alone; a single reward is shown once."""
    for names in ("a", "ab"):
        rewards = {name: (lambda images, *_: range(len(images)), 1.0) for name in names}
        make_trainer(tmp_path / names, rewards, steps=1).train()
        shown = re.findall(r"reward/(\w) +(\S+)", capsys.readouterr().out)
        assert shown == [(name, "3.5") for name in names if names == "ab"]

def test_metrics_are_of_all_gpus(monkeypatch):
    """They were those of the first process alone; and the mean of maxima is none."""
    own = dict(loss=1.0, grad_norm=1.0, sampler_gap_max=0.1, gpu_gib_max=7.0)
    other = dict(loss=3.0, grad_norm=math.nan, sampler_gap_max=0.5, gpu_gib_max=1.0)
    assert grpo.merge_over_gpus(own) == own
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object",
                        lambda rows, metrics: rows.__setitem__(slice(2), [metrics, other]))
    merged = grpo.merge_over_gpus(own)
    assert all(type(value) is float for value in merged.values())  # a checkpoint takes no numpy numbers
    assert math.isnan(merged.pop("grad_norm")) and merged == dict(loss=2, sampler_gap_max=0.5, gpu_gib_max=7)
    other["sampler_gap_max"] = math.nan
    assert math.isnan(grpo.merge_over_gpus(own)["sampler_gap_max"])
def test_the_first_process_alone_writes(tmp_path, monkeypatch, capsys):
    """Two that write one file tear each other's lines."""
    monkeypatch.chdir(tmp_path)
    with (mock.patch.multiple(grpo, RANK=1, WORLD_SIZE=2), mock.patch("torch.distributed.all_reduce"),
          mock.patch.object(grpo, "merge_over_gpus", side_effect=dict)):
        trainer = make_trainer("run", steps=2, save_every=1)
        trainer.train()
    assert len(trainer.history) == 2 and not any(tmp_path.iterdir()) and not capsys.readouterr().out

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
    trainer.save_checkpoint = lambda: lengths.append((len(trainer.history), len(rows_of(trainer.out))))
    original = print
    monkeypatch.setattr("builtins.print", lambda *args, file=None, **more: (
        original(*args, file=file, **more) if file else printed(**more)))
    trainer.train()
    assert lengths == [(1, 1), (2, 2), (3, 3)] and printed.call_args_list == [mock.call(flush=True)] * 3

def test_metrics_of_nan_are_valid_json(tmp_path):
    """NaN is no JSON: pandas and jq refused the whole file; and in the history it must stay NaN."""
    trainer = make_trainer(tmp_path / "run", kl_coef=0.0)
    trainer.log(1, dict(reward=1.0, reward_std=0.5, loss=math.nan, grad_norm=math.inf))
    text = (tmp_path / "run/metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=pytest.fail)
    assert row["loss"] is row["grad_norm"] is None and row["reward"] == row["step"] == 1
    assert math.isnan(grpo.read_checkpoint(tmp_path / "run")["history"][0]["loss"])
def test_fixed_pictures_have_fixed_prompts_and_seeds(tmp_path):
    """What training draws in between must not show."""
    trainer = make_trainer(tmp_path / "run")
    trainer.prompts = list("abcdefghi")
    generate = trainer.wrapper.generate_with_tracking = mock.Mock(return_value=mock.Mock(images=blank(8)[0]))
    trainer.save_samples(1)
    assert generate.call_args.args == (trainer.prompts[:8], 1, range(8))

def test_resume_is_bit_for_bit(finished, tmp_path):
    """Also after a full disk; and the constructor loads the run, over which `train()` alone began anew."""
    out = tmp_path / "run"
    trainer = make_trainer(out)
    save = mock.Mock(wraps=trainer.lora.save, side_effect=[mock.DEFAULT, OSError("the disk is full")])
    with mock.patch.object(trainer.lora, "save", save), pytest.raises(OSError, match="full"):
        trainer.train()
    assert step_of(out) == 1 and rows_of(out) == rows_of(finished)[:1]
    (out / "metrics.jsonl").write_text('{"step": 2, "rew')  # torn
    make_trainer(out).train()
    assert_same_run(finished, out)

def test_train_again_after_an_error_repeats_no_step(finished, tmp_path):
    """A notebook's cell: the steps of the log were 1 2 3 3 4 5, or the failed folder was refused."""
    trainer = make_trainer(tmp_path / "run")
    broken = mock.Mock(wraps=trainer.train_step, side_effect=[mock.DEFAULT, mock.DEFAULT, KeyError])
    with mock.patch.object(trainer, "train_step", broken), pytest.raises(KeyError):
        trainer.train()
    assert step_of(tmp_path / "run") == 2
    trainer.train()
    assert_same_run(finished, tmp_path / "run")

def test_a_resumed_run_keeps_its_weights_and_takes_what_is_typed(tmp_path):
    """It went back to the --adapter that it began with; and an --lr that is the default was not taken."""
    lora = perturb(make_trainer(tmp_path / "first").lora)
    lora.save(tmp_path / "adapter")
    trainer = make_trainer(tmp_path / "run", steps=1, adapter=str(tmp_path / "adapter"))
    assert all(torch.equal(weight, lora.weights[name]) for name, weight in trainer.lora.weights.items())
    trainer.train()
    for lr in (grpo.Config.lr, 0.125):
        resumed = make_trainer(tmp_path / "run", steps=2, lr=lr)
        assert resumed.optimizer.param_groups[0]["lr"] == lr and len(resumed.history) == 1
        for name, weight in resumed.lora.weights.items():
            assert torch.equal(weight, trainer.lora.weights[name])
            assert not torch.equal(weight, lora.weights[name])
def test_resume_refuses_what_would_be_another_run(finished):
    """Other prompts, or as many others a step, changed the order midway; a finished one did nothing."""
    before = {path: path.read_bytes() for path in finished.rglob("*.*")}
    for name, value in dict(batch_size=4, seed=1, lora_rank=2, model="other", adapter="a", steps=5).items():
        with pytest.raises(grpo.BadInput, match=f"--{name}"):
            make_trainer(finished, **dict(steps=9) | {name: value})
    state = grpo.read_checkpoint(finished)
    config = make_config(**state["config"] | dict(steps=9, resume=str(finished)))
    for prompts in (state["prompts"][::-1], state["prompts"] + ["red"], state["prompts"][:2]):
        with pytest.raises(grpo.BadInput, match="--prompts"):
            grpo.GRPOTrainer(config, make_wrapper(config=config), prompts, grpo.REWARDS)
    assert {path: path.read_bytes() for path in finished.rglob("*.*")} == before

def test_two_trainers_never_share_a_folder(finished, tmp_path, monkeypatch):
    """Of two with one --out one log was lost; and two of one second had one name, runs/<date-time>."""
    before = {path: path.read_bytes() for path in finished.rglob("*.*")}
    monkeypatch.setattr(grpo, "time", mock.Mock(strftime=lambda name: name))  # the clock stands still
    monkeypatch.chdir(tmp_path)
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda: pid)
        assert make_trainer(None, out=None).out == Path(f"runs/%Y%m%d-%H%M%S-{pid}")
    config = make_config(out=str(finished))
    with pytest.raises(grpo.BadInput, match="--out"):
        grpo.GRPOTrainer(config, make_wrapper(config=config), ["green"], grpo.load_rewards("color"))
    assert {path: path.read_bytes() for path in finished.rglob("*.*")} == before

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
    """What it feeds, at positions that `generate` makes. Padding sees padding: of nothing it would be NaN."""
    wrapper = shipped(width=width, height=height)
    wrapper.policy.generate = mock.Mock(side_effect=KeyError)
    wrapper.pipe.processor.tokenizer.padding_side = "left"  # as it is told by ours
    with pytest.raises(KeyError):
        wrapper.pipe.generate_prior_tokens(PROMPTS, height, width)
    stock = wrapper.policy.generate.call_args.kwargs
    ids, position_ids, bias = wrapper.encode(PROMPTS)
    mask = stock["attention_mask"]
    assert torch.equal(stock["input_ids"], ids) and (mask == 0).any()
    model = wrapper.policy.model
    prompt, _ = model.get_rope_index(ids, stock["image_grid_thw"], torch.tensor([2, 2]), mask)
    image = model._cached_decode_position_ids.movedim(1, 0)[:, :, :-1]  # the last one is for EOS
    masks = F.pad(mask, (0, image.shape[2]), value=1)
    real = masks.bool().expand(3, -1, -1)
    assert torch.equal(position_ids[real], torch.cat([prompt, image], dim=2)[real])
    for rows, real in zip(bias[:, 0].tolist(), masks.tolist()):
        for i, row in enumerate(rows):
            assert row == [0 if j <= i and real[j] == real[i] else -math.inf for j in range(len(real))]

@pytest.mark.parametrize("top_p, dtype, bound", [
    (1.0, torch.float32, 1e-5), (0.6, torch.float32, 1e-5), (1.0, torch.bfloat16, 0.05)])
def test_sampler_and_trainer_agree(top_p, dtype, bound):
    """THE test: cached steps and a teacher-forced pass agree, with padding and top-p; a naive pass is off."""
    wrapper = make_wrapper(dtype, top_p=top_p)
    rollout = roll(wrapper)
    tokens, logprobs, nuclei = rollout.tokens, rollout.logprobs, rollout.nuclei
    assert tokens.shape == logprobs.shape == (6, 2 * 1 + 4 * 2) and logprobs.dtype == torch.float32
    assert nuclei.shape == (6, 10, 8) and nuclei.dtype == torch.bool
    ids, position_ids, bias = wrapper.encode(rollout.prompts)
    with torch.no_grad():
        again, entropy = wrapper.compute_logprobs(rollout)
        unmasked, whole = wrapper.compute_logprobs(dataclasses.replace(rollout, nuclei=None))
        logits = wrapper.forward(torch.cat([ids, tokens], 1), position_ids, bias)
        assert torch.allclose(logits * 0.9, (logits * 0.9).to(dtype).float(), rtol=1e-6)  # divided in fp32
        out = wrapper.policy(torch.cat([ids, tokens], 1), attention_mask=(position_ids[0] >= 0).long())
        naive = grpo.compute_policy_logprobs(out.logits[:, -11:-1, :8].float() / 0.9, nuclei)  # it takes text
        wrapper.temperature = 1.0
        wrong, _ = wrapper.compute_logprobs(rollout)
    for other in (wrong, naive.gather(2, tokens[..., None]).squeeze(2)):
        assert (again - logprobs).abs().max() < bound < (other - logprobs).abs().max()
    if top_p < 1:
        assert (unmasked - logprobs).mean() < -0.1 and (entropy - whole).mean() < -0.1

@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sampling_is_transformers_own_decoding_row_by_row(top_p):
    """The witness is slow and plain: the public `forward`, no batch, no padding, a nucleus by sorting."""
    wrapper = make_wrapper(top_p=top_p)
    stock = make_pipe().vision_language_encoder.eval()  # with norms of its own
    tokens, logprobs, nuclei = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    chance = torch.cat([torch.rand(3, 10, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    for row in range(6):
        ids, _, _ = wrapper.encode([PROMPTS[row // 3]])
        L = ids.shape[1]
        grids = torch.tensor([[1, 4, 2], [1, 2, 1]])
        out = stock(input_ids=ids, attention_mask=torch.ones(1, L), use_cache=True,
                    image_grid_thw=grids, images_per_sample=torch.tensor([2]))
        for i in range(10):
            logits = out.logits[0, -1, :8] / 0.9
            probs, order = logits.softmax(dim=0).sort(descending=True)
            kept = probs.cumsum(dim=0) - probs < top_p  # while what stands before holds too little
            nucleus = torch.zeros(8).bool().scatter(0, order, kept)
            logp = logits.masked_fill(~nucleus, -math.inf).log_softmax(dim=0)
            mass = logp.double().exp().cumsum(dim=0)
            code = torch.searchsorted(mass, chance[row, i] * mass[-1], right=True)
            assert code == tokens[row, i] and abs(logp[code] - logprobs[row, i]) < 1e-5
            assert torch.equal(nuclei[row, i], nucleus)
            out = stock(input_ids=code.view(1, 1), attention_mask=torch.ones(1, L + i + 1),
                        use_cache=True, past_key_values=out.past_key_values)
    assert nuclei.all() == (top_p == 1)

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
        wrapper = WRAPPER(pipe, make_config(**typed))
        assert wrapper.temperature == temperature and roll(wrapper).nuclei.all() == (top_p == 1)

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
        moves, hidden = [], []

        def move_to_gpu(half):
            if half is not wrapper.on_gpu:
                moves.append("ar" if half is wrapper.ar else "dit")
            while hidden:
                tensor, tensor.data = hidden.pop()
            WRAPPER.move_to_gpu(wrapper, half)
            other = wrapper.dit if half is wrapper.ar else wrapper.ar
            for tensor in tensors_of(wrapper.policy.model.visual, other):
                hidden.append((tensor, tensor.data))
                tensor.data = torch.full_like(tensor, math.nan)

        if offload == "on":
            wrapper.move_to_gpu = move_to_gpu
        trainer.train()
    assert moves == ["ar", "dit"] + ["ar", "dit", "ar"] + ["dit"]  # pictures, a step, pictures
    assert_same_run(tmp_path / "off", tmp_path / "on")
    tokens, _, _ = wrapper.sample(["a red fox"], 1, [3])
    wrapper.decode(["a red fox"], tokens, [3])  # by hand: each brings its own half
    assert moves[6:] == ["ar", "dit"]

def test_halves_take_turns_on_the_gpu(monkeypatch):
    """Fragments of one left no room for the other on 24 GB; an interrupt in the middle is mended; and what
    leaves is found where it was on the host, as 31 GiB copied back were a tenth of a step."""
    wrapper = make_wrapper(offload="on")
    halves = [list(half.parameters()) for half in (wrapper.ar, wrapper.dit)]
    homes = {weight: weight.data_ptr() for weight in wrapper.both.parameters()}
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

    monkeypatch.setattr(wrapper.ar, "to", functools.partial(move, half=halves[0]))
    monkeypatch.setattr(wrapper.dit, "to", functools.partial(move, half=halves[1]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(held()))
    for half in (wrapper.ar, wrapper.ar, wrapper.dit, wrapper.dit):
        wrapper.move_to_gpu(half)
        assert held() == [{half is wrapper.ar}, {half is wrapper.dit}]
    assert emptied == [[{False}, {False}]] * 2  # only when they change, and with nothing there
    for half in (wrapper.dit, wrapper.ar):
        wrapper.move_to_gpu(wrapper.dit)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(wrapper.ar, "to", functools.partial(move, half=halves[0], interrupt=True))
            wrapper.move_to_gpu(wrapper.ar)
        assert held() == [{True, False}, {False}]
        wrapper.move_to_gpu(half)
        assert held() == [{half is wrapper.ar}, {half is wrapper.dit}]

@pytest.mark.parametrize("offload, gib, where", [
    ("on", 80, "cpu"), ("off", 10, "meta"), ("auto", 40, "cpu"), ("auto", 80, "meta"), ("auto", 0, "meta")])
def test_where_the_halves_wait_and_adapters_are_drawn(monkeypatch, offload, gib, where):
    """Adapters are drawn on the CPU: two kinds of GPU would begin with others, and add up their gradients."""
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
        logprobs, _ = wrapper.compute_logprobs(grpo.Rollout(prompts, [], tokens, None, None))
    chances = logprobs.exp()
    assert chances[:, :256].min() > 0.99 and (chances[:, 256:].mean(1) - 0.45).abs().max() < 0.1

def test_the_shipped_model_takes_any_prompt_and_the_smallest_size(shipped):
    """A prompt with the word "image", then a mark, ended the run; at 32 pixels the draft was empty."""
    words = "image bos eos pad unk grid_bos grid_eos cls sep mask [PAD] [UNK] [CLS] <|image|> <image> #"
    prompts = [*words.split(), words, "a red fox"]
    wrapper = shipped(width=32, height=32)
    rollout = wrapper.generate_with_tracking(prompts, 2, range(len(prompts)))
    assert rollout.tokens.shape == (2 * len(prompts), 256 + 1) and rollout.images[0].size == (32, 32)
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

def test_the_first_command_learns_and_leaves_what_the_readme_says(first_command, monkeypatch):
    """Rewards rise by far more than luck, all fixed pictures but one at most get their colour; it goes on."""
    process, out = first_command
    printed, error = process.communicate(timeout=600)
    (out.parent / "printed").write_text(printed)  # for .ci/test_readme.py
    bars = re.split(r"[\r\n]|\x1b\[A", error)  # of the libraries, while they load the model
    assert process.returncode == 0 and all(bar.startswith("Loading ") for bar in bars if bar), error
    first, *lines = [line for line in printed.splitlines() if not line.startswith("All groups had equal ")]
    assert re.fullmatch("model: .*examples/tiny-glm-image on cpu, files: out", first)
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
