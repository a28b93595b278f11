"""What opens a run. A program knows a run by its folder, which has its settings, wrapper, prompts
and weights; those that draw from it or measure it take all of that from here.
"""
import dataclasses, itertools, json, os, re, sys, traceback, typing
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.follow import fail

def report(error):
    """Ends a program that was given something wrong, with one line; a bug in somebody's wrapper or
    reward is shown with its place, as grpo.py does."""
    if isinstance(error.__cause__, grpo.BUGS):
        traceback.print_exception(error.__cause__)
    fail(error)

class Run(typing.NamedTuple):
    path: str  # as it was typed
    folder: Path  # None for a model, and for an adapter that lies in no run
    config: grpo.Config  # config.prompts is the file with the run's own prompts
    Wrapper: type
    load_prompts: typing.Callable
    weights: dict  # {step: folder of an adapter, or tensors of the checkpoint}

def open_run(path=None, **typed):
    """The folder of a run, the folder of an adapter, which may lie in a run, or None for a model
    without any -> Run. Settings that are typed, and not None, override those of the run; --model
    and --wrapper say where its files lie now, if they have moved."""
    flags = [f"--{name}={value}" for name, value in typed.items() if value is not None]
    folder = Path(path).absolute() if path else None
    weights = {}
    if path and (folder / "adapter_config.json").is_file():
        weights = {None: folder}
        folder = folder.parent if (folder.parent / "config.json").is_file() else None
    elif path and (folder / "config.json").is_file():
        weights = find_weights(folder)
    elif path:
        raise grpo.BadInput(f"{path}: is no folder of a run, nor of an adapter")
    if folder:
        flags.append(f"--resume={folder}")
    elif path:
        flags += name_model(weights[None], **typed)
    config = grpo.parse_args(flags)
    Wrapper = grpo.import_name(config.wrapper)
    load_prompts = getattr(Wrapper, "load_prompts", grpo.load_prompts)
    return Run(path, folder, config, Wrapper, load_prompts, weights)

def name_model(adapter, model=None, wrapper=None, **_):
    """-> flags for an adapter that lies in no run: it knows its model, but no wrapper."""
    layers = read_adapter_config(adapter, "target_modules")
    if wrapper is None and layers != grpo.GLMImageWrapper.lora_layers:
        raise grpo.BadInput(f"{adapter}: is of another model than GLM-Image; type --wrapper")
    return [] if model else [
        f"--model={read_adapter_config(adapter, 'base_model_name_or_path')}"]

def find_home(run):
    """-> where its files go: the run's folder or, without one or on a read-only disk, here."""
    return run.folder if run.folder and os.access(run.folder, os.W_OK) else Path().absolute()

def take_number(create):
    """Calls create(""), create(2), create(3), .. until the file is not there already: what was
    written before is kept, also by two programs that end at once -> number, what it created."""
    for number in itertools.chain([""], itertools.count(2)):
        try:
            return number, create(number)
        except FileExistsError:
            pass

def find_weights(run):
    """-> {step: folder of the adapter}, and the checkpoint's weights if they are newer. Copies and
    archives of adapters, and those that are being written, are passed over."""
    weights = {}
    for folder in run.iterdir():
        match = re.fullmatch(r"adapter_(\d{5,})", folder.name)
        if match and (folder / "adapter_model.safetensors").is_file():  # it is written last
            weights[int(match[1])] = folder
    weights = dict(sorted(weights.items()))
    checkpoint = run / "checkpoint.pt"
    if checkpoint.is_file():
        step, tensors = grpo.attempt(checkpoint, read_checkpoint, checkpoint)
        if step > max(weights, default=-1):
            weights[step] = tensors
    return weights

def read_checkpoint(path):
    """-> its step, the weights. `mmap` reads what is used, also after training wrote a new file."""
    state = torch.load(path, "cpu", weights_only=True, mmap=True)
    return state["step"], state["adapter"]

def name_step(run, step):
    return f"step {step}" + ", from checkpoint.pt" * isinstance(run.weights[step], dict)

