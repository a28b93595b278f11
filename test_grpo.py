"""Tests of grpo.py: identities, mostly, on a toy with random weights. `python -m pytest -q`, no network, no GPU."""
import contextlib
import copy
import functools
import http.server
import importlib.util
import io
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from unittest import mock

import diffusers
import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from safetensors.torch import load_file

import grpo

if __name__ != "__main__":
    torch.set_num_threads(1)        # two would wait for each other, busily, on a machine that does other work too
HERE = Path(__file__).parent
make_tiny_pipeline = grpo.make_tiny_pipeline        # before tests put a quicker one in its place
PROMPTS = ["a red fox on a wall", "yellow"]     # of different length, so that one of them is padded


def make_wrapper(height=128, width=64, temperature=0.9, **settings):
    """A fresh toy with random weights; 128 x 64 is not square: 2 x 1 draft and 4 x 2 large tokens."""
    return grpo.GLMImageWrapper(make_tiny_pipeline(0, warmup_steps=0), height, width, temperature, **settings)


def make_trainer(out, *argv):
    """A trainer of the random toy, as the command would build it: 2 prompts x 4 images of 128 x 64 a step."""
    args = grpo.parse_args(["--model", "tiny", "--out", str(out), "--size", "64x128", "--decode-steps", "1",
                            "--batch-size", "2", "--steps", "4", *argv])
    (Path(out) / "samples").mkdir(parents=True, exist_ok=True)
    wrapper = make_wrapper(*args.size, args.temperature, top_p=args.top_p)
    targets = [Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(3)]
    return grpo.GRPOTrainer(args, wrapper, ["a red fox", "some yellow thing here", "green"], targets)


def rollout_of(trainer):
    """What `train` itself hands to `train_step`: prompts, tokens, logprobs, allowed, advantages; then it is stopped."""
    class Stop(Exception):
        pass

    def catch(*rollout):
        raise Stop(rollout)

    trainer.train_step, trainer.keep = catch, lambda: None
    with pytest.raises(Stop) as stopped:
        trainer.train()
    del trainer.train_step, trainer.keep
    return list(stopped.value.args[0])


def make_real(device):
    """GLM-Image in its real sizes, with random bf16 weights, made on `device` and left on the CPU, and the toy's words.
    The sizes are the defaults of the classes, or stand here; VAE and text encoder are taken to be CogView4's and about
    ByT5 small's."""
    V, C, home = 16384, 16, "meta" if device == "meta" else "cpu"
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=(8, 12, 12))
    config = transformers.GlmImageConfig(
        text_config=dict(eos_token_id=V + 1, pad_token_id=V + 2, rope_parameters=rope),
        image_start_token_id=V, image_end_token_id=V + 1, image_token_id=V + 4)
    glyphs = transformers.T5Config(vocab_size=384, d_model=1472, d_ff=3584, num_layers=12, feed_forward_proj="gated-gelu")
    with torch.device(device), transformers.modeling_utils.local_torch_dtype(torch.bfloat16):
        ar = transformers.GlmImageForConditionalGeneration(config).to(home)
        t5 = transformers.T5EncoderModel(glyphs).to(home)
        dit = diffusers.GlmImageTransformer2DModel(
            in_channels=C, out_channels=C, prior_vq_quantizer_codebook_size=V, attention_head_dim=128,
            num_attention_heads=32).to(home)
        vae = diffusers.AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 512, 1024, 1024), layers_per_block=3, latent_channels=C, latents_mean=(0.,) * C,
            latents_std=(1.,) * C, mid_block_add_attention=False, use_quant_conv=False, use_post_quant_conv=False).to(home)
    ar.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    toy = grpo.make_pipeline()
    return diffusers.GlmImagePipeline(toy.tokenizer, toy.processor, t5, ar, vae, dit, toy.scheduler)


class FakeHome:
    """Stands for pinned memory: on its way to the device it becomes a copy, as it would on a GPU."""
    def __new__(cls, home):
        home = home.view_as(home)
        home.to = lambda *_, **__: home.clone()
        return home


@pytest.fixture(scope="session")
def wrapper():
    return make_wrapper()


@pytest.fixture(scope="session")
def sampled(wrapper):
    """Two groups of three samples: prompts of the six rows, tokens, log-probs."""
    tokens, logprobs, _ = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    return [p for p in PROMPTS for _ in range(3)], tokens, logprobs


# ------------------------------------------------------------------------------------------------------------
# The maths


def test_advantages_by_hand():
    """Guards the z-score itself: unbiased std, per group, in order."""
    got = grpo.compute_advantages([1., 2., 3., 4., 10., 10., 10., 14.], 4)
    std = math.sqrt(5 / 3)
    assert torch.allclose(got[:4], torch.tensor([-1.5, -.5, .5, 1.5]) / (std + 1e-6))
    assert torch.allclose(got[:4], torch.tensor([-1.16, -.39, .39, 1.16]), atol=5e-3)
    assert torch.allclose(got[4:], torch.tensor([-1., -1., -1., 3.]) / (2 + 1e-6))


def test_advantages_of_the_other_scales():
    """Guards against 'batch' using the std of a group, and 'none' dividing by anything at all."""
    rewards = torch.tensor([1., 3., 10., 20.])
    assert grpo.compute_advantages(rewards, 2, "none").tolist() == [-1., 1., -5., 5.]
    assert torch.allclose(grpo.compute_advantages(rewards, 2, "batch"),
                          torch.tensor([-1., 1., -5., 5.]) / (rewards.std() + 1e-6))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8, -7.7])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exact_zeros(value, scale):
    """The float mean of three times 0.1 is not 0.1; divided by a tiny std that was an advantage of 0.01."""
    got = grpo.compute_advantages([value] * 3 + [1., 2., 3.], 3, scale)
    assert got[:3].tolist() == [0., 0., 0.] and got[3:].abs().sum() > 0


def test_advantages_ignore_scale_and_shift_of_the_rewards():
    rewards = torch.rand(12)
    assert torch.allclose(grpo.compute_advantages(rewards, 4), grpo.compute_advantages(rewards * 7 + 3, 4), atol=1e-4)


@pytest.mark.parametrize("rewards, group_size, scale", [
    ([1., 2.], 1, "group"), ([1., 2., 3.], 2, "group"), ([1., math.nan], 2, "group"), ([1., math.inf], 2, "none"),
    ([1., 2.], 2, "std")])
def test_advantages_refuse(rewards, group_size, scale):
    with pytest.raises(ValueError) as error:
        grpo.compute_advantages(rewards, group_size, scale)
    assert "\n" not in str(error.value)


def test_loss_refuses_an_unknown_importance():
    """A typo must not silently mean "token"."""
    with pytest.raises(KeyError):
        grpo.compute_grpo_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), importance="seq")


@pytest.mark.parametrize("ratio, advantage, surrogate, moves", [
    (1.5, 1., 1.2, False),      # better and already much likelier: clipped, no gradient
    (1.5, -1., -1.5, True),     # worse but much likelier: the full push back
    (0.5, 1., 0.5, True),       # better but much rarer: the full pull
    (0.5, -1., -0.8, False)])   # worse and already much rarer: clipped, no gradient
def test_the_four_cases_of_the_clip(ratio, advantage, surrogate, moves):
    """Guards the min: with max, or with the clip alone, two of the four are wrong."""
    new = torch.tensor([math.log(ratio)], requires_grad=True)
    loss, metrics = grpo.compute_grpo_loss(new, torch.zeros(1), torch.tensor([advantage]))
    loss.backward()
    assert loss.item() == pytest.approx(-surrogate)
    assert (new.grad.abs().item() > 0) == moves and metrics["clip_frac"] == float(not moves)
    assert metrics["ratio_mean"] == pytest.approx(ratio) and metrics["policy_loss"] == pytest.approx(-surrogate)


def test_clip_higher_moves_the_upper_bound_only():
    """DAPO: with clip_range_high 0.4 a ratio of 1.3 is free; 0.7 is still clipped at 0.8 and 1.5 at 1.4."""
    new, old = torch.tensor([1.3, 0.7, 1.5]).log(), torch.zeros(3)
    loss, metrics = grpo.compute_grpo_loss(new, old, torch.tensor([1., -1., 1.]), 0.2, 0.4)
    assert loss.item() == pytest.approx(-(1.3 - 0.8 + 1.4) / 3) and metrics["clip_frac"] == pytest.approx(2 / 3)


def test_k3_by_hand_and_at_the_extremes():
    """exp(d) - d - 1: zero at home, positive on both sides, finite for a log-ratio of 1000 and of -1000."""
    new = torch.tensor([-1., -2., -3.], requires_grad=True)
    ref = torch.tensor([-1., -1., -5.])
    loss, metrics = grpo.compute_grpo_loss(new, new, torch.zeros(3), ref_logprobs=ref, kl_coef=0.5)
    expected = (0 + (math.e - 2) + (math.exp(-2) + 1)) / 3
    assert metrics["kl"] == pytest.approx(expected) and loss.item() == pytest.approx(0.5 * expected)
    loss.backward()
    assert torch.allclose(new.grad, 0.5 * (1 - (ref - new.detach()).exp()) / 3)
    for far in (1000., -1000.):
        loss, _ = grpo.compute_grpo_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1),
                                         ref_logprobs=torch.tensor([far]), kl_coef=1.)
        assert math.isfinite(loss.item())


def test_gspo_is_the_ratio_of_the_mean():
    """One ratio a sequence: two tokens that moved by +1 and -1 cancel, where token ratios would be clipped."""
    new, old = torch.tensor([[1., -1.], [.3, .1]]), torch.zeros(2, 2)
    loss, metrics = grpo.compute_grpo_loss(new, old, torch.tensor([1., -1.]), importance="sequence")
    assert loss.item() == pytest.approx(-(1 - math.exp(.2)) / 2) and metrics["ratio_max"] == pytest.approx(math.exp(.2))
    token, _ = grpo.compute_grpo_loss(new, old, torch.tensor([1., -1.]))
    assert token.item() != pytest.approx(loss.item())


def test_a_log_prob_per_sequence_is_a_row_of_one_token():
    """Guards the broadcasting of advantages: [N] against [N, T] would silently give [N, N] when N = T."""
    torch.manual_seed(0)
    new, old, advantages = torch.randn(4) / 9, torch.randn(4) / 9, torch.randn(4)
    flat = grpo.compute_grpo_loss(new, old, advantages, ref_logprobs=old, kl_coef=.1)[0]
    rows = grpo.compute_grpo_loss(new[:, None], old[:, None], advantages, ref_logprobs=old[:, None], kl_coef=.1)[0]
    square = grpo.compute_grpo_loss(*(x[:, None].expand(4, 4) for x in (new, old)), advantages,
                                    ref_logprobs=old[:, None].expand(4, 4), kl_coef=.1)[0]
    assert flat.item() == pytest.approx(rows.item()) and flat.item() == pytest.approx(square.item(), rel=1e-5)


def test_gradient_at_the_old_policy_is_reinforce():
    """Why a loss of 0 still learns; and only `new` carries a gradient."""
    new, advantages = torch.randn(6, 5, requires_grad=True), grpo.compute_advantages(torch.rand(6), 3)
    others = torch.randn(6, 5, requires_grad=True)
    loss, _ = grpo.compute_grpo_loss(new, new, advantages.requires_grad_(), ref_logprobs=others, kl_coef=0.)
    loss.backward()
    ours, new.grad = new.grad, None
    (-(advantages.detach()[:, None] * new).mean()).backward()
    assert abs(loss.item()) < 1e-6 and torch.allclose(ours, new.grad, atol=1e-7) and ours.abs().sum() > 0
    assert others.grad is None and advantages.grad is None


def test_policy_logprobs_are_a_distribution_over_codes():
    """Outputs behind the codebook get no mass, temperature divides the logits, bf16 input gives fp32 output."""
    logits = torch.randn(3, 10)
    logp = grpo.compute_policy_logprobs(logits, 0.5, 8)
    assert logp.shape == (3, 8) and torch.allclose(logp.exp().sum(1), torch.ones(3))
    assert torch.allclose(logp, torch.log((2 * logits[:, :8]).exp() / (2 * logits[:, :8]).exp().sum(1, keepdim=True)),
                          atol=1e-5)
    assert grpo.compute_policy_logprobs(logits.bfloat16(), 1., 8).dtype == torch.float32


@pytest.mark.parametrize("top_p", [0.3, 0.75])
def test_the_nucleus_is_the_smallest_set_that_holds_its_mass(top_p):
    """What the sampler keeps, by the definition and not by the library it is cut with: top_p of the mass is in it, and
    without its least likely code it would not be."""
    wrapper = make_wrapper(top_p=top_p)
    _, _, allowed = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    ids, mask, position_ids = wrapper.encode(PROMPTS)
    L = ids.shape[1]
    with torch.no_grad():
        probs = (wrapper.forward(ids, mask[:, :L], position_ids[:, :, :L], 1)[:, 0, :64] / wrapper.temperature).softmax(1)
    inside = torch.from_numpy(np.unpackbits(allowed[::3, 0], axis=-1)).bool()        # the first token of each prompt
    mass = (probs * inside).sum(1)
    assert (mass >= top_p).all() and (mass - probs.masked_fill(~inside, 1).amin(1) < top_p).all()


def test_masked_logprobs_are_a_distribution_over_the_allowed_codes():
    """What is cut away has no mass and no gradient; what stays keeps its proportions."""
    logits = torch.randn(3, 8, requires_grad=True)
    allowed = torch.tensor([True, False] * 4)
    logp = grpo.compute_policy_logprobs(logits, 0.7, 8, allowed)
    assert torch.equal(logp.exp()[:, ~allowed], torch.zeros(3, 4)) and torch.allclose(logp.exp().sum(1), torch.ones(3))
    assert torch.allclose(logp[:, 0] - logp[:, 2], (logits[:, 0] - logits[:, 2]) / 0.7, atol=1e-6)
    logp[:, 0].sum().backward()
    assert logits.grad.isfinite().all() and torch.equal(logits.grad[:, ~allowed], torch.zeros(3, 4))


def test_pictures_survive_the_round_trip():
    """Every 8-bit value, exactly: 0.999 * 255 truncated instead of rounded loses one."""
    ramp = torch.arange(256, dtype=torch.uint8).repeat(3, 2, 1).movedim(0, 2)
    images = [Image.fromarray(ramp.numpy()), Image.fromarray(ramp.flip(1).contiguous().numpy())]
    tensor = grpo.pil_to_tensor(images)
    assert tensor.shape == (2, 3, 2, 256) and tensor.min() == 0 and tensor.max() == 1
    assert [i.tobytes() for i in grpo.tensor_to_pil(tensor)] == [i.tobytes() for i in images]


# ------------------------------------------------------------------------------------------------------------
# Rewards


def test_color_reward():
    images = [Image.new("RGB", (4, 4), c) for c in ("red", "red", (255, 153, 0), "black")]
    prompts = ["A RED thing", "a blue thing", "an orange one", "nothing named"]
    assert grpo.reward_color(images, prompts) == [pytest.approx(1.), pytest.approx(1 / 3), pytest.approx(1.), None]


def test_jpeg_and_mse_rewards():
    """Flat compresses better than noise; equal is 0 and black to white is -1, at any size and mode of the target."""
    flat, noise = Image.new("RGB", (32, 32)), Image.effect_noise((32, 32), 99).convert("RGB")
    low, high = grpo.reward_jpeg([noise, flat], ["", ""])
    assert 0 < high - low and high < 1
    white = Image.new("RGB", (8, 8), "white")
    assert grpo.reward_mse([flat, flat], ["", ""], [flat, white]) == [0., -1.]


