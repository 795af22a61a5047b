"""The metrics, against what they are by hand, and what is said where packages are missing."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from engine_helpers import settings
from task_recipes import Oracle, detection, segmentation
from torch import nn

from dyrep.engine.data.masks import IGNORED
from dyrep.engine.tasks import measuring, task_of
from dyrep.engine.world import World
from dyrep.errors import MissingPackageError

WORLD = World(torch.device("cpu"))


def test_map_is_100_for_the_truth_and_counts_every_class(data):
    chosen = detection()
    task = task_of(chosen)
    loader = task.open_data(settings(None, data=data(chosen)), WORLD).test
    targets = [target for raw in loader.batches(0) for target in loader.prepare(raw)[1]]
    truth = [{**target, "scores": torch.ones(len(target["labels"]))} for target in targets]
    found = task.evaluate(Oracle(truth), loader, WORLD, torch.float32, ("disc", "square"))
    assert found == {"map": 100, "map50": 100, "map75": 100, "ap_disc": 100, "ap_square": 100}
    discs = [{key: value[:1] for key, value in answer.items()} for answer in truth]
    found = task.evaluate(Oracle(discs), loader, WORLD, torch.float32, ("disc", "square"))
    assert (found["map"], found["ap_disc"], found["ap_square"]) == (50, 100, 0)
    nothing = [{key: value[:0] for key, value in answer.items()} for answer in truth]
    assert task.evaluate(Oracle(nothing), loader, WORLD, torch.float32, ("disc", "square"))["map"] == 0


def test_miou_leaves_out_what_does_not_count(data):
    chosen = segmentation()
    task = task_of(chosen)
    opened = task.open_data(settings(None, data=data(chosen)), WORLD)
    loader, names = opened.test, opened.classes
    labels = [loader.prepare(raw)[1] for raw in loader.batches(0)]
    everything = torch.cat([part.flatten() for part in labels])
    shown = everything[everything != IGNORED]

    def logits(maps):
        return [nn.functional.one_hot(part % 3, 3).permute(0, 3, 1, 2).float() * 50 for part in maps]

    right = [torch.where(part == IGNORED, 1, part) for part in labels]
    found = task.evaluate(Oracle(logits(right)), loader, WORLD, torch.float32, names)
    assert (found["miou"], found["pixel_accuracy"], found["iou_disc"]) == (100, 100, 100)
    ground = [torch.zeros_like(part) for part in labels]
    found = task.evaluate(Oracle(logits(ground)), loader, WORLD, torch.float32, names)
    share = 100 * float((shown == 0).float().mean())
    assert found["pixel_accuracy"] == pytest.approx(share, rel=1e-5)
    assert found["iou_ground"] == pytest.approx(share, rel=1e-5)
    assert found["miou"] == pytest.approx(share / 3, rel=1e-5)


def test_a_batch_in_which_nothing_counts_teaches_nothing(tiny_models):
    from contextlib import nullcontext

    task = task_of(segmentation())
    model = task.build(classes=3, channels=3, size=32)
    labels = torch.full((2, 32, 32), IGNORED)
    loss, hits = task.learn(model, (torch.randn(2, 3, 32, 32), labels), nullcontext())
    assert (float(loss.detach()), float(hits)) == (0, 0)


def without(gone, real=importlib.import_module):
    def imported(name, *rest):
        if name in gone:
            raise ImportError(f"no {name}")
        return real(name, *rest)

    return imported


def test_the_backend_is_one_that_is_there(monkeypatch):
    assert measuring.coco_backend() in measuring.BACKENDS
    for gone, left in (("faster_coco_eval", "pycocotools"), ("pycocotools", "faster_coco_eval")):
        if importlib.util.find_spec(left) is not None:
            monkeypatch.setattr(importlib, "import_module", without((gone,)))
            assert measuring.coco_backend() == left
    monkeypatch.setattr(importlib, "import_module", without(measuring.BACKENDS))
    with pytest.raises(
        MissingPackageError, match=r'needs faster-coco-eval.*"\.\[downstream\]".*; pycocotools would do'
    ):
        measuring.mean_average_precision()


def test_torchmetrics_is_named_where_it_is_missing(monkeypatch):
    def missing(name, *rest):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingPackageError, match=r'mIoU .* needs torchmetrics.*pip install "\.\[downstream\]"'):
        measuring.intersection_over_union(3, 255)
