"""The suite's command: what a budget leaves out, what names it knows, and merged reports."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from gpu_suite import __file__ as COMMAND
from suite.log import Log, Measurement, read_lines
from suite.registry import ALL, CALLS
from suite.wheels import fetch_commands

pytestmark = pytest.mark.thorough

SUITE = Path(COMMAND)


def run_suite(*arguments: object, expect: int = 0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(SUITE), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == expect, done.stderr
    return done


def test_parts_that_do_not_fit_are_not_started_and_the_report_says_so(tmp_path: Path) -> None:
    run_suite("--out", tmp_path, "--budget-minutes", 0.3, "--parts", "host,ceilings", "--commit", "abc", expect=1)
    outcomes = {line["part"]: line["outcome"] for line in read_lines(tmp_path) if "outcome" in line}
    assert outcomes.keys() == {"host", "ceilings"}
    assert all(outcome.startswith("not started: about") for outcome in outcomes.values())
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["runs"][0]["commit"] == "abc"
    assert "--budget-minutes 0.3" in report["runs"][0]["command"]


def test_a_part_that_does_not_exist_is_refused_with_those_that_do(tmp_path: Path) -> None:
    done = run_suite("--out", tmp_path, "--parts", "hots", expect=2)
    assert "no part is called hots" in done.stderr
    assert "host" in done.stderr


def test_a_dry_run_of_parts_that_need_a_gpu_is_refused(tmp_path: Path) -> None:
    done = run_suite("--out", tmp_path, "--dry-run", "--parts", "test_kernels", expect=2)
    assert "each of these parts needs a GPU" in done.stderr


def test_the_list_names_every_part_with_its_estimate_and_its_call() -> None:
    lines = run_suite("--list").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [part.name for part in ALL]
    assert all("about" in line for line in lines)
    assert "call 5" in next(line for line in lines if line.startswith("host"))


def test_a_call_that_is_repeated_leaves_out_what_ended_well(tmp_path: Path) -> None:
    names = CALLS[3]
    for name in names[1:]:
        Log(tmp_path, "first", True, name).write({"outcome": "ok", "seconds": 1.0})
    Log(tmp_path, "first", True, names[0]).write({"outcome": "killed after 100 s"})
    assert chosen(tmp_path, "--dry-run") == [names[0]]
    assert chosen(tmp_path, "--dry-run", "--again") == list(names)
    assert chosen(tmp_path) == list(names), "what a dry run did well was not measured"


def test_a_folder_beside_is_the_same_for_parts_that_run_elsewhere(tmp_path: Path) -> None:
    code = "import sys; sys.path.insert(0, sys.argv.pop()); import gpu_suite; print(gpu_suite.parse_options().out)"
    command = [sys.executable, "-c", code, "--out", "beside", str(SUITE.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "beside")


def chosen(folder: Path, *more: str) -> list[str]:
    code = "import sys; import gpu_suite; print(*gpu_suite.chosen_names(gpu_suite.parse_options()))"
    command = [sys.executable, "-c", code, "--out", str(folder), "--call", "3", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SUITE.parent)
    return done.stdout.split()


def test_a_call_has_five_minutes_and_starts_nothing_that_does_not_fit(tmp_path: Path) -> None:
    run_suite("--out", tmp_path, "--call", 1, "--budget-minutes", 0.2, expect=1)
    outcomes = {line["part"]: line["outcome"] for line in read_lines(tmp_path) if "outcome" in line}
    assert list(outcomes) == list(CALLS[1])
    assert all(outcome.startswith("not started") for outcome in outcomes.values())


def test_wheels_are_installed_without_an_index_and_parts_import_from_them(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    name, info = f"suitewheel{time.time_ns()}", "suitewheel-1.0.dist-info"
    with zipfile.ZipFile(wheels / "suitewheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "WORD = 'from the wheel'\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: suitewheel\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    prepare = f"import gpu_suite, pathlib; gpu_suite.prepare_path(pathlib.Path({str(wheels)!r}))"
    child = f"import {name}, graphcore; print({name}.WORD, graphcore.__version__)"
    code = f"{prepare}; import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True, cwd='/')"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SUITE.parent, env=environment)
    assert done.stdout.split("\n")[0].startswith("from the wheel 0."), done.stderr


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    done = run_suite("--out", tmp_path / "out", "--call", 1, "--wheels", tmp_path, expect=2)
    assert "has no wheels; --fetch-wheels puts them there" in done.stderr


def test_wheels_are_fetched_for_the_other_machine_and_need_nothing_besides(tmp_path: Path) -> None:
    build, download = fetch_commands(tmp_path, "3.12")
    assert "--python-version=3.12" in download
    assert {"--no-deps", "--only-binary=:all:"} <= set(download)
    assert any(word.startswith("antlr4-python3-runtime==") for word in build), "it has no wheel of its own"


def test_folders_merge_into_one_report(tmp_path: Path) -> None:
    for name in ("ceilings", "host"):
        (tmp_path / name).mkdir()
        Log(tmp_path / name, name, False, name).add(Measurement(f"row of {name}", "s", [1.0]))
    run_suite("--out", tmp_path / "both", "--merge", tmp_path / "ceilings", tmp_path / "host")
    text = (tmp_path / "both" / "report.md").read_text(encoding="utf-8")
    assert "row of ceilings" in text
    assert "row of host" in text


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_of_two_runs_of_one_row_the_later_folder_counts(order: tuple[str, str], tmp_path: Path) -> None:
    for value, name in enumerate(("a", "b")):
        (tmp_path / name).mkdir()
        Log(tmp_path / name, name, False, "host").add(Measurement("row", "s", [float(value)]))
    run_suite("--out", tmp_path / "both", "--merge", *(tmp_path / name for name in order))
    report = json.loads((tmp_path / "both" / "report.json").read_text(encoding="utf-8"))
    assert report["measurements"][0]["measurement"]["spread"]["median"] == float(order[1] == "b")


def test_a_folder_without_measurements_is_not_merged(tmp_path: Path) -> None:
    done = run_suite("--out", tmp_path / "both", "--merge", tmp_path / "nothing", expect=2)
    assert "no measurements.jsonl in" in done.stderr


def test_a_folder_that_cannot_be_written_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_suite("--out", tmp_path / "file", "--parts", "host", "--budget-minutes", 0, expect=2)
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_suite_takes_its_part_with_it_and_writes_the_report(ending: int, tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE), "--out", str(tmp_path), "--dry-run", "--parts", "start"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        for _ in range(1000):
            if any("machine" in line for line in read_lines(tmp_path)):  # the part's process has begun
                break
            time.sleep(0.02)
        part = part_of(process.pid)
        process.send_signal(ending)
        assert process.wait(timeout=20) == 130
    assert not Path(f"/proc/{part}").exists()
    assert (tmp_path / "report.json").exists()


def part_of(process_id: int) -> int:
    """Return the one child of a process."""
    return int(Path(f"/proc/{process_id}/task/{process_id}/children").read_text(encoding="ascii").split()[0])


def test_without_a_gpu_no_part_is_ok(tmp_path: Path) -> None:
    command = [sys.executable, str(SUITE), "--out", str(tmp_path), "--parts", "test_models"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert "no CUDA device; --dry-run" in done.stderr
