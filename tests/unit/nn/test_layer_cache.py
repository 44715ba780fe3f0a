"""Sizes of the static buffers of a layer, and copies of what they hold of a sequence."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from paged_caches import shuffle_pages

from graphcore.nn.layer_cache import (
    LayerCache,
    allocate_cache,
    cache_nbytes,
    cache_slots,
    restore,
    snapshot,
    tokens_together,
)
from graphcore.nn.spec import AttentionSpec, BlockSpec, DeltaSpec, MLPSpec, ModelSpec, NormSpec

NORM = NormSpec("rms", 1e-6)
FULL = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=1.0)
DELTA = DeltaSpec(key_heads=2, value_heads=6, key_dim=4, value_dim=5, width=4, eps=1e-6)
SLIDING = AttentionSpec(heads=4, kv_heads=1, head_dim=16, scale=1.0, window=10)


def model(*attentions: AttentionSpec | DeltaSpec) -> ModelSpec:
    blocks = tuple(BlockSpec(32, NORM, attention, MLPSpec(64, "silu")) for attention in attentions)
    return ModelSpec(32, 100, blocks, NORM, context=1000)


def nbytes_of(caches: Sequence[LayerCache]) -> int:
    """Return the bytes of all tensors, shared ones once."""
    tensors = (tensor for cache in caches for tensor in cache.inputs if tensor is not None)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


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


def test_longer_caches_lie_in_pages_of_one_size() -> None:
    wide = replace(SLIDING, window=100)
    caches = allocate_cache(model(FULL, wide, FULL), 3, 200, torch.float16, torch.device("cpu"))
    assert [cache.k.shape for cache in caches] == [(3 * 4, 2, 64, 8), (3 * 2, 1, 64, 16), (3 * 4, 2, 64, 8)]
    assert [cache.slots for cache in caches] == [256, 128, 256]
    assert caches[0].table is caches[2].table
    for cache in caches:
        assert sorted(cache.table.flatten().tolist()) == list(range(len(cache.k)))
    small = allocate_cache(model(FULL, wide), 3, 200, torch.float16, torch.device("cpu"), page=16)
    assert [cache.k.shape[2] for cache in small] == [16, 16]
    assert [cache.table.shape for cache in small] == [(3, 13), (3, 7)]


def test_planned_bytes_are_the_allocated_bytes() -> None:
    spec = model(FULL, SLIDING, DELTA, SLIDING)
    caches = allocate_cache(spec, 3, 64, torch.float16, torch.device("cpu"))
    allocated = nbytes_of(caches)
    attention = 2 * 3 * (2 * 64 * 8 + 2 * 10 * 16) * 2 + 3 * 4  # one table, of one page for each sequence
    delta = 3 * (6 * 4 * 5 + (2 * 2 * 4 + 6 * 5) * 3) * 4
    assert cache_nbytes(spec, 3, 64, torch.float16) == allocated == attention + delta


@pytest.mark.parametrize("page", [64, 16, 7])
def test_planned_bytes_are_the_allocated_bytes_of_pages_and_tables(page: int) -> None:
    spec, sizes = model(FULL, replace(SLIDING, window=100), DELTA, FULL), (3, 200, torch.bfloat16)
    caches = allocate_cache(spec, *sizes, torch.device("cpu"), page=page)
    assert cache_nbytes(spec, *sizes, page=page) == nbytes_of(caches)


@pytest.mark.parametrize(("together", "slots"), [(1, 10), (4, 13), (6, 15), (60, 64)])
def test_a_ring_has_a_spare_slot_for_each_further_token_of_a_step(together: int, slots: int) -> None:
    spec, sizes = model(FULL, SLIDING, DELTA), (3, 64, torch.float16)
    caches = allocate_cache(spec, *sizes, torch.device("cpu"), together=together)
    assert [cache.tensors[0].shape[2] for cache in caches[:2]] == [64, slots]
    assert tokens_together(spec, caches, 64) == (together if slots < 64 else 64)
    assert cache_nbytes(spec, *sizes, together=together) == nbytes_of(caches)


def test_any_number_of_tokens_runs_together_where_no_position_wraps() -> None:
    for spec, context in ((model(FULL, DELTA), 64), (model(SLIDING), 10), (model(SLIDING), 6)):
        caches = allocate_cache(spec, 1, context, torch.float32, torch.device("cpu"))
        assert tokens_together(spec, caches, context) == context


def test_rows_share_memory_with_the_whole() -> None:
    (cache,) = allocate_cache(model(FULL), 3, 8, torch.float32, torch.device("cpu"))
    rows = cache.rows(2, 1)
    assert rows.table.tolist() == cache.table[1:].tolist()
    rows.k[rows.table[0]] = 7.0
    assert (cache.k[1] == 7.0).all()
    assert not cache.k[2].any()


def test_a_delta_layer_keeps_its_state_in_float32_whatever_the_context() -> None:
    (cache,) = allocate_cache(model(DELTA), 3, 64, torch.float16, torch.device("cpu"))
    assert [tensor.shape for tensor in cache.tensors] == [(3, 6, 4, 5), (3, 46, 3)]
    assert {tensor.dtype for tensor in cache.tensors} == {torch.float32}


@pytest.mark.parametrize(("spec", "expected"), [(FULL, True), (SLIDING, False), (DELTA, False)])
def test_only_what_was_not_overwritten_can_be_gone_back_to(spec: AttentionSpec | DeltaSpec, expected: bool) -> None:
    (cache,) = allocate_cache(model(spec), 1, 64, torch.float32, torch.device("cpu"))
    assert cache.can_go_back(0)
    assert cache.can_go_back(11) == expected


@pytest.mark.parametrize("page", [64, 4, 3])
def test_a_snapshot_is_put_back_into_any_row_and_leaves_the_others(page: int) -> None:
    caches = allocate_cache(model(FULL, DELTA, SLIDING), 3, 16, torch.float32, torch.device("cpu"), page=page)
    shuffle_pages(caches)
    for tensor in (tensor for cache in caches for tensor in cache.tensors):
        tensor.normal_()
    before = [snapshot(caches, row) for row in range(3)]
    restore(caches, 1, tuple(torch.zeros_like(tensor) for tensor in before[1]))
    restore(caches, 2, before[1])
    found = [snapshot(caches, row) for row in range(3)]
    for index, old in enumerate(before[1]):
        assert torch.equal(found[2][index], old)
        assert torch.equal(found[0][index], before[0][index])
        assert not found[1][index].any()
    assert not torch.equal(before[0][0], before[1][0])
