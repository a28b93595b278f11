"""grpo.py: GRPO for GLM-Image in one file. It fine-tunes the model on any reward you can compute.

GLM-Image has two halves: an autoregressive transformer (AR, 9 B weights) writes image tokens, and
a diffusion transformer (DiT, 7 B weights) paints them. Only the AR half is trained:

    prompt ---> AR ---- tokens ---> DiT + VAE ---> image ---> reward ---> advantage
              trained                frozen              any function    z-score in the group
                 ^--------------- update: a clipped policy gradient <---------+

One step of GRPO (arXiv 2402.03300), in the loop of `GRPOTrainer.train`:
  1. sample   the policy, AR + LoRA, draws G token sequences per prompt; each token is an action
  2. decode   the frozen DiT paints them; the G images of a prompt share their noise
  3. score    a reward function, which need not be differentiable, gives each image a number
  4. compare  advantage = (reward - mean) / std of its group; the mean replaces a value network
  5. update   tokens of better images become likelier; a clip and a KL keep the policy from leaping
  6. log      metrics, pictures of fixed prompts, a checkpoint

Axes  P  prompts of a step on this GPU   N  = P * G samples, grouped by prompt: p0 p0 p1 p1
      G  samples per prompt, a group     B  samples per micro-batch
      L  prompt tokens, padded left      T  image tokens, the same number for every image
      V  codes; an image token is a code, 0 .. V - 1
Run `python grpo.py` or `torchrun --nproc-per-node 8 grpo.py`. requirements.txt has its packages."""
import collections, contextlib, dataclasses, datetime, functools, importlib.machinery
import importlib.util, io, json, math, os, re, shlex, sys, tempfile, time, traceback, typing
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # threads that spin on stall on a busy CPU
from pathlib import Path
import diffusers, safetensors.torch, torch, transformers
import numpy as np
from PIL import Image, ImageColor, ImageOps
from torch import nn

WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1)  # torchrun sets these variables
RANK = int(os.environ.get("RANK") or 0) % WORLD_SIZE  # one process alone is the first
CUDA = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if CUDA else "cpu")

class BadInput(ValueError):
    """Something that the user gave is wrong. `main` prints the message on one line."""

def attempt(what, function, *args, **kwargs):
    """Calls a function that fails because of what the user gave, or where; `what` names it."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise BadInput(f"{what}: {str(error) or repr(error)}") from error

# --- Settings -----------------------------------------------------------------
# Each field is a flag: `python grpo.py --group-size 8`, or --group_size.
TINY_MODEL = str(Path(__file__).resolve().parent / "examples/tiny-glm-image")

def flag(default, text):
    return transformers.hf_argparser.HfArg(default=default, help=text)

@dataclasses.dataclass
class Config:
    # What is trained, and on what
    model: str = flag(TINY_MODEL, "hub id or folder; GLM-Image itself is zai-org/GLM-Image")
    wrapper: str | None = flag(None, "file.py:Class for a model other than GLM-Image")
    adapter: str | None = flag(None, "folder of LoRA weights to begin with")
    prompts: str | None = flag(None, "text file, a prompt on each line; default: prompts.txt")
    reward: str = flag("color", "color, mse or file.py:function; a weighted sum: color,my.py:f=.2")
    # GRPO
    steps: int = flag(100, "number of steps, counting those before --resume")
    group_size: int = flag(4, "images per prompt; try 8 or 16 if the reward is noisy")
    batch_size: int = flag(8, "prompts per step, shared by all GPUs")
    micro_batch_size: int = flag(4, "images decoded or trained on at a time; fewer save memory")
    num_iterations: int = flag(1, "updates per rollout; 2 costs little, as rollouts take longest")
    lr: float = flag(1e-5, "learning rate of AdamW")
    warmup_steps: int = flag(10, "steps over which the learning rate rises to --lr")
    clip_range: float = flag(0.2, "how far a ratio may move from 1 before PPO clips it")
    kl_coef: float = flag(0.01, "weight of the KL to the base model; 0 turns it off")
    max_grad_norm: float = flag(1.0, "gradients with a larger norm are scaled down to it")
    lora_rank: int = flag(32, "rank of the LoRA; more can learn more and takes more memory")
    # The model
    width: int = flag(512, "of the images in pixels, a multiple of 32")
    height: int = flag(512, "of the images in pixels, a multiple of 32")
    temperature: float | None = flag(None, "divides the logits; default: the model's own")
    top_k: int | None = flag(None, "draw from the k likeliest; 0: all; default: its own or 50")
    top_p: float | None = flag(None, "draw from the likeliest codes summing to p; default: its own")
    decode_steps: int = flag(20, "denoising steps of the DiT; fewer are faster and less detailed")
    guidance: float = flag(1.5, "classifier-free guidance of the DiT; 1 turns it off")
    offload: typing.Literal["auto", "on", "off"] = flag(
        "auto", "keep only one half of the model on the GPU; auto: if it has less than 60 GiB")
    # The run
    out: str | None = flag(None, "new folder for the run; default: runs/, date and time")
    resume: str | None = flag(None, "folder of a run to continue; with --out, it may be new")
    save_every: int = flag(10, "steps between two saves of pictures and adapters")
    seed: int = flag(0, "seed of everything random")

    def check(self):
        """Makes paths absolute, as a run may be resumed in another directory. Refuses what would
        waste hours in silence, or the time in which a model is loaded."""
        for name in "model wrapper adapter prompts out resume".split():
            path = getattr(self, name)
            # A model may be a hub id, and Name() is a notebook's wrapper.
            if path and str(path)[-2:] != "()" and (name != "model" or os.path.exists(path)):
                setattr(self, name, os.path.abspath(path))
        parts = [part.strip() for part in self.reward.split(",")]
        self.reward = ",".join(os.path.abspath(part) if ":" in part else part for part in parts)
        may_be_0 = "lr warmup_steps clip_range kl_coef guidance top_k seed".split()
        for name, value in vars(self).items():
            least = 2 if name == "group_size" else 0  # one image has nothing to compare with
            most = 1 if name == "top_p" else 2**40
            is_wrong = isinstance(value, (int, float)) and not least <= value <= most  # or NaN
            if is_wrong or (value in (0, "") and name not in may_be_0):
                raise BadInput(f"--{name} must not be {value!r}")
        if self.width % 32 or self.height % 32:
            raise BadInput("--width and --height must be multiples of 32")
        if self.out and not self.resume and RANK == 0 and os.path.exists(self.out):
            raise BadInput(f"--out {self.out}: must be a new folder; --resume continues a run")

    __post_init__ = check

# --- The maths of GRPO: pure functions of tensors -----------------------------
def compute_policy_logprobs(logits, allowed=None):
    """log pi(code), the distribution of the policy, defined once for sampler and trainer.
    logits [.., V], fp32; allowed [.., V], bool: the codes that top-k and top-p left, or None
    -> log-probs [.., V]. The trap: a trainer that normalizes over other codes than the sampler,
    such as those that its new weights allow, has the log-probs of another policy. So the sampler
    keeps its codes (2512.02556). The KL's reference needs them too, or it counts what was cut."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -math.inf)
    return logits.log_softmax(dim=-1)

