"""Requests that come while others run: some together, some after a token of an earlier one, at any machine's pace."""

import random
from collections.abc import Callable, Iterable

from graphcore import Engine
from graphcore.engine.request_handle import RequestHandle

TOGETHER = 4  # requests of a group: they share passes even if the whole group ends before the next one comes
TOKENS = (0, 1, 3)  # tokens of a group's last request that the next group waits for; 0 is none


def submit_staggered(
    engine: Engine, submits: Iterable[Callable[[], RequestHandle]], generator: random.Random
) -> list[RequestHandle]:
    """Return the handles of all requests, in order.

    Args:
        engine: engine that all of them run in.
        submits: functions that submit one request each and return its handle.
        generator: source of the choice how long each group waits for the one before.
    """
    handles: list[RequestHandle] = []
    waiting = list(submits)
    while waiting:
        with engine.holding_back():  # so that none of the group ends before the others are there
            handles += [submit() for submit in waiting[:TOGETHER]]
        del waiting[:TOGETHER]
        tokens = generator.choice(TOKENS)
        if tokens:
            handles[-1].event(tokens - 1)
    return handles
