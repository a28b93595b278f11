"""Tests of plot.py: figures, curves, pictures, alarms, and what is sent to W&B and trackio, without a network."""
import importlib, json, math, random, statistics
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.figure import Figure
from PIL import Image

from examples import plot

RED, GREEN, BLUE = (255, 0, 0), (0, 128, 0), (0, 0, 255)
SETTINGS = dict(reward="/a=1,b/mine.py:sharp,/a/rewards.py:color=0,even=.5,grey=0.0", steps=2, save_every=2)

def make_run(folder, prompts="red\ngreen\nblue\n", rows=None):
    """A run of two steps of 64 x 64 pixels, with a picture of each prompt's color at the last."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    (folder / "prompts.txt").write_text(prompts)
    write_rows(folder, rows or [dict(step=i, reward=i / 4) for i in (1, 2)])
    for step in (0, 2):
        sheet = Image.new("RGB", (192, 64))
        for i, color in enumerate((RED, GREEN, BLUE) if step else (BLUE, RED, GREEN)):
            sheet.paste(color, (64 * i, 0, 64 * i + 64, 64))
        sheet.save(folder / f"samples_{step:05d}.png")
    Image.new("RGB", (8, 8)).save(folder / "samples_00002 copy.png")
    return folder

def write_rows(folder, rows, name="metrics.jsonl"):
    (folder / name).write_text("".join([json.dumps(row) + "\n" for row in rows]))

SQUARES = [i * i / 100 for i in range(1, 14)]  # the mean of four of them, or of five others, is another

@pytest.mark.parametrize("columns, told", [
    (dict(reward=SQUARES), ["reward: mean of the first 5 0.110, of the last 5 1.230"]),
    (dict(loss=SQUARES[:4]), ["loss: mean of the first 2 0.025, of the last 2 0.125"])])
def test_figures(run, tmp_path, columns, told):
    """A single reward is the total; a run of sft.py has a loss; a last line that is being written is none."""
    rows = [dict(zip(columns, row), step=i) for i, row in enumerate(zip(*columns.values()), 1)]
    folder = make_run(tmp_path / "mine", rows=rows)
    (folder / "metrics.jsonl").open("a").write('{"step": 99, "rew')
    code, out, error = run("plot", "mine")
    assert code == 0, error
    assert out.splitlines()[1:] == [f"mine  {line}" for line in told] + [f"{[*columns][-1]}: curve.png"]

def test_a_curve_has_what_was_measured_on_held_out_prompts(run, tmp_path):
    """With its interval, by step, if it is of the run's own rewards and weights. 23 curves have colors of their own."""
    for name, weight in (("mine", 0.5), ("other", 1)):
        reward = dict(sharp=1, color=0, even=weight, grey=0)
        write_rows(make_run(tmp_path / name), [
            dict(step=step, reward=[step, step - 1, None if step else step + 1], settings=dict(reward=reward))
            for step in (2, 0)], "evaluation.jsonl")
    with mock.patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as save:
        code, _, error = run("plot", "mine other")
    assert code == 0, error
    figure = save.call_args.args[0]
    assert [line.get_label() for line in figure.axes[0].lines] == ["mine", "mine, held-out prompts", "other"]
    assert "mine: has no color; there are step, reward\n" in run("plot", "mine other --metric color")[2]
    assert [*figure.axes[0].lines[1].get_xdata()] == [0, 2] and len(figure.axes[0].collections) == 1
    with mock.patch.object(Figure, "savefig", autospec=True) as save:
        run("plot", " ".join([f"mine{'/.' * i}" for i in range(23)]))
    lines = save.call_args.args[0].axes[0].lines[::2]
    assert len({str(line.get_color()) for line in lines}) == len(lines) == 23

def test_pictures(run, tmp_path):
    """The first below "before", the last below "after", each below its prompt; a copy of a file is no step."""
    make_run(tmp_path / "mine", "# mended\nred\t/gone.png\n\ngreen\nblue\n")
    assert run("plot", "mine --before-after pair.png")[0] == 0
    pair = Image.open("pair.png")
    assert [pair.getpixel((x, y)) for y in (200, 570) for x in (275, 640, 1000)] == [BLUE, RED, GREEN, RED, GREEN, BLUE]

def make_rows(steps=60, **columns):
    """Rows of a healthy run; a column is a function of the step."""
    healthy = dict(reward=lambda i: 0.7 + i / 300, reward_std=lambda i: 0.05)
    return [dict(step=i) | {name: value(i) for name, value in (healthy | columns).items()} for i in range(1, steps + 1)]

