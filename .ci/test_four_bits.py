"""Tests of four_bits.py, on the tiny GLM-Image and on a small Janus of random weights. No GPU."""
import os, re, sys
from pathlib import Path

import pytest, torch, transformers

import grpo
from conftest import ROOT, have_same_weights, perturb
from examples import flow, four_bits, janus
from examples.make import small_janus, tiny

FILE = f"{ROOT}/examples/four_bits.py"
PROMPTS = ["red", "the green side of a blue house"]
pytestmark = pytest.mark.usefixtures("small_draft")

def load_glm_image(Wrapper, **settings):
    config = grpo.Config(**tiny.SETTINGS | dict(width=64, height=64) | settings)
    return Wrapper.from_pretrained(grpo.TINY_MODEL, config)

def make_janus(Wrapper):
    transformers.set_seed(0)
    processor = small_janus.make_processor()
    return Wrapper(processor, small_janus.make_policy(processor.tokenizer), grpo.Config(**small_janus.SETTINGS))

def find_layers(model):
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, four_bits.Linear4Bit)}

@pytest.mark.parametrize("shape", [(80, 80), (320, 80), (80, 320), (96, 64)])
def test_rows_of_any_length(shape):
    """On CPUs with AVX-512, bitsandbytes 0.50 gave wrong weights for rows that are no whole number of blocks."""
    four_bits.import_bitsandbytes()
    linear = torch.nn.Linear(*shape[::-1])
    error = four_bits.Linear4Bit(linear).weight - linear.weight
    assert error.norm() / linear.weight.norm() < 0.15

def train(wrapper, out):
    """A step from adapters that do something -> rollout, pictures, metrics, gradients."""
    trainer = grpo.GRPOTrainer(grpo.Config(**vars(wrapper.config) | dict(out=str(out))), wrapper, PROMPTS)
    perturb(trainer.lora)
    rollout = wrapper.sample(PROMPTS, 4, [8, 9])
    gradients = {}
    trainer.update_weights = lambda: gradients.update({k: w.grad for k, w in trainer.lora.weights.items()}) or 0.0
    metrics = trainer.train_step(rollout, torch.linspace(-1, 1, 8))
    return rollout, grpo.pil_to_tensor(wrapper.decode(PROMPTS, rollout.tokens, [8, 9])), metrics, gradients

@pytest.mark.parametrize("load, Four, Plain", [(load_glm_image, four_bits.GLMImage4Bit, grpo.GLMImageWrapper),
                                               (make_janus, four_bits.Janus4Bit, janus.Janus)])
def test_it_is_the_model_with_rounded_weights(tmp_path, load, Four, Plain):
    """All that training sees is equal to that of a plain model whose weights were rounded by hand: a layer that is left
    out, another shape or a gradient that is lost would show. LoRA's layers have 4 bits, each of them; heads have not."""
    four, plain = load(Four), load(Plain)
    assert find_layers(four.policy).keys() == {
        name for name, _ in plain.policy.named_modules() if re.fullmatch(four.lora_layers, name)}
    models = [(four.policy, plain.policy)]
    if load is load_glm_image:
        models.append((four.pipe.transformer, plain.pipe.transformer))
    for model, copy in models:
        for name, layer in find_layers(model).items():
            other = copy.get_submodule(name).weight
            assert 0.05 < (layer.weight - other).norm() / other.norm() < 0.15  # NF4 of a normal distribution: .09
            other.data.copy_(layer.weight)
    (rollout, pictures, metrics, gradients), expected = train(four, tmp_path / "four"), train(plain, tmp_path / "plain")
    assert torch.equal(rollout.tokens, expected[0].tokens) and torch.equal(pictures, expected[1])
    torch.testing.assert_close(rollout.logprobs, expected[0].logprobs, rtol=1e-6, atol=0)
    assert metrics["sampler_gap"] == pytest.approx(expected[2]["sampler_gap"], rel=0.01) and metrics["sampler_gap"] < 1e-5
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected[3][name], rtol=1e-6, atol=1e-6 * gradient.abs().max().item())

def test_the_dit_is_trained_in_4_bits():
    """A layer of bitsandbytes loses its gradient in eval mode, where a CPU has AVX512-BF16: ours is none."""
    dit = flow.DiT(load_glm_image(four_bits.GLMImage4Bit, kl_coef=0.0, decode_steps=2, group_size=2))
    dit.explores = True  # as in training
    assert not dit.policy.training and len(find_layers(dit.policy)) == 6
    lora = grpo.LoRA(dit.policy, dit.lora_layers, 4)
    perturb(lora)
    rollout = dit.sample(["red"], 2, [1])
    logprobs, _ = dit.compute_logprobs(rollout)
    torch.testing.assert_close(logprobs.detach(), rollout.logprobs, rtol=0, atol=1e-6)
    logprobs[0].sum().backward()
    assert all(weight.grad.abs().max() > 0 for weight in lora.weights.values())

