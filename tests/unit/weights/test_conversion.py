"""Weights converted part by part, in any order and wherever their bytes lie, are what the loader makes whole.

Legend: O rows (output features), I columns (input features).
"""

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.cases import in_case
from support.packed_matrices import KERNEL_FORMATS, native_kernels, stored_matrix
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.folds import AddOne, Fold, PickRows, SplitPairs, Transpose
from graphcore.checkpoint.file_bytes import read_span
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.errors import CheckpointError
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.packing import Packing
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.weights import conversion
from graphcore.weights.conversion import (
    Conversion,
    PackingConversion,
    RowConversion,
    TensorConversion,
    copy_bytes,
    row_span,
)
from graphcore.weights.loader import Loader

OURS = "ours"
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


conversions_of = partial(conversion.conversions_of, most_nbytes=1000)  # cuts matrices of a few kilobytes


def loader_of(path: Path, *folds: Fold) -> Loader:
    return Loader(open_checkpoint(path), {OURS: TensorSource("stored", folds)})


def saved(folder: Path, tensor: Tensor, *folds: Fold) -> Loader:
    """Return a loader of a file in which another tensor stands first, so that offsets are no multiples of anything."""
    save_file({"before": torch.ones(13, dtype=tensor.dtype), "stored": tensor}, folder / "model.safetensors")
    return loader_of(folder / "model.safetensors", *folds)


def saved_gguf(folder: Path, name: str, rows: int, columns: int, *folds: Fold) -> tuple[Loader, Tensor]:
    """Return a loader of a packed tensor, and its weights by the format's definition."""
    matrix = stored_matrix(name, rows, columns)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_tensor("before", np.ones(3, dtype=np.float32))
    kind = gguf.GGMLQuantizationType[name.upper()]
    writer.add_tensor("stored", matrix.rows.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return loader_of(folder / "model.gguf", *folds), matrix.dense


def put_together(loader: Loader, made: Sequence[Conversion], shift: int = 1) -> None:
    """Write conversions in a random order, from bytes at odd addresses."""
    for one in random.Random(4).sample(list(made), len(made)):
        parts = []
        for span in one.spans:
            space = torch.empty(span.nbytes + shift, dtype=torch.uint8)
            space[shift:] = read_span(span, loader.checkpoint.files[span.file], one.weight)
            parts.append(space[shift:])
        one.write(parts, 1)


def covers(made: Sequence[Conversion], rows: int) -> bool:
    """Return whether the conversions are consecutive rows, all of them, each once."""
    assert all(isinstance(conversion, RowConversion | PackingConversion) for conversion in made)
    bounds = [
        (conversion.begin, conversion.end)
        for conversion in made
        if isinstance(conversion, RowConversion | PackingConversion)
    ]
    return [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])] and bounds[-1][1] == rows


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", FLOATS)
def test_dense_rows_are_copied_or_cast(tmp_path: Path, stored: torch.dtype, target: torch.dtype) -> None:
    tensor = torch.randn(83, 21).to(stored)
    loader = saved(tmp_path, tensor)
    out = torch.zeros(83, 21, dtype=target)
    made = conversions_of(loader, OURS, None, out)
    assert len(made) > 1
    assert covers(made, 83)
    put_together(loader, made)
    assert torch.equal(out, tensor.to(target))


@pytest.mark.parametrize("rows", [range(16), range(16, 83), range(80, 83), range(83)])
def test_some_rows_of_a_weight_are_a_place_of_their_own(tmp_path: Path, rows: range) -> None:
    """A slice of the head."""
    tensor = torch.randn(83, 21)
    loader = saved(tmp_path, tensor)
    out = torch.zeros(len(rows), 21)
    put_together(loader, conversions_of(loader, OURS, None, out, rows))
    assert torch.equal(out, tensor[rows.start : rows.stop])


@pytest.mark.parametrize(("start", "stop"), [(0, 30), (30, 60), (60, 83)])
def test_rows_picked_out_of_a_fused_projection(tmp_path: Path, start: int, stop: int) -> None:
    tensor = torch.randn(83, 21)
    loader = saved(tmp_path, tensor, PickRows(start, stop))
    out = torch.zeros(stop - start, 21)
    made = conversions_of(loader, OURS, None, out)
    assert covers(made, stop - start)
    put_together(loader, made)
    assert torch.equal(out, tensor[start:stop])
    assert torch.equal(out, loader.dense(OURS, torch.float32))


