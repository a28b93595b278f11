"""Every program of examples/ says what it is for; the toy learns. No GPU."""
import os, subprocess, sys

import pytest

from conftest import ROOT, first_and_last

PROGRAMS = sorted([".".join(path.relative_to(ROOT / "examples").with_suffix("").parts)
                   for path in (ROOT / "examples").rglob("*.py") if "\nif __name__" in path.read_text()])

@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name, tmp_path):
    """What it does and an example, before anything is imported that takes seconds, and nothing is written."""
    code = f"""import runpy, sys
sys.argv[1:] = ["--help"]
sys.modules.update(torch=None, transformers=None, diffusers=None)
runpy.run_module("examples.{name}", run_name="__main__")"""
    env = os.environ | dict(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and f"python -m examples.{name}" in done.stdout and "usage: " in done.stdout, done.stderr
    assert not list(tmp_path.iterdir())

def test_no_maker_overwrites_a_model(run):
    assert "exists already" in run("make.tiny", f"--out {ROOT}/examples/tiny-glm-image")[2]

@pytest.mark.parametrize("seed", range(3))
def test_toy_learns_from_nothing(run, seed):
    """For every seed: what it says of itself is not one seed's luck."""
    code, _, error = run("grpo", f"--wrapper {ROOT}/examples/toy.py:Toy --seed {seed} --out run")
    first, last = first_and_last("run")
    assert code == 0 and first < 0.65 and last > 0.95, error
