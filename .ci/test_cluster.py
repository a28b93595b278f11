"""Tests of several machines, which are here two nodes on the loopback, each with a working directory of its own:
docs/cluster.md and examples/cluster. The stand-ins for Slurm's commands are no Slurm; a real one was tried by hand."""
import os, re, shlex, shutil, socket, subprocess, sys
from pathlib import Path
from unittest import mock

import pytest, torch, yaml

import grpo
from conftest import ROOT, have_same_weights
from test_command import TOY, end, rows_of, run_ranks, start

PAGE = (ROOT / "docs/cluster.md").read_text()
CLUSTER = ROOT / "examples/cluster"
REFUSED = "must be on a disk that all machines share"
# Commands that the files call. srun ends the other tasks if one fails, as --kill-on-bad-exit asks.
STAND_INS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "scontrol": "printf '127.0.0.1\\nelsewhere\\n'",
    "srun": """while [[ $1 == --* ]]; do shift; done
for node in node0 node1; do (cd $node && exec "$@" &> log) & done
wait -n && wait -n
code=$?
kill $(jobs -p)
wait
exit $code"""}

@pytest.fixture
def nodes(tmp_path):
    """Two working directories, with what a clone has."""
    for name in ("node0", "node1"):
        (tmp_path / name).mkdir()
        for linked in ("grpo.py", "examples", "prompts.txt"):
            (tmp_path / name / linked).symlink_to(ROOT / linked)
    return [tmp_path / "node0", tmp_path / "node1"]

def replace_port(text):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return text.replace("29500", str(free.getsockname()[1]))

def run_lines(folder, nodes, argv, **env):
    """Lines of bash on each of the nodes, where commands are the stand-ins -> exit codes. Logs are in the nodes."""
    (folder / "bin").mkdir(exist_ok=True)
    for command, code in STAND_INS.items():
        (folder / "bin" / command).write_text(f"#!/bin/bash\n{code}\n")
        (folder / "bin" / command).chmod(0o755)
    env = os.environ | dict(PATH=f"{folder}/bin:{os.environ['PATH']}", OMP_NUM_THREADS="1") | env
    processes = [subprocess.Popen(["bash", *argv], cwd=node, env=env | dict(SKYPILOT_NODE_RANK=str(rank)),
                                  stdout=(node / "log").open("w"), stderr=subprocess.STDOUT)
                 for rank, node in enumerate(nodes)]
    return [process.wait(600) for process in processes]

def run_file(name, folder, nodes, flags):
    """One of the files, its variables filled in -> exit codes."""
    text = replace_port((CLUSTER / name).read_text())
    if name == "grpo.sbatch":
        (folder / "job").write_text(text)
        return run_lines(folder, [folder], ["job", *shlex.split(flags)], SLURM_JOB_NODELIST="machine[1-2]",
                         SLURM_JOB_NAME="foxes", SLURM_JOB_ID="7", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="1",
                         SLURM_CPUS_PER_TASK="1")
    return run_lines(folder, nodes, ["-c", yaml.safe_load(text)["run"]], SKYPILOT_NODE_IPS="127.0.0.1\n10.0.0.2",
                     SKYPILOT_NUM_NODES="2", SKYPILOT_NUM_GPUS_PER_NODE="1", SKYPILOT_TASK_ID="sky-7", FLAGS=flags,
                     OUT=f"{folder}/runs/foxes")

# --- The files ----------------------------------------------------------------------------------------------
def test_the_files_have_what_their_readers_want():
    """Slurm reads #SBATCH lines only above the first command; SkyPilot 0.14 refuses a name that it does not know, and a
    run must be on the common disk."""
    head, body = (CLUSTER / "grpo.sbatch").read_text().split("\nexport", 1)
    assert "#SBATCH" not in body
    assert all(re.fullmatch(r"#(!/bin/bash|SBATCH --[a-z-]+(=\S+)?| .*)", line) for line in head.splitlines())
    task = yaml.safe_load((CLUSTER / "grpo.sky.yaml").read_text())
    assert {*task} <= {*"name num_nodes resources volumes workdir envs setup run".split()}
    assert task["num_nodes"] == 2 and task["resources"]["accelerators"] == "H100:8"
    assert all([task["envs"][name].startswith(tuple(task["volumes"])) for name in ("OUT", "HF_HOME")])
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)

