"""GRPO for Janus-Pro, a smaller model that writes image tokens: for a card of 8 to 12 GB.

    python -m examples.janus --reward mine.py:good --prompts mine.txt

--guidance is part of its policy, which draws from softmax(u + guidance * (c - u)): c are the logits
for the prompt, u those for an empty one. The trap: a trainer that scores tokens by c alone has the
log-probs of a policy that did not sample. Here it makes both passes, and both get a gradient.
"""
import sys
from pathlib import Path

import torch
import transformers
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo

class Janus:
    """A wrapper as grpo.py asks for. A batch has 2 N rows: N prompts, then N empty ones."""
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
        vq = transformers.JanusConfig.from_dict(settings).vq_config
        side = vq.num_patches * 2 ** (len(vq.channel_multiplier) - 1)
        if (config.width, config.height) != (side, side):
            raise grpo.BadInput(f"--width and --height: this model draws {side} x {side} pixels")
        processor = grpo.attempt(what, transformers.JanusProcessor.from_pretrained, path)
        policy = grpo.attempt(what, transformers.JanusForConditionalGeneration.from_pretrained,
                              path, dtype=torch.bfloat16 if grpo.CUDA else torch.float32)
        return cls(processor, policy, config)

    def __init__(self, processor, policy, config):
        self.processor = processor
        self.policy = policy.requires_grad_(False)
        self.config = config
        self.own = policy.generation_config
        self.T = policy.config.vq_config.num_patches**2  # codes of an image
        self.on_gpu = torch.nn.ModuleList(  # what only reads pictures stays on the CPU
            [part for name, part in policy.model.named_children()
             if name not in ("vision_model", "aligner")]).to(grpo.DEVICE)
        writer = policy.model.language_model.train()
        policy.activation_checkpointing_enable()  # TwoHalves in grpo.py explains these lines
        for name, norm in writer.named_modules():  # one kernel in the place of seven
            if hasattr(norm, "variance_epsilon"):
                fused = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                fused.weight = norm.weight
                writer.set_submodule(name, fused)
        torch.backends.cuda.enable_cudnn_sdp(False)

    def encode(self, prompts):
        """-> embeddings [2 N, L, D]; mask and places [2 N, L + T], also of the codes to come."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in prompts]
        texts = self.processor.apply_chat_template(chats, add_generation_prompt=True)
        batch = self.processor(text=texts, generation_mode="image", padding=True,
                               padding_side="left", return_tensors="pt").to(grpo.DEVICE)
        # As in `generate`, an empty prompt is padding that is read, between two marks.
        marks = [self.processor.tokenizer.bos_token_id, self.processor.tokenizer.boi_token_id]
        is_mark = torch.isin(batch.input_ids, torch.tensor(marks).to(grpo.DEVICE))
        empty = batch.input_ids.where(is_mark, self.own.pad_token_id)
        mask = torch.nn.functional.pad(batch.attention_mask.repeat(2, 1), (0, self.T), value=1)
        places = mask.cumsum(1) - 1  # padding is not counted
        return self.policy.get_input_embeddings()(torch.cat([batch.input_ids, empty])), mask, places

    def embed(self, codes):
        """[N, n] -> [2 N, n, D]. A code is no token id, but has an embedding of its own."""
        return self.policy.prepare_embeddings_for_image_generation(codes.repeat(2, 1))

    def forward(self, embeddings, mask, places, num_last, cache=None):
        """-> guided logits / temperature of the last places [N, num_last, V]."""
        hidden = self.policy.model.language_model(
            inputs_embeds=embeddings, attention_mask=mask, position_ids=places, cache=cache,
            use_cache=cache is not None).last_hidden_state[:, -num_last:]
        c, u = self.policy.model.generation_head(hidden).float().chunk(2)
        logits = u + self.config.guidance * (c - u)
        return logits / (self.config.temperature or self.own.temperature or 1.0)

    def sample(self, prompts, group_size, seeds):
        """Draws --micro-batch-size images at a time, or a group if that is more. The cache of 8 x 4
        images and their empty prompts takes 19 GiB for the larger model: more than its weights."""
        size = max(1, self.config.micro_batch_size // group_size)  # prompts at a time
        parts = [self.sample_together(prompts[i:i + size], group_size, seeds[i:i + size])
                 for i in range(0, len(prompts), size)]
        texts, *tensors = zip(*parts)
        return grpo.Rollout(sum(texts, []), *map(torch.cat, tensors))

    @torch.no_grad()
    def sample_together(self, prompts, group_size, seeds):
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        embeddings, mask, places = self.encode(prompts)
        L = embeddings.shape[1]
        rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = torch.cat([torch.rand(group_size, self.T, generator=rng, dtype=torch.float32)
                             for rng in rngs]).to(grpo.DEVICE)  # [N, T]
        length = (L + self.T + 7) // 8 * 8
        cache = transformers.StaticCache(self.policy.config.text_config, length)
        can_see = torch.nn.functional.pad(mask[:, :L], (0, length - L)).to(embeddings.dtype)
        top_k = [k for k in (self.config.top_k, self.own.top_k, 50) if k is not None][0] or 10**6
        keep_k = transformers.TopKLogitsWarper(top_k)
        keep_p = transformers.TopPLogitsWarper(self.config.top_p or self.own.top_p or 1.0)
        places = places.split([L] + [1] * self.T, 1)
        columns = []
        forward = lambda *inputs: self.forward(*inputs, 1, cache)
        for i in range(self.T):  # grpo.py explains the mask and the CUDA graph
            if i:
                can_see[:, L + i - 1] = 1
                mask = can_see.log()[:, None, None]
            inputs = embeddings, mask, places[i]
            if grpo.CUDA and i == 2:
                forward = grpo.record_graph(forward, inputs)
            logits = forward(*inputs)[:, 0]
            allowed = keep_p(None, keep_k(None, logits)).isfinite()  # [N, V]
            all_logprobs = grpo.compute_policy_logprobs(logits, allowed)
            codes = grpo.sample_codes(all_logprobs, uniform[:, i:i + 1])  # [N, 1]
            columns.append((codes, all_logprobs.gather(1, codes), allowed[:, None].cpu()))
            embeddings = self.embed(codes)
        return grpo.Rollout(prompts, *[torch.cat(column, 1).cpu() for column in zip(*columns)])

    def compute_logprobs(self, rollout):
        embeddings, mask, places = self.encode(rollout.prompts)
        tokens = rollout.tokens.to(grpo.DEVICE)
        inputs = torch.cat([embeddings, self.embed(tokens[:, :-1])], 1)
        logits = self.forward(inputs, mask[:, :-1], places[:, :-1], self.T)
        all_logprobs = grpo.compute_policy_logprobs(logits, rollout.allowed)
        entropy = torch.distributions.Categorical(logits=all_logprobs.detach()).entropy()
        return all_logprobs.gather(2, tokens[..., None]).squeeze(2), entropy

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        parts = tokens.to(grpo.DEVICE).split(self.config.micro_batch_size)
        pixels = torch.cat([self.policy.decode_image_tokens(part) for part in parts]).float()
        arrays = ((pixels + 1) * 127.5).clamp(0, 255).byte().cpu().numpy()  # it was in -1..1
        return [Image.fromarray(array) for array in arrays]

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)  # before the flags
    grpo.main(wrapper=f"{__file__}:Janus")
