"""Pictures from what you have trained: from a run, from the folder of an adapter, or from a model.

    python -m examples.generate runs/mine --prompt "a red fox" "a blue door" --samples 4
    python -m examples.generate runs/mine --step 10 --prompts prompts.txt
    python -m examples.generate runs/mine/adapter_00010 --prompt "a red fox"
    python -m examples.generate --model zai-org/GLM-Image --prompt "a red fox"

The folder --out gets sheet.png, with a row for each prompt, and the single pictures. Equal seeds
give equal pictures, so that adapters can be compared; evaluate.py does that. A run of edit.py needs
a file of --prompts, whose lines name the pictures to edit.
"""
from pathlib import Path

from examples import read_flags, start

def add_flags(add):
    add("run", nargs="?", help="folder of a run, or of an adapter")
    add("--step", type=int, help="of the run; default: its newest adapter")
    add("--model", help="hub id or folder: where the run's model lies now, or one without adapter")
    add("--wrapper", metavar="FILE:CLASS", help="where the run's wrapper lies now")
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="what to draw")
    add("--prompts", metavar="FILE", help="text file with a prompt on each line")
    add("--samples", type=int, default=4, help="pictures of each prompt; default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--width", type=int, help="default: as in the run")
    add("--height", type=int, help="default: as in the run")
    add("--out", type=Path, default=Path("pictures"), help="new folder; default: %(default)s")

if __name__ == "__main__":
    ARGS = read_flags(__doc__, add_flags)

import diffusers

import grpo
from examples.pictures import save_film
from examples.runs import draw, load_adapter, load_model, open_run

def generate(args):
    prompts = [grpo.Prompt(prompt) for prompt in args.prompt]
    if args.prompts:
        prompts += grpo.load_prompts(args.prompts)
    if not prompts:
        raise grpo.BadInput("--prompt or --prompts must say what to draw")
    run = open_run(args.run, model=args.model, wrapper=args.wrapper,
                   width=args.width, height=args.height)
    adapter = None
    if args.run:
        step = max(run.adapters, default=None) if args.step is None else args.step
        if step not in run.adapters:
            raise grpo.BadInput(f"{args.run}: has adapters of steps {[*run.adapters]}")
        adapter = run.adapters[step]
    grpo.attempt("--out", args.out.mkdir, parents=True)
    wrapper = load_model(run.Wrapper, run.config)
    if adapter:
        load_adapter(wrapper, adapter)
    print(adapter or run.config.model, flush=True)
    seeds = [args.seed + i for i in range(len(prompts))]
    rows = []
    for i, images in enumerate(draw(wrapper, prompts, args.samples, seeds)):
        for j, image in enumerate(images):
            image.save(args.out / f"{i:03}_{j}.png")
        target = prompts[i].target
        shown = [diffusers.utils.load_image(target)] if target else []
        rows.append([prompts[i], *shown, *images])
    save_film(args.out / "sheet.png", rows, columns=max(map(len, rows)))
    print(f"{len(prompts)} prompt(s) at {run.config.width} x {run.config.height}: {args.out}")

if __name__ == "__main__":
    start(generate, ARGS)
