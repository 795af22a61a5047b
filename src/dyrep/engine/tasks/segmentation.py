"""Segmentation: the class of every pixel."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyrep import models
from dyrep.engine.data import Data
from dyrep.engine.data.loader import Loader
from dyrep.engine.data.masks import IGNORED
from dyrep.engine.data.segmentation import MaskLoader, filled_up, open_segmentation
from dyrep.engine.precision import computing_in
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.resources import loading_of
from dyrep.engine.tasks.measuring import intersection_over_union
from dyrep.engine.tasks.task import DRAWN, Learnt, check_name, evaluating
from dyrep.engine.world import World
from dyrep.models.backbones import keep_still_
from dyrep.models.segmentation import check_trainable


class Segmentation:
    """Cross entropy over pixels, and mIoU in percent.

    Args:
        recipe: what is trained.
    """

    name = "segmentation"
    metric = "miou"
    counts_hits = True
    same_shapes = True

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def open_data(self, settings: RunSettings, world: World) -> Data:
        """Images and label maps, kept on the device if they fit."""
        recipe = self._recipe
        together = recipe.batch_size if recipe.sync_norms else recipe.batch_size // world.size
        check_trainable(recipe.model, image_size=recipe.image_size, images=together)
        return open_segmentation(
            settings.data,
            loading_of(recipe, settings, world),
            size=recipe.image_size,
            crop=recipe.crop == "resized",
            scale=recipe.scale,
            batch_size=recipe.batch_size,
            flip=recipe.flip,
            val_split=recipe.val_split,
            class_names=recipe.class_names,
            ignore_label=recipe.ignore_label,
        )

    def build(self, *, classes: int, channels: int, size: int | None) -> nn.Module:
        """A segmentation network of `dyrep.models`, torchvision or the user's own."""
        recipe = self._recipe
        if recipe.model in models.SEGMENTERS:
            model = models.build_segmenter(recipe.model, num_classes=classes)
        else:
            check_name(recipe.model, models.SEGMENTERS)
            model = models.build(recipe.model, num_classes=classes, in_channels=channels)
        keep_still_(model, norms=recipe.norms, frozen_stages=recipe.frozen_stages)
        return model

    def learn(self, model: nn.Module, batch: Any, computing: AbstractContextManager[Any]) -> Learnt:
        """Cross entropy over all pixels that count, and the share of them that was classified rightly."""
        images, labels = batch
        with computing:
            logits = _logits(model(images), labels)
        logits = logits.float()
        counts = labels != IGNORED
        losses = F.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=self._recipe.label_smoothing
        )
        pixels = counts.sum().clamp(min=1)  # a batch in which nothing counts teaches nothing, rather than NaN
        with torch.no_grad():
            right = ((logits.argmax(1) == labels) & counts).sum()
        return Learnt(losses / pixels, len(labels) * right / pixels)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, loader: Loader, world: World, precision: torch.dtype, classes: tuple[str, ...]
    ) -> dict[str, float]:
        """Mean loss per pixel, mIoU, pixels classified rightly and IoU of every class that occurs, in percent.

        If no pixel of the split counts, all of them are NaN.
        """
        measured = intersection_over_union(len(classes), IGNORED).to(world.device)
        sums = torch.zeros(3, dtype=torch.float64, device=world.device)
        occurs = torch.zeros(len(classes), dtype=torch.float64, device=world.device)
        with evaluating(model):
            for raw in loader.batches(0):
                images, labels = loader.prepare(raw)
                with computing_in(precision, world.device):
                    logits = _logits(model(images), labels)
                logits, counts = logits.float(), labels != IGNORED
                said = logits.argmax(1)
                sums[0] += F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
                sums[1] += ((said == labels) & counts).sum()
                sums[2] += counts.sum()
                occurs += torch.bincount(torch.cat([said[counts], labels[counts]]), minlength=len(classes))
                measured.update(said, labels)
        loss, right, pixels = world.sum(sums).tolist()
        result = measured.compute()
        # torchmetrics says 0 of classes that are neither there nor found, which no mean counts
        each = zip(classes, result["each"], world.sum(occurs).tolist(), strict=True)
        return {
            "loss": loss / pixels if pixels else math.nan,
            "miou": 100 * float(result["mean"]) if pixels else math.nan,
            "pixel_accuracy": 100 * right / pixels if pixels else math.nan,
            **{f"iou_{name}": 100 * float(value) for name, value, count in each if count},
        }

    def example(self, *, channels: int, size: int, device: torch.device | str = "cpu") -> Tensor:
        """One black image."""
        side = filled_up(size)
        return torch.zeros(1, channels, side, side, device=device)

    def random_inputs(self, *, channels: int, size: int) -> Tensor:
        """Two images of noise."""
        side = filled_up(size)
        return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))

    def inputs(self, batch: Any, most: int | None = None) -> Tensor:
        """The images, of which few are plenty: every pixel is compared."""
        images: Tensor = batch[0]
        return images[: None if most is None else min(most, 8)]

    @torch.no_grad()
    def draw(self, model: nn.Module, data: Data, file: Path) -> bool:
        """Images, their label maps and what is said about every pixel, of a few images to validate on."""
        from dyrep.engine.tasks.drawing import labels_drawn, pixels_of, write_sheet

        loader = data.test if data.val is None else data.val
        every = max(loader.steps // DRAWN, 1)
        panels: list[list[Any]] = []
        with evaluating(model):
            for raw in islice(loader.batches(0), 0, every * DRAWN, every):
                images, labels = (part[:1] for part in loader.prepare(raw))
                said = _logits(model(images), labels)[0].argmax(0)
                height, width = loader.size_of(int(raw[0][0])) if isinstance(loader, MaskLoader) else said.shape
                image, truth, said = (part[..., :height, :width] for part in (images[0], labels[0], said))
                told = torch.where(truth == IGNORED, IGNORED, said)
                panels.append([pixels_of(image), labels_drawn(truth), labels_drawn(told)])
        write_sheet(file, panels, ("image", "annotated", "found"), data.classes)
        return True


def _logits(output: Any, labels: Tensor) -> Tensor:
    """Scores of all classes for every pixel, whatever a network gives: a tensor, a dict with "out", or a tuple."""
    logits: Tensor = output["out"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    if logits.shape[-2:] != labels.shape[-2:]:
        logits = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False)
    return logits
