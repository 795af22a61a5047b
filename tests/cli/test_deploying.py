"""``dyrep deploy``: a run becomes the weights of the plain network, or nothing is written."""

import dataclasses

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import dyrep
from dyrep.cli import deploying
from dyrep.cli.main import main
from dyrep.engine.checkpoints import read
from dyrep.engine.running import load_run
from dyrep.models import build


@pytest.mark.parametrize("kind", ["evolved", "averaged", "plain"])
@pytest.mark.parametrize("which", ["last", "best"])
def test_the_file_loads_strictly_into_the_plain_network_and_computes_the_same(kind, which, request, tmp_path, capsys):
    folder, file = request.getfixturevalue(kind), tmp_path / "plain.safetensors"
    main(["deploy", str(folder), "-o", str(file), "--which", which])
    told = capsys.readouterr().out
    assert told.startswith("passed: ")
    assert f"{file}: 72,666 parameters of small_vgg" in told
    fresh = build("small_vgg", num_classes=10, in_channels=1)
    assert fresh.load_state_dict(load_file(file), strict=True)
    model, _ = load_run(folder, which)
    images = torch.randn(32, 1, 8, 8)
    with torch.no_grad():
        ours, theirs = model(images), fresh.eval()(images)
    assert float((ours - theirs).abs().max() / ours.abs().max()) < 1e-5


def test_a_name_that_tells_of_another_format_is_refused(evolved, tmp_path, failing):
    status, message = failing("deploy", evolved, "-o", tmp_path / "plain.pt")
    assert status == 2
    assert "this writes safetensors, so call it" in message
    assert not list(tmp_path.glob("plain*"))


def test_the_last_network_is_the_one_that_was_written_when_training_ended(evolved, tmp_path):
    main(["deploy", str(evolved), "--out", str(tmp_path / "again.safetensors")])
    ours, theirs = load_file(tmp_path / "again.safetensors"), load_file(evolved / "plain.safetensors")
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_best_network_is_the_one_of_its_epoch(trained, tmp_path):
    run = trained("--epochs", "3", "--interval", "1", "--lr", "1.5", "--schedule", "constant", "--seed", "1")
    best = read(run / "best.ckpt")
    assert best["epoch"] < 3
    main(["deploy", str(run), "-o", str(tmp_path / "best.safetensors"), "--which", "best"])
    main(["deploy", str(run), "-o", str(tmp_path / "last.safetensors")])
    found = {which: load_file(tmp_path / f"{which}.safetensors") for which in ("best", "last")}
    assert torch.equal(found["best"]["conv1.weight"], best["model"]["conv1.weight"])
    assert not torch.equal(found["best"]["conv1.weight"], found["last"]["conv1.weight"])


def test_the_file_can_be_read_by_dyrep_too(evolved, tmp_path):
    file = tmp_path / "plain.safetensors"
    main(["deploy", str(evolved), "-o", str(file)])
    model = dyrep.load(file, build("small_vgg", num_classes=10, in_channels=1))
    assert dyrep.structure(model)["blocks"] == {}
    with safe_open(file, framework="pt") as opened:
        assert not any("branches" in key for key in opened.keys())  # noqa: SIM118 (not a dict)


def test_without_a_name_the_file_goes_into_the_current_directory(plain, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["deploy", str(plain)])
    assert [path.name for path in tmp_path.iterdir()] == ["plain.safetensors"]


@pytest.mark.parametrize("before", [None, b"what was there"])
def test_nothing_is_written_if_the_networks_differ(before, evolved, tmp_path, monkeypatch, failing):
    file = tmp_path / "plain.safetensors"
    if before is not None:
        file.write_bytes(before)

    def spoiled(model):
        plain = dyrep.deploy(model)
        with torch.no_grad():
            plain.conv6.weight[0] += 0.1
        return plain

    monkeypatch.setattr(deploying, "deploy", spoiled)
    status, message = failing("deploy", evolved, "-o", file)
    assert status == 1
    assert "does not compute the same, so nothing was written: FAILED" in message
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([] if before is None else [before])


def test_nothing_is_written_if_keys_are_missing(evolved, tmp_path, monkeypatch, failing):
    real = deploying.verify

    def lacking(model, plain, images):
        return dataclasses.replace(real(model, plain, images), missing=("conv1.bias",))

    monkeypatch.setattr(deploying, "verify", lacking)
    status, message = failing("deploy", evolved, "-o", tmp_path / "plain.safetensors")
    assert status == 1
    assert "keys differ: conv1.bias" in message
    assert not list(tmp_path.iterdir())


def test_a_run_without_a_checkpoint_says_so(evolved, tmp_path, failing):
    (tmp_path / "config.json").write_bytes((evolved / "config.json").read_bytes())
    status, message = failing("deploy", tmp_path, "-o", tmp_path / "plain.safetensors")
    assert status == 1
    assert "has no last.ckpt yet" in message
    assert not (tmp_path / "plain.safetensors").exists()