def sample_codes(logprobs, uniform):
    """Inverse-CDF sampling: logprobs [N, V], random numbers in 0..1 [N, 1] -> codes [N, 1].
    A sample with random numbers of its own does not depend on what else is in the batch."""
    cdf = logprobs.double().exp().cumsum(1)  # its last value is 1 only up to rounding
    # right=True finds the first code whose cdf is above the point. Its probability is not 0.
    return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)

def compute_advantages(rewards, group_size):
    """A = (r - mean of its group) / (std of its group + 1e-6). rewards [N] -> advantages [N]."""
    groups = torch.as_tensor(rewards, dtype=torch.float64).view(-1, group_size)  # [P, G]
    # A shift changes nothing, but makes equal rewards 0: their mean must be exact, because any
    # rounding error would be divided by 1e-6.
    groups = groups - groups[:, :1]
    advantages = groups - groups.mean(1)[:, None]
    advantages /= groups.std(1)[:, None] + 1e-6  # Dr. GRPO (2503.20783) omits this division
    return advantages.flatten().float()

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2,
                      ref_logprobs=None, kl_coef=0, kl=None):
    """PPO's clipped surrogate (1707.06347) plus a KL to the reference -> loss, {metric: float}.
        ratio = exp(new - old), clipped to 1 - clip_range .. 1 + clip_range
        loss  = -mean(min(ratio * A, clip(ratio) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1
    Log-probs are [N, T], or [N] for whole samples; advantages are [N]. Only `new_logprobs` gets a
    gradient. The value of k3 estimates KL(new, ref) if `new` drew the tokens (Schulman,
    "Approximating KL Divergence"), and its gradient is that of KL(ref, new). A wrapper that knows
    the exact KL gives it as `kl`, in the place of k3.
    Why the loss may be 0: with one update per rollout every ratio is 1 and policy_loss is -mean(A),
    which is 0 over whole groups. Its gradient is not: -mean(A * grad(new)), as in REINFORCE."""
    ratio = (new_logprobs - old_logprobs.detach()).clamp(max=20).exp()  # [N, T], finite
    A = advantages.detach().to(ratio)
    A = A.view(len(ratio), *[1] * (ratio.dim() - 1))  # [N, 1]
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * A
    # A token has no gradient if A > 0 and its ratio is above the clip, or if A < 0 and it is below,
    # as the minimum is constant.
    loss = -torch.min(unclipped, clipped).mean()  # a loss of your own goes here
    clip_frac = (clipped < unclipped).float().mean()  # where the minimum is clipped
    metrics = dict(policy_loss=loss, ratio_mean=ratio.mean(), clip_frac=clip_frac)
    if ref_logprobs is not None:
        delta = (ref_logprobs.detach() - new_logprobs).clamp(max=20)  # exp stays finite
        # expm1(x) is exp(x) - 1, exact near 0.
        kl = (torch.expm1(delta) - delta if kl is None else kl).mean()
        metrics["kl"] = kl
        loss = loss + kl_coef * kl
    metrics["loss"] = loss
    return loss, {name: value.item() for name, value in metrics.items()}

# --- Rewards ------------------------------------------------------------------
# A reward is any function that gives each image a finite number, higher is better. Only differences
# within a group matter. `--reward mine.py:bright` takes this one from mine.py:
#     def bright(images, prompts, targets):  # PIL images, texts, PIL images to imitate or None
#         return [image.convert("L").resize((1, 1)).getpixel((0, 0)) for image in images]
COLORS = {name: torch.tensor(ImageColor.getrgb(name)).float() / 255  # [3], in 0..1
          for name in "red orange yellow green blue purple white black".split()}

def pil_to_tensor(images):
    """PIL images of one size -> [N, 3, H, W], fp32 in 0..1."""
    pixels = np.stack([image.convert("RGB") for image in images])
    return torch.tensor(pixels).movedim(3, 1).float() / 255

