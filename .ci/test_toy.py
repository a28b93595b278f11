"""Tests of examples/toy.py: another model than GLM-Image, with grpo.py's command line. No network, no GPU."""
import json, os, re, runpy, subprocess, sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests compare with tensors on the CPU

import pytest, torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import grpo
from examples.toy import NAMES, Toy
torch.set_num_threads(1)

def make_toy(**settings):
    return Toy("toy", grpo.Config(**dict(model="toy", width=64, height=32, **settings)))

@pytest.fixture
def run_command(monkeypatch):
    """`python -m examples.toy` and flags, in this process."""
    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["toy.py", *flags])
        monkeypatch.delitem(sys.modules, "examples.toy", raising=False)  # or it warns
        runpy.run_module("examples.toy", run_name="__main__")

    return run

def read_rewards(run):
    return [json.loads(line)["reward"] for line in Path(run, "metrics.jsonl").read_text().splitlines()]

@pytest.mark.parametrize("seed", range(5))
def test_it_learns_from_nothing(run_command, tmp_path, seed):
    """For every seed: what it says of itself is not one seed's luck."""
    run_command("--seed", str(seed), "--out", f"{tmp_path}/run")
    rewards = read_rewards(tmp_path / "run")
    assert sum(rewards[:5]) / 5 < 0.65
    assert sum(rewards[-5:]) / 5 > 0.95

def test_its_command(tmp_path):
    """The line of the docstring, as it is typed."""
    command, = re.findall(r"^    python (-m \S+)", (ROOT / "examples/toy.py").read_text(), re.MULTILINE)
    flags = ["--steps", "1", "--out", f"{tmp_path}/run"]
    subprocess.run([sys.executable, *command.split(), *flags], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert len(read_rewards(tmp_path / "run")) == 1 and (tmp_path / "run/samples_00001.png").exists()

def test_it_is_resumed(run_command, tmp_path):
    """The base weights are in no file: made with another seed, they would not be those that the adapters were trained on."""
    flags = "--width 32 --height 32 --group-size 2 --batch-size 2 --seed 3".split()
    run_command(*flags, "--steps", "4", "--out", f"{tmp_path}/one")
    run_command(*flags, "--steps", "2", "--out", f"{tmp_path}/half")
    run_command("--resume", f"{tmp_path}/half", "--steps", "4")
    one, half = (torch.load(tmp_path / run / "checkpoint.pt") for run in ("one", "half"))
    assert len(one["adapter"]) == 4  # A and B of two linear layers
    assert all(weight.any() and torch.equal(weight, half["adapter"][name]) for name, weight in one["adapter"].items())
    assert len(read_rewards(tmp_path / "one")) == 4 and read_rewards(tmp_path / "one") == read_rewards(tmp_path / "half")

def test_it_keeps_the_contract():
    """Samples depend on their seed alone, log-probs are those of the sampler, and a picture shows its tokens."""
    toy = make_toy()
    prompts = ["a red thing", "Blue, not green", "no colour"]
    rollout = toy.generate_with_tracking(prompts, 3, [1, 2, 3])
    assert rollout.prompts == [prompt for prompt in prompts for _ in range(3)]
    assert rollout.tokens.shape == rollout.logprobs.shape == (9, 16) and rollout.images[0].size == (64, 32)
    assert len(rollout.tokens.unique(dim=0)) == 9 and set(rollout.tokens.flatten().tolist()) == set(range(len(NAMES)))
    logprobs, entropy = toy.compute_logprobs(rollout)
    assert (logprobs - rollout.logprobs).abs().max() < 1e-5 and entropy.shape == (9, 16) and not entropy.requires_grad
    alone = toy.generate_with_tracking(prompts[1:2], 3, [2])
    assert torch.equal(alone.tokens, rollout.tokens[3:6])
    assert torch.equal(toy.generate_with_tracking(["a BLUE thing"], 3, [2]).tokens, alone.tokens)
    for i, code in enumerate(rollout.tokens[4]):  # 16 squares of 16 x 8 pixels
        pixel = rollout.images[4].getpixel((16 * (i % 4) + 5, 8 * (i // 4) + 5))
        assert (torch.tensor(pixel) / 255 - grpo.COLORS[NAMES[code]]).abs().max() < 1 / 255
