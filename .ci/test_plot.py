"""Tests of plot.py, on folders of runs that are written here: it needs no model, and nothing else than the folder."""
import json, os, re, sys, types
from pathlib import Path
from unittest import mock

import pytest
from PIL import Image

from examples import pictures, plot

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)

def make_run(folder, prompts="red\ngreen\nblue\n", sizes={0: (64, 64), 2: (96, 32)}, **metrics):
    """A run of two steps. Its width was changed on the way, and what it was made with is gone."""
    folder.mkdir()
    settings = dict(steps=2, save_every=2, width=96, model="/gone", wrapper="/gone.py:Gone", prompts="/gone.txt")
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "prompts.txt").write_bytes(prompts.encode())
    write_rows(folder, [dict(step=i) | (metrics or {"reward/color": i / 4, "reward": i / 4}) for i in (1, 2)])
    for step, (width, height) in sizes.items():
        sheet = Image.new("RGB", (3, 1))
        sheet.putdata([RED, GREEN, BLUE])
        sheet.resize((3 * width, height), Image.NEAREST).save(folder / f"samples_{step:05d}.png")
    return folder

def write_rows(folder, rows):
    (folder / "metrics.jsonl").write_text("".join([json.dumps(row) + "\n" for row in rows]))

def test_each_sheet_is_cut_by_its_own_width(run, tmp_path):
    """By the width of config.json, which changes on --resume, pictures were cut in two; and none may be stretched."""
    make_run(tmp_path / "mine")
    (tmp_path / "mine/samples_00002 (1).png").touch()  # a copy
    images = plot.read_samples("mine")
    for step, area in ((0, 64 * 64), (2, 96 * 32)):
        assert [image.getcolors() for image in images[step]] == [[(area, color)] for color in (RED, GREEN, BLUE)]
    assert run("plot", "mine --before-after pair.png --film film.png")[0] == 0
    film, pair = Image.open("film.png"), Image.open("pair.png")
    assert film.size == (800, 600) and film.getpixel((700, 430)) == BLUE
    assert [pair.getpixel((275, y)) for y in (250, 440, 550, 617, 680)] == [RED, WHITE, WHITE, RED, WHITE]

def test_words_are_those_of_the_run(run, tmp_path):
    """They were those of --prompts, which is edited later, or of prompts.txt for a notebook and for sft.py; a prompt
    with U+2028 became two, and all others stood above wrong pictures."""
    folder = make_run(tmp_path / "mine", "\ufeff# mended\nmy cat\u2028Tom\t/gone.png\r\nb\u0085c\r\rd  e\n")
    assert plot.read_words("mine") == ["my cat\u2028Tom", "b\u0085c", "d  e"]
    (folder / "prompts.txt").unlink()
    assert plot.read_words("mine") == [] and len(plot.read_samples("mine")[2]) == 3
    assert run("plot", "mine --film film.png --before-after pair.png")[0] == 0
    assert len(Image.open("film.png").crop((0, 0, 800, 200)).getcolors()) == 1  # no words are better than wrong ones

TEXTS = ["Affe", "Äffchen, piñata — déjà vu", "рыжая лиса", "κόκκινη αλεπού", "ثعلب أحمر", "红色的狐狸", "빨간 여우"]

@pytest.mark.parametrize("text", TEXTS)
def test_no_letter_is_a_box(text):
    """Each is drawn otherwise than a code point that no font has. matplotlib's font lacks Chinese and Korean only."""
    path = pictures.find_font(text)
    if path is None:  # it becomes a number
        assert text in TEXTS[-2:] or "matplotlib" not in sys.modules and not pictures.importlib.util.find_spec("matplotlib")
        return
    *drawn, box = [pictures.draw_letter(pictures.load_font(path, 22), sign) for sign in (*"".join(text.split()), "\U0010ffff")]
    assert box not in drawn

def test_a_text_that_no_font_has(run, tmp_path):
    """It becomes its number, and a file beside the picture has it; where a font has all, there is none."""
    make_run(tmp_path / "mine", "red\n\u0378 fox\nblue\n")
    make_run(tmp_path / "numbered", "red\n2\nblue\n")
    for name, flag in (("film.png", "--film"), ("pair.png", "--before-after")):
        code, out, error = run("plot", f"mine {flag} {name}")
        assert code == 0 and f"{name}.txt: what the numbers in the picture stand for" in out, error
        assert Path(f"{name}.txt").read_text("utf-8") == "2\t\u0378 fox\n"
        assert run("plot", f"numbered {flag} wanted.png")[0] == 0 and not Path("wanted.png.txt").exists()
        assert Path(name).read_bytes() == Path("wanted.png").read_bytes()

