"""Detectors and segmentation networks, and what their backbones take over from a classifier."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, resnet50
from torchvision.ops import FrozenBatchNorm2d

import dyrep
from dyrep.errors import CheckpointError, ConfigError, MissingPackageError
from dyrep.models import DETECTORS, SEGMENTERS, build_detector, build_segmenter
from dyrep.models.backbones import backbone_of, keep_still_, load_backbone_, train_


def detector(**options):
    return build_detector("fasterrcnn_resnet18_fpn", num_classes=2, image_size=64, **options)


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    return resnet18(num_classes=5)


@pytest.mark.parametrize("name", SEGMENTERS)
def test_every_segmentation_network_sees_an_eighth_of_the_resolution(name):
    model = build_segmenter(name, num_classes=4).eval()
    _, backbone = backbone_of(model)
    shapes = []
    backbone.layer4.register_forward_hook(lambda *found: shapes.append(found[2].shape))
    with torch.no_grad():
        output = model(torch.zeros(1, 3, 64, 96))
    output = output["out"] if isinstance(output, dict) else output
    assert output.shape == (1, 4, 64, 96)
    assert shapes[0][-2:] == (8, 12)


@pytest.mark.parametrize("name", DETECTORS)
def test_every_detector_trains_and_finds(name):
    model = build_detector(name, num_classes=2, image_size=64, box_batch_size_per_image=4)
    target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([2])}
    assert len(model([torch.rand(3, 64, 80)], [target])) == 4
    with torch.no_grad():
        (found,) = model.eval()([torch.rand(3, 64, 80)])
    assert set(found) == {"boxes", "labels", "scores"}


def test_convolutions_with_dilation_grow_too():
    model = build_segmenter("fcn_resnet18", num_classes=2)
    dilated = {target.name: target for target in dyrep.targets(model)}["backbone.layer4.1.conv2"]
    assert dilated.eligible
    images = torch.randn(2, 3, 64, 64)
    dyrep.expand_(model, dilated.name, calibration=[images])
    assert dyrep.verify(model, dyrep.deploy(model), images)


@pytest.mark.parametrize(
    "model",
    [
        detector,
        lambda: build_segmenter("pspnet_resnet18", num_classes=2),
        lambda: build_segmenter("deeplabv3_resnet18", num_classes=2),
    ],
)
@pytest.mark.parametrize("norms", ["batch", "eval", "frozen"])
def test_a_classifier_becomes_a_backbone(model, norms, classifier):
    made = model()
    keep_still_(made, norms=norms)
    load_backbone_(made, classifier.state_dict(), "a file")
    _, backbone = backbone_of(made)
    own = classifier.state_dict()
    for key, value in backbone.state_dict().items():
        assert torch.equal(value, own[key]), key
    assert isinstance(backbone.bn1, FrozenBatchNorm2d) == (norms == "frozen")


def test_weights_of_another_network_are_refused_by_name(classifier):
    with pytest.raises(CheckpointError, match=r"weights of here do not fit the backbone \('backbone.body'\)"):
        load_backbone_(detector(), resnet50().state_dict(), "here")
    state = dict(classifier.state_dict())
    del state["layer1.0.conv1.weight"]
    with pytest.raises(CheckpointError, match=r"it lacks layer1.0.conv1.weight; give those of the same network"):
        load_backbone_(detector(), state, "here")
    state["layer1.0.conv1.weight"] = torch.zeros(2, 2, 3, 3)
    with pytest.raises(CheckpointError, match=r"differs in layer1.0.conv1.weight: \(2, 2, 3, 3\) against"):
        load_backbone_(detector(), state, "here")
    with pytest.raises(ConfigError, match="Linear has no backbone that could be found"):
        load_backbone_(nn.Linear(1, 1), {}, "here")


@pytest.mark.parametrize("norms", ["batch", "frozen"])
def test_files_from_before_norms_counted_batches_are_taken(classifier, norms):
    state = {key: value for key, value in classifier.state_dict().items() if "num_batches" not in key}
    made = detector()
    keep_still_(made, norms=norms)
    load_backbone_(made, state, "an old file")
    body = made.backbone.body.state_dict()
    assert all(torch.equal(body[key], value) for key, value in state.items() if key in body)
    assert all(int(value) == 0 for key, value in body.items() if "num_batches" in key)


def test_what_is_no_tensor_is_refused_by_name(classifier):
    for key in ("conv1.weight", "epoch"):
        with pytest.raises(CheckpointError, match=f"here holds a list under '{key}' instead of a tensor"):
            load_backbone_(detector(), {**classifier.state_dict(), key: [1.0]}, "here")


def test_frozen_norms_keep_values_and_function(classifier):
    model = build_segmenter("fcn_resnet18", num_classes=2)
    load_backbone_(model, classifier.state_dict(), "a file")
    model.eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        before = model(images)["out"]
        keep_still_(model, norms="frozen")
        torch.testing.assert_close(model(images)["out"], before)


def test_stages_are_frozen_from_the_stem_on():
    model = detector()
    keep_still_(model, frozen_stages=3)
    body = model.backbone.body
    still = [name for name, parameter in body.named_parameters() if not parameter.requires_grad]
    assert {name.split(".")[0] for name in still} == {"conv1", "bn1", "layer1", "layer2"}
    train_(model, frozen_stages=3)
    assert [body.bn1.training, body.layer2.training, body.layer3.training, model.training] == [False, False, True, True]


def test_norms_in_eval_mode_are_those_of_the_backbone():
    model = build_segmenter("fcn_resnet18", num_classes=2)
    train_(model, norms="eval")
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {norm.training for norm in norms if norm in set(model.backbone.modules())} == {False}
    assert any(norm.training for norm in norms)


def test_what_cannot_be_frozen_is_refused():
    model = nn.ModuleDict({"encoder": nn.Sequential(nn.Conv2d(3, 3, 3))})
    with pytest.raises(ConfigError, match=r"the backbone \('encoder'\) has no 'conv1', so it is not a ResNet"):
        keep_still_(model, frozen_stages=1)
    with pytest.raises(ConfigError, match="frozen_stages=7: must be from 0 to 5"):
        keep_still_(model, frozen_stages=7)
    with pytest.raises(ConfigError, match="norms='none': must be one of"):
        keep_still_(model, norms="none")


def test_unknown_names_and_missing_packages_are_said(monkeypatch):
    with pytest.raises(ConfigError, match="no detector 'yolo'; use one of fasterrcnn_resnet18_fpn"):
        build_detector("yolo", num_classes=1, image_size=64)
    with pytest.raises(ConfigError, match="no segmentation network 'unet'; use one of pspnet_resnet18"):
        build_segmenter("unet", num_classes=1)
    for module in ("segmentation_models_pytorch", "torchvision.models", "torchvision.models.detection"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=r'pip install "\.\[downstream\]" .*; fcn and deeplabv3 do without'):
        build_segmenter("pspnet_resnet18", num_classes=1)
    with pytest.raises(MissingPackageError, match=r"fcn_resnet18 needs torchvision"):
        build_segmenter("fcn_resnet18", num_classes=1)
    with pytest.raises(MissingPackageError, match=r"fasterrcnn_resnet18_fpn needs torchvision"):
        build_detector("fasterrcnn_resnet18_fpn", num_classes=1, image_size=64)
