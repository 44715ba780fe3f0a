"""Checks of the arguments of an engine's methods: prompts, token ids, hidden states, sampling parameters.

Legend: B batch, T tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np
from torch import Tensor

from graphcore.config.compose import compose_settings
from graphcore.config.conf_folder import group_options
from graphcore.config.dtype_names import with_real_dtype
from graphcore.config.settings import Settings
from graphcore.config.validate import UNLIMITED
from graphcore.errors import ConfigError
from graphcore.sampling_params import NEUTRAL, WHOLE_NUMBERS, SamplingParams, check_sampling, check_truncation
from graphcore.tokenizer.message_turns import Message
from graphcore.tokenizer.text_stream import StopCondition, StopStrings

Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Tensor | np.ndarray
"""A text, token ids (a list, or a tensor [T]), or the messages of a conversation."""

Stop: TypeAlias = str | Sequence[str] | Callable[[], StopCondition]
"""Texts that end an answer, wherever they stand in it, or a function that returns what ends one answer's text."""

OF_CALLS = ("prompt", "prompt_file", "prompt_ids", "system", "stop", "max_new_tokens", "repetition_detection")
OF_COMMANDS = ("task", "cache", "chat_history", "outputs", "trace", "progress", "debug", "hydra")
DEFAULT_OPTIONS = {"dtype": "auto", "quant": "stored", "streaming": "off", "device": "auto", "graph": "auto"}

MOST_SECONDS = 10**9  # of a deadline
MOST_BIASES = 4096  # tokens of a logit_bias
MOST_TOP_LOGPROBS = 20  # as in OpenAI's interface

