"""Copies come back in order, each as the source was when it was asked for, and none is lost."""

import pytest
import torch
from support.fake_cuda import FakeCuda

from graphcore.engine.batching.device_decode_loop import Readback


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.install(monkeypatch)


def test_copies_come_back_in_the_order_in_which_they_were_asked_for(cuda: FakeCuda) -> None:
    source = torch.zeros(2, 3, dtype=torch.float64)
    readback = Readback(source, 3)
    seen: list[float] = []
    for step in range(11):
        source.fill_(step)
        readback.send()
        if readback.num_waiting == 3:
            seen.append(readback.take()[1][2])
    while readback.num_waiting:
        seen.append(readback.take()[0][0])
    assert seen == [float(step) for step in range(11)]


def test_each_is_waited_for_by_the_mark_behind_its_own_copy(cuda: FakeCuda) -> None:
    readback = Readback(torch.zeros(1), 2)
    readback.send()
    readback.send()
    assert cuda.log == ["event 0 recorded in main", "event 1 recorded in main"]
    readback.take()
    readback.send()
    assert cuda.log[2:] == ["event 0 waited for", "event 0 recorded in main"]


def test_what_nobody_has_read_is_not_overwritten(cuda: FakeCuda) -> None:
    readback = Readback(torch.zeros(1), 2)
    readback.send()
    readback.send()
    with pytest.raises(AssertionError, match="nobody has read"):
        readback.send()
    with pytest.raises(AssertionError, match="nothing was sent"):
        Readback(torch.zeros(1), 2).take()
