"""How the programs here start, and how they end. `python -m examples.evaluate` starts one."""
import argparse, os, sys

def read_flags(doc, add_flags, and_more=False, may_be_bare=False):
    """-> what was typed. If that is nothing, help is shown, unless it `may_be_bare`. A program
    calls this before its imports, which take seconds; `add_flags` gets argparse's `add_argument`,
    and `doc` stands above the flags. With `and_more`, others are grpo.py's: a list, `flags`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_flags(parser.add_argument)
    if len(sys.argv) == 1 and not may_be_bare:
        parser.print_help()
        parser.exit()
    os.environ |= dict(WORLD_SIZE="1", RANK="0")  # it runs alone, also in a job of several machines
    args, args.flags = parser.parse_known_args()
    if args.flags and not and_more:
        parser.error(f"unknown: {' '.join(args.flags)}")
    return args

DRAWING = dict(width=int, height=int, decode_steps=int, guidance=float)

def add_drawing_flags(add):
    """Of what may be drawn otherwise than in training."""
    for name, kind in DRAWING.items():
        add(f"--{name.replace('_', '-')}", type=kind, help="default: as in the run")

def get_drawing_flags(args):
    return {name: getattr(args, name) for name in DRAWING if getattr(args, name) is not None}

def fail(message):
    """Ends the program with one line, as grpo.py does."""
    told = " ".join(str(message).split())
    sys.exit(f"{os.path.basename(sys.argv[0])}: error: {told}")

def start(main, *args):
    """Calls a program's main, and tells in one line what the user gave wrong."""
    try:
        main(*args)
    except KeyboardInterrupt:
        fail("stopped")
    except ValueError as error:
        if type(error).__name__ != "BadInput":  # grpo's, which not all programs import
            raise
        fail(error)
