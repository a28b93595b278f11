"""Pictures from what you have trained: from a run, from the folder of an adapter, or from a model.

    python -m examples.generate runs/mine --prompt "a red fox" "a blue door" --samples 4
    python -m examples.generate runs/mine --step 10 --prompts prompts.txt
    python -m examples.generate runs/mine/adapter_00010 --prompt "a red fox"
    python -m examples.generate --model zai-org/GLM-Image --prompt "a red fox"
    python -m examples.generate runs/edits --source fox.png --prompt "make it snow"
    python -m examples.generate runs/mine --prompt "a red fox" --change

A folder gets sheet.png, with a row for each prompt, and the single pictures: --out or, in that of
the run, pictures, then pictures2, and so on. Equal seeds give equal pictures, so that adapters can
be compared; evaluate.py does that. With --change, a map beside each picture shows where training
made its codes likelier (pink) or less likely (teal).
"""
import argparse, functools, math, os, sys
from pathlib import Path

def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    add = parser.add_argument
    add("adapter", nargs="?", help="folder of a run, or of an adapter")
    add("--step", type=int, help="of the run; default: the newest weights that it has")
    add("--model", help="hub id or folder: where the run's model lies now, or one without adapter")
    add("--wrapper", metavar="FILE:CLASS", help="where the run's wrapper lies now")
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="what to draw")
    add("--prompts", metavar="FILE", help="text file with a prompt on each line")
    add("--source", metavar="PICTURE", help="to be edited, with a run of edit.py")
    add("--samples", type=int, default=4, help="pictures of each prompt; default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--width", type=int, help="default: as in the run")
    add("--height", type=int, help="default: as in the run")
    add("--change", action="store_true", help="draw a map of log pi_new - log pi_base, too")
    add("--out", type=Path, help="new folder; default: pictures in that of the run, or here")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    return parser.parse_args()

