"""A logger on the command line: grpo.py with a hook, which sees each row of metrics and its images.
It needs the diff "A hook for a logger" of changes.md in grpo.py, and takes the flags of grpo.py.

    python -m examples.hooked"""
import grpo

def show(row, images):
    images[0].save("latest.png")  # or wandb.log(row)

class HookedTrainer(grpo.GRPOTrainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.hooks.append(show)

if __name__ == "__main__":
    grpo.GRPOTrainer = HookedTrainer  # main looks its trainer up by this name
    grpo.main()
