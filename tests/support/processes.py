"""Running graphcore as people do, in processes, control groups and networks of their own."""

import atexit
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

# Running graphcore as people do: a process of its own, from a folder of its own.

ROOT = Path(__file__).parents[2]
SECONDS = 120


def environment() -> dict[str, str]:
    """Return this process's environment with the package importable from anywhere, and torch compiling as it does."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    return {**kept, "PYTHONPATH": str(ROOT)}


@cache
def command_server(imported: str) -> socket.socket:
    """Return a socket to the process that forks for each program (command_server.py).

    Args:
        imported: package that the process has imported: "graphcore", or "torch" alone.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).parents[1] / "command_server.py"), str(theirs.fileno()), imported]
    subprocess.Popen(command, env=environment(), pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    atexit.register(ours.close)  # which ends the process
    return ours


class Started:
    """A program that runs in a process of its own; what torch imports is there already (command_server.py).

    Attributes:
        pid: process id.
        returncode: exit status; a negative one is the signal that ended it; None while it runs.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        cwd: Path,
        files: Sequence[int],
        script: str = "",
        code: str | None = None,
        has_terminal: bool = False,
        variables: Mapping[str, str] | None = None,
        imported: str = "graphcore",
    ) -> None:
        """Start the command line, or a program.

        Args:
            arguments: arguments behind the program's name.
            cwd: folder that it runs in.
            files: numbers of the files that become its standard streams.
            script: path of a Python file to run instead of the command line.
            code: Python code to run instead of the command line.
            has_terminal: True if the first of the files is a terminal, which the process is to be controlled by.
            variables: environment; None is `environment()`.
            imported: package that the process has imported before: "graphcore", or "torch" alone.
        """
        request = {
            "arguments": list(arguments),
            "cwd": str(cwd),
            "environment": dict(environment() if variables is None else variables),
            "script": script,
            "code": code,
            "has_terminal": has_terminal,
        }
        self._answers, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._answers.settimeout(SECONDS)
        message = [json.dumps(request).encode()]
        with theirs:
            socket.send_fds(command_server(imported), message, [*files, theirs.fileno()])
        self.pid = int(self._answers.recv(16))
        self.returncode: int | None = None

    def wait(self, seconds: float = SECONDS) -> int:
        """Return the exit status; a process that does not end in time is killed."""
        if self.returncode is None:
            self._answers.settimeout(seconds)
            try:
                self.returncode = int(self._answers.recv(16))
            except TimeoutError:
                self.send_signal(signal.SIGKILL)
                raise
            finally:
                self._answers.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the process a signal."""
        os.kill(self.pid, number)


class Piped(Started):
    """A command whose output is read while it runs.

    Attributes:
        stdout: binary stream of what it prints.
        stderr: binary stream of what it says beside that.
    """

    stdout: IO[str]
    stderr: IO[str]

    def __init__(self, *arguments: str, cwd: Path, has_reader: bool = True) -> None:
        """Start a command; without a reader, its output is closed before anything is written."""
        (out, out_end), (error, error_end) = os.pipe(), os.pipe()
        self.stdout, self.stderr = os.fdopen(out, encoding="utf-8"), os.fdopen(error, encoding="utf-8")
        if not has_reader:
            self.stdout.close()
        with Path(os.devnull).open() as nothing:
            super().__init__(arguments, cwd, [nothing.fileno(), out_end, error_end])
        os.close(out_end)
        os.close(error_end)

    def read_errors(self, seconds: float = SECONDS) -> str:
        """Return what the process says beside its output until it has ended."""
        error = self.stderr.read()
        self.wait(seconds)
        return error


def graphcore(
    *arguments: str, cwd: Path, stdin: str = "", stdout: IO[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line and return what it printed, unless that goes to the file `stdout`."""
    return run_program(arguments, cwd, stdin, stdout=stdout)


def run_program(
    arguments: Sequence[str],
    cwd: Path,
    stdin: str = "",
    stdout: IO[str] | None = None,
    seconds: float = SECONDS,
    *,
    script: str = "",
    code: str | None = None,
    variables: Mapping[str, str] | None = None,
    imported: str = "graphcore",
) -> subprocess.CompletedProcess[str]:
    """Run the command line or a program, as `Started` takes them, and return what it printed."""
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as error:
        given.write(stdin)
        given.seek(0)
        files = [file.fileno() for file in (given, stdout or out, error)]
        started = Started(arguments, cwd, files, script, code, False, variables, imported)
        status = started.wait(seconds)
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), error.read())


# What a process sees of its control groups, written under a folder that stands for the root of the file system.


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


# A network of one's own for what a test starts, so that it reaches nothing else and has all ports to itself.

CLONE_NEWNET = 0x40000000  # sched.h
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
IFF_UP = 1  # linux/if.h
REQUEST = "16sh22x"  # struct ifreq: name, flags


@contextmanager
def own_network() -> Iterator[None]:
    """Run the block, and what it starts, in a network with a loopback device alone; without the right to, in this one.

    Only this thread changes its network.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as before:  # noqa: PTH123 - a namespace is no file with a path of its own
        if libc.unshare(CLONE_NEWNET):
            yield
            return
        try:
            switch_on(b"lo")
            yield
        finally:
            if libc.setns(before.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def switch_on(device: bytes) -> None:
    with socket.socket() as any_socket:
        _, flags = struct.unpack(REQUEST, fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack(REQUEST, device, 0)))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack(REQUEST, device, flags | IFF_UP))
