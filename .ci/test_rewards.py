"""Tests of examples/rewards.py, and of what docs/rewards.md says of it. No network, no GPU."""
import io, re, string

import pytest, torch, transformers
from PIL import Image, ImageDraw, ImageFont

import grpo
from conftest import ROOT, table
from examples import rewards as gallery

PAGE = (ROOT / "docs/rewards.md").read_text()
PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]

def test_ocr_table():
    """A letter amiss costs a little, another word nearly all, no word everything."""
    for prompt, text, score in [*table(PAGE, "| the prompt quotes |"), ('"LATE" and "OPEN"', "OPEN / LATE", "1.00")]:
        phrase = prompt or phrase
        image = Image.new("RGB", (512, 512), "white")
        for line, place in zip(text.replace("*nothing*", "").split(" / "), [(60, 200), (180, 380)]):
            ImageDraw.Draw(image).text(place, line, "black", ImageFont.load_default(size=60))
        measured, = gallery.ocr([image], [phrase])
        assert f"{measured:.2f}" == score, (phrase, text)

def test_variety_of_the_page():
    """The images of a group are compared with each other alone, also where a prompt comes twice in a step."""
    page = {}
    exec(re.search(r"```python\n(import numpy as np\n\ndef variety.*?)```", PAGE, re.DOTALL)[1], page)
    images = [Image.new("RGB", (8, 4), (red, 9, 9)) for red in (0, 0, 255, 51, 102, 153)]
    first, second = grpo.Prompt("a fox"), grpo.Prompt("a fox")
    scores = page["variety"](images, [first] * 3 + [second] * 3, [None] * 6)
    assert scores == pytest.approx([1 / 6, 1 / 6, 1 / 3, 0.1, 0.2 / 3, 0.1])

def test_phrases():
    """Two apostrophes make a phrase for the pipeline alone. Without any phrase the score is 0, and that is told."""
    with pytest.warns(UserWarning, match="^GLM-Image takes apostrophes for quotes"):
        assert gallery.find_phrases('the dog\'s bowl under the cat\'s sign "OPEN"') == ["OPEN"]
    assert gallery.find_phrases('an owner’s sign “OPEN”, a cat’s 「早」') == ["OPEN", "早"]
    assert gallery.find_phrases("it says 'OPEN' and 'LATE'") == ["OPEN", "LATE"]
    with pytest.warns(UserWarning, match="ocr returns 0, because this prompt quotes no words: "):
        assert gallery.ocr(PAIR, ["a fox", 'nothing: ""']) == [0, 0]

def test_the_other_rewards_by_hand(monkeypatch):
    """A stand-in for LPIPS, whose weights are not here. It is the target that is resized, as the image is judged."""
    black, white = [Image.new("RGB", (8, 8), color) for color in ("black", "white")]
    monkeypatch.setattr(gallery, "load_lpips", lambda: lambda x, y, normalize: normalize * (x - y).abs().mean())
    assert gallery.lpips([black, white], ["", ""], [white.resize((30, 20)), white]) == [-1, 0]
    file = io.BytesIO()
    PAIR[0].save(file, "JPEG", quality=95)
    assert gallery.jpeg(PAIR[:1], [""]) == pytest.approx([1 - file.tell() / (3 * 64 * 40)])
    half = black.copy()
    half.paste(white, (4, 0))  # of 7 steps to the right one is an edge
    assert gallery.sharpness([black, half], ["", ""], []) == pytest.approx([0, 1 / 7])
    assert gallery.even([half, white], ["black", "a white, not a red one"]) == pytest.approx([0.5, 1])
    gray = Image.new("RGB", (3, 3), (51, 51, 51))
    errors = gallery.mse([half] * 3, [""] * 3, [half, black.resize((1, 1)), gray])
    assert errors.tolist() == pytest.approx([0, -0.5, -(0.8**2 + 0.2**2) / 2])
    assert gallery.ssim(PAIR, ["", ""], [PAIR[0].resize((9, 9)), PAIR[0]]) == pytest.approx([1, 1 / 3], abs=1e-3)
    with pytest.raises(grpo.BadInput, match="needs a target for every prompt"):
        gallery.mse([half] * 2, [""] * 2, [half, None])

def test_clip_and_aesthetic_by_hand(monkeypatch, tmp_path):
    """A softmax, a logit scale, another prompt's padding, or layers in another order would show."""
    half = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    model = transformers.CLIPModel(transformers.CLIPConfig(
        text_config=dict(half, vocab_size=99, bos_token_id=0, eos_token_id=1, pad_token_id=1),
        vision_config=dict(half, image_size=32, patch_size=16), projection_dim=16)).eval().requires_grad_(False)
    words = ["<|startoftext|>", "<|endoftext|>", *[c + end for c in string.ascii_lowercase for end in ("", "</w>")]]
    processor = transformers.CLIPProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        transformers.CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    head = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1))
    torch.save(head.state_dict(), tmp_path / "head.pth")
    monkeypatch.setattr(gallery, "load_clip", lambda *names: (model, processor))
    monkeypatch.setattr(gallery, "HEAD", str(tmp_path / "head.pth"))
    prompts = ["a red fox on a long long wall", "blue"]
    cosines, marks, choices = [reward(PAIR, prompts) for reward in (gallery.clip, gallery.aesthetic, gallery.pickscore)]
    assert torch.allclose(choices, model.logit_scale.exp() * cosines) and model.logit_scale > 2
    a = model.get_image_features(processor(images=PAIR, return_tensors="pt").pixel_values).pooler_output
    texts = [processor(text=prompt, return_tensors="pt") for prompt in prompts]
    b = torch.cat([model.get_text_features(**alone).pooler_output for alone in texts])
    assert torch.allclose(cosines, torch.cosine_similarity(a, b), atol=1e-5)
    assert torch.allclose(marks, head(torch.nn.functional.normalize(a))[:, 0], atol=1e-5)
