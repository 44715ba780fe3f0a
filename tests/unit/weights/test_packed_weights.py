"""Which matrices are packed and how; packed bytes stand for the dense weights; loading makes no dense model."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from support.comparisons import peak_nbytes
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
from support.packed_matrices import GOLDEN, native_backend, native_kernels, stored_matrix
from torch import Tensor

from graphcore.arch.architecture import TensorSource
from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.folds import Fold, PickRows, SplitPairs
from graphcore.arch.registry import architecture_of
from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.host_pages import private_pages
from graphcore.kernels.backend import Backend, TorchBackend, TritonBackend
from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.kernels.gpu.device_packing import DevicePacking
from graphcore.kernels.packing import Packing
from graphcore.kernels.stored_packing import StoredPacking
from graphcore.nn.decoder import Decoder, Embedding
from graphcore.nn.linear import Linear
from graphcore.nn.moe import ExpertLinear
from graphcore.quant import FORMATS
from graphcore.weights import slots
from graphcore.weights.groups import resident_groups
from graphcore.weights.loader import Loader
from graphcore.weights.matching import match_weights
from graphcore.weights.packed_weights import PackingPolicy, WeightPacker, formats_of, packing_of
from graphcore.weights.resident_weights import load_resident

CPU = torch.device("cpu")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 40, "num_attention_heads": 4}
CONFIG = config_of(LLAMA, **SIZES, num_key_value_heads=2)
TIED = config_of(LLAMA, **SIZES, num_key_value_heads=2, tie_word_embeddings=True)


def kernels(rounding: str = "wide", asked: str = "stored") -> PackingPolicy:
    return PackingPolicy(native_backend(), rounding, asked)


def matched(config: ModelConfig, checkpoint: FakeCheckpoint, policy: PackingPolicy) -> tuple[Decoder, Loader]:
    """Return a decoder on the meta device whose matrices are packed as the policy says, and its loader."""
    sources = match_weights(architecture_of(config), config, checkpoint, shapes_of(config), config.num_hidden_layers)
    decoder = meta_decoder(config)
    WeightPacker(sources, checkpoint, policy).pack(decoder)
    return decoder, Loader(checkpoint, sources)


def with_packed(tensors: dict[str, Tensor], encodings: Mapping[str, str]) -> FakeCheckpoint:
    """Return a checkpoint in which some tensors are stored in other encodings."""
    held, packed = dict(tensors), {}
    for name, encoding in encodings.items():
        held[name] = FORMATS[encoding].quantize(tensors[name])
        packed[name] = (encoding, tuple(tensors[name].shape))
    return FakeCheckpoint(held, packed=packed)


def chosen(decoder: Decoder) -> dict[str, Packing | None]:
    """Return how each matrix is held, by the name of its weight."""
    return {
        prefix + name: packing_of(group, name)
        for prefix, group in decoder.groups()
        for name, _ in group.named_buffers()
        if name.endswith("weight") and "norm" not in name
    }


def load(decoder: Decoder, loader: Loader) -> int:
    return load_resident(loader, decoder, CPU, lambda *_: None)


def test_what_is_stored_packed_stays_as_it_is_stored_and_the_rest_stays_dense() -> None:
    stored = {"layers.0.self_attn.q_proj": "q4_k", "layers.1.mlp.down_proj": "q6_k", "embed_tokens": "q8_0"}
    checkpoint = with_packed(stored_tensors(CONFIG), {f"model.{name}.weight": kind for name, kind in stored.items()})
    decoder, _ = matched(CONFIG, checkpoint, kernels("block"))
    shapes, found = shapes_of(CONFIG), chosen(decoder)
    for name, packing in found.items():
        kind = stored.get(name.removesuffix(".weight"))
        expected = None if kind is None else KernelPacking(kind, *shapes[name], native_kernels())
        assert packing == expected, name
    assert decoder.layers[0].self_attn.q_proj.rounding == "block"
    assert decoder.layers[0].self_attn.k_proj.weight.dtype == torch.float32


def test_without_kernels_the_file_s_bytes_are_held() -> None:
    checkpoint = with_packed(stored_tensors(CONFIG), {"model.layers.0.mlp.up_proj.weight": "q4_k"})
    decoder, loader = matched(CONFIG, checkpoint, PackingPolicy(TorchBackend(), "wide"))
    assert chosen(decoder)["layers.0.mlp.up_proj.weight"] == StoredPacking("q4_k", 512, 256)
    load(decoder, loader)
    assert torch.equal(decoder.layers[0].mlp.up_proj.weight, checkpoint.held["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.parametrize(("asked", "head"), [("q8_0", "q8_0"), ("q4_k", "q6_k"), ("mxfp4", "q8_0")])
def test_dense_matrices_are_packed_when_asked_and_the_head_in_its_own_format(asked: str, head: str) -> None:
    decoder, _ = matched(CONFIG, FakeCheckpoint(stored_tensors(CONFIG)), kernels(asked=asked))
    formats = {name: packing.format for name, packing in chosen(decoder).items() if packing is not None}
    assert formats.keys() == chosen(decoder).keys()  # every matrix
    assert formats.pop("lm_head.weight") == head
    assert set(formats.values()) == {asked}
    tied, _ = matched(TIED, FakeCheckpoint(without_head(TIED)), kernels(asked=asked))
    assert {chosen(tied)["embed_tokens.weight"].format, chosen(tied)["lm_head.weight"].format} == {head}


def without_head(config: ModelConfig) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in stored_tensors(config).items() if name != "lm_head.weight"}


def test_what_is_stored_packed_is_not_packed_again() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    decoder, loader = matched(CONFIG, with_packed(stored_tensors(CONFIG), {name: "q8_0"}), kernels(asked="q4_k"))
    formats = {name: kind for name, kind, _ in formats_of(decoder)}
    assert formats["layers.0.mlp.up_proj.weight"] == "q8_0"
    assert formats["layers.1.mlp.up_proj.weight"] == "q4_k"
    assert formats["layers.1.input_layernorm.weight"] == "float32"
    load(decoder, loader)
    assert "layers.0.mlp.up_proj.weight" not in loader.errors


@pytest.mark.parametrize("loader_of", [native_backend, TorchBackend, TritonBackend])
def test_loaded_bytes_stand_for_the_weights_and_the_error_is_measured(loader_of: Callable[[], Backend]) -> None:
    tensors = stored_tensors(CONFIG)
    policy = PackingPolicy(loader_of(), "wide", "q4_k")
    decoder, loader = matched(CONFIG, FakeCheckpoint(tensors), policy)
    nbytes = load(decoder, loader)
    for prefix, group in decoder.groups():
        for name, buffer in group.named_buffers():
            packing = packing_of(group, name)
            dense = tensors[prefix + name if prefix + name == "lm_head.weight" else f"model.{prefix}{name}"]
            if packing is None:
                assert torch.equal(buffer, dense)
                continue
            one = FORMATS[packing.format]
            expected = one.dequantize(one.quantize(dense), dense.shape)
            assert torch.equal(packing.unpack(buffer, torch.float32), expected), prefix + name
            error = ((expected - dense).double().norm() / dense.double().norm()).item()
            assert loader.errors[prefix + name] == pytest.approx(error, rel=1e-4)
    assert nbytes == sum(group.layout.nbytes for group in resident_groups(decoder, loader.is_tied))


def test_a_tied_head_multiplies_with_the_embedding_s_packed_bytes() -> None:
    decoder, loader = matched(TIED, FakeCheckpoint(without_head(TIED)), kernels("float", "q4_k"))
    load(decoder, loader)
    embedding, head = decoder.embed_tokens, decoder.head.lm_head
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    rows = embedding.packing.unpack(embedding.weight, torch.float32)
    torch.testing.assert_close(head(x), x @ rows.T, rtol=1e-5, atol=1e-4)


def test_a_fold_that_computes_with_values_leaves_a_stored_matrix_dense() -> None:
    """GPT-2's safetensors hold matrices transposed: rows of the file are no rows of ours."""
    sizes = {"n_embd": 64, "n_head": 2}
    config, tensors = config_of(GPT2, **sizes), stored_gpt2(dim=64)
    checkpoint = with_packed(tensors, {"h.0.mlp.c_fc.weight": "q8_0", "wte.weight": "q8_0"})
    decoder, loader = matched(config, checkpoint, kernels())
    found = {name for name, packing in chosen(decoder).items() if packing is not None}
    assert found == {"embed_tokens.weight", "lm_head.weight"}
    load(decoder, loader)
    stored = FORMATS["q8_0"].dequantize(checkpoint.held["h.0.mlp.c_fc.weight"], (64, 256))
    assert torch.equal(decoder.layers[0].mlp.up_proj.weight, stored.T)
    packed, _ = matched(config, FakeCheckpoint(tensors), kernels(asked="q8_0"))  # dense ones are turned, then packed
    assert all(packing is not None for packing in chosen(packed).values())


