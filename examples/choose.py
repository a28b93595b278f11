"""You are the reward: a page in your browser shows groups of pictures, and you click on the best.
Training prints its address, and waits for you. docs/choose.md has the details.

    python grpo.py --reward examples/choose.py:choose --batch-size 2 --group-size 4

Does another reward see what you see? Count how often it agrees with your choices; rewards of
rewards.py go by their names alone:

    python -m examples.choose runs/mine/choices.jsonl --reward clip,sharpness,mine.py:bright
"""
import argparse, functools, hashlib, http.server, itertools, json, math, mimetypes, os, secrets
import subprocess, sys, threading, time
from pathlib import Path

def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", type=Path, help="the choices.jsonl of a run")
    parser.add_argument("--reward", default="color", help="as for grpo.py; default: %(default)s")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    return parser.parse_args()

if __name__ == "__main__":
    ARGS = parse_args()  # before the imports, which take seconds

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.intervals import find_t

PAGE = Path(__file__).with_name("choose.html").read_bytes()
# What the page shows; all of it is sent anew when the version is a higher one.
STATE = dict(version=time.time_ns() // 1000, groups=[], orders=[], picked=[])

def choose(images, prompts, targets):
    """Identical pictures are shown once, and score alike. If all are identical, nobody is asked."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:  # the others would give up after half an hour
        sys.exit("choose.py asks one person, in one process: start grpo.py without torchrun")
    names = [hashlib.sha256(image.tobytes()).hexdigest() + ".png" for image in images]
    size = read_run()[0]
    if size is None:  # no run calls this; a group has one prompt
        size = math.gcd(*[len(list(same)) for _, same in itertools.groupby(prompts)])
    groups = [dict(prompt=prompts[i], pictures=list(dict.fromkeys(names[i:i + size])), order=[])
              for i in range(0, len(names), size)]
    asked = [group for group in groups if len(group["pictures"]) > 1]
    if asked:
        ask(asked, dict(zip(names, images)))
    return [score(name, **groups[i // size]) for i, name in enumerate(names)]

choose.relative = True  # its scores say nothing across calls: the best of any group gets 1

def read_run():
    """-> the group size of the run that asks, and its "Step 3 of 10. "; None and "" without one."""
    folder = Path(os.environ.get("RUN", ""))
    if not (folder / "config.json").exists():
        return None, ""
    config = json.loads((folder / "config.json").read_bytes())
    log = folder / "metrics.jsonl"  # has a line for each step that is done
    done = log.read_bytes().count(b"\n") if log.exists() else 0
    return config["group_size"], f"Step {done + 1} of {config['steps']}. "

def score(name, prompt, pictures, order):
    """1 for the first of an order, less in equal steps for the next, 0 for those not in it."""
    if name in order:
        return 1 - order.index(name) / len(order)
    return 0.0 if order else 1.0  # all alike: none is worse than the best

def ask(groups, images):
    """Waits for an order of each group, and a second more, in which the last can be undone."""
    folder = Handler.folder = Path(os.environ.get("RUN", "runs"), "choices")
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        image.save(folder / name)
    with open(f"{folder}.jsonl", "a+b") as file:
        file.seek(0)
        *lines, cut = file.read().split(b"\n")
        file.truncate(file.tell() - len(cut))  # a kill may leave a part of a row, or zeros
        # A step made again after a kill has the same pictures: its choices are the last rows.
        rows = [json.loads(line) for line in lines if line.strip()] if "RUN" in os.environ else []
        rows = rows[-len(groups):]
        known = [row | dict(order=[]) for row in rows] == groups
        STATE.update(groups=groups, orders=[row["order"] for row in rows if known], picked=[],
                     version=STATE["version"] + 1, ratio=image.width / image.height,
                     step=read_run()[1])
        start_server(folder / "address")
        before = None
        while STATE != before or len(STATE["orders"]) < len(groups):
            before = dict(STATE)
            time.sleep(1)  # Ctrl-C interrupts this
        STATE.update(groups=[], orders=[], version=STATE["version"] + 1)
        for group, order in zip(groups, before["orders"]):
            group["order"] = order
        file.writelines([json.dumps(group).encode() + b"\n" for group in groups if not known])

def press(version, key, in_order):
    """A key, or a click on what it stands for: 0 is for all alike. Other keys raise an error."""
    if version != STATE["version"]:
        return  # that page showed something older, and the reply brings it up to date
    orders, picked = STATE["orders"], STATE["picked"]
    if key == "Backspace":
        orders, picked = (orders, picked[:-1]) if picked else (orders[:-1], [])
    else:
        pictures = STATE["groups"][len(orders)]["pictures"]
        name = pictures[int(key) - 1]
        picked = [] if key == "0" else [other for other in picked if other != name] + [name]
        if not picked or not in_order or len(picked) >= len(pictures) - 1:
            orders, picked = [*orders, picked], []
    STATE.update(orders=orders, picked=picked, version=version + 1)

@functools.cache  # once in a run
def start_server(path):
    path.touch(0o600)  # only its owner can read the secret
    port, secret = path.read_text().split() or [0, secrets.token_urlsafe(16)]
    try:  # a page may still be open at the last address, or its port forwarded
        server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    except OSError:  # another program has the port
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    path.write_text(f"{server.server_port} {secret}")
    server.root = f"/{secret}/"  # every path begins so, or the answer is 403
    server.handle_error = lambda *args: None  # such as a page closed amid a picture
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}{server.root}"
    print(f"Choose the best pictures: {address}", flush=True)
    if sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ:  # there is a desktop
        command = [sys.executable, "-m", "webbrowser", address]  # a browser may want a terminal
        no_terminal = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.DEVNULL)
        subprocess.Popen(command, start_new_session=True, **no_terminal)

class Handler(http.server.BaseHTTPRequestHandler):
    timeout = 10  # seconds, for a request that is shorter than it says
    log_message = lambda *args: None  # training has its own log
    def do_GET(self):
        name = self.path.removeprefix(self.server.root)
        if name == self.path or not self.headers["Host"].startswith(("127.0.0.1:", "localhost:")):
            return self.send_error(403)
        if self.command == "POST":
            try:
                press(**json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            except Exception:  # whatever is wrong with it, training goes on
                return self.send_error(400)
        body = json.dumps(STATE).encode() if name else PAGE
        if any(name in group["pictures"] for group in STATE["groups"]):
            body = (self.folder / name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", mimetypes.guess_type(name)[0] or "text/html")
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET

# --- Does a reward agree with a person? ---------------------------------------
def read_row(path, line):
    """A line of choices.jsonl -> prompt, pictures, pairs (better, worse) of their indices."""
    row = json.loads(line)
    names = row["pictures"]
    left = list(range(len(names)))
    pairs = []
    for name in row["order"]:  # best first; those that are not in it are worse
        left.remove(names.index(name))
        pairs += [(names.index(name), worse) for worse in left]
    images = [grpo.open_image(path.parent / "choices" / name) for name in names]
    return row["prompt"], images, pairs

def read_lines(path):
    """-> {line number: line}, without a last one that a kill or a loss of power cut off."""
    lines = grpo.attempt(path, path.read_bytes).split(b"\n")
    lines = {number: line for number, line in enumerate(lines, start=1) if line.strip()}
    last = max(lines, default=0)
    try:
        json.loads(lines.get(last, "0"))
    except ValueError:
        print(f"{path}, line {last}: is cut off, and was passed over", file=sys.stderr)
        del lines[last]
    return lines

def count_pairs(path, rewards):
    """-> {reward: [groups, 3]}: pairs in which it agrees, in which it does not, and its ties."""
    counts = {name: [] for name in rewards}
    for number, line in read_lines(path).items():
        prompt, images, pairs = grpo.attempt(f"{path}, line {number}", read_row, path, line)
        if not pairs:
            continue
        for name, (function, weight) in rewards.items():
            scores, _ = grpo.compute_rewards(images, [prompt] * len(images), [None] * len(images),
                                             {name: (function, weight or 1)})
            signs = [(scores[better] - scores[worse]).sign().item() for better, worse in pairs]
            counts[name].append([signs.count(sign) for sign in (1, -1, 0)])
    if not all(counts.values()):
        raise grpo.BadInput(f"{path}: has no picture that was chosen over another")
    return {name: np.array(rows) for name, rows in counts.items()}

def estimate_share(rows):
    """rows [groups, 2]: pairs in which a reward agrees, and does not -> the share in which it
    agrees, and a 95 % interval, or None for fewer than five groups.

    The pairs of a group depend on each other: n pairs tell as much as a smaller number of pairs
    would by themselves. That number follows from how the groups differ (the variance of a ratio, by
    linearisation). With it the interval is Wilson's, which stays within 0..1 and is no point where
    all pairs agree, with a quantile of Student's t (as Dean and Pagano do for surveys, 2015)."""
    rows = rows[rows.sum(1) > 0]  # the others are ties alone
    sizes, pairs = rows.sum(1), rows.sum()
    share = rows[:, 0].sum() / pairs
    if len(rows) < 5:
        return share, None
    groups = max(2, pairs**2 / np.square(sizes).sum())  # a few large ones count like a few
    squares = np.square(rows[:, 0] - share * sizes).sum()
    # Ten groups often lack the one in ten in which the reward is all wrong, and look too much
    # alike. So a quarter of a group in which all pairs agree is added, and one in which none does.
    squares += np.square(sizes).mean() * ((1 - share) ** 2 + share**2) / 4
    variance = groups / (groups - 1) * squares / pairs**2
    n = min(share * (1 - share) / variance, pairs) or groups  # 0, where all pairs agree
    t = find_t(groups - 1)
    middle = (share + t**2 / (2 * n)) / (1 + t**2 / n)
    half = t / (1 + t**2 / n) * np.sqrt(share * (1 - share) / n + (t / (2 * n)) ** 2)
    return share, (middle - half, middle + half)

def print_agreement(counts):
    groups, pairs = [(len(rows), rows.sum()) for rows in counts.values()][0]
    print(f"{groups} groups, {pairs} pairs of a better and a worse picture\n\n"
          f"{'reward':16} agrees  95 % interval  ties")
    for name, rows in counts.items():
        agrees = interval = "-"
        if rows[:, :2].any():
            share, found = estimate_share(rows[:, :2])
            agrees = f"{share:.2f}"
            interval = f"{found[0]:.2f} .. {found[1]:.2f}" if found else "-"
        print(f"{name:16} {agrees:>6}  {interval:>13}  {rows[:, 2].sum() / pairs:4.0%}")

def main(args):
    try:
        parts = [part.strip() for part in args.reward.split(",")]
        own = Path(__file__).with_name("rewards.py")
        parts = [part if ":" in part or part.split("=")[0].strip() in grpo.REWARDS
                 else f"{own}:{part}" for part in parts]
        print_agreement(count_pairs(args.choices, grpo.load_rewards(",".join(parts))))
    except grpo.BadInput as error:
        print("choose.py: error:", *str(error).split(), file=sys.stderr)
        sys.exit(2)

if __name__ == "__main__":
    main(ARGS)
