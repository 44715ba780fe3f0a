"""Answers a ChatCall: prompt, mask and request of the engine, and the parts of the answer as its tokens come."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from graphcore.engine.arguments import Stop
from graphcore.engine.engine import Engine
from graphcore.engine.output import Generation, TokenEvent
from graphcore.engine.request_handle import RequestHandle
from graphcore.sampling_params import PARAMETERS, TRUNCATING
from graphcore.serving.chat_call import (
    Began,
    ChatCall,
    Content,
    Ended,
    Part,
    Reasoning,
    TokenRecord,
    ToolCallArguments,
    ToolCallBegin,
    Used,
)
from graphcore.serving.openai_options import check_grammar_size, schema_size
from graphcore.serving.request_errors import RequestError, request_error
from graphcore.serving.served_model import ServedModel
from graphcore.serving.tool_formats.answer_parser import AnswerParser, AnswerStops, split_stops
from graphcore.serving.tool_formats.template_messages import StandIns, template_messages
from graphcore.serving.tool_formats.tool_checks import check_no_control_tokens, check_tools
from graphcore.serving.tool_formats.tool_format import ToolFormat
from graphcore.serving.tool_formats.tool_grammar import answer_frame, tool_grammar
from graphcore.tokenizer.grammar import GrammarMask

TAIL = 64  # tokens at the end of a prompt that a parser sees: enough for a prefilled thought
LARGEST_SEED = 2**63
REASONS: Mapping[str, str] = {
    "end": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "repetition": "repetition",
    "deadline": "interrupted",
    "interrupted": "interrupted",
}
"""What clients are told, by `Generation.finish_reason`."""


@dataclass(frozen=True)
class Limits:
    """The limits of a server for one request.

    Attributes:
        max_prompt_tokens: most tokens of a prompt, those that the context has included.
        max_new_tokens: most tokens of an answer; None for as many as the context allows.
        longest_token: most characters that a token spells; 0 without a tokenizer.
    """

    max_prompt_tokens: int
    max_new_tokens: int | None
    longest_token: int

    def check_text(self, characters: int) -> None:
        """Check the length of a prompt's text before it is encoded, which takes a second for each megabyte.

        Raises:
            RequestError: the text is too long whatever its tokens are.
        """
        most = self.max_prompt_tokens * self.longest_token
        if self.longest_token and characters > most:
            raise RequestError(
                f"the maximum context length is {self.max_prompt_tokens} tokens here; the prompt has {characters} "
                f"characters, and so many tokens have at most {most}",
                code="context_length_exceeded",
            )

    def check_prompt(self, tokens: int) -> None:
        """Check the length of a prompt.

        Raises:
            RequestError: it is too long.
        """
        if tokens > self.max_prompt_tokens:
            raise RequestError(
                f"the maximum context length is {self.max_prompt_tokens} tokens here; the prompt has {tokens}",
                code="context_length_exceeded",
            )

    def new_tokens(self, wanted: int) -> int:
        """Return the most tokens of an answer; -1 is as many as the context allows."""
        if self.max_new_tokens is None:
            return wanted
        return self.max_new_tokens if wanted == -1 else min(wanted, self.max_new_tokens)


def with_defaults(served: ServedModel, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters of a request: its own, else the engine's defaults, and a fresh seed.

    Clients that ask for a top-p and no temperature mean to sample, also a model that is greedy by default.
    """
    given = {name: value for name, value in sampling.items() if value is not None}
    defaults = served.engine.loaded.sampling.values
    asks = any(given[name] not in (PARAMETERS[name].beside_greedy or ()) for name in given.keys() & set(TRUNCATING))
    if asks and not defaults.get("temperature"):
        defaults["temperature"] = 1.0
    return {**defaults, "seed": secrets.randbelow(LARGEST_SEED), **given}


