"""Tests of examples/edit.py, mostly against the stock pipeline and `transformers`."""
import gc, math, pickle, re, weakref
from pathlib import Path
from unittest import mock

import numpy as np, pytest, torch
from PIL import Image

import grpo
from conftest import ROOT, first_and_last, read_adapter, read_rows
from examples.edit import Edit, EditWrapper
from examples.make import squares, tiny
from stand_in import StandIn
WIDTH, HEIGHT = 160, 96  # not square

def make_wrapper():
    """The small model with random weights. Its tower and DiT see the place of a square, too."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS, num_hidden_layers=2, initializer_range=0.1)
    tiny.fit_vision(pipe, squares.PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    torch.nn.init.normal_(pipe.vision_language_encoder.model.visual.embeddings.position_embedding.weight, std=0.3)
    for weight in (*pipe.transformer.parameters(), *pipe.vae.encoder.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    settings = tiny.SETTINGS | dict(width=WIDTH, height=HEIGHT, decode_steps=2, guidance=1.5)
    return EditWrapper(pipe, grpo.Config(**settings, temperature=1.0, top_p=1.0))

def make_prompts(folder, *sizes):
    """An instruction and a source of each size; the instructions are of several lengths."""
    prompts = []
    for i, (width, height) in enumerate(sizes):
        pixels = torch.randint(256, (height // 32, width // 32, 3), generator=torch.Generator().manual_seed(i))
        Image.fromarray(pixels.byte().numpy()).resize((width, height), Image.BICUBIC).save(folder / f"{i}.png")
        prompts.append(Edit(f"paint the red squares blue{' now' * 3 * i}", folder / f"{i}.png"))
    return prompts

@torch.no_grad()
def test_ids_positions_and_logits_are_those_of_transformers(tmp_path):
    """Placeholders left in the ids, text positions after a source of 2 x 4 that begin 8 and not 4 later, or a draft:
    no error, but all log-probs are wrong. Sources and texts differ in size, so one prompt is padded."""
    wrapper = make_wrapper()
    prompts = make_prompts(tmp_path, (128, 64), (64, 160))
    chats = [[dict(role="user", content=[dict(type="image", image=Image.open(prompt.source)),
                                         dict(type="text", text=str(prompt))])] for prompt in prompts]
    inputs = wrapper.pipe.processor.apply_chat_template(chats, tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs=dict(padding=True, target_h=HEIGHT, target_w=WIDTH))  # what the stock pipeline generates from
    logits = wrapper.policy(**inputs).logits[..., :8]
    drawn = wrapper.policy.model._cached_decode_position_ids[..., :-1]  # without that of the end mark
    ids, mask, position_ids = wrapper.encode(prompts)
    L = ids.shape[1]
    real = inputs.attention_mask.bool()
    assert not real.all() and mask[:, :L].equal(inputs.attention_mask) and mask[:, L:].all()
    assert position_ids[..., L:].equal(drawn.movedim(1, 0)) and drawn.shape[2] == 15
    ours = wrapper.forward(ids, mask[:, :L], position_ids[..., :L], L)
    torch.testing.assert_close(ours[real], logits[real], rtol=0, atol=1e-5)

def test_picture_is_the_stock_pipelines(tmp_path):
    """A painter that is shown another source, other codes of it or another size would paint another picture."""
    wrapper = make_wrapper()
    prompts = make_prompts(tmp_path, (128, 64), (64, 128))
    stock = dict(prompt=[str(prompts[0])], image=[[Image.open(prompts[0].source)]], height=HEIGHT, width=WIDTH)
    with pytest.raises(RuntimeError, match="channels"):  # the page says so; when it is mended, the page must change
        wrapper.pipe.generate_prior_tokens(**stock)
    wrapper.policy.get_image_tokens = lambda features, grids: wrapper.policy.model.get_image_tokens(
        features.unflatten(0, (len(grids), -1)))
    drawn, codes, grids = wrapper.pipe.generate_prior_tokens(**stock)
    wanted, = wrapper.pipe(
        **stock, prior_token_ids=drawn, prior_token_image_ids=codes, source_image_grid_thw=grids,
        num_inference_steps=2, guidance_scale=1.5, generator=[torch.Generator().manual_seed(~5)]).images
    tokens = drawn.view(1, HEIGHT // 16, WIDTH // 16)[:, ::2, ::2].flatten(1)
    for size in (1, 2, 4):  # of a micro-batch; its sums may have another order
        wrapper.config.micro_batch_size = size
        images = wrapper.decode(prompts, tokens.expand(6, -1), [5, 5])  # groups of three: each has its own source
        far = [abs(np.int16(image) - np.int16(wanted)).max() for image in images]
        assert max(far[:3]) <= (size > 1) and min(far[3:]) > 20

def test_tower_and_wrapper_leave(tmp_path):
    """Left on the GPU, the tower would cost 2 GiB; asked at every step, seconds: it reads each source once. A cache
    that outlives its wrapper would keep every model that a notebook loads (torchtune#904)."""
    wrapper = make_wrapper()
    tower = wrapper.policy.model.visual
    prompts = make_prompts(tmp_path, (64, 32), (64, 32))
    with (mock.patch.object(tower, "forward", wraps=tower.forward) as seen,
          mock.patch.object(torch.nn.ModuleList, "to") as moved):
        wrapper.compute_logprobs(wrapper.sample(prompts, 2, [0, 1]))
    assert seen.call_count == 2 and moved.call_count == 4  # to grpo.DEVICE, and home
    with pytest.raises(grpo.BadInput, match="the prompt has no source"):
        wrapper.encode(["paint it"])
    alive = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert alive() is None

@pytest.mark.parametrize("size, rows, columns", [
    ((86, 150), 5, 3), ((155, 50), 2, 5), ((320, 128), 2, 5), ((32, 32), 2, 2)])
def test_sources_of_any_size(tmp_path, size, rows, columns):
    """A phone's photo lies on its side, and has any size. Policy, DiT and reward must see one picture, whole and
    upright, and of a size within the image processor's limits. A reward's processes get copies of a prompt."""
    wrapper = make_wrapper()
    torch.nn.init.zeros_(wrapper.policy.model.visual.embeddings.position_embedding.weight)
    wrapper.pipe.processor.image_processor.size = dict(shortest_edge=50**2, longest_edge=160**2)
    codes = torch.arange(rows * columns).view(rows, columns) * 3 % 8
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter of a turn
    photo = squares.paint(codes).resize(size, Image.NEAREST).rotate(90, expand=True)
    photo.save(tmp_path / "photo.webp", lossless=True, exif=turned)
    Path(tmp_path, "edits.txt").write_text("paint it\tphoto.webp")
    prompts, sources = EditWrapper.load_prompts(tmp_path / "edits.txt")
    for prompt in (prompts[0], pickle.loads(pickle.dumps(prompts[0]))):
        assert wrapper.load_source(prompt.source)[1].equal(codes) and prompt == "paint it"
    wrapper.pipe.image_processor.preprocess = shown = mock.Mock(wraps=wrapper.pipe.image_processor.preprocess)
    wrapper.decode(prompts, torch.zeros(1, 15).long(), [0])
    image = shown.call_args.args[0]
    assert image.size == (32 * columns, 32 * rows)
    assert grpo.compute_rewards([image], prompts, sources, {"mse": (grpo.reward_mse, 1)})[0] == 0

@pytest.mark.parametrize("line, message", [
    ("paint it red", "needs a tab and a source"), ("a\tsmall.png", "is too small"),
    ("a\tlong.png", "over four times as long as wide"), ("", "--prompts: needs a file")])
def test_bad_input(line, message, refuse):
    Image.new("RGB", (31, 64)).save("small.png")
    Image.new("RGB", (161, 40)).save("long.png")
    Path("edits.txt").write_text(line)
    assert message in refuse("edit", "--prompts edits.txt" if line else "")

def judge_squares(text, pictures):
    """A judge that measures: of the squares that the instruction names, or else of the others, the share that is right,
    as likelihoods of two digits."""
    before, after = [squares.look(picture) for picture in pictures]
    want = squares.edit(before, re.search("instruction: (.*?)[.] ", text)[1])
    right = (after == want)[(before != want) == ("done in the second" in text)]
    rating = 10 * right.float().mean().item() if len(right) else 10
    low = math.floor(rating)
    chances = {str(low): low + 1 - rating} | ({str(low + 1): rating - low} if rating > low else {})
    return [(max(chances, key=chances.get), chances)]

def test_squares(tmp_path, run, monkeypatch):
    """Held-out pictures or pairs of colours that are also trained, a reward that is 1 for a copy; and a source or an
    advantage that is wrong would teach nothing: the page's commands, with fewer steps, on 8 prompts. The rewards are
    those of a judge, with which the source must arrive as the first picture."""
    squares.write_prompts(tmp_path)
    files = [EditWrapper.load_prompts(tmp_path / f"{name}.txt") for name in ("prompts", "held_out", "new_pairs")]
    (trained, seen), (held_out, new), (new_pairs, others) = [({*prompts}, {*sources}) for prompts, sources in files]
    assert not seen & (new | others) and held_out <= trained and not new_pairs & trained
    image = squares.paint(torch.tensor([[0, 3, 0], [3, 3, 3], [7, 7, 0]]))
    want = squares.paint(torch.tensor([[6, 3, 6], [3, 3, 3], [7, 7, 6]]))
    assert squares.right([image, want], ["paint the red squares white"] * 2, [image] * 2) == pytest.approx([6 / 9, 1])
    monkeypatch.setattr(tiny, "fit_policy", lambda *args, fit=tiny.fit_policy: fit(*args[:3], args[3] // 10, args[4]))
    squares.make_model(tmp_path)
    Path("prompts.txt").write_text("\n".join(Path("prompts.txt").read_text().split("\n")[:8]))
    server = StandIn(judge_squares)
    monkeypatch.setenv("JUDGE_URL", server.address)
    monkeypatch.setenv("JUDGE_MODEL", "any")
    rewards = ",".join([f"{ROOT}/examples/rewards.py:{name}=.05" for name in ("judge", "kept")])
    flags = "--model . --steps 24 --group-size 4 --lr 2e-3 --save-every 24 --out run --reward"
    assert run("edit", f"{flags} {rewards},{ROOT}/examples/make/squares.py:right=0")[0] == 0
    server.shutdown()
    first, last = first_and_last("run")
    rows = read_rows("run")
    right = [sum([row["reward/right"] for row in some]) / 5 for some in (rows[:5], rows[-5:])]
    assert last > first + 0.1 and right[1] > right[0] + 0.1

def test_resumed_from_another_folder(tmp_path, monkeypatch):
    """Another model, or prompts without their sources, would go on in silence."""
    monkeypatch.chdir(tmp_path)
    make_wrapper().pipe.save_pretrained("seeing")
    make_prompts(tmp_path, (50, 70), (256, 256))  # the latter is read in two pieces
    Path("edits.txt").write_text("paint it\t0.png\nand this\t1.png\n")
    flags = f"--wrapper {ROOT}/examples/edit.py:EditWrapper --model seeing --prompts edits.txt --reward mse"
    flags += " --width 64 --height 64 --batch-size 2 --group-size 2 --num-iterations 2 --lr 1e-2 --save-every 1"
    for typed in ("--steps 2 --out one", "--steps 1 --out half"):
        grpo.main(f"{flags} {typed}".split())
    monkeypatch.chdir(tmp_path.parent)
    grpo.main(["--resume", f"{tmp_path.name}/half", "--steps", "2"])
    one, half = tmp_path / "one", tmp_path / "half"
    rows = read_rows(half)
    assert len(rows) == 2 and all(row["sampler_gap"] < 1e-5 for row in rows)
    for file in ("prompts.txt", "adapter_00002/adapter_model.safetensors", "samples_00002.png"):
        assert (one / file).read_bytes() == (half / file).read_bytes(), file
    assert all(weight.any() for weight in read_adapter(half).values())
    assert (half / "prompts.txt").read_text() == f"paint it\t{tmp_path}/0.png\nand this\t{tmp_path}/1.png\n"
