"""Tests of evaluate.py and generate.py, on runs of a home-made wrapper and of the tiny GLM-Image."""
import contextlib, functools, itertools, json, multiprocessing, os, re, shutil, subprocess, sys, time, types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest, torch
from matplotlib.figure import Figure
from PIL import Image

import grpo
from conftest import ROOT
from examples import evaluate, generate, pictures, runs, scores, tables
from examples.intervals import find_agreement, find_interval, weigh_best

WRAPPER = '''
import json, torch
from examples.toy import Toy

class HomeMade(Toy):
    """The toy, but all settings matter, and its base weights follow from the seed."""
    defaults = Toy.defaults | dict(model="none", height=32, group_size=4, steps=3, save_every=2, lr=0.05)

    def compute_all_logprobs(self, prompts):
        torch.manual_seed(self.config.seed)
        torch.nn.init.normal_(self.policy[3].weight, std=0.3)
        own = self.config
        heat = (own.temperature or 1) * (own.top_k or 1) * (own.top_p or 1) * own.decode_steps / 20 / own.guidance
        return (self.policy(self.encode(prompts)) / heat).log_softmax(2)

class Picky(HomeMade):
    """Its prompts are JSON."""
    load_prompts = staticmethod(lambda path: (json.loads(open(path).read()), None))
'''
ALONE = "alone --wrapper home_made.py:HomeMade"
WORDS = "--prompts words.txt"

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run a has adapters 0, 2 and 3, the last of which lies alone, too; b has them on other base weights. The
    learning rates are high, so that adapters differ. What a notebook's run has as its reward, no command can load."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "home_made.py").write_text(WRAPPER)
    (folder / "words.txt").write_text("a red thing\na blue thing\na white sign")
    grpo.main(f"--wrapper {folder}/home_made.py:HomeMade --out {folder}/a".split())
    copy_run(folder / "a", folder / "b", seed=1)
    copy_run(folder / "a", folder / "notebook", reward="bright()")
    copy_run(folder / "a", folder / "picky", wrapper=f"{folder}/home_made.py:Picky")
    copy_run(folder / "a", folder / "editor", wrapper=f"{ROOT}/examples/edit.py:EditWrapper")
    shutil.copytree(folder / "a/adapter_00003", folder / "alone")
    return folder

@pytest.fixture(scope="module")
def glm(folder):
    flags = f"--prompts {folder}/words.txt --width 64 --height 96 --group-size 2 --batch-size 2 --steps 1 --lr 0.05"
    grpo.main(f"{flags} --out {folder}/glm".split())

@pytest.fixture
def run(folder, run, monkeypatch):
    """As that of conftest.py, but beside the runs."""
    monkeypatch.chdir(folder)
    return run

def copy_run(source, name, **settings):
    """The same weights, with other settings."""
    shutil.copytree(source, name, ignore=shutil.ignore_patterns("evaluation*", "film*", "pictures*"))
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

# --- Scores, and what follows from them ---------------------------------------------------------------------
def test_measures_by_hand(tmp_path):
    """Weights play no part; rewards get the target; pairs are (0, 1), (0, 2), (1, 2). GLM-Image's draft, here the first
    four tokens, is not painted; all tokens of other models are."""
    Image.new("RGB", (9, 9), "red").save(tmp_path / "red.png")
    glm = mock.Mock(spec=grpo.GLMImageWrapper, config=grpo.Config(width=64, height=64))
    tokens = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4], [1, 1, 1, 1, 1, 2, 3, 5], [2, 2, 2, 2, 6, 7, 8, 5]])
    codes = runs.pick_painted(glm, tokens)
    images = [Image.new("RGB", (64, 64), color) for color in ("red", "black", (255, 51, 0))]
    rewards = grpo.load_rewards("color=3,mse")
    assert scores.measure(images, "a red thing", codes, tmp_path / "red.png", rewards) == {
        "color": pytest.approx([1, 2 / 3, 1 - 0.2 / 3]), "mse": pytest.approx([0, -1 / 3, -0.04 / 3]),
        "codes differ": [1 / 4, 1, 3 / 4], "pixels differ": pytest.approx([1 / 3, 0.2 / 3, 1.2 / 3])}
    assert runs.pick_painted("toy", tokens) is tokens

