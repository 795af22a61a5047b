"""Segmentation networks on ResNets whose last stages keep their resolution: PSPNet, FCN and DeepLabV3.

PSPNet comes from segmentation-models-pytorch, the heads of the others from torchvision. All see features at an eighth
of the image's resolution, as in the paper of PSPNet: strides of the last two stages are replaced by dilation.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dyrep.errors import ConfigError
from dyrep.extras import needed

_KINDS = ("pspnet", "fcn", "deeplabv3")
SEGMENTERS = tuple(f"{kind}_{resnet}" for kind in _KINDS for resnet in ("resnet18", "resnet34", "resnet50"))
"""The names that `build_segmenter` knows."""
_STRIDE = 8
DIVISOR = 32
"""What sides must be a multiple of in segmentation-models-pytorch, even if strides are replaced by dilation."""


def build_segmenter(name: str, *, num_classes: int) -> nn.Module:
    """Build a segmentation network with random weights.

    Args:
        name: one of `SEGMENTERS`.
        num_classes: classes to tell apart.

    Raises:
        ConfigError: there is no such network.
        MissingPackageError: the package it comes from is not installed.

    Example:
        >>> import torch
        >>> build_segmenter("fcn_resnet18", num_classes=5).eval()(torch.zeros(1, 3, 64, 64))["out"].shape
        torch.Size([1, 5, 64, 64])
    """
    if name not in SEGMENTERS:
        raise ConfigError(f"there is no segmentation network {name!r}; use one of {', '.join(SEGMENTERS)}")
    kind, resnet = name.split("_")
    if kind == "pspnet":
        return _pspnet(resnet, num_classes)
    return _torchvision(kind, resnet, num_classes)


def check_trainable(name: str, *, image_size: int | None, images: int) -> None:
    """Refuse squares and batches that a network of `SEGMENTERS` cannot be trained on, before a layer fails on them.

    Args:
        name: of the network; those of others are not known here, and pass.
        image_size: side of the squares that it is trained on, if there are any.
        images: how many of them a batch norm sees together.

    Raises:
        ConfigError: it cannot; the message says what is nearest.

    Example:
        >>> check_trainable("pspnet_resnet18", image_size=64, images=1)
    """
    kind = name.split("_")[0] if name in SEGMENTERS else ""
    if kind == "pspnet" and image_size is not None and image_size % DIVISOR:
        nearest = max(round(image_size / DIVISOR), 1) * DIVISOR
        raise ConfigError(
            f"image_size={image_size}: {name} takes images whose sides are multiples of {DIVISOR}; give --image-size "
            f"{nearest}, or train fcn or deeplabv3"
        )
    pixel = image_size is not None and image_size <= _STRIDE  # of an image this is all that is left
    if images == 1 and (kind == "deeplabv3" or (kind == "fcn" and pixel)):
        raise ConfigError(
            f"a batch norm of {name} sees one value per image, of which it needs two or more, and gets those of 1 "
            "image: give a --batch-size of at least 2 per process"
        )


def _pspnet(resnet: str, num_classes: int) -> nn.Module:
    smp = needed("segmentation_models_pytorch", f"pspnet_{resnet}", "fcn and deeplabv3 do without")
    model: Any = smp.PSPNet(
        resnet, encoder_weights=None, encoder_depth=5, upsampling=_STRIDE, classes=num_classes, psp_dropout=0.1
    )
    model.encoder.make_dilated(output_stride=_STRIDE)
    assert isinstance(model, nn.Module)
    return model


def _torchvision(kind: str, resnet: str, num_classes: int) -> nn.Module:
    models = needed("torchvision.models", f"{kind}_{resnet}")
    backbone = models.get_model(resnet, weights=None)
    channels = backbone.fc.in_features
    for stage, rate in (("layer3", 2), ("layer4", 4)):
        _dilate_(getattr(backbone, stage), rate)
    body = models._utils.IntermediateLayerGetter(backbone, {"layer4": "out"})
    parts = getattr(models.segmentation, kind)
    head, network = {"fcn": ("FCNHead", "FCN"), "deeplabv3": ("DeepLabHead", "DeepLabV3")}[kind]
    model = getattr(parts, network)(body, getattr(parts, head)(channels, num_classes))
    assert isinstance(model, nn.Module)
    return model


def _dilate_(stage: nn.Module, rate: int) -> None:
    """Let a stage keep its resolution; torchvision does this for blocks of three convolutions alone."""
    for conv in stage.modules():
        if isinstance(conv, nn.Conv2d):
            conv.stride = (1, 1)
            if conv.kernel_size != (1, 1):
                conv.dilation = conv.padding = (rate, rate)