def open_image(path):
    """-> PIL image in RGB, as its owner sees it: upright, and white where transparent."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode[0] in "IF":  # PIL would cut off what is above 255
        raise BadInput(f"{path}: has more than 8 bits per channel")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")

def find_color(prompt):
    """The first color word of the prompt -> [3], in 0..1."""
    for word in re.findall(r"\w+", prompt.lower()):
        if word in COLORS:
            return COLORS[word]
    raise BadInput(f"--reward color: there is none of {', '.join(COLORS)} in {prompt!r}")

def reward_color(images, prompts, targets=None):
    """1 - |mean color of the image - color that its prompt names|, in 0..1."""
    mean_colors = pil_to_tensor(images).mean((2, 3))  # [N, 3]
    return [1 - nn.functional.l1_loss(mean_color, find_color(prompt))
            for mean_color, prompt in zip(mean_colors, prompts)]

def reward_mse(images, prompts, targets):
    """Minus the mean squared error to the target, which is resized to the image."""
    if None in targets:
        raise BadInput("--reward mse: every line of --prompts needs a target")
    targets = [target.resize(images[0].size) for target in targets]
    return -(pil_to_tensor(images) - pil_to_tensor(targets)).square().mean((1, 2, 3))

REWARDS = {"color": reward_color, "mse": reward_mse}

@torch.no_grad()
def compute_rewards(images, prompts, targets, rewards):
    """Calls each of {name: (function, weight)} -> their weighted sum [N], fp64, {metric: mean}.
    Each gets copies of its own, and may sort them or paint over them."""
    total = torch.zeros(len(images), dtype=torch.float64)
    metrics = {}
    for name, (function, weight) in rewards.items():
        pictures = [target and attempt("--prompts", open_image, target) for target in targets]
        values = function([image.copy() for image in images], list(prompts), pictures)
        wrong = f"--reward {name}: must give {len(images)} finite numbers and gave"
        scores = attempt(f"{wrong} {values!r:.200}", torch.as_tensor, values, dtype=torch.float64,
                         device="cpu")
        if scores.shape != total.shape:
            raise BadInput(f"{wrong} {values!r:.200}")
        for i in (~(weight * scores).isfinite()).nonzero():
            raise BadInput(f"{wrong} {scores[i].item()} for image {i.item() + 1}, {prompts[i]!r}")
        metrics[f"reward/{name}"] = scores.mean().item()
        total += weight * scores
    metrics["reward"] = total.mean().item()
    return total, metrics

# --- LoRA (arXiv 2106.09685): the weights that are trained --------------------
class LoRA:
    """W x + b becomes W x + 2 B A x + b, where W and b are frozen, B begins at 0, and 2 is alpha /
    rank. `layers` is a regex for the names of linear layers. `weights` has A [rank, in] and B [out,
    rank] of each, under peft's names. They are fp32: in bf16, 0.02 and an Adam step is 0.02."""
    def __init__(self, model, layers, rank):
        self.config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=layers)
        self.enabled = True  # if not, the model is the reference of the KL
        self.model = model
        self.weights = {}
        self.pairs = {}  # A and B of each linear layer
        self.copies = {}  # of A and B in another dtype
        for name, linear in model.named_modules():
            if re.fullmatch(layers, name):
                # Another forward would be lost, and torch's encoder layer may not call this one.
                forward = getattr(linear.forward, "func", linear.forward)  # LoRA's is a partial
                owner = type(model.get_submodule(name.rpartition(".")[0]))
                if (getattr(forward, "__func__", None) not in (nn.Linear.forward, LoRA.forward)
                        or owner.forward is nn.TransformerEncoderLayer.forward):
                    raise BadInput(f"--wrapper: {name}, of its lora_layers, must be an nn.Linear "
                                   "without a forward of its own, called by its owner")
                # Drawn on the CPU, so equal on all GPUs, and as in peft.
                A = nn.Linear(linear.in_features, rank, bias=False, dtype=torch.float32)
                A = A.to(DEVICE).weight
                B = nn.Parameter(A.new_zeros(linear.out_features, rank))
                self.weights[f"base_model.model.{name}.lora_A.weight"] = A
                self.weights[f"base_model.model.{name}.lora_B.weight"] = B
                self.pairs[linear] = A, B
        self.attach()

    def attach(self):
        """A model has one LoRA at a time: this one takes the place of another trainer's."""
        for linear in getattr(self.model, "adapted", []):
            del linear.forward  # of the other one, which may have had other layers
        self.model.adapted = [*self.pairs]
        for linear in self.pairs:
            linear.forward = functools.partial(self.forward, linear)

    def forward(self, linear, inputs):
        """In the place of the layer's own. The trap: if 2 B A x is added to a W x that is rounded
        to bf16 already, what is below half a unit in its last place vanishes: most of a first
        update. So the small 2 B A x comes first. `addmm_` adds W x to it in fp32, and then rounds,
        which is right on average, as it is for a bias."""
        rows = inputs.reshape(-1, linear.in_features)
        if self.enabled:
            A, B = self.cast(linear, rows.dtype)
            output = rows @ A.T @ B.T
        else:  # the same product with zeros, so that the KL begins at exactly 0
            output = rows.new_zeros(len(rows), linear.out_features)
        output.addmm_(rows, linear.weight.T, beta=2)
        if linear.bias is not None:
            output += linear.bias
        return output.view(*inputs.shape[:-1], linear.out_features)

    def cast(self, linear, dtype):
        """A and B in the dtype of the model. The sampler needs them at every token, so copies are
        kept until a weight changes (not its `.data`), or gradients are on."""
        A, B = self.pairs[linear]
        key = linear, dtype, A._version, B._version
        if torch.is_grad_enabled():
            self.copies.clear()
        elif key not in self.copies:
            self.copies[key] = A.to(dtype), B.to(dtype)
        return self.copies.get(key) or (A.to(dtype), B.to(dtype))

    def save(self, folder, base_model):
        """Writes an adapter that peft reads too; `base_model` is a hub id or a folder."""
        folder.mkdir(exist_ok=True)
        config = json.dumps(self.config | dict(base_model_name_or_path=base_model))
        write_file(folder / "adapter_config.json", config.encode())
        write_file(folder / "adapter_model.safetensors", safetensors.torch.save(self.weights))

    @torch.no_grad()
    def load(self, saved):
        self.copies.clear()
        if saved.keys() != self.weights.keys():
            raise BadInput("the adapter is of other layers")
        for name, weight in self.weights.items():
            if saved[name].shape != weight.shape or not saved[name].isfinite().all():
                raise BadInput(f"the adapter's {name} has another shape, or is not finite")
            weight.copy_(saved[name])

    def load_folder(self, folder):
        """Reads what `save` wrote. Other programs' adapters may scale or add otherwise."""
        saved = json.loads((folder / "adapter_config.json").read_bytes())
        saved.pop("base_model_name_or_path", None)
        if saved != self.config:
            raise BadInput(f"must be of this program, with {self.config}, and has {saved}")
        self.load(safetensors.torch.load_file(folder / "adapter_model.safetensors"))

# --- What the trainer asks of a model -----------------------------------------
class Rollout(collections.namedtuple("Rollout", "prompts tokens logprobs allowed")):
    """What the sampler gives: N samples, in the order p0 p0 p1 p1.
      prompts   N texts
      tokens    [N, T], the codes that were drawn
      logprobs  [N, T], their log-probs at that time
      allowed   [N, T, V], bool: the codes that top-k and top-p left; None: all"""
    def part(self, rows):
        return Rollout(*[None if value is None else value[rows] for value in self])

# To train another kind of model, write a wrapper, and name it: `--wrapper mine.py:MyModel`.
# examples/toy.py is a small one. It needs
#   from_pretrained(path, config)  a class method: --model -> a wrapper, always the same weights
#   policy       a frozen nn.Module; the trainer adds LoRA to it, and trains nothing else
#   lora_layers  a regex for the names of its linear layers that get LoRA
#   encode(prompts)  raises a ValueError if the model cannot read one; its result is not used
#   sample(prompts, group_size, seeds)  step 1: P prompts, a seed for each -> a Rollout of N
#       samples on the CPU. Equal seeds give equal samples, whatever else is in the batch.
#   decode(prompts, tokens, seeds)  step 2: P prompts and seeds, tokens of N samples, which it must
#       not change -> N PIL images
#   compute_logprobs(rollout)  scores the rollout's tokens under the current policy -> log-probs,
#       with a gradient, and entropies, without; both [B, T], fp32 and on DEVICE. It may return a
#       third tensor, the exact KL to the base model, with a gradient, in the place of k3. With
#       --kl-coef it is called first without gradients and adapters, for the reference.
# Each layer of `lora_layers` is an nn.Linear, is called as a module in every `compute_logprobs`, be
# it an expert without a token, and has weights and inputs of one dtype. Dropout must be off.
# `sample` and `decode` turn gradients off.
# A trainer sets `wrapper.config` to its own. Optional are `defaults`, {flag: value}; if they name
# no `model`, `path` means nothing unless --model is typed. And a static method
# `load_prompts(path)`, in the place of the function far below, which must also read what
# `format_prompts` writes.

