"""Measures grpo.py: on your machine, or on a GPU that is only imagined.

    python -m examples.measure halves     # which half decides the reward, and is to be trained?
    python -m examples.measure painting --wrapper examples/fast.py:Fast  # does a reward rank alike?
    python -m examples.measure memory     # GiB and kernels of a GPU, counted without one
    python -m examples.measure updates    # how much of a first update is lost in bf16

All take the flags of grpo.py, too. On the imagined GPU models have their real sizes. `--model
random` has GLM-Image's, and random weights, so that nothing is downloaded; it needs a GPU. Without
one, `halves` and `painting` measure the tiny GLM-Image in seconds.
"""
from examples import read_flags, start

def add_flags(add):
    names = "halves painting memory updates".split()
    add("command", choices=names, help="see above")
    add("--layers", type=int, nargs="+", default=[1], help="of updates: depths; the model has 40")
    add("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 5e-5, 2e-4], help="of updates: lr")

if __name__ == "__main__":
    ARGS = read_flags(__doc__, add_flags, and_more=True)

import collections, contextlib, dataclasses, functools, math, platform, time, weakref
from unittest import mock

import grpo
import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from examples.make import tiny
from examples.make.real import ROTARY, V, make_real
from examples.runs import load_model

aten = torch.ops.aten
META = torch.device("meta")
GIB = 2**30
PHASES = dict(sample="a token", decode="a DiT pass", update="a micro-batch of one prompt")

def print_row(*cells):
    """Of a table; numbers have one digit after the point."""
    cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print("|", " | ".join(cells), "|", flush=True)

def print_head(text):
    print_row(text)
    print("|---" * len(text.split(" | ")) + "|")

def choose_wrapper(config):
    return grpo.import_name(config.wrapper) if config.wrapper else grpo.GLMImageWrapper

# --- An imagined GPU: the `meta` device, where a tensor has a size and no contents ---
NO_KERNEL = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
             aten.new_empty_strided, aten._local_scalar_dense}

def is_on(tensor, device):
    return isinstance(tensor, torch.Tensor) and tensor.device.type == device

