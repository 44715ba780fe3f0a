"""The summary of a sweep has every job, and a picture where there are speeds."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from graphcore.cli.sweep.summary import SweepRow, as_csv, as_markdown, labels, write_summary

BENCH = {
    "status": "ok",
    "error": None,
    "graph": {"kind": "eager"},
    "dtype": "float32",
    "prefill": {"tokens_per_second": 1234.567},
    "decode": {"tokens_per_second": 50.0},
}
GENERATED = {
    **{key: BENCH[key] for key in ("status", "error", "graph", "dtype")},
    "timings": {"prefill_tokens_per_second": 10.0, "decode_tokens_per_second": 0.0},
}
SCORED = {
    **{key: BENCH[key] for key in ("status", "error", "graph", "dtype")},
    "path": "decode",
    "tokens_per_second": 7.0,
    "perplexity": 15.234,
}
FAILED = {"status": "failed", "error": "PlanError: a | b,\nc"}


def rows() -> list[SweepRow]:
    return [
        SweepRow.of(["task=bench", "dtype=fp32"], 3.14159, BENCH),
        SweepRow.of(["task=bench", "dtype=bf16"], 1.0, FAILED),
        SweepRow.of(["task=bench", "dtype=fp16"], 2.0, GENERATED),
    ]


def test_csv_reads_back_with_every_job() -> None:
    header, *lines = csv.reader(io.StringIO(as_csv(rows())))
    assert header == [
        "overrides",
        "status",
        "prefill tokens/s",
        "decode tokens/s",
        "perplexity",
        "graph",
        "dtype",
        "seconds",
        "error",
    ]
    assert lines == [
        ["task=bench dtype=fp32", "ok", "1234.57", "50.00", "", "eager", "float32", "3.14", ""],
        ["task=bench dtype=bf16", "failed", "", "", "", "", "", "1.00", "PlanError: a | b,\nc"],
        ["task=bench dtype=fp16", "ok", "10.00", "", "", "eager", "float32", "2.00", ""],
    ]


def test_markdown_is_one_row_a_job_whatever_an_error_holds() -> None:
    above, blank, *lines = as_markdown(rows()).splitlines()
    assert (above, blank) == ("All 3 jobs: task=bench", "")
    assert len(lines) == 2 + 3
    assert {line.replace("\\|", "").count("|") for line in lines} == {9}
    assert "PlanError: a \\| b, c" in lines[3]


def test_markdown_states_once_what_all_jobs_share_and_shows_what_varies() -> None:
    same = [SweepRow.of(["model=gpt2", "task=bench", f"seed={seed}"], float(seed), BENCH) for seed in (1, 2)]
    assert as_markdown(same).splitlines() == [
        "All 2 jobs: model=gpt2 task=bench; status ok; graph eager; dtype float32",
        "",
        "| overrides | prefill tokens/s | decode tokens/s | seconds |",
        "| --- | --- | --- | --- |",
        "| seed=1 | 1234.57 | 50.00 | 1.00 |",
        "| seed=2 | 1234.57 | 50.00 | 2.00 |",
    ]


def test_markdown_of_a_single_job_and_of_jobs_that_all_failed_shows_their_errors() -> None:
    (_, _, row) = as_markdown(rows()[1:2]).splitlines()
    assert row == "| task=bench dtype=bf16 | failed | 1.00 | PlanError: a \\| b, c |"
    failed = [SweepRow.of([f"dtype={dtype}"], 1.0, FAILED) for dtype in ("bf16", "fp16")]
    assert as_markdown(failed).splitlines()[0] == "All 2 jobs: status failed; error PlanError: a \\| b, c"


def test_a_perplexity_stands_beside_the_speed_of_the_path_it_took() -> None:
    row = SweepRow.of(["task=perplexity"], 1.0, SCORED)
    assert (row.prefill, row.decode, row.perplexity) == (None, 7.0, 15.234)
    assert row.cells()[2:5] == ["", "7.00", "15.23"]


def test_labels_leave_out_what_all_jobs_share() -> None:
    assert labels(rows()) == ["dtype=fp32", "dtype=bf16", "dtype=fp16"]
    assert labels(rows()[:1]) == ["task=bench dtype=fp32"]


def test_the_picture_has_a_bar_for_each_speed(tmp_path: Path) -> None:
    from matplotlib.image import imread

    write_summary(tmp_path, rows())
    picture = imread(tmp_path / "summary.png")[:, :, :3]
    blue = np.abs(picture - np.array([0x3B, 0x6E, 0xA8]) / 255).max(axis=2) < 0.02
    runs = np.diff(np.r_[0, blue[:, blue.any(axis=0)].any(axis=1).astype(int)])
    assert (runs == 1).sum() == 2  # bars of the first and the last job, none between
    assert picture.mean() > 0.6  # on white


def test_without_speeds_there_is_no_picture(tmp_path: Path) -> None:
    write_summary(tmp_path, [SweepRow.of(["a=1"], 1.0, FAILED)])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["summary.csv", "summary.md"]


@pytest.mark.filterwarnings("error")
def test_odd_characters_in_overrides_do_not_break_the_picture(tmp_path: Path) -> None:
    odd = [SweepRow.of(["prompt='$x^2$ 語😀 \\frac'", "dtype=fp32" * 20], 1.0, BENCH)]
    write_summary(tmp_path, odd)
    assert (tmp_path / "summary.png").stat().st_size > 1000
