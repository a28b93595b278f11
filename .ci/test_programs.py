"""Every program of examples/ is run: --help, without arguments, by its module and by its path. Also toy.py, measure.py and
targets.py do what they say. No network, no GPU."""
import ast, functools, json, os, re, subprocess, sys, types
from pathlib import Path

import pytest, torch, transformers

ROOT = Path(__file__).resolve().parent.parent
import grpo
from examples import measure
from examples.toy import NAMES, Toy

PROGRAMS = sorted([path.stem for path in (ROOT / "examples").glob("[a-z]*.py")])
MAKERS = sorted([f"make.{path.stem}" for path in (ROOT / "examples/make").glob("*.py")])

def test_the_folder_is_small():
    """At most eleven programs, an index of them, and three folders."""
    names = {path.name for path in (ROOT / "examples").iterdir()} - {"__pycache__", "__init__.py"}
    folders = {"make", "patches", "tiny-glm-image"}
    assert names == {"README.md", *folders, *[f"{name}.py" for name in PROGRAMS]} and len(PROGRAMS) <= 11
    index = (ROOT / "examples/README.md").read_text()
    assert all(f"examples.{name}" in index for name in PROGRAMS if name != "choose") and "choose.py" in index

@pytest.mark.parametrize("name", PROGRAMS + MAKERS)
def test_help(name, run, tmp_path):
    """What it does, its flags and an example, without any work."""
    path = ROOT / "examples" / f"{name.replace('.', '/')}.py"
    told = ast.get_docstring(ast.parse(path.read_text()))
    assert re.search(rf"python -m examples\.{name}\b|examples/{path.name}:\w", told), told
    assert max(map(len, path.read_text().splitlines())) <= 100
    if name == "choose":  # a file with a reward
        return
    code, out, error = run(name, "--help")
    assert code == 0, error
    assert told.splitlines()[0] in out and not list(tmp_path.iterdir())
    assert name == "rewards" or "--out" in out or "flags:" in out or "positional" in out

@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in ("choose", "janus", "toy")])  # two train
def test_without_arguments(name, run, tmp_path):
    """It says something useful, and errors begin with its name."""
    code, out, error = run(name, "")
    if code:
        assert code == 2 and re.fullmatch(rf"{name}\.py: error: .+\n", error), error
    else:
        assert f"examples.{name}" in out
    assert not list(tmp_path.iterdir())

