"""The GPU suite runs from end to end on the CPU, with tiny shapes, so that it is no stranger when a GPU is there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from suite.machine import ram_in_words
from suite.registry import ALL

pytestmark = pytest.mark.slow  # rehearsed before a GPU is used (docs/gpu_suite.md)

ROOT = Path(__file__).parents[2]
SUITE = ROOT / "benchmarks" / "gpu_suite.py"
# pytest finds the tests that need a GPU in each run of all tests; test_models would only let it find them once more.
# Two of the parts about slowdown differ from the third in sizes that a dry run makes tiny.
LEFT_OUT = ("test_models", "slowdown_30b", "slowdown_70b")
PARTS = [part.name for part in ALL if not (part.needs_gpu or part.name in LEFT_OUT)]
# Every row of the table of targets, by words of its name and of its target.
TARGETS = (
    ("decode_8b_bf16", "decode", "85% of copy"),
    ("decode_8b_q8_0", "decode", "80% of copy"),
    ("decode_8b_q4_k", "decode", "70% of copy"),
    ("decode_gpt_oss", "decode", "60% of copy"),
    ("decode_bitnet", "decode", "500 tokens/s or 50 % of copy"),
    ("peers_8b", "over transformers", "1.3 x"),
    ("decode_8b_bf16", "prefill", "60% of gemm"),
    ("stream_8b", "streaming=on: decode", "92 % of h2d"),
    ("stream_8b", "resident's bits", "logits and tokens are the same bits"),
    ("stream_8b", "streaming=auto", "1.8 x streaming=on"),
    ("fenced_70b_q4_k", "decode", "runs; 90 % of h2d"),
    ("fenced_70b_i2_s", "decode", "runs; 90 % of h2d"),
    ("overlap", "prefill", "link busy 92 %"),
    ("overlap", "batch", "link busy 92 %"),
    ("host", "host time", "under 100 us"),
    ("host", "compile and capture", "under 15 s"),
    ("start", "first token, warm", "under 30 s"),
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("suite")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SUITE), "--out", str(folder), "--dry-run", "--parts", ",".join(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    log = (folder / "suite.log").read_text(encoding="utf-8")
    assert done.returncode == 0, done.stderr + log[-6000:]
    text = (folder / "report.md").read_text(encoding="utf-8")
    assert "Dry run" in text
    return {**json.loads((folder / "report.json").read_text(encoding="utf-8")), "text": text}


def test_every_part_comes_to_its_end_and_the_report_is_marked(report: dict) -> None:
    assert report["dry"]
    assert {line["outcome"] for line in report["outcomes"]} == {"ok"}
    assert [line["part"] for line in report["outcomes"]] == PARTS
    assert sorted([*report["not_run"], *PARTS]) == sorted(part.name for part in ALL)


def test_what_the_machine_has_stands_at_the_head_of_the_report(report: dict) -> None:
    (machine,) = report["machines"]
    assert machine["ram"]["machine"] >= machine["ram"]["free"] > 0
    assert report["measurements"][0]["measurement"]["name"] == "RAM that is free for this process"
    assert ram_in_words(machine["ram"]) in report["text"]


@pytest.mark.parametrize(("part", "words", "target"), TARGETS)
def test_every_target_has_its_row(report: dict, part: str, words: str, target: str) -> None:
    rows = [line["measurement"] for line in report["measurements"] if line["part"] == part]
    found = [row for row in rows if words in row["name"] and row["target"].startswith(target)]
    assert found, [(row["name"], row["target"]) for row in rows]
    assert [row["met"] for row in found] == [is_met(row, report) for row in found]


def is_met(row: dict, report: dict) -> bool:
    """Return whether the row's own numbers reach the target that it names, by the words of the target."""
    target, median = row["target"], row["spread"]["median"]
    if busy := re.match(r"link busy (\d+) %", target):
        return row["details"]["link_busy"] >= int(busy[1]) / 100
    if share := re.search(r"(\d+) ?% of (\w+)", target):
        assert row["ceiling"] == share[2]
        is_share = row["share"] >= int(share[1]) / 100
        return is_share or (target.startswith("500 tokens/s") and median >= 500)
    if times := re.match(r"([\d.]+) x streaming=on", target):
        rows = [line["measurement"] for line in report["measurements"] if line["part"] == "stream_8b"]
        (on,) = {one["spread"]["median"] for one in rows if "streaming=on: decode" in one["name"]}
        return median >= float(times[1]) * on
    if times := re.match(r"([\d.]+) x", target):
        return median >= float(times[1])
    if most := re.match(r"under (\d+) (us|s)", target):
        assert row["unit"] == most[2]
        return median < int(most[1])
    assert target == "logits and tokens are the same bits"
    return row["values"] == [1.0]


def test_streamed_is_resident_to_the_bit_here_too(report: dict) -> None:
    rows = [line["measurement"] for line in report["measurements"] if "resident's bits" in line["measurement"]["name"]]
    assert len(rows) == 2
    assert all(row["met"] for row in rows)


def test_every_speed_says_what_takes_the_rest(report: dict) -> None:
    rows = [line["measurement"] for line in report["measurements"]]
    speeds = [row for row in rows if row["unit"] == "tokens/s" and row["target"] and row["ceiling"] != ""]
    assert speeds
    assert all(row["profile"] for row in speeds)


def test_no_number_of_a_dry_run_is_published() -> None:
    pages = [ROOT / "docs" / "numbers.md", *(ROOT / "docs" / "lab").glob("*.md")]
    assert len(pages) > 1
    assert not [page.name for page in pages if "Dry run: tiny shapes" in page.read_text(encoding="utf-8")]
