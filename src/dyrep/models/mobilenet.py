"""MobileNet-V1: depthwise 3x3 convolutions, each followed by a pointwise one."""

from __future__ import annotations

from torch import nn

from dyrep.errors import ConfigError
from dyrep.models.chain import append_conv, append_head, init_convs_

# stride of the depthwise convolution and output channels of the pointwise one
_BLOCKS = ((1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512), *((1, 512),) * 5, (2, 1024), (1, 1024))


def mobilenet_v1(num_classes: int = 1000, in_channels: int = 3, width: float = 1.0) -> nn.Sequential:
    """MobileNet-V1, made for 224x224 images: conv0, then conv1_depthwise, conv1_pointwise, conv2_depthwise, ...

    Args:
        num_classes: classes to tell apart.
        in_channels: channels of an image.
        width: multiplier of all channels.

    Raises:
        ConfigError: a width that leaves no channels.

    Example:
        >>> import torch
        >>> mobilenet_v1(num_classes=10, width=0.25)(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    if int(32 * width) < 1:
        raise ConfigError(
            f"mobilenet_v1 with width={width!r} has no channels left; use at least 1/32, usually 0.25 to 1"
        )
    model, channels = nn.Sequential(), int(32 * width)
    append_conv(model, 0, in_channels, channels, stride=2)
    for number, (stride, full_width) in enumerate(_BLOCKS, start=1):
        append_conv(model, f"{number}_depthwise", channels, channels, stride=stride, groups=channels)
        append_conv(model, f"{number}_pointwise", channels, int(full_width * width), kernel=1)
        channels = int(full_width * width)
    append_head(model, channels, num_classes)
    init_convs_(model)
    return model
