"""Limits of control groups, version 1 and 2, nested and bind-mounted, as a container or a service has them."""

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from support.processes import write_groups

from graphcore.memory_limit import GroupMemory, affordable_nbytes, free_ram_nbytes, groups_of_self, physical_ram_nbytes

V2_MOUNT = "30 24 0:26 {inside} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "31 24 0:27 {inside} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory"
OTHER_MOUNTS = "25 1 8:1 / / rw - ext4 /dev/root rw\n32 24 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


def groups_under(root: Path, group: str, mount: str, files: Mapping[str, str]) -> Path:
    """Write what a process of one memory group sees, among other groups and mounts."""
    return write_groups(root, f"5:cpu:/elsewhere\n{group}", f"{OTHER_MOUNTS}{mount}", files)


def test_version_2_counts_what_the_kernel_cannot_drop(tmp_path: Path) -> None:
    files = {
        "app/memory.max": "1500000000\n",
        "app/memory.current": "900000000\n",
        "app/memory.stat": "anon 200000000\nfile 700000000\ninactive_file 650000000\n",
    }
    root = groups_under(tmp_path, "0::/app", V2_MOUNT.format(inside="/"), files)
    assert list(groups_of_self(root)) == [GroupMemory(1_500_000_000, 250_000_000)]
    assert physical_ram_nbytes(root) == 1_500_000_000
    assert free_ram_nbytes(root) == 1_250_000_000


@pytest.mark.parametrize("name", ["M\xfcsli", "\u65e5\u672c", "old\udce4", "two\u2028lines"])
def test_mounts_of_any_name_hide_no_group(tmp_path: Path, name: str) -> None:
    """Mountinfo has names as their bytes, such as that of a disk with an umlaut, whatever their encoding."""
    disk = f"40 24 8:2 / /media/{name} rw - vfat /dev/sdb1 rw"
    files = {"app/memory.max": "1500000000\n", "app/memory.current": "900000000\n"}
    root = groups_under(tmp_path, "0::/app", f"{disk}\n{V2_MOUNT.format(inside='/')}", files)
    assert list(groups_of_self(root)) == [GroupMemory(1_500_000_000, 900_000_000)]


def test_version_1_is_read_where_its_memory_controller_is_mounted(tmp_path: Path) -> None:
    files = {
        "memory/a/b/memory.limit_in_bytes": "2000000000\n",
        "memory/a/b/memory.usage_in_bytes": "500000000\n",
        "memory/a/b/memory.stat": "inactive_file 1\ntotal_inactive_file 100000000\n",
    }
    root = groups_under(tmp_path, "4:memory:/a/b", V1_MOUNT.format(inside="/"), files)
    assert list(groups_of_self(root)) == [GroupMemory(2_000_000_000, 400_000_000)]


@pytest.mark.parametrize("version", [1, 2])
def test_pages_that_were_read_twice_are_dropped_but_those_of_running_code(tmp_path: Path, version: int) -> None:
    prefix, mapped = ("total_", "total_mapped_file") if version == 1 else ("", "file_mapped")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    folder = "memory/a/" if version == 1 else "a/"
    files = {
        f"{folder}{names[0]}": "1500000000\n",
        f"{folder}{names[1]}": "1400000000\n",
        f"{folder}memory.stat": f"{prefix}inactive_file 100000000\n{prefix}active_file 900000000\n{mapped} 150000000\n",
    }
    group, mount = ("4:memory:/a", V1_MOUNT) if version == 1 else ("0::/a", V2_MOUNT)
    root = groups_under(tmp_path, group, mount.format(inside="/"), files)
    assert list(groups_of_self(root)) == [GroupMemory(1_500_000_000, 1_400_000_000 - 850_000_000)]
    assert affordable_nbytes(10**12, root) == (1_500_000_000 - 550_000_000) // 2
    assert affordable_nbytes(1000, root) == 1000


def test_every_group_above_counts_too(tmp_path: Path) -> None:
    files = {
        "slice/app/memory.max": "3000000000\n",
        "slice/app/memory.current": "0\n",
        "slice/memory.max": "1000000000\n",
        "slice/memory.current": "990000000\n",
    }
    root = groups_under(tmp_path, "0::/slice/app", V2_MOUNT.format(inside="/"), files)
    assert physical_ram_nbytes(root) == 1_000_000_000
    assert free_ram_nbytes(root) == 10_000_000


@pytest.mark.parametrize(("group", "inside"), [("/docker/1f", "/docker/1f"), ("/", "/"), ("/host/1f", "/docker/1f")])
def test_a_container_sees_its_own_group_at_the_top_of_the_mount(tmp_path: Path, group: str, inside: str) -> None:
    files = {"memory.max": "1000000000", "memory.current": "1"}
    root = groups_under(tmp_path, f"0::{group}", V2_MOUNT.format(inside=inside), files)
    assert physical_ram_nbytes(root) == 1_000_000_000


def test_a_group_without_a_limit_or_without_files_limits_nothing(tmp_path: Path) -> None:
    unlimited = {"app/memory.max": "max\n", "app/memory.current": "5\n"}
    root = groups_under(tmp_path, "0::/app", V2_MOUNT.format(inside="/"), unlimited)
    assert not list(groups_of_self(root))
    assert physical_ram_nbytes(root) == psutil.virtual_memory().total
    assert physical_ram_nbytes(tmp_path / "no such system") == psutil.virtual_memory().total
