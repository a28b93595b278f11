"""Prints the mean of each reward over a run's first and last five steps.

    python -m examples.ends runs/mine"""
import json, sys
from statistics import mean

rows = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
keys = dict.fromkeys(key for row in rows for key in row)  # unique, in order
for key in keys:
    if key.startswith("reward") and key != "reward_std":
        values = [row[key] for row in rows if key in row]  # a resumed run may have new rewards
        first = mean(values[:5])
        last = mean(values[-5:])
        print(f"{key}: first five steps {first:.3f}, last five {last:.3f}")
