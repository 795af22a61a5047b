"""Detectors that want their targets in training mode: which part of them can be run and compared.

torchvision's detectors take a list of images of any sizes and, in training, a list of dicts with the boxes. In training
they give losses, for which boxes are sampled at random, and in evaluation boxes that have gone through non-maximum
suppression. Neither can be compared between two runs, and counting what they cost would depend on what was found. So
a detector is measured on what all of that is made from: features, and what every head says about them, those that look
at single boxes on boxes that are always the same.

What heads say becomes places in pixels and scores to be sorted, for which half precision is too coarse: see
`heads_in_float32`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dyrep.surgery.wrappers import bare

GRIDS = (1, 2, 4)
"""Boxes that heads are run on: the whole image, its quarters, its sixteenths."""


def is_detection(model: nn.Module, batch: Any) -> bool:
    """Whether a model is a detector in the manner of torchvision, and a batch is images and targets for it.

    Example:
        >>> is_detection(nn.Linear(1, 1), ([torch.ones(3, 8, 8)], [{"boxes": torch.zeros(0, 4)}]))
        False
    """
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and _is_detector(model)):
        return False
    images, targets = batch
    listed = all(isinstance(part, Sequence) for part in (images, targets))
    return (
        listed
        and all(isinstance(image, Tensor) and image.dim() == 3 for image in images)
        and all(isinstance(target, Mapping) for target in targets)
    )


@contextmanager
def heads_in_float32(model: nn.Module) -> Iterator[None]:
    """Under autocast, run only the backbone of a detector in low precision: the rest gets its features as float32.

    A bfloat16 beyond 256 is a multiple of 2, so boxes decoded in it are off by pixels, and scores tie.

    Args:
        model: a detector with a ``backbone``, wrapped or not; any other model runs as it did.

    Example:
        >>> model = nn.Sequential()
        >>> model.backbone = nn.Linear(1, 1)
        >>> with torch.autocast("cpu", torch.bfloat16), heads_in_float32(model):
        ...     model.backbone(torch.ones(1, 1)).dtype, (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
        (torch.float32, torch.float32)
    """
    backbone = getattr(bare(model), "backbone", None)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if not isinstance(backbone, nn.Module) or not torch.is_autocast_enabled(device):
        yield
        return
    low, replaced, own = torch.get_autocast_dtype(device), "forward" in vars(backbone), backbone.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, low):
            found = own(*args, **kwargs)
        return _as_float32(found)

    backbone.forward = forward
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        if replaced:
            backbone.forward = own
        else:
            del backbone.forward


def _as_float32(features: Any) -> Any:
    if isinstance(features, Tensor):
        return features.float()
    if isinstance(features, Mapping):  # ordered, from the finest level on
        return type(features)((name, _as_float32(value)) for name, value in features.items())  # type: ignore[call-arg]
    if isinstance(features, (tuple, list)):
        return type(features)(_as_float32(value) for value in features)
    return features


def detector_outputs(model: Any, batch: Any) -> dict[str, Any]:
    """What a detector computes up to the point where boxes are sampled or sorted out, in its present mode.

    Args:
        model: a detector in the manner of torchvision: with a transform, a backbone, and heads.
        batch: images and targets; targets are not looked at.

    Returns:
        Features of all levels, and what the heads that the model has make of them. Heads that look at single boxes
        look at `GRIDS` of every image.
    """
    with heads_in_float32(model):  # as in training
        images, _ = model.transform(list(batch[0]), None)
        features = model.backbone(images.tensors)
        features = {"0": features} if isinstance(features, Tensor) else dict(features)
        found: dict[str, Any] = {"features": features}
        if hasattr(model, "rpn"):
            found["rpn"] = model.rpn.head(list(features.values()))
        if hasattr(model, "head"):
            found["head"] = model.head(list(features.values()))
        heads = getattr(model, "roi_heads", None)
        boxes = [_boxes(size, images.tensors) for size in images.image_sizes]
        for kind in ("box", "mask", "keypoint") if heads is not None else ():
            pool, head, predictor = (
                getattr(heads, f"{kind}_{part}", None) for part in ("roi_pool", "head", "predictor")
            )
            if pool is not None and head is not None and predictor is not None:
                found[kind] = predictor(head(pool(features, boxes, images.image_sizes)))
    return found


def _is_detector(model: nn.Module) -> bool:
    batches = callable(getattr(getattr(model, "transform", None), "batch_images", None))
    return batches and isinstance(getattr(model, "backbone", None), nn.Module)


def _boxes(size: tuple[int, int], like: Tensor) -> Tensor:
    """Boxes (x1, y1, x2, y2) that divide an image of some height and width."""
    height, width = size
    cells = [(row / n, column / n, 1 / n) for n in GRIDS for row in range(n) for column in range(n)]
    corners = [(left, top, left + side, top + side) for top, left, side in cells]
    return torch.tensor(corners, dtype=like.dtype, device=like.device) * torch.tensor(
        [width, height, width, height], dtype=like.dtype, device=like.device
    )
