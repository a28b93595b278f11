"""Draws target pictures, white above and coloured below, and the prompts that name them.

    python -m examples.make.targets
    python grpo.py --reward mse --prompts runs/targets/prompts.txt --group-size 16 --steps 60
"""
import sys
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of grpo.py
import grpo
from examples.make import tiny

def main():
    folder = tiny.parse_folder(__doc__, "runs/targets")
    lines = []
    for name in grpo.COLORS:
        target = Image.new("RGB", (128, 128), "white")
        target.paste(name, (0, 64, 128, 128))
        target.save(folder / f"{name}.png")
        lines.append(f"a {name} thing\t{name}.png\n")
    (folder / "prompts.txt").write_text("".join(lines))

if __name__ == "__main__":
    main()
