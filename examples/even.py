"""A reward for flow.py. It is 1 only for an image that is evenly of the right colour.

    python -m examples.flow --reward examples/even.py:even"""
import re
from PIL import Image, ImageChops, ImageStat
from grpo import COLORS

def even(images, prompts, targets):
    """1 - |pixel colour - first colour named in the prompt|, averaged over all pixels."""
    scores = []
    for image, prompt in zip(images, prompts):
        name = re.search(rf"\b({'|'.join(COLORS)})\b", prompt.lower())[0]
        difference = ImageChops.difference(image, Image.new("RGB", image.size, name))
        scores.append(1 - sum(ImageStat.Stat(difference).mean) / 3 / 255)
    return scores
