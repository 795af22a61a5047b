"""Detectors: Faster R-CNN with a feature pyramid on a ResNet, put together from torchvision."""

from __future__ import annotations

from typing import Any

from torch import nn

from dyrep.errors import ConfigError
from dyrep.extras import needed

DETECTORS = tuple(f"fasterrcnn_{resnet}_fpn" for resnet in ("resnet18", "resnet34", "resnet50"))
"""The names that `build_detector` knows."""
LONGEST = 5 / 3
"""Longest side of an image against its shortest, beyond which it is made smaller: torchvision's 1333 to 800."""


def build_detector(name: str, *, num_classes: int, image_size: int, **options: Any) -> nn.Module:
    """Build a detector with random weights.

    Its transform normalises images (values 0..1) with ImageNet's mean and deviation, and brings their shorter side to
    ``image_size``.

    Args:
        name: one of `DETECTORS`.
        num_classes: classes to tell apart, not counting the background.
        image_size: length of the shorter side of images.
        options: further arguments of `torchvision.models.detection.FasterRCNN`.

    Raises:
        ConfigError: there is no such detector.
        MissingPackageError: torchvision is not installed.

    Example:
        >>> model = build_detector("fasterrcnn_resnet18_fpn", num_classes=3, image_size=96)
        >>> model.roi_heads.box_predictor.cls_score.out_features
        4
    """
    if name not in DETECTORS:
        raise ConfigError(f"there is no detector {name!r}; use one of {', '.join(DETECTORS)}")
    detection = needed("torchvision.models.detection", name)
    resnet = name.split("_")[1]
    backbone = detection.backbone_utils.resnet_fpn_backbone(
        backbone_name=resnet, weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5
    )
    sizes = {"min_size": image_size, "max_size": round(image_size * LONGEST)}
    model = detection.FasterRCNN(backbone, num_classes=num_classes + 1, **{**sizes, **options})
    assert isinstance(model, nn.Module)
    return model


def set_image_size_(model: nn.Module, image_size: int) -> None:
    """Let a detector in the manner of torchvision bring the shorter side of images to a length.

    Raises:
        ConfigError: it has no transform that does so, or one that brings all images to one size.

    Example:
        >>> model = build_detector("fasterrcnn_resnet18_fpn", num_classes=3, image_size=96)
        >>> set_image_size_(model, 120)
        >>> model.transform.min_size, model.transform.max_size
        ((120,), 200)
    """
    transform: Any = getattr(model, "transform", None)
    fixed = getattr(transform, "fixed_size", None)
    if not hasattr(transform, "min_size") or fixed is not None:
        why = "has no transform with a min_size" if fixed is None else f"brings all images to {fixed[0]}x{fixed[1]}"
        raise ConfigError(
            f"image_size={image_size}: {type(model).__name__} {why}, so it cannot be told how long the shorter side of "
            "images is to be; give --image-size None, and choose the size in your own function"
        )
    transform.min_size, transform.max_size = (image_size,), round(image_size * LONGEST)


def set_boxes_per_image_(model: nn.Module, boxes: int) -> None:
    """Let the RoI heads of a detector in the manner of torchvision learn from so many boxes of every image.

    Raises:
        ConfigError: it has none.

    Example:
        >>> model = build_detector("fasterrcnn_resnet18_fpn", num_classes=3, image_size=96)
        >>> set_boxes_per_image_(model, 64)
        >>> model.roi_heads.fg_bg_sampler.batch_size_per_image
        64
    """
    sampler: Any = getattr(getattr(model, "roi_heads", None), "fg_bg_sampler", None)
    if not hasattr(sampler, "batch_size_per_image"):
        raise ConfigError(
            f"boxes_per_image={boxes}: {type(model).__name__} has no RoI heads, which would learn from so many boxes; "
            "give --boxes-per-image 512, which is the default"
        )
    sampler.batch_size_per_image = boxes
