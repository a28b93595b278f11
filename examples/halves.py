"""The adapters of GLM-Image's two halves, the AR transformer and the DiT, which flow.py trains in
turn. This command writes both of a run, for others, with the lines that load them by `peft`:

    python -m examples.halves runs/dit --out pair

A run that flow.py has trained is complete: its folder has the adapters of the half that it trained
and, in `frozen`, a copy of the other half's.
"""
import argparse, json, os, shutil, sys, types, typing
from pathlib import Path

def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False)
    parser.add_argument("run", help="folder of a run of flow.py, or of an adapter in it")
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    if len(sys.argv) == 1:
        parser.print_help()
        parser.exit()
    return parser.parse_args()

if __name__ == "__main__":
    ARGS = parse_args()  # before the imports, which take seconds

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo
from examples.runs import PICTURE, fail, find_weights, load_weights, read_adapter_config

AR_LAYERS = grpo.GLMImageWrapper.lora_layers
DIT_LAYERS = r"transformer_blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)"

# --- What a folder knows of both halves -----------------------------------------
class Halves(typing.NamedTuple):
    model: str  # hub id or folder of GLM-Image
    adapters: dict  # {lora_layers of a half: folder of its adapter}; the last was trained last
    settings: dict  # of drawing, if a run has them

def read_json(path):
    return grpo.attempt(path, json.loads, path.read_bytes()) if path.is_file() else {}

def is_whole(adapter):
    return (adapter / "adapter_model.safetensors").is_file()  # it is written last

def find_newest(run):
    """-> the folder of its newest adapter, which must not be older than its checkpoint."""
    weights = find_weights(run)
    step, newest = max(weights.items(), default=(0, None))
    if not isinstance(newest, Path):
        raise grpo.BadInput(f"--model {run}: its last step, {step}, has no adapter; go on with it "
                            "by --resume, or type one of its adapters")
    return newest

def find_halves(path):
    """-> the Halves of a model, or of the folder of a run or of an adapter. An adapter names its
    model, which may be the other half's adapter, and so on."""
    folder = Path(path).absolute()
    run = folder.parent if (folder / "adapter_config.json").is_file() else folder
    saved = read_json(run / "config.json")
    if run == folder:
        if "model" not in saved:  # it is no run's
            return Halves(path, {}, {})
        folder = find_newest(run)
    wrapper = Path(saved.get("wrapper") or "flow.py").name
    if wrapper.partition(":")[0] not in ("flow.py", "halves.py"):
        raise grpo.BadInput(f"--model {path}: has an adapter of another wrapper, {wrapper}")
    layers = read_adapter_config(folder, "target_modules")
    if layers not in (AR_LAYERS, DIT_LAYERS):
        raise grpo.BadInput(f"--model {path}: must be a model, or a run or an adapter of grpo.py "
                            "for a half of GLM-Image")
    frozen = run / "frozen"
    if not is_whole(frozen) or frozen == folder:
        frozen = read_adapter_config(folder, "base_model_name_or_path")
    below = find_halves(frozen)
    below.adapters.pop(layers, None)
    settings = {name: saved[name] for name in PICTURE if name in saved}
    return Halves(below.model, below.adapters | {layers: folder}, settings or below.settings)

# --- What the wrappers of both halves do alike ----------------------------------
def choose_frozen(path, config, own):
    """-> the model, and the adapter of its other half or None. A new run goes on with the adapter
    of its `own` half, if there is one. A run that is resumed or drawn from has the other one."""
    frozen = Path(config.resume or "", "frozen")
    if config.resume and is_whole(frozen):
        # The run was trained over an adapter or, if --model is typed again, a model lies there now.
        is_model = not os.path.isabs(path) or Path(path, "model_index.json").is_file()
        base = path if is_model else read_adapter_config(frozen, "base_model_name_or_path")
        return base, frozen
    halves = find_halves(path)
    others = [f"--{name} {value}" for name, value in halves.settings.items()
              if value != getattr(config, name)]
    if others and grpo.RANK == 0:
        print(f"{path} had other settings: {', '.join(others)}", file=sys.stderr)
    if halves.adapters:
        config.model = str([*halves.adapters.values()][-1])  # a run may go on, and have others
    if own in halves.adapters and not config.adapter:
        config.adapter = str(halves.adapters[own])
        config.lora_rank = read_adapter_config(halves.adapters[own], "r")
    adapters = [folder for layers, folder in halves.adapters.items() if layers != own]
    return halves.model, adapters[0] if adapters else None

