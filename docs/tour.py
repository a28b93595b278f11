# ---
# jupyter:
#   made_from: docs/tour.py. Edit this text, never the notebook, and then run
#     jupytext --to ipynb --execute docs/tour.py
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
"""
# The tour: GRPO on image tokens, by running it

```bash
pip install -r requirements.txt matplotlib jupyter
jupyter lab docs/tour.ipynb
```
Beyond `requirements.txt` this notebook needs matplotlib, for its plots, and Jupyter, to be run. It needs no GPU and no
network, and takes a few minutes on two CPU cores.

It is for you if you know PyTorch but no reinforcement learning, and also if you know PPO and want to see what a group,
a clip and a KL do to *pictures*. Whatever begins with `grpo.` below is in [`grpo.py`](../grpo.py), the file that trains
[GLM-Image](https://huggingface.co/zai-org/GLM-Image). Nothing of it is written again here. The model is **the tiny
GLM-Image** of this repository: GLM-Image's classes with 0.3 million weights, which draws eight colours.
"""

# %%
import contextlib, dataclasses, os, sys, tempfile
os.environ |= {"TQDM_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}  # no progress bars, no GPU
sys.path.insert(0, "..")  # the folder of grpo.py
import diffusers, matplotlib, torch, transformers
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from torch import nn
import grpo

plt.rcParams.update({"figure.dpi": 90, "figure.constrained_layout.use": True})
for module in (torch, transformers, diffusers, np, matplotlib):
    print(module.__name__, module.__version__)

# %% [markdown]
"""
## 1. The loop, and what is trained
"""

# %%
boxes = ["prompt", "policy\ntrained", "codes", "DiT + VAE\nfrozen", "picture", "reward", "advantage"]
_, axes = plt.subplots(figsize=(9, 1.8))
for i, name in enumerate(boxes):
    color = "gold" if "trained" in name else "white"
    axes.text(i, 0, name, ha="center", va="center", bbox=dict(boxstyle="round", fc=color))
    if i > 0:
        axes.annotate("", (i - 0.35, 0), (i - 0.6, 0), arrowprops=dict(arrowstyle="->"))
back = dict(arrowstyle="->", connectionstyle="bar,fraction=-0.06")
axes.annotate("", (1, -0.5), (6, -0.5), arrowprops=back)
axes.text(3.5, -1.3, "update: the codes of better pictures become likelier", ha="center")
axes.set(xlim=(-0.5, 6.5), ylim=(-1.5, 0.7))
axes.axis("off");

# %% [markdown]
"""
One turn of this loop is a *step* of training (`GRPOTrainer.train` in [`grpo.py`](../grpo.py)).

- The **policy** is the model whose choices are trained: here the autoregressive (AR) half of GLM-Image, which says how
  likely each next code is, given the prompt and the codes so far ([`GLMImageWrapper`](../grpo.py)).
- A **code** is an image token, a number from 0 to 7 here and to 16,383 in GLM-Image.
- The **reward** is any number that says how good a picture is. It need not be differentiable: no gradient passes through
  the picture, nor through the DiT and the VAE, which paint it.

The AR half's own weights stay frozen, too. Beside each of its linear layers, a **LoRA** adds the product of two small
matrices, and only these are trained ([`LoRA`](../grpo.py)).
"""

# %%
config = grpo.parse_args(["--group-size", "8"])
wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
torch.manual_seed(0)
lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)

weights = {"DiT and VAE": [*wrapper.dit.parameters()], "AR half": [*wrapper.ar.parameters()],
           "its LoRA": [*lora.weights.values()]}
counts = [sum([weight.numel() for weight in part]) / 1000 for part in weights.values()]
trained = [all([weight.requires_grad for weight in part]) for part in weights.values()]
_, axes = plt.subplots(figsize=(6, 1.4))
axes.barh([*weights], counts, color=["gold" if each else "silver" for each in trained])
axes.set_xlabel("thousands of weights; gold: trained")
assert trained == [False, False, True]

# %% [markdown]
"""
(Next to so small a model the LoRA looks large. Beside GLM-Image's 9 billion weights it is about one in a hundred.)

## 2. Draw a group of 8
"""

# %%
palette = matplotlib.colors.ListedColormap([color.tolist() for color in grpo.COLORS.values()])

