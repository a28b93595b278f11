"""Tests of docs and examples: programs are run as they stand and as their pages say, and what rewards.md and changes.md
say is true."""
import ast, copy, dataclasses, functools, io, json, logging, math, os, random, re, runpy, shutil, socket, string, subprocess, sys, tempfile, types, warnings
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests compare with tensors on the CPU

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / ".ci")]

import diffusers, pytest, torch, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo, patches, test_grpo
from examples.make_tiny import make_models

torch.set_num_threads(1)  # other tests run beside these
warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)
pytestmark = pytest.mark.readme
PAGES = {path.name: path.read_text() for path in sorted((HERE / "docs").glob("*.md"))}
FILES = {path.name: path.read_text() for path in sorted((HERE / "examples").glob("*.py"))}
REWARDS = PAGES["rewards.md"]
CHANGES = PAGES["changes.md"]
FLAGS = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(grpo.Config)}
PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]

# --- What the tests are made of -----------------------------------------------------------------------------
# A GLM-Image as small as that of examples, with random weights, so that nothing is certain to it.
FOLDER = tempfile.TemporaryDirectory()
MODEL = FOLDER.name
torch.manual_seed(0)
make_models(grpo.COLORS).save_pretrained(MODEL)
shutil.copy(HERE / "examples/tiny-glm-image/grpo.json", MODEL)
SMALL = f"--model {MODEL} --width 64 --height 64 --batch-size 2 --group-size 2 --micro-batch-size 2".split()
ENV = os.environ | {
    "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
PIPES = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

@pytest.fixture(autouse=True)
def quick(monkeypatch):
    shrink(monkeypatch)

def shrink(monkeypatch):
    """This model is the default, and its draft has 4 x 4 codes in place of 16 x 16: that saves most of the time."""
    monkeypatch.setattr(grpo.Config.__dataclass_fields__["model"], "default", MODEL)
    monkeypatch.setattr(transformers.GlmImageProcessor, "_get_target_shape", staticmethod(
        lambda height, width: (height // 32, width // 32, 4, 4)))

def make_trainer(module=grpo, rewards=None, **settings):
    """Of grpo.py, or of a changed one, on the small model: 2 prompts x 4 images of 64 x 64."""
    small = dict(width=64, height=64, batch_size=2, steps=1) | settings
    config = module.parse_args(["--model", MODEL, *[f"--{name}={value}" for name, value in small.items()]])
    wrapper = module.GLMImageWrapper.from_pretrained(config.model, config)
    prompts = ["a red fox", "some green thing here", "blue"]
    return module.GRPOTrainer(config, wrapper, prompts, rewards or module.load_rewards("color"))

def rows_of(out):
    """metrics.jsonl without what the clock says."""
    rows = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key != "seconds"} for row in rows]

@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a run of five steps with the first command's settings."""
    out = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        grpo.main(f"--model {MODEL} --steps 5 --save-every 2 --batch-size 2 --out {out}".split())
    return out

@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command(*argv): `python grpo.py` in tmp_path -> exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*argv):
        capsys.readouterr()
        try:
            code = grpo.main(list(argv)) or 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run

def blocks_of(page):
    """Its blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)

def code_of(page, name):
    """The block of Python of a page whose first line is `# name`, or else the first one after this name in bold."""
    for block in blocks_of(page):
        if block.startswith(f"# {name}\n"):
            return block
    return blocks_of(page.split(f"**{name}")[1])[0]

def load_module(code, name):
    """-> a module of this code, which knows where grpo.py is."""
    module = types.ModuleType(name)
    module.__file__ = str(HERE / "grpo.py")
    sys.modules[name] = module  # where dataclasses look for what annotations mean
    exec(code, module.__dict__)
    return module

def table(page, head):
    """Rows of the page's table with this head -> lists of cells."""
    lines = page[page.index(head):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

# --- All pages and files ------------------------------------------------------------------------------------
def test_pages_are_short():
    """They have grown past what anybody reads before. A long program is a file, which an editor can check."""
    of_pictures = [PAGES[name] for name in ("edit.md", "sft.md")]
    assert all(len(page.splitlines()) <= 80 for page in of_pictures)
    assert sum(len(page.split()) for page in PAGES.values() if page not in of_pictures) <= 6500
    for name, page in PAGES.items():
        assert "awk" not in page, name  # Windows has none, and what it writes overwrites one's own changes
        for block in blocks_of(page):
            assert len(block.splitlines()) < 25, (name, block)

@pytest.mark.parametrize("name", FILES)
def test_each_file_says_how_to_run_it(name):
    """In its docstring, from the root: `python examples/x.py` would not find grpo.py."""
    code = FILES[name]
    told = ast.get_docstring(ast.parse(code))
    assert re.search(rf"python -m examples\.{name[:-3]}\b|--reward examples/{name}:\w|from examples\.{name[:-3]} import", told), told
    assert max(map(len, code.splitlines())) <= 100
    readme = (HERE / "README.md").read_text()
    assert f"](examples/{name})" in readme or any(f"](../examples/{name})" in page for page in PAGES.values())

def test_excerpts_are_of_their_files():
    """Lines that a page shows of a file are in the file, as they stand; other code says itself what it imports."""
    for block in blocks_of((HERE / "README.md").read_text()):
        assert any(block in code for code in FILES.values()), block
    for block in blocks_of("".join(PAGES.values())):
        assert re.search(r"^(import|from) ", block) or any(block in code for code in FILES.values()), block

def test_named_programs_are_there():
    """What a page runs, or names by its path; and nothing has to be copied first."""
    text = "".join([(HERE / "README.md").read_text(), *PAGES.values(), *FILES.values()])
    names = re.findall(r"examples/(\w+)\.py|-m examples\.(\w+)", text)
    assert {path or module for path, module in names} <= {name[:-3] for name in FILES} and "cp " not in text

@pytest.mark.parametrize("page", [REWARDS, CHANGES], ids=["rewards.md", "changes.md"])
def test_flags_exist(page):
    """A page must not name a flag that is gone."""
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", page))
    assert named <= FLAGS | {"--logdir"}

def test_commands_of_rewards(tmp_path, command):
    """Every command of grpo.py is understood, and the small model does a step with it."""
    for package in ("rapidocr", "onnxruntime"):
        pytest.importorskip(package, reason="pip install rapidocr onnxruntime")
    torch.save(dict(weight=torch.ones(1, 4), bias=torch.zeros(1)), "head.pth")
    stand_in = ("HEAD = 'head.pth'\ndef embed(images, texts, *names):\n"
                "    return *torch.rand(2, len(images), 4), 1.0\n")
    Path("examples").mkdir()
    Path("examples/rewards.py").write_text(FILES["rewards.py"] + stand_in)  # without CLIP's 1.7 GB
    Path("examples/sharp.py").write_text(FILES["sharp.py"])
    load_module(FILES["targets.py"], "targets")
    write_words(tmp_path)
    told = (REWARDS + FILES["rewards.py"] + FILES["targets.py"]).replace("\\\n", "")  # a command may go on
    lines = sorted({line.strip('" ') for line in re.findall(r"python grpo\.py\b([^`#\n]*)", told)})
    assert len(lines) == 7
    for i, line in enumerate(lines):
        code, _, error = command(*line.split(), *SMALL, "--steps", "1", "--out", f"run{i}")
        assert code == 0, (line, error)
        row, = rows_of(tmp_path / f"run{i}")
        if "ocr" in line:
            assert row["reward_std"] < 0.2  # the small model draws no letters

# --- Rewards to copy: rewards.py -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gallery():
    return load_module(FILES["rewards.py"], "rewards")

def test_the_table_names_all_rewards():
    """A reward that is not in the table would not be found, and one that is only there would not be known."""
    told = {row[0].split("`")[1] for row in table(REWARDS, "| reward | what it needs |")}
    code = FILES["rewards.py"] + FILES["sharp.py"]
    takes_images = re.findall(r"^def (\w+)\(images, prompts, targets", code, re.MULTILINE)
    assert told == set(takes_images)

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

RIGHT = [  # prompt, picture
    ('a sign "OPEN"', draw("OPEN")),
    ('a sign "OPEN"', draw("OPEN", size=24, fill="white", ground="navy", places=[(300, 40)])),
    ('a sign "OPEN"', draw("OPEN", size=120, fill="red", ground="yellow", places=[(20, 300)])),
    ('a sign “open”', draw("Open")),
    ("a sign that says 'OPEN'", draw("OPEN")),
    ('number "4472" on its cab', draw("4472")),
    ('the plate reads "12"', draw("12")),
    ('"No. 7" on its hull', draw("No. 7")),
    ('it says "GOOD MORNING"', draw("GOOD MORNING", size=50)),
    ('it says "GOOD MORNING"', draw("GOOD", "MORNING")),
    ('it says "OPEN LATE"', draw("OPEN", "LATE", size=40, places=[(30, 90), (250, 100)])),
    ('it says "OPEN LATE"', draw("OPEN", "LATE", size=40, places=[(30, 100), (250, 90)])),
    ('"OPEN" and "BREAD"', draw("OPEN", "BREAD")),
    ('"OPEN" and "BREAD" above', draw("BREAD", "OPEN"))]

@pytest.mark.parametrize("prompt, image", RIGHT)
def test_ocr_gives_right_words_1(gallery, reads, prompt, image):
    """Whatever their size, colour and place, in one line or two; and phrases in any order."""
    assert gallery.ocr([image], [prompt]) == [1]

def test_ocr_table(gallery, reads, caplog, monkeypatch):
    """A letter amiss costs a little, another word nearly all, no word everything; and the log is quiet."""
    gallery.load_reader.cache_clear()
    monkeypatch.setattr(logging.getLogger("RapidOCR"), "propagate", True)
    rows = table(REWARDS, "| the prompt quotes | drawn")
    assert len(rows) > 8 and rows[0][0]
    for prompt, text, score in rows:
        phrase = prompt or phrase
        lines = text.replace("*nothing*", "").split(" / ")
        measured, = gallery.ocr([draw(*lines)], [phrase])
        assert f"{measured:.2f}" == score, (phrase, text)
    assert gallery.ocr([draw(ground="black")], ['"OPEN"']) == [0]
    assert not caplog.records

def write_words(folder):
    """words.txt as the page's own command writes it."""
    line, = re.findall(r"^grep .* > words.txt", REWARDS, re.MULTILINE)
    subprocess.run(line.replace("> words.txt", f"> {folder / 'words.txt'}"), shell=True, check=True, cwd=HERE)
    return folder / "words.txt"

@pytest.mark.skipif("SLOW" not in os.environ, reason="takes half a minute: SLOW=1 runs it")
def test_ocr_scores_of_words_txt(gallery, reads, tmp_path):
    """The right words, with one letter wrong, and those of another prompt: means over all prompts. Each prompt quotes
    one phrase, as the painter finds them."""
    prompts, _ = grpo.load_prompts(write_words(tmp_path))
    phrases = [diffusers.GlmImagePipeline.get_glyph_texts(None, prompt)[0] for prompt in prompts]
    assert len(prompts) == 20 and all(len(found) == 1 for found in phrases)
    words = [found[0] for found in phrases]
    dice = random.Random(0)
    wrong = []
    for word in words:
        i = dice.choice([i for i, letter in enumerate(word) if letter.isalnum()])
        letter = dice.choice([letter for letter in string.ascii_uppercase if letter != word[i].upper()])
        wrong.append(word[:i] + letter + word[i + 1:])
    drawn = words, wrong, words[1:] + words[:1]
    measured = [np.mean(gallery.ocr([draw(text, size=40) for text in texts], prompts)) for texts in drawn]
    flat = " ".join(REWARDS.split())
    told = re.search(r"the score is (\S*) for the right words, (\S*) on average .*? and (\S*) with", flat)
    assert [f"{score:.2f}" for score in measured] == list(told.groups())

def test_ocr_without_quotes(gallery, monkeypatch):
    """It gives 0, says so, and needs no package for it."""
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.warns(UserWarning, match="ocr returns 0, because this prompt quotes no words: "):
        assert gallery.ocr(PAIR, ["a fox", 'nothing: ""']) == [0, 0]

PHRASES = [  # prompt, phrases, is there a warning?
    ('the dog\'s bowl under the cat\'s sign "OPEN"', ["OPEN"], True),
    ('a “DON\'T” and a “WON\'T”', ["DON'T", "WON'T"], True),
    ('an owner’s sign “OPEN”, a cat’s 「早」', ["OPEN", "早"], False),
    ('a ship\'s rail that reads "AURORA"', ["AURORA"], False),
    ("it says 'OPEN' and 'LATE'", ["OPEN", "LATE"], False),
    ("the dog's and the cat's", ["s and the cat"], False),
    ("a fox", [], False)]

@pytest.mark.parametrize("prompt, phrases, warns", PHRASES)
def test_apostrophes_are_no_quotes(gallery, prompt, phrases, warns):
    """Two apostrophes made a phrase of their own, so that the right words scored 0.3."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert gallery.find_phrases(prompt) == phrases
    assert [str(warning.message)[:27] for warning in caught] == ["GLM-Image takes apostrophes"] * warns
    painted = diffusers.GlmImagePipeline.get_glyph_texts(None, prompt)[0]
    assert warns == (sorted(painted) != sorted(phrases))

ALIKE = [  # wanted, seen, score
    ("OPEN", " o P\nEN ", 1), ("OPEN", "OPEM", 2 * 3 / 8), ("OPEN", "", 0), ("one two", "one", 6 / 9),
    ("你好世界", "你 好", 4 / 6), ("café", "cafe\u0301", 1), ("No. 7", "Ｎｏ．７", 1),
    ("ab" * 200, "x" + "ab" * 200, 800 / 801)]

@pytest.mark.parametrize("wanted, seen, score", ALIKE)
def test_compare_by_hand(gallery, wanted, seen, score):
    """Case, spaces and forms of Unicode are no mistakes, and a long text is compared as a short one is."""
    assert gallery.compare(wanted, seen) == pytest.approx(score)

def test_ssim_by_hand_and_as_published(gallery):
    """Window by window on a real picture; and IPOL's imdiff, as scikit-image's own tests quote it
    (https://github.com/scikit-image/scikit-image/pull/4913#issuecomment-700653165)."""
    data = pytest.importorskip("skimage.data", reason="pip install scikit-image")
    image = Image.fromarray(data.astronaut()[50:130, 180:260])
    target = image.resize((40, 40)).resize((80, 80))
    bell = np.exp(-(np.arange(11) - 5) ** 2 / (2 * 1.5**2))
    weights = np.outer(bell, bell) / bell.sum() ** 2
    arrays = np.stack([image, target]) / 255
    x, y = np.lib.stride_tricks.sliding_window_view(arrays, (11, 11), axis=(1, 2))
    mx, my, xx, yy, xy = ((weights * z).sum(axis=(3, 4)) for z in (x, y, x * x, y * y, x * y))
    slow = (2 * mx * my + 1e-4) * (2 * (xy - mx * my) + 9e-4)
    slow /= (mx**2 + my**2 + 1e-4) * (xx - mx**2 + yy - my**2 + 9e-4)
    scores = gallery.ssim([image] * 3, [""] * 3, [image, target, image.resize((160, 160))])
    assert scores[:2] == pytest.approx([1, slow.mean()], abs=1e-6)
    assert scores[1] < 0.95 < scores[2] < 1
    camera = data.camera()
    noise = 20 * np.random.RandomState(5).randn(512, 512)
    noisy = np.clip(camera + noise, 0, 255).astype(np.uint8)
    pair = [Image.fromarray(array).convert("RGB") for array in (camera, noisy)]
    assert gallery.ssim(pair[:1], [""], pair[1:])[0] == pytest.approx(0.357959, abs=1e-3)

def test_lpips_jpeg_and_sharpness_by_hand(gallery, monkeypatch):
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
    sharp = load_module(FILES["sharp.py"], "sharp")
    assert sharp.sharpness([black, half], ["", ""], []) == pytest.approx([0, 1 / 7])

MISSING = [("rapidocr", "ocr", "rapidocr onnxruntime"), ("onnxruntime", "ocr", "rapidocr onnxruntime"),
           ("skimage.metrics", "ssim", "scikit-image"), ("lpips", "lpips", "lpips -r requirements.txt")]

@pytest.mark.parametrize("module, reward, packages", MISSING)
def test_a_missing_package_is_one_line(gallery, monkeypatch, module, reward, packages):
    """It says what to install, without the traceback of the import."""
    for other in ("rapidocr", "onnxruntime"):
        monkeypatch.setitem(sys.modules, other, io)
    monkeypatch.setitem(sys.modules, module, None)
    gallery.load_reader.cache_clear()
    with pytest.raises(ImportError, match=f"this reward needs pip install {packages}") as caught:
        getattr(gallery, reward)(PAIR[:1], ['"A"'], PAIR[1:])
    assert caught.value.__suppress_context__ and "\n" not in str(caught.value)

def test_clip_and_aesthetic_by_hand(gallery, monkeypatch, tmp_path):
    """A softmax, a logit scale, another prompt's padding, or layers in another order would show."""
    torch.manual_seed(0)
    half = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = transformers.CLIPConfig(
        text_config=dict(half, vocab_size=99, bos_token_id=0, eos_token_id=1, pad_token_id=1),
        vision_config=dict(half, image_size=32, patch_size=16), projection_dim=16)
    letters = [c + end for c in "abcdefghijklmnopqrstuvwxyz" for end in ("", "</w>")]
    words = {word: i for i, word in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor = transformers.CLIPProcessor(images, transformers.CLIPTokenizer(vocab=words, merges=[]))
    model = transformers.CLIPModel(config).eval().requires_grad_(False)
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    head = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1)).requires_grad_(False)
    torch.save({f"layers.{key}": value for key, value in head.state_dict().items()}, tmp_path / "head.pth")
    for name in ("CLIP", "PICKSCORE", "PICKSCORE_PROCESSOR"):
        monkeypatch.setattr(gallery, name, str(tmp_path))
    monkeypatch.setattr(gallery, "HEAD", str(tmp_path / "head.pth"))
    prompts = ["a red fox on a long long wall", "blue"]
    rewards = {name: (getattr(gallery, name), 1.0) for name in ("clip", "aesthetic", "aesthetic_z", "pickscore")}
    total, metrics = grpo.compute_rewards(PAIR, prompts, [None] * 2, rewards)
    with torch.no_grad():
        cosines, marks, scores, choices = (getattr(gallery, name)(PAIR, prompts) for name in rewards)
    assert torch.allclose(choices, model.logit_scale.exp() * cosines) and model.logit_scale > 2
    assert torch.allclose(total, cosines + marks + scores + choices) and abs(metrics["reward/aesthetic_z"]) < 1e-6
    first = 1 if marks[0] > marks[1] else -1
    assert scores.tolist() == pytest.approx([first * 0.5**0.5, -first * 0.5**0.5], abs=1e-2)
    for i, (image, prompt) in enumerate(zip(PAIR, prompts)):
        a = model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output[0]
        b = model.get_text_features(**processor(text=prompt, return_tensors="pt")).pooler_output[0]
        assert float(cosines[i]) == pytest.approx(F.cosine_similarity(a, b, dim=0).item(), abs=1e-5)
        assert float(marks[i]) == pytest.approx(head(a / a.norm()).item(), abs=1e-5)

def test_judge_asks_and_reads(gallery, monkeypatch):
    """The picture and the prompt must arrive; an answer without a number is 0, and does not end a run."""
    asked = []

    def answer(request, timeout):
        asked.append(json.loads(request.data)["messages"][0]["content"])
        assert request.full_url == "http://judge/v1/chat/completions"
        text = ["8", "I'd say 6.5 of 10", "No idea."][len(asked) - 1]
        return io.StringIO(json.dumps({"choices": [{"message": {"content": text}}]}))

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.setenv("JUDGE_URL", "http://judge")
    monkeypatch.setenv("JUDGE_MODEL", "any")
    with pytest.warns(UserWarning, match="no number in the answer 'No idea.'"):
        assert gallery.judge([*PAIR, PAIR[0]], ["a fox", "an owl", "x"]) == [8.0, 6.5, 0.0]
    text, picture = asked[1]
    assert "an owl" in text["text"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")

def test_a_reward_is_called_once_a_step(tmp_path):
    """A reward of a minute was called again for the saved pictures, which the page says is over."""
    calls = []

    def count(images, prompts, targets):
        calls.append(len(images))
        return [0.0] * len(images)

    make_trainer(rewards={"count": (count, 1.0)}, steps=2, save_every=1, out=tmp_path / "run").train()
    assert calls == [8, 8] and (tmp_path / "run/samples_00002.png").exists()

def test_targets(tmp_path, command):
    """The file that it writes must be one that --prompts reads, with targets for `mse`."""
    load_module(FILES["targets.py"], "targets")
    prompts, targets = grpo.load_prompts("targets.txt")
    assert len(prompts) == 8 and prompts[0] == "a red thing"
    assert [targets[0].getpixel(at) for at in ((0, 0), (0, 127))] == [(255, 255, 255), (255, 0, 0)]
    flags = "--width 128 --height 128 --steps 1 --reward mse --prompts targets.txt --out run"
    assert command(*SMALL, *flags.split())[0] == 0
    assert -1 < rows_of(tmp_path / "run")[0]["reward/mse"] < 0

# --- Changes to copy ----------------------------------------------------------------------------------------
def read_changes():
    """{heading: its diffs, each as the lines before and the lines after}."""
    changes = {}
    for section in CHANGES.split("\n## ")[1:]:
        heading = section.split("\n")[0]
        for diff in re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
            before, after = (re.sub(rf"^[{sign}].*\n|^.", "", diff, flags=re.MULTILINE) for sign in "+-")
            changes.setdefault(heading, []).append((before, after))
    return changes

CHANGED = read_changes()

NOT_ALL = {"all but CISPO": ["CISPO"], "all but clip-higher": ["Clip-higher"]}  # these two change the same line

def change_code(*headings):
    """The text of grpo.py with these changes."""
    code = (HERE / "grpo.py").read_text()
    for heading in headings:
        for before, after in CHANGED[heading]:
            assert code.count(before) == 1, f"{heading}: these lines are not in grpo.py, or twice:\n{before}"
            code = code.replace(before, after)
    return code

def make_changed(*headings):
    """grpo.py with these changes, as a module."""
    return load_module(change_code(*headings), "changed")

def commands_of(heading):
    """The first two lines of the block of commands of a change: `git apply`, and pytest or None."""
    section = CHANGES.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    block = re.search(r"^```bash\n(git apply .*?)^```", section, re.DOTALL | re.MULTILINE)[1]
    apply, *rest = block.replace("\\\n", "").splitlines()
    return apply, *(rest or [None])

@pytest.fixture
def clone(tmp_path, monkeypatch):
    """clone(*headings, undo=False): their `git apply`, as the page types it, in a fresh repository -> its grpo.py."""
    if not shutil.which("git"):
        pytest.skip("there is no git")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    shutil.copytree(HERE / "examples/changes", tmp_path / "examples/changes")
    shutil.copy(HERE / "grpo.py", tmp_path)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def apply(*headings, undo=False):
        for heading in headings:
            argv = [*commands_of(heading)[0].split(), *["-R"] * undo]
            done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, (heading, done.stderr)
        return (tmp_path / "grpo.py").read_text()

    return apply

def test_patches_are_those_of_the_page():
    """Every change has a file, no file is left over, and each is what .ci/patches.py makes of the page."""
    made = patches.make_patches(CHANGES, (HERE / "grpo.py").read_text())
    assert {path.name: path.read_text() for path in (HERE / "examples/changes").iterdir()} == made
    assert list(made) == [Path(commands_of(heading)[0]).name for heading in CHANGED]
    assert sorted(made) == [f"{name}.patch" for name in (
        "cispo", "clip_higher", "cuda_graph", "dr_grpo", "dynamic_sampling", "entropy", "frac_zero_std", "gspo", "hook")]

@pytest.mark.parametrize("heading", CHANGED)
def test_each_patch_applies_alone(clone, heading):
    """`git apply` gives what the page's diff gives; -R, which the page names, gives grpo.py back."""
    assert clone(heading) == change_code(heading)
    assert clone(heading, undo=True) == (HERE / "grpo.py").read_text()

@pytest.mark.parametrize("heading", NOT_ALL)
def test_patches_apply_together(clone, heading):
    """In the page's order and in the reverse one, and undone in the order in which they came."""
    headings = [other for other in CHANGED if other not in NOT_ALL[heading]]
    assert clone(*headings) == change_code(*headings)
    assert clone(*headings, undo=True) == (HERE / "grpo.py").read_text()
    assert clone(*headings[::-1]) == change_code(*headings)

def test_clip_higher_and_cispo_exclude_each_other(clone):
    """As the page says; git refuses the second one and leaves the file as it is."""
    clone("Clip-higher")
    with pytest.raises(AssertionError, match="patch does not apply"):
        clone("CISPO")
    assert clone() == change_code("Clip-higher")

@pytest.mark.parametrize("heading", [*CHANGED, *NOT_ALL])
def test_each_change_applies_and_trains(tmp_path, heading):
    """A line of grpo.py that has moved on is named; alone and together they train, by their count of lines."""
    headings = CHANGED.keys() - NOT_ALL[heading] if heading in NOT_ALL else [heading]
    changed = make_changed(*headings)
    logprobs = torch.zeros(2, 5, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0])
    changed.compute_grpo_loss(logprobs, logprobs, advantages)[0].backward()  # on policy it is still REINFORCE
    assert torch.allclose(logprobs.grad, -advantages[:, None].expand(2, 5) / 10)
    for top_p in (0.99, 0.5):
        trainer = make_trainer(changed, top_p=top_p, out=tmp_path / f"run{top_p}")
        trainer.train()
        row, = rows_of(tmp_path / f"run{top_p}")
        assert 0 < row["grad_norm"] < math.inf
        assert all(weight.isfinite().all() for weight in trainer.lora.weights.values())

def test_commands_leave_out_what_fails_by_design():
    """As -k takes parts of names, no test that is not named may have them in its own; and each is there to fail."""
    tests = [name for name in vars(test_grpo) if name.startswith("test_")]
    for heading in CHANGED:
        told = commands_of(heading)[1] or ""
        names = re.findall(r"test_\w+", told)
        listed = names[0] if len(names) == 1 else f"({' or '.join(names)})"
        assert " ".join(told.split()) == (f'python -m pytest -q -k "not {listed}"' if names else ""), heading
        assert sorted(names) == sorted(name for name in tests if any(part in name for part in names))

def test_gspo_and_cispo_by_hand():
    """GSPO's ratio is the geometric mean of a row; in CISPO a clipped token keeps its gradient, of bounded weight."""
    old = torch.zeros(1, 2)
    new = torch.tensor([[1.5, 0.5]]).log().requires_grad_()
    loss, metrics = make_changed("GSPO").compute_grpo_loss(new, old, torch.ones(1))
    assert loss.item() == pytest.approx(-(0.75**0.5)) and metrics["ratio_mean"] == pytest.approx(0.75**0.5)
    loss, metrics = make_changed("CISPO").compute_grpo_loss(new, old, torch.ones(1), 0.3)
    loss.backward()
    assert new.grad.tolist() == [pytest.approx([-1.3 / 2, -0.5 / 2])]
    assert metrics["clip_frac"] == 0.5

def test_dr_grpo_and_clip_higher_by_hand():
    """Advantages keep the scale of the rewards; a ratio between 1.2 and 1.28 is bounded by clip-higher no more."""
    advantages = make_changed("Dr. GRPO").compute_advantages(torch.tensor([1.0, 3.0, 0.0, 0.5]), 2)
    assert advantages.tolist() == [-1, 1, -0.25, 0.25]
    ratios = torch.tensor([[1.25, 1.3, 0.7]])
    loss, metrics = make_changed("Clip-higher").compute_grpo_loss(ratios.log(), torch.zeros(1, 3), torch.ones(1))
    assert loss.item() == pytest.approx(-(1.25 + 1.28 + 0.7) / 3) and metrics["clip_frac"] == pytest.approx(1 / 3)
    loss, _ = make_changed("Clip-higher").compute_grpo_loss(ratios.log(), torch.zeros(1, 3), -torch.ones(1))
    assert loss.item() == pytest.approx((1.25 + 1.3 + 0.8) / 3)

def test_the_entropy_bonus_raises_the_entropy(tmp_path):
    """With the wrong sign, or without a gradient, it would do nothing or harm: here nothing else acts."""
    changed = make_changed("An entropy bonus")
    same = {"same": (lambda images, *_: [1.0] * len(images), 1.0)}
    trainer = make_trainer(changed, same, steps=8, batch_size=3, kl_coef=0.0, lr=1e-3, out=tmp_path / "run")
    trainer.train()
    entropies = [row["entropy"] for row in trainer.history]
    assert entropies[-1] > entropies[0] + 0.01

def test_dynamic_sampling_replaces_equal_groups(tmp_path):
    """Only equal groups are replaced, whole and in their place, until they differ or as many are drawn as a step has."""
    changed = make_changed("Dynamic sampling")
    calls = []
    seen = []

    def rarely(images, prompts, targets):
        """Of the four groups the second and the fourth are equal. The first and the third that are drawn are, too."""
        calls.append(prompts)
        assert targets == [None] * len(images) == [None] * len(prompts)
        return [0, 1, 2, 3, 7, 7, 7, 7, 4, 5, 6, 7, 7, 7, 7, 7] if len(calls) == 1 else (
            [7, 7, 7, 7] if len(calls) in (2, 4) else [len(calls)] * 3 + [9])

    original = changed.GRPOTrainer.train_step
    changed.GRPOTrainer.train_step = lambda self, *args: seen.append(args) or original(self, *args)
    trainer = make_trainer(changed, {"rarely": (rarely, 1.0)}, batch_size=4, out=tmp_path / "run")
    drawn = []
    draw = trainer.wrapper.generate_with_tracking
    trainer.wrapper.generate_with_tracking = lambda *args: drawn.append(draw(*args)) or copy.deepcopy(drawn[-1])
    trainer.train()
    _, first, *others = drawn[:-1]  # without the saved pictures, before and after
    assert [len(prompts) for prompts in calls] == [16, 4, 4, 4, 4]  # the 2nd, the 4th, and the 2nd again, twice
    (rollout, advantages), = seen
    places = [(first, 0), (others[3], 0), (first, 8), (others[1], 0)]
    for i, (source, start) in enumerate(places):
        ours, theirs = rollout.part(slice(4 * i, 4 * i + 4)), source.part(slice(start, start + 4))
        for a, b in zip(vars(ours).values(), vars(theirs).values()):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b
    by_hand = changed.compute_advantages([0, 1, 2, 3, 5, 5, 5, 9, 4, 5, 6, 7, 3, 3, 3, 9], 4)
    assert torch.equal(advantages, by_hand)
    seeds = {tuple(rollout.tokens[i].tolist()) for i in range(16)}
    assert len(seeds) > 12  # the groups are not one group, again and again
    calls.clear()
    equal = {"equal": (lambda images, *_: calls.append(1) or [1.0] * len(images), 1.0)}
    make_trainer(changed, equal, batch_size=4, out=tmp_path / "equal").train()
    assert len(calls) == 1 + 4

class Recorder(TorchDispatchMode):
    """Notes each operation with its tensors. As nothing runs while a GPU records, what is written is undone."""
    def __init__(self):
        super().__init__()
        self.calls, self.written = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default  # `.item()` would wait for the GPU
        if function._schema.is_mutable:
            self.written.append((args[0], args[0].clone()))
        result = function(*args, **kwargs or {})
        self.calls.append((function, args, kwargs or {}, result))
        return result

def make_graphed(function, inputs, num_warmup_iters):
    """`torch.cuda.make_graphed_callables` on a CPU: it repeats what was noted, on the tensors of that time."""
    assert num_warmup_iters == 0  # a pass more would write into the cache
    recorder = Recorder()
    with recorder:
        output = function(*inputs)
    for tensor, before in reversed(recorder.written):
        tensor.copy_(before)

    def replay(*values):
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value)
        for operation, args, kwargs, result in recorder.calls:
            again = operation(*args, **kwargs)
            if not operation.is_view and not operation._schema.is_mutable:
                for tensor, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(tensor, torch.Tensor):
                        tensor.copy_(value)
        return output

    return replay

@pytest.mark.parametrize("clones", [True, False])
def test_the_cuda_graph_played_on_a_cpu(monkeypatch, clones):
    """Same tokens, log-probs and nuclei, bit for bit, twice in a row, with top-p, padding and adapters that do
    something; without the clones it would write into tensors that are still in use."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", make_graphed)
    code = change_code("A CUDA graph")
    assert code.count(".clone() for tensor") == 1
    changed = load_module(code if clones else code.replace(".clone() for tensor", " for tensor"), "changed")
    changed.CUDA = True
    samples = []
    for module in (grpo, changed):
        wrapper, lora = test_grpo.make_adapted(top_p=0.6)
        wrapper.sample = functools.partial(module.GLMImageWrapper.sample, wrapper)
        samples.append([tensor for seeds in ([1, 2], [3, 4])
                        for tensor in wrapper.sample(test_grpo.PROMPTS, 3, seeds)])
    assert all(torch.equal(ours, graph) for ours, graph in zip(*samples, strict=True)) == clones

def test_the_hook_on_the_command_line(tmp_path, command, monkeypatch):
    """hooked.py takes the flags of grpo.py, and its hook sees each step once."""
    changed = make_changed("A hook for a logger")
    monkeypatch.setitem(sys.modules, "grpo", changed)
    code = FILES["hooked.py"].replace("(row, images):\n", "(row, images):\n    SEEN.append(row['step'])\n")
    Path("hooked.py").write_text(code)
    monkeypatch.setattr(sys, "argv", ["hooked.py", *SMALL, *"--steps 2 --out run".split()])
    seen = runpy.run_path("hooked.py", dict(SEEN=[]), "__main__")["SEEN"]
    assert seen == [1, 2]
    assert Image.open("latest.png").size == (64, 64)

def test_notebook(tmp_path, monkeypatch):
    """What is copied into a cell must train, go on, and draw with its adapters. Run again, it spoils nothing."""
    monkeypatch.chdir(tmp_path)
    first = code_of(CHANGES, "In a notebook").replace("--steps 10", "--steps 1 --kl_coef 0")
    notebook = load_module(first, "notebook")
    row, = rows_of(tmp_path / "runs/mine")
    assert 0 < row["reward/bright"] < 1 and "kl" not in row
    with pytest.raises(grpo.BadInput, match="runs/mine"):
        load_module(first, "again")
    typed = re.search(r"\*\*Continue a run\*\* [^*]*?`(parse_args\(.*?\))`", CHANGES)[1]
    assert "--resume runs/mine --steps 20" in typed
    again = re.sub(r"\bparse_args\(.*", typed.replace("--steps 20", "--steps 3 --save-every 3"), first)
    exec(again, vars(notebook))
    rows = rows_of(tmp_path / "runs/mine")
    assert [row["step"] for row in rows] == [1, 2, 3] and all("kl" not in row for row in rows)
    drawn = load_module(code_of(CHANGES, "Generate images from saved adapters").replace("00010", "00003"), "drawn")
    assert [Image.open(f"drawn{i}.png").size for i in range(4)] == [(128, 128)] * 4
    saved = torch.load("runs/mine/checkpoint.pt")["adapter"]
    assert all(weight.any() and torch.equal(weight, saved[name]) for name, weight in drawn.lora.weights.items())

def test_sheets(finished, tmp_path, monkeypatch):
    """contact.py: each word stands over its own picture, of the first samples and below of the last ones."""
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "argv", ["contact.py", str(finished), str(tmp_path / "sheet.png")])
    sheet = load_module(FILES["contact.py"], "contact")
    assert sheet.words == "red orange yellow green blue purple white black".split()
    picture = Image.open(tmp_path / "sheet.png")
    assert picture.width == 1200 and picture.getpixel((0, 0)) == (255, 255, 255)
    for row, path in enumerate((sheet.samples[0], sheet.samples[-1])):
        for i in range(8):
            x = sheet.LEFT + i * (sheet.W + sheet.GAP)
            y = sheet.LINE + row * (sheet.H + sheet.GAP)
            shown = picture.crop((x, y, x + sheet.W, y + sheet.H))
            w = sheet.w
            own = Image.open(path).crop((i * w, 0, i * w + w, sheet.h)).resize(shown.size)
            difference = grpo.pil_to_tensor([shown]) - grpo.pil_to_tensor([own])
            assert difference[..., 2:-2, 2:-2].abs().mean() < 0.05
    strip = Image.new("RGB", (160 * 8, 32), "white")
    for step in (0, 3):
        strip.save(tmp_path / f"samples_{step:05d}.png")
    words = "cat moon queen jazz apple fox house zebra".split()
    monkeypatch.setattr(sys, "argv", ["contact.py", str(tmp_path), str(tmp_path / "letters.png"), *words])
    load_module(FILES["contact.py"], "contact")
    assert Image.open(tmp_path / "letters.png").width == 1200  # as wide as that of colours

def test_board(finished, tmp_path, monkeypatch):
    """Every metric and every picture is shown at its own step."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["board.py", str(out)])
    load_module(FILES["board.py"], "board")
    board = events.EventAccumulator(str(out / "tensorboard")).Reload()
    rows = rows_of(out)
    rewards = [event.value for event in board.Scalars("reward")]
    assert rewards == pytest.approx([row["reward"] for row in rows])
    assert rows[0].keys() - {"step"} <= set(board.Tags()["scalars"])
    assert [event.step for event in board.Scalars("reward")] == [row["step"] for row in rows]
    steps = [int(path.stem[8:]) for path in sorted(out.glob("samples_*.png"))]
    assert [event.step for event in board.Images("samples")] == steps
