"""`BranchNorm` against torch's batch norm."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dyrep import algebra
from dyrep.norm import BranchNorm

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
every_ndim = pytest.mark.parametrize("ndim", [1, 2, 3])
either_half = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


def image(ndim: int, batch: int = 4, channels: int = 3) -> Tensor:
    x = torch.randn(batch, channels, *(3, 4, 2)[:ndim], dtype=torch.float64)
    return x * torch.tensor([0.5, 2.0, 3.0][:channels]).reshape(1, -1, *(1,) * ndim) + 1.5


@torch.no_grad()
def twins(ndim: int, *, shift: bool) -> tuple[BranchNorm, nn.Module]:
    """A branch norm and torch's, with the same γ (and β) and running statistics."""
    ours, theirs = BranchNorm(3, shift=shift, dtype=torch.float64), NORMS[ndim](3, dtype=torch.float64)
    theirs.weight.copy_(torch.tensor([1.5, -0.7, 0.2]))
    theirs.bias.copy_(torch.tensor([0.3, -1.0, 2.0]))
    theirs.running_mean.copy_(torch.tensor([0.1, 0.2, -0.3]))
    theirs.running_var.copy_(torch.tensor([0.5, 2.0, 0.01]))
    ours.weight.copy_(theirs.weight)
    ours.running_var.copy_(theirs.running_var)
    if shift:
        ours.bias.copy_(theirs.bias)
        ours.running_mean.copy_(theirs.running_mean)
    return ours, theirs


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def gradients(y: Tensor, weights: Tensor, *wanted: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((torch.tanh(y) * weights).sum(), wanted)


@every_ndim
def test_with_shift_it_is_batch_norm_in_training_over_several_steps(ndim):
    ours, theirs = twins(ndim, shift=True)
    for _ in range(3):
        x = image(ndim).requires_grad_()
        weights = torch.randn_like(x)
        y, expected = ours(x), theirs(x)
        close(y, expected)
        actual = gradients(y, weights, x, ours.weight, ours.bias)
        for mine, other in zip(actual, gradients(expected, weights, x, theirs.weight, theirs.bias), strict=True):
            close(mine, other)
        close(ours.running_mean, theirs.running_mean)
        close(ours.running_var, theirs.running_var)


@every_ndim
def test_with_shift_it_is_batch_norm_in_eval_mode(ndim):
    ours, theirs = twins(ndim, shift=True)
    before = {key: value.clone() for key, value in ours.state_dict().items()}
    x = image(ndim).requires_grad_()
    y, expected = ours.eval()(x), theirs.eval()(x)
    close(y, expected)
    weights = torch.randn_like(x)
    actual = gradients(y, weights, x, ours.weight, ours.bias)
    for mine, other in zip(actual, gradients(expected, weights, x, theirs.weight, theirs.bias), strict=True):
        close(mine, other)
    assert all(torch.equal(ours.state_dict()[key], value) for key, value in before.items())


@every_ndim
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_without_shift_it_is_batch_norm_less_its_constant(ndim, training):
    ours, theirs = twins(ndim, shift=False)
    x = image(ndim)
    dims = [d for d in range(x.dim()) if d != 1]
    mean = x.mean(dims) if training else theirs.running_mean.clone()
    var = x.var(dims, correction=0) if training else theirs.running_var.clone()
    constant = theirs.bias - mean * theirs.weight / (var + theirs.eps).sqrt()
    y, expected = ours.train(training)(x), theirs.train(training)(x)
    close(y + constant.reshape(1, -1, *(1,) * ndim), expected)
    close(ours.running_var, theirs.running_var)


def test_without_shift_there_is_nothing_to_shift_with():
    norm = BranchNorm(3, shift=False)
    assert list(norm.state_dict()) == ["weight", "running_var"]
    assert norm.bias is None
    assert norm.running_mean is None
    assert not norm.eval()(torch.zeros(2, 3, 4)).any()


def test_state_with_shift_is_that_of_batch_norm_without_the_counter():
    keys = set(BranchNorm(3, shift=True).state_dict())
    assert keys == set(nn.BatchNorm1d(3).state_dict()) - {"num_batches_tracked"}


@every_ndim
def test_before_another_batch_norm_the_missing_shift_changes_neither_output_nor_gradients(ndim):
    conv = CONVS[ndim](2, 3, 3, padding=1, bias=False, dtype=torch.float64)
    ours, theirs = twins(ndim, shift=False)
    x = torch.randn(3, 2, *(4, 3, 5)[:ndim], dtype=torch.float64, requires_grad=True)
    results = []
    for inner in (ours, theirs):
        outer = NORMS[ndim](3, dtype=torch.float64)
        with torch.no_grad():
            outer.weight.copy_(torch.tensor([0.5, 1.5, -1.0]))
        y = outer(inner(conv(x)))
        weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
        wanted = (x, conv.weight, inner.weight, outer.weight, outer.bias)
        results.append((y, *gradients(y, weights, *wanted), outer.running_var))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, 1e-10)