def show(*rows, titles=(), cmap=palette, vmin=0, vmax=7):
    """Rows of pictures or maps, with a title above each column; the default is a map of codes."""
    count = len(rows[0])
    size = (1.1 * count, 1.1 * len(rows) + 0.3)
    _, grid = plt.subplots(len(rows), count, squeeze=False, figsize=size)
    for axes, picture in zip(grid.flat, [picture for row in rows for picture in row]):
        axes.imshow(picture, cmap=cmap, vmin=vmin, vmax=vmax)
        axes.axis("off")
    for axes, title in zip(grid[0], titles):
        axes.set_title(title, fontsize=9)

# %%
prompt = "a red fox"
rollout = wrapper.sample([prompt], config.group_size, seeds=[1])
images = wrapper.decode([prompt], rollout.tokens, seeds=[1])

def split(values):
    """[N, 272] of all codes -> [N, 16, 16] of the drafts, [N, 4, 4] of the large grids."""
    return values[:, :256].view(-1, 16, 16), values[:, 256:].view(-1, 4, 4)

drafts, grids = split(rollout.tokens)
show(images, grids)

# %% [markdown]
"""
A **rollout** is what the policy drew, together with how likely each code was at that time
([`Rollout`](../grpo.py)). All samples of one prompt are a **group**: the policy draws each code at random, so they differ
([`sample_codes`](../grpo.py)). Above are the pictures of our group, and below them the codes from which they were painted, in
the colours that they stand for. This DiT was fitted to paint each code as a square of its colour, so one can read a
picture back:
"""

# %%
pixels = grpo.pil_to_tensor(images)  # [8, 3, 128, 128]
squares = nn.functional.avg_pool2d(pixels, 32)  # [8, 3, 4, 4]
colors = torch.stack([*grpo.COLORS.values()])  # [8, 3]
distances = (squares[:, None] - colors[None, :, :, None, None]).norm(dim=2)
assert torch.equal(distances.argmin(1), grids)

# %% [markdown]
"""
Before this grid, GLM-Image writes a small **draft**, which is not painted. How certain is the policy of each code? Its
**entropy** says so: it is 0 if only one code is possible, and the logarithm of 8 if all eight are equally likely.
"""

# %%
with torch.no_grad():
    logprobs, entropy = wrapper.compute_logprobs(rollout)  # both [8, 272]
entropy_draft, entropy_grid = split(entropy)
_, axes = plt.subplots(1, 2, figsize=(5, 2))
for each, name, values in zip(axes, ("draft", "grid"), (entropy_draft[0], entropy_grid[0])):
    picture = each.imshow(values, vmin=0, vmax=np.log(8))
    each.set_title(f"{name}: {values.mean():.2f}")
    each.axis("off")
plt.colorbar(picture, ax=axes, label="entropy of each code")
assert entropy_draft.max() < 0.01 and entropy_grid.min() > 1.5
assert (drafts == drafts[0, 0, 0]).all()

# %% [markdown]
"""
The policy is certain of its draft, which is the same in all pictures. It is far from certain of the 16 codes of the grid,
and only these can teach it something.

## 3. Score it, and compare

The reward `color` says how close the mean colour of a picture is to the colour that its prompt names
([`reward_color`](../grpo.py)). An **advantage** says how much better a sample is than its group, in standard deviations:
the reward minus the mean of the group, divided by the std of the group ([`compute_advantages`](../grpo.py)).
"""

# %%
color = {"color": (grpo.reward_color, 1.0)}  # a function, and its weight in the sum
rewards, _ = grpo.compute_rewards(images, rollout.prompts, [None] * 8, color)
advantages = grpo.compute_advantages(rewards, group_size=8)

by_hand = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
assert torch.allclose(advantages, by_hand.float())
assert abs(advantages.mean()) < 1e-6
show(images, titles=[f"r {r:.3f}\nA {A:+.2f}" for r, A in zip(rewards, advantages)])

# %% [markdown]
"""
That is what a group is for: its mean says what is to be expected of this prompt, so that a picture is not praised because
its prompt is an easy one. PPO trains a second network, the value network, to say that.

Three facts follow, and hold exactly. The advantages of a group sum to 0. A group in which all rewards are equal has
advantages of 0 and teaches nothing. And only differences within a group matter, so a constant may be added to a reward:
"""

# %%
assert (grpo.compute_advantages([0.7] * 8, group_size=8) == 0).all()
shifted = grpo.compute_advantages(rewards + 1e8, group_size=8)
assert torch.allclose(shifted, advantages, atol=1e-5)

