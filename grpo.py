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
Sections: settings, the maths, what you bring, LoRA, the trainer, GLM-Image, the command line.
Run `python grpo.py` or `torchrun --nproc-per-node 8 grpo.py`. requirements.txt has its packages."""
import collections, copy, dataclasses, importlib, io, json, math, os, re, sys, time, typing
from pathlib import Path
import diffusers, safetensors.torch, torch, transformers
import numpy as np
from PIL import ImageColor
from torch import nn

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets these variables
RANK = int(os.environ.get("RANK", 0))
CUDA = torch.cuda.is_available()
DEVICE = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if CUDA else "cpu")

# --- Settings -----------------------------------------------------------------
# Each field is a flag: `python grpo.py --group-size 8`.
TINY_MODEL = str(Path(__file__).with_name("examples") / "tiny-glm-image")

def flag(default, text):
    return transformers.hf_argparser.HfArg(default=default, help=text)

@dataclasses.dataclass
class Config:
    # What is trained, and on what
    model: str | None = flag(TINY_MODEL, "hub id or folder; GLM-Image itself is zai-org/GLM-Image")
    wrapper: str | None = flag(None, "file.py:Class for a model other than GLM-Image")
    adapter: str | None = flag(None, "folder of LoRA weights to begin with")
    prompts: str | None = flag(None, "text file, a prompt on each line; default: prompts.txt")
    reward: str = flag("color", "color or file.py:function; a weighted sum: color,my.py:f=.2")
    # GRPO
    steps: int = flag(100, "number of steps, counting those before --resume")
    group_size: int = flag(4, "images per prompt; try 8 or 16 if the reward is noisy")
    batch_size: int = flag(8, "prompts per step, shared by all GPUs")
    micro_batch_size: int = flag(4, "images decoded or trained on at a time; fewer save memory")
    num_iterations: int = flag(1, "updates per step; 2 costs little, as rollouts take longest")
    lr: float = flag(1e-5, "learning rate of AdamW")
    warmup_steps: int = flag(10, "steps over which the rate rises to --lr; shorter runs end below")
    clip_range: float = flag(0.2, "ratios count up to 1 + this or, where A < 0, down to 1 - this")
    kl_coef: float = flag(0.01, "weight of the KL to the base model; 0 turns it off")
    max_grad_norm: float = flag(1.0, "larger gradients are scaled down to this norm; 0: never")
    lora_rank: int = flag(32, "rank of the LoRA; more can learn more and takes more memory")
    # The model
    width: int = flag(512, "of the images in pixels, a multiple of 32")
    height: int = flag(512, "of the images in pixels, a multiple of 32")
    temperature: float | None = flag(None, "divides the logits; default: the model's own")
    top_k: int | None = flag(None, "draw from the k likeliest; 0: all; default: its own or 50")
    top_p: float | None = flag(None, "draw from the likeliest codes summing to p; default: its own")
    decode_steps: int = flag(20, "denoising steps of the DiT; fewer are faster and less detailed")
    guidance: float = flag(1.5, "classifier-free guidance of the DiT; 1 turns it off")
    offload: typing.Literal["auto", "on", "off"] = flag("auto", "half by half; auto: below 60 GiB")
    # The run
    out: str | None = flag(None, "new folder for the run; default: runs/, date and time")
    resume: str | None = flag(None, "a run to go on with; if --out names it, too, it may be new")
    save_every: int = flag(10, "steps between two saves of pictures and adapters")
    seed: int = flag(0, "seed of everything random")

    def __post_init__(self):
        """Paths become absolute, as a run may be resumed in another directory."""
        for name in "model wrapper adapter prompts out resume".split():
            path = absolute(getattr(self, name))
            if name != "model" or path and os.path.exists(path):  # a model may be a hub id
                setattr(self, name, path)
        self.reward = re.sub(REWARD_FILE, lambda path: absolute(path[0]), self.reward)
        if self.resume and self.out not in (None, self.resume):
            raise BadInput("--resume goes on in its own folder: copy that, and leave --out away")
        if self.group_size < 2 or self.batch_size % WORLD_SIZE:
            raise BadInput("--group-size must be 2 or more, --batch-size a multiple of the GPUs")
        if self.width % 32 or self.height % 32:
            raise BadInput("--width and --height must be multiples of 32")
        if 0 in (self.temperature, self.top_p, self.save_every):
            raise BadInput("--temperature, --top-p and --save-every must be above 0")

# --- The maths of GRPO: pure functions of tensors -----------------------------
def compute_policy_logprobs(logits, allowed=None):
    """log pi(code), the distribution of the policy, defined once for sampler and trainer.
    logits [.., V], fp32; allowed [.., V], bool: the codes that top-k and top-p kept, or None
    -> log-probs [.., V]. The trap: with new weights, top-k and top-p would keep other codes, and
    a ratio would compare two kinds of distributions. So the sampler stores which codes it kept,
    and trainer and reference normalize over exactly those (2512.02556)."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed.to(logits.device), -math.inf)
    return logits.log_softmax(-1)

