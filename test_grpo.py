"""Tests of grpo.py: identities, mostly, on a toy of random weights. No network, no GPU: `pytest -q`.
They stand in the order of grpo.py. While you change something, run what looks at it; at the end, run all:
    advantages, loss    pytest -q -k "advantages or clip or k3 or ratio or gradient or logprob or settings"
    rollout, update     pytest -q -k "gradient or update or step or order or metrics or ratio or reference"
    files, adapters     pytest -q -k "written or resume or cell or picture or lora or adapters or kill or gpu"
    rewards, prompts    pytest -q -k "reward or pictures or prompts"
    sampling, painting  pytest -q -k "position or sampl or chance or paint or half or halves or card or toy"
    the command line    pytest -q -k "command or config or bad or bug or failure or kill or help or wrapper"
"""
import contextlib, copy, dataclasses, functools, inspect, json, math, multiprocessing, os, random, re
import runpy, shutil, signal, socket, subprocess, sys, threading, traceback
from pathlib import Path
from unittest import mock

# The tests compare with tensors on the CPU, and start processes by forking, which CUDA does not survive.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import diffusers, pytest, torch
import numpy as np
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file

import grpo

torch.set_num_threads(1)  # two would wait for each other, busily, where the machine does other work
HERE = Path(__file__).parent
PROMPTS = ["a red fox on a wall", "yellow"]  # of different length, so that one of them is padded
WRAPPER = grpo.GLMImageWrapper
QUICK = functools.partial(grpo.make_tiny_pipeline, fit_steps=0)  # the toy with random weights

# --- What the tests are made of -----------------------------------------------------------------------------
def make_config(**settings):
    """64 wide and 128 high, which is not square, and a temperature that is not 1."""
    own = dict(width=64, height=128, temperature=0.9, batch_size=2, steps=4, micro_batch_size=4)
    return grpo.Config(**grpo.TINY | own | settings)

def make_wrapper(dtype=torch.float32, config=None, **settings):
    """A fresh toy of random weights. Its draft has 2 x 1 tokens: in a square, rows could pass for columns."""
    pipe = QUICK(0)
    pipe.vision_language_encoder.to(dtype)
    pipe.processor._get_target_shape = lambda height, width: (
        height // 32, width // 32, height // 64, width // 64)
    return WRAPPER(pipe, config or make_config(**settings))

def make_adapted(dtype=torch.float32, **settings):
    """A fresh toy and adapters that do something."""
    wrapper = make_wrapper(dtype, **settings)
    torch.manual_seed(0)
    return wrapper, perturb(grpo.LoRA(wrapper.policy, wrapper.TARGETS, rank=4))

def perturb(lora):
    """Adapters that do something: B starts at 0."""
    torch.manual_seed(5)
    for weight in lora.weights.values():
        weight.data.add_(0.1 * torch.randn_like(weight))
    return lora

def make_trainer(folder, rewards=None, **settings):
    """A trainer of the random toy: 2 prompts x 4 images, five steps; or of the run that is in the folder."""
    config = grpo.Config.from_run(folder, **settings) if os.path.exists(f"{folder}/checkpoint.pt") else (
        make_config(**dict(out=str(folder), temperature=None, steps=5, save_every=2) | settings))
    prompts = ["a red fox", "some yellow thing here", "green"]
    targets = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(3)]
    return grpo.GRPOTrainer(config, make_wrapper(config=config), prompts, rewards, targets)

def make_rollout(trainer, step=1):
    """What `train` hands to `train_step`."""
    rollout, _ = trainer.rollout(step)
    rollout["advantages"] = grpo.compute_advantages(rollout["rewards"], trainer.config.group_size)
    return rollout

@pytest.fixture(scope="session")
def sampled():
    """Two groups of three samples: prompts of the six rows, tokens, log-probs."""
    tokens, logprobs, _ = make_wrapper().sample(PROMPTS, 3, seeds=[1, 2])
    return [p for p in PROMPTS for _ in range(3)], tokens, logprobs

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

# --- Settings -----------------------------------------------------------------------------------------------
def test_whole_numbers_are_welcome_where_fractions_are_meant():
    """In a notebook kl_coef=0 was taken for a count: "must be from 1"."""
    whole = dict(kl_coef=0, lr=0, clip_range=0, guidance=0, temperature=1, top_p=1, max_grad_norm=1)
    assert whole.items() <= vars(make_config(**whole)).items()
    with mock.patch.object(grpo, "WORLD_SIZE", 2), pytest.raises(ValueError, match="batch_size .* of 2"):
        make_config(batch_size=3)  # the answer was about width and height

