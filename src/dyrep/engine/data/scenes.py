"""Drawn pictures of discs and squares, to try detection and segmentation without any data at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dyrep.extras import needed

CLASSES = ("disc", "square")
COUNTS = {"train": 8, "val": 2, "test": 4}
_COLOURS = ((230, 40, 40), (40, 60, 230))
Box = tuple[str, tuple[int, int, int, int]]


def draw_scene(random: np.random.Generator, width: int, height: int) -> tuple[np.ndarray, np.ndarray, list[Box]]:
    """One picture: pixels, a map of labels (0 is the ground), and a box around either thing.

    Example:
        >>> pixels, labels, boxes = draw_scene(np.random.default_rng(0), 64, 48)
        >>> pixels.shape, np.unique(labels).tolist(), [name for name, _ in boxes]
        ((48, 64, 3), [0, 1, 2], ['disc', 'square'])
    """
    pixels = random.integers(0, 60, (height, width, 3)).astype(np.uint8)
    labels = np.zeros((height, width), np.uint8)
    rows, columns = np.mgrid[:height, :width]
    boxes: list[Box] = []
    half = width // 2
    for number, name in enumerate(CLASSES):  # one in either half, so that none hides the other
        side = int(random.integers(height // 4, min(half, height) - 4))
        left = number * half + int(random.integers(0, half - side))
        top = int(random.integers(0, height - side))
        inside = (columns >= left) & (columns < left + side) & (rows >= top) & (rows < top + side)
        if name == "disc":
            middle = (side - 1) / 2
            inside &= (columns - left - middle) ** 2 + (rows - top - middle) ** 2 <= (side / 2) ** 2
        pixels[inside], labels[inside] = _COLOURS[number], number + 1
        boxes.append((name, (left, top, left + side, top + side)))
    return pixels, labels, boxes


def write_box_scenes(folder: Path, counts: dict[str, int] = COUNTS, size: tuple[int, int] = (64, 48)) -> Path:
    """A data set for detection, in the layout of Pascal VOC (``--dataset voc``)."""
    random = np.random.default_rng(0)
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for split, count in counts.items():
        stems = [f"{split}{number}" for number in range(count)]
        for stem in stems:
            pixels, _, boxes = draw_scene(random, *size)
            _save(pixels, folder / "JPEGImages" / f"{stem}.png")
            (folder / "Annotations" / f"{stem}.xml").write_text(_annotation(size, boxes), encoding="utf-8")
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(stems) + "\n", encoding="utf-8")
    return folder


def write_mask_scenes(folder: Path, counts: dict[str, int] = COUNTS, size: tuple[int, int] = (64, 48)) -> Path:
    """A data set for segmentation, in folders (``--dataset masks``)."""
    random = np.random.default_rng(0)
    for split, count in counts.items():
        for part in ("images", "labels"):
            (folder / split / part).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels, labels, _ = draw_scene(random, *size)
            _save(pixels, folder / split / "images" / f"{number}.png")
            _save(labels, folder / split / "labels" / f"{number}.png")
    return folder


def write_class_scenes(folder: Path, count: int = 8, side: int = 32) -> Path:
    """A data set for classification, a folder per class (``--dataset folder``): which thing is it?"""
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for place, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                pixels, _, _ = draw_scene(random, 2 * side, side)
                _save(pixels[:, place * side : (place + 1) * side], folder / split / name / f"{number}.png")
    return folder


def _save(pixels: np.ndarray, path: Path) -> None:
    needed("PIL.Image", "drawing scenes").fromarray(pixels).save(path)


def _annotation(size: tuple[int, int], boxes: list[Box]) -> str:
    sides = ("xmin", "ymin", "xmax", "ymax")
    things = "".join(
        f"<object><name>{name}</name><bndbox>"
        + "".join(f"<{side}>{value}</{side}>" for side, value in zip(sides, box, strict=True))
        + "</bndbox></object>"
        for name, box in boxes
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{things}</annotation>"
