"""Tests of examples/check.py: what is right is ok, and each wrong wrapper is seen by the check that should see it."""
import inspect, random, re, types
from pathlib import Path
from unittest import mock

import pytest, torch

import grpo
from conftest import ROOT
from examples import check
from examples.make import small_janus, squares, tiny

GLM = grpo.GLMImageWrapper
build = grpo.build_position_ids

def during(owner, name, value):
    """A trainer in which an attribute, of the config if the owner is None, has another value than in the sampler."""
    def compute_logprobs(self, rollout):
        with mock.patch.object(owner or self.config, name, value):
            return GLM.compute_logprobs(self, rollout)

    return dict(compute_logprobs=compute_logprobs)

def score(change):
    """A trainer of other samples, whose log-probs come out otherwise: change(logprobs) or change(self, rollout)."""
    def compute_logprobs(self, rollout):
        logprobs, entropy = GLM.compute_logprobs(self, rollout)
        return change(logprobs), entropy

    return dict(compute_logprobs=compute_logprobs)

def seed(change):
    return dict(sample=lambda self, prompts, G, seeds: GLM.sample(self, prompts, G, change(seeds)))

def as_text(mask, grids):
    position_ids = build(mask, grids)
    L = mask.shape[1]
    position_ids[..., L:] = position_ids[..., L - 1:L] + 1 + torch.arange(position_ids.shape[2] - L)
    return position_ids

def encode_text(self, prompts):
    with mock.patch.object(grpo, "build_position_ids", as_text):
        return GLM.encode(self, prompts)

def sample_stale(self, prompts, G, seeds):
    with mock.patch.object(grpo.LoRALinear, "enabled", False):
        return GLM.sample(self, prompts, G, seeds)

def draw_from(change):
    """A sampler that reports the right log-probs, and draws from others."""
    def sample(self, prompts, G, seeds):
        draw = grpo.sample_codes
        with mock.patch.object(grpo, "sample_codes", lambda logprobs, uniform: draw(change(logprobs), uniform)):
            return GLM.sample(self, prompts, G, seeds)

    return dict(sample=sample)

def sample_nan(self, prompts, G, seeds):
    rollout = GLM.sample(self, prompts, G, seeds)
    rollout.logprobs[-1, 3] = torch.nan
    return rollout

