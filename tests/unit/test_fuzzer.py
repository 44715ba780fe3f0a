"""The fuzzer finds what it is for: other errors, crashes, endless loops and wild allocations."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import fuzz_files  # noqa: E402
from fuzz import reading  # noqa: E402
from fuzz.kinds import Kind  # noqa: E402

from graphcore.errors import CheckpointError  # noqa: E402


def refuse(message: str) -> None:
    raise CheckpointError(message)


def loop() -> None:
    while True:
        continue


FAULTS: dict[str, tuple[Callable[[], object], str]] = {
    "another error": (lambda: {}["key"], "KeyError at test_fuzzer.py"),
    "a long message": (lambda: refuse("x" * 999 + "y" * 999), ""),
    "a crash": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ended with status -11"),
    "an endless loop": (loop, "ended with status -27"),
    "a wild allocation": (lambda: bytearray(3 << 30), "MemoryError"),
    "an exit": (lambda: os._exit(3), "ended with status 3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_the_other_cases_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, expected = FAULTS[name]

    def maker(folder: Path) -> Kind:
        return Kind(
            [b""], lambda content, random: bytes([random.randrange(2)]), lambda content: content == b"\1" and fault()
        )

    monkeypatch.setattr(reading, "OTHER_SECONDS", 0.2)
    monkeypatch.setitem(fuzz_files.MAKERS, "faulty", maker)
    record = fuzz_files.Record()
    fuzz_files.run_kind("faulty", 0, 8, record)
    faulty = [number for number in range(8) if reading.damaged(maker(ROOT), "faulty", number) == b"\1"]
    assert 0 < len(faulty) < 8
    assert sum(record.counts.values()) == 8
    if not expected:  # errors cut their own messages
        assert record.counts["CheckpointError"] == len(faulty)
        return
    ((words, cases),) = record.findings.items()
    assert words.startswith(expected)
    assert cases == faulty
    assert record.counts["finding"] == len(faulty)


def test_the_same_number_is_the_same_damage() -> None:
    kind = Kind([b"a" * 100, b"b" * 100], lambda content, random: content[: random.randrange(100)], len)
    cases = [reading.damaged(kind, "some", number) for number in range(50)]
    assert cases == [reading.damaged(kind, "some", number) for number in range(50)]
    assert len(set(cases)) > 30
