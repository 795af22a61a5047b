"""Where the time of a step goes on the GPU: every kernel's time, by what the kernel does."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

TOP = 16
STEPS = 5

# The first pattern that is found in a kernel's name decides. Names of kernels that torch.compile makes list all that
# they do, and those of libraries all their types, so what tells most comes first.
CLASSES: tuple[tuple[str, str], ...] = (
    ("optimizer", r"multi_tensor|fused_?sgd"),
    ("other", r"softmax|nll_loss"),  # the loss: it reduces too, but is no part of a block
    ("elementwise", r"triton_poi"),
    ("statistics", r"triton_(red|per)_"),
    ("convolutions", r"triton_tem|gem[mv]|cutlass|xmma|sm90_|nvjet|split_?k|wgrad|dgrad|fprop|winograd"),
    ("statistics", r"moment|statistic|reduce(?!d)|batch_?norm|\bbn_[fb]w"),
    ("convolutions", r"cudnn|conv(?!ert)"),
    ("elementwise", r"elementwise|weighted|apply|assemble|pool|average|add|copy|cast|convert|memcpy|memset|fill"),
)
_PATTERNS = [(kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in CLASSES]
KINDS = ("convolutions", "statistics", "elementwise", "optimizer", "other")


def classify(name: str) -> str:
    """What a kernel does, by its name: one of `KINDS`.

    Example:
        >>> classify("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32"), classify("_weighted_sum_kernel")
        ('convolutions', 'elementwise')
    """
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), "other")


def summarise(times: Mapping[str, float]) -> dict[str, Any]:
    """The time of every kind of kernel, and the kernels that take most.

    Args:
        times: milliseconds per step of every kernel, by its name.

    Returns:
        Milliseconds in all, by kind, and of the most expensive kernels.
    """
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, time in times.items():
        kinds[classify(name)] += time
    top = sorted(times, key=lambda name: -times[name])[:TOP]
    return {
        "kernels_ms": round(sum(times.values()), 4),
        "by_kind_ms": {kind: round(time, 4) for kind, time in kinds.items()},
        "top": [{"name": name[:200], "kind": classify(name), "ms": round(times[name], 4)} for name in top],
    }


def profiled(run: Callable[[], Any], steps: int = STEPS) -> dict[str, Any]:
    """Run a few steps and sum the times of their kernels up, per step."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiler.events() or ():
        # a range that code has marked spans kernels which are counted already
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            times[event.name] += event.time_range.elapsed_us() / 1000 / steps
    return summarise(times)
