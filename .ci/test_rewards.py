"""Tests of examples/rewards.py, and of what docs/rewards.md says of it. No network, no GPU."""
import base64, http.server, io, json, logging, re, socket, string, sys, threading, warnings
from pathlib import Path

import diffusers, pytest, torch, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
import grpo
from examples import rewards as gallery
PAGE = (ROOT / "docs/rewards.md").read_text()
PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]

def table(head):
    """Rows of the page's table with this head -> lists of cells."""
    lines = PAGE[PAGE.index(head):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

def test_the_table_names_all_rewards(run):
    """A reward that is not in the table would not be found, and one that is only there would not be known."""
    told = {row[0].split("`")[1] for row in table("| reward | what it needs |")}
    code = (ROOT / "examples/rewards.py").read_text()
    assert told == set(re.findall(r"^def (\w+)\(images, prompts, targets", code, re.MULTILINE))
    for typed in ("", "--help"):
        _, listed, _ = run("rewards", typed)
        assert told <= set(re.findall(r"^(\w+) ", listed, re.MULTILINE))

def draw(*texts, size=60, fill="black", ground="white", places=((60, 200), (180, 380))):
    """A picture with each text at its place, by the font inside Pillow."""
    image = Image.new("RGB", (512, 512), ground)
    for text, place in zip(texts, places):
        ImageDraw.Draw(image).text(place, text, fill, ImageFont.load_default(size=size))
    return image

@pytest.fixture
def reads(monkeypatch):
    """Skips without RapidOCR; no test that reads may need the network."""
    for package in ("rapidocr", "onnxruntime"):
        pytest.importorskip(package, reason="pip install rapidocr onnxruntime")
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)

def test_ocr_table(reads, caplog, monkeypatch):
    """A letter amiss costs a little, another word nearly all, no word everything; and the log is quiet."""
    gallery.load_reader.cache_clear()
    monkeypatch.setattr(logging.getLogger("RapidOCR"), "propagate", True)
    rows = table("| the prompt quotes | drawn")
    assert len(rows) > 8 and rows[0][0]
    for prompt, text, score in rows:
        phrase = prompt or phrase
        lines = text.replace("*nothing*", "").split(" / ")
        measured, = gallery.ocr([draw(*lines)], [phrase])
        assert f"{measured:.2f}" == score, (phrase, text)
    small = draw("OPEN", "LATE", size=24, fill="white", ground="navy", places=[(300, 40), (40, 400)])
    assert gallery.ocr([small], ['"LATE" and "OPEN"']) == [1]  # phrases in any order
    assert gallery.ocr([draw(ground="black")], ['"OPEN"']) == [0]
    assert not caplog.records

def test_ocr_without_quotes(monkeypatch):
    """It gives 0, says so, and needs no package for it."""
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.warns(UserWarning, match="ocr returns 0, because this prompt quotes no words: "):
        assert gallery.ocr(PAIR, ["a fox", 'nothing: ""']) == [0, 0]

PHRASES = [  # prompt, phrases, is there a warning?
    ('the dog\'s bowl under the cat\'s sign "OPEN"', ["OPEN"], True),
    ('an owner’s sign “OPEN”, a cat’s 「早」', ["OPEN", "早"], False),
    ("it says 'OPEN' and 'LATE'", ["OPEN", "LATE"], False), ("a fox", [], False)]

@pytest.mark.parametrize("prompt, phrases, warns", PHRASES)
def test_apostrophes_are_no_quotes(prompt, phrases, warns):
    """Two apostrophes made a phrase of their own, so that the right words scored 0.3."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert gallery.find_phrases(prompt) == phrases
    assert [str(warning.message)[:27] for warning in caught] == ["GLM-Image takes apostrophes"] * warns
    painted = diffusers.GlmImagePipeline.get_glyph_texts(None, prompt)[0]
    assert warns == (sorted(painted) != sorted(phrases))

ALIKE = [  # wanted, seen, score
    ("OPEN", " o P\nEN ", 1), ("OPEN", "OPEM", 2 * 3 / 8), ("OPEN", "", 0), ("café", "cafe\u0301", 1),
    ("No. 7", "Ｎｏ．７", 1), ("ab" * 200, "x" + "ab" * 200, 800 / 801)]

@pytest.mark.parametrize("wanted, seen, score", ALIKE)
def test_letters_are_matched(wanted, seen, score):
    """Case, spaces and forms of Unicode are no mistakes, and a long text is compared as a short one is."""
    assert gallery.match_letters(wanted, seen) == pytest.approx(score)

def test_ssim_as_published():
    """IPOL's imdiff, as scikit-image's own tests quote it
    (https://github.com/scikit-image/scikit-image/pull/4913#issuecomment-700653165)."""
    data = pytest.importorskip("skimage.data", reason="pip install scikit-image")
    camera = data.camera()
    noise = 20 * np.random.RandomState(5).randn(512, 512)
    noisy = np.clip(camera + noise, 0, 255).astype(np.uint8)
    first, second = [Image.fromarray(array).convert("RGB") for array in (camera, noisy)]
    scores = gallery.ssim([first, second, first.resize((700, 700))], [""] * 3, [second, second, first])
    assert scores[:2] == pytest.approx([0.357959, 1], abs=1e-3) and scores[2] == pytest.approx(1)

def test_the_other_rewards_by_hand(monkeypatch):
    """A stand-in for LPIPS, whose weights are not here; of the others the bytes and the edges are counted."""
    def distance(x, y, normalize):
        assert normalize and x.shape == y.shape and x.max() <= 1
        return (x - y).abs().mean()

    black = Image.new("RGB", (8, 8))
    white = Image.new("RGB", (8, 8), "white")
    noisy = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 24, 3), np.uint8))
    monkeypatch.setattr(gallery, "load_lpips", lambda: distance)
    assert gallery.lpips([black, white], ["", ""], [white.resize((30, 20)), white]) == [-1, 0]
    file = io.BytesIO()
    noisy.save(file, "JPEG", quality=95)
    scores = gallery.jpeg([noisy, PAIR[0]], ["", ""])
    assert scores[0] == pytest.approx(1 - file.tell() / (3 * 20 * 24)) and scores[0] < scores[1] < 1
    half = black.copy()
    half.paste(white, (4, 0))  # of 7 steps to the right one is an edge
    assert gallery.sharpness([black, half], ["", ""], []) == pytest.approx([0, 1 / 7])
    assert gallery.even([half, white], ["black", "a white, not a red one"]) == pytest.approx([0.5, 1])

