"""The benchmark of the delta rule runs, and prints a row for each rounding."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from delta_rule import main  # a script, found by its folder


def test_a_row_says_which_share_the_rule_takes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--tokens", "2", "--repeats", "1", "--threads", "1", "--stored", "q8_0"])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["2", "wide"], ["2", "block"]]
    for _, _, rule, _, projections, share in rows:
        assert float(share) == pytest.approx(float(rule) / float(projections), abs=0.02)
