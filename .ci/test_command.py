"""Tests of the command line of grpo.py: several processes, kills, bad input. No network, no GPU."""
import functools, itertools, json, multiprocessing, os, random, re, signal, socket, subprocess, sys, threading
from pathlib import Path
from unittest import mock

import pytest, torch

ROOT = Path(__file__).resolve().parent.parent
import grpo
from examples.make import tiny

SMALL = dict(width=64, height=64, batch_size=2, group_size=2, micro_batch_size=2, decode_steps=1, guidance=1)
SERVER = multiprocessing.get_context("forkserver")  # imports all that is slow once, for all its children
SERVER.set_forkserver_preload([__name__, "diffusers.pipelines.glm_image.pipeline_glm_image"])

@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Flags that name a small model of random weights; its folder brings the settings SMALL."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tiny.save(tiny.make_models(grpo.COLORS), SMALL, folder)
    return "--model", str(folder)

class Quick(grpo.GLMImageWrapper):
    """A draft of one code in place of 256."""
    @classmethod
    def from_pretrained(cls, path, config):
        wrapper = super().from_pretrained(path, config)
        wrapper.pipe.processor._get_target_shape = lambda height, width: (height // 32, width // 32, 1, 1)
        return wrapper

QUICK = f"{__file__}:Quick"

def child(folder, argv, before, env):
    """The life of a process: after `before`, grpo.main with the quick model. What it prints goes to log."""
    os.chdir(folder)
    os.environ.update(env)
    sys.stdout = sys.stderr = open("log", "a", buffering=1)
    grpo.RANK, grpo.WORLD_SIZE = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    before()
    grpo.main(argv, wrapper=QUICK)

def start(folder, *argv, before=bool, env={}):
    process = SERVER.Process(target=child, args=(folder, argv, before, env), daemon=True)
    process.start()
    return process

def end(process):
    process.join(300)
    return process.exitcode

@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*argv): `python grpo.py` with the quick model, in tmp_path -> exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a file of rewards adds its folder

    def run(*argv, wrapper=QUICK):
        capsys.readouterr()
        try:
            code = grpo.main(list(argv), wrapper=wrapper) or 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run

def rows_of(run):
    """metrics.jsonl without what the clock says."""
    rows = [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key != "seconds"} for row in rows]

def adapter_of(run):
    return torch.load(Path(run, "checkpoint.pt"), weights_only=True)["adapter"]

def test_two_processes_do_what_one_does(tmp_path, command, model):
    """Three steps in one process = two steps in two and, resumed, one in one; and metrics are of both."""
    argv = [*model, "--wrapper", QUICK, *"--num-iterations 2 --lr 1e-3 --kl-coef .1 --max-grad-norm 1e-3 --save-every 1".split()]
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split(), ROOT / "grpo.py",
                *argv, *"--out two --steps 2".split()]
    paths = dict(PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), str(ROOT), *sys.path]))
    process = subprocess.Popen(torchrun, cwd=tmp_path, env=os.environ | paths, text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command(*argv, "--out", "one", "--steps", "3")[0] == 0
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert [line.split()[0] for line in out.splitlines()][-2:] == ["step", "step"] and out.count("step 1 ") == 1
    assert command("--resume", "two", "--steps", "3")[0] == 0
    torch.testing.assert_close(adapter_of("one"), adapter_of("two"), rtol=0, atol=1e-5)
    assert rows_of("one") == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in rows_of("two")]

def test_an_error_in_one_process_ends_the_run_in_all(tmp_path, model):
    """In the third step, in the second process. The others would wait for ever; and no whole step is lost."""
    (tmp_path / "mine.py").write_text(
        "import itertools, os\ncount = itertools.count()\ndef fail(images, *_):\n"
        "    return [1 / (next(count) < 3 or os.environ['RANK'] == '0')] * len(images)\n")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        env = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    argv = [*model, *"--prompts mine.txt --reward mine.py:fail --out run".split()]
    (tmp_path / "mine.txt").write_text("red\nblue\n")
    processes = [start(tmp_path, *argv, env=env | dict(RANK=rank)) for rank in "01"]
    assert 0 not in [end(process) for process in processes]
    assert "ZeroDivisionError" in (tmp_path / "log").read_text() and len(rows_of(tmp_path / "run")) == 2

