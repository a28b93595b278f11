"""Measurements of grpo.py. Nothing here is a test; test_grpo.py uses the memory that is counted here.

    python .ci/measure.py bench [flags of grpo.py]    seconds of the stock recipe and of ours, one table
    python .ci/measure.py bench --model random ..     the same, at GLM-Image's real sizes with random weights
    python .ci/measure.py memory [rows]               GiB and kernels of a GPU, counted without one; a minute
    python .ci/measure.py edit                        GiB of examples/edit.py, counted in the same way
    python .ci/measure.py ablate [seeds]              what each choice is worth, on the small GLM-Image
    python .ci/measure.py depth                       how far bf16 rounds at depth; minutes of a core
"""
import contextlib, dataclasses, functools, io, math, statistics, sys, tempfile, time, weakref
from pathlib import Path
from unittest import mock

import diffusers, torch, transformers
import numpy as np
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo
from examples.edit import EditWrapper
from examples.make_tiny import fit_vision, make_models
from PIL import Image

SMALL = Path(grpo.__file__).with_name("examples") / "tiny-glm-image"

class QuietTrainer(grpo.GRPOTrainer):
    """It writes no files, and prints nothing."""
    def __init__(self, config, *args):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            super().__init__(dataclasses.replace(config, out=f"{folder}/run"), *args)

    def save_samples(self, step):
        pass

    def save_checkpoint(self):
        pass

    def log(self, step, metrics):
        self.history.append(metrics)

# --- GLM-Image in its real sizes ------------------------------------------------------------------------
def make_real(device):
    """GLM-Image in its real sizes, random bf16 weights, made on `device`, left on the CPU; the small one's words.
    VAE and text encoder are taken to be CogView4's and about ByT5 small's."""
    V = 16384
    home = "meta" if device == "meta" else "cpu"
    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5, mrope_section=(8, 12, 12))
    config = transformers.GlmImageConfig(
        text_config=dict(eos_token_id=V + 1, pad_token_id=V + 2, rope_parameters=rope),
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
    ar.generation_config.update(do_sample=True, temperature=0.9, top_p=0.75)
    small = make_models(grpo.COLORS)
    fit_vision(small, torch.zeros(8, 3, 32, 32))  # for its processor
    return diffusers.GlmImagePipeline(small.tokenizer, small.processor, t5, ar, vae, dit, small.scheduler)

def tensors_of(*modules):
    """Parameters and buffers."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

# --- The memory of a GPU, counted on the `meta` device, where a tensor has a size and no contents ---------
def describe(value):
    """What the shape of an operation's result depends on."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple([describe(part) for part in value])
    return type(value), value

NO_KERNEL = {torch.ops.aten._unsafe_view, torch.ops.aten.empty, torch.ops.aten.empty_like,
             torch.ops.aten.empty_strided, torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided,
             torch.ops.aten._local_scalar_dense}

def computes(function, args):
    """Does this operation start a kernel?"""
    if function.is_view or function.overloadpacket in NO_KERNEL:
        return False
    return any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tree_leaves(args))

