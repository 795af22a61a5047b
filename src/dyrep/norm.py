"""The norm at the end of every branch.

It divides by the batch's standard deviation and multiplies by a learnable γ, as batch norm does. A shift (mean and
β) exists only where the convolution has a bias that can absorb it: with a bias-free convolution nothing could take
over the shift when the branch is folded, so the norm scales and nothing else. If a batch norm follows the
convolution, as it nearly always does, the two are the same function in training, since that norm removes every
constant.

It is not a subclass of torch's batch norm on purpose: `SyncBatchNorm.convert_sync_batchnorm` would replace it by a
full one. It synchronises by itself instead, see `dyrep.sync_norms_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

EPS = 1e-5
MOMENTUM = 0.1


class BranchNorm(nn.Module):
    """Normalise by the batch's variance and scale by γ; with ``shift``, subtract the mean and add β as well.

    Args:
        channels: number of channels.
        shift: whether to subtract the mean and add β.
        gamma: initial γ.
        device: where its tensors live.
        dtype: their dtype.

    Example:
        >>> norm = BranchNorm(4, shift=False, gamma=0.01)
        >>> [name for name, _ in norm.named_parameters()], [name for name, _ in norm.named_buffers()]
        (['weight'], ['running_var'])
    """

    kind = "norm"
    normalises = True
    weight: nn.Parameter
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor

    def __init__(
        self,
        channels: int,
        *,
        shift: bool,
        gamma: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        like = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.full((channels,), gamma, **like))  # type: ignore[arg-type]
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels, **like)) if shift else None)  # type: ignore[arg-type]
        self.register_buffer("running_mean", torch.zeros(channels, **like) if shift else None)  # type: ignore[arg-type]
        self.register_buffer("running_var", torch.ones(channels, **like))  # type: ignore[arg-type]
        self.eps = EPS
        self.momentum = MOMENTUM
        self.synchronized = False
        self.process_group: Any = None
        self._calibrated_batches: int | None = None

    @property
    def importance(self) -> Tensor:
        """The paper's s_j: mean of |γ|."""
        return self.weight.detach().float().abs().mean()

    @property
    def spread(self) -> Tensor:
        """The standard deviation that eval mode divides by."""
        return (self.running_var + self.eps).sqrt()

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of what was seen, however small."""
        return self.running_var.sqrt()

    def start_calibration(self) -> None:
        """From now on running statistics are the cumulative mean over the batches seen."""
        self._calibrated_batches = 0

    def finish_calibration(self) -> int:
        """Return to the moving average; says how many batches were seen."""
        seen, self._calibrated_batches = self._calibrated_batches or 0, None
        return seen

    @torch.no_grad()
    def forget_dead_channels_(self) -> None:
        """Where calibration saw (next to) no spread, act as if it had not been done.

        Dividing by it would give a channel that is dead now, but may not stay so, a kernel hundreds of times too large.
        Dead is what is far below the other channels too: a signal that is small throughout is a signal.
        """
        dead = self.running_var <= (1e-3 * self.running_var.max()).clamp(max=self.eps)
        self.running_var.copy_(torch.where(dead, torch.ones_like(self.running_var), self.running_var))

    def fold_arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """What `algebra.fuse_norm` and `algebra.unfuse_norm` need to know, in ``dtype``."""
        return {
            "var": self.running_var.to(dtype),
            "eps": self.eps,
            "gamma": self.weight.to(dtype),
            "beta": None if self.bias is None else self.bias.to(dtype),
            "mean": None if self.running_mean is None else self.running_mean.to(dtype),
        }

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """γ and β as a training step uses them."""
        return self.weight, self.bias

    @property
    def normalises_alone(self) -> bool:
        """Whether it divides by the statistics of its own batch: it is trained, neither calibrated nor synchronised."""
        synchronised = self.synchronized and dist.is_initialized()
        return self.training and self._calibrated_batches is None and not synchronised

    @torch.no_grad()
    def make_identity_(self, channels: Tensor | None = None) -> None:
        """Choose γ and β so that in eval mode the norm changes nothing (in ``channels``, a mask; default all)."""
        mask = torch.ones_like(self.weight, dtype=torch.bool) if channels is None else channels
        self.weight.copy_(torch.where(mask, self.spread, self.weight))
        if self.bias is not None and self.running_mean is not None:
            self.bias.copy_(torch.where(mask, self.running_mean, self.bias))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` of shape ``(batch, channels, *spatial)``."""
        dims = [d for d in range(x.dim()) if d != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        values = x.numel() // max(x.shape[1], 1)
        synchronize = self.synchronized and self._calibrated_batches is None and dist.is_initialized()
        mean: Tensor | None
        # one value has no spread: as nothing can be learnt from it, the running statistics stand in
        if self.training and (values > 1 or synchronize):
            mean, var, count = self._batch_statistics(wide, dims, values, synchronize)
            self.track_(mean, var, count)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight.to(wide.dtype) * torch.rsqrt(var.to(wide.dtype) + self.eps)
        shape = (1, -1, *(1 for _ in dims[1:]))
        out = wide * scale.reshape(shape)
        if self.bias is not None and mean is not None:
            out = out + (self.bias - mean.to(scale.dtype) * scale).reshape(shape)
        return out.to(x.dtype)

    def _batch_statistics(
        self, x: Tensor, dims: list[int], values: int, synchronize: bool
    ) -> tuple[Tensor, Tensor, Tensor | int]:
        if not synchronize:
            var, mean = torch.var_mean(x, dim=dims, correction=0)
            return mean, var, values
        if values:
            local_var, local_mean = torch.var_mean(x, dim=dims, correction=0)
        else:  # an empty batch still has to take part in the exchange
            local_var = local_mean = x.sum(dim=dims)
        count = torch.full((1,), float(values), device=x.device, dtype=x.dtype)
        total = _AllReduce.apply(torch.cat([local_mean * values, count]), self.process_group)
        mean, count = total[:-1] / total[-1].clamp(min=1), total[-1].detach()
        spread = local_var + (local_mean - mean) ** 2
        var = _AllReduce.apply(spread * values, self.process_group) / count.clamp(min=1)
        enough = count > 1  # over all ranks; decided on the device
        var = torch.where(enough, var, self.running_var.to(var.dtype))
        if self.running_mean is not None:
            mean = torch.where(enough, mean, self.running_mean.to(mean.dtype))
        return mean, var, count

    @torch.no_grad()
    def track_(self, mean: Tensor, var: Tensor, count: Tensor | int) -> None:
        """Move running statistics towards those of a batch (``var`` is biased) with ``count`` values per channel."""
        momentum = self.momentum
        if self._calibrated_batches is not None:
            self._calibrated_batches += 1
            momentum = 1 / self._calibrated_batches
        bessel: Tensor | float
        if isinstance(count, Tensor):
            bessel = torch.where(count > 1, count / (count - 1).clamp(min=1), torch.ones_like(count))
        else:
            bessel = count / (count - 1)
        self.running_var.lerp_((var * bessel).to(self.running_var.dtype), momentum)
        if self.running_mean is not None:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)

    def extra_repr(self) -> str:
        """What ``print(model)`` shows."""
        text = f"{self.weight.numel()}, shift={self.bias is not None}"
        return text + ", synchronized=True" if self.synchronized else text


