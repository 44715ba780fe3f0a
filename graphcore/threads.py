"""Threads: one function starts them all, and one line names the limit of the system that is in the way.

Linux counts processes and threads together. It limits them for a control group (`pids.max`, which containers set), for
a user (RLIMIT_NPROC, which `ulimit -u` sets) and for the machine (`kernel.threads-max`). torch's thread pool, libgomp,
ends the whole process at such a limit, so there must be room before torch computes (`refuse_many_threads`).
"""

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from graphcore.cgroups import ROOT, group_folders, lines_of
from graphcore.errors import ThreadLimitError

NO_THREAD = "can't start new thread"  # the RuntimeError of Python's threads when the system starts none
UNLIMITED_BY_USER = (1 << 21) | (1 << 24)  # CAP_SYS_ADMIN and CAP_SYS_RESOURCE; source: capabilities(7), setrlimit(2)
ENGINE_THREADS = "the engine's thread and torch's threads beside it"
Inputs = ParamSpec("Inputs")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ThreadLimit:
    """A limit of processes and threads.

    Attributes:
        name: name of the limit, with its file if it has one.
        most: number of processes and threads that it allows.
        used: number of those that exist.
        advice: how to raise it.
    """

    name: str
    most: int
    used: int
    advice: str


class EngineThread(threading.Thread):
    """A thread that computes for an engine."""


def is_interpreter_ending() -> bool:
    """Return whether the main thread has ended, and no other thread is left that the interpreter waits for."""
    if threading.main_thread().is_alive():
        return False
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return all(isinstance(thread, EngineThread) or thread.daemon for thread in others)


def start_thread(
    work: Callable[[], object], name: str, *, daemon: bool = True, kind: type[threading.Thread] = threading.Thread
) -> threading.Thread:
    """Start a thread that calls a function, and return it.

    Args:
        daemon: True if the interpreter does not wait for the thread when it ends.
        kind: class of the thread.

    Raises:
        ThreadLimitError: the system does not start it.
    """
    thread = kind(target=work, name=name, daemon=daemon)
    with naming_limit(f"thread {name}"):
        thread.start()
    return thread


def start_threads(works: Mapping[str, Callable[[], object]]) -> list[threading.Thread]:
    """Start a daemon thread for each function: all of them or, if the system does not start that many, none.

    Args:
        works: function that each thread calls, by the thread's name.

    Raises:
        ThreadLimitError: a thread could not be started. No function was called, and the other threads have ended.
    """
    may_go, goes = threading.Event(), [False]

    def run(work: Callable[[], object]) -> None:
        may_go.wait()
        if goes[0]:
            work()

    started: list[threading.Thread] = []
    try:
        for name, work in works.items():
            thread = threading.Thread(target=run, args=(work,), name=name, daemon=True)
            with naming_limit(f"thread {name} of {len(works)}", len(works) - len(started)):
                thread.start()
            started.append(thread)
        goes[0] = True
    finally:
        may_go.set()
        if not goes[0]:  # Ctrl-C, too
            for thread in started:
                thread.join()
    return started


