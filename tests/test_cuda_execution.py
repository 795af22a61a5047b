"""Fused and folded blocks where they are meant to run. Skipped where there is no GPU."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dyrep
from dyrep.block import RepConv
from dyrep.execution import dispatch, folded, fused
from dyrep.kernels import unavailable
from execution.execution_helpers import (
    ALWAYS,
    NEVER,
    BlockCase,
    assert_same,
    block_cases,
    eager,
    make_block,
    plain_convs,
    step,
    values_per_channel,
)
from strategies import conv_cases
from training import loss_of, make_batches, make_net

GPU = torch.cuda.is_available() and not unavailable()
pytestmark = pytest.mark.skipif(not GPU, reason="needs a CUDA device and Triton")

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
either_moments = pytest.mark.parametrize("moments_from", [ALWAYS, NEVER], ids=["moments", "no moments"])
every_origin = pytest.mark.parametrize("origin", ["plain", "normalised"])
fused_and_folded = pytest.mark.parametrize("execution", ["fused", "folded"])
inner_or_first = pytest.mark.parametrize("first", [False, True], ids=["inner layer", "first layer"])


@pytest.fixture(autouse=True)
def _exact():
    dispatch._tell.cache_clear()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Which of the fast ways blocks were really run in."""
    ways: list[str] = []

    def note(module, name):
        original = module.forward

        def noted(*args):
            ways.append(name)
            return original(*args)

        monkeypatch.setattr(module, "forward", noted)

    note(fused, "fused")
    note(folded, "folded")
    return ways


def dispatched(execution: str, **options):
    """Run a block as `set_execution_` says."""

    def run(block: RepConv, x: Tensor) -> Tensor:
        dyrep.set_execution_(block, execution, **options)
        return block(x)

    return run


