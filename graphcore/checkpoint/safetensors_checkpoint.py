"""A Hugging Face checkpoint: one .safetensors file, or an index and its shards."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.dense_types import as_stored
from graphcore.checkpoint.file_bytes import file_names, is_folder
from graphcore.checkpoint.file_kind import PICKLE_SUFFIXES, pickle_folder_refusal
from graphcore.checkpoint.safetensors_file import read_safetensors_header
from graphcore.checkpoint.safetensors_index import read_indexed_headers
from graphcore.checkpoint.span import Span
from graphcore.errors import CheckpointError, CheckpointNotFoundError, ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD_NAME = re.compile(r".+-\d+-of-0*(?P<count>\d+)\.safetensors")


class SafetensorsCheckpoint(Checkpoint):
    """Tensors under Hugging Face's names.

    Args:
        path: a .safetensors file, or a folder with model.safetensors.index.json and its shards (looked for first),
            model.safetensors, or exactly one other .safetensors file.

    Attributes:
        folder: where config.json and the tokenizer's files lie.

    Raises:
        CheckpointNotFoundError: the path, the weights in it or a shard are missing.
        CheckpointError: headers, index and files contradict each other, or the weights are pickled.
    """

    def __init__(self, path: str | Path) -> None:
        self.source = str(path)
        self.layout = "hf"
        weights = _weights_file(Path(path))
        self.folder = weights.parent
        if weights.name == INDEX_NAME:
            tensors, files = read_indexed_headers(weights)
        else:
            tensors, identity = read_safetensors_header(weights)
            files = {weights: identity}
        self.tensors, self.files = MappingProxyType(tensors), MappingProxyType(files)

    def spans(self, name: str) -> tuple[Span, ...]:
        """Return the one run of bytes that the tensor is."""
        return (self.find(name).span(),)

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor that its bytes are, in the stored dtype and shape."""
        (raw,) = parts
        info = self.find(name)
        return as_stored(raw, info.encoding, info.shape)


def load_tensors(
    path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """Return every tensor of a safetensors checkpoint under its stored name.

    Args:
        path: as for SafetensorsCheckpoint.
        dtype: for the floating tensors, FP8 among them; None keeps what is stored. Integers stay as they are, for
            they may be packed weights.
        device: where the tensors end up.

    Raises:
        ConfigError: `dtype` is not a floating dtype.
        CheckpointError: as for SafetensorsCheckpoint.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: weights are only cast to floating dtypes; use torch.bfloat16 or None")
    checkpoint = SafetensorsCheckpoint(path)
    return {name: _placed(checkpoint.read(name), dtype, device) for name in checkpoint.tensors}


def _placed(tensor: torch.Tensor, dtype: torch.dtype | None, device: str | torch.device) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _weights_file(path: Path) -> Path:
    if not is_folder(path):
        return path
    names = file_names(path)
    for name in (INDEX_NAME, SINGLE_NAME):
        if name in names:
            return path / name
    others = [name for name in names if name.endswith(".safetensors")]
    if len(others) == 1:
        return path / _whole(path, others[0])
    if others:
        raise CheckpointError(
            f"{path}: holds {len(others)} safetensors files ({', '.join(others[:8])}), but neither {SINGLE_NAME} nor "
            f"{INDEX_NAME}; name one of them, or fetch the index"
        )
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise pickle_folder_refusal(path, pickles)
    raise CheckpointNotFoundError(
        f"{path}: holds no weights, neither {SINGLE_NAME} nor {INDEX_NAME} nor a .gguf file; check the path"
    )


def _whole(folder: Path, name: str) -> str:
    shard = SHARD_NAME.fullmatch(name)
    if shard is None or shard["count"] == "1":
        return name
    raise CheckpointNotFoundError(
        f"{folder / INDEX_NAME}: is missing, and {name} is only one of {shard['count']} shards; "
        "fetch the checkpoint again"
    )
