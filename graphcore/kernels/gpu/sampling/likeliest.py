"""Greedy sampling on the device: the likeliest token of each row becomes its next input.

Legend: B rows, V vocab, P parts of the vocabulary, PART columns in each.

    logits [B, V]  ->  best and sums of each part [B, FIELDS, P]  ->  token, log probability, next input

The device also decides whether a row continues, so that the host may be a few steps behind: after an end token, or the
last token that it may generate, a row has no token in the next step, and its caches do not change.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op

PART = 1024  # columns
MOST_VOCAB = 1 << 24  # indices are kept as float32
# Fields of a part: its best score, the column of it, then the logits' maximum, the sum of their exponentials minus that
# maximum, the number of logits that are not finite, and the maximum of the logits with the penalty (drawn.py).
FIELDS = 6
BEST, COLUMN, LARGEST, TOTAL, BAD, HIGHEST = (tl.constexpr(index) for index in range(FIELDS))
UNITS = tl.constexpr(2.0**40)  # exponentials are added as integers in units of 2^-40
UNIT = tl.constexpr(2.0**-40)


@triton.jit
def store_logit_sums(parts, part, num_parts, values, is_there):
    """Store the maximum, the sum of exponentials and the number of non-finite logits of one part of the vocabulary.

    Exponentials are added as integers, exactly, so that a log probability does not depend on how many numbers a thread
    holds: Triton's compiler chooses that for each kernel, and several kernels call this function.
    """
    largest = tl.max(tl.where(is_there & (values == values), values, float("-inf")), axis=0)
    shares = tl.exp(values - largest)
    shares = tl.where(is_there & (shares == shares), shares, 0.0)
    total = tl.sum((shares * UNITS).to(tl.int64), axis=0).to(tl.float32) * UNIT
    is_bad = is_there & ((values != values) | (tl.abs(values) == float("inf")))
    tl.store(parts + LARGEST * num_parts + part, largest)
    tl.store(parts + TOTAL * num_parts + part, total)
    tl.store(parts + BAD * num_parts + part, tl.sum(is_bad.to(tl.float32), axis=0))


@triton.jit
def store_best(parts, part, num_parts, scores, start):
    """Store a part's highest score and the first column that has it."""
    scores = tl.where(scores == scores, scores, float("-inf"))  # NaN is no candidate
    best, index = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(parts + BEST * num_parts + part, best)
    tl.store(parts + COLUMN * num_parts + part, (start + index).to(tl.float32))


