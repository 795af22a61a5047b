"""Two implementations of every operator, and what both are compared with: formulas in double precision."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import dyrep.kernels

CUDA = torch.cuda.is_available()
OURS = [f"{name}_triton" for name in ("assembling", "casting", "dividing", "moments", "patching", "pooling", "summing")]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

both_layouts = pytest.mark.parametrize("inner", [False, True], ids=["contiguous", "channels_last"])
with_and_without_shift = pytest.mark.parametrize("shift", [False, True], ids=["no shift", "shift"])


class Setting(NamedTuple):
    """Where tensors are, and what they consist of."""

    device: str
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    @property
    def wide(self) -> Setting:
        """The same with the dtype of parameters: float32 or wider."""
        return self._replace(dtype=torch.promote_types(self.dtype, torch.float32))

    def randn(self, *shape: int, inner: bool = False, mean: float = 0.0, grad: bool = True) -> Tensor:
        x = (torch.randn(shape, dtype=torch.float64) + mean).to(self.device, self.dtype)
        return laid_out(x, inner).requires_grad_(grad)

    def slice_of(self, x: Tensor) -> Tensor:
        """A tensor equal to another, but with gaps between its elements."""
        larger = torch.full([2 * size + 1 for size in x.shape], torch.nan, device=x.device, dtype=x.dtype)
        part = larger[tuple(slice(1, None, 2) for _ in x.shape)]
        part.copy_(x.detach())
        return part.requires_grad_(x.requires_grad)


def laid_out(x: Tensor, inner: bool) -> Tensor:
    """With channels innermost in memory, where that is a layout that PyTorch knows, or outermost."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d} if inner else {}
    return x.contiguous(memory_format=formats.get(x.dim(), torch.contiguous_format))


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal up to a share of the largest value."""
    assert actual.shape == expected.shape
    expected = expected.detach().double()
    largest = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.detach().double(), expected, rtol=0, atol=tolerance * largest)


def agree(
    actual: Sequence[Tensor], expected: Sequence[Tensor], inputs: Sequence[Tensor], tolerance: float
) -> tuple[Tensor, ...]:
    """Outputs are close, and so are the gradients of all inputs along random gradients of the outputs."""
    for mine, exact in zip(actual, expected, strict=True):
        close(mine, exact, tolerance)
    along = [torch.randn_like(output) for output in actual]
    grads = torch.autograd.grad(list(actual), list(inputs), along)
    exact_grads = torch.autograd.grad(list(expected), list(inputs), [grad.double() for grad in along])
    for grad, exact, x in zip(grads, exact_grads, inputs, strict=True):
        assert grad.dtype == x.dtype
        close(grad, exact, tolerance)
    return grads


def in_both_layouts(shapes: Sequence[tuple[int, ...]]) -> pytest.MarkDecorator:
    """Every shape, in the one or two layouts that it has."""
    cases = [(shape, inner) for shape in shapes for inner in (False, True) if len(shape) > 3 or not inner]
    ids = ["x".join(map(str, shape)) + " channels_last" * inner for shape, inner in cases]
    return pytest.mark.parametrize(("shape", "inner"), cases, ids=ids)


def over_channels(value: Tensor, like: Tensor) -> Tensor:
    return value.reshape(1, -1, *(1,) * (like.dim() - 2))


def rows_of(x: Tensor) -> Tensor:
    """Shape ``(images x positions, channels)``, in float64."""
    return x.double().movedim(1, -1).reshape(-1, x.shape[1])


_AWAY = "interpreted."  # modules put away stay in `sys.modules`, or Triton complains of leaks when Python ends


def _swapped(name: str) -> bool:
    if name.startswith("triton."):
        return not name.startswith("triton._C")
    return name == "triton" or name.removeprefix("dyrep.kernels.") in OURS


def _take_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _swapped(name)}


@contextmanager
def interpreter() -> Iterator[None]:
    """Triton's interpreter is on, and runs our kernels on tensors of the CPU.

    `triton.jit` asks for it when a function is decorated, those of Triton's own library included. So both are imported
    once more, with the interpreter on, and put away again at the end.
    """
    package = vars(dyrep.kernels)
    before, attributes = _take_out(), {name: package.pop(name) for name in OURS if name in package}
    sys.modules.update({name[len(_AWAY) :]: sys.modules[name] for name in list(sys.modules) if name.startswith(_AWAY)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        try:
            for name in OURS:
                package[name] = importlib.import_module(f"dyrep.kernels.{name}")
            yield
        finally:
            for name in OURS:
                package.pop(name, None)
            sys.modules.update({_AWAY + name: module for name, module in _take_out().items()})
            sys.modules.update(before)
            package.update(attributes)


@contextmanager
def implementation(name: str) -> Iterator[str]:
    """Operators run as ``name`` says on tensors of the device that this gives."""
    if name == "torch":
        assert os.environ.get("TRITON_INTERPRET") != "1"
        yield "cpu"
        return
    if reason := dyrep.kernels.unavailable():
        pytest.skip(reason)
    if CUDA:
        yield "cuda"
    else:
        with interpreter():
            yield "cpu"