def test_which_gpu_is_looked_at(monkeypatch):
    """The free memory is that of other programs too; and RANK counts over machines: LOCAL_RANK is the GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: mock.Mock(total_memory=64 * 2**30))
    names = runpy.run_path(grpo.__file__)
    assert (names["GPU_GIB"], names["Config"].model) == (64, "zai-org/GLM-Image")
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
    with pytest.raises(ValueError, match="group of one"):  # its std is NaN
        grpo.compute_advantages([1, 2], 1)

@pytest.mark.parametrize("ratio, advantage, clip_range, surrogate, moves", [
    (1.5, 1.0, 0.2, 1.2, False),  # better and already much likelier: clipped, no gradient
    (1.5, -1.0, 0.2, -1.5, True),  # worse but much likelier: the full push back
    (0.5, 1.0, 0.2, 0.5, True),  # better but much rarer: the full pull
    (0.5, -1.0, 0.2, -0.8, False),  # worse and already much rarer: clipped, no gradient
    (1.15, 1.0, 0.1, 1.1, False), (0.85, -1.0, 0.1, -0.9, False),  # 0.1 alone clipped at .9 and 1.2
    (1.3, 1.0, 0.4, 1.3, True), (0.7, -1.0, 0.4, -0.7, True), (1.3, 1.0, 0, 1.0, False)])  # 0 is a bound too
def test_the_clip_by_hand(ratio, advantage, clip_range, surrogate, moves):
    """Guards the min: with max, or with the clip alone, two of the first four are wrong."""
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, metrics = grpo.compute_grpo_loss(new, torch.zeros(1), torch.tensor([advantage]), clip_range)
    loss.backward()
    assert new.grad.any() == moves
    expected = dict(loss=-surrogate, policy_loss=-surrogate, ratio_mean=ratio, ratio_max=ratio)
    assert metrics == pytest.approx({**expected, "clip_frac": float(not moves)})  # and no KL

def test_the_ratio_is_of_a_token():
    """The ratio of a whole sequence (GSPO) has a loss of -0.866 here, and passed all other tests."""
    new = torch.tensor([[1.5, 0.5]]).log()
    loss, metrics = grpo.compute_grpo_loss(new, torch.zeros(1, 2), torch.ones(1))
    assert loss.item() == pytest.approx(-(1.2 + 0.5) / 2)
    assert metrics["ratio_mean"] == pytest.approx(1.0) and metrics["ratio_max"] == pytest.approx(1.5)
    assert metrics["clip_frac"] == 0.5

@pytest.mark.parametrize("delta, kl", [
    (0.0, 0.0), (1.0, math.e - 2), (-2.0, math.exp(-2) + 1), (-1000.0, 999.0),
    (1e-5, 5e-11), (-1e-5, 5e-11),  # exp(delta) - delta - 1 rounds to 0, or to a thousand times as much
    (1000.0, math.exp(20) - 21)])  # clamped at 20: exp(1000) is inf, and so the loss of the whole batch
def test_k3_by_hand_and_at_the_extremes(delta, kl):
    """Guards the sign of ref - new, in the value and in the gradient."""
    new = torch.zeros(1, requires_grad=True)
    ref = torch.tensor([delta])
    loss, metrics = grpo.compute_grpo_loss(new, new, torch.zeros(1), ref_logprobs=ref, kl_coef=0.5)
    loss.backward()
    assert metrics["kl"] == pytest.approx(kl, rel=0.02 if abs(delta) == 1e-5 else 1e-5)
    assert metrics["loss"] == loss.item() == pytest.approx(0.5 * metrics["kl"])
    slope = 1 - math.exp(delta) if delta < 20 else 0
    assert new.grad.item() == pytest.approx(0.5 * slope, rel=0.01)
    _, metrics = grpo.compute_grpo_loss(new, new, torch.ones(1), ref_logprobs=ref, kl_coef=0.5)
    assert metrics["policy_loss"] == -1  # `loss += kl` put the KL into it

def test_a_logprob_per_sequence_is_a_row_of_one_token():
    """Advantages must not be broadcast: [N, 1] or [N, T] once had a gradient of 1e-9 and looked fine."""
    torch.manual_seed(0)
    new, old, ref = (torch.randn(3, 4) / 9).bfloat16().float()
    advantages = torch.randn(4)
    losses = []
    for shape in (torch.Tensor.float, lambda x: x[:, None], lambda x: x[:, None].expand(4, 4),
                  torch.Tensor.bfloat16):  # which the loss takes in fp32
        loss, _ = grpo.compute_grpo_loss(shape(new), shape(old), advantages, 0.2, shape(ref), 0.1)
        losses.append(loss.item())
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    for shape in ((4, 1), (4, 4), (3,), (5,), ()):
        with pytest.raises(ValueError, match="advantages"):
            grpo.compute_grpo_loss(new, old, torch.ones(shape))

def test_gradient_at_the_old_policy_is_reinforce():
    """Why a loss of 0 still learns; and only `new` carries a gradient."""
    new, ref = torch.randn(2, 6, 5, requires_grad=True)
    advantages = grpo.compute_advantages(torch.rand(6), 3).requires_grad_()
    loss, _ = grpo.compute_grpo_loss(new, new, advantages, ref_logprobs=ref, kl_coef=0.0)
    ours, *others = torch.autograd.grad(loss, [new, ref, advantages], allow_unused=True)
    by_hand, = torch.autograd.grad(-(advantages[:, None] * new).mean(), new)
    assert abs(loss.item()) < 1e-6 and others == [None, None]
    assert torch.allclose(ours, by_hand, atol=1e-7) and ours.abs().sum() > 0

def test_no_chance_falls_out_of_the_nucleus():
    """Chance 0 would draw code 0; one next to 1 a code behind the last, as sums round (here by far)."""
    probs = torch.tensor([[0.0, 0.25, 0.74, 0.0]]).repeat(5, 1)
    chance = torch.tensor([0.0, 0.2, 0.3, 0.9, 1 - 2**-24])[:, None]
    assert grpo.sample_codes(probs.log(), chance).tolist() == [[1], [1], [2], [2], [2]]

# --- The trainer: an update, a rollout, then what a run leaves and how it goes on ---------------------------
def test_gradient_does_not_depend_on_the_micro_batch(tmp_path, monkeypatch):
    """Each micro-batch averaged on its own, or the last one alone, would give another gradient, or log."""
    trainer = make_trainer(tmp_path / "run", max_grad_norm=1e9, kl_coef=0.1)
    perturb(trainer.lora)
    rollout = make_rollout(trainer)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer))
    whole = trainer.train_step(rollout)  # 4 at a time
    assert gradients[0].abs().max() > 1e-4
    for size in (1, 3, 8):
        trainer.config.micro_batch_size = size
        assert trainer.train_step(rollout) == pytest.approx(whole, rel=1e-4, abs=1e-5)
    trainer.train_step(rollout | dict(nuclei=None))  # a wrapper of one's own may have none
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)  # the other GPU has the same share of the same gradient
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda gradient: gradient.mul_(2))
    trainer.train_step(rollout)
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
        logprobs, _ = wrapper.compute_logprobs(*sampled[:2], None)
        assert not any(module.training for module in wrapper.halves.ar.modules())
        logprobs.square().mean().backward()
        assert passes.call_count == calls
        gradients.append(torch.cat([weight.grad.flatten() for weight in lora.weights.values()]))
    assert gradients[0].any() and torch.equal(*gradients)

@pytest.mark.parametrize("top_p", [None, 0.6])
def test_ratio_is_one_until_the_first_update(tmp_path, top_p):
    """Old log-probs from another pass, or a pass that forgets the nuclei of top-p, would start off 1."""
    trainer = make_trainer(tmp_path / "run", lr=0.01, top_p=top_p)
    rollout = make_rollout(trainer)
    assert rollout["nuclei"].all() == (top_p is None)
    once = trainer.train_step(rollout)
    assert once["ratio_max"] == once["ratio_mean"] == 1 and once["kl"] == once["clip_frac"] == 0
    trainer.config.num_iterations = 2
    twice = trainer.train_step(make_rollout(trainer, step=2))
    assert twice["ratio_max"] > 1.001 and 0 < twice["kl"] < 100
    assert max(once["sampler_gap_max"], twice["sampler_gap_max"]) < 1e-5

@pytest.mark.parametrize("kl_coef, passes", [(0.1, 4), (0.0, 2)])
def test_the_reference_is_the_policy_with_its_adapters_off(tmp_path, kl_coef, passes):
    """The last policy as reference would let the run drift away; at --kl-coef 0 its pass would be wasted."""
    trainer = make_trainer(tmp_path / "run", kl_coef=kl_coef)
    perturb(trainer.lora)
    rollout = make_rollout(trainer)
    original = trainer.wrapper.compute_logprobs
    with trainer.lora.disabled(), torch.no_grad():
        reference, _ = original(rollout["prompts"], rollout["tokens"], None)
    delta = reference - rollout["logprobs"]
    kl = (delta.exp() - delta - 1).mean().item()
    spy = trainer.wrapper.compute_logprobs = mock.Mock(side_effect=original)
    metrics = trainer.train_step(rollout)
    assert spy.call_count == passes and kl > 1e-3
    assert metrics.get("kl") == (pytest.approx(kl, rel=1e-3) if kl_coef else None)

def test_an_interrupted_update_leaves_nothing_behind(tmp_path):
    """A notebook went on with adapters off, old gradients, or in training mode, where no cache is kept."""
    trainer = make_trainer(tmp_path / "run", max_grad_norm=1e9)
    rollout = make_rollout(trainer)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer))
    trainer.train_step(rollout)
    for passes in ([], [None] * 3):  # in the first of the reference, in the second of the update
        interrupt = mock.Mock(side_effect=passes + [KeyboardInterrupt])
        hook = trainer.wrapper.policy.model.language_model.norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.train_step(rollout)
        hook.remove()
        again = make_rollout(trainer)
        assert torch.equal(again["tokens"], rollout["tokens"]) and trainer.lora.enabled
        trainer.train_step(again)
        assert torch.equal(gradients[0], gradients[-1])

@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_whose_gradient_is_not_finite_is_left_out(tmp_path, bad):
    """It would be in every weight and in Adam's moments for ever; the norm in the log tells."""
    trainer = make_trainer(tmp_path / "run", kl_coef=0.0)
    weights = trainer.lora.weights
    rollout = make_rollout(trainer)
    trainer.train_step(rollout)
    before = copy.deepcopy([weights, trainer.optimizer.state_dict()["state"]])
    hook = list(weights.values())[-1].register_hook(lambda gradient: gradient + bad)
    assert not math.isfinite(trainer.train_step(rollout)["grad_norm"])
    torch.testing.assert_close([weights, trainer.optimizer.state_dict()["state"]], before, rtol=0, atol=0)
    hook.remove()
    trainer.train_step(rollout)
    assert all(not torch.equal(weight, before[0][name]) for name, weight in weights.items())

