"""What a model is run on, and that running it leaves everything as it was."""

from __future__ import annotations

import random
from collections import namedtuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import dyrep
from dyrep.errors import CalibrationError
from dyrep.norm import BranchNorm
from dyrep.surgery.batches import read_batches
from surgery_helpers import Named, conv_bn_net, global_states, images, unbiased_variance


class Noisy(Dataset):
    """Every item draws from all three global generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(3, 8, 8) + float(np.random.rand()) + random.random(), index


def dropping_net() -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.5), *conv_bn_net())


def make_loader(kind: str) -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    if kind == "loader generator":
        return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator)
    if kind == "sampler generator":
        return DataLoader(Noisy(), batch_size=4, sampler=RandomSampler(Noisy(), generator=generator))
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


@pytest.mark.parametrize("kind", ["loader generator", "sampler generator", "global generator"])
def test_random_number_generators_and_the_order_of_a_loader_are_left_alone(kind):
    model, loader, untouched = dropping_net(), make_loader(kind), make_loader(kind)
    weights = torch.Generator().manual_seed(0)
    states = global_states()
    dyrep.expand_(model, "4", calibration=loader, calibration_batches=2, generator=weights)
    assert global_states() == states
    torch.manual_seed(11)
    order = [index for _, labels in loader for index in labels.tolist()]
    torch.manual_seed(11)
    expected = [index for _, labels in untouched for index in labels.tolist()]
    assert order == expected
    assert sorted(order) == list(range(24))


class Recorder(nn.Module):
    """Notes the modes of a model during its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[list[bool]] = []
        self.watched: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append([module.training for module in self.watched])
        return x


