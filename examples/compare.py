"""Compares grpo.py as it is with patches or other settings, in pairs of runs with the same seed.

    python -m examples.compare max_at_k contrast --kl-coef 0
    python -m examples.compare "--group-size 8 --batch-size 4" "dr_grpo --kl-coef 0" --seeds 0 1 2

A variant is the name of a patch of examples/patches, or flags of grpo.py, or both, in quotes. Flags
that stand alone are for all runs. After its run, each draws 16 pictures for each held-out prompt,
always from the same seeds: those of held_out.txt in the model's folder, or of examples/make.
"""
from examples import read_flags, start

def add_flags(add):
    add("variants", nargs="+", metavar="variant", help="a patch's name, flags, or both, in quotes")
    add("--seeds", type=int, nargs="+", default=[*range(9)], help="default: 0 .. 8")

if __name__ == "__main__":
    ARGS = read_flags(__doc__, add_flags, and_more=True)

import contextlib, os, shutil, subprocess, sys, tempfile, types
from pathlib import Path

import numpy as np

import grpo
from examples import evaluate
from examples.runs import load_model

PATCHES = Path(__file__).with_name("patches")
MEASURES = ["reward", "best of 8", "pixels differ"]

def load_patched(name):
    """-> grpo.py with a patch, as a module. Models and prompts lie where they always do."""
    module = types.ModuleType(f"grpo_{name}")
    module.__file__ = grpo.__file__
    sys.modules[module.__name__] = module  # dataclasses look there
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(grpo.__file__, folder)
        patch = PATCHES / f"{name}.patch"
        grpo.attempt(name, subprocess.run, ["git", "apply", patch], cwd=folder, check=True)
        exec(Path(folder, "grpo.py").read_text(), module.__dict__)
    module.BadInput = grpo.BadInput  # `start` knows this one
    module.LoRALinear = grpo.LoRALinear  # a wrapper asks this one whether it is the reference
    return module

def parse_variant(text, flags):
    """-> a module, and what to give its parse_args."""
    words = text.split()
    module = grpo
    if words and not words[0].startswith("-"):
        module = load_patched(words.pop(0))
    module.parse_args([*flags, *words])  # a mistake is told before hours of training
    return module, [*flags, *words]

def train(module, argv):
    """-> the trainer after a run that leaves no files and prints nothing."""
    config = module.parse_args(argv)
    Wrapper = module.import_name(config.wrapper) if config.wrapper else module.GLMImageWrapper
    wrapper = load_model(Wrapper, config)
    with (tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere,
          contextlib.redirect_stdout(nowhere)):
        config.out = f"{folder}/run"
        trainer = module.GRPOTrainer(config, wrapper, module.load_prompts(config.prompts))
        trainer.log = trainer.save = lambda *_: None
        trainer.train()
    wrapper.explores = False  # from now on flow.py's DiT draws as for its users
    return trainer

def measure(trainer):
    """-> MEASURES of held-out prompts."""
    own = Path(trainer.config.model or "", "held_out.txt")
    prompts = grpo.load_prompts(own if own.exists() else evaluate.HELD_OUT)
    args = types.SimpleNamespace(samples=16, seed=0)  # twice as many as the best is taken of
    found, _ = evaluate.measure_adapter(trainer.wrapper, prompts, trainer.rewards, args)
    rows = [(np.mean(each["reward"]), evaluate.weigh_best(each["reward"], 8) @ each["reward"],
             np.mean(each["pixels differ"])) for each in found]
    return np.mean(rows, 0)

def print_tables(names, values):
    """values [variant, seed, measure]; the first variant is what the others are compared with."""
    print("| variant |", " | ".join(MEASURES), "|\n" + "|---" * (len(MEASURES) + 1) + "|")
    for name, rows in zip(names, values):
        cells = [f"{m:.4f} ± {s:.4f}" for m, s in zip(rows.mean(0), rows.std(0, ddof=1))]
        print("|", " | ".join([name, *cells]), "|")
    for name, rows in zip(names[1:], values[1:]):
        for column, changes in zip(MEASURES, (rows - values[0]).T):
            low, high = evaluate.find_interval(changes) or (np.nan, np.nan)
            print(f"{name}, {column}: {changes.mean():+.4f}, {low:+.4f} .. {high:+.4f}")

def compare(args):
    names = ["as it is", *args.variants]
    variants = [parse_variant(text, args.flags) for text in ["", *args.variants]]
    values = np.zeros((len(names), len(args.seeds), len(MEASURES)))
    for j, seed in enumerate(args.seeds):
        for i, (module, argv) in enumerate(variants):
            values[i, j] = measure(train(module, [*argv, f"--seed={seed}"]))
            cells = [f"{value:.4f}" for value in values[i, j]]
            print(f"seed {seed}  {names[i]:12}", *cells, file=sys.stderr, flush=True)
    print_tables(names, values)

if __name__ == "__main__":
    start(compare, ARGS)
