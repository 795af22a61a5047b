"""What is trained and how: one typed description, which is all that decides a run's result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from dyrep.checking import read_settings, require, require_types
from dyrep.config import DyRepConfig
from dyrep.engine.data.augment import PADDING, Crop
from dyrep.engine.data.masks import IGNORED
from dyrep.engine.precision import Precision
from dyrep.errors import ConfigError
from dyrep.execution.settings import MEASURE_EVERY, MEASURED_IMAGES, ExecutionName, SigmaGradient
from dyrep.methods import RepNASConfig, dyrep_settings, method, takes_defaults
from dyrep.methods.conversion import COPIES, Replace
from dyrep.models.backbones import Norms
from dyrep.surgery.beginning import MAX_KERNEL

Dataset = Literal["digits", "cifar10", "cifar100", "folder", "voc", "coco", "masks"]
Schedule = Literal["cosine", "constant"]
TASKS = {"voc": "detection", "coco": "detection", "masks": "segmentation"}
"""What is learnt from the data sets that are not about classifying whole images."""
BOXES_PER_IMAGE = 512
"""The usual number of boxes that a detector learns from, which is torchvision's."""
_UNUSED = {
    "classification": ("backbone", "norms", "frozen_stages", "boxes_per_image", "scale", "class_names", "ignore_label"),
    "detection": (
        *("label_smoothing", "crop", "cutout", "color_jitter", "auto_augment"),
        *("scale", "class_names", "ignore_label"),
    ),
    "segmentation": ("cutout", "color_jitter", "auto_augment", "boxes_per_image"),
}
"""Settings that would be without effect, which is said rather than passed over."""
_GONE = [("start_as", None)]
"""Settings that runs of earlier versions have in their files, at the value that they never changed anything with."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result of a run. A run can be resumed with the same recipe alone.

    Attributes:
        name: what the recipe is called.
        method: what is made of the network for training: origin (nothing), repvgg, acnet, dbb, dbb7, mobileone, orepa
            (blocks from the start), repnas (a search), fixed (the blocks of --structure), dyrep (grows and sheds them).
            Variants: dyrep-default has the library's defaults where a recipe has the paper's settings, dyrep4 grows
            DBB's operations alone, dyrep-nodep never cuts, dyrep-40 stops after epoch 40.
        model: a network of dyrep.models, "timm:NAME", "torchvision:NAME", or "package.module:function" of your own.
        dataset: which data; "folder" is train/CLASS/*.jpg and val/CLASS/*.jpg. Detectors learn from "voc" (Annotations
            and ImageSets) and "coco" (json), segmentation networks from "masks" (images and maps of class numbers).
        image_size: side of the images (default: as the data set has them); of a detector the shorter side.
        val_split: examples held out of the training set, to choose by: a share below 1, or a number. The test set is
            then looked at once, after training.
        epochs: passes over the training set.
        batch_size: images per step, over all GPUs together.
        lr: learning rate at its highest.
        min_lr: learning rate at the end of the cosine.
        schedule: how the learning rate falls, step by step.
        warmup_epochs: epochs over which the learning rate rises from zero.
        momentum: of SGD.
        nesterov: whether SGD looks ahead.
        weight_decay: of SGD.
        decay_norms: whether norms and biases are decayed too.
        label_smoothing: share of the label spread over all classes.
        crop: how training images are cropped: not, after padding, or at random size and shape. For segmentation
            "resized" cuts squares of image_size out of images that were resized by a random factor of scale.
        crop_padding: pixels on each side for crop=pad.
        flip: mirror training images at random.
        cutout: side of a square that is blanked at random, 0 for none.
        color_jitter: strength of random brightness, contrast and saturation.
        auto_augment: the AutoAugment policy of ImageNet.
        resident: keep image files decoded on the device and augment them there (default: if they fit and the
            augmentation allows it). The other way draws other random numbers.
        ema: decay of a moving average of the weights, which is then what is evaluated (default: none).
        precision: of convolutions and matrix products; "auto" is bf16 on a GPU that has it and fp32 on a CPU. It holds
            for the backbone of a detector; its heads, whose boxes would be off by pixels, are in fp32.
        sync_norms: batch norms over all GPUs together.
        eval_every: epochs between evaluations; the last epoch is always evaluated.
        weights: file with initial weights of the plain network, loaded strictly.
        backbone: finished run, or file, whose deployed classifier becomes the backbone of a detector or a segmentation
            network; loaded strictly, less its last layer (default: random weights).
        norms: what batch norms of that backbone do in training: normalise by the batch, by running statistics that do
            not change any more (eval), or nothing changes in them at all (frozen).
        frozen_stages: parts of that backbone that are not trained: 1 is the stem, 2 the first stage too, ... up to 5.
        boxes_per_image: how many boxes of every image a detector with RoI heads learns from in a step.
        scale: smallest and largest factor by which images are resized at random before crop=resized.
        class_names: of the numbers in maps for segmentation (default: classes.txt in the data's folder, or just
            numbers).
        ignore_label: number in maps for segmentation that is neither learnt nor counted.
        seed: of everything random.
        replace: whether blocks made before training take the place of the convolution, or of the batch norm after it
            too (default: as their authors published them).
        copies: KxK kernels in a block of mobileone.
        max_kernel: larger kernels than this get no block before training (they may grow in dyrep).
        structure: blocks for the method fixed, as `dyrep.structure` describes them.
        execution: how blocks are run: branch by branch (eager), fused, folded into one convolution at every step, or
            what suits the device (auto).
        sigma_images: on how many images of a batch folded blocks measure σ at least.
        sigma_gradient: what the gradient of folded blocks knows about σ.
        sigma_every: in every n-th step folded blocks measure σ.
        dyrep: how the structure evolves. Its total and seed follow from the recipe's own; include and exclude hold for
            every method.
        repnas: how the structure is searched. Its total follows from the recipe's own.
    """

    name: str = "custom"
    method: str = "dyrep"
    model: str = "small_vgg"
    dataset: Dataset = "digits"
    image_size: int | None = None
    val_split: float = 0
    epochs: int = 24
    batch_size: int = 32
    lr: float = 0.1
    min_lr: float = 0.0
    schedule: Schedule = "cosine"
    warmup_epochs: float = 0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 1e-4
    decay_norms: bool = True
    label_smoothing: float = 0.0
    crop: Crop = "none"
    crop_padding: int = PADDING
    flip: bool = False
    cutout: int = 0
    color_jitter: float = 0.0
    auto_augment: bool = False
    resident: bool | None = None
    ema: float | None = None
    precision: Precision = "auto"
    sync_norms: bool = False
    eval_every: int = 1
    weights: str | None = None
    backbone: str | None = None
    norms: Norms = "batch"
    frozen_stages: int = 0
    boxes_per_image: int = BOXES_PER_IMAGE
    scale: tuple[float, float] = (1.0, 1.0)
    class_names: tuple[str, ...] = ()
    ignore_label: int = IGNORED
    seed: int = 0
    replace: Replace | None = None
    copies: int = COPIES
    max_kernel: int | None = MAX_KERNEL
    structure: Mapping[str, Any] | None = None
    execution: ExecutionName = "auto"
    sigma_images: int = MEASURED_IMAGES
    sigma_gradient: SigmaGradient = "none"
    sigma_every: int = MEASURE_EVERY
    dyrep: DyRepConfig = field(default_factory=DyRepConfig)
    repnas: RepNASConfig = field(default_factory=RepNASConfig)

    def __post_init__(self) -> None:
        require_types(self)
        chosen = method(self.method)
        if takes_defaults(self.method):  # here, so that a recipe shows what it stands for
            object.__setattr__(self, "dyrep", self.dyrep.with_defaults())
        for name in ("epochs", "batch_size", "eval_every", "copies", "sigma_images", "sigma_every", "boxes_per_image"):
            require(name, getattr(self, name), "at least 1", getattr(self, name) >= 1)
        for name in ("crop_padding", "cutout", "color_jitter", "warmup_epochs", "weight_decay", "val_split", "seed"):
            require(name, getattr(self, name), "at least 0", getattr(self, name) >= 0)
        require("lr", self.lr, "above 0", self.lr > 0)
        require("min_lr", self.min_lr, f"from 0 to lr={self.lr}", 0 <= self.min_lr <= self.lr)
        require("momentum", self.momentum, "from 0 to below 1", 0 <= self.momentum < 1)
        require("label_smoothing", self.label_smoothing, "from 0 to below 1", 0 <= self.label_smoothing < 1)
        require("ema", self.ema, "above 0 and below 1", self.ema is None or 0 < self.ema < 1)
        require("image_size", self.image_size, "at least 1", self.image_size is None or self.image_size >= 1)
        require("warmup_epochs", self.warmup_epochs, f"below epochs={self.epochs}", self.warmup_epochs < self.epochs)
        self._check_task()
        self._check_start()
        if self.nesterov and not self.momentum:
            raise ConfigError("nesterov=True needs momentum above 0")
        if (chosen.name == "fixed") != (self.structure is not None):
            raise ConfigError("method=fixed and a structure belong together: give --method fixed --structure RUN@EPOCH")
        if chosen.name == "dyrep":
            self.evolution()
        elif chosen.name == "repnas":
            self.search()

    def _check_task(self) -> None:
        for unused in _UNUSED[self.task]:
            value, usual = getattr(self, unused), next(f.default for f in fields(self) if f.name == unused)
            if value != usual:
                raise ConfigError(
                    f"{unused}={value!r} has no use in {self.task} (dataset={self.dataset}): leave it out"
                )
        require("frozen_stages", self.frozen_stages, "from 0 to 5", 0 <= self.frozen_stages <= 5)
        require("ignore_label", self.ignore_label, "from 0 to 255", 0 <= self.ignore_label <= 255)
        least, most = self.scale
        require("scale", self.scale, "two factors above 0, the smaller one first", 0 < least <= most)
        if self.task == "segmentation":
            require("crop", self.crop, "none or resized for segmentation", self.crop != "pad")
            if self.crop == "resized":
                require("image_size", self.image_size, "given with crop=resized", self.image_size is not None)
            elif self.scale != (1.0, 1.0):
                factors = " ".join(f"{factor:g}" for factor in self.scale)
                raise ConfigError(
                    f"scale={self.scale} has no use with crop={self.crop}, which takes images as they are: give "
                    f"--scale 1 1, or --crop resized --scale {factors} with an --image-size"
                )
        if self.weights is not None and self.backbone is not None:
            raise ConfigError(
                f"weights={self.weights!r} and backbone={self.backbone!r}: weights of a whole network hold its "
                "backbone; give one of the two"
            )
        if self.task == "detection" and method(self.method).name == "dyrep":
            second = self.dyrep.score in ("grasp", "vote")
            require("score", self.dyrep.score, "another one: detectors cannot be differentiated twice", not second)

    def _check_start(self) -> None:
        evolves = method(self.method).name == "dyrep"
        begins = self.dyrep.start_with
        for name, value in (("start_with", begins), ("absorb_after", self.dyrep.absorb_after)):
            if value and not evolves:
                ours = f"{name}={value} is for method='dyrep'"
                raise ConfigError(f"{ours}, and this one is {self.method!r}: leave it out")
        if begins and self.max_kernel != MAX_KERNEL:
            raise ConfigError(
                f"max_kernel={self.max_kernel} is for the blocks of other methods, and start_with={begins} for kernels "
                f"up to {MAX_KERNEL}x{MAX_KERNEL}: leave max_kernel out, and layers by name with exclude"
            )
        if self.dyrep.absorb_after is not None:
            evolution = self.evolution()
            if evolution.start_with == () and not evolution.grows:
                raise ConfigError(
                    f"absorb_after={evolution.absorb_after} comes before the first update, after "
                    f"{evolution.start + evolution.interval} {evolution.unit}s, so nothing would ever grow: give a "
                    "smaller interval or start, or begin with branches, start_with"
                )
        for given in ("weights", "backbone"):
            if begins and getattr(self, given) is not None:
                raise ConfigError(
                    f"start_with={begins} is for a network that starts at random, and that of {given}="
                    f"{getattr(self, given)!r} does not: give one of the two"
                )

    @property
    def task(self) -> str:
        """What is learnt: classification, detection or segmentation; it follows from the data set."""
        return TASKS.get(self.dataset, "classification")

    def evolution(self) -> DyRepConfig:
        """The settings of DyRep for a run of this method, length and seed."""
        total = self.epochs if self.dyrep.unit == "epoch" else self.dyrep.total
        return dyrep_settings(self.method, replace(self.dyrep, total=total, seed=self.seed))

    def search(self) -> RepNASConfig:
        """The settings of RepNAS for a run of this length."""
        return replace(self.repnas, total=self.epochs)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as JSON-able data."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {**values, "dyrep": self.dyrep.to_dict(), "repnas": self.repnas.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Recipe:
        """Read what `to_dict` wrote; unknown settings are refused."""
        data = {key: value for key, value in data.items() if (key, value) not in _GONE}
        given = data.get("dyrep", {})
        # earlier versions had it here, and began with nothing before that
        earlier = {"start_with": data.pop("start_with", ())} if given and "start_with" not in given else {}
        evolution = DyRepConfig.from_dict({**earlier, **given})
        search = RepNASConfig.from_dict(data.get("repnas", {}))
        return read_settings(cls, {**data, "dyrep": evolution, "repnas": search})

    def differences(self, other: Recipe) -> list[str]:
        """What differs in another recipe, in words."""
        structures = _source(self.structure), _source(other.structure)
        words = [f"structure: {structures[0]} against {structures[1]}"] if self.structure != other.structure else []
        ours, theirs = (_flat({**recipe.to_dict(), "structure": None}) for recipe in (self, other))
        return [f"{key}: {ours[key]!r} against {theirs[key]!r}" for key in ours if ours[key] != theirs[key]] + words


