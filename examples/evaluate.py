"""Did it get better? The adapters of a run draw prompts that were not trained. How do the rewards
change, with a 95 % interval, and do the samples of a prompt still differ?

    python -m examples.evaluate runs/mine --steps 0 20 --reward color,mine.py:bright
Every score goes to evaluation.json in the folder of the run, and pictures to film.png."""
import argparse, itertools, json, textwrap
from pathlib import Path
import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageOps
import grpo

def evaluate(wrapper, lora, adapters, prompts, targets, rewards, samples=4, seed=0):
    """Yields for each folder of adapters what `measure` says of each prompt, and its first picture.
    All get the same seeds: luck is the same for all, and what differs is the adapters' doing."""
    seeds = [10**9 + seed * len(prompts) + i for i in range(len(prompts))]  # not those of training
    for adapter in adapters:
        lora.load(grpo.read_adapter(adapter, lora.config["r"]))
        drawn = wrapper.generate_with_tracking(prompts, samples, seeds)
        starts = range(0, len(drawn.prompts), samples)
        groups = [drawn.part(slice(start, start + samples)) for start in starts]
        rows = [measure(group, target, rewards) for group, target in zip(groups, targets)]
        yield rows, drawn.images[::samples]

def measure(group, target, rewards):
    """The rewards of each sample of a prompt, and how much each two of them differ, 0..1."""
    images = group.images
    n = len(images)
    measures = {}
    for name, (function, _) in rewards.items():
        reward = {name: (function, 1)}
        scores, _ = grpo.compute_rewards(images, group.prompts, [target] * n, reward)
        measures[name] = scores.tolist()
    large = images[0].width // 32 * (images[0].height // 32)  # codes, after those of the draft
    codes = group.tokens[:, -large:].numpy()
    measures["codes differ"] = [np.mean(a != b) for a, b in itertools.combinations(codes, 2)]
    measures["pixels differ"] = [np.mean(ImageChops.difference(a, b)) / 255
                                 for a, b in itertools.combinations(images, 2)]
    return measures

def find_interval(changes):
    """Of their mean, by the bootstrap over prompts: the images of a prompt are not independent."""
    drawn = np.random.default_rng(0).choice(changes, (10_000, len(changes)))
    return np.quantile(drawn.mean(1), [0.025, 0.975])

def print_table(labels, results):
    """The mean of each measure, its change since the first row, and in how many prompts it rose."""
    n = len(results[0])
    print(f"{n} prompts")
    if n < 12:
        print("Of fewer than 12 prompts the intervals are too narrow: take more.")
    for name in results[0][0]:
        print(f"\n{name:32} mean  change   95 % interval    rose in")
        means = [np.array([np.mean(row[name]) for row in rows]) for rows in results]  # [P] each
        for label, values in zip(labels, means):
            changes = values - means[0]
            low, high = find_interval(changes)
            print(f"  {label:27}{values.mean():8.3f}  {changes.mean():+.3f}  "
                  f"{low:+.3f} .. {high:+.3f}  {np.mean(changes > 0):6.0%}")

def draw_film(labels, pictures, prompts):
    """A row for each adapter, a column for each of the first eight prompts, with the same seed."""
    rows = [["", *prompts[:8]]] + [[label, *row[:8]] for label, row in zip(labels, pictures)]
    film = Image.new("RGB", (200 * len(rows[0]), 200 * len(rows)), "white")
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
    parser = argparse.ArgumentParser(description="Did it get better? See the top of this file.")
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument("--steps", type=int, nargs="+", help="of adapters; without: all")
    parser.add_argument("--prompts", default="examples/held_out.txt", help="%(default)s")
    parser.add_argument("--reward", help="as for grpo.py; without: that of the run")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    typed = parser.parse_args()
    try:  # all that can be wrong is found before a model is loaded
        config = grpo.parse_args(["--resume", str(typed.run)])
        prompts, targets = grpo.load_prompts(typed.prompts)
        rewards = grpo.load_rewards(typed.reward or config.reward)
        config.adapter = config.resume = None  # this is no run
        grpo.check_before_loading(config, prompts, targets, rewards)
        adapters = {int(path.name[8:]): path for path in sorted(typed.run.glob("adapter_[0-9]*"))}
        steps = typed.steps or list(adapters)
        if not steps or not set(steps) <= adapters.keys():
            raise grpo.BadInput(f"{typed.run} has adapters of steps {list(adapters)}")
        if typed.samples < 2:
            raise grpo.BadInput("--samples: 2 at least, to see how much they differ")
    except grpo.BadInput as error:
        parser.exit(2, f"evaluate.py: error: {' '.join(str(error).split())}\n")
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
    results, pictures = zip(*evaluate(wrapper, lora, [adapters[step] for step in steps],
                                      prompts, targets, rewards, typed.samples, typed.seed))
    labels = [f"step {step}" for step in steps]
    print_table(labels, results)
    number = next(n for n in ["", *range(2, 1000)]  # what an earlier evaluation wrote stays
                  if not Path(typed.run, f"evaluation{n}.json").exists())
    Path(typed.run, f"evaluation{number}.json").write_text(json.dumps(dict(
        steps=steps, prompts=prompts, samples=typed.samples, seed=typed.seed, results=results)))
    draw_film(labels, pictures, prompts).save(Path(typed.run, f"film{number}.png"))
    print(f"\nin {typed.run}: evaluation{number}.json, with every score, and film{number}.png")
