"""Compares adapters on held-out prompts: how much each reward changes, with a 95 % interval, and
how much the samples of a prompt still differ. They may be of one run or of several.

    python -m examples.evaluate runs/mine --steps 0 20 --reward color,mine.py:bright
    python -m examples.evaluate runs/a runs/b runs/c/adapter_00010 --prompts mine.txt

All adapters use the same seeds and the settings of the first run, such as temperature and size, so
that only weights make a difference. The first adapter is what the others are compared with. The
first run's folder gets evaluation.json, with every score, and film.png, a grid of pictures; an
adapter's that lies in no run does not, as it may be uploaded: they are written here.
"""
import argparse, dataclasses, itertools, json, os, sys
from pathlib import Path

def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", metavar="run", help="folder of a run, or of an adapter")
    add("--steps", type=int, nargs="+", help="of the runs; default: all of one run, or the newest "
        "weights of each of several")
    add("--model", help="hub id or folder: where the model of all runs lies now")
    add("--wrapper", metavar="FILE:CLASS", help="where the wrapper of all runs lies now")
    add("--prompts", metavar="FILE",
        help="text file with a prompt on each line; default: examples/make/held_out.txt")
    add("--reward", help="as for grpo.py; default: that of the first run")
    add("--samples", type=int, default=4, help="per prompt; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the samples; default: %(default)s")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    return parser.parse_args()

