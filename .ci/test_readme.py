"""Tests of README.md: its code is run as it stands, and what it says about grpo.py is true."""
import dataclasses, io, json, logging, random, re, shutil, socket, string, subprocess, sys, types, warnings
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE)]

import diffusers, pytest, torch, transformers
import numpy as np
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

import grpo, test_grpo
from test_grpo import (
    QUICK, SMALL, WRAPPER, command, finished, first_command, make_adapted, make_config, make_wrapper, rows_of, run,
    sampled, score, wrapper)

warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)
pytestmark = pytest.mark.readme
README = (HERE / "README.md").read_text()
FIELDS = dataclasses.fields(grpo.Config)
PAIR = [Image.new("RGB", (64, 40), color) for color in ("red", "blue")]

def flag_of(field):
    return "--" + field.name.replace("_", "-")

def readme_code(name):
    """The block of code whose first line is `# name`."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n"))

def load_module(code, name):
    """-> a module of this code, which knows where grpo.py is."""
    module = types.ModuleType(name)
    module.__file__ = str(HERE / "grpo.py")
    sys.modules[name] = module  # where dataclasses look for what annotations mean
    exec(code, module.__dict__)
    return module

def run_use(name):
    """The block of the README for the stock pipeline, on the toy in this folder -> the module."""
    code = re.sub(r"runs/[\w-]+/adapter", lambda path: path[0].split("/")[1], readme_code(name))
    words = {"zai-org/GLM-Image": "toy", "bfloat16": "float32", "512": "64", '.to("cuda")': '.to("cpu")'}
    for old, new in words.items():
        code = code.replace(old, new)
    return load_module(code, name)

# --- Rewards to copy: my_rewards.py -------------------------------------------------------------------------
@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """my_rewards.py as the README's own command writes it."""
    path = tmp_path_factory.mktemp("gallery") / "my_rewards.py"
    line, = re.findall(r"^python -c '(import re; .*)'$", README, re.MULTILINE)
    shutil.copy(HERE / "README.md", path.parent)
    subprocess.run([sys.executable, "-c", line], check=True, cwd=path.parent)
    blocks = re.findall(r"^```python\n# (.*)", README, re.MULTILINE)
    assert sorted(blocks + ["README.md"]) == sorted(file.name for file in path.parent.iterdir())
    assert path.read_text() == readme_code("my_rewards.py")
    return load_module(path.read_text(), "my_rewards")

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

def test_ocr_table_of_the_readme(gallery, reads, caplog, monkeypatch):
    """A letter amiss costs a little, another word nearly all, no word everything; and the log is quiet."""
    gallery.load_reader.cache_clear()
    monkeypatch.setattr(logging.getLogger("RapidOCR"), "propagate", True)
    table = re.findall(r'^\| (".*?" )?\| (.*?) \| (\d\.\d\d) \|$', README, re.MULTILINE)
    assert len(table) > 10 and table[0][0]
    told = {}
    measured = {}
    for prompt, text, score in table:
        phrase = prompt or phrase
        lines = text.replace("*nothing*", "").split(" / ")
        told[phrase, text] = score
        measured[phrase, text] = f"{gallery.ocr([draw(*lines)], [phrase])[0]:.2f}"
    assert measured == told
    assert gallery.ocr([draw(ground="black")], ['"OPEN"']) == [0]
    assert not caplog.records

def test_ocr_scores_of_words_txt(gallery, reads):
    """The right words, with one letter wrong, and those of another prompt: means over all prompts."""
    prompts = [line for line in (HERE / "prompts.txt").read_text().splitlines() if '"' in line]
    words = [prompt.split('"')[1] for prompt in prompts]
    dice = random.Random(0)
    wrong = []
    for word in words:
        i = dice.choice([i for i, letter in enumerate(word) if letter.isalnum()])
        letter = dice.choice([letter for letter in string.ascii_uppercase if letter != word[i].upper()])
        wrong.append(word[:i] + letter + word[i + 1:])
    drawn = words, wrong, words[1:] + words[:1]
    measured = [np.mean(gallery.ocr([draw(text, size=40) for text in texts], prompts)) for texts in drawn]
    told = re.search(r"the\s+score\s+is (.*?)\s+for the right words, (.*?) on average .*? and (.*?)\s+with", README, re.DOTALL)
    assert [f"{score:.2f}" for score in measured] == list(told.groups())

