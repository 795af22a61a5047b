"""What the engine has to know about a task: everything else is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dyrep.engine.data.loader import Loader
from dyrep.engine.data.opening import Data
from dyrep.engine.recipe import RunSettings
from dyrep.engine.world import World
from dyrep.errors import ConfigError

DRAWN = 4
"""Of how many images predictions are drawn."""


class Learnt(NamedTuple):
    """What a model makes of a training batch.

    Attributes:
        loss: mean over the examples, to be differentiated.
        hits: how many of the examples it had right, in the sense of the task; a share counts for every example.
    """

    loss: Tensor
    hits: Tensor


Learn = Callable[[nn.Module, Any, AbstractContextManager[Any]], Learnt]
"""``learn(model, batch, computing)``: the model is to be called inside of ``computing``, which sets its precision."""


class Task(Protocol):
    """What is learnt, and what that asks of data, models, steps and evaluation.

    Attributes:
        name: classification, detection or segmentation.
        metric: key of what tells how good a network is, see `dyrep.wording.METRICS`.
        counts_hits: whether it can be said of a training batch what was right.
        same_shapes: whether all batches have the same shapes, so that algorithms are chosen once and steps captured.
    """

    name: str
    metric: str
    counts_hits: bool
    same_shapes: bool

    def open_data(self, settings: RunSettings, world: World) -> Data:
        """Read the data and make its loaders."""

    def build(self, *, classes: int, channels: int, size: int | None) -> nn.Module:
        """The plain network, with random weights, and frozen as far as the recipe says."""

    def learn(self, model: nn.Module, batch: Any, computing: AbstractContextManager[Any]) -> Learnt:
        """The loss of a batch, and what was right."""

    def evaluate(
        self, model: nn.Module, loader: Loader, world: World, precision: torch.dtype, classes: tuple[str, ...]
    ) -> dict[str, float]:
        """How good a model is on a split over all ranks; `metric` is among it."""

    def example(self, *, channels: int, size: int, device: torch.device | str) -> Any:
        """A batch of one empty image, to find out what a network consists of and what it costs."""

    def random_inputs(self, *, channels: int, size: int) -> Any:
        """Some images of noise, the same every time."""

    def inputs(self, batch: Any, most: int | None = None) -> Any:
        """What a model is compared, and looked after, on: as much of a batch as it takes, of at most so many images."""

    def draw(self, model: nn.Module, data: Data, file: Path) -> bool:
        """Draw what a model says about a few images; whether there is anything to draw."""


def check_name(model: str, known: tuple[str, ...]) -> None:
    """Refuse the names of networks of other tasks, which are those without a colon.

    Example:
        >>> check_name("torchvision:retinanet_resnet50_fpn", ("fasterrcnn_resnet18_fpn",))
    """
    if ":" not in model:
        raise ConfigError(
            f"model {model!r} is not for this task; use one of {', '.join(known)}, torchvision:NAME, or "
            "package.module:function for one of your own"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode; every module gets back the mode it had, for some may be frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
