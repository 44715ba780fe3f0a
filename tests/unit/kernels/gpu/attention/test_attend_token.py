"""A token's projections through attention's kernel, against the modules that a block is made of, and float64."""

from typing import NamedTuple

import pytest
import torch
from arrivals import orders_of_arrival
from torch import Tensor

from graphcore.kernels.gpu.attention.decode import NO_NORMS, HeadNorms, attend_token, launch_attend_token
from graphcore.kernels.ops.attend import masked_attend
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.kv_formats import FLOAT8, KVType, pool_dtype, vector_shape
from graphcore.nn.norm import RMSNorm
from graphcore.nn.rope import rope_table, rotate
from graphcore.nn.rope_spec import RopeSpec
from graphcore.nn.spec import NormSpec

pytestmark = pytest.mark.thorough

HEADS, KV_HEADS, PAGE = 4, 2, 3
STARTS, COUNTS = (3, 12, 4), (1, 1, 0)  # the second wraps to its first page, the third has no token
TABLE = torch.tensor([[3, 1], [0, 5], [4, 2]], dtype=torch.int32)
WRITTEN = {(1, 0): 0, (0, 0): 1}  # page and place of the rows that have a token
KINDS = [("q8_0", "q8_0"), ("q5_0", "q4_0"), (torch.float32, "q8_0"), ("q4_0", torch.float32), (FLOAT8, FLOAT8)]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norms(spec: NormSpec, head_dim: int) -> tuple[RMSNorm, RMSNorm]:
    q_norm, k_norm = RMSNorm(spec, head_dim), RMSNorm(spec, head_dim)
    q_norm.weight, k_norm.weight = random(head_dim, seed=2), random(head_dim, seed=3)
    return q_norm, k_norm


class Token(NamedTuple):
    """A token of each sequence as its projections gave it, and what the modules make of it."""

    projected: tuple[Tensor, ...]
    rope: Tensor | None
    norms: HeadNorms
    expected: tuple[Tensor, Tensor, Tensor]


def token(head_dim: int, dtype: torch.dtype, spec: NormSpec | None, rotated: float) -> Token:
    rows = random(3, (HEADS + 2 * KV_HEADS) * head_dim, dtype=dtype)
    width = int(rotated * head_dim) // 2 * 2
    table = rope_table(RopeSpec(1e4, width=width or None), head_dim, 16)
    rope = table[list(STARTS)][:, None].contiguous() if width else None
    projected = rows.view(3, 1, -1, head_dim).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    (q, k, v), of_heads = projected, NO_NORMS
    if spec is not None:
        q_norm, k_norm = norms(spec, head_dim)
        q, k = q_norm(q), k_norm(k)
        of_heads = HeadNorms(q_norm.weight, k_norm.weight, spec.eps, spec.scale_in_float32)
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    return Token(projected, rope, of_heads, (q, k, v))


HEAD_DIMS = (2, 24, 64, 80, 256)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORMS = (None, NormSpec("rms", 1e-6), NormSpec("rms", 1e-6, scale_in_float32=True))
ROTATED = (1.0, 0.5, 0.0)
CASES = [  # each value beside each of every other parameter
    (head_dim, dtype, spec, ROTATED[(first + second + third) % 3])
    for first, head_dim in enumerate(HEAD_DIMS)
    for second, dtype in enumerate(DTYPES)
    for third, spec in enumerate(NORMS)
]