if __name__ == "__main__":
    ARGS = parse_args()  # before the imports, which take seconds
    os.environ |= dict(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")  # it runs alone, also in a pod

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.edit import Edit, open_source
from examples.pictures import save_film
from examples.runs import (
    LIMIT, check_prompts, draw, find_home, is_editor, load_weights, name_step, open_run,
    pick_painted, report, take_number)

# --- What training changed ----------------------------------------------------
@torch.no_grad()
def compute_change(wrapper, lora, rollout):
    """log pi_new - log pi_base of the codes drawn [N, T]. As pi_new drew them, its mean estimates
    KL(new, base), the `kl` of the log."""
    if rollout.tokens.is_floating_point():
        raise grpo.BadInput("--change: this model draws latents, not codes")
    find_grid(wrapper, pick_painted(wrapper, rollout.tokens).shape[1])  # refuses what has no map
    size = wrapper.config.micro_batch_size
    parts = [rollout.part(slice(i, i + size)) for i in range(0, len(rollout.tokens), size)]
    logprobs = []
    for lora.enabled in (True, False):
        logprobs.append(torch.cat([wrapper.compute_logprobs(part)[0].cpu() for part in parts]))
    lora.enabled = True
    return logprobs[0] - logprobs[1]

def find_grid(wrapper, count):
    """-> rows and columns of the codes of a picture. A wrapper may have them as its `grid`;
    otherwise the codes are square, or the grid is, and where both may be, a guess would mislead."""
    width, height = wrapper.config.width, wrapper.config.height
    if isinstance(wrapper, grpo.GLMImageWrapper):
        return height // 32, width // 32
    square = math.isqrt(count)
    rows = math.isqrt(count * height // width)
    grids = {(square, square)} if square**2 == count else set()
    if rows and rows**2 * width == count * height and count % rows == 0:
        grids.add((rows, count // rows))
    found = getattr(wrapper, "grid", None) or (grids.pop() if len(grids) == 1 else None)
    if found is None or math.prod(found) != count:
        raise grpo.BadInput(f"--change: how do {count} codes lie in {width} x {height} pixels? "
                            "The wrapper must have grid = rows, columns")
    return found

# Colours that few pictures have, and that colour-blind people can tell apart.
LIKELIER = torch.tensor([208, 28, 139]) / 255  # pink
LESS_LIKELY = torch.tensor([1, 133, 113]) / 255  # teal

def draw_map(values, limit, grid, size):
    """A value for each code, row by row -> PIL image: white at 0, pink at limit, teal at -limit."""
    x = (values.view(*grid, 1) / (limit or 1)).clamp(-1, 1)
    pixels = 1 - x.clamp(min=0) * (1 - LIKELIER) + x.clamp(max=0) * (1 - LESS_LIKELY)
    return Image.fromarray((255 * pixels).round().byte().numpy()).resize(size, Image.NEAREST)

# --- The command --------------------------------------------------------------
def choose_step(path, weights, step):
    steps = [*weights]
    if step is None and steps:
        return steps[-1]
    if step not in steps:
        there = "is one adapter" if None in steps else f"has weights of steps {steps}"
        raise grpo.BadInput(f"{path}: {there}; --step {step} is not among them")
    return step

def read_prompts(args, run):
    """-> prompts, which have sources if the run is one of edit.py."""
    load_prompts = grpo.load_prompts if args.source else run.load_prompts
    prompts = list(args.prompt)
    if args.prompts:
        prompts += load_prompts(args.prompts)[0]
    if not prompts or not 1 <= args.samples <= LIMIT:
        raise grpo.BadInput(
            f"--prompt or --prompts says what to draw, --samples how often, 1 to {LIMIT}")
    if args.source:
        if not is_editor(run):
            raise grpo.BadInput("--source: the run is none of edit.py")
        grpo.attempt(f"--source {args.source}", open_source, args.source)
        prompts = [Edit(prompt, args.source) for prompt in prompts]
    return prompts

def prepare(args):
    """All input is checked before a model is loaded -> prompts, run, its step or None."""
    if not 0 <= args.seed <= 2**40:
        raise grpo.BadInput(f"--seed: must be 0 to 2**40, and is {args.seed}")
    if args.change and not args.adapter:
        raise grpo.BadInput("--change: type the folder of a run or of an adapter")
    if not (args.adapter or args.model or args.wrapper):
        raise grpo.BadInput("type the folder of a run or of an adapter, or --model")
    if args.out and args.out.exists():
        raise grpo.BadInput(f"--out {args.out}: exists already; choose another folder")
    run = open_run(args.adapter, model=args.model, wrapper=args.wrapper,
                   width=args.width, height=args.height)
    out = args.out.absolute() if args.out else find_home(run) / "pictures"
    there = next(folder for folder in out.parents if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise grpo.BadInput(f"--out {args.out or out}: nothing can be written to {there}")
    step = choose_step(args.adapter, run.weights, args.step) if args.adapter else None
    return read_prompts(args, run), run, step

def make_folder(out, run):
    """-> --out, or a new folder of the run's: pictures, or else pictures2, pictures3, .."""
    if out is None:
        home = find_home(run)
        number, _ = take_number(lambda number: (home / f"pictures{number}").mkdir())
        return home / f"pictures{number}"
    out.mkdir(parents=True)
    return out.absolute()

def add_maps(rows, changes, prompts, wrapper, out):
    """Saves a map for each picture -> rows in which it follows the picture, below a heading. All
    maps have one scale."""
    for change, prompt in zip(changes, prompts):
        print(f"  {change.mean().item():+.4f} for each token, on average: {prompt}")
    painted = [pick_painted(wrapper, change) for change in changes]
    grid = find_grid(wrapper, painted[0].shape[1])
    limit = torch.cat(painted).abs().quantile(0.95).item()  # rare codes would make the rest pale
    scale = f"teal {-limit:.3g}, white 0, pink {limit:+.3g}"
    print(f"log pi_new - log pi_base of the codes that are painted: {scale}")
    paired = [["", *["drawn", f"likelier now, or less likely: {scale}"] * len(rows[0])]]
    for i, (images, change) in enumerate(zip(rows, painted)):
        maps = [draw_map(values, limit, grid, image.size)
                for values, image in zip(change, images)]
        for j, picture in enumerate(maps):
            grpo.attempt(out, picture.save, out / f"{i:03}_{j}_change.png")
        paired.append([cell for pair in zip(images, maps) for cell in pair])
    return paired

def generate(args):
    prompts, run, step = prepare(args)
    wrapper = run.Wrapper.from_pretrained(run.config.model, run.config)
    check_prompts(wrapper, prompts)
    lora = load_weights(wrapper, run.weights[step]) if args.adapter else None
    what = args.adapter or run.config.model
    print(what if step is None else f"{what}: {name_step(run, step)}", flush=True)
    seeds = [args.seed + i for i in range(len(prompts))]
    rows = []
    changes = []
    out = None
    examine = functools.partial(compute_change, wrapper, lora) if args.change else None
    for i, (_, images, change) in enumerate(draw(wrapper, prompts, args.samples, seeds, examine)):
        out = out or make_folder(args.out, run)
        for j, image in enumerate(images):
            grpo.attempt(out, image.save, out / f"{i:03}_{j}.png")
        rows.append(images)
        changes.append(change)
    sheet = [[prompt, grpo.open_image(prompt.source)] if hasattr(prompt, "source") else [prompt]
             for prompt in prompts]
    if args.change:
        heading, *rows = add_maps(rows, changes, prompts, wrapper, out)
        sheet.insert(0, [""] * (len(sheet[0]) - 1))
        rows.insert(0, heading)
    sheet = [[*texts, *row] for texts, row in zip(sheet, rows)]
    save_film(out / "sheet.png", sheet, columns=max(map(len, sheet)))
    print(f"{len(prompts)} prompt(s) at {run.config.width} x {run.config.height}, files: {out}")

def main(args):
    try:
        generate(args)
    except grpo.BadInput as error:
        report(error)
    except KeyboardInterrupt:
        sys.exit("Stopped.")

if __name__ == "__main__":
    main(ARGS)
