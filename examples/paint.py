"""Draws fox.png with trained adapters of both halves in the stock pipeline. Set your own paths.

    pip install peft
    python -m examples.paint"""
import diffusers, peft, torch

pipe = diffusers.GlmImagePipeline.from_pretrained("zai-org/GLM-Image", dtype=torch.bfloat16)
pipe.to("cuda")
pipe.vision_language_encoder.load_adapter("runs/glm-ar/adapter_00300")
peft.PeftModel.from_pretrained(pipe.transformer, "runs/glm-painter/adapter_00300")  # in place
pipe("a red fox", height=512, width=512, guidance_scale=1.0).images[0].save("fox.png")
