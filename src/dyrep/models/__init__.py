"""Models to train: plain chains of our own, and any other by name.

>>> from dyrep.models import build
>>> model = build("repvgg_a0", num_classes=10)
"""

from dyrep.models.chain import fold_norms
from dyrep.models.detection import DETECTORS, build_detector
from dyrep.models.mobilenet import mobilenet_v1
from dyrep.models.registry import build, names
from dyrep.models.repvgg import (
    from_timm_deployed,
    repvgg_a0,
    repvgg_a1,
    repvgg_a2,
    repvgg_b0,
    repvgg_b1,
    repvgg_b1g2,
    repvgg_b1g4,
    repvgg_b2,
    repvgg_b2g2,
    repvgg_b2g4,
    repvgg_b3,
    repvgg_b3g2,
    repvgg_b3g4,
)
from dyrep.models.segmentation import SEGMENTERS, build_segmenter
from dyrep.models.vgg import small_vgg, vgg16

__all__ = [
    "DETECTORS",
    "SEGMENTERS",
    "build",
    "build_detector",
    "build_segmenter",
    "fold_norms",
    "from_timm_deployed",
    "mobilenet_v1",
    "names",
    "repvgg_a0",
    "repvgg_a1",
    "repvgg_a2",
    "repvgg_b0",
    "repvgg_b1",
    "repvgg_b1g2",
    "repvgg_b1g4",
    "repvgg_b2",
    "repvgg_b2g2",
    "repvgg_b2g4",
    "repvgg_b3",
    "repvgg_b3g2",
    "repvgg_b3g4",
    "small_vgg",
    "vgg16",
]
