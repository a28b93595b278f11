"""What made the small models, their pictures and prompts."""
import argparse
from pathlib import Path

def read_folder(doc, default):
    """-> where a maker of models writes, a folder that is not there yet: its only flag."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(default), help="new folder; %(default)s")
    folder = parser.parse_args().out.absolute()
    if folder.exists():
        parser.error(f"--out {folder}: exists already; delete it, or name another folder")
    return folder
