"""torchmetrics, which does the counting for detection and segmentation."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from dyrep.errors import ConfigError

BACKENDS = ("faster_coco_eval", "pycocotools")
"""What computes COCO's metrics for torchmetrics; the first that is installed is taken."""
_INSTALL = 'pip install "dyrep[downstream]"'


def mean_average_precision() -> Any:
    """The mAP as COCO defines it, by torchmetrics with whichever of its backends is there.

    Raises:
        ConfigError: torchmetrics, or a backend, is not installed; the message names the extra.

    Example:
        >>> mean_average_precision().class_metrics
        True
    """
    metrics = _torchmetrics("detection", "mAP of detectors")
    return metrics.MeanAveragePrecision(class_metrics=True, backend=coco_backend())


def coco_backend() -> str:
    """What computes COCO's metrics here.

    Raises:
        ConfigError: nothing that could is installed; the message names the extra.
    """
    backend = next((name for name in BACKENDS if importlib.util.find_spec(name) is not None), None)
    if backend is None:
        packages = " or ".join(name.replace("_", "-") for name in BACKENDS)
        raise ConfigError(f"mAP of detectors needs {packages}, and neither is installed: {_INSTALL}")
    return backend


def intersection_over_union(classes: int, ignored: int) -> Any:
    """Intersection over union of every class, and their mean over classes that occur.

    Raises:
        ConfigError: torchmetrics is not installed; the message names the extra.

    Example:
        >>> import torch
        >>> iou = intersection_over_union(2, ignored=255)
        >>> iou.update(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 255]))
        >>> {key: value.tolist() for key, value in iou.compute().items()}
        {'each': [0.5, 0.0], 'mean': 0.25}
    """
    metrics = _torchmetrics("classification", "mIoU of segmentation networks")
    collection = importlib.import_module("torchmetrics").MetricCollection
    kind, settings = metrics.MulticlassJaccardIndex, {"num_classes": classes, "ignore_index": ignored}
    return collection({"mean": kind(average="macro", **settings), "each": kind(average="none", **settings)})


def _torchmetrics(part: str, what: str) -> Any:
    try:
        return importlib.import_module(f"torchmetrics.{part}")
    except ImportError as error:
        raise ConfigError(f"{what} needs torchmetrics, which cannot be imported ({error}): {_INSTALL}") from error
