"""Random blocks, and everything that one training step computes with them, to compare two ways of running it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import dyrep
from dyrep.block import RepConv, as_block_, branch_for, origin_scaling_for
from dyrep.branches import branch_option
from dyrep.execution import Execution, folded, fused
from dyrep.geometry import ConvGeometry
from dyrep.norm import BranchNorm
from dyrep.scaling import GatedNorm
from strategies import CONVS, ConvCase, randomize_norms_

NAMES = ("1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", "residual", "KxK-2", "1x1-DCT", "DW-1x1")
ALWAYS, NEVER = 0, 1 << 62
"""From how many bytes on moments are used: `fused.forward`'s argument."""

Forward = Callable[[RepConv, Tensor], Tensor]


def eager(block: RepConv, x: Tensor) -> Tensor:
    return block._added(block.geometry.branch_input(x))


def fused_with(moments_from: int) -> Forward:
    return lambda block, x: fused.forward(block, block.geometry.branch_input(x), moments_from)


def folded_with(**options) -> Forward:
    """On no more images than asked for, unless said otherwise."""
    settings = Execution("folded", **{"values": 1, **options})
    return lambda block, x: folded.forward(block, block.geometry.branch_input(x), settings)


@contextmanager
def measuring(images: int, detached: bool = False) -> Iterator[None]:
    """Let eager norms look at a few images of the batch alone, and perhaps take σ for a constant."""
    original = BranchNorm._batch_statistics

    def first_images(self, x, dims, values, synchronize):
        seen = x[:images]
        mean, var, count = original(self, seen, dims, seen.numel() // x.shape[1], synchronize)
        return (mean.detach(), var.detach(), count) if detached else (mean, var, count)

    with patch.object(BranchNorm, "_batch_statistics", first_images):
        yield


@dataclass
class BlockCase:
    """A convolution and its input, the branches beside it, and what stands at the end of the origin."""

    conv: ConvCase
    names: tuple[str, ...]
    origin: str = "plain"
    scaling: str = "norm"
    width: int = 1
    nested: bool = False
    needs_input_gradient: bool = True

    def block(self, dtype: torch.dtype = torch.float64) -> RepConv:
        block = make_block(self.conv.conv(dtype), self.names, self.origin, self.scaling, self.width)
        if self.nested and "1x1-KxK" in self.names:
            inner = block.branches["1x1-KxK"].conv
            make_block(inner, [n for n in ("1x1", "1xK", "1x1-KxK") if fits(n, inner)])
        return block

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        return (self.conv.input(torch.float64) * 1.3 + 0.4).to(dtype)


def fits(name: str, conv: nn.Module) -> bool:
    return branch_option(name, ConvGeometry.of(conv)).possible


def fitting(conv: nn.Module) -> tuple[str, ...]:
    """Every branch that a convolution can have, OREPA's and a copy of the origin included."""
    return tuple(name for name in NAMES if fits(name, conv))


def make_block(
    conv: nn.Module, names: Sequence[str] | None = None, origin: str = "plain", scaling: str = "norm", width: int = 1
) -> RepConv:
    """Let a convolution grow branches (default: all that fit), with random γ, β and statistics in every norm."""
    block = as_block_(conv)
    names = fitting(conv) if names is None else names
    block.set_branches_({name: branch_for(block, name, width=width, scaling=scaling) for name in names})
    if origin == "normalised":
        block.origin_norm = origin_scaling_for(block, scaling)
    elif origin == "off":
        block.switch_origin_off_()
    randomize_norms_(block)
    for norm in block.modules():
        if isinstance(norm, GatedNorm):
            norm.drawn = (torch.rand((), dtype=norm.weight.dtype) + 0.5).requires_grad_()
    return block


def seven_branches(dtype: torch.dtype = torch.float64, origin: str = "plain", **arguments) -> RepConv:
    """A 3x3 convolution with the six branches of the paper."""
    arguments = {"padding": 1, **arguments}
    return make_block(nn.Conv2d(4, 4, 3, dtype=dtype, **arguments), dyrep.BRANCHES, origin)


def images(batch: int = 6, channels: int = 4, dtype: torch.dtype = torch.float64, size: tuple = (6, 5)) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, channels, *size, generator=generator, dtype=torch.float64)
    return (x * (1 + torch.arange(batch).reshape(-1, *(1,) * (1 + len(size))) / batch) + 0.4).to(dtype)


