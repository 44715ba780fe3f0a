"""From stored tensors to a bound decoder: casts, folds, tied heads, refusals, bytes."""

from itertools import pairwise

import gguf
import pytest
import torch
from support.fake_sources import (
    GPT2,
    LLAMA,
    FakeCheckpoint,
    config_of,
    meta_decoder,
    shapes_of,
    stored_gpt2,
    stored_tensors,
)
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import AddOne, PickRows, ScaleOnly, Transpose, WithoutScale
from graphcore.arch.registry import architecture_of
from graphcore.checkpoint.ternary_checkpoint import pack_i2_s
from graphcore.errors import CheckpointError
from graphcore.nn.decoder import Decoder
from graphcore.weights.loader import Loader
from graphcore.weights.matching import match_weights
from graphcore.weights.resident_weights import load_resident

CPU = torch.device("cpu")
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def loader_of(tensor: Tensor, *folds: object) -> Loader:
    return Loader(FakeCheckpoint({"stored": tensor}), {"ours": TensorSource("stored", folds)})  # type: ignore[arg-type]


def loaded(
    config: ModelConfig, tensors: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Decoder, int, list[tuple[str, int | None, int, int]]]:
    """Return the bound decoder, its bytes, and what was reported."""
    checkpoint, reported = FakeCheckpoint(tensors), []
    sources = match_weights(architecture_of(config), config, checkpoint, shapes_of(config), config.num_hidden_layers)
    decoder = meta_decoder(config, dtype)
    nbytes = load_resident(Loader(checkpoint, sources), decoder, CPU, lambda *event: reported.append(event))
    return decoder, nbytes, reported


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", FLOATS)
def test_floating_tensors_are_cast_whatever_they_are_stored_in(stored: torch.dtype, target: torch.dtype) -> None:
    tensor = torch.tensor([1.0, -0.4375, 3.5, 0.0]).to(stored)  # numbers that all these dtypes hold or round alike
    dense = loader_of(tensor).dense("ours", target)
    assert dense.dtype == target
    assert torch.equal(dense, tensor.to(target))


@pytest.mark.parametrize("stored", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool])
def test_integers_are_no_weights_and_are_refused_by_name(stored: torch.dtype) -> None:
    with pytest.raises(CheckpointError, match=r"fake\.safetensors: tensor 'stored' holds \w+, not weights"):
        loader_of(torch.ones(4).to(stored)).dense("ours", torch.float32)


def test_packed_bytes_are_unpacked_to_the_promised_shape() -> None:
    # q8_0: a float16 scale and 32 int8 values per block
    values = torch.arange(-32, 32, dtype=torch.int8).view(2, 32)
    scales = torch.tensor([[0.5], [0.25]], dtype=torch.float16)
    raw = torch.cat((scales.view(torch.uint8), values.view(torch.uint8)), dim=1).flatten()
    checkpoint = FakeCheckpoint({"stored": raw}, packed={"stored": ("q8_0", (2, 32))})
    dense = Loader(checkpoint, {"ours": TensorSource("stored")}).dense("ours", torch.float32)
    assert torch.equal(dense, values.float() * scales.float())


def test_folds_are_applied_in_order_and_before_the_cast() -> None:
    stored = torch.arange(12.0).reshape(2, 6)
    dense = loader_of(stored, Transpose(), PickRows(2, 4)).dense("ours", torch.float32)
    assert dense.tolist() == [[2.0, 8.0], [3.0, 9.0]]
    small = torch.tensor([2**-9], dtype=torch.bfloat16)
    assert loader_of(small, AddOne()).dense("ours", torch.float32).tolist() == [1 + 2**-9]


def test_every_buffer_of_the_decoder_holds_its_tensor() -> None:
    config = config_of(LLAMA)
    tensors = stored_tensors(config)
    decoder, _, _ = loaded(config, tensors)
    for prefix, module in decoder.groups():
        for name, buffer in module.named_buffers():
            full = prefix + name
            assert torch.equal(buffer, tensors[full if full == "lm_head.weight" else f"model.{full}"]), full


def test_matrices_take_the_compute_dtype_and_norms_stay_float32() -> None:
    config = config_of(LLAMA)
    tensors = stored_tensors(config)
    decoder, _, _ = loaded(config, tensors, torch.bfloat16)
    block = decoder.layers[1]
    norm, matrix = "model.layers.1.input_layernorm.weight", "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(block.input_layernorm.weight, tensors[norm])
    assert torch.equal(block.mlp.up_proj.weight, tensors[matrix].bfloat16())


