"""A device with memory of its own, simulated: over streamed weights it computes what it does over resident ones."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.fake_cuda import Driver
from support.queues import FailingQueues, SimulatedQueues, simulated
from support.streaming import fill_threads
from torch import Tensor

from graphcore import Engine
from graphcore.errors import PlanError, StreamingError
from graphcore.streaming import weight_stream
from graphcore.streaming.device import stream as device_stream
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.pinned_memory import Pins

pytestmark = pytest.mark.thorough

TINY = Path(__file__).parents[3] / "golden" / "tiny"
IDS = [[5, 17, 3, 88, 41, 2, 9]]


@contextmanager
def engine_on(
    monkeypatch: pytest.MonkeyPatch, queues: SimulatedQueues, pins: Pins | None, *overrides: str
) -> Iterator[Engine]:
    """Load a tiny model whose weights stream to the simulated device."""

    monkeypatch.setattr(weight_stream, "link_opener", lambda _device, _pinned: lambda: DeviceLink(queues, pins))
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


WAYS = ("prefetch=0", "prefetch=1", "prefetch=3", "mode=sync")
QUOTAS = (0, 1 << 40, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "how", "quota"),  # each source in each way and with each quota, and each way with two quotas
    [
        (source, how, QUOTAS[(at + 2 * other) % len(QUOTAS)])
        for other, source in enumerate(("disk", "host"))
        for at, how in enumerate(WAYS)
    ],
)
def test_logits_and_tokens_are_those_of_resident_weights(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[Tensor, list[int]], source: str, how: str, quota: int | None
) -> None:
    """All of memory locked, none, or nobody asked; the tokens come from decode, the logits from chunks of 4 and 3."""
    queues = SimulatedQueues(random.Random(f"{source} {how} {quota}"), computes_at_once=True)
    pins = None if quota is None else Pins(Driver(quota))
    overrides = f"streaming.source={source}", f"streaming.{how}"
    with engine_on(monkeypatch, queues, pins, *overrides) as engine:
        assert torch.equal(engine.logits(IDS), resident[0])
        assert engine.generate(IDS, max_new_tokens=20, ignore_eos=True)[0].token_ids == resident[1]
        assert len(queues.copied) > 20
        notes = [note for note in engine.notes if "pinned_memory" in note]
    assert bool(notes) == (quota == 0)
    if pins is not None:
        assert pins.addresses == []  # unlocked when the engine is closed
        assert pins.registrar.locked == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["prefetch=1", "prefetch=3"])
def test_a_store_that_can_be_locked_in_part_is_copied_from_there_and_through_two_host_slots(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[Tensor, list[int]], how: str
) -> None:
    free = Driver(1 << 40)
    with engine_on(monkeypatch, simulated(0), Pins(free), "streaming.source=host") as engine:
        ring = free.most - sum(free.locked.values())
        groups = {copy[0].data_ptr() for copy in engine.loaded.weight_stream.copies}
    for seed in range(5):
        queues, driver = simulated(seed), Driver(ring + free.most // 2)
        with engine_on(monkeypatch, queues, Pins(driver), "streaming.source=host", f"streaming.{how}") as engine:
            (note,) = [note for note in engine.notes if "pinned_memory" in note]
            assert "of RAM could be locked (out of memory); the other weights go through" in note
            assert 1 < len(driver.locked) < len(groups)
            assert engine.generate(IDS, max_new_tokens=20, ignore_eos=True)[0].token_ids == resident[1]
            sources = {source.data_ptr() for source, _ in queues.copied}
            assert len(driver.locked) < len(sources) <= len(driver.locked) + 2
            assert engine.loaded.weight_stream.raw_link(10**6) is not None
            assert torch.equal(engine.logits(IDS), resident[0])
        assert driver.locked == {}


def test_the_bare_link_of_a_locked_store_is_that_of_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = simulated(0)
    with engine_on(monkeypatch, queues, Pins(Driver(1 << 40)), "streaming.source=host") as engine:
        before = len(queues.copied)
        rate = engine.loaded.weight_stream.raw_link(1 << 40)
        copied = queues.copied[before:]
        assert [(source.data_ptr(), target.data_ptr()) for source, target in copied] == [
            (source.data_ptr(), target.data_ptr()) for source, target in engine.loaded.weight_stream.copies
        ]
        assert rate is not None
        assert 0 < rate <= sum(source.nbytes for source, _ in copied)  # a step of the simulated device is a second


@pytest.mark.parametrize("is_device", [False, True])
def test_threads_may_cast_what_they_read(monkeypatch: pytest.MonkeyPatch, is_device: bool) -> None:
    """A float32 file that runs in bf16: its rows are not copied but cast, into slots that are inference tensors."""
    small = ["context_length=64", "prefill_chunk=4"]
    with Engine.load(TINY / "qwen3", "bf16", graph="eager", device="cpu", overrides=small) as engine:
        expected = engine.logits(IDS)
    if is_device:
        queues = simulated(0)
        with engine_on(monkeypatch, queues, None, "dtype=bf16", "streaming.source=disk") as engine:
            assert torch.equal(engine.logits(IDS), expected)
        return
    small.append("streaming.source=disk")
    with Engine.load(TINY / "qwen3", "bf16", streaming="on", graph="eager", device="cpu", overrides=small) as engine:
        assert torch.equal(engine.logits(IDS), expected)


@dataclass
class Refusing(Driver):
    """Refuses from some run on.

    Attributes:
        number: of runs that it locks.
    """

    number: int = 0
    asked: int = 0

    def register(self, address: int, nbytes: int) -> str:
        self.asked += 1
        return "not permitted" if self.asked > self.number else super().register(address, nbytes)


@pytest.mark.parametrize("number", range(6))
def test_whichever_run_is_refused_tokens_are_the_same_and_nothing_stays_locked(
    monkeypatch: pytest.MonkeyPatch, resident: tuple[Tensor, list[int]], number: int
) -> None:
    driver = Refusing(1 << 40, number=number)
    with engine_on(monkeypatch, simulated(number), Pins(driver), "streaming.source=host") as engine:
        assert engine.generate(IDS, max_new_tokens=8, ignore_eos=True)[0].token_ids == resident[1][:8]
        assert bool(driver.locked) == (number > 0)
    assert driver.locked == {}


@pytest.mark.parametrize("is_ring", [False, True])
def test_a_device_without_room_for_the_slots_is_one_error_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, is_ring: bool
) -> None:
    """Memory that the plan counted on has gone to somebody else; or the ring in RAM cannot be had."""
    driver, name = Driver(1 << 40), "shared_pages" if is_ring else "bind_slots"
    before = fill_threads()

    def refuse(*arguments: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nand so on")

    monkeypatch.setattr(device_stream if is_ring else weight_stream, name, refuse)
    said = r"less memory than the plan counted on \(CUDA out of memory. Tried to allocate 1 GiB.\); end what else"
    with (
        pytest.raises(PlanError, match=said),
        engine_on(monkeypatch, simulated(0), Pins(driver), "streaming.source=disk"),
    ):
        pass
    assert driver.locked == {}
    assert fill_threads() == before


def test_a_device_that_fails_while_it_generates_is_one_error_and_the_engine_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(1 << 40)
    queues = FailingQueues(random.Random(0), computes_at_once=True, is_dead=True)
    said = "could not be moved to the device: CUDA error: an illegal memory access"
    with engine_on(monkeypatch, queues, Pins(driver), "streaming.source=host") as engine:
        queues.fails_at = queues.calls + 40
        with pytest.raises(StreamingError, match=said):
            engine.generate(IDS, max_new_tokens=20, ignore_eos=True)
    assert driver.locked == {}
