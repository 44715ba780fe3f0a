"""The state of a running chat: its conversation, its sampling settings, and the records of its turns."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field

from graphcore.engine.arguments import params_from
from graphcore.engine.output import Generation
from graphcore.engine.request_handle import RequestHandle
from graphcore.errors import ConfigError
from graphcore.sampling_params import SamplingParams
from graphcore.tasks.chat.conversation import Conversation
from graphcore.tasks.report.console import Console
from graphcore.tasks.task import Record
from graphcore.tasks.termination import Terminated

ROOM = 4  # a new turn keeps 1 / ROOM of the context free for its answer


@dataclass
class Session:
    """The state of a chat that turns and commands read and change.

    Attributes:
        waiting: context manager that holds typed input back.
        params: sampling parameters; the seed of an answer depends on its number in the chat.
        max_new_tokens: most tokens of an answer; None is as many as the context allows.
        stops: texts that end an answer.
        detects_repetition: True ends an answer that repeats one span.
        turns: records of the turns for result.json.
        is_over: True once the chat is to end.
        is_terminated: True once a signal has ended the last answer and the process is to end.
    """

    conversation: Conversation
    console: Console
    waiting: Callable[[], AbstractContextManager[None]]
    params: SamplingParams
    max_new_tokens: int | None
    stops: list[str]
    detects_repetition: bool = True
    turns: list[Record] = field(default_factory=list)
    is_over: bool = False
    is_terminated: bool = False

    def say(self, text: str, command: str | None = None) -> None:
        """Answer the text and keep the exchange, even if the answer was interrupted.

        Raises:
            GraphcoreError: the text cannot be answered.
        """
        answer, reused = self._answer(lambda: self.conversation.prompt_ids(text, self._room))
        if answer.token_ids:
            self.conversation.add(text, answer.text, _without_end(answer))
        self._end_turn(text, command, answer, reused)

    def retry(self) -> None:
        """Answer the user's last message again.

        Raises:
            GraphcoreError: there is no message.
        """
        self._check_exchange("/retry")
        if self.params.keeps_one:
            self.console.note(
                "[greedy sampling takes the likeliest answer each time; /set temperature=0.7 gives others]"
            )
        exchanges, left_out = list(self.conversation.exchanges), self.conversation.left_out
        text, turns = self.conversation.pop_exchange(), len(self.turns)
        try:
            self.say(text, "retry")
        finally:
            if len(self.turns) == turns or not self.turns[-1]["new_tokens"]:  # no new answer replaces the old one
                self.conversation.exchanges, self.conversation.left_out = exchanges, left_out

    def continue_answer(self) -> None:
        """Continue the last answer.

        Raises:
            GraphcoreError: there is no answer.
        """
        self._check_exchange("/continue")
        answer, reused = self._answer(lambda: self.conversation.unfinished_ids(self._room), is_more=True)
        if answer.finish_reason == "end" and not _without_end(answer):
            self.console.note("[the model had ended the answer; type a message]")
        self.conversation.extend(answer.text, _without_end(answer))
        self._end_turn(self.conversation.exchanges[-1].user, "continue", answer, reused)

    def undo(self) -> str:
        """Remove the last exchange from the conversation and return the user's message.

        Raises:
            GraphcoreError: there is no message.
        """
        self._check_exchange("/undo")
        return self.conversation.pop_exchange()

    def _check_exchange(self, command: str) -> None:
        if not self.conversation.exchanges:
            raise ConfigError(f"{command} needs an answer, and there is none yet; type a message first")

    @property
    def _room(self) -> int:
        context = self.conversation.engine.choices.context_length
        return min(self.max_new_tokens or context, context // ROOM)

    def _answer(self, prompt_ids: Callable[[], list[int]], is_more: bool = False) -> tuple[Generation, int]:
        """Run a turn to its end or to Ctrl-C, printing its text; return the answer and the number of reused tokens.

        Args:
            is_more: True if the turn continues an answer; it may then generate no text.

        Raises:
            GraphcoreError: the turn cannot run, even with all earlier turns left out.
        """
        engine, left_out = self.conversation.engine, self.conversation.left_out
        ids = prompt_ids()
        if len(ids) > engine.choices.context_length:
            raise ConfigError(_no_room(len(ids), engine.choices.context_length, is_more))
        most = self.max_new_tokens or engine.choices.context_length
        params = params_from(self.params, len(self.turns))
        handle = engine.submit(
            ids,
            most,
            self.stops,
            reuse_cache=True,
            repetition_detection=self.detects_repetition,
            **asdict(params),
        )
        newly = self.conversation.left_out - left_out
        if newly:
            turns = "turn is" if newly == 1 else f"{newly} turns are"
            self.console.note(
                f"[the context of {engine.choices.context_length} tokens is full: the oldest {turns} left out]"
            )
        with self.waiting():
            self._print_events(handle, is_more)
        return handle.result(), handle.cached

    def _print_events(self, handle: RequestHandle, is_more: bool) -> None:
        has_text = False
        try:
            for event in handle:
                self.console.text(event.text)
                has_text = has_text or bool(event.text)
        except KeyboardInterrupt as interrupt:
            handle.cancel()
            self.is_terminated = isinstance(interrupt, Terminated)
        if has_text or not is_more:
            self.console.line()

    def _end_turn(self, text: str, command: str | None, answer: Generation, reused: int) -> None:
        """Print why the answer was cut, if it was, and keep the turn's record."""
        full = f"the context of {self.conversation.engine.choices.context_length} tokens is full"
        cut = {
            "repetition": "the answer repeated itself for 200 tokens; /retry answers anew, /continue goes on",
            "length": f"max_new_tokens={self.max_new_tokens} allows no more; /continue goes on",
            "context": f"{full}; /continue leaves out the oldest turns and goes on"
            if self.conversation.can_leave_out
            else f"{full} of this turn; /clear forgets it, a larger context_length has room for more",
        }
        if answer.finish_reason in cut:
            self.console.note(f"[cut: {cut[answer.finish_reason]}]")
        self.turns.append(_record(text, command, answer, reused))


def _no_room(tokens: int, context: int, is_more: bool) -> str:
    """Return a message: why a turn does not fit in the context, and what to do about it in a chat."""
    if is_more:
        return f"this turn fills the context of {context} tokens; /clear forgets it, and the next one has room"
    return (
        f"the text takes {tokens} tokens with what stands around it, and the context has {context}; send less at a "
        "time, or begin the chat with a larger context_length"
    )


def _without_end(answer: Generation) -> list[int]:
    """Return the answer's tokens without its end token."""
    return list(answer.token_ids[:-1] if answer.finish_reason == "end" else answer.token_ids)


def _record(text: str, command: str | None, answer: Generation, reused: int) -> Record:
    timings = answer.timings
    return {
        "user": text,
        "command": command,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": timings.prompt_tokens,
        "reused_tokens": reused,
        "new_tokens": timings.new_tokens,
        "first_token_seconds": timings.first_token_seconds,
        "prefill_seconds": timings.prefill_seconds,
        "decode_seconds": timings.decode_seconds,
        "prefill_tokens_per_second": timings.prefill_tokens_per_second,
        "decode_tokens_per_second": timings.decode_tokens_per_second,
    }
