"""Files of sequences that were swapped out because pages ran out. The files are unlinked: closing deletes them.

Copies of offloaded pools lie in files already (kvcache/buffers.py) and stay there.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graphcore.host_pages import is_of_file
from graphcore.kvcache.host_copies import Copies, HostCopies
from graphcore.kvcache.page_allocator import SwappedSequence


@dataclass(frozen=True)
class SwapFile:
    """A file with the pages and recurrent states of one sequence.

    Attributes:
        tokens: int, number of tokens that the sequence has run.
        layout: dtype and shape of each tensor, in order, or the tensor itself if it lies in a file of its own; two
            make a part.
    """

    tokens: int
    layout: tuple[tuple[torch.dtype, torch.Size] | Tensor, ...]
    _file: IO[bytes]

    @classmethod
    def write(cls, kept: SwappedSequence, folder: Path) -> "SwapFile":
        """Write a sequence to a file in a folder.

        Raises:
            OSError: the folder cannot be written, or its disk is full; nothing is left there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(dir=folder, prefix="sequence-", buffering=0)  # noqa: SIM115  # closed in `close`
        tensors = [tensor.contiguous() for part in kept.copies.read() for tensor in part]
        try:
            for tensor in tensors:
                if is_of_file(tensor):
                    continue
                left = bytes_of(tensor)
                while left:
                    left = left[file.write(left) :]
        except BaseException:
            file.close()
            raise
        layout = (tensor if is_of_file(tensor) else (tensor.dtype, tensor.shape) for tensor in tensors)
        return cls(kept.tokens, tuple(layout), file)

    def read(self) -> SwappedSequence:
        """Return the sequence.

        Raises:
            OSError: the file cannot be read to its end.
        """
        self._file.seek(0)
        tensors = [one if isinstance(one, Tensor) else self._read_one(*one) for one in self.layout]
        parts: list[Copies] = list(zip(tensors[::2], tensors[1::2], strict=True))
        return SwappedSequence(self.tokens, HostCopies(parts))

    def _read_one(self, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        left = bytes_of(tensor)
        while left:
            count = self._file.readinto(left)  # type: ignore[attr-defined]  # unbuffered files have `readinto`
            if not count:
                raise OSError("a sequence that was swapped out has lost its end")
            left = left[count:]
        return tensor

    def close(self) -> None:
        """Close the file, which deletes it."""
        self._file.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor."""
    array: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # numpy says so from Python 3.12 on
