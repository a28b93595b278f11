"""Plots runs: curves, pictures before and after, a film. It needs nothing but a run's folder.

    pip install matplotlib
    python -m examples.plot runs/seed0 runs/seed1
    python -m examples.plot runs/mine --before-after sheet.png --words red blue green
    python -m examples.plot runs/mine --film film.png
    python -m examples.plot runs/mine --wandb my-project
    python -m examples.plot runs/mine --wandb my-team/my-project
    python -m examples.plot runs/mine --trackio my-project

It prints the mean of each reward over the first and the last five steps of each run (of fewer than
ten, the first and the last), and alarms, where the log shows that something goes wrong. A curve has
beside it what `evaluate --follow` measured on held-out prompts.

With --wandb it sends what the run has written to Weights & Biases (pip install wandb), and what
training writes meanwhile, until the run is done; with --trackio, to a page on this machine (pip
install trackio). Both may be started before the training, and be stopped and started again.
"""
import argparse, math, re, sys
from pathlib import Path
from statistics import mean

from PIL import Image, ImageDraw, ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
from examples.alarms import find_alarms
from examples.follow import fail, follow, open_sheet, read_rows, read_settings
from examples.pictures import draw_text, load_font, replace_unreadable, save_film

# --- What is in a run's folder ------------------------------------------------
def read_words(run):
    """The run's prompts, as grpo.py reads them: lines end at \\n, \\r\\n or \\r only. A run of an
    older grpo.py has no prompts.txt. No words are better than those of another file."""
    path = Path(run, "prompts.txt")
    lines = path.read_text("utf-8-sig").split("\n") if path.is_file() else []
    words = [line.split("\t")[0].strip() for line in lines]
    return [word for word in words if word and word[0] != "#"]

