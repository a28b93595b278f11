"""Edits fox.png with an adapter of edit.py in the stock pipeline. Set your own paths.

    pip install peft
    python -m examples.use_edit"""
import diffusers, torch
from PIL import Image

pipe = diffusers.GlmImagePipeline.from_pretrained("zai-org/GLM-Image", dtype=torch.bfloat16)
policy = pipe.vision_language_encoder
policy.load_adapter("runs/edits/adapter_00100")
# diffusers 0.42 joins the features of the sources, and transformers 5.23 wants them as a list.
policy.get_image_tokens = lambda features, grids: policy.model.get_image_tokens(
    features.unflatten(0, (len(grids), -1)))
pipe.to("cuda")  # on a 24 GB GPU: pipe.enable_model_cpu_offload()
images = pipe("make it snow", image=[Image.open("fox.png")], height=512, width=512).images
images[0].save("snow.png")
