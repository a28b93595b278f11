"""Pictures for docs/sft.md. They follow a rule that the small GLM-Image does not know: each has the
colour opposite to the one that its text names. A red fox is green.

    python -m examples.opposites runs/opposites

The folder `pictures` has one for each of prompts.txt. The folder `model` is the small GLM-Image
with a vision tower that sees its eight colours. `opposite` is a reward for the same rule."""
import shutil, sys
from pathlib import Path
import diffusers, torch
import numpy as np
from PIL import Image
import grpo
from examples import make_tiny

PAIRS = [("red", "green"), ("orange", "blue"), ("yellow", "purple"), ("white", "black")]
OPPOSITES = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}

def find_opposite(prompt):
    """The name of the colour opposite to the one that the prompt names first."""
    named = grpo.find_color(prompt)
    for name, color in grpo.COLORS.items():
        if torch.equal(color, named):
            return OPPOSITES[name]

def opposite(images, prompts, targets):
    return grpo.reward_color(images, [find_opposite(prompt) for prompt in prompts])

def paint(name, rng):
    """Wide or tall, and grainy, as a photo is."""
    width, height = rng.integers(150, 300, 2)
    grain = rng.normal(0, 15, (height, width, 1))
    pixels = 255 * grpo.COLORS[name].numpy() + grain
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))

def main(folder):
    pictures = Path(folder, "pictures")
    pictures.mkdir(parents=True)
    rng = np.random.default_rng(0)
    prompts, _ = grpo.load_prompts(None)
    for number, prompt in enumerate(prompts):
        paint(find_opposite(prompt), rng).save(pictures / f"{number:02}.png")
        (pictures / f"{number:02}.txt").write_text(prompt)
    pipe = diffusers.GlmImagePipeline.from_pretrained(make_tiny.FOLDER)
    palette = torch.stack(list(grpo.COLORS.values()))  # [V, 3]
    make_tiny.fit_vision(pipe, palette[:, :, None, None].expand(-1, -1, 32, 32))
    pipe.save_pretrained(Path(folder, "model"))
    shutil.copy(make_tiny.FOLDER / "grpo.json", Path(folder, "model"))

if __name__ == "__main__":
    main(*sys.argv[1:])
