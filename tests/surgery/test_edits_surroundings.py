"""Edits beside hooks, autocast, compilation, generators and memory formats."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dyrep
from dyrep.block import RepConv
from surgery_helpers import (
    conv,
    conv_bn_net,
    images,
    relative_change,
)
from training import eval_output


def test_hooks_aliases_references_and_parameters_survive_both_edits():
    model = nn.ModuleDict({"net": conv_bn_net()})
    net, module, weight, calls = model["net"], model["net"][3], model["net"][3].weight, []
    model["alias"] = module
    module.note = "kept"
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_full_backward_hook(lambda *_: calls.append("backward"))
    weight.register_hook(lambda _: calls.append("weight"))
    x, everything = images(1)[0], ["before", "forward", "weight", "backward"]
    for edit in (lambda: dyrep.expand_(net, "3", calibration=[x]), lambda: dyrep.cut_(net, "3")):
        edit()
        assert net[3] is model["alias"] is module
        assert module.weight is weight
        assert module.note == "kept"
        assert isinstance(module, nn.Conv2d)
        calls.clear()
        net(x).sum().backward()
        assert sorted(calls) == sorted(everything)


def test_edits_keep_modes_of_the_convolution():
    model = conv_bn_net().train()
    model[3].eval()
    dyrep.expand_(model, ["0", "3"], calibration=images(1), origin_norm="calibrated")
    assert all(m.training for m in model[0].modules())
    assert not any(m.training for m in model[3].modules())


def test_expansion_inside_autocast_is_exact_outside():
    model, x = conv_bn_net(), images(1)[0]
    before = eval_output(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dyrep.expand_(model, "3", gamma=0.5, calibration=images(3))
        dyrep.cut_(model, "3", ["1x1"])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert relative_change(eval_output(model, x), before) <= 1e-5


def test_edits_inside_an_autocast_context_take_effect_there():
    model, x = nn.Sequential(conv()).eval(), torch.randn(4, 8, 8, 8)
    bfloat16 = 16 * torch.finfo(torch.bfloat16).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = model(x)
        dyrep.expand_(model, "0", gamma=1.0, calibration=[x])
        assert relative_change(model(x), before) <= bfloat16
        dyrep.cut_(model, "0")
        assert relative_change(model(x), before) <= bfloat16


def test_training_step_under_autocast_after_expansion_gives_finite_gradients_to_every_parameter():
    model = conv_bn_net()
    dyrep.expand_(model, ["0", "3"], calibration=images(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(images(1)[0]).square().mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert parameter.grad.dtype == torch.float32


def test_compiled_model_is_expanded_and_cut_through_the_wrapper():
    torch.compiler.reset()
    model, x = conv_bn_net().eval(), images(1)[0]
    compiled = torch.compile(model, backend="aot_eager")
    before = compiled(x).detach()
    dyrep.expand_(compiled, "3", ["1x1", "residual"], gamma=0.5, calibration=images(2))
    assert isinstance(model[3], dyrep.RepConv2d)
    assert relative_change(compiled(x), before) <= 1e-5
    with torch.no_grad():
        model[3].branches["1x1"].conv.weight.mul_(2)
    assert relative_change(compiled(x), before) > 1e-2
    assert relative_change(compiled(x), model(x)) <= 1e-5
    dyrep.cut_(compiled, "3")
    assert relative_change(compiled(x), model(x)) <= 1e-5
    plain = dyrep.deploy(compiled)
    assert type(plain) is nn.Sequential


def test_compiled_model_is_still_compiled_after_many_edits():
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model, x = nn.Sequential(conv()).eval(), torch.randn(2, 8, 8, 8)
    compiled = torch.compile(model, backend=backend)
    before = compiled(x)
    for _ in range(6):
        for edit in (dyrep.expand_, dyrep.cut_):
            seen = len(graphs)
            edit(compiled, "0", ["1x1"])
            assert relative_change(compiled(x), before) <= 1e-5
            assert len(graphs) > seen


def test_same_generator_seed_gives_the_same_branches_and_leaves_the_global_generator_alone():
    model, batches = conv_bn_net(), images(2)
    twins = [copy.deepcopy(model) for _ in range(3)]
    state = torch.get_rng_state()
    for twin, seed in zip(twins, (5, 5, 6), strict=True):
        generator = torch.Generator().manual_seed(seed)
        dyrep.expand_(twin, ["0", "3"], calibration=batches, generator=generator, origin_norm="calibrated")
    assert torch.equal(torch.get_rng_state(), state)
    first, second, other = (twin.state_dict() for twin in twins)
    assert all(torch.equal(first[key], second[key]) for key in first)
    key = "3.branches.1x1.conv.weight"
    assert not torch.equal(first[key], other[key])


def test_without_a_generator_the_global_seed_decides():
    model = conv_bn_net()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    for twin in (first, second):
        torch.manual_seed(7)
        dyrep.expand_(twin, "3")
    key = "branches.1x1-KxK.point.weight"
    assert torch.equal(first[3].state_dict()[key], second[3].state_dict()[key])
    dyrep.cut_(second, "3")
    dyrep.expand_(second, "3")
    assert not torch.equal(first[3].state_dict()[key], second[3].state_dict()[key])


def branch_weights(block: RepConv) -> list[torch.Tensor]:
    return [p for p in block.branches.parameters() if p.dim() == 4]


def test_channels_last_conv_grows_channels_last_branches():
    model = conv_bn_net().to(memory_format=torch.channels_last)
    x = images(1)[0].to(memory_format=torch.channels_last)
    before = eval_output(model, x)
    dyrep.expand_(model, "3", calibration=[x])
    assert branch_weights(model[3])
    for weight in branch_weights(model[3]):
        assert weight.is_contiguous(memory_format=torch.channels_last)
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)
    features = eval_output(model[:4], x)
    assert features.is_contiguous(memory_format=torch.channels_last)
    assert relative_change(eval_output(model, x), before) <= 1e-5
    dyrep.cut_(model, "3")
    assert model[3].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("groups", [1, 8], ids=["dense", "depthwise"])
def test_contiguous_conv_grows_contiguous_branches(groups):
    model = nn.Sequential(conv(groups=groups))
    dyrep.expand_(model, "0")
    for weight in branch_weights(model[0]):
        shape = torch.empty(weight.shape)
        assert weight.stride() == shape.stride()
