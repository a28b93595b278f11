"""Words and grids of pictures, for the programs that draw them. It needs Pillow only."""
import functools, importlib.util, re, textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

# --- Words --------------------------------------------------------------------
FONT_FOLDERS = [
    "/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts",
    "/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts", "C:/Windows/Fonts"]

@functools.cache
def list_system_fonts():
    """Files, regular ones first, such as Noto Sans CJK for Chinese, Japanese and Korean."""
    folders = [Path(folder).expanduser() for folder in FONT_FOLDERS]
    paths = [path for folder in folders for path in folder.rglob("*.[ot]t[fc]")]
    special = re.compile("bold|italic|oblique|light|thin|black|condensed|mono|serif", re.IGNORECASE)
    # Apple's font of last resort has a picture of its alphabet in the place of each letter.
    return sorted([path for path in paths if "LastResort" not in path.name],
                  key=lambda path: (bool(special.search(path.name)), path.name))

def list_fonts():
    """Yields "" for PIL's own font, which has little more than ASCII, the one that matplotlib
    brings, and those of the system."""
    yield ""
    matplotlib = importlib.util.find_spec("matplotlib")
    if matplotlib and matplotlib.origin:
        yield Path(matplotlib.origin).with_name("mpl-data") / "fonts/ttf/DejaVuSans.ttf"
    yield from list_system_fonts()

@functools.cache
def load_font(path, size):
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)

def draw_letter(font, letter):
    mask = font.getmask(letter)
    return mask.size, bytes(mask)

@functools.cache
def find_font(text):
    """-> the first font that has all letters of a text, or None. In the place of a letter that it
    does not have, a font draws a box, as for U+10FFFF, which is no letter."""
    letters = {*"".join(text.split()), "."}  # a long text is cut, and ends in dots
    for path in list_fonts():
        try:
            font = load_font(path, 22)
            box = draw_letter(font, "\U0010ffff")
            if all([draw_letter(font, letter) != box for letter in letters]):
                return path
        except OSError:  # a broken file, or one with pictures in the place of outlines
            continue

def replace_unreadable(path, texts):
    """-> {text: what is drawn}. A text that no font here can draw becomes its number, and a file
    beside the picture has the text. The file's name is long, to be none that the user has."""
    shown = {}
    for number, text in enumerate([text for text in texts if text], 1):
        shown.setdefault(text, str(number) if find_font(text) is None else text)
    lines = [f"{label}\t{text}\n" for text, label in shown.items() if label != text]
    if lines:
        file = Path(f"{path}.txt")
        file.write_text("".join(lines), "utf-8")
        print(f"{file}: what the numbers in the picture stand for: texts with letters that no font "
              "here has; Noto Sans CJK has most")
    return shown

def draw_text(draw, place, text, size, width, columns, lines, align="left"):
    """Draws a text about its middle, in lines of at most `columns` letters, or fewer wide ones."""
    font = load_font(find_font(text), size)
    for n in range(columns, 2, -1):
        broken = textwrap.wrap(text, n, max_lines=lines, placeholder=" ..")
        if max(map(font.getlength, broken), default=0) <= width:
            break
    draw.text(place, "\n".join(broken), "black", font, "mm", align=align)

# --- Pictures ---------------------------------------------------------------
def save_film(path, rows, columns=9):
    """A grid of cells of 200 x 200; a row is a list of texts, PIL images, and pairs of an image and
    a short text below it."""
    rows = [row[:columns] for row in rows]
    texts = [cell for row in rows for cell in row if isinstance(cell, str)]
    shown = replace_unreadable(path, texts)
    film = Image.new("RGB", (200 * max(map(len, rows)), 200 * len(rows)), "lightgray")
    draw = ImageDraw.Draw(film)
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            if isinstance(cell, tuple):
                image, below = cell
                film.paste(ImageOps.contain(image, (168, 168)), (200 * x + 16, 200 * y + 4))
                draw.text((200 * x + 100, 200 * y + 186), below, "black", load_font("", 18), "mm")
            elif not isinstance(cell, str):
                film.paste(ImageOps.contain(cell, (192, 192)), (200 * x + 4, 200 * y + 4))
            elif cell:
                middle = (200 * x + 100, 200 * y + 100)
                draw_text(draw, middle, shown[cell], 22, width=196, columns=17, lines=7)
    film.save(path)
