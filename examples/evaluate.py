"""Compares adapters on held-out prompts: how much each reward changes, with a 95 % interval, and
how much the samples of a prompt still differ. They may be of one run or of several.

    python -m examples.evaluate runs/mine --steps 0 20 --reward color,mine.py:bright
    python -m examples.evaluate runs/a runs/b runs/c/adapter_00010 --prompts mine.txt
    python -m examples.evaluate runs/mine --samples 32 --curve best_of.png
    python -m examples.evaluate runs/mine --follow --every 50

All adapters use the same seeds and the settings of the first run, such as temperature and size, so
that only weights make a difference. The first adapter is what the others are compared with. The
first run's folder gets evaluation.json, with every score, and film.png, a grid of pictures; an
adapter's that lies in no run does not, as it may be uploaded: they are written here. The best of k
images of each adapter, for k up to half of --samples, tells whether training gave more than to draw
many and keep the best. With --follow, evaluation.jsonl gets a line for each adapter, in time.
"""
import argparse, contextlib, functools, importlib.util, json, os, re, sys, time, zlib
from pathlib import Path

def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", metavar="run", help="folder of a run, or of an adapter")
    add("--steps", type=int, nargs="+", help="of the runs; default: all of one run, or the newest "
        "weights of each of several")
    add("--model", help="hub id or folder: where the model of all runs lies now")
    add("--wrapper", metavar="FILE:CLASS", help="where the wrapper of all runs lies now")
    add("--prompts", metavar="FILE",
        help="text file with a prompt on each line; default: examples/make/held_out.txt")
    add("--reward", help="as for grpo.py; default: that of the first run")
    add("--samples", type=int, default=4, help="per prompt; default: %(default)s")
    add("--seed", type=int, default=0, help="seed of the samples; default: %(default)s")
    add("--curve", metavar="FILE", help="plot the best of k (pip install matplotlib)")
    add("--follow", action="store_true", help="evaluate a run's adapters as training saves them")
    add("--every", type=int, default=1, metavar="STEPS", help="with --follow: only adapters of "
        "multiples of these steps, and the last; default: all")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    return parser.parse_args()