def sample_codes(logprobs, uniform):
    """Inverse-CDF sampling: logprobs [N, V], random numbers in 0..1 [N, 1] -> codes [N, 1].
    A sample with random numbers of its own does not depend on what else is in the batch."""
    cdf = logprobs.double().exp().cumsum(1)  # its last value is 1 only up to rounding
    # right=True finds the first code whose cdf is above the point. Its probability is not 0.
    return torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)

def compute_advantages(rewards, group_size):
    """A = (r - mean of its group) / (std of its group + 1e-6). rewards [N] -> advantages [N]."""
    groups = torch.as_tensor(rewards, dtype=torch.float64).view(-1, group_size)  # [P, G]
    groups = groups - groups[:, :1]  # equal rewards become 0: rounding is not divided by 1e-6
    advantages = groups - groups.mean(1, keepdim=True)
    advantages /= groups.std(1, keepdim=True) + 1e-6  # Dr. GRPO (2503.20783) omits this division
    return advantages.flatten().float()

def compute_grpo_loss(new_logprobs, old_logprobs, advantages, clip_range=0.2,
                      ref_logprobs=None, kl_coef=0, kl=None):
    """PPO's clipped surrogate (1707.06347) plus a KL to the reference -> loss, {metric: float}.
        ratio = exp(new - old), clipped to 1 - clip_range .. 1 + clip_range
        loss  = -mean(min(ratio * A, clip(ratio) * A)) + kl_coef * mean(k3)
        k3    = exp(ref - new) - (ref - new) - 1
    Log-probs are [B, T], or [B] if there is one a sample; advantages are [B], or one for each
    log-prob. All but `new_logprobs` and `kl`, a wrapper's exact KL in the place of k3, are
    constants. k3, Schulman's third estimator of KL(new, ref), is never below 0.
    Why the loss may be 0: with one update per rollout every ratio is 1 and policy_loss is -mean(A),
    which is 0 over whole groups. Its gradient is not: -mean(A * grad(new)), as in REINFORCE."""
    assert advantages.shape in (new_logprobs.shape, new_logprobs.shape[:1]), advantages.shape
    ratio = (new_logprobs - old_logprobs.detach()).clamp(max=20).exp()  # [B, T], finite
    A = advantages.detach().to(ratio)
    A = A[:, None] if A.ndim < ratio.ndim else A  # [B, 1] or as the log-probs
    unclipped = ratio * A
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * A
    loss = -torch.min(unclipped, clipped).mean()  # a loss of your own goes here
    clip_frac = (clipped < unclipped).float().mean()  # of the tokens: here they get no gradient
    metrics = dict(policy_loss=loss, ratio_mean=ratio.mean(), clip_frac=clip_frac)
    if ref_logprobs is not None:
        delta = (ref_logprobs.detach() - new_logprobs).clamp(max=20)  # exp stays finite
        kl = (torch.expm1(delta) - delta if kl is None else kl).mean()  # exp(x) - 1, exact near 0
        metrics["kl"] = kl
        loss = loss + kl_coef * kl
    metrics["loss"] = loss
    return loss, {name: value.item() for name, value in metrics.items()}

# --- What you bring: files, prompts, rewards -----------------------------------
class BadInput(ValueError):
    """Something that the user gave is wrong. `main` prints the message on one line."""

