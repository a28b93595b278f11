"""Pictures from what you have trained: from a run, from the folder of an adapter, or from a model.

    python -m examples.generate runs/mine --prompt "a red fox" "a blue door" --samples 4
    python -m examples.generate runs/mine --step 10 --prompts prompts.txt
    python -m examples.generate runs/mine/adapter_00010 --prompt "a red fox"
    python -m examples.generate --model zai-org/GLM-Image --prompts p.txt --reward mine.py:good
    python -m examples.generate --pictures my_pictures --reward mine.py:good    # draws nothing

The folder --out gets sheet.png, with a row for each prompt, and the single pictures, each with its
prompt beside it in .txt. A run of edit.py needs a file of --prompts, whose lines name the pictures
to edit. With --reward, it prints what pictures score and by how much those of a prompt differ, and
scores.png has the best and the worst of each prompt.
"""
from pathlib import Path

from examples import add_drawing_flags, get_drawing_flags, read_flags, start

def add_flags(add):
    add("run", nargs="?", help="folder of a run, or of an adapter")
    add("--step", type=int, help="of the run; default: its newest adapter")
    add("--model", help="hub id or folder: where the run's model lies now, or one without adapter")
    add("--wrapper", metavar="FILE:CLASS", help="where the run's wrapper lies now")
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="what to draw")
    add("--prompts", metavar="FILE", help="text file with a prompt on each line")
    add("--samples", type=int, default=4, help="pictures of each prompt; default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add_drawing_flags(add)
    add("--reward", help="as for grpo.py: scores the pictures")
    add("--pictures", type=Path, metavar="FOLDER",
        help="to score: pictures with prompts beside them, such as fox.png and fox.txt")
    add("--out", type=Path, default=Path("pictures"), help="new folder; default: %(default)s")

if __name__ == "__main__":
    ARGS = read_flags(__doc__, add_flags)

import diffusers
import numpy as np

import grpo
from examples.evaluate import measure
from examples.pictures import save_film
from examples.runs import draw, load_adapter, load_model, open_run

SUFFIXES = ".png", ".jpg", ".jpeg", ".webp"

def score(rows, rewards, path):
    """(prompt, images) of each -> a line for each reward; best and worst pictures in a file."""
    found = [measure(images, prompt, rewards) for prompt, images in rows]
    for name in rewards:
        groups = [each[name] for each in found]
        several = [group for group in groups if len(group) > 1]
        std = np.mean([np.std(group, ddof=1) for group in several] or np.nan)
        print(f"{name}: mean {np.mean(np.concatenate(groups)):.4g}, {min(map(min, groups)):.4g} .. "
              f"{max(map(max, groups)):.4g}, std within a prompt {std:.3g}, "
              f"all equal in {sum(np.ptp(group) == 0 for group in several)} of {len(several)}")
    film = [["", "best", "worst"]]
    for (prompt, images), each in zip(rows, found):
        ends = np.argmax(each["reward"]), np.argmin(each["reward"])
        film.append([prompt, *[(images[i], f"{each['reward'][i]:.4g}") for i in ends]])
    save_film(path, film)
    print(f"best and worst: {path}")

def read_pictures(folder):
    """-> (prompt, images) of each prompt, in the order of the names of the files."""
    groups = {}
    for file in sorted(folder.glob("*.txt")):
        images = [diffusers.utils.load_image(str(path)) for path in sorted(folder.iterdir())
                  if path.stem == file.stem and path.suffix.lower() in SUFFIXES]
        groups.setdefault(grpo.Prompt(file.read_text("utf-8-sig")), []).extend(images)
    if not any(groups.values()):
        raise grpo.BadInput(f"--pictures {folder}: has no picture with a prompt in .txt beside it")
    return [(prompt, images) for prompt, images in groups.items() if images]

def generate(args):
    rewards = grpo.load_rewards(args.reward or "color") if args.reward or args.pictures else {}
    if args.pictures:
        return score(read_pictures(args.pictures), rewards, args.pictures / "scores.png")
    prompts = [grpo.Prompt(prompt) for prompt in args.prompt]
    if args.prompts:
        prompts += grpo.load_prompts(args.prompts)
    if not prompts:
        raise grpo.BadInput("--prompt or --prompts must say what to draw")
    run = open_run(args.run, model=args.model, wrapper=args.wrapper, **get_drawing_flags(args))
    step = max(run.adapters, default=None) if args.step is None else args.step
    if args.run and step not in run.adapters:
        raise grpo.BadInput(f"{args.run}: has adapters of steps {[*run.adapters]}")
    adapter = run.adapters.get(step)
    grpo.attempt("--out", args.out.mkdir, parents=True)
    wrapper = load_model(run.Wrapper, run.config)
    if adapter:
        load_adapter(wrapper, adapter)
    print(adapter or run.config.model, flush=True)
    seeds = [args.seed + i for i in range(len(prompts))]
    rows, drawn = [], []
    for i, images in enumerate(draw(wrapper, prompts, args.samples, seeds)):
        drawn.append((prompts[i], images))
        for j, image in enumerate(images):
            image.save(args.out / f"{i:03}_{j}.png")
            (args.out / f"{i:03}_{j}.txt").write_text(f"{prompts[i]}\n")
        target = prompts[i].target
        shown = [diffusers.utils.load_image(target)] if target else []
        rows.append([prompts[i], *shown, *images])
    save_film(args.out / "sheet.png", rows, columns=max(map(len, rows)))
    print(f"{len(prompts)} prompt(s) at {run.config.width} x {run.config.height}: {args.out}")
    if rewards:
        score(drawn, rewards, args.out / "scores.png")

if __name__ == "__main__":
    start(generate, ARGS)