def test_gpt2_s_fused_and_transposed_tensors_become_plain_projections() -> None:
    tensors = stored_gpt2()
    decoder, _, _ = loaded(config_of(GPT2), tensors)
    attention = decoder.layers[1].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert torch.equal(torch.cat([part.weight for part in parts]), tensors["h.1.attn.c_attn.weight"].T)
    assert torch.equal(torch.cat([part.bias for part in parts]), tensors["h.1.attn.c_attn.bias"])
    assert torch.equal(decoder.layers[0].mlp.down_proj.weight, tensors["h.0.mlp.c_proj.weight"].T)
    assert torch.equal(decoder.embed_tokens.positions, tensors["wpe.weight"])


def test_tied_head_without_a_tensor_is_the_embedding_s_bytes_and_takes_none_itself() -> None:
    config = config_of(LLAMA, tie_word_embeddings=True)
    tensors = stored_tensors(config)
    own, own_nbytes, _ = loaded(config, tensors)
    head = tensors.pop("lm_head.weight")
    shared, shared_nbytes, _ = loaded(config, tensors)
    assert shared.head.lm_head.weight.data_ptr() == shared.embed_tokens.weight.data_ptr()
    assert torch.equal(own.head.lm_head.weight, head)
    assert own.head.lm_head.weight.data_ptr() != own.embed_tokens.weight.data_ptr()
    assert own_nbytes - shared_nbytes == 20 * 16 * 4


def test_returned_bytes_are_the_layouts_and_all_groups_lie_in_one_allocation() -> None:
    config = config_of(LLAMA)
    decoder, nbytes, reported = loaded(config, stored_tensors(config))
    assert len({buffer.untyped_storage().data_ptr() for buffer in decoder.buffers()}) == 1
    groups = [[buffer.data_ptr() for buffer in module.buffers()] for _, module in decoder.groups()]
    assert all(max(first) < min(second) for first, second in pairwise(groups))
    # 20 x 16 embedding and head, 16 norms: rounded up to 256 bytes; a layer: q 16x16, k and v 8x16, o 16x16, ...
    layer = 2 * 1024 + 2 * 512 + 3 * 1536 + 2 * 256
    assert nbytes == 1280 + 2 * layer + 256 + 1280
    ends = (1280, 1280 + layer, 1280 + 2 * layer, nbytes)
    assert reported == [("load", group, end, nbytes) for group, end in enumerate(ends)]


def test_a_decoder_is_never_left_on_the_meta_device() -> None:
    config = config_of(LLAMA, tie_word_embeddings=True)
    decoder, _, _ = loaded(config, stored_tensors(config))
    assert not any(buffer.is_meta for buffer in decoder.buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_ternary_weight_is_exact_in_every_dtype(dtype: torch.dtype) -> None:
    """Its scale here is no number of any narrow dtype."""
    signs = torch.randint(-1, 2, (4, 64), generator=torch.Generator().manual_seed(0))
    scale = torch.tensor([1 / 3])
    raw = pack_i2_s((signs + 1).to(torch.uint8), scale)
    checkpoint = FakeCheckpoint({"stored": raw}, packed={"stored": ("i2_s", (4, 64))})
    sources = {"w": TensorSource("stored", (WithoutScale(),)), "w_scale": TensorSource("stored", (ScaleOnly(),))}
    loader = Loader(checkpoint, sources)
    assert torch.equal(loader.dense("w", dtype), signs.to(dtype))
    assert torch.equal(loader.dense("w_scale", torch.float32), scale)


def test_a_packed_weight_is_rounded_to_a_narrow_dtype_after_its_scale_is_gone() -> None:
    """Ternary architectures may hold other types, too."""
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).numpy()
    raw = torch.from_numpy(gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0).copy()).flatten()
    exact = gguf.quants.dequantize(raw.numpy().reshape(4, -1), gguf.GGMLQuantizationType.Q8_0)
    checkpoint = FakeCheckpoint({"stored": raw}, packed={"stored": ("q8_0", (4, 64))})
    loader = Loader(checkpoint, {"w": TensorSource("stored", (WithoutScale(),))})
    expected = torch.from_numpy(exact / abs(exact).max()).bfloat16()
    assert torch.equal(loader.dense("w", torch.bfloat16), expected)
