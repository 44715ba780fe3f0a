"""Two ranks on paced disks: nearly twice one disk's speed, and what task=plan predicts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.task_runs import run_in
from support.tiny_models import BUILDERS

pytestmark = pytest.mark.thorough

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "ring.py"
SETTINGS = ("streaming=on", "dtype=fp32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers have 31 MB and whose head has as many bytes as two of them."""
    made = tmp_path_factory.mktemp("ring_speed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 8192}
    BUILDERS["llama3"](**sizes, tie_word_embeddings=False).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """What the benchmark says of one and two ranks, and of one and four sequences."""
    sizes = "--ranks", "1,2", "--rates", "40MB", "--sequences", "1,4", "--tokens", "4", "--json"
    command = [sys.executable, str(BENCHMARK), str(folder), *SETTINGS, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(row["ranks"], row["sequences"]): row for row in rows}


@pytest.mark.parametrize("sequences", [1, 4])
def test_two_disks_are_nearly_twice_as_fast_as_one(
    measured: dict[tuple[int, int], dict[str, Any]], sequences: int
) -> None:
    one, two = (measured[ranks, sequences]["tokens_per_second"] for ranks in (1, 2))
    assert 1.7 < two / one < 2.3


def test_the_plan_predicts_the_measured_speed(
    measured: dict[tuple[int, int], dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    given = f"model.checkpoint={folder}", "context_length=256", "task.disk=40MB", "task.bandwidth=5GB", "task.ram=2GiB"
    ring = run_in(tmp_path / "run", "task=plan", "parallel=ring", "task.ranks=2", *SETTINGS, *given).record
    alone = run_in(tmp_path / "run", "task=plan", *SETTINGS, *given).record
    for ranks, record in ((1, alone), (2, ring)):
        found = measured[ranks, 1]["tokens_per_second"]
        assert record["predicted"]["tokens_per_second"] == pytest.approx(found, rel=0.2)