FORMS = "give a text, token ids [1, 2, 3], messages [{'role': 'user', 'content': '...'}], or a list of such prompts"


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts, given one prompt or a list of prompts.

    Raises:
        ConfigError: `prompts` is neither, or mixes the two.
    """
    given = _without_tensors(prompts)
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise ConfigError(f"a prompt cannot be of type {type(given).__name__}; {FORMS}")
    parts = [isinstance(item, Integral | Mapping) for item in given]  # of one prompt; else each is a prompt
    if any(parts) and not (all(isinstance(item, Integral) for item in given) or is_conversation(given)):
        raise ConfigError(f"the list mixes prompts, token ids and messages; {FORMS}")
    return cast("list[Prompt]", [given] if any(parts) else list(given))


def is_conversation(prompt: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


def check_messages(messages: object) -> Sequence[Message]:
    """Return the messages of a conversation.

    Raises:
        ConfigError: `messages` is no list of messages, or a message has no role, or nothing besides.
    """
    if not is_conversation(messages):
        raise ConfigError(f"{messages!r:.40} is no list of messages; give [{{'role': 'user', 'content': '...'}}]")
    for index, message in enumerate(messages):
        if "role" not in message or len(message) < 2:
            missing = "content" if "role" in message else "role"
            raise ConfigError(f"message {index} has no '{missing}'; give {{'role': 'user', 'content': '...'}}")
        if not isinstance(message["role"], str):
            raise ConfigError(f"message {index}: role must be a text, found {message['role']!r:.40}")
        content = message.get("content")  # absent or None beside a call of a tool, in a field of its own
        if content is not None and not isinstance(content, str | list | tuple):
            raise ConfigError(f"message {index}: content must be a text or a list of parts, found {content!r:.40}")
    return messages


def load_settings(source: str | Path, options: Mapping[str, str], overrides: str | Sequence[str]) -> Settings:
    """Return the settings that the arguments of `Engine.load` stand for.

    Args:
        source: checkpoint source, or the name of a model group where no file or folder has that name.
        options: config groups that are arguments of their own, each with its option.
        overrides: more settings, or one.

    Raises:
        ConfigError: a setting has no effect on loading, or is given twice with different values.
    """
    text = str(source)
    is_random = text.startswith("random:")  # whose shape comes from a model group
    is_name = text in group_options()["model"] and not Path(text).exists()
    given = [overrides] if isinstance(overrides, str) else list(overrides)
    for override in given:
        if not isinstance(override, str):
            raise ConfigError(f"overrides must be texts such as 'context_length=1024', found {override!r:.40}")
        key, _, value = with_dtype_name(override).lstrip("+").partition("=")
        root = key.partition(".")[0]
        if root in OF_CALLS:
            raise ConfigError(f"overrides: {override} has no effect on loading; give it to generate or stream")
        if root in OF_COMMANDS:
            raise ConfigError(f"overrides: {override} is for the command line; leave it out")
        if key == "model.checkpoint" or (key == "model" and not is_random):
            raise ConfigError(f"overrides: {override} has no effect on an existing source; leave it out")
        if options.get(key, value) not in (value, DEFAULT_OPTIONS.get(key)):
            raise ConfigError(f"overrides: {override} contradicts {key}={options[key]!r}; leave one of them out")
    named = [f"model={text}"] if is_name else []
    chosen = [f"{group}={option}" for group, option in options.items()]
    settings = compose_settings([*named, *chosen, *map(with_dtype_name, given)])
    if not is_name:
        settings.model.checkpoint = text
    return settings


def with_dtype_name(override: str) -> str:
    """Return an override with its dtype as conf/ names it: "dtype=torch.bfloat16" becomes "dtype=bf16".

    Two dtypes, of keys and of values, are quoted, because Hydra takes a comma for a sweep.
    """
    key, _, value = override.partition("=")
    if key == "kv_dtype" and "," in value:
        names = value.strip("'\"")
        return f"{key}='{names}'"
    return with_real_dtype(override)


def token_row(row: object, vocab: int) -> list[int]:
    """Return one sequence's token ids as a list.

    Raises:
        ConfigError: `row` is no sequence, is empty, or holds something else than ids from 0 to `vocab` - 1.
    """
    row = _without_tensors(row)
    if not isinstance(row, Sequence):
        raise ConfigError(f"token ids must be a list for each sequence, [[1, 2, 3]], found {type(row).__name__}")
    if not row:
        raise ConfigError("the prompt is empty; give at least one token")
    for token_id in row:
        if not is_whole(token_id):
            raise ConfigError(f"token ids must be whole numbers, found {token_id!r}")
        if not 0 <= int(token_id) < vocab:
            raise ConfigError(f"token id {token_id} is not in the vocabulary of {vocab} tokens")
    return [int(token_id) for token_id in row]


def equal_rows(rows: object, vocab: int) -> list[list[int]]:
    """Return the token ids of sequences of one length.

    Raises:
        ConfigError: there is no sequence, `token_row` refuses one, or their lengths differ.
    """
    rows = rows.tolist() if isinstance(rows, Tensor | np.ndarray) else rows
    if not isinstance(rows, Sequence) or not rows:
        raise ConfigError("there is no sequence; give at least one, [[1, 2, 3]]")
    checked = [token_row(row, vocab) for row in rows]
    lengths = sorted(set(map(len, checked)))
    if len(lengths) > 1:
        raise ConfigError(
            f"token_ids must be [B, T], found rows of {lengths[0]} and of {lengths[-1]} tokens; call once per length"
        )
    return checked


def check_hidden(hidden_states: Tensor, dim: int) -> None:
    """Check that the hidden states are [B, T, dim], with at least one token.

    Raises:
        ConfigError: the hidden states are of another shape.
    """
    if not isinstance(hidden_states, Tensor):
        raise ConfigError(f"hidden_states must be a torch tensor, found {type(hidden_states).__name__}")
    if hidden_states.ndim != 3 or hidden_states.shape[-1] != dim or not hidden_states.numel():
        raise ConfigError(
            f"hidden_states must be [B, T, {dim}] with at least one token, found {list(hidden_states.shape)}"
        )


def check_count(name: str, value: object) -> None:
    """Check that an argument is a whole number of at least 1.

    Raises:
        ConfigError: it is not.
    """
    if not (is_whole(value) and value >= 1):
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")


def seconds_left(value: object) -> float:
    """Return a deadline, in seconds from now.

    Raises:
        ConfigError: the value is no number above 0.
    """
    seconds = _number("deadline", value)
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"deadline={value!r:.40} must be a number above 0 and at most {MOST_SECONDS}")
    return seconds


def most_new_tokens(value: object, context: int) -> int:
    """Return max_new_tokens; -1 is as many as the context allows.

    Raises:
        ConfigError: the value is no whole number, or is below 1 and not -1.
    """
    number = whole_number("max_new_tokens", value)
    if number < 1 and number != UNLIMITED:
        raise ConfigError(
            f"max_new_tokens={value!r} must be a whole number of at least 1, or -1 for as many as the context allows"
        )
    return context if number == UNLIMITED else number


def stop_condition(stop: Stop | None) -> StopCondition:
    """Return what ends one answer's text.

    Args:
        stop: as for `Engine.submit`; None for nothing.

    Raises:
        ConfigError: `stop` is none of these, or holds an empty text.
    """
    if callable(stop):
        return stop()
    if stop is None:
        return StopStrings([])
    stops = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else None
    if stops is None or not all(isinstance(text, str) for text in stops):
        raise ConfigError(f"stop={stop!r:.40} must be a text or a list of texts")
    return StopStrings(stops)


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Return checked sampling parameters; None is a parameter's neutral value.

    A temperature of 0 that is given turns off top-k, top-p and min-p beside it, since clients send them together.

    Raises:
        ConfigError: a name is unknown, a value is out of range, or there is a top-k, top-p or min-p and no temperature.
    """
    unknown = values.keys() - NEUTRAL.keys()
    if unknown:
        raise ConfigError(f"unknown sampling parameter '{sorted(unknown)[0]}'; known: {', '.join(NEUTRAL)}")
    given: dict[str, Any] = {name: _sampling_value(name, value) for name, value in values.items() if value is not None}
    params = SamplingParams(**given)
    check_sampling(vars(params))
    if "temperature" not in given:
        check_truncation(vars(params))
    return params if params.temperature else params.without_truncation()


