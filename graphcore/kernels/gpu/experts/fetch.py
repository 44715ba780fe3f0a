"""Fetch of a step's experts: two kernels assign slots and copy the missing experts there, without the host.

Legend: N tokens, C choices of a token, X experts, S slots, M most experts that a call can miss.

    resolve   one program: which chosen experts have no slot, and whose slots they take       missing [M], -1 for none
    fill      a program for each missing expert and a share of its words: locked RAM -> slot, 16 bytes a thread and load

The cache is LRU: an expert's key is the number of the last call that chose it, so this call's experts are recognised by
their key, and the smallest key is evicted. kernels/ops/expert_slots.py describes the tensors and has the reference.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op, register_implementation
from graphcore.kernels.gpu.dependent_launch import let_next_begin, wait_for_earlier
from graphcore.kernels.gpu.pdl import pdl_options
from graphcore.kernels.ops.expert_slots import WRITTEN, ExpertSlots

NEVER = tl.constexpr(1 << 62)
RESOLVE_WARPS = 4
FILL_WARPS = 4
WORDS = 2048  # that a program copies at once; with four warps, each thread has four loads of 16 bytes on their way
MOST_BLOCKS = 32  # programs that share an expert: a link is full with a few hundred kilobytes on their way


@triton.jit
def _resolve(
    chosen, places, holders, last_use, tallies, missing, num_chosen, num_experts, num_slots, most,
    CHOSEN: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, MOST: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Find slots for the chosen experts; the lowest of the missing experts takes the oldest slot."""
    let_next_begin(DEPENDENT)
    wait_for_earlier(DEPENDENT)
    now = tl.load(tallies) + 1
    pair = tl.arange(0, CHOSEN)
    asked = tl.load(chosen + pair, mask=pair < num_chosen, other=-1)
    tl.store(last_use + asked, now, mask=asked >= 0)
    tl.debug_barrier()  # the threads of experts read what those of pairs have written
    expert = tl.arange(0, EXPERTS)
    is_expert = expert < num_experts
    is_chosen = tl.load(last_use + expert, mask=is_expert, other=0) == now
    is_missing = is_chosen & (tl.load(places + expert, mask=is_expert, other=0) < 0)
    slot = tl.arange(0, SLOTS)
    holder = tl.load(holders + slot, mask=slot < num_slots, other=-1)
    age = tl.load(last_use + holder, mask=holder >= 0, other=0)
    key = tl.where((slot < num_slots) & (age < now), age * SLOTS + slot, NEVER)
    num_chosen_experts, num_missing = tl.sum(is_chosen.to(tl.int32)), tl.sum(is_missing.to(tl.int32))
    loads = tl.minimum(num_missing, tl.sum((key < NEVER).to(tl.int32)))
    tl.store(tallies, now)
    tl.store(tallies + 1, tl.load(tallies + 1) + num_chosen_experts - num_missing)
    tl.store(tallies + 2, tl.load(tallies + 2) + loads)
    tl.store(tallies + 3, tl.load(tallies + 3) + num_missing - loads)
    entry = tl.arange(0, MOST)
    tl.store(missing + entry, tl.full([MOST], -1, tl.int32), mask=(entry >= loads) & (entry < most))
    left = tl.where(is_missing, expert, EXPERTS)
    for number in range(loads):
        taker = tl.min(left, 0)
        left = tl.where(expert == taker, EXPERTS, left)
        victim = (tl.min(key, 0) % SLOTS).to(tl.int32)
        evicted = tl.sum(tl.where(slot == victim, holder, 0), 0)
        key = tl.where(slot == victim, NEVER, key)
        tl.store(places + evicted, -1, mask=evicted >= 0)
        tl.store(places + taker, victim)
        tl.store(holders + victim, taker)
        tl.store(missing + number, taker)


@triton.jit
def _fill(
    missing, places, gate, up, down, gate_slots, up_slots, down_slots, gate_words: tl.constexpr,
    up_words: tl.constexpr, down_words: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Copy this program's share of one missing expert into its slot."""
    wait_for_earlier(DEPENDENT)
    expert = tl.load(missing + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        slot = tl.load(places + expert).to(tl.int64)
        _copy(gate + expert * gate_words, gate_slots + slot * gate_words, gate_words, BLOCK)
        _copy(up + expert * up_words, up_slots + slot * up_words, up_words, BLOCK)
        _copy(down + expert * down_words, down_slots + slot * down_words, down_words, BLOCK)
    let_next_begin(DEPENDENT)


@triton.jit
def _copy(source, target, words: tl.constexpr, BLOCK: tl.constexpr):
    for begin in range(tl.program_id(1) * BLOCK, words, tl.num_programs(1) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < words, other=0), mask=at < words)


def launch_take(chosen: Tensor, cache: ExpertSlots) -> None:
    """Load the chosen experts into slots, as `take_experts` does; `chosen` is contiguous."""
    if not chosen.numel():
        return
    assert chosen.is_contiguous(), "the kernel takes the choices one after another"
    waiting, slots, places, holders, last_use, tallies = cache
    num_chosen, num_experts, num_slots = chosen.numel(), len(places), len(holders)
    most = min(num_chosen, num_slots)
    missing = torch.empty(most, dtype=torch.int32, device=places.device)
    widths = {
        "CHOSEN": triton.next_power_of_2(num_chosen),
        "EXPERTS": triton.next_power_of_2(num_experts),
        "SLOTS": triton.next_power_of_2(num_slots),
        "MOST": triton.next_power_of_2(most),
    }
    _resolve[(1,)](
        chosen, places, holders, last_use, tallies, missing, num_chosen, num_experts, num_slots, most, **widths,
        num_warps=RESOLVE_WARPS, **pdl_options(),
    )  # fmt: skip
    sources, targets = [_words(one) for one in waiting], [_words(one) for one in slots]
    words = [source.numel() // num_experts for source in sources]
    blocks = min(triton.cdiv(max(words), WORDS), MOST_BLOCKS)
    _fill[(most, blocks)](
        missing, places, *sources, *targets, *words, BLOCK=WORDS, num_warps=FILL_WARPS, **pdl_options(),
    )  # fmt: skip


def _words(matrices: Tensor) -> Tensor:
    """Return the matrices' bytes in words of four bytes, or one by one where an expert is no whole number of words."""
    dtype = torch.int32 if matrices[0].nbytes % 4 == 0 else torch.uint8
    return matrices.view(-1).view(dtype)


take_slots = register_custom_op("gpu_take_experts", launch_take, mutates_args=WRITTEN)
register_implementation("take_experts", "CUDA", launch_take)
