"""Embeddings of a prompt's chunks: their mean in float64, without a copy of a chunk in float64."""

from functools import partial
from pathlib import Path

import torch
from support.comparisons import peak_nbytes

from graphcore.engine.pooling import Pooled

WIDTH = 256


def test_a_mean_is_summed_in_float64_without_a_copy_of_a_chunk(tmp_path: Path) -> None:
    """`sum(dtype=torch.float64)` makes one on a CPU, too: twice the bytes of the chunk."""
    hidden = torch.randn(1000, WIDTH, generator=torch.Generator().manual_seed(1)) + 100
    pooled, chunks = Pooled("mean"), (hidden[:512], hidden[512:999], hidden[999:])
    for chunk in chunks:
        assert peak_nbytes(partial(pooled.add, chunk), tmp_path) < chunk.nbytes / 2 + 8 * 4 * WIDTH
    expected = torch.from_numpy(hidden.double().numpy().mean(axis=0))
    assert torch.allclose(pooled.embedding(normalize=False).double(), expected, rtol=1e-7)
