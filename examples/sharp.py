"""An example of a reward: sharpness. It also shows how a model can hack its reward.

    python grpo.py --steps 5 --reward examples/sharp.py:sharpness=5,color=1"""
from grpo import pil_to_tensor

def sharpness(images, prompts, targets):
    """How much neighbouring pixels differ."""
    scores = []
    for image in images:
        pixels = pil_to_tensor([image])  # [1, 3, H, W]
        down = pixels.diff(dim=2).abs().mean()
        right = pixels.diff(dim=3).abs().mean()
        scores.append((down + right).item())
    return scores
