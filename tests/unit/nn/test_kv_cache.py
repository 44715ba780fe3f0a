"""Sizes of the static key and value buffers."""

import pytest
import torch

from graphcore.nn.kv_cache import allocate_cache, cache_nbytes, cache_slots
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec

NORM = NormSpec("rms", 1e-6)
FULL = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=1.0)
SLIDING = AttentionSpec(heads=4, kv_heads=1, head_dim=16, scale=1.0, window=10)


def model(*attentions: AttentionSpec) -> ModelSpec:
    blocks = tuple(BlockSpec(32, NORM, attention, MLPSpec(64, "silu")) for attention in attentions)
    return ModelSpec(32, 100, blocks, NORM, context=1000)


@pytest.mark.parametrize(("context", "full", "sliding"), [(64, 64, 10), (10, 10, 10), (6, 6, 6)])
def test_a_sliding_layer_keeps_its_window_and_never_more_than_the_context(
    context: int, full: int, sliding: int
) -> None:
    assert cache_slots(FULL, context) == full
    assert cache_slots(SLIDING, context) == sliding


def test_each_layer_has_zeroed_buffers_of_its_own_shape() -> None:
    caches = allocate_cache(model(FULL, SLIDING), 3, 64, torch.bfloat16, torch.device("cpu"))
    assert [cache.k.shape for cache in caches] == [(3, 2, 64, 8), (3, 1, 10, 16)]
    assert [cache.v.shape for cache in caches] == [(3, 2, 64, 8), (3, 1, 10, 16)]
    tensors = [tensor for cache in caches for tensor in (cache.k, cache.v)]
    assert all(tensor.dtype == torch.bfloat16 and not tensor.any() for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4


def test_planned_bytes_are_the_allocated_bytes() -> None:
    spec = model(FULL, SLIDING, SLIDING)
    caches = allocate_cache(spec, 3, 64, torch.float16, torch.device("cpu"))
    allocated = sum(cache.k.nbytes + cache.v.nbytes for cache in caches)
    assert cache_nbytes(spec, 3, 64, torch.float16) == allocated == 2 * 3 * (2 * 64 * 8 + 2 * 10 * 16) * 2


def test_rows_share_memory_with_the_whole() -> None:
    (cache,) = allocate_cache(model(FULL), 3, 8, torch.float32, torch.device("cpu"))
    cache.rows(2).k[1].fill_(7.0)
    assert cache.rows(2).k.shape == (2, 2, 8, 8)
    assert (cache.k[1] == 7.0).all()
    assert not cache.k[2].any()
