"""Tests of docs/letters.md: its letters.py learns to spell, by what RapidOCR reads and by nothing else. No network."""
import json, os, re, runpy, shutil, socket, subprocess, sys
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests compare with tensors on the CPU

import pytest, torch
from PIL import Image

for package in ("rapidocr", "onnxruntime"):
    pytest.importorskip(package, reason="pip install rapidocr onnxruntime")

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/letters.md").read_text()
sys.path[:0] = [str(ROOT)]
import grpo
from examples import letters, make_tiny
torch.set_num_threads(1)

def make_wrapper():
    """The models of the page with random weights."""
    torch.manual_seed(0)
    settings = make_tiny.SETTINGS | dict(width=32 * letters.SIZE, height=32)
    return grpo.GLMImageWrapper(letters.make_models(), grpo.Config(**settings))

def spell(*words):
    """The tokens of these words, after a draft of 7 x 35 zeros."""
    rows = [[letters.ALPHABET.index(letter) for letter in word.ljust(letters.SIZE, "_")] for word in words]
    return torch.tensor([[0] * 245 + row for row in rows])

def draw(word):
    """A picture of this word by Pillow, of the size of the model's pictures."""
    image = Image.new("RGB", (32 * letters.SIZE, 32), "white")
    for i, letter in enumerate(word):
        image.paste(letters.draw_letter(letter), (32 * i, 0))
    return image

@pytest.fixture
def offline(monkeypatch):
    """Nothing that a test reads may come from the network."""
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)

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
    rollout = grpo.Rollout(letters.make_prompts("cat cab"), [], spell("cat", "cat"), None, None)
    a, b = wrapper.compute_logprobs(rollout)[0]
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

def test_honesty(monkeypatch, offline, capsys):
    """honesty.py measures what the page's table has: of a few words, squares are read as they are drawn."""
    monkeypatch.setattr(letters, "WORDS", "cat moon queen")
    monkeypatch.setattr(letters, "KEPT_OUT", "cow tea")
    runpy.run_path(str(ROOT / "examples/honesty.py"), run_name="__main__")
    rows = [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    told = re.findall(r"^\| ((?:the|one|two|another|random) \w+ ?\w*) \|", PAGE, re.MULTILINE)
    assert len(rows) == 20 and [row[0] for row in rows[2:7]] == told
    for row in rows[2:7]:
        reward, perfect, as_drawn, _ = row[1].split()
        assert reward == perfect and as_drawn == "1.000", row

@pytest.mark.skipif("SLOW" not in os.environ, reason="takes three minutes: SLOW=1 runs it")
def test_it_learns(tmp_path):
    """By the page's own commands, up to the picture. The fit, the reward or the trainer is broken if the reward does not
    rise, or stays where it was."""
    for name in ("grpo.py", "prompts.txt", "examples"):
        Path(tmp_path, name).symlink_to(ROOT / name)
    block, = re.findall(r"^```bash\npip install [^\n]*\n(.*?)python -m examples.honesty\n```", PAGE, re.DOTALL | re.MULTILINE)
    commands = block.replace("--out", "--seed 5 --steps 8 --out").replace("python ", f"{sys.executable} ")
    output = subprocess.run(f"set -e\n{commands}", shell=True, check=True, capture_output=True, text=True, cwd=tmp_path,
                            env=os.environ | dict(OMP_NUM_THREADS="1")).stdout
    assert Image.open(tmp_path / "letters.png").width > 4 * 32 * letters.SIZE
    rows = [json.loads(line) for line in (tmp_path / "runs/letters/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows]
    assert len(rewards) == 8 and sum(rewards[:3]) / 3 < 0.55
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.03
    before, after = map(float, re.findall(r"held-out words, \w+ +(\S+)", output)[:2])
    assert after > before
