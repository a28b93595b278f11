"""Tests of the command line of grpo.py: bad input, failures, kills, several processes. Run from the root:
    python -m pytest -q .ci/test_command.py
"""
import dataclasses, functools, inspect, itertools, json, multiprocessing, os, random, re, shutil, signal
import socket, subprocess, sys, threading, traceback
from pathlib import Path
from unittest import mock
import diffusers, pytest, torch
import numpy as np
from PIL import Image
import grpo
from test_grpo import (HERE, SMALL_MODEL, WRAPPER, adapter_of, assert_files, assert_same_run, finished,
                       make_pipe, rows_of, step_of)

# --- The command line: several GPUs (here of the CPU), failures and kills first -----------------------------
SMALL = dict(width=64, height=64, batch_size=2, group_size=2, micro_batch_size=2, decode_steps=1, guidance=1)
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
SERVER = multiprocessing.get_context("forkserver")  # imports all that is slow once, for all its children
SERVER.set_forkserver_preload([__name__, "diffusers.pipelines.glm_image.pipeline_glm_image"])

@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Flags that name a small model of random weights; its folder brings the settings SMALL."""
    folder = tmp_path_factory.mktemp("model")
    make_pipe().save_pretrained(folder)
    (folder / "grpo.json").write_text(json.dumps(SMALL))
    return "--model", str(folder)

def load_quick(path, config):
    """A draft of one code in place of 256."""
    wrapper = WRAPPER.from_pretrained(path, config)
    wrapper.pipe.processor._get_target_shape = lambda height, width: (height // 32, width // 32, 1, 1)
    return wrapper

def child(folder, argv, before, env):
    """The life of a process: after `before`, grpo.main with the quick model. What it prints goes to log."""
    os.chdir(folder)
    os.environ.update(env)
    sys.stdout = sys.stderr = open("log", "a", buffering=1)
    grpo.RANK, grpo.WORLD_SIZE = int(env.get("RANK", 0)), int(env.get("WORLD_SIZE", 1))
    before()
    grpo.main(argv, load_quick)

def start(folder, *argv, before=bool, env={}):
    process = SERVER.Process(target=child, args=(folder, argv, before, env), daemon=True)
    process.start()
    return process

def end(process):
    return process.join(300) or process.exitcode

@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*argv): `python grpo.py` with the quick model, in tmp_path -> exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a file of rewards adds its folder

    def run(*argv, load_model=load_quick):
        capsys.readouterr()
        try:
            code = grpo.main(list(argv), load_model) or 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run

def test_two_gpus_do_what_one_does(tmp_path, command, model):
    """Three steps in one process = two steps in two and, resumed, one in one; and metrics are of all GPUs."""
    (tmp_path / "two.py").write_text(f"import {__name__} as t; t.grpo.main(load_model=t.load_quick)")
    argv = [*model, *"--num-iterations 2 --lr 1e-3 --kl-coef .1 --max-grad-norm 1e-3 --save-every 1".split()]
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2 two.py".split(),
                *argv, *"--out two --steps 2".split()]
    paths = dict(PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), str(HERE), *sys.path]))
    process = subprocess.Popen(torchrun, cwd=tmp_path, env=os.environ | paths, **PIPES)
    assert command(*argv, "--out", "one", "--steps", "3")[0] == 0
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert [line.split()[0] for line in out.splitlines()] == ["model:", "step", "step"]  # once, not twice
    assert command("--resume", "two", "--steps", "3")[0] == 0
    one, two = (adapter_of(tmp_path / out, 3) for out in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    one, two = (rows_of(tmp_path / out) for out in ("one", "two"))
    assert one == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in two]

def test_an_error_on_one_gpu_ends_the_run_on_all(tmp_path, model):
    """In the third step, on the second GPU. The others would wait for ever; and no whole step is lost."""
    (tmp_path / "mine.py").write_text(
        "import itertools, os\ncount = itertools.count()\ndef fail(images, *_):\n"
        "    return [1 / (next(count) < 2 or os.environ['RANK'] == '0')] * len(images)\n")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        env = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    argv = [*model, *"--reward mine.py:fail --out run".split()]
    processes = [start(tmp_path, *argv, env=env | dict(RANK=rank)) for rank in "01"]
    assert 0 not in [end(process) for process in processes]
    assert "ZeroDivisionError" in (tmp_path / "log").read_text() and step_of(tmp_path / "run") == 2

def test_gpus_meet_over_gloo_and_part_in_order(command, model, monkeypatch):
    """NCCL would wait for a process that failed; without a farewell one could abort at the end of a run."""
    gpus = mock.Mock(all_gather_object=lambda rows, row: rows.__setitem__(slice(2), [row, row]))
    for name in "init_process_group all_reduce all_gather_object destroy_process_group".split():
        monkeypatch.setattr(torch.distributed, name, getattr(gpus, name))
    assert command(*model, *"--steps 1 --out one".split())[0] == 0 and not gpus.mock_calls
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    assert command(*model, *"--steps 1 --out two".split())[0] == 0
    assert (gpus.mock_calls[0], gpus.mock_calls[-1]) == (
        mock.call.init_process_group("gloo"), mock.call.destroy_process_group())

def test_a_failure_in_the_first_step_can_be_resumed(command, model):
    """Of a run, here, that begins with the adapters of another, whose folder may be gone by then."""
    assert command(*model, *"--out a --steps 1 --lr .03".split())[0] == 0
    adapter = adapter_of(Path("a"), 1)
    argv = [*model, *"--adapter a/adapter_00001 --lr 0 --steps 2 --out".split()]
    assert command(*argv, "whole")[0] == 0
    interrupt = mock.patch.object(grpo, "compute_rewards", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        command(*argv, "run")
    assert step_of(Path("run")) == 0 and "new folder" in command(*argv, "run")[2]
    shutil.rmtree("a")
    assert command("--resume", "run")[0] == 0
    assert_files(Path("run"), 0, 2)
    assert_same_run(Path("run"), Path("whole"))
    assert all(torch.equal(weight, adapter[name]) for name, weight in adapter_of(Path("run"), 2).items())
    assert rows_of(Path("run"))[0]["kl"] > 1e-6  # the reference has none of them

def kill_soon(when, share, seconds):
    """In the when-th checkpoint with this share of its bytes on the disk; with all of them, seconds later."""
    count = itertools.count(1)
    kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)

    def save(state, path, original=torch.save):
        original(state, path)
        if next(count) == when:
            os.truncate(path, int(share * os.path.getsize(path)))
            threading.Timer(seconds, kill).start() if share == 1 else kill()

    torch.save = save

def test_kill_nine_at_any_moment(tmp_path, model):
    """12 kills, half of them in the writing of checkpoint.pt: the end is that of an undisturbed run."""
    flags = [*model, "--steps", "48", "--save-every", "3"]
    whole = start(tmp_path, *flags, "--out", "whole")
    rng = random.Random(0)
    argv = [*flags, "--out", "run"]
    for kill in range(12):
        share = rng.choice([0, 0.5]) if kill % 2 else 1
        before = functools.partial(kill_soon, rng.randint(2, 3), share, rng.uniform(0, 0.15))
        assert end(start(tmp_path, *argv, before=before)) == -signal.SIGKILL, (tmp_path / "log").read_text()
        argv = ["--resume", "run"]
    assert 11 < step_of(tmp_path / "run") < 48
    assert end(start(tmp_path, *argv)) == end(whole) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")

@pytest.mark.parametrize("out, code", [(["--out", "same"], 2), ([], 0)])
def test_runs_that_begin_at_once_never_share_a_folder(command, model, monkeypatch, out, code):
    """One begins while the other loads its model; once both wrote into one folder."""
    monkeypatch.setattr(grpo.time, "strftime", lambda name: "now")  # both in the same second
    monkeypatch.setattr(os, "getpid", lambda count=itertools.count(): next(count))
    other = lambda path, config: command(*model, "--steps", "1", *out) and load_quick(path, config)
    done, _, error = command(*model, "--steps", "1", *out, load_model=other)
    assert done == code and ("new folder" in error) == (code == 2)
    for folder in ("runs/now-0", "runs/now-1") if not out else ("same",):
        assert_files(Path(folder), 0, 1)

NUMBERS = [name for name, kind in inspect.get_annotations(grpo.Config).items() if kind in (int, float, float | None)]
FLAG = """--group-size 1, --group-size four, --group 4, --grop-size 4, --step 8, --width 0, --width 48,
    --batch-size 0, --steps 0, --steps 1e3, --seed 99999999999999999999, --lr inf, --clip-range-high .3,
    --top-p 0, --top-p 1.5, --max-grad-norm 0, --temperature 0, --offload maybe, --adapter, --adapter ,
    --reward , --resume """
VALUE = """extra, --prompts missing.txt, --prompts folder, --reward wow, --reward absent/mine.py,
    --reward mine.py, --reward mine.py:dull, --reward mine.py:two, --reward mine.py:number, --model no-such,
    --reward color=much, --model no-such/model, --model ./no-such,
    --model /no/such/folder, --model a/b/c, --model good.txt, --model no-json, --model binary, --model list,
    --model folder, --adapter missing, --adapter done, --adapter good.txt, --adapter half, --out done,
    --out ., --out good.txt"""
BAD = [  # what is typed, and a word of the answer
    *[(f"--{name} {value}", name.replace("_", "-")) for name in NUMBERS for value in (-1, "nan")],
    *[(typed, typed.split()[0][2:]) for typed in re.split(r",\s+", FLAG)],
    *[(typed, typed.split()[-1]) for typed in re.split(r",\s+", VALUE)],
    ("--prompts text.txt", "image"), ("--prompts plain.txt", "'a fox'"), ("--prompts comments.txt", "prompt"),
    ("--prompts latin1.txt", "utf-8"), ("--prompts lost.txt", "the target of 'red'"), ("--prompts lost.txt", "lost.png"),
    ("--prompts torn.txt", "the target of 'a fox'"), ("--prompts mixed.txt --reward mse", "target"),
    ("--reward color,", "reward"), ("--reward mse", "target"),
    ("--model range", "--steps 0"), ("--model words", "many"), ("--reward nowhere.py:sharp", "nowhere.py"),
    *[(f"--resume {name}", "no run") for name in "nowhere folder torn list bomb strange other".split()],
    ("--resume other", "old-flag"), ("--resume done", "steps"), ("--resume done --steps 4", "steps"),
    *[(f"--resume done --steps 9 {typed}", typed.split()[0]) for typed in (
        "--seed 1", "--lora-rank 2", "--model folder", "--out new", "--adapter adapter", "--lr nan",
        "--batch-size 3", "--prompts more.txt", "--prompts missing.txt", "--width 48", "--grop-size 3")],
    ("--resume done --steps 9 --reward mse", "target"), ("--adapter folder", "adapter-config"),
    ("--adapter adapter --lora-rank 8", "--lora-rank 4"), ("--adapter alpha --lora-rank 4", "alpha")]

@pytest.fixture(scope="module")
def bad_files(finished, tmp_path_factory):
    """All that BAD names, in a folder. `other` is of a copy with another setting; a bomb makes a folder."""
    folder = tmp_path_factory.mktemp("bad")
    done = torch.load(finished / "checkpoint.pt", weights_only=True)
    done |= dict(prompts=["a red fox"], config=done["config"] | dict(prompts=str(folder / "good.txt")))
    other = done | {"config": done["config"] | {"old_flag": 1}}
    bomb = type("Bomb", (), dict(__reduce__=lambda self: (os.mkdir, ("owned",))))()
    runs = dict(done=done, other=other, list=[1, 2, 3], strange={"weights": 1}, bomb=bomb, torn=0)
    for name, state in runs.items():
        (folder / name).mkdir()
        torch.save(state, folder / name / "checkpoint.pt")
    (folder / "torn/checkpoint.pt").write_bytes((folder / "done/checkpoint.pt").read_bytes()[:9999])
    lora = grpo.LoRA(torch.nn.Sequential(torch.nn.Linear(2, 2)), "0", rank=4)
    for name, alpha in dict(adapter=8, half=8, alpha=4).items():
        lora.config["lora_alpha"] = alpha
        lora.save(folder / name)
    os.truncate(folder / "half/adapter_model.safetensors", 99)
    Image.effect_noise((64, 64), 9).save(folder / "t.png")
    files = {
        "no-json/grpo.json": b"{", "binary/grpo.json": b"\xff\xfe", "list/grpo.json": b"[1]",
        "keys/grpo.json": b'{"stepz": 1}', "range/grpo.json": b'{"steps": 0}', "folder/nothing": b"",
        "words/grpo.json": b'{"steps": "many"}', "good.txt": b"a red fox\n", "comments.txt": b"# only\n\n",
        "lost.txt": b"# no\n\nred\tlost.png\n", "text.txt": b"a fox\tgood.txt\n", "latin1.txt": b"caf\xe9",
        "torn.txt": b"a fox\ttorn.png\n", "mixed.txt": b"a\tt.png\nb\n", "more.txt": b"red\nblue\n",
        "plain.txt": b"a red fox\na fox\n",
        "mine.py": b"def sharp(images, *_): return [1.0] * len(images)\ndef two(a, b): return a\nnumber = 3"}
    files["torn.png"] = (folder / "t.png").read_bytes()[:999]
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text)
    return folder

@pytest.mark.parametrize("typed, word", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(bad_files, command, monkeypatch, typed, word):
    """No traceback, nothing written, and no model loaded in vain. argparse puts its usage before the line."""
    monkeypatch.chdir(bad_files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    load_model = WRAPPER.from_pretrained if typed[:7] == "--model" else mock.Mock(side_effect=AssertionError)
    before = sorted(bad_files.rglob("*"))
    code, out, error = command(*typed.split(" "), load_model=load_model)
    assert (code, out) == (2, "") and re.fullmatch(r"(usage: python .*\n)?.*error: .+\n", error), error
    assert word in error.replace("_", "-") and sorted(bad_files.rglob("*")) == before, error

@pytest.mark.parametrize("code", ["def sharp(:", "raise ValueError", "open('nowhere')", "1 / 0",
                                  "def sharp(*_): raise ValueError", "def sharp(*_): open('nowhere')"])
def test_a_bug_in_a_file_of_rewards_keeps_its_traceback(command, model, code):
    """While it is loaded or used: one line would not say where in the user's own code to look."""
    Path("mine.py").write_text(code)
    with pytest.raises((SyntaxError, ValueError, OSError, ZeroDivisionError)) as error:
        command(*model, *"--reward mine.py:sharp --out run".split())
    assert 'mine.py", line 1' in "".join(traceback.format_exception(error.value))

