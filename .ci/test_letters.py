"""Tests of examples/make/letters.py: a model learns to spell by what RapidOCR reads, and by nothing else. No network."""
import socket
from pathlib import Path

import pytest, torch
from PIL import Image

for package in ("rapidocr", "onnxruntime"):
    pytest.importorskip(package, reason="pip install rapidocr onnxruntime")

import grpo
from examples.make import letters

@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing that a test reads may come from the network."""
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)

def make_wrapper():
    """The models with random weights."""
    torch.manual_seed(0)
    return grpo.GLMImageWrapper(letters.make_models(), grpo.Config(**letters.make_settings(Path("."))))

def spell(*words):
    """The tokens of these words, after a draft of 7 x 35 zeros."""
    rows = [[letters.ALPHABET.index(letter) for letter in word.ljust(letters.SIZE, "_")] for word in words]
    return torch.tensor([[0] * 245 + row for row in rows])

def draw_squares(word):
    """As the small model draws: one letter per square."""
    image = Image.new("RGB", (32 * letters.SIZE, 32), "white")
    for i, letter in enumerate(word.upper()):
        image.paste(letters.draw_letter(letter), (32 * i, 0))
    return image

def test_words():
    """A held-out word that is also trained, or a word too long to be drawn, would make the table wrong."""
    trained = letters.WORDS.split()
    kept_out = letters.KEPT_OUT.split()
    assert len(set(trained + kept_out)) == len(trained) + len(kept_out)
    assert len(kept_out) >= 20 and set("".join(trained)) == set(letters.ALPHABET) - set("._")
    assert max(map(len, trained + kept_out)) <= letters.SIZE
    assert "".join(trained + kept_out).islower()

def test_policy_reads_the_letters():
    """A tokenizer that knows no word but single letters would hand the policy an unknown word."""
    wrapper = make_wrapper()
    ids, _, _ = wrapper.encode(letters.make_prompts("cat queen"))
    names = wrapper.pipe.processor.tokenizer.convert_ids_to_tokens(ids.flatten())
    assert [name for name in names if name in letters.ALPHABET] == list("cat__queen")
    rollout = grpo.Rollout(letters.make_prompts("cat cab"), spell("cat", "cat"), None, None)
    a, b = wrapper.compute_logprobs(rollout)[0]
    assert (a - b).abs().max() > 1e-3

def test_pictures_depend_on_tokens_only():
    """A painter that is told the word could paint it whatever the tokens are: no policy would learn. It is told quoted
    words."""
    wrapper = make_wrapper()
    prompts = letters.make_prompts("cat queen")
    cat, queen = wrapper.decode(prompts, spell("moon", "moon"), [1, 1])
    assert cat.tobytes() == queen.tobytes()
    other, _ = wrapper.decode(prompts, spell("corn", "moon"), [1, 1])
    assert other.tobytes() != cat.tobytes()
    cat, queen = wrapper.decode(['"CAT"', '"QUEEN"'], spell("moon", "moon"), [1, 1])
    assert cat.tobytes() != queen.tobytes()

def test_reward_is_what_the_network_reads(monkeypatch):
    """A reward that knew more than the picture, the tokens or the prompt alone, would teach no writing."""
    images = [draw_squares(word) for word in ("CAT", "CUT", "QUEEN", "")]
    prompts = letters.make_prompts("cat cat cat cat")
    assert [letters.read(image) for image in images] == ["CAT", "CUT", "QUEEN", ""]
    assert letters.spelling(images, prompts) == pytest.approx([1, 4 / 6, 0, 0])
    monkeypatch.setattr(letters, "read", lambda image: "ca")
    assert letters.spelling(images, prompts) == pytest.approx([4 / 5] * 4)
