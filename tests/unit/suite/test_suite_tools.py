"""NVIDIA's tools: where they are looked for, and how what they print becomes rows."""

import subprocess
import sys
from pathlib import Path

import pytest
from suite import tools
from suite.bench import Bench
from suite.correctness import own_environment
from suite.log import Log, read_lines
from suite.tools import METRICS, check_row, find_tool, kernel_row, kernels_of, last_words, step_command

pytestmark = pytest.mark.thorough

# As Nsight Compute prints it: --csv --page raw.
NCU = """==PROF== Connected to process 12
==PROF== Profiling "_dense_product" - 0: 0%....50%....100% - 1 pass
one step ran
==PROF== Disconnected from process 12
"ID","Process ID","Kernel Name","Block Size","Grid Size",METRICS
"","","","","","us","%","%","register/thread","%"
"0","12","_dense_product","(32, 1, 1)","(6,144, 1, 1)","18.40","84.51","21.90","40","71.25"
"1","12","_attend_splits","(128, 1, 1)","(33, 8, 1)","4.10","12.00","9.00","168","12.00"
""".replace("METRICS", ",".join(f'"{name}"' for name in METRICS))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, Log(tmp_path, "run", False, "ncu"), False)


def test_a_tool_is_found_in_path_in_cudas_folders_and_in_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert find_tool("ncu", [tmp_path]) is None
    for place in ("cuda/bin/ncu", "wheels/cu13/bin/ncu", "path/ncu"):
        path = tmp_path / place
        path.parent.mkdir(parents=True)
        path.touch()
        assert find_tool("ncu", [tmp_path / place.split("/")[0]]) is None, "it cannot be run"
        path.chmod(0o755)
        assert find_tool("ncu", [tmp_path / place.split("/")[0]]) == str(path)


@pytest.mark.parametrize("part", [tools.ncu, tools.sanitizer])
def test_a_tool_that_is_not_there_leaves_a_line_with_the_reason(
    part, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "find_tool", lambda name: None)
    part(bench)
    (row,) = [line["measurement"] for line in read_lines(bench.folder)]
    assert "is not there: not in PATH" in row["note"]


def test_kernels_of_ncu_become_rows_with_their_numbers() -> None:
    rows = [kernel_row("llama3_8b random:bf16", number, kernel) for number, kernel in enumerate(kernels_of(NCU), 1)]
    assert [row.name for row in rows] == [
        "ncu, llama3_8b random:bf16: 1 _dense_product (6,144, 1, 1)",
        "ncu, llama3_8b random:bf16: 2 _attend_splits (33, 8, 1)",
    ]
    assert [row.values for row in rows] == [[18.4], [4.1]]
    assert rows[0].note == "DRAM % 84.51, issue % 21.9, registers 40, occupancy % 71.25"
    assert [row.details["registers"] for row in rows] == [40, 168]


def test_ncu_without_permission_leaves_a_line_that_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    program = bench.folder / "ncu"
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    program.write_text(f"#!{sys.executable}\nprint('one step ran'); print({said!r})\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(tools, "find_tool", lambda name: str(program))
    tools.ncu(bench)
    notes = [line["measurement"]["note"] for line in read_lines(bench.folder)]
    assert notes == [said, said]


@pytest.mark.parametrize(
    ("text", "unit", "value", "met"),
    [
        ("one step ran\n========= ERROR SUMMARY: 0 errors\n", "errors", 0.0, True),
        ("========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n", "errors", 3.0, False),
        ("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", "errors", 2.0, False),
        ("========= Error: Device not supported\n", "came to its end", 0.0, None),
    ],
)
def test_a_check_is_met_by_a_summary_without_errors(text: str, unit: str, value: float, met: bool | None) -> None:
    row = check_row("memcheck", text)
    assert (row.unit, row.values, row.met) == (unit, [value], met)


def test_a_tool_that_takes_too_long_is_killed_and_its_words_are_kept() -> None:
    code = "import time; print('at the first kernel', flush=True); time.sleep(60)"
    text = tools.said_by([sys.executable, "-c", code], 2)
    assert "at the first kernel" in text
    assert last_words(text) == "killed after 2 s"


def test_the_step_that_tools_look_at_runs(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Log(tmp_path, "run", True, "ncu"), True)
    command = step_command(bench, "tiny", tools.PROFILED[1])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=own_environment())
    assert done.stdout == "one step ran\n", done.stderr
