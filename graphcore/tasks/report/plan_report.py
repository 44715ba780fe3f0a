"""A plan as rows of a table, and as the fields of result.json."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from graphcore.config.byte_sizes import in_words
from graphcore.planning.prediction import Prediction
from graphcore.tasks.task import Record
from graphcore.weights.plan import ExpertPlan, Plan, bytes_per_token, expected_bytes_per_token

Row = tuple[str, int, str]


@dataclass(frozen=True)
class PlannedGroup:
    """A group of the model's weights, with its bytes and its place in the plan.

    Attributes:
        nbytes: bytes of its weights; 0 for a tied head.
        place: "resident", "streamed" (through slots), "gathered" (row by row), "cached" (experts) or "mapped"
            (experts that kernels read in RAM, each time).
    """

    name: str
    nbytes: int
    place: str


def planned_groups(plan: Plan, num_layers: int, layer_group_size: int, expert_nbytes: int) -> list[PlannedGroup]:
    """Return every group of the plan with its place; together they hold all of the model's weights.

    Args:
        expert_nbytes: bytes of all experts.
    """
    firsts = range(0, num_layers, layer_group_size)
    groups = [
        PlannedGroup(
            "embed_tokens", plan.groups.group_nbytes[0], "resident" if plan.groups.is_resident(0) else "gathered"
        )
    ]
    if plan.groups.features_nbytes:
        place = "resident" if plan.groups.are_features_resident else "gathered"
        groups.append(PlannedGroup("layers' features", plan.groups.features_nbytes, place))
    for number, first in enumerate(firsts, start=1):
        last = min(first + layer_group_size, num_layers) - 1
        name = f"layers.{first}" if first == last else f"layers.{first}-{last}"
        place = "resident" if plan.groups.is_resident(number) else "streamed"
        groups.append(PlannedGroup(name, plan.groups.group_nbytes[number], place))
    head = "resident" if plan.groups.is_head_resident else "streamed"
    groups.append(PlannedGroup("head", plan.groups.group_nbytes[-1], head))
    groups += _expert_groups(plan, expert_nbytes)
    return [*groups, PlannedGroup("vectors", plan.always_nbytes, "resident")]


def _expert_groups(plan: Plan, nbytes: int) -> Iterator[PlannedGroup]:
    """Yield the experts as one group, or as two where those of some layers are resident."""
    stay = plan.resident_expert_nbytes
    if stay:
        yield PlannedGroup("experts", stay, "resident")
    if plan.experts is not None:
        name = f"experts of the last {plan.experts.num_layers}" if stay else "experts"
        yield PlannedGroup(name, nbytes - stay, "mapped" if plan.experts.reads_in_place else "cached")


def group_rows(groups: Sequence[PlannedGroup]) -> Iterator[Row]:
    """Yield the table's rows for the groups; adjacent groups of the same size and place share a row."""
    for (nbytes, place), run_of in groupby(groups, key=lambda group: (group.nbytes, group.place)):
        same = [group.name for group in run_of]
        label = same[0] if len(same) == 1 else f"{same[0]} ... {same[-1]} (each)"
        yield label if nbytes else f"{label} (the bytes of embed_tokens)", nbytes, place


def tier_rows(plan: Plan, free: int) -> Iterator[Row]:
    """Yield the table's rows for the device: the bytes that it will hold, and its free bytes."""
    num_kept = sum(plan.groups.is_resident(number) for number in range(1, plan.groups.num_layer_groups + 1))
    yield "resident", plan.groups.resident_nbytes, f"{num_kept} of {plan.groups.num_layer_groups} layer groups"
    if plan.groups.num_slots:
        yield (
            "slots",
            plan.groups.slots_nbytes,
            f"{plan.groups.num_slots} for {len(plan.groups.streamed)} groups, {plan.mode}",
        )
    if plan.experts is not None:
        some = f"{plan.experts.num_slots} of {plan.experts.num_experts} experts"
        yield "expert cache", plan.experts.nbytes, some + _reading(plan.experts)
    if plan.resident_expert_nbytes:
        yield "experts", plan.resident_expert_nbytes, "all" if plan.experts is None else "of the other layers"
    yield "vectors", plan.always_nbytes, ""
    yield "kv cache", plan.kv_nbytes, f"{plan.context_length} tokens"
    if plan.other.workspace_nbytes:
        yield "workspace", plan.other.workspace_nbytes, ""
    if plan.other.program_nbytes:
        yield "decode programs", plan.other.program_nbytes, ""
    if plan.other.buffer_nbytes:
        yield "read buffers", plan.other.buffer_nbytes, ""
    if plan.other.overhead_nbytes:
        yield "CUDA's libraries and graphs", plan.other.overhead_nbytes, "an estimate"
    yield "total", plan.total_nbytes, ""
    yield "RAM while loading", plan.load_peak_nbytes, f"{in_words(plan.other.loading_nbytes)} of it to make weights"
    if plan.budget is not None:
        yield "budget", plan.budget, f"{in_words(plan.budget - plan.peak_nbytes)} unused" if plan_fits(plan) else ""
    yield "free", free, ""