@pytest.mark.parametrize("prompts, told", [(2, "0.500 +0.200 -2.341 .. +2.741 50%"), (1, "0.600 +0.400 - 100%")])
def test_table_by_hand(capsys, prompts, told):
    """Mean, change, interval, share of prompts: (.2 + .4) / 2 = .3 becomes (.6 + .4) / 2 = .5, and one of two rises.
    The quantile for two is 12.706; one prompt has no interval."""
    results = [[dict(color=[0.1, 0.3]), dict(color=[0.4, 0.4])], [dict(color=[0.6, 0.6]), dict(color=[0.5, 0.3])]]
    tables.print_table(["step 0", "step 7"], [rows[:prompts] for rows in results])
    assert capsys.readouterr().out.splitlines()[-1].split() == f"step 7 {told}".split()

@pytest.mark.parametrize("n", [2, 3, 8, 24, 200])
def test_95_of_100_intervals_have_the_mean(n):
    """A bootstrap over prompts had it in 50, 70, 88 and 93 %, and quantiles of .05 and .95 have it in 90 %. It holds for
    the best 4 of 8 of prompts with means of their own, too, which is unbiased."""
    rng = np.random.default_rng(n)
    best = np.sort(rng.normal(size=(4000, n, 1)) + rng.normal(size=(4000, n, 8))) @ weigh_best(np.arange(8), 4)
    for changes, mean in ((rng.normal(0.3, 2.0, (4000, n)), 0.3), (best, 1.0294)):
        low, high = np.array([find_interval(each) for each in changes]).T
        assert 0.94 < np.mean((low < mean) & (mean < high)) < 0.96

@pytest.mark.parametrize("seed", [0, 1, 7, 999, 41_666, 2**40])
def test_no_seed_is_one_of_training(seed):
    """--seed 999 trained on the noise of the held-out pictures, which counted from 10**9. Two prompts differ."""
    config = grpo.Config(seed=seed)
    trained = {*range(8)} | {seed for step in (1, 2, 10_000) for seed in grpo.choose_prompts(step, 24, config)[1]}
    for other in (0, 1, 999, 2**40):
        seeds = scores.choose_seeds(500, other)
        assert len({*seeds}) == 500 and 8 <= min(seeds) and max(seeds) < 1_000_000 <= min(trained - {*range(8)})

def test_best_of_k_is_the_mean_over_all_subsets():
    """Of 8 samples, also of equal scores, and of what another reward gives to the best one of each. So it is unbiased; a
    bootstrap, with replacement, finds too little."""
    rng = np.random.default_rng(0)
    for first in (rng.normal(size=8), rng.integers(0, 3, 8)):
        other = rng.normal(size=8)
        for k in range(1, 9):
            subsets = [[*subset] for subset in itertools.combinations(range(8), k)]
            best = np.mean([first[subset].max() for subset in subsets])
            # Of equal ones, each is picked as often.
            picked = np.mean([other[subset][first[subset] == first[subset].max()].mean() for subset in subsets])
            found = [tables.find_best([dict(first=first, other=other)], "first", k, name) for name in (None, "other")]
            np.testing.assert_allclose(found, [[best], [picked]], rtol=1e-12)
    for k in (0, 9):
        with pytest.raises(ValueError, match=f"the best of {k} is not to be found from 8 samples"):
            weigh_best(first, k)

@pytest.mark.parametrize("mean, told", [
    (0.75, "equals the best of 3.0 of"), (0.7, "equals the best of 2.4 of"), (0.97, "is above the best of 16 of"),
    (0.4, "is not above that of")])
