"""What progress says in words: "token 3/128, group 5/18, 1.3 GB/s, ETA 0:41". Draws and prints nothing."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

WINDOW = 20.0  # seconds over which speed is measured
TOKEN_STAGES = ("prefill", "generate")
BYTE_STAGES = ("load", "join")
NAMES = {"generate": "token", "prefill": "prompt token"}
MEGABYTE = 1_000_000  # other stages with a larger total count bytes, too: a download does, or it counts parts


class Pace:
    """How fast an amount grows, from its values at some times."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque()  # seconds, amount; the first may be older than the window

    def add(self, now: float, amount: float) -> None:
        """Note the amount that there is now; times do not go back."""
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
    """Turns `on_progress` calls into words; speed and time left come from the calls themselves.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moved_before = [0]  # bytes that a pass has moved when each group's turn comes, and at its end
        self._stage, self._done, self._total = "", 0, 0
        self._begin()

    def expect_groups(self, nbytes: Sequence[int]) -> None:
        """Say what a pass over the weights moves for each group: 0 for one that stays."""
        self._moved_before = list(accumulate(nbytes, initial=0))

    def take(self, stage: str, group: int | None, done: int, total: int) -> str:
        """Note a call of `on_progress` and return its words."""
        if (stage, total) != (self._stage, self._total) or done < self._done:
            self._begin()
        elif group is None:
            self._passes += 1  # tokens are reported after their pass
        self._stage, self._done, self._total = stage, done, total
        now, position = self._clock(), float(done)
        if stage in TOKEN_STAGES and self._moved_before[-1]:
            # groups that nothing was said about move nothing
            of_pass = 0 if group is None else self._moved_before[min(group, len(self._moved_before) - 1)]
            self._nbytes.add(now, self._passes * self._moved_before[-1] + of_pass)
            position += of_pass / self._moved_before[-1] if stage == "generate" else 0.0
        elif counts_bytes(stage, total):
            self._nbytes.add(now, done)
        self._position.add(now, position)
        return ", ".join(
            [f"{NAMES.get(stage, stage)} {amount(stage, done, total)}".strip(), *self._rest(group, position)]
        )

    def _begin(self) -> None:
        """Begin a stage."""
        self._passes = 0
        self._position, self._nbytes = Pace(), Pace()

    def _rest(self, group: int | None, position: float) -> list[str]:
        """Return the words about group, link and time, as far as they are known."""
        words = []
        if group is not None:
            num_groups = len(self._moved_before) - 1
            words.append(f"group {group + 1}/{num_groups}" if num_groups else f"group {group + 1}")
        if self._nbytes.rate is not None:
            gb = self._nbytes.rate / 1e9
            words.append(f"{gb:.1f} GB/s" if gb >= 1 else f"{gb:.2f} GB/s")
        if self._position.rate is not None and position < self._total:
            words.append(f"ETA {clock_time((self._total - position) / self._position.rate)}")
        return words


def counts_bytes(stage: str, total: int) -> bool:
    """Return whether done and total are bytes."""
    return stage in BYTE_STAGES or (stage not in TOKEN_STAGES and total > MEGABYTE)


def amount(stage: str, done: int, total: int) -> str:
    """Return "3/30", in MB where the numbers are bytes, or nothing where the end is not known."""
    if total <= 0:
        return ""
    digits = 0 if total >= 10 * MEGABYTE else 1
    is_bytes = counts_bytes(stage, total)
    return f"{done / 1e6:.{digits}f}/{total / 1e6:.{digits}f} MB" if is_bytes else f"{done}/{total}"


def clock_time(seconds: float) -> str:
    """Return "0:41" or "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
