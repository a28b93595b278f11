"""You are the reward: a page in your browser shows groups of pictures, and you click on the best.
Training prints its address, and waits for you. docs/choose.md has the details.

    python grpo.py --reward examples/choose.py:choose --batch-size 2 --group-size 4"""
import functools, hashlib, http.server, itertools, json, math, mimetypes, os, pathlib, secrets
import subprocess, sys, threading, time

STATE = dict(version=time.time_ns() // 1000, groups=[], orders=[], picked=[])  # on the page

def choose(images, prompts, targets):
    """Identical pictures are shown once, and score alike. If all are identical, nobody is asked."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # the others would give up after half an hour
        sys.exit("choose.py asks one person, in one process: start grpo.py without torchrun")
    # Before a model is loaded, grpo.py tries its rewards: all of picture i is (i, i, i).
    if all([image.getextrema() == ((i % 256,) * 2,) * 3 for i, image in enumerate(images)]):
        return [0.0] * len(images)
    names = [hashlib.sha256(image.tobytes()).hexdigest() + ".png" for image in images]
    # A prompt that follows itself makes a run of two groups. The group size divides all runs.
    size = math.gcd(*[len(list(run)) for _, run in itertools.groupby(prompts)])
    groups = [dict(prompt=prompts[i], pictures=list(dict.fromkeys(names[i:i + size])), order=[])
              for i in range(0, len(names), size)]
    asked = [group for group in groups if len(group["pictures"]) > 1]
    if asked:
        ask(asked, dict(zip(names, images)))
    return [score(name, **groups[i // size]) for i, name in enumerate(names)]

def score(name, prompt, pictures, order):
    """1 for the first of an order, less in equal steps for the next, 0 for those not in it."""
    if name in order:
        return 1 - order.index(name) / len(order)
    return 0.0 if order else 1.0  # all alike: none is worse than the best

def ask(groups, images):
    """Waits for an order of each group, and a second more, in which the last can be undone."""
    folder = Handler.folder = pathlib.Path(os.environ.get("RUN", "runs"), "choices")
    folder.mkdir(parents=True, exist_ok=True)
    for name, image in images.items():
        image.save(folder / name)
    with open(f"{folder}.jsonl", "a+b") as file:
        file.seek(0)
        *lines, cut = file.read().split(b"\n")
        file.truncate(file.tell() - len(cut))  # a kill may leave a part of a row, or zeros
        # A step made again after a kill has the same pictures: its choices are the last rows.
        rows = lines[-len(groups):] if "RUN" in os.environ else []
        rows = [json.loads(row) for row in rows]
        known = [row | dict(order=[]) for row in rows] == groups
        STATE.update(groups=groups, orders=[row["order"] for row in rows if known], picked=[],
                     version=STATE["version"] + 1, ratio=image.width / image.height)
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
        body = (json.dumps(STATE) if name else PAGE).encode()
        if any(name in group["pictures"] for group in STATE["groups"]):
            body = (self.folder / name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", mimetypes.guess_type(name)[0] or "text/html")
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET

PAGE = """<!doctype html><meta charset="utf-8"><title>Choose</title><style>
html { color-scheme: light dark; background: light-dark(#faf8f4, #1b1a18); text-align: center;
  color: light-dark(#2b2925, #e9e5dd); font: 1rem/1.5 system-ui, sans-serif }
body { display: flex; flex-direction: column; gap: 1.2rem; height: 94dvh; margin: 3dvh 1.5rem }
div, main, footer { display: flex; gap: 8px; justify-content: center } kbd { opacity: .6 }
i { flex: 1; height: 4px; border-radius: 2px; background: #8884 } i.true { background: #3a9b74 }
h1 { max-height: 25dvh; margin: 0; overflow: auto; overflow-wrap: anywhere; text-wrap: balance }
main { flex: 1; flex-wrap: wrap; align-content: center; gap: 16px; min-height: 0 }
button, label { border: 1px solid #8884; padding: .3rem 1rem; border-radius: 6px; cursor: pointer }
button, kbd { font: inherit; color: inherit; background: none } button:hover { background: #8882 }
h1 { flex: none; font: 500 1.4rem/1.4 system-ui } main button { padding: 0; border: 0 }
img { width: var(--width); outline: 1px solid #8884 } .true img { outline: 3px solid #3a9b74 }
</style><link rel="icon" href="data:,"><meta name="viewport" content="width=device-width">
<div></div><h1></h1><main></main><footer><label><input type="checkbox"> In order</label>
<button value=0>All alike <kbd>0</kbd></button><button value=Backspace>Back <kbd>⌫</kbd></button>
<script>const [bar, title, main, inOrder] = document.querySelectorAll("div, h1, main, input");
let state, focused, gone = {groups: [], orders: [], picked: [], note: "The run has ended."};
async function load(key) {  // twice a second, as another page may answer, too
  const body = JSON.stringify({version: state?.version, key, in_order: inOrder.checked});
  const reply = await fetch("state.json", key && {method: "POST", body})
    .then(reply => reply.json()).catch(() => key ? state : gone);
  if (reply.version <= state?.version) return;
  const {groups, orders, picked, note} = state = reply, group = groups[orders.length];
  title.textContent = group?.prompt || note || "The next pictures will appear here by themselves.";
  bar.innerHTML = groups.map((_, i) => `<i class="${i < orders.length}"></i>`).join("");
  inOrder.checked ||= picked[0]; focused ||= main.querySelector(":focus-visible")?.value;
  main.innerHTML = (group?.pictures || []).map((name, i) => `<button value="${i + 1}"
    class="${picked.includes(name)}"><img src="${name}"><br><kbd>${i + 1}</kbd>
    <b>${picked.includes(name) ? "rank " + (picked.indexOf(name) + 1) : ""}</b></button>`).join("");
  if (group && focused) focused = main.children[picked[0] ? focused - 1 : 0].focus(); onresize();
}
onresize = () => main.style.setProperty("--width", Math.max(...[...main.children].map((_, i) =>
  Math.min((main.clientWidth + 16) / (i + 1) - 16.1,  // in i + 1 columns
    (main.clientHeight / Math.ceil(main.children.length / (i + 1)) - 45) * state.ratio))) + "px");
onclick = e => e.detail < 2 && load(e.target.closest("button")?.value);
onkeydown = e => e.repeat ? e.key == "Enter" && e.preventDefault()  // held down, it would run on
  : e.ctrlKey || e.metaKey || e.altKey || load(e.key); setInterval(load, 500); load();</script>"""

if __name__ == "__main__":
    print(__doc__)
