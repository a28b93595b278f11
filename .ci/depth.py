"""How far bf16 rounds at depth, on a CPU: `python .ci/depth.py`, some minutes of a core."""
import sys
from pathlib import Path
from unittest import mock

import torch, transformers
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))
import grpo

@torch.no_grad()
def depth(linear=F.linear):
    """A table: GLM-Image's AR half, random, a quarter as wide; max |log-prob differences| of the sampler to the trainer
    (gap), of two trainer passes (again), to one without padding, and to one whose sums are in reverse order."""
    prompts = ["green"] * 4 + ["a red fox on a wall beside a yellow door"] * 4
    print("|layers|init|bits|nats|gap|again|unpadded|reversed|99 %|mean|out|\n" + "|-" * 11 + "|")
    for deep, init, bits in [(10, 0.04, 16), (20, 0.04, 16), (40, 0.04, 16), (40, 0.08, 16),
                             (40, 0.04, 32)]:
        pipe = grpo.make_tiny_pipeline(warmup_steps=0)
        pipe.transformer.register_to_config(prior_vq_quantizer_codebook_size=16384)
        config = pipe.vision_language_encoder.config
        config.text_config = transformers.GlmImageTextConfig(  # all else has its real size
            num_hidden_layers=deep, hidden_size=1024, num_attention_heads=8, intermediate_size=3424,
            initializer_range=init, rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5))
        pipe.vision_language_encoder = transformers.GlmImageForConditionalGeneration(config).to(
            torch.bfloat16 if bits == 16 else torch.float32)
        heat = 0.9 * init * 32 / 3.5  # what 0.9 is to logits of std 3.5: some codes stand out
        wrapper = grpo.GLMImageWrapper(pipe, grpo.Config(size="256", top_p=0.75, temperature=heat))
        tokens, sampled, allowed = wrapper.sample(prompts[::4], 4, [0, 1])
        first, again = (wrapper.compute_logprobs(prompts, tokens, allowed)[0] for _ in range(2))
        alone, _ = wrapper.compute_logprobs(prompts[:4], tokens[:4], allowed[:4])  # no padding
        with mock.patch.object(F, "linear", lambda x, w, b: linear(x.flip(-1), w.flip(-1), b)):
            gap = wrapper.compute_logprobs(prompts, tokens, allowed)[0] - sampled
        ratios = [sampled - first, again - first, alone - first[:4], gap]  # their logarithms
        cells = [-sampled.mean(), *(x.abs().max() for x in ratios), gap.abs().quantile(0.99),
                 gap.abs().mean(), (gap.expm1().abs() > 0.2).float().mean()]
        print(f"|{deep}|{init}|{bits}|", *(f"{cell:.2g}|" for cell in cells), flush=True)

if __name__ == "__main__":
    depth()
