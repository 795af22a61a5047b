"""How much of the paper's effort to spend: everything, a tenth, or just enough to see that it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dyrep.engine.data.scenes import write_box_scenes, write_class_scenes, write_mask_scenes
from dyrep.engine.recipe import Recipe
from dyrep.engine.recipes import DIGITS, recipe
from dyrep.reproduce.studies import Training

SMOKE_EPOCHS = 3
DRAWN: dict[str, tuple[str, Callable[[Path], Path], dict[str, Any]]] = {
    "tiny-imagenet-resnet18": (
        "tiny-imagenet-100",
        write_class_scenes,
        {"image_size": 32, "crop_padding": 4, "batch_size": 8, "lr": 0.01},
    ),
    "bccd-fasterrcnn": (
        "BCCD",
        write_box_scenes,
        {"image_size": 48, "batch_size": 4, "lr": 0.005, "warmup_epochs": 0, "boxes_per_image": 8},
    ),
    "camvid-pspnet": (
        "CamVid",
        write_mask_scenes,
        {"image_size": 32, "batch_size": 4, "lr": 0.01, "class_names": (), "ignore_label": 255},
    ),
}
"""Of recipes for downstream tasks: the folder of their data among other data, and at the smallest scale what draws such
data, and settings to match."""


@dataclass(frozen=True)
class Scale:
    """A share of the paper's effort.

    Attributes:
        name: what to type.
        about: what it means, for those who read the table.
        share: of the epochs; intervals are scaled with it.
        digits: whether the data is digits and the network a small one; networks for ImageNet are counted alone then.
    """

    name: str
    about: str
    share: float = 1.0
    digits: bool = False

    def recipe(self, training: Training, seed: int) -> Recipe | None:
        """The recipe of a training at this scale; None if it is only counted here."""
        paper = replace(recipe(training.recipe), **training.settings)
        share = self._share(paper)
        if self.digits and paper.name in DRAWN:
            return _drawn(paper, training.method, seed)
        if self.digits and paper.dataset == "folder":
            return None
        digits = {
            key: getattr(DIGITS, key) for key in ("name", "model", "dataset", "image_size", "crop", "flip", "cutout")
        }
        own: dict[str, Any] = {**digits, "batch_size": 64} if self.digits else {}
        changes = {"interval": paper.dyrep.interval, **training.dyrep}
        changes["interval"] = max(round(changes["interval"] * share), 1)
        if training.stop is not None and training.method != "fixed":
            changes["stop"] = max(round(training.stop * share), 1)
        return replace(
            paper,
            **own,
            epochs=max(round(paper.epochs * share), SMOKE_EPOCHS),
            method="dyrep" if training.method == "fixed" else training.method,  # whose structure is then taken
            seed=seed,
            dyrep=replace(paper.dyrep, **changes),
        )

    def epoch(self, training: Training) -> int:
        """After which epoch the structure of a ``"fixed"`` training is taken."""
        assert training.stop is not None
        share = self._share(replace(recipe(training.recipe), **training.settings))
        return max(round(training.stop * share), 1)

    def _share(self, paper: Recipe) -> float:
        if paper.task != "classification":  # the recipes of these tasks are short already
            return 1.0
        return SMOKE_EPOCHS / paper.epochs if self.digits else self.share


def _drawn(paper: Recipe, method: str, seed: int) -> Recipe:
    """A recipe for a downstream task on a few drawn pictures."""
    evolution = replace(paper.dyrep, interval=1, score="invariant", calibration_batches=2)
    small = {**DRAWN[paper.name][2], "epochs": SMOKE_EPOCHS, "eval_every": SMOKE_EPOCHS}
    return replace(paper, **small, method=method, seed=seed, dyrep=evolution)


SCALES = {
    scale.name: scale
    for scale in (
        Scale("full", "as in the paper"),
        Scale("short", "a tenth of the paper's epochs, update intervals scaled with them", share=0.1),
        Scale(
            "smoke",
            f"{SMOKE_EPOCHS} epochs of digits on a small VGG, and of drawn pictures for detection and segmentation; "
            "large networks are only counted",
            digits=True,
        ),
    )
}
