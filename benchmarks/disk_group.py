"""A cgroup whose processes read from the disk no faster than a rate, whatever program they run; needs root.

The kernel limits direct reads, reads into the page cache and those of mapped files alike. What the page cache holds
already is not read, so it is emptied before a run (disk.py).
"""

import os
from dataclasses import dataclass
from pathlib import Path

from control_group import ControlGroup


@dataclass(frozen=True)
class DiskController:
    """The cgroup controller of block devices: its root folder, and the file of a group that limits reads.

    Attributes:
        text: what is written into that file, with `device` and `rate` to fill in.
    """

    root: Path
    limit: str
    text: str

    @classmethod
    def find(cls) -> "DiskController":
        """Return the controller that is mounted: version 1 (blkio), else version 2 (io).

        Raises:
            SystemExit: there is none, or this user may not make groups.
        """
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mounted, kind, flags, *_ = line.split()
            root = Path(mounted)
            if not os.access(root, os.W_OK):
                continue
            if kind == "cgroup" and "blkio" in flags.split(","):
                return cls(root, "blkio.throttle.read_bps_device", "{device} {rate}")
            if kind == "cgroup2" and "io" in (root / "cgroup.controllers").read_text(encoding="utf-8").split():
                (root / "cgroup.subtree_control").write_text("+io", encoding="utf-8")
                return cls(root, "io.max", "{device} rbps={rate}")
        raise SystemExit("no cgroup of block devices: neither blkio nor io is mounted for this user; be root")


class DiskGroup(ControlGroup):
    """A cgroup with a limit for reads."""

    @classmethod
    def create(cls, controller: DiskController, name: str, path: Path, rate: float) -> "DiskGroup":
        """Make a group.

        Args:
            path: a file or folder on the disk.
            rate: bytes per second.
        """
        group = cls(controller.root / name)
        group.folder.mkdir()
        limit = controller.text.format(device=device_of(path), rate=round(rate))
        (group.folder / controller.limit).write_text(limit, encoding="utf-8")
        return group


def device_of(path: Path) -> str:
    """Return the numbers, such as "259:0", of the disk that a file is on; of the whole disk if it is on a partition."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text(encoding="utf-8").strip()
