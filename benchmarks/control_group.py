"""A cgroup for the processes of one run: they join it before they become what is measured."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ControlGroup:
    """A cgroup, a folder below the root of its controller's hierarchy."""

    folder: Path

    def command(self, command: list[str]) -> list[str]:
        """Return a command that joins the group before it becomes the given one, under the same process id."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"), *command]

    def remove(self) -> None:
        """Kill what the group's process left behind in it, and remove it.

        Raises:
            OSError: it is still busy after five seconds.
        """
        give_up = time.monotonic() + 5
        while True:
            for process in (self.folder / "cgroup.procs").read_text(encoding="utf-8").split():
                os.kill(int(process), signal.SIGKILL)
            try:
                self.folder.rmdir()
                return
            except OSError:  # the dead are reaped a moment later
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)
