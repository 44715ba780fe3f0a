"""A simulated run of a streaming engine: what /plan and /status answer at any time, for tests of the page."""

import bisect
from dataclasses import dataclass, field
from typing import Any

from streamed_timeline import ring_events

from graphcore.streaming.report import Measured, report_streaming
from graphcore.streaming.timeline import Event

LAYER, TABLE, VECTORS = 1_300_000_000, 1_050_000_000, 40_000_000  # bytes
NUM_SLOTS = 2


def plan_of(num_layers: int, streamed: frozenset[int], budget: int | None, **changes: Any) -> dict[str, Any]:
    """Return what /plan answers: an embedding, a group for each layer, a head that stays, and vectors.

    Args:
        streamed: numbers of the groups that stream; layer n is group n + 1.
    """
    places = ["streamed" if number in streamed else "resident" for number in range(1, num_layers + 1)]
    layers = [
        {"name": f"layers.{n}", "numbers": [n + 1], "bytes": LAYER, "place": place} for n, place in enumerate(places)
    ]
    groups = [
        {"name": "embed_tokens", "numbers": [0], "bytes": TABLE, "place": "resident"},
        *layers,
        {"name": "head", "numbers": [num_layers + 1], "bytes": TABLE, "place": "resident"},
        {"name": "vectors", "numbers": [], "bytes": VECTORS, "place": "resident"},
    ]
    resident = sum(one["bytes"] for one in groups[:-1] if one["place"] == "resident")
    moved = LAYER * len(streamed)
    memory = {
        "weight_bytes": resident + VECTORS + NUM_SLOTS * LAYER * bool(streamed),
        "resident_bytes": resident,
        "slot_bytes": NUM_SLOTS * LAYER * bool(streamed),
        "expert_bytes": 0,
        "vector_bytes": VECTORS,
        "kv_bytes": 2_000_000_000,
        "workspace_bytes": 300_000_000,
        "program_bytes": 100_000_000,
        "buffer_bytes": 20_000_000 * bool(streamed),
        "overhead_bytes": 0,
        "load_peak_bytes": resident,
    }
    memory["total_bytes"] = sum(memory[f"{part}_bytes"] for part in ("weight", "kv", "workspace", "program", "buffer"))
    plan = {
        "model": "llama3_70b",
        "model_type": "llama",
        "device": "cpu",
        "dtype": "bfloat16",
        "graph": "native",
        "context_length": 8192,
        "max_sequences": 8,
        "num_layers": num_layers,
        "weight_bytes": memory["weight_bytes"],
        "kv_bytes": memory["kv_bytes"],
        "budget_bytes": budget,
        "is_streaming": bool(streamed),
        "fits": True,
        "error": None,
        "smallest_budget_bytes": 9_876_543_210,
        "memory": memory,
        "groups": groups,
        "streaming": {
            "policy": "auto",
            "mode": "async",
            "source": "disk" if streamed else None,
            "groups": len(streamed),
            "slots": NUM_SLOTS if streamed else 0,
            "expert_slots": 0,
            "expert_hit_rate": None,
            "mapped_layers": 0,
            "bytes_per_token": moved,
            "expected_bytes_per_token": float(moved),
        },
        "link_bytes_per_second": 6.25e9,
        "memory_bytes": 64_000_000_000,
        "predicted": {"tokens_per_second": 0.05123, "copy_seconds": 18.5, "fetch_seconds": 0, "compute_seconds": 2.0}
        | {"is_overlapped": True},
    }
    return plan | changes


@dataclass
class SimulatedRun:
    """A run whose passes repeat, with its plan.

    Attributes:
        plan: what /plan answers.
        events: all events, in the order in which they ended.
        requests: what /status lists.
    """

    plan: dict[str, Any]
    events: list[Event] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, num_layers: int, streamed: frozenset[int], num_passes: int) -> "SimulatedRun":
        moved = streamed or frozenset({1})  # events are made for at least one group
        made = ring_events(num_passes, num_layers + 2, moved, 0.02, 0.005, nbytes=LAYER // 11)
        plan = plan_of(num_layers, streamed, 24_000_000_000)
        return cls(plan, sorted(made, key=lambda event: event.end))

    def status(self, now: float, limit: int = 600) -> dict[str, Any]:
        """Return what /status answers at a time of the events' clock."""
        ended = self.events[: bisect.bisect_right(self.events, now, key=lambda event: event.end)]
        return {
            "model": self.plan["model"],
            "state": "ready",
            "version": "0.1.0",
            "uptime_seconds": now,
            "time": now,
            "requests": self.requests,
            "totals": {
                "requests": 12,
                "prompt_tokens": 1234,
                "cached_tokens": 100,
                "new_tokens": 5000 + round(20 * now),
            },
            "first_token_seconds": {"count": 12, "median": 0.2134, "p95": 0.4},
            "kv_cache": [
                {"name": "full attention", "page_tokens": 64, "pages": 128, "free": 100, "prefix_only": 12, "shared": 3}
            ],
            "streaming": self.streaming(now, ended, limit) if self.plan["is_streaming"] else None,
        }

    def streaming(self, now: float, ended: list[Event], limit: int) -> dict[str, Any]:
        """Return `streaming` of /status."""
        begin = self.events[0].begin if not ended else min(event.begin for event in ended)
        found = report_streaming(ended, Measured(begin, max(begin, now), 1, 1000))
        running = [event for event in self.events if event.begin <= now < event.end]
        slots = [self.slot(number, running) for number in range(NUM_SLOTS)]
        computing = [event.group for event in running if event.lane == "compute"]
        return {
            "slots": slots,
            "computing_group": computing[0] if computing else None,
            "bytes": found.nbytes,
            "copy_seconds": found.copy_seconds,
            "stall_seconds": found.stall_seconds,
            "hidden_seconds": found.hidden_seconds,
            "expert_hit_rate": None,
            "events": [[one.lane, one.group, one.begin, one.end, one.nbytes, one.worker] for one in ended[-limit:]],
        }

    def slot(self, number: int, running: list[Event]) -> dict[str, Any]:
        """Return a slot's state, by the events that run."""
        order = [group for one in self.plan["groups"] if one["place"] == "streamed" for group in one["numbers"]]
        users = set(order[number::NUM_SLOTS])
        for lane, state in (("compute", "computing"), ("copy", "reading")):
            for event in running:
                if event.lane == lane and event.group in users:
                    return {"slot": number, "group": event.group, "state": state}
        return {"slot": number, "group": None, "state": "free"}


def request(**changes: Any) -> dict[str, Any]:
    """Return an entry of `requests`."""
    usual = {
        "id": "chatcmpl-1",
        "state": "decode",
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "computed_tokens": 30,
        "new_tokens": 10,
        "max_new_tokens": 200,
        "pages": 6,
        "shared_pages": 1,
        "waiting_seconds": 0.0,
        "prefill_seconds": 0.1,
        "decode_seconds": 0.4,
    }
    return usual | changes
