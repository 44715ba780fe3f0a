"""What progress says, against numbers worked out by hand."""

import pytest
from clock import Clock

from graphcore.tasks.report.progress_text import WINDOW, Pace, ProgressText, clock_time


def test_loading_says_how_fast_bytes_come_and_how_long_the_rest_takes() -> None:
    clock = Clock()
    words = ProgressText(clock)
    assert words.take("load", 0, 500_000_000, 2_500_000_000) == "load 0.47/2.33 GiB, group 1"
    clock.now += 2.0
    assert words.take("load", 1, 1_500_000_000, 2_500_000_000) == "load 1.40/2.33 GiB, group 2, 476.8 MiB/s, ETA 0:02"
    clock.now += 2.0
    assert words.take("load", 2, 2_500_000_000, 2_500_000_000) == "load 2.33/2.33 GiB, group 3, 476.8 MiB/s"


def test_a_streamed_token_counts_by_the_bytes_that_have_moved_of_it() -> None:
    clock = Clock()
    words = ProgressText(clock)
    words.expect_groups([0, 1_000_000_000, 2_000_000_000, 1_000_000_000])  # 4 GB for each token
    assert words.take("generate", None, 1, 5) == "token 1/5"
    assert words.take("generate", 0, 1, 5) == "token 1/5, group 1/4"
    clock.now += 1.5
    # 3 GB in 1.5 s: 3/4 of a token of 4 that are left
    assert words.take("generate", 3, 1, 5) == "token 1/5, group 4/4, 1.86 GiB/s, ETA 0:06"
    clock.now += 0.5
    assert words.take("generate", None, 2, 5) == "token 2/5, 1.86 GiB/s, ETA 0:06"
    assert words.take("generate", 2, 2, 5) == "token 2/5, group 3/4, 2.33 GiB/s, ETA 0:04"


def test_prefill_tells_the_links_speed_over_several_passes() -> None:
    clock = Clock()
    words = ProgressText(clock)
    words.expect_groups([1_000_000_000, 1_000_000_000])
    assert words.take("prefill", 0, 0, 1000) == "prompt token 0/1000, group 1/2"
    clock.now += 4.0
    assert words.take("prefill", None, 512, 1000) == "prompt token 512/1000, 476.8 MiB/s, ETA 0:04"
    clock.now += 2.0
    assert words.take("prefill", 1, 512, 1000) == "prompt token 512/1000, group 2/2, 476.8 MiB/s, ETA 0:06"


def test_resident_tokens_have_neither_group_nor_link() -> None:
    clock = Clock()
    words = ProgressText(clock)
    words.take("generate", None, 1, 100)
    clock.now += 1.0
    assert words.take("generate", None, 5, 100) == "token 5/100, ETA 0:24"


def test_another_run_begins_anew() -> None:
    clock = Clock()
    words = ProgressText(clock)
    words.take("generate", None, 1, 8)
    clock.now += 1.0
    words.take("generate", None, 8, 8)
    clock.now += 60.0
    assert words.take("generate", None, 1, 8) == "token 1/8"
    clock.now += 1.0
    assert words.take("generate", None, 2, 8) == "token 2/8, ETA 0:06"


def test_speed_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    for second in range(101):
        pace.add(second, second)
    for second in range(101, 101 + int(WINDOW)):
        pace.add(second, 100 + 3 * (second - 100))
    assert pace.rate == pytest.approx(3.0)


def test_what_stands_still_has_no_speed() -> None:
    pace = Pace()
    assert pace.rate is None
    pace.add(1.0, 5.0)
    pace.add(2.0, 5.0)
    assert pace.rate is None


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (41.4, "0:41"), (59.6, "1:00"), (3723, "1:02:03")])
def test_time_is_minutes_and_seconds_and_hours_where_there_are_some(seconds: float, shown: str) -> None:
    assert clock_time(seconds) == shown


def test_a_download_says_how_much_how_fast_and_how_long_while_its_files_become_known() -> None:
    clock = Clock()
    words = ProgressText(clock)
    assert words.take("download", None, 0, 0) == "downloading"
    clock.now += 1.0
    assert words.take("download", None, 3_145_728, 0) == "downloading 3.00 MiB, 3.00 MiB/s"
    clock.now += 1.0
    assert words.take("download", None, 6_291_456, 10_485_760) == "downloading 6.00/10.00 MiB, 3.00 MiB/s, ETA 0:01"
    clock.now += 1.0
    assert words.take("download", None, 9_437_184, 31_457_280) == "downloading 9.00/30.00 MiB, 3.00 MiB/s, ETA 0:07"


@pytest.mark.parametrize(
    ("stage", "done", "total", "shown"),
    [
        ("download 2 of 4", 1 << 20, 1 << 22, "downloading 2 of 4: 1.00/4.00 MiB"),
        ("compile block0_decode_1", 1, 0, "compiling graph block0_decode_1"),
        ("build kernels", 2, 6, "building kernels 2/6"),
        ("pack", 3, 300_000_000, "pack 3/300000000"),  # tensors, however many
        ("wait", 0, 1, "waiting for another process that fetches the same 0/1"),
    ],
)
def test_each_stage_is_said_in_words(stage: str, done: int, total: int, shown: str) -> None:
    assert ProgressText(Clock()).take(stage, None, done, total) == shown
