"""Tests of examples/sft.py, which learns the codes of pictures: identities mostly, and what its command refuses."""
from importlib.machinery import PathFinder
from pathlib import Path
from unittest import mock

import pytest, torch
import torch.nn.functional as F
from PIL import Image

import grpo
from conftest import ROOT, have_same_weights, perturb
from examples import sft
from examples.make import mosaics, tiny

NAMES = list(grpo.COLORS)
TEXTS = ["a red fox", "yellow", "a blue door and a white wall", "green", "black"]

def make_pipe(draft=(2, 2)):
    """The small GLM-Image with random weights, always the same, which sees eight colours. A small draft is quick."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS)
    torch.nn.init.ones_(pipe.vision_language_encoder.model.language_model.norm.weight)
    tiny.fit_vision(pipe, mosaics.PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    if draft:
        pipe.processor._get_target_shape = lambda height, width: (height // 32, width // 32, *draft)
    return pipe

def make_trainer(out, **settings):
    """64 wide and 128 high; the codes are random; the first of five pictures is held out."""
    own = dict(width=64, height=128, temperature=1.0, batch_size=4, micro_batch_size=4, model=str(grpo.TINY_MODEL))
    config = grpo.Config(**tiny.SETTINGS | own | settings, out=str(out))
    codes = torch.randint(8, (5, 12), generator=torch.Generator().manual_seed(1))
    return sft.SFTTrainer(config, grpo.GLMImageWrapper(make_pipe(), config), TEXTS, codes, paths=None)

def draw(*names):
    """A picture of squares of 64 x 64 pixels in these colours, one below another."""
    pixels = (255 * torch.stack([grpo.COLORS[name] for name in names])).byte().numpy()[:, None]
    return Image.fromarray(pixels).resize((64, 64 * len(names)), Image.NEAREST)

@pytest.mark.parametrize("draft", [(2, 3), None], ids=["2 x 3", "GLM-Image's"])
def test_codes_are_the_drafts_then_the_large_grids(draft):
    """In the other order, or with a draft of another shape, the model would learn to paint what it should sketch. The
    image processor would enlarge a tall picture's draft, here as in GLM-Image."""
    pipe = make_pipe(draft)
    pipe.processor.image_processor.size = dict(shortest_edge=512**2, longest_edge=2048**2)
    codes, other = sft.encode_pictures(pipe, [draw("red", "green"), draw("blue", "blue")])
    h, w = draft or (22, 11)
    small, large = codes[:h * w].view(h, w), codes[h * w:].view(4, 2)
    red, green, blue = map(NAMES.index, ("red", "green", "blue"))
    assert large.tolist() == [[red] * 2] * 2 + [[green] * 2] * 2 and other.eq(blue).all()
    assert small[0].eq(red).all() and small[-1].eq(green).all()

def test_pictures_are_cropped_and_turned(tmp_path):
    """Stretched, a fox would be taught as a broad one; without EXIF's turn, a portrait would lie on its side. A caption
    is one line, or no prompt."""
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter of a turn
    draw("red", "white", "green").rotate(90, expand=True).save(tmp_path / "fox.JPG", quality=95, exif=turned)
    (tmp_path / "fox.txt").write_text("\ufeffa fox\r\n\tin snow\u2028\n", encoding="utf-8")
    draw("red", "white", "green").save(tmp_path / "e\u0301.png")  # as macOS writes its name
    (tmp_path / "\u00e9.txt").write_text("an owl")
    captions, pictures, _ = sft.load_pictures(tmp_path, grpo.Config(width=64, height=128))
    assert {*captions} == {"a fox in snow", "an owl"}  # one line each, as in prompts.txt
    for picture in pictures:
        red, white = picture.getpixel((32, 10)), picture.getpixel((32, 38))  # half of the red is cut off
        assert red[0] > 240 > 15 > red[1] and min(white) > 240

def test_loss_is_the_cross_entropy_by_hand(tmp_path):
    """A loss that is shifted by a token, or that counts the prompt, still falls. With micro-batches of three and one,
    the mean of two means would count the last picture three times."""
    trainer = make_trainer(tmp_path / "run")
    perturb(trainer.lora)
    by_hand = []
    for text, codes in zip(TEXTS[1:], trainer.codes[1:].split(1)):  # one at a time: no padding
        ids, mask, position_ids = trainer.wrapper.encode([text])
        with torch.no_grad():
            logits = trainer.wrapper.forward(torch.cat([ids, codes], 1), mask, position_ids, mask.shape[1])
        by_hand.append(F.cross_entropy(logits[0, ids.shape[1] - 1:-1], codes[0]).item())
    for trainer.config.micro_batch_size in (1, 3, 4):
        loss = sum(trainer.compute_losses(torch.arange(1, 5)))
        assert loss.item() == pytest.approx(sum(by_hand) / 4, abs=1e-5)

def test_held_out_pictures_are_not_trained(tmp_path):
    """Other codes of theirs change what is printed, and not one weight."""
    runs = [make_trainer(tmp_path / name, steps=4, batch_size=2) for name in "ab"]
    runs[1].codes[0] = (runs[1].codes[0] + 1) % 8
    for run in runs:
        run.train()
    weights, others = [[*run.lora.weights.values()] for run in runs]
    assert all(map(torch.equal, weights, others)) and all(weight.any() for weight in weights)

