"""VGG: a small one for tiny images, and the VGG-16 that papers train on CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dyrep.models.chain import append_conv, append_head, init_convs_

_VGG16_WIDTHS = ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3)


def small_vgg(
    num_classes: int = 10, in_channels: int = 1, widths: Sequence[Sequence[int]] = ((16, 16), (32, 32), (64, 64))
) -> nn.Sequential:
    """A plain chain of 3x3 convolutions with batch norm, pooled between stages: conv1, norm1, conv2, ...

    Args:
        num_classes: classes to tell apart.
        in_channels: channels of an image.
        widths: output channels of every convolution, by stage. Images need ``2 ** len(widths)`` pixels a side.

    Example:
        >>> import torch
        >>> small_vgg()(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    model, channels = _features(widths, in_channels)
    append_head(model, channels, num_classes)
    return model


def vgg16(num_classes: int = 10, in_channels: int = 3) -> nn.Sequential:
    """VGG-16 with batch norm for 32x32 images: thirteen convolutions, one hidden layer and the classifier.

    Example:
        >>> sum(p.numel() for p in vgg16().parameters())
        14986698
    """
    model, channels = _features(_VGG16_WIDTHS, in_channels)
    model.add_module("average", nn.AdaptiveAvgPool2d(1))
    model.add_module("flatten", nn.Flatten())
    model.add_module("hidden", nn.Linear(channels, channels))
    model.add_module("hidden_relu", nn.ReLU())
    model.add_module("classifier", nn.Linear(channels, num_classes))
    init_convs_(model)
    return model


def _features(widths: Sequence[Sequence[int]], channels: int) -> tuple[nn.Sequential, int]:
    """The convolutions with a pool after every stage, and the number of channels they end in."""
    model, number = nn.Sequential(), 0
    for stage in widths:
        for width in stage:
            number += 1
            append_conv(model, number, channels, width)
            channels = width
        model.add_module(f"pool{number}", nn.MaxPool2d(2))
    return model, channels
