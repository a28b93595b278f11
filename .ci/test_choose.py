"""Tests of examples/choose.py. They send what its page sends; the last one looks at the page, if there is a browser."""
import contextlib, html, io, itertools, json, os, re, shutil, signal, subprocess, time
from pathlib import Path
from urllib import error, request as web

import pytest
import numpy as np
from PIL import Image

from conftest import ROOT
from examples import choose
from test_command import end, start
os.environ.pop("DISPLAY", None)  # no browser is opened
FOUR = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue", "white")]

def find_address():
    return "http://127.0.0.1:{}/{}/".format(*Path("run/choices/address").read_text().split())

def read_rows():
    return [json.loads(line) for line in Path("run/choices.jsonl").open() if line.strip()]

def fetch(url, answer=None):
    return web.urlopen(url, None if answer is None else json.dumps(answer).encode(), timeout=60).read()

def load(answer=None):
    return json.loads(fetch(find_address() + "state.json", answer))

def press(*keys, in_order=False, age=0):
    """What to do in a second of waiting: press keys, in a page that is so many changes old."""
    def send(state):
        for key in keys:
            state = load(dict(version=state["version"] - age, key=key, in_order=in_order))
        return state

    return send

@pytest.fixture
def ask(tmp_path, monkeypatch):
    """A function: images, prompts, actions -> scores. In each second of waiting it does the next action."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN", "run")
    choose.start_server.cache_clear()
    def ask(images, prompts, *actions):
        rest = [*actions, press()]  # the last choice has to stand for a second
        monkeypatch.setattr(time, "sleep", lambda seconds: rest.pop(0)(load()))  # fails if the wait goes on
        return choose.choose(images, list(prompts), [None] * len(images))
    return ask

@pytest.mark.parametrize("actions, order, scores", [
    ([press("3", in_order=True), press("0")], [], [1, 1, 1, 1]),
    ([press("1"), press("Backspace", "3")], [2], [0, 0, 1, 0]),  # a slip is not final at once
    ([press("3", "3", "1", "4", in_order=True)], [2, 0, 3], [2 / 3, 0, 1, 1 / 3]),
    ([press("3", "4", "Backspace", in_order=True), press("1")], [2, 0], [1 / 2, 0, 1, 0])])
def test_best_order_alike(ask, actions, order, scores):
    """An order that is read the wrong way round would train towards the worst picture."""
    assert ask(FOUR, "pppp", *actions) == pytest.approx(scores)
    [row] = read_rows()
    assert row["prompt"] == "p" and row["order"] == [row["pictures"][i] for i in order]
    assert [Image.open(f"run/choices/{name}").tobytes() for name in row["pictures"]] == [x.tobytes() for x in FOUR]

def test_groups(ask, monkeypatch):
    """Scores handed to another group would be noise; so would a prompt twice in a row, taken for one group."""
    assert ask(FOUR + FOUR[1:3], "ppqqqq", press("2", "1", "0")) == [0, 1, 1, 0, 1, 1]
    assert ask([FOUR[3]] * 4, "ppqq") == [1, 1, 1, 1]  # no choice: nobody is asked
    assert ask([FOUR[0], FOUR[1], FOUR[0], FOUR[2]], "pppp", press("1")) == [1, 0, 1, 0] and len(read_rows()) == 4
    monkeypatch.setenv("WORLD_SIZE", "2")  # processes that wait for each other give up after half an hour
    with pytest.raises(SystemExit, match="^choose.py .* without torchrun$"):
        ask(FOUR, "pppp")

@pytest.mark.parametrize("step", [1, 3])
def test_one_prompt_is_asked_about_twice(ask, step):
    """A list of one prompt and --batch-size 2: both groups were one of 8, of which one always got nothing but 0."""
    eight = [Image.new("RGB", (8, 8), (0, 0, shade)) for shade in range(8)]
    Path("run").mkdir()
    Path("run/config.json").write_text('{"group_size": 4, "steps": 10}')
    Path("run/metrics.jsonl").write_text('{"step": 1}\n' * (step - 1))
    shown = []
    scores = ask(eight, "p" * 8, lambda state: shown.append(state["step"]) or press("2", "4")(state))
    assert scores == [0, 1, 0, 0, 0, 0, 0, 1] and len(read_rows()) == 2
    assert shown == [f"Step {step} of 10. "]

def test_again(ask):
    """A wait that cannot be interrupted would leave nothing but to kill the run; what was answered was asked anew."""
    with pytest.raises(KeyboardInterrupt):
        ask(FOUR, "ppqq", press("1"), lambda state: signal.raise_signal(signal.SIGINT))
    assert ask(FOUR, "ppqq", press("2", "1")) == ask(FOUR, "ppqq") == [0, 1, 1, 0]  # known now
    Path("run/choices.jsonl").open("ab").write(b'\n\n')  # of an editor: a traceback
    assert ask(FOUR, "ppqq") == [0, 1, 1, 0]
    Path("run/choices.jsonl").open("ab").write(b'{"prompt": "p\0')  # a kill amid a row, or a power cut: a traceback
    assert ask([FOUR[1], FOUR[0], *FOUR[2:]], "ppqq", press("1", "2")) == [1, 0, 0, 1] and len(read_rows()) == 4

def test_old_pages_and_wrong_answers(ask, monkeypatch):
    """A key in an older page cut newer answers down; what no page sends ended training, kept it waiting, or stayed."""
    monkeypatch.setattr(choose.Handler, "timeout", choose.Handler.timeout / 50)
    def send(state):
        assert Image.open(io.BytesIO(fetch(find_address() + state["picked"][0]))).tobytes() == FOUR[2].tobytes()
        url = find_address() + "state.json"
        keys = [dict(version=state["version"], key=key, in_order=False) for key in ("9", "x", None, ["1"])]
        requests = [web.Request(url, json.dumps(answer).encode()) for answer in (*keys, 5, [], {})]
        for request in (*requests, web.Request(url, b"{", {"Content-Length": "99"})):
            with pytest.raises(error.HTTPError, match="400"):
                fetch(request)
        assert all(press(key, age=1)(state) == state for key in ("1", "Backspace", "0"))
    assert ask(FOUR[:3] * 2, "pppqqq", press("2"), press("3", in_order=True), send, press("1")) == [0, 1, 0, 0.5, 0, 1]

def test_refused(ask):
    """Another user, or another site's page, could choose, or read files, if the secret were not needed everywhere."""
    ask(FOUR, "pppp", press("1"))
    address, origin = find_address(), find_address().rsplit("/", 2)[0]
    assert Path("run/choices/address").stat().st_mode & 0o777 == 0o600
    for url in (origin, f"{origin}/wrong/state.json", address[:-1], web.Request(address, headers={"Host": "a.org"})):
        for answer in (None, dict(version=choose.STATE["version"], key="1", in_order=False)):
            with pytest.raises(error.HTTPError, match="403"):
                fetch(url, answer)
    for name in (read_rows()[0]["pictures"][0], "address", "../choices.jsonl", "%2e%2e/choices.jsonl"):  # it is over
        assert json.loads(fetch(address + name)) == load()
    choose.start_server.__wrapped__(Path("run/choices/address"))  # as another process would, whose port is taken
    assert find_address() != address and fetch(find_address()) == fetch(address)

