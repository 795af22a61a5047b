"""Where kernel taps read their input, against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dyrep import algebra
from dyrep.geometry import ConvGeometry, flat
from strategies import CONVS, PADDING_MODES, conv_cases

CONV = (F.conv1d, F.conv2d, F.conv3d)


def padded_by_hand(x: torch.Tensor, pads) -> torch.Tensor:
    """Zeros around the image, or a smaller image, by copying the pixels that remain."""
    for axis, (before, after) in enumerate(pads, start=2):
        picked = [i if 0 <= i < x.shape[axis] else -1 for i in range(-before, x.shape[axis] + after)]
        columns = [x.select(axis, i) if i >= 0 else torch.zeros_like(x.select(axis, 0)) for i in picked]
        x = torch.stack(columns, dim=axis)
    return x


@pytest.mark.parametrize(
    ("conv", "pads"),
    [
        (nn.Conv2d(1, 1, 3, padding=1), ((1, 1), (1, 1))),
        (nn.Conv2d(1, 1, (3, 5), padding=(0, 2)), ((0, 0), (2, 2))),
        (nn.Conv1d(1, 1, 3, padding="valid"), ((0, 0),)),
        (nn.Conv1d(1, 1, 3, padding="same"), ((1, 1),)),
        (nn.Conv1d(1, 1, 4, padding="same"), ((1, 2),)),
        (nn.Conv1d(1, 1, 4, padding="same", dilation=3), ((4, 5),)),
        (nn.Conv3d(1, 1, (2, 3, 1), padding="same", dilation=(1, 2, 5)), ((0, 1), (2, 2), (0, 0))),
    ],
    ids=["int", "tuple", "valid", "same", "same even", "same even dilated", "same 3-d"],
)
def test_padding_is_resolved_to_numbers_before_and_after(conv, pads):
    assert ConvGeometry.of(conv).pads == pads


def test_geometry_holds_the_hyper_parameters_of_its_convolution():
    conv = nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 3), groups=2, padding_mode="reflect")
    assert ConvGeometry.of(conv) == ConvGeometry(
        in_channels=4,
        out_channels=6,
        kernel_size=(3, 2),
        stride=(2, 1),
        dilation=(1, 3),
        groups=2,
        pads=((1, 1), (0, 0)),
        padding_mode="reflect",
    )


@pytest.mark.parametrize(
    ("conv", "ndim", "point", "taps", "center"),
    [
        (nn.Conv1d(1, 1, 4), 1, (1,), 4, (1,)),
        (nn.Conv2d(1, 1, (3, 2)), 2, (1, 1), 6, (1, 0)),
        (nn.Conv3d(1, 1, (5, 1, 2)), 3, (1, 1, 1), 10, (2, 0, 0)),
    ],
    ids=["1-d", "2-d", "3-d"],
)
def test_kernel_facts(conv, ndim, point, taps, center):
    geometry = ConvGeometry.of(conv)
    assert (geometry.ndim, geometry.point, geometry.taps, geometry.center) == (ndim, point, taps, center)


@pytest.mark.parametrize(
    ("inputs", "outputs", "groups", "expected"),
    [(4, 4, 4, True), (4, 8, 4, False), (4, 4, 2, False), (1, 1, 1, False)],
    ids=["depthwise", "multiplier", "grouped", "one channel"],
)
def test_depthwise_means_one_own_channel_each(inputs, outputs, groups, expected):
    assert ConvGeometry.of(nn.Conv1d(inputs, outputs, 3, groups=groups)).depthwise is expected


@pytest.mark.parametrize(
    ("conv", "expected"),
    [
        (nn.Conv1d(1, 1, 3, padding=1), False),
        (nn.Conv1d(1, 1, 3, padding="same"), False),
        (nn.Conv1d(1, 1, 4, padding="same"), True),
        (nn.Conv1d(1, 1, 3, padding=1, padding_mode="circular"), True),
    ],
    ids=["symmetric", "same odd", "same even", "circular"],
)
def test_prepadding_is_needed_where_a_number_per_dimension_does_not_say_it(conv, expected):
    geometry = ConvGeometry.of(conv)
    assert geometry.needs_prepadding is expected
    assert not geometry.prepadded().needs_prepadding
    assert all(pair == (0, 0) for pair in geometry.prepadded().pads)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(conv_cases())
def test_branch_input_with_the_remaining_padding_gives_what_the_convolution_gives(case):
    conv, x = case.conv(), case.input()
    geometry = ConvGeometry.of(conv)
    left = geometry.prepadded() if geometry.needs_prepadding else geometry
    amounts = [before for before, _ in left.pads]
    assert all(before == after for before, after in left.pads)
    run = CONV[geometry.ndim - 1]
    y = run(geometry.branch_input(x), conv.weight, conv.bias, conv.stride, amounts, conv.dilation, conv.groups)
    torch.testing.assert_close(y, conv(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", PADDING_MODES)
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_branch_input_adds_the_batch_dimension_of_a_single_image(ndim, mode):
    conv = CONVS[ndim - 1](2, 3, 3, padding=1, padding_mode=mode)
    image = torch.randn(2, *(4,) * ndim)
    geometry = ConvGeometry.of(conv)
    assert torch.equal(geometry.branch_input(image), geometry.branch_input(image.unsqueeze(0)))


def test_branch_input_is_the_input_itself_where_nothing_has_to_be_padded():
    x = torch.randn(2, 2, 5)
    assert ConvGeometry.of(nn.Conv1d(2, 2, 3, padding=1)).branch_input(x) is x


@settings(max_examples=300, deadline=None, derandomize=True)
@given(case=conv_cases(), data=st.data())
def test_a_small_kernel_with_pads_for_equals_the_big_kernel_with_zeros(case, data):
    conv, x = case.conv(), case.input()
    geometry = ConvGeometry.of(conv)
    small = tuple(data.draw(st.sampled_from(sorted({1, k}))) for k in geometry.kernel_size)
    tap = data.draw(st.none() | st.tuples(*(st.integers(0, k - 1) for k in geometry.kernel_size)))
    kernel = torch.randn(*conv.weight.shape[:2], *small, dtype=torch.float64)
    position = geometry.center if tap is None else tap
    big = torch.zeros_like(conv.weight)
    window = tuple(
        slice(None) if s == k else slice(p, p + 1)
        for s, k, p in zip(small, geometry.kernel_size, position, strict=True)
    )
    big[(slice(None), slice(None), *window)] = kernel
    run, arguments = CONV[geometry.ndim - 1], (None, conv.stride, 0, conv.dilation, conv.groups)
    expected = run(padded_by_hand(x, geometry.pads), big, *arguments)
    actual = run(padded_by_hand(x, geometry.pads_for(small, tap)), kernel, *arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("padding", "stride"), [("same", 1), *itertools.product(["valid", 0, 1, 2, 3, 4, 6], [1, 2])], ids=str
)
def test_identity_tap_is_the_one_tap_that_returns_the_image(kernel, dilation, stride, padding):
    geometry = ConvGeometry.of(nn.Conv1d(2, 2, kernel, stride, padding, dilation))
    x = torch.randn(1, 2, 17, dtype=torch.float64)
    padded = padded_by_hand(x, geometry.pads)
    found = []
    for tap in range(kernel):
        weight = algebra.identity_kernel(2, (kernel,), tap=(tap,), dtype=torch.float64)
        y = F.conv1d(padded, weight, stride=stride, dilation=dilation)
        if y.shape == x.shape and torch.equal(y, x):
            found.append((tap,))
    assert found == ([] if geometry.identity_tap is None else [geometry.identity_tap])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"kernel_size": (3, 5), "padding": (1, 2)}, (1, 2)),
        ({"kernel_size": (3, 1), "padding": (2, 0), "dilation": (2, 4)}, (1, 0)),
        ({"kernel_size": (2, 4), "padding": "same"}, (0, 1)),
        ({"kernel_size": (3, 3), "padding": (1, 0)}, None),
        ({"kernel_size": (3, 3), "padding": 1, "stride": (1, 2)}, None),
        ({"kernel_size": (2, 3), "padding": "same", "dilation": (2, 1)}, None),
    ],
    ids=["odd", "dilated", "even same", "cropped", "strided", "between two taps"],
)
def test_identity_tap_needs_every_dimension(arguments, expected):
    assert ConvGeometry.of(nn.Conv2d(2, 2, **arguments)).identity_tap == expected


def test_flat_is_the_order_of_torch_pad():
    pads = ((1, 2), (3, 4), (0, 5))
    x = torch.randn(1, 1, 2, 3, 2)
    assert torch.equal(F.pad(x, flat(pads)), padded_by_hand(x, pads))
    assert list(itertools.chain(*pads)) != flat(pads)