class FakeGPU(TorchDispatchMode):
    """`meta` stands for the GPU, the CPU is the host. Every operation passes through here, and is
    counted: kernels, copies from and to the host, numbers that the host waits for. A storage counts
    from the operation that makes it until nobody holds it any more, in blocks of 512 bytes; the
    model's weights do not. Whole numbers from the host have contents: `transformers` looks at the
    mask of the prompts to decide whether it needs one of its own."""
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()
        self.alive = {}  # storages: a weak reference, bytes
        self.contents = {}  # storages: a tensor on the host
        self.now = 0  # bytes
        self.peak = 0

    @contextlib.contextmanager
    def note(self, owner, name):
        """Inside, calls of owner.name are noted -> a list: the counts before and after each."""
        function = getattr(owner, name)
        notes = []

        def call(*args, **kwargs):
            notes.append(self.counts.copy())
            result = function(*args, **kwargs)
            notes.append(self.counts.copy())
            return result

        with mock.patch.object(owner, name, call):
            yield notes

    def measure(self, function, *args):
        """Calls it -> what it returns, and the highest GiB beside the weights."""
        resident = self.peak = self.now
        result = function(*args)
        assert self.now - resident < 2**20, "it leaves something behind"
        return result, self.peak / GIB

    def count(self, function, args, kwargs):
        """-> whether a tensor on the GPU is read."""
        reads = any([is_on(leaf, "meta") for leaf in tree_leaves((args, kwargs))])
        starts_none = function.is_view or function.overloadpacket in NO_KERNEL
        self.counts["kernels"] += reads and not starts_none
        if function is aten._local_scalar_dense.default:
            self.counts["waits"] += reads
        elif function.overloadpacket in (aten._to_copy, aten.copy_):
            source = args[function is aten.copy_.default]
            target = kwargs.get("device") or args[0].device
            self.counts["copies in"] += is_on(source, "cpu") and target == META
            self.counts["copies out"] += is_on(source, "meta") and target.type == "cpu"
        return reads

    def see(self, tensor):
        """Counts its storage, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            size = (storage.nbytes() + 511) // 512 * 512
            self.alive[key] = weakref.ref(storage, lambda _: self.forget(key)), size
            self.now += size
            self.peak = max(self.peak, self.now)

    def forget(self, key):
        self.now -= self.alive.pop(key)[1]
        self.contents.pop(key, None)

    def to_host(self, value):
        """A tensor on the GPU -> its contents. Raises KeyError if it has none."""
        if is_on(value, "meta"):
            contents = self.contents[value.untyped_storage()._cdata]
            return contents.as_strided(value.shape, value.stride(), value.storage_offset())
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def from_host(self, value):
        """The opposite. Only whole numbers have contents."""
        if not isinstance(value, torch.Tensor):
            return value
        result = value.to(META)
        self.see(result)
        if not value.is_floating_point():
            self.contents[result.untyped_storage()._cdata] = value.contiguous()
        return result

    def compute_with_contents(self, function, args, kwargs):
        """-> None if a tensor has none."""
        try:
            result = function(*tree_map(self.to_host, args), **tree_map(self.to_host, kwargs))
        except KeyError:
            return None
        stays = kwargs.get("device") == torch.device("cpu")
        return result if stays else tree_map(self.from_host, result)

    def make_up(self, function, args, kwargs):
        """What cannot be had from a tensor without contents; None where it can."""
        if function is aten._local_scalar_dense.default:
            return 1  # `.item()`: any number will do
        if function is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            zeros = torch.zeros((), dtype=kwargs.get("dtype") or args[0].dtype)
            return zeros.expand(args[0].shape)
        if function is aten.index.Tensor and args[1][0].dtype == torch.bool:  # take all glyphs
            return args[0].flatten(0, args[1][0].dim() - 1)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        reads = self.count(function, args, kwargs)
        if function._schema.is_mutable and is_on(args[0], "meta"):
            self.contents.pop(args[0].untyped_storage()._cdata, None)
        if function.is_view or function._schema.is_mutable:
            return function(*args, **kwargs)  # nothing new
        if reads or (function is aten._to_copy.default and kwargs.get("device") == META):
            result = self.compute_with_contents(function, args, kwargs)
            if result is None and reads:
                result = self.make_up(function, args, kwargs)
            if result is not None:
                return result
        result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if is_on(tensor, "meta"):
                self.see(tensor)
        return result

    def attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
               enable_gqa=False):
        """What `F.scaled_dot_product_attention` allocates on a GPU: without a mask the flash
        kernel, which takes fewer heads of keys than of queries; with one the memory-efficient
        kernel, which wants it in the dtype of the query."""
        self.counts["attention"] += 1
        self.counts["masks"] += attn_mask is not None
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale)[0]
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], -1)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]

class Normalize(torch.autograd.Function):
    """What `F.rms_norm` launches and keeps on a GPU, one kernel each way; elsewhere PyTorch
    composes it of several. A product has the same shapes."""
    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1], None, None, None

@contextlib.contextmanager
def imagine(gpu):
    """Inside, grpo.py takes the meta device for a GPU."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler  # it looks for a time in a list of them
    with (
        mock.patch.object(grpo, "DEVICE", META),
        mock.patch.object(F, "scaled_dot_product_attention", gpu.attend),
        mock.patch.object(F, "rms_norm", Normalize.apply),
        mock.patch.object(scheduler, "index_for_timestep", return_value=0),
        gpu,
    ):
        yield

# --- What a step takes ---------------------------------------------------------
def skip_tokens(forward):
    """`forward` for a sampler: only the prompts and the first three tokens are computed."""
    shapes = []  # of the logits of each pass

    def forward_rarely(ids, *args):
        if ids.shape[1] > 1:  # the prompts of a new batch
            shapes.clear()
        few = len(shapes) < 4
        logits = forward(ids, *args) if few else torch.zeros(shapes[-1], device=grpo.DEVICE)
        shapes.append(logits.shape)
        return logits

    return forward_rarely

