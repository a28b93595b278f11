"""Tests of grpo.py: identities, mostly, on a toy of random weights. `pytest -q`: no network, no GPU."""
import contextlib, copy, dataclasses, functools, inspect, io, json, math, multiprocessing, os, random
import re, shutil, signal, socket, statistics, subprocess, sys, tempfile, time, types, typing, warnings
import weakref
from pathlib import Path
from unittest import mock

import diffusers, pytest, torch, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo

torch.set_num_threads(1)  # two would wait for each other, busily, where the machine does other work
HERE = Path(__file__).parent
PROMPTS = ["a red fox on a wall", "yellow"]  # of different length, so that one of them is padded
make_tiny_pipeline = grpo.make_tiny_pipeline  # before tests put the quick one in its place
QUICK = functools.partial(make_tiny_pipeline, warmup_steps=0)  # the toy with random weights

def make_config(**settings):
    """64 wide and 128 high is not square: a draft of 2 x 1 and a large grid of 4 x 2 tokens."""
    settings = {"size": (64, 128), "temperature": 0.9, "batch_size": 2, "steps": 4, **settings}
    return grpo.Config(**{**grpo.TINY, **settings})

def make_wrapper(**settings):
    """A fresh toy of random weights."""
    return grpo.GLMImageWrapper(QUICK(0), make_config(**settings))

def make_trainer(out, **settings):
    """A trainer of the random toy: 2 prompts x 4 images of 64 x 128 a step; `train` is the first to write."""
    wrapper = make_wrapper(**{"out": str(out), "temperature": None, **settings})
    prompts = ["a red fox", "some yellow thing here", "green"]
    targets = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(3)]
    return grpo.GRPOTrainer(wrapper.config, wrapper, prompts, targets=targets)

def make_rollout(trainer, step=1):
    """What `train` hands to `train_step`."""
    rollout, _ = trainer.rollout(step)
    rollout["advantages"] = grpo.compute_advantages(
        rollout["rewards"], trainer.config.group_size, trainer.config.scale_rewards)
    return rollout

def perturb(lora):
    """Adapters that do something: B starts at 0."""
    torch.manual_seed(5)
    for weight in lora.weights.values():
        weight.data.add_(0.1 * torch.randn_like(weight))

@pytest.fixture(scope="session")
def wrapper():
    return make_wrapper()

@pytest.fixture(scope="session")
def sampled(wrapper):
    """Two groups of three samples: prompts of the six rows, tokens, log-probs."""
    tokens, logprobs, _ = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    return [p for p in PROMPTS for _ in range(3)], tokens, logprobs

def make_adapted(dtype=torch.float32, **settings):
    """A fresh toy and adapters that do something."""
    wrapper = make_wrapper(**settings)
    wrapper.policy.to(dtype)
    torch.manual_seed(0)
    lora = grpo.LoRA(wrapper.policy, wrapper.TARGETS, rank=4)
    perturb(lora)
    return wrapper, lora

def make_real(device):
    """GLM-Image in its real sizes, random bf16 weights, made on `device`, left on the CPU; the toy's words.
    VAE and text encoder are taken to be CogView4's and about ByT5 small's."""
    V = 16384
    home = "meta" if device == "meta" else "cpu"
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=(8, 12, 12))
    config = transformers.GlmImageConfig(
        text_config=dict(eos_token_id=V + 1, pad_token_id=V + 2, rope_parameters=rope),
        image_start_token_id=V, image_end_token_id=V + 1, image_token_id=V + 4)
    glyphs = transformers.T5Config(
        vocab_size=384, d_model=1472, d_ff=3584, num_layers=12, feed_forward_proj="gated-gelu")
    with torch.device(device), transformers.modeling_utils.local_torch_dtype(torch.bfloat16):
        ar = transformers.GlmImageForConditionalGeneration(config).to(home)
        t5 = transformers.T5EncoderModel(glyphs).to(home)
        dit = diffusers.GlmImageTransformer2DModel(
            in_channels=16, out_channels=16, prior_vq_quantizer_codebook_size=V,
            attention_head_dim=128, num_attention_heads=32).to(home)
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=(128, 512, 1024, 1024), layers_per_block=3, latent_channels=16,
            latents_mean=[0.0] * 16, latents_std=[1.0] * 16, mid_block_add_attention=False,
            use_quant_conv=False, use_post_quant_conv=False).to(home)
    ar.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    toy = grpo.make_tiny_models()
    del toy.processor._get_target_shape
    return diffusers.GlmImagePipeline(toy.tokenizer, toy.processor, t5, ar, vae, dit, toy.scheduler)

def tensors_of(*modules):
    """Parameters and buffers."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

def score(wrapper, sampled):
    """Log-probs of the trainer's pass, without a gradient."""
    prompts, tokens, _ = sampled
    with torch.no_grad():
        return wrapper.compute_logprobs(prompts, tokens)[0]

# --- The maths ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_by_hand(scale):
    """The mean of six 0.3s is not 0.3 in floats: over a tiny std that was an advantage of 0.03, not of 0."""
    groups = np.array([[1, 2, 3, 4, 10, 14], [7, 6, 5, -1, 0, 0], [0.3] * 6, [-7.7] * 6])
    std = dict(group=groups.std(axis=1, ddof=1, keepdims=True), batch=groups.std(ddof=1), none=1)[scale]
    by_hand = (groups - groups.mean(axis=1, keepdims=True)) / (std + 1e-6)
    got = grpo.compute_advantages(groups.flatten().tolist(), 6, scale).view(4, 6)
    assert got[:2].tolist() == [pytest.approx(row, rel=1e-4, abs=1e-6) for row in by_hand[:2]]
    assert not got[2:].any()

@pytest.mark.parametrize("rewards, group_size, scale", [
    ([1.0, 2.0], 1, "group"), ([1.0, 2.0, 3.0], 2, "group"), ([1.0, math.nan], 2, "group"),
    ([1.0, math.inf], 2, "none"), ([1.0, 2.0], 2, "std")])
def test_advantages_refuse_what_makes_no_groups(rewards, group_size, scale):
    """NaN would spread through the gradient to every weight; a typo must not silently mean "none"."""
    with pytest.raises(ValueError):
        grpo.compute_advantages(rewards, group_size, scale)

@pytest.mark.parametrize("ratio, advantage, high, surrogate, moves", [
    (1.5, 1.0, None, 1.2, False),  # better and already much likelier: clipped, no gradient
    (1.5, -1.0, None, -1.5, True),  # worse but much likelier: the full push back
    (0.5, 1.0, None, 0.5, True),  # better but much rarer: the full pull
    (0.5, -1.0, None, -0.8, False),  # worse and already much rarer: clipped, no gradient
    (1.3, 1.0, 0.4, 1.3, True), (1.5, 1.0, 0.4, 1.4, False), (0.7, -1.0, 0.4, -0.8, False),
    (1.3, 1.0, 0.0, 1.0, False),  # 0 is a bound too
])
def test_the_clip_by_hand(ratio, advantage, high, surrogate, moves):
    """Guards the min: with max, or with the clip alone, two of the first four are wrong."""
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, metrics = grpo.compute_grpo_loss(new, torch.zeros(1), torch.tensor([advantage]), 0.2, high)
    loss.backward()
    assert new.grad.any() == moves
    expected = dict(loss=-surrogate, policy_loss=-surrogate, ratio_mean=ratio, ratio_max=ratio)
    assert metrics == pytest.approx({**expected, "clip_frac": float(not moves)})  # and no KL

@pytest.mark.parametrize("delta, kl", [
    (0.0, 0.0), (1.0, math.e - 2), (-2.0, math.exp(-2) + 1), (-1000.0, 999.0),
    (1e-5, 5e-11), (-1e-5, 5e-11),  # exp(delta) - delta - 1 rounds to 0, or to a thousand times as much
    (1000.0, math.exp(20) - 21),  # clamped at 20: exp(1000) is inf, and so the loss of the whole batch
])
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

def test_gspo_is_the_ratio_of_the_mean():
    """One ratio a sequence: tokens that moved by +1 and -1 cancel, where token ratios would be clipped."""
    new = torch.tensor([[1.0, -1.0], [0.3, 0.1]])
    loss, metrics = grpo.compute_grpo_loss(
        new, torch.zeros(2, 2), torch.tensor([1.0, -1.0]), importance="sequence")
    assert loss.item() == pytest.approx(-(1 - math.exp(0.2)) / 2)
    assert metrics["ratio_max"] == pytest.approx(math.exp(0.2))

def test_a_log_prob_per_sequence_is_a_row_of_one_token():
    """Guards the broadcasting of advantages: [N] against [N, T] would silently give [N, N] when N = T."""
    torch.manual_seed(0)
    new, old, ref = torch.randn(3, 4) / 9
    advantages = torch.randn(4)
    losses = []
    for shape in (lambda x: x, lambda x: x[:, None], lambda x: x[:, None].expand(4, 4)):
        loss, _ = grpo.compute_grpo_loss(
            shape(new), shape(old), advantages, ref_logprobs=shape(ref), kl_coef=0.1)
        losses.append(loss.item())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)

def test_gradient_at_the_old_policy_is_reinforce():
    """Why a loss of 0 still learns; and only `new` carries a gradient."""
    new = torch.randn(6, 5, requires_grad=True)
    ref = torch.randn(6, 5, requires_grad=True)
    advantages = grpo.compute_advantages(torch.rand(6), 3).requires_grad_()
    loss, _ = grpo.compute_grpo_loss(new, new, advantages, ref_logprobs=ref, kl_coef=0.0)
    ours, *others = torch.autograd.grad(loss, [new, ref, advantages], allow_unused=True)
    by_hand, = torch.autograd.grad(-(advantages[:, None] * new).mean(), new)
    assert abs(loss.item()) < 1e-6
    assert torch.allclose(ours, by_hand, atol=1e-7) and ours.abs().sum() > 0
    assert others == [None, None]

@pytest.mark.parametrize("top_p", [0.3, 0.75, 1.0])
def test_the_nucleus_is_the_smallest_set_that_holds_its_mass(top_p):
    """The likeliest codes, and without the last one too few; a nucleus must come back from its bits."""
    torch.manual_seed(0)
    probs = (2 * torch.randn(100, 32)).softmax(dim=1)
    inside = grpo.find_nucleus(probs.log(), top_p)
    mass = (probs * inside).sum(dim=1)
    least = probs.masked_fill(~inside, 2).amin(dim=1)
    assert (mass > top_p - 1e-6).all() and (mass - least < top_p).all()
    assert (least > probs.masked_fill(inside, -1).amax(dim=1)).all()
    packed = grpo.pack_bits(inside)
    assert packed.shape == (100, 4) and packed.dtype == torch.uint8
    assert torch.equal(grpo.unpack_bits(packed), inside)

# --- Rewards ------------------------------------------------------------------------------------------------
def test_pictures_survive_the_round_trip():
    """Every 8-bit value, exactly: 0.999 * 255 truncated instead of rounded loses one."""
    ramp = np.arange(256 * 6, dtype=np.uint8).reshape(2, 256, 3)
    images = [Image.fromarray(ramp), Image.fromarray(ramp[::-1].copy())]
    tensor = grpo.pil_to_tensor(images)
    assert tensor.shape == (2, 3, 2, 256) and tensor.min() == 0 and tensor.max() == 1
    assert [i.tobytes() for i in grpo.tensor_to_pil(tensor)] == [i.tobytes() for i in images]
    assert grpo.pil_to_tensor([Image.new("RGBA", (4, 2), "red")]).shape == (1, 3, 2, 4)

@pytest.mark.parametrize("color, prompt, reward", [
    ("red", "A RED thing", 1), ("red", "a blue thing", 1 / 3), ("orange", "an orange one", 1),
    ("green", "a green wall of red bricks", 1),  # the first one counts
    ("purple", "a tired, reddish purple", 1),  # words, not letters
    ("black", "nothing named", None)])
def test_color_reward(color, prompt, reward):
    """The scale is linear in the mean of the picture, not in its best pixel."""
    image = Image.new("RGB", (4, 4), color)
    got, = grpo.reward_color([image], [prompt])
    assert got is None if reward is None else got == pytest.approx(reward)
    image.paste("black", (0, 0, 4, 4))
    image.paste("white", (0, 0, 4, 2))
    assert grpo.reward_color([image], ["white"])[0] == pytest.approx(0.5)

def test_mse_reward():
    """Equal is 0, a fifth of white off is -1/25; a target of another size is resized, bicubic."""
    black = Image.new("RGB", (32, 16))
    gray = Image.new("RGB", (8, 8), (51, 51, 51))
    assert grpo.reward_mse([black, black], ["", ""], [black, gray]).tolist() == pytest.approx([0, -0.04])
    target = Image.effect_noise((8, 8), 99).convert("RGB")
    resized = target.resize((32, 16), Image.BICUBIC)
    assert grpo.reward_mse([resized], [""], [target]).item() == 0

def blank(n):
    """Images, prompts and targets for rewards that do not look at them."""
    return [Image.new("RGB", (8, 8)) for _ in range(n)], [f"prompt {i}" for i in range(n)], [None] * n

def reward_of(values):
    """A reward of these values."""
    return lambda images, prompts, targets: values

@pytest.mark.parametrize("values", [
    [1, 2.0], (True, 2), np.array([1, 2], np.float16), torch.tensor([1, 2]), torch.tensor([[1.0], [2.0]]),
    [torch.tensor(1.0), np.float32(2)]])
def test_rewards_take_any_sequence_of_numbers(values):
    """A column [N, 1] summed with an [N] once broadcast to [N, N], and was trained on as nonsense."""
    rewards = {"a": (reward_of(values), 1.0), "b": (reward_of([10.0, 20.0]), -0.5)}
    total, components = grpo.compute_rewards(*blank(2), rewards)
    assert total.tolist() == [-4.0, -8.0]
    assert components["a"].tolist() == [1.0, 2.0] and components["b"].tolist() == [10.0, 20.0]

def test_a_reward_changes_nothing_for_others():
    """Neither by painting over a picture, nor by set_grad_enabled(False): nothing would learn any more."""
    def spoil(images, prompts, targets):
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        for image in (*images, *targets):
            image.paste("red", (0, 0, 8, 8))
        for values in (images, prompts, targets):
            values.clear()
        return answers.pop()

    def look(images, prompts, targets):
        pixels = [image.getpixel((0, 0)) for image in (*images, *targets)]
        seen.append([pixels, prompts, torch.is_grad_enabled(), torch.get_default_dtype()])
        return [0.0]

    seen = []
    answers = [None, [0.0]]  # the second is an error
    given = blank(1)[0], ["a fox"], [Image.new("RGB", (8, 8), "blue")]
    rewards = {"spoil": (spoil, 1.0), "look": (look, 1.0)}
    grpo.compute_rewards(*given, rewards)
    with pytest.raises(RuntimeError):
        grpo.compute_rewards(*given, rewards)
    look(*given)  # the caller
    assert seen == [[[(0, 0, 0), (0, 0, 255)], ["a fox"], True, torch.float32]] * 2

