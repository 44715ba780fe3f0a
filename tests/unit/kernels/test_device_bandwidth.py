"""How a GPU's memory is timed: by events around each run, the fastest of which counts. No GPU is proved by this."""

import pytest
import torch

from graphcore.kernels.bandwidth import DEVICE_NBYTES, WARM_RUNS, fastest_seconds, measure_device_bandwidth

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the milliseconds of the runs to come; the last goes on for ever."""
    milliseconds: list[float] = [1.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.is_recorded = self.is_over = False

        def record(self) -> None:
            self.is_recorded = True

        def synchronize(self) -> None:
            assert self.is_recorded
            self.is_over = True

        def elapsed_time(self, other: "Event") -> float:
            assert other.is_over
            return milliseconds.pop(0) if len(milliseconds) > 1 else milliseconds[0]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return milliseconds


def test_the_fastest_run_counts_and_the_first_ones_do_not(clock: list[float]) -> None:
    clock[:] = [0.1] * WARM_RUNS + [5.0, 3.0, 4.0]
    runs: list[int] = []
    assert fastest_seconds(lambda: runs.append(1), 3) == pytest.approx(3e-3)
    assert len(runs) == WARM_RUNS + 3


def test_a_copy_counts_what_it_reads_and_what_it_writes(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 20, 16 << 20))
    found = measure_device_bandwidth(CPU, repeats=2)
    assert found.nbytes == 2 << 20  # a quarter of what is free
    assert found.read == pytest.approx((2 << 20) / 1e-3)
    assert found.copied == pytest.approx(2 * found.read)
    assert measure_device_bandwidth(CPU, nbytes=1 << 20, repeats=1).nbytes == 1 << 20
    assert DEVICE_NBYTES > 1e9  # the largest caches have a tenth of that
