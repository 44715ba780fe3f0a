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
from functools import cached_property
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
    def timed_run(self, prompt_tokens: int, new_tokens: int, depth: int = 0, sequences: int = 1) -> dict[str, object]:
        """Return tokens per second of a "prefill" of that many tokens after `depth` others, and of a "decode".

        Of several sequences together, each with a prompt of its own, the tokens of all count.
        """

    def refuse(self, depth: int = 0, sequences: int = 1) -> None:
        """End the comparison if there is a depth, or if there are several sequences."""
        if depth:
            raise SystemExit(f"{type(self).__name__} is compared from an empty cache only; leave it out, or --depth")
        if sequences > 1:
            raise SystemExit(f"{type(self).__name__} is compared with one sequence only; leave it out, or --sequences")


@dataclass
class WholeRuns:
    """Times an engine by what it generates: a prefill is a run of one new token, a decode what a longer run takes more.

    Attributes:
        generate: function that generates so many tokens, each the likeliest, after every prompt.
        num_prompts: prompts so far; no two begin alike, so that no cache of prompts helps.
    """

    generate: Callable[[list[list[int]], int], object]
    num_prompts: int = 0

    def rates(self, prompt_tokens: int, new_tokens: int, sequences: int) -> dict[str, object]:
        """Return what `TimedEngine.timed_run` does."""
        short, long = (self._seconds(prompt_tokens, new, sequences) for new in (1, 1 + new_tokens))
        return {"prefill": sequences * prompt_tokens / short, "decode": sequences * new_tokens / (long - short)}

    def _seconds(self, prompt_tokens: int, new_tokens: int, sequences: int) -> float:
        prompts = [prompt_ids(prompt_tokens, self.num_prompts + index) for index in range(sequences)]
        self.num_prompts += sequences
        began = time.perf_counter()
        self.generate(prompts, new_tokens)
        return time.perf_counter() - began


class GeneratingEngine(TimedEngine):
    """An engine that is timed by whole runs."""

    @abstractmethod
    def run_together(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Generate that many tokens, each the likeliest, after every prompt."""

    def timed_run(self, prompt_tokens: int, new_tokens: int, depth: int = 0, sequences: int = 1) -> dict[str, object]:
        """Return the rates of a run of one new token, and of the tokens by which another run is longer."""
        self.refuse(depth=depth)
        return self.whole_runs.rates(prompt_tokens, new_tokens, sequences)

    @cached_property
    def whole_runs(self) -> WholeRuns:
        """Runs of this engine."""
        return WholeRuns(self.run_together)


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

    def timed_run(self, prompt_tokens: int, new_tokens: int, depth: int = 0, sequences: int = 1) -> dict[str, object]:
        """Return the rates of a prefill and of a decode after it, and the first tokens."""
        self.refuse(sequences=sequences)
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
        packages: packages of a Python environment of its own; none if it is installed beside graphcore.
    """

    name: str
    load: Callable[[str, int, int], TimedEngine]
    packages: tuple[str, ...] = ()


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


def prompt_ids(num_tokens: int, number: int = 0) -> list[int]:
    """Return a prompt that every engine runs; those of up to 1000 numbers begin with different tokens."""
    return [(7 * index + number) % 1000 + 100 for index in range(num_tokens)]
