"""Fields of requests: read by pydantic, with errors that name the field; those that nobody knows are reported."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, ValidationError, model_validator

from graphcore.serving.request_errors import RequestError

MOST_NAMES = 20  # names of unknown fields that are reported
LONGEST_NAME = 60  # characters of such a name that are reported


class _FirstError(FailFast):
    __hash__ = object.__hash__  # as parts of a union must have


Item = TypeVar("Item")
ListOf = Annotated[list[Item], _FirstError()]
"""A list of which only the first wrong item is reported: millions of errors would take gigabytes."""


def at_most(count: int) -> BeforeValidator:
    """Return a check that a mapping has few entries, before they are looked at: each wrong one would be an error."""

    def checked(value: object) -> object:
        if isinstance(value, Mapping) and len(value) > count:
            raise ValueError(f"{len(value)} entries; {count} are the most")
        return value

    return BeforeValidator(checked)


class RequestFields(BaseModel):
    """A request's fields; unknown ones are kept apart, in `model_extra`. A field that is null counts as left out."""

    model_config = ConfigDict(extra="allow", strict=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        """Return the fields that are not null."""
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None}


RequestFieldsT = TypeVar("RequestFieldsT", bound=BaseModel)


def parse_request(model: type[RequestFieldsT], body: Mapping[str, Any]) -> tuple[RequestFieldsT, list[str]]:
    """Return a request, and the names of its fields that no interface knows.

    Raises:
        RequestError: a field has a wrong type or value, or is missing; the error names it.
    """
    try:
        request = model.model_validate(body)
    except ValidationError as error:
        raise _first_error(error, body) from None
    return request, reported_names(_unknown(request))


def reported_names(names: Iterable[str]) -> list[str]:
    """Return names of what is ignored in a request, each once, as many and as long as are reported."""
    return [name[:LONGEST_NAME] for name in islice(dict.fromkeys(names), MOST_NAMES)]


def _unknown(request: BaseModel) -> Iterator[str]:
    """Yield the names of unknown fields, and of those of objects in known ones, such as "reasoning.speed"."""
    yield from request.model_extra or ()
    for field in request.model_fields_set:
        value = getattr(request, field)
        if isinstance(value, RequestFields):
            yield from (f"{field}.{name}" for name in value.model_extra or ())


def refuse_unless(request: BaseModel, neutral: Mapping[str, Sequence[object]]) -> None:
    """Check fields that are known, and of which only values without effect can be taken.

    Args:
        neutral: values without effect of each such field; None always is one.

    Raises:
        RequestError: a field has another value; the error names it.
    """
    for name, values in neutral.items():
        value = getattr(request, name, None)
        if value is not None and not any(value == one and type(value) is type(one) for one in values):
            allowed = " or ".join(repr(one) for one in values) or "nothing"
            raise RequestError(f"{name}={value!r:.60} is not supported; leave it out, or give {allowed}", field=name)


def _first_error(error: ValidationError, body: Mapping[str, Any]) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    where = _place(first["loc"], body, is_missing=first["type"] == "missing")
    message = str(first["msg"]).removeprefix("Value error, ")
    return RequestError(f"{where}: {message}" if where else message, field=where or None)


def _place(steps: Sequence[int | str], body: object, is_missing: bool) -> str:
    """Return the place of an error in the body, such as "tools.0.function".

    Args:
        steps: keys and indices that lead there, and between them names of types of which one may be given.
        is_missing: True if the last one is a field that the body has not.
    """
    names, value = list[str](), body
    for number, step in enumerate(steps, start=1):
        has_key = isinstance(value, Mapping) and step in value
        if has_key or (isinstance(value, list) and isinstance(step, int) and step < len(value)):
            value = value[step]  # type: ignore[index]  # one of the two has it
            names.append(f"{step:.60}" if isinstance(step, str) else str(step))
        elif is_missing and number == len(steps):
            names.append(str(step))
    return ".".join(names)
