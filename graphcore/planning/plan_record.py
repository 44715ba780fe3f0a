"""Memory plans as JSON records, for result.json and GET /plan."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from graphcore.planning.draft_prediction import DraftPrediction
from graphcore.planning.prediction import Prediction
from graphcore.weights.groups import LayerGroup
from graphcore.weights.plan import Plan, bytes_per_token, expected_bytes_per_token


@dataclass(frozen=True)
class PlannedGroup:
    """A group of the model's weights, with its bytes and its place in the plan.

    Attributes:
        numbers: numbers that groups of it have in the plan and the timeline; none if its weights are in no group.
        nbytes: bytes of its weights; 0 for a tied head.
        layers: indices of its layers if it is whole layers; else none.
        parts: names of the parts of a layer that are groups, by their numbers; empty if the numbers are whole layers.
        place: "resident", "streamed" (through slots), "gathered" (row by row), "cached" (experts) or "mapped"
            (experts that kernels read in RAM, each time).
    """

    name: str
    numbers: Sequence[int]
    nbytes: int
    place: str
    parts: Sequence[str] = ()
    layers: range = range(0)


def planned_groups(plan: Plan, layer_groups: Sequence[LayerGroup], expert_nbytes: int) -> list[PlannedGroup]:
    """Return every group of the plan with its place; together they hold all of the model's weights.

    A layer whose matrices are several groups is one row where these have one place.

    Args:
        expert_nbytes: bytes of all experts.
    """
    groups = [
        PlannedGroup(
            "embed_tokens", (0,), plan.groups.group_nbytes[0], "resident" if plan.groups.is_resident(0) else "gathered"
        )
    ]
    if plan.groups.features_nbytes:
        place = "resident" if plan.groups.are_features_resident else "gathered"
        groups.append(PlannedGroup("layers' features", (), plan.groups.features_nbytes, place))
    groups += _layers(plan, layer_groups)
    head = "resident" if plan.groups.is_head_resident else "streamed"
    first = len(layer_groups) + 1
    slices = range(first, first + max(1, len(plan.groups.head_slices)))
    groups.append(PlannedGroup("head", slices, plan.groups.group_nbytes[-1], head))
    groups += _expert_groups(plan, expert_nbytes)
    return [*groups, PlannedGroup("vectors", (), plan.always_nbytes, "resident")]


def _layers(plan: Plan, layer_groups: Sequence[LayerGroup]) -> Iterator[PlannedGroup]:
    """Yield the layer groups; adjacent parts of a layer with one place are joined."""

    def layer_and_place(item: tuple[int, LayerGroup]) -> tuple[range, bool]:
        return item[1].layers, plan.groups.is_resident(item[0])

    for (layers, is_resident), found in groupby(enumerate(layer_groups, start=1), key=layer_and_place):
        numbers, members = zip(*found, strict=True)
        first, last = layers.start, layers.stop - 1
        name = f"layers.{first}" if first == last else f"layers.{first}-{last}"
        parts = [group.part_name for group in members if group.matrices]
        nbytes = sum(plan.groups.group_nbytes[number] for number in numbers)
        whole = layers
        if parts and len(members) < sum(group.layers == layers for group in layer_groups):
            name, whole = f"{name}: {', '.join(parts)}", range(0)
        yield PlannedGroup(name, numbers, nbytes, "resident" if is_resident else "streamed", parts, whole)


def _expert_groups(plan: Plan, nbytes: int) -> Iterator[PlannedGroup]:
    """Yield the experts as one group, or as two where those of some layers are resident."""
    stay = plan.resident_expert_nbytes
    if stay:
        yield PlannedGroup("experts", (), stay, "resident")
    if plan.experts is not None:
        name = f"experts of the last {plan.experts.num_layers}" if stay else "experts"
        yield PlannedGroup(name, (), nbytes - stay, "mapped" if plan.experts.reads_in_place else "cached")


def group_records(groups: Sequence[PlannedGroup]) -> list[dict[str, Any]]:
    """Return the groups with their bytes and places."""
    return [
        {
            "name": one.name,
            "numbers": list(one.numbers),
            "parts": list(one.parts),
            "bytes": one.nbytes,
            "place": one.place,
        }
        for one in groups
    ]


def memory_record(plan: Plan) -> dict[str, Any]:
    """Return the plan's bytes on the device by use, for result.json."""
    return {
        "weight_bytes": plan.weight_nbytes,
        "resident_bytes": plan.groups.resident_nbytes,
        "slot_bytes": plan.groups.slots_nbytes,
        "expert_bytes": plan.resident_expert_nbytes + (0 if plan.experts is None else plan.experts.nbytes),
        "vector_bytes": plan.always_nbytes,
        "draft_bytes": plan.draft_nbytes,
        "kv_bytes": plan.kv_nbytes,
        "workspace_bytes": plan.other.workspace_nbytes,
        "program_bytes": plan.other.program_nbytes,
        "buffer_bytes": plan.other.buffer_nbytes,
        "overhead_bytes": plan.other.overhead_nbytes,
        "total_bytes": plan.total_nbytes,
        "load_peak_bytes": plan.load_peak_nbytes,
    }


def planned_streaming_record(plan: Plan, source: str) -> dict[str, Any]:
    """Return the plan's streamed bytes and slots, for result.json."""
    experts, offloaded = plan.experts, plan.offloaded_kv
    return {
        "policy": plan.policy,
        "mode": plan.mode,
        "source": source if plan.is_streaming else None,
        "groups": len(plan.groups.streamed),
        "slots": plan.groups.num_slots,
        "expert_slots": 0 if experts is None else experts.num_slots,
        "expert_hit_rate": None if experts is None else experts.expected_hit_rate,
        "mapped_layers": experts.num_layers if experts is not None and experts.are_device_readable else 0,
        "bytes_per_token": bytes_per_token(plan),
        "expected_bytes_per_token": expected_bytes_per_token(plan),
        "offloaded_kv_layers": [] if offloaded is None else sorted(offloaded.layers),
        "offloaded_kv_bytes_per_token": 0 if offloaded is None else offloaded.read_nbytes,
    }


def drafts_record(predicted: DraftPrediction | None) -> dict[str, Any] | None:
    """Return the prediction for a draft model as a record; None without one."""
    return None if predicted is None else {**asdict(predicted), "tokens_per_second": predicted.tokens_per_second}


def prediction_record(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Return the predictions as a record; all values are None if the rates are unknown."""
    times = ("copy_seconds", "fetch_seconds", "compute_seconds", "busy_seconds", "is_overlapped", "kv_seconds")
    if not predictions:
        return dict.fromkeys(("tokens_per_second", "tokens_per_second_of", *times))
    one = predictions[0]
    speeds = {str(each.sequences): each.tokens_per_second for each in predictions}
    own = {name: getattr(one, name) for name in times}
    return {"tokens_per_second": one.tokens_per_second, "tokens_per_second_of": speeds, **own}
