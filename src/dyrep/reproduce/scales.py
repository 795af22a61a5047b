"""How much of the paper's effort to spend: everything, a tenth, or just enough to see that it works."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dyrep.engine.recipe import Recipe
from dyrep.engine.recipes import DIGITS, recipe
from dyrep.reproduce.studies import Training

SMOKE_EPOCHS = 3


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
        return SMOKE_EPOCHS / paper.epochs if self.digits else self.share


SCALES = {
    scale.name: scale
    for scale in (
        Scale("full", "as in the paper"),
        Scale("short", "a tenth of the paper's epochs, update intervals scaled with them", share=0.1),
        Scale("smoke", f"{SMOKE_EPOCHS} epochs of digits on a small VGG; large networks are only counted", digits=True),
    )
}
