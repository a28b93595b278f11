"""Tests of docs/edit.md: edit.py against the stock pipeline and `transformers`, its input, and that it learns. No network."""
import contextlib, json, os, re, runpy, subprocess, sys
from pathlib import Path
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests compare with tensors on the CPU

import pytest, torch, transformers
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/edit.md").read_text()
sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]
import grpo
from examples import codes, edit, edited, make_tiny, squares
torch.set_num_threads(1)
WIDTH, HEIGHT = 160, 96  # not square

@pytest.fixture
def wrapper():
    """The small model with random weights. Its tower and DiT see the place of a square, too."""
    torch.manual_seed(0)
    pipe = make_tiny.make_models(grpo.COLORS, num_hidden_layers=2, initializer_range=0.1)
    make_tiny.fit_vision(pipe, squares.PALETTE[:, :, None, None].expand(-1, -1, 32, 32))
    torch.nn.init.normal_(pipe.vision_language_encoder.model.visual.embeddings.position_embedding.weight, std=0.3)
    for weight in (*pipe.transformer.parameters(), *pipe.vae.encoder.parameters()):
        torch.nn.init.normal_(weight, std=0.3)
    settings = make_tiny.SETTINGS | dict(width=WIDTH, height=HEIGHT, decode_steps=2, guidance=1.5)
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
    """The lines of use_edit.py, undone at the end of the `with`."""
    policy = pipe.vision_language_encoder
    code = (ROOT / "examples/use_edit.py").read_text()
    lines, = re.findall(r"^(policy\.get_image_tokens = .*?)^pipe\.", code, re.DOTALL | re.MULTILINE)
    stock = mock.patch.object(policy, "get_image_tokens", policy.get_image_tokens)
    stock.start()
    exec(lines, dict(policy=policy))
    return contextlib.closing(mock.Mock(close=stock.stop))

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
    ours = codes.encode_images(wrapper.pipe, images)
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
        rollout = wrapper.generate_with_tracking(prompts, 2, [0, 1])
        wrapper.compute_logprobs(rollout)
        wrapper.encode([prompts[0].replace("red", "green")])  # another instruction, the same source
    assert seen.call_count == 2
    assert moves == 2 * [(2, "cpu"), (2, "cpu")]  # to grpo.DEVICE, and home

def test_ids_positions_and_logits_are_those_of_transformers(wrapper, tmp_path):
    """Placeholders left in the ids, text positions after a source of 2 x 4 that begin 8 and not 4 later, or a draft:
    no error, but all log-probs are wrong. Sources and texts differ in size, so one prompt is padded."""
    prompts = make_prompts(tmp_path, (128, 64), (64, 160))
    inputs = make_stock_inputs(wrapper, prompts)
    ids, position_ids, bias = wrapper.encode(prompts)
    seen = []
    hook = wrapper.policy.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        logits = wrapper.policy(**inputs).logits[..., :8]
        hook.remove()
        L = ids.shape[1]
        ours = wrapper.forward(ids, position_ids[..., :L], bias[:, :, :L, :L])
    assert ids.equal(seen[0]) and not (ids == wrapper.pipe.processor.image_token_id).any()
    real = inputs.attention_mask.bool()
    assert not real.all()
    wanted, _ = wrapper.policy.model.get_rope_index(
        **{name: inputs[name] for name in ("input_ids", "image_grid_thw", "images_per_sample", "attention_mask")})
    assert position_ids[..., :L][:, real].equal(wanted[:, real])
    drawn = wrapper.policy.model._cached_decode_position_ids[..., :-1]  # without that of the end mark
    assert position_ids[..., L:].equal(drawn.movedim(1, 0)) and drawn.shape[2] == 15
    torch.testing.assert_close(ours[real], logits[real], rtol=0, atol=1e-5)

def test_stock_sampler_and_trainer_agree(wrapper, tmp_path):
    """Teacher forcing of what `generate` drew, with its own cache, positions and padding."""
    prompts = make_prompts(tmp_path, (128, 64), (64, 160))
    inputs = make_stock_inputs(wrapper, prompts)
    drawn = wrapper.policy.generate(
        **inputs, do_sample=True, top_k=0, min_new_tokens=15, max_new_tokens=15, output_logits=True, return_dict_in_generate=True)
    tokens = drawn.sequences[:, inputs.input_ids.shape[1]:]
    logprobs = torch.stack(drawn.logits, 1)[..., :8].log_softmax(2).gather(2, tokens[..., None]).squeeze(2)
    ours, _ = wrapper.compute_logprobs(grpo.Rollout(prompts, [], tokens, None, None))
    torch.testing.assert_close(ours.detach(), logprobs, rtol=0, atol=1e-5)

