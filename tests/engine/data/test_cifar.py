"""CIFAR in every form, and what is said when it is missing or damaged."""

import hashlib
import io
import os
import pickle
import sys
import tarfile

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from dyrep.engine.data import read_cifar
from dyrep.errors import DataError, MissingPackageError


def assert_same_cifar(source, arrays, classes=10):
    for split in ("train", "test"):
        images, labels = getattr(source, split).images, getattr(source, split).labels
        assert images.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert np.array_equal(images.permute(0, 2, 3, 1).numpy(), arrays[f"{split}_images"])
        assert np.array_equal(labels.numpy(), arrays[f"{split}_labels"])
    assert len(source.classes) == classes
    assert len(source.mean) == len(source.std) == 3


def write_tar(path, images, labels, format="WEBP"):
    """Sheets of 10 x 10 images and a list of labels, in no particular order."""
    sheets = images.reshape(-1, 10, 10, 32, 32, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 320, 320, 3)
    members = {"labels.txt": "\n".join(map(str, labels)).encode()}
    for number, sheet in reversed(list(enumerate(sheets))):
        buffer = io.BytesIO()
        Image.fromarray(sheet).save(buffer, format, lossless=True)
        members[f"{number:04}.webp"] = buffer.getvalue()
    write_members(path, members)


def write_members(path, members):
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_tars(folder, arrays):
    images, labels = arrays["train_images"], arrays["train_labels"]
    write_tar(folder / "cifar10-train-a.tar", images[:100], labels[:100])
    write_tar(folder / "cifar10-train-b.tar", images[100:], labels[100:])
    write_tar(folder / "cifar10-test.tar", arrays["test_images"], arrays["test_labels"])


def write_batches(folder, arrays, monkeypatch, name="CIFAR10", label_key="labels"):
    """torchvision's layout, with one file per split, whose md5 torchvision is made to expect."""
    known = getattr(torchvision.datasets, name)
    (folder / known.base_folder).mkdir(parents=True)
    for split in ("train", "test"):
        rows = arrays[f"{split}_images"].transpose(0, 3, 1, 2).reshape(-1, 3072)
        data = pickle.dumps({"data": rows, label_key: arrays[f"{split}_labels"].tolist()}, protocol=4)
        (folder / known.base_folder / split).write_bytes(data)
        monkeypatch.setattr(known, f"{split}_list", [[split, hashlib.md5(data).hexdigest()]])
    return folder / known.base_folder


class Planted:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", ["cifar10.npz", "cifar10/cifar10.npz"])
def test_cifar_is_read_from_an_archive(place, small_cifar, tmp_path):
    (tmp_path / place).parent.mkdir(exist_ok=True)
    np.savez(tmp_path / place, **small_cifar)
    assert_same_cifar(read_cifar("cifar10", tmp_path), small_cifar)


@pytest.mark.parametrize("place", ["", "cifar10"])
def test_cifar_is_read_from_packed_sheets(place, small_cifar, tmp_path):
    (tmp_path / place).mkdir(exist_ok=True)
    write_tars(tmp_path / place, small_cifar)
    before = sorted(tmp_path.rglob("*"))
    assert_same_cifar(read_cifar("cifar10", tmp_path), small_cifar)
    assert sorted(tmp_path.rglob("*")) == before


def test_cifar10_is_read_from_the_original_batches(small_cifar, tmp_path, monkeypatch):
    write_batches(tmp_path, small_cifar, monkeypatch)
    assert_same_cifar(read_cifar("cifar10", tmp_path), small_cifar)


def test_cifar100_is_read_from_the_original_batches(small_cifar, tmp_path, monkeypatch):
    small_cifar["train_labels"] = np.arange(200) % 100
    write_batches(tmp_path / "cifar100", small_cifar, monkeypatch, "CIFAR100", "fine_labels")
    source = read_cifar("cifar100", tmp_path)
    assert_same_cifar(source, small_cifar, classes=100)
    assert source.classes[0] == "apple"
    assert source.classes[99] == "worm"


def test_an_archive_goes_before_other_forms(small_cifar, tmp_path, monkeypatch):
    write_batches(tmp_path, {**small_cifar, "train_images": small_cifar["train_images"] * 0}, monkeypatch)
    np.savez(tmp_path / "cifar10.npz", **small_cifar)
    assert_same_cifar(read_cifar("cifar10", tmp_path), small_cifar)


def test_a_missing_data_set_says_what_was_looked_for_and_how_to_get_it(tmp_path):
    with pytest.raises(DataError) as raised:
        read_cifar("cifar10", tmp_path)
    for part in (
        str(tmp_path),
        "cifar10/cifar10.npz",
        "cifar10-train-a.tar",
        "cifar-10-batches-py",
        "torchvision.datasets.CIFAR10",
    ):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": np.zeros((200, 32, 32, 3), np.float32)}, r"\(train\): expected images uint8 .*float32"),
        ({"test_images": np.zeros((99, 32, 32, 3), np.uint8)}, r"\(test\).*\(100, 32, 32, 3\), found .*\(99,"),
        ({"train_labels": np.arange(200)}, "expected labels 0 to 9, found 0 to 199"),
        ({"train_labels": np.arange(200) - 1}, "found -1 to"),
        ({"train_labels": np.zeros(199, int)}, r"expected 200 whole numbers .*\(199,\)"),
        ({"test_labels": np.zeros(100)}, "whole numbers as labels, found float64"),
        ({"test_labels": None}, "lacks test_labels: it has train_images"),
    ],
)
def test_an_archive_with_the_wrong_contents_is_refused(change, message, small_cifar, tmp_path):
    arrays = {key: value for key, value in {**small_cifar, **change}.items() if value is not None}
    np.savez(tmp_path / "cifar10.npz", **arrays)
    with pytest.raises(DataError, match=message) as raised:
        read_cifar("cifar10", tmp_path)
    assert "cifar10.npz" in str(raised.value)


