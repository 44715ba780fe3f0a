"""The checks of a file of weights that need no torch: its kind, and its header's numbers against its size.

They are the first that reading the header makes, so that a command refuses a damaged file before it imports torch.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from graphcore.checkpoint.file_bytes import file_names, file_size, is_folder, opened
from graphcore.checkpoint.file_kind import FileKind, kind_of, refusal
from graphcore.checkpoint.gguf_header import read_gguf_front
from graphcore.checkpoint.gguf_reader import GGUFReader
from graphcore.checkpoint.model_file_names import INDEX_NAME, SINGLE_NAME
from graphcore.errors import CheckpointError


def check_front(path: Path) -> None:
    """Check the front of a file of weights, or of a folder's model.safetensors; other folders are left to their reader.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        UnsupportedError: the file is of a kind that is not read.
        CheckpointError: the file's header is damaged.
    """
    if is_folder(path):
        if SINGLE_NAME in file_names(path):
            safetensors_names(path / SINGLE_NAME)
    elif kind_of(path) is FileKind.GGUF:
        size = file_size(path)
        with opened(path) as stream:
            read_gguf_front(GGUFReader(stream, size, str(path)), path)
    elif path.name != INDEX_NAME:
        safetensors_names(path)


def safetensors_names(path: Path) -> list[str]:
    """Return the tensor names of a safetensors file in file order; the safetensors library checks the header.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        UnsupportedError: the file is of another kind, which is not read.
        CheckpointError: the file is no safetensors file, or its header does not match its bytes.
    """
    kind = kind_of(path)
    if kind is not FileKind.SAFETENSORS:
        raise refusal(path, kind)
    try:
        with safe_open(path, "numpy") as file:
            names: list[str] = file.offset_keys()
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}; it is damaged or cut off, fetch it again") from error
    return names
