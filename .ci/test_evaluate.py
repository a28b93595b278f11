"""Tests of evaluate.py and generate.py, on runs of a home-made wrapper."""
import itertools, json, shutil, sys, time
from pathlib import Path
from unittest import mock

import diffusers, peft, pytest, torch
import numpy as np
from PIL import Image

import grpo
from conftest import ROOT
from examples import evaluate, pictures, runs
from examples.evaluate import find_interval, weigh_best

WRAPPER = '''
from examples.toy import Toy

class HomeMade(Toy):
    """The toy, but all settings matter."""
    defaults = Toy.defaults | dict(model="none", height=32, group_size=4, steps=3, save_every=2, lr=0.05)

    def compute_all_logprobs(self, prompts):
        own = self.config
        heat = (own.temperature or 1) * (own.top_k or 1) * (own.top_p or 1) * own.decode_steps / 20 / own.guidance
        return (super().compute_all_logprobs(prompts) * 5 / heat).log_softmax(2)
'''
ALONE = "alone --wrapper home_made.py:HomeMade"
WORDS = "--prompts words.txt"

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Run a has adapters 0, 2 and 3, the last of which lies alone, too; b is a run of another seed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "home_made.py").write_text(WRAPPER)
    (folder / "words.txt").write_text("a red thing\na blue thing\na white sign")
    (folder / "own.py").write_text("def bright(images, *_): return [image.getpixel((0, 0))[0] for image in images]")
    with mock.patch.object(sys, "path", [*sys.path]):
        for name, seed in (("a", 0), ("b", 1)):
            grpo.main(f"--wrapper {folder}/home_made.py:HomeMade --out {folder}/{name} --seed {seed}".split())
    shutil.copytree(folder / "a/adapter_00003", folder / "alone")
    return folder

@pytest.fixture
def run(folder, run, monkeypatch):
    """As that of conftest.py, but beside the runs."""
    monkeypatch.chdir(folder)
    return run

def copy_run(source, name, **settings):
    """The same weights, with other settings."""
    shutil.copytree(source, name, ignore=shutil.ignore_patterns("evaluation*", "film*"))
    path = Path(name, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))

def compare(run, typed):
    """-> what evaluate prints, its results for each adapter."""
    code, out, error = run("evaluate", f"{typed} --out out")
    assert code == 0, error
    return out, json.loads(Path("out/evaluation.json").read_text())["results"]

def draw(run, typed, prompts="red green"):
    """-> what generate prints first, its pictures."""
    code, out, error = run("generate", f"{typed} --prompt {prompts} --samples 3 --out drawn")
    assert code == 0, error
    images = [Image.open(f"drawn/{i:03}_{j}.png").copy() for i in range(len(prompts.split())) for j in range(3)]
    shutil.rmtree("drawn")
    return out.splitlines()[0], images

def test_measures_by_hand(tmp_path):
    """Rewards without their weights, their sum with them; they get the target; pairs are (0, 1), (0, 2), (1, 2)."""
    Image.new("RGB", (9, 9), "red").save(tmp_path / "red.png")
    images = [Image.new("RGB", (64, 64), color) for color in ("red", "black", (255, 51, 0))]
    rewards = grpo.load_rewards(f"color=3,{ROOT}/examples/rewards.py:mse=-1")
    assert evaluate.measure(images, grpo.Prompt("a red thing", tmp_path / "red.png"), rewards) == {
        "color": pytest.approx([1, 2 / 3, 1 - 0.2 / 3]), "mse": pytest.approx([0, -1 / 3, -0.04 / 3]),
        "reward": pytest.approx([3, 2 + 1 / 3, 3 - 0.2 + 0.04 / 3]),
        "pixels differ": pytest.approx([1 / 3, 0.2 / 3, 1.2 / 3])}

@pytest.mark.parametrize("prompts, told", [
    (2, "0.500 +0.200 -2.341 .. +2.741 50%"), (1, "0.600 +0.400 +nan .. +nan 100%")])
def test_table_by_hand(capsys, prompts, told):
    """(.2 + .4) / 2 becomes (.6 + .4) / 2, and one of two rises. The quantile for two is 12.706; one has no interval."""
    results = [[dict(color=[0.1, 0.3]), dict(color=[0.4, 0.4])], [dict(color=[0.6, 0.6]), dict(color=[0.5, 0.3])]]
    evaluate.print_table(["step 0", "step 7"], [rows[:prompts] for rows in results], ["color"])
    assert capsys.readouterr().out.splitlines()[-1].split() == f"step 7 {told}".split()