def test_the_command(ask, tmp_path):
    """It asked about the gray pictures of the trial, asked anew after a kill, and waited for a w3m to be left."""
    w3m = "sh -c 'echo $0 >> opened; sleep 60; touch hung' %s"
    flags = f"--out run --resume run --wrapper {ROOT}/examples/toy.py:Toy --reward {ROOT}/examples/choose.py:choose "
    flags += "--batch-size 2 --group-size 4 --steps 2"
    asked = []
    for kill in (True, False):
        process = start(tmp_path, flags, env=dict(DISPLAY=":0", BROWSER=w3m))
        while process.is_alive():
            time.sleep(0.1)
            with contextlib.suppress(OSError, ValueError, LookupError):  # there is no server, or it asks nothing
                if kill and len(read_rows()) == 2:
                    process.kill()
                    assert not Path("hung").exists()
                state = load()
                asked.append(state["groups"][len(state["orders"])])
                press("1")(state)
    assert end(process) == 0 and [row | dict(order=[]) for row in read_rows()] == asked and len(asked) == 4
    assert Path("opened").read_text().split() == [find_address()] * 2

def test_in_a_browser(tmp_path):
    """Groups of 8 pushed the buttons out of view, long words were wider than a phone, and Enter lost the focus."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or pytest.skip("no browser")
    svg = "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 1 1'/>#"
    frames = ""
    for width, n in itertools.product((1280, 400), (2, 4, 8)):
        group = dict(prompt="<script>" + 99 * "W", pictures=[f"{svg}{i}" for i in range(n)])
        state = dict(version=1, groups=[group] * 2, orders=[], picked=[], ratio=1, step="Step 3 of 10. ")
        state = json.dumps(state).replace("<", r"\u003c")
        server = f"async (url, post) => ({{json: () => post ? {{...state, version: 2, orders: [[]]}} : {state}}})"
        page = choose.PAGE.decode().replace("<script>", f"<script>fetch = {server}</script><script>")
        frames += f"<iframe width={width} height=800 srcdoc='{html.escape(page)}'></iframe>"
    (tmp_path / "page.html").write_text("<!doctype html>" + frames + """<script>
        setTimeout(() => Array.from(frames, f => f.eval("main.children[1].focus(); main.children[1].click()")), 1000);
        setTimeout(() => document.title = Array.from(frames, f => f.eval(`
            title.textContent == state.groups[0].prompt && title.scrollWidth <= title.clientWidth
            && hint.textContent == "Step 3 of 10. Click on the picture that you like best, or press keys."
            && [...document.querySelectorAll("h1, p, img, button, label")].map(e => e.getBoundingClientRect()).every(
            b => b.width > 50 && b.x >= 0 && b.y > 0 && b.right <= innerWidth && b.bottom <= innerHeight)
            + "," + state.orders.length + document.activeElement.value`)), 2000)</script>""")
    command = [browser, *"--headless --no-sandbox --disable-gpu --dump-dom --virtual-time-budget=9000".split(),
               "--disable-background-networking", f"--user-data-dir={tmp_path}", tmp_path / "page.html"]
    shown = subprocess.check_output(command, text=True, timeout=120)  # the last frame has the focus
    assert re.search(r"<title>(true,1\w*,){5}true,11</title>", shown)

# --- Does a reward agree with a person? ---------------------------------------------------------------------
@pytest.fixture
def choices(tmp_path):
    """Someone chose the greenest of each of 40 groups of four pictures, in every other one all of them in order."""
    Path(tmp_path, "choices").mkdir()
    rows = [dict(prompt="all alike", pictures=["0.png", "1.png"], order=[])]
    for i, greens in enumerate(np.random.default_rng(0).permutation(256)[:160].reshape(40, 4)):
        for green in greens:
            Image.new("RGB", (16, 8), (90, int(green), 50)).save(tmp_path / f"choices/{green}.png")
        names, order = [[f"{green}.png" for green in some] for some in (greens, sorted(greens, reverse=True))]
        rows.append(dict(prompt=f"prompt {i}", pictures=names, order=order[:1 + i % 2 * 2]))
    lines = [json.dumps(row) + "\n" for row in rows]
    Path(tmp_path, "choices.jsonl").write_text("".join(lines))
    return lines

def test_agreement_with_a_person(run, choices):
    """Pairs were counted the wrong way round, or among those that nobody put in order; an interval was too narrow."""
    Path("greens.py").write_text("""
