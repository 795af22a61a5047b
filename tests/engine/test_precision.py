"""In which dtype a run computes."""

import pytest
import torch

from dyrep.engine.precision import computing_in, make_precision
from dyrep.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "expected"), [("auto", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_the_precision_on_a_cpu(precision, expected):
    assert make_precision(precision, CPU) == expected


def test_half_precision_needs_a_gpu():
    with pytest.raises(ConfigError, match="precision='fp16' needs a GPU; on a CPU use fp32 or bf16"):
        make_precision("fp16", CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_computed_in_the_dtype_and_only_meanwhile(dtype):
    one = torch.ones(1, 1)
    with computing_in(dtype, CPU):
        assert (one @ one).dtype == dtype
    assert (one @ one).dtype == torch.float32
