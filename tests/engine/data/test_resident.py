"""Batches from memory: what they contain, in which order, on which rank."""

import numpy as np
import pytest
import torch
from loading_helpers import take_loading
from torch.utils._python_dispatch import TorchDispatchMode

from dyrep.engine.data import Augmentation, ImageArrays, ResidentLoader
from dyrep.errors import ConfigError

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
EVERYTHING = Augmentation(crop="pad", padding=3, flip=True, cutout=4)


def arrays(count=50, height=10, width=8):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8, generator=generator)
    return ImageArrays(images, torch.arange(count))


def loader(split=None, *, batch_size=8, augmentation=EVERYTHING, shuffle=True, **options):
    split = arrays() if split is None else split
    settings = {"mean": MEAN, "std": STD, **options}
    loading = take_loading(settings)
    return ResidentLoader(split, loading, batch_size=batch_size, augmentation=augmentation, shuffle=shuffle, **settings)


def prepared(source, epoch=0, start=0):
    return [source.prepare(raw) for raw in source.batches(epoch, start)]


def same(ours, theirs):
    ours, theirs = list(ours), list(theirs)
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) for pair in zip(ours, theirs, strict=True) for a, b in zip(*pair, strict=True)
    )


def slowly(images, row, augmentation):
    """One augmented example, pixel by pixel."""
    index, top, left, flip, centre_row, centre_column = (int(value) for value in row)
    original = images[index].numpy().astype(np.float64) / 255
    channels, height, width = original.shape
    padding = augmentation.padding if augmentation.crop == "pad" else 0
    result = np.zeros_like(original)
    for y in range(height):
        for x in range(width):
            column = width - 1 - x if flip else x
            from_y, from_x = y + top - padding, column + left - padding
            inside = 0 <= from_y < height and 0 <= from_x < width
            for c in range(channels):
                value = original[c, from_y, from_x] if inside else 0.0
                result[c, y, x] = (value - MEAN[c]) / STD[c]
    if augmentation.cutout:
        half = augmentation.cutout // 2
        first_row, first_column = centre_row - half, centre_column - half
        rows = slice(max(0, first_row), max(0, first_row + augmentation.cutout))
        columns = slice(max(0, first_column), max(0, first_column + augmentation.cutout))
        result[:, rows, columns] = 0
    return result


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "augmentation",
    [
        None,
        Augmentation(),
        Augmentation(flip=True),
        Augmentation(crop="pad", padding=2),
        Augmentation(cutout=5),
        EVERYTHING,
        Augmentation(crop="pad", padding=4, flip=True, cutout=40),
    ],
)
def test_images_are_those_of_a_slow_implementation(augmentation, channels_last):
    split = arrays()
    source = loader(split, augmentation=augmentation, channels_last=channels_last)
    for raw in source.batches(epoch=3):
        images, labels = source.prepare(raw)
        expected = np.stack([slowly(split.images, row, augmentation or Augmentation()) for row in raw[0]])
        assert np.allclose(images.numpy(), expected, atol=1e-5)
        assert labels.tolist() == raw[0][:, 0].tolist()
        assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def test_every_choice_of_the_augmentation_occurs():
    rows = torch.cat([raw[0] for epoch in range(40) for raw in loader().batches(epoch)])
    assert rows[:, 1].unique().tolist() == rows[:, 2].unique().tolist() == list(range(7))
    assert rows[:, 4].unique().tolist() == list(range(10))
    assert rows[:, 5].unique().tolist() == list(range(8))
    assert 0.45 < rows[:, 3].double().mean() < 0.55


def test_an_epoch_depends_on_seed_and_epoch_alone():
    first = prepared(loader(seed=1), epoch=2)
    torch.manual_seed(99)
    assert same(prepared(loader(seed=1), epoch=2), first)
    assert not same(prepared(loader(seed=1), epoch=1), first)
    assert not same(prepared(loader(seed=2), epoch=2), first)
    assert not same(prepared(loader(seed=2), epoch=1), first)


def test_an_epoch_shows_every_example_at_most_once_and_whole_batches_alone():
    source = loader()
    assert (source.steps, source.examples) == (6, 48)
    for epoch in range(2):
        labels = torch.cat([labels for _, labels in prepared(source, epoch)])
        assert len(labels) == len(labels.unique()) == 48


def test_an_epoch_can_begin_in_its_middle():
    source = loader()
    for start in range(source.steps + 1):
        assert same(prepared(source, 5, start), prepared(source, 5)[start:])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_divide_the_batches_of_a_single_one(world):
    alone = prepared(loader())
    ranks = [prepared(loader(rank=rank, world=world)) for rank in range(world)]
    joined = [
        (torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts]))
        for parts in zip(*ranks, strict=True)
    ]
    assert same(joined, alone)
    assert loader(rank=1, world=world).examples == 48