def test_how_many_of_the_first_row_are_needed(capsys, mean, told):
    """Scores are quantiles of 0..1, of which the best of k has k / (k + 1): 3 / 4 is the best of 3, 7 / 10 that of 2.3.
    A narrow row has the better mean, and the wide one the better best of many."""
    first, second = [[dict(r=values + shift) for shift in (-0.01, 0, 0.01)]
                     for values in (np.arange(1, 33) / 33, np.full(32, mean))]
    tables.print_best(["step 0", "step 9"], [first, second], ["r"])
    out = capsys.readouterr().out
    assert f"The mean of step 9 {told} step 0" in out and re.search(r"r, best of k( +k = \d+){5}\n", out)
    assert ("From k = 4 on, the best of step 0 is better than that of step 9, by 0.191 at 16" in out) == (mean == 0.75)
    assert ("For any k, the best of step 0" in out) == (mean == 0.4)

def test_curves_end_where_the_tables_do():
    """At half of the samples: beyond, the estimate is poor."""
    with mock.patch.object(Figure, "savefig", autospec=True) as save:
        tables.draw_best("best.png", ["step 0"], [[dict(r=np.arange(1, 33) / 33)] * 3], ["r"])
    line, = save.call_args.args[0].axes[0].lines
    assert [*line.get_xdata()] == [*range(1, 17)]
    assert line.get_ydata() == pytest.approx([k / (k + 1) for k in range(1, 17)])

def test_rewards_that_disagree(capsys):
    """Of three pairs of images of the first prompt the two agree on one; on the second prompt's on all. A reward of
    negative weight: the best of k was the one with most of it, and training prefers the opposite."""
    rows = [dict(a=[1, 2, 3], b=[2, 1, 0.5]), dict(a=[1, 2, 3], b=[1, 2, 3])]
    tables.print_agreement("step 0", rows, ["a", "b"])
    assert capsys.readouterr().out.splitlines()[-1].split() == "a, b +0.000 -1.000 .. +1.000".split()
    assert find_agreement([1, 2, 3], [2, 1, 3]) == pytest.approx(1 / 3)
    rewards = dict(color=(None, 1), blur=(None, -0.5))
    rows, = tables.turn_negative([[dict(color=[1, 2, 3, 4], blur=[5, 6, 7, 8])]], rewards)
    assert rows == [dict(color=[1, 2, 3, 4]) | {"-blur": [-5, -6, -7, -8]}]
    tables.print_best(["step 0"], [rows], ["-blur"])
    assert "-5.667" in capsys.readouterr().out  # -6.5, by twos

# --- Adapters that are compared -----------------------------------------------------------------------------
def test_evaluate(run):
    """All adapters of a run, a table, a film; a second evaluation leaves the files of the first alone."""
    copy_run("a", "fresh")
    with mock.patch.object(pictures, "save_film", wraps=pictures.save_film) as save_film:
        out, results = compare(run, f"fresh {WORDS}")
    assert re.findall(r"step (\d) ", out)[:3] == ["0", "2", "3"] and results[0] != results[1] != results[2]
    *_, (_, *cells) = save_film.call_args.args[1]  # below each picture stands its score
    assert [score for _, score in cells] == [f"{row['color'][0]:.3g}" for row in results[2]]
    score = Image.open("fresh/film.png").crop((600, 776, 800, 796))
    assert score.convert("L").getextrema() == (0, 211)  # black on light gray
    assert compare(run, f"fresh {WORDS} --steps 2 0")[1] == [results[1], results[0]]
    assert json.loads(Path("fresh/evaluation.json").read_text())["results"] == results

