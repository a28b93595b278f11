"""What all tests here share: no GPU, as they compare with tensors on the CPU; one thread, as others run beside them."""
import os, runpy, socket, sys
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

@pytest.fixture
def reads(monkeypatch):
    """Skips without RapidOCR; no test that reads may need the network."""
    for package in ("rapidocr", "onnxruntime"):
        pytest.importorskip(package, reason="pip install rapidocr onnxruntime")
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)

def table(page, head):
    """Rows of the page's table with this head -> lists of cells, without backticks."""
    lines = page[page.index(head):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]

def perturb(lora):
    """Adapters that do something: B starts at 0."""
    torch.manual_seed(5)
    for weight in lora.weights.values():
        weight.data.add_(0.1 * torch.randn_like(weight))
