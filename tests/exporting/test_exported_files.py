"""An exported file computes what the model does, for batches of any size."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from exporting_helpers import EXAMPLE, FILES, Variadic, error, evolve_, run_file, small_net
from torch import nn

import dyrep


@pytest.mark.parametrize("name", FILES)
def test_the_file_computes_what_the_model_does_with_its_branches_for_any_batch(name, evolved, tmp_path):
    report = dyrep.export(evolved, tmp_path / name, EXAMPLE)
    evolved.eval()
    for batch in (1, 2, 4, 7, 32):
        images = torch.randn(batch, 3, 8, 8)
        (found,) = run_file(tmp_path / name, images)
        assert error(found, evolved(images).detach()) < 1e-5
    assert report.random_error < 1e-5
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert report.bytes == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("batch", [2, 5])
def test_the_size_of_the_example_does_not_matter(batch, evolved, tmp_path):
    dyrep.export(evolved, tmp_path / "model.pt2", torch.zeros(batch, 3, 8, 8))
    assert run_file(tmp_path / "model.pt2", torch.randn(9, 3, 8, 8))[0].shape == (9, 4)


@pytest.mark.parametrize("name", FILES)
def test_branches_are_folded_unless_they_are_asked_for(name, evolved, tmp_path):
    folded = dyrep.export(evolved, tmp_path / name, EXAMPLE)
    kept = dyrep.export(evolved, tmp_path / "kept" / name, EXAMPLE, fold=False)
    assert (folded.blocks, folded.folded) == (kept.blocks, not kept.folded) == (2, True)
    images = torch.randn(3, 3, 8, 8)
    assert error(run_file(kept.path, images)[0], evolved.eval()(images).detach()) < 1e-5
    assert kept.bytes > 1.5 * folded.bytes
    if name.endswith("onnx"):
        convolutions = [
            sum(node.op_type == "Conv" for node in onnx.load(path).graph.node) for path in (folded.path, kept.path)
        ]
        assert convolutions[0] == 2
        assert convolutions[1] > 6


def test_kept_branches_are_there_even_if_blocks_are_set_to_run_folded(evolved, tmp_path):
    dyrep.set_execution_(evolved, "folded")
    dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE, fold=False)
    assert sum(node.op_type == "Conv" for node in onnx.load(tmp_path / "model.onnx").graph.node) > 6


def test_an_onnx_file_is_valid_whole_and_has_speaking_names(evolved, tmp_path):
    dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE)
    model = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    (given,), (output,) = model.graph.input, model.graph.output
    assert (given.name, output.name) == ("input", "output")
    assert given.type.tensor_type.shape.dim[0].dim_param == output.type.tensor_type.shape.dim[0].dim_param == "batch"


@pytest.mark.parametrize("name", FILES)
def test_nothing_in_the_file_tells_of_the_machine_or_the_example(name, tmp_path):
    dyrep.export(evolve_(Variadic(list)), tmp_path / name, torch.full((3, 3, 8, 8), 123.25))
    contents = (tmp_path / name).read_bytes()
    assert b"site-packages" not in contents
    assert __file__.encode() not in contents
    assert np.full(16, 123.25, dtype=np.float32).tobytes() not in contents


def test_the_opset_can_be_chosen(evolved, tmp_path):
    assert dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE, opset=19).opset == 19
    assert {entry.domain: entry.version for entry in onnx.load(tmp_path / "model.onnx").opset_import} == {"": 19}


def test_a_file_that_was_there_is_replaced(evolved, tmp_path):
    (tmp_path / "model.pt2").write_bytes(b"old")
    dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE)
    assert run_file(tmp_path / "model.pt2", torch.randn(2, 3, 8, 8))[0].shape == (2, 4)


def test_a_model_without_blocks_is_exported_too(tmp_path):
    report = dyrep.export(small_net(), tmp_path / "model.pt2", EXAMPLE)
    assert report.blocks == 0
    assert "a network without branches" in str(report)


def test_blocks_that_were_only_prepared_do_not_count(tmp_path):
    model = small_net()
    dyrep.prepare_(model)
    assert dyrep.export(model, tmp_path / "model.pt2", EXAMPLE).blocks == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_another_precision_become_float32(dtype, evolved, tmp_path):
    evolved.to(dtype)
    report = dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE.to(dtype))
    assert next(evolved.parameters()).dtype == dtype
    images = torch.randn(3, 3, 8, 8)
    (found,) = run_file(tmp_path / "model.onnx", images)
    assert found.dtype == torch.float32
    assert error(found, evolved.float().eval()(images).detach()) < 1e-5
    assert report.random_error < 1e-5


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_surroundings_do_not_get_into_the_file(context, evolved, tmp_path):
    with context():
        report = dyrep.export(evolved, tmp_path / "model.onnx", EXAMPLE)
    assert report.random_error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_resnet18_of_torchvision(name, tmp_path):
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18(num_classes=10)
    dyrep.expand_(model, ["layer1.0.conv1", "layer4.1.conv2"], gamma=1.0)
    report = dyrep.export(model, tmp_path / name, torch.zeros(1, 3, 64, 64), inputs=torch.rand(4, 3, 64, 64))
    assert report.blocks == 2
    assert max(report.random_error, report.real_error) < 1e-4
    images = torch.randn(6, 3, 64, 64)
    assert error(run_file(tmp_path / name, images)[0], model.eval()(images).detach()) < 1e-4


# Inputs and outputs -------------------------------------------------------------------------------------------------


class Several(nn.Module):
    """Two inputs, outputs in a dict, some of them whole numbers or missing."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.table = nn.Embedding(4, 6)

    def forward(self, image, kind):
        y = self.conv(image) + self.table(kind)[:, :, None, None]
        return {"features": y, "classes": y.argmax(1), "aux": [y.mean((2, 3)), None], "image": image}


