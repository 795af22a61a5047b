"""Is a score signal or rounding? All scores of VGG-16's convolutions, in float32 and under autocast, against float64.

``python benchmarks/noise.py --data FOLDER --out results/noise.json`` (``make noise``). The same weights and the same
batches of CIFAR-10 are used in every precision; ``--run`` takes the weights of a finished run instead of new ones that
have been trained for a few steps. A score is compared by what it is there for: the order it puts the layers in. The
paper's is computed in two ways, added up term by term and from the norm that follows (`dyrep.normflow`); both are
compared with the sum in float64.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from scipy import stats
from torch import Tensor, nn

from dyrep import models
from dyrep.engine.data import Augmentation, Loading, open_data
from dyrep.engine.rundir import hardware, versions
from dyrep.engine.world import pick_device
from dyrep.files import replacing
from dyrep.normflow import NormFlows
from dyrep.records import PLAIN
from dyrep.surgery.followers import reading_norms

METRICS = ("synflow_summed", "synflow", "snip", "grad_norm", "invariant")
PRECISIONS = ("float64", "float32", "bfloat16 autocast")


def scores(model: nn.Module, batch: tuple[Tensor, Tensor], precision: str) -> dict[str, list[float]]:
    """Scores of all convolutions from one batch, by metric; whatever the gradients are, the sums are in float64."""
    images, labels = batch
    model.to(torch.float64 if precision == "float64" else torch.float32).train()
    convs = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    images = images.to(next(model.parameters()).dtype)
    norms = reading_norms(model, convs, images)
    flows = NormFlows({norm: model.get_submodule(norm) for norm in norms.values()})
    model.zero_grad()
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision.endswith("autocast")):
        loss = F.cross_entropy(model(images).float().double(), labels)
    loss.backward()
    flow = flows.means(flows.values(), 1)
    found: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for name, conv in convs.items():
        assert conv.weight.grad is not None
        w, g = conv.weight.detach().double(), conv.weight.grad.double()
        summed = float((w * g).sum())
        found["synflow_summed"].append(summed)
        found["synflow"].append(summed if precision == "float64" else flow.get(norms.get(name, ""), summed))
        found["snip"].append(float((w * g).abs().sum()))
        found["grad_norm"].append(float(g.norm()))
        found["invariant"].append(float(g.norm() * w.norm()))
    return found


def mean_scores(model: nn.Module, batches: list[tuple[Tensor, Tensor]], precision: str) -> dict[str, list[float]]:
    """Averages over batches, as an update sees them."""
    found = [scores(model, batch, precision) for batch in batches]
    return {m: [statistics.mean(layer) for layer in zip(*(f[m] for f in found), strict=True)] for m in METRICS}


def agreement(ours: list[float], exact: list[float]) -> dict[str, Any]:
    """How well the layers are in the order of the exact scores, and how far off the scores are."""
    errors = [abs(a - b) / abs(b) for a, b in zip(ours, exact, strict=True)]
    return {
        "rank_correlation": float(stats.spearmanr(ours, exact).statistic),
        "same_choice": ours.index(max(ours)) == exact.index(max(exact)),
        "median_error": statistics.median(errors),
    }


def train_(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    for images, labels in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def examine(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Everything about one network."""
    exact = mean_scores(model, batches, "float64")
    half = len(batches) // 2
    halves = [mean_scores(model, part, "float64") for part in (batches[:half], batches[half:])]
    ratios = [abs(a) / b for a, b in zip(exact["synflow_summed"], exact["snip"], strict=True)]
    found: dict[str, Any] = {
        "scores": {"float64": exact},
        "synflow_to_snip": {"median": statistics.median(ratios), "largest": max(ratios)},
        "other_batches": {metric: agreement(halves[0][metric], halves[1][metric]) for metric in METRICS},
    }
    for precision in PRECISIONS[1:]:
        ours = mean_scores(model, batches, precision)
        found["scores"][precision] = ours
        found[precision] = {metric: agreement(ours[metric], exact[metric]) for metric in METRICS}
    return found


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--model", default="vgg16")
    parser.add_argument("--run", type=Path, help="a finished run of `dyrep train`, for its weights")
    parser.add_argument("--steps", type=int, default=100, help="to train new weights for")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--device")
    given = parser.parse_args(command)
    device = pick_device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    data = open_data(
        given.dataset, given.data, Loading(device), size=None, batch_size=given.batch_size,
        augmentation=Augmentation(), val_split=0.0,
    )  # fmt: skip
    model = models.build(given.model, num_classes=len(data.classes), in_channels=data.channels).to(device)
    stream = (data.train.prepare(raw) for number in itertools.count() for raw in data.train.batches(epoch=number))
    networks: dict[str, Any] = {}
    batches = [next(stream) for _ in range(given.batches)]
    if given.run is None:
        networks["as initialised"] = examine(model, batches)
        train_(model.float(), [next(stream) for _ in range(given.steps)])
        networks[f"after {given.steps} steps"] = examine(model, batches)
    else:
        model.load_state_dict(load_file(given.run / PLAIN, device=str(device)))
        networks["trained"] = examine(model, batches)
    config = {key: getattr(given, key) for key in ("dataset", "model", "steps", "batches", "batch_size")}
    result = {"config": config, "versions": versions(), "hardware": hardware(), "networks": networks}
    with replacing(given.out) as temporary:
        temporary.write_text(json.dumps(result, indent=1) + "\n")
    for name, found in networks.items():
        print(f"{name}: |synflow| is {found['synflow_to_snip']['median']:.1e} of snip in the median layer")
        for against in ("other_batches", *PRECISIONS[1:]):
            for metric, row in found[against].items():
                print(f"  {against:18s} {metric:10s} rank correlation {row['rank_correlation']:+.2f}, ", end="")
                print(f"same choice: {row['same_choice']}, median error {row['median_error']:.1e}")


if __name__ == "__main__":
    main()