@pytest.mark.parametrize("seed", [0, 7, 999, 41_666, 2**40])
def test_no_seed_is_one_of_training(seed):
    """Nor of another prompt."""
    trained = [min(grpo.choose_prompts(step, 24, grpo.Config(seed=seed))[1]) for step in (1, 2, 10_000)]
    seeds = evaluate.choose_seeds(500, seed)
    assert len({*seeds, *evaluate.choose_seeds(500, seed + 1)}) == 1000
    assert 8 <= min(seeds) and max(seeds) < 1_000_000 <= min(trained)

@pytest.mark.parametrize("n", [2, 8, 200])
def test_95_of_100_intervals_have_the_mean(n):
    changes = np.random.default_rng(n).normal(0.3, 2.0, (4000, n))
    low, high = np.array([evaluate.find_interval(each) for each in changes]).T
    assert 0.94 < np.mean((low < 0.3) & (0.3 < high)) < 0.96

def test_best_of_k_is_the_mean_over_all_subsets(capsys):
    """Of 8 samples, also of equal scores: so it is unbiased. The table ends at half of the samples."""
    rng = np.random.default_rng(0)
    for scores in (rng.normal(size=8), rng.integers(0, 3, 8)):
        for k in range(1, 9):
            best = np.mean([max(subset) for subset in itertools.combinations(scores, k)])
            assert weigh_best(scores, k) @ scores == pytest.approx(best, rel=1e-12)
    # Scores are quantiles of 0..1, of which the best of k has k / (k + 1).
    evaluate.print_best(["step 0"], [[dict(r=np.arange(1, 33) / 33)]], "r")
    assert capsys.readouterr().out.splitlines()[-1].split()[2::3] == [f"{k / (k + 1):.3f}" for k in (1, 2, 4, 8, 16)]

def test_evaluate(run):
    """All adapters of a run, or some in an order of one's own; a table; a film with the first score of each picture."""
    with mock.patch.object(pictures, "save_film", wraps=pictures.save_film) as save_film:
        out, results = compare(run, f"a {WORDS} --reward color,own.py:bright=0")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("  step ")][:3] == ["0", "2", "3"]
    assert results[0] != results[1] != results[2]
    (heading, *prompts), *rows = save_film.call_args.args[1]
    assert (heading, prompts) == ("below: color, bright", ["a red thing", "a blue thing", "a white sign"])
    for (_, *cells), measures in zip(rows, results):
        assert [score for _, score in cells] == [f"{row['color'][0]:.3g}  {row['bright'][0]:.3g}" for row in measures]
    assert compare(run, f"a {WORDS} --reward color,own.py:bright=0 --steps 2 0")[1] == [results[1], results[0]]
    assert out.count("\nbright ") == out.count("\ncolor ") == out.count("\ncolor, best") == 1 and "\nreward" not in out
    out, last = compare(run, f"a b a/adapter_00002 {WORDS} --reward color,own.py:bright=0")
    assert last[0] == results[2] and last[2] == results[1] and "\n  b, step 3 " in out
    assert "\nreward, best of k" in compare(run, f"a {WORDS} --steps 0 --reward color=2,own.py:bright=0")[0]

@pytest.mark.parametrize("flag, value", [
    ("temperature", 3.0), ("top-k", 2), ("top-p", 0.25), ("width", 128), ("guidance", 3.0), ("decode-steps", 60)])
def test_equal_adapters_do_not_change(flag, value, run):
    """All are drawn with the settings of the first, and what differs is told. Weights of one's own are told, too."""
    copy_run("a", flag, model="other", **{flag.replace("-", "_"): value})
    out, (first, second, alone) = compare(run, f"a {flag} {ALONE} {WORDS}")
    assert f"--{flag} is " in out and f"{value} in {flag}" in out and first == second == alone
    assert "--model is none in a, other in " in out
    _, (other, _) = compare(run, f"{flag} {ALONE} {WORDS}")
    assert other != first  # the setting does matter

