"""Every training setting of the paper, its downstream tasks on smaller data, and a small one to try things with.

What the paper leaves open: CIFAR is trained with cutout of 16 pixels, as in the published code; colour jitter is 0.4
for brightness, contrast and saturation, and none for MobileNet, as in DBB's code; the learning rate has no warm-up and
falls with every step; weight decay acts on all parameters. Which network is trained for 300 epochs is not said: here
RepVGG-B3 is, beside its 200.
"""

from __future__ import annotations

from dataclasses import replace

from dyrep.config import DyRepConfig
from dyrep.engine.recipe import Recipe
from dyrep.errors import ConfigError

DIGITS = Recipe(
    name="digits",
    model="small_vgg",
    dataset="digits",
    epochs=24,
    batch_size=32,
    # in so short a run γ hardly moves, so branches are told apart by a smaller λ than the paper's 0.02
    dyrep=DyRepConfig.paper(interval=3, score="invariant", cut_threshold=0.002),
)

CIFAR = Recipe(
    name="cifar10-vgg16",
    model="vgg16",
    dataset="cifar10",
    image_size=32,
    epochs=600,
    batch_size=128,
    lr=0.1,
    weight_decay=1e-4,
    crop="pad",
    flip=True,
    cutout=16,
    dyrep=DyRepConfig.paper(interval=15),
)

IMAGENET = Recipe(
    name="imagenet-resnet18",
    model="resnet18",
    dataset="folder",
    image_size=224,
    epochs=120,
    batch_size=256,
    lr=0.1,
    weight_decay=1e-4,
    crop="resized",
    flip=True,
    color_jitter=0.4,
    dyrep=DyRepConfig.paper(interval=5),
)

REPVGG = replace(IMAGENET, epochs=200, color_jitter=0.0, auto_augment=True, label_smoothing=0.1)

TINY_IMAGENET = replace(
    IMAGENET, name="tiny-imagenet-resnet18", image_size=64, crop="pad", crop_padding=8, color_jitter=0.0
)

# Detection and segmentation as in the paper, FPN and PSPNet, on data that is small enough for a short run. The paper
# says nothing about their schedules, nor which parts may grow: here it is what a pretrained backbone gives to a task.
# Some norms learn, some are frozen, some layers have none: `invariant` compares convolutions before all of them. Heads,
# and whatever stands before a frozen norm, have outputs of any size, so γ begins relative to that.
BCCD = Recipe(
    name="bccd-fasterrcnn",
    model="fasterrcnn_resnet18_fpn",
    dataset="voc",
    image_size=320,
    epochs=24,
    batch_size=8,
    lr=0.01,
    warmup_epochs=1,
    weight_decay=1e-4,
    flip=True,
    eval_every=4,
    boxes_per_image=128,
    dyrep=DyRepConfig.paper(interval=3, score="invariant", relative_gamma=True, include=("backbone.body.*",)),
)

CAMVID = Recipe(
    name="camvid-pspnet",
    model="pspnet_resnet18",
    dataset="masks",
    image_size=160,
    epochs=80,
    batch_size=16,
    lr=0.02,  # of 0.005 to 0.05, the best on val from two backbones
    weight_decay=1e-4,
    crop="resized",
    scale=(0.75, 1.5),
    flip=True,
    eval_every=10,
    # CamVid's own; a classes.txt with others is refused, so they do not go to other data unseen
    class_names=(
        *("sky", "building", "pole", "road", "pavement", "tree"),
        *("sign", "fence", "car", "pedestrian", "bicyclist"),
    ),
    ignore_label=11,
    dyrep=DyRepConfig.paper(interval=8, score="invariant", relative_gamma=True, include=("encoder.*",)),
)

_ALL = (
    DIGITS,
    CIFAR,
    replace(CIFAR, name="cifar100-vgg16", dataset="cifar100"),
    TINY_IMAGENET,
    replace(
        IMAGENET, name="imagenet-mobilenet-v1", model="mobilenet_v1", epochs=90, weight_decay=4e-5, color_jitter=0.0
    ),
    IMAGENET,
    replace(IMAGENET, name="imagenet-resnet34", model="resnet34"),
    replace(IMAGENET, name="imagenet-resnet50", model="resnet50"),
    # the one RepVGG network that the paper trains with simple augmentation
    replace(IMAGENET, name="imagenet-repvgg-a2", model="repvgg_a2", color_jitter=0.0),
    replace(REPVGG, name="imagenet-repvgg-b2g4", model="repvgg_b2g4"),
    replace(REPVGG, name="imagenet-repvgg-b3", model="repvgg_b3"),
    replace(REPVGG, name="imagenet-repvgg-b3-300", model="repvgg_b3", epochs=300, dyrep=DyRepConfig.paper(interval=10)),
    BCCD,
    CAMVID,
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}


def recipe(name: str) -> Recipe:
    """A recipe by name.

    Example:
        >>> recipe("cifar10-vgg16").epochs
        600
    """
    if name not in RECIPES:
        raise ConfigError(f"there is no recipe {name!r}; valid are {', '.join(RECIPES)}")
    return RECIPES[name]
