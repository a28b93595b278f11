"""Measures grpo.py: on your machine, or on a GPU that is only imagined.

    python -m examples.measure report              # please paste what it prints into an issue
    python -m examples.measure report --model tiny # the same without a GPU, in seconds
    python -m examples.measure memory              # GiB and kernels of a GPU, counted without one
    python -m examples.measure bench --model random --width 512 --height 512 --offload on
    python -m examples.measure ablate 0 1 2        # what each choice is worth, over three seeds
    python -m examples.measure depth               # how far bf16 rounds

`report` and `bench` also take the flags of grpo.py. `--model random` has GLM-Image's real sizes and
random weights, so that nothing is downloaded; it needs a GPU. `--model tiny` is the tiny GLM-Image.
"""
import argparse, collections, contextlib, dataclasses, functools, itertools, math, platform
import statistics, sys, time, weakref
from pathlib import Path
from unittest import mock

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples import edit
from examples.make import tiny

aten = torch.ops.aten

class QuietTrainer(grpo.GRPOTrainer):
    """It writes no files, and prints nothing."""
    def __init__(self, *args):
        with mock.patch.object(grpo, "RANK", 1):  # only the first process writes
            super().__init__(*args)

    def start(self):
        pass

    def save(self, step):
        pass

    def log(self, step, metrics):
        self.history.append(metrics)

# --- GLM-Image in its real sizes ----------------------------------------------
V = 16384  # codes

def make_real(device):
    """GLM-Image in its real sizes with random bf16 weights, made on `device`, left on the CPU. It
    knows the tiny model's words. VAE and text encoder are taken to be CogView4's and about ByT5
    small's."""
    home = "meta" if device == torch.device("meta") else "cpu"
    rotary = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5,
                  mrope_section=(8, 12, 12))
    config = transformers.GlmImageConfig(
        text_config=dict(
            eos_token_id=V + 1, pad_token_id=V + 2, rope_parameters=rotary, initializer_range=0.04),
        image_start_token_id=V, image_end_token_id=V + 1, image_token_id=V + 4)
    glyphs = transformers.T5Config(
        vocab_size=384, d_model=1472, d_ff=3584, num_layers=12, feed_forward_proj="gated-gelu")
    with torch.device(device), transformers.modeling_utils.local_torch_dtype(torch.bfloat16):
        ar = transformers.GlmImageForConditionalGeneration(config).to(home)
        t5 = transformers.T5EncoderModel(glyphs).to(home)
        dit = diffusers.GlmImageTransformer2DModel(
            in_channels=16, out_channels=16, prior_vq_quantizer_codebook_size=V,
            attention_head_dim=128, num_attention_heads=32).to(home)
        vae = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=(128, 512, 1024, 1024), layers_per_block=3, latent_channels=16,
            latents_mean=[0.0] * 16, latents_std=[1.0] * 16, mid_block_add_attention=False,
            use_quant_conv=False, use_post_quant_conv=False).to(home)
    # Random logits have a std of 2.6. At this temperature it is 3.9, so that some codes stand out.
    ar.generation_config.update(do_sample=True, temperature=0.66, top_p=0.75)
    small = tiny.make_models(grpo.COLORS)
    tiny.fit_vision(small, torch.zeros(8, 3, 32, 32))  # for its processor
    return diffusers.GlmImagePipeline(
        small.tokenizer, small.processor, t5, ar, vae, dit, small.scheduler)

# --- An imagined GPU: the `meta` device, where a tensor has a size and no contents ---
NO_KERNEL = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
             aten.new_empty_strided, aten._local_scalar_dense}

def is_on(tensor, kind):
    return isinstance(tensor, torch.Tensor) and tensor.device.type == kind

def computes(function, args, kind):
    """Does this operation start a kernel on a device of this kind?"""
    if function.is_view or function.overloadpacket in NO_KERNEL:
        return False
    return any([is_on(tensor, kind) for tensor in tree_leaves(args)])