def test_figures_are_printed_once(run, tmp_path):
    """A single reward had two equal lines; of two each is told."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", **{"reward/a": 1, "reward/b": None, "reward": 3})
    assert run("plot", "one")[1] == "one  reward: first five steps 0.375, last five 0.375\nreward: curve.png\n"
    told = re.findall(r"two  (\S+): first five steps (\S+),", run("plot", "two")[1])
    assert told == [("reward/a", "1.000"), ("reward/b", "nan"), ("reward", "3.000")]

def test_what_is_damaged_is_told(run, tmp_path):
    """NaN was left out of means, and a last row without its end; half a picture ended all; no broken line was named."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    sheet, log = map(make_run(tmp_path / "mine").joinpath, ("samples_00002.png", "metrics.jsonl"))
    whole = sheet.read_bytes()
    for size in (len(whole) // 2, whole.index(b"IDAT") - 4):
        sheet.write_bytes(whole[:size])
        code, out, error = run("plot", "mine --film film.png")
        assert code == 0 and error == "mine/samples_00002.png: passed over, as it is not whole\n", out
        assert Image.open("film.png").size == (800, 400)
    log.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": null}')
    assert run("plot", "mine --curve curve")[1] == "mine  loss: first five steps nan, last five nan\nloss: curve\n"
    assert Image.open("curve").format == "PNG"
    log.write_text("<<<<\n" + log.read_text())
    assert run("plot", "mine")[2].startswith("plot.py: error: mine/metrics.jsonl, line 1: ")

def test_the_legend_names_all_runs(run, tmp_path):
    """matplotlib leaves out names that begin with an underscore, and those for which it has no room."""
    Figure = pytest.importorskip("matplotlib.figure", reason="pip install matplotlib").Figure
    names = ["_first", *[f"{'long_' * 12}{i}" for i in range(10)]]
    for name in names:
        make_run(tmp_path / name)
    with mock.patch.object(Figure, "savefig", autospec=True, side_effect=Figure.savefig) as save:
        assert run("plot", " ".join(names))[0] == 0
    figure = save.call_args.args[0]
    legend, axes = figure.legends[0].get_window_extent(), figure.axes[0].get_window_extent()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == names
    assert 0 < legend.x0 < legend.x1 < figure.bbox.x1 and 0 < legend.y0 < legend.y1 < axes.y0 < axes.y1 - 100

def follow(folder, monkeypatch, *events):
    """Follows a run -> the last step that was sent. Each event happens while it waits; then somebody stops it."""
    handlers = []
    happen = iter([*events, lambda: handlers[0][1]()])
    stopped = mock.Mock()
    stopped.wait.side_effect = lambda seconds: (next(happen)(), stopped.set.called)[1]
    monkeypatch.setattr(plot, "threading", mock.Mock(Event=lambda: stopped))
    monkeypatch.setattr(plot, "signal", types.SimpleNamespace(SIGTERM=15, signal=lambda *args: handlers.append(args)))
    plot.follow(str(folder), "project")
    return json.loads((folder / "wandb.json").read_text())["project"]["step"]

def test_one_run_of_wandb_for_a_folder(tmp_path, monkeypatch):
    """A resumed training began another run there, with rows twice or never."""
    wandb = pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = mock.Mock(side_effect=wandb.Run.log)
    monkeypatch.setattr(wandb.Run, "log", lambda *args, **kwargs: log(*args, **kwargs))
    folder = make_run(tmp_path / "mine", sizes={0: (64, 64), 2: (64, 64)})
    sheet = folder / "samples_00002.png"
    whole = sheet.read_bytes()
    sheet.write_bytes(whole[:99])
    rows = [dict(step=step, reward=step / 4, kl=None) for step in (1, 2, 3, 4)]
    write_rows(folder, rows[:1])
    assert follow(folder, monkeypatch, lambda: write_rows(folder, rows[:2])) == 1  # the second waits for its pictures
    assert follow(folder, monkeypatch, lambda: sheet.write_bytes(whole)) == 2  # the run is done
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('"steps": 2', '"steps": 4'))
    (folder / "metrics.jsonl").open("a").write(json.dumps(rows[2])[:-5])  # it was resumed, and is amid a row
    later = [lambda: write_rows(folder, rows), lambda: os.utime(folder / "metrics.jsonl", (0, 0))]  # no more pictures
    assert follow(folder, monkeypatch, *later) == follow(folder, monkeypatch) == 4
    sent = [(call.kwargs["step"], call.args[1].get("reward"), "samples" in call.args[1]) for call in log.mock_calls]
    assert sent == [(0, None, True), (1, 0.25, False), (2, 0.5, True), (3, 0.75, False), (4, 1.0, False)]
    assert len({call.args[0].id for call in log.mock_calls}) == 1

@pytest.mark.parametrize("module", [None, types.ModuleType("wandb")])
def test_without_the_package_one_line_says_how_to_install_it(module, run, tmp_path, monkeypatch):
    """Not a traceback; a folder of its name, which wandb itself leaves behind, is no package."""
    monkeypatch.setitem(sys.modules, "wandb", module)
    make_run(tmp_path / "mine")
    assert run("plot", "mine --wandb project") == (2, "", "plot.py: error: --wandb: first run `pip install wandb`\n")
