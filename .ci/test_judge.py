"""Tests of examples/judge.py and of the rewards that it serves: real requests to a server on the loopback, which is as
strict as those of OpenAI's protocol (stand_in.py). What it answers depends on the green of the pictures."""
import email.utils, os, signal, socket, threading, time, warnings

import pytest
from PIL import Image

from examples import edit, judge, rewards
from stand_in import StandIn

def paint(*greens):
    return [Image.new("RGB", (16, 8), (90, int(green), 50)) for green in greens]

def find_greens(pictures):
    return [picture.getpixel((0, 0))[1] for picture in pictures]

@pytest.fixture
def server(monkeypatch):
    """Its `answer` may be a dict {green of the last picture: answer}."""
    def answer(text, pictures):
        said = server.says
        return said(text, pictures) if callable(said) else said[find_greens(pictures)[-1]]

    server = StandIn(answer)
    for name, value in dict(JUDGE_URL=server.address, JUDGE_MODEL="any", http_proxy="http://127.0.0.1:9",
                            no_proxy="", JUDGE_KEY="").items():  # a proxy that is not there
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(judge, "WAITS", [0.01, 0.02])
    monkeypatch.setattr(judge, "READ", set())
    monkeypatch.setattr(judge, "EXTRAS", [*judge.EXTRAS])
    judge.UNREAD.clear()
    yield server
    server.shutdown()
    server.server_close()

@pytest.fixture
def told():
    """told() -> the texts of all warnings of the test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(each.message) for each in caught]

# --- What an answer says ------------------------------------------------------------------------------------
@pytest.mark.parametrize("answer, rating", [
    ("8", 8), ("8.", 8), ("8,5", 8.5), ("6.25", 6.25), ("0", 0), ("10", 10), ("10/10", 10), ("1/10", 1), ("8 / 10.", 8),
    ("I'd say 6.5 of 10", 6.5), ("a rating of 10", 10), ("**Rating:** 7", 7), ("8分", 8), ("\\boxed{8}", 8),
    ("on a scale of 0 to 10: 7", 7), ("On a scale from 0 (no) to 10 (yes), 0.", 0), ("1-10: 9", 9), ("8 out of 10", 8),
    ("8/10, for its 3 foxes", 8), ("8 out of 10, for its 3 foxes", 8), ("8 / 10, 3 foxes", 8),
    ("between 0 and 10, it is 4.", 4), ("5/5", None), ("4 / 5", None), ("5 of 5", None),
    ("<think>3 squares, 9?</think> 8", 8), ("so 3 of them</think>\n\n8", 8), ("<think>1</think><think>2</think>8", 8),
    ("<thinking>5</thinking><answer>8</answer>", 8), ("[THINK]5[/THINK]8", 8), ("◁think▷5◁/think▷8", 8),
    ("85", None), ("-3", None), ("−3", None), ("10.5", None), ("1,000", None), ("85%", None), ("4/5", None),
    ("7-8", None), ("7 or 8", None), ("3 foxes, so 8", None), ("2D", None), ("eight", None), ("", None), (None, None),
    ("<think>3 squ", None), ("<think>3</think>7<think>8", None), ("8 <think>sure?</think>", None)])
def test_ratings(server, told, answer, rating):
    """The first number was taken: of a thought, of the scale, of 85 and -3. Another picture's answer can be read."""
    server.says = {0: answer, 9: "2"}
    assert rewards.judge(paint(0, 9), ["a {fox}", "an owl"]) == [rating or 0, 2]
    assert told() == [f"judge cannot read 1 of 2 answers, such as {answer or ''!r}"] * (rating is None)
    asked = {text: find_greens(pictures) for text, *pictures in server.asked}
    text = "Does the picture show this: {}? Answer with one number, 0 (no) to 10 (yes)."
    assert asked == {text.format("a {fox}"): [0], text.format("an owl"): [9]}