def describe(value):
    """What the shape of an operation's result depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple([describe(part) for part in value])
    return type(value), value

class FakeGPU(TorchDispatchMode):
    """`meta` stands for the GPU, the CPU is the host. Every operation passes through here. A
    storage counts from the operation that makes it until nobody holds it any more, in blocks of 512
    bytes, as on a GPU. Weights are added by hand: with offloading, those of the half that is held
    alone."""
    def __init__(self, *halves):
        super().__init__()
        self.alive = {}  # storages: a weak reference, bytes
        self.results = {}  # of operations seen before; to ask PyTorch again takes most of the time
        self.sizes = {half: sum([w.nbytes for w in half.parameters()]) for half in halves}
        self.weights = {"on": 0, "off": sum(self.sizes.values())}  # on the GPU, by --offload
        self.now = 0  # bytes beside the weights
        # Operations so far: kernels, copies from and to the host, and numbers that the host waits
        # for. A copy to the host waits, too.
        self.counts = collections.Counter()
        for half in halves:
            for tensor in itertools.chain(half.parameters(), half.buffers()):
                self.see(tensor)
        self.now = 0
        self.forget_peaks()

    def forget_peaks(self):
        self.peaks = {"on": 0, "off": 0}

    def grow(self, size):
        self.now += size
        for offload, weights in self.weights.items():
            self.peaks[offload] = max(self.peaks[offload], weights + self.now)

    def see(self, tensor):
        """-> True if it is new, and all of its storage."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.alive:
            return False
        size = -(-storage.nbytes() // 512) * 512
        self.alive[key] = weakref.ref(storage, lambda _: self.forget(key)), size
        if hasattr(self, "peaks"):
            self.grow(size)
        return storage.nbytes() == tensor.nbytes

    def forget(self, key):
        self.now -= self.alive.pop(key)[1]

    def move_to_gpu(self, half):
        """In the place of that of TwoHalves: with offloading the GPU holds this half alone."""
        self.weights["on"] = self.sizes[half]

    def without_contents(self, function, args, kwargs):
        """What cannot be had from a tensor without contents, made up; None where it can."""
        if function is aten._local_scalar_dense.default:
            return 1  # `.item()`: any number will do
        if function is aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            zeros = torch.zeros((), dtype=kwargs.get("dtype") or args[0].dtype)
            return zeros.expand(args[0].shape)
        if function is aten.index.Tensor and args[1][0].dtype == torch.bool:
            # The glyphs that are no padding: all of them.
            return args[0].flatten(0, args[1][0].dim() - 1)

    def count(self, function, args, kwargs):
        self.counts["kernels"] += computes(function, (args, kwargs), "meta")
        if function is aten._local_scalar_dense.default:
            self.counts["waits"] += is_on(args[0], "meta")
        elif function is aten._to_copy.default and kwargs.get("device") is not None:
            self.counts["copies in"] += is_on(args[0], "cpu") and kwargs["device"].type == "meta"
            self.counts["copies out"] += is_on(args[0], "meta") and kwargs["device"].type == "cpu"
        elif function is aten.copy_.default:
            self.counts["copies in"] += is_on(args[0], "meta") and is_on(args[1], "cpu")
            self.counts["copies out"] += is_on(args[0], "cpu") and is_on(args[1], "meta")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.count(function, args, kwargs)
        if function.is_view or function._schema.is_mutable:
            return function(*args, **kwargs)  # nothing new
        on_gpu = len(args) > 0 and is_on(args[0], "meta")
        made_up = self.without_contents(function, args, kwargs) if on_gpu else None
        if made_up is not None:
            return made_up
        key = describe([function, args, list(kwargs.items())])
        if key in self.results:
            shape, stride, dtype = self.results[key]
            result = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            result = function(*args, **kwargs)
        for tensor in tree_leaves(result):
            if is_on(tensor, "meta") and self.see(tensor) and tensor is result:
                self.results[key] = tensor.shape, tensor.stride(), tensor.dtype
        return result

    def attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
               enable_gqa=False):
        """What `F.scaled_dot_product_attention` allocates on a GPU: without a mask the flash
        kernel, which takes fewer heads of keys than of queries; with one the memory-efficient
        kernel, which wants it in the dtype of the query, its rows a multiple of 8 apart."""
        self.counts["attention"] += 1
        self.counts["masks"] += attn_mask is not None
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale)[0]
        assert not enable_gqa  # the keys were repeated
        if attn_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(~attn_mask, -math.inf)
        K = attn_mask.shape[-1]
        if any([stride % 8 for stride in attn_mask.stride()[:-1]]):
            attn_mask = F.pad(attn_mask, (0, 8 - K % 8))[..., :K]
        attn_mask = attn_mask.expand(*query.shape[:3], K)
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]

class Normalize(torch.autograd.Function):
    """In the place of `F.rms_norm`: on a GPU it is one kernel each way, while on other devices
    PyTorch composes it. A product has the same shapes and stands for each. Kept are the input, the
    weight and a number a row."""
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1], None

