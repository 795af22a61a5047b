"""A batch norm that steps aside because the block before it normalises its branches itself.

The published blocks (RepVGG, DBB, ACNet, MobileOne) replace a convolution *and* the batch norm after it. Here that norm
stays in the model, so that its keys stay, but lets its input through. It goes on watching what passes: when the block
is folded, the norm comes back with the statistics of the real signal and a γ and β that change nothing, so the deployed
network computes the same in eval mode and starts fine-tuning from nearly the same in training mode.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from dyrep.errors import IneligibleLayerError

_MOMENTUM = 0.1  # at least: what is watched has to be what passes now


class PassedNorm(nn.Module):
    """A batch norm that lets its input through and keeps track of its statistics; made by `step_aside_`.

    It is not a batch norm any more, so that nothing that looks for one converts or freezes it.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    eps: float
    momentum: float | None
    num_batches_tracked: Tensor | None
    kind: type[nn.Module]
    was_trained: tuple[bool, bool]

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        if self.training and input.numel() > input.shape[1]:
            self._watch(input.detach())
        return input

    @torch.no_grad()
    def _watch(self, x: Tensor) -> None:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        var, mean = torch.var_mean(wide, dim=[d for d in range(x.dim()) if d != 1])
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = max(self.momentum or 0, _MOMENTUM)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(var.to(self.running_var.dtype), momentum)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return f"{self.weight.numel()}, in place of {self.kind.__name__}"


def is_frozen_norm(module: nn.Module) -> bool:
    """Whether a module is a batch norm that never changes, as detectors have them (torchvision's and others').

    These are no batch norms by class, and the libraries they come from need not be there: they are known by name.

    Example:
        >>> from torchvision.ops import FrozenBatchNorm2d
        >>> is_frozen_norm(FrozenBatchNorm2d(4)), is_frozen_norm(nn.BatchNorm2d(4).eval())
        (True, False)
    """
    return any(kind.__name__.startswith("FrozenBatchNorm") for kind in type(module).__mro__)


def refusal(norm: nn.Module, *, training: bool = True) -> str:
    """Why a norm, in training mode or not, cannot step aside; empty if it can."""
    if is_frozen_norm(norm):
        return f"it is a {type(norm).__name__}, whose statistics, γ and β never change; frozen norms stay"
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    if type(norm) not in kinds:
        return f"{type(norm).__name__} is not one of torch's batch norms"
    batch_norm = cast(nn.BatchNorm2d, norm)
    if not batch_norm.affine or not batch_norm.track_running_stats:
        return "it has no γ and β, or no running statistics, that could take over what is folded"
    if "forward" in batch_norm.__dict__:
        return "its forward was replaced on the instance"
    if not training:
        return "it is in eval mode; frozen norms stay, call model.train() first if it is not meant to be one"
    return ""


def step_aside_(norm: nn.Module) -> PassedNorm:
    """Let a batch norm pass its input through from now on, in place: same object, same keys. It is not trained.

    Example:
        >>> norm = nn.BatchNorm2d(2)
        >>> x = torch.randn(4, 2, 3, 3)
        >>> torch.equal(step_aside_(norm)(x), x), list(norm.state_dict()) == list(nn.BatchNorm2d(2).state_dict())
        (True, True)
    """
    reason = refusal(norm)
    if reason:
        raise IneligibleLayerError(f"this norm cannot be replaced: {reason}")
    kind = type(norm)
    norm.__class__ = PassedNorm
    passed = cast(PassedNorm, norm)
    passed.kind = kind
    passed.was_trained = (passed.weight.requires_grad, passed.bias.requires_grad)
    passed.weight.requires_grad_(False)
    passed.bias.requires_grad_(False)
    return passed


@torch.no_grad()
def step_back_(passed: PassedNorm, shift: Tensor | None) -> nn.Module:
    """Make the batch norm one again, which in eval mode adds ``shift`` and changes nothing else."""
    spread = (passed.running_var + passed.eps).sqrt()
    passed.weight.copy_(spread)
    passed.bias.copy_(passed.running_mean)
    if shift is not None:
        passed.running_mean.sub_(shift.to(passed.running_mean.dtype))
    for parameter, trained in zip((passed.weight, passed.bias), passed.was_trained, strict=True):
        parameter.requires_grad_(trained)
    attributes: dict[str, Any] = passed.__dict__
    passed.__class__ = attributes.pop("kind")
    del attributes["was_trained"]
    return passed