FOLDS: Mapping[str, tuple[Fold, ...]] = {
    "none": (),
    "rotary pairs": (SplitPairs(4),),
    "q of qkv": (PickRows(8, 24),),
    "odd rows": (PickRows(1, 32, step=2),),
    "rows, then pairs": (PickRows(0, 16), SplitPairs(2)),
}


@pytest.mark.parametrize("library", [True, False], ids=["kernels", "no_kernels"])
@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "i2_s", "mxfp4"])
@pytest.mark.parametrize("folds", FOLDS.values(), ids=FOLDS)
def test_folds_of_packed_rows_are_the_folds_of_dense_rows(folds: tuple[Fold, ...], name: str, library: bool) -> None:
    matrix = stored_matrix(name, 32, 256)
    raw = FORMATS[name].join_rows(matrix.rows, matrix.scale)
    loader = Loader(
        FakeCheckpoint({"stored": raw}, packed={"stored": (name, (32, 256))}), {"ours": TensorSource("stored", folds)}
    )
    dense = loader.dense("ours", torch.float32)
    packing = KernelPacking(name, *dense.shape, native_kernels()) if library else StoredPacking(name, *dense.shape)
    assert torch.equal(packing.unpack(loader.packed("ours", packing), torch.float32), dense)
    expected = matrix.dense
    for fold in folds:
        expected = fold.apply(expected)
    assert torch.equal(dense, expected)


