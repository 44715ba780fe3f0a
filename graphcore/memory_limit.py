"""The memory that this process may take: the machine's, or less if a control group (cgroup) limits it.

A process in a smaller group that takes the whole machine's memory is killed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from graphcore.cgroups import ROOT, group_folders, lines_of


@dataclass(frozen=True)
class GroupMemory:
    """A control group's memory.

    Attributes:
        limit: bytes that its processes may take together, including pages of files.
        used: bytes that they have taken, without the pages of files that the kernel drops under pressure.
    """

    limit: int
    used: int


def physical_ram_nbytes(root: Path = ROOT) -> int:
    """Return the bytes that this process could take if nothing else ran.

    Args:
        root: root folder of the file system; another one in tests.
    """
    total: int = psutil.virtual_memory().total
    return min([total, *(group.limit for group in groups_of_self(root))])


def free_ram_nbytes(root: Path = ROOT) -> int:
    """Return the bytes that this process can still take."""
    free = [max(0, group.limit - group.used) for group in groups_of_self(root)]
    available: int = psutil.virtual_memory().available
    return min([available, *free])


def affordable_nbytes(most: int, root: Path = ROOT) -> int:
    """Return the bytes to use for an optional purpose: `most`, but no more than half of the free memory."""
    return min(most, free_ram_nbytes(root) // 2)


def groups_of_self(root: Path = ROOT) -> Iterator[GroupMemory]:
    """Yield the memory of each control group with a limit that this process is in, from the innermost up."""
    for folder, is_v2 in group_folders("memory", root):
        found = _read_group(folder, is_v2)
        if found is not None:
            yield found


def _read_group(folder: Path, is_v2: bool) -> GroupMemory | None:
    """Return a group's memory, or None if it has no limit or cannot be read."""
    limit_name, used_name, prefix, mapped_name = (
        ("memory.max", "memory.current", "", "file_mapped")
        if is_v2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_", "total_mapped_file")
    )
    limit, used = lines_of(folder / limit_name), lines_of(folder / used_name)
    if not limit or not used or not limit[0].isdecimal():  # "max" means no limit
        return None
    pages = {key: int(value) for key, _, value in (line.partition(" ") for line in lines_of(folder / "memory.stat"))}
    # Pages that were read twice are called active, such as a checkpoint's at its second start in the same container.
    # They are dropped, too. Pages of running code are mapped; dropping them would only make them be read again.
    inactive = pages.get(f"{prefix}inactive_file", 0)
    unmapped = inactive + pages.get(f"{prefix}active_file", 0) - pages.get(mapped_name, 0)
    return GroupMemory(int(limit[0]), max(0, int(used[0]) - max(inactive, unmapped)))
