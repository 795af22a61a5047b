"""Batches from files: the same whatever the workers, ranks and place to begin."""

import random

import numpy as np
import pytest
import torch
from loading_helpers import CPU, take_loading
from PIL import Image
from torchvision.transforms import v2

from dyrep.engine.data import Augmentation, Loading, ResidentLoader, StreamingLoader, load_files, read_folder
from dyrep.engine.data import streaming as streaming_module
from dyrep.errors import ConfigError, DataError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
EVERYTHING = Augmentation(crop="resized", flip=True, cutout=6, color_jitter=0.4, auto_augment=True)


@pytest.fixture
def files(image_folder):
    return read_folder(image_folder(train=7, val=2, size=(20, 16))).train


def loader(files, *, size=12, batch_size=4, augmentation=EVERYTHING, shuffle=True, workers=0, **options):
    settings = {"mean": MEAN, "std": STD, "workers": workers, **options}
    loading = take_loading(settings)
    return StreamingLoader(
        files, loading, size=size, batch_size=batch_size, augmentation=augmentation, shuffle=shuffle, **settings
    )


def same(ours, theirs):
    ours, theirs = list(ours), list(theirs)
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) for pair in zip(ours, theirs, strict=True) for a, b in zip(*pair, strict=True)
    )


def test_an_epoch_is_the_same_with_and_without_workers_and_can_begin_in_its_middle(files):
    random.seed(1)
    torch.manual_seed(1)
    alone = list(loader(files).batches(2))
    random.seed(2)
    torch.manual_seed(2)
    assert same(loader(files, workers=2).batches(2, start=1), alone[1:])
    assert same(loader(files).batches(2, start=3), alone[3:])
    assert list(loader(files).batches(2, start=5)) == []


def test_an_epoch_depends_on_seed_and_epoch_alone(files):
    first = list(loader(files, seed=1).batches(2))
    assert same(loader(files, seed=1).batches(2), first)
    for seed, epoch in ((1, 3), (2, 2), (2, 1)):
        assert not same(loader(files, seed=seed).batches(epoch), first)


def test_raw_batches_are_pixels_labels_and_centres(files):
    source = loader(files)
    assert (source.steps, source.examples) == (5, 20)
    for pixels, labels, centres in source.batches(0):
        assert (pixels.shape, pixels.dtype) == ((4, 3, 12, 12), torch.uint8)
        assert (labels.shape, labels.dtype) == ((4,), torch.int64)
        assert centres.shape == (4, 2)
    assert {len(raw) for raw in loader(files, augmentation=Augmentation()).batches(0)} == {2}


def test_skipped_batches_are_not_decoded(files, monkeypatch):
    decoded = []
    decode = streaming_module.decode
    monkeypatch.setattr(streaming_module, "decode", lambda path: decoded.append(path) or decode(path))
    list(loader(files).batches(0, start=3))
    assert len(decoded) == 2 * 4


def test_training_applies_what_torchvision_calls_by_the_same_names():
    chosen = streaming_module._training_transform(12, EVERYTHING).transforms
    assert [type(step).__name__ for step in chosen] == [
        "RandomResizedCrop",
        "RandomHorizontalFlip",
        "ColorJitter",
        "AutoAugment",
    ]
    assert chosen[0].size == (12, 12)
    assert (chosen[2].brightness, chosen[2].saturation, chosen[2].hue) == ((0.6, 1.4), (0.6, 1.4), None)
    padded = streaming_module._training_transform(12, Augmentation(crop="pad", padding=2)).transforms
    assert isinstance(padded[1], v2.RandomCrop)
    assert padded[1].padding == [2, 2, 2, 2]


def test_every_example_is_augmented_differently(files):
    one = files.take(torch.zeros(8, dtype=torch.int64))
    pixels = next(loader(one, batch_size=8, augmentation=Augmentation(crop="resized")).batches(0))[0]
    assert len(pixels.unique(dim=0)) == 8


def test_pixels_are_normalised_and_squares_cut_out(files):
    source = loader(files, channels_last=True)
    for raw in source.batches(0):
        images, labels = source.prepare(raw)
        pixels, _, centres = raw
        expected = (pixels.double() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        for image, (row, column) in zip(expected, centres.tolist(), strict=True):
            image[:, max(0, row - 3) : row + 3, max(0, column - 3) : column + 3] = 0
        assert torch.allclose(images.double(), expected, atol=1e-5)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(labels, raw[1])


def test_evaluation_resizes_and_crops_the_centre(files):
    source = loader(files, size=14, shuffle=False)
    change = v2.Compose([v2.Resize(16), v2.CenterCrop(14), v2.PILToTensor()])
    expected = torch.stack([change(Image.open(path)) for path in files.paths])
    pixels, labels = (torch.cat(column) for column in zip(*source.batches(0), strict=True))
    assert torch.equal(pixels, expected)
    assert torch.equal(labels, files.labels)


def test_plain_settings_give_the_images_of_a_resident_loader(files):
    resident = ResidentLoader(
        load_files(files, 12), Loading(CPU), batch_size=4, mean=MEAN, std=STD, augmentation=None, shuffle=False
    )
    streamed = loader(files, shuffle=False, resize=12)
    assert same(map(streamed.prepare, streamed.batches(0)), map(resident.prepare, resident.batches(0)))


def test_ranks_divide_the_batches_of_a_single_one(files):
    alone = list(loader(files).batches(0))
    ranks = [list(loader(files, rank=rank, world=2).batches(0)) for rank in range(2)]
    joined = [tuple(torch.cat(column) for column in zip(*parts, strict=True)) for parts in zip(*ranks, strict=True)]
    assert same(joined, alone)


def test_evaluation_shows_every_example_exactly_once(files):
    sources = [loader(files, shuffle=False, rank=rank, world=2) for rank in range(2)]
    shapes = [[len(raw[1]) for raw in source.batches(0)] for source in sources]
    assert shapes == [[2] * 5 + [1], [2] * 5]
    assert [source.steps for source in sources] == [6, 5]
    labels = [torch.cat([raw[1] for raw in source.batches(0)]) for source in sources]
    assert torch.equal(labels[0], files.labels[::2])
    assert torch.equal(labels[1], files.labels[1::2])


def test_calibration_is_repeatable_and_independent_of_training(files):
    source = loader(files)
    calibration = source.calibration(1)
    assert same(calibration, calibration)
    assert not same(calibration, map(source.prepare, source.batches(1)))


def test_the_global_generators_are_left_alone(files):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    source = loader(files)
    list(source.batches(0))
    next(iter(source.calibration(0)))
    list(loader(files, shuffle=False).batches(0))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_decoded_is_named(workers, files):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with open(files.paths[3], "r+b") as file:
        file.truncate(100)
    with pytest.raises(DataError) as raised:
        list(loader(files, shuffle=False, workers=workers).batches(0))
    assert str(raised.value).startswith(f"{files.paths[3]} cannot be decoded")
    assert "Traceback" not in str(raised.value)
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_that_cannot_be_filled_or_divided_are_refused(files):
    with pytest.raises(ConfigError, match="there are only 21 examples"):
        loader(files, batch_size=22)
    with pytest.raises(ConfigError, match="multiple of the number of ranks"):
        loader(files, batch_size=5, world=2)
