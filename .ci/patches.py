"""Patches of grpo.py, examples/changes/*.patch: makes each from the diffs of its section in docs/changes.md.

    python .ci/patches.py            rewrites the patches
    python .ci/patches.py --check    changes nothing; exit code 1 if a patch is stale
"""
import difflib, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples/changes"

def change(code, section):
    """The code with the diffs of a section of the page. Lines that the code has not, or has twice, are a ValueError."""
    for diff in re.findall(r"^```diff\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        before, after = (re.sub(rf"^[{sign}].*\n|^.", "", diff, flags=re.MULTILINE) for sign in "+-")
        if code.count(before) != 1:
            raise ValueError(f"these lines are in grpo.py {code.count(before)} times:\n{before}")
        code = code.replace(before, after)
    return code

def make_patches(page, code):
    """{file name: patch}, of the sections with diffs; the `git apply` of a section names the file. One line of context:
    GSPO and clip-higher are two lines apart, and with more context the second of them would not apply."""
    patches = {}
    for section in page.split("\n## ")[1:]:
        if "\n```diff\n" in section:
            name, = re.findall(r"^git apply examples/changes/(\w+\.patch)$", section, re.MULTILINE)
            old, new = (text.splitlines(keepends=True) for text in (code, change(code, section)))
            patches[name] = "".join(difflib.unified_diff(old, new, "a/grpo.py", "b/grpo.py", n=1))
    return patches

if __name__ == "__main__":
    patches = make_patches((ROOT / "docs/changes.md").read_text(), (ROOT / "grpo.py").read_text())
    files = {path.name: path.read_text() for path in FOLDER.glob("*.patch")}
    stale = [name for name in sorted(patches | files) if patches.get(name) != files.get(name)]
    for name in stale:
        print("stale:", name)
        if "--check" not in sys.argv:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / name).write_text(patches[name]) if name in patches else (FOLDER / name).unlink()
    sys.exit("--check" in sys.argv and len(stale) > 0)