@pytest.fixture
def folder(tmp_path, run):
    """Five pictures of different colours, where `run` is."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in NAMES[:5]:
        draw(name, name).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a {name} thing")
    (tmp_path / "alone").mkdir()
    draw("red").save(tmp_path / "alone/red.png")
    return folder

def test_a_run_keeps_its_pictures(folder, run, refuse):
    """Were one more in the folder, what was trained would be held out (sleap-nn#600). The folder may move, though."""
    make_pipe().save_pretrained("seeing")
    flags = "--model seeing --width 32 --height 64 --batch-size 2 --micro-batch-size 4 --lr 1e-2 --save-every 9"
    for typed in ("--steps 4 --out one", "--steps 2 --out half"):
        assert run("sft", f"pictures {flags} {typed}")[0] == 0
    before = Path("half/prompts.txt").read_text()
    assert f"a red thing\t{folder}/red.png" in before.splitlines()
    moved = folder.rename("moved")
    assert run("sft", "moved --resume half --steps 4")[0] == 0
    assert Path("half/prompts.txt").read_text() == before.replace(str(folder), str(moved.absolute()))
    assert have_same_weights("one", "half")
    captions, _, _ = sft.load_pictures(moved, grpo.Config(resume="half", seed=7))  # a seed that is typed anew
    assert captions == [line.split("\t")[0] for line in before.splitlines()]
    (moved / "red.txt").write_text("a ruby")
    for ending in ("png", "txt"):
        (moved / f"blue.{ending}").rename(moved / f"azure.{ending}")
    told = refuse("sft", "moved --resume half --steps 6")
    assert told.endswith("azure.png is new, blue.png is missing, red.png has another caption\n")

def test_the_learning_rate_is_the_one_that_is_typed(tmp_path):
    """A new --lr stood in config.json, and had no effect; nor had the warm-up, ever."""
    for settings, rate in ((dict(steps=1, lr=1e-2, warmup_steps=4), 1e-2 / 4),
                           (dict(steps=2, lr=1e-3, resume=str(tmp_path / "run")), 1e-3)):
        trainer = make_trainer(tmp_path / "run", **settings)
        trainer.train()
        assert trainer.optimizer.param_groups[0]["lr"] == rate

def test_ctrl_c_says_how_to_go_on(folder, run, monkeypatch):
    """It ended in a traceback, and the trainer's own line names grpo.py, which refuses the run."""
    make_pipe().save_pretrained("seeing")
    monkeypatch.setattr(grpo.GRPOTrainer, "update_weights", mock.Mock(side_effect=KeyboardInterrupt))
    code, _, error = run("sft", "pictures --model seeing --width 32 --height 64 --out run")
    assert code == 1
    assert error.splitlines()[-2:] == [
        "Stopped.", f"To go on: python -m examples.sft 'pictures' --resume '{Path('run').absolute()}'"]

def test_no_run_of_another_trainer(folder, refuse, run):
    """grpo.py would go on with a reward of its own (transformers#18070), sft.py with a run of grpo.py."""
    make_trainer("run", steps=1).train()
    assert "SFTTrainer" in refuse("grpo", "--resume run")
    assert "SFTTrainer" in run("grpo", "--resume run --reward color")[2].splitlines()[-1]  # the model is loaded first
    Path("run/config.json").write_text(Path("run/config.json").read_text().replace("SFTTrainer", "color"))
    assert "is no run of sft.py" in refuse("sft", "pictures --resume run")

@pytest.mark.parametrize("name, text, typed, told", [
    ("red.txt", "a fox", "--out x", "type the folder of pictures"), ("red.txt", "a fox", "gone", "gone: [Errno 2]"),
    ("red.txt", "a fox", "alone", "needs two pictures or more"), ("red.png", "cut", "pictures", "red.png: "),
    ("red.txt", "a fox", f"pictures --wrapper {ROOT}/examples/toy.py:Toy", "sft.py trains GLM-Image only"),
    ("a.txt", "a fox", "pictures", "a.txt: there is no picture beside it"),
    ("a.png", "", "pictures", "and a.png has no a.txt"), ("red.txt", "\n", "pictures", "and red.txt is empty"),
    ("red.txt", "# red", "pictures", "red.txt begins with #"), ("a\nb.png", "", "pictures", "a\\nb.png': rename it"),
    ("caf\udce9.png", "", "pictures", "caf\\udce9.png': rename it")])  # a zip from Windows; prompts.txt is UTF-8
def test_bad_input_is_one_line(folder, refuse, name, text, typed, told):
    (folder / name).write_text(text)
    assert told in refuse("sft", typed)

def test_what_is_not_read_is_named(folder, run):
    """A folder of photos from a phone would be trained on a tenth of them, in silence."""
    for name in ("d.heic", "e.heic", "f.gif", "._red.png", "README", "red.txt"):
        (folder / name).write_bytes(b"")
    (folder / "more").mkdir()
    error = run("sft", "pictures")[2]
    assert "pictures: not read: .gif, .heic, README, the folder more\n" in error
    assert error.endswith("and red.txt is empty\n")  # what begins with a dot is the system's own

def test_whatever_is_called_examples(tmp_path):
    """Without __init__.py, an installed package of this name is imported in the place of the folder (pyro2#140)."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/__init__.py").touch()
    assert PathFinder.find_spec("examples", [str(ROOT), str(tmp_path)]).origin == f"{ROOT}/examples/__init__.py"