def read_samples(run):
    """The pictures that a run has saved, of at most 8 prompts -> {step: PIL images}."""
    count = min(8, len(read_words(run)))
    samples = {}
    for path in sorted(Path(run).iterdir()):
        match = re.fullmatch(r"samples_(\d{5,})\.png", path.name)
        if match:
            sheet = open_sheet(path)  # pictures of one size, side by side
            if sheet is None:
                print(f"{path}: passed over, as it is not whole", file=sys.stderr)
                continue
            n = count or max(1, sheet.width // read_settings(run)["width"])
            width, rest = divmod(sheet.width, n)
            if rest or n != count_pictures(sheet, read_settings(run)) in range(1, 9):
                fail(f"{path}: it has not the pictures of {n} prompts, which prompts.txt has")
            samples[int(match[1])] = [
                sheet.crop((i * width, 0, (i + 1) * width, sheet.height)) for i in range(n)]
    return dict(sorted(samples.items()))

def count_pictures(sheet, settings):
    """-> how many have the shape of the settings; 0 if that is not certain, as with a wrapper."""
    if settings.get("wrapper"):
        return 0
    count, rest = divmod(sheet.width * settings["height"], sheet.height * settings["width"])
    return 0 if rest else count

# --- Figures and curves -------------------------------------------------------
def find_metrics(rows):
    """The names of the rewards. Of a run of sft.py, which has none, the loss."""
    names = dict.fromkeys([name for row in rows for name in row])  # unique, in order
    rewards = [name for name in names if name.startswith("reward") and name != "reward_std"]
    # A single reward is also the total.
    rewards = [name for name in rewards if name == "reward" or "reward" not in names
               or any([row.get(name) != row.get("reward") for row in rows])]
    return rewards or ["loss"]

def print_ends(run, rows):
    for name in find_metrics(rows):
        # A resumed run may have new rewards. What is not finite is None: then no mean is, either.
        values = [math.nan if row[name] is None else row[name] for row in rows if name in row]
        if len(values) >= 10:
            print(f"{run}  {name}: first five steps {mean(values[:5]):.3f}, "
                  f"last five {mean(values[-5:]):.3f}")
        elif values:  # so few that five and five would overlap
            print(f"{run}  {name}: first step {values[0]:.3f}, last {values[-1]:.3f}")

def draw_held_out(axes, run, metric, color):
    """What `evaluate.py --follow` has measured, with its 95 % interval as a band -> {name: line}."""
    points = sorted([(row["step"], *row[metric]) for row in read_rows(run, "evaluation.jsonl")
                     if metric in row])
    if not points:
        return {}
    steps, means, *band = [[math.nan if value is None else value for value in column]
                           for column in zip(*points)]
    axes.fill_between(steps, *band, color=color, alpha=0.2, linewidth=0)
    line, = axes.plot(steps, means, "o--", color=color, markersize=4)
    return {f"{run}, held-out prompts": line}

def draw_curves(runs, metric, path):
    """Curves of a metric by step; {run: rows}."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        fail(f"{path} is not drawn: first run `pip install matplotlib`")
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    lines = {}
    for run, rows in runs.items():
        rows = [row for row in rows if metric in row]
        values = [math.nan if row[metric] is None else row[metric] for row in rows]
        lines[run], = axes.plot([row["step"] for row in rows], values)
        lines |= draw_held_out(axes, run, metric, lines[run].get_color())
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel(metric)
    # Labels of lines would be left out if they begin with an underscore; $ begins a formula.
    names = [name.replace("$", r"\$") for name in lines]
    columns = max(1, min(3, 90 // (max(map(len, names)) + 8)))  # of the legend, below the curves
    figure.set_size_inches(8, 2.4 + 0.22 * math.ceil(len(names) / columns))
    figure.legend([*lines.values()], names, ncols=columns, loc="outside lower center")
    figure.savefig(path, dpi=120, format=Path(path).suffix[1:] or "png")  # or it adds .png
    print(f"{metric}: {path}")

# --- Pictures -----------------------------------------------------------------
WIDTH = 1200  # of a sheet; GitHub scales it down to 900
LEFT = 96  # margin for "before" and "after"
GAP = 10  # between pictures
LINE = 70  # height of the words

def save_before_after(path, before, after, words):
    """Two rows of pictures with words above: PIL images -> a sheet."""
    words = (words + [""] * len(before))[:len(before)]
    shown = replace_unreadable(path, words)
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
        if word:
            size = 25 if len(word) < 11 else 16
            draw_text(draw, (x + W / 2, top + LINE / 2), shown[word], size, W + GAP, W // 8, 3,
                      align="center")
        for row, (picture, name) in enumerate(zip(pair, ("before", "after"))):
            y = top + LINE + row * (H + GAP)
            # The size of a run's pictures may change when it is resumed.
            sheet.paste(ImageOps.pad(picture, (W, H), Image.LANCZOS, "white"), (x, y))
            draw.rectangle((x - 1, y - 1, x + W, y + H), outline="lightgray")  # for white pictures
            if x == LEFT:
                draw.text((LEFT - 12, y + H / 2), name, "black", load_font("", 25), "rm")
    sheet.save(path)

# --- The command --------------------------------------------------------------
def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", metavar="run", help="folder of a run")
    add("--curve", default="curve.png", metavar="FILE", help="default: %(default)s")
    add("--metric", help="to plot by step; default: reward, or loss")
    add("--before-after", metavar="FILE", help="draw the first and last pictures")
    add("--words", nargs="+", help="to stand above them; default: the prompts")
    add("--film", metavar="FILE", help="draw all saved pictures, a row a step")
    add("--wandb", metavar="PROJECT", help="follow a run, and send it to Weights & Biases")
    add("--trackio", metavar="PROJECT", help="follow a run, and show it on a page of this machine")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    return parser.parse_args()

def draw_pictures(args, run):
    samples = read_samples(run)
    if not samples:
        fail(f"{run}: has no samples_*.png")
    words = args.words or read_words(run)
    first, *_ = samples
    *_, last = samples
    if args.before_after:
        save_before_after(args.before_after, samples[first], samples[last], words)
        print(f"steps {first} and {last}: {args.before_after}")
    if args.film:
        rows = [[f"step {step}", *pictures] for step, pictures in samples.items()]
        save_film(args.film, [["", *words[:len(samples[first])]], *rows])
        print(f"steps {first} to {last}: {args.film}")

def plot(args):
    for run in args.runs:
        if not Path(run, "config.json").is_file():
            fail(f"{run}: is no folder of a run")
    runs = {run: read_rows(run) for run in args.runs}
    for run, rows in runs.items():
        settings = read_settings(run)
        if settings.get("reward"):  # a run of sft.py has none
            print(f"{run}  --reward {settings['reward']}")
        print_ends(run, rows)
        for text in find_alarms(rows, settings):
            print(f"{run}  alarm at {text}")
    if args.before_after or args.film:
        return draw_pictures(args, args.runs[0])
    every = [row for rows in runs.values() for row in rows]
    metric = args.metric or ("reward" if "reward" in find_metrics(every) else "loss")
    for run, rows in runs.items():
        if not rows:
            fail(f"{run}: has no step yet")
        if not any([metric in row for row in rows]):
            fail(f"{run}: has no {metric}; see --metric")
    draw_curves(runs, metric, args.curve)

def main():
    args = parse_args()
    services = [("wandb", args.wandb), ("trackio", args.trackio)]
    followed = [(name, project) for name, project in services if project is not None]
    if followed and len(args.runs) + len(followed) > 2:
        fail("--wandb and --trackio: type one of them, and one run, which it follows")
    try:
        if followed:
            return follow(args.runs[0], *followed[0])
        plot(args)
    except KeyboardInterrupt:
        sys.exit("Stopped.")
    except (OSError, LookupError, TypeError, ValueError) as error:
        fail(f"{' '.join(args.runs)}: {type(error).__name__}: {error}")

if __name__ == "__main__":
    main()
