"""A store in RAM holds, group by group, the very bytes that slots are to have."""

from pathlib import Path

import pytest
import torch
from support.tiny_models import build_reference, save_tiny

from graphcore.config.compose import compose_settings
from graphcore.engine.loading.open_model import open_model
from graphcore.engine.loading.prepare_model import match_model
from graphcore.streaming.host_store import fill_store
from graphcore.weights.groups import movable_groups, split_layers
from graphcore.weights.matching import EMBEDDING, HEAD

NAMES = {"llama3": "model.", "qwen3": "model.", "gemma3": "model."}  # untied, tied, tied and scaled


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_every_group_is_the_references_weights_in_the_order_of_its_layout(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    folder = save_tiny(name, tmp_path).folder
    stored = build_reference(name).state_dict()
    model = open_model(compose_settings([f"model.checkpoint={folder}"]).model, 0, tmp_path, lambda *_: None)
    decoder, loader = match_model(model, dtype)
    parts = [decoder.head.part(rows) for rows in decoder.head_rows()]
    groups = movable_groups(decoder, split_layers(len(decoder.layers), 2), parts)
    store = fill_store(loader, groups, {EMBEDDING: decoder.embed_tokens, HEAD: decoder.head.lm_head})
    assert (store.tables[EMBEDDING] is store.tables[HEAD]) == loader.is_tied
    assert store.groups.keys() == {group.index for group in groups}
    for group in groups:
        held, layout = store.groups[group.index], group.layout
        for weight, slot in zip(group.weights, layout.places.values(), strict=True):
            full = "lm_head.weight" if weight.name == HEAD else f"{NAMES[name]}{weight.name}"
            wanted = stored[full].to(dtype)
            wanted = wanted if weight.rows is None else wanted[weight.rows.start : weight.rows.stop]
            found = held[slot.offset : slot.offset + slot.nbytes].view(dtype).view(slot.shape)
            assert torch.equal(found, wanted), weight.name
    assert torch.equal(store.tables[EMBEDDING], stored[f"{NAMES[name]}embed_tokens.weight"].to(dtype))
    assert torch.equal(store.tables[HEAD], stored["lm_head.weight"].to(dtype))
