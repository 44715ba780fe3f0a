"""A user's own defaults: settings in ~/.config/graphcore/config.yaml (XDG_CONFIG_HOME), before the command line's.

    model: smollm3
    streaming: auto
    sampling: {temperature: 0.3}

They are settings of the command, not of `Engine.load`. Those of a model and its answers hold for tasks that answer, and
those of the machine for all. An experiment, which has its own, takes none of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from graphcore.cli.bare_words import ROOTS
from graphcore.cli.quoting import prepared_arguments, quote, split_flags
from graphcore.config.conf_folder import group_options
from graphcore.config.user_path import xdg_folder
from graphcore.errors import ConfigError
from graphcore.registry import nearest

NOT_HERE = ("task", "hydra", "experiment", "prompt", "prompt_file", "prompt_ids", "cache", "trace")
ANSWERING = ("generate", "chat", "serve")  # tasks
PRINTING = ("generate", "chat", "models", "plan", "doctor", "runs", "ps")  # tasks whose result is what they print
OF_TEXTS = ("system", "stop")  # of tasks that send no prompts of their own
OF_MACHINE = ("device", "threads", "cache_dir", "progress", "outputs", "debug")  # keys that every task takes
WHOLE = ("logit_bias", "random_config")  # mappings that are values
ON_OFF = ("chat", "dependent_launches")  # keys, beside groups, whose words YAML reads as truth values


def user_file() -> Path:
    """Return the path of the user's file, which need not exist."""
    return xdg_folder("XDG_CONFIG_HOME", ".config") / "config.yaml"


def with_user_settings(prepared: Sequence[str], keeps_results: bool = True) -> list[str]:
    """Return prepared arguments behind the user's own settings, except those that they set, too.

    Args:
        keeps_results: False for outputs=false where a task prints its result and nothing asks for a folder.

    Raises:
        ConfigError: the user's file cannot be read, or a key of it is none.
    """
    file = user_file()
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        text = ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); correct it, or move it away") from error
    flags, settings = split_flags(prepared)
    given = {setting.lstrip("+~").partition("=")[0] for setting in settings}
    task = next((one.partition("=")[2] for one in reversed(settings) if one.startswith("task=")), ANSWERING[0])
    needs_folder = "-m" in flags or "trace" in given or any(key.startswith("hydra.") for key in given)
    own = [
        f"{key}={value}"
        for key, value in _settings_of(file, text)
        if not given & {key.lstrip("+"), key.lstrip("+").partition(".")[0], "experiment"}
        and (task in ANSWERING or key.partition(".")[0] in OF_MACHINE)
        and not (key in OF_TEXTS and task == "serve")
        and not (key == "outputs" and needs_folder)
    ]
    says_outputs = "outputs" in given or any(one.startswith("outputs=") for one in own)
    if task in PRINTING and not (keeps_results or says_outputs or needs_folder or "experiment" in given):
        own.append("outputs=false")
    return [*flags, *prepared_arguments(own), *settings]


def _settings_of(file: Path, text: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of a file with their values as they are written on the command line."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML ({' '.join(str(error).split())}); correct it") from error
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no keys with values; write one setting a line, such as model: smollm3")
    for root in content:
        if root in NOT_HERE:
            raise ConfigError(f"{file}: {root} is chosen on the command line; leave it out")
        if root not in ROOTS:
            raise ConfigError(f"{file}: unknown key {str(root)!r}{nearest(str(root), ROOTS)}")
    yield from _flat(content, "")


def _flat(content: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and name not in WHOLE:
            yield from _flat(value, f"{key}.")
        elif isinstance(value, bool) and (key in group_options() or key in ON_OFF):
            yield key, "on" if value else "off"
        elif name in WHOLE:  # Hydra adds keys to a mapping only with a plus
            yield f"+{key}", _written(value)
        elif value is not None or key not in group_options():
            yield key, _written(value)


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_written(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(quote(one) if isinstance(one, str) else _written(one) for one in value)}]"
    return str(value)
