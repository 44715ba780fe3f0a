"""What people type, made safe for Hydra's grammar.

Hydra refuses commas, quotes, "!", "(", "=" and more in a bare value. The keys that hold text or a path are quoted
here, so that prompt=What's 2+2, really? means what it says. Everything else goes to Hydra untouched, its own flags
first, because Hydra takes settings only after the last of them.
"""

import re
from collections.abc import Sequence

from graphcore.errors import ConfigError

TEXT_KEYS = ("prompt", "system", "prompt_file", "model.checkpoint", "task.prompts_jsonl", "cache_dir")
FOLDER_KEYS = ("hydra.run.dir", "hydra.sweep.dir")  # may hold ${now:...}
LIST_KEYS = ("stop",)
SWEEP_FLAGS = ("-m", "--multirun")
FLAGS = (
    *SWEEP_FLAGS,
    *("-h", "--help", "--hydra-help", "--version", "-r", "--run", "--resolve", "-sc", "--shell-completion"),
    *("-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir"),
    *("-i", "--info", "--experimental-rerun"),
)


def prepared_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra wants them: sweep flag first, text quoted.

    A list key takes one text as it is, or Hydra's own [a,b] in brackets. In a sweep, model.checkpoint=choice(a,b) is
    Hydra's.

    Raises:
        ConfigError: an argument is neither a setting nor a flag, or is not text.
    """
    for argument in arguments:
        _check_unicode(argument)
    is_sweep = any(argument in SWEEP_FLAGS for argument in arguments)
    rest = [argument for argument in arguments if argument not in SWEEP_FLAGS]
    takes_value = [before.startswith("-") and "=" not in before for before in ["", *rest]]
    for argument, is_value in zip(rest, takes_value, strict=False):
        _check_form(argument, is_value)
    return ["-m"] * is_sweep + [_quoted_argument(argument, is_sweep) for argument in rest]


def is_sweep(prepared: Sequence[str]) -> bool:
    """Return whether prepared arguments ask for a sweep, and not for help or a look at the config."""
    others = [argument for argument in prepared if argument.startswith("-") and argument not in SWEEP_FLAGS]
    return bool(prepared) and prepared[0] == "-m" and not others


def _check_unicode(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{argument!r} is not valid UTF-8 text; write it in UTF-8") from error


def _check_form(argument: str, is_value: bool) -> None:
    """Refuse what Hydra would answer with its usage: --prompt hello, or a prompt without its key."""
    name = argument.partition("=")[0]
    if argument.startswith("-") and name not in FLAGS:
        key = name.lstrip("-")
        raise ConfigError(f"unknown option {argument}; settings are written {key or 'key'}=value, flags are in --help")
    if "=" not in argument and not argument.startswith(("-", "~")) and not is_value:
        raise ConfigError(f"'{argument}' is no setting; write key=value, such as prompt='{argument}'")


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
    if key == "model.checkpoint" and is_sweep and re.fullmatch(r"choice\(.*\)", value, re.DOTALL):
        return argument
    return f"{written}={quote(value)}" if key in TEXT_KEYS else argument


def quote(text: str) -> str:
    """Return the text as a quoted value of Hydra's grammar that OmegaConf will not interpolate.

    Backslashes count only before what they could escape: a quote, the closing quote, or "${".
    """
    return _in_quotes(re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + "\\${", text))


def _in_quotes(text: str) -> str:
    """Return the text in quotes; ${...} stays an interpolation."""
    escaped = re.sub(r"(\\*)'", lambda match: 2 * match[1] + "\\'", text)
    return "'" + re.sub(r"(\\+)\Z", lambda match: 2 * match[1], escaped) + "'"