def test_what_a_reward_imports_is_the_program_that_runs(tmp_path):
    """It was imported once more: its BadInput was another one, and showed a traceback."""
    (tmp_path / "p.txt").write_text("red\na fox\n")
    (tmp_path / "mine.py").write_text("from grpo import find_color\n"
                                      "def f(images, prompts, targets): return [find_color(p).mean() for p in prompts]\n")
    done = subprocess.run([sys.executable, ROOT / "grpo.py", "--reward", "mine.py:f", "--prompts", "p.txt"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "grpo.py: error: --reward color: there is no color word in 'a fox'\n"

def kill_soon(when, share, seconds):
    """In the when-th writing of a file, with this share of its bytes on the disk; with all of them, seconds later."""
    count = itertools.count(1)
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)

    def write(path, data, original=Path.write_bytes):
        now = next(count) == when
        original(path, bytes(data)[:int(share * len(data))] if now else data)
        if now:
            threading.Timer(seconds, kill).start() if share == 1 else kill()

    Path.write_bytes = write

def test_kill_nine_at_any_moment(tmp_path, model):
    """Ten kills, half of them in the writing of a file: the end is that of an undisturbed run, bit for bit."""
    flags = [*model, "--steps", "30", "--save-every", "3"]
    whole = start(tmp_path, *flags, "--out", "whole")
    rng = random.Random(0)
    argv = [*flags, "--out", "run"]
    for number in range(10):
        share = rng.choice([0, 0.5]) if number % 2 else 1
        before = functools.partial(kill_soon, rng.randint(5, 10), share, rng.uniform(0, 0.15))
        assert end(start(tmp_path, *argv, before=before)) == -signal.SIGKILL, (tmp_path / "log").read_text()
        argv = ["--resume", "run"]
    assert 9 < len(rows_of(tmp_path / "run")) < 30
    assert end(start(tmp_path, *argv)) == end(whole) == 0
    assert rows_of(tmp_path / "whole") == rows_of(tmp_path / "run")
    whole, run = (adapter_of(tmp_path / name) for name in ("whole", "run"))
    assert all(torch.equal(weight, run[name]) for name, weight in whole.items())
    for picture in (tmp_path / "whole").glob("*.png"):
        assert picture.read_bytes() == (tmp_path / "run" / picture.name).read_bytes()

BAD = """--group-size 1; --group-size four; --group 4; --grop-size 4; --width 48; --steps 1e3; --lr nan;
    --offload maybe; --adapter; --prompts missing.txt; --prompts lost.txt; --prompts fox.txt; --reward wow;
    --reward mine.py; --reward mine.py:dull; --reward mine.py:number; --reward color=much; --reward mse; --model no-such/model;
    --model broken; --model strange; --out done; --resume missing"""

@pytest.mark.parametrize("typed", re.split(r";\s+", BAD))
def test_bad_input_gets_one_line_and_exit_code_2(typed, command, monkeypatch, tmp_path):
    """No traceback, nothing written, no model loaded in vain, and the line says what is wrong. argparse puts its usage
    before the line."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    files = {"broken/grpo.json": "{", "strange/grpo.json": '{"stepz": 1}', "done/notes": "",
             "lost.txt": "red\tlost.png", "fox.txt": "a red fox\nfox.txt\n",
             "mine.py": "number = 3"}
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    before = sorted(tmp_path.rglob("*"))
    if "--model" not in typed:
        monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", mock.Mock(side_effect=AssertionError))
    code, out, error = command(*typed.split())
    assert (code, out) == (2, "") and re.fullmatch(r"(usage: .*\n)?.*error: .+\n", error), error
    told = error.replace("_", "-")
    assert typed.split()[0][2:] in told or typed.split()[-1] in told, error
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == before

def test_a_bug_in_a_file_of_rewards_keeps_its_traceback(command, model):
    """One line would not say where in the user's own code to look."""
    Path("buggy.py").write_text("def sharp(images, prompts, targets):\n    return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        command(*model, *"--reward buggy.py:sharp --out run".split())

def test_ctrl_c_says_how_to_go_on(command, model):
    """Without a traceback, and the command that it prints goes on. The first process alone speaks."""
    argv = [*model, *"--steps 1 --out run".split()]
    with mock.patch.object(grpo.GRPOTrainer, "log", side_effect=KeyboardInterrupt):
        code, _, _ = command(*argv)
        with mock.patch.object(grpo, "RANK", 1):
            assert command(*argv[:-1], "other")[0] == 1
    assert re.fullmatch(r"\s*Stopped. To go on: python grpo.py --resume '\S+/run'", code)
    assert command("--resume", code.split("'")[1])[0] == 0 and len(rows_of("run")) == 1

def test_ctrl_c_while_the_model_is_loaded_blames_nothing(command, model):
    """It said that --model was wrong."""
    with mock.patch.object(grpo.diffusers.GlmImagePipeline, "from_pretrained", side_effect=KeyboardInterrupt):
        assert command(*model, *"--steps 1 --out run".split())[0] == "\nStopped."

def test_a_job_can_repeat_its_command(command, model, tmp_path):
    """A restart met `must be a new folder`; the command begins a run or goes on, and ends as an undisturbed one does."""
    argv = [*model, *"--steps 3 --reward color=2 --out".split()]
    assert command(*argv, "whole")[0] == 0
    (tmp_path / "run").mkdir()  # killed at once, before there was a file in it
    with mock.patch.object(grpo.GRPOTrainer, "save_samples", side_effect=KeyboardInterrupt):
        assert "Stopped" in command(*argv, "run", "--resume", "run")[0]
    for name in ("log", "update_weights"):
        original = getattr(grpo.GRPOTrainer, name)
        rest = [original, mock.Mock(side_effect=KeyboardInterrupt)]  # in the second step that is made
        with mock.patch.object(grpo.GRPOTrainer, name, lambda *args: rest.pop(0)(*args)):
            assert "Stopped" in command(*argv, "run", "--resume", "run")[0]
    assert command(*argv, "run", "--resume", "run")[0] == 0
    assert rows_of("whole") == rows_of("run")
    assert all(torch.equal(weight, adapter_of("run")[name]) for name, weight in adapter_of("whole").items())
    assert command(*argv, "other", "--resume", "run")[0] == 2
