"""`scales` against its formula."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import OPCHECKS, Setting, agree
from torch import Tensor

from dyrep.kernels import scales

EPS = 1e-3


def formula(gammas: list[Tensor], variances: list[Tensor], eps: float = EPS) -> Tensor:
    rows = zip(gammas, variances, strict=True)
    return torch.stack([gamma.double() / (variance.double() + eps).sqrt() for gamma, variance in rows])


def norms(setting: Setting, count: int, channels: int, *, trained: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """γ and variances of several norms."""
    gammas = [setting.randn(channels) for _ in range(count)]
    variances = [setting.wide.randn(channels, grad=False).square() for _ in range(count)]
    return gammas, [variance.requires_grad_(trained) for variance in variances]


@pytest.mark.parametrize("count", [1, 3, 8, 9])
@pytest.mark.parametrize("channels", [1, 5, 128, 300])
def test_scales_and_gradients_are_those_of_the_formula(single, count, channels):
    gammas, variances = norms(single, count, channels)
    agree([scales(gammas, variances, EPS)], [formula(gammas, variances)], [*gammas, *variances], 1e-5)


def test_in_any_dtype_scales_are_wide(setting):
    gammas, variances = norms(setting, 3, 5)
    found = scales(gammas, variances, EPS)
    assert found.dtype == setting.wide.dtype
    agree([found], [formula(gammas, variances)], [*gammas, *variances], setting.tolerance)


@pytest.mark.parametrize("trained", ["gammas", "variances"])
def test_gradients_go_only_where_they_are_wanted(single, trained):
    gammas, variances = norms(single, 2, 5, trained=trained == "variances")
    gammas = [gamma.detach() for gamma in gammas] if trained == "variances" else gammas
    wanted = gammas if trained == "gammas" else variances
    agree([scales(gammas, variances, EPS)], [formula(gammas, variances)], wanted, 1e-5)


def test_without_anything_to_train_there_is_no_graph(single):
    gammas, variances = norms(single, 2, 5, trained=False)
    assert not scales([gamma.detach() for gamma in gammas], variances, EPS).requires_grad


def test_what_it_is_made_of_may_be_views(single):
    gammas, variances = norms(single, 2, 5)
    gammas[1], variances[0] = single.slice_of(gammas[1]), single.slice_of(variances[0])
    rows = single.randn(2, 5, grad=False).square().requires_grad_()
    for these in (variances, list(rows.unbind())):
        leaves = [*gammas, *(variances if these is variances else [rows])]
        agree([scales(gammas, these, EPS)], [formula(gammas, these)], leaves, 1e-5)


def test_running_variances_may_move_on_before_the_gradient_is_asked_for(single):
    gammas, variances = norms(single, 2, 5, trained=False)
    out, exact = scales(gammas, variances, EPS), formula(gammas, [variance.clone() for variance in variances])
    for variance in variances:
        variance.mul_(2)
    agree([out], [exact], gammas, 1e-5)


def test_two_calls_give_the_same_bits(single):
    gammas, variances = norms(single, 3, 300)
    results = []
    for _ in range(2):
        out = scales(gammas, variances, EPS)
        results.append([out, *torch.autograd.grad(out.square().sum(), [*gammas, *variances])])
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@pytest.mark.parametrize("trained", [False, True])
def test_the_operator_is_registered_as_pytorch_wants_it(triton_only, trained):
    gammas, variances = norms(triton_only, 2, 5, trained=trained)
    torch.library.opcheck(torch.ops.dyrep.scales.default, (gammas, variances, EPS), test_utils=OPCHECKS)
