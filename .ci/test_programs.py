"""Every program of examples/ is run; toy.py, measure.py and make/targets.py do what they say. No network, no GPU."""
import ast, contextlib, functools, json, os, re, subprocess, sys, types
from pathlib import Path

import pytest, torch, transformers

import grpo
from conftest import ROOT
from examples import measure
from examples.toy import NAMES, Toy

PROGRAMS = sorted([path.stem for path in (ROOT / "examples").glob("[a-z]*.py")])
MAKERS = sorted([f"make.{path.stem}" for path in (ROOT / "examples/make").glob("*.py")])

def test_the_folder_is_small():
    """At most eleven programs, an index of them, and three folders."""
    names = {path.name for path in (ROOT / "examples").iterdir()} - {"__pycache__", "__init__.py", "README.md"}
    assert names == {"make", "patches", "tiny-glm-image", *[f"{name}.py" for name in PROGRAMS]} and len(PROGRAMS) <= 11
    assert all([f"[`{name}.py`]({name}.py)" in (ROOT / "examples/README.md").read_text() for name in PROGRAMS])

@pytest.mark.parametrize("name", PROGRAMS + MAKERS)
def test_help(name, run, tmp_path):
    """--help and no arguments have it say something useful. Errors begin with its name, and nothing is written."""
    code = (ROOT / "examples" / f"{name.replace('.', '/')}.py").read_text()
    told = ast.get_docstring(ast.parse(code))
    assert re.search(rf"python -m examples\.{name}\b|examples/{name}.py:\w", told) and max(map(len, code.splitlines())) <= 100
    if name == "choose":  # a file with a reward
        return
    code, out, error = run(name, "--help")
    assert code == 0 and told.splitlines()[0] in out and (name == "rewards" or re.search("--out|flags:|positional", out)), error
    if name in PROGRAMS and name not in ("janus", "toy"):  # these train
        code, out, error = run(name)
        assert code == 2 and re.fullmatch(rf"{name}\.py: error: .+\n", error) if code else f"examples.{name}" in out
    assert not list(tmp_path.iterdir())

