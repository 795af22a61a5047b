"""Fused and folded blocks under torch.compile: one graph, the same outputs, gradients and statistics."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from execution_helpers import ALWAYS, NEVER
from torch import Tensor, nn

import dyrep
from dyrep.execution import fused
from training import make_net

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def _compiled_anew():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def grown_net() -> nn.Module:
    """Three blocks of one network: one reads the image, one has a bias, one a stride."""
    model = make_net().double()
    dyrep.expand_(model, ["0", "3"], gamma=0.5)
    dyrep.expand_(model, "5", ["1x1", "1x1-AVG", "KxK-2"], gamma=0.5)
    return model.train()


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(4, 3, 8, 8, dtype=torch.float64) for _ in range(count)]


def trained(model: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    """Outputs over some batches, the sum of their gradients, and the statistics they leave behind."""
    found = {}
    for number, x in enumerate(inputs):
        y = model(x)
        y.square().mean().backward()
        found[f"output {number}"] = y.detach()
    found |= {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    return found | dict(model.named_buffers())


def assert_compiles_to_one_graph(model: nn.Module) -> None:
    inputs, twin = batches(), copy.deepcopy(model)
    expected = trained(twin, inputs)
    torch._dynamo.utils.counters.clear()
    model.compile(fullgraph=True, backend="aot_eager")
    found = trained(model, inputs)
    counts = torch._dynamo.utils.counters
    assert counts["stats"]["unique_graphs"] == 1
    assert not counts["graph_break"]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("gradient", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_a_folded_network_compiles_to_one_graph(gradient):
    model = grown_net()
    dyrep.set_execution_(model, "folded", images=2, values=1, gradient=gradient)
    assert_compiles_to_one_graph(model)


@pytest.mark.parametrize("moments_from", [ALWAYS, pytest.param(NEVER, marks=pytest.mark.slow)])
def test_a_fused_network_compiles_to_one_graph(moments_from, monkeypatch):
    monkeypatch.setattr("dyrep.execution.choose", lambda *_, **__: "fused")
    monkeypatch.setattr(fused, "MOMENTS_FROM", moments_from)
    assert_compiles_to_one_graph(grown_net())


@pytest.mark.slow
def test_blocks_inside_blocks_compile_folded():
    model = grown_net()
    dyrep.expand_(model, "3.branches.1x1-KxK.conv", ["1x1", "1xK"], gamma=0.5)
    dyrep.set_execution_(model, "folded", images=2, values=1)
    assert_compiles_to_one_graph(model)


@torch._dynamo.config.patch(recompile_limit=1)
def test_compiled_code_follows_a_new_setting():
    """And is compiled anew, not once more: torch.compile gives up after a few times."""
    model, x = make_net().double().train(), batches(1)[0]
    dyrep.expand_(model, "3", ["1x1", "1xK"], gamma=0.5)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    outputs = []
    for name in ("eager", "folded", "eager"):
        dyrep.set_execution_(model, name, images=1, values=1)
        expected = copy.deepcopy(model)(x)
        outputs.append(compiled(x).detach())
        torch.testing.assert_close(outputs[-1], expected, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(outputs[0], outputs[1])
