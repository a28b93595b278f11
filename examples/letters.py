"""GRPO teaches a small model to spell. The reward compares the prompt with what a real OCR network
reads in the image. Wrapper and trainer are those of grpo.py; the models are those of make_tiny.py
with other codes: a code is a letter of 32 x 32 pixels, and an image of 160 x 32 is a word. Before
GRPO begins, the DiT and VAE are fitted to render the letters, and the policy to copy the letters of
its prompt, about half of them right.

    pip install rapidocr onnxruntime
    python -m examples.letters --out runs/letters

It takes the flags of grpo.py; --model, --prompts and --reward have no effect."""
import difflib, string, sys, unicodedata
import rapidocr, torch, transformers
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
import grpo
from examples import make_tiny

# The codes. The first is for the draft only: prompts and codes share their embeddings, so a policy
# that looks for an A would otherwise find it 245 times in the draft. The last code is a blank.
ALPHABET = "." + string.ascii_lowercase + "_"
SIZE = 5  # letters in an image
READER = rapidocr.RapidOCR(params={
    "Global.log_level": "error", "EngineConfig.onnxruntime.intra_op_num_threads": 1})
WORDS = """cat moon queen jazz apple fox house zebra bird cake door fish gold hand iron king lamp
    quiz rain ship vase wolf blue corn film jump kiwi leaf milk boat dog sun sky red box key map pen
    bus egg van wax bread chair flute knife lemon music north ocean piano river stone table water
    young black dream fruit horse light party sugar tiger world"""
KEPT_OUT = """cow tea ski bag fan zoo mix star book snow frog wind jury card love hope paper train
    mouse field juice brush sixty wagon"""

def make_prompts(words):
    return [f'a sign that says "{word.upper()}"' for word in words.split()]

def draw_letter(letter):
    image = Image.new("RGB", (32, 32), "white")
    font = ImageFont.load_default(size=28)  # Pillow's own font
    ImageDraw.Draw(image).text((16, 16), letter, "black", font, anchor="mm", stroke_width=1)
    return image

def make_models():
    """A pipeline with a code per letter. From a prompt its policy reads C A T _ _."""
    pipe = make_tiny.make_models(ALPHABET)
    word = """messages[0].content[0].text.split('"')[1]"""
    pipe.processor.chat_template = "{{ %s.ljust(%d, '_') | join(' ') }}" % (word, SIZE)
    # The DiT gets no glyphs: it learns about the word only from the tokens.
    pipe.get_glyph_texts = lambda prompt: [[]]
    return pipe

def draw_words(B=16):
    """Words of random letters -> prompts, and the codes that copy them [B, SIZE]."""
    codes = torch.randint(1, len(ALPHABET), (B, SIZE))
    prompts = ['"' + "".join(ALPHABET[code] for code in row) + '"' for row in codes]
    return prompts, codes

def load_model(path, config):
    """Fits and freezes the models -> a wrapper. The result depends only on the seed."""
    transformers.set_seed(config.seed)
    wrapper = grpo.GLMImageWrapper(make_models(), config)
    shown = " " + string.ascii_uppercase + " "
    letters = grpo.pil_to_tensor([draw_letter(letter) for letter in shown])
    make_tiny.fit_painter(wrapper, letters, steps=700, compare=F.mse_loss)
    make_tiny.fit_policy(wrapper, draw_words, chance=0.45, steps=800, lr=3e-3)
    return grpo.GLMImageWrapper(wrapper.pipe, config)

def read(image):
    """What RapidOCR's recognizer reads. Its detector is slow and not needed here."""
    return "".join(READER(image, use_det=False, use_cls=False, use_rec=True).txts or [])

def compare(wanted, seen):
    """2 x common letters / all letters of both. Case, spaces and Unicode form are ignored."""
    texts = [unicodedata.normalize("NFKC", text).casefold() for text in (wanted, seen)]
    a, b = ("".join(text.split()) for text in texts)
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()

def ocr(images, prompts, targets=None):
    return [compare(prompt.split('"')[1], read(image)) for image, prompt in zip(images, prompts)]

if __name__ == "__main__":
    from examples.evaluate import evaluate, print_table
    prompts = make_prompts(WORDS)
    rewards = {"ocr": (ocr, 1.0)}
    try:
        config = grpo.parse_args(**make_tiny.SETTINGS | dict(
            model="letters", steps=60, lr=5e-4, group_size=8, width=32 * SIZE, height=32))
        grpo.check_before_loading(config, prompts, None, rewards)
    except grpo.BadInput as error:
        sys.exit(f"letters.py: error: {error}")
    torch.set_num_threads(1)  # more threads are slower
    wrapper = load_model(config.model, config)
    trainer = grpo.GRPOTrainer(config, wrapper, prompts, rewards)
    trainer.train()
    adapters = [trainer.out / f"adapter_{step:05d}" for step in (0, config.steps)]
    words = make_prompts(KEPT_OUT)  # never trained
    results, _ = zip(*evaluate(
        wrapper, trainer.lora, adapters, words, [None] * len(words), trainer.rewards))
    print_table(["held-out words, before", "held-out words, after"], results)
