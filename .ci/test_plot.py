"""Tests of plot.py and follow.py, on folders of runs that are written here: they need no model, only the folder."""
import functools, importlib, json, os, re, shutil, sys, tempfile, threading, types
from pathlib import Path
from unittest import mock

import pytest, wandb
from matplotlib.figure import Figure
from PIL import Image

from examples import follow, pictures, plot
os.environ |= dict(WANDB_MODE="offline", TRACKIO_DIR=tempfile.mkdtemp())
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)

def write_rows(folder, rows):
    (folder / "metrics.jsonl").write_text("".join([json.dumps(row) + "\n" for row in rows]))

def make_run(folder, prompts="red\ngreen\nblue\n", sizes={0: (64, 64), 2: (96, 32)}):
    """A run of two steps. Its width was changed on the way, and what it was made with is gone."""
    folder.mkdir(parents=True)
    settings = dict(steps=2, save_every=2, width=96, model="/gone", wrapper="/gone.py:Gone", prompts="/gone.txt")
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "prompts.txt").write_bytes(prompts.encode())
    write_rows(folder, [{"step": i, "reward/color": i / 4, "reward": i / 4} for i in (1, 2)])
    for step, (width, height) in sizes.items():
        sheet = Image.new("RGB", (3, 1))
        sheet.putdata([RED, GREEN, BLUE])
        sheet.resize((3 * width, height), Image.NEAREST).save(folder / f"samples_{step:05d}.png")
    return folder

@pytest.fixture
def mine(tmp_path):
    return make_run(tmp_path / "mine")

# --- Pictures -----------------------------------------------------------------------------------------------
def test_each_sheet_is_cut_by_its_own_width(run, mine):
    """By the width of config.json, which changes on --resume, pictures were cut in two; and none may be stretched."""
    (mine / "samples_00002 (1).png").touch()  # a copy
    images = plot.read_samples("mine")
    for step, area in ((0, 64 * 64), (2, 96 * 32)):
        assert [image.getcolors() for image in images[step]] == [[(area, color)] for color in (RED, GREEN, BLUE)]
    assert run("plot", "mine --before-after pair.png --film film.png")[::2] == (0, "")
    film, pair = Image.open("film.png"), Image.open("pair.png")
    assert film.size == (800, 600) and [film.getpixel((700, y)) for y in (430, 560)] == [BLUE, (211, 211, 211)]
    assert [pair.getpixel((275, y)) for y in (250, 440, 550, 617, 680)] == [RED, WHITE, WHITE, RED, WHITE]

@pytest.mark.parametrize("prompts, size, is_cut", [
    ("red\n", (64, 64), False), ("red\n", (96, 32), True), ("red\nblue\n" * 3, (64, 64), False)])
def test_a_prompt_that_was_taken_out_or_added(run, tmp_path, prompts, size, is_cut):
    """Three pictures became one for one prompt, or six. Pictures of another shape are of an earlier size."""
    folder = make_run(tmp_path / "mine", prompts=prompts, sizes={0: size})
    (folder / "config.json").write_text(json.dumps(dict(steps=2, save_every=2, width=64, height=64)))
    code, out, error = run("plot", "mine --film film.png")
    assert (code == 0) == is_cut and (f"it has not the pictures of {prompts.count(chr(10))} prompts" in error) != is_cut, error

def test_words_are_those_of_the_run(run, tmp_path):
    """They were those of --prompts, which is edited later, or of prompts.txt for a notebook and for sft.py; a prompt
    with U+2028 became two, and all others stood above wrong pictures."""
    folder = make_run(tmp_path / "mine", "\ufeff# mended\nmy cat\u2028Tom\t/gone.png\r\nb\u0085c\r\rd  e\n")
    assert plot.read_words("mine") == ["my cat\u2028Tom", "b\u0085c", "d  e"]
    (folder / "prompts.txt").unlink()
    assert plot.read_words("mine") == [] and len(plot.read_samples("mine")[2]) == 3
    assert run("plot", "mine --film film.png --before-after pair.png")[0] == 0
    assert len(Image.open("film.png").crop((0, 0, 800, 200)).getcolors()) == 1  # no words are better than wrong ones

