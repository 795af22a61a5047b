"""Exporting leaves the caller's things alone, and says what it found."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import random
import warnings

import numpy as np
import pytest
import torch
from exporting_helpers import EXAMPLE, FILES, error

import dyrep
from dyrep.exporting import writing


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_the_model_and_the_random_numbers_stay_as_they_were(name, fold, evolved, tmp_path):
    evolved.train()
    evolved[1].eval()  # frozen by its owner
    evolved[0].weight.requires_grad_(False)
    seen = []
    evolved[0].register_forward_hook(lambda *_: seen.append(1))
    before, structure = copy.deepcopy(evolved.state_dict()), dyrep.structure(evolved)
    modes = [module.training for module in evolved.modules()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    dyrep.export(evolved, tmp_path / name, EXAMPLE, fold=fold)
    assert [module.training for module in evolved.modules()] == modes
    assert dyrep.structure(evolved) == structure
    after = evolved.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert not evolved[0].weight.requires_grad
    assert evolved[4].weight.requires_grad
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    assert np.array_equal(generators[2], np.random.get_state()[1])
    evolved(torch.randn(2, 3, 8, 8)).sum().backward()  # still to be trained


def test_nothing_is_printed_or_warned_of(evolved, tmp_path, capfd, caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE, opset=18)
        dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE)
    assert "".join(capfd.readouterr()) == ""
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_compiled_models_are_unwrapped(evolved, tmp_path):
    report = dyrep.export(torch.compile(evolved), tmp_path / "model.pt2", EXAMPLE)
    assert report.blocks == 2


# The report ---------------------------------------------------------------------------------------------------------


def test_the_report_says_what_was_found(evolved, tmp_path):
    report = dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE, inputs=torch.rand(4, 3, 8, 8))
    first, second, third = str(report).splitlines()
    assert first == f"{report.path}: ONNX opset {report.opset}, {report.bytes / 1e6:.3f} MB, 2 blocks folded"
    assert "on random inputs (batches of 1, 2, 3, 5)" in second
    assert second.endswith(f"{report.real_error:.2e} on 4 given ones; tolerance 1e-04")
    assert (
        f"latency for a batch of 1: {report.ms:.3f} ms in onnxruntime, {report.plain_ms:.3f} ms as the plain" in third
    )
    assert min(report.ms, report.plain_ms) > 0
    data = json.loads(json.dumps(report.as_dict()))
    assert data["path"] == str(tmp_path / "model.onnx")
    assert list(data) == [field.name for field in dataclasses.fields(report)]
    with pytest.raises(AttributeError):
        report.ms = 0.0


def test_the_report_of_a_torch_file_has_no_opset(evolved, tmp_path):
    report = dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE, fold=False)
    assert report.opset is None
    first, _, third = str(report).splitlines()
    assert ": torch.export, " in first
    assert first.endswith("2 blocks with all branches")
    assert f"{report.ms:.3f} ms in torch, " in third


def test_the_plain_network_is_timed_beside_the_file(evolved, tmp_path, monkeypatch):
    timed = []
    monkeypatch.setattr(writing, "_medians", lambda *runs: timed.extend(run() for run in runs) or [1.0, 2.0])
    report = dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE, fold=False)
    assert (report.ms, report.plain_ms) == (1.0, 2.0)
    assert error(timed[0]["output"], timed[1]) < 1e-5
    assert timed[1].shape == (1, 4)


def test_what_is_timed_takes_turns_and_the_median_counts(monkeypatch):
    called, clock = [], [0.0]

    def run(name, seconds):
        called.append(name)
        # the first calls take long, and so does one in the middle
        clock[0] += seconds if len(called) > 2 * writing._WARMUP and len(called) != 20 else 100.0

    monkeypatch.setattr(writing.time, "perf_counter", lambda: clock[0])
    assert writing._medians(lambda: run("a", 2.0), lambda: run("b", 3.0)) == [2000.0, 3000.0]
    assert "".join(called) == "aaaaaaabbbbbbb" + 4 * "aaaaabbbbb"