def attempt(what, function, *args, **kwargs):
    """Calls a function that fails because of what the user gave; `what` names it."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise BadInput(f"{what}: {str(error) or repr(error)}") from error

def from_first(function, *args):
    """Calls it in the first process only -> the result, on all. No machine needs its disk."""
    result = [function(*args) if RANK == 0 else None]
    if WORLD_SIZE > 1:
        torch.distributed.broadcast_object_list(result)
    return result[0]

def write_file(path, data):
    """Writes beside it, waits for the disk, renames: it is the old file or the new, never half."""
    partial = Path(f"{path}.part")
    partial.write_bytes(data)
    with open(partial, "rb+") as file:
        os.fsync(file)
    partial.replace(path)

def absolute(path):
    return path and os.path.abspath(os.path.expanduser(path))

class Prompt(str):
    """A line of text, which may know a target: the path of a picture to imitate or to edit."""
    def __new__(cls, text, target=None):
        prompt = super().__new__(cls, " ".join(text.split()))
        prompt.target = absolute(target) or None
        if re.search(r"^[#\t]|\t.*\t|[\r\n\ud800-\udfff]|\s$", f"{prompt}\t{prompt.target}"):
            raise BadInput(f"a line of prompts.txt cannot hold {prompt!r}, {prompt.target!r}")
        return prompt

def load_prompts(path=None):
    """Lines `prompt`, `prompt<TAB>target.png` or `# comment` of a file -> Prompts."""
    path = Path(path or Path(__file__).with_name("prompts.txt"))
    prompts = []
    for line in attempt("--prompts", path.read_text, "utf-8").replace("\ufeff", "").split("\n"):
        text, _, target = line.strip().partition("\t")
        if text and not text.startswith("#"):
            prompts.append(Prompt(text, target and path.parent / Path(target.strip()).expanduser()))
    if not prompts:
        raise BadInput(f"--prompts: {path} has no prompt")
    return prompts

def pil_to_tensor(images):
    """PIL images of one size -> [N, 3, H, W], fp32 in 0..1."""
    pixels = np.stack([image.convert("RGB") for image in images])
    return torch.tensor(pixels).movedim(3, 1) / 255

COLORS = {name: torch.tensor(ImageColor.getrgb(name)) / 255  # [3], in 0..1
          for name in "red orange yellow green blue purple white black".split()}

def find_color(prompt):
    """The first color word of the prompt -> [3], in 0..1."""
    for word in re.findall(r"\w+", prompt.lower()):
        if word in COLORS:
            return COLORS[word]
    raise BadInput(f"--reward color: there is none of {', '.join(COLORS)} in {prompt!r}")

# A reward is any function that gives each image a finite number, higher is better. Only differences
# within a group matter; the images of a group, and no others, have the same object as their prompt:
# `prompts[i] is prompts[j]`. `--reward mine.py:bright` takes this one from mine.py:
#     def bright(images, prompts, targets):  # PIL images, texts, PIL images to imitate or None
#         return [image.convert("L").resize((1, 1)).getpixel((0, 0)) for image in images]
def reward_color(images, prompts, targets=None):
    """1 - |mean color of the image - color that its prompt names|, in 0..1."""
    colors = torch.stack([find_color(prompt) for prompt in prompts])  # [N, 3]
    return 1 - (pil_to_tensor(images).mean((2, 3)) - colors).abs().mean(1)

REWARDS = {"color": reward_color}
# In a sum of rewards, a file's path and its colon. An absolute path may have , and = in it.
REWARD_FILE = r"(?:/.*?|[^,=]+):(?=\w+(?:[,=]|$))"

def import_name(text):
    """file.py:name -> what has this name in the file. The file can import its neighbours."""
    path, _, name = text.rpartition(":")
    path = Path(absolute(path))
    if not path.is_file():
        raise BadInput(f"{text}: must be file.py:name, and there is no such file")
    # Those of examples/ are parts of a package, so that a file of yours may have the same name.
    package = "examples." if path.parent.samefile(Path(TINY_MODEL).parent) else ""
    for file in path.parent.glob("*.py"):
        known = getattr(sys.modules.get(package + file.stem), "__file__", file)
        if not file.samefile(known):
            raise BadInput(f"{text}: rename {file}, as {known} has its name")
    sys.path.insert(0, str(path.parents[bool(package)]))
    return attempt(text, getattr, importlib.import_module(package + path.stem), name)

def load_rewards(text):
    """Text such as color=1,mine.py:sharp=.2 -> {name: (function, weight)}; no weight means 1."""
    rewards = {}
    for source, name, weight in re.findall(rf"((?:{REWARD_FILE})?([^,=]+))=?([^,]*)", text):
        if name in rewards:
            raise BadInput(f"--reward {text}: two have the name {name}")
        function = REWARDS.get(source) or import_name(source)
        rewards[name] = function, attempt(f"--reward {source}", float, weight or 1)
    return rewards

@torch.no_grad()
def compute_rewards(images, prompts, rewards):
    """Calls {name: (function, weight)} on copies -> weighted sum [N], fp64, and {metric: mean}."""
    total = torch.zeros(len(prompts), dtype=torch.float64)
    metrics = {}
    for name, (function, weight) in rewards.items():
        paths = [getattr(prompt, "target", None) for prompt in prompts]
        targets = [path and attempt(path, diffusers.utils.load_image, path) for path in paths]
        values = function([image.copy() for image in images], [*prompts], targets)
        wrong = f"--reward {name}: must give {len(total)} finite numbers, and gave {values!r:.300}"
        scores = attempt(wrong, torch.as_tensor, values, dtype=torch.float64, device="cpu")
        if scores.shape != total.shape or not scores.isfinite().all():
            raise BadInput(wrong)
        metrics[f"reward/{name}"] = scores.mean().item()
        total += weight * scores
    metrics["reward"] = total.mean().item()
    return total, metrics

# --- LoRA (arXiv 2106.09685): the weights that are trained --------------------
class LoRALinear(nn.Module):
    """W x + b becomes W x + 2 B A x + b. W and b are frozen, B begins at 0, and 2 is alpha / rank.
    A and B are in fp32: in bf16, 0.02 plus an Adam step is 0.02."""
    enabled = True  # a switch for all layers: off, the model is the reference of the KL

    def __init__(self, linear, rank):
        super().__init__()
        self.linear = linear
        # Drawn on the CPU, so equal on all GPUs, and as in peft.
        down = nn.Linear(linear.in_features, rank, bias=False, dtype=torch.float32)
        self.lora_A = down.to(DEVICE).weight  # [rank, in]
        self.lora_B = nn.Parameter(self.lora_A.new_zeros(linear.out_features, rank))

    def forward(self, inputs):
        """The trap: W x that is rounded to bf16 before 2 B A x is added swallows most of a first
        update, below half a unit of its last place. `addmm_` sums in fp32, and rounds once."""
        rows = inputs.reshape(-1, self.linear.in_features)
        # Off, 2 B A x is 0 and all else is the same, so that the KL begins at exactly 0.
        output = (rows @ self.lora_A.T.to(rows) @ self.lora_B.T.to(rows) if LoRALinear.enabled
                  else rows.new_zeros(len(rows), self.linear.out_features))
        output.addmm_(rows, self.linear.weight.T, beta=2)  # 2 * output + W x
        if self.linear.bias is not None:
            output += self.linear.bias
        return output.view(*inputs.shape[:-1], self.linear.out_features)

class LoRA:
    """Puts a LoRALinear in the place of each linear layer of a model whose name matches the regex
    `layers`, and freezes the rest. `weights` has all A and B, under peft's names."""
    def __init__(self, model, layers, rank):
        self.config = dict(peft_type="LORA", r=rank, lora_alpha=2 * rank, target_modules=layers)
        model.requires_grad_(False)
        for name, layer in [*model.named_modules()]:
            if isinstance(layer, LoRALinear):  # a model has one LoRA, the last one
                model.set_submodule(name, layer.linear)
        for name, layer in [*model.named_modules()]:
            if re.fullmatch(layers, name):
                model.set_submodule(name, LoRALinear(layer, rank))
        self.weights = {f"base_model.model.{name}.weight": weight
                        for name, weight in model.named_parameters() if weight.requires_grad}

    def save(self, folder, base_model):
        """Writes an adapter that peft reads too; `base_model` is a hub id or a folder."""
        folder.mkdir(exist_ok=True)
        config = json.dumps(self.config | dict(base_model_name_or_path=base_model))
        write_file(folder / "adapter_config.json", config.encode())
        write_file(folder / "adapter_model.safetensors", safetensors.torch.save(self.weights))

    def read(self, folder):
        """-> weights that `save` wrote. Other programs' adapters may scale or add otherwise."""
        saved = json.loads((folder / "adapter_config.json").read_bytes())
        saved.pop("base_model_name_or_path", None)
        if saved != self.config:
            raise BadInput(f"needs --lora-rank {saved.get('r')}, this program and this model")
        return safetensors.torch.load_file(folder / "adapter_model.safetensors")

    @torch.no_grad()
    def load(self, saved):
        if saved.keys() != self.weights.keys():
            raise BadInput("has other layers than this model")
        for name, weight in self.weights.items():
            weight.copy_(saved[name].view_as(weight))