def find(rows):
    texts = [text.split(": ", 1) for text in plot.find_alarms(rows, SETTINGS)]
    return [(int(step.removeprefix("step ")), text.split(",")[0]) for step, text in texts]

def test_names_of_a_notebook():
    """They may be anything; so may the folders of files."""
    assert plot.read_weights("x=1()=0.5,y,z()=2") == {"x=1": 0.5, "y,z": 2}
    assert plot.read_weights("/lr=1,v:2/a.py:f=0,color,/b/c.py:g") == {"f": 0, "color": 1, "g": 1}

def test_updates_are_skipped(run, tmp_path):
    """Three in a row, at the third; the norm of a run of sft.py that has none is no alarm."""
    bad = {7, 9, 10, 12, 13, 14, 15, 30}
    rows = make_rows(grad_norm=lambda i: math.nan if i in bad else 1.0)
    assert find(rows) == [(14, "the last three updates were left out")]
    assert not find(rows[:13]) and find(make_rows(grad_norm=lambda i: math.inf))[0][0] == 3
    make_run(tmp_path / "mine", rows=rows)
    assert "mine  alarm at step 14: the last three updates" in run("plot", "mine")[1]

@pytest.mark.parametrize("name", ["color", "grey", "sharp", "even"])
def test_a_witness_falls(name):
    """Where Student's statistic of ten and ten passes 4; what has a weight is no witness; 1e-7 is rounding."""
    rng = random.Random(0)
    values = [rng.gauss(0.7 if i < 30 else 0.6, 0.05) for i in range(60)]
    rows = make_rows(**{f"reward/{name}": lambda i: values[i - 1]})
    passed = [end for end in range(20, 61)
              if statistics.mean(values[:10]) - statistics.mean(values[end - 10:end]) > 4 * (
                  (statistics.variance(values[:10]) + statistics.variance(values[end - 10:end])) / 10) ** 0.5]
    assert 30 < passed[0] < 50
    assert find(rows) == ([(passed[0], f"reward/{name}")] if name in ("color", "grey") else [])
    assert not find(make_rows(**{f"reward/{name}": lambda i: 1 - values[i - 1]})) and not find(rows[:passed[0] - 1])
    assert not find(make_rows(**{"reward/color": lambda i: 1 - 1e-7 * (i > 20)}))

def test_groups_are_equal():
    """For ten steps in a row, up to rounding."""
    words = "the rewards of every group have been equal for ten steps"
    assert find(make_rows(reward_std=lambda i: 0.05 * (i % 10 == 0) + 1e-17)) == []
    assert find(make_rows(reward_std=lambda i: 0.05 * (i < 21) + 1e-17)) == [(30, words)]

@pytest.mark.parametrize("service", ["wandb", "trackio"])
def test_one_run_of_the_service_for_a_folder(tmp_path, run, monkeypatch, service):
    """Each row once, with its pictures, which are written after it, also of a run that goes on."""
    module = importlib.import_module(service)
    init = mock.create_autospec(module.init, return_value=mock.create_autospec(module.Run, instance=True))
    monkeypatch.setattr(module, "init", init)
    monkeypatch.setattr(plot, "SECONDS", 0)
    rows = [dict(step=step, reward=step / 4) for step in (1, 2, 3, 4)]
    make_run(tmp_path / "mine", rows=rows[:2])
    assert run("plot", f"mine --{service} team/project")[0] == 0
    config = Path("mine/config.json")
    config.write_text(config.read_text().replace('"steps": 2', '"steps": 4'))
    write_rows(tmp_path / "mine", rows[:3])  # the third waits for the fourth

    def finish(seconds):  # what another process writes while this one waits
        write_rows(tmp_path / "mine", rows)
        Image.new("RGB", (192, 64)).save("mine/samples_00004.png")

    monkeypatch.setattr(plot.time, "sleep", finish)
    assert run("plot", f"mine --{service} team/project")[0] == 0
    sent = init.return_value.log.mock_calls
    told = [(call.kwargs["step"], call.args[0].get("reward"), "samples" in call.args[0]) for call in sent]
    assert told == [(0, None, True), (1, 0.25, False), (2, 0.5, True), (3, 0.75, False), (4, 1.0, True)]
    first, again = [call.kwargs for call in init.mock_calls if "config" in call.kwargs]
    assert first["name"] == again["name"]
    assert service == "trackio" or (first["entity"], first["id"]) == ("team", again["id"])
