"""The planner: pure functions from weight sizes, a plan request and a budget to a plan. Nothing is read or allocated.

    budget >= resident groups + slots x the largest streamed group + expert cache + vectors
              + draft model + KV cache + workspace + decode programs + read buffers + CUDA's libraries and graphs

`off` keeps all weights on the device and `on` keeps no matrix. `auto` minimises the bytes that move for a token: it
keeps layer groups and the head first, then experts, then the embedding's table, of which a token reads only one row.

On a CPU the KV caches of some layers may be offloaded to files: as many as do not fit in the KV cache's own budget, if
there is one; else those for which weights leave no room, and only if a context was asked for that does not fit in any
other way.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from graphcore.config.byte_sizes import in_words
from graphcore.config.settings import Keeps
from graphcore.errors import ConfigError, PlanError
from graphcore.kvcache.sizes import PoolSizes
from graphcore.planning.machine import Memory
from graphcore.planning.placements import ExpertPlanRequest, expert_variants, group_placements, with_more_experts
from graphcore.planning.sizes import WeightSizes
from graphcore.planning.tier import job_nbytes_beside
from graphcore.weights.conversion import CONVERSION_NBYTES
from graphcore.weights.plan import (
    ADVICE,
    GroupPlan,
    OffloadedKV,
    OtherMemory,
    Plan,
    bytes_per_token,
    needs_in_words,
    offloaded_in_words,
)

LEAST_CONTEXT = 512  # tokens; lower limit when a default context is halved to fit
TURNS = 2  # that slots hold: in simulated rings of 2 to 4 ranks all disks are then busy for 97 % of the time and more
GRAIN = 10**6  # bytes; a suggested budget is rounded down to it, because free memory differs slightly between starts
AUTO_SHARE = {"cpu": 0.90, "cuda": 0.95}  # shares of free memory; a CPU shares its memory with the rest of the system


@dataclass(frozen=True)
class PlanRequest:
    """The settings that a plan has to satisfy.

    Attributes:
        policy: name of the streaming policy, for messages.
        keeps: share of the matrices that stays on the device: "all", "nothing" or "most".
        budget: bytes on the device; None for a share of the free memory.
        prefetch: number of groups to read ahead; None for 1 if that fits, else 0.
        mode: "async" or "sync".
        expert_cache: bytes for experts on the device; None for what the budget leaves.
        context_length: tokens of KV cache for each sequence.
        may_halve_context: True if the context is a default, so that a shorter one is acceptable.
        has_device_readable_experts: True if experts wait in page-locked memory that the device's kernels can read.
        has_layer_slots: True if such experts may have slots that the kernels fill; the experts of all layers then wait.
        groups_of_turn: layer groups of this process that run in a turn, between those of other processes; 0 if one
            process runs all.
        longer_contexts: contexts, longest first, of which a default becomes the first whose KV cache takes at most half
            of what resident weights leave.
        kv_budget: most bytes of the KV cache on the device; None for what weights leave.
        kv_obstacle: reason why no layer's KV cache can be offloaded; empty if it can.
    """

    policy: str
    keeps: Keeps
    budget: int | None
    prefetch: int | None
    mode: str
    expert_cache: int | None
    context_length: int
    may_halve_context: bool
    has_device_readable_experts: bool = False
    has_layer_slots: bool = True
    groups_of_turn: int = 0
    longer_contexts: tuple[int, ...] = ()
    kv_budget: int | None = None
    kv_obstacle: str = ""

    @property
    def experts(self) -> ExpertPlanRequest:
        """The settings that concern experts."""
        return ExpertPlanRequest(self.expert_cache, self.keeps, self.has_device_readable_experts, self.has_layer_slots)

    @property
    def prefetches(self) -> tuple[int, ...]:
        """Numbers of groups to read ahead, in the order in which they are tried."""
        if self.mode == "sync":
            return (0,)
        if self.prefetch is not None:
            return (self.prefetch,)
        ahead = TURNS * self.groups_of_turn - 1
        return (ahead, 1, 0) if ahead > 1 else (1, 0)

    def num_slots(self, prefetch: int, groups: int, slices: int) -> int:
        """Return the number of slots for streamed layer groups and slices of the head, `prefetch` groups being ahead.

        While other processes run layers, this one's disk goes on: it needs slots for its next turn, and for the head,
        which it reads between its turns.
        """
        is_chosen = self.prefetch is None and self.mode == "async" and prefetch == self.prefetches[0]
        goes_on = is_chosen and self.groups_of_turn > 0
        return min(prefetch + 1 + (slices if goes_on else 0), groups + slices)

    @property
    def kv_budgets(self) -> tuple[int | None, ...]:
        """Most bytes of the KV cache on the device, in the order in which they are tried; None for all of it.

        A context that was asked for is tried with as little as possible on the device before it is refused.
        """
        if self.kv_budget is not None:
            return (self.kv_budget,)
        may_offload = not self.kv_obstacle and not self.may_halve_context and self.keeps != "all"
        return (None, 0) if may_offload else (None,)

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """Context lengths in tokens, in the order in which they are tried."""
        context_lengths = [self.context_length]
        while self.may_halve_context and context_lengths[-1] // 2 >= LEAST_CONTEXT:
            context_lengths.append(context_lengths[-1] // 2)
        return tuple(context_lengths)


@dataclass(frozen=True)
class Costs:
    """The memory that is needed besides weights.

    Attributes:
        kv_nbytes: function from a context in tokens to the bytes of the KV caches of all layers and sequences.
        kv_pools: function from a context to the bytes of the pools of keys and values, by layer.
        workspace_nbytes: bytes of activations and scratch of the largest pass, whatever the context.
        attention_nbytes: function from a context in tokens to the bytes of attention's scratch.
        moving_nbytes: additional bytes of workspace if anything streams, as a pass then runs more chunks of prompts.
        buffer_nbytes: function from the most bytes of a read of rows to the bytes of the buffers for reads on their
            way to a slot, if anything streams.
        least_job_nbytes: bytes of the smallest reads of rows that the weights allow.
        overhead_nbytes: bytes of a GPU's libraries and graphs; 0 on a CPU.
        loading_nbytes: peak bytes of RAM for making weights, besides the weights themselves.
        program_nbytes: function from a context in tokens to the bytes of native decode programs; 0 on a GPU.
    """

    kv_nbytes: Callable[[int], int]
    workspace_nbytes: int = 0
    attention_nbytes: Callable[[int], int] = lambda context_length: 0
    moving_nbytes: int = 0
    buffer_nbytes: Callable[[int], int] = lambda job_nbytes: 0
    least_job_nbytes: int = CONVERSION_NBYTES
    overhead_nbytes: int = 0
    loading_nbytes: int = 0
    program_nbytes: Callable[[int], int] = lambda context_length: 0
    kv_pools: Callable[[int], Mapping[int, PoolSizes]] = lambda context_length: {}

    def resident(self, context_length: int) -> OtherMemory:
        """Return the memory besides weights and caches if nothing streams."""
        workspace = self.workspace_nbytes + self.attention_nbytes(context_length)
        return OtherMemory(workspace, 0, self.overhead_nbytes, self.loading_nbytes, self.program_nbytes(context_length))


def plan_streaming(sizes: WeightSizes, request: PlanRequest, costs: Costs, memory: Memory) -> Plan:
    """Return the best plan within the budget.

    Args:
        sizes: sizes of the weights.

    Raises:
        PlanError: no plan fits in the budget (the message names the smallest budget that works), or the budget exceeds
            the free memory.
        ConfigError: there is a budget for the KV cache, and no cache can be offloaded.
    """
    if request.kv_budget is not None and request.kv_obstacle:
        raise ConfigError(
            f"streaming.kv_memory_budget is not possible: {request.kv_obstacle}; leave it out, or use device=cpu"
        )
    budget = budget_of(request, memory)
    roomy = _with_longer_context(sizes, request, costs, memory.device, budget)
    if roomy is not None:
        return replace(roomy, budget=budget, notes=tuple(_notes(roomy, sizes, request, costs, budget)))
    tried: list[Plan] = []
    for context_length, kv_budget, prefetch in product(request.context_lengths, request.kv_budgets, request.prefetches):
        offloaded = None if kv_budget is None else _offloaded(costs, context_length, kv_budget)
        plans = list(_plans(sizes, request, costs, memory.device, context_length, prefetch, offloaded))
        fitting = [plan for plan in plans if plan.peak_nbytes <= budget]
        if fitting:
            grown = _grown(min(fitting, key=_badness), sizes, request, budget)
            if request.kv_budget is None and grown.offloaded_kv is not None:
                grown = _with_more_kv(grown, costs, budget)
            return replace(grown, budget=budget, notes=tuple(_notes(grown, sizes, request, costs, budget)))
        tried += plans
    smallest = min(tried, key=lambda plan: plan.peak_nbytes)
    raise PlanError(_refusal(smallest, request, budget), replace(smallest, budget=budget))


def _with_longer_context(
    sizes: WeightSizes, request: PlanRequest, costs: Costs, device: str, budget: int
) -> Plan | None:
    """Return the resident plan with the longest context whose KV cache takes at most half of what is free, or None."""
    for context_length in request.longer_contexts if request.keeps != "nothing" else ():
        kv_nbytes = costs.kv_nbytes(context_length)
        if sizes.total_nbytes + 2 * kv_nbytes > budget or (
            request.kv_budget is not None and kv_nbytes > request.kv_budget
        ):
            continue  # before blocks are traced, to know the size of their programs
        for plan in _plans(sizes, request, costs, device, context_length, request.prefetches[-1]):
            if not plan.is_streaming and plan.peak_nbytes + plan.kv_nbytes <= budget:
                return plan
    return None


def budget_of(request: PlanRequest, memory: Memory) -> int:
    """Return the budget of the plan in bytes: the one that was asked for, or a share of the free memory.

    Raises:
        PlanError: the budget that was asked for exceeds the free memory.
    """
    if request.budget is None:
        # Without streaming nothing grows to fill the budget, so no reserve is needed.
        share = 1.0 if request.keeps == "all" else AUTO_SHARE[memory.device.partition(":")[0]]
        return int(memory.free_nbytes * share)
    if request.budget > memory.free_nbytes:
        most = memory.free_nbytes // GRAIN * GRAIN
        raise PlanError(
            f"streaming.memory_budget is {in_words(request.budget)}, but {in_words(memory.free_nbytes)} can be taken "
            f"on {memory.device}, which has {in_words(memory.physical_nbytes)} in all; the largest that works now is "
            f"{most} bytes; ask for no more, or leave it at auto"
        )
    return request.budget


def _offloaded(costs: Costs, context_length: int, kv_budget: int) -> OffloadedKV | None:
    """Return the caches that are offloaded, so that the others take `kv_budget` bytes at most; None if none has to be.

    Caches that several layers read stay first, for which memory saves most, then those of the first layers. Tables of
    pages and recurrent states always stay, whatever the budget.
    """
    pools = costs.kv_pools(context_length)
    room = kv_budget - (costs.kv_nbytes(context_length) - sum(one.nbytes for one in pools.values()))
    away: list[int] = []
    for layer in sorted(pools, key=lambda layer: (-pools[layer].read_nbytes / pools[layer].nbytes, layer)):
        if pools[layer].nbytes <= room:
            room -= pools[layer].nbytes
        else:
            away.append(layer)
    if not away:
        return None
    nbytes = sum(pools[layer].nbytes for layer in away)
    return OffloadedKV(frozenset(away), len(pools), nbytes, sum(pools[layer].read_nbytes for layer in away))


def _with_more_kv(plan: Plan, costs: Costs, budget: int) -> Plan:
    """Return the plan with as many layers' KV caches on the device as the budget, in bytes, allows."""
    assert plan.context_length is not None, "a plan is for a context"
    offloaded = _offloaded(costs, plan.context_length, plan.kv_nbytes + budget - plan.total_nbytes)
    return _with_offloaded(plan, costs, offloaded)


