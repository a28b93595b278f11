"""Tests of docs/first_run.md: its commands run, one after the other, on a model of letters that is made in a moment."""
import json, re, subprocess, types
from pathlib import Path

import numpy as np
import pytest

import examples.rewards
from conftest import ROOT, read_rows, table
from examples.make import tiny

PAGE = (ROOT / "docs/first_run.md").read_text()

def list_commands():
    """-> the lines of its blocks of bash; of a loop all rounds, or the first one if a success ends it."""
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    for line in re.sub(r"\\\n\s*", "", blocks).splitlines():
        loop = re.fullmatch(r"for (\w+) in (.*?); do (.*?)( && break.*)?; done", line)
        if not loop:
            yield line
        else:
            rounds = [loop[3].replace(f"${loop[1]}", value) for value in loop[2].split()]
            yield from rounds[:1] if loop[4] else rounds

def read(image, **_):
    """In the place of an OCR network: a letter for each square, by its brightness."""
    cells = np.asarray(image.convert("L"), float).reshape(32, 5, 32).mean((0, 2))
    return types.SimpleNamespace(txts=["".join([chr(97 + int(cell * 7) % 26) for cell in cells])])

@pytest.fixture
def quick(monkeypatch, small_draft):
    """A model of four steps; quick(line): the line with one or two steps of training."""
    minimize = tiny.minimize
    monkeypatch.setattr(tiny, "minimize", lambda loss, modules, steps, lr: minimize(loss, modules, 4, lr))
    monkeypatch.setattr(examples.rewards, "load_reader", lambda: read)

    def shorten(line):
        line = re.sub(r"--steps 0( \d+)+", "--steps 0 1", line).replace("--steps 20", "--steps 2 --batch-size 2")
        return line + " --steps 1 --batch-size 2" * ("--resume" in line)

    return shorten

def test_all_commands(run, quick):
    """In their order, each with what those before it have made."""
    Path("examples").symlink_to(ROOT / "examples")
    Path("mine.txt").write_text("a red fox\n" + "".join([f'a sign that says "{i}"\n' for i in range(70)]))
    output = ""
    for line in map(quick, list_commands()):
        program = re.fullmatch(r"python (?:-m examples\.)?(grpo(?=\.py)|[\w.]+)(?:\.py)?(?: (.*))?", line)
        if program:
            code, printed, error = run(program[1], program[2] or "")
            assert code == 0, (line, printed, error)
            output += printed
        elif not line.startswith("hf upload"):  # a hub is not here
            subprocess.run(["bash", "-c", line], check=True)
    held_out, train = (Path(name).read_text().splitlines() for name in ("held_out.txt", "train.txt"))
    assert (len(held_out), len({*held_out, *train})) == (24, 70)
    assert re.search(r"spelling: mean .*, std within a prompt .*\nbest and worst: pictures/scores.png", output)
    assert re.search(r"\n150 steps: .* hours, .* in money", output)
    assert re.search(r"tokens +\S+ +95 % interval", output)
    assert [len(read_rows(f"runs/lr{lr}")) for lr in ("5e-5", "5e-4", "5e-3")] == [2, 2, 2]
    assert Path("curve.png").exists() and Path("runs/ocr/evaluation.jsonl").read_text().count("\n") == 2
    assert json.loads(Path("runs/ocr/evaluation.json").read_text())["drawing"]["stock"]

def test_its_arithmetic():
    """Of the night: 150 steps of T + n (D + U + R), and 4 x 96 pictures to evaluate, 32 at a time."""
    _, fast, reward, hours = table(PAGE, "| on an H200 |")
    for i, (T, each, n) in enumerate([(7, 0.44, 32), (7, 0.44, 64), (19, 1.6, 32), (19, 1.6, 64)], 1):
        assert float(fast[i].split()[-1]) == pytest.approx(T + n * each, abs=1) and float(reward[i]) == round(0.7 * n)
        by_hand = (150 * (T + n * (each + 0.7)) + 4 * 3 * T + 4 * 96 * (each + 0.7)) / 3600
        assert [*map(float, hours[i].split(", "))] == pytest.approx([by_hand, 2.5 * by_hand], abs=0.6)
