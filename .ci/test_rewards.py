"""Tests of examples/rewards.py, and of what docs/rewards.md says of it; and of examples/make/letters.py, whose model
learns to spell by what RapidOCR reads, and by nothing else. No network, no GPU."""
import base64, io, json, logging, re, string, sys, types, urllib.request
from pathlib import Path

import pytest, torch, transformers
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import grpo
from conftest import ROOT, table
from examples import edit, rewards as gallery
from examples.make import letters

PAGE = (ROOT / "docs/rewards.md").read_text()
PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]

def test_the_table_names_all_rewards(run):
    """A reward that is not in the table would not be found, and one that is only there would not be known."""
    told = {row[0] for row in table(PAGE, "| reward | what it needs |")}
    _, listed, _ = run("rewards")
    assert told == set(re.findall(r"^(\w+) +(?<=^.{13})\S", listed, re.MULTILINE))

def test_ocr_table(reads, caplog, monkeypatch):
    """A letter amiss costs a little, another word nearly all, no word everything; and the log is quiet."""
    monkeypatch.setattr(logging.getLogger("RapidOCR"), "propagate", True)
    rows = table(PAGE, "| the prompt quotes | drawn")
    for prompt, text, score in [*rows, ('"LATE" and "OPEN"', "OPEN / LATE", "1.00")]:  # phrases in any order
        phrase = prompt or phrase
        image = Image.new("RGB", (512, 512), "white")
        for line, place in zip(text.replace("*nothing*", "").split(" / "), [(60, 200), (180, 380)]):
            ImageDraw.Draw(image).text(place, line, "black", ImageFont.load_default(size=60))
        measured, = gallery.ocr([image], [phrase])
        assert f"{measured:.2f}" == score, (phrase, text)
    assert not caplog.records

def test_ocr_without_quotes(monkeypatch):
    """It gives 0, says so, and needs no package for it."""
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.warns(UserWarning, match="ocr returns 0, because this prompt quotes no words: "):
        assert gallery.ocr(PAIR, ["a fox", 'nothing: ""']) == [0, 0]

@pytest.mark.parametrize("prompt, phrases, warns", [
    ('the dog\'s bowl under the cat\'s sign "OPEN"', ["OPEN"], True),
    ('an owner’s sign “OPEN”, a cat’s 「早」', ["OPEN", "早"], False),
    ("it says 'OPEN' and 'LATE'", ["OPEN", "LATE"], False), ("a fox", [], False)])
def test_apostrophes_are_no_quotes(prompt, phrases, warns, recwarn):
    """Two apostrophes made a phrase of their own, so that the right words scored 0.3."""
    assert gallery.find_phrases(prompt) == phrases
    assert [str(warning.message)[:27] for warning in recwarn] == ["GLM-Image takes apostrophes"] * warns

@pytest.mark.parametrize("wanted, seen, score", [
    ("OPEN", " o P\nEN ", 1), ("OPEN", "OPEM", 2 * 3 / 8), ("OPEN", "", 0), ("café", "cafe\u0301", 1),
    ("No. 7", "Ｎｏ．７", 1), ("ab" * 200, "x" + "ab" * 200, 800 / 801)])
def test_letters_are_matched(wanted, seen, score):
    """Case, spaces and forms of Unicode are no mistakes, and a long text is compared as a short one is."""
    assert gallery.match_letters(wanted, seen) == pytest.approx(score)

def test_ssim_as_published():
    """IPOL's imdiff, as scikit-image's own tests quote it (its pull request 4913, comment 700653165)."""
    camera = pytest.importorskip("skimage.data", reason="pip install scikit-image").camera()
    noisy = np.clip(camera + 20 * np.random.RandomState(5).randn(512, 512), 0, 255).astype(np.uint8)
    first, second = [Image.fromarray(array).convert("RGB") for array in (camera, noisy)]
    scores = gallery.ssim([first, first.resize((700, 700))], ["", ""], [second, first])
    assert scores == pytest.approx([0.357959, 1], abs=1e-3)

