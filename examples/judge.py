"""What asks a vision-language model, and reads its answers, for the rewards `judge`, `kept`, `yes`
and `compare` of rewards.py. docs/rewards.md has the details.

    export JUDGE_URL=http://127.0.0.1:8000 JUDGE_MODEL=Qwen/Qwen3-VL-8B-Instruct
    python -m examples.judge fox.png "What is this?"    # to see that the server answers
    python grpo.py --reward examples/rewards.py:judge

The server speaks OpenAI's protocol, as vLLM, SGLang and most companies do. Its key, if it wants
one, is read from JUDGE_KEY.
"""
import argparse, base64, collections, email.utils, http.client, io, itertools, json, math
import multiprocessing.pool, os, re, sys, time, urllib.parse, urllib.request, warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
from grpo import BadInput, attempt, open_image

WAITS = [2, 10]  # seconds after a first and after a second try that failed
TIMEOUT = 300  # seconds without a word from the server; a model that thinks may take minutes
# What is asked for with each question. Some servers give fewer log-probs, some models refuse them,
# and some also any temperature but their own; those get the next line.
EXTRAS = [dict(temperature=0, logprobs=True, top_logprobs=20),
          dict(temperature=0, logprobs=True, top_logprobs=5), dict(temperature=0), {}]

# --- The server ---------------------------------------------------------------
def find_endpoint(url):
    """JUDGE_URL is the server's root, its base URL, with a version, or the whole address -> where
    to ask, its host."""
    parts = urllib.parse.urlsplit(url.strip())
    parts.port  # a ValueError if it is no number: no request could say so better
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError("must begin with http:// or https:// and a host, without a password")
    path = parts.path.rstrip("/")
    if not path.endswith("/chat/completions"):
        path += ("" if re.search(r"/v\d", path) else "/v1") + "/chat/completions"
    return parts._replace(path=path).geturl(), parts.hostname

class NoErrors(urllib.request.HTTPErrorProcessor):
    """A reply is a reply, whatever its status. So no redirection is followed, either: it would take
    the key to another server."""
    def http_response(self, request, response):
        return response

    https_response = http_response

def read_key():
    key = os.environ.get("JUDGE_KEY", "").strip()
    if not re.fullmatch("[!-~]*", key):  # http.client would print it in its error
        raise BadInput("JUDGE_KEY: must be one word of ASCII characters")
    return key

def make_request(body):
    """-> the request, and what opens it."""
    for name in ("JUDGE_URL", "JUDGE_MODEL"):
        if not os.environ.get(name):
            raise BadInput(f"{name}: is not set; this reward asks a server, and needs its address "
                           "(JUDGE_URL=http://127.0.0.1:8000) and the name of its model")
    url, host = attempt(tell_server(), find_endpoint, os.environ["JUDGE_URL"])
    headers = {"Content-Type": "application/json"}
    if read_key():
        headers["Authorization"] = f"Bearer {read_key()}"
    openers = [NoErrors]
    if host in ("localhost", "::1", "0.0.0.0") or host.startswith("127."):
        openers.append(urllib.request.ProxyHandler({}))  # a proxy would look on its own machine
    body = json.dumps({"model": os.environ["JUDGE_MODEL"], **body}).encode()
    request = urllib.request.Request(url, body, headers)
    return request, urllib.request.build_opener(*openers)

def send(body):
    """-> status, text of the server's reply; None and the error's text, if there is none. What
    passes by itself is tried three times: a server that is busy (429), fails (5xx), is silent for
    too long, or is just being started again; or one that says so, or breaks off, after a 200."""
    request, opener = make_request(body)
    for seconds in [*WAITS, None]:
        try:
            with opener.open(request, timeout=TIMEOUT) as reply:
                status, text = reply.status, reply.read().decode("utf-8-sig", "replace")
                wanted = reply.headers.get("Retry-After", "")
                moved = reply.headers.get("Location") if 300 <= status < 400 else None
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            status, text, wanted = None, str(error) or repr(error), ""
        if status and status < 500 and status not in (408, 409, 425, 429) and (
                status != 200 or read_choice(text)):
            break
        if seconds is not None:
            time.sleep(max(seconds, read_wait(wanted)))
    return status, f"moved to {moved}: type this address" if status and moved else text

