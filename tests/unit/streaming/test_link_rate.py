"""A measurement moves as many of the first jobs as its limit holds, and one even if that is larger."""

import pytest
import torch
from byte_conversions import FILE, conversion
from support.fake_sources import FakeSource, numbered_bytes

from graphcore.streaming.fill_jobs import file_jobs
from graphcore.streaming.link_rate import measure_jobs


@pytest.mark.parametrize(("limit", "moved"), [(2500, 2000), (3000, 3000), (10, 1000), (9000, 4000)])
def test_jobs_are_measured_up_to_a_limit_of_bytes(limit: int, moved: int) -> None:
    content, out = numbered_bytes(1 << 14), torch.zeros(4000, dtype=torch.uint8)
    jobs = [job for at in range(0, 4000, 1000) for job in file_jobs([conversion(at, 1000, out=out[at : at + 1000])])]
    rate = measure_jobs(jobs, {FILE: FakeSource(FILE, content)}, 2, limit)
    assert rate.nbytes == moved
    assert rate.bytes_per_second > 0
    assert rate.processors > 0
    assert torch.equal(out[:moved], content[:moved])
    assert not out[moved:].any()
