"""torchmetrics, which does the counting for detection and segmentation."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dyrep.engine.world import World
from dyrep.extras import missing, needed

BACKENDS = ("faster_coco_eval", "pycocotools")
"""What computes COCO's metrics for torchmetrics; the first that can be imported is taken."""
_DETECTION = "mAP of detectors"  # what is measured, for messages
_SEGMENTATION = "mIoU of segmentation networks"


def mean_average_precision() -> Any:
    """The mAP as COCO defines it, by torchmetrics with whichever of its backends is there.

    Raises:
        MissingPackageError: torchmetrics, or a backend, is not installed.

    Example:
        >>> mean_average_precision().class_metrics
        True
    """
    metrics = needed("torchmetrics.detection", _DETECTION)
    # torchmetrics gathers image by image, which goes wrong where ranks have different numbers of images
    return metrics.MeanAveragePrecision(class_metrics=True, backend=coco_backend(), sync_on_compute=False)


def coco_backend() -> str:
    """What computes COCO's metrics here.

    Raises:
        MissingPackageError: nothing that could is installed.
    """
    for backend in BACKENDS:
        with contextlib.suppress(ImportError):  # of it, or of something that it needs
            importlib.import_module(backend)
            return backend
    first, second = BACKENDS
    raise missing(first, _DETECTION, f"{second} would do, too")


class FoundBoxes:
    """Boxes that were found and that are there, of the images of all ranks.

    Args:
        world: the processes that look at images, each at its own.

    Example:
        >>> found = FoundBoxes(World(torch.device("cpu")))
        >>> box = {"boxes": torch.tensor([[0.0, 0.0, 8.0, 8.0]]), "labels": torch.tensor([1])}
        >>> found.add({**box, "scores": torch.tensor([0.9])}, {**box, "iscrowd": torch.tensor([False])})
        >>> predictions, targets = found.everywhere()
        >>> predictions[0]["scores"].dtype, targets[0]["boxes"].tolist()
        (torch.float32, [[0.0, 0.0, 8.0, 8.0]])
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._images = 0
        self._rows = [torch.zeros(0, 9, dtype=torch.float64, device=world.device)]

    def add(self, prediction: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        """Add an image: boxes with labels and scores, and boxes with labels, some of them crowds."""
        place = self._world.rank + self._world.size * self._images
        self._images += 1
        for there, found, last in ((0, prediction, "scores"), (1, target, "iscrowd")):
            parts = [found["boxes"], found["labels"][:, None], found[last][:, None]]
            row = torch.cat([part.detach().to(self._rows[0]) for part in parts], 1)
            about = torch.tensor([place, there, 0], dtype=torch.float64, device=row.device)
            self._rows.append(torch.cat([about.expand(len(row), 3), row], 1))

    def everywhere(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Predictions and targets of all images, as torchmetrics wants them; all ranks have to call this together."""
        rows = torch.cat(self._rows)
        counts = [int(count) for count in self._world.gather(torch.tensor([len(rows)], device=rows.device))]
        padded = rows.new_zeros(max(counts), rows.shape[1])
        padded[: len(rows)] = rows
        parts = zip(self._world.gather(padded), counts, strict=True)
        together = torch.cat([part[:count] for part, count in parts])
        predictions, targets = [], []
        together = together[together[:, 0].argsort(stable=True)]
        for own in together.split(together[:, 0].unique(return_counts=True)[1].tolist()):
            found, there = (own[own[:, 1] == kind] for kind in (0, 1))
            predictions.append({**_boxes(found), "scores": found[:, 8].float()})
            targets.append({**_boxes(there), "iscrowd": there[:, 8].long()})
        return predictions, targets


def _boxes(rows: Tensor) -> dict[str, Tensor]:
    return {"boxes": rows[:, 3:7].float(), "labels": rows[:, 7].long()}


def intersection_over_union(classes: int, ignored: int) -> Any:
    """Intersection over union of every class, and their mean over classes that occur.

    Raises:
        MissingPackageError: torchmetrics is not installed.

    Example:
        >>> import torch
        >>> iou = intersection_over_union(2, ignored=255)
        >>> iou.update(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 255]))
        >>> {key: value.tolist() for key, value in iou.compute().items()}
        {'each': [0.5, 0.0], 'mean': 0.25}
    """
    metrics = needed("torchmetrics.classification", _SEGMENTATION)
    collection = needed("torchmetrics", _SEGMENTATION).MetricCollection
    kind, settings = metrics.MulticlassJaccardIndex, {"num_classes": classes, "ignore_index": ignored}
    return collection({"mean": kind(average="macro", **settings), "each": kind(average="none", **settings)})
