"""Tests of README.md and docs/figures.md: their code and commands are run, what they say of grpo.py is true, and
the links of all pages hold."""
import dataclasses, json, logging, os, re, subprocess, sys, warnings
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests compare with tensors on the CPU

HERE = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HERE), str(HERE / ".ci")]

import pytest, torch
import numpy as np
from PIL import Image

import grpo, links, measure
from test_pages import (
    ENV, FILES, MODEL, PIPES, SMALL, command, finished, load_module, make_trainer, quick, rows_of, table)

warnings.filterwarnings("ignore", category=pytest.PytestUnknownMarkWarning)
pytestmark = pytest.mark.readme
PAGES = {path: path.read_text() for path in [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]}
README = PAGES[HERE / "README.md"]
FIGURES = PAGES[HERE / "docs/figures.md"]
FIELDS = {"--" + field.name.replace("_", "-"): field for field in dataclasses.fields(grpo.Config)}

def flat(page):
    """The page with all white space as single spaces."""
    return re.sub(r"\s+", " ", page)

# --- The page ------------------------------------------------------------------------------------------------
def test_the_readme_is_short():
    """It has grown past what anybody reads once before; a wide command is cut off at the right on GitHub."""
    lines = README.splitlines()
    words = len(README.split())
    assert len(lines) <= 230 and words <= 2000, (len(lines), words)
    assert "<details>" not in README and "awk" not in README
    for block in re.findall(r"^```(?:bash|python)\n(.*?)^```", README, re.DOTALL | re.MULTILINE):
        assert max(map(len, block.splitlines())) <= 95, block
    first_commands = re.search(r"^```bash\n(.*?)^```", README, re.DOTALL | re.MULTILINE)[1]
    assert max(map(len, first_commands.splitlines())) <= 80

def anchors_of(page):
    """What GitHub makes of the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}

@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_hold(path):
    """A renamed heading, a page that has moved and a picture that is not there make dead links, without a word."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", PAGES[path]):
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors_of(PAGES[linked]), target

@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_to_lines_hold(path):
    """Links to lines of grpo.py go stale with the first line that is added above them: `python .ci/links.py` mends them."""
    assert PAGES[path].count(".py#L") == len(links.LINK.findall(PAGES[path])), "a link names in backticks what is there"
    assert links.update(PAGES[path]) == PAGES[path]

def test_links_to_lines_are_found():
    """A name that is there twice, or not at all, is an error, not a guess."""
    page = links.update("[`train_step`](../grpo.py#L1) and [`Rollout.part`](grpo.py#L2)")
    lines = (HERE / "grpo.py").read_text().splitlines()
    first, second = map(int, re.findall(r"#L(\d+)", page))
    assert "def train_step(" in lines[first - 1] and "def part(" in lines[second - 1]
    for name in ("__init__", "gone"):
        with pytest.raises(KeyError, match=name):
            links.update(f"[`{name}`](grpo.py#L1)")

def test_all_flags_are_told_with_their_defaults():
    """A default that was changed in grpo.py alone would mislead; so would a flag that is gone."""
    tables = [*table(README, "| flag | default"), *table(FIGURES, "| flag | default")]
    told = {row[0].strip("`"): row[1].replace("`", "") for row in tables}
    assert sorted(row[0].strip("`") for row in tables) == sorted(FIELDS)  # each once
    others = set("--help --index-url --nproc-per-node --nnodes --rdzv-endpoint".split())
    for page in (README, FIGURES):
        named = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", page))
        assert named <= FIELDS.keys() | others, named - FIELDS.keys() - others
    in_words = {"--model", "--adapter", "--out", "--prompts", "--resume", "--temperature", "--top-p"}
    for flag in FIELDS.keys() - in_words:
        default = FIELDS[flag].default
        assert type(default)(told[flag]) == default, flag
    assert FIELDS["--temperature"].default is FIELDS["--top-p"].default is None
    assert told["--temperature"].startswith("the model's own") and told["--top-p"].startswith("the model's own")
    assert {flag: told[flag] for flag in ("--adapter", "--resume")} == {"--adapter": "", "--resume": ""}