def test_a_text_that_no_font_has(run, tmp_path):
    """It becomes its number, and a file beside the picture has it, not a row of boxes; where a font has all, there is
    none."""
    assert pictures.find_font("fox") == "" and str(pictures.find_font("рыжая лиса")).endswith("tf")
    make_run(tmp_path / "mine", "red\n\u0378 fox\nblue\n")
    make_run(tmp_path / "numbered", "red\n2\nblue\n")
    for name, flag in (("film.png", "--film"), ("pair.png", "--before-after")):
        code, out, error = run("plot", f"mine {flag} {name}")
        assert code == 0 and f"{name}.txt: what the numbers in the picture stand for" in out, error
        assert Path(f"{name}.txt").read_text("utf-8") == "2\t\u0378 fox\n"
        assert run("plot", f"numbered {flag} wanted.png")[0] == 0 and not Path("wanted.png.txt").exists()
        assert Path(name).read_bytes() == Path("wanted.png").read_bytes()

# --- Figures and curves -------------------------------------------------------------------------------------
SQUARES = [i * i / 100 for i in range(1, 14)]  # the mean of four of them, or of five others, is another

@pytest.mark.parametrize("columns, told", [
    ({"reward/a": [0.25, 0.5], "reward": [0.25, 0.5]}, ["reward: first step 0.250, last 0.500"]),
    ({"reward/a": [1, 1], "reward/b": [None] * 2, "reward": [3, 3]}, [
        "reward/a: first step 1.000, last 1.000", "reward/b: first step nan, last nan",
        "reward: first step 3.000, last 3.000"]),
    (dict(reward=SQUARES[:1]), ["reward: first step 0.010, last 0.010"]),
    (dict(reward=SQUARES[:9]), ["reward: first step 0.010, last 0.810"]),
    (dict(reward=SQUARES[:10]), ["reward: first five steps 0.110, last five 0.660"]),
    (dict(reward=SQUARES), ["reward: first five steps 0.110, last five 1.230"])])
def test_figures(run, mine, columns, told):
    """A single reward had two equal lines; of fewer than ten steps, the first five and the last five overlapped."""
    write_rows(mine, [dict(zip(columns, row), step=i) for i, row in enumerate(zip(*columns.values()), 1)])
    assert run("plot", "mine")[1] == "".join([f"mine  {line}\n" for line in told]) + "reward: curve.png\n"

@pytest.fixture
def draw(run):
    """draw(runs) -> the figure of their curves."""
    def execute(runs):
        with mock.patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as save:
            assert run("plot", runs)[0] == 0
        return save.call_args.args[0]

    return execute

@pytest.mark.parametrize("steps", [1, 3, 20])
def test_steps_are_whole(draw, mine, steps):
    """A curve had ticks at 2.5 steps."""
    write_rows(mine, [dict(step=i, reward=i) for i in range(1, steps + 1)])
    axes = draw("mine").axes[0]
    low, high = axes.get_xlim()
    ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
    assert ticks and all([tick == round(tick) for tick in ticks])

def test_the_legend_names_all_runs(draw, tmp_path):
    """matplotlib leaves out names that begin with an underscore, and those for which it has no room."""
    names = ["_first", *[f"{'long_' * 12}{i}" for i in range(10)]]
    for name in names:
        make_run(tmp_path / name)
    figure = draw(" ".join(names))
    legend, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert 0 < legend.x0 < legend.x1 < figure.bbox.x1 and 0 < legend.y0 < legend.y1 < axes.y0 < axes.y1 - 100

