"""The embedding and the head of a skeleton, in forms whose weights need not be in memory whole.

    TableEmbedding   a row for each token, from the table, or from `gather` where the table is not in memory
    SlicedHead       the logits row slice by row slice, always the same slices, wherever their rows lie

To the model they still are an Embedding and a Linear, with the same names of weights.

Legend: B batch, T tokens, D model dim, V vocab.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphcore.kernels.packing import Packing
from graphcore.nn.decoder import equal_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TableEmbedding(nn.Embedding):
    """An Embedding whose table need not be in memory.

    Attributes:
        gather: function from token ids [B, T] to rows [B, T, D] where the table is not in memory; else None.
        packing: None, because the table is dense.
    """

    packing: Packing | None = None

    def __init__(self, plain: nn.Embedding) -> None:
        super().__init__(plain.num_embeddings, plain.embedding_dim, device="meta", dtype=plain.weight.dtype)
        self.gather: Callable[[Tensor], Tensor] | None = None

    @property
    def width(self) -> int:
        """Width D of a row."""
        return self.embedding_dim

    def fetch_rows(self, gather: Callable[[Tensor], Tensor]) -> None:
        """Use `gather`, from token ids [B, T] to rows [B, T, D], from now on: the table is not in memory."""
        self.gather = gather

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # Embedding's own name for it
        """Return rows, [B, T, D]."""
        return super().forward(input) if self.gather is None else self.gather(input)


class HeadSlice(nn.Module):
    """A slice of a head's rows; `weight` is a view of the whole matrix, or of a slot."""

    weight: Tensor

    def __init__(self, rows: range, whole: nn.Linear) -> None:
        super().__init__()
        self.rows = rows
        self.bias: Tensor | None = None
        self.register_buffer(
            "weight", torch.empty(len(rows), whole.in_features, dtype=whole.weight.dtype, device="meta")
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of the rows, [B, T, len(rows)]."""
        return functional.linear(hidden, self.weight, self.bias)


class SlicedHead(nn.Linear):
    """A head that computes its logits slice by slice.

    Attributes:
        slices: slices of all rows, in order; outside the module tree, so that the head's weights keep their names.
        packing: None, because the head is dense.
    """

    packing: Packing | None = None

    def __init__(self, plain: nn.Linear, most_nbytes: int) -> None:
        has_bias = plain.bias is not None
        super().__init__(plain.in_features, plain.out_features, has_bias, device="meta", dtype=plain.weight.dtype)
        row_nbytes = plain.in_features * plain.weight.itemsize
        parts = equal_parts(plain.out_features, max(1, most_nbytes // row_nbytes))
        self.slices: Sequence[HeadSlice] = tuple(HeadSlice(rows, plain) for rows in parts)

    def bind_slices(self) -> None:
        """Bind the slices to views of the weight if it is in memory; else the stream binds them to slots."""
        for part in self.slices:
            begin, end = part.rows.start, part.rows.stop
            part.bias = None if self.bias is None else self.bias.detach()[begin:end]
            if not self.weight.is_meta:
                part.weight = self.weight.detach()[begin:end]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # Linear's own name for it
        """Return logits, [B, T, V]."""
        parts = [part(input) for part in self.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def table_name(model: "PreTrainedModel") -> str:
    """Replace the model's embedding by a `TableEmbedding` if it is a plain one; return the module's name.

    A module that computes more than a row, such as a scale, stays as it is.
    """
    table = model.get_input_embeddings()
    name = next(str(name) for name, module in model.named_modules() if module is table)
    if type(table) is nn.Embedding:
        replace_module(model, name, TableEmbedding(table))
    return name


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module called `name`."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, module.requires_grad_(False))
