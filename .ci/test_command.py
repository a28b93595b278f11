"""Tests of command lines: grpo.py in several processes, kills, errors, machines."""
import functools, itertools, multiprocessing, os, random, signal, socket, sys, threading
from pathlib import Path
from unittest import mock

import pytest, torch

import grpo
from conftest import ROOT, have_same_weights, read_adapter, read_rows

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

def run_ranks(folders, flags, each=("", "")):
    """A process in each folder, with flags of its own -> exit codes, what each printed."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        env = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    for folder in folders:
        Path(folder, "log").unlink(missing_ok=True)
    processes = [start(folder, f"{TOY}{flags} {own}", env=env | dict(RANK=str(rank)))
                 for rank, (folder, own) in enumerate(zip(folders, each))]
    return [end(process) for process in processes], [Path(folder, "log").read_text() for folder in folders]

def kill_soon(when, share, seconds=0):
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
    """Six kills, half of them in the writing of a file: the end is that of an undisturbed run, bit for bit."""
    flags = TOY + "--reward color=2 --steps 60 --save-every 3 --out "
    undisturbed = start(tmp_path, flags + "whole")
    whole, run = tmp_path / "whole", tmp_path / "run"
    run.mkdir()  # killed at once, before there was a file in it
    rng = random.Random(0)
    for number in range(6):
        share = 1 if number % 2 else rng.choice([0, 0.5])
        when = rng.randint(5, 15) if number else 2  # the second file is config.json
        before = functools.partial(kill_soon, when, share, rng.uniform(0, 0.01))
        code = end(start(tmp_path, flags + "run --resume run", before))
        assert code == -signal.SIGKILL, (tmp_path / "log").read_text()
    assert 9 < len(read_rows(run)) < 60
    assert end(start(tmp_path, flags + "run/ --resume run")) == end(undisturbed) == 0
    assert read_rows(whole) == read_rows(run) and have_same_weights(whole, run)
    assert all([picture.read_bytes() == (run / picture.name).read_bytes() for picture in whole.glob("*.png")])

def test_two_machines_without_a_common_disk_do_what_one_does(tmp_path, run):
    """The second, with other flags and an older folder of this name, reads and writes nothing."""
    flags = "--num-iterations 2 --kl-coef .1 --max-grad-norm 1e-3 --save-every 1 "
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    assert run("grpo", f"{TOY}{flags} --seed 5 --steps 1 --out node1/run")[0] == 0
    there = {path: path.read_bytes() for path in nodes[1].rglob("*") if path.is_file()}
    other = ("", "--lr 9 --seed 3 --prompts nowhere.txt --reward wow")
    codes, (log, silent) = run_ranks(nodes, flags + "--out run --resume run --steps 4", other)
    assert codes == [0, 0] and "step 4 " in log and "step" not in silent, (log, silent)
    (nodes[1] / "log").unlink()
    assert there == {path: path.read_bytes() for path in nodes[1].rglob("*") if path.is_file()}
    one, two = "one", nodes[0] / "run"
    assert run("grpo", TOY + flags + "--out one --steps 5")[0] == run("grpo", f"--resume {two} --steps 5")[0] == 0
    torch.testing.assert_close(read_adapter(one), read_adapter(two), rtol=0, atol=1e-5)
    assert read_rows(one) == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in read_rows(two)]

def test_an_error_in_one_process_ends_the_run_in_all(tmp_path):
    """In the third step, in the second process: the others do not wait for ever, and no whole step is lost."""
    (tmp_path / "mine.py").write_text("""
import itertools, os
count = itertools.count()
def fail(images, prompts, targets):
    return [1 / (next(count) < 2 or os.environ["RANK"] == "0")] * len(images)
""")
    codes, (log, _) = run_ranks([tmp_path, tmp_path], "--reward mine.py:fail --out run")
    assert 0 not in codes and "ZeroDivisionError" in log and len(read_rows(tmp_path / "run")) == 2

def test_the_tiny_model_takes_one_thread(run, monkeypatch):
    """Two gain nothing on it, and wait for each other where the CPU is busy."""
    monkeypatch.setattr(grpo.GRPOTrainer, "train", lambda self: None)
    with mock.patch.object(torch, "set_num_threads") as threads:
        assert run("grpo", TOY)[0] == run("grpo", f"--model {grpo.TINY_MODEL}")[0] == 0
    threads.assert_called_once_with(1)

def test_paths_are_absolute_and_may_have_any_characters(tmp_path, monkeypatch):
    """A ~ is the home; and the folder that one is in may have , and = in its name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "lr=1,v=2"
    folder.mkdir()
    monkeypatch.chdir(folder)
    assert grpo.Prompt("fox", "~/t.png").target == f"{tmp_path}/t.png"
    config = grpo.parse_args("--out ~/new --prompts p.txt --reward color=0,plain.py:f=.5,~/x.py:g".split())
    assert (config.out, config.prompts) == (f"{tmp_path}/new", f"{folder}/p.txt")
    assert config.reward == f"color=0,{folder}/plain.py:f=.5,{tmp_path}/x.py:g"

def test_toy_learns_from_nothing(run):
    code, _, error = run("grpo", f"--wrapper {ROOT}/examples/toy.py:Toy --out run")
    rewards = [row["reward"] for row in read_rows("run")]
    assert code == 0 and sum(rewards[:5]) / 5 < 0.65 and sum(rewards[-5:]) / 5 > 0.95, error
