"""Rotary tables against transformers' own and hand arithmetic; the rotation against both."""

import math
from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from graphcore.nn.rope import rope_frequencies, rope_table, rotate, scale_queries
from graphcore.nn.rope_spec import DivisorScaling, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling

LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CASES = {
    "default": (RopeSpec(500_000.0), {}),
    "linear": (RopeSpec(1_000_000.0, LinearScaling(8.0)), {"factor": 8.0}),
    "llama3": (RopeSpec(500_000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192)), LLAMA3),
}


def config_of(rope_type: str, head_dim: int) -> LlamaConfig:
    spec, parameters = CASES[rope_type]
    return LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": rope_type, "rope_theta": spec.theta, **parameters},
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rope_type", ["linear", "llama3"])
def test_scaled_frequencies_are_those_of_transformers(rope_type: str, head_dim: int) -> None:
    expected, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config_of(rope_type, head_dim), device="cpu")
    frequencies = rope_frequencies(CASES[rope_type][0], head_dim)
    assert attention_factor == 1.0
    assert frequencies.shape == (head_dim // 2,)
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, expected, rtol=3e-7, atol=0.0)  # two float32 roundings


@pytest.mark.parametrize("rope_type", CASES)
def test_tables_are_the_cosines_and_sines_of_transformers(rope_type: str) -> None:
    positions = 300
    cos, sin = LlamaRotaryEmbedding(config_of(rope_type, 64))(torch.zeros(1), torch.arange(positions)[None])
    table = rope_table(CASES[rope_type][0], 64, positions)
    assert table.shape == (positions, 2, 32)
    assert table.dtype == torch.float32
    # a relative 6e-8 in an angle of up to 300 radians moves a cosine by 2e-5
    torch.testing.assert_close(table[:, 0], cos[0, :, :32], rtol=0.0, atol=3e-5)
    torch.testing.assert_close(table[:, 1], sin[0, :, :32], rtol=0.0, atol=3e-5)


YARN = {"factor": 32.0, "original_max_position_embeddings": 4096}
YARN_CASES = [
    {},
    {"truncate": False},
    {"beta_fast": 48.0, "beta_slow": 0.7},
    {"factor": 4.0, "original_max_position_embeddings": 100, "truncate": False},  # the ramp begins below the first pair
    {"original_max_position_embeddings": 10**9},  # and here it begins beyond the last
    {"beta_slow": 1e-9},  # here it ends beyond twice the pairs, which is cut
]


def test_yarn_is_that_of_transformers_rounded_or_not() -> None:
    for head_dim, changes in every_pair([8, 64, 128], YARN_CASES):
        with in_case(head_dim, changes):
            given = {**YARN, **changes}
            parameters = {"rope_type": "yarn", "rope_theta": 150_000.0, **given}
            config = LlamaConfig(
                hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, rope_parameters=parameters
            )
            expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
            scaling = YarnScaling(
                factor=given["factor"],
                original_context=int(given["original_max_position_embeddings"]),
                attention_factor=attention_factor,
                beta_fast=given.get("beta_fast", 32.0),
                beta_slow=given.get("beta_slow", 1.0),
                rounds_ramp=bool(given.get("truncate", True)),
            )
            found = rope_frequencies(RopeSpec(150_000.0, scaling), head_dim)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)  # sums of two float32 products


def test_yarn_s_rounding_and_factor_move_the_table() -> None:
    exact = YarnScaling(32.0, 4096, 0.1 * math.log(32.0) + 1.0)
    rounded = YarnScaling(32.0, 4096, exact.attention_factor, rounds_ramp=True)
    spec = RopeSpec(150_000.0, exact)
    change = rope_frequencies(RopeSpec(150_000.0, rounded), 64) / rope_frequencies(spec, 64)
    assert (change - 1).abs().max() > 0.3
    table = rope_table(spec, 64, 3)
    assert table[0, 0].tolist() == pytest.approx([1.346574] * 32, abs=1e-6)  # cosines at position 0
    assert table.pow(2).sum(1).flatten().tolist() == pytest.approx([1.346574**2] * 96, abs=1e-5)


def test_frequencies_are_powers_of_theta() -> None:
    assert rope_frequencies(RopeSpec(10_000.0), 8).tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)


def test_linear_scaling_divides_every_frequency() -> None:
    scaled = rope_frequencies(RopeSpec(10_000.0, LinearScaling(4.0)), 8)
    assert scaled.tolist() == pytest.approx([0.25, 0.025, 0.0025, 0.00025], rel=1e-6)


