"""Supervised fine-tuning (SFT) of GLM-Image's AR half on a folder of your own pictures, each with a
text beside it: fox.png, fox.txt. GRPO can follow, without its KL to the model before SFT:

    python -m examples.sft my_pictures --model zai-org/GLM-Image --out runs/mine
    python grpo.py --model zai-org/GLM-Image --adapter runs/mine/adapter_00100 --kl-coef 0
    python -m examples.sft my_pictures --resume runs/mine    # goes on with a run

This program uses one GPU and takes grpo.py's flags, of which --prompts, --reward, --group-size,
--num-iterations, --clip-range and --kl-coef have no effect.
"""
import json, os, random, re, sys, time, unicodedata
from pathlib import Path

import torch
from PIL import ImageOps

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.edit import encode_images

ENDINGS = ".png", ".jpg", ".jpeg", ".webp"
REWARD = "SFTTrainer"  # what config.json has as the reward, so that grpo.py refuses the run

# --- Pictures, captions and codes ---------------------------------------------
def nfc(name):
    """macOS writes é in a name as two characters, e and an accent, other systems as one."""
    return unicodedata.normalize("NFC", name)

def find_pictures(folder):
    """-> their paths, sorted by name. Names that begin with a dot are the system's own."""
    names = sorted(grpo.attempt(folder, os.listdir, folder))
    files = [Path(folder, name) for name in names if not name.startswith(".")]
    paths = [path for path in files if path.suffix.lower() in ENDINGS and not path.is_dir()]
    stems = [nfc(path.stem) for path in paths]
    others = []
    for path in files:
        if path.suffix == ".txt" and nfc(path.stem) not in stems:
            raise grpo.BadInput(f"{path}: there is no picture beside it; {ENDINGS} are read")
        if path.is_dir():
            others.append(f"the folder {path.name}")
        elif path.suffix != ".txt" and path not in paths:
            others.append(path.suffix or path.name)
    for name in map(os.path.abspath, paths):  # which prompts.txt, a text in UTF-8, will have
        if re.search(r"[\n\r\ud800-\udfff]", name):
            raise grpo.BadInput(f"{name!r}: rename it, as it is not in UTF-8 or has a line break")
    if len(paths) < 2:  # at least one is held out
        raise grpo.BadInput(f"{folder}: needs two pictures or more, and has {len(paths)}")
    if others:
        print(f"{folder}: not read: {', '.join(sorted(set(others)))}", file=sys.stderr)
    return paths

def read_captions(pictures):
    """-> {picture: its caption}, which becomes one line, as a prompt is."""
    captions = {}
    wrong = []
    texts = {nfc(path.stem): path for path in pictures[0].parent.glob("*.txt")}
    for picture in pictures:
        path = texts.get(nfc(picture.stem))
        if not path:
            wrong.append(f"{picture.name} has no {picture.stem}.txt")
            continue
        captions[picture] = " ".join(grpo.attempt(path, path.read_text, "utf-8-sig").split())
        if not captions[picture]:
            wrong.append(f"{path.name} is empty")
        if captions[picture].startswith("#"):  # in prompts.txt
            wrong.append(f"{path.name} begins with #, as a comment does")
    if wrong:
        raise grpo.BadInput(f"{pictures[0].parent}: a picture needs a caption beside it, and "
                            f"{', '.join(wrong[:5])}")
    return captions

def restore_order(run, captions):
    """-> the pictures in the order in which the run began with them. If some were new or missing,
    others would be held out, which it has trained on. Pictures are known by their names, so that
    their folder may be moved."""
    if json.loads((run / "config.json").read_bytes())["reward"] != REWARD:
        raise grpo.BadInput(f"--resume {run}: is no run of sft.py; `grpo.py --resume` goes on")
    text = grpo.attempt("--resume", (run / "prompts.txt").read_text, "utf-8-sig")
    before = {}
    for line in text.rstrip("\n").split("\n"):
        caption, _, picture = line.partition("\t")
        before[nfc(Path(picture).name)] = caption
    now = {nfc(picture.name): picture for picture in captions}
    changes = [f"{name} is new" for name in now if name not in before]
    changes += [f"{name} is missing" for name in before if name not in now]
    changes += [f"{name} has another caption" for name, picture in now.items()
                if before.get(name, captions[picture]) != captions[picture]]
    if changes:
        raise grpo.BadInput(f"--resume {run}: a run keeps its pictures and captions, and "
                            f"{', '.join(changes[:5])}")
    return [now[name] for name in before]

