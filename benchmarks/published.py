"""The block as papers describe it and as research code runs it: one module per operation, to be measured against.

Every branch ends in a batch norm of its own and writes its whole output before it is added to the others. Where a norm
stands before a kernel that needs padding, the border has to hold what the norm makes of a zero, or the branch would not
fold into one convolution; research code writes that border edge by edge, from the running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PaddedNorm(nn.Module):
    """A batch norm whose output is padded with what the norm makes of a zero.

    Args:
        channels: number of channels.
        padding: width of the border, at least 1.
    """

    def __init__(self, channels: int, padding: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.padding = padding

    def border(self) -> Tensor:
        """The value of the border in every channel, by the running statistics; no gradient passes through it."""
        norm, mean, var = self.norm, self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert var is not None
        return norm.bias.detach() - mean * norm.weight.detach() * torch.rsqrt(var + norm.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise and pad."""
        width = self.padding
        y = F.pad(self.norm(x), (width,) * 4)
        border = self.border().reshape(1, -1, 1, 1)
        y[:, :, :width] = border
        y[:, :, -width:] = border
        y[..., :width] = border
        y[..., -width:] = border
        return y


class PublishedBlock(nn.Module):
    """All seven branches in place of a convolution (six where the input cannot be added to the output).

    The convolution's own kernel is kept. A bias is not: the norms have one each.

    Args:
        conv: the convolution; see `unfit`.

    Example:
        >>> list(PublishedBlock(nn.Conv2d(4, 4, 3, padding=1)).branches)
        ['KxK', '1x1', '1x1-KxK', '1x1-AVG', '1xK', 'Kx1', 'residual']
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        if reason := unfit(conv):
            raise ValueError(f"{conv} cannot become a published block: {reason}")
        inputs, outputs, groups = conv.in_channels, conv.out_channels, conv.groups
        kernel, stride = conv.kernel_size[0], (conv.stride[0], conv.stride[1])
        pad = kernel // 2

        def point(channels: int) -> nn.Conv2d:
            return nn.Conv2d(inputs, channels, 1, groups=groups, bias=False)

        def strided(size: int | tuple[int, int], padding: int | tuple[int, int]) -> nn.Conv2d:
            return nn.Conv2d(inputs, outputs, size, stride, padding, groups=groups, bias=False)

        branches: dict[str, list[nn.Module]] = {
            "KxK": [strided(kernel, pad)],
            "1x1": [strided(1, 0)],
            "1x1-KxK": [point(inputs), PaddedNorm(inputs, pad), strided(kernel, 0)],
            "1x1-AVG": [point(outputs), PaddedNorm(outputs, pad), nn.AvgPool2d(kernel, stride)],
            "1xK": [strided((1, kernel), (0, pad))],
            "Kx1": [strided((kernel, 1), (pad, 0))],
        }
        if inputs == outputs and stride == (1, 1):
            branches["residual"] = []
        self.branches = nn.ModuleDict(
            {name: nn.Sequential(*parts, nn.BatchNorm2d(outputs)) for name, parts in branches.items()}
        )
        self.to(conv.weight)
        self.branches["KxK"][0].weight = conv.weight  # type: ignore[index]
        self.train(conv.training)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of all branches, added one after another."""
        first, *others = self.branches.values()
        y = first(x)
        for branch in others:
            y += branch(x)
        return y


def unfit(conv: nn.Module) -> str:
    """Why a module cannot become a `PublishedBlock`; empty if it can.

    Example:
        >>> unfit(nn.Conv2d(4, 4, 1))
        'the kernel is not square, odd and larger than 1'
    """
    if type(conv) is not nn.Conv2d:
        return "it is not a plain Conv2d"
    height, width = conv.kernel_size
    if height != width or height % 2 == 0 or height == 1:
        return "the kernel is not square, odd and larger than 1"
    if conv.padding not in ((height // 2,) * 2, "same") or conv.padding_mode != "zeros" or conv.dilation != (1, 1):
        return "the padding is not half the kernel, in zeros and without dilation"
    return ""


def publish_(model: nn.Module, names: Iterable[str] | None = None) -> list[str]:
    """Replace convolutions of a model by published blocks, in place.

    Args:
        model: the model.
        names: which convolutions (default: all that fit).

    Returns:
        The names of what was replaced.

    Example:
        >>> publish_(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)))
        ['0']
    """
    chosen = [name for name, module in model.named_modules() if name and not unfit(module)] if names is None else names
    replaced = []
    for name in chosen:
        conv = model.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        model.set_submodule(name, PublishedBlock(conv))
        replaced.append(name)
    return replaced
