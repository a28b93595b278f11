"""GLM-Image that paints in less than half the time.

    python grpo.py --wrapper examples/fast.py:Fast --model zai-org/GLM-Image --prompts mine.txt
    python -m examples.measure painting --wrapper examples/fast.py:Fast  # is the reward as it was?

Four approximations, alike for all images of a group; each goes by an attribute of a subclass:
  solver    a step is made with the velocity in its middle, which the last two predict: its error
            falls with the square of the steps. 10, the default here, cost half of 20 of Euler's.
            For Euler's, set diffusers.FlowMatchEulerDiscreteScheduler.
  guided    guidance in this share of the steps, the first ones, which decide what is shown: a
            quarter of the passes less. At 1 all are guided.
  fp8       products of 8 bits, with a scale for each row, on cards that have them (RTX 40, L4,
            H100): faster if compiled; the layers' weights take half of the room.
  compiles  the DiT's blocks, on CUDA: only rounding changes; the first pictures take minutes.
docs/figures.md says what each is worth, and what of that is measured.
"""
import diffusers
import torch
from torch import nn

import grpo

class SecondOrder(diffusers.FlowMatchEulerDiscreteScheduler):
    """Adams-Bashforth: v + (v - v_before) / (sigma - sigma_before) * half of the step. The first
    step is Euler's, and so is the first without guidance, whose velocity is another one."""
    pipe, guided = None, 1.0

    def step(self, velocity, *args, **kwargs):
        i = self.step_index or 0  # it is None before the first step
        sigmas = self.sigmas
        slope = 0.0
        if i and self.before is not None:
            slope = (velocity - self.before) / (sigmas[i] - sigmas[i - 1])
        self.before = velocity
        if self.pipe.guidance_scale > 1 and i + 1 == round(self.guided * (len(sigmas) - 1)):
            self.pipe._guidance_scale = 1.0  # until its next call, which sets it again
            self.before = None
        middle = (sigmas[i + 1] - sigmas[i]) / 2
        return super().step(velocity + slope * middle, *args, **kwargs)

class Float8Linear(nn.Module):
    """W x + b of fp8 numbers (e4m3), of which 448 is the largest. Each row of x and of W has a
    scale, so that an image does not depend on what is painted beside it."""
    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448  # [out, 1]
        self.weight = nn.Parameter((linear.weight / scale).to(torch.float8_e4m3fn), False)
        self.scale = nn.Parameter(scale.T.contiguous(), False)
        self.bias = linear.bias

    def forward(self, inputs):
        rows = inputs.reshape(-1, inputs.shape[-1])
        count = len(rows)  # cuBLAS refuses few rows, such as the glyphs' (pytorch/ao #4582)
        rows = nn.functional.pad(rows, (0, 0, 0, max(0, 512 - count)))
        scale = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448  # [rows, 1]
        output = torch._scaled_mm((rows / scale).to(torch.float8_e4m3fn), self.weight.T, scale,
                                  self.scale, self.bias, out_dtype=inputs.dtype)
        return output[:count].view(*inputs.shape[:-1], -1)

class Fast(grpo.GLMImageWrapper):
    defaults = dict(model=grpo.TINY_MODEL, decode_steps=10)
    solver, guided, compiles = SecondOrder, 0.5, grpo.CUDA
    fp8 = grpo.CUDA and torch.cuda.get_device_capability() >= (8, 9)

    def __init__(self, pipe, config):
        blocks = pipe.transformer.transformer_blocks
        for name, layer in [*blocks.named_modules()]:
            if self.fp8 and isinstance(layer, nn.Linear) and (".attn1." in name or ".ff." in name):
                blocks.set_submodule(name, Float8Linear(layer))
        pipe.scheduler = self.solver.from_config(pipe.scheduler.config)
        pipe.scheduler.pipe, pipe.scheduler.guided = pipe, self.guided
        super().__init__(pipe, config)
        if self.compiles:
            pipe.transformer.compile_repeated_blocks()
