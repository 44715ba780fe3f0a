"""A device with memory of its own, simulated: over streamed weights it computes what it does over resident ones."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from simulated_lanes import SimulatedLanes
from torch import Tensor

from graphcore import Engine
from graphcore.engine import building
from graphcore.engine.device_stream import DeviceLink
from graphcore.engine.weight_stream import WeightStream, open_stream
from graphcore.streaming.pinning import Pins
from graphcore.streaming.streamed import Streamed

TINY = Path(__file__).parents[2] / "golden" / "tiny"
IDS = [[5, 17, 3, 88, 41, 2, 9]]


@dataclass
class Driver:
    """Locks runs of memory up to a quota.

    Attributes:
        quota: bytes of any one run.
    """

    quota: int
    locked: set[int] = field(default_factory=set)

    def register(self, address: int, nbytes: int) -> str:
        if nbytes > self.quota:
            return "out of memory"
        self.locked.add(address)
        return ""

    def unregister(self, address: int) -> None:
        self.locked.remove(address)


@contextmanager
def engine_on(
    monkeypatch: pytest.MonkeyPatch, lanes: SimulatedLanes, pins: Pins | None, *overrides: str
) -> Iterator[Engine]:
    """Load a tiny model whose weights stream to the simulated device."""

    def opened(*arguments: object) -> WeightStream:
        return open_stream(*arguments[:6], lambda: DeviceLink(lanes, pins))  # type: ignore[arg-type]

    monkeypatch.setattr(building, "open_stream", opened)
    dtype = "bf16" if "dtype=bf16" in overrides else "fp32"
    settings = ["context_length=64", "prefill_chunk=4", *(key for key in overrides if not key.startswith("dtype"))]
    with Engine.load(TINY / "qwen3", dtype, streaming="on", graph="eager", device="cpu", overrides=settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def resident() -> tuple[Tensor, list[int]]:
    with Engine.load(
        TINY / "qwen3", "fp32", graph="eager", device="cpu", overrides=["context_length=64", "prefill_chunk=4"]
    ) as engine:
        return engine.logits(IDS), engine.generate(IDS, max_new_tokens=20, ignore_eos=True)[0].token_ids


@pytest.mark.parametrize("source", ["disk", "host"])
@pytest.mark.parametrize("how", ["prefetch=0", "prefetch=1", "prefetch=3", "mode=sync"])
@pytest.mark.parametrize("quota", [0, 1 << 40, None])
def test_logits_and_tokens_are_those_of_resident_weights(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[Tensor, list[int]], source: str, how: str, quota: int | None
) -> None:
    """All of memory locked, none, or nobody asked; the tokens come from decode, the logits from chunks of 4 and 3."""
    lanes = SimulatedLanes(random.Random(f"{source} {how} {quota}"), computes_at_once=True)
    pins = None if quota is None else Pins(Driver(quota))
    overrides = f"streaming.source={source}", f"streaming.{how}"
    with engine_on(monkeypatch, lanes, pins, *overrides) as engine:
        assert torch.equal(engine.logits(IDS), resident[0])
        assert engine.generate(IDS, max_new_tokens=20, ignore_eos=True)[0].token_ids == resident[1]
        assert len(lanes.copied) > 20
        notes = [note for note in engine.choices.notes if "pinned_memory" in note]
    assert bool(notes) == (quota == 0)
    if pins is not None:
        assert pins.addresses == []  # unlocked when the engine is closed
        assert pins.registrar.locked == set()  # type: ignore[attr-defined]


def test_a_store_that_cannot_be_locked_goes_through_two_host_slots_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = SimulatedLanes(random.Random(0), computes_at_once=True)
    driver = Once(1 << 40)
    with engine_on(monkeypatch, lanes, Pins(driver), "streaming.source=host") as engine:
        (note,) = [note for note in engine.choices.notes if "pinned_memory" in note]
        assert "could not be locked (out of memory), so weights go through" in note
        assert len(driver.locked) == 1
        policy = engine.runner.policy
        assert isinstance(policy, Streamed)
        engine.generate(IDS, max_new_tokens=2, ignore_eos=True)
        sources = {source.data_ptr() for source, _ in lanes.copied}
        assert len(sources) == 2


@pytest.mark.parametrize("is_device", [False, True])
def test_threads_may_cast_what_they_read(monkeypatch: pytest.MonkeyPatch, is_device: bool) -> None:
    """A float32 file that runs in bf16: its rows are not copied but cast, into slots that are inference tensors."""
    small = ["context_length=64", "prefill_chunk=4"]
    with Engine.load(TINY / "qwen3", "bf16", graph="eager", device="cpu", overrides=small) as engine:
        expected = engine.logits(IDS)
    if is_device:
        lanes = SimulatedLanes(random.Random(0), computes_at_once=True)
        with engine_on(monkeypatch, lanes, None, "dtype=bf16", "streaming.source=disk") as engine:
            assert torch.equal(engine.logits(IDS), expected)
        return
    small.append("streaming.source=disk")
    with Engine.load(TINY / "qwen3", "bf16", streaming="on", graph="eager", device="cpu", overrides=small) as engine:
        assert torch.equal(engine.logits(IDS), expected)


@dataclass
class Once(Driver):
    """Refuses the first run it is asked for."""

    is_asked: bool = False

    def register(self, address: int, nbytes: int) -> str:
        refuses, self.is_asked = not self.is_asked, True
        return "out of memory" if refuses else super().register(address, nbytes)
