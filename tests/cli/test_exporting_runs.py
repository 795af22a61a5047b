"""``dyrep export``: a run becomes a file that other programs run, or nothing is written."""

import json
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

import dyrep
from dyrep.cli import exporting
from dyrep.cli.main import main
from dyrep.engine.checkpoints import read
from dyrep.engine.data import Augmentation, Loading, open_data
from dyrep.engine.running import load_run
from dyrep.exporting.formats import NEEDED


def run_onnx(path, images):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])


def agrees(found, expected):
    return float((found - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.fixture
def tiny_images(tmp_path):
    """A folder of images of two classes."""
    for split, count in (("train", 8), ("val", 3)):
        for label, title in enumerate(("dark", "light")):
            folder = tmp_path / "images" / split / title
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = np.random.default_rng(100 * label + index).integers(0, 128, (16, 16, 3)) + 127 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    return tmp_path / "images"


def test_both_files_compute_what_the_run_learned(evolved, tmp_path, capsys):
    files = tmp_path / "new" / "model.onnx", tmp_path / "model.pt2"
    main(["export", str(evolved), "--onnx", str(files[0]), "--pt2", str(files[1]), "--json", str(tmp_path / "f.json")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{files[0]}: ONNX opset ")
    assert lines[0].endswith(" 2 blocks folded")
    assert lines[3].startswith(f"{files[1]}: torch.export, ")
    assert lines[1].startswith("  same function: relative error ")
    assert "on 16 given ones" in lines[1]
    assert lines[2].startswith("  latency for a batch of 1: ")
    assert len(lines) == 6
    model, state = load_run(evolved)
    images = torch.randn(9, 1, 8, 8)
    with torch.no_grad():
        expected = model(images)
        assert agrees(run_onnx(files[0], images), expected)
        assert agrees(torch.export.load(files[1]).module()(images), expected)
    told = json.loads((tmp_path / "f.json").read_text())
    assert [report["path"] for report in told["exports"]] == [str(file) for file in files]
    assert [report["bytes"] for report in told["exports"]] == [file.stat().st_size for file in files]
    assert (told["epoch"], told["model"], told["which"]) == (state["epoch"], "small_vgg", "last")
    assert told["versions"]["onnxruntime"] == onnxruntime.__version__
    assert not list(tmp_path.rglob("*.part"))


def test_the_images_are_those_of_the_test_split_as_in_evaluation(evolved, tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(exporting, "export", lambda model, path, example, **more: given.update(more, example=example))
    main(["export", str(evolved), "--pt2", str(tmp_path / "model.pt2")])
    data = open_data(
        "digits", None, Loading(torch.device("cpu"), seed=5), size=None, batch_size=32, augmentation=Augmentation(),
        val_split=0,
    )  # fmt: skip
    images, _ = data.test.prepare(next(iter(data.test.batches(0))))
    assert torch.equal(given["inputs"], images[:16])
    assert given["example"].shape == (1, 1, 8, 8)
    assert given["fold"] is True
    assert given["opset"] is None


def test_branches_are_kept_if_asked_for(evolved, tmp_path, capsys):
    main(["export", str(evolved), "--pt2", str(tmp_path / "model.pt2"), "--keep-branches"])
    assert capsys.readouterr().out.splitlines()[0].endswith("2 blocks with all branches")
    names = torch.export.load(tmp_path / "model.pt2").state_dict
    assert any("branches" in name for name in names)


def test_the_best_network_can_be_exported(averaged, tmp_path):
    main(["export", str(averaged), "--onnx", str(tmp_path / "best.onnx"), "--which", "best", "--opset", "19"])
    model, _ = load_run(averaged, "best")
    images = torch.randn(3, 1, 8, 8)
    assert agrees(run_onnx(tmp_path / "best.onnx", images), model(images).detach())
    assert read(averaged / "best.ckpt")["epoch"] >= 1


def test_a_run_whose_data_has_gone_is_compared_on_random_images(tiny_images, tmp_path, capsys, failing):
    network = ["--model", "small_vgg", "--dataset", "folder", "--workers", "0", "--crop", "none"]
    run = tmp_path / "run"
    flags = ["--batch-size", "8", "--epochs", "1", "--method", "origin", "--out", str(run), "--device", "cpu"]
    main(["train", *network, *flags, "--data", str(tiny_images)])
    words = ["export", str(run), "--pt2", str(tmp_path / "model.pt2")]
    capsys.readouterr()

    main(words)  # where the data is, the run knows
    assert "on 6 given ones" in capsys.readouterr().out

    moved = tiny_images.rename(tmp_path / "moved")
    main(words)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("compared on random images alone, for the test images cannot be read: ")
    assert str(tiny_images) in lines[0]
    assert "given" not in lines[2]
    assert len(lines) == 4

    main([*words, "--data", str(moved)])
    assert "on 6 given ones" in capsys.readouterr().out

    status, message = failing(*words, "--data", tmp_path / "nowhere")
    assert status == 1
    assert "nowhere" in message


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "name a file to write: --onnx model.onnx, --pt2 model.pt2, or both"),
        (("--onnx", "model.pt2"), "--onnx model.pt2: the name must end in .onnx"),
        (("--onnx", "model.onnx", "--pt2", "model"), "--pt2 model: the name must end in .pt2"),
        (("--pt2", "folder.pt2"), "--pt2 folder.pt2 is a folder; name a file"),
        (("--pt2", "model.pt2", "--opset", "18"), "--opset 18 is of an ONNX file; name one with --onnx"),
        (("--pt2", "model.pt2", "--json", "."), "--json . is a folder; name a file"),
        (("--onnx", "model.onnx", "--opset", "99"), "opset=99: torch cannot convert this model to it"),
    ],
)
def test_bad_wishes_are_answered_in_a_line(flags, message, plain, failing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.pt2").mkdir()
    status, told = failing("export", plain, *flags)
    assert status == 2
    assert told.startswith(f"dyrep: {message}")
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.pt2"]


def test_a_folder_without_a_run_says_so(tmp_path, failing):
    status, message = failing("export", tmp_path, "--onnx", tmp_path / "model.onnx")
    assert status == 1
    assert "is not the folder of a run" in message


def test_nothing_is_written_if_the_file_is_wrong(evolved, tmp_path, monkeypatch, failing):
    def wrong(model):
        plain = dyrep.deploy(model)
        with torch.no_grad():
            plain.conv6.weight[0] += 0.1
        return plain

    monkeypatch.setattr("dyrep.exporting.writing.deploy", wrong)
    status, message = failing("export", evolved, "--pt2", tmp_path / "model.pt2", "--json", tmp_path / "found.json")
    assert status == 1
    assert message.startswith(f"dyrep: {tmp_path / 'model.pt2'} was not written, because it does not compute the same")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", NEEDED["onnx"])
def test_a_package_that_is_not_installed_is_named_with_its_extra(package, plain, tmp_path, monkeypatch, failing):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    status, message = failing("export", plain, "--onnx", tmp_path / "model.onnx")
    assert status == 2
    assert message.startswith(f"dyrep: an ONNX file needs {package}, which ")
    assert f'pip install ".[export]" (or just {package})' in message
    assert not list(tmp_path.iterdir())