equal = torch.full([8], 0.7)  # by hand, and in 32 bits
naive = (equal - equal.mean()) / (equal.std() + 1e-6)
print(f"equal rewards by hand: advantages of {naive[0]:.3f}")

# %% [markdown]
"""
By hand the equal rewards got advantages, because the rounding error of their mean was divided by 1e-6. `grpo.py`
subtracts the first reward of each group before anything else, so that equal rewards are exactly 0.

## 4. The same log-probs again, and three traps

Sampling takes one pass per code and keeps no gradient. The update needs the log-probs with one, so it computes them
again by **teacher forcing**: the policy gets all codes that were drawn at once, and says how likely each was
([`compute_logprobs`](../grpo.py)). Both must agree.
"""

# %%
_, axes = plt.subplots(figsize=(3, 3))
axes.scatter(rollout.logprobs, logprobs, s=12)
axes.set(xlabel="log-prob, sampler", ylabel="log-prob, trainer")
assert torch.allclose(rollout.logprobs, logprobs, atol=1e-5)

# %% [markdown]
"""
They do. How easily they would not, we see by stepping into three traps on purpose. None of them gives an error.

- **Positions.** A code has a row and a column. `transformers` counts these in `generate` only; a plain forward pass takes
  the image for a line of text ([`build_position_ids`](../grpo.py)).
- **Top-p.** With top-p 0.75 the sampler only draws from the likeliest codes that sum to 75 %. A trainer that computes a
  softmax over all codes scores another policy ([`compute_policy_logprobs`](../grpo.py)).
- **bf16.** If the sampler computes in 16 bits, its log-probs are rounded, and are no longer those of the trainer
  ([`GRPOTrainer.train_step`](../grpo.py)).
"""

# %%
class WithoutPositions(grpo.GLMImageWrapper):
    def forward(self, ids, mask, position_ids, num_last, cache=None):
        return super().forward(ids, mask, None, num_last, cache)

nucleus = dataclasses.replace(config, top_p=0.75)
full = grpo.GLMImageWrapper(wrapper.pipe, nucleus)
without_positions = WithoutPositions(wrapper.pipe, nucleus)
half = grpo.GLMImageWrapper.from_pretrained(config.model, nucleus)
half.policy.bfloat16()

drawn = full.sample([prompt], 8, seeds=[2])
drawn_in_half = half.sample([prompt], 8, seeds=[2])

# %%
pairs = {  # log-probs of the trainer, and of the sampler, for the same codes
    "right": (full.compute_logprobs(drawn), drawn),
    "bf16": (full.compute_logprobs(drawn_in_half), drawn_in_half),
    "no top-p": (full.compute_logprobs(drawn._replace(allowed=None)), drawn),
    "no positions": (without_positions.compute_logprobs(drawn), drawn)}
gaps = {name: (split(trainer.detach() - sampler.logprobs)[1]).abs().mean().item()
        for name, ((trainer, _), sampler) in pairs.items()}
_, axes = plt.subplots(figsize=(6, 2))
bars = axes.barh([*gaps], [*gaps.values()], log=True)
axes.bar_label(bars, fmt="{:.1g}", padding=3)
axes.set(xlabel="mean difference of the log-probs of a code", xlim=(1e-8, 100))
assert gaps["right"] < 1e-5 < gaps["bf16"] < gaps["no top-p"] < gaps["no positions"]

# %% [markdown]
"""
The **ratio** says how many times as likely a code is now as it was when it was drawn: `exp(new - old)`, the exponential of
the difference of its log-probs. Before the first update it should be 1 for every code. How far is it from 1 in each trap?
"""

# %%
_, axes = plt.subplots(figsize=(6, 2.2))
for name, ((trainer, _), sampler) in pairs.items():
    ratios = split((trainer.detach() - sampler.logprobs).exp())[1].flatten().sort().values
    outside = ((ratios < 0.8) | (ratios > 1.2)).float().mean()
    axes.plot(ratios, label=f"{name}: {outside:.0%} outside")
axes.axhspan(0.8, 1.2, color="gold", alpha=0.3)
axes.set(xlabel="codes, sorted by their ratio", ylabel="ratio", ylim=(0, 2))
axes.legend(loc="upper left", fontsize=8);

