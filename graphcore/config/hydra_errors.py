"""Turns Hydra's and OmegaConf's errors into one line: which key, which class, what is allowed.

Both put the key and the class on lines of their own ("full_key: sampling.top_k", "object_type=SamplingSettings") and in
the error's cause. An error that is not recognised here is passed on with its line breaks removed.
"""

import re
from dataclasses import is_dataclass
from typing import get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException

from graphcore.config.foreign_names import OPTIONS, keys_named, tasks_by_key
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.registry import nearest

WANTED = {
    r"could not be converted to Integer": "a whole number",
    r"could not be converted to Float": "a number",
    r"is not a valid bool": "true or false",
    r"is not a ListConfig, list or tuple": "a list, such as [a,b]",
    r"Cannot convert '\w+' to string": "a text",
    r"is not Optional|Incompatible value 'None'": "set; it cannot be null",
}
NOISE = (
    "full_key:",
    "object_type=",
    "reference_type=",
    "Set the env",
    "See https://",
    "^",
    "provider=",
    "Config search path",
)

HOW_TO_QUOTE = "write key=value, and a value with other characters than letters and digits as key=\"'value'\""


def config_error(error: BaseException, where: str = "") -> ConfigError:
    """Return the error as a one-line ConfigError that also says whether it is about something that does not exist.

    Args:
        where: key that the error is about, if the error itself does not name it.
    """
    lines = _lines(error)
    prefix = f"{where}: " if where else ""
    key = next((line.removeprefix("full_key:").strip() for line in lines if line.startswith("full_key:")), "")
    unknown = re.search(r"Could not override '([^']+)'", lines[0])
    if unknown:  # in a value of {...}, the key is one of its own
        path = key if key.startswith(f"{unknown[1]}.") else unknown[1]
        return ConfigError(prefix + unknown_key(path), is_unknown=True)
    several = re.search(r"Ambiguous value for argument '(.*)'$", lines[0])
    if several:
        return ConfigError(prefix + _several_values(several[1]), is_unknown=True)
    deleted = re.search(r"Could not delete (?:from config\. )?'([^'=]+)", lines[0])
    if deleted:
        return ConfigError(f"{prefix}~{deleted[1]}: there is nothing to remove; leave it out", is_unknown=True)
    wanted = next((words for pattern, words in WANTED.items() for line in lines if re.search(pattern, line)), None)
    if wanted and key:
        text = f"{_as_given(lines[0], key)} must be {wanted} ({_owner(lines)}{_value(lines)})"
        return ConfigError(prefix + text, is_unknown=True)
    if isinstance(error, OverrideParseException):
        return ConfigError(f"{error.override} cannot be read as a setting; {HOW_TO_QUOTE}", is_unknown=True)
    said = " ".join(dict.fromkeys(line for line in lines if not line.startswith(NOISE)))
    is_missing = isinstance(error, MissingConfigException)
    return ConfigError(prefix + (f"{said} (key {key})" if key and key not in said else said), is_missing)


def _several_values(argument: str) -> str:
    """Return one line about a value with commas outside a sweep."""
    key, _, values = argument.partition("=")
    return f"{argument} has several values; add -m to run once for each, or write a list as {key}=[{values}]"


def unknown_key(path: str) -> str:
    """Return one line about a setting that does not exist, with the nearest name and all known ones."""
    parent, _, leaf = path.rpartition(".")
    if parent == "task":
        return _unknown_task_key(leaf)
    schema: type = Settings
    for part in parent.split(".") if parent else []:
        hints = get_type_hints(schema)
        if part in hints and not is_dataclass(hints[part]):
            return f"unknown key '{path}'; add it to {part} with +{path}=..."
        if part not in hints:
            return f"unknown key '{path}'{nearest(part, hints)}"
        schema = hints[part]
    hints = get_type_hints(schema)
    if not parent and leaf in OPTIONS:
        return f"unknown key '{path}'; {OPTIONS[leaf]}"
    nested = [] if parent else keys_named(leaf)
    if nested:
        return f"unknown key '{path}' (did you mean {' or '.join(map(repr, nested))}?)"
    return f"unknown key '{path}'{nearest(leaf, hints)} of {schema.__name__}; known: {', '.join(hints)}"


def _unknown_task_key(leaf: str) -> str:
    """Return one line about an unknown key of a task; it names the tasks that have the key."""
    owned = tasks_by_key()
    if leaf in owned:
        return f"task.{leaf} is a key of task={owned[leaf]}; ask for that task or leave the key out"
    known = ", ".join(f"{key} ({task})" for key, task in owned.items())
    return f"unknown key 'task.{leaf}'{nearest(leaf, owned)}; tasks' keys: {known}"


def _lines(error: BaseException) -> list[str]:
    """Return the lines of the error and of its cause, stripped."""
    texts = [str(error), str(error.__cause__) if error.__cause__ is not None else ""]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip()] or [type(error).__name__]


def _as_given(first: str, key: str) -> str:
    """Return "key=value" as the user wrote it, where the first line contains it."""
    return first.removeprefix("Error merging override ") if first.startswith("Error merging override ") else key


def _owner(lines: list[str]) -> str:
    classes = [line.partition("=")[2] for line in lines if line.startswith("object_type=")]
    return next((name for name in classes if name not in ("list", "dict")), "Settings")


def _value(lines: list[str]) -> str:
    found = next((match for line in lines if (match := re.search(r"Value ('.*') (of type|is not)", line))), None)
    return f"; found {found[1]}" if found else ""