def make_fake_wrapper(Wrapper, config):
    with mock.patch.object(grpo, "DEVICE", torch.device("meta")):
        return Wrapper(make_real(torch.device("meta")), config)

@contextlib.contextmanager
def imagine(wrapper):
    """Inside, grpo.py takes the meta device for a GPU -> a FakeGPU. Real numbers are wanted by the
    prompts, which are read on the host, and by the scheduler."""
    gpu = FakeGPU(wrapper.ar, wrapper.dit)
    encode = wrapper.encode

    def encode_on_host(prompts):
        with mock.patch.object(grpo, "DEVICE", torch.device("cpu")):
            tensors = encode(prompts)
        return [torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype,
                                    device="meta") for tensor in tensors]

    def normalize(x, normalized_shape, weight, eps):
        return Normalize.apply(x, weight)

    with (
        mock.patch.object(grpo, "DEVICE", torch.device("meta")),
        mock.patch.object(wrapper, "encode", encode_on_host),
        mock.patch.object(wrapper, "move_to_gpu", gpu.move_to_gpu),
        mock.patch.object(F, "scaled_dot_product_attention", gpu.attend),
        mock.patch.object(F, "rms_norm", normalize),
        mock.patch.object(type(wrapper.pipe.scheduler), "index_for_timestep", return_value=0),
        gpu,
    ):
        yield gpu

def warm_up(trainer):
    """AdamW's memory exists from the first step on."""
    trainer.optimizer.param_groups[0]["foreach"] = True  # as by default on a GPU
    for weight in trainer.lora.weights.values():
        weight.grad = torch.zeros_like(weight)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()

def skip_tokens(forward, T):
    """`forward` for a sampler of T tokens: only the prompts and the last three, beside what is kept
    of all."""
    fed = []

    def forward_rarely(ids, mask, position_ids, num_last, cache):
        if ids.shape[1] == 1:
            fed.append(True)
        if 0 < len(fed) < T - 3:
            return torch.empty(len(ids), num_last, V, device="meta")
        return forward(ids, mask, position_ids, num_last, cache)

    return forward_rarely

