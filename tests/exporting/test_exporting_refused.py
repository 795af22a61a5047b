"""A file that is wrong is not written, and neither is one that cannot be right."""

from __future__ import annotations

import sys

import pytest
import torch
from exporting_helpers import EXAMPLE, FILES
from torch import nn

import dyrep
from dyrep.errors import MissingPackageError
from dyrep.exporting import formats, writing


def spoiled(monkeypatch, change):
    """Let files be run as they are, and their outputs be changed."""
    for kind, opened in list(formats.OPEN.items()):

        def wrong(file, outputs, opened=opened):
            run = opened(file, outputs)
            return lambda inputs: change(run(inputs), inputs)

        monkeypatch.setitem(formats.OPEN, kind, wrong)


def off_by(share, when=lambda inputs: True):
    def change(outputs, inputs):
        return {name: value * (1 + share) if when(inputs) else value for name, value in outputs.items()}

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (off_by(1e-3), r"on a random batch of 1, 'output' has a relative error of 1\.00e-03 \(tolerance 1e-04\)"),
        (off_by(1e-3, lambda inputs: len(inputs[0]) == 3), "on a random batch of 3, 'output' has a relative error"),
        (off_by(1e-3, lambda inputs: inputs[0].min() >= 0), "on batch 0 of inputs, 'output' has a relative error"),
        (off_by(float("nan")), "'output' has a relative error of nan"),
        (lambda outputs, inputs: {"output": outputs["output"][:1]}, "a random batch of 2, .* error of inf"),
        (lambda outputs, inputs: {"logits": outputs["output"]}, "other outputs than the model: logits instead of out"),
        (lambda outputs, inputs: {}["lost"], "on a random batch of 1 it fails: KeyError: 'lost'"),
    ],
    ids=["all", "one size", "given", "nan", "shape", "names", "fails"],
)
def test_a_file_that_computes_something_else_is_not_written(change, message, evolved, tmp_path, monkeypatch):
    file = tmp_path / "model.pt2"
    spoiled(monkeypatch, change)
    with pytest.raises(dyrep.DyRepError, match=message) as raised:
        dyrep.export(evolved, file, EXAMPLE, inputs=torch.rand(4, 3, 8, 8))
    assert f"{file} was not written" in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_there_stays_if_the_new_one_is_wrong(name, evolved, tmp_path, monkeypatch):
    (tmp_path / name).write_bytes(b"what was there")
    spoiled(monkeypatch, off_by(1e-3))
    with pytest.raises(dyrep.DyRepError, match="does not compute the same"):
        dyrep.export(evolved, tmp_path / name, EXAMPLE)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"what was there"]


