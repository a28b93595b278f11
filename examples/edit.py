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
from examples.codes import encode_images, load_prompts, repeat_codes

def load_rewards(text):
    """Those of grpo.py, but they get the instructions without the paths."""
    def shorten(function, images, prompts, targets):
        return function(images, [prompt.split("\t")[0] for prompt in prompts], targets)
    return {name: (functools.partial(shorten, function), weight)
            for name, (function, weight) in grpo.load_rewards(text).items()}

class EditWrapper(grpo.GLMImageWrapper):
    """Four things differ from text to image. The policy reads the source's codes before the
    instruction; they have the positions of a grid; no draft is drawn; the DiT sees the source."""
    @functools.cache  # each source is encoded once
    def load_source(self, path):
        """-> PIL image, codes [h, w]"""
        source = Image.open(path).convert("RGB")
        return source, encode_images(self.pipe, [source])[0]

    @functools.cache
    def encode_prompt(self, prompt):
        """-> ids [L], position_ids [L + T, 3], length first so that `encode` can pad them."""
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
        # Positions up to the end of the source's grid. Then, beginning max(h, w) after its start,
        # those of the instruction and of the grid to draw.
        start = places.nonzero()[0].item()
        h, w = codes.shape
        mask = torch.ones_like(ids)[None]
        before = grpo.build_position_ids(mask[:, :start], [(h, w)])
        drawn = batch.image_grid_thw[1, 1:].tolist()  # row 0 is the source's
        after = grpo.build_position_ids(mask[:, start + h * w:], [drawn]) + start + max(h, w)
        return ids, torch.cat([before, after], 2)[:, 0].T

    def encode(self, prompts):
        """As in grpo.py, but the rows of the bias [B, 1, L + T, L + T] are not padded."""
        ids, position_ids = zip(*[self.encode_prompt(prompt) for prompt in prompts])
        pad = functools.partial(pad_sequence, batch_first=True, padding_side="left")
        ids = pad(ids, padding_value=self.pipe.processor.tokenizer.pad_token_id)
        position_ids = pad(position_ids, padding_value=-1).movedim(2, 0).to(grpo.DEVICE)
        real = position_ids[0] >= 0  # padding is at -1
        visible = (real[:, None, :, None] == real[:, None, None, :]).tril()
        bias = torch.where(visible, 0.0, -torch.inf).to(self.policy.dtype)
        return ids.to(grpo.DEVICE), position_ids, bias

    def forward(self, ids, position_ids, bias, cache=None):
        """Only the sampler has a cache. In one piece, its long prompts would take 5 GiB more."""
        if cache is None:
            return super().forward(ids, position_ids, bias)
        for start in range(0, ids.shape[1], 64):
            piece = slice(start, start + 64)
            logits = super().forward(
                ids[:, piece], position_ids[..., piece], bias[:, :, piece], cache)
        return logits  # of the last piece

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds):
        """As in grpo.py, but the pipeline also gets each source, its codes and their grid."""
        config = self.config
        drawn = tokens.to(grpo.DEVICE).view(-1, config.height // 32, config.width // 32)
        groups = repeat_codes(drawn).flatten(1).chunk(len(prompts))  # P of [G, codes]
        images = []
        for prompt, seed, group in zip(prompts, seeds, groups, strict=True):
            instruction, path = prompt.split("\t")
            source, codes = self.load_source(path)  # if it is not cached, on the GPU
            self.move_to_gpu(self.dit)
            codes = repeat_codes(codes[None].to(grpo.DEVICE))
            grid = torch.tensor([codes.shape])  # (1, height, width) of the repeated codes
            for part in group.split(config.micro_batch_size):
                B = len(part)
                noise = [torch.Generator().manual_seed(~seed) for _ in part]  # all the same
                images += self.pipe(
                    [instruction] * B, prior_token_ids=part, image=[[source]] * B,
                    prior_token_image_ids=[codes.flatten()] * B, source_image_grid_thw=[grid] * B,
                    height=config.height, width=config.width, guidance_scale=config.guidance,
                    num_inference_steps=config.decode_steps, generator=noise).images
        return images

def load_model(path, config):
    wrapper = squares.load_model(EditWrapper, path, config)  # makes the small one at first
    for prompt in load_prompts(config.prompts)[0]:
        wrapper.encode_prompt(prompt)  # now, as a source whose size is refused would end a run
    return wrapper

if __name__ == "__main__":
    squares.write_once()  # pictures, prompts, and a grpo.json that names them and the reward
    grpo.main(None, load_model, load_prompts, load_rewards, model=str(squares.FOLDER))
