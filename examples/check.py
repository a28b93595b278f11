"""Is it fit to be trained? A check of a model, its wrapper, a reward and a card, in minutes.

    python -m examples.check                                   # the tiny GLM-Image, in seconds
    python -m examples.check --model zai-org/GLM-Image --prompts mine.txt --reward mine.py:good
    python -m examples.check --wrapper my_model.py:MyModel

It takes the flags of grpo.py, draws groups for the shortest and the longest prompt, makes an
update, and writes nothing. A line is `ok`, or `BAD` with the usual reason, and the exit code 1. The
last lines are what a run takes. Please paste all of it into an issue.

Two ways to the same log-probs differ by rounding. By how much is measured on the model itself: with
noise of 1e-6 as LoRA's B, too small to matter, numbers round otherwise. BAD is a gap of twice that
and above 1e-4, or a slope off by 0.02 and five errors, as rounding has no direction. In bf16 on a
CPU, with 2 and 8 layers 512 wide, what is right had 0.7 of that gap and a slope off by 0.002; other
positions 6 of it, a temperature of 0.8 for 0.9 a slope off by 0.08. Pictures may differ by one
level of 255; in bf16, beside another one, by three in the mean.
"""
from examples import read_flags, start

if __name__ == "__main__":
    ARGS = read_flags(__doc__, lambda add: add("--price", type=float, help="of an hour here"),
                      and_more=True, may_be_bare=True)

import math, resource, sys, tempfile
from pathlib import Path
from unittest import mock

import numpy as np, torch

import grpo
from examples import edit, janus
from examples.measure import GIB, clock, load, print_settings, score_stock

SEEDS = [0, 1]  # those below a million are not used in training
BAD = []

def tell(what, holds, found="", reason=""):
    print("ok  " if holds else "BAD ", f"{what}: {found}" if found else what, flush=True)
    if not holds:
        print(f"      {reason}", flush=True)
        BAD.append(what)

def tell_same(what, ours, theirs, floor, reason):
    d, x = (ours - theirs).double(), theirs.double() - theirs.double().mean()
    off = (x * d).sum() / (x.square().sum() + 1e-12)
    error = (d.square().mean() / (x.square().sum() + 1e-12)).sqrt()
    tell(what, d.abs().mean() <= max(1e-4, 2 * floor) and abs(off) < max(0.02, 5 * error),
         f"{d.abs().mean():.1e} per token, by rounding {floor:.1e}, slope {1 + off:.3f}", reason)

def tell_same_pictures(what, ours, theirs, most, reason):
    gaps = abs(np.stack(ours).astype(float) - np.stack(theirs))
    tell(what, gaps.max() <= 1 or gaps.mean() <= most,
         f"at most {gaps.max():.0f} of 255, {gaps.mean():.2g} in the mean", reason)

@torch.no_grad()
def score(wrapper, rollout, size=None, enabled=True, **changes):
    """-> log-probs and entropies [N, T], in micro-batches, with such changes of LoRALinear."""
    size = size or wrapper.config.micro_batch_size
    with mock.patch.multiple(grpo.LoRALinear, enabled=enabled, **changes):
        parts = [wrapper.compute_logprobs(rollout.part(slice(i, i + size)))[:2]
                 for i in range(0, len(rollout.tokens), size)]
    return [torch.cat(part).float().cpu() for part in zip(*parts)]

# --- What every wrapper must do: the contract above `Rollout` in grpo.py --------
def check_sampler(wrapper, prompts, G, is_fp32):
    """-> a rollout of two groups."""
    rollout = wrapper.sample(prompts, G, SEEDS)
    order = [prompt for prompt in prompts for _ in range(G)]
    tell("samples stand as p0 p0 p1 p1", [*rollout.prompts] == order, [*rollout.logprobs.shape])
    tell("all log-probs are finite", rollout.logprobs.isfinite().all(), "", "NaN, as by padding")
    again, other = [wrapper.sample(prompts, G, [seed + i for seed in SEEDS]) for i in (0, 7)]
    tell("equal seeds draw equal samples", torch.equal(again.tokens, rollout.tokens), "",
         "all that is random must follow from the seeds: a torch.Generator for each")
    tell("other seeds draw others", not torch.equal(other.tokens, rollout.tokens), "",
         "the seeds are not used, or the policy is certain of each token")
    alone = wrapper.sample(prompts[1:], G, SEEDS[1:])
    same = torch.isclose(alone.tokens, rollout.tokens[G:], atol=1e-3).flatten(1)
    # By rounding, another code is drawn after many that are equal; by chance, after one or two.
    nats = -(rollout.logprobs[G:] * same.cumprod(1)[:, :rollout.logprobs.shape[1]]).sum(1).mean()
    tell("a prompt draws the same alone", same.all() or not is_fp32 and nats > 5,
         f"{same.double().mean():.0%} of it", "padding, or random numbers that depend on others")
    return rollout

