"""Detection: boxes around things, and what they are."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dyrep import models
from dyrep.engine.data import Data
from dyrep.engine.data.detection import open_detection
from dyrep.engine.data.loader import Loader
from dyrep.engine.precision import computing_in
from dyrep.engine.recipe import BOXES_PER_IMAGE, Recipe, RunSettings
from dyrep.engine.resources import loading_of
from dyrep.engine.tasks.measuring import FoundBoxes, mean_average_precision
from dyrep.engine.tasks.task import DRAWN, Learnt, check_name, evaluating
from dyrep.engine.world import World
from dyrep.errors import ConfigError
from dyrep.models.backbones import keep_still_
from dyrep.models.detection import set_boxes_per_image_, set_image_size_
from dyrep.surgery.detectors import heads_in_float32


class Detection:
    """The losses of a detector in the manner of torchvision, and COCO's mAP in percent.

    Args:
        recipe: what is trained.
    """

    name = "detection"
    metric = "map"
    counts_hits = False
    same_shapes = False

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def open_data(self, settings: RunSettings, world: World) -> Data:
        """Lists of images and of boxes."""
        recipe = self._recipe
        return open_detection(
            recipe.dataset,
            settings.data,
            loading_of(recipe, settings, world),
            size=recipe.image_size,
            batch_size=recipe.batch_size,
            flip=recipe.flip,
            val_split=recipe.val_split,
        )

    def build(self, *, classes: int, channels: int, size: int | None) -> nn.Module:
        """A detector of `dyrep.models`, torchvision or the user's own."""
        recipe = self._recipe
        if recipe.model in models.DETECTORS:
            if size is None:
                raise ConfigError("a detector is built for a size of images: give --image-size")
            model = models.build_detector(
                recipe.model, num_classes=classes, image_size=size, box_batch_size_per_image=recipe.boxes_per_image
            )
        else:
            check_name(recipe.model, models.DETECTORS)
            model = models.build(recipe.model, num_classes=classes + 1, in_channels=channels)
            if recipe.image_size is not None:
                set_image_size_(model, recipe.image_size)
            if recipe.boxes_per_image != BOXES_PER_IMAGE:  # otherwise a function's own choice stays
                set_boxes_per_image_(model, recipe.boxes_per_image)
        keep_still_(model, norms=recipe.norms, frozen_stages=recipe.frozen_stages)
        return model

    def learn(self, model: nn.Module, batch: Any, computing: AbstractContextManager[Any]) -> Learnt:
        """The sum of all losses that the detector gives."""
        images, targets = batch
        with computing, heads_in_float32(model):
            losses: dict[str, Tensor] = model(images, targets)
        total = torch.stack([loss.float() for loss in losses.values()]).sum()
        return Learnt(total, torch.zeros((), device=total.device))

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, loader: Loader, world: World, precision: torch.dtype, classes: tuple[str, ...]
    ) -> dict[str, float]:
        """COCO's average precisions in percent: mean over overlaps, at 50 % and 75 %, and of every class that occurs.

        If no image of the split has a box, there is no average precision: it is NaN.
        """
        measured = mean_average_precision()  # says what is missing before anything is computed
        boxes = FoundBoxes(world)
        with evaluating(model):
            for raw in loader.batches(0):
                images, targets = loader.prepare(raw)
                with computing_in(precision, world.device), heads_in_float32(model):
                    said = model(images)
                for prediction, target in zip(said, targets, strict=True):
                    boxes.add(prediction, target)
        measured.update(*boxes.everywhere())
        result = measured.compute()
        # torchmetrics says -1 where there is nothing to find; without any box it leaves the classes out
        found = {"map": result["map"], "map50": result["map_50"], "map75": result["map_75"]}
        shares = {key: 100 * float(value) if value >= 0 else math.nan for key, value in found.items()}
        each = result.get("map_per_class", torch.zeros(0)).reshape(-1)
        for label, value in zip(result["classes"].reshape(-1), each, strict=True):
            if value >= 0:
                shares[f"ap_{classes[int(label) - 1]}"] = 100 * float(value)
        return shares

    def example(self, *, channels: int, size: int, device: torch.device | str = "cpu") -> Any:
        """One black square without boxes."""
        return [torch.zeros(channels, size, size, device=device)], [_nothing(device)]

    def random_inputs(self, *, channels: int, size: int) -> Any:
        """Two images of noise, of different shapes."""
        generator = torch.Generator().manual_seed(0)
        shapes = ((size, size), (size, size + size // 4))
        return [torch.rand(channels, *shape, generator=generator) for shape in shapes], [_nothing("cpu")] * 2

    def inputs(self, batch: Any, most: int | None = None) -> Any:
        """Images and targets, which is how `dyrep.surgery.detectors` knows a detector's batch."""
        return list(batch[0][:most]), list(batch[1][:most])

    @torch.no_grad()
    def draw(self, model: nn.Module, data: Data, file: Path) -> bool:
        """Boxes that are there beside boxes that are found, of a few images to validate on."""
        from dyrep.engine.tasks.drawing import boxes_drawn, write_sheet

        loader = data.test if data.val is None else data.val
        panels: list[list[Any]] = []
        with evaluating(model):
            for raw in islice(loader.batches(0), DRAWN):
                images, targets = (part[:1] for part in loader.prepare(raw))
                (found,) = model(images)
                truth = boxes_drawn(images[0], targets[0]["boxes"], targets[0]["labels"], data.classes)
                certain = found["scores"] >= 0.5
                said = boxes_drawn(
                    images[0], found["boxes"][certain], found["labels"][certain], data.classes, found["scores"][certain]
                )
                panels.append([truth, said])
        write_sheet(file, panels, ("annotated", "found, with a score of at least 0.5"), data.classes)
        return True


def _nothing(device: torch.device | str) -> dict[str, Tensor]:
    return {
        "boxes": torch.zeros(0, 4, device=device),
        "labels": torch.zeros(0, dtype=torch.int64, device=device),
    }
