"""GLM-Image and Janus-Pro with 4 bits for each frozen weight (QLoRA, arXiv 2305.14314).

    pip install bitsandbytes
    python grpo.py --wrapper examples/four_bits.py:GLMImage4Bit --model zai-org/GLM-Image
    python grpo.py --wrapper examples/four_bits.py:GLMImage4Bit    # the tiny one needs no GPU
"""
import re

import torch

import grpo
from examples import fast, janus

try:
    import bitsandbytes  # it gives torch both operations
except ModuleNotFoundError:
    raise grpo.BadInput("--wrapper: first run pip install bitsandbytes") from None

class Linear4Bit(torch.nn.Linear):
    """It keeps its weight in NF4, and makes it whenever it is asked. `Linear4bit` of bitsandbytes
    has three traps: its product is rounded before LoRA adds its part, which swallows most of an
    update in bf16; nothing can be added to it in place; on some CPUs it has no gradient."""
    BLOCK = 64  # weights that share a scale

    def __init__(self, linear):
        torch.nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        # The GPU does this faster, but a small one has no room for both halves of GLM-Image, so the
        # result goes to where the weight was. Parameters are what --offload moves.
        kept = torch.ops.bitsandbytes.quantize_4bit(
            linear.weight.to(grpo.DEVICE), self.BLOCK, "nf4", torch.uint8)
        self.codes, self.scales = [torch.nn.Parameter(part.to(linear.weight.device), False)
                                   for part in kept]

    @property
    def weight(self):
        row = torch.ops.bitsandbytes.dequantize_4bit(  # on some CPUs, rows of 80 come out wrong
            self.codes, self.scales, self.BLOCK, "nf4", [2 * len(self.codes)], self.dtype)
        return row.view(self.out_features, self.in_features)

@torch.no_grad()
def quantize(model, pattern):
    for name, layer in [*model.named_modules()]:
        if re.fullmatch(pattern, name):
            if type(layer) is not torch.nn.Linear:
                raise grpo.BadInput(f"--model: {name} is quantized already: {type(layer)}")
            model.set_submodule(name, Linear4Bit(layer))

class GLMImage4Bit(grpo.GLMImageWrapper):
    """Of 4 bits are the layers that get LoRA, and the DiT's attention and feed-forward: most of the
    weights. Errors of the others, such as embeddings and what modulates norms, reach everything."""
    defaults = dict(model=grpo.TINY_MODEL)
    dit_layers = r"transformer_blocks\.\d+\.(attn1\.to_([qkv]|out\.0)|ff\.net\.(0\.proj|2))"

    def __init__(self, pipe, config):
        quantize(pipe.vision_language_encoder, self.lora_layers)
        quantize(pipe.transformer, self.dit_layers)
        super().__init__(pipe, config)

class FastGLMImage4Bit(fast.Fast, GLMImage4Bit):
    fp8 = False  # it has layers of its own

class Janus4Bit(janus.Janus):
    def __init__(self, processor, policy, config):
        quantize(policy, self.lora_layers)
        super().__init__(processor, policy, config)