def check_trainer(wrapper, lora, rollout):
    """-> log-probs, and by how much rounding changes them."""
    logprobs, entropy = score(wrapper, rollout)
    plain, _ = score(wrapper, rollout, forward=lambda layer, inputs: layer.linear(inputs))
    noise = [w.data.normal_(std=1e-6) for name, w in lora.weights.items() if "lora_B" in name]
    floor = (score(wrapper, rollout)[0] - logprobs).abs().mean().item()
    [weight.zero_() for weight in noise]
    tell_same("LoRA begins as the model was", logprobs, plain, floor,
              "a layer is no plain nn.Linear, such as one of peft, or something reads its weight")
    tell_same("sampler and trainer agree", logprobs, rollout.logprobs, floor,
              "positions, mask, temperature, guidance, top-k, top-p or the text differ in the two")
    # The mean of -log p is the entropy. Its variance is about 10 entropies where they are small.
    excess, variance = -logprobs - entropy, (10 * entropy).clamp(1e-6, 1).sum()
    z = excess.sum() / max(variance, excess.var() * excess.numel()) ** 0.5
    tell("tokens are drawn as their log-probs say", abs(z) < 5, f"-log p {-logprobs.mean():.4f}, "
         f"entropy {entropy.mean():.4f}, z {z:+.1f}", "the sampler draws otherwise than it reports")
    tell_same("a micro-batch changes nothing", score(wrapper, rollout, size=1)[0], logprobs, floor,
              "a sample's log-probs depend on its neighbours or on padding")
    tell("the kl begins at 0", torch.equal(score(wrapper, rollout, enabled=False)[0], logprobs), "",
         "the policy is random, as by dropout")
    return logprobs, floor

