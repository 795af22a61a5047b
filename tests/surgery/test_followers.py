"""Which norm alone reads a convolution's output, and why there is none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import dyrep
from dyrep.surgery.followers import following_norms
from surgery_helpers import assert_same_picture, conv_bn_net, images, picture

FROZEN = "it is in eval mode; frozen norms stay, call model.train() first if it is not meant to be one"
SHARED = "something else than one norm reads its output too"


class Net(nn.Module):
    """Convolutions ``a`` and ``b`` and norms ``m`` and ``n``, wired up by a function."""

    def __init__(self, wiring, **others: nn.Module) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.m, self.n = (nn.BatchNorm2d(3) for _ in range(2))
        for name, module in others.items():
            setattr(self, name, module)
        self.wiring = wiring

    def forward(self, x: Tensor):
        return self.wiring(self, x)


def found(model: nn.Module, *names: str, batch=None) -> tuple[dict[str, str], dict[str, str]]:
    convs = {name: model.get_submodule(name) for name in names}
    return following_norms(model, convs, torch.randn(2, 3, 6, 6) if batch is None else batch)


def test_in_a_sequence_it_is_the_next_layer():
    assert found(conv_bn_net(), "0", "3") == ({"0": "1", "3": "4"}, {})


@pytest.mark.parametrize(
    ("conv", "norm", "shape"),
    [
        (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (2, 3, 8)),
        (nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), (2, 3, 5, 5, 5)),
        (nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), (2, 3, 8, 8)),
    ],
    ids=["1-d", "3-d", "synchronised"],
)
def test_every_batch_norm_is_found(conv, norm, shape):
    assert found(nn.Sequential(conv, norm), "0", batch=torch.randn(shape)) == ({"0": "1"}, {})


def test_every_convolution_of_resnet18_is_followed_by_its_norm():
    model = torchvision.models.resnet18()
    convs = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    norms, missing = following_norms(model, convs, torch.randn(1, 3, 64, 64))
    assert missing == {}
    assert len(norms) == 20
    for conv, norm in norms.items():
        expected = conv.replace("downsample.0", "downsample.1") if "downsample" in conv else conv.replace("conv", "bn")
        assert norm == expected


def test_only_the_convolutions_asked_for_are_looked_at():
    assert found(conv_bn_net(), "3") == ({"3": "4"}, {})


WIRINGS = {
    "skip connection around the norm": (lambda net, x: (y := net.a(x)) + net.m(y), "a", SHARED),
    "read by a function first": (lambda net, x: (F.relu(y := net.a(x)), net.m(y))[1], "a", SHARED),
    "read by a function afterwards": (lambda net, x: (net.m(y := net.a(x)), y.mean())[0], "a", SHARED),
    "read by another convolution": (lambda net, x: net.m(y := net.a(x)) + net.b(y), "a", SHARED),
    "read in place": (lambda net, x: net.m(net.a(x).add_(1)), "a", SHARED),
    "read by two norms": (lambda net, x: net.m(y := net.a(x)) + net.n(y), "a", SHARED),
    "read twice by its norm": (lambda net, x: net.m(y := net.a(x)) + net.m(y), "a", SHARED),
    "returned too": (lambda net, x: (net.m(y := net.a(x)), y), "a", SHARED),
    "returned too, in a dict": (lambda net, x: {"y": net.m(y := net.a(x)), "features": [y]}, "a", SHARED),
    "norm shared by two convolutions": (
        lambda net, x: net.m(net.a(x)) + net.m(net.b(x)),
        "a",
        "the norm 'm' reads other outputs too",
    ),
    "norm that reads something else too": (
        lambda net, x: net.m(net.a(x)) + net.m(x),
        "a",
        "the norm 'm' reads other outputs too",
    ),
    "called twice": (lambda net, x: net.m(net.a(net.a(x))), "a", "the convolution runs 2 times per batch"),
    "never called": (lambda net, x: net.m(net.b(x)), "a", "the convolution runs 0 times per batch"),
    "no norm": (lambda net, x: F.relu(net.a(x)), "a", "no batch norm reads its output"),
    "norm after something else": (lambda net, x: net.m(F.relu(net.a(x))), "a", "no batch norm reads its output"),
    "norm as a function": (
        lambda net, x: F.batch_norm(net.a(x), net.m.running_mean, net.m.running_var),
        "a",
        "no batch norm reads its output",
    ),
}


def test_a_norm_is_kept_if_a_hook_changes_what_it_reads_or_it_is_frozen_or_shared():
    net = Net(lambda net, x: net.n(net.b(net.m(net.a(x)))))
    assert found(net, "a") == ({"a": "m"}, {})
    handle = net.a.register_forward_hook(lambda _, __, y: y + 1)
    assert found(net, "a") == ({}, {"a": "a hook changes its output"})
    handle.remove()
    net.a.register_forward_hook(lambda _, __, y: None)  # one that only looks
    assert found(net, "a") == ({"a": "m"}, {})
    net.m.bias.requires_grad_(False)
    assert found(net, "a") == ({}, {"a": "the norm 'm' has a γ or β that is frozen"})
    net.m.bias.requires_grad_()
    net.m.weight = net.n.weight
    assert found(net, "a") == ({}, {"a": "the norm 'm' shares its parameters with another module"})


@pytest.mark.parametrize("kind", WIRINGS)
def test_where_no_norm_alone_reads_the_output_the_reason_is_given(kind):
    wiring, name, reason = WIRINGS[kind]
    net = Net(wiring)
    assert found(net, name) == ({}, {name: reason})


@pytest.mark.parametrize(
    "wiring",
    [
        lambda net, x: net.m(net.a(x)) + x,
        lambda net, x: net.m(nn.Identity()(net.a(x))),
        lambda net, x: net.n(net.b(net.m(net.a(x)))),
        lambda net, x: (y := net.a(x), y.shape, net.m(y))[2],
        lambda net, x: [net.m(net.a(x)), net.n(net.b(x))],
    ],
    ids=["skip around both", "identity between", "in a row", "only its shape is read", "side by side"],
)
def test_a_norm_that_alone_reads_the_output_is_found(wiring):
    assert found(Net(wiring), "a") == ({"a": "m"}, {})


def test_outputs_of_two_convolutions_are_told_apart():
    net = Net(lambda net, x: net.n(net.a(x)) + F.relu(net.b(x)))
    assert found(net, "a", "b") == ({"a": "n"}, {"b": "no batch norm reads its output"})


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (nn.BatchNorm2d(3, affine=False), "it has no γ and β, or no running statistics"),
        (nn.BatchNorm2d(3, track_running_stats=False), "it has no γ and β, or no running statistics"),
        (nn.InstanceNorm2d(3), "InstanceNorm2d is not one of torch's batch norms"),
    ],
    ids=["not affine", "no statistics", "instance norm"],
)
def test_a_norm_that_cannot_be_replaced_is_named_with_the_reason(norm, reason):
    norms, missing = found(nn.Sequential(nn.Conv2d(3, 3, 3), norm), "0")
    assert norms == {}
    assert missing["0"].startswith(f"the norm '1' cannot be replaced: {reason}")


def test_a_group_norm_is_no_norm_to_replace():
    norms, missing = found(nn.Sequential(nn.Conv2d(3, 3, 3), nn.GroupNorm(1, 3)), "0")
    assert norms == {}
    assert set(missing) == {"0"}


def test_a_norm_frozen_in_eval_mode_stays():
    model = conv_bn_net().train()
    model[1].eval()
    assert found(model, "0", "3") == ({"3": "4"}, {"0": f"the norm '1' cannot be replaced: {FROZEN}"})


def test_in_a_model_in_eval_mode_every_norm_counts_as_frozen():
    norms, missing = found(conv_bn_net().eval(), "0", "3")
    assert norms == {}
    assert missing["3"] == f"the norm '4' cannot be replaced: {FROZEN}"


def test_a_norm_that_has_stepped_aside_already_is_not_found_again():
    model, x = conv_bn_net(), images(1)[0]
    dyrep.convert_(model, "repvgg", example_input=x, include=["0"])
    norms, missing = found(model, "0", "3", batch=x)
    assert norms == {"3": "4"}
    assert set(missing) == {"0"}


def test_looking_leaves_modes_buffers_hooks_and_random_numbers_alone():
    model = nn.Sequential(nn.Dropout(0.3), *conv_bn_net()).train()
    model[2].eval()
    before, state, x = picture(model), torch.get_rng_state(), torch.ones(2, 3, 8, 8)
    found(model, "1", "4", batch=x)
    assert_same_picture(picture(model), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_fails_is_left_as_it_was():
    def fail(net: Net, x: Tensor) -> Tensor:
        raise RuntimeError(f"no more after {net.m(net.a(x)).shape}")

    net = Net(fail).train()
    before = picture(net)
    with pytest.raises(RuntimeError, match="no more after"):
        found(net, "a")
    assert_same_picture(picture(net), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


@pytest.mark.parametrize(
    ("batch", "forward"),
    [
        ({"x": torch.randn(2, 3, 6, 6), "label": torch.zeros(2)}, None),
        ((torch.randn(2, 3, 6, 6), torch.zeros(2)), None),
        ({"image": torch.randn(2, 3, 6, 6)}, lambda model, batch: model(batch["image"])),
    ],
    ids=["dict", "tuple", "own forward"],
)
def test_batches_of_every_kind_are_taken(batch, forward):
    net = Net(lambda net, x: net.m(net.a(x)))
    assert following_norms(net, {"a": net.a}, batch, forward) == ({"a": "m"}, {})


def test_norms_that_need_not_be_replaced_may_be_frozen_or_do_more_but_have_running_statistics():
    timm = pytest.importorskip("timm")
    readers = {
        "in eval mode": nn.BatchNorm2d(3).eval(),
        "frozen": nn.BatchNorm2d(3).requires_grad_(False),
        "with an activation": timm.layers.BatchNormAct2d(3),
        "without statistics": nn.BatchNorm2d(3, track_running_stats=False),
        "torchvision's frozen one": torchvision.ops.FrozenBatchNorm2d(3),
    }
    kept, (batch,) = {}, images(1)
    for name, reader in readers.items():
        model = nn.Sequential(nn.Conv2d(3, 3, 3), reader)
        assert following_norms(model, {"0": model[0]}, batch)[0] == {}
        norms, missing = following_norms(model, {"0": model[0]}, batch, replaceable=False)
        kept[name] = norms == {"0": "1"}
        assert kept[name] or missing == {"0": "the norm '1' has no running statistics that could change"}
    assert [name for name, found in kept.items() if found] == list(readers)[:3]