def load_pictures(folder, config):
    """-> captions, pictures, cropped about the middle and resized, and their paths."""
    paths = find_pictures(folder)
    captions = read_captions(paths)
    run = Path(config.resume or "")
    if config.resume and (run / "config.json").exists():  # or else --out is equal, and it begins
        paths = restore_order(run, captions)
    else:
        random.Random(config.seed).shuffle(paths)  # as the first of them are held out
    size = (config.width, config.height)
    pictures = [ImageOps.fit(grpo.attempt(path, grpo.open_image, path), size) for path in paths]
    return [captions[path] for path in paths], pictures, paths

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

# --- The trainer --------------------------------------------------------------
class SFTTrainer(grpo.GRPOTrainer):
    """The loss is minus the mean log-prob of the codes [N, T]. LoRA, optimizer, files and --resume
    are those of GRPOTrainer. The first tenth of the pictures is held out. `paths` are those of the
    pictures, for prompts.txt."""
    def __init__(self, config, wrapper, captions, codes, paths):
        super().__init__(config, wrapper, captions, {}, paths)  # no rewards
        self.changes["reward"] = REWARD
        self.codes = codes
        n = max(1, len(codes) // 10)
        self.held_out_rows = torch.arange(n)
        self.trained_rows = torch.arange(n, len(codes))

    def compute_losses(self, rows):
        """Yields the loss of each micro-batch times its share, so that their sum is the mean."""
        for part in rows.split(self.config.micro_batch_size):
            captions = [self.prompts[row] for row in part.tolist()]
            batch = grpo.Rollout(captions, self.codes[part], logprobs=None, allowed=None)
            logprobs, _ = self.wrapper.compute_logprobs(batch)  # [B, T]
            yield -logprobs.mean() * len(part) / len(rows)

    def train(self):
        self.start()
        started = time.perf_counter()
        for step in range(self.step + 1, self.config.steps + 1):
            lr = self.config.lr * min(1, step / max(1, self.config.warmup_steps))
            self.optimizer.param_groups[0]["lr"] = lr
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
        """Also prints the held-out loss. Samples are of the first 8 captions: the held-out ones,
        then others."""
        loss = sum(self.compute_losses(self.held_out_rows))
        print(f"after {step} steps: held-out loss {loss:.4g}", flush=True)
        super().save_samples(step)

def main():
    folder, *flags = sys.argv[1:] or ["--help"]
    if {"-h", "--help"} & {folder, *flags}:
        print(__doc__)  # before the flags
        grpo.parse_args(["--help"])
    trainer = None
    try:
        if folder.startswith("-") or grpo.WORLD_SIZE > 1:
            raise grpo.BadInput("type the folder of pictures, then flags; it uses one GPU")
        # The model itself is fitted, so its logits are not divided by a temperature.
        config = grpo.parse_args(flags, temperature=1.0)
        if config.wrapper:
            raise grpo.BadInput(f"--wrapper {config.wrapper}: sft.py trains GLM-Image only")
        captions, pictures, paths = load_pictures(folder, config)
        wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
        codes = encode_pictures(wrapper.pipe, pictures)
        trainer = SFTTrainer(config, wrapper, captions, codes, paths)
        trainer.train()
    except (grpo.BadInput, KeyboardInterrupt) as error:
        stopped = isinstance(error, KeyboardInterrupt)
        line = "Stopped." if stopped else f"sft.py: error: {' '.join(str(error).split())}"
        if trainer and trainer.how:
            line += f"\nTo go on: python -m examples.sft '{folder}' --resume '{trainer.out}'"
        print(line, file=sys.stderr)
        sys.exit(1 if stopped else 2)

if __name__ == "__main__":
    main()
