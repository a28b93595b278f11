"""Runs grpo.py with a hook that gets each step's row of metrics and its images, such as a logger.
It needs the diff "A hook for a logger" from docs/changes.md, and takes the flags of grpo.py.

    python -m examples.hooked"""
import grpo

def show(row, images):
    images[0].save("latest.png")  # or wandb.log(row)

class HookedTrainer(grpo.GRPOTrainer):
    def __init__(self, *args):
        super().__init__(*args)
        self.hooks.append(show)

if __name__ == "__main__":
    grpo.GRPOTrainer = HookedTrainer  # main uses the trainer of this name
    grpo.main()
