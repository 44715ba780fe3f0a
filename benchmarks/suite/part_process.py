"""One part as a process of its own: started, killed when its time is over, and what came of it.

python part_process.py FOLDER RUN DRY CACHE NAME [NAME ...]        runs parts, in a dry run several in one process
"""

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOG = "suite.log"
GRACE = 10  # seconds that a process has to die


def run_process(command: Sequence[str], log: Path, limit: float) -> str:
    """Run a command in a process group of its own, its output added to the log; return how it ended.

    Returns:
        "ok", "failed: ..." with its last line, or "killed after N s".
    """
    with log.open("ab") as output:
        output.write(f"\n$ {' '.join(command)}\n".encode())
        output.flush()
        before = output.tell()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # also when Ctrl-C ends the suite: a part that went on would keep the device
            end_group(process)
    if status is None:
        return f"killed after {limit:.0f} s"
    return "ok" if status == 0 else f"failed: {reason(status, log, before)}"


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a process and of those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=GRACE)


def reason(status: int, log: Path, before: int) -> str:
    """Return why a process died: the signal, or the last line that it wrote."""
    if status < 0:
        return f"{signal.Signals(-status).name}{' (out of memory?)' if status == -signal.SIGKILL else ''}"
    with log.open("rb") as file:
        file.seek(before)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"status {status}, no message"


def main() -> None:
    """Run parts; the first that raises ends the process, unless others of a dry run follow."""
    folder, run, is_dry, cache, *names = sys.argv[1:]
    benchmarks = Path(__file__).parents[1]
    sys.path[:0] = [str(benchmarks), str(benchmarks.parent)]  # the suite's own modules, and graphcore in a checkout
    from suite.log import Log
    from suite.machine import describe_machine

    machine = describe_machine()
    Log(Path(folder), run, is_dry == "dry").write({"machine": machine})
    if is_dry != "dry" and machine["device"] == "cpu":
        sys.exit("torch sees no CUDA device; --dry-run runs tiny shapes on the CPU")
    ended = [run_part(Path(folder), run, is_dry == "dry", Path(cache) if cache else None, name) for name in names]
    sys.exit(0 if all(ended) else 1)


def run_part(folder: Path, run: str, is_dry: bool, cache: Path | None, name: str) -> bool:
    """Run one part; return whether it came to its end, whose line is then in the log."""
    from suite.bench import Bench
    from suite.log import Log
    from suite.registry import PARTS

    module, _, function = PARTS[name].run.partition(":")
    log = Log(folder, run, is_dry, name)
    began = time.perf_counter()
    try:
        getattr(importlib.import_module(f"suite.{module}"), function)(Bench(folder, log, is_dry, cache))
    except Exception as error:  # noqa: BLE001 - whatever it is, the suite goes on and says so
        traceback.print_exc()
        print(f"{name}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}", flush=True)
        log.write({"outcome": f"failed: {type(error).__name__}: {str(error)[:600]}", "seconds": seconds_since(began)})
        return False
    log.write({"outcome": "ok", "seconds": seconds_since(began)})
    return True


def seconds_since(began: float) -> float:
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
