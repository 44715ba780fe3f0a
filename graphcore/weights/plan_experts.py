"""What of a mixture of experts lies where: three ways, of which the planner takes the best that fits.

    all         every expert on the device
    cached      slots on the device, which experts of all layers are fetched into when they have been chosen
    mapped      the first layers' experts on the device, the others' in RAM, where a decode step's kernels read the
                chosen ones over the link; what many tokens go through is fetched into slots

Of mapped experts a token moves what it is routed to, in the layers that lie in RAM; of cached ones what is not in a
slot. Both ways keep the same share of all experts on the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from graphcore.weights.plan import ExpertPlan, Plan
from graphcore.weights.weight_sizes import ExpertSizes

SLOT_SHARE = 4  # a fourth of a layer's experts has slots for chunks of tokens where that fits


@dataclass(frozen=True)
class ExpertWishes:
    """What the settings ask for.

    Attributes:
        cap: bytes on the device; None is what the budget leaves over.
        are_mapped: they wait in memory that the device's kernels can read.
    """

    cap: int | None
    are_mapped: bool = False


def with_experts(plan: Plan, experts: ExpertSizes | None, wishes: ExpertWishes, buffer_nbytes: int) -> Iterator[Plan]:
    """Yield the plan with what experts add: all of them resident if nothing streams, and as few as may be."""
    if experts is None:
        yield replace(plan, buffer_nbytes=buffer_nbytes if plan.is_streaming else 0)
        return
    is_capped = wishes.cap is not None and wishes.cap < experts.total_nbytes
    if plan.policy == "off" or (not plan.is_streaming and not is_capped):
        yield replace(plan, resident_expert_nbytes=experts.total_nbytes)
    if plan.policy == "off":
        return
    cap = 0 if wishes.are_mapped else (wishes.cap or 0)
    num_slots = max(experts.least, cap // experts.slot_nbytes)
    made = _mapped(experts, 0, num_slots) if wishes.are_mapped else _cached(experts, num_slots)
    yield replace(plan, experts=made, buffer_nbytes=buffer_nbytes)


def with_more_experts(plan: Plan, experts: ExpertSizes, wishes: ExpertWishes, budget: int) -> Plan:
    """Return the plan with as many experts on the device as its budget allows."""
    assert plan.experts is not None, "there is nothing to grow"
    room = budget - plan.peak_nbytes
    if not plan.experts.are_mapped:
        if wishes.cap is not None:
            return plan
        return replace(plan, experts=_cached(experts, plan.experts.num_slots + room // experts.slot_nbytes))
    if wishes.cap is not None:
        room = min(room, wishes.cap - plan.experts.nbytes)
    layers = 0
    while layers + 1 < len(experts.nbytes) and experts.count * sum(experts.nbytes[: layers + 1]) <= room:
        layers += 1
    resident = experts.count * sum(experts.nbytes[:layers])
    wanted = max(experts.count // SLOT_SHARE - experts.least, 0)
    num_slots = experts.least + max(min(wanted, (room - resident) // experts.slot_nbytes), 0)
    return replace(plan, experts=_mapped(experts, layers, num_slots), resident_expert_nbytes=resident)


def _cached(experts: ExpertSizes, num_slots: int) -> ExpertPlan:
    """Return a cache of so many slots, or of one for each expert if those are fewer."""
    return ExpertPlan(
        num_slots=min(num_slots, experts.num_experts),
        slot_nbytes=experts.slot_nbytes,
        num_experts=experts.num_experts,
        num_layers=len(experts.nbytes),
        routed_nbytes=experts.routed * sum(experts.nbytes),
        is_large_enough=num_slots >= experts.routed * len(experts.nbytes),
    )


def _mapped(experts: ExpertSizes, num_resident: int, num_slots: int) -> ExpertPlan:
    """Return what is left in RAM when the experts of so many layers are resident."""
    left = experts.nbytes[num_resident:]
    return ExpertPlan(
        num_slots=num_slots,
        slot_nbytes=experts.slot_nbytes,
        num_experts=experts.count * len(left),
        num_layers=len(left),
        routed_nbytes=experts.routed * sum(left),
        is_large_enough=False,
        are_mapped=True,
    )
