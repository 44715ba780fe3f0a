"""One block through a GPU's decode kernels, in the interpreter, against the block's own forward."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from block_specs import ARCHITECTURES, LATENT, LAYER_NORM, ORDERED, PLAIN, SCORED, attending, feeding
from support.gpu_kernels import kernels_of, let_programs_be_few
from tiny_graph import DIM, FULL, NORM, builder_of, filled_decoder, model_of
from torch import Tensor

from graphcore.activations import ACTIVATIONS
from graphcore.graph.builder import GraphBuilder
from graphcore.graph.gpu.kernel_decode import DeviceBlocks, run_head
from graphcore.graph.gpu.kernel_obstacles import block_obstacle, device_obstacle
from graphcore.graph.step import HeadStep, RoutedBlock
from graphcore.kernels.ops.kv_formats import FLOAT8, KVType, pool_dtype, vector_shape
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.kvcache.buffers import KVCache, LayerCache, RecurrentCache
from graphcore.kvcache.sizes import buffer_shapes
from graphcore.nn.block import Block
from graphcore.nn.decoder import Decoder
from graphcore.nn.linear import Linear
from graphcore.nn.rope import rope_table
from graphcore.nn.rope_spec import PositionScale
from graphcore.nn.span import Span
from graphcore.nn.spec import AttentionSpec, BlockSpec, NormSpec, RecurrentSpec
from graphcore.weights.groups import split_layers

pytestmark = pytest.mark.thorough

SPECS: Mapping[str, BlockSpec] = {
    **ARCHITECTURES,
    **ORDERED,
    **LATENT,
    **SCORED,
    "gemma3 sliding": attending(FULL, window=4),
    "llama capped": attending(cap=2.0, window=4),
    "queries of every position scaled": attending(position_scale=PositionScale(0.4, 1)),
    "llama biased": feeding(attending(qkv_bias=True, output_bias=True), bias=True),
    **{f"gated {name}": feeding(activation=name) for name in ACTIVATIONS},
}
TABLE = torch.tensor([[3, 1], [0, 5], [4, 2]], dtype=torch.int32)  # pages of three sequences
STARTS, COUNTS, SLOTS = (0, 6, 2), (1, 1, 0), 4  # of a cache of all, 16: a window of 4 has wrapped, the last row idles
CLOSE = 2e-5  # float32, numbers of order one; the order of a sum may differ


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    let_programs_be_few(monkeypatch)


def block_of(decoder: Decoder) -> Block:
    block = decoder.layers[0]
    assert isinstance(block, Block)
    return block


def inputs_of(spec: BlockSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Span, LayerCache]:
    """Return a token of each of three sequences, and caches that are NaN where nothing was written."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 1, spec.dim, generator=generator)
    attention = spec.attention
    if isinstance(attention, RecurrentSpec):
        states = [torch.randn(3, *shape, generator=generator) for shape in buffer_shapes(attention, 16)]
        return x, None, Span(torch.tensor(STARTS), torch.tensor(COUNTS)), RecurrentCache(*states)
    rope = None
    if attention.rope is not None:
        rope = rope_table(attention.rope, attention.head_dim, 16)[list(STARTS)][:, None].contiguous()
    size = (3, attention.kv_heads, attention.window or 16, attention.head_dim)
    caches = []
    for _ in range(2):
        cache = torch.randn(size, generator=generator).to(dtype)
        for row, start in enumerate(STARTS):
            cache[row, :, start:] = float("nan")
        pages = cache.view(3, cache.shape[1], 2, -1, attention.head_dim).transpose(1, 2).flatten(0, 1)
        caches.append(pages[TABLE.flatten().argsort()].contiguous())
    return x, rope, Span(torch.tensor(STARTS), torch.tensor(COUNTS)), KVCache(*caches, TABLE)


def outputs(decoder: Decoder, spec: BlockSpec, is_device: bool) -> tuple[Tensor, LayerCache]:
    """Return the stream and the caches after a block."""
    block = block_of(decoder)
    x, rope, span, cache = inputs_of(spec, block.dtype)
    run = DeviceBlocks.allocate([cache], x.device).forward if is_device else Block.forward
    return run(block, x, rope, span, *cache.inputs), cache


