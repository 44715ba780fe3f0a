"""NCCL between GPUs, each of which belongs to one rank.

NCCL gives each pair of ranks a queue in which the transfers of a process group run one after another, each when both
ends have come to it. Two programs of a pass may be under way between the same two ranks, one in each direction, so each
direction has a process group of its own. In one direction all ranks have the same order: that of the runs of layers,
and of the programs of a pass in each.

A transfer of a rank that was lost never ends, nor does anything behind it on the device, and the host would wait for
ever. So the host waits for no device before it has a note of each hand-over by gloo, which a rank sends when its device
has computed what it sends; gloo notices a lost rank.

    pass with prompts, or weights stream    the note, then the transfer is enqueued
    pass of captured decode steps           all transfers and steps are enqueued at once, `settle` then waits for notes
"""

import os
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed
from torch import Tensor

from graphcore.errors import ConfigError
from graphcore.parallel.share import handed_pairs
from graphcore.parallel.transport import Noticing, Transport
from graphcore.threads import start_thread

POLL = 2e-5  # seconds between two looks at a mark of the device
POLL_THREAD = 0.02  # seconds between two looks at whether work in a thread is still needed
ABORT_LIMIT = timedelta(seconds=10)  # for NCCL's communicators to end, when a rank was lost
SPARE = timedelta(seconds=60)  # that NCCL's own watchdog waits longer than this module
NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # the watchdog aborts communicators; by default it ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no thread that ends the process
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # no files, and no key in the store that ranks of the next start would find
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # the watchdog waits four times as long before it aborts
}
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"  # where NCCL looks for its interface; "=" begins a whole name


