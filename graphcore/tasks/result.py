"""The part of result.json that tells what really ran, whatever was asked. docs/results.md has every field."""

from dataclasses import asdict

import torch

from graphcore.engine.engine import Engine
from graphcore.graph.compile import CompileReport
from graphcore.tasks.startup import cache_state
from graphcore.tasks.task import Record


def ran_record(engine: Engine) -> Record:
    """Return model, device, dtypes, graph kind and sizes."""
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


def compile_record(report: CompileReport) -> Record:
    """Return what compiling took and whether the cache on disk was cold or warm."""
    return {**asdict(report), "cache": cache_state(report)}
