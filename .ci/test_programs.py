"""Every program of examples/ says what it is for; the toy learns. No GPU."""
import subprocess, sys

import pytest

from conftest import ROOT, first_and_last

PROGRAMS = sorted([".".join(path.relative_to(ROOT / "examples").with_suffix("").parts)
                   for path in (ROOT / "examples").rglob("*.py") if "\nif __name__" in path.read_text()])

@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name, run, tmp_path):
    """What it does and an example, also without flags; errors begin with its name, and nothing is written."""
    code, out, error = run(name, "--help")
    assert code == 0 and f"python -m examples.{name}" in out and "usage: " in out, error
    assert not list(tmp_path.iterdir())

QUICK = """
import runpy, sys
from importlib.abc import MetaPathFinder
class No(MetaPathFinder):
    def find_spec(self, name, *_):
        assert name not in ("torch", "transformers", "diffusers"), name
sys.meta_path.insert(0, No())
for name in sys.argv[1].split():
    sys.argv[1:] = ["--help"]
    try:
        runpy.run_module(f"examples.{name}", run_name="__main__")
    except SystemExit as stop:
        assert not stop.code
"""

def test_help_takes_no_time():
    """No program imports what takes seconds before it has read its flags."""
    names = [name for name in PROGRAMS if not name.startswith("make.")]
    done = subprocess.run([sys.executable, "-c", QUICK, " ".join(names)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("usage: ") == len(names), done.stderr

def test_no_maker_overwrites_a_model(run):
    assert "exists already" in run("make.tiny", f"--out {ROOT}/examples/tiny-glm-image")[2]

@pytest.mark.parametrize("seed", range(3))
def test_toy_learns_from_nothing(run, seed):
    """For every seed: what it says of itself is not one seed's luck."""
    code, _, error = run("grpo", f"--wrapper {ROOT}/examples/toy.py:Toy --seed {seed} --out run")
    first, last = first_and_last("run")
    assert code == 0 and first < 0.65 and last > 0.95, error
