"""Tests of grpo.py: identities, mostly, on a toy of random weights. `pytest -q`: no network, no GPU."""
import builtins, copy, dataclasses, functools, inspect, json, math, multiprocessing, os, random, re, signal
import socket, statistics, subprocess, sys, time, weakref
from pathlib import Path
from unittest import mock

import diffusers, pytest, torch, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo

torch.set_num_threads(1)  # two would wait for each other, busily, where the machine does other work
HERE = Path(__file__).parent
PROMPTS = ["a red fox on a wall", "yellow"]  # of different length, so that one of them is padded
make_tiny_pipeline = grpo.make_tiny_pipeline  # before tests put the quick one in its place
QUICK = functools.partial(make_tiny_pipeline, warmup_steps=0)  # the toy with random weights
WRAPPER = grpo.GLMImageWrapper

def make_config(**settings):
    """64 wide and 128 high is not square: a draft of 2 x 1 and a large grid of 4 x 2 tokens."""
    settings = {"size": "64x128", "temperature": 0.9, "batch_size": 2, "steps": 4, **settings}
    return grpo.Config(**{**grpo.TINY, "micro_batch_size": 4, **settings})

def make_wrapper(dtype=torch.float32, **settings):
    """A fresh toy of random weights."""
    pipe = QUICK(0)
    pipe.vision_language_encoder.to(dtype)
    return WRAPPER(pipe, make_config(**settings))

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
    return lora

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
    wrapper = make_wrapper(dtype, **settings)
    torch.manual_seed(0)
    return wrapper, perturb(grpo.LoRA(wrapper.policy, wrapper.TARGETS, rank=4))

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

@pytest.mark.parametrize("rewards, group_size", [
    ([1.0, 2.0], 1), ([1.0, 2.0, 3.0], 2), ([1.0, math.nan], 2), ([1.0, math.inf], 2)])
def test_advantages_refuse_what_makes_no_groups(rewards, group_size):
    """NaN would spread through the gradient to every weight."""
    with pytest.raises(ValueError):
        grpo.compute_advantages(rewards, group_size)

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
    expected = dict(loss=-surrogate, policy_loss=-surrogate, ratio_max=ratio)
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
    total, metrics = grpo.compute_rewards(*blank(2), rewards)
    assert total.tolist() == [-4.0, -8.0]
    assert metrics == {"reward/a": 1.5, "reward/b": 15.0, "reward": -6.0}

def test_a_reward_that_paints_over_its_picture_changes_nothing_for_others():
    """The next reward, and the rollout, must see the picture as it was sampled."""
    def spoil(images, prompts, targets):
        images[0].paste("red", (0, 0, 8, 8))
        return [0.0]

    images, prompts, targets = blank(1)
    grpo.compute_rewards(images, prompts, targets, {"spoil": (spoil, 1.0)})
    assert images[0].getpixel((0, 0)) == (0, 0, 0)

def test_no_opinion_by_hand():
    """A None counts as the mean of its group, as 0 where nobody has an opinion, and not in the log."""
    rewards = {"a": (reward_of([None, 4, None, 2] + [None] * 4), 0.5), "b": (reward_of([None] * 8), 1.0)}
    total, metrics = grpo.compute_rewards(*blank(8), rewards, group_size=4)
    assert total.tolist() == [1.5, 2, 1.5, 1, 0, 0, 0, 0]
    assert metrics == {"reward/a": 3.0, "reward": 1.5}

def test_normed_rewards_by_hand():
    """Rewards of any scale count by their weights alone."""
    rewards = {"small": (reward_of([1e-3, 3e-3, 5e-3, 5e-3]), 1.0), "large": (reward_of([1, 2, 7e4, 1e4]), 2.0)}
    total, _ = grpo.compute_rewards(*blank(4), rewards, group_size=2, norm="group")
    r = 0.5**0.5
    assert total.tolist() == pytest.approx([-3 * r, 3 * r, 2 * r, -2 * r], abs=1e-2)

def test_rewards_are_loaded_with_their_weights(tmp_path):
    """Two rewards of a file share what it loads: run for each of them, it would load its model twice."""
    own = tmp_path / "own.py"
    own.write_text("import itertools\ncount = itertools.count()  # the images that both have seen\n"
                   "def a(images, prompts, targets): return [next(count) for _ in images]\nb = a\n")
    rewards = grpo.load_rewards(f"color=2, mse,{own}:a,{own}:b=.5")
    assert [rewards.pop("color"), rewards.pop("mse")] == [(grpo.reward_color, 2.0), (grpo.reward_mse, 1.0)]
    total, metrics = grpo.compute_rewards(*blank(2), rewards)
    assert metrics == {f"reward/{own}:a": 0.5, f"reward/{own}:b": 2.5, "reward": 1.75}
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
    """Or the KL is of something else than the base model."""
    base = score(wrapper, sampled)
    ours = make_wrapper()
    lora = grpo.LoRA(ours.policy, ours.TARGETS, rank=4)
    assert torch.equal(score(ours, sampled), base)
    perturb(lora)
    moved = score(ours, sampled)
    assert (moved - base).abs().max() > 1e-2
    with lora.disabled():
        assert torch.equal(score(ours, sampled), base)
    assert torch.equal(score(ours, sampled), moved)

def test_lora_by_hand(tmp_path):
    """Twice B A x, in files under the names and with the scale that peft and transformers read."""
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 2)})
    lora = perturb(grpo.LoRA(model, "a", rank=1))
    A, B = lora.weights.values()
    x = torch.randn(5, 3)
    base = x @ model["a"].weight.T + model["a"].bias
    assert torch.allclose(model["a"](x), base + 2 * (x @ A.T) @ B.T)
    lora.save(tmp_path, "toy")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (1, 2, "toy")
    names = [f"base_model.model.a.lora_{AB}.weight" for AB in "AB"]
    assert sorted(load_file(tmp_path / "adapter_model.safetensors")) == names

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
    for part in (wrapper.ar_half, wrapper.dit_half):
        assert all(not weight.requires_grad and weight.grad is None for weight in part.parameters())
    assert not wrapper.ar_half.training and not wrapper.dit_half.training

# --- GLM-Image: what the model reads ------------------------------------------------------------------------
def test_positions_are_those_of_the_docstring():
    """The drawing is what readers trust; it must be what the function does."""
    rows = re.findall(r"[thw]:((?:\s+\d+)+)", grpo.build_position_ids.__doc__)
    expected = torch.tensor([[int(number) for number in row.split()] for row in rows])
    got = grpo.build_position_ids(torch.tensor([[0, 1, 1, 1]]), [(1, 2), (2, 2)])
    assert expected.shape == (3, 10) and torch.equal(got[:, 0], expected)

