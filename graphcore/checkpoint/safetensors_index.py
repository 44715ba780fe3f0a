"""Models in several .safetensors files: model.safetensors.index.json, and the shards that it names.

{"metadata": {...}, "weight_map": {tensor name: file name, relative to the index}}
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from graphcore.checkpoint.checkpoint import TensorInfo
from graphcore.checkpoint.file_bytes import file_size, opened
from graphcore.checkpoint.file_identity import FileIdentity
from graphcore.checkpoint.json_object import parse_json_object
from graphcore.checkpoint.safetensors_file import read_safetensors_header
from graphcore.errors import CheckpointError, CheckpointNotFoundError, quoted

MAX_INDEX = 100_000_000  # bytes; the largest published index has about 10 MB


def read_indexed_headers(index: Path) -> tuple[dict[str, TensorInfo], dict[Path, FileIdentity]]:
    """Return the tensors of all shards by name, in the order of the shards' names, and the identities of the files.

    Raises:
        CheckpointNotFoundError: a shard is missing.
        CheckpointError: the index and its shards do not name exactly the same tensors in the same files.
    """
    weight_map = _read_weight_map(index)
    shards = _shard_paths(index, weight_map)
    tensors: dict[str, TensorInfo] = {}
    files: dict[Path, FileIdentity] = {}
    for shard, path in shards.items():
        infos, files[path] = read_safetensors_header(path)
        for name, info in infos.items():
            _check_place(index, name, shard, weight_map, tensors)
            tensors[name] = info
    missing = [name for name in weight_map if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{index}: maps tensor {quoted(missing[0])} to {weight_map[missing[0]]}, which does not hold it "
            f"({len(missing)} such tensors); index and shards are of different versions, fetch both again"
        )
    return tensors, files


def _read_weight_map(index: Path) -> dict[str, str]:
    size = file_size(index)
    if size > MAX_INDEX:
        raise CheckpointError(f"{index}: has {size} bytes, more than any index ({MAX_INDEX}); fetch it again")
    with opened(index) as stream:
        parsed = parse_json_object(stream.read(size), str(index))
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


def _shard_paths(index: Path, weight_map: Mapping[str, str]) -> dict[str, Path]:
    shards = {shard: index.parent / shard for shard in sorted(set(weight_map.values()))}
    missing = [shard for shard, path in shards.items() if not _is_there(path)]
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


def _check_place(
    index: Path, name: str, shard: str, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    if name in tensors:
        raise CheckpointError(
            f"{index}: tensor {quoted(name)} is in {tensors[name].file} and again in {shard}; fetch both again"
        )
    if name not in weight_map:
        raise CheckpointError(
            f"{index}: {shard} holds tensor {quoted(name)}, which the index does not name; "
            "index and shards are of different versions, fetch both again"
        )
    if weight_map[name] != shard:
        raise CheckpointError(
            f"{index}: maps tensor {quoted(name)} to {weight_map[name]}, but {shard} holds it; fetch both again"
        )