# --- The trainer --------------------------------------------------------------
# `--wrapper mine.py:MyModel` trains any model that draws tokens. examples/toy.py is a template, and
# `python -m examples.check` with these flags tells whether all of this holds:
#   from_pretrained(path, config)  a class method: --model -> a wrapper, always the same weights
#   policy, lora_layers  an nn.Module without dropout; a regex for its nn.Linear layers that get
#       LoRA. They and their inputs have one dtype, without autocast. Their hooks do not run, and
#       no other module may read their weights, as nn.MultiheadAttention does.
#   sample(prompts, group_size, seeds)  step 1: P prompts, a seed for each -> a Rollout of N
#       samples on the CPU. Equal seeds give equal samples, whatever else is in the batch.
#   decode(prompts, tokens, seeds)  step 2: tokens [N, T] -> N PIL images
#   compute_logprobs(rollout)  -> log-probs of its tokens under the policy, with a gradient, and
#       entropies, without; both [B, T], fp32, on DEVICE. A third may follow, with a gradient: the
#       exact KL to the base model. With --kl-coef, each part is first scored by that, when
#       `LoRALinear.enabled` is False.
# `defaults`, {flag: value}, are settings of its own. The trainer sets `config`.
class Rollout(collections.namedtuple("Rollout", "prompts tokens logprobs allowed")):
    """What the sampler gives: N samples, in the order p0 p0 p1 p1.
      prompts   N Prompts
      tokens    [N, T], the codes that were drawn
      logprobs  [N, T], their log-probs at that time
      allowed   [N, T, V], bool: the codes that top-k and top-p left; None: all"""
    def part(self, rows):
        return Rollout(*[None if value is None else value[rows] for value in self])