class RankPlace(NamedTuple):
    """The device that a rank computes on.

    Attributes:
        gpu: name of its GPU that no other GPU of any machine has; empty for a CPU.
        has_nccl: True if its torch has NCCL.
    """

    gpu: str
    has_nccl: bool

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Return where a rank with this device computes."""
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return cls(gpu, torch.distributed.is_nccl_available())


def uses_nccl(places: Sequence[RankPlace], asked: str) -> bool:
    """Return whether the residual stream goes from GPU to GPU by NCCL.

    Args:
        places: place of each rank.
        asked: "auto", "nccl" or "gloo".

    Raises:
        ConfigError: NCCL is asked for, and some ranks cannot use it.
    """
    obstacle = _obstacle(places)
    if asked == "nccl" and obstacle:
        raise ConfigError(f"parallel.transport=nccl: {obstacle}; use parallel.transport=auto")
    return not obstacle and asked != "gloo"


def _obstacle(places: Sequence[RankPlace]) -> str:
    """Return why NCCL cannot be used; empty if it can."""
    for rank, place in enumerate(places):
        if not place.gpu:
            return f"rank {rank} computes on a CPU"
        if not place.has_nccl:
            return f"torch has no NCCL on rank {rank}"
        first = places.index(place)
        if first < rank:
            return f"ranks {first} and {rank} have the same GPU"
    return ""


class _Sent(NamedTuple):
    """A hand-over that was enqueued, and is not settled.

    Attributes:
        number: number of the hand-over among those to this rank.
        mark: mark behind the work that computes the numbers.
        copied: copy that is sent.
    """

    target: int
    tag: int
    number: int
    mark: torch.cuda.Event
    copied: Tensor
    work: Any


class _Received(NamedTuple):
    """A transfer that was enqueued before its note has come; attributes as in `_Sent`."""

    source: int
    tag: int
    number: int


class NCCLTransport(Transport):
    """Sends the residual stream from GPU to GPU with NCCL; each GPU belongs to one rank.

    Args:
        rank: number of this rank.
        device: its GPU.
        limit: most time to wait for another rank in a pass.
        backend: backend of torch.distributed for the transfers.
    """

    def __init__(
        self, noticing: Noticing, rank: int, device: torch.device, limit: timedelta, backend: str = "nccl"
    ) -> None:
        self._noticing, self._rank, self._device, self._limit = noticing, rank, device, limit
        groups = (torch.distributed.new_group(timeout=limit + SPARE, backend=backend) for _ in range(2))
        self._to_higher, self._to_lower = groups
        self._connected: set[tuple[int, int]] = set()
        self._pending: list[_Sent | _Received] = []
        self._sent: list[_Sent] = []
        self._notes: list[tuple[Tensor, Any]] = []
        self._numbers: dict[tuple[int, int], int] = {}

    def connect(self, owners: Sequence[int], is_over: Callable[[], bool]) -> None:
        """Make a communicator for each pair and direction, in an order that is the same on all ranks."""
        pairs = [pair for pair in sorted(handed_pairs(owners)) if pair not in self._connected]
        if within(self._limit, lambda: self._exchange(pairs), "NCCL's communicators", is_over):
            self._connected.update(pairs)

    def send(self, hidden: Tensor, target: int, tag: int) -> None:
        """Enqueue a copy and its transfer."""
        copied = hidden.clone(memory_format=torch.contiguous_format)
        mark = self._mark()
        with self._noticing(f"rank {target} takes nothing any more"):
            work = torch.distributed.isend(copied, target, group=self._group(self._rank, target))
        self._pending.append(_Sent(target, tag, self._number(self._rank, target), mark, copied, work))
        if not self.runs_ahead:
            self.settle()

    def receive(self, hidden: Tensor, source: int, tag: int) -> None:
        """Enqueue the transfer, after its note unless the pass runs ahead."""
        received = _Received(source, tag, self._number(source, self._rank))
        if self.runs_ahead:
            self._pending.append(received)
        else:
            self._await_note(received)
        with self._noticing(f"rank {source} sends nothing any more"):
            work = torch.distributed.irecv(hidden, source, group=self._group(source, self._rank))
            assert work is not None, "this rank is one of the group"
            work.wait()  # not the host: the current stream waits

    def settle(self) -> None:
        """Exchange the ready messages (notes) of all transfers in order, then synchronize with the device."""
        pending, self._pending = self._pending, []
        for one in pending:
            if isinstance(one, _Received):
                self._await_note(one)
            else:
                self._give_note(one)
        if not any(isinstance(one, _Received) for one in pending):
            return
        with self._noticing("the device does not end the pass", counts=False):
            self._await(self._mark())

    def finish(self) -> None:
        """Wait until all ready messages (notes) arrived; the stream then waits for the sends. Free their copies."""
        with self._noticing("a rank takes nothing any more"):
            for _, work in self._notes:
                work.wait()
            for sent in self._sent:
                sent.work.wait()  # not the host: the current stream waits
        self._notes.clear()
        self._sent.clear()

    def close(self, *, is_lost: bool) -> None:
        """Drop what is under way; if a rank was lost, abort the communicators, for which kernels may be waiting."""
        for each in (self._pending, self._notes, self._sent):
            each.clear()
        if is_lost:
            with suppress(RuntimeError, ValueError, AssertionError):  # the groups may be gone already
                within(ABORT_LIMIT, self._abort, "NCCL's abort")

    def _give_note(self, sent: _Sent) -> None:
        """Wait until the device has computed what it sends, and tell the rank that gets it."""
        with self._noticing("the device does not end a step", counts=False):
            self._await(sent.mark)
        note = torch.tensor([sent.number], dtype=torch.int64, device="cpu")
        with self._noticing(f"rank {sent.target} takes nothing any more"):
            self._notes.append((note, torch.distributed.isend(note, sent.target, tag=sent.tag)))
        self._sent.append(sent)

    def _await_note(self, received: _Received) -> None:
        """Wait until a rank's device has computed what it sends."""
        note = torch.zeros(1, dtype=torch.int64, device="cpu")
        with self._noticing(f"rank {received.source} sends nothing any more"):
            torch.distributed.recv(note, received.source, tag=received.tag)
            if int(note) != received.number:
                raise RuntimeError(
                    f"rank {received.source} sent hand-over {int(note)} where {received.number} was to come"
                )

    def _group(self, source: int, target: int) -> Any:
        """Return the process group of a direction."""
        return self._to_higher if source < target else self._to_lower

    def _number(self, source: int, target: int) -> int:
        """Return the number of the next hand-over between two ranks, and count it."""
        number = self._numbers.get((source, target), 0)
        self._numbers[source, target] = number + 1
        return number

    def _mark(self) -> torch.cuda.Event:
        """Return a mark behind all work enqueued so far."""
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch does not type it
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def _await(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has done all work before an event.

        Raises:
            RuntimeError: it is not, within the limit.
        """
        end = time.monotonic() + self._limit.total_seconds()
        while not mark.query():  # type: ignore[no-untyped-call]  # as above
            if time.monotonic() > end:
                raise RuntimeError("its work did not end within parallel.timeout")
            time.sleep(POLL)

    def _exchange(self, pairs: Collection[tuple[int, int]]) -> None:
        """Send a number from the first to the second rank of each pair, and check it."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # this may be a thread of its own
        for source, target in [pair for pair in pairs if self._rank in pair]:
            sends = self._rank == source
            peer, move = (target, torch.distributed.isend) if sends else (source, torch.distributed.irecv)
            number = torch.full((1,), source if sends else -1, dtype=torch.int64, device=self._device)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*unbatched P2P op")  # a communicator of two is wanted
                work = move(number, peer, group=self._group(source, target))
                assert work is not None, "this rank is one of the group"
                work.wait()
            self._await(self._mark())
            if int(number) != source:
                raise RuntimeError(f"NCCL brought {int(number)} from rank {source}, which had sent {source}")

    def _abort(self) -> None:
        for group in (self._to_higher, self._to_lower):
            torch.distributed.distributed_c10d._abort_process_group(group)


def within(limit: timedelta, work: Callable[[], None], what: str, is_over: Callable[[], bool] = lambda: False) -> bool:
    """Do work that may never end, in a thread that is left behind if it has not ended in time; return if it has ended.

    Args:
        is_over: function that returns True when the work is not needed any more.

    Raises:
        RuntimeError: it has not ended within the limit.
        Exception: the work has raised it.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            errors.append(error)

    thread = start_thread(run, "graphcore-nccl")
    end = time.monotonic() + limit.total_seconds()
    while thread.is_alive() and not is_over():
        if time.monotonic() > end:
            raise RuntimeError(f"{what} did not come within {limit.total_seconds():g} s")
        thread.join(POLL_THREAD)
    if errors:
        raise errors[0]
    return not thread.is_alive()


def set_nccl_variables(interface: str) -> None:
    """Tell NCCL and torch's watchdog their interface, and that a lost rank ends communicators and not the process."""
    os.environ[NCCL_INTERFACE] = f"={interface}"
    for name, value in NCCL_VARIABLES.items():
        os.environ.setdefault(name, value)
