"""Pictures for sft.py: mosaics of 4 x 4 squares, most of them in the color that the picture's text
names. The tiny GLM-Image draws such mosaics with half of the squares right.

    python -m examples.make.mosaics
    python -m examples.sft runs/mosaics/pictures --model runs/mosaics/model
    python grpo.py --reward examples/rewards.py:mse --prompts runs/mosaics/targets.txt

`pictures` has one for each prompt of prompts.txt, and `model` is the tiny GLM-Image with a vision
tower that sees its eight colors. Targets are white above and colored below.
"""
from examples.make import read_folder

if __name__ == "__main__":
    FOLDER = read_folder(__doc__, "runs/mosaics")

import json
from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image

import grpo
from examples.make import tiny

PALETTE = torch.stack(list(grpo.COLORS.values()))  # [V, 3], in 0..1
CHANCE = 0.8  # that a square has the named color; or else it has any of the eight

def draw_mosaic(prompt, rng):
    """160 x 160 pixels, and grainy as a photo is."""
    named = rng.random((4, 4, 1)) < CHANCE
    squares = np.where(named, grpo.find_color(prompt), PALETTE[rng.integers(8, size=(4, 4))])
    pixels = squares.repeat(40, 0).repeat(40, 1)  # [160, 160, 3]
    pixels = pixels + rng.normal(0, 0.05, (160, 160, 1))
    return Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8))

def main(folder):
    tiny.make_folder(folder)
    (folder / "pictures").mkdir()
    rng = np.random.default_rng(0)
    for number, prompt in enumerate(grpo.load_prompts()):
        path = folder / f"pictures/{number:02}.png"
        draw_mosaic(prompt, rng).save(path)
        path.with_suffix(".txt").write_text(prompt)
    with open(folder / "targets.txt", "w") as file:
        for name in grpo.COLORS:
            target = Image.new("RGB", (128, 128), "white")
            target.paste(name, (0, 64, 128, 128))
            target.save(folder / f"{name}.png")
            file.write(f"a {name} thing\t{name}.png\n")
    pipe = diffusers.GlmImagePipeline.from_pretrained(grpo.TINY_MODEL)
    tiny.fit_vision(pipe, PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    settings = json.loads(Path(grpo.TINY_MODEL, "grpo.json").read_text())
    tiny.save(pipe, settings, folder / "model")

if __name__ == "__main__":
    main(FOLDER)
