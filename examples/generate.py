"""Pictures from what you have trained: from a run, from the folder of an adapter, or from a model.

    python -m examples.generate runs/mine --prompt "a red fox" "a blue door" --samples 4
    python -m examples.generate runs/mine --step 10 --prompts prompts.txt
    python -m examples.generate runs/mine/adapter_00010 --prompt "a red fox"
    python -m examples.generate --model zai-org/GLM-Image --prompt "a red fox"
    python -m examples.generate runs/edits --source fox.png --prompt "make it snow"

The folder --out gets sheet.png, with a row for each prompt, and the single pictures. Equal seeds
give equal pictures, so that adapters can be compared; evaluate.py does that.
"""
import argparse, sys
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.edit import EditWrapper, open_source
from examples.plot import draw_film

# --- Runs and their adapters; evaluate.py uses these, too ---------------------
def find_adapters(path):
    """A run's folder -> {step: folder of the adapter}; an adapter's folder -> {None: it}."""
    path = Path(path)
    if (path / "adapter_config.json").is_file():
        return {None: path}
    if not (path / "config.json").is_file():
        raise grpo.BadInput(f"{path}: is no folder of a run, nor of an adapter")
    return {int(folder.name[8:]): folder for folder in sorted(path.glob("adapter_[0-9]*"))}

def read_adapter_config(adapter):
    path = Path(adapter, "adapter_config.json")
    return grpo.attempt(path, grpo.read_json, path)

def read_settings(adapter, **typed):
    """The settings of the run that an adapter lies in, or else those of its model, but for what is
    typed -> Config. Without an adapter, those of the typed model."""
    flags = [f"--{name}={value}" for name, value in typed.items() if value is not None]
    if adapter and (adapter.parent / "config.json").is_file():
        flags += ["--resume", str(adapter.parent)]
    elif adapter and typed.get("model") is None:
        flags += ["--model", str(read_adapter_config(adapter)["base_model_name_or_path"])]
    return grpo.parse_args(flags)

def load_wrapper(config, with_sources):
    Wrapper = EditWrapper if with_sources else grpo.GLMImageWrapper
    return Wrapper.from_pretrained(config.model, config)

def load_adapter(wrapper, adapter):
    rank = read_adapter_config(adapter)["r"]
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank)
    lora.load(grpo.read_adapter(adapter, rank))

# --- The command --------------------------------------------------------------
def draw(wrapper, prompts, samples, seed):
    """Yields the pictures of each prompt. Some 32 are sampled at a time, so that the halves of the
    model take turns rarely, and the memory of a GPU suffices."""
    size = max(1, 32 // samples)
    with tqdm(total=len(prompts) * samples, unit="picture") as bar:
        for start in range(0, len(prompts), size):
            part = prompts[start:start + size]
            seeds = [seed + start + i for i in range(len(part))]
            rollout = wrapper.sample(part, samples, seeds)
            for i, prompt in enumerate(part):
                tokens = rollout.tokens[i * samples:(i + 1) * samples]
                images = wrapper.decode([prompt], tokens, seeds[i:i + 1])
                bar.update(samples)
                yield images

def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    add = parser.add_argument
    add("adapter", nargs="?", help="folder of a run, or of an adapter")
    add("--step", type=int, help="of the run's adapter; default: the last that was saved")
    add("--model", help="hub id or folder, without any adapter; or another model for the adapter")
    add("--prompt", nargs="+", default=[], metavar="TEXT", help="what to draw")
    add("--prompts", metavar="FILE", help="text file with a prompt on each line")
    add("--source", metavar="PICTURE", help="to be edited, with an adapter of edit.py")
    add("--samples", type=int, default=4, help="pictures of each prompt; default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--width", type=int, help="default: as in the run")
    add("--height", type=int, help="default: as in the run")
    add("--out", type=Path, default="pictures", help="new folder; default: %(default)s")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    return parser, parser.parse_args()

def choose_adapter(path, step):
    adapters = find_adapters(path)
    if step is None and adapters:
        *_, step = adapters  # the last
    if step not in adapters:
        there = "is one adapter" if None in adapters else f"has adapters of steps {[*adapters]}"
        raise grpo.BadInput(f"{path}: {there}; --step {step} is not among them")
    return adapters[step]

def check(args):
    """All input is checked before a model is loaded -> prompts, adapter or None, Config."""
    if args.adapter is None and args.model is None:
        raise grpo.BadInput("type the folder of a run or of an adapter, or --model")
    prompts = list(args.prompt)
    if args.prompts:
        prompts += grpo.load_prompts(args.prompts)[0]
    if not prompts or args.samples < 1:
        raise grpo.BadInput("--prompt or --prompts says what to draw, --samples how often")
    if args.out.exists():
        raise grpo.BadInput(f"--out {args.out}: exists already; choose another folder")
    if args.source:
        grpo.attempt(f"--source {args.source}", open_source, args.source)
        prompts = [f"{prompt}\t{args.source}" for prompt in prompts]
    adapter = choose_adapter(args.adapter, args.step) if args.adapter else None
    config = read_settings(adapter, model=args.model, width=args.width, height=args.height)
    return prompts, adapter, config

def check_prompts(wrapper, prompts):
    for prompt in prompts:
        grpo.attempt(f"--prompts: the model cannot read {prompt!r}", wrapper.encode, [prompt])

def main():
    parser, args = parse_args()
    try:
        prompts, adapter, config = check(args)
        wrapper = load_wrapper(config, with_sources=bool(args.source))
        check_prompts(wrapper, prompts)
        if adapter:
            load_adapter(wrapper, adapter)
    except grpo.BadInput as error:
        message = " ".join(str(error).split())
        parser.exit(2, f"{parser.prog}: error: {message}\n")
    args.out.mkdir(parents=True)
    rows = [["source", open_source(args.source)]] if args.source else []
    for i, images in enumerate(draw(wrapper, prompts, args.samples, args.seed)):
        for j, image in enumerate(images):
            image.save(args.out / f"{i:03}_{j}.png")
        rows.append([prompts[i].split("\t")[0], *images])
    draw_film(rows, columns=1 + args.samples).save(args.out / "sheet.png")
    print(f"{adapter or config.model}: {len(prompts)} prompt(s) at {config.width} x "
          f"{config.height}, files: {args.out.absolute()}")

if __name__ == "__main__":
    main()
