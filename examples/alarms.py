"""What the log says of a run that goes wrong: pure functions of its rows and its settings. plot.py
and `evaluate.py --follow` print what they find. docs/evaluate.md tells how often they are wrong.
"""
import math
from statistics import fmean

WINDOW = 10  # steps: one alone says little, as each has other prompts

def find_alarms(rows, settings):
    """Rows of metrics.jsonl, config.json -> a text for each alarm, in the order of their steps.
    Each is given once, at the first step where it holds."""
    rows = skip_other_rewards(rows)
    found = find_falls(rows, settings) + find_stops(rows) + find_collapses(rows)
    return [f"step {step}: {text}" for step, text in sorted(found)]

def skip_other_rewards(rows):
    """The rows since the rewards are these: a run may be resumed with others."""
    names = [{name for name in row if name.startswith("reward/")} for row in rows]
    starts = [i for i in range(1, len(rows)) if names[i] != names[i - 1]]
    return rows[starts[-1]:] if starts else rows

def read_values(rows, name):
    """-> [(step, value)]. A reward may have been added on the way; what is not finite is None."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]

def list_windows(values):
    """Yields the first ten values, and then the step and the last ten at each step after those."""
    first = [value for _, value in values[:WINDOW]]
    for end in range(2 * WINDOW, len(values) + 1):
        last = [value for _, value in values[end - WINDOW:end]]
        yield values[end - 1][0], first, last

# --- A witness falls ----------------------------------------------------------
def list_witnesses(reward):
    """"mine.py:sharp,color=0" -> the rewards of weight 0, which are only logged. Those of a
    notebook are "bright()=1"."""
    parts = [part.rpartition(":")[2].replace("()", "").partition("=") for part in reward.split(",")]
    return [name.strip() for name, _, weight in parts if weight.strip() and float(weight) == 0]

def find_falls(rows, settings):
    """A reward that is not trained on falls where the trained one is hacked. Four standard errors,
    because every step is a new chance: of runs of 100 steps that vary independently, one in a
    hundred is that far away by chance at some step, and with two errors one in three."""
    found = []
    for name in list_witnesses(settings.get("reward", "")):
        for step, first, last in list_windows(read_values(rows, f"reward/{name}")):
            error = math.sqrt((variance(first) + variance(last)) / WINDOW)
            rounding = 1e-6 * max(1, abs(fmean(first)))
            if fmean(last) < fmean(first) - max(4 * error, rounding):
                found.append((step, (
                    f"reward/{name}, which is only logged, was {fmean(first):.4g} in its first ten "
                    f"steps, and {fmean(last):.4g} in the ten up to here. The reward may rise at "
                    f"its expense: look at samples_*.png; then give {name} a weight, raise "
                    "--kl-coef, or start again from an earlier adapter.")))
                break
    return found

def variance(values):
    middle = fmean(values)
    return sum([(value - middle) ** 2 for value in values]) / (len(values) - 1)

# --- Nothing is learned -------------------------------------------------------
def has_equal_groups(row):
    """Up to rounding, in the mean of equal numbers."""
    spread = row.get("reward_std")
    return spread is not None and spread <= 1e-12 * max(1, abs(row.get("reward") or 0))

def is_skipped(row):
    return "grad_norm" in row and row["grad_norm"] is None

STOPS = [
    (has_equal_groups, "the rewards of every group have been equal for ten steps, from which "
     "nothing is learned. If they are as high as they can be, the run is done. If not, use larger "
     "groups, or a reward that tells better from worse pictures of one prompt."),
    (is_skipped, "ten updates in a row were skipped, because their gradient was not finite: "
     "nothing is learned. Start again from an earlier adapter with a lower --lr; if that does not "
     "help, look for NaN in the log-probs of the model."),
]

def find_stops(rows):
    found = []
    for holds, text in STOPS:
        in_a_row = 0
        for row in rows:
            in_a_row = in_a_row + 1 if holds(row) else 0
            if in_a_row == WINDOW:
                found.append((row["step"], text))
                break
    return found

# --- The policy has collapsed -------------------------------------------------
def find_collapses(rows):
    """Both fall in every run that learns, in the quick start to a tenth. A hundredth is what is
    left where a policy draws one picture for each prompt."""
    found = []
    for name in ("entropy", "reward_std"):
        for step, first, last in list_windows(read_values(rows, name)):
            # The entropy of continuous actions, as in flow.py, may be negative.
            if min(first + last) >= 0 and fmean(last) < fmean(first) / 100:
                found.append((step, (
                    f"{name} has fallen to {fmean(last):.2g}, less than a hundredth of what it was "
                    f"in the first ten steps ({fmean(first):.2g}): the pictures of a group have "
                    "become alike. If they are good, the run is done. If not, start again with "
                    "--kl-coef 0.05 or a third of --lr.")))
                break
    return found
