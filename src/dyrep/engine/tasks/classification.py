"""Classification: one label for every image."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dyrep import models
from dyrep.engine.data import Augmentation, Data, open_data
from dyrep.engine.data.loader import Loader
from dyrep.engine.precision import computing_in
from dyrep.engine.recipe import Recipe, RunSettings
from dyrep.engine.resources import loading_of
from dyrep.engine.tasks.task import Learnt, evaluating
from dyrep.engine.world import World


class Classification:
    """Cross entropy, and accuracy in percent.

    Args:
        recipe: what is trained.
    """

    name = "classification"
    metric = "accuracy"
    counts_hits = True
    same_shapes = True

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def open_data(self, settings: RunSettings, world: World) -> Data:
        """Images with labels, kept on the device if they fit."""
        recipe = self._recipe
        return open_data(
            recipe.dataset,
            settings.data,
            loading_of(recipe, settings, world),
            size=recipe.image_size,
            batch_size=recipe.batch_size,
            augmentation=Augmentation(
                crop=recipe.crop,
                padding=recipe.crop_padding,
                flip=recipe.flip,
                cutout=recipe.cutout,
                color_jitter=recipe.color_jitter,
                auto_augment=recipe.auto_augment,
            ),
            val_split=recipe.val_split,
        )

    def build(self, *, classes: int, channels: int, size: int | None) -> nn.Module:
        """A network of `dyrep.models`, timm, torchvision or the user's own."""
        return models.build(self._recipe.model, num_classes=classes, in_channels=channels)

    def learn(self, model: nn.Module, batch: Any, computing: AbstractContextManager[Any]) -> Learnt:
        """Cross entropy, and how many images were classified rightly."""
        return learn_labels(model, batch, computing, self._recipe.label_smoothing)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, loader: Loader, world: World, precision: torch.dtype, classes: tuple[str, ...]
    ) -> dict[str, float]:
        """Mean loss and accuracy in percent over a split, in eval mode, over all ranks."""
        sums = torch.zeros(3, dtype=torch.float64, device=world.device)
        with evaluating(model):
            for raw in loader.batches(0):
                images, labels = loader.prepare(raw)
                with computing_in(precision, world.device):
                    logits = model(images)
                logits = logits.float()
                sums[0] += F.cross_entropy(logits, labels, reduction="sum")
                sums[1] += (logits.argmax(1) == labels).sum()
                sums[2] += len(labels)
        loss, correct, count = world.sum(sums).tolist()
        return {"loss": loss / max(count, 1), "accuracy": 100 * correct / max(count, 1)}

    def example(self, *, channels: int, size: int, device: torch.device | str = "cpu") -> Tensor:
        """One black image."""
        return torch.zeros(1, channels, size, size, device=device)

    def random_inputs(self, *, channels: int, size: int) -> Tensor:
        """Eight images of noise."""
        return torch.randn(8, channels, size, size, generator=torch.Generator().manual_seed(0))

    def inputs(self, batch: Any, most: int | None = None) -> Tensor:
        """The images."""
        images: Tensor = batch[0]
        return images[:most]

    def draw(self, model: nn.Module, data: Data, file: Path) -> bool:
        """Nothing: a label is no picture."""
        return False


def learn_labels(
    model: nn.Module, batch: Any, computing: AbstractContextManager[Any], label_smoothing: float = 0.0
) -> Learnt:
    """Cross entropy of images and their labels, and how many were classified rightly.

    Example:
        >>> from contextlib import nullcontext
        >>> logits = torch.tensor([[2.0, 0.0], [2.0, 0.0]])
        >>> int(learn_labels(nn.Identity(), (logits, torch.tensor([0, 1])), nullcontext()).hits)
        1
    """
    images, labels = batch
    with computing:
        logits = model(images)
    logits = logits.float()
    loss = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    with torch.no_grad():
        return Learnt(loss, (logits.argmax(1) == labels).sum())
