"""Rows of tables that are not on the device, against torch's own lookup."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.fake_sources import FakeSource
from support.packed_matrices import stored_matrix
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.folds import PickRows
from graphcore.checkpoint.open_checkpoint import open_checkpoint
from graphcore.errors import CheckpointError
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.streaming.embedding_rows import FileRows, HostRows
from graphcore.weights.loader import Loader

CPU = torch.device("cpu")
WEIGHT = "embed_tokens.weight"
VOCAB, DIM = 5000, 33
# Once, many times, the first and the last, neighbours, and rows far apart.
IDS = torch.tensor([[0, 4999, 17, 17], [18, 2500, 0, 4999]])


def file_rows(path: Path, dim: int, dtype: torch.dtype, *folds: PickRows) -> tuple[FileRows, FakeSource]:
    loader = Loader(open_checkpoint(path), {WEIGHT: TensorSource("stored", folds)})
    source = FakeSource(path, torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8))
    return FileRows(loader, WEIGHT, {path: source}, dim, dtype, CPU), source


def saved(folder: Path, table: Tensor) -> Path:
    save_file({"before": torch.ones(7, dtype=table.dtype), "stored": table}, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_file_are_those_of_the_table(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype) -> None:
    table = torch.randn(VOCAB, DIM).to(stored)
    rows, _ = file_rows(saved(tmp_path, table), DIM, dtype)
    assert torch.equal(rows(IDS), torch.nn.functional.embedding(IDS, table).to(dtype))
    assert torch.equal(rows(IDS[:1, :1]), table[0].to(dtype).view(1, 1, DIM))


def test_a_row_is_read_once_and_alone(tmp_path: Path) -> None:
    rows, source = file_rows(saved(tmp_path, torch.randn(VOCAB, DIM)), DIM, torch.float32)
    rows(torch.full((3, 50), 1234))
    ((_, nbytes),) = source.reads
    assert nbytes <= 2 * 4096


def test_more_rows_than_one_buffer_holds(tmp_path: Path) -> None:
    table = torch.randn(40_000, 64)
    rows, _ = file_rows(saved(tmp_path, table), 64, torch.float32)
    ids = torch.arange(40_000).view(8, -1).flip(1)
    assert torch.equal(rows(ids), table[ids])


def test_rows_picked_out_of_a_larger_table(tmp_path: Path) -> None:
    table = torch.randn(VOCAB, DIM)
    rows, _ = file_rows(saved(tmp_path, table), DIM, torch.float32, PickRows(100, VOCAB))
    assert torch.equal(rows(IDS[:, 2:3]), table[IDS[:, 2:3] + 100])


@pytest.mark.parametrize("name", ["q4_k", "q8_0", "q6_k"])
def test_packed_rows_are_unpacked(tmp_path: Path, name: str) -> None:
    matrix = stored_matrix(name, VOCAB, 256)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("before", np.ones(3, dtype=np.float32))
    writer.add_tensor("stored", matrix.rows.numpy(), raw_dtype=gguf.GGMLQuantizationType[name.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rows, _ = file_rows(tmp_path / "model.gguf", 256, torch.float32)
    assert torch.equal(rows(IDS), matrix.dense[IDS])
    packing = StoredPacking(name, VOCAB, 256)
    assert torch.equal(HostRows(matrix.rows.reshape(-1), packing, CPU)(IDS), matrix.dense[IDS])


def test_rows_of_a_table_in_ram() -> None:
    table = torch.randn(VOCAB, DIM)
    assert torch.equal(HostRows(table, None, CPU)(IDS), table[IDS])


def test_a_file_that_changed_gives_no_rows(tmp_path: Path) -> None:
    rows, source = file_rows(saved(tmp_path, torch.randn(VOCAB, DIM)), DIM, torch.float32)
    rows(IDS)
    source.change = CheckpointError("it was written to")
    with pytest.raises(CheckpointError, match="it was written to"):
        rows(IDS)


def test_a_read_that_comes_short_gives_no_rows(tmp_path: Path) -> None:
    rows, source = file_rows(saved(tmp_path, torch.randn(VOCAB, DIM)), DIM, torch.float32)
    source.lacking = 1
    with pytest.raises(CheckpointError, match="bytes came from byte"):
        rows(IDS)