@pytest.mark.parametrize("answer, win", [
    ("1", 1), ("2.", 0), ("0", 0.5), ("**2**", 0), ("Picture 2.", 0), ("picture #1 is better", 1), ("Answer: 2", 0),
    ("The first, because it has 2 foxes.", 1), ("I see 1 fox in the second.", 0), ("1 looks better.", 1),
    ("2, because it has 1 fox", None), ("1 looks better than 2.", None), ("2 matches the prompt better than 1.", None),
    ("1 beats 2", None), ("I prefer 1 over 2", None), ("1 out of 2", None), ("The first is not better.", None),
    ("The first picture doesn't show a fox.", None), ("Picture 1 is less accurate.", None), ("The 2nd lacks it", None),
    ("Neither.", 0.5), ("Both show it equally.", 0.5), ("<think>1, no: the first</think>2", 0),
    ("<think>1", None), ("1 and 2", None), ("1, 2", None), ("about 12", None), ("1.5", None), (None, None),
    ("The second. The first has no fox", None), ("The picture with 2 foxes", None), ("not the first", None),
    ("The first is worse", None), ("A", None)])
def test_winners(server, told, answer, win):
    """A number of foxes won, and a thought that was cut off. What cannot be read is a tie, and is told."""
    server.says = lambda text, pictures: "1" if "owl" in text else answer if find_greens(pictures) == [0, 9] else "0"
    wins = rewards.compare(paint(0, 9, 1, 2), ["fox", "fox", "owl", "owl"])
    first = (0.5 if win is None else win) / 2 + 0.25
    assert wins == [first, 1 - first, 0.5, 0.5]
    assert told() == [f"compare cannot read 1 of 4 answers, such as {answer or ''!r}"] * (win is None)

def test_compare_by_hand(server):
    """A picture was compared with those of another prompt, or its place among the two decided."""
    def prefer_green(text, pictures):
        first, second = find_greens(pictures)
        return f"Picture {1 if first > second else 2}."

    server.says = prefer_green
    assert rewards.compare(paint(10, 30, 20, 200, 220, 220), "aaabbb") == [0, 1, 0.5, 0, 0.75, 0.75]
    assert len(server.asked) == 3 * 2 + 2  # equal pictures tie, and an equal question is asked once
    for two_prompts in ("ab", [edit.Edit("a", "x.png"), edit.Edit("a", "y.png")]):
        assert rewards.compare(paint(1, 2), two_prompts) == [0.5, 0.5] and len(server.asked) == 8
    server.says = lambda text, pictures: "1"  # it prefers what it sees first
    assert rewards.compare(paint(10, 30, 20), "aaa") == [0.5] * 3

@pytest.mark.parametrize("change", [
    *[{"message": {"role": "assistant", "content": "I see 3 foxes and"}, "finish_reason": reason}
      for reason in ("length", "content_filter", "error")],
    {"message": {"role": "assistant", "content": None, "refusal": "I cannot help"}}])
@pytest.mark.parametrize("name", ["judge", "compare", "yes"])
def test_no_answer_can_be_read(server, name, change):
    """All rewards were equal in every step, for hours. Cut off, a thought without a tag would look like a rating."""
    server.says, server.change = lambda text, pictures: "8", change
    with pytest.raises(judge.BadInput, match=f"^JUDGE_URL=.* {name} can read none of . answers, such as 'I "):
        getattr(rewards, name)(paint(0, 9), ["a fox"] * 2)

def test_what_cannot_be_read_is_told_each_time(server):
    """Python shows an equal warning once: half of a step's ratings were 0, in each step, after one line in the first."""
    server.says = {0: "", 9: "8"}
    with warnings.catch_warnings(record=True) as caught:
        for _ in range(3):
            assert rewards.judge(paint(0, 9), ["a fox"] * 2) == [0, 8]
    assert len(caught) == 3

# --- Likelihoods --------------------------------------------------------------------------------------------
DIGITS = {"8": 0.5, "7": 0.3, "10": 0.1, "I": 0.1}
SPLIT = {"1": 0.6, "9": 0.3, "5": 0.1}  # each digit is a token, so "1" also begins "10"