# --- The trainer --------------------------------------------------------------
def choose_prompts(step, num_prompts, config):
    """Indices of this GPU's P prompts in a step (1, 2, ..), and a seed for each. An epoch is a pass
    over the list. Its order follows from the run's seed, so resuming needs no saved state."""
    counts = range((step - 1) * config.batch_size, step * config.batch_size)[RANK::WORLD_SIZE]
    places = [divmod(count, num_prompts) for count in counts]
    indices = [np.random.default_rng([config.seed, epoch]).permutation(num_prompts)[place]
               for epoch, place in places]
    # Seeds below a million are kept for `save_samples` and evaluation. Each --seed has its own.
    return indices, [1_000_000 * (config.seed + 1) + count for count in counts]

def format_prompts(prompts, targets):
    """-> lines `prompt` or `prompt<TAB>target`: the prompts.txt of a run."""
    return "".join(f"{prompt}\t{os.path.abspath(target)}\n" if target else f"{prompt}\n"
                   for prompt, target in zip(prompts, targets, strict=True))

def check_prompts(prompts, targets, wrapper):
    """Refuses those that the model cannot read, or that would change when the run is resumed."""
    for prompt, _ in zip(prompts, targets, strict=True):
        if not re.fullmatch(r"[^#\s]([^\t\r\n]*\S)?", prompt):  # prompts.txt would not hold it
            raise BadInput(f"--prompts: must be a line of text without tabs: {prompt!r}")
        attempt(f"--prompts: the model cannot read {prompt!r}", wrapper.encode, [prompt])
    if hasattr(wrapper, "load_prompts"):
        wrong = "--wrapper: its load_prompts must read the prompts.txt that a run writes"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "prompts.txt")
            write_file(path, format_prompts(prompts, targets).encode())
            again, _ = attempt(wrong, wrapper.load_prompts, path)
        if again != prompts:
            raise BadInput(f"{wrong}, and makes {len(again)} other ones of it: {again!r:.300}")