def test_the_settings_of_the_small_model():
    """What the README says of its grpo.json; and the weights are as many as it says."""
    sentence = re.search(r"that of the small GLM-Image sets (.*?)\. `python", flat(README))[1]
    told = {name.replace("-", "_"): float(value) for name, value in re.findall(r"--([a-z-]+) (\S+?)`", sentence)}
    assert told == json.loads((HERE / "examples/tiny-glm-image/grpo.json").read_text())
    wrapper = grpo.GLMImageWrapper.from_pretrained(
        HERE / "examples/tiny-glm-image", grpo.Config(offload="off"))
    weights = sum(p.numel() for part in wrapper.pipe.components.values() if isinstance(part, torch.nn.Module)
                  for p in part.parameters())
    assert f"{weights / 1e6:.1f} million weights instead of 16 billion" in flat(README)

# --- Commands and blocks of code -----------------------------------------------------------------------------
def commands():
    """Of grpo.py, on both pages, inline ones too."""
    found = re.findall(r"(?:python|torchrun\b.*?) grpo\.py\b([^`#\n]*)", README + FIGURES)
    return sorted({line.strip() for line in found})

def test_commands_run(tmp_path, command):
    """Every flag of every command of grpo.py is understood, and a small model does a step with it."""
    for name in ("examples", "prompts.txt"):
        Path(name).symlink_to(HERE / name)
    lines = commands()
    assert len(lines) >= 8
    lines.sort(key=lambda line: "RUN" in line)  # what is resumed comes last
    for i, line in enumerate(lines):
        typed = re.sub(r"--(model|out|batch-size) \S+", "", line).replace("RUN", "run0").replace("$seed", "1")
        ends = "--steps 2" if "--resume" in line else " ".join([*SMALL, "--steps", "1", "--out", f"run{i}"])
        if "--adapter" in line:
            typed = typed.replace("adapter_00010", "adapter_00001")
        code, _, error = command(*typed.split(), *ends.split())
        assert code == 0, (line, error)

def test_resume_and_adapter_of_the_readme(tmp_path, command):
    """What the two flags are said to keep, to refuse and to begin with."""
    words = flat(README)
    kept = "The model, prompts, batch size, LoRA rank, seed and initial adapter cannot change."
    assert kept in words and "given by `--out`, which must not exist yet" in words
    assert command(*SMALL, "--steps", "1", "--out", "RUN")[0] == 0
    refused = "--batch-size 4, --lora-rank 8, --seed 5, --out RUN2, --adapter RUN/adapter_00001, --model RUN"
    for flag in refused.split(", "):
        code, _, error = command(*"--resume RUN --steps 2".split(), *flag.split())
        assert code == 2 and error.count("\n") == 1, flag
    code, _, error = command(*SMALL, "--out", "RUN")
    assert code == 2 and "new folder" in error
    assert command(*"--resume RUN --steps 2 --lr 1e-5".split())[0] == 0
    assert [row["step"] for row in rows_of("RUN")] == [1, 2]
    assert command(*SMALL, *"--steps 1 --adapter RUN/adapter_00002 --out NEW".split())[0] == 0
    assert rows_of("NEW")[0]["kl"] > 0  # it counts from the untrained model

