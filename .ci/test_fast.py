"""Tests of examples/fast.py: each approximation on the shipped DiT, or by numbers, without a GPU."""
import types
from pathlib import Path

import diffusers, pytest, torch

import grpo
from conftest import ROOT, have_same_weights, read_rows
from examples import fast, four_bits

EULER = diffusers.FlowMatchEulerDiscreteScheduler

def load(Wrapper=fast.Fast, fp8=False, **settings):
    own = dict(width=128, height=64, guidance=1.0, decode_steps=10, offload="off")
    Wrapper = type("Own", (Wrapper,), dict(fp8=fp8))
    return Wrapper.from_pretrained(grpo.TINY_MODEL, grpo.Config(**own | settings))

TOKENS = torch.randint(8, (8, 8), generator=torch.Generator().manual_seed(0))
PROMPTS = ["a red fox", 'a sign that says "OPEN"']

def paint(wrapper, tokens=TOKENS, prompts=PROMPTS):
    return 255 * grpo.pil_to_tensor(wrapper.decode(prompts, tokens, range(len(prompts))))

def test_few_of_its_steps_are_worth_many_of_eulers():
    """Ten and five are nearer to 160 of Euler's than twenty are: on the shipped DiT, mean levels."""
    euler = {n: paint(load(grpo.GLMImageWrapper, decode_steps=n)) for n in (20, 160)}
    distances = [(pictures - euler[160]).abs().mean().item()
                 for pictures in (euler[20], paint(load()), paint(load(decode_steps=5)))]
    assert distances[1] < distances[2] < distances[0] / 2 and distances[0] > 0.3, distances

@pytest.mark.parametrize("Solver, factor", [(EULER, 2), (fast.SecondOrder, 4)])
def test_the_order_of_the_solver(Solver, factor):
    """Of dx / dsigma = x cos(3 sigma) - sigma with half the step, errors are a half, or a quarter."""
    def solve(steps):
        scheduler = Solver(shift=3.0)
        scheduler.pipe = types.SimpleNamespace(guidance_scale=1.0)
        scheduler.set_timesteps(steps)
        x = torch.ones(1, dtype=torch.float64)
        for sigma, t in zip(scheduler.sigmas.double(), scheduler.timesteps):
            x = scheduler.step(x.double() * torch.cos(3 * sigma) - sigma, t, x.double()).prev_sample.double()
        return x

    true = solve(4000)
    errors = [(solve(steps) - true).abs().item() for steps in (25, 50, 100)]
    assert all(factor / 1.3 < a / b < factor * 1.3 for a, b in zip(errors, errors[1:])), errors

@pytest.mark.parametrize("guidance, guided, passes", [(1.0, 0.5, 12), (1.5, 0.5, 12 + 6), (1.5, 1, 24), (1.5, 0.25, 15)])
def test_passes_of_the_dit(guidance, guided, passes):
    """Guided steps have two, in each group anew."""
    wrapper = load(type("Part", (fast.Fast,), dict(guided=guided)), guidance=guidance, decode_steps=12)
    seen = []
    wrapper.pipe.transformer.register_forward_pre_hook(lambda *_: seen.append(1))
    paint(wrapper)
    assert len(seen) == 2 * passes

@pytest.mark.parametrize("fp8", [False, True])
def test_a_picture_does_not_depend_on_what_is_painted_beside_it(fp8):
    """In batches of one and four; with products in fp8 (as a CPU computes them), too."""
    one, four = [paint(load(fp8=fp8, guidance=1.5, micro_batch_size=size)) for size in (1, 4)]
    assert (one - four).abs().max() <= 1

def test_products_in_fp8():
    """Within the rounding of 3 bits; few rows and many; a large row leaves the others' scale alone. Half of the room."""
    layer = torch.nn.Linear(96, 64).bfloat16()
    x = torch.randn(2, 300, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0] *= 1e4
    own = fast.Float8Linear(layer)
    error = (own(x) - layer(x)).float().norm(dim=2) / layer(x).float().norm(dim=2)
    assert 0.005 < error.mean() < 0.05 and error[0, 0] < 0.1
    assert (own(x[:1, :3]) - own(x)[:1, :3]).abs().max() <= own(x[:1, :3]).abs().max() / 128
    assert sum(p.nbytes for p in own.parameters()) < 0.6 * sum(p.nbytes for p in layer.parameters())
    layers = [m for m in load(fp8=True).pipe.transformer.modules() if isinstance(m, fast.Float8Linear)]
    assert len(layers) == 6  # to_q, to_k, to_v, to_out.0, and two of ff

def test_with_4_bits():
    """Both: the layers keep their codes, and the solver is the second one."""
    wrapper = four_bits.FastGLMImage4Bit.from_pretrained(
        grpo.TINY_MODEL, grpo.Config(width=128, height=64, guidance=1.0, decode_steps=5))
    assert isinstance(wrapper.pipe.scheduler, fast.SecondOrder)
    assert isinstance(wrapper.pipe.transformer.transformer_blocks[0].attn1.to_q, four_bits.Linear4Bit)
    assert (paint(wrapper) - paint(load())).abs().mean() < 20

def test_a_run(run, small_draft):
    """It goes on bit for bit, and is drawn from, evaluated and checked as itself."""
    flags = f"--wrapper {ROOT}/examples/fast.py:Fast --width 64 --height 64 --group-size 2 --batch-size 2 --temperature 9 "
    flags += "--top-p 1 --guidance 1.5 --decode-steps 4 --save-every 1 "
    for typed in (flags + "--out whole --steps 2", flags + "--out run --steps 1", "--resume run --steps 2"):
        assert run("grpo", typed)[0] == 0
    assert have_same_weights("whole", "run")
    assert read_rows("whole") == read_rows("run")
    assert Path("whole/samples_00002.png").read_bytes() == Path("run/samples_00002.png").read_bytes()
    assert run("generate", "run --prompt red --samples 1")[0] == run("evaluate", "run --samples 2 --steps 0 2")[0] == 0
    code, out, error = run("check", flags)
    assert code == 0 and "ok   the picture is that of the stock pipeline" in out, out + error
