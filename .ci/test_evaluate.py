"""Tests of examples/evaluate.py, on the small GLM-Image: its numbers are those worked by hand."""
import json, os, re, runpy, sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests compare with tensors on the CPU

import numpy as np
import pytest, torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
import grpo
from examples import evaluate
torch.set_num_threads(1)

PROMPTS = ["a red thing", "a blue thing", 'a white sign "OPEN"']

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, with adapters 0 to 2; the learning rate is high, so that these differ."""
    folder = tmp_path_factory.mktemp("evaluate")
    settings = dict(width=64, height=64, group_size=2, batch_size=2, steps=2, save_every=1, lr=0.05)
    config = grpo.parse_args(["--model", str(ROOT / "examples/tiny-glm-image"), "--out", str(folder / "run"),
                              *[f"--{name}={value}" for name, value in settings.items()]])
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    trainer = grpo.GRPOTrainer(config, wrapper, PROMPTS, grpo.load_rewards("color"))
    trainer.train()
    (folder / "words.txt").write_text("\n".join(PROMPTS))
    (folder / "grey.txt").write_text("a grey thing")
    (folder / "my.py").write_text("def bright(images, prompts, targets):\n"
                                  "    return [image.convert('L').resize((1, 1)).getpixel((0, 0)) for image in images]\n")
    return folder / "run", wrapper, trainer.lora

@pytest.fixture
def command(run, monkeypatch, capsys):
    """Runs evaluate.py beside the run -> exit code, what it printed, its errors."""
    monkeypatch.chdir(run[0].parent)
    def execute(*argv):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *argv])
        code = 0
        try:
            runpy.run_path(str(ROOT / "examples/evaluate.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()
    return execute

# --- Its numbers ----------------------------------------------------------------------------------------------
def flat(*colors):
    return [Image.new("RGB", (64, 64), color) for color in colors]

def make_group(images, tokens, prompt=""):
    return grpo.Rollout([prompt] * len(images), images, tokens, torch.zeros(tokens.shape), None)

def test_measure_by_hand():
    """Four codes are painted, the last; those of the draft, which all differ here, do not count."""
    tokens = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4],
                           [1, 1, 1, 1, 1, 2, 3, 5],
                           [2, 2, 2, 2, 6, 7, 8, 5]])
    group = make_group(flat("red", "black", (255, 51, 0)), tokens, "a red thing")
    rewards = grpo.load_rewards("color=3")  # weights play no part
    measured = evaluate.measure(group, None, rewards)
    assert measured.pop("color") == pytest.approx([1, 2 / 3, 1 - 0.2 / 3])
    assert measured.pop("codes differ") == pytest.approx([1 / 4, 1, 3 / 4])  # 0 and 1, 0 and 2, 1 and 2
    assert measured.pop("pixels differ") == pytest.approx([1 / 3, 0.2 / 3, 1.2 / 3])
    assert not measured

def test_measure_is_given_targets():
    """A reward may compare with a picture of the prompts file."""
    group = make_group(flat("black", "white"), torch.zeros(2, 8))
    measured = evaluate.measure(group, Image.new("RGB", (9, 9), "white"), grpo.load_rewards("mse"))
    assert measured["mse"] == [-1, 0]

def test_interval_by_hand():
    """Of equal changes it has no width; of two prompts it reaches from one to the other, as both are drawn twice in a
    quarter of all cases; of many it is that of the normal distribution."""
    assert evaluate.find_interval(np.zeros(24)).tolist() == [0, 0]
    assert evaluate.find_interval(np.full(5, 0.25)).tolist() == [0.25, 0.25]
    assert evaluate.find_interval(np.array([0.0, 1.0])).tolist() == [0, 1]
    changes = np.random.default_rng(1).normal(0.3, 2, 900)
    wanted = changes.mean() + np.array([-1.96, 1.96]) * changes.std() / 30
    assert evaluate.find_interval(changes) == pytest.approx(wanted, abs=0.01)
    assert evaluate.find_interval(changes).tolist() == evaluate.find_interval(changes).tolist()

def test_interval_is_over_prompts():
    """Four equal samples of two prompts are two numbers, not eight: an interval over images would be half as wide."""
    rows = [[dict(color=[0.0] * 4), dict(color=[0.0] * 4)], [dict(color=[0.0] * 4), dict(color=[1.0] * 4)]]
    means = [np.array([np.mean(row["color"]) for row in part]) for part in rows]
    assert evaluate.find_interval(means[1] - means[0]).tolist() == [0, 1]

def test_table_by_hand(capsys):
    """Mean, change, interval, share of prompts: (.2 + .4) / 2 = .3 becomes (.6 + .4) / 2 = .5, and one of two rises."""
    results = [[dict(color=[0.1, 0.3]), dict(color=[0.4, 0.4])], [dict(color=[0.6, 0.6]), dict(color=[0.5, 0.3])]]
    evaluate.print_table(["step 0", "step 7"], results)
    count, warning, _, head, first, last = capsys.readouterr().out.splitlines()
    assert count == "2 prompts" and "fewer than 12" in warning
    assert head.startswith("color ")
    assert first.split() == "step 0 0.300 +0.000 +0.000 .. +0.000 0%".split()
    assert last.split() == "step 7 0.500 +0.200 +0.000 .. +0.400 50%".split()

def test_few_prompts(capsys):
    """An interval over eleven prompts is too narrow to be believed, and the command says so; over twelve it says nothing."""
    for n in (11, 12):
        evaluate.print_table(["step 0"], [[dict(color=[0.5])] * n])
        out = capsys.readouterr().out
        assert out.startswith(f"{n} prompts\n") and ("fewer than 12" in out) == (n < 12)

def test_same_seeds_same_numbers(run):
    """All adapters get the same seeds, so an adapter compared with itself differs by exactly 0; other seeds do not."""
    folder, wrapper, lora = run
    def draw(*steps, seed=0):
        adapters = [folder / f"adapter_{step:05d}" for step in steps]
        return list(evaluate.evaluate(wrapper, lora, adapters, PROMPTS, [None] * 3, grpo.load_rewards("color"), 2, seed))
    (a, images), (b, _), (again, _) = draw(0, 2, 0)
    assert a == again and a != b and len(a) == len(images) == 3
    assert [len(row["color"]) for row in a] == [2] * 3
    (other, _), = draw(0, seed=1)
    assert other != a
    scores = grpo.reward_color(images, PROMPTS)  # the picture of a prompt is its first sample
    assert scores == pytest.approx([row["color"][0] for row in a])

# --- The command ----------------------------------------------------------------------------------------------
def test_command(run, command):
    """All adapters, a table of what is in evaluation.json, a film; and a second one leaves the first alone."""
    folder = run[0]
    code, out, error = command("run", "--prompts", "words.txt", "--samples", "3", "--reward", "color,my.py:bright=0")
    assert code == 0
    saved = json.loads((folder / "evaluation.json").read_text())
    assert [saved[key] for key in ("steps", "prompts", "samples", "seed")] == [[0, 1, 2], PROMPTS, 3, 0]
    assert list(saved["results"][0][0]) == ["color", "my.py:bright", "codes differ", "pixels differ"]
    color = np.array([[row["color"] for row in rows] for rows in saved["results"]])
    assert color.shape == (3, 3, 3)
    told = re.findall(r"step \d +(\S+) +(\S+) ", out)[:3]
    changes = color.mean((1, 2)) - color[0].mean()
    assert told == [(f"{mean:.3f}", f"{change:+.3f}") for mean, change in zip(color.mean((1, 2)), changes)]
    film = Image.open(folder / "film.png")
    assert film.size == (200 * 4, 200 * 4)  # a cell more each way, for the texts

    first = (folder / "evaluation.json").read_text(), (folder / "film.png").read_bytes()
    code, out, _ = command("run", "--prompts", "words.txt", "--samples", "3", "--steps", "2", "0")
    assert code == 0 and "evaluation2.json" in out and (folder / "film2.png").exists()
    again = json.loads((folder / "evaluation2.json").read_text())
    assert again["steps"] == [2, 0]
    assert again["results"][1][0]["color"] == saved["results"][0][0]["color"]
    assert first == ((folder / "evaluation.json").read_text(), (folder / "film.png").read_bytes())

BAD = {
    "no run": ("nowhere", "holds no run"),
    "no such step": ("run --prompts words.txt --steps 0 7", "only has adapters for steps [0, 1, 2]"),
    "no such file": ("run --prompts gone.txt", "gone.txt"),
    "no such reward": ("run --prompts words.txt --reward lovely", "lovely"),
    "no such function": ("run --prompts words.txt --reward my.py:lovely", "my.py:lovely"),
    "no colour": ("run --prompts grey.txt", "there is no color word in"),
    "one sample": ("run --prompts words.txt --samples 1", "--samples")}

@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, command, monkeypatch):
    """One line, exit code 2, and no model is loaded for it."""
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", None)
    argv, told = BAD[case]
    code, out, error = command(*argv.split())
    assert code == 2 and not out
    assert error.startswith("evaluate.py: error: ") and error.count("\n") == 1 and told in error

def test_no_adapters(run, command, monkeypatch):
    """A run whose adapters somebody has deleted."""
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", None)
    monkeypatch.setattr(Path, "glob", lambda *_: [])
    code, _, error = command("run", "--prompts", "words.txt")
    assert code == 2 and error.endswith("only has adapters for steps []\n")

def test_film():
    """Rows, columns and texts lie where they belong; a ninth prompt is left out; a wide picture is not stretched."""
    colors = "red orange yellow green blue purple white black".split()
    pictures = [flat(*colors, "red"), flat(*colors[::-1], "red")]
    film = evaluate.draw_film(["step 0", "step 10"], pictures, ["a long prompt of many words " * 9] * 9)
    assert film.size == (1800, 600)
    centers = [[film.getpixel((200 * x + 300, 200 * y + 300)) for x in range(8)] for y in range(2)]
    assert centers == [[image.getpixel((0, 0)) for image in row[:8]] for row in pictures]
    ink = np.asarray(film.convert("L")) < 128
    assert ink[:200, 200:400].any() and ink[200:400, :200].any() and ink[400:, :200].any()
    assert not ink[:4].any() and not ink[:200, :200].any() and not ink[196:204, 200:].any()
    wide = evaluate.draw_film(["step 0"], [[Image.new("RGB", (160, 32))]], ["a"])
    assert (np.asarray(wide.convert("L"))[200:, 200:] == 0).sum() == pytest.approx(192 * 38, rel=0.05)

# --- What it is used with -------------------------------------------------------------------------------------
def test_held_out():
    """24 prompts, none of them trained; each names one colour, three prompts each, and half of them quote words."""
    prompts, targets = grpo.load_prompts(ROOT / "examples/held_out.txt")
    trained, _ = grpo.load_prompts(None)
    assert len(set(prompts)) == 24 and not set(prompts) & set(trained) and set(targets) == {None}
    named = [[word for word in re.findall(r"\w+", prompt.lower()) if word in grpo.COLORS] for prompt in prompts]
    assert [len(words) for words in named] == [1] * 24
    assert all(named.count([color]) == 3 for color in grpo.COLORS)
    assert {words[0] for words in named[:8]} == set(grpo.COLORS)  # those of the film
    assert sum(prompt.count('"') == 2 for prompt in prompts) == 12 and all(prompt.count("'") == 0 for prompt in prompts)

def test_it_is_short():
    code = (ROOT / "examples/evaluate.py").read_text().splitlines()
    assert sum(map(bool, code)) <= 102 and max(map(len, code)) <= 100
