"""What can stand at the end of a branch: a scale alone, a norm behind a gate, and the making of either."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyrep import algebra
from dyrep.errors import BranchError
from dyrep.norm import BranchNorm
from dyrep.scaling import SCALINGS, ChannelScale, GatedNorm, make_scaling
from strategies import randomize_norms_

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
every_ndim = pytest.mark.parametrize("ndim", [1, 2, 3])
with_and_without_shift = pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])


def image(ndim: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(4, channels, *(5, 4, 3)[:ndim], dtype=torch.float64) * 1.7 + 0.6


def random_scale() -> ChannelScale:
    scale = ChannelScale(3, dtype=torch.float64)
    with torch.no_grad():
        scale.weight.copy_(torch.tensor([0.5, -2.0, 0.0]))
    return scale


def gated(shift: bool = True) -> GatedNorm:
    norm = GatedNorm(3, shift=shift, dtype=torch.float64)
    randomize_norms_(norm)
    return norm


def by_torch(norm: BranchNorm, x: Tensor) -> Tensor:
    """Torch's batch norm with the same γ, β and statistics, less its constant where the norm has no shift."""
    mean = torch.zeros_like(norm.running_var) if norm.running_mean is None else norm.running_mean.clone()
    y = F.batch_norm(x, mean, norm.running_var.clone(), norm.weight, norm.bias, norm.training, 0.1, norm.eps)
    if norm.bias is None and norm.training:
        var, average = torch.var_mean(x, (0, *range(2, x.dim())), correction=0)
        constant = average * norm.weight / (var + norm.eps).sqrt()
        y = y + constant.reshape(1, -1, *(1,) * (x.dim() - 2))
    return y


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# A scale alone -----------------------------------------------------------------------------------------------------


@every_ndim
def test_a_scale_multiplies_every_channel_by_its_factor_in_either_mode(ndim):
    scale, x = random_scale(), image(ndim)
    for training in (True, False):
        y = scale.train(training)(x)
        for channel, factor in enumerate((0.5, -2.0, 0.0)):
            assert torch.equal(y[:, channel], x[:, channel] * factor)


def test_a_scale_has_one_factor_per_channel_and_nothing_else():
    scale = ChannelScale(4, gamma=0.25, dtype=torch.float64)
    assert list(scale.state_dict()) == ["factor"]
    assert [name for name, _ in scale.named_parameters()] == ["factor"]
    assert torch.equal(scale.weight, torch.full((4,), 0.25, dtype=torch.float64))
    assert scale.bias is None
    assert not scale.normalises
    assert ChannelScale(2, device="meta").weight.device.type == "meta"


def test_a_scale_keeps_the_dtype_and_memory_format_of_its_input():
    x = image().to(torch.bfloat16).to(memory_format=torch.channels_last)
    y = ChannelScale(3)(x)
    assert y.dtype == torch.bfloat16
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_gradients_of_a_scale_are_those_of_a_product():
    scale, x = random_scale(), image().requires_grad_()
    weights = torch.randn_like(x)
    by_input, by_factor = torch.autograd.grad((scale(x) * weights).sum(), (x, scale.weight))
    close(by_input, weights * scale.weight.detach().reshape(1, 3, 1, 1))
    close(by_factor, (weights * x.detach()).sum((0, 2, 3)))


@every_ndim
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_scale_folds_into_the_convolution_before_it(ndim, bias):
    scale, x = random_scale(), image(ndim, 2)
    kernel = torch.randn(3, 2, *(3, 2, 1)[:ndim], dtype=torch.float64)
    shift = torch.randn(3, dtype=torch.float64) if bias else None
    folded, folded_shift = algebra.fuse_norm(kernel, shift, **scale.fold_arguments(torch.float64))
    assert (folded_shift is None) == (not bias)
    expected = CONV[ndim](x, kernel, shift) * scale.weight.reshape(1, 3, *(1,) * ndim)
    close(CONV[ndim](x, folded, folded_shift), expected)


def test_fold_arguments_of_a_scale_are_in_the_dtype_asked_for():
    arguments = ChannelScale(3).fold_arguments(torch.float64)
    assert {value.dtype for value in arguments.values() if isinstance(value, Tensor)} == {torch.float64}


def test_a_scale_becomes_the_identity_everywhere_or_where_asked():
    scale, x = random_scale(), image()
    weight = scale.weight
    scale.make_identity_(torch.tensor([False, False, True]))
    assert scale.weight.tolist() == [0.5, -2.0, 1.0]
    scale.make_identity_()
    assert torch.equal(scale(x), x)
    assert scale.weight is weight


def test_importance_of_a_scale_is_the_mean_magnitude_of_its_factors():
    importance = random_scale().importance
    assert float(importance) == pytest.approx(2.5 / 3)
    assert not importance.requires_grad


# A norm behind a gate ----------------------------------------------------------------------------------------------


@with_and_without_shift
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("gate", [0.0, 1.0], ids=["shut", "open"])
def test_a_gated_norm_is_batch_norm_times_its_gate(shift, training, gate):
    norm, x = gated(shift).train(training), image()
    norm.gate.fill_(gate)
    expected = by_torch(norm, x)
    assert expected.abs().max() > 0.1
    close(norm(x), expected * gate)


