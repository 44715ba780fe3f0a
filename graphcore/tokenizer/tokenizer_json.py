"""Reads and writes `tokenizer.json`, the file format of the `tokenizers` library."""

import os
import tempfile
from pathlib import Path

import tokenizers

from graphcore.errors import TokenizerError


def read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer that the file describes, without truncation or padding.

    Raises:
        TokenizerError: the file is missing, cut short, or not a tokenizer.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises the bare class, so nothing narrower catches it
        if type(error) is not Exception:
            raise
        raise TokenizerError(f"{path}: not a readable tokenizer.json ({error}); fetch the file again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def write_tokenizer_json(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Write the file so that no reader ever sees half of it.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(backend.to_str())
        Path(unfinished).replace(path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)
        raise
