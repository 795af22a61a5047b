"""Under autocast, and with parameters in half precision, blocks lose no more to rounding than eager ones."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from execution_helpers import ALWAYS, NEVER, eager, folded_with, fused_with, images, seven_branches, step

WAYS = {
    "fused": fused_with(NEVER),
    "moments": fused_with(ALWAYS),
    "folded": folded_with(images=99, gradient="full"),
}
every_way = pytest.mark.parametrize("way", WAYS)
every_origin = pytest.mark.parametrize("origin", ["plain", "normalised"])


def errors(found, exact):
    return {
        name: float((found[name].double() - value).norm() / value.norm().clamp(min=1)) for name, value in exact.items()
    }


def check(block, x, way, autocast):
    exact = step(copy.deepcopy(block).double(), x.double(), eager)

    def within(forward):
        def run(block, x):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                return forward(block, x)

        return run

    theirs, ours = (step(block, x, within(forward)) for forward in (eager, WAYS[way]))
    assert {name: value.dtype for name, value in ours.items()} == {name: value.dtype for name, value in theirs.items()}
    allowed = errors(theirs, exact)
    for name, error in errors(ours, exact).items():
        assert error <= 1.5 * allowed[name] + 1e-2, name


@every_way
@every_origin
def test_under_autocast_the_error_is_that_of_eager_blocks(way, origin):
    block, x = seven_branches(torch.float32, origin), images(8, dtype=torch.float32)
    check(block, x, way, autocast=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert WAYS[way](block.train(), x).dtype == torch.bfloat16


@every_way
@every_origin
def test_with_parameters_in_half_precision_the_error_is_that_of_eager_blocks(way, origin):
    block, x = seven_branches(torch.float32, origin).bfloat16(), images(8, dtype=torch.bfloat16)
    check(block, x, way, autocast=False)


@every_way
@every_origin
def test_in_single_precision_little_is_lost(way, origin):
    block, x = seven_branches(torch.float32, origin), images(8, dtype=torch.float32)
    exact = step(copy.deepcopy(block).double(), x.double(), eager)
    assert max(errors(step(block, x, WAYS[way]), exact).values()) < 1e-4
