"""Compares forms of the KL at equal distance from the base model: none, k3 as in grpo.py, and
ratio * k3 as in the patch unbiased_kl. Prints the table of docs/changes.md.

    python -m examples.experiments.kl_forms 0 1 2 --steps 40

The tiny GLM-Image is rewarded for sharpness, which it can raise by forgetting the colours that its
prompts name. Every few steps it draws held-out prompts. The table has what they show where their KL
to the base model passes --kl, by interpolation.
"""
import argparse, itertools, runpy, shutil, subprocess, sys, tempfile, time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of grpo.py
import grpo  # before torch, which reads when it is imported how threads are to wait
import numpy as np
import torch
from PIL import ImageChops

from examples.measure import QuietTrainer

EXAMPLES = Path(__file__).resolve().parents[1]
SAMPLES = 4  # of each held-out prompt
FORMS = {"none": 0, "k3": 1, "ratio * k3": 1}  # times --kl-coef
MEASURES = ["sharpness", "color", "pixels differ", "steps"]

def load_patched_loss():
    """compute_grpo_loss of grpo.py with the patch."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(grpo.__file__, folder)
        patch = EXAMPLES / "patches/unbiased_kl.patch"
        subprocess.run(["git", "apply", patch], cwd=folder, check=True)
        return runpy.run_path(f"{folder}/grpo.py")["compute_grpo_loss"]

class Trainer(QuietTrainer):
    def train(self, every):
        """-> the KL of held-out samples, and MEASURES, every few steps from step 0 on."""
        self.every = every
        self.points = [self.look()]
        super().train()
        return np.array(self.points).T

    def log(self, step, metrics):
        super().log(step, metrics)
        if step % self.every == 0:
            self.points.append(self.look())

    @torch.no_grad()
    def look(self):
        prompts, _ = grpo.load_prompts(EXAMPLES / "make/held_out.txt")
        seeds = range(10**9, 10**9 + len(prompts))
        rollout = self.wrapper.sample(prompts, SAMPLES, seeds)
        images = self.wrapper.decode(prompts, rollout.tokens, seeds)
        _, metrics = grpo.compute_rewards(
            images, rollout.prompts, [None] * len(images), self.rewards)
        self.lora.enabled = False
        parts = [rollout.part(slice(i, i + 32)) for i in range(0, len(images), 32)]
        reference = torch.cat([self.wrapper.compute_logprobs(part)[0] for part in parts]).cpu()
        self.lora.enabled = True
        delta = reference - rollout.logprobs
        kl = (torch.expm1(delta) - delta).mean().item()
        pairs = [pair for i in range(0, len(images), SAMPLES)
                 for pair in itertools.combinations(images[i:i + SAMPLES], 2)]
        differ = np.mean([np.mean(ImageChops.difference(*pair)) / 255 for pair in pairs])
        return kl, metrics["reward/sharpness"], metrics["reward/color"], differ, len(self.history)

def measure(form, seed, args):
    """-> MEASURES where the KL passes --kl for the first time; NaN if it never does."""
    reward = f"{EXAMPLES / 'rewards.py'}:sharpness,color=0"
    config = grpo.parse_args([
        "--model", grpo.TINY_MODEL, "--reward", reward, "--seed", str(seed),
        "--steps", str(args.steps), "--kl-coef", str(FORMS[form] * args.kl_coef)])
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    loss = load_patched_loss() if form == "ratio * k3" else grpo.compute_grpo_loss
    with mock.patch.object(grpo, "compute_grpo_loss", loss):
        kl, *rows = Trainer(config, wrapper, grpo.load_prompts(None)[0]).train(args.every)
    above = np.flatnonzero(kl > args.kl)
    if not len(above):
        return [float("nan")] * len(MEASURES)
    ends = slice(above[0] - 1, above[0] + 1)
    return [np.interp(args.kl, kl[ends], row[ends]) for row in rows]

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("seeds", type=int, nargs="*", default=[*range(9)], metavar="seed", help="default: 0 .. 8")
    add("--steps", type=int, default=40, help="default: %(default)s")
    add("--every", type=int, default=4, help="steps between two looks; default: %(default)s")
    add("--kl", type=float, default=0.02, help="where to compare; default: %(default)s")
    add("--kl-coef", type=float, default=0.05, help="of both forms; default: %(default)s")
    args = parser.parse_args()
    results = {form: [] for form in FORMS}
    for seed, form in itertools.product(args.seeds, FORMS):
        started = time.perf_counter()
        results[form].append(measure(form, seed, args))
        print(f"seed {seed}  {form:12}", *[f"{value:.4f}" for value in results[form][-1]],
              f"in {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    values = np.array([*results.values()])  # [form, seed, measure]
    values = values[:, np.isfinite(values).all((0, 2))]  # only seeds where all forms got so far
    print(f"{values.shape[1]} of {len(args.seeds)} seeds passed a KL of {args.kl} with each form\n")
    print("| KL |", " | ".join(MEASURES), "|\n" + "|---" * (len(MEASURES) + 1) + "|")
    for form, rows in zip(FORMS, values):
        spreads = rows.std(0, ddof=1)
        cells = [f"| {mean:.4f} ± {std:.4f}" for mean, std in zip(rows.mean(0), spreads)]
        print("|", form, *cells, "|")

if __name__ == "__main__":
    main()
