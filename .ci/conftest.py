"""What all tests here share: no GPU, as they compare with tensors on the CPU; one thread, as others run beside them."""
import json, os, re, runpy, shutil, subprocess, sys, types
from pathlib import Path
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest, torch, transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo
torch.set_num_threads(1)

@pytest.fixture(autouse=True)
def surroundings():
    """Programs set WORLD_SIZE: a trainer of TRL would then wait for others."""
    with mock.patch.dict(os.environ):
        yield

@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(program, flags): grpo.py or one of examples/, in this process and a folder of its own -> code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a file of rewards adds its folder

    def execute(name, typed=""):
        path = ROOT / "examples" / f"{name.replace('.', '/')}.py"
        monkeypatch.setattr(sys, "argv", [path.name, *typed.split()])
        code = 0
        capsys.readouterr()
        try:
            grpo.main() if name == "grpo" else runpy.run_path(str(path), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        if isinstance(code, str):  # as Python does with it
            print(code, file=sys.stderr)
            code = 1
        return code, *capsys.readouterr()

    yield execute
    for name, module in [*sys.modules.items()]:  # another test has other files of these names
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]

@pytest.fixture
def refuse(run, monkeypatch):
    """refuse(program, flags) -> the line that names it, after argparse's usage. No model is loaded, no file written."""
    def execute(name, typed=""):
        def read_all():
            return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}

        before = read_all()
        with monkeypatch.context() as patch:
            if "--model" not in typed:
                patch.setattr(grpo.GLMImageWrapper, "from_pretrained", None)
            code, _, error = run(name, typed)
        assert code in (1, 2) and re.fullmatch(rf"(usage: (.*\n)+?)?{name}\.py: error: .+\n", error), error
        assert read_all() == before
        return error

    return execute

@pytest.fixture(scope="module")
def small_draft():
    """GLM-Image's draft has 2 x 2 codes, not some 256: that is quick."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.GlmImageProcessor, "_get_target_shape",
                      lambda self, height, width: (height // 32, width // 32, 2, 2))
        yield

@pytest.fixture
def apply(tmp_path):
    """apply("gspo", "entropy"): `git apply` of both, in a folder with grpo.py alone -> the code there, or None."""
    def run(*names):
        shutil.copy(ROOT / "grpo.py", tmp_path)
        patches = [ROOT / f"examples/patches/{name}.patch" for name in names]
        done = subprocess.run(["git", "apply", *patches], cwd=tmp_path, capture_output=True)
        return None if done.returncode else (tmp_path / "grpo.py").read_text()

    return run

def load(code):
    """-> a module of this code, which knows where grpo.py is."""
    module = types.ModuleType("changed")
    module.__file__ = str(ROOT / "grpo.py")
    sys.modules["changed"] = module  # where dataclasses look for what annotations mean
    exec(code, module.__dict__)
    return module

class Recorder(TorchDispatchMode):
    """`torch.cuda.CUDAGraph` and `torch.cuda.graph` on a CPU: it notes each operation, and runs it, which counts as the
    first replay. A replay writes into the same tensors."""
    def __init__(self, graph=None):
        super().__init__()
        self.calls = [] if graph is None else graph.calls
        self.replayed = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default, "it would wait for the GPU"
        result = function(*args, **kwargs or {})
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        for function, args, kwargs, result in self.calls if self.replayed else []:
            for old, new in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                old.copy_(new)
        self.replayed = True

@pytest.fixture
def compare_graphs(monkeypatch):
    """compare_graphs(sample): draws as a GPU would, and as a CPU does, twice: bit for bit the same."""
    def compare(sample):
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorder)
        monkeypatch.setattr(torch.cuda, "graph", Recorder)
        samples = []
        for cuda in (False, True):
            monkeypatch.setattr(grpo, "CUDA", cuda)
            rollouts = [sample(["a red fox on a wall", "yellow"], 3, seeds) for seeds in ([1, 2], [3, 4])]
            samples.append([value for rollout in rollouts for value in rollout if torch.is_tensor(value)])
        assert all(torch.equal(ours, graph) for ours, graph in zip(*samples, strict=True))

    return compare

def table(page, head):
    """Rows of the page's table with this head -> lists of cells, without backticks."""
    lines = page[page.index(head):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]

def read_rows(run):
    """Without what the clock says."""
    return [json.loads(line) | dict(seconds=0) for line in Path(run, "metrics.jsonl").read_text().splitlines()]

def read_adapter(run):
    return torch.load(Path(run, "checkpoint.pt"), weights_only=True)["adapter"]

def have_same_weights(one, other):
    """Of two runs, bit for bit."""
    weights = read_adapter(other)
    return all([torch.equal(weight, weights[name]) for name, weight in read_adapter(one).items()])

def perturb(lora):
    """Adapters that do something: B starts at 0."""
    torch.manual_seed(5)
    for weight in lora.weights.values():
        weight.data.add_(0.1 * torch.randn_like(weight))
