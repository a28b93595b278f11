"""Tests of grpo.py and examples/patches against TRL 1.16. Both sides do the same arithmetic in a different order, so
nothing but rounding may come between them. Controls are other settings, for which a comparison must fail by far."""
import os, tempfile
from unittest import mock

os.environ |= dict(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")  # or `rollout_func` warns

import datasets, peft, pytest, tokenizers, torch, transformers, trl
import numpy as np
from PIL import Image

import grpo
from conftest import load

V, T = 32, 5  # codes, tokens of a sample
ROUNDING = {torch.float64: 1e-15, torch.float32: 5e-7}
FAR = 1e-3

# For each patch of the loss: --clip-range here, TRL's options.
OPTIONS = {
    "clip_higher": (0.2, dict(epsilon_high=0.28)),
    "gspo": (3e-4, dict(importance_sampling_level="sequence", epsilon=3e-4)),
    "cispo": (0.2, dict(loss_type="cispo", epsilon_high=1 + 0.2)),  # TRL's number is the cap itself
    "unbiased_kl": (0.2, dict(use_bias_correction_kl=trl.GRPOConfig.use_bias_correction_kl)),  # its default
    "truncated_is": (0.2, dict(engine=True, vllm_importance_sampling_mode="token_truncate",
                               vllm_importance_sampling_clip_max=2.0)),
}
# For each patch of the advantages: TRL's options.
SCALES = {"dr_grpo": dict(scale_rewards="none"), "batch_std": dict(scale_rewards="batch"),
          "gdpo": dict(multi_objective_aggregation="normalize_then_sum")}

# Both rewards and their weights are so large that what is added to a std, 1e-6 here and 1e-4 in TRL, does not matter.
WEIGHTS = [2.0**20, -2.0**21]

def count(samples, prompts=None, targets=None):
    """The sum of the codes of each sample: of an image, which has them as pixels, or a list."""
    return [2.0**20 * np.asarray(sample).sum() for sample in samples]

def first(samples, prompts=None, targets=None):
    return [2.0**20 * np.asarray(sample).flat[0] for sample in samples]

def make_llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=V, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.3)).requires_grad_(False)

def tokenize(prompts):
    return [[int(word) for word in prompt.split()] for prompt in prompts]

class Llama:
    """A prompt such as "3 1 4" is the ids of its tokens, and the pixels of an image are its codes."""
    lora_layers = r".*\.[qv]_proj"

    def __init__(self):
        self.policy = make_llama()
        self.rollouts = []  # of training

    def sample(self, prompts, group_size, seeds):
        """Draws higher codes more often, whatever the policy: like a program that has other weights."""
        prompts = [prompt for prompt in prompts for _ in range(group_size)]
        logprobs = torch.linspace(0, 1, V).log_softmax(0)
        rng = torch.Generator().manual_seed(seeds[0])
        tokens = torch.multinomial(logprobs.exp(), len(prompts) * T, True, generator=rng).view(-1, T)
        rollout = grpo.Rollout(prompts, tokens, logprobs[tokens], None)
        self.rollouts += [rollout] * (group_size > 1)  # not the pictures that are saved
        return rollout

    def decode(self, prompts, tokens, seeds):
        return [Image.fromarray(row[None].byte().numpy()) for row in tokens]

    def compute_logprobs(self, rollout):
        ids = torch.tensor(tokenize(rollout.prompts))
        logits = self.policy(torch.cat([ids, rollout.tokens], 1)).logits[:, ids.shape[1] - 1:-1]
        entropy = torch.distributions.Categorical(logits=logits.detach()).entropy()
        return logits.log_softmax(2).gather(2, rollout.tokens[:, :, None]).squeeze(2), entropy

