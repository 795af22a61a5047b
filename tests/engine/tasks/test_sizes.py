"""Sizes of images and batches: given to detectors of any make, and refused where a network cannot take them."""

from __future__ import annotations

import pytest
import torch
from engine_helpers import settings
from task_recipes import detection, segmentation
from torch import nn

from dyrep.engine.tasks import task_of
from dyrep.engine.world import World
from dyrep.errors import ConfigError
from dyrep.models.detection import set_boxes_per_image_, set_image_size_
from dyrep.models.segmentation import check_trainable


def built(**changes):
    return task_of(detection(**changes)).build(classes=2, channels=3, size=240)


@pytest.mark.parametrize("model", ["tiny_models:detector", "torchvision:fasterrcnn_mobilenet_v3_large_320_fpn"])
def test_detectors_of_any_make_are_told_sizes(tiny_models, model):
    made = built(model=model, image_size=60, boxes_per_image=16)
    assert (made.transform.min_size, made.transform.max_size) == ((60,), 100)
    assert made.roi_heads.fg_bg_sampler.batch_size_per_image == 16
    images, _ = made.transform([torch.rand(3, 120, 150)])
    assert images.image_sizes == [(60, 75)]


def test_what_is_not_given_stays_as_the_function_made_it(tiny_models):
    made = built()
    assert (made.transform.min_size, made.transform.max_size) == ((48,), 96)
    assert made.roi_heads.fg_bg_sampler.batch_size_per_image == 8


def test_detectors_that_cannot_be_told_refuse():
    ssd, retina = nn.Module(), nn.Module()
    ssd.transform = nn.Module()
    ssd.transform.min_size, ssd.transform.fixed_size = (320,), (320, 320)
    with pytest.raises(ConfigError, match=r"image_size=60: Module brings all images to 320x320.*--image-size None"):
        set_image_size_(ssd, 60)
    with pytest.raises(ConfigError, match="image_size=60: Module has no transform with a min_size"):
        set_image_size_(retina, 60)
    with pytest.raises(ConfigError, match=r"boxes_per_image=64: Module has no RoI heads.*--boxes-per-image 512"):
        set_boxes_per_image_(retina, 64)


def opened(data, world=1, **changes):
    chosen = segmentation(**changes)
    return task_of(chosen).open_data(settings(None, data=data(chosen)), World(torch.device("cpu"), 0, world))


@pytest.mark.parametrize(("size", "nearest"), [(44, 32), (50, 64), (8, 32)])
def test_squares_that_a_pspnet_cannot_take_are_refused(data, size, nearest):
    with pytest.raises(ConfigError, match=rf"image_size={size}: pspnet_resnet18 .* give --image-size {nearest}"):
        opened(data, model="pspnet_resnet18", image_size=size)


def test_batches_too_small_for_a_norm_are_refused(data):
    for batch_size, world in ((1, 1), (2, 2)):
        with pytest.raises(ConfigError, match="batch norm of deeplabv3_resnet18 sees one value per image"):
            opened(data, world, model="deeplabv3_resnet18", batch_size=batch_size)
    with pytest.raises(ConfigError, match="batch norm of fcn_resnet18"):
        opened(data, model="fcn_resnet18", image_size=8, batch_size=1)


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("pspnet_resnet18", {"image_size": 32, "batch_size": 1}),
        ("fcn_resnet18", {"image_size": 44, "batch_size": 1}),
        ("deeplabv3_resnet18", {"image_size": 8, "batch_size": 2}),
    ],
)
def test_what_is_accepted_trains(data, model, values):
    opened(data, model=model, **values)
    task = task_of(segmentation(model=model, **values))
    network = task.build(classes=3, channels=3, size=None).train()
    side, count = values["image_size"], values["batch_size"]
    batch = torch.rand(count, 3, side, side), torch.zeros(count, side, side, dtype=torch.int64)
    assert torch.isfinite(task.learn(network, batch, torch.autocast("cpu", enabled=False)).loss)


def test_networks_of_others_are_not_known():
    check_trainable("my.package:unet", image_size=45, images=1)
    check_trainable("pspnet_resnet18", image_size=None, images=4)  # whole images, which are filled up
