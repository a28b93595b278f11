"""Janus-Pro, a smaller model that writes image tokens: for a card of 8 to 12 GB.

    python grpo.py --wrapper examples/janus.py:Janus --reward mine.py:good --prompts mine.txt

--guidance is part of its policy, which draws from softmax(u + guidance * (c - u)): c are the logits
for the prompt, u those for an empty one. The trap: a trainer that scores tokens by c alone has the
log-probs of a policy that did not sample. Here it makes both passes, and both get a gradient.

The size of its images is fixed, whatever --width and --height are. It has no diffusion half.
"""
import diffusers
import torch
import transformers
from PIL import Image

import grpo

class Janus(grpo.GLMImageWrapper):
    """Sampler and trainer are those of GLM-Image, around a `forward` of its own. There, as
    here, ids below V are codes; so a word has the id of the tokenizer + V."""
    lora_layers = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate|up|down)_proj"
    defaults = dict(
        model="deepseek-community/Janus-Pro-1B", lr=2e-5, width=384, height=384, guidance=5.0)

    @classmethod
    def from_pretrained(cls, path, config):
        """Loads a hub id or a folder: in bf16 on a GPU, in fp32 on a CPU."""
        what = f"--model {path}"
        settings, _ = grpo.attempt(what, transformers.JanusConfig.get_config_dict, path)
        if settings.get("model_type") != "janus":  # it would load, with random weights
            raise grpo.BadInput(f"{what}: must be of type janus, as deepseek-community has them")
        processor = grpo.attempt(what, transformers.JanusProcessor.from_pretrained, path)
        policy = grpo.attempt(what, transformers.JanusForConditionalGeneration.from_pretrained,
                              path, dtype=torch.bfloat16 if grpo.CUDA else torch.float32)
        return cls(processor, policy, config)

    def __init__(self, processor, policy, config):
        self.processor = processor
        self.policy = policy.requires_grad_(False)
        self.config = config
        self.V = policy.config.vq_config.num_embeddings
        self.T = policy.config.vq_config.num_patches**2  # codes of an image
        self.on_gpu = torch.nn.ModuleList(  # what only reads pictures stays on the CPU
            [part for name, part in policy.model.named_children()
             if name not in ("vision_model", "aligner")]).to(grpo.DEVICE)
        self.pipe = diffusers.DiffusionPipeline()  # for its progress bar
        self.pipe.set_progress_bar_config(leave=False, disable=None)
        writer = policy.model.language_model.train()
        policy.activation_checkpointing_enable()  # GLMImageWrapper explains these lines
        for name, norm in writer.named_modules():
            if hasattr(norm, "variance_epsilon"):
                fused = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                fused.weight = norm.weight
                writer.set_submodule(name, fused)
        torch.backends.cuda.enable_cudnn_sdp(False)

    def encode(self, prompts):
        """-> ids [N, L]; mask [N, L + T] and places [1, N, L + T], also of the codes to come."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in prompts]
        texts = self.processor.apply_chat_template(chats, add_generation_prompt=True)
        batch = self.processor(text=texts, generation_mode="image", padding=True,
                               padding_side="left", return_tensors="pt").to(grpo.DEVICE)
        mask = torch.nn.functional.pad(batch.attention_mask, (0, self.T), value=1)
        places = mask.cumsum(1) - 1  # padding is not counted
        return batch.input_ids + self.V, mask, places[None]

    def embed(self, ids):
        """[N, n] -> [2 N, n, D], of the prompts, then of empty ones. As in `generate`, an empty
        prompt is padding that is read, between two marks."""
        tokenizer = self.processor.tokenizer
        words = ids - self.V
        is_mark = (words == tokenizer.bos_token_id) | (words == tokenizer.boi_token_id)
        empty = words.where(is_mark, self.policy.generation_config.pad_token_id)
        words = self.policy.get_input_embeddings()(torch.cat([words, empty]).clamp(min=0))
        codes = ids.clamp(max=self.V - 1).repeat(2, 1)
        codes = self.policy.prepare_embeddings_for_image_generation(codes)
        return codes.where((ids < self.V).repeat(2, 1)[..., None], words)

    def forward(self, ids, mask, places, num_last, cache=None):
        """ids [N, n] -> guided logits / temperature of the last places [N, num_last, V]."""
        hidden = self.policy.model.language_model(
            inputs_embeds=self.embed(ids), attention_mask=torch.cat([mask, mask]),
            position_ids=places[0].repeat(2, 1), cache=cache,
            use_cache=cache is not None).last_hidden_state[:, -num_last:]
        c, u = self.policy.model.generation_head(hidden).float().chunk(2)
        logits = u + self.config.guidance * (c - u)
        return logits / (self.config.temperature or self.policy.generation_config.temperature or 1)

    def sample(self, prompts, group_size, seeds):
        """Draws --micro-batch-size images at a time, or a group if that is more. The cache of 8 x 4
        images and their empty prompts takes 19 GiB for the larger model: more than its weights."""
        size = max(1, self.config.micro_batch_size // group_size)  # prompts at a time
        parts = [super(Janus, self).sample(prompts[i:i + size], group_size, seeds[i:i + size])
                 for i in range(0, len(prompts), size)]
        texts, *tensors = zip(*parts)
        return grpo.Rollout(sum(texts, []), *map(torch.cat, tensors))

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        parts = tokens.to(grpo.DEVICE).split(self.config.micro_batch_size)
        pixels = torch.cat([self.policy.decode_image_tokens(part) for part in parts]).float()
        arrays = ((pixels + 1) * 127.5).clamp(0, 255).byte().cpu().numpy()  # it was in -1..1
        return [Image.fromarray(array) for array in arrays]
