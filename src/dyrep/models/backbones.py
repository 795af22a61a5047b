"""The part of a detector or a segmentation network that was a classifier once: find it, fill it, keep it still."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

from torch import Tensor, nn

from dyrep.errors import CheckpointError, ConfigError
from dyrep.extras import needed

PLACES = ("backbone.body", "encoder", "backbone")
"""Where detectors of torchvision, networks of segmentation-models-pytorch and others keep it."""
STAGES = (("conv1", "bn1"), ("layer1",), ("layer2",), ("layer3",), ("layer4",))
"""Parts of a ResNet in the order in which they are frozen: the stem, then stage by stage."""
HEADS = ("fc.", "classifier.", "head.", "last_linear.")
"""What classifiers call the part that a backbone leaves out."""
Norms = Literal["batch", "eval", "frozen"]
NORMS: tuple[Norms, ...] = get_args(Norms)


def backbone_of(model: nn.Module) -> tuple[str, nn.Module]:
    """The backbone of a model and its name.

    Raises:
        ConfigError: it has none where one is looked for.

    Example:
        >>> backbone_of(nn.ModuleDict({"encoder": nn.Linear(1, 1)}))[0]
        'encoder'
    """
    parts = dict(model.named_modules())
    for place in PLACES:
        if place in parts:
            return place, parts[place]
    raise ConfigError(
        f"{type(model).__name__} has no backbone that could be found (looked for {', '.join(PLACES)}): load its "
        "weights in your own function, or with --weights"
    )


def load_backbone_(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load the weights of a classifier, less its last layer, strictly into the backbone of a model.

    Args:
        model: the model, changed in place.
        state: state dict of the classifier.
        source: where it comes from, for messages.

    Raises:
        CheckpointError: it does not fit; the message names the keys. The model is not to be used then.

    Example:
        >>> model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2))})
        >>> load_backbone_(model, {**nn.Sequential(nn.Linear(2, 2)).state_dict(), "fc.weight": Tensor()}, "a file")
    """
    name, backbone = backbone_of(model)
    own = backbone.state_dict()
    fitting = {key: value for key, value in state.items() if key in own or not key.startswith(HEADS)}
    for key, value in fitting.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{source} holds a {type(value).__name__} under {key!r} instead of a tensor, so it is no state dict: "
                "give what `dyrep deploy` writes, or a state dict by itself"
            )
    # norms that never change do not count batches, and old files have norms that did not either
    missing = sorted(key for key in set(own) - set(fitting) if not _counts_batches(key))
    unexpected = sorted(key for key in set(fitting) - set(own) if not _counts_batches(key))
    wrong = [
        f"{key}: {tuple(fitting[key].shape)} against {tuple(value.shape)}"
        for key, value in own.items()
        if key in fitting and fitting[key].shape != value.shape
    ]
    for what, keys in (("lacks", missing), ("has, which the backbone has not,", unexpected), ("differs in", wrong)):
        if keys:
            more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
            raise CheckpointError(
                f"the weights of {source} do not fit the backbone ({name!r}) of this {type(model).__name__}: it {what} "
                f"{', '.join(keys[:3])}{more}; give those of the same network, as `dyrep deploy` writes them"
            )
    backbone.load_state_dict({key: fitting.get(key, value) for key, value in own.items()})


def _counts_batches(key: str) -> bool:
    return key.endswith("num_batches_tracked")


def keep_still_(model: nn.Module, *, norms: Norms = "batch", frozen_stages: int = 0) -> None:
    """Freeze parts of a model's backbone.

    Args:
        model: the model, changed in place.
        norms: what its batch norms do in training: ``"batch"`` normalises by the batch, ``"eval"`` by running
            statistics that stay as they are, with γ and β trained, ``"frozen"`` makes them norms that never change.
        frozen_stages: how many of `STAGES` are not trained.

    Raises:
        ConfigError: a value outside its range, or a backbone without such stages.
        MissingPackageError: norms are to be frozen, and torchvision is not installed.
    """
    if norms not in NORMS:
        raise ConfigError(f"norms={norms!r}: must be one of {', '.join(NORMS)}")
    if norms == "frozen":
        _freeze_norms_(backbone_of(model)[1])
    for stage in _frozen(model, frozen_stages):
        stage.requires_grad_(False)


def train_(model: nn.Module, *, norms: Norms = "batch", frozen_stages: int = 0) -> None:
    """Put a model into training mode, less what `keep_still_` was told to keep still."""
    model.train()
    if norms == "eval":
        for module in backbone_of(model)[1].modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
    for stage in _frozen(model, frozen_stages):
        stage.eval()


def _frozen(model: nn.Module, count: int) -> list[nn.Module]:
    if not 0 <= count <= len(STAGES):
        raise ConfigError(f"frozen_stages={count}: must be from 0 to {len(STAGES)} (the stem and four stages)")
    if not count:
        return []
    name, backbone = backbone_of(model)
    wanted = [part for stage in STAGES[:count] for part in stage]
    lacking = [part for part in wanted if not hasattr(backbone, part)]
    if lacking:
        raise ConfigError(
            f"frozen_stages={count}: the backbone ({name!r}) has no {lacking[0]!r}, so it is not a ResNet, whose "
            "stages could be frozen; freeze parameters in your own function"
        )
    return [cast(nn.Module, getattr(backbone, part)) for part in wanted]


def _freeze_norms_(module: nn.Module) -> None:
    """Put frozen norms in the place of batch norms, with their values."""
    kind = needed("torchvision.ops", "norms='frozen'", "norms='eval' does without").FrozenBatchNorm2d
    for name, child in list(module.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            frozen = kind(child.num_features, eps=child.eps)
            frozen.load_state_dict({key: value for key, value in child.state_dict().items() if "batches" not in key})
            setattr(module, name, frozen.to(child.weight.device))
        else:
            _freeze_norms_(child)
