"""Recipes of detection and segmentation that train in moments, and a network that is told what to say."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from dyrep.config import DyRepConfig
from dyrep.engine.recipe import Recipe
from dyrep.engine.recipes import recipe

EVOLUTION = DyRepConfig.paper(interval=1, score="snip", relative_gamma=True, calibration_batches=2, cut_threshold=1e-5)


def detection(**changes) -> Recipe:
    """Three epochs of four steps on a detector that takes no time."""
    usual = {"model": "tiny_models:detector", "epochs": 3, "batch_size": 2, "image_size": None, "eval_every": 1}
    given = {"boxes_per_image": 512, "dyrep": EVOLUTION, "warmup_epochs": 0, "lr": 0.01}
    return replace(recipe("bccd-fasterrcnn"), **{**usual, **given, **changes})


def segmentation(**changes) -> Recipe:
    """Three epochs of two steps on a network that takes no time."""
    usual = {"model": "tiny_models:segmenter", "epochs": 3, "batch_size": 4, "image_size": 32, "eval_every": 1}
    given = {"class_names": ("ground", "disc", "square"), "dyrep": EVOLUTION}
    return replace(recipe("camvid-pspnet"), **{**usual, **given, **changes})


MAKERS = {"detection": detection, "segmentation": segmentation}


class Oracle(nn.Module):
    """Says what it is told to, image after image."""

    def __init__(self, answers):
        super().__init__()
        self.answers = iter(answers)

    def forward(self, images):
        return [next(self.answers) for _ in images] if isinstance(images, list) else next(self.answers)
