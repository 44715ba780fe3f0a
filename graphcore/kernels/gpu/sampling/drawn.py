"""Random sampling of each row's token on the device, without sorting the vocabulary.

Legend: B rows, V vocab, P parts of the vocabulary.

    penalty -> top-k -> temperature -> top-p -> min-p -> race         the rule of kernels/ops/draw.py, to the bit

All settings of sampling are read from the device, for each row, so that one captured graph serves all of them.
kept_tokens.py finds the tokens that top-k and top-p keep.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.custom_ops import register_custom_op
from graphcore.kernels.gpu.sampling.kept_tokens import (
    MIN_P,
    NUMBERS,
    PENALTY,
    TEMPERATURE,
    TOP_P,
    Searched,
    kept_by_top_p,
    launch_search,
    sampling_weights,
)
from graphcore.kernels.gpu.sampling.likeliest import (
    FIELDS,
    HIGHEST,
    PART,
    finish,
    num_parts_of,
    store_best,
    store_logit_sums,
)
from graphcore.kernels.gpu.sampling.weights_and_noise import MOST_FLOAT, noise_of, to_fixed_point


@triton.jit
def _penalise(logits, numbers, seen, changed, parts, vocab, num_parts, SIZE: tl.constexpr, NUM_FIELDS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * SIZE + tl.arange(0, SIZE)
    is_there = at < vocab
    values = tl.load(logits + row * vocab + at, mask=is_there, other=float("-inf"))
    parts += row * NUM_FIELDS * num_parts
    store_logit_sums(parts, part, num_parts, values, is_there)
    penalty = tl.load(numbers + row * NUMBERS + PENALTY)
    is_seen = tl.load(seen + row * vocab + at, mask=is_there, other=0) != 0
    penalised = tl.where(values > 0.0, tl.minimum(tl.div_rn(values, penalty), MOST_FLOAT), values * penalty)
    values = tl.where(is_seen, penalised, values)
    tl.store(changed + row * vocab + at, values, mask=is_there)
    tl.store(
        parts + HIGHEST * num_parts + part,
        tl.max(tl.where(is_there & (values == values), values, float("-inf")), axis=0),
    )


@triton.jit
def _draw(
    changed,
    numbers,
    seeds,
    starts,
    counts,
    parts,
    sums,
    found,
    ties,
    vocab,
    num_rows,
    PARTS: tl.constexpr,
    HAS_TOP_K_TOP_P: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    numbers += row * NUMBERS
    at = part * SIZE + tl.arange(0, SIZE)
    is_there = at < vocab
    scores = tl.load(changed + row * vocab + at, mask=is_there, other=float("-inf"))
    parts += row * NUM_FIELDS * PARTS
    if tl.load(numbers + TEMPERATURE) > 0.0:
        weights = sampling_weights(
            scores, is_there, numbers, sums, found, parts, vocab, row, num_rows, HAS_TOP_K_TOP_P, PARTS
        )
        is_kept = weights >= tl.load(numbers + MIN_P)
        if HAS_TOP_K_TOP_P:
            if tl.load(numbers + TOP_P) < 1.0:
                is_kept &= kept_by_top_p(
                    to_fixed_point(weights), numbers, sums, found, ties, row, part, num_rows, PARTS
                )
        position = tl.load(starts + row) + tl.load(counts + row)
        scores = tl.where(is_kept, tl.div_rn(weights, noise_of(tl.load(seeds + row), position, at)), float("-inf"))
    store_best(parts, part, PARTS, tl.where(is_there, scores, float("-inf")), part * SIZE)


def launch_choose_drawn(
    logits: Tensor,
    numbers: Tensor,
    seeds: Tensor,
    seen: Tensor,
    has_top_k_top_p: bool,
    token_ids: Tensor,
    starts: Tensor,
    counts: Tensor,
    left: Tensor,
    ends: Tensor,
    chosen: Tensor,
    report: Tensor,
) -> None:
    """Draw each row's token and make it the next input.

    The position of a row's draw is starts + counts, where its token will be.

    Args:
        logits: [B, V] float32; V below 2 ** 24.
        numbers: [B, NUMBERS] float32: sampling parameters in the order of `KERNEL_PARAMETERS`; a temperature of 0 takes
            the likeliest token.
        seeds: [B] int64.
        seen: [B, V] uint8, 1 for tokens that the penalty applies to; the chosen ones are added.
        has_top_k_top_p: True if any row may have top-k or top-p; if False, they are ignored.
        token_ids, starts, counts, left, ends, chosen, report: those of `choose_likeliest`; the log probability is
            that of the logits, before sampling changed them.
    """
    rows, vocab = logits.shape
    num_parts = num_parts_of(vocab)
    changed = torch.empty_like(logits)
    parts = torch.empty(rows, FIELDS, num_parts, dtype=torch.float32, device=logits.device)
    grid = (rows, num_parts)
    sizes: dict[str, Any] = {"SIZE": PART, "NUM_FIELDS": FIELDS, "num_warps": 4, "enable_fp_fusion": False}
    _penalise[grid](logits, numbers, seen, changed, parts, vocab, num_parts, **sizes)
    searched = (
        launch_search(changed, numbers, parts) if has_top_k_top_p else Searched(seeds, seeds, seeds)
    )  # these are unread
    _draw[grid](
        changed,
        numbers,
        seeds,
        starts,
        counts,
        parts,
        *searched,
        vocab,
        rows,
        num_parts,
        HAS_TOP_K_TOP_P=has_top_k_top_p,
        **sizes,
    )
    finish(logits, parts, (token_ids, starts, counts, left, ends, chosen, report), seen)


choose_drawn = register_custom_op(
    "choose_drawn",
    launch_choose_drawn,
    mutates_args=["seen", "token_ids", "starts", "counts", "left", "chosen", "report"],
)
