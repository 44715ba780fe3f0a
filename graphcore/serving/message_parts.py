"""What all interfaces make of the parts of messages: texts of systems, arguments of earlier calls, pictures.

A client sends its whole conversation with each request. What is refused once is refused for ever, so that what this
server may have sent, and what a tool has returned, is read as far as it goes.
"""

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json

from graphcore.serving.fields import LONGEST_NAME
from graphcore.serving.guard import DEEPEST, depth_of
from graphcore.serving.tool_formats.json_scanner import JsonScanner

_BILLING = re.compile(r"x-anthropic-billing-header:[^\r\n]*[\r\n]*")
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
_OF_NUMBERS = "-+.0123456789eE"
_NOUNS = {"image_url": "image", "input_image": "image", "input_file": "file", "input_audio": "audio"}


def without_billing(text: str) -> str:
    """Return a system prompt without the billing line that Claude Code puts first.

    It differs in each request, so that with it no request would find its prompt in the cache.
    """
    line = _BILLING.match(text)
    return text if line is None else text[line.end() :]


def left_out(kind: str) -> str:
    """Return the text that stands for a part, such as an image, that a tool has returned and the model cannot see."""
    return f"[{_NOUNS.get(kind, kind)[:LONGEST_NAME]} left out]"


def call_arguments(value: object) -> dict[str, Any]:
    """Return the arguments of a call, given as JSON text or as a value, as an object that can be sent as JSON.

    Text that is no JSON, or was cut short, is read as far as it goes: complete pairs are kept. A list of one object is
    that object, and every other value is empty: null, a blank text, a number. Numbers beyond the range of floats become
    its ends, and halves of surrogate pairs U+FFFD; pairs that are nested too deeply for a template are left out.
    """
    found = value
    for _ in range(2):  # some models write the text of a text
        found = _read(found) if isinstance(found, str) else found
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if not isinstance(found, Mapping):
        return {}
    return {name: _sendable(one) for name, one in found.items() if depth_of(one) < DEEPEST - 1}


def _read(text: str) -> object:
    """Return the value of a JSON text up to its first error or its end; None if there is none."""
    # The last number may have had more digits. No pattern finds it: one would start again at each digit of a text.
    prefix = text[: JsonScanner().scan(text)].rstrip(_OF_NUMBERS)
    try:
        return from_json(_ESCAPE.sub(_without_halves, prefix.strip()), allow_partial=True)
    except ValueError:  # no value, or thousands of digits
        return None


def _without_halves(escape: re.Match[str]) -> str:
    return "\\ufffd" if escape["half"] else escape[0]


def _sendable(value: Any) -> Any:
    """Return a JSON value whose numbers are clamped to the range of float64."""
    if isinstance(value, dict):
        return {name: _sendable(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_sendable(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > sys.float_info.max:
        return math.copysign(sys.float_info.max, 1 if value > 0 else -1)
    return value
