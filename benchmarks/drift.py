"""How far an expansion moves a network's output: in eval mode (rounding) and in training mode.

``python benchmarks/drift.py --out results/drift.json`` (``make drift``) writes every figure of docs/numerics.md.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.ops import FrozenBatchNorm2d

import dyrep
from dyrep.engine.data import read_digits
from dyrep.models import small_vgg
from dyrep.records import write_json
from dyrep.surgery.folding import drift, eval_outputs, train_outputs

LAYER = "conv4"
SEEDS = 5
EPOCHS = 3
BATCHES = 20


def freeze_norms(model: nn.Sequential) -> None:
    for name, norm in list(model.named_children()):
        if isinstance(norm, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(norm.num_features)
            frozen.load_state_dict({k: v for k, v in norm.state_dict().items() if k != "num_batches_tracked"})
            setattr(model, name, frozen)


def shrink(factor: float) -> Callable[[nn.Sequential], None]:
    """Make the layer's output smaller without changing the network: the norm after it takes the factor out again."""

    @torch.no_grad()
    def finish(model: nn.Sequential) -> None:
        model.get_submodule(LAYER).weight.mul_(factor)
        norm = model.get_submodule(LAYER.replace("conv", "norm"))
        norm.running_mean.mul_(factor)
        norm.running_var.mul_(factor**2)

    return finish


def without_norms() -> nn.Sequential:
    model = small_vgg()
    for name, module in list(model.named_children()):
        if isinstance(module, nn.Conv2d):
            replacement = nn.Conv2d(module.in_channels, module.out_channels, 3, padding=1)
            nn.init.kaiming_normal_(replacement.weight)
            setattr(model, name, replacement)
        elif isinstance(module, nn.BatchNorm2d):
            setattr(model, name, nn.Identity())
    return model


def keep(_: nn.Sequential) -> None:
    pass


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], float, Callable[[nn.Sequential], None]]] = {
    "conv then batch norm": (small_vgg, 0.05, keep),
    "the same, output 10 times smaller": (small_vgg, 0.05, shrink(0.1)),
    "the same, output 100 times smaller": (small_vgg, 0.05, shrink(0.01)),
    "conv with bias, no norm": (without_norms, 0.01, keep),
    "conv then frozen batch norm": (small_vgg, 0.05, freeze_norms),
}
VARIANTS = {
    "none (default)": {"origin_norm": "none"},
    "none, relative γ": {"origin_norm": "none", "relative_gamma": True},
    "none, not calibrated": {"origin_norm": "none", "calibrate": False},
    "calibrated": {"origin_norm": "calibrated"},
    "reference (published)": {"origin_norm": "reference"},
}


def trained(network: str, seed: int, loader: DataLoader) -> nn.Sequential:
    build, rate, finish = NETWORKS[network]
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    finish(model)
    return model


def measure(network: str, variant: str, seed: int, loader: DataLoader, batch: torch.Tensor) -> dict[str, float]:
    model = trained(network, seed, loader)
    settings = dict(VARIANTS[variant])
    calibration = loader if settings.pop("calibrate", True) else None
    before = eval_outputs(model, batch), train_outputs(model, batch)
    dyrep.expand_(model, LAYER, calibration=calibration, calibration_batches=BATCHES, **settings)
    return {
        "eval": drift(eval_outputs(model, batch), before[0]),
        "train": drift(train_outputs(model, batch), before[1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/drift.json"))
    out = parser.parse_args().out
    source = read_digits()
    train, test = (TensorDataset(s.images / 127.5 - 1, s.labels) for s in (source.train, source.test))
    loader = DataLoader(train, batch_size=64, shuffle=True, drop_last=True)
    batch = test.tensors[0][:128]
    rows = []
    for network in NETWORKS:
        for variant in VARIANTS:
            runs = [measure(network, variant, seed, loader, batch) for seed in range(SEEDS)]
            row = {"network": network, "origin_norm": variant}
            for mode in ("eval", "train"):
                values = [run[mode] for run in runs]
                row[f"{mode}_median"], row[f"{mode}_max"] = statistics.median(values), max(values)
            rows.append(row)
            print(f"{network:36s} {variant:24s} eval {row['eval_max']:.1e}  train {row['train_max']:.1e}", flush=True)
    setup = {
        "command": "make drift",
        "measure": "largest change of the logits over their largest value, one expansion with all branches",
        "layer": LAYER,
        "gamma": 0.01,
        "seeds": SEEDS,
        "epochs_trained_before": EPOCHS,
        "calibration_batches": BATCHES,
        "data": "scikit-learn digits",
        "dtype": "float32",
        "hardware": f"CPU, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "dyrep": dyrep.__version__},
    }
    write_json(out, {"setup": setup, "rows": rows})
    print(f"written to {out}")


if __name__ == "__main__":
    main()
