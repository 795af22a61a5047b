"""The gates of a search: how they are ranked, drawn, opened, and settled."""

import copy
import json

import pytest
import torch
from methods_helpers import blocks, look_trained_, relative_error, small_net
from torch import nn

import dyrep
from dyrep.errors import BranchError
from dyrep.methods.gates import Gates, settle_
from dyrep.norm import BranchNorm
from training import eval_output

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LAYERS = {"0": 6, "3": 7, "6": 6}  # gates per block: the residual fits the second alone


def gated_net(replace="conv+norm", keep=0.34):
    model = small_net()
    dyrep.convert_(model, "repnas", example_input=X, replace=replace)
    look_trained_(model)
    return model, Gates(model, keep)


def mask_of(gates, keep):
    """1 for the branches named, layer by layer, and 0 for the others."""
    return torch.tensor([float(branch in keep[layer]) for layer, branch in gates.names])


def test_every_branch_of_every_block_has_a_gate_and_the_origin_comes_first():
    model, gates = gated_net()
    expected = [(name, branch) for name, block in blocks(model).items() for branch in ("KxK", *block.branches)]
    assert gates.names == expected
    assert {layer: sum(name == layer for name, _ in gates.names) for layer in blocks(model)} == LAYERS


@pytest.mark.parametrize(("keep", "kept"), [(1.0, 19), (0.5, 9), (0.34, 6), (0.06, 1), (0.001, 1)])
def test_a_share_of_the_gates_is_kept_but_never_none(keep, kept):
    assert gated_net(keep=keep)[1].kept == kept


def test_a_plain_model_has_no_gates():
    assert Gates(small_net(), 0.34).names == []
    model = small_net()
    dyrep.convert_(model, "dbb", example_input=X)
    assert Gates(model, 0.34).names == []


@pytest.mark.parametrize("keep", [0.06, 0.2, 0.34, 0.8, 1.0])
def test_the_highest_of_the_whole_network_are_open_and_no_block_is_empty(keep):
    _, gates = gated_net(keep=keep)
    for seed in range(20):
        scores = torch.randn(len(gates.names), generator=torch.Generator().manual_seed(seed))
        order = sorted(range(len(scores)), key=lambda i: -float(scores[i]))
        highest = {gates.names[i] for i in order[: gates.kept]}
        empty = set(LAYERS) - {layer for layer, _ in highest}
        expected = highest | {(layer, "KxK") for layer in empty}
        found = gates.ranked(scores)
        assert set(found.tolist()) <= {0.0, 1.0}
        assert {name for name, value in zip(gates.names, found, strict=True) if value} == expected


def test_blocks_left_empty_keep_their_original_kernel_alone():
    _, gates = gated_net(keep=0.2)
    scores = torch.tensor([1.0 if layer == "3" else -1.0 for layer, _ in gates.names])
    opened = [name for name, value in zip(gates.names, gates.ranked(scores), strict=True) if value]
    assert len(opened) == gates.kept + 2
    assert [name for name in opened if name[0] != "3"] == [("0", "KxK"), ("6", "KxK")]


def test_drawn_gates_are_zero_or_one_and_pass_on_the_derivative_of_a_sigmoid():
    _, gates = gated_net()
    strengths = torch.linspace(-2, 2, len(gates.names), requires_grad=True)
    torch.manual_seed(3)
    drawn = gates.draw(strengths)
    torch.manual_seed(3)
    uniform = torch.rand(len(strengths))
    noisy = strengths.detach() + torch.log(uniform / (1 - uniform))
    # adding a number to 1 and taking it away again may round the last digit
    torch.testing.assert_close(drawn.detach(), gates.ranked(noisy), rtol=0, atol=2e-7)
    weights = torch.randn(len(strengths))
    drawn.backward(weights)
    soft = torch.sigmoid(noisy)
    torch.testing.assert_close(strengths.grad, weights * soft * (1 - soft))
    assert strengths.grad.abs().min() > 0


def open_shares(gates, strengths, draws=400):
    return torch.stack([gates.draw(strengths).round() for _ in range(draws)]).mean(0)


def test_a_strong_gate_is_nearly_always_open_and_a_weak_one_hardly_ever():
    _, gates = gated_net(keep=0.5)
    strengths = torch.zeros(len(gates.names))
    strengths[2], strengths[4] = 20.0, -20.0
    shares = open_shares(gates, strengths)
    assert shares[2] > 0.99
    assert shares[4] < 0.01
    assert gates.names[4][1] != "KxK"  # which may be opened where nothing else is


def test_without_preference_all_gates_are_open_equally_often():
    _, gates = gated_net(keep=0.5)
    shares = open_shares(gates, torch.zeros(len(gates.names)), draws=2000)
    # nine of nineteen; a block is hardly ever left empty. 2000 draws have a standard deviation of 0.011
    assert (shares - 9 / 19).abs().max() < 0.06


def muted(model, keep):
    """A copy of a model whose other branches have γ = β = 0."""
    twin = copy.deepcopy(model)
    for layer, block in blocks(twin).items():
        for branch, norm in {"KxK": block.origin_norm, **{n: b.norm for n, b in block.branches.items()}}.items():
            if branch not in keep[layer]:
                norm.weight.data.zero_()
                if norm.bias is not None:
                    norm.bias.data.zero_()
    return twin