def read_choice(reply):
    """The text of a reply -> what the model says, one of the protocol's `choices`, or None. What a
    filter has stopped may have no message."""
    try:
        choice, *_ = json.loads(reply)["choices"]
        choice["message"] = dict(choice.get("message") or {})
        return choice
    except (ValueError, LookupError, TypeError, AttributeError):
        return None

def read_wait(wanted):
    """Retry-After, which is a number of seconds or a date -> seconds. At most a minute: a run that
    waits for longer looks as if it hung."""
    try:
        seconds = email.utils.mktime_tz(email.utils.parsedate_tz(wanted)) - time.time()
    except (TypeError, ValueError, OverflowError):  # it is no date, or one of no calendar
        seconds = float(wanted) if re.fullmatch(r"\d+(\.\d+)?", wanted) else 0
    return min(max(seconds, 0), 60)

def hide_key(text):
    """Of what is printed: some servers repeat the key."""
    return text.replace(read_key() or "\0", "$JUDGE_KEY")

def tell_server():
    """Without what may be secret in an address: a password, or a key behind the ?."""
    return "JUDGE_URL=" + re.sub("//.*@", "//..@", os.environ["JUDGE_URL"].partition("?")[0])

def fail(text):
    raise BadInput(f"{tell_server()} JUDGE_MODEL={os.environ['JUDGE_MODEL']}: "
                   f"{hide_key(text):.500}")