def count_step(gpu, trainer, prompts, painter):
    """A step, with an update of two micro-batches of the first prompt -> {phase: GiB}, and
    {phase: counts} of one more token, of a pass of the painter, and of a micro-batch."""
    wrapper = trainer.wrapper
    size = wrapper.config.micro_batch_size
    gib = {}
    with (
        mock.patch.object(grpo, "record_graph", lambda forward, inputs: forward),
        mock.patch.object(wrapper, "forward", skip_tokens(wrapper.forward)),
        gpu.note(wrapper, "forward") as tokens,
    ):
        rollout, gib["sample"] = gpu.measure(
            wrapper.sample, prompts, wrapper.config.group_size, range(len(prompts)))
    first = [value[:1].repeat_interleave(2 * size, 0) for value in rollout[1:]]
    rollout = grpo.Rollout(prompts[:1] * 2 * size, *first)
    with gpu.note(painter, "forward") as strokes:
        _, gib["decode"] = gpu.measure(wrapper.decode, prompts[:1], rollout.tokens[:size], [0])
    with gpu.note(wrapper, "compute_logprobs") as passes:
        _, gib["update"] = gpu.measure(trainer.train_step, rollout, torch.zeros(2 * size))
    # Of both micro-batches first the reference, then the policy with its gradient.
    update = (passes[2] - passes[0]) + (passes[6] - passes[4])
    return gib, dict(sample=tokens[6] - tokens[4], decode=strokes[1] - strokes[0], update=update)

def imagine_step(wrapper, painter, words):
    """The second step of a training: AdamW's memory exists from the first on. All prompts but one,
    which has some `words`, are padded."""
    prompts = ["red" + " red" * (words - 1)] + ["red"] * (wrapper.config.batch_size - 1)
    gpu = FakeGPU()
    with imagine(gpu):
        trainer = grpo.GRPOTrainer(wrapper.config, wrapper, prompts, {})
        trainer.optimizer.param_groups[0]["foreach"] = True  # as by default on a GPU
        for weight in trainer.lora.weights.values():
            weight.grad = torch.zeros_like(weight)
        trainer.update_weights()
        return count_step(gpu, trainer, prompts, painter)

def sum_gib(module):
    return sum([weight.nbytes for weight in module.parameters()]) / GIB

ROWS = [  # of the table in docs/figures.md
    "--batch-size 1 --micro-batch-size 1",
    "--micro-batch-size 1",
    "--micro-batch-size 4",
    "--width 1024 --height 1024 --micro-batch-size 1",
    "--width 1024 --height 1024 --micro-batch-size 4",
    "--width 1024 --height 1024 --micro-batch-size 1 --group-size 16"]

def measure_memory(args):
    """GiB with --offload on / off, of ROWS or of what was typed, and the counts of the last row."""
    print_head("size | prompts x group | micro-batch | sample | decode | update")
    for flags in [args.flags] if args.flags else [row.split() for row in ROWS]:
        config = grpo.parse_args(["--model=random", "--decode-steps=2", *flags, "--offload=off"])
        with mock.patch.object(grpo, "DEVICE", META):
            wrapper = choose_wrapper(config)(make_real(META), config)
        ar = sum_gib(wrapper.ar)
        dit = sum_gib(wrapper.dit)
        gib, counts = imagine_step(wrapper, wrapper.pipe.transformer, words=40)
        one_half = dict(sample=ar, decode=dit, update=ar)
        cells = [f"{gib[phase] + one_half[phase]:.1f} / {gib[phase] + ar + dit:.1f}"
                 for phase in PHASES]
        print_row(f"{config.width} x {config.height}", f"{config.batch_size} x {config.group_size}",
                  config.micro_batch_size, *cells)
    print(f"\nWeights: {ar:.1f} GiB to sample and update, {dit:.1f} to decode.\n")
    print_head("what | kernels | copies to the GPU | copies back | other waits | masks")
    for phase, name in PHASES.items():
        c = counts[phase]
        print_row(name, f"{c['kernels']:,}", c["copies in"], c["copies out"], c["waits"],
                  f"{c['masks']} in {c['attention']} attentions")

