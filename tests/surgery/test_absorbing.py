"""Whole blocks absorbed while training goes on."""

import copy

import pytest
import torch
from torch import nn

import dyrep
from dyrep.errors import OptimizerError
from dyrep.surgery.absorbing import absorb_, norms_behind
from dyrep.surgery.lengths import turning_scale
from dyrep.surgery.momentum import carried_momentum
from training import eval_output, make_batches, make_net, train_epoch

BATCHES = make_batches()


def make_blocks(model=None, method="dbb7", **options):
    """A network of blocks that has been trained for a while, and its optimizer."""
    model = make_net() if model is None else model
    dyrep.convert_(model, method, **({"replace": "conv"} | options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_epoch(model, optimizer, BATCHES)
    return model, optimizer


def blocks_of(model):
    return {name: model.get_submodule(name) for name in dyrep.structure(model)["blocks"]}


def test_the_function_stays_and_kernels_have_the_length_and_momentum_of_their_blocks():
    model, optimizer = make_blocks()
    norms = norms_behind(model, blocks_of(model), BATCHES[0])
    assert norms == {"0": "1", "5": "6"}
    plain, before = dyrep.deploy(model), eval_output(model, BATCHES[0][0])
    scales = {name: turning_scale(block, torch.Generator().manual_seed(0)) for name, block in blocks_of(model).items()}
    momenta = {name: carried_momentum(block, optimizer) for name, block in blocks_of(model).items()}
    for name in scales:
        scale = float(scales[name]) if name in norms else 1.0
        (edit,), factors = absorb_(model, name, norms.get(name), optimizer=optimizer)
        assert (factors is None) == (name not in norms)
        assert edit.detail == ({"norm": norms[name], "scale": scale} if name in norms else {})
        conv = model.get_submodule(name)
        torch.testing.assert_close(conv.weight, plain.get_submodule(name).weight * scale)
        for key, momentum in momenta[name].items():
            kept = optimizer.state[conv.get_parameter(key)]["momentum_buffer"]
            torch.testing.assert_close(kept, (momentum * scale).to(kept))
    assert dyrep.structure(model)["blocks"] == {}
    torch.testing.assert_close(eval_output(model, BATCHES[0][0]), before, rtol=1e-4, atol=1e-5)


class WithAuxiliaryHead(nn.Module):
    """A convolution that is read by its norm, and in one mode by something else too."""

    def __init__(self, aside_in_training):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.head, self.aside = nn.Linear(8, 4), nn.Linear(8, 4)
        self.aside_in_training = aside_in_training

    def forward(self, x):
        y = self.conv(x)
        logits = self.head(self.norm(y).relu().mean((2, 3)))
        return logits + self.aside(y.abs().mean((2, 3))) if self.training == self.aside_in_training else logits


@pytest.mark.parametrize("aside_in_training", [False, True])
def test_a_norm_counts_only_if_it_alone_reads_the_block_in_both_modes(aside_in_training):
    model, _ = make_blocks(WithAuxiliaryHead(aside_in_training))
    assert norms_behind(model, blocks_of(model), BATCHES[0]) == {}


def test_looking_leaves_the_model_as_it_was():
    model, _ = make_blocks()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    norms_behind(model, blocks_of(model), BATCHES[0])
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize("batch", [BATCHES[0], None])
def test_norms_that_stepped_aside_come_back_and_make_up_for_the_length(batch):
    model, optimizer = make_blocks(method="dbb", replace="conv+norm", example_input=BATCHES[0][0])
    norms = norms_behind(model, blocks_of(model), batch)
    assert norms == {"0": "1", "5": "6"}
    plain, before = dyrep.deploy(model), eval_output(model, BATCHES[0][0])
    for name in blocks_of(model):
        absorb_(model, name, norms.get(name), optimizer=optimizer)
    torch.testing.assert_close(eval_output(model, BATCHES[0][0]), before, rtol=1e-4, atol=1e-5)
    assert type(model[1]) is nn.BatchNorm2d
    for name in norms:
        assert float(model.get_submodule(name).weight.norm() / plain.get_submodule(name).weight.norm()) < 0.9


def test_an_optimizer_that_lacks_a_norm_that_comes_back_is_refused():
    model, _ = make_blocks(method="dbb", replace="conv+norm", example_input=BATCHES[0][0])
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(OptimizerError, match=r"layer '0' has taken the place of comes back .* all of model.parameters"):
        absorb_(model, "0", "1", optimizer=optimizer)
    assert "0" in dyrep.structure(model)["blocks"]
    others = torch.optim.SGD(model[10].parameters(), lr=0.1)
    absorb_(model, "0", "1", optimizer=others)  # somebody else trains this layer, and knows


def test_where_only_a_bias_is_trained_the_kernel_stays_as_it_is_folded():
    model, optimizer = make_blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    assert any(parameter.requires_grad for parameter in model[5].parameters())
    plain = dyrep.deploy(model)
    _, factors = absorb_(model, "5", "6", optimizer=optimizer)
    assert factors.eq(1).all()
    torch.testing.assert_close(model[5].weight, plain[5].weight)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_it_works_where_gradients_are_switched_off(mode):
    model, optimizer = make_blocks()
    twin, theirs = make_blocks()
    with mode():
        absorb_(model, "0", "1", optimizer=optimizer)
    absorb_(twin, "0", "1", optimizer=theirs)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), theirs.state_dict())
    train_epoch(model, optimizer, BATCHES)
