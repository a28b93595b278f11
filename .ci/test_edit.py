"""Tests of examples/edit.py against the stock pipeline and `transformers`, its input, and that it learns. No network."""
import json
from pathlib import Path
from unittest import mock

import pytest, torch
from PIL import Image

import grpo
from examples import edit
from examples.make import squares, tiny
WIDTH, HEIGHT = 160, 96  # not square

@pytest.fixture
def wrapper():
    """The small model with random weights. Its tower and DiT see the place of a square, too."""
    torch.manual_seed(0)
    pipe = tiny.make_models(grpo.COLORS, num_hidden_layers=2, initializer_range=0.1)
    tiny.fit_vision(pipe, squares.PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    torch.nn.init.normal_(pipe.vision_language_encoder.model.visual.embeddings.position_embedding.weight, std=0.3)
    for weight in (*pipe.transformer.parameters(), *pipe.vae.encoder.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    settings = tiny.SETTINGS | dict(width=WIDTH, height=HEIGHT, decode_steps=2, guidance=1.5)
    return edit.EditWrapper(pipe, grpo.Config(**settings, temperature=1.0, top_p=1.0))

def make_prompts(folder, *sizes):
    """An instruction and a source of each size; the instructions are of several lengths."""
    prompts = []
    for i, (width, height) in enumerate(sizes):
        pixels = torch.randint(256, (height // 32, width // 32, 3), generator=torch.Generator().manual_seed(i))
        image = Image.fromarray(pixels.byte().numpy()).resize((width, height), Image.BICUBIC)
        image.save(folder / f"{i}.png")
        prompts.append(f"paint the red squares blue{' now' * 3 * i}\t{folder}/{i}.png")
    return prompts

def make_stock_inputs(wrapper, prompts):
    """What the stock pipeline gives to `generate`."""
    chats = []
    for prompt in prompts:
        text, path = prompt.split("\t")
        chats.append([dict(role="user", content=[dict(type="image", image=Image.open(path)), dict(type="text", text=text)])])
    return wrapper.pipe.processor.apply_chat_template(
        chats, tokenize=True, return_dict=True, return_tensors="pt",
        processor_kwargs=dict(padding=True, target_h=HEIGHT, target_w=WIDTH))

def repair(pipe):
    """diffusers 0.42 joins the features of the sources, and transformers 5.23 wants them as a list. docs/edit.md says so."""
    policy = pipe.vision_language_encoder
    return mock.patch.object(policy, "get_image_tokens", lambda features, grids: policy.model.get_image_tokens(
        features.unflatten(0, (len(grids), -1))))

def test_codes_are_the_stock_pipelines(wrapper, tmp_path):
    """Codes of another grid, or made of pixels prepared in another way, would name what is not in the picture."""
    prompts = make_prompts(tmp_path, (128, 64), (128, 64))
    images = [Image.open(prompt.split("\t")[1]) for prompt in prompts]
    texts = [prompt.split("\t")[0] for prompt in prompts]
    stock = dict(prompt=texts, height=HEIGHT, width=WIDTH, image=[[image] for image in images])
    with pytest.raises(RuntimeError, match="channels"):  # the page says so; when it is mended, the page must change
        wrapper.pipe.generate_prior_tokens(**stock)
    with repair(wrapper.pipe):
        _, wanted, grids = wrapper.pipe.generate_prior_tokens(**stock)
    ours = edit.encode_images(wrapper.pipe, images)
    for picture, want, grid in zip(ours, wanted, grids):
        assert picture.shape == (2, 4) and len(picture.unique()) > 1
        assert picture.repeat_interleave(2, 0).repeat_interleave(2, 1).flatten().equal(want)
        assert grid.tolist() == [[1, 4, 8]]

def test_tower_comes_and_leaves(wrapper, tmp_path, monkeypatch):
    """Left on the GPU, the tower would cost 2 GiB; asked at every step, seconds. It reads each source once."""
    moves = []
    monkeypatch.setattr(torch.nn.ModuleList, "to", lambda modules, device: moves.append((len(list(modules)), str(device))))
    tower = wrapper.policy.model.visual
    prompts = make_prompts(tmp_path, (64, 32), (64, 32))
    with mock.patch.object(tower, "forward", wraps=tower.forward) as seen:
        wrapper.compute_logprobs(wrapper.sample(prompts, 2, [0, 1]))
        wrapper.encode([prompts[0].replace("red", "green")])  # another instruction, the same source
    assert seen.call_count == 2
    assert moves == 2 * [(2, "cpu"), (2, "cpu")]  # to grpo.DEVICE, and home

def test_ids_positions_and_logits_are_those_of_transformers(wrapper, tmp_path):
    """Placeholders left in the ids, text positions after a source of 2 x 4 that begin 8 and not 4 later, or a draft:
    no error, but all log-probs are wrong. Sources and texts differ in size, so one prompt is padded."""
    prompts = make_prompts(tmp_path, (128, 64), (64, 160))
    inputs = make_stock_inputs(wrapper, prompts)
    ids, mask, position_ids = wrapper.encode(prompts)
    seen = []
    hook = wrapper.policy.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        logits = wrapper.policy(**inputs).logits[..., :8]
        hook.remove()
        L = ids.shape[1]
        ours = wrapper.forward(ids, mask[:, :L], position_ids[..., :L], L)
    assert ids.equal(seen[0]) and not (ids == wrapper.pipe.processor.image_token_id).any()
    real = inputs.attention_mask.bool()
    assert not real.all() and mask[:, :L].equal(inputs.attention_mask) and mask[:, L:].all()
    wanted, _ = wrapper.policy.model.get_rope_index(
        **{name: inputs[name] for name in ("input_ids", "image_grid_thw", "images_per_sample", "attention_mask")})
    assert position_ids[..., :L][:, real].equal(wanted[:, real])
    drawn = wrapper.policy.model._cached_decode_position_ids[..., :-1]  # without that of the end mark
    assert position_ids[..., L:].equal(drawn.movedim(1, 0)) and drawn.shape[2] == 15
    torch.testing.assert_close(ours[real], logits[real], rtol=0, atol=1e-5)

def test_sampler_and_trainer_agree(wrapper, tmp_path):
    """The sampler takes a long prompt in pieces of 64 tokens, here 81: a piece lost would show as a gap."""
    wrapper.config.top_p = 0.8
    prompts = make_prompts(tmp_path, (128, 64), (256, 256))
    rollout = wrapper.sample(prompts, 2, [3, 4])
    assert wrapper.encode(prompts)[0].shape[1] > 64 and rollout.tokens.shape == (4, 15) and not rollout.allowed.all()
    torch.testing.assert_close(wrapper.compute_logprobs(rollout)[0].detach(), rollout.logprobs, rtol=0, atol=1e-5)
    alone = wrapper.sample(prompts[:1], 2, [3])  # without the other's padding
    assert alone.tokens.equal(rollout.tokens[:2])

def test_picture_is_the_stock_pipelines(wrapper, tmp_path):
    """A painter that is not shown the source, its codes or its size would paint another picture; a draft's codes, too."""
    prompts = make_prompts(tmp_path, (128, 64), (64, 128))
    text, path = prompts[0].split("\t")
    generator = [torch.Generator().manual_seed(~5)]
    drawn = []
    generate = wrapper.pipe.generate_prior_tokens
    with repair(wrapper.pipe), mock.patch.object(
            wrapper.pipe, "generate_prior_tokens", lambda **inputs: drawn.append(generate(**inputs)) or drawn[0]):
        stock, = wrapper.pipe(
            text, image=[Image.open(path)], height=HEIGHT, width=WIDTH, generator=generator,
            num_inference_steps=2, guidance_scale=1.5).images
    tokens = drawn[0][0].view(1, HEIGHT // 16, WIDTH // 16)[:, ::2, ::2].flatten(1)
    ours, = wrapper.decode([prompts[0]], tokens, [5])
    assert ours.tobytes() == stock.tobytes()
    other, = wrapper.decode([prompts[1]], tokens, [5])
    without, = grpo.GLMImageWrapper.decode(wrapper, [text], tokens, [5])
    assert len({ours.tobytes(), other.tobytes(), without.tobytes()}) == 3
    pairs = wrapper.decode(prompts, tokens.expand(4, -1), [5, 5])  # groups of two: each has its own source
    alone = [wrapper.decode([prompt], tokens.expand(2, -1), [5]) for prompt in prompts]
    assert [image.tobytes() for image in pairs] == [image.tobytes() for group in alone for image in group]

def test_photos_are_turned_and_cropped(wrapper, tmp_path):
    """A phone's photo lies on its side, and has any size. Stretched, or cropped at a corner, policy, DiT and reward would
    see different pictures. 86 x 150, upright: 11 and 11, then 11 and 11 pixels are cut off."""
    photo = Image.new("RGB", (86, 150), "black")
    photo.paste("red", (11, 11, 75, 139))
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter of a turn
    photo.rotate(90, expand=True).save(tmp_path / "photo.jpg", quality=100, subsampling=0, exif=turned)
    source = edit.open_source(tmp_path / "photo.jpg")
    assert source.size == (64, 128)
    low = [channel[0] for channel in source.getextrema()]
    assert low[0] > 200 and max(channel[1] for channel in source.getextrema()[1:]) < 60
    Path(tmp_path, "edits.txt").write_text("paint it\tphoto.jpg")
    Path(tmp_path, "measured.py").write_text(
        "def size(images, prompts, targets):\n    assert prompts == ['paint it']  # without the path\n"
        "    return [targets[0].width * 1000 + targets[0].height]")
    prompts, sources = edit.load_prompts(tmp_path / "edits.txt")
    total, _ = grpo.compute_rewards([photo], prompts, sources, edit.load_rewards(f"{tmp_path}/measured.py:size"))
    assert total == 64_128
    painter = wrapper.pipe.image_processor
    with mock.patch.object(painter, "preprocess", wraps=painter.preprocess) as shown:
        rollout = wrapper.sample(prompts, 2, [0])
        assert wrapper.compute_logprobs(rollout)[0].isfinite().all()
        wrapper.decode(prompts, rollout.tokens, [0])
    assert shown.call_args.args[0].tobytes() == source.tobytes()
    assert wrapper.load_source(str(tmp_path / "photo.jpg"))[1].shape == (4, 2)

@pytest.mark.parametrize("line, message", [
    ("paint it red", "needs a tab and a source"), ("a\tx.png\tx.png", "a tab and a path"),
    ("a\tnone.png", "No such file"), ("a\tedits.txt", "cannot identify image"), ("a\tsmall.png", "is too small"),
    ("a\tlong.png", "over four times as long as wide"), ("# only a comment", "with a prompt on each line")])
def test_bad_input(line, message, tmp_path, capsys):
    """One line that says what is wrong, before a model is loaded. 190 x 40 is 5 to 1 when it is cropped."""
    Image.new("RGB", (31, 64)).save(tmp_path / "small.png")
    Image.new("RGB", (190, 40)).save(tmp_path / "long.png")
    Path(tmp_path, "edits.txt").write_text(line)
    for argv, text in ([f"--prompts={tmp_path}/edits.txt"], message), ([], "--prompts: needs a file"):
        with pytest.raises(SystemExit) as stop:
            grpo.main(argv, load_model=None, load_prompts=edit.load_prompts, load_rewards=edit.load_rewards)
        error = capsys.readouterr().err
        assert stop.value.code == 2 and text in error and error.count("\n") == 1

@pytest.mark.parametrize("size, seen", [((256, 128), (128, 64)), ((32, 32), (64, 64))])
def test_the_dit_sees_what_the_policy_sees(wrapper, tmp_path, size, seen):
    """The image processor resizes very large and small sources: as they were, they had more pixels than codes, or less."""
    prompt, = make_prompts(tmp_path, size)
    limits = dict(shortest_edge=64**2, longest_edge=128**2)
    painter = wrapper.pipe.image_processor
    with (mock.patch.object(wrapper.pipe.processor.image_processor, "size", limits),
          mock.patch.object(painter, "preprocess", wraps=painter.preprocess) as shown):
        rollout = wrapper.sample([prompt], 2, [0])
        wrapper.compute_logprobs(rollout)
        wrapper.decode([prompt], rollout.tokens, [0])
    assert [call.args[0].size for call in shown.call_args_list] == [seen] * 2 and size != seen

def test_squares(tmp_path):
    """Held-out pictures or pairs of colours that are also trained, or a reward that is 1 for a copy."""
    squares.write_prompts(tmp_path)
    used = {name: edit.load_prompts(tmp_path / f"{name}.txt")[0] for name in ("prompts", "held_out", "new_pairs")}
    assert [len(set(prompts)) for prompts in used.values()] == [600, 48, 48]
    texts, sources = ({name: {prompt.split("\t")[column] for prompt in prompts} for name, prompts in used.items()}
                      for column in (0, 1))
    assert not sources["prompts"] & (sources["held_out"] | sources["new_pairs"])
    assert texts["held_out"] <= texts["prompts"] and not texts["prompts"] & texts["new_pairs"]
    grid = torch.tensor([[0, 3, 0], [3, 3, 3], [7, 7, 0]])
    image = squares.paint(grid)
    assert squares.look(image).equal(grid)
    want = squares.paint(torch.tensor([[6, 3, 6], [3, 3, 3], [7, 7, 6]]))
    assert squares.right([image, want], ["paint the red squares white"] * 2, [image] * 2) == pytest.approx([6 / 9, 1])

def test_it_learns_a_little(tmp_path, run, monkeypatch):
    """The page's commands on 16 prompts, with fewer steps; a wrong advantage or source would teach nothing."""
    squares.write_prompts(tmp_path)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:16]))
    fit = tiny.fit_policy
    monkeypatch.setattr(tiny, "fit_policy", lambda wrapper, draw, chance, steps, lr: fit(wrapper, draw, chance, steps // 10, lr))
    squares.make_model(tmp_path)
    assert run("edit", "--model . --steps 20 --group-size 4 --lr 2e-3 --save-every 20 --out run")[0] == 0
    rewards = [json.loads(line)["reward"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
