"""Draws bread.png with an adapter of grpo.py in the stock pipeline. Set your own path.

    pip install peft
    python -m examples.use"""
import diffusers, torch

pipe = diffusers.GlmImagePipeline.from_pretrained("zai-org/GLM-Image", dtype=torch.bfloat16)
pipe.vision_language_encoder.load_adapter("runs/words/adapter_00300")
pipe.to("cuda")  # on a 24 GB GPU: pipe.enable_model_cpu_offload()
pipe('a bakery with a sign "FRESH BREAD"', height=512, width=512).images[0].save("bread.png")
