"""A GGUF file, written front to back: metadata, tensor list, then tensors one by one.

The bytes go to a temporary file in the same folder, which is renamed after the last tensor. If writing ends earlier (a
full disk, Ctrl-C), the temporary file is removed, so that there is never an incomplete file of the final name.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import gguf
import numpy as np
import torch

from graphcore.quant.registry import ENCODINGS
from graphcore.tokenizer.gguf_spellings import is_unicode

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
    """One metadata entry: its value and gguf's type of it; `element` is the type of an array's elements."""

    value: object
    kind: gguf.GGUFValueType
    element: gguf.GGUFValueType | None = None


def typed_field(value: FieldValue) -> Field:
    """Return a value as a field, with the type that llama.cpp expects."""
    if isinstance(value, bool | float | str):
        return Field(value, VALUE_TYPES[type(value)])
    if isinstance(value, int):
        fits = 0 <= value <= LARGEST_UINT32
        return Field(value, VALUE_TYPES[int] if fits else gguf.GGUFValueType.INT64)
    assert value, "GGUF has no empty arrays"
    element = VALUE_TYPES[type(value[0])]
    return Field(value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32 if type(value[0]) is int else element)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor's entry in the header.

    Attributes:
        name: llama.cpp's name of the tensor.
        shape: sizes in torch's order.
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
        """Number of weights in the tensor."""
        return prod(self.shape)


def _as_stored(value: object) -> Any:
    """Return a value for gguf's writer: texts with surrogates, which stand for bytes that are not UTF-8, as bytes."""
    if isinstance(value, tuple):
        return tuple(map(_as_stored, value)) if isinstance(value[0], str) else value
    return value if not isinstance(value, str) or is_unicode(value) else value.encode("utf-8", "surrogateescape")


class GGUFFile:
    """A GGUF file that is being written; the header is written at once.

    Args:
        path: path of the file, in a folder that exists.
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
            self._writer.add_key_value(key, _as_stored(field.value), field.kind, field.element)
        for entry in entries:
            # A dtype other than uint8 makes gguf take the shape unchanged; it need not know the type.
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
    """Yield a temporary path in the same folder; it is renamed to `path` if the block succeeds, else removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
