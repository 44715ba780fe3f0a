"""Strict JSON for checkpoints: one object, no duplicate keys, no NaN.

Python's parser takes the last of two equal keys and accepts NaN and Infinity. In a checkpoint either is a sign of
damage, and other readers could see a different model. A config.json may hold NaN and Infinity in settings that are not
read, because transformers writes some; readers of a setting check its value.
"""

import codecs
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from graphcore.checkpoint.file_bytes import read_whole
from graphcore.errors import CheckpointError, CheckpointNotFoundError, quoted


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not allowed")


def parse_json_object(
    raw: bytes, where: str, parse_constant: Callable[[str], object] = _refuse_constant
) -> dict[str, object]:
    """Parse a JSON object.

    Args:
        raw: complete text, UTF-8.
        where: name of the file, and of the part, for messages.
        parse_constant: function from "NaN", "Infinity" or "-Infinity" to its value.

    Raises:
        CheckpointError: the text is not JSON, is nested too deeply, is not an object, or has a key twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members = dict(pairs)
        if len(members) < len(pairs):
            [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(f"{where}: has the key {quoted(twice)} twice")
        return members

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=parse_constant)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{where}: is nested too deep to be weights; fetch the file again") from error
    except ValueError as error:
        raise CheckpointError(f"{where}: is not JSON ({error}); {how_to_mend(raw)}") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{where}: is a JSON {type(parsed).__name__}, not an object; fetch the file again")
    return parsed


def how_to_mend(raw: bytes) -> str:
    """Return what to do about a file that is not what its name says."""
    if raw.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer: run `git lfs pull` in its folder"
    return "fetch the file again"


def read_json_object(file: Path) -> dict[str, object]:
    """Read a model's JSON file, which must hold one object; a byte order mark before it is left out.

    Raises:
        CheckpointNotFoundError: the file does not exist.
        CheckpointError: the file cannot be read, is a pipe or a device, or does not hold a JSON object.
    """
    try:
        raw = read_whole(file)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{file}: no such file; give a model folder that holds config.json, or a .gguf file"
        ) from error
    return parse_json_object(raw.removeprefix(codecs.BOM_UTF8), str(file), float)
