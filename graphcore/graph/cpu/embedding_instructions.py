"""The start of a native program: token embeddings and per-layer features, by instructions or gathered by the host.

Legend: B rows of the program, D model dim, P features of one layer.

    rows of the table -> x      matrix @ x -> norm of each layer's P, + rows of the features' table -> features
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphcore.graph.cpu.operands import native_matrix, rounding_of
from graphcore.graph.state import StepState
from graphcore.kernels.cpu import instructions
from graphcore.kernels.cpu import program as native
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.nn.decoder import SUM_SCALE, Embedding, LayerFeatures, Table
from graphcore.nn.norm import RMSNorm
from graphcore.nn.span import Span

NO_NORM = instructions.Norm()


@dataclass
class GatherStep:
    """Gathers on the host the rows of tables that the program's instructions cannot read.

    Attributes:
        x: [B, D] float32, filled with the tokens' embedding; None if instructions do that.
        features: [B, L P] float32, filled with the scaled rows of the features' table; None if instructions do that, or
            if the model has no per-layer features.
    """

    group: int
    state: StepState
    embedding: Embedding
    x: Tensor | None = None
    features: Tensor | None = None

    @property
    def fetches(self) -> bool:
        """Whether the host gathers any rows."""
        return self.x is not None or self.features is not None

    def replay(self) -> None:
        """Fill `x` and `features` for the rows that have a token."""
        state, per_layer = self.state, self.embedding.per_layer
        rows = state.span.counts.nonzero().flatten()
        if not len(rows):
            return
        token_ids, span = state.token_ids[rows], Span(*(part[rows] for part in state.span))
        if self.x is not None:
            self.x[rows] = self.embedding(token_ids, span)[:, 0]
        if self.features is not None and per_layer is not None:
            # A single factor, as in the instruction: multiplying twice would change the last bits.
            self.features[rows] = per_layer.table.stored_rows(token_ids)[:, 0] * (per_layer.table.scale * SUM_SCALE)


def append_embedding(program: native.NativeProgram, state: StepState, embedding: Embedding, x: Tensor) -> GatherStep:
    """Append the lookup of the tokens' embedding into `x`; return the step that gathers rows on the host if needed."""
    if embedding.is_gathered:
        return GatherStep(0, state, embedding, x=x)
    _append_rows(program, state, embedding, x, embedding.scale, embedding.positions)
    return GatherStep(0, state, embedding)


def append_features(program: native.NativeProgram, gather: GatherStep, x: Tensor) -> Tensor | None:
    """Append the instructions of the per-layer features; return these, [B, L P] float32, or None if there are none.

    Args:
        gather: host step, changed to gather rows of the features' table if instructions cannot read the table.
        x: [B, D] float32, the tokens' embedding.
    """
    per_layer = gather.embedding.per_layer
    if per_layer is None:
        return None
    table, projection, norm = per_layer.table, per_layer.projection, per_layer.norm
    assert isinstance(norm, RMSNorm), f"{type(norm).__name__} would need the scale of the projection"
    features, projected = program.buffer(table.width), program.block_buffer(table.width)
    if _is_readable(table):
        _append_rows(program, gather.state, table, features, table.scale * SUM_SCALE)
    else:
        gather.features = features
    native.append_project(program, x, [native_matrix(program, projection, projected)], rounding_of(projection), NO_NORM)
    # The norm of a product times s is the product's own with eps / s^2.
    eps = norm.eps / per_layer.dim_scale**2
    # where memory is planned, on the meta device, a product would import torch's compiler
    weight = norm.weight if norm.weight.is_meta else norm.weight * SUM_SCALE
    scaled = native.norm(program, "rms", eps, program.own(weight), None)
    given, width = (program.per_row(projected), scaled, program.per_row(features)), per_layer.width
    program.needs(row_floats=width)
    program.add(instructions.AddNorm(*given, width, False, table.width // width))
    return features


def features_of(per_layer: LayerFeatures, features: Tensor, layer: int) -> Tensor:
    """Return one layer's part of the features, [B, P]."""
    return features[:, layer * per_layer.width : (layer + 1) * per_layer.width]


def _is_readable(table: Table) -> bool:
    """Return whether instructions can read the table's rows."""
    return not table.is_gathered and (table.packing is None or isinstance(table.packing, KernelPacking))


def _append_rows(
    program: native.NativeProgram,
    state: StepState,
    table: Table,
    out: Tensor,
    scale: float,
    positions: Tensor | None = None,
) -> None:
    """Append out = scale * the table's row of each token (+ the row of its position)."""
    arguments = instructions.Embed()
    arguments.table = program.matrix(table.weight, table.packing)
    if positions is not None:
        arguments.positions = program.matrix(positions, None)
    arguments.token_ids = program.address(state.token_ids, torch.int64)
    arguments.starts = program.address(state.span.starts, torch.int64)
    arguments.x, arguments.scale = program.per_row(out), scale
    program.needs(row_floats=table.width + 32)
    program.add(arguments)
