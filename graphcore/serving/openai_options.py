"""Fields that several of OpenAI's requests have: sampling, stop strings, grammars, options of streams."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from graphcore.engine.arguments import MOST_BIASES
from graphcore.sampling_params import MOST_BREAKERS
from graphcore.serving.fields import ListOf, RequestFields, at_most
from graphcore.serving.request_errors import RequestError

MOST_STOPS = 16  # stop strings of a request; OpenAI takes 4
MOST_STOP_TOKENS = 4096  # tokens that end an answer; each step looks at them
MOST_RULES = 2000  # rules and terminals of a grammar; with 20,000, llguidance computes for minutes
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][^:\n]*:|::=", re.MULTILINE)  # of Lark, and of GBNF
GRAMMARS = {"regex": "regex", "guided_regex": "regex", "choice": "choice", "guided_choice": "choice"}
"""Fields that hold a grammar, by their names here and in vLLM, and the keyword of `Engine.grammar`."""


class StreamOptions(RequestFields):
    """What a stream has besides the answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(RequestFields):
    """Sampling, as OpenAI's and vLLM's clients send it; None is the server's default."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    dry_multiplier: float | None = Field(None, ge=0)
    dry_base: float | None = Field(None, ge=0)
    dry_allowed_length: int | None = Field(None, ge=0)
    dry_penalty_last_n: int | None = Field(None, ge=-1)
    top_n_sigma: float | None = Field(None, ge=-1)
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0)
    logit_bias: Annotated[dict[str, float], at_most(MOST_BIASES)] | None = None
    stop_token_ids: ListOf[int] | None = Field(None, max_length=MOST_STOP_TOKENS)
    dry_sequence_breakers: ListOf[str] | None = Field(None, max_length=MOST_BREAKERS)
    ignore_eos: bool = False
    repetition_detection: bool = False
    speculation: Literal["off", "auto", "lookup", "self"] | None = None
    seed: int | None = None
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    structured_outputs: dict[str, Any] | None = None
    return_tokens_as_token_ids: bool = False


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "min_tokens",
    "logit_bias",
    "stop_token_ids",
    "dry_sequence_breakers",
    "seed",
)
"""The fields of `SamplingFields` that are sampling parameters of the engine."""


def sampling_of_fields(request: SamplingFields) -> dict[str, Any]:
    """Return the sampling parameters that a request gives, as keywords of `Engine.submit`."""
    given = {name: getattr(request, name) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None}


def stops_of_field(stop: str | Sequence[str] | None, field: str = "stop") -> list[str]:
    """Return the stop strings of a request.

    Args:
        field: name of the field, for messages.

    Raises:
        RequestError: there are too many, or one is empty.
    """
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if len(stops) > MOST_STOPS:
        raise RequestError(f"{field} has {len(stops)} texts; {MOST_STOPS} are the most", field=field)
    if not all(stops):
        raise RequestError(f"{field} has an empty text, which would end every answer at once", field=field)
    return stops


def grammar_of(request: SamplingFields, response_format: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the grammar of an answer as a keyword of `Engine.grammar`; empty for free text.

    Raises:
        RequestError: two are given, or one has no known form.
    """
    found: dict[str, Any] = {}
    for name, value in _grammar_fields(request, response_format):
        if value is None:
            continue
        if found:
            raise RequestError(f"{name}: an answer can have one grammar, and another is given", field=name)
        _check_rules(value, name)
        found = value
    return found


def _check_rules(grammar: Mapping[str, Any], field: str) -> None:
    """Check that a grammar in text has few rules."""
    texts = [grammar[form] for form in ("lark", "gbnf") if isinstance(grammar.get(form), str)]
    num_rules = sum(len(_RULE.findall(text)) for text in texts)
    if num_rules > MOST_RULES:
        raise RequestError(f"{field} has {num_rules} rules; {MOST_RULES} are the most", field=field)


def _grammar_fields(
    request: SamplingFields, response_format: Mapping[str, Any] | None
) -> list[tuple[str, dict[str, Any] | None]]:
    """Return each field that may hold a grammar, with the keyword and value for it."""
    formats = None if response_format is None else format_grammar(response_format, "response_format")
    texts = request.grammar if request.grammar is not None else request.guided_grammar
    schema = request.guided_json
    return [
        ("response_format", formats or None),
        *((name, _keyword(key, getattr(request, name))) for name, key in GRAMMARS.items()),
        ("grammar", None if texts is None else {"gbnf" if "::=" in texts else "lark": texts}),
        ("guided_json", _keyword("json_schema", schema)),
        ("structured_outputs", _structured(request.structured_outputs)),
    ]


def _keyword(key: str, value: object) -> dict[str, Any] | None:
    return None if value is None else {key: value}


def _structured(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the grammar of vLLM's field `structured_outputs`."""
    if not value:
        return None
    keys = {"json": "json_schema", "regex": "regex", "choice": "choice"}
    given = [(key, one) for key, one in value.items() if one is not None and one is not False]
    if len(given) == 1 and given[0][0] in keys:
        return {keys[given[0][0]]: given[0][1]}
    if len(given) == 1 and given[0][0] == "grammar":
        return {"gbnf" if "::=" in str(given[0][1]) else "lark": given[0][1]}
    if len(given) == 1 and given[0][0] == "json_object":
        return {"json_schema": {"type": "object"}}
    raise RequestError(
        "structured_outputs must have one of json, json_object, regex, choice and grammar", field="structured_outputs"
    )


def format_grammar(response_format: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the grammar of a response format: text, json_object or json_schema.

    Args:
        field: name of the field, for messages.

    Raises:
        RequestError: it is none of these, or a schema is missing.
    """
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": response_format.get("schema") or {"type": "object"}}
    if kind == "json_schema":
        inner = response_format.get("json_schema", response_format)
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping):
            raise RequestError(f"{field}.json_schema.schema must be a JSON schema", field=field)
        return {"json_schema": dict(schema)}
    raise RequestError(f"{field}.type={kind!r:.40} must be text, json_object or json_schema", field=field)


def schema_size(grammar: Mapping[str, Any]) -> int:
    """Return the characters of a grammar, for a limit."""
    return sum(len(value if isinstance(value, str) else json.dumps(value)) for value in grammar.values())


def check_grammar_size(size: int, most: int) -> None:
    """Check the characters of all schemas and grammars of a request.

    Raises:
        RequestError: they are too many.
    """
    if size > most:
        raise RequestError(f"schemas of {size} characters; this server takes {most} (task.max_grammar_chars)")
