"""Measurements outlive the process that made them, and a report can be made of whatever is there."""

import json
from pathlib import Path

import pytest
from suite.log import FILE_NAME, Log, Measurement, read_lines
from suite.registry import ALL
from suite.report import DRY, summarise, write_report

pytestmark = pytest.mark.thorough


def test_a_measurement_is_on_the_disk_at_once_with_its_spread(tmp_path: Path) -> None:
    row = Measurement("decode", "tokens/s", [90.0, 100.0, 104.0], 4.0).of_ceiling("copy", 5.0, 4.0)
    Log(tmp_path, "run", False, "ceilings").add(row.aim("70 % of copy", (row.share or 0) >= 0.7))
    (line,) = read_lines(tmp_path)
    found = line["measurement"]
    assert found["spread"] == {"median": 100.0, "min": 90.0, "max": 104.0, "repeats": 3}
    assert (found["share"], found["met"], line["part"], line["dry"]) == (0.8, True, "ceilings", False)


def test_a_line_that_a_killed_process_left_half_written_is_left_out(tmp_path: Path) -> None:
    log = Log(tmp_path, "run", False, "ceilings")
    log.add(Measurement("one", "s", [1.0]))
    with (tmp_path / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write('{"run": "run", "part": "cei')
    assert [line["measurement"]["name"] for line in read_lines(tmp_path)] == ["one"]
    assert read_lines(tmp_path / "nothing") == []


def test_a_later_line_of_a_row_takes_the_earlier_ones_place(tmp_path: Path) -> None:
    log = Log(tmp_path, "run", False, "ceilings")
    row = Measurement("one", "s", [1.0])
    log.add(row)
    row.profile = "a kernel 90 %"
    log.add(row)
    (found,) = summarise(read_lines(tmp_path))["measurements"]
    assert found["measurement"]["profile"] == "a kernel 90 %"


def test_runs_merge_into_one_report_that_says_what_was_not_run(tmp_path: Path) -> None:
    names = [part.name for part in ALL]
    for run, name in enumerate(names[:2]):
        folder = tmp_path / str(run)
        folder.mkdir()
        log = Log(folder, str(run), False, name)
        log.write({"command": f"run {run}", "commit": "abc"})
        log.add(Measurement(f"row of {name}", "GB/s", [1.0], target="1.3 x", met=False))
        log.write({"outcome": "ok" if run else "killed after 460 s", "seconds": 1.0})
    lines = [line for run in range(2) for line in read_lines(tmp_path / str(run))]
    report = write_report(lines, tmp_path)
    assert report["not_run"] == names[2:]
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for words in ("killed after 460 s", f"row of {names[0]}", f"row of {names[1]}", "| 1.3 x | no |", "`run 1`"):
        assert words in text
    assert DRY not in text


def test_a_report_with_a_dry_line_in_it_says_so(tmp_path: Path) -> None:
    Log(tmp_path, "run", True, "ceilings").add(Measurement("one", "s", [1.0]))
    write_report(read_lines(tmp_path), tmp_path)
    assert DRY in (tmp_path / "report.md").read_text(encoding="utf-8")