def test_follow(run, monkeypatch):
    """A row for each adapter as it appears; it goes on where the run was moved; other measurements are refused."""
    _, results = compare(run, f"a {WORDS} --samples 3")
    events = iter(["*.json prompts.txt *_00000*", "*_00002*", "", "*_00003*"])  # what appears between two looks

    def sleep(seconds):
        for path in [path for pattern in next(events).split() if seconds for path in Path("a").glob(pattern)]:
            Path("grown").mkdir(exist_ok=True)
            (shutil.copytree if path.is_dir() else shutil.copy)(path, Path("grown", path.name))

    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds) if seconds else None)
    follow = f"--follow {WORDS} --samples 3 --reward color,own.py:bright=0"
    Path("grown").mkdir(exist_ok=True)
    Path("grown/metrics.jsonl").write_text("".join([f'{{"step": {i}, "grad_norm": NaN}}\n' for i in (1, 2, 3)]))
    code, told, _ = run("evaluate", f"grown {follow}")
    assert code == 0 and next(events, None) is None and told.count("alarm at step 3: the last three updates") == 1
    rows = [json.loads(line) for line in open("grown/evaluation.jsonl")]
    assert [row["step"] for row in rows] == [0, 2, 3]
    for row, measured in zip(rows, results):
        means = [np.mean(each["color"]) for each in measured]
        assert row["reward"] == row["reward/color"] == pytest.approx([np.mean(means), *find_interval(means)])
    Path("grown").rename("moved")
    copy_run("moved", "longer", steps=5)
    shutil.copy("moved/evaluation.jsonl", "longer")
    for step in (4, 5):
        shutil.copytree("a/adapter_00003", f"longer/adapter_0000{step}")
    assert run("evaluate", f"longer {follow} --every 3")[0] == 0  # and the last
    assert [json.loads(line)["step"] for line in open("longer/evaluation.jsonl")] == [0, 2, 3, 5]
    Path("more.txt").write_text(Path("words.txt").read_text() + "\na red thing")
    for other in ("--reward color=2,own.py:bright=0", "--prompts more.txt", "--samples 4", "--stock", "--width 96"):
        code, _, error = run("evaluate", f"moved {follow} {other}")
        assert code == 1 and "has rows of other settings" in error, (other, error)

def test_generate(run):
    """A step, the newest adapter, one alone, a model without any, in a size of one's own."""
    told, wanted = draw(run, "a --step 2")
    assert told.endswith("a/adapter_00002") and wanted != draw(run, "a")[1] == draw(run, ALONE)[1]
    assert draw(run, "a/adapter_00002")[1] == wanted == draw(run, "a --step 2", "red green blue")[1][:6]
    assert draw(run, "--wrapper home_made.py:HomeMade --width 96")[1][1].size == (96, 32)

@pytest.mark.parametrize("typed, told", [
    ("evaluate nowhere", "nowhere/config.json"), ("evaluate a --steps 0 7", "a: has adapters of steps [0, 2, 3]"),
    ("evaluate alone", "alone: is of another model than GLM-Image; type --wrapper"), ("generate a", "--prompt"),
    ("evaluate moved_reward", "no such file; --reward may name another file"),
    ("generate a --prompt red --step 5", "steps [0, 2, 3]")])
def test_bad_input(typed, told, refuse, run, monkeypatch):
    shutil.rmtree("moved_reward", ignore_errors=True)
    copy_run("a", "moved_reward", reward="/nowhere/gone.py:f")
    monkeypatch.setattr(sys.modules["home_made"].HomeMade, "from_pretrained", None)
    assert told in refuse(*typed.split(" ", 1))

# --- Production: the stock pipeline, peft, another size ---------------------------------------------------------
@pytest.fixture(scope="module")
def fox(folder, small_draft):
    """Runs of the tiny GLM-Image, 96 high: adapters that matter, of a policy that draws the likeliest code alone."""
    flags = "--width 64 --height 96 --batch-size 2 --temperature 12 --top-p 1 --lr 1 --save-every 1 --steps 2"
    grpo.main(f"{flags} --out {folder}/hot".split())
    copy_run(folder / "hot", folder / "fox", top_k=1)
    return folder

def compute_logits(policy):
    with torch.no_grad():
        return policy(input_ids=torch.arange(9)[None], logits_to_keep=9).logits

