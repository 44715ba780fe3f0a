"""The metadata of a packed file: copied from a GGUF source, or made from the config and the tokenizer."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import gguf

from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.gguf_checkpoint import GGUFCheckpoint
from graphcore.checkpoint.safetensors_checkpoint import SafetensorsCheckpoint
from graphcore.encodings import ENCODINGS
from graphcore.engine.model import Model
from graphcore.export.gguf_file import Field, FieldValue, typed_field
from graphcore.export.model_fields import check_says_the_same, gguf_architecture, model_fields
from graphcore.quant.choice import STORED
from graphcore.tokenizer.gguf_fields import gguf_fields
from graphcore.tokenizer.hf_folder import has_tokenizer, read_folder

QUANTIZATION_VERSION = 2  # of ggml's block layouts
NOT_COPIED = ("split.", "general.architecture", "general.alignment")  # written anew

# What llama.cpp calls a file of these tensors, for people; nothing reads it.
FILE_TYPES: Mapping[str, int] = MappingProxyType(
    {name: one.file_type for name, one in ENCODINGS.items() if one.file_type is not None}
)


@dataclass(frozen=True)
class Metadata:
    """general.architecture, and all other entries."""

    architecture: str
    fields: Mapping[str, Field]


def metadata_of(
    model: Model, shapes: Mapping[str, tuple[int, ...]], asked: str, encodings: Collection[str]
) -> Metadata:
    """Return the metadata of a file with the model's tensors.

    Args:
        shapes: of the file's tensors, by name.
        asked: what matrices are packed as, or "stored".
        encodings: of the file's tensors.

    Raises:
        UnsupportedError: GGUF cannot say what the model is.
        TokenizerError: GGUF cannot say what its tokenizer does.
    """
    if isinstance(model.checkpoint, GGUFCheckpoint):
        return _copied(model.checkpoint, model.config.num_hidden_layers, asked)
    architecture = gguf_architecture(model.config)
    narrow = sorted(set(encodings) - {"f32"})
    kind = asked if asked != STORED else next(iter(narrow), "f32")
    own: dict[str, FieldValue] = {"general.type": "model", "general.quantization_version": QUANTIZATION_VERSION}
    if model.path is not None:
        own["general.name"] = model.path.resolve().name
    if kind in FILE_TYPES:
        own["general.file_type"] = FILE_TYPES[kind]
    own |= model_fields(model.config, architecture)
    check_says_the_same(
        architecture_of(model.config),
        model.config,
        {**own, "general.architecture": architecture},
        shapes,
        model.checkpoint.source,
    )
    own |= _tokenizer_fields(model)
    return Metadata(architecture, {key: typed_field(value) for key, value in own.items()})


def _tokenizer_fields(model: Model) -> Mapping[str, FieldValue]:
    folder = model.checkpoint.folder if isinstance(model.checkpoint, SafetensorsCheckpoint) else None
    if folder is None or not has_tokenizer(folder):
        return {"tokenizer.ggml.model": "none"}
    return gguf_fields(read_folder(Path(folder)), model.config.vocab_size)


def _copied(checkpoint: GGUFCheckpoint, num_layers: int, asked: str) -> Metadata:
    """Return the source's entries, typed as they are there."""
    fields: dict[str, Field] = {}
    for key, value in checkpoint.metadata.items():
        is_empty = isinstance(value, tuple) and not value  # which gguf cannot write, and readers need not have
        if not key.startswith(NOT_COPIED) and not is_empty:
            kinds = [gguf.GGUFValueType(kind) for kind in checkpoint.kinds[key]]
            fields[key] = Field(value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    architecture = str(checkpoint.metadata["general.architecture"])
    count = f"{architecture}.block_count"
    fields[count] = Field(num_layers, fields[count].kind)
    if asked in FILE_TYPES:
        fields["general.file_type"] = typed_field(FILE_TYPES[asked])
    elif asked != STORED:
        fields.pop("general.file_type", None)
    return Metadata(architecture, fields)
