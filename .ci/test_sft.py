"""Tests of examples/sft.py, which learns the codes of pictures: identities mostly, and what its command refuses."""
import os, re, subprocess, sys
from pathlib import Path

import pytest, torch
import torch.nn.functional as F
from PIL import Image

import grpo
from conftest import ROOT, perturb
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
    own = dict(width=64, height=128, temperature=1.0, batch_size=4, steps=2, micro_batch_size=4, model="small")
    config = grpo.Config(**tiny.SETTINGS | own | settings, out=str(out))
    wrapper = grpo.GLMImageWrapper(make_pipe(), config)
    codes = torch.randint(8, (5, 12), generator=torch.Generator().manual_seed(1))
    return sft.SFTTrainer(config, wrapper, TEXTS, codes, paths=None)

def draw(*names):
    """A picture of squares of 32 x 32 pixels in these colours, one below another."""
    pixels = (255 * torch.stack([grpo.COLORS[name] for name in names])).byte().numpy()[:, None]
    return Image.fromarray(pixels).resize((32, 32 * len(names)), Image.NEAREST)

@pytest.mark.parametrize("draft", [(2, 3), None], ids=["2 x 3", "GLM-Image's"])
def test_codes_are_the_drafts_then_the_large_grids(draft):
    """In the other order, or with a draft of another shape, the model would learn to paint what it should sketch. The
    image processor would enlarge a tall picture's draft, here as in GLM-Image."""
    pipe = make_pipe(draft)
    pipe.processor.image_processor.size = dict(shortest_edge=512**2, longest_edge=2048**2)
    tall = draw("red", "green").resize((64, 128), Image.NEAREST)
    codes, other = sft.encode_pictures(pipe, [tall, draw("blue", "blue").resize((64, 128))])
    _, h, w = pipe.processor(text=[""], target_h=128, target_w=64).image_grid_thw[1].tolist()
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
    """Stretched, a fox would be taught as a broad one; without EXIF's turn, a portrait would lie on its side. A caption
    is one line, or no prompt."""
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter of a turn
    draw("red", "white", "green").rotate(90, expand=True).save(tmp_path / "fox.JPG", quality=95, exif=turned)
    (tmp_path / "fox.txt").write_text("\ufeffa fox\r\n\tin snow\u2028\n", encoding="utf-8")
    draw("red", "white", "green").save(tmp_path / "e\u0301.png")  # as macOS writes its name
    (tmp_path / "\u00e9.txt").write_text("an owl")
    captions, pictures, paths = sft.load_pictures(tmp_path, grpo.Config(width=64, height=64))
    assert {*captions} == {"a fox in snow", "an owl"}  # one line each, as in prompts.txt
    for text, picture in zip(captions, pictures):
        edge, middle, _ = (picture.getpixel((32, y)) for y in (2, 32, 61))
        assert min(middle) > 240 and min(edge) > 240, text  # what was red and green is cut off
    (tmp_path / "config.json").write_text('{"reward": "SFTTrainer"}')  # the names of a run that began on another system
    (tmp_path / "prompts.txt").write_text("an owl\t/gone/\u00e9.png\na fox in snow\t/gone/fox.JPG\n", encoding="utf-8")
    assert sft.restore_order(tmp_path, sft.read_captions(sorted(paths)[::-1])) == sorted(paths)

def test_loss_is_the_cross_entropy_by_hand(tmp_path):
    """A loss that is shifted by a token, or that counts the prompt, still falls. With micro-batches of three and one,
    the mean of two means would count the last picture three times."""
    trainer = make_trainer(tmp_path / "run")
    perturb(trainer.lora)
    by_hand = []
    for i in range(1, 5):  # one at a time: no padding
        ids, mask, position_ids = trainer.wrapper.encode([TEXTS[i]])
        codes = trainer.codes[i:i + 1]
        with torch.no_grad():
            logits = trainer.wrapper.forward(torch.cat([ids, codes], 1), mask, position_ids, mask.shape[1])
        by_hand.append(F.cross_entropy(logits[0, ids.shape[1] - 1:-1], codes[0]).item())
    gradients = []
    for trainer.config.micro_batch_size in (1, 3, 4):
        trainer.optimizer.zero_grad()
        loss = sum(trainer.compute_losses(torch.arange(1, 5)))
        loss.backward()
        assert loss.item() == pytest.approx(sum(by_hand) / 4, abs=1e-5)
        gradients.append(torch.cat([weight.grad.flatten() for weight in trainer.lora.weights.values()]))
    assert all(torch.allclose(gradients[0], other, atol=1e-5) for other in gradients) and gradients[0].any()

def test_held_out_pictures_are_not_trained(tmp_path):
    """Other codes of theirs change what is printed, and not one weight."""
    runs = [make_trainer(tmp_path / name, steps=4, batch_size=2) for name in "ab"]
    runs[1].codes[0] = (runs[1].codes[0] + 1) % 8
    assert runs[0].held_out_rows.tolist() == [0] and runs[0].trained_rows.tolist() == [1, 2, 3, 4]
    for run in runs:
        run.train()
    weights, others = [[*run.lora.weights.values()] for run in runs]
    assert all(map(torch.equal, weights, others)) and all(weight.any() for weight in weights)

@pytest.fixture
def folder(tmp_path, run):
    """Five pictures of different colours, and a model that sees."""
    make_pipe().save_pretrained("seeing")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in NAMES[:5]:
        draw(name, name).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text(f"a {name} thing")
    return folder

