"""`fan_out` changes neither values nor gradients."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import both_layouts, close

from dyrep.kernels import fan_out


@both_layouts
@pytest.mark.parametrize("readers", [1, 2, 3, 7])
def test_the_gradient_is_the_sum_of_those_of_all_readers(setting, readers, inner):
    x = setting.randn(2, 5, 7, 33, inner=inner)
    weights = [setting.randn(2, 5, 7, 33, inner=k % 2 == 0, grad=False) for k in range(readers)]
    read = fan_out(x, readers)
    assert len(read) == readers
    assert all(torch.equal(y, x) for y in read)
    (grad,) = torch.autograd.grad(sum((y * w).sum() for y, w in zip(read, weights, strict=True)), x)
    assert grad.dtype == setting.dtype
    close(grad, torch.stack(weights).double().sum(0), setting.tolerance)


@pytest.mark.parametrize("used", [(0,), (1, 3), (0, 1, 4), (0, 1, 3, 4)], ids=str)
def test_readers_that_are_not_used_add_nothing(single, used):
    x = single.randn(2, 3, 5)
    read = fan_out(x, 5)
    sum((k + 1) * read[k].sum() for k in used).backward()
    assert torch.equal(x.grad, torch.full_like(x, sum(k + 1 for k in used)))


def test_nothing_is_copied(single):
    x = single.randn(2, 3, 4, 4, inner=True)
    assert all(y.data_ptr() == x.data_ptr() and y.stride() == x.stride() for y in fan_out(x, 3))


def test_a_slice_of_a_larger_tensor_can_be_read(single):
    x = single.slice_of(single.randn(2, 3, 4))
    weights = [single.randn(2, 3, 4, grad=False) for _ in range(3)]
    sum((y * w).sum() for y, w in zip(fan_out(x, 3), weights, strict=True)).backward()
    close(x.grad, torch.stack(weights).double().sum(0), 1e-6)


def test_without_a_gradient_it_is_the_tensor_itself(single):
    fixed, trained = single.randn(2, 3, grad=False), single.randn(2, 3)
    assert all(y is fixed for y in fan_out(fixed, 3))
    with torch.no_grad():
        assert all(y is trained for y in fan_out(trained, 3))


def test_gradients_are_added_in_float32_before_they_are_rounded(triton_only):
    x = torch.zeros(5, device=triton_only.device, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.full_like(x, value) for value in (256.0, 1.0, 1.0, 1.0, 1.0)]  # 256 + 1 rounds to 256
    (grad,) = torch.autograd.grad(fan_out(x, 5), x, grads)
    assert (grad == 260).all()


@pytest.mark.parametrize("readers", [2, 3])
def test_gradients_of_gradients_are_not_lost(single, readers):
    x, w = single.randn(4), single.randn(4)
    out = sum((y * w ** (k + 1)).sum() for k, y in enumerate(fan_out(x, readers)))
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum() + w.sum(), w)
    close(second, 1 + sum((k + 1) * w**k for k in range(readers)), 1e-5)
