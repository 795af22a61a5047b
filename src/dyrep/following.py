"""What follows a model when its structure changes: moving averages, the wrapper, how blocks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dyrep.block import RepConv
from dyrep.errors import ConfigError, StructureError
from dyrep.surgery.copies import check_copy, follow_, inside
from dyrep.surgery.executing import set_execution_
from dyrep.surgery.lengths import rescale_
from dyrep.surgery.structure import structure
from dyrep.surgery.undo import Snapshot
from dyrep.surgery.wrappers import bare, find_ddp, rewrap_ddp_

_AN_AVERAGE = (
    "give a moving average of the model (torch.optim.swa_utils.AveragedModel, a copy of the model, or what keeps one "
    "as .module), or several in a list; leave ema out if there is none"
)


class Followers:
    """Everything that depends on the set of a model's parameters, but for its optimizer.

    Args:
        model: the bare model; its blocks are run as told from now on.
        ema: a moving average of it, or several.
        wrap: makes the model to train of the bare one; without it a wrapper is initialised again in place.
        execution: how blocks are run: a name, or a dict of arguments of `set_execution_` (default: as they are).

    Attributes:
        averages: the averages given.

    Raises:
        ConfigError: something given as an average is none.
        StructureError: an average is that of another model.

    Example:
        >>> from torch.optim.swa_utils import AveragedModel
        >>> from dyrep.surgery.edits import expand_
        >>> model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1))
        >>> average = AveragedModel(model)
        >>> followers = Followers(model, ema=average)
        >>> _ = expand_(model, "0", ["1x1"])
        >>> followers.follow_(model) is model, list(average.module[0].branches)
        (True, ['1x1'])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ema: nn.Module | Iterable[nn.Module] = (),
        wrap: Callable[[nn.Module], nn.Module] | None = None,
        execution: str | Mapping[str, Any] | None = None,
    ) -> None:
        self.averages = _averages(ema, model)
        self._wrap = wrap
        self._execution = {"execution": execution} if isinstance(execution, str) else execution
        self._run_blocks(model)

    def follow_(
        self,
        trained: nn.Module,
        rescaled: Mapping[str, tuple[str, Tensor]] | None = None,
        begun: Iterable[str] = (),
    ) -> nn.Module:
        """Take on the structure that a model has now, and return the model to train.

        Args:
            trained: the model, with its wrapper.
            rescaled: convolutions whose channels were multiplied, with the norm that makes up for it and by what.
            begun: layers that training begins with as they are; averages begin with the same.

        After an error averages and the wrapper are as they were; the model itself is for the caller to put back.
        """
        model = bare(trained)
        rescaled = rescaled or {}
        norms = [norm for norm, _ in rescaled.values()]
        before = [_before_following(average, model, norms) for average in self.averages]
        executions = [(block, block.execution) for block in model.modules() if isinstance(block, RepConv)]
        try:
            self._run_blocks(model)
            for average in self.averages:
                inner = inside(follow_(average, model), model)
                for layer in begun:
                    inner.get_submodule(layer).load_state_dict(model.get_submodule(layer).state_dict())
                for layer, (norm, factors) in rescaled.items():
                    rescale_(inner.get_submodule(layer), _reader(inner, norm, layer), factors)
            if self._wrap is not None:
                return self._wrap(model)
            ddp = find_ddp(trained)
            if ddp is not None:
                rewrap_ddp_(ddp)
        except BaseException:
            for snapshot in before:
                snapshot.restore_()
            for block, execution in executions:
                block.execution = execution
            raise
        return trained

    def syncs_nothing(self, trained: nn.Module) -> bool:
        """Whether there is no wrapper that would keep the gradients of several processes alike."""
        return self._wrap is None and find_ddp(trained) is None

    def _run_blocks(self, model: nn.Module) -> None:
        if self._execution is not None:
            set_execution_(model, **self._execution)


def _averages(ema: Any, model: nn.Module) -> list[nn.Module]:
    """The moving averages given, each of which has to be one of this model."""
    single = isinstance(getattr(ema, "module", ema), nn.Module)
    if not single and not isinstance(ema, Iterable):
        raise ConfigError(f"ema={ema!r}: {_AN_AVERAGE}")
    averages = [ema] if single else list(ema)
    for average in averages:
        if not isinstance(getattr(average, "module", average), nn.Module):
            raise ConfigError(f"ema: a {type(average).__name__} is among the averages; {_AN_AVERAGE}")
        try:
            check_copy(average, model)
        except StructureError as error:
            raise StructureError(f"ema: {error}") from error
    return averages


def _reader(average: nn.Module, norm: str, layer: str) -> nn.Module:
    """The norm of an average that makes up for kernels of another length."""
    found = average.get_submodule(norm)
    if not isinstance(found, nn.modules.batchnorm._NormBase) or found.running_var is None:
        raise StructureError(
            f"layer {layer!r} is absorbed together with the norm {norm!r}, and the average has a "
            f"{type(found).__name__} without statistics in its place: make the average a copy of the model"
        )
    return found


def _before_following(average: nn.Module, model: nn.Module, norms: Iterable[str]) -> Snapshot:
    """What an average looks like before it takes on the structure of the model."""
    inner = inside(average, model)
    touched = {*structure(inner)["blocks"], *structure(model)["blocks"], *norms}
    return Snapshot([module for name, module in inner.named_modules() if name in touched], None)
