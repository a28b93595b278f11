"""Tests of evaluate.py, generate.py and plot.py, on the tiny GLM-Image: numbers are those worked by hand."""
import json, re
from pathlib import Path

import numpy as np
import pytest, torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
import grpo
from examples import evaluate, generate, plot

PROMPTS = ["a red thing", "a blue thing", 'a white sign "OPEN"']

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of two steps, with adapters 0 to 2; another of one step, of another size and rank. The learning
    rate is high, so that the adapters differ."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "words.txt").write_text("\n".join(PROMPTS))
    (folder / "grey.txt").write_text("a grey thing")
    (folder / "my.py").write_text("def bright(images, prompts, targets):\n"
                                  "    return [image.convert('L').resize((1, 1)).getpixel((0, 0)) for image in images]\n")
    flags = f"--prompts {folder}/words.txt --width 64 --group-size 2 --batch-size 2 --save-every 1 --lr 0.05"
    grpo.main(f"{flags} --height 64 --steps 2 --out {folder}/run".split())
    grpo.main(f"{flags} --height 96 --steps 1 --lora-rank 4 --out {folder}/other".split())
    return folder

@pytest.fixture
def command(runs, run, monkeypatch):
    """As `run`, but beside the runs."""
    monkeypatch.chdir(runs)
    return run

# --- Its numbers ----------------------------------------------------------------------------------------------
def flat(*colors):
    return [Image.new("RGB", (64, 64), color) for color in colors]

def make_group(tokens, prompt=""):
    return grpo.Rollout([prompt] * len(tokens), tokens, torch.zeros(tokens.shape), None)

def test_measure_by_hand():
    """Four codes are painted, the last; those of the draft, which all differ here, do not count."""
    tokens = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4],
                           [1, 1, 1, 1, 1, 2, 3, 5],
                           [2, 2, 2, 2, 6, 7, 8, 5]])
    rewards = grpo.load_rewards("color=3")  # weights play no part
    images = flat("red", "black", (255, 51, 0))
    measured = evaluate.measure(images, make_group(tokens, "a red thing"), None, rewards)
    assert measured.pop("color") == pytest.approx([1, 2 / 3, 1 - 0.2 / 3])
    assert measured.pop("codes differ") == pytest.approx([1 / 4, 1, 3 / 4])  # 0 and 1, 0 and 2, 1 and 2
    assert measured.pop("pixels differ") == pytest.approx([1 / 3, 0.2 / 3, 1.2 / 3])
    assert not measured

def test_measure_is_given_targets(tmp_path):
    """A reward may compare with a picture of the prompts file."""
    Image.new("RGB", (9, 9), "white").save(tmp_path / "white.png")
    measured = evaluate.measure(
        flat("black", "white"), make_group(torch.zeros(2, 8)), tmp_path / "white.png", grpo.load_rewards("mse"))
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

def test_table_by_hand(capsys):
    """Mean, change, interval, share of prompts: (.2 + .4) / 2 = .3 becomes (.6 + .4) / 2 = .5, and one of two rises."""
    results = [[dict(color=[0.1, 0.3]), dict(color=[0.4, 0.4])], [dict(color=[0.6, 0.6]), dict(color=[0.5, 0.3])]]
    evaluate.print_table(["step 0", "step 7"], results)
    count, warning, _, head, first, last = capsys.readouterr().out.splitlines()
    assert count == "2 prompts, changes since step 0" and "fewer than 12" in warning  # too narrow
    assert head.startswith("color ")
    assert first.split() == "step 0 0.300 +0.000 +0.000 .. +0.000 0%".split()
    assert last.split() == "step 7 0.500 +0.200 +0.000 .. +0.400 50%".split()
    evaluate.print_table(["step 0"], [[dict(color=[0.5])] * 12])
    assert "fewer" not in capsys.readouterr().out

