"""What bf16 does to GLM-Image's AR half, and what a learning rate does to it, with random weights.

    python -m examples.precision updates                            # on a CPU, in some minutes
    python -m examples.precision updates --layers 3 6 12 24 40      # on a GPU with 80 GB
    python -m examples.precision updates --model janus --layers 24  # Janus-Pro-1B; also janus-7b
    python -m examples.precision order    # how far log-probs move if sums have another order

`updates`: layers have their real sizes. Adam's first step moves every weight by the learning rate,
whatever its gradient is. So B = lr * sign(-gradient) here, for a group with random rewards. The
true change of the log-probs is that in fp32, from the same weights, tokens and B.
"""
import argparse, sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of grpo.py
import grpo  # before torch, which reads when it is imported how threads are to wait
import torch
import torch.nn.functional as F
import transformers

from examples import janus, measure
from examples.make import small_janus, tiny
from examples.measure import print_head, print_row

RATES = [1e-6, 1e-5, 5e-5, 2e-4]
FLOOR = 1e-6  # a step whose true kl is 0
INIT = 0.02  # std of the weights; at 0.04 forty layers are chaotic, and no update is right
PROMPT = "a red fox on a wall beside a yellow door"

def make_glm_image(layers, group_size):
    """-> a wrapper of GLM-Image whose AR half has its real widths. It writes 16 + 64 tokens."""
    pipe = tiny.make_models(grpo.COLORS)
    pipe.processor._get_target_shape = lambda height, width: (8, 8, 4, 4)  # a small draft
    pipe.transformer.register_to_config(prior_vq_quantizer_codebook_size=measure.V)
    config = pipe.vision_language_encoder.config
    config.text_config = transformers.GlmImageTextConfig(
        num_hidden_layers=layers, vocab_size=measure.V, pad_token_id=0, initializer_range=INIT,
        rope_parameters=dict(rope_theta=1e4, partial_rotary_factor=0.5))
    with grpo.DEVICE:
        pipe.vision_language_encoder = transformers.GlmImageForConditionalGeneration(config)
    pipe.vision_language_encoder.bfloat16()
    return grpo.GLMImageWrapper(pipe, grpo.Config(
        width=256, height=256, group_size=group_size, micro_batch_size=group_size, top_k=0,
        top_p=0.75, temperature=16.5 * INIT, offload="off"))  # some codes stand out

def make_janus(billions, layers, group_size):
    """-> a wrapper of Janus-Pro with its real widths. It writes 576 tokens."""
    sizes = measure.JANUS[billions]
    width = sizes["hidden_size"]
    config = transformers.JanusConfig(
        text_config=sizes | dict(
            num_hidden_layers=layers, vocab_size=1000, initializer_range=INIT),
        vq_config=dict(image_token_embed_dim=width, projection_dim=width))
    with grpo.DEVICE:
        policy = transformers.JanusForConditionalGeneration(config).bfloat16()
    policy.generation_config.pad_token_id = 0
    settings = janus.Janus.defaults | dict(group_size=group_size, top_k=0)
    return janus.Janus(small_janus.make_processor(), policy, grpo.Config(**settings))

def make(model, layers, group_size):
    if model == "glm-image":
        return make_glm_image(layers, group_size)
    return make_janus(7 if model == "janus-7b" else 1, layers, group_size)

def two_roundings(lora, linear, inputs):
    """LoRA as peft computes it, in the place of grpo.LoRA.forward."""
    output = F.linear(inputs, linear.weight, linear.bias)
    A, B = lora.cast(linear, inputs.dtype)
    return output + 2 * (inputs @ A.T @ B.T)

def merged(lora, linear, inputs):
    """The adapters merged into the weights in fp32, which are rounded afterwards."""
    A, B = lora.pairs[linear]
    weight = (linear.weight.float() + 2 * B @ A).to(inputs.dtype)
    return F.linear(inputs, weight, linear.bias)

class Experiment:
    """A rollout in bf16, and adapters whose B is set to any multiple of Adam's first step. The
    policy is in fp32 afterwards, where a backward pass takes a CPU much less time."""
    def __init__(self, wrapper, group_size):
        self.wrapper = wrapper
        rollout = wrapper.sample([PROMPT], group_size, [0])
        self.parts = [rollout.part(slice(i, i + 1)) for i in range(group_size)]  # saves memory
        torch.manual_seed(0)
        self.lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, rank=32)
        wrapper.policy.float()
        advantages = grpo.compute_advantages(torch.randn(group_size), group_size)
        for part, A in zip(self.parts, advantages.split(1)):
            logprobs, _ = wrapper.compute_logprobs(part)
            loss, _ = grpo.compute_grpo_loss(logprobs, logprobs.detach(), A)
            loss.backward()
        self.adam = {B: -B.grad.sign() for _, B in self.lora.pairs.values()}
        self.random = {B: torch.randn_like(B).sign() for B in self.adam}

    @torch.no_grad()
    def score(self, step, signs):
        """Log-probs with B = step * signs -> [N, T], fp64."""
        for B, sign in signs.items():
            B.copy_(step * sign)
        parts = [self.wrapper.compute_logprobs(part)[0].double() for part in self.parts]
        return torch.cat(parts).cpu()

    def change(self, rates, form):
        """By how much log-probs change at each rate, and by a step of random signs that is too
        small to matter -> tensors [N, T]. `form` takes the place of LoRA.forward."""
        with mock.patch.object(grpo.LoRA, "forward", form):
            self.lora.attach()
            base = self.score(0.0, self.adam)
            changes = [self.score(rate, self.adam) - base for rate in rates]
            return changes, self.score(FLOOR, self.random) - base