def keep_frozen(wrapper):
    """Gives a run that trains its copy of the other half's adapter. Both wrappers call this when
    they score a rollout, as only trainers do that with gradients; RUN is the trainer's folder."""
    folder = Path(os.environ.get("RUN", ""), "frozen")
    if wrapper.frozen and torch.is_grad_enabled() and grpo.RANK == 0 and not is_whole(folder):
        wrapper.frozen.save(folder, wrapper.model)

class AR(grpo.GLMImageWrapper):
    """A wrapper of the AR half, whose tokens are painted by a DiT with an adapter. It is not merged
    into the weights, as in bf16 small differences would be lost."""
    frozen = None  # the LoRA of the DiT

    @classmethod
    def from_pretrained(cls, path, config):
        model, adapter = choose_frozen(path, config, AR_LAYERS)
        wrapper = super().from_pretrained(model, config)
        dit = types.SimpleNamespace(policy=wrapper.pipe.transformer, lora_layers=DIT_LAYERS)
        wrapper.frozen = adapter and load_weights(dit, adapter)
        wrapper.model = model
        return wrapper

    def compute_logprobs(self, rollout):
        keep_frozen(self)
        return super().compute_logprobs(rollout)

# --- The command ----------------------------------------------------------------
DRAW = """# Draws with both adapters of this folder. pip install diffusers transformers peft
from pathlib import Path

import diffusers, peft, torch

here = Path(__file__).parent
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
pipe = diffusers.GlmImagePipeline.from_pretrained({model!r}, dtype=dtype).to(device)
pipe.vision_language_encoder.load_adapter(str(here / "ar"))
pipe.vision_language_encoder.generation_config.update(**{sampling})
peft.PeftModel.from_pretrained(pipe.transformer, here / "dit")  # in place
settings = {painting}
pipe("A red fox", **settings).images[0].save("fox.png")
"""

def publish(path, out):
    """Writes ar, dit and draw.py, in which the settings of the run stand."""
    if not Path(path).is_dir():
        raise grpo.BadInput(f"{path}: there is no such folder")
    model, adapters, settings = find_halves(path)
    if len(adapters) < 2:
        raise grpo.BadInput(f"{path}: has an adapter of one half only; flow.py trains the other")
    grpo.attempt(f"--out {out}", out.mkdir, parents=True)
    for name, layers in (("ar", AR_LAYERS), ("dit", DIT_LAYERS)):
        grpo.attempt(f"--out {out}", shutil.copytree, adapters[layers], out / name)
        file = out / name / "adapter_config.json"
        file.write_text(json.dumps(read_json(file) | dict(base_model_name_or_path=model)))
    names = dict(height="height", width="width", decode_steps="num_inference_steps",
                 guidance="guidance_scale")
    painting = {theirs: settings[ours] for ours, theirs in names.items() if ours in settings}
    sampling = {name: settings[name] for name in ("temperature", "top_k", "top_p")
                if settings.get(name) is not None}
    text = DRAW.format(model=model, sampling=sampling, painting=painting)
    (out / "draw.py").write_text(text)
    print(f"{text}\nWrote this to {out / 'draw.py'}, and the adapters beside it.")

def main(args):
    try:
        publish(args.run, args.out)
    except grpo.BadInput as error:
        fail(error)

if __name__ == "__main__":
    main(ARGS)