def test_halves_take_turns(monkeypatch):
    """With --offload on, all that a layer of 4 bits keeps goes to the GPU and comes back: what stayed behind would be
    on another device than the rest. Here what waits is 0, and the numbers are those of --offload off."""
    four, other = [load_glm_image(four_bits.GLMImage4Bit, offload=offload) for offload in ("on", "off")]
    values = {weight: weight.data for weight, _ in four.cpu_copies}
    four.cpu_copies = [(weight, torch.zeros_like(weight)) for weight in values]

    def to(half, device):
        for weight in half.parameters():
            weight.data = values[weight]

    monkeypatch.setattr(torch.nn.ModuleList, "to", to)
    rollouts = [wrapper.sample(PROMPTS, 2, [1, 2]) for wrapper in (four, other)]
    assert torch.equal(rollouts[0].tokens, rollouts[1].tokens)
    assert all(layer.weight.any() for layer in find_layers(four.policy).values())
    pictures = [wrapper.decode(PROMPTS, rollouts[0].tokens, [1, 2]) for wrapper in (four, other)]
    assert torch.equal(*map(grpo.pil_to_tensor, pictures))
    assert not any(layer.weight.any() for layer in find_layers(four.policy).values())

@pytest.mark.parametrize("name, flags", [
    ("four_bits.py:GLMImage4Bit", "--width 64 --height 64 --batch-size 2 --group-size 2"),
    ("janus.py:Janus", "--model janus --width 32 --height 32 --batch-size 2 --group-size 2 --lr .01 --lora-rank 4")])
def test_a_run_goes_on_bit_for_bit_and_programs_know_it(name, flags, run):
    """From another directory, by the run's folder alone: weights must be rounded alike; guidance, in config.json, is
    part of Janus's policy."""
    processor = small_janus.make_processor()
    small_janus.make_policy(processor.tokenizer).save_pretrained("janus")
    processor.save_pretrained("janus")
    Path("two.txt").write_text("\n".join(PROMPTS))
    flags += f" --wrapper {ROOT}/examples/{name} --prompts two.txt --save-every 1"
    for typed in ("--steps 2 --out whole", "--steps 1 --out parts"):
        grpo.main(f"{flags} {typed}".split())
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    for program, typed in (
            ("grpo", "--resume ../parts --steps 2"), ("evaluate", "../whole --steps 0 2 --samples 2"),
            ("plot", "../whole --film film.png"), ("generate", "../whole --prompt red green --samples 3 --change")):
        code, _, error = run(program, typed)
        assert code == 0, error
    assert have_same_weights("../whole", "../parts")

def test_without_flags_it_is_the_tiny_model():
    """It took the settings of the large one, and a step of the tiny model lasted minutes."""
    config = grpo.parse_args([], wrapper=f"{FILE}:GLMImage4Bit")
    assert vars(config) == vars(grpo.parse_args([])) | dict(wrapper=str(FILE) + ":GLMImage4Bit")

@pytest.mark.parametrize("name", ["GLMImage4Bit", "Janus4Bit"])
def test_without_bitsandbytes(name, refuse, monkeypatch):
    """One hears of it before the model is loaded: --model does not exist."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert "pip install bitsandbytes" in refuse("grpo", f"--wrapper {FILE}:{name} --model no/such --width 384 "
                                                        "--height 384 --out run")

@pytest.mark.parametrize("b", [1e-5, 5e-5])
def test_small_updates_are_not_swallowed_in_bf16(b):
    """The layers of bitsandbytes round the product before LoRA adds its part, and lose most of it: 4,096 wide, the slope
    against the change in fp32 is near 0 for the first update."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4096, 512, bias=False)).to(torch.bfloat16)
    four_bits.import_bitsandbytes()
    four_bits.quantize(model, "0")
    lora = grpo.LoRA(model, "0", 32)
    A, B = lora.weights.values()
    rows = 4 * torch.randn(64, 4096).bfloat16()
    with torch.no_grad():
        B.copy_(b * torch.randn_like(B).sign())
        change = model(rows).float()
        lora.enabled = False
        change -= model(rows).float()
        true = 2 * (rows.float() @ A.T @ B.T)
    assert (change * true).sum() / true.square().sum() == pytest.approx(1, abs=0.1)