KEEPS = {
    "with origins": {"0": ["KxK", "1x1"], "3": ["KxK", "residual"], "6": ["KxK", "1xK", "Kx1"]},
    "without origins": {"0": ["1x1-AVG"], "3": ["1x1-KxK", "residual"], "6": ["Kx1"]},
    "nothing but an origin": {"0": ["KxK"], "3": ["1x1-KxK", "residual"], "6": ["KxK", "Kx1"]},
}


@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
@pytest.mark.parametrize("which", KEEPS)
def test_eval_mode_and_folding_go_by_the_open_gates(which, replace):
    model, gates = gated_net(replace)
    everything = eval_output(model, X)
    gates.set_open(mask_of(gates, KEEPS[which]))
    expected = eval_output(muted(model, KEEPS[which]), X)
    assert relative_error(expected, everything) > 1e-2
    assert relative_error(eval_output(model, X), expected) < 1e-6
    assert relative_error(eval_output(dyrep.deploy(model), X), expected) < 1e-5
    gates.set_open(torch.ones(len(gates.names)))
    assert torch.equal(eval_output(model, X), everything)


def test_gates_of_a_step_count_instead_of_the_open_ones_until_they_are_taken_away():
    model, gates = gated_net()
    before = eval_output(model, X)
    gates.set_drawn(mask_of(gates, KEEPS["without origins"]))
    assert relative_error(eval_output(model, X), eval_output(muted(model, KEEPS["without origins"]), X)) < 1e-6
    gates.set_drawn(None)
    assert torch.equal(eval_output(model, X), before)


def test_gates_are_saved_with_the_model():
    model, gates = gated_net()
    gates.set_open(mask_of(gates, KEEPS["with origins"]))
    twin, _ = gated_net()
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(eval_output(twin, X), eval_output(model, X))


@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
@pytest.mark.parametrize("which", KEEPS)
def test_settling_keeps_the_function_and_drops_what_is_shut(which, replace):
    keep = KEEPS[which]
    model, gates = gated_net(replace)
    gates.set_open(mask_of(gates, keep))
    before = eval_output(model, X)
    parameters = {id(p): p for p in model.parameters()}
    weights = {layer: [id(p) for b, m in blocks(model)[layer].branches.items() if b not in keep[layer]
                       for p in m.parameters()] for layer in keep}  # fmt: skip
    gone = settle_(model, keep)
    assert torch.equal(eval_output(model, X), before)
    left = {id(p) for p in model.parameters()}
    assert {id(p) for dropped in gone.values() for p in dropped} == set(parameters) - left
    for layer, ids in weights.items():
        assert set(ids) <= {id(p) for p in gone[layer]}
        block = model.get_submodule(layer)
        assert list(block.branches) == [branch for branch in block.branches if branch in keep[layer]]
        assert set(block.branches) == set(keep[layer]) - {"KxK"}
        assert block.origin_off == ("KxK" not in keep[layer])
        assert (block.origin_norm is None) == block.origin_off
        assert block.weight.requires_grad != block.origin_off
    norms = [m for m in model.modules() if isinstance(m, BranchNorm)]
    assert all(type(norm) is BranchNorm for norm in norms)
    assert not any(key.endswith(".gate") for key in model.state_dict())
    assert relative_error(eval_output(dyrep.deploy(model), X), before) < 1e-5
    assert all(p.requires_grad for p in dyrep.deploy(model).parameters())


@pytest.mark.parametrize("which", KEEPS)
def test_what_is_settled_trains_on_and_deploys(which):
    model, _ = gated_net()
    settle_(model, KEEPS[which])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    before = eval_output(model, X)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert relative_error(eval_output(model, X), before) > 1e-4
    report = dyrep.verify(model, dyrep.deploy(model), X)
    assert report.passed, str(report)


@pytest.mark.parametrize("which", KEEPS)
def test_the_structure_of_what_is_settled_is_built_again_with_all_its_weights(which):
    model, _ = gated_net()
    settle_(model, KEEPS[which])
    twin = small_net()
    dyrep.restructure_(twin, json.loads(json.dumps(dyrep.structure(model))))
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(eval_output(twin, X), eval_output(model, X))
    assert dyrep.structure(twin) == dyrep.structure(model)


def test_an_origin_that_is_left_out_stays_zero_in_a_loop_that_keeps_its_gradients():
    model, _ = gated_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def step():
        optimizer.zero_grad(set_to_none=False)
        model(X).square().mean().backward()
        optimizer.step()

    step()
    settle_(model, KEEPS["without origins"])
    step()
    assert not model[0].weight.any()
    assert dyrep.verify(model, dyrep.deploy(model), X).passed


@pytest.mark.parametrize("replace", ["conv", "conv+norm"])
def test_an_origin_that_is_left_out_comes_back_by_cutting_the_branches(replace):
    model, gates = gated_net(replace)
    gates.set_open(mask_of(gates, KEEPS["without origins"]))
    before = eval_output(model, X)
    settle_(model, KEEPS["without origins"])
    if replace == "conv":
        dyrep.cut_(model, "3", ["residual"])
        assert not model[3].origin_off
        assert model[3].weight.requires_grad
    else:  # there is nothing that could take its shift
        with pytest.raises(BranchError, match="cut all its branches at once, or none"):
            dyrep.cut_(model, "3", ["residual"])
        assert model[3].origin_off
    assert relative_error(eval_output(model, X), before) < 1e-5
    dyrep.cut_(model, ["0", "3", "6"])
    assert [type(model[i]) for i in (0, 3, 6)] == [nn.Conv2d] * 3
    assert all(p.requires_grad for p in model.parameters())
    assert relative_error(eval_output(model, X), before) < 1e-5
