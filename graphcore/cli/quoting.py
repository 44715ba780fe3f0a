"""Quoting of command-line arguments for Hydra's grammar.

Hydra refuses commas, quotes, "!", "(", "=" and more in a bare value. Values of keys that hold text or a path are quoted
here, so that prompt=What's 2+2, really? works as typed. An argument without a key is given one (bare_words.py). All
else goes to Hydra unchanged, flags first, because Hydra takes settings only after its last flag.
"""

import re
import shlex
from collections.abc import Sequence

from graphcore.cli.bare_words import ROOTS, is_model, with_keys
from graphcore.config.dtype_names import with_real_dtype
from graphcore.config.foreign_names import KEYS, OPTIONS, keys_named, plain_name
from graphcore.errors import ConfigError
from graphcore.registry import nearest

PATH_KEYS = (
    "prompt_file",
    "model.checkpoint",
    "model.adapter",
    "task.prompts_jsonl",
    "task.text",
    "task.remove",
    "cache_dir",
)
TEXT_KEYS = ("prompt", "system", *PATH_KEYS)
FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "task.output")  # may hold ${now:...}
LIST_KEYS = ("stop",)
PAIR_KEYS = ("kv_dtype",)  # a comma joins two values, except in a sweep
SWEEP_FLAGS = ("-m", "--multirun")
SWEPT_SAMPLING = "sampling=greedy"  # the jobs of a sweep are compared with each other
HELP_FLAGS = ("-h", "--help")
VERSION_FLAG = "--version"
VALUE_FLAGS = {  # flags that take the next argument, and what it may be; () is anything
    **dict.fromkeys(("-c", "--cfg"), ("job", "hydra", "all")),
    **dict.fromkeys(("-i", "--info"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")),
    **dict.fromkeys(("-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"), ()),
    "--experimental-rerun": (),
}
FLAGS = (
    *SWEEP_FLAGS,
    *HELP_FLAGS,
    *VALUE_FLAGS,
    *(VERSION_FLAG, "--hydra-help", "-r", "--run", "--resolve", "-sc", "--shell-completion"),
)
MODES = {
    "sweep": SWEEP_FLAGS,
    "look": ("-c", "--cfg"),
    "info": ("-i", "--info"),
    "completion": ("-sc", "--shell-completion"),
    "run": ("-r", "--run"),
}
OPTION = re.compile(r"--?[A-Za-z]|--?$")  # an argument that begins like this is a flag; "-5 degrees" is not


def prepared_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments in the order that Hydra takes: sweep flag, other flags, then settings, their text quoted.

    A list key takes one unquoted text, or Hydra's [a,b] in brackets. In a sweep, choice(a,b) as the value of a key that
    holds a path is left to Hydra.

    Raises:
        ConfigError: an argument is no setting, task's name, prompt or flag, or is not valid text.
    """
    for argument in arguments:
        _check_unicode(argument)
    flags, settings = split_flags(arguments)
    _refuse_together(flags)
    is_sweep = any(flag in SWEEP_FLAGS for flag in flags)
    others = [flag for flag in flags if flag not in SWEEP_FLAGS]
    named = [_quoted_argument(with_real_dtype(setting), is_sweep) for setting in with_keys(settings)]
    if is_sweep and not any(one.lstrip("+").startswith(("sampling=", "experiment=")) for one in named):
        named.append(SWEPT_SAMPLING)
    return ["-m"] * is_sweep + others + named


def split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the flags, each before its value if it takes one, and everything else.

    Raises:
        ConfigError: there is no such flag, or its value is missing or not one that it takes.
    """
    flags: list[str] = []
    others: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, separator, value = argument.partition("=")
        if not OPTION.match(argument):
            others.append(argument)
            continue
        if name not in FLAGS or (separator and name not in VALUE_FLAGS):
            raise ConfigError(_no_flag(argument, rest[0] if rest else ""), is_unknown=True)
        flags.append(name)
        if name in VALUE_FLAGS:
            taken = value if separator else _next_value(name, rest)
            flags += [] if taken is None else [taken]
    return flags, others


def _next_value(flag: str, rest: list[str]) -> str | None:
    """Remove a flag's value from the arguments that follow it and return it; None for --info alone, which means all.

    Raises:
        ConfigError: the value is missing, or not one that the flag takes.
    """
    allowed = VALUE_FLAGS[flag]
    if flag == "-p" and rest and any(map(str.isspace, rest[0])):
        raise ConfigError("-p is Hydra's --package; a prompt is written without an option, in quotes", is_unknown=True)
    if rest and (rest[0] in allowed or not (allowed or OPTION.match(rest[0]))):
        return rest.pop(0)
    if flag in ("-i", "--info"):
        return None
    found = f"not {rest[0]}" if rest else "none is given"
    wanted = f"one of {', '.join(allowed)}" if allowed else "a value"
    written = f"{flag} {allowed[0] if allowed else 'VALUE'}"
    other = f", or {KEYS[flag[1:]]}={rest[0]}" if rest and flag[1:] in KEYS else ""
    raise ConfigError(f"{flag} takes {wanted}, {found}; write {written}{other}", is_unknown=True)


def _no_flag(argument: str, following: str) -> str:
    """Return an error message for an unknown option, with the setting that stands for it.

    Args:
        following: the argument behind it, which may be its value; "" if there is none.
    """
    name, _, value = argument.partition("=")
    key = plain_name(name)
    if any(letter.isspace() for letter in name):
        return f"unknown option {argument!r}; a prompt that begins so is written prompt={argument!r}"
    if key in OPTIONS:
        return f"unknown option {argument}; {OPTIONS[key]}; settings are written key=value, without dashes"
    found = [key] if key in ROOTS else keys_named(key)
    if not (found or value):
        meant = nearest(name, [flag for flag in FLAGS if flag.startswith("--")])
        return f"unknown option {argument}{meant}; settings are written {key or 'key'}=value, flags are in --help"
    if not value:
        is_value = following and not (OPTION.match(following) or "=" in following or is_model(following))
        value = shlex.quote(following) if is_value else "value"
    written = " or ".join(f"{one}={value}" for one in found or [key])
    return f"unknown option {argument}; settings are written {written}, flags are in --help"


def has_flags(prepared: Sequence[str]) -> bool:
    """Return whether prepared arguments have flags other than the sweep's: they print the config or completions."""
    return any(argument.startswith("-") and argument not in SWEEP_FLAGS for argument in prepared)


def is_sweep(prepared: Sequence[str]) -> bool:
    """Return whether prepared arguments ask for a sweep, and not only print its config."""
    return bool(prepared) and prepared[0] == "-m" and not has_flags(prepared)


def is_plain(prepared: Sequence[str]) -> bool:
    """Return whether prepared arguments only set values, none of which could start a sweep."""
    keys = [argument.lstrip("+~").partition("=")[0] for argument in prepared]
    return not any(key.startswith(("-", "hydra", "experiment")) and key not in FOLDER_KEYS for key in keys)


def _refuse_together(flags: Sequence[str]) -> None:
    """Refuse a combination of flags that ask for different things to be done with the settings."""
    given = {name: flag for flag in flags for name, spelt in MODES.items() if flag in spelt}
    if len(given) > 1:
        first, second = list(given.values())[:2]
        raise ConfigError(f"{first} and {second} do not go together; leave one of them out", is_unknown=True)


def _check_unicode(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{argument!r} is not valid UTF-8 text; write it in UTF-8") from error


def _quoted_argument(argument: str, is_sweep: bool) -> str:
    """Return "key=value" with its value quoted where the key holds text."""
    written, separator, value = argument.partition("=")
    key = written.lstrip("+")
    if not separator:
        return argument
    if key in LIST_KEYS and not (value.startswith("[") and value.endswith("]")):
        return f"{written}=[{quote(value)}]"
    if key in FOLDER_KEYS:
        return f"{written}={_in_quotes(value)}"
    if key in PATH_KEYS and is_sweep and re.fullmatch(r"choice\(.*\)", value, re.DOTALL):
        return argument
    is_text = key in TEXT_KEYS or (key in PAIR_KEYS and "," in value and not is_sweep)
    return f"{written}={quote(value)}" if is_text else argument


def quote(text: str) -> str:
    """Return the text as a quoted value of Hydra's grammar that OmegaConf does not interpolate.

    Backslashes are doubled only where they would escape something: before a quote, the closing quote, or "${".
    """
    return _in_quotes(re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", text))


def _in_quotes(text: str) -> str:
    """Return the text in quotes of Hydra's grammar; ${...} is still interpolated."""
    escaped = re.sub(r"(\\*)'", lambda match: 2 * match[1] + "\\'", text)
    return "'" + re.sub(r"(\\+)\Z", lambda match: 2 * match[1], escaped) + "'"
