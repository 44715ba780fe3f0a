"""Which test files run first, and which the workers of pytest-xdist run in one unit, with `--dist loadfile`.

worker 1   test_ring  |  test_engine_matrix, dense blocks  | ...     the longest begin first, so none is left at the end
worker 2   test_model_parity test_decode_equals_forward ...          one unit: they use the same compiled engines
"""

from functools import cache
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from support.budget import recorded_durations

# Files whose fixtures compile the same models: what the first has compiled, the others find in the process.
TOGETHER = (
    "tests/integration/test_model_parity.py",
    "tests/integration/test_decode_equals_forward.py",
    "tests/integration/test_recompilation.py",
    "tests/integration/test_dtypes.py",
    "tests/integration/test_streaming_equality.py",
)
BY_KIND = "tests/integration/test_engine_matrix.py"  # whose engines are shared by the tests of one kind of block
NEW_FILE_SECONDS = 0.01  # for each line of a file whose time was not recorded


def unit_of(nodeid: str) -> str:
    """Return the name of the tests that one worker runs together with a test."""
    file = nodeid.partition("::")[0]
    if file in TOGETHER:
        return TOGETHER[0]
    return f"{file}::{nodeid.rpartition('-')[2]}" if file == BY_KIND else file


@cache
def seconds_of(file: str, root: Path) -> float:
    """Return the processor seconds of a file, or of all files that run together with it."""
    known = recorded_durations()
    files = TOGETHER if file in TOGETHER else (file,)
    return sum(known[one] if one in known else NEW_FILE_SECONDS * num_lines(root / one) for one in files)


def num_lines(file: Path) -> int:
    """Return the number of lines of a file; none if there is no such file."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def in_order(items: list[pytest.Item], root: Path) -> list[pytest.Item]:
    """Return tests with those of the longest files first, and those of a unit one after the other."""
    place = {unit: at for at, unit in enumerate(dict.fromkeys(unit_of(item.nodeid) for item in items))}

    def key(item: pytest.Item) -> tuple[float, int]:
        return -seconds_of(item.nodeid.partition("::")[0], root), place[unit_of(item.nodeid)]

    return sorted(items, key=key)


class LongestFilesFirst(LoadFileScheduling):
    """Gives each worker whole units, in the order of collection."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # xdist's own order: files with many tests first

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
