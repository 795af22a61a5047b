"""Decoded images of any sizes: kept in memory, or read again whenever they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dyrep.engine.data.reading import decode, pillow, reading


def read_picture(path: str) -> Tensor:
    """An image file as uint8 [3, H, W].

    Raises:
        DataError: the file is not there or not an image.
    """
    return torch.from_numpy(np.array(decode(path))).permute(2, 0, 1).contiguous()


class Pictures:
    """What is read from a list of files, as tensors.

    Args:
        paths: the files.
        read: makes a tensor of one.
        device: where they are kept.
        resident: whether all are read now and kept; otherwise batches are read one ahead of their use.
        workers: threads that read.

    Example:
        >>> numbers = Pictures(["1", "2", "3"], lambda path: torch.tensor(int(path)), resident=True)
        >>> [[int(x) for x in batch] for batch in numbers.batches([torch.tensor([2, 0]), torch.tensor([1])])]
        [[3, 1], [2]]
    """

    def __init__(
        self,
        paths: Sequence[str],
        read: Callable[[str], Tensor] = read_picture,
        *,
        device: torch.device | str = "cpu",
        resident: bool,
        workers: int = 4,
    ) -> None:
        self.paths, self._read, self._device, self._workers = paths, read, torch.device(device), max(workers, 1)
        self._kept: list[Tensor] | None = None
        if resident:
            with ThreadPoolExecutor(self._workers) as pool:
                self._kept = [picture.to(self._device) for picture in pool.map(read, paths)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        return self._read(self.paths[index]).to(self._device) if self._kept is None else self._kept[index]

    def batches(self, indices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Batches by the places of their pictures; while one is used, the next is read."""
        kept = self._kept
        if kept is not None:
            yield from ([kept[place] for place in batch.tolist()] for batch in indices)
            return
        with ThreadPoolExecutor(self._workers) as pool:
            waiting: list[Future[Tensor]] | None = None
            for batch in indices:
                asked = [pool.submit(self._read, self.paths[place]) for place in batch.tolist()]
                if waiting is not None:
                    yield [future.result().to(self._device) for future in waiting]
                waiting = asked
            if waiting is not None:
                yield [future.result().to(self._device) for future in waiting]


def image_sizes(paths: Sequence[str], workers: int = 4) -> list[tuple[int, int]]:
    """Width and height of images, by what their files say at the beginning: nothing is decoded.

    Raises:
        DataError: a file is not there or not an image.
    """
    image_module = pillow()

    def look(path: str) -> tuple[int, int]:
        with reading(Path(path)), image_module.open(path) as image:
            width, height = image.size
            return width, height

    with ThreadPoolExecutor(max(workers, 1)) as pool:
        return list(pool.map(look, paths))
