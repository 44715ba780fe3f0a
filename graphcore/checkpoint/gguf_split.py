"""Models that are split into several GGUF files: name-00001-of-00003.gguf, name-00002-of-00003.gguf, ...

Each part is a complete GGUF file. `split.no` counts from 0, while the names count from 1. Only the first part is
guaranteed to have the model's metadata. Source: llama.cpp, tools/gguf-split.
"""

from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from types import MappingProxyType

from graphcore.checkpoint.gguf_header import GGUFHeader, read_gguf_header
from graphcore.checkpoint.model_file_names import shards_of
from graphcore.errors import CheckpointError, CheckpointNotFoundError, quoted


def read_split_headers(path: Path, elsewhere: Mapping[str, Sized] = MappingProxyType({})) -> tuple[GGUFHeader, ...]:
    """Read the headers of all files of the model that the file at `path` is part of, in the order of the parts.

    Args:
        elsewhere: tensors of parts that are missing here, by the part's name; their headers are left out.

    Raises:
        CheckpointNotFoundError: a part is missing.
        CheckpointError: names and metadata of the parts contradict each other.
    """
    opened = read_gguf_header(path)
    names = shards_of(path.name)
    count = _split_number(opened, "split.count", 1)
    if count == len(names) == 1:
        return (opened,)
    if len(names) != count:
        raise CheckpointError(
            f"{path}: is one of {count} by its split.count, which its name does not say; "
            f"name it like model-00001-of-{count:05}.gguf beside the others, or fetch it again"
        )
    here = [name for name in names if name not in elsewhere or name == names[0]]  # which has the metadata
    _check_present(path.parent, here)
    headers = {name: opened if name == path.name else read_gguf_header(path.parent / name) for name in here}
    _check_parts({names.index(name): header for name, header in headers.items()}, count, elsewhere)
    return tuple(headers.values())


def _split_number(header: GGUFHeader, key: str, absent: int) -> int:
    value = header.metadata.get(key, absent)
    # Some writers store a split.count of 0 in models that are not split.
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(f"{header.path}: {key} is {quoted(value)}, not a number of parts; fetch the file again")
    return max(value, 1) if key == "split.count" else value


def _check_present(folder: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointNotFoundError(
            f"{folder / missing[0]}: part of a split model is missing ({len(missing)} of {len(names)} are); "
            "put all parts into one folder, or fetch them again"
        )


def _check_parts(headers: Mapping[int, GGUFHeader], count: int, elsewhere: Mapping[str, Sized]) -> None:
    """Check parts by their number, and those elsewhere by how many tensors they hold."""
    for index, header in headers.items():
        if _split_number(header, "split.no", 0) != index or _split_number(header, "split.count", 1) != count:
            raise CheckpointError(
                f"{header.path}: is part {_split_number(header, 'split.no', 0) + 1} of "
                f"{_split_number(header, 'split.count', 1)} by its metadata, part {index + 1} of {count} by its name; "
                "the parts are of different models, fetch them again"
            )
    found = sum(len(header.tensors) for header in headers.values()) + sum(map(len, elsewhere.values()))
    promised = _split_number(headers[0], "split.tensors.count", found)
    if promised != found:
        raise CheckpointError(
            f"{headers[0].path}: split.tensors.count is {promised}, the {count} parts hold {found} tensors; "
            "fetch them again"
        )
