"""Trains GLM-Image's AR half on pictures of your own (SFT, supervised fine-tuning), before GRPO.

The folder has a text beside each picture: fox.png, fox.txt.

    python -m examples.sft my_pictures --out runs/mine
    python grpo.py --adapter runs/mine/adapter_00100

It takes the flags of grpo.py. Those of the reward, of GRPO and --prompts have no effect.
"""
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

import grpo
from examples.codes import encode_images

SUFFIXES = {".png", ".jpg", ".jpeg", ".webp"}
HELD_OUT = 0.1  # share of the pictures that are not trained

def load_pictures(folder, size):
    """-> texts, and their pictures, which are cropped around the centre to the shape of `size`."""
    with grpo.input_errors(folder, OSError):
        files = sorted(Path(folder).iterdir())
    paths = [path for path in files if path.suffix.lower() in SUFFIXES]
    for path in files:
        if path.suffix == ".txt" and path.stem not in {picture.stem for picture in paths}:
            raise grpo.BadInput(f"{path}: has no picture beside it, {path.stem}.png or .jpg")
    if len(paths) < 2:
        raise grpo.BadInput(f"{folder}: needs two pictures or more; one is held out")
    texts = []
    pictures = []
    for path in paths:
        with grpo.input_errors(f"{path}: needs a text beside it, {path.stem}.txt"):
            texts.append(path.with_suffix(".txt").read_text(encoding="utf-8-sig").strip())
        with grpo.input_errors(f"{path}: cannot be read"):
            picture = ImageOps.exif_transpose(Image.open(path))  # photos may lie on their side
            pictures.append(ImageOps.fit(picture.convert("RGB"), size))
    return texts, pictures

def encode_pictures(wrapper, pictures):
    """-> codes [N, T]. GLM-Image writes a draft, then the large grid: here these are the codes of
    the picture at the draft's size, then at its own. FlashAR (arXiv 2605.09430), the only other
    public trainer of this half, does the same; GLM-Image's authors have not published theirs."""
    config = wrapper.config
    processor = wrapper.pipe.processor
    # It would enlarge small pictures, such as drafts, and would then see too many codes.
    processor.image_processor.size = dict(shortest_edge=32**2, longest_edge=10**8)
    grids = processor(text=[""], target_h=config.height, target_w=config.width).image_grid_thw
    _, rows, columns = grids[1].tolist()  # of the draft
    small = [picture.resize((32 * columns, 32 * rows)) for picture in pictures]
    drafts = encode_images(wrapper.pipe, small)
    larges = encode_images(wrapper.pipe, pictures)
    parts = [torch.stack(codes).flatten(1) for codes in (drafts, larges)]
    return torch.cat(parts, 1)

class SFTTrainer(grpo.GRPOTrainer):
    """Minimizes minus the mean log-prob of the codes [N, T]. LoRA, optimizer, files and --resume
    are those of GRPOTrainer. The first pictures are held out."""
    def __init__(self, config, wrapper, texts, codes):
        super().__init__(config, wrapper, texts, rewards={})
        self.codes = codes
        self.held_out = np.arange(len(codes))[:max(1, round(HELD_OUT * len(codes)))]
        # A model is trained at temperature 1, and then sampled at a lower one: GLM-Image at 0.9.
        # To train at 0.9 would first undo that.
        self.own_temperature = wrapper.temperature
        wrapper.temperature = 1.0

    def compute_losses(self, rows):
        """Yields the loss of each micro-batch, weighted by its share: their sum is the mean."""
        size = self.config.micro_batch_size
        for start in range(0, len(rows), size):
            part = rows[start:start + size]
            texts = [self.prompts[i] for i in part]
            batch = grpo.Rollout(texts, None, self.codes[part], logprobs=None, nuclei=None)
            logprobs, _ = self.wrapper.compute_logprobs(batch)  # [B, T]
            yield -logprobs.mean() * len(part) / len(rows)

    def train(self):
        config = self.config
        n = len(self.held_out)
        if not self.history:
            self.save_samples(0)  # before training
        for step in range(len(self.history) + 1, config.steps + 1):
            started = time.perf_counter()
            places, _ = grpo.choose_prompts(step, len(self.codes) - n, config)
            loss = 0.0
            for part in self.compute_losses(n + np.array(places)):
                part.backward()
                loss += part.item()
            metrics = dict(loss=loss, grad_norm=self.update_weights())
            metrics["seconds"] = time.perf_counter() - started
            self.log(step, metrics)

    @torch.no_grad()
    def save_samples(self, step):
        """Also prints the loss of the pictures that are held out."""
        held_out = sum(loss.item() for loss in self.compute_losses(self.held_out))
        print(f"held-out loss after {step} steps: {held_out:.4g}", flush=True)
        self.wrapper.temperature = self.own_temperature
        super().save_samples(step)
        self.wrapper.temperature = 1.0

def main(folder, *flags):
    config = grpo.parse_args(flags)
    texts, pictures = load_pictures(folder, (config.width, config.height))
    grpo.check_before_loading(config, texts, None, rewards={})
    order = np.random.default_rng(config.seed).permutation(len(texts))
    wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    codes = encode_pictures(wrapper, pictures)
    SFTTrainer(config, wrapper, [texts[i] for i in order], codes[order]).train()

if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except grpo.BadInput as error:
        print("sft.py: error:", *str(error).split(), file=sys.stderr)  # on one line
        sys.exit(2)
