"""Tests of janus.py, on a small Janus of random weights, and of the maker of the one that the page trains."""
import json, os, re, subprocess, sys
from pathlib import Path
from unittest import mock

import pytest, tokenizers, torch, transformers

import grpo
from conftest import ROOT, perturb
from examples import generate
from examples.janus import Janus
from examples.make import janus as make

WRAPPER = f"{ROOT}/examples/janus.py:Janus"
SMALL = dict(width=32, height=32, batch_size=2, group_size=2, micro_batch_size=3, lr=0.01, save_every=2,
             lora_rank=4)
PROMPTS = ["red", "the green side of a blue house"]

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Unlike the maker's: other sizes, more codes than top-k's 50, a tokenizer that adds the first mark by itself, and
    a pad token that is not the one of generation_config.json, in which there is a temperature."""
    torch.manual_seed(0)
    words = "bos eos pad unk image boi eoi filler red green blue the side of a house User Assistant".split()
    ids = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, "unk"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\w+"), "removed", invert=True)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("bos $A", special_tokens=[("bos", 0)])
    own = dict(image_token="image", boi_token="boi", eoi_token="eoi")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="bos", eos_token="eos", pad_token="pad", unk_token="unk",
        model_specific_special_tokens=own)
    processor = transformers.JanusProcessor(
        transformers.JanusImageProcessorPil(), tokenizer, num_image_tokens=16,
        chat_template="<|User|>: {{ messages[0].content[0].text }}\n\n<|Assistant|>:")
    text = dict(model_type="llama", vocab_size=len(words), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1)
    vision = dict(image_size=32, patch_size=8, num_image_tokens=16, hidden_size=16, num_hidden_layers=1,
                  num_attention_heads=2, projection_dim=32)
    vq = dict(num_embeddings=60, embed_dim=4, latent_channels=32, base_channels=32, channel_multiplier=[1, 1, 2, 1],
              num_res_blocks=1, projection_dim=32, image_token_embed_dim=32, initializer_range=0.2)
    model = transformers.JanusForConditionalGeneration(transformers.JanusConfig(
        text_config=text, vision_config=vision, vq_config=vq, image_token_id=4))
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.2, bos_token_id=0, pad_token_id=7, generation_kwargs=dict(boi_token_id=5))
    folder = tmp_path_factory.mktemp("janus")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "grpo.json").write_text(json.dumps(SMALL))
    return str(folder)

def load(folder, **settings):
    """-> the wrapper, and its LoRA, which does something."""
    wrapper = Janus.from_pretrained(folder, grpo.Config(**SMALL | settings))
    lora = grpo.LoRA(wrapper.policy, wrapper.lora_layers, 4)
    perturb(lora)
    return wrapper, lora

def read_prompts(wrapper, prompts):
    """As a user of `transformers` does it."""
    chats = [[dict(role="user", content=[dict(type="text", text=prompt)])] for prompt in prompts]
    texts = wrapper.processor.apply_chat_template(chats, add_generation_prompt=True)
    return wrapper.processor(text=texts, generation_mode="image", padding=True, padding_side="left", return_tensors="pt")

@pytest.mark.parametrize("guidance, typed", [(5.0, {}), (1.5, {}), (5.0, dict(top_k=0)), (1.5, dict(top_k=0)),
                                             (5.0, dict(top_k=7, top_p=0.8, temperature=0.7))])
def test_tokens_and_logprobs_are_those_of_generate(folder, guidance, typed):
    """With the same random numbers `generate` draws the same tokens, of padded prompts, too. The trainer gives them the
    log-probs that it drew them with. Without top-k the model's own settings and 50 hold, as there."""
    wrapper, _ = load(folder, guidance=guidance, **typed)
    uniform = torch.cat([torch.rand(3, 16, generator=torch.Generator().manual_seed(seed)) for seed in (8, 9)])
    drawn = []

    def draw(chances, num_samples):
        drawn.append(chances.log())
        return grpo.sample_codes(drawn[-1], uniform[:, len(drawn) - 1:len(drawn)])

    with mock.patch.object(torch, "multinomial", draw):
        tokens = wrapper.policy.generate(
            **read_prompts(wrapper, [prompt for prompt in PROMPTS for _ in range(3)]), generation_mode="image",
            do_sample=True, guidance_scale=guidance, **typed)
    expected = torch.stack(drawn, 1).gather(2, tokens[:, :, None]).squeeze(2)
    rollout = wrapper.sample(PROMPTS, 3, [8, 9])
    assert torch.equal(rollout.tokens, tokens) and len(tokens.unique()) > 10
    assert (rollout.allowed.sum(2) == torch.stack(drawn, 1).isfinite().sum(2)).all()
    torch.testing.assert_close(rollout.logprobs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(wrapper.compute_logprobs(rollout)[0], expected, rtol=0, atol=1e-5)

def test_both_passes_get_a_gradient(folder):
    """Log-probs and gradients are those of one plain pass for each prompt, and one for each empty one, without padding.
    A trainer without guidance is nowhere near; one whose empty pass has no gradient learns something else."""
    wrapper, lora = load(folder, guidance=5.0, top_k=0, temperature=1.0)
    rollout = wrapper.sample(PROMPTS, 2, [0, 1])
    model = wrapper.policy.model

    def compute_logits(ids, codes):
        embeddings = model.language_model.embed_tokens(ids[None])
        inputs = torch.cat([embeddings, model.generation_aligner(model.generation_embeddings(codes[None, :-1]))], 1)
        return model.generation_head(model.language_model(inputs_embeds=inputs).last_hidden_state[0, -16:])

    def score(guidance, empty_has_gradient=True):
        rows = []
        for prompt, codes in zip(rollout.prompts, rollout.tokens):
            ids = read_prompts(wrapper, [prompt]).input_ids[0]
            c = compute_logits(ids, codes)
            u = compute_logits(torch.tensor([0, *[7] * (len(ids) - 2), 5]), codes)
            u = u if empty_has_gradient else u.detach()
            rows.append((u + guidance * (c - u)).log_softmax(1).gather(1, codes[:, None])[:, 0])
        return torch.stack(rows)

    def compute_gradient(logprobs):
        return torch.cat([grad.flatten() for grad in torch.autograd.grad(logprobs.mean(), lora.weights.values())])

    logprobs, _ = wrapper.compute_logprobs(rollout)
    assert (logprobs - rollout.logprobs).abs().mean() < 1e-6  # the sampler_gap of the log
    torch.testing.assert_close(logprobs, score(5.0), rtol=0, atol=1e-5)
    assert (logprobs - score(1.0)).abs().mean() > 0.5  # the control
    gradient = compute_gradient(logprobs)
    torch.testing.assert_close(gradient, compute_gradient(score(5.0)), rtol=1e-3, atol=1e-6)
    assert (gradient - compute_gradient(score(5.0, empty_has_gradient=False))).norm() > 0.1 * gradient.norm()

def test_a_sample_does_not_depend_on_its_batch(folder):
    """Nor on padding: `red` is drawn alone, and beside a longer prompt. Pictures have the size that was asked for."""
    wrapper, _ = load(folder)
    alone, beside = wrapper.sample(["red"], 2, [3]), wrapper.sample([PROMPTS[1], "red"], 2, [4, 3])
    assert torch.equal(alone.tokens, beside.tokens[2:])
    torch.testing.assert_close(alone.logprobs, beside.logprobs[2:], rtol=0, atol=1e-5)
    assert [image.size for image in wrapper.decode(["red"], alone.tokens, [3])] == [(32, 32)] * 2

def test_the_vision_tower_stays_on_the_cpu(folder, monkeypatch):
    """It is a fifth of the model with 1 B weights, and reads pictures, which nobody asks for here."""
    monkeypatch.setattr(grpo, "DEVICE", torch.device("meta"))
    model = load(folder)[0].policy.model
    places = {name: {weight.device.type for weight in part.parameters()} for name, part in model.named_children()}
    assert {name for name in places if places[name] == {"cpu"}} == {"vision_model", "aligner"}
    assert all(len(place) == 1 for place in places.values())

@pytest.mark.parametrize("typed, told", [("--width 64", "draws 32 x 32 pixels"), ("--model {other}", "of type janus"),
                                         ("--model no-such/model", "--model no-such/model:")])
def test_bad_input_gets_one_line(folder, typed, told, tmp_path, capsys, monkeypatch):
    """DeepSeek's own files are of another type, and would load as random weights with a warning."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text('{"model_type": "multi_modality"}')
    flags = ["--wrapper", WRAPPER, "--model", folder, "--out", f"{tmp_path}/run", "--width", "32", "--height", "32"]
    with pytest.raises(SystemExit, match="2"):
        grpo.main([*flags, *typed.format(other=tmp_path / "other").split()])
    out, error = capsys.readouterr()
    assert re.fullmatch(r"\S+: error: .*\n", error) and told in error and not (tmp_path / "run").exists()

def read_adapter(run):
    return torch.load(Path(run, "checkpoint.pt"), weights_only=True)["adapter"]

@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """Run `whole` has four steps, `parts` two, to be gone on with."""
    runs = tmp_path_factory.mktemp("runs")
    (runs / "p.txt").write_text("red\n" + "\n".join(PROMPTS[1:] * 2))
    flags = ["--wrapper", WRAPPER, "--model", folder, "--prompts", f"{runs}/p.txt"]
    grpo.main([*flags, "--steps", "4", "--out", f"{runs}/whole"])
    grpo.main([*flags, "--steps", "2", "--out", f"{runs}/parts"])
    return runs

def test_a_run_goes_on_bit_for_bit(runs, tmp_path, monkeypatch):
    """From another directory, by the run's folder alone. Guidance, which is in its config.json, is part of the policy."""
    monkeypatch.chdir(tmp_path)
    grpo.main(["--resume", str(runs / "parts"), "--steps", "4"])
    whole, parts = read_adapter(runs / "whole"), read_adapter(runs / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)

def test_programs_work_on_its_runs(runs, run):
    """The map of --change has a guided policy beside the guided base model, as the KL has."""
    assert run("evaluate", f"{runs}/whole --steps 0 4 --prompts {runs}/p.txt")[0] == 0
    assert run("plot", f"{runs}/whole --film film.png")[0] == 0
    code, out, error = run("generate", f"{runs}/whole --prompt red green --samples 3 --change")
    assert code == 0, error
    new, base = [load(grpo.parse_args(["--resume", f"{runs}/whole"]).model) for _ in range(2)]
    new[1].load(read_adapter(runs / "whole"))
    base[1].enabled = False
    rollout = new[0].sample(["red", "green"], 3, [0, 1])
    kl = new[0].compute_logprobs(rollout)[0] - base[0].compute_logprobs(rollout)[0]  # [6, 16]
    change = generate.compute_change(*new, rollout)
    torch.testing.assert_close(change, kl.detach(), rtol=0, atol=1e-5)
    assert change.abs().mean() > 0.05 and f"  {change[:3].mean().item():+.4f} on average: red\n" in out

def test_two_processes_do_what_one_does(folder, runs, tmp_path):
    flags = ["--wrapper", WRAPPER, "--model", folder, "--prompts", f"{runs}/p.txt", "--steps", "4", "--out", "two"]
    process = subprocess.run(
        [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split(), ROOT / "grpo.py", *flags],
        cwd=tmp_path, env=os.environ | dict(PYTHONPATH=os.pathsep.join(sys.path)), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    whole, two = read_adapter(runs / "whole"), read_adapter(tmp_path / "two")
    torch.testing.assert_close(two, whole, rtol=0, atol=1e-5)

def test_the_small_one_learns(tmp_path, monkeypatch):
    """As its page says. The painter paints each code in its colour, whatever is beside it: where a fitted one did not,
    the reward did not follow the codes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["janus.py"])
    make.main()
    grpo.main(["--wrapper", WRAPPER, "--model", "runs/janus", "--out", "run"])
    rewards = [json.loads(line)["reward"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[:5]) / 5 < 0.8 and sum(rewards[-5:]) / 5 > 0.92
    wrapper = Janus.from_pretrained("runs/janus", grpo.parse_args(["--resume", "run"]))
    codes = torch.cat([torch.randint(8, (8, 16)), torch.arange(8)[:, None].expand(8, 16)])
    painted = grpo.pil_to_tensor(wrapper.decode(["red"], codes, [0]))  # [16, 3, 32, 32]
    squares = torch.nn.functional.avg_pool2d(painted, 8).flatten(2).movedim(1, 2)
    assert (squares - make.PALETTE[codes]).abs().max() < 0.01
