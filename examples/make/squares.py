"""A small world for edit.py: pictures of 3 x 3 colored squares, instructions such as "paint the red
squares blue", and a small GLM-Image that follows them half of the time.

    python -m examples.make.squares    # one or two minutes
    python grpo.py --wrapper examples/edit.py:EditWrapper --model runs/squares --out runs/edit

The folder runs/squares gets pictures, prompts for training, prompts that are held out, and the
model. That has the real classes and eight codes, the COLORS of grpo.py. DiT and VAE are those of
the tiny GLM-Image, the vision tower knows the colors, and the policy has two layers. It is fitted
to edit, and then to make mistakes: it leaves half of the squares that it should paint, and 35 % of
all squares get some other color.
"""
from examples.make import read_folder

if __name__ == "__main__":
    FOLDER = read_folder(__doc__, "runs/squares")

import random
from pathlib import Path

import diffusers
import torch
import transformers
from PIL import Image

import grpo
from examples.edit import EditWrapper
from examples.make import tiny

torch.set_num_threads(1)  # as in letters.py

SIDE = 3  # squares in a row and in a column
NAMES = list(grpo.COLORS)  # code k is the color NAMES[k]
PALETTE = torch.stack(list(grpo.COLORS.values()))  # [V, 3], in 0..1

def make_settings(folder):
    """What grpo.json says: the defaults for this model."""
    return tiny.SETTINGS | dict(
        steps=60, lr=1e-3, group_size=8, micro_batch_size=64, width=32 * SIDE, height=32 * SIDE,
        prompts=str(folder / "prompts.txt"), reward=f"{Path(__file__).resolve()}:right")

def paint(codes):
    """Codes [SIDE, SIDE] -> a PIL image of these squares."""
    pixels = (PALETTE[codes] * 255).round().byte().numpy()
    return Image.fromarray(pixels).resize((32 * SIDE, 32 * SIDE), Image.NEAREST)

def look(image):
    """The inverse of `paint`: the code whose color is nearest to the mean of each square."""
    pixels = grpo.pil_to_tensor([image])
    means = torch.nn.functional.avg_pool2d(pixels, 32)[0].movedim(0, 2)  # [SIDE, SIDE, 3]
    return (means[:, :, None] - PALETTE).square().sum(3).argmin(2)

def edit(codes, instruction):
    """What the squares should be: "paint the red squares blue" names the old and the new color."""
    old, new = [NAMES.index(word) for word in instruction.split() if word in NAMES]
    return torch.where(codes == old, new, codes)

def right(images, prompts, targets):
    """The reward: the share of squares that are as they should be."""
    return [(look(image) == edit(look(source), prompt)).float().mean()
            for image, prompt, source in zip(images, prompts, targets)]

def write_prompts(folder):
    """Pictures, and three files of prompts. Those of held_out.txt have pictures that no prompt of
    prompts.txt has. Those of new_pairs.txt have new pictures and new pairs of colors."""
    rng = random.Random(0)
    lines = dict(prompts=[], held_out=[], new_pairs=[])
    for number in range(200):
        colors = rng.sample(range(len(NAMES)), 3)
        codes = torch.tensor([[rng.choice(colors) for _ in range(SIDE)] for _ in range(SIDE)])
        paint(codes).save(folder / f"{number:03}.png")
        for old in codes.unique().tolist():
            for new in set(range(len(NAMES))) - {old}:
                line = f"paint the {NAMES[old]} squares {NAMES[new]}\t{number:03}.png"
                is_new_pair = (old + new) % 8 == 3  # one pair in seven
                if number < 150 and not is_new_pair:
                    lines["prompts"].append(line)
                elif number >= 150:
                    lines["new_pairs" if is_new_pair else "held_out"].append(line)
    for file, rows in lines.items():
        rows = rng.sample(rows, 600 if file == "prompts" else 48)
        (folder / f"{file}.txt").write_text("\n".join(rows) + "\n")

def make_model(folder):
    transformers.set_seed(0)
    rotary = dict(rope_type="default", rope_theta=1000.0, mrope_section=[1] * 16)
    pipe = tiny.make_models(
        grpo.COLORS, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        initializer_range=0.05, rope_parameters=rotary)
    painter = diffusers.GlmImagePipeline.from_pretrained(grpo.TINY_MODEL)
    pipe.register_modules(transformer=painter.transformer, vae=painter.vae)
    tiny.fit_vision(pipe, PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    settings = make_settings(folder)
    wrapper = EditWrapper(pipe, grpo.Config(**settings, offload="off"))
    fit_policy(wrapper, chance=0.98, share=1.0, steps=1500, lr=3e-3)  # it learns to edit
    fit_policy(wrapper, chance=0.65, share=0.5, steps=150, lr=2e-3)  # and to make mistakes
    tiny.save(pipe, settings, folder)

def fit_policy(wrapper, chance, share, steps, lr):
    """Fits it to edit a square with probability `share`, and else to leave it as it is."""
    prompts = grpo.load_prompts(wrapper.config.prompts)
    before = torch.stack([look(Image.open(prompt.target)) for prompt in prompts])
    after = torch.stack([edit(*pair) for pair in zip(before, prompts)])

    def draw(B=16):
        rows = random.sample(range(len(prompts)), B)
        edited = torch.rand(before[rows].shape) < share
        codes = torch.where(edited, after[rows], before[rows])
        return [prompts[i] for i in rows], codes.flatten(1)

    tiny.fit_policy(wrapper, draw, chance, steps, lr)

def main(folder):
    tiny.make_folder(folder)
    write_prompts(folder)
    make_model(folder)

if __name__ == "__main__":
    main(FOLDER)