def test_a_bug_in_the_loading_of_a_model_keeps_its_traceback(command, model, monkeypatch):
    """Which is no answer to what was typed; and a wrapper of one's own may raise what it likes."""
    with pytest.raises(OSError):
        command(*model, load_model=mock.Mock(side_effect=OSError))
    monkeypatch.setattr(diffusers.GlmImagePipeline, "from_pretrained", mock.Mock(side_effect=TypeError))
    with pytest.raises(TypeError):
        command(*model)

def test_a_file_of_rewards_is_loaded_once_and_mse_has_its_targets(command, model):
    """A file that loads a CLIP would fill the memory with a second one."""
    Image.new("RGB", (9, 5)).save("t.png")
    Path("prompts.txt").write_text("a fox\tt.png\n")
    Path("mine.py").write_text(
        "open('loads', 'a').write('x')\ndef one(images, *_): return [1] * len(images)\ntwo = one")
    flags = "--prompts prompts.txt --reward mse=2,mine.py:one,mine.py:two=.5 --steps 1 --out run"
    assert command(*model, *flags.split())[0] == 0 and Path("loads").read_text() == "x"
    row, = rows_of(Path("run"))
    assert row["reward"] == pytest.approx(2 * row["reward/mse"] + 1.5, abs=1e-6) != 1.5

