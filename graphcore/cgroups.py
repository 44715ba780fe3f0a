"""The control groups (cgroups) of this process: the folders in which the kernel shows their limits.

psutil, /proc/meminfo and os.cpu_count ignore a container's limits. Source: cgroups(7), the kernel's cgroup-v2.rst and
the v1 documents of each controller.
"""

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def group_folders(controller: str, root: Path = ROOT) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of each group of a controller that this process is in, from the innermost group up.

    Args:
        controller: "memory", "cpu" or "pids".
        root: root folder of the file system; another one in tests.

    Yields:
        The folder, and True if its files are those of version 2.
    """
    for line in lines_of(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        for mount, inside in _mounts(root, controller, is_v2):
            is_inside = Path(path).is_relative_to(inside)
            folder = mount / Path(path).relative_to(inside) if is_inside else mount
            for group in (folder, *folder.parents):
                if not group.is_relative_to(mount):
                    break
                yield group, is_v2


def _mounts(root: Path, controller: str, is_v2: bool) -> Iterator[tuple[Path, str]]:
    """Yield each mount point of the groups, and the group at its root. Source: proc(5), mountinfo."""
    for line in lines_of(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == ("cgroup2" if is_v2 else "cgroup") and (is_v2 or controller in options.split(",")):
            _, _, _, inside, mount = before.split(" ")[:5]
            yield root / mount.lstrip("/"), inside


def lines_of(path: Path) -> list[str]:
    """Return a small file's lines; none if it is missing or not readable. Names in it may have any bytes."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    return [line for line in text.split("\n") if line]
