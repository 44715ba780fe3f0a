"""The commands of a chat: lines that begin with a slash."""

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphcore.config.conf_folder import group_options
from graphcore.config.user_path import user_path
from graphcore.config.validate import UNLIMITED
from graphcore.errors import ConfigError
from graphcore.registry import nearest
from graphcore.sampling_params import PARAMETERS, WHOLE_NUMBERS
from graphcore.tasks.chat.session import Session
from graphcore.tasks.requests.presets import system_text
from graphcore.tasks.requests.sampling_keys import changed_params
from graphcore.tasks.task_engine import describe

TAKEN_AWAY = "-"
SHOWN = 60  # characters of a message that is taken back
WHOLE = (*WHOLE_NUMBERS, "max_new_tokens")
NUMBERS = (*PARAMETERS, "seed")  # what /set takes; lists stay those of the settings


@dataclass(frozen=True)
class Command:
    """A command of a chat.

    Attributes:
        takes: argument that follows the name, in brackets if it is optional; empty for none.
        does: description in a few words, for /help.
        run: function of the session and of the text after the name.
    """

    takes: str
    does: str
    run: Callable[[Session, str], None]


def run_command(session: Session, line: str) -> None:
    """Run the command of a line.

    Raises:
        GraphcoreError: there is no such command, or it cannot run; the message says what to type instead.
    """
    typed, *rest = re.split(r"\s+", line.removeprefix("/"), maxsplit=1)
    name, argument = OTHER_NAMES.get(typed, typed), "".join(rest).strip()
    if name not in COMMANDS:
        likely = nearest(f"/{name}", [f"/{known}" for known in COMMANDS])
        raise ConfigError(f"unknown command /{name}{likely}; /help lists them, and a space before it makes it a text")
    command = COMMANDS[name]
    if argument and not command.takes:
        raise ConfigError(f"/{name} takes nothing, found '{argument}'; leave it out")
    if not argument and command.takes and not command.takes.startswith("["):
        raise ConfigError(f"/{name} needs {command.takes}; /help lists the commands")
    command.run(session, argument)


def _help(session: Session, _argument: str) -> None:
    width = max(len(_usage(name)) for name in COMMANDS)
    for name, command in COMMANDS.items():
        session.console.note(f"{_usage(name).ljust(width)}  {command.does}")
    session.console.note('A line that ends with \\ continues on the next; """ begins and ends a text of several lines.')
    session.console.note(
        "Ctrl-C stops an answer, Ctrl-D ends the chat. A space before a leading slash sends the line as text."
    )


def _usage(name: str) -> str:
    return f"/{name} {COMMANDS[name].takes}".rstrip()


def _system(session: Session, text: str) -> None:
    conversation = session.conversation
    if text:
        if not conversation.has_template:
            raise ConfigError("/system needs a chat template, and none is used here; say it as part of the text")
        conversation.system = None if text == TAKEN_AWAY else system_text(text, "/system ")
    session.console.note(
        "[there is no system message]" if conversation.system is None else f"[system message: {conversation.system}]"
    )


def _set(session: Session, argument: str) -> None:
    words = argument.split()
    if words[:1] == ["system"]:  # ollama's: /set system TEXT
        _system(session, argument.strip().removeprefix("system").strip())
        return
    if len(words) == 3 and words[0] == "parameter":  # ollama's: /set parameter temperature 0.7
        words = [f"{words[1]}={words[2]}"]
    values = dict(_assignment(word) for word in words)
    most = values.pop("max_new_tokens", session.max_new_tokens)
    numbers = {key: value for key, value in values.items() if value is not None}
    params = changed_params(session.params, numbers)
    if most == UNLIMITED:
        most = None
    if most is not None and most < 1:
        raise ConfigError(f"max_new_tokens={most} must be at least 1, or null for as many as the context allows")
    session.params, session.max_new_tokens = params, None if most is None else int(most)
    shown = {
        **{key: getattr(session.params, key) for key in NUMBERS},
        "max_new_tokens": "null" if most is None else most,
    }
    session.console.note(f"[{', '.join(f'{key}={value}' for key, value in shown.items())}]")


