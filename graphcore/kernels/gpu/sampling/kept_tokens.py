"""Search for the tokens that top-k and top-p keep, without sorting the vocabulary.

Legend: B rows, V vocab, P parts of the vocabulary, DIGITS thresholds tried at once.

A float's bits, read as an integer, are in the float's order (`key_of`), and top-p orders tokens by whole numbers
(`to_fixed_point`). So the least value that either keeps is a number of 32 bits, which is found four bits at a time: a
pass counts (top-k) or weighs (top-p) the tokens at or above sixteen thresholds, and the next one searches between two
of them.

    pass 0   0_______ 1_______ 2_______ ... F_______        sums at or above each, of every part
    pass 1            10______ 11______ ... 1F______        2_______ has too little: between 1_______ and 2_______
    ...
    pass 7                                                  the value itself

Among tokens with exactly that value, top-k keeps all, top-p the first ones up to its mass (`_count_ties`). Each row's
targets are read from the device; programs of a search that is off exit at once. All sums are whole numbers, so no order
of adding matters.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.sampling.likeliest import FIELDS, HIGHEST, PART
from graphcore.kernels.gpu.sampling.weights_and_noise import factor_of, sampling_weight, to_fixed_point
from graphcore.sampling_params import KERNEL_PARAMETERS

DIGITS = tl.constexpr(16)
PASSES = tl.constexpr(8)
NUMBERS = tl.constexpr(len(KERNEL_PARAMETERS))  # of a row, in the order of KERNEL_PARAMETERS


def column_of(name: str) -> tl.constexpr:
    """Return the column of a sampling parameter in the rows [B, NUMBERS]."""
    return tl.constexpr(list(KERNEL_PARAMETERS).index(name))


TEMPERATURE, TOP_K, TOP_P, MIN_P = map(column_of, ("temperature", "top_k", "top_p", "min_p"))
PENALTY = column_of("repetition_penalty")


class Searched(NamedTuple):
    """The results of the searches.

    Attributes:
        sums: [2, PASSES, B, DIGITS, P] int64, from top-k's search, then from top-p's.
        found: [2, PASSES, B] int64, the bits of the threshold known before each pass.
        ties: [B, 2, P] int64, the number of a part's tokens at top-p's threshold, and the mass above it.
    """

    sums: Tensor
    found: Tensor
    ties: Tensor


@triton.jit
def key_of(value):
    """Return a 32-bit integer, as int64, in the order of the floats."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # both zeros have the same key
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def largest_of(parts, FIELD: tl.constexpr, PARTS: tl.constexpr):
    """Return the largest of all parts' fields."""
    return tl.max(tl.load(parts + FIELD * PARTS + tl.arange(0, PARTS)), axis=0)


@triton.jit
def has_top_k(numbers, vocab):
    """Return whether top-k leaves out any token."""
    top_k = tl.load(numbers + TOP_K)
    return (top_k > 0) & (top_k < vocab)


@triton.jit
def wanted_of(numbers, sums, row, num_rows, IS_MASS: tl.constexpr, PARTS: tl.constexpr):
    """Return the sum that the kept tokens must reach: top_k tokens, or top_p of the mass of all tokens, rounded up."""
    if IS_MASS:
        whole = sums_of(sums, 1, 0, row, num_rows, PARTS)
        total = tl.sum(tl.load(whole + tl.arange(0, PARTS)), axis=0)
        share = tl.load(numbers + TOP_P).to(tl.float64) * total.to(tl.float64)
        below = share.to(tl.int64)
        wanted = tl.maximum(below + (below.to(tl.float64) < share).to(tl.int64), 1)
    else:
        wanted = tl.load(numbers + TOP_K).to(tl.int64)
    return wanted


@triton.jit
def sums_of(sums, search, number, row, num_rows, PARTS: tl.constexpr):
    """Return the address of the sums of one pass of a search: [DIGITS, P]."""
    return sums + ((search * PASSES + number) * num_rows + row) * DIGITS * PARTS


@triton.jit
def threshold_before(numbers, sums, found, number, row, num_rows, IS_MASS: tl.constexpr, PARTS: tl.constexpr):
    """Return the bits of the threshold known before a pass: its high 4 * number bits; number is at least 1."""
    search: tl.constexpr = 1 if IS_MASS else 0
    base = tl.load(found + (search * PASSES + number - 1) * num_rows + row)
    digit, part = tl.arange(0, DIGITS), tl.arange(0, PARTS)
    last = sums_of(sums, search, number - 1, row, num_rows, PARTS)
    totals = tl.sum(tl.load(last + digit[:, None] * PARTS + part[None, :]), axis=1)
    enough = (totals >= wanted_of(numbers, sums, row, num_rows, IS_MASS, PARTS)) & (digit > 0)
    return base + (tl.sum(enough.to(tl.int64), axis=0) << (32 - 4 * number))


