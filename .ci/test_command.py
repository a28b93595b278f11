"""Tests of the command line of grpo.py: several processes, kills, bad input. No network, no GPU."""
import functools, itertools, multiprocessing, os, random, re, signal, socket, subprocess, sys, threading
from pathlib import Path
from unittest import mock

import pytest, torch

import grpo
from conftest import ROOT, have_same_weights, read_adapter, read_rows
from examples.toy import Toy

TOY = f"--wrapper {ROOT}/examples/toy.py:Toy --batch-size 2 --group-size 2 --lr 1e-3 "
SERVER = multiprocessing.get_context("forkserver")  # imports all that is slow once, for all its children
SERVER.set_forkserver_preload(["diffusers", "transformers", "diffusers.pipelines.glm_image"])

def child(folder, flags, before, env):
    """The life of a process: after `before`, grpo.main. What it prints goes to log."""
    os.chdir(folder)
    os.environ.update(env)
    sys.stdout = sys.stderr = open("log", "a", buffering=1)
    grpo.RANK, grpo.WORLD_SIZE = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    before()
    grpo.main(flags.split())

def start(folder, flags, before=bool, env={}):
    process = SERVER.Process(target=child, args=(folder, flags, before, env), daemon=True)
    process.start()
    return process

def end(process):
    process.join(300)
    return process.exitcode

def run_ranks(folders, flags, ranks="01", each=("", "")):
    """A process in each folder, without torchrun: that is quick -> exit codes, what each printed. `each` has its own
    flags."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        env = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    for folder in folders:
        Path(folder, "log").unlink(missing_ok=True)
    processes = [start(folder, f"{TOY}{flags} {own}", env=env | dict(RANK=rank))
                 for folder, rank, own in zip(folders, ranks, each)]
    return [end(process) for process in processes], [Path(folder, "log").read_text() for folder in folders]

def rows_of(run):
    """Without what the clock says."""
    return [row | dict(seconds=0) for row in read_rows(run)]

def test_two_processes_do_what_one_does(tmp_path, run):
    """Three steps in one process = two steps in two and, resumed, one in one; and metrics are of both."""
    flags = "--num-iterations 2 --kl-coef .1 --max-grad-norm 1e-3 --save-every 1 "
    codes, (log, _) = run_ranks([tmp_path, tmp_path], flags + "--out two --steps 2")
    assert codes == [0, 0] and log.count("step 1 ") == log.count("step 2 ") == 1, log
    assert run("grpo", TOY + flags + "--out one --steps 3")[0] == run("grpo", "--resume two --steps 3")[0] == 0
    torch.testing.assert_close(read_adapter("one"), read_adapter("two"), rtol=0, atol=1e-5)
    assert rows_of("one") == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in rows_of("two")]

def test_an_error_in_one_process_ends_the_run_in_all(tmp_path):
    """In the third step, in the second process. The others would wait for ever; and no whole step is lost."""
    (tmp_path / "mine.py").write_text("""
import itertools, os
count = itertools.count()
def fail(images, prompts, targets):
    return [1 / (next(count) < 2 or os.environ["RANK"] == "0")] * len(images)
""")
    codes, (log, _) = run_ranks([tmp_path, tmp_path], "--reward mine.py:fail --out run")
    assert 0 not in codes and "ZeroDivisionError" in log and len(rows_of(tmp_path / "run")) == 2

def test_what_a_reward_imports_is_the_program_that_runs(tmp_path):
    """It was imported once more: its BadInput was another one, and showed a traceback."""
    (tmp_path / "p.txt").write_text("a fox\n")
    (tmp_path / "mine.py").write_text("import grpo\ndef f(images, prompts, *_): grpo.find_color(prompts[-1])\n")
    argv = [sys.executable, ROOT / "grpo.py", *f"{TOY} --reward mine.py:f --prompts p.txt --out run".split()]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (f"grpo.py: error: --reward color: there is none of {', '.join(grpo.COLORS)} in 'a fox'\n"
                           f"To go on: python {os.path.relpath(grpo.__file__, tmp_path)} --resume '{tmp_path}/run'\n")

def test_a_scripts_wrapper_of_a_file_is_known_to_commands(run):
    """They went on with GLM-Image's, in silence; that of a notebook is refused."""
    config = grpo.Config(model="toy", out="run", steps=1, group_size=2, batch_size=2, width=64, height=64)
    grpo.GRPOTrainer(config, Toy.from_pretrained("toy", config), ["red", "green"]).train()
    code, _, error = run("grpo", "--resume run --steps 2")
    assert code == 0 and len(read_rows("run")) == 2, error

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

