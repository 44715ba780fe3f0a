"""Writing the files of a task, each complete or not at all, and standard output."""

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graphcore.errors import GraphcoreError


class OutputError(GraphcoreError, OSError):
    """A result cannot be written."""


class ResultStream(io.TextIOWrapper):
    """Standard output that raises OutputError if writing fails, but BrokenPipeError if its reader has left."""

    def write(self, text: str, /) -> int:
        """Write the text, or raise OutputError."""
        with _of_standard_output():
            return super().write(text)

    def flush(self) -> None:
        """Write what is buffered, or raise OutputError."""
        with _of_standard_output():
            super().flush()


@contextmanager
def _of_standard_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"standard output cannot be written ({error.strerror}); send it to another place") from error


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record as JSON; numbers that are not finite become null, because JSON cannot represent them.

    Raises:
        OutputError: the folder cannot be written to, or the disk is full.
    """
    write_text(path, json.dumps(_finite(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_text(path: Path, text: str) -> None:
    """Write the text as UTF-8 to a temporary file and rename it; unpaired surrogates are escaped.

    Raises:
        OutputError: the folder cannot be written to, or the disk is full.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write the bytes to a temporary file in the same folder and rename it.

    Raises:
        OutputError: the folder cannot be written to, or the disk is full.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror}); free space, or choose another folder with hydra.run.dir=... "
            "(hydra.sweep.dir=... for a sweep)"
        ) from error