def with_stop_tokens(served: ServedModel, engine: Engine, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling parameters with the tokens that end a family's answers besides the checkpoint's end tokens."""
    names = served.tool_format.stop_token_names
    spelt = [engine.tokenizer.encode(name, add_special_tokens=False) for name in names]
    own = [ids[0] for ids in spelt if len(ids) == 1]
    return {**sampling, "stop_token_ids": [*sampling.get("stop_token_ids", ()), *own]}


def limits_of(served: ServedModel) -> Limits:
    """Return the limits of a server whose model is loaded."""
    context, set_here = served.engine.choices.context_length, served.settings.max_prompt_tokens
    most = context if set_here is None else min(context, set_here)
    return Limits(most, served.settings.max_new_tokens, served.longest_token)


def check_call(served: ServedModel, call: ChatCall) -> None:
    """Check a call against the server's limits and the model's abilities.

    Raises:
        RequestError: it asks for too much.
        ConfigError: its tools are none, or the model knows none.
    """
    settings = served.settings
    if call.num_answers > settings.max_answers:
        raise RequestError(f"n={call.num_answers}; this server gives at most {settings.max_answers}", field="n")
    if len(call.tools) > settings.max_tools:
        raise RequestError(f"tools has {len(call.tools)}; this server takes {settings.max_tools}", field="tools")
    size = schema_size(call.grammar) + sum(schema_size(tool["function"]) for tool in _compiled_tools(call))
    check_grammar_size(size, settings.max_grammar_chars)
    if call.tools:
        check_tools(call.tools, served.tool_format)
        if call.grammar and "json_schema" not in call.grammar and call.tool_choice == "required":
            raise RequestError("an answer has a grammar, or must call a tool; give one of them", field="tool_choice")


def _compiled_tools(call: ChatCall) -> list[Mapping[str, Any]]:
    """Return the tools whose schemas become a grammar (`tool_grammar`); those of the others are only shown."""
    if call.tool_choice == "required":
        return [tool for tool in call.tools if call.tool_name in (None, tool["function"].get("name"))]
    return [tool for tool in call.tools if call.tool_choice != "none" and tool["function"].get("strict")]


@dataclass(frozen=True)
class _Submitted:
    """A request of the engine, and the end of its prompt's text.

    Attributes:
        min_tokens: tokens of an answer before which no stop string ends it.
    """

    handle: RequestHandle
    prompt_tokens: int
    tail: str
    min_tokens: int


def submit_call(served: ServedModel, engine: Engine, call: ChatCall, request_id: str) -> _Submitted:
    """Encode a conversation and submit it; called in a thread, because long ones take time."""
    check_call(served, call)
    limits, settings = limits_of(served), served.settings
    ids = prompt_ids(served, engine, call)
    limits.check_prompt(len(ids))
    tail = engine.tokenizer.decode(ids[-TAIL:], skip_special_tokens=False)
    known, sampling = served.tool_format, with_defaults(served, call.sampling)
    handle = engine.submit(
        ids,
        limits.new_tokens(call.max_new_tokens),
        stop=_stop_of(known, call, tail),
        logprobs=call.wants_logprobs,
        top_logprobs=call.num_top_logprobs,
        n=call.num_answers,
        deadline=settings.request_timeout,
        mask=call_mask(served, engine, call, tail),
        reuse_cache=not settings.exact,
        skip_special_tokens=not _has_markup(known),
        ignore_eos=call.ignores_end,
        speculation=call.speculation,
        repetition_detection=call.detects_repetition,
        request_id=request_id,
        **(sampling if call.ignores_end else with_stop_tokens(served, engine, sampling)),
    )
    return _Submitted(handle, len(ids), tail, sampling.get("min_tokens") or 0)


def _has_markup(known: ToolFormat) -> bool:
    """Return whether answers have more than text, so that special tokens are read and their text is parsed."""
    return known.knows_tools or known.knows_reasoning


def _stop_of(known: ToolFormat, call: ChatCall, tail: str) -> Stop:
    """Return what ends an answer: stop strings in its text, or, where the text has markup, in its content."""
    if not call.stop or not _has_markup(known):
        return call.stop
    spelt = split_stops(known, call.stop)[1]
    return lambda: AnswerStops(_parser(known, call, tail), spelt)


def _parser(known: ToolFormat, call: ChatCall, tail: str, choice: int = 0) -> AnswerParser:
    """Return the parser of one answer's text."""
    if not call.has_parallel_tools:  # a second call is content
        known = replace(known, is_parallel=False)
    tools = call.tools if call.tool_choice != "none" else ()
    return AnswerParser(known, tools, tail, choice, split_stops(known, call.stop)[0], bool(call.grammar))


def prompt_ids(served: ServedModel, engine: Engine, call: ChatCall) -> list[int]:
    """Return the token ids of a conversation; the interfaces give the same ids for the same one.

    Raises:
        RequestError: its text is too long for the context, whatever its tokens are.
    """
    limits_of(served).check_text(sum(len(message["content"]) for message in call.messages))
    shown = call.tools if call.tool_choice != "none" else ()
    tools = [{**tool, "function": _described(tool["function"])} for tool in shown]
    stand_ins, form, options = StandIns(call.messages), served.tool_format.messages, dict(call.options)
    messages = template_messages(served.tool_format, call.messages, tools, stand_ins)
    if tools and form.tools_variable != "tools":
        check_no_control_tokens(tools, served.special_ids)
        options |= {form.tools_variable: tools}
    beside = tools if form.tools_variable == "tools" and not form.tools_in_system else []
    return engine.chat_ids(
        messages, beside or None, options, continue_final_message=call.continues_last, markup=stand_ins.markup
    )


def _described(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function as the template shows it: `strict` is for the server alone."""
    return {name: value for name, value in function.items() if name != "strict"}


def call_mask(served: ServedModel, engine: Engine, call: ChatCall, tail: str) -> GrammarMask | None:
    """Return the mask of a call's grammar, of its tools' calls, or of either; None for free text.

    A grammar binds what follows the model's thoughts, if it writes any, and not the thoughts. Beside tools that may be
    called, the answer is calls or the grammar's text. One that continues a text begins no call, unless it must.

    Args:
        tail: text of the prompt's end.

    Raises:
        ConfigError: the grammar is invalid.
    """
    known, tools = served.tool_format, () if call.tool_choice == "none" else call.tools
    if call.grammar and (not tools or (call.continues_last and call.tool_choice != "required")):
        return compiled_grammar(engine, call.grammar, answer_frame(known, tail, served.special_ids))
    wished = call.tool_choice, call.tool_name, call.has_parallel_tools, tail, served.special_ids, bool(call.grammar)
    lark = tool_grammar(known, tools, *wished, schema_problem=engine.schema_problem)
    if lark is not None and call.grammar and call.tool_choice == "auto":
        return compiled_grammar(engine, call.grammar, lark)
    return None if lark is None else compiled_grammar(engine, {"lark": lark})


def compiled_grammar(engine: Engine, grammar: Mapping[str, Any], frame: str = "") -> GrammarMask:
    """Return a mask whose grammar is compiled before its request waits, so that an error comes before any answer.

    Args:
        frame: as for `Engine.grammar`.

    Raises:
        ConfigError: the grammar is invalid, or exceeds llguidance's limits.
    """
    mask = engine.grammar(**grammar, frame=frame)
    mask.prepare()
    return mask


async def answer_chat(served: ServedModel, call: ChatCall, request_id: str) -> AsyncGenerator[Part, None]:
    """Yield the parts of an answer; leaving the iteration cancels the request.

    Raises:
        RequestError: the call cannot be answered.
    """
    engine = served.engine
    try:
        asked = await asyncio.to_thread(submit_call, served, engine, call, request_id)
        with served.ended_after([asked.handle]):
            yield Began(asked.prompt_tokens)
            async for part in _parts(served, call, asked):
                yield part
    except Exception as error:
        raise served.error_of(error) from error


async def _parts(served: ServedModel, call: ChatCall, asked: _Submitted) -> AsyncGenerator[Part, None]:
    answers = [_Answer(served.tool_format, call, asked, at) for at in range(call.num_answers)]
    async for events in asked.handle.arrivals(served.settings.stream_interval):
        for part in joined_parts([part for event in events for part in answers[event.row].parts(event)]):
            yield part
    generations = asked.handle.results(timeout=0)
    for answer, generation in zip(answers, generations, strict=True):
        for part in answer.finish(generation):
            yield part
        yield answer.ended(generation)
    new_tokens = sum(len(generation.token_ids) for generation in generations)
    reasoning = sum(answer.reasoning_tokens for answer in answers)
    in_thoughts = sum(answer.calls_in_thoughts for answer in answers)
    yield Used(asked.prompt_tokens, asked.handle.cached, new_tokens, reasoning, in_thoughts)


def joined_parts(parts: Sequence[Part]) -> list[Part]:
    """Return parts with neighbouring texts of one kind and answer in one; log probabilities come before all texts."""
    found: list[Part] = [part for part in parts if isinstance(part, TokenRecord)]
    texts = [part for part in parts if not isinstance(part, TokenRecord)]
    for part in sorted(texts, key=lambda part: getattr(part, "choice", 0)):
        last = found[-1] if found else None
        both = _in_one(last, part)
        if both is None:
            found.append(part)
        else:
            found[-1] = both
    return found


def _in_one(first: Part | None, second: Part) -> Part | None:
    """Return two texts in one part; None if they are of different kinds, answers or calls."""
    if isinstance(first, Content | Reasoning | ToolCallArguments) and type(first) is type(second):
        assert isinstance(second, Content | Reasoning | ToolCallArguments), "it is of the same type"
        whole = replace(first, text=first.text + second.text)
        return whole if replace(second, text=whole.text) == whole else None
    return None


class _Answer:
    """The parts of one answer, from its tokens."""

    def __init__(self, known: ToolFormat, call: ChatCall, asked: _Submitted, choice: int) -> None:
        self._choice, self._min_tokens = choice, asked.min_tokens
        self._parser = _parser(known, call, asked.tail, choice) if _has_markup(known) else None
        self._has_called = False
        self._num_tokens = self._num_characters = self.reasoning_tokens = 0

    @property
    def calls_in_thoughts(self) -> int:
        """Number of calls that were read from thoughts which the answer did not close."""
        return 0 if self._parser is None else self._parser.calls_in_thoughts

    def parts(self, event: TokenEvent) -> Sequence[Part]:
        """Return the parts that a token adds."""
        found: list[Part] = []
        if event.logprob is not None:
            found.append(TokenRecord(event.token_id, event.logprob, event.top_logprobs, self._choice))
        self._num_tokens += 1
        pieces = self._pushed(event.text)
        is_drafting = self._parser is not None and self._parser.is_drafting
        self.reasoning_tokens += is_drafting or any(isinstance(piece, Reasoning) for piece in pieces)
        return [*found, *pieces]

    def finish(self, generation: Generation) -> Sequence[Part]:
        """Return the parts that the end adds.

        Args:
            generation: the whole answer; where a time limit has ended it, its last characters come without a token.
        """
        rest = self._pushed(generation.text[self._num_characters :])
        if self._parser is None:
            return rest
        is_cut = generation.finish_reason not in ("end", "stop")
        return [*rest, *self._noted(self._parser.finish(is_cut))]

    def ended(self, generation: Generation) -> Ended:
        """Return why the answer ended, for clients, once it is finished."""
        reason, stop_text = REASONS[generation.finish_reason], generation.stop_reason
        if self._parser is not None and self._parser.stopped_by is not None:
            reason, stop_text = "stop", self._parser.stopped_by
        reason = "tool_calls" if reason == "stop" and self._has_called else reason
        return Ended(reason, stop_text if isinstance(stop_text, str) else None, self._choice)

    def _pushed(self, text: str) -> Sequence[Part]:
        self._num_characters += len(text)
        if self._parser is not None:
            return self._noted(self._parser.push(text, self._num_tokens > self._min_tokens)) if text else ()
        return [Content(text, self._choice)] if text else ()

    def _noted(self, parts: Sequence[Part]) -> Sequence[Part]:
        self._has_called = self._has_called or any(isinstance(part, ToolCallBegin) for part in parts)
        return parts


async def count_prompt(served: ServedModel, call: ChatCall) -> int:
    """Return the number of tokens of a conversation.

    Raises:
        RequestError: it cannot be encoded.
    """
    engine = served.engine
    try:
        return len(await asyncio.to_thread(prompt_ids, served, engine, call))
    except Exception as error:
        raise request_error(error) from error


async def begin(parts: AsyncGenerator[Part, None]) -> AsyncGenerator[Part, None]:
    """Return the same parts after the first was waited for, so that an error comes before any answer is sent."""
    first = await anext(parts)

    async def everything() -> AsyncGenerator[Part, None]:
        async with aclosing(parts):
            yield first
            async for part in parts:
                yield part

    return everything()