@triton.jit
def sampling_weights(
    values,
    is_there,
    numbers,
    sums,
    found,
    parts,
    vocab,
    row,
    num_rows,
    HAS_TOP_K_TOP_P: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return the weights of a part's tokens, 0 for those that top-k leaves out; `parts` are the row's."""
    largest = largest_of(parts, HIGHEST, PARTS)
    weights = sampling_weight((values - largest) * factor_of(tl.load(numbers + TEMPERATURE)))
    if HAS_TOP_K_TOP_P:
        if has_top_k(numbers, vocab):
            is_there &= key_of(values) >= threshold_before(numbers, sums, found, PASSES, row, num_rows, False, PARTS)
    return tl.where(is_there, weights, 0.0)


@triton.jit(do_not_specialize=["number"])
def _search(
    changed,
    numbers,
    parts,
    sums,
    found,
    vocab,
    num_rows,
    number,
    PARTS: tl.constexpr,
    IS_MASS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers += row * NUMBERS
    if tl.load(numbers + TOP_P) < 1.0 if IS_MASS else has_top_k(numbers, vocab):
        search: tl.constexpr = 1 if IS_MASS else 0
        base = tl.zeros((), dtype=tl.int64)
        if number > 0:
            base = threshold_before(numbers, sums, found, number, row, num_rows, IS_MASS, PARTS)
        if part == 0:
            tl.store(found + (search * PASSES + number) * num_rows + row, base)
        at = part * SIZE + tl.arange(0, SIZE)
        is_there = at < vocab
        values = tl.load(changed + row * vocab + at, mask=is_there, other=float("-inf"))
        if IS_MASS:
            parts += row * NUM_FIELDS * PARTS
            weights = sampling_weights(values, is_there, numbers, sums, found, parts, vocab, row, num_rows, True, PARTS)
            keys = to_fixed_point(weights)
            amounts = keys
        else:
            keys = key_of(values)
            amounts = is_there.to(tl.int64)
        digit = tl.arange(0, DIGITS)
        threshold = base + (digit.to(tl.int64) << (28 - 4 * number))
        reached = tl.where(keys[None, :] >= threshold[:, None], amounts[None, :], 0)
        here = sums_of(sums, search, number, row, num_rows, PARTS)
        tl.store(here + digit * PARTS + part, tl.sum(reached, axis=1))


@triton.jit
def _count_ties(
    changed,
    numbers,
    parts,
    sums,
    found,
    ties,
    vocab,
    num_rows,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers += row * NUMBERS
    if tl.load(numbers + TOP_P) < 1.0:
        least = threshold_before(numbers, sums, found, PASSES, row, num_rows, True, PARTS)
        at = part * SIZE + tl.arange(0, SIZE)
        is_there = at < vocab
        values = tl.load(changed + row * vocab + at, mask=is_there, other=float("-inf"))
        parts += row * NUM_FIELDS * PARTS
        fixed = to_fixed_point(
            sampling_weights(values, is_there, numbers, sums, found, parts, vocab, row, num_rows, True, PARTS)
        )
        ties += row * 2 * PARTS + part
        tl.store(ties, tl.sum((fixed == least).to(tl.int64), axis=0))
        tl.store(ties + PARTS, tl.sum(tl.where(fixed > least, fixed, 0), axis=0))


@triton.jit
def kept_by_top_p(fixed, numbers, sums, found, ties, row, part, num_rows, PARTS: tl.constexpr):
    """Return which tokens top-p keeps: all above the threshold, and the first of those at it."""
    least = threshold_before(numbers, sums, found, PASSES, row, num_rows, True, PARTS)
    each = tl.arange(0, PARTS)
    ties += row * 2 * PARTS
    counts, above = tl.load(ties + each), tl.sum(tl.load(ties + PARTS + each), axis=0)
    wanted = wanted_of(numbers, sums, row, num_rows, True, PARTS)
    is_tie = (fixed == least).to(tl.int32)
    earlier = tl.sum(tl.where(each < part, counts, 0), axis=0) + (tl.cumsum(is_tie, axis=0) - is_tie).to(tl.int64)
    return (fixed > least) | ((is_tie != 0) & (above + earlier * least < wanted))


def launch_search(changed: Tensor, numbers: Tensor, parts: Tensor) -> Searched:
    """Search for both thresholds.

    Args:
        changed: [B, V] float32, the logits with the penalty.
        numbers: [B, NUMBERS] float32.
        parts: [B, FIELDS, P] float32, with the field HIGHEST filled.
    """
    (rows, vocab), num_parts = changed.shape, parts.shape[2]

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=changed.device)

    sums = room(2, PASSES.value, rows, DIGITS.value, num_parts)
    found = room(2, PASSES.value, rows)
    ties = room(rows, 2, num_parts)
    sizes: dict[str, Any] = {"SIZE": PART, "NUM_FIELDS": FIELDS, "num_warps": 4, "enable_fp_fusion": False}
    grid = (rows, num_parts)
    for is_mass in (False, True):
        for number in range(PASSES.value):  # readers of the last pass's sums find the threshold
            _search[grid](
                changed, numbers, parts, sums, found, vocab, rows, number, num_parts, IS_MASS=is_mass, **sizes
            )
    _count_ties[grid](changed, numbers, parts, sums, found, ties, vocab, rows, num_parts, **sizes)
    return Searched(sums, found, ties)
