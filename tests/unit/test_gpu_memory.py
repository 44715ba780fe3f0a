"""Looking at a GPU's free memory, and fencing it, on a device that is replaced by a count of bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from graphcore.errors import PlanError
from graphcore.gpu_memory import GRAIN, LEAST_BALLAST, FreeMemory, device_fence

GPU = torch.device("cuda", 1)
GIB = 1 << 30


@dataclass
class Device:
    """A GPU's bytes."""

    total: int
    free: int
    held: list[int] = field(default_factory=list)
    cached: int = 0

    def take(self, size: int, dtype: torch.dtype, device: torch.device) -> "Taken":
        assert (dtype, device) == (torch.uint8, GPU)
        if size > self.free:
            raise torch.OutOfMemoryError(f"{size} bytes, {self.free} are free")
        self.free -= size
        return Taken(self, size)

    def empty_cache(self) -> None:
        self.free, self.cached = self.free + self.cached, 0


@dataclass
class Taken:
    device: Device
    nbytes: int

    def __del__(self) -> None:
        self.device.cached += self.nbytes


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device(total=100 * GIB, free=99 * GIB + 12345)

    def info(which: torch.device) -> tuple[int, int]:
        assert which == GPU
        return device.free, device.total

    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda which: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    monkeypatch.setattr(torch, "empty", device.take)
    yield device
    monkeypatch.undo()


def test_the_drop_is_from_the_beginning_to_the_lowest_look(device: Device) -> None:
    device.free = 90 * GIB
    record = FreeMemory.begin(GPU)
    assert (record.context, record.drop) == (10 * GIB, 0)
    device.free = 80 * GIB
    record.look("loaded")
    device.free = 70 * GIB
    record.look()
    device.free = 75 * GIB
    record.look("warm")
    assert record.moments == {"loaded": 80 * GIB, "warm": 75 * GIB}
    assert (record.before, record.lowest, record.drop) == (90 * GIB, 70 * GIB, 20 * GIB)


def test_inside_a_fence_there_is_what_was_asked_for_and_afterwards_all(device: Device) -> None:
    before = device.free
    for nbytes in (0, 14 * GIB, 14 * GIB + 1, 98 * GIB, before - LEAST_BALLAST - GRAIN):
        with device_fence(GPU, nbytes) as free:
            assert free == device.free
            assert nbytes <= free < nbytes + GRAIN
            with pytest.raises(torch.OutOfMemoryError):
                device.take(nbytes + GRAIN, torch.uint8, GPU)
        assert device.free == before


def test_a_fence_that_would_take_little_takes_nothing(device: Device) -> None:
    with device_fence(GPU, device.free - LEAST_BALLAST // 2) as free:
        assert free == device.free == 99 * GIB + 12345


def test_what_torch_keeps_from_before_is_not_left_inside_a_fence(device: Device) -> None:
    device.free, device.cached = 50 * GIB, 40 * GIB
    with device_fence(GPU, GIB):
        device.empty_cache()
        assert device.free < GIB + GRAIN


def test_a_fence_wider_than_what_is_free_is_refused(device: Device) -> None:
    with pytest.raises(PlanError, match=rf"{99 * GIB + 12345} of {100 * GIB} are"), device_fence(GPU, 100 * GIB):
        pass


def test_a_fence_falls_when_an_error_comes_out_of_it(device: Device) -> None:
    before = device.free
    with pytest.raises(KeyboardInterrupt), device_fence(GPU, GIB):
        raise KeyboardInterrupt
    assert device.free == before
