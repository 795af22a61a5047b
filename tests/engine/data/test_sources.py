"""Every form of every data set, and what is said when it is missing or damaged."""

import hashlib
import io
import os
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.transforms import v2

from dyrep.engine.data import (
    DataError,
    ImageArrays,
    ImageFiles,
    hold_out,
    load_files,
    read_cifar,
    read_digits,
    read_folder,
)
from dyrep.engine.data.reading import fit, needed


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


# --------------------------------------------------------------------------------------------- digits


def test_digits_are_those_of_scikit_learn_up_to_rounding_each_once():
    source, given = read_digits(), load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    splits = (source.train, order[:1437]), (source.test, order[1437:])
    for split, chosen in splits:
        assert split.images.shape == (len(chosen), 1, 8, 8)
        theirs = torch.tensor(given.images)[chosen]
        assert (split.images[:, 0] / 255 * 16 - theirs).abs().max() <= 16 / 255 / 2 + 1e-6
        assert torch.equal(split.labels, torch.tensor(given.target)[chosen])
    assert source.classes == tuple("0123456789")


# --------------------------------------------------------------------------------------------- CIFAR


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


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(DataError, match="pip install some-package"):
        needed("a_module_nobody_has", "some-package")


# --------------------------------------------------------------------------------------------- folders


def names(files):
    return [os.path.basename(path) for path in files.paths]


def test_a_folder_per_class_is_listed(image_folder):
    root = image_folder(train=2, val=1)
    (root / "train" / "ant" / "UPPER.JPEG").touch()
    (root / "train" / "ant" / "deeper").mkdir()
    (root / "train" / "ant" / "deeper" / "x.webp").touch()
    (root / "train" / "ant" / "notes.txt").touch()
    (root / "train" / "ant" / "._0.png").touch()
    (root / "train" / ".cache").mkdir()
    source = read_folder(root)
    assert source.classes == ("ant", "bee", "cow")
    assert names(source.train) == ["0.png", "1.png", "UPPER.JPEG", "x.webp", "0.png", "1.png", "0.png", "1.png"]
    assert source.train.labels.tolist() == [0] * 4 + [1] * 2 + [2] * 2
    assert source.test.labels.tolist() == [0, 1, 2]
    assert source.mean == (0.485, 0.456, 0.406)


def test_the_test_folder_serves_where_there_is_no_val(image_folder):
    root = image_folder()
    (root / "val").rename(root / "test")
    assert len(read_folder(root).test.paths) == 6


def test_a_class_without_validation_images_keeps_the_labels_of_the_others(image_folder):
    root = image_folder(val=1)
    shutil.rmtree(root / "val" / "bee")
    assert read_folder(root).test.labels.tolist() == [0, 2]


def as_published(root):
    """Tiny-ImageNet's own layout: train/CLASS/images and a flat val/images with a list."""
    lines = []
    flat = root / "val" / "images"
    flat.mkdir()
    for folder in sorted((root / "train").iterdir()):
        files = sorted(folder.iterdir())
        (folder / "images").mkdir()
        for path in files:
            path.rename(folder / "images" / path.name)
    for number, title in enumerate(("cow", "ant", "bee")):
        (root / "val" / title / "0.png").rename(flat / f"val_{number}.png")
        shutil.rmtree(root / "val" / title)
        lines.append(f"val_{number}.png\t{title}\t0\t0\t7\t7\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


def test_tiny_imagenet_is_read_as_it_is_published(image_folder):
    source = read_folder(as_published(image_folder(train=2, val=1)))
    assert source.classes == ("ant", "bee", "cow")
    assert source.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert names(source.test) == ["val_1.png", "val_2.png", "val_0.png"]
    assert source.test.labels.tolist() == [0, 1, 2]
    assert all(Path(path).is_file() for path in source.train.paths + source.test.paths)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("val_1.png", "val_9.png", "line 2: expected an image"),
        ("val_1.png\tant\t0\t0\t7\t7", "val_1.png", r"line 2: expected an image .*found 'val_1\.png'"),
        ("val_1.png", "../x.png", "line 2: expected an image"),
        ("\tant", "\tdog", "class 'dog', which .* has not"),
        ("val_2.png\tbee\t0\t0\t7\t7\n", "", "does not mention val_2.png and 0 other"),
    ],
)
def test_a_wrong_list_of_validation_images_is_refused(old, new, message, image_folder):
    root = as_published(image_folder(val=1))
    path = root / "val" / "val_annotations.txt"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=message):
        read_folder(root)


