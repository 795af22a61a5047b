"""The demo: train a small VGG on scikit-learn's digits with DyRep, fold it back, and check that nothing changed.

``python -m dyrep.demo --out runs/demo`` (``make demo``); under two minutes on a laptop's CPU. Needs the ``demo`` extra.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dyrep import DyRep, DyRepConfig, costs, save, verify
from dyrep.report.evolution import draw_evolution


def small_vgg(widths: tuple[tuple[int, ...], ...] = ((16, 16), (32, 32), (64, 64))) -> nn.Sequential:
    """A plain chain of 3x3 convolutions with batch norm, pooled between stages: conv1, norm1, conv2, ..."""
    model = nn.Sequential()
    channels, number = 1, 0
    for stage in widths:
        for width in stage:
            number += 1
            model.add_module(f"conv{number}", nn.Conv2d(channels, width, 3, padding=1, bias=False))
            model.add_module(f"norm{number}", nn.BatchNorm2d(width))
            model.add_module(f"relu{number}", nn.ReLU())
            channels = width
        model.add_module(f"pool{number}", nn.MaxPool2d(2))
    model.add_module("flatten", nn.Flatten())
    model.add_module("classifier", nn.Linear(channels, 10))
    return model


def digits() -> tuple[TensorDataset, TensorDataset]:
    """scikit-learn's 8x8 digits, four fifths to train and one fifth to test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    split = len(images) * 4 // 5
    train, test = order[:split], order[split:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Share of right answers in percent, in eval mode."""
    images, labels = dataset.tensors
    model.eval()
    return 100 * float((model(images).argmax(1) == labels).float().mean())


def main(epochs: int = 24, interval: int = 3, out: Path = Path("runs/demo"), seed: int = 0) -> dict[str, object]:
    """Run the demo and return what it found."""
    torch.manual_seed(seed)
    began = time.perf_counter()
    train, test = digits()
    loader: DataLoader[tuple[Tensor, ...]] = DataLoader(train, batch_size=32, shuffle=True, drop_last=True)
    model = small_vgg()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    (out / "events.jsonl").unlink(missing_ok=True)
    # in so short a run γ hardly moves, so branches are told apart by a smaller λ than the paper's 0.02
    config = DyRepConfig(interval=interval, total=epochs, score="invariant", cut_threshold=0.002, seed=seed)
    controller = DyRep(model, optimizer, config, log=out / "events.jsonl")

    plain_costs = costs(model, train.tensors[0][:1])
    print(f"small VGG on digits: {len(train)} training images, {plain_costs.macs / 1e6:.2f} M multiply-adds per image")
    for epoch in range(1, epochs + 1):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        schedule.step()
        edits = controller.epoch_end(loader)
        if edits or epoch == epochs:
            print(f"epoch {epoch:3d}  test accuracy {accuracy(model, test):6.2f} %")
        for edit in edits:
            print(f"           {edit}   (output moved by {edit.detail['drift']:.0e})")

    plain = controller.deploy()
    report = verify(model, plain, test.tensors[0])
    small_vgg().load_state_dict(plain.state_dict(), strict=True)
    save(model, out / "model.safetensors")
    save(plain, out / "plain.safetensors")
    picture = draw_evolution(controller.events, out / "evolution.png")
    found: dict[str, object] = {
        "config": config.to_dict(),
        "epochs": epochs,
        "accuracy_evolved": accuracy(model, test),
        "accuracy_plain": accuracy(plain, test),
        "fold_error": report.error,
        "fold_passed": report.passed,
        "parameters_evolved": sum(p.numel() for p in model.parameters()),
        "parameters_plain": sum(p.numel() for p in plain.parameters()),
        "seconds": round(time.perf_counter() - began, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "seed": seed,
    }
    (out / "summary.json").write_text(json.dumps(found, indent=2) + "\n")
    print(f"evolved: {found['parameters_evolved']:,} parameters, {found['accuracy_evolved']:.2f} % on the test images")
    print(f"folded:  {found['parameters_plain']:,} parameters, {found['accuracy_plain']:.2f} %")
    print(f"same function: {report}")
    print(f"results in {out}/: plain.safetensors, model.safetensors, events.jsonl, summary.json, {picture.name}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=24)
    parser.add_argument("--interval", type=int, default=3, help="epochs between structure updates")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
