"""Turns pictures into GLM-Image's codes, by its own vision tower and codebook:

    pipe = diffusers.GlmImagePipeline.from_pretrained(..)
    codes, = encode_images(pipe, [Image.open("fox.png")])  # [height / 32, width / 32]
"""
import torch

import grpo

@torch.no_grad()
def encode_images(pipe, images):
    """PIL images whose sides are multiples of 32 -> a tensor of codes [h, w] for each, on the CPU.
    They are the codes that the stock pipeline makes of a picture to edit."""
    model = pipe.vision_language_encoder.model
    tower = torch.nn.ModuleList([model.visual, model.vqmodel])
    home = model.visual.device
    tower.to(grpo.DEVICE)
    codes = []
    for image in images:
        with grpo.input_errors("a picture", ValueError):  # one that is too small, or too long
            inputs = pipe.processor.image_processor([image.convert("RGB")], return_tensors="pt")
        _, h, w = inputs.image_grid_thw[0].tolist()
        # The image processor enlarges small pictures, and shrinks large ones.
        if (32 * w, 32 * h) != image.size:
            raise grpo.BadInput(
                f"a picture of {image.width} x {image.height} pixels would be seen as one of "
                f"{32 * w} x {32 * h}: change its size to that, or to other multiples of 32")
        inputs = inputs.to(grpo.DEVICE)
        features = model.get_image_features(inputs.pixel_values, inputs.image_grid_thw)
        codes.append(model.get_image_tokens(features.pooler_output).view(h, w).cpu())
    tower.to(home)  # the two halves of the model need the room
    return codes