MISSING = [("rapidocr", "ocr", "rapidocr onnxruntime"), ("onnxruntime", "ocr", "rapidocr onnxruntime"),
           ("skimage.metrics", "ssim", "scikit-image"), ("lpips", "lpips", "lpips -r requirements.txt")]

@pytest.mark.parametrize("module, reward, packages", MISSING)
def test_a_missing_package_is_one_line(monkeypatch, module, reward, packages):
    """It says what to install, without the traceback of the import."""
    for other in ("rapidocr", "onnxruntime"):
        monkeypatch.setitem(sys.modules, other, io)
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
    torch.save({f"layers.{key}": value for key, value in head.state_dict().items()}, tmp_path / "head.pth")
    monkeypatch.setattr(gallery, "load_clip", lambda name, own: (model, processor))
    monkeypatch.setattr(gallery, "HEAD", str(tmp_path / "head.pth"))
    prompts = ["a red fox on a long long wall", "blue"]
    with torch.no_grad():
        cosines, marks, scores, choices = [getattr(gallery, name)(PAIR, prompts) for name in
                                           ("clip", "aesthetic", "aesthetic_z", "pickscore")]
        assert torch.allclose(choices, model.logit_scale.exp() * cosines) and model.logit_scale > 2
        first = 1 if marks[0] > marks[1] else -1
        assert scores.tolist() == pytest.approx([first * 0.5**0.5, -first * 0.5**0.5], abs=1e-2)
        for i, (image, prompt) in enumerate(zip(PAIR, prompts)):
            a = model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output[0]
            b = model.get_text_features(**processor(text=prompt, return_tensors="pt")).pooler_output[0]
            assert float(cosines[i]) == pytest.approx(F.cosine_similarity(a, b, dim=0).item(), abs=1e-5)
            assert float(marks[i]) == pytest.approx(head(a / a.norm()).item(), abs=1e-5)

# --- Rewards that ask a server ------------------------------------------------------------------------------
def paint(*greens):
    return [Image.new("RGB", (16, 8), (90, int(green), 50)) for green in greens]

