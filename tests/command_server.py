"""A process that has imported torch, and forks for every command or Python program that it is asked to run.

    test --request, files--> server --fork--> keeper --fork--> the program
    test <----process id, then exit status---- keeper

Importing torch is most of what a short run takes. Each program still runs in a process of its own, in the folder, with
the environment and over the files that it was given, and ends as the interpreter ends, but for giving memory back:
threads are waited for, exit handlers run, streams are flushed. Arguments: a socket's number, and "graphcore" to import
graphcore as well, or "torch" for programs that import a graphcore of their own.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch  # noqa: F401 - what this process is there for

REQUEST_NBYTES = 1 << 17  # of a message, at most: arguments and environment
BROKEN_OUTPUT = 120  # exit status of an interpreter that cannot flush its streams


def import_graphcore() -> None:
    """Import what a run of most tasks imports."""
    import graphcore.cli.main
    import graphcore.cli.single_run
    import graphcore.engine.engine
    import graphcore.tasks.commands.generate
    import graphcore.tasks.report.console  # noqa: F401


def serve(asking: socket.socket, base_path: list[str]) -> None:
    """Fork a keeper for each request, which answers over the request's own socket."""
    keepers = set[int]()
    while True:
        message, files, _, _ = socket.recv_fds(asking, REQUEST_NBYTES, 4)
        if not message:
            return
        keeper = os.fork()
        if keeper == 0:
            asking.close()
            keep(json.loads(message), files, base_path)
        for file in files:
            os.close(file)
        keepers = {running for running in keepers | {keeper} if os.waitpid(running, os.WNOHANG)[0] == 0}


def keep(request: dict[str, Any], files: list[int], base_path: list[str]) -> NoReturn:
    """Fork the program, and say over the last of the files which process it is, and how it ended."""
    *standard, answering = files
    child = os.fork()
    if child == 0:
        os.close(answering)
        begin(request, standard, base_path)
        end(lambda: run(request))
    for file in standard:
        os.close(file)
    os.write(answering, str(child).encode())
    _, status = os.waitpid(child, 0)
    os.write(answering, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def begin(request: dict[str, Any], standard: list[int], base_path: list[str]) -> None:
    """Give this process what a terminal's new interpreter gets: files, folder, environment, arguments, and signals.

    Tests that run in a script's background, or under nohup, ignore Ctrl-C or the loss of a terminal.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    if request["has_terminal"]:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    is_shown = os.isatty(1)
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", 1 if is_shown else -1, encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    script = request["script"]
    first = str(Path(script).parent) if script else ""
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *base_path]
    sys.argv = [script or ("graphcore" if request["code"] is None else "-c"), *request["arguments"]]


def run(request: dict[str, Any]) -> None:
    """Run the script or the code of a request; without either, the command line."""
    if request["script"]:
        runpy.run_path(request["script"], run_name="__main__")
    elif request["code"] is not None:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102 - as `python -c` does
    else:
        from graphcore.cli.main import main

        main()


def end(program: Callable[[], None]) -> NoReturn:
    """Run the program and end the process as the interpreter does, but leave its memory to the system."""
    status = 0
    try:
        program()
    except SystemExit as ended:
        is_number = ended.code is None or isinstance(ended.code, int)
        status = ended.code or 0 if is_number else 1
        if not is_number:
            print(ended.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - whatever it is, the interpreter shows it
        sys.excepthook(*sys.exc_info())
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            status = BROKEN_OUTPUT
    os._exit(status)


if __name__ == "__main__":
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    base_path = [path for path in sys.path[1:] if path not in given]
    if sys.argv[2] == "graphcore":
        import_graphcore()
    gc.collect()
    gc.freeze()  # no child looks through these objects, or copies the pages that they lie in
    serve(socket.socket(fileno=int(sys.argv[1])), base_path)
