"""Tests of --compile and --wandb, which need a compiler and a package that grpo.py itself does without. Run from the root:
    python -m pytest -q .ci/test_options.py
"""
import importlib.metadata, json, os, shutil
from unittest import mock

import numpy as np
import pytest, torch

import grpo
from test_grpo import PROMPTS, make_config, make_trainer, make_wrapper, perturb, roll, rows_of

@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.skipif("SLOW" not in os.environ, reason="it compiles for minutes; set SLOW=1")
def test_compiled_layers_compute_the_same(tmp_path):
    """Tokens, log-probs, gradients and pictures, with LoRA on and off, padded and not, without a graph break, and
    through --resume: a compiled layer must see the switch of LoRA, the cache and the checkpointing."""
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        wrapper = make_wrapper(compile=compiled)
        lora = perturb(grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank=4))
        found = []
        for lora.enabled in (True, False):
            padded = roll(wrapper)
            single = wrapper.sample(["red"], 2, [3])
            logprobs, _ = wrapper.compute_logprobs(padded)
            if lora.enabled:
                logprobs.square().mean().backward()
            others, _ = wrapper.compute_logprobs(single)
            images = wrapper.decode(PROMPTS, padded.tokens, [1, 2])
            found.append((padded.tokens, single.tokens, padded.logprobs, logprobs.detach(), others.detach(),
                          np.stack(images).astype(int)))
        gradient = torch.cat([weight.grad.flatten() for weight in lora.weights.values()])
        results.append((found, gradient))
    (plain, gradient), (compiled, other) = results
    assert not torch._dynamo.utils.counters["graph_break"] and torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for expected, got in zip(plain, compiled):
        assert torch.equal(expected[0], got[0]) and torch.equal(expected[1], got[1])
        for one, two in zip(expected[2:5], got[2:5]):
            assert (one - two).abs().max() < 1e-5
        assert abs(expected[5] - got[5]).max() <= 1
    assert gradient.any() and (gradient - other).norm() < 1e-4 * gradient.norm()
    assert not torch.equal(plain[0][3], plain[1][3])  # LoRA did something
    run = make_trainer(tmp_path / "run", compile=True, steps=2)
    run.train()
    resumed = make_trainer(tmp_path / "run", steps=3)
    assert resumed.config.compile
    resumed.train()
    make_trainer(tmp_path / "plain", steps=3).train()
    assert rows_of(tmp_path / "run") == [pytest.approx(row, rel=1e-2, abs=1e-4) for row in rows_of(tmp_path / "plain")]

def test_weights_and_biases_gets_every_row_and_all_pictures(tmp_path, monkeypatch):
    """Offline it leaves a run on the disk: whoever adds a row or a picture elsewhere would miss it in the curve."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    trainer = make_trainer(tmp_path / "run", wandb="a project", steps=3, save_every=2)
    logged = []
    log = wandb.log
    with mock.patch.object(wandb, "log", lambda row, step: logged.append((step, row)) or log(row, step=step)):
        trainer.train()
    wandb.teardown()  # finish() returns before its helper process has written all
    rows = [(step, row) for step, row in logged if "samples" not in row]
    assert [step for step, row in logged if "samples" in row] == [0, 2, 3]
    assert rows == [(row["step"], row) for row in trainer.history] and len(rows) == 3
    folder, = (tmp_path / "run/wandb").glob("offline-run-*")
    assert len([*folder.rglob("samples_*.png")]) == 3
    saved = next(folder.glob("run-*.wandb")).read_bytes()
    assert all(json.dumps(row["reward"]).encode() in saved for row in trainer.history)

def test_without_the_package_one_line_says_how_to_install_it(tmp_path, monkeypatch):
    """Before a model is loaded, and not as a traceback after it; a folder of its name, which can be imported, is none."""
    (tmp_path / "wandb").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.metadata, "version", mock.Mock(side_effect=importlib.metadata.PackageNotFoundError("wandb")))
    with pytest.raises(grpo.BadInput, match="pip install wandb"):
        grpo.check_settings(make_config(wandb="project"))
