"""Detectors in low precision: it is for the backbone, while boxes, scores and losses are made in float32."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from engine_helpers import settings
from task_recipes import detection
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models.detection import FasterRCNN

import dyrep
from downstream_data import detection_batch
from dyrep.engine.precision import computing_in
from dyrep.engine.tasks import task_of
from dyrep.engine.world import World
from dyrep.surgery.detectors import detector_outputs, heads_in_float32

CPU = torch.device("cpu")
BATCH = detection_batch(((320, 400),))


def low():
    return computing_in(torch.bfloat16, CPU)


@pytest.fixture
def model(tiny_models):
    """A detector that looks at images of hundreds of pixels, whose boxes are where its proposals are."""
    import tiny_models as made

    torch.manual_seed(0)
    detector = made.detector(3)
    detector.transform.min_size, detector.transform.max_size = (320,), 640
    detector.roi_heads.box_predictor.bbox_pred.weight.data.mul_(0.1)
    detector.roi_heads.score_thresh, detector.roi_heads.nms_thresh = 0.0, 1.0  # nothing is sorted out
    return detector


class Seen(nn.Module):
    """A detector that remembers in which dtypes it was called and answered."""

    def __init__(self, detector):
        super().__init__()
        self.detector, self.found = detector, []

    @property
    def backbone(self):
        return self.detector.backbone

    def forward(self, images):
        self.found += self.detector(images)
        return self.found[-len(images) :]


def test_boxes_are_those_of_float32_within_a_pixel(model, data):
    chosen = detection()
    task = task_of(chosen)
    loader = task.open_data(settings(None, data=data(chosen)), World(CPU)).test
    found = {}
    for precision in (torch.float32, torch.bfloat16):
        seen = Seen(model)
        task.evaluate(seen, loader, World(CPU), precision, ("disc", "square"))
        found[precision] = seen.found
    for exact, coarse in zip(*found.values(), strict=True):
        assert coarse["boxes"].dtype == coarse["scores"].dtype == torch.float32
        assert len(coarse["scores"].unique()) > len(coarse["scores"]) // 2  # few of them tie
        distance = torch.cdist(coarse["boxes"], exact["boxes"], p=float("inf")).min(1).values
        assert float(distance.median()) < 1


def test_the_loss_is_made_in_float32_and_learnt_from(model, monkeypatch):
    dtypes = []
    for part in (model.backbone[-1], model.rpn.head, model.roi_heads.box_predictor):
        part.register_forward_hook(lambda *found: dtypes.append(_first(found[2]).dtype))
    learnt = task_of(detection()).learn(model, BATCH, low())
    learnt.loss.backward()
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert torch.isfinite(learnt.loss)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    assert any(gradient.any() for gradient in (model.backbone[0].weight.grad, model.rpn.head.cls_logits.weight.grad))


def _first(value):
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value


def test_calibration_runs_heads_as_training_does(model):
    with low():
        found = detector_outputs(model, BATCH)
    assert {name: _first(value).dtype for name, value in found.items() if name != "features"} == {
        "rpn": torch.float32,
        "box": torch.float32,
    }
    assert found["features"]["0"].dtype == torch.float32
    with torch.no_grad(), low():
        features = model.backbone(model.transform(BATCH[0])[0].tensors)
    assert torch.equal(features.float(), found["features"]["0"])  # the backbone itself is in low precision


def test_heads_that_have_grown_train_in_float32(model):
    with low():
        dyrep.expand_(model, "rpn.head.conv.0.0", calibration=[BATCH], relative_gamma=True)
    learnt = task_of(detection()).learn(model, BATCH, low())
    learnt.loss.backward()
    assert torch.isfinite(learnt.loss)


def test_a_wrapped_detector_is_looked_into(model):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped, dtypes = DistributedDataParallel(model), []
        model.roi_heads.box_predictor.register_forward_hook(lambda *found: dtypes.append(found[2][0].dtype))
        task_of(detection()).learn(wrapped, BATCH, low()).loss.backward()
    finally:
        dist.destroy_process_group()
    assert dtypes == [torch.float32]


def test_the_backbone_is_left_as_it_was(model):
    with pytest.raises(RuntimeError, match="on the way"), low(), heads_in_float32(model):
        raise RuntimeError("on the way")
    assert "forward" not in vars(model.backbone)
    own = model.backbone.forward = model.backbone.forward  # as some libraries do
    with low(), heads_in_float32(model):
        assert model.backbone.forward is not own
    assert model.backbone.forward is own
    with heads_in_float32(model):  # nothing is in low precision
        assert model.backbone.forward is own


def test_detectors_without_a_backbone_run_as_they_did():
    model = nn.Linear(2, 2)
    with low(), heads_in_float32(model):
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16


def test_every_level_of_a_pyramid_becomes_float32():
    model = dyrep.models.build_detector("fasterrcnn_resnet18_fpn", num_classes=1, image_size=64)
    assert isinstance(model, FasterRCNN)
    with torch.no_grad(), low(), heads_in_float32(model):
        found = model.backbone(torch.rand(1, 3, 64, 64))
    assert list(found) == ["0", "1", "2", "3", "pool"]
    assert {value.dtype for value in found.values()} == {torch.float32}
