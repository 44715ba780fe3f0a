"""Codes go back into the bytes that they were read from."""

import torch

from graphcore.quant.bit_packing import extreme, inverse, pack_planes, pack_runs, round_half_away
from graphcore.quant.bits import planes, runs
from graphcore.quant.formats.q3_k import pack_scales, unpack_scales
from graphcore.quant.formats.tq1_0 import base3_bytes, base3_digits
from graphcore.quant.k_scales import pack_scales_and_minimums, unpack_scales_and_minimums

GENERATOR = torch.Generator().manual_seed(0)


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=GENERATOR)


def test_planes_and_runs_pack_to_the_bytes_they_came_from() -> None:
    raw = random_bytes(5, 16)
    for bits in (1, 2, 4):
        assert torch.equal(pack_planes(planes(raw, bits), bits), raw)
        assert torch.equal(pack_runs(runs(raw, bits), bits), raw)


def test_six_bit_scales_pack_to_the_bytes_they_came_from() -> None:
    raw = random_bytes(64, 12)
    assert torch.equal(pack_scales_and_minimums(*unpack_scales_and_minimums(raw)), raw)
    assert torch.equal(pack_scales(unpack_scales(raw)), raw)


def test_base_3_digits_read_back() -> None:
    digits = torch.cartesian_prod(*[torch.arange(3, dtype=torch.uint8)] * 5).T.unsqueeze(0)  # [1, 5, 243]
    assert torch.equal(base3_digits(base3_bytes(digits), num_digits=5).view(1, 5, 243), digits)


def test_halves_are_rounded_away_from_zero() -> None:
    values = torch.tensor([0.5, -0.5, 1.5, -1.5, 2.5, 0.49999997, -0.49999997, 126.5, 0.0])
    assert round_half_away(values).tolist() == [1, -1, 2, -2, 3, 0, 0, 127, 0]


def test_the_extreme_value_is_the_first_of_largest_magnitude() -> None:
    assert extreme(torch.tensor([[1.0, -3.0, 3.0], [-0.0, -0.0, -0.0]])).tolist() == [[-3.0], [0.0]]
    assert extreme(torch.tensor([[-0.0, -0.0]])).signbit().tolist() == [[False]]


def test_the_inverse_of_what_float32_cannot_invert_is_zero() -> None:
    assert inverse(torch.tensor([0.0, -0.0, 1e-45, -1e-39, 4.0])).tolist() == [0.0, 0.0, 0.0, 0.0, 0.25]
