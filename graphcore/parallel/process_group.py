"""A torch.distributed process group of ranks: rank 0's messages, and the residual stream from one rank to another.

    rank 0   tell ------->  all others: hear        JSON in a uint8 tensor; nothing that is executed, no pickle
    rank a   send ------->  rank b: receive         float32, in the order in which both run the layers

If a rank's process ends, the connections to it end, too, and everything that waits for it raises at once. A machine
that vanishes ends no connection, so every wait has a limit. While ranks load, a thread of each exchanges heartbeats
(liveness.py); later an idle rank 0 sends a heartbeat, which all ranks answer.

    while ranks load    all_say, all_say, ...       on every rank, as often; plain data for JSON
    a rank that fails   say_error                   instead of its next all_say, which then raises on all others
    at the end          end_loading                 on every rank
"""

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]  # not exported for type checkers
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions  # type: ignore[attr-defined]  # they have no stubs
from torch.distributed.rendezvous import rendezvous

from graphcore.config.settings import ParallelSettings
from graphcore.errors import ConfigError, ParallelError, ThreadLimitError
from graphcore.parallel.handshake import refuse_any
from graphcore.parallel.launch import Launch, interface_of
from graphcore.parallel.liveness import Liveness
from graphcore.parallel.nccl_transport import NCCLTransport, RankPlace, set_nccl_variables, uses_nccl
from graphcore.parallel.rendezvous import store_of_start
from graphcore.parallel.transport import HostTransport, StagedTransport, Transport

CLOSE = "close"
EVER = timedelta(days=365)
BEAT_LIMIT = timedelta(seconds=30)  # in which all ranks answer a heartbeat: between two passes they only wait for it
CLOSE_LIMIT = timedelta(seconds=10)  # in which all ranks hear that rank 0 closes; one that does not is left behind
PACKET = 2048  # bytes of a message's first part: its length in LENGTH bytes, then its beginning
LENGTH = 8
NOT_ANSWERED = "a rank did not answer"
LOST = "a process has ended, or the network has failed; start all ranks again, or let torchrun do it (--max-restarts)"
INTERFACE = "GLOO_SOCKET_IFNAME"  # where torch looks for the interface of gloo


class SharedConfigError(ConfigError):
    """A ConfigError that all ranks of a ring raise at the same place, because one of them has told the others."""