@pytest.mark.parametrize("size", ["128", "128x64", "64x192"])
def test_positions_are_those_of_transformers(size):
    """The library computes the same inside `generate`; here it is the independent witness."""
    wrapper = make_wrapper(size=size)
    ids, position_ids, visible = wrapper.encode(PROMPTS)
    mask = visible[:, 0, -1, :ids.shape[1]].long()  # what the last token sees of the prompt
    h, w = wrapper.config.height // 32, wrapper.config.width // 32
    grids = torch.tensor([[1, h, w], [1, h // 2, w // 2]] * 2)  # the large one is listed first
    model = wrapper.policy.model
    prompt, _ = model.get_rope_index(ids, grids, torch.tensor([2, 2]), mask)
    image = model._cached_decode_position_ids.movedim(1, 0)[:, :, :-1]  # the last one is for EOS
    assert (mask == 0).any() and torch.equal(position_ids, torch.cat([prompt, image], dim=2))

def test_what_a_position_sees(wrapper):
    """Itself and what stands before it but for padding; a row that saw nothing would be NaN on a GPU."""
    ids, _, visible = wrapper.encode(PROMPTS)
    padding = F.pad(ids == wrapper.pipe.processor.tokenizer.pad_token_id, (0, 10)).tolist()
    assert visible.dtype == torch.bool and not any(padding[0]) and any(padding[1])
    for sees, padded in zip(visible[:, 0].tolist(), padding):
        for i, row in enumerate(sees):
            assert row == [j == i or (j < i and not padded[j]) for j in range(len(padded))]

@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]])
def test_prompts_are_encoded_as_the_pipeline_does(wrapper, monkeypatch, prompts):
    """What the stock pipeline hands to `generate` is what we hand to the language model."""
    generate = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(wrapper.policy, "generate", generate)
    monkeypatch.setattr(wrapper.pipe.processor.tokenizer, "padding_side", "left")  # as it is told by ours
    with pytest.raises(KeyboardInterrupt):
        wrapper.pipe.generate_prior_tokens(prompts, wrapper.config.height, wrapper.config.width)
    stock = generate.call_args.kwargs
    ids, position_ids, visible = wrapper.encode(prompts)
    mask = visible[:, 0, -1, :ids.shape[1]].long()
    large, draft = stock["image_grid_thw"][:2, 1:].tolist()
    assert torch.equal(stock["input_ids"], ids) and torch.equal(stock["attention_mask"], mask)
    assert torch.equal(position_ids, grpo.build_position_ids(mask, [draft, large]))

# --- GLM-Image: the sampler, and the trainer's pass over what it drew ---------------------------------------
@pytest.mark.parametrize("top_p, dtype, bound", [
    (1.0, torch.float32, 1e-5), (0.6, torch.float32, 1e-5), (1.0, torch.bfloat16, 0.05)])
def test_sampler_and_trainer_agree(top_p, dtype, bound):
    """THE test: padded prompts, a grid that is not square, a temperature, a nucleus; cached steps and one
    teacher-forced pass give the same log-probs, and without the nucleus or the temperature others."""
    wrapper = make_wrapper(dtype, top_p=top_p)
    tokens, logprobs, allowed = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    prompts = [p for p in PROMPTS for _ in range(3)]
    assert tokens.shape == logprobs.shape == (6, 2 * 1 + 4 * 2)
    assert tokens.min() >= 0 and tokens.max() < 8 and logprobs.dtype == torch.float32
    assert allowed.shape == (6, 10, 8) and allowed.dtype == torch.bool
    with torch.no_grad():
        again, entropy = wrapper.compute_logprobs(prompts, tokens, allowed)
        unmasked, whole = wrapper.compute_logprobs(prompts, tokens)
        wrapper.temperature = 1.0
        wrong, _ = wrapper.compute_logprobs(prompts, tokens, allowed)
    assert (again - logprobs).abs().max() < bound < (wrong - logprobs).abs().max()
    if top_p < 1:
        assert (unmasked - logprobs).mean() < -0.1 and (entropy - whole).mean() < -0.1

def test_a_naive_pass_does_not_agree(wrapper, sampled):
    """The trap: `model(prompt + tokens)` runs without complaint, and is wrong."""
    prompts, tokens, logprobs = sampled
    ids, _, visible = wrapper.encode(prompts)
    L = ids.shape[1]
    with torch.no_grad():
        out = wrapper.policy(input_ids=torch.cat([ids, tokens], dim=1), attention_mask=visible[:, 0, -1].long())
    logp = (out.logits[:, L - 1:-1, :8] / 0.9).log_softmax(dim=2)
    naive = logp.gather(2, tokens[:, :, None])[:, :, 0]
    assert (naive - logprobs).abs().max() > 1e-3  # a hundred times what sampler and trainer may differ by

@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sampling_is_transformers_own_decoding_row_by_row(top_p):
    """Slow and plain, as the witness: the public `forward`, which brings positions of its own, a growing
    cache, no batch, no padding, and the smallest nucleus, by sorting. Ours in one batch: the same tokens."""
    wrapper = make_wrapper(top_p=top_p)
    tokens, logprobs, allowed = wrapper.sample(PROMPTS, 3, seeds=[1, 2])
    dice = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    chance = torch.cat([torch.rand(3, 10, generator=die) for die in dice])
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
            assert torch.equal(allowed[row, i], nucleus)
            out = wrapper.policy(input_ids=code.view(1, 1), attention_mask=torch.ones(1, L + i + 1),
                                 use_cache=True, past_key_values=out.past_key_values)
    assert allowed.all() == (top_p == 1)

@pytest.mark.parametrize("chance, first", [(0.0, True), (1 - 2**-24, False)])
def test_no_chance_falls_out_of_the_nucleus(monkeypatch, chance, first):
    """A number of exactly 0 would draw code 0, allowed or not; one next to 1 a code behind the last."""
    wrapper = make_wrapper(top_p=0.3 if first else 0.99, size="256")
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.full(shape, chance))
    tokens, _, allowed = wrapper.sample(PROMPTS, 1, seeds=[1, 2])
    last = 7 - allowed.int().flip(2).argmax(dim=2)
    assert torch.equal(tokens, allowed.int().argmax(dim=2) if first else last)
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

