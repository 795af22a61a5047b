"""A batch norm that steps aside and comes back, against torch's own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from dyrep.errors import IneligibleLayerError
from dyrep.passing import PassedNorm, refusal, step_aside_, step_back_

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
every_ndim = pytest.mark.parametrize("ndim", [1, 2, 3])


def image(ndim: int = 2, batch: int = 4) -> Tensor:
    x = torch.randn(batch, 3, *(3, 4, 2)[:ndim], dtype=torch.float64)
    return x * torch.tensor([0.5, 2.0, 3.0]).reshape(1, -1, *(1,) * ndim) + 1.5


@torch.no_grad()
def trained_norm(ndim: int = 2, **arguments) -> nn.Module:
    """A batch norm with γ, β and statistics as after some training."""
    norm = NORMS[ndim](3, dtype=torch.float64, **arguments)
    norm.weight.copy_(torch.tensor([1.5, -0.7, 0.2]))
    norm.bias.copy_(torch.tensor([0.3, -1.0, 2.0]))
    norm.running_mean.copy_(torch.tensor([0.1, 0.2, -0.3]))
    norm.running_var.copy_(torch.tensor([0.5, 2.0, 0.01]))
    return norm


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Stepping aside ----------------------------------------------------------------------------------------------------


@every_ndim
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_input_passes_unchanged(ndim, training):
    norm, x = step_aside_(trained_norm(ndim)).train(training), image(ndim)
    before = x.clone()
    assert norm(x) is x
    assert torch.equal(x, before)


def test_it_stays_the_same_object_with_the_same_keys_values_and_parameters():
    norm = trained_norm()
    state = {key: value.clone() for key, value in norm.state_dict().items()}
    parameters, name = dict(norm.named_parameters()), id(norm)
    passed = step_aside_(norm)
    assert id(passed) == name
    assert type(passed) is PassedNorm
    assert list(passed.state_dict()) == list(state)
    assert all(torch.equal(passed.state_dict()[key], value) for key, value in state.items())
    assert all(parameter is parameters[key] for key, parameter in passed.named_parameters())


def test_it_is_a_batch_norm_no_more():
    passed = step_aside_(trained_norm())
    assert not isinstance(passed, nn.modules.batchnorm._NormBase)
    assert repr(passed) == "PassedNorm(3, in place of BatchNorm2d)"


@every_ndim
@pytest.mark.parametrize("momentum", [0.1, 0.3])
def test_statistics_are_those_torch_would_have_tracked(ndim, momentum):
    passed, reference = step_aside_(trained_norm(ndim, momentum=momentum)), trained_norm(ndim, momentum=momentum)
    for factor in (1.0, 2.0, 0.5):
        x = image(ndim) * factor
        passed(x)
        reference(x)
    close(passed.running_mean, reference.running_mean)
    close(passed.running_var, reference.running_var)


def test_a_norm_that_averages_over_all_batches_watches_with_torch_s_usual_momentum():
    passed, reference = step_aside_(trained_norm(momentum=None)), trained_norm(momentum=0.1)
    for _ in range(3):
        x = image()
        passed(x)
        reference(x)
    close(passed.running_mean, reference.running_mean)
    close(passed.running_var, reference.running_var)
    assert step_back_(passed, None).momentum is None


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_input_is_watched_in_float32(half):
    passed, reference = step_aside_(nn.BatchNorm2d(3)), nn.BatchNorm2d(3)
    x = (image() + 20).to(half)
    assert passed(x).dtype == half
    reference(x.float())
    assert passed.running_var.dtype == torch.float32
    close(passed.running_mean, reference.running_mean, 1e-6)
    close(passed.running_var, reference.running_var, 1e-6)


def test_norms_in_half_precision_keep_their_dtype():
    passed = step_aside_(nn.BatchNorm2d(3).to(torch.bfloat16))
    passed(image().to(torch.bfloat16))
    assert passed.running_mean.any()
    step_back_(passed, torch.ones(3, dtype=torch.float64))
    assert {value.dtype for value in passed.state_dict().values()} == {torch.bfloat16, torch.int64}


def test_nothing_is_watched_in_eval_mode():
    passed = step_aside_(trained_norm()).eval()
    passed(image())
    assert torch.equal(passed.running_mean, trained_norm().running_mean)
    assert torch.equal(passed.running_var, trained_norm().running_var)


@pytest.mark.parametrize("batch", [0, 1], ids=["no value", "one value"])
def test_too_few_values_leave_the_statistics_alone(batch):
    passed = step_aside_(trained_norm())
    x = torch.randn(batch, 3, 1, 1, dtype=torch.float64)
    assert passed(x) is x
    assert torch.equal(passed.running_mean, trained_norm().running_mean)
    assert torch.equal(passed.running_var, trained_norm().running_var)


def test_gradients_pass_unchanged_and_none_reaches_the_parameters():
    passed, x = step_aside_(trained_norm()), image().requires_grad_()
    weights = torch.randn_like(x)
    (passed(x) * weights).sum().backward()
    assert torch.equal(x.grad, weights)
    assert passed.weight.grad is None
    assert passed.running_mean.grad_fn is None


@pytest.mark.parametrize("trained", [(True, True), (False, True), (True, False), (False, False)], ids=str)
def test_parameters_are_frozen_while_aside_and_as_before_afterwards(trained):
    norm = trained_norm()
    norm.weight.requires_grad_(trained[0])
    norm.bias.requires_grad_(trained[1])
    passed = step_aside_(norm)
    assert not any(parameter.requires_grad for parameter in passed.parameters())
    back = step_back_(passed, None)
    assert (back.weight.requires_grad, back.bias.requires_grad) == trained


def test_converting_to_sync_batch_norm_leaves_it_alone():
    model = nn.Sequential(step_aside_(trained_norm()), nn.BatchNorm2d(3))
    passed = model[0]
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[0] is passed
    assert type(model[0]) is PassedNorm
    assert type(model[1]) is nn.SyncBatchNorm


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deep copy", "pickle"])
def test_a_copy_is_equal_and_independent_and_steps_back_alone(how):
    passed, x = step_aside_(trained_norm()), image()
    twin = how(passed)
    twin(x)
    assert torch.equal(passed.running_mean, trained_norm().running_mean)
    passed(x)
    close(twin.running_mean, passed.running_mean)
    assert type(step_back_(twin, None)) is nn.BatchNorm2d
    assert type(passed) is PassedNorm
    close(twin.eval()(x), x)


# Coming back -------------------------------------------------------------------------------------------------------


@every_ndim
@pytest.mark.parametrize("shifted", [True, False], ids=["shift", "no shift"])
@pytest.mark.parametrize("eps", [1e-5, 1e-3])
def test_back_in_eval_mode_it_adds_the_shift_and_nothing_else(ndim, shifted, eps):
    passed = step_aside_(trained_norm(ndim, eps=eps))
    for _ in range(2):
        passed(image(ndim))
    shift = torch.tensor([0.4, -3.0, 7.0], dtype=torch.float64) if shifted else None
    back, x = step_back_(passed, shift), image(ndim)
    expected = x if shift is None else x + shift.reshape(1, 3, *(1,) * ndim)
    close(back.eval()(x), expected)


def test_back_it_is_a_batch_norm_with_nothing_left_of_its_time_aside():
    norm = trained_norm()
    attributes = set(vars(norm))
    weight, bias = norm.weight, norm.bias
    back = step_back_(step_aside_(norm), torch.ones(3, dtype=torch.float64))
    assert back is norm
    assert type(back) is nn.BatchNorm2d
    assert set(vars(back)) == attributes
    assert back.weight is weight
    assert back.bias is bias
    assert list(back.state_dict()) == list(trained_norm().state_dict())
    assert all(value.grad_fn is None for value in back.state_dict().values())


@pytest.mark.parametrize("shifted", [True, False], ids=["shift", "no shift"])
def test_back_in_training_mode_it_is_nearly_the_identity_for_the_distribution_it_watched(shifted):
    passed = step_aside_(trained_norm(momentum=0.02))
    shift = torch.tensor([0.4, -3.0, 7.0], dtype=torch.float64)
    for _ in range(300):
        passed(image(batch=64))
    back, x = step_back_(passed, shift if shifted else None).train(), image(batch=512)
    y = back(x - shift.reshape(1, 3, 1, 1) if shifted else x)
    assert ((y - x).square().mean((0, 2, 3)).sqrt() <= 0.05 * x.std((0, 2, 3))).all()


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_every_batch_norm_of_torch_comes_back_as_what_it_was(kind):
    norm = kind(3)
    assert refusal(norm) == ""
    assert type(step_back_(step_aside_(norm), None)) is kind


# Who cannot --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.GroupNorm(1, 3), "GroupNorm is not one of torch's batch norms"),
        (nn.InstanceNorm2d(3, affine=True), "InstanceNorm2d is not one of torch's batch norms"),
        (type("Own", (nn.BatchNorm2d,), {})(3), "Own is not one of torch's batch norms"),
        (nn.BatchNorm2d(3, affine=False), "it has no γ and β, or no running statistics"),
        (nn.BatchNorm2d(3, track_running_stats=False), "it has no γ and β, or no running statistics"),
    ],
    ids=["group norm", "instance norm", "subclass", "not affine", "no statistics"],
)
def test_a_norm_that_cannot_take_over_what_is_folded_is_refused_and_left_alone(norm, reason):
    kind, attributes = type(norm), dict(vars(norm))
    assert refusal(norm).startswith(reason)
    with pytest.raises(IneligibleLayerError, match=rf"^this norm cannot be replaced: {reason}"):
        step_aside_(norm)
    assert type(norm) is kind
    assert vars(norm) == attributes


def test_a_norm_that_is_aside_already_is_refused():
    passed = step_aside_(trained_norm())
    with pytest.raises(IneligibleLayerError, match="PassedNorm is not one of torch's batch norms"):
        step_aside_(passed)
    assert passed.kind is nn.BatchNorm2d


def test_a_norm_that_was_in_eval_mode_is_refused_as_frozen():
    norm = trained_norm()
    assert refusal(norm, training=True) == ""
    assert refusal(norm, training=False) == (
        "it is in eval mode; frozen norms stay, call model.train() first if it is not meant to be one"
    )
