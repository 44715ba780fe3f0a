"""The reader of GGUF checkpoints: one file, or the parts of a split one, with metadata instead of a config.json.

Files store tensor types as numbers. Blocks run along ne[0], the contiguous dimension, which is the last one in torch
order. `general.file_type` is not used: Q4_K_M, for example, is a mixture of tensor types, and forks of llama.cpp use
the same numbers for different mixtures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch

from graphcore.checkpoint.adapter_files import check_gguf_is_model
from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.dense_types import as_stored
from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.checkpoint.gguf_header import GGUFHeader, GGUFTensor
from graphcore.checkpoint.gguf_reader import MetadataValue
from graphcore.checkpoint.gguf_split import read_split_headers
from graphcore.encodings import Encoding
from graphcore.errors import CheckpointError, UnsupportedError, quoted
from graphcore.quant.registry import ENCODINGS

GGML_TYPES: Mapping[int, Encoding] = MappingProxyType(
    dict(sorted((one.ggml_id, one) for one in ENCODINGS.values() if one.ggml_id is not None))
)
"""Encoding of each tensor type that can be read, by its number."""

UNREAD_TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        4: "q4_2, given up in 2023",
        5: "q4_3, given up in 2023",
        9: "q8_1",
        15: "q8_k",
        31: "q4_0_4_4, given up for q4_0",
        32: "q4_0_4_8, given up for q4_0",
        33: "q4_0_8_8, given up for q4_0",
        37: "i8_s of BitNet, or iq4_nl_4_8",
        38: "tl1 of BitNet, or iq4_nl_8_8",
    }
)
"""Names of the tensor types that cannot be read, by their numbers, for messages."""

TL2_ID = 39
"""Number of mxfp4; in files of BitNet's fork, with an architecture that starts with "bitnet", of tl2."""


class GGUFCheckpoint(Checkpoint):
    """A checkpoint in one or several GGUF files, with tensors under llama.cpp's names.

    Args:
        path: path of a GGUF file; any part of a split model opens the whole model.
        elsewhere: tensors of parts that are missing here, by the part's name; the first part has to be here.

    Attributes:
        folder: folder of the file.
        metadata: values of the first part's metadata, by key; arrays are tuples.
        kinds: types of the metadata's values, by key; see `GGUFHeader`.

    Raises:
        CheckpointNotFoundError: the file, or a part of a split model, is missing.
        UnsupportedError: the version, the byte order or a tensor's type is not supported, or the file is no model.
        CheckpointError: a file is damaged, or parts contradict each other.
    """

    metadata: Mapping[str, MetadataValue]

    def __init__(self, path: str | Path, elsewhere: Mapping[str, Sequence[TensorInfo]] = MappingProxyType({})) -> None:
        self.source = str(path)
        self.layout = "gguf"
        self.folder = Path(path).parent
        headers = read_split_headers(Path(path), elsewhere)
        self.metadata, self.kinds = headers[0].metadata, headers[0].kinds
        check_gguf_is_model(Path(path), self.metadata)
        architecture = self.metadata.get("general.architecture")
        known = architecture if isinstance(architecture, str) else ""
        parts = {header.path.name: place_tensors(header, known) for header in headers}
        for part, infos in elsewhere.items():
            parts[part] = {info.name: replace(info, file=self.folder / part) for info in infos}
        tensors: dict[str, TensorInfo] = {}
        for _, placed in sorted(parts.items()):
            _check_disjoint(tensors, placed)
            tensors.update(placed)
        self.tensors = MappingProxyType(tensors)
        self.files = MappingProxyType({header.path: header.identity for header in headers})

    def forget_arrays(self) -> None:
        """Drop the metadata's arrays to free memory: a vocabulary of 262144 tokens takes 37 MB."""
        self.metadata = {key: value for key, value in self.metadata.items() if not isinstance(value, tuple)}

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the only span of the tensor's bytes."""
        return (self.find(name).span(),)

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor from its bytes: dense in its stored dtype and shape, packed as uint8 [nbytes]."""
        (raw,) = parts
        info = self.find(name)
        return as_stored(raw, info.encoding, info.shape)


def _check_disjoint(tensors: Mapping[str, TensorInfo], placed: Mapping[str, TensorInfo]) -> None:
    for name in tensors.keys() & placed.keys():
        raise CheckpointError(
            f"{placed[name].file}: holds tensor {quoted(name)}, as does {tensors[name].file}; fetch both again"
        )


def place_tensors(header: GGUFHeader, architecture: str) -> dict[str, TensorInfo]:
    """Return the description of each tensor in one file, by name in file order, with absolute offsets.

    Args:
        header: header of the file.
        architecture: `general.architecture` of the model, which only the first file of a split model has.

    Raises:
        UnsupportedError: a tensor's type is not supported.
        CheckpointError: a tensor is duplicated, misaligned or cut off, or overlaps another one.
    """
    placed: dict[str, TensorInfo] = {}
    for tensor in header.tensors:
        if tensor.name in placed:
            raise CheckpointError(f"{header.path}: has tensor {quoted(tensor.name)} twice; fetch the file again")
        placed[tensor.name] = _place(header, tensor, architecture)
    for before, after in pairwise(sorted(placed.values(), key=lambda info: info.offset)):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(
                f"{header.path}: tensors {quoted(before.name)} and {quoted(after.name)} overlap; fetch the file again"
            )
    return placed


def _place(header: GGUFHeader, tensor: GGUFTensor, architecture: str) -> TensorInfo:
    where = f"{header.path}: tensor {quoted(tensor.name)}"
    kind = _known_type(tensor.type_id, architecture, where)
    if 0 in tensor.shape or prod(tensor.shape) >= 2**63:
        raise CheckpointError(f"{where} has the impossible shape {tensor.shape}; the file is damaged, fetch it again")
    if not kind.divides(tensor.shape):
        raise CheckpointError(
            f"{where} has shape {tensor.shape}, which {kind.name} cannot store in blocks of {kind.block_elements}"
        )
    if tensor.offset % header.alignment:
        raise CheckpointError(f"{where} starts at {tensor.offset}, no multiple of the alignment {header.alignment}")
    offset, nbytes = header.data_start + tensor.offset, kind.nbytes(tensor.shape)
    size = header.identity.size
    if offset + nbytes > size:
        raise CheckpointError(
            f"{where} ({kind.name}, shape {tensor.shape}) ends at byte {offset + nbytes}, the file at {size}; "
            "it is cut off, fetch it again"
        )
    return TensorInfo(tensor.name, tensor.shape, kind.name, header.path, offset, nbytes)


def _known_type(type_id: int, architecture: str, where: str) -> Encoding:
    if type_id == TL2_ID and architecture.startswith("bitnet"):
        raise UnsupportedError(
            f"{where} has type {type_id}, which is tl2 in a {quoted(architecture)} file and not read; use the i2_s file"
        )
    if type_id in GGML_TYPES:
        return GGML_TYPES[type_id]
    name = f" ({UNREAD_TYPE_NAMES[type_id]})" if type_id in UNREAD_TYPE_NAMES else ""
    known = ", ".join(one.name for one in GGML_TYPES.values())
    raise UnsupportedError(f"{where} has type {type_id}{name}, which no format reads; known: {known}")
