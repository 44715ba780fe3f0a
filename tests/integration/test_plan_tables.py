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
HEADS = {  # layers, kv heads and head dim of the checkpoints' own config.json
    "Llama 2 7B": (32, 32, 128),
    "Llama 2 13B": (40, 40, 128),
    "Llama 30B": (60, 52, 128),
    "Llama 2 70B": (80, 8, 128),
    "Llama 3 70B": (80, 8, 128),
}
BYTES = {"bf16": 2, "q4_0": 18 / 32}  # for each number
BUDGET = 14 * 2**30  # bytes


@pytest.mark.parametrize("model", PARAMETERS)
def test_weights_in_bf16_are_two_bytes_for_each_published_parameter(model: str) -> None:
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {model} | bf16 |"))
    assert float(row.split("|")[3]) == pytest.approx(2 * PARAMETERS[model] / 1e9, abs=0.01)


def rows_of(context: str) -> list[list[str]]:
    """Return the cells of a context's table."""
    table = PAGE.read_text(encoding="utf-8").partition(f"## {context}\n")[2].partition("\n## ")[0]
    return [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| Llama")
    ]


@pytest.mark.parametrize(("context", "tokens"), [("8K", 8192), ("128K", 131072)])
def test_caches_have_the_bits_of_their_dtype_for_each_number_of_every_head(context: str, tokens: int) -> None:
    """q4_0 is 18 bytes for 32 numbers. Beyond them a cache has a page that no sequence has, and tables of pages."""
    rows = rows_of(context)
    assert {row[3] for row in rows} == set(BYTES)
    for model, _, _, kv_dtype, kv, *_ in rows:
        layers, kv_heads, head_dim = HEADS[model]
        expected = 2 * layers * kv_heads * head_dim * tokens * BYTES[kv_dtype]
        assert expected / 1e9 <= float(kv) + 0.005 <= 1.01 * expected / 1e9 + 0.01, (model, kv_dtype)


def test_at_128k_a_70b_fits_with_codes_of_four_bits_and_nothing_fits_without() -> None:
    fits = {(row[0], row[3]) for row in rows_of("128K") if not row[5].startswith("does not fit")}
    assert fits == {("Llama 2 70B", "q4_0"), ("Llama 3 70B", "q4_0")}
    assert all(float(row[7]) <= BUDGET / 1e9 for row in rows_of("128K") if (row[0], row[3]) in fits)


@pytest.mark.slow
def test_the_page_is_what_its_script_writes(tmp_path: Path) -> None:
    again = tmp_path / "plan_tables.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "plan_tables.py"), "--output", str(again)]
    subprocess.run(command, check=True, cwd=ROOT)
    assert again.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")
