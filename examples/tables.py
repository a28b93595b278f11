"""The tables that evaluate.py prints. `results` has a list for each adapter, with a dict for each
prompt: {measure: a score for each sample}.
"""
import itertools, math

import numpy as np

from examples.intervals import find_agreement, find_crossing, find_interval, weigh_best

def show_interval(values, limit=math.inf):
    """Of a measure that lies within -limit .. limit: normal approximations do not know this."""
    interval = find_interval(values)
    if interval is None:
        return f"{'-':^16}"
    return "{:+.3f} .. {:+.3f}".format(*np.clip(interval, -limit, limit))

def show_margin(values):
    """A mean and half of its interval."""
    interval = find_interval(values)
    margin = f"{(interval[1] - interval[0]) / 2:.3f}" if interval else "-"
    return f"{np.mean(values):.3f} ± {margin:5}"

def print_table(labels, results, relative=()):
    """Each measure: mean, change since the first row, and the share of prompts where it rose."""
    width = max(27, *map(len, labels))
    print(f"{len(results[0])} prompts, changes since {labels[0]}")
    shared = [name for name in results[0][0] if all([name in rows[0] for rows in results])]
    for name in shared:
        print(f"\n{name:{width}}      mean  change   95 % interval    rose in")
        if name in relative:
            print(f"  above {labels[0]}, whose images it saw in the same call")
        means = [np.array([np.mean(row[name]) for row in rows]) for rows in results]  # [P] each
        for label, values in zip(labels, means):
            changes = values - means[0]
            print(f"  {label:{width}}{values.mean():8.3f}  {changes.mean():+.3f}  "
                  f"{show_interval(changes)}  {np.mean(changes > 0):6.0%}")

# --- Best of k ----------------------------------------------------------------
def turn_negative(results, rewards):
    """Rewards of negative weight, of which less is better, become `-name`, of which more is."""
    turned = {name for name, (_, weight) in rewards.items() if weight < 0}
    return [[{f"-{name}" if name in turned else name: [-value for value in values]
              if name in turned else values for name, values in row.items()} for row in rows]
            for rows in results]

def find_best(rows, name, k, other=None):
    """-> [P]: the best of k by the reward `name`, or what another one gives to the one picked."""
    return np.array([weigh_best(row[name], k) @ np.array(row[other or name]) for row in rows])

def choose_sizes(results, name):
    """k = 1, 2, 4, .. up to a half of the samples, where the estimate is still a good one."""
    half = len(results[0][0][name]) // 2
    return [2**i for i in range(half.bit_length())]

def print_best(labels, results, names):
    """For each reward, what the best of k images has, and how many of the first row's are needed to
    have the mean of another. An image that is picked by one reward may have less of the others."""
    width = max(27, *map(len, labels))
    for name in names:
        sizes = choose_sizes(results, name)
        if len(sizes) < 2:
            return
        for other in [name, *[each for each in names if each != name]]:
            what = f"{name}, best of k" if other == name else f"{other} of the one with most {name}"
            print(f"\n{what:{width + 2}}" + "".join([f"{f'k = {k}':>16}" for k in sizes]))
            for label, rows in zip(labels, results):
                cells = [show_margin(find_best(rows, name, k, other)) for k in sizes]
                print(f"  {label:{width}}" + "".join([f"{cell:>16}" for cell in cells]))
        for label, rows in zip(labels[1:], results[1:]):
            for sentence in compare_best(labels[0], results[0], label, rows, name):
                print(f"  {sentence}")

def compare_best(first_label, first, label, rows, name):
    """-> sentences: how many of the first row's have the mean of another row, and from which k on
    the best of the first row is better, if that is certain."""
    half = len(first[0][name]) // 2
    ours = [find_best(rows, name, k) for k in range(1, half + 1)]  # [half][P]
    theirs = [find_best(first, name, k) for k in range(1, half + 1)]
    differences = [best - ours[0] for best in theirs]
    k = find_crossing([each.mean() for each in differences])
    if k == 1:
        yield f"The mean of {label} is not above that of {first_label}."
    elif k is None:
        yield (f"The mean of {label} is above the best of {half} of {first_label}: to know of how "
               "many, draw more --samples.")
    else:
        yield (f"The mean of {label} equals the best of {k:.1f} of {first_label}"
               f"{show_range(differences, half)}.")
    losses = [a - b for a, b in zip(theirs, ours)]
    interval = find_interval(losses[-1])
    if interval and interval[0] > 0:
        k = half
        while k > 1 and losses[k - 2].mean() > 0:
            k -= 1
        since = f"From k = {k} on" if k > 1 else "For any k"
        yield (f"{since}, the best of {first_label} is better than that of {label}, by "
               f"{losses[-1].mean():.3f} at {half}.")

def show_range(differences, half):
    """The 95 % interval of that k: where the ends of the interval of the difference reach 0."""
    intervals = [find_interval(each) for each in differences]
    if None in intervals:
        return ""
    high, low = [find_crossing(curve) for curve in zip(*intervals)]
    return f" ({low:.1f} .. {f'more than {half}' if high is None else f'{high:.1f}'})"

def draw_best(path, labels, results, names):
    """A curve for each adapter over k, with its 95 % interval as a band; a plot for each reward."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(1 + 4 * len(names), 3.6), layout="constrained")
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names):
        sizes = range(1, len(results[0][0][name]) // 2 + 1)
        for label, rows in zip(labels, results):
            best = [find_best(rows, name, k) for k in sizes]
            line, = axes.plot(sizes, [each.mean() for each in best], label=label)
            intervals = [find_interval(each) for each in best]
            if None not in intervals:
                axes.fill_between(sizes, *zip(*intervals), color=line.get_color(), alpha=0.2)
        axes.set_xscale("log", base=2)
        axes.set_xticks(choose_sizes(results, name), choose_sizes(results, name))
        axes.set_xlabel("k")
        axes.set_ylabel(f"best of k: {name}")
        axes.legend()
    figure.savefig(path, dpi=120)

# --- Before training ----------------------------------------------------------
def print_agreement(label, rows, names):
    """Which rewards disagree about the images of a prompt: to gain one is to lose the other."""
    pairs = [*itertools.combinations(names, 2)]
    if pairs:
        print(f"\nOn two images of a prompt of {label}, rewards prefer the same (1) or not (-1):")
    for a, b in pairs:
        values = [find_agreement(row[a], row[b]) for row in rows]
        print(f"  {f'{a}, {b}':27}{np.mean(values):+8.3f}          {show_interval(values, 1)}")
