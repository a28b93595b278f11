"""Applies each diff of docs/changes.md to a copy of the tree, runs all tests of grpo.py on it, and prints which of them
fail: those that the commands of the page leave out. Nothing here is a test.

    python .ci/by_design.py               all changes; a suite each, so some minutes each
    python .ci/by_design.py GSPO CISPO    these
    python .ci/by_design.py GSPO+CISPO    these two together
"""
import os, re, shutil, subprocess, sys, tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

def read_changes():
    """{heading: its diffs, each as the lines before and the lines after}."""
    changes = {}
    for section in (ROOT / "docs/changes.md").read_text().split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        for diff in re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            lines = diff.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] != "+")
            after = "".join(line[1:] for line in lines if line[0] != "-")
            changes.setdefault(heading, []).append((before, after))
    return changes

def find_failures(diffs):
    """-> names of the tests that fail in a tree with these diffs."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "runs", "__pycache__"))
        code = (tree / "grpo.py").read_text()
        for before, after in diffs:
            assert code.count(before) == 1, f"in grpo.py {code.count(before)} times:\n{before}"
            code = code.replace(before, after)
        (tree / "grpo.py").write_text(code)
        run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_grpo.py"], cwd=tree,
                             env=os.environ | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True)
    assert run.returncode in (0, 1), run.stdout + run.stderr  # else pytest itself failed
    failures = re.findall(r"^(?:FAILED|ERROR) [^:\s]+::(\w+)", run.stdout, re.MULTILINE)
    return list(dict.fromkeys(failures)), run.stdout.splitlines()[-1]

if __name__ == "__main__":
    changes = read_changes()
    for heading in sys.argv[1:] or changes:
        diffs = [diff for part in heading.split("+") for diff in changes[part]]
        names, summary = find_failures(diffs)
        print(f"{heading}: {', '.join(names) or 'none'} ({summary})", flush=True)
