"""Slots that a simulated device's decode step fills by itself: resident tokens and logits, and what a chunk loads."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.fake_cuda import Driver
from support.queues import simulated
from support.tiny_models import TinyModel
from torch import Tensor

from graphcore import Engine
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.graph.step import FetchedBlock, RoutedBlock
from graphcore.kernels.ops.expert_slots import HITS, LOADED
from graphcore.streaming import weight_stream
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.experts.device_cache import layer_shares
from graphcore.streaming.experts.slots import ExpertPool
from graphcore.streaming.experts.stream import ExpertStream
from graphcore.streaming.pinned_memory import Pins

IDS = [[5, 17, 3, 88, 41, 2, 9]]
SIZES = ("context_length=64", "prefill_chunk=4", "streaming.source=host")


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], TinyModel]) -> Path:
    return tiny_model("qwen3_moe").folder


def outputs_of(engine: Engine) -> tuple[Tensor, list[int]]:
    return engine.logits(IDS), engine.generate(IDS, max_new_tokens=12, ignore_eos=True)[0].token_ids


@pytest.fixture(scope="module")
def resident(folder: Path) -> tuple[Tensor, list[int]]:
    with Engine.load(folder, "fp32", graph="eager", device="cpu", overrides=[*SIZES[:2]]) as engine:
        return outputs_of(engine)


@contextmanager
def engine_on(monkeypatch: pytest.MonkeyPatch, folder: Path, driver: Driver, cache: str) -> Iterator[Engine]:
    """Load a mixture whose experts do not stay on the simulated device; `cache` is streaming.expert_cache."""
    monkeypatch.setattr(
        weight_stream, "link_opener", lambda _device, _pinned: lambda: DeviceLink(simulated(0), Pins(driver))
    )
    monkeypatch.setattr(
        PreparedDecoder, "has_device_readable_experts", lambda _self, _settings, tier: tier.kind == "host"
    )
    asked = [*SIZES, "streaming.layer_group_size=1", f"streaming.expert_cache={cache}"]
    with Engine.load(folder, "fp32", streaming="on", graph="eager", device="cpu", overrides=asked) as engine:
        yield engine


def experts_of(engine: Engine) -> ExpertStream:
    experts = engine.loaded.weight_stream.experts
    assert experts is not None
    return experts


def runs_of(engine: Engine, phase: str) -> list[object]:
    """Return what runs each layer of a program of one sequence."""
    builder = engine.runner.builder
    program = builder.token(1) if phase == "decode" else builder.prefill(1)
    return [bound.run for step in program.steps for bound in vars(step).get("blocks", ())]


def slots_for_each_layer(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int) -> str:
    """Return the setting of so many slots for each layer."""
    with engine_on(monkeypatch, folder, Driver(1 << 40), "0") as engine:
        plan = engine.plan.experts
        assert plan is not None
        assert not plan.has_layer_slots
        return str(count * plan.num_layers * plan.slot_nbytes)


def test_each_layer_has_slots_that_a_decode_step_fills_and_a_chunk_shares(
    monkeypatch: pytest.MonkeyPatch, folder: Path, resident: tuple[Tensor, list[int]]
) -> None:
    some = slots_for_each_layer(monkeypatch, folder, 4)
    with engine_on(monkeypatch, folder, Driver(1 << 40), some) as engine:
        experts = experts_of(engine)
        cache = experts.device_cache
        assert cache is not None
        assert [len(slots.holders) for slots in cache.layers.values()] == [4] * len(runs_of(engine, "decode"))
        assert all(isinstance(run, RoutedBlock) for run in runs_of(engine, "decode"))
        assert all(isinstance(run, FetchedBlock) for run in runs_of(engine, "prefill"))
        assert outputs_of(engine)[1] == resident[1]
        assert torch.equal(engine.logits(IDS), resident[0])
        hits, misses = cache.tallies
        assert engine.stats["expert_hit_rate"] == hits / (hits + misses) > 0
        one = sum(table[0].nbytes for table in cache.layers[0].waiting)
        assert engine.loaded.weight_stream.expert_link_nbytes == cache.link_nbytes == misses * one
        assert experts.cache.misses == 0


@torch.inference_mode()
def test_a_chunk_loads_each_expert_once_and_those_in_slots_not_at_all(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    some = slots_for_each_layer(monkeypatch, folder, 3)
    with engine_on(monkeypatch, folder, Driver(1 << 40), some) as engine:
        cache = experts_of(engine).device_cache
        assert cache is not None
        slots = cache.layers[1]
        waves = [[expert for expert, place in enumerate(wave) if place >= 0] for wave in cache.waves(1, [0, 1, 2, 3])]
        assert waves == [[0, 1, 2], [3]]
        held = {expert for expert, place in enumerate(slots.places.tolist()) if place >= 0}
        assert 3 in held
        for wave in cache.waves(1, [0, 1, 2, 3]):
            there = {expert for expert, place in enumerate(wave) if place >= 0}
            assert held <= there or there.isdisjoint(held)
            for expert in there:
                for table, slot in zip(slots.waiting, slots.slots, strict=True):
                    assert torch.equal(slot[wave[expert]], table[expert])
        assert slots.tallies[HITS] == len(held)
        assert slots.tallies[LOADED] == 4 + 4 - len(held)


class Stingy(Driver):
    """Locks three tables of experts, those of one layer, and no more of their size."""

    def register(self, address: int, nbytes: int) -> str:
        alike = list(self.locked.values()).count(nbytes)
        return "out of memory" if alike == 3 else super().register(address, nbytes)


def test_a_layer_with_slots_whose_experts_could_not_be_locked_takes_the_host_s_way(
    monkeypatch: pytest.MonkeyPatch, folder: Path, resident: tuple[Tensor, list[int]]
) -> None:
    some = slots_for_each_layer(monkeypatch, folder, 4)
    with engine_on(monkeypatch, folder, Stingy(1 << 40), some) as engine:
        experts = experts_of(engine)
        assert experts.device_cache is not None
        assert list(experts.device_cache.layers) == [0]
        others = len(engine.runner.builder.decoder.layers) - 1
        assert [type(run) for run in runs_of(engine, "decode")] == [RoutedBlock] + [FetchedBlock] * others
        assert outputs_of(engine)[1] == resident[1]
        assert experts.cache.misses > 0
        assert any("the host fetches the chosen experts" in note for note in engine.notes)
        assert experts.hit_rate is not None
        assert experts.hit_rate > 0


def test_slots_are_split_evenly_and_none_is_lost() -> None:
    shares = layer_shares(ExpertPool((3, 5, 9), 11, 16))
    assert [(own.layers, own.num_slots, begin) for own, begin in shares] == [((3,), 4, 0), ((5,), 4, 4), ((9,), 3, 8)]
    assert {own.num_experts for own, _ in shares} == {16}
