"""What every method costs in training: parameters and multiply-adds, counted on three networks.

``python benchmarks/methods.py --out results/methods.json`` (``make methods``) gives the table of docs/methods.md.

A method that changes the network during training has no single cost. For DyRep the mean over the epochs of the paper's
recipe is counted, with operations chosen at random and none cut, over several seeds; for RepNAS the mean over the parts
of its schedule, with random strengths. What a real run costs is in its own summary.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dyrep
from dyrep import models
from dyrep.engine.recipes import recipe
from dyrep.engine.rundir import versions
from dyrep.methods import RepNASConfig
from dyrep.methods.gates import Gates, settle_
from dyrep.records import write_json

NETWORKS = {
    "VGG-16": ("cifar10-vgg16", 32, 10),
    "ResNet-18": ("imagenet-resnet18", 224, 1000),
    "ResNet-50": ("imagenet-resnet50", 224, 1000),
}
STATIC = ("origin", "repvgg", "acnet", "dbb", "dbb7", "mobileone", "orepa")
SEEDS = 3


def plain(network: str) -> tuple[nn.Module, torch.Tensor]:
    name, size, classes = NETWORKS[network]
    model = models.build(recipe(name).model, num_classes=classes, in_channels=3)
    return model, torch.zeros(1, 3, size, size)


def count(model: nn.Module, image: torch.Tensor) -> dict[str, float]:
    found = dyrep.costs(model, image)
    return {"parameters": found.parameters, "macs": found.macs, "folding_macs": found.folding_macs}


def deployed(model: nn.Module, image: torch.Tensor) -> dict[str, float]:
    found = count(dyrep.deploy(model), image)
    return {"deployed_parameters": found["parameters"], "deployed_macs": found["macs"]}


def mean(counts: list[dict[str, float]], weights: list[float]) -> dict[str, float]:
    total = sum(weights)
    return {key: sum(c[key] * w for c, w in zip(counts, weights, strict=True)) / total for key in counts[0]}


def static(network: str, method: str) -> dict[str, float]:
    model, image = plain(network)
    dyrep.convert_(model, method, example_input=image)
    return count(model, image) | deployed(model, image)


def searched(network: str, seed: int) -> dict[str, float]:
    model, image = plain(network)
    dyrep.convert_(model, "repnas", example_input=image)
    config = RepNASConfig(total=recipe(NETWORKS[network][0]).epochs)
    before, gates = count(model, image), Gates(model, config.keep)
    chosen = gates.ranked(torch.rand(len(gates.names), generator=torch.Generator().manual_seed(seed))).bool().tolist()
    keep: dict[str, list[str]] = {layer: [] for layer, _ in gates.names}
    for (layer, branch), is_open in zip(gates.names, chosen, strict=True):
        keep[layer] += [branch] if is_open else []
    settle_(model, keep)
    end = config.ends[1]
    return mean([before, count(model, image)], [end, config.total - end]) | deployed(model, image)


def evolved(network: str, method: str, seed: int) -> dict[str, float]:
    """Mean over the epochs of a run that expands one operation, chosen at random, at every update."""
    model, image = plain(network)
    settings = replace(recipe(NETWORKS[network][0]), method=method, seed=seed)
    config = settings.evolution()
    choose = torch.Generator().manual_seed(seed)
    counts, weights = [count(model, image)], [0.0]
    for epoch in range(1, settings.epochs + 1):
        weights[-1] += 1
        if config.is_due(epoch):
            open_layers = [t for t in dyrep.targets(model) if t.eligible and not t.present and _square(t)]
            if open_layers:
                target = open_layers[int(torch.randint(len(open_layers), (), generator=choose))]
                wanted = [b for b in config.branches or target.branches if b in target.branches]
                dyrep.expand_(model, target.name, wanted, generator=choose)
                counts.append(count(model, image))
                weights.append(0.0)
    return mean(counts, weights) | deployed(model, image)


def _square(target: dyrep.Target) -> bool:
    return len(set(target.kernel_size)) == 1


def over_seeds(measure: Any, *arguments: Any) -> dict[str, float]:
    runs = [measure(*arguments, seed) for seed in range(SEEDS)]
    return {key: statistics.mean(run[key] for run in runs) for key in runs[0]} | {
        f"{key}_sd": statistics.stdev(run[key] for run in runs) for key in ("parameters", "macs")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/methods.json"))
    out = parser.parse_args().out
    rows: dict[str, dict[str, Any]] = {}
    for network in NETWORKS:
        torch.manual_seed(0)
        found = {method: static(network, method) for method in STATIC}
        found["repnas"] = over_seeds(searched, network)
        for method in ("dyrep", "dyrep4"):
            found[method] = over_seeds(evolved, network, method)
        for method, costs in found.items():
            rows.setdefault(method, {})[network] = costs
            print(
                f"{network:10s} {method:10s} {costs['macs'] / 1e6:9.1f} M  {costs['parameters'] / 1e6:7.2f} M",
                flush=True,
            )
    setup = {"command": "make methods", "seeds": SEEDS, "image_sizes": {n: v[1] for n, v in NETWORKS.items()}}
    write_json(out, {"setup": {**setup, "versions": versions()}, "methods": rows})


if __name__ == "__main__":
    main()
