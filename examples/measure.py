"""Measures grpo.py: on your machine, or on a GPU that is only imagined.

    python -m examples.measure report        # please paste what it prints into an issue
    python -m examples.measure memory        # GiB and kernels of a GPU, counted without one
    python -m examples.measure janus         # the same for janus.py; also: edit, sft
    python -m examples.measure bench --model random --width 512 --height 512 --offload on
    python -m examples.measure ablate 0 1 2  # what each choice is worth, over three seeds

`report` and `bench` also take the flags of grpo.py. `--model random` has GLM-Image's real sizes and
random weights, so that nothing is downloaded; it needs a GPU. Without one, `report` measures the
tiny GLM-Image in seconds.
"""
import argparse, collections, contextlib, dataclasses, functools, itertools, math, platform, re
import statistics, sys, time, weakref
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo  # before torch, which reads when it is imported how threads are to wait
import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from examples import edit, janus, sft
from examples.make import small_janus, tiny

aten = torch.ops.aten
META = torch.device("meta")
GIB = 2**30

class QuietTrainer(grpo.GRPOTrainer):
    """It writes no files, and prints nothing."""
    def __init__(self, *args):
        with mock.patch.object(grpo, "RANK", 1):  # only the first process writes
            super().__init__(*args)

    def start(self, step=None):
        pass

    save = start

    def log(self, step, metrics):
        self.history.append(metrics)

def print_row(*cells):
    """Of a table; numbers have one digit after the point."""
    cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells]
    print("|", " | ".join(cells), "|", flush=True)

def print_head(text):
    print_row(text)
    print("|---" * len(text.split(" | ")) + "|")

# --- GLM-Image in its real sizes ----------------------------------------------
V = 16384  # codes

def make_real(device, ar_layers=40, dit_layers=30):
    """GLM-Image in its real sizes with random bf16 weights, made on `device`, left on the CPU. VAE
    and text encoder are taken to be CogView4's and about ByT5 small's."""
    home = "meta" if device == META else "cpu"
    rotary = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5,
                  mrope_section=(8, 12, 12))
    config = transformers.GlmImageConfig(
        text_config=dict(
            num_hidden_layers=ar_layers, eos_token_id=V + 1, pad_token_id=V + 2,
            rope_parameters=rotary, initializer_range=0.04),
        image_start_token_id=V, image_end_token_id=V + 1, image_token_id=V + 4)
    glyphs = transformers.T5Config(
        vocab_size=384, d_model=1472, d_ff=3584, num_layers=12, feed_forward_proj="gated-gelu")
    with torch.device(device), transformers.modeling_utils.local_torch_dtype(torch.bfloat16):
        ar = transformers.GlmImageForConditionalGeneration(config).to(home)
        t5 = transformers.T5EncoderModel(glyphs).to(home)
        dit = diffusers.GlmImageTransformer2DModel(
            num_layers=dit_layers, in_channels=16, out_channels=16,
            prior_vq_quantizer_codebook_size=V, attention_head_dim=128,
            num_attention_heads=32).to(home)
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

# --- Counting what Python asks of a device -------------------------------------
def without_graph():
    """Inside, each token is drawn by Python, to be counted."""
    return mock.patch.object(grpo, "record_graph", lambda forward, inputs: forward)

NO_KERNEL = {aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
             aten.new_empty_strided, aten._local_scalar_dense}

def is_on(tensor, kind):
    return isinstance(tensor, torch.Tensor) and tensor.device.type == kind

class CountOperations(TorchDispatchMode):
    """Counts operations on grpo.DEVICE: kernels, nearly as a profiler would on a GPU; copies from
    and to the host; numbers that the host waits for. A copy to the host waits, too."""
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def note(self, function):
        """-> the function, and a list: the counts before and after each call."""
        notes = []

        def call(*args, **kwargs):
            notes.append(self.counts.copy())
            result = function(*args, **kwargs)
            notes.append(self.counts.copy())
            return result

        return call, notes

    def count(self, function, args, kwargs):
        """-> whether a tensor on the device is read."""
        kind = grpo.DEVICE.type
        reads = any([is_on(leaf, kind) for leaf in tree_leaves((args, kwargs))])
        starts_none = function.is_view or function.overloadpacket in NO_KERNEL
        self.counts["kernels"] += reads and not starts_none
        if function is aten._local_scalar_dense.default:
            self.counts["waits"] += reads
        elif function.overloadpacket in (aten._to_copy, aten.copy_):
            source = args[function is aten.copy_.default]
            target = kwargs.get("device") or args[0].device
            self.counts["copies in"] += is_on(source, "cpu") and target.type == kind
            self.counts["copies out"] += is_on(source, kind) and target.type == "cpu"
        return reads

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count(function, args, kwargs or {})
        return function(*args, **kwargs or {})

