"""task=chat: chat in the terminal; tokens of earlier turns are not recomputed while they are in the KV cache.

Ctrl-C stops an answer, not the chat; Ctrl-D or /exit ends it; /help lists the other commands. Lines may come from a
pipe. docs/prompts.md describes it.
"""

import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

from omegaconf import MISSING

from graphcore.config.settings import Settings
from graphcore.config.user_path import xdg_folder
from graphcore.config.validate import UNLIMITED, refuse_unused_settings
from graphcore.engine.prompt_encoder import PromptEncoder
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.tasks.chat.conversation import Conversation
from graphcore.tasks.chat.session import Session
from graphcore.tasks.chat.slash_commands import run_command
from graphcore.tasks.chat.typed_lines import ChatLines, Entry, kept_history
from graphcore.tasks.report.run_record import compile_record, ran_record
from graphcore.tasks.requests.cache_files import cache_record, check_cache_files, load_cache_file, save_cache_file
from graphcore.tasks.requests.prompts import read_prompts, uses_chat
from graphcore.tasks.task import Context, Record, Task
from graphcore.tasks.task_engine import (
    default_max_new_tokens,
    default_params,
    describe,
    describe_compile,
    load_engine,
    stops_of,
)

LONGEST_NAME = 24  # characters of a model's name before a typed line
HINT = "[type a message; /help lists the commands, Ctrl-C stops an answer, /exit or Ctrl-D ends the chat]"


@dataclass
class ChatSettings:
    """The keys of conf/task/chat.yaml."""

    name: str = MISSING


def run(context: Context, _task: ChatSettings) -> Record:
    """Load the engine and chat until the input ends."""
    settings, console = context.settings, context.console
    _check(settings)
    opening = [Entry(str(prompt.content), is_command=False) for prompt in read_prompts(settings)]
    began = time.perf_counter()
    with load_engine(context, partial(_check_texts, settings)) as engine:
        load_seconds = time.perf_counter() - began
        conversation = Conversation(engine, settings.system, uses_chat(engine.prompts, settings))
        console.note(describe(engine, load_seconds))
        console.note(f"[sampling: {engine.loaded.sampling.words}]")
        compiled = engine.warm_up(params=default_params(engine))
        console.note(f"[{describe_compile(compiled)}]")
        loaded = load_cache_file(context, engine)
        console.note(HINT)
        lines = ChatLines(partial(typed_mark, conversation))
        most = default_max_new_tokens(engine, is_chat=True)
        session = Session(
            conversation,
            console,
            lines.waiting,
            default_params(engine),
            None if most == UNLIMITED else most,
            stops_of(settings),
            settings.repetition_detection,
        )
        state = xdg_folder("XDG_STATE_HOME", ".local/state")
        keeps = settings.chat_history and lines.is_edited
        with kept_history(state / "chat_history", console.note) if keeps else nullcontext():
            status = _talk(session, opening, lines)
        saved, error = _save(context, session) if status == "ok" else (None, {})
        return {
            "status": status,
            **error,
            **cache_record(loaded, saved),
            **ran_record(engine),
            "load_seconds": load_seconds,
            "compile": compile_record(compiled),
            "chat_template": conversation.has_template,
            "new_tokens": sum(turn["new_tokens"] for turn in session.turns),
            "reused_tokens": sum(turn["reused_tokens"] for turn in session.turns),
            "turns": session.turns,
        }


def typed_mark(conversation: Conversation) -> str:
    """Return the prompt of a typed line, "smollm2 3%> ": the model, and how much of its context is used."""
    engine = conversation.engine
    name = engine.settings.model.display_name.removesuffix(".gguf")
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."
    with suppress(GraphcoreError):  # a chat from a file may be one that the template refuses
        return f"{name} {conversation.num_tokens / engine.choices.context_length:.0%}> "
    return f"{name}> "


def _talk(session: Session, opening: list[Entry], lines: ChatLines) -> str:
    """Take turns until the input ends; return "ok", or "interrupted" if a signal, or Ctrl-C in a pipe, ended it."""
    try:
        for entry in chain(opening, lines):
            _attempt(session, entry, lines.is_terminal)
            if session.is_terminated:
                return "interrupted"
            if session.is_over:
                break
    except KeyboardInterrupt:
        return "interrupted"
    return "ok"


def _save(context: Context, session: Session) -> tuple[int | None, Record]:
    """Save the conversation's KV cache; return its number of tokens and, if saving failed, status and error."""
    conversation = session.conversation
    if context.settings.cache.save is None:
        return None, {}
    try:
        if not conversation.exchanges:
            raise ConfigError(f"cache.save={context.settings.cache.save}: nothing was said, and nothing is saved")
        return save_cache_file(context, conversation.engine, [conversation.unfinished_ids(room=0)]), {}
    except GraphcoreError as error:  # the turns' records are still written
        return None, {"status": "failed", "error": str(error)}


def _attempt(session: Session, entry: Entry, is_terminal: bool) -> None:
    """Answer a text or run a command; at a terminal an error is printed and the chat continues."""
    try:
        if entry.is_command:
            run_command(session, entry.text)
        else:
            session.say(entry.text)
    except GraphcoreError as error:
        if is_terminal:
            session.console.note(f"[{error}]")
        elif entry.where:
            raise ConfigError(f"{entry.where}: {error}") from error
        else:
            raise


def _check(settings: Settings) -> None:
    refuse_unused_settings(settings, "chat", ("prompt_ids",))
    check_cache_files(settings)
    if settings.prompt == "-":
        raise ConfigError(
            "prompt=- has no effect with task=chat, which reads standard input line by line; leave it out"
        )
    if settings.batching.max_sequences != 1:
        raise ConfigError(f"batch_size={settings.batching.max_sequences} has no effect with task=chat; leave it out")


def _check_texts(settings: Settings, encoder: PromptEncoder) -> None:
    """Check that there is a tokenizer, and a chat template unless chat=off."""
    if encoder.known is None:
        name = settings.model.display_name
        raise ConfigError(f"task=chat needs text, and {name} has no tokenizer; use task=generate")
    if not uses_chat(encoder, settings) and settings.chat != "off":
        raise ConfigError(
            f"task=chat needs a chat template, and {settings.model.display_name} has none; use an instruct model, or "
            "chat=off to have it go on from what you type"
        )


CHAT = Task("chat", ChatSettings, run)
