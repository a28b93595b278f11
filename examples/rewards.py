"""Ready-made rewards; docs/rewards.md says what each of them needs. Use them in place, or change a
copy.

    python grpo.py --steps 5 --reward examples/rewards.py:sharpness=5,color=1
    python grpo.py --reward examples/rewards.py:ocr --prompts words.txt
    python -m examples.rewards    # lists them

Does a reward see what you see? Choose pictures yourself with choose.py, then count how often each
of some rewards agrees with you:

    python -m examples.rewards runs/mine/choices.jsonl --reward clip,sharpness,mine.py:bright
"""
import argparse, base64, concurrent.futures, difflib, functools, importlib, inspect, io, itertools
import json, os, re, sys, unicodedata, urllib.request, warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
from grpo import (  # before torch, which reads when it is imported how threads are to wait
    BadInput, attempt, compute_rewards, find_color, load_rewards, open_image, pil_to_tensor)
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

def post(question):
    """A text and pictures -> the answer of the vision-language model at JUDGE_URL."""
    text, *urls = question
    content = [{"type": "text", "text": text}]
    content += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": os.environ["JUDGE_MODEL"], "temperature": 0,
            "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        os.environ["JUDGE_URL"] + "/v1/chat/completions", json.dumps(body).encode(),
        {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["choices"][0]["message"]["content"] or ""

def ask(questions, images):
    """-> {question: answer}. Eight are asked at a time, and equal ones once. Of grpo.py's trial, in
    which image i is plain gray, all i, only one is asked: that finds a server that is down."""
    questions = list(dict.fromkeys(questions))
    is_trial = all([image.getextrema() == ((i % 256, i % 256),) * 3
                    for i, image in enumerate(images)])
    server = [f"{name}={os.environ.get(name)}" for name in ("JUDGE_URL", "JUDGE_MODEL")]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(post, questions[:1] if is_trial else questions)
        answers = attempt(" ".join(server), list, answers)
    return dict(zip(questions, answers * len(questions) if is_trial else answers))

def to_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

def judge(images, prompts, targets=None):
    """A vision-language model's rating, 0 to 10. JUDGE_URL is a server with OpenAI's protocol."""
    text = "Does the picture show this: {}? Answer with one number, 0 (no) to 10 (yes)."
    questions = [(text.format(prompt), to_url(image)) for prompt, image in zip(prompts, images)]
    answers = ask(questions, images)
    scores = []
    for answer in [answers[question] for question in questions]:
        number = re.search(r"\d+(\.\d+)?", answer)
        if number is None:
            warnings.warn(f"judge returns 0, because there is no number in the answer {answer!r}")
        scores.append(float(number[0]) if number else 0.0)
    return scores

def compare(images, prompts, targets=None):
    """How often it beats the other images of its group, 0 to 1; a tie is half. `judge`'s model sees
    each pair in both orders, G(G - 1) calls for a group of G. Equal images tie without a call."""
    text = ("Which picture shows this better, the first or the second: {}? "
            "Answer with one digit: 1, 2, or 0 if neither is better.")
    urls = [to_url(image) for image in images]
    questions = {}  # of each pair (i, j), of which i is shown first
    # Equal prompts stand next to each other. Images of two prompts are never compared; those of
    # edit.py are equal if their sources are, too.
    for (prompt, _), group in itertools.groupby(
            range(len(images)), lambda i: (prompts[i], getattr(prompts[i], "source", None))):
        for i, j in itertools.permutations(group, 2):
            questions[i, j] = (text.format(prompt), urls[i], urls[j])
    answers = ask([each for each in questions.values() if each[1] != each[2]], images)
    wins = [[] for _ in images]
    for (i, j), question in questions.items():
        win = read_win(answers.get(question, "0"))
        wins[i].append(win)
        wins[j].append(1 - win)
    return [sum(each) / len(each) if each else 0.5 for each in wins]

def read_win(answer):
    """-> 1 if the first picture is better, 0 if the second is, 0.5 for a tie."""
    digits = set(re.findall(r"\b[012]\b", answer))
    if len(digits) != 1:
        warnings.warn(f"compare takes this answer for a tie: {answer!r}")
    return {"1": 1, "2": 0}.get("".join(digits), 0.5)

# --- Does a reward agree with a person? ---------------------------------------
def read_row(path, line):
    """A line of choices.jsonl -> prompt, pictures, pairs (better, worse) of their indices."""
    row = json.loads(line)
    names = row["pictures"]
    left = list(range(len(names)))
    pairs = []
    for name in row["order"]:  # best first; those that are not in it are worse
        left.remove(names.index(name))
        pairs += [(names.index(name), worse) for worse in left]
    return row["prompt"], [open_image(path.parent / "choices" / name) for name in names], pairs

def count_pairs(path, rewards):
    """-> {reward: [groups, 3]}: pairs in which it agrees, in which it does not, and its ties."""
    counts = {name: [] for name in rewards}
    for number, line in enumerate(attempt(path, path.read_text, "utf-8").splitlines(), start=1):
        prompt, images, pairs = attempt(f"{path}, line {number}", read_row, path, line)
        if not pairs:
            continue
        for name, (function, weight) in rewards.items():
            scores, _ = compute_rewards(images, [prompt] * len(images), [None] * len(images),
                                        {name: (function, weight or 1)})
            signs = [(scores[better] - scores[worse]).sign().item() for better, worse in pairs]
            counts[name].append([signs.count(sign) for sign in (1, -1, 0)])
    if not all(counts.values()):
        raise BadInput(f"{path}: has no picture that was chosen over another")
    return {name: np.array(rows) for name, rows in counts.items()}

def print_agreement(path, rewards):
    """With intervals by bootstrap over groups, as the pairs of a group are not independent."""
    counts = count_pairs(path, rewards)
    groups, pairs = [(len(rows), rows.sum()) for rows in counts.values()][0]
    print(f"{groups} groups, {pairs} pairs of a better and a worse picture\n\n"
          f"{'reward':16} agrees  95 % interval  ties")
    for name, rows in counts.items():
        rng = np.random.default_rng(0)
        drawn = rng.multinomial(groups, [1 / groups] * groups, 10_000) @ rows
        drawn = drawn[drawn[:, :2].any(1)]  # not those with ties alone
        agrees, differs, ties = rows.sum(0)
        found = f"{'-':>6}  {'-':>13}"
        if agrees + differs:
            low, high = np.quantile(drawn[:, 0] / drawn[:, :2].sum(1), [0.025, 0.975])
            found = f"{agrees / (agrees + differs):6.2f}   {low:.2f} .. {high:.2f}"
        print(f"{name:16} {found}  {ties / pairs:4.0%}")

def main():
    own = {name: function for name, function in globals().items() if inspect.isfunction(function)
           and [*inspect.signature(function).parameters] == ["images", "prompts", "targets"]}
    listed = "\n".join([f"{name:12} {inspect.getdoc(own[name])}" for name in own])
    parser = argparse.ArgumentParser(description=f"{__doc__}\n{listed}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="?", type=Path, help="the choices.jsonl of a run")
    parser.add_argument("--reward", help="as for grpo.py; those of the list by their names alone")
    args = parser.parse_args()
    if not args.choices:
        return parser.print_help()
    try:
        parts = [part.strip() for part in (args.reward or "").split(",")]
        parts = [f"{__file__}:{part}" if part.split("=")[0] in own else part for part in parts]
        print_agreement(args.choices, load_rewards(",".join(parts)))
    except BadInput as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")

if __name__ == "__main__":
    main()