def test_no_score_is_lost(run, monkeypatch):
    """They were with `| head`, for a run on a read-only disk, and for one of two evaluations that ended at once."""
    copy_run("a", "mine")
    monkeypatch.setattr(evaluate, "print_table", mock.Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(Path, "exists", lambda path: False)  # the other's file comes a moment later
    for seed, file in enumerate(("mine/evaluation.json", "mine/evaluation2.json", "evaluation.json")):
        monkeypatch.setattr(os, "access", lambda *_: seed < 2)
        with pytest.raises(BrokenPipeError):
            call_evaluate(f"mine --steps 0 --seed {seed} {WORDS}")
        assert json.loads(Path(file).read_text())["seed"] == seed

@pytest.mark.parametrize("curve", ["nowhere/curve.png", "curve.xyz"])
def test_a_curve_that_cannot_be_written(run, curve):
    """A traceback in the place of where the scores are."""
    code, out, error = run("evaluate", f"a {WORDS} --curve {curve}")
    assert code == 2 and "not all was written: " in error and error.count("\n") == 1

def call_evaluate(flags):
    """Its functions are those that are imported here."""
    with mock.patch.object(sys, "argv", ["evaluate.py", *flags.split()]):
        evaluate.main(evaluate.parse_args())

@pytest.mark.parametrize("flag, value", [
    ("temperature", 3.0), ("top-k", 2), ("top-p", 0.25), ("width", 128), ("height", 64), ("guidance", 3.0),
    ("decode-steps", 60)])
def test_equal_adapters_do_not_change(flag, value, run):
    """A run at temperature 3 had a significant change of -.105, though its weights were those of the other. An adapter
    outside of a run had no settings that could be told."""
    copy_run("a", flag, model="is loaded again", **{flag.replace("-", "_"): value})
    out, (first, second, alone) = compare(run, f"a {flag} {ALONE} {WORDS}")
    assert f"\n{flag} had --{flag} {value}; all are drawn with those of a\n" in out and first == second == alone
    out, (other, _) = compare(run, f"{flag} {ALONE} {WORDS}")
    assert other != first and " had " not in out  # the setting does matter

def test_a_reward_that_is_relative_to_its_call(run):
    """A trained adapter was .500, +0.000, +0.000 .. +0.000: it was compared with itself. Now pictures of one prompt
    and of two adapters are in one call; the first adapter is the zero."""
    Path("relative.py").write_text('''
calls = []
def green(images, prompts, targets=None):
    """In how many of the others there is less."""
    calls.append(prompts)
    values = [sum(image.convert("RGB").getchannel(1).histogram()[128:]) for image in images]
    return [sum(other < value for other in values) for value in values]
green.relative = True
''')
    copy_run("a", "judged", reward="relative.py:green,color")
    out, (first, _, _) = compare(run, f"judged {WORDS} --samples 3")
    words = ["a red thing", "a blue thing", "a white sign"]
    assert sys.modules["relative"].calls == [[word] * 6 for _ in range(2) for word in words]
    assert [row["green"] for row in first] == [[0, 0, 0]] * 3
    assert "above step 0, whose images it saw in the same call" in out
    red, cyan = (Image.new("RGB", (4, 4), color) for color in ("red", "cyan"))
    rewards = grpo.load_rewards("relative.py:green")
    measure = functools.partial(scores.measure, prompt="red", codes=None, target=None, rewards=rewards)
    assert measure([cyan, red], first=[red, red])["green"] == [3, 0]
    assert measure([red, red], first=[cyan, red])["green"] == [-1.5, -1.5]
    assert "evaluate two or more" in run("evaluate", f"judged {WORDS} --steps 2")[2]
    relative = f"judged {WORDS} --reward relative.py:green --curve curve.png"
    assert run("evaluate", relative)[0] == 0 and not Path("curve.png").exists()  # no curve is of it: a traceback

def test_runs_of_two_seeds(run):
    """Each on its own base weights: on another's it would be another model. Prompts of ours are read by our function:
    a wrapper's own, for another format, ended in a traceback."""
    _, (first, second) = compare(run, "a b")
    assert compare(run, "b a")[1] == [second, first] and first != second
    assert compare(run, "picky --steps 0 --samples 2")[0].count("24 prompts") == 1

def test_held_out_prompts_are_drawn_in_parts(run, monkeypatch):
    """200 prompts x 4 were one batch, of 43 GB; the scores are those of one. No prompt is trained."""
    Wrapper = sys.modules["home_made"].HomeMade
    with mock.patch.object(Wrapper, "sample", autospec=True, side_effect=Wrapper.sample) as sample:
        _, parts = compare(run, "a --steps 3 --samples 5 --seed 1")
        monkeypatch.setattr(runs, "LIMIT", 1000)
        _, whole = compare(run, "a --steps 3 --samples 5 --seed 1")
    calls = [call.args[1:] for call in sample.mock_calls]
    assert parts == whole and [len(prompts) * samples for prompts, samples, _ in calls] == [*[30] * 4, 120]
    prompts, _, seeds = calls[-1]
    assert seeds == scores.choose_seeds(24, 1) and not {*prompts} & {*grpo.load_prompts(None)[0]}

# --- While a run goes on ------------------------------------------------------------------------------------
def read(run):
    return [json.loads(line) for line in Path(run, "evaluation.jsonl").read_text().splitlines() if line]

FOLLOW = f"--follow {WORDS} --samples"

def test_follow(run, monkeypatch):
    """A row for each adapter as it appears, with the numbers of evaluate, under the names of metrics.jsonl. It may be
    started before the run, which may be moved and go on; deleted adapters are named, and only multiples are wanted."""
    out, results = compare(run, f"a {WORDS} --samples 3")
    events = iter(["*.json prompts.txt *_00000*", "*_00002*", "", "*_00003*"])  # what appears between two looks

    def sleep(_):
        for path in [path for pattern in next(events).split() for path in Path("a").glob(pattern)]:
            Path("grown").mkdir(exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, Path("grown", path.name))

    monkeypatch.setattr(time, "sleep", sleep)
    code, out, _ = run("evaluate", f"grown {FOLLOW} 3")
    assert code == 0 and "grown: evaluated on the CPU" in out and next(events, None) is None
    rows = read("grown")
    assert [row["step"] for row in rows] == [0, 2, 3]
    logged = json.loads(Path("a/metrics.jsonl").read_text().splitlines()[0])
    for row, measured in zip(rows, results):
        means = [np.mean(each["color"]) for each in measured]
        assert row["reward"] == row["reward/color"] == pytest.approx([np.mean(means), *find_interval(means)])
        assert row["pixels differ"][0] == pytest.approx(np.mean([np.mean(each["pixels differ"]) for each in measured]))
        assert {name for name in row if "reward" in name} <= {*logged}
    Path("grown").rename("moved")
    copy_run("moved", "longer", steps=5)
    shutil.copytree("a/adapter_00003", "longer/adapter_00005")
    Path("longer/samples_00004.png").touch()  # its adapter was deleted
    assert run("evaluate", f"moved {FOLLOW} 3")[0] == 0 and read("moved") == rows
    error = run("evaluate", f"longer {FOLLOW} 3")[2]
    assert [row["step"] for row in read("longer")] == [0, 2, 3, 5] and error == (
        "longer: adapter_00004 is gone, and passed over\n")
    assert "other settings" in run("evaluate", f"longer {FOLLOW} 4")[2]
    Path("longer/evaluation.jsonl").unlink()
    run("evaluate", f"longer {FOLLOW} 3 --every 2")
    assert [row["step"] for row in read("longer")] == [0, 2, 5]

@pytest.mark.parametrize("steps, age, is_over", [(1, 9999, False), (2, 9999, True), (2, 60, False)])
def test_a_run_whose_last_weights_are_gone_is_over(tmp_path, steps, age, is_over):
    """The follower waited for them without end."""
    (tmp_path / "config.json").write_text('{"steps": 2}')
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join([f'{{"step": {i + 1}}}\n' for i in range(steps)]))
    os.utime(log, (time.time() - age,) * 2)
    assert evaluate.find_news(types.SimpleNamespace(folder=tmp_path), 1) == ([], set(), is_over)

