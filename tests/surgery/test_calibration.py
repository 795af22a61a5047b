"""Calibration measures the new norms exactly and leaves no other trace."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dyrep
from dyrep.block import RepConv
from dyrep.errors import CalibrationError
from dyrep.norm import BranchNorm
from surgery_helpers import Named, assert_same_picture, conv_bn_net, global_states, images, picture, unbiased_variance


def channel_mean(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1).mean(dim=1)


def batch_scaled(x: Tensor) -> Tensor:
    return x / (x.var(dim=(0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()


def mean_of(values) -> Tensor:
    return torch.stack(list(values)).mean(0)


def branch_maps(block: RepConv) -> dict:
    """What every branch computes before its last norm, written out for a 3x3 convolution with padding 1."""
    weights = {name: parameter.detach() for name, parameter in block.branches.named_parameters()}
    stride = block.stride

    def pointwise_kernel(x: Tensor) -> Tensor:
        inner = batch_scaled(F.conv2d(x, weights["1x1-KxK.point.weight"]))
        return F.conv2d(inner, weights["1x1-KxK.conv.weight"], stride=stride, padding=1)

    return {
        "1x1": lambda x: F.conv2d(x, weights["1x1.conv.weight"], stride=stride),
        "1x1-KxK": pointwise_kernel,
        "1x1-AVG": lambda x: F.avg_pool2d(F.conv2d(x, weights["1x1-AVG.point.weight"]), 3, stride, padding=1),
        "1xK": lambda x: F.conv2d(x, weights["1xK.conv.weight"], stride=stride, padding=(0, 1)),
        "Kx1": lambda x: F.conv2d(x, weights["Kx1.conv.weight"], stride=stride, padding=(1, 0)),
        "residual": lambda x: x,
    }


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_running_statistics_equal_an_independent_computation(bias, stride):
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, stride, padding=1, bias=bias),
        nn.BatchNorm2d(6),
    ).double()
    batches = images(4, dtype=torch.float64)
    plain = copy.deepcopy(model).train()
    with torch.no_grad():
        inputs = [plain[:3](batch) for batch in batches]
    dyrep.expand_(model, "3", calibration=batches)
    block = model[3]
    expected_branches = {"1x1", "1x1-KxK", "1x1-AVG", "1xK", "Kx1", *(["residual"] if stride == 1 else [])}
    assert set(block.branches) == expected_branches
    measured = {name: [branch_maps(block)[name](x) for x in inputs] for name in block.branches}
    close = {"rtol": 1e-10, "atol": 1e-12}
    for name, branch in block.branches.items():
        expected = mean_of(unbiased_variance(y) for y in measured[name])
        torch.testing.assert_close(branch.norm.running_var, expected, **close, msg=name)
        if bias:
            expected = mean_of(channel_mean(y) for y in measured[name])
            torch.testing.assert_close(branch.norm.running_mean, expected, **close, msg=name)
        else:
            assert branch.norm.running_mean is None
    inner = block.branches["1x1-KxK"]
    expected = mean_of(unbiased_variance(F.conv2d(x, inner.point.weight.detach())) for x in inputs)
    torch.testing.assert_close(inner.inner_norm.running_var, expected, **close)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_calibrated_origin_norm_is_the_identity_around_the_statistics_of_the_output(bias):
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=bias)).double()
    batches = images(4, dtype=torch.float64)
    with torch.no_grad():
        outputs = [model(batch) for batch in batches]
    dyrep.expand_(model, "0", gamma=1e-9, calibration=batches, origin_norm="calibrated")
    norm = model[0].origin_norm
    assert torch.equal(norm.weight.detach(), (norm.running_var + 1e-5).sqrt())
    close = {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(norm.running_var, mean_of(unbiased_variance(y) for y in outputs), **close)
    if bias:
        assert torch.equal(norm.bias.detach(), norm.running_mean)
        torch.testing.assert_close(norm.running_mean, mean_of(channel_mean(y) for y in outputs), **close)
    else:
        assert norm.bias is norm.running_mean is None


def test_only_the_new_norms_of_an_expanded_conv_are_measured():
    model = conv_bn_net()
    dyrep.expand_(model, "3", ["1x1", "1x1-KxK"], calibration=images(2), origin_norm="calibrated")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    dyrep.expand_(model, "3", ["residual"], calibration=images(3))
    dyrep.expand_(model, "3.branches.1x1-KxK.conv", ["1x1"], calibration=images(3))
    after = dict(model.named_buffers())
    for name, buffer in buffers.items():
        assert torch.equal(after[name], buffer), name
    new = set(after) - set(buffers)
    assert new == {
        "3.branches.residual.norm.running_var",
        "3.branches.1x1-KxK.conv.branches.1x1.norm.running_var",
    }
    assert all(not torch.equal(after[name], torch.ones_like(after[name])) for name in new)


def test_new_norms_return_to_the_moving_average_afterwards():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False)).double().train()
    x, y = torch.randn(2, 8, 4, 8, 8, dtype=torch.float64)
    dyrep.expand_(model, "0", ["residual"], calibration=[x])
    norm = model[0].branches["residual"].norm
    torch.testing.assert_close(norm.running_var, unbiased_variance(x), rtol=1e-12, atol=0)
    model(y)
    expected = 0.9 * unbiased_variance(x) + 0.1 * unbiased_variance(y)
    torch.testing.assert_close(norm.running_var, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("arguments", "count"), [({"calibration_batches": 3}, 3), ({}, 20)], ids=["three", "default"])
def test_no_more_batches_are_drawn_than_wanted(arguments, count):
    drawn = []

    def stream():
        while True:
            drawn.append(1)
            yield torch.randn(2, 3, 8, 8)

    dyrep.expand_(conv_bn_net(), "0", calibration=stream(), **arguments)
    assert len(drawn) == count


def test_fewer_batches_than_wanted_are_used_as_they_are():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False)).double()
    batches = images(2, channels=4, dtype=torch.float64)
    dyrep.expand_(model, "0", ["residual"], calibration=iter(batches))
    expected = mean_of(unbiased_variance(batch) for batch in batches)
    torch.testing.assert_close(model[0].branches["residual"].norm.running_var, expected, rtol=1e-12, atol=0)


class Counter(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_layers_after_the_last_one_of_interest_run_for_the_first_batch_only():
    convs = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)]
    counters = [Counter() for _ in range(4)]
    model = nn.Sequential(counters[0], convs[0], counters[1], convs[1], counters[2], convs[2], counters[3])
    dyrep.expand_(model, ["3", "1"], calibration=images(5))
    assert [counter.calls for counter in counters] == [5, 5, 1, 1]


class Twice(nn.Module):
    """One convolution, called on two different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.after = Counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.conv(3 * torch.relu(self.conv(x))))


