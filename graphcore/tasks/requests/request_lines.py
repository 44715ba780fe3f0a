"""JSONL files of requests: one JSON object a line, all checked before anything is loaded.

{"id": "a", "prompt": "Why is the sky blue?", "temperature": 0.7, "seed": 1}
{"messages": [{"role": "user", "content": "Name three rivers."}], "max_new_tokens": 32, "stop": ["4."]}
{"prompt_ids": [1, 2, 3]}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from graphcore.config.user_path import STANDARD_STREAM
from graphcore.config.validate import UNLIMITED
from graphcore.engine.arguments import check_messages
from graphcore.errors import ConfigError
from graphcore.registry import nearest
from graphcore.sampling_params import PARAMETERS, WHOLE_NUMBERS, SamplingParams
from graphcore.tasks.requests.prompts import Prompt, checked_prompt
from graphcore.tasks.requests.text_input import LONGEST_FILE, read_text
from graphcore.tokenizer.message_turns import Message

CONTENTS = ("prompt", "prompt_ids", "messages")
SAMPLING = tuple(vars(SamplingParams()))
KEYS = ("id", *CONTENTS, *SAMPLING, "max_new_tokens", "stop")


@dataclass(frozen=True)
class RequestLine(Prompt):
    """A prompt with settings of its own.

    Attributes:
        number: number of the line in the file, from 1.
        fields: the line's JSON object.
    """

    number: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str | int:
        """The request's identity in the file: its id as JSON or, without one, its line number."""
        return json.dumps(self.fields["id"]) if self.fields.get("id") is not None else self.number

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the line sets."""
        return {name: self.fields[name] for name in SAMPLING if self.fields.get(name) is not None}

    @property
    def max_new_tokens(self) -> int | None:
        """The most tokens of its answer; None uses the run's setting."""
        most = self.fields.get("max_new_tokens")
        return None if most is None else int(most)

    @property
    def stops(self) -> list[str] | None:
        """Texts that end its answer; None uses the run's setting."""
        stop = self.fields.get("stop")
        return [stop] if isinstance(stop, str) else stop


def read_request_lines(name: str) -> list[RequestLine]:
    """Return a request for each line that is not blank.

    Args:
        name: path of the file as the user wrote it; "-" is standard input.

    Raises:
        ConfigError: the file cannot be read or has no request, or a line is invalid; the message names file and line.
    """
    text = read_text(name, "task.prompts_jsonl", LONGEST_FILE).split("\n")
    file = "standard input, line " if name == STANDARD_STREAM else f"{Path(name).expanduser()}:"
    lines = [_request(line, f"{file}{number}", number) for number, line in enumerate(text, start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"task.prompts_jsonl={name} holds no prompt; write one JSON object a line")
    seen: dict[str | int, RequestLine] = {}
    for line in lines:
        if line.key in seen:
            raise ConfigError(
                f"{line.where}: id {line.key} is that of line {seen[line.key].number} already; give each its own"
            )
        seen[line.key] = line
    return lines


def _request(text: str, where: str, number: int) -> RequestLine:
    item = _parsed(text, where)
    given = [key for key in CONTENTS if isinstance(item, dict) and item.get(key) is not None]
    if len(given) != 1:
        found = f"{given[0]} and {given[1]}" if given else "none of them"
        raise ConfigError(
            f'{where}: expected an object with one of "prompt": "text", "prompt_ids": [1, 2] and "messages": '
            f'[{{"role": "user", "content": "text"}}], found {found}'
        )
    for key in item:
        if key not in KEYS:
            raise ConfigError(f"{where}: unknown key '{key}'{nearest(key, KEYS)}; known: {', '.join(KEYS)}")
    _check_own(item, where)
    content = _content(item[given[0]], given[0], where)
    checked_prompt(content, where)
    return RequestLine(content, where, number, item)


def _parsed(text: str, where: str) -> Any:
    """Return the JSON value of a line."""
    try:
        item = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_without_doubles)
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        escape = ascii(error.object[error.start])[1:-1]
        raise ConfigError(f"{where}: {escape} is half of a character; write both halves, or the character") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    return item


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object and refuse duplicate keys, of which a parser would drop one."""
    for (before, _), (key, _) in pairwise(sorted(pairs, key=itemgetter(0))):
        if before == key:
            raise ValueError(f"the key {json.dumps(key)} is there twice")
    return dict(pairs)


def _content(value: Any, key: str, where: str) -> str | tuple[Any, ...]:
    """Return a line's prompt: a text, or a tuple of token ids or of messages."""
    match key, value:
        case "prompt", str():
            return value
        case "prompt_ids", [*ids] if all(type(token_id) is int for token_id in ids):
            return tuple(ids)
        case "messages", []:
            return ()
        case "messages", [dict(), *_]:
            return tuple(_messages(value, where))
    expected = {
        "prompt": "a text",
        "prompt_ids": "a list of whole numbers",
        "messages": 'a list of objects with "role" and "content"',
    }
    raise ConfigError(f"{where}: {key} must be {expected[key]}")


def _messages(value: object, where: str) -> Sequence[Message]:
    try:
        return check_messages(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: messages: {error}") from error


def _check_own(item: Mapping[str, Any], where: str) -> None:
    """Refuse values of the wrong type; ranges are checked with the run's own settings. Null counts as absent."""
    for key in (*PARAMETERS, "seed", "max_new_tokens"):
        is_whole = key in (*WHOLE_NUMBERS, "max_new_tokens")
        value = 0 if item.get(key) is None else item[key]
        if type(value) is not int and (type(value) is not float or (is_whole and not value.is_integer())):
            raise ConfigError(f"{where}: {key}={value!r} must be a {'whole ' if is_whole else ''}number")
    if type(item.get("logit_bias")) not in (dict, type(None)):
        raise ConfigError(f"{where}: logit_bias must map token ids to numbers, found {item['logit_bias']!r:.40}")
    if type(item.get("stop_token_ids")) not in (list, type(None)):
        raise ConfigError(f"{where}: stop_token_ids must be a list of token ids, found {item['stop_token_ids']!r:.40}")
    breakers = item.get("dry_sequence_breakers")
    if breakers is not None and not (isinstance(breakers, list) and all(isinstance(text, str) for text in breakers)):
        raise ConfigError(f"{where}: dry_sequence_breakers must be a list of texts, found {breakers!r:.40}")
    most = item.get("max_new_tokens")
    if most is not None and most < 1 and most != UNLIMITED:
        raise ConfigError(f"{where}: max_new_tokens={most} must be at least 1, or -1 for as many as the context allows")
    if type(item.get("id")) not in (str, int, type(None)):
        raise ConfigError(f"{where}: id must be a text or a whole number, found {item['id']!r}")
    stop = item.get("stop")
    stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(isinstance(text, str) and text for text in stops):
        raise ConfigError(f"{where}: stop must be a text that is not empty, or a list of such")