def test_a_run_goes_on_with_its_own_settings_but_for_what_is_typed(command, model):
    """A notebook went on with a kl_coef of 0.01 where the run had 0, or with a mixture of two runs."""
    flags = "--steps 1 --out run --temperature 0.7 --lr 1e-3 --kl-coef 0 --group-size 3"  # not grpo.json's
    assert command(*model, *flags.split())[0] == 0
    saved = torch.load("run/checkpoint.pt", weights_only=True)["config"]
    assert saved["prompts"] is None and saved["temperature"] == 0.7  # None, so that a clone may be moved
    shutil.copy(HERE / "prompts.txt", "mine.txt")  # the same prompts
    assert command(*model, *"--resume run --prompts mine.txt --steps 2 --lr 5e-5".split())[0] == 0
    state = torch.load("run/checkpoint.pt", weights_only=True)
    assert state["config"] == saved | dict(prompts="mine.txt", steps=2, lr=5e-5, resume="run", out=None)
    assert state["optimizer"]["param_groups"][0]["lr"] == 5e-5 == grpo.Config.lr
    assert [row["step"] for row in rows_of(Path("run")) if "kl" not in row] == [1, 2]

def test_settings_come_from_what_is_typed_the_model_and_given_defaults(model, tmp_path):
    """In this order, also where a default is typed; and they reach the wrapper."""
    given = dict(lr=1.0, steps=7, batch_size=6, width=96)
    typed = [*model, *"--width 512 --steps=9 --top_p .5 --temperature .7 --offload off".split()]
    own = SMALL | dict(model=model[1], width=512, steps=9, top_p=0.5, temperature=0.7, offload="off")
    assert grpo.parse_args(typed, **given) == grpo.Config(**own, lr=1.0)
    assert grpo.parse_args(["--model", str(tmp_path)], **given) == grpo.Config(model=str(tmp_path), **given)
    assert grpo.parse_args([], model=model[1]) == grpo.Config(**SMALL, model=model[1])
    spy = mock.Mock(side_effect=InterruptedError)
    with mock.patch.object(sys, "argv", ["grpo.py", *typed]), pytest.raises(InterruptedError):
        grpo.main(load_model=spy, lr=3.0)
    spy.assert_called_once_with(model[1], grpo.Config(**own, lr=3.0))

def test_help_shows_every_flag_once_and_what_it_means(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    _, out, _ = command("--help")
    for field in dataclasses.fields(grpo.Config):
        line, = re.findall(rf" --{field.name} [A-Za-z_,{{}}]+ (.*?)\(default: (.*?)\)", " ".join(out.split()))
        assert line[1] == str(field.default) and len(line[0]) > 10
