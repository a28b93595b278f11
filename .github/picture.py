"""Eight words before training (rows 1 and 3) and after it, each with what the network reads.
It writes letters.png where the command is typed.

    cp .github/letters.py .github/picture.py .
    python picture.py runs/letters"""
import sys
from pathlib import Path
from PIL import Image, ImageDraw, ImageFont
from letters import SIZE, WORDS, read

W = 32 * SIZE
samples = sorted(Path(sys.argv[1]).glob("samples_*.png"))
font = ImageFont.load_default(size=13)
sheet = Image.new("L", (4 * (W + 12), 4 * 56), "lightgray")
for row, file in enumerate([samples[0], samples[-1]]):
    strip = Image.open(file)
    for i, word in enumerate(WORDS.upper().split()[:8]):
        image = strip.crop((W * i, 0, W * i + W, 32))
        x = 6 + i % 4 * (W + 12)
        y = 4 + (i // 4 * 2 + row) * 56
        sheet.paste(image, (x, y))
        caption = f"{word}: reads {read(image)}"
        ImageDraw.Draw(sheet).text((x, y + 33), caption, "black", font)
sheet.save("letters.png")
