"""Runs blocks with their Triton kernels interpreted, and compares them to eager ones. A process of its own:

whether Triton interprets is decided when it is imported.
"""

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from execution_helpers import ALWAYS, NEVER, assert_same, eager, folded_with, fused_with, images, seven_branches, step

from dyrep.kernels import assembling_triton, moments_triton, summing_triton

torch.manual_seed(0)
torch.set_num_threads(1)
launched = []


def note(module, name):
    """Note that a kernel has really been launched."""
    original = getattr(module, name)

    def noted(*args, **kwargs):
        launched.append(name)
        return original(*args, **kwargs)

    setattr(module, name, noted)


for module, name in (
    (moments_triton, "second_moments"),
    (summing_triton, "weighted_sum"),
    (summing_triton, "backward"),
):
    note(module, name)
note(assembling_triton, "assemble_")
WAYS = {
    "fused": (fused_with(NEVER), {"weighted_sum", "backward"}),
    "moments": (fused_with(ALWAYS), {"second_moments", "assemble_", "backward"}),
    "folded": (folded_with(images=99, gradient="full"), {"assemble_"}),
}

memory_format = getattr(torch, sys.argv[1])
x = images(2, dtype=torch.float32).contiguous(memory_format=memory_format)
for origin, first in (("plain", False), ("plain", True), ("normalised", False)):
    block = seven_branches(torch.float32, origin=origin).to(memory_format=memory_format)
    expected = step(block, x, eager, needs_input_gradient=not first)
    for forward, needed in WAYS.values():
        launched.clear()
        found = step(block, x, forward, needs_input_gradient=not first)
        assert_same(found, expected, tolerance=1e-4)
        assert first or set(launched) >= needed, launched
        print("the same")

# statistics move between two passes of a block, and the first one's gradient is asked for after that
block, twice = seven_branches(torch.float32).to(memory_format=memory_format), folded_with(images=1)
assert_same(step(block, x, twice, passes=2, at_once=True), step(block, x, twice, passes=2), tolerance=1e-6)
print("the same")