def test_two_followers_and_kills(run):
    """Two at a time, killed amid a row, two others: each of 41 rows is there once, as without all this."""
    copy_run("a", "long", steps=41)
    for step in range(42):
        shutil.copytree(f"a/adapter_0000{2 + step % 2}", f"long/adapter_{step:05d}", dirs_exist_ok=True)
    copy_run("long", "undisturbed")
    context = multiprocessing.get_context("fork")
    file = Path("long/evaluation.jsonl")

    def start_two():
        pair = [context.Process(target=call_evaluate, args=(f"long {FOLLOW} 2",)) for _ in range(2)]
        [process.start() for process in pair]
        return pair

    for most in (5, 20):
        pair = start_two()
        while not (file.exists() and file.read_text().count("\n") >= most):
            assert any([process.is_alive() for process in pair])
            time.sleep(0.01)
        [process.kill() for process in pair]
        [process.join() for process in pair]
        assert file.read_text().count("\n") < 41
        file.write_text(file.read_text() + '\n{"step": 4')
    pair = start_two()
    [process.join() for process in pair]
    assert [process.exitcode for process in pair] == [0, 0]
    call_evaluate(f"undisturbed {FOLLOW} 2")
    assert read("long") == read("undisturbed") and [row["step"] for row in read("long")] == [*range(42)]

