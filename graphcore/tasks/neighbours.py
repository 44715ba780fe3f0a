"""What a run lost to other processes on the same processors."""

import time
from dataclasses import dataclass

from graphcore.processors import seconds_queued
from graphcore.tasks.task import Record

WORTH_A_LINE = 0.1  # of the time of a run's threads


@dataclass(frozen=True)
class Neighbourhood:
    """The moment in which a run began.

    Attributes:
        began: seconds of the monotonic clock.
        queued: seconds that this process's threads had waited for a processor by then; None where nobody counts them.
    """

    began: float
    queued: float | None

    @classmethod
    def look(cls) -> "Neighbourhood":
        """Return the present moment."""
        return cls(time.perf_counter(), seconds_queued())

    def record(self, threads: int | None) -> Record:
        """Return what was lost since then.

        Args:
            threads: that compute; None if the run did not come that far.
        """
        now, seconds = seconds_queued(), time.perf_counter() - self.began
        queued = None if now is None or self.queued is None else max(0.0, now - self.queued)
        share = queued / (seconds * threads) if queued is not None and threads and seconds else None
        return {"queued_seconds": queued, "queued_share": share}


def neighbours_line(record: Record) -> str | None:
    """Return a line about what other processes took, if it was much."""
    share = record["queued_share"]
    if share is None or share < WORTH_A_LINE:
        return None
    return (
        f"[the threads waited for a processor for {share:.0%} of the run: other processes use them too; speeds are "
        "lower than this machine's]"
    )