def test_stock_draws_what_the_wrapper_draws(fox):
    """The same tokens and pictures. A second adapter takes the place of the first."""
    opened = runs.open_run(fox / "fox", top_p=0.5)
    ours, stock = [kind.from_pretrained(opened.config.model, opened.config) for kind in (opened.Wrapper, runs.Stock)]
    own = stock.policy.generation_config
    assert (own.temperature, own.top_k, own.top_p) == (12, 1, 0.5)
    prompts = [grpo.Prompt("red"), grpo.Prompt("the green side of a blue house")]
    seen = []
    for step in (1, 2, 1):
        for wrapper in (ours, stock):
            runs.load_adapter(wrapper, opened.adapters[step])
        codes = stock.sample(prompts, 2, [5, 6]).tokens
        tokens = ours.sample(prompts, 2, [5, 6]).tokens
        large = tokens[:, -6:].view(4, 3, 2).repeat_interleave(2, 1).repeat_interleave(2, 2)
        assert codes.equal(large.flatten(1))
        seen.append(compute_logits(stock.policy))
        torch.testing.assert_close(seen[-1], compute_logits(ours.policy), rtol=1e-4, atol=1e-3)
    assert seen[0].equal(seen[2]) and (seen[0] - seen[1]).abs().max() > 1 and len(codes.unique()) > 2
    for i, image in enumerate(stock.decode(prompts, codes, [5, 6])):  # each has noise of its own
        own, = ours.decode(prompts[i // 2:][:1], tokens[i:i + 1], [1000 * (5 + i // 2) + i])
        assert image.size == (64, 96) and abs(np.subtract(image, own, dtype=int)).max() <= 1

def test_adapters_in_production(fox, tmp_path):
    """As docs/first_run.md says: loaded, switched off, taken out again, or merged and saved as a model of its own."""
    opened = runs.open_run(fox / "fox")
    ours = opened.Wrapper.from_pretrained(opened.config.model, opened.config)
    runs.load_adapter(ours, opened.adapters[2])
    trained = compute_logits(ours.policy)
    pipe = diffusers.GlmImagePipeline.from_pretrained(grpo.TINY_MODEL)
    policy = pipe.vision_language_encoder
    base = compute_logits(policy)
    tuned = peft.PeftModel.from_pretrained(policy, opened.adapters[2])  # in place
    torch.testing.assert_close(compute_logits(policy), trained, rtol=1e-4, atol=1e-3)
    with tuned.disable_adapter():
        assert compute_logits(policy).equal(base)
    tuned.unload()
    assert compute_logits(policy).equal(base) and (trained - base).abs().max() > 1
    peft.PeftModel.from_pretrained(policy, opened.adapters[2]).merge_and_unload()
    pipe.save_pretrained(tmp_path)
    merged = diffusers.GlmImagePipeline.from_pretrained(tmp_path).vision_language_encoder
    for each in (merged, grpo.GLMImageWrapper.from_pretrained(tmp_path, opened.config).policy):
        torch.testing.assert_close(compute_logits(each), trained, rtol=1e-4, atol=1e-3)

def test_what_production_will_draw(fox, run):
    """In fp32 both ways score equal adapters alike. Another size or painter is told, and drawn; rows of --follow, which
    were drawn otherwise, are not mixed."""
    _, ours = compare(run, f"fox {WORDS}")
    out, stock = compare(run, f"fox {WORDS} --stock")
    for one, other in zip(sum(ours, []), sum(stock, [])):
        assert one["color"] == pytest.approx(other["color"], abs=5e-3)
    assert "where the run has" not in out and ours[0] != ours[1] != ours[2]
    size = "--width 128 --height 32 --decode-steps 2 --guidance 2"
    out, _ = compare(run, f"fox {WORDS} {size} --steps 2")
    for told in ("--width 128, where the run has 64", "--height 32, where the run has 96",
                 "--decode-steps 2, where the run has 1", "--guidance 2.0, where the run has 1.0"):
        assert told in out
    assert json.loads(Path("out/evaluation.json").read_text())["drawing"] == dict(
        width=128, height=32, decode_steps=2, guidance=2, temperature=12, top_k=1, top_p=1, stock=False)
    assert draw(run, f"fox {size}")[1][0].size == (128, 32)
    assert run("evaluate", f"fox --follow --samples 2 --stock {WORDS}")[0] == 0
    rows = [json.loads(line) for line in open("fox/evaluation.jsonl")]
    assert [(row["step"], row["settings"]["stock"]) for row in rows] == [(0, True), (1, True), (2, True)]
    assert "has rows of other settings" in run("evaluate", f"fox --follow --samples 2 {WORDS}")[2]

def test_scores_of_pictures(run, refuse, tmp_path):
    """Of 1, 9 | 4, 4, 4 | 2: pictures of equal texts are of one prompt. What `generate` has drawn scores the same."""
    groups = dict(a=("fox", [1]), b=("an  owl\n", [4, 4, 4]), c=("fox\n", [9]), d=("cat", [2]), e=("no picture", []))
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, (text, reds) in groups.items():
        (folder / f"{name}.txt").write_text(text)
        for red, kind in zip(reds, ("png", "PNG", "webp")):
            Image.new("RGB", (8, 8), (red, 0, 0)).save(folder / f"{name}.{kind}", lossless=True)
    reward = "--reward own.py:bright"
    code, out, error = run("generate", f"--pictures {folder} {reward}")
    assert code == 0 and Image.open(folder / "scores.png").size == (600, 800), error
    assert out.splitlines()[0] == "bright: mean 4, 1 .. 9, std within a prompt 2.83, all equal in 1 of 2"
    code, out, error = run("generate", f"a --prompt red green {reward} --samples 3 --out drawn")
    assert code == 0, error
    drawn = out.splitlines()
    again = run("generate", f"--pictures drawn {reward}")[1].splitlines()
    shutil.rmtree("drawn")
    assert drawn[-2:] == again and again[0].startswith("bright: mean ")
    assert "has no picture with a prompt" in refuse("generate", f"--pictures b {reward}")
