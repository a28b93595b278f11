"""Tests of examples/edit.py, mostly against the stock pipeline and `transformers`."""
import re
from pathlib import Path
from unittest import mock

import numpy as np, pytest, torch
from PIL import Image

import grpo
from conftest import ROOT, read_rows
from examples.edit import EditWrapper
from examples.rewards import mse
from examples.make import squares, tiny
from stand_in import StandIn
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
    """Ids, positions, logits, and the sampler's log-probs: one prompt is padded, the other is read in pieces of 64. The
    tower visits the GPU once for each source, and goes home."""
    wrapper = make_wrapper()
    prompts = make_prompts(tmp_path, (128, 64), (256, 352))
    contents = [[dict(type="image", url=prompt.target), dict(type="text", text=str(prompt))] for prompt in prompts]
    inputs = wrapper.pipe.processor.apply_chat_template(
        [[dict(role="user", content=content)] for content in contents], tokenize=True, return_dict=True,
        return_tensors="pt", processor_kwargs=dict(padding=True, target_h=HEIGHT, target_w=WIDTH))
    logits = wrapper.policy(**inputs).logits[..., :8]
    drawn = wrapper.policy.model._cached_decode_position_ids[..., :-1]  # without that of the end mark
    with mock.patch.object(torch.nn.ModuleList, "to") as moved:
        rollout = wrapper.sample(prompts, 2, [0, 1])
        ids, mask, position_ids = wrapper.encode(prompts)
    assert moved.mock_calls == 2 * [mock.call(grpo.DEVICE), mock.call(wrapper.policy.device)]
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

@pytest.mark.parametrize("size, h, w", [((86, 150), 5, 3), ((155, 50), 2, 5), ((320, 128), 2, 5), ((16, 16), 2, 2)])
def test_sources_of_any_size(tmp_path, size, h, w):
    """Policy, DiT and reward see one picture, whole, upright, and of a size within the image processor's limits."""
    wrapper = make_wrapper()
    wrapper.pipe.processor.image_processor.size = dict(shortest_edge=50**2, longest_edge=160**2)
    codes = torch.arange(h * w).view(h, w) * 3 % 8
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter of a turn
    photo = squares.paint(codes).resize(size, Image.NEAREST).rotate(90, expand=True)
    photo.save(tmp_path / "photo.webp", lossless=True, exif=turned)
    prompt = grpo.Prompt("paint it", tmp_path / "photo.webp")
    assert wrapper.load_source(prompt)[1].equal(codes)
    wrapper.pipe.image_processor.preprocess = shown = mock.Mock(wraps=wrapper.pipe.image_processor.preprocess)
    wrapper.decode([prompt], torch.zeros(1, 15).long(), [0])
    image = shown.call_args.args[0]
    assert image.size == (32 * w, 32 * h)
    assert grpo.compute_rewards([image], [prompt], {"mse": (mse, 1)})[0] == 0

def judge_squares(text, pictures):
    """A judge that measures: of the squares that the instruction names, or of the others, the share that is right."""
    before, after = map(squares.look, pictures)
    want = squares.edit(before, re.search("instruction: (.*?)[.] ", text)[1])
    right = (after == want)[(before != want) == ("done in the second" in text)]
    return f"{10 * right.float().mean() if len(right) else 10:.1f}"

def test_it_learns_from_its_source(run, monkeypatch):
    """Two sources have one instruction: a policy that does not see its own is right on one in two at most. A judge is
    shown the source first. No held-out picture or pair of colors is trained on."""
    monkeypatch.setattr(tiny, "fit_policy", lambda *args: None)  # its weights are random
    squares.write_prompts(Path())
    squares.make_model(Path())
    files = [grpo.load_prompts(f"{name}.txt") for name in ("prompts", "held_out", "new_pairs")]
    (trained, seen), (held_out, new), (new_pairs, others) = [({*file}, {p.target for p in file}) for file in files]
    assert not seen & (new | others) and held_out <= trained and not new_pairs & trained
    for i in (3, 5):
        squares.paint(torch.full((3, 3), i)).save(f"{i}.png")
    Path("two.txt").write_text("paint the green squares white\t3.png\npaint the green squares white\t5.png\n")
    server = StandIn(judge_squares)
    monkeypatch.setenv("OPENAI_BASE_URL", server.address)
    monkeypatch.setenv("JUDGE_MODEL", "any")
    flags = "--model . --prompts two.txt --batch-size 2 --steps 5 --lr 5e-3 --save-every 5 --out run --reward "
    flags += ",".join([f"{ROOT}/examples/judge.py:{name}=.05" for name in ("judge", "kept")])
    assert run("grpo", f"--wrapper {ROOT}/examples/edit.py:EditWrapper {flags}")[0] == 0
    server.shutdown()
    first, *_, last = [row["reward"] for row in read_rows("run")]
    assert first + 0.1 < last > 0.9  # 0.5 + 0.5 * the share that is right; 0.75 without a source
