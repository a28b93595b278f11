"""Ready-made rewards; docs/rewards.md says what each of them needs. Use them in place, or change a
copy.

    python grpo.py --steps 5 --reward examples/rewards.py:sharpness=5,color=1
    python grpo.py --reward examples/rewards.py:ocr --prompts words.txt
    python -m examples.rewards    # lists them
"""
import argparse, difflib, functools, importlib, inspect, io, itertools, os, re, sys, unicodedata
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
from grpo import (  # before torch, which reads when it is imported how threads are to wait
    BadInput, attempt, find_color, pil_to_tensor)
import diffusers
import huggingface_hub
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image, ImageOps
from examples.judge import ask, read_rating, read_winner, read_yes, to_url

CLIP = "openai/clip-vit-large-patch14"  # or another CLIP
PICKSCORE = "yuvalkirstain/PickScore_v1"  # a CLIP fine-tuned on people's preferences
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HEAD = "trl-lib/ddpo-aesthetic-predictor"  # LAION's, for this CLIP; or a file
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

def need(module, packages):
    """Imports a module, or says in one line what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadInput(f"this reward needs pip install {packages}: {error}") from None

def sharpness(images, prompts, targets):
    """How much neighbouring pixels differ."""
    scores = []
    for image in images:
        pixels = pil_to_tensor([image])  # [1, 3, H, W]
        down = pixels.diff(dim=2).abs().mean()
        right = pixels.diff(dim=3).abs().mean()
        scores.append((down + right).item())
    return scores

def even(images, prompts, targets=None):
    """1 - |pixel color - color that the prompt names|, averaged over all pixels."""
    scores = []
    for image, prompt in zip(images, prompts):
        color = find_color(prompt)[:, None, None]  # [3, 1, 1]
        scores.append(1 - (pil_to_tensor([image]) - color).abs().mean().item())
    return scores

@functools.cache
def load_reader():
    need("onnxruntime", "rapidocr onnxruntime")
    threads = {"EngineConfig.onnxruntime.intra_op_num_threads": torch.get_num_threads()}
    reader = need("rapidocr", "rapidocr onnxruntime").RapidOCR
    return reader(params={"Global.log_level": "error", **threads})

def match_letters(wanted, seen):
    """2 x common letters / all letters of both. Case, spaces and Unicode form are ignored."""
    texts = [unicodedata.normalize("NFKC", text).casefold() for text in (wanted, seen)]
    a, b = ("".join(text.split()) for text in texts)
    return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()

def find_phrases(prompt):
    """The phrases in double quotes or, if there are none, those that the pipeline renders."""
    double = re.findall(r'"[^"]*"|“[^“”]*”|「[^「」]*」', prompt)
    painted = diffusers.GlmImagePipeline.get_glyph_texts(None, prompt)[0]
    if 0 < len(double) < len(painted):
        warnings.warn(f"GLM-Image takes apostrophes for quotes, and renders {painted}: {prompt}")
    return [phrase[1:-1] for phrase in double] or painted

def ocr(images, prompts, targets=None):
    """How closely RapidOCR's reading of the image matches the words that the prompt quotes, 0 to 1.
    pip install rapidocr onnxruntime"""
    scores = []
    for image, prompt in zip(images, prompts):
        phrases = find_phrases(prompt)
        if "".join(phrases):
            found = load_reader()(image)
            seen = found.to_markdown() if found.txts else ""  # in reading order
            orders = itertools.islice(itertools.permutations(phrases), 24)  # all, of 4 phrases
            scores.append(max(match_letters("".join(order), seen) for order in orders))
        else:
            warnings.warn(f"ocr returns 0, because this prompt quotes no words: {prompt}")
            scores.append(0.0)
    return scores

@functools.cache
def load_clip(name, processor):
    """CLIP is loaded on first use, and kept on the CPU between uses."""
    model = attempt(name, transformers.CLIPModel.from_pretrained, name)
    return model, transformers.CLIPProcessor.from_pretrained(processor)

def embed(images, prompts, name, processor):
    """-> CLIP's embeddings of images and texts, [N, D] each, with norm 1, and its logit scale."""
    model, processor = load_clip(name, processor)
    inputs = processor(
        images=images, text=prompts, return_tensors="pt", padding=True, truncation=True)
    output = model.to(DEVICE)(**inputs.to(DEVICE))
    model.cpu()
    return output.image_embeds.cpu(), output.text_embeds.cpu(), model.logit_scale.exp()

def clip(images, prompts, targets=None):
    """Whether the image shows what the prompt says: the cosine of their CLIP embeddings."""
    images, texts, _ = embed(images, prompts, CLIP, CLIP)
    return (images * texts).sum(dim=1)

def pickscore(images, prompts, targets=None):
    """Which image of a prompt people would choose (arXiv 2305.01569): 100 x a cosine, about 20."""
    images, texts, scale = embed(images, prompts, PICKSCORE, PICKSCORE_PROCESSOR)
    return scale * (images * texts).sum(dim=1)

def aesthetic(images, prompts, targets=None):
    """Whether it looks good, about 1 to 10: LAION's predictor, linear layers on CLIP embeddings."""
    x, _, _ = embed(images, prompts, CLIP, CLIP)
    name = "aesthetic-model.pth"
    file = HEAD if os.path.isfile(HEAD) else huggingface_hub.hf_hub_download(HEAD, name)
    layers = list(torch.load(file, map_location="cpu", weights_only=True).values())
    for weight, bias in zip(layers[::2], layers[1::2]):
        x = F.linear(x, weight, bias)
    return x[:, 0]

