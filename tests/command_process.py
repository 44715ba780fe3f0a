"""Running graphcore as people do: a process of its own, from a folder of its own."""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).parents[1]
SECONDS = 120


def environment() -> dict[str, str]:
    """Return this process's environment with the package importable from anywhere, and torch compiling as it does."""
    kept = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    return {**kept, "PYTHONPATH": str(ROOT)}


@cache
def command_server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the process that forks for each command (command_server.py), and the socket that it listens to."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(Path(__file__).with_name("command_server.py")), str(theirs.fileno())]
    process = subprocess.Popen(command, env=environment(), pass_fds=[theirs.fileno()], start_new_session=True)
    theirs.close()
    ours.settimeout(SECONDS)
    atexit.register(ours.close)  # which ends the process
    return ours, process


def graphcore(*arguments: str, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command line and return what it printed. What it imports is there already; see command_server.py."""
    asking, process = command_server()
    request = {"arguments": arguments, "cwd": str(cwd), "environment": environment()}
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as error:
        given.write(stdin)
        given.seek(0)
        socket.send_fds(asking, [json.dumps(request).encode()], [file.fileno() for file in (given, out, error)])
        try:
            status = int(asking.recv(16))
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            command_server.cache_clear()
            raise
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(arguments, status, out.read(), error.read())
