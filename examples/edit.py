"""GRPO teaches GLM-Image to edit pictures. The picture that a prompt edits is called its source.

    python grpo.py --wrapper examples/edit.py:EditWrapper --model zai-org/GLM-Image \\
        --prompts edits.txt --reward mine.py:good

A line of edits.txt is `instruction<TAB>source.png`, where the path is relative to the folder of
edits.txt. A source may have any size, up to four times as long as wide. Rewards get it as the
target. --width and --height are the size of the result. examples/make/squares.py makes a small
model, and docs/pictures.md shows a run with it.
"""
import torch
from diffusers.utils import load_image
from PIL import Image
from torch.nn.functional import pad

import grpo

@torch.no_grad()
def encode_images(pipe, images, resize=True):
    """PIL images -> codes [h, w] of each, on the CPU, as the stock pipeline makes them of a picture
    to edit. There is a code for each 32 x 32 pixels: the image processor resizes to multiples of
    32. It also enlarges small pictures and shrinks large ones, unless `resize` is False."""
    model = pipe.vision_language_encoder.model
    # In tiny-glm-image the vision tower does not fit the image processor, as nothing used them.
    if pipe.processor.image_processor.patch_size != model.visual.config.patch_size:
        raise grpo.BadInput(
            "--model: it cannot see pictures, as GLM-Image and the models of examples/make/"
            "mosaics.py and squares.py can")
    # GLMImageWrapper leaves the vision tower and the codebook on the CPU. They visit the GPU for
    # this call only, as the two halves of the model need the room.
    tower = torch.nn.ModuleList([model.visual, model.vqmodel])
    home = model.visual.device
    tower.to(grpo.DEVICE)
    # Despite their names, these are the smallest and the largest area, in pixels.
    limits = {} if resize else dict(size=dict(shortest_edge=32**2, longest_edge=10**8))
    codes = []
    for image in images:
        inputs = pipe.processor.image_processor([image], return_tensors="pt", **limits)
        _, h, w = inputs.image_grid_thw[0].tolist()  # in codes
        inputs = inputs.to(grpo.DEVICE)
        features = model.get_image_features(inputs.pixel_values, inputs.image_grid_thw)
        # `pooler_output` has a feature for each code, despite its name.
        codes.append(model.get_image_tokens(features.pooler_output).view(h, w).cpu())
    tower.to(home)
    return codes

class EditWrapper(grpo.GLMImageWrapper):
    """Three things differ when GLM-Image edits. The policy reads the source's codes before the
    instruction. It draws one grid, without a draft. The DiT also gets the source."""
    def __init__(self, pipe, config):
        super().__init__(pipe, config)
        self.sources = {}  # size and codes of each; the pictures themselves would fill the memory

    def load_source(self, prompt):
        """-> the size and the codes [h, w] of its source. Each source is encoded once."""
        path = getattr(prompt, "target", None)
        if not path:
            raise grpo.BadInput(f"--prompts: {prompt!r} needs a tab and the picture to edit")
        if path not in self.sources:
            source = grpo.attempt(path, load_image, path)
            codes, = grpo.attempt(path, encode_images, self.pipe, [source])
            self.sources[path] = source.size, codes
        return self.sources[path]

    def encode(self, prompts):
        """As in grpo.py: -> ids [B, L], mask [B, L + T], position_ids [3, B, L + T]."""
        chats = []
        codes = []
        for prompt in prompts:
            size, source_codes = self.load_source(prompt)
            # The processor makes room for as many codes. Any picture of this size will do.
            content = [dict(type="image", image=Image.new("RGB", size)),
                       dict(type="text", text=prompt)]
            chats.append([dict(role="user", content=content)])
            codes.append(source_codes.flatten())
        batch = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=dict(
                target_h=self.config.height, target_w=self.config.width,
                padding=True, padding_side="left"))
        mask, position_ids = self.count_positions(batch)
        ids = batch.input_ids  # with a placeholder for each code of the sources
        ids[ids == self.pipe.processor.image_token_id] = torch.cat(codes)
        return ids.to(grpo.DEVICE), mask.to(grpo.DEVICE), position_ids.to(grpo.DEVICE)

    def count_positions(self, batch):
        """The mask and positions of the prompts and of the codes to draw. `build_position_ids` is
        for prompts of text only. `get_rope_index` of `transformers` also counts an image inside a
        prompt, and the codes to draw, if an end mark follows them. So each prompt gets T more
        tokens, of any value, and the mark."""
        # image_grid_thw has rows (1, height, width): each prompt's source, then the grid to draw.
        T = batch.image_grid_thw[1].prod().item()
        ids = pad(batch.input_ids, (0, T))
        ids = pad(ids, (0, 1), value=self.policy.config.image_end_token_id)
        mask = pad(batch.attention_mask, (0, T + 1), value=1)
        position_ids, _ = self.policy.model.get_rope_index(
            ids, batch.image_grid_thw, batch.images_per_sample, mask)
        return mask[:, :-1], position_ids[..., :-1]  # without the end mark

    def forward(self, ids, mask, position_ids, num_last, cache=None):
        """As in grpo.py. A source makes a prompt long, and the activations of a batch of them would
        take gigabytes. So `sample`, which has a cache, reads prompts in pieces of 64 tokens."""
        size = ids.shape[1] if cache is None else 64
        for start in range(0, ids.shape[1], size):
            piece = slice(start, start + size)
            logits = super().forward(ids[:, piece], mask, position_ids[..., piece], num_last, cache)
        return logits

    def decode(self, prompts, tokens, seeds):
        """As in grpo.py, but the pipeline also gets the source, its codes and their grid."""
        groups = tokens.unflatten(0, (len(prompts), -1))  # [P, G, T]
        images = []
        for prompt, group, seed in zip(prompts, groups, seeds, strict=True):
            _, codes = self.load_source(prompt)
            h, w = codes.shape
            # The image processor made it 32 x 32 pixels a code for the policy. So it must be here.
            source = load_image(prompt.target).resize((32 * w, 32 * h))
            codes = codes.repeat_interleave(2, 0).repeat_interleave(2, 1)  # each as 2 x 2
            grid = torch.tensor([[1, 2 * h, 2 * w]])  # of one source, in patches of the DiT
            codes = codes.flatten().to(grpo.DEVICE)
            for part in group.split(self.config.micro_batch_size):
                B = len(part)  # the length of these lists; `image` has a list of sources for each
                images += super().decode(
                    [prompt], part, [seed], image=[[source]] * B,
                    prior_token_image_ids=[codes] * B, source_image_grid_thw=[grid] * B)
        return images