# --- A real model, and what the stock pipeline does with it ------------------------
def clock(function, *args, **kwargs):
    """-> what it returned, and seconds and the highest GiB in tensors."""
    if grpo.CUDA:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = function(*args, **kwargs)
    if grpo.CUDA:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return result, (seconds, torch.cuda.max_memory_allocated() / GIB)

def load(config):
    if config.model != "random":
        return load_model(choose_wrapper(config), config)
    if not grpo.CUDA:
        raise grpo.BadInput("--model random needs a GPU")
    pipe = make_real(grpo.DEVICE)
    torch.cuda.empty_cache()
    return choose_wrapper(config)(pipe, config)

def print_settings(config):
    """What is measured: printed before a model is loaded, which takes half a minute."""
    device = f"CPU, {torch.get_num_threads()} thread(s)"
    if grpo.CUDA:
        gpu = torch.cuda.get_device_properties(grpo.DEVICE)
        device = f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB, CUDA {torch.version.cuda}"
    versions = [f"{m.__name__} {m.__version__}" for m in (torch, transformers, diffusers)]
    print(device, f"Python {platform.python_version()}", *versions, sep=", ")
    names = "model width height batch_size group_size micro_batch_size decode_steps guidance"
    print(*[f"{name} {getattr(config, name)}" for name in names.split()], sep=", ", flush=True)

def score_stock(wrapper, one):
    """A rollout of one sample -> what `generate` says of its tokens, made to draw them: log-probs
    [1, T]; and codes for the DiT."""
    T, V = one.allowed.shape[1:]
    logits = []

    def force(ids, scores):  # it draws one token more than an image has
        logits.append(scores.cpu())
        token = one.tokens[0, len(logits[:T]) - 1:][:1].to(scores.device)
        return torch.full_like(scores, -math.inf).index_fill(1, token, 0)

    policy = wrapper.policy
    raw = dict(temperature=1.0, top_k=0, top_p=1.0, logits_processor=[force])
    wrapper.move_to_gpu(wrapper.ar)
    policy.model.visual.to(grpo.DEVICE)  # `generate` asks the vision tower
    with mock.patch.object(policy, "generate", functools.partial(policy.generate, **raw)):
        codes, *_ = wrapper.pipe.generate_prior_tokens(
            str(one.prompts[0]), wrapper.config.height, wrapper.config.width, device=grpo.DEVICE)
    policy.model.visual.to("cpu")
    temperature = wrapper.config.temperature or policy.generation_config.temperature or 1.0
    logits = torch.stack(logits[:T], 1)[..., :V].float() / temperature
    logprobs = grpo.compute_policy_logprobs(logits, one.allowed)
    return logprobs.gather(2, one.tokens[..., None]).squeeze(2), codes

# --- What decides a reward --------------------------------------------------------
def split_variance(scores):
    """scores [P, G, S], of G draws of tokens painted from S starting noises -> [P, 3], unbiased:
    the variance within a prompt that is due to the tokens, to the noise, and to both together,
    with what the reward has of its own. A two-way analysis of variance without replication."""
    G, S = scores.shape[1:]
    tokens, noise = scores.mean(2, keepdims=True), scores.mean(1, keepdims=True)
    mean = scores.mean((1, 2), keepdims=True)
    both = ((scores - tokens - noise + mean) ** 2).sum((1, 2)) / ((G - 1) * (S - 1))
    tokens = ((tokens - mean) ** 2).sum((1, 2)) / (G - 1)  # expected: its own + both / S
    noise = ((noise - mean) ** 2).sum((1, 2)) / (S - 1)
    return np.stack([tokens - both / S, noise - both / G, both], 1)

def resample(parts, draws=4000):
    """[P, 3] -> shares of the three, and the ends of their 95 % intervals by a bootstrap of the
    prompts [3, 3]. Of 8 prompts these are a little narrow."""
    rows = np.random.default_rng(0).integers(len(parts), size=(draws, len(parts)))
    sums = np.stack([parts.sum(0), *parts[rows].sum(1)])
    shares = sums / np.maximum(sums.sum(1, keepdims=True), 1e-300)
    return np.stack([shares[0], *np.quantile(shares[1:], [0.025, 0.975], axis=0)], 1)

