"""GLM-Image in its real sizes, with random weights: what `--model random` of measure.py is."""
import diffusers
import torch
import transformers

import grpo
from examples.make import tiny

V = 16384  # codes
ROTARY = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5,
              mrope_section=(8, 12, 12))

def make_real(device, ar_layers=40, dit_layers=30):
    """GLM-Image in its real sizes with random bf16 weights, made on `device`, left on the CPU. VAE
    and text encoder are taken to be CogView4's and about ByT5 small's."""
    home = "meta" if device == torch.device("meta") else "cpu"
    config = transformers.GlmImageConfig(
        text_config=dict(
            num_hidden_layers=ar_layers, eos_token_id=V + 1, pad_token_id=V + 2,
            rope_parameters=ROTARY, initializer_range=0.04),
        image_start_token_id=V, image_end_token_id=V + 1, image_token_id=V + 4)
    glyphs = transformers.T5Config(
        vocab_size=384, d_model=1472, d_ff=3584, num_layers=12, feed_forward_proj="gated-gelu")
    with torch.device(device), transformers.modeling_utils.local_torch_dtype(torch.bfloat16):
        ar = transformers.GlmImageForConditionalGeneration(config).to(home)
        t5 = transformers.T5EncoderModel(glyphs).to(home)
        dit = diffusers.GlmImageTransformer2DModel(
            num_layers=dit_layers, in_channels=16, out_channels=16,
            prior_vq_quantizer_codebook_size=V, attention_head_dim=128,
            num_attention_heads=32).to(home)
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=(128, 512, 1024, 1024), layers_per_block=3, latent_channels=16,
            latents_mean=[0.0] * 16, latents_std=[1.0] * 16, mid_block_add_attention=False,
            use_quant_conv=False, use_post_quant_conv=False).to(home)
    # Random logits have a std of 2.6. At this temperature it is 3.9, so that some codes stand out.
    ar.generation_config.update(do_sample=True, temperature=0.66, top_p=0.75)
    small = tiny.make_models(grpo.COLORS)
    return diffusers.GlmImagePipeline(
        small.tokenizer, small.processor, t5, ar, vae, dit, small.scheduler)
