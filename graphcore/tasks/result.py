"""result.json: what was asked, what ran, what came out. docs/results.md has every field."""

import json
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch

from graphcore import __version__
from graphcore.config.settings import Settings
from graphcore.device import cpu_name
from graphcore.engine.engine import Engine
from graphcore.errors import GraphcoreError
from graphcore.tasks.task import Record

FILE_NAME = "result.json"
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "hydra-core")


class OutputError(GraphcoreError, OSError):
    """A result cannot be written."""


def base_record(settings: Settings, task: str) -> Record:
    """Return the fields that every result has before its task has run."""
    return {
        "task": task,
        "status": "ok",
        "error": None,
        "settings": asdict(settings),
        "versions": {
            "graphcore": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in PACKAGES},
        },
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_name(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def ran_record(engine: Engine) -> Record:
    """Return what really ran, whatever was asked."""
    stats = engine.stats
    return {
        "model": {
            "source": engine.settings.model.checkpoint,
            "model_type": engine.config.model_type,
            "num_hidden_layers": engine.config.num_hidden_layers,
        },
        "device": stats["device"],
        "dtype": stats["dtype"],
        "kv_dtype": str(engine.choices.kv_dtype).removeprefix("torch."),
        "graph": {"kind": stats["graph"], "compiled": stats["compiled_graphs"]},
        "streaming": {"policy": engine.settings.streaming.policy},
        "context_length": engine.choices.context,
        "threads": torch.get_num_threads(),
        "memory": {"weight_bytes": stats["weight_bytes"], "kv_bytes": stats["kv_bytes"]},
        "notes": list(engine.choices.notes),
    }


def write_json(path: Path, record: Record) -> None:
    """Write the record, whole or not at all.

    Raises:
        OutputError: the folder cannot be written to, or the disk is full.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=2, ensure_ascii=False)
                file.write("\n")
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written ({error.strerror}); free space or choose hydra.run.dir=..."
        ) from error


def command() -> str:
    """Return the command line that made this result."""
    return " ".join(sys.argv)
