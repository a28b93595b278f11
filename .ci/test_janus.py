"""Tests of janus.py, on a small Janus of random weights."""
import pytest, torch, transformers

import grpo
from conftest import perturb
from examples.janus import Janus
from examples.make import small_janus as make

PROMPTS = [grpo.Prompt(text) for text in ("red", "the green side of a blue house", "yellow")]

def load(Wrapper=Janus, **settings):
    """Unlike the maker's: random, 60 codes, and settings in generation_config."""
    torch.manual_seed(0)
    processor = make.make_processor()
    policy = make.make_policy(processor.tokenizer)
    policy.config.vq_config.update(dict(num_embeddings=60, initializer_range=0.2))
    policy.generation_config.update(temperature=1.2, pad_token_id=7)
    model = transformers.JanusForConditionalGeneration(policy.config).eval()
    model.generation_config = policy.generation_config
    return Wrapper(processor, model, grpo.Config(**dict(micro_batch_size=6) | settings))

@pytest.mark.parametrize("guidance, typed", [
    (5.0, {}), (1.5, dict(top_k=0)), (5.0, dict(top_k=7, top_p=0.8, temperature=0.7))])
def test_tokens_and_logprobs_are_those_of_generate(guidance, typed, monkeypatch):
    """With the same random numbers, by the model's own settings and a top-k of 50 if no other is typed."""
    wrapper = load(guidance=guidance, **typed)
    perturb(grpo.LoRA(wrapper.policy, wrapper.lora_layers, 4))
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

def test_the_cuda_graph_played_on_a_cpu(compare_graphs):
    """With micro-batches that are drawn one after the other."""
    wrapper = load(top_p=0.9, micro_batch_size=3)
    perturb(grpo.LoRA(wrapper.policy, wrapper.lora_layers, 4))
    compare_graphs(wrapper.sample)
