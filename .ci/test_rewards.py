"""Tests of examples/rewards.py, and of what docs/rewards.md says of it; and of examples/make/letters.py, whose model
learns to spell by what RapidOCR reads, and by nothing else. No network, no GPU."""
import inspect, io, re, string

import pytest, skimage.data, torch, transformers
import numpy as np
from PIL import Image, ImageDraw, ImageFont

import grpo
from conftest import ROOT, table
from examples import judge, rewards as gallery
from examples.make import letters

PAGE = (ROOT / "docs/rewards.md").read_text()
PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]

def test_the_table_names_all_rewards():
    """A reward that is not in the table would not be found, and one that is only there would not be known."""
    found = {name for module in (gallery, judge) for name, value in vars(module).items() if inspect.isfunction(value)
             and [*inspect.signature(value).parameters] == ["images", "prompts", "targets"]}
    assert {row[0] for row in table(PAGE, "| reward | what it needs |")} == found
    assert found <= {*re.findall(r"\w+", gallery.__doc__)}

def test_ocr_table():
    """A letter amiss costs a little, another word nearly all, no word everything."""
    for prompt, text, score in [*table(PAGE, "| the prompt quotes |"), ('"LATE" and "OPEN"', "OPEN / LATE", "1.00")]:
        phrase = prompt or phrase
        image = Image.new("RGB", (512, 512), "white")
        for line, place in zip(text.replace("*nothing*", "").split(" / "), [(60, 200), (180, 380)]):
            ImageDraw.Draw(image).text(place, line, "black", ImageFont.load_default(size=60))
        measured, = gallery.ocr([image], [phrase])
        assert f"{measured:.2f}" == score, (phrase, text)

def test_phrases():
    """Two apostrophes make a phrase for the pipeline alone. Without any phrase the score is 0, and that is told."""
    with pytest.warns(UserWarning, match="^GLM-Image takes apostrophes for quotes"):
        assert gallery.find_phrases('the dog\'s bowl under the cat\'s sign "OPEN"') == ["OPEN"]
    assert gallery.find_phrases('an owner’s sign “OPEN”, a cat’s 「早」') == ["OPEN", "早"]
    assert gallery.find_phrases("it says 'OPEN' and 'LATE'") == ["OPEN", "LATE"]
    with pytest.warns(UserWarning, match="ocr returns 0, because this prompt quotes no words: "):
        assert gallery.ocr(PAIR, ["a fox", 'nothing: ""']) == [0, 0]

def test_letters_are_matched():
    """Case, spaces and forms of Unicode are no mistakes, and a long text is compared as a short one is."""
    assert gallery.match_letters("café No. 7", "CAFE\u0301\nＮｏ．７") == 1
    assert gallery.match_letters("ab" * 200, "x" + "ab" * 200) == pytest.approx(800 / 801)

def test_ssim_as_published():
    """IPOL's imdiff, as scikit-image's own tests quote it (its pull request 4913, comment 700653165)."""
    camera = skimage.data.camera()
    noisy = np.clip(camera + 20 * np.random.RandomState(5).randn(512, 512), 0, 255).astype(np.uint8)
    first, second = [Image.fromarray(array).convert("RGB") for array in (camera, noisy)]
    pairs = [first, first.resize((700, 700))], ["", ""], [second, first]
    assert gallery.ssim(*pairs) == pytest.approx([0.357959, 1], abs=1e-3)

def test_the_other_rewards_by_hand(monkeypatch):
    """A stand-in for LPIPS, whose weights are not here; of the others the bytes and the edges are counted. It is the
    target that is resized, as the image is judged."""
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

def test_the_small_model(run, monkeypatch):
    """Its command makes a model that grpo.py trains without other flags. The policy reads single letters. Its pictures
    depend on the tokens alone: a painter that knows the word could paint that, and no policy would learn."""
    monkeypatch.setattr(letters.tiny, "minimize", lambda *args: None)  # weights stay random
    assert run("make.letters", "--out model")[0] == 0
    assert run("grpo", "--model model --out run --steps 1 --batch-size 2 --group-size 2")[0] == 0
    wrapper = grpo.GLMImageWrapper.from_pretrained("model", grpo.parse_args(["--model", "model"]))
    prompts = letters.make_prompts("cat queen")
    names = wrapper.pipe.processor.tokenizer.convert_ids_to_tokens(wrapper.encode(prompts)[0].flatten())
    assert [name for name in names if name in letters.ALPHABET] == list("cat__queen")
    tokens = torch.randint(1, 28, (1, 245 + 5)).repeat(2, 1)  # a draft of 7 x 35, and a word
    first, second = wrapper.decode(prompts, tokens, [1, 1])
    assert first == second != wrapper.decode(['"CAT"', '"QUEEN"'], tokens, [1, 1])[0]

def test_reward_is_what_the_network_reads():
    """A reward that knew more than the picture would teach no writing."""
    images = [Image.new("RGB", (32 * letters.SIZE, 32), "white") for _ in range(4)]
    for image, word in zip(images, ("CAT", "CUT", "QUEEN", "")):
        for i, letter in enumerate(word):
            image.paste(letters.draw_letter(letter), (32 * i, 0))  # as the small model draws
    assert [letters.read(image) for image in images] == ["CAT", "CUT", "QUEEN", ""]
    assert letters.spelling(images, letters.make_prompts("cat cat cat cat")) == pytest.approx([1, 4 / 6, 0, 0])
