"""Plots runs: curves, pictures before and after, a film. It needs nothing but a run's folder.

    pip install matplotlib
    python -m examples.plot runs/seed0 runs/seed1
    python -m examples.plot runs/mine --before-after sheet.png --words red blue green
    python -m examples.plot runs/mine --film film.png
    python -m examples.plot runs/mine --wandb my-project

It prints the mean of each reward over the first and the last five steps of each run. With --wandb
it sends what the run has written to Weights & Biases (pip install wandb), and what training writes
meanwhile, until the run is done. It may be stopped and started again at any time.
"""
import argparse, json, math, re, secrets, signal, sys, threading, time
from pathlib import Path
from statistics import mean

from PIL import Image, ImageDraw, ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
from examples.pictures import draw_text, load_font, replace_unreadable, save_film

def fail(message):
    """Ends the program with one line, which names it."""
    print(f"{Path(sys.argv[0]).name}: error:", *str(message).split(), file=sys.stderr)
    sys.exit(2)

# --- What is in a run's folder ------------------------------------------------
def read_settings(run):
    return json.loads(Path(run, "config.json").read_bytes())

def read_rows(run):
    """The rows of metrics.jsonl, one a step. It is missing before the first step. The last line of
    a file that is being copied may end early."""
    path = Path(run, "metrics.jsonl")
    lines = path.read_text().split("\n") if path.is_file() else [""]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                fail(f"{path}, line {number}: {error}")
    return rows

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
            if rest:
                fail(f"{path}: it has not the pictures of {n} prompts, which prompts.txt has")
            samples[int(match[1])] = [
                sheet.crop((i * width, 0, (i + 1) * width, sheet.height)) for i in range(n)]
    return dict(sorted(samples.items()))

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
        if values:
            print(f"{run}  {name}: first five steps {mean(values[:5]):.3f}, "
                  f"last five {mean(values[-5:]):.3f}")

def draw_curves(runs, metric, path):
    """Curves of a metric by step; {run: rows}."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        fail(f"{path} is not drawn: first run `pip install matplotlib`")
    columns = max(1, min(3, 90 // (max(map(len, runs)) + 8)))  # of the legend, below the curves
    height = 2.4 + 0.22 * math.ceil(len(runs) / columns)
    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    lines = []
    for rows in runs.values():
        rows = [row for row in rows if metric in row]
        values = [math.nan if row[metric] is None else row[metric] for row in rows]
        lines += axes.plot([row["step"] for row in rows], values)
    axes.set_xlabel("step")
    axes.set_ylabel(metric)
    # Labels of lines would be left out if they begin with an underscore; $ begins a formula.
    names = [run.replace("$", r"\$") for run in runs]
    figure.legend(lines, names, ncols=columns, loc="outside lower center")
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

# --- Weights & Biases ---------------------------------------------------------
SECONDS = 5  # between two looks at the run's folder

def open_sheet(path):
    """-> a sheet of pictures, or None if it is not there, or only half of it."""
    try:
        sheet = Image.open(path)
        sheet.load()
        return sheet
    except (OSError, SyntaxError):  # the latter if it ends where a part of it does
        return None

def find_news(run, settings, sent):
    """Yields (step, row of metrics, sheet of pictures or None) for each step after `sent`."""
    rows = {0: {}} | {row["step"]: row for row in read_rows(run)}
    log = Path(run, "metrics.jsonl")
    age = time.time() - log.stat().st_mtime if log.is_file() else 0
    for step in sorted([step for step in rows if step > sent]):
        sheet = open_sheet(Path(run, f"samples_{step:05d}.png"))
        is_due = step % settings["save_every"] == 0 or step == settings["steps"]
        # A row is written before its pictures. If they are lost, it has waited for long enough.
        if is_due and sheet is None and step == max(rows) and age < 600:
            return
        yield step, rows[step], sheet

def start_client(wandb, run, settings, stopped, **where):
    try:
        client = wandb.init(dir=run, name=Path(run).absolute().name, config=settings,
                            resume="allow", **where)
    except wandb.Error as error:
        fail(f"--wandb: {error}")
    # From here on a signal ends the program between two rows only: none is lost or sent twice.
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:
        signal.signal(getattr(signal, name), lambda *_: stopped.set())
    return client

def follow(run, project):
    """Sends what is new, until the run is done. wandb.json, in the run's folder, has the id of its
    run there, and what was sent: offline, no server could tell."""
    try:
        import wandb
        wandb.init
    except (ImportError, AttributeError):  # any folder called wandb can be imported
        fail("--wandb: first run `pip install wandb`")
    path = Path(run, "wandb.json")
    projects = json.loads(path.read_bytes()) if path.is_file() else {}
    state = projects.setdefault(project, dict(id=secrets.token_hex(4), step=-1))
    stopped = threading.Event()
    client = None
    while True:
        settings = read_settings(run)
        for step, row, sheet in find_news(run, settings, state["step"]):
            if client is None:
                write_json(path, projects)
                client = start_client(
                    wandb, run, settings, stopped, project=project, id=state["id"])
            metrics = {name: value for name, value in row.items() if value is not None}
            if sheet:
                metrics["samples"] = wandb.Image(sheet)
            if metrics:
                client.log(metrics, step=step, commit=True)
            state["step"] = step
            write_json(path, projects)
        if state["step"] >= settings["steps"] or stopped.wait(SECONDS):
            break
    if client is not None:
        client.finish()
    print(f"{run}: all until step {state['step']} is sent to {project}, as {state['id']}")

def write_json(path, value):
    """Under another name first, so that a kill spares the file."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(value))
    partial.replace(path)

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

def main():
    args = parse_args()
    if args.wandb and len(args.runs) > 1:
        fail("--wandb: follows one run")
    try:
        for run in args.runs:
            if not Path(run, "config.json").is_file():
                fail(f"{run}: is no folder of a run")
        if args.wandb:
            return follow(args.runs[0], args.wandb)
        runs = {run: read_rows(run) for run in args.runs}
        for run, rows in runs.items():
            print_ends(run, rows)
        if args.before_after or args.film:
            return draw_pictures(args, args.runs[0])
        every = [row for rows in runs.values() for row in rows]
        metric = args.metric or ("reward" if "reward" in find_metrics(every) else "loss")
        for run, rows in runs.items():
            if not any([metric in row for row in rows]):
                fail(f"{run}: has no {metric}; see --metric")
        draw_curves(runs, metric, args.curve)
    except KeyboardInterrupt:
        sys.exit("Stopped.")
    except (OSError, KeyError, ValueError) as error:
        fail(f"{' '.join(args.runs)}: {type(error).__name__}: {error}")

if __name__ == "__main__":
    main()
