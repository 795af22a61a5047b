"""`second_moments` against its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import CUDA, OPCHECKS, Setting, agree, both_layouts, close, in_both_layouts, rows_of
from torch import Tensor

from dyrep.kernels import second_moments

SHAPES = [
    (2, 70, 3, 5),
    (4, 16, 1, 1),
    (3, 1, 5, 4),
    (1, 2, 9, 15),
    (2, 3, 8, 8),
    (6, 3),
    (4, 9, 11),
    (9, 3, 1),
    (2, 3, 2, 3, 4),
]


@pytest.fixture
def dotted(setting, request):
    """Every setting but one that Triton's interpreter computes wrongly: products of matrices in bfloat16."""
    if not CUDA and request.node.callspec.params["setting"] == "triton-bfloat16":
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices wrongly")
    return setting


def formula(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows_of(x)
    return rows.mean(0), torch.einsum("ri,rj->ij", rows, rows) / len(rows)


def check(x: Tensor, tolerance: float) -> None:
    mean, second = second_moments(x)
    assert mean.dtype == second.dtype == torch.promote_types(x.dtype, torch.float32)
    agree([mean, second], formula(x), [x], tolerance)


@both_layouts
def test_moments_and_their_gradients_are_those_of_the_formula(dotted, inner):
    check(dotted.randn(3, 5, 7, 6, inner=inner, mean=0.5), dotted.tolerance)


@in_both_layouts(SHAPES)
def test_any_shape_has_moments(single, shape, inner):
    check(single.randn(*shape, inner=inner, mean=0.5), 1e-5)


@both_layouts
def test_blocks_of_rows_can_be_shared_out_between_programs_unevenly(triton_only, monkeypatch, inner):
    from dyrep.kernels import moments_triton

    monkeypatch.setattr(moments_triton, "_PROGRAMS", 2)
    check(triton_only.randn(3, 5, 7, 11, inner=inner, mean=0.5), 1e-5)


def test_a_slice_of_a_larger_tensor_is_taken_as_it_is(single):
    check(single.slice_of(single.randn(2, 5, 4, 3)), 1e-5)
    x = single.randn(2, 5, 8, 6, inner=True)
    agree(second_moments(x[:, :, ::2, ::2]), formula(x[:, :, ::2, ::2]), [x], 1e-5)


def test_statistics_of_a_pointwise_convolution_follow(single):
    x, weight = single.randn(2, 5, 4, 3, mean=0.5), single.randn(7, 5)
    mean, second = second_moments(x)
    y = rows_of(x) @ weight.double().T
    var = ((weight @ (second - torch.outer(mean, mean))) * weight).sum(1)
    agree([weight @ mean, var], [y.mean(0), y.var(0, correction=0)], [x, weight], 1e-5)


def test_either_moment_may_be_left_unused(single):
    x = single.randn(2, 3, 4, 4)
    for k in (0, 1):
        agree([second_moments(x)[k]], [formula(x)[k]], [x], 1e-5)


@both_layouts
def test_two_calls_give_the_same_bits(single, inner):
    x = single.randn(3, 5, 7, 6, inner=inner)
    results = []
    for _ in range(2):
        mean, second = second_moments(x)
        results.append((mean, second, *torch.autograd.grad(mean.sum() + second.square().sum(), x)))
    assert all(torch.equal(first, other) for first, other in zip(*results, strict=True))


def test_without_anything_to_train_there_is_no_graph(single):
    assert not any(moment.requires_grad for moment in second_moments(single.randn(2, 3, 4, 4, grad=False)))


def test_double_precision_is_kept_where_kernels_would_not(triton_only):
    check(triton_only._replace(dtype=torch.float64).randn(2, 3, 4, 4), 1e-9)


def test_autocast_does_not_narrow_the_moments(single):
    x = single.randn(2, 3, 4, 4)
    with torch.autocast(single.device, torch.bfloat16):
        mean, second = second_moments(x)
    for moment, expected in zip((mean, second), formula(x), strict=True):
        close(moment, expected, 1e-5)


@both_layouts
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_operator_is_registered_as_pytorch_wants_it(inner, dtype):
    x = Setting("cpu", dtype).randn(2, 3, 4, 5, inner=inner)
    torch.library.opcheck(torch.ops.dyrep.second_moments.default, (x,), test_utils=OPCHECKS)


@pytest.mark.slow
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 80), st.integers(1, 12), st.integers(1, 12)),
    programs=st.integers(1, 9),
    inner=st.booleans(),
)
def test_sweep_of_shapes_and_programs(triton_only, shape, programs, inner):
    from dyrep.kernels import moments_triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments_triton, "_PROGRAMS", programs)
        check(triton_only.randn(*shape, inner=inner, mean=0.5), 1e-5)
