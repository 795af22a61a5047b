"""`normalised_sum` and `statistics` against their formulas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_helpers import (
    OPCHECKS,
    Setting,
    agree,
    both_layouts,
    close,
    in_both_layouts,
    over_channels,
    with_and_without_shift,
)
from torch import Tensor

from dyrep.kernels import normalised_sum, statistics

EPS = 1e-5
SHAPES = [(1, 70, 3, 3), (4, 16, 1, 1), (2, 1, 5, 4), (1, 2, 33, 40), (5, 3), (3, 9, 11), (5, 3, 1), (2, 3, 2, 3, 4)]
with_and_without_base = pytest.mark.parametrize("based", [False, True], ids=["no base", "base"])


def moments(y: Tensor) -> tuple[Tensor, Tensor]:
    y = y.double()
    dims = [d for d in range(y.dim()) if d != 1]
    mean = y.mean(dims)
    return mean, (y - over_channels(mean, y)).square().mean(dims)


def formula(base: Tensor | None, terms: list[Tensor], gamma: Tensor, beta: Tensor | None) -> Tensor:
    total = torch.zeros_like(terms[0], dtype=torch.float64) if base is None else base.double()
    for y, g in zip(terms, gamma.double(), strict=True):
        mean, var = moments(y)
        centred = y.double() if beta is None else y.double() - over_channels(mean, y)
        total = total + over_channels(g / (var + EPS).sqrt(), y) * centred
    return total if beta is None else total + over_channels(beta.double(), total)


def parameters(setting: Setting, terms: int, channels: int, shift: bool) -> tuple[Tensor, Tensor | None]:
    return setting.wide.randn(terms, channels), setting.wide.randn(channels) if shift else None


def check_sum(
    base: Tensor | None, terms: list[Tensor], gamma: Tensor, beta: Tensor | None, tolerance: float
) -> tuple[Tensor, ...]:
    out, mean, var = normalised_sum(base, terms, gamma, beta, EPS)
    expected = [moments(term) for term in terms]
    close(mean, torch.stack([mean for mean, _ in expected]), tolerance)
    close(var, torch.stack([var for _, var in expected]), tolerance)
    assert out.dtype == (terms[0] if base is None else base).dtype
    inputs = [x for x in (base, *terms, gamma, beta) if x is not None]
    return agree([out], [formula(base, terms, gamma, beta)], inputs, tolerance)


def check_statistics(terms: list[Tensor], tolerance: float) -> None:
    mean, var = statistics(terms)
    expected = [moments(term) for term in terms]
    agree(
        [mean, var],
        [torch.stack([mean for mean, _ in expected]), torch.stack([var for _, var in expected])],
        terms,
        tolerance,
    )


@both_layouts
@with_and_without_shift
@with_and_without_base
def test_sum_and_all_gradients_are_those_of_the_formula(setting, inner, shift, based):
    terms = [setting.randn(2, 5, 7, 6, inner=inner, mean=0.5) for _ in range(3)]
    base = setting.randn(2, 5, 7, 6, inner=inner) if based else None
    check_sum(base, terms, *parameters(setting, 3, 5, shift), setting.tolerance)


@both_layouts
def test_statistics_and_their_gradients_are_those_of_the_formula(setting, inner):
    check_statistics([setting.randn(2, 5, 7, 6, inner=inner, mean=0.5) for _ in range(3)], setting.tolerance)


@in_both_layouts(SHAPES)
def test_any_shape_can_be_summed(single, shape, inner):
    terms = [single.randn(*shape, inner=inner, mean=0.5) for _ in range(2)]
    base = single.randn(*shape, inner=inner)
    # a gradient orthogonal to few rows is a small difference of large numbers
    check_sum(base, terms, *parameters(single, 2, shape[1], shift=True), 3e-5)
    check_statistics(terms[:1], 1e-5)


@with_and_without_shift
@pytest.mark.parametrize("count", [1, 7, 9])
def test_there_can_be_one_term_or_many(single, count, shift):
    terms = [single.randn(1, 3, 4, 5) for _ in range(count)]
    check_sum(None, terms, *parameters(single, count, 3, shift), 1e-5)


@both_layouts
@pytest.mark.parametrize(
    ("shape", "tile"), [((5, 3, 2, 1), 64), ((2, 1, 33, 33), 512), ((3, 9, 5), 64)], ids=["images", "positions", "1-d"]
)
def test_rows_can_be_shared_out_between_programs_unevenly(triton_only, monkeypatch, shape, tile, inner):
    from dyrep.kernels import summing_triton

    monkeypatch.setattr(summing_triton, "_PROGRAMS", 2)
    monkeypatch.setattr(summing_triton, "_TILE", tile)
    terms = [triton_only.randn(*shape, inner=inner, mean=0.5) for _ in range(2)]
    check_sum(terms[1], terms, *parameters(triton_only, 2, shape[1], shift=True), 3e-5)


@pytest.mark.parametrize("residual", ["base", "first", "last"])
def test_terms_and_base_may_differ_in_dtype(single, residual):
    convs = [single._replace(dtype=torch.bfloat16).randn(3, 5, 4, 4) for _ in range(2)]
    wide = single.randn(3, 5, 4, 4)
    base = wide if residual == "base" else None
    terms = {"base": convs, "first": [wide, *convs], "last": [*convs, wide]}[residual]
    grads = check_sum(base, terms, *parameters(single, len(terms), 5, shift=True), 2e-2)
    assert [grad.dtype for grad in grads] == [x.dtype for x in ([wide, *convs] if base is not None else terms)] + [
        torch.float32
    ] * 2


def test_a_wide_term_keeps_its_precision_beside_narrow_ones(single):
    narrow, wide = single._replace(dtype=torch.bfloat16).randn(3, 5, 4, 4), single.randn(3, 5, 4, 4)
    gamma, _ = parameters(single, 2, 5, shift=False)
    out, _, _ = normalised_sum(None, [wide, narrow], gamma, None, EPS)
    agree([out], [formula(None, [wide, narrow], gamma, None)], [wide, gamma], 1e-5)


def test_layouts_may_differ_and_the_result_has_that_of_the_base(single):
    base = single.randn(2, 5, 4, 3, inner=True)
    terms = [single.randn(2, 5, 4, 3, inner=inner) for inner in (False, True)]
    gamma, beta = parameters(single, 2, 5, shift=True)
    assert normalised_sum(base, terms, gamma, beta, EPS)[0].stride() == base.stride()
    check_sum(base, terms, gamma, beta, 1e-5)


def test_slices_of_larger_tensors_are_taken_as_they_are(single):
    base, *terms = (single.slice_of(single.randn(2, 5, 4, 3)) for _ in range(3))
    check_sum(base, terms, *parameters(single, 2, 5, shift=True), 1e-5)
    check_statistics(terms, 1e-5)


def test_the_gradient_may_lie_in_memory_as_it_likes(single):
    terms = [single.randn(2, 5, 4, 3, inner=True) for _ in range(2)]
    gamma, beta = parameters(single, 2, 5, shift=True)
    out, _, _ = normalised_sum(terms[0], terms, gamma, beta, EPS)
    expected = formula(terms[0], terms, gamma, beta)
    weights = torch.randn(2, 5, 1, 1, device=single.device).expand(2, 5, 4, 3)
    for along in (weights, single.slice_of(weights), weights.contiguous()):
        grads = torch.autograd.grad(out, [*terms, gamma, beta], along, retain_graph=True)
        exact = torch.autograd.grad(expected, [*terms, gamma, beta], along.double(), retain_graph=True)
        for grad, other in zip(grads, exact, strict=True):
            close(grad, other, 1e-5)


@both_layouts
@with_and_without_shift
def test_a_large_mean_does_not_spoil_a_small_variance(single, inner, shift):
    y = single.randn(8, 3, 9, 10, inner=inner, mean=1000.0)
    gamma, beta = parameters(single, 1, 3, shift)
    mean, var = statistics([y])
    exact_mean, exact_var = moments(y)
    close(mean[0], exact_mean, 1e-6)
    assert ((var[0] / exact_var - 1).abs() < 1e-3).all()
    agree([mean, var], [exact_mean[None], exact_var[None]], [y], 1e-3)
    check_sum(None, [y], gamma, beta, 1e-3)


def test_a_constant_channel_is_divided_by_the_root_of_eps(single):
    y = torch.full((2, 3, 4, 4), 1.5, device=single.device, requires_grad=True)
    assert not statistics([y])[1].any()
    check_sum(None, [y], *parameters(single, 1, 3, shift=False), 1e-5)


@with_and_without_shift
def test_two_calls_give_the_same_bits(single, shift):
    terms = [single.randn(2, 5, 7, 6) for _ in range(2)]
    gamma, beta = parameters(single, 2, 5, shift)
    along = torch.randn_like(terms[0])
    inputs = [*terms, gamma] if beta is None else [*terms, gamma, beta]

    def results() -> list[Tensor]:
        out, mean, var = normalised_sum(terms[0], terms, gamma, beta, EPS)
        return [out, mean, var, *torch.autograd.grad(out, inputs, along)]

    assert all(torch.equal(first, second) for first, second in zip(results(), results(), strict=True))


def test_without_anything_to_train_there_is_no_graph(single):
    y = single.randn(2, 3, 4, 4, grad=False)
    gamma = torch.ones(1, 3, device=single.device)
    assert not any(output.requires_grad for output in normalised_sum(y, [y], gamma, None, EPS))
    assert not any(output.requires_grad for output in statistics([y]))
    with torch.no_grad():
        assert not normalised_sum(y, [y], gamma.requires_grad_(), None, EPS)[0].requires_grad


def test_gradients_go_only_where_they_are_wanted(single):
    fixed, trained = single.randn(2, 3, 4, 4, grad=False), single.randn(2, 3, 4, 4)
    gamma, beta = single.randn(2, 3), single.randn(3, grad=False)
    out, _, _ = normalised_sum(fixed, [fixed, trained], gamma, beta, EPS)
    agree([out], [formula(fixed, [fixed, trained], gamma, beta)], [trained, gamma], 1e-5)


def test_no_gradient_flows_through_the_statistics_of_a_sum(single):
    y = single.randn(2, 3, 4, 4)
    out, mean, var = normalised_sum(None, [y], torch.ones(1, 3, device=single.device), None, EPS)
    alone = torch.autograd.grad(out.square().sum(), y, retain_graph=True)[0]
    together = torch.autograd.grad(out.square().sum() + mean.sum() + var.sum(), y)[0]
    assert torch.equal(alone, together)


def test_either_statistic_may_be_left_unused(single):
    y = single.randn(2, 3, 4, 4)
    agree([statistics([y])[0]], [moments(y)[0][None]], [y], 1e-5)
    agree([statistics([y])[1]], [moments(y)[1][None]], [y], 1e-5)


def test_double_precision_is_kept_where_kernels_would_not(triton_only):
    exact = triton_only._replace(dtype=torch.float64)
    terms = [exact.randn(2, 3, 4, 4) for _ in range(2)]
    check_sum(None, terms, *parameters(exact, 2, 3, shift=True), 1e-9)
    check_statistics(terms, 1e-9)


@pytest.mark.parametrize("which", ["gamma", "beta"])
def test_scales_and_shifts_may_be_views(single, which):
    gamma, beta = single.randn(2, 3), single.randn(3)
    strided = {"gamma": gamma, "beta": beta}
    strided[which] = single.slice_of(strided[which])
    check_sum(None, [single.randn(2, 3, 4, 4) for _ in range(2)], strided["gamma"], strided["beta"], 1e-5)


@both_layouts
@pytest.mark.parametrize(("shift", "based"), [(False, True), (True, False)], ids=["base", "shift"])
def test_the_operator_of_the_sum_is_registered_as_pytorch_wants_it(inner, shift, based):
    setting = Setting("cpu", torch.float32)
    terms = [setting.randn(2, 3, 4, 5, inner=inner) for _ in range(2)]
    base = setting.randn(2, 3, 4, 5, inner=inner) if based else None
    arguments = (base, terms, *parameters(setting, 2, 3, shift), EPS)
    torch.library.opcheck(torch.ops.dyrep.normalised_sum.default, arguments, test_utils=OPCHECKS)


@both_layouts
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_operator_of_statistics_is_registered_as_pytorch_wants_it(inner, dtype):
    terms = [Setting("cpu", dtype).randn(2, 3, 4, 5, inner=inner) for _ in range(2)]
    torch.library.opcheck(torch.ops.dyrep.statistics.default, (terms,), test_utils=OPCHECKS)


@pytest.mark.parametrize("gamma", [torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 2).T], ids=["wider", "view"])
def test_a_compiler_is_told_the_right_dtype_and_strides_whatever_gamma_is(gamma):
    terms = [torch.randn(2, 3, 4, 5) for _ in range(2)]
    arguments = (None, terms, gamma, None, EPS)
    torch.library.opcheck(torch.ops.dyrep.normalised_sum.default, arguments, test_utils="test_faketensor")


@pytest.mark.slow
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 6), min_size=2, max_size=4).map(lambda size: (size[0] + 1, *size[1:], 3)),
    terms=st.integers(1, 4),
    programs=st.integers(1, 9),
    tile=st.sampled_from([64, 256, 2048]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_sweep_of_shapes_and_tiles(triton_only, shape, terms, programs, tile, flags):
    from dyrep.kernels import summing_triton

    inner, shift, based = flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summing_triton, "_PROGRAMS", programs)
        patch.setattr(summing_triton, "_TILE", tile)
        tensors = [triton_only.randn(*shape, inner=inner, mean=0.5) for _ in range(terms)]
        base = triton_only.randn(*shape, inner=inner) if based else None
        check_sum(base, tensors, *parameters(triton_only, terms, shape[1], shift), 1e-4)
        check_statistics(tensors, 1e-4)