def values_per_channel(block: RepConv, x: Tensor) -> int:
    """How many numbers the norms of a block see per channel."""
    with torch.no_grad():
        y = copy.deepcopy(block).eval()(x)
    return y.numel() // y.shape[1]


def step(
    block: RepConv,
    x: Tensor,
    forward: Forward,
    *,
    needs_input_gradient: bool = True,
    passes: int = 1,
    at_once: bool = False,
) -> dict[str, Tensor]:
    """What one training step computes, by name: output, all gradients, running statistics. The block stays as it is.

    With several passes, gradients are the sum of them all; backward goes each, or all of them ``at_once`` at the end.
    """
    block = copy.deepcopy(block).train()
    x = x.clone().requires_grad_(needs_input_gradient)
    outputs: list[Tensor] = []
    for _ in range(passes):
        outputs.append(forward(block, x))
        generator = torch.Generator().manual_seed(5)
        along = torch.randn(outputs[-1].shape, generator=generator, dtype=torch.float64).to(outputs[-1])
        if not at_once:
            outputs[-1].backward(along)
    if at_once:
        torch.autograd.backward(outputs, [along] * passes)
    found = {"output": outputs[-1].detach()}
    gates = {f"{name}.drawn": norm.drawn for name, norm in block.named_modules() if isinstance(norm, GatedNorm)}
    for name, tensor in {"input": x, **dict(block.named_parameters()), **gates}.items():
        if tensor is not None and tensor.requires_grad:
            assert tensor.grad is not None, f"no gradient of {name}"
            found[f"gradient of {name}"] = tensor.grad
    return found | {name: buffer for name, buffer in block.named_buffers() if not name.endswith("filters")}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    """Equal up to rounding, relative to the largest entry; gradients that vanish in theory are compared to one."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        assert found[name].dtype == value.dtype, name
        if value.numel():
            error = (found[name].double() - value.double()).abs().max()
            assert error <= tolerance * max(float(value.abs().max()), 1.0), f"{name}: {float(error):.1e}"


def norms_of(module: nn.Module) -> list[BranchNorm]:
    return [norm for norm in module.modules() if isinstance(norm, BranchNorm)]


@st.composite
def plain_convs(draw) -> ConvCase:
    """Two-dimensional convolutions as networks have them: kernels up to 7, zeros around, mostly without groups."""
    kernel = draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 5, 7])] * 2).filter(lambda sizes: sizes != (1, 1)))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 3)]))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = tuple(r // 2 for r in reach) if draw(st.integers(0, 3)) else tuple(draw(st.integers(0, r)) for r in reach)
    image = [max(r + 1 - 2 * p, 1) + draw(st.integers(1, 4)) for r, p in zip(reach, padding, strict=True)]
    groups = draw(st.sampled_from([1, 1, 1, 2, 4]))
    arguments = {
        "in_channels": 4,
        "out_channels": draw(st.sampled_from([4, 4, 8])),
        "kernel_size": kernel,
        "stride": draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 3)])),
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    return ConvCase(arguments, tuple(image), batch=draw(st.integers(2, 4)), seed=draw(st.integers(0, 2**16)))


@st.composite
def block_cases(draw, convs: st.SearchStrategy[ConvCase]) -> BlockCase:
    """Any subset of branches beside a convolution, the origin as it is, with a norm, or left out."""
    case = draw(convs)
    torch.manual_seed(0)
    possible = fitting(CONVS[len(case.image) - 1](**case.arguments))
    names = draw(st.just(possible) | st.lists(st.sampled_from(possible), min_size=1, unique=True).map(tuple))
    return BlockCase(
        case,
        names,
        origin=draw(st.sampled_from(["plain", "plain", "normalised", "off"])),
        scaling=draw(st.sampled_from(["norm", "norm", "gated"])),
        width=draw(st.sampled_from([1, 1, 2])),
        nested=draw(st.booleans()),
        needs_input_gradient=draw(st.booleans()),
    )
