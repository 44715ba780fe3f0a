"""The state of one request while it runs: its token ids, its text, and why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from graphcore.errors import ConfigError
from graphcore.tokenizer.text_stream import IncrementalDecoder, StopStrings
from graphcore.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True)
class Timings:
    """How long a request took, in seconds.

    Attributes:
        first_token_seconds: float, seconds from the request's first pass to its first new token, without the time that
            it waited for a place.
        prefill_seconds: float, the same: all passes over its prompt, and what ran beside them.
        decode_seconds: float, seconds from the first new token to the last.
        prompt_tokens: int, tokens of this request's prompt.
        new_tokens: int, tokens that this request was given.
        batch: int, most requests that ran at once while this one ran.
        cached_tokens: int, tokens of the prompt that the KV cache held already, and that did not run.
    """

    first_token_seconds: float
    prefill_seconds: float
    decode_seconds: float
    prompt_tokens: int
    new_tokens: int
    batch: int
    cached_tokens: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Prompt tokens of this request that ran, divided by the seconds of prefill."""
        ran = self.prompt_tokens - self.cached_tokens
        return ran / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens of this request after the first, divided by the seconds of decode."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    Attributes:
        text: str, the new text, without stop strings and special tokens; empty when there is no tokenizer.
        token_ids: tuple of int, the new tokens, including the end token if one ended the generation.
        finish_reason: str, "end" (an end-of-sequence token), "stop" (a stop string), "length" (max_new_tokens),
            "context" (the cache is full), "deadline" or "interrupted".
        logprobs: tuple of float, the natural logarithm of each new token's probability before sampling parameters
            applied; None if not asked for.
        timings: Timings, seconds and token counts.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[float, ...] | None
    timings: Timings


@dataclass(frozen=True)
class TokenEvent:
    """A new token of one request.

    Attributes:
        row: int, index of the request in the call.
        token_id: int, the token.
        text: str, the text that can be printed now; it may lag behind the tokens, as some spell a part of a character.
        logprob: float, as in `Generation.logprobs`; None if not asked for.
        finish_reason: str, as in `Generation.finish_reason`, on the request's last event; None before it.
    """

    row: int
    token_id: int
    text: str
    logprob: float | None
    finish_reason: str | None


@dataclass
class RunningRequest:
    """A request with its new tokens so far; it decides when it has ended."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    end_ids: frozenset[int]
    decoder: IncrementalDecoder | None
    stops: StopStrings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    def push(self, token_id: int, is_context_full: bool) -> str:
        """Append a new token, set `finish_reason` if it ends the request, and return the text that is now certain."""
        self.token_ids.append(token_id)
        if token_id in self.end_ids:
            return self.finish("end")
        piece, is_stopped = self.stops.push(self.decoder.push(token_id)) if self.decoder else ("", False)
        self.pieces.append(piece)
        if is_stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.max_new_tokens:
            return piece + self.finish("length")
        elif is_context_full:
            return piece + self.finish("context")
        return piece

    def finish(self, reason: str) -> str:
        """End the request for a reason and return the text that was held back."""
        self.finish_reason = reason
        held, is_stopped = self.stops.push(self.decoder.flush()) if self.decoder else ("", False)
        if is_stopped:
            self.finish_reason = "stop"
        else:
            held += self.stops.flush()
        self.pieces.append(held)
        return held


def request_of(
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    end_ids: frozenset[int],
    tokenizer: Tokenizer | None,
    stops: Sequence[str],
) -> RunningRequest:
    """Return a request without new tokens.

    Args:
        stops: texts that end the request.

    Raises:
        ConfigError: there are stop texts and no tokenizer to find them with.
    """
    if stops and tokenizer is None:
        raise ConfigError("stop needs a tokenizer, and the checkpoint has none; leave stop out")
    decoder = IncrementalDecoder(tokenizer) if tokenizer else None
    return RunningRequest(prompt_ids, max_new_tokens, end_ids, decoder, StopStrings(stops))
