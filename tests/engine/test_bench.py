"""`Bench`: whole steps of every arm, of the networks and in the executions that it says."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest
import torch

import dyrep
from dyrep.block import RepConv
from dyrep.engine import bench, rundir
from dyrep.engine.bench import ARMS, Bench, BenchSettings, StepTime
from dyrep.errors import ConfigError
from dyrep.execution.settings import MEASURE_EVERY

NETWORKS = """
import torch
from torch import nn


def four_classes():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def diverging():
    class Infinite(nn.Module):
        def forward(self, x):
            return x / 0

    return nn.Sequential(*four_classes(), Infinite())


def pointwise():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def without_convolutions():
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(2))


def pictures():
    return nn.Sequential(nn.Conv2d(3, 4, 3))


def breaking():
    class Break(nn.Module):
        def forward(self, x):
            if x.shape[0] > 2:
                raise ValueError("more than two images\\nand more lines")
            return x

    return nn.Sequential(*four_classes(), Break())
"""


@pytest.fixture
def networks(tmp_path, monkeypatch):
    (tmp_path / "bench_networks.py").write_text(NETWORKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "bench_networks:"
    sys.modules.pop("bench_networks", None)


def small(**changes):
    return Bench(BenchSettings(**{"model": "small_vgg", "size": 8, "batch": 4, "device": "cpu", "steps": 1, **changes}))


@pytest.fixture
def trained(monkeypatch):
    """The models that `Bench` trains, by arm; each takes as many milliseconds as its place."""
    found = []

    def median(self, model, optimizer, clock, batch, graph):
        found.append((model, optimizer, clock, batch))
        return float(len(found))

    monkeypatch.setattr(Bench, "_median", median)
    return found


def blocks(model):
    return [module for module in model.modules() if isinstance(module, RepConv)]


# Steps --------------------------------------------------------------------------------------------------------------


def test_every_arm_is_timed_and_compared_with_the_plain_network():
    rows = {row.arm: row for row in small(steps=3).steps()}
    assert tuple(rows) == ARMS
    assert rows["plain"].ratio == 1
    for row in rows.values():
        assert row.ms > 0
        assert row.ratio == row.ms / rows["plain"].ms
        assert (row.error, row.peak_gib, row.memory_ratio, row.graph) == (None, None, None, False)
    assert asdict(rows["fused"]) == asdict(rows["eager"]) | {"arm": "fused", "same_as": "eager"}
    assert [row.same_as for row in rows.values()] == [None, None, "eager", None]


def test_arms_are_the_networks_they_are_called(trained):
    rows = list(small(images=3).steps())
    assert [row.ms for row in rows] == [1, 2, 2, 3]
    assert [row.ratio for row in rows] == [1, 2, 2, 3]
    plain, eager, folded = (model for model, *_ in trained)
    assert not blocks(plain)
    for model, name in ((eager, "eager"), (folded, "folded")):
        assert len(blocks(model)) == 6
        assert {(block.execution.name, block.execution.images) for block in blocks(model)} == {(name, 3)}
        assert {float(norm.weight.detach().mean()) for block in blocks(model) for norm in block.scalings()} == {1.0}
    for model, optimizer, _, (images, labels) in trained:
        assert model.training
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
        assert images.shape == (4, 3, 8, 8)
        assert labels.shape == (4,)


def test_a_step_is_timed_in_the_middle_of_training_over_steps_of_every_kind(monkeypatch):
    due, rounds = [], []

    class Watched(bench.TrainStep):
        def __call__(self, raw):
            due.append(self.clock.due)
            super().__call__(raw)

    def median(run, device, repeats, calls):
        rounds.append((repeats, calls))
        for _ in range(repeats * calls):
            run()
        return 1.0

    monkeypatch.setattr(bench, "TrainStep", Watched)
    monkeypatch.setattr(bench, "median_ms", median)
    made = small(steps=5)
    made._time("folded")
    every = MEASURE_EVERY
    assert rounds == [(-(-5 // every), every)]
    assert due.count(True) == -(-len(due) // every)


def test_what_is_timed_trains_every_parameter(monkeypatch):
    made, before = [], []

    class Watched(bench.TrainStep):
        def __init__(self, model, *what, **options):
            super().__init__(model, *what, **options)
            made.append(model)
            before.append({name: p.detach().clone() for name, p in model.named_parameters()})

    monkeypatch.setattr(bench, "TrainStep", Watched)
    list(small().steps())
    assert [bool(blocks(model)) for model in made] == [False, True, True]
    for model, old in zip(made, before, strict=True):
        assert not [name for name, p in model.named_parameters() if torch.equal(p, old[name])]


def test_an_arm_that_fails_says_why_and_the_others_go_on(monkeypatch):
    def fails(self, arm):
        if arm == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        return StepTime(arm, 3.0 if arm == "folded" else 2.0)

    monkeypatch.setattr(Bench, "_time", fails)
    rows = {row.arm: row for row in small().steps()}
    assert rows["eager"].error == "it does not fit into memory: use a smaller --batch"
    assert rows["eager"].ms is rows["eager"].ratio is None
    assert rows["fused"].error == rows["eager"].error
    assert (rows["plain"].ratio, rows["folded"].ratio) == (1, 1.5)


def test_without_a_plain_network_there_is_nothing_to_compare_with():
    plain = bench._against(StepTime("plain", error="no"), None)
    assert plain == StepTime("plain", error="no")
    assert bench._against(StepTime("eager", 2.0, peak_gib=1.0), plain) == StepTime("eager", 2.0, peak_gib=1.0)


def test_ratios_are_of_time_and_of_memory():
    row = bench._against(StepTime("eager", 3.0, peak_gib=1.0), StepTime("plain", 2.0, peak_gib=0.5))
    assert (row.ratio, row.memory_ratio) == (1.5, 2.0)


def test_other_errors_are_told_in_one_line(networks):
    rows = list(small(model=f"{networks}breaking").steps())
    assert {row.error for row in rows} == {"ValueError: more than two images"}


def test_steps_that_diverge_are_not_taken_for_fast_ones(networks):
    rows = list(small(model=f"{networks}diverging", batch=2).steps())
    assert {row.error for row in rows} == {"DyRepError: its loss is not finite"}


def test_labels_are_of_as_many_classes_as_the_network_knows(networks, trained):
    made = small(model=f"{networks}four_classes", batch=64)
    list(made.steps())
    assert set(trained[0][3][1].tolist()) == {0, 1, 2, 3}
    assert made.report([], [])["settings"]["classes"] == 4


# Networks -----------------------------------------------------------------------------------------------------------


def test_all_branches_that_fit_are_grown_or_those_that_are_asked_for():
    made = small()
    expected = {t.name: list(t.branches) for t in dyrep.targets(made._plain)}
    assert made.branches == expected
    assert made.branches["conv2"][-1] == "residual"
    assert small(branches=("residual", "1x1")).branches["conv1"] == ["1x1"]
    assert list(small(branches=("residual",)).branches) == ["conv2", "conv4", "conv6"]


def test_what_is_not_given_is_decided_by_the_device():
    settings = small().settings
    assert (settings.device, settings.precision, settings.channels_last) == ("cpu", "fp32", False)
    assert small(precision="bf16").settings.precision == "bf16"


def test_the_layout_is_that_of_images_and_weights(trained):
    list(small(channels_last=True).steps())
    model, _, _, (images, _) = trained[1]
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert model.conv3.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "small_vvg"}, "there is no model 'small_vvg' .did you mean small_vgg"),
        ({"size": 4}, "'small_vgg' cannot be trained on 4 images of 4x4 at a time .*: give another --size"),
        ({"size": 0}, "size=0: must be at least 1"),
        ({"batch": -1}, "batch=-1: must be at least 1"),
        ({"steps": 0}, "steps=0: must be at least 1"),
        ({"images": 0}, "images=0: must be at least 1"),
        ({"device": "tpu"}, "'tpu' is not a device"),
        ({"precision": "fp16"}, "precision='fp16' needs a GPU"),
        ({"precision": "fp8"}, "precision='fp8': must be one of"),
        ({"branches": ("2x2",)}, "unknown branch '2x2'; valid are 1x1"),
        ({"model": "{}pointwise"}, "no convolution that can grow: the kernel is 1x1"),
        ({"model": "{}without_convolutions"}, "no convolution that can grow: it has none at all"),
        ({"model": "{}four_classes", "branches": ("residual",)}, "can grow: none can have residual"),
        ({"model": "{}pictures"}, "does not give a row of logits per image"),
    ],
)
def test_what_cannot_be_timed_is_refused_with_the_reason(changes, message, networks):
    changes = {key: value.format(networks) if key == "model" else value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        small(**changes)


# Layers and the report ----------------------------------------------------------------------------------------------


def test_the_report_holds_everything_as_data(trained):
    made = small(branches=("1x1", "residual"), images=2)
    rows, layers = list(made.steps()), made.layers()
    report = json.loads(json.dumps(made.report(rows, layers)))
    assert [row["arm"] for row in report["steps"]] == list(ARMS)
    assert report["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert report["hardware"] == rundir.hardware()
    assert (report["settings"]["batch"], report["settings"]["device"]) == (4, "cpu")
    assert list(report["branches"]) == [layer["layer"] for layer in report["layers"]]
    layer = report["layers"][1]
    assert (layer["layer"], layer["input_shape"], layer["branches"]) == ("conv2", [4, 16, 8, 8], ["1x1", "residual"])
    assert layer["ms"].keys() == {"eager", "fused", "folded"}
    assert layer["fastest_exact"] == "eager"


def test_layers_run_in_the_precision_asked_for_and_with_as_many_images(monkeypatch):
    seen = []

    def measure(model, batch, *, executions, repeats):
        seen.append((model.conv1(batch[0]).dtype, model.conv1.execution.images, executions, repeats))
        return []

    monkeypatch.setattr(bench, "measure_executions", measure)
    made = small(precision="bf16", images=3, steps=7)
    made.layers()
    made.layers(timed=False)
    assert seen == [(torch.bfloat16, 3, ARMS[1:], 7), (torch.bfloat16, 3, (), 1)]


# On a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_gpu_has_all_figures(precision):
    rows = {row.arm: row for row in small(device="cuda", precision=precision, batch=64, size=32, steps=3).steps()}
    assert [row.error for row in rows.values()] == [None] * 4
    assert not any(row.same_as for row in rows.values())
    assert rows["eager"].memory_ratio > rows["folded"].memory_ratio > 0.5
    assert all(row.graph for row in rows.values())  # so small a network is all launches


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_that_cannot_be_captured_is_timed_without_a_graph(monkeypatch):
    median = Bench._median

    def fails(self, *what, graph):
        if graph:
            bench._not_captured("it cannot be")
        return median(self, *what, graph=graph)

    monkeypatch.setattr(Bench, "_median", fails)
    rows = list(small(device="cuda").steps())
    assert all(row.ms and not row.graph and row.error is None for row in rows)
