"""You are the reward: a page in your browser shows groups of pictures, and you click on the best.
Training prints its address, and waits for you. docs/choose.md has the details.

    python grpo.py --reward examples/choose.py:choose --batch-size 2 --group-size 4"""
import functools, hashlib, http.server, itertools, json, math, mimetypes, os, pathlib, secrets, sys
import threading, time, webbrowser

ROOT = f"/{secrets.token_urlsafe(16)}/"  # every path begins so, or the answer is 403
STATE = dict(step=0, groups=[], orders=[], picked=[])  # picked: of an order not yet complete

def choose(images, prompts, targets):
    """Identical pictures are shown once, and score alike. If all are identical, nobody is asked."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # the others would give up after half an hour
        sys.exit("choose.py asks one person, in one process: start grpo.py without torchrun")
    names = [hashlib.sha256(image.tobytes()).hexdigest() + ".png" for image in images]
    # A prompt that follows itself makes a run of two groups. The group size divides all runs.
    size = math.gcd(*[len(list(run)) for _, run in itertools.groupby(prompts)])
    groups = [
        dict(prompt=prompts[i], pictures=list(dict.fromkeys(names[i:i + size])), order=[])
        for i in range(0, len(names), size)]
    if asked := [group for group in groups if len(group["pictures"]) > 1]:
        ask(asked, dict(zip(names, images)))
    return [score(name, **groups[i // size]) for i, name in enumerate(names)]

def score(name, prompt, pictures, order):
    """1 for the first of an order, less in equal steps for the next, 0 for those not in it."""
    if name in order:
        return 1 - order.index(name) / min(len(order), len(pictures) - 1)
    return 0.0 if order else 1.0  # all alike: none is worse than the best

def ask(groups, images):
    """Waits for an order of each group, and a second more, in which the last can be undone."""
    os.makedirs("runs/choices", exist_ok=True)
    for name, image in images.items():
        image.save(f"runs/choices/{name}")
    STATE.update(step=STATE["step"] + 1, groups=groups, orders=[], picked=[])
    start_server()
    orders = []
    while len(orders) < len(groups) or orders != STATE["orders"]:
        orders = STATE["orders"]
        time.sleep(1)  # Ctrl-C interrupts this
    STATE["groups"] = []
    with open("runs/choices.jsonl", "a") as file:
        for group, order in zip(groups, orders):
            group["order"] = order
            file.write(json.dumps(group) + "\n")

@functools.cache  # once in a run, at the first question
def start_server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)  # 0: any free port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.handle_error = lambda *args: None  # such as a page closed amid a picture
    address = f"http://127.0.0.1:{server.server_port}{ROOT}"
    print(f"Choose the best pictures: {address}", flush=True)
    if sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ:  # there is a desktop
        webbrowser.open(address)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.removeprefix(ROOT)
        if name == self.path or not self.headers["Host"].startswith(("127.0.0.1:", "localhost:")):
            return self.send_error(403)
        if self.command == "POST":
            answers = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if answers["step"] == STATE["step"]:  # else the page shows an older one
                STATE.update(answers)
        body = (json.dumps(STATE) if name else PAGE).encode()
        if any(name in group["pictures"] for group in STATE["groups"]):
            body = pathlib.Path("runs/choices", name).read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", mimetypes.guess_type(name)[0] or "text/html")
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    log_message = lambda *args: None  # training has its own log

PAGE = """<!doctype html><meta charset="utf-8"><title>Choose</title><style>
html { color-scheme: light dark; background: light-dark(#faf8f4, #1b1a18); text-align: center;
  color: light-dark(#2b2925, #e9e5dd); font: 1rem/1.6 system-ui, sans-serif }
body { display: flex; flex-direction: column; gap: 1.5rem; margin: 3dvh 1.5rem; min-height: 94dvh }
div, footer { display: flex; gap: 8px; justify-content: center } kbd { font: inherit; opacity: .6 }
i { flex: 1; height: 4px; border-radius: 2px; background: #8884 } i.true { background: #3a9b74 }
h1 { margin: 0; font: 500 1.4rem system-ui; text-wrap: balance } button:hover { background: #8882 }
main { display: grid; gap: 1.5rem; width: min(100%, 165dvh); margin: auto;
  grid-template-columns: repeat(auto-fit, minmax(max(20%, 9rem), 1fr)) }
button, label { font: inherit; color: inherit; background: none; border: 1px solid #8884;
  padding: .3rem 1rem; border-radius: 6px; cursor: pointer } main button { padding: 0; border: 0 }
img { width: 100%; outline: 1px solid #8884 } .true img { outline: 3px solid #3a9b74 }
</style><link rel="icon" href="data:,"><meta name="viewport" content="width=device-width">
<div></div><h1></h1><main></main><footer><label><input type="checkbox"> In order</label>
<button value=0>All alike <kbd>0</kbd></button><button value=Backspace>Back <kbd>⌫</kbd></button>
<script>const [bar, title, main, inOrder] = document.querySelectorAll("div, h1, main, input");
let state, pictures, gone = {groups: [], orders: [], picked: [], note: "The run has ended."};
async function load(answers) {
  const post = answers && {method: "POST", body: JSON.stringify(answers)};
  state = await fetch("state.json", post).then(reply => reply.json()).catch(() => gone);
  const {groups, orders, picked, note} = state, group = groups[orders.length];
  title.textContent = group?.prompt || note || "The next pictures will appear here by themselves.";
  bar.innerHTML = groups.map((_, i) => `<i class="${i < orders.length}"></i>`).join("");
  pictures = group?.pictures || []; inOrder.checked ||= picked[0];  // when opened again
  main.innerHTML = pictures.map((name, i) => `<button value="${i + 1}"
    class="${picked.includes(name)}"><img src="${name}"><kbd>${i + 1}</kbd>
    <b>${picked.includes(name) ? "rank " + (picked.indexOf(name) + 1) : ""}</b></button>`).join("");
  if (!group) setTimeout(load, 500);
}
function press(key) {
  const {step, orders, picked} = state, name = pictures[key - 1];
  const order = [...picked.filter(other => other != name), name];
  const more = inOrder.checked && order.length < pictures.length - 1;
  if (name && more) load({step, orders, picked: order});
  else if (name) load({step, orders: [...orders, order], picked: []});
  else if (key == "0" && pictures[0]) load({step, orders: [...orders, []], picked: []});
  else if (key == "Backspace" && picked[0]) load({step, orders, picked: picked.slice(0, -1)});
  else if (key == "Backspace" && orders[0]) load({step, orders: orders.slice(0, -1), picked: []});
}
onclick = e => e.detail < 2 && press(e.target.closest("button")?.value);
onkeydown = e => e.repeat || e.ctrlKey || e.metaKey || e.altKey || press(e.key); load()</script>"""

if __name__ == "__main__":
    print(__doc__)
