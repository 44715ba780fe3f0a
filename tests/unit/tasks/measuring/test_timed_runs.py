"""Spread, memory and kernel counts, against numpy, known sizes and hand counts."""

import numpy as np
import pytest
import torch

from graphcore.tasks.measuring.process_memory import PeakMemory
from graphcore.tasks.measuring.timed_runs import Spread, count_kernels, time_repeats

CPU = torch.device("cpu")


@pytest.mark.parametrize("values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 2.0, 3.0], [1.0, 1.0, 9.0, 2.0]])
def test_the_spread_is_numpys(values: list[float]) -> None:
    spread = Spread.of(values)
    expected = np.percentile(values, [50, 0, 25, 75, 100])
    assert [spread.median, spread.min, spread.q1, spread.q3, spread.max] == pytest.approx(expected.tolist())


def test_every_repeat_is_timed_and_nothing_else() -> None:
    calls: list[int] = []
    seconds = time_repeats(lambda: calls.append(1), 4, CPU)
    assert len(seconds) == len(calls) == 4
    assert all(0 <= each < 0.5 for each in seconds)


def test_peak_memory_sees_what_was_taken_and_given_back() -> None:
    peak = PeakMemory(CPU)
    nbytes = 256 << 20
    held = torch.ones(nbytes, dtype=torch.uint8)
    del held
    assert 0.9 * nbytes < peak.nbytes() < 3 * nbytes


def test_views_and_allocations_are_no_kernels() -> None:
    x, weight = torch.rand(4, 6), torch.rand(5, 6)

    def work() -> None:
        y = torch.nn.functional.linear(x, weight)  # 1
        y = y.view(2, 10).transpose(0, 1).unsqueeze(0)
        y = y + 1  # 2
        y.to(torch.bfloat16)  # 3: a cast moves bytes
        y.to(torch.float32)  # no cast, no kernel
        torch.empty(3)

    assert count_kernels(work, CPU) == 3


def test_counting_leaves_standard_error_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    import os

    count_kernels(lambda: torch.ones(3), CPU)
    os.write(2, b"still here\n")
    assert capfd.readouterr().err == "still here\n"
