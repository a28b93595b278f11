"""Rewards that ask a vision-language model, on any server that speaks OpenAI's protocol, such as
vLLM or SGLang. They need `pip install openai`; docs/rewards.md says more.

    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 JUDGE_MODEL=Qwen/Qwen3-VL-8B-Instruct
    python grpo.py --reward examples/judge.py:judge

A key, if the server wants one, is read from OPENAI_API_KEY. Without OPENAI_BASE_URL, the server is
OpenAI's own. The target of a prompt is taken for the source that it edits: the model sees it before
what was made of it.
"""
import base64, functools, io, itertools, logging, math, multiprocessing.pool, os, re

from PIL import ImageOps

from examples.rewards import find_groups, need
from grpo import BadInput, attempt

# What is asked for with a question. Some servers tell fewer log-probs, and some models refuse them,
# or any temperature but their own: these get the next line.
EXTRAS = [dict(temperature=0, logprobs=True, top_logprobs=20),
          dict(temperature=0, logprobs=True, top_logprobs=5), {}]

def ask(values, plain, edit, rows):
    """Rows of a prompt, its source or None, and pictures -> the worth of each answer, by `values`
    {word: number}, or None if it cannot be read. `plain` is the question for a prompt without a
    source, `edit` for one with it. If none can be read, rewards would be equal, for hours."""
    openai = need("openai", "openai")
    questions = [make_question(plain if row[1] is None else edit, *row) for row in rows]
    # Many servers want no key, but the package does. It waits for a server that is busy, and gives
    # up one that is silent after 12 minutes.
    key = os.environ.get("OPENAI_API_KEY", "").strip() or "none"
    make = functools.partial(openai.OpenAI, api_key=key, max_retries=5, timeout=120)
    with (attempt("the judge", make) as client, multiprocessing.pool.ThreadPool(8) as pool):
        answers = list(pool.imap(functools.partial(post, client, values), questions))
    missing = [said for value, said in answers if value is None]
    if missing:
        message = f"{len(missing)} of {len(answers)} answers cannot be read: {missing[0]!r:.300}"
        if len(missing) == len(answers):
            raise BadInput(message)
        logging.getLogger(__name__).warning(message)
    return [value for value, _ in answers]

def rate(values, plain, edit, images, prompts, targets):
    """A question for each picture -> what its answer is worth. One that cannot be read is worth the
    mean of its group, as no opinion should not move the policy."""
    worth = ask(values, plain, edit, zip(prompts, targets, images))
    for group in find_groups(prompts, targets):
        read = [worth[i] for i in group if worth[i] is not None] or [0.0]
        for i in group:
            worth[i] = sum(read) / len(read) if worth[i] is None else worth[i]
    return worth

def make_question(text, prompt, source, *images):
    """-> a text and pictures. A source is shown in the size of its edit: a photo may be large."""
    sources = [] if source is None else [ImageOps.contain(source, images[0].size)]
    return text.format(prompt), *sources, *images

def to_url(image):
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

def post(client, values, question):
    """-> what the answer is worth, and the answer. A server may refuse a single question, as its
    filters do: that cannot be read. Any other failure would meet all questions."""
    openai = need("openai", "openai")
    text, *images = question
    content = [dict(type="text", text=text)]
    content += [dict(type="image_url", image_url=dict(url=to_url(image))) for image in images]
    asked = dict(model=os.environ.get("JUDGE_MODEL", ""),
                 messages=[dict(role="user", content=content)])
    for extra in EXTRAS:
        try:
            reply = client.chat.completions.create(**asked, **extra)
            choices = getattr(reply, "choices", None)  # a page of HTML is a reply, too
            if not choices:
                raise openai.OpenAIError(f"no answer in {reply}")
            return read(choices[0], values), getattr(choices[0].message, "content", None)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            refusal = str(error)
        except Exception as error:  # its cause is what "Connection error." does not tell
            message = " ".join(f"{error} {error.__cause__ or ''}".split())
            raise BadInput(f"{client.base_url} {asked['model']}: {message:.300}") from error
    return None, refusal