@pytest.mark.parametrize("reward, cause", [
    (lambda *_: 1 / 0, ZeroDivisionError),
    (lambda *_: sys.exit("no key"), SystemExit),
    (reward_of(None), TypeError),
    (reward_of(torch.zeros(2, 2)), (RuntimeError, ValueError)),
    (reward_of([0.0, 0.0, 0.0]), ValueError),
    (reward_of([0.0, -math.inf]), ValueError),
    (reward_of([None, math.nan]), ValueError),
])
def test_a_reward_that_gives_no_numbers_is_named(reward, cause):
    """Among several the user must see which; sys.exit would have ended a run without a checkpoint."""
    rewards = {"fine": (reward_of([0.0, 0.0]), 1.0), "mine.py:bad": (reward, 1.0)}
    with pytest.raises(RuntimeError, match="mine.py:bad") as error:
        grpo.compute_rewards(*blank(2), rewards)
    assert isinstance(error.value.__cause__, cause)

def test_rewards_are_loaded_with_their_weights(tmp_path):
    """Two rewards of a file share what it loads: run for each of them, it would load its model twice."""
    own = tmp_path / "own.py"
    own.write_text("""
import itertools, torch
torch.set_default_dtype(torch.float64)
count = itertools.count()  # the images that both have seen
def a(images, prompts, targets): return [next(count) for _ in images]
b = a
""")
    rewards = grpo.load_rewards(f"color=2, mse,{own}:a,{own}:b=.5")
    assert rewards.pop("color") == (grpo.reward_color, 2.0)
    assert rewards.pop("mse") == (grpo.reward_mse, 1.0)
    assert torch.get_default_dtype() == torch.float32
    total, components = grpo.compute_rewards(*blank(2), rewards)
    assert list(components) == ["own.py:a", "own.py:b"]
    assert components["own.py:a"].tolist() == [0.0, 1.0] and components["own.py:b"].tolist() == [2.0, 3.0]
    assert total.tolist() == [1.0, 2.5]

def test_prompts_file(tmp_path):
    """A byte order mark, comments and blank lines are no prompts; a target is found beside the file."""
    Image.new("L", (3, 3)).save(tmp_path / "t.png")
    text = "\ufeff# no\n\n  a red fox\tt.png\nplain \n"
    (tmp_path / "p.txt").write_text(text, encoding="utf-8")
    prompts, targets = grpo.load_prompts(tmp_path / "p.txt")
    assert prompts == ["a red fox", "plain"]
    assert targets[0].mode == "RGB" and targets[0].size == (3, 3) and targets[1] is None

# --- LoRA ---------------------------------------------------------------------------------------------------
def test_lora_starts_as_the_identity_and_switches_off_exactly(wrapper, sampled):
    """Or the KL is of something else than the base model; adapters come back on, also after an error."""
    base = score(wrapper, sampled)
    ours = make_wrapper()
    lora = grpo.LoRA(ours.policy, ours.TARGETS, rank=4)
    assert torch.equal(score(ours, sampled), base)
    perturb(lora)
    moved = score(ours, sampled)
    assert (moved - base).abs().max() > 1e-2
    with pytest.raises(ZeroDivisionError), lora.disabled():
        assert torch.equal(score(ours, sampled), base)
        1 / 0
    assert torch.equal(score(ours, sampled), moved)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapters_train(dtype):
    """All else is frozen; they are fp32 also in bf16, where 0.02 plus a step of 5e-5 is 0.02."""
    wrapper, lora = make_adapted(dtype, top_p=0.6)
    tokens, _, allowed = wrapper.sample(PROMPTS, 1, seeds=[1, 2])
    logprobs, entropy = wrapper.compute_logprobs(PROMPTS, tokens, allowed)
    (logprobs + entropy).sum().backward()  # 0 * log 0 outside the nucleus would make it NaN
    six = "self_attn.q self_attn.k self_attn.v self_attn.o mlp.gate_up mlp.down".split()
    names = [f"model.language_model.layers.{i}.{name}_proj.lora_{AB}.weight"
             for i in range(2) for name in six for AB in "AB"]
    assert list(lora.weights) == names
    for name, weight in lora.weights.items():
        assert weight.shape["lora_B" in name] == 4  # the rank
        assert weight.dtype == weight.grad.dtype == torch.float32
        assert weight.grad.isfinite().all() and weight.grad.any()
    for part in (wrapper.policy, wrapper.dit_half):
        assert all(not weight.requires_grad and weight.grad is None for weight in part.parameters())
    assert not wrapper.ar_half.training and not wrapper.dit_half.training

def test_a_model_whose_layers_have_other_names_is_refused():
    """Another model and the old TARGETS: torch would say that the optimizer got an empty parameter list."""
    with pytest.raises(ValueError, match="elsewhere"):
        grpo.LoRA(torch.nn.Linear(2, 2), "elsewhere", rank=1)

# --- GLM-Image: what the model reads ------------------------------------------------------------------------
def test_positions_are_those_of_the_docstring():
    """The drawing is what readers trust; it must be what the function does."""
    rows = re.findall(r"[thw]:((?:\s+\d+)+)", grpo.build_position_ids.__doc__)
    expected = torch.tensor([[int(number) for number in row.split()] for row in rows])
    got = grpo.build_position_ids(torch.tensor([[0, 1, 1, 1]]), [(1, 2), (2, 2)])
    assert expected.shape == (3, 10) and torch.equal(got[:, 0], expected)

