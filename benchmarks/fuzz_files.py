"""Damages files of every kind and loads them: each must load, or be refused with graphcore's one-line error.

python benchmarks/fuzz_files.py --cases 2000               that many of each kind
python benchmarks/fuzz_files.py --minutes 30               all kinds in turns, until the time is over
python benchmarks/fuzz_files.py --kinds gguf --case 1234   one case, with its traceback; the file is kept as case.bin

A finding is another error, a crash, more than 5 s of processor time, or more than 1 GiB. Exit status 1 if there is one.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from fuzz.kinds import MAKERS
from fuzz.reading import SECONDS, damaged, run

TURN = 2000  # cases of one kind before the next kind, with --minutes
PATIENCE = 120  # seconds without a finished case after which the process is killed
SLOW = {"template_process": 40, "kept_tokenizer": 8}  # factors by which slow kinds get fewer cases


@dataclass
class Record:
    """The outcomes of a kind's cases.

    Attributes:
        seconds: float, processor time.
        counts: number of cases by outcome: "loads", names of errors, "finding", "ended at its bound" (templates).
        findings: numbers of the cases that showed a fault, by its description.
    """

    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[str, list[int]] = field(default_factory=dict)

    def add_finding(self, words: str, case: int) -> None:
        """Note a finding."""
        self.findings.setdefault(words, []).append(case)


def run_kind(name: str, first: int, end: int, record: Record) -> None:
    """Read cases first .. end - 1 in a child process; if a case ends it, continue in a new one."""
    while first < end:
        with tempfile.TemporaryDirectory() as folder:
            first = _run_process(name, Path(folder), first, end, record)


def _run_process(name: str, folder: Path, first: int, end: int, record: Record) -> int:
    """Read cases in a process forked from this one, which has imported all that they need and has no threads.

    Returns:
        The number of the next case.
    """
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        run_in_child(name, folder, first, end)
    status = _wait(pid, folder / "at", record)
    path = folder / "printed"
    printed = path.read_text("ascii") if path.exists() else ""
    lines = [json.loads(line) for line in printed[: printed.rfind("\n") + 1].splitlines()]
    for line in lines:
        if "finding" in line:
            record.add_finding(line["finding"], line["case"])
    record.counts += Counter[str](next((line["counts"] for line in reversed(lines) if "counts" in line), {}))
    if status == 0:
        return end
    complaints = (folder / "complaints").read_text("utf-8", "replace")
    if not (folder / "at").exists():
        raise SystemExit(f"{name}: the process ended before the first case (status {status}): {complaints}")
    number = int((folder / "at").read_text("ascii"))
    if status == -signal.SIGPROF and name in SECONDS:
        record.counts["ended at its bound"] += 1
    else:
        record.counts["finding"] += 1
        record.add_finding(f"ended with status {status}: {complaints[-300:]!a}", number)
    return number + 1


def run_in_child(name: str, folder: Path, first: int, end: int) -> NoReturn:
    """Read cases, with complaints into the folder's file, and end this process."""
    status = 1
    try:
        os.dup2(os.open(folder / "complaints", os.O_WRONLY | os.O_CREAT), 2)
        run(name, folder, first, end)
        status = 0
    except BaseException:  # noqa: BLE001 - the parent reports it
        os.write(2, traceback.format_exc().encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)


def _wait(pid: int, at: Path, record: Record) -> int:
    """Return the process's status, a signal's number negative, once it has ended; it is killed if its cases stop."""
    seen, since = "", time.monotonic()
    while True:
        ended, status, used = os.wait4(pid, os.WNOHANG)
        if ended:
            record.seconds += used.ru_utime + used.ru_stime
            return os.waitstatus_to_exitcode(status)
        now = at.read_text("ascii") if at.exists() else ""
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > PATIENCE:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def run_one(name: str, number: int) -> None:
    """Read one case here, without bounds."""
    with tempfile.TemporaryDirectory() as folder:
        kind = MAKERS[name](Path(folder))
        content = damaged(kind, name, number)
        Path("case.bin").write_bytes(content)
        kind.read(content)


def table(records: dict[str, Record]) -> str:
    """Return the records as Markdown."""
    lines = ["| kind | cases | load | refused, by error | findings | s |", "|---|---|---|---|---|---|"]
    for name, record in records.items():
        errors = {key: count for key, count in record.counts.items() if key not in ("loads", "finding")}
        refused = ", ".join(f"{count} {key}" for key, count in sorted(errors.items()))
        total, findings = sum(record.counts.values()), record.counts["finding"]
        lines.append(f"| {name} | {total} | {record.counts['loads']} | {refused} | {findings} | {record.seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Fuzz as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--cases", type=int, default=TURN, help="number of cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--minutes", type=float, help="run for so long, whatever --cases says")
    parser.add_argument("--case", type=int, help="run only the case of this number")
    parser.add_argument("--output", type=Path, help="JSON file to write, with counts and findings")
    arguments = parser.parse_args()
    if arguments.case is not None:
        return run_one(arguments.kinds[0], arguments.case)
    records = {name: Record() for name in arguments.kinds}
    until = time.monotonic() + 60 * (arguments.minutes or 0)
    first, is_over = arguments.first, False
    while not is_over:
        for name, record in records.items():
            step = max(1, arguments.cases // SLOW.get(name, 1))
            begin = first // SLOW.get(name, 1)
            run_kind(name, begin, begin + step, record)
            is_over = time.monotonic() >= until
            if is_over and arguments.minutes:
                break
        first += arguments.cases
    print(table(records))
    for name, record in records.items():
        for words, cases in record.findings.items():
            print(f"{name}: {words} (cases {', '.join(map(str, cases[:5]))}; {len(cases)} in all)")
    if arguments.output:
        plain = {name: {"counts": record.counts, "findings": record.findings} for name, record in records.items()}
        arguments.output.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    sys.exit(any(record.findings for record in records.values()))


if __name__ == "__main__":
    main()
