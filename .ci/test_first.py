"""Tests of what the README says of its first command, which .ci/run has started."""
import json, os, re
from pathlib import Path

import pytest
from PIL import Image

import grpo
from conftest import table
from test_pages import README, SETTINGS

@pytest.fixture
def first():
    """The README's first command -> its folder, and what it printed. .ci/run names it in FIRST_RUN."""
    assert "\npip install -r requirements.txt && python grpo.py --group-size 4\n" in README
    folder = Path(os.environ.get("FIRST_RUN") or pytest.skip("only with .ci/run"))
    return folder / "runs/seed0", (folder / "printed").read_text()

# Tolerances: step 1 of another processor differs by the tokens that rounding changes, a few of 512. In step 20 the runs
# are as far apart as two seeds are; a single rare token can make the kl of a step jump to 1.
TOLERANCES = {"step": (0, 0), "reward": (0.03, 0.1), "reward_std": (0.03, 0.04), "loss": (1e-6, 0.015),
              "kl": (1e-9, 1.5), "entropy": (0.02, 0.04)}

def test_the_columns_of_the_log(first):
    """What the README prints is what a run prints, and its table has about the same numbers."""
    out, printed = first
    shown, = re.findall(r"^```text\n(model.*?)^```", README, re.DOTALL | re.MULTILINE)
    *heads, first_shown, _, last_shown = shown.splitlines()
    pattern = re.escape(re.sub("<.*>", "...", "\n".join(heads))).replace(re.escape("..."), ".*")
    assert re.search(pattern, printed), printed[:300]
    lines = [line for line in printed.splitlines() if line.startswith("step")]
    rows = table(README, "| column | step 1 |")
    for i, shown, line in ((0, first_shown, lines[0]), (1, last_shown, lines[-1])):
        numbers, in_text = (dict(re.findall(r"(\w+) +(\S+)", each)) for each in (line, shown))
        in_table = {row[0]: row[i + 1].removeprefix("about ") for row in rows}
        assert in_table.keys() < numbers.keys()
        assert float(numbers["sampler_gap"]) < 1e-6  # as settings.md says
        for column, told in [*in_table.items(), *in_text.items()]:
            if column in TOLERANCES:
                assert float(told) == pytest.approx(float(numbers[column]), abs=TOLERANCES[column][i]), column
    told = {row[0].replace("<name>", "color") for row in table(SETTINGS, "| metric |")}
    assert told == json.loads((out / "metrics.jsonl").read_text().splitlines()[0]).keys()

def test_the_stock_pipeline_with_an_adapter(first, tmp_path, monkeypatch):
    """The page's block, here with the adapter of the first command, paints what was learnt."""
    monkeypatch.chdir(tmp_path)
    code, = re.findall(r"^```python notest\n(import diffusers.*?)^```", SETTINGS, re.DOTALL | re.MULTILINE)
    for old, new in {"zai-org/GLM-Image": grpo.TINY_MODEL, "runs/mine/adapter_00100": str(first[0] / "adapter_00020"),
                     "bfloat16": "float32", "512": "128", '"cuda"': '"cpu"'}.items():
        assert old in code
        code = code.replace(old, new)
    exec(code, {})
    reward, = grpo.reward_color([Image.open("fox.png")], ["a red fox"])
    assert reward > 0.9  # it is about 0.73 without the adapter
