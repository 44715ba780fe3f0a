"""The reader of Hugging Face checkpoints: one .safetensors file, or an index and its shards.

Training programs save tensors under the names of wrappers around the model, which are taken off:

    module._orig_mod.model.layers.0.self_attn.q_proj.weight   ->   model.layers.0.self_attn.q_proj.weight

torch.compile, FSDP and activation checkpointing wrap whole models or single layers, under names that nothing else has.
DistributedDataParallel's "module." and PEFT's "base_model.model." are taken off where all tensors have them.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from graphcore.checkpoint.adapter_files import adapter_refusal, is_adapter
from graphcore.checkpoint.checkpoint import Checkpoint, TensorInfo
from graphcore.checkpoint.dense_types import as_stored
from graphcore.checkpoint.file_bytes import FileSpan, file_names, is_folder
from graphcore.checkpoint.file_kind import ARCHIVES, FileKind, kind_of, pickle_folder_refusal, refusal
from graphcore.checkpoint.model_file_names import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    INDEX_NAME,
    PICKLE_SUFFIXES,
    SINGLE_NAME,
    UNFINISHED_SUFFIXES,
)
from graphcore.checkpoint.safetensors_file import read_safetensors_header
from graphcore.checkpoint.safetensors_index import IndexedHeaders, read_indexed_headers
from graphcore.errors import CheckpointError, CheckpointNotFoundError, ConfigError, quoted

TORCH_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # anywhere in a name
SHARED_WRAPPERS = ("module.", "base_model.model.")  # in front of all names
HUB_UNFINISHED = ".cache/huggingface/download/*.incomplete"  # unfinished files of `hf download --local-dir`
SHARD_NAME = re.compile(r".+-\d+-of-0*(?P<count>\d+)\.safetensors")


class SafetensorsCheckpoint(Checkpoint):
    """A checkpoint in one or several safetensors files, with tensors under Hugging Face's names, without wrappers.

    Args:
        path: path of a .safetensors file, or of a folder with, in this order, model.safetensors,
            model.safetensors.index.json and its shards, or exactly one other .safetensors file.
        elsewhere: tensors of shards that may be missing here, by the shard's name.

    Attributes:
        folder: folder of the weights, where config.json and the tokenizer's files lie.

    Raises:
        CheckpointNotFoundError: the path, the weights in it or a shard are missing.
        CheckpointError: headers and files contradict each other, the weights are pickled, or they are an adapter.
    """

    def __init__(self, path: str | Path, elsewhere: Mapping[str, Sequence[TensorInfo]] = MappingProxyType({})) -> None:
        self.source = str(path)
        self.layout = "hf"
        weights = _weights_file(Path(path))
        self.folder = weights.parent
        if weights.name == INDEX_NAME:
            found = read_indexed_headers(weights, elsewhere)
        else:
            tensors, identity = read_safetensors_header(weights)
            found = IndexedHeaders(tensors, {weights: identity}, {})
        if is_adapter(found.tensors):
            raise adapter_refusal(weights)
        unwrapped = unwrapped_names([*found.tensors, *found.faults], self.source)
        self.tensors = MappingProxyType(
            {unwrapped[name]: replace(info, name=unwrapped[name]) for name, info in found.tensors.items()}
        )
        self.faults = MappingProxyType({unwrapped[name]: fault for name, fault in found.faults.items()})
        self.files = MappingProxyType(found.files)
        self.notes = (*note_on_wrappers(unwrapped), *_note_on_adapter(self.folder), *_note_on_shards(weights))

    def spans(self, name: str) -> tuple[FileSpan, ...]:
        """Return the only span of the tensor's bytes."""
        return (self.find(name).span(),)

    def assemble(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor from its bytes, in the stored dtype and shape."""
        (raw,) = parts
        info = self.find(name)
        return as_stored(raw, info.encoding, info.shape)


def unwrapped_names(names: Iterable[str], source: str) -> dict[str, str]:
    """Return the name of each tensor without wrappers, by its stored name.

    Args:
        names: stored names.
        source: name of the checkpoint, for messages.

    Raises:
        CheckpointError: two tensors have the same name without wrappers.
    """
    found = {name: ".".join(part for part in name.split(".") if part not in TORCH_WRAPPERS) for name in names}
    while prefix := _shared_prefix([plain for plain in found.values() if "." in plain]):
        found = {name: plain.removeprefix(prefix) for name, plain in found.items()}
    stored: dict[str, str] = {}
    for name, plain in found.items():
        if stored.setdefault(plain, name) != name:
            raise CheckpointError(
                f"{source}: tensors {quoted(stored[plain])} and {quoted(name)} are both {quoted(plain)} without the "
                "names of wrappers; save the model without wrappers"
            )
    return found


def _shared_prefix(names: Sequence[str]) -> str:
    """Return the wrapper that all names begin with; empty if there is none."""
    return next((one for one in SHARED_WRAPPERS if names and all(name.startswith(one) for name in names)), "")


def note_on_wrappers(unwrapped: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note that shows one of the names that lost its wrappers, or none."""
    example = next((name for name, plain in unwrapped.items() if plain != name), None)
    if example is None:
        return ()
    return (f"names of wrappers were taken off tensors' names, as in {quoted(example)}",)


def load_tensors(
    path: str | Path, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> dict[str, torch.Tensor]:
    """Read all tensors of a safetensors checkpoint and return them by their names.

    Args:
        path: path as for `SafetensorsCheckpoint`.
        dtype: dtype for floating-point tensors, including FP8; None keeps the stored one. Integer tensors are not
            converted, because they may be packed weights.
        device: device of the returned tensors.

    Raises:
        ConfigError: `dtype` is not a floating dtype.
        CheckpointError: as for `SafetensorsCheckpoint`.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: weights are only cast to floating dtypes; use torch.bfloat16 or None")
    checkpoint = SafetensorsCheckpoint(path)
    checkpoint.check_needed(checkpoint.faults)
    return {name: _placed(checkpoint.read(name), dtype, device) for name in checkpoint.tensors}


def _placed(tensor: torch.Tensor, dtype: torch.dtype | None, device: str | torch.device) -> torch.Tensor:
    return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)


def _weights_file(path: Path) -> Path:
    if not is_folder(path):
        return path
    names = file_names(path)
    for name in (SINGLE_NAME, INDEX_NAME):  # the order of transformers
        if name in names:
            return path / name
    others = [name for name in names if name.endswith(".safetensors") and not name.startswith(ADAPTER_PREFIX)]
    if not others and ADAPTER_CONFIG in names:
        raise adapter_refusal(path)
    if len(others) == 1:
        return path / _whole(path, others[0])
    if others:
        raise CheckpointError(
            f"{path}: holds {len(others)} safetensors files ({', '.join(others[:8])}), but neither {SINGLE_NAME} nor "
            f"{INDEX_NAME}; name one of them, or fetch the index"
        )
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    ggml = next((name for name in pickles if kind_of(path / name) is FileKind.GGML), None)
    if ggml is not None:
        raise refusal(path / ggml, FileKind.GGML)
    if pickles:
        raise pickle_folder_refusal(path, pickles)
    raise CheckpointNotFoundError(
        f"{path}: holds no weights, neither {SINGLE_NAME} nor {INDEX_NAME} nor a .gguf file; {_advice(path)}"
    )


def _advice(folder: Path) -> str:
    """Return what to do about a folder without weights, which may hold a part of them or an archive."""
    entries = sorted([*folder.iterdir(), *folder.glob(HUB_UNFINISHED)])
    unfinished = [entry.name for entry in entries if entry.suffix in UNFINISHED_SUFFIXES]
    if unfinished:
        return f"the download of {quoted(unfinished[0])} is not complete: resume it, or fetch the file again"
    dangling = [entry.name for entry in entries if not entry.exists()]
    if dangling:
        return f"{quoted(dangling[0])} is a link to a file that is not there: fetch the file again"
    archives = [name for name in file_names(folder) if kind_of(folder / name) in ARCHIVES]
    return f"unpack {quoted(archives[0])}" if archives else "check the path"


def _note_on_shards(weights: Path) -> tuple[str, ...]:
    """Return a note about shards of another save that lie beside model.safetensors, or none."""
    names = file_names(weights.parent) if weights.name == SINGLE_NAME else []
    shards = [name for name in names if SHARD_NAME.fullmatch(name)]
    if not shards:
        return ()
    return (f"{SINGLE_NAME} is read, as transformers does, and not the shards beside it ({shards[0]})",)


def _note_on_adapter(folder: Path) -> tuple[str, ...]:
    """Return a note about an adapter that lies beside the model, or none."""
    is_beside = (folder / ADAPTER_CONFIG).is_file()
    return (f"the adapter beside the model is not applied ({ADAPTER_CONFIG})",) if is_beside else ()


def _whole(folder: Path, name: str) -> str:
    shard = SHARD_NAME.fullmatch(name)
    if shard is None or shard["count"] == "1":
        return name
    raise CheckpointNotFoundError(
        f"{folder / INDEX_NAME}: is missing, and {name} is only one of {shard['count']} shards; "
        "fetch the checkpoint again"
    )
