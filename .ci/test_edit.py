"""Tests of examples/edit.py, mostly against the stock pipeline and `transformers`."""
from pathlib import Path

import numpy as np, pytest, torch
from PIL import Image

import grpo
from conftest import ROOT, read_rows
from examples.edit import EditWrapper
from examples.make import squares, tiny
WIDTH, HEIGHT = 160, 96  # not square

def make_wrapper():
    """The small model with random weights. Its DiT sees the place of a square."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS, num_hidden_layers=2, initializer_range=0.1)
    tiny.fit_vision(pipe, squares.PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    for weight in (*pipe.transformer.parameters(), *pipe.vae.encoder.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    settings = tiny.SETTINGS | dict(width=WIDTH, height=HEIGHT, decode_steps=2, guidance=1.5)
    return EditWrapper(pipe, grpo.Config(**settings, temperature=1.0, top_p=1.0))

def make_prompts(folder, *sizes):
    """An instruction and a source of each size; the instructions are of several lengths."""
    for i, (width, height) in enumerate(sizes):
        pixels = torch.randint(256, (height // 32, width // 32, 3), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.byte().numpy()).resize((width, height), Image.BICUBIC).save(folder / f"{i}.png")
    return [grpo.Prompt("paint the red squares blue" + " now" * 3 * i, folder / f"{i}.png") for i in range(len(sizes))]

@torch.no_grad()
def test_policy_reads_what_transformers_would(tmp_path):
    """Ids, positions, logits, and the sampler's log-probs: one prompt is padded, the other is read in pieces of 64."""
    wrapper = make_wrapper()
    prompts = make_prompts(tmp_path, (128, 64), (256, 352))
    contents = [[dict(type="image", url=prompt.target), dict(type="text", text=str(prompt))] for prompt in prompts]
    inputs = wrapper.pipe.processor.apply_chat_template(
        [[dict(role="user", content=content)] for content in contents], tokenize=True, return_dict=True,
        return_tensors="pt", processor_kwargs=dict(padding=True, target_h=HEIGHT, target_w=WIDTH))
    logits = wrapper.policy(**inputs).logits[..., :8]
    drawn = wrapper.policy.model._cached_decode_position_ids[..., :-1]  # without that of the end mark
    rollout = wrapper.sample(prompts, 2, [0, 1])
    ids, mask, position_ids = wrapper.encode(prompts)
    L = ids.shape[1]
    real = inputs.attention_mask.bool()
    assert not real.all() and mask[:, :L].equal(inputs.attention_mask) and mask[:, L:].all()
    assert position_ids[..., L:].equal(drawn.movedim(1, 0)) and drawn.shape[2] == 15
    ours = wrapper.forward(ids, mask[:, :L], position_ids[..., :L], L)
    torch.testing.assert_close(ours[real], logits[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(wrapper.compute_logprobs(rollout)[0], rollout.logprobs, rtol=0, atol=1e-5)
    with pytest.raises(grpo.BadInput, match="'paint it' needs a tab and the picture to edit"):
        wrapper.encode(["paint it"])

def test_picture_is_the_stock_pipelines(tmp_path):
    """The painter gets each prompt's source, its codes and its size."""
    wrapper = make_wrapper()
    prompts = make_prompts(tmp_path, (128, 64), (64, 128))
    wrapper.policy.get_image_tokens = lambda features, grids: wrapper.policy.model.get_image_tokens(
        features.unflatten(0, (len(grids), -1)))  # as on the page
    wanted = []
    for prompt in prompts:
        stock = dict(prompt=[str(prompt)], image=[[Image.open(prompt.target)]], height=HEIGHT, width=WIDTH)
        _, codes, grids = wrapper.pipe.generate_prior_tokens(**stock)
        drawn = torch.arange(15).view(1, 3, 5) % 8
        wanted += 3 * wrapper.pipe(
            **stock, prior_token_ids=drawn.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1),
            prior_token_image_ids=codes, source_image_grid_thw=grids, num_inference_steps=2, guidance_scale=1.5,
            generator=[torch.Generator().manual_seed(~5)]).images
    wrapper.config.micro_batch_size = 2  # of groups of three; sums may have another order
    images = wrapper.decode(prompts, drawn.flatten(1).expand(6, -1), [5, 5])
    wanted, images = [[np.int16(image) for image in some] for some in (wanted, images)]
    assert max(abs(np.subtract(wanted, images)).flat) <= 1 and abs(wanted[0] - wanted[3]).max() > 20

def test_it_learns_from_its_source(run, monkeypatch):
    """Two sources have one instruction: a policy that does not see its own is right on one in two at most."""
    monkeypatch.setattr(tiny, "fit_policy", lambda *args: None)  # its weights are random
    squares.write_prompts(Path())
    squares.make_model(Path())
    files = [grpo.load_prompts(f"{name}.txt") for name in ("prompts", "held_out", "new_pairs")]
    (trained, seen), (held_out, new), (new_pairs, others) = [({*file}, {p.target for p in file}) for file in files]
    assert not seen & (new | others) and held_out <= trained and not new_pairs & trained
    for i in (3, 5):
        squares.paint(torch.full((3, 3), i)).save(f"{i}.png")
    Path("two.txt").write_text("paint the green squares white\t3.png\npaint the green squares white\t5.png\n")
    flags = "--model . --prompts two.txt --batch-size 2 --steps 5 --lr 5e-3 --save-every 5 --out run"
    assert run("grpo", f"--wrapper {ROOT}/examples/edit.py:EditWrapper {flags}")[0] == 0
    first, *_, last = [row["reward"] for row in read_rows("run")]
    assert first + 0.2 < last > 0.8, (first, last)
