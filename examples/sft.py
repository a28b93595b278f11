"""Supervised fine-tuning (SFT) of GLM-Image's AR half on a folder of your own pictures, each with a
caption beside it: fox.png, fox.txt. GRPO can follow, without its KL to the model before SFT:

    python -m examples.sft my_pictures --model zai-org/GLM-Image --out runs/mine
    python grpo.py --model zai-org/GLM-Image --adapter runs/mine/adapter_00100 --kl-coef 0
    python -m examples.sft my_pictures --resume runs/mine    # goes on with a run

The folder comes first, then flags of grpo.py, of which --prompts, --reward, --group-size,
--num-iterations, --clip-range and --kl-coef have no effect. A run goes on with the pictures and
captions of its prompts.txt, whatever else is in the folder then.
"""
from examples import read_flags, start

def add_flags(add):
    add("folder", help="of pictures: .png, .jpg or .webp")

if __name__ == "__main__":
    ARGS = read_flags(__doc__, add_flags, and_more=True)

import random, time
from pathlib import Path

import torch
from diffusers.utils import load_image
from PIL import ImageOps

import grpo
from examples.edit import encode_images

def read_captions(folder):
    """-> the captions, as Prompts whose targets are the pictures, sorted by their names."""
    captions = []
    for path in grpo.attempt("the folder of pictures", lambda: sorted(Path(folder).iterdir())):
        if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp"):
            file = path.with_suffix(".txt")
            text = grpo.attempt(f"{path} needs a caption", file.read_text, "utf-8-sig")
            captions.append(grpo.Prompt(text, path))
    if len(captions) < 2:  # at least one is held out
        raise grpo.BadInput(f"{folder}: must have two pictures or more, .png, .jpg or .webp")
    return captions

def encode_pictures(pipe, captions, width, height):
    """Their pictures, cropped about the middle and resized -> codes [N, T]: the draft's, then the
    large grid's. The draft is the same picture, resized, as in FlashAR (arXiv 2605.09430). How
    GLM-Image's authors make theirs is not published."""
    # Ask the processor for the size of the draft, in codes. It does not depend on the text.
    batch = pipe.processor(text=[""], target_h=height, target_w=width, return_tensors="pt")
    _, h, w = batch.image_grid_thw[1].tolist()  # row 0 is the large grid's

    def draw():
        for path in [caption.target for caption in captions]:
            picture = ImageOps.fit(grpo.attempt(path, load_image, path), (width, height))
            yield picture.resize((32 * w, 32 * h))
            yield picture

    # The image processor would resize small or large pictures, and change the number of codes.
    codes = [grid.flatten() for grid in encode_images(pipe, draw(), resize=False)]
    return torch.cat(codes).view(len(captions), -1)

class SFTTrainer(grpo.GRPOTrainer):
    """The loss is minus the mean log-prob of the pictures' codes [N, T]. LoRA, optimizer, files and
    --resume are those of GRPOTrainer. The first tenth of the pictures is held out."""
    def __init__(self, config, wrapper, captions, codes):
        # The name is what config.json has as the reward: `grpo.py --resume` refuses the run.
        super().__init__(config, wrapper, captions, rewards={"sft": (None, 1)})
        self.codes = codes
        n = max(1, len(codes) // 10)
        self.held_out_rows = torch.arange(n)
        self.trained_rows = torch.arange(n, len(codes))

    def compute_loss(self, rows):
        """-> the mean loss of these pictures. It adds up gradients, too, where they are on."""
        total = 0.0
        for part in rows.split(self.config.micro_batch_size):
            captions = [self.prompts[row] for row in part.tolist()]
            batch = grpo.Rollout(captions, self.codes[part], logprobs=None, allowed=None)
            logprobs, _ = self.wrapper.compute_logprobs(batch)  # [B, T]
            loss = -logprobs.mean() * len(part) / len(rows)  # the last part may be smaller
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        return total

    def train(self):
        self.start()
        started = time.perf_counter()
        for step in range(self.step + 1, self.config.steps + 1):
            lr = self.config.lr * min(1, step / max(1, self.config.warmup_steps))
            self.optimizer.param_groups[0]["lr"] = lr
            places, _ = grpo.choose_prompts(step, len(self.trained_rows), self.config)
            self.optimizer.zero_grad()  # drops those of an interrupted step
            loss = self.compute_loss(self.trained_rows[places])
            grad_norm = self.update_weights()
            seconds = time.perf_counter() - started  # with the saving of the last step
            started = time.perf_counter()
            self.log(step, dict(loss=loss, grad_norm=grad_norm, lr=lr, seconds=seconds))
            self.save(step)

    def save(self, step):
        """Also prints the held-out loss, as often as pictures are drawn."""
        if step % self.config.save_every == 0 or step == self.config.steps:
            with torch.no_grad():
                loss = self.compute_loss(self.held_out_rows)
            print(f"after {step} steps: held-out loss {loss:.4g}", flush=True)
        super().save(step)

def main(args):
    # The model itself is fitted, so its logits are not divided by a temperature.
    config = grpo.parse_args(["--temperature=1", *args.flags])
    own = Path(config.resume or "", "prompts.txt")
    if config.resume and own.exists():
        captions = grpo.load_prompts(own)
    else:
        captions = read_captions(args.folder)
        random.Random(config.seed).shuffle(captions)  # as the first of them are held out
    Wrapper = grpo.import_name(config.wrapper) if config.wrapper else grpo.GLMImageWrapper
    wrapper = Wrapper.from_pretrained(config.model, config)
    codes = encode_pictures(wrapper.pipe, captions, config.width, config.height)
    SFTTrainer(config, wrapper, captions, codes).train()

if __name__ == "__main__":
    start(main, ARGS)
