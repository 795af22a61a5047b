"""Every operator is tested as plain PyTorch and as Triton kernels: on a GPU, or through Triton's interpreter."""

import pytest
import torch
from kernel_helpers import Setting, implementation

DTYPES = {"torch": ("float64", "float32", "bfloat16"), "triton": ("float32", "bfloat16")}


@pytest.fixture(params=[f"{name}-{dtype}" for name, dtypes in DTYPES.items() for dtype in dtypes])
def setting(request):
    """Either implementation, in each dtype that it has."""
    name, dtype = request.param.split("-")
    with implementation(name) as device:
        yield Setting(device, getattr(torch, dtype))


@pytest.fixture(params=DTYPES)
def single(request):
    """Either implementation, in float32."""
    with implementation(request.param) as device:
        yield Setting(device, torch.float32)


@pytest.fixture
def triton_only():
    with implementation("triton") as device:
        yield Setting(device, torch.float32)
