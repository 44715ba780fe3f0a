"""Reads the descriptions of options and keys for --help from the comments in conf/, their only place.

    # Time prefill and decode apart.       the option's sentence
    repeats: 5 # timed runs                a key, its value and its description

Only the file's own lines are read, without composing and without a yaml parser, so that help appears at once.
"""

import re
from dataclasses import dataclass

from graphcore.config.conf_folder import conf_dir

KEY_LINE = re.compile(r"(\w+):(?: (?!#)(.*?))?(?: # (.*))?")
GROUP_LINE = re.compile(r"  - (\w+): (\S+) # (.*)")
UNSAID = ("name", "files", "published")  # keys that users do not set


@dataclass(frozen=True)
class KeyComment:
    """One key of a file.

    Attributes:
        value: str, the default as the file has it; "" for a mapping.
    """

    key: str
    value: str
    sentence: str


@dataclass(frozen=True)
class OptionComment:
    """One file of a group.

    Attributes:
        sentence: str, the comment at the top of the file.
    """

    sentence: str
    keys: tuple[KeyComment, ...]


def groups() -> list[KeyComment]:
    """Return each config group with its default option and its comment, in the order of conf/config.yaml."""
    found = (GROUP_LINE.fullmatch(line) for line in _lines("config"))
    return [KeyComment(match[1], match[2].strip('"'), match[3]) for match in found if match]


def top_level_keys() -> tuple[KeyComment, ...]:
    """Return the keys of conf/config.yaml outside the groups; those inside a mapping with its name before theirs."""
    return _keys(_lines("config"), with_inner=True)


def option_comment(group: str, option: str) -> OptionComment:
    """Return the comments of an option's file, which must exist."""
    lines = _lines(f"{group}/{option}")
    first = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    said = [line.removeprefix("#").strip() for line in lines[:first] if not line.startswith("# @package")]
    return OptionComment(" ".join(said), _keys(lines))


def _lines(name: str) -> list[str]:
    return (conf_dir() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()


def _keys(lines: list[str], with_inner: bool = False) -> tuple[KeyComment, ...]:
    """Return the unindented keys that have a comment.

    Args:
        with_inner: True also for the keys inside a mapping, with its name before theirs.
    """
    found, outer = list[KeyComment](), ""
    for line in lines:
        match = KEY_LINE.fullmatch(line.removeprefix("  "))
        if match is None:
            continue
        is_inner = line.startswith("  ")
        if is_inner and not with_inner:
            continue
        outer = outer if is_inner else match[1]
        is_mapping = with_inner and not is_inner and not match[2]
        if match[3] and outer not in UNSAID and not is_mapping:
            found.append(KeyComment(f"{outer}.{match[1]}" if is_inner else match[1], match[2] or "", match[3]))
    return tuple(found)
