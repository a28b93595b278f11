"""Did it get better? The adapters of a run draw prompts that were not trained. How do the rewards
change, with a 95 % interval, and do the samples of a prompt still differ?

    cp .github/evaluate.py .
    python evaluate.py runs/mine --steps 0 40 --reward color,mine.py:bright

Every score goes to evaluation.json in the folder of the run, and pictures to film.png."""
import argparse, itertools, json, textwrap
from pathlib import Path
import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont, ImageOps
import diffusers, grpo

def evaluate(wrapper, lora, adapters, prompts, targets, rewards, samples=4, seed=0):
    """-> for each folder of adapters what `measure` gives for each prompt, and its first picture.
    All get the same seeds: luck is the same for all, and what differs is the adapters' doing."""
    seeds = [10**9 + seed * len(prompts) + i for i in range(len(prompts))]  # not those of training
    results = []
    pictures = []
    for adapter in grpo.progress(adapters, "evaluate"):
        lora.load(adapter)
        drawn = wrapper.generate_with_tracking(prompts, samples, seeds)
        groups = grpo.split_rollout(drawn, samples)
        results.append([measure(*row, rewards) for row in zip(groups, prompts, targets)])
        pictures.append(drawn["images"][::samples])
    return results, pictures

def measure(group, prompt, target, rewards):
    """The samples of a prompt -> every reward of each, and how much each two differ: the share of
    other codes in the large grid, and the mean difference of pixels, 0..1."""
    images = group["images"]
    n = len(images)
    measures = {}
    for name, (function, _) in rewards.items():
        scores, _ = grpo.compute_rewards(images, [prompt] * n, [target] * n, {name: (function, 1)})
        measures[name] = scores.tolist()
    large = images[0].width // 32 * (images[0].height // 32)  # codes, after those of the draft
    codes = group["tokens"][:, -large:].cpu().numpy()
    pixels = [np.asarray(image) / 255 for image in images]
    measures["codes differ"] = [np.mean(a != b) for a, b in itertools.combinations(codes, 2)]
    measures["pixels differ"] = [abs(a - b).mean() for a, b in itertools.combinations(pixels, 2)]
    return measures

def find_interval(changes):
    """Of their mean, at 95 %, by the bootstrap: prompts are drawn anew, some of them twice. Images
    would not do: those of a prompt are alike, and the interval would be too narrow."""
    drawn = np.random.default_rng(0).choice(changes, (10_000, len(changes)))
    return np.quantile(drawn.mean(1), [0.025, 0.975])

def print_table(labels, results):
    """The mean of each measure, its change since the first row, and in how many prompts it rose."""
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
    tiles = [draw_tile(cell) for row in rows for cell in row]
    return diffusers.utils.make_image_grid(tiles, len(rows), len(rows[0]))

def draw_tile(cell):
    """A picture, or a text, with a white border."""
    tile = Image.new("RGB", (200, 200), "white")
    if isinstance(cell, str):
        text = textwrap.fill(cell, 17, max_lines=7, placeholder=" ..")
        font = ImageFont.load_default(size=22)
        ImageDraw.Draw(tile).text((100, 100), text, "black", font, anchor="mm", align="center")
    else:
        tile.paste(ImageOps.pad(cell, (192, 192), color="white"), (4, 4))
    return tile

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n")[:2]))
    parser.add_argument("run", type=Path, help="its folder")
    parser.add_argument("--steps", type=int, nargs="+", help="of adapters; without: all")
    parser.add_argument("--prompts", default=Path(grpo.__file__).with_name(".github") / "held_out.txt")
    parser.add_argument("--reward", help="as grpo.py has it; without: that of the run")
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--seed", type=int, default=0)
    typed = parser.parse_args()
    try:  # all that can be wrong is found before a model is loaded
        config = grpo.Config.from_run(typed.run)
        prompts, targets = grpo.load_prompts(typed.prompts)
        rewards = grpo.load_rewards(typed.reward or config.reward)
        blank = [Image.new("RGB", (32, 32))] * len(prompts)
        for name in rewards.keys() & grpo.REWARDS.keys():
            grpo.REWARDS[name](blank, prompts, targets)  # do these have what the reward needs?
        adapters = {int(path.name[8:]): path for path in sorted(typed.run.glob("adapter_[0-9]*"))}
        steps = typed.steps or list(adapters)
        if not steps or not set(steps) <= adapters.keys():
            raise ValueError(f"{typed.run} has adapters of steps {list(adapters)}")
        if typed.samples < 2:
            raise ValueError("--samples: 2 at least, to see how much they differ")
    except (ValueError, TypeError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    lora = grpo.LoRA(wrapper.policy, wrapper.TARGETS, config.lora_rank)
    results, pictures = evaluate(wrapper, lora, [adapters[step] for step in steps],
                                 prompts, targets, rewards, typed.samples, typed.seed)
    labels = [f"step {step}" for step in steps]
    print_table(labels, results)
    number = next(n for n in ["", *range(2, 1000)]  # what an earlier evaluation wrote stays
                  if not Path(typed.run, f"evaluation{n}.json").exists())
    saved = dict(prompts=prompts, samples=typed.samples, seed=typed.seed, steps=steps, results=results)
    Path(typed.run, f"evaluation{number}.json").write_text(json.dumps(saved))
    draw_film(labels, pictures, prompts).save(Path(typed.run, f"film{number}.png"))
    print(f"\nevery score: evaluation{number}.json, pictures: film{number}.png, in {typed.run}")
