"""Liveness of the ranks while they load: a thread on each rank exchanges heartbeats with all others.

    main thread       reads weights     check     reads weights     arrive: waits for the other ranks
    liveness thread   beat              beat      beat              beat              beat

A beat is an allgather in a process group of its own. It says how many exchanges the main thread of each rank has come
to, and whether loading has failed there. If a process ends, its connections end and the beat fails at once; if its
machine vanishes, the beat fails at its limit. Reading weights may take hours, and no wait of the main thread has a
limit but the next beat's.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]  # it has no stubs

from graphcore.threads import start_thread

INTERVAL = 1.0  # seconds between two beats while no rank waits
LIMIT = timedelta(seconds=30)  # in which all ranks take part in a beat, whatever their main threads do
LOADED = 1 << 62  # number of exchanges of a rank that has loaded


class Liveness:
    """Heartbeats of one rank with the others, from its creation to `end` or `close`.

    Args:
        group: process group of all ranks, for nothing but beats; it is freed with the last beat.
        world_size: number of ranks.
        limit: most time in which all ranks take part in a beat.
        interval: seconds between two beats while no rank waits.
    """

    def __init__(self, group: Any, world_size: int, limit: timedelta = LIMIT, interval: float = INTERVAL) -> None:
        self._group, self._limit, self._interval = group, limit, interval
        self._changed = threading.Condition()
        self._own = (0, False)
        self._ranks: Sequence[tuple[int, bool]] = [self._own] * world_size
        self._failure: RuntimeError | None = None
        self._is_closed = False
        self._thread = start_thread(self._run, "graphcore-liveness")

    @property
    def has_failure(self) -> bool:
        """Whether a rank was lost, or says that loading has failed on it."""
        return self._failure is not None or any(failed for _, failed in self._ranks)

    def check(self) -> None:
        """Check that no rank was lost.

        Raises:
            RuntimeError: one was.
        """
        if self._failure is not None:
            raise self._failure

    def arrive(self, *, has_failed: bool = False) -> None:
        """Wait until all ranks have come to the next exchange.

        Args:
            has_failed: True if loading has failed on this rank.

        Raises:
            RuntimeError: a rank was lost.
        """
        number = self._own[0] + 1
        self._say(number, has_failed)
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._least >= number)
            if self._least < number:
                self.check()

    def end(self) -> None:
        """Wait until all ranks have loaded, or one was lost, which the next message to it finds."""
        self._say(LOADED, has_failed=False)
        self._thread.join()

    def close(self) -> None:
        """Take part in no further beat, which then fails on the other ranks.

        A beat ends at its limit. If torch does not end it, its thread is left behind, and keeps the process group.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(self._limit.total_seconds())

    @property
    def _least(self) -> int:
        """The number of exchanges that all ranks have come to."""
        return min(number for number, _ in self._ranks)

    @property
    def _is_over(self) -> bool:
        """Whether no beat follows."""
        return self._is_closed or self._least >= LOADED

    def _say(self, number: int, has_failed: bool) -> None:
        with self._changed:
            self._own = number, has_failed
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while not self._is_over:
                said = self._own
                self._ranks = self._beat(*said)
                with self._changed:
                    self._changed.notify_all()
                    self._changed.wait_for(self._is_due(said), self._interval)
        except RuntimeError as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
        finally:
            self._group = None

    def _is_due(self, said: tuple[int, bool]) -> Callable[[], bool]:
        """Return a function that returns whether to go on at once: this rank waits for others, or has more to say."""
        return lambda: self._is_over or self._least < self._own[0] or self._own != said

    def _beat(self, number: int, has_failed: bool) -> list[tuple[int, bool]]:
        """Return what each rank says."""
        own = torch.tensor([number, has_failed], dtype=torch.int64, device="cpu")
        parts, options = [torch.zeros_like(own) for _ in self._ranks], AllgatherOptions()
        options.timeout = self._limit
        self._group.allgather([parts], [own], options).wait()
        return [(int(part[0]), bool(part[1])) for part in parts]