@pytest.fixture
def model(monkeypatch):
    """A server's vision-language model: model.answer(text, greens of the pictures), and model.asked."""
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions" and body["model"] == "any"
            text, *pictures = body["messages"][0]["content"]
            files = [base64.b64decode(picture["image_url"]["url"].split(",")[1]) for picture in pictures]
            greens = [Image.open(io.BytesIO(file)).getpixel((0, 0))[1] for file in files]
            model.asked.append((text["text"].split(": ")[1], *greens))
            said = {"choices": [{"message": {"content": model.answer(text["text"], greens)}}]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

    model = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    model.asked = []
    threading.Thread(target=model.serve_forever, args=[0.01], daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{model.server_port}")
    monkeypatch.setenv("JUDGE_MODEL", "any")
    yield model
    model.shutdown()

def test_judge_asks_and_reads(model):
    """The picture and the prompt must arrive; an answer without a number is 0, and does not end a run."""
    model.answer = lambda text, greens: {0: "8", 10: "I'd say 6.5 of 10", 20: None}[greens[0]]
    with pytest.warns(UserWarning, match="no number in the answer ''"):
        assert gallery.judge(paint(0, 10, 20), ["a {fox}", "an owl", "x"]) == [8.0, 6.5, 0.0]
    answer = "? Answer with one number, 0 (no) to 10 (yes)."
    assert sorted(model.asked) == [("a {fox}" + answer, 0), ("an owl" + answer, 10), ("x" + answer, 20)]

def test_compare_by_hand(model):
    """A picture was compared with those of another prompt, or its place among the two decided."""
    model.answer = lambda text, greens: f"Picture {1 + greens.index(max(greens))}."
    assert gallery.compare(paint(10, 30, 20, 200, 220, 220), "aaabbb") == [0, 1, 0.5, 0, 0.75, 0.75]
    assert len(model.asked) == 3 * 2 + 2  # equal pictures tie, and an equal question is asked once
    assert gallery.compare(paint(1, 2), "ab") == [0.5, 0.5] and len(model.asked) == 8
    for said, warns in [("1", 0), ("It is 2.", 0), ("0", 0), (None, 6), ("1 and 2", 6), ("about 12", 6)]:
        model.answer = lambda text, greens: said
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            assert gallery.compare(paint(10, 30, 20), "aaa") == [0.5] * 3
        assert len(caught) == warns

@pytest.mark.parametrize("name", ["judge", "compare"])
def test_a_server_that_is_down(name, model, monkeypatch, run):
    """It ended in a traceback. The trial of grpo.py finds it before a model is loaded, with a single call."""
    model.answer = lambda *args: "1"
    prompts = [f"fox {i}" for i in range(8)]
    grpo.try_rewards({name: (getattr(gallery, name), 1.0)}, prompts, [None] * 8, grpo.Config())
    assert len(model.asked) == 1
    for url, why in [("http://127.0.0.1:9", "refused"), ("nowhere", "unknown url type"), (None, "'JUDGE_URL'")]:
        monkeypatch.setenv("JUDGE_URL", url) if url else monkeypatch.delenv("JUDGE_URL")
        code, _, error = run("toy", f"--reward {ROOT}/examples/rewards.py:{name}")
        assert code == 2 and error.count("\n") == 1 and why in error
        assert f"JUDGE_URL={url} JUDGE_MODEL=any: " in error and not list(Path().iterdir())

# --- Does a reward agree with a person? ---------------------------------------------------------------------
MINE = """
import random
def green(images, prompts, targets):
    return [image.getpixel((0, 0))[1] for image in images]
def pink(images, prompts, targets):
    return [-green for green in green(images, prompts, targets)]
def half(images, prompts, targets):
    return [green // 128 for green in green(images, prompts, targets)]
def moody(images, prompts, targets):
    return (pink if random.Random(prompts[0]).random() < 0.5 else green)(images, prompts, targets)
"""

@pytest.fixture
def choices(tmp_path, monkeypatch):
    """Someone chose the greenest of each of 40 groups of four pictures, in every other one all of them in order."""
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test
    Path(tmp_path, "mine.py").write_text(MINE)
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
    reward = ",".join([f"mine.py:{name}" for name in "green=0 pink half moody".split()])
    _, out, _ = run("rewards", f"choices.jsonl --reward {reward},sharpness")
    assert "40 groups, 180 pairs of a better and a worse picture" in out  # 20 x 3 + 20 x 6
    rows = {name: rest.split() for name, rest in re.findall(r"^(\w+) +([-\d].*)$", out, re.MULTILINE)}
    assert rows["green"] == "1.00 1.00 .. 1.00 0%".split() and rows["pink"] == "0.00 0.00 .. 0.00 0%".split()
    assert rows["sharpness"] == ["-", "-", "100%"] and rows["half"][0] == "1.00" and 10 < int(rows["half"][4][:-1]) < 50
    share, low, _, high, ties = rows["moody"]  # all pairs of a group agree or none: they are no 180 observations
    assert low < "0.50" < high and low < share < high and float(high) - float(low) > 0.25 and ties == "0%"

WRONG = [  # what is typed, changed lines, what is told
    ("nowhere.jsonl --reward jpeg", None, "nowhere.jsonl: [Errno 2]"), ("choices.jsonl", None, "no such function"),
    ("choices.jsonl --reward mine.py:f", None, "mine.py:f: "), ("choices.jsonl --reward ssim", None, "a target"),
    ("", [0], "chosen over"), ("", [], "chosen over"), ("", ['{"prompt": "x", "pic'], "choices.jsonl, line 1: "),
    ("", [1, "\n"], "choices.jsonl, line 2: "), ("", ["[1]"], "line 1: "), ("", [1], "choices/89.png")]

@pytest.mark.parametrize("typed, lines, why", WRONG)
def test_wrong_choices(run, choices, typed, lines, why):
    """One line says what is wrong, and where."""
    if lines is not None:
        Path("choices.jsonl").write_text("".join(choices[line] if line in (0, 1) else line for line in lines))
    if "png" in why:
        Path(why).unlink()
    code, _, error = run("rewards", typed or "choices.jsonl --reward jpeg")
    assert code == 2 and error.startswith("rewards.py: error: ") and error.count("\n") == 1 and why in error