def test_the_other_rewards_by_hand(monkeypatch):
    """A stand-in for LPIPS, whose weights are not here; of the others the bytes and the edges are counted."""
    black, white = [Image.new("RGB", (8, 8), color) for color in ("black", "white")]
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), np.uint8))
    monkeypatch.setattr(gallery, "load_lpips", lambda: lambda x, y, normalize: normalize * (x - y).abs().mean())
    assert gallery.lpips([black, white], ["", ""], [white.resize((30, 20)), white]) == [-1, 0]
    file = io.BytesIO()
    noisy.save(file, "JPEG", quality=95)
    assert gallery.jpeg([noisy], [""]) == pytest.approx([1 - file.tell() / (3 * 20 * 24)])
    half = black.copy()
    half.paste(white, (4, 0))  # of 7 steps to the right one is an edge
    assert gallery.sharpness([black, half], ["", ""], []) == pytest.approx([0, 1 / 7])
    assert gallery.even([half, white], ["black", "a white, not a red one"]) == pytest.approx([0.5, 1])

@pytest.mark.parametrize("module, reward, packages", [
    ("rapidocr", "ocr", "rapidocr onnxruntime"), ("skimage.metrics", "ssim", "scikit-image"),
    ("lpips", "lpips", "lpips -r requirements.txt")])
def test_a_missing_package_is_one_line(monkeypatch, module, reward, packages):
    """It says what to install, without the traceback of the import."""
    monkeypatch.setitem(sys.modules, module, None)
    gallery.load_reader.cache_clear()
    with pytest.raises(gallery.BadInput, match=f"this reward needs pip install {packages}") as caught:
        getattr(gallery, reward)(PAIR[:1], ['"A"'], PAIR[1:])
    assert caught.value.__suppress_context__ and "\n" not in str(caught.value)

def test_clip_and_aesthetic_by_hand(monkeypatch, tmp_path):
    """A softmax, a logit scale, another prompt's padding, or layers in another order would show."""
    torch.manual_seed(0)
    half = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.CLIPConfig(
        text_config=dict(half, vocab_size=99, bos_token_id=0, eos_token_id=1, pad_token_id=1),
        vision_config=dict(half, image_size=32, patch_size=16), projection_dim=16)
    letters = [c + end for c in string.ascii_lowercase for end in ("", "</w>")]
    words = {word: i for i, word in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.CLIPProcessor(images, transformers.CLIPTokenizer(vocab=words, merges=[]))
    model = transformers.CLIPModel(config).eval().requires_grad_(False)
    head = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1)).requires_grad_(False)
    torch.save(head.state_dict(), tmp_path / "head.pth")
    monkeypatch.setattr(gallery, "load_clip", lambda name, own: (model, processor))
    monkeypatch.setattr(gallery, "HEAD", str(tmp_path / "head.pth"))
    prompts = ["a red fox on a long long wall", "blue"]
    cosines, marks, scores, choices = [
        getattr(gallery, name)(PAIR, prompts) for name in ("clip", "aesthetic", "aesthetic_z", "pickscore")]
    assert torch.allclose(choices, model.logit_scale.exp() * cosines) and model.logit_scale > 2
    assert torch.allclose(scores, (marks - marks.mean()) / marks.std(), atol=1e-2)
    pixels = processor(images=PAIR, return_tensors="pt").pixel_values
    a = torch.nn.functional.normalize(model.get_image_features(pixels).pooler_output)
    alone = [processor(text=prompt, return_tensors="pt") for prompt in prompts]
    b = torch.nn.functional.normalize(torch.cat([model.get_text_features(**inputs).pooler_output for inputs in alone]))
    assert torch.allclose(cosines, (a * b).sum(1), atol=1e-5)
    assert torch.allclose(marks, head(a)[:, 0], atol=1e-5)

# --- Rewards that ask a server ------------------------------------------------------------------------------
def paint(*greens):
    return [Image.new("RGB", (16, 8), (90, int(green), 50)) for green in greens]

@pytest.fixture
def model(monkeypatch):
    """In place of a server's vision-language model: model.answer(text, greens of the pictures), and model.asked."""
    def urlopen(request, timeout):
        body = json.loads(request.data)
        assert (request.full_url, body["model"]) == ("http://server/v1/chat/completions", "any")
        text, *pictures = body["messages"][0]["content"]
        files = [base64.b64decode(picture["image_url"]["url"].split(",")[1]) for picture in pictures]
        greens = [Image.open(io.BytesIO(file)).getpixel((0, 0))[1] for file in files]
        model.asked.append((text["text"].split(": ")[1], *greens))
        said = {"choices": [{"message": {"content": model.answer(text["text"], greens)}}]}
        return io.BytesIO(json.dumps(said).encode())

    model = types.SimpleNamespace(asked=[], answer=lambda text, greens: "1")
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("JUDGE_URL", "http://server")
    monkeypatch.setenv("JUDGE_MODEL", "any")
    return model

