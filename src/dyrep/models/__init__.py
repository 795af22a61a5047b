"""Models to train: plain chains of our own, and any other by name.

>>> from dyrep.models import build
>>> model = build("repvgg_a0", num_classes=10)
"""

from dyrep.models.chain import fold_norms
from dyrep.models.detection import DETECTORS, build_detector
from dyrep.models.mobilenet import mobilenet_v1
from dyrep.models.registry import build, names
from dyrep.models.repvgg import from_timm_deployed, repvgg
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
    "repvgg",
    "small_vgg",
    "vgg16",
]
