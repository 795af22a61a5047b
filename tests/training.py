"""A small training run that the tests of the controller share."""

import torch
import torch.nn.functional as F
from torch import nn

from dyrep import DyRep, DyRepConfig


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def make_batches(count=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 3, 8, 8, generator=generator), torch.randint(4, (8,), generator=generator))
        for _ in range(count)
    ]


def loss_of(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train_epoch(model, optimizer, batches):
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()


def start(seed=0, optimizer="sgd", log=None, **settings):
    """A model, its optimizer and a controller."""
    model = make_net(seed)
    kinds = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    made = kinds[optimizer](model.parameters())
    config = DyRepConfig(**{"interval": 1, "score": "snip", "calibration_batches": 3, **settings})
    return model, made, DyRep(model, made, config, loss=loss_of, log=log)
