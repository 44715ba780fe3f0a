"""The delta rule for many tokens: a parallel kernel prepares all chunks of tokens, then a scan computes the states.

Legend: B batch, T tokens, C channels, G key heads, H value heads, N key dim, M value dim, L tokens of a chunk.

    prepare, for each chunk    d = sums of decays;  A(i, j) = beta(i) exp(d(i) - d(j)) k(i) . k(j) for j < i
                               solved = (1 + A)^-1 beta;  scores(i, j) = exp(d(i) - d(j)) q(i) . k(j) for j <= i
    scan, chunk after chunk    c = solved (v - exp(d) k S);  o = exp(d) q S + scores c
                               S = exp(d(L)) S + k^T exp(d(L) - d) c
    norm                       RMSNorm(o) * weight * SiLU(z)

The columns of a state change independently, so the programs of the scan take some of a head's columns each. What keys
and queries are multiplied with is held by each warp in whole, so few columns and tokens fit in registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from graphcore.kernels.gpu.attention.running_softmax import precision_of
from graphcore.kernels.ops.gated_delta import DeltaParts

COLUMNS = 16  # columns of a state that a program of the scan holds
PIECE = 64  # features of keys that are multiplied at once; a state has at most two pieces of them
MOST_KEYS = 2 * PIECE
ROWS = 8  # rows of a program of the norm


class Tiles(NamedTuple):
    """Tokens of a chunk, features that `_prepare` multiplies at once, and the warps of `_prepare` and `_scan`."""

    chunk: int
    piece: int
    prepare_warps: int
    scan_warps: int


# as large as registers allow, on sm_80 and on sm_90; float32 has no tensor cores
TILES, FLOAT32_TILES = Tiles(32, 32, 4, 4), Tiles(16, 32, 4, 8)


@triton.jit
def _prepare(
    joined, decays, betas, sums, solved, scores, tokens, channels, key_heads, heads,
    TILED: tl.constexpr, KEY_DIM: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head = head % key_heads if TILED else head // (heads // key_heads)
    step = tl.arange(0, CHUNK)
    left = tokens - chunk * CHUNK
    is_token = step < left
    first_token = sequence * tokens + chunk * CHUNK
    gates = first_token * heads + head + step * heads
    total = tl.cumsum(tl.load(decays + gates, mask=is_token, other=0.0), axis=0)
    beta = tl.load(betas + gates, mask=is_token, other=0.0)
    rows = joined + first_token * channels + key_head * KEY_DIM
    products = tl.zeros([CHUNK, CHUNK], tl.float32)
    answers = tl.zeros([CHUNK, CHUNK], tl.float32)
    for part in range(0, KEY_DIM, PIECE):
        q = _features(rows, step, left, part, channels, KEY_DIM, PIECE)
        k = _features(rows + key_heads * KEY_DIM, step, left, part, channels, KEY_DIM, PIECE)
        answers = tl.dot(q, tl.trans(k), acc=answers, input_precision=PRECISION)
        products = tl.dot(k, tl.trans(k), acc=products, input_precision=PRECISION)
    is_seen = step[:, None] >= step[None, :]
    between = tl.where(is_seen, tl.exp(tl.where(is_seen, total[:, None] - total[None, :], 0.0)), 0.0)
    place = ((sequence * heads + head) * tl.num_programs(0) + chunk) * CHUNK
    square = (place + step)[:, None] * CHUNK + step[None, :]
    tl.store(sums + place + step, total)
    tl.store(scores + square, answers * between)
    system = tl.where(step[:, None] > step[None, :], products * between * beta[:, None], 0.0)
    inverse = tl.where(step[:, None] == step[None, :], 1.0, 0.0)
    for index in range(CHUNK - 1):  # rows up to `index` of the inverse are final
        column = tl.sum(tl.where(step[None, :] == index, system, 0.0), axis=1)
        row = tl.sum(tl.where(step[:, None] == index, inverse, 0.0), axis=0)
        inverse -= column[:, None] * row[None, :]
    tl.store(solved + square, inverse * beta[None, :])


@triton.jit
def _features(rows, step, left, first, channels, DIM: tl.constexpr, COUNT: tl.constexpr):
    """Return features first .. first + COUNT - 1 of a chunk's tokens, [L, COUNT]; 0 after the last token and feature.

    Args:
        rows: pointer to the head's first feature of the chunk's first token.
        step: [L] indices in the chunk.  left: number of tokens from the chunk's first on.
    """
    at = first + tl.arange(0, COUNT)
    is_there = (step < left)[:, None] & (at < DIM)[None, :]
    return tl.load(rows + step[:, None] * channels + at[None, :], mask=is_there, other=0.0)


@triton.jit
def _state_at(state, first, column, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PIECE: tl.constexpr):
    """Return where features first .. first + PIECE - 1 of a state's columns lie, and which of them there are."""
    key = first + tl.arange(0, PIECE)
    at = state + key[:, None] * VALUE_DIM + column[None, :]
    return at, (key < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]