def test_conv_called_twice_is_measured_on_both_calls_of_every_batch():
    model = Twice().double()
    batches = images(3, channels=4, dtype=torch.float64)
    with torch.no_grad():
        seconds = [3 * torch.relu(model.conv(batch)) for batch in batches]
    dyrep.expand_(model, "conv", ["residual"], calibration=batches)
    expected = mean_of(unbiased_variance(x) for x in (*batches, *seconds))
    torch.testing.assert_close(model.conv.branches["residual"].norm.running_var, expected, rtol=1e-12, atol=0)
    assert model.after.calls == 1


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            [{"image": torch.randn(2, 3, 8, 8), "label": torch.zeros(2)}],
            r"none of the batch's keys \(image, label\) is an argument of Named\.forward \(pixels, mask\); "
            r"say how to run the model with forward=lambda model, batch: \.\.\.",
        ),
        (["a path"], "cannot find the model's input in a batch of type str; say how to run the model with forward="),
        ([()], "cannot find the model's input in a batch of type tuple"),
        ([("a path", 1)], "cannot find the model's input in a batch of type tuple"),
        ([], r"calibration got no batches \(an empty or used-up iterable\): .*or calibration=None to go without"),
        (iter([]), "calibration got no batches"),
        (
            [torch.full((2, 3, 8, 8), float("nan"))],
            "statistics at layer 'conv' are not finite: its input holds NaN",
        ),
        (
            [torch.full((2, 3, 8, 8), float("inf"))],
            "statistics at layer 'conv' are not finite: its input holds NaN",
        ),
    ],
    ids=["no matching key", "string", "empty tuple", "tuple of string", "empty list", "used up", "NaN", "inf"],
)
def test_batches_that_cannot_serve_are_refused_and_leave_no_trace(batches, message):
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, states = picture(model, optimizer), global_states()
    with pytest.raises(CalibrationError, match=message):
        dyrep.expand_(
            model, "conv", calibration=batches, optimizer=optimizer, generator=torch.Generator().manual_seed(0)
        )
    assert_same_picture(picture(model, optimizer), before)
    assert global_states() == states
    assert not model.conv._forward_hooks
    assert not model.conv._forward_pre_hooks


