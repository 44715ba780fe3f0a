"""Arguments without a key: a task's name, or the prompt.

chat              task=chat
Is 2+2=4?         the prompt: white space, and no key before the first "="
one Thai word     also the prompt: letters of a script that is written without white space
caht              refused: did you mean task=chat?
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from graphcore.config.conf_folder import group_options
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.registry import nearest

KEY = re.compile(r"[+~]{0,2}([A-Za-z_]\w*)[\w./@:-]*", re.ASCII)  # key of a setting, as Hydra writes it
ROOTS = frozenset((*(field.name for field in fields(Settings)), "hydra", "experiment"))
WORD_LETTER = "Lo"  # Unicode's category of letters without case: Chinese, Japanese, Arabic, Hindi, Thai and others
FLAG_WORDS = {"help": "--help", "version": "--version"}


def with_keys(arguments: Sequence[str]) -> list[str]:
    """Return arguments other than flags and their values, each with its key.

    Raises:
        ConfigError: one is no setting, task's name or prompt, or there are two tasks or two prompts.
    """
    keyed = [_with_key(argument) for argument in arguments]
    for key, advice in (("prompt", "put the whole prompt into one pair of quotes"), ("task", "choose one")):
        same = [argument for argument in keyed if argument.startswith(f"{key}=")]
        if len(same) > 1 and any(argument not in arguments for argument in same):
            first, second = (repr(argument.partition("=")[2]) for argument in same[:2])
            raise ConfigError(f"{first} and {second} are both given as the {key}; {advice}", is_unknown=True)
    return keyed


def _with_key(argument: str) -> str:
    if not argument:
        raise ConfigError(
            "an argument is empty, as one of a shell's variable that is not set; leave it out, or write prompt=...",
            is_unknown=True,
        )
    head, separator, _ = argument.partition("=")
    key = KEY.fullmatch(head)
    if key and (separator or head.startswith("~")):
        if key[1] not in ROOTS and _is_text(argument):
            raise ConfigError(
                f"unknown key {head!r}{nearest(key[1], ROOTS)}; a prompt with a = in it is written prompt={argument!r}",
                is_unknown=True,
            )
        return argument
    if separator and head.strip() in ROOTS:
        raise ConfigError(
            f"{argument!r} has a space before its =; write {head.strip()}=..., without spaces there", is_unknown=True
        )
    if _is_text(argument):
        return f"prompt={argument}"
    tasks = group_options()["task"]
    if argument in tasks:
        return f"task={argument}"
    raise ConfigError(_no_setting(argument, tasks), is_unknown=True)


def _is_text(argument: str) -> bool:
    """Return whether the argument can be read as words: it has white space, or letters of a script without it."""
    return any(letter.isspace() or unicodedata.category(letter) == WORD_LETTER for letter in argument)


def _no_setting(word: str, tasks: Sequence[str]) -> str:
    """Return an error message for a bare word, with the nearest task or setting as a suggestion."""
    settings = {f"{group}={option}": option for group, options in group_options().items() for option in options}
    meant = [f"task={task}" for task in tasks if nearest(word.lower(), [task])]
    meant += [setting for setting, option in settings.items() if option == word]
    meant += [FLAG_WORDS[word]] if word in FLAG_WORDS else []
    if word.startswith(("hf:", "pypi:", "random:")) or word.endswith(".gguf") or Path(word).is_dir():
        meant.append(f"model.checkpoint={word}")
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return (
        f"{word!r} is no setting and no task{hint}; write key=value, such as prompt={word!r}; "
        f"tasks are {', '.join(tasks)}"
    )