@pytest.mark.parametrize("pieces, rating", [
    ([("8", DIGITS)], (8 * 5 + 7 * 3 + 10) / 9),
    ([(" ", {" ": 1}), ("8", DIGITS | {" 8": 0.1}), ("/10", {"/10": 1})], (8 * 6 + 7 * 3 + 10) / 10),
    ([("<think>", {}), ("8", {"8": 0.9, "2": 0.1}), ("</think>", {}), ("8", DIGITS)], (8 * 5 + 7 * 3 + 10) / 9),
    ([("On a scale of 0 to 10, ", {}), ("8", DIGITS)], (8 * 5 + 7 * 3 + 10) / 9),
    ([("8", DIGITS), (".", {".": 1}), ("5", {"5": 1})], (8.5 * 5 + 7 * 3 + 10) / 9),
    ([("1", SPLIT), ("0", {"0": 0.75, "": 0.25})], 10 * 0.45 + 1 * 0.15 + 9 * 0.3 + 5 * 0.1),
    ([("1", SPLIT), ("", {"": 0.75, "0": 0.25})], 10 * 0.15 + 1 * 0.45 + 9 * 0.3 + 5 * 0.1),
    ([("9", {"9": 0.5, "1": 0.4, "5": 0.1})], 10 * 0.4 + 9 * 0.5 + 5 * 0.1),  # 10 is nearer to the others
    ([("0", {"0": 0.5, "1": 0.4, "5": 0.1})], 1 * 0.4 + 5 * 0.1),
    ([("9", {"9": 0.5, "10": 0.2, "1": 0.2, "5": 0.1})], 4.5 + 2 + 0.2 + 0.5),  # 10 is a token of its own
    ([("8", {})], 8), ([("8/10", {"8/10": 1})], 8)])
@pytest.mark.parametrize("are_hidden", [False, True])
def test_rating_is_an_expectation(server, pieces, rating, are_hidden):
    """Ratings of one digit are mostly equal within a group. A server may hide the thoughts in the text alone."""
    server.says = lambda text, pictures: pieces
    if are_hidden:
        text = "".join([token for token, _ in pieces]).rpartition("</think>")[2]
        server.change = {"message": {"content": text, "reasoning_content": "8"}}
    assert rewards.judge(paint(0), ["a fox"]) == pytest.approx([rating])

@pytest.mark.parametrize("answer, chance", [
    ([("<think>no</think>", {"<think>no</think>": 1}), ("Yes", {"Yes": 0.5, "yes": 0.1, "No": 0.3})], 0.6),
    ([("No", {"No": 0.9, " yes": 0.05})], 0.05), ([("▁Yes", {"▁Yes": 0.6, "ĠNo": 0.3})], 0.6), ("No.", 0), ("Yes", 1), ("yes or no", 0),
    ([('"Yes', {'"Yes': 0.9})], 1), ([("<answer>Yes", {"<answer>Yes": 1})], 1),  # a token with more than the word
    ([("Yes", {"No": 0.4})], 1), ([("Yes", {"YES": 0.9, "yes": 0.15})], 1)])  # its own chance is not told; rounding
def test_yes_is_a_probability(server, told, answer, chance):
    """As VQAScore takes it: not divided by P(yes) + P(no); in whatever case the token is. A yes was worth 0."""
    server.says = {0: answer, 9: "yes"}
    assert rewards.yes(paint(0, 9), ["a fox"] * 2) == pytest.approx([chance, 1])
    assert told() == ["yes cannot read 1 of 2 answers, such as 'yes or no'"] * (answer == "yes or no")
    assert server.asked[0][0] == 'Does this figure show "a fox"? Please answer yes or no.'

@pytest.mark.parametrize("change, score", [
    ({"message": {"content": [{"type": "thinking", "thinking": "9"}, {"type": "text", "text": "8"}]}}, 8),
    ({"message": {"content": 8}}, 0), ({"message": {"content": None, "refusal": ["no"]}}, 0), ({"message": None}, 0),
    *[({"logprobs": each}, 8) for each in (
        [], {"content": "8"}, {"content": [{}]}, {"content": [{"token": "8", "top_logprobs": {"8": -0.1}}]},
        {"content": [{"token": "8", "top_logprobs": [{"token": "8", "logprob": None}]}]},
        {"content": [{"token": "8", "top_logprobs": [{"token": "8", "logprob": 1e9}]}]},
        {"content": [{"token": "8", "top_logprobs": [{"token": "8", "logprob": float("nan")}]}]})]])
