"""Reads `tokenizer.json`, the file format of the `tokenizers` library, and turns the library's panics into errors."""

import codecs
import contextlib
from collections.abc import Iterator
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
        with without_panics(where):
            backend = tokenizers.Tokenizer.from_buffer(content.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        if isinstance(error, TokenizerError):
            raise
        raise TokenizerError(f"{where}: not a readable tokenizer.json ({error}); {how_to_mend(content)}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


@contextlib.contextmanager
def without_panics(where: str) -> Iterator[None]:
    """Turn a panic of the library, which is written in Rust, into an error; some damage only shows in encoding.

    Args:
        where: origin of the tokenizer, for messages.

    Raises:
        TokenizerError: the library panicked; its panic is not a Python `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise TokenizerError(f"{where}: the tokenizer is damaged ({error}); fetch the file again") from error
