"""GLM-Image and Janus-Pro with 4 bits for each frozen weight (QLoRA, arXiv 2305.14314).

    pip install bitsandbytes
    python grpo.py --wrapper examples/four_bits.py:GLMImage4Bit --model zai-org/GLM-Image
    python -m examples.four_bits    # the same with the tiny GLM-Image, which needs no GPU
"""
import re, sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples import janus

class Linear4Bit(torch.nn.Linear):
    """A linear layer that keeps its weight in NF4, and makes it anew whenever it is asked for.
    LoRA and autograd see a layer like any other. `Linear4bit` of bitsandbytes has three traps: its
    product is rounded before LoRA adds its part, which swallows most of an update in bf16; nothing
    can be added to its output in place; in eval mode on some CPUs it loses its gradient."""
    BLOCK = 64  # weights that share a scale

    def __init__(self, linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        # The GPU does this faster, but a small one has no room for both halves of GLM-Image: the
        # result goes to where the weight was. It is parameters, as those are what --offload moves.
        kept = torch.ops.bitsandbytes.quantize_4bit(
            linear.weight.to(grpo.DEVICE), self.BLOCK, "nf4", torch.uint8)
        self.codes, self.scales = [torch.nn.Parameter(part.to(linear.weight.device), False)
                                   for part in kept]

    @property
    def weight(self):
        row = torch.ops.bitsandbytes.dequantize_4bit(  # on some CPUs, rows of 80 come out wrong
            self.codes, self.scales, self.BLOCK, "nf4", [2 * len(self.codes)], self.dtype)
        return row.view(self.out_features, self.in_features)

def import_bitsandbytes():
    try:
        import bitsandbytes  # it gives torch both operations
    except ModuleNotFoundError:
        raise grpo.BadInput("--wrapper: first run pip install bitsandbytes") from None

@torch.no_grad()
def quantize(model, pattern):
    import_bitsandbytes()
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, torch.nn.Linear) and re.fullmatch(pattern, name):
            model.set_submodule(name, Linear4Bit(layer))

class FourBits:
    @classmethod
    def from_pretrained(cls, path, config):
        import_bitsandbytes()  # or one would hear of it after a long download
        return super().from_pretrained(path, config)

class GLMImage4Bit(FourBits, grpo.GLMImageWrapper):
    """Of 4 bits are the layers that get LoRA, and the DiT's attention and feed-forward: most of the
    weights. Errors of the others would reach everything: embeddings and head, what modulates the
    DiT's norms, its projectors, text encoder and VAE."""
    defaults = dict(model=grpo.TINY_MODEL)
    dit_layers = r"transformer_blocks\.\d+\.(attn1\.to_([qkv]|out\.0)|ff\.net\..*)"

    def __init__(self, pipe, config):
        quantize(pipe.vision_language_encoder, self.lora_layers)
        quantize(pipe.transformer, self.dit_layers)
        super().__init__(pipe, config)

class Janus4Bit(FourBits, janus.Janus):
    def __init__(self, processor, policy, config):
        quantize(policy, self.lora_layers)
        super().__init__(processor, policy, config)

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)  # before the flags
    grpo.main(wrapper=f"{__file__}:GLMImage4Bit")
