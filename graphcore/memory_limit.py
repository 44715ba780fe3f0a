"""The memory that this process may take: what the machine has, or less where a control group limits it.

A container's limit is in no answer of the system's own (psutil, /proc/meminfo); who plans with the machine's memory is
killed. Source: cgroups(7), the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")


@dataclass(frozen=True)
class GroupMemory:
    """A control group's memory.

    Attributes:
        limit: bytes that its processes may take together, pages of files included.
        used: bytes that they have taken, pages of files left out that the kernel can drop.
    """

    limit: int
    used: int


def physical_nbytes(root: Path = ROOT) -> int:
    """Return the bytes that this process could take if nothing else ran.

    Args:
        root: of the file system, for tests.
    """
    total: int = psutil.virtual_memory().total
    return min([total, *(group.limit for group in groups_of_self(root))])


def free_nbytes(root: Path = ROOT) -> int:
    """Return the bytes that this process can still take."""
    free = [max(0, group.limit - group.used) for group in groups_of_self(root)]
    available: int = psutil.virtual_memory().available
    return min([available, *free])


def groups_of_self(root: Path = ROOT) -> Iterator[GroupMemory]:
    """Yield the memory of each control group with a limit that this process is in, from its own up."""
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        for mount, inside in _mounts(root, is_v2):
            is_inside = Path(path).is_relative_to(inside)
            folder = mount / Path(path).relative_to(inside) if is_inside else mount
            for group in (folder, *folder.parents):
                if not group.is_relative_to(mount):
                    break
                found = _read_group(group, is_v2)
                if found is not None:
                    yield found


def _mounts(root: Path, is_v2: bool) -> Iterator[tuple[Path, str]]:
    """Yield where the groups are mounted, and which of them is the mount's top. Source: proc(5), mountinfo."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == ("cgroup2" if is_v2 else "cgroup") and (is_v2 or "memory" in options.split(",")):
            _, _, _, inside, mount = before.split(" ")[:5]
            yield root / mount.lstrip("/"), inside


def _read_group(folder: Path, is_v2: bool) -> GroupMemory | None:
    """Return a group's memory, or None if it has no limit or is not shown."""
    limit_name, used_name, droppable = (
        ("memory.max", "memory.current", "inactive_file")
        if is_v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    limit, used = _lines(folder / limit_name), _lines(folder / used_name)
    if not limit or not used or not limit[0].isdecimal():  # "max" is none
        return None
    pages = {key: int(value) for key, _, value in (line.partition(" ") for line in _lines(folder / "memory.stat"))}
    return GroupMemory(int(limit[0]), max(0, int(used[0]) - pages.get(droppable, 0)))


def _lines(path: Path) -> list[str]:
    """Return a small file's lines; none if it is not there or not for us."""
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
