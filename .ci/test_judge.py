"""Tests of examples/judge.py: real requests to a strict server on the loopback, which answers by the pictures' green."""
import contextlib, os, sys, threading
from unittest import mock

import openai, pytest
from PIL import Image

import grpo
from examples.judge import compare, judge, kept, yes
from stand_in import StandIn

def paint(*greens):
    return [Image.new("RGB", (16, 8), (90, green, 50)) for green in greens]

def find_greens(pictures):
    return [picture.getpixel((0, 0))[1] for picture in pictures]

def score(reward, greens, prompts, *sources):
    return reward(paint(*greens), prompts.split(), sources or [None] * len(greens))

@pytest.fixture
def server():
    """Its answer is that of `says` {green of the last picture: answer}, unless a test gives it another."""
    server = StandIn(lambda text, pictures: server.says[find_greens(pictures)[-1]])
    os.environ |= dict(OPENAI_BASE_URL=server.address, JUDGE_MODEL="any", NO_PROXY="*")
    yield server
    server.shutdown()
    server.server_close()

@pytest.mark.parametrize("answer, rating", [
    ("7", 7), ("10", 10), ("0", 0), ("8.5", 8.5), (" **8.**\n", 8), ("<think>1</think>or 2?</think>\n\n8", 8),
    ("Rating: 8/10", 8), ("\\boxed{8}", 8), ("<|begin_of_box|>8.5<|end_of_box|>", 8.5), ("7,5", 7.5), ("3 foxes", None),
    ("**Score:** 8.5", 8.5), ("7, as it is a fox. 3 of 4", 7), ("9. It is one.", 9), ("10.5", None), ("4/5", None),
    ("yes", None), (None, None), (400, None), ("-6", None), ("Rating: -6", None), ("**−6**", None), ("- 6", 6)])
def test_ratings(server, caplog, answer, rating):
    """A rating is one number after the thoughts. What else is said, or refused, is worth the mean of its group's others,
    here 0 of none, with one warning a call. Each picture has an answer of its own, to a question with its own prompt."""
    server.says = {10: answer, 20: "2", 30: "3"}
    assert score(judge, [10, 30, 20], "{fox} owl cat") == [rating or 0, 3, 2]
    assert ["1 of 3 answers cannot be read: " in text for text in caplog.messages] == [True] * (rating is None)
    text = "Does the picture show this: {}? Answer with one number, 0 (no) to 10 (yes)."
    assert {asked: find_greens(pictures) for asked, *pictures in server.asked} == {
        text.format("{fox}"): [10], text.format("owl"): [30], text.format("cat"): [20]}

def test_what_cannot_be_read_does_not_move_the_policy(server):
    """In its group it is the mean of the others; where nothing of a group can be read, all are 0; where nothing at all,
    rewards would be equal for hours. An answer that was cut off may be a thought."""
    server.says = {10: "8", 20: "I cannot help", 30: "3", 40: "?"}
    assert score(judge, [10, 20, 30, 30, 40, 40], "fox fox fox fox owl owl") == pytest.approx([8, 14 / 3, 3, 3, 0, 0])
    server.change = {"finish_reason": "length"}
    with pytest.raises(grpo.BadInput, match="^2 of 2 answers cannot be read: '8'"):
        score(judge, [10, 10], "fox fox")

DIGITS = {"8": 0.5, "6": 0.25, "10": 0.125, "I": 0.125}
SPLIT = {"1": 0.5, "9": 0.25, "4": 0.25}  # each digit is a token

@pytest.mark.parametrize("reward, pieces, value", [
    (judge, [("8", DIGITS)], 54 / 7), (judge, [("▁8", {"▁8": 0.5, "8": 0.25, "6": 0.25})], (8 * 3 + 6) / 4),
    (judge, [("8", {"8": 0.9, "2": 0.1}), ("</think>", {}), ("8", DIGITS), (".", {})], (8 * 4 + 6 * 2 + 10) / 7),
    (judge, [("1", SPLIT), ("0", {"0": 1})], (10 * 2 + 9 + 4) / 4), (judge, [("9", SPLIT)], (10 * 2 + 9 + 4) / 4),
    (judge, [("1", SPLIT)], (1 * 2 + 9 + 4) / 4), (judge, [("8", DIGITS), (".", {}), ("5", {"5": 1})], 8.5),
    (judge, [("8.", {})], 8), (yes, [("Yes", {"Yes": 0.5, "yes": 0.1, "No": 0.2, "I": 0.2})], 0.75), (yes, "No, 1 is.", 0),
    (judge, [("8", {}), (".", {})], 8), (judge, [("8", {"I": 1})], 8), (judge, [("8", {"6": 0, "8": 0})], 8),
    (compare, [("2", {"1": 0.5, "2": 0.5}), (". In picture ", {}), ("2", {"2": 1})], 0.5),
    (judge, [("10", {"10": 0.5, "4": 0.5}), ("/", {}), ("10", {"10": 1})], 7),
    (yes, [("Yes", {"yes": 0.5, "no": 0.5}), (", it does: ", {}), ("yes", {"yes": 1})], 0.5)])
