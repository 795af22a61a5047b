"""Small nets and measurements that the tests of live surgery share."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

# ways to have a weight computed from others, and to make it permanent again
COMPUTED = {
    "pruned": (
        lambda conv: prune.l1_unstructured(conv, "weight", amount=0.5),
        lambda conv: prune.remove(conv, "weight"),
    ),
    "old weight norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "old spectral norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "parametrized": (parametrizations.weight_norm, lambda conv: parametrize.remove_parametrizations(conv, "weight")),
}


def conv_bn_net(dtype: torch.dtype = torch.float32, channels: int = 6) -> nn.Sequential:
    """Two conv-BN-ReLU layers and a classifier: ``0`` and ``3`` are the convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(channels, 4),
    ).to(dtype)


def images(count: int, batch: int = 4, channels: int = 3, size: int = 8, dtype: torch.dtype = torch.float32) -> list:
    """Batches of random images, each with an offset and a scale of its own."""
    return [torch.randn(batch, channels, size, size, dtype=dtype) * (1 + 0.1 * i) + 0.2 for i in range(count)]


def unbiased_variance(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1).var(dim=1)


def global_states() -> tuple:
    name, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (name, keys.tolist(), *rest)


class Named(nn.Module):
    """Takes its image by name, with a mask beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)

    def forward(self, pixels: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.conv(pixels if mask is None else pixels * mask)


def relative_change(after: Tensor, before: Tensor) -> float:
    """‖after - before‖∞ / ‖before‖∞ in float64; NaN where a value is not finite."""
    assert after.shape == before.shape
    after, before = after.detach().double(), before.detach().double()
    return float((after - before).abs().max() / before.abs().max())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """One step towards an output of ones."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    return float(optimizer.step(closure).detach())


def picture(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict:
    """Everything an edit may change, copied, for `assert_same_picture`."""
    seen = {
        "classes": [(name, type(module)) for name, module in model.named_modules(remove_duplicate=False)],
        "modes": [(name, module.training) for name, module in model.named_modules(remove_duplicate=False)],
        "attributes": [(name, sorted(vars(module))) for name, module in model.named_modules()],
        "parameters": [(name, id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)],
        "values": {name: value.clone() for name, value in model.state_dict().items()},
    }
    if optimizer is not None:
        groups = optimizer.param_groups
        seen["groups"] = [[id(p) for p in group["params"]] for group in groups]
        seen["lists"] = [id(group["params"]) for group in groups]
        seen["names"] = [list(group.get("param_names", ())) for group in groups]
        seen["options"] = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in groups]
        seen["state objects"] = {id(p): id(state) for p, state in optimizer.state.items()}
        seen["state"] = {
            (id(p), key): value.clone() if isinstance(value, Tensor) else value
            for p, state in optimizer.state.items()
            for key, value in state.items()
        }
    return seen


def assert_same_picture(after: dict, before: dict) -> None:
    """Fail unless nothing at all has changed between two pictures."""
    assert after.keys() == before.keys()
    for what, value in before.items():
        if what in ("values", "state"):
            assert after[what].keys() == value.keys(), what
            for key, tensor in value.items():
                same = (
                    torch.equal(after[what][key], tensor) if isinstance(tensor, Tensor) else after[what][key] == tensor
                )
                assert same, f"{what} {key}"
        else:
            assert after[what] == value, what


def held_parameters(optimizer: torch.optim.Optimizer) -> list[int]:
    """Identities of all parameters in an optimizer."""
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def conv(**arguments) -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1, **arguments)


def names_in(model: nn.Module, group: dict) -> list[str]:
    """The parameters of a group by their names in the model."""
    names = {id(p): name for name, p in model.named_parameters()}
    return [names[id(p)] for p in group["params"]]


def decay_groups(model: nn.Module) -> list[dict]:
    """Groups as many users make them: no weight decay for vectors."""
    kernels = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": kernels, "weight_decay": 1e-3}, {"params": vectors, "weight_decay": 0.0}]


def trained(make, model: nn.Module | None = None, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer after some steps."""
    model = conv_bn_net() if model is None else model
    optimizer = make(model.parameters())
    for batch in images(steps):
        train_step(model, optimizer, batch)
    return model, optimizer


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "SGD tensor lr": lambda p: torch.optim.SGD(p, lr=torch.tensor(0.01), momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
}


GOOD = {"branches": ["1x1"]}
"""A block of a structure, as plain data."""


def structure_of(blocks) -> dict:
    """A structure of these blocks."""
    return {"format": 1, "blocks": blocks}
