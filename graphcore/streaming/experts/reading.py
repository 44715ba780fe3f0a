"""Reads of one expert from a checkpoint: its rows lie in one run of each stored tensor's spans, in every file layout.

stored [X, R, C]     X experts, R rows, C columns; expert e has rows e R .. e R + R - 1, read a few megabytes at a time
gate, up             rows of a fused tensor: even and odd rows, read once (Hugging Face), or two halves (GGUF)
Transpose            a stored row is a column of the matrix (Hugging Face's dense experts)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from graphcore.arch.folds import Fold, PickRows, Transpose
from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.kernels.packing import GROUP_ROWS, Packing
from graphcore.nn.moe import ExpertLinear
from graphcore.quant import FORMATS
from graphcore.quant.registry import has_tensor_scale
from graphcore.weights.conversion import CONVERSION_NBYTES, Conversion, copy_bytes
from graphcore.weights.loader import Loader

EVERY = PickRows(0, 1 << 62, axis=-2)


@dataclass(frozen=True)
class ExpertMatrix:
    """A matrix to fill from an expert's stored rows.

    Attributes:
        packing: packing of the matrix; None if it is dense.
        out: memory of the matrix: [O, I] compute dtype, or [nbytes] uint8 if it is packed.
        pick: selection of the stored rows, or of the stored columns if `is_transposed`, that form the matrix.
    """

    weight: str
    packing: Packing | None
    out: Tensor
    pick: PickRows
    is_transposed: bool


@dataclass(frozen=True)
class ExpertConversion:
    """The conversion of an expert's stored rows begin .. end - 1 into one or more matrices.

    Attributes:
        spans: spans of those rows in the files.
        info: description of the stored tensor, [X, R, C].
        targets: matrices to fill; each takes some of the rows or columns.
    """

    spans: tuple[FileSpan, ...]
    info: TensorInfo
    loader: Loader
    targets: tuple[ExpertMatrix, ...]
    begin: int
    end: int
    nbytes: int

    @property
    def weight(self) -> str:
        """Name of the first weight."""
        return self.targets[0].weight

    @property
    def plain_place(self) -> None:
        """Always None: the rows may have to be packed, so they are never read directly into a slot."""

    def write(self, parts: Sequence[Tensor], threads: int | None) -> None:
        """Write the rows into the matrices."""
        raw = parts[0] if len(parts) == 1 else self.loader.checkpoint.assemble(self.info.name, parts)
        for target in self.targets:
            self._fill(target, raw, threads)

    def _fill(self, target: ExpertMatrix, raw: Tensor, threads: int | None) -> None:
        pick, count = target.pick, self.end - self.begin
        if target.is_transposed:
            columns = self._values(raw, target.out)[:, pick.start : pick.stop : pick.step]
            target.out[:, self.begin : self.end].copy_(columns.mT)
            return
        skipped = pick.start - self.begin if self.begin < pick.start else (pick.start - self.begin) % pick.step
        rows = slice(skipped, pick.stop - self.begin, pick.step)
        first = (self.begin + skipped - pick.start) // pick.step
        if target.packing is not None:
            target.packing.pack_rows(raw.view(count, -1)[rows], first, target.out, threads=threads)
            return
        values = self._values(raw, target.out)[rows]
        out = target.out[first : first + len(values)]
        if values.dtype == out.dtype and values.is_contiguous():
            copy_bytes(values, out)
        else:
            out.copy_(values)

    def _values(self, raw: Tensor, out: Tensor) -> Tensor:
        """Return the stored rows as numbers, [rows, C]: block formats in the dtype of `out`, others as stored."""
        shape = (self.end - self.begin, self.info.shape[-1])
        if self.info.encoding in FORMATS and self.info.encoding not in DENSE_DTYPES:
            return FORMATS[self.info.encoding].dequantize(raw, shape, out.dtype)
        dtype = DENSE_DTYPES[self.info.encoding]
        is_aligned = raw.data_ptr() % dtype.itemsize == 0 and raw.storage_offset() % dtype.itemsize == 0
        return (raw if is_aligned else raw.clone()).view(dtype).view(shape)


def expert_obstacle(loader: Loader, weights: Mapping[str, ExpertLinear]) -> str:
    """Return why experts cannot be read one by one, for the first tensor that prevents it; empty if all can.

    Args:
        weights: modules that hold the experts' matrices, by the weights' names.
    """
    for weight, linear in weights.items():
        source = loader.sources[weight]
        info = loader.checkpoint.tensors[source.name]
        is_packed_as_stored = linear.packing is None or linear.packing.format == info.encoding
        is_known = info.encoding in FORMATS or DENSE_DTYPES[info.encoding].is_floating_point
        if has_tensor_scale(info.encoding) or len(info.shape) != 3 or not (is_packed_as_stored and is_known):
            return f"experts of tensor '{source.name}' ({info.encoding}) cannot be read one by one"
        if not loader.checkpoint.has_row_runs(source.name):
            return f"experts of tensor '{source.name}' are stored as codes and scales, which are not read one by one"
        if _pick_of(source.folds, linear.packing is not None) is None:
            return f"experts of tensor '{source.name}' are not stored as runs of rows"
    return ""


def expert_conversions(
    loader: Loader, expert: int, targets: Mapping[str, tuple[Packing | None, Tensor]]
) -> list[Conversion]:
    """Return the conversions that fill one expert's matrices.

    Args:
        expert: index of the expert in its layer.
        targets: packing and memory of each matrix, by the weight's name.
    """
    together: dict[tuple[str, int], list[ExpertMatrix]] = {}
    for weight, (packing, out) in targets.items():
        source = loader.sources[weight]
        found = _pick_of(source.folds, packing is not None)
        assert found is not None, "expert_obstacle was asked"
        target = ExpertMatrix(weight, packing, out, *found)
        # Alternating rows share one read, and so do columns; halves are read separately.
        own = target.pick.start if target.pick.step == 1 and not target.is_transposed else -1
        together.setdefault((source.name, own), []).append(target)
    return [
        conversion for (name, _), group in together.items() for conversion in _conversions(loader, name, expert, group)
    ]


def _conversions(loader: Loader, name: str, expert: int, targets: Sequence[ExpertMatrix]) -> Iterator[Conversion]:
    info = loader.checkpoint.tensors[name]
    rows = info.shape[1]
    pick = targets[0].pick
    is_half = pick.step == 1 and not targets[0].is_transposed
    first, stop = (pick.start, min(pick.stop, rows)) if is_half else (0, rows)
    filled = sum(target.out.nbytes for target in targets)
    spans = loader.checkpoint.matrix_spans(name, expert)
    row_nbytes = [span.nbytes // rows for span in spans]
    unit = GROUP_ROWS * (1 if targets[0].is_transposed else pick.step)
    step = max(unit, CONVERSION_NBYTES // sum(row_nbytes) // unit * unit)
    for begin in range(first, stop, step):
        end = min(begin + step, stop)
        runs = tuple(
            FileSpan(span.file, span.offset + begin * each, (end - begin) * each)
            for span, each in zip(spans, row_nbytes, strict=True)
        )
        nbytes = filled * (end - first) // (stop - first) - filled * (begin - first) // (stop - first)
        yield ExpertConversion(runs, info, loader, tuple(targets), begin, end, nbytes)


def _pick_of(folds: Sequence[Fold], is_packed: bool) -> tuple[PickRows, bool] | None:
    """Return the selection of stored rows or columns, and whether it selects columns; None for any other folds."""
    is_transposed = bool(folds) and isinstance(folds[0], Transpose)
    picks = folds[1:] if is_transposed else folds
    if is_transposed and is_packed:
        return None
    match picks:
        case ():
            return EVERY, is_transposed
        case (PickRows(axis=-2) as pick,):
            return pick, is_transposed
    return None