def test_sampler_and_trainer_agree(wrapper, tmp_path):
    """The sampler takes a long prompt in pieces of 64 tokens, here 81: a piece lost would show as a gap."""
    wrapper.top_p_filter = transformers.TopPLogitsWarper(0.8)
    prompts = make_prompts(tmp_path, (128, 64), (256, 256))
    tokens, logprobs, nuclei = wrapper.sample(prompts, 2, [3, 4])
    assert wrapper.encode(prompts)[0].shape[1] > 64 and tokens.shape == (4, 15) and not nuclei.all()
    rollout = grpo.Rollout([prompts[0]] * 2 + [prompts[1]] * 2, [], tokens, logprobs, nuclei)
    torch.testing.assert_close(wrapper.compute_logprobs(rollout)[0].detach(), logprobs, rtol=0, atol=1e-5)
    alone, _, _ = wrapper.sample(prompts[:1], 2, [3])  # without the other's padding
    assert alone.equal(tokens[:2])

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

def test_rewards_get_instruction_and_source(tmp_path):
    """A path in the prompt would be judged as text; the wrong picture as target, as what must not change."""
    Path(tmp_path, "mine.py").write_text("def mine(images, prompts, targets):\n    assert prompts == ['a b']\n"
                                         "    return [targets[0].getpixel((0, 0))[0]]")
    Image.new("RGB", (32, 32), (7, 0, 0)).save(tmp_path / "x.png")
    Path(tmp_path, "edits.txt").write_text("# comment\n\na b\tx.png\n")
    prompts, sources = codes.load_prompts(tmp_path / "edits.txt")
    assert prompts == [f"a b\t{tmp_path}/x.png"]
    total, _ = grpo.compute_rewards(sources, prompts, sources, codes.load_rewards(f"mse,{tmp_path}/mine.py:mine=2"))
    assert total == 14

@pytest.mark.parametrize("line, message", [
    ("paint it red", "needs an instruction, one tab, and a source"), ("a\tx.png\tx.png", "needs an instruction, one tab, and a source"),
    ("a\tnone.png", "No such file"), ("a\tedits.txt", "cannot identify image"), ("a\tsmall.png", "multiples of 32"),
    ("a\tlong.png", "long.png is over four times as long as wide"),
    ("# only a comment", "has no prompts")])
def test_bad_input(line, message, tmp_path, capsys):
    """One line that says what is wrong, before a model is loaded."""
    Image.new("RGB", (48, 32)).save(tmp_path / "small.png")
    Image.new("RGB", (32, 160)).save(tmp_path / "long.png")
    Path(tmp_path, "edits.txt").write_text(line)
    for argv, text in ([f"--prompts={tmp_path}/edits.txt"], message), ([], "--prompts: needs a file"):
        with pytest.raises(SystemExit) as stop:
            grpo.main(argv, load_model=None, load_prompts=codes.load_prompts, load_rewards=codes.load_rewards)
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
        rollout = wrapper.generate_with_tracking([prompt], 2, [0])
        wrapper.compute_logprobs(rollout)
    assert [call.args[0].size for call in shown.call_args_list] == [seen] * 2 and size != seen

def test_a_picture_that_the_processor_refuses(wrapper):
    with pytest.raises(grpo.BadInput, match="a picture of 512 x 64 pixels: absolute aspect ratio"):
        codes.encode_images(wrapper.pipe, [Image.new("RGB", (512, 64))])

def test_a_model_that_cannot_see():
    """The default one on a CPU: its tower has patches of another size, and failed with a traceback about shapes."""
    pipe = grpo.diffusers.GlmImagePipeline.from_pretrained(grpo.SMALL_MODEL)
    with pytest.raises(grpo.BadInput, match="cannot see pictures"):
        codes.encode_images(pipe, [Image.new("RGB", (64, 64))])

