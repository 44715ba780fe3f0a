"""The order of the test files names files that are there."""

from pathlib import Path

from file_order import LONGEST

ROOT = Path(__file__).parents[2]


def test_a_test_file_with_a_place_in_the_order_is_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).exists()] == []