def test_by_module_and_by_path(tmp_path):
    """`python -m examples.name`, as the pages say, and from anywhere by the path."""
    for start, folder in ((["-m", "examples.plot"], ROOT), ([ROOT / "examples/plot.py"], tmp_path),
                          ([ROOT / "examples/make/targets.py", "--help"], tmp_path)):
        done = subprocess.run([sys.executable, *start], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0 and f"examples.{'make' if 'help' in str(start) else 'plot'}" in done.stdout, done.stderr

def test_makers_overwrite_nothing(run, tmp_path):
    """The tiny model is tracked: one could have lost it by a command."""
    assert "exists already" in run("make.tiny", f"--out {grpo.TINY_MODEL}")[2]
    assert run("make.targets", "")[0] == 0
    prompts, targets = grpo.load_prompts(tmp_path / "runs/targets/prompts.txt")
    assert len(prompts) == 8 and prompts[0] == "a red thing"
    target = grpo.open_image(targets[0])
    assert [target.getpixel(at) for at in ((0, 0), (0, 127))] == [(255, 255, 255), (255, 0, 0)]

def test_a_quiet_trainer_writes_nothing(monkeypatch, tmp_path, capsys):
    """Ablations train runs that nobody keeps."""
    monkeypatch.chdir(tmp_path)
    config = grpo.parse_args("--steps 1 --width 32 --height 32 --batch-size 1 --group-size 2".split())
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    trainer = measure.QuietTrainer(config, wrapper, ["red"], grpo.load_rewards("color"))
    capsys.readouterr()
    trainer.train()
    assert len(trainer.history) == 1 and not list(tmp_path.iterdir()) and not capsys.readouterr().out

def test_report(run, tmp_path):
    """What is pasted into an issue: phases, kernels, rounding, and prompts of different length without NaN."""
    code, out, error = run("measure", "report --model tiny --batch-size 2 --group-size 2 --width 64 --height 64")
    assert code == 0, error
    for phase in ("sample", r"decode, 1 step\(s\)", "update"):
        seconds, = re.findall(rf"^\| {phase} \| (\S+) \| \S+ \| \S+ \|$", out, re.MULTILINE)
        assert float(seconds) > 0
    kernels = re.findall(r"kernels: (\S+) a token, (\S+) a DiT pass, (\S+) an update", out)[0]
    assert all(int(number.replace(",", "")) > 20 for number in kernels)
    assert f"torch {torch.__version__}" in out and "prompts of different length: all finite" in out
    assert all(float(gap) < 1e-4 for gap in re.findall(r"sampler_gap (\S+),", out)) and not list(tmp_path.iterdir())
    code, out, error = run("measure", "report --wrapper examples/toy.py:Toy")
    assert (code, out) == (2, "") and error == "measure.py: error: --wrapper: only GLM-Image is measured\n"

@pytest.fixture
def imagined(monkeypatch, capsys):
    """call(flags): measure.py where a GPU is imagined, with models of one layer and small pictures -> its tables' rows."""
    gpu = types.SimpleNamespace(name="imagined", total_memory=80 * 2**30)
    none = lambda *_: None
    for owner, name, value in (
            (grpo, "CUDA", True), (torch.cuda, "synchronize", none), (torch.cuda, "reset_peak_memory_stats", none),
            (torch.cuda, "get_device_properties", lambda device: gpu), (measure, "ROWS", [(64, 2, 2, 1)]),
            (measure, "make_real", functools.partial(measure.make_real, ar_layers=1, dit_layers=1)),
            (measure, "DEPTHS", [(1, 0.04, 16)]), (measure, "ABLATIONS", {"as shipped": {}}),
            (measure, "JANUS", {1: measure.JANUS[1] | dict(num_hidden_layers=1)}),
            (measure.janus.Janus, "defaults", dict(width=32, height=32)),
            (transformers, "JanusConfig", functools.partial(transformers.JanusConfig, vision_config=dict(image_size=32))),
            (measure, "measure_stock", lambda *_: 1.0)):  # `generate` ends at once where a number is made up
        monkeypatch.setattr(owner, name, value)

    def call(flags):
        monkeypatch.setattr(sys, "argv", ["measure.py", *flags.split()])
        measure.main()
        return re.findall(r"^\| .* [\d.]+ \|$", capsys.readouterr().out, re.MULTILINE)

    return call

SMALL = "--model tiny --width 64 --height 64"

@pytest.mark.parametrize("flags, rows", [(f"report {SMALL} --batch-size 2 --group-size 2 --offload on", 3),
                                         (f"bench {SMALL} --groups 2 --repeats 1", 1), ("depth", 1), ("ablate 0 1 --steps 1", 1)])
def test_on_an_imagined_gpu(imagined, monkeypatch, flags, rows):
    """`depth` subtracted a tensor of the host from one of the GPU: an error there, and here."""
    monkeypatch.setattr(transformers.GlmImageProcessor, "_get_target_shape", lambda *_: (2, 2, 4, 4))  # a small draft
    with measure.imagine(measure.FakeGPU()):
        assert len(imagined(flags)) == rows

@pytest.mark.parametrize("flags, rows", [("memory", 1), ("edit 64", 1), ("sft 64", 1), ("janus", 2)])
def test_counts(imagined, flags, rows):
    """Every table of GiB is counted."""
    lines = imagined(flags)
    assert len(lines) == rows and all(0.2 < float(number) < 9 for number in re.findall(r"\d+\.\d", " ".join(lines)))

def test_whole_numbers_have_contents():
    """Every `.item()` was 1, so that `transformers` skipped the mask of padded prompts: half a GiB too little at 1024."""
    with measure.imagine(measure.FakeGPU()):
        mask = torch.tensor([[0, 1, 1], [1, 1, 1]], device=grpo.DEVICE)
        assert mask.is_meta and not mask.all() and mask[1:].all() and (mask.cumsum(1) - 1).tolist()[0] == [-1, 0, 1]

@pytest.mark.parametrize("gpu, host, told", [(15, 64, "are 15.0 and 64.0"), (80, 31, "are 80.0 and 31.0"), (80, 64, "made")])
def test_room_for_random_weights(imagined, monkeypatch, capsys, gpu, host, told):
    """A card of 16 GB ended in a traceback, and a host of 32 GB killed the process without a word."""
    assert 0.1 < measure.measure_host() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (gpu * 2**30, 80 * 2**30))
    monkeypatch.setattr(measure, "measure_host", lambda: host)
    monkeypatch.setattr(measure, "make_real", lambda device: grpo.attempt("made", grpo.find_color, ""))
    with pytest.raises(SystemExit):
        imagined("report")
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1

