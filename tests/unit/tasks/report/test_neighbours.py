"""What neighbours took: a share of the threads' time, and a line where it is worth one."""

import pytest

from graphcore.tasks.report import result_json
from graphcore.tasks.report.result_json import ProcessorWait, neighbours_line


@pytest.mark.parametrize(
    ("before", "after", "threads", "queued", "share"),
    [
        (1.0, 4.0, 2, 3.0, 0.15),
        (1.0, 4.0, None, 3.0, None),
        (None, None, 2, None, None),
        (4.0, 1.0, 2, 0.0, 0.0),  # a thread has ended, and its waiting with it
    ],
)
def test_the_share_is_of_the_time_of_all_threads(
    monkeypatch: pytest.MonkeyPatch,
    before: float | None,
    after: float | None,
    threads: int | None,
    queued: float | None,
    share: float | None,
) -> None:
    monkeypatch.setattr(result_json, "seconds_queued", lambda: after)
    monkeypatch.setattr(result_json.time, "perf_counter", lambda: 10.0)
    record = ProcessorWait(began=0.0, queued=before).record(threads)
    assert record == {"queued_seconds": queued, "queued_share": share}


@pytest.mark.parametrize(("share", "says"), [(None, False), (0.05, False), (0.43, True)])
def test_a_line_is_said_where_much_was_lost(share: float | None, says: bool) -> None:
    line = neighbours_line({"queued_seconds": 1.0, "queued_share": share})
    assert (line is not None) == says
    assert line is None or "43 %" in line or "43%" in line
