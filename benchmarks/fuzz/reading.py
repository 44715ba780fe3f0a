"""Reads damaged files of one kind, one after another, in a process that a fault may end.

Each case may take 5 s of processor time and 1 GiB more than the process had at first.
"""

import json
import os
import resource
import signal
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from fuzz.kinds import MAKERS, Kind
from graphcore.errors import GraphcoreError

SECONDS = {"template": 2.0}  # what a template may take before it is ended, which is then no finding
OTHER_SECONDS = 5.0
NBYTES = {"template": 1 << 28}
OTHER_NBYTES = 1 << 30
LONGEST_MESSAGE = 1000  # characters, without the path
LAST_FRAMES = 3


def damaged(kind: Kind, name: str, number: int) -> bytes:
    """Return the damaged file of that number, always the same."""
    random = Random(f"{name} {number}")
    return kind.damage(random.choice(kind.whole), random)


def outcome(kind: Kind, content: bytes, folder: Path) -> tuple[str, str]:
    """Read a file; return "loads", the error's name or "finding", and for a finding what it was."""
    try:
        kind.read(content)
    except GraphcoreError as error:
        message = str(error).replace(str(folder), "")
        if not message.isprintable() or len(message) > LONGEST_MESSAGE:
            return "finding", f"{type(error).__name__} of {len(message)} characters: {message[:300]!a}"
        return type(error).__name__, ""
    except BaseException as error:  # noqa: BLE001 - a panic of a library in Rust is no Exception
        frames = traceback.extract_tb(error.__traceback__)[-LAST_FRAMES:]
        where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
        return "finding", f"{type(error).__name__} at {where}: {str(error)[:200]!a}"
    return "loads", ""


def run(name: str, folder: Path, first: int, end: int) -> None:
    """Read cases first .. end - 1; findings and counts so far go to the folder's file "printed", a line of JSON each.

    Args:
        folder: empty; its file "at" holds the number of the case that is read now.
    """
    kind = MAKERS[name](folder)
    for content in kind.whole:
        kind.read(content)
    virtual = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    most = virtual + NBYTES.get(name, OTHER_NBYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    counts: Counter[str] = Counter()
    printed = (folder / "printed").open("w", encoding="ascii", buffering=1)
    at = os.open(folder / "at", os.O_RDWR | os.O_CREAT)
    for number in range(first, end):
        os.pwrite(at, f"{number:20}".encode(), 0)
        content = damaged(kind, name, number)
        signal.setitimer(signal.ITIMER_PROF, SECONDS.get(name, OTHER_SECONDS))
        what, words = outcome(kind, content, folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        counts[what] += 1
        if what == "finding":
            print(json.dumps({"case": number, "finding": words}), file=printed)
        print(json.dumps({"counts": counts}), file=printed)
