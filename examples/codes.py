"""Helpers of edit.py and sft.py. `encode_images` turns pictures into GLM-Image's codes; the others
are for edits. The picture that a prompt edits is called its source.

    from examples.codes import encode_images
    pipe = diffusers.GlmImagePipeline.from_pretrained(..)
    image = Image.open("fox.png")
    codes, = encode_images(pipe, [image], resize=False)  # [height / 32, width / 32]
"""
import functools
from pathlib import Path

import torch
from PIL import Image

import grpo

def load_prompts(path):
    """Reads lines `instruction<TAB>source.png` -> prompts and sources, PIL images. A prompt keeps
    the path of its source, as a wrapper is given prompts only: the line `make it red<TAB>fox.png`
    of data/edits.txt gives the prompt `make it red<TAB>data/fox.png`."""
    if path is None:
        raise grpo.BadInput("--prompts: needs a file of lines `instruction<TAB>source.png`")
    with grpo.input_errors(f"--prompts {path}"):
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    prompts = []
    sources = []
    for number, line in enumerate(lines, start=1):
        instruction, *names = line.strip().split("\t")
        if instruction and not instruction.startswith("#"):
            where = f"--prompts {path}, line {number}"
            if len(names) != 1:
                raise grpo.BadInput(f"{where}: needs an instruction, one tab, and a source")
            source_path = Path(path).parent / names[0]
            with grpo.input_errors(f"{where}: {source_path}"):
                source = Image.open(source_path).convert("RGB")
            if source.width % 32 or source.height % 32:  # the image processor would stretch it
                raise grpo.BadInput(f"{where}: the sides of {source_path} must be multiples of 32")
            if max(source.size) > 4 * min(source.size):  # the image processor would refuse it
                raise grpo.BadInput(f"{where}: {source_path} is over four times as long as wide")
            prompts.append(f"{instruction}\t{source_path}")
            sources.append(source)
    if not prompts:
        raise grpo.BadInput(f"--prompts {path}: has no prompts")
    return prompts, sources

def load_rewards(text):
    """The rewards of grpo.py, but they are called with the prompts' instructions, without paths.
    The check of `color` before training still sees the paths. A color word there can pass it, and
    the first step fails if the instruction has none."""
    rewards = {}
    for name, (function, weight) in grpo.load_rewards(text).items():
        rewards[name] = functools.partial(call_with_instructions, function), weight
    return rewards

def call_with_instructions(function, images, prompts, targets):
    instructions = [prompt.split("\t")[0] for prompt in prompts]
    return function(images, instructions, targets)

@torch.no_grad()
def encode_images(pipe, images, resize=True):
    """PIL images whose sides are multiples of 32 -> codes [h, w] of each, on the CPU. They are the
    codes that the stock pipeline makes of a picture to edit, one for each 32 x 32 pixels. The
    image processor first resizes pictures that are too small or too large for its settings, unless
    `resize` is False."""
    model = pipe.vision_language_encoder.model
    # In tiny-glm-image the vision tower does not fit the image processor, as nothing used them.
    if pipe.processor.image_processor.patch_size != model.visual.config.patch_size:
        raise grpo.BadInput(
            "--model: it cannot see pictures. GLM-Image can, and so can the small models that "
            "examples/mosaics.py makes for sft.py, and examples/squares.py for edit.py")
    # GLMImageWrapper leaves the vision tower and the codebook on the CPU. They visit the GPU for
    # this call only, as the two halves of the model need the room.
    tower = torch.nn.ModuleList([model.visual, model.vqmodel])
    home = model.visual.device
    tower.to(grpo.DEVICE)
    settings = {}
    if not resize:
        # Despite their names, these are the smallest and the largest area, in pixels.
        settings["size"] = dict(shortest_edge=32**2, longest_edge=10**8)
    codes = []
    for image in images:
        # The processor raises ValueError if a side is over 4 times as long as the other.
        with grpo.input_errors(f"a picture of {image.width} x {image.height} pixels", ValueError):
            inputs = pipe.processor.image_processor(
                [image.convert("RGB")], return_tensors="pt", **settings)
        _, h, w = inputs.image_grid_thw[0].tolist()  # in codes
        inputs = inputs.to(grpo.DEVICE)
        features = model.get_image_features(inputs.pixel_values, inputs.image_grid_thw)
        # `pooler_output` has a feature for each code, despite its name.
        codes.append(model.get_image_tokens(features.pooler_output).view(h, w).cpu())
    tower.to(home)
    return codes