@pytest.mark.parametrize(("head_dim", "dtype", "spec", "rotated"), CASES)
def test_heads_are_normalised_rotated_written_and_attended(
    head_dim: int, dtype: torch.dtype, spec: NormSpec | None, rotated: float
) -> None:
    one = token(head_dim, dtype, spec, rotated)
    caches = [torch.full((6, KV_HEADS, PAGE, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
    for row, start in enumerate(STARTS):  # all that is visible beside the new token
        for position in range(max(0, start - 6), start):
            page = TABLE[row, position // PAGE % 2]
            for at, cache in enumerate(caches):
                cache[page, :, position % PAGE] = random(KV_HEADS, head_dim, dtype=dtype, seed=100 * at + position)
    before = [cache.clone() for cache in caches]
    spans = (TABLE, torch.tensor(STARTS), torch.tensor(COUNTS))
    how = AttentionParameters(6, head_dim**-0.5)
    found = attend_token(*one.projected, *caches, *spans, how, None, one.rope, one.norms)
    # a root that differs in its last place may move a rounded number by one place
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for cache, old, new in zip(caches, before, one.expected[1:], strict=True):
        for page in range(6):
            for place in range(PAGE):
                row = WRITTEN.get((page, place))
                right = old[page, :, place] if row is None else new[row, 0]
                torch.testing.assert_close(
                    cache[page, :, place],
                    right,
                    rtol=tolerance,
                    atol=tolerance if row is not None else 0,
                    equal_nan=True,
                )
    wide = [one.double() for one in (*one.expected, *before)]
    expected = masked_attend(*wide, *spans, *how).view(3, HEADS, head_dim)
    torch.testing.assert_close(found[:2, 0].double(), expected[:2], rtol=0, atol=4 * tolerance)
    assert found[2].count_nonzero() == 0


@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [None, NormSpec("rms", 1e-6)])
def test_codes_are_those_of_the_token_and_answers_those_of_the_codes(
    kinds: tuple[KVType, KVType], dtype: torch.dtype, spec: NormSpec | None
) -> None:
    """The pools are those that plain torch writes, which attends them as they are kept, so all splits read one key."""
    one = token(64, dtype, spec, 1.0)
    pools = []
    for seed, kind in enumerate(kinds):
        shape = (6, KV_HEADS, PAGE, *vector_shape(kind, 64))
        pools.append(torch.zeros(shape, dtype=pool_dtype(kind)))
        past = [random(1, 6, KV_HEADS, 64, seed=10 * seed + row) for row in range(3)]
        for row, start in enumerate(STARTS):
            span = (TABLE[row : row + 1], torch.tensor([max(0, start - 6)]), torch.tensor([min(start, 6)]), 0, 1.0)
            masked_attend(past[row], past[row], past[row], pools[-1], pools[-1], *span)
    theirs = [pool.clone() for pool in pools]
    spans = (TABLE, torch.tensor(STARTS), torch.tensor(COUNTS))
    found = attend_token(*one.projected, *pools, *spans, AttentionParameters(6, 0.2), None, one.rope, one.norms)
    expected = masked_attend(*one.expected, *theirs, *spans, 6, 0.2)
    if dtype is torch.float32 and spec is None:
        assert all(torch.equal(pool.float(), own.float()) for pool, own in zip(pools, theirs, strict=True))
    tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(found[:2], expected[:2].view_as(found[:2]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_has_a_dtype_of_its_own(cache_dtype: torch.dtype) -> None:
    q, k, v = random(1, 1, 4, 8).split([2, 1, 1], dim=2)
    k_cache, v_cache = torch.zeros(2, 1, 1, 3, 8, dtype=cache_dtype).unbind(0)
    table = torch.zeros(1, 1, dtype=torch.int32)
    found = attend_token(
        q, k, v, k_cache, v_cache, table, torch.tensor([0]), torch.tensor([1]), AttentionParameters(0, 0.3)
    )
    assert torch.equal(k_cache[0, 0, 0], k[0, 0, 0].to(cache_dtype))
    assert torch.equal(v_cache[0, 0, 0], v[0, 0, 0].to(cache_dtype))
    assert torch.equal(found[0, 0], v[0, 0].to(cache_dtype).float().expand(2, 8))


@pytest.mark.parametrize("start", [15, 17, 64, 199])
@pytest.mark.parametrize("window", [0, 40])
def test_the_last_of_many_splits_reads_what_it_has_written(
    start: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order the splits run: no other one needs the new key."""
    new = torch.split(random(1, 1, 4, 16), [2, 1, 1], dim=2)
    spans = (torch.zeros(1, 1, dtype=torch.int32), torch.tensor([start]), torch.tensor([1]))
    before = [random(1, 1, 200, 16, seed=seed) for seed in (1, 2)]
    for cache in before:
        cache[:, :, start:] = float("nan")
    theirs = [cache.nan_to_num() for cache in before]
    expected = masked_attend(*new, *theirs, *spans, window, 0.3)
    for _ in orders_of_arrival(monkeypatch):
        caches = [cache.clone() for cache in before]
        found = launch_attend_token(*new, *caches, *spans, AttentionParameters(window, 0.3), tile=16, alone=1)
        torch.testing.assert_close(found, expected.view_as(found), rtol=0, atol=2e-6)
        assert all(
            torch.equal(cache[..., : start + 1, :], own[..., : start + 1, :])
            for cache, own in zip(caches, theirs, strict=True)
        )