def make_peer(prompts=("1 2",), rollout_func=None, engine=False, **options):
    """TRL's trainer, with peft. With `engine` it believes that vLLM drew the samples."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"0": 0}, "0"))  # never used
    own = dict(use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", save_strategy="no",
               disable_tqdm=True, max_completion_length=T, use_bias_correction_kl=False, reward_weights=WEIGHTS)
    rewards = [lambda completion_ids, **_: count(completion_ids), lambda completion_ids, **_: first(completion_ids)]
    peer = trl.GRPOTrainer(make_llama(), rewards, trl.GRPOConfig(f"{tempfile.gettempdir()}/unused", **own | options),
        datasets.Dataset.from_dict(dict(prompt=list(prompts))), processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="0", eos_token="0"),
        peft_config=peft.LoraConfig(r=4, lora_alpha=8, target_modules=Llama.lora_layers), rollout_func=rollout_func)
    if engine:
        peer.use_vllm = True
        peer.vllm_generation = mock.Mock()  # takes the new weights
        peer._last_loaded_step = None
    return peer

def prepare(peer, logprobs):
    """What TRL's loss gets from a rollout with these log-probs [N, T]: advantages, masks, .."""
    ones = [[1] * T] * len(logprobs)
    peer.rollout_func = lambda *_: dict(prompt_ids=ones, completion_ids=ones, logprobs=logprobs.tolist())
    return peer._generate_and_score_completions([dict(prompt="1 2") for _ in ones])

def draw(rows, dtype, spread):
    """Log-probs and advantages; `spread` is the size of the log-ratios."""
    rng = torch.Generator().manual_seed(rows)
    old = -5 * torch.rand(rows, T, dtype=dtype, generator=rng)
    new, ref, sampler = (old + size * torch.randn(rows, T, dtype=dtype, generator=rng) for size in (spread, 0.3, 1))
    return dict(new=new, old=old, ref=ref, sampler=sampler.float().to(dtype),  # TRL holds these in fp32
                advantages=torch.randn(rows, dtype=dtype, generator=rng))

def collect(loss, new, kl, clip_frac):
    """The gradient is multiplied by N * T, so that it has the size of a single token's."""
    gradient, = torch.autograd.grad(loss, new)
    return dict(loss=loss.detach(), gradient=gradient * new.numel(), kl=kl, clip_frac=clip_frac)

def ours(data, module=grpo, clip_range=0.2, kl_coef=0.1, **more):
    new = data["new"].clone().requires_grad_()
    loss, metrics = module.compute_grpo_loss(
        new, data["old"], data["advantages"], clip_range, data["ref"], kl_coef, **more)
    return collect(loss, new, metrics["kl"], metrics["clip_frac"])

def theirs(data, beta=0.1, **options):
    new = data["new"].clone().requires_grad_()
    peer = make_peer(num_generations=2, beta=beta, **options)
    scored = data["old"]
    peer._get_per_token_logps_and_entropies = lambda *_, **__: (scored, torch.zeros_like(new), None)
    peer.current_gradient_accumulation_steps = 1  # `train` would set it
    inputs = prepare(peer, data["sampler"])
    scored = new
    loss = peer._compute_loss(peer.model, inputs | dict(
        advantages=data["advantages"], old_per_token_logps=data["old"], ref_per_token_logps=data["ref"]))
    metrics = peer._metrics["train"]
    clip_frac, = metrics["clip_ratio/region_mean"] or [None]  # CISPO has another metric
    return collect(loss, new, metrics["kl"][0], clip_frac)

def distance(a, b):
    """The largest difference of two results, relative where a number is above 1."""
    names = [name for name in a if b[name] is not None]
    x, y = (torch.cat([torch.as_tensor(part[name]).double().flatten() for name in names]) for part in (a, b))
    return ((x - y).abs() / y.abs().clamp(min=1)).max().item()

@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("spread", [0.3, 3])
@pytest.mark.parametrize("rows", [4, 192])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_loss_and_gradient(dtype, spread, rows, loss_type):
    """With samples of one length, TRL's means are the same."""
    data = draw(rows, dtype, spread)
    peer = theirs(data, loss_type=loss_type)
    assert distance(ours(data), peer) < ROUNDING[dtype]
    for control in (ours(data, clip_range=0.5), ours(data, kl_coef=0.2),
                    ours(data | dict(advantages=-data["advantages"])), ours(data | dict(old=data["ref"]))):
        assert distance(control, peer) > FAR
    still = data | dict(advantages=torch.zeros(rows, dtype=dtype))  # the KL alone
    assert distance(ours(still, kl_coef=1), theirs(still, beta=1.0, loss_type=loss_type)) < ROUNDING[dtype]

