"""A process whose compile cache is empty repeats its first answers to the bit: what is compiled is chosen by no timing.

Rows are as wide as an 8B's: narrow ones have one way to be summed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = "++model.random_config.num_hidden_layers=2"


@pytest.mark.parametrize("graph", ["compiled", "captured"])
def test_the_first_answers_are_those_that_follow(graph: str, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "first_answers.py"), "cuda:0", graph, str(tmp_path), LAYERS]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    own = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=own, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *later = json.loads(done.stdout.splitlines()[-1])
    assert later == [first] * len(later)