@pytest.mark.parametrize("argv, message", [
    ("run", "the following arguments are required: prompts, film"), ("none edits.txt x.png", "none: holds no run"),
    ("run none.txt x.png", "--prompts none.txt: [Errno 2]"), ("run edits.txt none/x.png", "none/x.png: its folder does not")])
def test_bad_input_of_edited(argv, message, tmp_path, monkeypatch, capsys):
    """Found before a model is loaded, not when all is drawn."""
    monkeypatch.chdir(tmp_path)
    make_prompts(tmp_path, (64, 64))
    Path("edits.txt").write_text("make it red\t0.png")
    Path("run").mkdir()
    torch.save(dict(config=vars(grpo.Config(reward="mse"))), "run/checkpoint.pt")
    monkeypatch.setattr(sys, "argv", ["edited.py", *argv.split()])
    monkeypatch.setattr(edit.EditWrapper, "from_pretrained", None)
    with pytest.raises(SystemExit) as stop:
        edited.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err

def test_squares(tmp_path, monkeypatch):
    """Held-out pictures or pairs of colours that are also trained, or a reward that is 1 for a copy."""
    monkeypatch.chdir(tmp_path)
    squares.write_prompts()
    used = {name: codes.load_prompts(squares.FOLDER / f"{name}.txt")[0] for name in ("prompts", "held_out", "new_pairs")}
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

@pytest.fixture
def root(tmp_path, monkeypatch):
    for name in ("grpo.py", "examples"):
        Path(tmp_path, name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path

def test_it_learns_a_little(root, monkeypatch):
    """The page's commands on 16 prompts, with fewer steps; a wrong advantage or source would teach nothing."""
    squares.write_prompts()
    prompts = squares.FOLDER / "prompts.txt"
    prompts.write_text("".join(prompts.read_text().splitlines(keepends=True)[:16]))
    fit = make_tiny.fit_policy
    monkeypatch.setattr(make_tiny, "fit_policy", lambda wrapper, draw, chance, steps, lr: fit(wrapper, draw, chance, steps // 10, lr))
    squares.make_model()
    monkeypatch.setattr(sys, "argv", "edit.py --model runs/squares --steps 16 --group-size 4 --lr 2e-3 --save-every 16 --out runs/edit".split())
    monkeypatch.delitem(sys.modules, "examples.edit")  # or runpy warns that it is imported already
    runpy.run_module("examples.edit", run_name="__main__")
    rewards = [json.loads(line)["reward"] for line in (root / "runs/edit/metrics.jsonl").read_text().splitlines()]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1

@pytest.mark.skipif("SLOW" not in os.environ, reason="takes three minutes: SLOW=1 runs it")
def test_it_learns(root):
    """By the page's own commands, with half of the steps."""
    block, = re.findall(r"^```bash\n(python -m examples.squares.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    commands = block.replace("--out", "--steps 30 --out").replace("python ", f"{sys.executable} ")
    output = subprocess.run(f"set -e\n{commands}", shell=True, check=True, capture_output=True, text=True,
                            env=os.environ | dict(OMP_NUM_THREADS="1")).stdout
    assert Image.open("edit.png").width == 1800
    before, after = map(float, re.findall(r"(?:before|after) +(\S+)", output)[:2])
    assert before < 0.55 and after > before + 0.2

@pytest.mark.skipif("SLOW" not in os.environ, reason="takes half a minute: SLOW=1 runs it")
def test_memory_of_the_page(capsys):
    """The row of 1024 is what measure.py counts, and no phase takes more than 22 GiB."""
    import measure
    measure.memory_of_edits([1024])
    row = capsys.readouterr().out.strip().splitlines()[-1]
    assert f"\n{row}\n" in PAGE
    cells = [float(cell) for cell in row.split("|")[2:-1]]
    assert len(cells) == 4 and max(cells) <= 22

def test_figures_of_the_page():
    """What the page says of the settings is so; it loads nothing."""
    settings = grpo.Config(**squares.SETTINGS)
    run = f"{settings.steps} steps of {settings.batch_size} prompts x {settings.group_size} images"
    assert run in PAGE and len(PAGE.splitlines()) <= 80
    rewards = re.findall(r"^\| mean reward .*?\| (.*) \|$", PAGE, re.MULTILINE)[0].split(" | ")
    assert len(rewards) == 3 and all(float(pair.split(", ")[1]) > 0.9 for pair in rewards)