def test_a_shut_gate_still_lets_statistics_be_tracked():
    norm, reference = gated(), nn.BatchNorm2d(3, dtype=torch.float64)
    reference.running_mean.copy_(norm.running_mean)
    reference.running_var.copy_(norm.running_var)
    norm.gate.zero_()
    for x in (image(), image() * 2):
        norm(x)
        reference(x)
    close(norm.running_mean, reference.running_mean)
    close(norm.running_var, reference.running_var)


@with_and_without_shift
@pytest.mark.parametrize("gate", [0.0, 1.0], ids=["shut", "open"])
def test_a_gated_norm_folds_with_its_gate(shift, gate):
    norm, x = gated(shift).eval(), image(2, 2)
    norm.gate.fill_(gate)
    kernel, bias = torch.randn(3, 2, 3, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    folded, folded_bias = algebra.fuse_norm(kernel, bias, **norm.fold_arguments(torch.float64))
    close(F.conv2d(x, folded, folded_bias), by_torch(norm, F.conv2d(x, kernel, bias)) * gate)
    if gate == 0:
        assert not folded.any()
        assert not folded_bias.any()


def test_the_drawn_gate_takes_precedence_and_gets_a_gradient():
    norm, x = gated(), image()
    norm.gate.zero_()
    drawn = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    norm.drawn = drawn
    plain = by_torch(norm, x).detach()
    y = norm(x)
    close(y, plain * 0.7)
    weights = torch.randn_like(y)
    (y * weights).sum().backward()
    close(drawn.grad, (plain * weights).sum())
    assert norm.gate.grad is None
    norm.drawn = None
    assert not norm(x).any()


def test_a_drawn_gate_does_not_change_what_is_folded():
    norm = gated()
    before = norm.fold_arguments(torch.float64)
    norm.drawn = torch.tensor(0.0)
    after = norm.fold_arguments(torch.float64)
    assert all(torch.equal(after[name], before[name]) for name in ("gamma", "beta", "mean", "var"))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_gate_keeps_the_dtype_of_half_precision_input(half):
    norm = GatedNorm(3, shift=True)
    norm.drawn = torch.tensor(1.0, requires_grad=True)
    assert norm(image().to(half)).dtype == half


@with_and_without_shift
def test_opened_for_good_it_is_an_ordinary_branch_norm_with_nothing_left_of_the_gate(shift):
    norm, fresh, x = gated(shift), BranchNorm(3, shift=shift, dtype=torch.float64), image()
    norm.drawn = torch.tensor(0.0)
    parameters = dict(norm.named_parameters())
    opened = norm.open_for_good_()
    assert opened is norm
    assert type(opened) is BranchNorm
    assert opened.kind == "norm"
    assert set(vars(opened)) == set(vars(fresh))
    assert list(opened.state_dict()) == list(fresh.state_dict())
    assert all(parameter is parameters[name] for name, parameter in opened.named_parameters())
    for training in (True, False):
        expected = by_torch(opened.train(training), x)
        close(opened(x), expected)
    fresh.load_state_dict(opened.state_dict(), strict=True)
    assert torch.equal(fresh.eval()(x), opened.eval()(x))


def test_a_deep_copy_of_a_gated_norm_has_a_gate_of_its_own():
    norm, x = gated().eval(), image()
    twin = copy.deepcopy(norm)
    assert type(twin) is GatedNorm
    assert torch.equal(twin(x), norm(x))
    twin.gate.zero_()
    assert float(norm.gate) == 1
    assert not twin(x).any()


def test_the_gate_goes_through_a_state_dict():
    norm, twin, x = gated().eval(), gated().eval(), image()
    norm.gate.zero_()
    state = norm.state_dict()
    assert set(state) - set(BranchNorm(3, shift=True).state_dict()) == {"gate"}
    twin.load_state_dict(state, strict=True)
    assert not twin(x).any()
    twin.gate.fill_(1)
    norm.gate.fill_(1)
    assert torch.equal(twin(x), norm(x))


def test_the_gate_is_open_at_first_and_not_a_parameter():
    norm = GatedNorm(3, shift=True, dtype=torch.float64)
    assert (float(norm.gate), norm.gate.dtype) == (1.0, torch.float64)
    assert [name for name, _ in norm.named_parameters()] == ["weight", "bias"]
    assert norm.drawn is None


# Making ------------------------------------------------------------------------------------------------------------


@with_and_without_shift
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("norm", BranchNorm), ("linear", ChannelScale), ("gated", GatedNorm)],
    ids=["norm", "linear", "gated"],
)
def test_every_kind_is_made_with_the_shift_gamma_and_dtype_asked_for(kind, expected, shift):
    made = make_scaling(kind, 3, shift=shift, gamma=0.4, dtype=torch.float64)
    assert type(made) is expected
    assert made.kind == kind
    assert made.normalises == (kind != "linear")
    assert (made.bias is not None) == (shift and kind != "linear")
    assert torch.equal(made.weight, torch.full((3,), 0.4, dtype=torch.float64))
    assert {value.dtype for value in made.state_dict().values()} == {torch.float64}


def test_the_kinds_are_these():
    assert SCALINGS == ("norm", "linear", "gated")


def test_an_unknown_kind_is_refused_with_the_valid_ones():
    with pytest.raises(BranchError, match=r"^scaling='batch' is unknown; valid are norm, linear, gated$"):
        make_scaling("batch", 3, shift=True)
