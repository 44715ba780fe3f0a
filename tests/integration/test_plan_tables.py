"""docs/plan_tables.md: weights are the published parameters, and the page is what its script writes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "plan_tables.md"
PARAMETERS = {  # of the checkpoints' own index files, total_size over two bytes, or their papers
    "Llama 2 7B": 6_738_415_616,
    "Llama 2 13B": 13_015_864_320,
    "Llama 30B": 32_528_943_616,
    "Llama 2 70B": 68_976_648_192,
    "Llama 3 70B": 70_553_706_496,
}


@pytest.mark.parametrize("model", PARAMETERS)
def test_weights_in_bf16_are_two_bytes_for_each_published_parameter(model: str) -> None:
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {model} | bf16 |"))
    assert float(row.split("|")[3]) == pytest.approx(2 * PARAMETERS[model] / 1e9, abs=0.01)


@pytest.mark.slow
def test_the_page_is_what_its_script_writes(tmp_path: Path) -> None:
    again = tmp_path / "plan_tables.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "plan_tables.py"), "--output", str(again)]
    subprocess.run(command, check=True, cwd=ROOT)
    assert again.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
