"""Pictures from what you have trained: from a run, from the folder of an adapter, or from a model.

    python -m examples.generate runs/mine --prompt "a red fox" "a blue door" --samples 4
    python -m examples.generate runs/mine --step 10 --prompts prompts.txt
    python -m examples.generate runs/mine/adapter_00010 --prompt "a red fox"
    python -m examples.generate --model zai-org/GLM-Image --prompt "a red fox"
    python -m examples.generate runs/edits --source fox.png --prompt "make it snow"
    python -m examples.generate runs/mine --prompt "a red fox" --change

The folder --out gets sheet.png, with a row for each prompt, and the single pictures. Equal seeds
give equal pictures, so that adapters can be compared; evaluate.py does that. With --change, a map
beside each picture shows where training made its codes likelier (red) or less likely (blue).
"""
import argparse, functools, os, sys
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
    add("--out", type=Path, default="pictures", help="new folder; default: %(default)s")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    return parser.parse_args()

if __name__ == "__main__":
    ARGS = parse_args()  # before the imports, which take seconds

import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.edit import Edit, open_source
from examples.pictures import save_film
from examples.runs import (
    LIMIT, check_prompts, draw, fail, load_weights, name_step, open_run, pick_painted)

# --- What training changed ----------------------------------------------------
@torch.no_grad()
def compute_change(wrapper, lora, rollout):
    """log pi_new - log pi_base of the codes drawn [N, T]. As pi_new drew them, its mean estimates
    KL(new, base), the `kl` of the log."""
    if rollout.tokens.is_floating_point():
        raise grpo.BadInput("--change: this model draws latents, not codes")
    size = wrapper.config.micro_batch_size
    parts = [rollout.part(slice(i, i + size)) for i in range(0, len(rollout.tokens), size)]
    logprobs = []
    for lora.enabled in (True, False):
        logprobs.append(torch.cat([wrapper.compute_logprobs(part)[0].cpu() for part in parts]))
    lora.enabled = True
    return logprobs[0] - logprobs[1]

def draw_map(values, limit, size):
    """A value for each code, row by row -> PIL image: white at 0, red at limit, blue at -limit."""
    width, height = size
    rows = round((len(values) * height / width) ** 0.5)
    if len(values) % rows:
        raise grpo.BadInput(f"--change: {len(values)} tokens are no grid of {width} x {height}")
    x = (values.view(rows, -1) / (limit or 1)).clamp(-1, 1)
    pixels = torch.stack([1 + x.clamp(max=0), 1 - x.abs(), 1 - x.clamp(min=0)], 2)
    return Image.fromarray((255 * pixels).byte().numpy()).resize(size, Image.NEAREST)

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
        if "EditWrapper" not in [base.__name__ for base in run.Wrapper.__mro__]:
            raise grpo.BadInput("--source: the run is none of edit.py")
        grpo.attempt(f"--source {args.source}", open_source, args.source)
        prompts = [Edit(prompt, args.source) for prompt in prompts]
    return prompts

def prepare(args):
    """All input is checked before a model is loaded -> prompts, run, its step or None."""
    if args.out.exists():
        raise grpo.BadInput(f"--out {args.out}: exists already; choose another folder")
    there = next(folder for folder in args.out.absolute().parents if folder.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise grpo.BadInput(f"--out {args.out}: nothing can be written to {there}")
    if not 0 <= args.seed <= 2**40:
        raise grpo.BadInput(f"--seed: must be 0 to 2**40, and is {args.seed}")
    if args.change and not args.adapter:
        raise grpo.BadInput("--change: type the folder of a run or of an adapter")
    if not (args.adapter or args.model or args.wrapper):
        raise grpo.BadInput("type the folder of a run or of an adapter, or --model")
    run = open_run(args.adapter, model=args.model, wrapper=args.wrapper,
                   width=args.width, height=args.height)
    step = choose_step(args.adapter, run.weights, args.step) if args.adapter else None
    return read_prompts(args, run), run, step

def add_maps(rows, changes, prompts, out):
    """Saves a map for each picture -> rows in which it follows the picture. All have one scale."""
    limit = torch.cat(changes).abs().quantile(0.95).item()  # rare codes would make the rest pale
    print(f"log pi_new - log pi_base of the codes: blue {-limit:.3g}, white 0, red {limit:+.3g}")
    paired = []
    for i, (images, change, prompt) in enumerate(zip(rows, changes, prompts)):
        print(f"  {change.mean().item():+.4f} on average: {prompt}")
        maps = [draw_map(values, limit, image.size) for values, image in zip(change, images)]
        for j, picture in enumerate(maps):
            picture.save(out / f"{i:03}_{j}_change.png")
        paired.append([cell for pair in zip(images, maps) for cell in pair])
    return paired

def generate(args):
    prompts, run, step = prepare(args)
    wrapper = run.Wrapper.from_pretrained(run.config.model, run.config)
    check_prompts(wrapper, prompts)
    lora = load_weights(wrapper, run.weights[step]) if args.adapter else None
    what = args.adapter or run.config.model
    print(what if step is None else f"{what}: {name_step(run, step)}", flush=True)
    args.out.mkdir(parents=True)
    seeds = [args.seed + i for i in range(len(prompts))]
    rows = []
    changes = []
    examine = functools.partial(compute_change, wrapper, lora) if args.change else None
    for i, (_, images, change) in enumerate(draw(wrapper, prompts, args.samples, seeds, examine)):
        for j, image in enumerate(images):
            image.save(args.out / f"{i:03}_{j}.png")
        rows.append(images)
        if args.change:
            changes.append(pick_painted(wrapper, change))
    if args.change:
        rows = add_maps(rows, changes, prompts, args.out)
    for row, prompt in zip(rows, prompts):
        row[:0] = [prompt, open_source(prompt.source)] if hasattr(prompt, "source") else [prompt]
    save_film(args.out / "sheet.png", rows, columns=max(map(len, rows)))
    print(f"{len(prompts)} prompt(s) at {run.config.width} x {run.config.height}, "
          f"files: {args.out.absolute()}")

def main(args):
    try:
        generate(args)
    except grpo.BadInput as error:
        fail(error)

if __name__ == "__main__":
    main(ARGS)
