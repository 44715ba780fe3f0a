"""Split GGUF models, written by the gguf package and by hand."""

import shutil
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf_bytes import GGUF, I32, STRING, U16, Tensor, entry, text

from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.model_file_names import model_names
from graphcore.errors import CheckpointError, CheckpointNotFoundError, UnsupportedError


def part(number, count, tensors, total=None, architecture=None):
    entries = [] if architecture is None else [entry("general.architecture", STRING, text(architecture))]
    entries += [entry("split.no", U16, struct.pack("<H", number)), entry("split.count", U16, struct.pack("<H", count))]
    if total is not None:
        entries.append(entry("split.tensors.count", I32, struct.pack("<i", total)))
    return GGUF(entries=entries, tensors=tensors)


def write_two(folder, second=None):
    part(0, 2, [Tensor("a")], 2, "llama").write(folder / "m-00001-of-00002.gguf")
    (second or part(1, 2, [Tensor("b")], 2)).write(folder / "m-00002-of-00002.gguf")
    return folder / "m-00001-of-00002.gguf"


@pytest.fixture
def written_by_gguf(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_uint32("llama.block_count", 7)
    for index in range(5):
        writer.add_tensor(f"t{index}", np.full((2, index + 1), index, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_the_whole_model(written_by_gguf, opened):
    assert len(written_by_gguf) == 3
    checkpoint = GGUFCheckpoint(written_by_gguf[opened])
    assert list(checkpoint.tensors) == [f"t{index}" for index in range(5)]
    assert checkpoint.metadata["llama.block_count"] == 7
    assert checkpoint.metadata["split.no"] == 0
    for index in range(5):
        assert torch.equal(checkpoint.read(f"t{index}"), torch.full((2, index + 1), float(index)))


def test_a_missing_part_is_named(written_by_gguf):
    written_by_gguf[1].unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"model-00002-of-00003\.gguf: part .* missing"):
        GGUFCheckpoint(written_by_gguf[0])


def test_a_part_under_another_name_is_refused(written_by_gguf, tmp_path):
    with pytest.raises(CheckpointError, match=r"one of 3 by its split\.count, which its name does not say"):
        GGUFCheckpoint(written_by_gguf[0].rename(tmp_path / "model.gguf"))


def test_a_name_of_a_part_without_split_metadata_is_refused(tmp_path):
    path = GGUF().write(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"one of 1 by its split\.count"):
        GGUFCheckpoint(path)


def test_a_model_of_one_part_opens_with_and_without_split_metadata(tmp_path):
    assert GGUFCheckpoint(GGUF().write(tmp_path / "a-00001-of-00001.gguf")).tensors
    assert GGUFCheckpoint(part(0, 1, [Tensor()], 1).write(tmp_path / "b.gguf")).tensors
    assert GGUFCheckpoint(part(0, 0, [Tensor()], 1).write(tmp_path / "c.gguf")).tensors


def test_a_part_twice_is_refused(written_by_gguf):
    shutil.copy(written_by_gguf[1], written_by_gguf[2])
    with pytest.raises(CheckpointError, match="part 2 of 3 by its metadata, part 3 of 3 by its name"):
        GGUFCheckpoint(written_by_gguf[0])


def test_a_part_of_a_model_with_another_count_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="part 2 of 3 by its metadata, part 2 of 2 by its name"):
        GGUFCheckpoint(write_two(tmp_path, part(1, 3, [Tensor("b")])))


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"00002\.gguf: holds tensor 'a', as does .*00001-of"):
        GGUFCheckpoint(write_two(tmp_path, part(1, 2, [Tensor("a")])))


def test_a_wrong_number_of_tensors_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"split\.tensors\.count is 2, the 2 parts hold 3 tensors"):
        GGUFCheckpoint(write_two(tmp_path, part(1, 2, [Tensor("b"), Tensor("c")])))


@pytest.mark.parametrize(
    ("kind", "raw", "shown"), [(I32, struct.pack("<i", -2), "-2"), (STRING, text("2"), "'2'"), (7, b"\1", "True")]
)
def test_a_part_number_that_is_none_is_refused(tmp_path, kind, raw, shown):
    broken = GGUF(entries=[entry("split.count", kind, raw)]).write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=rf"split\.count is {shown}, not a number"):
        GGUFCheckpoint(broken)


def test_a_first_part_may_hold_metadata_only(tmp_path):
    part(0, 2, [], 1, "llama").write(tmp_path / "m-00001-of-00002.gguf")
    part(1, 2, [Tensor("b")], 1).write(tmp_path / "m-00002-of-00002.gguf")
    assert list(GGUFCheckpoint(tmp_path / "m-00002-of-00002.gguf").tensors) == ["b"]


@pytest.mark.parametrize("opened", [1, 2])
def test_types_of_later_parts_follow_the_architecture_of_the_first(tmp_path, opened):
    part(0, 2, [Tensor("a")], 2, "bitnet-b1.58").write(tmp_path / "m-00001-of-00002.gguf")
    part(1, 2, [Tensor("b", (32,), 39, bytes(17))], 2).write(tmp_path / "m-00002-of-00002.gguf")
    with pytest.raises(UnsupportedError, match="tl2"):
        GGUFCheckpoint(tmp_path / f"m-0000{opened}-of-00002.gguf")


def test_a_split_model_counts_once_and_projectors_never():
    names = ["m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "b.gguf", "mmproj-f16.gguf", "MMPROJ.GGUF", "x.txt"]
    assert model_names(names) == ["b.gguf", "m-00001-of-00002.gguf"]
