"""Turns of calls: one call at a time uses an engine's caches, in order of arrival.

    line   [ holder, next, one after that, ... ]      a stream stays the holder while it is suspended between tokens

Threads wait in line. A call that would wait for itself is refused, such as a call inside the loop over a stream: it
would wait for the stream, and the stream continues only after the call. Each turn puts a mark into the context
(contextvars) of its caller, so that a call knows whether the holder belongs to its own thread or asyncio task, even
through asyncio.to_thread.

Python's garbage collector ends a stream that is no longer referenced, in any thread, between any two instructions.
Ending a turn therefore takes no lock: the line is a deque, whose operations are atomic, and a gate may be opened twice.

A forked process inherits the line, but not the threads that wait in it or compute. A call there is refused before it
waits or runs an operation of torch, which would wait for torch's threads.
"""

import asyncio
import gc
import sys
import threading
import time
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

# Seconds of waiting between two runs of the garbage collector: the holder may be an unreachable stream in a reference
# cycle, and a process that only waits allocates nothing, so that Python would not start the collector.
PATIENCE = 10.0
# Seconds to wait for another thread's run of the collector before a call is refused.
COLLECTION_PATIENCE = 1.0


class Turns:
    """The line of calls that wait for an engine; it lets one at a time compute.

    Attributes:
        is_closed: bool, True once the engine was closed and no call may compute.
    """

    def __init__(self) -> None:
        self._line: deque[Turn] = deque()
        self._computing = threading.Lock()
        self.is_closed = False

    def ask(self, name: str) -> "Turn":
        """Return a turn that has not begun; enter it to wait for it.

        Args:
            name: the called method's name, for messages.
        """
        return Turn(self, name)

    def close(self) -> None:
        """Refuse all further steps, wake the waiting calls with an error, and wait for the step that is under way.

        Raises:
            BusyError: the call is inside that step.
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
        """Check that the engine is open.

        Raises:
            ConfigError: the engine is closed.
        """
        if self.is_closed:
            raise ConfigError("this engine is closed; load it again")

    def enter(self, turn: "Turn") -> None:
        """Put a turn at the end of the line and wait until it is first."""
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
        """Take a turn out of the line, and wake the one that is then first."""
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
        """End the step, so that `close` can continue."""
        self._computing.release()

    def _holder(self) -> "Turn | None":
        try:
            return self._line[0]
        except IndexError:
            return None

    def _refuse_deadlock(self, turn: "Turn") -> None:
        if self._deadlock_of(turn):
            collect_garbage()  # the holder may be an unreachable stream in a reference cycle
        reason = self._deadlock_of(turn)
        if reason:
            raise BusyError(reason)

    def _deadlock_of(self, turn: "Turn") -> str:
        """Return why the turn must not wait; empty if it may."""
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
    """A context manager in which one call uses the engine; entering it waits for all calls before it.

    Attributes:
        name: str, the called method's name.
        mark: DriverMark, identity of the thread or asyncio task that drives the turn.
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

    def step(self) -> "TurnStep":
        """Return a context manager to compute in; between two steps a turn may be suspended and change its thread."""
        return TurnStep(self, self._turns)

    def wait_at_gate(self) -> None:
        """Wait until the turn is first in line, or the engine is closed."""
        while not self._gate.acquire(timeout=PATIENCE):
            gc.collect()

    def open_gate(self) -> None:
        """Wake the turn if it waits, or let its next wait return at once."""
        with suppress(RuntimeError):  # it is open already
            self._gate.release()

    def follow(self) -> None:
        """Move the mark to the calling thread or task if that has taken the turn over."""
        if not self.mark.is_here():
            self.mark = DriverMark.put_here()


class TurnStep:
    """A part of a turn in which something is computed; entering it raises ConfigError if the engine was closed.

    It is entered for every token, so it is a class: 2 us, against 7 us for two generator-based context managers.
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
    """A mark in the context of the thread or asyncio task that drives a turn.

    Contexts hold weak references, so that a mark does not outlive its turn. A thread of a pool runs unrelated jobs in
    one context, so a mark that was put there is valid for its job only.
    """

    def __init__(self, job: "_WorkItem[object] | None") -> None:
        self._job = None if job is None else weakref.ref(job)

    @classmethod
    def put_here(cls) -> Self:
        """Put a new mark into the caller's context and return it."""
        mark = cls(_pool_job())
        _marks.set((*(known for known in _marks.get() if known() is not None), weakref.ref(mark)))
        return mark

    def is_here(self) -> bool:
        """Return whether the caller is the one that drives the turn."""
        if all(known() is not self for known in _marks.get()):
            return False
        job = None if self._job is None else self._job()
        return self._job is None or (job is not None and job is _pool_job())


# contextvars belong at module level; marks are compared by identity, so that engines do not affect one another.
_marks: ContextVar[tuple[weakref.ref[DriverMark], ...]] = ContextVar("graphcore_marks", default=())


def collect_garbage() -> None:
    """Run the garbage collector in this thread, if need be after another thread's run.

    `gc.collect` returns at once while another thread collects, even if that run began before the garbage existed. In a
    finalizer of this thread's own run nothing is collected, so the attempts end after COLLECTION_PATIENCE seconds.
    """
    here, has_run = threading.get_ident(), threading.Event()

    def note_run(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2 and threading.get_ident() == here:
            has_run.set()

    gc.callbacks.append(note_run)
    try:
        end = time.monotonic() + COLLECTION_PATIENCE
        gc.collect()
        while not has_run.is_set() and time.monotonic() < end:
            time.sleep(0.001)
            gc.collect()
    finally:
        gc.callbacks.remove(note_run)


def _pool_job() -> "_WorkItem[object] | None":
    """Return the job of a concurrent.futures thread pool that this call runs in; None outside a pool."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _WorkItem.run.__code__:
            job: _WorkItem[object] = frame.f_locals["self"]
            return job
        frame = frame.f_back
    return None


def _runs_event_loop() -> bool:
    """Return whether the calling thread is running an asyncio event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
