"""From the name of a data set to its loaders."""

import numpy as np
import pytest
import torch
from loading_helpers import take_loading

from dyrep.engine.data import Augmentation, ResidentLoader, StreamingLoader, open_data, splits
from dyrep.errors import ConfigError, DataError


def opened(dataset="digits", folder=None, **options):
    settings = {
        "size": None,
        "batch_size": 32,
        "augmentation": Augmentation(),
        "val_split": 0,
        "workers": 0,
        **options,
    }
    loading = take_loading(settings)
    return open_data(dataset, folder, loading, **settings)


def labels(loader):
    return torch.cat([loader.prepare(raw)[1] for raw in loader.batches(0)])


def images(loader):
    return torch.cat([loader.prepare(raw)[0] for raw in loader.batches(0)])


def test_digits_need_nothing():
    data = opened()
    assert (data.channels, data.size, len(data.classes), data.val) == (1, 8, 10, None)
    assert (data.train.steps, data.train.examples, data.test.examples) == (44, 1408, 360)
    pixels, _ = data.train.prepare(next(data.train.batches(0)))
    assert pixels.shape == (32, 1, 8, 8)
    assert (pixels.min(), pixels.max()) == (-1, 1)


def test_cifar_is_opened_from_its_folder(small_cifar, tmp_path):
    np.savez(tmp_path / "cifar10.npz", **small_cifar)
    data = opened(
        "cifar10",
        tmp_path,
        val_split=20,
        augmentation=Augmentation(crop="pad", flip=True),
        channels_last=True,
    )
    assert (data.channels, data.size, data.classes[3]) == (3, 32, "cat")
    assert (data.train.examples, data.val.examples, data.test.examples) == (160, 20, 100)
    assert labels(data.val).bincount().tolist() == [2] * 10
    pixels, _ = data.train.prepare(next(data.train.batches(0)))
    assert pixels.dtype == torch.float32
    assert pixels.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("val_split", "count"), [(0.1, 144), (100, 100), (1, 1), (1e-9, 1)])
def test_a_share_or_a_number_of_examples_is_held_out(val_split, count):
    data = opened(val_split=val_split)
    assert data.val.examples == count
    assert data.train.examples == (1437 - count) // 32 * 32


@pytest.mark.parametrize("val_split", [-0.1, 1.5, float("nan")])
def test_other_splits_are_refused(val_split):
    with pytest.raises(ConfigError, match="val_split"):
        opened(val_split=val_split)


def test_everything_held_out_is_refused():
    with pytest.raises(ConfigError, match="cannot hold out 1437 of 1437"):
        opened(val_split=1437)


def test_the_seed_changes_the_order_but_not_what_is_held_out():
    first, second = opened(val_split=0.2, seed=0), opened(val_split=0.2, seed=1)
    assert torch.equal(images(first.val), images(second.val))
    assert not torch.equal(images(first.train), images(second.train))


def test_evaluation_batches_are_larger_up_to_a_thousand():
    def size(**options):
        return len(next(opened(**options).test.batches(0))[0])

    assert size(batch_size=16) == 64
    assert size(batch_size=300) == 360
    assert len(list(opened(batch_size=24, rank=1, world=2).test.batches(0))) == 4  # 180 images, 48 at a time
    assert opened(batch_size=300, rank=2, world=3).test.examples == 360


def test_files_that_fit_are_kept_on_the_device(image_folder, monkeypatch):
    root = image_folder()
    small = {"batch_size": 4, "augmentation": Augmentation(crop="pad", padding=1, flip=True)}
    data = opened("folder", root, val_split=3, **small)
    assert all(isinstance(loader, ResidentLoader) for loader in (data.train, data.val, data.test))
    assert (data.size, data.channels, data.classes) == (8, 3, ("ant", "bee", "cow"))
    assert isinstance(opened("folder", root, resident=False, **small).test, StreamingLoader)
    monkeypatch.setattr(splits, "RESIDENT_LIMIT", 18 * 3 * 8 * 8 - 1)
    assert isinstance(opened("folder", root, **small).train, StreamingLoader)
    assert isinstance(opened("folder", root, resident=True, **small).train, ResidentLoader)


@pytest.mark.parametrize("val_split", [0, 3])
def test_evaluation_does_not_depend_on_where_images_are_kept(val_split, image_folder):
    root = image_folder(size=(12, 9))
    settings = {"batch_size": 4, "size": 8, "val_split": val_split}
    resident = opened("folder", root, resident=True, **settings)
    streamed = opened("folder", root, resident=False, **settings)
    assert torch.equal(images(resident.test), images(streamed.test))
    if val_split:
        assert torch.equal(images(resident.val), images(streamed.val))


def test_random_resized_crops_are_streamed_and_evaluated_with_a_margin(image_folder):
    root = image_folder(size=(14, 14))
    data = opened("folder", root, batch_size=4, augmentation=Augmentation(crop="resized"))
    plain = opened("folder", root, batch_size=4, resident=False)
    assert isinstance(data.train, StreamingLoader)
    assert images(data.test).shape == images(plain.test).shape == (6, 3, 14, 14)
    assert not torch.equal(images(data.test), images(plain.test))


@pytest.mark.parametrize(
    ("augmentation", "setting"),
    [
        (Augmentation(crop="resized"), "crop='resized'"),
        (Augmentation(color_jitter=0.4), "color_jitter=0.4"),
        (Augmentation(auto_augment=True), "auto_augment=True"),
    ],
)
def test_augmentations_that_need_files_are_refused_without(augmentation, setting, image_folder):
    with pytest.raises(ConfigError, match=f"{setting} needs image files .*: digits is kept in memory"):
        opened(augmentation=augmentation)
    with pytest.raises(ConfigError, match=f"resident=True: {setting} needs"):
        opened("folder", image_folder(), augmentation=augmentation, resident=True)
    assert isinstance(
        opened("folder", image_folder("more"), batch_size=4, augmentation=augmentation).train, StreamingLoader
    )


def test_images_of_several_sizes_need_one_to_be_brought_to(image_folder):
    root = image_folder(size=(9, 8))
    with pytest.raises(ConfigError, match="give image_size, to bring them to"):
        opened("folder", root, batch_size=4)
    assert opened("folder", root, batch_size=4, size=8).size == 8


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"dataset": "mnist"}, ConfigError, "dataset='mnist': must be one of digits, cifar10, cifar100, folder"),
        ({"dataset": "cifar10"}, DataError, "give --data DIR, with cifar10.npz"),
        ({"dataset": "cifar100"}, DataError, "give --data DIR, with cifar100.npz"),
        ({"dataset": "folder"}, DataError, "give --data DIR, with train/CLASS"),
        ({"size": 32}, ConfigError, "size=32: the images of digits are 8x8"),
        ({"resident": False}, ConfigError, "resident=False: digits is always kept in memory"),
        ({"batch_size": 2000}, ConfigError, "batch_size=2000: there are only 1437"),
        ({"batch_size": 33, "world": 2}, ConfigError, "batch_size=33: must be a multiple"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        opened(**settings)