def test_zero_calibration_batches_are_refused_like_none_at_all():
    with pytest.raises(CalibrationError, match="calibration got no batches"):
        dyrep.expand_(Named(), "conv", calibration=images(2), calibration_batches=0)


class Functional(Named):
    """Reads the weight instead of calling the convolution."""

    def forward(self, pixels: Tensor) -> Tensor:
        return F.conv2d(pixels, self.conv.weight)


def test_layer_that_is_never_called_is_refused_by_name():
    with pytest.raises(CalibrationError, match=r"calibration never reached 'conv': .*it may read its weight directly"):
        dyrep.expand_(Functional(), "conv", calibration=images(1))


def test_error_in_the_users_forward_leaves_no_trace():
    model = conv_bn_net()
    before, states = picture(model), global_states()

    def forward(model, batch):
        model(batch + torch.randn(()))
        raise KeyError("label")

    with pytest.raises(KeyError, match="label"):
        dyrep.expand_(
            model, "3", calibration=images_of_zeros(), forward=forward, generator=torch.Generator().manual_seed(0)
        )
    assert_same_picture(picture(model), before)
    assert global_states() == states
    assert not model[3]._forward_hooks


def images_of_zeros() -> list[Tensor]:
    return [torch.zeros(2, 3, 8, 8)]


def test_several_layers_are_measured_in_one_pass_as_if_each_were_alone():
    net, batches = nn.Sequential(Counter(), *conv_bn_net(torch.float64)), images(3, dtype=torch.float64)
    together, alone = copy.deepcopy(net), copy.deepcopy(net)
    dyrep.expand_(together, ["1", "4"], ["1x1", "residual"][:1], calibration=batches)
    assert together[0].calls == 3
    dyrep.expand_(alone, "4", ["1x1"], calibration=batches)
    ours, theirs = (model[4].branches["1x1"] for model in (together, alone))
    assert not torch.equal(ours.conv.weight, theirs.conv.weight)
    with torch.no_grad():
        inputs = [net[:4].train()(batch) for batch in batches]
    for branch in (ours, theirs):
        expected = mean_of(unbiased_variance(F.conv2d(x, branch.conv.weight.detach())) for x in inputs)
        torch.testing.assert_close(branch.norm.running_var, expected, rtol=1e-10, atol=0)


def test_no_gradient_is_recorded_and_existing_gradients_stay():
    model = conv_bn_net()
    model(images(1)[0]).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    dyrep.expand_(model, "3", calibration=images(2))
    for name, parameter in model.named_parameters():
        if name in gradients:
            assert torch.equal(parameter.grad, gradients[name])
        else:
            assert parameter.grad is None
    assert all(not buffer.requires_grad for buffer in model.buffers())


