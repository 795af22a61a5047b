"""A small training run, and what tests of several packages need beside it."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

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
    config = DyRepConfig.paper(**{"interval": 1, "score": "snip", "calibration_batches": 3, **settings})
    return model, made, DyRep(model, made, config, loss=loss_of, log=log)


@torch.no_grad()
def eval_output(model: nn.Module, x: Tensor) -> Tensor:
    """The model's output in eval mode, its modes put back."""
    modes = [(module, module.training) for module in model.modules()]
    output = model.eval()(x)
    for module, mode in modes:
        module.training = mode
    return output


@contextmanager
def member(rank, init_file):
    """One of two processes that work together; they leave together too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
    yield
    dist.barrier()
    dist.destroy_process_group()