def test_what_is_damaged_is_told(run, mine):
    """NaN was left out of means, and a last row without its end; half a picture ended all; no broken line was named."""
    sheet, log = map(mine.joinpath, ("samples_00002.png", "metrics.jsonl"))
    whole = sheet.read_bytes()
    for size in (len(whole) // 2, whole.index(b"IDAT") - 4):
        sheet.write_bytes(whole[:size])
        code, out, error = run("plot", "mine --film film.png")
        assert code == 0 and error == "mine/samples_00002.png: passed over, as it is not whole\n", out
        assert Image.open("film.png").size == (800, 400)
    log.write_text('{"step": 1, "loss": 1}\n\n{"step": 2, "loss": null}')
    assert run("plot", "mine --curve curve")[1] == "mine  loss: first step 1.000, last nan\nloss: curve\n"
    assert Image.open("curve").format == "PNG"
    for text, told in (("<<<<\n" + log.read_text(), "mine/metrics.jsonl, line 1: "), ("", "mine: has no step yet"),
                       ("null\n", "mine: TypeError: "), ('{"step": 1}\n7\n', "mine: TypeError: ")):
        log.write_text(text)
        code, out, error = run("plot", "mine")
        assert code == 2 and re.fullmatch(f"plot.py: error: {told}.*\n", error), error

# --- While a run goes on ------------------------------------------------------------------------------------
@pytest.fixture
def send(monkeypatch):
    """send(folder, *events): follows a run -> what stands in wandb.json of it. Each event happens while it waits; then
    somebody stops it."""
    def execute(folder, *events, service="wandb"):
        stopped, signals = mock.Mock(), mock.Mock(spec=["SIGTERM", "signal"])
        happen = iter([*events, lambda: signals.signal.call_args.args[1]()])
        stopped.wait.side_effect = lambda seconds: (next(happen)(), stopped.set.called)[1]
        with monkeypatch.context() as patch:
            patch.setattr(follow, "signal", signals)
            patch.setattr(follow, "threading", mock.Mock(Event=lambda: stopped))
            follow.follow(str(folder), service, "project")
        return json.loads((folder / f"{service}.json").read_text())["project"]

    return execute

@pytest.mark.parametrize("service, known_by", [("wandb", "id"), ("trackio", "name")])
def test_one_run_of_the_service_for_a_folder(tmp_path, send, service, known_by):
    """A resumed training began another run there, with rows twice or never."""
    Run = importlib.import_module(service).Run
    folder = make_run(tmp_path / "mine", sizes={0: (64, 64), 2: (64, 64)})
    sheet, log, config = [folder / name for name in ("samples_00002.png", "metrics.jsonl", "config.json")]
    whole = sheet.read_bytes()
    sheet.write_bytes(whole[:99])
    rows = [dict(step=step, reward=step / 4, kl=None) for step in (1, 2, 3, 4)]
    write_rows(folder, rows[:1])
    send = functools.partial(send, service=service)
    with mock.patch.object(Run, "log", autospec=True, side_effect=Run.log) as sent:
        assert send(folder, lambda: write_rows(folder, rows[:2]))["step"] == 1  # the second waits for its pictures
        assert send(folder, lambda: sheet.write_bytes(whole))["step"] == 2  # the run is done
        config.write_text(config.read_text().replace('"steps": 2', '"steps": 4'))
        log.open("a").write(json.dumps(rows[2])[:-5])  # it was resumed, and is amid a row
        later = [lambda: write_rows(folder, rows), lambda: os.utime(log, (0, 0))]  # no more pictures
        assert send(folder, *later)["step"] == send(folder)["step"] == 4
    told = [(call.kwargs["step"], call.args[1].get("reward"), [*call.args[1]]) for call in sent.mock_calls]
    assert told == [(0, None, ["samples"]), (1, 0.25, ["reward"]), (2, 0.5, ["reward", "samples"]), (3, 0.75, ["reward"]),
                    (4, 1.0, ["reward"])]
    assert len({getattr(call.args[0], known_by) for call in sent.mock_calls}) == 1

@pytest.fixture
def stand_in(monkeypatch):
    """A service as wandb's, which keeps what it gets -> [(where, step, metrics)]."""
    sent = []

    def init(config, resume, **where):
        assert resume == "allow"
        log = lambda metrics, step, commit: sent.append((where, step, metrics))
        return types.SimpleNamespace(log=log, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init, Image=lambda sheet: sheet))
    return sent

def copy(old, new):
    shutil.copytree(old, new)

def copy_and_rename(old, new):
    shutil.copytree(old, new)
    old.rename(old.with_name("renamed"))

def swap(old, new):
    old.rename(new)
    shutil.copytree(new, old)

@pytest.mark.parametrize("change, folder", [
    (copy, "runs/other"), (copy, "elsewhere/deep/other"), (copy_and_rename, "runs/other"),
    (copy_and_rename, "elsewhere/deep/other"), (swap, "runs/other")])
@pytest.mark.parametrize("order", [1, -1])
def test_a_copy_is_a_run_of_its_own(tmp_path, send, stand_in, change, folder, order):
    """`cp -r a b`: both went on, and one overwrote the other, as they had one id. It has what came before, too."""
    mine, other = make_run(tmp_path / "runs/mine"), tmp_path / folder
    known = send(mine)["id"]
    other.parent.mkdir(parents=True, exist_ok=True)
    change(mine, other)
    folders = [path for path in (mine, other, mine.with_name("renamed")) if path.exists()][::order]
    ids = {path: send(path)["id"] for path in folders}
    assert len({*ids.values()}) == 2 and known in ids.values() and (change is not copy or ids[mine] == known)
    assert ids == {path: send(path)["id"] for path in folders}  # each keeps its own
    assert [step for where, step, _ in stand_in if where["id"] != known] == [0, 1, 2]

