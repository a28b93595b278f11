"""A reward for flow.py: only an evenly painted picture in the right colour has 1.

    python -m examples.flow --reward examples/even.py:even"""
import re
from PIL import Image, ImageChops, ImageStat
from grpo import COLORS

def even(images, prompts, targets):
    """1 - |colour - the first colour that the prompt names|, the mean over all pixels."""
    scores = []
    for image, prompt in zip(images, prompts):
        name = re.search(rf"\b({'|'.join(COLORS)})\b", prompt.lower())[0]
        difference = ImageChops.difference(image, Image.new("RGB", image.size, name))
        scores.append(1 - sum(ImageStat.Stat(difference).mean) / 3 / 255)
    return scores