if __name__ == "__main__":
    ARGS = parse_args()  # before the imports, which take seconds
    os.environ |= dict(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")  # it runs alone, also in a pod

import numpy as np
from PIL import ImageChops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.intervals import find_interval
from examples.pictures import save_film
from examples.runs import (
    LIMIT, check_prompts, draw, fail, find_home, is_editor, load_weights, name_step, open_run,
    pick_painted, take_number)

HELD_OUT = Path(__file__).with_name("make") / "held_out.txt"

# --- Which adapters, and how they are drawn -----------------------------------
def choose_steps(paths, steps, **typed):
    """-> {label: (run, step)}. Of one run all steps, of several the last of each, or `steps`."""
    chosen = {}
    for path in paths:
        run = open_run(path, **typed)
        there = [*run.weights]
        if there == [None]:  # the path is that of an adapter
            chosen[path] = run, None
            continue
        wanted = steps or (there if len(paths) == 1 else there[-1:])
        if not wanted or not {*wanted} <= {*there}:
            raise grpo.BadInput(f"{path}: only has weights of steps {there}")
        for step in wanted:
            name = name_step(run, step)
            chosen[name if len(paths) == 1 else f"{path}, {name}"] = run, step
    return chosen

PICTURE = "width height temperature top_k top_p decode_steps guidance".split()  # make a picture

def take_settings(config, first):
    """-> the Config of a run, but with all of the first run's that is about drawing."""
    names = [*PICTURE, "group_size", "micro_batch_size", "offload"]
    return dataclasses.replace(config, **{name: getattr(first, name) for name in names})

def tell_differences(runs):
    """-> a sentence on the settings that other runs than the first had, or None."""
    first, *others = runs
    told = []
    for run in others:
        flags = []
        for name in PICTURE:
            flag = "--" + name.replace("_", "-")
            value = getattr(run.config, name)
            if value != getattr(first.config, name):
                flags.append(f"no {flag}" if value is None else f"{flag} {value}")
        if flags and run.config.resume:  # an adapter outside of a run has no settings
            told.append(f"{run.path} had {', '.join(flags)}")
    return f"{'; '.join(told)}; all are drawn with those of {first.path}" if told else None

def load_rewards(typed, run):
    """A notebook's reward is a name only, and sft.py has none."""
    try:
        return grpo.load_rewards(typed or run.config.reward)
    except grpo.BadInput as error:
        if typed:
            raise
        raise grpo.BadInput(f"{run.path}: its reward, {run.config.reward}, cannot be loaded here; "
                            "type --reward") from error

# --- Measuring ----------------------------------------------------------------
def choose_seeds(count, seed):
    """A seed for each prompt. Those from 0 to 7 and from a million on are training's, whatever its
    --seed was, and never among these."""
    return [8 + (seed * count + i) % 999_992 for i in range(count)]

def find_relative(rewards):
    """-> the names of those that depend on the other images of their call, as `compare` does."""
    return [name for name, (function, _) in rewards.items() if getattr(function, "relative", False)]

def evaluate(chosen, prompts, targets, rewards, samples=4, seed=0):
    """For each (run, step), yields `measure` of each prompt, and an image of each of 8 prompts. All
    use the same seeds and the settings of the first, so only the weights make a difference."""
    seeds = choose_seeds(len(prompts), seed)
    settings = chosen[0][0].config
    compares = find_relative(rewards)
    first = wrapper = loaded = None
    for run, step in chosen:
        config = take_settings(run.config, settings)
        # A wrapper may make random weights from the seed. GLM-Image loads all, in minutes.
        is_glm = issubclass(run.Wrapper, grpo.GLMImageWrapper)
        model = run.Wrapper, config.model, None if is_glm else config.seed
        if model != loaded:
            wrapper = None  # frees the memory of the last one
            wrapper = run.Wrapper.from_pretrained(config.model, config)
            check_prompts(wrapper, prompts)
            loaded = model
        load_weights(wrapper, run.weights[step])
        rows = []
        pictures = []
        for measures, images in measure_adapter(
                wrapper, prompts, targets, rewards, samples, seeds, first):
            rows.append(measures)
            pictures.append(images if compares or len(pictures) < 8 else [])
        first = first or pictures
        yield rows, [images[0] for images in pictures[:8]]

def measure_adapter(wrapper, prompts, targets, rewards, samples, seeds, first=None):
    """Yields `measure` of each prompt, and its images; `first` has those of the first adapter."""
    for i, (group, images, _) in enumerate(draw(wrapper, prompts, samples, seeds)):
        is_latent = group.tokens.is_floating_point()  # those of flow.py are no codes
        codes = None if is_latent else pick_painted(wrapper, group.tokens)
        yield measure(images, prompts[i], codes, targets[i], rewards, first and first[i]), images

def measure(images, prompt, codes, target, rewards, first=None):
    """The rewards of each sample of a prompt, and how much each pair of samples differs, 0..1. A
    reward that is relative to its call gets the images of the first adapter in the same call, and
    counts from their mean. So the first adapter has 0, without a call."""
    measures = {}
    relative = find_relative(rewards)
    for name, (function, _) in rewards.items():
        before = first if first and name in relative else []
        if name in relative and not before:
            measures[name] = [0.0] * len(images)
            continue
        group = [*before, *images]
        scores, _ = grpo.compute_rewards(
            group, [prompt] * len(group), [target] * len(group), {name: (function, 1)})
        start = scores[:len(before)].mean() if before else 0
        measures[name] = (scores[len(before):] - start).tolist()
    if codes is not None:
        measures["codes differ"] = [
            np.mean(a != b) for a, b in itertools.combinations(codes.numpy(), 2)]
    measures["pixels differ"] = [np.mean(ImageChops.difference(a, b)) / 255
                                 for a, b in itertools.combinations(images, 2)]
    return measures

# --- The table ----------------------------------------------------------------
def show_interval(values):
    low, high = find_interval(values) or (None, None)
    return f"{'-':^16}" if low is None else f"{low:+.3f} .. {high:+.3f}"

def print_table(labels, results, relative=()):
    """Each measure: mean, change since the first row, and the share of prompts where it rose."""
    n = len(results[0])
    width = max(27, *map(len, labels))
    print(f"{n} prompts, changes since {labels[0]}")
    shared = [name for name in results[0][0] if all([name in rows[0] for rows in results])]
    for name in shared:
        print(f"\n{name:{width}}      mean  change   95 % interval    rose in")
        if name in relative:
            print(f"  above {labels[0]}, whose images it saw in the same call")
        means = [np.array([np.mean(row[name]) for row in rows]) for rows in results]  # [P] each
        for label, values in zip(labels, means):
            changes = values - means[0]
            print(f"  {label:{width}}{values.mean():8.3f}  {changes.mean():+.3f}  "
                  f"{show_interval(changes)}  {np.mean(changes > 0):6.0%}")

def write_files(args, run, labels, prompts, results, pictures):
    """-> a sentence that names them."""
    folder = find_home(run)
    number, file = take_number(lambda number: open(folder / f"evaluation{number}.json", "x"))
    with file:
        json.dump(dict(adapters=labels, prompts=prompts, samples=args.samples, seed=args.seed,
                       results=results), file)
    rows = [["", *prompts]]
    if all([hasattr(prompt, "source") for prompt in prompts]):  # the pictures that were edited
        rows.append(["source", *[grpo.open_image(prompt.source) for prompt in prompts[:8]]])
    rows += [[label, *row] for label, row in zip(labels, pictures)]
    save_film(folder / f"film{number}.png", rows)
    return f"Wrote evaluation{number}.json, with every score, and film{number}.png to {folder}"

def load_prompts(run, path):
    """Our own file is read by our own function: a wrapper's may read another format."""
    if path:
        return run.load_prompts(path)
    if is_editor(run):
        raise grpo.BadInput("--prompts: type a file of lines `instruction<TAB>source.png`")
    return grpo.load_prompts(HELD_OUT)

def prepare(args):
    """All input is checked before a model is loaded -> {label: (run, step)}, prompts, targets,
    rewards."""
    chosen = choose_steps(args.runs, args.steps, model=args.model, wrapper=args.wrapper)
    first, _ = [*chosen.values()][0]
    prompts, targets = load_prompts(first, args.prompts)
    rewards = load_rewards(args.reward, first)
    if not 2 <= args.samples <= LIMIT:
        raise grpo.BadInput(f"--samples: must be 2 to {LIMIT}, to compare them")
    if not 0 <= args.seed <= 2**40:
        raise grpo.BadInput(f"--seed: must be 0 to 2**40, and is {args.seed}")
    for name in find_relative(rewards):
        if len(chosen) < 2:
            raise grpo.BadInput(f"--reward {name}: compares adapters, so evaluate two or more")
    return chosen, prompts, targets, rewards

def main(args):
    try:
        chosen, prompts, targets, rewards = prepare(args)
        results, pictures = zip(*evaluate(
            [*chosen.values()], prompts, targets, rewards, args.samples, args.seed))
    except grpo.BadInput as error:
        fail(error)
    first, *_ = runs = [*{run.path: run for run, _ in chosen.values()}.values()]
    try:  # before the table, whose reader may stop
        written = write_files(args, first, [*chosen], prompts, results, pictures)
    except OSError as error:  # such as a full disk, which is told after the table
        written = error
    print(f"--prompts {args.prompts or HELD_OUT} --reward {args.reward or first.config.reward}")
    differences = tell_differences(runs)
    if differences:
        print(differences)
    print_table([*chosen], results, find_relative(rewards))
    if isinstance(written, OSError):
        fail(f"not all was written: {written}")
    print(f"\n{written}")

if __name__ == "__main__":
    main(ARGS)
