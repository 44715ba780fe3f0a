"""POST /v1/completions: texts or token ids are continued; `echo` also gives their own log probabilities."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, Strict

from graphcore.engine.engine import Engine
from graphcore.engine.output import Generation, TokenEvent, TokenLogprob
from graphcore.engine.request_handle import RequestHandle
from graphcore.serving.answering import (
    REASONS,
    Limits,
    compiled_grammar,
    limits_of,
    with_defaults,
)
from graphcore.serving.chat_call import Used
from graphcore.serving.fields import ListOf, parse_request, refuse_unless
from graphcore.serving.openai_chat import FINISH_REASONS, usage_body
from graphcore.serving.openai_options import (
    SamplingFields,
    StreamOptions,
    check_grammar_size,
    grammar_of,
    sampling_of_fields,
    schema_size,
    stops_of_field,
)
from graphcore.serving.request_errors import RequestError
from graphcore.serving.served_model import ServedModel
from graphcore.serving.token_texts import TokenTexts
from graphcore.tokenizer.grammar import GrammarMask

DEFAULT_TOKENS = 16  # as in OpenAI's interface
MOST_PROMPTS = 256
NEUTRAL_FIELDS: Mapping[str, Sequence[object]] = {"suffix": ("",), "best_of": (1,), "use_beam_search": (False,)}
TokenId = Annotated[int, Strict()]  # else true would be 1


def _few_prompts(value: object) -> object:
    """Return the value of a field of prompts, before each is looked at."""
    if isinstance(value, list) and len(value) > MOST_PROMPTS and not isinstance(value[0], int):
        raise ValueError(f"{len(value)} prompts; {MOST_PROMPTS} are the most")
    return value


Prompts = Annotated[
    str | ListOf[TokenId] | ListOf[str] | ListOf[ListOf[TokenId]],
    BeforeValidator(_few_prompts),
]


class CompletionRequest(SamplingFields):
    """The fields of a request; those of NEUTRAL_FIELDS are known, too."""

    prompt: Prompts
    model: str = ""
    max_tokens: int = Field(DEFAULT_TOKENS, ge=0)
    n: int = Field(1, ge=1)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    stop: str | ListOf[str] | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    add_special_tokens: bool = True
    response_format: dict[str, Any] | None = None
    user: str | None = None
    suffix: Any = None
    best_of: Any = None
    use_beam_search: Any = None


def read_completion(body: Mapping[str, Any]) -> tuple[CompletionRequest, list[str]]:
    """Return a request, and the names of fields that are ignored.

    Raises:
        RequestError: a field is wrong or cannot be taken; the error names it.
    """
    request, unknown = parse_request(CompletionRequest, body)
    refuse_unless(request, NEUTRAL_FIELDS)
    if not request.prompt or not all(prompts_of_field(request.prompt)):
        raise RequestError("prompt is empty; give at least one character or token", field="prompt")
    if request.stream and request.echo and request.logprobs is not None:
        raise RequestError("echo with logprobs cannot be streamed; leave out stream", field="stream")
    if request.max_tokens == 0 and not request.echo:
        raise RequestError("max_tokens=0 is only possible with echo=true", field="max_tokens")
    return request, unknown


def check_queue_room(engine: Engine, count: int, field: str) -> None:
    """Check that the requests of a call fit in the queue at all; else it would be refused for ever as busy.

    Raises:
        RequestError: they do not; the error names the field.
    """
    most = engine.settings.batching.max_waiting
    if count > most:
        raise RequestError(f"{field} asks for {count} answers; {most} fit in the queue (batching.max_waiting)", field)


def prompts_of_field(prompt: Prompts) -> list[str | list[int]]:
    """Return each prompt of a request."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


@dataclass
class _Sent:
    """What a stream has sent of an answer.

    Attributes:
        num_characters: characters of the answer's text.
        offset: characters of the tokens that had log probabilities.
        has_ended: True if a token has ended it.
    """

    num_characters: int = 0
    offset: int = 0
    has_ended: bool = False