class FakeGPU(TorchDispatchMode):
    """`meta` stands for the GPU, the CPU is the host. Every operation passes through here. A storage counts
    from the operation that makes it until nobody holds it any more, in blocks of 512 bytes, as on a GPU.
    Weights are added by hand: with offloading, those of the half that is held alone."""
    def __init__(self, *halves):
        super().__init__()
        self.alive = {}  # storages: a weak reference, bytes
        self.results = {}  # of operations seen before; to ask PyTorch again would take most of the time
        self.sizes = {half: sum(weight.nbytes for weight in half.parameters()) for half in halves}
        self.weights = {"on": 0, "off": sum(self.sizes.values())}  # bytes on the GPU, by --offload
        self.peaks = {"on": 0, "off": 0}
        self.now = 0  # bytes beside the weights
        self.kernels = 0  # operations on the GPU so far, without those that compute nothing
        for weight in tensors_of(*halves):
            self.see(weight)
        self.now = 0

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
        self.grow(size)
        return storage.nbytes() == tensor.nbytes

    def forget(self, key):
        self.now -= self.alive.pop(key)[1]

    def move_to_gpu(self, half):
        """In the place of the wrapper's: with offloading the GPU then holds this half alone."""
        self.weights["on"] = self.sizes[half]

    def without_contents(self, function, args, kwargs):
        """What cannot be had from a tensor without contents, made up; None where it can."""
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1  # `.item()`: any number will do
        if function is torch.ops.aten._to_copy.default and kwargs.get("device") == torch.device("cpu"):
            return torch.zeros((), dtype=kwargs.get("dtype") or args[0].dtype).expand(args[0].shape)
        if function is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool:
            return args[0].flatten(0, args[1][0].dim() - 1)  # the glyphs that are no padding: all of them

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.kernels += computes(function, (args, kwargs))
        if function.is_view or function._schema.is_mutable:
            return function(*args, **kwargs)  # nothing new
        on_gpu = len(args) > 0 and isinstance(args[0], torch.Tensor) and args[0].is_meta
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
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                if self.see(tensor) and tensor is result:
                    self.results[key] = tensor.shape, tensor.stride(), tensor.dtype
        return result

def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """What `F.scaled_dot_product_attention` allocates on a GPU: with a mask the memory-efficient kernel,
    which wants it in the dtype of the query, its rows a multiple of 8 apart; without one as flash."""
    assert not enable_gqa
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        K = attn_mask.shape[-1]
        if any(stride % 8 for stride in attn_mask.stride()[:-1]):
            attn_mask = F.pad(attn_mask, (0, 8 - K % 8))[..., :K]
        attn_mask = attn_mask.expand(*query.shape[:3], K)
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale)[0]

class Normalize(torch.autograd.Function):
    """In the place of `F.rms_norm`: on a GPU it is one kernel each way, while on other devices PyTorch composes it.
    A product has the same shapes and stands for each. Kept are the input, the weight and a number a row."""
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[1], None

def normalize(x, normalized_shape, weight, eps):
    return Normalize.apply(x, weight)

def skip_tokens(forward, T):
    """`forward` for a sampler of T tokens: only the prompts and the last two, beside what is kept of all."""
    fed = []

    def forward_rarely(ids, *args, **kwargs):
        assert any(isinstance(value, transformers.StaticCache) for value in (*args, *kwargs.values()))
        if ids.shape[1] == 1:
            fed.append(True)
        if 0 < len(fed) < T - 2:
            return torch.empty(len(ids), 1, 16384, device="meta")
        return forward(ids, *args, **kwargs)

    return forward_rarely