def refuse(run, monkeypatch, typed):
    """The first line of what a command says. No model may be asked for, and no file written."""
    files = {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", None)
    code, _, error = run("sft", typed)
    assert {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")} == files
    assert code == 2 and error.splitlines()[-1].startswith("sft.py: error: ") and "Traceback" not in error
    return error.splitlines()[0]

FLAGS = "--model seeing --width 32 --height 64 --batch-size 2 --micro-batch-size 4 --lr 1e-2 --save-every 9"

def test_a_run_keeps_its_pictures(folder, run, monkeypatch):
    """Were one more in the folder, what was trained would be held out (sleap-nn#600). The folder may move, though."""
    assert run("sft", f"pictures {FLAGS} --steps 4 --out one")[0] == 0
    assert run("sft", f"pictures {FLAGS} --steps 2 --out half")[0] == 0
    before = Path("half/prompts.txt").read_text()
    assert sorted(before.splitlines()) == sorted(f"a {name} thing\t{folder}/{name}.png" for name in NAMES[:5])
    moved = folder.rename("moved")
    assert run("sft", "moved --resume half --steps 4")[0] == 0
    assert Path("half/prompts.txt").read_text() == before.replace(str(folder), str(moved.absolute()))
    states = [torch.load(f"{out}/checkpoint.pt") for out in ("one", "half")]
    rows, again = [[row | dict(seconds=0) for row in state["history"]] for state in states]
    assert rows == again and len(rows) == 4
    assert all(torch.equal(weight, states[1]["adapter"][name]) for name, weight in states[0]["adapter"].items())
    captions, _, _ = sft.load_pictures(moved, grpo.Config(resume="half", seed=7))  # a seed that is typed anew
    assert captions == re.findall("^.*(?=\t)", before, re.MULTILINE)
    (moved / "red.txt").write_text("a ruby")
    for ending in ("png", "txt"):
        (moved / f"blue.{ending}").rename(moved / f"azure.{ending}")
    told = refuse(run, monkeypatch, "moved --resume half --steps 6")
    assert told.endswith("azure.png is new, blue.png is missing, red.png has another caption")

def test_no_run_of_another_trainer(folder, run, monkeypatch, capsys):
    """grpo.py would go on with a reward of its own (transformers#18070), sft.py with a run of grpo.py."""
    run("sft", f"pictures {FLAGS} --steps 1 --out run")
    files = {path: path.read_bytes() for path in Path("run").rglob("*.*")}
    for flags, told in ([], "--reward SFTTrainer: "), (["--reward=color"], "SFTTrainer"):
        with pytest.raises(SystemExit, match="2"):
            grpo.main(["--resume", "run", *flags])
        assert told in capsys.readouterr().err.splitlines()[-1]
        assert files == {path: path.read_bytes() for path in Path("run").rglob("*.*")}
    Path("run/config.json").write_text(Path("run/config.json").read_text().replace("SFTTrainer", "color"))
    assert "is no run of sft.py" in refuse(run, monkeypatch, "pictures --resume run")

@pytest.mark.parametrize("name, text, typed, told", [
    (None, "", "--out x", "type the folder of pictures"), (None, "", "gone", "gone: [Errno 2]"),
    (None, "", f"{ROOT}/README.md", "[Errno 20]"), (None, "", f"{ROOT}/.github", "needs two pictures or more"),
    (None, "", "pictures --out .", ": must be a new folder"), (None, "", "pictures --width 100", "multiples of 32"),
    (None, "", f"pictures --wrapper {ROOT}/examples/toy.py:Toy", "sft.py trains GLM-Image only"),
    ("red.png", "cut", "pictures", "red.png: "), ("a.txt", "a", "pictures", "a.txt: there is no picture beside it"),
    ("red.txt", "# red", "pictures", "red.txt begins with #"), ("red.txt", "\n", "pictures", "and red.txt is empty"),
    ("red.txt", None, "pictures", "and red.txt is missing"), ("a\nb.png", "", "pictures", "a\\nb.png': rename it"),
    ("caf\udce9.png", "", "pictures", "caf\\udce9.png': rename it")])  # a zip from Windows; prompts.txt is UTF-8
def test_bad_input_is_one_line(folder, run, monkeypatch, name, text, typed, told):
    """Before a model is loaded, which may take minutes."""
    if name:
        (folder / name).write_text(text or "")
    if text is None:
        (folder / name).unlink()
    assert told in refuse(run, monkeypatch, typed)

def test_what_is_not_read_is_named(folder, run, monkeypatch):
    """A folder of photos from a phone would be trained on a tenth of them, in silence."""
    for name in ("d.heic", "e.heic", "f.gif", "._red.png", "README", "red.txt"):
        (folder / name).write_bytes(b"")
    (folder / "more").mkdir()
    assert refuse(run, monkeypatch, "pictures").endswith("pictures: not read: .gif, .heic, README, the folder more")

def test_whatever_is_called_examples(tmp_path):
    """Without __init__.py, an installed package of this name is imported in the place of the folder (pyro2#140)."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/__init__.py").write_text("")
    code = "from importlib.util import find_spec as f; print(f('examples.edit').origin, f('examples.make.tiny').origin)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | dict(PYTHONPATH=str(tmp_path)))
    assert done.stdout.split() == [f"{ROOT}/examples/edit.py", f"{ROOT}/examples/make/tiny.py"], done.stderr
