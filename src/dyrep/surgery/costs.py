"""Parameters and multiply-adds, of a model as it is and of branches it might grow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dyrep.branches import collapsed_kernel
from dyrep.geometry import ConvGeometry
from dyrep.surgery.preserve import Forward, preserved, run_batch
from dyrep.surgery.wrappers import bare


@dataclass(frozen=True)
class Costs:
    """What a model costs on one batch.

    Attributes:
        parameters: number of parameters, branches included.
        macs: multiply-adds of one forward pass per example (convolutions and matrix products, as papers count).
        positions: output positions (all spatial dimensions) of every convolution, per example.
    """

    parameters: int
    macs: int
    positions: dict[str, int]


@torch.no_grad()
def costs(model: nn.Module, batch: Any, *, forward: Forward | None = None) -> Costs:
    """Count a model's parameters and multiply-adds by running it once in eval mode.

    Example:
        >>> costs(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 6, 6)).macs  # 8 * 3 * 9 * 4 * 4
        3456
    """
    model = bare(model)
    positions: dict[str, int] = {}
    examples = [1]

    def watch(name: str, conv: nn.Module) -> Any:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> None:
            spatial = output.shape[2:] if output.dim() == conv.weight.dim() else output.shape[1:]  # type: ignore[operator]
            positions[name] = positions.get(name, 0) + int(torch.Size(spatial).numel())

        return conv.register_forward_hook(hook)

    def count_examples(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, (Tensor, list, tuple))), None)
        examples[0] = max(len(first), 1) if first is not None else 1

    convs = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d))}
    handles = [watch(name, conv) for name, conv in convs.items()]
    handles.append(model.register_forward_pre_hook(count_examples, with_kwargs=True))
    try:
        with preserved(model, training=False), FlopCounterMode(display=False) as counter:
            run_batch(model, batch, forward)
    finally:
        for handle in handles:
            handle.remove()
    parameters = sum(p.numel() for p in model.parameters())
    return Costs(parameters, counter.get_total_flops() // 2 // examples[0], positions)


def added_macs(conv: nn.Module, branches: Iterable[str], positions: int, width: int = 1) -> int:
    """Multiply-adds per example that branches would add to a convolution, given its number of output positions."""
    g = ConvGeometry.of(conv)
    per_tap = g.out_channels * g.in_channels // g.groups
    in_positions = positions
    for stride in g.stride:
        in_positions *= stride  # exact for 'same' padding, near enough to rank by otherwise
    total = 0
    for name in branches:
        if name in ("1x1", "1xK", "Kx1"):
            total += positions * per_tap * int(torch.Size(collapsed_kernel(name, g)).numel())
        elif name == "1x1-AVG":
            total += 0 if g.depthwise else positions * per_tap
        elif name == "1x1-KxK":
            point = g.in_channels * width * g.in_channels // g.groups
            total += in_positions * point + positions * per_tap * width * g.taps
    return total
