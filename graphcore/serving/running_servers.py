"""Servers of this user that run now: a file for each, which the server writes and `graphcore ps` reads.

$XDG_RUNTIME_DIR/graphcore/servers/<process id>-<start>.json, or under ~/.local/state where there is no such directory

A server that was killed leaves its file behind. The time at which the process started tells it from a later process of
the same number. Sources: proc(5), /proc/<pid>/stat and /proc/<pid>/status; namespaces(7), /proc/<pid>/ns.
"""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphcore.cgroups import lines_of
from graphcore.config.user_path import xdg_folder

PROC = Path("/proc")
START = 22 - 3  # field of /proc/<pid>/stat, counted from the one behind the name, which may have spaces


@dataclass(frozen=True)
class RunningServer:
    """A server that runs.

    Attributes:
        model: name of the model for clients.
        url: address.
        pid: id of the process.
        start: start of the process, in clock ticks since the machine's.
        machine: id of the machine's start and of the process's namespace, in which `pid` and `start` are meant.
        since: time.time() of the server's start.
        is_loading: True until the model answers.
        context_length: number of tokens that a sequence may have; None while the model loads, and for replicas.
    """

    model: str
    url: str
    pid: int
    start: int
    machine: str
    since: float
    is_loading: bool = True
    context_length: int | None = None

    @property
    def memory_nbytes(self) -> int:
        """Bytes of memory that the process has now, with what it maps of files; 0 if it has ended."""
        status = dict(line.split(":", 1) for line in lines_of(PROC / str(self.pid) / "status") if ":" in line)
        words = status.get("VmRSS", "").split()
        return int(words[0]) * 1024 if words else 0

    @property
    def _file_name(self) -> str:
        return f"{self.pid}-{self.start}.json"

    def write(self) -> None:
        """Write the server's file, or replace it.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = _folders()[0]
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = folder / f"{self._file_name}.new"
        new.write_text(json.dumps(asdict(self)), encoding="utf-8")
        new.replace(folder / self._file_name)

    def remove(self) -> None:
        """Remove the server's file, if it is there and can be."""
        for folder in _folders():
            with suppress(OSError):
                (folder / self._file_name).unlink()


def this_server(
    model: str, url: str, since: float, is_loading: bool = True, context_length: int | None = None
) -> RunningServer:
    """Return the server that this process is; arguments as the attributes of `RunningServer`."""
    pid = os.getpid()
    return RunningServer(model, url, pid, _start_of(pid), _machine(), since, is_loading, context_length)


def remove_this_server() -> None:
    """Remove the file of the server that this process was, if it is there and can be."""
    this_server("", "", 0.0).remove()


def running_servers() -> list[RunningServer]:
    """Return the user's servers on this machine, oldest first, and remove the files of those that have ended."""
    found = []
    for server in _written():
        if server.machine != _machine():  # of another container, or of a machine that shares the home folder
            continue
        if _start_of(server.pid) == server.start:
            found.append(server)
        else:
            server.remove()
    return sorted(found, key=lambda server: server.since)


def _written() -> Iterator[RunningServer]:
    """Yield what each file says; one that says nothing is left out."""
    for folder in _folders():
        for file in folder.glob("*-*.json"):
            with suppress(OSError, ValueError, TypeError):
                record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                yield RunningServer(**record)


def _folders() -> list[Path]:
    """Return the folders in which files may be; servers write into the first."""
    state = xdg_folder("XDG_STATE_HOME", ".local/state") / "servers"
    has_own = Path(os.environ.get("XDG_RUNTIME_DIR", "")).is_absolute()
    own = [xdg_folder("XDG_RUNTIME_DIR", "") / "servers"] if has_own else []
    return list(dict.fromkeys([*own, state]))  # both variables may name one folder


def _start_of(pid: int) -> int:
    """Return when a process started, in clock ticks since the machine's start; -1 if there is no such process."""
    words = " ".join(lines_of(PROC / str(pid) / "stat")).rpartition(")")[2].split()
    return int(words[START]) if words else -1


def _machine() -> str:
    namespace = PROC / "self" / "ns" / "pid"
    boot = " ".join(lines_of(PROC / "sys" / "kernel" / "random" / "boot_id"))
    return f"{boot} {namespace.readlink() if namespace.is_symlink() else ''}".strip()