def test_skypilot_reads_the_file():
    sky = pytest.importorskip("sky", reason="pip install skypilot")
    assert sky.Task.from_yaml(str(CLUSTER / "grpo.sky.yaml")).num_nodes == 2

@pytest.mark.parametrize("name", ["grpo.sbatch", "grpo.sky.yaml"])
def test_a_machine_that_dies_costs_a_step(tmp_path, nodes, name):
    """Its torchrun and its process are killed amid the third step. The job's own lines, started again, go on, and end
    as if nothing had been."""
    (tmp_path / "mine.py").write_text("""
import itertools, os, pathlib
count = itertools.count(1)
died = pathlib.Path(__file__).with_name("died")
def red(images, prompts, targets):
    if next(count) == 3 and os.environ["RANK"] == "1" and not died.exists():
        died.touch()
        os.kill(os.getppid(), 9)
        os.kill(os.getpid(), 9)
    return [image.getpixel((0, 0))[0] for image in images]
""")
    flags = f"--model toy --offload off --steps 6 --reward {tmp_path}/mine.py:red "
    whole, run = tmp_path / "whole", tmp_path / "runs/foxes"
    assert 0 not in run_file(name, tmp_path, nodes, TOY + flags)
    assert len(rows_of(run)) == 2
    assert {*run_file(name, tmp_path, nodes, TOY + flags)} == {0}, [(node / "log").read_text() for node in nodes]
    codes, logs = run_ranks(nodes, f"{flags} --out {whole}")
    assert codes == [0, 0], logs
    assert len(rows_of(run)) == 6 and rows_of(run) == rows_of(whole) and have_same_weights(run, whole)

# --- Disks --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """Folders of one run, after two steps and after three; and an empty one."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "empty").mkdir()
    for number in (2, 3):
        assert end(start(folder, TOY + f"--steps {number} --out run --resume run")) == 0
        shutil.copytree(folder / "run", folder / str(number))
    return folder

@pytest.mark.parametrize("first, second, ranks", [
    ("", "", "01"), ("empty", "empty", "01"), ("3", "", "01"), ("3", "", "10"), ("3", "2", "01"), ("3", "2", "10"),
    ("3", "3", "01")])
def test_two_disks_are_refused(nodes, steps, first, second, ranks):
    """A new run, one with folders that the job made on each, one whose folder was lost on a disk, or is older there, or
    a copy. Node 1 began with fresh weights, and its gradients were summed with trained ones, in silence."""
    for node, name in zip(nodes, (first, second)):
        if name:
            shutil.copytree(steps / name, node / "run")

    def read_all():
        return {path: path.read_bytes() for node in nodes for path in node.glob("run/**/*") if path.is_file()}

    before = read_all()
    codes, logs = run_ranks(nodes, "--steps 5 --out run --resume run", ranks)
    assert codes == [2, 2], logs
    for node, log in zip(nodes, logs):
        assert re.search(rf"^\S+: error: --out {node}/run: machines differ in .*{REFUSED}", log.splitlines()[-1]), log
    assert before == read_all()

@pytest.mark.parametrize("each", [
    ["--lr 0.001", "--lr 0.011"], ["--reward color", "--reward color=-1"],
    ["--prompts ../first.txt", "--prompts ../second.txt"]])