@triton.jit
def _scan(
    joined, sums, solved, scores, state, starts, counts, answers, tokens, chunks, channels, key_heads, heads,
    TILED: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PIECE: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = tl.load(counts + sequence).to(tl.int32)
    if count == 0:
        return
    key_head = head % key_heads if TILED else head // (heads // key_heads)
    column, step = part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    place = sequence * heads + head
    own = state + place * KEY_DIM * VALUE_DIM
    is_old = tl.load(starts + sequence) > 0
    at, is_there = _state_at(own, 0, column, KEY_DIM, VALUE_DIM, PIECE)
    first_held = tl.where(is_old, tl.load(at, mask=is_there, other=0.0), 0.0)
    second_held = first_held
    if KEY_DIM > PIECE:
        at, is_there = _state_at(own, PIECE, column, KEY_DIM, VALUE_DIM, PIECE)
        second_held = tl.where(is_old, tl.load(at, mask=is_there, other=0.0), 0.0)
    for chunk in range(tl.cdiv(count, CHUNK)):
        left = tokens - chunk * CHUNK
        queries = joined + (sequence * tokens + chunk * CHUNK) * channels + key_head * KEY_DIM
        keys = queries + key_heads * KEY_DIM
        values = keys + (key_heads - key_head) * KEY_DIM + head * VALUE_DIM
        is_value = (step < left)[:, None] & (column < VALUE_DIM)[None, :]
        v = tl.load(values + step[:, None] * channels + column[None, :], mask=is_value, other=0.0)
        first = (place * chunks + chunk) * CHUNK
        square = step[:, None] * CHUNK + step[None, :]
        total = tl.load(sums + first + step)
        last = tl.load(sums + first + CHUNK - 1)
        gate = tl.exp(total)[:, None]
        k = _features(keys, step, left, 0, channels, KEY_DIM, PIECE)
        reads = tl.dot(k, first_held, input_precision=PRECISION)
        if KEY_DIM > PIECE:
            k = _features(keys, step, left, PIECE, channels, KEY_DIM, PIECE)
            reads = tl.dot(k, second_held, acc=reads, input_precision=PRECISION)
        change = tl.dot(tl.load(solved + first * CHUNK + square), v - gate * reads, input_precision=PRECISION)
        q = _features(queries, step, left, 0, channels, KEY_DIM, PIECE)
        answer = tl.dot(q, first_held, input_precision=PRECISION)
        if KEY_DIM > PIECE:
            q = _features(queries, step, left, PIECE, channels, KEY_DIM, PIECE)
            answer = tl.dot(q, second_held, acc=answer, input_precision=PRECISION)
        answer = tl.dot(tl.load(scores + first * CHUNK + square), change, acc=gate * answer, input_precision=PRECISION)
        into = answers + ((sequence * tokens + chunk * CHUNK) * heads + head) * VALUE_DIM
        tl.store(into + step[:, None] * (heads * VALUE_DIM) + column[None, :], answer, mask=is_value)
        to_end = tl.exp(last - total)[:, None]
        k = _features(keys, step, left, 0, channels, KEY_DIM, PIECE) * to_end
        first_held = tl.dot(tl.trans(k), change, acc=first_held * tl.exp(last), input_precision=PRECISION)
        if KEY_DIM > PIECE:
            k = _features(keys, step, left, PIECE, channels, KEY_DIM, PIECE) * to_end
            second_held = tl.dot(tl.trans(k), change, acc=second_held * tl.exp(last), input_precision=PRECISION)
    at, is_there = _state_at(own, 0, column, KEY_DIM, VALUE_DIM, PIECE)
    tl.store(at, first_held, mask=is_there)
    if KEY_DIM > PIECE:
        at, is_there = _state_at(own, PIECE, column, KEY_DIM, VALUE_DIM, PIECE)
        tl.store(at, second_held, mask=is_there)


@triton.jit
def _gated_norm(
    answers, z, weight, counts, out, rows, tokens, heads, eps,
    VALUE_DIM: tl.constexpr, VALUES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, value = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, VALUES)
    token = row // heads
    is_real = (row < rows) & (token % tokens < tl.load(counts + token // tokens, mask=row < rows, other=0))
    is_value = (value < VALUE_DIM)[None, :]
    at = row[:, None].to(tl.int64) * VALUE_DIM + value[None, :]
    answer = tl.load(answers + at, mask=is_real[:, None] & is_value, other=0.0)
    gate = tl.load(z + at, mask=is_real[:, None] & is_value, other=0.0).to(tl.float32)
    answer *= tl.rsqrt(tl.sum(answer * answer, axis=1) / VALUE_DIM + eps)[:, None]
    answer *= tl.load(weight + value, mask=value < VALUE_DIM, other=0.0)[None, :] * gate / (1 + tl.exp(-gate))
    tl.store(out + at, answer.to(out.dtype.element_ty), mask=(row < rows)[:, None] & is_value)


def launch_chunks(parts: DeltaParts, joined: Tensor, decays: Tensor, betas: Tensor) -> Tensor:
    """Apply the rule to the tokens [B, T, C] of `launch_convolve`; return the result of `delta_heads`."""
    batch, heads, key_dim, value_dim = parts.recurrent.shape
    tokens, channels = joined.shape[1:]
    assert key_dim <= MOST_KEYS, f"a program holds states of {MOST_KEYS} features, not {key_dim}"
    tiles = FLOAT32_TILES if parts.mixed.dtype is torch.float32 else TILES
    chunks = triton.cdiv(tokens, tiles.chunk)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=joined.device)

    sums = empty(batch, heads, chunks * tiles.chunk)
    solved, scores = (empty(batch, heads, chunks, tiles.chunk, tiles.chunk) for _ in range(2))
    how: dict[str, int | str] = {
        "TILED": parts.tiled,
        "KEY_DIM": key_dim,
        "CHUNK": tiles.chunk,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }
    how["PRECISION"] = precision_of(parts.mixed.dtype)
    _prepare[(chunks, heads, batch)](
        joined, decays, betas, sums, solved, scores, tokens, channels, parts.key_heads, heads,
        PIECE=tiles.piece, num_warps=tiles.prepare_warps, **how,
    )  # fmt: skip
    answers = empty(batch, tokens, heads, value_dim)
    _scan[(triton.cdiv(value_dim, COLUMNS), heads, batch)](
        joined, sums, solved, scores, parts.recurrent, parts.starts, parts.counts, answers, tokens, chunks, channels,
        parts.key_heads, heads, VALUE_DIM=value_dim, PIECE=PIECE, COLUMNS=COLUMNS, num_warps=tiles.scan_warps, **how,
    )  # fmt: skip
    out, rows = torch.empty_like(parts.z), batch * tokens * heads
    _gated_norm[(triton.cdiv(rows, ROWS),)](
        answers, parts.z, parts.norm_weight, parts.counts, out, rows, tokens, heads, parts.eps,
        VALUE_DIM=value_dim, VALUES=triton.next_power_of_2(value_dim), ROWS=ROWS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
