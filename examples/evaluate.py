"""Compares adapters on held-out prompts: how much each reward changes, with a 95 % interval, and
how much the samples of a prompt still differ. They may be of one run or of several.

    python -m examples.evaluate runs/mine --steps 0 20 --reward color,mine.py:bright
    python -m examples.evaluate runs/a runs/b runs/c/adapter_00010 --prompts mine.txt
    python -m examples.evaluate runs/edit --edit --prompts held_out.txt

All adapters use the same seeds. The first one is what the others are compared with. The first run's
folder gets evaluation.json, with every score, and film.png, a grid of pictures.
"""
import argparse, itertools, json, sys
from pathlib import Path

import numpy as np
from PIL import ImageChops

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples import edit
from examples.generate import (
    check_prompts, find_adapters, load_adapter, load_wrapper, read_settings)
from examples.plot import draw_film

def evaluate(adapters, prompts, targets, rewards, samples=4, seed=0, with_sources=False):
    """For each adapter folder, yields `measure` of each prompt, and the first image of each prompt.
    All adapters use the same seeds, so only the adapters make a difference."""
    seeds = [10**9 + seed * len(prompts) + i for i in range(len(prompts))]  # not used in training
    wrapper = None
    for adapter in adapters:
        config = read_settings(adapter)
        if wrapper is None or not alike(config, wrapper.config):
            wrapper = None  # frees the memory of the last one
            wrapper = load_wrapper(config, with_sources)
            check_prompts(wrapper, prompts)
        load_adapter(wrapper, adapter)
        rollout = wrapper.sample(prompts, samples, seeds)
        images = wrapper.decode(prompts, rollout.tokens, seeds)
        rows = []
        for i, target in enumerate(targets):
            group = slice(i * samples, (i + 1) * samples)
            rows.append(measure(images[group], rollout.part(group), target, rewards))
        yield rows, images[::samples]

def alike(config, other):
    """Can a loaded model be used again?"""
    names = ("model", "width", "height", "temperature", "top_k", "top_p", "decode_steps",
             "guidance", "micro_batch_size", "offload", "compile")
    return all([getattr(config, name) == getattr(other, name) for name in names])

def measure(images, group, target, rewards):
    """The rewards of each sample of a prompt, and how much each pair of samples differs, 0..1."""
    n = len(images)
    measures = {}
    for name, (function, _) in rewards.items():
        reward = {name: (function, 1)}
        scores, _ = grpo.compute_rewards(images, group.prompts, [target] * n, reward)
        measures[name] = scores.tolist()
    large = images[0].width // 32 * (images[0].height // 32)  # codes after the draft
    codes = group.tokens[:, -large:].numpy()
    measures["codes differ"] = [np.mean(a != b) for a, b in itertools.combinations(codes, 2)]
    measures["pixels differ"] = [np.mean(ImageChops.difference(a, b)) / 255
                                 for a, b in itertools.combinations(images, 2)]
    return measures

def find_interval(changes):
    """95 % interval of their mean, by bootstrap over prompts: images of one are not independent."""
    drawn = np.random.default_rng(0).choice(changes, (10_000, len(changes)))
    return np.quantile(drawn.mean(1), [0.025, 0.975])

def print_table(labels, results):
    """Each measure: mean, change since the first row, and the share of prompts where it rose."""
    n = len(results[0])
    width = max(27, *map(len, labels))
    print(f"{n} prompts, changes since {labels[0]}")
    if n < 12:
        print("Warning: with fewer than 12 prompts the intervals are too narrow. Use more.")
    for name in results[0][0]:
        print(f"\n{name:{width}}      mean  change   95 % interval    rose in")
        means = [np.array([np.mean(row[name]) for row in rows]) for rows in results]  # [P] each
        for label, values in zip(labels, means):
            changes = values - means[0]
            low, high = find_interval(changes)
            print(f"  {label:{width}}{values.mean():8.3f}  {changes.mean():+.3f}  "
                  f"{low:+.3f} .. {high:+.3f}  {np.mean(changes > 0):6.0%}")

def choose_adapters(paths, steps):
    """-> {label: folder}. Of one run all adapters, of several the last of each, or `steps`."""
    chosen = {}
    for path in paths:
        adapters = find_adapters(path)
        if None in adapters:  # the path is that of an adapter
            chosen[str(path)] = adapters[None]
            continue
        wanted = steps or ([*adapters] if len(paths) == 1 else [*adapters][-1:])
        if not wanted or not {*wanted} <= adapters.keys():
            raise grpo.BadInput(f"{path} only has adapters for steps {[*adapters]}")
        for step in wanted:
            label = f"step {step}" if len(paths) == 1 else f"{path}, step {step}"
            chosen[label] = adapters[step]
    return chosen

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("runs", nargs="+", metavar="run", help="folder of a run, or of an adapter")
    add("--steps", type=int, nargs="+", help="of the adapters; default: all of one run, or the "
        "last of each of several")
    add("--prompts", default=Path(__file__).with_name("make") / "held_out.txt",
        help="text file with a prompt on each line; default: examples/make/held_out.txt")
    add("--edit", action="store_true", help="the runs are of edit.py: --prompts has sources")
    add("--reward", help="as for grpo.py; default: that of the first run")
    add("--samples", type=int, default=4, help="per prompt; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the samples; default: %(default)s")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    args = parser.parse_args()
    try:  # all input is checked before a model is loaded
        adapters = choose_adapters(args.runs, args.steps)
        config = read_settings([*adapters.values()][0])
        module = edit if args.edit else grpo
        prompts, targets = module.load_prompts(args.prompts)
        reward = args.reward or config.reward
        rewards = module.load_rewards(reward)
        grpo.try_rewards(rewards, prompts, targets, config)
        if not args.edit and None not in targets:
            print("The pictures of --prompts are targets. For runs of edit.py, type --edit.",
                  file=sys.stderr)
        if args.samples < 2:
            raise grpo.BadInput("--samples: must be at least 2, to compare them")
        results, pictures = zip(*evaluate(
            adapters.values(), prompts, targets, rewards, args.samples, args.seed, args.edit))
    except grpo.BadInput as error:
        message = " ".join(str(error).split())
        parser.exit(2, f"{parser.prog}: error: {message}\n")
    print(f"--prompts {args.prompts} --reward {reward}")
    print_table([*adapters], results)
    write_files(args, adapters, prompts, targets, results, pictures)

def write_files(args, adapters, prompts, targets, results, pictures):
    folder = Path(args.runs[0])
    number = next(n for n in ["", *range(2, 1000)]  # keep the files of earlier evaluations
                  if not Path(folder, f"evaluation{n}.json").exists())
    Path(folder, f"evaluation{number}.json").write_text(json.dumps(dict(
        adapters=[*adapters], prompts=prompts, samples=args.samples, seed=args.seed,
        results=results)))
    rows = [["", *[prompt.split("\t")[0] for prompt in prompts]]]
    if args.edit:
        rows.append(["source", *map(edit.open_source, targets[:8])])
    rows += [[label, *row] for label, row in zip(adapters, pictures)]
    draw_film(rows).save(Path(folder, f"film{number}.png"))
    print(f"\nWrote evaluation{number}.json, with every score, and film{number}.png to {folder}")

if __name__ == "__main__":
    main()
