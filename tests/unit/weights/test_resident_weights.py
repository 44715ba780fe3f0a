"""Every weight lies in the one allocation, in order, at its place; one that does not is named."""

import re

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

from graphcore.arch.config.model_config import ModelConfig
from graphcore.arch.registry import architecture_of
from graphcore.errors import GraphcoreError, ResidencyError
from graphcore.nn.decoder import Decoder
from graphcore.weights.groups import resident_groups
from graphcore.weights.layout import Layout, Place
from graphcore.weights.loader import Loader
from graphcore.weights.matching import EMBEDDING, HEAD, match_weights
from graphcore.weights.resident_weights import check_resident, load_resident, named_weights
from graphcore.weights.slots import Slot

CPU = torch.device("cpu")
TIED = {HEAD: EMBEDDING}


def loaded(config: ModelConfig, tensors: dict[str, Tensor]) -> tuple[Decoder, Slot, list[Layout]]:
    """Return a decoder with its weights, the slot that they lie in, and the layouts."""
    checkpoint = FakeCheckpoint(tensors)
    sources = match_weights(architecture_of(config), config, checkpoint, shapes_of(config), config.num_hidden_layers)
    decoder, loader = meta_decoder(config), Loader(checkpoint, sources)
    layouts = [group.layout for group in resident_groups(decoder, loader.is_tied)]
    nbytes = load_resident(loader, decoder, CPU, lambda *_: None)
    memory = decoder.embed_tokens.weight.untyped_storage()
    begin = decoder.embed_tokens.weight.data_ptr() - memory.data_ptr()
    return decoder, Slot(torch.empty(0, dtype=torch.uint8).set_(memory)[begin : begin + nbytes]), layouts  # type: ignore[call-overload]


def llama(**changes: object) -> tuple[Decoder, Slot, list[Layout]]:
    config = config_of(LLAMA, **changes)
    tensors = stored_tensors(config)
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return loaded(config, tensors)


def names_in_memory(decoder: Decoder) -> list[str]:
    """Return the weights' names by address; of a tied pair, the embedding."""
    by_address: dict[int, str] = {}
    for name, tensor in decoder.named_buffers():
        by_address.setdefault(tensor.data_ptr(), name.removeprefix("head."))
    return [by_address[address] for address in sorted(by_address)]


def test_weights_lie_in_the_order_of_their_use() -> None:
    """[ token embeddings | positions | layer 0 | ... | output norm | head ]; GPT-2's head is the embedding."""
    decoder, _, _ = loaded(config_of(GPT2), stored_gpt2())
    order = [re.sub(r"(layers\.\d+).*", r"\1", name) for name in names_in_memory(decoder)]
    expected = ["embed_tokens.weight", "embed_tokens.positions", "layers.0", "layers.1", "norm.weight", "norm.bias"]
    assert list(dict.fromkeys(order)) == expected
    decoder, _, _ = llama()
    assert names_in_memory(decoder)[-2:] == ["norm.weight", "lm_head.weight"]


@pytest.mark.parametrize("is_tied", [False, True])
def test_all_weights_lie_in_one_allocation_and_pass(is_tied: bool) -> None:
    decoder, slot, layouts = llama(tie_word_embeddings=is_tied)
    assert len({tensor.untyped_storage().data_ptr() for tensor in decoder.buffers()}) == 1
    assert all(tensor.data_ptr() % 256 == 0 for tensor in decoder.buffers())
    assert sum(layout.nbytes for layout in layouts) == slot.raw.nbytes
    check_resident(named_weights(decoder), slot, layouts, CPU, shared=TIED)


