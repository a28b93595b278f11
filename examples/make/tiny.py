"""Makes the tiny GLM-Image that `python grpo.py` trains by default, examples/tiny-glm-image.

It uses the real classes, with 0.3 million weights in place of 16 billion. It has eight codes, the
COLORS of grpo.py, and knows eight words, their names. The DiT and VAE are fitted to render a code
as a square of its color. The policy is fitted until it half knows the colors: a square has the
prompt's color with probability .45, or else any other. GRPO teaches it the rest.

    python -m examples.make.tiny    # about five minutes
"""
from examples.make import read_folder

if __name__ == "__main__":
    FOLDER = read_folder(__doc__, "runs/tiny-glm-image")

import json, random

import diffusers, tokenizers, torch, transformers
import torch.nn.functional as F
from PIL import Image

import grpo

SETTINGS = dict(  # of `python grpo.py` when it trains this model
    steps=20, lr=2e-3, warmup_steps=0, micro_batch_size=32, width=128, height=128, decode_steps=1,
    guidance=1.0)

def make_tokenizer(words):
    """It splits a prompt into words as the reward does, and knows these and no others. Word k has
    the id of code k. GLM-Image's marks come after the words."""
    names = "bos eos pad unk image grid_bos grid_eos".split()
    marks = {f"{name}_token": f"<|tiny_{name}|>" for name in names}
    ids = {word: i for i, word in enumerate([*words, *marks.values()])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, marks["unk_token"]))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
        tokenizers.Regex(r"\w+"), behavior="removed", invert=True)
    # Three of the marks are GLM-Image's own, and `transformers` has to be told of them.
    own = {name: marks.pop(name) for name in ("image_token", "grid_bos_token", "grid_eos_token")}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_specific_special_tokens=own, padding_side="left",
        model_input_names=["input_ids", "attention_mask"], **marks)

def make_policy(tokenizer, V, changes):
    """One layer of random weights. Its rotary angles take turns in counting time, rows and columns,
    so that each has fast and slow ones; in GLM-Image's order columns have slow ones only."""
    text_config = dict(
        vocab_size=len(tokenizer), vision_vocab_size=2 * V, initializer_range=0.1,
        num_hidden_layers=1, hidden_size=128, intermediate_size=128, num_attention_heads=2,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0, mrope_section=[2] * 16),
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    # The image encoder, `vision_config` and `vq_config`, is tiny. `fit_vision` makes it usable.
    policy = transformers.GlmImageForConditionalGeneration(transformers.GlmImageConfig(
        text_config=text_config | changes,
        vision_config=dict(depth=0, image_size=32, hidden_size=16),
        vq_config=dict(embed_dim=16, num_embeddings=V, latent_channels=16),
        image_start_token_id=tokenizer.bos_token_id, image_end_token_id=tokenizer.eos_token_id,
        image_token_id=tokenizer.convert_tokens_to_ids(tokenizer.image_token)))
    # As in GLM-Image, there are more outputs than codes. `generate` must not draw the others.
    policy.generation_config.suppress_tokens = list(range(V, 2 * V))
    # LoRA leaves the last layer as it is, so large logits must be within its reach.
    torch.nn.init.constant_(policy.model.language_model.norm.weight, 4.0)
    return policy

def make_models(words, **changes):
    """-> a GlmImagePipeline of random weights, with a code for each word. `changes` are settings of
    the policy in place of those above."""
    V = len(words)
    tokenizer = make_tokenizer(words)
    processor = transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessorPil(), tokenizer,
        chat_template="{{ messages[0].content[0].text }}")
    policy = make_policy(tokenizer, V, changes)
    # A DiT with one block, and a VAE of which only the decoder is used.
    text_encoder = transformers.T5EncoderModel(transformers.T5Config(
        vocab_size=384, num_layers=0, num_heads=1, d_model=8, d_kv=8, d_ff=8))
    dit = diffusers.GlmImageTransformer2DModel(
        num_layers=1, num_attention_heads=2, text_embed_dim=8, time_embed_dim=32, condition_dim=8,
        prior_vq_quantizer_codebook_size=V)
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8] * 4, layers_per_block=0, mid_block_add_attention=False,
        latent_channels=16, norm_num_groups=1, latents_mean=[0.0] * 16, latents_std=[1.0] * 16)
    return diffusers.GlmImagePipeline(
        transformers.ByT5Tokenizer(), processor, text_encoder, policy, vae, dit,
        diffusers.FlowMatchEulerDiscreteScheduler())

def minimize(compute_loss, modules, steps, lr):
    """Adam. The learning rate rises to `lr` in a third of the steps, then falls to 0."""
    weights = list(torch.nn.ModuleList(modules).requires_grad_().parameters())
    optimizer = torch.optim.Adam(weights)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    for step in range(1, steps + 1):
        loss = compute_loss()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.4f}", flush=True)