def test_the_tolerance_decides(evolved, tmp_path, monkeypatch):
    spoiled(monkeypatch, off_by(1e-3))
    assert dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE, tolerance=2e-3).random_error == pytest.approx(
        1e-3, 0.1
    )
    with pytest.raises(dyrep.DyRepError, match="does not compute the same"):
        dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE, tolerance=5e-4)


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_fold_is_found_by_comparing_with_the_branches(name, evolved, tmp_path, monkeypatch):
    def wrong(model):
        plain = dyrep.deploy(model)
        plain[0].weight[0] *= 1.1
        return plain

    monkeypatch.setattr(writing, "deploy", wrong)
    with pytest.raises(dyrep.DyRepError, match="does not compute the same"):
        dyrep.export(evolved, tmp_path / name, EXAMPLE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_found_by_reading_it_back(name, evolved, tmp_path, monkeypatch):
    real = formats.Traced.save

    def cut_short(self, file, *more):
        opset = real(self, file, *more)
        file.write_bytes(file.read_bytes()[:1000])
        return opset

    monkeypatch.setattr(formats.Traced, "save", cut_short)
    with pytest.raises(dyrep.DyRepError, match="was not written, because it could not be read back"):
        dyrep.export(evolved, tmp_path / name, EXAMPLE)
    assert not list(tmp_path.iterdir())


def test_an_interruption_leaves_nothing(evolved, tmp_path, monkeypatch):
    def interrupted(outputs, inputs):
        raise KeyboardInterrupt

    spoiled(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE)
    assert not list(tmp_path.iterdir())


class Squeezing(nn.Module):
    """Drops the batch where it is one example."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(x).mean((2, 3)).squeeze(0) if len(x) == 1 else self.conv(x).mean((2, 3))


def test_a_batch_of_one_that_is_treated_differently_is_found(tmp_path):
    with pytest.raises(dyrep.DyRepError, match="cannot leave the size of the batch open"):
        dyrep.export(Squeezing(), tmp_path / "model.onnx", EXAMPLE)
    assert not list(tmp_path.iterdir())


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "example", "more", "message"),
    [
        ("model.pb", EXAMPLE, {}, r"model\.pb: the name must end in \.onnx or \.pt2"),
        ("model", EXAMPLE, {}, r"model: the name must end in \.onnx or \.pt2"),
        ("folder.onnx", EXAMPLE, {}, "is a folder; name a file"),
        ("model.pt2", EXAMPLE, {"opset": 18}, "opset=18: .* is not to be an ONNX file"),
        ("model.onnx", EXAMPLE, {"opset": 99}, "opset=99: torch cannot convert this model to it, and would write 18"),
        ("model.pt2", torch.zeros(0, 3, 8, 8), {}, r"shape \(0, 3, 8, 8\): its first dimension is the batch"),
        ("model.pt2", torch.tensor(1.0), {}, r"shape \(\): its first dimension is the batch"),
        ("model.pt2", (EXAMPLE, torch.zeros(2)), {}, "must agree in their first dimension"),
        ("model.pt2", EXAMPLE.to("meta"), {}, "example_input is on the meta device"),
        ("model.pt2", {"x": EXAMPLE}, {}, "example_input is a dict: must be a tensor or a tuple"),
        ("model.pt2", (), {}, "example_input is a tuple: must be"),
        ("model.pt2", EXAMPLE, {"inputs": []}, "inputs holds no batch"),
        ("model.pt2", EXAMPLE, {"inputs": torch.zeros(0, 3, 8, 8)}, "batch 0 holds no examples"),
        ("model.pt2", EXAMPLE, {"inputs": [EXAMPLE, "text"]}, "batch 1 must be a tensor, as example_input is"),
        ("model.pt2", (EXAMPLE, EXAMPLE), {"inputs": [EXAMPLE]}, "batch 0 must be a tuple of 2 tensors"),
    ],
)
def test_what_cannot_serve_is_refused(name, example, more, message, evolved, tmp_path):
    (tmp_path / "folder.onnx").mkdir()
    with pytest.raises(dyrep.errors.ConfigError, match=message):
        dyrep.export(evolved, tmp_path / name, example, **more)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.onnx"]


class Deciding(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Counting(nn.Module):
    def forward(self, x):
        return (x > 0).sum(1)


class Undefined(nn.Module):
    def forward(self, x):
        return x.log()


class Constant(nn.Module):
    def forward(self, x):
        return {"y": x * 2, "size": 3}


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (Deciding(), "model.pt2", "torch.export cannot trace the model: GuardOnDataDependentSymNode"),
        (Counting(), "model.pt2", "no floating-point output to compare"),
        (Undefined(), "model.pt2", "the model's own 'output' is not finite on a random batch of 1"),
        (Constant(), "model.onnx", "torch.onnx cannot convert the model: AttributeError"),
        (nn.Conv2d(4, 4, 3), "model.onnx", "does not run on inputs like example_input: RuntimeError: "),
        (nn.Conv2d(3, 4, 3, device="meta"), "model.onnx", "'weight' is on the meta device, where it has no values"),
    ],
)
def test_models_that_cannot_be_exported_are_refused(model, name, message, tmp_path):
    with pytest.raises(dyrep.DyRepError, match=message):
        dyrep.export(model, tmp_path / name, EXAMPLE)
    assert not list(tmp_path.iterdir())


def test_real_inputs_of_another_shape_are_refused(evolved, tmp_path):
    with pytest.raises(dyrep.DyRepError, match=r"was not written, because on batch 0 of inputs it fails"):
        dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE, inputs=torch.rand(2, 3, 9, 9))
    assert not list(tmp_path.iterdir())


def test_a_model_too_large_for_one_onnx_file_is_refused(evolved, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "ONNX_LIMIT", 2000)
    with pytest.raises(dyrep.DyRepError, match=r"one ONNX file holds at most .*: export to a \.pt2 file"):
        dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE)
    assert not list(tmp_path.iterdir())
    assert dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE)


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_package_that_is_not_installed_is_named_with_the_remedy(missing, evolved, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not there
    wanted = rf'an ONNX file needs {missing}, which .*: pip install "\.\[export\]" .*; a \.pt2 file takes torch alone'
    with pytest.raises(MissingPackageError, match=wanted):
        dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE)
    assert not list(tmp_path.iterdir())
    assert dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE)  # which needs none of them


def test_a_file_that_cannot_be_written_is_named(evolved, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(dyrep.DyRepError, match=r"model\.pt2 cannot be written: "):
        dyrep.export(evolved, tmp_path / "file" / "model.pt2", EXAMPLE)


def test_a_torch_that_is_too_old_is_named(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.export, "export", fails)
    model = nn.Conv2d(3, 4, 3)
    monkeypatch.setattr(formats, "TRIED_SINCE", "99.0")
    with pytest.raises(dyrep.DyRepError, match=r"no such operator \(this is torch .* is tried with 99\.0 and newer"):
        dyrep.export(model, tmp_path / "model.pt2", EXAMPLE)
    monkeypatch.setattr(formats, "TRIED_SINCE", "2.0")
    with pytest.raises(dyrep.DyRepError, match=r"no such operator$"):
        dyrep.export(model, tmp_path / "model.pt2", EXAMPLE)


def test_inputs_that_the_model_itself_does_not_take_are_said_to_be_so(tmp_path):
    with pytest.raises(dyrep.DyRepError, match="the model itself fails on batch 0 of inputs: RuntimeError"):
        dyrep.export(nn.Conv2d(3, 4, 3), tmp_path / "model.pt2", EXAMPLE, inputs=torch.rand(2, 5, 8, 8))
    assert not list(tmp_path.iterdir())
