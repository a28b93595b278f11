"""Draws target images, white above and coloured below, and writes targets.txt, their prompts.

    python -m examples.targets
    python grpo.py --reward mse --prompts targets.txt --group-size 16 --steps 100"""
from PIL import Image
import grpo

with open("targets.txt", "w") as file:
    for name in grpo.COLORS:  # the lower half in the colour, the upper half white
        target = Image.new("RGB", (128, 128), "white")
        target.paste(name, (0, 64, 128, 128))
        target.save(f"{name}.png")
        file.write(f"a {name} thing\t{name}.png\n")