@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name, spread", [(name, spread) for name in OPTIONS for spread in (0.3, 3)]
                         + [("unbiased_kl", 12)])  # where grpo.py clamps k3
def test_patch_of_the_loss(apply, name, spread, dtype):
    """It does what TRL's option does."""
    data = draw(192, dtype, spread)
    data["new"] = torch.minimum(data["new"], data["old"] + 19)  # grpo.py clamps the log of a ratio at 20
    clip_range, options = OPTIONS[name]
    more = dict(sampler_logprobs=data["sampler"]) if name == "truncated_is" else {}
    patched, peer = ours(data, load(apply(name)), clip_range, **more), theirs(data, **options)
    assert distance(patched, peer) < ROUNDING[dtype]
    assert distance(ours(data, clip_range=clip_range), peer) > FAR
    assert distance(patched, theirs(data, epsilon=clip_range)) > FAR

@pytest.fixture
def in_fp64():
    """All but our adapters: in fp32, Adam would make much of the rounding of a gradient that is almost 0."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

def make_trainer(module, **settings):
    own = dict(model="llama", steps=3, group_size=4, batch_size=2, micro_batch_size=4, num_iterations=2,
               lr=0.03, warmup_steps=0, kl_coef=0.1, max_grad_norm=0.5, lora_rank=4)
    prompts = ["3 1 4", "1 5 9", "2 6 5"]
    rewards = dict(count=(count, WEIGHTS[0]), first=(first, WEIGHTS[1]))
    return module.GRPOTrainer(module.Config(**own | settings), Llama(), prompts, rewards)

def train_peer(rollouts, adapter, **options):
    """TRL's trainer with the same rollouts, from the same adapter -> its adapter in the end, its log."""
    left = iter(rollouts)

    def replay(prompts, peer):
        rollout = next(left)
        assert prompts == rollout.prompts
        return dict(prompt_ids=tokenize(prompts), completion_ids=rollout.tokens.tolist(),
                    logprobs=rollout.logprobs.tolist())

    own = dict(max_steps=6, num_generations=4, per_device_train_batch_size=4, gradient_accumulation_steps=2,
               num_iterations=2, learning_rate=0.03, lr_scheduler_type="constant", beta=0.1,
               max_grad_norm=0.5, logging_steps=1, shuffle_dataset=False)
    prompts = [prompt for rollout in rollouts for prompt in rollout.prompts[::4]]
    peer = make_peer(prompts, rollout_func=replay, **own | options)
    peft.set_peft_model_state_dict(peer.model, adapter)
    peer.train()
    return peft.get_peft_model_state_dict(peer.model), peer.state.log_history

@pytest.mark.parametrize("name", [None, *OPTIONS, *SCALES])
def test_three_steps_of_whole_trainers(apply, in_fp64, tmp_path, name):
    """What a loss does not show: order, shares of micro-batches, old log-probs, reference, LoRA, clipping, Adam."""
    clip_range, options = OPTIONS.get(name, (0.2, SCALES.get(name, {})))
    trainer = make_trainer(load(apply(name)) if name else grpo, clip_range=clip_range, out=f"{tmp_path}/run")
    last = trainer.lora.weights
    start = {layer: weight.detach().clone() for layer, weight in last.items()}
    trainer.train()

    def compare(**options):
        """How far apart the weights of each layer end, as a share of how far they moved; TRL's log."""
        adapter, log = train_peer(trainer.wrapper.rollouts, start, **options)
        assert adapter.keys() == start.keys()
        return [((adapter[layer] - last[layer]).norm() / (last[layer] - start[layer]).norm()).item()
                for layer in start], log

    shares, log = compare(**options)
    assert max(shares) < 1e-5
    names = dict(loss="loss", kl="kl", entropy="entropy", grad_norm="grad_norm", clip_frac="clip_ratio/region_mean")
    for row, updates in zip(trainer.history, [log[:2], log[2:4], log[4:6]], strict=True):
        means = {ours: np.mean([update[theirs] for update in updates])
                 for ours, theirs in names.items() if theirs in log[0]}
        assert distance(means, row) < 1e-5
    for control in [{}] if name else [dict(beta=0.2), dict(epsilon=0.1), dict(reward_weights=WEIGHTS[::-1])]:
        assert min(compare(**control)[0]) > 1e-2
