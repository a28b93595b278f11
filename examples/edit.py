"""Image to image: GRPO teaches GLM-Image to change a picture, its source, as an instruction says.

    python -m examples.edit --model zai-org/GLM-Image --prompts edits.txt --reward mine.py:good

It takes the flags of grpo.py. A prompt is `instruction<TAB>path of the source`, and rewards get
the source as the target. docs/edit.md trains a small model, which examples/squares.py makes."""
import functools

import torch
from PIL import Image

import grpo
from examples.codes import encode_images, load_prompts, load_rewards

class EditWrapper(grpo.GLMImageWrapper):
    """Three things differ from text to image. The prompt has the source's codes, before the
    instruction. The policy draws one grid, without a draft. The DiT sees the source."""
    @functools.cache  # each source is encoded once
    def load_source(self, path):
        """-> PIL image, codes [h, w]"""
        source = Image.open(path).convert("RGB")
        codes, = encode_images(self.pipe, [source])
        h, w = codes.shape
        # The model's image processor resizes very small and large pictures. The DiT gets the same.
        return source.resize((32 * w, 32 * h)), codes

    def encode(self, prompts):
        """As in grpo.py: -> ids [B, L], position_ids [3, B, L + T], bias."""
        chats = []
        codes = []
        for prompt in prompts:
            instruction, path = prompt.split("\t")
            source, source_codes = self.load_source(path)
            content = [dict(type="image", image=source), dict(type="text", text=instruction)]
            chats.append([dict(role="user", content=content)])
            codes.append(source_codes.flatten())
        batch = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=dict(
                target_h=self.config.height, target_w=self.config.width,
                padding=True, padding_side="left"))
        ids = batch.input_ids
        mask = batch.attention_mask
        # Positions first: of the prompts, where each source has those of a grid.
        position_ids, _ = self.policy.model.get_rope_index(
            ids, batch.image_grid_thw, batch.images_per_sample, mask)
        position_ids = position_ids.masked_fill(mask == 0, -1)  # as `build_bias` wants it
        # Each prompt has two rows of image_grid_thw: its source's grid, then the one to draw, which
        # is the same for all. Its positions follow that of the prompt's last token.
        grid = batch.image_grid_thw[1, 1:].tolist()
        drawn = grpo.build_position_ids(mask[:, -1:], [grid])[..., 1:]  # as if from token 0
        position_ids = torch.cat([position_ids, position_ids[..., -1:] + drawn], dim=2)
        # The processor left a placeholder for each code of a source.
        ids[ids == self.pipe.processor.image_token_id] = torch.cat(codes)
        position_ids = position_ids.to(grpo.DEVICE)
        bias = grpo.build_bias(position_ids, self.policy.dtype)
        return ids.to(grpo.DEVICE), position_ids, bias

    def forward(self, ids, position_ids, bias, cache=None):
        """`sample` gives a cache and needs the logits of the last token only. Those of all tokens
        of long prompts would take 5 GiB, so the prompts go into the cache 64 tokens at a time."""
        if cache is None:
            return super().forward(ids, position_ids, bias)
        for start in range(0, ids.shape[1], 64):
            piece = slice(start, start + 64)
            logits = super().forward(
                ids[:, piece], position_ids[..., piece], bias[:, :, piece], cache)
        return logits  # of the last piece

    def decode(self, prompts, tokens, seeds):
        """As in grpo.py, but the pipeline also gets the source, its codes and their grid."""
        groups = tokens.unflatten(0, (len(prompts), -1))  # [P, G, T]
        images = []
        for prompt, group, seed in zip(prompts, groups, seeds, strict=True):
            instruction, path = prompt.split("\t")
            source, codes = self.load_source(path)
            codes = codes.repeat_interleave(2, 0).repeat_interleave(2, 1)  # each as 2 x 2
            grid = torch.tensor([[1, *codes.shape]])  # (1, height, width)
            codes = codes.flatten().to(grpo.DEVICE)
            for part in group.split(self.config.micro_batch_size):
                B = len(part)
                images += super().decode(
                    [instruction], part, [seed], image=[[source]] * B,
                    prior_token_image_ids=[codes] * B, source_image_grid_thw=[grid] * B)
        return images

if __name__ == "__main__":
    grpo.main(load_model=EditWrapper.from_pretrained,
              load_prompts=load_prompts, load_rewards=load_rewards)
