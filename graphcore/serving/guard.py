"""Guards every request: key, Host, Origin, content type, size and time of the body.

A website in a browser of this machine cannot use the server: its Origin is refused, as is what it loads without one
(Sec-Fetch-Site), and a Host that is none of the server's names, but resolves to this machine (DNS rebinding).
"""

import asyncio
import hmac
import ipaddress
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from graphcore.serving.page_files import is_page_path
from graphcore.serving.request_errors import RequestError
from graphcore.serving.serve_settings import ServeSettings

OPEN_PATHS = frozenset({"/health", "/ping"})  # what load balancers ask without a key
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
DEEPEST = 200  # levels of lists and objects in a body
MOST_DIGITS = 309  # of a whole number that float64 has room for
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Guard:
    """What a request must have to be read.

    Attributes:
        api_key: key that clients send; None for none.
        hosts: names that `Host` may have; None for any.
        origins: origins of websites that may ask, besides the server's own.
        max_body_bytes: most bytes of a body.
        receive_seconds: most seconds in which a body must arrive.
    """

    api_key: str | None
    hosts: frozenset[str] | None
    origins: frozenset[str]
    max_body_bytes: int
    receive_seconds: float

    @classmethod
    def of(cls, settings: ServeSettings) -> "Guard":
        """Return the guard of a server with these settings."""
        allowed = frozenset(name.lower() for name in settings.allowed_hosts)
        names: frozenset[str] | None = allowed or None
        if is_loopback(settings.host):
            names = LOOPBACK_NAMES | {settings.host.lower()} | allowed
        origins = frozenset(origin.rstrip("/") for origin in settings.cors_origins)
        return cls(settings.api_key, names, origins, settings.max_body_bytes, settings.receive_timeout)

    def check(self, request: Request) -> None:
        """Check the head of a request for one of the server's endpoints.

        Raises:
            RequestError: it may not ask, or its body is no JSON.
        """
        self.check_sender(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json" and not kind.endswith("+json"):
            raise RequestError("the body must be JSON: send Content-Type: application/json", status=415)

    def check_sender(self, request: Request) -> None:
        """Check whether the sender of a request may ask anything, by Host, Origin and key.

        Raises:
            RequestError: the sender may not.
        """
        host = request.headers.get("host", "")
        if self.hosts is not None and host_name(host) not in self.hosts:
            raise RequestError(
                "this server does not answer under that Host; add the name to task.allowed_hosts", status=403
            )
        origin = request.headers.get("origin")
        if origin is not None and not self._is_own(origin, host) and not self.origins & {origin.rstrip("/"), "*"}:
            raise RequestError("websites may not ask this server; add the origin to task.cors_origins", status=403)
        self._check_site(request)
        path = request.scope["path"]  # request.url is made from the Host header, too
        if path not in OPEN_PATHS and not is_page_path(path):
            self._check_key(request)

    def _check_site(self, request: Request) -> None:
        """Refuse cross-site subresource requests (images, scripts, frames), which browsers send without an Origin."""
        headers = request.headers
        is_foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site") and "origin" not in headers
        is_opened = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if is_foreign and not is_opened:
            raise RequestError("websites may not load anything of this server; open it in a tab of its own", status=403)

    def _check_key(self, request: Request) -> None:
        if self.api_key is None:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        given = [request.headers.get("x-api-key", ""), bearer]
        # The bytes of headers are decoded as latin-1, whatever they are.
        if not any(hmac.compare_digest(one.encode("latin-1"), self.api_key.encode()) for one in given):
            raise RequestError(
                "wrong or missing key; send it as Authorization: Bearer KEY or x-api-key: KEY",
                status=401,
                code="invalid_api_key",
            )

    @staticmethod
    def _is_own(origin: str, host: str) -> bool:
        """Return whether an Origin is the server's own page."""
        scheme, _, name = origin.lower().partition("://")
        return scheme in ("http", "https") and bool(name) and name == host.lower()

    async def body(self, request: Request) -> dict[str, Any]:
        """Return the JSON object of a request's body.

        Raises:
            RequestError: it is too large, too slow, or no JSON object.
        """
        return json_object(await self.received(request))

    async def received(self, request: Request) -> bytes:
        """Return a request's body as it came.

        Raises:
            RequestError: it is too large or too slow.
        """
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > self.max_body_bytes:
            raise self._too_large()
        received = bytearray()
        try:
            async with asyncio.timeout(self.receive_seconds):
                async for piece in request.stream():
                    received += piece
                    if len(received) > self.max_body_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise RequestError("the body took too long to arrive", status=408) from None
        return bytes(received)

    def _too_large(self) -> RequestError:
        return RequestError(f"the body is larger than {self.max_body_bytes} bytes (task.max_body_bytes)", status=413)


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is, in UTF-8.

    Raises:
        RequestError: it is none, lists and objects are nested too deeply, or it has a number or a text that an answer
            could not repeat: beyond float64, or with half a surrogate pair.
    """
    try:
        text = body.decode("utf-8-sig")
        found = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_whole)
        if _SURROGATE.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except UnicodeEncodeError:
        raise RequestError("the body has a text with half a surrogate pair (\\ud800 to \\udfff)") from None
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise RequestError("the body must be a JSON object")
    if depth_of(found) > DEEPEST:
        raise RequestError("the body is nested too deeply")
    return found


def depth_of(value: object) -> int:
    """Return how deeply lists and objects are nested."""
    depth, level = 0, [value]
    while level:
        inner: list[object] = []
        for one in level:
            if isinstance(one, Mapping):
                inner.extend(one.values())
            elif isinstance(one, list):
                inner.extend(one)
        depth, level = depth + 1, inner
        if depth > DEEPEST:
            break
    return depth


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _whole(text: str) -> int:
    if len(text.removeprefix("-")) > MOST_DIGITS:
        raise ValueError(f"{text:.20}... is too large a number")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text:.20} is too large a number")
    return value


def is_loopback(host: str) -> bool:
    """Return whether a server that listens on this address can be reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """Return the name of a Host header, without its port; empty if the header is none."""
    found = _HOST.fullmatch(host.lower())
    return (found[1] or found[2]) if found else ""
