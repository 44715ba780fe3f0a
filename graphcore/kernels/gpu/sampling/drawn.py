"""Draws a token of each row on the device, without sorting the vocabulary.

Legend: B rows, V vocab, P parts of the vocabulary.

    penalty, temperature -> top-k -> top-p -> min-p -> draw         keeps the same tokens as engine/sampler.py

A token is drawn by the exponential race: with e drawn from the exponential distribution for each token, the token with
the largest p / e is chosen, which is each token with probability p (Yellott 1977; torch.multinomial does the same).

All settings of sampling are read from the device, so that one captured graph serves all of them. kept_tokens.py finds
the tokens that top-k and top-p keep.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.sampling.kept_tokens import (
    MIN_P,
    PASSES,
    PENALTY,
    TEMPERATURE,
    TOP_P,
    Searched,
    cuts_count,
    kept_by_top_p,
    key_of,
    largest_of,
    launch_search,
    threshold_before,
)
from graphcore.kernels.gpu.sampling.likeliest import (
    FIELDS,
    FLOW,
    OUTPUTS,
    PART,
    WARMEST,
    finish,
    num_parts_of,
    store_best,
    store_logit_sums,
)

torch.library.define(
    "graphcore::choose_drawn",
    f"(Tensor logits, Tensor numbers, Tensor noise, Tensor(z!) seen, bool narrows, {FLOW}, {OUTPUTS}) -> ()",
)


def choose_drawn(logits: Tensor, numbers: Tensor, noise: Tensor, seen: Tensor, narrows: bool, *flow: Tensor) -> None:
    """Draw each row's token and make it the next input.

    Args:
        logits: [B, V] float32; V below 2 ** 24.
        numbers: [5] float32: temperature (0 takes the likeliest), top_k (0 for off), top_p, min_p, repetition penalty.
        noise: [B, V] float32, drawn from the exponential distribution.
        seen: [B, V] uint8, 1 for tokens that the penalty applies to; the chosen ones are added.
        narrows: True to apply top_k and top_p.
        *flow: token_ids, starts, counts, left, ends, chosen and report of `choose_likeliest`; the log probability is
            that of the logits, before sampling changed them.
    """
    torch.ops.graphcore.choose_drawn.default(logits, numbers, noise, seen, narrows, *flow)


@torch.library.register_fake("graphcore::choose_drawn")
def _fake(_logits: Tensor, _numbers: Tensor, _noise: Tensor, _seen: Tensor, _narrows: bool, *_flow: Tensor) -> None:
    return None


@triton.jit
def _warm(logits, numbers, seen, warm, parts, vocab, num_parts, SIZE: tl.constexpr, NUM_FIELDS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    is_there = at < vocab
    values = tl.load(logits + row * vocab + at, mask=is_there, other=float("-inf"))
    parts += row * NUM_FIELDS * num_parts
    store_logit_sums(parts, part, num_parts, values, is_there)
    penalty, temperature = tl.load(numbers + PENALTY), tl.load(numbers + TEMPERATURE)
    is_seen = tl.load(seen + row * vocab + at, mask=is_there, other=0) != 0
    penalised = tl.where(values > 0.0, tl.div_rn(values, penalty), values * penalty)
    values = tl.where(is_seen, penalised, values)
    values = tl.div_rn(values, tl.where(temperature == 0.0, 1.0, temperature))
    tl.store(warm + row * vocab + at, values, mask=is_there)
    tl.store(
        parts + WARMEST * num_parts + part,
        tl.max(tl.where(is_there & (values == values), values, float("-inf")), axis=0),
    )


@triton.jit
def _draw(
    warm,
    numbers,
    noise,
    parts,
    sums,
    found,
    ties,
    vocab,
    num_rows,
    PARTS: tl.constexpr,
    NARROWS: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    is_there = at < vocab
    values = tl.load(warm + row * vocab + at, mask=is_there, other=float("-inf"))
    parts += row * NUM_FIELDS * PARTS
    largest = largest_of(parts, WARMEST, PARTS)
    likelihood = tl.exp(values - largest)
    is_kept = is_there & (likelihood >= tl.load(numbers + MIN_P))
    if NARROWS:
        keys = key_of(values)
        if tl.load(numbers + TOP_P) < 1.0:
            is_kept &= kept_by_top_p(keys, is_there, numbers, sums, found, ties, largest, row, part, num_rows, PARTS)
        if cuts_count(numbers, vocab):
            is_kept &= keys >= threshold_before(numbers, sums, found, PASSES, row, num_rows, False, PARTS)
    scores = values
    if tl.load(numbers + TEMPERATURE) > 0.0:
        scores = tl.div_rn(likelihood, tl.load(noise + row * vocab + at, mask=is_there, other=1.0))
    store_best(parts, part, PARTS, tl.where(is_kept, scores, float("-inf")), part * SIZE)


def launch_choose_drawn(
    logits: Tensor, numbers: Tensor, noise: Tensor, seen: Tensor, narrows: bool, *flow: Tensor
) -> None:
    """Implement `choose_drawn`."""
    rows, vocab = logits.shape
    num_parts = num_parts_of(vocab)
    warm = torch.empty_like(logits)
    parts = torch.empty(rows, FIELDS, num_parts, dtype=torch.float32, device=logits.device)
    grid = (rows, num_parts)
    sizes: dict[str, Any] = {"SIZE": PART, "NUM_FIELDS": FIELDS, "num_warps": 4, "enable_fp_fusion": False}
    _warm[grid](logits, numbers, seen, warm, parts, vocab, num_parts, **sizes)
    searched = launch_search(warm, numbers, parts) if narrows else Searched(parts, parts, parts)  # the latter is unread
    _draw[grid](warm, numbers, noise, parts, *searched, vocab, rows, num_parts, NARROWS=narrows, **sizes)
    finish(logits, parts, flow, seen)


# Not as decorators: torch's would leave None under the functions' names. Without a GPU the interpreter runs it.
torch.library.impl("graphcore::choose_drawn", "CompositeExplicitAutograd", launch_choose_drawn)