# --- What a run is ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("adapter, home", [("alone", "."), ("a/adapter_00003", "a")])
def test_nothing_is_written_to_an_adapter_that_will_be_uploaded(run, adapter, home):
    """Its files go to its run or, if it lies in none, here. Pictures are numbered: the second time they were there."""
    before = {*Path(home).iterdir()}
    typed = f"{adapter} --wrapper home_made.py:HomeMade"
    assert run("evaluate", f"{typed} {WORDS}")[0] == 0
    told = [run("generate", f"{typed} --prompt red")[1] for _ in range(3)]
    new = [path.name for path in {*Path(home).iterdir()} - before]
    assert {re.sub(r"\d*(\..*)?$", "", name) for name in new} == {"evaluation", "film", "pictures"}
    assert len([*Path(adapter).iterdir()]) == 2
    assert all([f"files: {Path(home).absolute()}/pictures{number}\n" in out for out, number in zip(told, ("", 2, 3))])

@pytest.mark.parametrize("typed", ["generate a --prompt red --samples 1", f"evaluate a {WORDS} --steps 2 3"])
def test_in_a_pod_they_run_alone(typed, folder):
    """WORLD_SIZE and RANK are in the surroundings: it asked for a --batch_size, which these programs do not have."""
    name, *flags = typed.split()
    done = subprocess.run([sys.executable, ROOT / f"examples/{name}.py", *flags], cwd=folder, capture_output=True, text=True,
                          env=os.environ | dict(WORLD_SIZE="16", RANK="3", LOCAL_RANK="3"))
    assert done.returncode == 0 and str(folder / "a") in done.stdout, done.stderr

def test_generate_on_a_full_disk(run, monkeypatch):
    """A traceback; and with Ctrl-C, too."""
    for error, told in ((OSError(28, "No space left on device"), "drawn: .*No space"), (KeyboardInterrupt, "Stopped.")):
        with monkeypatch.context() as patch:
            patch.setattr(Image.Image, "save", mock.Mock(side_effect=error))
            code, _, said = run("generate", "a --prompt red --samples 1 --out drawn")
        assert re.search(told, f"{code}{said}") and "Traceback" not in said
        shutil.rmtree("drawn")

def test_generate_takes_what_it_is_given(run):
    """A step, an adapter's folder, also outside of its run, and a model without any, in a size of one's own."""
    told, wanted = draw(run, "a --step 2")
    assert told == "a: step 2" and wanted != draw(run, "a")[1]
    assert draw(run, "a/adapter_00002") == ("a/adapter_00002", wanted)
    assert draw(run, ALONE) == ("alone", draw(run, "a --step 3")[1])
    assert draw(run, "--wrapper home_made.py:HomeMade --width 96")[1][1].size == (96, 32)