def test_ocr_has_no_opinion_without_quotes(gallery, monkeypatch):
    """It says so, and needs no package for it."""
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    with pytest.warns(UserWarning, match="no opinion on prompts without words"):
        assert gallery.ocr(PAIR, ["a fox", 'nothing: ""']) == [None, None]

ALIKE = [  # wanted, seen, score
    ("OPEN", " o P\nEN ", 1), ("OPEN", "OPEM", 2 * 3 / 8), ("OPEN", "", 0), ("one two", "one", 6 / 9),
    ("你好世界", "你 好", 4 / 6), ("café", "cafe\u0301", 1), ("No. 7", "Ｎｏ．７", 1),
    ("ab" * 200, "x" + "ab" * 200, 800 / 801)]

@pytest.mark.parametrize("wanted, seen, score", ALIKE)
def test_compare_by_hand(gallery, wanted, seen, score):
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

def test_lpips_and_jpeg_by_hand(gallery, monkeypatch):
    """A stand-in for LPIPS, whose weights are not here."""
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
    monkeypatch.setattr(gallery, "CLIP", str(tmp_path))
    monkeypatch.setattr(gallery, "HEAD", str(tmp_path / "head.pth"))
    prompts = ["a red fox on a long long wall", "blue"]
    cosines = gallery.clip(PAIR, prompts)
    marks = gallery.aesthetic(PAIR, prompts)
    for i, (image, prompt) in enumerate(zip(PAIR, prompts)):
        a = model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output[0]
        b = model.get_text_features(**processor(text=prompt, return_tensors="pt")).pooler_output[0]
        assert float(cosines[i]) == pytest.approx(F.cosine_similarity(a, b, dim=0).item(), abs=1e-5)
        assert float(marks[i]) == pytest.approx(head(a / a.norm()).item(), abs=1e-5)

def test_judge_asks_and_reads(gallery, monkeypatch):
    """The picture and the prompt must arrive; no number in the answer is no opinion."""
    asked = []

    def answer(request, timeout):
        asked.append(json.loads(request.data)["messages"][0]["content"])
        assert request.full_url == "http://judge/v1/chat/completions"
        text = ["8", "I'd say 6.5 of 10", "No idea."][len(asked) - 1]
        return io.StringIO(json.dumps({"choices": [{"message": {"content": text}}]}))

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.setenv("JUDGE_URL", "http://judge")
    monkeypatch.setenv("JUDGE_MODEL", "any")
    assert gallery.judge([*PAIR, PAIR[0]], ["a fox", "an owl", "x"]) == [8.0, 6.5, None]
    text, picture = asked[1]
    assert "an owl" in text["text"]
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")

# --- The other blocks of code -------------------------------------------------------------------------------
def write_words(folder):
    """words.txt as the README's own command writes it."""
    line, = re.findall(r"^grep .* > words.txt", README, re.MULTILINE)
    subprocess.run(line.replace("> words.txt", f"> {folder / 'words.txt'}"), shell=True, check=True, cwd=HERE)
    return folder / "words.txt"

def test_words_of_the_readme(tmp_path):
    """Each prompt quotes one phrase, as the painter finds them."""
    prompts, _ = grpo.load_prompts(write_words(tmp_path))
    assert len(prompts) == 20
    assert all(len(diffusers.GlmImagePipeline.get_glyph_texts(None, prompt)[0]) == 1 for prompt in prompts)

def test_use_and_merge_of_the_readme(tmp_path, monkeypatch, sampled):
    """Both ways into the stock pipeline must give the policy that was trained, not the base, and draw."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    trained, lora = make_adapted()
    trained.policy.generation_config.suppress_tokens = list(range(8, 18))  # as if trained to draw codes alone
    trained.pipe.save_pretrained("toy")
    lora.save(Path("words"), "toy")
    expected = score(trained, sampled)
    assert (sampled[2] - expected).abs().max() > 0.01  # as the base model says
    run_use("merge.py")
    merged = grpo.GLMImageWrapper.from_pretrained("my-glm-image", make_config())
    for wrapper in (merged, grpo.GLMImageWrapper(run_use("use.py").pipe, make_config())):
        wrapper.pipe.processor._get_target_shape = trained.pipe.processor._get_target_shape  # is not saved
        assert (score(wrapper, sampled) - expected).abs().max() < 1e-5
    assert Image.open("bread.png").size == (64, 64)

def test_the_step_by_hand_of_the_readme(monkeypatch):
    """It must meet the sampler's log-probs, and move the adapters with a loss of 0."""
    monkeypatch.setattr(grpo.GLMImageWrapper, "from_pretrained", lambda path, config: make_wrapper())
    step = load_module(readme_code("step.py"), "step")
    assert (step.new - step.logprobs).abs().max() < 1e-5
    assert abs(step.loss.item()) < 1e-6
    assert any(weight.any() for name, weight in step.lora.weights.items() if "lora_B" in name)