def test_replies_of_another_form(server, told, change, score):
    """Some servers send parts, or likelihoods in a form of their own. One such reply ended a run with a traceback."""
    server.says = {0: "8", 9: "8"}
    assert rewards.judge(paint(9), ["an owl"]) == [8]
    server.change = change
    assert rewards.judge(paint(0), ["a fox"]) == [score]
    assert len(told()) == (score == 0)

@pytest.mark.parametrize("refused", [{"top_logprobs", "logprobs"}, {"top_logprobs", "logprobs", "temperature"}])
def test_a_model_that_refuses_settings(server, refused):
    """Some give no likelihoods, and some no other temperature than their own: HTTP 400."""
    server.says, server.refused = {0: [("8", DIGITS)]}, refused
    assert rewards.judge(paint(0), ["a fox"]) == [8]
    asked = server.requests
    assert rewards.judge(paint(0), ["an owl"]) == [8] and server.requests == asked + 1  # it has learnt

def test_a_server_that_gives_few_likelihoods(server):
    """vLLM gives five, if it is not started for more: `yes` was 0 or 1, and ratings were whole."""
    server.says, server.most = {0: [("8", DIGITS)]}, 5
    assert rewards.judge(paint(0), ["a fox"]) == [pytest.approx((8 * 5 + 7 * 3 + 10) / 9)]

