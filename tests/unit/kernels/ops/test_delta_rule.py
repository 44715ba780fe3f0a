"""Gated DeltaNet in plain torch: against transformers, one by one against chunks, and padding that changes nothing."""

from itertools import product as every_pair

import pytest
import torch
from support.cases import in_case
from torch import Tensor
from torch.nn.functional import conv1d, silu
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from graphcore.kernels.ops.delta_rule import (
    delta_gates,
    gated_delta_chunks,
    gated_delta_rule,
    gated_delta_steps,
    gated_norm,
    short_convolution,
    spread_heads,
    unit_heads,
)

BATCH, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 2, 6, 32, 48


def random_parts(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Return q, k [B, T, G, N], v [B, T, H, M], decay, beta [B, T, H] and a state [B, H, N, M] as a model has them."""
    torch.manual_seed(seed)
    q, k = (torch.randn(BATCH, tokens, KEY_HEADS, KEY_DIM, dtype=dtype) for _ in range(2))
    v = torch.randn(BATCH, tokens, HEADS, VALUE_DIM, dtype=dtype)
    decay = -torch.rand(BATCH, tokens, HEADS, dtype=dtype) * torch.logspace(-3, 1, HEADS, dtype=dtype)
    beta = torch.rand(BATCH, tokens, HEADS, dtype=dtype)
    return [q, k, v, decay, beta, torch.randn(BATCH, HEADS, KEY_DIM, VALUE_DIM, dtype=dtype)]


def arguments_of(parts: list[Tensor], tiled: bool = False) -> list[Tensor]:
    q, k, *rest = parts
    q, k = (spread_heads(unit_heads(x), HEADS, tiled) for x in (q, k))
    return [q * KEY_DIM**-0.5, k, *rest]


def test_rule_is_that_of_transformers() -> None:
    for tokens, reference, rule in every_pair(
        [1, 5, 64, 600],
        [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule],
        [gated_delta_steps, gated_delta_chunks],
    ):
        with in_case(tokens, reference, rule):
            parts = random_parts(tokens)
            out, state = rule(*arguments_of(parts))  # type: ignore[operator]
            settings = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
            expected, last = reference(*parts[:5], initial_state=parts[5], **settings)  # type: ignore[operator]
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(state, last, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("tokens", "chunk"), [(1, 64), (63, 64), (65, 64), (130, 64), (600, 64), (23, 7)])
def test_chunks_equal_one_by_one_in_float64(tokens: int, chunk: int) -> None:
    arguments = arguments_of(random_parts(tokens, torch.float64))
    expected, last = gated_delta_steps(*arguments)
    out, state = gated_delta_chunks(*arguments, chunk=chunk)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, last, atol=1e-12, rtol=1e-12)


def test_chunks_bear_equal_keys_and_gates_that_close() -> None:
    """The system's inverse has small numbers, although powers of its matrix are large."""
    q, k, v, _, beta, state = random_parts(200)
    decay = torch.where(torch.rand(BATCH, 200, HEADS) < 0.1, -200.0, -1e-4)
    parts = [q, k[:, :1].expand_as(k), v, decay, torch.ones_like(beta), state]
    arguments = arguments_of(parts)
    exact = gated_delta_steps(*(part.double() for part in arguments))
    for part, expected in zip(gated_delta_chunks(*arguments), exact, strict=True):
        torch.testing.assert_close(part.double(), expected, atol=3e-5, rtol=1e-5)


def test_state_carries_the_rule_from_one_part_of_a_prompt_to_the_next() -> None:
    arguments = arguments_of(random_parts(90, torch.float64))
    expected, last = gated_delta_rule(*arguments)
    state, outs = arguments[5], []
    for first, end in ((0, 70), (70, 71), (71, 90)):
        out, state = gated_delta_rule(*(part[:, first:end] for part in arguments[:5]), state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1), expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(state, last, atol=1e-12, rtol=1e-12)


def test_tiled_value_heads_take_key_heads_in_turn() -> None:
    x = torch.arange(2.0)[None, None, :, None]
    assert spread_heads(x, 6)[0, 0, :, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert spread_heads(x, 6, tiled=True)[0, 0, :, 0].tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize("tokens", [3, 20])
def test_padding_leaves_the_state_as_it_is(tokens: int) -> None:
    """A padded token may hold anything, NaN too."""
    torch.manual_seed(1)
    counts, channels = torch.tensor([tokens - 2, 0]), HEADS * VALUE_DIM
    x, kept = torch.randn(BATCH, tokens, channels), torch.randn(BATCH, channels, 3)
    x[0, -2:], x[1] = torch.nan, torch.nan
    a, b = torch.randn(2, BATCH, tokens, HEADS)
    q, k, _, _, _, state = arguments_of(random_parts(tokens))
    weight, gates = torch.randn(channels, 4), (-torch.rand(HEADS), torch.randn(HEADS))

    v, kept_after = short_convolution(x, weight, kept, counts=counts)
    decay, beta = delta_gates(a, b, *gates, counts=counts)
    heads = v.unflatten(2, (HEADS, VALUE_DIM))
    out, after = gated_delta_rule(q, k, heads, decay, beta, state)

    real = slice(0, 1), slice(0, tokens - 2)
    v_alone, kept_alone = short_convolution(x[real], weight, kept[:1])
    decay_alone, beta_alone = delta_gates(a[real], b[real], *gates)
    alone = v_alone.unflatten(2, (HEADS, VALUE_DIM)), decay_alone, beta_alone
    expected, last = gated_delta_rule(q[real], k[real], *alone, state[:1])
    torch.testing.assert_close(out[real], expected)
    torch.testing.assert_close(after[:1], last)
    assert torch.equal(after[1], state[1])
    assert torch.equal(kept_after[:1], kept_alone)
    assert torch.equal(kept_after[1], kept[1])


@pytest.mark.parametrize("tokens", [1, 2, 9])
@pytest.mark.parametrize("width", [2, 4])
def test_convolution_is_that_of_torch(width: int, tokens: int) -> None:
    torch.manual_seed(2)
    x, state = torch.randn(2, tokens, 5), torch.randn(2, 5, width - 1)
    weight, bias = torch.randn(5, width), torch.randn(5)
    joined = torch.cat((state, x.transpose(1, 2)), dim=2)
    y, after = short_convolution(x, weight, state, bias)
    torch.testing.assert_close(y, silu(conv1d(joined, weight[:, None], bias, groups=5)).transpose(1, 2))
    assert torch.equal(after, joined[:, :, tokens:])


def test_gates_are_those_of_transformers() -> None:
    torch.manual_seed(3)
    a, b = torch.randn(2, 1, 7, HEADS)
    a_log, bias = torch.rand(HEADS), torch.randn(HEADS)
    decay, beta = delta_gates(a, b, -a_log.exp(), bias)
    torch.testing.assert_close(decay, -a_log.exp() * torch.log1p(torch.exp(a + bias)))
    torch.testing.assert_close(beta, 1 / (1 + torch.exp(-b)))


def test_gated_norm_is_that_of_transformers() -> None:
    torch.manual_seed(4)
    norm = Qwen3NextRMSNormGated(VALUE_DIM, eps=1e-6)
    torch.nn.init.normal_(norm.weight)
    x, z = torch.randn(2, 3, 4, VALUE_DIM)
    torch.testing.assert_close(gated_norm(x, z, norm.weight, 1e-6), norm(x, z))


def test_rule_traces_into_one_graph() -> None:
    arguments = arguments_of(random_parts(70))
    compiled = torch.compile(gated_delta_rule, fullgraph=True, backend="aot_eager")
    for part, expected in zip(compiled(*arguments), gated_delta_rule(*arguments), strict=True):
        torch.testing.assert_close(part, expected)