@triton.jit
def _scan(logits, parts, vocab, num_parts, SIZE: tl.constexpr, NUM_FIELDS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    is_there = at < vocab
    values = tl.load(logits + row * vocab + at, mask=is_there, other=float("-inf"))
    parts += row * NUM_FIELDS * num_parts
    store_logit_sums(parts, part, num_parts, values, is_there)
    store_best(parts, part, num_parts, values, part * SIZE)


@triton.jit
def _finish(
    logits, parts, token_ids, starts, counts, left, ends, chosen, report, seen, vocab, num_ends,
    PARTS: tl.constexpr, ENDS: tl.constexpr, NUM_FIELDS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PARTS)
    parts += row * NUM_FIELDS * PARTS
    part = tl.argmax(tl.load(parts + BEST * PARTS + at), axis=0)
    column = tl.sum(tl.where(at == part, tl.load(parts + COLUMN * PARTS + at), 0.0), axis=0)
    # If all scores are NaN, the column may be any number; the next step reads the embedding there.
    token = tl.minimum(tl.maximum(column, 0.0), vocab - 1.0).to(tl.int64)
    each = tl.load(parts + LARGEST * PARTS + at)
    largest = tl.max(each, axis=0)
    total = tl.sum(tl.load(parts + TOTAL * PARTS + at) * tl.exp(each - largest), axis=0)
    bad = tl.sum(tl.load(parts + BAD * PARTS + at), axis=0)
    logprob = tl.load(logits + row * vocab + token) - largest - tl.log(total)

    count = tl.load(counts + row)
    has_token = count > 0
    remaining = tl.load(left + row) - tl.where(has_token, 1, 0)
    index = tl.arange(0, ENDS)
    is_end = (
        tl.sum((tl.load(ends + row * num_ends + index, mask=index < num_ends, other=-1) == token).to(tl.int32), axis=0)
        > 0
    )
    tl.store(starts + row, tl.load(starts + row) + count)
    tl.store(left + row, remaining)
    tl.store(counts + row, tl.where(has_token & (remaining > 0) & (is_end == 0), 1, 0).to(tl.int64))
    tl.store(chosen + row, token, mask=has_token)
    tl.store(token_ids + row, token, mask=has_token)
    if seen is not None:
        tl.store(seen + row * vocab + token, 1, mask=has_token)
    tl.store(report + row * 3, tl.where(has_token, token, -1).to(tl.float64))
    tl.store(report + row * 3 + 1, logprob.to(tl.float64))
    tl.store(report + row * 3 + 2, tl.where(has_token, bad, 0.0).to(tl.float64))


def num_parts_of(vocab: int) -> int:
    """Return the number of parts of a row of logits, a power of two; the last ones may have no columns."""
    assert vocab < MOST_VOCAB, f"a vocabulary of {vocab}; columns are kept as float32"
    return int(triton.next_power_of_2(triton.cdiv(vocab, PART)))


def finish(
    logits: Tensor,
    parts: Tensor,
    flow: tuple[Tensor, ...],
    seen: Tensor | None,
) -> None:
    """Launch the last kernel, after the parts [B, FIELDS, P] float32.

    Args:
        flow: token_ids, starts, counts, left, ends, chosen and report of `choose_likeliest`.
        seen: [B, V] uint8 of `choose_drawn`, or None.
    """
    _finish[(len(logits),)](
        logits,
        parts,
        *flow,
        seen,
        logits.shape[1],
        flow[4].shape[1],
        PARTS=parts.shape[2],
        ENDS=triton.next_power_of_2(max(flow[4].shape[1], 1)),
        NUM_FIELDS=FIELDS,
        num_warps=1,
        enable_fp_fusion=False,
    )


def launch_choose_likeliest(
    logits: Tensor,
    token_ids: Tensor,
    starts: Tensor,
    counts: Tensor,
    left: Tensor,
    ends: Tensor,
    chosen: Tensor,
    report: Tensor,
) -> None:
    """Choose each row's likeliest token, the first of several, and make it the next input.

    Args:
        logits: [B, V] float32; V below 2 ** 24.
        token_ids: [B, 1] int64, set to the token for rows that have one in this step.
        starts: [B] int64, increased by counts.
        counts: [B] int64, 1 for rows that have a token in this step; set to 0 for those that end with it.
        left: [B] int64, tokens that the row may still choose, this one included; decreased for rows that choose.
        ends: [B, E] int64, tokens that end each row; -1 for an unused entry.
        chosen: [B] int64, set to the token of rows that have one in this step.
        report: [B, 3] float64, set to the token (-1 for rows that have none in this step), the natural logarithm of
            its probability, and the number of logits that are not finite (0 for rows without a token in this step).
    """
    rows, vocab = logits.shape
    num_parts = num_parts_of(vocab)
    parts = torch.empty(rows, FIELDS, num_parts, dtype=torch.float32, device=logits.device)
    _scan[(rows, num_parts)](
        logits, parts, vocab, num_parts, SIZE=PART, NUM_FIELDS=FIELDS, num_warps=4, enable_fp_fusion=False
    )
    finish(logits, parts, (token_ids, starts, counts, left, ends, chosen, report), None)


choose_likeliest = register_custom_op(
    "choose_likeliest",
    launch_choose_likeliest,
    mutates_args=["token_ids", "starts", "counts", "left", "chosen", "report"],
)
