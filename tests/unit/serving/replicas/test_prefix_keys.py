"""Keys of beginnings: a chat's next turn has the last turn's, and no other chat has."""

import json
from typing import Any

import pytest

from graphcore.serving.replicas.prefix_keys import BLOCK_CHARS, MOST_KEYS, prefix_keys

SYSTEM = {"role": "system", "content": "Be brief."}


def keys(**request: Any) -> tuple[bytes, ...]:
    return prefix_keys(json.dumps(request).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_next_turn_begins_with_the_keys_of_the_last_one() -> None:
    turns: list[dict[str, str]] = [SYSTEM, user("one")]
    before = keys(messages=turns)
    assert len(before) == 1
    for text in ("two", "three"):
        turns += [{"role": "assistant", "content": f"re {text}"}, user(text)]
        now = keys(messages=turns)
        assert now[: len(before)] == before
        assert len(now) == len(before) + 2
        before = now


def test_a_short_system_message_alone_makes_no_two_chats_alike() -> None:
    assert not set(keys(messages=[SYSTEM, user("a")])) & set(keys(messages=[SYSTEM, user("b")]))
    long = {"role": "system", "content": "x" * 2 * BLOCK_CHARS}
    shared = set(keys(messages=[long, user("a")])) & set(keys(messages=[long, user("b")]))
    assert len(shared) == 2, "a key for each whole block"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"tools": [{"name": "f"}]}, {"tools": [{"name": "g"}]}),
        ({"system": "a"}, {"system": "b"}),
        ({"instructions": "a"}, {"instructions": "b"}),
    ],
)
def test_what_comes_before_the_messages_tells_chats_apart(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert not set(keys(messages=[user("a")], **first)) & set(keys(messages=[user("a")], **second))


def test_fields_that_no_prompt_has_make_no_difference() -> None:
    assert keys(messages=[user("a")], temperature=0.5, stream=True) == keys(messages=[user("a")], max_tokens=3)


def test_completions_and_responses_have_keys_too() -> None:
    assert len(keys(prompt="x" * 3 * BLOCK_CHARS)) == 4
    assert len(keys(prompt=[1, 2, 3])) == 1
    assert len(keys(input="hello")) == 1
    assert len(keys(input=[user("a"), user("b")])) == 2


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b'{"messages": 3}'])
def test_any_body_is_taken(body: bytes) -> None:
    assert len(prefix_keys(body)) <= 1


def test_a_lone_surrogate_is_taken() -> None:
    assert len(prefix_keys(rb'{"prompt": "\ud800"}')) == 1


def test_keys_are_bounded() -> None:
    assert len(keys(messages=[user("a")] * 2 * MOST_KEYS)) < MOST_KEYS
