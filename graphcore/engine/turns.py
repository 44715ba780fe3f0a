"""Whose turn it is: one call at a time uses an engine's caches, in the order in which the calls came.

    line   [ holder, next, one after that, ... ]      a stream stays the holder while it is suspended between tokens

Threads wait in line. Who would wait for itself is refused: a call inside the loop over a stream waits for a stream that
goes on only after the call. Each turn has a mark in the context (contextvars) of whoever drives it, so that a call
knows whether the holder is its own thread's, or its own asyncio task's, even through asyncio.to_thread.

A forgotten stream is ended by Python's garbage collector, in any thread, between any two of its instructions. So there
is no lock that a turn's end would have to take: the line is a deque, whose operations are single steps, and opening a
gate twice is no harm.

A forked process has this line, and none of the threads that stand in it or compute: whoever asks there is refused
before it waits for anything or runs any of torch's operations, which would wait for torch's threads.
"""

import asyncio
import gc
import sys
import threading
import weakref
from collections import deque
from concurrent.futures.thread import _WorkItem
from contextlib import suppress
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Self

import torch

from graphcore.errors import BusyError, ConfigError
from graphcore.processors import refuse_forked

# Seconds of waiting after which unreachable objects are looked for, again and again: the holder may be a stream in a
# cycle of references, and a process that only waits makes no garbage that would have Python look.
PATIENCE = 10.0


class Turns:
    """Lets one call at a time use an engine.

    Attributes:
        is_closed: bool, nobody computes any more.
    """

    def __init__(self) -> None:
        self._line: deque[Turn] = deque()
        self._computing = threading.Lock()
        self.is_closed = False

    def ask(self, name: str) -> "Turn":
        """Return a turn that has not begun; enter it to wait for it.

        Args:
            name: of the method that is called, for messages.
        """
        return Turn(self, name)

    def close(self) -> None:
        """Wait for the step that is under way, if any; from then on nobody computes, and who waits gets an error.

        Raises:
            BusyError: it is called from inside that step.
        """
        holder = self._holder()
        if holder is not None and self._computing.locked() and holder.mark.is_here():
            raise BusyError(f"close() was called inside {holder.name}() of the same engine; let that return first")
        self.is_closed = True
        for turn in self._line.copy():
            turn.open_gate()
        with self._computing:
            return

    def check_open(self) -> None:
        """Return if the engine can still be used.

        Raises:
            ConfigError: it is closed.
        """
        if self.is_closed:
            raise ConfigError("this engine is closed; load it again")

    def enter(self, turn: "Turn") -> None:
        """Wait until it is that turn; see `Turn`."""
        refuse_forked(torch.get_num_threads())
        try:
            self._line.append(turn)
            self.check_open()
            while self._line[0] is not turn:
                self._refuse_deadlock(turn)
                turn.wait_at_gate()
                self.check_open()
        except BaseException:
            self.leave(turn)
            raise

    def leave(self, turn: "Turn") -> None:
        """End a turn, or take it out of the line; whoever is first then goes on."""
        with suppress(ValueError):
            self._line.remove(turn)
        holder = self._holder()
        if holder is not None:
            holder.open_gate()

    def begin_step(self) -> None:
        """Hold off `close` until `end_step`.

        Raises:
            ConfigError: the engine is closed.
            GraphError: this process was forked from the one that loaded the model, and computes with several threads.
        """
        refuse_forked(torch.get_num_threads())
        self._computing.acquire()
        if self.is_closed:
            self._computing.release()
            self.check_open()

    def end_step(self) -> None:
        """Let `close` go on."""
        self._computing.release()

    def _holder(self) -> "Turn | None":
        try:
            return self._line[0]
        except IndexError:
            return None

    def _refuse_deadlock(self, turn: "Turn") -> None:
        if self._deadlock_of(turn):
            gc.collect()  # the holder may be a stream that nobody can reach any more, in a cycle of references
        reason = self._deadlock_of(turn)
        if reason:
            raise BusyError(reason)

    def _deadlock_of(self, turn: "Turn") -> str:
        """Return why the turn must not wait, or nothing if it may."""
        holder = self._holder()
        if holder is None or holder is turn:
            return ""
        if holder.mark.is_here():
            return (
                f"{turn.name}() was called inside {holder.name}() of the same engine and would wait for it for ever; "
                "run that to its end first (a stream may be closed: events.close()), or load a second engine"
            )
        if _runs_event_loop():
            return (
                f"{turn.name}() would stop this thread's event loop until another task or thread has ended "
                f"{holder.name}() of the same engine; call it with asyncio.to_thread, or load a second engine"
            )
        return ""


class Turn:
    """A context manager: entered when everybody who asked before has left.

    Attributes:
        name: str, the method that was called.
        mark: where whoever drives it stands.
    """

    def __init__(self, turns: Turns, name: str) -> None:
        self.name = name
        self.mark = DriverMark.put_here()
        self._turns = turns
        self._gate = threading.Lock()
        self._gate.acquire()

    def __enter__(self) -> Self:
        self.follow()
        self._turns.enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.leave(self)

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed."""
        return self._turns.is_closed

    def step(self) -> "Step":
        """Return a context manager to compute in; a turn may be suspended between two, and go on in another thread."""
        return Step(self, self._turns)

    def wait_at_gate(self) -> None:
        """Wait until the turn is first in line, or the engine is closed."""
        while not self._gate.acquire(timeout=PATIENCE):
            gc.collect()

    def open_gate(self) -> None:
        """Let the turn go on, if it waits or when it comes to wait."""
        with suppress(RuntimeError):  # it is open already
            self._gate.release()

    def follow(self) -> None:
        """Move the mark, where another thread has taken the turn over."""
        if not self.mark.is_here():
            self.mark = DriverMark.put_here()


class Step:
    """A part of a turn in which something is computed; entering it raises ConfigError where the engine was closed.

    It is entered for every token, so it is a class: 2 us, where two context managers made of generators took 7.
    """

    def __init__(self, turn: Turn, turns: Turns) -> None:
        self._turn, self._turns = turn, turns

    def __enter__(self) -> None:
        self._turn.follow()
        self._turns.begin_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.end_step()


class DriverMark:
    """Tells who drives a turn. Contexts know it weakly, so that nothing outlives its turn.

    Threads of a pool do unrelated jobs in one context, so a mark that was put there is good for that job only.
    """

    def __init__(self, job: "_WorkItem[object] | None") -> None:
        self._job = None if job is None else weakref.ref(job)

    @classmethod
    def put_here(cls) -> Self:
        """Return a new mark, in the context of whoever calls."""
        mark = cls(_pool_job())
        _marks.set((*(known for known in _marks.get() if known() is not None), weakref.ref(mark)))
        return mark

    def is_here(self) -> bool:
        """Return whether whoever calls is the one that drives the turn."""
        if all(known() is not self for known in _marks.get()):
            return False
        job = None if self._job is None else self._job()
        return self._job is None or (job is not None and job is _pool_job())


# contextvars are made for module level; marks are told apart by identity, so engines do not meet in it.
_marks: ContextVar[tuple[weakref.ref[DriverMark], ...]] = ContextVar("graphcore_marks", default=())


def _pool_job() -> "_WorkItem[object] | None":
    """Return the job of a concurrent.futures thread pool that this call is part of, or None if it is of none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _WorkItem.run.__code__:
            job: _WorkItem[object] = frame.f_locals["self"]
            return job
        frame = frame.f_back
    return None


def _runs_event_loop() -> bool:
    """Return whether this thread runs an asyncio event loop now."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
