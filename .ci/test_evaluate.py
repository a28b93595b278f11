"""Tests of evaluate.py and generate.py, on runs of a home-made wrapper and of the tiny GLM-Image."""
import json, os, re, shutil, sys
from pathlib import Path
from unittest import mock

import pytest, torch
from PIL import Image

import grpo
from examples import evaluate, generate, runs

WRAPPER = '''
import torch
from examples.toy import Toy

class HomeMade(Toy):
    """The toy, but all settings matter, and its base weights follow from the seed."""
    defaults = Toy.defaults | dict(model="none", height=32, group_size=4, steps=3, save_every=2, lr=0.05)

    def compute_all_logprobs(self, prompts):
        torch.manual_seed(self.config.seed)
        torch.nn.init.normal_(self.policy[3].weight, std=0.3)
        heat = (self.config.temperature or 1.0) * (self.config.top_k or 1) / self.config.guidance
        return (self.policy(self.encode(prompts)) / heat).log_softmax(2)
'''

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run a has adapters 0, 2 and 3; b has them on other base weights; glm is of GLM-Image. The learning rates are
    high, so that adapters differ. What a notebook's run has as its reward, no command can load."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "home_made.py").write_text(WRAPPER)
    (folder / "words.txt").write_text("a red thing\na blue thing\na white sign")
    grpo.main(f"--wrapper {folder}/home_made.py:HomeMade --out {folder}/a".split())
    copy_run(folder / "a", folder / "b", seed=1)
    copy_run(folder / "a", folder / "notebook", reward="bright()")
    flags = f"--prompts {folder}/words.txt --width 64 --height 96 --group-size 2 --batch-size 2 --steps 1 --lr 0.05"
    grpo.main(f"{flags} --out {folder}/glm".split())
    return folder

@pytest.fixture
def run(folder, run, monkeypatch):
    """As that of conftest.py, but beside the runs."""
    monkeypatch.chdir(folder)
    return run

def copy_run(source, name, **settings):
    """The same weights, with other settings."""
    shutil.copytree(source, name, ignore=shutil.ignore_patterns("evaluation*"))
    path = Path(name, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))

def compare(run, typed):
    """-> what evaluate prints, its results for each adapter."""
    out = run("evaluate", typed)[1]
    name, folder = re.search(r"Wrote (\S+), .* to (.+)", out).groups()
    return out, json.loads(Path(folder, name).read_text())["results"]

def draw(run, typed):
    """-> what generate prints first, its pictures."""
    out = run("generate", f"{typed} --prompt red green --samples 3 --out drawn")[1]
    images = [Image.open(f"drawn/{i:03}_{j}.png").copy() for i in range(2) for j in range(3)]
    shutil.rmtree("drawn")
    return out.splitlines()[0], images

def test_measures_by_hand(tmp_path):
    """Weights play no part; rewards get the target; pairs are (0, 1), (0, 2), (1, 2). GLM-Image's draft, here the first
    four tokens, is not painted; all tokens of other models are."""
    Image.new("RGB", (9, 9), "red").save(tmp_path / "red.png")
    glm = mock.Mock(spec=grpo.GLMImageWrapper, config=grpo.Config(width=64, height=64))
    tokens = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], [1, 1, 1, 1, 1, 2, 3, 5], [2, 2, 2, 2, 6, 7, 8, 5]])
    codes = runs.pick_painted(glm, tokens)
    images = [Image.new("RGB", (64, 64), color) for color in ("red", "black", (255, 51, 0))]
    rewards = grpo.load_rewards("color=3,mse")
    assert evaluate.measure(images, ["a red thing"] * 3, codes, tmp_path / "red.png", rewards) == {
        "color": pytest.approx([1, 2 / 3, 1 - 0.2 / 3]), "mse": pytest.approx([0, -1 / 3, -0.04 / 3]),
        "codes differ": [1 / 4, 1, 3 / 4], "pixels differ": pytest.approx([1 / 3, 0.2 / 3, 1.2 / 3])}
    assert runs.pick_painted("toy", tokens) is tokens

def test_table_by_hand(capsys):
    """Mean, change, interval, share of prompts: (.2 + .4) / 2 = .3 becomes (.6 + .4) / 2 = .5, and one of two rises."""
    results = [[dict(color=[0.1, 0.3]), dict(color=[0.4, 0.4])], [dict(color=[0.6, 0.6]), dict(color=[0.5, 0.3])]]
    evaluate.print_table(["step 0", "step 7"], results)
    _, warning, *_, first, last = capsys.readouterr().out.splitlines()
    assert "fewer than 12" in warning and first.split() == "step 0 0.300 +0.000 +0.000 .. +0.000 0%".split()
    assert last.split() == "step 7 0.500 +0.200 +0.000 .. +0.400 50%".split()