def test_own_reward_of_the_readme(tmp_path, command):
    """What a user copies first must run, count as much as its weight says, and tell two pictures apart."""
    Path("examples").symlink_to(HERE / "examples")
    flags, = re.findall(r"--reward \S*sharp\S*", README)
    assert command(*SMALL, *flags.split(), "--steps", "1", "--out", "run")[0] == 0
    row = rows_of(tmp_path / "run")[0]
    assert 0 < row["reward/examples/sharp.py:sharpness"] < 1
    assert row["reward"] == pytest.approx(row["reward/color"] + 5 * row["reward/examples/sharp.py:sharpness"])
    line, = re.findall(r"^python -c 'import grpo.*?'$", README, re.DOTALL | re.MULTILINE)
    noise = np.random.default_rng(0).integers(255, size=(40, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save("good.png")
    Image.new("RGB", (64, 40), "red").save("bad.png")
    env = ENV | dict(PYTHONPATH=str(HERE))
    printed = subprocess.check_output(line, shell=True, text=True, env=env)
    good, bad = json.loads(printed)
    assert good > 0 == bad

def test_use_of_the_readme(tmp_path, monkeypatch):
    """The adapter, once back in the stock pipeline, must give the policy that was trained, not the base."""
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(lora_rank=4, out="run")
    wrapper = trainer.wrapper
    rollout = wrapper.generate_with_tracking(["a red fox", "green"], 1, [0, 1])
    base, _ = wrapper.compute_logprobs(rollout)
    torch.manual_seed(5)
    for weight in trainer.lora.weights.values():
        weight.data.add_(0.1 * torch.randn_like(weight))
    expected, _ = wrapper.compute_logprobs(rollout)
    assert (base - expected).abs().max() > 0.01
    trainer.lora.save(Path("adapter_00100"))
    code = re.sub(r"runs/[\w-]+/adapter_\d+", "adapter_00100", FILES["use.py"])
    for old, new in {"zai-org/GLM-Image": MODEL, "bfloat16": "float32", "512": "64", '.to("cuda")': '.to("cpu")'}.items():
        assert old in code
        code = code.replace(old, new)
    loaded = grpo.GLMImageWrapper(load_module(code, "use").pipe, trainer.config)
    got, _ = loaded.compute_logprobs(rollout)
    assert (got - expected).abs().max() < 1e-4
    assert Image.open("bread.png").size == (64, 64)

def test_ends_and_the_curve(finished, tmp_path, monkeypatch, capsys):
    """What ends.py prints of a run is the means of its ends; curve.py draws each run that is named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ends.py", str(finished)])
    load_module(FILES["ends.py"], "ends")
    rewards = [row["reward"] for row in rows_of(finished)]
    line = f"reward: first five steps {np.mean(rewards[:5]):.3f}, last five {np.mean(rewards[-5:]):.3f}"
    printed = capsys.readouterr().out.splitlines()
    assert line in printed and len(printed) == 2 and printed != [line] * 2
    matplotlib = pytest.importorskip("matplotlib", reason="pip install matplotlib")
    matplotlib.use("agg")
    monkeypatch.setattr(sys, "argv", ["curve.py", str(finished), str(finished)])
    curve = load_module(FILES["curve.py"], "curve")
    lines = curve.plt.gca().lines
    assert [list(line.get_ydata()) for line in lines] == [rewards, rewards]
    assert Image.open("curve.png").size == Image.open(HERE / "docs/curve.png").size

def test_ends_of_a_run_with_another_reward(tmp_path, monkeypatch, capsys):
    """After a resume with another reward rows have other keys, which was a KeyError. A mean is over the rows that have it."""
    rows = [dict(step=step, reward=step, reward_std=0) | {"reward/old" if step < 3 else "reward/new": step * 10}
            for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sys, "argv", ["ends.py", str(tmp_path)])
    load_module(FILES["ends.py"], "ends")
    assert capsys.readouterr().out.splitlines() == [
        "reward: first five steps 3.000, last five 6.000",
        "reward/old: first five steps 15.000, last five 15.000",
        "reward/new: first five steps 50.000, last five 60.000"]

def price(added, removed):
    """What a diff costs, in the words of the table: "10 added, 1 replaced"."""
    replaced = min(added, removed)
    counts = dict(added=added - replaced, replaced=replaced, removed=removed - replaced)
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n)

def test_prices_of_the_readme():
    """The lines that a change costs are those of its diffs on the page of changes."""
    changes = PAGES[HERE / "docs/changes.md"]
    prices = {}
    for section in re.split(r"^## ", changes, flags=re.MULTILINE)[1:]:
        diffs = "".join(re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE))
        minus, plus = (len(re.findall(rf"^[{sign}]", diffs, re.MULTILINE)) for sign in "-+")
        if diffs:
            prices[section.splitlines()[0].lower()] = price(plus, minus)
    told = {}
    for name, lines in table(README, "| change | lines of"):
        if not lines.startswith("none"):
            told[re.sub(r"[`\[\]]|\(.*?\)|:.*", "", name).strip().lower()] = lines
    assert told == prices and len(prices) == 9  # changes.md counts them

# --- Speed ---------------------------------------------------------------------------------------------------
def test_the_arithmetic_of_speed():
    """Sums of the columns, and what the README quotes of them."""
    *parts, step, hours = table(FIGURES, "| seconds | at 512 |")
    for column in (1, 2):
        assert sum(int(row[column]) for row in parts) == int(step[column])
        assert round(100 * int(step[column]) / 3600) == int(hours[column])
    assert f"take {step[1]} seconds on an H100 at 512 x 512, and {step[2]} at 1024 x 1024" in flat(README)
    assert f"so 100 steps would take {hours[1]} and {hours[2]} hours" in flat(README)
    changes = table(FIGURES, "| change | at 512 |")
    for (steps, passes, scale), row in zip([(20, 2, 1), (10, 2, 1), (20, 1, 1), (10, 1, 1), (20, 2, 9 / 16), (20, 2, 1)],
                                           changes, strict=True):
        for side, told in zip((512, 1024), row[1:3]):
            n = scale * (side // 16) ** 2  # patches
            flop = 2 * 7e9 * n + 30 * 4 * n**2 * 4096  # of the weights; of 30 blocks' attention
            assert abs(32 * steps * passes * flop / 400e12 - int(told)) < 1, row
    assert changes[0][1:3] == parts[1][1:3]
    least, launching = 2 * 7e9 * 1024 / 400e9, 7e-3 * 1771  # milliseconds
    assert f"a pass takes {least:.0f} ms or more, launching it {launching:.0f}" in changes[-1][3]

def once(function):
    """The function, which is run the first time only: here it need not be measured, only work."""
    answers = []

    def answer(*args):
        if not answers:
            answers.append(function(*args))
        return answers[0]

    return answer

@pytest.mark.skipif("SLOW" not in os.environ, reason="takes half a minute: SLOW=1 runs it")
def test_the_other_measurements_run(monkeypatch, capsys):
    """bench, ablate and depth, on small models: they run, and have the rows that the page shows."""
    monkeypatch.setattr(measure, "make_real", None)
    parse = grpo.parse_args
    monkeypatch.setattr(grpo, "parse_args", lambda argv: dataclasses.replace(
        parse(argv), width=64, height=64, steps=5 if "--model" in argv else 1))
    monkeypatch.setattr(logging.getLogger("transformers"), "level", logging.ERROR)
    monkeypatch.setattr(measure, "stock_seconds", once(measure.stock_seconds))
    line, = re.findall(r"^python \.ci/measure\.py bench (--model random.*)", FIGURES, re.MULTILINE)
    with pytest.raises(SystemExit, match="2"):
        measure.bench(line.split())  # whose weights would fill the host
    assert "it needs a GPU" in capsys.readouterr().err
    line = line.replace("random", MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(measure, "range", lambda *ends: range(*ends) if ends[1:] else range(min(ends[0], 2)), raising=False)  # repeats
        measure.bench([*line.split(), *"--guidance 1 --decode-steps 1".split()])
    names = list(measure.ABLATIONS)
    assert [row[0] for row in table(FIGURES, "| | seed 0 |")] == names[:len(table(FIGURES, "| | seed 0 |"))]
    for name in names[3:]:
        monkeypatch.delitem(measure.ABLATIONS, name)
    measure.ablate([0])
    settings = [tuple(json.loads(cell) for cell in row[:3]) for row in table(FIGURES, "| layers | init |")]
    assert settings == measure.DEPTHS
    monkeypatch.setattr(measure, "DEPTHS", [(2, 0.04, 32)])
    measure.depth()
    printed = capsys.readouterr().out
    groups = [row[0] for row in table(FIGURES, "| group | stock rollout / ours |")]
    assert re.findall(r"^\| (\d+) \|", printed, re.MULTILINE) == groups
    assert re.findall(r"^\| (.*?) \| \d", printed.split("| | seed 0")[1], re.MULTILINE) == names[:3]
    cells = printed.splitlines()[-1].split("|")
    assert float(cells[6]) == 0 and float(cells[5]) < 1e-4  # a second pass over unmoved weights; fp32

# --- The log -------------------------------------------------------------------------------------------------
# The log and the memory come last: what they wait for runs beside the tests before them.
@pytest.fixture(scope="session", autouse=True)
def started(request, tmp_path_factory):
    """The README's first command, with every default: it runs beside all tests before those that look at it, unless
    FIRST_RUN is the folder of that of test_grpo.py."""
    if not any("run" in item.fixturenames for item in request.session.items):
        yield
        return
    line, = re.findall(r"^python (grpo\.py .*)", README.split("```bash")[1], re.MULTILINE)
    assert line == "grpo.py --group-size 4"  # as in test_grpo.py
    if "FIRST_RUN" in os.environ:
        yield None, Path(os.environ["FIRST_RUN"], "out")
        return
    folder = tmp_path_factory.mktemp("first")
    argv = [sys.executable, *line.replace("grpo.py", f"{HERE}/grpo.py").split(), "--out", "out"]
    with subprocess.Popen(argv, cwd=folder, env=ENV, **PIPES) as process:
        yield process, folder / "out"
        process.kill()

@pytest.fixture(scope="session")
def run(started):
    """Folder, and what was printed."""
    process, out = started
    if process is None:
        return out, (out.parent / "printed").read_text()
    printed, error = process.communicate(timeout=300)
    assert process.returncode == 0 and "arning" not in error, error
    return out, printed

# Tolerances: step 1 of another processor differs by the tokens that rounding changes, a few of 512. In step 20 the runs are
# as far apart as two seeds are; a single rare token can make the kl of a step jump to 1.
TOLERANCES = {"reward": (0.03, 0.1), "reward_std": (0.03, 0.04), "kl": (1e-9, 1.5), "entropy": (0.02, 0.04)}

def test_the_columns_of_the_log(run):
    """The table has the very columns that a run prints, in order, with two digits that a second machine meets."""
    out, printed = run
    lines = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    rows = table(README, "| column | step 1 |")
    assert ["step", *(row[0].strip("`") for row in rows)] == lines[0][::2]
    shown = re.findall(r"^step (\d+) +reward (\S+) ", README, re.MULTILINE)  # below the first command
    assert [(step, f"{float(reward):.2f}") for step, reward in shown] == [("1", rows[0][1]), ("20", rows[0][2])]
    for column, line in ((1, lines[0]), (2, lines[-1])):
        assert rows_of(out)[int(line[1]) - 1]["step"] == (1, 20)[column - 1]
        for row, number in zip(rows, map(float, line[3::2])):
            name = row[0].strip("`")
            if name in TOLERANCES:
                assert float(row[column]) == pytest.approx(number, abs=TOLERANCES[name][column - 1]), name
            elif name == "sampler_gap_max":
                assert number < 1e-3  # the bound of figures.md
            digits = row[column].split("e")[0].replace(".", "").lstrip("0")
            assert row[column] == "about 0" or len(digits) <= 2, row

def test_all_metrics_are_told(run):
    """A row for each metric of a run, and none that is gone."""
    out, _ = run
    told = {row[0].strip("`").replace("<name>", "color") for row in table(FIGURES, "| metric |")}
    assert told == rows_of(out)[0].keys() | {"seconds"}  # which rows_of leaves out

def test_nine_seeds(run):
    """Means and spreads add up, on both pages, and seed 0 does here what it did there."""
    out, _ = run
    seeds = table(FIGURES, "| seed | 0 |")
    choices = table(FIGURES, "| | seed 0 |")
    assert len(seeds[0]) == 1 + 9 + 2 and choices[0][1:4] == seeds[1][1:4]
    for row in [*seeds, *choices]:
        *values, mean, std = map(float, row[1:])
        assert [mean, std] == pytest.approx([np.mean(values), np.std(values, ddof=1)], abs=0.0012)
    (*_, first, _), (*_, last, _) = seeds
    assert f"from {first} over the first five steps to {last} over the last five" in flat(README)
    rewards = [row["reward"] for row in rows_of(out)[:20]]  # test_grpo.py goes on for a step
    measured = np.mean(rewards[:5]), np.mean(rewards[-5:])
    assert measured == pytest.approx([float(row[1]) for row in seeds], abs=0.06)

# --- Memory --------------------------------------------------------------------------------------------------
COUNTED = range(6) if "SLOW" in os.environ else (1, 2, 4)  # rows: that of the kernels, and the two that the README quotes

@pytest.fixture(scope="session", autouse=True)
def counted(request):
    """`python .ci/measure.py memory` takes a minute: it runs beside the other tests."""
    if not any(item.name == "test_the_table_of_memory" for item in request.session.items):
        yield
        return
    argv = [sys.executable, HERE / ".ci/measure.py", "memory", *map(str, COUNTED)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=ENV) as process:
        yield process
        process.kill()

def test_the_table_of_memory(counted):
    """Counted anew: rows, what the host holds, and what the README quotes of it."""
    printed, _ = counted.communicate(timeout=600)
    assert counted.returncode == 0
    rows = table(FIGURES, "| size | prompts x group |")
    _, (_, *kernels) = table(FIGURES, "| | kernels per token |")  # before, now
    told = [f"| {' | '.join(row)} |" for row in [*(rows[k] for k in COUNTED), kernels]]
    assert re.findall(r"^\| \d.*", printed, re.MULTILINE) == told
    per_token, per_pass, per_micro_batch = kernels
    assert [int(count.replace(",", "")) // 100 for count in (per_token, per_micro_batch)] <= [23, 109]
    sample, *_ = table(FIGURES, "| seconds | at 512 |")
    milliseconds = round(7e-3 * int(per_token.replace(",", "")))
    assert sample[1:3] == [f"{T * milliseconds / 1000:.0f}" for T in (512, 1280)]
    assert f"tokens at {milliseconds} ms each ({per_token} kernels)" in sample[3]
    head = printed.split("\n")[0]
    for number in ("16.6", "14.1", "32.9"):
        assert number in head and number in FIGURES
    quoted = table(README, "| estimated peak memory, in GiB |")
    for row in rows[:5]:  # 8 x 4 images and fewer, with offloading, fit a card of 24 GB, and are more than the weights
        sample, decode, update = (float(cell.split(" / ")[0]) for cell in row[3:])
        assert 16.6 < sample <= 22 and 14.1 + 1.0 < decode <= 22 and 16.6 + 1.4 < update <= 22, row
    for column, line in ((1, rows[2]), (2, rows[4])):
        pairs = [cell.split(" / ") for cell in line[3:]]
        least, most = (max(float(pair[k]) for pair in pairs) for k in (0, 1))
        assert [float(quoted[0][column]), float(quoted[1][column])] == [least, most]
    assert quoted[2][1:] == [f"{32.9 + nuclei:.0f}" for nuclei in (0, 3 * 0.6)]
