"""A plan as rows of a table, and as a line of text."""

from collections.abc import Iterator, Sequence

from graphcore.config.byte_sizes import in_words
from graphcore.planning.draft_prediction import DraftPrediction
from graphcore.planning.plan_record import PlannedGroup
from graphcore.planning.prediction import Prediction, speed_in_words
from graphcore.weights.plan import ExpertPlan, Plan, bytes_per_token, expected_bytes_per_token, offloaded_in_words

Row = tuple[str, int, str]
MOST_RUNS = 4  # of layers in a folded row
TIERS = {"disk": "the checkpoint's files", "host": "RAM"}


def verdict_line(plan: Plan, source: str, predictions: Sequence[Prediction], fits: bool) -> str:
    """Return the answer of a plan in one line: whether the model fits, what stays, and how fast it is.

    Args:
        predictions: as for `movement_line`.
    """
    if not fits:
        free = "" if plan.budget is None else f", {in_words(plan.budget)} may be taken"
        return f"does not fit: {in_words(plan.peak_nbytes)} are needed on {plan.device}{free}"
    speed = f"; predicted {speed_in_words(predictions[0].tokens_per_second)} tokens/s" if predictions else ""
    return f"fits: {fit_words(plan, source)}{speed}"


def fit_words(plan: Plan, source: str) -> str:
    """Return what stays on the device with a plan that fits, and what moves."""
    context = f"{plan.context_length} tokens of context"
    if plan.offloaded_kv is not None:
        context += f", whose KV cache is offloaded: {offloaded_in_words(plan.offloaded_kv)}"
    if not plan.is_streaming:
        return f"all weights stay, {in_words(plan.total_nbytes)} on {plan.device} with {context}"
    number = plan.groups.num_layer_groups
    kept = sum(plan.groups.is_resident(group) for group in range(1, number + 1))
    return (
        f"{kept} of {number} layer groups stay, {in_words(plan.total_nbytes)} on {plan.device} with {context}; "
        f"{in_words(expected_bytes_per_token(plan))} are read from {TIERS[source]} for each token"
    )


def group_rows(groups: Sequence[PlannedGroup], is_folded: bool) -> Iterator[Row]:
    """Yield the table's rows for the groups.

    Args:
        is_folded: True if layers of the same size and place share a row, whatever is between them, as where every
            third layer of a file has another format.
    """
    same: dict[tuple[object, ...], list[PlannedGroup]] = {}
    for group in groups:
        alike = (len(group.layers), group.nbytes, group.place)
        same.setdefault(alike if is_folded and group.layers else (group.name,), []).append(group)
    for first, *others in same.values():
        label = _layers_in_words([first, *others]) if others else first.name
        yield label if first.nbytes else f"{label} (the bytes of embed_tokens)", first.nbytes, first.place


def _layers_in_words(groups: Sequence[PlannedGroup]) -> str:
    """Return a label for layers: "layers 0-25 (26, each)"; of many ranges the first three and the last."""
    runs: list[range] = []
    for group in groups:
        if runs and runs[-1].stop == group.layers.start:
            runs[-1] = range(runs[-1].start, group.layers.stop)
        else:
            runs.append(group.layers)
    words = [str(run.start) if len(run) == 1 else f"{run.start}-{run[-1]}" for run in runs]
    shown = ", ".join(words) if len(words) <= MOST_RUNS else f"{', '.join(words[: MOST_RUNS - 1])} ... {words[-1]}"
    number = f"{len(groups)}" if len(groups[0].layers) == 1 else f"{len(groups)} groups"
    return f"layers {shown} ({number}, each)"


def tier_rows(plan: Plan, free: int) -> Iterator[Row]:
    """Yield the table's rows for the device: the bytes that it will hold, and its free bytes."""
    num_kept = sum(plan.groups.is_resident(number) for number in range(1, plan.groups.num_layer_groups + 1))
    yield "resident", plan.groups.resident_nbytes, f"{num_kept} of {plan.groups.num_layer_groups} layer groups"
    if plan.groups.num_slots:
        used = f"{plan.groups.num_slots} for {len(plan.groups.streamed)} groups, {plan.mode}"
        if plan.groups.arrival_nbytes:
            used += f"; {in_words(plan.groups.arrival_nbytes)} are a buffer in which groups arrive"
        yield "slots", plan.groups.slots_nbytes, used
    if plan.experts is not None:
        some = f"{plan.experts.num_slots} of {plan.experts.num_experts} experts"
        yield "expert cache", plan.experts.nbytes, some + _reading(plan.experts)
    if plan.resident_expert_nbytes:
        yield "experts", plan.resident_expert_nbytes, "all" if plan.experts is None else "of the other layers"
    yield "vectors", plan.always_nbytes, ""
    if plan.draft_nbytes:
        yield (
            "draft model",
            plan.draft_nbytes,
            "copies of what streams" if plan.groups.streamed else "copies of what gets smaller",
        )
    offloaded = "" if plan.offloaded_kv is None else f"; {offloaded_in_words(plan.offloaded_kv)}"
    yield "kv cache", plan.kv_nbytes, f"{plan.context_length} tokens{offloaded}"
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
        moves = f"{in_words(expected_bytes_per_token(plan))} move for each token from {TIERS[source]}"
        if plan.experts is not None and plan.experts.expected_hit_rate:
            moves += f" ({in_words(bytes_per_token(plan))} if none of its experts is there)"
    if plan.offloaded_kv is not None:
        moves += f"; up to {in_words(plan.offloaded_kv.read_nbytes)} of keys and values are read from files"
    if not predictions:
        return moves
    predicted, *others = predictions
    keys = f"reading keys and values {predicted.kv_seconds:.3g} s, " if plan.offloaded_kv is not None else ""
    together = ", ".join(f"{speed_in_words(each.tokens_per_second)} with {each.sequences}" for each in others)
    return (
        f"{moves}; predicted {speed_in_words(predicted.tokens_per_second)} tokens/s: copying "
        f"{predicted.copy_seconds + predicted.fetch_seconds:.3g} s, computing {predicted.compute_seconds:.3g} s, {keys}"
        f"{_overlap_in_words(predicted)}; in all {together} sequences"
    )


def drafts_line(predicted: DraftPrediction) -> str:
    """Return a line about the speed that a draft model promises."""
    without = f"{speed_in_words(predicted.tokens_per_second_without)} without a draft model"
    if not predicted.draft_tokens:
        return f"with drafts: none pays, {without}"
    return (
        f"with drafts in {predicted.draft_format}: predicted {speed_in_words(predicted.tokens_per_second)} tokens/s, "
        f"{without}: "
        f"{predicted.draft_tokens} draft tokens of {predicted.draft_seconds:.3g} s and a step of "
        f"{predicted.check_seconds:.3g} s give {predicted.tokens_per_step:.3g} tokens, if {predicted.acceptance:.0%} "
        "of them are accepted"
    )


def _overlap_in_words(predicted: Prediction) -> str:
    if not predicted.is_overlapped:
        return "one after the other"
    shares = predicted.compute_seconds + predicted.busy_seconds > predicted.copy_seconds
    return "at the same time, by the same processors" if shares and predicted.busy_seconds else "at the same time"
