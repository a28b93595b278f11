"""Puts a run's first and last sample images on one sheet, with a word above each.

    python -m examples.contact runs/mine sheet.png
    python -m examples.contact runs/letters letters.png cat moon queen jazz apple fox house zebra

The default words are the colours of the first eight prompts in prompts.txt."""
import re, sys
from pathlib import Path
from PIL import Image, ImageDraw, ImageFont

WIDTH = 1200  # of the sheet; GitHub scales it down to 900
LEFT = 96  # margin for "before" and "after"
GAP = 10  # between images
LINE = 40  # height of a line of words
COLORS = r"\b(red|orange|yellow|green|blue|purple|white|black)\b"

folder, sheet_name, *words = sys.argv[1:]
if not words:
    prompts = [line for line in open("prompts.txt") if line.strip() and line[0] != "#"]
    words = [re.search(COLORS, prompt.lower())[0] for prompt in prompts[:8]]
samples = sorted(Path(folder).glob("samples_*.png"))
strips = [Image.open(samples[0]), Image.open(samples[-1])]  # each has its images side by side
w = strips[0].width // len(words)
h = strips[0].height
columns = 8 if w < 2 * h else 4  # wide images go into two rows
W = (WIDTH - LEFT) // columns - GAP
H = W * h // w
block = LINE + 2 * (H + GAP) + GAP  # words, the row before, the row after
sheet = Image.new("RGB", (WIDTH, len(words) // columns * block), "white")
draw = ImageDraw.Draw(sheet)
font = ImageFont.load_default(size=25)
for i, word in enumerate(words):
    x = LEFT + i % columns * (W + GAP)
    top = i // columns * block
    draw.text((x + W / 2, top + LINE / 2), word, "black", font, anchor="mm")
    for row, (strip, name) in enumerate(zip(strips, ("before", "after"))):
        y = top + LINE + row * (H + GAP)
        picture = strip.crop((i * w, 0, (i + 1) * w, h)).resize((W, H), Image.LANCZOS)
        sheet.paste(picture, (x, y))
        draw.rectangle((x - 1, y - 1, x + W, y + H), outline="lightgray")  # shows white images
        if x == LEFT:
            draw.text((LEFT - 12, y + H / 2), name, "black", font, anchor="rm")
sheet.save(sheet_name)
