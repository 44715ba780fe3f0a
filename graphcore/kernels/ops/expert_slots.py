"""A GPU cache of a layer's offloaded experts (LRU), which kernels look up, fill and read without the host.

Legend: N tokens, D model dim, X experts, F hidden features of an expert, C experts chosen per token, S slots.

    waiting  [X, ...]     every expert, in page-locked host memory
    slots    [S, ...]     the most recently used experts, on the device

    chosen -> assign a slot to each chosen expert -> copy missing ones to their slots -> products read the slots

A missing expert takes a free slot, or evicts the least recently used expert, but never one of the same call. If no slot
is left, products read the expert from host memory. The outputs are bit-identical in all cases.

This is the reference implementation, in plain torch with reads by the host; GPUs use kernels/gpu/experts/.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from graphcore.activations import Gating
from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.matrix import DENSE
from graphcore.kernels.ops.experts import empty_answers, experts
from graphcore.kernels.ops.packed_experts import device_experts

CALLS, HITS, LOADED, IN_PLACE = range(4)  # entries of `ExpertSlots.tallies`

WRITTEN = ("cache_places", "cache_holders", "cache_last_use", "cache_tallies", "cache_slots")  # by `take_experts`


class ExpertSlots(NamedTuple):
    """A layer's experts, its slots, and the mapping between them.

    Attributes:
        waiting: gate, up and down of all experts, [X, ...] each, in page-locked memory.
        slots: gate, up and down of the slots, [S, ...] each, on the device.
        places: [X] int32 on the device, slots of the experts; -1 for none.
        holders: [S] int32 on the device, experts in the slots; -1 for none.
        last_use: [X] int64 on the device, number of the last call that chose an expert; 0 for none.
        tallies: [4] int64 on the device: number of calls; numbers of distinct chosen experts that were in a slot, that
            were loaded into one, and that are read from host memory.
    """

    waiting: Sequence[Tensor]
    slots: Sequence[Tensor]
    places: Tensor
    holders: Tensor
    last_use: Tensor
    tallies: Tensor

    @classmethod
    def empty(cls, waiting: Sequence[Tensor], slots: Sequence[Tensor]) -> "ExpertSlots":
        """Return slots that hold no expert yet."""
        num_experts, num_slots, device = len(waiting[0]), len(slots[0]), slots[0].device
        places = torch.full((num_experts,), -1, dtype=torch.int32, device=device)
        holders = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        last_use = torch.zeros(num_experts, dtype=torch.int64, device=device)
        return cls(waiting, slots, places, holders, last_use, torch.zeros(4, dtype=torch.int64, device=device))


def take_one_by_one(chosen: Tensor, cache: ExpertSlots) -> None:
    """Assign slots to the chosen experts, and copy the missing experts to theirs.

    Args:
        chosen: int64 of any shape, on the device; -1 for no expert.
    """
    waiting, slots, places, holders, last_use, tallies = cache
    wanted = sorted({*chosen.flatten().tolist()} - {-1})
    where, owners = places.tolist(), holders.tolist()
    missing = [expert for expert in wanted if where[expert] < 0]
    used = [0 if owner < 0 else int(last_use[owner]) for owner in owners]
    victims = sorted((slot for slot, owner in enumerate(owners) if owner not in wanted), key=lambda slot: used[slot])
    loads = list(zip(missing, victims, strict=False))  # some experts may find no slot
    for expert, slot in loads:
        if owners[slot] >= 0:
            places[owners[slot]] = -1
        places[expert], holders[slot] = slot, expert
        for source, target in zip(waiting, slots, strict=True):
            target[slot].copy_(source[expert])
    counts = 1, len(wanted) - len(missing), len(loads), len(missing) - len(loads)
    tallies += torch.tensor(counts, device=tallies.device, dtype=torch.int64)
    last_use[wanted] = tallies[CALLS]


def answers_in_two_parts(
    x: Tensor,
    chosen: Tensor,
    cache: ExpertSlots,
    biases: Sequence[Tensor],
    hidden: int,
    gating: Gating,
    formats: Sequence[str],
) -> Tensor:
    """Call `take_experts`, then return each chosen expert's output for its token.

    Runs the experts in slots, then those that are read from host memory.

    Args:
        x: [N, D] compute dtype.
        chosen: [N, C] int64; -1 for no expert.
        cache: experts and slots of the layer.
        biases: gate [X, F], up [X, F] and down [X, D], compute dtype; empty for none.
        hidden: F.
        gating: function of gate and up.
        formats: formats of gate, up and down: "dense", or the format of matrices packed for a device.

    Returns:
        [N, C, D] compute dtype; zeros where no expert is chosen.
    """
    take_one_by_one(chosen, cache)

    def answers(weights: Sequence[Tensor], where: Sequence[int]) -> Tensor:
        if formats[0] == DENSE:
            return experts(x, chosen, weights, biases, gating, where)
        return device_experts(x, chosen, weights, biases, where, hidden, gating, formats)

    where = cache.places.tolist()
    elsewhere = [expert if place < 0 else -1 for expert, place in enumerate(where)]
    in_slot = (chosen >= 0) & (cache.places[chosen.clamp(min=0)] >= 0)
    return torch.where(in_slot[..., None], answers(cache.slots, where), answers(cache.waiting, elsewhere))


take_experts = register_custom_op("take_experts", take_one_by_one, mutates_args=WRITTEN, dispatch_key="CPU")
cached_experts = register_custom_op(
    "cached_experts", answers_in_two_parts, empty_answers, mutates_args=WRITTEN, dispatch_key="CPU"
)