def _sampling_value(name: str, value: object) -> object:
    """Return the value of a sampling parameter.

    Raises:
        ConfigError: it is of the wrong type.
    """
    if name == "logit_bias":
        return _biases(value)
    if name == "stop_token_ids":
        ids = list(value) if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str) else [None]
        if not all(map(is_whole, ids)):
            raise ConfigError(f"stop_token_ids={value!r:.40} must be a list of token ids")
        return tuple(map(int, cast("list[int]", ids)))
    if name == "dry_sequence_breakers":
        texts = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"dry_sequence_breakers={value!r:.40} must be a list of texts, such as ['\\n', ':']")
        return texts
    return whole_number(name, value) if name in WHOLE_NUMBERS else _number(name, value)


def _biases(value: object) -> dict[int, float]:
    """Return the biases of tokens; ids may be texts, as JSON has them for keys."""
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        found = {_token_id(token_id): float(_number("logit_bias", bias)) for token_id, bias in cast("Any", pairs)}
        if len(found) > MOST_BIASES:
            raise ConfigError(f"logit_bias has {len(found)} tokens; {MOST_BIASES} are the most")
        return found
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"logit_bias={value!r:.40} must map token ids to numbers, such as {{1234: -5}}") from error


def _token_id(key: object) -> int:
    """Return a token id, which may be a text of digits."""
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    if not is_whole(key):
        raise ValueError(f"{key!r} is no token id")
    return int(key)


def check_token_ids(params: SamplingParams, vocab: int) -> None:
    """Check that the sampling parameters name tokens of the vocabulary.

    Raises:
        ConfigError: one is not; the message names it.
    """
    for name, ids in (
        ("logit_bias", [token_id for token_id, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for token_id in ids:
            if not 0 <= token_id < vocab:
                raise ConfigError(f"{name}: token id {token_id} is not in the vocabulary of {vocab} tokens")


def check_top_logprobs(name: str, value: object) -> int:
    """Return how many of the likeliest tokens are to be recorded.

    Raises:
        ConfigError: the value is no whole number from 0 to MOST_TOP_LOGPROBS.
    """
    if not is_whole(value) or not 0 <= value <= MOST_TOP_LOGPROBS:
        raise ConfigError(f"{name}={value!r:.40} must be a whole number from 0 to {MOST_TOP_LOGPROBS}")
    return int(value)


def check_bool(name: str, value: object, meaning: str) -> None:
    """Check that an argument is True or False; None is an argument left out.

    Args:
        meaning: effect of True, for the message.

    Raises:
        ConfigError: the value is neither.
    """
    if value is not None and not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name}={value!r:.40} must be True or False; True {meaning}")


def _without_tensors(ids: object) -> object:
    """Return token ids as a list if they are a tensor, or a list of tensors without dimensions, as list(tensor) is."""
    if isinstance(ids, Tensor | np.ndarray):
        return ids.tolist()
    if not isinstance(ids, list | tuple):
        return ids
    return [item.item() if isinstance(item, Tensor | np.ndarray) and item.ndim == 0 else item for item in ids]


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer; a bool is not, although it is an int in Python."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole_number(name: str, value: object) -> int:
    """Return an argument that is a whole number, such as 3, 3.0 or one of numpy's.

    Raises:
        ConfigError: it is not.
    """
    number = _number(name, value)
    if isinstance(number, float) and not number.is_integer():
        raise ConfigError(f"{name}={value!r} must be a whole number")
    return int(number)


def _number(name: str, value: object) -> float | int:
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise ConfigError(f"{name}={value!r} must be a number")
    return number


def params_from(params: SamplingParams, first: int) -> SamplingParams:
    """Return the sampling parameters of request number `first` of a call: its seed is the call's plus that number.

    The seed of a request depends on its number in the call, so that the batch size does not change its tokens.
    """
    return replace(params, seed=params.seed + first)