def _with_offloaded(plan: Plan, costs: Costs, offloaded: OffloadedKV | None) -> Plan:
    """Return the plan with exactly these KV caches offloaded."""
    assert plan.context_length is not None, "a plan is for a context"
    away = 0 if offloaded is None else offloaded.nbytes
    return replace(plan, kv_nbytes=costs.kv_nbytes(plan.context_length) - away, offloaded_kv=offloaded)


def _plans(
    sizes: WeightSizes,
    request: PlanRequest,
    costs: Costs,
    device: str,
    context_length: int,
    prefetch: int,
    offloaded: OffloadedKV | None = None,
) -> Iterator[Plan]:
    """Yield all plans for one context and one prefetch, with as few experts on the device as possible."""
    rest = Plan(
        GroupPlan(
            (sizes.embedding, *sizes.groups, 0 if sizes.is_tied else sizes.head),
            sizes.head_slices,
            on_link=sizes.on_link,
            features_nbytes=sizes.features,
        ),
        kv_nbytes=costs.kv_nbytes(context_length),
        device=device,
        policy=request.policy,
        mode=request.mode,
        context_length=context_length,
        always_nbytes=sizes.always,
        other=costs.resident(context_length),
        read_nbytes=sizes.read_nbytes,
    )
    rest = _with_offloaded(rest, costs, offloaded)
    residences = {"all": (True,), "nothing": (False,)}.get(request.keeps, (False, True)) if sizes.features else (True,)
    for placement, keeps_features in product(group_placements(request.keeps, sizes), residences):
        units = placement.unit_nbytes(sizes)
        groups = replace(
            rest.groups,
            streamed=placement.streamed_group_numbers(sizes),
            is_embedding_resident=not placement.is_embedding_gathered,
            num_slots=request.num_slots(prefetch, len(placement.streamed_groups), placement.num_slices(sizes)),
            slot_nbytes=max(units, default=0),
            arrival_nbytes=placement.arrival_nbytes(sizes),
            are_features_resident=keeps_features,
        )
        for draft_nbytes in placement.draft_nbytes(sizes, request.keeps):
            plan = replace(rest, groups=groups, draft_nbytes=draft_nbytes)
            for placed in expert_variants(plan, sizes.experts, request.experts):
                yield _with_moving(placed, costs) if placed.is_streaming else placed


