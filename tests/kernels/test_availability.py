"""Which implementation runs, and how tensors look to kernels."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from kernel_helpers import CUDA, OURS, Setting

from dyrep.kernels import (
    Part,
    assemble,
    availability,
    average_pool,
    cast_all,
    fan_out,
    normalised_sum,
    patches,
    scales,
    second_moments,
    statistics,
    unavailable,
)
from dyrep.kernels.availability import (
    filled,
    layout_of,
    memory_format_of,
    next_power_of_two,
    runs_triton,
    slots_for,
)


def reason_with(monkeypatch: pytest.MonkeyPatch, version: str | None, capability: tuple[int, int] | None = None) -> str:
    """The reason on a machine with a version of Triton, or none, and with a GPU, or none."""

    def import_module(name: str) -> SimpleNamespace:
        if version is None:
            raise ImportError(name)
        return SimpleNamespace(__version__=version)

    monkeypatch.setattr(availability, "_reason", None)
    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    return unavailable()


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        (None, None, "Triton is not installed"),
        ("3.2.0", (9, 0), "Triton 3.2.0 is older than 3.3"),
        ("2.10.1", (9, 0), "Triton 2.10.1 is older than 3.3"),
        ("3.3.1", (6, 1), "this GPU is too old for Triton"),
        ("3.3.0", (7, 0), ""),
        ("3.10.0+git123", (9, 0), ""),
        ("4.0", None, ""),
    ],
)
def test_the_reason_why_kernels_cannot_run(monkeypatch, version, capability, reason):
    assert reason_with(monkeypatch, version, capability) == reason


def test_the_reason_is_found_once(monkeypatch):
    assert reason_with(monkeypatch, "3.2.0") == "Triton 3.2.0 is older than 3.3"
    monkeypatch.setattr(importlib, "import_module", None)
    assert unavailable() == "Triton 3.2.0 is older than 3.3"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_take_tensors_of_32_bits_or_less(triton_only, dtype):
    x = torch.ones(2, device=triton_only.device)
    assert runs_triton(x, x.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64], ids=str)
def test_one_tensor_of_another_dtype_is_enough_to_leave_it_to_pytorch(triton_only, dtype):
    x = torch.ones(2, device=triton_only.device)
    assert not runs_triton(x, x.to(dtype))


def test_kernels_do_not_run_where_triton_cannot(triton_only, monkeypatch):
    monkeypatch.setattr(availability, "_reason", "for a test")
    assert not runs_triton(torch.ones(2, device=triton_only.device))


def test_on_the_cpu_kernels_run_in_the_interpreter_only(monkeypatch):
    x = torch.ones(2)
    monkeypatch.setattr(availability, "_reason", "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not runs_triton(x)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not runs_triton(x)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert runs_triton(x)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_tensors_on_the_cpu_and_a_gpu_are_left_to_pytorch():
    assert not runs_triton(torch.ones(2, device="cuda"), torch.ones(2))


def run_everything(setting: Setting) -> None:
    x, channels = setting.randn(2, 3, 4, 4), setting.randn(1, 3)
    read = fan_out(x, 3)
    total = normalised_sum(None, [read[0]], channels, None, 1e-5)[0].sum() + statistics([read[1]])[1].sum()
    total = total + second_moments(x)[1].sum() + average_pool(read[2], (3, 3), (1, 1), (1, 1)).sum()
    weight = setting.randn(3, 3, 1, 1)
    rows = scales([channels[0]], [setting.randn(3, grad=False).square()], 1e-5).to(channels.dtype)
    kernel = assemble(None, [Part(weight, (1, 1))], rows, size=(3, 3), dtype=setting.dtype)
    total = total + kernel.sum() + cast_all([weight], torch.bfloat16)[0].float().sum()
    patches(x, (3, 3), (1, 1), (1, 1), (1, 1))
    total.backward()


def calls(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What is called of the modules with kernels, noted from now on."""
    seen: set[str] = set()
    for name in OURS:
        module = importlib.import_module(f"dyrep.kernels.{name}")
        for function in [key for key in vars(module) if not key.startswith("_")]:
            original = getattr(module, function)
            if getattr(original, "__module__", "") != module.__name__ or function == "fits":
                continue

            def noted(*args, _original=original, _name=f"{name}.{function}"):
                seen.add(_name)
                return _original(*args)

            monkeypatch.setattr(module, function, noted)
    return seen


