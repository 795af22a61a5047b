"""Data sets: read them, hold examples out, and give deterministic batches from the device's memory or from disk."""

from dyrep.engine.data.augment import Augmentation
from dyrep.engine.data.cifar import read_cifar
from dyrep.engine.data.digits import read_digits
from dyrep.engine.data.folders import load_files, read_folder
from dyrep.engine.data.loader import Loader, Loading
from dyrep.engine.data.opening import DATASETS, Data, open_data
from dyrep.engine.data.resident import ResidentLoader
from dyrep.engine.data.splits import ImageArrays, ImageFiles, Source, hold_out
from dyrep.engine.data.streaming import StreamingLoader

__all__ = [
    "DATASETS",
    "Augmentation",
    "Data",
    "ImageArrays",
    "ImageFiles",
    "Loader",
    "Loading",
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
