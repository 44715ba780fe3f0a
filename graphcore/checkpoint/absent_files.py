"""Files of a checkpoint that are not on this machine: processes that run one model need only those of their layers.

Another process that has such a file says what its header does (`headers_here`). A reader is given that as `Elsewhere`:
it then knows all tensors, and reads none of an absent file.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.file_bytes import file_names, is_folder
from graphcore.checkpoint.gguf_checkpoint import place_tensors
from graphcore.checkpoint.gguf_header import read_gguf_header
from graphcore.checkpoint.model_file_names import INDEX_NAME, SINGLE_NAME, model_names, shards_of
from graphcore.checkpoint.safetensors_file import read_safetensors_header
from graphcore.checkpoint.safetensors_index import read_weight_map

Elsewhere = Mapping[str, Sequence[TensorInfo]]
"""Tensors of each absent file, by its name in the checkpoint's folder."""


def files_of(path: Path) -> dict[str, Path]:
    """Return the path of each weight file of a local checkpoint, by file name; some may be missing.

    Raises:
        CheckpointError: the index is damaged.
    """
    folder, names = (path, file_names(path)) if is_folder(path) else (path.parent, [path.name])
    if INDEX_NAME in names and SINGLE_NAME not in names:
        return {name: folder / name for name in sorted(set(read_weight_map(folder / INDEX_NAME).values()))}
    models = model_names(names)
    return {name: folder / name for name in (shards_of(models[0]) if len(models) == 1 else ())}


def absent_files(path: Path) -> list[str]:
    """Return the names of the files of a local checkpoint that are not here."""
    return [name for name, file in files_of(path).items() if not file.exists()]


def headers_here(path: Path, wanted: Collection[str]) -> dict[str, list[TensorInfo]]:
    """Return the tensors of those of the wanted files that are here.

    Raises:
        CheckpointError: a file is damaged.
    """
    files = {name: file for name, file in files_of(path).items() if file.exists()}
    return {name: _tensors(file) for name, file in files.items() if name in wanted}


def _tensors(file: Path) -> list[TensorInfo]:
    if file.suffix == ".safetensors":
        return list(read_safetensors_header(file)[0].values())
    return list(place_tensors(read_gguf_header(file), "").values())