# %% [markdown]
"""
Outside of the gold band, the clip of the next section takes ratios for changes that have gone too far. Without positions
and without top-p, many codes are there before anything has changed. In this model, which has a single layer, bf16 does
little harm; in a deep one [it does more](figures.md#how-far-bf16-rounds). So `train_step` does not use the sampler's
log-probs as the old ones, but those of its own first pass.

## 5. Why the loss prints 0, and its gradient does not

This is what everyone asks who trains with GRPO for the first time. Here is the loss of our group
([`compute_grpo_loss`](../grpo.py)):
"""

# %%
new, _ = wrapper.compute_logprobs(rollout)  # [8, 272], with a gradient
new.retain_grad()
old = new.detach()
loss, metrics = grpo.compute_grpo_loss(new, old, advantages, clip_range=0.2)
loss.backward()
grad_norm = torch.stack([w.grad.norm() for w in lora.weights.values()]).norm()
print(f"loss {abs(loss):.4f}, norm of its gradient {grad_norm:.4f}")
assert abs(loss) < 1e-6 and grad_norm > 1e-3
assert torch.allclose(new.grad, -advantages[:, None].expand_as(new) / new.numel())

# %% [markdown]
"""
The loss is minus the mean of ratio x advantage. Every ratio is 1, so it is minus the mean of the advantages, which is 0 in
every group, *whatever the pictures look like*: this number says nothing. But each code's log-prob pulls with the
advantage of its picture, as the last line asserts. The codes of good pictures pull up, those of bad ones down, and what
is left is the direction of the update.

The loss of PPO and GRPO has another part: the **clip** of the ratio, here to the range from 0.8 to 1.2. What the loss
maximizes is called the surrogate. This is the surrogate of one code, and its slope:
"""

# %%
ratios = torch.linspace(0.5, 1.5, 101)
_, (left, right) = plt.subplots(1, 2, figsize=(8, 2.4))
for A, name in ((1.0, "good picture, A = 1"), (-1.0, "bad picture, A = -1")):
    log_ratios = ratios.log().requires_grad_()
    surrogates = torch.stack([-grpo.compute_grpo_loss(each, each * 0, torch.tensor([A]))[0]
                              for each in log_ratios.split(1)])
    slopes, = torch.autograd.grad(surrogates.sum(), log_ratios)
    left.plot(ratios, surrogates.detach(), label=name)
    right.plot(ratios, slopes)
    flat = ratios > 1.205 if A > 0 else ratios < 0.795
    assert (slopes[flat] == 0).all()
left.set(xlabel="ratio", ylabel="surrogate")
right.set(xlabel="ratio", ylabel="slope by log-prob")
left.legend(fontsize=8);

# %% [markdown]
"""
Where it is flat, a code has no gradient. If a good picture's code has become 1.2 times as likely, that is enough for
this rollout; and so it is if a bad picture's code has become 0.8 times as likely. The other way there is no limit: a
code of a bad picture that became likelier is pushed back, however far it has moved. The log's `clip_frac` is the share
of codes on a flat part. With one update per rollout it is 0, because every ratio is 1: the clip only matters from the
second update on (`--num-iterations 2`).

## 6. One update by hand, and the same group again

The gradients are there. One step of AdamW changes the LoRA; then we score *the same codes* again.
"""

# %%
optimizer = torch.optim.AdamW(lora.weights.values(), lr=config.lr, weight_decay=0.0)
optimizer.step()
with torch.no_grad():
    after, _ = wrapper.compute_logprobs(rollout)
_, change = split(after - old)  # [8, 4, 4], of the codes of the grid
_, axes = plt.subplots(figsize=(4, 2.6))
axes.axhline(0, color="silver")
axes.scatter(advantages, change.mean((1, 2)))
axes.set(xlabel="advantage of a picture", ylabel="mean change of log-prob")
correlation = np.corrcoef(advantages, change.mean((1, 2)))[0, 1]
print(f"correlation {correlation:.2f}")
assert correlation > 0.5

# %% [markdown]
"""
On the whole, the codes of better pictures became likelier and those of worse pictures less likely. Which codes were they?
In the maps below, a green square became likelier and a pink one less likely.
"""

# %%
order = advantages.argsort(descending=True)
titles = [f"A {A:+.2f}" for A in advantages[order]]
show([images[i] for i in order], change[order], titles=titles, cmap="PiYG", vmin=-0.6, vmax=0.6)
is_red = grids == [*grpo.COLORS].index("red")
print(f"mean change of log-prob: {change[is_red].mean():+.2f} for red squares,",
      f"{change[~is_red].mean():+.2f} for others")
