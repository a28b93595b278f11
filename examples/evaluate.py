"""Compares adapters on held-out prompts: how much each reward changes, with a 95 % interval, and
how much the samples of a prompt still differ. They may be of one run or of several.

    python -m examples.evaluate runs/mine --steps 0 20 --reward color,mine.py:bright
    python -m examples.evaluate runs/a runs/b runs/c/adapter_00010 --prompts mine.txt
    python -m examples.evaluate runs/mine --samples 32
    python -m examples.evaluate runs/mine --stock --width 1024 --height 1024 --decode-steps 50
    python -m examples.evaluate runs/mine --follow --every 50

All adapters use the same seeds and the settings of the first run, so that only weights make a
difference, and are compared with the first one. --out gets evaluation.json, with every score, and
film.png. The best of k tells whether training gave more than to draw many pictures and keep the
best. With --follow, evaluation.jsonl in the run's folder gets a line for each new adapter.
"""
import itertools, json, math, time, zlib
from pathlib import Path

from examples import add_drawing_flags, get_drawing_flags, read_flags, start

def add_flags(add):
    add("runs", nargs="+", metavar="run", help="folder of a run, or of an adapter")
    add("--steps", type=int, nargs="+", help="of the runs; default: all of one run, the last of "
        "each of several")
    add("--model", help="hub id or folder: where the model of all runs lies now")
    add("--wrapper", metavar="FILE:CLASS", help="where the wrapper of all runs lies now")
    add("--prompts", metavar="FILE",
        help="text file with a prompt on each line; default: examples/make/held_out.txt")
    add("--reward", help="as for grpo.py; default: that of the first run")
    add("--samples", type=int, default=4, help="of each prompt, 2 or more; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the samples; default: %(default)s")
    add("--stock", action="store_true", help="draw with the stock pipeline and peft")
    add_drawing_flags(add)
    add("--out", type=Path, help="folder for the files; default: that of the first run, or here")
    add("--follow", action="store_true", help="evaluate a run's adapters as training saves them")
    add("--every", type=int, default=1, metavar="STEPS", help="with --follow: only adapters of "
        "multiples of these steps, and the last; default: all")

if __name__ == "__main__":
    ARGS = read_flags(__doc__, add_flags)

import dataclasses, functools

import diffusers
import numpy as np
from PIL import ImageChops

import grpo
from examples import plot
from examples.pictures import save_film
from examples.runs import Stock, draw, find_adapters, load_adapter, load_model, open_run

HELD_OUT = Path(__file__).with_name("make") / "held_out.txt"

# --- Statistics ---------------------------------------------------------------
@functools.cache
def find_t(freedom):
    """The 0.975 quantile of Student's t. With t = tan(angle) * sqrt(freedom), its density is
    cos(angle)^(freedom - 1), whose area is summed up here, exact to four digits."""
    steps = 200_000
    angles = np.linspace(0, np.pi / 2, steps + 1)
    middles = (angles[1:] + angles[:-1]) / 2
    area = np.cumsum(np.cos(middles) ** (freedom - 1))
    angle = np.interp(0.95, area / area[-1], angles[1:])
    return np.tan(angle) * freedom**0.5