# "8", "**Rating:** 8/10", "Yes, it does." or "2. It is sharper."; but not "3 foxes".
ANSWER = re.compile(
    r"([\w *]*:)?(\W|begin_of_box|boxed)*(?<![-−])(?P<word>\w+([.,]\d+)?)"
    r"( ?/ ?10|,\D.*|\.\s.*)?(\W|end_of_box)*", re.DOTALL)

def read(choice, values):
    """-> what an answer is worth; None if it is not one word after the model's thoughts. With
    log-probs, it is sum(P(word) * value of word) / sum(P(word)) over the likeliest words in its
    place: pictures of a group often have equal ratings, but hardly ever equal means."""
    text = str(getattr(choice.message, "content", None) or "").rpartition("</think>")[2]
    word = ANSWER.fullmatch(text)
    value = values.get(word["word"].lower().replace(",", ".")) if word else None
    if value is None or choice.finish_reason == "length":  # cut off, it may be a thought
        return None
    if value > 5.5:  # where each digit is a token, "1" also begins 10, which is nearer
        values = values | {"1": 10}
    get_value = lambda token: values.get(token.token.strip(" \n▁Ġ").lower())  # marks of a space
    likeliest = []
    end = ""
    for token in reversed(choice.logprobs and choice.logprobs.content or []):
        end = token.token + end
        if "</think>" in end:
            break
        if get_value(token) == value:  # the first such word after the thoughts is the answer
            likeliest = token.top_logprobs or []
    others = [other for other in likeliest if get_value(other) is not None]
    chances = [math.exp(other.logprob) for other in others]
    mean = sum([p * get_value(other) for p, other in zip(chances, others)])
    return mean / sum(chances) if sum(chances) else value

# --- Rewards ------------------------------------------------------------------
RATINGS = {str(i): i for i in range(11)} | {str(i / 10): i / 10 for i in range(101)}
RATE = "Answer with one number, 0 (no) to 10 (yes)."
MADE = "The second picture was made from the first by this instruction: {}. "
DONE = MADE + "Is what the instruction asks for done in the second? "

def judge(images, prompts, targets):
    """Does the picture show what the prompt says, or was the edit done? A rating, 0 to 10."""
    plain = "Does the picture show this: {}? "
    return rate(RATINGS, plain + RATE, DONE + RATE, images, prompts, targets)

def kept(images, prompts, targets):
    """Did the edit leave alone what its instruction does not name? A rating, 0 to 10."""
    if None in targets:
        raise BadInput("kept compares an edit with its source, and a prompt has none")
    edit = MADE + "Is all that the instruction does not name the same in both? "
    return rate(RATINGS, "", edit + RATE, images, prompts, targets)

def yes(images, prompts, targets):
    """P(yes) / (P(yes) + P(no)) for the question of VQAScore (2404.01291), or that of an edit."""
    plain = 'Does this figure show "{}"? '
    end = "Please answer yes or no."
    return rate(dict(yes=1, no=0), plain + end, DONE + end, images, prompts, targets)

def compare(images, prompts, targets):
    """How often it beats the other images of its group, 0 to 1; a tie is half. A model may prefer
    what it sees first, so each pair is shown in both orders: G (G - 1) questions for a group."""
    which = "the first or the second: {}? Answer with one digit: 1, 2, or 0 if neither is better."
    plain = "Which picture shows this better, "
    edit = "Two edits of a picture come after it. Which follows this instruction better, "
    pairs = [pair for group in find_groups(prompts, targets)
             for pair in itertools.permutations(group, 2)]
    rows = [(prompts[i], targets[i], images[i], images[j]) for i, j in pairs]
    values = {"1": 1, "2": 0, "0": 0.5}
    wins = [[] for _ in images]
    for (i, j), win in zip(pairs, ask(values, plain + which, edit + which, rows)):
        wins[i].append(0.5 if win is None else win)
        wins[j].append(1 - wins[i][-1])
    return [sum(each) / len(each) if each else 0.5 for each in wins]
