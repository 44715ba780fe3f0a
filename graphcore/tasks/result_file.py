"""What every result.json holds whatever happened; known without torch, so that a sweep can write for a dead job."""

import platform
from importlib.metadata import version
from typing import Any

from graphcore import __version__
from graphcore.tasks.task import Record

FILE_NAME = "result.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "hydra-core")


def minimal_record(task: str | None, settings: dict[str, Any] | None) -> Record:
    """Return the fields that every result has.

    Args:
        task: None if it is not known.
        settings: as composed; None if they are not known.
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
            **{name: version(name) for name in PACKAGES},
        },
        "machine": {"system": platform.platform(), "cpu": None, "gpu": None},
    }


def failed(record: Record, error: str) -> Record:
    """Return the record as that of a failed run."""
    return {**record, "status": "failed", "error": error}