def test_tensorboard_code_of_the_readme(finished, tmp_path, monkeypatch):
    """Every metric and every picture, at its own step; `reward_fixed` is not in every row."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["board.py", str(out)])
    load_module(readme_code("board.py"), "board")
    board = events.EventAccumulator(str(out / "tensorboard")).Reload()
    rows = rows_of(out)[1:]
    rewards = [event.value for event in board.Scalars("reward")]
    assert rewards == pytest.approx([row["reward"] for row in rows])
    assert rows[0].keys() - {"step"} <= set(board.Tags()["scalars"])
    for events in (board.Scalars("reward_fixed"), board.Images("samples")):
        assert [event.step for event in events] == [0, 2, 4, 5]

def test_targets_of_the_readme(tmp_path, command):
    """The file that it writes must be one that --prompts reads, with targets for `mse`."""
    load_module(readme_code("targets.py"), "targets")
    prompts, targets = grpo.load_prompts("targets.txt")
    assert len(prompts) == 8 and prompts[0] == "a red thing"
    assert [targets[0].getpixel(at) for at in ((0, 0), (0, 127))] == [(255, 255, 255), (255, 0, 0)]
    flags = "--size 128 --steps 1 --reward mse --prompts targets.txt --out run"
    assert command(*SMALL, *flags.split())[0] == 0
    assert -1 < rows_of(tmp_path / "run")[1]["reward/mse"] < 0

def test_own_reward_and_notebook_of_the_readme(tmp_path, command, monkeypatch):
    """What a user copies first must run, and count as much as its weight says."""
    Path("sharp.py").write_text(readme_code("sharp.py"))
    assert command(*SMALL, "--steps", "1", "--out", "run", "--reward", "color=1,sharp.py:sharpness=2")[0] == 0
    row = rows_of(tmp_path / "run")[1]
    assert 0 < row["reward/sharp.py:sharpness"] < 1
    assert row["reward"] == pytest.approx(row["reward/color"] + 2 * row["reward/sharp.py:sharpness"])
    monkeypatch.syspath_prepend(tmp_path)
    load_module(readme_code("notebook.py").replace("steps=20", "steps=1"), "notebook")
    assert "reward/sharp" in rows_of(tmp_path / "runs/mine")[1]

def test_changes_of_the_readme(tmp_path):
    """All diffs are made at once: it still trains, and on policy the gradient is still that of REINFORCE."""
    code = (HERE / "grpo.py").read_text()
    diffs = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert len(diffs) >= 5
    for diff in diffs:
        old, new = (re.sub(rf"^[{sign}].*\n|^.", "", diff, flags=re.MULTILINE) for sign in "+-")
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    changed = load_module(code, "changed")
    logprobs = torch.zeros(2, 5, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0])
    changed.compute_grpo_loss(logprobs, logprobs, advantages)[0].backward()
    assert torch.allclose(logprobs.grad, -advantages[:, None].expand(2, 5) / 10)
    settings = dict(steps=1, size="64", batch_size=2, out=str(tmp_path / "run"), entropy_coef=0.01)
    config = changed.Config(**grpo.TINY | settings)
    changed.GRPOTrainer(config, WRAPPER(QUICK(0), config), ["a red fox", "green"]).train()
    assert len(rows_of(tmp_path / "run")) == 2

# --- The commands -------------------------------------------------------------------------------------------
def tables(head):
    """Rows of the README's table with this head -> lists of cells."""
    lines = README[README.index(head):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

def test_what_the_first_command_prints(run):
    """The very columns that the page shows; another processor rounds otherwise, and draws other tokens."""
    out, printed = run
    shown = re.search(r"^step 0 .*?^step 40 .*?$", README, re.DOTALL | re.MULTILINE)[0].splitlines()
    lines = {line.split()[1]: line.split() for line in printed.splitlines()}
    for line in (line.split() for line in shown if line != "..."):
        seen = lines[line[1]]
        assert seen[::2] == line[::2]
        for key, value, number in zip(line[::2], line[1::2], seen[1::2]):
            assert not key.startswith("reward") or float(number) == pytest.approx(float(value), abs=0.03)
    rewards = [row["reward"] for row in rows_of(out)[1:]]
    for row, mean in zip(tables("| seed | 0 |")[:2], (np.mean(rewards[:5]), np.mean(rewards[-5:]))):
        assert float(row[1]) == pytest.approx(mean, abs=0.03)

def test_commands_of_the_readme(tmp_path, command):
    """Every flag of every command of grpo.py is understood, and the toy does a step with it."""
    for package in ("rapidocr", "onnxruntime"):
        pytest.importorskip(package, reason="pip install rapidocr onnxruntime")
    for name in ("my_rewards.py", "sharp.py"):
        Path(name).write_text(readme_code(name))
    load_module(readme_code("targets.py"), "targets")
    write_words(tmp_path)
    lines = re.findall(r"(?:python|torchrun\b.*?) grpo\.py\b( [^`#\n]*)?", README)
    assert len(lines) > 10
    small = "--model tiny --size 64 --batch-size 2 --group-size 2 --steps 1"
    for i, line in enumerate(lines):
        ends = "--steps 2" if "RUN" in line else f"{small} --out run{i}"
        typed = line.replace("RUN", "run0").replace("$seed", "1")
        code, _, error = command(*typed.split(), *ends.split())
        assert code == 0, (line, error)
        if "ocr" in line:
            assert rows_of(tmp_path / f"run{i}")[1]["frac_zero_std"] > 0.4  # the toy draws no letters

def test_ends_and_the_sharpness_of_two_files(tmp_path, finished, monkeypatch, capsys):
    """What ends.py prints of a run; and the line that tries a reward on two pictures."""
    monkeypatch.setattr(sys, "argv", ["ends.py", str(finished)])
    load_module(readme_code("ends.py"), "ends")
    rewards = [row["reward"] for row in rows_of(finished)[1:]]
    ends = f"reward: first five steps {np.mean(rewards[:5]):.3f}, last five {np.mean(rewards[-5:]):.3f}\n"
    assert capsys.readouterr().out.startswith(ends)
    line, = re.findall(r"^python -c '(import sharp.*)'$", README, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sharp.py").write_text(readme_code("sharp.py"))
    draw("OPEN").save("good.png")
    draw().save("bad.png")
    printed = subprocess.check_output([sys.executable, "-c", line], text=True, env=test_grpo.ENV)
    good, bad = json.loads(printed)
    assert good > 0 == bad

@pytest.fixture(scope="session", autouse=True)
def counted(request):
    """`python test_grpo.py --memory` takes a minute: it runs beside the other tests."""
    if not any(item.name == "test_memory_table_of_the_readme" for item in request.session.items):
        yield
        return
    argv = [sys.executable, HERE / "test_grpo.py", "--memory"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=test_grpo.ENV) as process:
        yield process
        process.kill()

def test_memory_table_of_the_readme(counted):
    """Counted anew: every row, and what the host holds."""
    printed, _ = counted.communicate(timeout=600)
    assert counted.returncode == 0
    rows = tables("| size | prompts x group |")
    assert [row for row in re.findall(r"^\| \d.*", printed, re.MULTILINE)] == [f"| {' | '.join(row)} |" for row in rows]
    head = printed.split("\n")[0]
    for number in ("16.6", "14.1", "32.9", "37.5"):
        assert number in head and number in README
    cards = tables("| | no GPU: the toy |")
    for row, line in ((cards[2], rows[1]), (cards[3], rows[3])):
        pairs = [cell.split(" / ") for cell in line[3:]]
        least, most = (max(float(pair[k]) for pair in pairs) for k in (0, 1))
        assert [row[2], row[3]] == [f"{peak} GiB + about 2 for CUDA" for peak in (least, most)]

def test_the_other_modes_run(monkeypatch, capsys):
    """--bench, --ablate and depth.py, on small models: they run, and have the rows that the page shows."""
    monkeypatch.setattr(test_grpo, "make_real", lambda device: QUICK(0))
    monkeypatch.setattr(test_grpo, "make_tiny_pipeline", lambda seed: QUICK(seed))
    monkeypatch.setattr(grpo, "TINY", grpo.TINY | dict(size="64", steps=5))
    monkeypatch.setattr(logging.getLogger("transformers"), "level", logging.ERROR)
    line, = re.findall(r"^python test_grpo.py --bench (--model random [^#]*)", README, re.MULTILINE)
    test_grpo.bench([*line.split(), "--size", "64", "--guidance", "1", "--decode-steps", "1"])
    names = list(test_grpo.ABLATIONS)
    assert names == [row[0] for row in tables("| | seed 0 |")]
    for name in names[3:]:
        monkeypatch.delitem(test_grpo.ABLATIONS, name)
    test_grpo.ablate([0])
    code = (HERE / ".ci/depth.py").read_text()
    settings = re.search(r"\[\(10, .*?\]", code, re.DOTALL)[0]
    load_module(code.replace(settings, "[(2, 0.04, 32)]"), "depth").depth()
    printed = capsys.readouterr().out
    groups = [row[0] for row in tables("| group | stock rollout |")]
    assert re.findall(r"^\| (\d+) \|", printed, re.MULTILINE) == groups
    assert re.findall(r"^\| (.*?) \| \d", printed.split("| | seed 0")[1], re.MULTILINE) == names[:3]
    cells = printed.splitlines()[-1].split("|")
    assert float(cells[6]) == 0 and float(cells[5]) < 1e-4  # a second pass over unmoved weights; fp32

def test_means_of_the_readme():
    """The last two cells of a row are mean and std of the others; and so are the numbers in the text."""
    rows = [*tables("| seed | 0 |")[:2], *tables("| | seed 0 |")]
    assert len(rows) > 10
    for row in rows:
        *values, mean, std = map(float, row[1:])
        assert [mean, std] == pytest.approx([np.mean(values), np.std(values, ddof=1)], abs=0.0012)
    text = re.sub(r"\s+", " ", README)
    (*_, first, spread), (*_, last, other) = rows[:2]
    assert f"first five steps is {first} (std {spread}), of the last five {last} (std {other})" in text

# --- The page -----------------------------------------------------------------------------------------------
def test_readme_tells_all_flags_and_their_defaults():
    """A row a flag, with the defaults of toy and GLM-Image, `2e-3 / 5e-5`; and none that is gone."""
    rows = re.findall(r"^\| `(--.*?)` \| (.*?) ?\|", README, re.MULTILINE)
    fields = {flag_of(field): field for field in FIELDS}
    assert sorted(flag for flag, _ in rows) == sorted(fields)
    others = "--help --bench --memory --ablate --nproc-per-node --nnodes --rdzv-endpoint --entropy-coef --index-url --logdir"
    assert set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", README)) <= {*fields, *others.split()}
    for flag in fields.keys() - {"--model", "--resume", "--out"}:  # these are told in words
        field = fields[flag]
        told = dict(rows)[flag].replace("`", "")
        values = (told.split(" / ") * 2)[:2]
        for value, default in zip(values, (grpo.TINY.get(field.name, field.default), field.default)):
            if default is None:
                assert told.startswith(("the model's own", "as --clip-range")), flag
            elif isinstance(default, str):
                assert value == Path(default).name, flag
            else:
                assert type(default)(value) == default, flag

def test_links_and_numbers_of_the_readme():
    """Line links go stale with the first line that is added above them; so does the number of lines."""
    lines = (HERE / "grpo.py").read_text().splitlines()
    links = re.findall(r"\[`([\w.]+)`\]\(grpo\.py#L(\d+)\)", README)
    assert len(links) == README.count("grpo.py#L") > 0
    for name, number in links:
        last = name.split(".")[-1]
        assert re.match(rf"\s*(def|class) {last}\b", lines[int(number) - 1]), f"{name} is not there"
    headings = re.findall(r"^#+ (.*)", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
    for path in re.findall(r"\]\((?!http|#|grpo.py)([^)#]+)\)", README):
        assert (HERE / path).exists(), path
    assert f"{len(lines)} lines" in README
    assert not re.search(r"\{\{\w+\}\}", README)

def test_the_readme_is_short_and_folds():
    """At most 330 lines to be seen and 800 in all; GitHub folds only with these blank lines."""
    lines = README.splitlines()
    seen = depth = 0
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""]):
        depth += line.startswith("<details") - line.startswith("</details")
        assert depth in (0, 1)
        assert not line.startswith("<summary") or (before == "<details>" and after == "")
        assert not line.startswith("</details") or (before == "" and after == "")
        seen += depth == 0 and not line.startswith("</details") or line.startswith("<summary")
    assert seen <= 330 and len(lines) <= 800, (seen, len(lines))