def test_weighted_rewards_keep_their_components():
    image = Image.new("RGB", (8, 8), "red")
    weights = grpo.parse_reward("color=1, jpeg=0.5")
    total, parts = grpo.compute_rewards([image] * 2, ["red", "blue"], [None] * 2, weights)
    assert weights == {"color": 1., "jpeg": .5} and set(parts) == {"color", "jpeg"}
    assert torch.allclose(total, parts["color"] + 0.5 * parts["jpeg"]) and grpo.parse_reward("jpeg") == {"jpeg": 1.}


def fake_rewards(monkeypatch, **functions):
    """Each returns what it is given, whatever the images; and N blank images to score."""
    for name, values in functions.items():
        monkeypatch.setitem(grpo.REWARDS, name, lambda *_, values=values: values)
    n = max(len(values) for values in functions.values())
    return [Image.new("RGB", (8, 8))] * n, [f"prompt {i}" for i in range(n)], [None] * n


def test_rewards_take_any_sequence_of_numbers(monkeypatch):
    """Floats, numpy, a tensor, a column: [N, 1] summed with an [N] once broadcast to [N, N] and trained on nonsense."""
    inputs = fake_rewards(monkeypatch, a=[1, True], b=np.array([2., 3.], np.float16), c=torch.tensor([[1.], [2.]]))
    total, components = grpo.compute_rewards(*inputs, {"a": 1., "b": 1., "c": -2.})
    assert total.tolist() == [1., 0.] and [values.dtype for values in components.values()] == [torch.float32] * 3


@pytest.mark.parametrize("values, word", [
    ([0., 0., 0.], "3 values for 2 images"), ([0.], "1 values for 2 images"), ([0., math.nan], "nan for sample 1"),
    ([torch.tensor(math.inf), 0.], "inf for sample 0"), (torch.zeros(2, 2), "bad"), (["a", "b"], "bad"), (None, "bad")])
def test_a_reward_that_gives_no_numbers_is_one_line(monkeypatch, values, word):
    """It names the reward, and the prompt and the sample where there is one."""
    monkeypatch.setitem(grpo.REWARDS, "bad", lambda *_: values)
    with pytest.raises(grpo.Trouble) as error:
        grpo.compute_rewards([Image.new("RGB", (8, 8))] * 2, ["p", "q"], [None] * 2, {"bad": 1.})
    line = str(error.value)
    assert "\n" not in line and "--reward bad" in line and word in line
    assert ("sample 0, 'p'" in line) + ("sample 1, 'q'" in line) == ("for sample" in line)


def test_no_opinion_counts_as_the_mean_of_the_group(monkeypatch):
    """None moves no advantage of its own: the mean of its group, 0 where a whole group has none, and NaN in the log."""
    inputs = fake_rewards(monkeypatch, a=[1., None, 3., None, None, None], b=[1., 1., 1., 1., 2., 3.])
    total, components = grpo.compute_rewards(*inputs, {"a": 1., "b": 2.}, group_size=3)
    assert total.tolist() == [3., 4., 5., 2., 4., 6.]
    assert components["a"].isnan().tolist() == [False, True, False, True, True, True]
    assert grpo.compute_advantages(total, 3)[1] == 0


def test_group_normalisation_forgets_the_scales(monkeypatch):
    """By hand: z-scores of each component in its group, then the weights. A component a million times another counts as
    much as its weight says; one that is equal in a group counts nothing there."""
    inputs = fake_rewards(monkeypatch, a=[1e6, 3e6, 5., 5.], b=[.2, .1, .4, .8])
    total, components = grpo.compute_rewards(*inputs, {"a": 1., "b": 3.}, group_size=2, norm="group")
    z = 1 / math.sqrt(2)
    assert total.tolist() == pytest.approx([-z + 3 * z, z - 3 * z, -3 * z, 3 * z], rel=1e-4)
    assert components["a"].tolist() == [1e6, 3e6, 5., 5.]       # the log shows them as they came


def test_prompts_file(tmp_path):
    """Comments and blank lines are skipped; a target is found beside the file, whatever the working directory."""
    Image.new("L", (3, 3)).save(tmp_path / "t.png")
    (tmp_path / "p.txt").write_text("\ufeff# no\n\n  a red fox\tt.png\nplain\n", encoding="utf-8")
    prompts, targets = grpo.load_prompts(tmp_path / "p.txt")
    assert prompts == ["a red fox", "plain"] and targets[0].mode == "RGB" and targets[1] is None


