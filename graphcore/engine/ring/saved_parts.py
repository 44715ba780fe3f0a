"""Saved caches on a ring: each rank saves and loads the part of its own layers, on its own machine.

    rank 0   FILE            rank 1   FILE.rank1            rank 2   FILE.rank2            ...

A file has its rank's layers in its fingerprint, so that another deal of layers refuses it.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graphcore.engine.cache_fingerprint import fingerprint_of
from graphcore.engine.loading.load_model import LoadedModel
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.queue import RequestQueue
from graphcore.engine.ring.facts import together
from graphcore.engine.ring.lead import LeadBatching
from graphcore.engine.saved_caches import SavedCaches
from graphcore.errors import ConfigError
from graphcore.kvcache.prefix_snapshot import PrefixSnapshot, PrefixSnapshots
from graphcore.kvcache.snapshot_file import read_cache, write_cache
from graphcore.parallel.process_group import ProcessGroup
from graphcore.progress import Progress, ignore_progress

Fingerprint = Callable[[], dict[str, str]]


def save_part(
    ranks: ProcessGroup, copies: PrefixSnapshots, ids: Sequence[int], path: Path, fingerprint: Fingerprint
) -> bool:
    """Write this rank's part of a prompt's prefix; False on all ranks if its pages are not there any more.

    Raises:
        ConfigError: the file cannot be written.
        ParallelError: another rank cannot write its own.
    """
    with together(ranks):
        copy = copies.copy_out(ids)
        if copy is not None:
            write_cache(path, copy, copies, fingerprint())
    return copy is not None


def load_part(ranks: ProcessGroup, copies: PrefixSnapshots, read: Callable[[], PrefixSnapshot]) -> tuple[int, bool]:
    """Put this rank's part into the caches; return how many tokens it holds, and whether there was room for them.

    Args:
        read: function that returns what the rank's file holds.

    Raises:
        ConfigError: the file is not there, is damaged, or belongs to another model; or ranks have other prompts.
        ParallelError: another rank cannot read its own.
    """
    with together(ranks):
        copy = read()
    held = hashlib.sha256(json.dumps([*copy.ids, *copy.shape.firsts, *copy.shape.positions]).encode()).hexdigest()
    others = ranks.all_say(held)
    if any(other != others[0] for other in others):
        rank = next(rank for rank, other in enumerate(others) if other != others[0])
        raise ConfigError(f"the file of rank {rank} has another prompt than that of rank 0; save the cache again")
    return len(copy.ids), copies.copy_in(copy)


def rank_file(path: str, rank: int) -> Path:
    """Return the path of a rank's part."""
    return Path(path if rank == 0 else f"{path}.rank{rank}")


class LeadCaches(SavedCaches):
    """Rank 0's saved caches, with those of all ranks."""

    def __init__(
        self, name: str, loaded: LoadedModel, batching: LeadBatching, scheduler: RequestQueue, on_progress: Progress
    ) -> None:
        super().__init__(name, loaded, batching.snapshots, scheduler, on_progress)
        assert loaded.ranks is not None, "rank 0 of a ring"
        self._ranks = loaded.ranks

    def _write(self, ids: Sequence[int], path: Path, fingerprint: dict[str, str]) -> bool:
        def work() -> bool:
            self._ranks.tell({"call": "save_cache", "ids": list(ids), "file": str(path.absolute())})
            return save_part(self._ranks, self._copies, ids, path, lambda: fingerprint)

        return self._queue.run_alone(self._name, work, lends=False)

    def _read(self, path: Path, fingerprint: dict[str, str]) -> tuple[int, bool]:
        copy = self._checked(path, fingerprint)

        def work() -> tuple[int, bool]:
            self._ranks.tell({"call": "load_cache", "file": str(path.absolute())})
            return load_part(self._ranks, self._copies, lambda: copy)

        return self._queue.run_alone(self._name, work, lends=False)


def follow_cache_call(
    loaded: LoadedModel, runner: ProgramRunner, copies: PrefixSnapshots, message: dict[str, Any]
) -> None:
    """Save or load this rank's part, as rank 0 does.

    Raises:
        GraphcoreError: it cannot, or another rank cannot; rank 0's caller gets the error.
    """
    assert loaded.ranks is not None, "a rank of a ring"
    path = rank_file(message["file"], loaded.ranks.rank)

    def fingerprint() -> dict[str, str]:
        return fingerprint_of(loaded, runner, ignore_progress)

    if message["call"] == "save_cache":
        save_part(loaded.ranks, copies, message["ids"], path, fingerprint)
    else:
        load_part(loaded.ranks, copies, lambda: read_cache(path, copies, fingerprint()))