def test_other_flags_or_prompts_are_refused(tmp_path, nodes, each):
    """A flag that was mended in one of two terminals: gradients of one policy were summed with those of another."""
    (tmp_path / "first.txt").write_text("a red fox\na blue bird\n")
    (tmp_path / "second.txt").write_text("a red fox\na blue bird 1\n")
    codes, logs = run_ranks(nodes, "--steps 2 --out ../run", each=each)
    name = "prompts and flags" if "--prompts" in each[0] else "flags"  # it sent its readers to the disk
    assert codes == [2, 2] and all([f"/run: machines differ in their {name}: it must" in log for log in logs]), logs
    assert not (tmp_path / "run").exists()

def test_a_disk_that_remembers_what_was_not_there(tmp_path, nodes):
    """An NFS client answers for up to a minute that a folder is not there, if it was not when the process began: a job
    whose model loads faster was refused at each of its first starts, with one disk. To make the folder asks the server."""
    (tmp_path / "late.py").write_text("""
import os, pathlib
from unittest import mock
from examples.toy import Toy as Late
stat, mkdir = os.stat, os.mkdir
absent = [str(pathlib.Path(__file__).with_name("run"))] * int(os.environ["RANK"])
def look(path, *args, **kwargs):
    if any(str(path).startswith(folder) for folder in absent):
        raise FileNotFoundError(2, "as remembered", str(path))
    return stat(path, *args, **kwargs)
def make(path, *args, **kwargs):
    absent[:] = [folder for folder in absent if folder != str(path)]
    mkdir(path, *args, **kwargs)
mock.patch.multiple(os, stat=look, mkdir=make).start()
""")
    codes, logs = run_ranks(nodes, f"--wrapper {tmp_path}/late.py:Late --steps 1 --out ../run")
    assert codes == [0, 0], logs

def test_two_disks_are_refused_at_every_restart(tmp_path, nodes):
    """The page's lines for several machines: `--max-restarts` tries again what was refused. Without the variable, the
    second try may find the port of the first, and hang."""
    lines, = re.findall(r"^export HEAD.*?--resume \S+", PAGE, re.DOTALL | re.MULTILINE)
    for old, new in {"--nproc-per-node 8": "--nproc-per-node 1", "--max-restarts 3": "--max-restarts 1",
                     "HEAD=node1": "HEAD=127.0.0.1", "/shared/": ""}.items():
        assert old in lines
        lines = lines.replace(old, new)
    assert 0 not in run_lines(tmp_path, nodes, ["-c", f"{replace_port(lines)} {TOY} --model toy"])
    for node in nodes:
        assert len(re.findall(rf"^grpo.py: error: .*{REFUSED}", (node / "log").read_text(), re.MULTILINE)) == 2
        assert not (node / "runs/foxes/metrics.jsonl").exists()

def test_processes_share_a_batch_and_a_folder(refuse, monkeypatch):
    """One that was late refused the folder that the first had just made."""
    monkeypatch.setattr(grpo, "WORLD_SIZE", 16)
    monkeypatch.setattr(torch.distributed, "init_process_group", mock.Mock())
    assert "--batch_size must be a multiple of the number of GPUs, 16" in refuse("grpo", "--batch-size 6")
    Path("run").mkdir()
    monkeypatch.setattr(grpo, "RANK", 3)
    assert grpo.parse_args(["--out", "run"]).out == str(Path("run").absolute())

def test_without_out_the_first_process_names_the_folder(tmp_path, nodes):
    """$RUN, for rewards that keep files, named a folder that did not exist on all processes but the first."""
    (tmp_path / "mine.py").write_text("""
import os, pathlib
def keep(images, prompts, targets):
    pathlib.Path(os.environ["RUN"], "kept" + os.environ["RANK"]).touch()
    return range(len(images))
""")
    codes, logs = run_ranks(nodes, f"--steps 1 --reward {tmp_path}/mine.py:keep")
    assert codes == [0, 0], logs
    run, = tmp_path.glob("**/runs/*")
    assert (run / "kept0").exists() and (run / "kept1").exists() and len(rows_of(run)) == 1