def test_by_module_and_by_path(tmp_path):
    """`python -m examples.name`, as the pages say, and from anywhere by the path."""
    for start, folder in (("-m examples.plot", ROOT), (f"{ROOT}/examples/make/targets.py --help", tmp_path)):
        done = subprocess.run([sys.executable, *start.split()], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0 and "python -m examples." in done.stdout, done.stderr

def test_makers_overwrite_nothing(run):
    """The tiny model is tracked: one could have lost it by a command."""
    assert "exists already" in run("make.tiny", f"--out {grpo.TINY_MODEL}")[2] and run("make.targets")[0] == 0
    prompts, targets = grpo.load_prompts("runs/targets/prompts.txt")
    assert len(prompts) == 8 and prompts[0] == "a red thing" and grpo.open_image(targets[0]).getpixel((0, 127)) == (255, 0, 0)

COUNTED = {"memory": 4, "edit": 1, "sft": 1, "janus": 2}  # modes that imagine a GPU of their own: rows of their tables
TABLE = re.compile(r"^(?:\|---)+\|\n((?:\|.*\n)+)", re.MULTILINE)
SMALL = "--batch-size 2 --group-size 2 --width 64 --height 64"

def test_report_and_bench(run, tmp_path):
    """What is pasted into an issue: the machine, kernels, rounding, and prompts of different length without NaN."""
    code, out, error = run("measure", f"report {SMALL}")
    told = rf"CPU, .*torch {re.escape(torch.__version__)}.*kernels: \d\d.* token, \d\d.* pass, \d\d.*length: all finite"
    assert code == 0 and re.match(told, out, re.DOTALL), error
    assert all(float(gap) < 1e-4 for gap in re.findall(r"sampler_gap (\S+),", out))
    cells = TABLE.findall(run("measure", f"bench {SMALL} --groups 2 --repeats 1")[1])[0].split(" | ")
    stock, sample, decode, _, ratio = [float(cell.strip("x")) for cell in cells[1:6]]
    assert ratio == pytest.approx(stock / (sample + decode), abs=0.1)
    error = run("measure", f"report --wrapper {ROOT}/examples/toy.py:Toy")[2]
    assert error == "measure.py: error: --wrapper: only GLM-Image is measured\n" and not list(tmp_path.iterdir())
    assert 0.1 < measure.measure_host() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30

@pytest.fixture
def imagined(monkeypatch, capsys, tmp_path):
    """call(flags): measure.py where a GPU is imagined, with models of one layer and small pictures -> its tables' rows."""
    for owner, name, value in (
            (grpo, "CUDA", True), *[(torch.cuda, name, lambda: None) for name in ("synchronize", "reset_peak_memory_stats")],
            (torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(name="imagined", total_memory=2**37)),
            (torch.cuda, "mem_get_info", lambda: (2**37, 2**37)), (measure, "measure_host", lambda: 64),
            (measure, "ROWS", [(64, 2, 2, 1)]), (measure, "SIDES", [64]), (measure, "DEPTHS", [(1, 0.04, 16)]),
            (measure, "ABLATIONS", {"as shipped": {}}), (measure, "JANUS", {1: measure.JANUS[1] | dict(num_hidden_layers=1)}),
            (measure, "make_real", functools.partial(measure.make_real, ar_layers=1, dit_layers=1)),
            (measure, "measure_stock", lambda *_: 1.0)):  # `generate` ends at once where a number is made up
        monkeypatch.setattr(owner, name, value)
    monkeypatch.chdir(tmp_path)

    def call(flags):
        monkeypatch.setattr(sys, "argv", ["measure.py", *flags.split()])
        if flags not in COUNTED:
            monkeypatch.setattr(transformers.GlmImageProcessor, "_get_target_shape", lambda *_, **__: (2, 2, 4, 4))
        with contextlib.nullcontext() if flags in COUNTED else measure.imagine(measure.FakeGPU()):
            measure.main()
        return "".join(TABLE.findall(capsys.readouterr().out)).splitlines()

    return call

@pytest.mark.parametrize("flags, rows", [
    *COUNTED.items(), ("depth", 1), ("ablate 0 1 --steps 1", 1), (f"report {SMALL}", 4),
    (f"bench --offload on {SMALL} --groups 2 --repeats 1", 1)])
def test_on_an_imagined_gpu(imagined, tmp_path, flags, rows):
    """Every mode, as far as it goes. `depth` subtracted a tensor of the host from one of the GPU: an error there, and here."""
    lines = imagined(flags)
    assert len(lines) == rows and not list(tmp_path.iterdir())
    assert flags not in COUNTED or all(0.2 < float(gib) < 9 for gib in re.findall(r"\d+\.\d", " ".join(lines)))

def test_whole_numbers_have_contents():
    """Every `.item()` was 1, so that `transformers` skipped the mask of padded prompts: half a GiB too little at 1024."""
    with measure.imagine(measure.FakeGPU()):
        mask = torch.tensor([[0, 1, 1], [1, 1, 1]], device=grpo.DEVICE)
        assert mask.is_meta and not mask.all() and (mask.cumsum(1) - 1).tolist()[0] == [-1, 0, 1]

@pytest.mark.parametrize("gpu, host", [(15, 64), (80, 31)])
def test_room_for_random_weights(imagined, monkeypatch, capsys, gpu, host):
    """A card of 16 GB ended in a traceback, and a host of 32 GB killed the process without a word."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gpu * 2**30, 80 * 2**30))
    monkeypatch.setattr(measure, "measure_host", lambda: host)
    with pytest.raises(SystemExit):
        imagined("report")
    out, error = capsys.readouterr()
    assert out.startswith("imagined, 128.0 GiB") and f"are {gpu}.0 and {host}.0\n" in error and error.count("\n") == 1

@pytest.mark.skipif("SLOW" not in os.environ, reason="takes a minute: SLOW=1 runs it")
def test_what_a_gpu_would_do():
    """Counted at the real sizes: the promises of issue and pages with a number."""
    peaks, counts = measure.count_memory(512, 8)
    assert counts["sample"]["kernels"] <= 3600 and counts["sample"]["waits"] == 0 and counts["decode"]["copies in"] <= 4
    assert counts["update"]["kernels"] <= 15_700 and counts["update"]["masks"] == 0 < counts["update"]["attention"]
    assert peaks["sample"]["on"] == pytest.approx(18.70, abs=0.02) and peaks["update"]["on"] < 18.5

@pytest.mark.parametrize("seed", range(3))
def test_toy_learns_from_nothing(run, seed):
    """For every seed: what it says of itself is not one seed's luck."""
    run("toy", f"--seed {seed} --out run")
    rewards = [json.loads(line)["reward"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[:5]) / 5 < 0.65 and sum(rewards[-5:]) / 5 > 0.95

def test_toy_keeps_the_contract():
    """Samples depend on their seed alone, log-probs are those of the sampler, and a picture shows its tokens."""
    toy = Toy("toy", grpo.Config(model="toy", width=64, height=32))
    prompts = ["a red thing", "Blue, not green", "no colour"]
    rollout = toy.sample(prompts, 3, [1, 2, 3])
    assert rollout.prompts == [prompt for prompt in prompts for _ in range(3)] and len(rollout.tokens.unique(dim=0)) == 9
    logprobs, entropy = toy.compute_logprobs(rollout)
    assert (logprobs - rollout.logprobs).abs().max() < 1e-5 and entropy.shape == (9, 16) and not entropy.requires_grad
    assert torch.equal(toy.sample(["a BLUE thing"], 3, [2]).tokens, rollout.tokens[3:6])
    image = toy.decode(prompts, rollout.tokens, [1, 2, 3])[4]
    wanted = torch.stack([grpo.COLORS[NAMES[code]] for code in rollout.tokens[4]], 1).view(3, 4, 4)
    assert (grpo.pil_to_tensor([image])[0, :, 5::8, 5::16] - wanted).abs().max() < 1 / 255  # a pixel of each square
