"""Plots the reward of each run by step, to curve.png in the current folder.

    pip install matplotlib
    python -m examples.curve runs/seed0 runs/seed1"""
import json, sys
import matplotlib.pyplot as plt

plt.figure(figsize=(8, 2.6), layout="constrained")
for run in sys.argv[1:]:
    rows = [json.loads(line) for line in open(f"{run}/metrics.jsonl")]
    steps = [row["step"] for row in rows]
    rewards = [row["reward"] for row in rows]
    plt.plot(steps, rewards, label=run)
plt.xlabel("step")
plt.ylabel("reward")
plt.legend(ncols=3)
plt.savefig("curve.png", dpi=120)
