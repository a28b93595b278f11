"""Evaluates a run's saved adapters on held-out prompts: how much each reward changes, with a 95 %
interval, and how much the samples of a prompt still differ.

    python -m examples.evaluate runs/mine --steps 0 20 --reward color,mine.py:bright
Writes evaluation.json, with every score, and film.png, a grid of images, to the run's folder."""
import argparse, itertools, json, textwrap
from pathlib import Path
import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageOps
import grpo

def evaluate(wrapper, lora, adapters, prompts, targets, rewards, samples=4, seed=0):
    """For each adapter folder, yields `measure` of each prompt, and the first image of each prompt.
    All adapters use the same seeds, so only the adapters make a difference."""
    seeds = [10**9 + seed * len(prompts) + i for i in range(len(prompts))]  # not used in training
    for adapter in adapters:
        lora.load(grpo.read_adapter(adapter, lora.config["r"]))
        drawn = wrapper.generate_with_tracking(prompts, samples, seeds)
        starts = range(0, len(drawn.prompts), samples)
        groups = [drawn.part(slice(start, start + samples)) for start in starts]
        rows = [measure(group, target, rewards) for group, target in zip(groups, targets)]
        yield rows, drawn.images[::samples]

def measure(group, target, rewards):
    """The rewards of each sample of a prompt, and how much each pair of samples differs, 0..1."""
    images = group.images
    n = len(images)
    measures = {}
    for name, (function, _) in rewards.items():
        reward = {name: (function, 1)}
        scores, _ = grpo.compute_rewards(images, group.prompts, [target] * n, reward)
        measures[name] = scores.tolist()
    large = images[0].width // 32 * (images[0].height // 32)  # codes after the draft
    codes = group.tokens[:, -large:].numpy()
    measures["codes differ"] = [np.mean(a != b) for a, b in itertools.combinations(codes, 2)]
    measures["pixels differ"] = [np.mean(ImageChops.difference(a, b)) / 255
                                 for a, b in itertools.combinations(images, 2)]
    return measures

def find_interval(changes):
    """95 % interval of their mean, by bootstrap over prompts: images of one are not independent."""
    drawn = np.random.default_rng(0).choice(changes, (10_000, len(changes)))
    return np.quantile(drawn.mean(1), [0.025, 0.975])

def print_table(labels, results):
    """Each measure: mean, change since the first row, and the share of prompts where it rose."""
    n = len(results[0])
    print(f"{n} prompts")
    if n < 12:
        print("Warning: with fewer than 12 prompts the intervals are too narrow. Use more.")
    for name in results[0][0]:
        print(f"\n{name:32} mean  change   95 % interval    rose in")
        means = [np.array([np.mean(row[name]) for row in rows]) for rows in results]  # [P] each
        for label, values in zip(labels, means):
            changes = values - means[0]
            low, high = find_interval(changes)
            print(f"  {label:27}{values.mean():8.3f}  {changes.mean():+.3f}  "
                  f"{low:+.3f} .. {high:+.3f}  {np.mean(changes > 0):6.0%}")

def draw_film(labels, pictures, prompts):
    """A grid of images: a row per adapter, a column per prompt (the first eight), equal seeds."""
    rows = [["", *prompts[:8]]] + [[label, *row[:8]] for label, row in zip(labels, pictures)]
    film = Image.new("RGB", (200 * len(rows[0]), 200 * len(rows)), "lightgray")
    font = ImageFont.load_default(size=22)
    for y, row in enumerate(rows):
        for x, cell in enumerate(row):
            if isinstance(cell, str):
                text = textwrap.fill(cell, 17, max_lines=7, placeholder=" ..")
                ImageDraw.Draw(film).text((200 * x + 100, 200 * y + 100), text, "black", font, "mm")
            else:
                film.paste(ImageOps.contain(cell, (192, 192)), (200 * x + 4, 200 * y + 4))
    return film

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Evaluates a run's adapters on held-out prompts.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--steps", type=int, nargs="+", help="steps of the adapters; default: all")
    parser.add_argument("--prompts", default="examples/held_out.txt", help="%(default)s by default")
    parser.add_argument("--reward", help="as for grpo.py; default: the run's own")
    parser.add_argument("--samples", type=int, default=4, help="samples per prompt; default: 4")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples; default: 0")
    typed = parser.parse_args()
    try:  # check all input before loading a model
        config = grpo.parse_args(["--resume", str(typed.run)])
        prompts, targets = grpo.load_prompts(typed.prompts)
        rewards = grpo.load_rewards(typed.reward or config.reward)
        config.adapter = config.resume = None  # this is not a training run
        grpo.check_before_loading(config, prompts, targets, rewards)
        adapters = {int(path.name[8:]): path for path in sorted(typed.run.glob("adapter_[0-9]*"))}
        steps = typed.steps or list(adapters)
        if not steps or not set(steps) <= adapters.keys():
            raise grpo.BadInput(f"{typed.run} only has adapters for steps {list(adapters)}")
        if typed.samples < 2:
            raise grpo.BadInput("--samples: must be at least 2, to compare them")
    except grpo.BadInput as error:
        message = " ".join(str(error).replace("--resume ", "").split())  # it was not typed
        parser.exit(2, f"evaluate.py: error: {message}\n")
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
    results, pictures = zip(*evaluate(wrapper, lora, [adapters[step] for step in steps],
                                      prompts, targets, rewards, typed.samples, typed.seed))
    labels = [f"step {step}" for step in steps]
    print_table(labels, results)
    number = next(n for n in ["", *range(2, 1000)]  # keep the files of earlier evaluations
                  if not Path(typed.run, f"evaluation{n}.json").exists())
    Path(typed.run, f"evaluation{number}.json").write_text(json.dumps(dict(
        steps=steps, prompts=prompts, samples=typed.samples, seed=typed.seed, results=results)))
    draw_film(labels, pictures, prompts).save(Path(typed.run, f"film{number}.png"))
    print(f"\nWrote evaluation{number}.json, with every score, and film{number}.png to {typed.run}")