@contextmanager
def naming_limit(what: str, needed: int = 1) -> Iterator[None]:
    """Raise the error that names the limit if the system starts no thread or process inside the block.

    Args:
        what: what is started, for the message.
        needed: number of threads and processes that are started.

    Raises:
        ThreadLimitError: the system does not start one.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if NO_THREAD in str(error) or (isinstance(error, OSError) and error.errno == errno.EAGAIN):
            raise limit_error(f"{what} cannot be started", needed) from error
        raise


def limit_error(what: str, needed: int) -> ThreadLimitError:
    """Return the error of threads or processes that the system did not start.

    Args:
        what: what could not be started.
        needed: number of threads and processes that were still needed.
    """
    limit = next(tight_limits(needed), None)
    if limit is None:
        return ThreadLimitError(
            f"{what}: the system starts no more, though no limit of processes and threads is reached; there may be too "
            "little memory for its stack (ulimit -v, ulimit -s)"
        )
    return ThreadLimitError(
        f"{what}: {limit.name} allows {limit.most} processes and threads, and {limit.used} exist; {limit.advice}, or "
        "end others under it"
    )


def refuse_many_threads(needed: int, what: str) -> None:
    """Check that the system has room for more threads that code outside Python will start, as far as limits tell.

    Args:
        needed: number of threads that will be started.
        what: what needs them, for the message.

    Raises:
        ThreadLimitError: a limit leaves room for fewer.
    """
    if needed > 0 and next(tight_limits(needed), None) is not None:
        raise limit_error(f"{what} ({needed} in all; the setting threads changes that) cannot be started", needed)


def tight_limits(needed: int, root: Path = ROOT) -> Iterator[ThreadLimit]:
    """Yield the limits that do not leave room for that many more threads.

    Args:
        root: root folder of the file system; another one in tests.
    """
    for folder, _ in group_folders("pids", root):
        (most,), (used,) = (lines_of(folder / name) or [""] for name in ("pids.max", "pids.current"))
        if most.isdecimal() and used.isdecimal() and int(most) - int(used) < needed:  # "max" means no limit
            yield ThreadLimit(str(folder / "pids.max"), int(most), int(used), "raise it (docker run --pids-limit)")
    words = " ".join(lines_of(root / "proc/loadavg")).split()  # source: proc(5); the fourth is "running/all"
    everything = int(words[3].partition("/")[2]) if len(words) == 5 else 0
    allowed = _user_limit(root)
    if allowed is not None and allowed - everything < needed:  # else the user's cannot be too many
        used_by_user = _threads_of_user(root)
        if allowed - used_by_user < needed:
            yield ThreadLimit("the user's limit (RLIMIT_NPROC)", allowed, used_by_user, "raise it (ulimit -u)")
    machine = " ".join(lines_of(root / "proc/sys/kernel/threads-max"))
    if machine.isdecimal() and int(machine) - everything < needed:
        yield ThreadLimit("the machine's kernel.threads-max", int(machine), everything, "raise it (sysctl)")


def _user_limit(root: Path) -> int | None:
    """Return how many threads this process's user may have; None if there is no limit for it."""
    if sys.platform == "win32":
        return None
    import resource  # not on Windows

    allowed, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    rights = _status(root / "proc/self/status").get("CapEff", "0")
    if allowed == resource.RLIM_INFINITY or os.getuid() == 0 or int(rights, 16) & UNLIMITED_BY_USER:
        return None
    return allowed


def _threads_of_user(root: Path) -> int:
    """Return how many threads the user of this process has, as far as /proc shows them."""
    found = (_status(path) for path in (root / "proc").glob("[0-9]*/status"))
    own = str(os.getuid())
    return sum(int(status["Threads"]) for status in found if status.get("Uid", "").split()[:1] == [own])


def _status(path: Path) -> dict[str, str]:
    """Return the fields of a process's status; none if it has ended. Source: proc(5), /proc/<pid>/status."""
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines_of(path))}


class ThreadPool(ThreadPoolExecutor):
    """A pool whose threads do all work also where the system starts fewer of them than the pool may have."""

    _has_thread = False  # whether one was started; it lives until the pool is shut down

    def submit(self, work: Callable[Inputs, Result], /, *given: Inputs.args, **named: Inputs.kwargs) -> Future[Result]:
        """Call a function in one of the threads.

        Raises:
            ThreadLimitError: the system does not start the first thread.
            RuntimeError: the pool was shut down.
        """
        answer: Future[Result] = Future()

        def run() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(work(*given, **named))
            except BaseException as error:  # noqa: BLE001  # raised for the caller of `result`
                answer.set_exception(error)

        try:
            with naming_limit("a thread for this work"):
                super().submit(run)
        except ThreadLimitError:
            if not self._has_thread:
                answer.cancel()  # the pool keeps the work, for a thread that it may start later
                raise
        self._has_thread = True
        return answer
