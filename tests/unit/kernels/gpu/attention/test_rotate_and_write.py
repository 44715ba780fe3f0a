"""Queries, and keys and values in the cache, against the modules that a block is made of."""

import pytest
import torch
from torch import Tensor

from graphcore.kernels.gpu.attention.rotate_and_write import rotate_and_write
from graphcore.nn.norm import RMSNorm
from graphcore.nn.rope import rope_table, rotate
from graphcore.nn.rope_spec import RopeSpec
from graphcore.nn.spec import NormSpec

HEADS, KV_HEADS, PAGE = 4, 2, 3
STARTS, COUNTS = (3, 12, 4), (1, 1, 0)  # the second wraps to its first page, the third has no token
TABLE = torch.tensor([[3, 1], [0, 5], [4, 2]], dtype=torch.int32)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norms(spec: NormSpec, head_dim: int) -> tuple[RMSNorm, RMSNorm]:
    q_norm, k_norm = RMSNorm(spec, head_dim), RMSNorm(spec, head_dim)
    q_norm.weight, k_norm.weight = random(head_dim, seed=2), random(head_dim, seed=3)
    return q_norm, k_norm


@pytest.mark.parametrize("head_dim", [2, 24, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", [None, NormSpec("rms", 1e-6), NormSpec("rms", 1e-6, scale_in_float32=True)])
@pytest.mark.parametrize("rotated", [1.0, 0.5, 0.0])
def test_heads_are_normalised_rotated_and_written(
    head_dim: int, dtype: torch.dtype, spec: NormSpec | None, rotated: float
) -> None:
    projected = random(3, (HEADS + 2 * KV_HEADS) * head_dim, dtype=dtype)
    width = int(rotated * head_dim) // 2 * 2
    table = rope_table(RopeSpec(1e4, width=width or None), head_dim, 16)
    rope = table[list(STARTS)][:, None].contiguous() if width else None
    caches = [torch.full((6, KV_HEADS, PAGE, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
    starts, counts = torch.tensor(STARTS), torch.tensor(COUNTS)
    weights: list[Tensor | None] = [None, None]
    q, k, v = projected[:, None].unflatten(2, (-1, head_dim)).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
    if spec is not None:
        q_norm, k_norm = norms(spec, head_dim)
        q, k, weights = q_norm(q), k_norm(k), [q_norm.weight, k_norm.weight]
    if rope is not None:
        q, k = rotate(q, rope), rotate(k, rope)
    wide = spec is not None and spec.scale_in_float32
    query = rotate_and_write(projected, rope, *caches, TABLE, starts, counts, *weights, 1e-6, wide)
    # a root that differs in its last place may move a rounded number by one place
    tolerance = 2e-6 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(query, q, rtol=tolerance, atol=tolerance)
    for cache, new in zip(caches, (k, v), strict=True):
        written = {(1, 0): 0, (0, 0): 1}  # page and place of the rows that have a token
        for page in range(6):
            for place in range(PAGE):
                row = written.get((page, place))
                if row is None:
                    assert cache[page, :, place].isnan().all()
                else:
                    torch.testing.assert_close(cache[page, :, place], new[row, 0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_cache_has_a_dtype_of_its_own(cache_dtype: torch.dtype) -> None:
    projected = random(1, 4 * 8)
    k_cache, v_cache = torch.zeros(2, 1, 1, 3, 8, dtype=cache_dtype).unbind(0)
    table = torch.zeros(1, 1, dtype=torch.int32)
    query = rotate_and_write(projected, None, k_cache, v_cache, table, torch.tensor([1]), torch.tensor([1]))
    assert torch.equal(query[0, 0], projected[0, :16].view(2, 8))
    assert torch.equal(k_cache[0, 0, 1], projected[0, 16:24].to(cache_dtype))
    assert torch.equal(v_cache[0, 0, 1], projected[0, 24:].to(cache_dtype))
