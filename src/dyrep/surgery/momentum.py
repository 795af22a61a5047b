"""Momentum of a block's parameters, as momentum of the kernel that it folds to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dyrep import algebra
from dyrep.block import RepConv
from dyrep.surgery.lengths import per_channel
from dyrep.surgery.optimizer_state import states_of

_KEY = "momentum_buffer"


def carried_momentum(block: RepConv, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """How the momentum of all of a block's parameters moves its folded kernel and bias.

    A step along momentum mᵢ moves the i-th parameter, and with it the folded kernel by Jᵢmᵢ, where Jᵢ is its Jacobian.
    All together they are the momentum that the kernel has, and has to go on with when the block is absorbed.

    Args:
        block: the block.
        optimizer: one whose momentum adds up gradients, as SGD's does; there is none to carry over of others.

    Returns:
        The momentum of ``"weight"`` and ``"bias"``, as far as the block has them and they have momentum.

    Example:
        >>> from dyrep.block import as_block_
        >>> block = as_block_(nn.Conv2d(4, 4, 3))
        >>> carried_momentum(block, torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9))
        {}
    """
    moving = {} if optimizer is None else momenta(block.parameters(), optimizer)
    own = [name for name, parameter in block.named_parameters(recurse=False) if id(parameter) in moving]
    if not own:
        return {}
    parameters = [parameter for parameter in block.parameters() if id(parameter) in moving and parameter.requires_grad]
    with torch.inference_mode(False), torch.enable_grad():
        kernel, bias = block.folded(algebra.exact_dtype(block.weight))
        folded = {name: part for name, part in (("weight", kernel), ("bias", bias)) if part is not None and name in own}
        folded = {name: part for name, part in folded.items() if part.requires_grad}
        if not parameters or not folded:
            return {}
        # Jm without a forward derivative: Jᵀu is linear in u, so the gradient of ⟨Jᵀu, m⟩ by u is Jm, whatever u is
        aims = {name: torch.zeros_like(part, requires_grad=True) for name, part in folded.items()}
        along = torch.stack([(part * aims[name]).sum() for name, part in folded.items()]).sum()
        pulled = torch.autograd.grad(along, parameters, create_graph=True, allow_unused=True)
        pairs = zip(pulled, (moving[id(parameter)] for parameter in parameters), strict=True)
        products = [(gradient * momentum.to(gradient)).sum() for gradient, momentum in pairs if gradient is not None]
        if not products:
            return {}
        # what is frozen by now moves nothing; a part that nothing else moves keeps what it has
        carried = torch.autograd.grad(torch.stack(products).sum(), list(aims.values()), allow_unused=True)
    return {name: value for name, value in zip(aims, carried, strict=True) if value is not None}


def momenta(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> dict[int, Tensor]:
    """The momentum of every parameter that has some, by the parameter's id."""
    found: dict[int, Tensor] = {}
    states = states_of(optimizer)
    for parameter in parameters:
        for state in states:
            kept = state.get(parameter, {}).get(_KEY)
            if isinstance(kept, Tensor) and kept.shape == parameter.shape:
                found[id(parameter)] = kept
    return found


@torch.no_grad()
def set_momentum_(conv: nn.Module, momentum: Mapping[str, Tensor], optimizer: Optimizer) -> None:
    """Give a convolution's parameters momentum, where they have some already.

    What an optimizer keeps of a parameter is replaced, not rewritten, so that whoever has kept it can put it back.
    """
    for name, value in momentum.items():
        parameter = conv.get_parameter(name)
        for state in states_of(optimizer):
            before = state.get(parameter, {})
            if isinstance(before.get(_KEY), Tensor):
                with torch.inference_mode(False):  # what is made in there could not be stepped with
                    new = torch.empty_like(before[_KEY])  # the memory layout it had, which fused optimizers rely on
                state[parameter] = {**before, _KEY: new.copy_(value)}


def scale_momentum_(conv: nn.Module, factors: Tensor, optimizer: Optimizer) -> None:
    """Multiply the momentum of a convolution's output channels, as they have been multiplied themselves."""
    known = momenta(conv.parameters(recurse=False), optimizer)
    own = {name: known[id(p)] for name, p in conv.named_parameters(recurse=False) if id(p) in known}
    set_momentum_(conv, {name: per_channel(factors, value) * value for name, value in own.items()}, optimizer)