def test_settings_reach_the_update_and_the_log(tmp_path, monkeypatch):
    """A flag that is forgotten looks like one that does not help; a row is of all passes, not of the last."""
    settings = dict(clip_range=0.3, kl_coef=0.5)
    rewards = {"fake": (lambda *_: rows.append(None) or range(8), 1.0)}
    trainer = make_trainer(tmp_path / "run", rewards, steps=1, lr=0.003, lora_rank=2, num_iterations=3,
                           max_grad_norm=1e-3, **settings)
    norms, clipped, rows = [], [], []
    original, clip = grpo.compute_grpo_loss, torch.nn.utils.clip_grad_norm_

    def compute_grpo_loss(*args, **kwargs):
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        assert given["advantages"].tolist() == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619], rel=1e-3)
        assert {name: given[name] for name in settings} == settings
        loss, metrics = original(*args, **kwargs)
        rows.append(dict(metrics))
        return loss, metrics

    monkeypatch.setattr(grpo, "time", mock.Mock(perf_counter=lambda: len(rows)))
    monkeypatch.setattr(grpo, "compute_grpo_loss", compute_grpo_loss)
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *args: norms.append(clip(*args)) or norms[-1])
    trainer.optimizer.register_step_pre_hook(lambda *_: clipped.append(gradient_of(trainer).norm().item()))
    trainer.train()
    row, = trainer.history
    assert row["seconds"] == len(rows) == 1 + 3 * 2  # a rollout, updates x micro-batches
    assert row["loss"] == pytest.approx(np.mean([metrics["loss"] for metrics in rows[1:]]))
    assert row["ratio_max"] == max(metrics["ratio_max"] for metrics in rows[1:]) > 1
    assert row["grad_norm"] == pytest.approx(np.mean(norms)) and row["grad_norm"] > 1e-2
    assert clipped == pytest.approx([1e-3] * 3, rel=1e-2)
    group, = trainer.optimizer.param_groups
    assert group["lr"] == 0.003 and group["weight_decay"] == 0
    for weight in trainer.lora.weights.values():
        assert min(weight.shape) == 2 and weight.grad is None  # no memory while the next step samples

def test_prompts_rewards_and_tokens_stay_in_one_order(tmp_path):
    """A reward that reads the prompt must meet the image of that prompt: p0 p0 .. p1 p1 .. all the way."""
    spy = mock.Mock(return_value=torch.arange(8))
    trainer = make_trainer(tmp_path / "run", {"spy": (spy, 1.0)})
    with mock.patch.object(trainer.wrapper, "decode", wraps=trainer.wrapper.decode) as decode:
        rollout, _ = trainer.rollout(4)  # of prompts that do not stand in the order of the file
    images, prompts, targets = spy.call_args.args
    places = [target.getpixel((0, 0))[0] for target in targets]
    assert places == np.repeat(places[::4], 4).tolist() != sorted(places)
    assert prompts == rollout["prompts"] == [trainer.prompts[i] for i in places]
    assert rollout["rewards"].tolist() == list(range(8))
    with torch.no_grad():
        again, _ = trainer.wrapper.compute_logprobs(prompts, rollout["tokens"], rollout["nuclei"])
    assert (again - rollout["logprobs"]).abs().max() < 1e-5 and decode.call_args.args[0] == prompts[::4]
    assert images == rollout["images"] == trainer.wrapper.decode(*decode.call_args.args)

