"""Compares grpo.py with patches of examples/patches, in pairs of runs that have the same seed.

    python -m examples.experiments.compare_patches max_at_k contrast --seeds 0 1 2 --kl-coef 0
    python -m examples.experiments.compare_patches max_at_k --kl-coef 0 --model runs/letters

The tiny GLM-Image, or another model, is trained with the file as it is, and with each patch; other
flags are those of grpo.py. Each run then draws held-out prompts, always from the same seeds: those
of held_out.txt in the model's folder, or of examples/make. The table has the mean of the reward,
the best of 8 of 16 samples, and how much the pictures of a prompt differ; below it is the change in
pairs, with 95 % intervals over seeds.
"""
import argparse, itertools, shutil, subprocess, sys, tempfile, time, types
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of grpo.py
import grpo  # before torch, which reads when it is imported how threads are to wait
import numpy as np
import torch
from PIL import ImageChops

from examples.intervals import find_interval, weigh_best

EXAMPLES = Path(__file__).resolve().parents[1]
SAMPLES = 16  # of each held-out prompt: twice as many as the best is taken of
MEASURES = ["reward", "best of 8", "pixels differ"]

def load_patched(name):
    """-> grpo.py with a patch, or as it is if the name is empty, as a module."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(grpo.__file__, folder)
        if name:
            patch = EXAMPLES / f"patches/{name}.patch"
            subprocess.run(["git", "apply", patch], cwd=folder, check=True)
        sys.modules["patched"] = module = types.ModuleType("patched")  # dataclasses look there
        module.__file__ = grpo.__file__
        exec(Path(folder, "grpo.py").read_text(), module.__dict__)
    return module

def train(module, argv):
    """-> the trainer after a run that writes no files."""
    class Trainer(module.GRPOTrainer):
        def start(self, step=None):
            self.wrapper.config = self.config

        save = start

        def log(self, step, metrics):
            self.history.append(metrics)

    config = module.parse_args(["--model", grpo.TINY_MODEL, *argv])
    wrapper = module.GLMImageWrapper.from_pretrained(config.model, config)
    with mock.patch.object(module, "RANK", 1):  # only the first process writes
        trainer = Trainer(config, wrapper, module.load_prompts(config.prompts)[0])
    trainer.train()
    return trainer

@torch.no_grad()
def measure(trainer):
    """-> MEASURES of held-out prompts."""
    path = Path(trainer.config.model, "held_out.txt")
    prompts, targets = grpo.load_prompts(path if path.exists() else EXAMPLES / "make/held_out.txt")
    seeds = range(10**9, 10**9 + len(prompts))
    rollout = trainer.wrapper.sample(prompts, SAMPLES, seeds)
    images = trainer.wrapper.decode(prompts, rollout.tokens, seeds)
    targets = [target for target in targets for _ in range(SAMPLES)]
    scores, _ = grpo.compute_rewards(images, rollout.prompts, targets, trainer.rewards)
    groups = scores.view(-1, SAMPLES).numpy()
    best = [weigh_best(group, 8) @ group for group in groups]
    differences = [np.mean(ImageChops.difference(*pair)) / 255
                   for start in range(0, len(images), SAMPLES)
                   for pair in itertools.combinations(images[start:start + SAMPLES], 2)]
    return groups.mean(), np.mean(best), np.mean(differences)

def print_tables(names, values):
    """values [variant, seed, measure]."""
    print("| variant |", " | ".join(MEASURES), "|\n" + "|---" * (len(MEASURES) + 1) + "|")
    for name, rows in zip(names, values):
        spreads = rows.std(0, ddof=1) if len(rows) > 1 else [np.nan] * len(MEASURES)
        cells = [f"| {mean:.4f} ± {std:.4f}" for mean, std in zip(rows.mean(0), spreads)]
        print(f"| {name or 'as shipped'}", *cells, "|")
    for name, rows in zip(names[1:], values[1:]):
        for measure_name, changes in zip(MEASURES, (rows - values[0]).T):
            low, high = find_interval(changes) or (np.nan, np.nan)
            print(f"{name}, {measure_name}: {changes.mean():+.4f}, {low:+.4f} .. {high:+.4f}")

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    stems = sorted(path.stem for path in EXAMPLES.glob("patches/*.patch"))
    parser.add_argument("patches", nargs="+", metavar="patch", choices=stems,
                        help=f"of {', '.join(stems)}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(9)], help="default: 0 .. 8")
    args, flags = parser.parse_known_args()
    try:
        if grpo.parse_args(["--model", grpo.TINY_MODEL, *flags]).wrapper:
            raise grpo.BadInput("--wrapper: GLM-Image alone is trained")
    except grpo.BadInput as error:
        parser.error(error)
    names = ["", *args.patches]
    modules = [load_patched(name) for name in names]
    values = np.zeros((len(names), len(args.seeds), len(MEASURES)))
    for (j, seed), (i, name) in itertools.product(enumerate(args.seeds), enumerate(names)):
        started = time.perf_counter()
        values[i, j] = measure(train(modules[i], [*flags, "--seed", str(seed)]))
        cells = [f"{value:.4f}" for value in values[i, j]]
        print(f"seed {seed}  {name or 'as shipped':12}", *cells,
              f"in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    print_tables(names, values)

if __name__ == "__main__":
    main()
