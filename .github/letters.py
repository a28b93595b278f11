"""GRPO teaches a toy to spell: the reward is what a real OCR network reads in its pictures.
Models, wrapper and trainer are those of grpo.py. A code is a letter here, of 32 x 32 pixels, and a
picture of 160 x 32 a word. Before GRPO begins, the painter is fitted to paint all letters, and the
policy has begun to copy those of its prompt: it gets most of them wrong.

    pip install rapidocr onnxruntime
    cp .github/letters.py .github/evaluate.py .
    python letters.py --out runs/letters

The flags are those of grpo.py; --model and --prompts have no meaning here."""
import difflib, string, sys, unicodedata
import diffusers, rapidocr, torch
from PIL import Image, ImageDraw, ImageFont
import grpo

ALPHABET = string.ascii_lowercase + "_"  # the codes; the last is a blank, after a shorter word
SIZE = 5  # letters in a picture
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
    font = ImageFont.load_default(size=28)  # it is inside Pillow
    ImageDraw.Draw(image).text((16, 16), letter, "black", font, anchor="mm", stroke_width=1)
    return image

def make_models():
    """The models of grpo.py with a code for each letter; of a prompt the policy reads C A T _ _."""
    pipe = grpo.make_tiny_models(ALPHABET)
    word = """messages[0].content[0].text.split('"')[1]"""
    pipe.processor.chat_template = "{{ %s.ljust(%d, '_') | join(' ') }}" % (word, SIZE)
    # The painter gets no glyphs: all that it is told about the word are the tokens.
    pipe.get_glyph_texts = lambda prompt: [[]]
    # A model as narrow as this tells columns apart only if all its rotary angles count columns.
    pipe.vision_language_encoder.model.language_model.rotary_emb.mrope_section = [0, 0, 32]
    return pipe

def fit_policy(wrapper, enough=0.35, B=16):
    """To copy words of random letters, until right letters have this chance on average."""
    optimizer = torch.optim.Adam(wrapper.halves.ar.requires_grad_().parameters(), 3e-3)
    chance = 0.0
    while chance < enough:
        codes = torch.randint(len(ALPHABET), (B, SIZE))
        tokens = torch.cat([torch.randint(len(ALPHABET), (B, 4)), codes], 1)  # any draft will do
        prompts = ['"' + "".join(ALPHABET[i] for i in row) + '"' for row in codes]
        logprobs, _ = wrapper.compute_logprobs(prompts, tokens, None)
        chance = logprobs[:, 4:].exp().mean().item()
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()

def fit_painter(wrapper, steps=400, B=8):
    """To paint any codes as their letters, from noise in one step of denoising."""
    pipe = wrapper.pipe
    paint = diffusers.GlmImagePipeline.__call__.__wrapped__  # the pipeline without its no_grad
    letters = 2 * grpo.pil_to_tensor(list(map(draw_letter, string.ascii_uppercase + " "))) - 1
    glyphs, _ = pipe.encode_prompt("", False)  # of no letter, as in every other call
    optimizer = torch.optim.Adam(wrapper.halves.dit.requires_grad_().parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-2, total_steps=steps)
    for _ in grpo.progress(range(steps), "fit"):
        codes = torch.randint(len(ALPHABET), (B, 1, SIZE))
        pictures = torch.cat(letters[codes[:, 0]].unbind(1), 3)  # [B, 3, 32, 160]
        squares = torch.kron(codes, codes.new_ones(1, 2, 2)).flatten(1)  # each code as 2 x 2
        latents = paint(
            pipe, prompt_embeds=glyphs.repeat(B, 1, 1), prior_token_ids=squares.to(grpo.DEVICE),
            height=32, width=32 * SIZE, num_inference_steps=1, guidance_scale=1.0,
            output_type="latent").images
        error = pipe.vae.decode(latents).sample - pictures.to(grpo.DEVICE)
        optimizer.zero_grad()
        error.square().mean().backward()
        optimizer.step()
        schedule.step()

def read(image):
    """What RapidOCR's recognizer sees; its detector, which is slow, has nothing to find here."""
    return "".join(READER(image, use_det=False, use_cls=False, use_rec=True).txts or [])

def compare(wanted, seen):
    """Twice the letters in common over all letters. Case, spaces and Unicode forms do not count."""
    texts = [unicodedata.normalize("NFKC", text).casefold() for text in (wanted, seen)]
    a, b = ("".join(text.split()) for text in texts)
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()

def ocr(images, prompts, targets=None):
    return [compare(prompt.split('"')[1], read(image)) for image, prompt in zip(images, prompts)]

if __name__ == "__main__":
    from evaluate import evaluate, print_table  # not above: contact.py and honesty.py do without
    grpo.TINY |= dict(reward="ocr", steps=120, group_size=8, width=32 * SIZE, height=32)
    config = grpo.parse_args(["--model", "tiny", *sys.argv[1:]])
    torch.set_num_threads(1)  # more are slower
    torch.manual_seed(config.seed)
    wrapper = grpo.GLMImageWrapper(make_models(), config)
    fit_policy(wrapper)
    fit_painter(wrapper)
    wrapper = grpo.GLMImageWrapper(wrapper.pipe, config)  # which freezes all weights again
    trainer = grpo.GRPOTrainer(config, wrapper, make_prompts(WORDS), {"ocr": (ocr, 1.0)})
    print(f"files: {config.out}", flush=True)
    trainer.train()
    adapters = [trainer.out / f"adapter_{step:05d}" for step in (0, config.steps)]
    words = make_prompts(KEPT_OUT)  # which were in no prompt of the training
    results, _ = zip(*evaluate(
        wrapper, trainer.lora, adapters, words, [None] * len(words), trainer.rewards))
    print_table(["kept-out words, before", "kept-out words, after"], results)
