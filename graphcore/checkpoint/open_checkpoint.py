"""Any local checkpoint, whatever its container, by path."""

from pathlib import Path

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.file_bytes import file_names, is_folder
from graphcore.checkpoint.file_kind import FileKind, kind_of
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.gguf_split import model_names
from graphcore.checkpoint.mxfp4_pairs import Mxfp4PairsCheckpoint, has_pairs
from graphcore.checkpoint.safetensors_checkpoint import INDEX_NAME, SINGLE_NAME, SafetensorsCheckpoint
from graphcore.errors import CheckpointError


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint at `path`, its headers checked, no tensor read.

    Args:
        path: a file, whose first bytes decide what it is; or a folder with safetensors under their usual names, with
            one GGUF model (a split one counts as one, mmproj files as none), or with one other .safetensors file,
            looked for in this order.

    Raises:
        CheckpointNotFoundError: the path or a file of the checkpoint is missing.
        UnsupportedError: the weights are pickled, or of a type that is not read.
        CheckpointError: what is there is no checkpoint, is damaged, or is more than one model.
    """
    path = Path(path)
    if is_folder(path):
        return _open_folder(path)
    # What is neither is refused by the safetensors reader, with what it is instead.
    return GGUFCheckpoint(path) if kind_of(path) is FileKind.GGUF else _open_safetensors(path)


def _open_folder(folder: Path) -> Checkpoint:
    names = file_names(folder)
    if INDEX_NAME in names or SINGLE_NAME in names:
        return _open_safetensors(folder)
    models = model_names(names)
    if len(models) > 1:
        raise CheckpointError(
            f"{folder}: holds {len(models)} GGUF models ({', '.join(models)}); name one of these files"
        )
    return GGUFCheckpoint(folder / models[0]) if models else _open_safetensors(folder)


def _open_safetensors(path: Path) -> SafetensorsCheckpoint:
    plain = SafetensorsCheckpoint(path)
    return Mxfp4PairsCheckpoint(path) if has_pairs(plain.tensors) else plain
