"""Progress in words: "token 3/128, group 5/18, 1.31 GiB/s, ETA 0:41". This module prints nothing."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

from graphcore.config.byte_sizes import in_words, part_in_words, rate_in_words

WINDOW = 20.0  # seconds over which speed is measured
TOKEN_STAGES = ("prefill", "generate")
BYTE_STAGES = ("load", "draft", "join", "download")
NAMES = {
    "generate": "token",
    "prefill": "prompt token",
    "download": "downloading",
    "draft": "packing the draft model",
    "headers": "reading headers",
    "wait": "waiting for another process that fetches the same",
    "build kernels": "building kernels",
    "compile": "compiling graph",
    "measure": "measuring the machine's rates",
}


class Pace:
    """The growth rate of an amount, from its values at several times."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # seconds, amount; the first may be older than the window

    def add(self, now: float, amount: float) -> None:
        """Add the amount at a time, which is not before that of the last call."""
        self._samples.append((now, amount))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()

    @property
    def rate(self) -> float | None:
        """Amount per second; None where nothing has grown yet."""
        if not self._samples:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None


class ProgressText:
    """A converter of `on_progress` calls to words; it computes speed and remaining time from the calls.

    Args:
        clock: clock in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moved_before = [0]  # bytes that a pass has moved when each group's turn comes, and at its end
        self._stage, self._done, self._total = "", 0, 0
        self._begin()

    def expect_groups(self, nbytes: Sequence[int]) -> None:
        """Set the bytes that a pass over the weights moves for each group; 0 for a resident group."""
        self._moved_before = list(accumulate(nbytes, initial=0))

    def take(self, stage: str, group: int | None, done: int, total: int) -> str:
        """Record a call of `on_progress` and return its words."""
        is_other_run = stage in TOKEN_STAGES and total != self._total  # the total of a download grows with its files
        if stage != self._stage or done < self._done or is_other_run:
            self._begin()
        elif group is None:
            self._passes += 1  # tokens are reported after their pass
        self._stage, self._done, self._total = stage, done, total
        now, position = self._clock(), float(done)
        if stage in TOKEN_STAGES and self._moved_before[-1]:
            # groups without known bytes move nothing
            of_pass = 0 if group is None else self._moved_before[min(group, len(self._moved_before) - 1)]
            self._nbytes.add(now, self._passes * self._moved_before[-1] + of_pass)
            position += of_pass / self._moved_before[-1] if stage == "generate" else 0.0
        elif counts_bytes(stage):
            self._nbytes.add(now, done)
        self._position.add(now, position)
        return ", ".join([f"{stage_name(stage)} {amount(stage, done, total)}".strip(), *self._rest(group, position)])

    def _begin(self) -> None:
        """Reset the measurements for a new stage."""
        self._passes = 0
        self._position, self._nbytes = Pace(), Pace()

    def _rest(self, group: int | None, position: float) -> list[str]:
        """Return the known words about group, speed and remaining time."""
        words = []
        if group is not None:
            num_groups = len(self._moved_before) - 1
            words.append(f"group {group + 1}/{num_groups}" if num_groups else f"group {group + 1}")
        if self._nbytes.rate is not None:
            words.append(rate_in_words(self._nbytes.rate))
        if self._position.rate is not None and position < self._total:
            words.append(f"ETA {clock_time((self._total - position) / self._position.rate)}")
        return words


def stage_name(stage: str) -> str:
    """Return a stage's name for people: "download 2 of 4" becomes "downloading 2 of 4:"."""
    kind, _, rest = stage.partition(" ")
    if stage in NAMES or kind not in NAMES:
        return NAMES.get(stage, stage)
    return f"{NAMES[kind]} {rest}:" if kind == "download" else f"{NAMES[kind]} {rest}"


def counts_bytes(stage: str) -> bool:
    """Return whether done and total are bytes."""
    return stage.partition(" ")[0] in BYTE_STAGES


def amount(stage: str, done: int, total: int) -> str:
    """Return "3/30", with units where the numbers are bytes; without a total only the bytes done, or nothing."""
    if counts_bytes(stage):
        return part_in_words(done, total) if total > 0 else in_words(done) if done else ""
    return f"{done}/{total}" if total > 0 else ""


def clock_time(seconds: float) -> str:
    """Return "0:41" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
