"""What a streamed run held, as bench says it."""

import gc
from types import SimpleNamespace

import torch

from graphcore.device import return_freed_memory
from graphcore.host_pages import shared_pages
from graphcore.tasks.report.stream_watch import StreamWatch
from graphcore.weights.plan import OtherMemory

MB = 10**6


def test_read_buffers_that_are_planned_are_not_counted_again_when_they_are_first_written_to() -> None:
    plan = SimpleNamespace(total_nbytes=100 * MB, other=OtherMemory(10 * MB), budget=110 * MB)
    runner, loaded = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(free_memory=None)
    engine = SimpleNamespace(plan=plan, loaded=loaded, runner=runner)
    gc.collect()  # what earlier tests have left would go while this one measures
    return_freed_memory()
    watch = StreamWatch.begin(engine)
    pages = shared_pages(64 * MB).fill_(1)
    held = watch.device().peak_nbytes
    assert held is not None
    assert 90 * MB <= held < 90 * MB + 32 * MB  # what else a test process grows by stays far below the pages
    grown = torch.ones(64 * MB, dtype=torch.uint8)
    held = watch.device().peak_nbytes
    assert held is not None
    assert held > 90 * MB + 32 * MB, "what is not planned counts"
    assert len(pages) == len(grown)