def _assignment(word: str) -> tuple[str, float | int | None]:
    """Return key and value of "temperature=0.7"; None for null."""
    key, separator, text = word.removeprefix("sampling.").partition("=")
    known = (*NUMBERS, "max_new_tokens")
    if key not in known:
        raise ConfigError(f"/set knows no '{key}'{nearest(key, known)}; known: {', '.join(known)}")
    if not separator:
        raise ConfigError(f"/set needs a value for {key}, such as {key}=1")
    if text == "null" and key == "max_new_tokens":
        return key, None
    try:
        return key, int(text) if key in WHOLE else float(text)
    except ValueError as error:
        raise ConfigError(f"{key}={text} must be a {'whole ' if key in WHOLE else ''}number") from error


def _save(session: Session, name: str) -> None:
    path = user_path(name, "/save ")
    session.conversation.save(path)
    session.console.note(f"[{_turns(session)} saved to {path}]")


def _load(session: Session, name: str) -> None:
    path = user_path(name, "/load ")
    session.conversation.load(path)
    session.console.note(f"[{_turns(session)} loaded from {path}]")


def _turns(session: Session) -> str:
    number = len(session.conversation.exchanges)
    return f"{number} turn{'' if number == 1 else 's'}"


def _retry(session: Session, _argument: str) -> None:
    session.retry()


def _continue(session: Session, _argument: str) -> None:
    session.continue_answer()


def _undo(session: Session, _argument: str) -> None:
    said = " ".join(session.undo().split())
    session.console.note(f"[taken back: {said if len(said) <= SHOWN else f'{said[:SHOWN]}...'}]")


def _stats(session: Session, _argument: str) -> None:
    conversation = session.conversation
    context = conversation.engine.choices.context_length
    session.console.note(f"[{conversation.num_tokens} of {context} tokens of the context in {_turns(session)}]")
    if session.turns:
        last = session.turns[-1]
        session.console.note(
            f"[last answer: {last['new_tokens']} tokens at {last['decode_tokens_per_second']:.1f} tokens/s, the first "
            f"after {last['first_token_seconds']:.2f} s; {last['reused_tokens']} of {last['prompt_tokens']} prompt "
            f"tokens were in the cache]"
        )


def _show(session: Session, _argument: str) -> None:
    session.console.note(describe(session.conversation.engine))


def _model(session: Session, name: str) -> None:
    """Print which model is loaded and, with the name of another, how to chat with that: a process has one engine."""
    model = session.conversation.engine.settings.model
    if not name or name == model.display_name:
        session.console.note(f"[{model.display_name} is loaded, from {model.checkpoint}]")
        return
    known = group_options()["model"]
    if name.isidentifier() and name not in known and not Path(name).exists():
        raise ConfigError(f"/model knows no '{name}'{nearest(name, known)}; graphcore list has the names")
    command = f"graphcore chat {shlex.quote(name)}"
    session.console.note(
        f"[{model.display_name} stays loaded until the chat ends; for {name} type /exit, then {command}; "
        "/save FILE here and /load FILE there carry the chat over]"
    )


def _clear(session: Session, _argument: str) -> None:
    session.conversation.clear()
    session.console.note("[forgotten]")


def _exit(session: Session, _argument: str) -> None:
    session.is_over = True


COMMANDS = {
    "help": Command("", "lists the commands", _help),
    "system": Command("[TEXT]", "sets the system message; @NAME is a preset, - none; without TEXT shows it", _system),
    "set": Command("[KEY=VALUE ...]", f"sets {', '.join(NUMBERS)}, max_new_tokens; without KEY it shows them", _set),
    "retry": Command("", "answers your last message again", _retry),
    "continue": Command("", "continues the last answer", _continue),
    "undo": Command("", "takes your last message and its answer back", _undo),
    "save": Command("FILE", "writes the chat to a file", _save),
    "load": Command("FILE", "continues a saved chat", _load),
    "model": Command("[NAME]", "says which model is loaded, or how to chat with another", _model),
    "show": Command("", "shows the model and what it runs with", _show),
    "stats": Command("", "shows how full the context is, and the speed of the last answer", _stats),
    "clear": Command("", "clears the conversation; the system message stays", _clear),
    "exit": Command("", "ends the chat", _exit),
}  # fmt: skip
OTHER_NAMES = {"?": "help", "bye": "exit", "quit": "exit"}
