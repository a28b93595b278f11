"""Supervised fine-tuning (SFT) of GLM-Image's AR half on a folder of your own pictures, each with a
text beside it: fox.png, fox.txt. GRPO can follow, without its KL to the model before SFT:

    python -m examples.sft my_pictures --out runs/mine
    python grpo.py --adapter runs/mine/adapter_00100 --kl-coef 0

This program uses one GPU and takes grpo.py's flags, of which --prompts, --reward, --group-size,
--num-iterations, --clip-range and --kl-coef have no effect."""
import random, sys
from pathlib import Path
import torch
from PIL import Image, ImageOps
import grpo
from examples.codes import encode_images

def load_pictures(folder, size, seed):
    """-> texts and their pictures, cropped around the centre and resized. Pairs are shuffled."""
    with grpo.input_errors(folder, OSError):
        files = sorted(Path(folder).iterdir())
    paths = [path for path in files if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp")]
    stems = [path.stem for path in paths]
    for path in files:
        if path.suffix == ".txt" and path.stem not in stems:
            raise grpo.BadInput(f"{path}: there is no picture {path.stem}.png or .jpg beside it")
    if len(paths) < 2:  # at least one is held out
        raise grpo.BadInput(f"{folder}: needs two pictures or more, and has {len(paths)}")
    random.Random(seed).shuffle(paths)  # as the first of them are held out
    texts, pictures = [], []
    for path in paths:
        with grpo.input_errors(f"{path}, or {path.stem}.txt beside it, cannot be read"):
            texts.append(path.with_suffix(".txt").read_text(encoding="utf-8-sig").strip())
            picture = ImageOps.exif_transpose(Image.open(path))  # a photo may lie on its side
            pictures.append(ImageOps.fit(picture.convert("RGB"), size))
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
            batch = grpo.Rollout(  # `compute_logprobs` needs no more; without nuclei, no top-p
                prompts=texts, tokens=self.codes[part], images=None, logprobs=None, nuclei=None)
            logprobs, _ = self.wrapper.compute_logprobs(batch)  # [B, T]
            yield -logprobs.mean() * len(part) / len(rows)

    def train(self):
        if not self.history:
            self.save_samples(0)  # before training
        for step in range(len(self.history) + 1, self.config.steps + 1):
            places, _ = grpo.choose_prompts(step, len(self.trained_rows), self.config)
            total = 0.0
            for loss in self.compute_losses(self.trained_rows[places]):
                loss.backward()
                total += loss.item()
            grad_norm = self.update_weights()
            self.log(step, dict(loss=total, grad_norm=grad_norm))  # may call save_samples

    @torch.no_grad()
    def save_samples(self, step):
        """Also prints the held-out loss. Samples are of the first 8 texts, held-out ones first."""
        loss = sum(self.compute_losses(self.held_out_rows))
        print(f"after {step} steps: held-out loss {loss:.4g}", flush=True)
        super().save_samples(step)

if __name__ == "__main__":
    try:
        if len(sys.argv) < 2 or sys.argv[1].startswith("-") or grpo.WORLD_SIZE > 1:
            raise grpo.BadInput("type python -m examples.sft FOLDER, then flags; it uses one GPU")
        folder, *flags = sys.argv[1:]
        # The model itself is fitted, so its logits are not divided by a temperature.
        config = grpo.parse_args(flags, temperature=1.0)
        texts, pictures = load_pictures(folder, (config.width, config.height), config.seed)
        grpo.check_before_loading(config, texts, targets=None, rewards={})  # --out, --adapter
        wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
        SFTTrainer(config, wrapper, texts, encode_pictures(wrapper.pipe, pictures)).train()
    except grpo.BadInput as error:
        print("sft.py: error:", *str(error).split(), file=sys.stderr)  # on one line
        sys.exit(2)