@pytest.mark.parametrize("state", ["training", "frozen norm", "eval"])
def test_modes_and_buffers_of_the_model_are_left_alone(state):
    model = nn.Sequential(Recorder(), *dropping_net())
    model[0].watched = [model[1], model[3]]
    model.train(state != "eval")
    if state == "frozen norm":
        model[3].eval()
    dyrep.expand_(model, "2", ["1x1"])
    norms = [m for m in model.modules() if isinstance(m, (nn.BatchNorm2d, BranchNorm))]
    assert len(norms) == 3
    modes = [(module, module.training) for module in model.modules()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    identities = {name: id(buffer) for name, buffer in model.named_buffers()}
    assert any(name.endswith("num_batches_tracked") for name in buffers)
    dyrep.expand_(model, "5", calibration=images(3))
    assert all(module.training == mode for module, mode in modes)
    after = dict(model.named_buffers())
    for name, buffer in buffers.items():
        assert torch.equal(after[name], buffer), name
        assert id(after[name]) == identities[name], name
    assert model[0].seen == [[True, state != "frozen norm"]] * 3


Pair = namedtuple("Pair", ["pixels", "label"])


@pytest.mark.parametrize(
    ("wrap", "arguments"),
    [
        (lambda x: x, {}),
        (lambda x: (x, torch.zeros(4)), {}),
        (lambda x: [x, torch.zeros(4)], {}),
        (lambda x: Pair(x, torch.zeros(4)), {}),
        (lambda x: {"pixels": x, "label": torch.zeros(4)}, {}),
        (lambda x: {"pixels": 2 * x, "mask": torch.tensor(0.5), "label": torch.zeros(4)}, {}),
        (lambda x: ({"pixels": x}, torch.zeros(4)), {}),
        (lambda x: {"image": x}, {"forward": lambda model, batch: model(batch["image"])}),
        (lambda x: "a path", {"forward": lambda model, _: model(images_in_file())}),
    ],
    ids=["tensor", "tuple", "list", "namedtuple", "dict", "dict of two", "dict in tuple", "forward", "forward of str"],
)
def test_batches_of_every_kind_reach_the_model(wrap, arguments):
    model = Named()
    x = images_in_file()
    dyrep.expand_(model, "conv", ["1x1"], calibration=[wrap(x)], **arguments)
    with torch.no_grad():
        expected = unbiased_variance(F.conv2d(x, model.conv.branches["1x1"].conv.weight))
    torch.testing.assert_close(model.conv.branches["1x1"].norm.running_var, expected, rtol=1e-5, atol=0)


def images_in_file() -> Tensor:
    return torch.linspace(-1, 1, 4 * 3 * 64).reshape(4, 3, 8, 8).sin()


class Passing(Named):
    """Accepts anything by name."""

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.conv(inputs["image"])


def test_model_that_takes_any_keyword_gets_the_whole_dict():
    model = Passing()
    dyrep.expand_(model, "conv", ["1x1"], calibration=[{"image": images_in_file(), "label": torch.zeros(4)}])
    assert list(model.conv.branches) == ["1x1"]


class Features(dict):
    """A batch as some libraries make them: a dict with its entries as attributes."""

    __getattr__ = dict.__getitem__


class Samples(list):
    """A batch that cannot be made anew from its entries."""

    def __init__(self, size, entries):
        super().__init__(entries)
        self.size = size


@pytest.mark.parametrize("make", [lambda x: Features(pixels=x), lambda x: Samples(4, [x])], ids=["dict", "list"])
def test_batches_reach_forward_as_the_objects_that_they_are(make):
    seen, batches = [], [make(x) for x in images(2)]

    def forward(model, batch):
        seen.append(batch)
        return model(batch.pixels if isinstance(batch, Features) else batch[0])

    dyrep.expand_(conv_bn_net(), "3", ["1x1"], calibration=batches, forward=forward)
    assert all(ours is theirs for ours, theirs in zip(seen, batches, strict=True))


def test_a_batch_without_a_tensor_is_refused_by_what_it_begins_with():
    batch = (np.zeros((2, 3, 8, 8), dtype=np.float32), 0)
    with pytest.raises(CalibrationError, match="in a batch of type tuple that begins with a ndarray"):
        dyrep.expand_(conv_bn_net(), "3", ["1x1"], calibration=[batch])


@pytest.mark.parametrize("attribute", ["loader", "iterable"])
def test_the_order_of_a_loader_inside_another_object_is_left_alone(attribute):
    class Prefetcher:
        def __init__(self, loader):
            setattr(self, attribute, loader)

        def __iter__(self):
            return iter(getattr(self, attribute))

    generator = torch.Generator().manual_seed(3)
    data = [x[0] for x in images(8)]
    loader = Prefetcher(DataLoader(data, batch_size=2, shuffle=True, generator=generator))
    before = generator.get_state()
    dyrep.expand_(conv_bn_net(), "3", ["1x1"], calibration=loader)
    assert torch.equal(generator.get_state(), before)


READERS = {
    "update": lambda batches: read_batches(batches, 20, torch.device("cpu")),
    "calibration": lambda batches: dyrep.expand_(conv_bn_net(), "3", ["1x1"], calibration=batches),
    "statistics": lambda batches: dyrep.update_norms_(conv_bn_net(), batches),
}
LABELLED = (images(1)[0], torch.arange(4))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("single", [LABELLED, LABELLED[0], {"x": LABELLED[0]}], ids=["tuple", "Tensor", "dict"])
def test_one_batch_in_place_of_a_loader_is_refused_and_a_list_of_it_is_not(single, reader):
    with pytest.raises(
        CalibrationError, match=r"are a single one \(a (tuple|Tensor|dict)\): give the loader, or a list"
    ):
        READERS[reader](single)
    READERS[reader]([LABELLED])
    assert read_batches([single], 20, torch.device("cpu")) == [single]


@pytest.mark.parametrize("reader", READERS)
def test_a_data_set_in_place_of_a_loader_is_refused_and_one_that_iterates_over_batches_is_not(reader):
    class Batches(IterableDataset):
        def __iter__(self):
            return iter([LABELLED])

    examples = TensorDataset(*LABELLED)
    told = r"are a data set \(a TensorDataset\), which holds single examples: give a DataLoader of it"
    with pytest.raises(CalibrationError, match=told):
        READERS[reader](examples)
    READERS[reader](DataLoader(examples, batch_size=2))
    READERS[reader](Batches())
