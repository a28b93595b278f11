"""Tests of examples/sft.py, which learns the codes of pictures."""
from pathlib import Path

import pytest, torch
import torch.nn.functional as F
from PIL import Image

import grpo
from conftest import have_same_weights, perturb
from examples import sft
from examples.make import mosaics, tiny
TEXTS = ["a red fox", "yellow", "a blue door and a white wall", "green", "black"]

def make_pipe():
    """The small GLM-Image with random weights, always the same, which sees eight colors."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS)
    tiny.fit_vision(pipe, mosaics.PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    return pipe

def make_trainer(out):
    """64 wide and 128 high; the codes are random; the first of five pictures is held out."""
    own = dict(width=64, height=128, temperature=1.0, batch_size=2, micro_batch_size=4, steps=4, out=str(out))
    config = grpo.Config(**tiny.SETTINGS | own)
    codes = torch.randint(8, (5, 12), generator=torch.Generator().manual_seed(1))
    return sft.SFTTrainer(config, grpo.GLMImageWrapper(make_pipe(), config), TEXTS, codes)

def draw(path, *rows, turns=0, **settings):
    """Saves a picture, 64 pixels wide, with rows of color words, each 64 pixels high, and its caption."""
    path.parent.mkdir(exist_ok=True)
    pixels = torch.stack([torch.stack([grpo.COLORS[name] for name in row.split()]) for row in rows])
    image = Image.fromarray((255 * pixels).byte().numpy()).resize((64, 64 * len(rows)), Image.NEAREST)
    image.rotate(90 * turns, expand=True).save(path, **settings)
    path.with_suffix(".txt").write_text(f"\ufeffa {path.stem}\r\n\tthing\n", encoding="utf-8")

def test_codes_are_the_drafts_then_the_large_grids(tmp_path):
    """Of a picture that is turned upright and cropped. The image processor would enlarge a tall one's draft."""
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter of a turn
    draw(tmp_path / "fox.JPG", "black white", "red blue", "green red", "white black", turns=1, quality=100,
         subsampling=0, exif=turned)
    draw(tmp_path / "owl.png", "blue", "blue")
    captions = sft.read_captions(tmp_path)
    assert captions == ["a fox thing", "a owl thing"]  # one line each, as in prompts.txt
    pipe = make_pipe()
    pipe.processor.image_processor.size = dict(shortest_edge=512**2, longest_edge=2048**2)
    codes, other = sft.encode_pictures(pipe, captions, 64, 128)
    draft, large = codes[:-8].view(22, 11), codes[-8:].view(4, 2)  # as large as GLM-Image's
    red, green, blue = map([*grpo.COLORS].index, ("red", "green", "blue"))
    assert large.tolist() == [[red, blue]] * 2 + [[green, red]] * 2 and other.eq(blue).all()
    for corner, code in ((draft[:10, :5], red), (draft[:10, -5:], blue), (draft[-10:, :5], green)):
        assert corner.eq(code).all()

def test_loss_is_the_cross_entropy_by_hand(tmp_path, small_draft):
    """Of the codes alone, each predicted by the place before it; a micro-batch counts by its pictures."""
    trainer = make_trainer(tmp_path / "run")
    perturb(trainer.lora)
    by_hand = []
    for text, codes in zip(TEXTS[1:], trainer.codes[1:].split(1)):  # one at a time: no padding
        ids, mask, position_ids = trainer.wrapper.encode([text])
        logits = trainer.wrapper.forward(torch.cat([ids, codes], 1), mask, position_ids, mask.shape[1])
        by_hand.append(F.cross_entropy(logits[0, ids.shape[1] - 1:-1], codes[0]).item())
    for trainer.config.micro_batch_size in (1, 3, 4):
        assert trainer.compute_loss(torch.arange(1, 5)) == pytest.approx(sum(by_hand) / 4, abs=1e-5)

def test_a_run_goes_on_with_its_own_pictures(tmp_path, run, refuse, small_draft):
    """Bit for bit, in the order of its prompts.txt, whatever else is in the folder. grpo.py refuses to go on."""
    for name in [*grpo.COLORS][:5]:
        draw(tmp_path / f"mine/{name}.png", name)
    make_pipe().save_pretrained("seeing")
    flags = "--model seeing --width 32 --height 64 --batch-size 2 --micro-batch-size 4 --lr 1e-2 --save-every 9"
    for typed in ("--steps 4 --out one", "--steps 2 --out half"):
        assert run("sft", f"mine {flags} {typed}")[0] == 0
    draw(tmp_path / "mine/a.png", "white")
    assert run("sft", "mine --resume half --steps 4")[0] == 0
    assert have_same_weights("one", "half") and "white" not in Path("half/prompts.txt").read_text()
    assert '"temperature": 1.0' in Path("half/config.json").read_text()  # the model itself is fitted
    assert run("generate", "half --prompt red --samples 1")[0] == 0
    assert "sft()" in refuse("grpo", "--resume half --steps 9")
    Path("bare").mkdir()
    Path("bare/a.png").touch()
    assert "a.png needs a caption" in refuse("sft", "bare")