assert change[is_red].mean() > 0.1 > -0.1 > change[~is_red].mean()

# %% [markdown]
"""
Nobody told the policy which squares were good: all codes of a picture get the same advantage. But red squares occur more
often in good pictures and other squares more often in bad ones, so red became likelier, even in the worst picture. Here
are the pictures for the same random numbers, before and after:
"""

# %%
again = wrapper.sample([prompt], 8, seeds=[1])
images_again = wrapper.decode([prompt], again.tokens, seeds=[1])
rewards_again, _ = grpo.compute_rewards(images_again, again.prompts, [None] * 8, color)
titles = [f"{r:.2f}, {a:.2f}" for r, a in zip(rewards, rewards_again)]
show(images, images_again, titles=titles)
_, metrics = grpo.compute_grpo_loss(after, old, advantages, clip_range=0.2)
print(f"mean reward {rewards.mean():.2f}, then {rewards_again.mean():.2f};",
      f"clip_frac of a second update: {metrics['clip_frac']:.3f} of all codes")
assert rewards_again.mean() > rewards.mean() and metrics["clip_frac"] > 0

# %% [markdown]
"""
After one update the reward is higher, and a second update from the same rollout would find ratios other than 1: some
codes are clipped.

## 7. The trainer

[`GRPOTrainer.train`](../grpo.py) does all this in each step, for eight prompts with a group of four each. It takes its
flags from the text that one would type after `python grpo.py`.
"""

# %%
prompts, _ = grpo.load_prompts(None)  # those of prompts.txt

def train(flags, rewards=None):
    """A trainer that has been trained. Its files go to a new folder, its log is not shown."""
    out = os.path.join(tempfile.mkdtemp(), "run")
    config = grpo.parse_args(["--out", out, *flags.split()])
    model = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    trainer = grpo.GRPOTrainer(config, model, prompts, rewards)
    with contextlib.redirect_stdout(None):
        trainer.train()
    return trainer

trainer = train("--steps 20 --kl-coef 0.01")

# %%
def curve(trainer, name):
    return np.array([row[name] for row in trainer.history])

_, axes = plt.subplots(1, 3, figsize=(9, 2.2))
for each, name in zip(axes, ("reward", "kl", "entropy")):
    each.plot(range(1, 21), curve(trainer, name))
    each.set(xlabel="step", ylabel=name)
first, last = curve(trainer, "reward")[[0, -1]]
print(f"reward {first:.2f} in the first step, {last:.2f} in the last")
assert last > first + 0.1

# %%
def show_samples(trainer, *steps):
    """The pictures that a run saves: always for the same prompts, from the same seeds."""
    _, axes = plt.subplots(len(steps), figsize=(9, 1.3 * len(steps)))
    for each, step in zip(axes, steps):
        each.imshow(Image.open(trainer.out / f"samples_{step:05d}.png"))
        each.set_title(f"step {step}", fontsize=9)
        each.axis("off")

show_samples(trainer, 0, 10, 20)
for prompt in prompts[:8]:
    print(prompt)

# %% [markdown]
"""
The **KL** says how far the policy has moved from the base model, the model before training: it is the mean over the drawn
codes of log pi(policy) - log pi(base), in a form that is never negative ([`compute_grpo_loss`](../grpo.py)). No second
model is needed for it, because a policy without its LoRA is the base model. `--kl-coef` times the KL is added to the
loss, and pulls the policy back. How hard? Here are three values:
"""

# %%
runs = {0.01: trainer, 0.3: train("--steps 20 --kl-coef 0.3"), 3.0: train("--steps 20 --kl-coef 3")}
_, axes = plt.subplots(figsize=(5, 3))
for kl_coef, run in runs.items():
    axes.plot(curve(run, "kl"), curve(run, "reward"), marker=".", label=f"--kl-coef {kl_coef}")
    print(f"--kl-coef {kl_coef}: reward {curve(run, 'reward')[-5:].mean():.2f},",
          f"kl {curve(run, 'kl')[-5:].mean():.3f}, means of the last five steps")
axes.set(xlabel="kl", ylabel="reward")
axes.legend()
assert curve(runs[3.0], "kl")[-5:].mean() < curve(runs[0.01], "kl")[-5:].mean()

