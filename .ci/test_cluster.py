"""Tests of examples/cluster on two nodes of the loopback; the stand-ins for Slurm's commands are no Slurm."""
import os, shlex, socket, subprocess, sys

import pytest, yaml

from conftest import ROOT, have_same_weights, read_rows
from test_command import TOY

CLUSTER = ROOT / "examples/cluster"
# What the files call. srun ends the other tasks if one fails, as --kill-on-bad-exit asks.
STAND_INS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "scontrol": "printf '127.0.0.1\\nelsewhere\\n'",
    "srun": """while [[ $1 == --* ]]; do shift; done
for rank in 0 1; do (cd node$rank && SLURM_NODEID=$rank exec "$@" &> log) & done
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

def run_sbatch(folder, flags):
    """-> exit codes, the run's folder."""
    (folder / "job").write_text(replace_port((CLUSTER / "grpo.sbatch").read_text()))
    env = dict(JOB_NODELIST="machine[1-2]", JOB_NAME="foxes", JOB_ID="7", NNODES="2", GPUS_ON_NODE="1",
               CPUS_PER_TASK="1", ARRAY_TASK_ID="3")
    codes = run_lines(folder, [folder], ["job", *shlex.split(flags)], **{f"SLURM_{k}": v for k, v in env.items()})
    return codes, folder / "runs/foxes-3"

def run_sky(folder, flags):
    text = yaml.safe_load(replace_port((CLUSTER / "grpo.sky.yaml").read_text()))["run"]
    text = text.replace("/shared/", "")  # no common disk
    nodes = [folder / "node0", folder / "node1"]
    env = dict(NODE_IPS="127.0.0.1\n10.0.0.2", NUM_NODES="2", NUM_GPUS_PER_NODE="1", TASK_ID="sky-7")
    codes = run_lines(folder, nodes, ["-c", text], FLAGS=flags, **{f"SKYPILOT_{k}": v for k, v in env.items()})
    return codes, nodes[0] / "runs/sky-7"

def test_a_machine_that_dies_costs_a_step(tmp_path, nodes):
    """Amid the third step of a job of Slurm. The same words go on, and end as SkyPilot's, which nothing disturbed."""
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
    flags = f"{TOY}--model toy --offload off --steps 6 --reward {tmp_path}/mine.py:red"
    codes, run = run_sbatch(tmp_path, flags)
    assert 0 not in codes and len(read_rows(run)) == 2, (nodes[0] / "log").read_text()
    for start in (run_sbatch, run_sky):
        codes, last = start(tmp_path, flags)
        assert {*codes} == {0}, [(node / "log").read_text() for node in nodes]
    assert len(read_rows(run)) == 6 and read_rows(run) == read_rows(last) and have_same_weights(run, last)
    assert {path.name for path in nodes[1].iterdir()} == {"grpo.py", "examples", "prompts.txt", "log"}