def find_interval(values):
    """A value for each prompt -> the 95 % interval of their mean, by Student's t, or None for one
    prompt."""
    if len(values) < 2:
        return None
    margin = find_t(len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return np.mean(values) - margin, np.mean(values) + margin

def weigh_best(scores, k):
    """Scores of the n samples of a prompt [n] -> [n]: of all their subsets of size k, the share in
    which each is the best. Equal ones take turns. With these weights the mean of the scores is that
    of the subsets' maxima, and unbiased for the best of k (arXiv 2505.15201)."""
    scores = np.asarray(scores)
    weights = []
    for score in scores:
        worse = int((scores < score).sum())
        equal = int((scores == score).sum())
        weights.append((math.comb(worse + equal, k) - math.comb(worse, k)) / equal)
    return np.array(weights) / math.comb(len(scores), k)

# --- One adapter --------------------------------------------------------------
def choose_seeds(count, seed):
    """A seed for each prompt. Those from 0 to 7 and from a million on are training's, whatever its
    --seed was, and never among these."""
    return [8 + (seed * count + i) % 999_992 for i in range(count)]

def measure(images, prompt, rewards):
    """The samples of a prompt -> {reward: a score for each; "reward": their weighted sum; "pixels
    differ": the mean difference of each pair, 0..1}."""
    measures = {}
    total = 0
    for name, (function, weight) in rewards.items():
        scores, _ = grpo.compute_rewards(images, [prompt] * len(images), {name: (function, 1)})
        measures[name] = scores.tolist()
        total = total + weight * scores
    differences = [np.mean(ImageChops.difference(*pair)) / 255
                   for pair in itertools.combinations(images, 2)]
    return measures | {"reward": total.tolist(), "pixels differ": differences}

def measure_adapter(wrapper, prompts, rewards, args):
    """-> `measure` of each prompt, and the first picture of each of 8."""
    rows = []
    pictures = []
    seeds = choose_seeds(len(prompts), args.seed)
    for prompt, images in zip(prompts, draw(wrapper, prompts, args.samples, seeds)):
        rows.append(measure(images, prompt, rewards))
        pictures.append(images[0])
    return rows, pictures[:8]

# --- Several adapters ---------------------------------------------------------
PICTURE = "width height temperature top_k top_p decode_steps guidance".split()

def choose_adapters(args):
    """-> {label: (run, folder)}: all adapters of one run, the last of several, or --steps."""
    chosen = {}
    for path in args.runs:
        run = open_run(path, model=args.model, wrapper=args.wrapper, **get_drawing_flags(args))
        if None in run.adapters:  # the path is an adapter's
            chosen[path] = run, run.adapters[None]
            continue
        there = [*run.adapters]
        steps = args.steps or (there if len(args.runs) == 1 else there[-1:])
        if not steps or not {*steps} <= {*there}:
            raise grpo.BadInput(f"{path}: has adapters of steps {there}")
        for step in steps:
            label = f"step {step}" if len(args.runs) == 1 else f"{path}, step {step}"
            chosen[label] = run, run.adapters[step]
    return chosen

def print_differences(runs):
    """Prints the settings in which the runs differ."""
    for name in ["model", "wrapper", *PICTURE]:
        values = {run.path: getattr(run.config, name) for run in runs}
        if len({*values.values()}) > 1:
            told = ", ".join([f"{value} in {path}" for path, value in values.items()])
            print(f"--{name.replace('_', '-')} is {told}"
                  + "; all are drawn with the first" * (name in PICTURE))

def evaluate(chosen, prompts, rewards, args):
    """Yields `measure_adapter` of each (run, folder)."""
    first, _ = chosen[0]
    names = [*PICTURE, "micro_batch_size", "offload"]
    settings = {name: getattr(first.config, name) for name in names}
    wrapper = loaded = None
    for run, folder in chosen:
        if (run.Wrapper, run.config.model) != loaded:
            wrapper = None  # frees the memory of the last one
            config = dataclasses.replace(run.config, **settings)
            wrapper = load_model(Stock if args.stock else run.Wrapper, config)
            loaded = run.Wrapper, run.config.model
        load_adapter(wrapper, folder)
        yield measure_adapter(wrapper, prompts, rewards, args)

# --- The tables ---------------------------------------------------------------
def print_table(labels, results, names):
    """results: for each adapter a `measure` of each prompt. Of each name: mean, change since the
    first row, and the share of prompts where it rose."""
    width = max(27, *map(len, labels))
    print(f"{len(results[0])} prompts, changes since {labels[0]}")
    for name in names:
        print(f"\n{name:{width}}      mean  change   95 % interval    rose in")
        means = [np.array([np.mean(row[name]) for row in rows]) for rows in results]  # [P] each
        for label, values in zip(labels, means):
            changes = values - means[0]
            low, high = find_interval(changes) or (np.nan, np.nan)
            print(f"  {label:{width}}{values.mean():8.3f}  {changes.mean():+.3f}  "
                  f"{low:+.3f} .. {high:+.3f}  {np.mean(changes > 0):6.0%}")

def print_best(labels, results, name):
    """What the best of k samples has: k = 1, 2, 4, .. up to a half of them, as the best of nearly
    all depends on one or two."""
    half = len(results[0][0][name]) // 2
    sizes = [2**i for i in range(half.bit_length())]
    width = max(27, *map(len, labels))
    print(f"\n{f'{name}, best of k':{width + 2}}" + "".join([f"{f'k = {k}':>16}" for k in sizes]))
    for label, rows in zip(labels, results):
        cells = []
        for k in sizes:
            best = [weigh_best(row[name], k) @ np.array(row[name]) for row in rows]  # [P]
            low, high = find_interval(best) or (np.nan, np.nan)
            cells.append(f"{f'{np.mean(best):.3f} ± {(high - low) / 2:.3f}':>16}")
        print(f"  {label:{width}}" + "".join(cells))

def save_files(folder, labels, prompts, rewards, results, pictures, drawing):
    """evaluation.json has every score; film.png the first 8 prompts, and each adapter's pictures
    with their scores. They take the place of those of the last time."""
    scores = dict(adapters=labels, prompts=prompts, results=results, drawing=drawing)
    grpo.write_file(folder / "evaluation.json", json.dumps(scores).encode())
    rows = [[f"below: {', '.join(rewards)}", *prompts]]
    targets = [prompt.target for prompt in prompts[:8]]
    if all(targets):
        rows.append(["target", *map(diffusers.utils.load_image, targets)])
    for label, images, measures in zip(labels, pictures, results):
        texts = ["  ".join([f"{each[name][0]:.3g}" for name in rewards]) for each in measures]
        rows.append([label, *zip(images, texts)])
    save_film(folder / "film.png", rows)
    print(f"evaluation.json and film.png: {folder}")

# --- While a run goes on ------------------------------------------------------
SECONDS = 5  # between two looks at the run's folder

def describe(args, run, prompts, rewards):
    """What rows must have in common to be compared: settings, and the contents of all files."""
    paths = [part.rpartition(":")[0] for part in (args.reward or run.config.reward).split(",")]
    paths += [prompt.target for prompt in prompts]
    contents = [Path(path).read_bytes() for path in paths if path]
    return {name: getattr(run.config, name) for name in PICTURE} | dict(
        stock=args.stock, samples=args.samples, seed=args.seed,
        reward={name: weight for name, (_, weight) in rewards.items()},
        files=zlib.crc32(b"".join([repr([*prompts]).encode(), *contents])))

def summarize(rows):
    """-> {metric: mean and ends of its 95 % interval}, under the names of metrics.jsonl."""
    summary = {}
    for name in rows[0]:
        values = [np.mean(row[name]) for row in rows]
        metric = name if name in ("reward", "pixels differ") else f"reward/{name}"
        summary[metric] = [np.mean(values), *(find_interval(values) or (None, None))]
    return summary

def follow(args):
    """Evaluates adapters as they appear, until the run's last one. evaluation.jsonl has a row for
    each, and says where to go on."""
    folder = Path(args.runs[0])
    print(f"waiting for {folder} and its adapters; Ctrl-C ends this", flush=True)
    while not (folder / "config.json").exists():
        time.sleep(SECONDS)
    run = open_run(folder, model=args.model, wrapper=args.wrapper, **get_drawing_flags(args))
    prompts, rewards = load_inputs(args, run)
    settings = describe(args, run, prompts, rewards)
    path = folder / "evaluation.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if [row for row in rows if row["settings"] != settings]:
        raise grpo.BadInput(f"{path}: has rows of other settings, prompts or rewards, such as "
                            f"{rows[0]['settings']}; type these, or move the file away")
    done = {row["step"] for row in rows}
    last = run.config.steps

    def find_new():
        return {step: adapter for step, adapter in find_adapters(folder).items()
                if step not in done and (step % args.every == 0 or step == last)}

    wrapper = load_model(Stock if args.stock else run.Wrapper, run.config)
    alarms = []
    while last not in done:
        time.sleep(0 if find_new() else SECONDS)
        alarms = plot.print_alarms(folder, alarms)
        for step, adapter in find_new().items():
            load_adapter(wrapper, adapter)
            row = summarize(measure_adapter(wrapper, prompts, rewards, args)[0])
            print(f"step {step}", *[f"{name} {value[0]:.4g}" for name, value in row.items()],
                  sep="  ", flush=True)
            with open(path, "a") as file:
                file.write(json.dumps(dict(step=step) | row | dict(settings=settings)) + "\n")
            done.add(step)

# --- The command --------------------------------------------------------------
def load_inputs(args, run):
    """-> prompts, rewards; before a model is loaded."""
    if args.samples < 2:
        raise grpo.BadInput("--samples: must be 2 or more, to compare them")
    try:
        rewards = grpo.load_rewards(args.reward or run.config.reward)
    except grpo.BadInput as error:
        raise grpo.BadInput(f"{error}; --reward may name another file") from None
    return grpo.load_prompts(args.prompts or HELD_OUT), rewards

def compare(args):
    chosen = choose_adapters(args)
    first, *_ = runs = [*{run.path: run for run, _ in chosen.values()}.values()]
    prompts, rewards = load_inputs(args, first)
    print_differences(runs)
    drawing = {name: getattr(first.config, name) for name in PICTURE} | dict(stock=args.stock)
    for name, value in get_drawing_flags(args).items() if first.folder else ():
        trained = json.loads((first.folder / "config.json").read_bytes())[name]
        if value != trained:
            print(f"--{name.replace('_', '-')} {value}, where the run has {trained}")
    results, pictures = zip(*evaluate([*chosen.values()], prompts, rewards, args))
    folder = args.out or first.folder or Path()
    folder.mkdir(parents=True, exist_ok=True)
    save_files(folder, [*chosen], prompts, rewards, results, pictures, drawing)
    print(f"--prompts {args.prompts or HELD_OUT} --reward {args.reward or first.config.reward}")
    weights = {name: weight for name, (_, weight) in rewards.items() if weight}
    total = [] if [*weights.values()] == [1] else ["reward"]  # or it would be one of the others
    names = [*(rewards.keys() - weights), *weights, *total]
    print_table([*chosen], results, [*names, "pixels differ"])
    print_best([*chosen], results, names[-1])

if __name__ == "__main__":
    start(follow if ARGS.follow else compare, ARGS)
