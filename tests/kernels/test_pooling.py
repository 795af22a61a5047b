"""`average_pool` against averages over windows of a padded image."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import OPCHECKS, Setting, agree, both_layouts, in_both_layouts
from torch import Tensor

from dyrep.kernels import average_pool

Pair = tuple[int, int]
GEOMETRIES = {  # kernel, stride, padding
    "3x3": ((3, 3), (1, 1), (1, 1)),
    "stride": ((3, 3), (2, 2), (1, 1)),
    "rest that no window reaches": ((3, 3), (2, 3), (0, 0)),
    "even": ((2, 4), (1, 2), (0, 1)),
    "not square": ((3, 1), (1, 2), (2, 0)),
    "1x1 with gaps": ((1, 1), (3, 2), (0, 0)),
    "padding above half the kernel": ((5, 5), (3, 2), (4, 3)),
    "windows of zeros alone": ((2, 2), (1, 3), (3, 4)),
    "one window": ((5, 4), (1, 1), (0, 0)),
}
every_geometry = pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))


def formula(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    padded = F.pad(x.double(), (padding[1], padding[1], padding[0], padding[0]))
    return padded.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1]).mean((-2, -1))


def check(x: Tensor, geometry: tuple[Pair, Pair, Pair], tolerance: float) -> Tensor:
    y = average_pool(x, *geometry)
    assert y.dtype == x.dtype
    agree([y], [formula(x, *geometry)], [x], tolerance)
    return y


@both_layouts
@every_geometry
def test_averages_and_their_gradients_are_those_of_the_formula(single, geometry, inner):
    size = geometry[0] if geometry == GEOMETRIES["one window"] else (7, 6)
    check(single.randn(2, 5, *size, inner=inner), geometry, 1e-5)


@both_layouts
def test_any_dtype_can_be_pooled(setting, inner):
    check(setting.randn(2, 5, 8, 9, inner=inner), GEOMETRIES["stride"], setting.tolerance)


@in_both_layouts([(1, 66, 2, 3), (2, 1, 5, 4), (2, 3, 1, 1), (1, 2, 35, 33)])
def test_any_shape_can_be_pooled(single, shape, inner):
    check(single.randn(*shape, inner=inner), GEOMETRIES["3x3"], 1e-5)


@both_layouts
def test_an_image_can_be_larger_than_a_tile(triton_only, monkeypatch, inner):
    from dyrep.kernels import pooling_triton

    monkeypatch.setattr(pooling_triton, "_TILE", 32)
    check(triton_only.randn(2, 3, 7, 5, inner=inner), GEOMETRIES["stride"], 1e-5)


@both_layouts
def test_the_result_lies_in_memory_as_the_input_does(single, inner):
    y = average_pool(single.randn(2, 5, 7, 6, inner=inner), *GEOMETRIES["3x3"])
    assert y.is_contiguous(memory_format=torch.channels_last if inner else torch.contiguous_format)


def test_a_slice_of_a_larger_tensor_is_taken_as_it_is(single):
    check(single.slice_of(single.randn(2, 5, 7, 6)), GEOMETRIES["stride"], 1e-5)


@both_layouts
def test_the_gradient_may_lie_in_memory_as_it_likes(single, inner):
    x = single.randn(2, 3, 7, 6, inner=inner)
    y, expected = average_pool(x, *GEOMETRIES["stride"]), formula(x, *GEOMETRIES["stride"])
    weights = torch.randn(3, 1, 1, device=single.device).expand_as(y)
    for along in (weights, single.slice_of(weights), weights.contiguous()):
        (grad,) = torch.autograd.grad(y, x, along, retain_graph=True)
        (exact,) = torch.autograd.grad(expected, x, along.double(), retain_graph=True)
        torch.testing.assert_close(grad, exact, rtol=1e-5, atol=1e-5)


def test_two_calls_give_the_same_bits(single):
    x = single.randn(2, 5, 7, 6)
    first, second = (average_pool(x, *GEOMETRIES["stride"]) for _ in range(2))
    assert torch.equal(first, second)
    along = torch.randn_like(first)
    assert torch.equal(torch.autograd.grad(first, x, along)[0], torch.autograd.grad(second, x, along)[0])


def test_without_anything_to_train_there_is_no_graph(single):
    assert not average_pool(single.randn(2, 5, 7, 6, grad=False), *GEOMETRIES["3x3"]).requires_grad


@both_layouts
@pytest.mark.parametrize("name", ["stride", "one window"])
def test_the_operator_is_registered_as_pytorch_wants_it(inner, name):
    arguments = (Setting("cpu", torch.float32).randn(2, 3, 5, 4, inner=inner), *map(list, GEOMETRIES[name]))
    torch.library.opcheck(torch.ops.dyrep.average_pool.default, arguments, test_utils=OPCHECKS)


def pairs(low: int, high: int) -> st.SearchStrategy[Pair]:
    return st.tuples(st.integers(low, high), st.integers(low, high))


@pytest.mark.slow
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=pairs(4, 12), geometry=st.tuples(pairs(1, 4), pairs(1, 4), pairs(0, 5)), inner=st.booleans())
def test_sweep_of_geometries(single, size, geometry, inner):
    check(single.randn(2, 3, *size, inner=inner), geometry, 1e-5)
