"""Adapters and other files beside a model: what they are, and what to do with them.

adapter_config.json, adapter_model.safetensors    PEFT's adapters
general.type "adapter", "imatrix", "mmproj"       GGUF files that are no model; source: gguf, constants.py, GGUFType
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from graphcore.checkpoint.file_kind import IMATRIX_FOUND
from graphcore.checkpoint.gguf_reader import MetadataValue
from graphcore.checkpoint.json_object import read_json_object
from graphcore.checkpoint.model_file_names import ADAPTER_CONFIG
from graphcore.errors import CheckpointError, UnsupportedError, quoted

_ADAPTER_TENSOR = re.compile(r"(^|[._])(lora_|ia3_l|hada_w|lokr_w|vera_|oft_|boft_)|\.lora\.")


def is_adapter(names: Iterable[str]) -> bool:
    """Return whether tensors are those of an adapter alone: every whole model has norms."""
    names = list(names)
    return any(_ADAPTER_TENSOR.search(name.lower()) for name in names) and not any("norm" in name for name in names)


def adapter_refusal(path: Path) -> UnsupportedError:
    """Return the error for an adapter, a file or a folder, with the base model that its config names."""
    folder = path if path.is_dir() else path.parent
    base = ""
    if (folder / ADAPTER_CONFIG).is_file():
        try:
            named = read_json_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        except CheckpointError:
            named = None
        base = f" of {quoted(named)}" if isinstance(named, str) else ""
    return UnsupportedError(
        f"{path}: is an adapter (LoRA or the like){base}, not a model; name its base model in model.checkpoint=, and "
        f"model.adapter={folder}"
    )


def check_gguf_is_model(path: Path, metadata: Mapping[str, MetadataValue]) -> None:
    """Check that a GGUF file holds a model.

    Raises:
        UnsupportedError: the file is an adapter, an importance matrix, a projector or a control vector.
    """
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    if kind == "adapter":
        raise UnsupportedError(
            f"{path}: is a LoRA adapter, not a model; name its base model in model.checkpoint=, and "
            f"model.adapter={path}"
        )
    if kind == "imatrix":
        raise UnsupportedError(f"{path}: {IMATRIX_FOUND}")
    if kind == "mmproj" or architecture == "clip":
        raise UnsupportedError(
            f"{path}: is a projector of images or sound (mmproj), not a model; open the model's own file, which reads "
            "text"
        )
    if architecture == "controlvector":
        raise UnsupportedError(f"{path}: is a control vector, not a model; open the model's own file")
