"""Damaged files load, or are refused in one line of graphcore's own; 400 of each kind, the same ones each time.

`python benchmarks/fuzz_files.py --cases 2000` reads more of them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
CASES = 400
FEWER = {"template_process": 40, "kept_tokenizer": 8}  # slow ones


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, int]]]:
    """Counts and findings of each kind."""
    path = tmp_path_factory.mktemp("fuzz") / "records.json"
    command = [sys.executable, "benchmarks/fuzz_files.py", "--cases", str(CASES), "--output", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert path.exists(), done.stderr
    found: dict[str, dict[str, dict[str, int]]] = json.loads(path.read_text("utf-8"))
    return found


KINDS = (
    "gguf", "safetensors", "index", "config", "tokenizer", "tokenizer_config", "template", "template_process", "packed",
    "kept_tokenizer", "download_record",
)  # fmt: skip


def test_every_kind_is_looked_at(records: dict[str, dict[str, dict[str, int]]]) -> None:
    assert tuple(records) == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_load_or_are_refused(kind: str, records: dict[str, dict[str, dict[str, int]]]) -> None:
    counts = records[kind]["counts"]
    assert records[kind]["findings"] == {}
    assert sum(counts.values()) == CASES // FEWER.get(kind, 1)
    if kind not in ("packed", "kept_tokenizer", "download_record"):  # of which any bytes are good, or made anew
        refused = sum(counts.values()) - counts.get("loads", 0)
        assert refused > sum(counts.values()) / 4, "the damage does not damage"
