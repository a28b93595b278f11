"""Means of each reward of a run, over its first and its last five steps.

    python -m examples.ends runs/mine"""
import json, sys
from statistics import mean

rows = [json.loads(line) for line in open(f"{sys.argv[1]}/metrics.jsonl")]
keys = dict.fromkeys(key for row in rows for key in row)  # each once, in order
for key in keys:
    if key.startswith("reward") and key != "reward_std":
        values = [row[key] for row in rows if key in row]  # a resumed run may have other rewards
        first = mean(values[:5])
        last = mean(values[-5:])
        print(f"{key}: first five steps {first:.3f}, last five {last:.3f}")
