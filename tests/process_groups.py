"""What a process sees of its control groups, written under a folder that stands for the root of the file system."""

from collections.abc import Mapping
from pathlib import Path


def write_groups(root: Path, groups: str, mounts: str, files: Mapping[str, str]) -> Path:
    """Write a process's groups and mounts, as /proc has them, and files below /sys/fs/cgroup; return the root."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(f"{groups}\n", encoding="ascii")
    (proc / "mountinfo").write_text(f"{mounts}\n", encoding="utf-8", errors="surrogateescape")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root
