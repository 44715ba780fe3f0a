"""Errors of requests: what is wrong, where, and the HTTP status; their bodies are those of the interface asked."""

import re
from collections.abc import Mapping
from typing import Any

from graphcore.errors import BusyError, ConfigError, GraphcoreError, TokenizerError
from graphcore.sampling_params import NEUTRAL

RETRY_AFTER = 1  # seconds after which a client may ask again while the queue is full or the model is loading
TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Types in Anthropic's interface by HTTP status; others are api_error from 500 on, and invalid_request_error below."""

NO_THREADS = "thread_unsupported_request"
"""Code of the error for a conversation that the server should keep; by it, clients send the whole one again."""

FIELDS = frozenset({*NEUTRAL, "speculation"})  # those with which the engine's refusals of a value begin

_ABSOLUTE_PATH = re.compile(r"(?<![\w.])/(?:[\w.+@=-]+/)+([\w.+@=-]+)")


class RequestError(Exception):
    """An error that belongs to one request.

    Attributes:
        message: what is wrong, and what may be given.
        field: name of the request's field that is wrong; None if it is no single field.
        status: HTTP status.
        code: name of the error for programs; None for none.
    """

    def __init__(self, message: str, field: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.field, self.status, self.code = message, field, status, code

    @property
    def kind(self) -> str:
        """The error's type, as OpenAI and Anthropic name it."""
        return TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {"Retry-After": str(RETRY_AFTER)} if self.status in (429, 503) else {}


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error, as OpenAI's interface has it."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.field, "code": error.code}}


def anthropic_error(error: RequestError, request_id: str | None = None) -> dict[str, Any]:
    """Return the body of an error, which is also the data of the event "error", as Anthropic's interface has it."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = {"details": {"error_code": NO_THREADS, "unsupported": ["thread"]}} if error.code == NO_THREADS else {}
    return {"type": "error", "error": {"type": kind, "message": error.message, **details}, "request_id": request_id}


def error_body(path: str, request_id: str, error: RequestError) -> dict[str, Any]:
    """Return the body of an error in the form of the interface that was asked under a path."""
    return anthropic_error(error, request_id) if path.startswith("/v1/messages") else openai_error(error)


def request_error(error: BaseException, is_usable: bool = True) -> RequestError:
    """Return the error of a request that the engine has refused or that has failed.

    Args:
        is_usable: False if the engine can answer no request at present.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, BusyError):
        return RequestError(without_paths(str(error)), status=429, code="queue_full")
    if not is_usable:
        return RequestError("the model cannot answer at present; ask again later", status=503, code="not_ready")
    if isinstance(error, GraphcoreError):
        status = 400 if isinstance(error, ConfigError | TokenizerError) else 500  # templates refuse messages, too
        message = without_paths(str(error)).removeprefix("sampling.")
        first = re.match(r"\w*", message)
        return RequestError(message, first[0] if first and first[0] in FIELDS else None, status)
    return RequestError("the request has failed inside the server; its log says why", status=500)


def without_paths(message: str) -> str:
    """Return a message with the last part of each absolute path alone: clients learn nothing about the machine."""
    return _ABSOLUTE_PATH.sub(r"\1", message)