def test_generate_draws_with_the_adapter_and_shows_what_it_changed(run, glm):
    """Picture by picture, those that the wrapper itself draws. The mean over all tokens, the draft's, too, is that of
    log pi_new - log pi_base of two models, one without adapter: the kl of the log; before training it is 0."""
    out = run("generate", "glm --prompt red green --samples 3 --seed 7 --change --out changed")[1]
    config = runs.open_run("glm").config
    new, base = [grpo.GLMImageWrapper.from_pretrained(config.model, config) for _ in range(2)]
    lora = runs.load_weights(new, Path("glm/adapter_00001"))
    rollout = new.sample(["red", "green"], 3, [7, 8])
    images = new.decode(["red", "green"], rollout.tokens, [7, 8])
    assert images == [Image.open(f"changed/{i:03}_{j}.png").copy() for i in range(2) for j in range(3)]
    kl = (new.compute_logprobs(rollout)[0] - base.compute_logprobs(rollout)[0]).detach()
    torch.testing.assert_close(generate.compute_change(new, lora, rollout), kl, rtol=0, atol=1e-5)
    told = [float(number) for number in re.findall(r"^ +(\S+) for each token, on average", out, re.MULTILINE)]
    assert told == pytest.approx(kl.view(2, 3, -1).mean((1, 2)).tolist(), abs=6e-5) and min(map(abs, told)) > 1e-3
    painted = kl.view(2, 3, -1)[..., -6:]  # the large grid is 3 x 2
    shown = Image.open("changed/001_2_change.png").resize((2, 3), Image.NEAREST)
    strength = 1 - grpo.pil_to_tensor([shown])[0, 1]  # pink has a green of 28 / 255, teal of 133 / 255
    wanted = (painted[1, 2] / painted.abs().quantile(0.95)).clamp(-1, 1).view(3, 2)
    wanted = wanted.clamp(min=0) * 227 / 255 - wanted.clamp(max=0) * 122 / 255
    torch.testing.assert_close(strength, wanted, rtol=0, atol=1 / 128)
    assert Image.open("changed/sheet.png").size == (200 * 7, 200 * 3)  # prompts beside, a heading above
    assert "+0.0000 for each token" in run("generate", "glm --prompt red --step 0 --change --out before")[1]
    assert Image.open("before/000_0_change.png").getextrema() == ((255, 255),) * 3

def test_maps_of_more_than_32_pictures(run):
    """Those after the first 32 were drawn with the base model: the first map had turned the adapter off."""
    words = " ".join(["red"] * 12)
    for change in ("", "--change"):
        run("generate", f"a --prompt {words} --samples 3 --out many{change} {change}")
    names = sorted(path.name for path in Path("many").iterdir())[:36]
    assert all(Path("many", name).read_bytes() == Path("many--change", name).read_bytes() for name in names)

@pytest.mark.parametrize("width", [128, 2048])
def test_the_cells_of_a_map_lie_over_the_squares_of_its_picture(run, width):
    """Of 128 x 32 pixels, 4 x 4 squares had a map of 2 x 8; of 2048 x 32 they divided by 0."""
    run("generate", f"a --prompt red --change --width {width} --samples 1 --out wide{width}")
    picture, shown = [Image.open(f"wide{width}/000_0{name}.png") for name in ("", "_change")]
    assert shown.size == picture.size == (width, 32)
    for image in (picture, shown):
        assert image.resize((4, 4), Image.NEAREST).resize(image.size, Image.NEAREST).tobytes() == image.tobytes()

@pytest.mark.parametrize("size, count, grid", [
    ((64, 64), 576, (24, 24)), ((160, 32), 5, (1, 5)), ((2048, 32), 16, (4, 4)), ((96, 64), 54, (6, 9)),
    ((128, 32), 16, None), ((64, 64), 15, None)])
