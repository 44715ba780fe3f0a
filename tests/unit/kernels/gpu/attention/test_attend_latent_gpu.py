"""Latent attention as a GPU computes it, against a loop over positions in float64."""

from typing import Any

import pytest
import torch
from support.comparisons import LatentSequences
from torch import Tensor

from graphcore.kernels.gpu.attention import latent
from graphcore.kernels.gpu.attention.latent import launch_latent_token, launch_project_heads
from graphcore.kernels.gpu.attention.write_and_attend import launch_attend
from graphcore.nn.latent_attention import joined_heads
from graphcore.nn.rope import rotate

pytestmark = pytest.mark.thorough

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("widths", "heads"), [((8, 20), 3), ((16, 64), 5)])
@pytest.mark.parametrize("splits", [1, 3])
def test_passes_of_a_batch_match_the_loop(
    dtype: torch.dtype, widths: tuple[int, int], heads: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latent, "KEYS", 16)
    monkeypatch.setattr(latent, "LEAST_TILES", 1)
    monkeypatch.setattr(latent, "processors_of", lambda _device: splits * 3)
    sequences = LatentSequences(3, dtype, widths, heads)
    for counts, tokens in (([5, 1, 0], 6), ([22, 7, 3], 22), ([1, 1, 1], 1), ([0, 1, 1], 1), ([17, 0, 9], 17)):
        assert sequences.error(launch_attend, counts, tokens) < CLOSE[dtype]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_token_is_rotated_written_and_attended_in_one_call(batch: int) -> None:
    sequences = LatentSequences(batch, torch.float32)
    sequences.error(launch_attend, [6, 2, 9][:batch], 9)
    generator = torch.Generator().manual_seed(3)
    rope = torch.randn(batch, 1, 2, 4, generator=generator)

    def turned_first(query: Tensor, key: Tensor, value: Tensor, pool: Tensor, *rest: Any, **_how: int) -> Tensor:
        _, table, starts, counts, _, scale = rest
        heads = query[:, 0].clone()
        out = launch_latent_token(heads, key[:, 0, 0], value[:, 0, 0], pool, table, starts, counts, rope, scale)
        query.copy_(rotate(query, rope))
        torch.testing.assert_close(heads, query[:, 0], rtol=0, atol=1e-6)
        key.copy_(rotate(key, rope))
        return out[:, None]

    assert sequences.error(turned_first, [1] * batch, 1) < 2e-5


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("heads", "inputs", "outputs", "before"), [(3, 20, 37, 8), (2, 64, 16, 0), (5, 7, 3, 2)])
def test_heads_are_multiplied_with_their_own_matrices(
    dtype: torch.dtype, heads: int, inputs: int, outputs: int, before: int
) -> None:
    generator = torch.Generator().manual_seed(heads)
    x, prefix = (torch.randn(4, heads * width, generator=generator).to(dtype) for width in (inputs, before))
    weight = torch.randn(heads, outputs, inputs, generator=generator).to(dtype)
    products = torch.einsum("bhi,hoi->bho", x.view(4, heads, -1).double(), weight.double()).flatten(1)
    expected = joined_heads(prefix.double(), products, heads).flatten(1) if before else products
    found = launch_project_heads(x, weight, prefix if before else None)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 0.1)
    alone = launch_project_heads(x[2:3], weight, prefix[2:3] if before else None)
    assert torch.equal(alone[0], found[2])