# --- An imagined GPU: the `meta` device, where a tensor has a size and no contents ---
class FakeGPU(CountOperations):
    """`meta` stands for the GPU, the CPU is the host. Every operation passes through here. A
    storage counts from the operation that makes it until nobody holds it any more, in blocks of 512
    bytes, as on a GPU. Weights are added by hand: with offloading, those of one half alone. Whole
    numbers from the host, and what follows from them alone, have contents: `transformers` looks at
    the mask of the prompts to decide whether it needs one of its own."""
    def __init__(self, *halves):
        super().__init__()
        self.alive = {}  # storages: a weak reference, bytes
        self.contents = {}  # storages: a tensor on the host
        self.sizes = {half: sum([w.nbytes for w in half.parameters()]) for half in halves}
        self.weights = {"on": 0, "off": sum(self.sizes.values())}  # on the GPU, by --offload
        self.peaks = {}
        self.now = 0  # bytes beside the weights
        self.kept = 0  # of them, what `sample` may leave: LoRA's copies in bf16

    def measure(self, **phases):
        """Calls a function for each phase -> the highest GiB, {phase: {"on", "off"}}."""
        resident = self.now
        gib = {}
        for name, function in phases.items():
            self.peaks = {"on": 0, "off": 0}
            function()
            gib[name] = {offload: peak / GIB for offload, peak in self.peaks.items()}
            assert self.now - resident < 2**20 + self.kept, f"{name} leaves something behind"
        return gib

    def see(self, tensor):
        """Counts its storage, if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            size = (storage.nbytes() + 511) // 512 * 512
            self.alive[key] = weakref.ref(storage, lambda _: self.forget(key)), size
            self.now += size
            for offload in self.peaks:
                self.peaks[offload] = max(self.peaks[offload], self.weights[offload] + self.now)

    def forget(self, key):
        self.now -= self.alive.pop(key)[1]
        self.contents.pop(key, None)

    def move_to_gpu(self, half):
        """In the place of that of TwoHalves: with offloading the GPU holds this half alone."""
        self.weights["on"] = self.sizes[half]

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
        result = torch.empty(value.shape, dtype=value.dtype, device=META)
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
        kernel, which wants it in the dtype of the query, its rows a multiple of 8 apart."""
        self.counts["attention"] += 1
        self.counts["masks"] += attn_mask is not None
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale)[0]
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
    tensor = torch.tensor

    def make_tensor(data, device=None, **kwargs):  # else it would have no contents
        return tensor(data, **kwargs).to(device=device)

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler  # it looks for a time in a list of them
    with (
        mock.patch.object(grpo, "DEVICE", META),
        mock.patch.object(torch, "tensor", make_tensor),
        mock.patch.object(F, "scaled_dot_product_attention", gpu.attend),
        mock.patch.object(F, "rms_norm", Normalize.apply),
        without_graph(),
        mock.patch.object(scheduler, "index_for_timestep", return_value=0),
        gpu,
    ):
        yield

def imagine_real(Wrapper, config):
    """-> a wrapper in GLM-Image's real sizes, and a FakeGPU for it."""
    with mock.patch.object(grpo, "DEVICE", META):
        wrapper = Wrapper(make_real(META), config)
    gpu = FakeGPU(wrapper.ar, wrapper.dit)
    wrapper.move_to_gpu = gpu.move_to_gpu
    return wrapper, gpu

