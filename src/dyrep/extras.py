"""Packages that not everyone has: which extra brings them, and how it is told that one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from dyrep.errors import MissingPackageError

EXTRAS = {
    "train": {
        "PIL": "pillow",
        "rich": "rich",
        "sklearn": "scikit-learn",
        "timm": "timm",
        "torchvision": "torchvision",
        "tyro": "tyro",
    },
    "report": {"matplotlib": "matplotlib", "tyro": "tyro"},
    "export": {"onnx": "onnx", "onnxruntime": "onnxruntime", "onnxscript": "onnxscript", "tyro": "tyro"},
    "downstream": {
        "faster_coco_eval": "faster-coco-eval",
        "segmentation_models_pytorch": "segmentation-models-pytorch",
        "torchmetrics": "torchmetrics",
    },
    "tensorboard": {"tensorboard": "tensorboard"},
}
"""The modules that each extra brings, and the packages they come in."""


def needed(module: str, purpose: str, otherwise: str = "") -> Any:
    """Import a module that not everyone has.

    Args:
        module: one of `EXTRAS`, or a part of one.
        purpose: what cannot be done without it, as a sentence begins.
        otherwise: how to do without, if one can.

    Raises:
        MissingPackageError: it cannot be imported; the message says what to install.

    Example:
        >>> needed("PIL.Image", "reading images").__name__
        'PIL.Image'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(module, purpose, otherwise, error) from error


def missing(module: str, purpose: str, otherwise: str = "", cause: ImportError | None = None) -> MissingPackageError:
    """The error that says what to install; arguments are those of `needed`, and what went wrong.

    Example:
        >>> print(missing("sklearn.datasets", "the data set digits"))
        the data set digits needs scikit-learn, which is not installed: pip install ".[train]" (or just scikit-learn)
        >>> print(missing("timm", "a model", "those of torchvision do without", ImportError("no huggingface_hub")))
        a model needs timm, which cannot be imported (no huggingface_hub): pip install ".[train]" (or just timm); \
those of torchvision do without
    """
    root = module.partition(".")[0]
    extra = extra_of(module)
    assert extra is not None, f"no extra brings {module}"
    package = EXTRAS[extra][root]
    absent = cause is None or (isinstance(cause, ModuleNotFoundError) and cause.name == root)
    what = "is not installed" if absent else f"cannot be imported ({cause})"
    remedy = f'pip install ".[{extra}]" (or just {package})'
    instead = f"; {otherwise}" if otherwise else ""
    return MissingPackageError(f"{purpose} needs {package}, which {what}: {remedy}{instead}", name=module)


def extra_of(module: str) -> str | None:
    """The first extra that brings a module; None if none does.

    Example:
        >>> extra_of("PIL.Image"), extra_of("math")
        ('train', None)
    """
    root = module.partition(".")[0]
    return next((extra for extra, modules in EXTRAS.items() if root in modules), None)