@either_half
@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("parameters", ["half", "float32"])
def test_half_precision_input_keeps_its_dtype_and_is_rounded_like_its_parameters(half, shift, training, parameters):
    x = (torch.randn(8, 3, 16) * 3 + 1).to(half).requires_grad_()
    norm = BranchNorm(3, shift=shift, gamma=0.7, dtype=half if parameters == "half" else torch.float32)
    exact = BranchNorm(3, shift=shift, gamma=norm.weight[0].item(), dtype=torch.float64)
    norm.train(training)
    exact.train(training)
    y, expected = norm(x), exact(x.detach().double())
    assert y.dtype == half
    y.float().square().sum().backward()
    assert x.grad.dtype == half
    assert norm.weight.grad.dtype == norm.weight.dtype
    roundings = 1 if parameters == "float32" else 4
    allowed = roundings * torch.finfo(half).eps * (expected.abs() + (1 if shift else 0))
    assert ((y.double() - expected).abs() <= allowed).all()


@either_half
@pytest.mark.parametrize("parameters", ["half", "float32"])
@pytest.mark.parametrize("spread", [0.002, 300.0])
def test_statistics_of_half_precision_input_are_computed_in_float32(half, parameters, spread):
    x = (torch.randn(64, 2, 64) * spread).to(half)
    norm = BranchNorm(2, shift=True, dtype=half if parameters == "half" else torch.float32)
    expected = nn.BatchNorm1d(2, dtype=torch.float64)(x.double())
    allowed = 4 * torch.finfo(half).eps * (expected.abs() + 1)
    assert ((norm(x).double() - expected).abs() <= allowed).all()


@either_half
def test_the_variance_of_a_half_precision_input_far_from_zero_survives(half):
    x = (torch.randn(32, 2, 32) + 20).to(half)
    norm = BranchNorm(2, shift=False)
    norm.momentum = 1.0
    norm(x)
    close(norm.running_var.double(), x.double().var((0, 2)), 1e-5)


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
def test_first_and_second_gradients_are_right_through_the_batch_statistics(shift):
    norm = BranchNorm(2, shift=shift, dtype=torch.float64)
    parameters = tuple(norm.parameters())

    def run(x, *_):
        return norm(x)

    arguments = (torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True), *parameters)
    assert torch.autograd.gradcheck(run, arguments)
    assert torch.autograd.gradgradcheck(run, arguments)


@every_ndim
@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
@pytest.mark.parametrize("batch", [0, 1], ids=["empty batch", "one value"])
def test_too_few_values_are_normalised_by_the_running_statistics_and_leave_them_alone(ndim, shift, batch):
    norm, _ = twins(ndim, shift=shift)
    before = {key: value.clone() for key, value in norm.named_buffers()}
    x = torch.randn(batch, 3, *(1,) * ndim, dtype=torch.float64, requires_grad=True)
    y = norm.train()(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert torch.equal(y, norm.eval()(x))
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in norm.parameters())
    assert all(torch.equal(value, before[key]) for key, value in norm.named_buffers())


def test_equal_values_give_finite_outputs_and_gradients():
    norm = BranchNorm(2, shift=True)
    x = torch.full((4, 2, 3), 5.0, requires_grad=True)
    y = norm(x)
    y.square().sum().backward()
    assert y.abs().max() < 1e-3
    assert x.grad.isfinite().all()
    assert norm.weight.grad.isfinite().all()


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
def test_convert_sync_batchnorm_leaves_it_alone(shift):
    model = nn.Sequential(nn.Conv2d(2, 3, 1), BranchNorm(3, shift=shift), nn.BatchNorm2d(3))
    inner = model[1]
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted[1] is inner
    assert type(converted[1]) is BranchNorm
    assert isinstance(converted[2], nn.SyncBatchNorm)


def test_calibration_is_the_mean_of_unbiased_batch_statistics_whatever_was_there_before():
    norm, _ = twins(2, shift=True)
    batches = [image(2, batch) for batch in (2, 5, 3)]
    norm.start_calibration()
    for x in batches:
        norm(x)
    assert norm.finish_calibration() == 3
    close(norm.running_var, torch.stack([x.var((0, 2, 3)) for x in batches]).mean(0))
    close(norm.running_mean, torch.stack([x.mean((0, 2, 3)) for x in batches]).mean(0))


def test_after_calibration_the_moving_average_goes_on():
    norm, theirs = twins(2, shift=True)
    norm.start_calibration()
    norm(image(2))
    norm.finish_calibration()
    theirs.load_state_dict({**norm.state_dict(), "num_batches_tracked": torch.tensor(0)})
    x = image(2)
    norm(x)
    theirs(x)
    close(norm.running_var, theirs.running_var)
    close(norm.running_mean, theirs.running_mean)