@pytest.mark.parametrize("size", [(128, 128), (128, 64), (64, 192)])
def test_positions_are_those_of_transformers(size):
    """The library computes the same inside `generate`; here it is the independent witness."""
    wrapper = make_wrapper(size=size)
    ids, mask, position_ids = wrapper.encode(PROMPTS)
    mask = mask[:, :ids.shape[1]].long()
    w, h = size[0] // 32, size[1] // 32
    grids = torch.tensor([[1, h, w], [1, h // 2, w // 2]] * 2)  # the large one is listed first
    model = wrapper.policy.model
    prompt, _ = model.get_rope_index(ids, grids, torch.tensor([2, 2]), mask)
    image = model._cached_decode_position_ids.movedim(1, 0)[:, :, :-1]  # the last one is for EOS
    assert (mask == 0).any() and torch.equal(position_ids, torch.cat([prompt, image], dim=2))

def test_what_a_position_sees():
    """Itself and what stands before it but for padding; a row that saw nothing would be NaN on a GPU."""
    padded = torch.tensor([[False, False, True, True]])
    by_hand = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    got = grpo.build_visibility(padded, 4)
    assert got.shape == (1, 1, 4, 4) and got.dtype == torch.bool and got[0, 0].int().tolist() == by_hand
    assert grpo.build_visibility(padded, 3)[0, 0].int().tolist() == by_hand[:3]

@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
def test_prompts_are_encoded_as_the_pipeline_does(wrapper, monkeypatch, prompts):
    """What the stock pipeline hands to `generate` is what we hand to the language model."""
    generate = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(wrapper.policy, "generate", generate)
    monkeypatch.setattr(wrapper.pipe.processor.tokenizer, "padding_side", "left")  # as it is told by ours
    with pytest.raises(KeyboardInterrupt):
        wrapper.pipe.generate_prior_tokens(prompts, wrapper.height, wrapper.width)
    stock = generate.call_args.kwargs
    ids, mask, position_ids = wrapper.encode(prompts)
    mask = mask[:, :ids.shape[1]].long()
    large, draft = stock["image_grid_thw"][:2, 1:].tolist()
    assert torch.equal(stock["input_ids"], ids) and torch.equal(stock["attention_mask"], mask)
    assert torch.equal(position_ids, grpo.build_position_ids(mask, [draft, large]))

# --- GLM-Image: the sampler, and the trainer's pass over what it drew ---------------------------------------
@pytest.mark.parametrize("top_p, dtype, bound", [
    (1.0, torch.float32, 1e-5), (0.6, torch.float32, 1e-5), (1.0, torch.bfloat16, 0.05)])
def test_sampler_and_trainer_agree(top_p, dtype, bound):
    """THE test: padded prompts, a grid that is not square, a temperature, a nucleus; cached steps and one
    teacher-forced pass give the same log-probs, and without the nucleus others."""
    wrapper = make_wrapper(top_p=top_p)
    wrapper.policy.to(dtype)
    logits = []
    wrapper.policy.lm_head.register_forward_hook(lambda *args: logits.append(args[2].shape[:2]))
    tokens, logprobs, allowed = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    prompts = [p for p in PROMPTS for _ in range(3)]
    assert tokens.shape == logprobs.shape == (6, 2 * 1 + 4 * 2)
    assert tokens.min() >= 0 and tokens.max() < 8 and logprobs.dtype == torch.float32
    assert allowed.shape == (6, 10, 1) and allowed.dtype == torch.uint8
    with torch.no_grad():
        again, entropy = wrapper.compute_logprobs(prompts, tokens, allowed)
        unmasked, whole = wrapper.compute_logprobs(prompts, tokens)
        wrapper.temperature = 1.0
        wrong, _ = wrapper.compute_logprobs(prompts, tokens, allowed)
    assert (again - logprobs).abs().max() < bound < (wrong - logprobs).abs().max()
    if top_p < 1:
        assert (unmasked - logprobs).mean() < -0.1 and (entropy - whole).mean() < -0.1
    # A prompt is read once for its group; at 1024 x 1024 its own logits would be tens of megabytes a sample.
    assert logits == [(2, 1)] + [(6, 1)] * 10 + [(6, 10)] * 3

def test_a_naive_pass_does_not_agree(wrapper, sampled):
    """The trap: `model(prompt + tokens)` runs without complaint, and is wrong."""
    prompts, tokens, logprobs = sampled
    ids, mask, _ = wrapper.encode(prompts)
    L = ids.shape[1]
    with torch.no_grad():
        out = wrapper.policy(input_ids=torch.cat([ids, tokens], dim=1), attention_mask=mask.long())
    logp = (out.logits[:, L - 1:-1, :8] / 0.9).log_softmax(dim=2)
    naive = logp.gather(2, tokens[:, :, None])[:, :, 0]
    assert (naive - logprobs).abs().max() > 1e-3  # a hundred times what sampler and trainer may differ by

@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sampling_is_transformers_own_decoding_row_by_row(top_p):
    """Slow and plain, as the witness: the public `forward`, which brings positions of its own, a growing
    cache, no batch, no padding, and a nucleus cut by sorting. Ours shares a prefill: the same tokens."""
    wrapper = make_wrapper(top_p=top_p)
    tokens, logprobs, allowed = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    chance = torch.cat([torch.rand(3, 10, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    for row in range(6):
        ids, _, _ = wrapper.encode([PROMPTS[row // 3]])
        L = ids.shape[1]
        grids = dict(image_grid_thw=torch.tensor([[1, 4, 2], [1, 2, 1]]), images_per_sample=torch.tensor([2]))
        out = wrapper.policy(input_ids=ids, attention_mask=torch.ones(1, L), use_cache=True, **grids)
        for i in range(10):
            logits = out.logits[0, -1, :8] / 0.9
            probs, order = logits.softmax(dim=0).sort(descending=True)
            kept = probs.cumsum(dim=0) - probs < top_p  # while what stands before holds too little
            nucleus = torch.zeros(8).bool().scatter(0, order, kept)
            logp = logits.masked_fill(~nucleus, -math.inf).log_softmax(dim=0)
            mass = logp.double().exp().cumsum(dim=0)
            code = torch.searchsorted(mass, chance[row, i] * mass[-1], right=True)
            assert code == tokens[row, i]
            assert abs(logp[code] - logprobs[row, i]) < 1e-5
            assert torch.equal(grpo.unpack_bits(allowed[row, i]), nucleus)
            out = wrapper.policy(input_ids=code.view(1, 1), attention_mask=torch.ones(1, L + i + 1),
                                 use_cache=True, past_key_values=out.past_key_values)
    assert (grpo.unpack_bits(allowed).sum(dim=2) == 8).all() == (top_p == 1)

@pytest.mark.parametrize("chance, first", [(0.0, True), (1 - 2**-24, False)])
def test_no_chance_falls_out_of_the_nucleus(monkeypatch, chance, first):
    """A number of exactly 0 would draw code 0, allowed or not; one next to 1 a code behind the last."""
    wrapper = make_wrapper(top_p=0.3 if first else 0.99, size=(256, 256))
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.full(shape, chance))
    tokens, _, allowed = wrapper.sample(PROMPTS, 1, seeds=[1, 2])
    allowed = grpo.unpack_bits(allowed).int()
    last = 7 - allowed.flip(2).argmax(dim=2)
    assert torch.equal(tokens, allowed.argmax(dim=2) if first else last)
    assert (tokens > 0).any()

# --- GLM-Image: from tokens to pictures ---------------------------------------------------------------------
def test_micro_batches_change_nothing_and_read_each_prompt_once(sampled):
    """But for rounding, a grey level. The VAE works image by image: four at once take 9 GiB more at 1024."""
    pictures = []
    read = []
    sizes = []
    painted = []
    for size in (1, 2, 3):
        wrapper = make_wrapper(micro_batch_size=size, decode_steps=2)
        wrapper.pipe.text_encoder.register_forward_hook(lambda *_: read.append(1))
        wrapper.pipe.transformer.register_forward_pre_hook(
            lambda module, args, inputs: sizes.append(len(inputs["hidden_states"])), with_kwargs=True)
        wrapper.pipe.vae.decoder.register_forward_pre_hook(lambda _, args: painted.append(len(args[0])))
        pictures.append(grpo.pil_to_tensor(wrapper.decode(PROMPTS, sampled[1], [1, 2])))
    assert sizes == [1] * 12 + [2, 2, 1, 1] * 2 + [3] * 4  # two denoising steps each
    assert len(read) == 3 * 2
    assert painted == [1] * 3 * 6
    assert all((picture - pictures[0]).abs().max() < 1.5 / 255 for picture in pictures)

@pytest.mark.parametrize("guidance", [4.0, 1.0])
def test_painting_is_that_of_the_stock_pipeline(sampled, guidance):
    """Given the large tokens and the noise of the group, an untouched `GlmImagePipeline` draws the same
    pictures, one by one, although we make the angles of the DiT once, and not, on the CPU, at every call."""
    prompts = ['a red fox on a wall that says "CLOSED TODAY"', 'a yellow "!"']
    rows = sampled[1][[0, 1, 3, 4]]  # two groups of two
    stock = QUICK(0)
    del stock.transformer.forward  # the class's own, without our angles
    ours = make_wrapper(guidance=guidance, decode_steps=3, micro_batch_size=1)
    ours.pipe.transformer.rope.forward = mock.Mock(side_effect=AssertionError("angles are made again"))
    images = ours.decode(prompts, rows, seeds=[7, 8])
    for i, (image, tokens) in enumerate(zip(images, rows)):
        shape = 1, stock.transformer.config.in_channels, 16, 8
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(7 + i // 2))
        expected = stock(
            prompts[i // 2], prior_token_ids=stock._upsample_token_ids(tokens[2:], 4, 2), latents=noise,
            height=128, width=64, num_inference_steps=3, guidance_scale=guidance).images[0]
        assert image.size == (64, 128) and image.tobytes() == expected.tobytes()
    assert len({image.tobytes() for image in images + ours.decode(["a fox"], rows[:1], [7])}) == 5

def test_temperature_and_top_p_are_the_models_own_unless_given():
    """Other log-probs than those that the stock pipeline samples by would train another model."""
    pipe = QUICK(0)
    pipe.vision_language_encoder.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    own = grpo.GLMImageWrapper(pipe, make_config(temperature=None))
    given = grpo.GLMImageWrapper(pipe, make_config(temperature=0.5, top_p=1.0))
    assert (own.temperature, own.top_p) == (0.9, 0.75)
    assert (given.temperature, given.top_p) == (0.5, 1.0)

# --- Memory: what lies where, and what is kept for the backward pass ----------------------------------------
def hide_weights(wrapper, monkeypatch):
    """All weights become NaN but inside `on_device`, as if they were not on the device -> what came there."""
    whole = {tensor: tensor.data for tensor in tensors_of(wrapper.policy, wrapper.dit_half)}
    for tensor in whole:
        tensor.data = torch.full_like(tensor, math.nan)
    on_device = grpo.on_device
    moves = []

    @contextlib.contextmanager
    def reveal(module, device):
        moves.append("ar" if module is wrapper.ar_half else "dit")
        with on_device(module, device):  # which puts the NaN back
            for tensor in tensors_of(module):
                tensor.data = whole[tensor]
            yield

    monkeypatch.setattr(grpo, "on_device", reveal)
    return moves

def test_offloading_changes_nothing_and_moves_once_a_phase(tmp_path, monkeypatch):
    """What is not on the device is NaN, the vision tower always; and a phase moves weights once."""
    runs = []
    for offload in ("off", "on"):
        out = tmp_path / offload
        trainer = make_trainer(out, offload=offload, steps=1, micro_batch_size=2)
        moves = hide_weights(trainer.wrapper, monkeypatch) if offload == "on" else []
        trainer.train()
        paths = sorted(out.rglob("*.png")) + sorted(out.rglob("*.safetensors"))
        files = [path.read_bytes() for path in paths]
        runs.append((rows_of(out), files))
    assert moves == ["ar", "dit"] + ["ar", "dit", "ar"] + ["ar", "dit"]  # pictures, a step, pictures
    assert len(files) == 4 and trainer.history[1]["grad_norm"] > 0
    assert runs[0] == runs[1]

def test_weights_come_to_the_device_and_are_forgotten_there():
    """Also after an error, each is in the same memory as before: no copy. (A dtype stands for the device.)"""
    half = make_wrapper().ar_half
    tensors = tensors_of(half)
    homes = [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(ZeroDivisionError), grpo.on_device(half, torch.float64):
        there = [tensor.data_ptr() for tensor in tensors]
        assert {tensor.dtype for tensor in tensors} == {torch.float64}
        with grpo.on_device(half, torch.float64):
            assert [tensor.data_ptr() for tensor in tensors] == there  # already: no copy of them
        1 / 0
    assert [tensor.data_ptr() for tensor in tensors] == homes

@pytest.mark.parametrize("offload, free, where", [
    ("on", 80, "cpu"), ("off", 10, "meta"), ("auto", 40, "cpu"), ("auto", 80, "meta"), ("auto", 0, "meta")])
def test_where_the_halves_wait(monkeypatch, offload, free, where):
    """GLM-Image wants 60 GiB to lie on the GPU as a whole; the vision tower never moves there."""
    monkeypatch.setattr(grpo, "free_gib", lambda: free)
    pipe = QUICK(0)
    wrapper = grpo.GLMImageWrapper(pipe, make_config(offload=offload), device="meta")
    parts = wrapper.ar_half, wrapper.dit_half, wrapper.policy.model.visual
    for part, place in zip(parts, (where, where, "cpu")):
        assert {tensor.device.type for tensor in tensors_of(part)} == {place}

def test_weights_wait_in_pinned_memory_and_only_there(monkeypatch):
    """The unpinned ones beside them would take twice the 31 GiB of the host."""
    pinned = {}

    def pin(tensor):  # as torch does it: what is pinned already is left alone
        copy = pinned.get(tensor.data_ptr(), tensor.clone())
        return pinned.setdefault(copy.data_ptr(), copy)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    pipe = QUICK(0)
    pipe.transformer.rope.forward = lambda _: []
    wrapper = grpo.GLMImageWrapper(pipe, make_config(offload="on"), device="cuda")
    places = [tensor.data_ptr() for tensor in tensors_of(wrapper.ar_half, wrapper.dit_half)]
    assert len(places) > 100 and sorted(places) == sorted(pinned)

# --- Memory, counted: the real sizes on the `meta` device, where a tensor has a size and no contents --------
def describe(value):
    """What the shape of an operation's result depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple([describe(part) for part in value])
    return type(value), value

class FakeGPU(TorchDispatchMode):
    """`meta` stands for the GPU, the CPU is the host. Every operation passes through here. A storage counts
    from the operation that makes it until nobody holds it any more, in blocks of 512 bytes, as on a GPU.
    Weights are added by hand: with offloading, those of a half inside its `on_device` alone."""
    def __init__(self, *halves):
        super().__init__()
        self.alive = {}  # storages: a weak reference, bytes
        self.results = {}  # of operations seen before; to ask PyTorch again would take most of the time
        self.sizes = {half: sum(weight.nbytes for weight in half.parameters()) for half in halves}
        self.inside = []  # the halves whose `on_device` we are in
        self.weights = {"on": 0, "off": sum(self.sizes.values())}  # bytes on the GPU, by --offload
        self.peaks = {"on": 0, "off": 0}
        self.sent = 0  # bytes from the host
        self.now = 0  # bytes beside the weights
        for weight in tensors_of(*halves):
            self.see(weight)
        self.now = 0

    def grow(self, size):
        self.now += size
        for offload, weights in self.weights.items():
            self.peaks[offload] = max(self.peaks[offload], weights + self.now)

    def see(self, tensor):
        """-> True if it is new, and all of its storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return False
        size = -(-storage.nbytes() // 512) * 512
        self.alive[key] = weakref.ref(storage, lambda _: self.forget(key)), size
        self.grow(size)
        return storage.nbytes() == tensor.nbytes

    def forget(self, key):
        self.now -= self.alive.pop(key)[1]

    @contextlib.contextmanager
    def on_device(self, on_device, half, device):
        """Around the one of grpo.py."""
        size = 0 if half in self.inside else self.sizes[half]
        self.inside.append(half)
        self.weights["on"] += size
        with on_device(half, device):
            yield
        self.weights["on"] -= size
        self.inside.remove(half)

    def without_contents(self, function, args, kwargs):
        """What cannot be had from a tensor without contents, made up; None where it can."""
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1  # `.item()`: any number will do
        if function is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if function is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool:
            return args[0].flatten(0, args[1][0].dim() - 1)  # the glyphs that are no padding: all of them

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.is_view or function._schema.is_mutable:
            return function(*args, **kwargs)  # nothing new
        on_gpu = len(args) > 0 and isinstance(args[0], torch.Tensor) and args[0].is_meta
        made_up = self.without_contents(function, args, kwargs) if on_gpu else None
        if made_up is not None:
            return made_up
        key = describe([function, args, list(kwargs.items())])
        if key in self.results:
            shape, stride, dtype = self.results[key]
            result = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                if self.see(tensor) and tensor is result:
                    self.results[key] = tensor.shape, tensor.stride(), tensor.dtype
        if function is torch.ops.aten._to_copy.default and result.is_meta and not on_gpu:
            self.sent += result.nbytes
        return result

def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """What `F.scaled_dot_product_attention` allocates on a GPU; on `meta` it would make the matrix of scores.
    With a mask it is the memory-efficient kernel, which wants the mask in the dtype of the query, its rows
    padded to a multiple of 8. Without one it is flash attention, which allocates the same."""
    assert not enable_gqa
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        K = attn_mask.shape[-1]
        if K % 8:
            attn_mask = F.pad(attn_mask, (0, -K % 8))[..., :K]
        attn_mask = attn_mask.expand(*query.shape[:3], K)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]

def skip_tokens(forward, T):
    """`forward` for a sampler of T tokens: only the prompts and the last one, beside what is kept of all."""
    fed = []

    def forward_rarely(ids, *args, **kwargs):
        assert any(isinstance(value, transformers.StaticCache) for value in (*args, *kwargs.values()))
        if ids.shape[1] == 1:
            fed.append(True)
        if 0 < len(fed) < T:
            return torch.empty(len(ids), 1, 16384, device="meta")
        return forward(ids, *args, **kwargs)

    return forward_rarely

def count_memory(side, num_prompts, micro_batch_size=1, group_size=4):
    """Highest GiB alive on the GPU in the second step -> {"update", "sample", "decode": {"on", "off"}}, by
    --offload; and the MiB that an update of two micro-batches, the second beside the gradients of the first,
    sends there. Of the decoding one is run, in two steps: more of them would find the GPU as these do. Real
    numbers are wanted by the prompts, read on the host, and by the scheduler."""
    config = grpo.Config(size=(side, side), batch_size=num_prompts, group_size=group_size,
                         micro_batch_size=micro_batch_size, decode_steps=2, offload="off")
    wrapper = grpo.GLMImageWrapper(make_real("meta"), config, "meta")
    prompt = "red " * 40
    T = 256 + (side // 32) ** 2
    n = 2 * micro_batch_size
    rollout = dict(prompts=[prompt] * n, tokens=torch.zeros(n, T).long(), logprobs=torch.zeros(n, T),
                   allowed=torch.zeros(n, T, 16384 // 8).byte(), advantages=torch.zeros(n))
    encode = wrapper.encode

    def encode_on_host(prompts):
        with mock.patch.object(wrapper, "device", torch.device("cpu")):
            return [tensor.to("meta") for tensor in encode(prompts)]

    def update():
        with wrapper.policy_on_device():
            trainer.train_step(rollout)

    def sample():
        with mock.patch.object(wrapper, "forward", skip_tokens(wrapper.forward, T)):
            wrapper.sample([prompt] * num_prompts, group_size, range(num_prompts))

    def decode():
        wrapper.decode([prompt], rollout["tokens"][:micro_batch_size], [0])

    gpu = FakeGPU(wrapper.ar_half, wrapper.dit_half)
    peaks = {}
    with (
        mock.patch.object(wrapper, "encode", encode_on_host),
        mock.patch.object(grpo, "on_device", functools.partial(gpu.on_device, grpo.on_device)),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(type(wrapper.pipe.scheduler), "index_for_timestep", return_value=0),
        gpu,
    ):
        trainer = grpo.GRPOTrainer(config, wrapper, [prompt])
        trainer.optimizer.param_groups[0]["foreach"] = True  # as by default on a GPU
        for weight in trainer.lora.weights.values():
            weight.grad = torch.zeros_like(weight)
        trainer.optimizer.step()  # AdamW's memory exists from the first step on
        trainer.optimizer.zero_grad()
        resident = gpu.now
        for phase in (update, sample, decode):
            gpu.peaks = {"on": 0, "off": 0}
            phase()
            peaks[phase.__name__] = {offload: peak / 2**30 for offload, peak in gpu.peaks.items()}
            left = gpu.now - resident
            assert left < 2**20, f"{phase.__name__} leaves {left} bytes behind"
            sent = gpu.sent if phase is update else sent
    return peaks, sent / 2**20

def test_the_count_by_hand():
    """Views count nothing, a result while it is held, an offloaded half inside its `on_device` alone."""
    one, two = (torch.nn.Linear(512, n, bias=False, device="meta") for n in (512, 1024))  # 1 and 2 MiB
    gpu = FakeGPU(one, two)
    place = functools.partial(gpu.on_device, grpo.on_device)

    def peaks():
        return [peak / 2**20 for peak in gpu.peaks.values()]

    with gpu:
        x = torch.empty(1024, 512, device="meta")  # 2 MiB
        for _ in range(3):
            one(x)[:, :256].relu()  # 2 MiB, then 1 more
            assert gpu.now == 2 * 2**20 and peaks() == [5, 5 + 3]
        with place(one, "meta"), place(one, "meta"):
            one(x).relu()  # 2 MiB, then 2 more
        assert gpu.now == 2 * 2**20 and peaks() == [6 + 1, 6 + 3]
        with place(two, "meta"), place(one, "meta"):
            torch.zeros(1024, 1024).to("meta").relu()  # 4 MiB, then 4 more
        assert gpu.now == 2 * 2**20 and peaks() == [10 + 3, 10 + 3] and gpu.sent == 4 * 2**20

@pytest.mark.parametrize("side", [512, 1024])
def test_a_step_fits_a_card_of_24_gb(side):
    """8 x 4 images with offloading; beside the weights lies no less than what is known to be there."""
    peaks, sent = count_memory(side, num_prompts=8)
    T = 256 + (side // 32) ** 2
    cache = 32 * T * 40 * 2 * 2 * 128 * 2 / 2**30  # 40 layers, keys and values, 2 heads of 128, 2 bytes
    assert 16.6 + 1.0 + cache < peaks["sample"]["on"] <= 22
    assert 16.6 + 1.4 < peaks["update"]["on"] <= 22
    assert 14.1 + 1.0 < peaks["decode"]["on"] <= 22
    assert all(16.6 + 14.1 + 1.0 < peak["off"] < 40 for peak in peaks.values())
    # Two samples, for the reference and for the policy. Unpacked on the host it would be eight times as much.
    assert sent < 1.2 * 2 * 2 * T * 16384 / 8 / 2**20 + 0.1

# --- The trainer --------------------------------------------------------------------------------------------
def gradient_of(trainer):
    """All of it, in one vector."""
    return torch.cat([weight.grad.flatten() for weight in trainer.lora.weights.values()])

@pytest.mark.parametrize("settings", [{}, dict(importance="sequence", scale_rewards="none")])
def test_gradient_does_not_depend_on_the_micro_batch(tmp_path, settings):
    """Each micro-batch averaged on its own, or the last one alone, would give another gradient."""
    trainer = make_trainer(tmp_path / "run", max_grad_norm=1e9, kl_coef=0.1, **settings)
    perturb(trainer.lora)
    rollout = make_rollout(trainer)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer))
    for size in (1, 2, 3, 8):
        trainer.config.micro_batch_size = size
        trainer.train_step(rollout)
    assert gradients[0].abs().max() > 1e-4
    for other in gradients[1:]:
        assert torch.allclose(gradients[0], other, rtol=1e-4, atol=1e-6)

@pytest.mark.parametrize("top_p", [None, 0.6])
def test_ratio_is_one_until_the_first_update(tmp_path, top_p):
    """Old log-probs from another pass, or a pass that forgets the masks of top-p, would start off 1."""
    trainer = make_trainer(tmp_path / "run", lr=0.01, top_p=top_p)
    rollout = make_rollout(trainer)
    assert (rollout["allowed"] == 255).all() == (top_p is None)
    once = trainer.train_step(rollout)
    assert once["ratio_max"] == once["ratio_mean"] == 1
    assert once["kl"] == once["clip_frac"] == 0
    trainer.config.num_iterations = 2
    twice = trainer.train_step(make_rollout(trainer, step=2))
    assert twice["ratio_max"] > 1.001 and 0 < twice["kl"] < 100
    assert max(once["sampler_gap"], twice["sampler_gap"]) < 1e-5

@pytest.mark.parametrize("kl_coef, passes", [(0.1, 4), (0.0, 2)])
def test_the_reference_is_the_policy_with_its_adapters_off(tmp_path, kl_coef, passes):
    """The last policy as reference would let the run drift away; at --kl-coef 0 its pass would be wasted."""
    trainer = make_trainer(tmp_path / "run", kl_coef=kl_coef)
    perturb(trainer.lora)
    rollout = make_rollout(trainer)
    score = trainer.wrapper.compute_logprobs
    with trainer.lora.disabled(), torch.no_grad():
        reference, _ = score(rollout["prompts"], rollout["tokens"])
    delta = reference - rollout["logprobs"]
    kl = (delta.exp() - delta - 1).mean().item()
    with mock.patch.object(trainer.wrapper, "compute_logprobs", side_effect=score) as spy:
        metrics = trainer.train_step(rollout)
    assert spy.call_count == passes
    assert kl > 1e-3
    assert metrics.get("kl") == (pytest.approx(kl, rel=1e-3) if kl_coef else None)

def test_gradients_that_are_no_numbers(tmp_path):
    """One NaN would be in every weight and in Adam's memory; and a run that skips all updates would go on."""
    trainer = make_trainer(tmp_path / "run", steps=9, save_every=99, num_iterations=2)
    bad = [0, 1, 1, 0, 1, 1, 1]  # of these steps the first of two updates; an update has two micro-batches
    calls = []

    def spoil(gradient):
        calls.append(gradient)
        spoilt = bad[(len(calls) - 1) // 4] and (len(calls) - 1) % 4 < 2
        return gradient * math.nan if spoilt else gradient

    next(iter(trainer.lora.weights.values())).register_hook(spoil)
    with pytest.raises(FloatingPointError, match="lr"):
        trainer.train()
    assert [row["skipped"] for row in trainer.history[1:]] == bad
    assert [math.isnan(row["grad_norm"]) for row in trainer.history[1:]] == bad
    state = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)
    assert state["step"] == 7
    assert all(weight.isfinite().all() for weight in state["adapter"].values())
    assert {moments["step"].item() for moments in state["optimizer"]["state"].values()} == {7 + 2}

def test_settings_reach_the_update(tmp_path):
    """A flag that is parsed and then forgotten looks like a flag that does not help."""
    settings = dict(clip_range=0.3, clip_range_high=0.4, kl_coef=0.5, importance="sequence")
    trainer = make_trainer(tmp_path / "run", steps=1, lr=0.003, lora_rank=2, num_iterations=3,
                           max_grad_norm=1e-3, scale_rewards="none", **settings)
    trainer.rewards = {"fake": (lambda images, *_: torch.arange(len(images)), 1.0)}
    step = trainer.optimizer.step
    norms = []

    def spy_on_step():
        norms.append(gradient_of(trainer).norm().item())
        step()

    trainer.optimizer.step = spy_on_step
    with mock.patch.object(grpo, "compute_grpo_loss", wraps=grpo.compute_grpo_loss) as spy:
        trainer.train()
    assert spy.call_count == 3 * 2  # updates x micro-batches
    for call in spy.call_args_list:
        given = inspect.signature(grpo.compute_grpo_loss).bind(*call.args, **call.kwargs).arguments
        assert given["advantages"].tolist() == [-1.5, -0.5, 0.5, 1.5]
        assert {name: given[name] for name in settings} == settings
    assert norms == pytest.approx([1e-3] * 3, rel=1e-2)
    assert trainer.history[1]["grad_norm"] > 1e-2
    assert trainer.history[1]["ratio_max"] > trainer.history[1]["ratio_mean"]
    group, = trainer.optimizer.param_groups
    assert trainer.history[1]["lr"] == group["lr"] == 0.003 and group["weight_decay"] == 0
    for weight in trainer.lora.weights.values():
        assert min(weight.shape) == 2
        assert weight.grad is None  # and takes no memory while the next step samples

def test_rows_are_merged_by_their_means_but_for_two_maxima():
    """A reward on which one GPU alone had an opinion must not count as 0 on the others."""
    rows = [dict(ratio_max=1, sampler_gap=0.2, kl=1), dict(ratio_max=3, sampler_gap=0.1, kl=2, reward=5)]
    assert grpo.merge_rows(rows) == dict(ratio_max=3, sampler_gap=0.2, kl=1.5, reward=5)

def test_sampler_gap_and_entropy_by_hand(tmp_path, monkeypatch):
    """A gap in one direction only, or an entropy averaged over codes, would look healthy for ever."""
    trainer = make_trainer(tmp_path / "run")
    forward = trainer.wrapper.forward
    monkeypatch.setattr(trainer.wrapper, "forward", lambda *inputs: 0 * forward(*inputs))
    rollout = make_rollout(trainer)
    rollout["logprobs"][5, 3] -= 0.1
    metrics = trainer.train_step(rollout)
    assert metrics["sampler_gap"] == pytest.approx(0.1, rel=1e-3)
    assert metrics["entropy"] == pytest.approx(math.log(8))  # in nats: each of 8 codes is as likely

def test_the_toy_and_its_first_adapters_come_from_the_seed_alone(monkeypatch):
    """A run is its command, whatever has been drawn before."""
    monkeypatch.setattr(grpo, "make_tiny_pipeline", functools.partial(make_tiny_pipeline, warmup_steps=2))
    states = []
    for noise, seed in ((1, 5), (2, 5), (1, 6)):
        config = make_config(seed=seed)
        wrapper = grpo.GLMImageWrapper.from_pretrained("tiny", config)
        torch.manual_seed(noise)  # a model that was loaded, not made, would seed nothing
        trainer = grpo.GRPOTrainer(config, wrapper, ["a red fox"])
        parts = tensors_of(wrapper.ar_half, wrapper.dit_half), trainer.lora.weights.values()
        states.append([torch.cat([tensor.flatten() for tensor in part]) for part in parts])
    for first, same, other in zip(*states):
        assert torch.equal(first, same) and not torch.equal(first, other)
    for name, weight in trainer.lora.weights.items():  # peft's: uniform up to 1 / sqrt(in), and 0
        size = weight.abs().max() * weight.shape[1] ** 0.5
        assert size == 0 if "lora_B" in name else 0.9 < size <= 1

def test_prompts_rewards_and_tokens_stay_in_one_order(tmp_path):
    """A reward that reads the prompt must meet the image of that prompt: p0 p0 .. p1 p1 .. all the way."""
    trainer = make_trainer(tmp_path / "run")
    seen = []

    def spy(images, prompts, targets):
        seen.extend([images, prompts, [target.getpixel((0, 0))[0] for target in targets]])
        return torch.arange(8)

    trainer.rewards = {"spy": (spy, 1.0)}
    chosen, seeds = trainer.choose_prompts(1)
    rollout, _ = trainer.rollout(1)
    images, prompts, places = seen
    assert places == np.repeat(chosen, 4).tolist()
    assert prompts == rollout["prompts"] == [trainer.prompts[i] for i in places]
    assert rollout["rewards"].tolist() == list(range(8))
    with torch.no_grad():
        again, _ = trainer.wrapper.compute_logprobs(prompts, rollout["tokens"])
    assert (again - rollout["logprobs"]).abs().max() < 1e-5
    assert images == trainer.wrapper.decode([trainer.prompts[i] for i in chosen], rollout["tokens"], seeds)

def draw(batch_size, steps, world_size=1, seed=0):
    """-> (place of the prompt, seed of the group) for each turn of these steps, on all GPUs."""
    turns = []
    trainer = make_trainer("unused", batch_size=batch_size, seed=seed)
    trainer.world_size = world_size
    for step in steps:
        for trainer.rank in range(world_size):
            places, seeds = trainer.choose_prompts(step)
            turns += zip(map(int, places), seeds)
    return turns

def test_what_a_step_draws_depends_on_seed_and_step_alone():
    """Else --resume, or another number of GPUs, would give another run; and each of three prompts comes once
    before any comes again."""
    for batch_size in (1, 2, 5, 6):
        places, seeds = zip(*draw(batch_size, range(1, 13)))
        laps = [places[i:i + 3] for i in range(0, len(places) - 2, 3)]
        assert all(sorted(lap) == [0, 1, 2] for lap in laps) and len(set(laps)) > 1
        assert len(set(seeds)) == len(seeds)
    whole = draw(6, range(1, 13))
    for world_size in (1, 2, 3):
        assert sorted(draw(6, [5], world_size)) == sorted(whole[24:30])
    other_places, other_seeds = zip(*draw(6, range(1, 13), seed=1))
    assert places != other_places and places[3:] != other_places[:-3]  # nor seed 0, a lap later
    assert not set(seeds) & set(other_seeds)
    with mock.patch.object(grpo, "gather", lambda rows: rows * 2), mock.patch("torch.distributed.get_rank"):
        with pytest.raises(ValueError, match="--batch-size"):
            make_trainer("unused", batch_size=3)  # on two GPUs

@pytest.mark.parametrize("reward_norm", ["none", "group"])
def test_metrics_by_hand(tmp_path, reward_norm):
    """A log of z-scores is 0 whatever is learned; one that counts "no opinion" as a 0 is wrong too."""
    trainer = make_trainer(tmp_path / "run", reward_norm=reward_norm)
    a = [7, 7, 7, 7, 1, 2, 3, 6]
    nobody = [None] * 4
    trainer.rewards = {"a": (reward_of(a), 1.0), "b": (reward_of([None, 4, None, 2, *nobody]), 0.5),
                       "c": (reward_of(nobody * 2), 1.0)}
    rollout, metrics = trainer.rollout(1)
    assert metrics["reward"] == 5 + 0.5 * 3
    assert (metrics["reward/a"], metrics["reward_std/a"]) == (5, pytest.approx(np.std(a)))
    assert (metrics["reward/b"], metrics["reward_std/b"]) == (3, 1)
    assert not metrics.keys() & {"reward/c", "reward_std/c"}
    assert metrics["tokens_per_sec"] == pytest.approx(8 * 10 / metrics["sec_rollout"])
    groups = [[7 + 1.5, 7 + 2, 7 + 1.5, 7 + 1], [1, 2, 3, 6]]
    stds = np.std(groups, axis=1, ddof=1)
    if reward_norm == "group":
        groups = [[0, 0.5 * 1.2247449, 0, -0.5 * 1.2247449], [(r - 3) / stds[1] for r in groups[1]]]
        stds = [0.5, 1]
    assert rollout["rewards"].tolist() == pytest.approx(groups[0] + groups[1], abs=1e-5)
    assert metrics["reward_std"] == pytest.approx(np.mean(stds), abs=1e-5)
    assert metrics["frac_zero_std"] == 0
    trainer.rewards = {"a": (reward_of([0.3] * 4 + [1, 2, 3, 6]), 1.0)}
    assert trainer.rollout(1)[1]["frac_zero_std"] == 0.5
    trainer.world_size = 2  # half of the prompts are another's
    trainer.rewards = {"a": (reward_of([1, 2, 3, 6]), 1.0)}
    _, metrics = trainer.rollout(1)
    assert metrics["tokens_per_sec"] == pytest.approx(2 * 4 * 10 / metrics["sec_rollout"])

def luck(images, prompts, targets):
    """A reward that draws from all three global generators."""
    return torch.rand(len(images)) + np.random.rand() + random.random()

def make_lucky(out, **settings):
    """A trainer of two groups of two; its reward is luck."""
    random.seed(0)
    np.random.seed(0)
    trainer = make_trainer(out, group_size=2, **{"steps": 5, "save_every": 2, **settings})
    trainer.rewards = {"luck": (luck, 1.0)}
    return trainer

def resume_lucky(out, **settings):
    """The same, with the state that this folder holds."""
    trainer = make_lucky(None, resume=str(out), **settings)
    trainer.load_checkpoint(out)
    return trainer

def step_of(out):
    """The step that a checkpoint holds."""
    return torch.load(out / "checkpoint.pt", weights_only=True)["step"]

def without(row, *prefixes):
    return {key: row[key] for key in row if not key.startswith(prefixes)}

def rows_of(out):
    """metrics.jsonl without what the clock says."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [without(json.loads(line), "sec_", "tokens_per_sec") for line in lines]

def state_of(out):
    """A checkpoint as text, bit for bit, without the clock and the name of the folder."""
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    state["history"] = [without(row, "sec_", "tokens_per_sec") for row in state["history"]]
    return json.dumps(state, default=torch.Tensor.tolist, sort_keys=True)

def assert_same_run(one, other):
    """Every file of two runs, but for seconds and the name of the folder."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.*"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*.*"))
    assert state_of(one) == state_of(other)
    assert rows_of(one) == rows_of(other)
    args = [json.loads((out / "args.json").read_text()) for out in (one, other)]
    assert without(args[0], "resume", "out") == without(args[1], "resume", "out")
    for name in names:
        if name.name not in ("checkpoint.pt", "metrics.jsonl", "args.json"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name

def assert_whole(out):
    """Nothing that others may read at any moment is torn."""
    for path in out.rglob("*.png"):
        Image.open(path).load()
    for path in out.rglob("*.safetensors"):
        load_file(path)

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of five steps whose reward is luck, saved every two."""
    out = tmp_path_factory.mktemp("finished") / "run"
    make_lucky(out).train()
    return out

def test_what_is_written_when(finished):
    """Pictures come before the first step, every --save-every and at the end; the curve goes upwards."""
    rows = rows_of(finished)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[0].keys() == {"step", "reward_fixed"}
    assert [row["step"] for row in rows if "reward_fixed" in row] == [0, 2, 4, 5]
    paths = sorted((finished / "samples").iterdir())
    assert [path.name for path in paths] == [f"step_{step:05d}.png" for step in (0, 2, 4, 5)]
    assert step_of(finished) == 5
    progress = Image.open(finished / "progress.png")
    w, h = Image.open(paths[0]).size
    assert progress.size == (w, 3 * h)
    for path, y in ((paths[0], 0), (paths[-1], h)):
        assert progress.crop((0, y, w, y + h)).tobytes() == Image.open(path).tobytes()
    rewards = [row["reward"] for row in rows[1:]]
    assert len(set(rewards)) == 5  # luck is new in each step
    for i, y in ((np.argmax(rewards), 6), (np.argmin(rewards), h - 6)):
        red, green, _ = progress.getpixel((min(i * w // 4, w - 1), 2 * h + y))
        assert red > 150 and green < 100

def test_fixed_pictures_have_fixed_prompts_and_seeds(tmp_path):
    """What training draws in between must not show; each has its own target, and its own reward above it."""
    def reds(images, prompts, targets):
        return [target.getpixel((0, 0))[0] for target in targets]

    def save():
        trainer.save_samples(0)
        return (tmp_path / "run/samples/step_00000.png").read_bytes()

    trainer = make_trainer(tmp_path / "run", size=(64, 64))
    trainer.prompts = [f"a {name} thing" for name in grpo.COLORS] + ["a ninth"]
    trainer.targets = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(9)]
    trainer.rewards = {"reds": (reds, 1.0)}
    spy = mock.Mock(side_effect=trainer.wrapper.generate_with_tracking)
    trainer.wrapper.generate_with_tracking = spy
    with mock.patch.object(ImageDraw.ImageDraw, "text") as captions:
        assert trainer.save_samples(0) == 3.5
        plain = save()
    prompts, group_size, seeds = spy.call_args.args
    assert (prompts, group_size, list(seeds)) == (trainer.prompts[:8], 1, list(range(8)))
    texts = [call.args[1] for call in captions.call_args_list[:8]]
    assert texts == [f"{i}.000 {prompt:.16}" for i, prompt in enumerate(prompts)]
    first = save()
    assert first != plain
    trainer.rollout(1)
    assert save() == first

def test_resume_is_bit_for_bit(finished, tmp_path):
    """What is not in the checkpoint (moments, order, random state) would make the second half another one."""
    out = tmp_path / "run"
    make_lucky(out, steps=2).train()
    with open(out / "metrics.jsonl", "a") as file:  # logged after the last checkpoint, the last one torn
        file.write('{"step": 3, "reward": 99.0}\n{"step": 4, "rew')
    resume_lucky(out).train()
    assert_same_run(finished, out)
    with pytest.raises(FileExistsError):
        make_lucky(out).train()  # a new run never writes into an old one
    (out / "samples/step_00000.png").unlink()  # which progress.png shows
    resume_lucky(out, steps=6).train()
    assert step_of(out) == 6

@pytest.mark.parametrize("save_every", [99, 3])
def test_a_reward_that_fails_costs_no_step(tmp_path, save_every):
    """In a rollout, or on the fixed pictures: the steps since the last checkpoint would be lost."""
    trainer = make_lucky(tmp_path / "run", save_every=save_every)

    def fails(images, prompts, targets):
        return 1 / 0 if len(trainer.history) == 4 else luck(images, prompts, targets)

    trainer.rewards = {"luck": (fails, 1.0)}
    with pytest.raises(RuntimeError, match="luck.*ZeroDivisionError"):
        trainer.train()
    assert step_of(tmp_path / "run") == 3

# --- Processes: several GPUs (here of the CPU), signals, kills ----------------------------------------------
SMALL = "--model tiny --size 64 --batch-size 2 --group-size 2 --micro-batch-size 2".split()
ENV = os.environ | {
    "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    "PYTHONWARNINGS": "ignore:resource_tracker"}  # which minds that kill -9 leaves locks behind
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
SERVER = multiprocessing.get_context("forkserver")  # imports all that is slow once, for all its children
SERVER.set_forkserver_preload([__name__, "diffusers.pipelines.glm_image.pipeline_glm_image"])

def child(folder, argv, before, env):
    """The life of a process: grpo.main on the random toy, after `before`. What it prints goes to a file."""
    os.chdir(folder)
    os.environ.update(env)
    log = os.open("log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    grpo.make_tiny_pipeline = QUICK
    before()
    grpo.main(argv)

def start(folder, *argv, before=bool, **env):
    process = SERVER.Process(target=child, args=(folder, argv, before, env), daemon=True)
    with mock.patch.dict(os.environ, ENV):
        process.start()
    return process

def end(process):
    process.join(300)
    return process.exitcode

def run_on_two(folder, *argv, before=bool):
    """Two processes, as torchrun would start them -> their exit codes, and what they have printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = dict(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE="2")
    processes = [start(folder, *argv, before=before, RANK=rank, **env) for rank in "01"]
    return [end(process) for process in processes], (folder / "log").read_text()

@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*argv): `python grpo.py` on the random toy, in tmp_path -> exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "make_tiny_pipeline", QUICK)

    def nobody(number, frame):
        raise AssertionError(f"nobody has waited for signal {number}")

    def run(*argv):
        capsys.readouterr()
        try:
            code = grpo.main(list(argv)) or 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, nobody) for number in numbers}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)

def assert_refused(outcome, word):
    """Exit code 2 and one line that has this word."""
    code, _, error = outcome
    assert code == 2 and error.startswith("grpo.py: error: ") and error.count("\n") == 1, error
    assert word in error

def assert_same_adapters(one, other):
    """Of two runs, to 1e-5."""
    one, other = (load_file(out / "adapter/adapter_model.safetensors") for out in (one, other))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)

def test_two_gpus_do_what_one_does(tmp_path, command):
    """Three steps in one process = two steps in two and, resumed, one in one: all must have crossed over."""
    (tmp_path / "quick.py").write_text("""
import functools, grpo
grpo.make_tiny_pipeline = functools.partial(grpo.make_tiny_pipeline, warmup_steps=0)
color = grpo.reward_color
""")
    flags = "--scale-rewards batch --num-iterations 2 --save-every 2 --lr 1e-3 --kl-coef 0.1"
    argv = [*SMALL, *flags.split(), "--max-grad-norm", "1e-3", "--reward", "quick.py:color"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen([*torchrun, HERE / "grpo.py", *argv, "--out", "two", "--steps", "2"],
                               cwd=tmp_path, env=ENV, **PIPES)
    assert command(*argv, "--out", "one", "--steps", "3")[0] == 0
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert len(re.findall("^step ", out, re.MULTILINE)) == 3  # and not 6
    assert out.count("model: ") == 1
    assert command("--resume", "two", "--steps", "3")[0] == 0
    assert_same_adapters(tmp_path / "one", tmp_path / "two")
    for a, b in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        a = without(a, "reward_std/")  # over the images of one GPU
        assert a == pytest.approx(without(b, "reward_std/"), rel=1e-3, abs=1e-5)

def test_gpus_talk_over_nccl_and_hosts_over_gloo(monkeypatch):
    """NCCL waits for a process that has died; what crosses over first in a step must go over gloo."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    begin = mock.Mock(side_effect=ZeroDivisionError)
    choose = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    monkeypatch.setattr(torch.distributed, "init_process_group", begin)
    with pytest.raises(ZeroDivisionError):
        grpo.main(SMALL)
    begin.assert_called_once_with("cpu:gloo,cuda:nccl")
    choose.assert_called_once_with(1)

def divide_by_zero():
    calls = []

    def fails(images, prompts, targets):
        calls.append(images)
        return [0.5] * len(images) if torch.distributed.get_rank() == 0 or len(calls) < 3 else 1 / 0

    grpo.REWARDS["color"] = fails

def signal_while_they_agree():
    gather = torch.distributed.all_gather_object
    calls = []

    def tell(parts, rows):
        gather(parts, rows)
        calls.append(rows == [0])  # of each step: no signal has come
        if sum(calls) == 3 and calls[-1] and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    torch.distributed.all_gather_object = tell
    if os.environ["RANK"] == "1":
        Path.write_bytes = None  # both in one file, at once

@pytest.mark.parametrize("fault, code, word", [
    (divide_by_zero, 1, "ZeroDivisionError"), (signal_while_they_agree, 143, "stopped after step 2")])
def test_what_happens_to_one_gpu_ends_the_run_on_all(tmp_path, fault, code, word):
    """The others would wait for ever; a reward costs no step, a signal stops all after the same one."""
    codes, log = run_on_two(
        tmp_path, *SMALL, *"--steps 99 --save-every 99 --out run".split(), before=fault)
    assert codes == [code, code] and word in log, log
    assert step_of(tmp_path / "run") == 2
    codes, log = run_on_two(tmp_path, "--resume", "run", "--steps", "4")  # and they go on together
    assert codes == [0, 0], log
    assert step_of(tmp_path / "run") == 4

def test_signals_finish_the_step_and_save(tmp_path, command, monkeypatch):
    """Ctrl-C, or the machine is taken away: no step is lost, and going on gives an undisturbed run."""
    flags = [*SMALL, "--steps", "5", "--save-every", "99"]
    argv = [*flags, "--out", "run"]
    for step, number in ((2, signal.SIGINT), (3, signal.SIGTERM), (4, signal.SIGHUP)):
        waiting = [None] * (2 if step == 2 else 0) + [number]  # neither in step 0 nor in step 1

        def color(images, prompts, targets):
            if waiting and waiting.pop(0):
                os.kill(os.getpid(), number)
            return grpo.reward_color(images, prompts, targets)

        monkeypatch.setitem(grpo.REWARDS, "color", color)
        code, out, _ = command(*argv)
        assert code == 128 + number
        assert f"stopped after step {step}: --resume {tmp_path / 'run'} goes on" in out
        assert step_of(tmp_path / "run") == step
        argv = ["--resume", "run"]
    assert command(*argv)[0] == 0
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup: the user wants it to go on
    waiting.append(signal.SIGHUP)
    assert command(*flags, "--out", "whole")[0] == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")

def press_twice():
    def color(images, prompts, targets):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        return [0.5] * len(images)

    grpo.REWARDS["color"] = color

def wait_in_step_two():
    rollout = grpo.GRPOTrainer.rollout

    def waits(trainer, step):
        if step == 2:
            Path("waiting").touch()
            time.sleep(60)
        return rollout(trainer, step)

    grpo.GRPOTrainer.rollout = waits

def test_a_folder_has_one_run_at_a_time(tmp_path, command, monkeypatch):
    """Of two runs in one folder all but one were lost. A run that was killed must not lock its folder."""
    flags = [*SMALL, "--steps", "3", "--save-every", "1"]
    process = start(tmp_path, *flags, "--out", "run", before=wait_in_step_two)
    while process.is_alive() and not (tmp_path / "waiting").exists():
        time.sleep(0.01)
    before = state_of(tmp_path / "run")
    assert_refused(command("--resume", "run"), "")
    assert process.is_alive() and state_of(tmp_path / "run") == before
    process.kill()
    assert end(process) == -signal.SIGKILL
    assert command("--resume", "run")[0] == 0
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1, 2, 3]
    monkeypatch.setattr(time, "strftime", lambda text: "runs/now")
    codes = [command(*SMALL, "--steps", "1")[0] for _ in range(2)]  # begun in the same second
    assert codes == [0, 2]

def test_a_closed_stdout_loses_no_step(tmp_path, command, monkeypatch):
    """`python grpo.py | head -1` lost all steps since the last save: ten, or hours."""
    class Head(io.StringIO):
        def write(self, text):
            if "step 1 " in self.getvalue():
                raise BrokenPipeError
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Head())
    command(*SMALL, "--steps", "3", "--save-every", "99", "--out", "run")
    assert step_of(tmp_path / "run") == 3

def test_the_second_signal_stops_at_once(tmp_path):
    """A step can take minutes; who presses twice does not want to wait."""
    assert end(start(tmp_path, *SMALL, "--out", "run", before=press_twice)) == -signal.SIGINT
    assert not (tmp_path / "run/checkpoint.pt").exists()

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def fail_in(method, name, when, fail=kill):
    """In the when-th write of a file (half of it is on the disk), or before it gets its name."""
    original = getattr(Path, method)
    calls = []

    def fails(path, value):
        calls.append(name in path.name)
        if sum(calls) < when:
            return original(path, value)
        if method == "write_bytes":
            original(path, value[:len(value) // 2])
        fail()

    setattr(Path, method, fails)

@pytest.mark.parametrize("name", ["checkpoint.pt", "adapter_model", "step_", "progress", "metrics"])
def test_a_full_disk_is_one_line_and_spares_the_old_checkpoint(tmp_path, command, monkeypatch, name):
    """Written in place, the old file would be gone with the new one; safetensors had a traceback."""
    no_space = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_bytes", Path.write_bytes)  # to be put back
        fail_in("write_bytes", name, 3, no_space)
        assert_refused(command(*SMALL, "--steps", "5", "--save-every", "1", "--out", "run"), "No space left")
    assert step_of(tmp_path / "run") == (2 if name == "progress" else 1)  # which step 0 does not write
    assert_whole(tmp_path / "run")
    assert command("--resume", "run", "--steps", "3")[0] == 0  # when there is room again

KILLS = [("write_bytes", "checkpoint.pt"), ("replace", "checkpoint.pt"), ("replace", "progress.png"),
         ("write_bytes", "step_"), ("write_bytes", "metrics.jsonl"),
         ("write_bytes", "adapter_model")]  # of the last step: the checkpoint must not be ahead of it

def faults(folder, kills, steps, say=print):
    """A run is killed again and again (inside a file, or at any moment) and resumed, against a whole one."""
    log = folder / "run/metrics.jsonl"
    flags = [*SMALL, "--steps", str(steps), "--save-every", "1"]
    whole = start(folder, *flags, "--out", "whole")
    for i, kill in enumerate(kills, 1):
        argv = ["--resume", "run"]
        if not (folder / "run/checkpoint.pt").exists():  # nothing to go on with
            shutil.rmtree(folder / "run", ignore_errors=True)
            argv = [*flags, "--out", "run"]
        if isinstance(kill, tuple):
            process = start(folder, *argv, before=functools.partial(fail_in, *kill))
        else:
            written = log.stat().st_mtime_ns if log.exists() else 0
            process = start(folder, *argv)
            while process.is_alive() and not (log.exists() and log.stat().st_mtime_ns > written):
                time.sleep(0.01)
            process.join(kill)
            process.kill()
        assert end(process) == -signal.SIGKILL, (folder / "log").read_text()
        assert_whole(folder / "run")
        saved = step_of(folder / "run") if (folder / "run/checkpoint.pt").exists() else 0
        say(f"kill {i} of {len(kills)}: {kill}; the checkpoint holds step {saved}")
    assert 0 < saved < steps
    assert end(start(folder, "--resume", "run")) == 0
    assert end(whole) == 0
    assert_same_run(folder / "whole", folder / "run")
    say(f"{len(kills)} kills, {steps} steps: every file is that of an undisturbed run")

def test_kill_nine_at_any_moment(tmp_path):
    """Each file could be left torn, or other than the checkpoint has it. The short form of --faults."""
    faults(tmp_path, [(*kill, 2) for kill in KILLS], steps=len(KILLS), say=str)

# --- The command --------------------------------------------------------------------------------------------
@pytest.fixture(scope="session", autouse=True)
def first_command(request, tmp_path_factory):
    """The README's command, its own process, every default: it runs beside all tests, as it takes longest."""
    if not any("run" in item.fixturenames for item in request.session.items):
        yield
        return
    folder = tmp_path_factory.mktemp("first")
    argv = [sys.executable, HERE / "grpo.py", *"--group-size 4 --model tiny --out out".split()]
    with subprocess.Popen(argv, cwd=folder, env=ENV, **PIPES) as process:
        yield process, folder / "out"
        process.kill()

@pytest.fixture(scope="session")
def run(first_command):
    process, out = first_command
    printed, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out, printed

METRICS = """step loss policy_loss reward reward_std reward/color reward_std/color frac_zero_std kl ratio_mean
    ratio_max clip_frac entropy grad_norm skipped sampler_gap lr sec_rollout sec_decode sec_reward sec_update
    tokens_per_sec peak_gib""".split()

def test_what_the_first_command_leaves(run):
    """What the README promises to find in the folder, and what it says to look at."""
    out, printed = run
    pictures = {f"samples/step_{step:05d}.png" for step in (0, 10, 20, 30, 40)}
    adapter = {"adapter/adapter_model.safetensors", "adapter/adapter_config.json"}
    others = {"args.json", "metrics.jsonl", "progress.png", "checkpoint.pt", ".one-run-at-a-time"}
    assert {str(path.relative_to(out)) for path in out.rglob("*.*")} == pictures | adapter | others
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(41))
    for row in rows[1:]:
        assert row.keys() - {"reward_fixed"} == set(METRICS)
        assert all(math.isfinite(value) for value in row.values())
    assert printed.startswith("model: tiny")
    assert f"{out}: pictures, and adapter/ for GlmImageForConditionalGeneration" in printed

def test_it_learns(run):
    """Rewards rise by far more than luck, and every fixed picture gets closer to its colour."""
    out, _ = run
    rewards = [row["reward"] for row in rows_of(out)[1:]]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:5]) > 0.15
    sheets = [Image.open(out / f"samples/step_{step:05d}.png") for step in (0, 40)]
    prompts, _ = grpo.load_prompts(HERE / "prompts.txt")
    gains = []
    for i, prompt in enumerate(prompts[:8]):
        pictures = [sheet.crop((i * 128, 0, i * 128 + 128, 128)) for sheet in sheets]
        before, after = grpo.reward_color(pictures, [prompt] * 2)
        gains.append(float(after - before))
    assert min(gains) > 0 and np.mean(gains) > 0.1

WRONG = """--group-size 1, --group-size four, --size 0, --size -64, --size 64x, --size big, --size 64x128x256,
    --batch-size 0, --micro-batch-size 0, --steps 0, --steps 1.5, --save-every 0, --lora-rank 0, --seed -1,
    --decode-steps 0, --num-iterations 0, --lr nan, --lr -1, --lr inf, --kl-coef -1, --clip-range inf,
    --clip-range-high -1, --max-grad-norm nan, --guidance nan, --top-p 0, --top-p 1.5, --temperature 0,
    --temperature nan, --offload maybe, --scale-rewards std, --importance both, --reward-norm batch,
    --grop-size 4, --group 4, --reward """.split(", ")  # the answer names the flag
BAD = [*((typed.strip(), typed.split()[0]) for typed in WRONG), *[  # what is typed, and a word of the answer
    ("--size 100", "multiples of 32"), ("--prompts missing.txt", "missing.txt"), ("--prompts .", "directory"),
    ("--prompts comments.txt", "no prompt"), ("--prompts latin1.txt", "utf-8"),
    ("--prompts long.txt", "too long"), ("--prompts token.txt", "<image>"),
    ("--prompts other_token.txt", "<|image|>"), ("--prompts lost.txt", "lost.png"),
    ("--prompts text.txt", "image"), ("--reward beauty", "color, mse"),
    ("--reward color=much", "much"), ("--reward color=nan", "nan"), ("--reward color=1,color=2", "twice"),
    ("--reward color,", "unknown"), ("--reward mine.py:sharp,mine.py:sharp=2", "twice"),
    ("--reward nowhere.py:sharp", "nowhere.py"), ("--reward mine.py", "mine.py"), ("--reward mse", "target"),
    ("--reward mine.py:dull", "dull"), ("--model folder", "folder"), ("--model no-such/model", "no-such"),
    ("--resume ", "holds no run"), ("--resume nowhere", "holds no run"),
    ("--resume done --lr 1e-4", "--steps"), ("--resume done --prompts other.txt", "other prompts"),
    ("--out ", "exists"), ("--out done", "--resume"), ("--out comments.txt/run", "comments.txt")]]

@pytest.fixture(scope="module")
def bad_files(finished, tmp_path_factory):
    """All that BAD names, in a folder."""
    folder = tmp_path_factory.mktemp("bad")
    for name in ("folder", "done"):
        (folder / name).mkdir()
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    torch.save(state | {"prompts": ["a red fox"]}, folder / "done/checkpoint.pt")
    args = json.loads((finished / "args.json").read_text()) | {"prompts": str(folder / "good.txt")}
    texts = {
        "comments.txt": "# only\n\n", "long.txt": "red\n" + 2_500 * "very " + "red\n",
        "token.txt": "an <image>\n", "other_token.txt": "<|image|>\n",
        "lost.txt": "a fox\tlost.png\n", "text.txt": "a fox\tcomments.txt\n",
        "good.txt": "a red fox\n", "other.txt": "a blue fox\n", "done/args.json": json.dumps(args),
        "mine.py": "def sharp(images, *_): return [1.0] * len(images)"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin1.txt").write_bytes(b"caf\xe9\n")
    return folder

@pytest.mark.parametrize("typed, word", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(bad_files, command, monkeypatch, typed, word):
    """No traceback, nothing written, no model loaded in vain where that can be known before."""
    monkeypatch.chdir(bad_files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = sorted(bad_files.rglob("*"))
    model = [] if typed.startswith(("--model", "--resume")) else ["--model", "tiny"]
    assert_refused(command(*model, *typed.split(" ")), word)
    assert sorted(bad_files.rglob("*")) == before

@pytest.mark.parametrize("code, cause", [("1 / 0", ZeroDivisionError), ("exit(0)", SystemExit)])
def test_a_broken_file_of_rewards_keeps_its_traceback(command, code, cause):
    """One line would not say where in the user's own code to look; exit(0) would be a run that went well."""
    Path("broken.py").write_text(code)
    with pytest.raises(RuntimeError, match="broken.py") as failed:
        command("--model", "tiny", "--reward", "broken.py:sharp")
    assert isinstance(failed.value.__cause__, cause)

class Bomb:
    """A pickle that makes the file `owned` when it is loaded."""
    def __reduce__(self):
        return Path.touch, (Path("owned"),)

ODD = [  # what is put where
    ("args", {"x": 1}), ("args steps", "ten"), ("args prompts", 7), ("state", None), ("state", [1, 2, 3]),
    ("state history", 7), ("state history", []), ("state history", [{}] * 6), ("state prompts", None),
    ("state adapter", None), ("state adapter", Bomb()),
    ("state adapter model.language_model.layers.0.self_attn.q_proj.lora_A.weight", torch.zeros(1)),
    ("state optimizer", {}), ("state optimizer param_groups", []),
    ("state optimizer state", {0: {"step": 1}}), ("state optimizer state 0 exp_avg", torch.zeros(3)),
    ("state optimizer state 0 exp_avg_sq", torch.zeros(3))]

@pytest.mark.parametrize("place, value", ODD)
def test_an_odd_checkpoint_gets_one_line(bad_files, tmp_path, command, place, value):
    """It gave tracebacks, some after it had been overwritten; one from elsewhere would run its code."""
    files = {"args": json.loads((bad_files / "done/args.json").read_text()),
             "state": torch.load(bad_files / "done/checkpoint.pt", weights_only=True)}
    *keys, last = [int(key) if key.isdigit() else key for key in place.split()]
    functools.reduce(lambda part, key: part[key], keys, files)[last] = value
    (tmp_path / "run").mkdir()
    (tmp_path / "run/args.json").write_text(json.dumps(files["args"]))
    checkpoint = tmp_path / "run/checkpoint.pt"
    torch.save(files["state"], checkpoint)
    before = sorted(tmp_path.rglob("*")), checkpoint.read_bytes()
    typed = [] if place == "args steps" else ["--steps", "6"]
    assert_refused(command("--resume", "run", *typed), "")
    assert (sorted(tmp_path.rglob("*")), checkpoint.read_bytes()) == before

def test_moved_things_are_found(bad_files, tmp_path, command, monkeypatch):
    """Resumed elsewhere, relative paths led nowhere; and the same lines in another file were refused."""
    models = []
    monkeypatch.setattr(diffusers.GlmImagePipeline, "from_pretrained",
                        lambda path, **_: models.append(path) or QUICK(0))
    for name in ("mine", "elsewhere", "yours"):
        (tmp_path / name).mkdir()
    shutil.copy(bad_files / "mine.py", "mine.py")
    shutil.copy(bad_files / "good.txt", "good.txt")
    files = "--model mine --prompts good.txt --reward color=0.5,mine.py:sharp"
    assert command(*SMALL, *files.split(), "--steps", "1", "--out", "run")[0] == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command("--resume", "../run", "--steps", "2")[0] == 0
    (tmp_path / "good.txt").rename("better.txt")
    moved = "--prompts better.txt --model ../yours --steps 3"
    assert command("--resume", "../run", *moved.split())[0] == 0
    assert [Path(model) for model in models] == [tmp_path / "mine"] * 2 + [tmp_path / "yours"]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [0, 1, 2, 3]

def test_the_toy_runs_on_one_thread(command, monkeypatch):
    """Two wait for each other on a busy machine: half a minute took hours. Who sets them has them."""
    monkeypatch.setattr(torch, "set_num_threads", mock.Mock())
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert command(*SMALL, "--steps", "1", "--out", "set")[0] == 0
    assert not torch.set_num_threads.called
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert command(*SMALL, "--steps", "1", "--out", "free")[0] == 0
    torch.set_num_threads.assert_called_once_with(1)

def test_help_shows_every_flag(command):
    """Made from the comments of Config, in which a % or a missing word would break it."""
    code, out, _ = command("--help")
    assert code == 0
    assert set(re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)) == {flag_of(field) for field in FIELDS}

def test_settings_reach_the_wrapper(command, monkeypatch):
    """And so does what is not given: the toy's defaults where GLM-Image has no room, else its own."""
    spy = mock.Mock(side_effect=ValueError)
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", spy)
    command(*"--top-p 0.5 --temperature 0.7 --guidance 2 --size 64x96 --decode-steps 3 --offload on".split())
    monkeypatch.setattr(grpo, "free_gib", lambda: 80)
    command("--group-size", "6")
    typed = dict(top_p=0.5, temperature=0.7, guidance=2.0, size=(64, 96), decode_steps=3, offload="on")
    toy = grpo.Config(**grpo.TINY | typed)
    assert spy.call_args_list == [
        mock.call("tiny", toy), mock.call("zai-org/GLM-Image", grpo.Config(group_size=6))]
    wrapper = grpo.GLMImageWrapper(QUICK(0), toy)
    assert (wrapper.top_p, wrapper.temperature, wrapper.height, wrapper.width) == (0.5, 0.7, 96, 64)

# --- The painter: flow.py of the README ---------------------------------------------------------------------
warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)  # of @pytest.mark.readme
FROM_README = [pytest.param("README.md", marks=pytest.mark.readme)]  # for a fixture: marks what uses it
PAINT = dict(kl_coef=0.0, decode_steps=8)
WRAPPER = grpo.GLMImageWrapper

@pytest.fixture(scope="module", params=FROM_README)
def flow(tmp_path_factory):
    """flow.py as the README's own command writes it."""
    path = tmp_path_factory.mktemp("flow") / "flow.py"
    line, = re.findall(r"^sed .* > flow.py$", README, re.MULTILINE)
    subprocess.run(line.replace("> flow.py", f"> {path}"), shell=True, check=True, cwd=HERE)
    assert path.read_text() == readme_code("flow.py")
    return load_module(readme_code("flow.py"), "flow")

def shift_sigmas(pipe):
    """A schedule that depends on the size of the image, as GLM-Image's does and the toy's does not."""
    pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, time_shift_type="linear", base_shift=0.25, max_shift=0.75)

def make_painter(flow, **settings):
    """The painter of the random toy, with the scale of latents and the sigmas that GLM-Image may have."""
    wrapper = make_wrapper(**{**PAINT, **settings})
    wrapper.pipe.vae.register_to_config(latents_mean=[0.5] * 16, latents_std=[2.0] * 16)  # the toy's: 0 and 1
    shift_sigmas(wrapper.pipe)
    return flow.Painter(wrapper)

def make_painting(flow, out, **settings):
    """A trainer whose policy is the painter of the random toy; its adapters do something."""
    settings = {**PAINT, "out": str(out), "max_grad_norm": 1e9, "size": (64, 64), **settings}
    painter = flow.Painter(make_wrapper(**settings))
    trainer = grpo.GRPOTrainer(painter.config, painter, ["a red fox", 'green "words"'])
    perturb(trainer.lora)
    return trainer

@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_painter_at_level_0_is_the_stock_pipeline(flow, monkeypatch, guidance):
    """Other sigmas, times, conditions or noise than the pipeline's would train what nobody uses."""
    painter = make_painter(flow, guidance=guidance)
    prompts = ['a red fox that says "STOP HERE"', "yellow"]
    drawn, _, _ = painter.ar.sample(prompts, 1, [1, 2])
    stock = QUICK(0)
    del stock.transformer.forward
    shift_sigmas(stock)
    noisy, _, _ = painter.sample(prompts, 2, [1, 2])
    monkeypatch.setattr(flow, "NOISE_LEVEL", 1e-7)
    quiet, _, _ = painter.sample(prompts, 2, [1, 2])
    for i in range(4):
        codes = stock._upsample_token_ids(drawn[i // 2, 2:], 4, 2)
        expected = stock(
            prompts[i // 2], prior_token_ids=codes, height=128, width=64, num_inference_steps=8,
            generator=torch.Generator().manual_seed(1 + i // 2), guidance_scale=guidance,
            output_type="latent").images
        assert (quiet[i, -1] - expected).abs().max() < 1e-5
        assert (noisy[i, -1] - expected).abs().max() > 0.1
    pictures = grpo.pil_to_tensor(painter.decode(prompts, quiet, [1, 2]))
    kept = grpo.pil_to_tensor(painter.generate_with_tracking(prompts, 1, [1, 2])[0])
    assert (pictures[::2] - kept).abs().max() < 1.5 / 255

@pytest.mark.parametrize("sigma", [0.9, 0.5, 0.1])
def test_noise_and_drift_make_up_for_each_other(flow, sigma):
    """A wrong sign or factor lets latents leave the distribution that the DiT knows. Of one image, 3, all is
    known: latents at sigma are 3 (1 - sigma) + sigma noise, the velocity is noise - 3."""
    next_sigma = sigma - 1e-4
    noise = torch.tensor([0.0, 1.0], dtype=torch.float64)
    mean, std = flow.denoise(3 * (1 - sigma) + sigma * noise, noise - 3, sigma, next_sigma, 0.7)
    assert mean[0].item() == pytest.approx(3 * (1 - next_sigma), abs=1e-12)
    variance = (mean[1] - mean[0]).item() ** 2 + std**2
    assert variance == pytest.approx(next_sigma**2, abs=1e-6)
    assert std**2 > 1e-6  # or there is no noise to make up for

def test_what_a_group_of_paintings_shares(flow):
    """Rewards must differ by the painting alone; all comes from the seed of the group, not from its batch."""
    painter = make_painter(flow)
    path, logprobs, given = painter.sample(["red", "a blue thing", "red"], 3, [1, 2, 3])
    assert path.shape == (9, 4, 16, 16, 8) and logprobs.shape == (9, 2) and given.shape == (9, 1 + 32)
    for group, codes in zip(path.split(3), given.split(3)):
        assert torch.equal(codes[0], codes[1]) and torch.allclose(group[0, 0], group[1, 0], atol=1e-5)
        assert (group[0, 1] - group[1, 1]).abs().mean() > 0.1
    starts = [painter.sample(["red"], 1, [seed])[2][0, 0].item() for seed in range(12)]
    assert set(starts) == {0, 1, 2}  # the window lies in the first half of 8 steps
    alone = painter.sample(["red"], 3, [3])
    for one, other in zip(alone, (path, logprobs, given)):
        assert torch.allclose(one, other[6:], atol=1e-5)

def test_painter_works_where_its_weights_are(flow, monkeypatch):
    """Weights are NaN but in their own phase, and must not show in latents, pictures or log-probs."""
    results = []
    for offload in ("off", "on"):
        painter = make_painter(flow, offload=offload, guidance=1.5)
        moves = hide_weights(painter.ar, monkeypatch) if offload == "on" else []
        samples = painter.sample(PROMPTS, 2, [1, 2])
        images = painter.decode(PROMPTS, samples[0], [1, 2])
        with painter.policy_on_device(), torch.no_grad():
            logprobs, _ = painter.compute_logprobs(PROMPTS[:1], samples[0][:1], samples[2][:1])
        results.append([*samples, grpo.pil_to_tensor(images), logprobs])
    assert moves == ["ar", "dit", "dit", "dit"]
    assert all(torch.equal(off, on) for off, on in zip(*results))

@pytest.mark.parametrize("guidance", [1.0, 1.5])
def test_painter_and_trainer_agree_exactly(flow, tmp_path, guidance):
    """The same steps, scored by another pass, schedule or level, would start off ratio 1."""
    trainer = make_painting(flow, tmp_path, lr=0.01, guidance=guidance, num_iterations=2)
    rollout = make_rollout(trainer)
    assert rollout["logprobs"].std() > 0 and rollout["logprobs"].abs().max() < 5  # a mean of pixels
    metrics = trainer.train_step(rollout)
    assert metrics["sampler_gap"] == 0 and metrics["ratio_max"] > 1 + 1e-6
    trainer.config.num_iterations = 1
    metrics = trainer.train_step(make_rollout(trainer, step=2))
    assert metrics["ratio_max"] == metrics["ratio_mean"] == 1
    assert metrics["sampler_gap"] == 0 and metrics["grad_norm"] > 0

def test_gradient_of_the_painter(flow, tmp_path):
    """It must not depend on the micro-batch, and must reach all of the DiT's adapter, and nothing else."""
    trainer = make_painting(flow, tmp_path)
    painter = trainer.wrapper
    rollout = make_rollout(trainer)
    gradients = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer))
    for size in (1, 2, 4):
        trainer.config.micro_batch_size = size
        trainer.train_step(rollout)
    for other in gradients[1:]:
        assert (other - gradients[0]).abs().max() < 1e-4 * gradients[0].abs().max()
    names = [f"transformer_blocks.0.attn1.{name}.lora_{AB}.weight"
             for name in ("to_q", "to_k", "to_v", "to_out.0") for AB in "AB"]
    assert painter.policy is painter.pipe.transformer and list(trainer.lora.weights) == names
    parts = gradients[0].split([weight.numel() for weight in trainer.lora.weights.values()])
    assert all(part.any() for part in parts)
    for part in (painter.pipe.vision_language_encoder, painter.ar.dit_half):
        assert all(weight.grad is None for weight in part.parameters())

def test_adapters_of_both_halves_elsewhere(flow, tmp_path, monkeypatch):
    """The README's way into the stock pipeline must give the painter that was trained, and draw."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    trainer = make_painting(flow, "run")
    trainer.lora.save(Path("glm-painter"), "toy")
    ar = trainer.wrapper.ar
    ar.policy.generation_config.suppress_tokens = list(range(8, 18))  # draw codes alone
    ar.pipe.save_pretrained("toy")
    grpo.LoRA(ar.policy, ar.TARGETS, rank=4).save(Path("glm-ar"), "toy")
    torch.manual_seed(0)
    inputs = (torch.randn(1, 16, 8, 8), torch.randn(1, 1, 32), torch.arange(16)[None] % 8,
              torch.zeros(1, 16).bool(), torch.tensor([999.0]), torch.full((1, 2), 64.0), torch.zeros(1, 2))
    elsewhere = run_use("paint.py").pipe.transformer
    with torch.no_grad():
        trained, loaded = (transformer(*inputs).sample for transformer in (ar.pipe.transformer, elsewhere))
        with trainer.lora.disabled():
            base = ar.pipe.transformer(*inputs).sample
    assert (loaded - trained).abs().max() < 1e-5
    assert (base - trained).abs().max() > 0.01
    assert Image.open("fox.png").size == (64, 64)

def test_painter_begins_with_the_adapter_of_the_other_half(flow, tmp_path, monkeypatch):
    """Both in turn: were it not loaded, the painter would be trained on drawings of the base model."""
    pytest.importorskip("peft")
    monkeypatch.setattr(grpo, "make_tiny_pipeline", QUICK)
    wrapper, lora = make_adapted()
    lora.save(tmp_path, "tiny")
    monkeypatch.setattr(flow, "AR_ADAPTER", str(tmp_path))
    painter = flow.Painter.from_pretrained("tiny", make_config(**PAINT))
    drawn, logprobs, _ = painter.ar.sample(PROMPTS, 3, [1, 2])
    expected = wrapper.sample(PROMPTS, 3, [1, 2])
    assert torch.equal(drawn, expected[0]) and torch.allclose(logprobs, expected[1], atol=1e-5)
    assert not torch.equal(drawn, make_wrapper().sample(PROMPTS, 3, [1, 2])[0])

@pytest.mark.parametrize("typed, word", [
    ("--kl-coef 0.01", "--kl-coef"), ("--micro-batch-size 4 --group-size 6", "--micro-batch-size"),
    ("--decode-steps 1", "--decode-steps")])
def test_settings_that_the_painter_refuses(flow, command, monkeypatch, typed, word):
    """A KL that does nothing, two prompts of different length in one pass, steps that are not there."""
    monkeypatch.setattr(grpo, "GLMImageWrapper", flow.Painter)
    flags = "--model tiny --size 64 --kl-coef 0 --decode-steps 4"
    assert_refused(command(*flags.split(), *typed.split()), word)

def become_a_painter():
    """What `python flow.py` does before grpo.main."""
    grpo.GLMImageWrapper = load_module(readme_code("flow.py"), "flow").Painter

def test_painter_in_two_processes_and_resumed(flow, tmp_path, command, monkeypatch):
    """`python flow.py` is the same after a stop: all chance is in the seeds, all state is saved."""
    argv = [*SMALL, *"--decode-steps 6 --kl-coef 0 --lr 1e-2 --num-iterations 2 --save-every 1".split()]
    argv += ["--prompts", "p.txt"]
    Path("p.txt").write_text("a red fox\ngreen\n")
    codes, log = run_on_two(tmp_path, *argv, "--steps", "2", "--out", "run", before=become_a_painter)
    assert codes == [0, 0], log

    def run_flow(*argv):
        monkeypatch.setattr(sys, "argv", ["flow.py", *argv])
        monkeypatch.setattr(grpo, "GLMImageWrapper", WRAPPER)  # a new process has it
        exec(readme_code("flow.py"), {"__name__": "__main__"})

    run_flow(*argv, "--steps", "2", "--out", "one")
    run_flow(*argv, "--steps", "1", "--out", "half")
    run_flow("--resume", "half", "--steps", "2")
    assert_same_run(tmp_path / "one", tmp_path / "half")
    assert_same_adapters(tmp_path / "one", tmp_path / "run")
    adapter = load_file(tmp_path / "one/adapter/adapter_model.safetensors")
    assert all("attn1" in name and weight.any() for name, weight in adapter.items())

def test_painter_learns(flow, tmp_path):
    """A sign that is wrong in the log-prob or the step would make the pictures darker."""
    config = make_config(kl_coef=0.0, decode_steps=4, out=str(tmp_path / "run"), steps=15, size=(64, 64),
                         group_size=8, batch_size=1, micro_batch_size=8, lr=0.02)
    painter = flow.Painter(grpo.GLMImageWrapper(make_tiny_pipeline(0, warmup_steps=30), config))
    rewards = {"bright": (lambda images, *_: [np.mean(image) / 255 for image in images], 1.0)}
    grpo.GRPOTrainer(config, painter, ["a red fox"], rewards).train()
    before, *_, after = [row["reward_fixed"] for row in rows_of(tmp_path / "run") if "reward_fixed" in row]
    assert after - before > 0.1

# --- The README: its code is run as it stands, and what it says about grpo.py is true -----------------------
README = (HERE / "README.md").read_text()
FIELDS = dataclasses.fields(grpo.Config)
PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]

def flag_of(field):
    return "--" + field.name.replace("_", "-")

def readme_code(name):
    """The block of code whose first line is `# name`."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n"))

def load_module(code, name):
    """-> a module of this code, which knows where grpo.py is."""
    module = types.ModuleType(name)
    module.__file__ = str(HERE / "grpo.py")
    sys.modules[name] = module  # where dataclasses look for what annotations mean
    exec(code, module.__dict__)
    return module

def run_use(name):
    """The block of the README for the stock pipeline, on the toy in this folder -> the module."""
    code = re.sub(r"runs/[\w-]+/adapter", lambda path: path[0].split("/")[1], readme_code(name))
    words = {"zai-org/GLM-Image": "toy", "bfloat16": "float32", "512": "64", '.to("cuda")': ""}
    for old, new in words.items():
        code = code.replace(old, new)
    return load_module(code, name)

@pytest.fixture(scope="module", params=FROM_README)
def gallery():
    """my_rewards.py of the README."""
    return load_module(readme_code("my_rewards.py"), "my_rewards")

def test_clip_and_aesthetic_by_hand(gallery, monkeypatch, tmp_path):
    """A softmax, a logit scale, another prompt's padding, or layers in another order would show."""
    torch.manual_seed(0)
    half = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.CLIPConfig(
        text_config=dict(half, vocab_size=99, bos_token_id=0, eos_token_id=1, pad_token_id=1),
        vision_config=dict(half, image_size=32, patch_size=16), projection_dim=16)
    letters = [c + end for c in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    words = {word: i for i, word in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.CLIPProcessor(images, transformers.CLIPTokenizer(vocab=words, merges=[]))
    model = transformers.CLIPModel(config).eval().requires_grad_(False)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    head = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1)).requires_grad_(False)
    torch.save({f"layers.{key}": value for key, value in head.state_dict().items()}, tmp_path / "head.pth")
    monkeypatch.setattr(gallery, "CLIP", str(tmp_path))
    monkeypatch.setattr(gallery, "HEAD", str(tmp_path / "head.pth"))
    prompts = ["a red fox on a long long wall", "blue"]
    cosines = gallery.clip(PAIR, prompts)
    marks = gallery.aesthetic(PAIR, prompts)
    for i, (image, prompt) in enumerate(zip(PAIR, prompts)):
        a = model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output[0]
        b = model.get_text_features(**processor(text=prompt, return_tensors="pt")).pooler_output[0]
        assert float(cosines[i]) == pytest.approx(F.cosine_similarity(a, b, dim=0).item(), abs=1e-5)
        assert float(marks[i]) == pytest.approx(head(a / a.norm()).item(), abs=1e-5)

READ = [  # prompt, what is read in the picture, score
    ('a sign "OPEN"', "OPEN", 1), ('a sign "OPEN"', " o P\nEN ", 1), ('a sign "OPEN"', "", 0),
    ('a sign "OPEN"', "OPEM", 3 / 4), ('a sign "OPEN"', "PEN", 3 / 4), ('a sign "OPEN"', "OPENS", 4 / 5),
    ('a sign "OPEN"', "CLOSED", 1 - 4 / 6), ('"one" and "two"', "one two", 1), ('"one", "two"', "one", 3 / 6),
    ("it says “stop”", "Stop", 1), ("招牌「你好世界」", "你 好", 2 / 4), ('a "café"', "cafe\u0301", 1),
    ("nothing to draw", "whatever", None)]

@pytest.mark.parametrize("prompt, text, score", READ)
def test_ocr_scores_what_is_read(gallery, monkeypatch, prompt, text, score):
    """Case, white space and Unicode forms must not count; words that miss, are too many or misplaced must."""
    reader = mock.MagicMock(chat_template=None)
    reader.return_value.__getitem__.return_value = torch.zeros(1, 3)
    reader.generate.return_value = torch.arange(9)[None]
    reader.decode.return_value = text
    monkeypatch.setattr(gallery, "load", lambda kind, path: (reader, reader))
    assert gallery.ocr(PAIR[:1], [prompt]) == [score if score is None else pytest.approx(score)]
    if score is not None:
        assert reader.decode.call_args.args[0].tolist() == [3, 4, 5, 6, 7, 8]  # without the question

def test_ssim_lpips_and_jpeg_by_hand(gallery, monkeypatch):
    """SSIM window by window; LPIPS with a stand-in for its package, and without it a word what to install."""
    rng = np.random.default_rng(0)
    arrays = rng.integers(0, 255, (2, 20, 24, 3), np.uint8)
    image, target = map(Image.fromarray, arrays)
    bell = np.exp(-(np.arange(11) - 5) ** 2 / 4.5)
    weights = np.outer(bell, bell) / bell.sum() ** 2
    x, y = np.lib.stride_tricks.sliding_window_view(arrays / 255, (11, 11), axis=(1, 2))
    mx, my, xx, yy, xy = ((weights * z).sum(axis=(3, 4)) for z in (x, y, x * x, y * y, x * y))
    slow = (2 * mx * my + 1e-4) * (2 * (xy - mx * my) + 9e-4)
    slow /= (mx**2 + my**2 + 1e-4) * (xx - mx**2 + yy - my**2 + 9e-4)
    assert gallery.ssim([target, image], ["", ""], [target] * 2) == pytest.approx([1, slow.mean()], abs=1e-5)
    assert gallery.ssim([target], [""], [target.resize((48, 40))])[0] > 0.5
    flat, noisy = gallery.jpeg([PAIR[0], image], ["", ""])
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    assert noisy == pytest.approx(1 - file.tell() / (3 * 20 * 24)) and noisy < flat < 1

    def distance(x, y, normalize):
        assert normalize and x.shape == y.shape and x.max() <= 1
        return (x - y).abs().mean()

    black = Image.new("RGB", (8, 8))
    white = Image.new("RGB", (30, 20), "white")
    with mock.patch.object(gallery, "load_lpips", lambda: distance):
        assert gallery.lpips([black, white], ["", ""], [white, white]) == [-1, 0]
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(ImportError, match="pip install lpips"):
        gallery.lpips([black], [""], [white])

@pytest.mark.readme
def test_the_judge_of_the_readme_asks_and_reads(monkeypatch):
    """The picture and the prompt must arrive; no number in the answer is no opinion."""
    asked = []

    def answer(request, timeout):
        asked.append(json.loads(request.data)["messages"][0]["content"])
        assert request.full_url == "http://judge/v1/chat/completions"
        text = ["8", "I'd say 6.5 of 10", "No idea."][len(asked) - 1]
        return io.StringIO(json.dumps({"choices": [{"message": {"content": text}}]}))

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.setenv("JUDGE_URL", "http://judge")
    monkeypatch.setenv("JUDGE_MODEL", "any")
    judge = load_module(readme_code("judge.py"), "judge").judge
    assert judge([*PAIR, PAIR[0]], ["a fox", "an owl", "x"]) == [8.0, 6.5, None]
    text, picture = asked[1]
    assert "an owl" in text["text"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")

@pytest.mark.readme
def test_use_and_merge_of_the_readme(tmp_path, monkeypatch, sampled):
    """Both ways into the stock pipeline must give the policy that was trained, not the base, and draw."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    trained, lora = make_adapted()
    trained.policy.generation_config.suppress_tokens = list(range(8, 18))  # as if trained to draw codes alone
    trained.pipe.save_pretrained("toy")
    lora.save(Path("glm-image"), "toy")
    expected = score(trained, sampled)
    assert (sampled[2] - expected).abs().max() > 0.01  # as the base model says
    run_use("merge.py")
    merged = grpo.GLMImageWrapper.from_pretrained("my-glm-image", make_config())
    for wrapper in (merged, grpo.GLMImageWrapper(run_use("use.py").pipe, make_config())):
        wrapper.pipe.processor._get_target_shape = trained.pipe.processor._get_target_shape  # is not saved
        assert (score(wrapper, sampled) - expected).abs().max() < 1e-5
    assert Image.open("fox.png").size == (64, 64)

@pytest.mark.readme
def test_the_step_by_hand_of_the_readme(monkeypatch):
    """It must meet the sampler's log-probs, and move the adapters with a loss of 0."""
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", lambda path, config: make_wrapper())
    step = load_module(readme_code("step.py"), "step")
    assert (step.new - step.logprobs).abs().max() < 1e-5
    assert abs(step.loss.item()) < 1e-6
    assert any(weight.any() for name, weight in step.lora.weights.items() if "lora_B" in name)

@pytest.mark.readme
def test_tensorboard_code_of_the_readme(finished, tmp_path, monkeypatch):
    """Every metric and every picture, at its own step; `reward_fixed` is not in every row."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["board.py", str(out)])
    load_module(readme_code("board.py"), "board")
    board = events.EventAccumulator(str(out / "tensorboard")).Reload()
    rows = rows_of(out)[1:]
    rewards = [event.value for event in board.Scalars("reward")]
    assert rewards == pytest.approx([row["reward"] for row in rows])
    assert rows[0].keys() - {"step"} <= set(board.Tags()["scalars"])
    for events in (board.Scalars("reward_fixed"), board.Images("samples")):
        assert [event.step for event in events] == [0, 2, 4, 5]

@pytest.mark.readme
def test_targets_of_the_readme(tmp_path, command):
    """The file that it writes must be one that --prompts reads, with targets for `mse`."""
    load_module(readme_code("targets.py"), "targets")
    prompts, targets = grpo.load_prompts("targets.txt")
    assert len(prompts) == 8 and prompts[0] == "a red thing"
    assert [targets[0].getpixel(at) for at in ((0, 0), (0, 127))] == [(255, 255, 255), (255, 0, 0)]
    flags = "--size 128 --steps 1 --reward mse --prompts targets.txt --out run"
    assert command(*SMALL, *flags.split())[0] == 0
    assert -1 < rows_of(tmp_path / "run")[1]["reward/mse"] < 0

@pytest.mark.readme
def test_own_reward_and_notebook_of_the_readme(tmp_path, command, monkeypatch):
    """What a user copies first must run, and count as much as its weight says."""
    Path("sharp.py").write_text(readme_code("sharp.py"))
    assert command(*SMALL, "--steps", "1", "--out", "run", "--reward", "color=1,sharp.py:sharpness=2")[0] == 0
    row = rows_of(tmp_path / "run")[1]
    assert 0 < row["reward/sharp.py:sharpness"] < 1
    assert row["reward"] == pytest.approx(row["reward/color"] + 2 * row["reward/sharp.py:sharpness"])
    monkeypatch.syspath_prepend(tmp_path)
    load_module(readme_code("notebook.py").replace("steps=20", "steps=1"), "notebook")
    assert "reward/sharp" in rows_of(tmp_path / "runs/mine")[1]

@pytest.mark.readme
def test_changes_of_the_readme(tmp_path):
    """All diffs are made at once: it still trains, and on policy the gradient is still that of REINFORCE."""
    code = (HERE / "grpo.py").read_text()
    for diff in re.findall(r"```diff\n(.*?)```", README, re.DOTALL):
        old, new = (re.sub(rf"^[{sign}].*\n|^.", "", diff, flags=re.MULTILINE) for sign in "+-")
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    changed = load_module(code, "changed")
    logprobs = torch.zeros(2, 5, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0])
    changed.compute_grpo_loss(logprobs, logprobs, advantages)[0].backward()
    assert torch.allclose(logprobs.grad, -advantages[:, None].expand(2, 5) / 10)
    settings = dict(steps=1, size=(64, 64), batch_size=2, out=str(tmp_path / "run"))
    config = changed.Config(**grpo.TINY | settings)
    changed.GRPOTrainer(config, grpo.GLMImageWrapper(QUICK(0), config), ["a red fox", "green"]).train()
    assert len(rows_of(tmp_path / "run")) == 2

@pytest.mark.readme
def test_readme_tells_all_flags_and_their_defaults():
    """A row a flag, with the defaults of toy and GLM-Image, `2e-3 / 5e-5`; and none that is gone."""
    rows = re.findall(r"^\| `(--.*?)` \| (.*?) ?\|", README, re.MULTILINE)
    fields = {flag_of(field): field for field in FIELDS}
    assert sorted(flag for flag, _ in rows) == sorted(fields)
    others = "--help --bench --memory --faults --ablate --nproc-per-node --nnodes --rdzv-endpoint"
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", README)) <= {*fields, *others.split()}
    for flag in fields.keys() - {"--model", "--resume", "--out"}:  # these are told in words
        field = fields[flag]
        told = dict(rows)[flag].replace("`", "")
        values = (told.split(" / ") * 2)[:2]
        for value, default in zip(values, (grpo.TINY.get(field.name, field.default), field.default)):
            if default is None:
                assert told.startswith(("the model's own", "as --clip-range")), flag
            elif isinstance(default, str):
                assert value == Path(default).name, flag
            else:
                assert typing.get_type_hints(grpo.Config)[field.name](value) == default, flag

@pytest.mark.readme
def test_links_and_numbers_of_the_readme():
    """Line links go stale with the first line that is added above them; so does the number of lines."""
    lines = (HERE / "grpo.py").read_text().splitlines()
    links = re.findall(r"\[`([\w.]+)`\]\(grpo\.py#L(\d+)\)", README)
    assert len(links) == README.count("grpo.py#L") > 0
    for name, number in links:
        last = name.split(".")[-1]
        assert re.match(rf"\s*(def|class) {last}\b", lines[int(number) - 1]), f"{name} is not there"
    headings = re.findall(r"^#+ (.*)", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (HERE / path).exists(), path
    assert f"{len(lines)} lines" in README

# --- The benchmark: `python test_grpo.py --bench`, with the flags of grpo.py. Nothing here is a test. -------
def clock(function, *args):
    """-> (seconds, what it returned); a GPU is waited for."""
    start = time.perf_counter()
    result = function(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result

def stock_seconds(wrapper, prompt, tokens):
    """An image the usual way: the pipeline samples and decodes it alone, then a pass of its own scores it. On
    a GPU 16 and 48 tokens are sampled for real, and the seconds of the others extrapolated."""
    generate = wrapper.policy.generate
    unspent = [0.0]

    def sample_some(**inputs):
        inputs["suppress_tokens"] = list(range(wrapper.codebook_size, wrapper.policy.lm_head.out_features))
        if wrapper.device.type == "cpu":
            return generate(**inputs)
        short, long = (clock(lambda: generate(**inputs | {"max_new_tokens": n}))[0] for n in (16, 48))
        unspent[0] = (long - short) / 32 * tokens.shape[1] - short - long
        drawn = tokens.to(wrapper.device)
        return torch.cat([inputs["input_ids"], drawn, drawn[:, :1]], dim=1)

    sample = functools.partial(
        wrapper.pipe.generate_prior_tokens, prompt, wrapper.height, wrapper.width, device=wrapper.device)
    with mock.patch.object(wrapper.policy, "generate", sample_some):
        with grpo.on_device(wrapper.policy, wrapper.device):  # `generate` asks the vision tower
            sampled, _ = clock(sample)
    decoded, _ = clock(wrapper.decode, [prompt], tokens, [0])
    with wrapper.policy_on_device(), torch.no_grad():
        scored, _ = clock(wrapper.compute_logprobs, [prompt], tokens)
    return sampled + unspent[0] + decoded + scored

def our_seconds(trainer, prompt, group_size):
    """One step on one prompt -> seconds of sample, decode, score and update, and the tokens."""
    prompts = [prompt] * group_size
    sample, (tokens, logprobs, allowed) = clock(trainer.wrapper.sample, [prompt], group_size, [0])
    decode, images = clock(lambda: list(trainer.wrapper.decode([prompt], tokens, [0])))
    score, (rewards, _) = clock(grpo.compute_rewards, images, prompts, [None] * group_size, trainer.rewards)
    advantages = grpo.compute_advantages(rewards, group_size) if group_size > 1 else torch.zeros(1)
    rollout = dict(prompts=prompts, tokens=tokens, logprobs=logprobs, allowed=allowed, advantages=advantages)
    with trainer.wrapper.policy_on_device():
        update, _ = clock(trainer.train_step, rollout)
    return (sample, decode, score, update), tokens

def gib(*modules):
    return sum(weight.nbytes for module in modules for weight in module.parameters()) / 2**30

def least_seconds(wrapper):
    """Of a token: the weights read once, at the speed of a copy measured here."""
    source = torch.empty(2**30, dtype=torch.uint8, device=wrapper.device)
    target = torch.empty_like(source)
    seconds = min(clock(target.copy_, source)[0] for _ in range(5))
    language_model = wrapper.policy.model.language_model
    return gib(language_model.layers, language_model.norm, wrapper.policy.lm_head) * seconds / 2

def bench(argv):
    """One table. Every ratio is of two medians measured in turn in this run."""
    cuda = torch.cuda.is_available()
    prompt = "a red fox"
    config = grpo.parse_args(["--micro-batch-size", "1" if cuda else "8", *argv])
    with mock.patch.object(grpo, "make_tiny_pipeline", QUICK):
        if config.model == "random":
            device = "cuda" if cuda else "cpu"
            wrapper = grpo.GLMImageWrapper(make_real(device), config, device)
        else:
            wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    trainer = grpo.GRPOTrainer(config, wrapper, [prompt])
    repeats = 3 if cuda else 9
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    print(f"{config.model}, {wrapper.width} x {wrapper.height}, {config.decode_steps} decode steps, "
          f"{config.micro_batch_size} images at a time, offload {config.offload}, {where}, one prompt, "
          f"medians of {repeats}, seconds")
    print("group   stock rollout  ours  ratio | sample  decode  score  update |  step  to group 1 | tokens/s"
          + "  of floor  peak GiB" * cuda)
    floor = least_seconds(wrapper) if cuda else 0
    first = None
    for group_size in (1, 4, 8, 16):
        _, tokens = our_seconds(trainer, prompt, group_size)  # warm-up
        phases = []
        stocks = []
        peaks = []
        for _ in range(repeats):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            phases.append(our_seconds(trainer, prompt, group_size)[0])
            peaks.append(torch.cuda.max_memory_allocated() / 2**30)
            images = 1 if cuda else group_size
            seconds = [stock_seconds(wrapper, prompt, tokens[:1]) for _ in range(images)]
            stocks.append(statistics.mean(seconds) * group_size)
        sample, decode, score, update = (statistics.median(column) for column in zip(*phases))
        stock = statistics.median(stocks)
        ours = sample + decode
        step = ours + score + update
        first = first or step
        print(f"{group_size:5d} {stock:15.3f} {ours:5.3f} {stock / ours:5.1f}x | {sample:6.3f} {decode:7.3f} "
              f"{score:6.3f} {update:7.3f} | {step:.3f} {step / first:10.2f}x "
              f"| {tokens.numel() / sample:8.0f}"
              + f" {floor / (sample / tokens.shape[1]):9.0%} {max(peaks):9.1f}" * cuda)
    if not cuda:
        pipe = make_real("meta")
        ar = pipe.vision_language_encoder
        print(f"GLM-Image's weights, counted: {gib(ar.model.language_model, ar.lm_head):.1f} GiB to sample, "
              f"{gib(pipe.text_encoder, pipe.transformer, pipe.vae):.1f} to decode, "
              f"{gib(ar.model.visual, ar.model.vqmodel):.1f} always on the CPU. No GPU was measured.")

# --- The memory of a GPU, counted without one: `python test_grpo.py --memory`. Nothing here is a test. ------
MEMORY = [  # size, prompts, group, micro-batch
    (512, 1, 4, 1), (512, 8, 4, 1), (512, 8, 4, 4),
    (1024, 1, 4, 1), (1024, 8, 4, 1), (1024, 8, 4, 4), (1024, 8, 16, 1)]

def memory():
    """One table. What does not depend on the number of prompts is counted anew in every row."""
    pipe = make_real("meta")
    ar = pipe.vision_language_encoder
    sampler = [ar.model.language_model, ar.lm_head]
    painter = [pipe.text_encoder, pipe.transformer, pipe.vae]
    whole = gib(ar, *painter)
    idle = whole - gib(*sampler, *painter)
    print(f"GLM-Image in bf16, GiB of weights: {gib(*sampler):.1f} to sample and update, "
          f"{gib(*painter):.1f} to decode, {idle:.1f} always on the host")
    sizes = [weight.nbytes for module in sampler + painter for weight in module.parameters()]
    pinned = sum(2 ** math.ceil(math.log2(size)) for size in sizes) / 2**30  # PyTorch rounds each block up
    print(f"on the host {whole:.1f}; with --offload on, in pinned memory, {pinned + idle:.1f}")
    print("highest GiB alive on the GPU in the second step, with --offload on / off:\n")
    print("| size | prompts x group | micro-batch | sample | decode | update |")
    print("|---|---|---|---|---|---|", flush=True)
    for side, num_prompts, group_size, micro_batch_size in MEMORY:
        peaks, _ = count_memory(side, num_prompts, micro_batch_size, group_size)
        cells = [f"{side} | {num_prompts} x {group_size} | {micro_batch_size}"]
        for phase in ("sample", "decode", "update"):
            cells.append(f"{peaks[phase]['on']:.1f} / {peaks[phase]['off']:.1f}")
        print("|", " | ".join(cells), "|", flush=True)

# --- What each choice is worth: `python test_grpo.py --ablate [seeds]`. Nothing here is a test. -------------
def noise_of_its_own(decode):
    """Instead of one for the group: every image starts from other noise."""
    def other(prompts, tokens, seeds):
        G = len(tokens) // len(prompts)
        return decode(np.repeat(prompts, G).tolist(), tokens, [seed + i for seed in seeds for i in range(G)])

    return other

ABLATIONS = {  # name: settings
    "as shipped": {},
    "noise of its own for each image": {},
    "group size 2 (16 prompts)": dict(group_size=2, batch_size=16),
    "group size 8 (4 prompts)": dict(group_size=8, batch_size=4),
    "group size 16 (2 prompts)": dict(group_size=16, batch_size=2),
    "rewards not divided by the std": dict(scale_rewards="none"),
    "neither divided, nor a KL (Dr. GRPO)": dict(scale_rewards="none", kl_coef=0.0),
    "no KL": dict(kl_coef=0.0),
    "KL 0.02": dict(kl_coef=0.02),
    "2 updates per rollout": dict(num_iterations=2),
    "1 ratio per sequence": dict(importance="sequence"),
}

def ablate(seeds):
    """One table: mean reward of the last five of 40 steps, per seed, and mean and std over the seeds."""
    results = {name: [] for name in ABLATIONS}
    for seed in seeds:
        toy = make_tiny_pipeline(seed)
        for name, settings in ABLATIONS.items():
            with tempfile.TemporaryDirectory() as folder:
                config = grpo.Config(**grpo.TINY | settings | dict(seed=seed, out=f"{folder}/run"))
                wrapper = grpo.GLMImageWrapper(copy.deepcopy(toy), config)
                if name.startswith("noise"):
                    wrapper.decode = noise_of_its_own(wrapper.decode)
                trainer = grpo.GRPOTrainer(config, wrapper, grpo.load_prompts(config.prompts)[0])
                trainer.keep = trainer.history.append  # no files
                trainer.train()
            results[name].append(statistics.mean(row["reward"] for row in trainer.history[-5:]))
            print(f"seed {seed}  {name:36s} {results[name][-1]:.3f}", file=sys.stderr, flush=True)
    print("| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | std |")
    print("|---" * (len(seeds) + 3) + "|")
    for name, values in results.items():
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        cells = [f"{value:.3f}" for value in (*values, statistics.mean(values), spread)]
        print("| " + " | ".join([name, *cells]) + " |")

if __name__ == "__main__":
    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    if sys.argv[1:2] == ["--bench"]:
        bench(sys.argv[2:])
    elif sys.argv[1:] == ["--memory"]:
        memory()
    elif sys.argv[1:2] == ["--ablate"]:
        ablate([int(seed) for seed in sys.argv[2:]] or range(5))
    elif sys.argv[1:] == ["--faults"]:
        rng = random.Random(0)
        kills = [(*kind, rng.randint(1, 3)) for kind in KILLS * 2]
        kills += [rng.uniform(0, 0.5) for _ in range(20 - len(kills))]
        rng.shuffle(kills)
        with tempfile.TemporaryDirectory() as folder:
            faults(Path(folder), kills, steps=99)
    else:
        sys.exit("test_grpo.py: error: `python -m pytest` runs the tests; --bench [flags] prints a "
                 "benchmark, --memory counts that of a GPU, --faults kills a run twenty times, "
                 "--ablate [seeds] shows what choices do")
