"""Do kernels learn at the same pace when their blocks are absorbed? A small VGG on scikit-learn's digits.

``python benchmarks/pace.py --out results/pace.json`` (``make pace``): a network takes some steps with branches.
Then three copies of it take the same steps: one keeps its blocks, in one they are absorbed, in one they are
absorbed without any regard to the length of kernels. What is measured is the angle by which the kernels that the
network folds to have turned, on average over layers.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dyrep
from dyrep.branches import BRANCHES
from dyrep.engine.data import read_digits
from dyrep.engine.rundir import hardware, versions
from dyrep.models import small_vgg
from dyrep.records import write_json

SPACES = {"1x1, residual": ("1x1", "residual"), "all": tuple(BRANCHES)}
Batches = Iterator[tuple[Tensor, Tensor]]
WAYS = ("kept", "absorbed", "absorbed as folded")


def batches(seed: int, size: int = 64) -> Batches:
    """Digits with noise on them, without end."""
    digits, generator = read_digits().train, torch.Generator().manual_seed(seed)
    images = digits.images / 127.5 - 1
    while True:
        chosen = torch.randint(len(images), (size,), generator=generator)
        yield images[chosen] + 0.5 * torch.randn(size, *images.shape[1:], generator=generator), digits.labels[chosen]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Batches, steps: int) -> None:
    model.train()
    for _ in range(steps):
        images, labels = next(data)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def kernels(model: nn.Module) -> list[Tensor]:
    """What the network's convolutions fold to."""
    return [module.weight.detach() for module in dyrep.deploy(model).modules() if isinstance(module, nn.Conv2d)]


def angle(before: list[Tensor], after: list[Tensor]) -> float:
    """By how many degrees kernels have turned, on average."""
    pairs = zip(before, after, strict=True)
    cosines = [F.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0) for a, b in pairs]
    return statistics.mean(math.degrees(math.acos(min(1.0, float(cosine)))) for cosine in cosines)


def measure(branches: tuple[str, ...], seed: int, before: int, after: int) -> dict[str, float]:
    """The angle for every way to go on."""
    torch.manual_seed(seed)
    model = small_vgg()
    dyrep.convert_(model, "dbb7", branches=branches, replace="conv")
    optimizer = make_optimizer(model)
    train(model, optimizer, batches(seed), before)
    started = kernels(model)
    found = {}
    for way in WAYS:
        own = copy.deepcopy(model)
        theirs = make_optimizer(own)
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if way == "absorbed":
            dyrep.DyRep(own, theirs).absorb([next(batches(seed))[0]])
        elif way == "absorbed as folded":
            dyrep.cut_(own, list(dyrep.structure(own)["blocks"]), optimizer=theirs)
        train(own, theirs, batches(seed + 1000), after)
        found[way] = angle(started, kernels(own))
    return found


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/pace.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--before", type=int, default=100, help="steps with branches")
    parser.add_argument("--after", type=int, nargs="+", default=[5, 50], help="steps after which angles are measured")
    given = parser.parse_args(command)
    rows: list[dict[str, Any]] = []
    for name, branches in SPACES.items():
        for after in given.after:
            runs = [measure(branches, seed, given.before, after) for seed in range(given.seeds)]
            rows.append({"branches": name, "steps": after, "degrees": {way: [r[way] for r in runs] for way in WAYS}})
            told = ", ".join(f"{way} {statistics.mean(run[way] for run in runs):.1f}" for way in WAYS)
            print(f"{name}, after {after} steps: {told} degrees", flush=True)
    config = {"before": given.before, "seeds": given.seeds, "data": "scikit-learn digits", "model": "small_vgg"}
    write_json(given.out, {"config": config, "versions": versions(), "hardware": hardware(), "rows": rows})
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