@pytest.mark.parametrize("name", SPECS)
def test_a_block_gives_what_its_forward_gives(name: str) -> None:
    spec = SPECS[name]
    decoder = filled_decoder(model_of(spec))
    assert device_obstacle(decoder, 3) is None
    (found, cache), (expected, expected_cache) = (outputs(decoder, spec, is_device) for is_device in (True, False))
    assert (found - expected)[:2].abs().max() < CLOSE
    for one, other in zip(cache.tensors, expected_cache.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=CLOSE, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in ("llama", "qwen3", "gemma3", "gpt2", "gpt_oss", "qwen3_moe", "bitnet")),
        *((name, torch.float16) for name in ("llama", "gpt_oss")),
    ],
)
def test_16_bits_are_no_farther_from_float32_than_the_forward(name: str, dtype: torch.dtype) -> None:
    """Both have the same weights, so only rounding inside the block differs; 64 numbers leave half to chance."""
    spec = SPECS[name]
    narrow = filled_decoder(model_of(spec), dtype)
    wide = filled_decoder(model_of(spec), torch.float32)
    wide.load_state_dict({key: tensor.float() for key, tensor in narrow.state_dict().items()})
    truth, _ = outputs(wide, spec, is_device=False)
    errors = [(outputs(narrow, spec, is_device)[0] - truth)[:2].pow(2).mean().sqrt() for is_device in (True, False)]
    assert errors[0] < 1.5 * errors[1]
    assert errors[0] > 0


@pytest.mark.parametrize("order", ["divided", "multiplied", "online"])
@pytest.mark.parametrize("name", ["llama", "bitnet", "gpt2"])
def test_int8_orders_are_followed_up_to_the_rounding_of_a_code(order: str, name: str) -> None:
    """A last place that differs may become a step of a code: few of 48 numbers of a row, each of about a hundredth."""
    spec = replace(SPECS[name], int8_activations=order)
    decoder = filled_decoder(model_of(spec), torch.bfloat16)
    generator = torch.Generator().manual_seed(4)
    for module in decoder.layers.modules():
        if isinstance(module, Linear):
            module.weight.copy_(torch.randint(-1, 2, module.weight.shape, generator=generator))
            if module.weight_scale is not None:
                scale = module.inputs**-0.5 * 1.2
                module.weight_scale.fill_(1 / scale if order == "divided" else scale)
            else:
                module.weight.mul_(module.inputs**-0.5 * 1.2)
    found, expected = (outputs(decoder, spec, is_device)[0][:2] for is_device in (True, False))
    assert (found - expected).pow(2).mean().sqrt() < 0.02 * expected.std()