def autocast(run, dtype=torch.bfloat16):
    def within(block: RepConv, x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype):
            return run(block, x)

    return within


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative to the largest entry; as some gradients vanish in theory, none is taken for far smaller than others."""
    largest = max(float(value.abs().max()) for name, value in exact.items() if name.startswith("gradient"))
    scales = {name: max(1.0, 0.1 * largest if name.startswith("gradient") else 0.0) for name in exact}
    return {
        name: float((found[name].double() - value).abs().max() / value.abs().max().clamp(min=scales[name]))
        for name, value in exact.items()
    }


def larger(case: BlockCase) -> BlockCase:
    """The same with more images of more positions, so that single precision is enough for σ."""
    case.conv.batch, case.conv.image = 8, tuple(size + 8 for size in case.conv.image)
    return case


def paper_block(channels=16, bias=False, origin="plain", layout="contiguous") -> RepConv:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
    return make_block(conv, dyrep.BRANCHES, origin).cuda().to(memory_format=LAYOUTS[layout])


def pictures(channels=16, batch=8, size=14, layout="contiguous", dtype=torch.float32) -> Tensor:
    x = torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(0)) * 1.3 + 0.4
    return x.cuda().to(dtype).contiguous(memory_format=LAYOUTS[layout])


# Single precision ---------------------------------------------------------------------------------------------------


def check(block: RepConv, x: Tensor, first: bool = False) -> None:
    """As far from double precision as an eager block is, or 1e-4."""
    exact = step(copy.deepcopy(block).double(), x.double(), eager, needs_input_gradient=not first)
    theirs, ours = (
        errors(step(block, x, dispatched(execution), needs_input_gradient=not first), exact)
        for execution in ("eager", "fused")
    )
    for name, error in ours.items():
        assert error <= max(1e-4, 4 * theirs[name]), f"{name}: {error:.1e}, eager {theirs[name]:.1e}"


@settings(max_examples=25, deadline=None, derandomize=True, phases=(Phase.explicit, Phase.generate))
@given(case=block_cases(plain_convs() | conv_cases()).map(larger), moments_from=st.sampled_from([ALWAYS, NEVER]))
def test_any_block_fuses_exactly(case, moments_from):
    block, x = case.block(torch.float32).cuda(), case.input(torch.float32).cuda()
    for norm in block.modules():
        if getattr(norm, "drawn", None) is not None:
            norm.drawn = norm.drawn.detach().cuda().requires_grad_()
    assume(values_per_channel(block, x) > 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "MOMENTS_FROM", moments_from)
        check(block, x, first=not case.needs_input_gradient)


@either_moments
@every_origin
@every_layout
@inner_or_first
def test_the_block_of_the_paper_fuses_exactly(moments_from, origin, layout, first, monkeypatch, ran):
    monkeypatch.setattr(fused, "MOMENTS_FROM", moments_from)
    check(paper_block(origin=origin, bias=True, layout=layout), pictures(layout=layout), first)
    assert ran == ["fused"]


@either_moments
@inner_or_first
@pytest.mark.parametrize(
    "conv",
    [
        {"in_channels": 3, "out_channels": 16, "kernel_size": 7, "stride": 2, "padding": 3},
        {"in_channels": 16, "out_channels": 32, "kernel_size": 3, "stride": 2, "padding": 1},
        {"in_channels": 20, "out_channels": 20, "kernel_size": 5, "padding": 2},
        {"in_channels": 8, "out_channels": 8, "kernel_size": 2, "padding": "same"},
        {"in_channels": 8, "out_channels": 8, "kernel_size": 3, "padding": 1, "groups": 8},
    ],
    ids=str,
)
def test_common_shapes_fuse_exactly(moments_from, first, conv, monkeypatch, ran):
    monkeypatch.setattr(fused, "MOMENTS_FROM", moments_from)
    block = make_block(nn.Conv2d(**conv, bias=False)).cuda().to(memory_format=torch.channels_last)
    check(block, pictures(block.in_channels, size=17, layout="channels_last"), first)
    assert ran == ["fused"]


def test_a_large_input_uses_moments_and_a_small_one_does_not(monkeypatch):
    used = []
    moments = fused.second_moments
    monkeypatch.setattr(fused, "second_moments", lambda x: used.append(x) or moments(x))
    block = paper_block(64, layout="channels_last").train()
    dyrep.set_execution_(block, "fused")
    for batch, expected in ((8, False), (128, True)):
        used.clear()
        x = pictures(64, batch, 32, "channels_last")
        block(x.requires_grad_()).sum().backward()
        assert (x.numel() * x.element_size() >= fused.MOMENTS_FROM) == expected
        assert bool(used) == expected


def test_a_folded_block_on_the_whole_batch_equals_an_eager_one(ran):
    block, x = paper_block(bias=True, layout="channels_last"), pictures(layout="channels_last")
    exact = step(copy.deepcopy(block).double(), x.double(), eager)
    found = step(block, x, dispatched("folded", images=99, gradient="full"))
    assert max(errors(found, exact).values()) < 1e-4
    assert ran == ["folded"]


@pytest.mark.parametrize("gradient", ["none", "weights", "full"])
def test_a_folded_block_computes_on_the_gpu_what_it_computes_on_the_cpu(gradient, ran):
    block, x = paper_block(bias=True), pictures()
    run = dispatched("folded", images=3, values=1, gradient=gradient)
    found = step(block, x, run)
    expected = step(copy.deepcopy(block).cpu().double(), x.cpu().double(), run)
    assert max(errors({name: value.cpu() for name, value in found.items()}, expected).values()) < 1e-4
    assert ran == ["folded"] * 2


# Low precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("execution", "options"),
    [("fused", {}), ("folded", {"images": 99, "gradient": "full"})],
    ids=["fused", "folded"],
)
@either_moments
@every_origin
@every_layout
@inner_or_first
def test_under_autocast_the_error_is_that_of_eager_blocks(
    dtype, execution, options, moments_from, origin, layout, first, monkeypatch, ran
):
    monkeypatch.setattr(fused, "MOMENTS_FROM", moments_from)
    block, x = paper_block(origin=origin, bias=True, layout=layout), pictures(layout=layout)
    exact = step(copy.deepcopy(block).double(), x.double(), eager, needs_input_gradient=not first)
    runs = [autocast(dispatched("eager"), dtype), autocast(dispatched(execution, **options), dtype)]
    theirs, ours = (step(block, x, run, needs_input_gradient=not first) for run in runs)
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in theirs.items()}
    allowed = errors(theirs, exact)
    for name, error in errors(ours, exact).items():
        assert error <= 1.5 * allowed[name] + 1e-2, f"{name}: {error:.1e}, eager {allowed[name]:.1e}"
    assert ran == [execution]


@every_layout
def test_outputs_keep_the_layout_of_the_input(layout, ran):
    block, x = paper_block(layout=layout).train(), pictures(layout=layout)
    for execution in ("fused", "folded"):
        y = autocast(dispatched(execution))(block, x)
        assert y.is_contiguous(memory_format=LAYOUTS[layout])
        assert y.dtype == torch.bfloat16
    assert ran == ["fused", "folded"]


# Dispatch -----------------------------------------------------------------------------------------------------------


def test_auto_is_fused_on_a_gpu_and_eager_on_the_cpu(ran):
    block, x = paper_block().train(), pictures()
    block(x)
    assert ran == ["fused"]
    block.cpu()(x.cpu())
    assert ran == ["fused"]


@fused_and_folded
def test_in_eval_mode_a_block_is_one_convolution(execution, ran):
    block, x = paper_block(bias=True).eval(), pictures()
    expected = dispatched("eager")(block, x)
    torch.testing.assert_close(dispatched(execution)(block, x), expected, rtol=1e-4, atol=1e-4)
    assert not ran


def test_double_precision_is_run_eagerly_with_a_warning(ran):
    block, x = paper_block().double().train(), pictures(dtype=torch.float64)
    expected = step(block, x, dispatched("eager"))
    with pytest.warns(UserWarning, match="execution='fused' runs eagerly: the kernels compute in float32"):
        found = step(block, x, dispatched("fused"))
    assert_same(found, expected, tolerance=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(step(block, x, dispatched("auto")), expected, tolerance=1e-12)
    assert not ran


@pytest.mark.parametrize("low_precision", [False, True], ids=["float32", "bfloat16"])
@either_moments
@every_layout
@fused_and_folded
def test_two_runs_are_equal_to_the_last_bit(execution, layout, moments_from, low_precision, monkeypatch):
    monkeypatch.setattr(fused, "MOMENTS_FROM", moments_from)
    block, x = paper_block(bias=True, layout=layout), pictures(layout=layout)
    run = dispatched(execution, images=4, values=1)
    run = autocast(run) if low_precision else run
    one, other = step(block, x, run), step(block, x, run)
    for name, value in one.items():
        assert torch.equal(other[name], value), name


# Whole training steps -----------------------------------------------------------------------------------------------


def training_net(execution: str) -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    model = make_net().cuda().to(memory_format=torch.channels_last)
    dyrep.expand_(model, ["0", "3", "5"], gamma=0.3, generator=torch.Generator().manual_seed(0))
    dyrep.set_execution_(model, execution, images=4, values=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    images, labels = make_batches(1)[0]
    return model.train(), optimizer, images.cuda().contiguous(memory_format=torch.channels_last), labels.cuda()


def one_step(model, optimizer, images, labels, low_precision=False, set_to_none=False) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    with torch.autocast("cuda", torch.bfloat16) if low_precision else nullcontext():
        loss = loss_of(model, (images, labels))
    loss.backward()
    optimizer.step()


def captured_steps(parts, warmup: int, replays: int, low_precision: bool) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            one_step(*parts, low_precision)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(*parts, low_precision)
    for _ in range(replays):
        graph.replay()


@pytest.mark.parametrize("low_precision", [False, True], ids=["float32", "bfloat16"])
@fused_and_folded
def test_a_captured_step_replays_to_what_steps_compute_that_are_not_captured(execution, low_precision, ran):
    captured, plain = training_net(execution), training_net(execution)
    before = copy.deepcopy(plain[0].state_dict())
    captured_steps(captured, 3, 4, low_precision)
    for _ in range(3 + 4):
        one_step(*plain, low_precision)
    state = captured[0].state_dict()
    for name, value in plain[0].state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)
    for name, value in before.items():
        assert not torch.equal(value, state[name]) or not name.endswith(("conv.weight", "running_var")), name
    assert set(ran) == {execution}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_fused_is_training_eagerly(set_to_none, ran):
    models = {}
    for execution in ("eager", "fused"):
        model, *rest = training_net(execution)
        for _ in range(3):
            one_step(model, *rest, set_to_none=set_to_none)
        models[execution] = model.state_dict()
    for name, value in models["eager"].items():
        torch.testing.assert_close(models["fused"][name], value, rtol=1e-3, atol=1e-4, msg=name)
    assert ran == ["fused"] * 9


@fused_and_folded
def test_compiled_steps_equal_those_that_are_not(execution):
    compiled, plain = training_net(execution), training_net(execution)
    torch.compiler.reset()
    compiled[0].compile(fullgraph=True, backend="aot_eager")
    for parts in (compiled, plain):
        for _ in range(2):
            one_step(*parts)
    for (name, value), other in zip(plain[0].state_dict().items(), compiled[0].state_dict().values(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-3, atol=1e-4, msg=name)
