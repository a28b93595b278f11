"""Supervised fine-tuning (SFT) of GLM-Image's AR half on a folder of your own pictures, each with a
text beside it: fox.png, fox.txt. GRPO can follow, without its KL to the model before SFT:

    python -m examples.sft my_pictures --model zai-org/GLM-Image --out runs/mine
    python grpo.py --model zai-org/GLM-Image --adapter runs/mine/adapter_00100 --kl-coef 0

This program uses one GPU and takes grpo.py's flags, of which --prompts, --reward, --group-size,
--num-iterations, --clip-range and --kl-coef have no effect.
"""
import os, random, sys, time
from pathlib import Path

import torch
from PIL import ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.edit import encode_images

ENDINGS = ".png", ".jpg", ".jpeg", ".webp"

def load_pictures(folder, size, seed):
    """-> texts and their pictures, cropped about the middle and resized. Pairs are shuffled."""
    files = [Path(folder, name) for name in sorted(grpo.attempt(folder, os.listdir, folder))]
    paths = [path for path in files if path.suffix.lower() in ENDINGS]
    stems = [path.stem for path in paths]
    for path in files:
        if path.suffix == ".txt" and path.stem not in stems:
            raise grpo.BadInput(f"{path}: there is no picture beside it; {ENDINGS} are read")
    if len(paths) < 2:  # at least one is held out
        raise grpo.BadInput(f"{folder}: needs two pictures or more, and has {len(paths)}")
    others = sorted({path.suffix for path in files if path not in paths} - {".txt"})
    if others:
        print(f"{folder}: files with these endings are not read: {others}", file=sys.stderr)
    random.Random(seed).shuffle(paths)  # as the first of them are held out
    captions = [path.with_suffix(".txt") for path in paths]
    texts = [grpo.attempt(path, path.read_text, "utf-8-sig").strip() for path in captions]
    empty = sorted([path.name for path, text in zip(captions, texts) if not text])
    if empty:
        raise grpo.BadInput(f"{folder}: these texts are empty: {empty}")
    pictures = [ImageOps.fit(grpo.attempt(path, grpo.open_image, path), size) for path in paths]
    return texts, pictures

def encode_pictures(pipe, pictures):
    """-> codes [N, T], the draft's, then the large grid's. The draft is the same picture, resized,
    as in FlashAR (arXiv 2605.09430). How GLM-Image's authors make theirs is not published."""
    # Ask the processor for the size of the draft, in codes. It does not depend on the text.
    batch = pipe.processor(
        text=[""], target_h=pictures[0].height, target_w=pictures[0].width, return_tensors="pt")
    _, h, w = batch.image_grid_thw[1].tolist()  # row 0 is the large grid's
    drafts = [picture.resize((32 * w, 32 * h)) for picture in pictures]
    # The image processor would resize small or large pictures, and change the number of codes.
    small = torch.stack(encode_images(pipe, drafts, resize=False))
    large = torch.stack(encode_images(pipe, pictures, resize=False))
    return torch.cat([small.flatten(1), large.flatten(1)], dim=1)

class SFTTrainer(grpo.GRPOTrainer):
    """The loss is minus the mean log-prob of the codes [N, T]. LoRA, optimizer, files and --resume
    are those of GRPOTrainer. The first tenth of the pictures is held out."""
    def __init__(self, config, wrapper, texts, codes):
        super().__init__(config, wrapper, texts, {})  # no rewards
        self.codes = codes
        n = max(1, len(codes) // 10)
        self.held_out_rows = torch.arange(n)
        self.trained_rows = torch.arange(n, len(codes))

    def compute_losses(self, rows):
        """Yields the loss of each micro-batch times its share, so that their sum is the mean."""
        for part in rows.split(self.config.micro_batch_size):
            texts = [self.prompts[row] for row in part.tolist()]
            batch = grpo.Rollout(texts, self.codes[part], logprobs=None, allowed=None)
            logprobs, _ = self.wrapper.compute_logprobs(batch)  # [B, T]
            yield -logprobs.mean() * len(part) / len(rows)

    def train(self):
        self.start()
        started = time.perf_counter()
        for step in range(len(self.history) + 1, self.config.steps + 1):
            places, _ = grpo.choose_prompts(step, len(self.trained_rows), self.config)
            metrics = self.train_step(self.trained_rows[places])
            metrics["seconds"] = time.perf_counter() - started
            started = time.perf_counter()
            self.log(step, metrics)
            self.save(step)

    def train_step(self, rows):
        self.optimizer.zero_grad()
        total = 0.0
        for loss in self.compute_losses(rows):
            loss.backward()
            total += loss.item()
        return dict(loss=total, grad_norm=self.update_weights())

    @torch.no_grad()
    def save_samples(self, step):
        """Also prints the held-out loss. Samples are of the first 8 texts, held-out ones first."""
        loss = sum(self.compute_losses(self.held_out_rows))
        print(f"after {step} steps: held-out loss {loss:.4g}", flush=True)
        super().save_samples(step)

def main():
    folder, *flags = sys.argv[1:] or ["--help"]
    if {"-h", "--help"} & {folder, *flags}:
        print(__doc__)  # before the flags
        grpo.parse_args(["--help"])
    try:
        if folder.startswith("-") or grpo.WORLD_SIZE > 1:
            raise grpo.BadInput("type the folder of pictures, then flags; it uses one GPU")
        # The model itself is fitted, so its logits are not divided by a temperature.
        config = grpo.parse_args(flags, temperature=1.0)
        texts, pictures = load_pictures(folder, (config.width, config.height), config.seed)
        wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
        SFTTrainer(config, wrapper, texts, encode_pictures(wrapper.pipe, pictures)).train()
    except grpo.BadInput as error:
        print("sft.py: error:", *str(error).split(), file=sys.stderr)  # on one line
        sys.exit(2)

if __name__ == "__main__":
    main()