if __name__ == "__main__":
    ARGS = parse_args()  # before the imports, which take seconds
    os.environ |= dict(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")  # it runs alone, also in a pod

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.alarms import find_alarms
from examples.follow import SECONDS, fail, read_rows, read_settings, wait_for_run
from examples.pictures import save_film
from examples.runs import (
    LIMIT, PICTURE, check_prompts, choose_steps, find_home, find_weights, is_editor, load_weights,
    open_run, report, take_number, take_settings, tell_differences)
from examples.scores import choose_seeds, find_relative, measure_adapter, summarize
from examples.tables import (
    draw_best, print_agreement, print_best, print_table, turn_negative)

HELD_OUT = Path(__file__).with_name("make") / "held_out.txt"

# --- What is evaluated, and how -----------------------------------------------
def load_rewards(typed, run):
    """A notebook's reward is a name only, and sft.py has none."""
    try:
        return grpo.load_rewards(typed or run.config.reward)
    except grpo.BadInput as error:
        if typed:
            raise
        raise grpo.BadInput(f"{run.path}: its reward, {run.config.reward}, cannot be loaded here; "
                            "type --reward") from error

def load_prompts(run, path):
    """Our own file is read by our own function: a wrapper's may read another format."""
    if path:
        return run.load_prompts(path)
    if is_editor(run):
        raise grpo.BadInput("--prompts: type a file of lines `instruction<TAB>source.png`")
    return grpo.load_prompts(HELD_OUT)

def prepare(args, run):
    """All input is checked before a model is loaded -> prompts, targets, rewards."""
    prompts, targets = load_prompts(run, args.prompts)
    if not 2 <= args.samples <= LIMIT:
        raise grpo.BadInput(f"--samples: must be 2 to {LIMIT}, to compare them")
    if not 0 <= args.seed <= 2**40:
        raise grpo.BadInput(f"--seed: must be 0 to 2**40, and is {args.seed}")
    return prompts, targets or [None] * len(prompts), load_rewards(args.reward, run)

def load_model(run, config, prompts):
    wrapper = run.Wrapper.from_pretrained(config.model, config)
    check_prompts(wrapper, prompts)
    return wrapper

# --- Several adapters ---------------------------------------------------------
def evaluate(chosen, prompts, targets, rewards, samples=4, seed=0):
    """For each (run, step), yields `measure` of each prompt, and an image of each of 8 prompts. All
    use the same seeds and the settings of the first, so only the weights make a difference."""
    seeds = choose_seeds(len(prompts), seed)
    settings = chosen[0][0].config
    compares = find_relative(rewards)
    first = wrapper = loaded = None
    for run, step in chosen:
        config = take_settings(run.config, settings)
        # A wrapper may make random weights from the seed. GLM-Image loads all, in minutes.
        is_glm = issubclass(run.Wrapper, grpo.GLMImageWrapper)
        model = run.Wrapper, config.model, None if is_glm else config.seed
        if model != loaded:
            wrapper = None  # frees the memory of the last one
            wrapper = load_model(run, config, prompts)
            loaded = model
        load_weights(wrapper, run.weights[step])
        rows = []
        pictures = []
        for measures, images in measure_adapter(
                wrapper, prompts, targets, rewards, samples, seeds, first):
            rows.append(measures)
            pictures.append(images if compares or len(pictures) < 8 else [])
        first = first or pictures
        yield rows, [images[0] for images in pictures[:8]]

# --- While a run goes on ------------------------------------------------------
def follow(args):
    """Evaluates adapters as they appear, until the run is done. evaluation.jsonl, in the run's
    folder, gets a line for each, and says where to go on."""
    run, prompts, targets, rewards = start_following(args)
    settings = {name: getattr(run.config, name) for name in PICTURE} | dict(
        samples=args.samples, seed=args.seed,
        reward={name: weight for name, (_, weight) in rewards.items()},
        prompts=f"{len(prompts)}, {zlib.crc32(repr(prompts).encode()):08x}")
    load = functools.cache(functools.partial(load_model, run, run.config, prompts))
    seeds = choose_seeds(len(prompts), args.seed)
    told = set()
    while True:
        steps, gone, is_over = grpo.attempt(
            f"{run.path}: start this again where the run is now", find_news, run, args.every)
        messages = [f"adapter_{step:05d} is gone, and passed over" for step in sorted(gone)]
        messages += find_alarms(read_rows(run.folder), read_settings(run.folder))
        for message in messages:
            if message not in told:
                print(f"{run.path}: {message}", file=sys.stderr)
        told.update(messages)
        for step in steps:
            with claim(run, step, settings) as write:
                weights = find_weights(run.folder)
                if write and step in weights:  # it may have been deleted since
                    load_weights(load(), weights[step])
                    measured = [measures for measures, _ in measure_adapter(
                        load(), prompts, targets, rewards, args.samples, seeds)]
                    write(dict(step=step) | summarize(measured, rewards))
        if is_over:
            return
        time.sleep(SECONDS)

def start_following(args):
    """-> run, prompts, targets, rewards."""
    if len(args.runs) > 1 or args.steps or args.curve or args.every < 1:
        raise grpo.BadInput("--follow: follows one run, without --steps and --curve; --every is at "
                            "least 1")
    path = args.runs[0]
    if Path(path, "adapter_config.json").is_file():
        raise grpo.BadInput(f"--follow {path}: is an adapter; type the folder of its run")
    wait_for_run(path)
    run = open_run(path, model=args.model, wrapper=args.wrapper)
    prompts, targets, rewards = prepare(args, run)
    for name in find_relative(rewards):
        raise grpo.BadInput(f"--reward {name}: compares adapters, and --follow takes one at a time")
    where = "the CPU, as there is no GPU"
    if grpo.CUDA:
        where = (f"the GPU {torch.cuda.get_device_name(grpo.DEVICE)}, the first that it sees; "
                 "CUDA_VISIBLE_DEVICES=1 before the command takes the second")
    print(f"{path}: evaluated on {where}", flush=True)
    return run, prompts, targets, rewards

def find_news(run, every):
    """-> steps whose adapters are there, those whose adapters were there, and whether the run is
    done. Training writes samples_00010.png, then the adapter, then the checkpoint."""
    last = read_settings(run.folder)["steps"]
    weights = find_weights(run.folder)
    log = run.folder / "metrics.jsonl"
    # Its last weights may have been deleted. They are written a moment after the row.
    is_done = [row["step"] for row in read_rows(run.folder)[-1:]] == [last] and (
        time.time() - log.stat().st_mtime > 600)
    steps = [step for step, where in weights.items()
             if step == last or (step % every == 0 and not isinstance(where, dict))]
    saved = {int(match[1]) for path in run.folder.iterdir()
             if (match := re.fullmatch(r"samples_(\d{5,})\.png", path.name))}
    gone = {step for step in saved - {*weights}
            if step < max(weights, default=0) and step % every == 0}
    return steps, gone, last in weights or is_done

@contextlib.contextmanager
def claim(run, step, settings):
    """Gives a function that writes the row of a step, or None if the row is there. Of several
    followers one at a time is in here: the lock of one that is killed is free at once."""
    import fcntl  # not on Windows
    path = run.folder / "evaluation.jsonl"
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        end = text.rfind(b"\n") + 1
        file.truncate(end)  # a line that a kill has cut
        rows = [grpo.attempt(f"{path}, line {number}", json.loads, line)
                for number, line in enumerate(text[:end].splitlines(), start=1) if line.strip()]
        for row in rows[-1:]:
            if row["settings"] != settings:
                raise grpo.BadInput(f"{path}: was written with other settings, {row['settings']}; "
                                    "type these, or move the file away")

        def write(row):
            file.write(json.dumps(row | dict(settings=settings)).encode() + b"\n")
            print(*[f"{name} {value[0]:<10.4g}" if isinstance(value, list) else f"{name} {value:<6}"
                    for name, value in row.items()], flush=True)

        yield None if step in [row["step"] for row in rows] else write

# --- The command --------------------------------------------------------------
def write_files(args, run, labels, prompts, rewards, results, pictures):
    """-> a sentence that names them."""
    folder = find_home(run)
    number, file = take_number(lambda number: open(folder / f"evaluation{number}.json", "x"))
    with file:
        json.dump(dict(adapters=labels, prompts=prompts, samples=args.samples, seed=args.seed,
                       results=results), file)
    rows = [[f"below: {', '.join(rewards)}", *prompts]]
    if all([hasattr(prompt, "source") for prompt in prompts]):  # the pictures that were edited
        rows.append(["source", *[grpo.open_image(prompt.source) for prompt in prompts[:8]]])
    for label, images, measured in zip(labels, pictures, results):
        scores = ["  ".join([f"{each[name][0]:.3g}" for name in rewards]) for each in measured]
        rows.append([label, *zip(images, scores)])
    save_film(folder / f"film{number}.png", rows)
    return f"Wrote evaluation{number}.json, with every score, and film{number}.png to {folder}"

def compare(args):
    """Evaluates all adapters, writes files, prints tables."""
    chosen = choose_steps(args.runs, args.steps, model=args.model, wrapper=args.wrapper)
    first, *_ = runs = [*{run.path: run for run, _ in chosen.values()}.values()]
    prompts, targets, rewards = prepare(args, first)
    relative = find_relative(rewards)
    if relative and len(chosen) < 2:
        raise grpo.BadInput(f"--reward {relative[0]}: compares adapters, so evaluate two or more")
    results, pictures = zip(*evaluate(
        [*chosen.values()], prompts, targets, rewards, args.samples, args.seed))
    try:  # before the table, whose reader may stop
        written = write_files(
            args, first, [*chosen], prompts, rewards, results, pictures)
    except OSError as error:  # such as a full disk, which is told after the table
        written = error
    print(f"--prompts {args.prompts or HELD_OUT} --reward {args.reward or first.config.reward}")
    differences = tell_differences(runs)
    if differences:
        print(differences)
    print_table([*chosen], results, relative)
    results = turn_negative(results, rewards)
    absolute = [f"-{name}" if weight < 0 else name for name, (_, weight) in rewards.items()
                if name not in relative]
    print_best([*chosen], results, absolute)
    print_agreement([*chosen][0], results[0], absolute)
    try:
        if args.curve and absolute:
            draw_best(args.curve, [*chosen], results, absolute)
    except (OSError, ValueError) as error:  # such as no folder, or a format that is none
        written = error
    if isinstance(written, Exception):
        fail(f"not all was written: {written}")
    print(f"\n{written}")

def main(args):
    try:
        if args.curve and not importlib.util.find_spec("matplotlib"):
            raise grpo.BadInput("--curve: first run `pip install matplotlib`")
        follow(args) if args.follow else compare(args)
    except grpo.BadInput as error:
        report(error)
    except KeyboardInterrupt:
        sys.exit("Stopped.")

if __name__ == "__main__":
    main(ARGS)