def test_without_calibration_running_statistics_are_those_of_a_fresh_norm():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1))
    dyrep.expand_(model, "0")
    for norm in (m for m in model.modules() if isinstance(m, BranchNorm)):
        assert torch.equal(norm.running_var, torch.ones(4))
        assert norm.running_mean is None or torch.equal(norm.running_mean, torch.zeros(4))


def test_unbatched_images_are_measured_like_a_batch_of_one():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)).double()
    image = torch.randn(3, 8, 8, dtype=torch.float64)
    before = model(image).detach()
    dyrep.expand_(model, "0", ["1x1"], calibration=[image], origin_norm="calibrated")
    mapped = F.conv2d(image[None], model[0].branches["1x1"].conv.weight.detach())
    expected = unbiased_variance(mapped)
    torch.testing.assert_close(model[0].branches["1x1"].norm.running_var, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.eval()(image), before, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch", [torch.zeros(0, 3, 8, 8), torch.zeros(1, 3, 3, 3)], ids=["empty", "one value"])
def test_batches_without_enough_values_are_an_error_that_names_the_layer(batch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    with pytest.raises(CalibrationError, match="too few values to measure '0'"):
        dyrep.expand_(model, "0", calibration=[batch])
    assert type(model[0]) is nn.Conv2d


def test_channels_that_calibration_sees_dead_do_not_blow_up_the_kernel():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)).eval()
    x = torch.randn(8, 4, 8, 8)
    x[:, 1] = 0
    before, largest = model(x), model[0].weight.abs().max()
    dyrep.expand_(model, "0", calibration=[x])
    assert model[0].weight.abs().max() < 2 * largest
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-6)
    dyrep.cut_(model, "0")
    all_dead = torch.zeros(8, 4, 8, 8)
    dyrep.expand_(model, "0", calibration=[all_dead])
    assert model[0].weight.abs().max() < 2 * largest


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("arguments", [{"relative_gamma": True}, {"origin_norm": "calibrated", "gamma": 1e-9}])
def test_layers_with_a_small_output_are_measured_as_they_are(scale, arguments):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8, eps=1e-12)
    model = nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), norm).train()
    model[2].weight.data.mul_(scale)
    batches = [torch.randn(16, 4, 10, 10) for _ in range(21)]
    before = model(batches[0])
    dyrep.expand_(model, "2", calibration=batches[1:], **arguments)
    assert (model(batches[0]) - before).abs().max() / before.abs().max() < 2e-3


def test_a_signal_that_is_small_throughout_is_not_taken_for_a_dead_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False)).train()
    batches = [torch.randn(16, 4, 10, 10) * 1e-3 for _ in range(21)]
    before = model(batches[0])
    dyrep.expand_(model, "0", calibration=batches[1:], relative_gamma=True)
    assert (model(batches[0]) - before).abs().max() / before.abs().max() < 1e-2


HOOKS = {
    "scales": lambda module, args, output: 100 * output,
    "clips": lambda module, args, output: output.relu() + 1,
    "makes a tuple": lambda module, args, output: (output, output),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("settings", [{"relative_gamma": True}, {"origin_norm": "calibrated"}], ids=str)
def test_hooks_that_make_something_else_of_the_output_are_not_measured(kind, settings):
    class Net(nn.Module):
        def __init__(self, hooked):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            if hooked:
                self.conv.register_forward_hook(HOOKS[kind])

        def forward(self, x):
            return self.conv(x)

    hooked, plain, batches = Net(True), Net(False), images(2)
    for model in (hooked, plain):
        generator = torch.Generator().manual_seed(0)
        dyrep.expand_(model, "conv", ["1x1", "1xK"], calibration=batches, generator=generator, **settings)
        assert dyrep.costs(model, batches[0]).macs > 0
    ours, theirs = hooked.state_dict(), plain.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
