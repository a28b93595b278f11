"""Tests of .github/letters.md: its letters.py learns to spell, by what RapidOCR reads and by nothing else. No network."""
import json, os, re, socket, subprocess, sys, tempfile
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests compare with tensors on the CPU

import pytest, torch
from PIL import Image

for package in ("rapidocr", "onnxruntime"):
    pytest.importorskip(package, reason="pip install rapidocr onnxruntime")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / ".github/letters.md").read_text()
HERE = Path(tempfile.mkdtemp())  # the blocks of code of the page, as the page's own command writes them
(HERE / ".github").mkdir()
(HERE / ".github/letters.md").write_text(PAGE)
WRITE, = re.findall(r"^awk .*", PAGE, re.MULTILINE)
subprocess.run(WRITE, shell=True, check=True, cwd=HERE)
sys.path[:0] = [str(HERE), str(ROOT)]
import grpo, letters
torch.set_num_threads(1)

def make_wrapper():
    """The models of the page with random weights."""
    torch.manual_seed(0)
    settings = grpo.TINY | dict(width=32 * letters.SIZE, height=32)
    return grpo.GLMImageWrapper(letters.make_models(), grpo.Config(**settings))

def spell(*words):
    """The tokens of these words, after a draft of four zeros."""
    rows = [[letters.ALPHABET.index(letter) for letter in word.ljust(letters.SIZE, "_")] for word in words]
    return torch.tensor([[0, 0, 0, 0, *row] for row in rows])

def draw(word):
    """A picture of this word by Pillow, of the size of the toy's pictures."""
    image = Image.new("RGB", (32 * letters.SIZE, 32), "white")
    for i, letter in enumerate(word):
        image.paste(letters.draw_letter(letter), (32 * i, 0))
    return image

@pytest.fixture
def offline(monkeypatch):
    """Nothing that a test reads may come from the network."""
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)

def test_length():
    """A page that says 110 lines at most, while the file grows, promises what is no longer so."""
    lines = (HERE / "letters.py").read_text().splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 100

def test_words():
    """A kept-out word that is also trained, or a word too long to be drawn, would make the table a lie."""
    trained = letters.WORDS.split()
    kept_out = letters.KEPT_OUT.split()
    assert len(set(trained + kept_out)) == len(trained) + len(kept_out)
    assert len(kept_out) >= 20 and set("".join(trained)) == set(letters.ALPHABET) - {"_"}
    assert max(map(len, trained + kept_out)) <= letters.SIZE
    assert "".join(trained + kept_out).islower()

def test_policy_reads_the_letters():
    """A tokenizer that knows no word but single letters would hand the policy an unknown word."""
    wrapper = make_wrapper()
    ids, _, _ = wrapper.encode(letters.make_prompts("cat queen"))
    names = wrapper.pipe.processor.tokenizer.convert_ids_to_tokens(ids.flatten())
    assert [name for name in names if name in letters.ALPHABET] == list("cat__queen")
    a, b = wrapper.compute_logprobs(letters.make_prompts("cat cab"), spell("cat", "cat"), None)[0]
    assert (a - b).abs().max() > 1e-3

def test_pictures_depend_on_tokens_only(monkeypatch):
    """A painter that sees the quoted word could paint it whatever the tokens are: no policy would learn."""
    wrapper = make_wrapper()
    prompts = letters.make_prompts("cat queen")
    tokens = spell("moon", "moon")
    cat, queen = wrapper.decode(prompts, tokens, [1, 1])
    assert cat.tobytes() == queen.tobytes()
    other, _ = wrapper.decode(prompts, spell("corn", "moon"), [1, 1])
    assert other.tobytes() != cat.tobytes()
    del wrapper.pipe.get_glyph_texts  # the stock pipeline's: now the painter is told the word
    cat, queen = wrapper.decode(prompts, tokens, [1, 1])
    assert cat.tobytes() != queen.tobytes()

def test_reward_is_what_the_network_reads(monkeypatch, offline):
    """A reward that knew more than the picture, the tokens or the prompt alone, would teach no writing."""
    images = [draw("CAT"), draw("CUT"), draw("QUEEN"), draw("")]
    prompts = letters.make_prompts("cat cat cat cat")
    assert [letters.read(image) for image in images] == ["CAT", "CUT", "QUEEN", ""]
    assert letters.ocr(images, prompts) == pytest.approx([1, 4 / 6, 0, 0])
    monkeypatch.setattr(letters, "read", lambda image: "ca")
    assert letters.ocr(images, prompts) == pytest.approx([4 / 5] * 4)

def test_network_corrects_no_spelling(offline):
    """The page says so: a network that guesses words would pay for letters that nobody drew."""
    words = (letters.WORDS + " " + letters.KEPT_OUT).upper().split()
    misspelt = [word[:-1] + ("X" if word[-1] != "X" else "K") for word in words]
    for word in misspelt:
        assert letters.compare(word, letters.read(draw(word))) == 1, word

def test_it_learns(tmp_path):
    """The fit, the reward or the trainer is broken if the reward does not rise, or stays where it was."""
    command = [sys.executable, HERE / "letters.py", "--seed", "5", "--steps", "16", "--out", tmp_path / "run"]
    paths = dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | paths).stdout
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[:4]) / 4 < 0.6
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1
    before, after = map(float, re.findall(r"kept-out words: (\S+)", output))
    assert after > before