def warm_up(trainer):
    """AdamW's memory exists from the first step on."""
    trainer.optimizer.param_groups[0]["foreach"] = True  # as by default on a GPU
    for weight in trainer.lora.weights.values():
        weight.grad = torch.zeros_like(weight)
    trainer.update_weights()

def skip_tokens(forward, T):
    """`forward` for a sampler of T tokens: only the prompts and the last three are computed."""
    shapes = []  # of the logits of each pass

    def forward_rarely(*args):
        skipped = 0 < len(shapes) % T < T - 3  # of each batch
        logits = torch.zeros(shapes[0], device=grpo.DEVICE) if skipped else forward(*args)
        shapes.append(logits.shape)
        return logits

    return forward_rarely

def count_step(gpu, wrapper, prompts, T):
    """Highest GiB alive on the GPU in the second step, of two micro-batches -> {phase: {"on",
    "off"}}, by --offload, and the counts of one more token and of a micro-batch of one prompt."""
    config = wrapper.config
    size = config.micro_batch_size
    rollout = grpo.Rollout(prompts[:1] * 2 * size, torch.zeros(2 * size, T).long(),
                           torch.zeros(2 * size, T), torch.ones(2 * size, T, V).bool())
    with imagine(gpu):
        sources = [getattr(prompt, "source", None) for prompt in prompts]
        with mock.patch.object(grpo, "check_prompts"):  # sources are imagined, too
            trainer = QuietTrainer(config, wrapper, prompts, {}, sources)
        warm_up(trainer)
        gpu.kept = sum([weight.numel() * 2 for weight in trainer.lora.weights.values()])
        compute_logprobs = wrapper.compute_logprobs
        wrapper.compute_logprobs, passes = gpu.note(compute_logprobs)
        peaks = gpu.measure(update=lambda: trainer.train_step(rollout, torch.zeros(2 * size)))
        wrapper.forward, tokens = gpu.note(skip_tokens(wrapper.forward, T))
        peaks |= gpu.measure(
            sample=lambda: wrapper.sample(prompts, config.group_size, range(len(prompts))),
            decode=lambda: wrapper.decode(prompts[:1], rollout.tokens[:size], [0]))
    # Of both micro-batches first the reference, then the policy with its gradient.
    update = (passes[2] - passes[0]) + (passes[6] - passes[4])
    return peaks, dict(sample=tokens[-2] - tokens[-4], update=update)

