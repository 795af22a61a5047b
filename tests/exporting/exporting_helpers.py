"""Models to export, and files run through nothing of dyrep."""

from __future__ import annotations

import onnxruntime
import torch
from torch import nn

import dyrep

FILES = ["model.onnx", "model.pt2"]
EXAMPLE = torch.zeros(1, 3, 8, 8)


def small_net():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


def evolve_(model):
    """Grow branches that matter, with statistics of their own."""
    names = [name for name, module in model.named_modules() if type(module) is nn.Conv2d]
    dyrep.expand_(model, names, gamma=1.0)
    for name, statistic in model.named_buffers():
        if name.endswith("running_mean"):
            nn.init.uniform_(statistic, -0.2, 0.2)
        elif name.endswith("running_var"):
            nn.init.uniform_(statistic, 0.5, 2.0)
    return model


def run_onnx(path, *inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})


def run_file(path, *inputs):
    """All outputs in order, through nothing of dyrep."""
    if path.suffix == ".onnx":
        return [torch.from_numpy(array) for array in run_onnx(path, *inputs)]
    found = torch.utils._pytree.tree_leaves(torch.export.load(path).module()(*inputs))
    return [leaf.detach() for leaf in found if leaf is not None]


def error(found, expected):
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


class Variadic(nn.Module):
    def __init__(self, gather):
        super().__init__()
        self.conv, self.gather = nn.Conv2d(3, 3, 3, padding=1), gather

    def forward(self, *images):
        return self.gather([self.conv(image) for image in images])
