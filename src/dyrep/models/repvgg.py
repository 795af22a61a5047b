"""The RepVGG family as plain chains of 3x3 convolutions, without the branches RepVGG trains them with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from torch import Tensor, nn

from dyrep.errors import ConfigError
from dyrep.models.chain import append_conv, append_head, init_convs_

Form = Literal["norm", "bias"]

_DEPTHS = {"a": (2, 4, 14, 1), "b": (4, 6, 16, 1)}
# multipliers of the widths 64, 128, 256 and of 512
_WIDTHS = {
    "a0": (0.75, 2.5),
    "a1": (1.0, 2.5),
    "a2": (1.5, 2.75),
    "b0": (1.0, 2.5),
    "b1": (2.0, 4.0),
    "b2": (2.5, 5.0),
    "b3": (3.0, 5.0),
}
NAMES = (*_WIDTHS, *(f"{size}g{groups}" for size in ("b1", "b2", "b3") for groups in (2, 4)))
_TIMM_KEY = re.compile(r"(?:stem|stages\.(\d+)\.(\d+))\.reparam_conv\.(weight|bias)")


def repvgg(name: str, num_classes: int = 1000, in_channels: int = 3, form: Form = "norm") -> nn.Sequential:
    """A RepVGG by the name of its size: conv0 is the stem, conv1, conv2, ... follow.

    Args:
        name: ``a0``, ``a1``, ``a2``, ``b0``, ``b1``, ``b2``, ``b3``, or one of the last three with every second
            convolution in groups, such as ``b1g4``.
        num_classes: classes to tell apart.
        in_channels: channels of an image.
        form: ``norm`` to train (convolutions without bias, then batch norm), or ``bias`` as deployed (convolutions
            with bias, no norms); `fold_norms` makes the second out of the first.

    Raises:
        ConfigError: an unknown name or form.

    Example:
        >>> import torch
        >>> model = repvgg("a0", num_classes=10)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
        >>> model.conv21
        Conv2d(192, 1280, kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), bias=False)
    """
    if name not in NAMES:
        raise ConfigError(f"there is no RepVGG {name!r}; use one of {', '.join(NAMES)}")
    if form not in ("norm", "bias"):
        raise ConfigError(f"form={form!r} is not a form of RepVGG; use 'norm' to train or 'bias' as deployed")
    early, last = _WIDTHS[name[:2]]
    groups = int(name[3:] or 1)
    stages = zip(_DEPTHS[name[0]], (64 * early, 128 * early, 256 * early, 512 * last), strict=True)
    # output channels and stride of every layer, the stem first
    layers = [(min(64, int(64 * early)), 2)]
    layers += [(int(width), 2 if number == 0 else 1) for depth, width in stages for number in range(depth)]

    model, channels = nn.Sequential(), in_channels
    for number, (width, stride) in enumerate(layers):
        grouped = groups if number and number % 2 == 0 else 1
        append_conv(model, number, channels, width, stride=stride, groups=grouped, norm=form == "norm")
        channels = width
    append_head(model, channels, num_classes)
    init_convs_(model)
    return model


def from_timm_deployed(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of a RepVGG that timm has re-parameterized to those of `repvgg` with ``form="bias"``.

    Args:
        state_dict: of ``timm.utils.reparameterize_model(timm.create_model("repvgg_a0"))``, for example.

    Returns:
        The same tensors, for ``load_state_dict``.

    Raises:
        ConfigError: a weight that is not of such a model.

    Example:
        >>> import torch
        >>> deployed = {"stages.0.0.reparam_conv.bias": torch.ones(48), "head.fc.bias": torch.ones(10)}
        >>> list(from_timm_deployed(deployed))
        ['conv1.bias', 'classifier.bias']
    """
    found = {key: _TIMM_KEY.fullmatch(key) for key in state_dict}
    places = sorted({(int(m[1]), int(m[2])) for m in found.values() if m and m[1] is not None})
    renamed = {}
    for key, match in found.items():
        if match is not None:
            number = 0 if match[1] is None else 1 + places.index((int(match[1]), int(match[2])))
            renamed[f"conv{number}.{match[3]}"] = state_dict[key]
        elif key in ("head.fc.weight", "head.fc.bias"):
            renamed[key.replace("head.fc", "classifier")] = state_dict[key]
        else:
            raise ConfigError(
                f"weight {key!r} is not one of a deployed RepVGG of timm; take the state dict of "
                "timm.utils.reparameterize_model(model), and of repvgg_a* or repvgg_b* only"
            )
    return renamed