def read_adapter_config(folder, name):
    path = folder / "adapter_config.json"
    config = grpo.attempt(path, lambda: json.loads(path.read_bytes()))
    if name not in config:
        raise grpo.BadInput(f"{path}: has no {name}")
    return config[name]

def load_weights(wrapper, weights):
    """-> the LoRA that has them."""
    if isinstance(weights, dict):
        A = next(iter(weights.values()))
        lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank=len(A))
        grpo.attempt("the checkpoint is of another model", lora.load, weights)
    else:
        rank = read_adapter_config(weights, "r")
        lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank)
        grpo.attempt(weights, lora.load_folder, weights)
    return lora

def check_prompts(wrapper, prompts):
    for prompt in prompts:
        grpo.attempt(f"--prompts: the model cannot read {prompt!r}", wrapper.encode, [prompt])

LIMIT = 32  # samples drawn at a time: more would take much memory, fewer are hardly faster

def draw(wrapper, prompts, samples, seeds, examine=None):
    """Yields the rollout and the pictures of each prompt, and its rows of examine(rollout), which
    is called before they are painted: the two halves of GLM-Image take turns once in 32 pictures.
    """
    size = LIMIT // samples  # prompts at a time
    with tqdm(total=len(prompts) * samples, unit="picture", disable=None) as bar:
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            rollout = wrapper.sample(prompts[part], samples, seeds[part])
            found = examine(rollout) if examine else [None] * len(rollout.tokens)
            for i, (prompt, seed) in enumerate(zip(prompts[part], seeds[part])):
                rows = slice(i * samples, (i + 1) * samples)
                group = rollout.part(rows)
                images = wrapper.decode([prompt], group.tokens, [seed])
                bar.update(samples)
                yield group, images, found[rows]

def pick_painted(wrapper, values):
    """[G, T], a value for each token -> those of the codes that the picture is made of. GLM-Image
    does not paint the draft that comes before the large grid."""
    if isinstance(wrapper, grpo.GLMImageWrapper):
        return values[:, -(wrapper.config.height // 32 * (wrapper.config.width // 32)):]
    return values

def is_editor(run):
    """Whether its prompts need sources. Where edit.py was imported from does not matter."""
    return "EditWrapper" in [base.__name__ for base in run.Wrapper.__mro__]

# --- Adapters of several runs -------------------------------------------------
def choose_steps(paths, steps, **typed):
    """-> {label: (run, step)}. Of one run all steps, of several the last of each, or `steps`."""
    chosen = {}
    for path in paths:
        run = open_run(path, **typed)
        there = [*run.weights]
        if there == [None] and (len(paths) > 1 or not steps):  # the path is that of an adapter
            chosen[path] = run, None
            continue
        wanted = steps or (there if len(paths) == 1 else there[-1:])
        if not wanted or not {*wanted} <= {*there}:
            own = "is one adapter" if there == [None] else f"only has weights of steps {there}"
            raise grpo.BadInput(f"{path}: {own}")
        for step in wanted:
            name = name_step(run, step)
            chosen[name if len(paths) == 1 else f"{path}, {name}"] = run, step
    return chosen

PICTURE = "width height temperature top_k top_p decode_steps guidance".split()  # make a picture

def take_settings(config, first):
    """-> the Config of a run, but with all of the first run's that is about drawing."""
    names = [*PICTURE, "group_size", "micro_batch_size", "offload"]
    return dataclasses.replace(config, **{name: getattr(first, name) for name in names})

def tell_differences(runs):
    """-> a sentence on the settings that other runs than the first had, or None."""
    first, *others = runs
    told = []
    for run in others:
        flags = []
        for name in PICTURE:
            flag = "--" + name.replace("_", "-")
            value = getattr(run.config, name)
            if value != getattr(first.config, name):
                flags.append(f"no {flag}" if value is None else f"{flag} {value}")
        if flags and run.config.resume:  # an adapter outside of a run has no settings
            told.append(f"{run.path} had {', '.join(flags)}")
    return f"{'; '.join(told)}; all are drawn with those of {first.path}" if told else None
