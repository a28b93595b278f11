"""GRPO teaches GLM-Image to edit pictures. The picture that a prompt edits is called its source.

    python -m examples.edit --model zai-org/GLM-Image --prompts edits.txt --reward mine.py:good

It takes the flags of grpo.py. --width and --height are those of the result; a source may have
another size. A line of edits.txt is `instruction<TAB>source.png`, where the path is relative to the
folder of edits.txt. Rewards get the source as the target. examples/squares.py makes a small model,
and docs/edit.md shows a run with it."""
import functools

import torch
from PIL import Image
from torch.nn.functional import pad

import grpo
from examples.codes import encode_images, load_prompts, load_rewards

class EditWrapper(grpo.GLMImageWrapper):
    """Three things differ when GLM-Image edits. The policy reads the source's codes before the
    instruction. It draws one grid, without a draft. The DiT also gets the source. A prompt is
    `instruction<TAB>path` here, as the methods of a wrapper get prompts and no sources."""
    @functools.cache  # each source is encoded once
    def load_source(self, path):
        """-> PIL image, codes [h, w]"""
        source = Image.open(path).convert("RGB")
        # The processor in `encode` resizes it too, and makes room for as many codes.
        codes, = encode_images(self.pipe, [source], resize=True)
        return source, codes

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
        position_ids = self.count_positions(batch).to(grpo.DEVICE)
        ids = batch.input_ids  # with a placeholder for each code of the sources
        ids[ids == self.pipe.processor.image_token_id] = torch.cat(codes)
        return ids.to(grpo.DEVICE), position_ids, grpo.build_bias(position_ids, self.policy.dtype)

    def count_positions(self, batch):
        """Positions of the prompts and of the codes to draw, [3, B, L + T].
        `grpo.build_position_ids` is for prompts of text only. `get_rope_index` of `transformers`
        also counts an image inside a prompt. It takes the codes to draw for an image only if an
        end mark follows them. So each prompt gets T more tokens, of any value, and the mark."""
        # Each prompt has two rows (1, height, width) of image_grid_thw: its source's, and that of
        # the grid to draw, which is the same for all prompts.
        T = batch.image_grid_thw[1].prod().item()
        ids = pad(batch.input_ids, (0, T))
        ids = pad(ids, (0, 1), value=self.policy.config.image_end_token_id)
        mask = pad(batch.attention_mask, (0, T + 1), value=1)
        position_ids, _ = self.policy.model.get_rope_index(
            ids, batch.image_grid_thw, batch.images_per_sample, mask)
        position_ids = position_ids.masked_fill(mask == 0, -1)  # padding, as in grpo.py
        return position_ids[..., :-1]  # without the mark

    def forward(self, ids, position_ids, bias, cache=None):
        """Without a cache, as in grpo.py. With a cache, the caller is `sample`, which needs the
        logits of the last token only. A source makes a prompt long, and the logits of all its
        tokens would take gigabytes. So prompts go into the cache in pieces, and only the last
        piece's logits are returned. 64 tokens are few enough."""
        if cache is None:
            return super().forward(ids, position_ids, bias)
        for start in range(0, ids.shape[1], 64):
            piece = slice(start, start + 64)
            logits = super().forward(
                ids[:, piece], position_ids[..., piece], bias[:, :, piece], cache)
        return logits

    def decode(self, prompts, tokens, seeds):
        """As in grpo.py, but the pipeline also gets the source, its codes and their grid. For
        simplicity it paints one image at a time, whatever --micro-batch-size is."""
        groups = tokens.unflatten(0, (len(prompts), -1))  # [P, G, T]
        images = []
        for prompt, group, seed in zip(prompts, groups, seeds, strict=True):
            instruction, path = prompt.split("\t")
            source, codes = self.load_source(path)
            h, w = codes.shape
            # If the source is very small or very large, its codes are those of a resized picture.
            # The DiT needs a picture of that size.
            source = source.resize((32 * w, 32 * h))
            codes = codes.repeat_interleave(2, 0).repeat_interleave(2, 1)  # each as 2 x 2
            grid = torch.tensor([[1, 2 * h, 2 * w]])  # of one source, in patches of the DiT
            codes = codes.flatten().to(grpo.DEVICE)
            for row in group:
                # The keyword arguments have an item for each image that the pipeline paints at
                # once, here one. The item of `image` is the list of its sources.
                images += super().decode(
                    [instruction], row[None], [seed], image=[[source]],
                    prior_token_image_ids=[codes], source_image_grid_thw=[grid])
        return images

if __name__ == "__main__":
    grpo.main(load_model=EditWrapper.from_pretrained,
              load_prompts=load_prompts, load_rewards=load_rewards)