@dataclass(frozen=True)
class RunSettings:
    """Where and with what a run is carried out; none of it decides the result, all of it may change on resuming.

    Attributes:
        out: folder of the run (default: runs/RECIPE-METHOD-seedSEED).
        data: folder of the data set.
        device: "cpu", "cuda", "cuda:1", ... (default: a GPU if there is one).
        workers: processes that read image files (default: one per core, at most 8).
        graph: capture the training step in a CUDA graph (default: on a single GPU).
        channels_last: memory layout of images and weights (default: on a GPU).
        checkpoint_minutes: at most this much training is lost if the power fails.
        resume: continue the run in the folder if there is one; without this, an existing run is an error.
        fallback: if the newest checkpoint cannot be read, continue from the one before it.
        change_settings: continue although the recipe or the number of processes is another one.
        tensorboard: write curves for TensorBoard too.
        progress: draw progress bars (default: on a terminal).
        stop_after: stop, resumable, after this many epochs of the whole (for shared machines with time limits).
    """

    out: Path | None = None
    data: Path | None = None
    device: str | None = None
    workers: int | None = None
    graph: bool | None = None
    channels_last: bool | None = None
    checkpoint_minutes: float = 5.0
    resume: bool = True
    fallback: bool = False
    change_settings: bool = False
    tensorboard: bool = False
    progress: bool | None = None
    stop_after: int | None = None

    def __post_init__(self) -> None:
        require_types(self)
        minutes, stop = self.checkpoint_minutes, self.stop_after
        require("checkpoint_minutes", minutes, "at least 0", minutes >= 0)
        require("workers", self.workers, "at least 0", self.workers is None or self.workers >= 0)
        require("stop_after", stop, "at least 1", stop is None or stop >= 1)

    def folder(self, recipe: str, method: str, seed: int) -> Path:
        """The folder of a run of this recipe, method and seed."""
        return self.out or Path("runs") / f"{recipe}-{method}-seed{seed}"


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


def _source(structure: Mapping[str, Any] | None) -> str:
    return "none" if structure is None else f"of {structure.get('source', 'one made in Python')}"