@pytest.mark.parametrize(
    ("fold", "expected"),
    [
        (Transpose(), lambda tensor: tensor.T),
        (PickRows(1, 40, step=2), lambda tensor: tensor[1:40:2]),
        (AddOne(), lambda tensor: tensor + 1),
        (SplitPairs(2), lambda tensor: tensor.view(2, 10, 2, 21).transpose(1, 2).reshape(40, 21)),
    ],
)
def test_what_needs_a_whole_tensor_is_one_piece(tmp_path: Path, fold: Fold, expected: object) -> None:
    tensor = torch.randn(40, 21)
    loader = saved(tmp_path, tensor, fold)
    wanted = expected(tensor)  # type: ignore[operator]
    out = torch.zeros(wanted.shape)
    (one,) = conversions_of(loader, OURS, None, out)
    assert isinstance(one, TensorConversion)
    put_together(loader, [one])
    assert torch.equal(out, wanted)


def test_packed_rows_are_unpacked_to_a_dense_weight(tmp_path: Path) -> None:
    for name in [name for name in KERNEL_FORMATS if name != "i2_s" and name.upper() in dir(gguf.GGMLQuantizationType)]:
        with in_case(name):
            loader, dense = saved_gguf(tmp_path, name, 83, 512)
            out = torch.zeros(83, 512)
            made = conversions_of(loader, OURS, None, out)
            assert len(made) > 1
            put_together(loader, made)
            assert torch.equal(out, dense)


@pytest.mark.parametrize("form", [KernelPacking, StoredPacking])
@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q6_k", "q4_0"])
@pytest.mark.parametrize("rows", [None, range(32, 83)])
def test_packed_rows_are_packed_piece_by_piece_as_they_are_whole(
    tmp_path: Path, name: str, form: type, rows: range | None
) -> None:
    loader, dense = saved_gguf(tmp_path, name, 83, 512)
    count = 83 if rows is None else len(rows)
    packing: Packing = form(name, count, 512, native_kernels()) if form is KernelPacking else form(name, count, 512)
    out = torch.zeros(packing.nbytes, dtype=torch.uint8)
    made = conversions_of(loader, OURS, packing, out, rows)
    assert covers(made, count)
    put_together(loader, made)
    assert torch.equal(packing.unpack(out, torch.float32), dense if rows is None else dense[rows.start : rows.stop])
    if rows is None:
        assert torch.equal(out, loader.packed(OURS, packing))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_is_packed_at_load_is_packed_a_few_rows_at_a_time(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(1990, 1024).to(dtype)
    loader = saved(tmp_path, tensor)
    packing = StoredPacking("q8_0", 1990, 1024)
    out = torch.zeros(packing.nbytes, dtype=torch.uint8)
    made = conversions_of(loader, OURS, packing, out)
    assert len(made) > 1
    assert covers(made, 1990)
    put_together(loader, made)
    quantized = gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(out, torch.from_numpy(quantized).view(-1))
    theirs = torch.from_numpy(gguf.quants.dequantize(quantized, gguf.GGMLQuantizationType.Q8_0))
    error = (theirs.double() - tensor.double()).norm() / tensor.double().norm()
    assert loader.errors == {OURS: pytest.approx(error.item(), rel=1e-6)}


def test_a_tensor_that_is_folded_and_packed_at_load_is_one_piece(tmp_path: Path) -> None:
    tensor = torch.randn(64, 48)
    loader = saved(tmp_path, tensor, Transpose())
    packing = StoredPacking("q8_0", 48, 64)
    out = torch.zeros(packing.nbytes, dtype=torch.uint8)
    (one,) = conversions_of(loader, OURS, packing, out)
    put_together(loader, [one])
    quantized = gguf.quants.quantize(tensor.T.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(out, torch.from_numpy(quantized).view(-1))


@pytest.mark.parametrize("tensor", [torch.ones(4, 4, dtype=torch.int64), torch.ones(4, 4, dtype=torch.uint8)])
def test_integers_are_no_weights(tmp_path: Path, tensor: Tensor) -> None:
    loader = saved(tmp_path, tensor)
    (one,) = conversions_of(loader, OURS, None, torch.zeros(4, 4))
    with pytest.raises(CheckpointError, match="not weights"):
        put_together(loader, [one])


def test_the_bytes_of_one_row_are_found(tmp_path: Path) -> None:
    tensor = torch.randn(20, 7)
    loader = saved(tmp_path, tensor, PickRows(5, 15))
    for row in (0, 9):
        span = row_span(loader, OURS, row)
        raw = read_span(span, loader.checkpoint.files[span.file], OURS)
        assert torch.equal(raw.view(torch.float32), tensor[5 + row])


def test_a_place_of_another_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="8 bytes into 9"):
        copy_bytes(torch.zeros(8, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="in one run"):
        copy_bytes(torch.zeros(4, 2, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.uint8).T)
