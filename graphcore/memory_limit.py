"""The memory that this process may take: what the machine has, or less where a control group limits it.

Who plans with the machine's memory inside a smaller group is killed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from graphcore.control_groups import ROOT, group_folders, lines_of


@dataclass(frozen=True)
class GroupMemory:
    """A control group's memory.

    Attributes:
        limit: bytes that its processes may take together, pages of files included.
        used: bytes that they have taken, pages of files left out that the kernel drops when they want memory.
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


def affordable_nbytes(most: int, root: Path = ROOT) -> int:
    """Return the bytes that something may take which is good to have and not needed: half of what is free at most."""
    return min(most, free_nbytes(root) // 2)


def groups_of_self(root: Path = ROOT) -> Iterator[GroupMemory]:
    """Yield the memory of each control group with a limit that this process is in, from its own up."""
    for folder, is_v2 in group_folders("memory", root):
        found = _read_group(folder, is_v2)
        if found is not None:
            yield found


def _read_group(folder: Path, is_v2: bool) -> GroupMemory | None:
    """Return a group's memory, or None if it has no limit or is not shown."""
    limit_name, used_name, prefix, mapped_name = (
        ("memory.max", "memory.current", "", "file_mapped")
        if is_v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_mapped_file")
    )
    limit, used = lines_of(folder / limit_name), lines_of(folder / used_name)
    if not limit or not used or not limit[0].isdecimal():  # "max" is none
        return None
    pages = {key: int(value) for key, _, value in (line.partition(" ") for line in lines_of(folder / "memory.stat"))}
    # Pages that were read twice are called active, a checkpoint's at its second start in the same container: they are
    # dropped, too. Those of running code are mapped; they would only be read again and again.
    inactive = pages.get(f"{prefix}inactive_file", 0)
    unmapped = inactive + pages.get(f"{prefix}active_file", 0) - pages.get(mapped_name, 0)
    return GroupMemory(int(limit[0]), max(0, int(used[0]) - max(inactive, unmapped)))
