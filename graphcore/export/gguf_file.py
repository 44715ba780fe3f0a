"""One GGUF file, written front to back: metadata, tensor list, then tensors one by one. Whole or not there at all.

The bytes go to a file beside the final one, which takes its name when the last tensor is written; whatever ends the
writing earlier (a full disk, Ctrl-C) removes it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import gguf
import numpy as np
import torch

from graphcore.encodings import ENCODINGS

FieldValue = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]
"""Stored as bool, u32 (i64 where negative or too large), f32, string; arrays as i32, f32, strings."""

VALUE_TYPES = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}
LARGEST_UINT32 = (1 << 32) - 1


@dataclass(frozen=True)
class Field:
    """One metadata entry: its value and gguf's types of it (`element` of an array's elements)."""

    value: object
    kind: gguf.GGUFValueType
    element: gguf.GGUFValueType | None = None


def typed_field(value: FieldValue) -> Field:
    """Return a value with the type that llama.cpp expects of one of its kind."""
    if isinstance(value, bool | float | str):
        return Field(value, VALUE_TYPES[type(value)])
    if isinstance(value, int):
        fits = 0 <= value <= LARGEST_UINT32
        return Field(value, VALUE_TYPES[int] if fits else gguf.GGUFValueType.INT64)
    assert value, "GGUF has no empty arrays"
    element = VALUE_TYPES[type(value[0])]
    return Field(value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32 if isinstance(value[0], int) else element)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's line in the header.

    Attributes:
        name: as llama.cpp has it.
        shape: torch order.
        encoding: a name in `ENCODINGS`.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        return ENCODINGS[self.encoding].nbytes(self.shape)

    @property
    def num_elements(self) -> int:
        """Weights in the tensor."""
        return prod(self.shape)


class GGUFFile:
    """A file being written.

    Args:
        path: of the file; its folder exists.
        architecture: general.architecture.
        fields: the other metadata, in order.
        entries: all tensors, in the order in which they will be written.

    Raises:
        OSError: the disk is full or the folder cannot be written to.
    """

    def __init__(
        self, path: Path, architecture: str, fields: Mapping[str, Field], entries: Sequence[TensorEntry]
    ) -> None:
        self._writer = gguf.GGUFWriter(path, architecture)
        for key, field in fields.items():
            self._writer.add_key_value(key, field.value, field.kind, field.element)
        for entry in entries:
            # A dtype other than uint8 makes gguf take the shape as it is; it need not know the type.
            kind = ENCODINGS[entry.encoding].ggml_id
            self._writer.add_tensor_info(
                entry.name,
                entry.shape,
                np.dtype(np.int8),
                entry.nbytes,
                raw_dtype=kind,  # type: ignore[arg-type]  # i2_s and newer types are not in gguf's enum
            )
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_ti_data_to_file()

    def write(self, raw: torch.Tensor) -> None:
        """Write the next tensor's bytes: [nbytes] uint8 on the CPU."""
        self._writer.write_tensor_data(raw.numpy())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()


@contextmanager
def replaced_when_whole(path: Path) -> Iterator[Path]:
    """Give a path beside `path` to write to; it becomes `path` when the block ends well, and is removed otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