def test_targets_of_any_kind(tmp_path):
    """Turned as EXIF says, laid on white where transparent, from a palette, grey, or 16 bits: always upright RGB."""
    exif = Image.Exif()
    exif[0x0112] = 6                                                    # the camera lay on its side
    left_red = Image.new("RGB", (4, 2), "blue")
    left_red.paste("red", (0, 0, 2, 2))
    left_red.save(tmp_path / "exif.png", exif=exif)
    Image.new("RGBA", (2, 2), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("RGBA", (2, 2), (0, 0, 0, 128)).save(tmp_path / "half.png")
    Image.new("P", (2, 2), 0).save(tmp_path / "palette.png", transparency=0)
    Image.new("L", (2, 2), 128).save(tmp_path / "grey.png")
    loaded = {name: grpo.load_target(tmp_path / f"{name}.png") for name in ("exif", "clear", "half", "palette", "grey")}
    assert {image.mode for image in loaded.values()} == {"RGB"}
    assert loaded["exif"].size == (2, 4) and loaded["exif"].getpixel((0, 0)) == (255, 0, 0) and loaded["exif"].getpixel((0, 3)) == (0, 0, 255)
    assert loaded["clear"].getpixel((0, 0)) == loaded["palette"].getpixel((0, 0)) == (255, 255, 255)
    assert abs(loaded["half"].getpixel((0, 0))[0] - 127) <= 1 and loaded["grey"].getpixel((0, 0)) == (128, 128, 128)


def test_shipped_prompts():
    """About 40, each naming one colour of the reward, every colour in the sample grid, many with words to draw."""
    prompts, _ = grpo.load_prompts(HERE / "prompts.txt")
    named = [[w for w in re.findall("[a-z]+", p.lower()) if w in grpo.COLORS] for p in prompts]
    assert 35 <= len(prompts) <= 45 and all(len(words) == 1 for words in named)
    assert {words[0] for words in named[:8]} == set(grpo.COLORS) and sum('"' in p for p in prompts) >= 15


# ------------------------------------------------------------------------------------------------------------
# GLM-Image: positions, log-probs, sampling, painting


def test_positions_are_those_of_the_docstring():
    rows = re.findall(r"[thw]:((?:\s+\d+)+)", grpo.build_position_ids.__doc__)
    expected = torch.tensor([[int(n) for n in row.split()] for row in rows])
    got = grpo.build_position_ids(torch.tensor([[0, 1, 1, 1]]), [(1, 2), (2, 2)])
    assert expected.shape == (3, 10) and torch.equal(got[:, 0], expected)


@pytest.mark.parametrize("height, width", [(128, 128), (128, 64), (64, 192)])
def test_positions_are_those_of_transformers(height, width):
    """The library computes the same inside `generate`; here it is the independent witness."""
    wrapper = make_wrapper(height, width)
    ids, mask, position_ids = wrapper.encode(PROMPTS)
    mask, (h, w) = mask[:, :ids.shape[1]].long(), (height // 32, width // 32)
    large_first = torch.tensor([[1, h, w], [1, h // 2, w // 2]] * 2)
    prompt, _ = wrapper.ar.model.get_rope_index(ids, large_first, torch.tensor([2, 2]), mask)
    grid = wrapper.ar.model._cached_decode_position_ids.movedim(1, 0)[:, :, :-1]    # the last one is for EOS
    assert (mask == 0).any() and torch.equal(position_ids, torch.cat([prompt, grid], 2))


def test_number_of_tokens_of_the_real_processor():
    """512 draws 256 + 256 tokens, 1024 draws 256 + 1024: the toy's smaller draft is the toy's alone."""
    wrapper = make_wrapper(512, 512)
    del wrapper.pipe.processor._get_target_shape
    for size, T in ((512, 256 + 256), (1024, 256 + 1024)):
        wrapper.height = wrapper.width = size
        ids, mask, position_ids = wrapper.encode(["red"])
        assert mask.shape[1] == position_ids.shape[2] == ids.shape[1] + T


def test_prompts_are_encoded_as_the_pipeline_does(wrapper, monkeypatch):
    """What the stock pipeline hands to `generate` is what we hand to the language model."""
    class Caught(Exception):
        pass

    def generate(**inputs):
        raise Caught(inputs)

    monkeypatch.setattr(wrapper.ar, "generate", generate)
    for prompts in (PROMPTS, PROMPTS[:1]):
        with pytest.raises(Caught) as caught:
            wrapper.pipe.generate_prior_tokens(prompts, wrapper.height, wrapper.width)
        stock, (ids, mask, position_ids) = caught.value.args[0], wrapper.encode(prompts)
        mask, grids = mask[:, :ids.shape[1]], stock["image_grid_thw"][:2, 1:].tolist()
        assert torch.equal(stock["input_ids"], ids) and torch.equal(stock["attention_mask"], mask.long())
        assert torch.equal(position_ids, grpo.build_position_ids(mask.long(), grids[::-1]))


def test_sampler_and_trainer_agree(wrapper, sampled):
    """THE test: padded prompts, a grid that is not square, a temperature; the cached steps of the sampler and one
    teacher-forced pass give the same log-probs."""
    prompts, tokens, logprobs = sampled
    assert tokens.shape == (6, 2 * 1 + 4 * 2) and 0 <= tokens.min() and tokens.max() < 64
    with torch.no_grad():
        again, entropy = wrapper.compute_logprobs(prompts, tokens)
    assert (again - logprobs).abs().max() < 1e-5 and (0 < entropy).all() and (entropy <= math.log(64) + 1e-4).all()


def test_naive_pass_without_positions_does_not_agree(wrapper, sampled):
    """The trap: `model(prompt + tokens)` runs without complaint, and is wrong."""
    prompts, tokens, logprobs = sampled
    ids, mask, _ = wrapper.encode(prompts)
    with torch.no_grad():
        logits = wrapper.ar(input_ids=torch.cat([ids, tokens], 1), attention_mask=mask.long()).logits
    naive = grpo.compute_policy_logprobs(logits[:, ids.shape[1] - 1:-1], wrapper.temperature, 64)
    gap = (naive.gather(2, tokens[:, :, None])[:, :, 0] - logprobs).abs().max()
    assert gap > 1e-3       # a hundred times what sampler and trainer may differ by; trained weights differ more


def test_log_probs_are_those_of_transformers_own_decoding(wrapper, sampled):
    """Step by step through the public `forward`, which brings positions of its own: a second way to every number."""
    prompts, tokens, logprobs = sampled
    for row in (0, 5):
        ids, mask, _ = wrapper.encode([prompts[row]])
        mask = mask[:, :ids.shape[1]].long()
        out = wrapper.ar(input_ids=ids, attention_mask=mask, use_cache=True, images_per_sample=torch.tensor([2]),
                         image_grid_thw=torch.tensor([[1, 4, 2], [1, 2, 1]]))
        for i, token in enumerate(tokens[row]):
            logp = grpo.compute_policy_logprobs(out.logits[0, -1], wrapper.temperature, 64)[token]
            assert abs(logp - logprobs[row, i]) < 1e-5
            mask = F.pad(mask, (0, 1), value=1)
            out = wrapper.ar(input_ids=token.view(1, 1), attention_mask=mask, past_key_values=out.past_key_values,
                             use_cache=True)


def test_a_batch_is_its_prompts_one_by_one(wrapper, sampled):
    """Padding must not leak: not into the log-probs, and not into what a prompt is given to draw."""
    prompts, tokens, logprobs = sampled
    with torch.no_grad():
        single = torch.cat([wrapper.compute_logprobs([p], t[None])[0] for p, t in zip(prompts, tokens)])
    assert (single - logprobs).abs().max() < 1e-5
    for i, prompt in enumerate(PROMPTS):
        alone, _, _ = wrapper.sample([prompt], 3, seeds=[i + 1])
        assert torch.equal(alone, tokens[3 * i:3 * i + 3])


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sampling_equals_the_plain_way(top_p):
    """Slow and plain, as the witness: every row reads its own prompt, the cache grows, and the nucleus is cut by
    transformers. Guards the shared prefill, the static cache, its mask and the packed bits: token for token."""
    wrapper = make_wrapper(top_p=top_p)
    tokens, logprobs, allowed = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    ids, mask, position_ids = wrapper.encode([p for p in PROMPTS for _ in range(3)])
    cache, L = transformers.DynamicCache(config=wrapper.ar.config.text_config), ids.shape[1]
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    for i in range(tokens.shape[1]):
        start = L + i - 1 if i else 0
        with torch.no_grad():
            logits = wrapper.forward(ids[:, start:], mask[:, :L + i], position_ids[:, :, start:L + i], 1, cache)[:, 0]
        logits = transformers.TopPLogitsWarper(top_p)(None, logits[:, :64] / wrapper.temperature)
        noise = torch.cat([torch.empty(3, 64).exponential_(generator=generator) for generator in generators])
        code = (logits.softmax(1) / noise).argmax(1, keepdim=True)
        assert torch.equal(code[:, 0], tokens[:, i])
        assert (logits.log_softmax(1).gather(1, code)[:, 0] - logprobs[:, i]).abs().max() < 1e-5
        assert torch.equal(logits.isfinite(), torch.from_numpy(np.unpackbits(allowed[:, i], axis=-1)).bool())
        ids = torch.cat([ids, code], 1)


def test_truncated_sampling_is_scored_under_its_own_masks():
    """Sampler = trainer to 1e-5, every sampled token allowed; scored by the whole softmax it is another number."""
    wrapper = make_wrapper(top_p=0.6)
    tokens, logprobs, allowed = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    prompts = [p for p in PROMPTS for _ in range(3)]
    with torch.no_grad():
        again, entropy = wrapper.compute_logprobs(prompts, tokens, allowed)
        unmasked, whole_entropy = wrapper.compute_logprobs(prompts, tokens)
    masks = torch.from_numpy(np.unpackbits(allowed, axis=-1)).bool()
    assert (again - logprobs).abs().max() < 1e-5 and masks.gather(2, tokens[:, :, None]).all()
    assert (unmasked < logprobs - 0.1).all() and (entropy < whole_entropy).all() and entropy.isfinite().all()
    assert 1 < masks.sum(2).min() and masks.sum(2).max() < 64 and allowed.nbytes == tokens.numel() * 64 / 8


def test_no_step_of_the_sampler_waits_for_the_host():
    """A value read back (`.item()`, `if tensor`, a mask used as an index) would stop a GPU at every token, and a CUDA
    graph could not hold it. Four times the tokens must not mean one more read."""
    class CountReads(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            reads[-1] += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default,
                                      torch.ops.aten.equal.default)
            return function(*args, **(kwargs or {}))

    reads = []
    for size in (64, 128):
        wrapper = make_wrapper(size, size, top_p=0.6)
        reads.append(0)
        with CountReads():
            wrapper.sample(PROMPTS, 2, seeds=[1, 2])
    assert reads[0] == reads[1]


def test_the_step_of_the_sampler_keeps_to_its_memory(monkeypatch):
    """What a CUDA graph replays reads and writes the addresses it was captured with: step for step the same cache,
    and the step is the same function each time."""
    seen, wrapper = [], make_wrapper()
    forward = wrapper.forward

    def spy(ids, mask, position_ids, num_last, cache):
        seen.append([ids.shape, mask.shape, cache.layers[-1].keys.data_ptr() if ids.shape[1] == 1 else None])
        return forward(ids, mask, position_ids, num_last, cache)

    monkeypatch.setattr(wrapper, "forward", spy)
    wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    L = wrapper.encode(PROMPTS)[0].shape[1]
    assert len(seen) == 1 + 10 and seen[0][0] == (2, L - 1)         # one prefill, a row for each prompt
    assert all(step == seen[1] for step in seen[1:]) and seen[1][:2] == [(6, 1), (6, 1, 1, L + 10)]


def test_a_seed_is_a_group_and_its_rows_differ(wrapper, sampled):
    """The stock pipeline re-seeds on each call: a group of identical images, zero variance, nothing learned."""
    _, tokens, _ = sampled
    assert torch.equal(tokens, wrapper.sample(PROMPTS, 3, seeds=[1, 2])[0])
    assert len({tuple(row) for row in tokens.tolist()}) == 6
    assert not torch.equal(tokens, wrapper.sample(PROMPTS, 3, seeds=[1, 3])[0])


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_samples_follow_the_distribution(top_p):
    """20,000 first tokens against their probabilities. Pearson's statistic over 64 codes exceeds 150 by chance
    once in 10^8; forgetting the temperature or the log of the noise takes it far beyond."""
    wrapper = make_wrapper(64, 64, temperature=0.5, top_p=top_p)
    tokens, _, _ = wrapper.sample(["red"], 20000, seeds=[0])
    ids, mask, position_ids = wrapper.encode(["red"])
    L = ids.shape[1]
    with torch.no_grad():
        logits = wrapper.forward(ids, mask[:, :L], position_ids[:, :, :L], num_last=1)
    probs = (logits[0, 0, :64] / 0.5).softmax(0)
    probs[torch.cumsum(probs.sort(descending=True)[0], 0).lt(top_p).sum() < probs.argsort(descending=True).argsort()] = 0
    expected, counts = 20000 * probs / probs.sum(), tokens[:, 0].bincount(minlength=64)
    inside = expected > 0
    assert ((counts - expected)[inside] ** 2 / expected[inside]).sum() < 150 and counts[~inside].sum() == 0


def test_images_come_from_the_large_tokens_and_the_noise_of_the_group(wrapper, sampled):
    """Same tokens, same group: same image. The draft is not painted; another seed is another noise."""
    _, tokens, _ = sampled
    same = tokens[:1].repeat(4, 1)
    same[1, :2] = (same[1, :2] + 1) % 64        # another draft
    a, b, c, d = [image.tobytes() for image in wrapper.decode(PROMPTS, same, seeds=[1, 2])]
    assert a == b and c == d and a != c
    same[1, 2:] = (same[1, 2:] + 1) % 64        # another large grid
    assert wrapper.decode(PROMPTS, same, seeds=[1, 2])[1].tobytes() != a


def test_painting_in_micro_batches_changes_nothing_and_reads_each_prompt_once(wrapper, sampled):
    """But for the rounding of other batch sizes, one grey level of 255; the text encoder is asked once a group."""
    _, tokens, _ = sampled
    calls, ours = [], grpo.GLMImageWrapper(wrapper.pipe, 128, 64, guidance=1.0)
    handle = wrapper.pipe.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    sizes, dit = [], wrapper.pipe.transformer
    other = dit.register_forward_pre_hook(lambda *a: sizes.append(len(a[2]["hidden_states"])), with_kwargs=True)
    pictures = [grpo.pil_to_tensor(ours.decode(PROMPTS, tokens, [1, 2], 2, size)) for size in (1, 2, 3)]
    handle.remove()
    other.remove()
    assert sizes == [1] * 12 + [2, 2, 1, 1] * 2 + [3] * 4           # two denoising steps each
    assert len(calls) == 3 * 2 and all((p - pictures[0]).abs().max() < 1.5 / 255 for p in pictures)
    assert (pictures[0][0] - pictures[0][1]).abs().max() > 3 / 255


def test_painting_is_that_of_the_stock_pipeline(wrapper, sampled):
    """Given the tokens and the noise, `GlmImagePipeline` itself draws the same picture, row by row."""
    _, tokens, _ = sampled
    ours = grpo.GLMImageWrapper(wrapper.pipe, 128, 64, guidance=4.0)
    image = ours.decode(PROMPTS[:1], tokens[:1], seeds=[7], decode_steps=3)[0]
    codes = wrapper.pipe._upsample_token_ids(tokens[:1, 2:], 4, 2)
    noise = torch.randn(1, 3, 16, 8, generator=torch.Generator().manual_seed(7))
    stock = [wrapper.pipe(PROMPTS[0], prior_token_ids=codes, latents=noise, height=128, width=64,
                          num_inference_steps=3, guidance_scale=guidance).images[0].tobytes() for guidance in (4., 1.)]
    assert image.size == (64, 128) and image.tobytes() == stock[0] != stock[1]


def test_settings_of_the_wrapper(tmp_path, wrapper, sampled):
    """No temperature given: the model's own, as GLM-Image brings 0.9. A dtype is a dtype, and bf16 samples."""
    wrapper.pipe.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "vision_language_encoder/generation_config.json").read_text())
    (tmp_path / "vision_language_encoder/generation_config.json").write_text(
        json.dumps({**settings, "do_sample": True, "temperature": 0.9, "top_p": 0.75}))
    loaded = grpo.GLMImageWrapper.from_pretrained(tmp_path, torch.bfloat16, height=128, width=64)
    loaded.pipe.processor._get_target_shape = wrapper.pipe.processor._get_target_shape
    plain = make_wrapper(temperature=None)
    assert (loaded.temperature, loaded.top_p, plain.temperature, plain.top_p) == (0.9, 0.75, 1, 1)
    assert loaded.ar.dtype == torch.bfloat16
    logprobs, _ = loaded.compute_logprobs(*sampled[:2])
    assert logprobs.dtype == torch.float32 and 0 < (logprobs - sampled[2]).abs().max() < 0.2
    assert len(loaded.generate_with_tracking(PROMPTS, 2, seeds=[0, 1])[0]) == 4


def test_bf16_leaves_a_small_gap_between_sampler_and_trainer():
    """About 0.01, or none, as the shapes have it. The bound is the one that the README calls healthy; a temperature that
    only one of them knows is beyond it."""
    pipe, prompts = make_tiny_pipeline(warmup_steps=0), ["a red fox", "yellow"]
    pipe.vision_language_encoder.to(torch.bfloat16)
    ours = grpo.GLMImageWrapper(pipe, 128, 128)
    tokens, logprobs, allowed = ours.sample(prompts, 8, seeds=[1, 2])
    with torch.no_grad():
        again, _ = ours.compute_logprobs([p for p in prompts for _ in range(8)], tokens, allowed)
        ours.temperature = 0.9
        wrong, _ = ours.compute_logprobs([p for p in prompts for _ in range(8)], tokens, allowed)
    assert (again - logprobs).abs().max() < 0.05 < (wrong - logprobs).abs().max()


def test_generate_with_tracking(wrapper, sampled):
    images, tokens, logprobs, allowed = wrapper.generate_with_tracking(PROMPTS, 3, seeds=[1, 2])
    assert len(images) == 6 and torch.equal(tokens, sampled[1]) and torch.equal(logprobs, sampled[2])
    assert allowed.shape == (6, 10, 64 // 8) and (allowed == 255).all()


# ------------------------------------------------------------------------------------------------------------
# Memory: what lies where, and what is kept for the backward pass


def offloaded(wrapper):
    """Makes what is not on the device unusable (NaN), and returns the list that will hold the moves."""
    moves, place = [], wrapper.place

    def spy(phase=None):
        if phase != wrapper.phase:
            moves.append(phase)
        place(phase)
        for name, pairs in wrapper.homes.items():
            for tensor, home in pairs:
                tensor.data = home if name == phase else torch.full_like(home, math.nan)

    wrapper.place = spy
    for part in (wrapper.ar.model.visual, wrapper.ar.model.vqmodel):
        for parameter in part.parameters():
            parameter.data.fill_(math.nan)
    return moves


def test_offloading_changes_nothing_and_moves_once_per_phase(tmp_path):
    """Tokens, pictures and gradients are identical although, in each phase, all that is not placed is NaN; the vision
    tower and the VQ model always are. One move per phase, not per prompt or micro-batch; to score, all have left."""
    plain, other = (make_trainer(tmp_path / x, "--kl-coef", "0.1", "--micro-batch-size", "2") for x in "ab")
    other.wrapper = grpo.GLMImageWrapper(other.wrapper.pipe, 128, 64, offload=True)
    moves, pictures = offloaded(other.wrapper), []
    for trainer in (plain, other):
        perturb(trainer.lora)
        decode = trainer.wrapper.decode
        trainer.wrapper.decode = lambda *a, decode=decode: pictures.append(decode(*a)) or pictures[-1]
    rollouts = [rollout_of(trainer) for trainer in (plain, other)]
    assert moves == ["write", "paint", None]
    assert all(torch.equal(rollouts[0][i], rollouts[1][i]) for i in (1, 2, 4))
    assert [i.tobytes() for i in pictures[0]] == [i.tobytes() for i in pictures[1]]
    assert torch.equal(*(gradients(trainer, rollout) for trainer, rollout in zip((plain, other), rollouts)))
    assert moves == ["write", "paint", None, "write"]


def test_offloading_brings_copies_and_forgets_them(wrapper):
    """Exactly the tensors of the phase are elsewhere, buffers included; afterwards each one is at home again, in the same
    memory as before, so that leaving costs no copy. The vision tower never moves."""
    pipe = make_wrapper().pipe
    ours = grpo.GLMImageWrapper(pipe, 128, 64, offload=True)
    parts = {"write": [ours.ar.model.language_model, ours.ar.lm_head],
             "paint": [pipe.text_encoder, pipe.transformer, pipe.vae]}
    before = {t: t.data_ptr() for part in (ours.ar, *parts["paint"]) for t in (*part.parameters(), *part.buffers())}
    ours.homes = {name: [(tensor, FakeHome(home)) for tensor, home in pairs] for name, pairs in ours.homes.items()}
    for phase in ("write", "paint", None, "paint", "write", None):
        ours.place(phase)
        for name, modules in parts.items():
            for t in (t for module in modules for t in (*module.parameters(), *module.buffers())):
                assert (t.data_ptr() == before[t]) == (name != phase)
        there = {t: t.data_ptr() for t in before}
        ours.place(phase)               # once more: no copy of what is there
        assert all(t.data_ptr() == there[t] for t in before)
        assert all(t.data_ptr() == before[t] for t in ours.ar.model.visual.parameters())


def test_weights_wait_in_pinned_memory_and_only_there(monkeypatch):
    """For a GPU every tensor of every phase is pinned once, and the unpinned original is not kept beside it: that would
    take twice the 31 GiB of the host. (Stands in for a GPU: the constructor itself brings nothing to the device.)"""
    pinned = {}
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.setdefault(id(t), t.detach().clone()))
    ours = grpo.GLMImageWrapper(make_wrapper().pipe, 128, 64, offload=True, device="cuda")
    pairs = [pair for phase in ours.homes.values() for pair in phase]
    addresses = {copy.data_ptr() for copy in pinned.values()}
    assert len(pairs) == len(pinned) > 100
    assert all(t.data_ptr() == home.data_ptr() and home.data_ptr() in addresses for t, home in pairs)


def test_the_real_model_fits_by_phase():
    """Counted on the meta device at the real sizes: what a phase needs of weights, in GiB of bf16, leaves room on a
    card of 24 GB; the whole does not. And the vision tower is in no phase."""
    pipe = make_real("meta")
    ar, gib = pipe.vision_language_encoder, lambda *parts: sum(p.nbytes for m in parts for p in m.parameters()) / 2**30
    write, paint = gib(ar.model.language_model, ar.lm_head), gib(pipe.text_encoder, pipe.transformer, pipe.vae)
    assert write == pytest.approx(16.6, abs=0.1) and paint == pytest.approx(14.1, abs=0.1)
    assert gib(ar.model.visual, ar.model.vqmodel) > 2 and {p.dtype for p in ar.parameters()} == {torch.bfloat16}
    count = sum(p.numel() for p in grpo.LoRA(ar, 32, 64).values())
    assert count == pytest.approx(95e6, rel=0.01)
    assert (ar.generation_config.temperature, ar.generation_config.top_p) == (0.9, 0.75)


def test_activations_are_recomputed_not_kept(wrapper, sampled):
    """Gradient checkpointing: the same gradient bit for bit, far fewer bytes kept for the backward pass, and none of it
    when there is no backward pass: a sampler whose layers believe they train would drop its cache."""
    ours, kept, grads = make_wrapper(), [], []
    lora = grpo.LoRA(ours.ar, rank=4, alpha=8)
    perturb(lora)
    for on in (True, False):
        for layer in ours.ar.model.language_model.layers:
            layer.gradient_checkpointing = on
        kept.append(0)

        def keep(tensor):
            kept[-1] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logprobs, _ = ours.compute_logprobs(*sampled[:2])
        lora.zero_grad()
        logprobs.sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in lora.parameters()]))
        assert all(layer.training for layer in ours.ar.model.language_model.layers)
        assert not any(m.training for layer in ours.ar.model.language_model.layers for m in layer.children())
        ours.sample(PROMPTS, 2, seeds=[0, 1])
        assert not any(layer.training for layer in ours.ar.model.language_model.layers)
    assert torch.equal(*grads) and grads[0].abs().max() > 0 and kept[0] < 0.6 * kept[1]


def test_the_head_sees_image_positions_only(wrapper, sampled):
    """At 1024 x 1024 the logits of the prompt alone would be tens of megabytes a sample, for nothing."""
    shapes = []
    handle = wrapper.ar.lm_head.register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    wrapper.compute_logprobs(*sampled[:2])
    wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    handle.remove()
    assert shapes == [(6, 10, 72), (2, 1, 72)] + [(6, 1, 72)] * 10


def test_a_saved_pipeline_is_the_same_policy(tmp_path, wrapper, sampled):
    """--model DIR: the toy through `save_pretrained` and back scores the same tokens the same."""
    wrapper.pipe.save_pretrained(tmp_path)
    loaded = grpo.GLMImageWrapper.from_pretrained(tmp_path, height=128, width=64, temperature=0.9)
    loaded.pipe.processor._get_target_shape = wrapper.pipe.processor._get_target_shape   # the toy's draft is not saved
    assert torch.equal(loaded.compute_logprobs(sampled[0], sampled[1])[0], wrapper.compute_logprobs(*sampled[:2])[0])


def test_the_toy_is_deterministic():
    states = [grpo.make_tiny_pipeline(3, warmup_steps=2).vision_language_encoder.state_dict() for _ in range(2)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


# ------------------------------------------------------------------------------------------------------------
# LoRA


def perturb(lora):
    torch.manual_seed(5)
    for parameter in lora.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))