def count_memory(side, num_prompts, micro_batch_size=1, group_size=4,
                 Wrapper=grpo.GLMImageWrapper):
    """For GLM-Image -> as above, with the counts of a DiT pass. All but one prompt are padded."""
    prompts = ["red" + " red" * 39] + ["red"] * (num_prompts - 1)
    config = grpo.Config(width=side, height=side, batch_size=num_prompts, group_size=group_size,
                         micro_batch_size=micro_batch_size, decode_steps=2, offload="off")
    wrapper, gpu = imagine_real(Wrapper, config)
    dit = wrapper.pipe.transformer
    dit.forward, strokes = gpu.note(dit.forward)
    T = 256 + (side // 32) ** 2
    source = Image.new("RGB", (side, side))
    if Wrapper is edit.EditWrapper:
        T -= 256  # there is no draft
        prompts = [edit.Edit(prompt, "source.png") for prompt in prompts]
        codes = torch.zeros(side // 32, side // 32).long()
        wrapper.load_source = lambda path: (source.size, codes)
    with mock.patch.object(edit, "open_source", lambda path: source):
        peaks, counts = count_step(gpu, wrapper, prompts, T)
    return peaks, counts | dict(decode=strokes[1] - strokes[0])

def count_vision(side, alone):
    """Highest GiB while a picture is made into codes: by the tower alone, or, as for edit.py, while
    the policy is on the GPU, too."""
    pipe = make_real(META)
    model = pipe.vision_language_encoder.model
    tower = torch.nn.ModuleList([model.visual, model.vqmodel])
    gpu = FakeGPU(tower if alone else pipe.vision_language_encoder)
    pictures = [Image.new("RGB", (side, side))]
    with imagine(gpu):
        return gpu.measure(see=lambda: edit.encode_images(pipe, pictures))["see"]["off"]

class QuietSFT(QuietTrainer, sft.SFTTrainer):
    """Its `train_step` is that of SFTTrainer."""

def count_sft(side, size):
    """Highest GiB with --offload on in a step of sft.py, of two micro-batches."""
    config = grpo.Config(width=side, height=side, micro_batch_size=size, batch_size=2 * size,
                         offload="off")
    wrapper, gpu = imagine_real(grpo.GLMImageWrapper, config)
    captions = ["red" + " red" * 39] * 2 * size
    codes = torch.zeros(2 * size, 256 + (side // 32) ** 2).long()
    with imagine(gpu):
        trainer = QuietSFT(config, wrapper, captions, codes, None)
        warm_up(trainer)
        return gpu.measure(step=lambda: trainer.train_step(torch.arange(2 * size)))["step"]["on"]

JANUS = {  # billions of weights: what differs between the two Janus-Pro
    1: dict(num_hidden_layers=24, hidden_size=2048, intermediate_size=5632, num_attention_heads=16),
    7: dict(num_hidden_layers=30, hidden_size=4096, intermediate_size=11008,
            num_attention_heads=32)}

def count_janus(Wrapper, billions, micro_batch_size):
    """As count_step, for 8 x 4 images and prompts of 64 tokens, all but one of them padded."""
    width = JANUS[billions]["hidden_size"]
    config = transformers.JanusConfig(
        text_config=dict(JANUS[billions], vocab_size=102400),
        vq_config=dict(image_token_embed_dim=width, projection_dim=width))
    with META, transformers.modeling_utils.local_torch_dtype(torch.bfloat16):
        model = transformers.JanusForConditionalGeneration(config)
    model.generation_config.pad_token_id = 0
    settings = grpo.Config(**janus.Janus.defaults, micro_batch_size=micro_batch_size)
    with mock.patch.object(grpo, "DEVICE", META):
        wrapper = Wrapper(small_janus.make_processor(), model, settings)
    prompts = ["red" + " red" * 61] + ["red"] * 7
    prompts = prompts[:max(2, micro_batch_size // 2)]  # two are drawn apart; more take no more
    return count_step(FakeGPU(wrapper.on_gpu), wrapper, prompts, wrapper.T)

ROWS = [(512, 1, 4, 1), (512, 8, 4, 1), (512, 8, 4, 4), (1024, 8, 4, 1), (1024, 8, 4, 4),
        (1024, 8, 16, 1)]  # side, prompts, group, micro-batch
SIDES = [512, 1024]  # for edit.py and sft.py
PHASES = dict(sample="a token", decode="a DiT pass", update="a micro-batch of one prompt")

def measure_memory(args):
    """Tables of docs/figures.md: GiB with --offload on / off, and counts of the last row."""
    Wrapper = grpo.import_name(args.wrapper)
    if not issubclass(Wrapper, grpo.GLMImageWrapper):
        raise grpo.BadInput(f"--wrapper {args.wrapper}: only GLM-Image's memory is counted")
    _, gpu = imagine_real(Wrapper, grpo.Config(offload="off"))
    ar, dit = [size / GIB for size in gpu.sizes.values()]
    print(f"Weights: {ar:.1f} GiB to sample and update, {dit:.1f} to decode.\n")
    print_head("size | prompts x group | micro-batch | sample | decode | update")
    for side, num_prompts, group_size, size in ROWS[:args.rows]:
        peaks, counts = count_memory(side, num_prompts, size, group_size, Wrapper)
        cells = [f"{peaks[phase]['on']:.1f} / {peaks[phase]['off']:.1f}" for phase in PHASES]
        print_row(side, f"{num_prompts} x {group_size}", size, *cells)
    print()
    print_head("what | kernels | copies to the GPU | copies back | other waits | masks")
    for phase, name in PHASES.items():
        c = counts[phase]
        print_row(name, f"{c['kernels']:,}", c["copies in"], c["copies out"], c["waits"],
                  f"{c['masks']} in {c['attention']} attentions")

def measure_edit(args):
    """The table of docs/edit.md, with --offload on. A source is encoded when it is first seen."""
    print_head("size | encode a source | sample | decode | update")
    for side in SIDES:
        peaks, _ = count_memory(side, 8, Wrapper=edit.EditWrapper)
        print_row(side, count_vision(side, alone=False), *[peaks[phase]["on"] for phase in PHASES])

def measure_sft(args):
    """The table of docs/sft.md, with --offload on."""
    print_head("size | vision tower | micro-batch of 1 | micro-batch of 4")
    for side in SIDES:
        print_row(side, count_vision(side, alone=True), count_sft(side, 1), count_sft(side, 4))

def measure_janus(args):
    """The table of docs/janus.md: GiB for 8 prompts x 4 images, and kernels."""
    print_head("weights | micro-batch | sample | decode | update | kernels a token | an update")
    for billions, size in itertools.product(JANUS, (1, 4, 16, 32)):
        peaks, counts = count_janus(grpo.import_name(args.wrapper), billions, size)
        kernels = [f"{counts[phase]['kernels']:,}" for phase in ("sample", "update")]
        print_row(f"{billions} B", size, *[peaks[phase]["off"] for phase in PHASES], *kernels)

# --- A report, and the benchmark ----------------------------------------------
def clock(function, *args, **kwargs):
    """-> (seconds, what it returned); a GPU is waited for."""
    start = time.perf_counter()
    result = function(*args, **kwargs)
    if grpo.CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result

def measure_host():
    """-> GiB that are free on the host."""
    meminfo = Path("/proc/meminfo").read_text()
    free = int(re.search(r"MemAvailable: *(\d+)", meminfo)[1]) / 2**20
    container = Path("/sys/fs/cgroup/memory.max")  # it may allow less than the machine has
    limit = container.read_text().strip() if container.exists() else "max"
    return free if limit == "max" else min(free, int(limit) / GIB)

def load(config):
    if config.wrapper:
        raise grpo.BadInput("--wrapper: only GLM-Image is measured")
    if config.model != "random":
        return grpo.GLMImageWrapper.from_pretrained(config.model, config)
    gpu = torch.cuda.mem_get_info()[0] / GIB if grpo.CUDA else 0.0
    host = measure_host()
    if gpu < 21 or host < 35:  # a host without room would kill the process without a word
        raise grpo.BadInput("--model random needs 21 GiB of free memory on a GPU and 35 on the "
                            f"host, and there are {gpu:.1f} and {host:.1f}")
    pipe = make_real(grpo.DEVICE)
    torch.cuda.empty_cache()
    return grpo.GLMImageWrapper(pipe, config)

def measure_step(trainer, prompts, group_size, show=lambda *row: None):
    """One step -> {phase: (seconds, GiB in tensors, GiB reserved)}, its rollout, its metrics.
    `show` is told each phase at its end."""
    wrapper = trainer.wrapper
    seeds = range(len(prompts))
    phases = {}

    def measure(name, function, *args):
        if grpo.CUDA:
            torch.cuda.reset_peak_memory_stats()
        seconds, result = clock(function, *args)
        phases[name] = (seconds, torch.cuda.max_memory_allocated() / GIB,
                        torch.cuda.max_memory_reserved() / GIB)
        show(name, f"{seconds:.2f}", *(phases[name][1:] if grpo.CUDA else "--"))
        return result

    rollout = measure("sample", wrapper.sample, prompts, group_size, seeds)
    images = measure("decode", wrapper.decode, prompts, rollout.tokens, seeds)
    rewards, _ = measure("score", grpo.compute_rewards, images, rollout.prompts,
                         [None] * len(images), trainer.rewards)
    one = torch.zeros(1)  # a group of one has nothing to compare
    advantages = grpo.compute_advantages(rewards, group_size) if group_size > 1 else one
    metrics = measure("update", trainer.train_step, rollout, advantages)
    return phases, rollout, metrics

def print_settings(config):
    """What is measured: printed before a model is loaded, which takes half a minute."""
    device = f"CPU, {torch.get_num_threads()} thread(s)"
    if grpo.CUDA:
        gpu = torch.cuda.get_device_properties(grpo.DEVICE)
        device = f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB, CUDA {torch.version.cuda}"
    versions = [f"{module.__name__} {module.__version__}"
                for module in (torch, transformers, diffusers)]
    print(device, f"Python {platform.python_version()}", *versions, sep=", ")
    names = "model width height batch_size group_size micro_batch_size decode_steps guidance"
    print(*[f"{name} {getattr(config, name)}" for name in names.split()], sep=", ", flush=True)

def measure_report(args):
    """What somebody with a GPU can paste into an issue: seconds, GiB, kernels, rounding, NaN."""
    model = "random" if grpo.CUDA else grpo.TINY_MODEL
    config = grpo.parse_args(args.flags, model=model, micro_batch_size=1, decode_steps=5)
    print_settings(config)
    wrapper = load(config)
    print(f"offload {wrapper.offload}\n", flush=True)
    prompts = ["a red fox", "a blue door in a white wall, beside a yellow bicycle"]
    trainer = QuietTrainer(config, wrapper, prompts)
    report_kernels(config, trainer, prompts[0])
    print_head("phase | seconds | GiB in tensors | GiB reserved")
    _, _, metrics = measure_step(trainer, prompts[:1] * config.batch_size, config.group_size,
                                 show=print_row)
    policy = wrapper.policy
    print(f"\n{policy.dtype}, {len(policy.model.language_model.layers)} layers: sampler_gap "
          f"{metrics['sampler_gap']:.3g}, entropy {metrics['entropy']:.3g}, grad_norm "
          f"{metrics['grad_norm']:.3g}", flush=True)
    report_padding(trainer, prompts)

def report_kernels(config, trainer, prompt):
    """A small step, which also warms up, with few of its tokens."""
    wrapper = trainer.wrapper
    dit = wrapper.pipe.transformer
    ids, mask, _ = wrapper.encode([prompt])
    few = skip_tokens(wrapper.forward, mask.shape[1] - ids.shape[1])
    with without_graph(), CountOperations() as counter:
        forward, tokens = counter.note(few)
        with mock.patch.object(wrapper, "forward", forward):
            rollout = wrapper.sample([prompt], config.group_size, [0])
        forward, passes = counter.note(dit.forward)
        with mock.patch.object(dit, "forward", forward):
            wrapper.decode([prompt], rollout.tokens[:1].expand(2, -1), [0])
        part = rollout.part(slice(config.micro_batch_size))
        start = counter.counts.copy()
        trainer.train_step(part, torch.ones(len(part.prompts)))
    counts = tokens[-2] - tokens[-4], passes[1] - passes[0], counter.counts - start
    token, stroke, update = [f"{count['kernels']:,}" for count in counts]
    print(f"kernels: {token} a token, {stroke} a DiT pass, {update} an update of "
          f"{len(part.prompts)} image(s)\n", flush=True)

def report_padding(trainer, prompts):
    """A micro-batch of two prompts, where the padding of the shorter has no key to attend to."""
    rollout = trainer.wrapper.sample(prompts, 1, [0, 1])
    trainer.config.micro_batch_size = 2
    metrics = trainer.train_step(rollout, torch.tensor([1.0, -1.0]))
    finite = math.isfinite(sum(metrics.values()) + rollout.logprobs.sum())
    print(f"prompts of different length: {'all finite' if finite else 'NaN'}, "
          f"sampler_gap {metrics['sampler_gap']:.3g}, grad_norm {metrics['grad_norm']:.3g}")

def measure_stock(wrapper, rollout):
    """Seconds of an image the usual way: the pipeline samples and decodes it alone, then a pass of
    its own scores it."""
    config = wrapper.config
    one = rollout.part(slice(1))
    wrapper.move_to_gpu(wrapper.ar)
    wrapper.policy.eval()  # in training mode `generate` loses its cache, and looks too slow
    wrapper.policy.model.visual.to(grpo.DEVICE)  # `generate` asks the vision tower
    codes = wrapper.pipe.transformer.config.prior_vq_quantizer_codebook_size
    others = list(range(codes, wrapper.policy.lm_head.out_features))
    wrapper.policy.generation_config.suppress_tokens = others
    sampled, _ = clock(wrapper.pipe.generate_prior_tokens, one.prompts[0], config.height,
                       config.width, device=grpo.DEVICE)
    wrapper.policy.model.visual.to("cpu")  # or its 2 GiB would count as ours
    wrapper.ar.train()
    decoded, _ = clock(wrapper.decode, one.prompts, one.tokens, [0])
    scored, _ = clock(torch.no_grad()(wrapper.compute_logprobs), one)
    return sampled + decoded + scored

def measure_bench(args):
    """Seconds of a step on one prompt, and of a stock rollout, measured in turn."""
    size = "1" if grpo.CUDA else "8"
    config = grpo.parse_args(["--micro-batch-size", size, *args.flags])
    print_settings(config)
    print(f"one prompt, medians of {args.repeats}, in seconds\n", flush=True)
    prompts = ["a red fox"]
    trainer = QuietTrainer(config, load(config), prompts)
    print_head("group | stock rollout | sample | decode | update | stock / ours | peak GiB")
    for group_size in args.groups:
        phases, rollout, _ = measure_step(trainer, prompts, group_size)  # warm-up
        peak = max([gib for _, gib, _ in phases.values()])
        steps = []
        stocks = []
        for _ in range(args.repeats):
            steps.append(measure_step(trainer, prompts, group_size)[0])
            images = 1 if grpo.CUDA else group_size
            seconds = [measure_stock(trainer.wrapper, rollout) for _ in range(images)]
            stocks.append(statistics.mean(seconds) * group_size)
        sample, decode, update = [statistics.median([step[name][0] for step in steps])
                                  for name in PHASES]
        stock = statistics.median(stocks)
        cells = [f"{x:.3f}" for x in (stock, sample, decode, update)]
        print_row(group_size, *cells, f"{stock / (sample + decode):.1f}x",
                  peak if grpo.CUDA else "-")

# --- What each choice is worth ------------------------------------------------
def noise_of_its_own(decode, prompts, tokens, seeds):
    """Instead of one for the group: every image starts from other noise."""
    G = len(tokens) // len(prompts)
    own = [seed + i for seed in seeds for i in range(G)]
    return decode(np.repeat(prompts, G).tolist(), tokens, own)

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
            wrapper.decode = functools.partial(noise_of_its_own, wrapper.decode)
        compare = advantages_not_divided if "division" in name else grpo.compute_advantages
        with mock.patch.object(grpo, "compute_advantages", compare):
            trainer = QuietTrainer(config, wrapper, prompts)
            trainer.train()
        results[name].append(statistics.mean([row["reward"] for row in trainer.history[-5:]]))
        print(f"seed {seed}  {name:36s} {results[name][-1]:.3f}", file=sys.stderr, flush=True)
    print_head(" | ".join(["setting", *[f"seed {seed}" for seed in args.seeds], "mean", "std"]))
    for name, values in results.items():
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        print_row(name, *[f"{x:.3f}" for x in (*values, statistics.mean(values), spread)])

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(metavar="command")

    def add(name, function):
        summary = re.split(r"\.\s", function.__doc__)[0].replace("\n", " ")
        command = commands.add_parser(name, help=summary, description=function.__doc__,
                                      allow_abbrev=False)
        command.set_defaults(run=function)
        return command

    add("report", measure_report)
    bench = add("bench", measure_bench)
    bench.add_argument("--groups", type=int, nargs="+", default=[1, 4, 8, 16], help="group sizes")
    bench.add_argument("--repeats", type=int, default=3 if grpo.CUDA else 9)
    add("memory", measure_memory).add_argument("--rows", type=int, help="only the first of them")
    commands.choices["memory"].add_argument(
        "--wrapper", help="such as examples/four_bits.py:GLMImage4Bit")
    add("edit", measure_edit)
    add("sft", measure_sft)
    add("janus", measure_janus).add_argument("--wrapper", default=f"{janus.__file__}:Janus")
    ablate = add("ablate", measure_ablate)
    ablate.add_argument("seeds", type=int, nargs="*", default=[*range(5)])
    ablate.add_argument("--steps", type=int, default=20)

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
    except (grpo.BadInput, torch.OutOfMemoryError) as error:
        parser.exit(2, f"{parser.prog}: error: {' '.join(str(error).split())}\n")

if __name__ == "__main__":
    main()
