"""`cast_all` is a cast of each."""

from __future__ import annotations

import os

import pytest
import torch
from kernel_helpers import OPCHECKS, Setting, both_layouts
from torch import Tensor

from dyrep.kernels import cast_all

SHAPES = [(5, 7, 3, 3), (3, 2), (4, 1, 1, 1), (1,), (), (17, 257)]  # the last is more than a program copies


def same(actual: Tensor, expected: Tensor) -> None:
    """Equal; up to the last digit where Triton's interpreter narrows, which cuts digits off."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2**-7 if interpreted else 0, atol=0)


def test_every_tensor_and_gradient_is_cast(setting):
    to = torch.float32 if setting.dtype == torch.bfloat16 else torch.bfloat16
    tensors = [setting.randn(*shape) for shape in SHAPES]
    cast = cast_all(tensors, to)
    along = [torch.randn_like(tensor) for tensor in cast]
    for tensor, result in zip(tensors, cast, strict=True):
        same(result, tensor.to(to))
    for grad, given in zip(torch.autograd.grad(cast, tensors, along), along, strict=True):
        same(grad, given.to(setting.dtype))


@pytest.mark.parametrize("to", [torch.float64, torch.float16], ids=str)
def test_to_any_dtype(single, to):
    tensors = [single.randn(3, 2), single.randn(5)]
    for tensor, result in zip(tensors, cast_all(tensors, to), strict=True):
        same(result, tensor.to(to))


@both_layouts
def test_results_lie_in_memory_as_the_tensors_do(single, inner):
    (result,) = cast_all([single.randn(4, 5, 3, 3, inner=inner)], torch.bfloat16)
    assert result.is_contiguous(memory_format=torch.channels_last if inner else torch.contiguous_format)


def test_views_are_taken_as_they_are(single):
    base = single.randn(6, 4)
    views = [single.slice_of(single.randn(3, 5)), base.T, base[:, :3], base[:, :1].expand(6, 5), base[2]]
    for view in views:  # one at a time: all are cast by PyTorch where one has gaps
        same(cast_all([view], torch.bfloat16)[0], view.bfloat16())
    for view, result in zip(views, cast_all(views, torch.bfloat16), strict=True):
        same(result, view.bfloat16())


def test_gradients_may_lie_in_memory_as_they_like(single):
    tensors = [single.randn(4, 5, 3, 3, inner=True), single.randn(3, 4)]
    cast = cast_all(tensors, torch.bfloat16)
    wide = [single.randn(3, grad=False).expand(4, 5, 3, 3), single.randn(4, 3, grad=False).T]
    along = [grad.bfloat16() for grad in wide]
    for grad, given in zip(torch.autograd.grad(cast, tensors, along), along, strict=True):
        same(grad, given.float())


def test_gradients_of_some_are_enough(single):
    tensors = [single.randn(3, 2), single.randn(4), single.randn(5), single.randn(6, grad=False)]
    cast = cast_all(tensors, torch.bfloat16)
    (cast[1] * 2).sum().backward()
    same(tensors[1].grad, torch.full_like(tensors[1], 2))
    assert not any(tensor.grad.any() for tensor in (tensors[0], tensors[2]) if tensor.grad is not None)
    assert tensors[3].grad is None


def test_what_needs_no_cast_is_returned_itself(single):
    tensors = [single.randn(3, 2), single.randn(4)]
    assert all(a is b for a, b in zip(cast_all(tensors, torch.float32), tensors, strict=True))
    assert cast_all([], torch.bfloat16) == []


def test_without_anything_to_train_there_is_no_graph(single):
    assert not cast_all([single.randn(3, grad=False)], torch.bfloat16)[0].requires_grad
    with torch.no_grad():
        assert not cast_all([single.randn(3)], torch.bfloat16)[0].requires_grad


def test_one_that_has_the_dtype_already_is_copied(single):
    narrow, wide = single._replace(dtype=torch.bfloat16).randn(4), single.randn(3)
    cast = cast_all([wide, narrow], torch.bfloat16)
    same(cast[0], wide.bfloat16())
    assert torch.equal(cast[1], narrow)


def test_each_gradient_is_cast_to_the_dtype_of_its_own_tensor(single):
    narrow, wide = single._replace(dtype=torch.bfloat16).randn(4), single.randn(3)
    along = torch.tensor([1.001, 1.002, 1.003], device=single.device)
    (grad,) = torch.autograd.grad(cast_all([narrow, wide], torch.float32)[1], wide, along)
    assert torch.equal(grad, along)


@both_layouts
def test_the_operator_is_registered_as_pytorch_wants_it(inner):
    setting = Setting("cpu", torch.float32)
    tensors = [setting.randn(4, 5, 3, 3, inner=inner), setting.randn(3, 2)]
    torch.library.opcheck(torch.ops.dyrep.cast_all.default, (tensors, torch.bfloat16), test_utils=OPCHECKS)
