"""Tests of examples/choose.py. One clicks on its page, if there is a browser."""
import hashlib, json, runpy, shutil, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
from urllib import error, request

import numpy as np, pytest
from PIL import Image

import grpo
from conftest import ROOT, read_rows
from examples import choose, evaluate
RED, GREEN, BLUE, WHITE = FOUR = [Image.new("RGB", (60, 40), color) for color in ("red", "green", "blue", "white")]

@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask(images, prompts, actions) -> scores. Each second of waiting has an action: keys, or a function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN", "run")
    Path("run").mkdir()
    choose.start_server.cache_clear()

    def ask(images, prompts, *actions, targets=None, size=4):
        left = [*actions, ""] if actions else []  # the last choice has to stand for a second
        monkeypatch.setattr(choose, "time", SimpleNamespace(sleep=lambda seconds: press(left.pop(0))))
        groups = [grpo.Prompt(prompts[i]) for i in range(0, len(images), size)]  # each has its own
        scores = choose.choose(images, [groups[i // size] for i in range(len(images))], targets or [None] * len(images))
        assert not left
        return scores
    return ask

def press(action):
    for key in action if isinstance(action, str) else action() or "":
        choose.press(json.dumps(choose.GROUPS), key.replace("<", "Backspace"))

def test_scores_are_of_their_group_and_picture(ask):
    """Groups are the run's, also of one prompt; identical pictures are one; Back works in the last second, too."""
    images = [*FOUR, WHITE, RED, WHITE, BLUE, *[GREEN] * 4, BLUE, WHITE, RED, GREEN, *[WHITE] * 3, BLUE]
    scores = ask(images, "p" * 20, "13<<21", "", "x92", "0", "<<30")
    assert scores == [0, 1, 0, 0] + [1, 0, 1, 0] + [1, 1, 1, 1] + [0, 0, 1, 0] + [1, 1, 1, 1]
    rows = map(json.loads, Path("run/choices.jsonl").open())
    r, g, b, w = [hashlib.sha256(image.tobytes()).hexdigest() + ".png" for image in FOUR]
    assert [(row["pictures"], row["best"]) for row in rows] == [
        ([r, g, b, w], [g]), ([w, r, b], [w]), ([b, w, r, g], [r]), ([w, b], [w, b])]

def test_nobody_is_asked_twice(ask):
    """But after a stop amid a step. Another prompt or another target makes another question."""
    with pytest.raises(ZeroDivisionError):
        ask(FOUR * 2, "ppppqqqq", "1", lambda: 1 / 0)
    assert ask(FOUR * 2, "ppppqqqq", "21") == ask(FOUR * 2, "ppppqqqq") == [0, 1, 0, 0, 1, 0, 0, 0]
    assert ask(FOUR * 2, "rrrrpppp", "3") == [0, 0, 1, 0, 0, 1, 0, 0]
    assert ask(FOUR, "pppp", "4", targets=[RED] * 4) == [0, 0, 0, 1]

def test_requests(ask, capsys):
    """Nothing without the secret; a key counts where the page shows what is asked; no request ends training."""
    def send(url, shown=None, key="1"):
        return request.urlopen(url, shown and json.dumps(dict(shown=shown, key=key)).encode()).read().decode()
    def attack():
        address = capsys.readouterr().out.split()[-1]
        shown = send(address + "x")
        for url in (address[:-1], address[:-9] + "/x", address[:-9] + "/" + json.loads(shown)[0]["pictures"][0]):
            for text in (None, shown):
                with pytest.raises(error.HTTPError, match="403"):
                    send(url, text)
        with pytest.raises(OSError):
            send(address, shown, [1])
        new = send(address + "x", shown, "2")
        assert new == send(address + "x", shown, "1") != shown
    assert ask(FOUR * 2, "ppppqqqq", attack, "1") == [0, 1, 0, 0, 1, 0, 0, 0]

def test_refused(monkeypatch, refuse):
    """torchrun's processes would wait for each other; outside of a run, scores of several groups mean nothing."""
    assert "chosen over others" in refuse("choose", "choices.jsonl")
    with pytest.raises(grpo.BadInput, match="while a run is trained"):
        choose.choose(FOUR, ["p"] * 4, [None] * 4)
    monkeypatch.setattr(grpo, "WORLD_SIZE", 2)
    with pytest.raises(grpo.BadInput, match="torchrun"):
        runpy.run_path(choose.__file__)

def test_training(run, monkeypatch):
    """A run that is stopped once all is answered goes on with the answers."""
    monkeypatch.setitem(sys.modules, "choose", choose)
    monkeypatch.setattr(choose, "time", SimpleNamespace(sleep=lambda seconds: press("31")))
    flags = f"--wrapper {ROOT}/examples/toy.py:Toy --reward {choose.__file__}:choose --batch-size 2 --group-size 8"
    with monkeypatch.context() as patch, pytest.raises(AttributeError):
        patch.delattr(grpo.GRPOTrainer, "train_step")
        run("grpo", flags + " --steps 3 --out out")
    lines = Path("out/choices.jsonl").read_text().splitlines()
    assert run("grpo", "--resume out")[0] == 0 and [row["reward"] for row in read_rows("out")] == [1 / 8] * 3
    assert Path("out/choices.jsonl").read_text().splitlines()[:-4] == lines

@pytest.mark.parametrize("width, act", [(500, "main.children[3].click()"), (1280, "onkeydown({key: '3'})")])
def test_in_a_browser(ask, tmp_path, monkeypatch, capsys, width, act):
    """On a desk and on a phone all is in view, and pictures are large. Clicks and keys arrive."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("no browser")
    flags = "--headless --no-sandbox --disable-background-networking --virtual-time-budget=9000 --dump-dom"
    script = """<script>setTimeout(() => {
        const boxes = [...document.querySelectorAll("h1, p, img, button")].map(e => e.getBoundingClientRect());
        document.title = hint.textContent.slice(0, 13) + title.textContent[0] + main.children.length
            + (title.scrollWidth <= title.clientWidth && [...document.images].every(e => e.width > innerWidth / 6)
            && boxes.every(b => b.x >= 0 && b.y > 0 && b.right <= innerWidth && b.bottom <= innerHeight));
        ACT }, 1500)</script>"""
    monkeypatch.setattr(choose, "PAGE", choose.PAGE + script.replace("ACT", act).encode())
    def look():
        address = capsys.readouterr().out.split()[-1]
        command = f"{browser} {flags} --window-size={width},800 --user-data-dir={tmp_path}/browser {address}".split()
        assert "<title>Group 1 of 1.&lt;9true</title>" in subprocess.check_output(command, text=True, timeout=120)
    eight = [Image.new("RGB", (120, 80), (0, 30 * i, 99)) for i in range(8)]
    assert ask(eight, ["<b>" + 99 * "W"] * 8, look, targets=[RED] * 8, size=8) == [0, 0, 1, 0, 0, 0, 0, 0]

def test_agreement_with_a_person(run, ask):
    """Someone clicks on the greenest of 40 groups; targets have its color. Who tie for the first place share it."""
    several = [3, 9, 4], [3, 9, 9], [5, 5, 5], [3, 4, 9]
    assert [choose.rank_first(np.array(scores), 1) for scores in several] == [1, 1 / 2, 1 / 3, 0]
    greens = np.random.default_rng(0).permutation(256)[:164].reshape(41, 4)
    images = [Image.new("RGB", (16, 8), (90, green, 50)) for green in greens.flatten().tolist()]
    targets = [Image.new("RGB", (16, 8), (90, green, 50)) for green in greens.max(1).repeat(4).tolist()]
    prompts = [f"prompt {i}" for i in range(41) for _ in range(4)]
    ask(images, prompts, "".join([str(1 + i) for i in greens.argmax(1)[:40]]) + "0", targets=targets)
    Path("greens.py").write_text("""
def green(images, *_): return [image.getpixel((0, 0))[1] for image in images]
def near(images, _, targets): return [-abs(a - b) for a, b in zip(green(images), green(targets))]
def moody(images, prompts, _): return [value * (int(prompts[0][-1]) < 7 or -1) for value in green(images)]
""")
    _, out, _ = run("choose", "run/choices.jsonl --reward greens.py:green=0,greens.py:near,greens.py:moody,sharpness")
    low, high = evaluate.find_interval([1] * 28 + [0] * 12)
    assert [line.split(None, 2) for line in out.splitlines()] == [
        ["40", "groups;", "by chance 0.25"], [], ["reward", "agrees", "95 % interval"], ["green", "1.00", "-"],
        ["near", "1.00", "-"], ["moody", "0.70", f"{low:.2f} .. {high:.2f}"], ["sharpness", "0.25", "-"]]
