# Joined to test_grpo.py, this block of imports goes: there, all of these names are at hand.
import dataclasses, functools, json, multiprocessing, os, random, re, shutil, signal, socket, subprocess
import sys, threading, time, traceback
from pathlib import Path
from unittest import mock
import diffusers, pytest, torch
import numpy as np
from PIL import Image
import grpo
from examples import make_tiny
from test_grpo import (
    HERE, WRAPPER, adapter_of, assert_files, assert_same_run, finished, rows_of, step_of)

# --- The command line: several GPUs (here of the CPU), failures and kills first -----------------------------
SMALL = dict(width=64, height=64, batch_size=2, group_size=2, micro_batch_size=2, decode_steps=1, guidance=1.0)
ENV = os.environ | {
    "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
SERVER = multiprocessing.get_context("forkserver")  # imports all that is slow once, for all its children
SERVER.set_forkserver_preload([__name__, "diffusers.pipelines.glm_image.pipeline_glm_image"])

@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The flags of a run of the small model, of random weights, whose folder brings the settings SMALL."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    make_tiny.make_models(grpo.COLORS).save_pretrained(folder)
    (folder / "grpo.json").write_text(json.dumps(SMALL))
    return "--model", str(folder)

def load_quick(path, config):
    """Its draft has one code, not 256."""
    wrapper = WRAPPER.from_pretrained(path, config)
    wrapper.pipe.processor._get_target_shape = lambda height, width: (height // 32, width // 32, 1, 1)
    return wrapper

def child(folder, argv, before, env):
    """The life of a process: grpo.main with the quick model, after `before`. What it prints goes to a file."""
    os.chdir(folder)
    os.environ.update(env)
    sys.stdout = sys.stderr = open("log", "a", buffering=1)
    grpo.RANK = int(os.environ.get("RANK", 0))
    grpo.WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
    before()
    grpo.main(argv, load_quick)

def start(folder, *argv, before=bool, env={}):
    process = SERVER.Process(target=child, args=(folder, argv, before, env), daemon=True)
    with mock.patch.dict(os.environ, ENV):
        process.start()
    return process

def end(process):
    process.join(300)
    return process.exitcode

@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*argv): `python grpo.py` with the quick model, in tmp_path -> exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

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
    script = f"import {__name__} as tests; tests.grpo.main(load_model=tests.load_quick)"
    (tmp_path / "two.py").write_text(script)
    argv = [*model, *"--num-iterations 2 --lr 1e-3 --kl-coef .1 --max-grad-norm 1e-3 --save-every 1".split()]
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split(),
                "two.py", *argv, *"--out two --steps 2".split()]
    path = os.pathsep.join([str(Path(__file__).parent), ENV["PYTHONPATH"]])
    process = subprocess.Popen(torchrun, cwd=tmp_path, env=ENV | {"PYTHONPATH": path}, **PIPES)
    assert command(*argv, "--out", "one", "--steps", "3")[0] == 0
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert [line.split()[0] for line in out.splitlines()] == ["model:", "step", "step"]  # once, not twice
    assert command("--resume", "two", "--steps", "3")[0] == 0
    one, two = (adapter_of(tmp_path / out, 3) for out in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    rows = [rows_of(tmp_path / out) for out in ("one", "two")]
    assert rows[0] == [pytest.approx(row, rel=1e-3, abs=1e-5) for row in rows[1]]

def fail_on_one():
    """In the third step, on the second GPU, however often anything else is called till then."""
    def train_step(trainer, *args, original=grpo.GRPOTrainer.train_step):
        return 1 / 0 if grpo.RANK == 1 and len(trainer.history) == 2 else original(trainer, *args)

    grpo.GRPOTrainer.train_step = train_step

def test_an_error_on_one_gpu_ends_the_run_on_all(tmp_path, model):
    """The others would wait for ever; and no whole step is lost."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        env = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    processes = [start(tmp_path, *model, "--out", "run", before=fail_on_one, env=env | dict(RANK=rank))
                 for rank in "01"]
    assert 0 not in [end(process) for process in processes]
    assert "ZeroDivisionError" in (tmp_path / "log").read_text() and step_of(tmp_path / "run") == 2

def test_gpus_meet_over_gloo_and_part_in_order(command, model, monkeypatch):
    """NCCL would wait for a process that failed; without a farewell one could abort at the end of a run."""
    gather = lambda rows, row: rows.__setitem__(slice(2), [row, row])
    spies = {name: mock.Mock() for name in ("init_process_group", "all_reduce", "destroy_process_group")}
    for name, spy in (spies | dict(all_gather_object=gather)).items():
        monkeypatch.setattr(torch.distributed, name, spy)
    assert command(*model, *"--steps 1 --out one".split())[0] == 0
    assert not any(spy.called for spy in spies.values())
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    assert command(*model, *"--steps 1 --out two".split())[0] == 0
    spies["init_process_group"].assert_called_once_with("gloo")
    spies["destroy_process_group"].assert_called_once_with()

def test_a_failure_in_the_first_step_can_be_resumed(command, model):
    """It was refused, as its folder exists, "or --resume it", which was refused too, as it held no run."""
    argv = [*model, *"--steps 2 --out".split()]
    interrupt = mock.patch.object(grpo, "compute_rewards", side_effect=KeyboardInterrupt)
    with interrupt, pytest.raises(KeyboardInterrupt):
        command(*argv, "run")
    assert step_of(Path("run")) == 0 and "new folder" in command(*argv, "run")[2]
    assert command("--resume", "run")[0] == command(*argv, "whole")[0] == 0
    assert_files(Path("run"), 0, 2)
    assert_same_run(Path("run"), Path("whole"))

def test_a_run_begins_with_the_adapters_of_another(command, model):
    """It is the only way on to other prompts; the reference stays the model without any."""
    assert command(*model, *"--out a --steps 1 --lr .03".split())[0] == 0
    adapter = adapter_of(Path("a"), 1)
    assert command(*model, *"--out b --steps 1 --lr 0 --adapter a/adapter_00001".split())[0] == 0
    assert all(torch.equal(weight, adapter[name]) for name, weight in adapter_of(Path("b"), 1).items())
    assert rows_of(Path("b"))[0]["kl"] > 1e-6 == 1e-6 + rows_of(Path("a"))[0]["kl"]
    shutil.rmtree("a")  # the run has its own copy
    assert command(*"--resume b --steps 2 --lr .01".split())[0] == 0
    assert torch.load("b/checkpoint.pt", weights_only=True)["config"]["adapter"] == "a/adapter_00001"
    assert not all(torch.equal(weight, adapter[name]) for name, weight in adapter_of(Path("b"), 2).items())
    shutil.copytree("b/adapter_00002", "of_others")
    layer = "model.language_model.layers.7.mlp.down_proj"  # the model has no such layer
    other = grpo.LoRA(torch.nn.ModuleDict(), "", 32)
    other.weights = {f"base_model.model.{layer}.lora_A.weight": torch.zeros(32, 2)}
    other.save("of_others")
    code, _, error = command(*model, *"--out c --adapter of_others".split())
    assert code == 2 and "other layers" in error and not os.path.exists("c")

def kill_soon(when, share, seconds):
    """In the when-th checkpoint with this share of its bytes on the disk; with all of them, seconds later."""
    save = torch.save
    calls = []

    def kills(state, path):
        save(state, path)
        calls.append(path)
        if len(calls) == when and share < 1:
            os.truncate(path, int(share * os.path.getsize(path)))
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == when:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

    torch.save = kills

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
    assert 12 < step_of(tmp_path / "run") < 48
    assert end(start(tmp_path, *argv)) == end(whole) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")

def test_runs_that_begin_in_the_same_second_never_share_a_folder(command, model, monkeypatch):
    """The second one begins while the first one loads its model; once both wrote into one folder."""
    clock = mock.Mock(wraps=time, sleep=mock.Mock())
    clock.strftime = lambda format: time.strftime(format, time.gmtime(clock.sleep.call_count))
    monkeypatch.setattr(grpo, "time", clock)
    for out, code in ((["--out", "same"], 2), ([], 0)):
        argv = [*model, "--steps", "1", *out]
        second = []

        def load_model(path, config):
            second.extend(command(*argv))
            return load_quick(path, config)

        first = command(*argv, load_model=load_model)
        assert (first[0], second[0]) == (code, 0) and ("new folder" in first[2]) == (code == 2)
    for folder in "same", "runs/19700101-000000", "runs/19700101-000001":
        assert_files(Path(folder), 0, 1)
        assert step_of(Path(folder)) == 1

def test_a_folder_is_claimed_by_one_of_many(tmp_path):
    """At the same moment: a look whether it exists, before it is made, lets several through."""
    claimed = []
    barrier = threading.Barrier(8)

    def claim():
        for i in range(30):
            barrier.wait()
            try:
                claimed.append(str(grpo.claim_folder(tmp_path / f"runs{i}/run")))
            except grpo.BadInput:
                pass

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == sorted(str(tmp_path / f"runs{i}/run") for i in range(30))

@pytest.fixture(scope="session", autouse=True)
def first_command(request, tmp_path_factory):
    """The README's command, its own process, every default: it runs beside all tests, as it takes longest."""
    if not any("the_first_command" in item.name for item in request.session.items):
        yield
        return
    folder = tmp_path_factory.mktemp("first")
    argv = [sys.executable, HERE / "grpo.py", *"--group-size 4 --out out".split()]
    with subprocess.Popen(argv, cwd=folder, env=ENV, **PIPES) as process:
        yield process, folder / "out"
        process.kill()

def test_the_first_command_learns_and_leaves_what_the_readme_says(first_command, command, monkeypatch):
    """Rewards rise by far more than luck, all fixed pictures but one at most get their colour; it goes on."""
    process, out = first_command
    printed, error = process.communicate(timeout=600)
    assert process.returncode == 0, error
    bars = re.split(r"[\r\n]|\x1b\[A", error)  # of the libraries, while they load
    assert all(bar.startswith("Loading ") for bar in bars if bar), error
    first, *lines = printed.splitlines()
    assert re.fullmatch("model: .*examples/tiny-glm-image on cpu, files: out", first)
    assert [line.split()[:3:2] for line in lines] == [["step", "reward"]] * 20
    assert [line.split()[1] for line in lines] == [str(step) for step in range(1, 21)]
    assert_files(out, 0, 10, 20)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = """step reward reward_std reward/color loss policy_loss kl ratio_mean clip_frac entropy
        grad_norm sampler_gap_max seconds gpu_gib_max"""
    for row in rows:
        assert row.keys() == set(names.split()) and np.isfinite(list(row.values())).all()
    rewards = [row["reward"] for row in rows]
    assert np.mean(rewards[:5]) < 0.80 and np.mean(rewards[-5:]) > 0.92
    sheets = [Image.open(out / f"samples_{step:05d}.png") for step in (0, 20)]
    prompts, _ = grpo.load_prompts(None)
    places = [(i * 128, 0, i * 128 + 128, 128) for i in range(8)]
    before, after = (np.array(grpo.reward_color(map(sheet.crop, places), prompts)) for sheet in sheets)
    assert np.mean(after - before) > 0.1 and sorted(after)[1] > 0.85
    # A step more, and a run that begins with what it has learned.
    monkeypatch.chdir(out.parent)
    real = dict(load_model=WRAPPER.from_pretrained)
    code, printed, _ = command(*"--resume out --steps 21".split(), **real)
    assert code == 0 and printed.count("\n") == 2 and "\nstep 21 " in printed
    assert_files(out, 0, 10, 20, 21)
    flags = f"--model {HERE}/examples/tiny-glm-image --adapter out/adapter_00020 --steps 1 --out more"
    assert command(*flags.split(), **real)[0] == 0
    row, = rows_of(Path("more"))
    assert min(row["reward"], rows_of(out)[20]["reward"]) > 0.9 and row["kl"] > 0.01
    assert Path("more/samples_00000.png").read_bytes() == (out / "samples_00020.png").read_bytes()

WRONG = """--group-size 1, --group-size four, --group 4, --group-siz 4, --batch 8, --width 0, --width 48,
    --width 100, --width 64.0, --height 100, --height -64, --size 512, --batch-size 0, --micro-batch-size 0,
    --steps 0, --steps 1.5, --steps 1e3, --save-every 0, --lora-rank 0, --seed -1, --decode-steps 0,
    --seed 99999999999999999999, --num-iterations 0, --lr nan, --lr -1, --lr inf, --kl-coef -1, --kl-coef none,
    --clip-range inf, --clip-range -1, --clip-range-high .3, --scale-rewards none, --max-grad-norm nan,
    --max-grad-norm 0, --guidance nan, --guidance -1, --top-p 0, --top-p 1.5, --top-p nan, --temperature 0,
    --temperature inf, --offload maybe, --reward-norm group, --grop-size 4, --adapter, --reward , --resume ,
    --adapter """  # the answer names the flag
BAD = [(typed, typed.split()[0][2:]) for typed in re.split(r",\s+", WRONG)] + [  # typed, a word of the answer
    ("extra", "extra"), ("--prompts missing.txt", "missing"), ("--prompts folder", "folder"),
    ("--prompts text.txt", "image"), ("--prompts plain.txt", "'a fox'"), ("--prompts comments.txt", "prompt"),
    ("--prompts latin1.txt", "utf-8"), ("--prompts lost.txt", "line 3"), ("--prompts lost.txt", "lost.png"),
    ("--prompts torn.txt", "line 1"), ("--prompts mixed.txt --reward mse", "target"), ("--reward wow", "wow"),
    *[(f"--reward color={weight}", f"color={weight}") for weight in ("much", "nan", "inf", "1=2")],
    ("--reward color=1,color=2", "twice"), ("--reward mine.py", "mine.py"), ("--reward color,", "reward"),
    ("--reward mine.py:sharp,mine.py:sharp=2", "twice"), ("--reward mine.py:dull", "dull"),
    ("--reward mine.py:two", "two"), ("--reward mine.py:number", "number"), ("--reward folder:sharp", "folder"),
    ("--reward nowhere.py:sharp", "nowhere"), ("--reward mse", "target"), ("--reward color=1,mse", "target"),
    *[(f"--model {name}", name) for name in (
        "folder no-such no-such/model ./no-such /no/such/folder a/b/c good.txt no-json binary list".split())],
    ("--model keys", "settings"), ("--model range", "--steps 0"), ("--model words", "many"),
    *[(f"--resume {name}", "holds no run") for name in "nowhere folder torn list bomb strange".split()],
    ("--resume other", "settings"), ("--resume done", "steps"), ("--resume done --steps 4", "steps"),
    *[(f"--resume done --steps 9 {typed}", typed.split()[0]) for typed in (
        "--seed 1", "--lora-rank 2", "--model folder", "--out new", "--adapter adapter", "--lr nan",
        "--batch-size 3", "--prompts more.txt", "--prompts missing.txt", "--width 48", "--grop-size 3")],
    ("--resume done --steps 9 --reward mse", "target"), ("--adapter missing", "missing"),
    ("--adapter folder", "adapter-config"), ("--adapter done", "done"), ("--adapter good.txt", "good.txt"),
    ("--adapter half --lora-rank 4", "half"), ("--adapter adapter --lora-rank 8", "--lora-rank 4"),
    ("--adapter alpha --lora-rank 4", "alpha"), ("--adapter rslora --lora-rank 4", "alpha"),
    *[(f"--out {name}", name) for name in ("done", ".", "good.txt", "good.txt/x", "good.txt/x/y")]]

class Bomb:
    """A pickle that makes the file `owned` when it is loaded."""
    def __reduce__(self):
        return Path.touch, (Path("owned"),)

@pytest.fixture(scope="module")
def bad_files(finished, tmp_path_factory):
    """All that BAD names, in a folder."""
    folder = tmp_path_factory.mktemp("bad")
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    state |= dict(prompts=["a red fox"], config=state["config"] | dict(prompts=str(folder / "good.txt")))
    other = state | {"config": state["config"] | {"old_flag": 1}}  # of a copy that has another setting
    runs = dict(done=state, other=other, list=[1, 2, 3], strange={"weights": 1}, bomb=Bomb(), torn=0)
    lora = grpo.LoRA(torch.nn.Sequential(torch.nn.Linear(2, 2)), "0", rank=4)
    adapters = dict(adapter={}, half={}, alpha=dict(lora_alpha=4), rslora=dict(use_rslora=True))
    models = {"no-json": b"{", "binary": b"\xff\xfe", "list": b"[1]", "keys": b'{"stepz": 1}',
              "range": b'{"steps": 0}', "words": b'{"steps": "many"}'}
    for name in {"folder", *runs, *models}:
        (folder / name).mkdir()
    for name, content in runs.items():
        torch.save(content, folder / name / "checkpoint.pt")
    (folder / "torn/checkpoint.pt").write_bytes((folder / "done/checkpoint.pt").read_bytes()[:9999])
    for name, change in adapters.items():
        with mock.patch.dict(lora.config, change):
            lora.save(folder / name)
    os.truncate(folder / "half/adapter_model.safetensors", 99)
    for name, text in models.items():
        (folder / name / "grpo.json").write_bytes(text)
    Image.effect_noise((64, 64), 9).save(folder / "t.png")
    texts = {
        "comments.txt": b"# only\n\n", "lost.txt": b"# no\n\na red fox\tlost.png\n", "good.txt": b"a red fox\n",
        "text.txt": b"a fox\tcomments.txt\n", "torn.txt": b"a fox\ttorn.png\n", "mixed.txt": b"a\tt.png\nb\n",
        "torn.png": (folder / "t.png").read_bytes()[:999], "plain.txt": b"a red fox\na fox\n",
        "more.txt": b"a red fox\na blue fox\n", "latin1.txt": b"caf\xe9\n",
        "mine.py": b"def sharp(images, *_): return [1.0] * len(images)\ndef two(a, b): return a\nnumber = 3"}
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return folder

@pytest.mark.parametrize("typed, word", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(bad_files, command, monkeypatch, typed, word):
    """No traceback, nothing written, and no model loaded in vain. argparse puts its usage before the line."""
    monkeypatch.chdir(bad_files)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    real = typed.startswith("--model")
    before = sorted(bad_files.rglob("*"))
    code, out, error = command(
        *typed.split(" "), load_model=WRAPPER.from_pretrained if real else mock.Mock(side_effect=AssertionError))
    usage = "usage: python grpo.py [--group-size 8 ..]\n"
    assert (code, out) == (2, "") and re.fullmatch(rf"({re.escape(usage)})?.*error: .+\n", error), error
    assert word in error.replace("_", "-") and sorted(bad_files.rglob("*")) == before, error

@pytest.mark.parametrize("code", ["def sharp(:", "raise ValueError('here')", "open('nowhere')", "1 / 0",
                                  "def sharp(*_): raise ValueError('here')", "def sharp(*_): open('nowhere')"])
def test_a_bug_in_a_file_of_rewards_keeps_its_traceback(command, model, code):
    """While it is loaded or used: one line would not say where in the user's own code to look."""
    Path("mine.py").write_text(code)
    with pytest.raises((SyntaxError, ValueError, OSError, ZeroDivisionError)) as error:
        command(*model, *"--reward mine.py:sharp --out run".split())
    assert 'mine.py", line 1' in "".join(traceback.format_exception(error.value))

@pytest.mark.parametrize("bug", [ValueError, TypeError, KeyError])
def test_a_bug_in_the_loading_of_a_model_keeps_its_traceback(command, model, monkeypatch, bug):
    monkeypatch.setattr(diffusers.GlmImagePipeline, "from_pretrained", mock.Mock(side_effect=bug("a bug")))
    with pytest.raises(bug, match="a bug"):
        command(*model)
    with pytest.raises(OSError):  # nor is a wrapper of one's own asked for the name of a model
        command(*model, load_model=mock.Mock(side_effect=OSError))

def test_rewards_get_their_targets_and_their_file_is_loaded_once(command, model):
    """Each image meets its prompt's target; a file that loads a CLIP would fill the memory with a second."""
    lines = []
    for color in grpo.COLORS:
        Image.new("RGB", (9, 5), color).save(f"{color}.png")
        lines.append(f"a {color} fox\t{color}.png\n")
    Path("prompts.txt").write_text("".join(lines))
    Path("neighbour.py").write_text("from PIL import ImageColor")
    Path("mine.py").write_text(
        "from neighbour import ImageColor\nopen('loads', 'a').write('x')\n"
        "def right(images, prompts, targets):\n"
        "    return [target.getpixel((0, 0)) == ImageColor.getrgb(prompt.split()[1])\n"
        "            for _, prompt, target in zip(images, prompts, targets, strict=True)]\n"
        "def one(images, *_): return [1] * len(images)\n")
    flags = "--prompts prompts.txt --reward mse=2,mine.py:right,mine.py:one=.5 --steps 1 --out run"
    assert command(*model, *flags.split(), "--batch-size", "8")[0] == 0
    row, = rows_of(Path("run"))
    assert row["reward/mine.py:right"] == row["reward/mine.py:one"] == 1 and -1 < row["reward/mse"] < 0
    assert row["reward"] == pytest.approx(2 * row["reward/mse"] + 1.5, abs=1e-6)
    assert Path("loads").read_text() == "x"

def test_a_run_goes_on_with_its_own_settings_but_for_what_is_typed(command, model):
    """A notebook went on with a kl_coef of 0.01 where the run had 0, or with a mixture of two runs."""
    flags = "--steps 1 --out run --temperature 0.7 --lr 1e-3 --kl-coef 0"
    assert command(*model, *flags.split())[0] == 0
    saved = torch.load("run/checkpoint.pt", weights_only=True)["config"]
    assert saved["prompts"] is None  # and not a path, so that a clone may be moved
    assert SMALL.items() <= saved.items() and saved["temperature"] == 0.7
    shutil.copy(HERE / "prompts.txt", "mine.txt")  # the same prompts from elsewhere
    assert command(*"--resume run --prompts mine.txt --steps 2 --lr 5e-5".split())[0] == 0  # a default
    state = torch.load("run/checkpoint.pt", weights_only=True)
    assert state["config"] == saved | dict(prompts="mine.txt", steps=2, lr=5e-5, resume="run", out=None)
    assert state["optimizer"]["param_groups"][0]["lr"] == 5e-5 == grpo.Config.lr
    assert [row["step"] for row in rows_of(Path("run")) if "kl" not in row] == [1, 2]
    again = grpo.parse_args("--resume run --steps 3 --kl-coef .01".split(), lr=7.0, width=96)
    assert vars(again) == state["config"] | dict(steps=3, kl_coef=0.01)

def test_what_comes_first_typed_of_the_model_given_default(model, tmp_path):
    """A typed value that equals a default is typed all the same."""
    given = dict(lr=1.0, steps=7, batch_size=6, width=96)
    typed = [*model, "--width", "512", "--steps=9"]
    own = dict(model=model[1], width=512, steps=9, lr=1.0)
    assert grpo.parse_args(typed, **given) == grpo.Config(**SMALL | own)
    assert grpo.parse_args(["--model", str(tmp_path)], **given) == grpo.Config(model=str(tmp_path), **given)
    assert grpo.parse_args([], model=model[1]) == grpo.Config(**SMALL, model=model[1])
    with mock.patch.object(sys, "argv", ["grpo.py", *typed]):  # and not [], which a notebook may mean
        assert grpo.parse_args() == grpo.Config(**SMALL | own | dict(lr=grpo.Config.lr))

def test_help_shows_every_flag_once_and_what_it_means(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    code, out, _ = command("--help")
    assert code == 0
    for field in dataclasses.fields(grpo.Config):
        line, = re.findall(rf" --{field.name} (.*?)\(default: (.*?)\)", " ".join(out.split()))
        assert line[1] == str(field.default) and len(line[0].split(maxsplit=1)[1]) > 10

def test_settings_reach_the_wrapper(command, model):
    """All that is typed; where nothing is, temperature and top-p are the model's own."""
    settings = dict(top_p=0.5, temperature=0.7, guidance=2.0, width=96, decode_steps=3, out="a", offload="off")
    spy = mock.Mock(side_effect=InterruptedError)
    with pytest.raises(InterruptedError):
        command(*model, *[f"--{name.replace('_', '-')}={value}" for name, value in settings.items()],
                load_model=spy)
    config = grpo.Config(**SMALL | settings, model=model[1])
    spy.assert_called_once_with(model[1], config)
    pipe = make_tiny.make_models(grpo.COLORS)
    pipe.vision_language_encoder.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    for config, own in ((config, (0.7, 0.5)), (grpo.Config(), (0.9, 0.75))):
        wrapper = WRAPPER(pipe, config)
        assert (wrapper.temperature, wrapper.top_p) == own