def post(question):
    """A text and pictures -> what the model says, one of the protocol's `choices`."""
    text, *urls = question
    content = [{"type": "text", "text": text}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    refused = []
    for extra in [*EXTRAS]:
        status, reply = send({"messages": [{"role": "user", "content": content}], **extra})
        if status not in (400, 422):
            break
        if re.search("logprob|temperature", reply):
            refused.append(extra)
    if status == 200:  # all later questions go without them
        EXTRAS[:] = [extra for extra in EXTRAS if extra not in refused]
    # What a filter rejects would, as an error, end the run again at each --resume. So it counts as
    # an answer that cannot be read. A wrong key may be a 403, too.
    is_filter = re.search("flagged|moderation|safety|content.?(filter|policy)", reply, re.IGNORECASE)
    if status not in (200, 400, 413, 422, 451) and not (status == 403 and is_filter):
        fail(f"HTTP {status}: {reply}" if status else reply)
    choice = read_choice(reply) if status == 200 else None
    return choice or {"message": {"refusal": f"HTTP {status}: {reply}"}}

READ = set()  # rewards that could read an answer
UNREAD = collections.Counter()  # answers that they could not read, in a row
MANY = 50  # such answers end a run; of one prompt all may be refused, and evaluate.py asks for each
CUT = ("length", "content_filter", "error", "abort")  # reasons to end amid an answer

def ask(name, questions, read):
    """-> {question: what `read` makes of its answer, or None}. Eight questions are asked at a time,
    and equal ones once. If no answer could ever be read, or MANY in a row could not, that is an
    error: all rewards would be equal, for hours."""
    questions = list(dict.fromkeys(questions))
    with multiprocessing.pool.ThreadPool(8) as pool:  # Ctrl-C and an error end it at once
        choices = list(pool.imap(post, questions))
    found = {}
    unread = []
    for question, choice in zip(questions, choices):
        content = read_text(choice["message"])
        said = str(content or choice["message"].get("refusal") or "")
        answer = skip_thoughts(content)
        if choice.get("finish_reason") in CUT:
            answer = ""  # what was cut off may be thoughts, and a number in it anything
        found[question] = read_answer(read, answer, choice)
        if found[question] is not None:
            READ.add(name)
            UNREAD[name] = 0
            continue
        UNREAD[name] += 1
        unread.append(f"{said!r}" if len(said) < 200 else f"{said[:90]!r} .. {said[-90:]!r}")
    if unread and UNREAD[name] > (MANY if name in READ else 0):
        fail(f"{name} can read none of {UNREAD[name]} answers, such as {unread[-1]}")
    if unread:
        with warnings.catch_warnings():
            warnings.simplefilter("always")  # by default, an equal one is shown once
            warnings.warn(f"{name} cannot read {len(unread)} of {len(questions)} answers, such as "
                          f"{hide_key(unread[0])}")
    return found

def read_text(message):
    """The protocol has a text here, or a list of parts."""
    parts = message.get("content")
    if isinstance(parts, list):
        parts = "".join([str(part.get("text", "")) for part in parts
                         if isinstance(part, dict) and part.get("type") == "text"])
    return parts if isinstance(parts, str) else ""

def read_answer(read, answer, choice):
    """-> what `read` makes of an answer, without likelihoods that break the protocol."""
    try:
        value = read(answer, choice["logprobs"]["content"])
        if value is None or math.isfinite(value):
            return value
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        pass
    return read(answer)

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
FRACTION = re.compile(r"\d ?(/|(out )?of) ?\d", re.IGNORECASE)  # of another scale, as 4/5

def read_rating(answer, tokens=()):
    """-> the one number of the answer, if that is within 0..10; else None. If the server told how
    likely other answers were, it is their mean: two pictures hardly ever have the same."""
    without_scale = SCALE.sub(lambda scale: " " * len(scale[0]), answer)
    numbers = list(NUMBER.finditer(without_scale))
    # A number with a scale, as in "8/10, for its 3 foxes", needs not be the only one.
    numbers = [number for number in numbers
               if SCALE.match(re.sub("^ ", "", answer[number.end():]))] or numbers
    values = {float(re.sub("[−–]", "-", number[0]).replace(",", ".")) for number in numbers}
    if len(values) != 1 or not 0 <= min(values) <= 10 or FRACTION.search(without_scale):
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

def strip(token):
    """Without its space, which some servers leave as the tokenizer writes it."""
    return token.strip(" \n\t▁Ġ")

def find_chances(token):
    """-> {text: probability} of the likeliest tokens in this one's place."""
    chances = collections.Counter()
    for other in token.get("top_logprobs") or []:
        chances[strip(other["token"]).lower()] += math.exp(other["logprob"])
    return chances

def expect_rating(rating, tokens):
    """`tokens` begin with the one of the rating's first digit -> the mean of 0..10, each by its
    chance; the rating itself, if there are no chances."""
    chances = find_chances(tokens[0]) if tokens else {}
    weights = collections.Counter({value: chances.get(str(value), 0) for value in range(11)})
    said = strip(tokens[0]["token"]) if tokens else ""
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
    """-> P(yes) in the place of the answer's one "yes" or "no"; 1 or 0 if the server does not tell
    how likely that word was."""
    words = list(re.finditer(r"\b(yes|no)\b", answer, re.IGNORECASE))
    if len({word[0].lower() for word in words}) != 1:
        return None
    place, word = words[0].start(), words[0][0].lower()
    rest = find_tokens(answer, place, tokens)
    chances = find_chances(rest[0]) if rest else {}
    return min(chances.get("yes", 0.0), 1.0) if word in chances else float(word == "yes")

# What names the better picture: a word, or a digit that does not count things, as in "2 foxes".
WINNERS = re.compile(
    r"\b(?P<first>first|1st)\b|\b(?P<second>second|2nd)\b"
    r"|\b(?P<tie>neither|both|equal|equally|tie|same)\b"
    r"|\b(?:picture|image|photo|option|answer) ?\W?([012])\b|(?<![\w.,/-])([012])(?!\w|[.,/-]\d)"
    r"(?! (?!is|was|has|shows|looks|wins|fits|matches|because|as|since)[a-z])", re.IGNORECASE)

def read_winner(answer, tokens=()):
    """-> 1 if the first picture is better, 0 if the second is, 0.5 for a tie; None if it is not
    clear, as where both are named, or one is not better."""
    named = set()
    digits = {*re.findall(r"(?<![\w.,/-])[012](?!\w|[.,/-]\d)", answer)}
    for match in WINNERS.finditer(answer):
        named.add(match.lastgroup or "tie first second".split()[int(match[4] or match[5])])
    denied = r"\b(worse|not|less|lacks?|missing|fails?)\b|n['’]t\b"
    if len(named) != 1 or len(digits) > 1 or re.search(denied, answer, re.IGNORECASE):
        return None
    return dict(first=1, second=0, tie=0.5)[named.pop()]

# --- The program --------------------------------------------------------------
def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture")
    parser.add_argument("question")
    if len(sys.argv) == 1:
        return parser.print_help()
    args = parser.parse_args()
    try:
        image = attempt(args.picture, open_image, args.picture)
        message = post((args.question, to_url(image)))["message"]
        print(read_text(message) or fail(f"no answer: {message.get('refusal') or message}"))
    except BadInput as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")

if __name__ == "__main__":
    main()