def test_kill_nine_at_any_moment(tmp_path):
    """Ten kills of a job that repeats its command, half of them in the writing of a file: the end is that of an
    undisturbed run, bit for bit. A restart met `must be a new folder`."""
    flags = TOY + "--reward color=2 --steps 60 --save-every 3 --out "
    undisturbed = start(tmp_path, flags + "whole")
    whole, run = tmp_path / "whole", tmp_path / "run"
    run.mkdir()  # killed at once, before there was a file in it
    rng = random.Random(0)
    for number in range(10):
        share = 1 if number % 2 else rng.choice([0, 0.5])
        when = rng.randint(5, 10) if number else 2  # the second file is config.json
        before = functools.partial(kill_soon, when, share, rng.uniform(0, 0.01))
        code = end(start(tmp_path, flags + "run --resume run", before))
        assert code == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert 9 < len(rows_of(run)) < 60
    assert end(start(tmp_path, flags + "run/ --resume run")) == end(undisturbed) == 0
    assert rows_of(whole) == rows_of(run) and have_same_weights(whole, run)
    assert all([picture.read_bytes() == (run / picture.name).read_bytes() for picture in whole.glob("*.png")])

@pytest.mark.parametrize("typed", [
    "--group-size 1", "--group-size four", "--group 4", "--grop-size 4", "--offload maybe", "--adapter", "--reward wow",
    "--prompts missing.txt", "--model no-such/model", "--model broken", "--model strange", "--out done", "--resume missing"])
def test_bad_input_gets_one_line_and_exit_code_2(typed, refuse, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    files = {"broken/grpo.json": "{", "strange/grpo.json": '{"stepz": 1}', "done/notes": ""}
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    error = refuse("grpo", typed)
    flag, *value = typed.split()
    assert flag[2:] in error.replace("_", "-") or value[0] in error, error

def test_what_others_files_do_is_told(run):
    """A wrapper that exits ended with code 0 and no word; of the others one saw a traceback of grpo.py alone."""
    Path("mine.py").write_text("class Exits:\n    def from_pretrained(*_): exit()\nclass Odd:\n    defaults = [3]\n")
    assert "grpo.py: error: mine.py:Odd, `defaults`: " in run("grpo", "--wrapper mine.py:Odd")[2]
    assert "the wrapper ended the program: SystemExit" in run("grpo", "--wrapper mine.py:Exits")[0]
    with pytest.raises(grpo.BadInput, match="gone.png"):  # it was there when the run began
        grpo.compute_rewards([], ["red"], ["gone.png"], dict(mse=(grpo.reward_mse, 1)))

def test_a_run_without_its_settings_cannot_go_on_and_does_not_say_so(run):
    """The disk was full at the first file, and the last line was a command that is refused."""
    with mock.patch.object(Path, "write_bytes", side_effect=OSError(28, "No space left")):
        error = run("grpo", TOY + "--steps 1 --out run")[2]
    assert "No space left" in error.splitlines()[-1] and "To go on" not in error

def test_a_programs_paths_are_kept_whole(tmp_path, monkeypatch):
    """A Path was no JSON, after the model was loaded; a notebook's stayed relative."""
    monkeypatch.chdir(tmp_path)
    for config in (grpo.parse_args([], prompts=Path("p.txt")), grpo.Config(prompts="p.txt")):
        assert config.prompts == f"{tmp_path}/p.txt"

@pytest.mark.parametrize("flags, width", [
    ("", grpo.Config.width), (f"--model {grpo.TINY_MODEL}", 128),
    (f"--model {os.path.relpath(grpo.TINY_MODEL, '/tmp')}", 128)])
def test_the_tiny_models_settings_hold_however_it_is_named(tmp_path, monkeypatch, flags, width):
    """Named by its whole path, they were left out; and they are not for a wrapper that names no model."""
    monkeypatch.chdir("/tmp")
    (tmp_path / "mine.py").write_text("from grpo import GLMImageWrapper as Mine\n")
    assert grpo.parse_args(f"--wrapper {tmp_path}/mine.py:Mine {flags}".split()).width == width

def test_ctrl_c_says_how_to_go_on(run):
    """Without a traceback, and the command that it prints goes on. The first process alone speaks."""
    with mock.patch.object(grpo.GRPOTrainer, "log", side_effect=KeyboardInterrupt):
        code, _, _ = run("grpo", TOY + "--steps 1 --out run")
        with mock.patch.object(grpo, "RANK", 1):
            assert run("grpo", TOY + "--steps 1 --out other")[0] == 1
    assert re.fullmatch(r"\s*Stopped. To go on: python \S*grpo.py --resume '\S+/run'", code)
    assert run("grpo", "--resume " + code.split("'")[1])[0] == 0
    assert len(read_rows("run")) == 1
    with mock.patch.object(grpo.diffusers.GlmImagePipeline, "from_pretrained", side_effect=KeyboardInterrupt):
        assert run("grpo", "--out loading")[0] == "\nStopped."  # it said that --model was wrong
