"""Rewards that ask a vision-language model: `judge`, `kept`, `yes` and `compare`. rewards.py has
them, too; docs/rewards.md says what they need.

    export JUDGE_URL=http://127.0.0.1:8000 JUDGE_MODEL=Qwen/Qwen3-VL-8B-Instruct
    python grpo.py --reward examples/rewards.py:judge
    python -m examples.judge fox.png "a red fox"    # one question, to see that the server answers

The server speaks OpenAI's protocol, as vLLM, SGLang and most companies do. Its key, if it wants
one, is read from JUDGE_KEY.
"""
import argparse, base64, collections, concurrent.futures, email.utils, http.client, io, itertools
import json, math, os, re, sys, time, urllib.parse, urllib.request, warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
from grpo import BadInput, attempt, open_image
from PIL import ImageOps

WAITS = [2, 10]  # seconds after a first and after a second try that failed
TIMEOUT = 300  # seconds without a word from the server; a model that thinks may take minutes
# What is asked for with each question. Some models refuse log-probs, and some also any temperature
# but their own; those get the next line.
EXTRAS = [dict(temperature=0, logprobs=True, top_logprobs=20), dict(temperature=0), {}]

# --- The server ---------------------------------------------------------------
def find_endpoint(url):
    """JUDGE_URL is the server's root, or what clients call its base URL, which has a version."""
    base = url.strip().rstrip("/").removesuffix("/chat/completions")
    has_version = re.search(r"/v\d", urllib.parse.urlsplit(base).path)
    return base + ("" if has_version else "/v1") + "/chat/completions"

class NoErrors(urllib.request.HTTPErrorProcessor):
    """A reply is a reply, whatever its status. So no redirection is followed, either: it would take
    the key to another server."""
    def http_response(self, request, response):
        return response

    https_response = http_response

def make_request(body):
    """-> the request, and what opens it."""
    for name in ("JUDGE_URL", "JUDGE_MODEL"):
        if not os.environ.get(name):
            raise BadInput(f"{name}: is not set; this reward asks a server, and needs its address "
                           "(JUDGE_URL=http://127.0.0.1:8000) and the name of its model")
    url = find_endpoint(os.environ["JUDGE_URL"])
    if not re.match("https?://[^/]", url):
        raise BadInput(f"JUDGE_URL={os.environ['JUDGE_URL']}: must begin with http:// or https://")
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("JUDGE_KEY", "").strip()
    if not re.fullmatch("[!-~]*", key):  # http.client would print it in its error
        raise BadInput("JUDGE_KEY: must be one word of ASCII characters")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    openers = [NoErrors]
    host = urllib.parse.urlsplit(url).hostname
    if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127."):
        openers.append(urllib.request.ProxyHandler({}))  # a proxy would look on its own machine
    body = json.dumps({"model": os.environ["JUDGE_MODEL"], **body}).encode()
    request = urllib.request.Request(url, body, headers)
    return request, urllib.request.build_opener(*openers)

def send(body):
    """-> status, text of the server's reply; None and the error's text, if there is none. What
    passes by itself is tried three times: a server that is busy (429), fails (5xx), is silent for
    too long, or is just being started again."""
    request, opener = make_request(body)
    for seconds in [*WAITS, None]:
        try:
            with opener.open(request, timeout=TIMEOUT) as reply:
                status, text = reply.status, reply.read().decode("utf-8", "replace")
                wanted = reply.headers.get("Retry-After", "")
        except (OSError, http.client.HTTPException) as error:
            status, text, wanted = None, str(error) or repr(error), ""
        if status and status < 500 and status not in (408, 429):
            break
        if seconds is not None:
            time.sleep(max(seconds, read_wait(wanted)))
    return status, text

