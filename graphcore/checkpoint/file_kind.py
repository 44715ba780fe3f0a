"""The kind of a file, told by its first bytes rather than its name, and the errors for kinds that are not read.

Sources of the first bytes: llama.cpp before August 2023, llama.h (magic numbers, little-endian); tools/imatrix, whose
old files begin with a count, a length and the name of a tensor.
"""

import re
import shlex
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType

from graphcore.checkpoint.file_bytes import read_front
from graphcore.checkpoint.model_file_names import PICKLE_SUFFIXES
from graphcore.errors import CheckpointError, UnsupportedError, quoted

IMATRIX_FOUND = "is an importance matrix, which quantising reads, not a model; open the model's own file"
FRONT = 512  # bytes that tell the kind
MAX_SAFETENSORS_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class FileKind(Enum):
    """The kinds of files that their first bytes can tell apart."""

    SAFETENSORS = "safetensors"
    GGUF = "GGUF"
    PICKLE = "pickle"
    LFS_POINTER = "Git LFS pointer"
    GGML = "GGML"
    GGML_ADAPTER = "GGML adapter"
    IMATRIX = "importance matrix"
    WEB_PAGE = "web page"
    HDF5 = "HDF5"
    JSON = "JSON"
    ZIP = "zip archive"
    TAR = "tar archive"
    SEVEN_ZIP = "7z archive"
    RAR = "rar archive"
    COMPRESSED = "compressed file"
    EMPTY = "empty"
    UNKNOWN = "unknown"