# --- Memory: what lies where --------------------------------------------------------------------------------
def hide_weights(wrapper, monkeypatch):
    """All weights are NaN but those of the half that was held last, as if the others were not on the device
    -> the halves that were held, in turn; the vision tower never is one."""
    whole = wrapper.homes
    for part in tensors_of(wrapper.policy, wrapper.dit_half):
        part.data = torch.full_like(part, math.nan)
    wrapper.homes = {half: [(part, part.data) for part, _ in parts] for half, parts in whole.items()}
    hold = wrapper.hold
    moves = []

    def reveal(half):
        if half is not wrapper.held:
            moves.append("ar" if half is wrapper.ar_half else "dit")
            hold(half)
            for part, data in whole[half]:
                part.data = data

    monkeypatch.setattr(wrapper, "hold", reveal)
    return moves

def test_offloading_changes_nothing_and_holds_one_half_at_a_time(tmp_path, monkeypatch):
    """What is not held is NaN, the vision tower always; and a phase moves weights once."""
    runs = []
    for offload in ("off", "on"):
        out = tmp_path / offload
        trainer = make_trainer(out, offload=offload, steps=1, micro_batch_size=2)
        moves = hide_weights(trainer.wrapper, monkeypatch) if offload == "on" else []
        trainer.train()
        paths = sorted(out.rglob("*.png")) + sorted(out.rglob("*.safetensors"))
        runs.append((rows_of(out), [path.read_bytes() for path in paths]))
    assert moves == ["ar", "dit"] + ["ar", "dit", "ar"] + ["dit"]  # pictures, a step, pictures
    assert len(paths) == 3 and trainer.history[1]["grad_norm"] > 0
    assert runs[0] == runs[1]

def test_weights_are_lent_to_the_device(monkeypatch):
    """One half at a time; each comes back to the very memory where it waited. (A dtype stands for the device.)"""
    wrapper = make_wrapper(offload="on")
    halves = {half: tensors_of(half) for half in (wrapper.ar_half, wrapper.dit_half)}
    homes = {half: [part.data_ptr() for part in parts] for half, parts in halves.items()}
    monkeypatch.setattr(grpo, "DEVICE", torch.float64)
    for held in (*halves, *halves):
        wrapper.hold(held)
        there = [part.data_ptr() for part in halves[held]]
        assert {part.dtype for part in halves[held]} == {torch.float64}
        for half, parts in halves.items():
            assert half is held or [part.data_ptr() for part in parts] == homes[half]
        wrapper.hold(held)
        assert [part.data_ptr() for part in halves[held]] == there  # no second copy within a phase

@pytest.mark.parametrize("offload, free, where", [
    ("on", 80, "cpu"), ("off", 10, "meta"), ("auto", 40, "cpu"), ("auto", 80, "meta"), ("auto", 0, "meta")])
def test_where_the_halves_wait(monkeypatch, offload, free, where):
    """GLM-Image wants 60 GiB to lie on the GPU as a whole; the vision tower never moves there."""
    monkeypatch.setattr(grpo, "FREE_GIB", free)
    monkeypatch.setattr(grpo, "DEVICE", torch.device("meta"))
    wrapper = WRAPPER(grpo.make_tiny_models(), make_config(offload=offload))
    parts = wrapper.ar_half, wrapper.dit_half, wrapper.policy.model.visual
    for part, place in zip(parts, (where, where, "cpu")):
        assert {tensor.device.type for tensor in tensors_of(part)} == {place}

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
    Weights are added by hand: with offloading, those of the half that is held alone."""
    def __init__(self, *halves):
        super().__init__()
        self.alive = {}  # storages: a weak reference, bytes
        self.results = {}  # of operations seen before; to ask PyTorch again would take most of the time
        self.sizes = {half: sum(weight.nbytes for weight in half.parameters()) for half in halves}
        self.weights = {"on": 0, "off": sum(self.sizes.values())}  # bytes on the GPU, by --offload
        self.peaks = {"on": 0, "off": 0}
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

    def hold(self, half):
        """In the place of the wrapper's: with offloading the GPU then holds this half alone."""
        self.weights["on"] = self.sizes[half]

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
        return result

