"""You are the reward: a page in your browser shows groups of pictures, and you click on the best.
Training prints its address, and waits for you. docs/choose.md has the details.

    python grpo.py --reward examples/choose.py:choose --batch-size 2 --group-size 4

How often does another reward rank your choice first? Those of rewards.py go by their names alone.

    python -m examples.choose runs/mine/choices.jsonl --reward clip,sharpness,mine.py:bright
"""
import functools, hashlib, http.server, json, mimetypes, os, secrets, threading, time
from pathlib import Path

from examples import read_flags, start

def add_flags(add):
    add("choices", type=Path, help="the choices.jsonl of a run")
    add("--reward", default="color", help="as for grpo.py; default: %(default)s")

if __name__ == "__main__":
    ARGS = read_flags(__doc__, add_flags)

import diffusers
import numpy as np

import grpo
from examples.evaluate import find_interval
from examples.rewards import find_groups

if grpo.WORLD_SIZE > 1:  # the others would give up after half an hour
    raise grpo.BadInput("--reward choose: asks one person, in one process: leave torchrun away")

PAGE = Path(__file__).with_name("choose.html").read_bytes()
ROOT = f"/{secrets.token_urlsafe(16)}/"  # the page is under a path that nobody can guess
GROUPS = []  # of a step; the page shows the first without a best

def choose(images, prompts, targets):
    """1 for the best picture of each group, 0 for the others; if all are alike, all are the best.
    Nobody is asked twice about the same pictures, such as those of a step that is made again."""
    if "RUN" not in os.environ:
        raise grpo.BadInput("--reward choose: asks while a run is trained; name another reward")
    run = Path(os.environ["RUN"])
    (run / "choices").mkdir(exist_ok=True)
    names = [save_picture(run, image) for image in images]
    rows = read_rows(run / "choices.jsonl")
    known = {json.dumps(row | dict(best=[])): row["best"] for row in rows}
    groups = []
    group_of = []  # of each image
    for indices in find_groups(prompts, targets):
        target = targets[indices[0]] and save_picture(run, targets[indices[0]])
        pictures = [*dict.fromkeys([names[i] for i in indices])]  # identical ones are shown once
        group = dict(prompt=prompts[indices[0]], target=target, pictures=pictures, best=[])
        group["best"] = known.get(json.dumps(group), [] if len(pictures) > 1 else pictures)
        groups.append(group)
        group_of += [group] * len(indices)
    asked = [group for group in groups if not group["best"]]
    if asked:
        start_server()
        ask(asked)
        lines = [json.dumps(row) + "\n" for row in rows + asked]
        grpo.write_file(run / "choices.jsonl", "".join(lines).encode())
    return [float(name in group["best"]) for name, group in zip(names, group_of)]

def save_picture(run, image):
    """-> its name, the SHA-256 of its pixels."""
    name = f"{hashlib.sha256(image.tobytes()).hexdigest()}.png"
    image.save(run / "choices" / name)
    return name

def read_rows(path):
    return [json.loads(line) for line in path.open()] if path.is_file() else []

def ask(groups):
    """Waits until each has a best, and for another second, in which the last can be undone."""
    GROUPS[:] = groups
    before = None
    while json.dumps(GROUPS) != before or not all([group["best"] for group in groups]):
        before = json.dumps(GROUPS)
        time.sleep(1)  # Ctrl-C interrupts this
    GROUPS.clear()

def press(shown, key):
    """A key, or a click on what it stands for: 0 is for all alike. It counts if its page shows what
    is asked now, as another page may have answered. Other keys change nothing."""
    if shown != json.dumps(GROUPS):
        return
    done = [group for group in GROUPS if group["best"]]
    if key == "Backspace" and done:
        done[-1]["best"] = []
    elif len(done) < len(GROUPS):
        group = GROUPS[len(done)]
        answers = {str(i): [name] for i, name in enumerate(group["pictures"], start=1)}
        group["best"] = (answers | {"0": group["pictures"]}).get(key, [])

@functools.cache  # once
def start_server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *args: None  # such as a page closed amid a picture
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"Choose the best: http://127.0.0.1:{server.server_port}{ROOT}", flush=True)

class Handler(http.server.BaseHTTPRequestHandler):
    log_message = lambda *args: None  # training has its own log
    def do_GET(self):
        name = self.path.removeprefix(ROOT)
        if name == self.path:
            return self.send_error(403)
        if self.command == "POST":
            press(**json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        body = json.dumps(GROUPS).encode() if name else PAGE
        if name.endswith(".png"):
            body = Path(os.environ["RUN"], "choices", Path(name).name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", mimetypes.guess_type(name)[0] or "text/html")
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET

# --- Does a reward agree with a person? ---------------------------------------
def rank_first(scores, clicked):
    """scores [n], an index -> 1 if its score is the highest, 1/k if k have the highest, else 0."""
    first = scores == scores.max()
    return (first[clicked] / first.sum()).item()

def judge(row, folder, rewards):
    """A group of which a picture was clicked -> `rank_first` of each reward."""
    images = [diffusers.utils.load_image(str(folder / name)) for name in row["pictures"]]
    prompt = grpo.Prompt(row["prompt"], row["target"] and folder / row["target"])
    clicked = row["pictures"].index(row["best"][0])
    scores = [grpo.compute_rewards(images, [prompt] * len(images), {name: (function, weight or 1)})
              for name, (function, weight) in rewards.items()]
    return [rank_first(each, clicked) for each, _ in scores]

def print_agreement(args):
    own = Path(__file__).with_name("rewards.py")
    parts = [part if ":" in part or part.split("=")[0] in grpo.REWARDS else f"{own}:{part}"
             for part in args.reward.split(",")]
    rewards = grpo.load_rewards(",".join(parts))
    rows = [row for row in read_rows(args.choices) if len(row["best"]) == 1]  # not all alike
    if not rows:
        raise grpo.BadInput(f"{args.choices}: has no picture that was chosen over others")
    chance = np.mean([1 / len(row["pictures"]) for row in rows])
    print(f"{len(rows)} groups; by chance {chance:.2f}\n\n{'reward':16} agrees  95 % interval")
    values = [judge(row, args.choices.with_name("choices"), rewards) for row in rows]
    for name, column in zip(rewards, zip(*values)):
        low, high = np.clip(find_interval(column) or (0, 0), 0, 1)
        interval = f"{low:.2f} .. {high:.2f}" if low < high else "-"
        print(f"{name:16} {np.mean(column):6.2f}  {interval:>13}")

if __name__ == "__main__":
    start(print_agreement, ARGS)
