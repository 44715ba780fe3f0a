"""Paths as people write them, in settings and in a chat: "~" and "~name" stand for home folders."""

import os
from contextlib import suppress
from pathlib import Path

from graphcore.errors import ConfigError

STANDARD_STREAM = "-"  # a name for standard input or output, wherever one of them is accepted


def user_path(text: str, where: str) -> Path:
    """Return the path that was written, which need not exist.

    Args:
        text: the path.
        where: text before it, for messages, such as "prompt_file=" or "/save ".

    Raises:
        ConfigError: no file can have that path: it is empty, names an unknown user, or breaks the file system's rules;
            or it is "-" where standard input and output are not accepted.
    """
    if not text.strip():
        raise ConfigError(f"{where}{text} is empty; name a path")
    if text == STANDARD_STREAM:
        raise ConfigError(f"{where}- cannot be standard input or output here; a file of that name is ./-")
    try:
        path = Path(text).expanduser()
        path.stat()
    except RuntimeError as error:
        user = Path(text).parts[0]
        raise ConfigError(f"{where}{text}: no home folder is known for {user}; write the whole path") from error
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # reported by the code that opens or creates it
        return path
    except (OSError, ValueError) as error:  # a name that is too long, a loop of links, a NUL
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{where}{text} is no path that a file can have ({reason}); choose another") from error
    return path


def xdg_folder(variable: str, otherwise: str) -> Path:
    """Return the user's folder of graphcore in one of the XDG base directories; it need not exist.

    Source: XDG Base Directory Specification 0.8, "Environment variables".

    Args:
        variable: environment variable that names the directory, such as "XDG_CONFIG_HOME".
        otherwise: the directory in the home folder where the variable is not set, such as ".config".
    """
    folder = os.environ.get(variable, "")
    if not os.path.isabs(folder):  # noqa: PTH117  # which the specification has programs ignore
        folder = os.path.join(os.path.expanduser("~"), otherwise)  # noqa: PTH111, PTH118  # "~" stays where no home is known
    return Path(folder) / "graphcore"


def lacks_home(text: str) -> bool:
    """Return whether a path lies in the user's own home folder, and none is known, as in some containers."""
    if text.partition("/")[0] != "~":
        return False
    try:
        Path.home()
    except RuntimeError:
        return True
    return False


def user_folder(text: str, where: str) -> Path:
    """Return the path that was written, which is a folder's or can become one's.

    Raises:
        ConfigError: the path cannot be a folder, or as in `user_path`.
    """
    path = user_path(text, where)
    with suppress(PermissionError):  # reported by the code that uses it
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        if not there.is_dir():
            raise ConfigError(f"{where}{text} cannot be a folder, for {there} is a file; choose another")
    return path
