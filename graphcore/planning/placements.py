"""The possible placements of weights, from which the planner takes the best that fits.

# stays    . streams         12 layer groups, 4 of them stream
# . # # . # # . # # . #      spread evenly, so that each copy overlaps with the same amount of compute

Experts are placed in one of four ways:

    all                  every expert is on the device
    host-filled cache    the layers share slots; the host copies what the router chose
    layer slots          each layer has its own slots, filled by the decode step's kernels from page-locked RAM, which
                         holds all experts
    mapped               the first layers' experts are on the device, the others in page-locked RAM: a decode step's
                         kernels read the chosen ones over the link; for a chunk of tokens they are fetched into slots

With mapped experts, each token transfers every chosen expert of the layers that are in RAM; with slots, only the cache
misses. At the same device memory, slots hold the recently used experts. So experts are mapped only where a layer would
have fewer slots than a token has experts, or where RAM does not hold the experts of all layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from graphcore.config.settings import Keeps
from graphcore.planning.sizes import ExpertSizes, WeightSizes
from graphcore.weights.plan import ExpertPlan, Plan

SLOT_SHARE = 4  # mapped experts get slots for 1/4 of a layer's experts if that fits


@dataclass(frozen=True)
class ExpertPlanRequest:
    """The settings that concern the placement of experts.

    Attributes:
        cap: upper limit of the experts' bytes on the device; None for what the budget leaves.
        keeps: share of all matrices that stays on the device: "all", "nothing" or "most".
        are_device_readable: True if experts wait in page-locked memory that the device's kernels can read.
        have_layer_slots: True if such experts may have slots that the kernels fill.
    """

    cap: int | None
    keeps: Keeps
    are_device_readable: bool = False
    have_layer_slots: bool = True


def expert_variants(plan: Plan, experts: ExpertSizes | None, request: ExpertPlanRequest) -> Iterator[Plan]:
    """Yield up to two variants of the plan: all experts resident, and as few experts on the device as possible.

    If all matrices have to stay, only the first; else the first only if nothing else moves and no cap forbids it. A
    model without experts has one variant.
    """
    if experts is None:
        yield plan
        return
    is_capped = request.cap is not None and request.cap < experts.total_nbytes
    if request.keeps == "all" or (not plan.is_streaming and not is_capped):
        yield replace(plan, resident_expert_nbytes=experts.total_nbytes)
    if request.keeps == "all":
        return
    cap = 0 if request.are_device_readable else (request.cap or 0)
    num_slots = max(experts.min_slots, cap // experts.slot_nbytes)
    fewest = _mapped(experts, 0, num_slots) if request.are_device_readable else _cached(experts, num_slots)
    yield replace(plan, experts=fewest)


def with_more_experts(plan: Plan, experts: ExpertSizes, request: ExpertPlanRequest, budget: int) -> Plan:
    """Return the plan with as many experts on the device as the budget, in bytes, allows."""
    assert plan.experts is not None, "there is nothing to grow"
    room = budget - plan.peak_nbytes
    if not plan.experts.are_device_readable:
        if request.cap is not None:
            return plan
        return replace(plan, experts=_cached(experts, plan.experts.num_slots + room // experts.slot_nbytes))
    if request.cap is not None:
        room = min(room, request.cap - plan.experts.nbytes)
    num_slots = plan.experts.num_slots + room // experts.slot_nbytes
    if request.have_layer_slots and num_slots >= experts.top_k * len(experts.expert_nbytes_by_layer):
        layer_slots = replace(_cached(experts, num_slots), are_device_readable=True, has_layer_slots=True)
        return replace(plan, experts=layer_slots)
    layer_nbytes = [experts.experts_per_layer * nbytes for nbytes in experts.expert_nbytes_by_layer]
    layers = 0
    while layers + 1 < len(layer_nbytes) and sum(layer_nbytes[: layers + 1]) <= room:
        layers += 1
    resident = sum(layer_nbytes[:layers])
    wanted = max(experts.experts_per_layer // SLOT_SHARE - experts.min_slots, 0)
    num_slots = experts.min_slots + max(min(wanted, (room - resident) // experts.slot_nbytes), 0)
    return replace(plan, experts=_mapped(experts, layers, num_slots), resident_expert_nbytes=resident)


def _cached(experts: ExpertSizes, num_slots: int) -> ExpertPlan:
    """Return the plan of a cache with `num_slots` slots, but at most one for each expert."""
    return ExpertPlan(
        num_slots=min(num_slots, experts.num_experts),
        slot_nbytes=experts.slot_nbytes,
        num_experts=experts.num_experts,
        num_layers=len(experts.expert_nbytes_by_layer),
        routed_nbytes=experts.top_k * sum(experts.expert_nbytes_by_layer),
        num_routed=experts.top_k * len(experts.expert_nbytes_by_layer),
    )


def _mapped(experts: ExpertSizes, num_resident: int, num_slots: int) -> ExpertPlan:
    """Return the plan of the experts in RAM when those of the first `num_resident` layers stay on the device."""
    left = experts.expert_nbytes_by_layer[num_resident:]
    return ExpertPlan(
        num_slots=num_slots,
        slot_nbytes=experts.slot_nbytes,
        num_experts=experts.experts_per_layer * len(left),
        num_layers=len(left),
        routed_nbytes=experts.top_k * sum(left),
        num_routed=experts.top_k * len(left),
        are_device_readable=True,
    )


@dataclass(frozen=True)
class GroupPlacement:
    """One choice of the groups that stream; the others stay on the device.

    Attributes:
        streamed_groups: indices of the layer groups that stream, from 0.
        is_head_streamed: True if the head's slices stream.
        is_embedding_gathered: True if the embedding's table is not on the device and its rows are fetched; always so
            if a tied head streams.
    """

    streamed_groups: tuple[int, ...]
    is_head_streamed: bool
    is_embedding_gathered: bool

    def num_slices(self, sizes: WeightSizes) -> int:
        """Return the number of the head's slices that stream."""
        return len(sizes.head_slices) if self.is_head_streamed else 0

    def unit_nbytes(self, sizes: WeightSizes) -> list[int]:
        """Return the bytes of each group that streams through slots, in the order of use."""
        slices = sizes.head_slices if self.is_head_streamed else ()
        return [*(sizes.groups[index] for index in self.streamed_groups), *slices]

    def arrival_nbytes(self, sizes: WeightSizes) -> int:
        """Return the bytes of the largest layer group that a device expands on arrival; 0 if it expands none."""
        streamed = self.streamed_groups if sizes.on_link else ()
        return max((sizes.on_link[one] for one in streamed if sizes.on_link[one] < sizes.groups[one]), default=0)

    def resident_nbytes(self, sizes: WeightSizes) -> int:
        """Return the bytes of embedding, layer groups and head that stay, without experts and vectors."""
        layers = sum(sizes.groups) - sum(sizes.groups[index] for index in self.streamed_groups)
        table = 0 if self.is_embedding_gathered else sizes.embedding
        return layers + table + (0 if self.is_head_streamed or sizes.is_tied else sizes.head)

    def draft_nbytes(self, sizes: WeightSizes, keeps: Keeps) -> tuple[int, ...]:
        """Return the possible bytes of a draft model's copies; a draft of what is all resident may be left out.

        What streams is copied; if nothing does, all matrices are whose copies are smaller.
        """
        draft = sizes.draft
        if draft is None:
            return (0,)
        if self.streamed_groups or self.is_head_streamed:
            layers = sum(draft.groups[index] for index in self.streamed_groups)
            return (layers + (draft.head if self.is_head_streamed else 0),)
        return (draft.smaller,) if keeps == "all" else (draft.smaller, 0)

    def streamed_group_numbers(self, sizes: WeightSizes) -> tuple[int, ...]:
        """Return the numbers of the groups that stream; the embedding is group 0, the head's slices are the last."""
        first_slice = len(sizes.groups) + 1
        slices = range(first_slice, first_slice + len(sizes.head_slices)) if self.is_head_streamed else ()
        return (*(index + 1 for index in self.streamed_groups), *slices)