def test_the_grid_of_another_model(size, count, grid):
    """Square pictures, square codes or a square grid; 16 codes of 128 x 32 pixels may be 4 x 4 or 2 x 8."""
    wrapper = types.SimpleNamespace(config=grpo.Config(width=size[0], height=size[1]))
    refusal = pytest.raises(grpo.BadInput, match="must have grid = rows, columns")
    with contextlib.nullcontext() if grid else refusal:
        assert generate.find_grid(wrapper, count) == grid

def test_the_newest_weights(run):
    """A run that was stopped before its adapter was drawn from with the untrained one; copies and archives of adapters
    ended in a traceback. Steps have six digits, too."""
    copy_run("a", "stopped")
    Path("stopped/adapter_00003").rename("stopped/adapter_00009 (copy)")
    Path("stopped/adapter_00007").mkdir()  # being written
    Path("stopped/adapter_00008.zip").touch()
    assert draw(run, "stopped") == ("stopped: step 3, from checkpoint.pt", draw(run, "a")[1])
    for step in (99_999, 100_000):
        shutil.copytree("a/adapter_00003", f"stopped/adapter_{step}")
    assert [*runs.find_weights(Path("stopped"))] == [0, 2, 99_999, 100_000]

@pytest.mark.parametrize("source, name", [("a", "wrapper"), ("glm", "model")])
def test_a_run_that_was_moved(source, name, run, glm):
    """Copied from a cluster: what its config.json names lies elsewhere here."""
    here = json.loads(Path(source, "config.json").read_text())[name]
    copy_run(source, f"moved_{source}", **{name: "/gone.py:HomeMade"})
    assert "/gone.py:HomeMade" in run("evaluate", f"moved_{source} {WORDS}")[2]
    flags = f"--steps 0 --samples 2 {WORDS} --{name} {here}"
    assert compare(run, f"moved_{source} {flags}")[1] == compare(run, f"{source} {flags}")[1]
    assert draw(run, f"moved_{source} --{name} {here}")[1] == draw(run, source)[1]

@pytest.mark.parametrize("typed, told", [
    ("evaluate nowhere", "nowhere: is no folder of a run"),
    (f"evaluate a {WORDS} --steps 0 7", "a: only has weights of steps [0, 2, 3]"),
    ("evaluate notebook", "notebook: its reward, bright(), cannot be loaded here; type --reward"),
    ("evaluate a b --follow", "--follow: follows one run"), (f"evaluate --follow {ALONE}", "alone: is an adapter"),
    ("evaluate a --follow --curve x.png", "without --steps and --curve"),
    (f"evaluate a/adapter_00003 {WORDS} --steps 2", "adapter_00003: is one adapter"),
    ("evaluate editor", "--prompts: type a file of lines"), ("evaluate a --samples 33", "--samples: must be 2 to 32"),
    ("evaluate alone", "alone: is of another model than GLM-Image; type --wrapper"),
    (f"evaluate a {WORDS} --seed 17982163893102248868", "--seed: must be 0 to 2**40"),
    ("generate alone --prompt red", "type --wrapper"), ("generate a", "--prompt or --prompts"),
    ("generate a --prompt red --step 5", "has weights of steps [0, 2, 3]"),
    ("generate a --prompt red --seed 17982163893102248868", "--seed: must be 0 to 2**40"),
    ("generate --wrapper home_made.py:HomeMade --prompt red --change", "type the folder of a run"),
    ("generate a --prompt red --out b", "--out b: exists already"),
    ("generate a --prompt red --out words.txt/x", "--out words.txt/x: nothing can be written to"),
    ("generate a --prompt red --source words.txt", "the run is none of edit.py"),
    ("plot nowhere", "nowhere: is no folder of a run"), ("plot a --film nowhere/film.png", "nowhere/film.png")])
def test_bad_input(typed, told, refuse, run, monkeypatch):
    monkeypatch.setattr(sys.modules["home_made"].HomeMade, "from_pretrained", None)
    assert told in refuse(*typed.split(" ", 1))