@pytest.mark.parametrize("name", ["mxfp4", "i2_s", "q4_k"])
def test_each_expert_is_a_matrix_of_its_own_after_every_other_row_is_picked(name: str) -> None:
    matrix = stored_matrix(name, 3 * 34, 256)
    raw = FORMATS[name].join_rows(matrix.rows, matrix.scale)
    checkpoint = FakeCheckpoint({"stored": raw}, packed={"stored": (name, (3, 34, 256))})
    loader = Loader(checkpoint, {"up": TensorSource("stored", (PickRows(1, 34, step=2, axis=-2),))})
    packing = KernelPacking(name, 17, 256, native_kernels())
    packed = loader.packed("up", packing)
    assert packed.shape == (3, packing.nbytes)
    for expert, dense in enumerate(matrix.dense.view(3, 34, 256)):
        assert torch.equal(packing.unpack(packed[expert], torch.float32), dense[1::2])


def golden(name: str, policy: PackingPolicy, dtype: torch.dtype = torch.bfloat16) -> tuple[Decoder, Loader]:
    settings = compose_settings([f"model.checkpoint={GOLDEN / 'tiny' / name}"])
    model = open_model(settings.model, 0, settings.cache_folder, lambda *_: None)
    return match_model(model, dtype, policy)


@pytest.mark.parametrize("name", ["gptoss", "gptoss.gguf"])
def test_stored_experts_stay_packed_with_the_rounding_of_the_policy(name: str) -> None:
    decoder, _ = golden(name, kernels("block"))
    parts = [module for module in decoder.modules() if isinstance(module, ExpertLinear)]
    assert {part.packing.format for part in parts} == {"mxfp4"}
    assert {part.rounding for part in parts} == {"block"}
    assert not any(module.packing for module in decoder.modules() if isinstance(module, Linear | Embedding))


