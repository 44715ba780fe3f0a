"""Bodies of GET /status (live state of the engine) and GET /plan (its memory plan, or one for another budget)."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from graphcore.engine.engine import Engine
from graphcore.engine.program_runner import ProgramRunner
from graphcore.engine.request import RequestStatus
from graphcore.engine.ring.lead import LeadBatching
from graphcore.engine.speculation.speculation_record import speculation_record
from graphcore.engine.what_if import BudgetPlan, Sizes, WhatIf, plan_record, unloaded_machine
from graphcore.errors import ConfigError
from graphcore.planning.plan_record import prediction_record
from graphcore.planning.prediction import Prediction
from graphcore.serving.metrics import ServingMetrics
from graphcore.serving.request_errors import without_paths
from graphcore.serving.served_model import ServedModel
from graphcore.streaming.timeline import join_copies

MOST_EVENTS = 2000  # of the timeline in one answer
JOBS_OF_A_COPY = 8  # a group is read in many jobs, each with an event of its own, which are sent as one
P95 = 0.95


def engine_body(engine: Engine, metrics: ServingMetrics, num_events: int) -> dict[str, Any]:
    """Return the engine's part of the body of GET /status.

    Args:
        num_events: most events of the timeline.
    """
    failure = engine.failure
    try:
        statuses = engine.status()
    except ConfigError:  # it is closed, while it is loaded again
        statuses = []
    return {
        "failure": None if failure is None else without_paths(str(failure)),
        "pass_seconds": round(engine.pass_seconds, 3),
        "requests": [request_record(one) for one in statuses],
        "totals": asdict(engine.totals),
        "first_token_seconds": first_token_record(tuple(metrics.recent_first_seconds)),
        "sampling": engine.loaded.sampling.record,
        "speculation": speculation_record(engine),
        "kv_cache": kv_cache_records(engine),
        "ring": ranks_record(engine),
        "streaming": movement_record(engine, num_events) if engine.plan.is_streaming else None,
    }


def request_record(status: RequestStatus) -> dict[str, Any]:
    """Return the progress of a request, with the id under OpenAI's name."""
    fields = asdict(status)
    return {
        "id": fields.pop("request_id"),
        **{name: round(value, 4) if isinstance(value, float) else value for name, value in fields.items()},
    }


def first_token_record(seconds: Sequence[float]) -> dict[str, Any] | None:
    """Return the count, the median and the 95th percentile of times to the first token; None without any."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p95 = ordered[min(int(P95 * len(ordered)), len(ordered) - 1)]
    return {"count": len(ordered), "median": median(ordered), "p95": p95}


def kv_cache_records(engine: Engine) -> list[dict[str, Any]]:
    """Return the page usage of each KV-cache pool; empty for a model without pages."""
    runner = engine.loaded.runner
    tables = runner.pages.tables if isinstance(runner, ProgramRunner) else []
    return [
        {
            "name": f"window of {table.window}" if table.window else "full attention",
            "page_tokens": table.page,
            **asdict(table.use()),
        }
        for table in tables
    ]


def ranks_record(engine: Engine) -> dict[str, Any] | None:
    """Return what each rank of a ring has, and the times of its last passes; None without other ranks."""
    batching, shares = engine.batching, engine.loaded.shares
    if not isinstance(batching, LeadBatching):
        return None
    times = [one if one.passes else None for one in batching.clock.times] or [None] * len(shares)
    parts = [None if one is None else one.own_seconds / one.passes for one in times]
    first = times[0]
    seconds = None if first is None else first.seconds / first.passes
    handed = None if seconds is None else max(0.0, 1.0 - sum(part or 0.0 for part in parts) / seconds)
    return {
        "pass_seconds": seconds,
        "hand_over_share": handed,
        "ranks": [
            {
                "rank": rank,
                "layers": share.layers,
                "weight_bytes": share.weight_nbytes,
                "streamed_bytes": share.streamed_nbytes,
                "part_seconds": part,
            }
            for rank, (share, part) in enumerate(zip(shares, parts, strict=True))
        ],
    }


def movement_record(engine: Engine, num_events: int) -> dict[str, Any]:
    """Return slot states, cumulative counters and recent timeline events of weight streaming."""
    stream = engine.loaded.weight_stream
    activity, moved = stream.policy.activity(), stream.totals.now()
    slots = [{"slot": slot, **asdict(use)} for slot, use in enumerate(activity.slots)]
    most = min(num_events, MOST_EVENTS)
    events = join_copies(stream.timeline.newest(JOBS_OF_A_COPY * most))[-most:] if most else []
    return {
        "slots": slots,
        "computing_group": activity.computing,
        "bytes": moved.nbytes,
        "copy_seconds": round(moved.copy_seconds, 6),
        "hidden_seconds": round(moved.hidden_seconds, 6),
        "hidden_by_drafts_seconds": round(moved.hidden_by_drafts_seconds, 6),
        "stall_seconds": round(moved.stall_seconds, 6),
        "expert_hit_rate": stream.expert_hit_rate,
        "events": [
            [one.lane, one.group, round(one.begin, 6), round(one.end, 6), one.nbytes, one.worker] for one in events
        ],
    }


def running_plan_body(served: ServedModel, engine: Engine, what_if: WhatIf) -> dict[str, Any]:
    """Return the body of GET /plan: the running configuration and its memory plan."""
    running = BudgetPlan(engine.plan, engine.loaded.tier)
    try:
        smallest = what_if.smallest_nbytes()
    except ConfigError:  # the model has one plan only
        smallest = engine.plan.peak_nbytes
    return _plan_body(served, engine, running, None, smallest)


def what_if_body(
    served: ServedModel, engine: Engine, what_if: WhatIf, memory_budget: str | None, sizes: Sizes
) -> dict[str, Any]:
    """Return the plan for another budget and other sizes, in the form of `running_plan_body`; nothing is loaded.

    Args:
        memory_budget: the budget; None is the one that runs.

    Raises:
        ConfigError: the budget is no size, the context is longer than the model's, or the model has one plan only.
    """
    planned = what_if.plan(engine.settings.streaming.memory_budget if memory_budget is None else memory_budget, sizes)
    body = _plan_body(served, engine, planned, what_if.predict(planned), what_if.smallest_nbytes(sizes))
    return {**body, "max_sequences": sizes.max_sequences or body["max_sequences"]}


def _plan_body(
    served: ServedModel, engine: Engine, planned: BudgetPlan, predicted: Prediction | None, smallest: int
) -> dict[str, Any]:
    """Return a plan of the engine's model, with the machine's memory and its measured link.

    Args:
        smallest: bytes of the smallest budget that works.
    """
    plan, choices = planned.plan, engine.choices
    return {
        "model": served.name,
        "share": None if choices.share is None else choices.share.text,
        **plan_record(engine, planned, served.link_rate),
        "dtype": str(choices.dtype).removeprefix("torch."),
        "graph": choices.graph,
        "context_length": plan.context_length,
        "max_sequences": engine.settings.batching.max_sequences,
        "weight_bytes": plan.weight_nbytes,
        "kv_bytes": plan.kv_nbytes,
        "fits": planned.error is None,
        "error": planned.error,
        "smallest_budget_bytes": smallest,
        "memory_bytes": unloaded_machine(engine.loaded).memory.free_nbytes,
        "predicted": None if predicted is None else prediction_record([predicted]),
    }