class GRPOTrainer:
    """Trains the policy of a wrapper. rewards: {name: (function, weight)}, or None for those that
    config.reward names; targets: paths of pictures to imitate, or None."""
    def __init__(self, config, wrapper, prompts, rewards=None, targets=None):
        config.check()  # a notebook may have changed it since
        self.config = config
        self.wrapper = wrapper
        self.prompts = [*prompts]
        self.rewards = load_rewards(config.reward) if rewards is None else rewards
        self.targets = targets or [None] * len(prompts)
        # These replace settings in config.json. What was made in a notebook is in no file: it gets
        # a name with (), which no command can load.
        self.changes = dict(out=None, resume=None)
        if rewards is not None:
            wrong = "rewards: must be {name: (function, weight)}"
            self.changes["reward"] = attempt(wrong, lambda: ",".join(
                f"{name}()={weight:g}" for name, (_, weight) in rewards.items()))
        kind = type(wrapper)
        if kind is not GLMImageWrapper and (config.wrapper or "()").endswith("()"):
            file = getattr(sys.modules.get(kind.__module__), "__file__", None)
            in_file = file and kind.__module__ != "__main__"
            self.changes["wrapper"] = f"{file}:{kind.__name__}" if in_file else f"{kind.__name__}()"
        self.step = 0  # the last one that was made
        self.history = []  # one row a step
        new = [os.path.abspath(time.strftime(f"runs/%Y%m%d-%H%M%S-{time.time_ns() % 10**9}"))]
        if WORLD_SIZE > 1:
            torch.distributed.broadcast_object_list(new)  # the first process names the folder
        self.out = Path(config.resume or config.out or new[0]).absolute()
        self.how = ""  # to go on
        check_prompts(self.prompts, self.targets, wrapper)
        torch.manual_seed(config.seed)  # the first adapters are equal on all GPUs
        self.lora = LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
        if config.adapter and not (self.out / "checkpoint.pt").exists():
            attempt("--adapter", self.lora.load_folder, Path(config.adapter))
        self.optimizer = attempt("--wrapper: do its lora_layers match any?", torch.optim.AdamW,
                                 self.lora.weights.values(), config.lr, weight_decay=0.0)

    def start(self):
        """Takes over the model, and goes on from the last checkpoint, if there is one."""
        self.wrapper.config = config = self.config
        settings = json.dumps(vars(config) | self.changes, indent=4)  # an error leaves no folder
        self.lora.attach()
        if RANK == 0:  # only one process writes, and two new runs never share a folder
            attempt("--out", self.out.mkdir, parents=True, exist_ok=config.resume or self.how)
        checkpoint = self.out / "checkpoint.pt"
        log = self.out / "metrics.jsonl"
        # --resume, or a notebook's cell that is run again. `load` refuses a log without checkpoint.
        if checkpoint.exists() or log.exists():
            self.load(checkpoint, log)
        os.environ["RUN"] = str(self.out)  # for rewards that keep files
        if WORLD_SIZE > 1:
            self.check_disk()
        program = "torchrun .." if WORLD_SIZE > 1 else "python"
        file = shlex.quote(os.path.relpath(__file__))
        self.how = f"To go on: {program} {file} --resume '{self.out}'"
        if RANK == 0:  # all that is needed to go on, and to know what was trained
            path = self.out / "prompts.txt"
            text = format_prompts(self.prompts, self.targets)
            old = path.read_text("utf-8", "replace") if path.exists() else ""
            # Comments that were added to the file stay, unless its prompts are others.
            if re.sub(r"(?m)^\s*(#.*)?\n|[ \t]+$", "", old + "\n") != text:
                write_file(path, text.encode())
            write_file(self.out / "config.json", settings.encode())
            print(f"model: {config.model} on {DEVICE}\n"
                  f"files: {self.out}, at step {self.step} of {config.steps}", flush=True)
            if not self.step:
                self.save(0)  # pictures before training
            write_file(log, "".join(map(to_line, self.history)).encode())

    def check_disk(self):
        """Machines that see another folder, step or task would train another model, in silence."""
        seen = [None] * WORLD_SIZE
        home = self.out if RANK == 0 else None
        with attempt("--out", tempfile.TemporaryDirectory, dir=home) as mark:
            marks = [Path(mark).name]  # the first one's: no cache of a network disk has seen it
            torch.distributed.broadcast_object_list(marks)
            # A client of NFS may remember for a minute that it is not there. mkdir asks the server.
            with contextlib.suppress(OSError):
                self.out.mkdir(parents=True)
            found = dict(folder=(self.out / marks[0]).exists(), step=self.step,
                         prompts=self.prompts, flags=(self.config, self.changes))
            torch.distributed.all_gather_object(seen, {k: repr(v) for k, v in found.items()})
        differ = [name for name in found if len({other[name] for other in seen}) > 1]
        if differ:
            with contextlib.suppress(OSError):  # if it is empty, it was made for this start
                self.out.rmdir()
            raise BadInput(f"--out {self.out}: machines differ in their {' and '.join(differ)}: it "
                           "must be on a disk that all machines share, flags and prompts the same")

    def load(self, checkpoint, log):
        state = attempt(checkpoint, torch.load, checkpoint, "cpu", weights_only=True)
        if not {"trainer", "step"} <= {*state}:
            raise BadInput(f"--resume: {checkpoint} is of another version of grpo.py")
        self.step = state["step"]
        if state["trainer"] != type(self).__name__ or self.step > self.config.steps:
            raise BadInput(f"--resume: {checkpoint} has {self.step} steps of {state['trainer']}, "
                           f"and {self.config.steps} of {type(self).__name__} are asked for")
        wrong = f"--resume: {checkpoint} is of another model, wrapper or --lora_rank"
        attempt(wrong, self.lora.load, state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])
        # A step whose checkpoint was not written is made again.
        text = attempt(log, log.read_text, "utf-8", "replace") if log.exists() else ""
        rows = {}
        for part in re.split(r'(?={"step": \d)', text)[1:]:  # whatever else somebody has written
            with contextlib.suppress(ValueError):  # a row that is cut
                row, _ = json.JSONDecoder().raw_decode(part)
                rows.setdefault(row["step"], row)
        self.history = [rows[step] for step in sorted(rows) if step <= self.step]

    def train(self):
        config = self.config
        self.start()
        started = time.perf_counter()
        for step in range(self.step + 1, config.steps + 1):
            # Adam's first steps have full size, though their direction is hardly known.
            lr = config.lr * min(1, step / max(1, config.warmup_steps))
            self.optimizer.param_groups[0]["lr"] = lr
            indices, seeds = choose_prompts(step, len(self.prompts), config)
            prompts = [self.prompts[i] for i in indices]
            targets = [self.targets[i] for i in np.repeat(indices, config.group_size)]
            # 1. Sample.
            rollout = self.wrapper.sample(prompts, config.group_size, seeds)
            # 2. Decode.
            images = self.wrapper.decode(prompts, rollout.tokens, seeds)
            repeated = np.repeat(prompts, config.group_size).tolist()
            if [*rollout.prompts] != repeated or len(images) != len(repeated):
                raise BadInput("--wrapper: its samples must be in the order p0 p0 p1 p1, and its "
                               "decode must give an image for each")
            # 3. Score.
            rewards, metrics = compute_rewards(images, rollout.prompts, targets, self.rewards)
            # 4. Compare.
            advantages = compute_advantages(rewards, config.group_size)
            # 5. Update.
            metrics |= self.train_step(rollout, advantages)
            # 6. Log.
            metrics["reward_std"] = rewards.view(-1, config.group_size).std(1).mean().item()
            metrics["seconds"] = time.perf_counter() - started  # with the saving of the last step
            started = time.perf_counter()
            self.log(step, metrics)
            if RANK == 0:
                self.save(step)

    @torch.enable_grad()  # a reward's file may have turned gradients off
    def train_step(self, rollout, advantages):
        """Step 5: the updates from one rollout; advantages [N] -> {metric: float}. Micro-batches
        only save memory: each counts by its share of the samples, so the gradient is the same."""
        config = self.config
        size = config.micro_batch_size
        parts = [rollout.part(slice(i, i + size)) for i in range(0, len(advantages), size)]
        ref_logprobs = [None] * len(parts)
        if config.kl_coef:  # the reference is the policy without its adapters: no second model
            self.lora.enabled = False
            try:
                with torch.no_grad():
                    ref_logprobs = [self.wrapper.compute_logprobs(part)[0] for part in parts]
            finally:
                self.lora.enabled = True
        old_logprobs = {}
        totals = collections.Counter()  # `update` adds to it
        self.optimizer.zero_grad()  # drops those of an interrupted step
        for _ in range(config.num_iterations):
            for i, A in enumerate(advantages.split(size)):
                new_logprobs, entropy, *kl = self.wrapper.compute_logprobs(parts[i])  # [B, T]
                # The trap of bf16: the sampler rounds differently, so with its log-probs the ratio
                # would not begin at 1. So the old log-probs are those of the first pass here.
                old = old_logprobs.setdefault(i, new_logprobs.detach())
                loss, metrics = compute_grpo_loss(
                    new_logprobs, old, A, config.clip_range, ref_logprobs[i], config.kl_coef, *kl)
                metrics["entropy"] = entropy.mean().item()
                # How far the sampler and the trainer disagree: by rounding only, if all is well.
                metrics["sampler_gap"] = (parts[i].logprobs.to(DEVICE) - old).abs().mean().item()
                share = len(A) / len(advantages)
                if loss.requires_grad:  # else `update_weights` names the layer
                    (loss * share / WORLD_SIZE).backward()
                totals.update({name: share * value for name, value in metrics.items()})
            totals["grad_norm"] += self.update_weights()
        return {name: total / config.num_iterations for name, total in totals.items()}

    def update_weights(self):
        weights = self.lora.weights
        for name, weight in weights.items():
            if weight.grad is None:
                raise BadInput(f"--wrapper: a layer of its lora_layers got no gradient: {name}")
            if WORLD_SIZE > 1:
                torch.distributed.all_reduce(weight.grad)  # a sum; the losses were divided
        grad_norm = nn.utils.clip_grad_norm_(weights.values(), self.config.max_grad_norm)
        if grad_norm.isfinite():  # a NaN would stay in Adam's moments for ever
            self.optimizer.step()
        self.optimizer.zero_grad()
        return grad_norm.item()

    def log(self, step, metrics):
        """Step 6: adds a row, with the means over all GPUs, to the history, and prints and writes
        it. The checkpoint comes later, so a step that is killed is made and written again."""
        metrics["gpu_gib_max"] = torch.cuda.max_memory_allocated() / 2**30
        if WORLD_SIZE > 1:
            values = torch.tensor([*metrics.values()], dtype=torch.float64, device=DEVICE)
            torch.distributed.all_reduce(values)
            metrics = dict(zip(metrics, (values / WORLD_SIZE).tolist()))
        row = dict(step=step) | metrics
        self.step = step
        self.history.append(row)
        names = "step reward reward_std loss kl entropy grad_norm sampler_gap seconds".split()
        names += [f"reward/{name}" for name in self.rewards if len(self.rewards) > 1]
        if RANK == 0:
            left = round((self.config.steps - step) * row.get("seconds", 0))
            print(*[f"{name} {row[name]:<10.4g}" for name in names if name in row],
                  f"left {datetime.timedelta(seconds=left)}", flush=True)
            path = self.out / "metrics.jsonl"
            with attempt(path, path.open, "ab", buffering=0) as file:
                attempt(path, file.write, to_line(row).encode())

    def save(self, step):
        """There is a checkpoint after every step, so that a failure costs at most one."""
        if step % self.config.save_every == 0 or step == self.config.steps:
            self.save_samples(step)
        file = io.BytesIO()
        torch.save(dict(trainer=type(self).__name__, step=step, adapter=self.lora.weights,
                        optimizer=self.optimizer.state_dict()), file)
        write_file(self.out / "checkpoint.pt", file.getbuffer())

    def save_samples(self, step):
        """Pictures of the first prompts, always from the same seeds, and the adapter they show."""
        prompts = self.prompts[:8]
        seeds = range(len(prompts))
        rollout = self.wrapper.sample(prompts, 1, seeds)
        images = self.wrapper.decode(prompts, rollout.tokens, seeds)
        sheet = diffusers.utils.make_image_grid(images, 1, len(prompts))
        attempt(self.out, sheet.save, self.out / f"samples_{step:05d}.png")
        self.lora.save(self.out / f"adapter_{step:05d}", self.config.model)