def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """What `F.scaled_dot_product_attention` allocates on a GPU: with a mask the memory-efficient kernel, which
    wants it in the dtype of the query, its rows padded to a multiple of 8; without one as flash attention."""
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
    """Highest GiB alive on the GPU in the second step, of two micro-batches -> {phase: {"on", "off"}}, by
    --offload. Real numbers are wanted by the prompts, read on the host, and by the scheduler."""
    T = 256 + (side // 32) ** 2
    n = 2 * micro_batch_size
    config = grpo.Config(size=str(side), batch_size=num_prompts, group_size=group_size,
                         micro_batch_size=micro_batch_size, decode_steps=2, offload="off")
    prompt = "red " * 40
    rollout = dict(prompts=[prompt] * n, tokens=torch.zeros(n, T).long(), logprobs=torch.zeros(n, T),
                   allowed=torch.ones(n, T, 16384).bool())
    peaks = {}
    with mock.patch.object(grpo, "DEVICE", torch.device("meta")):
        wrapper = WRAPPER(make_real("meta"), config)
    encode = wrapper.encode

    def encode_on_host(prompts):
        with mock.patch.object(grpo, "DEVICE", torch.device("cpu")):
            return [tensor.to("meta") for tensor in encode(prompts)]

    def update():
        trainer.train_step(rollout)

    def sample():
        with mock.patch.object(wrapper, "forward", skip_tokens(wrapper.forward, T)):
            wrapper.sample([prompt] * num_prompts, group_size, range(num_prompts))

    def decode():
        wrapper.decode([prompt], rollout["tokens"][:micro_batch_size], [0])

    gpu = FakeGPU(wrapper.ar_half, wrapper.dit_half)
    with (
        mock.patch.object(grpo, "DEVICE", torch.device("meta")),
        mock.patch.object(wrapper, "encode", encode_on_host),
        mock.patch.object(wrapper, "hold", gpu.hold),
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
        rollout["advantages"] = torch.zeros(n, device="meta")
        resident = gpu.now
        for phase in (update, sample, decode):
            gpu.peaks = {"on": 0, "off": 0}
            phase()
            peaks[phase.__name__] = {offload: peak / 2**30 for offload, peak in gpu.peaks.items()}
            left = gpu.now - resident
            assert left < 2**20, f"{phase.__name__} leaves {left} bytes behind"
    return peaks

def test_a_step_fits_a_card_of_24_gb():
    """8 x 4 images of 1024 x 1024; beside the weights lies no less than what is known to be there."""
    peaks = count_memory(1024, num_prompts=8)
    T = 256 + 32 * 32
    cache = 32 * T * 40 * 2 * 2 * 128 * 2 / 2**30  # 40 layers, keys and values, 2 heads of 128, 2 bytes
    assert 16.6 + 1.0 + cache < peaks["sample"]["on"] <= 22
    assert 16.6 + 1.4 < peaks["update"]["on"] <= 22
    assert 14.1 + 1.0 < peaks["decode"]["on"] <= 22
    assert all(16.6 + 14.1 + 1.0 < peak["off"] < 40 for peak in peaks.values())

# --- The trainer --------------------------------------------------------------------------------------------
def gradient_of(trainer):
    """All of it, in one vector."""
    return torch.cat([weight.grad.flatten() for weight in trainer.lora.weights.values()])

def test_gradient_does_not_depend_on_the_micro_batch(tmp_path):
    """Each micro-batch averaged on its own, or the last one alone, would give another gradient, or log."""
    trainer = make_trainer(tmp_path / "run", max_grad_norm=1e9, kl_coef=0.1, scale_rewards="none")
    perturb(trainer.lora)
    rollout = make_rollout(trainer)
    gradients = []
    logs = []
    trainer.optimizer.step = lambda: gradients.append(gradient_of(trainer))
    for size in (1, 2, 3, 8):
        trainer.config.micro_batch_size = size
        logs.append(without(trainer.train_step(rollout), "sec_"))
    assert gradients[0].abs().max() > 1e-4
    for gradient, log in zip(gradients[1:], logs[1:]):
        assert torch.allclose(gradients[0], gradient, rtol=1e-4, atol=1e-6)
        assert log == pytest.approx(logs[0], rel=1e-4, abs=1e-5)

@pytest.mark.parametrize("top_p", [None, 0.6])
def test_ratio_is_one_until_the_first_update(tmp_path, top_p):
    """Old log-probs from another pass, or a pass that forgets the masks of top-p, would start off 1."""
    trainer = make_trainer(tmp_path / "run", lr=0.01, top_p=top_p)
    rollout = make_rollout(trainer)
    assert rollout["allowed"].all() == (top_p is None)
    once = trainer.train_step(rollout)
    assert once["ratio_max"] == 1
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
    assert len(state["history"]) == 8
    assert all(weight.isfinite().all() for weight in state["adapter"].values())
    assert {moments["step"].item() for moments in state["optimizer"]["state"].values()} == {7 + 2}

def test_settings_reach_the_update(tmp_path):
    """A flag that is parsed and then forgotten looks like a flag that does not help."""
    settings = dict(clip_range=0.3, clip_range_high=0.4, kl_coef=0.5)
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
    group, = trainer.optimizer.param_groups
    assert group["lr"] == 0.003 and group["weight_decay"] == 0
    for weight in trainer.lora.weights.values():
        assert min(weight.shape) == 2
        assert weight.grad is None  # and takes no memory while the next step samples

def test_rows_are_merged_by_their_means_but_for_maxima():
    """A reward on which one GPU alone had an opinion must not count as 0 on the others."""
    rows = [dict(ratio_max=1, sampler_gap=0.2, skipped=0, kl=1), dict(ratio_max=3, sampler_gap=0.1, skipped=1, kl=2),
            dict(grad_norm=3, peak_gib=1, reward=5), dict(grad_norm=1, peak_gib=2)]
    assert grpo.merge_rows(rows) == dict(ratio_max=3, sampler_gap=0.2, skipped=1, kl=1.5, grad_norm=3, peak_gib=2,
                                         reward=5)

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
        torch.manual_seed(noise)
        wrapper = WRAPPER.from_pretrained("tiny", config)
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
    for step in steps:
        for rank in range(world_size):
            with mock.patch.multiple(grpo, RANK=rank, WORLD_SIZE=world_size):
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

def test_metrics_of_a_rollout_by_hand(tmp_path):
    """What is learned from is the spread inside the groups; equal rewards (0.3 is not exact) have none."""
    trainer = make_trainer(tmp_path / "run")
    trainer.rewards = {"a": (reward_of([0.3] * 4 + [1, 2, 3, 6]), 2.0)}
    rollout, metrics = trainer.rollout(1)
    assert rollout["rewards"].tolist() == pytest.approx([0.6] * 4 + [2, 4, 6, 12])
    assert metrics["reward_std"] == pytest.approx(2 * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert metrics["frac_zero_std"] == 0.5
    assert metrics["reward"] == pytest.approx(2 * 13.2 / 8) and metrics["reward/a"] == pytest.approx(13.2 / 8)
    assert all(metrics[f"sec_{phase}"] > 0 for phase in ("sample", "decode", "score"))
    trainer.config.reward_norm = "group"
    trainer.rewards = {"a": (reward_of([None, 4, None, 2, 1, 2, 3, 6]), 1.0)}
    rewards = trainer.rollout(1)[0]["rewards"].view(2, 4)
    assert rewards.mean(1).tolist() == pytest.approx([0, 0], abs=1e-6) and rewards[0, ::2].tolist() == [0, 0]

# --- A run: what it leaves, and how it goes on --------------------------------------------------------------
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
    return len(torch.load(out / "checkpoint.pt", weights_only=True)["history"]) - 1

def without(row, prefix):
    return {key: row[key] for key in row if not key.startswith(prefix)}

def rows_of(out):
    """metrics.jsonl without what the clock says."""
    return [without(json.loads(line), "sec_") for line in (out / "metrics.jsonl").read_text().splitlines()]

def state_of(out):
    """A checkpoint as text, bit for bit, without the clock and the name of the folder."""
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    state["history"] = [without(row, "sec_") for row in state["history"]]
    state["config"] = {key: value for key, value in state["config"].items() if key not in ("out", "resume")}
    return json.dumps(state, default=torch.Tensor.tolist, sort_keys=True)

def assert_same_run(one, other):
    """Every file of two runs, but for seconds and the name of the folder."""
    names = sorted(path.relative_to(one) for path in one.rglob("*.*"))
    assert names == sorted(path.relative_to(other) for path in other.rglob("*.*"))
    assert state_of(one) == state_of(other)
    assert rows_of(one) == rows_of(other)
    for name in names:
        if name.name not in ("checkpoint.pt", "metrics.jsonl"):
            assert (one / name).read_bytes() == (other / name).read_bytes(), name

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of five steps whose reward is luck, with pictures every two."""
    out = tmp_path_factory.mktemp("finished") / "run"
    make_lucky(out).train()
    return out

def test_what_is_written_when(finished):
    """A checkpoint after every step; pictures before the first one, every --save-every and at the end."""
    rows = rows_of(finished)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[0].keys() == {"step", "reward_fixed"}
    assert [row["step"] for row in rows if "reward_fixed" in row] == [0, 2, 4, 5]
    names = [f"samples_{step:05d}.png" for step in (0, 2, 4, 5)]
    assert sorted(path.name for path in finished.iterdir()) == ["adapter", "checkpoint.pt", "metrics.jsonl", *names]
    assert Image.open(finished / names[0]).size == (3 * 64, 128)
    assert step_of(finished) == 5
    assert len({row["reward"] for row in rows[1:]}) == 5  # luck is new in each step

def test_fixed_pictures_have_fixed_prompts_and_seeds(tmp_path):
    """What training draws in between must not show."""
    trainer = make_trainer(tmp_path, size="64")
    trainer.prompts = [f"a {name} thing" for name in grpo.COLORS] + ["a ninth"]
    trainer.targets = [None] * 9
    trainer.rewards = {"a": (reward_of([None] + [1.0] * 7), 1.0)}
    with mock.patch.object(trainer.wrapper, "sample", wraps=trainer.wrapper.sample) as spy:
        assert trainer.save_samples("first.png") == 1
    assert spy.call_args.args == (trainer.prompts[:8], 1, range(8))
    trainer.rollout(1)
    trainer.save_samples("second.png")
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()

def test_resume_is_bit_for_bit(finished, tmp_path):
    """What is not in the checkpoint (moments, order, random state) would make the second half another one."""
    out = tmp_path / "run"
    make_lucky(out, steps=2).train()
    (out / "metrics.jsonl").write_text('{"step": 3, "rew')  # torn
    resume_lucky(out).train()
    assert_same_run(finished, out)
    trainer = resume_lucky(out, lr=0.125)
    assert trainer.optimizer.param_groups[0]["lr"] == 0.125  # what is typed wins
    make_lucky(tmp_path / "odd", steps=1).train()  # pictures of a last step are not taken back
    resume_lucky(tmp_path / "odd").train()
    assert "reward_fixed" in rows_of(tmp_path / "odd")[1]

def test_the_luck_of_a_reward_comes_from_seed_and_step(tmp_path):
    """Else a resumed run, or one with pictures in between, would go on with other rewards."""
    trainer = make_lucky(tmp_path)
    first, _, again = (trainer.rollout(step)[0]["rewards"] for step in (1, 2, 1))
    assert torch.equal(first, again)

@pytest.mark.parametrize("save_every", [99, 3])
def test_a_reward_that_fails_costs_no_step(tmp_path, save_every):
    """In a rollout, or on the pictures of a step: the step before, or that step itself, is saved."""
    trainer = make_lucky(tmp_path / "run", save_every=save_every)

    def fails(images, prompts, targets):
        return 1 / 0 if len(trainer.history) == 4 else luck(images, prompts, targets)

    trainer.rewards = {"luck": (fails, 1.0)}
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert step_of(tmp_path / "run") == 3

# --- Processes: several GPUs (here of the CPU), Ctrl-C, kills ------------------------------------------------
SMALL = "--model tiny --size 64 --batch-size 2 --group-size 2 --micro-batch-size 2".split()
ENV = os.environ | {
    "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
SERVER = multiprocessing.get_context("forkserver")  # imports all that is slow once, for all its children
SERVER.set_forkserver_preload([__name__, "diffusers.pipelines.glm_image.pipeline_glm_image"])

def child(folder, argv, before, env, constants):
    """The life of a process: grpo.main on the random toy, after `before`. What it prints goes to a file."""
    os.chdir(folder)
    os.environ.update(env)
    log = os.open("log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    grpo.make_tiny_pipeline = QUICK
    vars(grpo).update(constants)
    before()
    grpo.main(argv)

def start(folder, *argv, before=bool, env=(), **constants):
    process = SERVER.Process(target=child, args=(folder, argv, before, dict(env), constants), daemon=True)
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
        grpo.run_file.cache_clear()
        capsys.readouterr()
        try:
            code = grpo.main(list(argv)) or 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run

def assert_refused(outcome, word):
    """Exit code 2 and one line that has this word."""
    code, _, error = outcome
    assert code == 2 and "error: " in error and error.count("\n") == 1, error
    assert word in error

def assert_same_adapters(one, other):
    """Of two runs, to 1e-5."""
    one, other = (load_file(out / "adapter/adapter_model.safetensors") for out in (one, other))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)

def test_two_gpus_do_what_one_does(tmp_path, command):
    """Three steps in one process = two steps in two and, resumed, one in one: all must have crossed over."""
    (tmp_path / "quick.py").write_text(
        "import functools, __main__ as grpo\ncolor = grpo.reward_color\n"
        "grpo.make_tiny_pipeline = functools.partial(grpo.make_tiny_pipeline, warmup_steps=0)\n")
    flags = "--scale-rewards batch --num-iterations 2 --lr 1e-3 --kl-coef 0.1 --max-grad-norm 1e-3 --save-every 1"
    argv = [*SMALL, *flags.split()]
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split(), HERE / "grpo.py"]
    process = subprocess.Popen([*torchrun, *argv, *"--reward quick.py:color --out two --steps 2".split()],
                               cwd=tmp_path, env=ENV, **PIPES)
    assert command(*argv, "--out", "one", "--steps", "3")[0] == 0
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert len(re.findall("^step ", out, re.MULTILINE)) == 3  # and not 6
    assert command("--resume", "two", "--steps", "3", "--reward", "color")[0] == 0
    assert_same_adapters(tmp_path / "one", tmp_path / "two")
    for a, b in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        b = {key.replace("quick.py:", ""): value for key, value in b.items()}
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)

def start_two(folder, *argv, before=bool):
    """Two processes as torchrun would start them -> their exit codes, and what they have printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = dict(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE="2")
    processes = [start(folder, *argv, before=before, env=env | dict(RANK=str(rank)), RANK=rank, WORLD_SIZE=2)
                 for rank in (0, 1)]
    return [end(process) for process in processes], (folder / "log").read_text()

def fail_on_one():
    """In step 3, on the second GPU."""
    calls = []

    def color(images, prompts, targets):
        calls.append(images)
        return grpo.reward_color(images, prompts) if grpo.RANK == 0 or len(calls) < 3 else 1 / 0

    grpo.REWARDS["color"] = color

def test_a_reward_that_fails_on_one_gpu_ends_the_run_on_all(tmp_path):
    """The others would wait for ever; and no whole step is lost."""
    codes, log = start_two(tmp_path, *SMALL, *"--out run --save-every 99".split(), before=fail_on_one)
    assert 0 not in codes and "ZeroDivisionError" in log
    assert step_of(tmp_path / "run") == 2

def press():
    """Ctrl-C in the scoring of step 3."""
    calls = []

    def color(images, prompts, targets):
        calls.append(images)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return grpo.reward_color(images, prompts)

    grpo.REWARDS["color"] = color

def test_ctrl_c_ends_with_one_line_that_says_how_to_go_on(tmp_path):
    """And no traceback."""
    process = start(tmp_path, *SMALL, "--out", "run", "--save-every", "99", before=press)
    assert end(process) == 1
    log = (tmp_path / "log").read_text()
    assert log.endswith("stopped; python grpo.py --resume run goes on after its last step\n")
    assert "Traceback" not in log and step_of(tmp_path / "run") == 2

def kill_in_write(when, share):
    """In the when-th checkpoint, with this share of its bytes on the disk."""
    save = torch.save
    calls = []

    def kills(state, path):
        calls.append(path)
        save(state, path)
        if len(calls) == when:
            os.truncate(path, int(share * os.path.getsize(path)))
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = kills

def test_kill_nine_at_any_moment(tmp_path):
    """12 kills, half of them in the writing of checkpoint.pt: the end is that of an undisturbed run."""
    steps = 32
    flags = [*SMALL, "--steps", str(steps), "--save-every", "3"]
    whole = start(tmp_path, *flags, "--out", "whole")
    rng = random.Random(0)
    checkpoint = tmp_path / "run/checkpoint.pt"
    for kill in range(12):
        argv = ["--resume", "run"] if checkpoint.exists() else [*flags, "--out", "run"]
        if kill % 2:
            before = functools.partial(kill_in_write, rng.randint(2, 4), rng.choice([0, 0.5, 1]))
            process = start(tmp_path, *argv, before=before)
        else:
            written = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
            process = start(tmp_path, *argv)
            while process.is_alive() and not (checkpoint.exists() and checkpoint.stat().st_mtime_ns > written):
                time.sleep(0.01)
            process.join(rng.uniform(0, 0.3))
            process.kill()
        assert end(process) == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert 0 < step_of(tmp_path / "run") < steps
    assert end(start(tmp_path, "--resume", "run")) == 0
    assert end(whole) == 0
    (tmp_path / "run/checkpoint.part").unlink(missing_ok=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")

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
    assert not error  # no bar where there is no terminal
    return out, printed

METRICS = set("""step loss policy_loss reward reward_std reward/color frac_zero_std kl ratio_max clip_frac entropy
    grad_norm skipped sampler_gap sec_sample sec_decode sec_score sec_update peak_gib""".split())

def test_what_the_first_command_leaves(run):
    """What the README promises to find in the folder, and what it says to look at."""
    out, printed = run
    pictures = {f"samples_{step:05d}.png" for step in (0, 10, 20, 30, 40)}
    adapter = {"adapter/adapter_model.safetensors", "adapter/adapter_config.json"}
    files = {str(path.relative_to(out)) for path in out.rglob("*.*")}
    assert files == pictures | adapter | {"metrics.jsonl", "checkpoint.pt"}
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(41))
    for row in rows[1:]:
        assert row.keys() - {"reward_fixed"} == METRICS
        assert all(math.isfinite(value) for value in row.values())
    assert printed.startswith("model: tiny on cpu, files: out\nstep 0 ")
    assert printed.count("\n") == 42

def test_it_learns(run):
    """Rewards rise by far more than luck, and all fixed pictures but one at most get their colour."""
    out, _ = run
    rewards = [row["reward"] for row in rows_of(out)[1:]]
    assert np.mean(rewards[-5:]) - np.mean(rewards[:5]) > 0.15
    sheets = [Image.open(out / f"samples_{step:05d}.png") for step in (0, 40)]
    prompts, _ = grpo.load_prompts(HERE / "prompts.txt")
    scores = []
    for i, prompt in enumerate(prompts[:8]):
        pictures = [sheet.crop((i * 128, 0, i * 128 + 128, 128)) for sheet in sheets]
        scores.append(grpo.reward_color(pictures, [prompt] * 2))
    before, after = np.transpose(scores)
    assert np.mean(after - before) > 0.1 and sorted(after)[1] > 0.85

WRONG = """--group-size 1, --group-size four, --size 0, --size -64, --size 100, --size 64x100, --size 100x64, --size 64x0, --size 0x64,
    --batch-size 0, --micro-batch-size 0, --steps 0, --steps 1.5, --save-every 0, --lora-rank 0, --seed -1,
    --decode-steps 0, --num-iterations 0, --lr nan, --lr -1, --lr inf, --kl-coef -1, --clip-range inf,
    --clip-range-high -1, --max-grad-norm nan, --guidance nan, --top-p 0, --top-p 1.5, --temperature 0,
    --temperature nan, --offload maybe, --scale-rewards std, --importance token, --reward-norm batch,
    --grop-size 4, --reward """  # the answer names the flag
BAD = [*((typed, typed.split()[0][2:]) for typed in re.split(r",\s+", WRONG)), *[  # typed, and a word of the answer
    ("--size big", "big"), ("--size 64x128x256", "128x256"), ("--prompts missing.txt", "missing.txt"), ("--prompts .", "directory"),
    ("--prompts comments.txt", "no prompt"), ("--prompts latin1.txt", "utf-8"),
    ("--prompts lost.txt", "lost.png"), ("--prompts text.txt", "image"), ("--reward beauty", "color, mse"),
    ("--reward color=much", "much"), ("--reward color=1,color=2", "twice"), ("--reward color,", "unknown"),
    ("--reward mine.py:sharp,mine.py:sharp=2", "twice"), ("--reward nowhere.py:sharp", "nowhere.py"),
    ("--reward mine.py", "mine.py"), ("--reward mse", "target"), ("--reward mine.py:dull", "dull"),
    ("--model folder", "folder"), ("--model no-such/model", "no-such"), ("--resume ", "holds no run"),
    ("--resume nowhere", "holds no run"), ("--resume folder", "holds no run"), ("--resume torn", "holds no run"),
    ("--resume list", "holds no run"), ("--resume bomb", "holds no run"), ("--resume done --lr nan", "lr"),
    ("--resume done --prompts other.txt", "prompts"), ("--resume done --lora-rank 2", "--lora-rank"), ("--resume done --seed 1", "--seed"),
    ("--resume done --model folder", "model"), ("--out done", "--resume")]]

class Bomb:
    """A pickle that makes the file `owned` when it is loaded."""
    def __reduce__(self):
        return Path.touch, (Path("owned"),)

@pytest.fixture(scope="module")
def bad_files(finished, tmp_path_factory):
    """All that BAD names, in a folder."""
    folder = tmp_path_factory.mktemp("bad")
    for name in "folder done torn list bomb".split():
        (folder / name).mkdir()
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    state["config"]["prompts"] = str(folder / "good.txt")
    torch.save(state | {"same": ["tiny", 16, 0, ["a red fox"]]}, folder / "done/checkpoint.pt")
    torch.save([1, 2, 3], folder / "list/checkpoint.pt")
    torch.save(Bomb(), folder / "bomb/checkpoint.pt")
    data = (folder / "done/checkpoint.pt").read_bytes()
    (folder / "torn/checkpoint.pt").write_bytes(data[:len(data) // 2])
    texts = {
        "comments.txt": "# only\n\n", "lost.txt": "a fox\tlost.png\n", "text.txt": "a fox\tcomments.txt\n",
        "good.txt": "a red fox\n", "other.txt": "a blue fox\n",
        "mine.py": "def sharp(images, *_): return [1.0] * len(images)"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latin1.txt").write_bytes(b"caf\xe9\n")
    return folder

@pytest.mark.parametrize("typed, word", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(bad_files, command, monkeypatch, typed, word):
    """No traceback, nothing written, and no model loaded in vain."""
    monkeypatch.chdir(bad_files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    if not typed.startswith("--model"):
        monkeypatch.setattr(WRAPPER, "from_pretrained", mock.Mock(side_effect=AssertionError))
    before = sorted(bad_files.rglob("*"))
    model = [] if typed.startswith(("--model", "--resume")) else ["--model", "tiny"]
    outcome = command(*model, *typed.split(" "))
    assert_refused((outcome[0], outcome[1], outcome[2].replace("_", "-")), word)
    assert sorted(bad_files.rglob("*")) == before

@pytest.mark.parametrize("values", ["[0.5]", "[0.5] * 5", "[0.5, -math.inf] * 2", "[math.nan] * 4", "[None, math.nan] * 2",
                                    "__import__('bad_package')"])
def test_a_reward_without_numbers_gets_one_line_and_exit_code_2(command, values):
    """A NaN taken for "no opinion" would leave only the KL to train; a missing package is one line too. No step is lost."""
    code = f"import math\ndef bad(images, *_): return {values} if len(images) == 4 else [1.0] * len(images)"
    Path("mine.py").write_text(code)
    assert_refused(command(*SMALL, "--reward", "mine.py:bad", "--out", "run"), "bad")
    assert step_of(Path("run")) == 0

@pytest.mark.parametrize("code", ["1 / 0", "float('x')", "open('nowhere')"])
def test_a_broken_file_of_rewards_keeps_its_traceback(command, code):
    """One line would not say where in the user's own code to look."""
    Path("broken.py").write_text(code)
    with pytest.raises(RuntimeError, match="broken.py"):
        command("--model", "tiny", "--reward", "broken.py:sharp")

@pytest.mark.parametrize("error", ["ValueError", "OSError", "KeyError", "ImportError"])
def test_a_bug_in_training_keeps_its_traceback(command, error):
    """In a reward, or in a loss that is being changed: one line would not say where it is."""
    Path("mine.py").write_text(f"def bad(images, *_): raise {error}('here')")
    with pytest.raises(getattr(builtins, error), match="here"):
        command(*SMALL, "--reward", "mine.py:bad", "--out", "run")

def test_a_resumed_run_takes_its_own_settings_and_what_is_typed(command):
    """A new --lr, --steps or --kl-coef is research; to type all the others again would invite mistakes."""
    argv = "--steps 1 --out run --temperature 0.7 --lr 1e-3"
    assert command(*SMALL, *argv.split())[0] == 0
    code, out, _ = command("--resume", "run", "--steps", "2", "--lr", "5e-5", "--kl-coef", "0")  # 5e-5: a default
    assert code == 0 and step_of(Path("run")) == 2
    config = torch.load("run/checkpoint.pt", weights_only=True)["config"]
    assert (config["temperature"], config["size"], config["steps"]) == (0.7, "64", 2)
    assert (config["lr"], config["kl_coef"], config["out"]) == (5e-5, 0.0, "run")
    assert ["kl" in row for row in rows_of(Path("run"))] == [False, True, False]  # step 1 is the old run's

def test_help_shows_every_flag_and_what_it_means(command):
    """Made from Config itself, its comments included."""
    code, out, _ = command("--help")
    assert code == 0
    for field in dataclasses.fields(grpo.Config):
        assert f"--{field.name.replace('_', '-')}" in out and f"    {field.name}: " in out
    assert "price of leaving the base model" in out

def test_settings_reach_the_wrapper(command, monkeypatch):
    """And so does what is not given: the toy's defaults where GLM-Image has no room, else its own."""
    spy = mock.Mock(side_effect=ValueError)
    monkeypatch.setattr(WRAPPER, "from_pretrained", spy)
    command(*"--top-p 0.5 --temperature 0.7 --guidance 2 --size 64x96 --decode_steps 3 --out a".split())
    monkeypatch.setattr(grpo, "FREE_GIB", 80)
    command("--group-size", "6", "--out", "a")
    typed = dict(top_p=0.5, temperature=0.7, guidance=2.0, size="64x96", decode_steps=3, out="a")
    toy = grpo.Config(**grpo.TINY | typed)
    assert spy.call_args_list == [
        mock.call("tiny", toy), mock.call("zai-org/GLM-Image", grpo.Config(group_size=6, out="a"))]
    pipe = QUICK(0)
    pipe.vision_language_encoder.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    for config, own in ((toy, (0.7, 0.5)), (make_config(temperature=None), (0.9, 0.75))):
        wrapper = WRAPPER(pipe, config)
        assert (wrapper.temperature, wrapper.top_p_filter.top_p) == own
    assert (toy.height, toy.width) == (96, 64)
    with mock.patch.object(grpo, "WORLD_SIZE", 2), pytest.raises(ValueError, match="--batch-size"):
        grpo.Config(batch_size=3)

# --- The benchmark: `python test_grpo.py --bench`, with the flags of grpo.py. Nothing here is a test. -------
def clock(function, *args):
    """-> (seconds, what it returned); a GPU is waited for."""
    start = time.perf_counter()
    result = function(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result

def stock_seconds(wrapper, prompt, tokens):
    """An image the usual way: the pipeline samples and decodes it alone, then a pass of its own scores it."""
    config = wrapper.config
    wrapper.hold(wrapper.ar_half)
    wrapper.policy.model.visual.to(grpo.DEVICE)  # `generate` asks the vision tower
    codes = wrapper.pipe.transformer.config.prior_vq_quantizer_codebook_size
    wrapper.policy.generation_config.suppress_tokens = list(range(codes, wrapper.policy.lm_head.out_features))
    sampled, _ = clock(functools.partial(
        wrapper.pipe.generate_prior_tokens, prompt, config.height, config.width, device=grpo.DEVICE))
    decoded, _ = clock(wrapper.decode, [prompt], tokens, [0])
    with torch.no_grad():
        scored, _ = clock(wrapper.compute_logprobs, [prompt], tokens)
    return sampled + decoded + scored

def our_seconds(trainer, prompt, group_size):
    """One step on one prompt -> seconds of sample, decode, score and update, and the tokens."""
    prompts = [prompt] * group_size
    sample, (tokens, logprobs, allowed) = clock(trainer.wrapper.sample, [prompt], group_size, [0])
    decode, images = clock(trainer.wrapper.decode, [prompt], tokens, [0])
    score, (rewards, _) = clock(grpo.compute_rewards, images, prompts, [None] * group_size, trainer.rewards)
    advantages = grpo.compute_advantages(rewards, group_size) if group_size > 1 else torch.zeros(1)
    rollout = dict(prompts=prompts, tokens=tokens, logprobs=logprobs, allowed=allowed,
                   advantages=advantages.to(grpo.DEVICE))
    update, _ = clock(trainer.train_step, rollout)
    return (sample, decode, score, update), tokens

def gib(*modules):
    return sum(weight.nbytes for module in modules for weight in module.parameters()) / 2**30

def bench(argv):
    """One table. Every ratio is of two medians measured in turn in this run."""
    prompt = "a red fox"
    config = grpo.parse_args(["--micro-batch-size", "1" if grpo.CUDA else "8", *argv])
    with mock.patch.object(grpo, "make_tiny_pipeline", QUICK):
        if config.model == "random":
            wrapper = WRAPPER(make_real(grpo.DEVICE), config)
        else:
            wrapper = WRAPPER.from_pretrained(config.model, config)
    trainer = grpo.GRPOTrainer(config, wrapper, [prompt])
    repeats = 3 if grpo.CUDA else 9
    where = torch.cuda.get_device_name() if grpo.CUDA else f"{torch.get_num_threads()} CPU thread(s)"
    print(f"{config.model}, {config.size}, {config.decode_steps} decode steps, {config.micro_batch_size} images at "
          f"a time, offload {config.offload}, {where}, one prompt, medians of {repeats}, seconds\n")
    print("| group | stock rollout | ours | ratio | sample | decode | update | step | tokens/s | peak GiB |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for group_size in (1, 4, 8, 16):
        _, tokens = our_seconds(trainer, prompt, group_size)  # warm-up
        phases = []
        stocks = []
        for _ in range(repeats):
            phases.append(our_seconds(trainer, prompt, group_size)[0])
            images = 1 if grpo.CUDA else group_size
            seconds = [stock_seconds(wrapper, prompt, tokens[:1]) for _ in range(images)]
            stocks.append(statistics.mean(seconds) * group_size)
        sample, decode, score, update = (statistics.median(column) for column in zip(*phases))
        stock = statistics.median(stocks)
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"| {group_size} | {stock:.3f} | {sample + decode:.3f} | {stock / (sample + decode):.1f}x | {sample:.3f} "
              f"| {decode:.3f} | {update:.3f} | {sample + decode + score + update:.3f} "
              f"| {tokens.numel() / sample:.0f} | {peak:.1f} |", flush=True)

# --- The memory of a GPU, counted without one: `python test_grpo.py --memory`. Nothing here is a test. ------
def memory():
    """One table. What does not depend on the number of prompts is counted anew in every row."""
    pipe = make_real("meta")
    ar = pipe.vision_language_encoder
    halves = [[ar.model.language_model, ar.lm_head], [pipe.text_encoder, pipe.transformer, pipe.vae]]
    sizes = [weight.nbytes for half in halves for module in half for weight in module.parameters()]
    pinned = sum(2 ** math.ceil(math.log2(size)) for size in sizes) / 2**30  # PyTorch rounds each block up
    whole = gib(ar, *halves[1])
    print(f"GiB of weights in bf16: {gib(*halves[0]):.1f} to sample and update, {gib(*halves[1]):.1f} to decode; on the "
          f"host {whole:.1f}, with --offload on, pinned, {pinned + whole - sum(sizes) / 2**30:.1f}; --offload on / off:\n")
    print("| size | prompts x group | micro-batch | sample | decode | update |\n|---|---|---|---|---|---|", flush=True)
    for side, num_prompts, group_size, size in [
            (512, 1, 4, 1), (512, 8, 4, 1), (512, 8, 4, 4), (1024, 8, 4, 1), (1024, 8, 4, 4), (1024, 8, 16, 1)]:
        peaks = count_memory(side, num_prompts, size, group_size)
        cells = [f"{peaks[phase]['on']:.1f} / {peaks[phase]['off']:.1f}" for phase in ("sample", "decode", "update")]
        print(f"| {side} | {num_prompts} x {group_size} | {size} |", " | ".join(cells), "|", flush=True)

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
}

def ablate(seeds):
    """One table: mean reward of the last five of 40 steps, per seed, and mean and std over the seeds."""
    results = {name: [] for name in ABLATIONS}
    for seed in seeds:
        toy = make_tiny_pipeline(seed)
        for name, settings in ABLATIONS.items():
            config = grpo.Config(**grpo.TINY | settings | dict(seed=seed))
            wrapper = WRAPPER(copy.deepcopy(toy), config)
            if name.startswith("noise"):
                wrapper.decode = noise_of_its_own(wrapper.decode)
            trainer = grpo.GRPOTrainer(config, wrapper, grpo.load_prompts(config.prompts)[0])
            trainer.finish_step = bool  # no files
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
    else:
        sys.exit("test_grpo.py: error: `python -m pytest` runs the tests; else --bench, --memory or --ablate")