def test_every_operator_runs_as_kernels_where_they_can_run(triton_only, monkeypatch):
    seen = calls(monkeypatch)
    run_everything(triton_only)
    assert seen == {
        "assembling_triton.assemble_",
        "assembling_triton.backward_",
        "casting_triton.copy_all_",
        "dividing_triton.backward_",
        "dividing_triton.scale_",
        "moments_triton.second_moments",
        "patching_triton.write_patches_",
        "pooling_triton.pool",
        "pooling_triton.spread",
        "summing_triton.backward",
        "summing_triton.plain_sum",
        "summing_triton.statistics",
        "summing_triton.weighted_sum",
    }


def test_no_operator_runs_as_kernels_in_double_precision(triton_only, monkeypatch):
    seen = calls(monkeypatch)
    run_everything(triton_only._replace(dtype=torch.float64))
    assert not seen


def test_nothing_needs_triton_on_the_cpu():
    script = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
from dyrep.kernels import statistics, unavailable
assert unavailable() == "Triton is not installed"
assert statistics([torch.ones(2, 3, 4)])[0].eq(1).all()
assert not any(name.endswith("_triton") for name in sys.modules if name.startswith("dyrep."))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_layouts_of_tensors():
    x = torch.empty(2, 3, 4, 5)
    assert layout_of(x) == (2, 20, 3, 60, 1, 20)
    assert not layout_of(x).channels_inner
    inner = x.contiguous(memory_format=torch.channels_last)
    assert layout_of(inner) == (1, 40, 3, 0, 3, 1)
    assert layout_of(inner).channels_inner
    assert layout_of(torch.empty(2, 3, 4)) == (2, 4, 3, 12, 1, 4)
    volume = torch.empty(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d)
    assert layout_of(volume) == (1, 240, 3, 0, 3, 1)
    assert layout_of(torch.empty(2, 3)) == (2, 1, 3, 3, 1, 1)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 4, 5), (2, 3, 4), (2, 2, 3, 4, 5)])
def test_elements_are_where_the_layout_says(shape):
    formats = [torch.contiguous_format, *({4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(len(shape), []))]
    for layout in formats:
        x = torch.randn(shape).contiguous(memory_format=layout)
        images, positions, channels, image_stride, position_stride, channel_stride = layout_of(x)
        seen = x.as_strided((images, positions, channels), (image_stride, position_stride, channel_stride))
        assert torch.equal(seen.reshape(-1, channels), x.movedim(1, -1).reshape(-1, shape[1]))


def test_memory_formats_of_tensors():
    x = torch.empty(2, 3, 4, 5)
    assert memory_format_of(x) == torch.contiguous_format
    assert memory_format_of(x.contiguous(memory_format=torch.channels_last)) == torch.channels_last
    assert memory_format_of(x[:, :, ::2]) == torch.contiguous_format
    assert memory_format_of(x.transpose(0, 1)) == torch.contiguous_format
    volume = torch.empty(2, 3, 4, 5, 6)
    assert memory_format_of(volume) == torch.contiguous_format
    assert memory_format_of(volume.contiguous(memory_format=torch.channels_last_3d)) == torch.channels_last_3d
    assert memory_format_of(torch.empty(2, 3, 4)) == torch.contiguous_format


@pytest.mark.parametrize(("value", "expected"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (1025, 2048)])
def test_next_power_of_two(value, expected):
    assert next_power_of_two(value) == expected


@pytest.mark.parametrize(("count", "slots"), [(0, 8), (1, 8), (8, 8), (9, 16), (17, 24)])
def test_kernels_are_compiled_for_few_numbers_of_tensors(count, slots):
    assert slots_for(count) == slots


def test_slots_are_filled_up_with_the_first_tensor():
    first, second = torch.ones(1), torch.ones(2)
    found = filled([first, second], 8)
    assert len(found) == 8
    assert found[1] is second
    assert all(tensor is first for tensor in (found[0], *found[2:]))
