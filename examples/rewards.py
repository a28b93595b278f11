"""Ready-made rewards: sharpness, even, ocr, clip, pickscore, aesthetic, jpeg, mse, ssim and lpips.
Use them in place, or change a copy; docs/rewards.md says what each of them needs.

    python grpo.py --steps 5 --reward examples/rewards.py:sharpness=5,color=1
    python grpo.py --reward examples/rewards.py:ocr --prompts words.txt

judge.py has more, which ask a vision-language model: judge, kept, yes and compare.
"""
import difflib, functools, importlib, io, itertools, os, re, unicodedata, warnings

from grpo import BadInput, DEVICE, Prompt, attempt, find_color, pil_to_tensor
import diffusers
import huggingface_hub
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image

CLIP = "openai/clip-vit-large-patch14"  # or another CLIP
PICKSCORE = "yuvalkirstain/PickScore_v1"  # a CLIP fine-tuned on people's preferences
PICKSCORE_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
HEAD = "trl-lib/ddpo-aesthetic-predictor"  # LAION's, for this CLIP; or a file

def need(module, packages):
    """Imports a module, or says in one line what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise BadInput(f"this reward needs pip install {packages}: {error}") from None

def find_groups(prompts, targets):
    """-> a list of indices for each group, which has its own Prompt. Of texts that are given by
    hand, equal neighbours with equal targets are a group."""
    def key(i):
        return id(prompts[i]) if isinstance(prompts[i], Prompt) else (prompts[i], targets[i])

    return [[*group] for _, group in itertools.groupby(range(len(prompts)), key)]

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

def mse(images, prompts, targets):
    """Minus the mean squared error to its target, of pixels in 0..1."""
    targets = fit_targets(images, targets)
    return -(pil_to_tensor(images) - pil_to_tensor(targets)).square().mean(dim=(1, 2, 3))

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
