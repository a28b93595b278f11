"""Tests of alarms.py: when each alarm comes, and when none may."""
import random, statistics

import pytest

from examples.alarms import find_alarms

SETTINGS = dict(reward="/a=1/mine.py:sharp, /a/rewards.py:color = 0,even=.5,grey=0.0")

def make_rows(steps=60, **columns):
    """Rows of a healthy run; a column is a function of the step, or of the step and a random number."""
    healthy = dict(reward=lambda i: 0.7 + i / 300, reward_std=lambda i: 0.05, entropy=lambda i: 0.1 * 0.98**i,
                   grad_norm=lambda i: 0.02)
    return [dict(step=i) | {name: value(i) for name, value in (healthy | columns).items()}
            for i in range(1, steps + 1)]

def find(rows, settings=SETTINGS):
    """-> [(step, the first words)]."""
    texts = [text.split(": ", 1) for text in find_alarms(rows, settings)]
    return [(int(step.removeprefix("step ")), text.split(",")[0]) for step, text in texts]

@pytest.mark.parametrize("name", ["color", "grey", "sharp", "even"])
def test_a_witness_falls(name):
    """At the first step where Student's statistic of ten and ten, here by Python's own variance, passes 4. What has a
    weight is no witness."""
    rng = random.Random(0)
    values = [rng.gauss(0.7 if i < 30 else 0.6, 0.05) for i in range(60)]
    rows = make_rows(**{f"reward/{name}": lambda i: values[i - 1]})
    passed = [end for end in range(20, 61)
              if statistics.mean(values[:10]) - statistics.mean(values[end - 10:end]) > 4 * (
                  (statistics.variance(values[:10]) + statistics.variance(values[end - 10:end])) / 10) ** 0.5]
    assert 30 < passed[0] < 50
    assert find(rows) == ([(passed[0], f"reward/{name}")] if name in ("color", "grey") else [])
    rising = make_rows(**{f"reward/{name}": lambda i: 1 - values[i - 1]})
    assert not find(rising) and not find(rows[:passed[0] - 1])
    assert not find(rows, {}) and not find(rows, dict(reward="bright()"))  # sft.py's, and a notebook's

def test_a_witness_that_only_varies():
    """1 in 100 runs of 100 steps may have a false alarm. With 3 errors it would be 8, with 5 it would be none."""
    rng = random.Random(0)
    runs = [make_rows(100, **{"reward/color": lambda i: rng.gauss(0, 1)}) for _ in range(400)]
    assert 0.005 < sum([bool(find(rows)) for rows in runs]) / len(runs) < 0.025

def test_a_witness_that_came_later():
    """Added at --resume, after 30 steps: its own first ten count."""
    rows = make_rows(**{"reward/color": lambda i: 0.7 + i % 2 / 50 - 0.2 * (i > 45)})
    later = [{name: value for name, value in row.items() if name != "reward/color" or row["step"] > 30} for row in rows]
    assert find(later) == [(52, "reward/color")]  # 7 of the last ten have fallen: 0.14 is more than 4 x 0.031

def test_a_witness_of_a_notebook_and_one_that_is_constant():
    """Its reward has no weight in `bright()`. A fall of 1e-7 is rounding: "was 1 .., and 1 in the ten up to here"."""
    for fall, expected in ((0.2, [(27, "reward/w")]), (1e-7, [])):
        rows = make_rows(**{"reward/w": lambda i: 1 - fall * (i > 20)})
        assert find(rows, dict(reward="bright()=1,w()=0")) == expected

def test_a_run_that_goes_on_with_another_reward():
    """The std of `judge` was compared with that of `jpeg`, a hundredth of it, and the pictures called alike."""
    rows = make_rows(15, **{"reward/judge": lambda i: 5, "reward_std": lambda i: 2})
    rows += make_rows(40, **{"reward/jpeg": lambda i: 0.9, "reward_std": lambda i: 0.008})[15:]
    assert not find(rows)
    rows[-10:] = [row | dict(reward_std=7e-5) for row in rows[-10:]]
    assert find(rows) == [(40, "reward_std has fallen to 7e-05")]

@pytest.mark.parametrize("column, value, words", [
    ("reward_std", 0, "the rewards of every group have been equal for ten steps"),
    ("reward_std", statistics.pstdev([0.1] * 6) + 1.5e-17, "the rewards of every group have been equal for ten steps"),
    ("grad_norm", None, "ten updates in a row were skipped")])
def test_nothing_is_learned(column, value, words):
    """Ten in a row, of which nine are not enough, at the tenth. Equal numbers have a spread of rounding errors."""
    usual = {"reward_std": 0.05, "grad_norm": 0.02}[column]
    for length, expected in ((9, []), (10, [(31, words)]), (25, [(31, words)])):
        rows = make_rows(40, **{column: lambda i: value if i < 9 or 22 <= i < 22 + length else usual})
        assert [found for found in find(rows) if found[1] == words] == expected
    assert find(make_rows(10, **{column: lambda i: value}))[0] == (10, words)  # from the first step on

@pytest.mark.parametrize("name", ["entropy", "reward_std"])
def test_a_collapse(name):
    """To less than a hundredth; to a fiftieth, as in a run that has learned what there is to learn, is none."""
    for factor, expected in ((50, []), (101, [(35, f"{name} has fallen to 0.00099")])):
        found = find(make_rows(**{name: lambda i: 0.1 / factor if i > 25 else 0.1}))
        assert found == expected
    early = make_rows(20, **{name: lambda i: 0.1 if i <= 10 else 0.0005})
    assert [step for step, _ in find(early)] == [20]  # as soon as there are ten and ten

def test_an_entropy_below_0():
    """That of continuous actions, as in flow.py: "has fallen to -0.022, less than a hundredth" of -0.21, in each run."""
    rng = random.Random(0)
    for mean in (-0.2, 0):
        assert not any([find(make_rows(100, entropy=lambda i: rng.gauss(mean, 0.1))) for _ in range(50)])

def test_texts_say_what_to_do_in_the_order_of_steps():
    rows = make_rows(entropy=lambda i: 0.1 if i < 15 else 0, grad_norm=lambda i: None if i > 40 else 1)
    texts = find_alarms(rows, SETTINGS)
    assert [text.split(":")[0] for text in texts] == ["step 24", "step 50"]
    assert all(["tart again" in text for text in texts])
