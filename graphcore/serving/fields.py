"""Fields of requests: read by pydantic, with errors that name the field; those that nobody knows are reported."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from graphcore.serving.request_errors import RequestError

MOST_NAMES = 20  # names of unknown fields that are reported
LONGEST_NAME = 60  # characters of such a name that are reported: they go into a header


class RequestFields(BaseModel):
    """A request's fields; unknown ones are kept apart, in `model_extra`. A field that is null counts as left out."""

    model_config = ConfigDict(extra="allow", strict=False, protected_namespaces=())


RequestFieldsT = TypeVar("RequestFieldsT", bound=BaseModel)


def parse_request(model: type[RequestFieldsT], body: Mapping[str, Any]) -> tuple[RequestFieldsT, list[str]]:
    """Return a request, and the names of its fields that no interface knows.

    Raises:
        RequestError: a field has a wrong type or value, or is missing; the error names it.
    """
    given = {name: value for name, value in body.items() if value is not None}
    try:
        request = model.model_validate(given)
    except ValidationError as error:
        raise _first_error(error) from None
    return request, [str(name)[:LONGEST_NAME] for name in request.model_extra or ()][:MOST_NAMES]


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


def _first_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "list[", "dict[")))
    message = str(first["msg"]).removeprefix("Value error, ")
    return RequestError(f"{where}: {message}" if where else message, field=where or None)
