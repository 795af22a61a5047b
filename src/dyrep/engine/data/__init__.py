"""Data sets: read them, hold examples out, and give deterministic batches from the device's memory or from disk."""

from dyrep.engine.data.augment import Augmentation
from dyrep.engine.data.loader import Loader
from dyrep.engine.data.opening import DATASETS, Data, open_data
from dyrep.engine.data.resident import ResidentLoader
from dyrep.engine.data.sources import (
    DataError,
    ImageArrays,
    ImageFiles,
    Source,
    hold_out,
    load_files,
    read_cifar,
    read_digits,
    read_folder,
)
from dyrep.engine.data.streaming import StreamingLoader

__all__ = [
    "DATASETS",
    "Augmentation",
    "Data",
    "DataError",
    "ImageArrays",
    "ImageFiles",
    "Loader",
    "ResidentLoader",
    "Source",
    "StreamingLoader",
    "hold_out",
    "load_files",
    "open_data",
    "read_cifar",
    "read_digits",
    "read_folder",
]
