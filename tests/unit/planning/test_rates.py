"""The rate of the way to a device: the device's own times of copies from memory that is locked if it can be."""

import random

import pytest
import torch
from support.fake_cuda import Driver
from support.queues import SimulatedQueues

from graphcore.planning import rates
from graphcore.streaming.device.stream import DeviceLink
from graphcore.streaming.pinned_memory import Pins

CPU = torch.device("cpu")


@pytest.mark.parametrize("quota", [0, 1 << 40, None])
def test_the_link_is_the_best_of_some_copies_and_leaves_nothing_locked(
    monkeypatch: pytest.MonkeyPatch, quota: int | None
) -> None:
    monkeypatch.setattr(rates, "PROBE_NBYTES", 1 << 16)
    driver = Driver(quota or 0)
    queues = SimulatedQueues(random.Random(0))
    found = rates.device_link(DeviceLink(queues, None if quota is None else Pins(driver)), CPU)
    assert len(queues.copied) == rates.COPIES
    assert all(source.nbytes == 1 << 16 for source, _ in queues.copied)
    assert 1 <= (1 << 16) / found < 1000  # simulated seconds
    assert driver.locked == {}
    assert driver.most == (1 << 16 if quota else 0)