def test_lora_starts_as_the_identity_and_switches_off_exactly(sampled):
    """The reference policy is the model with its adapters off: bit for bit, or the KL is of something else."""
    wrapper = make_wrapper()
    base = wrapper.compute_logprobs(*sampled[:2])[0]
    lora = grpo.LoRA(wrapper.ar, rank=4, alpha=8)
    assert torch.equal(wrapper.compute_logprobs(*sampled[:2])[0], base)
    perturb(lora)
    assert (wrapper.compute_logprobs(*sampled[:2])[0] - base).abs().max() > 1e-2
    with lora.disabled():
        assert torch.equal(wrapper.compute_logprobs(*sampled[:2])[0], base)
    assert (wrapper.compute_logprobs(*sampled[:2])[0] - base).abs().max() > 1e-2


def test_only_the_adapters_train(sampled):
    """Six projections a layer, A and B each, in the language model alone; everything else is frozen and still."""
    wrapper = make_wrapper()
    lora = grpo.LoRA(wrapper.ar, rank=4, alpha=8)
    perturb(lora)
    wrapper.compute_logprobs(*sampled[:2])[0].sum().backward()
    assert len(lora) == 2 * 6 * 2 and all(p.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in lora.parameters())
    assert not any("visual" in key for key in lora)
    for part in (wrapper.ar, wrapper.pipe.transformer, wrapper.pipe.vae, wrapper.pipe.text_encoder):
        assert not part.training and all(not p.requires_grad and p.grad is None for p in part.parameters())


def test_adapter_equals_a_merge_by_hand_and_round_trips(tmp_path, sampled):
    wrapper = make_wrapper()
    lora = grpo.LoRA(wrapper.ar, rank=4, alpha=8)
    perturb(lora)
    with_adapter = wrapper.compute_logprobs(*sampled[:2])[0]
    lora.save(tmp_path, "tiny")
    merged = make_wrapper()
    weights = load_file(tmp_path / "adapter_model.safetensors")
    for key in [key for key in weights if "lora_A" in key]:
        linear = merged.ar.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
        linear.weight.data += 8 / 4 * weights[key.replace("lora_A", "lora_B")] @ weights[key]
    assert (merged.compute_logprobs(*sampled[:2])[0] - with_adapter).abs().max() < 1e-5


@pytest.mark.parametrize("how", ["peft", "transformers"])
def test_adapter_loads_elsewhere(tmp_path, sampled, how):
    """The folder a run leaves is what peft and transformers read: the same log-probs come out."""
    peft = pytest.importorskip("peft")
    wrapper = make_wrapper()
    lora = grpo.LoRA(wrapper.ar, rank=4, alpha=8)
    perturb(lora)
    lora.save(tmp_path, "tiny")
    other = make_wrapper()
    if how == "peft":
        other.ar = peft.PeftModel.from_pretrained(other.ar, str(tmp_path)).base_model.model
    else:
        other.ar.load_adapter(str(tmp_path))
    gap = (other.compute_logprobs(*sampled[:2])[0] - wrapper.compute_logprobs(*sampled[:2])[0]).abs().max()
    assert gap < 1e-5


# ------------------------------------------------------------------------------------------------------------
# Full fine-tuning, as a drop-in for grpo.LoRA


class FullWeights(torch.nn.ParameterDict):
    """All weights of the AR language model and its head, in fp32 on the CPU, where AdamW then keeps its state too.

    The model computes with roundings of them, in bf16 on a GPU. Each gradient comes over as soon as it is ready, and
    frees its place there. The reference, the model as it came, waits on the CPU: no second copy on the GPU.
    """
    def __init__(self, wrapper):
        super().__init__()
        homes, self.live, self.base = {id(t): home for t, home in wrapper.homes.get("write", [])}, {}, {}
        for name, weight in wrapper.ar.named_parameters():
            if name.startswith(("model.language_model.", "lm_head.")):
                key = name.replace(".", "/")
                self.live[key] = weight.requires_grad_(), homes.get(id(weight), weight)
                self.base[key] = weight.detach().to("cpu", copy=True)
                self[key] = torch.nn.Parameter(self.base[key].to(torch.float32, copy=True))
                weight.register_post_accumulate_grad_hook(functools.partial(self.fetch_grad, self[key]))

    def fetch_grad(self, master, weight):
        grad, weight.grad = weight.grad.to("cpu", torch.float32), None
        master.grad = grad if master.grad is None else master.grad + grad

    def push(self, source):
        for key, (weight, home) in self.live.items():
            weight.data.copy_(source[key].detach())
            home.data.copy_(source[key].detach())

    @contextlib.contextmanager
    def disabled(self):
        self.push(self.base)
        try:
            yield
        finally:
            self.push(self)

    def save(self, folder, base_model):
        torch.save({key.replace("/", "."): value for key, value in self.items()}, f"{folder}.pt")


def train_all_weights(trainer):
    """Instead of the adapters, which stay the identity."""
    trainer.lora = FullWeights(trainer.wrapper)
    trainer.optimizer = torch.optim.AdamW(trainer.lora.parameters(), lr=trainer.args.lr, weight_decay=0.0)
    trainer.optimizer.register_step_post_hook(lambda *_: trainer.lora.push(trainer.lora))
    return trainer


@pytest.mark.parametrize("offload", [False, True])
def test_full_fine_tuning_is_a_plain_step_of_adamw(tmp_path, offload):
    """Masters and gradients fetched tensor by tensor, against AdamW on the model's own fp32 weights; with a KL, so that
    the reference must be the model as it came, and two updates, so that the first must have arrived in the model."""
    argv = ["--kl-coef", "0.5", "--lr", "1e-3", "--micro-batch-size", "2", "--num-iterations", "2"]
    trainer, plain = make_trainer(tmp_path, *argv), make_wrapper(temperature=None)
    trainer.wrapper = grpo.GLMImageWrapper(trainer.wrapper.pipe, 128, 64, offload=offload)
    rollout = rollout_of(train_all_weights(trainer))
    metrics = trainer.train_step(*rollout)
    prompts, tokens, _, allowed, advantages = rollout
    weights = [p.requires_grad_() for m in (plain.ar.model.language_model, plain.ar.lm_head) for p in m.parameters()]
    optimizer, old = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.0), {}
    for _ in range(2):
        optimizer.zero_grad()
        for i in range(0, 8, 2):        # the same pairs: what is 0 but for rounding, Adam would blow up to a full step
            new, _ = plain.compute_logprobs(prompts[i:i + 2], tokens[i:i + 2], allowed[i:i + 2])
            first = old.setdefault(i, new.detach())
            loss, _ = grpo.compute_grpo_loss(new, first, advantages[i:i + 2], ref_logprobs=first, kl_coef=0.5)
            (loss / 4).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
    ours = dict(trainer.wrapper.ar.named_parameters())
    moved = 0
    for name, weight in plain.ar.named_parameters():
        assert (ours[name] - weight).abs().max() < 1e-6
        if name.startswith(("model.language_model.", "lm_head.")):
            key = name.replace(".", "/")
            assert torch.equal(ours[name], trainer.lora[key])
            moved += (weight - trainer.lora.base[key]).abs().sum()
    assert metrics["kl"] > 0 and moved > 1


def test_full_fine_tuning_adds_up_what_bf16_would_lose(tmp_path):
    """A weight of 0.02 minus 1e-6 is the same weight in bf16, a thousand times over; the masters keep count."""
    trainer = make_trainer(tmp_path, "--lr", "1e-6")
    trainer.wrapper = grpo.GLMImageWrapper(trainer.wrapper.pipe, 128, 64)
    trainer.wrapper.ar.to(torch.bfloat16)
    rollout = rollout_of(train_all_weights(trainer))
    trainer.train_step(*rollout)
    key = "model/language_model/layers/0/mlp/down_proj/weight"
    assert (trainer.lora.live[key][0] == trainer.lora.base[key]).float().mean() > 0.9      # all but the smallest
    assert (trainer.lora[key] - trainer.lora.base[key]).abs().mean().item() == pytest.approx(1e-6, rel=0.1)


# ------------------------------------------------------------------------------------------------------------
# The trainer


def gradients(trainer, rollout):
    trainer.train_step(*rollout)
    return torch.cat([p.grad.flatten() for p in trainer.lora.parameters()])


@pytest.mark.parametrize("argv", [[], ["--importance", "sequence", "--scale-rewards", "none"]])
def test_gradient_does_not_depend_on_the_micro_batch(tmp_path, argv):
    """nanochat's and others' does: each micro-batch was averaged on its own, or the last one counted alone."""
    trainer = make_trainer(tmp_path, "--lr", "0", "--max-grad-norm", "1e9", *argv)
    perturb(trainer.lora)
    rollout = rollout_of(trainer)
    grads = []
    for size in (1, 2, 8):
        trainer.args.micro_batch_size = size
        grads.append(gradients(trainer, rollout))
    assert grads[0].abs().max() > 1e-4
    assert all(torch.allclose(g, grads[2], rtol=1e-4, atol=1e-6) for g in grads)


def test_ratio_is_one_until_the_first_update(tmp_path):
    """With one update per rollout old is new: exactly 1. With two, the second sees a policy that has moved."""
    trainer = make_trainer(tmp_path, "--lr", "0.01")
    rollout = rollout_of(trainer)
    once = trainer.train_step(*rollout)
    assert once["ratio_max"] == once["ratio_mean"] == 1 and once["kl"] == 0 and once["sampler_gap"] < 1e-5
    trainer.args.num_iterations = 2
    rollout = rollout_of(trainer)
    twice = trainer.train_step(*rollout)
    assert twice["ratio_max"] > 1.001 and twice["kl"] > 0 and twice["sampler_gap"] < 1e-5


def test_truncated_sampling_starts_at_ratio_one(tmp_path):
    """With top-p the first ratio is 1, also against the sampler's own numbers, and the reference is taken under the
    same masks: at the start the KL is 0. Both fail when one of the three passes forgets them."""
    trainer = make_trainer(tmp_path, "--top-p", "0.6", "--kl-coef", "0.1", "--lr", "0.01")
    for step in range(2):
        rollout = rollout_of(trainer)
        assert (rollout[3] != 255).any()
        metrics = trainer.train_step(*rollout)
        assert metrics["ratio_max"] == metrics["ratio_mean"] == 1 and metrics["sampler_gap"] < 1e-5
        assert metrics["kl"] == 0 if step == 0 else 0 < metrics["kl"] < 1


def test_the_reference_is_the_policy_with_its_adapters_off(tmp_path):
    """With moved adapters the KL is that between the two policies already at the first update."""
    trainer = make_trainer(tmp_path, "--kl-coef", "0.1")
    perturb(trainer.lora)
    prompts, tokens, logprobs, allowed, advantages = rollout_of(trainer)
    with trainer.lora.disabled(), torch.no_grad():
        delta = trainer.wrapper.compute_logprobs(prompts, tokens)[0] - logprobs
    metrics = trainer.train_step(prompts, tokens, logprobs, allowed, advantages)
    assert metrics["kl"] == pytest.approx((delta.exp() - delta - 1).mean().item(), rel=1e-3) and metrics["kl"] > 1e-3


def test_a_gradient_that_is_no_number_reaches_no_weight(tmp_path):
    """Clipping would spread one NaN over all adapters, AdamW would keep it, and the next checkpoint replace a good one."""
    trainer = make_trainer(tmp_path)
    rollout = rollout_of(trainer)
    next(iter(trainer.lora.values())).register_hook(lambda grad: grad * math.nan)
    before = [p.detach().clone() for p in trainer.lora.values()]
    metrics = trainer.train_step(*rollout)
    assert metrics["skipped"] == 1 and math.isnan(metrics["grad_norm"])
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.lora.values())) and not trainer.optimizer.state


def test_a_skipped_update_is_counted_also_when_the_next_is_fine(tmp_path):
    """With two updates per rollout, a log of the last one alone would hide it."""
    trainer, calls = make_trainer(tmp_path, "--num-iterations", "2"), []
    rollout = rollout_of(trainer)
    next(iter(trainer.lora.values())).register_hook(lambda grad: calls.append(1) or (grad * math.nan if len(calls) < 3 else grad))
    metrics = trainer.train_step(*rollout)          # two micro-batches an update
    assert metrics["skipped"] == 1 and math.isnan(metrics["grad_norm"])
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {1}


def test_settings_reach_the_update(tmp_path, monkeypatch):
    """A flag that is parsed and then forgotten looks like a flag that does not help."""
    argv = ["--clip-range", "0.3", "--clip-range-high", "0.4", "--kl-coef", "0.5", "--importance", "sequence",
            "--scale-rewards", "none", "--num-iterations", "3", "--max-grad-norm", "1e-3", "--lora-rank", "2"]
    trainer, calls, loss_function = make_trainer(tmp_path, *argv), [], grpo.compute_grpo_loss
    monkeypatch.setattr(grpo, "compute_grpo_loss", lambda *a, **k: calls.append(a[3:]) or loss_function(*a, **k))
    monkeypatch.setitem(grpo.REWARDS, "color", lambda images, *_: torch.arange(len(images)))
    rollout = rollout_of(trainer)
    metrics = trainer.train_step(*rollout)
    assert rollout[4].tolist() == [-1.5, -.5, .5, 1.5] * 2
    assert len(calls) == 3 * 2 and all(a[:2] == (0.3, 0.4) and a[2].shape == (4, 10) and a[3:] == (0.5, "sequence") for a in calls)
    norm = torch.cat([p.grad.flatten() for p in trainer.lora.parameters()]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-2) and metrics["grad_norm"] > 1e-2
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {3}
    assert all(min(p.shape) == 2 for p in trainer.lora.parameters())


def test_the_gap_between_sampler_and_trainer_is_measured(tmp_path):
    trainer = make_trainer(tmp_path)
    rollout = rollout_of(trainer)
    rollout[2][5, 3] += 0.1
    assert trainer.train_step(*rollout)["sampler_gap"] == pytest.approx(0.1, rel=1e-3)


def test_a_model_whose_layers_have_other_names_is_refused(monkeypatch):
    """Another model and the old TARGETS: torch would say that the optimizer got an empty parameter list."""
    monkeypatch.setattr(grpo.LoRA, "TARGETS", "elsewhere")
    with pytest.raises(grpo.Trouble, match="elsewhere"):
        grpo.LoRA(torch.nn.Linear(2, 2), rank=1, alpha=1)


def test_lora_starts_from_the_seed(tmp_path):
    """Also for a model that was loaded, where nothing else has seeded the generator."""
    wrapper = make_wrapper()
    args = grpo.parse_args(["--model", "tiny", "--out", str(tmp_path), "--seed", "5"])
    weights = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        weights.append(torch.cat([p.flatten() for p in grpo.GRPOTrainer(args, wrapper, [], []).lora.parameters()]))
    assert torch.equal(*weights) and weights[0].abs().sum() > 0