@torch.no_grad()
def track_all_(norms: Sequence[BranchNorm], mean: Tensor, var: Tensor, count: int, steps: int = 1) -> None:
    """`BranchNorm.track_` for several norms at once, none of which is being calibrated.

    Args:
        norms: the norms.
        mean: a row for each.
        var: a row for each, biased.
        count: values per channel.
        steps: how many training steps the batch stands for.
    """
    unbiased = var * (count / (count - 1))
    for momentum in {norm.momentum for norm in norms}:
        chosen = [k for k, norm in enumerate(norms) if norm.momentum == momentum]
        weight = 1 - (1 - momentum) ** steps
        _lerp_([norms[k].running_var for k in chosen], [unbiased[k] for k in chosen], weight)
        means = [(norms[k].running_mean, mean[k]) for k in chosen]
        shifted = [(running, batch) for running, batch in means if running is not None]
        if shifted:
            _lerp_([running for running, _ in shifted], [batch for _, batch in shifted], weight)


def _lerp_(running: list[Tensor], batch: list[Tensor], momentum: float) -> None:
    torch._foreach_lerp_(running, [b.to(r.dtype) for r, b in zip(running, batch, strict=True)], momentum)


def sync_norms_(model: nn.Module, process_group: Any = None, enabled: bool = True) -> nn.Module:
    """Share the batch statistics of all branch norms between ranks, as SyncBatchNorm does for the model's own.

    Branches that grow in a model with SyncBatchNorm layers do this by themselves; call it after converting a model
    that was expanded before.

    Example:
        >>> norm = BranchNorm(4, shift=True)
        >>> model = sync_norms_(nn.Sequential(norm))
        >>> norm.synchronized
        True
    """
    for module in model.modules():
        if isinstance(module, BranchNorm):
            module.synchronized = enabled
            module.process_group = process_group
    return model


class _AllReduce(torch.autograd.Function):
    """Sum over all ranks, with the gradient summed over all ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