def test_divisors_divide_each_frequency_by_its_own_number() -> None:
    scaled = rope_frequencies(RopeSpec(10_000.0, DivisorScaling((1.0, 2.0, 5.0, 8.0))), 8)
    assert scaled.tolist() == pytest.approx([1.0, 0.05, 0.002, 0.000125], rel=1e-6)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    # theta 2^20, head_dim 8: frequencies 1, 2^-5, 2^-10, 2^-15; wavelengths 6.3, 201, 6434, 205887
    # original 4096, high 4, low 0.5: kept below 1024, divided above 8192, blended between
    spec = RopeSpec(2.0**20, Llama3Scaling(16.0, 0.5, 4.0, 4096))
    blend = (4096 / (2 * math.pi * 2**10) - 0.5) / 3.5
    between = (1 - blend) * 2**-10 / 16 + blend * 2**-10
    assert rope_frequencies(spec, 8).tolist() == pytest.approx([1.0, 2**-5, between, 2**-19], rel=1e-6)


def test_different_thetas_make_different_tables() -> None:
    local, everywhere = rope_table(RopeSpec(10_000.0), 16, 8), rope_table(RopeSpec(1_000_000.0), 16, 8)
    assert torch.equal(local[:, :, 0], everywhere[:, :, 0])  # the first pair turns one radian a position in both
    assert not torch.equal(local[1:, :, 1:], everywhere[1:, :, 1:])


def test_rotation_turns_pairs_of_halves_by_their_angle() -> None:
    # head_dim 4, theta 100: pair 0 is (x0, x2) at p radians, pair 1 is (x1, x3) at p / 10 radians
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]]])  # [B=1, T=2, H=1, E=4]
    table = rope_table(RopeSpec(100.0), 4, 6)[torch.tensor([[0, 5]])]
    out = rotate(x, table)
    cos, sin, cos_slow, sin_slow = math.cos(5.0), math.sin(5.0), math.cos(0.5), math.sin(0.5)
    turned = [cos - 3 * sin, 2 * cos_slow - 4 * sin_slow, 3 * cos + sin, 4 * cos_slow + 2 * sin_slow]
    assert out[0, 0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert out[0, 1, 0].tolist() == pytest.approx(turned, abs=2e-6)


def test_rotation_by_a_quarter_turn_swaps_the_halves() -> None:
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    quarter = torch.tensor([[[[0.0, 0.0], [1.0, 1.0]]]])  # cos 0, sin 1
    assert rotate(x, quarter)[0, 0, 0].tolist() == [-3.0, -4.0, 1.0, 2.0]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-2)])
def test_rotation_is_that_of_transformers(dtype: torch.dtype, atol: float) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 5, 3, 16, generator=generator).to(dtype)  # [B, T, H, E]
    positions = torch.tensor([[0, 1, 2, 3, 4], [40, 41, 42, 43, 44]])
    table = rope_table(RopeSpec(10_000.0), 16, 64)[positions]
    cos, sin = (torch.cat((part, part), dim=-1).to(dtype) for part in (table[:, :, 0], table[:, :, 1]))
    expected, _ = apply_rotary_pos_emb(query.transpose(1, 2), query.transpose(1, 2), cos, sin)
    out = rotate(query, table)
    assert out.dtype == dtype
    # bf16: transformers rounds the table, both products and the sum (4 x 2^-9 of values up to 4); we round once
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0.0, atol=atol)


def test_rotation_keeps_lengths_and_relative_angles() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 32, generator=generator).double() for _ in range(2))
    table = rope_table(RopeSpec(10_000.0), 32, 50)

    def score(query_position: int, key_position: int) -> float:
        turned = rotate(query, table[None, None, query_position]), rotate(key, table[None, None, key_position])
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(44, 40), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-2)


def test_a_part_of_a_head_rotates_as_a_head_of_that_size_and_the_rest_stays() -> None:
    x = torch.randn(1, 3, 2, 10, generator=torch.Generator().manual_seed(1))
    table = rope_table(RopeSpec(1e4, width=4), 10, 3)
    assert torch.equal(table, rope_table(RopeSpec(1e4), 4, 3))
    turned = rotate(x, table[None])
    assert torch.equal(turned[..., :4], rotate(x[..., :4], table[None]))
    assert torch.equal(turned[..., 4:], x[..., 4:])
    angles = torch.tensor([1.0, 1e-2], dtype=torch.float64) * 2  # of position 2; the second of two pairs: 1e4^(-2/4)
    first, second = x[0, 2, 0, :2].double(), x[0, 2, 0, 2:4].double()
    expected = torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))
    assert torch.allclose(turned[0, 2, 0, :4].double(), expected, atol=1e-6)


def test_queries_are_scaled_by_transformers_factor_of_their_position() -> None:
    starts, query = torch.tensor([0, 9_990, 123_456]), torch.randn(3, 40, 2, 8)
    positions = starts[:, None] + torch.arange(40)
    expected = query * get_llama_4_attn_scale(positions, 0.1, 5000)[:, 0, :, :, None].reshape(3, 40, 1, 1)
    torch.testing.assert_close(scale_queries(query, starts, 0.1, 5000), expected, rtol=3e-7, atol=0.0)
    assert torch.equal(scale_queries(query, starts, 0.1, 5000)[0], query[0])  # the first 5000 positions
    assert scale_queries(query.bfloat16(), starts, 0.1, 5000).dtype is torch.bfloat16
