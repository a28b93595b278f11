"""What all tests here share: no GPU, as they compare with tensors on the CPU; one thread, as others run beside them."""
import os, runpy, sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest, torch
torch.set_num_threads(1)

@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(program, flags): one of examples/, in this process, where all is imported, and in a folder of its own
    -> exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def execute(name, typed=""):
        path = ROOT / "examples" / f"{name.replace('.', '/')}.py"
        monkeypatch.setattr(sys, "argv", [path.name, *typed.split()])
        code = 0
        capsys.readouterr()
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        return code, *capsys.readouterr()

    return execute

def perturb(lora):
    """Adapters that do something: B starts at 0."""
    torch.manual_seed(5)
    for weight in lora.weights.values():
        weight.data.add_(0.1 * torch.randn_like(weight))
