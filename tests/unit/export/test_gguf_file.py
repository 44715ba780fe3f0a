"""Files are written whole or not at all, and gguf-py reads back what was written."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from graphcore.export.gguf_file import GGUFFile, TensorEntry, replaced_when_whole, typed_field

ENTRIES = (
    TensorEntry("a.weight", (3, 5), "f32"),
    TensorEntry("b.weight", (2, 64), "q8_0"),
    TensorEntry("c", (7,), "f16"),
)


def write(path: Path, fields: dict[str, object]) -> list[torch.Tensor]:
    raws = [torch.arange(entry.nbytes, dtype=torch.int64).to(torch.uint8) for entry in ENTRIES]
    typed = {key: typed_field(value) for key, value in fields.items()}
    with GGUFFile(path, "llama", typed, ENTRIES) as file:
        for raw in raws:
            file.write(raw)
    return raws


def test_tensors_read_back_with_name_shape_type_and_bytes(tmp_path: Path) -> None:
    raws = write(tmp_path / "m.gguf", {})
    tensors = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    for tensor, entry, raw in zip(tensors, ENTRIES, raws, strict=True):
        assert (tensor.name, tensor.tensor_type.name.lower()) == (entry.name, entry.encoding)
        assert tuple(reversed([int(size) for size in tensor.shape])) == entry.shape
        assert np.array_equal(tensor.data.reshape(-1).view(np.uint8), raw.numpy())


def test_fields_have_the_types_that_llama_cpp_expects(tmp_path: Path) -> None:
    values = {"flag": True, "size": 7, "large": 1 << 40, "below": -1, "ratio": 0.5, "name": "x", "texts": ["a", ""],
              "types": [1, 2], "scores": [0.5, -1.0]}  # fmt: skip
    write(tmp_path / "m.gguf", values)
    fields = gguf.GGUFReader(tmp_path / "m.gguf").fields
    kinds = {key: [kind.name for kind in fields[key].types] for key in values}
    assert {key: fields[key].contents() for key in values} == values
    assert kinds == {
        "flag": ["BOOL"],
        "size": ["UINT32"],
        "large": ["INT64"],
        "below": ["INT64"],
        "ratio": ["FLOAT32"],
        "name": ["STRING"],
        "texts": ["ARRAY", "STRING"],
        "types": ["ARRAY", "INT32"],
        "scores": ["ARRAY", "FLOAT32"],
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, GeneratorExit])
def test_whatever_ends_the_writing_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    path = tmp_path / "m.gguf"
    path.write_text("old")

    def fail_half_way() -> None:
        with replaced_when_whole(path) as beside, GGUFFile(beside, "llama", {}, ENTRIES) as file:
            file.write(torch.zeros(ENTRIES[0].nbytes, dtype=torch.uint8))
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert [one.name for one in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_text() == "old"


def test_the_folder_is_made(tmp_path: Path) -> None:
    with replaced_when_whole(tmp_path / "new" / "m.gguf") as beside:
        beside.write_text("whole")
    assert (tmp_path / "new" / "m.gguf").read_text() == "whole"