def test_prompts_go_round_in_laps_that_follow_from_seed_and_step(tmp_path):
    """Drawn at random, one came 2 to 14 times in 40 steps; and no state means none that --resume forgets."""
    trainer = make_trainer(tmp_path / "run", {"none": (lambda images, *_: [0] * len(images), 0.0)})
    trainer.targets = trainer.prompts = list("abcdefgh")
    generate = trainer.wrapper.generate_with_tracking = mock.Mock()

    def draw(step, gpus=1, **settings):
        trainer.config = make_config(**dict(batch_size=6) | settings)
        turns = []
        for rank in range(gpus):
            generate.return_value = dict(images=blank(4 * trainer.config.batch_size // gpus)[0])
            with mock.patch.multiple(grpo, RANK=rank, WORLD_SIZE=gpus):
                trainer.rollout(step)
            prompts, _, seeds = generate.call_args.args
            turns += zip(seeds, prompts, strict=True)
        return sorted(turns)

    turns = [turn for step in range(1, 29) for turn in draw(step)]  # 168
    assert turns[18:24] == draw(4) == draw(4, gpus=2) == draw(4, gpus=3)
    assert turns[20:40] == draw(2, batch_size=20)  # also where there are fewer prompts
    laps = ["".join(prompt for _, prompt in turns[i:i + 8]) for i in range(0, 168, 8)]
    assert all(sorted(lap) == trainer.prompts for lap in laps) and len(set(laps)) == len(laps) == 21
    assert laps[2] == "".join(np.random.default_rng([0, 2]).permutation(trainer.prompts))
    others = [turn for step in range(1, 29) for turn in draw(step, seed=1)]
    assert len({seed for seed, _ in turns + others}) == 2 * 168 and [*zip(*turns)][1] != [*zip(*others)][1]

def test_metrics_by_hand(tmp_path):
    """Equal rewards, exact or not, have no spread; a wrong gap or entropy looks healthy for ever."""
    trainer = make_trainer(tmp_path / "run", {"a": (lambda *_: [0.3] * 4 + [1, 2, 3, 6], 2.0)})
    forward = trainer.wrapper.forward
    trainer.wrapper.forward = lambda *inputs: 0 * forward(*inputs)
    rollout, metrics = trainer.rollout(1)
    assert rollout["rewards"].tolist() == pytest.approx([0.6] * 4 + [2, 4, 6, 12])
    assert metrics["reward_std"] == pytest.approx(2 * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert metrics["reward"] == pytest.approx(2 * metrics["reward/a"]) == pytest.approx(2 * 13.2 / 8)
    rollout["logprobs"][5, 3] -= 0.1
    metrics = trainer.train_step(rollout | dict(advantages=torch.ones(8)))
    assert metrics["sampler_gap_max"] == pytest.approx(0.1, rel=1e-3)
    assert metrics["entropy"] == pytest.approx(math.log(8))  # in nats: each of 8 codes is as likely

def assert_same_run(one, other):
    """Every file of two runs, bit for bit, but for seconds and for settings without an effect."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.*"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*.*"))
    states = []
    for out in (one, other):
        state = torch.load(out / "checkpoint.pt", weights_only=True)
        state |= dict(history=rows_of(out), config=state["config"] | dict(out=None, offload=None))
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

def test_what_is_written_when(finished):
    """A row a step; pictures, and the adapter that drew them, at first, every --save-every and at the end."""
    assert [row["step"] for row in rows_of(finished)] == [1, 2, 3, 4, 5]
    assert_files(finished, 0, 2, 4, 5)
    assert Image.open(finished / "samples_00002.png").size == (3 * 64, 128)
    for name, weight in torch.load(finished / "checkpoint.pt", weights_only=True)["adapter"].items():
        middle, last = (adapter_of(finished, step)[name] for step in (4, 5))
        assert torch.equal(last, weight) and not torch.equal(middle, weight)

def test_fixed_pictures_have_fixed_prompts_and_seeds(tmp_path):
    """What training draws in between must not show."""
    trainer = make_trainer(tmp_path)
    trainer.prompts = list("abcdefghi")
    generate = trainer.wrapper.generate_with_tracking = mock.Mock(return_value=dict(images=blank(8)[0]))
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
    assert make_trainer(out, lr=0.125).optimizer.param_groups[0]["lr"] == 0.125  # what is typed wins

def test_a_cell_that_is_run_again_spoils_nothing(finished, tmp_path):
    """It overwrote a run, or refused the folder of a failed one; or the adapters of two trainers added up."""
    before = {path: path.read_bytes() for path in finished.rglob("*.*")}
    with pytest.raises(ValueError, match="holds a run"):
        grpo.GRPOTrainer(make_config(out=str(finished)), make_wrapper(), ["green"]).train()
    make_trainer(finished).train()  # it is done
    assert {path: path.read_bytes() for path in finished.rglob("*.*")} == before
    trainer = make_trainer(tmp_path / "run", steps=1)
    with mock.patch.object(trainer, "train_step", side_effect=KeyError), pytest.raises(KeyError):
        trainer.train()
    trainer.train()
    other = make_trainer(tmp_path / "again", steps=1)
    perturb(other.lora)
    grpo.GRPOTrainer(other.config, other.wrapper, other.prompts).train()
    assert rows_of(tmp_path / "again") == rows_of(tmp_path / "run")

# --- Rewards ------------------------------------------------------------------------------------------------
def test_pictures_become_tensors():
    """Every 8-bit value, exactly, in the right place; what is transparent has three channels too."""
    ramp = np.arange(256 * 6, dtype=np.uint8).reshape(2, 256, 3)
    tensor = grpo.pil_to_tensor([Image.fromarray(ramp), Image.new("RGBA", (256, 2), "red")])
    assert tensor.shape == (2, 3, 2, 256) and tensor.min() == 0 and tensor.max() == 1
    assert torch.equal((255 * tensor[0]).round().byte().movedim(0, 2), torch.tensor(ramp))

@pytest.mark.parametrize("color, prompt, reward", [
    ("red", "A RED thing", 1), ("red", "a blue thing", 1 / 3), ("orange", "an orange one", 1),
    ("green", "a green wall of red bricks", 1),  # the first one counts
    ("purple", "a tired, reddish purple", 1)])  # words, not letters
def test_color_reward(color, prompt, reward):
    """The scale is linear in the mean of the picture, not in its best pixel."""
    image = Image.new("RGB", (4, 4), color)
    assert grpo.reward_color([image], [prompt])[0] == pytest.approx(reward)
    assert grpo.reward_color([Image.linear_gradient("L")], ["white"])[0] == pytest.approx(0.5)
    image.paste("red", (0, 0, 4, 4))
    image.paste("blue", (0, 0, 2, 4))  # half red, half blue: seen from afar, purple
    assert grpo.reward_color([image], ["purple"])[0] > 0.99
    with pytest.raises(ValueError, match="colour .*'a tired fox'"):  # it trained on zeros for hours
        grpo.reward_color([image] * 2, ["red", "a tired fox"])

def test_mse_reward():
    """Equal is 0, a fifth of white off is -1/25; a target of another size is resized."""
    black = Image.new("RGB", (32, 16))
    gray = Image.new("RGB", (8, 8), (51, 51, 51))
    assert grpo.reward_mse([black, black], ["", ""], [black, gray]).tolist() == pytest.approx([0, -0.04])

@pytest.mark.parametrize("values", [
    (True, 2.0), np.array([1, 2], np.float16), torch.tensor([[1.0], [2.0]]), [torch.tensor(1.0), 2]])
def test_rewards_take_any_sequence_of_numbers(values):
    """A column [N, 1] summed with an [N] once broadcast to [N, N], and was trained on as nonsense."""
    rewards = {"a": (lambda *_: values, 1.0), "b": (lambda *_: [10.0, 20.0], -0.5)}
    total, metrics = grpo.compute_rewards(*blank(2), rewards)
    assert total.tolist() == [-4.0, -8.0] and metrics == {"reward/a": 1.5, "reward/b": 15.0, "reward": -6.0}

@pytest.mark.parametrize("values", [[], [0.5], [0.5] * 3, [0.5, -math.inf], [math.nan, 1], [None, 1]])
def test_a_reward_without_a_finite_number_for_each_image_is_named(values):
    """It would train silently on something else."""
    rewards = {"fine": (lambda *_: [1, 2], 1.0), "broken": (lambda *_: values, 0.0)}
    with pytest.raises(ValueError, match="broken"):
        grpo.compute_rewards(*blank(2), rewards)

def test_each_reward_gets_its_own_pictures_and_no_graph():
    """What one paints over no other sees; and a CLIP that kept its graph would fill a GPU."""
    spoil = lambda images, *_: [images[0].paste("red", (0, 0, 8, 8)) or torch.is_grad_enabled()]
    red = lambda images, *_: [images[0].getpixel((0, 0))[0]]
    images, prompts, targets = blank(1)
    _, metrics = grpo.compute_rewards(images, prompts, targets, {"spoil": (spoil, 1.0), "red": (red, 1.0)})
    assert metrics == {"reward/spoil": 0, "reward/red": 0, "reward": 0} and not images[0].getbbox()

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

def test_prompts_file(tmp_path):
    """A byte order mark, comments and blank lines are no prompts; a target is found beside the file."""
    Image.new("L", (3, 3)).save(tmp_path / "t.png")
    text = "\ufeff# no\n\n  # nor this\n  a red fox\tt.png\nplain #1 \n"
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    prompts, (target, none) = grpo.load_prompts(tmp_path / "p.txt")
    assert prompts == ["a red fox", "plain #1"] and none is None
    assert target.mode == "RGB" and target.size == (3, 3)

# --- LoRA ---------------------------------------------------------------------------------------------------
def test_lora_by_hand(tmp_path):
    """Twice B A x at any rank, 0 at first; saved under the names that peft reads, loaded only if it fits."""
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
    other = grpo.LoRA(torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2)}), "a", rank=4)
    other.load(tmp_path)
    assert all(torch.equal(other.weights[name], weight) for name, weight in lora.weights.items())
    grpo.LoRA(model, "a", rank=1).save(tmp_path / "one")
    with pytest.raises(RuntimeError):  # broadcast, it would be nonsense
        lora.load(tmp_path / "one")
    with pytest.raises(KeyError):
        grpo.LoRA(model, "ab", rank=4).load(tmp_path)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapters_train(dtype, tmp_path):
    """All else is frozen; they are fp32, in the file too: in bf16 0.02 plus a step of 5e-5 is 0.02."""
    wrapper, lora = make_adapted(dtype, top_p=0.6)
    tokens, _, nuclei = wrapper.sample(PROMPTS, 1, seeds=[1, 2])
    logprobs, entropy = wrapper.compute_logprobs(PROMPTS, tokens, nuclei)
    assert entropy.isfinite().all() and not entropy.requires_grad  # 0 * log 0 outside the nucleus
    logprobs.sum().backward()
    lora.save(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(lora.weights) == len(saved) == 2 * 6 * 2  # A and B of q, k, v, o, gate_up, down in two layers
    for name, weight in lora.weights.items():
        assert weight.shape["lora_B" in name] == 4 and weight.grad.isfinite().all() and weight.grad.any()
        assert weight.dtype == weight.grad.dtype == saved[name].dtype == torch.float32
    frozen = [*wrapper.halves.ar.parameters(), *wrapper.halves.dit.parameters()]
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
        one, two, ours = (wrapper.compute_logprobs(*sampled[:2], None)[0] for wrapper in others)
    assert (one - ours).abs().max() < 1e-5 > (two - ours).abs().max()
    assert (ours - sampled[2]).abs().max() > 0.01  # which the base model says

# --- GLM-Image: what it reads, samples and paints, and what lies where --------------------------------------
def test_positions_are_those_of_the_docstring():
    """The drawing is what readers trust; it must be what the function does."""
    rows = re.findall(r"[thw]:((?:\s+-?\d+)+)", grpo.build_position_ids.__doc__)
    got = grpo.build_position_ids(torch.tensor([[0, 1, 1, 1]]), [(1, 2), (2, 2)])
    assert got[:, 0].tolist() == [[int(number) for number in row.split()] for row in rows]

@pytest.mark.parametrize("width, height", [(128, 128), (64, 128), (192, 64)])
def test_prompts_are_encoded_and_positions_made_as_in_the_stock_pipeline(width, height):
    """What it feeds, at positions that `generate` makes. Padding sees padding: of nothing it would be NaN."""
    wrapper = make_wrapper(width=width, height=height)
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
    tokens, logprobs, nuclei = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    prompts = [p for p in PROMPTS for _ in range(3)]
    assert tokens.shape == logprobs.shape == (6, 2 * 1 + 4 * 2) and logprobs.dtype == torch.float32
    assert nuclei.shape == (6, 10, 8) and nuclei.dtype == torch.bool
    ids, position_ids, bias = wrapper.encode(prompts)
    with torch.no_grad():
        again, entropy = wrapper.compute_logprobs(prompts, tokens, nuclei)
        unmasked, whole = wrapper.compute_logprobs(prompts, tokens, None)
        logits = wrapper.forward(torch.cat([ids, tokens], 1), position_ids, bias)
        assert torch.allclose(logits * 0.9, (logits * 0.9).to(dtype).float(), rtol=1e-6)  # divided in fp32
        out = wrapper.policy(torch.cat([ids, tokens], 1), attention_mask=(position_ids[0] >= 0).long())
        naive = grpo.compute_policy_logprobs(out.logits[:, -11:-1, :8].float() / 0.9, nuclei)  # it takes text
        wrapper.temperature = 1.0
        wrong, _ = wrapper.compute_logprobs(prompts, tokens, nuclei)
    for other in (wrong, naive.gather(2, tokens[..., None]).squeeze(2)):
        assert (again - logprobs).abs().max() < bound < (other - logprobs).abs().max()
    if top_p < 1:
        assert (unmasked - logprobs).mean() < -0.1 and (entropy - whole).mean() < -0.1
    with pytest.raises(TypeError):
        wrapper.compute_logprobs(prompts, tokens)  # who forgets the nuclei is told, not served

@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sampling_is_transformers_own_decoding_row_by_row(top_p):
    """The witness is slow and plain: the public `forward`, no batch, no padding, a nucleus by sorting."""
    wrapper = make_wrapper(top_p=top_p)
    tokens, logprobs, nuclei = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    chance = torch.cat([torch.rand(3, 10, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    for row in range(6):
        ids, _, _ = wrapper.encode([PROMPTS[row // 3]])
        L = ids.shape[1]
        grids = torch.tensor([[1, 4, 2], [1, 2, 1]])
        out = wrapper.policy(input_ids=ids, attention_mask=torch.ones(1, L), use_cache=True,
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
            out = wrapper.policy(input_ids=code.view(1, 1), attention_mask=torch.ones(1, L + i + 1),
                                 use_cache=True, past_key_values=out.past_key_values)
    assert nuclei.all() == (top_p == 1)

@pytest.mark.parametrize("guidance, size", [(4.0, 1), (1.0, 2), (4.0, 5)])
def test_painting_is_that_of_the_stock_pipeline(sampled, guidance, size):
    """One by one, but for a grey level. In fp32, or with a VAE that paints all at once, no GPU would do."""
    prompts = ['a red fox on a wall that says "CLOSED TODAY"', 'a yellow "!"']
    config = make_config(guidance=guidance, decode_steps=3, micro_batch_size=size)
    pipe = make_wrapper().pipe
    with mock.patch.object(diffusers.GlmImagePipeline, "from_pretrained", return_value=pipe) as load:
        ours = WRAPPER.from_pretrained("folder", config)
    assert load.call_args == mock.call("folder", dtype=torch.bfloat16)
    sizes, painted = [], []
    pipe.transformer.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(len(inputs["hidden_states"])), with_kwargs=True)
    pipe.vae.decoder.register_forward_pre_hook(lambda _, args: painted.append(len(args[0])))
    torch.manual_seed(0)
    stock = grpo.make_tiny_models()
    stock.text_encoder.eval()
    images = ours.decode(prompts, sampled[1], seeds=[7, 8])  # two groups of three
    assert painted == [1] * 6 and max(sizes) == min(size, 3) and sum(sizes) == 6 * 3 * (1 + (guidance > 1))
    for i, (image, tokens) in enumerate(zip(images, sampled[1])):
        noise = torch.randn(1, 16, 16, 8, generator=torch.Generator().manual_seed(7 + i // 3))
        expected = stock(
            prompts[i // 3], prior_token_ids=stock._upsample_token_ids(tokens[2:], 4, 2), latents=noise,
            height=128, width=64, num_inference_steps=3, guidance_scale=guidance).images[0]
        difference = np.asarray(image, int) - np.asarray(expected, int)
        assert image.size == (64, 128) and abs(difference).max() <= (size > 1)
    assert len({image.tobytes() for image in images + ours.decode(["a fox"], sampled[1][:1], [7])}) == 7
    with pytest.raises(ValueError):
        ours.decode(prompts, sampled[1], seeds=[7])  # pictures were dropped without a word

def test_offloading_changes_nothing_and_holds_one_half_at_a_time(tmp_path):
    """With it, what is not on the GPU is NaN here, the vision tower always; a phase moves weights once."""
    for offload in ("off", "on"):
        trainer = make_trainer(tmp_path / offload, offload=offload, steps=1, micro_batch_size=2)
        halves = trainer.wrapper.halves
        moves, hidden = [], []

        def move_to_gpu(half):
            if half is not halves.on_gpu:
                moves.append("ar" if half is halves.ar else "dit")
            while hidden:
                tensor, tensor.data = hidden.pop()
            grpo.Halves.move_to_gpu(halves, half)
            other = halves.dit if half is halves.ar else halves.ar
            for tensor in tensors_of(trainer.wrapper.policy.model.visual, other):
                hidden.append((tensor, tensor.data))
                tensor.data = torch.full_like(tensor, math.nan)

        if offload == "on":
            halves.move_to_gpu = move_to_gpu
        trainer.train()
    assert moves == ["ar", "dit"] + ["ar", "dit", "ar"] + ["dit"]  # pictures, a step, pictures
    assert trainer.history[0]["grad_norm"] > 0
    assert_same_run(tmp_path / "off", tmp_path / "on")

def test_halves_are_lent_to_the_gpu(monkeypatch):
    """An interrupt in the middle is mended by the next call. (fp64 stands for the GPU, fp32 for the CPU.)"""
    halves = make_wrapper(offload="on").halves
    ar, dit = halves.ar, halves.dit
    to = torch.Tensor.to
    moved = []

    def move(tensor, where, *args, **kwargs):
        moved.append(tensor)
        if len(moved) == last:
            raise KeyboardInterrupt
        return to(tensor, torch.float32 if where == torch.device("cpu") else torch.float64)

    monkeypatch.setattr(torch.Tensor, "to", move)
    monkeypatch.setattr(grpo, "DEVICE", torch.float64)
    late = len(tensors_of(ar, dit)) + 5  # when the other half has left
    for half, last in [(ar, 0), (dit, 0), (ar, 0), (dit, late), (ar, 0), (dit, late), (dit, 0), (ar, 5),
                       (dit, 0), (ar, late), (ar, 0)]:
        moved.clear()
        with pytest.raises(KeyboardInterrupt) if last else contextlib.nullcontext():
            halves.move_to_gpu(half)
        if not last:
            assert {tensor.dtype for tensor in tensors_of(half)} == {torch.float64}
            assert {tensor.dtype for tensor in tensors_of(dit if half is ar else ar)} == {torch.float32}
    moved.clear()
    assert halves.move_to_gpu(ar) is None and not moved  # it is there

@pytest.mark.parametrize("offload, gib, where", [
    ("on", 80, "cpu"), ("off", 10, "meta"), ("auto", 40, "cpu"), ("auto", 80, "meta"), ("auto", 0, "meta")])
def test_where_the_halves_wait_and_adapters_are_drawn(monkeypatch, offload, gib, where):
    """Adapters are drawn on the CPU: two kinds of GPU would begin with others, and add up their gradients."""
    monkeypatch.setattr(grpo, "GPU_GIB", gib)
    monkeypatch.setattr(grpo, "DEVICE", torch.device("meta"))
    torch.backends.cuda.enable_cudnn_sdp(True)
    wrapper = WRAPPER(grpo.make_tiny_models(), make_config(offload=offload))
    assert not torch.backends.cuda.cudnn_sdp_enabled()  # its gradients can be NaN
    assert all(table.is_meta for table in wrapper.pipe.transformer.rope(torch.zeros(1, 16, 8, 8)))
    assert {tensor.device.type for tensor in tensors_of(wrapper.halves.ar, wrapper.halves.dit)} == {where}
    assert not any(tensor.is_meta for tensor in tensors_of(wrapper.policy.model.visual))
    before = torch.get_rng_state()
    weights = grpo.LoRA(wrapper.policy, wrapper.TARGETS, rank=4).weights.values()
    assert all(weight.is_meta for weight in weights) and not torch.equal(torch.get_rng_state(), before)

@pytest.mark.parametrize("side", [512, 1024])
def test_a_step_fits_a_card_of_24_gb(monkeypatch, side):
    """8 x 4 images, counted; beside the weights lies no less than what is known to be there."""
    monkeypatch.syspath_prepend(HERE / ".ci")
    import measure
    peaks, _ = measure.count_memory(side, num_prompts=8)  # it asserts that the nuclei wait on the CPU
    T = 256 + (side // 32) ** 2
    cache = 32 * T * 40 * 2 * 2 * 128 * 2 / 2**30  # 40 layers, keys and values, 2 heads of 128, 2 bytes
    assert 16.6 + cache < peaks["sample"]["on"] <= 22 and 16.6 + 1.4 < peaks["update"]["on"] <= 22
    assert 14.1 + 1.0 < peaks["decode"]["on"] <= 22
    assert all(16.6 + 14.1 + 1.0 < peak["off"] < 40 for peak in peaks.values())

# --- The toy ------------------------------------------------------------------------------------------------
def test_the_toy_and_its_first_adapters_come_from_the_seed_alone(monkeypatch):
    """A run is its command, whatever has been drawn before."""
    monkeypatch.setattr(grpo, "make_tiny_pipeline", functools.partial(QUICK, fit_steps=2))
    states = []
    for noise, seed in ((1, 5), (2, 5), (1, 6)):
        torch.manual_seed(noise)
        wrapper = WRAPPER.from_pretrained("tiny", make_config(seed=seed))
        torch.manual_seed(noise)  # a model that was loaded, not made, would seed nothing
        trainer = grpo.GRPOTrainer(wrapper.config, wrapper, ["a red fox"])
        parts = tensors_of(wrapper.halves.ar, wrapper.halves.dit), trainer.lora.weights.values()
        states.append([torch.cat([tensor.flatten() for tensor in part]) for part in parts])
    for first, same, other in zip(*states):
        assert torch.equal(first, same) and not torch.equal(first, other)

def test_the_toy_takes_any_prompt_and_the_smallest_size():
    """A prompt with the word "image", then a mark, ended the run; at 32 pixels the draft was empty."""
    words = "image bos eos pad unk grid_bos grid_eos cls sep mask [PAD] [UNK] [CLS] <|image|> <image> #"
    prompts = [*words.split(), words, "a red fox"]
    wrapper = WRAPPER(QUICK(0), make_config(width=32, height=32))
    group = wrapper.generate_with_tracking(prompts, 2, range(len(prompts)))
    assert wrapper.pipe.processor._get_target_shape(64, 32)[:2] == (2, 1)  # rows, columns
    assert group["tokens"].shape == (2 * len(prompts), 4 + 1) and group["images"][0].size == (32, 32)
    assert group["logprobs"].isfinite().all()

def test_the_toy_is_fitted_to_what_its_comment_says(monkeypatch):
    """40 % of the tokens of each picture, not all of 40 % of the pictures; on any number of GPUs."""
    monkeypatch.setattr(grpo, "WORLD_SIZE", 3)  # where the default, 8 prompts a step, would be refused
    original = WRAPPER.compute_logprobs
    with mock.patch.object(WRAPPER, "compute_logprobs", autospec=True, side_effect=original) as spy:
        grpo.make_tiny_pipeline(fit_steps=40)
    assert spy.call_args.args[1] == [f"a {name} thing" for name in grpo.COLORS]
    tokens = torch.stack([call.args[2] for call in spy.call_args_list])  # [40, 8, 20]
    named = (tokens == torch.arange(8)[:, None]).float()
    assert abs(named.mean() - (0.4 + 0.6 / 8)) < 0.03 and named.mean(2).std() < 0.15

# --- The command line: several GPUs (here of the CPU), failures and kills first -----------------------------
SMALL = "--model tiny --width 64 --height 64 --batch-size 2 --group-size 2 --micro-batch-size 2".split()
ENV = os.environ | {
    "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
SERVER = multiprocessing.get_context("forkserver")  # imports all that is slow once, for all its children
SERVER.set_forkserver_preload([__name__, "diffusers.pipelines.glm_image.pipeline_glm_image"])

def child(folder, argv, before, env):
    """The life of a process: grpo.main on the random toy, after `before`. What it prints goes to a file."""
    os.chdir(folder)
    os.environ.update(env)
    sys.stdout = sys.stderr = open("log", "a", buffering=1)
    grpo.make_tiny_pipeline = QUICK
    grpo.RANK = int(os.environ.get("RANK", 0))
    grpo.WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
    before()
    grpo.main(argv)

def start(folder, *argv, before=bool, env={}):
    process = SERVER.Process(target=child, args=(folder, argv, before, env), daemon=True)
    with mock.patch.dict(os.environ, ENV):
        process.start()
    return process

def end(process):
    process.join(300)
    return process.exitcode

@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*argv): `python grpo.py` on the random toy, in tmp_path -> exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "make_tiny_pipeline", QUICK)

    def run(*argv):
        capsys.readouterr()
        try:
            code = grpo.main(list(argv)) or 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run

def test_two_gpus_do_what_one_does(tmp_path, command):
    """Three steps in one process = two steps in two and, resumed, one in one: all must have crossed over."""
    (tmp_path / "quick.py").write_text(
        "import functools, __main__ as grpo\ncolor = grpo.reward_color\n"
        "grpo.make_tiny_pipeline = functools.partial(grpo.make_tiny_pipeline, fit_steps=0)\n")
    argv = SMALL + "--num-iterations 2 --lr 1e-3 --kl-coef 0.1 --max-grad-norm 1e-3 --save-every 1".split()
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split(),
                HERE / "grpo.py", *argv, *"--reward quick.py:color --out two --steps 2".split()]
    process = subprocess.Popen(torchrun, cwd=tmp_path, env=ENV, **PIPES)
    assert command(*argv, "--out", "one", "--steps", "3")[0] == 0
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert [line.split()[0] for line in out.splitlines()] == ["model:", "step", "step"]  # once, not twice
    assert command("--resume", "two", "--steps", "3", "--reward", "color")[0] == 0
    assert [row["step"] for row in rows_of(tmp_path / "two")] == [1, 2, 3]  # the rest is of a GPU's share
    one, two = (adapter_of(tmp_path / out, 3) for out in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)

def fail_on_one():
    """In the third step, on the second GPU, however often anything else is called till then."""
    def train_step(trainer, rollout, original=grpo.GRPOTrainer.train_step):
        return 1 / 0 if grpo.RANK == 1 and len(trainer.history) == 2 else original(trainer, rollout)

    grpo.GRPOTrainer.train_step = train_step

def test_an_error_on_one_gpu_ends_the_run_on_all(tmp_path):
    """The others would wait for ever; and no whole step is lost."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        env = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    processes = [start(tmp_path, *SMALL, "--out", "run", before=fail_on_one, env=env | dict(RANK=rank))
                 for rank in "01"]
    assert 0 not in [end(process) for process in processes]
    assert "ZeroDivisionError" in (tmp_path / "log").read_text() and step_of(tmp_path / "run") == 2

def test_after_a_failure_in_the_first_step_the_same_command_works(command):
    """It was refused, as its folder exists, "or --resume it", which was refused too, as it holds no run."""
    argv = [*SMALL, *"--out run --steps 1".split()]
    interrupt = mock.patch.object(grpo, "compute_rewards", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        command(*argv)
    assert "holds no run" in command("--resume", "run")[2]
    assert command(*argv)[0] == 0
    assert_files(Path("run"), 0, 1)

def test_a_run_begins_with_the_adapters_of_another(command):
    """It is the only way on to other prompts or another reward; the reference stays the model without any."""
    assert command(*SMALL, *"--out a --steps 1 --lr .03".split())[0] == 0
    adapter = adapter_of(Path("a"), 1)
    assert command(*SMALL, *"--out b --steps 1 --lr 0 --adapter a/adapter_00001".split())[0] == 0
    assert all(torch.equal(weight, adapter[name]) for name, weight in adapter_of(Path("b"), 1).items())
    assert rows_of(Path("b"))[0]["kl"] > 1e-6 == 1e-6 + rows_of(Path("a"))[0]["kl"]
    shutil.rmtree("a")
    assert command(*"--resume b --steps 2 --lr .01".split())[0] == 0
    assert torch.load("b/checkpoint.pt", weights_only=True)["config"]["adapter"] == "a/adapter_00001"
    assert not all(torch.equal(weight, adapter[name]) for name, weight in adapter_of(Path("b"), 2).items())

def kill_soon(when, share, seconds):
    """In the when-th checkpoint with this share of its bytes on the disk; with all of them, seconds later."""
    save = torch.save
    calls = []

    def kills(state, path):
        save(state, path)
        calls.append(path)
        if len(calls) == when and share < 1:
            os.truncate(path, int(share * os.path.getsize(path)))
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == when:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    torch.save = kills

def test_kill_nine_at_any_moment(tmp_path):
    """12 kills, half of them in the writing of checkpoint.pt: the end is that of an undisturbed run."""
    flags = [*SMALL, "--steps", "48", "--save-every", "3"]
    whole = start(tmp_path, *flags, "--out", "whole")
    rng = random.Random(0)
    argv = [*flags, "--out", "run"]
    for kill in range(12):
        share = rng.choice([0, 0.5]) if kill % 2 else 1
        before = functools.partial(kill_soon, rng.randint(2, 3), share, rng.uniform(0, 0.15))
        assert end(start(tmp_path, *argv, before=before)) == -signal.SIGKILL, (tmp_path / "log").read_text()
        argv = ["--resume", "run"]
    assert 12 < step_of(tmp_path / "run") < 48
    assert end(start(tmp_path, *argv)) == end(whole) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")

@pytest.fixture(scope="session", autouse=True)
def first_command(request, tmp_path_factory):
    """The README's command, its own process, every default: it runs beside all tests, as it takes longest."""
    if not any("the_first_command" in item.name for item in request.session.items):
        yield
        return
    folder = tmp_path_factory.mktemp("first")
    argv = [sys.executable, HERE / "grpo.py", *"--group-size 4 --model tiny --out out".split()]
    with subprocess.Popen(argv, cwd=folder, env=ENV, **PIPES) as process:
        yield process, folder / "out"
        process.kill()

def test_the_first_command_learns_and_leaves_what_the_readme_says(first_command):
    """Rewards rise by far more than luck, and all fixed pictures but one at most get their colour."""
    process, out = first_command
    printed, error = process.communicate(timeout=300)
    assert process.returncode == 0 and not error, error  # nor a bar, where there is no terminal
    assert printed.startswith("model: tiny on cpu, files: out\nstep 1 ") and printed.count("\n") == 41
    assert_files(out, 0, 10, 20, 30, 40)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = """step reward reward_std reward/color loss policy_loss kl ratio_mean ratio_max
        clip_frac entropy grad_norm sampler_gap_max seconds gpu_gib_max"""
    for row in rows:
        assert row.keys() == set(names.split()) and np.isfinite(list(row.values())).all()
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:5]) > 0.15
    sheets = [Image.open(out / f"samples_{step:05d}.png") for step in (0, 40)]
    prompts, _ = grpo.load_prompts(None)
    places = [(i * 128, 0, i * 128 + 128, 128) for i in range(8)]
    before, after = (np.array(grpo.reward_color(map(sheet.crop, places), prompts)) for sheet in sheets)
    assert np.mean(after - before) > 0.1 and sorted(after)[1] > 0.85

WRONG = """--group-size 1, --group-size four, --width 0, --width 100, --height 100, --height -64, --size 512,
    --batch-size 0, --micro-batch-size 0, --steps 0, --steps 1.5, --save-every 0, --lora-rank 0, --seed -1,
    --decode-steps 0, --num-iterations 0, --lr nan, --lr -1, --lr inf, --kl-coef -1, --clip-range inf,
    --clip-range -1, --clip-range-high .3, --scale-rewards none, --max-grad-norm nan, --max-grad-norm 0,
    --guidance nan, --guidance -1, --top-p 0, --top-p 1.5, --temperature 0, --offload maybe,
    --reward-norm group, --grop-size 4, --adapter, --reward """  # the answer names the flag
BAD = [(typed, typed.split()[0][2:]) for typed in re.split(r",\s+", WRONG)] + [  # typed, a word of the answer
    ("--prompts missing.txt", "missing"), ("--prompts text.txt", "image"), ("--prompts plain.txt", "a fox"),
    ("--prompts comments.txt", "prompt"), ("--prompts latin1.txt", "utf-8"), ("--prompts lost.txt", "lost"),
    ("--prompts mixed.txt --reward mse", "target"), ("--reward wow", "wow"), ("--reward color=much", "much"),
    ("--reward color=nan", "finite"), ("--reward color=1,color=2", "twice"), ("--reward mine.py", "mine.py"),
    ("--reward color,", "reward"), ("--reward mine.py:sharp,mine.py:sharp=2", "twice"),
    ("--reward mine.py:dull", "dull"), ("--reward nowhere.py:sharp", "nowhere"), ("--reward mse", "target"),
    ("--reward color=1,mse", "target"), ("--model folder", "folder"), ("--model no-such/model", "no-such"),
    *[(f"--resume {name}", "holds no run") for name in ",nowhere,folder,torn,list,bomb,strange".split(",")],
    ("--resume other", "old-flag"), ("--resume done", "steps"), ("--resume done --steps 4", "steps"),
    *[(f"--resume done {typed}", typed.split()[0]) for typed in (
        "--seed 1", "--lora-rank 2", "--model folder", "--out other", "--adapter adapter", "--lr nan")],
    ("--resume done --prompts missing.txt", "missing.txt"), ("--resume done --steps 9 --reward mse", "targ"),
    ("--adapter missing", "missing"), ("--adapter folder", "adapter-config"), ("--adapter done", "done"),
    ("--adapter good.txt", "good.txt"), ("--adapter adapter --lora-rank 8", "--lora-rank 4"),
    ("--out done", "holds a run"), *[(f"--out good.txt{more}", "good.txt") for more in ("", "/x", "/x/y")]]

class Bomb:
    """A pickle that makes the file `owned` when it is loaded."""
    def __reduce__(self):
        return Path.touch, (Path("owned"),)

@pytest.fixture(scope="module")
def bad_files(finished, tmp_path_factory):
    """All that BAD names, in a folder."""
    folder = tmp_path_factory.mktemp("bad")
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    state["config"]["prompts"] = str(folder / "good.txt")
    other = state | {"config": state["config"] | {"old_flag": 1}}  # of a copy that has another setting
    runs = dict(done=state, other=other, list=[1, 2, 3], strange={"weights": 1}, bomb=Bomb(), torn=0)
    for name, content in runs.items():
        (folder / name).mkdir()
        torch.save(content, folder / name / "checkpoint.pt")
    (folder / "torn/checkpoint.pt").write_bytes((folder / "done/checkpoint.pt").read_bytes()[:9999])
    (folder / "folder").mkdir()
    Image.new("RGB", (4, 4)).save(folder / "t.png")
    grpo.LoRA(torch.nn.Sequential(torch.nn.Linear(2, 2)), "0", rank=4).save(folder / "adapter")
    texts = {
        "comments.txt": b"# only\n\n", "lost.txt": b"a fox\tlost.png\n", "text.txt": b"a fox\tcomments.txt\n",
        "good.txt": b"a red fox\n", "plain.txt": b"a red fox\na fox\n", "mixed.txt": b"a\tt.png\nb\n",
        "latin1.txt": b"caf\xe9\n", "mine.py": b"def sharp(images, *_): return [1.0] * len(images)"}
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return folder

@pytest.mark.parametrize("typed, word", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(bad_files, command, monkeypatch, typed, word):
    """No traceback, nothing written, and no model loaded in vain."""
    monkeypatch.chdir(bad_files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(WRAPPER, "from_pretrained", mock.Mock(side_effect=AssertionError))
    before = sorted(bad_files.rglob("*"))
    model = [] if typed.startswith(("--model", "--resume")) else ["--model", "tiny"]
    code, _, error = command(*model, *typed.split(" "))
    assert code == 2 and "error: " in error and error.count("\n") == 1, error
    assert word in error.replace("_", "-") and sorted(bad_files.rglob("*")) == before, error

@pytest.mark.parametrize("code", ["def sharp(:", "raise ValueError('here')", "open('nowhere')",
                                  "def sharp(*_): raise ValueError('here')"])
def test_a_bug_in_a_file_of_rewards_keeps_its_traceback(command, code):
    """While it is loaded or used: one line would not say where in the user's own code to look."""
    Path("mine.py").write_text(code)
    with pytest.raises((RuntimeError, ValueError)) as error:
        command(*SMALL, "--reward", "mine.py:sharp", "--out", "run")
    assert 'mine.py", line 1' in "".join(traceback.format_exception(error.value))

def test_a_run_goes_on_with_its_own_settings_but_for_what_is_changed(command):
    """A notebook went on with a kl_coef of 0.01 where the run had 0, or with a mixture of two runs."""
    assert command(*SMALL, *"--steps 1 --out run --temperature 0.7 --lr 1e-3 --kl-coef 0".split())[0] == 0
    saved = torch.load("run/checkpoint.pt", weights_only=True)["config"]
    assert saved["prompts"] is None  # and not a path, so that a clone may be moved
    Path("mine.txt").write_text("a green frog\n")
    assert command(*"--resume run --prompts mine.txt --steps 2 --lr 5e-5".split())[0] == 0  # a default
    config = torch.load("run/checkpoint.pt", weights_only=True)["config"]
    assert config == saved | dict(prompts="mine.txt", steps=2, lr=5e-5) and saved["temperature"] == 0.7
    assert [row["step"] for row in rows_of(Path("run")) if "kl" not in row] == [1, 2]
    assert vars(grpo.Config.from_run("run", lr=1, seed=0)) == config | dict(lr=1, resumed=True)
    for name, value in dict(lora_rank=2, seed=1, model="other", adapter="a", out="b").items():
        with pytest.raises(ValueError, match=f"--{name}"):
            grpo.Config.from_run("run", **{name: value})

def test_help_shows_every_flag_once_and_what_it_means(command):
    """Made from Config itself, its comments included."""
    _, out, _ = command("--help")
    for field in dataclasses.fields(grpo.Config):
        line, = re.findall(rf"^ +{field.name}: .* = (.*)", out, re.MULTILINE)
        default, meaning = line.split("  # ")
        assert eval(default, vars(grpo)) == field.default and len(meaning) > 10

def test_settings_reach_the_wrapper(command, monkeypatch):
    """And so do the toy's defaults, or the model's own; its errors, even an OSError, keep their traceback."""
    spy = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(WRAPPER, "from_pretrained", spy)
    monkeypatch.setattr(diffusers.GlmImagePipeline, "load_config", mock.Mock())
    settings = dict(top_p=0.5, temperature=0.7, guidance=2.0, width=64, height=96, decode_steps=3, out="a")
    toy = grpo.Config(**grpo.TINY | settings)
    real = grpo.Config(model="zai-org/GLM-Image", group_size=6, out="a")
    flags = [f"--{name}={value}" for name, value in settings.items()]
    for argv in (flags, "--model zai-org/GLM-Image --group-size 6 --out a".split()):
        with pytest.raises(InterruptedError):
            command(*argv)
    assert spy.call_args_list == [mock.call("tiny", toy), mock.call("zai-org/GLM-Image", real)]
    pipe = QUICK(0)
    pipe.vision_language_encoder.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    for config, own in ((toy, (0.7, 0.5)), (make_config(temperature=None), (0.9, 0.75))):
        wrapper = WRAPPER(pipe, config)
        assert (wrapper.temperature, wrapper.top_p_filter.top_p) == own
