"""The reader of generation_config.json, which never keeps a model from running.

The file is optional and edited by hand, so what cannot be understood is left out, with a note. Of its settings
graphcore uses the special token ids.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphcore.errors import quoted

FILE_NAME = "generation_config.json"
NOT_JSON = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])|//[^\n]*')  # strings, to keep; trailing commas; comments


@dataclass(frozen=True)
class GenerationConfig:
    """The settings of a generation_config.json.

    Attributes:
        settings: settings by name; empty if there is no file, or none that can be understood.
        notes: lines for the user about what is not as it should be.
    """

    settings: Mapping[str, object]
    notes: tuple[str, ...] = ()


def read_generation_config(folder: Path) -> GenerationConfig:
    """Return the generation settings of a model folder."""
    file = folder / FILE_NAME
    try:
        if file.exists() and not file.is_file():  # a read of a pipe would wait
            return _ignored(file, "is not a regular file")
        raw = file.read_bytes()
    except FileNotFoundError:
        return GenerationConfig({})
    except OSError as error:
        return _ignored(file, f"cannot be read ({error.strerror})")
    if not raw.strip():
        return _ignored(file, "is empty")
    constants: list[str] = []
    try:
        settings = _parse(raw, constants)
    except RecursionError:
        return _ignored(file, "is nested too deep")
    except ValueError as error:
        return _ignored(file, f"is not JSON ({quoted(' '.join(str(error).split()))})")
    if not isinstance(settings, dict):
        return _ignored(file, f"holds {quoted(settings)}, not an object")
    known = {str(name): value for name, value in settings.items() if value not in constants}
    wrong = (f"{file}: ignored settings that are no numbers: {', '.join(constants)}",) if constants else ()
    return GenerationConfig(known, wrong)


def _parse(raw: bytes, constants: list[str]) -> object:
    """Return the file's content; trailing commas and comments are left out, NaN and Infinity go to `constants`."""

    def constant(name: str) -> str:
        constants.append(name)
        return name

    text = raw.decode(json.detect_encoding(raw))
    return json.loads(NOT_JSON.sub(r"\1", text), parse_constant=constant)


def _ignored(file: Path, reason: str) -> GenerationConfig:
    return GenerationConfig({}, (f"{file}: {reason}; it is ignored",))
