"""Small generated data sets for detection and segmentation, and a detector that trains on them in moments."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

COUNTS = {"train": 8, "val": 3, "test": 4}
CLASSES = ("disc", "square")

TINY_MODELS = '''
"""Networks that take no time."""

from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import FrozenBatchNorm2d, MultiScaleRoIAlign


def body(norm):
    layers = []
    for channels, out in ((3, 8), (8, 8), (8, 12)):
        layers += [nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), norm(out), nn.ReLU()]
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 12
    return backbone


def detector(num_classes, norm=nn.BatchNorm2d):
    return FasterRCNN(
        body(norm),
        num_classes=None,
        rpn_anchor_generator=AnchorGenerator(((12, 24),), ((1.0,),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 4, 2),
        box_head=TwoMLPHead(12 * 16, 16),
        box_predictor=FastRCNNPredictor(16, num_classes),
        min_size=48,
        max_size=96,
        rpn_pre_nms_top_n_train=40,
        rpn_post_nms_top_n_train=20,
        rpn_pre_nms_top_n_test=40,
        rpn_post_nms_top_n_test=20,
        rpn_batch_size_per_image=16,
        box_batch_size_per_image=8,
    )


def frozen_detector(num_classes):
    return detector(num_classes, FrozenBatchNorm2d)


def segmenter(num_classes):
    backbone = body(nn.BatchNorm2d)
    head = nn.Conv2d(12, num_classes, 3, padding=1)
    return nn.Sequential(backbone, nn.Dropout(0.1), head, nn.Upsample(scale_factor=8, mode="bilinear"))
'''


def write_models(folder: Path) -> None:
    (folder / "tiny_models.py").write_text(TINY_MODELS)


def scene(
    generator: torch.Generator, size: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, list[tuple[str, list[int]]]]:
    """Pixels, label map (0 background, 1 disc, 2 square) and boxes of a random picture."""
    width, height = size
    pixels = torch.randint(0, 60, (height, width, 3), generator=generator).numpy().astype(np.uint8)
    labels = np.zeros((height, width), np.uint8)
    boxes: list[tuple[str, list[int]]] = []
    rows, columns = np.mgrid[:height, :width]
    for number, name in enumerate(CLASSES):
        side = int(torch.randint(14, 22, (), generator=generator))
        left = int(torch.randint(0, width - side, (), generator=generator))
        top = int(torch.randint(0, height - side, (), generator=generator))
        inside = (columns >= left) & (columns < left + side) & (rows >= top) & (rows < top + side)
        if name == "disc":
            middle = side / 2
            inside &= (columns - left - middle) ** 2 + (rows - top - middle) ** 2 < middle**2
        pixels[inside] = ((230, 40, 40), (40, 60, 230))[number]
        labels[inside] = number + 1
        boxes.append((name, [left, top, left + side, top + side]))
    return pixels, labels, boxes


def sizes(count: int, vary: bool) -> list[tuple[int, int]]:
    return [(64 + 8 * (i % 3) * vary, 48 + 8 * (i % 2) * vary) for i in range(count)]


def write_voc(folder: Path, *, vary: bool = True, splits: dict[str, int] = COUNTS) -> Path:
    """A data set in the layout of Pascal VOC, with images of different sizes."""
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for split, count in splits.items():
        stems = []
        for number, size in enumerate(sizes(count, vary)):
            pixels, _, boxes = scene(generator, size)
            stems.append(f"{split}_{number}")
            Image.fromarray(pixels).save(folder / "JPEGImages" / f"{stems[-1]}.jpg", quality=95)
            (folder / "Annotations" / f"{stems[-1]}.xml").write_text(annotation(size, boxes))
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(stems) + "\n")
    return folder


def annotation(size: tuple[int, int], boxes: list[tuple[str, list[int]]], difficult: int = 0) -> str:
    objects = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
        f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        for name, (x1, y1, x2, y2) in boxes
    )
    return f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height></size>{objects}</annotation>"


def write_coco(folder: Path, splits: tuple[str, ...] = ("train", "val")) -> Path:
    """A data set in COCO's format, whose categories have numbers with gaps."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    numbers = {"disc": 3, "square": 17}
    for split in splits:
        (folder / f"{split}2017").mkdir(exist_ok=True)
        images, annotations = [], []
        for number, size in enumerate(sizes(COUNTS[split], True)):
            pixels, _, boxes = scene(generator, size)
            name = f"{number:06d}.png"
            Image.fromarray(pixels).save(folder / f"{split}2017" / name)
            images.append({"id": number, "file_name": name, "width": size[0], "height": size[1]})
            for kind, (x1, y1, x2, y2) in boxes:
                annotations.append(
                    {
                        "id": len(annotations),
                        "image_id": number,
                        "category_id": numbers[kind],
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "iscrowd": 0,
                    }
                )
        categories = [{"id": number, "name": name} for name, number in numbers.items()]
        data = {"images": images, "annotations": annotations, "categories": categories}
        (folder / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(data))
    return folder


def write_masks(folder: Path, *, vary: bool = False, listed: bool = True, ignored: int = 255) -> Path:
    """Images and label maps, in CamVid's layout with lists, or in folders; a stripe at the left does not count."""
    generator = torch.Generator().manual_seed(0)
    for split, count in COUNTS.items():
        images, labels = (split, f"{split}annot") if listed else (f"{split}/images", f"{split}/labels")
        lines = []
        for part in (images, labels):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for number, size in enumerate(sizes(count, vary)):
            pixels, found, _ = scene(generator, size)
            found[:, :2] = ignored
            Image.fromarray(pixels).save(folder / images / f"{number}.png")
            Image.fromarray(found).save(folder / labels / f"{number}.png")
            lines.append(f"{images}/{number}.png {labels}/{number}.png")
        if listed:
            (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def detection_batch(shapes: tuple[tuple[int, int], ...] = ((48, 64), (56, 72)), seed: int = 0):
    """A batch of images of different sizes with one box each."""
    generator = torch.Generator().manual_seed(seed)
    images = [torch.rand(3, *shape, generator=generator) for shape in shapes]
    target = {"boxes": torch.tensor([[8.0, 8.0, 30.0, 30.0]]), "labels": torch.tensor([1])}
    return images, [dict(target) for _ in images]


def randomise_norms_(model: nn.Module) -> None:
    """Give norms values as a trained network has them, those that are frozen too."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if hasattr(module, "running_var"):
            count = len(module.running_var)
            module.running_mean.copy_(0.1 * torch.randn(count, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(count, generator=generator))
            with torch.no_grad():
                module.weight.copy_(0.5 + torch.rand(count, generator=generator))
                module.bias.copy_(0.1 * torch.randn(count, generator=generator))
