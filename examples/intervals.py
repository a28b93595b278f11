"""95 % intervals and the best of k, for the tables of evaluate.py."""
import functools

import numpy as np

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
    prompt. Samples of a prompt are not independent, so each prompt counts once. A bootstrap of few
    prompts is too narrow: of 8, it covers 88 %."""
    if len(values) < 2:
        return None
    mean = np.mean(values)
    margin = find_t(len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return mean - margin, mean + margin
