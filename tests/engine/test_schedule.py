"""The learning rate at any moment, against values by hand."""

import math

import pytest
import torch

from dyrep.engine.recipe import Recipe
from dyrep.engine.schedule import learning_rate, set_learning_rate_


def plain(**values):
    return Recipe(method="origin", **values)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [(0, 0.2), (1, 0.19510565162951536), (2.5, 0.17071067811865476), (5, 0.1), (7.5, 0.029289321881345254), (10, 0.0)],
)
def test_the_cosine_falls_from_the_highest_rate_to_zero(progress, expected):
    assert learning_rate(plain(lr=0.2, epochs=10, schedule="cosine"), progress) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("progress", "expected"), [(0, 0.1), (2, 0.055), (3, 0.023180194846605364), (4, 0.01)])
def test_the_cosine_ends_at_the_lowest_rate(progress, expected):
    assert learning_rate(plain(lr=0.1, min_lr=0.01, epochs=4), progress) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("progress", "expected"), [(0, 0.0), (0.5, 0.025), (1, 0.05), (1.5, 0.075), (2, 0.1), (6, 0.05), (10, 0.0)]
)
def test_the_rate_rises_evenly_before_it_falls(progress, expected):
    chosen = plain(lr=0.1, epochs=10, warmup_epochs=2)
    assert learning_rate(chosen, progress) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("progress", "expected"), [(0, 0.0), (0.25, 0.05), (0.5, 0.1), (3, 0.1), (9.99, 0.1)])
def test_a_constant_rate_stays_after_rising(progress, expected):
    chosen = plain(lr=0.1, epochs=10, schedule="constant", warmup_epochs=0.5)
    assert learning_rate(chosen, progress) == pytest.approx(expected, abs=1e-12)


def test_the_rate_equals_that_of_torch_step_by_step():
    steps, epochs = 7, 5
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps * epochs, eta_min=0.01)
    chosen = plain(lr=0.3, min_lr=0.01, epochs=epochs)
    for step in range(steps * epochs):
        assert learning_rate(chosen, step / steps) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-6)
        optimizer.step()
        scheduler.step()


def test_a_rate_is_set_in_all_groups_and_a_tensor_keeps_its_place():
    first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 3.0}], lr=1.0)
    captured = torch.tensor(7.0)
    optimizer.param_groups[1]["lr"] = captured
    set_learning_rate_(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["lr"] is captured
    assert math.isclose(captured.item(), 0.25)
