"""Experts that do not stay on a GPU: in slots, read where they wait, or fetched, they are resident to the bit."""

import pytest
from support.streaming import differing, results

WAYS = {
    "in slots": ("streaming.source=host",),
    "mapped": ("streaming.source=host", "streaming.expert_cache=0"),
    "fetched, not locked": ("streaming.source=host", "streaming.pinned_memory=false"),
    "fetched from files": ("streaming.source=disk",),
    "a cache of a few": ("streaming.source=host", "streaming.pinned_memory=false", "streaming.expert_cache=100KB"),
}


@pytest.mark.parametrize("graph", ["eager", "captured"])
@pytest.mark.parametrize("way", WAYS)
def test_experts_are_the_resident_ones_to_the_bit(way: str, graph: str, tiny_model, load_on) -> None:
    folder = tiny_model("gpt_oss").folder
    resident = load_on(folder, graph=graph, dtype="bf16")
    engine = load_on(folder, *WAYS[way], graph=graph, dtype="bf16", streaming="on")
    assert engine.plan.experts is not None
    assert engine.plan.experts.are_device_readable == (way in ("in slots", "mapped"))
    assert engine.plan.experts.has_layer_slots == (way == "in slots")
    assert differing(results(engine, 40), results(resident, 40)) == []