def test_same_seeds_same_numbers(runs):
    """All adapters get the same seeds, so an adapter compared with itself differs by exactly 0; other seeds do not."""
    def draw(*steps, seed=0):
        adapters = [runs / f"run/adapter_{step:05d}" for step in steps]
        return list(evaluate.evaluate(adapters, PROMPTS, [None] * 3, grpo.load_rewards("color"), 2, seed))
    (a, images), (b, _), (again, _) = draw(0, 2, 0)
    assert a == again and a != b and len(a) == len(images) == 3
    assert [len(row["color"]) for row in a] == [2] * 3
    (other, _), = draw(0, seed=1)
    assert other != a
    scores = grpo.reward_color(images, PROMPTS)  # the picture of a prompt is its first sample
    assert scores == pytest.approx([row["color"][0] for row in a])

# --- The commands ---------------------------------------------------------------------------------------------
def test_evaluate(runs, command):
    """All adapters, a table of what is in evaluation.json, a film; and a second one leaves the first alone."""
    folder = runs / "run"
    code, out, _ = command("evaluate", "run --prompts words.txt --samples 3 --reward color,my.py:bright=0")
    assert code == 0
    saved = json.loads((folder / "evaluation.json").read_text())
    assert [saved[key] for key in ("prompts", "samples", "seed")] == [PROMPTS, 3, 0]
    assert saved["adapters"] == ["step 0", "step 1", "step 2"]
    assert list(saved["results"][0][0]) == ["color", "bright", "codes differ", "pixels differ"]
    color = np.array([[row["color"] for row in rows] for rows in saved["results"]])
    assert color.shape == (3, 3, 3)
    told = re.findall(r"step \d +(\S+) +(\S+) ", out)[:3]
    changes = color.mean((1, 2)) - color[0].mean()
    assert told == [(f"{mean:.3f}", f"{change:+.3f}") for mean, change in zip(color.mean((1, 2)), changes)]
    assert Image.open(folder / "film.png").size == (200 * 4, 200 * 4)  # a cell more each way, for the texts
    first = (folder / "evaluation.json").read_text(), (folder / "film.png").read_bytes()
    code, out, _ = command("evaluate", "run --prompts words.txt --samples 3 --steps 2 0")
    assert code == 0 and "evaluation2.json" in out and (folder / "film2.png").exists()
    again = json.loads((folder / "evaluation2.json").read_text())
    assert again["results"][1][0]["color"] == saved["results"][0][0]["color"]
    assert first == ((folder / "evaluation.json").read_text(), (folder / "film.png").read_bytes())

def test_evaluate_compares_runs(runs, command):
    """Each at its own size and rank: with those of the first, the second would not load, or be drawn at another size."""
    code, out, error = command("evaluate", "run other run/adapter_00001 --prompts words.txt --samples 2")
    assert code == 0, error
    labels = re.findall(r"^  (\S.*?)  +0\.\d", out, re.MULTILINE)[:3]
    assert labels == ["run, step 2", "other, step 1", "run/adapter_00001"]
    film = Image.open(sorted((runs / "run").glob("film*.png"))[-1])
    low = np.asarray(film.convert("L"))[400:600, 200:400]  # of 64 x 96: narrow
    assert film.size == (800, 800) and (low[100] != low[0, 0]).mean() == pytest.approx(128 / 200, abs=0.02)

def test_generate(runs, command):
    """The pictures are those of the adapter, in the run's size or the typed one; and nothing is overwritten."""
    code, out, error = command("generate", "run --prompt red green --samples 3 --out a")
    assert code == 0, error
    names = sorted(path.name for path in (runs / "a").iterdir())
    assert names == [f"{i:03}_{j}.png" for i in range(2) for j in range(3)] + ["sheet.png"]
    config = grpo.parse_args(["--resume", str(runs / "run")])
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    generate.load_adapter(wrapper, runs / "run/adapter_00002")
    rollout = wrapper.sample(["red", "green"], 3, [0, 1])
    images = wrapper.decode(["red", "green"], rollout.tokens, [0, 1])
    drawn = [Image.open(runs / "a" / name) for name in names[:-1]]
    assert [image.tobytes() for image in images] == [image.tobytes() for image in drawn]
    assert Image.open(runs / "a/sheet.png").size == (800, 400)
    assert command("generate", "run --prompt red --out a")[0] == 2
    code, _, error = command("generate", "run/adapter_00000 --prompts words.txt --samples 1 --width 96 --out b")
    assert code == 0 and Image.open(runs / "b/002_0.png").size == (96, 64), error
    code, _, error = command("generate", f"--model {grpo.TINY_MODEL} --prompt red --samples 1 --width 96 --height 64 --out c")
    assert code == 0 and len(list((runs / "c").iterdir())) == 2, error
    base, = wrapper.decode(["red"], rollout.tokens[:1], [0])
    code, _, error = command("generate", "run --step 0 --prompt red --samples 3 --out d")
    assert Image.open(runs / "d/000_0.png").tobytes() != base.tobytes(), error

