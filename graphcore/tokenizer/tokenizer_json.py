"""Reads `tokenizer.json`, the file format of the `tokenizers` library, and turns the library's panics into errors."""

import codecs
from pathlib import Path

import tokenizers

from graphcore.checkpoint.json_object import how_to_mend
from graphcore.errors import TokenizerError


def read_tokenizer_json(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer that the file describes, without truncation or padding.

    Raises:
        TokenizerError: the file cannot be read, is cut short, or does not describe a tokenizer.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror}); check the folder") from error
    return parse_tokenizer_json(content, str(path))


def parse_tokenizer_json(content: bytes, where: str) -> tokenizers.Tokenizer:
    """Return the tokenizer that these bytes describe, as `read_tokenizer_json` does.

    Args:
        where: origin of the bytes, for messages.

    Raises:
        TokenizerError: the bytes do not describe a tokenizer.
    """
    try:
        with WithoutPanics(where):
            backend = tokenizers.Tokenizer.from_buffer(content.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{where}: not a readable tokenizer.json ({error}); {how_to_mend(content)}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


class WithoutPanics:
    """A block that turns a panic of the library, which is written in Rust, into an error; it can be entered again.

    Some damage only shows in encoding. A panic is not a Python `Exception`.

    Args:
        where: origin of the tokenizer, for messages.

    Raises:
        TokenizerError: the library panicked.
    """

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Raise the error of a panic."""
        if kind is not None and kind.__module__ == "pyo3_runtime":
            raise TokenizerError(f"{self._where}: the tokenizer is damaged ({error}); fetch the file again") from error