VERDICTS = dict(
    tokens="train the AR half, with grpo.py", noise="train the DiT, with examples/flow.py:DiT",
    both="train neither: only both together decide, or the reward has noise of its own")

def measure_halves(args, G=4, S=4):
    """8 prompts x 4 draws of tokens x 4 starting noises of the DiT."""
    config = grpo.parse_args(args.flags)
    rewards = grpo.load_rewards(config.reward)
    prompts = grpo.load_prompts(config.prompts)[:8]
    wrapper = load(config)
    rollout = wrapper.sample(prompts, G, range(len(prompts)))
    scores = []
    for s in range(1, S + 1):
        seeds = [1000 * s + i for i in range(len(prompts))]
        images = wrapper.decode(prompts, rollout.tokens, seeds)
        scores.append([grpo.compute_rewards(images, rollout.prompts, rewards)[0].view(-1, G)
                       for _ in range(2)])  # a picture may get two scores
    first, second = np.moveaxis(np.array(scores), 1, 0).transpose(0, 2, 3, 1)  # [P, G, S]
    shares = resample(split_variance(first))
    for name, (share, low, high) in zip(VERDICTS, shares):
        print(f"{name:6} {share:6.2f}   95 % interval {low:.2f} .. {high:.2f}")
    print(f"std within a prompt {first.std((1, 2)).mean():.3g}, of the scores of one picture "
          f"{np.mean((first - second) ** 2 / 2) ** 0.5:.3g}")
    best = shares[:, 0].argmax()
    print([*VERDICTS.values()][best])
    if shares[best, 1] < np.delete(shares[:, 2], best).max():
        print("but the intervals overlap: take more prompts, or train both halves in turn")

def rank(scores):
    """[n] -> from 0; equal ones share the mean of their places."""
    return (scores[:, None] > scores).sum(1) + ((scores[:, None] == scores).sum(1) - 1) / 2

def measure_painting(args, G=8):
    """8 prompts x 8 images from the same tokens: by the stock pipeline with 50 steps, and by the
    wrapper. Within each group, Spearman's correlation of the rewards."""
    config = grpo.parse_args(args.flags)
    rewards = grpo.load_rewards(config.reward)
    prompts = grpo.load_prompts(config.prompts)[:8]
    stock = load(dataclasses.replace(config, wrapper=None, decode_steps=50))
    rollout = stock.sample(prompts, G, range(len(prompts)))
    scores, pixels = [], []
    for name in ("the stock pipeline", "the wrapper"):
        wrapper, stock = stock or load(config), None  # one at a time is in memory
        images, (seconds, _) = clock(wrapper.decode, prompts, rollout.tokens, range(len(prompts)))
        scores.append(grpo.compute_rewards(images, rollout.prompts, rewards)[0].view(-1, G).numpy())
        pixels.append(255 * grpo.pil_to_tensor(images))
        print(f"{name}, {wrapper.config.decode_steps} steps: {seconds:.3g} s for {len(images)} "
              f"images, reward {scores[-1].mean():.4g}", flush=True)
        wrapper = None
    pairs = [(rank(a), rank(b)) for a, b in zip(*scores) if np.ptp(a) and np.ptp(b)]
    spearman = [np.corrcoef(*pair)[0, 1] for pair in pairs]
    print(f"mean |difference| {(pixels[0] - pixels[1]).abs().mean():.2f} levels of 255")
    print("Spearman", *[f"{value:.2f}" for value in spearman])
    print(f"{np.mean(spearman or np.nan):.3f} in the mean of {len(spearman)} groups whose rewards "
          "differ; above 0.9, train with the wrapper")

# --- What bf16 loses of a first update ------------------------------------------
# Adam's first step moves every weight by the learning rate, whatever its gradient is: B becomes
# lr * sign(-gradient). The true change of the log-probs by that is the one in fp32, from the same
# weights, tokens and B. Layers have their real sizes.
INIT = 0.02  # std of the weights; at 0.04 forty layers are chaotic, and no update is right

