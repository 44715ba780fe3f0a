"""Ids of requests and answers."""

import re
import secrets

LONGEST_ID = 128  # characters of an X-Request-ID that is kept
_ID = re.compile(r"[!-~]+")  # without spaces, which would look like further fields in the log


def new_id(prefix: str, separator: str = "-") -> str:
    """Return a new id, such as "req-0123456789abcdef01234567"."""
    return f"{prefix}{separator}{secrets.token_hex(12)}"


def request_id_of(given: str | None) -> str:
    """Return the id of a request: a client's X-Request-ID, if it is one, or a new one."""
    kept = (given or "")[:LONGEST_ID]
    return kept if _ID.fullmatch(kept) else new_id("req")