def test_prompts_rewards_and_tokens_stay_in_one_order(tmp_path, monkeypatch):
    """A reward that reads the prompt must meet the image of that prompt: p0 p0 .. p1 p1 .. through all of it."""
    trainer = make_trainer(tmp_path)
    seen = {}

    def spy(images, prompts, targets):
        seen.update(prompts=prompts, targets=[target.getpixel((0, 0))[0] for target in targets])
        return torch.arange(len(images))

    monkeypatch.setitem(grpo.REWARDS, "color", spy)
    queue = torch.randperm(3, generator=torch.Generator().manual_seed(trainer.args.seed)).tolist()
    prompts, tokens, logprobs, _, rewards, metrics = trainer.rollout()
    assert prompts == seen["prompts"] == [trainer.prompts[i] for i in queue[:2] for _ in range(4)]
    assert seen["targets"] == [i for i in queue[:2] for _ in range(4)]
    assert torch.equal(rewards, torch.arange(8.))
    with torch.no_grad():
        again, _ = trainer.wrapper.compute_logprobs(prompts, tokens)
    assert (again - logprobs).abs().max() < 1e-5 and metrics["reward"] == 3.5 and metrics["frac_zero_std"] == 0


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(*flags) is a trainer as the command prepares it, on three prompts and the random toy, in tmp_path / "a"."""
    monkeypatch.setattr(grpo, "make_tiny_pipeline", lambda seed=0: make_tiny_pipeline(seed, warmup_steps=0))
    (tmp_path / "p.txt").write_text("a red fox\nsome yellow thing here\ngreen\n")
    fixed = f"--model tiny --size 64x128 --decode-steps 1 --eval-decode-steps 1 --batch-size 2 --sample-every 2 --steps 4 " \
            f"--prompts {tmp_path}/p.txt --out {tmp_path}/a"

    def begin(*argv):
        torch.manual_seed(time.time_ns())       # no two processes are in the same random state
        return grpo.prepare(grpo.parse_args([*argv] if "--resume" in argv else [*fixed.split(), *argv]))

    return begin


def rows_of(out):
    """metrics.jsonl without what the clock says."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if not key.startswith(("sec_", "tokens_per_sec"))} for row in rows]