class Completions:
    """The answers of one request.

    Args:
        served: the model.
        request: the request.
        request_id: its id.
        head: fields of every body: id, created, model.
    """

    def __init__(
        self, served: ServedModel, request: CompletionRequest, request_id: str, head: Mapping[str, Any]
    ) -> None:
        self._served, self._request, self._id = served, request, request_id
        self._head = {**head, "object": "text_completion"}
        self._engine = served.engine
        self._texts = TokenTexts(self._engine.prompts.known, request.return_tokens_as_token_ids)
        self._prompts = list[list[int]]()
        self._handles = list[RequestHandle]()
        self._is_cancelled = False
        self._sent: dict[tuple[int, int], _Sent] = defaultdict(_Sent)  # by prompt and answer

    async def submit(self) -> None:
        """Submit a request of the engine for each prompt.

        Raises:
            RequestError: one of them is refused; all are then cancelled.
        """
        try:
            await asyncio.to_thread(self._submit)
        except BaseException as error:
            self.cancel()
            if isinstance(error, Exception):
                raise self._served.error_of(error) from error
            raise

    def cancel(self) -> None:
        """End all that still runs, and submit no more."""
        self._is_cancelled = True
        for handle in self._handles:
            handle.cancel()

    def _submit(self) -> None:
        request, engine = self._request, self._engine
        if request.n > self._served.settings.max_answers:
            raise RequestError(f"n={request.n}; the most are {self._served.settings.max_answers}", field="n")
        prompts = prompts_of_field(request.prompt)
        check_queue_room(engine, len(prompts) * request.n, "prompt")
        limits, mask = limits_of(self._served), self._mask()
        sampling = with_defaults(self._served, sampling_of_fields(request))
        for number, prompt in enumerate(prompts):
            if self._is_cancelled:
                return
            ids = self._ids(engine, prompt, limits)
            self._prompts.append(ids)
            handle = engine.submit(
                ids,
                limits.new_tokens(max(request.max_tokens, 1)),
                stop=stops_of_field(request.stop),
                logprobs=request.logprobs is not None,
                top_logprobs=request.logprobs or 0,
                prompt_logprobs=request.logprobs if request.echo else None,
                ignore_eos=request.ignore_eos,
                repetition_detection=request.repetition_detection,
                speculation=request.speculation,
                n=request.n,
                deadline=self._served.settings.request_timeout,
                mask=mask,
                request_id=f"{self._id}-{number}" if number else self._id,
                **{**sampling, "seed": sampling["seed"] + number * request.n},  # as if all were answers to one prompt
            )
            self._handles.append(handle)

    def _mask(self) -> GrammarMask | None:
        """Return the mask that all answers get copies of."""
        grammar = grammar_of(self._request, self._request.response_format)
        check_grammar_size(schema_size(grammar), self._served.settings.max_grammar_chars)
        return compiled_grammar(self._engine, grammar) if grammar else None

    def _ids(self, engine: Engine, prompt: str | list[int], limits: Limits) -> list[int]:
        if not isinstance(prompt, str):
            ids = prompt
        else:
            limits.check_text(len(prompt))
            is_whole = self._request.add_special_tokens
            ids = engine.prompts.prompt_ids(prompt) if is_whole else engine.prompts.text_ids(prompt, is_beginning=False)
        limits.check_prompt(len(ids))
        return ids

    async def body(self) -> dict[str, Any]:
        """Submit the requests, and return the body of the whole answer.

        Raises:
            RequestError: a request of the engine is refused or has failed.
        """
        await self.submit()
        with self._served.ended_after(self._handles):
            try:
                for handle in self._handles:
                    await handle
            except Exception as error:
                raise self._served.error_of(error) from error
        choices = [
            self._choice(generation, at, row)
            for at, handle in enumerate(self._handles)
            for row, generation in enumerate(handle.results(timeout=0))
        ]
        return {**self._head, "choices": choices, "usage": usage_body(self.used)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a streamed answer, which was submitted, in the order in which tokens come."""
        queue: asyncio.Queue[tuple[int, Sequence[TokenEvent]] | BaseException] = asyncio.Queue()
        readers = [asyncio.create_task(self._read(at, queue)) for at in range(len(self._handles))]
        with self._served.ended_after(self._handles):
            try:
                for at, ids in enumerate(self._prompts):
                    for row in range(self._request.n):
                        if self._request.echo:
                            yield self._chunk(at, row, self._text(ids), None)
                left = len(readers)
                while left:
                    found = await queue.get()
                    if isinstance(found, BaseException):
                        raise self._served.error_of(found)
                    left -= not found[1]
                    for chunk in self._event_chunks(*found) if found[1] else self._last_chunks(found[0]):
                        yield chunk
                if self._request.stream_options.include_usage:
                    yield {**self._head, "choices": [], "usage": usage_body(self.used)}
            finally:
                for reader in readers:
                    reader.cancel()

    async def _read(self, at: int, queue: "asyncio.Queue[tuple[int, Sequence[TokenEvent]] | BaseException]") -> None:
        """Put the tokens of a prompt's answers into a queue, and none at their end."""
        try:
            async for events in self._handles[at].arrivals(self._served.settings.stream_interval):
                queue.put_nowait((at, events))
        except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
            queue.put_nowait(error)
        else:
            queue.put_nowait((at, ()))

    def _event_chunks(self, at: int, events: Sequence[TokenEvent]) -> list[dict[str, Any]]:
        """Return a chunk for each answer that has new tokens."""
        chunks = []
        for row, own in groupby(sorted(events, key=attrgetter("row")), attrgetter("row")):
            tokens, sent = list(own), self._sent[at, row]
            text, reason = "".join(event.text for event in tokens), tokens[-1].finish_reason
            sent.num_characters += len(text)
            sent.has_ended = reason is not None
            records = [(event.token_id, event.logprob, event.top_logprobs) for event in tokens]
            logprobs = None if self._request.logprobs is None else self._logprobs(records, sent.offset)
            sent.offset += sum(map(len, logprobs["tokens"])) if logprobs else 0
            chunks.append(self._chunk(at, row, text if self._request.max_tokens else "", _reason(reason), logprobs))
        return chunks

    def _last_chunks(self, at: int) -> list[dict[str, Any]]:
        """Return a chunk for each answer that a time limit has ended, which no token says."""
        return [
            self._chunk(
                at, row, generation.text[self._sent[at, row].num_characters :], _reason(generation.finish_reason)
            )
            for row, generation in enumerate(self._handles[at].results(timeout=0))
            if not self._sent[at, row].has_ended
        ]

    def _chunk(
        self, at: int, row: int, text: str, reason: str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        index = at * self._request.n + row
        return {
            **self._head,
            "choices": [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}],
        }

    def _choice(self, generation: Generation, at: int, row: int) -> dict[str, Any]:
        request, records = self._request, list[tuple[int, float | None, Sequence[TokenLogprob]]]()
        text = generation.text if request.max_tokens else ""
        if request.echo:
            text = self._text(self._prompts[at]) + text
            records += [(one.token_id, one.logprob, one.top) for one in generation.prompt_logprobs or ()]
        if request.logprobs is not None and request.max_tokens:
            pairs = zip(generation.token_ids, generation.logprobs or (), generation.top_logprobs or (), strict=False)
            records += list(pairs) if generation.top_logprobs else _plain(generation)
        found = None if request.logprobs is None else self._logprobs(records)
        reason = _reason(generation.finish_reason) if request.max_tokens else "length"
        return {
            "index": at * request.n + row,
            "text": text,
            "logprobs": found,
            "finish_reason": reason,
            "stop_reason": generation.stop_reason,
        }

    def _logprobs(
        self, records: Sequence[tuple[int, float | None, Sequence[TokenLogprob]]], begin: int = 0
    ) -> dict[str, Any]:
        """Return log probabilities as completions have them: lists with an entry for each token.

        Args:
            begin: characters of the tokens before these.
        """
        texts = [self._texts.text(token_id) for token_id, _, _ in records]
        tops = [None if value is None else self._by_text(top) for _, value, top in records]
        return {
            "tokens": texts,
            "token_logprobs": [value for _, value, _ in records],
            "top_logprobs": tops if self._request.logprobs else None,
            "text_offset": list(accumulate(map(len, texts[:-1]), initial=begin)) if texts else [],
        }

    def _by_text(self, top: Sequence[TokenLogprob]) -> dict[str, float]:
        """Return log probabilities by text; of tokens with one text, such as parts of characters, the highest."""
        found: dict[str, float] = {}
        for one in top:
            found.setdefault(self._texts.text(one.token_id), one.logprob)
        return found

    def _text(self, ids: Sequence[int]) -> str:
        known = self._engine.prompts.known
        return "" if known is None else known.decode(ids)

    @property
    def finish_reason(self) -> str:
        """Why the first answer has ended, for the log."""
        return self._handles[0].results(timeout=0)[0].finish_reason

    @property
    def used(self) -> Used:
        """The tokens of all answers, which have ended."""
        new = sum(len(one.token_ids) for handle in self._handles for one in handle.results(timeout=0))
        cached = sum(handle.cached for handle in self._handles)
        return Used(sum(map(len, self._prompts)), cached, new if self._request.max_tokens else 0)


def _reason(finish_reason: str | None) -> str | None:
    if finish_reason is None:
        return None
    reason = REASONS[finish_reason]
    return FINISH_REASONS.get(reason, reason)


def _plain(generation: Generation) -> list[tuple[int, float | None, Sequence[TokenLogprob]]]:
    return [(token, value, ()) for token, value in zip(generation.token_ids, generation.logprobs or (), strict=True)]
