"""The part of result.json about what really ran: model, device, graphs and formats. docs/results.md has every field."""

from collections.abc import Sequence
from dataclasses import asdict

import torch

from graphcore.engine.engine import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.graph.compile import CompileReport
from graphcore.kernels.bandwidth import measure_read_bandwidth
from graphcore.tasks.measuring.weight_reads import decode_roundings, prefill_roundings, weight_formats
from graphcore.tasks.report.startup import cache_state
from graphcore.tasks.task import Record

RATES = ("gb_per_second", "torch_gb_per_second", "native_gb_per_second", "copy_gb_per_second")


def ran_record(engine: Engine, notes: Sequence[str] = ()) -> Record:
    """Return the record of a loaded engine: model, device, dtypes, graph kind, sizes, and notes.

    Args:
        notes: lines about the prompts, which follow those about the engine.
    """
    stats = engine.stats
    return {
        "model": {
            "source": engine.settings.model.checkpoint,
            "model_type": engine.config.model_type,
            "num_hidden_layers": engine.config.num_hidden_layers,
        },
        "device": stats["device"],
        "dtype": stats["dtype"],
        "kv_dtype": str(engine.choices.kv_dtype),
        "quant": quant_record(engine),
        "graph": {
            "kind": stats["graph"],
            "blocks": stats["blocks"],
            "prefill": stats["prefill"],
            "compiled": stats["compiled_graphs"],
            "captured": stats.get("captured_graphs"),
            "captured_bytes": stats.get("captured_bytes"),
            "capture_seconds": stats.get("capture_seconds"),
        },
        "streaming": {"policy": engine.settings.streaming.policy},
        "context_length": engine.choices.context_length,
        "sampling": engine.loaded.sampling.record,
        "threads": torch.get_num_threads(),
        "late_seconds": engine.choices.backend.seconds_late(),
        "memory": {
            "weight_bytes": stats["weight_bytes"],
            "file_bytes": engine.loaded.loader.stored_nbytes,
            "kv_bytes": stats["kv_bytes"],
            "offloaded_kv_bytes": 0 if engine.plan.offloaded_kv is None else engine.plan.offloaded_kv.nbytes,
            "device": device_record(engine),
        },
        "notes": [*engine.notes, *notes],
    }


def device_record(engine: Engine) -> Record | None:
    """Return a GPU's free memory at several moments, including now, and the plan's bytes; None on the CPU."""
    found, plan = engine.loaded.free_memory, engine.plan
    if found is None:
        return None
    found.look()
    return {
        "total_bytes": found.total,
        "context_bytes": found.context,
        "free_before_bytes": found.before,
        "free_loaded_bytes": found.moments.get("loaded"),
        "free_warm_bytes": found.moments.get("warm"),
        "free_lowest_bytes": found.lowest,
        "taken_bytes": found.drop,
        "captured_bytes": engine.stats.get("captured_bytes"),
        "planned_bytes": plan.total_nbytes,
        "budget_bytes": plan.budget,
    }


def quant_record(engine: Engine) -> Record:
    """Return how weights are held, how activations are rounded before them, and the errors of packing at load."""
    asked, runner = engine.settings.quant, engine.runner
    if not isinstance(runner, ProgramRunner):
        return dense_record(engine)
    decoder = runner.builder.decoder
    return {
        "format": asked.format,
        "activations": {
            "asked": asked.activations,
            "prefill": prefill_roundings(decoder),
            "decode": decode_roundings(decoder),
        },
        "weights": weight_formats(decoder, engine.loaded.loader.is_tied),
        "errors": dict(engine.loaded.loader.errors),
    }


def dense_record(engine: Engine) -> Record:
    """Return the record of `quant_record` for a transformers model, whose weights and activations are dense."""
    dense = {
        "format": engine.stats["dtype"],
        "tensors": len(engine.loaded.loader.sources),
        "bytes": engine.plan.weight_nbytes,
    }
    return {
        "format": engine.settings.quant.format,
        "activations": {"asked": engine.settings.quant.activations, "prefill": ["float"], "decode": ["float"]},
        "weights": [dense],
        "errors": {},
    }


def bandwidth_of(engine: Engine) -> Record:
    """Return the read bandwidth of memory, measured now; all null where too little memory is free to measure."""
    found = measure_read_bandwidth(engine.runner.device, engine.choices.backend)
    if found is None:
        return {**dict.fromkeys(RATES), "bytes": 0}
    return {
        "gb_per_second": found.best / 1e9,
        "torch_gb_per_second": found.torch / 1e9,
        "native_gb_per_second": None if found.native is None else found.native / 1e9,
        "copy_gb_per_second": None if found.copied is None else found.copied / 1e9,
        "bytes": found.nbytes,
    }


def share_of(gb_per_second: float | None, bandwidth: Record) -> float | None:
    """Return a rate as a share of the memory's bandwidth; None where one of them is not known."""
    whole = bandwidth["gb_per_second"]
    return None if whole is None or gb_per_second is None else gb_per_second / whole


def compile_record(report: CompileReport) -> Record:
    """Return the time of compiling, and whether the cache on disk was cold or warm."""
    return {**asdict(report), "cache": cache_state(report)}