def test_an_answer_is_a_mean(server, reward, pieces, value):
    """Single digits are mostly equal within a group. Where each is a token, a 1 begins 10, too. The mean is that of the
    first such word after the thoughts; the plain answer counts where no other has a probability."""
    server.says = {10: pieces, 20: pieces}
    greens = [10, 20] if reward is compare else [10]
    assert score(reward, greens, "fox fox"[:4 * len(greens) - 1]) == pytest.approx([value] * len(greens))

def test_no_file_stays_open(server):
    """A client for each call, that nobody closed, ended a night with "Too many open files", also after errors."""
    server.answer = lambda text, pictures: "8" if "fox" in text else 500
    counts = []
    with mock.patch("time.sleep"):
        for prompts in ["fox fox"] * 3 + ["owl owl"] + ["fox fox"] * 3:
            with contextlib.suppress(grpo.BadInput):
                score(judge, [10, 20], prompts)
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[-1] < counts[1] + 5  # calls; the server's own files may be closed later

def test_a_server_that_never_answers_is_one_line(server, monkeypatch):
    """After minutes, not an hour; here after a tenth of a second."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    OpenAI = openai.OpenAI
    timeouts = []
    monkeypatch.setattr(openai, "OpenAI", lambda timeout, **known: timeouts.append(timeout) or OpenAI(timeout=0.1, **known))
    asleep = threading.Event()
    server.answer = lambda *_: asleep.wait(20) and "8"
    with pytest.raises(grpo.BadInput, match="any: Request timed out"):
        score(judge, [10], "fox")
    asleep.set()
    assert 60 <= timeouts[0] * 6 <= 900

NO_OTHERS = {"content": [{"token": "8", "logprob": 0, "bytes": [], "top_logprobs": None}]}

@pytest.mark.parametrize("most, refused, change, rating", [
    (5, "", {}, 54 / 7), (20, "top_logprobs", {}, 8), (20, "temperature", {}, 8), (20, "", {"logprobs": None}, 8),
    (20, "", {"logprobs": NO_OTHERS}, 8)])
def test_a_server_that_does_not_take_all(server, monkeypatch, most, refused, change, rating):
    """It is asked for less: five log-probs make a mean, and a number alone is a rating. If it is busy, it is awaited."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    answers = iter([429] * 4)
    server.answer, server.most, server.refused = lambda *_: next(answers, [("8", DIGITS)]), most, {refused}
    server.change = change
    assert score(judge, [10], "fox") == pytest.approx([rating])

def prefer_green(text, pictures):
    first, second = find_greens(pictures[-2:])
    return "1" if first > second else "2" if "x" in text else "0"

def test_compare_by_hand(server):
    """Each meets the others of its group, in both orders. What is always said of the first makes a tie."""
    server.answer = prefer_green
    assert score(compare, [10, 30, 20, 200, 200, 50], "x x x y y z") == [0, 1, 0.5, 0.5, 0.5, 0.5]
    text = "Which picture shows this better, the first or the second: x? Answer with one digit: 1, 2, or 0 if neither "
    assert sum([asked.startswith(text) for asked, *_ in server.asked]) == 3 * 2
    server.answer = lambda text, pictures: {10: "?", 50: "0"}.get(find_greens(pictures)[0], "2")
    assert score(compare, [10, 30, 50, 70, 80, 90], "x x y y z z") == [0.75, 0.25, 0.75, 0.25, 0.5, 0.5]
    server.answer = prefer_green
    groups = [grpo.Prompt("x") for _ in range(2)]  # of a list of one prompt: neighbours are not of one group
    assert compare(paint(10, 30, 20, 40), [groups[i // 2] for i in range(4)], [None] * 4) == [0, 1, 0, 1]

def test_edits_are_shown_with_their_source(server):
    """A photo is shown small. Two prompts of one instruction with two sources are two groups."""
    large, small = paint(100, 20)
    for reward, answers in {judge: ("8", "2"), kept: ("8", "2"), yes: ("yes", "no")}.items():
        server.says = dict(zip([10, 50], answers))
        assert score(reward, [10, 50], "paint paint", large.resize((160, 80)), small) in ([8, 2], [1, 0])
    assert sorted([find_greens(pictures) for _, *pictures in server.asked]) == [[20, 50]] * 3 + [[100, 10]] * 3
    for text, source, image in server.asked:
        assert source.size == image.size and "made from the first by this instruction: paint. Is " in text
    server.answer = prefer_green
    assert score(compare, [10, 30, 60, 40], "x x x x", *paint(100, 100, 20, 20)) == [0, 1, 1, 0]

@pytest.mark.parametrize("name, value, message", [
    ("JUDGE_MODEL", "other", "/v1/ other: Error code: 404 .* other does not exist"),
    ("OPENAI_BASE_URL", "http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1/ any: Connection error"),
    ("choices", None, "no answer in .*choices=None.*Too Many Requests"),
    ("openai", None, "needs pip install openai"), ("", "", "kept compares an edit with its source")])
def test_what_fails_for_all_is_one_line(server, monkeypatch, name, value, message):
    """Also a failure that comes as a reply without an answer, as from OpenRouter: it is no rating of 0."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setitem(os.environ if name.isupper() else sys.modules, name, value)
    server.answer = lambda *_: "8"
    server.reply = {name: value, "error": "Too Many Requests"} if name == "choices" else {}
    with pytest.raises(grpo.BadInput, match=f"^.*{message}.*$"):  # a dot is no end of a line
        score(judge if name else kept, [10, 20], "fox fox", None, *paint(30))
