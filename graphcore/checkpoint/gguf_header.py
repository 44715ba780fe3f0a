"""The header of one GGUF file, version 2 or 3: its metadata and the descriptions of its tensors.

    "GGUF" | u32 version | u64 tensors | u64 metadata entries
    per entry:  string key | u32 value type | value
    per tensor: string name | u32 dims | u64 ne[dims] | u32 ggml type | u64 offset from the data section
    padding to general.alignment (32) | data section

ne[0] is the contiguous dimension: ne is the reverse of torch's shape. Source: ggml's docs/gguf.md and src/gguf.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from graphcore.checkpoint.file_bytes import file_identity, opened
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.file_kind import FileKind, kind_of, refusal
from graphcore.checkpoint.gguf_reader import GGUFReader, MetadataValue
from graphcore.errors import CheckpointError, UnsupportedError, quoted

DEFAULT_ALIGNMENT = 32  # bytes
MAX_DIMS = 4  # GGML_MAX_DIMS
MIN_ENTRY, MIN_TENSOR = 13, 24  # bytes: empty key, type, one byte; empty name, dims, type, offset


@dataclass(frozen=True)
class GGUFTensor:
    """The header's description of one tensor: shape in torch order, offset in bytes from the data section."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """The contents of one GGUF file, except the bytes of its tensors.

    Attributes:
        path: path of the file.
        identity: identity of the file, taken before it was read.
        metadata: values by key; arrays are tuples.
        kinds: type numbers (gguf_reader.py) by key: of the value, or of the array and its elements.
        tensors: descriptions of the tensors, in file order.
        alignment: alignment of all offsets, in bytes.
        data_start: offset of the data section, in bytes.
    """

    path: Path
    identity: FileIdentity
    metadata: Mapping[str, MetadataValue]
    kinds: Mapping[str, tuple[int, ...]]
    tensors: tuple[GGUFTensor, ...]
    alignment: int
    data_start: int


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read the header of the GGUF file at `path`.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        UnsupportedError: the file is big-endian, or of a version other than 2 and 3.
        CheckpointError: the file is not a GGUF file, or its header is damaged.
    """
    kind = kind_of(path)
    if kind is not FileKind.GGUF:
        raise refusal(path, kind)
    identity = file_identity(path)
    with opened(path) as stream:
        return parse_gguf_header(stream, path, identity)


def parse_gguf_header(stream: BinaryIO, path: Path, identity: FileIdentity) -> GGUFHeader:
    """Read the header of a GGUF file from a stream at its first byte.

    Args:
        path: path of the file, for messages and for the header.
        identity: identity of the file, whose size no count in the header may exceed.

    Raises:
        UnsupportedError, CheckpointError: as for `read_gguf_header`.
    """
    reader = GGUFReader(stream, identity.size, str(path))
    num_tensors, num_entries = read_gguf_front(reader, path)
    metadata = _read_metadata(reader, num_entries)
    tensors = tuple([_read_tensor(reader) for _ in range(num_tensors)])
    alignment = _alignment(path, metadata)
    data_start = -(-reader.position // alignment) * alignment
    return GGUFHeader(
        path, identity, MappingProxyType(metadata), MappingProxyType(reader.kinds), tensors, alignment, data_start
    )


def read_gguf_front(reader: GGUFReader, path: Path) -> tuple[int, int]:
    """Read the magic and the version of a GGUF file, and return its numbers of tensors and of metadata entries.

    Raises:
        UnsupportedError, CheckpointError: as for `read_gguf_header`.
    """
    reader.take(4, "the magic")
    _check_version(path, reader.unsigned(4, "the version"))
    return reader.count("tensors", MIN_TENSOR), reader.count("metadata entries", MIN_ENTRY)


def _check_version(path: Path, version: int) -> None:
    if version in (2, 3):
        return
    if version == 1:
        raise UnsupportedError(f"{path}: is GGUF version 1, of August 2023; convert the model again with llama.cpp")
    if version & 0xFFFF == 0 and version:
        raise UnsupportedError(f"{path}: is a big-endian GGUF file; convert it with gguf's `gguf-convert-endian`")
    raise UnsupportedError(f"{path}: has GGUF version {version}; known: 2, 3")


def _read_metadata(reader: GGUFReader, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for index in range(count):
        key = reader.name(f"the name of metadata entry {index}")
        if key in metadata:
            raise CheckpointError(f"{reader.source}: has the key {quoted(key)} twice; fetch the file again")
        metadata[key] = reader.value(key)
    return metadata


def _read_tensor(reader: GGUFReader) -> GGUFTensor:
    name = reader.name("the name of a tensor")
    what = f"tensor {quoted(name)}"
    num_dims = reader.unsigned(4, what)
    if num_dims > MAX_DIMS:
        raise CheckpointError(f"{reader.source}: {what} has {num_dims} dims, at most {MAX_DIMS} are possible")
    shape = tuple(reversed([reader.unsigned(8, what) for _ in range(num_dims)]))
    return GGUFTensor(name, shape, reader.unsigned(4, what), reader.unsigned(8, what))


def _alignment(path: Path, metadata: Mapping[str, MetadataValue]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or alignment < 1 or alignment.bit_count() != 1:
        raise CheckpointError(f"{path}: general.alignment is {quoted(alignment)}, not a power of two")
    return alignment
