"""A toy that learns from scratch: a template for training a model of your own with grpo.py.

    python -m examples.toy    # from the repository root; about seven seconds without a GPU
    python grpo.py --wrapper examples/toy.py:Toy    # the same

An image has 4 x 4 squares, and each of their 16 codes is one of the eight COLORS. Decoding looks up
the colours. The policy reads the first colour word of a prompt. It starts with random weights, so
every colour is about equally likely, and learns to paint the one that the prompt names.

It takes the flags of grpo.py. Of those for the model only --width and --height have an effect. Its
runs are resumed, drawn from and evaluated like those of GLM-Image.
"""
import re, sys
from pathlib import Path

import torch
from PIL import Image
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo

NAMES = list(grpo.COLORS)  # code k is the colour NAMES[k]
PALETTE = torch.stack(list(grpo.COLORS.values()))  # [V, 3], in 0..1
SIDE = 4  # squares in a row and in a column

def find_word(prompt):
    """The index in NAMES of the first colour word, or len(NAMES) if there is none."""
    words = [word for word in re.findall(r"\w+", prompt.lower()) if word in NAMES]
    return NAMES.index(words[0]) if words else len(NAMES)

class Toy:
    """A wrapper. The comment "To train another kind of model" in grpo.py says what it must have."""
    defaults = dict(
        model="toy", steps=60, group_size=16, micro_batch_size=128, lr=5e-3, warmup_steps=0,
        width=64, height=64)
    lora_layers = r"[13]"  # the two linear layers, by their names in `policy`
    grid = SIDE, SIDE  # rows and columns of the codes; only `generate --change` asks for it

    @classmethod
    def from_pretrained(cls, path, config):
        return cls(path, config)

    def __init__(self, path, config):
        """`path` is the --model. Yours would be loaded from there. The toy's base weights are
        random, but the same in all runs, so that an adapter fits wherever it is drawn with."""
        self.config = config
        torch.manual_seed(0)
        self.policy = nn.Sequential(
            nn.Embedding(len(NAMES) + 1, 64), nn.Linear(64, 64), nn.Tanh(),
            nn.Linear(64, SIDE**2 * len(NAMES)), nn.Unflatten(1, (SIDE**2, len(NAMES))))
        self.policy.requires_grad_(False).to(grpo.DEVICE)

    def encode(self, prompts):
        return torch.tensor([find_word(prompt) for prompt in prompts], device=grpo.DEVICE)

    def compute_all_logprobs(self, prompts):
        """The policy's distribution, shared by sampler and trainer -> [N, T, V]."""
        return self.policy(self.encode(prompts)).log_softmax(2)

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        chances = self.compute_all_logprobs(prompts).exp().cpu()  # [P, T, V]
        groups = []
        for squares, seed in zip(chances, seeds):  # each group has its own random numbers
            rng = torch.Generator().manual_seed(seed)
            drawn = torch.multinomial(squares, group_size, replacement=True, generator=rng)
            groups.append(drawn.T)  # [G, T]
        tokens = torch.cat(groups)  # [N, T]
        logprobs = chances.log().repeat_interleave(group_size, 0).gather(2, tokens[:, :, None])
        repeated = [prompt for prompt in prompts for _ in range(group_size)]
        return grpo.Rollout(repeated, tokens, logprobs.squeeze(2), allowed=None)

    def decode(self, prompts, tokens, seeds):
        size = (self.config.width, self.config.height)
        images = []
        for squares in tokens.view(-1, SIDE, SIDE):
            pixels = (PALETTE[squares] * 255).byte().numpy()
            images.append(Image.fromarray(pixels).resize(size, Image.NEAREST))
        return images

    def compute_logprobs(self, rollout):
        all_logprobs = self.compute_all_logprobs(rollout.prompts)  # [B, T, V]
        entropy = torch.distributions.Categorical(logits=all_logprobs.detach()).entropy()
        tokens = rollout.tokens.to(grpo.DEVICE)
        return all_logprobs.gather(2, tokens[:, :, None]).squeeze(2), entropy

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)  # before the flags
    grpo.main(wrapper=f"{__file__}:Toy")
