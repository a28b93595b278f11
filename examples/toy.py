"""A toy that learns from scratch: a template for training a model of your own with grpo.py.

    python grpo.py --wrapper examples/toy.py:Toy    # some seconds without a GPU

An image has 4 x 4 squares, and each of their 16 codes is one of the eight COLORS. Decoding looks up
the colors. The policy reads the first color word of a prompt. It starts with random weights, so
every color is about equally likely, and learns to paint the one that the prompt names.

Of the flags for the model only --width and --height have an effect. Runs are resumed, drawn from
and evaluated like those of GLM-Image.
"""
import re

import torch
from PIL import Image
from torch import nn

import grpo

NAMES = list(grpo.COLORS)  # code k is the color NAMES[k]
PALETTE = torch.stack(list(grpo.COLORS.values()))  # [V, 3], in 0..1
SIDE = 4  # squares in a row and in a column

def find_word(prompt):
    """The index in NAMES of the first color word, or len(NAMES) if there is none."""
    words = [word for word in re.findall(r"\w+", prompt.lower()) if word in NAMES]
    return NAMES.index(words[0]) if words else len(NAMES)

class Toy:
    """A wrapper. The comment above `Rollout` in grpo.py says what one must have."""
    defaults = dict(
        model="toy", steps=60, group_size=16, micro_batch_size=128, lr=5e-3, warmup_steps=0,
        width=64, height=64)
    lora_layers = r"[13]"  # the two linear layers, by their names in `policy`

    @classmethod
    def from_pretrained(cls, path, config):
        """`path` is the --model. Yours would be loaded from there. The toy's base weights are
        random, but the same in all runs, so that an adapter fits wherever it is drawn with."""
        torch.manual_seed(0)
        return cls(config)

    def __init__(self, config):
        self.config = config
        self.policy = nn.Sequential(
            nn.Embedding(len(NAMES) + 1, 64), nn.Linear(64, 64), nn.Tanh(),
            nn.Linear(64, SIDE**2 * len(NAMES)), nn.Unflatten(1, (SIDE**2, len(NAMES))))
        self.policy.to(grpo.DEVICE)

    def compute_all_logprobs(self, prompts):
        """The policy's distribution, shared by sampler and trainer -> [N, T, V]."""
        words = torch.tensor([find_word(prompt) for prompt in prompts], device=grpo.DEVICE)
        return self.policy(words).log_softmax(2)

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        all_logprobs = self.compute_all_logprobs(prompts).cpu()  # [N, T, V]
        groups = []
        for group, seed in zip(all_logprobs.split(group_size), seeds):
            rng = torch.Generator().manual_seed(seed)  # each group has its own random numbers
            groups.append(torch.multinomial(group.exp().flatten(0, 1), 1, generator=rng))
        tokens = torch.cat(groups).view(len(prompts), -1)  # [N, T]
        logprobs = all_logprobs.gather(2, tokens[:, :, None]).squeeze(2)
        return grpo.Rollout(prompts, tokens, logprobs, allowed=None)

    def decode(self, prompts, tokens, seeds):
        size = (self.config.width, self.config.height)
        pixels = (PALETTE[tokens.view(-1, SIDE, SIDE)] * 255).byte().numpy()
        return [Image.fromarray(image).resize(size, Image.NEAREST) for image in pixels]

    def compute_logprobs(self, rollout):
        all_logprobs = self.compute_all_logprobs(rollout.prompts)  # [B, T, V]
        entropy = torch.distributions.Categorical(logits=all_logprobs.detach()).entropy()
        tokens = rollout.tokens.to(grpo.DEVICE)
        return all_logprobs.gather(2, tokens[:, :, None]).squeeze(2), entropy
