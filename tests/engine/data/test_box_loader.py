"""Batches for detectors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from loading_helpers import CPU, take_loading
from PIL import Image

from downstream_data import COUNTS, annotation, write_coco, write_voc
from dyrep.engine.data import Loading
from dyrep.engine.data.detection import BoxLoader, open_detection
from dyrep.engine.data.splits import divided
from dyrep.engine.data.voc import read_voc
from dyrep.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def voc(tmp_path_factory):
    return write_voc(tmp_path_factory.mktemp("voc"))


def opened(folder, dataset="voc", **changes):
    usual = {"size": None, "batch_size": 2, "flip": True, "val_split": 0, **changes}
    loading = take_loading(usual)
    return open_detection(dataset, folder, loading, **usual)


def batches(loader, epoch=0, start=0):
    return [loader.prepare(raw) for raw in loader.batches(epoch, start)]


def same(ours, theirs):
    return all(
        torch.equal(a, b) and all(torch.equal(s[key], t[key]) for key in s)
        for (images, targets), (others, known) in zip(ours, theirs, strict=True)
        for a, b, s, t in zip(images, others, targets, known, strict=True)
    )


def test_images_are_lists_of_any_size_with_values_between_0_and_1(voc):
    data = opened(voc)
    assert (data.train.steps, data.train.examples, data.test.examples) == (4, 8, COUNTS["test"])
    assert (data.size, data.channels, data.classes) == (48, 3, ("disc", "square"))
    images, targets = batches(data.train)[0]
    assert isinstance(images, list)
    assert all(image.dtype == torch.float32 and 0 <= image.min() <= image.max() <= 1 for image in images)
    assert set(targets[0]) == {"boxes", "labels"}
    assert set(batches(data.val)[0][1][0]) == {"boxes", "labels", "iscrowd"}
    assert len({image.shape for batch in batches(data.train) for image in batch[0]}) > 1


def test_what_an_epoch_holds_depends_on_seed_and_epoch_alone(voc):
    data, again = opened(voc), opened(voc, resident=False, workers=2)
    assert same(batches(data.train, 1), batches(again.train, 1))
    assert same(batches(data.train, 1)[2:], batches(data.train, 1, start=2))
    assert not same(batches(data.train, 1), batches(data.train, 2))
    calibration = data.train.calibration(1)
    assert same(list(calibration), list(calibration))
    assert not same(list(calibration), batches(data.train, 1))


def test_ranks_share_the_same_batches(voc):
    whole = batches(opened(voc).train)
    parts = [batches(opened(voc, rank=rank, world=2).train) for rank in range(2)]
    for step, (images, _) in enumerate(whole):
        assert all(torch.equal(images[rank], parts[rank][step][0][0]) for rank in range(2))


def test_flipped_boxes_are_around_the_same_pixels(voc):
    loader = opened(voc).train
    seen = set()
    for raw in loader.batches(0):
        images, targets = loader.prepare(raw)
        for (_, flip), image, target in zip(raw[0].tolist(), images, targets, strict=True):
            seen.add(flip)
            for box, label in zip(target["boxes"].long().tolist(), target["labels"].tolist(), strict=True):
                x1, y1, x2, y2 = box
                middle = image[:, (y1 + y2) // 2, (x1 + x2) // 2]
                if label == 2:  # squares are drawn last, so nothing covers them
                    assert middle.argmax() == 2
    assert seen == {0, 1}


def test_crowds_are_left_out_of_training_and_told_in_evaluation(tmp_path):
    folder = write_voc(tmp_path)
    for split in ("train", "test"):
        (folder / "Annotations" / f"{split}_0.xml").write_text(
            annotation((64, 48), [("disc", [1, 1, 9, 9])], difficult=1)
        )
    source = read_voc(folder)
    train = BoxLoader(source.train, Loading(CPU), batch_size=8, shuffle=True)
    (_, targets), (_, others) = batches(train)[0], batches(BoxLoader(source.test, Loading(CPU), batch_size=4))[0]
    assert sorted(len(target["boxes"]) for target in targets) == [0, *[2] * 7]
    assert others[0]["iscrowd"].tolist() == [True]


def test_images_can_be_held_out_where_there_is_nothing_else_to_look_at(voc, tmp_path):
    coco = write_coco(tmp_path)
    data = opened(coco, "coco", val_split=2)
    assert (data.train.examples, data.val.examples) == (6, 2)
    assert not set(data.train.paths) & set(data.val.paths)
    assert opened(coco, "coco", val_split=0.25, seed=5).val.paths == data.val.paths
    with pytest.raises(ConfigError, match="has a val split of its own"):
        opened(voc, val_split=2)
    for count, message in ((8, "cannot hold out 8 of 8"), (1.5, "must be 0, a share below 1, or a whole number")):
        with pytest.raises(ConfigError, match=message):
            divided(opened_source(coco), count)


def test_what_is_held_out_has_boxes(tmp_path):
    coco = write_coco(tmp_path)
    path = coco / "annotations" / "instances_train2017.json"
    held = opened(coco, "coco", val_split=1).val.paths[0]
    content = json.loads(path.read_text())
    number = next(image["id"] for image in content["images"] if held.endswith(image["file_name"]))
    content["annotations"] = [found for found in content["annotations"] if found["image_id"] != number]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="val_split=1: no image that is held out has a box: hold out another number"):
        opened(coco, "coco", val_split=1)
    assert opened(coco, "coco", val_split=2).val.examples == 2


def opened_source(folder):
    from dyrep.engine.data.coco import read_coco

    return read_coco(folder)


def test_missing_folders_and_damaged_images_are_named(voc, tmp_path):
    with pytest.raises(DataError, match="needs its folder: give --data DIR, with JPEGImages"):
        opened(None)
    folder = write_voc(tmp_path)
    (folder / "JPEGImages" / "train_3.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"train_3.jpg cannot be (read|decoded)"):
        batches(opened(folder).train)


def test_images_in_grey_become_three_channels(tmp_path):
    folder = write_voc(tmp_path)
    Image.fromarray(np.zeros((48, 64), np.uint8)).save(folder / "JPEGImages" / "test_0.jpg")
    assert batches(opened(folder).test)[0][0][0].shape == (3, 48, 64)
