"""Loss and accuracy of a model on a held-out split."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dyrep.engine.data.loader import Loader
from dyrep.engine.precision import computing_in
from dyrep.engine.world import World


@torch.no_grad()
def evaluate(model: nn.Module, loader: Loader, world: World, precision: torch.dtype) -> dict[str, float]:
    """Mean loss and accuracy in percent over a split, in eval mode, over all ranks.

    Args:
        model: the bare model; its mode is restored.
        loader: an evaluation loader.
        world: the processes that share the work.
        precision: dtype of convolutions and products.
    """
    training = model.training
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    for raw in loader.batches(0):
        images, labels = loader.prepare(raw)
        with computing_in(precision, world.device):
            logits = model(images)
        logits = logits.float()
        sums[0] += F.cross_entropy(logits, labels, reduction="sum")
        sums[1] += (logits.argmax(1) == labels).sum()
        sums[2] += len(labels)
    model.train(training)
    loss, correct, count = world.sum(sums).tolist()
    return {"loss": loss / max(count, 1), "accuracy": 100 * correct / max(count, 1)}
