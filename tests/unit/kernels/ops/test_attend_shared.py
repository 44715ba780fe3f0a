"""A layer that attends another's keys gives what it would give with these keys as its own."""

import pytest
import torch

from graphcore.kernels.ops.attend import attend

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 8, 6


@pytest.mark.parametrize("window", [0, WINDOW])
@pytest.mark.parametrize("chunk", [1, 5, 9])
def test_keys_that_another_layer_has_written_are_attended_as_own_ones(chunk: int, window: int) -> None:
    """The ring that is shared has room for a pass beside the window; rows differ in length, and one has no token."""
    generator = torch.Generator().manual_seed(chunk)
    slots = WINDOW + chunk if window else 64
    shared = torch.full((2, 3, KV_HEADS, slots, HEAD_DIM), 777.0)
    table = torch.arange(3, dtype=torch.int32)[:, None]  # one page of all slots for each row
    own = torch.full((2, 3, KV_HEADS, 64, HEAD_DIM), 777.0)  # a slot for every position
    starts = torch.zeros(3, dtype=torch.int64)
    for counts in ([chunk, chunk, 0], [chunk, 1, 0], [1, chunk, 0], [chunk, chunk, 0], [chunk, 1, 0]):
        real = torch.tensor(counts)
        query = torch.randn(3, chunk, HEADS, HEAD_DIM, generator=generator)
        key, value = torch.randn(2, 3, chunk, KV_HEADS, HEAD_DIM, generator=generator)
        how = starts, real, window, 0.4
        attend(torch.randn(query.shape, generator=generator), key, value, *shared, table, *how)  # the layer that lends
        before = shared.clone()
        found = attend(query, None, None, *shared, table, *how)
        expected = attend(query, key, value, *own, table, *how)
        for row, count in enumerate(counts):
            assert torch.allclose(found[row, :count], expected[row, :count], rtol=0, atol=1e-6)
        assert torch.equal(shared, before)
        starts += real
