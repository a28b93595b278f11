"""Tests of janus.py, on a small Janus of random weights, and of the maker of the one that the page trains."""
from pathlib import Path

import pytest, torch, transformers

import grpo
from conftest import ROOT, first_and_last, perturb
from examples.janus import Janus
from examples.make import small_janus as make

WRAPPER = f"{ROOT}/examples/janus.py:Janus"
PROMPTS = [grpo.Prompt(text) for text in ("red", "the green side of a blue house", "yellow")]

def load(**settings):
    """Unlike the maker's: random, 60 codes, settings in generation_config, and an adapter that does something."""
    torch.manual_seed(0)
    processor = make.make_processor()
    policy = make.make_policy(processor.tokenizer)
    policy.config.vq_config.update(dict(num_embeddings=60, initializer_range=0.2))
    policy.generation_config.update(temperature=1.2, pad_token_id=7)
    model = transformers.JanusForConditionalGeneration(policy.config).eval()
    model.generation_config = policy.generation_config
    wrapper = Janus(processor, model, grpo.Config(**dict(micro_batch_size=6) | settings))
    perturb(grpo.LoRA(model, wrapper.lora_layers, 4))
    return wrapper

@pytest.mark.parametrize("guidance, typed", [
    (5.0, {}), (1.5, dict(top_k=0)), (5.0, dict(top_k=7, top_p=0.8, temperature=0.7))])
def test_tokens_and_logprobs_are_those_of_generate(guidance, typed, monkeypatch):
    """With the same random numbers `generate` draws the same, by the model's own settings and a top-k of 50 if no other
    is typed. The trainer gives them its log-probs, and their gradient: a step along it changes them as much."""
    wrapper = load(guidance=guidance, **typed)
    chats = [[dict(role="user", content=[dict(type="text", text=prompt)])] for prompt in PROMPTS[:2] for _ in range(3)]
    inputs = wrapper.processor(
        text=wrapper.processor.apply_chat_template(chats, add_generation_prompt=True), generation_mode="image",
        padding=True, padding_side="left", return_tensors="pt")
    uniform = torch.cat([torch.rand(3, 16, generator=torch.Generator().manual_seed(seed)) for seed in (8, 9)])
    drawn = []

    def draw(chances, num_samples):
        drawn.append(chances.log())
        return grpo.sample_codes(drawn[-1], uniform[:, len(drawn) - 1:len(drawn)])

    monkeypatch.setattr(torch, "multinomial", draw)
    tokens = wrapper.policy.generate(
        **inputs, generation_mode="image", do_sample=True, guidance_scale=guidance, **typed)
    expected = torch.stack(drawn, 1).gather(2, tokens[:, :, None]).squeeze(2)
    rollout = wrapper.sample(PROMPTS[:2], 3, [8, 9])
    assert torch.equal(rollout.tokens, tokens) and len(tokens.unique()) > 10
    for logprobs in (rollout.logprobs, wrapper.compute_logprobs(rollout)[0]):
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    measure = lambda: wrapper.compute_logprobs(rollout)[0].mean()
    weights = [weight for weight in wrapper.policy.parameters() if weight.requires_grad]
    gradient = torch.autograd.grad(measure(), weights)
    values = []
    for step in (1e-3, -2e-3):
        for weight, part in zip(weights, gradient):
            weight.data += step / sum([other.square().sum() for other in gradient]) * part
        values.append(measure().item())
    assert values[0] - values[1] == pytest.approx(2e-3, rel=0.02)

def test_a_sample_does_not_depend_on_what_is_drawn_with_it():
    """One prompt at a time or all are drawn, with other padding, which takes less memory or less time."""
    wrapper = load(guidance=5.0)
    sizes = []
    wrapper.encode = lambda prompts: sizes.append(len(prompts)) or Janus.encode(wrapper, prompts)
    whole = wrapper.sample(PROMPTS, 2, [4, 3, 9])
    wrapper.config.micro_batch_size = 3
    parts = wrapper.sample(PROMPTS, 2, [4, 3, 9])
    assert sizes == [6, 2, 2, 2] and parts.prompts == whole.prompts
    assert all(torch.allclose(part, all_of_it, atol=1e-5) for part, all_of_it in zip(parts[1:], whole[1:]))

def test_the_cuda_graph_played_on_a_cpu(compare_graphs):
    """With micro-batches that are drawn one after the other."""
    compare_graphs(load(top_p=0.9, micro_batch_size=3).sample)

def test_the_small_one_learns(tmp_path, monkeypatch, refuse):
    """As its page says, in fewer steps: each code is painted in its color, or the reward would not follow. Files of
    another type, DeepSeek's own and here GLM-Image's, would load as random weights with a warning."""
    assert "of type janus" in refuse("grpo", f"--wrapper {WRAPPER} --model {grpo.TINY_MODEL}/vision_language_encoder")
    monkeypatch.setattr(make, "fit_policy", lambda wrapper, steps, fit=make.fit_policy: fit(wrapper, steps // 4))
    make.main(Path("runs/janus"))
    grpo.main(f"--wrapper {WRAPPER} --model runs/janus --steps 16 --save-every 16 --lr 2e-3 --out run".split())
    first, last = first_and_last("run")
    assert first < 0.8 and last > 0.92
