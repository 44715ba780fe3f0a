"""A plan as rows of a table, and as the fields of result.json."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from graphcore.config.byte_sizes import in_words
from graphcore.tasks.task import Record
from graphcore.weights.plan import Plan
from graphcore.weights.prediction import Prediction

Row = tuple[str, int, str]


@dataclass(frozen=True)
class PlannedGroup:
    """What moves together, or never moves.

    Attributes:
        nbytes: of its weights; a tied head has none of its own.
        place: "resident", "streamed" (through slots), "gathered" (row by row), "cached" (experts) or "mapped"
            (experts that kernels read in RAM).
    """

    name: str
    nbytes: int
    place: str


def planned_groups(plan: Plan, num_layers: int, layer_group_size: int, expert_nbytes: int) -> list[PlannedGroup]:
    """Return every group of the plan with where it lives: together all of the model's weights.

    Args:
        expert_nbytes: of all experts.
    """
    firsts = range(0, num_layers, layer_group_size)
    groups = [PlannedGroup("embed_tokens", plan.group_nbytes[0], "resident" if plan.is_resident(0) else "gathered")]
    for number, first in enumerate(firsts, start=1):
        last = min(first + layer_group_size, num_layers) - 1
        name = f"layers.{first}" if first == last else f"layers.{first}-{last}"
        place = "resident" if plan.is_resident(number) else "streamed"
        groups.append(PlannedGroup(name, plan.group_nbytes[number], place))
    head = "resident" if plan.is_head_resident else "streamed"
    groups.append(PlannedGroup("head", plan.group_nbytes[-1], head))
    groups += _expert_groups(plan, expert_nbytes)
    return [*groups, PlannedGroup("vectors", plan.always_nbytes, "resident")]


def _expert_groups(plan: Plan, nbytes: int) -> Iterator[PlannedGroup]:
    """Yield the experts in one group, or in two where those of some layers stay."""
    stay = plan.resident_expert_nbytes
    if stay:
        yield PlannedGroup("experts", stay, "resident")
    if plan.experts is not None:
        name = f"experts of the last {plan.experts.num_layers}" if stay else "experts"
        yield PlannedGroup(name, nbytes - stay, "mapped" if plan.experts.are_mapped else "cached")


def group_rows(groups: Sequence[PlannedGroup]) -> Iterator[Row]:
    """Yield the rows of the groups; neighbours of one size that live in one place share a row."""
    for (nbytes, place), run_of in groupby(groups, key=lambda group: (group.nbytes, group.place)):
        same = [group.name for group in run_of]
        label = same[0] if len(same) == 1 else f"{same[0]} ... {same[-1]} (each)"
        yield label if nbytes else f"{label} (the bytes of embed_tokens)", nbytes, place


def tier_rows(plan: Plan, free: int) -> Iterator[Row]:
    """Yield what the device will hold, and what it has."""
    num_kept = sum(plan.is_resident(number) for number in range(1, plan.num_layer_groups + 1))
    yield "resident", plan.resident_nbytes, f"{num_kept} of {plan.num_layer_groups} layer groups"
    if plan.num_slots:
        yield "slots", plan.slots_nbytes, f"{plan.num_slots} for {len(plan.streamed)} groups, {plan.mode}"
    if plan.experts is not None:
        some = f"{plan.experts.num_slots} of {plan.experts.num_experts} experts"
        read = f"; a token's are read in RAM, in {plan.experts.num_layers} layers" if plan.experts.are_mapped else ""
        yield "expert cache", plan.experts.nbytes, some + read
    if plan.resident_expert_nbytes:
        yield "experts", plan.resident_expert_nbytes, "all" if plan.experts is None else "of the other layers"
    yield "vectors", plan.always_nbytes, ""
    yield "kv cache", plan.kv_nbytes, f"{plan.context} tokens"
    if plan.workspace_nbytes:
        yield "workspace", plan.workspace_nbytes, ""
    if plan.buffer_nbytes:
        yield "read buffers", plan.buffer_nbytes, ""
    if plan.overhead_nbytes:
        yield "CUDA's libraries and graphs", plan.overhead_nbytes, "an estimate"
    yield "total", plan.total_nbytes, ""
    yield "RAM while loading", plan.load_peak_nbytes, f"{in_words(plan.loading_nbytes)} of it to make weights"
    if plan.budget is not None:
        yield "budget", plan.budget, f"{in_words(plan.budget - plan.peak_nbytes)} unused" if plan_fits(plan) else ""
    yield "free", free, ""


def ram_rows(nbytes: int, free: int) -> Iterator[Row]:
    """Yield what RAM holds besides the device, and what it has."""
    yield "weights and their way", nbytes, "waiting for the device, or passing"
    yield "free", free, ""


def plan_fits(plan: Plan) -> bool:
    """Return whether the plan keeps to its budget."""
    return plan.budget is None or plan.peak_nbytes <= plan.budget


def movement_line(plan: Plan, source: str, predicted: Prediction | None) -> str:
    """Return what moves for a token, and how fast that will be if rates are known."""
    if not plan.is_streaming:
        moves = "nothing moves"
    else:
        wait = {"disk": "the checkpoint's files", "host": "RAM"}[source]
        moves = f"{in_words(plan.expected_bytes_per_token)} move for each token from {wait}"
        if plan.experts is not None and plan.experts.uniform_hit_rate:
            moves += f" ({in_words(plan.bytes_per_token)} if none of its experts is there)"
    if predicted is None:
        return moves
    return (
        f"{moves}; predicted {predicted.tokens_per_second:.3g} tokens/s: copying "
        f"{predicted.copy_seconds + predicted.fetch_seconds:.3g} s, computing {predicted.compute_seconds:.3g} s, "
        f"{'at the same time' if predicted.is_overlapped else 'one after the other'}"
    )


def memory_record(plan: Plan) -> Record:
    """Return the bytes of each tier."""
    return {
        "weight_bytes": plan.weight_nbytes,
        "resident_bytes": plan.resident_nbytes,
        "slot_bytes": plan.slots_nbytes,
        "expert_bytes": plan.resident_expert_nbytes + (0 if plan.experts is None else plan.experts.nbytes),
        "vector_bytes": plan.always_nbytes,
        "kv_bytes": plan.kv_nbytes,
        "workspace_bytes": plan.workspace_nbytes,
        "buffer_bytes": plan.buffer_nbytes,
        "overhead_bytes": plan.overhead_nbytes,
        "total_bytes": plan.total_nbytes,
        "load_peak_bytes": plan.load_peak_nbytes,
    }


def streaming_record(plan: Plan, source: str) -> Record:
    """Return what moves, and through what."""
    experts = plan.experts
    return {
        "policy": plan.policy,
        "mode": plan.mode,
        "source": source if plan.is_streaming else None,
        "groups": len(plan.streamed),
        "slots": plan.num_slots,
        "expert_slots": 0 if experts is None else experts.num_slots,
        "expert_hit_rate": None if experts is None else experts.uniform_hit_rate,
        "mapped_layers": experts.num_layers if experts is not None and experts.are_mapped else 0,
        "bytes_per_token": plan.bytes_per_token,
        "expected_bytes_per_token": plan.expected_bytes_per_token,
    }


def prediction_record(predicted: Prediction | None) -> Record:
    """Return what was predicted; all null without rates."""
    if predicted is None:
        return dict.fromkeys(("tokens_per_second", "copy_seconds", "fetch_seconds", "compute_seconds", "is_overlapped"))
    return {"tokens_per_second": predicted.tokens_per_second, **asdict(predicted)}
