r"""What synflow, :math:`\sum_i g_i \theta_i`, comes to for a kernel that a batch norm follows, without cancellation.

The norm divides by :math:`\sqrt{\sigma^2 + \epsilon}`, so the length of a channel's kernel matters only as far as ε
lets it. The derivative by that length, which is what the sum is, can be had from the norm's own gradient:

.. math:: \sum_i g_i \theta_i = \frac{\epsilon}{\sigma^2 + \epsilon} \, \gamma \frac{\partial L}{\partial \gamma}

The left side adds up terms many orders of magnitude larger than their sum, of which autocast leaves nothing but
rounding. On the right nothing cancels within a channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dyrep.norm import BranchNorm


def has_flow(module: nn.Module) -> bool:
    """Whether this is a norm that the identity holds for, while it trains on batches.

    Example:
        >>> has_flow(nn.BatchNorm2d(4)), has_flow(nn.BatchNorm2d(4, affine=False)), has_flow(nn.GroupNorm(2, 4))
        (True, False, False)
    """
    if isinstance(module, BranchNorm):
        return True
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine and module.running_var is not None


class NormFlows:
    """Sums the flow of norms over training steps, channel by channel, on the device.

    The variance of a batch is taken to be the running one, which follows it closely.

    Args:
        norms: norms by name, see `has_flow`.

    Attributes:
        sums: the flows of all channels so far; whoever takes a step adds its `values`.

    Example:
        >>> conv, norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4, eps=0.1, momentum=1.0)
        >>> norm(conv(torch.randn(64, 3, 8, 8))).pow(3).sum().backward()
        >>> flows = NormFlows({"norm": norm})
        >>> found = flows.means(flows.values(), steps=1)["norm"]
        >>> abs(found / float((conv.weight.detach() * conv.weight.grad).sum()) - 1) < 0.01
        True
    """

    def __init__(self, norms: Mapping[str, nn.Module]) -> None:
        self._norms: dict[str, Any] = dict(norms)
        self._sizes = [norm.weight.numel() for norm in self._norms.values()]
        eps = [torch.full_like(norm.running_var, norm.eps, dtype=torch.float32) for norm in self._norms.values()]
        self._eps = torch.cat(eps) if eps else torch.zeros(0)
        self.sums = torch.zeros_like(self._eps)
        self._silent: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._norms)

    @property
    def learns(self) -> bool:
        """Whether some norm has learnt from a batch, so that there is a flow to add."""
        return any(_learns(norm) for norm in self._norms.values())

    def watches(self, norms: Mapping[str, nn.Module]) -> bool:
        """Whether these are its norms."""
        ours = [(name, id(norm), id(norm.weight)) for name, norm in self._norms.items()]
        return ours == [(name, id(norm), id(norm.weight)) for name, norm in norms.items()]

    @torch.no_grad()
    def values(self) -> Tensor:
        """The flow of every channel at this step; norms that do not learn from batches are left out from now on."""
        if not self._norms:
            return torch.zeros_like(self.sums)
        silent = {name for name, norm in self._norms.items() if not _learns(norm)}
        self._silent |= silent
        gradients = [
            torch.zeros_like(norm.weight) if name in silent else norm.weight.grad for name, norm in self._norms.items()
        ]
        norms = self._norms.values()
        gamma, variance, gradient = (
            torch.cat([part.float() for part in parts])
            for parts in ([norm.weight for norm in norms], [norm.running_var for norm in norms], gradients)
        )
        return gamma * gradient * self._eps / (variance + self._eps)

    def reset_(self) -> None:
        """Start over, in place."""
        self.sums.zero_()
        self._silent.clear()

    def means(self, sums: Tensor, steps: float) -> dict[str, float]:
        """The mean flow of every norm that learnt from batches in all steps.

        Args:
            sums: of all channels; our own, or those over all ranks.
            steps: how many were added up.
        """
        if not self._norms:
            return {}
        totals = torch.stack([part.double().sum() for part in sums.split(self._sizes)]) / max(steps, 1)
        found = dict(zip(self._norms, totals.tolist(), strict=True))
        return {name: mean for name, mean in found.items() if name not in self._silent}

    def state_dict(self) -> dict[str, Tensor]:
        """The sums so far, by name."""
        if not self._norms:
            return {}
        parts = zip(self._norms, self.sums.split(self._sizes), strict=True)
        return {name: part.clone() for name, part in parts if name not in self._silent}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with saved sums; norms that have none are left out until the next start."""
        self.reset_()
        if not self._norms:
            return
        for name, part in zip(self._norms, self.sums.split(self._sizes), strict=True):
            if name in state and state[name].shape == part.shape:
                part.copy_(state[name])
            else:
                self._silent.add(name)


def _learns(norm: Any) -> bool:
    """Whether a norm has normalised a batch by the batch's own deviation, and γ has a gradient from it."""
    return norm.training and norm.weight.grad is not None