import random
def green(images, *_): return [image.getpixel((0, 0))[1] for image in images]
def half(images, *_): return [value // 128 for value in green(images)]
def pink(images, *_): return [-value for value in green(images)]
def moody(images, prompts, _): return (pink if random.Random(prompts[0]).random() < 0.5 else green)(images)
""")
    rewards = ",".join([f"greens.py:{name}" for name in "green=0 pink half moody".split()])
    _, out, _ = run("choose", f"choices.jsonl --reward {rewards},sharpness")
    assert "40 groups, 180 pairs of a better and a worse picture" in out  # 20 x 3 + 20 x 6
    rows = {name: rest.split() for name, rest in re.findall(r"^(\w+) +([-\d].*)$", out, re.MULTILINE)}
    for name, told in dict(green="1.00 0.90 .. 1.00 0%", pink="0.00 0.00 .. 0.10 0%", sharpness="- - 100%").items():
        assert rows[name] == told.split()
    assert rows["half"][0] == "1.00" and 10 < int(rows["half"][4][:-1]) < 50
    share, low, _, high, ties = rows["moody"]  # all pairs of a group agree or none: they are no 180 observations
    assert low < "0.50" < high and low < share < high and float(high) - float(low) > 0.25 and ties == "0%"

@pytest.mark.parametrize("cut", [b'{"prompt": "a', b"\0" * 9, b"\n\n[", b"\xff"])
def test_a_last_line_that_is_cut(run, choices, cut):
    """A kill or a loss of power amid a row, as it also passes over itself: no other row was counted any more."""
    with open("choices.jsonl", "ab") as file:
        file.write(cut)
    code, out, error = run("choose", "choices.jsonl --reward sharpness")
    assert code == 0 and "40 groups, 180 pairs" in out
    assert error == f"choices.jsonl, line {42 + cut.count(10)}: is cut off, and was passed over\n"

@pytest.mark.parametrize("groups, noise, most", [(10, 0.5, 1), (10, 3.0, 1), (40, 0.5, 0.985), (40, 3.0, 0.985)])
def test_intervals_cover(groups, noise, most):
    """Four pictures in order make six pairs, and in a fifth of the groups the reward is the wrong way round. Quantiles
    of .05 and .95, or pairs that count as independent, cover less than 92 %; intervals as wide as 0..1 all."""
    rng = np.random.default_rng(0)
    def draw(number):
        signs = np.where(rng.random((number, 1)) < 0.2, -1, 1)
        scores = signs * np.arange(4) + noise * rng.normal(size=(number, 4))
        agrees = sum([scores[:, better] > scores[:, worse] for better in range(4) for worse in range(better)])
        return np.stack([agrees, 6 - agrees], 1)

    truth = draw(400_000)[:, 0].mean() / 6
    found = [choose.estimate_share(draw(groups))[1] for _ in range(600)]
    assert 0.92 <= np.mean([low <= truth <= high for low, high in found]) <= most

def test_intervals_cover_where_groups_are_unequal():
    """Late in a run pictures are alike, and a few groups have most pairs: with as many degrees of freedom as groups,
    intervals covered 88 %."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(600):
        pairs, right = rng.choice([1] * 6 + [7], 20), rng.random(20) < 0.5
        low, high = choose.estimate_share(np.stack([pairs * right, pairs * ~right], 1))[1]
        hits += low <= 0.5 <= high
    assert 0.92 < hits / 600 < 0.985, hits

def test_few_groups_have_no_interval():
    """One group printed 0.67 .. 0.67. Groups of ties alone say nothing."""
    few = [[4, 2], [0, 0], [1, 0], [2, 4], [3, 3], [0, 0]]
    assert choose.estimate_share(np.array(few)) == (10 / 19, None)
    assert choose.estimate_share(np.array([*few, [0, 1]]))[1] is not None

@pytest.mark.parametrize("text, why", [  # {0} and {1} are lines of a good file; nothing is chosen in {0}
    ("{0}", "chosen over"), ("{1}", "a target"), ("[]\n{0}", "choices.jsonl, line 1: "), ("", "chosen over"),
    ("{1}", "choices/89.png"), ("{1}", "choices.jsonl: [Errno 2]")])
def test_wrong_choices(refuse, choices, text, why):
    Path("choices.jsonl").write_text(text.format(*choices))
    Path(why.split(":")[0]).unlink(missing_ok=True)
    assert why in refuse("choose", "choices.jsonl --reward mse")