class ProcessGroup:
    """The ranks that run one model. One thread of a rank at a time may use it.

    Attributes:
        launch: this rank's place.
        failure: error of the rank that was lost; None while all are there.
        limit: most time to wait for another rank in a pass, `parallel.timeout`.
        told: time.monotonic() of the last message.
        waited: seconds that this rank has waited for others.
        transport: way of the residual stream between ranks.
        sharers: number of ranks that this rank's device has to serve.
    """

    def __init__(self, launch: Launch, timeout: timedelta) -> None:
        self.launch, self.limit = launch, timeout
        self.failure: ParallelError | None = None
        self.told, self.waited = time.monotonic(), 0.0
        self.transport: Transport = HostTransport(self._noticing)
        self.sharers = launch.local_world_size
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        with self._noticing(
            f"the ranks did not meet at {place}", "check that all were started, and that the port is free"
        ):
            store, rank, world_size = next(rendezvous("env://", timeout=timeout))
            store = store_of_start(store, rank, world_size, timeout)
            torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            try:
                self._messages: Any = torch.distributed.new_group(timeout=EVER, backend="gloo")  # its type has no name
                beats = ProcessGroupGloo(PrefixStore("beats", store), rank, world_size, timeout)
            except RuntimeError:
                torch.distributed.destroy_process_group()
                raise
        try:
            self._loading: Liveness | None = Liveness(beats, world_size)
        except ThreadLimitError:
            torch.distributed.destroy_process_group()
            raise

    @classmethod
    def join(cls, settings: ParallelSettings) -> "ProcessGroup":
        """Return the process group of the ranks that torchrun has started, of which this process is one.

        Raises:
            ConfigError: torchrun has not started this process, the interface is refused, or the process is in a group.
            ParallelError: the ranks did not meet in time.
        """
        if torch.distributed.is_initialized():
            raise ConfigError(
                "parallel=ring: this process has a process group of torch.distributed already, as of another engine; "
                "close that first (Engine.close), or load the model in a process of its own"
            )
        launch = Launch.of()
        os.environ[INTERFACE] = interface = interface_of(settings, launch)
        set_nccl_variables(interface)
        return cls(launch, timedelta(seconds=settings.timeout))

    def place_on(self, device: torch.device, asked: str) -> None:
        """Choose the transport by where all ranks compute; all call it at once.

        Args:
            device: device that this rank computes on.
            asked: `parallel.transport`.

        Raises:
            ConfigError: NCCL is asked for, and some ranks cannot use it.
            ParallelError: a rank was lost.
        """
        here = RankPlace.of(device)
        places = [RankPlace(*said) for said in self.all_say(here)]
        if uses_nccl(places, asked):
            self.transport = NCCLTransport(self._noticing, self.rank, device, self.limit)
        elif here.gpu:
            self.transport = StagedTransport(self._noticing, device)
        if here.gpu:
            self.sharers = places.count(here)

    def connect(self, owners: Sequence[int]) -> None:
        """Connect the pairs of ranks between which the residual stream goes; all call it at once, while they load.

        Args:
            owners: rank of each layer.

        Raises:
            ParallelError: a rank could not be connected, or was lost; each rank says so at once.
        """
        loading = self._loading
        assert loading is not None, "ranks are connected while they load"
        try:
            self.transport.connect(owners, lambda: loading.has_failure)
        except RuntimeError as error:
            raise self._error("NCCL did not connect the ranks", LOST, error) from error
        self.all_say(None)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.launch.rank

    @property
    def is_lead(self) -> bool:
        """Whether this is rank 0, which has the requests."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.launch.world_size

    def tell(self, message: Any, limit: timedelta | None = None) -> None:
        """Send a message of rank 0, plain data for JSON, to all other ranks.

        Args:
            limit: most time to wait until they receive it; None is `parallel.timeout`.

        Raises:
            ParallelError: a rank was lost.
        """
        self.check()
        self.transport.finish()
        payload = json.dumps(message, separators=(",", ":")).encode()
        whole = torch.zeros(max(PACKET, LENGTH + len(payload)), dtype=torch.uint8, device="cpu")
        whole[:LENGTH] = _bytes(len(payload).to_bytes(LENGTH, "little"))
        whole[LENGTH : LENGTH + len(payload)] = _bytes(payload)
        self.told = time.monotonic()
        with self._noticing("a message did not reach all ranks"):
            self._broadcast(whole[:PACKET], limit)
            if len(whole) > PACKET:
                self._broadcast(whole[PACKET:], limit)

    def hear(self) -> Any:
        """Wait for rank 0's next message and return it.

        Raises:
            ParallelError: rank 0 was lost.
        """
        self.check()
        self.transport.finish()
        with self._noticing("rank 0 says nothing any more"):
            first = self._broadcast(torch.zeros(PACKET, dtype=torch.uint8, device="cpu"))
            length = int.from_bytes(first[:LENGTH].numpy().tobytes(), "little")
            left = LENGTH + length - PACKET
            rest = self._broadcast(torch.zeros(left, dtype=torch.uint8, device="cpu")) if left > 0 else first[:0]
        return json.loads((first[LENGTH:].numpy().tobytes() + rest.numpy().tobytes())[:length])

    def all_say(self, said: Any, limit: timedelta | None = None) -> list[Any]:
        """Return what each rank says, plain data for JSON, in the order of ranks; all call it at once.

        Args:
            limit: most time to wait for the others; None is `parallel.timeout`. There is none while ranks load.

        Raises:
            ParallelError: a rank was lost, or has failed (`say_error`); the message has its error.
        """
        answers = self._exchange([said, None], limit or self.limit)
        try:
            refuse_any([error for _, error in answers], self.rank)
        except ParallelError as error:
            self.failure = error
            raise
        return [found for found, _ in answers]

    def say_error(self, error: Exception) -> None:
        """Take part in the next `all_say` of the other ranks with an error, which they raise; wait until they call it.

        It does nothing if a rank was lost, or another has failed.
        """
        if self.failure is None:
            with suppress(ParallelError):
                self._exchange([None, str(error) or type(error).__name__], self.limit, has_failed=True)

    def check_loading(self) -> None:
        """Check that no rank was lost while ranks load; otherwise do nothing.

        Raises:
            ParallelError: one was.
        """
        if self._loading is not None:
            with self._noticing(NOT_ANSWERED):
                self._loading.check()

    def end_loading(self) -> None:
        """Wait until all ranks have loaded, then stop the heartbeats of loading."""
        if self._loading is not None:
            self._loading.end()
            self._loading = None

    def _exchange(self, said: Any, limit: timedelta, *, has_failed: bool = False) -> list[Any]:
        """Return what each rank says, plain data for JSON."""
        payload = json.dumps(said).encode()
        length = torch.tensor([len(payload)], dtype=torch.int64, device="cpu")
        with self._noticing(NOT_ANSWERED):
            if self._loading is not None:
                self._loading.arrive(has_failed=has_failed)
            lengths = [torch.zeros_like(length) for _ in range(self.world_size)]
            self._gather(lengths, length, limit)
            most = max(int(one) for one in lengths)
            parts = [torch.zeros(most, dtype=torch.uint8, device="cpu") for _ in lengths]
            own = torch.zeros(most, dtype=torch.uint8, device="cpu")
            own[: len(payload)] = _bytes(payload)
            self._gather(parts, own, limit)
        return [json.loads(part[: int(one)].numpy().tobytes()) for part, one in zip(parts, lengths, strict=True)]

    def all_agree(self, is_true: bool) -> bool:
        """Return whether something is true on all ranks, which ask each other at the same point of the same pass."""
        return all(self.all_say(is_true))

    def beat(self) -> None:
        """Check that all ranks answer, between two passes; rank 0 calls it, and the others when they hear of it.

        Raises:
            ParallelError: a rank was lost, or has not answered within `BEAT_LIMIT`.
        """
        if self.is_lead:
            self.tell({"call": "beat"}, BEAT_LIMIT)
        self.all_say(None, BEAT_LIMIT)

    def send(self, hidden: Tensor, target: int, tag: int) -> None:
        """Begin to send numbers to a rank; they may change at once.

        Raises:
            ParallelError: the rank was lost.
        """
        self.transport.send(hidden, target, tag)

    def receive(self, hidden: Tensor, source: int, tag: int) -> None:
        """Have the next numbers that a rank sends with this tag in a tensor, for all work enqueued afterwards.

        Raises:
            ParallelError: the rank was lost, or has sent nothing for `parallel.timeout` seconds.
        """
        self.transport.receive(hidden, source, tag)

    def check(self) -> None:
        """Check that no rank was lost.

        Raises:
            ParallelError: one was.
        """
        if self.failure is not None:
            raise self.failure

    def refuse_together(self, error: ConfigError | None, rows: Sequence[int] = ()) -> None:
        """Check that every rank accepts the next pass with the same rows. Called on all ranks before the first layer.

        Args:
            error: this rank's error; None if it can run the pass.
            rows: rows of the KV cache that it runs.

        Raises:
            SharedConfigError: a rank refuses, or runs other rows than rank 0; all ranks raise it.
            ParallelError: a rank was lost.
        """
        (_, first), *_ = said = self.all_say(["" if error is None else str(error), list(rows)])
        for rank, (refusal, own) in enumerate(said):
            if not refusal and own != first and not said[0][0]:
                refusal = f"has room for rows {own} where rank 0 runs {first}; the KV caches of the ranks differ"
            if refusal:
                raise SharedConfigError(refusal if rank == 0 else f"rank {rank}: {refusal}")

    @contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Leave the group if the block raises: this rank is then not where the others wait for it.

        All ranks raise a `SharedConfigError`, so they stay together.
        """
        try:
            yield
        except SharedConfigError:
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def dismiss(self) -> None:
        """Leave together with the others, whom rank 0 tells that no message follows; at once if a rank was lost."""
        if self.failure is None:
            with suppress(ParallelError):
                if self.is_lead:
                    self.tell({"call": CLOSE}, CLOSE_LIMIT)
                self.all_say(None, CLOSE_LIMIT)  # so that no rank closes its connections while others read
        self.leave()

    def leave(self, error: BaseException | None = None) -> None:
        """Close all connections, unless they are closed; the others then notice that this rank is gone."""
        self.transport.close(is_lost=error is not None or self.failure is not None)
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.close()
        why = "" if error is None else f", because a pass has failed on it: {error}"
        self.failure = self.failure or ParallelError(f"rank {self.rank} has left its process group{why}")
        if self._messages is None:  # and the process may be in another group since
            return
        self._messages = None  # the last reference: threads of a group that is freed at exit would abort the process
        with suppress(RuntimeError, ValueError, AssertionError):  # it may have left before, or half of it failed
            torch.distributed.destroy_process_group()

    def _broadcast(self, part: Tensor, limit: timedelta | None = None) -> Tensor:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, limit or self.limit
        self._messages.broadcast([part], options).wait()
        return part

    def _gather(self, parts: list[Tensor], own: Tensor, limit: timedelta) -> None:
        options = AllgatherOptions()
        options.timeout = limit
        self._messages.allgather([parts], [own], options).wait()

    @contextmanager
    def _noticing(self, what: str, advice: str = LOST, *, counts: bool = True) -> Iterator[None]:
        """Raise and keep a ParallelError if torch.distributed raises inside the block.

        Args:
            advice: what to do then.
            counts: True if the block waits for other ranks, which counts for `waited`.
        """
        began = time.perf_counter()
        try:
            yield
        except RuntimeError as error:
            self.failure = self._error(what, advice, error)
            raise self.failure from error
        finally:
            self.waited += time.perf_counter() - began if counts else 0.0

    def _error(self, what: str, advice: str, error: RuntimeError) -> ParallelError:
        """Return the `ParallelError` that names this rank, for an error that torch.distributed has raised."""
        reason = re.sub(r"^\[[^]]*\] *", "", str(error).strip()).partition("\n")[0].partition(". ")[0]
        return ParallelError(f"rank {self.rank} of {self.world_size}: {what}: {advice}. {reason}")


def _bytes(raw: bytes) -> Tensor:
    """Return bytes as a tensor, [n] uint8."""
    return (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8, device="cpu")
    )