def test_evaluate(run):
    """All adapters of a run, a table, a film; a second evaluation leaves the files of the first alone."""
    copy_run("a", "fresh")
    out, results = compare(run, "fresh --prompts words.txt")
    assert re.findall(r"step (\d) ", out)[:3] == ["0", "2", "3"] and results[0] != results[1] != results[2]
    assert Image.open("fresh/film.png").size == (200 * 4, 200 * 4)  # a cell more each way, for the texts
    assert compare(run, "fresh --prompts words.txt --steps 2 0")[1] == [results[1], results[0]]
    assert json.loads(Path("fresh/evaluation.json").read_text())["results"] == results

def test_no_score_is_lost(run, monkeypatch):
    """They were with `| head`, for a run on a read-only disk, and for one of two evaluations that ended at once."""
    copy_run("a", "mine")
    monkeypatch.setattr(evaluate, "print_table", mock.Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(Path, "exists", lambda path: False)  # the other's file comes a moment later
    for seed, file in enumerate(("mine/evaluation.json", "mine/evaluation2.json", "evaluation.json")):
        monkeypatch.setattr(sys, "argv", f"evaluate.py mine --steps 0 --seed {seed} --prompts words.txt".split())
        monkeypatch.setattr(os, "access", lambda *_: seed < 2)
        with pytest.raises(BrokenPipeError):
            evaluate.main(evaluate.parse_args())
        assert json.loads(Path(file).read_text())["seed"] == seed

@pytest.mark.parametrize("flag, value", [("temperature", 3.0), ("top-k", 2), ("width", 128), ("guidance", 3.0)])
def test_equal_adapters_do_not_change(flag, value, run):
    """A run at temperature 3 had a significant change of -.105, though its weights were those of the other."""
    copy_run("a", flag, model="is loaded again", **{flag.replace("-", "_"): value})
    out, (first, second) = compare(run, f"a {flag}")
    assert f"\n{flag} had --{flag} {value}; all are drawn with those of a\n" in out and first == second
    assert compare(run, f"{flag} a")[1][0] != first  # the setting does matter

def test_runs_of_two_seeds(run):
    """Each on its own base weights: on another's it would be another model."""
    _, (first, second) = compare(run, "a b")
    assert compare(run, "b a")[1] == [second, first] and first != second

def test_held_out_prompts_are_drawn_in_parts(run, monkeypatch):
    """200 prompts x 4 were one batch, of 43 GB; the scores are those of one. No prompt is trained, and no seed."""
    sample = mock.Mock(side_effect=sys.modules["home_made"].HomeMade.sample)
    monkeypatch.setattr(sys.modules["home_made"].HomeMade, "sample", lambda *args: sample(*args))
    _, parts = compare(run, "a --steps 3 --samples 5 --seed 1")
    monkeypatch.setattr(runs, "LIMIT", 1000)
    _, whole = compare(run, "a --steps 3 --samples 5 --seed 1")
    calls = [call.args[1:] for call in sample.mock_calls]
    assert parts == whole and [len(prompts) * samples for prompts, samples, _ in calls] == [*[30] * 4, 120]
    prompts, _, seeds = calls[-1]
    assert seeds == [10**9 + 24 + i for i in range(24)] and not {*prompts} & {*grpo.load_prompts(None)[0]}

def test_generate_takes_what_it_is_given(run):
    """A step, an adapter's folder, also outside of its run, and a model without any, in a size of one's own."""
    told, wanted = draw(run, "a --step 2")
    assert told == "a: step 2" and wanted != draw(run, "a")[1]
    shutil.copytree("a/adapter_00002", "alone")
    for typed in ("a/adapter_00002", "alone --wrapper home_made.py:HomeMade"):
        assert draw(run, typed) == (typed.split()[0], wanted)
    assert draw(run, "--wrapper home_made.py:HomeMade --width 96")[1][1].size == (96, 32)

def test_generate_draws_with_the_adapter_and_shows_what_it_changed(run):
    """Picture by picture, those that the wrapper itself draws. The mean of a map is the estimate of the KL between two
    models, one without adapter; before training it is 0. Rows are rows, in pictures that are not square, too."""
    out = run("generate", "glm --prompt red green --samples 3 --seed 7 --change --out changed")[1]
    config = runs.open_run("glm").config
    new, base = [grpo.GLMImageWrapper.from_pretrained(config.model, config) for _ in range(2)]
    lora = runs.load_weights(new, Path("glm/adapter_00001"))
    rollout = new.sample(["red", "green"], 3, [7, 8])
    images = new.decode(["red", "green"], rollout.tokens, [7, 8])
    assert images == [Image.open(f"changed/{i:03}_{j}.png").copy() for i in range(2) for j in range(3)]
    kl = new.compute_logprobs(rollout)[0] - base.compute_logprobs(rollout)[0]
    torch.testing.assert_close(generate.compute_change(new, lora, rollout), kl.detach(), rtol=0, atol=1e-5)
    painted = kl.view(2, 3, -1)[..., -6:]  # the large grid is 3 x 2
    told = [float(number) for number in re.findall(r"^ +(\S+) on average", out, re.MULTILINE)]
    assert told == pytest.approx(painted.mean((1, 2)).tolist(), abs=6e-5) and min(map(abs, told)) > 1e-3
    shown = Image.open("changed/001_2_change.png").resize((2, 3), Image.NEAREST)
    red, _, blue = grpo.pil_to_tensor([shown])[0]
    wanted = (painted[1, 2] / painted.abs().quantile(0.95)).clamp(-1, 1)
    torch.testing.assert_close(red - blue, wanted.view(3, 2).detach(), rtol=0, atol=1 / 128)
    assert "+0.0000 on average" in run("generate", "glm --prompt red --step 0 --change --out before")[1]
    assert Image.open("before/000_0_change.png").getextrema() == ((255, 255),) * 3

def test_the_newest_weights(run):
    """A run that was stopped before its adapter was drawn from with the untrained one; copies and archives of adapters
    ended in a traceback."""
    copy_run("a", "stopped")
    Path("stopped/adapter_00003").rename("stopped/adapter_00009 (copy)")
    Path("stopped/adapter_00007").mkdir()  # being written
    Path("stopped/adapter_00008.zip").touch()
    assert draw(run, "stopped") == ("stopped: step 3, from checkpoint.pt", draw(run, "a")[1])

@pytest.mark.parametrize("source, name", [("a", "wrapper"), ("glm", "model")])
def test_a_run_that_was_moved(source, name, run):
    """Copied from a cluster: what its config.json names lies elsewhere here."""
    here = json.loads(Path(source, "config.json").read_text())[name]
    copy_run(source, f"moved_{source}", **{name: "/gone.py:HomeMade"})
    assert "/gone.py:HomeMade" in run("evaluate", f"moved_{source} --prompts words.txt")[2]
    flags = f"--steps 0 --samples 2 --prompts words.txt --{name} {here}"
    assert compare(run, f"moved_{source} {flags}")[1] == compare(run, f"{source} {flags}")[1]
    assert draw(run, f"moved_{source} --{name} {here}")[1] == draw(run, source)[1]

@pytest.mark.parametrize("typed, told", [
    ("evaluate nowhere", "nowhere: is no folder of a run"),
    ("evaluate a --prompts words.txt --steps 0 7", "a: only has weights of steps [0, 2, 3]"),
    ("evaluate notebook", "notebook: its reward, bright(), cannot be loaded here; type --reward"),
    ("evaluate a --reward mse", "every line of --prompts needs a target"),
    ("evaluate a --samples 33", "--samples: must be 2 to 32"),
    ("evaluate a --prompts words.txt --seed 17982163893102248868", "--seed: must be 0 to 2**40"),
    ("generate a", "--prompt or --prompts"),
    ("generate a --prompt red --step 5", "has weights of steps [0, 2, 3]"),
    ("generate a --prompt red --seed 17982163893102248868", "--seed: must be 0 to 2**40"),
    ("generate --wrapper home_made.py:HomeMade --prompt red --change", "type the folder of a run"),
    ("generate a --prompt red --out b", "--out b: exists already"),
    ("generate a --prompt red --out words.txt/x", "--out words.txt/x: nothing can be written to"),
    ("generate a --prompt red --source words.txt", "the run is none of edit.py"),
    ("plot nowhere", "nowhere: is no folder of a run"),
    ("plot a --film nowhere/film.png", "nowhere/film.png")])
def test_bad_input(typed, told, refuse, monkeypatch):
    monkeypatch.setattr(sys.modules["home_made"].HomeMade, "from_pretrained", None)
    assert told in refuse(*typed.split(" ", 1))
