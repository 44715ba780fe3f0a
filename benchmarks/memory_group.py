"""A memory cgroup for one process: a hard limit that counts the file pages it causes, its peak, and OOM kills.

The version 1 controller is used where it is mounted, or can be mounted; else version 2. Both need root. A group is a
folder in the root of the hierarchy, gone again when its processes are.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from control_group import ControlGroup


@dataclass(frozen=True)
class Controller:
    """The cgroup memory controller: its root folder and the names of its files.

    Attributes:
        limit, swap, peak, events: names of files in a group; `swap` may be missing where swap is not counted, and
            `peak` on old kernels.
        swap_value: value of `swap` that forbids swap; None writes the limit, which counts memory and swap together.
    """

    version: int
    root: Path
    limit: str
    swap: str
    swap_value: int | None
    peak: str
    events: str


def v1(root: Path) -> Controller:
    return Controller(
        1,
        root,
        limit="memory.limit_in_bytes",
        swap="memory.memsw.limit_in_bytes",
        swap_value=None,
        peak="memory.max_usage_in_bytes",
        events="memory.oom_control",
    )


def v2(root: Path) -> Controller:
    return Controller(
        2, root, limit="memory.max", swap="memory.swap.max", swap_value=0, peak="memory.peak", events="memory.events"
    )


@contextmanager
def memory_controller() -> Iterator[Controller | str]:
    """Yield the memory controller, or in one line why groups cannot be made."""
    mounted = find_mounted()
    if mounted is not None:
        yield mounted if os.access(mounted.root, os.W_OK) else f"no memory cgroup: {mounted.root} cannot be written to"
        return
    with tempfile.TemporaryDirectory(prefix="memory-cgroup-") as folder:
        done = subprocess.run(
            ["mount", "-t", "cgroup", "-o", "memory", "none", folder], capture_output=True, text=True, check=False
        )
        if done.returncode:
            why = (done.stderr.strip() or "no message").splitlines()[0]
            yield f"no memory cgroup: neither mounted nor mountable ({why})"
            return
        try:
            yield v1(Path(folder))
        finally:
            subprocess.run(["umount", folder], check=True)


def find_mounted() -> Controller | None:
    """Return the memory controller that is mounted, switched on for new groups where version 2 needs that."""
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, folder, kind, flags, *_ = line.split()
        if kind == "cgroup" and "memory" in flags.split(","):
            return v1(Path(folder))
        if kind == "cgroup2" and "memory" in (Path(folder) / "cgroup.controllers").read_text(encoding="utf-8").split():
            try:
                (Path(folder) / "cgroup.subtree_control").write_text("+memory", encoding="utf-8")
            except OSError:  # not root, or a container whose root group has processes of its own
                continue
            return v2(Path(folder))
    return None


@dataclass(frozen=True)
class MemoryGroup(ControlGroup):
    """A memory cgroup with a limit and no process yet."""

    controller: Controller

    @classmethod
    def create(cls, controller: Controller, name: str, limit_nbytes: int) -> "MemoryGroup":
        group = cls(controller.root / name, controller)
        group.folder.mkdir()
        group._file(controller.limit).write_text(str(limit_nbytes), encoding="utf-8")
        if group._file(controller.swap).exists():
            value = limit_nbytes if controller.swap_value is None else controller.swap_value
            group._file(controller.swap).write_text(str(value), encoding="utf-8")
        return group

    def _file(self, name: str) -> Path:
        return self.folder / name

    def peak_nbytes(self) -> int | None:
        """Return the most memory that was charged, file pages included; None where the kernel does not say."""
        path = self._file(self.controller.peak)
        return int(path.read_text(encoding="utf-8")) if path.exists() else None

    def num_oom_kills(self) -> int:
        lines = self._file(self.controller.events).read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
