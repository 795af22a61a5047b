"""Detectors: lists of images, targets in training mode, frozen norms, norms in eval mode, frozen stages."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torchvision.models.detection import fcos_resnet50_fpn
from torchvision.ops import FrozenBatchNorm2d

import dyrep
from downstream_data import detection_batch, randomise_norms_, write_models
from dyrep.errors import ScoreNoiseWarning
from dyrep.models import build_detector
from dyrep.models.backbones import keep_still_, train_
from dyrep.surgery.detectors import GRIDS, detector_outputs, is_detection
from dyrep.surgery.folding import drift, floating, train_outputs
from dyrep.surgery.followers import following_norms

BATCHES = [detection_batch(seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_models(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import tiny_models

        yield tiny_models


def made(tiny, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    model = tiny.detector(3, norm)
    randomise_norms_(model)
    return model


def steps(model, optimizer, batches=BATCHES):
    for images, targets in batches:
        optimizer.zero_grad()
        sum(model(images, targets).values()).backward()
        optimizer.step()


def test_a_detector_is_known_by_its_batch_and_its_parts(tiny):
    model = made(tiny)
    images, targets = BATCHES[0]
    assert is_detection(model, BATCHES[0])
    assert not is_detection(model, torch.stack([images[0]]))
    assert not is_detection(model, (torch.stack([images[0]]), targets))
    assert not is_detection(nn.Conv2d(3, 3, 3), BATCHES[0])


def test_what_is_compared_is_the_same_twice_in_training_and_reaches_every_head(tiny):
    model = made(tiny)
    first, second = (train_outputs(model, BATCHES[0]) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {name.split("[")[0].split(".")[0] for name in first} == {"features", "rpn", "box"}
    boxes = sum(n * n for n in GRIDS)
    assert first["box[0]"].shape == (2 * boxes, 3)
    called = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    detector_outputs(model, BATCHES[0])
    assert set(called) == {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}


def test_detectors_with_one_head_are_run_too():
    model = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=2, min_size=64, max_size=64).eval()
    with torch.no_grad():
        found = floating(detector_outputs(model, detection_batch(((64, 64),))))
    assert any(name.startswith("head.") for name in found)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, FrozenBatchNorm2d])
def test_the_three_lines_are_enough_for_a_detector(tiny, norm):
    model = made(tiny, norm)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    controller = dyrep.DyRep(
        model, optimizer, dyrep.DyRepConfig.paper(interval=1, score="snip", top_k=2, relative_gamma=True)
    )
    for _ in range(2):
        model.train()
        steps(model, optimizer)
        edits = controller.epoch_end(BATCHES)
        assert edits
        assert all(edit.detail["drift"] < 1e-5 and edit.detail["train_drift"] < 1e-2 for edit in edits)
    plain = controller.deploy()
    assert dyrep.verify(model, plain, BATCHES[0])
    fresh = made(tiny, norm)
    fresh.load_state_dict(plain.state_dict(), strict=True)
    with torch.no_grad():
        ours, theirs = plain.eval()(BATCHES[0][0]), model.eval()(BATCHES[0][0])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one["boxes"], other["boxes"], rtol=1e-3, atol=1e-2)


def standing_still(tiny, mode):
    """A detector in training mode whose norms do not change."""
    model = made(tiny, FrozenBatchNorm2d if mode == "frozen" else nn.BatchNorm2d).train()
    for module in model.modules():
        if mode == "eval" and isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


@pytest.mark.parametrize("mode", ["frozen", "eval"])
@pytest.mark.parametrize("layer", ["backbone.0", "backbone.3", "backbone.6", "rpn.head.conv.0.0"])
def test_a_conv_before_a_norm_that_stands_still_hardly_changes_in_training(tiny, mode, layer):
    model = standing_still(tiny, mode)
    modes = {name: module.training for name, module in model.named_modules()}
    before = [train_outputs(model, batch) for batch in BATCHES]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    dyrep.expand_(model, layer, calibration=BATCHES, relative_gamma=True)
    assert {name: module.training for name, module in model.named_modules() if name in modes} == modes
    now = dict(model.named_buffers())
    assert all(torch.equal(value, now[name]) for name, value in buffers.items())
    changes = [drift(train_outputs(model, batch), old) for batch, old in zip(BATCHES, before, strict=True)]
    assert 0 < max(changes) < 1e-2


def test_a_gamma_that_does_not_know_the_scale_moves_a_small_output_more(tiny):
    found = []
    for relative in (False, True):
        model = standing_still(tiny, "frozen")
        before = train_outputs(model, BATCHES[0])
        dyrep.expand_(model, "rpn.head.conv.0.0", calibration=BATCHES, relative_gamma=relative)
        found.append(drift(train_outputs(model, BATCHES[0]), before))
    assert found[0] > 0.1 > 1e-2 > found[1]


def test_images_of_any_size_calibrate(tiny):
    model = made(tiny, FrozenBatchNorm2d)
    batches = [detection_batch(shapes) for shapes in (((40, 90),), ((90, 40), (50, 50)), ((33, 47),))]
    dyrep.expand_(model, "backbone.3", calibration=batches)
    block = model.get_submodule("backbone.3")
    assert all(torch.isfinite(norm.running_var).all() for norm in block.modules() if hasattr(norm, "running_var"))
    assert dyrep.verify(model, dyrep.deploy(model), batches[1])


def test_a_frozen_norm_counts_as_the_norm_that_follows(tiny):
    for norm, reason in (
        (FrozenBatchNorm2d, "FrozenBatchNorm2d, whose statistics, γ and β never change"),
        (nn.BatchNorm2d, ""),
    ):
        model = made(tiny, norm)
        convs = {"backbone.0": model.get_submodule("backbone.0")}
        found, missing = following_norms(model, convs, BATCHES[0])
        if reason:
            assert reason in missing["backbone.0"]
            assert "'backbone.1'" in missing["backbone.0"]
        else:
            assert found == {"backbone.0": "backbone.1"}


@pytest.mark.parametrize("norm", [FrozenBatchNorm2d, nn.BatchNorm2d])
def test_dbb_blocks_in_a_detector_keep_norms_that_stand_still(tiny, norm):
    model = made(tiny, norm)
    before = train_outputs(copy.deepcopy(model).eval(), BATCHES[0])
    edits = dyrep.convert_(model, "dbb", example_input=BATCHES[0], preserve=True, include=("backbone.*",))
    assert len(edits) == 3
    assert all(("norm kept" in edit.detail) == (norm is FrozenBatchNorm2d) for edit in edits)
    assert dyrep.verify(model, dyrep.deploy(model), BATCHES[0])
    assert before.keys() == train_outputs(model, BATCHES[0]).keys()


def test_frozen_stages_neither_grow_nor_move_and_the_optimizer_keeps_its_state():
    torch.manual_seed(0)
    model = build_detector("fasterrcnn_resnet18_fpn", num_classes=2, image_size=64, box_batch_size_per_image=8)
    keep_still_(model, norms="eval", frozen_stages=2)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    config = dyrep.DyRepConfig.paper(interval=1, score="invariant", relative_gamma=True, include=("backbone.body.*",))
    controller = dyrep.DyRep(model, optimizer, config)
    frozen = [name for name in controller.ignored if name.startswith(("backbone.body.conv1", "backbone.body.layer1"))]
    assert len(frozen) == 5
    train_(model, norms="eval", frozen_stages=2)
    batch = detection_batch(((64, 64), (64, 80)))
    steps(model, optimizer, [batch])
    held = {
        name: optimizer.state[p]["momentum_buffer"].clone()
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    still = {name: value.clone() for name, value in model.named_buffers()}
    (edit,) = controller.epoch_end([batch])
    assert edit.layer.startswith(("backbone.body.layer2", "backbone.body.layer3", "backbone.body.layer4"))
    assert edit.detail["drift"] < 1e-5
    assert edit.detail["train_drift"] < 1e-2
    parameters = dict(model.named_parameters())
    assert all(torch.equal(optimizer.state[parameters[name]]["momentum_buffer"], value) for name, value in held.items())
    steps(model, optimizer, [batch])
    now = dict(model.named_buffers())
    assert all(torch.equal(now[name], value) for name, value in still.items() if name.startswith("backbone.body"))
    branch = next(p for name, p in model.named_parameters() if name.startswith(f"{edit.layer}.branches."))
    assert "momentum_buffer" in optimizer.state[branch]


@pytest.mark.parametrize("score", ["synflow", "snip", "grad_norm", "invariant"])
def test_before_frozen_norms_every_score_means_something(tiny, score):
    model = made(tiny, FrozenBatchNorm2d)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    controller = dyrep.DyRep(model, optimizer, dyrep.DyRepConfig.paper(interval=1, score=score, relative_gamma=True))
    steps(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScoreNoiseWarning)  # as synflow is where a batch norm follows
        controller.epoch_end(BATCHES)
    scores = controller.events[-1]["scores"]
    assert set(scores) == {"backbone.0", "backbone.3", "backbone.6", "rpn.head.conv.0.0"}
    assert all(math.isfinite(value) and value != 0 for value in scores.values())


def test_costs_of_a_detector_do_not_depend_on_what_it_finds(tiny):
    model = made(tiny)
    images, targets = BATCHES[0]
    found = dyrep.costs(model, (images[:1], targets[:1]))
    assert found.macs == dyrep.costs(model, ([torch.zeros_like(images[0])], targets[:1])).macs > 0
