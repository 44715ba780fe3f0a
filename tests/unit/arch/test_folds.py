"""Folds against what the other side does: llama.cpp's converter, Conv1D, Gemma's norm."""

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from graphcore.arch.folds import (
    AddOne,
    GroupHeads,
    InverseScale,
    NegatedExp,
    PickParts,
    PickRows,
    ScaleOnly,
    SplitPairs,
    Transpose,
    WithoutScale,
)


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """Return what llama.cpp's converter stores. Source: its LlamaModel.permute, halves to interleaved pairs."""
    rows = weights.shape[0] // heads // 2
    return weights.reshape(heads, 2, rows, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (1, 8), (4, 6), (3, 64)])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_split_pairs_undoes_llama_cpp_s_permutation(heads: int, head_dim: int, columns: tuple[int, ...]) -> None:
    stored_by_hf = torch.arange(heads * head_dim * (columns or (1,))[0]).reshape(heads * head_dim, *columns)
    in_gguf = torch.from_numpy(permuted(stored_by_hf.numpy(), heads).copy())
    assert torch.equal(SplitPairs(heads).apply(in_gguf), stored_by_hf)
    if head_dim > 2:
        assert not torch.equal(in_gguf, stored_by_hf)


def test_split_pairs_moves_whole_rows_so_that_packed_bytes_survive_it() -> None:
    packed = torch.randint(0, 256, (24, 18), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    moved = SplitPairs(3).apply(packed)
    assert sorted(map(tuple, moved.tolist())) == sorted(map(tuple, packed.tolist()))


def test_pick_parts_takes_rows_of_each_group_part_by_part() -> None:
    """Two groups of q0 q1 k0 v0: all queries come first, then all keys."""
    fused = torch.arange(8)[:, None].repeat(1, 3)
    assert PickParts(2, ((0, 2), (2, 3))).apply(fused)[:, 0].tolist() == [0, 1, 4, 5, 2, 6]
    assert PickParts(2, ((3, 4),)).apply(torch.arange(8)).tolist() == [3, 7]


def test_tiled_value_heads_are_grouped_by_key_head_and_tiled_again() -> None:
    """Three key heads with two value heads each, of two rows; two rows before them stay."""
    tiled = torch.tensor([-2, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5])
    fold = GroupHeads(3, 2, 2, first=2)
    assert fold.apply(tiled).tolist() == [-2, -1, 0, 0, 3, 3, 1, 1, 4, 4, 2, 2, 5, 5]
    assert torch.equal(fold.undo(fold.apply(tiled)), tiled)
    columns = GroupHeads(3, 2, 1, of_columns=True)
    matrix = torch.arange(12).reshape(2, 6)
    assert columns.apply(matrix)[0].tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(columns.undo(columns.apply(matrix)), matrix)


def test_a_log_becomes_the_rate_that_gguf_stores() -> None:
    rate = NegatedExp().apply(torch.tensor([0.0, 1.0], dtype=torch.bfloat16))
    assert rate.dtype is torch.float32
    torch.testing.assert_close(rate, torch.tensor([-1.0, -np.e], dtype=torch.float32))


def test_pick_rows_takes_one_of_three_fused_projections() -> None:
    fused = torch.arange(24).reshape(12, 2)
    parts = [PickRows(at, at + 4).apply(fused) for at in (0, 4, 8)]
    assert torch.equal(torch.cat(parts), fused)
    assert parts[1].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]


def test_pick_rows_takes_an_expert_s_gate_and_up_out_of_alternating_rows() -> None:
    gate, up = torch.arange(24).reshape(2, 3, 4), 100 + torch.arange(24).reshape(2, 3, 4)  # [X, R, C]
    alternating = torch.stack((gate, up), dim=2).flatten(1, 2)
    assert torch.equal(PickRows(0, 6, step=2, axis=-2).apply(alternating), gate)
    assert torch.equal(PickRows(1, 6, step=2, axis=-2).apply(alternating), up)
    assert torch.equal(PickRows(1, 6, step=2, axis=-1).apply(alternating[:, :, 0]), up[:, :, 0])
    fused = torch.cat((gate, up), dim=1)
    assert torch.equal(PickRows(3, 6, axis=-2).apply(fused), up)


def test_picked_rows_are_a_view_so_that_filling_them_fills_the_whole() -> None:
    whole = torch.zeros(2, 4, 6)
    PickRows(1, 6, step=2, axis=-2).apply(Transpose().apply(whole)).copy_(torch.ones(2, 3, 4))
    assert whole.sum(dim=(0, 1)).tolist() == [0, 8, 0, 8, 0, 8]


def test_transpose_turns_a_conv1d_s_weight_into_a_linear_s() -> None:
    conv = Conv1D(7, 5)  # 5 inputs, 7 outputs, weight [5, 7]
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    weight: Tensor = Transpose().apply(conv.weight)
    assert torch.allclose(torch.nn.functional.linear(x, weight, conv.bias), conv(x), atol=1e-6)


def test_add_one_adds_in_float32() -> None:
    stored = torch.tensor([2**-9, -0.5, 0.0], dtype=torch.bfloat16)  # 1 + 2^-9 is no bf16 number
    assert AddOne().apply(stored).tolist() == [1 + 2**-9, 0.5, 1.0]
    assert AddOne().apply(stored).dtype == torch.float32


SIGNS = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, 1.0]])


@pytest.mark.parametrize("scale", [1.6875, 0.1, 3e-8, 1e6 / 3, torch.finfo(torch.float32).tiny])
def test_a_ternary_weight_is_its_signs_and_its_scale(scale: float) -> None:
    weight = SIGNS * torch.tensor(scale)
    assert torch.equal(WithoutScale().apply(weight), SIGNS)
    assert torch.equal(ScaleOnly().apply(weight), torch.tensor([scale]))
    assert torch.equal(ScaleOnly().apply(-weight), torch.tensor([scale]))


def test_a_divisor_in_bf16_survives_two_inversions() -> None:
    divisors = (1 + torch.arange(128) / 128).to(torch.bfloat16).float()  # every significand of bf16
    twice = 1.0 / (1.0 / divisors)
    assert not torch.equal(twice, divisors)
    found = torch.cat([InverseScale().apply(SIGNS * (1.0 / divisor)) for divisor in divisors])
    assert torch.equal(found, divisors)


def test_any_other_divisor_comes_back_to_the_last_place() -> None:
    divisor = torch.rand(1, generator=torch.Generator().manual_seed(0)) + 1
    assert torch.allclose(InverseScale().apply(SIGNS * (1.0 / divisor)), divisor, rtol=2**-23, atol=0)


def test_a_weight_of_zeros_has_finite_parts() -> None:
    zeros = torch.zeros(2, 3)
    assert torch.equal(WithoutScale().apply(zeros), zeros)
    assert ScaleOnly().apply(zeros).tolist() == [0.0]
    assert InverseScale().apply(zeros).tolist() == [1.0]


def test_the_scale_of_a_ternary_weight_without_a_positive_one_is_not_zero() -> None:
    weight = torch.tensor([[-0.25, 0.0], [0.0, -0.25]])
    assert ScaleOnly().apply(weight).tolist() == [0.25]
    assert WithoutScale().apply(weight).tolist() == [[-1.0, 0.0], [0.0, -1.0]]
