"""GRPO teaches GLM-Image to edit pictures. The picture that a prompt edits is called its source.

    python -m examples.edit --model zai-org/GLM-Image --prompts edits.txt --reward mine.py:good

It takes the flags of grpo.py. A line of edits.txt is `instruction<TAB>source.png`, with a path
from the folder of edits.txt. A reward gets the source as the target. docs/edit.md shows a run with
a small model, made by examples/squares.py."""
import functools

import torch
from PIL import Image
from torch.nn.functional import pad

import grpo
from examples.codes import encode_images, load_prompts, load_rewards

class EditWrapper(grpo.GLMImageWrapper):
    """Three things differ when GLM-Image edits: a prompt also has the source's codes, before the
    instruction; the policy draws no draft; and the DiT also gets the source."""
    @functools.cache  # each source is encoded once
    def load_source(self, path):
        """-> PIL image, codes [h, w]"""
        source = Image.open(path).convert("RGB")
        codes, = encode_images(self.pipe, [source])
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
        position_ids = self.build_position_ids(batch).to(grpo.DEVICE)
        # The processor has left a placeholder for each code of the sources.
        ids = batch.input_ids
        ids[ids == self.pipe.processor.image_token_id] = torch.cat(codes)
        return ids.to(grpo.DEVICE), position_ids, grpo.build_bias(position_ids, self.policy.dtype)

    def build_position_ids(self, batch):
        """Positions of the prompts and of the codes to draw, [3, B, L + T]. In grpo.py, prompts are
        text only. `get_rope_index` of `transformers` also knows grids, but it has to see an image's
        end mark. So it is shown each prompt with T more tokens, of any value, and that mark."""
        # The processor gives each prompt two rows (1, height, width) of image_grid_thw, as it says
        # in images_per_sample: that of its source, then that of the grid to draw, equal for all.
        T = batch.image_grid_thw[1].prod().item()
        ids = pad(batch.input_ids, (0, T))
        ids = pad(ids, (0, 1), value=self.policy.config.image_end_token_id)
        mask = pad(batch.attention_mask, (0, T + 1), value=1)
        position_ids, _ = self.policy.model.get_rope_index(
            ids, batch.image_grid_thw, batch.images_per_sample, mask)
        position_ids = position_ids.masked_fill(mask == 0, -1)  # padding, as in grpo.py
        return position_ids[..., :-1]  # without the mark

    def forward(self, ids, position_ids, bias, cache=None):
        """Without a cache, as in grpo.py. With one, `sample` is the caller and needs the last
        token's logits only. All those of N long prompts would take 5 GiB, so the prompts go into
        the cache 64 tokens at a time, and the last piece's logits are returned."""
        if cache is None:
            return super().forward(ids, position_ids, bias)
        for start in range(0, ids.shape[1], 64):
            piece = slice(start, start + 64)
            logits = super().forward(
                ids[:, piece], position_ids[..., piece], bias[:, :, piece], cache)
        return logits

    def decode(self, prompts, tokens, seeds):
        """As in grpo.py, but the pipeline also gets the source, its codes and their grid. It wants
        lists with an item for each image it paints, and is given one image at a time."""
        groups = tokens.unflatten(0, (len(prompts), -1))  # [P, G, T]
        images = []
        for prompt, group, seed in zip(prompts, groups, seeds, strict=True):
            instruction, path = prompt.split("\t")
            source, codes = self.load_source(path)
            h, w = codes.shape
            # If the image processor resized a very small or large source, this does so, too.
            source = source.resize((32 * w, 32 * h))
            codes = codes.repeat_interleave(2, 0).repeat_interleave(2, 1)  # each as 2 x 2
            grid = torch.tensor([[1, *codes.shape]])  # to split codes of several sources
            codes = codes.flatten().to(grpo.DEVICE)
            for row in group:
                images += super().decode(
                    [instruction], row[None], [seed], image=[[source]],  # with a list of sources
                    prior_token_image_ids=[codes], source_image_grid_thw=[grid])
        return images

if __name__ == "__main__":
    grpo.main(load_model=EditWrapper.from_pretrained,
              load_prompts=load_prompts, load_rewards=load_rewards)