def test_judge_asks_and_reads(model):
    """The picture and the prompt must arrive; an answer without a number is 0, and does not end a run."""
    model.answer = lambda text, greens: {0: "8", 10: "I'd say 6.5 of 10", 20: None}[greens[0]]
    with pytest.warns(UserWarning, match="no number in the answer ''"):
        assert gallery.judge(paint(0, 10, 20), ["a {fox}", "an owl", "x"]) == [8.0, 6.5, 0.0]
    answer = "? Answer with one number, 0 (no) to 10 (yes)."
    assert sorted(model.asked) == [("a {fox}" + answer, 0), ("an owl" + answer, 10), ("x" + answer, 20)]

def test_compare_by_hand(model):
    """A picture was compared with those of another prompt, or its place among the two decided. What cannot be read
    is a tie."""
    model.answer = lambda text, greens: f"Picture {1 + greens.index(max(greens))}."
    assert gallery.compare(paint(10, 30, 20, 200, 220, 220), "aaabbb") == [0, 1, 0.5, 0, 0.75, 0.75]
    assert len(model.asked) == 3 * 2 + 2  # equal pictures tie, and an equal question is asked once
    for two_prompts in ("ab", [edit.Edit("a", "x.png"), edit.Edit("a", "y.png")]):
        assert gallery.compare(paint(1, 2), two_prompts) == [0.5, 0.5] and len(model.asked) == 8
    model.answer = lambda text, greens: "1"  # it prefers what it sees first
    assert gallery.compare(paint(10, 30, 20), "aaa") == [0.5] * 3
    model.answer = lambda text, greens: dict(a="1 and 2", b="about 12", c=None)[text.split(": ")[1][0]]
    with pytest.warns(UserWarning, match="for a tie: ") as warned:
        assert gallery.compare(paint(*range(6)), "aabbcc") == [0.5] * 6
    assert len(warned) == 6

@pytest.mark.parametrize("name", ["judge", "compare"])
def test_a_server_that_is_down(name, model):
    """It ended in a traceback. The trial of grpo.py finds it before a model is loaded, with a single call."""
    trial = {name: (getattr(gallery, name), 1.0)}, ["a fox"] * 8, [None] * 8, grpo.Config()
    grpo.try_rewards(*trial)
    assert len(model.asked) == 1
    model.answer = lambda text, greens: 1 / 0
    with pytest.raises(gallery.BadInput, match="JUDGE_URL=http://server JUDGE_MODEL=any: division by zero"):
        grpo.try_rewards(*trial)

# --- Does a reward agree with a person? ---------------------------------------------------------------------
@pytest.fixture
def choices(tmp_path):
    """Someone chose the greenest of each of 40 groups of four pictures, in every other one all of them in order."""
    Path(tmp_path, "choices").mkdir()
    rows = [dict(prompt="all alike", pictures=["0.png", "1.png"], order=[])]
    for i, greens in enumerate(np.random.default_rng(0).permutation(256)[:160].reshape(40, 4)):
        for green, image in zip(greens, paint(*greens)):
            image.save(tmp_path / f"choices/{green}.png")
        names, order = [[f"{green}.png" for green in some] for some in (greens, sorted(greens, reverse=True))]
        rows.append(dict(prompt=f"prompt {i}", pictures=names, order=order[:1 + i % 2 * 2]))
    lines = [json.dumps(row) + "\n" for row in rows]
    Path(tmp_path, "choices.jsonl").write_text("".join(lines))
    return lines

