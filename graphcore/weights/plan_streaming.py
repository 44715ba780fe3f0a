"""The plan: sizes, wishes and a budget in, what lies where out. Pure functions; nothing is read or allocated.

    budget >= resident groups + slots x the largest streamed group + expert cache + vectors
              + KV cache + workspace + read buffers + CUDA's libraries and graphs

`off` keeps all, `on` keeps no matrix, and `auto` keeps what makes the fewest bytes move for a token: layer groups and
head first, then experts, then the table, of which a token reads a row only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from graphcore.config.byte_sizes import in_words
from graphcore.errors import PlanError
from graphcore.weights.arrangement import arrangements
from graphcore.weights.plan import ADVICE, Plan
from graphcore.weights.plan_experts import ExpertWishes, with_experts, with_more_experts
from graphcore.weights.weight_sizes import WeightSizes

LEAST_CONTEXT = 512  # tokens that a context is halved down to, where none was asked for
GRAIN = 10**6  # bytes, to which the largest budget is rounded down: what is free differs a little from start to start
AUTO_SHARE = {"cpu": 0.90, "cuda": 0.95}  # of free memory: a CPU's is shared with the rest of the system


@dataclass(frozen=True)
class Wishes:
    """What the settings ask for.

    Attributes:
        policy: "off", "on" or "auto".
        budget: bytes; None leaves it to the free memory.
        prefetch: groups that are read ahead; None is 1 where that fits, else 0.
        mode: "async" or "sync".
        expert_cache: bytes; None is what the budget leaves over.
        context: tokens of KV cache for each sequence.
        may_halve_context: nobody asked for that context, so it may be less.
        maps_experts: experts wait in memory that the device's kernels can read.
    """

    policy: str
    budget: int | None
    prefetch: int | None
    mode: str
    expert_cache: int | None
    context: int
    may_halve_context: bool
    maps_experts: bool = False

    @property
    def experts(self) -> ExpertWishes:
        """What is asked for experts."""
        return ExpertWishes(self.expert_cache, self.maps_experts)

    @property
    def prefetches(self) -> tuple[int, ...]:
        """Numbers of groups to read ahead, the one that is tried first in front."""
        if self.mode == "sync":
            return (0,)
        return (1, 0) if self.prefetch is None else (self.prefetch,)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Contexts, the one that is tried first in front."""
        contexts = [self.context]
        while self.may_halve_context and contexts[-1] // 2 >= LEAST_CONTEXT:
            contexts.append(contexts[-1] // 2)
        return tuple(contexts)


@dataclass(frozen=True)
class Costs:
    """What the device holds besides weights.

    Attributes:
        kv_nbytes: keys and values of all layers and sequences, for a context in tokens.
        workspace_nbytes: activations and scratch of the largest step.
        buffer_nbytes: of reads on their way to a slot, if anything streams.
        overhead_nbytes: what a GPU's libraries and graphs take; 0 elsewhere.
        loading_nbytes: of RAM that making weights takes at once, besides their places.
    """

    kv_nbytes: Callable[[int], int]
    workspace_nbytes: int = 0
    buffer_nbytes: int = 0
    overhead_nbytes: int = 0
    loading_nbytes: int = 0


@dataclass(frozen=True)
class Memory:
    """A device's memory.

    Attributes:
        device: its name, "cpu" or "cuda:N".
        free_nbytes: that can still be taken.
        physical_nbytes: that it has.
    """

    device: str
    free_nbytes: int
    physical_nbytes: int


def plan_streaming(sizes: WeightSizes, wishes: Wishes, costs: Costs, memory: Memory) -> Plan:
    """Return the best plan within the budget.

    Args:
        sizes: of the weights.

    Raises:
        PlanError: no plan keeps to it, and the message names the smallest budget that one keeps to; or the budget is
            more than the device has.
    """
    budget = budget_of(wishes, memory)
    tries = [(context, prefetch) for context in wishes.contexts for prefetch in wishes.prefetches]
    tried: list[Plan] = []
    for context, prefetch in tries:
        plans = list(_plans(sizes, wishes, costs, memory.device, context, prefetch))
        fitting = [plan for plan in plans if plan.peak_nbytes <= budget]
        if fitting:
            grown = _grown(min(fitting, key=_badness), sizes, wishes, budget)
            return replace(grown, budget=budget, notes=tuple(_notes(grown, sizes, wishes)))
        tried += plans
    smallest = min(tried, key=lambda plan: plan.peak_nbytes)
    raise PlanError(_refusal(smallest, wishes, budget), replace(smallest, budget=budget))


def budget_of(wishes: Wishes, memory: Memory) -> int:
    """Return the bytes that the plan has to keep to: what was asked for, or a share of what is free.

    Raises:
        PlanError: more was asked for than can be taken.
    """
    if wishes.budget is None:
        # Without streaming nothing grows to fill what is there, so nothing has to be left.
        share = 1.0 if wishes.policy == "off" else AUTO_SHARE[memory.device.partition(":")[0]]
        return int(memory.free_nbytes * share)
    if wishes.budget > memory.free_nbytes:
        most = memory.free_nbytes // GRAIN * GRAIN
        raise PlanError(
            f"streaming.memory_budget is {in_words(wishes.budget)}, but {in_words(memory.free_nbytes)} can be taken on "
            f"{memory.device}, which has {in_words(memory.physical_nbytes)} in all; the largest that works now is "
            f"{most} bytes; ask for no more, or leave it at auto"
        )
    return wishes.budget


def _plans(
    sizes: WeightSizes, wishes: Wishes, costs: Costs, device: str, context: int, prefetch: int
) -> Iterator[Plan]:
    """Yield every plan of one context and depth of prefetch, with as few experts in their cache as may be."""
    rest = Plan(
        group_nbytes=(sizes.embedding, *sizes.groups, 0 if sizes.is_tied else sizes.head),
        kv_nbytes=costs.kv_nbytes(context),
        device=device,
        policy=wishes.policy,
        mode=wishes.mode,
        context=context,
        head_slices=sizes.head_slices,
        always_nbytes=sizes.always,
        workspace_nbytes=costs.workspace_nbytes,
        overhead_nbytes=costs.overhead_nbytes,
        loading_nbytes=costs.loading_nbytes,
        read_nbytes=sizes.read_nbytes,
    )
    for arrangement in arrangements(wishes.policy, sizes):
        units = arrangement.unit_nbytes(sizes)
        plan = replace(
            rest,
            streamed=arrangement.streamed(sizes),
            is_embedding_resident=not arrangement.is_embedding_gathered,
            num_slots=min(prefetch + 1, len(units)),
            slot_nbytes=max(units, default=0),
        )
        yield from with_experts(plan, sizes.experts, wishes.experts, costs.buffer_nbytes)


def _badness(plan: Plan) -> tuple[int, bool, bool]:
    """Return what is to be smallest: bytes for a token, then experts that move, then what the table takes or saves.

    With a cache of experts the table stays out, so that the cache can have its bytes.
    """
    has_cache = plan.experts is not None
    return plan.streamed_nbytes, has_cache, plan.is_embedding_resident == has_cache


def _grown(plan: Plan, sizes: WeightSizes, wishes: Wishes, budget: int) -> Plan:
    """Return the plan with as many experts as the budget allows, and with the table if it still fits."""
    if plan.experts is None or sizes.experts is None:
        return plan
    plan = with_more_experts(plan, sizes.experts, wishes.experts, budget)
    may_keep_table = wishes.policy == "auto" and not sizes.is_tied
    with_table = replace(plan, is_embedding_resident=True)
    return with_table if may_keep_table and with_table.peak_nbytes <= budget else plan


def _notes(plan: Plan, sizes: WeightSizes, wishes: Wishes) -> Iterator[str]:
    if plan.context != wishes.context:
        yield f"context_length={plan.context}, because {wishes.context} tokens of KV cache do not fit in the budget"
    if wishes.policy == "auto" and not plan.is_streaming:
        yield "streaming=auto: everything fits, so nothing streams"
    if plan.streamed and plan.num_slots == 1 and wishes.prefetch is None and wishes.mode == "async":
        yield "streaming.prefetch=auto: the budget has room for one slot, so nothing is read ahead"
    if wishes.expert_cache is not None and sizes.experts is None:
        yield "streaming.expert_cache has no effect: the model has no experts"


def _refusal(smallest: Plan, wishes: Wishes, budget: int) -> str:
    """Return why no plan keeps to the budget, and what would."""
    has = f"{in_words(budget)} are free" if wishes.budget is None else f"the budget is {in_words(budget)}"
    context = f"at context_length={smallest.context} "
    if wishes.policy == "off":
        return f"{smallest.needs()}, {has}; {ADVICE}; {smallest.peak_nbytes} bytes would do {context}".rstrip()
    return (
        f"{smallest.needs()} at least, {has}; the smallest streaming.memory_budget that works {context}is "
        f"{smallest.peak_nbytes} bytes; a smaller layer_group_size, prefetch, context_length or batch_size needs less"
    )
