"""Links such as [`train_step`](grpo.py#L203) in README.md and docs/*.md: puts in the lines where these names are.

    python .ci/links.py            rewrites the pages
    python .ci/links.py --check    changes nothing; exit code 1 if a link is stale
"""
import ast, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[`([\w.]+)`\]\(((?:\.\./)?([\w/]+\.py))#L(\d+)\)")

def find_lines(file):
    """{name of a function or class, and `Class.method`: its line}; a name that is there twice has none."""
    lines = {}

    def add(name, line):
        lines[name] = None if name in lines else line

    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            add(node.name, node.lineno)
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(method, ast.FunctionDef):
                add(method.name, method.lineno)
                add(f"{node.name}.{method.name}", method.lineno)
    return lines

def update(page):
    """The page with the lines of today. A name that the file has not, or has twice, is a KeyError."""
    def replace(link):
        name, path, file, _ = link.groups()
        line = find_lines(file).get(name)
        if line is None:
            raise KeyError(f"{file} has no {name}, or more than one: write Class.{name}")
        return f"[`{name}`]({path}#L{line})"

    return LINK.sub(replace, page)

if __name__ == "__main__":
    stale = [path for path in PAGES if update(path.read_text()) != path.read_text()]
    for path in stale:
        print("stale:", path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.write_text(update(path.read_text()))
    sys.exit("--check" in sys.argv and len(stale) > 0)
