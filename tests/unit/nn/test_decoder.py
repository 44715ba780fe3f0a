"""Embedding, head, names and ropes of the whole decoder."""

from dataclasses import replace

import pytest
import torch
from plain_attention import fill
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from graphcore.nn.decoder import Decoder, Embedding, equal_parts
from graphcore.nn.rope import rope_table
from graphcore.nn.rope_spec import LinearScaling, RopeSpec
from graphcore.nn.span import Span
from graphcore.nn.spec import AttentionSpec, BlockSpec, MLPSpec, ModelSpec, NormSpec

LOCAL, GLOBAL = RopeSpec(10_000.0), RopeSpec(1_000_000.0, LinearScaling(8.0))
NORM = NormSpec("rms", 1e-6)


def block_of(rope: RopeSpec | None, window: int | None = None) -> BlockSpec:
    return BlockSpec(24, NORM, AttentionSpec(4, 2, 8, 8**-0.5, window=window, rope=rope), MLPSpec(40, "silu"))


SPEC = ModelSpec(24, 50, (block_of(LOCAL, 8), block_of(LOCAL, 8), block_of(GLOBAL)), NORM, context=64)
IDS = torch.tensor([[3, 1, 49], [0, 0, 7]])
SPAN = Span(torch.tensor([0, 4]), torch.tensor([3, 2]))


def embedding_of(spec: ModelSpec, dtype: torch.dtype) -> Embedding:
    embedding = Embedding(spec, dtype)
    fill(embedding)
    return embedding


def test_embedding_is_the_row_of_each_token() -> None:
    embedding = embedding_of(SPEC, torch.float32)
    assert torch.equal(embedding(IDS, SPAN), embedding.weight[IDS])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", [1152, 2560])
def test_embedding_scale_is_rounded_as_transformers_does(dim: int, dtype: torch.dtype) -> None:
    """The scale is the dtype's, the product float32's: rounded to the dtype it is transformers' own."""
    spec = replace(SPEC, dim=dim, embedding_scale=dim**0.5)
    embedding = embedding_of(spec, dtype)
    reference = Gemma3TextScaledWordEmbedding(50, dim, padding_idx=0, embed_scale=dim**0.5).to(dtype)
    with torch.no_grad():
        reference.weight.copy_(embedding.weight)
        assert torch.equal(embedding(IDS, SPAN).to(dtype), reference(IDS))


def test_learned_positions_are_added_at_each_token_s_own_position() -> None:
    embedding = embedding_of(replace(SPEC, positions=16), torch.float32)
    assert embedding.positions is not None
    rows, out = embedding.weight[IDS], embedding(IDS, SPAN)
    assert torch.equal(out[0], rows[0] + embedding.positions[[0, 1, 2]])
    assert torch.equal(out[1, :2], rows[1, :2] + embedding.positions[[4, 5]])


def test_scaled_embedding_in_fp16_does_not_overflow() -> None:
    embedding = embedding_of(replace(SPEC, embedding_scale=50.0), torch.float16)
    embedding.weight[3] = 3000.0
    assert embedding(IDS, SPAN).dtype == torch.float32
    assert embedding(IDS, SPAN)[0, 0, 0] == 150_000.0


def test_head_is_the_final_norm_and_the_projection_in_float32() -> None:
    head = Decoder(SPEC, torch.float32).head
    fill(head)
    x = torch.randn(2, 3, 24, generator=torch.Generator().manual_seed(0))
    wide = x.double()
    normed = wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + 1e-6) * head.norm.weight.double()
    assert (head(x).double() - normed @ head.lm_head.weight.double().T).abs().max() < 1e-5
    assert Decoder(SPEC, torch.bfloat16).head(x.bfloat16()).dtype == torch.float32


def test_groups_are_embedding_layers_and_head_in_order_and_their_names_cover_every_buffer_once() -> None:
    with torch.device("meta"):
        decoder = Decoder(SPEC, torch.float32)
    prefixes = [prefix for prefix, _ in decoder.groups()]
    assert prefixes == ["embed_tokens.", "layers.0.", "layers.1.", "layers.2.", ""]
    names = [prefix + name for prefix, module in decoder.groups() for name, _ in module.named_buffers()]
    assert len(set(names)) == len(names)
    assert len(names) == sum(1 for _ in decoder.buffers())
    assert {"embed_tokens.weight", "layers.2.self_attn.q_proj.weight", "norm.weight", "lm_head.weight"} <= set(names)


def test_layers_with_equal_ropes_share_a_table() -> None:
    decoder = Decoder(SPEC, torch.float32)
    tables = decoder.rope_tables(10, torch.device("cpu"))
    assert SPEC.ropes == ((LOCAL, 8), (GLOBAL, 8))
    assert decoder.rope_index() == (0, 0, 1)
    assert torch.equal(tables[0], rope_table(LOCAL, 8, 10))
    assert torch.equal(tables[1], rope_table(GLOBAL, 8, 10))


def test_layers_without_rotation_read_no_table() -> None:
    decoder = Decoder(replace(SPEC, blocks=(block_of(None), block_of(None))), torch.float32)
    assert decoder.rope_tables(10, torch.device("cpu")) == ()
    assert decoder.rope_index() == (None, None)


@pytest.mark.parametrize(
    ("rows", "most", "sizes"),
    [
        (1000, 2000, [1000]),
        (128256, 29000, [21376] * 6),  # five parts of a multiple of sixteen rows do not come out even, six do
        (151936, 40000, [37984] * 4),
        (50257, 12000, [12000] * 4 + [2257]),  # 29 x 1733: no even parts
        (100, 1, [16] * 6 + [4]),  # a layer smaller than sixteen rows
    ],
)
def test_parts_of_the_head_cover_its_rows_in_sixteens_and_are_equal_where_that_takes_few_more(
    rows: int, most: int, sizes: list[int]
) -> None:
    parts = equal_parts(rows, most)
    assert [len(part) for part in parts] == sizes
    assert [row for part in parts for row in part] == list(range(rows))
    assert all(part.start % 16 == 0 for part in parts)


def test_a_part_of_the_head_gives_those_columns_of_the_logits() -> None:
    head = Decoder(SPEC, torch.float32).head
    fill(head)
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(0))
    part = head.part(range(16, 32))
    assert (part(x) - head(x)[:, 16:32]).abs().max() < 1e-6
    assert part.lm_head.weight.data_ptr() == head.lm_head.weight[16:].data_ptr()