_MAGICS: Mapping[tuple[bytes, ...], FileKind] = MappingProxyType(
    {
        (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"): FileKind.PICKLE,  # torch.save before torch 1.6
        (b"PK\x03\x04", b"PK\x05\x06"): FileKind.ZIP,
        (b"7z\xbc\xaf\x27\x1c",): FileKind.SEVEN_ZIP,
        (b"Rar!\x1a\x07",): FileKind.RAR,
        (b"\x1f\x8b\x08", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"): FileKind.COMPRESSED,  # gzip, bzip2, xz, zstd
        (b"version https://",): FileKind.LFS_POINTER,
        (b"lmgg", b"fmgg", b"tjgg", b"ggml", b"ggmf", b"ggjt"): FileKind.GGML,
        (b"algg", b"ggla"): FileKind.GGML_ADAPTER,
        (b"\x89HDF\r\n\x1a\n",): FileKind.HDF5,
        (b'{"', b"{\n", b"{\r\n"): FileKind.JSON,
    }
)
ARCHIVES = (FileKind.ZIP, FileKind.TAR, FileKind.SEVEN_ZIP, FileKind.RAR, FileKind.COMPRESSED)
TAR_MAGIC = (257, b"ustar")  # offset and bytes
TORCH_PICKLE = b"/data.pkl"  # end of the name of the first file in torch.save's zip archives
_IMATRIX = re.compile(rb"[\s\S]{8}(blk\.\d+\.[\w.]+|output|token_embd)\.weight")
LONGEST_ENTRY = 256  # bytes of a tensor's name in an importance matrix


def kind_of(path: Path) -> FileKind:
    """Return the kind of a file by its first bytes; if they are not known, by a .safetensors or pickle suffix.

    Raises:
        CheckpointNotFoundError: the path does not exist.
        CheckpointError: the path is not a regular file, or cannot be read.
    """
    front = read_front(path, FRONT)
    by_magic = _kind_by_magic(front)
    if by_magic is FileKind.ZIP and path.suffix in PICKLE_SUFFIXES:
        return FileKind.PICKLE
    if by_magic is not FileKind.UNKNOWN:
        return by_magic
    if path.suffix == ".safetensors":
        return FileKind.SAFETENSORS
    return FileKind.PICKLE if path.suffix in PICKLE_SUFFIXES else FileKind.UNKNOWN


def _kind_by_magic(front: bytes) -> FileKind:
    if not front:
        return FileKind.EMPTY
    if front.startswith(b"GGUF"):
        return FileKind.GGUF
    # Checked before pickle: a safetensors file with a header of 640 bytes starts with pickle's 0x80 0x02.
    if front[8:9] == b"{" and int.from_bytes(front[:8], "little") <= MAX_SAFETENSORS_HEADER:
        return FileKind.SAFETENSORS
    found = next((kind for magics, kind in _MAGICS.items() if front.startswith(magics)), FileKind.UNKNOWN)
    if found is FileKind.ZIP and TORCH_PICKLE in front:
        return FileKind.PICKLE
    if front.startswith(TAR_MAGIC[1], TAR_MAGIC[0]):
        return FileKind.TAR
    if found is FileKind.UNKNOWN and _IMATRIX.match(front) and int.from_bytes(front[4:8], "little") <= LONGEST_ENTRY:
        return FileKind.IMATRIX
    if found is FileKind.UNKNOWN and front.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return FileKind.WEB_PAGE
    return found


def refusal(path: Path, kind: FileKind) -> CheckpointError:
    """Return the error that says why a file of a given kind is not read, and what to do."""
    match kind:
        case FileKind.EMPTY:
            return CheckpointError(f"{path}: is empty; fetch it again")
        case FileKind.LFS_POINTER:
            return CheckpointError(f"{path}: is a Git LFS pointer, not the weights; run `git lfs pull` in its folder")
        case FileKind.PICKLE:
            return _pickle_refusal(path)
        case FileKind.GGML:
            return _ggml_refusal(path)
        case FileKind.GGML_ADAPTER:
            return UnsupportedError(
                f"{path}: is a LoRA adapter of before August 2023 (GGLA), not a model; merge the adapter that it was "
                "made from into its base model, and open the result"
            )
        case FileKind.IMATRIX:
            return UnsupportedError(f"{path}: {IMATRIX_FOUND}")
        case FileKind.WEB_PAGE:
            return CheckpointError(f"{path}: is a web page, not the weights; fetch the file itself (resolve, not blob)")
        case FileKind.HDF5:
            return UnsupportedError(
                f"{path}: is an HDF5 file (Keras, TensorFlow), which is not read; load it with its own program, and "
                "save safetensors"
            )
        case FileKind.JSON:
            return CheckpointError(f"{path}: is a JSON file, not the weights; name its folder, or the weights' file")
        case FileKind.ZIP | FileKind.TAR | FileKind.SEVEN_ZIP | FileKind.RAR | FileKind.COMPRESSED:
            return CheckpointError(f"{path}: is a {kind.value}; unpack it, and name the folder or file that was in it")
        case FileKind.UNKNOWN:
            front = quoted(read_front(path, 8))
            return CheckpointError(f"{path}: is neither safetensors nor GGUF, it starts with {front}; check the path")
        case FileKind.SAFETENSORS | FileKind.GGUF:
            return CheckpointError(
                f"{path}: is a {kind.value} file under another name or in another's place; open it itself"
            )


def _ggml_refusal(path: Path) -> CheckpointError:
    new = str(path.with_suffix(".gguf"))
    return UnsupportedError(
        f"{path}: is a GGML file of before August 2023, which came before GGUF; convert it with llama.cpp: "
        f"{shlex.join(['python', 'convert_llama_ggml_to_gguf.py', '--input', str(path), '--output', new])} "
        "(Llama models), or fetch the model as GGUF"
    )


def _pickle_refusal(path: Path) -> CheckpointError:
    script = (
        "import torch; from safetensors.torch import save_file; "
        f"state = torch.load({str(path)!r}, map_location='cpu', weights_only=True); "
        f"save_file({{k: v.clone().contiguous() for k, v in state.items()}}, {str(path.with_suffix('.safetensors'))!r})"
    )
    return UnsupportedError(
        f"{path}: is a pickle, which could run any code and is never opened; convert it once: "
        f"python -c {shlex.quote(script)}"
    )


def pickle_folder_refusal(folder: Path, names: list[str]) -> CheckpointError:
    """Return the error for a folder whose only weights, `names`, are pickles."""
    script = (
        "from transformers import AutoModelForCausalLM as Model; "
        f"Model.from_pretrained({str(folder)!r}).save_pretrained({f'{folder}-safetensors'!r})"
    )
    return UnsupportedError(
        f"{folder}: holds only pickled weights ({names[0]}), which could run any code and are never opened; "
        f"convert them once: python -c {shlex.quote(script)}"
    )