def _with_moving(plan: Plan, costs: Costs) -> Plan:
    """Return the plan with what moving weights takes besides slots: workspace of further chunks, and read buffers."""
    plan = replace(plan, other=replace(plan.other, workspace_nbytes=plan.other.workspace_nbytes + costs.moving_nbytes))
    job = job_nbytes_beside(plan.total_nbytes, costs.least_job_nbytes)
    return replace(plan, other=replace(plan.other, buffer_nbytes=costs.buffer_nbytes(job), job_nbytes=job))


def _badness(plan: Plan) -> tuple[int, bool, bool, bool, bool]:
    """Return the sort key of a plan, smallest is best: streamed bytes, whether experts move, the tables, no draft.

    Without a cache of experts resident tables are better; with one, gathered rows leave it more memory.
    """
    has_cache, groups = plan.experts is not None, plan.groups
    tables = groups.is_embedding_resident == has_cache, groups.are_features_resident == has_cache
    return groups.streamed_nbytes, has_cache, *tables, plan.draft_nbytes == 0


def _grown(plan: Plan, sizes: WeightSizes, request: PlanRequest, budget: int) -> Plan:
    """Return the plan with as many experts as the budget allows, and with a resident embedding if it still fits."""
    if plan.experts is None or sizes.experts is None:
        return plan
    plan = with_more_experts(plan, sizes.experts, request.experts, budget)
    may_keep_table = request.keeps == "most" and not sizes.is_tied
    with_table = replace(plan, groups=replace(plan.groups, is_embedding_resident=True))
    return with_table if may_keep_table and with_table.peak_nbytes <= budget else plan


