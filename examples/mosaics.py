"""Pictures for docs/sft.md: mosaics of 4 x 4 squares, most of them in the colour that the picture's
text names. The small GLM-Image draws such mosaics with half of the squares right.

    python -m examples.mosaics

The folder runs/mosaics/pictures gets a picture for each prompt of prompts.txt, and
runs/mosaics/model the small GLM-Image with a vision tower that sees its eight colours."""
import shutil
from pathlib import Path
import diffusers, torch
import numpy as np
from PIL import Image
import grpo
from examples import make_tiny

PALETTE = torch.stack(list(grpo.COLORS.values()))  # [V, 3], in 0..1
CHANCE = 0.8  # that a square has the named colour; or else it has any of the eight

def draw_mosaic(prompt, rng):
    """160 x 160 pixels, and grainy as a photo is."""
    named = rng.random((4, 4, 1)) < CHANCE
    squares = np.where(named, grpo.find_color(prompt), PALETTE[rng.integers(8, size=(4, 4))])
    pixels = squares.repeat(40, 0).repeat(40, 1)  # [160, 160, 3]
    pixels = pixels + rng.normal(0, 0.05, (160, 160, 1))
    return Image.fromarray((255 * pixels.clip(0, 1)).astype(np.uint8))

def main():
    folder = Path("runs/mosaics")
    pictures = folder / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    prompts, _ = grpo.load_prompts(None)
    for number, prompt in enumerate(prompts):
        draw_mosaic(prompt, rng).save(pictures / f"{number:02}.png")
        (pictures / f"{number:02}.txt").write_text(prompt)
    pipe = diffusers.GlmImagePipeline.from_pretrained(make_tiny.FOLDER)
    make_tiny.fit_vision(pipe, PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    pipe.save_pretrained(folder / "model")
    shutil.copy(make_tiny.FOLDER / "grpo.json", folder / "model")

if __name__ == "__main__":
    main()
