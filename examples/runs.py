"""What opens a run. A program knows a run by its folder, which has its settings, prompts and
adapters; those that draw from it or measure it take all of that from here."""
import json, re, typing
from pathlib import Path

import diffusers, torch, transformers
from tqdm import tqdm

import grpo

class Run(typing.NamedTuple):
    path: str  # as it was typed
    folder: Path | None  # None for a model, and for an adapter that lies in no run
    config: grpo.Config  # config.prompts is the file with the run's own prompts
    Wrapper: type
    adapters: dict  # {step: folder}; the step is None if the folder of an adapter was typed

def open_run(path=None, **typed):
    """The folder of a run, that of an adapter, or None for a model without any -> Run. Settings
    that are typed, and not None, override those of the run."""
    flags = [f"--{name}={value}" for name, value in typed.items() if value is not None]
    folder = Path(path).absolute() if path else None
    adapters = {}
    if folder and (folder / "adapter_config.json").exists():
        adapters = {None: folder}
        folder = folder.parent if (folder.parent / "config.json").exists() else None
        if not folder:
            flags += name_model(adapters[None], **typed)
    elif folder:
        adapters = find_adapters(folder)
    if folder:
        flags.append(f"--resume={folder}")
    config = grpo.parse_args(flags)
    Wrapper = grpo.import_name(config.wrapper) if config.wrapper else grpo.GLMImageWrapper
    return Run(path, folder, config, Wrapper, adapters)

def find_adapters(folder):
    """-> {step: folder} of a run's adapters, without copies of them and those still being written."""
    adapters = {}
    for path in sorted(folder.glob("adapter_*/adapter_model.safetensors")):  # it is written last
        match = re.fullmatch(r"adapter_(\d{5,})", path.parent.name)
        if match:
            adapters[int(match[1])] = path.parent
    return dict(sorted(adapters.items()))

def read_adapter_config(adapter):
    return json.loads((adapter / "adapter_config.json").read_bytes())

def name_model(adapter, model=None, wrapper=None, **_):
    """-> flags for an adapter that lies in no run: it knows its model, but no wrapper."""
    saved = read_adapter_config(adapter)
    base = saved["base_model_name_or_path"]
    told = f"{adapter}: is of another model than GLM-Image; type --wrapper"
    if wrapper is None and saved["target_modules"] != grpo.GLMImageWrapper.lora_layers:
        raise grpo.BadInput(f"{told}; that of a DiT is examples/flow.py:DiT")
    if wrapper is None and Path(base, "adapter_config.json").exists():
        raise grpo.BadInput(f"{told} examples/flow.py:AR, as it was trained over {base}")
    return [] if model else [f"--model={base}"]

def load_model(Wrapper, config):
    """-> a wrapper, with the threads that grpo.py takes."""
    if config.model == grpo.TINY_MODEL:
        torch.set_num_threads(1)
    return Wrapper.from_pretrained(config.model, config)

class Stock:
    """What production draws with, in the place of a wrapper: the stock pipeline, and peft. Each
    picture has random numbers of its own, as there."""
    def __init__(self, pipe, config):
        self.pipe = pipe
        self.config = config
        self.policy = pipe.vision_language_encoder
        self.tuned = None
        own = {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        own = {name: value for name, value in own.items() if value is not None}
        self.policy.generation_config.update(**own)

    @classmethod
    def from_pretrained(cls, path, config):
        if str(config.wrapper).endswith(":EditWrapper"):
            raise grpo.BadInput("--stock: docs/pictures.md says how production edits")
        transformers.logging.set_verbosity_error()  # the pipeline warns of itself at each prompt
        pipe = grpo.attempt(f"--stock --model {path}", diffusers.GlmImagePipeline.from_pretrained,
                            path, dtype=torch.bfloat16 if grpo.CUDA else torch.float32)
        pipe.set_progress_bar_config(disable=True)
        if grpo.CUDA and torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
            grpo.attempt("--stock", pipe.enable_model_cpu_offload)
        else:
            pipe.to(grpo.DEVICE)
        return cls(pipe, config)

    def load(self, adapter):
        try:
            import peft
        except ModuleNotFoundError:
            raise grpo.BadInput("--stock: first run pip install peft") from None
        if self.tuned:
            self.tuned.unload()
        self.tuned = grpo.attempt(adapter, peft.PeftModel.from_pretrained, self.policy, adapter)

    def sample(self, prompts, group_size, seeds):
        codes = [self.pipe.generate_prior_tokens(
            [str(prompt)] * group_size, self.config.height, self.config.width, device=grpo.DEVICE,
            generator=torch.Generator().manual_seed(seed))[0]
            for prompt, seed in zip(prompts, seeds)]
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        return grpo.Rollout(prompts, torch.cat(codes), None, None)

    def decode(self, prompts, codes, seeds):
        images = []
        for i, row in enumerate(codes.split(1)):
            place = i * len(prompts) // len(codes)
            images += self.pipe(
                str(prompts[place]), prior_token_ids=row, height=self.config.height,
                generator=torch.Generator().manual_seed(~(1000 * seeds[place] + i)),
                width=self.config.width, guidance_scale=self.config.guidance,
                num_inference_steps=self.config.decode_steps).images
        return images

def load_adapter(wrapper, adapter):
    """Gives the policy its weights."""
    if isinstance(wrapper, Stock):
        return wrapper.load(adapter)
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, read_adapter_config(adapter)["r"])
    grpo.attempt(adapter, lambda: lora.load(lora.read(adapter)))

LIMIT = 32  # samples drawn at a time: more would take much memory, fewer are hardly faster

def draw(wrapper, prompts, samples, seeds):
    """Yields the pictures of each prompt, some `samples`. The two halves of GLM-Image take turns
    once in 32 pictures."""
    size = max(1, LIMIT // samples)  # prompts at a time
    with tqdm(total=len(prompts) * samples, unit="picture", disable=None) as bar:
        for start in range(0, len(prompts), size):
            part = slice(start, start + size)
            rollout = wrapper.sample(prompts[part], samples, seeds[part])
            for i, (prompt, seed) in enumerate(zip(prompts[part], seeds[part])):
                group = rollout.part(slice(i * samples, (i + 1) * samples))
                yield wrapper.decode([prompt], group.tokens, [seed])
                bar.update(samples)