def refused(decoder: Decoder, slot: Slot, layouts: list[Layout], device: torch.device = CPU) -> str:
    with pytest.raises(ResidencyError) as caught:
        check_resident(named_weights(decoder), slot, layouts, device, shared=TIED)
    assert isinstance(caught.value, GraphcoreError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_weight_that_was_bound_to_other_memory_is_named_with_both_places() -> None:
    decoder, slot, layouts = llama()
    up = decoder.layers[1].mlp.up_proj
    up.weight = up.weight.clone()
    start = layouts[0].nbytes + layouts[1].nbytes + layouts[2].places["layers.1.mlp.up_proj.weight"].offset
    said = refused(decoder, slot, layouts)
    assert f"weight 'layers.1.mlp.up_proj.weight' must be 1536 bytes at byte {start} of" in said
    assert "is in another allocation" in said


def test_a_weight_that_was_moved_inside_the_allocation_is_named_with_both_places() -> None:
    decoder, slot, layouts = llama()
    attention = decoder.layers[0].self_attn
    key = layouts[0].nbytes + layouts[1].places["layers.0.self_attn.k_proj.weight"].offset
    attention.k_proj.weight, attention.v_proj.weight = attention.v_proj.weight, attention.k_proj.weight
    value = layouts[0].nbytes + layouts[1].places["layers.0.self_attn.v_proj.weight"].offset
    said = refused(decoder, slot, layouts)
    assert "'layers.0.self_attn.k_proj.weight'" in said
    assert f"at byte {key} of" in said
    assert f"is at byte {value}" in said


def test_a_weight_left_on_meta_is_named() -> None:
    decoder, slot, layouts = llama()
    decoder.head.norm.weight = torch.empty(16, device="meta")
    assert "weight 'norm.weight' must be 64 bytes" in (said := refused(decoder, slot, layouts))
    assert "is on the meta device, without bytes" in said


def test_weights_on_another_device_than_asked_are_refused() -> None:
    decoder, slot, layouts = llama()
    said = refused(decoder, slot, layouts, torch.device("cuda", 0))
    assert "weight 'embed_tokens.weight' must be 1280 bytes at byte 0 of the weights' allocation on cuda:0" in said
    assert "but is on cpu" in said


def test_weights_in_misaligned_memory_are_refused() -> None:
    decoder, slot, layouts = llama()
    moved = Slot(torch.cat([slot.raw, slot.raw.new_zeros(512)])[: slot.raw.nbytes + 512])
    shifted = Slot(moved.raw[-moved.raw.data_ptr() % 256 + 64 :][: slot.raw.nbytes])
    for group, part in zip(resident_groups(decoder, is_tied=False), shifted.split(layouts), strict=True):
        group.bind(part)
    assert "no multiple of 256" in refused(decoder, shifted, layouts)


def test_a_weight_of_another_shape_or_type_is_refused() -> None:
    decoder, slot, layouts = llama()
    query = decoder.layers[0].self_attn.q_proj
    query.weight = query.weight.T
    assert "strides [1, 16]" in refused(decoder, slot, layouts)
    query.weight = query.weight.T.view(torch.int32)
    assert "is torch.int32 [16, 16]" in refused(decoder, slot, layouts)


def test_places_that_overlap_or_leave_the_slot_are_refused() -> None:
    decoder, slot, layouts = llama()
    short = Slot(slot.raw[:-256])
    assert "weight 'lm_head.weight'" in (said := refused(decoder, short, layouts))
    assert "behind the slot's" in said
    places = layouts[0].places | {"embed_tokens.weight": Place(0, (40, 16), torch.float32)}
    decoder.embed_tokens.weight = slot.raw[: 40 * 64].view(torch.float32).view(40, 16)
    said = refused(decoder, slot, [Layout(places, layouts[0].nbytes), *layouts[1:]])
    assert "overlaps the weight before it, which ends at byte 2560" in said


def test_a_tied_head_must_be_the_embeddings_tensor() -> None:
    decoder, slot, layouts = llama(tie_word_embeddings=True)
    decoder.head.lm_head.weight = decoder.head.lm_head.weight.clone()
    assert "'lm_head.weight' must be the tensor of 'embed_tokens.weight'" in refused(decoder, slot, layouts)


def test_a_weight_without_a_place_and_a_place_without_a_weight_are_refused() -> None:
    decoder, slot, layouts = llama()
    query = decoder.layers[0].self_attn.q_proj
    query.bias = torch.zeros(16)
    assert "'layers.0.self_attn.q_proj.bias' has no place" in refused(decoder, slot, layouts)
    query.bias = None
    decoder.head.lm_head.weight = None  # type: ignore[assignment]
    assert "weights ['lm_head.weight'] have a place" in refused(decoder, slot, layouts)


def test_the_loader_checks_what_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphcore.weights.groups.bind", lambda *_: None)
    with pytest.raises(ResidencyError, match=r"'embed_tokens.weight'.*meta"):
        llama()
