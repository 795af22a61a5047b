"""Folders of images, and what is said when they are missing or damaged."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from dyrep.engine.data import ImageFiles, load_files, read_folder
from dyrep.engine.data.reading import fit
from dyrep.errors import DataError


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
