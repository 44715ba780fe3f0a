"""One request and its answer, as the log, the metrics and the headers of the answer have them."""

import json
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from graphcore.serving.chat_call import Began, Ended, Part, Used
from graphcore.serving.ids import request_id_of
from graphcore.serving.metrics import ServingMetrics
from graphcore.serving.page_files import PREFIX
from graphcore.serving.request_errors import RequestError

LOG = logging.getLogger("graphcore.serving")
QUIET = (
    "/health",
    "/ping",
    "/metrics",
    "/status",
    "/",
    PREFIX + "{name:path}",
)  # paths that are asked all the time, and only logged if they fail
UNREADY = 503  # status of /health while the model loads, stalls or ends, which the log has a line of its own for
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # others are quoted, since a header may not end with a space


@dataclass
class HttpExchange:
    """One request and its answer.

    Attributes:
        request: the request.
        request_id: the client's X-Request-ID, or a new one.
        began: time.perf_counter() at its arrival.
        ignored: names of fields that had no effect.
        used: tokens of the answer, when it has ended.
        finish_reason: why the answer ended.
        first_seconds: seconds to the first piece of the answer.
        error: error that has ended a streamed answer.
    """

    request: Request
    request_id: str = ""
    began: float = field(default_factory=time.perf_counter)
    ignored: list[str] = field(default_factory=list)
    used: Used | None = None
    finish_reason: str | None = None
    first_seconds: float | None = None
    error: RequestError | None = None

    def __post_init__(self) -> None:
        """Keep the client's id, or make one."""
        self.request_id = request_id_of(self.request.headers.get("x-request-id"))

    @property
    def endpoint(self) -> str:
        """The path's pattern, so that metrics have few values."""
        return getattr(self.request.scope.get("route"), "path", "unknown")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        names = ", ".join(name if _PLAIN_NAME.fullmatch(name) else json.dumps(name) for name in self.ignored)
        return {"X-Request-ID": self.request_id, **({"X-Ignored-Fields": names} if names else {})}

    def note_part(self, part: Part, metrics: ServingMetrics) -> None:
        """Note what the log and the metrics have of a part of the answer."""
        if isinstance(part, Used):
            self.used = part
        elif isinstance(part, Ended):
            self.finish_reason = part.finish_reason
        elif not isinstance(part, Began):
            self.note_first(metrics)

    def note_first(self, metrics: ServingMetrics) -> None:
        """Note the time of the first piece of the answer."""
        if self.first_seconds is None:
            self.first_seconds = time.perf_counter() - self.began
            metrics.note_first(self.first_seconds)

    def note_end(self, metrics: ServingMetrics, status: int, message: str = "") -> None:
        """Count the request, and write its line into the log, as text and, in `record.facts`, as a mapping.

        Args:
            status: HTTP status of the answer; that of an error in a stream replaces the 200 that was sent.
            message: its error.
        """
        if self.error is not None and status == 200:
            status, message = self.error.status, self.error.message
        metrics.note_request(self.endpoint, status, time.perf_counter() - self.began)
        if self.used is not None:
            metrics.note_tokens(self.used.prompt_tokens, self.used.cached_tokens, self.used.new_tokens)
            metrics.note_calls_in_thoughts(self.used.calls_in_thoughts)
        facts = {name: value for name, value in self._facts(status, message).items() if value not in (None, [], "")}
        is_quiet = self.endpoint in QUIET and (status < 400 or status == UNREADY)
        level = logging.DEBUG if is_quiet else logging.INFO
        line = " ".join(f"{name}={value}" for name, value in facts.items())
        LOG.log(level, "%s", line, extra={"facts": facts})

    def _facts(self, status: int, message: str) -> dict[str, Any]:
        used, first = self.used, self.first_seconds
        return {
            "request_id": self.request_id,
            "path": self.endpoint,
            "status": status,
            "seconds": round(time.perf_counter() - self.began, 3),
            "first_seconds": None if first is None else round(first, 3),
            "prompt_tokens": None if used is None else used.prompt_tokens,
            "cached_tokens": None if used is None else used.cached_tokens,
            "new_tokens": None if used is None else used.new_tokens,
            "finish_reason": self.finish_reason,
            "ignored_fields": ",".join(map(repr, self.ignored)),
            "error": message and repr(message),
        }


Endpoint: TypeAlias = Callable[[HttpExchange, dict[str, Any]], Awaitable[Response]]
"""The function that answers at a path: the request and its JSON body in, the answer out."""


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object on one line: the facts of a request, or a message.

    Args:
        replica: id of the process, which each line then has; None for none.
    """

    def __init__(self, replica: str | None = None) -> None:
        super().__init__()
        self._named = {} if replica is None else {"replica": replica}

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        facts = getattr(record, "facts", None) or {"level": record.levelname, "message": record.getMessage()}
        trace = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({"time": round(record.created, 3), **self._named, **facts, **trace})


def log_requests(form: str, replica: str | None = None) -> None:
    """Write the requests' lines to standard error.

    Args:
        form: text or json.
        replica: id of this process, which each line then has; None for none.
    """
    named = "" if replica is None else f"replica={replica} "
    handler = logging.StreamHandler(sys.stderr)
    lines = JsonLines(replica) if form == "json" else logging.Formatter(f"%(asctime)s {named}%(message)s")
    handler.setFormatter(lines)
    for name, level in (("graphcore.serving", logging.INFO), ("uvicorn", logging.WARNING)):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False