def test_the_full_number_of_images_is_expected(tmp_path):
    empty = {f"{split}_{what}": np.zeros(0, np.uint8) for split in ("train", "test") for what in ("images", "labels")}
    np.savez(tmp_path / "cifar10.npz", **empty)
    with pytest.raises(DataError, match=r"\(50000, 32, 32, 3\)"):
        read_cifar("cifar10", tmp_path)


def test_a_cut_off_archive_is_refused(small_cifar, tmp_path):
    path = tmp_path / "cifar10.npz"
    np.savez(path, **small_cifar)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match=r"cifar10\.npz cannot be read"):
        read_cifar("cifar10", tmp_path)


def test_an_archive_of_objects_is_never_unpickled(small_cifar, tmp_path):
    trap = np.array([Planted(tmp_path / "trap")], dtype=object)
    np.savez(tmp_path / "cifar10.npz", **{**small_cifar, "test_labels": trap})
    with pytest.raises(DataError, match=r"cifar10\.npz cannot be read"):
        read_cifar("cifar10", tmp_path)
    (tmp_path / "cifar10.npz").write_bytes(pickle.dumps(Planted(tmp_path / "trap")))
    with pytest.raises(DataError, match=r"cifar10\.npz cannot be read"):
        read_cifar("cifar10", tmp_path)
    assert not (tmp_path / "trap").exists()


def test_a_single_array_is_not_an_archive(tmp_path):
    with open(tmp_path / "cifar10.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="a single array"):
        read_cifar("cifar10", tmp_path)


def test_damaged_sheets_are_refused(small_cifar, tmp_path):
    write_tars(tmp_path, small_cifar)
    path = tmp_path / "cifar10-train-b.tar"
    whole = path.read_bytes()

    def refused(message):
        with pytest.raises(DataError, match=message) as raised:
            read_cifar("cifar10", tmp_path)
        assert "cifar10-" in str(raised.value)

    path.write_bytes(whole[: len(whole) // 2])
    refused(r"cifar10-train-b\.tar")
    path.write_bytes(b"no tar at all")
    refused(r"cifar10-train-b\.tar cannot be read")
    path.unlink()
    refused(r"cifar10-train-b\.tar cannot be read")
    write_members(path, {"labels.txt": b"1 2 3"})
    refused(r"lacks images")
    write_members(path, {"0000.webp": b"no image"})
    refused(r"lacks labels\.txt")
    write_members(path, {"labels.txt": b"1 2 three", "0000.webp": b""})
    refused(r"cifar10-train-b\.tar cannot be read")
    write_members(path, {"labels.txt": b"1 2 3", "0000.webp": b"no image"})
    refused(r"cifar10-train-b\.tar cannot be read")
    small = io.BytesIO()
    Image.new("RGB", (32, 32)).save(small, "WEBP")
    write_members(path, {"labels.txt": b"1 2 3", "0000.webp": small.getvalue()})
    refused(r"0000\.webp: expected a sheet of 320x320 pixels, found \(32, 32\)")
    write_tar(path, small_cifar["train_images"][100:], small_cifar["train_labels"][100:199])
    refused(r"expected 200 whole numbers as labels, found int64 \(199,\)")


def test_a_batch_with_another_md5_is_never_unpickled(small_cifar, tmp_path, monkeypatch):
    batches = write_batches(tmp_path, small_cifar, monkeypatch)
    trap = tmp_path / "trap"
    (batches / "test").write_bytes(pickle.dumps(Planted(trap)))
    with pytest.raises(DataError, match=r"test is not the original file: expected md5 .*, found"):
        read_cifar("cifar10", tmp_path)
    assert not trap.exists()
    pickle.loads((batches / "test").read_bytes())
    assert trap.exists()  # so it would have


def test_even_a_batch_with_a_forged_md5_runs_nothing(small_cifar, tmp_path, monkeypatch):
    batches = write_batches(tmp_path, small_cifar, monkeypatch)
    trap = tmp_path / "trap"
    data = pickle.dumps({"data": Planted(trap)})
    (batches / "train").write_bytes(data)
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", [["train", hashlib.md5(data).hexdigest()]])
    with pytest.raises(DataError, match=r"refused to load posix\.mkdir"):
        read_cifar("cifar10", tmp_path)
    assert not trap.exists()


def test_a_missing_batch_is_named(small_cifar, tmp_path, monkeypatch):
    batches = write_batches(tmp_path, small_cifar, monkeypatch)
    (batches / "test").unlink()
    with pytest.raises(DataError, match=r"cifar-10-batches-py/test cannot be read"):
        read_cifar("cifar10", tmp_path)


@pytest.mark.parametrize("package", ["PIL.Image", "torchvision.datasets"])
def test_a_package_that_is_not_installed_is_no_damage_of_the_data(package, small_cifar, tmp_path, monkeypatch):
    if package == "PIL.Image":
        write_tars(tmp_path, small_cifar)
    else:
        write_batches(tmp_path, small_cifar, monkeypatch)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=r'pip install "\.\[train\]"'):
        read_cifar("cifar10", tmp_path)