# %% [markdown]
"""
Each dot is a step. A reward has its price in KL, and the weight decides where on that curve a run comes to rest. The
pictures of a run that stays near the base model keep what the base model can do, and lose what the reward would have
taught.

## 8. Spoil it

A policy maximizes what the reward measures, not what you meant. Let us reward it for sharpness alone, by how much
neighbouring pixels differ ([`sharpness`](../examples/rewards.py)), and turn the KL off. The second reward, `color`, has
the weight 0: it is logged and changes nothing.
"""

# %%
hacked = train("--reward ../examples/rewards.py:sharpness,color=0 --kl-coef 0 --steps 20")
show_samples(hacked, 0, 10, 20)

# %%
_, axes = plt.subplots(figsize=(5, 2.6))
for name in ("sharpness", "color"):
    values = curve(hacked, f"reward/{name}")
    axes.plot(range(1, 21), values / values[0], label=name)
    print(f"{name}: {values[:5].mean():.3f} in the first five steps,",
          f"{values[-5:].mean():.3f} in the last five")
axes.set(xlabel="step", ylabel="compared with step 1")
axes.legend()
assert np.diff([curve(hacked, "reward/color")[part].mean() for part in np.split(np.r_[:20], 4)])[0] < 0

# %% [markdown]
"""
TODO

## 9. Held-out prompts

A reward that rises on the prompts of the training proves little. So draw eight pictures each for 24 prompts that were
never trained, from the base model and from the model of section 7. How sure can we be of a difference? An interval by
[`find_interval`](../examples/evaluate.py) says between which values the mean over prompts may lie.
"""

# %%
from examples.evaluate import find_interval

held_out, _ = grpo.load_prompts("../examples/make/held_out.txt")

def score(enabled):
    """Rewards of 8 pictures for each held-out prompt, with or without the LoRA -> [24, 8]."""
    trainer.lora.enabled = enabled
    seeds = range(100, 100 + len(held_out))
    rollout = trainer.wrapper.sample(held_out, 8, seeds)
    images = trainer.wrapper.decode(held_out, rollout.tokens, seeds)
    rewards, _ = grpo.compute_rewards(images, rollout.prompts, [None] * len(images), color)
    return rewards.view(-1, 8).numpy()

base, trained = score(False), score(True)

# %%
bars = {"base, one picture": base.mean(1), "base, best of 8": base.max(1),
        "trained, one picture": trained.mean(1)}
_, axes = plt.subplots(figsize=(6, 1.8))
for name, values in bars.items():
    low, high = find_interval(values)
    axes.barh(name, values.mean(), xerr=[[values.mean() - low], [high - values.mean()]])
    print(f"{name}: {values.mean():.3f}, 95 % interval {low:.3f} .. {high:.3f}")
axes.set(xlabel="color", xlim=(0.6, 1))
low, high = find_interval(trained.mean(1) - base.max(1))
print(f"trained, one picture, minus base, best of 8: {low:+.3f} .. {high:+.3f}")
assert low > 0

# %% [markdown]
"""
**Best of 8** means: draw eight pictures, and keep the one with the highest reward. It needs no training, and is what a
trained model has to beat. Here one picture of the trained model is better than the best of eight of the base model. The
last interval is of the differences, prompt by prompt, and does not contain 0.

## 10. Your turn

A reward is a function of three lists, the pictures, their prompts and their targets, and gives a number for each picture.
This one wants it light above and dark below. Write yours in its place.
"""

# %%
def light_above(images, prompts, targets):
    pixels = grpo.pil_to_tensor(images)  # [N, 3, H, W], from 0 to 1
    above, below = pixels.mean((1, 3)).chunk(2, dim=1)  # [N, H / 2] each
    return above.mean(1) - below.mean(1)

mine = train("--steps 20", rewards={"light_above": (light_above, 1.0)})
show_samples(mine, 0, 20)
first, last = curve(mine, "reward")[[0, -1]]
print(f"reward {first:+.2f} in the first step, {last:+.2f} in the last")
assert last > first + 0.1