@pytest.mark.parametrize(
    "kinds", [("q8_0", "q8_0"), ("q5_0", "q4_0"), (torch.float32, "q4_0"), (FLOAT8, FLOAT8)], ids=str
)
def test_a_block_over_codes_takes_the_launches_of_one_over_numbers(
    kinds: tuple[KVType, KVType], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = attending(head_dim=32)
    decoder, found = filled_decoder(model_of(spec)), []
    x, rope, span, cache = inputs_of(spec, torch.float32)
    assert isinstance(cache, KVCache)
    pages = cache.k.shape[:3]
    pools = [torch.zeros(*pages, *vector_shape(kind, 32), dtype=pool_dtype(kind)) for kind in kinds]
    for one in (cache, KVCache(*pools, TABLE)):
        run = partial(DeviceBlocks.allocate([one], x.device).forward, block_of(decoder))
        found.append(kernels_of(partial(run, x.clone(), rope, span, *one.inputs), monkeypatch))
    products = ["dense_product", "residual_norm", "dense_gated", "dense_product"]
    assert found == [["residual_norm", "dense_product", "attend_splits", *products]] * 2


def test_halves_around_fetched_experts_give_the_whole() -> None:
    decoder = filled_decoder(model_of(ARCHITECTURES["gpt_oss"]))
    block, (x, rope, span, cache) = block_of(decoder), inputs_of(ARCHITECTURES["gpt_oss"], torch.float32)
    run = DeviceBlocks.allocate([cache], x.device).block_function(block, 3, fetches=True)
    assert isinstance(run, RoutedBlock)
    expected, _ = outputs(decoder, ARCHITECTURES["gpt_oss"], is_device=False)
    found = run(block, x, rope, span, *cache.inputs)
    assert (found - expected)[:2].abs().max() < CLOSE


@pytest.mark.parametrize("norm", [NORM, PLAIN.norm, LAYER_NORM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_gives_the_logits(norm: NormSpec, dtype: torch.dtype) -> None:
    head = filled_decoder(replace(model_of(PLAIN), norm=norm), dtype).head
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(2))
    expected = head.lm_head.weight.double() @ head.norm(x, dtype).double()[..., None]
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2  # a norm's last place times a row of 32
    torch.testing.assert_close(run_head(head, x).double(), expected[..., 0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_the_head_multiplies_its_logits_before_it_caps_them(cap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    head = filled_decoder(replace(model_of(PLAIN), logit_factor=0.3, logit_cap=cap)).head
    x = torch.randn(3, DIM, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(run_head(head, x), head(x), rtol=0, atol=1e-5)
    found = kernels_of(partial(run_head, head, x), monkeypatch)
    assert found == ["residual_norm", "dense_product", *(["elementwise"] if cap else [])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_head_in_parts_has_the_bits_of_the_whole(dtype: torch.dtype, tokens: int) -> None:
    head = filled_decoder(model_of(PLAIN), dtype).head
    x = torch.randn(tokens, head.lm_head.inputs, generator=torch.Generator().manual_seed(1))
    cuts = [0, 16, 32, head.lm_head.outputs]
    parts = [run_head(head.part(range(*pair)), x) for pair in pairwise(cuts)]
    assert torch.equal(torch.cat(parts, dim=-1), run_head(head, x))


def test_what_cannot_run_is_said() -> None:
    assert block_obstacle(block_of(filled_decoder(model_of(PLAIN))), 9) is not None
    odd = replace(PLAIN, attention=AttentionSpec(4, 2, 7, 7**-0.5))
    assert "heads of 7" in str(block_obstacle(block_of(filled_decoder(model_of(odd))), 1))
    layered = replace(FULL, norm=LAYER_NORM)
    assert "LayerNorm behind" in str(block_obstacle(block_of(filled_decoder(model_of(layered))), 1))
    layered = replace(PLAIN, attention=replace(PLAIN.attention, qk_norm=LAYER_NORM))
    assert "LayerNorm normalises" in str(block_obstacle(block_of(filled_decoder(model_of(layered))), 1))
    both = replace(ARCHITECTURES["gpt_oss"], sandwich=True)
    assert str(block_obstacle(block_of(filled_decoder(model_of(both))), 1)) == "no GPU kernel for Experts mlp.experts"
    reference = replace(ARCHITECTURES["bitnet"], int8_activations="divided")
    assert "float32 keeps" in str(block_obstacle(block_of(filled_decoder(model_of(reference))), 1))


def test_a_matrix_that_no_kernel_reads_is_named() -> None:
    decoder = filled_decoder(model_of(PLAIN))
    block = block_of(decoder)
    assert isinstance(block.mlp.down_proj, Linear)
    block.mlp.down_proj.pack(StoredPacking("q8_0", DIM, 32), "float")
    assert device_obstacle(decoder, 1) == "layer 0: no GPU kernel multiplies q8_0, the format of mlp.down_proj"
    cache = KVCache(torch.zeros(1, 2, 16, 8), torch.zeros(1, 2, 16, 8), torch.zeros(1, 1, dtype=torch.int32))
    assert DeviceBlocks.allocate([cache], torch.device("cpu")).block_function(block, 1, fetches=False) is None


def test_a_head_that_stays_takes_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of(model_of(PLAIN), "eager")
    monkeypatch.setattr(builder.decoder, "head_rows", lambda: [range(16), range(16, builder.decoder.spec.vocab)])
    given = (builder.decoder, "eager", split_layers(1, 1), builder.caches, builder.context, builder.device)
    for kernels, expected in ((None, 2), (DeviceBlocks.allocate(builder.caches, builder.device), 1)):
        steps = GraphBuilder(*given, decode_kernels=kernels).decode(1, is_greedy=False).steps
        assert sum(isinstance(step, HeadStep) for step in steps) == expected
