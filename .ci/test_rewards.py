"""Tests of examples/rewards.py, and of what docs/rewards.md says of it; and of examples/make/letters.py, whose model
learns to spell by what RapidOCR reads, and by nothing else. No network, no GPU."""
import io, logging, re, string, sys
from pathlib import Path

import pytest, skimage.data, torch, transformers
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import grpo
from conftest import ROOT, table
from examples import rewards as gallery
from examples.make import letters

PAGE = (ROOT / "docs/rewards.md").read_text()
PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]

def test_the_table_names_all_rewards(run):
    """A reward that is not in the table would not be found, and one that is only there would not be known. evaluate.py
    compares the scores of several calls, which those of two rewards here do not allow."""
    told = {row[0] for row in table(PAGE, "| reward | what it needs |")}
    _, listed, _ = run("rewards")
    assert told == set(re.findall(r"^(\w+) +(?<=^.{13})\S", listed, re.MULTILINE))
    assert {name for name in told if getattr(getattr(gallery, name), "relative", False)} == {"compare", "aesthetic_z"}

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
    assert not [record for record in caplog.records if record.name == "RapidOCR"]

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
    camera = skimage.data.camera()
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

@pytest.mark.parametrize("prompts, words, are_equal", [
    (letters.make_prompts("cat queen"), ("moon", "moon"), True),
    (letters.make_prompts("cat cat"), ("moon", "corn"), False),
    (['"CAT"', '"QUEEN"'], ("moon", "moon"), False)])  # the painter is told quoted words
def test_pictures_depend_on_tokens_only(wrapper, prompts, words, are_equal):
    """A painter that is told the word could paint it whatever the tokens are: no policy would learn."""
    first, second = wrapper.decode(prompts, spell(*words), [1, 1])
    assert (first.tobytes() == second.tobytes()) == are_equal

def test_reward_is_what_the_network_reads(reads):
    """A reward that knew more than the picture would teach no writing."""
    images = [Image.new("RGB", (32 * letters.SIZE, 32), "white") for _ in range(4)]
    for image, word in zip(images, ("CAT", "CUT", "QUEEN", "")):
        for i, letter in enumerate(word):
            image.paste(letters.draw_letter(letter), (32 * i, 0))  # as the small model draws
    prompts = letters.make_prompts("cat cat cat cat")
    assert [letters.read(image) for image in images] == ["CAT", "CUT", "QUEEN", ""]
    assert letters.spelling(images, prompts) == pytest.approx([1, 4 / 6, 0, 0])
