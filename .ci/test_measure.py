"""Tests of measure.py and compare.py: what they count and compare. No GPU."""
import difflib, functools, os, re, shutil, types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest, scipy.stats, torch, transformers

import grpo
from conftest import ROOT, table
from examples import measure

SMALL = "--batch-size 2 --group-size 2 --width 64 --height 64"

def test_memory_is_that_of_the_page(run):
    """The first row within 1 %, the caps on kernels, one wait a token, attention without masks in the update."""
    out = run("measure", "memory --batch-size 1 --micro-batch-size 1")[1]
    page = (ROOT / "docs/figures.md").read_text()
    ours, theirs = [re.findall(r"\d+\.\d", " ".join(table(text, "| size | prompts x")[0])) for text in (out, page)]
    assert [float(gib) for gib in ours] == pytest.approx([float(gib) for gib in theirs], rel=0.01) and len(ours) == 6
    kernels, copies_in, copies_out, waits, masks = zip(*[row[1:] for row in table(out, "| what |")])
    caps = 2410, 1770, 10200  # a token, a DiT pass, a micro-batch of one
    assert all(0 < int(number.replace(",", "")) <= cap for number, cap in zip(kernels, caps)), kernels
    assert copies_in[0] == "0" and copies_out[:2] == ("1", "0") and waits[:2] == ("0", "0")
    assert masks == ("40 in 40 attentions", "0 in 30 attentions", "0 in 120 attentions")

PAINTER = """
import random, torch
from PIL import Image
from examples.toy import Toy
class Painter(Toy):
    def decode(self, prompts, tokens, seeds):
        luck = [random.Random(seed).randrange(256) for seed in seeds for _ in range(len(tokens) // len(prompts))]
        return [Image.new("RGB", (8, 8), (17 * int(row.sum()) % 256, noise, 0)) for row, noise in zip(tokens, luck)]
def see(i): return lambda images, *_: [image.getpixel((0, 0))[i] for image in images]
tokens, noise = see(0), see(1)
def both(images, *_): return [sum(image.getpixel((0, 0))) for image in images]
def product(images, *_): return [a * b - 127 * (a + b) for a, b, _ in [image.getpixel((0, 0)) for image in images]]
def moody(images, *_): return torch.rand(len(images))
"""

@pytest.mark.parametrize("reward, shares, verdict", [
    ("tokens", (1, 0, 0), "train the AR half"), ("noise", (0, 1, 0), "train the DiT"), ("both", (0.5, 0.5, 0), None),
    ("product", (0, 0, 1), "train neither"), ("moody", (0, 0, 1), "train neither")])
def test_which_half_decides_a_reward(run, reward, shares, verdict):
    """Of rewards that are made of tokens, of noise, of both, and of luck of their own."""
    Path("painters.py").write_text(PAINTER)
    _, out, error = run("measure", f"halves --wrapper painters.py:Painter --reward painters.py:{reward}")
    found = [[*map(float, row)] for row in re.findall(r"(?m)^\w+ +(\S+) +95 % interval (\S+) \.\. (\S+)$", out)]
    most = 0.01 if reward in ("tokens", "noise") else 0.35
    assert all(abs(share - want) < most for (share, *_), want in zip(found, shares, strict=True)), out + error
    assert all(low <= share <= high for share, low, high in found) and (verdict is None or f"\n{verdict}" in out)
    assert (float(re.search(r"one picture (\S+)", out)[1]) > 0.1) == (reward == "moody")

