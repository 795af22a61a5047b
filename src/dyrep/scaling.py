"""What stands at the end of a branch: a norm, or a scale alone."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dyrep.errors import BranchError
from dyrep.norm import BranchNorm

SCALINGS = ("norm", "linear", "gated")
"""A branch norm; a factor per channel without statistics (linear); a branch norm that can be shut (gated)."""


class ChannelScale(nn.Module):
    """Multiply every channel by a learnable factor: what is left of a norm without statistics.

    A block that has nothing else in it is a linear function of its weights, so it runs as one convolution whose kernel
    is computed from them, in training too (OREPA's idea).

    Args:
        channels: number of channels.
        gamma: initial factor.
        device: where its tensor lives.
        dtype: its dtype.

    Example:
        >>> ChannelScale(2, gamma=0.5)(torch.ones(1, 2, 1, 1)).flatten()
        tensor([0.5000, 0.5000], grad_fn=<ViewBackward0>)
    """

    kind = "linear"
    normalises = False

    def __init__(
        self,
        channels: int,
        *,
        gamma: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # not called weight, so that a state dict tells it from a norm
        self.factor = nn.Parameter(torch.full((channels,), gamma, device=device, dtype=dtype))
        self.bias = None

    @property
    def weight(self) -> nn.Parameter:
        """The factors, under the name that a norm has for them."""
        return self.factor

    @property
    def importance(self) -> Tensor:
        """Mean of the factors' absolute values."""
        return self.weight.detach().float().abs().mean()

    def fold_arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """What `algebra.fuse_norm` and `algebra.unfuse_norm` need to know, in ``dtype``."""
        weight = self.weight.to(dtype)
        return {"var": torch.ones_like(weight), "eps": 0.0, "gamma": weight, "beta": None, "mean": None}

    @torch.no_grad()
    def make_identity_(self, channels: Tensor | None = None) -> None:
        """Set the factor to one (in ``channels``, a mask; default all)."""
        self.weight.masked_fill_(torch.ones_like(self.weight, dtype=torch.bool) if channels is None else channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scale ``x`` of shape ``(batch, channels, *spatial)``."""
        return x * self.weight.to(x.dtype).reshape(1, -1, *(1 for _ in x.shape[2:]))

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        return str(self.weight.numel())


class GatedNorm(BranchNorm):
    """A branch norm behind a gate that a search opens and shuts.

    Attributes:
        gate: 1 if the branch counts, 0 if not; what eval mode and folding go by.
        drawn: the gate of the training step under way, through which a search gets its gradient.

    Example:
        >>> norm = GatedNorm(2, shift=False)
        >>> _ = norm.gate.zero_()
        >>> norm(torch.randn(4, 2, 3, 3)).abs().max()
        tensor(0., grad_fn=<MaxBackward1>)
    """

    kind = "gated"
    gate: Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("gate", torch.ones((), device=self.weight.device, dtype=self.weight.dtype))
        self.drawn: Tensor | None = None

    def fold_arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """See `BranchNorm.fold_arguments`."""
        arguments = super().fold_arguments(dtype)
        for name in ("gamma", "beta"):
            if arguments[name] is not None:
                arguments[name] = arguments[name] * self.gate.to(dtype)
        return arguments

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """See `BranchNorm.affine`."""
        gate = (self.gate if self.drawn is None else self.drawn).to(self.weight.dtype)
        return self.weight * gate, None if self.bias is None else self.bias * gate

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, and multiply it by the gate."""
        y = super().forward(x)
        return y * (self.gate if self.drawn is None else self.drawn).to(y.dtype)

    def open_for_good_(self) -> BranchNorm:
        """Become an ordinary branch norm, in place."""
        self.__class__ = BranchNorm  # type: ignore[assignment]
        del self._buffers["gate"], self.drawn
        return self


Scaling: TypeAlias = BranchNorm | ChannelScale


def make_scaling(kind: str, channels: int, *, shift: bool, gamma: float = 1.0, **like: Any) -> Scaling:
    """Create what stands at the end of a branch.

    Args:
        kind: one of `SCALINGS`.
        channels: number of channels.
        shift: whether a norm has a shift; a scale alone never has.
        gamma: initial factor.
        like: its device and dtype.
    """
    if kind == "linear":
        return ChannelScale(channels, gamma=gamma, **like)
    if kind in ("norm", "gated"):
        norm = BranchNorm if kind == "norm" else GatedNorm
        return norm(channels, shift=shift, gamma=gamma, **like)
    raise BranchError(f"scaling={kind!r} is unknown; valid are {', '.join(SCALINGS)}")
