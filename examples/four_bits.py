"""GLM-Image and Janus-Pro with 4 bits for a frozen weight (QLoRA, arXiv 2305.14314), for small cards.

    pip install bitsandbytes
    python grpo.py --wrapper examples/four_bits.py:GLMImage4Bit --model zai-org/GLM-Image
    python -m examples.four_bits    # the first, on the tiny GLM-Image

docs/cards.md says what fits which card, and what the rounding costs.
"""
import importlib, re, sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples import janus

BLOCK = 64  # weights that share a scale

class Linear4Bit(nn.Linear):
    """A linear layer whose weight is kept in NF4, and made anew from it wherever it is asked for.
    So to LoRA it is a layer like any other: the product and the adapters' part are rounded once,
    together. bitsandbytes' own `Linear4bit` rounds the product first, which swallows most of an
    update in bf16. It also has a view as its output, to which nothing may be added in place, and
    in eval mode on some CPUs it repacks its weight and then has no gradient, with a mere warning.
    What it keeps are two parameters and no more, so that offloading moves all of it."""
    def __init__(self, linear):
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        # Where the weight lies, the result does too. The GPU is only borrowed, as it is faster.
        codes, scales = torch.ops.bitsandbytes.quantize_4bit(
            linear.weight.detach().to(grpo.DEVICE), BLOCK, "nf4", torch.uint8)
        self.codes = nn.Parameter(codes.to(linear.weight.device), requires_grad=False)
        self.scales = nn.Parameter(scales.to(linear.weight.device), requires_grad=False)

    @property
    def weight(self):
        return torch.ops.bitsandbytes.dequantize_4bit(
            self.codes, self.scales, BLOCK, "nf4", (self.out_features, self.in_features),
            self.dtype)

def find_bitsandbytes():
    """Its operations are known to torch from then on."""
    grpo.attempt("--wrapper: first run pip install bitsandbytes",
                 importlib.import_module, "bitsandbytes")

def quantize(model, pattern):
    """Replaces the linear layers whose names match."""
    find_bitsandbytes()
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Linear) and re.fullmatch(pattern, name):
            model.set_submodule(name, Linear4Bit(layer))

class GLMImage4Bit(grpo.GLMImageWrapper):
    """What LoRA is added to, and the DiT's attention and feed-forward: nine tenths of the weights.
    Embeddings, heads, norms and their modulation, the VAE and the text encoder stay as they are:
    they are small, and their errors reach everything."""
    dit_layers = r"transformer_blocks\.\d+\.(attn1\.to_[qkv]|attn1\.to_out\.0|ff\..*)"

    @classmethod
    def from_pretrained(cls, path, config):
        find_bitsandbytes()  # before 35 GB are loaded
        return super().from_pretrained(path, config)

    def __init__(self, pipe, config):
        quantize(pipe.vision_language_encoder, self.lora_layers)
        quantize(pipe.transformer, self.dit_layers)
        super().__init__(pipe, config)

class Janus4Bit(janus.Janus):
    @classmethod
    def from_pretrained(cls, path, config):
        find_bitsandbytes()
        return super().from_pretrained(path, config)

    def __init__(self, processor, policy, config):
        quantize(policy, self.lora_layers)
        super().__init__(processor, policy, config)

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)  # before the flags
    grpo.main(wrapper=f"{__file__}:GLMImage4Bit")