def _notes(plan: Plan, sizes: WeightSizes, request: PlanRequest, costs: Costs, budget: int) -> Iterator[str]:
    if plan.context_length not in (request.context_length, *request.longer_contexts):
        asked = request.context_length
        yield f"context_length={plan.context_length}, because {asked} tokens of KV cache do not fit in the budget"
    if request.kv_budget is None and plan.offloaded_kv is not None:
        whole = in_words(plan.kv_nbytes + plan.offloaded_kv.nbytes)
        yield (
            f"the KV cache of {plan.context_length} tokens, {whole}, does not fit in the budget: "
            f"{offloaded_in_words(plan.offloaded_kv)}; a smaller context_length or kv_dtype reads less"
        )
    if request.keeps == "most" and not plan.is_streaming:
        fits = "all weights fit" if plan.offloaded_kv else "everything fits"
        yield f"streaming={request.policy}: {fits}, so nothing streams"
    if request.keeps == "nothing" and plan.is_streaming and plan.context_length is not None:
        all_stay = replace(request, keeps="all")
        resident = next(_plans(sizes, all_stay, costs, plan.device, plan.context_length, prefetch=0))
        if resident.peak_nbytes <= budget:
            yield (
                f"streaming={request.policy} reads {in_words(bytes_per_token(plan))} for each token; everything fits "
                f"in {in_words(resident.peak_nbytes)}, so streaming=auto would read nothing"
            )
    if plan.groups.streamed and plan.groups.num_slots == 1 and request.prefetch is None and request.mode == "async":
        yield "streaming.prefetch=auto: the budget has room for one slot, so nothing is read ahead"
    if request.expert_cache is not None and sizes.experts is None:
        yield "streaming.expert_cache has no effect: the model has no experts"


def _refusal(smallest: Plan, request: PlanRequest, budget: int) -> str:
    """Return the message that no plan fits in the budget, with the smallest budget that works."""
    has = f"{in_words(budget)} are free" if request.budget is None else f"the budget is {in_words(budget)}"
    context = f"at context_length={smallest.context_length} "
    others = "layer_group_size, prefetch, context_length or batch_size"
    if request.kv_budget is not None:
        others = f"kv_memory_budget, {others}"
    if smallest.draft_nbytes:
        context += f"with a draft model of {in_words(smallest.draft_nbytes)} (speculation=off needs none) "
    if request.keeps == "all":
        return f"{needs_in_words(smallest)}, {has}; {ADVICE}; {smallest.peak_nbytes} bytes would do {context}".rstrip()
    return (
        f"{needs_in_words(smallest)} at least, {has}; the smallest streaming.memory_budget that works {context}is "
        f"{smallest.peak_nbytes} bytes; a smaller {others} needs less"
    )
