"""Tests of janus.py, on a small Janus of random weights, and of the maker of the one that the page trains."""
import sys
from pathlib import Path
from unittest import mock

import pytest, tokenizers, torch, transformers

import grpo
from conftest import ROOT, first_and_last, perturb
from examples.janus import Janus
from examples.make import small_janus as make

WRAPPER = f"{ROOT}/examples/janus.py:Janus"
SMALL = dict(width=32, height=32, micro_batch_size=3)
PROMPTS = ["red", "the green side of a blue house"]

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Unlike the maker's: random, more codes than top-k's 50, a tokenizer that adds the first mark by itself, and a pad
    token that is not the one of generation_config.json, in which there is a temperature."""
    torch.manual_seed(0)
    processor = make.make_processor()
    processor.chat_template = "{{ messages[0].content[0].text }}"
    bos = processor.tokenizer.bos_token_id
    processor.tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<|tiny_bos|> $A", special_tokens=[("<|tiny_bos|>", bos)])
    small = make.make_policy(processor.tokenizer)
    small.config.vq_config = transformers.JanusVQVAEConfig(
        num_embeddings=60, embed_dim=4, latent_channels=32, base_channels=32, channel_multiplier=[1, 1, 2, 1],
        num_res_blocks=1, num_patches=4, projection_dim=64, image_token_embed_dim=64, initializer_range=0.2)
    model = transformers.JanusForConditionalGeneration(small.config)
    model.generation_config = small.generation_config
    model.generation_config.update(temperature=1.2, pad_token_id=7)
    folder = tmp_path_factory.mktemp("janus")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)

def load(folder, **settings):
    """-> the wrapper, and its LoRA, which does something."""
    wrapper = Janus.from_pretrained(folder, grpo.Config(**SMALL | settings))
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, 4)
    perturb(lora)
    return wrapper, lora

@pytest.mark.parametrize("guidance, typed", [
    (5.0, {}), (1.5, {}), (1.5, dict(top_k=0)), (5.0, dict(top_k=7, top_p=0.8, temperature=0.7))])
def test_tokens_and_logprobs_are_those_of_generate(folder, guidance, typed):
    """With the same random numbers `generate` draws the same tokens, of padded prompts, too. The trainer gives them the
    log-probs that it drew them with. Without top-k the model's own settings and 50 hold, as there."""
    wrapper, _ = load(folder, guidance=guidance, micro_batch_size=6, **typed)
    chats = [[dict(role="user", content=[dict(type="text", text=prompt)])] for prompt in PROMPTS for _ in range(3)]
    inputs = wrapper.processor(
        text=wrapper.processor.apply_chat_template(chats, add_generation_prompt=True), generation_mode="image",
        padding=True, padding_side="left", return_tensors="pt")
    uniform = torch.cat([torch.rand(3, 16, generator=torch.Generator().manual_seed(seed)) for seed in (8, 9)])
    drawn = []

    def draw(chances, num_samples):
        drawn.append(chances.log())
        return grpo.sample_codes(drawn[-1], uniform[:, len(drawn) - 1:len(drawn)])

    with mock.patch.object(torch, "multinomial", draw):
        tokens = wrapper.policy.generate(
            **inputs, generation_mode="image", do_sample=True, guidance_scale=guidance, **typed)
    expected = torch.stack(drawn, 1).gather(2, tokens[:, :, None]).squeeze(2)
    rollout = wrapper.sample(PROMPTS, 3, [8, 9])
    assert torch.equal(rollout.tokens, tokens) and len(tokens.unique()) > 10
    for logprobs in (rollout.logprobs, wrapper.compute_logprobs(rollout)[0]):
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)

def test_both_passes_get_a_gradient(folder):
    """It is that of the log-probs that are compared above: a step along it changes them as much. If the empty pass has
    none, the trainer learns something else; without guidance (the control) the log-probs are nowhere near."""
    wrapper, lora = load(folder, guidance=5.0, top_k=0, temperature=1.0)
    rollout = wrapper.sample(PROMPTS, 2, [0, 1])
    weights = [*lora.weights.values()]
    logprobs, _ = wrapper.compute_logprobs(rollout)
    gradient = torch.autograd.grad(logprobs.mean(), weights)
    size = sum([part.square().sum() for part in gradient])

    def move(step):
        for weight, part in zip(weights, gradient):
            weight.data += step / size * part
        return wrapper.compute_logprobs(rollout)[0].mean().item()

    assert move(1e-3) - move(-2e-3) == pytest.approx(2e-3, rel=0.02)
    wrapper.config.guidance = 1.0
    assert (wrapper.compute_logprobs(rollout)[0] - logprobs).abs().mean() > 0.5