def choose_prompts(step, n, config):
    """Indices of this GPU's P prompts in a step (1, 2, ..), and a seed for each. An epoch is a pass
    over the list. Its order follows from the run's seed, so resuming needs no saved state."""
    turns = range((step - 1) * config.batch_size, step * config.batch_size)[RANK::WORLD_SIZE]
    indices = [np.random.default_rng([config.seed, turn // n]).permutation(n)[turn % n]
               for turn in turns]  # of all turns of the run, those of this GPU
    # Seeds below a million are kept for `save` and evaluation. Each --seed has its own.
    return indices, [1_000_000 * (config.seed + 1) + turn for turn in turns]

class GRPOTrainer:
    """Trains a wrapper's policy. rewards: {name: (function, weight)}; default: config.reward's."""
    def __init__(self, config, wrapper, prompts, rewards=None):
        if isinstance(prompts, str):
            raise BadInput(f"prompts must be a list of texts, and is {prompts!r}")
        self.config = config = dataclasses.replace(config)  # another trainer may have the same
        if rewards is not None:  # a name that load_rewards refuses: no command may go on without
            config.reward = ",".join(f"{name}()={rewards[name][1]}" for name in rewards)
        self.wrapper = wrapper
        self.prompts = [Prompt(prompt, getattr(prompt, "target", None)) for prompt in prompts]
        self.rewards = load_rewards(config.reward) if rewards is None else rewards
        self.step = 0  # the last one that was made
        self.history = []  # one row a step
        self.out = Path(config.resume or config.out or from_first(
            lambda: f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9}")).absolute()
        torch.manual_seed(config.seed)  # the first adapters are equal on all GPUs
        self.lora = LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
        self.optimizer = attempt(f"--lr {config.lr} for the layers {wrapper.lora_layers}",
            torch.optim.AdamW, self.lora.weights.values(), config.lr, weight_decay=0.0)

    def start(self):
        """Takes over the wrapper, and goes on from the run's checkpoint, if there is one. Only the
        first process reads and writes in the run's folder. Two new runs never share one."""
        config = self.wrapper.config = self.config
        os.environ["RUN"] = str(self.out)  # for rewards that keep files
        state = from_first(self.read_state)
        if state:
            attempt(f"{self.out} is of another model", self.lora.load, state["adapter"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        elif config.adapter:
            saved = from_first(attempt, "--adapter", self.lora.read, Path(config.adapter))
            attempt("--adapter", self.lora.load, saved)
        if RANK == 0:
            attempt("--out", self.out.mkdir, parents=True, exist_ok=config.resume)
            config.resume = str(self.out)  # from now on it may be there: a cell is run again
            print(f"model: {config.model} on {DEVICE}, {len(self.prompts)} prompts\n"
                  f"files: {self.out}, at step {self.step} of {config.steps}", flush=True)
            if self.step < config.steps or not state:  # or else keep those the steps were made with
                self.save_settings()
            if not state:
                self.save(0)  # pictures before training

    def read_state(self):
        """-> the checkpoint, or None. Line i of the log is step i; later ones are made again."""
        checkpoint = self.out / "checkpoint.pt"
        log = self.out / "metrics.jsonl"
        if self.config.resume and (checkpoint.exists() or log.exists()):
            state = attempt("--resume", torch.load, checkpoint, "cpu", weights_only=True)
            lines = log.read_text().splitlines(True)[:state["step"]] if log.exists() else []
            self.history = [*map(json.loads, lines)]
            write_file(log, "".join(lines).encode())
            return state

    def save_settings(self):
        """All that is needed to go on, beside the checkpoint, and to know what was trained."""
        lines = "".join(f"{p}\t{p.target or ''}".strip() + "\n" for p in self.prompts)
        write_file(self.out / "prompts.txt", lines.encode())
        settings = {name: value for name, value in vars(self.config).items()
                    if name not in ("prompts", "out", "resume")}
        write_file(self.out / "config.json", json.dumps(settings, indent=4).encode())

    def train(self):
        config = self.config
        self.start()
        started = time.perf_counter()
        for step in range(self.step + 1, config.steps + 1):
            # Adam's first steps have full size, though their direction is hardly known.
            lr = config.lr * min(1, step / (config.warmup_steps or 1))
            self.optimizer.param_groups[0]["lr"] = lr
            indices, seeds = choose_prompts(step, len(self.prompts), config)
            prompts = [copy.copy(self.prompts[i]) for i in indices]  # a group has its own object
            rollout = self.wrapper.sample(prompts, config.group_size, seeds)  # 1. sample
            images = self.wrapper.decode(prompts, rollout.tokens, seeds)  # 2. decode
            rewards, metrics = compute_rewards(images, rollout.prompts, self.rewards)  # 3. score
            advantages = compute_advantages(rewards, config.group_size)  # 4. compare
            metrics |= self.train_step(rollout, advantages)  # 5. update
            metrics["lr"] = lr
            metrics["reward_std"] = rewards.view(-1, config.group_size).std(1).mean().item()
            metrics["seconds"] = time.perf_counter() - started  # with the saving of the step before
            started = time.perf_counter()
            self.log(step, metrics)  # 6. log
            if RANK == 0:
                self.save(step)

    def train_step(self, rollout, advantages):
        """Step 5: the updates from one rollout; advantages [N] or [N, T] -> {metric: float}.
        Micro-batches only save memory: each counts by its share of the samples."""
        config = self.config
        size = config.micro_batch_size
        assert len(advantages) == len(rollout.tokens), f"{len(advantages)} advantages"
        parts = [rollout.part(slice(i, i + size)) for i in range(0, len(advantages), size)]
        LoRALinear.enabled = False  # the reference is the policy without its adapters
        try:
            with torch.no_grad():
                ref_logprobs = [self.wrapper.compute_logprobs(part)[0] if config.kl_coef else None
                                for part in parts]
        finally:
            LoRALinear.enabled = True
        old_logprobs = {}
        totals = collections.defaultdict(float)
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
                (loss * share / WORLD_SIZE).backward()
                for name, value in metrics.items():
                    totals[name] += share * value
            totals["grad_norm"] += self.update_weights()
        return {name: total / config.num_iterations for name, total in totals.items()}

    def update_weights(self):
        for name, weight in self.lora.weights.items():
            if weight.grad is None:
                raise BadInput(f"--wrapper: a layer of its lora_layers got no gradient: {name}")
            if WORLD_SIZE > 1:
                torch.distributed.all_reduce(weight.grad)  # a sum; the losses were divided
        grad_norm = nn.utils.clip_grad_norm_(
            self.lora.weights.values(), self.config.max_grad_norm or math.inf)
        if grad_norm.isfinite():  # a NaN would stay in Adam's moments for ever
            self.optimizer.step()
        elif RANK == 0:
            print("update skipped: its gradient is not finite", flush=True)
        self.optimizer.zero_grad()
        return grad_norm.item()

    def log(self, step, metrics):
        """Step 6: prints the means over all GPUs, and adds them to metrics.jsonl."""
        if WORLD_SIZE > 1:
            values = torch.tensor([*metrics.values()], dtype=torch.float64, device=DEVICE)
            torch.distributed.all_reduce(values)
            metrics = dict(zip(metrics, (values / WORLD_SIZE).tolist()))
        metrics["gpu_gib_max"] = torch.cuda.max_memory_allocated() / 2**30  # on this one
        row = dict(step=step) | metrics
        self.step = step
        self.history.append(row)
        if RANK == 0:
            names = "step reward reward_std loss kl entropy grad_norm sampler_gap seconds".split()
            names += [f"reward/{name}" for name in self.rewards if len(self.rewards) > 1]
            with open(self.out / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(*[f"{name} {row[name]:<10.4g}" for name in names if name in row], flush=True)

    def save(self, step):
        """A checkpoint after every step, so that a failure costs at most one. Every --save-every
        steps pictures of the first prompts, from the same seeds, and the adapter they show."""
        if step % self.config.save_every == 0 or step == self.config.steps:
            prompts = self.prompts[:8]
            seeds = range(len(prompts))
            rollout = self.wrapper.sample(prompts, 1, seeds)
            images = self.wrapper.decode(prompts, rollout.tokens, seeds)
            diffusers.utils.make_image_grid(images, 1, len(images)).save(
                self.out / f"samples_{step:05d}.png")
            self.lora.save(self.out / f"adapter_{step:05d}", self.config.model)
        file = io.BytesIO()
        torch.save(dict(step=step, adapter=self.lora.weights,
                        optimizer=self.optimizer.state_dict()), file)
        write_file(self.out / "checkpoint.pt", file.getbuffer())

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
    The trap: `transformers` makes these only where it decodes with a cache. A pass over a whole
    sequence takes the image for text, without any error, and every log-prob is wrong."""
    position_ids = (attention_mask.cumsum(1) - 1).expand(3, -1, -1)  # text [3, B, L]
    for height, width in grids:
        start = position_ids.amax((0, 2), keepdim=True) + 1  # [1, B, 1]
        cells = np.indices((1, height, width)).reshape(3, 1, -1)  # (0, row, column), row by row
        position_ids = torch.cat([position_ids, start + torch.tensor(cells).to(start)], 2)
    return position_ids

def record_graph(function, inputs):
    """-> the same function as a CUDA graph. A call overwrites the result of the one before."""
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

class GLMImageWrapper:
    """A diffusers `GlmImagePipeline`. All linear layers of attention and MLP get LoRA."""
    lora_layers = r"model\.language_model\.layers\.\d+\.\w+\.([qkvo]|gate_up|down)_proj"

    @classmethod
    def from_pretrained(cls, path, config):
        """Loads a hub id or a folder: in bf16 on a GPU, in fp32 on a CPU."""
        pipe = attempt(f"--model {path}", diffusers.GlmImagePipeline.from_pretrained, path,
                       dtype=torch.bfloat16 if CUDA else torch.float32,
                       low_cpu_mem_usage=diffusers.utils.is_accelerate_available())
        return cls(pipe, config)

    def __init__(self, pipe, config):
        self.pipe = pipe
        self.config = config
        self.policy = policy = pipe.vision_language_encoder  # its vision tower is not used here
        self.ar = nn.ModuleList([policy.model.language_model, policy.lm_head]).train()
        self.dit = nn.ModuleList([pipe.text_encoder, pipe.transformer, pipe.vae]).eval()
        both = nn.ModuleList([self.ar, self.dit.requires_grad_(False)])
        policy.activation_checkpointing_enable()  # in training mode, the backward pass makes them
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
        self.offload = config.offload == "on" or config.offload == "auto" and is_small
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
        uniform = torch.cat([torch.rand(group_size, T, generator=rng) for rng in rngs]).to(DEVICE)
        length = (L + T + 7) // 8 * 8  # of the cache, as fast attention kernels want it
        cache = transformers.StaticCache(self.policy.config, length)
        # Attention adds this to its scores: 0 where a token may look, -inf elsewhere.
        bias = mask[:, :L].to(self.policy.dtype).log()
        bias = nn.functional.pad(bias, (0, length - L), value=-math.inf)
        # Without flags, codes are drawn as `generate` draws them, where top-k is 50 by default.
        own = self.policy.generation_config
        top_k = next(k for k in (self.config.top_k, own.top_k, 50) if k is not None)
        keep_k = transformers.TopKLogitsWarper(top_k or 10**6)
        keep_p = transformers.TopPLogitsWarper(self.config.top_p or own.top_p or 1.0)
        # Pass 0 reads the prompts with a 2-D mask; pass i, the code of pass i - 1, with `bias`. The
        # graph is recorded at pass 2, as the first pass of a new shape must run outside of it.
        places = position_ids.split([L] + [1] * T, 2)
        columns = []
        predict = lambda *inputs: self.forward(*inputs, 1, cache)
        for i in self.pipe.progress_bar(range(T)):
            inputs = ids, mask, places[i]
            if CUDA and i == 2:  # one launch a token, not 2,000, is three times as fast
                predict = record_graph(predict, inputs)
            logits = predict(*inputs)[:, 0]
            allowed = keep_p(None, keep_k(None, logits)).isfinite()  # [N, V]; what they cut is -inf
            all_logprobs = compute_policy_logprobs(logits, allowed)
            ids = sample_codes(all_logprobs, uniform[:, i:i + 1])  # [N, 1]
            columns.append((ids, all_logprobs.gather(1, ids), allowed[:, None].cpu()))
            bias[:, L + i] = 0  # the next pass may look at this code, too
            mask = bias[:, None, None]  # [N, 1, 1, length]
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
        codes = codes.kron(codes.new_ones(2, 2))  # each as 2 x 2
        images = []
        for prompt, seed, group in zip(prompts, seeds, codes.flatten(2), strict=True):
            for part in group.split(config.micro_batch_size):  # [B, 4 h w]
                noise = [torch.Generator().manual_seed(~seed) for _ in part]  # not the tokens' seed
                images += self.pipe(  # given codes, it skips its AR half
                    [prompt] * len(part), prior_token_ids=part, generator=noise,
                    height=config.height, width=config.width, guidance_scale=config.guidance,
                    num_inference_steps=config.decode_steps, **pipe_inputs).images
        return images

# --- The command line ---------------------------------------------------------
def parse_args(argv=None):
    """-> Config. What is typed comes before grpo.json in the model's folder, and that before the
    wrapper's `defaults`. A run that goes on has its config.json in the place of both."""
    parser = transformers.HfArgumentParser(Config, usage="%(prog)s [flags]")
    typed = parser.parse_args(argv)
    path = Path(absolute(f"{typed.resume}/config.json"))
    if typed.resume and (path.exists() or not typed.out):  # a job names both: it may begin
        settings = json.loads(attempt("--resume", path.read_bytes))
        settings["prompts"] = str(path.with_name("prompts.txt"))
    else:
        if typed.wrapper:  # the tiny GLM-Image and its settings are not for another wrapper
            own = getattr(import_name(typed.wrapper), "defaults", {})
            parser.set_defaults(**dict(model=None) | own)
        path = Path(absolute(f"{parser.parse_args(argv).model}/grpo.json"))
        settings = json.loads(path.read_bytes()) if path.exists() else {}
    parser.set_defaults(**settings)
    return Config(**vars(parser.parse_args(argv)))

def main(argv=None):
    if CUDA:
        torch.cuda.set_device(DEVICE)
    if WORLD_SIZE > 1:
        torch.distributed.init_process_group()  # NCCL for tensors on a GPU, gloo for others
    try:
        config = from_first(parse_args, argv)
        load_rewards(config.reward)  # a mistake is told before a model is loaded
        prompts = from_first(load_prompts, config.prompts)
        Wrapper = import_name(config.wrapper) if config.wrapper else GLMImageWrapper
        wrapper = Wrapper.from_pretrained(config.model, config)
        if config.model == TINY_MODEL:
            torch.set_num_threads(1)  # more gain nothing on it, and wait where the CPU is busy
        GRPOTrainer(config, wrapper, prompts).train()
    except (BadInput, KeyboardInterrupt) as error:
        sys.exit(f"grpo.py: error: {' '.join(str(error).split()) or 'stopped; a run may --resume'}")
    if WORLD_SIZE > 1:
        torch.distributed.destroy_process_group()

if __name__ == "__main__":
    sys.modules["grpo"] = sys.modules[__name__]  # what files of rewards and wrappers import
    main()
