"""The few operations that fused and folded blocks consist of, each a `torch.library` operator with a gradient.

On a GPU they run as Triton kernels, anywhere else as plain PyTorch: the same function, so that the same tests hold for
both. Triton is imported when a kernel is first launched; ``import dyrep`` does not need it.
"""

from dyrep.kernels.assembling import Part, assemble
from dyrep.kernels.availability import unavailable
from dyrep.kernels.casting import cast_all
from dyrep.kernels.dividing import scales
from dyrep.kernels.fanning import fan_out
from dyrep.kernels.moments import second_moments
from dyrep.kernels.patching import patches
from dyrep.kernels.pooling import average_pool
from dyrep.kernels.summing import normalised_sum, statistics

__all__ = [
    "Part",
    "assemble",
    "average_pool",
    "cast_all",
    "fan_out",
    "normalised_sum",
    "patches",
    "scales",
    "second_moments",
    "statistics",
    "unavailable",
]