def to_line(row):
    """A line of metrics.jsonl. JSON has no NaN."""
    return re.sub(": (NaN|-?Infinity)", ": null", json.dumps(row)) + "\n"

def write_file(path, data):
    """Writes another file, waits for the disk, and renames it: the old or the new one is whole."""
    partial = path.with_name(f"{path.name}.part")
    attempt(path, partial.write_bytes, data)
    with attempt(path, partial.open, "r+b") as file:
        attempt(path, os.fsync, file)
    attempt(path, partial.replace, path)

# --- GLM-Image, the machine room: two halves that take turns on a GPU ---------
class TwoHalves:
    """The AR half and the DiT half of a `GlmImagePipeline`, made fast and small. A first reader can
    skip this: it changes no number but by rounding."""
    def __init__(self, pipe, config):
        self.pipe = pipe
        self.config = config
        self.policy = policy = pipe.vision_language_encoder  # its vision tower is not used here
        self.ar = nn.ModuleList([policy.model.language_model, policy.lm_head]).train()
        self.dit = nn.ModuleList([pipe.text_encoder, pipe.transformer, pipe.vae]).eval()
        both = nn.ModuleList([self.ar, self.dit]).requires_grad_(False)
        # Activations are computed again in the backward pass. `.train()` is for that.
        policy.activation_checkpointing_enable()
        for name, norm in self.ar.named_modules():  # one kernel in the place of eight
            if hasattr(norm, "variance_epsilon"):
                fused = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon)
                fused.weight = norm.weight
                self.ar.set_submodule(name, fused)
        # The DiT makes its rotary tables on the CPU, from where each layer would fetch them.
        pipe.transformer.rope.register_forward_hook(
            lambda rope, inputs, tables: tuple(table.to(DEVICE) for table in tables))
        pipe.set_progress_bar_config(leave=False, disable=None)  # shown in a terminal only
        pipe.vae.enable_slicing()  # four images at 1024 pixels take 28 GiB
        torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients can be NaN (pytorch #196678)
        is_small = CUDA and torch.cuda.get_device_properties(DEVICE).total_memory < 60 * 2**30
        self.offload = config.offload == "on" or (config.offload == "auto" and is_small)
        both.to("cpu" if self.offload else DEVICE)
        self.cpu_copies = [(weight, weight.data) for weight in both.parameters() if self.offload]
        self.on_gpu = None  # ar or dit

    def move_to_gpu(self, half):
        """With offloading, only one half is on the GPU. The weights of the other point back at
        their copies on the CPU: they never changed, so nothing is written back."""
        if self.offload and half is not self.on_gpu:
            self.on_gpu = None  # so that an interrupted move begins anew
            for weight, copy in self.cpu_copies:
                weight.data = copy
            torch.cuda.empty_cache()  # its fragments may leave no room
            half.to(DEVICE)
            self.on_gpu = half

def record_graph(function, inputs):
    """-> the same function as a CUDA graph. A call overwrites the result of the last one. (That of
    `make_graphed_callables` keeps its memory until Python's garbage collector finds it.)"""
    copies = [tensor.clone() for tensor in inputs]  # the graph reads these
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function(*copies)

    def replay(*inputs):
        for copy, tensor in zip(copies, inputs):
            copy.copy_(tensor)
        graph.replay()
        return result

    return replay

# --- GLM-Image: prompt -> tokens -> image -------------------------------------
# Four facts, from which the code follows:
#   1. It writes two grids: first a draft of some 256 codes, then the large grid, with a code for
#      each 32 x 32 pixels. Both are actions, but only the large one is painted.
#   2. A code is a token id from 0 to V - 1; higher ids are words and marks.
#   3. A token's position is a triple (t, h, w), so that a code knows its row and column.
#   4. The DiT wants each code four times, as 2 x 2: its patches have 16 x 16 pixels.
def build_position_ids(attention_mask, grids):
    """Positions (t, h, w): mask [B, L] of the prompts, (height, width) of grids -> [3, B, L + T].
    In text t, h and w all count the tokens. Inside a grid t stands still, h counts rows and w
    columns. Each part starts one above the highest number before it:
              pad  prompt    1 x 2   2 x 2
         t:   -1   0  1  2   3  3    5  5  5  5
         h:   -1   0  1  2   3  3    5  5  6  6
         w:   -1   0  1  2   3  4    5  6  5  6
    The trap: `transformers` makes these in `generate` only. A plain forward pass takes the image
    for a line of text, without any error, and every log-prob is wrong."""
    position_ids = (attention_mask.cumsum(1) - 1).expand(3, -1, -1)  # text [3, B, L]
    for height, width in grids:
        start = position_ids.amax((0, 2), keepdim=True) + 1  # [1, B, 1]
        cells = np.indices((1, height, width)).reshape(3, 1, -1)  # (0, row, column), row by row
        position_ids = torch.cat([position_ids, start + torch.tensor(cells).to(start)], 2)
    return position_ids

class GLMImageWrapper(TwoHalves):
    """A diffusers `GlmImagePipeline`. All linear layers of attention and MLP get LoRA."""
    lora_layers = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate_up|down)_proj"

    @classmethod
    def from_pretrained(cls, path, config):
        """Loads a hub id or a folder: in bf16 on a GPU, in fp32 on a CPU."""
        where = "" if os.path.isdir(path) else ": no such folder, and as a hub id"
        pipe = attempt(f"--model {path}{where}", diffusers.GlmImagePipeline.from_pretrained, path,
                       dtype=torch.bfloat16 if CUDA else torch.float32,
                       low_cpu_mem_usage=diffusers.utils.is_accelerate_available())
        return cls(pipe, config)

    def encode(self, prompts):
        """-> ids [B, L], mask [B, L + T], position_ids [3, B, L + T]. The mask is 1 for the codes
        to come, too: causal attention hides them."""
        chats = [[{"role": "user", "content": [{"type": "text", "text": p}]}] for p in prompts]
        batch = self.pipe.processor.apply_chat_template(
            chats, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=dict(
                target_h=self.config.height, target_w=self.config.width,
                padding=True, padding_side="left")).to(DEVICE)
        # image_grid_thw has rows (1, height, width): each prompt's large grid, then its draft.
        large, draft = batch.image_grid_thw[:2, 1:].tolist()
        position_ids = build_position_ids(batch.attention_mask, [draft, large])
        mask = (position_ids[0] >= 0).long()  # padding is at -1
        return batch.input_ids, mask, position_ids

    def forward(self, ids, mask, position_ids, num_last, cache=None):
        """ids [B, n] -> logits / temperature of the last places [B, num_last, V]."""
        self.move_to_gpu(self.ar)
        logits = self.policy(
            input_ids=ids, attention_mask=mask, position_ids=position_ids, cache=cache,
            use_cache=cache is not None, logits_to_keep=num_last).logits
        codebook_size = self.pipe.transformer.config.prior_vq_quantizer_codebook_size
        temperature = self.config.temperature or self.policy.generation_config.temperature or 1.0
        return logits[..., :codebook_size].float() / temperature

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        """Step 1. P prompts, a seed for each -> a Rollout on the CPU."""
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        ids, mask, position_ids = self.encode(prompts)
        L = ids.shape[1]
        T = mask.shape[1] - L
        rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = [torch.rand(group_size, T, generator=rng, dtype=torch.float32) for rng in rngs]
        uniform = torch.cat(uniform).to(DEVICE)  # [N, T]
        # Fast attention kernels want a cache whose length is a multiple of 8.
        length = (L + T + 7) // 8 * 8
        cache = transformers.StaticCache(self.policy.config, length)
        # 1 where a token may look. Attention adds the log, 0 or -inf, to its scores; given 0 and 1,
        # every layer would make that anew, in three kernels.
        can_see = nn.functional.pad(mask[:, :L], (0, length - L)).to(self.policy.dtype)
        # Without flags, codes are drawn as `generate` draws them, where top-k is 50 by default.
        own = self.policy.generation_config
        top_k = [k for k in (self.config.top_k, own.top_k, 50) if k is not None][0] or 10**6
        keep_k = transformers.TopKLogitsWarper(top_k)
        keep_p = transformers.TopPLogitsWarper(self.config.top_p or own.top_p or 1.0)
        # Pass 0 reads the prompts into the cache, pass i the codes drawn in pass i - 1.
        places = position_ids.split([L] + [1] * T, 2)
        columns = []
        forward = lambda *inputs: self.forward(*inputs, 1, cache)
        for i in self.pipe.progress_bar(range(T)):
            if i:
                can_see[:, L + i - 1] = 1
                mask = can_see.log()[:, None, None]  # [N, 1, 1, length]
            inputs = ids, mask, places[i]
            if CUDA and i == 2:  # one launch a token, not 2,000, takes a third of the time
                forward = record_graph(forward, inputs)
            logits = forward(*inputs)[:, 0]
            allowed = keep_p(None, keep_k(None, logits)).isfinite()  # [N, V]; what they cut is -inf
            all_logprobs = compute_policy_logprobs(logits, allowed)
            ids = sample_codes(all_logprobs, uniform[:, i:i + 1])  # [N, 1]
            columns.append((ids, all_logprobs.gather(1, ids), allowed[:, None].cpu()))
        return Rollout(prompts, *[torch.cat(column, 1).cpu() for column in zip(*columns)])

    def compute_logprobs(self, rollout):
        """Teacher forcing: one pass -> log-probs with a gradient, entropies without, [B, T]."""
        ids, mask, position_ids = self.encode(rollout.prompts)
        tokens = rollout.tokens.to(DEVICE)
        inputs = torch.cat([ids, tokens[:, :-1]], 1)  # the last T places each predict the next code
        logits = self.forward(inputs, mask[:, :-1], position_ids[..., :-1], tokens.shape[1])
        all_logprobs = compute_policy_logprobs(logits, rollout.allowed)  # [B, T, V]
        entropy = torch.distributions.Categorical(logits=all_logprobs.detach()).entropy()
        return all_logprobs.gather(2, tokens[..., None]).squeeze(2), entropy

    @torch.no_grad()
    def decode(self, prompts, tokens, seeds, **pipe_inputs):
        """Step 2. P prompts and seeds, tokens [N, T] -> N images. A group shares its noise
        (DanceGRPO, 2505.07818): its rewards differ because its tokens do, not by luck."""
        self.move_to_gpu(self.dit)
        config = self.config
        h = config.height // 32
        w = config.width // 32
        codes = tokens[:, -h * w:].to(DEVICE).view(len(prompts), -1, h, w)  # without the draft
        groups = torch.kron(codes, codes.new_ones(2, 2)).flatten(2)  # each as 2 x 2: [P, G, 4 h w]
        images = []
        for prompt, seed, group in zip(prompts, seeds, groups, strict=True):
            for part in group.split(config.micro_batch_size):
                # ~seed is -seed - 1: the noise has other random numbers than the tokens.
                noise = [torch.Generator().manual_seed(~seed) for _ in part]
                images += self.pipe(  # given codes, it skips its AR half
                    [prompt] * len(part), prior_token_ids=part, generator=noise,
                    height=config.height, width=config.width, guidance_scale=config.guidance,
                    num_inference_steps=config.decode_steps, **pipe_inputs).images
        return images

