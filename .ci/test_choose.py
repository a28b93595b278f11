"""Tests of examples/choose.py."""
import hashlib, json
from pathlib import Path
from types import SimpleNamespace
from urllib import error, request

import numpy as np, pytest
from PIL import Image

import grpo
from examples import choose, evaluate
RED, GREEN, BLUE, WHITE = FOUR = [Image.new("RGB", (60, 40), color) for color in ("red", "green", "blue", "white")]

@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask(images, prompts, actions) -> scores. Each second of waiting has an action: keys, or a function."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN", "run")
    Path("run").mkdir()
    choose.start_server.cache_clear()

    def ask(images, prompts, *actions, targets=None):
        left = [*actions, ""] if actions else []  # the last choice has to stand for a second
        monkeypatch.setattr(choose, "time", SimpleNamespace(sleep=lambda seconds: press(left.pop(0))))
        groups = [grpo.Prompt(prompts[i]) for i in range(0, len(images), 4)]  # each has its own
        scores = choose.choose(images, [groups[i // 4] for i in range(len(images))], targets or [None] * len(images))
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
            with pytest.raises(error.HTTPError, match="403"):
                send(url, shown)
        with pytest.raises(OSError):
            send(address, shown, [1])
        new = send(address + "x", shown, "2")
        assert new == send(address + "x", shown, "1") != shown
    assert ask(FOUR * 2, "ppppqqqq", attack, "1") == [0, 1, 0, 0, 1, 0, 0, 0]

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
