"""How the programs here start, and how they end. `python -m examples.evaluate` starts one."""
import argparse, os, sys

def read_flags(doc, add_flags):
    """-> what was typed. A program calls this before its imports, which take seconds; `add_flags`
    gets argparse's `add_argument`, and `doc` stands above the flags."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_flags(parser.add_argument)
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    os.environ |= dict(WORLD_SIZE="1", RANK="0")  # it runs alone, also in a job of several machines
    return parser.parse_args()

def start(main, *args):
    """Calls a program's main. Something wrong that the user gave is one line, as in grpo.py."""
    import grpo
    try:
        main(*args)
    except (grpo.BadInput, KeyboardInterrupt) as error:
        sys.exit(f"{os.path.basename(sys.argv[0])}: error: {str(error) or 'stopped'}")
