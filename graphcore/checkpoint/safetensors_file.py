"""The header of one .safetensors file, checked against the file before any tensor is read.

    u64 little-endian header length | header, a JSON object | tensor bytes

The header maps each name to {"dtype", "shape", "data_offsets": [begin, end]}, with offsets from the first tensor byte;
"__metadata__" maps strings to strings. Tensors fill the rest of the file, without gaps, overlaps or trailing bytes.
Source: the format section of the safetensors README.

The library is not used: it keeps offsets to itself, which streaming needs, says less of what is wrong, and refuses
nothing that is read here but a size of -0 and a null in the metadata. A test compares both on damaged headers.
"""

from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TypeGuard

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import file_identity, opened
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.file_kind import MAX_SAFETENSORS_HEADER, FileKind, kind_of, refusal
from graphcore.checkpoint.json_object import parse_json_object
from graphcore.errors import CheckpointError, UnsupportedError, quoted

MAX_DIMS = 16  # no model has more than 5; torch itself stops at 64
DTYPE_NAMES = tuple(name.upper() for name in DENSE_DTYPES)


def read_safetensors_header(path: Path) -> tuple[dict[str, TensorInfo], FileIdentity]:
    """Return the tensors of a file by name, in the order of their bytes, and the identity of the file.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        UnsupportedError: a dtype is not supported.
        CheckpointError: the file is not a safetensors file, or its header does not match its bytes.
    """
    kind = kind_of(path)
    if kind is not FileKind.SAFETENSORS:
        raise refusal(path, kind)
    identity = file_identity(path)
    raw = _header_bytes(path, identity.size)
    header = parse_json_object(raw, f"{path}: safetensors header")
    _check_metadata(header.pop("__metadata__", {}), path)
    start = 8 + len(raw)
    infos = [_tensor_info(path, name, entry, start) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    _check_tiling(infos, path, start, identity.size)
    return {info.name: info for info in infos}, identity


def _header_bytes(path: Path, size: int) -> bytes:
    with opened(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, MAX_SAFETENSORS_HEADER):
            raise CheckpointError(
                f"{path}: promises a header of {length} bytes, but has {size} in all "
                f"(limit {MAX_SAFETENSORS_HEADER}); it is cut off or no safetensors file, fetch it again"
            )
        return stream.read(length)


def _check_metadata(metadata: object, path: Path) -> None:
    # Some writers store null for no text; nothing here is read.
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(text, str | None) for text in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ does not map strings to strings; fetch the file again")


def _tensor_info(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where} is described by {quoted(entry)}, not by an object; fetch the file again")
    encoding = _encoding(entry.get("dtype"), where)
    shape = entry.get("shape")
    if not _is_counts(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where} has shape {quoted(shape)}, not at most {MAX_DIMS} sizes; fetch the file again")
    span = entry.get("data_offsets")
    if not _is_counts(span) or len(span) != 2 or span[0] > span[1]:
        raise CheckpointError(f"{where} has data_offsets {quoted(span)}, not [begin, end]; fetch the file again")
    nbytes = prod(shape) * DENSE_DTYPES[encoding].itemsize
    if span[1] - span[0] != nbytes:
        raise CheckpointError(
            f"{where} ({encoding}, shape {quoted(shape)}) takes {quoted(nbytes)} bytes, "
            f"its data_offsets {span} give it {span[1] - span[0]}; fetch the file again"
        )
    return TensorInfo(name, tuple(shape), encoding, path, start + span[0], nbytes)


def _encoding(dtype: object, where: str) -> str:
    if isinstance(dtype, str) and dtype in DTYPE_NAMES:
        return dtype.lower()
    raise UnsupportedError(f"{where} has dtype {quoted(dtype)}, which is not read; known: {', '.join(DTYPE_NAMES)}")


def _is_counts(value: object) -> TypeGuard[list[int]]:
    # Refuses bools, which are ints in Python, and floats such as 1e3.
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_tiling(infos: list[TensorInfo], path: Path, start: int, size: int) -> None:
    for before, after in pairwise(infos):
        end = before.offset + before.nbytes
        if after.offset != end:
            fault = "overlaps" if after.offset < end else "leaves a gap after"
            raise CheckpointError(
                f"{path}: tensor {quoted(after.name)} {fault} tensor {quoted(before.name)}; fetch the file again"
            )
    if infos and infos[0].offset != start:
        raise CheckpointError(f"{path}: leaves a gap before tensor {quoted(infos[0].name)}; fetch the file again")
    end = infos[-1].offset + infos[-1].nbytes if infos else start
    if end > size:
        raise CheckpointError(
            f"{path}: tensor {quoted(infos[-1].name)} ends at byte {end}, the file at {size}; it is cut off, "
            "fetch it again"
        )
    if end < size:
        raise CheckpointError(f"{path}: has {size - end} bytes after its last tensor; fetch it again")
