"""How long kernels are. Behind a batch norm that decides nothing but how fast they turn while they learn.

A gradient step turns such a kernel by an angle that falls with the square of its length. A block turns at another pace:
each of its branches has a length of its own beneath its norm, and all of them are moved at once. Folded as it is, its
kernel is longer than that, and turns several times slower, as if the learning rate had been lowered when blocks are
absorbed. So it is taken at the length at which it turns as fast as the block did.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dyrep import algebra
from dyrep.block import RepConv

_ABOVE_EPS = 100
"""Variances so many times ε are divided by their square root, but for half a percent."""


def turning_scale(block: RepConv, generator: torch.Generator | None = None) -> Tensor:
    """By what to multiply a block's folded kernel F, so that a gradient step turns it as fast as it turns the block.

    A step of size η along a gradient G of F moves the block's kernel by η·Σ JᵢJᵢᵀG, where Jᵢ is the Jacobian of F by
    the block's i-th parameter, and the kernel s·F by η·G/s, that is F by η·G/s². Both move F as far along G if
    s² = |G|² / Σ |JᵢᵀG|². G is drawn at random, as there is no loss here.

    Args:
        block: the block.
        generator: source of the random direction (default: torch's global one).

    Returns:
        s; 1 for a kernel that is all there is, and for a block whose kernel is not trained.

    Example:
        >>> from dyrep.block import as_block_
        >>> round(float(turning_scale(as_block_(nn.Conv2d(4, 4, 3)))), 6)
        1.0
    """
    with torch.inference_mode(False), torch.enable_grad():
        kernel, _ = block.folded(algebra.exact_dtype(block.weight))
        direction = torch.randn(kernel.shape, dtype=kernel.dtype, generator=generator).to(kernel.device)
        trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
        learns = bool(trained) and kernel.requires_grad  # what is trained may be the bias alone
        moved = torch.autograd.grad((kernel * direction).sum(), trained, allow_unused=True) if learns else ()
    steps = sum((gradient.double().square().sum() for gradient in moved if gradient is not None), kernel.new_zeros(()))
    return torch.where(steps > 0, (direction.square().sum() / steps).sqrt(), 1.0)


@torch.no_grad()
def factors_for(reader: nn.Module, scale: Tensor) -> Tensor:
    """By what to multiply each channel of a kernel that is to be scaled.

    Args:
        reader: the batch norm that alone reads its output.
        scale: by what to multiply the kernel.

    Returns:
        The scale, and 1 for channels that would be made to vary so little that the norm's ε has a say in what it
        divides them by: ε could not follow.

    Example:
        >>> reader = nn.BatchNorm2d(3)
        >>> reader.running_var[2] = 0
        >>> factors_for(reader, torch.tensor(0.5))
        tensor([0.5000, 0.5000, 1.0000])
    """
    _, variance, eps = _statistics(reader)
    factors = scale.to(variance).expand_as(variance)
    return torch.where((factors >= 1) | (factors.square() * variance >= _ABOVE_EPS * eps), factors, 1.0)


@torch.no_grad()
def rescale_(conv: nn.Module, reader: nn.Module, factors: Tensor) -> None:
    """Multiply the output channels of a convolution, and let the norm that reads them make up for it.

    In eval mode the function stays the same, in training mode but for the norm's ε.

    Args:
        conv: the convolution.
        reader: the batch norm that alone reads its output.
        factors: one per output channel.

    Example:
        >>> conv, reader = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4).eval()
        >>> x = torch.randn(2, 3, 8, 8)
        >>> before = reader(conv(x))
        >>> rescale_(conv, reader, torch.tensor([0.1, 0.5, 1.0, 3.0]))
        >>> torch.allclose(reader(conv(x)), before, atol=1e-5)
        True
    """
    for value in (conv.weight, conv.bias):
        if isinstance(value, Tensor):
            value.mul_(per_channel(factors, value))
    mean, variance, eps = _statistics(reader)
    factors = factors.to(variance)
    mean.mul_(factors)
    variance.add_(eps).mul_(factors.square()).sub_(eps).clamp_(min=0)


def per_channel(factors: Tensor, value: Tensor) -> Tensor:
    """Factors in the shape and precision to multiply the output channels of a kernel, or a bias, with.

    Example:
        >>> per_channel(torch.tensor([1.0, 2.0]), torch.zeros(2, 3, 1, 1)).shape
        torch.Size([2, 1, 1, 1])
    """
    return factors.to(value).view(-1, *[1] * (value.dim() - 1))


def _statistics(norm: nn.Module) -> tuple[Tensor, Tensor, float]:
    assert isinstance(norm, nn.modules.batchnorm._NormBase)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var, norm.eps
