"""Where in its file each tensor of a GGUF header lies, once its type is known and its bytes are seen to be there."""

from itertools import pairwise
from math import prod

from graphcore.checkpoint.gguf_header import GGUFHeader, GGUFTensor
from graphcore.checkpoint.gguf_types import GGML_TYPES, TL2_ID, UNREAD_TYPE_NAMES
from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.encodings import Encoding
from graphcore.errors import CheckpointError, UnsupportedError


def place_tensors(header: GGUFHeader, architecture: str) -> dict[str, TensorInfo]:
    """Return the tensors of one file with absolute offsets, in file order.

    Args:
        header: of the file.
        architecture: `general.architecture` of the model; of a split model only the first file has it.

    Raises:
        UnsupportedError: a tensor's type is not known here.
        CheckpointError: a tensor is twice there, misaligned, cut off, or shares bytes with another.
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
