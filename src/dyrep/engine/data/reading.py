"""What all readers share: damaged files, decoded images."""

from __future__ import annotations

import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyrep.errors import DataError
from dyrep.extras import needed

if TYPE_CHECKING:
    from PIL.Image import Image

DAMAGE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    tarfile.TarError,
    pickle.UnpicklingError,
)


def pillow() -> Any:
    """Pillow's module for reading and writing images.

    Raises:
        MissingPackageError: it is not installed.

    Example:
        >>> pillow().new("RGB", (2, 3)).size
        (2, 3)
    """
    return needed("PIL.Image", "reading images")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn everything that a damaged file can cause into an error that names it."""
    try:
        yield
    except DataError:
        raise
    except DAMAGE as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}): get it anew") from error


def decode(path: str) -> Image:
    """Read an image file as RGB.

    Raises:
        DataError: the file is not there or not an image.
    """
    image_module = pillow()
    try:
        with image_module.open(path) as image:
            return _eight_bits(image, path).convert("RGB")
    except DataError:
        raise
    except Exception as error:  # decoders of damaged files raise nearly anything
        raise DataError(f"{path} cannot be decoded ({type(error).__name__}: {error})") from error


def _eight_bits(image: Image, path: str) -> Image:
    """An image whose values are at most 255: of larger ones in grey, Pillow would make white."""
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise DataError(
            f"{path} has grey values from {values.min()} to {values.max()}, expected 8 or 16 bits: convert it"
        )
    scaled: Image = pillow().fromarray(((values + 128) // 257).astype(np.uint8))
    return scaled


def fit(image: Image, resize: int, crop: int) -> Image:
    """Bring the short side of an image to a size, and cut a square out of its centre.

    Args:
        image: any image.
        resize: length of the short side.
        crop: side of the square.

    Example:
        >>> import PIL.Image
        >>> fit(PIL.Image.new("RGB", (640, 480)), 256, 224).size
        (224, 224)
    """
    image_module = pillow()
    width, height = image.size
    short, long = min(width, height), max(width, height)
    if short != resize:
        long = int(resize * long / short)
        width, height = (resize, long) if width <= height else (long, resize)
        image = image.resize((width, height), image_module.Resampling.BILINEAR)
    if (width, height) == (crop, crop):
        return image
    left, top = round((width - crop) / 2), round((height - crop) / 2)
    return image.crop((left, top, left + crop, top + crop))
