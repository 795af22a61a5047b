"""Random convolutions with an input that fits them, and what it takes to compare two ways to compute the same."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from dyrep.block import RepConv, as_block_
from dyrep.branches import branch_options, make_branch
from dyrep.branches.options import RELATIVES
from dyrep.geometry import ConvGeometry
from dyrep.norm import BranchNorm

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
OF_OTHER_METHODS = ("KxK-2", *RELATIVES)
"""Branches beside those of the paper: a copy of the original kernel, and OREPA's."""


@dataclass
class ConvCase:
    """The arguments of a convolution, the size of an image it accepts, and a seed for everything random."""

    arguments: dict
    image: tuple[int, ...]
    batch: int
    seed: int

    def conv(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        torch.manual_seed(self.seed)
        return CONVS[len(self.image) - 1](**self.arguments, dtype=dtype)

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.batch, self.arguments["in_channels"], *self.image)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def conv_cases(draw) -> ConvCase:
    """Any convolution with more than one tap: 1-d to 3-d, every grouping, stride, dilation, padding and mode."""
    ndim = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(ndim))

    padding = draw(st.sampled_from(["same", "valid", "centred", "centred", "numbers", "numbers"]))
    sizes = [1, 3] if padding == "centred" else [1, 2, 3] if ndim == 3 else [1, 2, 3, 4]
    kernel = draw(st.tuples(*[st.sampled_from(sizes)] * ndim).filter(lambda sizes: any(k > 1 for k in sizes)))
    dilation = each(1, 2 if ndim == 3 else 4)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    stride, amounts = (1,) * ndim, [0] * ndim
    if padding == "same":
        amounts = [r - r // 2 for r in reach]
    elif padding == "centred":
        padding = amounts = tuple(r // 2 for r in reach)
    else:
        stride = each(1, 3)
        if padding == "numbers":
            padding = amounts = tuple(draw(st.integers(0, r // 2 + 2)) for r in reach)
    mode = draw(st.sampled_from(PADDING_MODES))
    image = []
    for r, p in zip(reach, amounts, strict=True):
        smallest = max(r + 1 - 2 * p, p + 1 if mode == "reflect" else p if mode == "circular" else 1, 1)
        image.append(smallest + draw(st.integers(0, 3)))
    grouping = draw(st.sampled_from(["dense", "grouped", "depthwise", "multiplier"]))
    if grouping == "dense":
        groups, in_channels = 1, draw(st.integers(1, 3))
        out_channels = draw(st.just(in_channels) | st.integers(1, 3))
    elif grouping == "grouped":
        groups, in_channels, out_channels = 2, 4, draw(st.sampled_from([2, 4, 6]))
    else:
        groups = in_channels = draw(st.integers(2, 3))
        out_channels = groups * (1 if grouping == "depthwise" else 2)
    arguments = {
        "in_channels": in_channels,
        "out_channels": out_channels,
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
        "padding_mode": mode,
    }
    return ConvCase(arguments, tuple(image), batch=draw(st.integers(2, 3)), seed=draw(st.integers(0, 2**16)))


def possible_branches(conv: nn.Module) -> list[str]:
    """Every branch that can be added, duplicates included."""
    return [name for name, option in branch_options(ConvGeometry.of(conv)).items() if option.possible]


def fitting_branch(name: str, conv: nn.Module, **arguments):
    """A branch for this convolution, with random statistics and γ in every norm."""
    made = make_branch(name, ConvGeometry.of(conv), shift=conv.bias is not None, dtype=conv.weight.dtype, **arguments)
    randomize_norms_(made)
    return made


def grown_block(conv: nn.Module, names: list[str] | None = None, **arguments) -> RepConv:
    """Turn a convolution into a block, in place, with these branches (default: every possible one) beside it."""
    block = as_block_(conv)
    names = possible_branches(conv) if names is None else names
    block.branches = nn.ModuleDict({name: fitting_branch(name, conv, **arguments) for name in names})
    return block


@torch.no_grad()
def randomize_norms_(module: nn.Module) -> None:
    """γ of either sign, variances around one, and a shift where there is one."""
    for norm in module.modules():
        if isinstance(norm, BranchNorm):
            norm.weight.copy_((torch.rand(norm.weight.shape) + 0.5) * torch.randn(norm.weight.shape).sign())
            norm.running_var.copy_(torch.rand(norm.running_var.shape) * 2 + 0.2)
            if norm.bias is not None:
                norm.bias.copy_(torch.randn(norm.bias.shape))
                norm.running_mean.copy_(torch.randn(norm.running_mean.shape))


@torch.no_grad()
def carrying(conv: nn.Module, kernel: Tensor, bias: Tensor | None) -> nn.Module:
    """Torch's own convolution with the hyper-parameters of this one and another kernel and bias."""
    plain = copy.deepcopy(conv)
    assert type(plain) in CONVS
    assert (plain.bias is None) == (bias is None)
    assert plain.weight.shape == kernel.shape
    plain.weight.copy_(kernel)
    if bias is not None:
        plain.bias.copy_(bias)
    return plain


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖∞ / ‖expected‖∞, and the bare difference where nothing is expected."""
    assert actual.shape == expected.shape
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    difference, scale = (actual - expected).abs().max(), expected.abs().max()
    return float(difference / scale if scale > 0 else difference)