def assert_same_run(one, other):
    """Weights, Adam's moments, metrics and pictures: bit for bit."""
    states = [torch.load(out / "checkpoint.pt", weights_only=True) for out in (one, other)]
    for a, b in zip(*(state["adapter"].values() for state in states), strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0
    moments = [[m for state in run["optimizer"]["state"].values() for m in state.values()] for run in states]
    assert all(torch.equal(a, b) for a, b in zip(*moments, strict=True))
    assert rows_of(one) == rows_of(other) and [row["step"] for row in rows_of(one)] == list(range(1, len(rows_of(one)) + 1))
    names = [sorted(path.name for path in (out / "samples").iterdir()) for out in (one, other)]
    assert names[0] == names[1]
    assert all((one / "samples" / n).read_bytes() == (other / "samples" / n).read_bytes() for n in names[0])


def test_resume_is_bit_for_bit(start, tmp_path, monkeypatch):
    """4 steps = 2 steps, a new process, 2 steps: weights, Adam's moments, data order, metrics, pictures, and a reward
    that draws random numbers. The extra lines stand for a step logged after the checkpoint, the last one torn."""
    monkeypatch.setitem(grpo.REWARDS, "color", lambda images, *_: torch.rand(len(images)))
    start().train()
    start("--out", f"{tmp_path}/b", "--steps", "2").train()
    with open(tmp_path / "b/metrics.jsonl", "a") as file:
        file.write('{"step": 3, "reward": 99.0}\n{"step": 4, "rew')
    start("--resume", f"{tmp_path}/b", "--steps", "4").train()
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_progress_shows_before_half_way_now_and_the_curve(tmp_path):
    """Two by two: the first, middle and last picture by number, not by age, and a curve that ends high where rewards do."""
    for color, step in (("red", 0), ("lime", 10), ("blue", 20), ("cyan", 30), ("black", 100)):
        Image.new("RGB", (300, 200), color).save(tmp_path / f"step_{step:05d}.png")
    picture = grpo.draw_progress(sorted(tmp_path.glob("*.png")), [0.1, 0.2, 0.3, 0.9])
    w, h = picture.width // 2, picture.height // 2
    assert (w, h) == (304, 247)         # the letters are a twentieth of the width, their margin three of them
    assert [picture.getpixel(at) for at in ((100, 100), (w + 100, 100), (100, h + 100))] == [(255, 0, 0), (0, 0, 255), (0, 0, 0)]
    curve = np.array(picture.crop((w + 2, h + 2, 2 * w - 2, h + 202))).astype(int)
    red = [(x, y) for y, x in zip(*np.where((curve[..., 0] > 150) & (curve[..., 1] < 100)))]
    assert min(red)[1] > 180 > 20 > max(red, key=lambda at: (at[0], -at[1]))[1]


def test_kept_pictures_have_their_own_number_of_steps(tmp_path, monkeypatch):
    trainer, steps = make_trainer(tmp_path, "--eval-decode-steps", "3", "--micro-batch-size", "2"), []
    decode = trainer.wrapper.decode
    monkeypatch.setattr(trainer.wrapper, "decode", lambda p, t, s, decode_steps, micro_batch_size: steps.append(
        (decode_steps, micro_batch_size)) or decode(p, t, s, decode_steps, micro_batch_size))
    trainer.rollout()
    trainer.save_samples()
    assert steps == [(1, 2), (3, 2)]


def test_every_prompt_gets_its_turn(tmp_path):
    """A step takes different prompts; more than there are, each equally often."""
    trainer = make_trainer(tmp_path)
    assert len(set(trainer.rollout()[0])) == 2
    trainer.args.batch_size = 6
    prompts = trainer.rollout()[0]
    assert {prompts.count(p) for p in trainer.prompts} == {2 * 4}


def test_fixed_pictures_use_fixed_seeds(tmp_path):
    """Untrained, twice: the same file; the randomness of training in between must not show."""
    trainer = make_trainer(tmp_path)
    trainer.save_samples()
    first = (tmp_path / "samples/step_00000.png").read_bytes()
    trainer.rollout()
    trainer.save_samples()
    assert (tmp_path / "samples/step_00000.png").read_bytes() == first


def test_a_checkpoint_is_data_and_never_code(tmp_path):
    """A pickle that would create a file when loaded is refused, and creates none."""
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "owned",)

    trainer = make_trainer(tmp_path)
    torch.save({"step": 1, "adapter": Bomb()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError):
        trainer.load_checkpoint(tmp_path / "checkpoint.pt")
    assert not (tmp_path / "owned").exists()


def test_only_three_settings_may_change_on_resume(start, tmp_path):
    """A learning rate that changes half-way makes a run that no command describes. What differs is named."""
    start("--steps", "1").train()
    for flag, value in (("--lr", "1e-6"), ("--model", "other"), ("--reward", "jpeg"), ("--seed", "1"), ("--out", "elsewhere")):
        with pytest.raises(grpo.Trouble, match=f"^--resume keeps {flag} "):
            start("--resume", f"{tmp_path}/a", flag, value)
    trainer = start("--resume", f"{tmp_path}/a", "--steps", "2", "--save-every", "3", "--sample-every", "5", "--lr", "2e-3")
    assert (trainer.args.steps, trainer.args.save_every, trainer.args.sample_every, trainer.args.lr) == (2, 3, 5, 2e-3)
    assert len(trainer.history) == 1


def test_a_finished_run_is_not_resumed(start, tmp_path):
    start("--steps", "1").train()
    with pytest.raises(grpo.Trouble, match="finished.*--steps"):
        start("--resume", f"{tmp_path}/a")


def test_an_adapter_to_begin_with(start, tmp_path):
    """--init-adapter: a new run whose first weights are those of an adapter folder; its reference is still the base
    model, so that the KL is there from the first step, and Adam begins anew."""
    first = start("--lr", "0.05", "--steps", "3")
    first.train()
    second = start("--out", f"{tmp_path}/b", "--init-adapter", f"{tmp_path}/a/adapter")
    assert all(torch.equal(a, b) for a, b in zip(first.lora.parameters(), second.lora.parameters()))
    assert second.history == [] and not second.optimizer.state
    rollout = rollout_of(second)
    assert second.train_step(*rollout)["kl"] > 1e-4
    for flags, word in ((["--lora-alpha", "8"], "alpha"), (["--lora-rank", "4"], "rank")):
        with pytest.raises(grpo.Trouble, match=word):
            start("--out", f"{tmp_path}/c", "--init-adapter", f"{tmp_path}/a/adapter", *flags)
    (tmp_path / "a/adapter/adapter_model.safetensors").write_bytes(b"not safe, no tensors")
    with pytest.raises(grpo.Trouble, match="--init-adapter"):
        start("--out", f"{tmp_path}/c", "--init-adapter", f"{tmp_path}/a/adapter")
    assert not (tmp_path / "c").exists()


def test_the_log_shows_raw_rewards_also_under_group_norm(start):
    """The mean of z-scores is 0 whatever is learned: a log of that, and a curve of it, would say nothing."""
    trainer = start("--reward", "color=1,jpeg=0.5", "--reward-norm", "group")
    *_, rewards, metrics = trainer.rollout()
    assert metrics["reward"] == pytest.approx(metrics["reward/color"] + 0.5 * metrics["reward/jpeg"]) and metrics["reward"] > 0.1
    assert rewards.view(2, 4).mean(1).abs().max() < 1e-5 and metrics["reward_std/jpeg"] > 0


def test_three_gradients_that_are_no_numbers_end_the_run(start, tmp_path):
    """One is skipped and counted, and leaves no trace; after three in a row more would be a waste of days."""
    trainer, bad = start("--steps", "9", "--lr", "0.01"), [False, True, True, False, True, True, True]
    next(iter(trainer.lora.values())).register_hook(lambda grad: grad * math.nan if bad[len(trainer.history)] else grad)
    with pytest.raises(grpo.Trouble, match=r"not finite, since \[\(2, 'grad_norm', nan\)\]"):
        trainer.train()
    assert [row["skipped"] for row in trainer.history] == bad
    assert all(p.isfinite().all() for p in trainer.lora.parameters()) and len(rows_of(tmp_path / "a")) == 7
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {2}


def test_nothing_to_learn_is_said(start, tmp_path, monkeypatch, capsys):
    """All rewards equal: no error, no progress, and a user who wonders. Once in ten steps, not at each."""
    monkeypatch.setitem(grpo.REWARDS, "color", lambda images, *_: [0.5] * len(images))
    trainer = start("--steps", "12")
    trainer.train()
    assert capsys.readouterr().out.count("warning: ") == 1 and trainer.history[-1]["frac_zero_std"] == 1


def test_a_reward_that_fails_loses_no_step(start, tmp_path, monkeypatch, capsys):
    """It fails in the fourth step; the checkpoint is that of the third, although --save-every would have lost them all.
    Mended, the run goes on to the bit as if nothing had happened."""
    fixed = ["--save-every", "99", "--sample-every", "99"]
    start("--out", f"{tmp_path}/b", *fixed).train()
    trainer, color = start(*fixed), grpo.reward_color
    with monkeypatch.context() as patch:
        patch.setitem(grpo.REWARDS, "color", lambda *args: color(*args) if len(trainer.history) != 3 else 1 / 0)
        patch.setattr(grpo, "prepare", lambda args: trainer)
        with pytest.raises(SystemExit) as stop:
            grpo.main([])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and lines[-1].startswith("grpo.py: error: --reward color: ZeroDivisionError")
    assert torch.load(tmp_path / "a/checkpoint.pt", weights_only=True)["step"] == 3
    start("--resume", f"{tmp_path}/a").train()
    assert_same_run(tmp_path / "b", tmp_path / "a")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_one_line_and_spares_the_old_checkpoint(start, tmp_path, monkeypatch, capsys):
    """The new one is written beside it; that write fails, as on a full disk, and is never renamed."""
    def fill(images, *_):
        if len(trainer.history) == 2:
            (tmp_path / "a/checkpoint.tmp").symlink_to("/dev/full")
        return torch.rand(len(images))

    trainer = start("--save-every", "1", "--sample-every", "99")
    monkeypatch.setitem(grpo.REWARDS, "color", fill)
    monkeypatch.setattr(grpo, "prepare", lambda args: trainer)
    with pytest.raises(SystemExit) as stop:
        grpo.main([])
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and lines[-1].startswith("grpo.py: error: ") and "No space left" in lines[-1]
    assert torch.load(tmp_path / "a/checkpoint.pt", weights_only=True)["step"] == 2


def test_out_of_gpu_memory_is_one_line(start, monkeypatch):
    trainer = start()

    def no_room(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...")

    monkeypatch.setattr(trainer.wrapper, "sample", no_room)
    monkeypatch.setattr(grpo, "prepare", lambda args: trainer)
    with pytest.raises(SystemExit) as stop:
        grpo.main([])
    assert re.search("--offload on.*--group-size.*--size", stop.value.code) and "\n" not in stop.value.code


# ------------------------------------------------------------------------------------------------------------
# Processes: several GPUs (here of the CPU), signals, kills


QUICK = f"""
import io, os, random, signal, sys, threading, time, torch
sys.path.insert(0, {str(HERE)!r})
import grpo
toy = grpo.make_tiny_pipeline
grpo.make_tiny_pipeline = lambda seed=0: toy(seed, warmup_steps=0)
"""
SMALL = """--model tiny --size 64 --decode-steps 1 --eval-decode-steps 1 --batch-size 2 --group-size 2 --micro-batch-size 2
    --kl-coef 0.1""".split()


class Runs:
    """Runs of the random toy in processes of their own, in `folder`."""
    def __init__(self, folder):
        self.folder = Path(folder)

    def begin(self, *argv, ranks=0, extra="", flags=SMALL):
        """-> a process; `extra` is Python to run before `main`. One thread each, or sums would differ."""
        script = self.folder / f"run_{time.time_ns()}.py"
        script.write_text(QUICK + extra + "\ngrpo.main()\n")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else ["-u"]
        return subprocess.Popen(
            [sys.executable, *torchrun, str(script), *([] if "--resume" in argv else flags), *argv], cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def run(self, *argv, code=0, **settings):
        """-> what a process that ends with this code wrote to stdout and stderr."""
        process = self.begin(*argv, **settings)
        out, err = process.communicate(timeout=120)
        assert code is None or process.returncode == code, err
        return out, err


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path)


def test_two_gpus_do_what_one_does(runs, tmp_path):
    """Three steps on one GPU = two steps on two GPUs and, resumed, one step on one: weights and metrics. With batch
    scaling and two updates, so that rewards, gradients and metrics must all have crossed over. One of them writes."""
    flags = [*SMALL, "--scale-rewards", "batch", "--num-iterations", "2", "--max-grad-norm", "1e-3", "--lr", "1e-3"]
    one = runs.begin("--out", "one", "--steps", "3", flags=flags)
    two, _ = runs.run("--out", "two", "--steps", "2", ranks=2, flags=flags)
    assert two.count("2 prompts x 2 images = 4 images a step, 2 a rank, 1 micro-batches of 2") == 1
    assert two.count("\nstep ") == 2 and two.count("pictures and curve") == 1
    runs.run("--resume", "two", "--steps", "3")
    one.communicate(timeout=120)
    states = [torch.load(tmp_path / out / "checkpoint.pt", weights_only=True) for out in ("one", "two")]
    for a, b in zip(*(state["adapter"].values() for state in states), strict=True):
        assert (a - b).abs().max() < 1e-5
    for a, b in zip(*(rows_of(tmp_path / out) for out in ("one", "two")), strict=True):
        assert a == pytest.approx({key: b[key] for key in a}, rel=1e-3, abs=1e-5)


def test_a_gpu_that_dies_ends_the_run_on_all(runs, tmp_path):
    """Within a minute, and it is its own error that is shown, not that of those who waited for it."""
    start = time.monotonic()
    _, err = runs.run("--out", "run", "--steps", "99", ranks=2, code=1, extra="""
def dies(self, update=grpo.GRPOTrainer.update):
    if grpo.RANK == 1 and len(self.history) == 2:
        raise RuntimeError("this card has fallen off the bus")
    return update(self)
grpo.GRPOTrainer.update = dies""")
    assert "this card has fallen off the bus" in err and time.monotonic() - start < 60
    assert torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["step"] == 0


def test_a_reward_that_fails_on_another_gpu_loses_no_step(runs, tmp_path):
    """Seven of eight GPUs do not write checkpoints; the first one must, when one of those fails."""
    (tmp_path / "own.py").write_text("""
import grpo
calls = []
def fails(images, *_):
    calls.append(1)
    return [0.5] * len(images) if grpo.RANK == 0 or len(calls) < 3 else 1 / 0
""")
    _, err = runs.run("--out", "run", "--steps", "9", "--reward", "own.py:fails", ranks=2, code=1)
    assert "ZeroDivisionError" in err and "another GPU has failed" in err
    assert torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["step"] == 2


def wait_for(process, text):
    """Reads what the process prints up to this text; -> what it has printed."""
    seen = ""
    while text not in seen:
        line = process.stdout.readline()
        assert line, seen + process.stderr.read()
        seen += line
    return seen


@pytest.mark.parametrize("name, code", [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_ends_the_step_and_saves(runs, tmp_path, name, code):
    """Ctrl-C, or the machine is taken away: the checkpoint is that of the last step printed, the line says how to go
    on, and going on gives what an undisturbed run gives."""
    every = ["--steps", "5000", "--save-every", "5000", "--sample-every", "5000"]
    process, whole = runs.begin("--out", "run", *every), name == "SIGINT" and runs.begin("--out", "whole", *every)
    seen = wait_for(process, "step 3 ")
    process.send_signal(getattr(signal, name))
    rest, err = process.communicate(timeout=60)
    assert process.returncode == code and "Traceback" not in err
    steps = [int(n) for n in re.findall(r"^step (\d+)", seen + rest, re.MULTILINE)]
    assert f"stopped after step {steps[-1]}: --resume run goes on" in rest
    assert torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["step"] == steps[-1]
    if whole:
        runs.run("--resume", "run", "--steps", str(steps[-1] + 2))
        wait_for(whole, f"step {steps[-1] + 2} ")
        whole.kill()
        assert rows_of(tmp_path / "run") == rows_of(tmp_path / "whole")[:steps[-1] + 2]


def test_the_second_signal_stops_at_once(runs, tmp_path):
    """A step can take minutes; who presses twice does not want to wait."""
    (tmp_path / "slow.py").write_text("import time\ndef slow(images, *_):\n    print('scoring', flush=True)\n    time.sleep(60)\n")
    process = runs.begin("--out", "run", "--reward", "slow.py:slow")
    wait_for(process, "scoring")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert process.wait(timeout=5) == -signal.SIGINT


KILLS = {       # where a process dies: after so many seconds of training, or in its n-th save
    "timer": """
def train(self, train=grpo.GRPOTrainer.train):
    threading.Timer(random.uniform(0, WHEN / 9), os.kill, (os.getpid(), signal.SIGKILL)).start()
    train(self)
grpo.GRPOTrainer.train = train""",
    "half a checkpoint": """
def half(state, file, save=torch.save, calls=[]):
    calls.append(1)
    if len(calls) < WHEN:
        return save(state, file)
    save(state, whole := io.BytesIO())
    file.write(whole.getvalue()[:len(whole.getvalue()) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
torch.save = half""",
    "before the renaming": """
def dies(self, target, replace=grpo.Path.replace, calls=[]):
    calls.append(1)
    if len(calls) >= WHEN:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)
grpo.Path.replace = dies""",
    "half an adapter": """
def dies(weights, path, save=grpo.save_file, calls=[]):
    save(weights, path)
    calls.append(1)
    if len(calls) >= WHEN:
        path.write_bytes(path.read_bytes()[:1000])
        os.kill(os.getpid(), signal.SIGKILL)
grpo.save_file = dies""",
    "half a line of the log": """
def keep(self, keep=grpo.GRPOTrainer.keep, calls=[]):
    calls.append(1)
    if len(calls) > WHEN:
        with open(self.out / "metrics.jsonl", "a") as file:
            file.write(grpo.json.dumps(self.history[-1])[:40])
        os.kill(os.getpid(), signal.SIGKILL)
    keep(self)
grpo.GRPOTrainer.keep = keep"""}


def faults(folder, kills, steps, seed=0, say=lambda text: None):
    """A run of some steps, killed again and again and resumed each time, against an undisturbed one."""
    runs, rng, saved = Runs(folder), random.Random(seed), None
    every = ["--steps", str(steps), "--save-every", "1", "--sample-every", "5"]
    whole = runs.begin("--out", "whole", *every)
    for done in range(1, kills + 1):
        kind, when = list(KILLS)[done % len(KILLS)], rng.randint(1, 3)
        process = runs.begin(*(["--resume", "run"] if saved is not None else ["--out", "run", *every]),
                             extra=KILLS[kind].replace("WHEN", str(when)))
        _, err = process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL, err
        if (runs.folder / "run/checkpoint.pt").exists():
            saved = torch.load(runs.folder / "run/checkpoint.pt", weights_only=True)["step"]
        say(f"kill {done:2d} of {kills}: {kind} ({when}); the checkpoint holds step {saved}")
    runs.run("--resume", "run")
    whole.communicate(timeout=120)
    assert_same_run(runs.folder / "whole", runs.folder / "run")
    assert len(rows_of(runs.folder / "run")) == steps and 0 < saved < steps
    say(f"{kills} kills, {steps} steps: weights, optimizer, metrics.jsonl and pictures are those of an undisturbed run")


def test_kill_nine_at_any_moment(tmp_path):
    """The short form of `python test_grpo.py --faults`: one kill of each kind, also inside the saves."""
    faults(tmp_path, kills=len(KILLS), steps=12)


# ------------------------------------------------------------------------------------------------------------
# The command


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The README's command, as a user runs it: its own process, another working directory, every default."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, str(HERE / "grpo.py"), "--group-size", "4", "--model", "tiny", "--out", "out"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "out", done.stdout


METRICS = """step loss reward reward_std reward/color frac_zero_std kl ratio_mean ratio_max clip_frac entropy grad_norm
    sampler_gap lr sec_rollout sec_decode sec_reward sec_update tokens_per_sec peak_gib""".split()


def test_what_a_run_leaves(run):
    out, stdout = run
    for name in ("args.json", "grpo.py", "metrics.jsonl", "samples/step_00000.png", "samples/step_00010.png",
                 "samples/step_00040.png", "progress.png", "adapter/adapter_model.safetensors",
                 "adapter/adapter_config.json", "checkpoint.pt"):
        assert (out / name).stat().st_size > 0, name
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41)) and all(set(METRICS) <= set(row) for row in rows)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert (out / "grpo.py").read_bytes() == (HERE / "grpo.py").read_bytes()
    assert stdout.startswith("model: tiny") and "progress.png" in stdout and "load_adapter" in stdout
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    assert {"adapter", "optimizer", "step", "args"} <= set(state) and state["step"] == 40


def test_it_learns(run):
    """The promise of the README: the last five steps beat the first five by far more than luck."""
    rewards = [json.loads(line)["reward"] for line in (run[0] / "metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.15


def test_every_fixed_prompt_gets_closer_to_its_colour(run):
    """Read from the pictures themselves, not from the log: each cell of the grid, before and after."""
    prompts, _ = grpo.load_prompts(HERE / "prompts.txt")
    sheets = [Image.open(run[0] / "samples" / name) for name in ("step_00000.png", "step_00040.png")]
    for i, prompt in enumerate(prompts[:8]):
        x, y = i % 4 * 132 + 2, i // 4 * 164 + 2
        before, after = grpo.reward_color([sheet.crop((x, y, x + 128, y + 128)) for sheet in sheets], [prompt] * 2)
        assert after > before + 0.05, prompt


def test_resume_from_the_command_line(run, monkeypatch, tmp_path):
    """--resume takes every setting from the folder, and goes on where the checkpoint was written."""
    monkeypatch.setattr(grpo, "make_tiny_pipeline", lambda seed=0: make_tiny_pipeline(seed, warmup_steps=0))
    out = shutil.copytree(run[0], tmp_path / "copy")
    args = grpo.parse_args(["--resume", str(out)])
    assert args.group_size == 4 and args.reward == {"color": 1.0} and args.size == [128, 128] and args.out == str(out)
    grpo.main(["--resume", str(out), "--steps", "41"])
    before, after = ((folder / "metrics.jsonl").read_text() for folder in (run[0], out))
    assert after.startswith(before) and [json.loads(line)["step"] for line in after[len(before):].splitlines()] == [41]


BAD = [     # what is typed, and a word of the one line that answers
    (["--prompts", "missing.txt"], "missing.txt"), (["--prompts", "empty.txt"], "no prompt"),
    (["--prompts", "comments.txt"], "no prompt"), (["--prompts", "."], "directory"),
    (["--prompts", "latin1.txt"], "utf-8"), (["--prompts", "long.txt"], "10,000 characters"),
    (["--prompts", "lost.txt"], "lost.png"), (["--prompts", "text.txt"], "empty.txt"), (["--group-size", "1"], "--group-size"),
    (["--group-size", "four"], "--group-size"), (["--size", "100"], "multiples of 32"), (["--size", "0"], "32"),
    (["--size", "-64"], "32"), (["--size", "64x"], "--size"), (["--size", "big"], "--size"), (["--size", "64x128x256"], "--size"),
    (["--batch-size", "0"], "--batch-size"), (["--micro-batch-size", "5"], "micro-batches"),
    (["--micro-batch-size", "64"], "micro-batches"), (["--lr", "nan"], "--lr"), (["--lr", "-1"], "--lr"),
    (["--kl-coef", "-1"], "--kl-coef"), (["--clip-range", "inf"], "--clip-range"), (["--clip-range-high", "-1"], "--clip-range-high"),
    (["--temperature", "0"], "--temperature"), (["--temperature", "nan"], "--temperature"), (["--steps", "0"], "--steps"),
    (["--save-every", "0"], "--save-every"), (["--seed", "-1"], "--seed"), (["--lora-rank", "0"], "--lora-rank"),
    (["--top-p", "0"], "--top-p"), (["--top-p", "1.5"], "--top-p"), (["--offload", "maybe"], "--offload"),
    (["--eval-decode-steps", "0"], "--eval-decode-steps"), (["--scale-rewards", "std"], "--scale-rewards"),
    (["--reward-norm", "batch"], "--reward-norm"), (["--grop-size", "4"], "--grop"),
    (["--reward", "beauty"], "color, jpeg, mse"), (["--reward", "color=much"], "--reward"), (["--reward", "color=nan"], "--reward"),
    (["--reward", ""], "--reward"), (["--reward", "mse"], "target"), (["--reward", "nowhere.py:sharp"], "nowhere.py"),
    (["--reward", "mine.py:dull"], "dull"), (["--reward", "broken.py:sharp"], "SyntaxError"), (["--reward", "mine.py"], "file.py:function"),
    (["--model", "folder"], "--model tiny"), (["--model", "hollow"], "--model tiny"), (["--model", "no-such/model"], "--model tiny"),
    (["--init-adapter", "folder"], "folder"), (["--init-adapter", "torn"], "torn"),
    (["--resume", "nowhere"], "holds no run"), (["--resume", "folder"], "checkpoint.pt"), (["--resume", "broken"], "broken"),
    (["--resume", "headless"], "optimizer"), (["--resume", "other"], "size mismatch"), (["--resume", "list"], "list"),
    (["--resume", "moved"], "prompts"), (["--resume", "done"], "finished"),
    (["--out", "broken"], "--resume"), (["--out", "empty.txt/run"], "empty.txt"),
]


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory):
    """All that BAD names, in a folder."""
    folder = tmp_path_factory.mktemp("bad")
    for name in ("folder", "hollow", "torn", "broken", "headless", "other", "list", "moved", "done"):
        (folder / name).mkdir()
    texts = {"empty.txt": "", "comments.txt": "# only\n\n", "long.txt": "red\n" + 100_000 * "very " + "red\n", "broken.py": "def sharp(",
             "lost.txt": "a red fox\tlost.png\n", "text.txt": "a red fox\tempty.txt\n", "mine.py": "def sharp(images, *_): return [1.] * len(images)",
             "good.txt": "a red fox\n", "hollow/model_index.json": "{}", "torn/adapter_model.safetensors": "no tensors",
             "torn/adapter_config.json": '{"r": 16, "lora_alpha": 32.0}', "broken/checkpoint.pt": "no checkpoint"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin1.txt").write_bytes(b"caf\xe9\n")
    args = grpo.parse_args(["--model", "tiny", "--prompts", str(folder / "good.txt"), "--steps", "1"])
    trainer = grpo.GRPOTrainer(args, make_wrapper(), ["a red fox"], [None])
    trainer.out = folder / "done"
    trainer.history = [{"step": 1}]
    trainer.save_checkpoint()
    state = torch.load(folder / "done/checkpoint.pt", weights_only=True)
    torch.save({key: state[key] for key in state if key != "optimizer"}, folder / "headless/checkpoint.pt")
    torch.save({**state, "adapter": {key: value[:1] for key, value in state["adapter"].items()}}, folder / "other/checkpoint.pt")
    torch.save([1, 2, 3], folder / "list/checkpoint.pt")
    torch.save({**state, "prompts": ["another"]}, folder / "moved/checkpoint.pt")
    return folder


@pytest.mark.parametrize("argv, word", BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_input_gets_one_line_and_exit_code_2(bad_files, monkeypatch, capsys, argv, word):
    """No traceback, nothing written, no model loaded in vain where that can be known before."""
    monkeypatch.chdir(bad_files)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(grpo, "make_tiny_pipeline", lambda seed=0: make_tiny_pipeline(seed, warmup_steps=0))
    before = sorted(bad_files.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        grpo.main(["--model", "tiny", *argv] if "--model" not in argv and "--resume" not in argv else argv)
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert stop.value.code == 2 and len(lines) == 1 and lines[0].startswith("grpo.py: error: ") and word in lines[0]
    assert sorted(bad_files.rglob("*")) == before       # nothing is written before all is known to be good


@pytest.mark.parametrize("ranks, batch_size", [(3, 8), (8, 4), (2, 6)])
def test_torchrun_arithmetic_that_does_not_divide(monkeypatch, capsys, ranks, batch_size):
    """8 prompts on 3 GPUs, 4 on 8, and 3 prompts x 4 images in micro-batches of 8: said before the model is loaded."""
    monkeypatch.setattr(grpo, "WORLD", ranks)
    monkeypatch.setattr(grpo, "make_tiny_pipeline", lambda seed: pytest.fail("the model was loaded first"))
    args = grpo.parse_args(["--model", "tiny", "--batch-size", str(batch_size), "--micro-batch-size", "8" if ranks == 2 else "1"])
    with pytest.raises(grpo.Trouble, match=f"/ {ranks} GPUs: no micro-batches"):
        grpo.prepare(args)


@pytest.mark.parametrize("how", ["a file in the way", "no permission"])
def test_unwritable_out_is_found_before_the_model_is_loaded(tmp_path, monkeypatch, capsys, how):
    """Not after 35 GB of it: a folder that takes no files is bad input like any other."""
    (tmp_path / "file").touch()
    if how == "no permission":      # root, who runs some machines' tests, may write anywhere
        monkeypatch.setattr(grpo.os, "access", lambda path, mode: False)
    monkeypatch.setattr(grpo, "make_tiny_pipeline", lambda seed: pytest.fail("the model was loaded first"))
    out = tmp_path / ("file/run" if how == "a file in the way" else "new/run")
    with pytest.raises(SystemExit) as stop:
        grpo.main(["--model", "tiny", "--out", str(out)])
    assert stop.value.code == 2 and "--out: cannot write into" in capsys.readouterr().err and not out.exists()


def test_settings_reach_the_wrapper(tmp_path, monkeypatch):
    """And so does what is not given: None is the model's own, and without a GPU "auto" offloads nothing."""
    seen = []

    def stop(path, dtype, seed, **settings):
        seen.append({"path": path, "seed": seed, **settings})
        raise grpo.Trouble("seen")

    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", stop)
    flags = "--top-p 0.5 --temperature 0.7 --guidance 2 --size 64x96 --offload on --seed 3"
    for argv in (flags.split(), []):
        with pytest.raises(SystemExit):
            grpo.main(["--model", "tiny", "--out", str(tmp_path / "run"), *argv])
    same = dict(path="tiny", device="cuda" if torch.cuda.is_available() else "cpu")
    assert seen[0] == dict(same, seed=3, height=96, width=64, temperature=0.7, top_p=0.5, guidance=2.0, offload=True)
    assert seen[1] == dict(same, seed=0, height=128, width=128, temperature=None, top_p=None, guidance=1.5,
                           offload=torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 60 * 2**30)


# ------------------------------------------------------------------------------------------------------------
# The code on the README's page, run as it stands


def readme_code(name):
    """The block of code whose first line is `# name`."""
    blocks = re.findall(r"```python\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n") or name in block.splitlines()[0])


def test_own_reward_of_the_readme_works_from_any_directory(runs, tmp_path):
    """By a path relative to where the command is given, and again from elsewhere with --resume."""
    (tmp_path / "sharp.py").write_text(readme_code("sharp.py"))
    (tmp_path / "deeper").mkdir()
    runs.run("--steps", "1", "--out", "run", "--reward", "color=1,sharp.py:sharpness=2")
    runs.folder = tmp_path / "deeper"
    runs.run("--resume", "../run", "--steps", "2")
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2] and all(0 < row["reward/sharp.py:sharpness"] < 1 for row in rows)
    assert all(row["reward"] == pytest.approx(row["reward/color"] + 2 * row["reward/sharp.py:sharpness"]) for row in rows)


def test_two_rewards_of_a_file_share_what_it_loads(start, tmp_path):
    """A file that is run once for each of its rewards would load its model twice."""
    (tmp_path / "two.py").write_text("import itertools\ncount = itertools.count()\n"
                                     "def a(images, *_): return [next(count) for _ in images]\nb = a\n")
    trainer = start("--reward", f"{tmp_path}/two.py:a=1,{tmp_path}/two.py:b=1")
    *_, metrics = trainer.rollout()
    assert metrics["reward/two.py:b"] == metrics["reward/two.py:a"] + 8


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """my_rewards.py of the README as a module."""
    path = tmp_path_factory.mktemp("gallery") / "my_rewards.py"
    path.write_text(readme_code("my_rewards.py"))
    spec = importlib.util.spec_from_file_location("my_rewards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory):
    """A CLIP of random weights that reads letters, saved to a folder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    half = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.CLIPConfig(
        text_config=dict(half, vocab_size=99, bos_token_id=0, eos_token_id=1, pad_token_id=1),
        vision_config=dict(half, image_size=32, patch_size=16), projection_dim=16)
    transformers.CLIPModel(config).save_pretrained(folder)
    letters = [c + end for c in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    words = {word: i for i, word in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    transformers.CLIPProcessor(images, transformers.CLIPTokenizer(vocab=words, merges=[])).save_pretrained(folder)
    return str(folder)


PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]


def test_clip_is_the_cosine_by_hand(gallery, tiny_clip, monkeypatch):
    """Each pair alone, through the model's two towers: no softmax, no logit scale, no other prompt's padding."""
    monkeypatch.setattr(gallery, "CLIP", tiny_clip)
    model, processor = transformers.CLIPModel.from_pretrained(tiny_clip), transformers.AutoProcessor.from_pretrained(tiny_clip)
    prompts = ["a red fox on a long long wall", "blue"]
    for got, image, prompt in zip(gallery.clip(PAIR, prompts), PAIR, prompts, strict=True):
        with torch.no_grad():
            a = model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output[0]
            b = model.get_text_features(**processor(text=prompt, return_tensors="pt")).pooler_output[0]
        assert got.item() == pytest.approx((a @ b / a.norm() / b.norm()).item(), abs=1e-5)
    total, _ = grpo.compute_rewards(PAIR, prompts, [None] * 2, {"clip": 2.}) if monkeypatch.setitem(
        grpo.REWARDS, "clip", gallery.clip) is None else None
    assert total.tolist() == pytest.approx((2 * gallery.clip(PAIR, prompts)).tolist())


def test_aesthetic_is_linear_layers_on_the_normalised_embedding(gallery, tiny_clip, monkeypatch, tmp_path):
    """A head of one layer and one of three; the dictionary's own order is the order of the layers."""
    monkeypatch.setattr(gallery, "CLIP", tiny_clip)
    monkeypatch.setattr(gallery, "HEAD", str(tmp_path / "head.pth"))
    model, processor = transformers.CLIPModel.from_pretrained(tiny_clip), transformers.AutoProcessor.from_pretrained(tiny_clip)
    with torch.no_grad():
        x = model.get_image_features(**processor(images=PAIR, return_tensors="pt")).pooler_output
    for sizes in ((16, 1), (16, 8, 4, 1)):
        head = torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])))
        torch.save({f"layers.{key}": value for key, value in head.state_dict().items()}, tmp_path / "head.pth")
        with torch.no_grad():
            expected = head(x / x.norm(dim=1, keepdim=True))
        assert torch.allclose(gallery.aesthetic(PAIR, ["", ""]), expected, atol=1e-5)


READ = [    # prompt, what is read in the picture, score
    ('a sign "OPEN"', "OPEN", 1), ('a sign "OPEN"', "open", 1), ('a sign "OPEN"', " O P\nEN ", 1),
    ('a sign "OPEN"', "", 0), ('a sign "OPEN"', "OPEM", 3 / 4), ('a sign "OPEN"', "PEN", 3 / 4),
    ('a sign "OPEN"', "OPENS", 4 / 5), ('a sign "OPEN"', "CLOSED", 1 - 4 / 6), ('a sign "OPEN"', "xyz", 0),
    ('a sign "hello world"', "hello", 5 / 10), ('a sign "hello world"', "hello world again", 10 / 15),
    ('a sign "hello world"', "world hello", 1 - 8 / 10), ("it says 'stop'", "STOP", 1), ("it says “stop”", "Stop", 1),
    ('"one" above "two"', "one two", 1), ('"one" above "two"', "one", 3 / 6), ('"one" above “two”', "two one", 1),
    ("招牌「你好」", "你好", 1), ("招牌「你好」", "你 好", 1), ("招牌「你好世界」", "你好", 2 / 4), ('a "café"', "cafe\u0301", 1),
    ('a "50 %"', "５０％", 1), ('a "ﬁsh"', "FISH", 1), ('a "Straße"', "STRASSE", 1), ('a ""', "anything", 0),
    ('a ""', "", 1), ("nothing to draw", "whatever", None), ("", "", None)]


@pytest.mark.parametrize("prompt, text, score", READ)
def test_ocr_scores_what_is_read(gallery, monkeypatch, capsys, prompt, text, score):
    """Case, white space and Unicode forms do not count; words that miss, are too many or in another order do. Several
    strings stand in the order in which the pipeline finds them: single, curly, double, CJK quotes."""
    class Reader:
        chat_template = None
        to = cpu = lambda self, *_: self
        pop = lambda self, *_: None
        __call__ = lambda self, **_: self
        __getitem__ = lambda self, _: torch.zeros(1, 3)
        keys = lambda self: ()
        generate = lambda self, **_: torch.zeros(1, 9)
        decode = lambda self, ids, skip_special_tokens: text if ids.shape == (6,) else 1 / 0

    monkeypatch.setattr(gallery, "load", lambda kind, path: (Reader(), Reader()))
    got, = gallery.ocr(PAIR[:1], [prompt])
    assert got is None if score is None else got == pytest.approx(score)
    gallery.ocr(PAIR, [prompt, prompt])
    assert capsys.readouterr().out.count("no opinion") == (score is None)       # said once


def test_ocr_with_a_model_that_reads(gallery, monkeypatch, tmp_path):
    """A GOT-OCR of random weights, through `from_pretrained`: it reads nonsense, and only where there is something to
    compare it with. And one with a chat template is asked for the text, as GLM-OCR wants it."""
    torch.manual_seed(0)
    words = "<unk> <|endoftext|> <|im_start|> <|im_end|> <img> </img> <imgpad>".split()
    letters = {word: i for i, word in enumerate([*words, *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        additional_special_tokens=words[2:])
    processor = transformers.GotOcr2Processor(transformers.GotOcr2ImageProcessorPil(size={"height": 256, "width": 256}), tokenizer)
    processor.save_pretrained(tmp_path)
    transformers.GotOcr2ForConditionalGeneration(transformers.GotOcr2Config(
        vision_config=dict(hidden_size=16, output_channels=16, num_hidden_layers=1, num_attention_heads=2, image_size=256,
                           patch_size=4, mlp_dim=16, window_size=2, global_attn_indexes=[0]),
        text_config=dict(model_type="qwen2", vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, eos_token_id=3, pad_token_id=1, bos_token_id=2),
        image_token_id=6)).save_pretrained(tmp_path)
    monkeypatch.setattr(gallery, "OCR", str(tmp_path))
    scores = gallery.ocr(PAIR, ['a "fox"', "no words"])
    assert 0 <= scores[0] <= 1 and scores[1] is None
    seen = []
    _, processor = gallery.load(transformers.AutoModelForImageTextToText, str(tmp_path))
    processor.chat_template = "given"
    monkeypatch.setattr(processor, "apply_chat_template", lambda chat, **_: seen.append(chat) or processor(images=PAIR[0], return_tensors="pt"))
    assert gallery.ocr(PAIR[:1], ['a "fox"']) == scores[:1]
    assert [part["type"] for part in seen[0][0]["content"]] == ["image", "text"]


def test_ssim_against_a_slow_computation(gallery):
    """Window by window and channel by channel with numpy; 1 for equal images, lower with each more noise, and a target of
    another size is resized."""
    rng = np.random.default_rng(0)
    target = Image.fromarray(rng.integers(0, 255, (20, 24, 3), np.uint8))
    pixels = np.array(target)
    noisy = [Image.fromarray(np.clip(pixels + rng.normal(0, s, pixels.shape), 0, 255).astype(np.uint8)) for s in (0, 10, 40, 90)]
    scores = gallery.ssim(noisy, [""] * 4, [target] * 4)
    assert scores[0] == pytest.approx(1, abs=1e-6) and scores == sorted(scores, reverse=True) and scores[3] < 0.8
    g = np.array([math.exp(-(i - 5) ** 2 / 4.5) for i in range(11)])
    weights, slow = np.outer(g, g) / g.sum() ** 2, []
    a, b = np.array(noisy[2]) / 255, pixels / 255
    for y, x, c in np.ndindex(10, 14, 3):
        p, q = a[y:y + 11, x:x + 11, c], b[y:y + 11, x:x + 11, c]
        mp, mq = (weights * p).sum(), (weights * q).sum()
        vp, vq, cov = (weights * (p - mp) ** 2).sum(), (weights * (q - mq) ** 2).sum(), (weights * (p - mp) * (q - mq)).sum()
        slow.append((2 * mp * mq + 1e-4) * (2 * cov + 9e-4) / ((mp**2 + mq**2 + 1e-4) * (vp + vq + 9e-4)))
    assert scores[2] == pytest.approx(np.mean(slow), abs=1e-5)
    assert gallery.ssim(noisy[:1], [""], [target.resize((48, 40))])[0] > 0.5


def test_lpips_without_its_package_says_how_to_install_it(gallery, monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    monkeypatch.setitem(grpo.REWARDS, "near", gallery.lpips)
    with pytest.raises(grpo.Trouble, match="--reward near.*pip install lpips"):
        grpo.compute_rewards(PAIR, ["", ""], PAIR, {"near": 1.})


def test_lpips_is_minus_the_distance_of_its_network(gallery, monkeypatch):
    """A stand-in for the package: images in 0..1 and told so, the image first, the target resized to it."""
    net = lambda x, y, normalize: (x - y).abs().mean() if normalize and x.shape == y.shape and x.max() <= 1 else 1 / 0
    monkeypatch.setattr(gallery, "load_lpips", lambda: net)
    black, white = Image.new("RGB", (8, 8)), Image.new("RGB", (30, 20), "white")
    assert gallery.lpips([black, white], ["", ""], [white, white]) == [-1., 0.]


def test_the_judge_of_the_readme_asks_and_reads(monkeypatch):
    """Against a server of our own: the picture and the prompt arrive, a number comes back, no number is no opinion."""
    asked, answers = [], iter(["8", "I'd say 6.5 of 10", "No idea."])

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [{"message": {"content": next(answers)}}]}).encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("JUDGE_MODEL", "any")
        exec(readme_code("judge.py"), names := {})
        assert names["judge"]([*PAIR, PAIR[0]], ["a fox", "an owl", "x"]) == [8., 6.5, None]
        server.shutdown()
    text, picture = asked[1]["messages"][0]["content"]
    assert "an owl" in text["text"] and picture["image_url"]["url"].startswith("data:image/png;base64,")


def test_cispo_of_the_readme_applies_and_is_cispo():
    """The printed diff fits the file as it is. On policy its gradient is PPO's; off policy a token that PPO drops still
    has one, of its bounded ratio."""
    code = (HERE / "grpo.py").read_text()
    diff = re.search(r"```diff\n(.*?)```", (HERE / "README.md").read_text(), re.DOTALL)[1].splitlines()
    for old, new in zip(diff[::2], diff[1::2], strict=True):
        assert old[0] == "-" and new[0] == "+" and code.count(old[1:] + "\n") == 1
        code = code.replace(old[1:] + "\n", new[1:] + "\n")
    exec(code, names := {"__name__": "cispo", "__file__": str(HERE / "grpo.py")})
    torch.manual_seed(0)
    old, advantages, grads = torch.randn(6, 5), torch.randn(6), []
    for loss in (names["compute_grpo_loss"], grpo.compute_grpo_loss):
        for new in (old.clone(), old + torch.tensor([-.9, -.1, 0., .1, .9])):
            new.requires_grad_()
            loss(new, old, advantages)[0].backward()
            grads.append(new.grad)
    assert torch.allclose(grads[0], grads[2], atol=1e-7) and (grads[3] == 0).any() and (grads[1] != 0).all()
    ratio = torch.tensor([-.9, -.1, 0., .1, .9]).exp().clamp(max=1.2)
    assert torch.allclose(grads[1], -ratio * advantages[:, None] / 30, atol=1e-6)


def test_use_and_merge_of_the_readme(tmp_path, monkeypatch, sampled):
    """Both ways into the stock pipeline give the policy that was trained, and draw; the base model alone is another."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    trained = make_wrapper()
    codes_only = list(range(64, 72))                    # the stock pipeline trusts a trained model to write nothing else
    trained.ar.generation_config.suppress_tokens = codes_only
    trained.pipe.save_pretrained("toy")
    lora = grpo.LoRA(trained.ar, rank=4, alpha=8)
    perturb(lora)
    lora.save(Path("adapter"), "toy")
    expected = trained.compute_logprobs(*sampled[:2])[0]
    for name in ("use.py", "merge.py"):
        code = readme_code(name).replace("runs/glm-image/adapter", "adapter").replace("zai-org/GLM-Image", "toy")
        code = code.replace('.to("cuda")', "").replace("dtype=torch.bfloat16", "dtype=torch.float32").replace("512", "64")
        exec(code, names := {})
        pipe = names["pipe"] if name == "use.py" else diffusers.GlmImagePipeline.from_pretrained("my-glm-image")
        pipe.processor._get_target_shape = trained.pipe.processor._get_target_shape      # the toy's draft is not saved
        other = grpo.GLMImageWrapper(pipe, 128, 64, temperature=0.9)
        assert (other.compute_logprobs(*sampled[:2])[0] - expected).abs().max() < 1e-5
    with lora.disabled():
        assert (trained.compute_logprobs(*sampled[:2])[0] - expected).abs().max() > 0.01
    assert Image.open("fox.png").size == (64, 64)


def test_the_step_by_hand_of_the_readme(monkeypatch):
    """It runs as it stands, meets the sampler's log-probs, and moves the adapters with a loss of 0."""
    monkeypatch.setattr(grpo, "make_tiny_pipeline", lambda seed: make_tiny_pipeline(seed, warmup_steps=0))
    code = readme_code("step.py").replace('"zai-org/GLM-Image"', '"tiny"').replace("torch.bfloat16", "torch.float32")
    exec(code.replace("512", "128").replace("cuda", "cpu"), names := {})
    assert (names["new"] - names["logprobs"]).abs().max() < 1e-5 and abs(names["loss"].item()) < 1e-6
    assert any((value != 0).any() for key, value in names["lora"].items() if "lora_B" in key)


def test_tensorboard_code_of_the_readme(start, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    start("--steps", "2").train()
    monkeypatch.setattr(sys, "argv", ["board.py", str(tmp_path / "a")])
    exec(readme_code("board.py"), {})
    board = EventAccumulator(str(tmp_path / "a/tensorboard"))
    board.Reload()
    rows = rows_of(tmp_path / "a")
    assert [event.value for event in board.Scalars("reward")] == pytest.approx([row["reward"] for row in rows])
    assert set(rows[0]) <= set(board.Tags()["scalars"]) and [event.step for event in board.Images("samples")] == [0, 2]


def test_targets_of_the_readme_are_learnt(tmp_path, monkeypatch, start):
    """`mse` towards the target mosaics of the page, on the fitted toy: the first 15 of its 100 steps already rise."""
    monkeypatch.chdir(tmp_path)
    exec(readme_code("targets.py"), {})
    monkeypatch.setattr(grpo, "make_tiny_pipeline", make_tiny_pipeline)
    trainer = grpo.prepare(grpo.parse_args(
        "--model tiny --reward mse --prompts targets.txt --steps 15 --sample-every 99 --save-every 99 --out run".split()))
    assert trainer.prompts[0] == "a red thing" and trainer.targets[0].getpixel((0, 127)) == (255, 0, 0)
    trainer.train()
    rewards = [row["reward"] for row in trainer.history]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.02


def test_readme_and_flags_agree():
    """Every flag in the README exists, and every flag is in the README. (--bench, --faults and --ablate are this file's own.)"""
    flags = set(re.findall(r'add(?:_argument)?\("(--[a-z-]+)"', (HERE / "grpo.py").read_text())) | {"--help", "--bench", "--faults", "--ablate"}
    mentioned = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", (HERE / "README.md").read_text()))
    mentioned -= {"--nproc-per-node", "--nnodes", "--rdzv-endpoint"}        # torchrun's
    assert mentioned - flags == set() and flags - mentioned - {"--help"} == set()


def test_readme_tells_the_defaults():
    """Each flag has one row, with the defaults of the toy and of GLM-Image as the parser has them."""
    cells = re.findall(r"^\| `(--[a-z-]+)` \| (.*?) ?\|", (HERE / "README.md").read_text(), re.MULTILINE)
    told, checked = dict(cells), {"--model", "--resume", "--prompts", "--out"}       # these are told in words
    assert len(told) == len(cells)
    for column, tiny in ((0, True), (-1, False)):
        flags = {}
        grpo.add_flags(lambda name, *_, default=None, **kwargs: flags.update({name: default}), tiny)
        for name in flags.keys() - {"-h", "--prompts", "--out"}:
            value = told[name].split(" / ")[column].strip("` ")
            if flags[name] is None:
                assert told[name] in ("", "as `--clip-range`") or told[name].startswith("the model's own"), name
            else:
                assert value == flags[name] or float(value) == float(flags[name]), name
            checked.add(name)
    assert checked == told.keys()


def test_links_and_numbers_of_the_readme():
    """Line links go stale with the first line that is added above them; so do numbers of lines and of tests."""
    text, lines = (HERE / "README.md").read_text(), (HERE / "grpo.py").read_text().splitlines()
    links = re.findall(r"\[`([\w.]+)`\]\(grpo\.py#L(\d+)\)", text)
    assert len(links) >= 10 and len(links) == text.count("grpo.py#L")
    for name, number in links:
        scope, _, last = name.rpartition(".")
        assert re.match(rf"\s*(def|class) {last}\b", lines[int(number) - 1]), f"{name} is not at line {number}"
        above = [line for line in lines[:int(number)] if line.startswith("class ")]
        assert not scope or above[-1].startswith(f"class {scope}"), f"{name} is not at line {number}"
    anchors = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    assert all((HERE / path).exists() for path in re.findall(r"!\[[^]]+\]\(([^)]+)\)", text))
    assert f"{len(lines)} lines" in text and f"- {len(BAD)} kinds of bad input" in text
    arrows = [line.strip() for line in lines[:12] if "--" in line and ">" in line or "^---" in line]
    assert arrows and all(line in text for line in arrows)          # the drawing is that of the file


# ------------------------------------------------------------------------------------------------------------
# The benchmark: `python test_grpo.py --bench`, with the flags of grpo.py. Nothing here is a test.


def clock(function, *args):
    """-> (seconds, what it returned); a GPU is waited for."""
    start = time.perf_counter()
    result = function(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def stock_seconds(wrapper, args, prompt, tokens):
    """An image the usual way: the pipeline writes and paints it alone, then a pass of its own scores the log-probs.

    On a GPU the pipeline writes 16 and 48 tokens for real; the seconds of all the others are extrapolated from these.
    """
    generate, unspent = wrapper.ar.generate, [0.0]

    def some_tokens(**inputs):
        settings = {**inputs, "suppress_tokens": list(range(wrapper.codebook_size, wrapper.ar.lm_head.out_features))}
        if wrapper.device.type == "cpu":
            return generate(**settings)
        short, long = (clock(lambda n=n: generate(**{**settings, "max_new_tokens": n}))[0] for n in (16, 48))
        unspent[0] = (long - short) / 32 * tokens.shape[1] - short - long
        return torch.cat([inputs["input_ids"], tokens.to(wrapper.device), tokens[:, :1].to(wrapper.device)], 1)

    def write():
        with mock.patch.object(wrapper.ar, "generate", some_tokens):
            wrapper.pipe.generate_prior_tokens(prompt, wrapper.height, wrapper.width, device=wrapper.device,
                                               generator=torch.Generator().manual_seed(args.seed))

    wrapper.place("write")
    wrapper.ar.to(wrapper.device)       # the vision tower too: `generate` works on the device of the first weight
    written, _ = clock(write)
    for part in (wrapper.ar.model.visual, wrapper.ar.model.vqmodel):
        part.to("cpu")
    painted, _ = clock(wrapper.decode, [prompt], tokens, [args.seed], args.decode_steps, 1)
    with torch.no_grad():
        scored, _ = clock(wrapper.compute_logprobs, [prompt], tokens)
    return written + unspent[0] + painted + scored


def our_seconds(trainer, prompt, group_size):
    """One step on one prompt -> seconds of write, paint, score, update, and the tokens."""
    wrapper, args = trainer.wrapper, trainer.args
    write, (tokens, logprobs, allowed) = clock(wrapper.sample, [prompt], group_size, [args.seed])
    paint, images = clock(wrapper.decode, [prompt], tokens, [args.seed], args.decode_steps, args.micro_batch_size)
    score, (rewards, _) = clock(grpo.compute_rewards, images, [prompt] * group_size, [None] * group_size, args.reward)
    advantages = grpo.compute_advantages(rewards, group_size) if group_size > 1 else torch.zeros(1)
    update, _ = clock(trainer.train_step, [prompt] * group_size, tokens, logprobs, allowed, advantages)
    return (write, paint, score, update), tokens


def weight_floor(wrapper):
    """The least seconds a decode step can take: its weights read once, at the speed of a copy measured here."""
    wrapper.place("write")
    source = torch.empty(2**30, dtype=torch.uint8, device=wrapper.device)
    target = torch.empty_like(source)
    seconds = min(clock(target.copy_, source)[0] for _ in range(5))
    modules = wrapper.ar.model.language_model.layers, wrapper.ar.model.language_model.norm, wrapper.ar.lm_head
    return sum(p.nbytes for m in modules for p in m.parameters()) / (2 * source.nbytes / seconds)


def bench(argv):
    """One table. Every ratio is of two medians measured in turn in this run."""
    cuda, prompt = torch.cuda.is_available(), "a red fox"
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        args = grpo.parse_args(["--out", out, "--micro-batch-size", "1" if cuda else "8", *argv])
    offload = args.offload == "on" or args.offload == "auto" and cuda and torch.cuda.mem_get_info()[0] < 60 * 2**30
    make = {"tiny": lambda: make_tiny_pipeline(args.seed, warmup_steps=0), "random": lambda: make_real(device)}
    load = functools.partial(diffusers.GlmImagePipeline.from_pretrained, args.model, dtype=dtype)
    wrapper = grpo.GLMImageWrapper(
        make.get(args.model, load)(), height=args.size[0], width=args.size[1], temperature=args.temperature,
        top_p=args.top_p, guidance=args.guidance, offload=offload, device=device)
    wrapper.pipe.set_progress_bar_config(disable=True)
    trainer, repeats, first = grpo.GRPOTrainer(args, wrapper, [prompt], [None]), 3 if cuda else 9, None
    where = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} CPU threads"
    print(f"{args.model}, {args.size[1]} x {args.size[0]}, {args.decode_steps} decode steps, {args.micro_batch_size} images "
          f"at a time, offload {'on' if offload else 'off'}, {where}, one prompt, medians of {repeats}, seconds")
    print("group   stock rollout  ours  ratio | write  paint  score  update |  step  to group 1 | tokens/s"
          + ("  of floor  peak GiB" if cuda else ""))
    floor = weight_floor(wrapper) if cuda else 0
    for group_size in (1, 4, 8, 16):
        _, tokens = our_seconds(trainer, prompt, group_size)            # warm-up
        phases, stock, peak = [], [], 0.0
        for _ in range(repeats):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            phases.append(our_seconds(trainer, prompt, group_size)[0])
            peak = max(peak, torch.cuda.max_memory_allocated() / 2**30)
            stock.append(sum(stock_seconds(wrapper, args, prompt, tokens[:1]) for _ in range(1 if cuda else group_size)))
        stock = [seconds * group_size if cuda else seconds for seconds in stock]
        write, paint, score, update = (statistics.median(column) for column in zip(*phases))
        step, stock, ours = write + paint + score + update, statistics.median(stock), write + paint
        first = first or step
        print(f"{group_size:5d} {stock:15.3f} {ours:5.3f} {stock / ours:5.1f}x | {write:.3f}  {paint:.3f}  {score:.3f}  "
              f"{update:6.3f} | {step:.3f} {step / first:10.2f}x | {tokens.numel() / write:8.0f}"
              + (f" {floor / (write / tokens.shape[1]):8.0%} {peak:9.1f}" if cuda else ""))
    if not cuda:
        pipe = make_real("meta")
        ar, gib = pipe.vision_language_encoder, lambda *parts: sum(p.nbytes for m in parts for p in m.parameters()) / 2**30
        print(f"GLM-Image, weights by phase, counted: write {gib(ar.model.language_model, ar.lm_head):.1f} GiB, paint "
              f"{gib(pipe.text_encoder, pipe.transformer, pipe.vae):.1f} GiB, always on the CPU "
              f"{gib(ar.model.visual, ar.model.vqmodel):.1f} GiB. On a GPU nothing has been measured here.")


# ------------------------------------------------------------------------------------------------------------
# What each choice is worth: `python test_grpo.py --ablate`, about 20 minutes on one core. Nothing here is a test.


def noise_of_its_own(trainer):
    """Instead of one for the group: every image starts from other noise."""
    decode = trainer.wrapper.decode

    def other(prompts, tokens, seeds, *settings):
        G = len(tokens) // len(prompts)
        return decode([p for p in prompts for _ in range(G)], tokens, [s + i for s in seeds for i in range(G)], *settings)

    trainer.wrapper.decode = other


ABLATIONS = {       # name: flags, and what is done to the trainer
    "as shipped": ("", None), "noise of its own for each image": ("", noise_of_its_own),
    "group size 2 (16 prompts)": ("--group-size 2 --batch-size 16", None),
    "group size 8 (4 prompts)": ("--group-size 8 --batch-size 4", None),
    "group size 16 (2 prompts)": ("--group-size 16 --batch-size 2", None),
    "rewards not divided by the std": ("--scale-rewards none", None),
    "neither divided, nor a KL (Dr. GRPO)": ("--scale-rewards none --kl-coef 0", None),
    "no KL": ("--kl-coef 0", None), "KL 0.02": ("--kl-coef 0.02", None),
    "2 updates per rollout": ("--num-iterations 2", None), "1 ratio per sequence": ("--importance sequence", None),
    "all weights instead of LoRA": ("--lr 5e-4", train_all_weights)}


def ablate(seeds):
    """One table: mean reward of the last five of 40 steps, per seed, and mean and standard deviation over the seeds."""
    results = {name: [] for name in ABLATIONS}
    for seed in seeds:
        toy = make_tiny_pipeline(seed)
        for name, (flags, change) in ABLATIONS.items():
            with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()), mock.patch.object(
                    grpo, "make_tiny_pipeline", lambda seed: copy.deepcopy(toy)):
                trainer = grpo.prepare(grpo.parse_args(
                    f"--model tiny --seed {seed} --out {out} --sample-every 999 --save-every 999 {flags}".split()))
                if change:
                    change(trainer)
                trainer.keep = lambda: None
                trainer.train()
            results[name].append(statistics.mean(row["reward"] for row in trainer.history[-5:]))
            print(f"seed {seed}  {name:36s} {results[name][-1]:.3f}", file=sys.stderr, flush=True)
    print("| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | std |\n" + "|---" * (len(seeds) + 3) + "|")
    for name, values in results.items():
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        print(f"| {name} | " + " | ".join(f"{v:.3f}" for v in values) + f" | {statistics.mean(values):.3f} | {spread:.3f} |")


if __name__ == "__main__":
    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    if sys.argv[1:2] == ["--bench"]:
        bench(sys.argv[2:])
    elif sys.argv[1:2] == ["--ablate"]:
        ablate([int(seed) for seed in sys.argv[2:]] or range(5))
    elif sys.argv[1:] == ["--faults"]:
        with tempfile.TemporaryDirectory() as folder:
            faults(folder, kills=20, steps=30, say=print)
    else:
        sys.exit("test_grpo.py: error: python -m pytest runs the tests; --bench [flags of grpo.py] prints the benchmark, "
                 "--faults kills a run twenty times, --ablate [seeds] shows what each choice is worth")
