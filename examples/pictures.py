"""Words and grids of pictures, for the programs that draw them. It needs Pillow only."""
import functools, textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

FONT_FOLDERS = [
    "/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts",
    "/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts", "C:/Windows/Fonts"]

@functools.cache
def load_font(size, needs_all=False):
    """Pillow's own font, which has little more than ASCII, or one of the system that has Chinese,
    Japanese and Korean too, if there is one: Noto Sans CJK, or one of Apple's or Microsoft's."""
    names = ["NotoSansCJK-Regular.ttc", "PingFang.ttc", "Arial Unicode.ttf", "msyh.ttc",
             "DejaVuSans.ttf"]
    for name in names if needs_all else []:
        for folder in FONT_FOLDERS:
            for path in Path(folder).expanduser().rglob(name):
                return ImageFont.truetype(path, size)
    return ImageFont.load_default(size)

def draw_text(draw, middle, text, size, width, lines):
    """Draws a text about its middle, broken into lines that are not wider than `width`."""
    font = load_font(size, needs_all=not text.isascii())
    for columns in range(width // 5, 2, -1):
        broken = textwrap.wrap(text, columns, max_lines=lines, placeholder=" ..")
        if max(map(font.getlength, broken), default=0) <= width:
            break
    draw.text(middle, "\n".join(broken), "black", font, "mm", align="center")

def save_film(path, rows, columns=9):
    """A grid of cells of 200 x 200; a row is a list of texts, PIL images, and pairs of an image and
    a short text below it."""
    rows = [row[:columns] for row in rows]
    film = Image.new("RGB", (200 * max(map(len, rows)), 200 * len(rows)), "lightgray")
    draw = ImageDraw.Draw(film)
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            image, below = cell if isinstance(cell, tuple) else (cell, "")
            if isinstance(image, str):
                draw_text(draw, (200 * x + 100, 200 * y + 100), image, 22, width=190, lines=7)
            else:
                film.paste(ImageOps.contain(image, (168, 168)), (200 * x + 16, 200 * y + 4))
                draw_text(draw, (200 * x + 100, 200 * y + 186), below, 18, width=190, lines=1)
    film.save(path)
