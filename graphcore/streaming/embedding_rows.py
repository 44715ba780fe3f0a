"""Rows of an embedding whose table is not on the device, fetched as tokens need them.

Legend: B batch, T tokens, D model dim, N distinct tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graphcore.checkpoint.byte_source import ByteSource
from graphcore.nn.block import RESIDUAL_DTYPE
from graphcore.quant.packing import Packing
from graphcore.streaming.jobs import BUFFER_NBYTES, file_jobs, read_job
from graphcore.streaming.pages import shared_pages
from graphcore.weights.loader import Loader
from graphcore.weights.pieces import RowsPiece, row_span


@dataclass
class FileRows:
    """Rows read from the checkpoint's file.

    Attributes:
        weight: the table's name in the decoder.
        files: open, by path.
        dim: D.
        dtype: of the rows: the compute dtype of a dense table, float32 of a packed one.
        device: where rows are wanted.
    """

    loader: Loader
    weight: str
    files: Mapping[Path, ByteSource]
    dim: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        self._buffer = shared_pages(BUFFER_NBYTES)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Return the rows of token ids [B, T] int64: [B, T, D].

        Raises:
            CheckpointError: the file changed, or cannot be read.
        """
        distinct, places = torch.unique(token_ids.cpu(), return_inverse=True)
        rows = torch.empty(len(distinct), self.dim, dtype=self.dtype)
        info = self.loader.checkpoint.tensors[self.loader.sources[self.weight].name]
        pieces = [
            RowsPiece(self.weight, (row_span(self.loader, self.weight, token_id),), info, None, rows, row, row + 1)
            for row, token_id in enumerate(distinct.tolist())
        ]
        for job in file_jobs(pieces):
            read_job(job, self.files, self._buffer)
            for piece, at in job.pieces:
                piece.write([self._buffer[at[0] : at[0] + piece.spans[0].nbytes]], 1)
        for path in {span.file for piece in pieces for span in piece.spans}:
            self.files[path].check_unchanged()
        return rows[places].to(self.device)


@dataclass
class HostRows:
    """Rows of a table that waits in RAM.

    Attributes:
        table: [V, D] in the compute dtype, or packed bytes.
        packing: None is dense.
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