def check_pictures(wrapper, prompts, rollout, rewards, G, most):
    """-> {phase: what `clock` says}."""
    images, painting = clock(wrapper.decode, prompts, rollout.tokens, SEEDS)
    sizes = {image.size for image in images}
    tell("a picture for each sample", len(images) == 2 * G and len(sizes) == 1, f"{len(images)} of "
         f"{sizes}", "`decode` must give PIL images of one size")
    twins = wrapper.decode(prompts[1:], rollout.tokens[[-1, -1]], SEEDS[1:])
    tell_same_pictures("equal tokens give equal pictures", twins, images[-1:] * 2, most,
                       "a group must share the noise of its painter, or rewards differ by luck")
    texts = rollout.prompts[:len(images)]
    (scores, _), scoring = clock(grpo.compute_rewards, images, texts, rewards)
    std = scores[:len(scores) // G * G].view(-1, G).std(1).mean()
    tell("the reward tells the pictures of a group apart", std > 0, f"reward_std {std:.3g}",
         "all advantages would be 0: take a finer reward, or larger groups")
    return dict(decode=painting, score=scoring)

def check_update(trainer, prompts, rollout, before, G):
    """One update with advantages 1, -1, 1, .. -> what `clock` says of it."""
    wrapper = trainer.wrapper
    advantages = torch.tensor([1.0, -1.0] * G)
    base = score(wrapper, rollout, enabled=False)[0]
    metrics, updating = clock(trainer.train_step, rollout, advantages)
    after, _ = score(wrapper, rollout)
    norm = metrics["grad_norm"]
    tell("an update has a gradient", 0 < norm < math.inf, f"of norm {norm:.3g}, for all "
         f"{len(trainer.lora.weights)} weights of LoRA", "it is 0 or not finite")
    gain = (advantages[:, None] * (after - before)).mean()
    tell("better samples become likelier, worse ones less", gain > 0, f"{gain:+.1e} per token at "
         f"--lr {trainer.config.lr:g}", "the gradient is of other log-probs, or lost in rounding")
    drawn = wrapper.sample(prompts, G, SEEDS)
    tell("the sampler has the update", (drawn.tokens != rollout.tokens).any() or (
        drawn.logprobs != rollout.logprobs).any(), "", "it draws with a copy of the weights")
    tell("off, it is the base model", torch.equal(score(wrapper, rollout, enabled=False)[0], base),
         "", "more than the LoRA was changed")
    with tempfile.TemporaryDirectory() as folder:
        trainer.lora.save(Path(folder), trainer.config.model)
        saved = trainer.lora.read(Path(folder))
    grpo.LoRA(wrapper.policy, wrapper.lora_layers, trainer.config.lora_rank).load(saved)
    tell("a saved adapter is the trained one", torch.equal(score(wrapper, rollout)[0], after), "",
         "the policy keeps something else")
    return updating

def check_stock(wrapper, one, floor):
    """What transformers and diffusers do with the tokens of one sample of GLM-Image."""
    config = wrapper.config
    logprobs, codes = score_stock(wrapper, one)
    tell_same("log-probs are those of transformers' generate", one.logprobs, logprobs, floor,
              "a version of transformers makes positions, or the text, otherwise")
    ours = wrapper.decode(one.prompts, one.tokens, SEEDS[1:])
    stock = wrapper.pipe(
        str(one.prompts[0]), prior_token_ids=codes, height=config.height, width=config.width,
        generator=torch.Generator().manual_seed(~SEEDS[1]), guidance_scale=config.guidance,
        num_inference_steps=config.decode_steps).images
    tell_same_pictures("the picture is that of the stock pipeline", ours, stock, 0.1,
                       "codes reach the DiT in another order, or with other settings")

def tell_costs(trainer, prompts, clocks, images, price):
    """A whole step's tokens are drawn; seconds of the other phases grow with the images."""
    config = trainer.config
    batch = (prompts * config.batch_size)[:config.batch_size]
    _, sampling = clock(trainer.wrapper.sample, batch, config.group_size, range(len(batch)))
    times = len(batch) * config.group_size / images
    seconds = dict(sample=sampling[0]) | {name: times * each[0] for name, each in clocks.items()}
    seconds["save"] = (sampling[0] + 8 / images * clocks["decode"][0]) / config.save_every
    hours = config.steps * sum(seconds.values()) / 3600
    adapter = sum([weight.nbytes for weight in trainer.lora.weights.values()]) / GIB
    gib = max([each[1] for each in (sampling, *clocks.values())])
    gib = gib or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # without a GPU
    print(f"\na step of {len(batch)} x {config.group_size}: {sum(seconds.values()):.3g} s =",
          " + ".join([f"{value:.2g} {name}" for name, value in seconds.items()]),
          f"\n{config.steps} steps: {hours:.3g} hours, {hours * (price or 0):.2f} in money; peak "
          f"{gib:.1f} GiB; files {adapter * (5 + config.steps // config.save_every):.2g} GiB")

def check(args):
    config = grpo.parse_args(args.flags)
    rewards = grpo.load_rewards(config.reward)  # a mistake is told before a model is loaded
    prompts = sorted(grpo.load_prompts(config.prompts), key=len)
    print_settings(config)
    wrapper = load(config)
    wrapper.config = config
    is_fp32 = next(wrapper.policy.parameters()).dtype == torch.float32
    ends, G = [prompts[0], prompts[-1]], config.group_size
    trainer = grpo.GRPOTrainer(config, wrapper, prompts)
    rollout = check_sampler(wrapper, ends, G, is_fp32)
    logprobs, floor = check_trainer(wrapper, trainer.lora, rollout)
    others = edit.EditWrapper, janus.Janus
    if isinstance(wrapper, grpo.GLMImageWrapper) and not isinstance(wrapper, others):
        check_stock(wrapper, rollout.part(slice(G, G + 1)), floor)
    clocks = check_pictures(wrapper, ends, rollout, rewards, G, 0 if is_fp32 else 3)
    clocks["update"] = check_update(trainer, ends, rollout, logprobs, G)
    tell_costs(trainer, prompts, clocks, 2 * G, args.price)
    sys.exit(f"BAD: {'; '.join(BAD)}" if BAD else 0)

if __name__ == "__main__":
    start(check, ARGS)
