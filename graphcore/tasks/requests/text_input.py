"""Texts from files, pipes and standard input, read whole up to a limit.

    name  -->  "-": standard input      anything else: a path  -->  bytes, up to the limit  -->  UTF-8

The limit guards against endless input (/dev/zero) and files named by mistake.
"""

import sys
from pathlib import Path
from typing import BinaryIO

from graphcore.config.byte_sizes import in_words
from graphcore.config.user_path import STANDARD_STREAM, user_path
from graphcore.errors import ConfigError

LONGEST_PROMPT = 64 << 20  # bytes of one prompt, or of a chat; a million tokens are about 4 MiB of English
LONGEST_FILE = 1 << 30  # bytes of a file of requests, or of a text to score


def read_text(name: str, key: str, longest: int) -> str:
    """Return the text of a UTF-8 file, or of standard input where the name is "-"; without a byte order mark.

    Args:
        name: path as the user wrote it.
        key: setting that has this value, for messages.
        longest: most bytes.

    Raises:
        ConfigError: the file cannot be read, is longer, or is not UTF-8.
    """
    if name != STANDARD_STREAM:
        path = user_path(name, f"{key}=")
        return read_file(path, f"{key}={path}", longest)
    where = f"{key}=- (standard input)"
    return _read(sys.stdin.buffer, where, longest)


def read_file(path: Path, where: str, longest: int) -> str:
    """Return the text of a UTF-8 file; the errors are those of `read_text`.

    Args:
        where: name of the file in messages.
    """
    try:
        with path.open("rb") as file:
            return _read(file, where, longest)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read ({error.strerror}); choose another file") from error


def _read(file: BinaryIO, where: str, longest: int) -> str:
    raw = file.read(longest + 1)
    if len(raw) > longest:
        raise ConfigError(f"{where} holds more than {in_words(longest)}; give a shorter text")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text (byte {error.start})") from error
