"""Batches for segmentation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from loading_helpers import CPU, take_loading
from PIL import Image

from downstream_data import COUNTS, write_masks
from dyrep.engine.data import Loading, splits
from dyrep.engine.data.folders import IMAGENET_MEAN, IMAGENET_STD
from dyrep.engine.data.masks import IGNORED, read_masks
from dyrep.engine.data.segmentation import MaskLoader, open_segmentation
from dyrep.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    return write_masks(tmp_path_factory.mktemp("masks"))


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    return write_masks(tmp_path_factory.mktemp("varied"), vary=True)


def opened(folder, **changes):
    usual = {
        "size": 32,
        "crop": True,
        "scale": (0.75, 1.5),
        "batch_size": 4,
        "flip": True,
        "val_split": 0,
        "class_names": (),
        "ignore_label": 255,
        **changes,
    }
    loading = take_loading(usual)
    return open_segmentation(folder, loading, **usual)


def batches(loader, epoch=0, start=0):
    return [loader.prepare(raw) for raw in loader.batches(epoch, start)]


def same(ours, theirs):
    return all(torch.equal(a, b) for one, two in zip(ours, theirs, strict=True) for a, b in zip(one, two, strict=True))


def pixels(images):
    mean, std = (torch.tensor(value)[:, None, None] for value in (IMAGENET_MEAN, IMAGENET_STD))
    return (images * std + mean) * 255


def test_squares_are_cut_out_of_training_images_and_others_are_whole(masks):
    data = opened(masks)
    images, labels = batches(data.train)[0]
    assert images.shape == (4, 3, 32, 32)
    assert labels.shape == (4, 32, 32)
    assert set(labels.unique().tolist()) <= {0, 1, 2, IGNORED}
    images, labels = batches(data.test)[0]
    assert images.shape == (COUNTS["test"], 3, 64, 64)  # 48 is filled up to 64
    assert (labels[:, 48:] == IGNORED).all()
    assert images[:, :, 48:].abs().max() < 0.02  # the mean
    assert (data.size, data.classes, data.train.examples) == (32, ("0", "1", "2"), 8)


def test_whole_images_are_exactly_what_is_in_the_files(masks):
    images, labels = batches(opened(masks).test)[0]
    for number in range(COUNTS["test"]):
        image = np.asarray(Image.open(masks / "test" / f"{number}.png"))
        known = np.asarray(Image.open(masks / "testannot" / f"{number}.png"))
        assert np.abs(pixels(images[number, :, :48]).permute(1, 2, 0).numpy() - image).max() < 0.01
        assert (labels[number, :48].numpy() == known).all()


def test_without_resizing_a_window_is_a_part_of_the_image_flipped_or_not(masks):
    kept = Loading(CPU, resident=True)
    loader = MaskLoader(read_masks(masks).train, kept, classes=3, batch_size=8, flip=True, shuffle=True)
    ((places, windows),) = loader.batches(0)
    ((images, labels),) = batches(loader)
    assert set(windows[:, 0, 0].tolist()) == {-1.0, 1.0}
    for place, window, found, told in zip(places.tolist(), windows, images, labels, strict=True):
        image = np.asarray(Image.open(masks / "train" / f"{place}.png"))
        known = np.asarray(Image.open(masks / "trainannot" / f"{place}.png"))
        if window[0, 0] < 0:
            image, known = image[:, ::-1], known[:, ::-1]
        assert np.abs(pixels(found[:, :48]).permute(1, 2, 0).numpy() - image).max() < 0.5
        assert (told[:48].numpy() == known).all()
        assert (told[48:] == IGNORED).all()


def test_labels_stay_with_their_pixels_when_images_are_resized(masks):
    for images, labels in batches(opened(masks, batch_size=8).train):
        strong = pixels(images)
        red = strong[:, 0] > 190
        assert (labels[red & (labels != IGNORED)] == 1).float().mean() > 0.95
        blue = strong[:, 2] > 190
        assert (labels[blue & (labels != IGNORED)] == 2).float().mean() > 0.95


def test_windows_larger_than_the_image_are_filled_with_what_does_not_count(masks):
    data = opened(masks, size=96, scale=(1.0, 1.0), flip=False)
    for images, labels in batches(data.train):
        counted = (labels != IGNORED).flatten(1).sum(1)
        assert (counted == 62 * 48).all()  # a stripe of two pixels never counts
        assert images.shape[-2:] == (96, 96)


def test_what_an_epoch_holds_depends_on_seed_and_epoch_alone(masks):
    data, streamed = opened(masks), opened(masks, resident=False, workers=2)
    assert same(batches(data.train, 1), batches(streamed.train, 1))
    assert same(batches(data.test), batches(streamed.test))
    assert same(batches(data.train, 1)[1:], batches(data.train, 1, start=1))
    assert not same(batches(data.train, 1), batches(data.train, 2))
    calibration = data.train.calibration(1)
    assert same(list(calibration), list(calibration))
    assert not same(list(calibration), batches(data.train, 1))


def test_images_of_different_sizes_are_evaluated_one_by_one(varied):
    for resident in (True, False):
        data = opened(varied, resident=resident)
        found = batches(data.test)
        assert [len(images) for images, _ in found] == [1] * COUNTS["test"]
        assert len({tuple(images.shape) for images, _ in found}) > 1
        for number, (_, labels) in enumerate(found):
            known = np.asarray(Image.open(varied / "testannot" / f"{number}.png"))
            height, width = data.test.size_of(number)
            assert known.shape == (height, width)
            assert (labels[0, :height, :width].numpy() == known).all()
    with pytest.raises(DataError, match="differ in size, so there are no batches of whole images: give --crop resized"):
        opened(varied, crop=False, size=None)


def test_what_is_kept_is_counted_as_it_is_filled_up(varied, monkeypatch):
    filled = 4 * 96 * 64 * sum(COUNTS.values())
    for limit, kept in ((filled, True), (filled - 1, False)):
        monkeypatch.setattr(splits, "RESIDENT_LIMIT", limit)
        assert (len(next(iter(opened(varied).train.batches(0)))) == 2) == kept


def test_images_are_the_same_inside_autocast(masks):
    loader = opened(masks).train
    plain = list(loader.calibration(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert same(list(loader.calibration(0)), plain)


def test_ranks_share_the_same_batches(masks):
    whole = batches(opened(masks).train)
    parts = [batches(opened(masks, rank=rank, world=2).train) for rank in range(2)]
    for step, (images, _) in enumerate(whole):
        assert torch.equal(images, torch.cat([parts[rank][step][0] for rank in range(2)]))


def test_what_is_wrong_is_named(masks, tmp_path):
    with pytest.raises(DataError, match="the data set 'masks' needs its folder"):
        opened(None)
    with pytest.raises(ConfigError, match="image_size=32: with crop=none images are taken as they are"):
        opened(masks, crop=False)
    folder = write_masks(tmp_path)
    Image.new("L", (10, 10)).save(folder / "trainannot" / "2.png")
    with pytest.raises(DataError, match=r"train/2.png and its label map .*2.png differ in size: 64x48 and 10x10"):
        opened(folder)
    Image.fromarray(np.full((48, 64), 9, np.uint8)).save(folder / "trainannot" / "2.png")
    with pytest.raises(DataError, match=r"2.png has the label 9, and there are 3 classes"):
        opened(folder, class_names=("a", "b", "c"))
