"""Which branches fit a convolution, which are worth adding, and why the others are not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from dyrep.branches import BRANCHES, BranchOption, branch_option, branch_options, make_branch
from dyrep.errors import BranchError
from dyrep.geometry import ConvGeometry
from strategies import OF_OTHER_METHODS, conv_cases, fitting_branch


def options(conv: nn.Module) -> dict[str, BranchOption]:
    return branch_options(ConvGeometry.of(conv))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(conv_cases())
def test_options_name_every_branch_and_make_branch_agrees_with_them(case):
    conv = case.conv()
    found = options(conv)
    assert tuple(found) == BRANCHES
    found |= {name: branch_option(name, ConvGeometry.of(conv)) for name in OF_OTHER_METHODS}
    assert all(found[name].possible and found[name].duplicate for name in OF_OTHER_METHODS)
    for name, option in found.items():
        assert bool(option.reason) == (not option.possible or option.duplicate)
        if option.possible:
            made = make_branch(name, ConvGeometry.of(conv), shift=conv.bias is not None, dtype=torch.float64)
            assert made.kernel(torch.float64).shape == conv.weight.shape
        else:
            with pytest.raises(BranchError):
                make_branch(name, ConvGeometry.of(conv), shift=conv.bias is not None)


@pytest.mark.parametrize(
    ("conv", "expected"),
    [
        (nn.Conv1d(2, 2, 3, padding=1), ["1x1", "1x1-KxK", "1x1-AVG", "residual"]),
        (nn.Conv2d(2, 2, 3, padding=1), list(BRANCHES)),
        (nn.Conv3d(2, 2, 3, padding=1), list(BRANCHES)),
        (nn.Conv2d(2, 2, 3, padding=1, groups=2), ["1x1-AVG", "1xK", "Kx1", "residual"]),
        (nn.Conv2d(2, 2, 3, padding=1, groups=2, stride=2), ["1x1", "1x1-AVG", "1xK", "Kx1"]),
        (nn.Conv2d(2, 4, 3, padding=1, groups=2), ["1x1", "1x1-AVG", "1xK", "Kx1"]),
        (nn.Conv2d(2, 2, (1, 3), padding=(0, 1)), ["1x1", "1x1-KxK", "1x1-AVG", "residual"]),
        (nn.Conv2d(2, 2, 1), []),
    ],
    ids=["1-d", "2-d", "3-d", "depthwise", "depthwise strided", "multiplier", "one row", "pointwise"],
)
def test_branches_worth_adding(conv, expected):
    assert [name for name, option in options(conv).items() if option == BranchOption()] == expected


@pytest.mark.parametrize(
    ("conv", "shown"), [(nn.Conv2d(2, 2, 1), "1x1"), (nn.Conv1d(2, 4, 1, stride=2), "1"), (nn.Conv3d(2, 2, 1), "1x1x1")]
)
def test_a_pointwise_kernel_can_have_no_branch(conv, shown):
    reason = f"the kernel is {shown}: a branch could only repeat it"
    expected = dict.fromkeys(BRANCHES, BranchOption(False, reason=reason))
    if conv.in_channels == conv.out_channels and set(conv.stride) == {1}:  # only where it is asked for
        expected["residual"] = BranchOption(duplicate=True, reason=reason)
    assert options(conv) == expected


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (nn.Conv2d(2, 3, 3, padding=1), "the residual needs as many output as input channels (2 in, 3 out)"),
        (nn.Conv2d(2, 2, 3, (1, 2), 1), "the residual needs stride 1, not 1x2"),
        (
            nn.Conv2d(2, 2, (3, 2), padding=1),
            "the residual needs a kernel tap that reads the position it writes: "
            "padding ((1, 1), (1, 1)) does not give one for a 3x2 kernel",
        ),
    ],
    ids=["channels", "stride", "tap"],
)
def test_the_residual_is_impossible_for_a_reason(conv, reason):
    assert options(conv)["residual"] == BranchOption(False, reason=reason)
    with pytest.raises(BranchError) as caught:
        make_branch("residual", ConvGeometry.of(conv), shift=True)
    assert str(caught.value) == f"branch 'residual' is not possible: {reason}"


def test_a_depthwise_1x1_is_a_duplicate_only_beside_a_residual():
    reason = "with one channel per group the 1x1 is the residual branch up to scale"
    assert options(nn.Conv2d(2, 2, 3, padding=1, groups=2))["1x1"] == BranchOption(duplicate=True, reason=reason)
    assert options(nn.Conv2d(2, 2, 3, padding=1, groups=2, stride=2))["1x1"] == BranchOption()


@pytest.mark.parametrize("outputs", [2, 4], ids=["depthwise", "multiplier"])
def test_a_1x1_kxk_with_one_channel_per_group_is_a_duplicate(outputs):
    reason = "with one channel per group it is the origin up to scale"
    found = options(nn.Conv2d(2, outputs, 3, groups=2))["1x1-KxK"]
    assert found == BranchOption(duplicate=True, reason=reason)


@pytest.mark.parametrize(
    ("conv", "name", "reason"),
    [
        (nn.Conv2d(2, 2, (1, 3)), "1xK", "for a 1x3 kernel it is the KxK branch"),
        (nn.Conv2d(2, 2, (1, 3)), "Kx1", "for a 1x3 kernel it is the 1x1 branch"),
        (nn.Conv2d(2, 2, (3, 1)), "1xK", "for a 3x1 kernel it is the 1x1 branch"),
        (nn.Conv2d(2, 2, (3, 1)), "Kx1", "for a 3x1 kernel it is the KxK branch"),
        (nn.Conv1d(2, 2, 3), "1xK", "for a 3 kernel it is the 1x1 branch"),
        (nn.Conv1d(2, 2, 3), "Kx1", "for a 3 kernel it is the 1x1 branch"),
    ],
)
def test_a_collapsed_kernel_that_is_another_branch_is_a_duplicate(conv, name, reason):
    assert options(conv)[name] == BranchOption(duplicate=True, reason=reason)


def test_the_depthwise_1x1_really_is_the_residual_up_to_scale():
    conv = nn.Conv2d(3, 3, 3, padding=1, groups=3, dtype=torch.float64)
    small, identity = (fitting_branch(name, conv).kernel(torch.float64) for name in ("1x1", "residual"))
    ratio = small[:, :, 1:2, 1:2]
    assert ratio.abs().min() > 0
    assert torch.equal(small, identity * ratio)


def test_the_collapsed_duplicate_really_has_the_size_of_its_twin():
    conv = nn.Conv2d(2, 2, (1, 3), padding=(0, 1))
    assert fitting_branch("1xK", conv).conv.weight.shape == conv.weight.shape
    assert fitting_branch("Kx1", conv).conv.weight.shape == fitting_branch("1x1", conv).conv.weight.shape


def test_an_unknown_branch_is_refused_with_the_valid_ones():
    with pytest.raises(BranchError) as caught:
        make_branch("3x3", ConvGeometry.of(nn.Conv2d(2, 2, 3)), shift=True)
    assert str(caught.value) == (
        "unknown branch '3x3'; valid are 1x1, 1x1-KxK, 1x1-AVG, 1xK, Kx1, residual, 1x1-DCT, DW-1x1, and KxK-2, "
        "KxK-3 ... for copies of the origin"
    )


def test_a_pointwise_convolution_is_refused_with_the_reason():
    with pytest.raises(BranchError, match=r"^branch '1x1' is not possible: the kernel is 1x1: a branch could only"):
        make_branch("1x1", ConvGeometry.of(nn.Conv2d(2, 2, 1)), shift=True)