def count_memory(side, num_prompts, micro_batch_size=1, group_size=4,
                 Wrapper=grpo.GLMImageWrapper):
    """Highest GiB alive on the GPU in the second step, of two micro-batches -> {phase: {"on",
    "off"}}, by --offload, and the counts of one more token, DiT pass and micro-batch."""
    draft = 0 if Wrapper is edit.EditWrapper else 256
    T = draft + (side // 32) ** 2
    n = 2 * micro_batch_size
    config = grpo.Config(width=side, height=side, batch_size=num_prompts, group_size=group_size,
                         micro_batch_size=micro_batch_size, decode_steps=2, offload="off")
    prompt = "red " * 40 if draft else "red " * 40 + "\tsource.png"
    rollout = grpo.Rollout([prompt] * n, torch.zeros(n, T).long(), torch.zeros(n, T),
                           torch.ones(n, T, V).bool())
    wrapper = make_fake_wrapper(Wrapper, config)
    source = Image.new("RGB", (side, side))
    codes = torch.zeros(side // 32, side // 32).long()
    wrapper.load_source = lambda path: (source.size, codes)
    marks = collections.defaultdict(list)  # the counts so far, at each call of a function

    def marked(name, function):
        def call(*args, **kwargs):
            marks[name].append(gpu.counts.copy())
            result = function(*args, **kwargs)
            marks[f"end of {name}"].append(gpu.counts.copy())
            return result

        return call

    def update():
        compute = marked("compute_logprobs", wrapper.compute_logprobs)
        with mock.patch.object(wrapper, "compute_logprobs", compute):
            trainer.train_step(rollout, torch.zeros(n))
        # Of both micro-batches first the reference, then the policy with its gradient.
        reference, _, policy, last = marks["compute_logprobs"]
        return (marks["compute_logprobs"][1] - reference) + (last - policy)

    def sample():
        rarely = marked("forward", skip_tokens(wrapper.forward, T))
        with mock.patch.object(wrapper, "forward", rarely):
            drawn = wrapper.sample([prompt] * num_prompts, group_size, range(num_prompts))
        assert not drawn.allowed.is_meta  # of all tokens they are large
        return marks["forward"][-1] - marks["forward"][-2]

    def decode():
        transformer = wrapper.pipe.transformer
        with (mock.patch.object(transformer, "forward", marked("dit", transformer.forward)),
              mock.patch.object(edit, "open_source", lambda path: source)):
            wrapper.decode([prompt], rollout.tokens[:micro_batch_size], [0])
        return marks["end of dit"][0] - marks["dit"][0]

    peaks = {}
    counts = {}
    with imagine(wrapper) as gpu:
        trainer = QuietTrainer(config, wrapper, [prompt], {})
        warm_up(trainer)
        resident = gpu.now
        for phase in (update, sample, decode):
            gpu.forget_peaks()
            counts[phase.__name__] = phase()
            peaks[phase.__name__] = {offload: gib / 2**30 for offload, gib in gpu.peaks.items()}
            left = gpu.now - resident
            assert left < 2**20, f"{phase.__name__} leaves {left} bytes behind"
    return peaks, counts

def count_vision(side, alone):
    """Highest GiB while a picture is made into codes: by the tower alone, or, as for edit.py, while
    the policy is on the GPU, too. Like `encode_images`, part by part, as the sizes of the pictures
    are read from a tensor, which has no contents here."""
    ar = make_real(torch.device("meta")).vision_language_encoder
    model = ar.model
    grid = side // 32
    N = grid**2
    tower = torch.nn.ModuleList([model.visual, model.vqmodel])
    gpu = FakeGPU(tower if alone else ar)
    with mock.patch.object(F, "scaled_dot_product_attention", gpu.attend), torch.no_grad(), gpu:
        features = model.visual.patch_embed(torch.empty(N, 3 * 16 * 16, device="meta"))
        places = torch.empty(N, device="meta")
        sizes = torch.ones(1, 3, device="meta")
        features = model.visual.embeddings(features, [N], sizes, places, places)
        for block in model.visual.blocks:
            features = block(features, cu_seqlens=torch.tensor([0, N]))
        model.vqmodel.encode(features.T.reshape(1, -1, grid, grid))
    return gpu.peaks["off"] / 2**30

def count_sft(side, size):
    """Highest GiB with --offload on in a step of sft.py, of two micro-batches."""
    from examples import sft
    config = grpo.Config(width=side, height=side, micro_batch_size=size, batch_size=2 * size,
                         offload="off")
    wrapper = make_fake_wrapper(grpo.GLMImageWrapper, config)
    codes = torch.zeros(2 * size, 256 + (side // 32) ** 2).long()

    class QuietSFT(QuietTrainer, sft.SFTTrainer):
        pass

    with imagine(wrapper) as gpu:
        trainer = QuietSFT(config, wrapper, ["red " * 40] * len(codes), codes)
        warm_up(trainer)
        gpu.forget_peaks()
        sft.SFTTrainer.train_step(trainer, torch.arange(len(codes)))
    return gpu.peaks["on"] / 2**30

ROWS = [(512, 1, 4, 1), (512, 8, 4, 1), (512, 8, 4, 4), (1024, 8, 4, 1), (1024, 8, 4, 4),
        (1024, 8, 16, 1)]  # side, prompts, group, micro-batch

def measure_memory(args):
    """Tables of docs/figures.md."""
    def gib(*modules):
        return sum([w.nbytes for module in modules for w in module.parameters()]) / 2**30

    pipe = make_real(torch.device("meta"))
    ar = pipe.vision_language_encoder
    to_decode = [pipe.text_encoder, pipe.transformer, pipe.vae]
    print(f"GiB of weights in bf16: {gib(ar.model.language_model, ar.lm_head):.1f} to sample and "
          f"update, {gib(*to_decode):.1f} to decode, {gib(ar, *to_decode):.1f} in all.\n\n"
          "GiB with --offload on / off:\n\n"
          "| size | prompts x group | micro-batch | sample | decode | update |\n"
          "|---|---|---|---|---|---|", flush=True)
    counted = {}
    for row in args.rows:
        side, num_prompts, group_size, size = ROWS[row]
        peaks, counted[row] = count_memory(side, num_prompts, size, group_size)
        pairs = [peaks[phase] for phase in ("sample", "decode", "update")]
        cells = [f"{pair['on']:.1f} / {pair['off']:.1f}" for pair in pairs]
        print(f"| {side} | {num_prompts} x {group_size} | {size} |", " | ".join(cells), "|",
              flush=True)
    print("\nCounted in each of them:\n\n"
          "| row | what | kernels | copies to the GPU | copies back | other waits | "
          "attention with a mask |\n|---|---|---|---|---|---|---|")
    names = dict(sample="a token", decode="a DiT pass", update="a micro-batch of one prompt")
    for row, phases in counted.items():
        for phase, name in names.items():
            c = phases[phase]
            print(f"| {row} | {name} | {c['kernels']:,} | {c['copies in']} | {c['copies out']} "
                  f"| {c['waits']} | {c['masks']} of {c['attention']} |")

def measure_edits(args):
    """The table of docs/edit.md, with --offload on. The vision tower comes when a source is seen
    for the first time."""
    print("| size | encode a source | sample | decode | update |\n|---|---|---|---|---|")
    for side in args.sides:
        peaks, _ = count_memory(side, 8, Wrapper=edit.EditWrapper)
        cells = [peaks[phase]["on"] for phase in ("sample", "decode", "update")]
        cells = [count_vision(side, alone=False), *cells]
        print(f"| {side} |", " | ".join([f"{cell:.1f}" for cell in cells]), "|", flush=True)

def measure_sft(args):
    """The table of docs/sft.md, with --offload on."""
    print("| size | vision tower | micro-batch of 1 | micro-batch of 4 |\n|---|---|---|---|")
    for side in args.sides:
        cells = [count_vision(side, alone=True), count_sft(side, 1), count_sft(side, 4)]
        print(f"| {side} |", " | ".join([f"{cell:.1f}" for cell in cells]), "|", flush=True)

# --- A report, and the benchmark ----------------------------------------------
def clock(function, *args):
    """-> (seconds, what it returned); a GPU is waited for."""
    start = time.perf_counter()
    result = function(*args)
    if grpo.CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result

def load(flags, **defaults):
    """-> config, wrapper. The model may be `random` or `tiny`."""
    config = grpo.parse_args(flags, **defaults)
    if config.model == "random":
        if not grpo.CUDA:
            raise grpo.BadInput("--model random is 33 GiB of weights and needs a GPU; without one, "
                                "type --model tiny")
        pipe = make_real(grpo.DEVICE)
        torch.cuda.empty_cache()
        return config, grpo.GLMImageWrapper(pipe, config)
    if config.model == "tiny":
        own = [f"--model={grpo.TINY_MODEL}"]  # what is typed last counts
        config = grpo.parse_args([*flags, *own], **defaults)
    return config, grpo.GLMImageWrapper.from_pretrained(config.model, config)

def name_device():
    if not grpo.CUDA:
        return f"CPU, {torch.get_num_threads()} thread(s)"
    return f"{torch.cuda.get_device_name()}, {grpo.GPU_GIB:.1f} GiB"

class CountKernels(TorchDispatchMode):
    """Operations that start a kernel, such as a profiler would count on a GPU, or nearly."""
    kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.kernels += computes(function, (args, kwargs), grpo.DEVICE.type)
        return function(*args, **kwargs)

def count_in_call(owner, name, skip, function):
    """Runs `function`, and counts the kernels of one call of owner.name, after `skip` others."""
    original = getattr(owner, name)
    counter = CountKernels()
    calls = itertools.count()

    def call(*args, **kwargs):
        with counter if next(calls) == skip else contextlib.nullcontext():
            return original(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        function()
    return counter.kernels

def measure_report(args):
    """What somebody with a GPU can paste into an issue: seconds, GiB, kernels, rounding, NaN."""
    model = "random" if grpo.CUDA else "tiny"
    config, wrapper = load(args.flags, model=model, micro_batch_size=1)
    short, long = "a red fox", "a blue door in a white wall, beside a yellow bicycle"
    rewards = grpo.load_rewards("color")
    trainer = QuietTrainer(config, wrapper, [short, long], rewards)
    versions = [f"{module.__name__} {module.__version__}"
                for module in (torch, transformers, diffusers)]
    print(f"{name_device()}; Python {platform.python_version()}, {', '.join(versions)}, "
          f"CUDA {torch.version.cuda}\n"
          f"{config.model}, {config.width} x {config.height}, {config.batch_size} prompts x "
          f"{config.group_size}, micro-batch {config.micro_batch_size}, {config.decode_steps} "
          f"decode steps, guidance {config.guidance}, offload {wrapper.offload}, "
          f"compile {config.compile}\n", flush=True)
    # A small step first: it warms up, and its kernels are counted.
    token = count_in_call(
        wrapper, "forward", 5, lambda: wrapper.sample([short], config.group_size, [0]))
    rollout = wrapper.sample([short], config.group_size, [0])
    passes = count_in_call(
        wrapper.pipe.transformer, "forward", 0,
        lambda: wrapper.decode([short], rollout.tokens[:1].expand(2, -1), [0]))
    counter = CountKernels()
    with counter:
        part = rollout.part(slice(config.micro_batch_size))
        trainer.train_step(part, torch.ones(len(part.prompts)))
    print(f"kernels: {token:,} a token before it is drawn, {passes:,} a DiT pass, "
          f"{counter.kernels:,} an update of {len(part.prompts)} image(s)\n", flush=True)
    report_phases(config, trainer, short)
    report_padding(config, trainer, short, long)

def report_phases(config, trainer, prompt):
    """Seconds and memory of a whole step."""
    print("| phase | seconds | GiB in tensors | GiB reserved |\n|---|---|---|---|", flush=True)
    prompts = [prompt] * config.batch_size
    seeds = range(config.batch_size)

    def measure(name, function, *args):
        if grpo.CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        seconds, result = clock(function, *args)
        used = torch.cuda.max_memory_allocated() / 2**30
        reserved = torch.cuda.max_memory_reserved() / 2**30
        print(f"| {name} | {seconds:.2f} | {used:.2f} | {reserved:.2f} |", flush=True)
        return result

    rollout = measure("sample", trainer.wrapper.sample, prompts, config.group_size, seeds)
    images = measure("decode", trainer.wrapper.decode, prompts, rollout.tokens, seeds)
    rewards, _ = grpo.compute_rewards(
        images, rollout.prompts, [None] * len(images), trainer.rewards)
    advantages = grpo.compute_advantages(rewards, config.group_size)
    metrics = measure("update", trainer.train_step, rollout, advantages)
    dtype = trainer.wrapper.policy.dtype
    layers = len(trainer.wrapper.policy.model.language_model.layers)
    print(f"\n{dtype}, {layers} layers: sampler_gap {metrics['sampler_gap']:.3g}, "
          f"entropy {metrics['entropy']:.3g}, grad_norm {metrics['grad_norm']:.3g}", flush=True)

def report_padding(config, trainer, short, long):
    """A micro-batch of prompts of different length, where a padded row has no key to attend to."""
    rollout = trainer.wrapper.sample([short, long], 2, [0, 1])
    trainer.config.micro_batch_size = 4
    metrics = trainer.train_step(rollout, torch.tensor([1.0, -1.0, 1.0, -1.0]))
    finite = all([math.isfinite(value) for value in metrics.values()])
    finite = finite and bool(rollout.logprobs.isfinite().all())
    print(f"prompts of different length: {'all finite' if finite else 'NaN'}, "
          f"sampler_gap {metrics['sampler_gap']:.3g}, grad_norm {metrics['grad_norm']:.3g}")

def measure_stock(wrapper, rollout):
    """Seconds of an image the usual way: the pipeline samples and decodes it alone, then a pass of
    its own scores it."""
    config = wrapper.config
    one = rollout.part(slice(1))
    wrapper.move_to_gpu(wrapper.ar)
    wrapper.policy.eval()  # in training mode `generate` loses its cache, and looks too slow
    prompt, = one.prompts
    wrapper.policy.model.visual.to(grpo.DEVICE)  # `generate` asks the vision tower
    codes = wrapper.pipe.transformer.config.prior_vq_quantizer_codebook_size
    others = list(range(codes, wrapper.policy.lm_head.out_features))
    wrapper.policy.generation_config.suppress_tokens = others
    sampled, _ = clock(functools.partial(
        wrapper.pipe.generate_prior_tokens, prompt, config.height, config.width,
        device=grpo.DEVICE))
    wrapper.policy.model.visual.to("cpu")  # or its 2 GiB would count as ours
    wrapper.ar.train()
    decoded, _ = clock(wrapper.decode, [prompt], one.tokens, [0])
    with torch.no_grad():
        scored, _ = clock(wrapper.compute_logprobs, one)
    return sampled + decoded + scored

def measure_step(trainer, prompt, group_size):
    """One step on one prompt -> seconds of sample, decode, score and update, and its rollout."""
    sample, rollout = clock(trainer.wrapper.sample, [prompt], group_size, [0])
    decode, images = clock(trainer.wrapper.decode, [prompt], rollout.tokens, [0])
    score, (rewards, _) = clock(grpo.compute_rewards, images, rollout.prompts,
                                [None] * group_size, trainer.rewards)
    one = torch.zeros(1)  # a group of one has nothing to compare
    advantages = grpo.compute_advantages(rewards, group_size) if group_size > 1 else one
    update, _ = clock(trainer.train_step, rollout, advantages)
    return (sample, decode, score, update), rollout

def measure_bench(args):
    """One table. Every ratio is of two medians measured in turn in this run."""
    prompt = "a red fox"
    flags = ["--micro-batch-size", "1" if grpo.CUDA else "8", *args.flags]
    config, wrapper = load(flags)
    trainer = QuietTrainer(config, wrapper, [prompt], grpo.load_rewards(config.reward))
    repeats = args.repeats or (3 if grpo.CUDA else 9)
    print(f"{config.model}, {config.width} x {config.height}, {config.decode_steps} decode steps, "
          f"{config.micro_batch_size} images at a time, offload {config.offload}, "
          f"{name_device()}, one prompt, medians of {repeats}, seconds\n")
    columns = "group, stock rollout, ours, ratio, sample, decode, update, step, tokens/s, peak GiB"
    columns = columns.split(", ")
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    for group_size in args.groups:
        if grpo.CUDA:
            torch.cuda.reset_peak_memory_stats()
        _, rollout = measure_step(trainer, prompt, group_size)  # warm-up
        peak = torch.cuda.max_memory_allocated() / 2**30  # of ours, before the stock recipe comes
        phases = []
        stocks = []
        for _ in range(repeats):
            phases.append(measure_step(trainer, prompt, group_size)[0])
            images = 1 if grpo.CUDA else group_size
            seconds = [measure_stock(wrapper, rollout) for _ in range(images)]
            stocks.append(statistics.mean(seconds) * group_size)
        sample, decode, score, update = [statistics.median(column) for column in zip(*phases)]
        stock = statistics.median(stocks)
        ours = sample + decode
        step = ours + score + update
        print(f"| {group_size} | {stock:.3f} | {ours:.3f} | {stock / ours:.1f}x | {sample:.3f} "
              f"| {decode:.3f} | {update:.3f} | {step:.3f} | {rollout.tokens.numel() / sample:.0f} "
              f"| {peak:.1f} |", flush=True)

# --- What each choice is worth ------------------------------------------------
def noise_of_its_own(decode):
    """Instead of one for the group: every image starts from other noise."""
    def other(prompts, tokens, seeds):
        G = len(tokens) // len(prompts)
        own = [seed + i for seed in seeds for i in range(G)]
        return decode(np.repeat(prompts, G).tolist(), tokens, own)

    return other

def advantages_not_divided(rewards, group_size):
    """As in Dr. GRPO: in the place of grpo.compute_advantages."""
    groups = torch.as_tensor(rewards).view(-1, group_size)
    return (groups - groups.mean(1, keepdim=True)).flatten()

ABLATIONS = {  # name: settings
    "as shipped": {},
    "separate noise for each image": {},
    "group size 2 (16 prompts)": dict(group_size=2, batch_size=16),
    "group size 8 (4 prompts)": dict(group_size=8, batch_size=4),
    "group size 16 (2 prompts)": dict(group_size=16, batch_size=2),
    "no division by the std": {},
    "no division and no KL (Dr. GRPO)": dict(kl_coef=0.0),
    "no KL": dict(kl_coef=0.0),
    "KL 0.02": dict(kl_coef=0.02),
    "2 updates per rollout": dict(num_iterations=2),
}

def measure_ablate(args):
    """Mean reward of the last five of 20 steps, per seed, and mean and std over the seeds."""
    results = {name: [] for name in ABLATIONS}
    prompts, _ = grpo.load_prompts(None)
    for seed, (name, settings) in itertools.product(args.seeds, ABLATIONS.items()):
        config = grpo.parse_args(["--model", grpo.TINY_MODEL, "--steps", str(args.steps)])
        config = dataclasses.replace(config, **settings, seed=seed)
        wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
        if name.startswith("separate"):
            wrapper.decode = noise_of_its_own(wrapper.decode)
        compare = advantages_not_divided if "division" in name else grpo.compute_advantages
        with mock.patch.object(grpo, "compute_advantages", compare):
            trainer = QuietTrainer(config, wrapper, prompts, grpo.load_rewards(config.reward))
            trainer.train()
        results[name].append(statistics.mean([row["reward"] for row in trainer.history[-5:]]))
        print(f"seed {seed}  {name:36s} {results[name][-1]:.3f}", file=sys.stderr, flush=True)
    print("| | " + " | ".join([f"seed {seed}" for seed in args.seeds]) + " | mean | std |")
    print("|---" * (len(args.seeds) + 3) + "|")
    for name, values in results.items():
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        cells = [f"{value:.3f}" for value in (*values, statistics.mean(values), spread)]
        print("| " + " | ".join([name, *cells]) + " |")

# --- How far bf16 rounds at depth, on a CPU -----------------------------------
DEPTHS = [(10, 0.04, 16), (20, 0.04, 16), (40, 0.04, 16), (40, 0.08, 16),  # layers, init, bits
          (40, 0.04, 32)]

@torch.no_grad()
def measure_depth(args, linear=F.linear):
    """GLM-Image's AR half, random, a quarter as wide; max |log-prob differences| of the sampler to
    the trainer (gap), of two trainer passes (again), to one without padding, and to one whose sums
    are in reverse order; of the last also the 99th percentile, the mean, the share of ratios off by
    0.2 (out)."""
    prompts = ["green"] * 4 + ["a red fox on a wall beside a yellow door"] * 4
    print("|layers|init|bits|nats|gap|again|unpadded|reversed|99 %|mean|out|\n" + "|-" * 11 + "|")
    for layers, init, bits in DEPTHS[:args.rows]:
        pipe = tiny.make_models(grpo.COLORS)
        pipe.processor._get_target_shape = lambda height, width: (8, 8, 4, 4)  # a small draft
        pipe.transformer.register_to_config(prior_vq_quantizer_codebook_size=V)
        config = pipe.vision_language_encoder.config
        config.text_config = transformers.GlmImageTextConfig(  # all else has its real size
            num_hidden_layers=layers, hidden_size=1024, num_attention_heads=8,
            intermediate_size=3424, initializer_range=init,
            rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5))
        dtype = torch.bfloat16 if bits == 16 else torch.float32
        policy = transformers.GlmImageForConditionalGeneration(config).to(dtype)
        pipe.vision_language_encoder = policy
        heat = 0.9 * init * 32 / 3.5  # what 0.9 is to logits of std 3.5: some codes stand out
        wrapper = grpo.GLMImageWrapper(pipe, grpo.Config(
            width=256, height=256, top_k=0, top_p=0.75, temperature=heat, offload="off"))
        rollout = wrapper.sample(prompts[::4], 4, [0, 1])
        sampled = rollout.logprobs
        first, again = [wrapper.compute_logprobs(rollout)[0] for _ in range(2)]
        alone, _ = wrapper.compute_logprobs(rollout.part(slice(4)))  # no padding
        with mock.patch.object(F, "linear", lambda x, w, b: linear(x.flip(-1), w.flip(-1), b)):
            gap = wrapper.compute_logprobs(rollout)[0] - sampled
        ratios = [sampled - first, again - first, alone - first[:4], gap]  # their logarithms
        cells = [-sampled.mean(), *[x.abs().max() for x in ratios], gap.abs().quantile(0.99),
                 gap.abs().mean(), (gap.expm1().abs() > 0.2).float().mean()]
        print(f"|{layers}|{init}|{bits}|", *[f"{cell:.2g}|" for cell in cells], flush=True)

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="command")

    def add(name, function):
        command = commands.add_parser(name, help=function.__doc__.split(".")[0].replace("\n", " "),
                                      description=function.__doc__, allow_abbrev=False)
        command.set_defaults(run=function)
        return command

    add("report", measure_report)
    bench = add("bench", measure_bench)
    bench.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8, 16], help="group sizes")
    bench.add_argument("--repeats", type=int, help="default: 3 on a GPU, 9 on a CPU")
    memory = add("memory", measure_memory)
    memory.add_argument("rows", type=int, nargs="*", default=[*range(len(ROWS))], metavar="row",
                        help="rows of the table to count; default: all, 0 to %(default)s")
    for command in (add("edit", measure_edits), add("sft", measure_sft)):
        command.add_argument("sides", type=int, nargs="*", default=[512, 1024], metavar="size")
    ablate = add("ablate", measure_ablate)
    ablate.add_argument("seeds", type=int, nargs="*", default=[*range(5)], metavar="seed")
    ablate.add_argument("--steps", type=int, default=20)
    add("depth", measure_depth).add_argument("--rows", type=int, default=len(DEPTHS))

    args, args.flags = parser.parse_known_args()
    if "run" not in args:
        parser.print_help()
        parser.exit()
    if args.flags and args.run not in (measure_report, measure_bench):
        parser.error(f"unknown: {' '.join(args.flags)}")
    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    try:
        args.run(args)
    except grpo.BadInput as error:
        message = " ".join(str(error).split())
        parser.exit(2, f"{parser.prog}: error: {message}\n")

if __name__ == "__main__":
    main()