def count_memory(side, num_prompts, micro_batch_size=1, group_size=4, Wrapper=grpo.GLMImageWrapper):
    """Highest GiB alive on the GPU in the second step, of two micro-batches -> {phase: {"on", "off"}}, by
    --offload, and {phase: kernels of one more token, DiT pass, micro-batch}. Real numbers are wanted by the
    prompts, read on the host, and by the scheduler."""
    draft = 0 if Wrapper is EditWrapper else 256
    T = draft + (side // 32) ** 2
    n = 2 * micro_batch_size
    config = grpo.Config(width=side, height=side, batch_size=num_prompts, group_size=group_size,
                         micro_batch_size=micro_batch_size, decode_steps=2, offload="off")
    prompt = "red " * 40 if draft else "red " * 40 + "\tsource.png"
    rollout = grpo.Rollout([prompt] * n, [None] * n, tokens=torch.zeros(n, T).long(),
                           logprobs=torch.zeros(n, T), nuclei=torch.ones(n, T, 16384).bool())
    peaks = {}
    kernels = {}
    marks = {"forward": [], "dit": [], "compute_logprobs": []}  # kernels so far, at each call
    with mock.patch.object(grpo, "DEVICE", torch.device("meta")):
        pipe = make_real("meta")
        wrapper = Wrapper(pipe, config)
    wrapper.load_source = lambda path: (Image.new("RGB", (side, side)), torch.zeros(side // 32, side // 32).long())
    encode = wrapper.encode

    def marked(name, function):
        def call(*args, **kwargs):
            marks[name].append(gpu.kernels)
            return function(*args, **kwargs)

        return call

    def encode_on_host(prompts):
        with mock.patch.object(grpo, "DEVICE", torch.device("cpu")):
            tensors = encode(prompts)
        return [torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                for tensor in tensors]

    def update():
        logprobs = marked("compute_logprobs", wrapper.compute_logprobs)
        with mock.patch.object(wrapper, "compute_logprobs", logprobs):
            trainer.train_step(rollout, torch.zeros(n))
        first, _, second, _ = marks["compute_logprobs"]  # of each the reference, then the policy
        return second - first

    def sample():
        with mock.patch.object(wrapper, "forward", marked("forward", skip_tokens(wrapper.forward, T))):
            _, _, nuclei = wrapper.sample([prompt] * num_prompts, group_size, range(num_prompts))
            assert nuclei.device.type == "cpu"  # of all tokens they are large
            return marks["forward"][-1] - marks["forward"][-2]

    def decode():
        with mock.patch.object(pipe.transformer, "forward", marked("dit", pipe.transformer.forward)):
            wrapper.decode([prompt], rollout.tokens[:micro_batch_size], [0])
        return marks["dit"][1] - marks["dit"][0]

    gpu = FakeGPU(wrapper.ar, wrapper.dit)
    with (
        mock.patch.object(grpo, "DEVICE", torch.device("meta")),
        mock.patch.object(wrapper, "encode", encode_on_host),
        mock.patch.object(wrapper, "move_to_gpu", gpu.move_to_gpu),
        mock.patch.object(F, "scaled_dot_product_attention", attend),
        mock.patch.object(F, "rms_norm", normalize),
        mock.patch.object(type(pipe.scheduler), "index_for_timestep", return_value=0),
        gpu,
    ):
        trainer = QuietTrainer(config, wrapper, [prompt], {})
        trainer.optimizer.param_groups[0]["foreach"] = True  # as by default on a GPU
        for weight in trainer.lora.weights.values():
            weight.grad = torch.zeros_like(weight)
        trainer.optimizer.step()  # AdamW's memory exists from the first step on
        trainer.optimizer.zero_grad()
        resident = gpu.now
        for phase in (update, sample, decode):
            gpu.peaks = {"on": 0, "off": 0}
            kernels[phase.__name__] = phase()
            peaks[phase.__name__] = {offload: peak / 2**30 for offload, peak in gpu.peaks.items()}
            left = gpu.now - resident
            assert left < 2**20, f"{phase.__name__} leaves {left} bytes behind"
    return peaks, kernels

def count_vision(side):
    """Highest GiB alive while the policy's half is on the GPU and a source is made into codes. Like `encode_images`,
    part by part, as the sizes of the pictures are read from a tensor, which has no contents here."""
    pipe = make_real("meta")
    ar = pipe.vision_language_encoder  # with its vision tower and codebook
    grid = side // 32
    N = grid ** 2
    with mock.patch.object(F, "scaled_dot_product_attention", attend), torch.no_grad(), FakeGPU(ar) as gpu:
        gpu.peaks["off"] = 0  # without what it saw of the weights
        model = ar.model
        features = model.visual.patch_embed(torch.empty(N, 3 * 16 * 16, device="meta"))
        places = torch.empty(N, device="meta")
        features = model.visual.embeddings(features, [N], torch.ones(1, 3, device="meta"), places, places)
        for block in model.visual.blocks:
            features = block(features, cu_seqlens=torch.tensor([0, N]))
        model.vqmodel.encode(features.T.reshape(1, -1, grid, grid))
    return gpu.peaks["off"] / 2**30

# --- The benchmark --------------------------------------------------------------------------------------
def clock(function, *args):
    """-> (seconds, what it returned); a GPU is waited for."""
    start = time.perf_counter()
    result = function(*args)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start, result

def stock_seconds(wrapper, rollout):
    """An image the usual way: the pipeline samples and decodes it alone, then a pass of its own scores it."""
    config = wrapper.config
    one = rollout.part(slice(1))
    wrapper.move_to_gpu(wrapper.ar)
    wrapper.policy.eval()  # in training mode `generate` would lose its cache, and look slower than it is
    prompt, = one.prompts
    wrapper.policy.model.visual.to(grpo.DEVICE)  # `generate` asks the vision tower
    codes = wrapper.pipe.transformer.config.prior_vq_quantizer_codebook_size
    wrapper.policy.generation_config.suppress_tokens = list(range(codes, wrapper.policy.lm_head.out_features))
    sampled, _ = clock(functools.partial(
        wrapper.pipe.generate_prior_tokens, prompt, config.height, config.width, device=grpo.DEVICE))
    wrapper.policy.model.visual.to("cpu")  # or its 2 GiB would count as ours
    decoded, _ = clock(wrapper.decode, [prompt], one.tokens, [0])
    with torch.no_grad():
        scored, _ = clock(wrapper.compute_logprobs, one)
    return sampled + decoded + scored

def our_seconds(trainer, prompt, group_size):
    """One step on one prompt -> seconds of sample, decode, score and update, and its rollout."""
    prompts = [prompt] * group_size
    sample, (tokens, logprobs, nuclei) = clock(trainer.wrapper.sample, [prompt], group_size, [0])
    decode, images = clock(trainer.wrapper.decode, [prompt], tokens, [0])
    score, (rewards, _) = clock(grpo.compute_rewards, images, prompts, [None] * group_size, trainer.rewards)
    advantages = grpo.compute_advantages(rewards, group_size) if group_size > 1 else torch.zeros(1)
    rollout = grpo.Rollout(prompts, images, tokens, logprobs, nuclei)
    update, _ = clock(trainer.train_step, rollout, advantages)
    return (sample, decode, score, update), rollout

def gib(*modules):
    return sum(weight.nbytes for module in modules for weight in module.parameters()) / 2**30

def bench(argv):
    """One table. Every ratio is of two medians measured in turn in this run."""
    prompt = "a red fox"
    config = grpo.parse_args(["--micro-batch-size", "1" if grpo.CUDA else "8", *argv])
    if config.model == "random" and not grpo.CUDA:
        print("measure.py: --model random is 23 GB of weights: it needs a GPU", file=sys.stderr)
        sys.exit(2)
    if config.model == "random":
        wrapper = grpo.GLMImageWrapper(make_real(grpo.DEVICE), config)
    else:
        wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    trainer = QuietTrainer(config, wrapper, [prompt], grpo.load_rewards(config.reward))
    repeats = 3 if grpo.CUDA else 9
    where = torch.cuda.get_device_name() if grpo.CUDA else f"{torch.get_num_threads()} CPU thread(s)"
    print(f"{config.model}, {config.width} x {config.height}, {config.decode_steps} decode steps, "
          f"{config.micro_batch_size} images at a time, offload {config.offload}, {where}, one prompt, "
          f"medians of {repeats}, seconds\n")
    columns = "group, stock rollout, ours, ratio, sample, decode, update, step, tokens/s, peak GiB"
    columns = columns.split(", ")
    print("|", " | ".join(columns), "|")
    print("|---" * len(columns) + "|")
    for group_size in (1, 4, 8, 16):
        if grpo.CUDA:
            torch.cuda.reset_peak_memory_stats()
        _, rollout = our_seconds(trainer, prompt, group_size)  # warm-up
        peak = torch.cuda.max_memory_allocated() / 2**30  # of ours, before the stock recipe comes
        phases = []
        stocks = []
        for _ in range(repeats):
            phases.append(our_seconds(trainer, prompt, group_size)[0])
            images = 1 if grpo.CUDA else group_size
            seconds = [stock_seconds(wrapper, rollout) for _ in range(images)]
            stocks.append(statistics.mean(seconds) * group_size)
        sample, decode, score, update = (statistics.median(column) for column in zip(*phases))
        stock = statistics.median(stocks)
        ours = sample + decode
        step = ours + score + update
        print(f"| {group_size} | {stock:.3f} | {ours:.3f} | {stock / ours:.1f}x | {sample:.3f} "
              f"| {decode:.3f} | {update:.3f} | {step:.3f} | {rollout.tokens.numel() / sample:.0f} "
              f"| {peak:.1f} |", flush=True)

RUNS = [(512, 1, 4, 1), (512, 8, 4, 1), (512, 8, 4, 4), (1024, 8, 4, 1), (1024, 8, 4, 4), (1024, 8, 16, 1)]

def memory(rows):
    """Two tables. What does not depend on the number of prompts is counted anew in every row."""
    counted = {}
    pipe = make_real("meta")
    ar = pipe.vision_language_encoder
    halves = [[ar.model.language_model, ar.lm_head], [pipe.text_encoder, pipe.transformer, pipe.vae]]
    print(f"GiB of weights in bf16: {gib(*halves[0]):.1f} to sample and update, "
          f"{gib(*halves[1]):.1f} to decode, {gib(ar, *halves[1]):.1f} in all; --offload on / off:\n")
    print("| size | prompts x group | micro-batch | sample | decode | update |")
    print("|---|---|---|---|---|---|", flush=True)
    for side, num_prompts, group_size, size in [RUNS[row] for row in rows]:
        peaks, kernels = count_memory(side, num_prompts, size, group_size)
        pairs = [peaks[phase] for phase in ("sample", "decode", "update")]
        cells = [f"{pair['on']:.1f} / {pair['off']:.1f}" for pair in pairs]
        print(f"| {side} | {num_prompts} x {group_size} | {size} |", " | ".join(cells), "|", flush=True)
        counted[side, num_prompts, group_size, size] = kernels
    if RUNS[1] not in counted:
        return
    kernels = counted[RUNS[1]]
    print("\nKernels at 512, 8 x 4, one image at a time:\n\n| kernels per token | per DiT pass | per micro-batch |\n"
          f"|---|---|---|\n| {kernels['sample']:,} | {kernels['decode']:,} | {kernels['update']:,} |")

def memory_of_edits(sides=(512, 1024)):
    """A table, with --offload on. The vision tower comes when a source is seen for the first time."""
    print("| size | codes of a source | sample | decode | update |\n|---|---|---|---|---|")
    for side in sides:
        peaks, _ = count_memory(side, 8, Wrapper=EditWrapper)
        cells = [count_vision(side), *(peaks[phase]["on"] for phase in ("sample", "decode", "update"))]
        print(f"| {side} |", " | ".join(f"{cell:.1f}" for cell in cells), "|", flush=True)

# --- What each choice is worth --------------------------------------------------------------------------
def noise_of_its_own(decode):
    """Instead of one for the group: every image starts from other noise."""
    def other(prompts, tokens, seeds):
        G = len(tokens) // len(prompts)
        return decode(np.repeat(prompts, G).tolist(), tokens, [seed + i for seed in seeds for i in range(G)])

    return other

def advantages_not_divided(rewards, group_size):
    """As in Dr. GRPO: in the place of grpo.compute_advantages."""
    groups = rewards.view(-1, group_size)
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

def ablate(seeds):
    """One table: mean reward of the last five of 20 steps, per seed, and mean and std over the seeds."""
    results = {name: [] for name in ABLATIONS}
    for seed in seeds:
        for name, settings in ABLATIONS.items():
            config = dataclasses.replace(grpo.parse_args(["--model", str(SMALL)]), **settings, seed=seed)
            wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
            if name.startswith("separate"):
                wrapper.decode = noise_of_its_own(wrapper.decode)
            prompts, _ = grpo.load_prompts(config.prompts)
            compare = advantages_not_divided if "division" in name else grpo.compute_advantages
            with mock.patch.object(grpo, "compute_advantages", compare):
                trainer = QuietTrainer(config, wrapper, prompts, grpo.load_rewards(config.reward))
                trainer.train()
            results[name].append(statistics.mean(row["reward"] for row in trainer.history[-5:]))
            print(f"seed {seed}  {name:36s} {results[name][-1]:.3f}", file=sys.stderr, flush=True)
    print("| | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | std |")
    print("|---" * (len(seeds) + 3) + "|")
    for name, values in results.items():
        spread = statistics.stdev(values) if len(values) > 1 else math.nan
        cells = [f"{value:.3f}" for value in (*values, statistics.mean(values), spread)]
        print("| " + " | ".join([name, *cells]) + " |")

# --- How far bf16 rounds at depth, on a CPU -------------------------------------------------------------
DEPTHS = [(10, 0.04, 16), (20, 0.04, 16), (40, 0.04, 16), (40, 0.08, 16),  # layers, init, bits
          (40, 0.04, 32)]

@torch.no_grad()
def depth(linear=F.linear):
    """A table: GLM-Image's AR half, random, a quarter as wide; max |log-prob differences| of the sampler to
    the trainer (gap), of two trainer passes (again), to one without padding, and to one whose sums are in
    reverse order; of the last also the 99th percentile, the mean, the share of ratios off by 0.2 (out)."""
    prompts = ["green"] * 4 + ["a red fox on a wall beside a yellow door"] * 4
    print("|layers|init|bits|nats|gap|again|unpadded|reversed|99 %|mean|out|\n" + "|-" * 11 + "|")
    for layers, init, bits in DEPTHS:
        pipe = make_models(grpo.COLORS)
        pipe.processor._get_target_shape = lambda height, width: (8, 8, 4, 4)  # a small draft
        pipe.transformer.register_to_config(prior_vq_quantizer_codebook_size=16384)
        config = pipe.vision_language_encoder.config
        config.text_config = transformers.GlmImageTextConfig(  # all else has its real size
            num_hidden_layers=layers, hidden_size=1024, num_attention_heads=8, intermediate_size=3424,
            initializer_range=init, rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5))
        dtype = torch.bfloat16 if bits == 16 else torch.float32
        pipe.vision_language_encoder = transformers.GlmImageForConditionalGeneration(config).to(dtype)
        heat = 0.9 * init * 32 / 3.5  # what 0.9 is to logits of std 3.5: some codes stand out
        settings = dict(width=256, height=256, top_p=0.75, temperature=heat, offload="off")
        wrapper = grpo.GLMImageWrapper(pipe, grpo.Config(**settings))
        tokens, sampled, nuclei = wrapper.sample(prompts[::4], 4, [0, 1])
        rollout = grpo.Rollout(prompts, prompts, tokens, sampled, nuclei)  # no images are asked for
        first, again = (wrapper.compute_logprobs(rollout)[0] for _ in range(2))
        alone, _ = wrapper.compute_logprobs(rollout.part(slice(4)))  # no padding
        with mock.patch.object(F, "linear", lambda x, w, b: linear(x.flip(-1), w.flip(-1), b)):
            gap = wrapper.compute_logprobs(rollout)[0] - sampled
        ratios = [sampled - first, again - first, alone - first[:4], gap]  # their logarithms
        cells = [-sampled.mean(), *(x.abs().max() for x in ratios), gap.abs().quantile(0.99),
                 gap.abs().mean(), (gap.expm1().abs() > 0.2).float().mean()]
        print(f"|{layers}|{init}|{bits}|", *(f"{cell:.2g}|" for cell in cells), flush=True)

if __name__ == "__main__":
    diffusers.utils.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    name, *rest = sys.argv[1:] or ["--help"]
    if name == "bench":
        bench(rest)
    elif name == "memory":
        memory([int(row) for row in rest] or range(len(RUNS)))
    elif name == "edit" and not rest:
        memory_of_edits()
    elif name == "ablate":
        ablate([int(seed) for seed in rest] or range(5))
    elif name == "depth" and not rest:
        depth()
    else:
        sys.exit(__doc__)