def _reading(experts: ExpertPlan) -> str:
    """Return how a decode step's kernels read experts in RAM; empty if they do not."""
    if experts.has_layer_slots:
        waiting = in_words(experts.num_experts * experts.slot_nbytes)
        return f"; a decode step fetches the others by itself, so all of them wait in locked RAM, {waiting}"
    return f"; a token's are read in RAM, in {experts.num_layers} layers" if experts.are_device_readable else ""


def ram_rows(nbytes: int, free: int) -> Iterator[Row]:
    """Yield the table's rows for RAM: the bytes that it will hold besides the device's, and its free bytes."""
    yield "weights and buffers", nbytes, "weights that wait for the device, or on their way to it"
    yield "free", free, ""


def plan_fits(plan: Plan) -> bool:
    """Return whether the plan stays within its budget."""
    return plan.budget is None or plan.peak_nbytes <= plan.budget


def movement_line(plan: Plan, source: str, predictions: Sequence[Prediction]) -> str:
    """Return a line about the bytes that move for each token, with the predicted speeds if rates are known.

    Args:
        predictions: for one sequence, then for more; empty where rates are not known.
    """
    if not plan.is_streaming:
        moves = "nothing moves"
    else:
        wait = {"disk": "the checkpoint's files", "host": "RAM"}[source]
        moves = f"{in_words(expected_bytes_per_token(plan))} move for each token from {wait}"
        if plan.experts is not None and plan.experts.expected_hit_rate:
            moves += f" ({in_words(bytes_per_token(plan))} if none of its experts is there)"
    if not predictions:
        return moves
    predicted, *others = predictions
    together = ", ".join(f"{each.tokens_per_second:.3g} with {each.sequences}" for each in others)
    return (
        f"{moves}; predicted {predicted.tokens_per_second:.3g} tokens/s: copying "
        f"{predicted.copy_seconds + predicted.fetch_seconds:.3g} s, computing {predicted.compute_seconds:.3g} s, "
        f"{'at the same time' if predicted.is_overlapped else 'one after the other'}; in all {together} sequences"
    )


def memory_record(plan: Plan) -> Record:
    """Return the plan's bytes on the device by use, for result.json."""
    return {
        "weight_bytes": plan.weight_nbytes,
        "resident_bytes": plan.groups.resident_nbytes,
        "slot_bytes": plan.groups.slots_nbytes,
        "expert_bytes": plan.resident_expert_nbytes + (0 if plan.experts is None else plan.experts.nbytes),
        "vector_bytes": plan.always_nbytes,
        "kv_bytes": plan.kv_nbytes,
        "workspace_bytes": plan.other.workspace_nbytes,
        "program_bytes": plan.other.program_nbytes,
        "buffer_bytes": plan.other.buffer_nbytes,
        "overhead_bytes": plan.other.overhead_nbytes,
        "total_bytes": plan.total_nbytes,
        "load_peak_bytes": plan.load_peak_nbytes,
    }


def planned_streaming_record(plan: Plan, source: str) -> Record:
    """Return the plan's streamed bytes and slots, for result.json."""
    experts = plan.experts
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
    }


def prediction_record(predictions: Sequence[Prediction]) -> Record:
    """Return the predictions for result.json; all null without rates."""
    times = ("copy_seconds", "fetch_seconds", "compute_seconds", "is_overlapped")
    if not predictions:
        return dict.fromkeys(("tokens_per_second", "tokens_per_second_of", *times))
    one = predictions[0]
    speeds = {str(each.sequences): each.tokens_per_second for each in predictions}
    own = {name: getattr(one, name) for name in times}
    return {"tokens_per_second": one.tokens_per_second, "tokens_per_second_of": speeds, **own}
