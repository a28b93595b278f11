"""Plots runs: curves, pictures before and after. It needs nothing but a run's folder.

    pip install matplotlib
    python -m examples.plot runs/seed0 runs/seed1
    python -m examples.plot runs/mine --before-after sheet.png --words red blue green
    python -m examples.plot runs/mine --wandb my-project    # or --trackio my-project

It prints the mean of each reward over the first and the last five steps of each run, and alarms,
where the log shows that something goes wrong. A curve has beside it what `evaluate --follow` has
measured on held-out prompts, if that was with the run's own reward.

--wandb sends what the run has written, and writes, to Weights & Biases, --trackio to trackio, until
the run is done; docs/settings.md says more.
"""
import importlib, json, math, os, re, secrets, time
from pathlib import Path
from statistics import mean, variance

from PIL import Image, ImageDraw, ImageOps

from examples import fail, read_flags, start
from examples.pictures import draw_text, load_font

def add_flags(add):
    add("runs", nargs="+", metavar="run", help="folder of a run")
    add("--curve", default="curve.png", metavar="FILE", help="default: %(default)s")
    add("--metric", help="to plot by step, such as reward/color; default: reward, or loss")
    add("--before-after", metavar="FILE", help="draw the first and last pictures")
    add("--words", nargs="+", help="to stand above them; default: the prompts")
    add("--wandb", metavar="PROJECT", help="follow a run, and send it to Weights & Biases")
    add("--trackio", metavar="PROJECT", help="follow a run, and send it to trackio")

# --- What is in a run's folder ------------------------------------------------
def read_settings(run):
    return json.loads(Path(run, "config.json").read_bytes())

def read_rows(run, name="metrics.jsonl"):
    """The rows of the log, one a step. It is missing before the first step, and a last line that is
    being written ends early."""
    path = Path(run, name)
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]

def read_words(run):
    """The run's prompts, as grpo.py reads them."""
    lines = Path(run, "prompts.txt").read_text("utf-8-sig").split("\n")
    words = [line.split("\t")[0].strip() for line in lines]
    return [word for word in words if word and word[0] != "#"]

def read_samples(run):
    """The pictures that a run has saved, of at most 8 prompts -> {step: PIL images}."""
    count = min(8, len(read_words(run)))
    samples = {}
    for path in Path(run).glob("samples_*.png"):
        if re.fullmatch(r"samples_\d+", path.stem):  # and no copy
            sheet = Image.open(path)  # pictures of one size, side by side
            width = sheet.width // count
            samples[int(path.stem.removeprefix("samples_"))] = [
                sheet.crop((i * width, 0, (i + 1) * width, sheet.height)) for i in range(count)]
    return dict(sorted(samples.items()))

# --- Alarms -------------------------------------------------------------------
WINDOW = 10  # steps: one alone says little, as each has other prompts

def read_weights(reward):
    """"/my/own.py:sharp,color=0", or "bright()=1" of a notebook -> {name: weight}. Paths, and names
    of a notebook, may have , and = in them."""
    part = r"(.+?)\(\)=([^,]*)" if "()=" in reward else r"(?:/.*?:)?(\w+)(?:=([^,]*))?"
    return {name: float(weight or 1) for name, weight in re.findall(part + r"(?:,|$)", reward)}

def find_alarms(rows, settings):
    """Rows of the log, config.json -> a text for each alarm, at the first step where it holds."""
    witnesses = [name for name, weight in read_weights(settings["reward"]).items() if weight == 0]
    alarms = [find_skipped(rows), find_equal(rows), *[find_fall(rows, name) for name in witnesses]]
    return [alarm for alarm in alarms if alarm]

def print_alarms(run, known=()):
    """Prints the alarms that are not known yet -> all."""
    alarms = find_alarms(read_rows(run), read_settings(run))
    for text in alarms:
        if text not in known:
            print(f"{run}  alarm at {text}", flush=True)
    return alarms

def find_skipped(rows):
    in_a_row = 0
    for row in rows:
        in_a_row = 0 if math.isfinite(row.get("grad_norm", 0)) else in_a_row + 1
        if in_a_row == 3:
            return (f"step {row['step']}: the last three updates were left out, because their "
                    "gradient is not finite: nothing is learned. `python -m examples.check` with "
                    "the run's flags tells where the model begins to differ.")

