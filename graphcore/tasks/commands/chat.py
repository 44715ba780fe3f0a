"""task=chat: talk in the terminal, turn by turn; what earlier turns left in the KV cache is not run again.

Ctrl-C stops an answer, not the chat; Ctrl-D or /exit ends it; /reset forgets what was said. Lines may come from a pipe.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from omegaconf import MISSING

from graphcore.config.settings import Settings
from graphcore.engine.batch_run import BatchRun
from graphcore.engine.engine import Engine
from graphcore.engine.sequence import Generation
from graphcore.errors import ConfigError, GraphcoreError
from graphcore.tasks.conversation import Conversation
from graphcore.tasks.prompts import Prompt, read_prompts, uses_chat
from graphcore.tasks.result import compile_record, ran_record
from graphcore.tasks.running import (
    describe,
    describe_compile,
    load_engine,
    refuse_without_effect,
    sampling_of,
    stops_of,
)
from graphcore.tasks.task import Context, Record, Task
from graphcore.tokenizer.channels import final_message

EXIT, RESET = "/exit", "/reset"
MARK = "> "
CUT = {"length": "max_new_tokens allows no more", "context": "context_length is used up; /reset makes room"}
HINT = "[say something; /reset forgets what was said, /exit or Ctrl-D ends, Ctrl-C stops an answer]"


@dataclass
class ChatSettings:
    """conf/task/chat.yaml."""

    name: str = MISSING


def run(context: Context, _task: ChatSettings) -> Record:
    """Talk until the input ends."""
    settings, console = context.settings, context.console
    _check(settings)
    opening = read_prompts(settings)
    began = time.perf_counter()
    with load_engine(context) as engine:
        load_seconds = time.perf_counter() - began
        conversation = Conversation(engine, settings.system, _uses_template(engine, settings))
        console.note(describe(engine, load_seconds))
        compiled = engine.warm_up(params=sampling_of(settings))
        console.note(f"[{describe_compile(compiled)}]")
        console.note(HINT)
        turns: list[Record] = []
        status = _talk(context, conversation, opening, turns)
        return {
            "status": status,
            **ran_record(engine),
            "load_seconds": load_seconds,
            "compile": compile_record(compiled),
            "chat_template": conversation.has_template,
            "new_tokens": sum(turn["new_tokens"] for turn in turns),
            "reused_tokens": sum(turn["reused_tokens"] for turn in turns),
            "turns": turns,
        }


def _talk(context: Context, conversation: Conversation, opening: list[Prompt], turns: list[Record]) -> str:
    """Take turns until the input ends, adding to `turns`; return "ok", or "interrupted" if Ctrl-C ended a pipe."""
    try:
        for line in _lines(opening):
            if line == RESET:
                conversation.reset()
                context.console.note("[forgotten]")
            else:
                turns += _attempt(context, conversation, line)
    except KeyboardInterrupt:
        return "interrupted"
    return "ok"


def _check(settings: Settings) -> None:
    refuse_without_effect(settings, "chat", ("prompt_ids",))
    if settings.prompt == "-":
        raise ConfigError(
            "prompt=- has no effect with task=chat, which reads standard input line by line; leave it out"
        )
    if settings.batch_size != 1:
        raise ConfigError(f"batch_size={settings.batch_size} has no effect with task=chat; leave it out")


def _uses_template(engine: Engine, settings: Settings) -> bool:
    """Return whether turns go through the chat template; a model without one must be told to go without."""
    if not engine.has_tokenizer:
        raise ConfigError(f"task=chat needs text, and {settings.model.checkpoint} has no tokenizer; use task=generate")
    is_used = uses_chat(engine, settings)
    if not is_used and settings.chat != "off":
        raise ConfigError(
            f"task=chat needs a chat template, and {settings.model.checkpoint} has none; use an instruct model, or "
            "chat=off to have it go on from what you type"
        )
    return is_used


def _lines(opening: list[Prompt]) -> Iterator[str]:
    """Yield what the user says: prompt=... first, then lines of standard input that are not blank, until /exit."""
    yield from (str(prompt.content) for prompt in opening)
    is_terminal = sys.stdin.isatty()
    if is_terminal and find_spec("readline"):
        import_module("readline")  # from now on input() knows arrow keys and earlier lines
    while True:
        try:
            line = input(MARK) if is_terminal else sys.stdin.readline()
        except EOFError:  # Ctrl-D leaves the cursor behind the mark
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(f"\n{HINT}", file=sys.stderr)
            continue
        if line.strip() == EXIT or (not line and not is_terminal):
            return
        if line.strip():
            yield line.strip()


def _attempt(context: Context, conversation: Conversation, text: str) -> list[Record]:
    """Take one turn; at a terminal, what cannot be answered is said and the chat goes on."""
    try:
        return [_turn(context, conversation, text)]
    except GraphcoreError as error:
        if not sys.stdin.isatty():
            raise
        context.console.note(f"[{error}; /reset forgets what was said]")
        return []


def _turn(context: Context, conversation: Conversation, text: str) -> Record:
    """Answer the text and keep the turn, as far as it came."""
    engine, settings = conversation.engine, context.settings
    prompt_ids = conversation.prompt_ids(text)
    run = engine.open_run(
        [prompt_ids], settings.max_new_tokens, stops_of(settings), sampling_of(settings), reuse_cache=True
    )
    _print_events(context, run)
    answer = run.generations()[0]
    if answer.token_ids:
        engine.remember(run.held_ids())
        ended = answer.finish_reason == "end"
        kept = list(answer.token_ids[:-1] if ended and not conversation.has_template else answer.token_ids)
        said = final_message(engine.tokenizer, answer.token_ids)
        conversation.add(text, prompt_ids, answer.text if said is None else said, kept)
    if answer.finish_reason in CUT:
        context.console.note(f"[cut: {CUT[answer.finish_reason]}]")
    return _record(text, answer, run.cached)


def _print_events(context: Context, run: BatchRun) -> None:
    """Print the answer as it comes, until it ends or Ctrl-C."""
    try:
        for event in run.events():
            context.console.text(event.text)
    except KeyboardInterrupt:
        run.interrupt()
    context.console.line()


def _record(text: str, answer: Generation, reused: int) -> Record:
    timings = answer.timings
    run_tokens = timings.prompt_tokens - reused
    return {
        "user": text,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": timings.prompt_tokens,
        "reused_tokens": reused,
        "new_tokens": timings.new_tokens,
        "first_token_seconds": timings.first_token_seconds,
        "prefill_seconds": timings.prefill_seconds,
        "decode_seconds": timings.decode_seconds,
        "prefill_tokens_per_second": run_tokens / timings.prefill_seconds if timings.prefill_seconds else 0.0,
        "decode_tokens_per_second": timings.decode_tokens_per_second,
    }


CHAT = Task("chat", ChatSettings, run)
