"""Which norm takes in what a convolution puts out, found by watching the model run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dyrep import passing
from dyrep.surgery.preserve import Forward, preserved, run_batch


@torch.no_grad()
def following_norms(
    model: nn.Module,
    convs: Mapping[str, nn.Module],
    example_input: Any,
    forward: Forward | None = None,
    *,
    replaceable: bool = True,
    training: bool = False,
) -> tuple[dict[str, str], dict[str, str]]:
    """Find for every convolution the batch norm that alone reads its output.

    Args:
        model: the model, which is run once.
        convs: the convolutions to look at, by name.
        example_input: a batch to run it on.
        forward: ``forward(model, batch)``, where the batch is of a kind of its own.
        replaceable: find only norms that a block can take the place of; otherwise all that have running statistics.
        training: run it in training mode.

    Returns:
        The norm's name for every convolution that has one, and for the others why not.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
        >>> following_norms(model, {"0": model[0], "2": model[2]}, torch.randn(1, 3, 8, 8))
        ({'0': '1'}, {'2': 'no batch norm reads its output'})
    """
    names = {id(module): name for name, module in model.named_modules()}
    modes = {id(module): module.training for module in model.modules()}
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    watcher = _Watcher(convs)
    with preserved(model, training=training), watcher.hooked(model), watcher:
        for leaf in tree_leaves(run_batch(model, example_input, forward)):
            watcher.note_use(leaf)
    found: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name in convs:
        norms, others = watcher.norms.get(name, []), watcher.others.get(name, 0)
        if watcher.calls.get(name, 0) != 1:
            missing[name] = f"the convolution runs {watcher.calls.get(name, 0)} times per batch"
        elif name in watcher.altered:
            missing[name] = "a hook changes its output"
        elif not norms:
            missing[name] = "no batch norm reads its output"
        elif others or len(norms) > 1:
            missing[name] = "something else than one norm reads its output too"
        elif watcher.norm_calls[id(norms[0])] != 1:
            missing[name] = f"the norm {names[id(norms[0])]!r} reads other outputs too"
        elif any(owners[id(parameter)] > 1 for parameter in norms[0].parameters()):
            missing[name] = f"the norm {names[id(norms[0])]!r} shares its parameters with another module"
        elif not replaceable:
            if isinstance(norms[0], nn.modules.batchnorm._NormBase) and norms[0].track_running_stats:
                found[name] = names[id(norms[0])]
            else:
                missing[name] = f"the norm {names[id(norms[0])]!r} has no running statistics that could change"
        elif not all(parameter.requires_grad for parameter in norms[0].parameters()):
            missing[name] = f"the norm {names[id(norms[0])]!r} has a γ or β that is frozen"
        elif reason := passing.refusal(norms[0], training=modes[id(norms[0])]):
            missing[name] = f"the norm {names[id(norms[0])]!r} cannot be replaced: {reason}"
        else:
            found[name] = names[id(norms[0])]
    return found, missing


def reading_norms(
    model: nn.Module, convs: Mapping[str, nn.Module], batch: Any, forward: Forward | None = None
) -> dict[str, str]:
    """The batch norm that alone reads what a convolution puts out, in eval mode and in training mode; not all have one.

    Args:
        model: the model, which is run twice.
        convs: the convolutions to look at, by name.
        batch: what to run it on.
        forward: ``forward(model, batch)``, where the batch is of a kind of its own.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
        >>> reading_norms(model, {"0": model[0], "2": model[2]}, torch.randn(2, 3, 8, 8))
        {'0': '1'}
    """
    evaluated, trained = (
        following_norms(model, convs, batch, forward, replaceable=False, training=training)[0]
        for training in (False, True)
    )
    return {layer: norm for layer, norm in evaluated.items() if trained.get(layer) == norm}


class _Watcher(TorchFunctionMode):
    """Notes who reads the outputs of some convolutions: norms, and any other operation."""

    def __init__(self, convs: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.norms: dict[str, list[nn.Module]] = {}
        self.others: dict[str, int] = {}
        self.norm_calls: dict[int, int] = {}
        self.altered: set[str] = set()
        self._convs = convs
        self._outputs: dict[int, tuple[str, Tensor]] = {}  # the tensor is kept, so that its id is not given away
        self._inside = 0

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Watch a model's modules; inside of them operations are not counted."""
        handles = []
        for name, conv in self._convs.items():
            first, last = (partial(note, name) for note in (self._note_own_output, self._note_output))
            handles.append(conv.register_forward_hook(first, prepend=True))
            handles.append(conv.register_forward_hook(last))
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) or passing.is_frozen_norm(module):
                handles.append(module.register_forward_pre_hook(self._enter_norm))
                handles.append(module.register_forward_hook(self._leave_norm))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                self.note_use(leaf)
        return result

    def note_use(self, value: Any) -> None:
        """Count a use of a convolution's output, if that is what this is."""
        if id(value) in self._outputs:
            name = self._outputs[id(value)][0]
            self.others[name] = self.others.get(name, 0) + 1

    def _note_own_output(self, name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        self._own = output

    def _note_output(self, name: str, _: nn.Module, __: Any, output: Tensor) -> None:
        """Called after the user's own hooks, which may have put something else in the output's place."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self._outputs[id(output)] = (name, output)
        if output is not self._own:
            self.altered.add(name)

    def _enter_norm(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        self._inside += 1
        self.norm_calls[id(norm)] = self.norm_calls.get(id(norm), 0) + 1
        if args and id(args[0]) in self._outputs:
            self.norms.setdefault(self._outputs[id(args[0])][0], []).append(norm)

    def _leave_norm(self, norm: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._inside -= 1