def test_plot(runs, command):
    """First and last steps by hand, words above the right pictures, a row for each saved step."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    code, out, error = command("plot", "run other --curve curve.png")
    rewards = [json.loads(line)["reward"] for line in (runs / "run/metrics.jsonl").read_text().splitlines()]
    mean = f"{sum(rewards) / 2:.3f}"
    assert code == 0 and f"run  reward: first five steps {mean}, last five {mean}\n" in out, error
    assert Image.open("curve.png").width == 960
    code, _, error = command("plot", "run --before-after pair.png --film film.png")
    assert code == 0 and Image.open("film.png").size == (800, 800), error
    first = Image.open(runs / "run/samples_00000.png").crop((64, 0, 128, 64))
    assert plot.read_samples("run")[0][1].tobytes() == first.tobytes() and Image.open("pair.png").width == 1200

BAD = {
    "no run": ("evaluate nowhere", "nowhere: is no folder of a run"),
    "no such step": ("evaluate run --prompts words.txt --steps 0 7", "only has adapters for steps [0, 1, 2]"),
    "no such file": ("evaluate run --prompts gone.txt", "gone.txt"),
    "no such reward": ("evaluate run --prompts words.txt --reward lovely", "lovely"),
    "no colour": ("evaluate run --prompts grey.txt", "there is no color word in"),
    "no source": ("evaluate run --prompts words.txt --edit", "needs a tab and a source"),
    "one sample": ("evaluate run --prompts words.txt --samples 1", "--samples"),
    "nothing to draw": ("generate run", "--prompt or --prompts"),
    "no adapter": ("generate --prompt red", "type the folder of a run"),
    "no such adapter": ("generate run --prompt red --step 5", "has adapters of steps [0, 1, 2]"),
    "a folder that exists": ("generate run --prompt red --out run", "--out run: exists already"),
    "a wrong size": ("generate run --prompt red --width 50", "multiples of 32"),
    "no picture": ("generate run --prompt red --source words.txt", "words.txt"),
    "no run to plot": ("plot nowhere", "this is no run")}

@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, command, monkeypatch):
    """One line that names the program, exit code 2, and no model is loaded for it."""
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", None)
    (program, typed), told = BAD[case][0].split(" ", 1), BAD[case][1]
    code, out, error = command(program, typed)
    assert code == 2 and not out
    assert error.startswith(f"{program}.py: error: ") and error.count("\n") == 1 and told in error

def test_held_out():
    """24 prompts, none of them trained; each names one colour, three prompts each, and half of them quote words."""
    prompts, targets = grpo.load_prompts(ROOT / "examples/make/held_out.txt")
    trained, _ = grpo.load_prompts(None)
    assert len(set(prompts)) == 24 and not set(prompts) & set(trained) and set(targets) == {None}
    named = [[word for word in re.findall(r"\w+", prompt.lower()) if word in grpo.COLORS] for prompt in prompts]
    assert [len(words) for words in named] == [1] * 24 and all(named.count([color]) == 3 for color in grpo.COLORS)
    assert {words[0] for words in named[:8]} == set(grpo.COLORS)  # those of the film
    assert sum(prompt.count('"') == 2 for prompt in prompts) == 12 and all(prompt.count("'") == 0 for prompt in prompts)
