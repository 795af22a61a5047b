"""Chains of convolution, norm and ReLU, and how to fold the norms into the convolutions."""

from __future__ import annotations

import math

import torch
from torch import nn

from dyrep.algebra import fuse_norm
from dyrep.copying import copied
from dyrep.errors import ConfigError


def append_conv(
    chain: nn.Sequential,
    label: str | int,
    in_channels: int,
    out_channels: int,
    *,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    norm: bool = True,
) -> None:
    """Append ``conv{label}``, ``norm{label}`` and ``relu{label}``; without the norm, the convolution has a bias.

    Example:
        >>> chain = nn.Sequential()
        >>> append_conv(chain, 1, 3, 8)
        >>> [name for name, _ in chain.named_children()]
        ['conv1', 'norm1', 'relu1']
    """
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=not norm)
    chain.add_module(f"conv{label}", conv)
    if norm:
        chain.add_module(f"norm{label}", nn.BatchNorm2d(out_channels))
    chain.add_module(f"relu{label}", nn.ReLU())


def append_head(chain: nn.Sequential, channels: int, num_classes: int) -> None:
    """Append ``average`` (over all positions), ``flatten`` and ``classifier``.

    Example:
        >>> chain = nn.Sequential()
        >>> append_head(chain, 8, 10)
        >>> chain(torch.randn(2, 8, 7, 5)).shape
        torch.Size([2, 10])
    """
    chain.add_module("average", nn.AdaptiveAvgPool2d(1))
    chain.add_module("flatten", nn.Flatten())
    chain.add_module("classifier", nn.Linear(channels, num_classes))


@torch.no_grad()
def init_convs_(model: nn.Module) -> None:
    """Draw every kernel from Kaiming's normal distribution (fan-out, ReLU) and zero the biases.

    Example:
        >>> depthwise = nn.Conv2d(64, 64, 3, groups=64)
        >>> init_convs_(depthwise)
        >>> bool(depthwise.weight.std() > 0.3), bool(depthwise.bias.any())
        (True, False)
    """
    for conv in model.modules():
        if isinstance(conv, nn.Conv2d):
            # torch's own kaiming_normal_ takes the fan-out of a grouped kernel for that of a dense one
            fan_out = conv.out_channels * math.prod(conv.kernel_size) // conv.groups
            conv.weight.normal_(0, math.sqrt(2 / fan_out))
            if conv.bias is not None:
                conv.bias.zero_()


@torch.no_grad()
def fold_norms(model: nn.Module) -> nn.Sequential:
    """Fold every batch norm of a chain into the convolution before it.

    Args:
        model: a sequential model such as those of `dyrep.models`; it stays as it is. One that has grown branches
            goes through `dyrep.deploy` first.

    Returns:
        A copy without norms that computes what the model computes in eval mode. Its other layers keep their names.

    Raises:
        ConfigError: the model is not a chain, or a norm has nothing to be folded into or no running statistics.

    Example:
        >>> chain = nn.Sequential()
        >>> append_conv(chain, 1, 3, 8)
        >>> folded = fold_norms(chain)
        >>> list(folded.state_dict())
        ['conv1.weight', 'conv1.bias']
        >>> x = torch.randn(2, 3, 6, 6)
        >>> torch.allclose(folded(x), chain.eval()(x), atol=1e-5)
        True
    """
    if not isinstance(model, nn.Sequential):
        raise ConfigError(f"fold_norms takes an nn.Sequential, not a {type(model).__name__}: only a chain has an order")
    folded = nn.Sequential()
    conv: nn.Module | None = None
    for name, layer in model.named_children():
        if isinstance(layer, nn.BatchNorm2d):
            _absorb_norm_(conv, layer, name)
            conv = None
        else:
            conv = copied(layer)
            folded.add_module(name, conv)
    return folded.train(model.training)


def _absorb_norm_(conv: nn.Module | None, norm: nn.BatchNorm2d, name: str) -> None:
    if type(conv) is not nn.Conv2d:  # a subclass may compute more than its own weight says
        before = "no layer of its own" if conv is None else f"a {type(conv).__name__}"
        raise ConfigError(
            f"norm {name!r} follows {before}, not a plain Conv2d, so it cannot be folded; "
            "if the model has branches, fold a copy made by dyrep.deploy(model)"
        )
    if norm.running_mean is None or norm.running_var is None:
        raise ConfigError(f"norm {name!r} keeps no running statistics to fold; use track_running_stats=True")
    kernel, bias = fuse_norm(
        conv.weight,
        conv.bias,
        var=norm.running_var,
        eps=norm.eps,
        gamma=norm.weight,
        beta=norm.bias,
        mean=norm.running_mean,
    )
    assert bias is not None
    trainable = conv.weight.requires_grad
    conv.weight, conv.bias = nn.Parameter(kernel, trainable), nn.Parameter(bias, trainable)
