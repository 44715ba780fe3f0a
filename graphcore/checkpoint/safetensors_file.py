"""Where the tensors of one .safetensors file lie. The safetensors library checks the header against the file first.

    u64 little-endian header length | header, a JSON object | tensor bytes

The header maps each name to {"dtype", "shape", "data_offsets": [begin, end]}, with offsets from the first tensor byte.
The library does not expose offsets, which streaming needs, so the header that it has accepted is read again.
Source: the format section of the safetensors README.
"""

from pathlib import Path
from typing import Any

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.dense_types import DENSE_DTYPES
from graphcore.checkpoint.file_bytes import file_identity, opened
from graphcore.checkpoint.file_front import safetensors_names
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.json_object import parse_json_object
from graphcore.errors import UnsupportedError, quoted

DTYPE_NAMES = tuple(name.upper() for name in DENSE_DTYPES)


def read_safetensors_header(path: Path) -> tuple[dict[str, TensorInfo], FileIdentity]:
    """Return the tensors of a file by name, in the order of their bytes, and the identity of the file.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        UnsupportedError: a dtype is not supported.
        CheckpointError: the file is not a safetensors file, or its header does not match its bytes, or names a tensor
            twice, of which the library takes the last.
    """
    identity = file_identity(path)
    names = safetensors_names(path)
    with opened(path) as stream:
        raw = stream.read(int.from_bytes(stream.read(8), "little"))
    header: dict[str, Any] = parse_json_object(raw, f"{path}: safetensors header")
    return {name: _tensor_info(path, name, header[name], 8 + len(raw)) for name in names}, identity


def _tensor_info(path: Path, name: str, entry: dict[str, Any], start: int) -> TensorInfo:
    if entry["dtype"] not in DTYPE_NAMES:
        raise UnsupportedError(
            f"{path}: tensor {quoted(name)} has dtype {entry['dtype']}, which is not read; known: "
            f"{', '.join(DTYPE_NAMES)}"
        )
    begin, end = entry["data_offsets"]
    return TensorInfo(name, tuple(entry["shape"]), entry["dtype"].lower(), path, start + begin, end - begin)
