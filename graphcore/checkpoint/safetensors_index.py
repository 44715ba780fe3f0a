"""Models in several .safetensors files: model.safetensors.index.json, and the shards that it names.

{"metadata": {...}, "weight_map": {tensor name: file name, relative to the index}}
"""

import codecs
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.file_bytes import file_size, opened
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.json_object import parse_json_object
from graphcore.checkpoint.safetensors_file import read_safetensors_header
from graphcore.errors import CheckpointError, CheckpointNotFoundError, quoted

MAX_INDEX = 100_000_000  # bytes; the largest published index has about 10 MB


@dataclass(frozen=True)
class IndexedHeaders:
    """The headers of all shards.

    Attributes:
        tensors: descriptions of the stored tensors by name, in the order of the shards' names.
        files: identities of the shards.
        faults: disagreements of the index with its shards, by tensor: messages for a model that needs the tensor. A
            tied head or a buffer that a writer dropped is often still in the index.
    """

    tensors: dict[str, TensorInfo]
    files: dict[Path, FileIdentity]
    faults: dict[str, str]


def read_indexed_headers(
    index: Path, elsewhere: Mapping[str, Sequence[TensorInfo]] = MappingProxyType({})
) -> IndexedHeaders:
    """Return the headers of all shards that an index names.

    Args:
        elsewhere: tensors of shards that may be missing here, by the shard's name.

    Raises:
        CheckpointNotFoundError: a shard is missing.
        CheckpointError: the index or a shard is damaged.
    """
    weight_map = read_weight_map(index)
    shards = _shard_paths(index, weight_map, elsewhere)
    found = IndexedHeaders({}, {}, {})
    for shard, path in shards.items():
        if shard in elsewhere:
            infos = {info.name: replace(info, file=path) for info in elsewhere[shard]}
        else:
            infos, found.files[path] = read_safetensors_header(path)
        for name, info in infos.items():
            fault = _fault(index, name, shard, weight_map, found.tensors)
            if fault:
                found.faults[name] = fault
            found.tensors.setdefault(name, info)
    missing = [name for name in weight_map if name not in found.tensors]
    for name in missing:
        found.faults[name] = (
            f"{index}: maps tensor {quoted(name)} to {weight_map[name]}, which does not hold it "
            f"({len(missing)} such tensors); index and shards are of different versions, fetch both again"
        )
    return found


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the name of the shard that should hold each tensor, by the tensor's name.

    Raises:
        CheckpointError: the index is damaged.
    """
    size = file_size(index)
    if size > MAX_INDEX:
        raise CheckpointError(f"{index}: has {size} bytes, more than any index ({MAX_INDEX}); fetch it again")
    with opened(index) as stream:
        parsed = parse_json_object(stream.read(size).removeprefix(codecs.BOM_UTF8), str(index))
    weight_map = parsed.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map that maps tensors to shards; fetch it again")
    for name, shard in weight_map.items():
        _check_shard_name(index, name, shard)
    return weight_map


def _check_shard_name(index: Path, name: str, shard: object) -> None:
    where = f"{index}: tensor {quoted(name)} is mapped to {quoted(shard)}"
    if not isinstance(shard, str) or not shard.isprintable() or not shard:
        raise CheckpointError(f"{where}, which is no file name; fetch the index again")
    # Only the string is checked, because files in Hugging Face's cache are links to outside the folder.
    parts = PurePosixPath(shard).parts
    if shard.startswith("/") or "\\" in shard or ".." in parts or ":" in shard:
        raise CheckpointError(f"{where}, outside the checkpoint's folder; such an index is not followed")


def _shard_paths(index: Path, weight_map: Mapping[str, str], elsewhere: Container[str]) -> dict[str, Path]:
    shards = {shard: index.parent / shard for shard in sorted(set(weight_map.values()))}
    missing = [shard for shard, path in shards.items() if shard not in elsewhere and not _is_there(path)]
    if missing:
        raise CheckpointNotFoundError(
            f"{index.parent / missing[0]}: shard is missing ({len(missing)} of {len(shards)} are); "
            f"{index.name} needs it: fetch the checkpoint again, a resumed download adds only what is missing"
        )
    return shards


def _is_there(path: Path) -> bool:
    try:
        file_size(path)
    except CheckpointNotFoundError:
        return False
    return True


def _fault(index: Path, name: str, shard: str, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> str:
    """Return how the index, or a shard before, disagrees with a shard that holds a tensor; empty if they agree."""
    if name in tensors:
        return f"{index}: tensor {quoted(name)} is in {tensors[name].file} and again in {shard}; fetch both again"
    if name not in weight_map:
        return (
            f"{index}: {shard} holds tensor {quoted(name)}, which the index does not name; "
            "index and shards are of different versions, fetch both again"
        )
    if weight_map[name] != shard:
        return f"{index}: maps tensor {quoted(name)} to {weight_map[name]}, but {shard} holds it; fetch both again"
    return ""
