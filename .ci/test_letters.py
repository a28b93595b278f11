"""Tests of examples/make/letters.py: a model learns to spell by what RapidOCR reads, and by nothing else."""
import string
from pathlib import Path

import pytest, torch
from PIL import Image

import grpo
from examples.make import letters

@pytest.fixture
def wrapper():
    """The models with random weights."""
    torch.manual_seed(0)
    return grpo.GLMImageWrapper(letters.make_models(), grpo.Config(**letters.make_settings(Path("."))))

def spell(*words):
    """The tokens of these words, after a draft of 7 x 35 zeros."""
    rows = [[letters.ALPHABET.index(letter) for letter in word.ljust(letters.SIZE, "_")] for word in words]
    return torch.tensor([[0] * 245 + row for row in rows])

def test_words():
    """A held-out word that is also trained, or a word too long to be drawn, would make the table wrong."""
    trained = letters.WORDS.split()
    kept_out = letters.KEPT_OUT.split()
    assert (len(trained), len(kept_out), len({*trained, *kept_out})) == (65, 24, 65 + 24)  # as the page says
    assert set("".join(trained)) == set(string.ascii_lowercase) >= set("".join(kept_out))
    assert max(map(len, trained + kept_out)) <= letters.SIZE

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
