"""Sizes, requests and budgets for the planner's tests, drawn and fixed, and a plain account of what a plan takes."""

from itertools import product

from hypothesis import strategies as st

from graphcore.config.settings import KEPT
from graphcore.planning.machine import Memory
from graphcore.planning.planner import Costs, PlanRequest
from graphcore.planning.sizes import DraftSizes, ExpertSizes, WeightSizes
from graphcore.weights.plan import Plan

PLENTY = Memory("cpu", free_nbytes=1 << 50, physical_nbytes=1 << 50)
KV = 10  # bytes for a token
COSTS = Costs(lambda context: KV * context, workspace_nbytes=77, buffer_nbytes=lambda job_nbytes: 33)


def plan_request(
    policy: str, budget: int | None = None, prefetch: int | None = None, mode: str = "async"
) -> PlanRequest:
    """Return a plan request with a context that may not be halved."""
    return PlanRequest(policy, KEPT[policy], budget, prefetch, mode, None, 100, may_halve_context=False)


def equal_sizes(num_groups: int, nbytes: int, is_tied: bool = False) -> WeightSizes:
    """Return a model of equal layer groups whose head is three slices of the same size."""
    head = 3 * nbytes
    return WeightSizes(head, head, (nbytes,) * 3, is_tied, (nbytes,) * num_groups, 11)


@st.composite
def any_sizes(draw: st.DrawFn) -> WeightSizes:
    """Draw a model: groups of one size with a remainder, or of many; tied or not; with experts, a draft, or without."""
    size = st.integers(1, 10_000)
    num_groups, whole = draw(st.integers(1, 12)), draw(size)
    remainder = draw(st.integers(1, whole))
    mixed = tuple(draw(st.lists(size, min_size=num_groups, max_size=num_groups)))
    groups = draw(st.sampled_from([mixed, (*[whole] * (num_groups - 1), remainder)]))
    slices = tuple(draw(st.lists(st.integers(1, max(groups)), min_size=1, max_size=5)))
    is_tied = draw(st.booleans())
    embedding = sum(slices) if is_tied else draw(size)
    count = draw(st.integers(2, 8))
    top_k = draw(st.integers(1, count))
    nbytes = tuple(draw(st.lists(st.integers(1, 500), min_size=1, max_size=num_groups)))
    experts = draw(st.sampled_from([None, ExpertSizes(nbytes, count, top_k, min_slots=top_k)]))
    on_link = draw(st.sampled_from([(), tuple(draw(st.integers(1, one)) for one in groups)]))
    copies = DraftSizes(tuple(nbytes // 3 for nbytes in groups), sum(slices) // 2, draw(st.integers(0, 900)))
    draft = draw(st.sampled_from([None, copies]))
    always = draw(st.integers(0, 50))
    return WeightSizes(embedding, sum(slices), slices, is_tied, groups, always, experts, on_link=on_link, draft=draft)


@st.composite
def any_request(draw: st.DrawFn, policies: tuple[str, ...] = ("off", "on", "auto")) -> PlanRequest:
    """Draw a plan request without a budget."""
    mode = draw(st.sampled_from(["async", "sync"]))
    prefetch = None if mode == "sync" else draw(st.sampled_from([None, 0, 1, 2, 8]))
    cache = draw(st.sampled_from([None, None, 0, 300, 3000]))
    context = draw(st.sampled_from([100, 700, 4096]))
    policy, may_halve, maps = draw(st.sampled_from(policies)), draw(st.booleans()), draw(st.booleans())
    return PlanRequest(policy, KEPT[policy], None, prefetch, mode, cache, context, may_halve, maps)


def account(plan: Plan, sizes: WeightSizes) -> int:
    """Return the bytes on the device, counted group by group from what the plan says of each."""
    total = sizes.always + plan.kv_nbytes + plan.other.workspace_nbytes + plan.other.buffer_nbytes
    total += sum(nbytes for number, nbytes in enumerate(sizes.groups, 1) if plan.groups.is_resident(number))
    first_slice = len(sizes.groups) + 1
    is_head_there = all(plan.groups.is_resident(first_slice + index) for index in range(len(sizes.head_slices)))
    is_table_there = plan.groups.is_resident(0)
    if sizes.is_tied:
        assert is_head_there == is_table_there
        total += sizes.embedding if is_table_there else 0
    else:
        total += (sizes.embedding if is_table_there else 0) + (sizes.head if is_head_there else 0)
    moving = [sizes.groups[number - 1] for number in plan.groups.streamed if number < first_slice]
    moving += [sizes.head_slices[number - first_slice] for number in plan.groups.streamed if number >= first_slice]
    total += plan.groups.num_slots * max(moving, default=0)
    pairs = [
        pair for at, pair in enumerate(zip(sizes.on_link, sizes.groups, strict=False), 1) if at in plan.groups.streamed
    ]
    total += max((arrived for arrived, slot in pairs if arrived < slot), default=0)
    if sizes.experts is not None:
        away = 0 if plan.experts is None else plan.experts.num_layers
        nbytes = sizes.experts.expert_nbytes_by_layer
        total += sizes.experts.experts_per_layer * sum(nbytes[: len(nbytes) - away])
        total += 0 if plan.experts is None else plan.experts.num_slots * max(nbytes)
    if sizes.draft is not None:
        copied = [sizes.draft.groups[number - 1] for number in plan.groups.streamed if number < first_slice]
        copied += [] if is_head_there else [sizes.draft.head]
        total += sum(copied) if plan.groups.streamed else plan.draft_nbytes
        assert plan.groups.streamed or plan.draft_nbytes in (0, sizes.draft.smaller)
    return total


def fewest_streamed(sizes: WeightSizes, num_slots: int, room: int) -> int | None:
    """Return the fewest bytes that can stream in `room` for table, groups, head and slots, or None; tries all subsets.

    For an untied model without experts.
    """
    best = None
    for stays in product((False, True), repeat=len(sizes.groups) + 1):
        *layers, head = stays
        moving = [nbytes for nbytes, stay in zip(sizes.groups, layers, strict=True) if not stay]
        moving += [] if head else sizes.head_slices
        resident = sum(sizes.groups) + sizes.head - sum(moving)
        takes = resident + min(num_slots, len(moving)) * max(moving, default=0)
        if takes <= room and (best is None or sum(moving) < best):
            best = sum(moving)
    return best
