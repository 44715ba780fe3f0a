"""Requests as all ranks of a ring know them: a number for each, its arguments, and what has happened to it since.

    rank 0    Request of a caller  --description-->  Request of the same prompt, without text, on every other rank
              tokens, reasons of ends  --changes-->  the same

Nothing else of a request decides what a pass runs, so schedulers of all ranks that see the same calls in the same order
admit, evict and batch alike (graphcore/engine/batching).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from graphcore.engine.pooling import POOLINGS, Pooled
from graphcore.engine.request import Request
from graphcore.tokenizer.text_stream import StopStrings

Change = tuple[int, list[int], str | None]
"""Number of a request, the tokens that its answer got, and why it ended; None while it has not."""


class Told(NamedTuple):
    """What the other ranks know of a request: its number, how many tokens of its answer, and whether it has ended."""

    number: int
    tokens: int
    has_ended: bool


class LedRequests:
    """The requests that rank 0 has told the other ranks of."""

    def __init__(self) -> None:
        self._told: dict[Request, Told] = {}
        self._numbers = 0

    def numbers(self, requests: Iterable[Request]) -> list[int]:
        """Return the numbers of requests that the others know."""
        return [self._told[request].number for request in requests]

    def describe(self, requests: Iterable[Request]) -> list[dict[str, Any]]:
        """Return descriptions of those of the requests that the others do not know, which know them from then on.

        From now on a request ends only between two passes, when all ranks can learn of it.
        """
        found = []
        for request in requests:
            if request in self._told:
                continue
            request.ends_between_passes = True
            self._told[request] = Told(self._numbers, 0, has_ended=False)
            found.append(description_of(request, self._numbers))
            self._numbers += 1
        return found

    def changes(self) -> list[Change]:
        """Return what has happened to the requests since the last call."""
        found: list[Change] = []
        for request, told in self._told.items():
            new = request.token_ids[told.tokens :]
            if new or request.has_ended != told.has_ended:
                found.append((told.number, new, request.finish_reason))
                self._told[request] = Told(told.number, len(request.token_ids), request.has_ended)
        return found

    def forget(self, running: Collection[Request]) -> None:
        """Forget the requests that have ended and left."""
        for request in [one for one, told in self._told.items() if told.has_ended and one not in running]:
            del self._told[request]


class FollowedRequests:
    """The requests that rank 0 has told this rank of."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def add(self, descriptions: Iterable[dict[str, Any]]) -> None:
        """Add new requests, from rank 0's descriptions (`description_of`)."""
        for description in descriptions:
            self._requests[description["number"]] = described_request(description)

    def of(self, numbers: Iterable[int]) -> list[Request]:
        """Return the requests with these numbers."""
        return [self._requests[number] for number in numbers]

    def apply(self, changes: Iterable[Sequence[Any]]) -> None:
        """Let happen to the requests what has happened on rank 0."""
        for number, token_ids, finish_reason in changes:
            request = self._requests[number]
            request.token_ids.extend(token_ids)
            request.finish_reason = finish_reason

    def forget(self, running: Collection[Request]) -> None:
        """Forget the requests that have ended and left."""
        for number in [one for one, request in self._requests.items() if request.has_ended and request not in running]:
            del self._requests[number]


def description_of(request: Request, number: int) -> dict[str, Any]:
    """Return all of a request that decides what its passes run, as plain data for JSON."""
    return {
        "number": number,
        "prompt_ids": list(request.prompt_ids),
        "max_new_tokens": request.max_new_tokens,
        "reuses_cache": request.reuses_cache,
        "speculates": request.speculates,
        "has_prompt_logprobs": request.num_prompt_logprobs is not None,
        "is_pooled": request.pooled is not None,
    }


def described_request(description: dict[str, Any]) -> Request:
    """Return the request of a description; its tokens and its end come from rank 0."""
    return Request(
        description["prompt_ids"],
        description["max_new_tokens"],
        frozenset(),
        None,
        StopStrings([]),
        num_prompt_logprobs=0 if description["has_prompt_logprobs"] else None,
        pooled=Pooled(POOLINGS[0]) if description["is_pooled"] else None,
        speculates=description["speculates"],
        reuses_cache=description["reuses_cache"],
    )