def paint_alone(self, prompts, tokens, seeds):
    G = len(tokens) // len(prompts)
    return [image for i, row in enumerate(tokens.split(1))
            for image in GLM.decode(self, [prompts[i // G]], row, [seeds[i // G] + 100 * i])]

def paint_turned(self, prompts, tokens, seeds):
    h, w = self.config.height // 32, self.config.width // 32
    tokens = tokens.clone()
    tokens[:, -h * w:] = tokens[:, -h * w:].view(-1, h, w).mT.flatten(1)
    return GLM.decode(self, prompts, tokens, seeds)

def train_more(logprobs):
    if logprobs.requires_grad and torch.is_grad_enabled():
        PIPE.vision_language_encoder.lm_head.weight.data.mul_(1.01)
    return logprobs

AGREE, STOCK, ALONE = "sampler and trainer agree", "log-probs are those of transf", "a prompt draws the same alone"
DRAWN = "tokens are drawn as their log-probs say"
BOTH = {  # seen in bf16, too
    "temperature": (during(None, "temperature", 0.8), AGREE),
    "positions of a text": (during(grpo, "build_position_ids", as_text), AGREE),
    "rows for columns": (during(grpo, "build_position_ids", lambda m, g: build(m, [side[::-1] for side in g])), AGREE),
    "counted padding": (during(grpo, "build_position_ids", lambda m, g: build(torch.ones_like(m), g)), AGREE),
    "another text": (dict(compute_logprobs=lambda self, r: GLM.compute_logprobs(
        self, r._replace(prompts=["a red fox"] * len(r.prompts)))), AGREE),
    "all codes": (dict(compute_logprobs=lambda self, r: GLM.compute_logprobs(self, r._replace(allowed=None))), AGREE),
    "positions of a text in both": (dict(encode=encode_text), STOCK),
    "neighbours": (score(lambda logprobs: logprobs + 0.2 * (len(logprobs) > 1)), "a micro-batch changes nothing"),
    "greedy": (draw_from(lambda logprobs: (99 * logprobs).log_softmax(1)), DRAWN),
    "hot": (draw_from(lambda logprobs: (logprobs / 9).log_softmax(1)), DRAWN),
    "random numbers of the batch": (seed(lambda seeds: [sum(seeds) + len(seeds) + i for i in range(len(seeds))]), ALONE),
    "noise of its own": (dict(decode=paint_alone), "equal tokens give equal pictures"),
    "pictures in another order": (dict(decode=lambda *args: GLM.decode(*args)[::-1]), "equal tokens give equal pictures"),
    "turned pictures": (dict(decode=paint_turned), "the picture is that of the stock pipeline")}
FP32 = {"not a number": (dict(sample=sample_nan), "all log-probs are finite"),
    "unseeded": (seed(lambda seeds: [random.randrange(10**6) for _ in seeds]), "equal seeds draw equal samples"),
    "one seed": (seed(lambda seeds: [5] * len(seeds)), "other seeds draw others"),
    "dropout": (score(lambda logprobs: logprobs + 1e-3 * torch.randn_like(logprobs)), "the kl begins at 0"),
    "no gradient": (score(lambda logprobs: logprobs.detach() + 0 * logprobs), "an update has a gradient"),
    "wrong sign": (score(lambda logprobs: 2 * logprobs.detach() - logprobs), "better samples become likelier"),
    "another engine": (dict(sample=sample_stale), "the sampler has the update"),
    "trained base": (score(train_more), "off, it is the base model"),
    "few pictures": (dict(decode=lambda self, *args: GLM.decode(self, *args)[:2]), "a picture for each sample")}

def make_pipe(dtype):
    """Random, with a policy that is not certain, four layers wide enough to round in bf16, and a small draft."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS, num_hidden_layers=4, intermediate_size=256)
    torch.nn.init.ones_(pipe.vision_language_encoder.model.language_model.norm.weight)
    for weight in (*pipe.transformer.parameters(), *pipe.vae.decoder.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    pipe.processor._get_target_shape = lambda height, width: (height // 32, width // 32, 2, 1)
    return pipe.to(dtype)

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["right", *BOTH, *FP32])
def test_wrong_wrappers(name, dtype, capsys):
    """64 wide and 256 high, with prompts of different length."""
    global PIPE
    methods, seen = ({}, "") if name == "right" else (BOTH | FP32)[name]
    if name in FP32 and dtype == torch.bfloat16:
        pytest.skip("a matter of no number")
    PIPE = make_pipe(dtype)
    parts = dict(load=lambda config: type("Wrong", (GLM,), methods)(PIPE, config), tell_costs=lambda *args: 0)
    for stage in ("check_stock", "check_pictures", "check_update"):
        if seen and seen not in inspect.getsource(getattr(check, stage)):  # it takes long, and sees other things
            parts[stage] = lambda *args: {}
    check.BAD.clear()
    flags = "--width 64 --height 256 --temperature .9 --top-p .9 --guidance 1 --lr 1e-4"
    with mock.patch.multiple(check, **parts), pytest.raises(SystemExit):
        check.check(types.SimpleNamespace(flags=flags.split(), price=2.5))
    out = capsys.readouterr().out
    assert [line[5:].split(":")[0] for line in out.splitlines() if line.startswith("BAD")] == check.BAD, out
    assert bool(check.BAD) == (name != "right") and any([bad.startswith(seen) for bad in check.BAD or [""]]), out

def make_flow(run):
    assert run("grpo", f"{SMALL} --wrapper {ROOT}/examples/flow.py:DiT --decode-steps 2 --steps 1 --out dit")[0] == 0
    return "flow.py:AR --model dit"

def make_janus(run):
    with mock.patch.object(small_janus, "fit_policy"):
        small_janus.main(Path("janus"))
    return "janus.py:Janus --model janus"

def make_squares(run):
    with mock.patch.object(tiny, "fit_policy"):
        squares.write_prompts(Path())
        squares.make_model(Path())
    return "edit.py:EditWrapper --model . --width 96 --reward color"

SMALL = "--width 64 --height 96 --group-size 3 --batch-size 2 --temperature 12 --top-p 1 --lr 2e-3"

@pytest.mark.parametrize("wrapper", [
    "", "toy.py:Toy", "four_bits.py:GLMImage4Bit --offload on", "flow.py:DiT --decode-steps 3", make_flow, make_janus,
    make_squares], ids=str)
def test_what_is_right_is_ok(wrapper, run, small_draft):
    """As its command, in processes of users: nothing is BAD, nothing is written, and the last lines are the costs."""
    flags = wrapper(run) if callable(wrapper) else wrapper
    before = {*Path().rglob("*")}
    code, out, error = run("check", f"{SMALL} --price 2 " + (f"--wrapper {ROOT}/examples/{flags}" if flags else ""))
    assert code == 0 and "BAD" not in out and {*Path().rglob("*")} == before, out + error
    assert out.count("\nok ") == (20 if flags[:2] in ("", "fo") or ":AR" in flags else 18), out
    hours, money = re.search(r"2 x 3: .*\n\d+ steps: (\S+) hours, (\S+) in money", out).groups()
    assert float(money) == pytest.approx(2 * float(hours), abs=0.01)

def test_guidance_is_of_the_policy(run, small_draft):
    """A trainer of Janus that scores by the logits for the prompt alone."""
    make_janus(run)
    Path("alone.py").write_text("""from unittest import mock\nfrom examples.janus import Janus
class Alone(Janus):
    def compute_logprobs(self, rollout):
        with mock.patch.object(self.config, "guidance", 1.0): return super().compute_logprobs(rollout)""")
    code, out, _ = run("check", f"{SMALL} --wrapper alone.py:Alone --model janus")
    assert code == 1 and f"\nBAD  {AGREE}" in out, out

def test_costs_by_hand(capsys):
    """Of 5 x 6 images: tokens of the whole step are drawn; the rest grows from 12 images to 30; pictures every 4 steps."""
    trainer = mock.Mock(config=grpo.Config(batch_size=5, group_size=6, steps=8, save_every=4))
    trainer.lora.weights = {"A": torch.zeros(2**18), "B": torch.zeros(2**18)}
    with mock.patch.object(check, "clock", lambda function, *args: (function(*args), (10, 3.0))):
        check.tell_costs(trainer, ["a", "b"], dict(decode=(6, 7.0), score=(1, 0), update=(3, 2.0)), 12, 3600)
    assert trainer.wrapper.sample.call_args.args == (["a", "b"] * 2 + ["a"], 6, range(5))
    told = "a step of 5 x 6: 38.5 s = 10 sample + 15 decode + 2.5 score + 7.5 update + 3.5 save"
    assert capsys.readouterr().out.split("\n")[1:3] == [
        told + " ", f"8 steps: {38.5 * 8 / 3600:.3g} hours, {38.5 * 8:.2f} in money; peak 7.0 GiB; files 0.014 GiB"]

def test_refusals(refuse, run):
    """One line, before a model is loaded; a bug of one's own keeps its traceback, after the lines that came before."""
    for flags, told in (("--reward colr", "colr"), ("--prompts no.txt", "--prompts"), ("--lr much", "invalid float")):
        assert told in refuse("check", flags)
    Path("own.py").write_text("from examples.toy import Toy\nclass Own(Toy):\n    def decode(self, *args): 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        run("check", "--wrapper own.py:Own")
