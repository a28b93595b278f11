"""Plots runs of grpo.py, or of any program here: curves, pictures before and after, a film.

    pip install matplotlib
    python -m examples.plot runs/seed0 runs/seed1
    python -m examples.plot runs/mine --before-after sheet.png --words red blue green
    python -m examples.plot runs/mine --film film.png

It prints the mean of each reward over the first and the last five steps of each run.
"""
import argparse, json, sys, textwrap
from pathlib import Path
from statistics import mean

from PIL import Image, ImageDraw, ImageFont, ImageOps

def read_rows(run):
    """The rows of metrics.jsonl, one a step."""
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]

def find_metrics(rows):
    """The names of the rewards. Of a run of sft.py, which has none, the loss."""
    names = dict.fromkeys([name for row in rows for name in row])  # unique, in order
    rewards = [name for name in names if name.startswith("reward") and name != "reward_std"]
    return rewards or ["loss"]

def print_ends(run, rows):
    for name in find_metrics(rows):
        # A resumed run may have new rewards, and what is not finite is None.
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            print(f"{run}  {name}: first five steps {mean(values[:5]):.3f}, "
                  f"last five {mean(values[-5:]):.3f}")

def draw_curves(runs, metric, path):
    """Curves of a metric by step; {run: rows}."""
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        sys.exit(f"{path} is not drawn: first run `pip install matplotlib`")
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    for run, rows in runs.items():
        rows = [row for row in rows if metric in row]
        axes.plot([row["step"] for row in rows], [row[metric] for row in rows], label=run)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    axes.legend(ncols=3)
    figure.savefig(path, dpi=120)
    print(f"{metric}: {path}")

def draw_film(rows, columns=9):
    """A grid of cells of 200 x 200; a row is a list of texts and PIL images."""
    film = Image.new("RGB", (200 * min(columns, max(map(len, rows))), 200 * len(rows)), "lightgray")
    font = ImageFont.load_default(size=22)
    for y, row in enumerate(rows):
        for x, cell in enumerate(row[:columns]):
            if isinstance(cell, str):
                text = textwrap.fill(cell, 17, max_lines=7, placeholder=" ..")
                ImageDraw.Draw(film).text((200 * x + 100, 200 * y + 100), text, "black", font, "mm")
            else:
                film.paste(ImageOps.contain(cell, (192, 192)), (200 * x + 4, 200 * y + 4))
    return film

def read_samples(run):
    """The pictures that a run has saved -> {step: PIL images}."""
    width = json.loads(Path(run, "config.json").read_text())["width"]
    samples = {}
    for path in sorted(Path(run).glob("samples_*.png")):
        strip = Image.open(path)  # pictures side by side
        lefts = range(0, strip.width, width)
        samples[int(path.stem[8:])] = [
            strip.crop((left, 0, left + width, strip.height)) for left in lefts]
    return samples

def read_words(run):
    """The prompts of the pictures, for lack of better words."""
    path = json.loads(Path(run, "config.json").read_text())["prompts"]
    path = path or Path(__file__).resolve().parents[1] / "prompts.txt"
    lines = Path(path).read_text("utf-8-sig").splitlines()
    return [line.split("\t")[0] for line in lines if line.strip() and line.strip()[0] != "#"]

WIDTH = 1200  # of a sheet; GitHub scales it down to 900
LEFT = 96  # margin for "before" and "after"
GAP = 10  # between pictures
LINE = 70  # height of the words

def draw_before_after(before, after, words):
    """Two rows of pictures with words above: PIL images -> a sheet."""
    w, h = before[0].size
    columns = min(len(before), 8 if w < 2 * h else 4)  # wide pictures go into two rows
    W = (WIDTH - LEFT) // columns - GAP
    H = W * h // w
    block = LINE + 2 * (H + GAP) + GAP  # words, the row before, the row after
    sheet = Image.new("RGB", (WIDTH, -(-len(before) // columns) * block), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (word, *pair) in enumerate(zip(words, before, after)):
        x = LEFT + i % columns * (W + GAP)
        top = i // columns * block
        size = 25 if len(word) < 11 else 16
        text = textwrap.fill(word, W // 8, max_lines=3, placeholder=" ..")
        font = ImageFont.load_default(size=size)
        draw.text((x + W / 2, top + LINE / 2), text, "black", font, "mm", align="center")
        for row, (picture, name) in enumerate(zip(pair, ("before", "after"))):
            y = top + LINE + row * (H + GAP)
            sheet.paste(picture.resize((W, H), Image.LANCZOS), (x, y))
            draw.rectangle((x - 1, y - 1, x + W, y + H), outline="lightgray")  # for white pictures
            if x == LEFT:
                font = ImageFont.load_default(size=25)
                draw.text((LEFT - 12, y + H / 2), name, "black", font, "rm")
    return sheet

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="run", help="folder of a run")
    parser.add_argument("--curve", default="curve.png", help="file; default: %(default)s")
    parser.add_argument("--metric", help="to plot by step; default: reward, or loss")
    parser.add_argument("--before-after", metavar="FILE", help="draw the first and last pictures")
    parser.add_argument("--words", nargs="+", help="to stand above them; default: the prompts")
    parser.add_argument("--film", metavar="FILE", help="draw all saved pictures, a row a step")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    args = parser.parse_args()
    try:
        runs = {run: read_rows(run) for run in args.runs}
        samples = read_samples(args.runs[0])
        words = args.words or read_words(args.runs[0])
    except (OSError, KeyError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: error: this is no run: {error}\n")
    for run, rows in runs.items():
        print_ends(run, rows)
    steps = list(samples)
    if (args.before_after or args.film) and not steps:
        parser.exit(2, f"{parser.prog}: error: {args.runs[0]}: has no samples_*.png\n")
    if args.before_after:
        draw_before_after(samples[steps[0]], samples[steps[-1]], words).save(args.before_after)
        print(f"steps {steps[0]} and {steps[-1]}: {args.before_after}")
    if args.film:
        head = ["", *words[:len(samples[steps[0]])]]
        rows = [[f"step {step}", *pictures] for step, pictures in samples.items()]
        draw_film([head, *rows]).save(args.film)
        print(f"steps {steps[0]} to {steps[-1]}: {args.film}")
    if not args.before_after and not args.film:
        rows = [row for rows in runs.values() for row in rows]
        metric = args.metric or ("reward" if any(["reward" in row for row in rows]) else "loss")
        for run, rows in runs.items():
            if not any([metric in row for row in rows]):
                parser.exit(2, f"{parser.prog}: error: {run}: has no {metric}; see --metric\n")
        draw_curves(runs, metric, args.curve)

if __name__ == "__main__":
    main()
