"""What the tables of evaluate.py are computed with: 95 % intervals, the best of k."""
import functools, math

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

def weigh_best(scores, k):
    """Scores of the n samples of a prompt [n] -> [n]: of all their subsets of size k, the share in
    which each is the best. Equal ones take turns. With these weights the mean of the scores is that
    of the subsets' maxima, and unbiased for the best of k (arXiv 2505.15201), where a bootstrap,
    which may draw one sample twice, finds too little. The formula there, C(i - 1, k - 1) / C(n, k)
    for the i-th from below, is C(i, k) - C(i - 1, k): subsets within the first i, minus those
    within the first i - 1."""
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} is not to be found from {n} samples")
    scores = np.asarray(scores)
    weights = []
    for score in scores:
        worse = int((scores < score).sum())
        equal = int((scores == score).sum())
        weights.append((math.comb(worse + equal, k) - math.comb(worse, k)) / equal)
    return np.array(weights) / math.comb(n, k)

def find_crossing(curve):
    """Values at k = 1, 2, .. of a curve that rises -> the k, no whole number, at which it reaches
    0, or None if it does not."""
    for i, value in enumerate(curve):
        if value >= 0:
            return 1.0 if i == 0 else i + 1 - value / (value - curve[i - 1])

def find_agreement(first, second):
    """Two rewards of the samples of a prompt [n] each -> Kendall's tau, -1 to 1: of two samples,
    how often the rewards prefer the same, minus how often they do not."""
    signs = [np.sign(np.subtract.outer(scores, scores)) for scores in (first, second)]
    n = len(first)
    return (signs[0] * signs[1]).sum() / (n * (n - 1))
