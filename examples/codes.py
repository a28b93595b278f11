"""Pictures as input: reads the sources of edits, and turns pictures into GLM-Image's codes.

    from examples.codes import encode_images
    pipe = diffusers.GlmImagePipeline.from_pretrained(..)
    codes, = encode_images(pipe, [Image.open("fox.png")])  # [height / 32, width / 32]
"""
from pathlib import Path

import torch
from PIL import Image

import grpo

def load_prompts(path):
    """Lines `instruction<TAB>source.png` -> prompts `instruction<TAB>path of the source`, and the
    sources, PIL images."""
    if path is None:
        raise grpo.BadInput("--prompts: needs a file of lines `instruction<TAB>source.png`")
    with grpo.input_errors(f"--prompts {path}"):
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    prompts = []
    sources = []
    for number, line in enumerate(lines, start=1):
        instruction, *names = line.strip().split("\t")
        if instruction and not instruction.startswith("#"):
            where = f"--prompts {path}, line {number}"
            if len(names) != 1:
                raise grpo.BadInput(f"{where}: needs one tab and one source, not {len(names)}")
            source = Path(path).parent / names[0]
            with grpo.input_errors(where):
                sources.append(Image.open(source).convert("RGB"))
            if sources[-1].width % 32 or sources[-1].height % 32:
                raise grpo.BadInput(f"{where}: the sides of {source} must be multiples of 32")
            prompts.append(f"{instruction}\t{source}")
    if not prompts:
        raise grpo.BadInput(f"--prompts {path}: has no prompts")
    return prompts, sources

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
        with grpo.input_errors("a picture", ValueError):  # too small or too elongated
            inputs = pipe.processor.image_processor([image.convert("RGB")], return_tensors="pt")
        _, h, w = inputs.image_grid_thw[0].tolist()
        # The image processor enlarges small pictures, and shrinks large ones.
        if (32 * w, 32 * h) != image.size:
            raise grpo.BadInput(
                f"a picture of {image.width} x {image.height} pixels would be seen as one of "
                f"{32 * w} x {32 * h}: change its size to that, or to other multiples of 32")
        inputs = inputs.to(grpo.DEVICE)
        features = model.get_image_features(inputs.pixel_values, inputs.image_grid_thw)
        # `pooler_output` has a feature for each patch, despite its name.
        codes.append(model.get_image_tokens(features.pooler_output).view(h, w).cpu())
    tower.to(home)  # the two halves of the model need the room
    return codes

def repeat_codes(codes):
    """[N, h, w] -> [N, 2 * h, 2 * w]: the DiT wants each code as 2 x 2."""
    return codes.repeat_interleave(2, 1).repeat_interleave(2, 2)