# --- Edits --------------------------------------------------------------------------------------------------
def test_edits_are_shown_with_their_source(server):
    """Result before source would train towards leaving the picture as it is. A large photo would be megabytes."""
    server.says = lambda text, pictures: str(find_greens(pictures)[0] // 20 + len(pictures))
    source, = paint(100)
    large = source.resize((320, 80))
    assert rewards.judge(paint(40, 60), ["paint it"] * 2, [large, None]) == [7, 4]
    assert rewards.kept(paint(80), ["paint it"], [large]) == [7]
    (alone, *_), (judged, *edit), (kept, *_) = sorted(server.asked, key=lambda asked: find_greens(asked[1:])[-1] != 60)
    made = "The second picture was made from the first by this instruction: paint it. "
    assert alone.startswith("Does the picture show this: paint it?") and find_greens(edit) == [100, 40]
    assert judged == f"{made}Is what the instruction asks for done in the second? {rewards.RATE}"
    assert kept == f"{made}Is all that the instruction does not name the same in both? {rewards.RATE}"
    assert edit[0].width == 16
    with pytest.raises(judge.BadInput, match="^kept compares an edit with its source"):
        rewards.kept(paint(0), ["paint it"], [None])

# --- The server ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/", "/v1/chat/completions", " \n"])
def test_addresses(server, monkeypatch, end):
    """/v1/v1 and //v1 were 404. The stand-in knows one path; http_proxy, which is set, must not be asked."""
    monkeypatch.setenv("JUDGE_URL", server.address.replace("127.0.0.1", "localhost") + end)
    server.says = {0: "8"}
    assert rewards.judge(paint(0), ["a fox"]) == [8]
    for typed, asked in (("https://h/api/paas/v4/", "https://h/api/paas/v4/chat/completions"),
                         ("https://v1.h:80/openai", "https://v1.h:80/openai/v1/chat/completions"),
                         ("https://h/inference/chat/completions", "https://h/inference/chat/completions"),
                         ("https://h/models/@cf/v1?key=s", "https://h/models/@cf/v1/chat/completions?key=s"),
                         ("https://h/a/chat/completions?api-version=1", "https://h/a/chat/completions?api-version=1")):
        assert judge.find_endpoint(typed)[0] == asked

def test_a_proxy_is_used_for_others(server, monkeypatch):
    """Many machines reach other hosts through one only."""
    monkeypatch.setenv("JUDGE_URL", "http://judge.invalid:8000")
    with pytest.raises(judge.BadInput, match="JUDGE_URL=http://judge.invalid:8000 JUDGE_MODEL=any: .*refused"):
        rewards.judge(paint(0), ["a fox"])
    monkeypatch.setenv("http_proxy", server.address)  # which knows no such path
    with pytest.raises(judge.BadInput, match="HTTP 404: .*Not Found: http://judge.invalid:8000/v1/chat/completions"):
        rewards.judge(paint(0), ["a fox"])
    monkeypatch.delenv("http_proxy")
    for address, told in (("http://judge..invalid:8000", "label"), (server.address + "/v1\u200b", "ascii")):
        monkeypatch.setenv("JUDGE_URL", address)
        with pytest.raises(judge.BadInput, match=told):  # UnicodeErrors
            rewards.judge(paint(0), ["a fox"])

@pytest.mark.parametrize("key", ["sk-sesame\n", "0", "8", "e", "token", "content"])
def test_the_key_reaches_the_server(server, monkeypatch, key):
    """Local servers have keys such as 0: it was blotted out in the reply, before that was read. A file gives a key a
    line of its own."""
    server.says, server.key = {0: "8"}, key.strip()
    monkeypatch.setenv("JUDGE_KEY", key)
    assert rewards.judge(paint(0), ["a fox"]) == [8]

def test_a_key_without_permission_ends_a_run(server):
    """As if a filter had refused 50 pictures, a step was trained with zeros."""
    server.says = {0: "8"}
    assert rewards.judge(paint(0), ["a fox"]) == [8]
    server.troubles = [(403, {})]
    with pytest.raises(judge.BadInput, match="HTTP 403"):
        rewards.judge(paint(0), ["an owl"])

@pytest.mark.parametrize("key, message", [
    ("sk-wrong", r"HTTP 401: .*provided: Bearer \$JUDGE_KEY"), ("sk-wrong\nsk", "one word"), ("sk-wrong’", "one word"),
    ("", "HTTP 401"), ("sk-sesame", "HTTP 302: moved to http://127.0.0.2:9/: type this address")])
def test_the_key_reaches_nobody_else(server, monkeypatch, capfd, key, message):
    """Neither a log, nor another server, to which this one redirects."""
    server.says, server.key = {0: "8"}, "sk-sesame"
    server.troubles = [(302, {"Location": "http://127.0.0.2:9/"})] * (key == server.key)
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(judge.BadInput, match=message) as caught:
        rewards.judge(paint(0), ["a fox"])
    assert "sk-" not in str(caught.value) + str(capfd.readouterr())

@pytest.mark.parametrize("trouble, told", [
    *[(status, f"HTTP {status}: .*trouble") for status in (408, 409, 425, 429, 500, 503, 529)],
    *[(body, "judge can read none of 1 answers, such as 'HTTP 200: ") for body in (
        b'{"error": {"code": 429}}', b'{"choices": [{"message": {"content": "8"', b"<html>", b"[]", b'{"choices": []}')]])
def test_three_tries(server, trouble, told):
    """One 503 ended a run of days; a relay may say so, or break off, after a status of 200. The third of three is an
    error, and is told in one line; after a 200 it is an answer that cannot be read."""
    server.says, server.troubles = {0: "8"}, [(trouble, {})] * 2
    assert rewards.judge(paint(0), ["a fox"]) == [8] and server.requests == 3
    server.troubles = [(trouble, {})] * 3
    judge.READ.clear()
    with pytest.raises(judge.BadInput, match=f"^JUDGE_URL={server.address} JUDGE_MODEL=any: {told}"):
        rewards.judge(paint(0), ["a fox"])
    assert server.requests == 6

def test_a_byte_order_mark(server):
    """It ended a run, as the reply was no JSON."""
    server.says, server.troubles = {0: "8"}, [(b'\xef\xbb\xbf{"choices": [{"message": {"content": "7"}}]}', {})]
    assert rewards.judge(paint(0), ["a fox"]) == [7]

@pytest.mark.parametrize("wanted, seconds", [
    ("7", 7), ("0.5", 2), ("86400", 60), ("Wed, 21 Oct 99999 07:28:00 GMT", 2), (7, 7), (-99, 2), ("soon", 2), (None, 2)])
def test_retry_after(server, monkeypatch, wanted, seconds):
    """A server that says when it will be free is asked then, and not before; numbers here are dates."""
    waited = []
    monkeypatch.setattr(judge.time, "sleep", waited.append)
    monkeypatch.setattr(judge, "WAITS", [2, 10])
    if isinstance(wanted, int):
        wanted = email.utils.formatdate(time.time() + wanted, usegmt=True)
    server.says, server.troubles = {0: "8"}, [(429, {"Retry-After": wanted} if wanted else {})]
    assert rewards.judge(paint(0), ["a fox"]) == [8] and waited == [pytest.approx(seconds, abs=2)]

def test_a_server_that_is_silent_or_down(monkeypatch, server):
    """A timeout passes by itself; a connection that is refused is told in one line."""
    monkeypatch.setattr(judge, "TIMEOUT", 0.3)

    def answer(text, pictures):
        time.sleep(1 if len(server.asked) < 3 else 0)  # longer than the timeout
        return "8"

    server.says = answer
    assert rewards.judge(paint(0), ["a fox"]) == [8] and len(server.asked) == 3
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
    with pytest.raises(judge.BadInput, match=r"^JUDGE_URL=\S+ JUDGE_MODEL=any: .*refused"):
        rewards.judge(paint(0), ["a fox"])

@pytest.mark.parametrize("status", [400, 403, 451])
def test_a_prompt_or_a_picture_that_is_always_refused(server, told, status):
    """A filter refuses it at each --resume, too. evaluate.py asks prompt by prompt: it ended, and all that was drawn
    was lost. A server from which nothing can be read any more ends a run, later."""
    server.says = lambda text, pictures: status if find_greens(pictures) != [9] else "8"
    assert rewards.judge(paint(0, 9), ["a fox"] * 2) == [0, 8]
    assert f"cannot read 1 of 2 answers, such as 'HTTP {status}: " in told()[0] and "not allowed" in told()[0]
    for i in range(judge.MANY):  # in a row
        assert rewards.judge(paint(10 + i), ["an owl"]) == [0]
    assert len(judge.EXTRAS) == 4  # nothing was learnt from a refusal of all
    with pytest.raises(judge.BadInput, match=f"judge can read none of {judge.MANY + 1} answers"):
        rewards.judge(paint(99), ["an owl"])

@pytest.mark.parametrize("name, value, message", [
    ("JUDGE_MODEL", "other", "HTTP 404: .*The model other does not exist"),
    ("JUDGE_MODEL", "", "JUDGE_MODEL: is not set"), ("JUDGE_URL", "", "JUDGE_URL: is not set"),
    ("JUDGE_URL", "127.0.0.1:80", "must begin with http"), ("JUDGE_URL", "http://", "must begin with http"),
    ("JUDGE_URL", "http://:8000", "and a host"), ("JUDGE_URL", "http://[::1", "Invalid IPv6"),
    ("JUDGE_URL", "http://127.0.0.1:port", "Port could not be cast"),
    ("JUDGE_URL", "http://me:sesame@127.0.0.1", "without a password"),
    ("JUDGE_URL", "http://h:port?key=sesame", "Port could not be cast")])
def test_wrong_settings(run, monkeypatch, server, name, value, message):
    """One line, without a traceback; the program asks one question, to try them."""
    server.says = {0: "8"}
    Image.new("RGB", (8, 8)).save("fox.png")
    assert run("judge", "fox.png fox") == (0, "8\n", "")
    monkeypatch.setenv(name, value)
    code, out, error = run("judge", "fox.png fox")
    assert code == 2 and not out and message.split(": .*")[-1] in error and error.count("\n") == 1
    assert "sesame" not in error

def test_ctrl_c_does_not_wait_for_the_judge(server, monkeypatch):
    """It waited for up to three timeouts of five minutes, as Python waits for the threads of an executor."""
    begun, goes_on, answered = threading.Event(), threading.Event(), threading.Event()
    server.says = lambda text, pictures: begun.set() or goes_on.wait(20) or answered.set() or "8"

    def interrupt():
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        rewards.judge(paint(0), ["a fox"])
    assert not answered.is_set()
    goes_on.set()
