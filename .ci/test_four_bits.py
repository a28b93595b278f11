"""Tests of four_bits.py, on the tiny GLM-Image and on a small Janus of random weights. No GPU."""
import re

import pytest, torch

import grpo
from conftest import perturb
from examples import four_bits, janus
from examples.make import tiny
from test_janus import load as load_janus

PROMPTS = [grpo.Prompt("red"), grpo.Prompt("the green side of a blue house")]
pytestmark = pytest.mark.usefixtures("small_draft")

def load_glm_image(Wrapper):
    config = grpo.Config(**tiny.SETTINGS | dict(width=64, height=64, offload="on"))
    return Wrapper.from_pretrained(grpo.TINY_MODEL, config)

def train(wrapper):
    """A step from adapters that do something -> tokens, pictures, gradients."""
    trainer = grpo.GRPOTrainer(wrapper.config, wrapper, PROMPTS)
    perturb(trainer.lora)
    rollout = wrapper.sample(PROMPTS, 4, [8, 9])
    gradients = {}
    trainer.update_weights = lambda: gradients.update({k: w.grad for k, w in trainer.lora.weights.items()}) or 0.0
    trainer.train_step(rollout, torch.linspace(-1, 1, 8))
    return rollout.tokens, grpo.pil_to_tensor(wrapper.decode(PROMPTS, rollout.tokens, [8, 9])), gradients

@pytest.mark.parametrize("load, Four, Plain", [(load_glm_image, four_bits.GLMImage4Bit, grpo.GLMImageWrapper),
                                               (load_janus, four_bits.Janus4Bit, janus.Janus)])
def test_it_is_the_model_with_rounded_weights(load, Four, Plain):
    """All that training sees is equal to that of a plain model whose weights were rounded by hand. LoRA's layers have 4
    bits, each of them, and six of the DiT's; with --offload on, what they keep waits on the CPU."""
    four, plain = load(Four), load(Plain)
    models = [(four.policy, plain.policy, four.lora_layers)]
    if load is load_glm_image:
        models.append((four.pipe.transformer, plain.pipe.transformer, r".*(to_[qkv]|to_out\.0|ff\.net\.(0\.proj|2))"))
    for model, copy, names in models:
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, four_bits.Linear4Bit)}
        assert layers.keys() == {name for name, _ in copy.named_modules() if re.fullmatch(names, name)}
        for name, layer in layers.items():
            other = copy.get_submodule(name).weight
            assert 0.05 < (layer.weight - other).norm() / other.norm() < 0.15  # NF4 of a normal distribution: .09
            other.data.copy_(layer.weight)
            assert load is load_janus or {id(layer.codes), id(layer.scales)} <= {id(old) for old, _ in four.cpu_copies}
    (tokens, pictures, gradients), expected = train(four), train(plain)
    assert torch.equal(tokens, expected[0]) and torch.equal(pictures, expected[1])
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradient, expected[2][name], rtol=1e-6, atol=1e-6 * gradient.abs().max().item())