def find_fall(rows, name):
    """A reward that is not trained on falls where the trained one is hacked. Four standard errors,
    because every step is a new chance: of runs of 100 steps that vary independently, one in a
    hundred is that far away by chance at some step, and with two errors one in three."""
    values = [(row["step"], row[f"reward/{name}"]) for row in rows if f"reward/{name}" in row]
    first = [value for _, value in values[:WINDOW]]
    for end in range(2 * WINDOW, len(values) + 1):
        last = [value for _, value in values[end - WINDOW:end]]
        error = math.sqrt((variance(first) + variance(last)) / WINDOW)
        if mean(last) < mean(first) - max(4 * error, 1e-6):  # or rounding of a constant
            return (f"step {values[end - 1][0]}: reward/{name}, whose weight is 0, was "
                    f"{mean(first):.4g} in its first ten steps, and {mean(last):.4g} in the ten up "
                    "to here. The reward may rise at its expense: look at samples_*.png; then give "
                    f"{name} a weight, raise --kl-coef, or start from an earlier adapter.")

def find_equal(rows):
    in_a_row = 0
    for row in rows:
        in_a_row = in_a_row + 1 if row.get("reward_std", 1) < 1e-12 else 0  # up to rounding
        if in_a_row == WINDOW:
            return (f"step {row['step']}: the rewards of every group have been equal for ten steps,"
                    " from which nothing is learned. If they are as high as they can be, the run is"
                    " done. If not, use larger groups, or a reward that tells pictures of one "
                    "prompt apart.")

# --- Figures and curves -------------------------------------------------------
def find_metrics(rows):
    """The names of the rewards. Of a run of sft.py, which has none, the loss."""
    names = dict.fromkeys([name for row in rows for name in row])  # unique, in order
    rewards = [name for name in names if name.startswith("reward/")]
    if len(rewards) < 2:  # a single one is the total
        rewards = []
    return rewards + ["reward"] if "reward" in names else ["loss"]

