"""Peers: engines that comparisons load and time; each is a constant in a module of peers/.

    Peer            compare.py, neighbours.py: a model that fits, prefill and decode timed separately
    StreamingPeer   streaming_compare.py: a model larger than memory, timed token by token

A module of peers/ is imported to learn the names in it, also in an environment that has neither graphcore nor the other
engines: what an engine needs is imported where it is loaded.
"""

import importlib
import pkgutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import peers

OnToken = Callable[[], None]
Kind = TypeVar("Kind", "Peer", "StreamingPeer")


class TimedEngine(ABC):
    """An engine whose prefill and decode can be timed."""

    @abstractmethod
    def weight_nbytes(self) -> int:
        """Return the bytes of weights that a decode step reads, without an embedding table that is not the head."""

    @abstractmethod
    def timed_run(self, prompt_tokens: int, new_tokens: int, depth: int = 0) -> dict[str, object]:
        """Return tokens per second of a "prefill" of that many tokens after `depth` others, and of a "decode"."""


class PeerEngine(TimedEngine):
    """One loaded engine with an empty cache."""

    @abstractmethod
    def prefill(self, token_ids: list[int]) -> int:
        """Empty the cache, run the tokens, return the likeliest next token."""

    @abstractmethod
    def decode(self, token_id: int, new_tokens: int) -> list[int]:
        """Return that many tokens, each the likeliest after the one before; the first run is of `token_id`."""

    def extend(self, token_ids: list[int]) -> int:
        """Run the tokens after those in the cache, return the likeliest next token."""
        raise SystemExit(f"{type(self).__name__} is compared from an empty cache only; leave it out, or --depth")

    def timed_run(self, prompt_tokens: int, new_tokens: int, depth: int = 0) -> dict[str, object]:
        """Return the rates of a prefill and of a decode after it, and the first tokens."""
        prompt = prompt_ids(prompt_tokens)
        if depth:
            self.prefill(prompt_ids(depth))
        began = time.perf_counter()
        token_id = self.extend(prompt) if depth else self.prefill(prompt)
        middle = time.perf_counter()
        chosen = self.decode(token_id, new_tokens)
        ended = time.perf_counter()
        return {
            "prefill": prompt_tokens / (middle - began),
            "decode": new_tokens / (ended - middle),
            "tokens": chosen[:16],
        }


@dataclass(frozen=True)
class StreamedRun:
    """One run of a model that may be larger than memory.

    Attributes:
        source: the model's folder; for llama.cpp its GGUF file.
        budget: bytes of memory for weights, for engines that accept a limit.
        scratch: a folder of the engine's own.
        overrides: settings of graphcore.
    """

    source: str
    threads: int
    prompt_tokens: int
    new_tokens: int
    budget: int | None
    scratch: str
    overrides: tuple[str, ...] = ()

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.new_tokens + 32


class StreamingEngine(ABC):
    """A loaded model that may be larger than memory.

    Attributes:
        packages: packages whose versions a report names.
        prepares: True if the first load writes files that later loads use.
    """

    packages: tuple[str, ...]
    prepares: bool = False

    @abstractmethod
    def __init__(self, run: StreamedRun) -> None:
        """Load the model."""

    @abstractmethod
    def generate(self, token_ids: list[int], new_tokens: int, on_token: OnToken) -> list[int]:
        """Return that many tokens, each the likeliest; `on_token` is called after each."""


@dataclass(frozen=True)
class Peer:
    """An engine for a model that fits in memory.

    Attributes:
        name: name for --engines; graphcore's begin with "graphcore".
        load: function that loads the engine, given a model's file or folder (for graphcore a JSON list of settings),
            the number of threads, and the tokens of context.
    """

    name: str
    load: Callable[[str, int, int], TimedEngine]


@dataclass(frozen=True)
class StreamingPeer:
    """An engine for a model that may be larger than memory; the name is as `Peer` has it."""

    name: str
    engine: type[StreamingEngine]


def find_peers(kind: type[Kind]) -> dict[str, Kind]:
    """Return the peers of a kind by name, in the order of their modules."""
    found: dict[str, Kind] = {}
    for module in sorted(pkgutil.iter_modules(peers.__path__), key=lambda module: module.name):
        values = vars(importlib.import_module(f"peers.{module.name}")).values()
        found |= {value.name: value for value in values if isinstance(value, kind)}
    return found


def prompt_ids(num_tokens: int) -> list[int]:
    """Return the prompt that every engine runs."""
    return [(7 * index) % 1000 + 100 for index in range(num_tokens)]
