"""One engine in one process: started, watched, and what came of it."""

import json
import os
import statistics
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memory_group import MemoryGroup


@dataclass
class Outcome:
    """What came of one process.

    Attributes:
        error: why it has no numbers; None where it has.
        token_seconds: of each token after the first.
        peak_group_bytes: charged to its memory group, file pages included.
        peak_resident_bytes: of the process, mapped file pages included.
        peak_anonymous_bytes: of the process, without file pages, seen every 20 ms.
        cached_before: share of the model's files in the page cache when it started.
        load_average_before: of the machine, over the last minute: how busy it was with others.
    """

    error: str | None = None
    load_seconds: float | None = None
    versions: dict[str, str] = field(default_factory=dict)
    first_token_seconds: float | None = None
    token_seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_resident_bytes: int | None = None
    peak_anonymous_bytes: int | None = None
    peak_group_bytes: int | None = None
    oom_kills: int = 0
    cached_before: float | None = None
    load_average_before: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first over the seconds that they took; None where there are none."""
        return len(self.token_seconds) / sum(self.token_seconds) if self.token_seconds else None

    def line(self) -> str:
        if self.error is not None or self.first_token_seconds is None:
            return self.error or "loaded"
        each = statistics.median(self.token_seconds)
        return f"{self.tokens_per_second:.3f} tokens/s, {each:.2f} s a token, first {self.first_token_seconds:.2f} s"


class AnonymousWatch(threading.Thread):
    """Samples a process's anonymous memory until it is told to stop."""

    def __init__(self, process_id: int) -> None:
        super().__init__(daemon=True)
        self.status = Path(f"/proc/{process_id}/status")
        self.peak_nbytes = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.02):
            try:
                lines = self.status.read_text(encoding="utf-8").splitlines()
            except OSError:  # it has ended
                return
            for line in lines:
                if line.startswith("RssAnon"):
                    self.peak_nbytes = max(self.peak_nbytes, int(line.split()[1]) * 1024)


def run_process(command: Sequence[str], group: MemoryGroup | None, log: Path, timeout: float) -> Outcome:
    """Run an engine to its end, in a memory group if one is given; its messages go to the log."""
    joined = list(command) if group is None else group.command(list(command))
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}  # --threads rules
    quiet = {**inherited, "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with log.open("w", encoding="utf-8") as messages:
        process = subprocess.Popen(joined, stdout=subprocess.PIPE, stderr=messages, text=True, env=quiet)
        watch = AnonymousWatch(process.pid)
        watch.start()
        try:
            answers, _ = process.communicate(timeout=timeout)
            ended = None
        except subprocess.TimeoutExpired:
            process.kill()
            answers, _ = process.communicate()
            ended = f"stopped after {timeout:.0f} s"
        finally:
            watch.stopped.set()
            process.kill()  # of a process that has ended, nothing
    outcome = Outcome(peak_anonymous_bytes=watch.peak_nbytes)
    for line in answers.splitlines():
        for key, value in json.loads(line).items():
            setattr(outcome, key, value)
    if group is not None:
        outcome.peak_group_bytes, outcome.oom_kills = group.peak_nbytes(), group.num_oom_kills()
    outcome.error = ended or death_of(process.returncode, outcome, log)
    return outcome


def death_of(status: int, outcome: Outcome, log: Path) -> str | None:
    """Return why a process died, in one line; None where it did not."""
    if status == 0:
        return None
    stage = "loading" if outcome.load_seconds is None else "running"
    if outcome.oom_kills:
        return f"killed while {stage}: the memory group was full"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"died while {stage} (status {status}): {lines[-1].strip()[:300] if lines else 'no message'}"