def make_wide(config, layers):
    """-> a wrapper of a tiny GLM-Image whose AR half has its real widths, in bf16."""
    pipe = tiny.make_models(grpo.COLORS)
    pipe.processor._get_target_shape = lambda height, width: (8, 8, 4, 4)  # a small draft
    pipe.transformer.register_to_config(prior_vq_quantizer_codebook_size=V)
    sizes = pipe.vision_language_encoder.config
    sizes.text_config = transformers.GlmImageTextConfig(
        num_hidden_layers=layers, vocab_size=V, pad_token_id=0, initializer_range=INIT,
        rope_parameters=ROTARY)
    with grpo.DEVICE:
        pipe.vision_language_encoder = transformers.GlmImageForConditionalGeneration(sizes)
    pipe.vision_language_encoder.bfloat16()
    return grpo.GLMImageWrapper(pipe, config)

def round_twice(layer, inputs):
    """LoRA as peft computes it, in the place of LoRALinear.forward."""
    A = layer.lora_A.to(inputs.dtype)
    B = layer.lora_B.to(inputs.dtype)
    return layer.linear(inputs) + 2 * (inputs @ A.T @ B.T)

@torch.no_grad()
def find_changes(trainer, rollout, signs, rates, form=grpo.LoRALinear.forward):
    """-> by how much B = rate * signs changes the log-probs: for each rate [N, T], in fp64."""
    scores = []
    with mock.patch.object(grpo.LoRALinear, "forward", form):
        for rate in [0, *rates]:
            for name, sign in signs.items():
                trainer.lora.weights[name].copy_(rate * sign)
            parts = [trainer.wrapper.compute_logprobs(rollout.part(slice(i, i + 1)))[0]
                     for i in range(len(rollout.tokens))]  # one at a time saves memory
            scores.append(torch.cat(parts).double().cpu())
    return [score - scores[0] for score in scores[1:]]

def compute_slope(change, truth):
    """Regresses a change on the true one -> the slope, its standard error."""
    slope = (change * truth).sum() / truth.square().sum()
    rest = (change - slope * truth).square().mean() / truth.square().sum()
    return slope.item(), rest.sqrt().item()

def compute_kl(change):
    """k3 against the policy before the step, a mean over tokens: the `kl` of the log."""
    return (torch.expm1(-change) + change).mean().item()

def measure_updates(args):
    """The table of docs/figures.md: slopes and kl for one rounding, as in grpo.py, and for two."""
    print_head("layers | lr | true change | slope, two roundings | slope, one | true kl | kl, one")
    config = grpo.parse_args([
        "--model=random", "--width=256", "--height=256", "--group-size=2", "--micro-batch-size=1",
        "--top-k=0", "--top-p=0.75", f"--temperature={16.5 * INIT}",  # some codes stand out
        "--lr=1", "--kl-coef=0", *args.flags, "--offload=off"])
    for layers in args.layers:
        torch.manual_seed(0)
        wrapper = make_wide(config, layers)
        prompts = ["a red fox on a wall beside a yellow door"]
        rollout = wrapper.sample(prompts, config.group_size, [0])
        wrapper.policy.float()  # in bf16 a backward pass takes a CPU much longer
        trainer = grpo.GRPOTrainer(config, wrapper, prompts, {})
        rewards = torch.randn(config.group_size)
        trainer.train_step(rollout, grpo.compute_advantages(rewards, config.group_size))
        signs = {name: weight.detach().clone() for name, weight in trainer.lora.weights.items()
                 if "lora_B" in name}
        truths = find_changes(trainer, rollout, signs, args.rates)
        wrapper.policy.bfloat16()  # the same weights, as they came from bf16
        two = find_changes(trainer, rollout, signs, args.rates, round_twice)
        one = find_changes(trainer, rollout, signs, args.rates)
        for rate, truth, *changes in zip(args.rates, truths, two, one):
            slopes = ["%.2f (%.2f)" % compute_slope(change, truth) for change in changes]
            kls = [f"{compute_kl(change):.2g}" for change in (truth, changes[1])]
            print_row(layers, f"{rate:g}", f"{truth.abs().mean():.2g}", *slopes, *kls)

def measure(args):
    transformers.logging.set_verbosity_error()
    globals()[f"measure_{args.command}"](args)

if __name__ == "__main__":
    start(measure, ARGS)