def test_shares_are_unbiased():
    """Variances of 2, 3 and 4, and prompts of any mean; the interval of few prompts has the share."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape)
    scores = (9 * draw(6000, 1, 1) + 2**0.5 * draw(6000, 5, 1) + 3**0.5 * draw(6000, 1, 7) + 2 * draw(6000, 5, 7))
    parts = measure.split_variance(scores)
    assert parts.mean(0) == pytest.approx([2, 3, 4], rel=0.05)
    ends = [measure.resample(some)[0, 1:] for some in parts[:2000].reshape(100, 20, 3)]
    assert 0.85 < np.mean([low < 2 / 9 < high for low, high in ends]) < 0.99

def test_ranks_of_two_painters(run, small_draft):
    """Spearman's correlation is scipy's. On the tiny model both rank alike, and inverted pictures the other way."""
    rng = np.random.default_rng(0)
    for a, b in ((rng.normal(size=30), rng.normal(size=30)), rng.integers(0, 4, (2, 30))):
        assert np.corrcoef(measure.rank(a), measure.rank(b))[0, 1] == pytest.approx(scipy.stats.spearmanr(a, b)[0])
    flags = f"painting {SMALL} --temperature 12 --top-p 1 --decode-steps 10 --guidance 1"
    out = run("measure", f"{flags} --wrapper {ROOT}/examples/fast.py:Fast")[1]
    assert re.findall(r"(?m)^the .*, \d+ steps:", out) == ["the stock pipeline, 50 steps:", "the wrapper, 10 steps:"]
    assert float(re.search(r"(\S+) in the mean of \d groups", out)[1]) > 0.9, out
    Path("dark.py").write_text("from grpo import GLMImageWrapper as W\nfrom PIL import ImageOps\nclass Dark(W):\n"
                               "    def decode(self, *args): return [*map(ImageOps.invert, W.decode(self, *args))]\n"
                               "def red(images, *_): return [i.getpixel((9, 9))[0] // 99 for i in images]\n")
    out = run("measure", f"{flags} --model {grpo.TINY_MODEL} --wrapper dark.py:Dark --reward dark.py:red")[1]
    assert float(re.search(r"(\S+) in the mean of \d groups", out)[1]) < -0.9, out

def test_one_rounding_follows_the_true_change_and_two_do_not(monkeypatch, capsys):
    """Of a whole model, here with narrow layers. The kl by hand."""
    assert measure.compute_kl(torch.full((4, 5), 0.5)) == pytest.approx(2.718281828 ** -0.5 - 0.5)
    sizes = dict(hidden_size=512, num_attention_heads=4, num_key_value_heads=2, intermediate_size=700)
    monkeypatch.setattr(transformers, "GlmImageTextConfig", functools.partial(transformers.GlmImageTextConfig, **sizes))
    monkeypatch.setattr(measure, "INIT", 0.06)
    measure.measure(types.SimpleNamespace(command="updates", flags=["--group-size=3"], layers=[2], rates=[5e-5, 1e-4]))
    rows = table(capsys.readouterr().out, "| layers |")
    (small, *slopes), (large, *more) = [[float(cell.split()[0]) for cell in row[2:5]] for row in rows]
    assert large == pytest.approx(2 * small, rel=0.1)
    assert all(two < 0.6 and 0.9 < one < 1.1 for two, one in (slopes, more)), rows

def test_pairs(run, refuse):
    """Equal variants differ by exactly 0, also a patch that changes nothing; another as its rows say."""
    text = Path(grpo.__file__).read_text()
    for name, new in dict(same=f"# A comment\n{text}", worse=text.replace("-torch.min(", "torch.min(")).items():
        lines = difflib.unified_diff(text.splitlines(True), new.splitlines(True), "a/grpo.py", "b/grpo.py")
        Path(f"{name}.patch").write_text("".join(lines))
    toy = f"--seeds 0 1 --steps 5 --lr 1e-3 --wrapper {ROOT}/examples/toy.py:Toy"
    words = [os.path.abspath("same"), "--lr 1e-3", f"{os.path.abspath('worse')} --lr 2e-2", *toy.split()]
    out, error = run("compare", mock.Mock(split=lambda: words))[1:]  # quotes hold a variant together
    seeds = np.array(re.findall(r"(?m)^seed .+ (\S+) (\S+) (\S+)$", error), float).reshape(2, 4, 3)
    assert (seeds[:, 0] == seeds[:, 1]).all() and (seeds[0, 0] != seeds[1, 0]).all()
    pairs = np.array(re.findall(r"(?m): (\S+), (\S+) \.\. (\S+)$", out), float).reshape(3, 3, 3)
    changes = seeds[:, 3] - seeds[:, 0]
    assert not pairs[:2].any() and pairs[2, :, 0] == pytest.approx(changes.mean(0), abs=2e-3) and pairs[2, 0, 0] < -0.05
    assert "nosuch" in refuse("compare", "nosuch") and "stepz" in refuse("compare", "nosuch --stepz 3")

def test_a_comparison_takes_all_flags(small_draft, run):
    """--adapter and flow.py's DiT, whose patched module shares the switch of the reference; it leaves no files. A patch
    that can do nothing with a wrapper says so."""
    toy = f"--wrapper {ROOT}/examples/toy.py:Toy --lr 0.05"
    assert run("grpo", f"{toy} --steps 9 --save-every 9 --out a")[0] == 0
    def measure(flags):
        error = run("compare", f"frac_zero_std --seeds 0 {flags}")[2]
        rows = re.findall(r"(?m)^seed 0 .*? (\d\.\d{4}) (\d\.\d{4}) (\d\.\d{4})$", error)
        assert len(rows) == 2 and rows[0] == rows[1], error
        return float(rows[0][0])

    assert measure(f"--steps 0 {toy} --adapter a/adapter_00009") > measure(f"--steps 0 {toy}") + 0.05
    assert "--adapter: [Errno 2]" in run("compare", f"frac_zero_std {toy} --adapter gone")[2]
    shutil.copytree(grpo.TINY_MODEL, "tiny")
    Path("tiny/held_out.txt").write_text("a red fox")
    dit = f"--wrapper {ROOT}/examples/flow.py:DiT --model tiny {SMALL} --decode-steps 3 --steps 2 --kl-coef .1 --seeds 0"
    measure(dit)
    assert run("compare", f"entropy {dit}")[2].endswith("entropy.patch: --wrapper gives entropies without a gradient\n")
    assert sorted([path.name for path in Path().iterdir()]) == ["a", "tiny"]
