"""Sizes of the static buffers of a layer, and copies of what they hold of a sequence."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graphcore.host_pages import is_of_file
from graphcore.kernels.ops.kv_formats import KVTypes
from graphcore.kvcache.buffers import KVCache, LayerCache, allocate_cache, tokens_together
from graphcore.kvcache.sizes import CacheSizes, buffer_shapes, cache_nbytes, page_size, pool_sizes, touched_pages
from graphcore.nn.spec import AttentionSpec, BlockSpec, DeltaSpec, MixerSpec, MLPSpec, ModelSpec, NormSpec

NORM = NormSpec("rms", 1e-6)
FULL = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=1.0)
DELTA = DeltaSpec(key_heads=2, value_heads=6, key_dim=4, value_dim=5, width=4, eps=1e-6)
SLIDING = AttentionSpec(heads=4, kv_heads=1, head_dim=16, scale=1.0, window=10)


def model(*attentions: MixerSpec) -> ModelSpec:
    blocks = tuple(BlockSpec(32, NORM, attention, MLPSpec(64, "silu")) for attention in attentions)
    return ModelSpec(32, 100, blocks, NORM, context=1000)


def nbytes_of(caches: Sequence[LayerCache]) -> int:
    """Return the bytes of all tensors, shared ones once."""
    tensors = (tensor for cache in caches for tensor in cache.inputs if tensor is not None)
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize(
    ("window", "passed", "pages"),
    [(10, 1, 3), (10, 8, 3), (10, 9, 4), (8, 1, 2), (9, 1, 2), (1, 1, 1), (10, 60, 8), (500, 1, 8)],
)
def test_a_ring_has_pages_for_its_window_beside_a_pass_and_never_more_than_the_context(
    window: int, passed: int, pages: int
) -> None:
    """With pages of 8 positions, of a context of 64."""
    keys, values = buffer_shapes(replace(SLIDING, window=window), 64, passed, page=8)
    assert keys == values == (pages, 1, 8, 16)
    longest = max(
        (begin + passed - 1) // 8 - max(0, begin - window + 1) // 8 + 1 for begin in range(64) if begin + passed <= 64
    )
    assert longest <= pages <= longest + 1


@pytest.mark.parametrize(("context", "page"), [(4096, 64), (256, 64), (255, 32), (64, 16), (7, 1), (1, 1)])
def test_short_contexts_have_small_pages(context: int, page: int) -> None:
    assert page_size(context) == page


def test_each_layer_has_zeroed_buffers_of_its_own_shape() -> None:
    caches = allocate_cache(model(FULL, SLIDING), CacheSizes(3, 64, torch.bfloat16, chunk=1), torch.device("cpu"))
    assert [cache.k.shape for cache in caches] == [(1 + 3 * 4, 2, 16, 8), (1 + 3 * 2, 1, 16, 16)]
    assert [cache.v.shape for cache in caches] == [cache.k.shape for cache in caches]
    tensors = [tensor for cache in caches for tensor in (cache.k, cache.v)]
    assert all(tensor.dtype == torch.bfloat16 and not tensor.any() for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="keys and values are offloaded on Linux only")
def test_offloaded_pools_have_the_shapes_and_tables_of_others_and_copies_in_files(tmp_path: Path) -> None:
    full, sliding = (replace(one, head_dim=32) for one in (FULL, SLIDING))
    spec, sizes = model(full, sliding, full), CacheSizes(3, 64, KVTypes("q8_0", torch.float16), chunk=1)
    plain = allocate_cache(spec, sizes, torch.device("cpu"))
    caches = allocate_cache(spec, sizes, torch.device("cpu"), {1, 2}, tmp_path)
    for one, other in zip(plain, caches, strict=True):
        assert isinstance(one, KVCache)
        assert isinstance(other, KVCache)
        assert [each.shape for each in one.tensors] == [each.shape for each in other.tensors]
        assert [each.dtype for each in one.tensors] == [each.dtype for each in other.tensors]
        assert not any(each.any() for each in other.tensors)
    assert [is_of_file(cache.k) for cache in caches if isinstance(cache, KVCache)] == [False, True, True]
    assert isinstance(caches[0], KVCache)
    assert isinstance(caches[2], KVCache)
    assert caches[0].table is caches[2].table
    found = pool_sizes(spec, sizes)
    for layer, cache in enumerate(caches):
        assert found[layer].nbytes == sum(each.nbytes for each in cache.tensors)
    assert found[0].read_nbytes == found[0].nbytes * 4 // 13  # 4 pages of a sequence; 3 sequences and the null page
    cache, pages = caches[2].rows(2), torch.tensor([5, 3])
    for pool in cache.tensors:
        pool.copy_(torch.arange(pool.numel()).view(pool.shape) % 120)
    kept = cache.copy_out(pages)
    expected = [pool[[5, 3]].clone() for pool in cache.tensors]
    for pool in cache.tensors:
        pool.zero_()
    assert all(is_of_file(each) for each in kept)
    assert all(torch.equal(each, other) for each, other in zip(kept, expected, strict=True))
    cache.copy_in(pages, kept)
    assert all(torch.equal(pool[[5, 3]], other) for pool, other in zip(cache.tensors, expected, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_longer_caches_lie_in_pages_of_one_size() -> None:
    wide = replace(SLIDING, window=100)
    caches = allocate_cache(model(FULL, wide, FULL), CacheSizes(3, 512, torch.float16, chunk=64), torch.device("cpu"))
    assert [cache.k.shape for cache in caches] == [(1 + 3 * 8, 2, 64, 8), (1 + 3 * 4, 1, 64, 16), (25, 2, 64, 8)]
    assert [cache.slots for cache in caches] == [512, 256, 512]
    assert caches[0].table is caches[2].table
    for cache in caches:  # page 0 is nobody's
        assert sorted(cache.table.flatten().tolist()) == list(range(1, len(cache.k)))
    small = allocate_cache(model(FULL, wide), CacheSizes(3, 200, torch.float16, page=16, chunk=16), torch.device("cpu"))
    assert [cache.k.shape[2] for cache in small] == [16, 16]
    assert [cache.table.shape for cache in small] == [(3, 13), (3, 9)]


@pytest.mark.parametrize(("tokens", "pages"), [(192, 12), (64, 4), (65, 5), (100, 7), (200, 13), (10, 1)])
def test_a_pool_has_pages_for_the_tokens_that_all_sequences_share(tokens: int, pages: int) -> None:
    sizes = CacheSizes(3, 64, torch.float16, chunk=4, tokens=tokens)
    full, ring = allocate_cache(model(FULL, SLIDING), sizes, torch.device("cpu"))
    assert len(full.k) == 1 + pages
    assert len(ring.k) == 1 + min(pages, 3 * 2)
    assert not full.table.any()
    assert not ring.table.any()  # sequences get pages while they run
    assert cache_nbytes(model(FULL, SLIDING), sizes) == nbytes_of([full, ring])


def test_planned_bytes_are_the_allocated_bytes() -> None:
    spec = model(FULL, SLIDING, DELTA, SLIDING)
    sizes = CacheSizes(3, 64, torch.float16, chunk=1, snapshots=2)
    caches = allocate_cache(spec, sizes, torch.device("cpu"))
    allocated = nbytes_of(caches)
    attention = 2 * (13 * 2 * 16 * 8 + 2 * 7 * 16 * 16) * 2 + 3 * (4 + 2) * 4  # two tables
    delta = 5 * (6 * 4 * 5 + (2 * 2 * 4 + 6 * 5) * 3) * 4
    assert cache_nbytes(spec, sizes) == allocated == attention + delta


@pytest.mark.parametrize("page", [64, 16, 7])
def test_planned_bytes_are_the_allocated_bytes_of_pages_and_tables(page: int) -> None:
    spec = model(FULL, replace(SLIDING, window=100), DELTA, FULL)
    sizes = CacheSizes(3, 200, torch.bfloat16, page=page)
    caches = allocate_cache(spec, sizes, torch.device("cpu"))
    assert cache_nbytes(spec, sizes) == nbytes_of(caches)


@pytest.mark.parametrize(("together", "pages"), [(1, 3), (8, 3), (9, 4), (16, 4), (17, 5), (60, 8)])
def test_a_ring_has_room_for_the_further_tokens_of_a_step(together: int, pages: int) -> None:
    """With pages of 8 positions; a window of 10 and one more token lie in three of them at most."""
    spec = model(FULL, SLIDING, DELTA)
    sizes = CacheSizes(3, 64, torch.float16, chunk=1, together=together, page=8)
    caches = allocate_cache(spec, sizes, torch.device("cpu"))
    assert caches[1].table.shape == (3, pages)
    assert tokens_together(spec, caches, 64) >= together
    assert touched_pages(10 - 1 + tokens_together(spec, caches, 64), 8) == pages or pages == 8
    assert cache_nbytes(spec, sizes) == nbytes_of(caches)


def test_any_number_of_tokens_runs_together_where_no_position_wraps() -> None:
    for spec, context in ((model(FULL, DELTA), 64), (model(SLIDING), 10), (model(SLIDING), 6)):
        caches = allocate_cache(spec, CacheSizes(1, context, torch.float32), torch.device("cpu"))
        assert tokens_together(spec, caches, context) == context


def test_rows_share_memory_with_the_whole() -> None:
    (cache,) = allocate_cache(model(FULL), CacheSizes(3, 8, torch.float32), torch.device("cpu"))
    rows = cache.rows(2, 1)
    assert rows.table.tolist() == cache.table[1:].tolist()
    rows.k[rows.table[0]] = 7.0
    assert (cache.k[cache.table[1]] == 7.0).all()
    assert not cache.k[cache.table[2]].any()


def test_a_delta_layer_keeps_its_state_in_float32_whatever_the_context() -> None:
    (cache,) = allocate_cache(model(DELTA), CacheSizes(3, 64, torch.float16), torch.device("cpu"))
    assert [tensor.shape for tensor in cache.tensors] == [(3, 6, 4, 5), (3, 46, 3)]
    assert {tensor.dtype for tensor in cache.tensors} == {torch.float32}


def test_layers_of_other_processes_have_the_same_pages_and_rows_and_no_bytes() -> None:
    spec = model(FULL, SLIDING, DELTA, SLIDING, FULL)
    sizes = CacheSizes(3, 64, torch.float16, chunk=1, snapshots=2)
    whole = allocate_cache(spec, sizes, torch.device("cpu"))
    some = replace(sizes, layers={1, 4})
    part = allocate_cache(spec, some, torch.device("cpu"))
    for layer, (one, other) in enumerate(zip(whole, part, strict=True)):
        shapes = [[tuple(tensor.shape) for tensor in cache.tensors] for cache in (one, other)]
        if layer in (1, 4):
            assert shapes[0] == shapes[1]
            continue
        assert all(tensor.numel() == 0 for tensor in other.tensors)
        assert [len(tensor) for tensor in other.tensors] == [len(tensor) for tensor in one.tensors]
    tables = [[cache.inputs[2] for cache in caches if cache.inputs[2] is not None] for caches in (whole, part)]
    assert all(torch.equal(one, other) for one, other in zip(*tables, strict=True))
    slots = [[cache.slots for cache in caches if isinstance(cache, KVCache)] for caches in (whole, part)]
    assert slots[0] == slots[1]
    assert cache_nbytes(spec, some) == nbytes_of(part) < cache_nbytes(spec, sizes)
