"""The fields of every result.json, made without torch, so that a sweep can write them for a job that died.

They include the time that the run lost to neighbours: other processes on the same processors.
"""

import platform
import time
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from graphcore import __version__
from graphcore.processors import seconds_queued
from graphcore.tasks.task import Record

FILE_NAME = "result.json"
WORTH_A_LINE = 0.1  # time lost to other processes is printed if it is at least this share of the threads' time
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "hydra-core")


def minimal_record(task: str | None, settings: dict[str, Any] | None) -> Record:
    """Return the fields that every result has.

    Args:
        task: name of the task; None if it is not known.
        settings: composed settings; None if they are not known.
    """
    return {
        "task": task,
        "status": "ok",
        "error": None,
        "seconds": None,
        "neighbours": {"queued_seconds": None, "queued_share": None},
        "settings": settings,
        "versions": {
            "graphcore": __version__,
            "python": platform.python_version(),
            **package_versions(),
        },
        "machine": {"system": platform.platform(), "cpu": None, "gpu": None},
    }


@cache  # to find the five takes 20 ms, which chats and jobs of a sweep in one process would pay each time
def package_versions() -> dict[str, str]:
    """Return the installed versions of the packages on which results depend."""
    return {name: version(name) for name in PACKAGES}


def failed(record: Record, error: str) -> Record:
    """Return the record with status "failed" and the error."""
    return {**record, "status": "failed", "error": error}


@dataclass(frozen=True)
class ProcessorWait:
    """The state of clock and scheduler when a run began, from which the time lost to other processes is computed.

    Attributes:
        began: seconds of the monotonic clock.
        queued: seconds that this process's threads had waited for a processor; None if the system does not count
            them.
    """

    began: float
    queued: float | None

    @classmethod
    def look(cls) -> "ProcessorWait":
        """Return the current state."""
        return cls(time.perf_counter(), seconds_queued())

    def record(self, threads: int | None) -> Record:
        """Return the record of the time lost to other processes since the run began.

        Args:
            threads: number of computing threads; None if the run ended before it is known.
        """
        now, seconds = seconds_queued(), time.perf_counter() - self.began
        queued = None if now is None or self.queued is None else max(0.0, now - self.queued)
        share = queued / (seconds * threads) if queued is not None and threads and seconds else None
        return {"queued_seconds": queued, "queued_share": share}


def neighbours_line(record: Record) -> str | None:
    """Return a line about the time that other processes took, if it was much; else None."""
    share = record["queued_share"]
    if share is None or share < WORTH_A_LINE:
        return None
    return (
        f"[the threads waited for a processor for {share:.0%} of the run: other processes use them too; speeds are "
        "lower than this machine's]"
    )