def print_ends(run, rows):
    for name in find_metrics(rows):
        values = [row[name] for row in rows if name in row]  # a run may go on with new rewards
        n = max(1, min(5, len(values) // 2))
        print(f"{run}  {name}: mean of the first {n} {mean(values[:n]):.3f}, "
              f"of the last {n} {mean(values[-n:]):.3f}")

def read_held_out(run, metric):
    """What `evaluate --follow` has measured -> [(step, mean, low, high)]. A reward's total is only
    the run's own if its names and weights are."""
    weights = read_weights(read_settings(run)["reward"])
    rows = [row for row in read_rows(run, "evaluation.jsonl")
            if metric in row and (metric != "reward" or row["settings"]["reward"] == weights)]
    # One prompt has no interval.
    return [(row["step"], *[math.nan if value is None else value for value in row[metric]])
            for row in sorted(rows, key=lambda row: row["step"])]

def draw_curves(runs, metric, path):
    """Curves of a metric by step; {run: rows}."""
    os.environ.pop("MPLBACKEND", None)  # a notebook's, which its commands inherit
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        fail(f"{path} is not drawn: first run `pip install matplotlib`")
    figure = Figure(figsize=(8, 3 + 0.2 * len(runs)), layout="constrained")
    axes = figure.subplots()
    if len(runs) > 10:  # as many as there are colors by default
        axes.set_prop_cycle(color=colormaps["turbo"].resampled(len(runs))(range(len(runs))))
    for run, rows in runs.items():
        points = [(row["step"], row[metric]) for row in rows if metric in row]
        if not points:
            fail(f"{run}: has no {metric}; there are {', '.join(rows[-1])}")
        line, = axes.plot(*zip(*points), label=run)
        held_out = read_held_out(run, metric)
        if held_out:
            steps, means, *band = zip(*held_out)
            axes.fill_between(steps, *band, color=line.get_color(), alpha=0.2, linewidth=0)
            axes.plot(steps, means, "o--", color=line.get_color(), label=f"{run}, held-out prompts")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_ylabel(metric)
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
    print(f"{metric}: {path}")

# --- Pictures -----------------------------------------------------------------
WIDTH = 1200  # of a sheet; GitHub scales it down to 900
LEFT = 96  # margin for "before" and "after"
GAP = 10  # between pictures
LINE = 70  # height of the words

def save_before_after(path, before, after, words):
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
        draw_text(draw, (x + W / 2, top + LINE / 2), word, 25 if len(word) < 11 else 16, W, lines=3)
        for row, (picture, name) in enumerate(zip(pair, ("before", "after"))):
            y = top + LINE + row * (H + GAP)
            sheet.paste(ImageOps.pad(picture, (W, H), Image.LANCZOS, "white"), (x, y))
            draw.rectangle((x - 1, y - 1, x + W, y + H), outline="lightgray")  # for white pictures
            if x == LEFT:
                draw.text((LEFT - 12, y + H / 2), name, "black", load_font(25), "rm")
    sheet.save(path)

def draw_pictures(args, run):
    samples = read_samples(run)
    words = args.words or read_words(run)[:8]
    first, *_ = samples
    *_, last = samples
    save_before_after(args.before_after, samples[first], samples[last], words)
    print(f"steps {first} and {last}: {args.before_after}")

# --- Services -----------------------------------------------------------------
SECONDS = 5  # between two looks at the run's folder

def follow(run, service, project):
    """Sends what is new to "wandb" or "trackio", until the run is done. Both have `init`, `log`,
    `Image` and `finish`. What was sent, and under which id, stands in wandb.json or trackio.json in
    the run's folder, as offline no server could tell."""
    try:
        module = importlib.import_module(service)
    except ModuleNotFoundError:
        fail(f"--{service}: first run `pip install {service}`")
    print(f"waiting for news of {run}; Ctrl-C ends this", flush=True)
    while not Path(run, "config.json").exists():
        time.sleep(SECONDS)
    file = Path(run, f"{service}.json")
    state = dict(id=secrets.token_hex(4), step=-1)
    if file.exists():
        state = json.loads(file.read_text())
    where = dict(project=project, name=f"{Path(run).resolve().name}-{state['id']}")
    options = {}
    if service == "wandb":
        entity, _, where["project"] = project.rpartition("/")  # team/project
        where |= dict(id=state["id"], dir=run, entity=entity or None)
        options["commit"] = True  # or it would keep a row until the next one
    client = module.init(config=read_settings(run), resume="allow", **where)
    alarms = []
    while state["step"] < read_settings(run)["steps"]:
        alarms = print_alarms(run, alarms)
        for row in list_complete(run):
            if row["step"] > state["step"]:
                metrics = {name: value for name, value in row.items() if name != "step"}
                sheet = Path(run, f"samples_{row['step']:05d}.png")
                if sheet.exists():
                    metrics["samples"] = module.Image(Image.open(sheet))
                client.log(metrics, step=row["step"], **options)
                state["step"] = row["step"]
                file.write_text(json.dumps(state))
        time.sleep(SECONDS)
    client.finish()

def list_complete(run):
    """The rows whose pictures are there, if they have any. A step's row is written before its
    pictures, and these before the row of the next."""
    rows = [dict(step=0), *read_rows(run)]
    is_done = Path(run, f"samples_{read_settings(run)['steps']:05d}.png").exists()
    return rows if is_done else rows[:-1]

# --- The command --------------------------------------------------------------
def plot(args):
    for service, project in (("wandb", args.wandb), ("trackio", args.trackio)):
        if project:
            return follow(args.runs[0], service, project)
    for run in args.runs:
        if not Path(run, "config.json").exists():
            fail(f"{run}: is no folder of a run")
    runs = {run: read_rows(run) for run in args.runs}
    for run, rows in runs.items():
        settings = read_settings(run)
        print(f"{run}  --reward {settings['reward']}")
        if rows:
            print_ends(run, rows)
        print_alarms(run)
    if args.before_after:
        return draw_pictures(args, args.runs[0])
    if not all(runs.values()):
        fail("a run has no step yet")
    metric = args.metric or find_metrics([row for rows in runs.values() for row in rows])[-1]
    draw_curves(runs, metric, args.curve)

if __name__ == "__main__":
    start(plot, read_flags(__doc__, add_flags))
