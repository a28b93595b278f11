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

GRPO is Group Relative Policy Optimization ([paper](https://arxiv.org/abs/2402.03300)), a simple
relative of PPO, Proximal Policy Optimization.

```bash
pip install -r requirements.txt matplotlib jupyter
jupyter lab docs/tour.ipynb
```
Beyond `requirements.txt`, this notebook needs matplotlib for its plots and Jupyter to be run. It
needs neither a GPU nor a network, and takes a few minutes on two CPU cores.

It is for you if you know PyTorch but no reinforcement learning, and also if you know PPO and want
to see what a group, a clip and a KL do to *pictures*. Whatever is called `grpo.` in a cell is a
part of [`grpo.py`](../grpo.py), the file that trains
[GLM-Image](https://huggingface.co/zai-org/GLM-Image); nothing of it is written again here. The
model is **the tiny GLM-Image** of this repository. It has the classes of GLM-Image and very few
weights, and draws squares of eight colours.
"""

# %%
import contextlib, dataclasses, io, os, pathlib, sys, tempfile
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of this fits a CPU
os.environ["TQDM_DISABLE"] = "1"  # no progress bars,
sys.modules["tqdm.notebook"] = None  # nor those of Jupyter
here = pathlib.Path.cwd()
homes = [folder for folder in (here, *here.parents) if (folder / "grpo.py").exists()]
assert homes, "start this in the folder of grpo.py, or below it"
os.chdir(homes[0])
sys.path.insert(0, os.getcwd())  # the folder of grpo.py
import grpo
import diffusers, matplotlib, torch, transformers
import matplotlib.pyplot as plt
import numpy as np
from PIL import Image
from torch import nn

torch.set_num_threads(1)  # more gain nothing on a model this small
plt.rcParams.update({"figure.dpi": 80, "figure.constrained_layout.use": True})
for module in (torch, transformers, diffusers, np, matplotlib):
    print(module.__name__, module.__version__)

# %% [markdown]
"""
## 1. The loop, and what is trained
"""

# %%
_, axes = plt.subplots(figsize=(9, 1.8))
for i, name in enumerate(["prompt", "policy\ntrained", "codes", "DiT + VAE\nfrozen", "picture",
                          "reward", "advantage"]):
    color = "gold" if "trained" in name else "white"
    axes.text(i, 0, name, ha="center", va="center", bbox=dict(boxstyle="round", fc=color))
    if i > 0:
        axes.annotate("", (i - 0.4, 0), (i - 0.6, 0), arrowprops=dict(arrowstyle="->"))
back = dict(arrowstyle="->", connectionstyle="bar,fraction=-0.06")
axes.annotate("", (1, -0.5), (6, -0.5), arrowprops=back)
axes.text(3.5, -1.3, "update: the codes of better pictures become likelier", ha="center")
axes.set(xlim=(-0.5, 6.5), ylim=(-1.5, 0.7))
axes.axis("off");

# %% [markdown]
"""
One turn of this loop is a step of training ([`GRPOTrainer.train`](../grpo.py)). From the left:

- The **policy** is the model whose choices are trained. Here it is the autoregressive (AR) half of
  GLM-Image, which says how likely each next code is, given the prompt and the codes so far
  ([`GLMImageWrapper`](../grpo.py)).
- A **code** is an image token, a number that stands for a part of a picture: one of 8 here, one of
  16,384 in GLM-Image.
- The other half of GLM-Image, a diffusion transformer (DiT) and the decoder of an autoencoder
  (VAE), paints the codes ([`GLMImageWrapper.decode`](../grpo.py)). It stays as it is.
- The **reward** is any number that says how good a picture is. Nobody shows the policy a right
  answer; prompts and this number are all that you bring. It need not be differentiable: section 5
  shows how a gradient comes from it all the same.
- The **advantage** says how much better a picture is than the others for the same prompt. It is all
  that the policy hears of the reward.

For those who know PPO: an action is a code, an episode is a picture, its reward comes with the last
code, and there is no discount and no value network. What keeps the policy near the base model is a
term of the loss, not of the reward, and by default each picture is used for one update.

The AR half's own weights stay as they are, too. A **LoRA** adds the product of two small matrices
to each of its linear layers, and only these matrices are trained ([`LoRA`](../grpo.py)).
"""

# %%
config = grpo.parse_args(["--group-size", "8"])
wrapper = grpo.GLMImageWrapper.from_pretrained(config.model, config)
weights = {"DiT and VAE": [*wrapper.dit.parameters()], "AR half": [*wrapper.ar.parameters()]}
torch.manual_seed(0)
lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, config.lora_rank)
weights["its LoRA"] = [*lora.weights.values()]
counts = [sum([weight.numel() for weight in part]) / 1000 for part in weights.values()]
trained = [all([weight.requires_grad for weight in part]) for part in weights.values()]
_, axes = plt.subplots(figsize=(6, 1.4))
axes.barh([*weights], counts, color=["gold" if each else "silver" for each in trained])
axes.set_xlabel("thousands of weights; gold: trained")
assert trained == [False, False, True]

# %% [markdown]
"""
Beside so small a model the LoRA looks large. In GLM-Image it has about a hundredth of the AR half's
weights.

## 2. Draw a group of 8

GLM-Image writes two grids of codes. First comes a draft, of 16 x 16 codes here, which is not
painted. In its light it writes the grid that is painted, of 4 x 4 codes, so a picture has 256 + 16
= 272 codes. First a function that shows pictures, and maps of numbers, in rows.
"""

# %%
palette = matplotlib.colors.ListedColormap([color.tolist() for color in grpo.COLORS.values()])

def show(*rows, titles=(), cmap=palette, vmin=0, vmax=7):
    """Rows of pictures or of maps, with a title above each column. Maps are of codes by default."""
    count = len(rows[0])
    lines = max([title.count("\n") + 1 for title in titles], default=0)
    size = (1.1 * count, 1.1 * len(rows) + 0.2 * lines + 0.1)
    _, grid = plt.subplots(len(rows), count, squeeze=False, figsize=size)
    for axes, picture in zip(grid.flat, [picture for row in rows for picture in row]):
        axes.imshow(picture, cmap=cmap, vmin=vmin, vmax=vmax)
        axes.axis("off")
    for axes, title in zip(grid[0], titles):
        axes.set_title(title, fontsize=8)

# %%
prompt = "a red fox"
rollout = wrapper.sample([prompt], group_size=config.group_size, seeds=[1])  # a seed per prompt
images = wrapper.decode([prompt], rollout.tokens, seeds=[1])

def split(values):
    """[N, 272], for all codes -> [N, 16, 16], for the draft, and [N, 4, 4], for the grid."""
    return values[:, :256].view(-1, 16, 16), values[:, 256:].view(-1, 4, 4)

draft, grid = split(rollout.tokens)
show(images, grid)

# %% [markdown]
"""
The samples of one prompt are a **group**. They differ because each code is drawn at random, from
the policy's probabilities ([`sample_codes`](../grpo.py)), and for no other reason: the noise from
which the DiT starts to paint is the same for the whole group. What the policy draws is called a
**rollout**: the codes, each with its **log-prob**, the logarithm of the probability that it had
([`Rollout`](../grpo.py)).

Above are the eight pictures, and below them the grids they were painted from, in the colours that
the codes stand for: this small DiT paints each code as a square.

How uncertain is the policy of each code? That is its **entropy**: 0 if it would always draw the
same code, and the logarithm of 8 if all eight were equally likely
([`GLMImageWrapper.compute_logprobs`](../grpo.py)).
"""

# %%
with torch.no_grad():
    logprobs, entropy = wrapper.compute_logprobs(rollout)  # both [8, 272]
entropy_draft, entropy_grid = split(entropy)
_, axes = plt.subplots(1, 2, figsize=(5, 2))
for each, name, values in zip(axes, ("draft", "grid"), (entropy_draft[0], entropy_grid[0])):
    picture = each.imshow(values, vmin=0, vmax=np.log(8))
    each.set_title(f"{name} of the first: {values.mean():.2f}")
    each.axis("off")
plt.colorbar(picture, ax=axes, label="entropy of each code")
print(f"mean over all {entropy.shape[1]} codes: {entropy.mean():.3f}")
assert entropy_draft.max() < 0.01 and entropy_grid.min() > 1.5
assert (draft == draft[0, 0, 0]).all()

# %% [markdown]
"""
This policy is certain of its draft, which is one and the same code in all pictures. It is far from
certain of the 16 codes of the grid, and these are all that it can learn to choose better: a code
that is never drawn is never compared with another. Remember the mean over all codes. The log of a
run, a row of numbers for each step, has such means, and here 256 of 272 codes add nothing to the
entropy.

## 3. Score it, and compare

The reward `color` says how close the mean colour of a picture is to the colour that its prompt
names ([`reward_color`](../grpo.py)). The advantages are the rewards minus the mean of the group,
divided by the std of the group, so that the scale of a reward does not matter
([`compute_advantages`](../grpo.py)). The std divides by n - 1, and gets 1e-6 more, in case it is 0.
"""

# %%
color = {"color": (grpo.reward_color, 1.0)}  # a function, and its weight in the sum of all rewards
rewards, _ = grpo.compute_rewards(images, rollout.prompts, color)
advantages = grpo.compute_advantages(rewards, group_size=8)

by_hand = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
assert torch.allclose(advantages, by_hand.float())
show(images, titles=[f"r {r:.3f}\nA {A:+.2f}" for r, A in zip(rewards, advantages)])

# %% [markdown]
"""
That is what a group is for: its mean says what can be expected of the policy for this prompt, so a
picture is not praised for an easy prompt, nor blamed for a hard one. In PPO a second network, the
value network, learns to say this, code by code. Here all codes of a picture share one advantage.

Three things follow. The advantages of a group sum to 0. If all rewards of a group are equal, its
advantages are 0, and they teach nothing; the log's `reward_std` is 0 if this happens in all groups
of a step. And a constant that is added to all rewards changes nothing, even one of 1e8, as rewards
have 64 bits:
"""

# %%
assert abs(advantages.sum()) < 1e-5
assert (grpo.compute_advantages([0.7] * 8, group_size=8) == 0).all()
shifted = grpo.compute_advantages(rewards + 1e8, group_size=8)
assert torch.allclose(shifted, advantages, atol=1e-5)

# %% [markdown]
"""
## 4. The same log-probs again, and three traps

The sampler works code by code and keeps no gradients, which would fill the memory. The update needs
log-probs with a gradient. So they are computed again, by **teacher forcing**: the policy reads all
the codes that were drawn, in one pass, and says how likely each one was. That is what
`compute_logprobs` did above. Both must agree:
"""

# %%
_, axes = plt.subplots(figsize=(3, 3))
axes.scatter(rollout.logprobs, logprobs, s=12)
axes.set(xlabel="log-prob, from the sampler", ylabel="log-prob, by teacher forcing")
assert torch.allclose(rollout.logprobs, logprobs, atol=1e-5)

# %% [markdown]
"""
(At the top right are the codes of the drafts, in the middle red squares, and at the bottom left
those of other colours, each of which is seldom drawn.)

They agree. Let us step into three traps on purpose; none of them gives an error. (If you have come
for the gradient, run these cells, and read on in section 5.)

- **No positions.** A code has a row and a column. `transformers` counts these in `generate` only,
  and a plain forward pass takes the picture for a line of text
  ([`build_position_ids`](../grpo.py)).
- **No top-p.** With top-p 0.75 the sampler draws only from the likeliest codes, those that together
  have a probability of at least 0.75. So the rollout keeps which codes were `allowed`. A trainer
  that takes the softmax over all codes has the log-probs of another policy
  ([`compute_policy_logprobs`](../grpo.py)).
- **bf16.** A sampler that computes in 16 bits rounds, so that its log-probs are not quite those of
  the trainer ([`GRPOTrainer.train_step`](../grpo.py)).
"""

# %%
class WithoutPositions(grpo.GLMImageWrapper):
    def forward(self, ids, mask, position_ids, num_last, cache=None):
        return super().forward(ids, mask, None, num_last, cache)

nucleus = dataclasses.replace(config, top_p=0.75)
right = grpo.GLMImageWrapper(wrapper.pipe, nucleus)
without_positions = WithoutPositions(wrapper.pipe, nucleus)
half = grpo.GLMImageWrapper.from_pretrained(config.model, nucleus)
half.policy.bfloat16()

drawn = right.sample([prompt], group_size=8, seeds=[2])
drawn_in_half = half.sample([prompt], group_size=8, seeds=[2])

# %%
pairs = {  # log-probs by teacher forcing, and those of the sampler, for the same codes
    "right": (right.compute_logprobs(drawn), drawn.logprobs),
    "bf16": (right.compute_logprobs(drawn_in_half), drawn_in_half.logprobs),
    "no top-p": (right.compute_logprobs(drawn._replace(allowed=None)), drawn.logprobs),
    "no positions": (without_positions.compute_logprobs(drawn), drawn.logprobs)}
gaps = {name: split(forced.detach() - sampled)[1] for name, ((forced, _), sampled) in pairs.items()}
errors = {name: gap.abs().mean().item() for name, gap in gaps.items()}
_, axes = plt.subplots(figsize=(6, 2))
axes.bar_label(axes.barh([*errors], [*errors.values()], log=True), fmt="{:.1g}", padding=3)
axes.set(xlabel="mean absolute error of the log-probs of the grid", xlim=(1e-8, 100))
assert errors["right"] < 1e-5 < errors["bf16"] < errors["no top-p"] < errors["no positions"]

# %% [markdown]
"""
How bad is that? The **ratio** of a code says how many times as likely it is now as when it was
drawn: `exp(new - old)` of its log-probs. Before the first update nothing has changed, so each ratio
should be 1. Here are the ratios of the 128 codes in the eight grids, from the smallest to the
largest:
"""

# %%
_, axes = plt.subplots(figsize=(6, 2.4))
for name, gap in gaps.items():
    ratios = gap.exp().flatten().sort().values
    outside = ((ratios < 0.8) | (ratios > 1.2)).float().mean()
    axes.plot(ratios, label=f"{name}: {outside:.0%} outside")
axes.axhspan(0.8, 1.2, color="gold", alpha=0.3)
axes.set(ylabel="ratio", ylim=(0, 2))
axes.legend(loc="upper left", fontsize=8);

# %% [markdown]
"""
What the gold band is for comes in the next section: outside of it, the update may take a code for
one that has already changed enough. If only the sampler has top-p, each ratio is the probability
that the sampler kept, here just above 0.75. Without positions the trainer scores with another
model, and any ratio is possible. In bf16 this model with its single layer is good enough; in a deep
one the error is [larger](figures.md#what-bf16-does-to-updates), also if both compute in bf16, as they add
in another order.

So `train_step` does not compare with the log-probs of the sampler, but with those of its own first
pass: then each ratio begins at 1. Beware, this hides all three traps, and mends none. The gradient
is that of another policy than the one that drew, and no ratio tells. For rounding that is usually
harmless, and there is a [patch](changes.md) that corrects for it, `truncated_is`. The other two are
bugs: without top-p, for one, the update pushes codes that the sampler never draws. What tells is
`sampler_gap`, a column of the log: the error of the bar chart, as a mean over all 272 codes. In 32
bits, as here, anything above rounding is a bug.

## 5. Why the loss prints 0, and its gradient does not

This is what everybody asks who trains with GRPO for the first time. Here is the loss of our group,
and the norm of its gradient with respect to the weights of the LoRA
([`compute_grpo_loss`](../grpo.py)):
"""

# %%
new, _ = wrapper.compute_logprobs(rollout)  # [8, 272], with a gradient
new.retain_grad()
old = new.detach()  # this is the first pass
loss, _ = grpo.compute_grpo_loss(new, old, advantages, clip_range=0.2)
loss.backward()
grad_norm = torch.stack([weight.grad.norm() for weight in lora.weights.values()]).norm()
print(f"loss {abs(loss):.4f}, norm of its gradient {grad_norm:.4f}")
assert abs(loss) < 1e-6 and grad_norm > 0.001
assert torch.allclose(new.grad, -advantages[:, None].expand(8, 272) / (8 * 272))

# %% [markdown]
"""
The loss is minus the mean of ratio x advantage. Each ratio is 1, so it is minus the mean of the
advantages, and that is 0 in every group, *whatever the pictures look like*. So the number tells
nothing; watch the reward.

Its gradient tells more. With respect to the log-prob of a code, it is minus the advantage of the
picture, divided by the number of all codes, 8 x 272. That is the last line. A step against this
gradient raises the log-probs of the codes of better pictures and lowers those of worse ones. It is
the gradient of a cross-entropy loss on the policy's own pictures, in which the advantages are the
weights.

Why is this the right direction? The mean reward is the sum, over all pictures that are possible, of
probability x reward. The gradient of a probability is the probability x the gradient of its
logarithm. So the gradient of the mean reward is the mean of reward x gradient of the log-prob over
the pictures that the policy draws, which a few of them estimate. The reward itself is never
differentiated. The probability of a picture is the product of those of its codes, so its log-prob
is the sum of theirs, and each code gets the reward of the whole picture. This is REINFORCE, the
oldest policy gradient.

To subtract a constant from the rewards of a prompt does not change this mean: probabilities sum to
1, so the mean gradient of a log-prob is 0. But it takes noise out of the estimate, and the mean of
the group is a good constant. (It contains the picture's own reward, which scales the gradient by 7
/ 8, and no more.) To divide by the std changes how much each prompt counts; the first exercise
shows it.

Then what is the ratio for? For a second update with the same rollout, whose codes were drawn by a
policy that is no longer quite the same. Here PPO's **clip** comes in: the advantage is also
multiplied by the ratio limited to 0.8 to 1.2, and the smaller of the two products counts. It is
called the **surrogate**, and the loss is minus its mean. This is the surrogate of one code, and its
slope:
"""

# %%
ratios = torch.linspace(0.5, 1.5, 101)
_, (first, second) = plt.subplots(1, 2, figsize=(8, 2.4))
for A, name in ((1.0, "good picture, A = 1"), (-1.0, "bad picture, A = -1")):
    log_ratios = ratios.log().requires_grad_()
    surrogates = torch.stack([-grpo.compute_grpo_loss(each, 0 * each, torch.tensor([A]))[0]
                              for each in log_ratios.split(1)])
    slopes, = torch.autograd.grad(surrogates.sum(), log_ratios)
    first.plot(ratios, surrogates.detach(), label=name)
    second.plot(ratios, slopes)
    flat = ratios > 1.205 if A > 0 else ratios < 0.795
    assert (slopes[flat] == 0).all()
first.set(xlabel="ratio", ylabel="surrogate")
second.set(xlabel="ratio", ylabel="d surrogate / d log-prob")
first.legend(fontsize=8);

# %% [markdown]
"""
Elsewhere the slope is ratio x advantage. Where the surrogate is flat, a code has no gradient: if it
belongs to a good picture and has become 1.2 times as likely, or to a bad picture and 0.8 times, it
is pushed no further. (Other codes may still move it, as they share its weights.) In the other
direction there is no limit: a code of a bad picture that became likelier is always pushed back.

The share of codes where it is flat is `clip_frac`, in the log's file, metrics.jsonl. With one
update per rollout, which is the default, it is 0, because each ratio is 1. It can be above 0 from a
second update on, with `--num-iterations 2`, though the log's mean over all updates and all 272
codes is small here. The next section has it for the grid.

## 6. One update by hand, and the same group again

The gradients are there. One step of AdamW, and then *the same codes* are scored again. This first
step is a large one: Adam moves each weight that has a gradient by the learning rate, however small
the gradient. In the first step these are the matrices B of each LoRA. As B begins at 0, the
gradient of A is 0.
"""

# %%
for name, weight in lora.weights.items():
    assert (weight.grad == 0).all() == ("lora_A" in name)
optimizer = torch.optim.AdamW(lora.weights.values(), lr=config.lr, weight_decay=0.0)
optimizer.step()
with torch.no_grad():
    after, _ = wrapper.compute_logprobs(rollout)
_, change = split(after - old)  # [8, 4, 4]
change_of_picture = change.mean((1, 2))
correlation = np.corrcoef(advantages, change_of_picture)[0, 1]
_, axes = plt.subplots(figsize=(4, 2.6))
axes.scatter(advantages, change_of_picture)
axes.set(xlabel="advantage of a picture", ylabel="mean change of log-prob")
axes.set_title(f"correlation {correlation:.2f}")
print(f"learning rate {config.lr}")
assert correlation > 0.5

# %% [markdown]
"""
The better a picture, compared with the others, the less its codes lost, or the more they gained. It
does not hold for each picture, because good and bad ones have many codes in common, and all share
their weights. Which codes were they? Below each picture is a map: a green square became likelier, a
pink one less likely, and at full colour by 0.6 or more.
"""

# %%
order = advantages.argsort(descending=True)
titles = [f"A {A:+.2f}" for A in advantages[order]]
show([images[i] for i in order], change[order], titles=titles, cmap="PiYG", vmin=-0.6, vmax=0.6)
is_red = grid == [*grpo.COLORS].index("red")
print(f"mean change of log-prob: {change[is_red].mean():+.2f} for red squares,",
      f"{change[~is_red].mean():+.2f} for others")
assert change[is_red].mean() > 0.1 and change[~is_red].mean() < -0.1

# %% [markdown]
"""
Nobody told the policy which squares of a picture were good, as all its codes share one advantage.
But good pictures have more red squares, so that in the sum over the group red gains, and others
lose. Red became likelier even in the worst picture. And the pictures? Here are those from the same
random numbers, before and after, with their rewards:
"""

# %%
again = wrapper.sample([prompt], config.group_size, seeds=[1])
images_again = wrapper.decode([prompt], again.tokens, seeds=[1])
rewards_again, _ = grpo.compute_rewards(images_again, again.prompts, color)
titles = [f"{r:.2f}, {a:.2f}" for r, a in zip(rewards, rewards_again)]
show(images, images_again, titles=titles)
print(f"mean reward {rewards.mean():.2f} before, {rewards_again.mean():.2f} after")
outside = ((change.exp() - 1).abs() > 0.2).float().mean()
_, metrics = grpo.compute_grpo_loss(after, old, advantages, clip_range=0.2)
flat = metrics["clip_frac"] * 272 / 16  # of the grid's codes
print(f"of the grid's codes, {outside:.0%} are outside of the band, {flat:.0%} where it is flat")
assert rewards_again.mean() > rewards.mean() and 0 < flat < outside

# %% [markdown]
"""
After one update the pictures for this prompt are better. A second update from the same rollout
would find many codes outside of the band. Those on the flat side would push no further; the others,
such as red squares of bad pictures, would be pushed back.

## 7. The trainer

[`GRPOTrainer`](../grpo.py) does all this in every step, by default for eight prompts and a group of
four for each. Its settings are the flags that one would type after `python grpo.py`.
"""

# %%
prompts = grpo.load_prompts()  # those of prompts.txt

def train(flags, rewards=None):
    """-> a trainer that is done. Its files are in a new folder; here it prints nothing."""
    out = os.path.join(tempfile.mkdtemp(), "run")
    config = grpo.parse_args(["--out", out, *flags.split()])
    model = grpo.GLMImageWrapper.from_pretrained(config.model, config)
    trainer = grpo.GRPOTrainer(config, model, prompts, rewards)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return trainer

trainer = train("--steps 20 --kl-coef 0.01 --save-every 2")

# %% [markdown]
"""
This is the log, without some of its columns ([all of them](settings.md)):
"""

# %%
names = ["reward", "reward_std", "loss", "kl", "entropy", "sampler_gap"]
print("step", *[f"{name:>11}" for name in names])
for step in (1, 5, 10, 15, 20):
    row = trainer.history[step - 1]
    print(f"{step:4}", *[f"{row[name]:11.4f}" for name in names])
    assert row["sampler_gap"] < 1e-5
    assert np.isclose(row["loss"], 0.01 * row["kl"], atol=1e-6)

# %% [markdown]
"""
The `loss` is `kl` times `--kl-coef`, of which more below; the rest of it is 0 again. And the same as
curves, and in the pictures that a run saves:
"""

# %%
def curve(trainer, name):
    return np.array([row[name] for row in trainer.history])

_, axes = plt.subplots(1, 3, figsize=(9, 2.2))
for each, name in zip(axes, ("reward", "entropy", "kl")):
    each.plot(range(1, 21), curve(trainer, name))
    each.set(xlabel="step", ylabel=name)
first, last = curve(trainer, "reward")[[0, -1]]
print(f"reward {first:.2f} in the first step, {last:.2f} in the last")
assert last > first + 0.1

# %%
import textwrap
captions = [textwrap.fill(prompt, 16) for prompt in prompts[:8]]

def read_samples(trainer, step):
    """What a run saves: a picture for each of its first eight prompts, always from equal seeds."""
    sheet = Image.open(trainer.out / f"samples_{step:05d}.png")
    return [sheet.crop((128 * i, 0, 128 * i + 128, 128)) for i in range(8)]

show(*[read_samples(trainer, step) for step in (0, 10, 20)], titles=captions)

# %% [markdown]
"""
From above: steps 0, 10 and 20. The rewards rise, not in every step, because each step has other
prompts and draws few pictures for each. The entropy falls: the policy makes up its mind. In the end
the pictures of a group are alike. Then `reward_std` is nearly 0, and there is nothing more to learn
from this reward. That is as it should be for a reward that a single picture satisfies best; in a
run with a reward of many good answers, it would be a loss of variety.

The **KL** (Kullback-Leibler divergence) says how far the policy has moved from the base model, as
it was before training. For a code it is the mean, over codes that the policy draws, of its log-prob
minus that of the base model. No second model is needed for it, as the policy without its LoRA is
the base model.

The log estimates it by k3, `exp(d) - d - 1`, where d is the base model's log-prob minus the
policy's, for the codes that were drawn ([`compute_grpo_loss`](../grpo.py)). Why does it fall in the
second half? Has the policy come back? For a model with eight codes, one can compute the exact KL of
each code, and compare:
"""

# %%
@torch.no_grad()
def measure_kl(trainer, step):
    """Pictures by the weights of a step -> the exact KL of their codes, and k3, both [64, 272]."""
    trainer.lora.load(trainer.lora.read(trainer.out / f"adapter_{step:05d}"))
    rollout = trainer.wrapper.sample(prompts[:8], 8, range(8))
    ids, mask, position_ids = trainer.wrapper.encode(rollout.prompts)
    inputs = torch.cat([ids, rollout.tokens[:, :-1]], 1), mask[:, :-1], position_ids[..., :-1]
    new = trainer.wrapper.forward(*inputs, 272).log_softmax(-1)  # [64, 272, 8]
    grpo.LoRALinear.enabled = False
    ref = trainer.wrapper.forward(*inputs, 272).log_softmax(-1)
    grpo.LoRALinear.enabled = True
    d = (ref - new).gather(2, rollout.tokens[:, :, None]).squeeze(2)
    return (new.exp() * (new - ref)).sum(2), d.exp() - d - 1

# %%
steps = range(0, 21, 2)
measured = [measure_kl(trainer, step) for step in steps]  # the last one leaves the last weights
_, axes = plt.subplots(1, 2, figsize=(8, 2.4))
for i, (each, name) in enumerate(zip(axes, ("draft", "grid"))):
    exact, k3 = [[split(pair[j])[i].mean().item() for pair in measured] for j in (0, 1)]
    each.plot(steps, exact, label="exact KL")
    each.plot(steps, k3, "o", label="k3")
    each.set(xlabel="step", ylabel="mean of a code", xticks=range(0, 21, 4), title=name)
axes[0].legend()
axes[1].set_ylim(0, 1.2)
assert exact[1] < exact[5] < exact[10]  # of the grid

# %% [markdown]
"""
No. In the grid the policy moves on to the end. The log has the mean of all 272 codes, and its hump
is the draft's: nearly all of its codes are what they were, but as long as the policy wavers, a few
are such as the base model would never draw. Later the draft is what it was, and the log sees the
grid, divided by 17.

And k3 is unbiased, but not reliable. When red is nearly certain, other colours are hardly ever
drawn; if one is, its k3 is huge, perhaps beyond the plot, and as long as none is, the mean is too
low. So a `kl` that falls while the entropy goes to 0 is no policy that comes back. (The value of k3
estimates KL(policy, base), its gradient is that of KL(base, policy). Both pull the policy back.)

The loss has this KL as a second term, with the weight `--kl-coef`, which pulls the policy back to
the base model. How hard should it pull? Three values:
"""

# %%
runs = {0.01: trainer, 0.3: train("--steps 20 --kl-coef 0.3"), 3: train("--steps 20 --kl-coef 3")}
ends = {}
_, axes = plt.subplots(1, 2, figsize=(8, 2.4))
for kl_coef, run in runs.items():
    curves = [curve(run, name) for name in ("reward", "kl")]
    for each, values, name in zip(axes, curves, ("reward", "kl")):
        each.plot(range(1, 21), values, label=f"--kl-coef {kl_coef}")
        each.set(xlabel="step", ylabel=name)
    ends[kl_coef] = [values[-5:].mean() for values in curves]
    print(f"--kl-coef {kl_coef}: reward {ends[kl_coef][0]:.3f}, kl {ends[kl_coef][1]:.4f}")
axes[0].legend(loc="upper left", fontsize=8)
assert ends[0.01][0] > ends[0.3][0] + 0.05 > ends[3][0] + 0.1
assert ends[0.01][1] > ends[0.3][1] > 5 * ends[3][1]

# %% [markdown]
"""
The numbers are means of the last five steps. With the middle weight the policy learns at first as
with the smallest, until a further step would cost as much KL as it brings reward. With the largest
it is held where it was. The less you trust your reward, the more KL you want. The next section has
a reward that deserves no trust.

## 8. Spoil it

A policy learns what the reward measures, and not what you meant by it. If it finds a way to the one
without the other, it **hacks** the reward. Suppose you want calm pictures, without clutter, and
reward them for how well they compress ([`jpeg`](../examples/rewards.py)). We turn the KL off, and
add `color` with a weight of 0: it is logged, and changes nothing. Look at the pictures of steps 0,
5, 10 and 15 first:
"""

# %%
calm = train("--reward examples/rewards.py:jpeg,color=0 --kl-coef 0 --steps 15 --save-every 5")
samples = {step: read_samples(calm, step) for step in (0, 5, 10, 15)}
show(*samples.values(), titles=captions)

# %% [markdown]
"""
Calm they are. But whatever one asks for, it is the same picture. Now the numbers. In the log each
step has other prompts, which is a lot of noise. So let us also score the saved pictures, which are
always of the same prompts and random numbers:
"""

# %%
_, axes = plt.subplots(1, 2, figsize=(8, 2.4))
for each, name in zip(axes, calm.rewards):
    each.plot(range(1, 16), curve(calm, f"reward/{name}"), color="silver")
    each.set(xlabel="step", ylabel=name, xticks=[*samples], title="line: log, dots: saved pictures")
for step, pictures in samples.items():
    _, scores = grpo.compute_rewards(pictures, prompts[:8], calm.rewards)
    values = [scores[f"reward/{name}"] for name in calm.rewards]
    for each, value in zip(axes, values):
        each.plot(step, value, "ko")
    print(f"step {step}: jpeg {values[0]:.3f}, color {values[1]:.3f}")
assert curve(calm, "reward/jpeg")[-5:].mean() > curve(calm, "reward/jpeg")[:5].mean() + 0.02
assert curve(calm, "reward/color")[-5:].mean() < curve(calm, "reward/color")[:5].mean() - 0.1

# %% [markdown]
"""
The reward rises, as a reward should. Nothing in its curve warns you. What warns you are the
pictures, in which some colours take over while the reward has hardly moved, and a second reward
that is only watched.

## 9. Held-out prompts

A reward that rises on the prompts of the training proves little. So let us draw eight pictures each
for 24 prompts that were not trained on, from the base model and from the model of section 7.
"""

# %%
held_out = grpo.load_prompts("examples/make/held_out.txt")

def score(enabled):
    """Rewards of 8 pictures for each prompt, by the model with its LoRA or without -> [24, 8]."""
    grpo.LoRALinear.enabled = enabled
    seeds = range(100, 100 + len(held_out))
    rollout = trainer.wrapper.sample(held_out, 8, seeds)
    images = trainer.wrapper.decode(held_out, rollout.tokens, seeds)
    rewards, _ = grpo.compute_rewards(images, rollout.prompts, color)
    return rewards.view(-1, 8).numpy()

base, trained = score(False), score(True)

# %% [markdown]
"""
There is a way to better pictures without any training: draw k of them, and keep the one with the
highest reward. This costs k times as much for every picture that anyone wants, and training costs
once. So this **best of k** is what a trained model has to beat
([`weigh_best`](../examples/evaluate.py) finds it from eight). The bars and the band are 95 %
intervals of the mean over prompts like these, of which 24 are a sample
([`find_interval`](../examples/evaluate.py)).
"""

# %%
from examples.evaluate import find_interval, weigh_best

best = np.array([[weigh_best(scores, k) @ scores for scores in base] for k in range(1, 9)])
_, axes = plt.subplots(figsize=(5, 2.8))
low, high = np.transpose([find_interval(values) for values in best])
mean = best.mean(1)
axes.errorbar(range(1, 9), mean, [mean - low, high - mean], label="base model")
axes.axhspan(*find_interval(trained.mean(1)), color="gold", label="trained, one picture")
axes.set(xlabel="best of k", ylabel="color")
axes.legend()
low, high = find_interval(trained.mean(1) - best[-1])
print(f"trained, one picture: {trained.mean():.3f}; base, best of 8: {mean[-1]:.3f}")
print(f"difference, prompt by prompt: {low:+.3f} .. {high:+.3f}")
print(f"std within a prompt: {base.std(1).mean():.3f} before, {trained.std(1).mean():.3f} after")
assert low > 0

# %% [markdown]
"""
On average, one picture of the trained model is better than the best of eight of the base model, and
not because of which prompts were chosen, as the interval of the difference does not contain 0. Four
things it does not say. Another seed of the training gives another model. A policy that hacks its
reward passes this test, too, so look at other rewards and at the pictures. The base model still
draws eight different pictures; the trained one does not. And these prompts are easy: three for each
of eight colours, whose words this model knows and has been trained on. Those of one colour score
alike, so they tell less than 24 others would. [Other models](evaluate.md) need a harder test.

## 10. Your turn

A reward is a function of three lists, pictures, prompts and targets, and returns a number for each
picture. This one wants warm colours, those with much red and little blue. Write your own in its
place.
"""

# %%
def warm(images, prompts, targets):
    pixels = grpo.pil_to_tensor(images)  # [N, 3, H, W], from 0 to 1
    return pixels[:, 0].mean((1, 2)) - pixels[:, 2].mean((1, 2))

mine = train("--steps 10 --kl-coef 0.01", rewards={"warm": (warm, 1.0)})
show(read_samples(mine, 0), read_samples(mine, 10), titles=captions)
first, last = curve(mine, "reward")[[0, -1]]
print(f"reward {first:+.2f} in the first step, {last:+.2f} in the last")

# %% [markdown]
"""
It got what it wanted: every picture is warm now, whatever its prompt asks for. If pictures should
still follow their prompts, the reward must look at the prompts, or be added to one that does.

Now three exercises. Each has a solution, which is folded away.

**1. Dr. GRPO in one line.** [Dr. GRPO](https://arxiv.org/abs/2503.20783) does not divide by the std
of the group. Write its advantages in one line. Then take a group with rewards of 0.70, 0.71, 0.72
and 0.73 and one with 0.1, 0.4, 0.6 and 0.9: how large are the advantages of each, in GRPO and in
Dr. GRPO?

<details>
<summary>Solution</summary>

```python
def dr_grpo(rewards, group_size):
    return (rewards.view(-1, group_size) - rewards.view(-1, group_size).mean(1)[:, None]).flatten()

two_groups = torch.tensor([0.70, 0.71, 0.72, 0.73, 0.1, 0.4, 0.6, 0.9])
alike, apart = grpo.compute_advantages(two_groups, 4).split(4)
assert abs(alike.max() - apart.max()) < 0.1  # in GRPO, both count about the same

alike, apart = dr_grpo(two_groups, 4).split(4)
assert alike.max() < apart.max() / 20  # in Dr. GRPO, what hardly differs hardly counts
```
To train with it, in the folder of `grpo.py`: `git apply examples/patches/dr_grpo.patch`. (Dr. GRPO
also drops a division by the length of an answer; pictures have one length.)

</details>

**2. A group of 2 against one of 8.** Which values can the advantages of a group of 2 have? Draw 64
pictures for one prompt (by `wrapper`, as section 6 left it). Take them as one group of 64, as 8
groups of 8 and as 32 groups of 2. Which advantages are closer to those of the large group?

<details>
<summary>Solution</summary>

```python
many = wrapper.sample(["a blue bird"], group_size=64, seeds=[3])
images = wrapper.decode(["a blue bird"], many.tokens, seeds=[3])
rewards, _ = grpo.compute_rewards(images, many.prompts, color)
of_64, of_8, of_2 = [grpo.compute_advantages(rewards, size) for size in (64, 8, 2)]

# A group of 2 says which of the two is better, but not by how much: plus or minus the root of 1/2
# (or less, if the two are so close that the 1e-6 in the denominator matters).
assert abs(of_2.abs().median() - 0.5**0.5) < 0.001 and of_2.abs().max() < 0.7072

# The larger group is closer.
assert np.corrcoef(of_64, of_2)[0, 1] < np.corrcoef(of_64, of_8)[0, 1]
```

</details>

**3. A wrapper of 30 lines.** Train another kind of model with the same trainer: one that consists
of a single linear layer and draws 8 x 8 dots, each black or white. Teach it to draw light above and
dark below. The comment above [`Rollout`](../grpo.py) lists what a wrapper needs; `Rollout` and `sample_codes` help.

<details>
<summary>Solution</summary>

```python
def light_above(images, prompts, targets):
    above, below = grpo.pil_to_tensor(images).mean((1, 3)).chunk(2, dim=1)  # [N, H / 2] each
    return above.mean(1) - below.mean(1)

class Dots:
    lora_layers = "0"  # the name of the linear layer in `policy`

    def __init__(self, config):
        self.config = config
        self.policy = nn.Sequential(nn.Linear(1, 128), nn.Unflatten(1, (64, 2)))

    def compute_all_logprobs(self, prompts):  # it does not read them
        return self.policy(torch.ones(len(prompts), 1)).log_softmax(2)  # [N, 64, 2]

    @torch.no_grad()
    def sample(self, prompts, group_size, seeds):
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        rngs = [torch.Generator().manual_seed(seed) for seed in seeds]
        uniform = torch.cat([torch.rand(group_size * 64, 1, generator=rng) for rng in rngs])
        all_logprobs = self.compute_all_logprobs(prompts)
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
dots = grpo.GRPOTrainer(config, Dots(config), prompts, {"light_above": (light_above, 1.0)})
with contextlib.redirect_stdout(io.StringIO()):
    dots.train()
_, axes = plt.subplots(2)
for each, step in zip(axes, (0, 40)):
    each.imshow(Image.open(dots.out / f"samples_{step:05d}.png"))
assert curve(dots, "reward")[-1] > curve(dots, "reward")[0] + 0.3
```
[`toy.py`](../examples/toy.py) is a wrapper that reads its prompts, too.

</details>

## From here

`python grpo.py` trains the tiny GLM-Image in a terminal. The [README](../README.md) says how to
train GLM-Image itself, [settings](settings.md) explains all flags and the columns of the log,
[rewards](rewards.md) has some that are ready-made, and [changes](changes.md) has variants of the
algorithm.
"""
