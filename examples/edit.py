"""Image to image: GRPO teaches GLM-Image to change a picture, its source, as an instruction says.

    python -m examples.edit --out runs/edit    # a small model and its toy task, see squares.py
    python -m examples.edit --model zai-org/GLM-Image --prompts edits.txt --reward mine.py:good

It takes the flags of grpo.py; see docs/edit.md. A prompt is `instruction<TAB>path of the source`,
and rewards get the source as the target."""
import functools

import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

import grpo
from examples import squares
from examples.codes import (
    build_edit_position_ids, encode_images, load_prompts, load_rewards, repeat_codes)

class EditWrapper(grpo.GLMImageWrapper):
    """Four things differ from text to image. The policy reads the source's codes before the
    instruction. These codes have the positions of a grid. No draft is drawn. The DiT sees the
    source."""
    @functools.cache  # each source is encoded once
    def load_source(self, path):
        """-> PIL image, codes [h, w]"""
        source = Image.open(path).convert("RGB")
        return source, encode_images(self.pipe, [source])[0]

    @functools.cache
    def encode_prompt(self, prompt):
        """-> ids [L], position_ids [3, L + T]"""
        instruction, path = prompt.split("\t")
        source, codes = self.load_source(path)
        content = [dict(type="image", image=source), dict(type="text", text=instruction)]
        processor = self.pipe.processor
        batch = processor.apply_chat_template(
            [dict(role="user", content=content)], tokenize=True, return_dict=True,
            return_tensors="pt", processor_kwargs=dict(
                target_h=self.config.height, target_w=self.config.width))
        ids = batch.input_ids[0]
        places = ids == processor.image_token_id
        ids[places] = codes.flatten()  # the processor left a placeholder for each code
        before = places.nonzero()[0].item()  # tokens before the source's codes
        after = len(ids) - before - codes.numel()
        # With a source there are two rows: the source's, then the drawn grid's. There is no draft.
        drawn_grid = batch.image_grid_thw[1, 1:].tolist()
        return ids, build_edit_position_ids(before, codes.shape, after, drawn_grid)

    def encode(self, prompts):
        """As in grpo.py, but prompts are encoded one by one, and padded here on the left."""
        ids, position_ids = zip(*[self.encode_prompt(prompt) for prompt in prompts])
        pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        ids = pad(ids, padding_value=self.pipe.processor.tokenizer.pad_token_id)
        # `pad_sequence` wants the length first, [L + T, 3]. All have the same T.
        position_ids = pad([positions.T for positions in position_ids], padding_value=-1)
        position_ids = position_ids.movedim(2, 0).to(grpo.DEVICE)  # [3, B, L + T]
        bias = grpo.build_bias(position_ids, self.policy.dtype)
        return ids.to(grpo.DEVICE), position_ids, bias

    def forward(self, ids, position_ids, bias, cache=None):
        """With a cache, `sample` is the caller, and needs the last token's logits only. All logits
        of whole prompts would take 5 GiB, so prompts go into the cache 64 tokens at a time."""
        if cache is None:
            return super().forward(ids, position_ids, bias)
        for start in range(0, ids.shape[1], 64):
            piece = slice(start, start + 64)
            logits = super().forward(
                ids[:, piece], position_ids[..., piece], bias[:, :, piece], cache)
        return logits  # those of the last piece are enough

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        """As in grpo.py, but the pipeline also gets each source, its codes and their grid."""
        config = self.config
        self.move_to_gpu(self.dit)
        codes = tokens.to(grpo.DEVICE).view(-1, config.height // 32, config.width // 32)
        groups = repeat_codes(codes).view(len(prompts), -1, 4 * tokens.shape[1])  # [P, G, 4 * T]
        images = []
        for prompt, seed, group in zip(prompts, seeds, groups, strict=True):
            instruction, path = prompt.split("\t")
            source, source_codes = self.load_source(path)  # kept since `sample`
            h, w = source_codes.shape
            grid = torch.tensor([[1, 2 * h, 2 * w]])  # (1, height, width), of repeated codes
            repeated = repeat_codes(source_codes[None]).flatten().to(grpo.DEVICE)
            for part in group.split(config.micro_batch_size):
                B = len(part)
                noise = [torch.Generator().manual_seed(~seed) for _ in part]  # all the same
                # For each image: a list of its sources, all their codes in a row, and their grids.
                images += self.pipe(
                    [instruction] * B, prior_token_ids=part, image=[[source]] * B,
                    prior_token_image_ids=[repeated] * B, source_image_grid_thw=[grid] * B,
                    height=config.height, width=config.width, guidance_scale=config.guidance,
                    num_inference_steps=config.decode_steps, generator=noise).images
        return images

def load_model(path, config):
    # If `path` is that of the default model and it is not there yet, squares.py makes it.
    wrapper = squares.load_model(EditWrapper, path, config)
    # `main` keeps the prompts to itself, so they are read again and encoded: a source whose size
    # this model refuses then fails before training.
    prompts, _ = load_prompts(config.prompts)
    for prompt in prompts:
        wrapper.encode_prompt(prompt)  # its result is kept
    return wrapper

if __name__ == "__main__":
    squares.write_prompts_once()  # the default model's prompts, and a grpo.json that names them
    grpo.main(load_model=load_model, load_prompts=load_prompts, load_rewards=load_rewards,
              model=str(squares.FOLDER))