@pytest.mark.parametrize(("world", "count"), [(1, 50), (2, 49), (4, 50), (4, 3)])
def test_evaluation_shows_every_example_exactly_once_and_unchanged(world, count):
    split = arrays(count)
    seen = []
    for rank in range(world):
        source = loader(split, shuffle=False, rank=rank, world=world)
        batches = prepared(source)
        assert len(batches) == source.steps
        assert source.examples == count
        for images, labels in batches:
            expected = (split.images[labels].double() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[
                :, None, None
            ]
            assert torch.allclose(images.double(), expected, atol=1e-5)
            seen += labels.tolist()
        assert torch.cat([labels for _, labels in batches] or [torch.arange(0)]).tolist() == list(
            range(rank, count, world)
        )
    assert sorted(seen) == list(range(count))


def test_evaluation_is_the_same_in_every_epoch_and_can_begin_in_its_middle():
    source = loader(shuffle=False)
    assert same(prepared(source, 0), prepared(source, 7))
    assert same(prepared(source, 0, 2), prepared(source, 0)[2:])
    assert same(source.calibration(0), prepared(source))


def test_calibration_is_augmented_repeatable_and_independent_of_training():
    source = loader()
    calibration = source.calibration(4)
    assert same(calibration, calibration)
    assert not same(calibration, prepared(source, 4))
    assert not same(calibration, source.calibration(5))
    assert len(list(calibration)) == source.steps
    plain = loader(augmentation=None)
    for images, labels in calibration:
        assert not torch.equal(images, plain.prepare((labels[:, None],))[0])


def test_calibration_is_lazy(monkeypatch):
    source = loader()
    count = []
    prepare = source.prepare
    monkeypatch.setattr(source, "prepare", lambda raw: count.append(1) or prepare(raw))
    batches = iter(source.calibration(0))
    assert not count
    next(batches)
    assert len(count) == 1


def test_the_global_generators_are_left_alone():
    state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    source = loader()
    prepared(source)
    list(source.calibration(0))
    assert torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_raw_batches_are_views_of_one_tensor_in_a_fixed_shape():
    raws = list(loader().batches(0))
    assert {tuple(raw[0].shape) for raw in raws} == {(8, 6)}
    assert all(raw[0].is_contiguous() and raw[0].dtype == torch.int64 for raw in raws)
    assert len({raw[0].untyped_storage().data_ptr() for raw in raws}) == 1


VIEWS = {"slice", "select", "unsqueeze", "unbind", "permute", "view", "as_strided", "expand", "split", "alias"}


class Recorder(TorchDispatchMode):
    """Writes down every operation that is not a mere view."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.operations.append(name)
        return function(*args, **(kwargs or {}))


def test_preparing_is_a_handful_of_operations_that_need_nothing_from_the_host():
    source = loader()
    raw = next(source.batches(0))
    with Recorder() as recorder:
        source.prepare(raw)
    assert len(recorder.operations) <= 14, recorder.operations
    hosts = {"lift_fresh", "_local_scalar_dense", "arange", "scalar_tensor", "nonzero", "item", "zeros", "empty"}
    assert not hosts & set(recorder.operations), recorder.operations


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_preparing_can_be_captured_in_a_graph():
    source, on_cpu = loader(device=torch.device("cuda"), channels_last=True), loader()
    static = tuple(tensor.clone() for tensor in next(source.batches(0)))
    source.prepare(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, labels = source.prepare(static)
    for raw, (expected, expected_labels) in zip(source.batches(1), prepared(on_cpu, 1), strict=True):
        for buffer, tensor in zip(static, raw, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        assert torch.allclose(images.cpu(), expected, atol=1e-6)
        assert torch.equal(labels.cpu(), expected_labels)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 9, "world": 2}, "batch_size=9: must be a multiple of the number of ranks, 2"),
        ({"batch_size": 0}, "batch_size=0: must be a multiple"),
        ({"batch_size": 51}, "batch_size=51: there are only 50 examples"),
        ({"rank": 2, "world": 2}, "rank=2: must be from 0 to 1"),
        ({"augmentation": Augmentation(crop="resized")}, "crop='resized' needs image files"),
        ({"augmentation": Augmentation(auto_augment=True)}, "auto_augment=True needs image files"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        loader(**settings)


def test_images_of_one_channel_work_too():
    split = ImageArrays(torch.full((4, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    source = loader(split, batch_size=4, mean=(0.5,), std=(0.5,), augmentation=Augmentation(flip=True))
    assert prepared(source)[0][0].unique().tolist() == [1.0]