def group_placements(keeps: Keeps, sizes: WeightSizes) -> Iterator[GroupPlacement]:
    """Yield the possible placements; of those that stream the same groups, a gathered embedding comes first."""
    num_groups = len(sizes.groups)
    if keeps == "all":
        yield GroupPlacement((), is_head_streamed=False, is_embedding_gathered=False)
        return
    if keeps == "nothing":
        yield GroupPlacement(tuple(range(num_groups)), is_head_streamed=True, is_embedding_gathered=sizes.has_table)
        return
    for streamed_groups in _choices(sizes.groups):
        for is_head_streamed in (False, True):
            if not sizes.is_tied:
                for is_gathered in (True, False) if sizes.has_table else (False,):
                    yield GroupPlacement(streamed_groups, is_head_streamed, is_embedding_gathered=is_gathered)
            else:
                yield GroupPlacement(streamed_groups, is_head_streamed, is_embedding_gathered=is_head_streamed)


def _choices(groups: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield choices of streamed layer groups: for each count, evenly spread groups.

    If the last group is smaller than the others, also a rotation in which that group stays on the device.
    """
    for count in range(len(groups) + 1):
        streamed_groups = evenly_spaced(count, len(groups))
        yield streamed_groups
        if groups[-1] < groups[0] and len(groups) - 1 in streamed_groups and count < len(groups):
            stays = next(index for index in range(len(groups)) if index not in streamed_groups)
            yield tuple(sorted((index - stays - 1) % len(groups) for index in streamed_groups))


def evenly_spaced(count: int, of: int) -> tuple[int, ...]:
    """Return `count` evenly spaced indices below `of`; their gaps, taken cyclically, differ by at most one."""
    return tuple((2 * index + 1) * of // (2 * count) for index in range(count))
