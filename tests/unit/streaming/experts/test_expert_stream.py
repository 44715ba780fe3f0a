"""Experts that do not stay on a simulated device: the tokens and logits of resident ones, to the bit, either way."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.fake_cuda import Driver
from support.queues import SimulatedQueues, simulated
from torch import Tensor

from graphcore import Engine
from graphcore.engine.loading.prepared_decoder import PreparedDecoder
from graphcore.graph.step import FetchedBlock, RoutedBlock
from graphcore.streaming import weight_stream
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.experts.stream import ExpertStream
from graphcore.streaming.pinned_memory import Pins

GPT_OSS = Path(__file__).parents[3] / "golden" / "tiny" / "gptoss"
IDS = [[5, 17, 3, 88, 41, 2, 9]]
SIZES = ("context_length=64", "prefill_chunk=4")


def outputs_of(engine: Engine) -> tuple[Tensor, list[int]]:
    return engine.logits(IDS), engine.generate(IDS, max_new_tokens=12, ignore_eos=True)[0].token_ids


@pytest.fixture(scope="module")
def resident() -> tuple[Tensor, list[int]]:
    with Engine.load(GPT_OSS, "fp32", graph="eager", device="cpu", overrides=[*SIZES]) as engine:
        return outputs_of(engine)


@contextmanager
def engine_on(
    monkeypatch: pytest.MonkeyPatch, queues: SimulatedQueues, pins: Pins | None, *overrides: str
) -> Iterator[Engine]:
    """Load a tiny mixture whose experts do not stay on the simulated device."""

    monkeypatch.setattr(weight_stream, "link_opener", lambda _device, _pinned: lambda: DeviceLink(queues, pins))
    # Settings that come later count; on a CPU the source would else be the files.
    monkeypatch.setattr(
        PreparedDecoder, "has_device_readable_experts", lambda _p, _s, tier: tier.kind == "host" and pins is not None
    )
    with Engine.load(
        GPT_OSS,
        "fp32",
        streaming="on",
        graph="eager",
        device="cpu",
        overrides=[*SIZES, "streaming.source=host", "streaming.layer_group_size=1", *overrides],  # as on a GPU
    ) as engine:
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


@pytest.mark.thorough
@pytest.mark.parametrize("source", ["host", "disk"])
@pytest.mark.parametrize("quota", [1 << 40, 0, None])
@pytest.mark.parametrize("cache", [0, 40_000])
def test_tokens_and_logits_are_those_of_resident_experts(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[Tensor, list[int]], source: str, quota: int | None, cache: int
) -> None:
    """All of memory locked, none, or nobody asked; logits come from chunks of 4 and 3 tokens, tokens from decode."""
    queues, pins = simulated(0), None if quota is None else Pins(Driver(quota))
    asked = f"streaming.expert_cache={cache}", f"streaming.source={source}"
    with engine_on(monkeypatch, queues, pins, *asked) as engine:
        logits, tokens = outputs_of(engine)
    assert torch.equal(logits, resident[0])
    assert tokens == resident[1]
    if pins is not None:
        assert pins.addresses == []  # unlocked when the engine is closed


def test_a_decode_step_reads_mapped_experts_where_they_wait_and_a_chunk_fetches_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queues = simulated(1)
    with engine_on(monkeypatch, queues, Pins(Driver(1 << 40)), "streaming.expert_cache=0") as engine:
        experts, builder = experts_of(engine), engine.runner.builder
        layers = range(len(builder.decoder.layers))
        assert experts.fetched.device_readable == set(layers)
        assert all(isinstance(run, RoutedBlock) for run in runs_of(engine, "decode"))
        assert all(isinstance(run, FetchedBlock) for run in runs_of(engine, "prefill"))
        store = {table.data_ptr() for table in _tables(engine)}
        held = {builder.decoder.layers[layer].mlp.experts.up_proj.weight.data_ptr() for layer in layers}
        assert held <= store
        engine.generate(IDS, max_new_tokens=2, ignore_eos=True)
        fetched = experts.cache.hits + experts.cache.misses
        engine.generate([[1]], max_new_tokens=6, ignore_eos=True)
        assert fetched == experts.cache.hits + experts.cache.misses  # one token of prompt, and no chunk
        assert [note for note in engine.notes if "locked" in note] == []


def _tables(engine: Engine) -> list[Tensor]:
    link = engine.loaded.weight_stream.link
    assert link is not None
    assert link.pins is not None
    return link.pins.held


class Stingy(Driver):
    """Locks the groups' two runs and the tables of the first layer's experts, but for one of the second's."""

    def register(self, address: int, nbytes: int) -> str:
        tables = [locked for locked in self.locked.values() if locked == nbytes]
        return "out of memory" if len(tables) == 5 else super().register(address, nbytes)


def test_layers_that_could_not_be_locked_wait_for_the_host_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[Tensor, list[int]]
) -> None:
    with engine_on(monkeypatch, simulated(2), Pins(Stingy(1 << 40)), "streaming.expert_cache=0") as engine:
        assert experts_of(engine).fetched.device_readable == {0}
        assert [type(run) for run in runs_of(engine, "decode")] == [RoutedBlock, FetchedBlock]
        assert outputs_of(engine)[1] == resident[1]
        (note,) = [note for note in engine.notes if "could not be locked" in note]
    assert "out of memory" in note
    assert "the host fetches the chosen experts" in note


class Elsewhere(Driver):
    """Locks memory that kernels find at another address."""

    def device_address(self, address: int) -> int | None:
        return address + 4096


def test_memory_that_kernels_find_elsewhere_is_not_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_on(monkeypatch, simulated(3), Pins(Elsewhere(1 << 40))) as engine:
        assert experts_of(engine).fetched.device_readable == frozenset()
        assert any("kernels cannot read it" in note for note in engine.notes)


def test_experts_in_random_interleavings_never_read_a_slot_too_early(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[Tensor, list[int]]
) -> None:
    for seed in range(6):
        queues = SimulatedQueues(random.Random(seed), computes_at_once=True)
        with engine_on(monkeypatch, queues, None, "streaming.expert_cache=0") as engine:
            assert torch.equal(engine.logits(IDS), resident[0]), seed
            assert len(queues.copied) > 20
