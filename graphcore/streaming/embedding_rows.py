"""Embedding lookup in tables that are not on the device: only the rows of the current tokens are copied to it.

Legend: B batch, T tokens, D model dim, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from graphcore.checkpoint.streamed_file import ByteSource
from graphcore.host_pages import shared_pages
from graphcore.kernels.packing import Packing
from graphcore.nn.block import RESIDUAL_DTYPE
from graphcore.streaming.fill_jobs import ROOM, file_jobs, read_job
from graphcore.streaming.host_store import MatrixModule
from graphcore.weights.conversion import CONVERSION_NBYTES, RowConversion, row_span
from graphcore.weights.loader import Loader


class RowTable(MatrixModule, Protocol):
    """A table that need not be in memory, because its rows can be fetched one by one."""

    @property
    def width(self) -> int:
        """Width D of a row."""

    def fetch_rows(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Look up all later tokens with `gather`, because the table is not in memory.

        Args:
            gather: function from token ids [B, T] to rows [B, T, D].
        """


@dataclass
class FileRows:
    """A lookup that reads a table's rows from the checkpoint's files.

    Attributes:
        weight: name of the table in the model.
        files: open files, by path.
        dim: width D of a row.
        dtype: dtype of the rows: the compute dtype for a dense table, float32 for a packed one.
        device: device that the rows are sent to.
        most_nbytes: most bytes of a read.
    """

    loader: Loader
    weight: str
    files: Mapping[Path, ByteSource]
    dim: int
    dtype: torch.dtype
    device: torch.device
    most_nbytes: int = CONVERSION_NBYTES

    def __post_init__(self) -> None:
        self._buffer = shared_pages(self.most_nbytes + ROOM)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of token ids [B, T] int64: [B, T, D].

        Raises:
            CheckpointError: the file changed, or cannot be read.
        """
        distinct, places = torch.unique(token_ids.cpu(), return_inverse=True)
        rows = torch.empty(len(distinct), self.dim, dtype=self.dtype, device="cpu")
        info = self.loader.checkpoint.tensors[self.loader.sources[self.weight].name]
        spans = [row_span(self.loader, self.weight, token_id) for token_id in distinct.tolist()]
        conversions = [
            RowConversion(self.weight, (span,), info, None, rows, row, row + 1, rows[row].nbytes)
            for row, span in enumerate(spans)
        ]
        for job in file_jobs(conversions, most_nbytes=self.most_nbytes):
            read_job(job, self.files, self._buffer)
            for conversion, at in job.conversions:
                conversion.write([self._buffer[at[0] : at[0] + conversion.spans[0].nbytes]], 1)
        for path in {span.file for span in spans}:
            self.files[path].check_unchanged()
        return rows[places].to(self.device)


@dataclass
class HostRows:
    """A lookup in a table in RAM that copies the rows to the device.

    Attributes:
        table: [V, D] in the compute dtype, or packed bytes.
        packing: packing of the table; None if it is dense.
    """

    table: Tensor
    packing: Packing | None
    device: torch.device

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of token ids [B, T] int64: [B, T, D]."""
        ids = token_ids.cpu()
        if self.packing is None:
            return torch.nn.functional.embedding(ids, self.table).to(self.device)
        return self.packing.gather(ids, self.table, RESIDUAL_DTYPE).to(self.device)