# %% [markdown]
"""
Three exercises. Each has a solution, folded away.

**1. Dr. GRPO in one line.** [Dr. GRPO](https://arxiv.org/abs/2503.20783) does not divide by the std of the group. Write
its advantages in one line. What becomes of two groups, one with rewards of 0.70, 0.71, 0.72 and 0.73, the other with 0.1,
0.4, 0.6 and 0.9?

<details>
<summary>Solution</summary>

```python
def dr_grpo(rewards, group_size):
    return (rewards.view(-1, group_size) - rewards.view(-1, group_size).mean(1)[:, None]).flatten()

two_groups = torch.tensor([0.70, 0.71, 0.72, 0.73, 0.1, 0.4, 0.6, 0.9])
alike, apart = grpo.compute_advantages(two_groups, 4).split(4)
assert abs(alike.max() - apart.max()) < 0.1  # GRPO: both groups count about the same

alike, apart = dr_grpo(two_groups, 4).split(4)
assert alike.max() < apart.max() / 20  # Dr. GRPO: what hardly differs hardly counts
```
To train with it, run `git apply examples/patches/dr_grpo.patch`.

</details>

**2. A group of 2 against 8.** Which values can the advantages of a group of 2 have? Draw 64 pictures for one prompt, and
compare their advantages in one group of 64 with those in 32 groups of 2, and in 8 groups of 8.

<details>
<summary>Solution</summary>

```python
many = full.sample(["a blue bird"], 64, seeds=[3])
images = full.decode(["a blue bird"], many.tokens, seeds=[3])
rewards, _ = grpo.compute_rewards(images, many.prompts, [None] * 64, color)
of_64, of_8, of_2 = [grpo.compute_advantages(rewards, size) for size in (64, 8, 2)]

# A group of 2 only says which of the two is better, not by how much: plus or minus the root of 1/2
# (a little less if the two are so nearly equal that the 1e-6 under the fraction matters).
assert abs(of_2.abs().median() - 0.5**0.5) < 1e-3 and of_2.abs().max() < 0.7072

# Both are estimates of what a large group would say, and that of 8 is closer.
assert np.corrcoef(of_64, of_2)[0, 1] < np.corrcoef(of_64, of_8)[0, 1]
```

</details>

**3. A wrapper of 30 lines.** Teach another model with the same trainer: 8 x 8 dots, each black or white, and a single
linear layer that gives their logits. The comment "To train another kind of model" in [`grpo.py`](../grpo.py) lists what a
wrapper needs, and [`toy.py`](../examples/toy.py) is another one.

<details>
<summary>Solution</summary>

```python
class Dots:
    lora_layers = "0"  # the name of the linear layer in `policy`

    def __init__(self, config):
        self.config = config
        self.policy = nn.Sequential(nn.Linear(1, 128), nn.Unflatten(1, (64, 2)))
        self.policy.requires_grad_(False)

    def encode(self, prompts):
        return torch.ones(len(prompts), 1)

    def compute_all_logprobs(self, prompts):
        return self.policy(self.encode(prompts)).log_softmax(2)  # [N, 64, 2]

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        all_logprobs = self.compute_all_logprobs(prompts)
        rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = torch.cat([torch.rand(group_size * 64, 1, generator=rng) for rng in rngs])
        tokens = grpo.sample_codes(all_logprobs.flatten(0, 1), uniform).view(-1, 64)
        logprobs = all_logprobs.gather(2, tokens[:, :, None]).squeeze(2)
        return grpo.Rollout(prompts, tokens, logprobs, allowed=None)

    def decode(self, prompts, tokens, seeds):
        return [Image.fromarray(dots.view(8, 8).byte().numpy() * 255) for dots in tokens]

    def compute_logprobs(self, rollout):
        all_logprobs = self.compute_all_logprobs(rollout.prompts)
        entropy = torch.distributions.Categorical(logits=all_logprobs.detach()).entropy()
        return all_logprobs.gather(2, rollout.tokens[:, :, None]).squeeze(2), entropy

out = os.path.join(tempfile.mkdtemp(), "dots")
flags = "--steps 40 --group-size 16 --batch-size 2 --micro-batch-size 32 --lr 0.02 --out"
config = grpo.parse_args([*flags.split(), out])
trainer = grpo.GRPOTrainer(config, Dots(config), prompts, {"light_above": (light_above, 1.0)})
with contextlib.redirect_stdout(None):
    trainer.train()
assert curve(trainer, "reward")[-1] > curve(trainer, "reward")[0] + 0.3
show_samples(trainer, 0, 40)
```

</details>

## From here

`python grpo.py` trains the tiny GLM-Image in a terminal. The [README](../README.md) says how to train GLM-Image itself,
[settings](settings.md) explains all flags and metrics, [rewards](rewards.md) has rewards that are ready-made, and
[changes](changes.md) has variants of the algorithm.
"""
