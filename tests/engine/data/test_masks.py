"""Images with label maps beside them."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from downstream_data import COUNTS, write_masks
from dyrep.cli.flags import parse_training
from dyrep.engine.data.masks import read_labels, read_masks
from dyrep.engine.recipes import recipe
from dyrep.errors import DataError


@pytest.mark.parametrize("listed", [True, False])
def test_lists_and_folders_give_the_same_pairs(tmp_path, listed):
    folder = write_masks(tmp_path / "data", listed=listed)
    source = read_masks(folder)
    assert (len(source.train), len(source.val), len(source.test)) == (COUNTS["train"], COUNTS["val"], COUNTS["test"])
    assert source.classes == ("0", "1", "2")
    assert source.train.labels[0].endswith("0.png")
    assert len(read_masks(tmp_path).train) == COUNTS["train"]  # one folder further down


def test_folders_may_be_the_other_way_round(tmp_path):
    write_masks(tmp_path / "old", listed=False)
    for split in COUNTS:
        for part, name in (("images", "images"), ("labels", "masks")):
            (tmp_path / "new" / name).mkdir(parents=True, exist_ok=True)
            (tmp_path / "old" / split / part).rename(tmp_path / "new" / name / split)
    assert len(read_masks(tmp_path / "new").test) == COUNTS["test"]


def test_names_of_classes_are_given_or_in_a_file_or_numbers(tmp_path):
    folder = write_masks(tmp_path)
    (folder / "classes.txt").write_text("ground\ndisc\nsquare\n")
    assert read_masks(folder).classes == ("ground", "disc", "square")
    assert read_masks(folder, ("ground", "disc", "square")).classes == ("ground", "disc", "square")
    (folder / "classes.txt").unlink()
    assert read_masks(folder, ("a", "b", "c")).classes == ("a", "b", "c")


def test_names_that_are_not_those_of_the_file_are_refused(tmp_path):
    folder = write_masks(tmp_path)
    (folder / "classes.txt").write_text("ground\ndisc\nsquare\n")
    camvid = recipe("camvid-pspnet")
    with pytest.raises(
        DataError, match=r"classes.txt has the classes ground, disc, square, and the recipe .* says sky"
    ):
        read_masks(folder, camvid.class_names, camvid.ignore_label)
    # the remedy: flags that clear the recipe's names
    chosen, _ = parse_training(["camvid-pspnet", "--class-names", "--ignore-label", "255"])
    assert read_masks(folder, chosen.class_names, chosen.ignore_label).classes == ("ground", "disc", "square")
    (folder / "classes.txt").write_text("\n".join([*camvid.class_names, "unlabelled"]))
    assert read_masks(folder, camvid.class_names, 11).classes == camvid.class_names  # what is ignored may have a name
    (folder / "classes.txt").write_bytes(b"stra\xdfe\n")
    with pytest.raises(DataError, match=r"classes.txt cannot be read \(UnicodeDecodeError"):
        read_masks(folder)


def test_an_ignored_label_between_the_classes_is_no_class(tmp_path):
    folder = write_masks(tmp_path, ignored=0)
    source = read_masks(folder, ignore_label=0)
    assert source.classes == ("1", "2")
    assert read_masks(folder, ("ground", "disc", "square"), ignore_label=0).classes == ("disc", "square")
    raw = np.asarray(Image.open(source.train.labels[0]))
    assert (read_labels(source.train.labels[0], classes=2, ignore_label=0).numpy() == raw).all()
    found = read_labels(source.train.labels[0], classes=2, ignore_label=1).numpy()
    assert [int(found[raw == number].max()) for number in range(3)] == [1, 0, 2]
    with pytest.raises(DataError, match=r"has the label 2, and there are 1 classes \(0 to 1\)"):
        read_labels(source.train.labels[0], classes=1, ignore_label=0)


def replaced(folder, numbers):
    """Give labels other numbers in all maps."""
    for path in folder.glob("*annot/*.png"):
        Image.fromarray(np.array(numbers, np.uint8)[np.asarray(Image.open(path)).clip(max=3)]).save(path)


@pytest.mark.parametrize("names", [(), ("ground", "thing")])
def test_masks_of_one_class_are_refused_with_a_remedy_that_works(tmp_path, names):
    folder = write_masks(tmp_path)
    replaced(folder, [0, 255, 255, 255])
    message = r"hold one class only \(0\) and the ignored label 255: nothing .* if 255 is a class, write it as 1 in the"
    with pytest.raises(DataError, match=message):
        read_masks(folder, names)
    replaced(folder, [0, 1, 1, 1])
    assert len(read_masks(folder, names).classes) == 2
    message = (
        r"hold one class only \(1\) and the ignored label 0: .* if 0 is a class, give another --ignore-label, say 255"
    )
    with pytest.raises(DataError, match=message):
        read_masks(folder, names, ignore_label=0)
    replaced(folder, [0, 0, 0, 0])
    with pytest.raises(DataError, match=r"hold one class only \(0\): nothing to tell apart$"):
        read_masks(folder, names)


def test_lists_from_elsewhere_are_followed_by_the_ends_of_their_paths(tmp_path):
    folder = write_masks(tmp_path)
    known = read_masks(folder)
    lines = (folder / "train.txt").read_text().split()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    (folder / "train.txt").write_text(
        "\n".join(f"/SegNet/CamVid/{image} /SegNet/CamVid/{label}" for image, label in pairs)
    )
    assert read_masks(folder).train == known.train
    (folder / "train.txt").write_text("/SegNet/CamVid/train/99.png /SegNet/CamVid/trainannot/0.png")
    with pytest.raises(DataError, match=r"train.txt, line 1: /SegNet/CamVid/train/99.png is missing"):
        read_masks(folder)


def test_labels_are_shifted_so_that_zero_does_not_count(tmp_path):
    folder = write_masks(tmp_path, ignored=7)
    raw = np.asarray(Image.open(folder / "trainannot" / "0.png"))
    found = read_labels(str(folder / "trainannot" / "0.png"), classes=3, ignore_label=7).numpy()
    assert (found[raw == 7] == 0).all()
    assert (found[raw != 7] == raw[raw != 7] + 1).all()


def test_labels_out_of_range_are_named_with_the_remedy(tmp_path):
    path = str(write_masks(tmp_path) / "trainannot" / "0.png")
    with pytest.raises(DataError, match=r"0.png has the label 2, and there are 2 classes \(0 to 1\) .*--class-names"):
        read_labels(path, classes=2, ignore_label=255)
    with pytest.raises(DataError, match="has the label 255, and there are 3 classes"):
        read_labels(path, classes=3, ignore_label=7)
    with pytest.raises(DataError, match="have the label 255: give the one that does not count with --ignore-label"):
        read_masks(tmp_path, ignore_label=7)


def test_label_maps_in_colours_are_refused_and_palettes_are_not(tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "colours.png")
    with pytest.raises(DataError, match=r"colours.png is a picture in colours \(mode RGB\)"):
        read_labels(str(tmp_path / "colours.png"), 3, 255)
    palette = Image.fromarray(np.full((4, 4), 2, np.uint8), mode="P")
    palette.putpalette(list(range(256)) * 3)
    palette.save(tmp_path / "palette.png")
    assert read_labels(str(tmp_path / "palette.png"), 3, 255).unique().tolist() == [3]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "valannot" / "1.png").unlink(), r"val.txt, line 2: .*valannot/1.png is missing"),
        (lambda f: (f / "val.txt").write_text("val/0.png\n"), r"val.txt, line 1: expected an image and its label map"),
        (lambda f: (f / "val.txt").write_text("\n"), "val.txt lists no images"),
        (lambda f: (f / "train.txt").write_text(""), "train.txt lists no images"),
    ],
)
def test_what_is_wrong_with_lists_is_named(tmp_path, spoil, message):
    folder = write_masks(tmp_path)
    spoil(folder)
    with pytest.raises(DataError, match=message):
        read_masks(folder)


def test_what_is_missing_in_folders_is_named(tmp_path):
    folder = write_masks(tmp_path / "data", listed=False)
    (folder / "val" / "labels" / "1.png").unlink()
    with pytest.raises(DataError, match=r"the label map of 1.png is missing: looked in .*val/labels"):
        read_masks(folder)
    with pytest.raises(DataError, match=r"has no images with label maps: expected train.txt"):
        read_masks(folder / "test" / "images")