# --- What the user brings: prompts, rewards, wrappers --------------------------
def load_prompts(path):
    """Lines `prompt`, `prompt<TAB>target.png` or `# comment` -> prompts, paths of targets or None.
    `str.splitlines` would also cut inside a prompt."""
    path = Path(path or Path(__file__).with_name("prompts.txt"))
    prompts = []
    targets = []  # paths: pictures would fill the memory
    for number, line in enumerate(attempt(path, path.read_text, "utf-8-sig").split("\n"), start=1):
        prompt, _, target = line.rstrip().partition("\t")
        if not line.strip() or prompt.lstrip().startswith("#"):
            continue
        prompts.append(prompt.strip())
        targets.append(path.parent / target.strip() if target else None)
        if target:
            attempt(f"--prompts {path}, line {number}", open_image, targets[-1])
    if "" in prompts or not prompts or path.suffix.lower() not in ("", ".txt"):
        raise BadInput(f"--prompts {path}: must be a .txt file with a prompt on each line")
    return prompts, targets

def import_name(text, flag="--wrapper"):
    """file.py:name -> what has this name in the file, or GLMImageWrapper for None. The file becomes
    a module, once: it can import its neighbours, and processes that it starts find its functions,
    unless its name was taken. Its folder comes last, so that it hides no package."""
    if not text:
        return GLMImageWrapper
    path, _, name = text.rpartition(":")
    path = Path(path).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise BadInput(f"{flag} {text}: must be file.py:name, of a file that is there; with () it "
                       "is a notebook's, and the run goes on there")
    files = {getattr(module, "__file__", None): module for module in [*sys.modules.values()]}
    module = files.get(str(path))
    if not module:
        sys.path.append(str(path.parent))
        spec = importlib.machinery.PathFinder.find_spec(path.stem.replace(".", "_"))
        if path.stem in sys.modules or not spec or spec.origin != str(path):  # the name is taken
            spec = importlib.util.spec_from_file_location(f"{path.stem}_{len(sys.modules)}", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # the latter of a script that parses its arguments
            del sys.modules[spec.name]
            raise BadInput(f"{flag} {text}: importing this file ended with {error!r}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise BadInput(f"{flag} {text}: there is no such function or class in the file")
    return found

def load_rewards(text):
    """Text such as color=1,mine.py:sharp=.2 -> {name: (function, weight)}; no weight means 1."""
    rewards = {}
    for part in text.split(","):
        path, _, rest = part.strip().rpartition(":")
        name, equals, weight = [word.strip() for word in rest.partition("=")]
        function = import_name(f"{path}:{name}", "--reward") if path else REWARDS.get(name)
        weight = attempt(f"--reward {part}", float, weight if equals else 1)
        if not function or name in rewards or not math.isfinite(weight):
            raise BadInput(f"--reward {part}: must be color, mse or file.py:function, each name "
                           "once; with () it is a notebook's, and the run goes on there")
        rewards[name] = function, weight
    return rewards

# --- The command line ---------------------------------------------------------
class Parser(transformers.HfArgumentParser):
    def error(self, message):
        raise BadInput(message)

    def format_help(self):  # each flag once, with -, and no "(default: None)"
        return re.sub(r"--\w+_\w[^,]*, |\s+\(default:\s+None\)", "", super().format_help())

def override(parser, place, settings):
    """Settings of a file or of a wrapper become the defaults. They are parsed as if they were
    typed, so that a wrong name or value is found, and told with its place."""
    settings = attempt(place, dict, settings)
    typed = [f"--{name}={value}" for name, value in settings.items()
             if value is not None or getattr(Config, name, "") is not None]
    parser.set_defaults(**vars(attempt(place, parser.parse_args, typed)))

def parse_args(argv=None, **defaults):
    """-> Config. A setting may come from five places; each overrides those before it:
      1. Config  2. `defaults`  3. the wrapper's `defaults`  4. grpo.json in the model's folder
      5. what is typed. A run that is resumed has its config.json in the place of 3 and 4."""
    parser = Parser(Config, allow_abbrev=False, usage="%(prog)s [flags]")
    parser.set_defaults(**defaults)
    typed = parser.parse_args(argv)
    path = Path(typed.resume or "", "config.json")
    # A job can repeat this: it begins or goes on.
    same = typed.out and os.path.realpath(typed.out) == os.path.realpath(path.parent)
    goes_on = typed.resume and (not same or path.exists())
    where = f"--resume: must be the folder of a run: {path}"
    if not goes_on:
        own = getattr(import_name(typed.wrapper), "defaults", None) or {}
        override(parser, f"{typed.wrapper}, `defaults`", own)
        model = parser.parse_args(argv).model
        where = path = Path(model, "grpo.json")
    # The tiny GLM-Image's are not for a wrapper for which nobody named a model. A string that is
    # typed, or of `defaults`, may be equal to TINY_MODEL, but is another object.
    if goes_on or (path.is_file() and not (typed.wrapper and model is TINY_MODEL)):
        override(parser, path, attempt(where, lambda: json.loads(path.read_bytes())))
    config = Config(**vars(parser.parse_args(argv)))
    if goes_on:
        # Another batch size would draw prompts of the run again, with the same seeds.
        repeats = config.batch_size != parser.get_default("batch_size")
        if repeats or (not same and (typed.out or typed.adapter or typed.prompts)):
            raise BadInput("--resume: a run keeps --out, --adapter, --batch_size and --prompts, "
                           "which you can change in its prompts.txt")
        config.prompts = str(path.with_name("prompts.txt").absolute())
        if typed.prompts and RANK == 0:
            print(f"prompts: those of {config.prompts}, where you can change them", flush=True)
    return config

# If one of these is behind a BadInput, its traceback is shown, too.
BUGS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
        SyntaxError, TypeError, torch.OutOfMemoryError)

def main(argv=None, **defaults):
    """`defaults` are for programs with settings of their own, such as examples/toy.py."""
    if CUDA:
        torch.cuda.set_device(DEVICE)
    else:
        torch.set_num_threads(min(2, torch.get_num_threads()))  # more are hardly faster here
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()  # NCCL for tensors on a GPU, gloo for others
    config = trainer = None
    try:
        config = parse_args(argv, **defaults)
        if config.batch_size % WORLD_SIZE:
            raise BadInput(f"--batch_size must be a multiple of the number of GPUs, {WORLD_SIZE}")
        load_rewards(config.reward)  # before a model is loaded
        Wrapper = import_name(config.wrapper)
        prompts, targets = getattr(Wrapper, "load_prompts", load_prompts)(config.prompts)
        wrapper = Wrapper.from_pretrained(config.model, config)
        trainer = GRPOTrainer(config, wrapper, prompts, targets=targets)
        trainer.train()
    except BaseException as error:  # whatever ends a run, its last line says how to go on
        how = trainer.how if trainer and (trainer.out / "config.json").exists() else ""
        if isinstance(error, KeyboardInterrupt):
            sys.exit(f"\nStopped. {how}".rstrip() if RANK == 0 else 1)
        if isinstance(error, SystemExit) and config:  # with its code of 0 all would look done
            sys.exit(f"A reward or the wrapper ended the program: {error!r}. {how}".rstrip())
        if isinstance(error, BadInput):
            if isinstance(error.__cause__, BUGS):
                traceback.print_exception(error.__cause__)
            line = " ".join(f"{Path(sys.argv[0]).name}: error: {error}".split())
            print(f"{line}\n{how}".rstrip(), file=sys.stderr)
            sys.exit(2)
        error.add_note(how)  # which Python prints last
        raise
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()

if __name__ == "__main__":
    sys.modules["grpo"] = sys.modules[__name__]  # what files of rewards and wrappers import
    main()
