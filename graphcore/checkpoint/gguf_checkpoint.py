"""A GGUF checkpoint: one file, or the parts of a split one, with the metadata that stands in for config.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from graphcore.checkpoint.checkpoint import Checkpoint
from graphcore.checkpoint.dense_types import as_stored
from graphcore.checkpoint.gguf_placement import place_tensors
from graphcore.checkpoint.gguf_reader import MetadataValue
from graphcore.checkpoint.gguf_split import read_split_headers
from graphcore.checkpoint.quoted import quoted
from graphcore.checkpoint.span import Span
from graphcore.checkpoint.tensor_info import TensorInfo
from graphcore.errors import CheckpointError


class GGUFCheckpoint(Checkpoint):
    """Tensors under llama.cpp's names.

    Args:
        path: a GGUF file; any part opens all of a split model.

    Attributes:
        folder: where the file lies.
        metadata: by key, of the first part; arrays are tuples.
        kinds: by key, how the metadata's values are typed; see `GGUFHeader`.

    Raises:
        CheckpointNotFoundError: the file, or a part of it, is missing.
        UnsupportedError: the version, the byte order or a tensor's type is not read here.
        CheckpointError: the bytes contradict each other.
    """

    metadata: Mapping[str, MetadataValue]

    def __init__(self, path: str | Path) -> None:
        self.source = str(path)
        self.layout = "gguf"
        self.folder = Path(path).parent
        headers = read_split_headers(Path(path))
        self.metadata, self.kinds = headers[0].metadata, headers[0].kinds
        architecture = self.metadata.get("general.architecture")
        tensors: dict[str, TensorInfo] = {}
        for header in headers:
            placed = place_tensors(header, architecture if isinstance(architecture, str) else "")
            _check_disjoint(tensors, placed)
            tensors.update(placed)
        self.tensors = MappingProxyType(tensors)
        self.files = MappingProxyType({header.path: header.identity for header in headers})

    def forget_arrays(self) -> None:
        """Drop the metadata's arrays, a vocabulary among them, which take 37 MB where it has 262144 tokens."""
        self.metadata = {key: value for key, value in self.metadata.items() if not isinstance(value, tuple)}

    def spans(self, name: str) -> tuple[Span, ...]:
        """Return the one run of bytes that the tensor is."""
        return (self.find(name).span(),)

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor that its bytes are: dense in its stored dtype and shape, packed as uint8."""
        (raw,) = parts
        info = self.find(name)
        return as_stored(raw, info.encoding, info.shape)


def _check_disjoint(tensors: Mapping[str, TensorInfo], placed: Mapping[str, TensorInfo]) -> None:
    for name in tensors.keys() & placed.keys():
        raise CheckpointError(
            f"{placed[name].file}: holds tensor {quoted(name)}, as does {tensors[name].file}; fetch both again"
        )
