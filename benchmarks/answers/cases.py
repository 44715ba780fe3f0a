"""Questions with names, which run in groups, each group in a process of its own, two processes at a time."""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

Record = dict[str, Any]
WORKERS = 2
PATIENCE = 600  # seconds that a case may take


@dataclass(frozen=True)
class Case:
    """A question.

    Attributes:
        name: part and choices, with slashes between them; unique.
        group: name that cases which share a process have in common.
        ask: function from the work folder to the answer.
    """

    name: str
    group: str
    ask: Callable[[Path], Record]

    @property
    def part(self) -> str:
        """The first word of the name."""
        return self.name.partition("/")[0]


def run_cases(cases: Sequence[Case], folder: Path) -> tuple[dict[str, Record], dict[str, float]]:
    """Run all cases.

    Args:
        cases: questions; the order of groups is that of their first cases.
        folder: work folder.

    Returns:
        Answers by name, and the seconds of processes by part.
    """
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    answers: dict[str, Record] = {}
    seconds: dict[str, float] = {}
    running: dict[int, tuple[str, Path, float]] = {}
    waiting = list(groups)
    while waiting or running:
        while waiting and len(running) < WORKERS:
            name = waiting.pop(0)
            path = folder / f"answers-{len(groups) - len(waiting)}.jsonl"
            running[_start(groups[name], folder, path)] = (name, path, time.monotonic())
        pid, status = os.wait()
        if pid not in running:
            continue
        name, path, began = running.pop(pid)
        took, part = time.monotonic() - began, groups[name][0].part
        seconds[part] = seconds.get(part, 0.0) + took
        found = _read(path)
        for case in groups[name]:
            answers[case.name] = found.get(case.name, {"ended": os.waitstatus_to_exitcode(status)})
        print(f"{name}: {len(groups[name])} cases, {took:.1f} s", file=sys.stderr, flush=True)
        if len(found) < len(groups[name]):
            print(path.with_suffix(".txt").read_text("utf-8", "replace")[-3000:], file=sys.stderr, flush=True)
    return answers, seconds


def _read(path: Path) -> dict[str, Record]:
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return dict(json.loads(line) for line in lines)


def _start(cases: Sequence[Case], folder: Path, path: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_here(cases, folder, path)
    return pid


def _run_here(cases: Sequence[Case], folder: Path, path: Path) -> NoReturn:
    """Answer a group's cases in this process, a line of the file for each, and end it."""
    status = 1
    try:
        said = os.open(path.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        with path.open("w", encoding="utf-8") as file:
            for case in cases:
                signal.alarm(PATIENCE)
                print(json.dumps([case.name, case.ask(folder)], sort_keys=True), file=file, flush=True)
        status = 0
    except BaseException:  # noqa: BLE001 - the parent shows it
        os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)
