"""Tests of examples/choose.py without a browser: they send what its page sends. No network but loopback."""
import contextlib, io, json, os, signal, subprocess, sys, types, urllib.error, urllib.request
from pathlib import Path

import pytest
from PIL import Image

os.environ.pop("DISPLAY", None)  # no browser is opened
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path[:0] = [str(EXAMPLES)]
import choose

FOUR = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue", "white")]

@pytest.fixture(scope="module")
def address():
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        choose.start_server()
    return printed.getvalue().split()[-1]

def fetch(url, answers=None):
    """-> the body; answers make it a POST."""
    with urllib.request.urlopen(url, answers and json.dumps(answers).encode(), timeout=5) as reply:
        return reply.read()

@pytest.fixture
def ask(address, tmp_path, monkeypatch):
    """A function: images, prompts, clicks -> scores. In each second of waiting it calls the next click with the state,
    and sends what this returns, if anything."""
    monkeypatch.chdir(tmp_path)

    def ask(images, prompts, *clicks):
        rest = [*clicks, lambda state: None]  # the last choice has to stand for a second

        def sleep(seconds):
            answers = rest.pop(0)(json.loads(fetch(address + "state.json")))  # fails if the wait goes on
            if answers:
                fetch(address + "state.json", answers)
        monkeypatch.setattr(choose, "time", types.SimpleNamespace(sleep=sleep))
        return choose.choose(images, prompts, [None] * len(images))
    return ask

def click(*orders, picked=(), age=0):
    """The orders of the first groups, in which pictures count from 0, sent by a page that is so many steps old."""
    def answer(state):
        names = [[group["pictures"][i] for i in order] for group, order in zip(state["groups"], [*orders, picked])]
        return dict(step=state["step"] - age, orders=names[:len(orders)], picked=sum(names[len(orders):], []))
    return answer

@pytest.mark.parametrize("order, scores", [
    ([2], [0, 0, 1, 0]), ([2, 0], [1 / 2, 0, 1, 0]), ([2, 0, 3], [2 / 3, 0, 1, 1 / 3]),
    ([2, 0, 3, 1], [2 / 3, 0, 1, 1 / 3]), ([], [1, 1, 1, 1])])
def test_best_order_alike(ask, order, scores):
    """An order that is read the wrong way round would train towards the worst picture."""
    assert ask(FOUR, ["p"] * 4, click(order)) == pytest.approx(scores)
    row = json.loads(Path("runs/choices.jsonl").read_text())
    assert row["prompt"] == "p" and row["order"] == [row["pictures"][i] for i in order]
    saved = [Image.open(f"runs/choices/{name}") for name in row["pictures"]]
    assert [image.tobytes() for image in saved] == [image.tobytes() for image in FOUR]

def test_two_groups(ask):
    """Scores handed to another group would be noise; so would a prompt twice in a row, taken for one group."""
    clicks = click([1]), click([1], [0]), click([1], [0], [])
    assert ask(FOUR + FOUR[1:3], ["p", "p", "q", "q", "q", "q"], *clicks) == [0, 1, 1, 0, 1, 1]
    assert len(Path("runs/choices.jsonl").read_text().splitlines()) == 3

def test_back(ask):
    """A slip on the last picture of a step must not be final at once."""
    assert ask(FOUR, ["p"] * 4, click([0]), click(), click([1])) == [0, 1, 0, 0]

def test_late_click(ask):
    """A click on pictures of the last step, sent late or by a second page, must not answer this one."""
    with pytest.raises(IndexError):  # it waits on
        ask(FOUR, ["p"] * 4, click([0], age=1))

def test_page_closed_and_opened(ask, address):
    """A page that kept the choices to itself would lose them when it is closed."""
    def reopen(state):
        assert b"http" not in fetch(address)  # the page loads nothing from elsewhere
        (_, b), (_, d) = [group["pictures"] for group in state["groups"]]
        assert state["orders"] == [[b]] and state["picked"] == [d]
        assert Image.open(io.BytesIO(fetch(address + d))).tobytes() == FOUR[3].tobytes()
    assert ask(FOUR, ["p", "p", "q", "q"], click([1], picked=[1]), reopen, click([1], [1])) == [0, 1, 0, 1]

def test_identical(ask):
    """The trainer tries a reward on blank pictures before it loads a model: a question would stop it there."""
    assert ask([FOUR[3]] * 4, ["p", "p", "q", "q"]) == [1, 1, 1, 1]
    assert not Path("runs").exists()
    assert ask([FOUR[0], FOUR[1], FOUR[0], FOUR[2]], ["p"] * 4, click([0])) == [1, 0, 1, 0]

def test_refused(ask, address):
    """Another user, or another site's page, could choose, or read files, if the secret were not needed everywhere."""
    origin = address.rsplit("/", 2)[0]
    rebound = urllib.request.Request(address, headers=dict(Host="example.com"))
    for url in (origin, f"{origin}/wrong/", f"{origin}/wrong/state.json", address[:-1], rebound):
        for answers in (None, dict(step=0, orders=[], picked=[])):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                fetch(url, answers)
    ask(FOUR, ["p"] * 4, click([0]))
    Path("runs/secret").write_text("secret")
    for name in (os.listdir("runs/choices")[0], "../secret", "%2e%2e/secret"):  # the step is over
        assert json.loads(fetch(address + name))["groups"] == []

def test_several_processes(monkeypatch):
    """Processes that wait for each other's rewards give up after half an hour: a person may take longer."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="^choose.py .* without torchrun$"):
        choose.choose(FOUR, ["p"] * 4, [None] * 4)

def test_ctrl_c(ask):
    """A wait that cannot be interrupted would leave nothing but to kill the run. What was chosen is asked again."""
    path = os.pathsep.join([str(Path(__file__).parent), str(EXAMPLES)])
    code = "import test_choose as t; t.choose.choose(t.FOUR, ['p'] * 4, [None] * 4)"
    run = subprocess.Popen([sys.executable, "-c", code], env=os.environ | dict(PYTHONPATH=path),
                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    fetch(run.stdout.readline().split()[-1])  # it asks
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=60)[1].endswith("KeyboardInterrupt\n") and not Path("runs/choices.jsonl").exists()
    with pytest.raises(KeyboardInterrupt):
        ask(FOUR, ["p"] * 4, click([0]), lambda state: signal.raise_signal(signal.SIGINT))
    assert ask(FOUR, ["p"] * 4, lambda state: None, click([1])) == [0, 1, 0, 0]

@pytest.mark.parametrize("argument", [[], ["--help"]])
def test_help(argument):
    """A program that does not say what it is cannot be found out."""
    run = [sys.executable, EXAMPLES / "choose.py", *argument]
    assert "python grpo.py --reward" in subprocess.run(run, capture_output=True, text=True).stdout