@pytest.mark.parametrize("name", FILES)
def test_several_inputs_and_outputs_in_a_dict(name, tmp_path):
    model = evolve_(Several())
    example = (torch.zeros(2, 3, 8, 8), torch.tensor([0, 3]))
    batches = [(torch.rand(n, 3, 8, 8), torch.randint(4, (n,)), "a label") for n in (4, 6)]
    report = dyrep.export(model, tmp_path / name, example, inputs=batches)
    assert report.real_examples == 10
    images, kinds = torch.randn(7, 3, 8, 8), torch.randint(4, (7,))
    features, classes, aux, image = run_file(tmp_path / name, images, kinds)
    expected = model.eval()(images, kinds)
    assert error(features, expected["features"].detach()) < 1e-5
    assert error(aux, expected["aux"][0].detach()) < 1e-5
    assert torch.equal(image, images)
    assert classes.dtype == torch.int64
    if name.endswith("onnx"):
        graph = onnx.load(tmp_path / name).graph
        assert [entry.name for entry in graph.input] == ["image", "kind"]
        assert [entry.name for entry in graph.output] == ["features", "classes", "aux_0", "image_"]


@pytest.mark.parametrize("gather", [list, tuple])
@pytest.mark.parametrize("name", FILES)
def test_lists_and_tuples_of_outputs_and_any_number_of_inputs(name, gather, tmp_path):
    model = evolve_(Variadic(gather)).eval()
    dyrep.export(model, tmp_path / name, (EXAMPLE, EXAMPLE))
    images = torch.randn(3, 3, 8, 8), torch.randn(3, 3, 8, 8)
    for found, expected in zip(run_file(tmp_path / name, *images), model(*images), strict=True):
        assert error(found, expected.detach()) < 1e-5


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        (torch.rand(5, 3, 8, 8), 5),
        ([torch.rand(5, 3, 8, 8), torch.rand(2, 3, 8, 8)], 7),
        ((batch for batch in [torch.rand(1, 3, 8, 8)]), 1),
        ([(torch.rand(4, 3, 8, 8), torch.zeros(4))], 4),  # as a loader gives them
        ((torch.rand(4, 3, 8, 8), torch.zeros(4)), 4),  # a single one of those
        ([[torch.rand(4, 3, 8, 8).double(), torch.zeros(4)]], 4),
    ],
)
def test_real_inputs_are_compared_too(inputs, count, evolved, tmp_path):
    report = dyrep.export(evolved, tmp_path / "model.pt2", EXAMPLE, inputs=inputs)
    assert report.real_examples == count
    assert report.real_error < 1e-5
    assert f"{report.real_error:.2e} on {count} given one" in str(report)


class Fixed(nn.Module):
    """Knows the size of its batch."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(x).reshape(2, -1)


@pytest.mark.parametrize("name", FILES)
def test_a_model_that_fixes_its_batch_is_refused_with_the_remedy_and_exported_for_one_size(name, tmp_path):
    model = evolve_(Fixed())
    with pytest.raises(dyrep.DyRepError, match=r"depends on it: dynamic_batch=False exports it for one"):
        dyrep.export(model, tmp_path / name, EXAMPLE)
    assert not list(tmp_path.iterdir())
    report = dyrep.export(model, tmp_path / name, torch.zeros(2, 3, 8, 8), dynamic_batch=False)
    assert (report.batch_sizes, report.timed_batch) == ((2,), 2)