def test_calibration_does_not_count_batches_without_spread():
    norm = BranchNorm(3, shift=False, dtype=torch.float64)
    norm.start_calibration()
    x = image(1)
    norm(x)
    norm(x[:0])
    norm(x[:1, :, :1])
    assert norm.finish_calibration() == 1
    close(norm.running_var, x.var((0, 2)))


def test_finishing_a_calibration_that_never_started_saw_nothing():
    assert BranchNorm(3, shift=False).finish_calibration() == 0


def test_importance_is_the_mean_magnitude_of_gamma_in_float32_and_carries_no_gradient():
    norm = BranchNorm(4, shift=False, dtype=torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1.0, -3.0, 0.5, -0.5]))
    assert norm.importance.dtype == torch.float32
    assert float(norm.importance) == 1.25
    assert not norm.importance.requires_grad


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
def test_fold_arguments_fold_the_norm_into_a_convolution(shift):
    conv = nn.Conv2d(2, 3, 3, bias=shift, dtype=torch.float64)
    norm, _ = twins(2, shift=shift)
    kernel, bias = algebra.fuse_norm(conv.weight, conv.bias, **norm.fold_arguments(torch.float64))
    x = torch.randn(2, 2, 5, 5, dtype=torch.float64)
    close(nn.functional.conv2d(x, kernel, bias), norm.eval()(conv(x)))
    assert (bias is None) == (not shift)


def test_fold_arguments_are_in_the_dtype_asked_for():
    arguments = BranchNorm(3, shift=True, dtype=torch.float16).fold_arguments(torch.float64)
    assert {arguments[key].dtype for key in ("var", "gamma", "beta", "mean")} == {torch.float64}


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
def test_make_identity_changes_nothing_in_eval_mode(shift):
    norm, _ = twins(2, shift=shift)
    parameters = list(norm.parameters())
    norm.make_identity_()
    x = image(2)
    close(norm.eval()(x), x)
    assert [id(p) for p in norm.parameters()] == [id(p) for p in parameters]


@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
def test_make_identity_in_some_channels_leaves_the_others(shift):
    norm, _ = twins(2, shift=shift)
    x = image(2)
    before = norm.eval()(x).detach()
    norm.make_identity_(torch.tensor([False, True, False]))
    after = norm(x)
    close(after[:, 1], x[:, 1])
    assert torch.equal(after[:, ::2], before[:, ::2])


def test_it_is_created_with_the_gamma_dtype_and_device_asked_for():
    norm = BranchNorm(2, shift=True, gamma=0.25, dtype=torch.float16, device="meta")
    tensors = list(norm.state_dict().values())
    assert {t.dtype for t in tensors} == {torch.float16}
    assert {t.device.type for t in tensors} == {"meta"}
    assert torch.equal(BranchNorm(2, shift=True, gamma=0.25).weight, torch.full((2,), 0.25))


def test_defaults_are_those_of_batch_norm():
    ours, theirs = BranchNorm(2, shift=True), nn.BatchNorm2d(2)
    assert (ours.eps, ours.momentum) == (theirs.eps, theirs.momentum)
    assert torch.equal(ours.weight, theirs.weight)


def test_channels_last_stays_channels_last():
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert BranchNorm(3, shift=True)(x).is_contiguous(memory_format=torch.channels_last)


def test_repr_says_whether_it_shifts_and_synchronises():
    norm = BranchNorm(3, shift=True)
    assert repr(norm) == "BranchNorm(3, shift=True)"
    norm.synchronized = True
    assert repr(norm) == "BranchNorm(3, shift=True, synchronized=True)"
    assert repr(BranchNorm(3, shift=False)) == "BranchNorm(3, shift=False)"


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shift", [True, False], ids=["shift", "no shift"])
def test_synchronised_over_one_rank_it_is_the_unsynchronised_norm(shift):
    results = []
    for synchronized in (False, True):
        norm, _ = twins(2, shift=shift)
        norm.synchronized = synchronized
        torch.manual_seed(1)
        x = image(2).requires_grad_()
        y = norm(x)
        results.append([y, *gradients(y, torch.randn_like(x), x, *norm.parameters()), *norm.buffers()])
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("batch", [0, 1], ids=["empty batch", "one value"])
def test_synchronised_too_few_values_on_all_ranks_leave_the_running_statistics_alone(batch):
    norm, _ = twins(2, shift=True)
    norm.synchronized = True
    before = {key: value.clone() for key, value in norm.named_buffers()}
    x = torch.randn(batch, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    y = norm(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    assert all(torch.equal(value, before[key]) for key, value in norm.named_buffers())


def test_synchronised_without_a_process_group_it_works_alone():
    norm, theirs = twins(2, shift=True)
    norm.synchronized = True
    x = image(2)
    close(norm(x), theirs(x))