@pytest.mark.skipif("SLOW" not in os.environ, reason="takes a minute: SLOW=1 runs it")
def test_what_a_gpu_would_do():
    """Counted at the real sizes: the promises of issue and pages with a number."""
    peaks, counts = measure.count_memory(512, 8)
    assert counts["sample"]["kernels"] <= 3600 and counts["sample"]["waits"] == 0
    assert counts["decode"]["copies in"] <= 4
    assert counts["update"]["kernels"] <= 15_700 and counts["update"]["masks"] == 0 < counts["update"]["attention"]
    assert peaks["sample"]["on"] == pytest.approx(18.70, abs=0.02) and peaks["update"]["on"] < 18.5

# --- toy.py: another model than GLM-Image, with grpo.py's command line ----------------------------------------
def rewards_of(folder):
    return [json.loads(line)["reward"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]

@pytest.mark.parametrize("seed", range(3))
def test_toy_learns_from_nothing(run, seed):
    """For every seed: what it says of itself is not one seed's luck."""
    run("toy", f"--seed {seed} --out run")
    rewards = rewards_of("run")
    assert sum(rewards[:5]) / 5 < 0.65 and sum(rewards[-5:]) / 5 > 0.95

def test_toy_keeps_the_contract():
    """Samples depend on their seed alone, log-probs are those of the sampler, and a picture shows its tokens."""
    toy = Toy("toy", grpo.Config(model="toy", width=64, height=32))
    prompts = ["a red thing", "Blue, not green", "no colour"]
    rollout = toy.sample(prompts, 3, [1, 2, 3])
    assert rollout.prompts == [prompt for prompt in prompts for _ in range(3)]
    assert rollout.tokens.shape == rollout.logprobs.shape == (9, 16)
    assert len(rollout.tokens.unique(dim=0)) == 9 and set(rollout.tokens.flatten().tolist()) == set(range(len(NAMES)))
    logprobs, entropy = toy.compute_logprobs(rollout)
    assert (logprobs - rollout.logprobs).abs().max() < 1e-5 and entropy.shape == (9, 16) and not entropy.requires_grad
    alone = toy.sample(["a BLUE thing"], 3, [2])
    assert torch.equal(alone.tokens, rollout.tokens[3:6])
    image = toy.decode(prompts, rollout.tokens, [1, 2, 3])[4]
    for i, code in enumerate(rollout.tokens[4]):  # 16 squares of 16 x 8 pixels
        pixel = image.getpixel((16 * (i % 4) + 5, 8 * (i // 4) + 5))
        assert (torch.tensor(pixel) / 255 - grpo.COLORS[NAMES[code]]).abs().max() < 1 / 255
