"""Sizes against the loader's own layouts and against published parameter counts."""

import pytest
import torch

from graphcore.arch.config_from_json import parse_model_config
from graphcore.arch.registry import architecture_of
from graphcore.arch.weight_map import weight_shapes
from graphcore.config.compose import compose_settings
from graphcore.graph.matrix_groups import matrix_groups
from graphcore.nn.decoder import Decoder
from graphcore.planning.sizes import ExpertSizes, WeightSizes, sizes_of
from graphcore.weights.groups import split_layers, split_run
from graphcore.weights.layout import layout_of


def decoder_of(model: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    config = parse_model_config(compose_settings([f"model={model}"]).model.random_config, model)
    with torch.device("meta"):
        return Decoder(architecture_of(config).spec(config), dtype)


def test_llama_3_2_1b_is_its_published_parameters() -> None:
    sizes = sizes_of(decoder_of("llama3"), is_tied=True)
    # 2048 x 2048 twice, 2048 x 512 twice and 2048 x 8192 thrice, in bf16
    layer = 2 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    assert sizes.groups == (layer,) * 16
    assert sizes.embedding == sizes.head == 2 * 128256 * 2048
    assert sizes.total_nbytes - 2 * sizes.always // 4 == 2 * 1_235_814_400  # norms are float32
    assert sizes.head_slices[0] <= layer
    assert sum(sizes.head_slices) == sizes.head
    assert sizes.read_nbytes == sizes.total_nbytes


@pytest.mark.parametrize("size", [1, 3, 5, 16, 40])
def test_layer_groups_are_consecutive_layers_and_a_remainder(size: int) -> None:
    decoder = decoder_of("llama3")
    single = sizes_of(decoder, True)
    grouped = sizes_of(decoder, True, split_layers(16, size))
    assert len(grouped.groups) == -(-16 // size)
    assert sum(grouped.groups) == sum(single.groups)
    assert grouped.groups[-1] == single.groups[0] * (16 % size or min(size, 16))
    assert grouped.head_slices == single.head_slices  # whatever streams, the head is computed in the same slices


@pytest.mark.parametrize(("model", "parts"), [("llama3", 4), ("gpt2", 3), ("qwen3", 4)])
def test_a_matrix_is_the_unit_and_two_slots_of_it_are_less_than_a_layer_s(
    model: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "least_part_nbytes", 0)
    decoder = decoder_of(model)
    decoder.has_small_parts = True
    layers, matrices = sizes_of(decoder, True), sizes_of(decoder, True, matrix_groups(decoder))
    assert len(matrices.groups) == parts * len(layers.groups)
    assert sum(matrices.groups) == sum(layers.groups)
    largest = max(one.nbytes for one in decoder.layers[0].buffers())
    assert max(*matrices.groups, *matrices.head_slices) == largest
    assert 2 * largest < (0.6 if model == "llama3" else 1.0) * layers.groups[0]
    assert sum(matrices.head_slices) == matrices.head == layers.head


def test_a_small_model_s_groups_and_head_slices_keep_all_reading_threads_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("smollm2")
    decoder.has_small_parts = True
    joined = sizes_of(decoder, True, matrix_groups(decoder))
    monkeypatch.setattr(Decoder, "least_part_nbytes", 0)
    single = sizes_of(decoder, True, matrix_groups(decoder))
    assert len(single.groups) == 30 * 4  # q k v o, gate, up, down: 1.8 MB each
    assert len(joined.groups) == 30  # a layer: 7.1 MB
    assert max(single.head_slices) <= max(single.groups) < 2e6
    assert max(joined.head_slices) <= max(joined.groups) < 7.1e6
    assert len(joined.head_slices) == len(single.head_slices) // 4
    assert sum(joined.groups) == sum(single.groups)


@pytest.mark.parametrize("model", ["smollm2", "gemma3", "qwen3", "gpt2", "bitnet"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_all_sizes_together_are_what_the_layouts_take(model: str, is_tied: bool) -> None:
    decoder = decoder_of(model, torch.float32)
    layouts = [
        layout_of(item for item in group.named_buffers() if not (is_tied and item[0] == "lm_head.weight")).nbytes
        for _, group in decoder.groups()
    ]
    assert sizes_of(decoder, is_tied).total_nbytes == sum(layouts)


def test_vectors_and_learned_positions_never_stream() -> None:
    sizes = sizes_of(decoder_of("gpt2", torch.float32), True)
    # 768 wide: norm weights and biases, biases of qkv, output, up and down; positions; the final norm
    layer = 4 * (4 * 768 + 3 * 768 + 768 + 3072 + 768)
    assert sizes.always == 12 * layer + 4 * 1024 * 768 + 2 * 4 * 768


def test_gpt_oss_experts_are_apart_and_their_biases_stay() -> None:
    sizes = sizes_of(decoder_of("gpt_oss"), is_tied=False)
    # 32 experts of 3 x 2880 x 2880 in each of 24 layers, 4 routed; gpt-oss-20b has 20.9e9 parameters
    assert sizes.experts == ExpertSizes((2 * 3 * 2880 * 2880,) * 24, experts_per_layer=32, top_k=4, min_slots=4)
    attention = 2 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64 + 32 * 2880)
    assert sizes.groups == (attention,) * 24
    assert sizes.total_nbytes == pytest.approx(2 * 20.9e9, rel=0.01)
    assert sizes.read_nbytes == sum(sizes.groups) + sizes.head + sizes.always + 24 * 4 * 2 * 3 * 2880 * 2880


def test_a_tied_head_counts_once() -> None:
    decoder = decoder_of("bitnet")
    decoder.embed_tokens.weight = torch.empty(16, 64, dtype=torch.uint8, device="meta")
    decoder.head.lm_head.weight = torch.empty(16, 192, dtype=torch.uint8, device="meta")
    assert [sizes_of(decoder, is_tied).head for is_tied in (True, False)] == [1024, 3072]  # the table is multiplied by
    assert WeightSizes(1000, 1000, (600, 400), True, (300, 310), 5).total_nbytes == 1000 + 610 + 5
    assert WeightSizes(1000, 1000, (600, 400), False, (300, 310), 5).total_nbytes == 2000 + 610 + 5


@pytest.mark.parametrize("has_ends", [True, False])
def test_a_decoder_that_keeps_some_layers_has_their_bytes_and_the_whole_one_s_head_slices(has_ends: bool) -> None:
    whole, part = decoder_of("qwen3_moe"), decoder_of("qwen3_moe")
    kept = range(3, 9)
    part.keep(kept, has_ends)
    groups = split_run(kept, 2)
    sizes, share = sizes_of(whole, False), sizes_of(part, False, groups)
    assert share.groups == tuple(2 * nbytes for nbytes in sizes.groups[3:9:2])
    assert (share.embedding, share.head) == ((sizes.embedding, sizes.head) if has_ends else (0, 0))
    assert share.head_slices == (sizes.head_slices if has_ends else ())
    assert share.experts is not None
    assert sizes.experts is not None
    assert share.experts.expert_nbytes_by_layer == sizes.experts.expert_nbytes_by_layer[3:9]
    names = set(weight_shapes(part))
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == set(map(str, kept))
    assert ("embed_tokens.weight" in names, "lm_head.weight" in names) == (has_ends, has_ends)
