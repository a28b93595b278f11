"""Tests of examples/sft.py, which learns the codes of pictures: identities mostly. No network, no GPU."""
import json
from pathlib import Path

import pytest, torch
import torch.nn.functional as F
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
import grpo
from conftest import perturb
from examples import sft
from examples.make import mosaics, tiny

NAMES = list(grpo.COLORS)
TEXTS = ["a red fox", "yellow", "a blue door and a white wall", "green", "black"]

def make_pipe(draft=(2, 2)):
    """The small GLM-Image with random weights, always the same, which sees its eight colours. A small draft is quick."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS)
    torch.nn.init.ones_(pipe.vision_language_encoder.model.language_model.norm.weight)
    tiny.fit_vision(pipe, mosaics.PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    if draft:
        pipe.processor._get_target_shape = lambda height, width: (height // 32, width // 32, *draft)
    return pipe

def make_trainer(out, **settings):
    """64 wide and 128 high; the codes are random; the first of five pictures is held out."""
    own = dict(width=64, height=128, temperature=1.0, batch_size=4, steps=2, micro_batch_size=4, model="small")
    config = grpo.Config(**tiny.SETTINGS | own | settings, out=str(out))
    wrapper = grpo.GLMImageWrapper(make_pipe(), config)
    codes = torch.randint(8, (5, 12), generator=torch.Generator().manual_seed(1))
    return sft.SFTTrainer(config, wrapper, TEXTS, codes)

def gradient(trainer, rows):
    """The loss of these rows, and the gradient of it."""
    trainer.optimizer.zero_grad()
    total = 0.0
    for loss in trainer.compute_losses(torch.tensor(rows)):
        loss.backward()
        total += loss.item()
    return total, [weight.grad.clone() for weight in trainer.lora.weights.values()]

def draw(*names):
    """A picture of squares of 32 x 32 pixels in these colours, one below another."""
    image = Image.new("RGB", (32, 32 * len(names)))
    for i, name in enumerate(names):
        image.paste(tuple(int(255 * value) for value in grpo.COLORS[name]), (0, 32 * i, 32, 32 * i + 32))
    return image

# --- The codes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("draft", [(2, 3), None], ids=["2 x 3", "GLM-Image's"])
def test_codes_are_the_drafts_then_the_large_grids(draft):
    """In the other order, or with a draft of another shape, the model would learn to paint what it should sketch. A tall
    picture's draft is smaller than what the image processor leaves as it is, here as in GLM-Image."""
    pipe = make_pipe(draft)
    pipe.processor.image_processor.size = dict(shortest_edge=512**2, longest_edge=2048**2)
    tall = draw("red", "green").resize((64, 128), Image.NEAREST)
    codes, other = sft.encode_pictures(pipe, [tall, draw("blue", "blue").resize((64, 128))])
    grid = pipe.processor(text=[""], target_h=128, target_w=64).image_grid_thw
    _, h, w = grid[1].tolist()
    assert (h, w) == (draft or (22, 11)) and len(codes) == h * w + 8
    small, large = codes[:h * w].view(h, w), codes[h * w:].view(4, 2)
    red, green = NAMES.index("red"), NAMES.index("green")
    assert torch.equal(large, torch.tensor([[red] * 2] * 2 + [[green] * 2] * 2))
    assert set(small[0].tolist()) == {red} and set(small[-1].tolist()) == {green}
    assert set(other.tolist()) == {NAMES.index("blue")}
    _, _, position_ids = grpo.GLMImageWrapper(pipe, grpo.Config(width=64, height=128)).encode(["red"])
    rows = position_ids[1, 0, -len(codes):]
    assert rows[:h * w].unique().numel() == h and rows[h * w:].unique().numel() == 4  # the policy's grids are the same

def test_pictures_are_cropped_and_turned(tmp_path):
    """Stretched, a fox would be taught as a broad one; without EXIF's turn, a portrait would lie on its side."""
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter of a turn
    draw("red", "white", "green").rotate(90, expand=True).save(tmp_path / "fox.JPG", quality=95, exif=turned)
    (tmp_path / "fox.txt").write_text("\ufeffa fox\n", encoding="utf-8")
    draw("red", "white", "green").save(tmp_path / "owl.png")
    (tmp_path / "owl.txt").write_text("an owl")
    (tmp_path / "notes.md").write_text("neither a picture nor a text")
    for text, picture in zip(*sft.load_pictures(tmp_path, (64, 64), 0)):
        assert text in ("a fox", "an owl") and picture.size == (64, 64)
        edge, middle, _ = (picture.getpixel((32, y)) for y in (2, 32, 61))
        assert min(middle) > 240 and min(edge) > 240, text  # what was red and green is cut off

# --- The loss and its gradient --------------------------------------------------------------------------------
def test_loss_is_the_cross_entropy_by_hand(tmp_path):
    """A loss that is shifted by a token, or that counts the prompt, still falls."""
    trainer = make_trainer(tmp_path / "run")
    perturb(trainer.lora)
    loss, _ = gradient(trainer, [1, 3])
    rows = []
    for i in (1, 3):  # one at a time: no padding
        ids, mask, position_ids = trainer.wrapper.encode([TEXTS[i]])
        codes = trainer.codes[i:i + 1]
        with torch.no_grad():
            logits = trainer.wrapper.forward(torch.cat([ids, codes], 1), mask, position_ids, mask.shape[1])
        rows.append(F.cross_entropy(logits[0, ids.shape[1] - 1:-1], codes[0]).item())
    assert loss == pytest.approx(sum(rows) / 2, abs=1e-5) and rows[0] != pytest.approx(rows[1], abs=1e-3)