def compute_kl(change):
    """k3 against the policy before the step, a mean over tokens: the `kl` of the log."""
    return (torch.expm1(-change) + change).mean().item()

def compute_slope(change, truth):
    """Of the regression of a change on the true one -> itself, its standard error."""
    slope = (change * truth).sum() / truth.square().sum()
    rest = (change - slope * truth).square().mean() / truth.square().sum()
    return slope.item(), rest.sqrt().item()

def measure_layers(wrapper, layers, group_size, rates):
    """Prints the rows for one depth."""
    experiment = Experiment(wrapper, group_size)
    truths, still = experiment.change(rates, grpo.LoRA.forward)
    wrapper.policy.bfloat16()  # the same weights: they came from bf16
    two, floor_two = experiment.change(rates, two_roundings)
    one, floor_one = experiment.change(rates, grpo.LoRA.forward)
    into, floor_into = experiment.change(rates, merged)
    for rate, truth, *changes in zip(rates, truths, two, one, into):
        slopes = ["%.2f ± %.2f" % compute_slope(change, truth) for change in changes]
        kls = [f"{compute_kl(change):.2g}" for change in (truth, *changes)]
        print_row(layers, f"{rate:g}", f"{truth.abs().mean():.4f}", *slopes, *kls)
    kls = [f"{compute_kl(change):.2g}" for change in (still, floor_two, floor_one, floor_into)]
    print_row(layers, f"{FLOOR:g}, random signs", "", "", "", "", *kls)

# --- How far bf16 rounds at depth -----------------------------------------------
DEPTHS = [(10, 0.04, 16), (20, 0.04, 16), (40, 0.04, 16), (40, 0.08, 16),  # layers, init, bits
          (40, 0.04, 32)]

@torch.no_grad()
def measure_order(linear=F.linear):
    """|Log-prob differences| of a pass to one that sums in reverse order: mean, 99th percentile,
    largest, and the share of ratios that are off by more than 0.2; then the largest difference to
    an equal pass. A quarter as wide."""
    prompts = ["green", "a red fox on a wall beside a yellow door"]
    print_head("layers | init | bits | mean | 99 % | largest | off | again")
    for layers, init, bits in DEPTHS:
        pipe = tiny.make_models(grpo.COLORS)
        pipe.processor._get_target_shape = lambda height, width: (8, 8, 4, 4)  # a small draft
        pipe.transformer.register_to_config(prior_vq_quantizer_codebook_size=measure.V)
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
        rollout = wrapper.sample(prompts, 4, [0, 1])
        first, again = [wrapper.compute_logprobs(rollout)[0] for _ in range(2)]
        with mock.patch.object(F, "linear", lambda x, w, b: linear(x.flip(-1), w.flip(-1), b)):
            gap = wrapper.compute_logprobs(rollout)[0] - first
        cells = [gap.abs().mean(), gap.abs().quantile(0.99), gap.abs().max(),
                 (gap.expm1().abs() > 0.2).float().mean(), (again - first).abs().max()]
        print_row(layers, str(init), bits, *[f"{cell.item():.2g}" for cell in cells])

def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=["updates", "order"], help="which to print")
    parser.add_argument("--model", choices=["glm-image", "janus", "janus-7b"], default="glm-image")
    parser.add_argument("--layers", type=int, nargs="+", default=[1])
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="learning rates")
    args = parser.parse_args()
    if args.table is None:
        parser.print_help()
        parser.exit()
    transformers.logging.set_verbosity_error()
    if args.table == "order":
        measure_order()
        parser.exit()
    print_head("layers | lr | true change | slope, two roundings | slope, one | slope, merged | "
               "true kl | kl, two | kl, one | kl, merged")
    for layers in args.layers:
        torch.manual_seed(0)
        wrapper = make(args.model, layers, args.group_size)
        measure_layers(wrapper, layers, args.group_size, args.rates)

if __name__ == "__main__":
    main()
