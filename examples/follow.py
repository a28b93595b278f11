"""Follows a run: reads what training writes, while it writes it, and sends it to Weights & Biases
or to trackio. It needs nothing but the run's folder; `python -m examples.plot` is its command.
"""
import importlib, json, secrets, shlex, signal, sys, threading, time
from pathlib import Path

from PIL import Image

def fail(message):
    """Ends the program with one line, which names it."""
    print(f"{Path(sys.argv[0]).name}: error:", *str(message).split(), file=sys.stderr)
    sys.exit(2)

# --- What is in a run's folder ------------------------------------------------
def read_settings(run):
    return json.loads(Path(run, "config.json").read_bytes())

def read_rows(run, name="metrics.jsonl"):
    """The rows of metrics.jsonl, one a step. It is missing before the first step. The last line of
    a file that is being written or copied may end early."""
    path = Path(run, name)
    lines = path.read_text().split("\n") if path.is_file() else [""]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                fail(f"{path}, line {number}: {error}")
    return rows

def open_sheet(path):
    """-> a sheet of pictures, or None if it is not there, or only half of it."""
    try:
        sheet = Image.open(path)
        sheet.load()
        return sheet
    except (OSError, SyntaxError):  # the latter if it ends where a part of it does
        return None

# --- What is new in it --------------------------------------------------------
SECONDS = 5  # between two looks at the run's folder
PATIENCE = 1800  # seconds until the run must have begun

def wait_for_run(run):
    """The program may be started with the training, which makes the folder once the model is
    loaded, or downloaded."""
    begun = time.monotonic()
    path = Path(run, "config.json")
    if not path.is_file():
        print(f"{run}: is no folder of a run yet; this waits until one begins there", flush=True)
    while not path.is_file():
        if time.monotonic() - begun > PATIENCE:
            fail(f"{run}: is no folder of a run, and none has begun there")
        time.sleep(SECONDS)

def find_news(run, settings, sent):
    """Yields (step, row of metrics, sheet of pictures or None) for each step after `sent`."""
    rows = {0: {}} | {row["step"]: row for row in read_rows(run)}
    log = Path(run, "metrics.jsonl")
    age = time.time() - log.stat().st_mtime if log.is_file() else 0
    for step in sorted([step for step in rows if step > sent]):
        sheet = open_sheet(Path(run, f"samples_{step:05d}.png"))
        is_due = step % settings["save_every"] == 0 or step == settings["steps"]
        # A row is written before its pictures. If they are lost, it has waited for long enough.
        if is_due and sheet is None and step == max(rows) and age < 600:
            return
        yield step, rows[step], sheet

# --- Where it is sent: wandb or trackio ---------------------------------------
# Both have `init`, `log`, `Image` and `finish`. What was sent, and under which id, stands in
# wandb.json or trackio.json in the run's folder: offline, no server could tell.
LOG_OPTIONS = {"wandb": dict(commit=True), "trackio": {}}  # wandb would keep a row until the next

def import_service(service):
    try:
        module = importlib.import_module(service)
        module.init
        return module
    except (ImportError, AttributeError):  # any folder called wandb can be imported
        fail(f"--{service}: first run `pip install {service}`")

def is_copy(folder, state, file):
    """Whether a run's folder has its id from another, as `cp -r` leaves it: both may go on, and one
    would overwrite the other. A folder that was moved has kept its inode, unless it came from
    another disk; then at least no other folder has the id, neither beside it nor where it was."""
    if state.get("inode") == find_inode(folder):
        return False
    nearby = {folder.parent, Path(state.get("folder", folder)).parent}
    others = [path for parent in nearby for path in parent.glob(f"*/{file.name}")
              if not path.samefile(file)]
    return any([state["id"] in path.read_text() for path in others])

def find_inode(folder):
    stat = folder.stat()
    return [stat.st_dev, stat.st_ino]

def find_state(run, file, project):
    """What was sent to a project -> dict(id, name, step, folder, inode)."""
    folder = Path(run).resolve()
    state = read_json(file).get(project, {})
    if state and is_copy(folder, state, file):
        print(f"{run}: is a copy of the run that is known as {state['id']}, and gets its own id")
        state = {}
    new = dict(id=secrets.token_hex(4), name=folder.name, step=-1)
    return new | state | dict(folder=str(folder), inode=find_inode(folder))

def start_client(service, run, project, state):
    """-> the service's run, which goes on if it is there. wandb knows it by its id, trackio by its
    name."""
    name = f"{state['name']}-{state['id']}"
    # What is used by the follower's machine does not belong to the run.
    where = dict(project=project, name=name, auto_log_cpu=False, auto_log_gpu=False)
    if service == "wandb":
        *entity, project_name = project.split("/", 1)
        where = dict(project=project_name, entity="".join(entity) or None, id=state["id"],
                     name=state["name"], dir=run)
    try:
        client = sys.modules[service].init(config=read_settings(run), resume="allow", **where)
    except Exception as error:  # without a key, a network, or such an entity
        fail(f"--{service} {project}: {error}")
    if getattr(client, "disabled", False):
        fail(f"--{service} {project}: nothing is sent, as wandb is switched off (WANDB_MODE)")
    return client

def print_end(service, run, project, state):
    """wandb has made a folder in each start that was offline, and marks those that it has sent."""
    known = f"all until step {state['step']} {{}} {project}, as {state['id']}"
    folders = [folder for folder in sorted(Path(run, "wandb").glob(f"offline-*-{state['id']}*"))
               if not [*folder.glob("*.synced")]]
    if service == "trackio":
        print(f"{run}: {known.format('is in')}; `trackio show` opens its page")
    elif folders:
        print(f"{run}: {known.format('is written for')}. When you are online, this sends it:\n"
              f"    wandb sync {shlex.join(map(str, folders))}")
    else:
        print(f"{run}: {known.format('is sent to')}")

def follow(run, service, project):
    """Sends what is new to `service`, "wandb" or "trackio", until the run is done."""
    module = import_service(service)
    if not all(project.split("/")):
        fail(f"--{service} {project!r}: must be a project, or an entity, a slash and a project")
    wait_for_run(run)
    file = Path(run, f"{service}.json")
    state = find_state(run, file, project)
    stopped = threading.Event()
    client = None
    while True:
        settings = read_settings(run)
        for step, row, sheet in find_news(run, settings, state["step"]):
            if client is None:
                client = start_client(service, run, project, state)
                stop_between_rows(stopped)
            metrics = {name: value for name, value in row.items()
                       if value is not None and name != "step"}
            if sheet:
                metrics["samples"] = module.Image(sheet)
            if metrics:
                client.log(metrics, step=step, **LOG_OPTIONS[service])
            state["step"] = step
            write_json(file, read_json(file) | {project: state})
        if state["step"] >= settings["steps"] or stopped.wait(SECONDS):
            break
    if client is not None:
        client.finish()
    print_end(service, run, project, state)

def stop_between_rows(stopped):
    """From here on a signal ends the program between two rows only: none is lost or sent twice."""
    for name in {"SIGINT", "SIGTERM", "SIGHUP"} & {*dir(signal)}:
        signal.signal(getattr(signal, name), lambda *_: stopped.set())

def read_json(path):
    try:
        return json.loads(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        fail(f"{path}: {error}; without this file, all is sent again")

def write_json(path, value):
    """Under another name first, so that a kill spares the file."""
    partial = path.with_name(f"{path.name}.part")
    partial.write_text(json.dumps(value))
    partial.replace(path)