def across_disks(old, new):
    shutil.copytree(old, new)
    shutil.rmtree(old)

@pytest.mark.parametrize("move", [Path.rename, across_disks])
def test_a_run_that_was_moved_keeps_its_id(tmp_path, send, stand_in, mine, move):
    """And is not sent again."""
    known = send(mine)["id"]
    other = tmp_path / "elsewhere"
    move(mine, other)
    write_rows(other, [dict(step=step, reward=step) for step in (1, 2, 3)])
    assert send(other)["id"] == known
    assert [step for _, step, _ in stand_in] == [0, 1, 2, 3]

def test_a_follower_that_is_started_with_the_training(tmp_path, run, monkeypatch, stand_in, mine):
    """It said that there is no folder of a run, as the model was still being loaded. It does not wait for ever."""
    monkeypatch.setattr("examples.follow.SECONDS", 0.01)
    threading.Timer(0.3, lambda: mine.rename("late")).start()
    code, out, error = run("plot", "late --wandb project")
    assert code == 0 and [step for _, step, _ in stand_in] == [0, 1, 2], error
    assert out.startswith("late: is no folder of a run yet; this waits until one begins there\n")
    monkeypatch.setattr("examples.follow.PATIENCE", 0.02)
    assert run("plot", "gone --wandb project")[::2] == (
        2, "plot.py: error: gone: is no folder of a run, and none has begun there\n")

def test_an_entity_and_a_refusal(run, mine):
    """team/project was refused, and an entry that leads nowhere stayed in wandb.json."""
    for wrong in ("a/b/c", "/b", "a/", "b:c"):
        code, _, error = run("plot", f"mine --wandb {wrong}")
        assert code == 2 and re.fullmatch(r"plot.py: error: --wandb '?[^ ]+: .+\n", error), error
    with mock.patch.object(wandb, "init", side_effect=wandb.errors.CommError("permission\ndenied")):
        assert run("plot", "mine --wandb team/mine")[2] == "plot.py: error: --wandb team/mine: permission denied\n"
    assert not (mine / "wandb.json").exists()
    with mock.patch.object(wandb, "init", side_effect=wandb.init) as init:
        assert run("plot", "mine --wandb team/project")[0] == 0
    assert init.call_args.kwargs["entity"] == "team" and init.call_args.kwargs["project"] == "project"

def test_what_is_not_sent_yet_is_not_called_sent(tmp_path, run, mine, monkeypatch):
    """Offline, "all until step 2 is sent" was printed. Of two starts the command that sends it names both folders."""
    for steps in (2, 3):
        write_rows(mine, [dict(step=step, reward=step) for step in range(1, steps + 1)])
        out = run("plot", "mine --wandb project")[1]
    folders = sorted([str(path.relative_to(tmp_path)) for path in mine.glob("wandb/offline-*")])
    known = json.loads((mine / "wandb.json").read_text())["project"]["id"]
    assert len(folders) == 2 and out.endswith(
        f"mine: all until step 3 is written for project, as {known}. When you are online, this sends it:\n"
        f"    wandb sync {' '.join(folders)}\n")
    for path in folders:  # as `wandb sync` marks them
        Path(path, f"run-{known}.wandb.synced").touch()
    assert run("plot", "mine --wandb project")[1] == f"mine: all until step 3 is sent to project, as {known}\n"
    monkeypatch.setattr(wandb, "init", functools.partial(wandb.init, mode="disabled"))
    assert "nothing is sent" in run("plot", "mine --wandb another")[2]

@pytest.mark.parametrize("service", ["wandb", "trackio"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_without_the_package_one_line_says_how_to_install_it(service, is_folder, run, mine, monkeypatch):
    """Not a traceback; a folder of its name, which wandb itself leaves behind, is no package."""
    monkeypatch.setitem(sys.modules, service, types.ModuleType(service) if is_folder else None)
    error = f"plot.py: error: --{service}: first run `pip install {service}`\n"
    assert run("plot", f"mine --{service} project") == (2, "", error)
