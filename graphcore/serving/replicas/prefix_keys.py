"""Prefix hashes of a request, by which requests that share a prefix reach the replica that has it cached.

    tools, system   user 1   answer 1   user 2 ...
    [-------------- key 1][- key 2 ---][- key 3]     each hashes all text before it

A chat's next turn begins with the whole of its last one, so that it shares that one's last key. Texts are compared, not
token ids: a router needs no tokenizer, and a wrong guess costs time, never an answer.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any

BLOCK_CHARS = 2000  # of a long text, after each of which there is a key: about 500 tokens
SHARED_ROLES = ("system", "developer")  # whose messages many chats have in common: alone they are no key
MOST_KEYS = 512


def prefix_keys(body: bytes) -> tuple[bytes, ...]:
    """Return the prefix hashes of a request body, shortest prefix first; none if it is not a generation request.

    Args:
        body: JSON of a chat, a completion, a response or a message; anything else is taken, too.
    """
    try:
        request = json.loads(body)
        pieces = list(islice(_pieces(request), MOST_KEYS)) if isinstance(request, dict) else []
    except (ValueError, RecursionError):
        return ()
    keys, hashed = list[bytes](), blake2b(digest_size=16)
    for text, is_key in pieces:
        hashed.update(text.encode(errors="surrogatepass"))
        if is_key:
            keys.append(hashed.digest())
    return tuple(keys)


def _pieces(request: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield the prompt's text in pieces, in the model's order, and whether a prefix ends after each."""
    first = [request.get(name) for name in ("tools", "system", "instructions")]
    yield from _blocks(json.dumps(first), ends=False)
    for name in ("messages", "input", "prompt"):
        given = request.get(name)
        for message in given if isinstance(given, list) and name != "prompt" else [given]:
            if message is not None:
                is_shared = isinstance(message, dict) and message.get("role") in SHARED_ROLES
                yield from _blocks(json.dumps(message), ends=not is_shared)


def _blocks(text: str, ends: bool) -> Iterator[tuple[str, bool]]:
    """Yield a text in blocks; a prefix ends after each full block, and after the last block if `ends`."""
    for start in range(0, len(text), BLOCK_CHARS):
        block = text[start : start + BLOCK_CHARS]
        is_last = start + BLOCK_CHARS >= len(text)
        yield block, ends if is_last else True
