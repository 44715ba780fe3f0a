"""The text of --help, made of the comments in conf/ for the width of the terminal; no settings are composed."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from graphcore.cli.conf_comments import KeyComment, OptionComment, groups, option_comment, top_level_keys
from graphcore.config.conf_folder import check_groups, group_options
from graphcore.errors import ConfigError

LEAST_WIDTH, MOST_WIDTH = 40, 100  # characters
WIDE = 72  # least width, in characters, at which names and sentences stand side by side
NAMES = 26  # characters of the left column

USAGE = 'graphcore [TASK] [MODEL] ["PROMPT"] [group=option ...] [key=value ...] [flag ...]'
EXAMPLES = (
    ('graphcore "Why is the sky blue?"', "ask the default model; the first run downloads it"),
    ("graphcore chat", "an interactive chat"),
    ("graphcore chat smollm3", "with another model; graphcore list has the names"),
    ('graphcore gemma3 max_new_tokens=64 "The sky is"', "another model, a shorter text"),
    ('graphcore model-q4_k_m.gguf "Is 2+2=4?"', "a file of your own"),
    ("graphcore pull smollm3", "download a model; show NAME describes one, rm NAME deletes one"),
    ("graphcore serve smollm3", "a server and a page for browsers; graphcore ps lists those that run"),
    ("graphcore plan model=llama3_70b model.checkpoint=random:q4_k", "memory and predicted speed; nothing is loaded"),
    ("graphcore bench -m model=smollm2,gemma3 dtype=bf16,fp32", "a sweep: one run for each pair"),
    ("graphcore --help task=bench", "a task's own keys; likewise --help model, --help streaming=on, --help seed"),
)
FLAGS = (
    ("-h, --help [TOPIC]", "this text, or help on a task, a group, group=option or a key"),
    ("--version", "graphcore's version"),
    ("-m, --multirun", "run once for each combination of values with commas (a,b) or choice(a,b) for paths"),
    ("--cfg job", "print all settings, and run nothing"),
    ("-sc install=bash", "print the shell's completion, for eval; also zsh and fish"),
    ("--hydra-help", "the flags of Hydra, which reads the settings"),
)
STATUSES = (
    ("0", "done, or the reader of the output closed the pipe"),
    ("1", "it failed; the last line says why"),
    ("2", "an unknown flag, key or option, or a value of the wrong type"),
    ("130", "interrupted; 143 by SIGTERM, 129 by SIGHUP"),
)
Row = tuple[str, str]


def help_text(arguments: Sequence[str]) -> str:
    """Return the help text of the topics among the arguments, or of everything if there are none.

    Args:
        arguments: arguments of the command line; tasks, groups, group=option and keys without a value are topics,
            other settings and prompts are ignored.

    Raises:
        ConfigError: an argument is a word that is none of these.
    """
    options = group_options()
    topics = [one for one in arguments if one.partition("=")[0] in options or not ("=" in one or " " in one)]
    width = min(max(shutil.get_terminal_size().columns, LEAST_WIDTH), MOST_WIDTH)
    parts = [_topic(topic) for topic in topics] or [_everything()]
    return "\n".join(line for part in parts for line in _lines(part, width))


Part = Sequence[str | Row]  # a str is a line or a paragraph; a pair is a name and a sentence


def _everything() -> Part:
    options = group_options()
    rows: list[str | Row] = [
        "graphcore runs large language models as compiled graphs, whether or not they fit in memory.",
        "",
    ]
    rows += [f"Usage: {USAGE}", "", "Examples:", *EXAMPLES]
    rows += ["", "Tasks, written TASK or task=TASK (--help task=TASK has its keys):"]
    rows += [(task, option_comment("task", task).sentence) for task in options["task"]]
    rows += ["", "Groups, written group=option (--help GROUP says what each option is):"]
    chosen = groups()
    rows += [(f"{one.key}={one.value}", f"{one.sentence}; options: {', '.join(options[one.key])}") for one in chosen]
    rows += ["", "Keys, written key=value, with their defaults:", *_key_rows(top_level_keys())]
    for group in chosen:
        own = [] if group.key == "task" else _key_rows(option_comment(group.key, group.value).keys, f"{group.key}.")
        rows += ["", f"Keys of {group.key}, with the defaults of {group.key}={group.value}:", *own] if own else []
    return [*rows, "", "Flags:", *FLAGS, "", "Exit status:", *STATUSES]


def _topic(topic: str) -> Part:
    """Return the help of a task, a group, an option of a group, or a key."""
    options = group_options()
    group, separator, option = topic.partition("=")
    if not separator and topic in options["task"]:
        group, option = "task", topic
    if group not in options:
        found = _of_key(topic)
        if not found:
            known = ", ".join((*options, *options["task"]))
            message = f"--help has no topic {topic!r}; ask about one of {known}, or a key that --help lists"
            raise ConfigError(message, is_unknown=True)
        return found
    if not option:
        rows = [(f"{group}={name}", option_comment(group, name).sentence) for name in options[group]]
        sentences = {one.key: one.sentence for one in groups()}
        return [f"{group}: {sentences.get(group, 'the settings of whole runs')}", *rows]
    check_groups([f"{group}={option}"])
    same_name = _of_key(topic)  # chat is a task and a key
    return [*_of_option(group, option, option_comment(group, option)), *([""] if same_name else []), *same_name]


def _of_key(topic: str) -> Part:
    """Return the help of a key, or of the keys in a mapping such as batching; nothing for an unknown one.

    A key of a group has the default of the group's default option; the keys of a task are those of each task.
    """
    own = [one for one in top_level_keys() if topic in (one.key, one.key.partition(".")[0])]
    if own:
        return [*_key_rows(own), "", "In no group: it holds for every task that uses it."]
    options = group_options()
    group, _, key = topic.partition(".")
    default = next((one.value for one in groups() if one.key == group), "")
    found: list[str | Row] = []
    for option in sorted(options.get(group, ()), key=lambda name: name != default):
        rows = _key_rows([one for one in option_comment(group, option).keys if one.key == key], f"{group}.")
        if rows:
            found += [*rows, "", f"In the group {group}, with the default of {group}={option}.", ""]
        if rows and group != "task":
            break
    return found[:-1]


def _of_option(group: str, option: str, comment: OptionComment) -> Part:
    own = _key_rows(comment.keys, f"{group}.")
    title = f"{group}={option}: {comment.sentence}"
    return [title, "", "Keys, with their defaults:", *own] if own else [title, "It has no keys of its own."]


def _key_rows(keys: Sequence[KeyComment], prefix: str = "") -> list[Row]:
    """Return each key with its default and its description; a default that refers to another key is left out."""
    defaults = [f"={one.value}" if one.value and "$" not in one.value else "" for one in keys]
    return [(f"{prefix}{one.key}{default}", one.sentence) for one, default in zip(keys, defaults, strict=True)]


def _lines(part: Part, width: int) -> Iterator[str]:
    """Yield the lines of a part: names and sentences side by side where the width allows it, else below each other."""
    for item in part:
        if isinstance(item, str):
            yield from textwrap.wrap(item, width) or [""]
            continue
        name, sentence = item
        is_wide = width >= WIDE
        indent = " " * (NAMES + 4 if is_wide else 6)
        first = f"  {name:<{NAMES}}  "
        if is_wide and len(name) <= NAMES:
            yield from textwrap.wrap(sentence, width, initial_indent=first, subsequent_indent=indent)
            continue
        yield from textwrap.wrap(name, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
        yield from textwrap.wrap(sentence, width, initial_indent=indent, subsequent_indent=indent)