def fit_painter(wrapper, squares, steps, lr=1e-2, B=8, compare=F.l1_loss):
    """Fits the DiT and VAE to render code k as squares[k]; squares is [V, 3, 32, 32] in 0..1."""
    dit, vae = wrapper.pipe.transformer, wrapper.pipe.vae
    height, width = wrapper.config.height, wrapper.config.width

    def compute_loss():
        # Half of the images have one code, like those of a trained policy; the others have several.
        one = torch.randint(len(squares), (B, 1, 1))
        codes = torch.randint(len(squares), (B, height // 32, width // 32))
        codes = torch.where(torch.rand(codes.shape) < 2 * torch.rand(B, 1, 1), one, codes)
        pictures = squares[codes]  # [B, rows, columns, 3, 32, 32]
        pictures = pictures.permute(0, 3, 1, 4, 2, 5).reshape(B, 3, height, width)
        # One denoising step subtracts the DiT's whole output from the noise. The DiT gets each code
        # as 2 x 2, and quoted words as glyphs, which it learns to ignore.
        patches = codes.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)
        noise = torch.randn(B, 16, height // 8, width // 8)
        size = torch.tensor([[height, width]] * B)
        inputs = dict(
            hidden_states=noise, encoder_hidden_states=torch.randn(B, random.randint(1, 20), 8),
            prior_token_id=patches, prior_token_drop=torch.zeros_like(patches).bool(),
            timestep=torch.full((B,), 999), target_size=size, crop_coords=torch.zeros_like(size))
        inputs = {name: tensor.to(grpo.DEVICE) for name, tensor in inputs.items()}
        latents = inputs["hidden_states"] - dit(**inputs).sample
        return compare(vae.decode(latents).sample, 2 * pictures.to(grpo.DEVICE) - 1)

    minimize(compute_loss, [dit, vae], steps, lr)

def fit_policy(wrapper, draw, chance, steps, lr=5e-3):
    """Fits the policy so that each token of the large grid has its right code with this chance,
    and all others are equally likely. `draw()` returns B prompts and right codes [B, grid]."""
    V = wrapper.pipe.transformer.config.prior_vq_quantizer_codebook_size

    def compute_loss():
        prompts, codes = draw()
        ids, mask, position_ids = wrapper.encode(prompts)
        T = mask.shape[1] - ids.shape[1]
        draft = T - codes.shape[1]
        # The draft is always code 0: it is not decoded, and should add no noise to the rewards.
        chances = torch.zeros(len(prompts), T, V)
        chances[:, :draft, 0] = 1.0
        chances[:, draft:] = (1 - chance) / (V - 1)
        chances[:, draft:].scatter_(2, codes[:, :, None], chance)
        tokens = torch.distributions.Categorical(chances).sample().to(grpo.DEVICE)
        inputs = torch.cat([ids, tokens[:, :-1]], 1)  # as in `compute_logprobs`
        logits = wrapper.forward(inputs, mask[:, :-1], position_ids[..., :-1], T)
        logprobs = logits.log_softmax(2)
        losses = -(chances.to(grpo.DEVICE) * logprobs).sum(2)  # cross entropy [B, T]
        loss = losses[:, draft:].mean()
        return losses[:, :draft].mean() + loss if draft else loss  # the mean of nothing is NaN

    policy = wrapper.policy
    minimize(compute_loss, [policy.model.language_model, policy.lm_head], steps, lr)

@torch.no_grad()
def fit_vision(pipe, squares):
    """Lets the vision tower see squares[k] as code k. Nothing is trained: the codebook's entries
    become what the tower, of random weights, sees in the squares."""
    processor = pipe.processor
    processor.image_processor = transformers.GlmImageImageProcessorPil(
        patch_size=16, temporal_patch_size=1, merge_size=1,
        size=dict(shortest_edge=32**2, longest_edge=2048**2))  # squares of the sides' lengths
    tokenizer = processor.tokenizer
    source = tokenizer.bos_token + tokenizer.image_token + tokenizer.eos_token
    processor.chat_template = (
        "{% for item in messages[0].content %}"
        "{{ '" + source + "' if item.type == 'image' else item.text }}{% endfor %}")
    model = pipe.vision_language_encoder.model
    # A square must look the same wherever it is.
    torch.nn.init.zeros_(model.visual.embeddings.position_embedding.weight)
    images = [Image.fromarray(square) for square in
              (squares * 255).round().byte().movedim(1, 3).numpy()]
    inputs = processor.image_processor(images, return_tensors="pt")
    features = model.get_image_features(inputs.pixel_values, inputs.image_grid_thw)
    seen = model.vqmodel.quant_conv(torch.stack(features.pooler_output))  # [V, 16, 1, 1]
    model.vqmodel.quantize.embedding.weight.copy_(seen.flatten(1))

def draw_color_prompts(B=16):
    """Sentences with one or more colors. The first one counts, as in the reward."""
    names = list(grpo.COLORS)
    prompts, right = [], []
    for _ in range(B):
        named = random.choices(names, k=random.choice([1, 1, 2, 3]))
        words = named + ["unknown"] * random.randint(0, 50)
        random.shuffle(words)
        prompts.append(" ".join(words))
        right.append([next(names.index(word) for word in words if word in names)] * 16)
    return prompts, torch.tensor(right)

def save(model, settings, folder):
    """Writes a model, and what its defaults are for the flags of grpo.py."""
    model.save_pretrained(folder)
    (folder / "grpo.json").write_text(json.dumps(settings, indent=4) + "\n")

def make_folder(folder):
    folder.mkdir(parents=True)
    torch.set_num_threads(1)  # more are hardly faster here

def main(folder):
    make_folder(folder)
    transformers.set_seed(0)
    pipe = make_models(grpo.COLORS)
    wrapper = grpo.GLMImageWrapper(pipe, grpo.Config(**SETTINGS, offload="off"))
    palette = torch.stack(list(grpo.COLORS.values()))  # [V, 3]
    squares = palette[..., None, None].expand(-1, -1, 32, 32)
    fit_painter(wrapper, squares, steps=1600)
    fit_policy(wrapper, draw_color_prompts, chance=0.45, steps=700)
    save(pipe, SETTINGS, folder)

if __name__ == "__main__":
    main(FOLDER)
