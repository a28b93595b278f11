"""A small GLM-Image that spells, about half of the letters right, and words to teach it. The reward
compares the word in the prompt with what a real OCR network reads in the image.

    pip install rapidocr onnxruntime
    python -m examples.make.letters    # two to six minutes
    python grpo.py --model runs/letters --out runs/spelling
    python -m examples.evaluate runs/spelling --steps 0 60 --prompts runs/letters/held_out.txt

The model is made as that of tiny.py, with other codes: a code is a letter of 32 x 32 pixels, and an
image of 160 x 32 is a word. The DiT and VAE are fitted to render the letters, and the policy to
copy the letters of its prompt, which it gets right with a probability of 0.45.
"""
from examples.make import read_folder

if __name__ == "__main__":
    FOLDER = read_folder(__doc__, "runs/letters")

import string
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from PIL import Image, ImageDraw, ImageFont

import grpo
from examples.make import tiny
from examples.rewards import load_reader, match_letters

torch.set_num_threads(1)  # more gain little on a model this small, and wait where the CPU is busy

# The codes. The first is for the draft only: prompts and codes share their embeddings, so a policy
# that looks for an A would otherwise find it 245 times in the draft. The last code is a blank.
ALPHABET = "." + string.ascii_lowercase + "_"
SIZE = 5  # letters in an image
WORDS = """cat moon queen jazz apple fox house zebra bird cake door fish gold hand iron king lamp
    quiz rain ship vase wolf blue corn film jump kiwi leaf milk boat dog sun sky red box key map pen
    bus egg van wax bread chair flute knife lemon music north ocean piano river stone table water
    young black dream fruit horse light party sugar tiger world"""
KEPT_OUT = """cow tea ski bag fan zoo mix star book snow frog wind jury card love hope paper train
    mouse field juice brush sixty wagon"""

def make_settings(folder):
    """What grpo.json says: the defaults for this model."""
    return tiny.SETTINGS | dict(
        steps=60, lr=5e-4, group_size=8, width=32 * SIZE, height=32,
        prompts=str(folder / "prompts.txt"), reward=f"{Path(__file__).resolve()}:spelling")

def make_prompts(words):
    """Without quotation marks: for quoted words the DiT would get glyphs, and here it shall learn
    about the word from the tokens only."""
    return [f"a sign that says {word.upper()}" for word in words.split()]

def draw_letter(letter):
    image = Image.new("RGB", (32, 32), "white")
    font = ImageFont.load_default(size=28)  # Pillow's own font
    ImageDraw.Draw(image).text((16, 16), letter, "black", font, anchor="mm", stroke_width=1)
    return image

def make_models():
    """A pipeline with a code per letter. From a prompt that ends in CAT its policy reads
    C A T _ _."""
    pipe = tiny.make_models(ALPHABET)
    word = "(messages[0].content[0].text.split() or [''])[-1]"
    pipe.processor.chat_template = "{{ %s.ljust(%d, '_') | join(' ') }}" % (word, SIZE)
    return pipe

def draw_words(B=16):
    """Words of random letters -> prompts, and the codes that copy them [B, SIZE]."""
    codes = torch.randint(1, len(ALPHABET), (B, SIZE))
    return ["".join([ALPHABET[code] for code in row]) for row in codes], codes

def read(image):
    """What RapidOCR's recognizer reads. Its detector is slow and not needed here."""
    return "".join(load_reader()(image, use_det=False, use_cls=False, use_rec=True).txts or [])

def spelling(images, prompts, targets=None):
    """The reward: how closely what is read matches the prompt's last word, 0 to 1."""
    words = [prompt.split()[-1] for prompt in prompts]
    return [match_letters(word, read(image)) for word, image in zip(words, images)]

def main(folder):
    tiny.make_folder(folder)
    for name, words in dict(prompts=WORDS, held_out=KEPT_OUT).items():
        (folder / f"{name}.txt").write_text("\n".join(make_prompts(words)) + "\n")
    transformers.set_seed(0)
    settings = make_settings(folder)
    wrapper = grpo.GLMImageWrapper(make_models(), grpo.Config(**settings, offload="off"))
    shown = " " + string.ascii_uppercase + " "
    letters = grpo.pil_to_tensor([draw_letter(letter) for letter in shown])
    tiny.fit_painter(wrapper, letters, steps=700, compare=F.mse_loss)
    tiny.fit_policy(wrapper, draw_words, chance=0.45, steps=800, lr=3e-3)
    tiny.save(wrapper.pipe, settings, folder)

if __name__ == "__main__":
    main(FOLDER)
