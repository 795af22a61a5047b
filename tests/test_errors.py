"""Warnings point to whoever called the library."""

import warnings

import torch

from dyrep.errors import DyRepWarning, warn


def test_a_warning_points_to_the_first_line_outside_of_the_library():
    class Calls(torch.nn.Module):
        def forward(self, x):
            exec("say('told')", {"__name__": "dyrep.somewhere", "say": warn})
            return x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Calls()(torch.zeros(1))
        exec("model(x)", {"__name__": "torch.nn", "model": Calls(), "x": torch.zeros(1)})
    assert {(warning.category, warning.filename) for warning in caught} == {(DyRepWarning, __file__)}
    assert len(caught) == 2
