"""GRPO teaches GLM-Image to edit pictures. The picture that a prompt edits is called its source.

    python -m examples.edit --model zai-org/GLM-Image --prompts edits.txt --reward mine.py:good

`python grpo.py --wrapper examples/edit.py:EditWrapper` takes the same flags, those of grpo.py, and
does the same. --width and --height are the size of the result.

A line of edits.txt is `instruction<TAB>source.png`, where the path is relative to the folder of
edits.txt. A source may have any size, up to four times as long as wide: it is turned upright, and
resized to the nearest multiples of 32. Rewards get it as the target. examples/make/squares.py makes
a small model, and docs/edit.md shows a run with it.
"""
import os, sys
from pathlib import Path

import torch
from PIL import Image
from torch.nn.functional import pad

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo

# --- Prompts and sources ------------------------------------------------------
class Edit(str):
    """A prompt of EditWrapper: the instruction, as a text that also knows the path of its source.
    A wrapper is given prompts and no targets; rewards see the instruction only."""
    def __new__(cls, instruction, source):
        edit = super().__new__(cls, instruction)
        edit.source = os.path.abspath(source)
        return edit

    def __getnewargs__(self):  # for copies, and for processes that a reward starts
        return str(self), self.source

def open_source(path):
    """A picture to edit, upright. GLM-Image has a code for each 32 x 32 pixels, and its image
    processor refuses long pictures."""
    image = grpo.open_image(path)
    short, long = sorted(image.size)
    if short < 32 or long > 4 * short:
        raise grpo.BadInput(
            f"{path}: a source of {image.width} x {image.height} pixels is too small, or over four "
            "times as long as wide")
    return image

# --- The model ----------------------------------------------------------------
@torch.no_grad()
def encode_images(pipe, images, resize=True):
    """PIL images -> codes [h, w] of each, on the CPU, as the stock pipeline makes them of a picture
    to edit. There is a code for each 32 x 32 pixels: the image processor resizes pictures to the
    nearest multiples of 32. It also enlarges small ones and shrinks large ones, as its settings
    say, unless `resize` is False."""
    model = pipe.vision_language_encoder.model
    # In tiny-glm-image the vision tower does not fit the image processor, as nothing used them.
    if pipe.processor.image_processor.patch_size != model.visual.config.patch_size:
        raise grpo.BadInput(
            "--model: it cannot see pictures. GLM-Image can, and so can the small models that "
            "examples/make/mosaics.py makes for sft.py, and examples/make/squares.py for edit.py")
    # GLMImageWrapper leaves the vision tower and the codebook on the CPU. They visit the GPU for
    # this call only, as the two halves of the model need the room.
    tower = torch.nn.ModuleList([model.visual, model.vqmodel])
    home = model.visual.device
    tower.to(grpo.DEVICE)
    settings = {}
    if not resize:
        # Despite their names, these are the smallest and the largest area, in pixels.
        settings["size"] = dict(shortest_edge=32**2, longest_edge=10**8)
    codes = []
    for image in images:
        # The processor raises ValueError if a side is over 4 times as long as the other.
        inputs = grpo.attempt(
            f"a picture of {image.width} x {image.height} pixels", pipe.processor.image_processor,
            [image], return_tensors="pt", **settings)
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

    @staticmethod
    def load_prompts(path):
        """Reads lines `instruction<TAB>source.png` -> Edits, and the paths of their sources."""
        if path is None:
            raise grpo.BadInput("--prompts: needs a file of lines `instruction<TAB>source.png`")
        instructions, sources = grpo.load_prompts(path)
        for instruction, source in zip(instructions, sources):
            if source is None:
                raise grpo.BadInput(f"--prompts {path}: {instruction!r} needs a tab and a source")
            grpo.attempt(f"--prompts {path}", open_source, source)
        prompts = [Edit(*pair) for pair in zip(instructions, sources)]
        return prompts, [prompt.source for prompt in prompts]

    def load_source(self, path):
        """-> its size, codes [h, w]. Each source is encoded once."""
        if path not in self.sources:
            source = open_source(path)
            codes, = encode_images(self.pipe, [source])
            self.sources[path] = source.size, codes
        return self.sources[path]

    def encode(self, prompts):
        """As in grpo.py: -> ids [B, L], mask [B, L + T], position_ids [3, B, L + T]."""
        chats = []
        codes = []
        for prompt in prompts:
            if not hasattr(prompt, "source"):
                raise grpo.BadInput("this model edits pictures, and the prompt has no source")
            size, source_codes = self.load_source(prompt.source)
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
        """The mask and positions of the prompts and of the codes to draw.
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
        return mask[:, :-1], position_ids[..., :-1]  # without the end mark

    def forward(self, ids, mask, position_ids, num_last, cache=None):
        """As in grpo.py. With a cache, the caller is `sample`. A source makes a prompt long, and
        the activations of a whole batch of them would take gigabytes. So prompts go into the cache
        in pieces of 64 tokens."""
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
            _, codes = self.load_source(prompt.source)
            h, w = codes.shape
            # The image processor made it 32 x 32 pixels a code for the policy. So it must be here.
            source = open_source(prompt.source).resize((32 * w, 32 * h))
            codes = codes.repeat_interleave(2, 0).repeat_interleave(2, 1)  # each as 2 x 2
            grid = torch.tensor([[1, 2 * h, 2 * w]])  # of one source, in patches of the DiT
            codes = codes.flatten().to(grpo.DEVICE)
            for part in group.split(self.config.micro_batch_size):
                # These lists have an item for each image. That of `image` is a list of its sources.
                B = len(part)
                images += super().decode(
                    [prompt], part, [seed], image=[[source]] * B,
                    prior_token_image_ids=[codes] * B, source_image_grid_thw=[grid] * B)
        return images

if __name__ == "__main__":
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)  # before the flags
    grpo.main(wrapper=f"{__file__}:EditWrapper")
