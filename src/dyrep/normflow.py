r"""What synflow, :math:`\sum_i g_i \theta_i`, comes to for a kernel that a batch norm follows, without cancellation.

The norm divides by :math:`\sqrt{\sigma^2 + \epsilon}`, so the length of a channel's kernel matters only as far as ε
lets it. The derivative by that length, which is what the sum is, can be had from the norm's own gradient:

.. math:: \sum_i g_i \theta_i = \frac{\epsilon}{\sigma^2 + \epsilon} \, \gamma \frac{\partial L}{\partial \gamma}

The left side adds up terms many orders of magnitude larger than their sum, of which autocast leaves nothing but
rounding. On the right nothing cancels within a channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dyrep.norm import BranchNorm
from dyrep.surgery import ranks


def has_flow(module: nn.Module) -> bool:
    """Whether this is a norm that the identity holds for, while it trains on batches.

    Example:
        >>> has_flow(nn.BatchNorm2d(4)), has_flow(nn.BatchNorm2d(4, affine=False)), has_flow(nn.GroupNorm(2, 4))
        (True, False, False)
    """
    if isinstance(module, BranchNorm):
        return True
    batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine
    return batch_norm and module.running_var is not None and not is_lazy(cast(Tensor, module.weight))


class NormFlows:
    """Sums the flow of norms over training steps, channel by channel, on the device.

    The variance of a batch follows from how far the running one has moved, where a step is one batch of a norm of
    torch's, the step before was seen too, and ranks do not exchange statistics. Elsewhere the running variance stands
    in for it.

    Args:
        norms: norms by name, see `has_flow`, all on one device.

    Attributes:
        sums: the flows of all channels so far, and for each norm in how many steps it learnt; whoever takes a step
            adds its `values`.

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
        self.sums = torch.zeros(0)
        if not self._norms:
            return
        self._eps = self._spread([norm.eps for norm in self._norms.values()])
        self._momentum = self._spread([_momentum(norm) for norm in self._norms.values()])
        self._one, self._zero = self._eps.new_ones(1), self._eps.new_zeros(1)
        self._earlier_variance, self._earlier_count = self._seen()
        self.sums = self._eps.new_zeros(len(self._eps) + len(self._norms))

    def __bool__(self) -> bool:
        return bool(self._norms)

    def watches(self, norms: Mapping[str, nn.Module]) -> bool:
        """Whether these are its norms, where they were."""
        ours, theirs = ([(name, id(norm)) for name, norm in found.items()] for found in (self._norms, norms))
        return ours == theirs and all(norm.weight.device == self.sums.device for norm in self._norms.values())

    @torch.no_grad()
    def values(self, scale: Tensor | None = None) -> Tensor:
        """What this step adds to the sums.

        Args:
            scale: what gradients have been multiplied by, if they have.
        """
        if not self._norms:
            return torch.zeros_like(self.sums)
        norms = self._norms.values()
        learning = [norm.training and norm.weight.requires_grad for norm in norms]
        gradients = [
            norm.weight.grad if learns and norm.weight.grad is not None else torch.zeros_like(norm.weight)
            for norm, learns in zip(norms, learning, strict=True)
        ]
        gamma, gradient = (_flat(parts) for parts in ([norm.weight for norm in norms], gradients))
        flow = gamma * gradient * self._eps / (self._batch_variance() + self._eps)
        learnt = [self._one if learns else self._zero for learns in learning]
        return torch.cat([flow if scale is None else flow / scale, *learnt])

    def _batch_variance(self) -> Tensor:
        """The variance of the last batch, or the running one where it cannot be told."""
        running, count = self._seen()
        moved = (running - (1 - self._momentum) * self._earlier_variance) / self._momentum
        known = (count == self._earlier_count + 1) & (self._momentum > 0) & (moved > 0)
        self._earlier_variance.copy_(running)
        self._earlier_count.copy_(count)
        return torch.where(known, moved, running)

    def _seen(self) -> tuple[Tensor, Tensor]:
        """The running variance of every channel, and over how many batches."""
        norms = self._norms.values()
        counts = [_count(norm, self._zero).expand(size) for norm, size in zip(norms, self._sizes, strict=True)]
        return _flat([norm.running_var for norm in norms]), _flat(counts)

    def reset_(self) -> None:
        """Start over, in place."""
        self.sums.zero_()

    def means(self, sums: Tensor, steps: float) -> dict[str, float]:
        """The mean flow of every norm that learnt from batches in all steps.

        Args:
            sums: our own, or the means over all ranks.
            steps: how many were added up.
        """
        if not self._norms or not steps:
            return {}
        parts = sums.double().split([*self._sizes, len(self._norms)])
        totals = torch.stack([*(part.sum() for part in parts[:-1]), *parts[-1]]).tolist()
        found = zip(self._norms, totals, totals[len(self._norms) :], strict=False)
        return {name: total / steps for name, total, learnt in found if abs(learnt - steps) < 1e-3}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """What is kept of every norm, by name."""
        return {name: {key: part.clone() for key, part in kept.items()} for name, kept in self._kept().items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Go on from there; norms that are missing, or have another size, have not learnt."""
        self.reset_()
        for name, kept in self._kept().items():
            saved = state.get(name)
            if saved is not None and saved["flow"].shape == kept["flow"].shape:
                for key, part in kept.items():
                    part.copy_(saved[key])

    def _kept(self) -> dict[str, dict[str, Tensor]]:
        """What is kept of every norm: views, by name."""
        if not self._norms:
            return {}
        split = self.sums.split([*self._sizes, *[1] * len(self._sizes)])
        flows, steps = split[: len(self._sizes)], split[len(self._sizes) :]
        earlier = self._earlier_variance.split(self._sizes), self._earlier_count.split(self._sizes)
        return {
            name: {"flow": flow, "steps": learnt, "variance": variance, "batches": batches}
            for name, flow, learnt, variance, batches in zip(self._norms, flows, steps, *earlier, strict=True)
        }

    def _spread(self, values: list[float]) -> Tensor:
        """A number per norm as one per channel."""
        first = next(iter(self._norms.values())).weight
        parts = [torch.full((size,), value) for size, value in zip(self._sizes, values, strict=True)]
        return torch.cat(parts).to(first.device)


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.float() for part in parts])


def _momentum(norm: Any) -> float:
    """How far one batch moves running statistics; 0 where that cannot be told from outside."""
    if isinstance(norm, BranchNorm):
        return 0.0
    if ranks.distributed() and not isinstance(norm, nn.SyncBatchNorm):
        return 0.0  # DistributedDataParallel gives all ranks the statistics of the first one before every step
    return norm.momentum or 0.0


def _count(norm: Any, unknown: Tensor) -> Tensor:
    """How many batches a norm has seen."""
    tracked = getattr(norm, "num_batches_tracked", None)
    return unknown if tracked is None else tracked.float().view(1)