def test_a_layer_s_experts_are_packed_together_or_not_at_all() -> None:
    decoder, loader = golden("gptoss", kernels())
    decoder, _ = golden("gptoss", None)
    down = loader.sources["layers.0.mlp.experts.down_proj.weight"].name
    checkpoint = copy.copy(loader.checkpoint)
    checkpoint.tensors = MappingProxyType(
        {**checkpoint.tensors, down: replace(checkpoint.tensors[down], encoding="bf16")}
    )
    WeightPacker(loader.sources, checkpoint, kernels()).pack(decoder)
    found = {name: packing is not None for name, packing in chosen(decoder).items() if "experts" in name}
    assert found == {name: name.startswith("layers.1.") for name in found}


@pytest.mark.parametrize("name", ["bitnet", "bitnet_i2s.gguf"])
@pytest.mark.parametrize(
    ("policy", "rounding", "form"),
    [
        ("wide", "token", KernelPacking),
        ("block", "token", KernelPacking),
        ("float", "float", KernelPacking),
        (None, "float", StoredPacking),
        ("gpu", "token", DevicePacking),
    ],
    ids=["wide", "block", "float", "no_kernels", "gpu"],
)
def test_ternary_matrices_round_by_token_where_kernels_do_it(
    name: str, policy: str | None, rounding: str, form: type[Packing]
) -> None:
    """With "float" or without kernels the module rounds, in the order of the checkpoint's own class."""
    without = PackingPolicy(TritonBackend() if policy == "gpu" else TorchBackend(), "wide")
    decoder, _ = golden(name, without if policy in (None, "gpu") else kernels(policy))
    ternary = [module for module in decoder.layers.modules() if isinstance(module, Linear)]
    assert {module.rounding for module in ternary} == {rounding}
    assert all(isinstance(module.packing, form) and module.packing.format == "i2_s" for module in ternary)
    assert decoder.head.lm_head.packing is None


@pytest.mark.thorough
@pytest.mark.parametrize("asked", ["q4_0", "stored"])
@pytest.mark.parametrize("loader_of", [native_backend, TorchBackend])
def test_loading_takes_the_packed_model_and_one_tensor(
    asked: str, loader_of: Callable[[], Backend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tensor may be there several times: as it is read, in float32, in slices of a quantiser's working.

    The weights themselves lie in pages of their own, once; torch's allocator does not count them.
    """
    pages = list[int]()

    def counted(nbytes: int) -> torch.Tensor:
        pages.append(nbytes)
        return private_pages(nbytes)

    monkeypatch.setattr(slots, "private_pages", counted)
    config = config_of(LLAMA, **SIZES, num_key_value_heads=2, num_hidden_layers=6)
    tensors = stored_tensors(config)
    matrices = {name: "q4_k" for name, tensor in tensors.items() if tensor.dim() == 2} if asked == "stored" else {}
    checkpoint = with_packed(tensors, matrices)
    policy = PackingPolicy(loader_of(), "wide", asked)
    decoder, loader = matched(config, checkpoint, policy)
    packed = sum(group.layout.nbytes for group in resident_groups(decoder, loader.is_tied))
    largest = max(tensor.nbytes for tensor in checkpoint.held.values())
    assert 0 < peak_nbytes(partial(load, decoder, loader), tmp_path) < (2.5 if asked == "stored" else 4.5) * largest
    assert pages == [packed]