def read_wait(wanted):
    """Retry-After, which is a number of seconds or a date -> seconds. At most a minute: a run that
    waits for longer looks as if it hung."""
    date = email.utils.parsedate_tz(wanted)
    if date:
        seconds = email.utils.mktime_tz(date) - time.time()
    else:
        seconds = float(wanted) if re.fullmatch(r"\d+(\.\d+)?", wanted) else 0
    return min(max(seconds, 0), 60)

def fail(text):
    """The error names the server, but not the key, should the server have repeated it."""
    key = os.environ.get("JUDGE_KEY", "").strip()
    text = text.replace(key, "$JUDGE_KEY") if key else text
    raise BadInput(f"JUDGE_URL={os.environ['JUDGE_URL']} JUDGE_MODEL={os.environ['JUDGE_MODEL']}: "
                   f"{text:.500}")

def post(question):
    """A text and pictures -> what the model says, one of the protocol's `choices`."""
    text, *urls = question
    content = [{"type": "text", "text": text}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    for extra in EXTRAS:
        status, reply = send({"messages": [{"role": "user", "content": content}], **extra})
        if status not in (400, 422):
            break
    if status in (400, 413, 422):
        # Such as a picture that a filter rejects. As an error it would end the run again at each
        # --resume, so it counts as an answer that cannot be read.
        return {"message": {"content": None, "refusal": f"HTTP {status}: {reply}"}}
    if status != 200:
        fail(f"HTTP {status}: {reply}" if status else reply)
    try:
        choice, *_ = json.loads(reply)["choices"]
        choice["message"]["content"]
    except (ValueError, LookupError, TypeError):
        fail(f"a reply without an answer: {reply}")
    return choice

def ask(name, questions, read):
    """-> {question: what `read` makes of its answer, or None}. Eight questions are asked at a time,
    and equal ones once."""
    questions = list(dict.fromkeys(questions))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        choices = list(pool.map(post, questions))
    found = {}
    for question, choice in zip(questions, choices):
        message = choice["message"]
        said = message["content"] or message.get("refusal") or ""
        answer = skip_thoughts(message["content"] or "")
        if choice.get("finish_reason") == "length":
            answer = ""  # what was cut off may be thoughts, and a number in it anything
        tokens = (choice.get("logprobs") or {}).get("content") or []
        found[question] = read(answer, tokens)
        if found[question] is None:
            told = f"{said!r}" if len(said) < 200 else f"{said[:90]!r} .. {said[-90:]!r}"
            warnings.warn(f"{name} cannot read this answer: {told}")
    if found and all([value is None for value in found.values()]):
        fail(f"{name} can read none of {len(found)} answers, such as {told}")
    return found

def to_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

# --- What an answer says ------------------------------------------------------
def skip_thoughts(answer):
    """-> what stands after the last </think>; nothing, if a thought was begun and not ended."""
    tag = r"[<\[◁](/?)(?:think|thinking|thought|thoughts|reasoning)[>\]▷]"
    *_, last = [None, *re.finditer(tag, answer, re.IGNORECASE)]
    if last is None:
        return answer.strip()
    return answer[last.end():].strip() if last[1] else ""

# Scales that an answer repeats: 0 (no) to 10 (yes), 1-10, /10, out of 10.
SCALE = re.compile(
    r"(\b[01]( ?\(\w+\))? ?(to|up to|and|-|–|~|\.\.+) ?|/ ?|\bout of |(?<=\d) of )10(\.0)?\b",
    re.IGNORECASE)
# 7, 8.5 and 8,5, which is German for it; but not 2D, 85%, 1,000 or 8.5.1.
NUMBER = re.compile(
    r"(?<![a-z\d.,])[-−–]?\d+(\.\d+|,\d\d?)?(?![a-z\d]| ?%|[.,]\d)", re.IGNORECASE)

def read_rating(answer, tokens=()):
    """-> the one number of the answer, if that is within 0..10; else None. If the server told how
    likely other answers were, it is their mean: two pictures hardly ever have the same."""
    numbers = list(NUMBER.finditer(SCALE.sub(lambda scale: " " * len(scale[0]), answer)))
    # A number with a scale, as in "8/10, for its 3 foxes", needs not be the only one.
    numbers = [number for number in numbers if SCALE.match(answer, number.end())] or numbers
    values = {float(re.sub("[−–]", "-", number[0]).replace(",", ".")) for number in numbers}
    if len(values) != 1 or not 0 <= min(values) <= 10:
        return None
    return expect_rating(values.pop(), find_tokens(answer, numbers[0].start(), tokens))

def find_tokens(answer, place, tokens):
    """-> `tokens` from the one with this character of the answer on. Thoughts may stand before the
    answer among the tokens, even where the text comes without them (sglang#25055)."""
    texts = [token["token"] for token in tokens]
    start = "".join(texts).rfind(answer)
    ends = itertools.accumulate(map(len, texts))
    skipped = sum([end <= start + place for end in ends])
    return tokens[skipped:] if start >= 0 else []

def find_chances(token):
    """-> {text: probability} of the likeliest tokens in this one's place."""
    chances = collections.Counter()
    for other in token.get("top_logprobs") or []:
        chances[other["token"].strip().lower()] += math.exp(other["logprob"])
    return chances

def expect_rating(rating, tokens):
    """`tokens` begin with the one of the rating's first digit -> the mean of 0..10, each by its
    chance; the rating itself, if there are no chances."""
    chances = find_chances(tokens[0]) if tokens else {}
    weights = collections.Counter({value: chances.get(str(value), 0) for value in range(11)})
    said = tokens[0]["token"].strip() if tokens else ""
    if not said.isdecimal() or not weights[int(said)]:
        return rating
    # Where each digit is a token, "1" begins both 1 and 10. After a "1" the next token tells them
    # apart. Else "1" is taken for what is nearer to the other ratings, as chances have one peak.
    if not weights[10]:
        one = weights.pop(1)
        if said == "1":
            ten = find_chances(tokens[1])["0"] if len(tokens) > 1 else 0
        else:
            ten = find_mean(weights) > 5.5
        weights.update({1: one * (1 - ten), 10: one * ten})
    share = weights[int(rating)] / weights.total()
    return find_mean(weights) + rating % 1 * share  # 8.5 begins with an 8

def find_mean(weights):
    return sum([value * weight for value, weight in weights.items()]) / weights.total()

def read_yes(answer, tokens=()):
    """-> P(yes) in the place of the answer's one "yes" or "no"; without likelihoods 1 or 0."""
    words = list(re.finditer(r"\b(yes|no)\b", answer, re.IGNORECASE))
    if len({word[0].lower() for word in words}) != 1:
        return None
    place, word = words[0].start(), words[0][0].lower()
    rest = find_tokens(answer, place, tokens)
    chances = find_chances(rest[0]) if rest else {}
    return chances.get("yes", 0.0) if chances else float(word == "yes")

# What names the better picture: a word, or a digit that does not count things, as in "2 foxes".
WINNERS = re.compile(
    r"\b(?P<first>first|1st)\b|\b(?P<second>second|2nd)\b"
    r"|\b(?P<tie>neither|both|equal|equally|tie|same)\b"
    r"|\b(?:picture|image|photo|option|answer) ?\W?([012])\b|(?<![\w.,/-])([012])(?!\w|[.,/-]\d)"
    r"(?! (?!is|was|has|shows|wins|because|as|since|and|or|vs)[a-z])", re.IGNORECASE)

def read_winner(answer, tokens=()):
    """-> 1 if the first picture is better, 0 if the second is, 0.5 for a tie; None if it is not
    clear, as where both are named."""
    named = set()
    for match in WINNERS.finditer(answer):
        named.add(match.lastgroup or "tie first second".split()[int(match[4] or match[5])])
    if len(named) != 1 or re.search(r"\b(worse|not (the|[012]))\b", answer):
        return None
    return dict(first=1, second=0, tie=0.5)[named.pop()]

# --- The rewards --------------------------------------------------------------
RATE = "Answer with one number, 0 (no) to 10 (yes)."

def score(name, questions, read):
    """-> what `read` makes of the answers; 0 for those that it cannot read."""
    found = ask(name, questions, read)
    return [found[question] or 0.0 for question in questions]

def show_edit(text, image, prompt, source):
    """A question about a source, which is shown first, and its edit. The source is shown in the
    size of the edit: a photo would be megabytes of PNG."""
    made = f"The second picture was made from the first by this instruction: {prompt}. "
    return made + text, to_url(ImageOps.contain(source, image.size)), to_url(image)

def judge(images, prompts, targets=None):
    """A vision-language model's rating, 0 to 10: does the picture show what the prompt says? If the
    prompt has a source, is it edited so? JUDGE_URL is a server with OpenAI's protocol."""
    questions = []
    for image, prompt, source in zip(images, prompts, targets or [None] * len(images)):
        if source is None:
            questions.append((f"Does the picture show this: {prompt}? {RATE}", to_url(image)))
        else:
            text = f"Is what the instruction asks for done in the second? {RATE}"
            questions.append(show_edit(text, image, prompt, source))
    return score("judge", questions, read_rating)

def kept(images, prompts, targets):
    """Whether an edit left alone what the instruction does not name, 0 to 10, by `judge`'s model."""
    if None in targets:
        raise BadInput("kept compares an edit with its source, and a prompt has none")
    text = f"Is all that the instruction does not name the same in both? {RATE}"
    questions = [show_edit(text, *row) for row in zip(images, prompts, targets)]
    return score("kept", questions, read_rating)

def yes(images, prompts, targets=None):
    """P(yes), 0 to 1, of `judge`'s model, asked whether the picture shows what the prompt says, as
    VQAScore asks (arXiv 2404.01291)."""
    text = 'Does this figure show "{}"? Please answer yes or no.'
    questions = [(text.format(prompt), to_url(image)) for image, prompt in zip(images, prompts)]
    return score("yes", questions, read_yes)

def compare(images, prompts, targets=None):
    """How often it beats the other images of its group, 0 to 1; a tie is half. `judge`'s model sees
    each pair in both orders, G(G - 1) calls for a group of G. Equal images tie without a call."""
    text = ("Which picture shows this better, the first or the second: {}? "
            "Answer with one digit: 1, 2, or 0 if neither is better.")
    urls = [to_url(image) for image in images]
    questions = {}  # of each pair (i, j), of which i is shown first
    # Equal prompts stand next to each other. Images of two prompts are never compared; those of
    # edit.py are equal if their sources are, too.
    for _, group in itertools.groupby(
            range(len(images)), lambda i: (prompts[i], getattr(prompts[i], "source", None))):
        for i, j in itertools.permutations(group, 2):
            questions[i, j] = (text.format(prompts[i]), urls[i], urls[j])
    asked = [question for question in questions.values() if question[1] != question[2]]
    winners = ask("compare", asked, read_winner)
    wins = [[] for _ in images]
    for (i, j), question in questions.items():
        win = winners.get(question)
        win = 0.5 if win is None else win
        wins[i].append(win)
        wins[j].append(1 - win)
    return [sum(each) / len(each) if each else 0.5 for each in wins]

compare.relative = True  # its scores say nothing across calls, as each call has other opponents

# --- The program --------------------------------------------------------------
def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture")
    parser.add_argument("prompt", help="what it should show")
    if len(sys.argv) == 1:
        return parser.print_help()
    args = parser.parse_args()
    try:
        image = attempt(args.picture, open_image, args.picture)
        print(f"{judge([image], [args.prompt])[0]:.3f}")
    except BadInput as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")

if __name__ == "__main__":
    main()