@pytest.mark.parametrize("size", [1, 3])
def test_gradient_does_not_depend_on_the_micro_batch(tmp_path, size):
    """Three and one: the mean of two means would count the last picture three times."""
    whole = make_trainer(tmp_path / "whole")
    parts = make_trainer(tmp_path / "parts", micro_batch_size=size)
    perturb(whole.lora)
    perturb(parts.lora)
    a, wanted = gradient(whole, [1, 2, 3, 4])
    b, found = gradient(parts, [1, 2, 3, 4])
    assert a == pytest.approx(b, abs=1e-5)
    assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(wanted, found)) and wanted[0].abs().max() > 1e-3

def test_held_out_pictures_are_not_trained(tmp_path):
    """Other codes of theirs change what is printed, and not one weight."""
    runs = [make_trainer(tmp_path / name, steps=4, batch_size=2) for name in "ab"]
    runs[1].codes = runs[1].codes.clone()
    runs[1].codes[0] = (runs[1].codes[0] + 1) % 8
    assert runs[0].held_out_rows.tolist() == [0] and runs[0].trained_rows.tolist() == [1, 2, 3, 4]
    for run in runs:
        run.train()
    for name, weight in runs[0].lora.weights.items():
        assert torch.equal(weight, runs[1].lora.weights[name])
    assert any(weight.any() for name, weight in runs[0].lora.weights.items() if "lora_B" in name)

# --- Its command ----------------------------------------------------------------------------------------------
def test_it_is_resumed(tmp_path):
    """With the held-out pictures and the order of the first run, and its adapters."""
    for name in ("one", "half"):
        make_trainer(tmp_path / name, steps=4 if name == "one" else 2).train()
    begun = torch.load(tmp_path / "half/checkpoint.pt")["history"]
    half = make_trainer(None, steps=4, resume=str(tmp_path / "half"))
    half.train()
    assert half.history[:2] == begun  # with their seconds: no step was made again
    assert json.loads((tmp_path / "half/config.json").read_text())["steps"] == 4  # other programs read it
    one, two = (torch.load(tmp_path / name / "checkpoint.pt") for name in ("one", "half"))
    assert all(torch.equal(weight, two["adapter"][name]) for name, weight in one["adapter"].items())
    assert [row["loss"] for row in one["history"]] == [row["loss"] for row in two["history"]]

def spoil(folder, name):
    """A folder of three pictures with texts, in which something is wrong."""
    for stem in "abc":
        draw("red").save(folder / f"{stem}.png")
        (folder / f"{stem}.txt").write_text("red")
    if name == "empty":
        for path in folder.iterdir():
            path.unlink()
    elif name == "cut":
        (folder / "b.png").write_bytes((folder / "b.png").read_bytes()[:70])
    elif name == "no text":
        (folder / "b.txt").write_text(" \n")
        (folder / "c.txt").write_text("")
    elif name != "whole":
        (folder / name).unlink()

@pytest.mark.parametrize("name, flags, told", [
    ("whole", "--out .", ": must be a new folder"),
    ("whole", "--width 100", "--width and --height must be multiples of 32"),
    ("empty", "", "needs two pictures or more, and has 0"), ("a.txt", "", "a.txt: [Errno 2]"),
    ("b.png", "", "b.txt: there is no picture beside it"), ("cut", "", "b.png: "),
    ("no text", "", "these texts are empty: ['b.txt', 'c.txt']")])
def test_bad_input_is_one_line(tmp_path, run, monkeypatch, name, flags, told):
    """Before a model is loaded, which may take minutes."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    spoil(folder, name)
    assert told in fail(run, monkeypatch, f"{folder} {flags}")[0]

@pytest.mark.parametrize("typed, told", [
    ("--out x", "type the folder of pictures"), ("gone", "gone: [Errno 2]"), (f"{ROOT}/README.md", "[Errno 20]")])
def test_bad_folder_is_one_line(run, monkeypatch, typed, told):
    assert told in fail(run, monkeypatch, typed)[0]

def test_endings_that_are_not_read_are_named(tmp_path, run, monkeypatch):
    """A folder of photos from a phone would be trained on a tenth of them, in silence."""
    spoil(tmp_path, "no text")
    for name in ("d.heic", "e.heic", "f.gif"):
        (tmp_path / name).write_bytes(b"")
    told, _ = fail(run, monkeypatch, str(tmp_path))
    assert told.endswith("files with these endings are not read: ['.gif', '.heic']")

def fail(run, monkeypatch, typed):
    """What the command prints; a model must not be asked for."""
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", None)
    code, _, error = run("sft", typed)
    lines = error.splitlines()
    assert code == 2 and lines[-1].startswith("sft.py: error: ")
    return lines
