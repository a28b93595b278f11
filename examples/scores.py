"""What the pictures of an adapter score, and how much they differ."""
import itertools

import numpy as np
from PIL import ImageChops

import grpo
from examples.intervals import find_interval
from examples.runs import draw, pick_painted

def choose_seeds(count, seed):
    """A seed for each prompt. Those from 0 to 7 and from a million on are training's, whatever its
    --seed was, and never among these."""
    return [8 + (seed * count + i) % 999_992 for i in range(count)]

def find_relative(rewards):
    """-> the names of those that depend on the other images of their call, as `compare` does."""
    return [name for name, (function, _) in rewards.items() if getattr(function, "relative", False)]

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
        if name in relative and not first:
            measures[name] = [0.0] * len(images)
            continue
        before = first if name in relative else []
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

def summarize(measured, rewards):
    """-> {metric: [mean, ends of its 95 % interval]}, under the names of metrics.jsonl."""
    means = {name: np.array([np.mean(each[name]) for each in measured]) for name in measured[0]}
    values = {"reward": sum([weight * means[name] for name, (_, weight) in rewards.items()])}
    values |= {f"reward/{name}" if name in rewards else name: means[name] for name in means}
    return {name: [each.mean(), *(find_interval(each) or (None, None))]
            for name, each in values.items()}
