"""Parameters and multiply-adds, of a model as it is and of branches it might grow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dyrep.block import RepConv
from dyrep.branches import DepthwiseBranch, collapsed_kernel, is_copy, pools_by_convolution
from dyrep.geometry import PLAIN_CONVS, ConvGeometry
from dyrep.passing import PassedNorm
from dyrep.surgery.preserve import Forward, preserved, run_batch
from dyrep.surgery.wrappers import bare


@dataclass(frozen=True)
class Positions:
    """Over how many positions (all spatial dimensions) a convolution works, per example.

    Attributes:
        input: positions its branches read.
        output: positions it writes.
    """

    input: int = 0
    output: int = 0


@dataclass(frozen=True)
class Costs:
    """What a model costs on one batch.

    Attributes:
        parameters: number of parameters that take part, branches included, see `count_parameters`.
        macs: multiply-adds of one forward pass per example (convolutions and matrix products, as papers count).
        plain_macs: those of the plain network, with a convolution in place of every block.
        positions: positions of every convolution, summed over its calls.
        folding_macs: multiply-adds of one forward pass, whatever the batch, to compute the kernels of blocks that are
            folded at every step.

    Example:
        >>> found = costs(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(1, 3, 6, 6))
        >>> found.parameters, found.macs
        (224, 3456)
    """

    parameters: int
    macs: int
    plain_macs: int
    positions: dict[str, Positions]
    folding_macs: int = 0


@torch.no_grad()
def costs(model: nn.Module, batch: Any, *, forward: Forward | None = None) -> Costs:
    """Count a model's parameters and multiply-adds by running it once in eval mode.

    The examples of a batch are counted at the first convolution.

    Example:
        >>> costs(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 6, 6)).macs  # 8 * 3 * 9 * 4 * 4
        3456
    """
    model = bare(model)
    positions: dict[str, Positions] = {}
    examples: list[int] = []
    folded: list[RepConv] = []
    counter = _counter()
    blocks = _Blocks(counter)

    def watch(name: str, conv: nn.Module) -> Any:
        geometry = ConvGeometry.of(conv)
        dims = geometry.ndim

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            x: Tensor = args[0] if args else kwargs["input"]
            examples.append(x.shape[0] if x.dim() == dims + 2 else 1)
            if isinstance(conv, RepConv) and conv.branches and conv.is_linear:
                folded.append(conv)
            before = positions.get(name, Positions())
            read = math.prod(geometry.branch_input(x).shape[-dims:])
            positions[name] = Positions(before.input + read, before.output + math.prod(output.shape[-dims:]))

        return conv.register_forward_hook(hook, with_kwargs=True, prepend=True)

    handles = [watch(name, m) for name, m in model.named_modules() if isinstance(m, PLAIN_CONVS)]
    for module in model.modules():
        if isinstance(module, RepConv):
            handles.append(module.register_forward_pre_hook(blocks.enter))
            handles.append(module.register_forward_hook(blocks.leave, prepend=True))  # before others change the output
    try:
        with preserved(model, training=False), counter:
            run_batch(model, batch, forward)
    finally:
        for handle in handles:
            handle.remove()
    with _counter() as folding:
        for block in folded:
            block.folded()
    # hooks run inside out: of nested convolutions the inner ones come first, but all see the same batch
    count = max(examples[0], 1) if examples else 1
    flops, folding_macs = counter.get_total_flops(), folding.get_total_flops() // 2
    return Costs(
        count_parameters(model),
        macs=(flops // 2 - folding_macs) // count,
        plain_macs=(flops - blocks.flops + blocks.plain_flops) // 2 // count,
        positions=positions,
        folding_macs=folding_macs,
    )


class _NoModules(nullcontext[None]):
    """In place of what tells a counter in which module it is, and fails where a view of a parameter is an input."""

    parents = frozenset({"Global"})


def _counter() -> FlopCounterMode:
    counter: Any = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()
    return counter


class _Blocks:
    """What is spent inside blocks while a counter counts, and what convolutions in their place would spend."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter, self._depth, self._began = counter, 0, 0
        self.flops = self.plain_flops = 0

    def enter(self, block: nn.Module, args: Any) -> None:
        if self._depth == 0:  # blocks inside of blocks are part of these
            self._began = self._counter.get_total_flops()
        self._depth += 1

    def leave(self, block: RepConv, args: Any, output: Tensor) -> None:
        self._depth -= 1
        if self._depth == 0:
            self.flops += self._counter.get_total_flops() - self._began
            self.plain_flops += 2 * output.numel() * block.in_channels // block.groups * block.geometry.taps


def count_parameters(model: nn.Module) -> int:
    """The number of a model's parameters that take part in what it computes.

    Those of a norm that a block has taken the place of, and of an original kernel that is left out, do not.

    Example:
        >>> count_parameters(nn.Conv2d(3, 8, 3))
        224
    """
    waiting: set[int] = set()
    for module in model.modules():
        if isinstance(module, PassedNorm) or (isinstance(module, RepConv) and module.origin_off):
            waiting |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in waiting)


def added_macs(conv: nn.Module, branches: Iterable[str], positions: Positions, width: int = 1) -> int:
    """Multiply-adds per example that branches would add to a convolution that works over these positions.

    Example:
        >>> conv = nn.Conv2d(8, 8, 3, padding=1)
        >>> added_macs(conv, ["1x1", "residual"], Positions(input=16, output=16))  # 8 * 8 * 16
        1024
    """
    g = ConvGeometry.of(conv)
    per_tap = g.out_channels * g.in_channels // g.groups
    total = 0
    for name in branches:
        if name in ("1x1", "1xK", "Kx1"):
            total += positions.output * per_tap * math.prod(collapsed_kernel(name, g))
        elif is_copy(name):
            total += positions.output * per_tap * g.taps
        elif name == "1x1-DCT":
            total += positions.input * per_tap + positions.output * g.out_channels * g.taps
        elif name == "DW-1x1":
            total += positions.output * DepthwiseBranch.EXPANSION * (g.in_channels * g.taps + per_tap)
        elif name == "1x1-AVG":
            total += 0 if g.depthwise else positions.output * per_tap
            total += positions.output * g.in_channels * g.taps if pools_by_convolution(g) else 0
        elif name == "1x1-KxK":
            point = g.in_channels * width * g.in_channels // g.groups
            total += positions.input * point + positions.output * per_tap * width * g.taps
    return total