@pytest.mark.parametrize("guidance", [1.5, 5.0])
def test_a_sample_does_not_depend_on_what_is_drawn_with_it(folder, guidance):
    """Nor on padding: one prompt at a time, two, or all are drawn, which takes less memory or less time. Random numbers
    or a cache that parts have in common would show. Pictures have the size that was asked for."""
    wrapper, _ = load(folder, guidance=guidance, micro_batch_size=10)
    prompts, seeds = [*PROMPTS, "blue", "a red thing", "green"], [4, 3, 9, 3, 5]
    with mock.patch.object(Janus, "sample_together", autospec=True, side_effect=Janus.sample_together) as together:
        whole = wrapper.sample(prompts, 2, seeds)
        assert together.call_count == 1 and whole.prompts[::2] == prompts
        for wrapper.config.micro_batch_size, calls in ((1, 5), (5, 3)):
            together.reset_mock()
            parts = wrapper.sample(prompts, 2, seeds)
            assert together.call_count == calls and parts.prompts == whole.prompts
            assert torch.equal(parts.tokens, whole.tokens) and torch.equal(parts.allowed, whole.allowed)
            torch.testing.assert_close(parts.logprobs, whole.logprobs, rtol=0, atol=1e-5)
    assert [image.size for image in wrapper.decode(["green"], whole.tokens[8:], [5])] == [(32, 32)] * 2

def test_the_cuda_graph_played_on_a_cpu(folder, compare_graphs):
    """With micro-batches that are drawn one after the other."""
    compare_graphs(load(folder, top_p=0.9)[0].sample)

def test_the_vision_tower_stays_on_the_cpu(folder, monkeypatch):
    """It is a fifth of the model with 1 B weights, and reads pictures, which nobody asks for here."""
    monkeypatch.setattr(grpo, "DEVICE", torch.device("meta"))
    parts = load(folder)[0].policy.model.named_children()
    assert {name for name, part in parts if next(part.parameters()).is_cpu} == {"vision_model", "aligner"}

@pytest.mark.parametrize("typed, told", [("--width 64", "draws 32 x 32 pixels"), ("--model other", "of type janus"),
                                         ("--model no-such/model", "--model no-such/model:")])
def test_bad_input_gets_one_line(folder, typed, told, refuse, monkeypatch):
    """DeepSeek's own files are of another type, and would load as random weights with a warning."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("other").mkdir()
    Path("other/config.json").write_text('{"model_type": "multi_modality"}')
    assert told in refuse("grpo", f"--wrapper {WRAPPER} --model {folder} --out run --width 32 --height 32 {typed}")

def test_the_small_one_learns(tmp_path, monkeypatch):
    """As its page says, in fewer steps; where the painter does not paint each code in its colour, the reward does not
    follow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["small_janus.py"])
    monkeypatch.setattr(make, "fit_policy", lambda wrapper, steps, fit=make.fit_policy: fit(wrapper, steps // 3))
    make.main()
    grpo.main(f"--wrapper {WRAPPER} --model runs/janus --steps 24 --save-every 24 --out run".split())
    first, last = first_and_last("run")
    assert first < 0.8 and last > 0.92
    wrapper = Janus.from_pretrained("runs/janus", grpo.parse_args(["--resume", "run"]))
    codes = torch.cat([torch.randint(8, (8, 16)), torch.arange(8)[:, None].expand(8, 16)])  # mixed, and single
    painted = grpo.pil_to_tensor(wrapper.decode(["red"], codes, [0]))  # [16, 3, 32, 32]
    squares = torch.nn.functional.avg_pool2d(painted, 8).flatten(2).movedim(1, 2)
    assert (squares - make.PALETTE[codes]).abs().max() < 0.01
