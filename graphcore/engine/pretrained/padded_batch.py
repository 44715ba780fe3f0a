"""A batch of padded rows, as transformers has it, and the tokens of each row without padding, as the engine has them.

    mask    0 0 1 1 1      row      a b c          padding is left out wherever it stands, and positions count tokens
    ids     - - a b c

Legend: B batch, T columns, P columns that the cache holds, K kept columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.errors import ConfigError


@dataclass(frozen=True)
class PaddedBatch:
    """The columns of one call.

    Attributes:
        ids: [B, T] int64 on the CPU; padding may be any number.
        keeps: [B, T] bool on the CPU, False where a column is padding.
    """

    ids: Tensor
    keeps: Tensor

    @classmethod
    def of(cls, ids: Tensor, attention_mask: Tensor | None, held: int) -> "PaddedBatch":
        """Return the batch of [B, T] ids.

        Args:
            attention_mask: [B, P + T] of numbers or truths; None for no padding.
            held: number P of columns that the cache holds.

        Raises:
            ConfigError: the ids are not [B, T], or there are none; or the mask has another shape, or values other than
                0 and 1, or leaves out everything.
        """
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            found = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ConfigError(f"input_ids must be a tensor [B, T] with at least one token, found {found}")
        rows, length = ids.shape
        if attention_mask is None:
            return cls(ids.cpu(), torch.ones(rows, length, dtype=torch.bool, device="cpu"))
        if attention_mask.shape != (rows, held + length):
            found, wanted = list(attention_mask.shape), [rows, held + length]
            raise ConfigError(
                f"attention_mask is {found}, and must be {wanted}: a column for each one of the cache and each new one"
            )
        mask = attention_mask[:, held:].cpu()
        if not ((mask == 0) | (mask == 1)).all():
            raise ConfigError("attention_mask must be 0 where a column is padding and 1 elsewhere, [B, T]")
        if not mask.any():
            raise ConfigError("attention_mask leaves out all new columns; keep at least one token of the batch")
        return cls(ids.cpu(), mask.bool())

    @property
    def tokens(self) -> list[list[int]]:
        """Token ids of each row, padding left out."""
        return [row[keeps].tolist() for row, keeps in zip(self.ids, self.keeps, strict=True)]

    @property
    def columns(self) -> list[list[int | None]]:
        """Token ids of each row; None where a column is padding."""
        pairs = zip(self.ids.tolist(), self.keeps.tolist(), strict=True)
        return [[token if keeps else None for token, keeps in zip(*row, strict=True)] for row in pairs]

    def check_positions(self, position_ids: Tensor | None, held: Sequence[int]) -> None:
        """Check that positions number the tokens of each row.

        Args:
            position_ids: [B or 1, T]; None leaves the numbering to the engine.
            held: tokens that the cache holds of each row.

        Raises:
            ConfigError: the positions are others.
        """
        if position_ids is None:
            return
        expected = self.keeps.cumsum(dim=1) - 1 + torch.tensor(held, dtype=torch.int64, device="cpu")[:, None]
        given = position_ids.cpu().expand_as(expected)
        if (self.keeps & (given != expected)).any():
            raise ConfigError(
                "position_ids must number the tokens of each row from 0 on, padding left out; leave them out"
            )

    def spread(self, parts: Sequence[Tensor], count: int) -> Tensor:
        """Return values of the last `count` columns, [B, K, ...]; zeros where a column is padding.

        Args:
            parts: values of the last tokens, [t, ...], of each row that has a token.
        """
        keeps, rows = self.keeps[:, -count:], self.keeps.any(dim=1).nonzero().flatten().tolist()
        values = parts[0].new_zeros(*keeps.shape, *parts[0].shape[1:])
        for row, part in zip(rows, parts, strict=True):
            number = int(keeps[row].sum())
            values[row, keeps[row].to(part.device)] = part[len(part) - number :]
        return values