def aesthetic_z(images, prompts, targets=None):
    """`aesthetic` as a z-score over the images of a step, to add to rewards of another scale."""
    scores = aesthetic(images, prompts)
    return (scores - scores.mean()) / (scores.std() + 1e-6)

aesthetic_z.relative = True  # scores of two calls do not compare

def jpeg(images, prompts, targets=None):
    """How well it compresses: 1 - JPEG bytes / raw bytes."""
    scores = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=95)
        scores.append(1 - file.tell() / (3 * image.width * image.height))
    return scores

def fit_targets(images, targets):
    """-> the targets in the sizes of their images."""
    if None in targets:
        raise BadInput("this reward needs a target for every prompt")
    return [target.resize(image.size, Image.BICUBIC) for image, target in zip(images, targets)]

def ssim(images, prompts, targets):
    """Structural similarity to its target (Wang 2004), with Gaussian windows of 11 x 11; 1 if they
    are equal. pip install scikit-image"""
    metrics = need("skimage.metrics", "scikit-image")
    scores = []
    for image, target in zip(images, fit_targets(images, targets)):
        scores.append(metrics.structural_similarity(
            np.asarray(image), np.asarray(target), data_range=255, channel_axis=2,
            gaussian_weights=True, sigma=1.5, use_sample_covariance=False))
    return scores

@functools.cache
def load_lpips():
    return need("lpips", "lpips -r requirements.txt").LPIPS(net="alex", verbose=False)

def lpips(images, prompts, targets):
    """Minus the perceptual distance to its target (arXiv 1801.03924).
    pip install lpips -r requirements.txt"""
    scores = []
    for pair in zip(images, fit_targets(images, targets)):
        pair = pil_to_tensor(pair)
        scores.append(-load_lpips()(pair[:1], pair[1:], normalize=True).item())
    return scores

# --- Rewards that ask a server ------------------------------------------------
RATE = "Answer with one number, 0 (no) to 10 (yes)."

def score(name, questions, read):
    """-> what `read` makes of the answers; 0 for those that it cannot read."""
    found = ask(name, questions, read)
    return [found[question] or 0.0 for question in questions]

def show_edit(text, image, prompt, source):
    """A question about a source, which is shown first, and its edit. The source is shown in the
    size of the edit: a photo would be megabytes of PNG."""
    made = f"The second picture was made from the first by this instruction: {prompt}. "
    return made + text, to_url(ImageOps.contain(source, image.size)), to_url(image)

def judge(images, prompts, targets=None):
    """A vision-language model's rating, 0 to 10: does the picture show what the prompt says? If the
    prompt has a source, is it edited so? JUDGE_URL is a server with OpenAI's protocol."""
    questions = []
    for image, prompt, source in zip(images, prompts, targets or [None] * len(images)):
        if source is None:
            questions.append((f"Does the picture show this: {prompt}? {RATE}", to_url(image)))
        else:
            text = f"Is what the instruction asks for done in the second? {RATE}"
            questions.append(show_edit(text, image, prompt, source))
    return score("judge", questions, read_rating)

def kept(images, prompts, targets):
    """Whether an edit left alone what its instruction does not name, 0 to 10: `judge`'s model."""
    if None in targets:
        raise BadInput("kept compares an edit with its source, and a prompt has none")
    text = f"Is all that the instruction does not name the same in both? {RATE}"
    questions = [show_edit(text, *row) for row in zip(images, prompts, targets)]
    return score("kept", questions, read_rating)

def yes(images, prompts, targets=None):
    """P(yes), 0 to 1, of `judge`'s model, asked whether the picture shows what the prompt says, as
    VQAScore asks (arXiv 2404.01291)."""
    text = 'Does this figure show "{}"? Please answer yes or no.'
    questions = [(text.format(prompt), to_url(image)) for image, prompt in zip(images, prompts)]
    return score("yes", questions, read_yes)

def compare(images, prompts, targets=None):
    """How often it beats the other images of its group, 0 to 1; a tie is half. `judge`'s model sees
    each pair in both orders, G(G - 1) calls for a group of G. Equal images tie without a call."""
    text = ("Which picture shows this better, the first or the second: {}? "
            "Answer with one digit: 1, 2, or 0 if neither is better.")
    urls = [to_url(image) for image in images]
    questions = {}  # of each pair (i, j), of which i is shown first
    # Equal prompts stand next to each other. Images of two prompts are never compared; those of
    # edit.py are equal if their sources are, too.
    for _, group in itertools.groupby(
            range(len(images)), lambda i: (prompts[i], getattr(prompts[i], "source", None))):
        for i, j in itertools.permutations(group, 2):
            questions[i, j] = (text.format(prompts[i]), urls[i], urls[j])
    asked = [question for question in questions.values() if question[1] != question[2]]
    winners = ask("compare", asked, read_winner)
    wins = [[] for _ in images]
    for (i, j), question in questions.items():
        win = winners.get(question)
        win = 0.5 if win is None else win
        wins[i].append(win)
        wins[j].append(1 - win)
    return [sum(each) / len(each) if each else 0.5 for each in wins]

compare.relative = True  # its scores say nothing across calls, as each call has other opponents

# --- The list -----------------------------------------------------------------
def main():
    own = {name: function for name, function in globals().items() if inspect.isfunction(function)
           and [*inspect.signature(function).parameters] == ["images", "prompts", "targets"]}
    listed = "\n".join([f"{name:12} {inspect.getdoc(own[name])}" for name in own])
    parser = argparse.ArgumentParser(description=f"{__doc__}\n{listed}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    parser.print_help()

if __name__ == "__main__":
    main()