def test_folders_that_are_missing_or_empty_are_named(image_folder, tmp_path):
    root = image_folder()
    with pytest.raises(DataError, match=r"nowhere has no folder val or test: expected train/CLASS"):
        read_folder(tmp_path / "nowhere")
    (root / "val" / "dog").mkdir()
    with pytest.raises(DataError, match=r"dog has no images"):
        read_folder(root)
    (root / "val" / "dog" / "0.png").touch()
    with pytest.raises(DataError, match=r"has the class 'dog', which .*train has not"):
        read_folder(root)
    (root / "train" / "dog").mkdir()
    with pytest.raises(DataError, match=r"train/dog has no images \(.jpg"):
        read_folder(root)
    shutil.rmtree(root / "train")
    with pytest.raises(DataError, match="has no folder train:"):
        read_folder(root)
    (root / "train").mkdir()
    with pytest.raises(DataError, match="train has no class folders"):
        read_folder(root)


def test_files_are_decoded_as_they_are_if_their_size_is_right(image_folder):
    files = read_folder(image_folder()).train
    arrays = load_files(files, 8, jobs=2)
    expected = np.stack([np.asarray(Image.open(path)) for path in files.paths])
    assert np.array_equal(arrays.images.permute(0, 2, 3, 1).numpy(), expected)
    assert torch.equal(arrays.labels, files.labels)


@pytest.mark.parametrize("size", [(40, 30), (30, 41), (8, 8), (10, 8)])
def test_fitting_does_what_torchvision_does(size):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    for resize, crop in ((16, 16), (18, 16), (8, 8)):
        expected = v2.Compose([v2.Resize(resize), v2.CenterCrop(crop)])(image)
        assert np.array_equal(np.asarray(fit(image, resize, crop)), np.asarray(expected))


def test_grey_images_become_coloured(tmp_path):
    Image.new("L", (8, 8), 7).save(tmp_path / "grey.png")
    arrays = load_files(ImageFiles((str(tmp_path / "grey.png"),), torch.tensor([0])), 8)
    assert arrays.images.unique().tolist() == [7]
    assert arrays.images.shape == (1, 3, 8, 8)


@pytest.mark.parametrize("damage", ["cut off", "no image", "gone"])
def test_a_file_that_cannot_be_decoded_is_named(damage, image_folder):
    root = image_folder(size=(64, 64))
    path = root / "train" / "bee" / "2.png"
    data = path.read_bytes()
    path.unlink()
    if damage != "gone":
        path.write_bytes(data[:2000] if damage == "cut off" else b"no image")
    files = ImageFiles((str(root / "train" / "bee" / "1.png"), str(path)), torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"bee/2\.png cannot be decoded"):
        load_files(files, 64)


# --------------------------------------------------------------------------------------------- holding out


def numbered(labels):
    """A split whose first pixels say which example it is."""
    labels = torch.as_tensor(labels)
    return ImageArrays(torch.arange(len(labels), dtype=torch.uint8).reshape(-1, 1, 1, 1), labels)


def test_examples_are_held_out_of_every_class_alike():
    split = numbered([0, 1, 2] * 30)
    train, val = hold_out(split, 31)
    assert sorted(torch.bincount(val.labels).tolist()) == [10, 10, 11]
    both = torch.cat([train.images, val.images]).flatten()
    assert both.sort().values.tolist() == list(range(90))
    for part in (train, val):
        index = part.images.flatten().long()
        assert torch.equal(index, index.sort().values)
        assert torch.equal(part.labels, split.labels[index])


def test_unequal_classes_are_held_out_in_proportion():
    train, val = hold_out(numbered([0] * 60 + [1] * 30 + [3] * 10), 10)
    assert torch.bincount(val.labels).tolist() == [6, 3, 0, 1]
    assert torch.bincount(train.labels).tolist() == [54, 27, 0, 9]


def test_what_is_held_out_depends_on_its_own_seed_alone():
    split = numbered([0, 1] * 50)
    torch.manual_seed(1)
    first = hold_out(split, 20)[1].images
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert torch.equal(hold_out(split, 20)[1].images, first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(hold_out(split, 20, seed=1)[1].images, first)


def test_files_and_arrays_are_held_out_alike():
    labels = torch.arange(40) % 4
    files = ImageFiles(tuple(str(index) for index in range(40)), labels)
    for ours, theirs in zip(hold_out(files, 8), hold_out(numbered(labels), 8), strict=True):
        assert [int(path) for path in ours.paths] == theirs.images.flatten().tolist()
        assert torch.equal(ours.labels, theirs.labels)


@pytest.mark.parametrize("count", [-1, 0, 40, 41])
def test_impossible_numbers_to_hold_out_are_refused(count):
    with pytest.raises(DataError, match=f"cannot hold out {count} of 40 examples: give a number from 1 to 39"):
        hold_out(numbered([0, 1] * 20), count)


def test_no_class_is_held_out_entirely():
    with pytest.raises(DataError, match="class 1, which has 1, would be left without any"):
        hold_out(numbered([0] * 9 + [1]), 9)
