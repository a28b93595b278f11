"""What docs/evaluate.md says of the intervals of evaluate.py. Not a test; two minutes of a core.

    python .ci/measure_evaluate.py runs/seed0
"""
import re, sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
import evaluate, grpo

def means_of(rows):
    """What `evaluate` says of an adapter -> the mean reward of each prompt."""
    return np.array([np.mean(row["color"]) for row in rows])

def count_honest(draw, adapter, prompts, repeats=40):
    """The same adapter with two sets of seeds: how often does the interval of their difference contain 0?"""
    honest = []
    for i in range(repeats):
        (a, _), = draw([adapter], prompts, seed=2 * i)
        (b, _), = draw([adapter], prompts, seed=2 * i + 1)
        low, high = evaluate.find_interval(means_of(b) - means_of(a))
        honest.append(low <= 0 <= high)
    return sum(honest)

def find_power(changes, wanted=0.02, repeats=500):
    """Prompts -> how often so many of them, drawn from these, show a change of this mean."""
    rng = np.random.default_rng(0)
    changes = changes - changes.mean() + wanted
    powers = {}
    for n in (6, 12, 24, 48, 96):
        shown = [evaluate.find_interval(rng.choice(changes, n))[0] > 0 for _ in range(repeats)]
        powers[n] = float(np.mean(shown))
    return powers

if __name__ == "__main__":
    run = Path(sys.argv[1])
    config = grpo.parse_args(["--resume", str(run)])
    prompts, _ = grpo.load_prompts(ROOT / "examples/held_out.txt")
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
    rewards = grpo.load_rewards("color")

    def draw(adapters, prompts, seed=0):
        return evaluate.evaluate(wrapper, lora, adapters, prompts, [None] * len(prompts), rewards, 4, seed)

    colors = "|".join(grpo.COLORS)
    many = [re.sub(rf"\b({colors})\b", color, prompt, count=1) for color in grpo.COLORS for prompt in prompts]
    pairs = [(0, 10), (10, 20), (0, 20)]
    steps = (0, 10, 20)
    rows_of_steps = [rows for rows, _ in draw([run / f"adapter_{step:05d}" for step in steps], many)]
    drawn = dict(zip(steps, map(means_of, rows_of_steps)))
    for a, b in pairs:
        changes = drawn[b] - drawn[a]
        std = changes.std(ddof=1)
        print(f"steps {a} and {b}: {len(many)} prompts, change {changes.mean():.3f}, std over prompts {std:.3f}, "
              f"prompts for .02 by arithmetic {(2.8 * std / 0.02) ** 2:.0f}, by drawing {find_power(changes)}", flush=True)
    honest = count_honest(draw, run / "adapter_00010", prompts)
    print(f"step 10: with other seeds the interval contains 0 in {honest} of 40", flush=True)