def test_agreement_with_a_person(run, choices):
    """Pairs were counted the wrong way round, or among those that nobody put in order; an interval was too narrow."""
    Path("greens.py").write_text("""
import random
def green(images, *_): return [image.getpixel((0, 0))[1] for image in images]
def half(images, *_): return [value // 128 for value in green(images)]
def pink(images, *_): return [-value for value in green(images)]
def moody(images, prompts, _): return (pink if random.Random(prompts[0]).random() < 0.5 else green)(images)
""")
    rewards = ",".join([f"greens.py:{name}" for name in "green=0 pink half moody".split()])
    _, out, _ = run("rewards", f"choices.jsonl --reward {rewards},sharpness")
    assert "40 groups, 180 pairs of a better and a worse picture" in out  # 20 x 3 + 20 x 6
    rows = {name: rest.split() for name, rest in re.findall(r"^(\w+) +([-\d].*)$", out, re.MULTILINE)}
    for name, told in dict(green="1.00 1.00 .. 1.00 0%", pink="0.00 0.00 .. 0.00 0%", sharpness="- - 100%").items():
        assert rows[name] == told.split()
    assert rows["half"][0] == "1.00" and 10 < int(rows["half"][4][:-1]) < 50
    share, low, _, high, ties = rows["moody"]  # all pairs of a group agree or none: they are no 180 observations
    assert low < "0.50" < high and low < share < high and float(high) - float(low) > 0.25 and ties == "0%"

@pytest.mark.parametrize("text, why", [  # {0} and {1} are lines of a good file; nothing is chosen in {0}
    ("{0}", "chosen over"), ("{1}", "a target"), ("{0}\n", "choices.jsonl, line 2: "),
    ("{1}", "choices/89.png"), ("{1}", "choices.jsonl: [Errno 2]")])
def test_wrong_choices(refuse, choices, text, why):
    Path("choices.jsonl").write_text(text.format(*choices))
    Path(why.split(":")[0]).unlink(missing_ok=True)
    assert why in refuse("rewards", "choices.jsonl --reward ssim")

# --- The model that learns to spell -------------------------------------------------------------------------
@pytest.fixture
def wrapper():
    """The models with random weights."""
    torch.manual_seed(0)
    return grpo.GLMImageWrapper(letters.make_models(), grpo.Config(**letters.make_settings(Path("."))))

def spell(*words):
    """The tokens of these words, after a draft of 7 x 35 zeros."""
    rows = [[letters.ALPHABET.index(letter) for letter in word.ljust(letters.SIZE, "_")] for word in words]
    return torch.tensor([[0] * 245 + row for row in rows])

def test_policy_reads_the_letters(wrapper):
    """A tokenizer that knows no word but single letters would hand the policy an unknown word."""
    ids, _, _ = wrapper.encode(letters.make_prompts("cat queen"))
    names = wrapper.pipe.processor.tokenizer.convert_ids_to_tokens(ids.flatten())
    assert [name for name in names if name in letters.ALPHABET] == list("cat__queen")
    rollout = grpo.Rollout(letters.make_prompts("cat cab"), spell("cat", "cat"), None, None)
    a, b = wrapper.compute_logprobs(rollout)[0]
    assert (a - b).abs().max() > 1e-3

def test_pictures_depend_on_tokens_only(wrapper):
    """A painter that is told the word could paint it whatever the tokens are: no policy would learn."""
    prompts = letters.make_prompts("cat queen")
    cat, queen = wrapper.decode(prompts, spell("moon", "moon"), [1, 1])
    assert cat.tobytes() == queen.tobytes()
    other, _ = wrapper.decode(prompts, spell("corn", "moon"), [1, 1])
    assert other.tobytes() != cat.tobytes()
    cat, queen = wrapper.decode(['"CAT"', '"QUEEN"'], spell("moon", "moon"), [1, 1])  # it is told quoted words
    assert cat.tobytes() != queen.tobytes()

def test_reward_is_what_the_network_reads(reads, monkeypatch):
    """A reward that knew more than the picture, the tokens or the prompt alone, would teach no writing."""
    images = [Image.new("RGB", (32 * letters.SIZE, 32), "white") for _ in range(4)]
    for image, word in zip(images, ("CAT", "CUT", "QUEEN", "")):
        for i, letter in enumerate(word):
            image.paste(letters.draw_letter(letter), (32 * i, 0))  # as the small model draws
    prompts = letters.make_prompts("cat cat cat cat")
    assert [letters.read(image) for image in images] == ["CAT", "CUT", "QUEEN", ""]
    assert letters.spelling(images, prompts) == pytest.approx([1, 4 / 6, 0, 0])
    monkeypatch.setattr(letters, "read", lambda image: "ca")
    assert letters.spelling(images, prompts) == pytest.approx([4 / 5] * 4)
