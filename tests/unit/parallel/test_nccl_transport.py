"""How GPU ranks hand over: what is asked of torch.distributed and of CUDA, and in which order."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda
from torch import Tensor

from graphcore.errors import ConfigError
from graphcore.parallel import nccl_transport
from graphcore.parallel.nccl_transport import (
    NCCL_VARIABLES,
    NCCLTransport,
    RankPlace,
    set_nccl_variables,
    uses_nccl,
    within,
)
from graphcore.parallel.share import handed_pairs
from graphcore.parallel.transport import StagedTransport


def never() -> bool:
    """Return that no other rank has failed."""
    return False


CPU, LIMIT = torch.device("cpu"), timedelta(seconds=5)
OWN = [RankPlace("GPU-1", True), RankPlace("GPU-2", True)]


@contextmanager
def noticing(what: str, *, counts: bool = True) -> Iterator[None]:
    """Say what fails."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{what}: {error}") from error


@dataclass
class Wire:
    """Notes what torch.distributed is asked for; every receive brings `value`.

    Attributes:
        log: calls in order: what, of which peer, through which group, None for gloo's.
    """

    log: list[tuple[str, int, Any]] = field(default_factory=list)
    notes: list[int] = field(default_factory=list)
    value: float = 7.0
    groups: int = 0
    aborted: list[Any] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "Wire":
        for name in ("new_group", "isend", "irecv", "recv"):
            monkeypatch.setattr(torch.distributed, name, getattr(self, name))
        monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", self.aborted.append)
        return self

    def new_group(self, timeout: timedelta, backend: str) -> str:
        assert backend == "nccl"
        assert timeout > LIMIT, "NCCL's watchdog is the later one"
        self.groups += 1
        return f"group {self.groups}"

    def isend(self, numbers: Tensor, target: int, group: Any = None, tag: int = 0) -> "Wire":
        self.log.append(("send" if group else f"note {int(numbers)} of {tag}", target, group))
        return self

    def irecv(self, numbers: Tensor, source: int, group: Any) -> "Wire":
        self.log.append(("receive", source, group))
        numbers.fill_(self.value)
        return self

    def recv(self, numbers: Tensor, source: int, tag: int) -> None:
        self.log.append((f"await note of {tag}" if len(numbers) == 1 else "receive", source, None))
        numbers.fill_(self.notes.pop(0) if self.notes else self.value)

    def wait(self) -> None:
        self.log.append(("wait", -1, None))

    def calls(self) -> list[str]:
        """Return what was called, without waits."""
        return [what for what, *_ in self.log if what != "wait"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda.install(monkeypatch)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire().install(monkeypatch)


def transport_of(rank: int = 1) -> NCCLTransport:
    return NCCLTransport(noticing, rank, CPU, LIMIT)


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ([*OWN, RankPlace("", True)], "rank 2 computes on a CPU"),
        ([*OWN, RankPlace("GPU-3", False)], "torch has no NCCL on rank 2"),
        ([*OWN, OWN[0]], "ranks 0 and 2 have the same GPU"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(places: list[RankPlace], reason: str) -> None:
    assert not uses_nccl(places, "auto")
    with pytest.raises(ConfigError, match=rf"parallel\.transport=nccl: {reason}; use parallel\.transport=auto"):
        uses_nccl(places, "nccl")


def test_nccl_is_used_where_it_can_be_and_left_out_where_it_is_not_wanted() -> None:
    assert uses_nccl(OWN, "auto")
    assert uses_nccl(OWN, "nccl")
    assert not uses_nccl(OWN, "gloo")


@pytest.mark.parametrize(
    ("owners", "pairs"),
    [
        ((0, 0, 1, 1), {(0, 1), (1, 0)}),
        ((0, 1, 2), {(0, 1), (1, 2), (2, 0)}),
        ((1, 2, 1, 0), {(0, 1), (1, 2), (2, 1), (1, 0)}),
        ((0, 0), set()),
    ],
)
def test_pairs_are_those_between_which_the_stream_goes(owners: tuple[int, ...], pairs: set[tuple[int, int]]) -> None:
    assert handed_pairs(owners) == pairs


def test_a_gpu_s_stream_is_in_host_memory_before_it_is_sent(
    cuda: FakeCuda, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = torch.arange(4.0)

    def isend(numbers: Tensor, target: int, tag: int) -> Wire:
        cuda.log.append(f"send {numbers.tolist()} to {target}")
        return wire

    monkeypatch.setattr(torch.distributed, "isend", isend)
    transport = StagedTransport(noticing, CPU)
    transport.send(sent, 2, 5)
    sent.zero_()
    assert cuda.log == ["event 0 recorded in main", "event 0 waited for", "send [0.0, 1.0, 2.0, 3.0] to 2"]
    received = torch.zeros(4)
    transport.receive(received, 0, 5)
    assert received.tolist() == [7.0] * 4


@pytest.mark.usefixtures("cuda")
def test_notes_come_before_transfers_in_a_pass_in_which_the_host_may_wait(wire: Wire) -> None:
    transport, wire.notes = transport_of(), [0, 1]
    hidden = torch.zeros(2)
    for place in (4, 6):
        transport.receive(hidden, 0, place)
        transport.send(hidden, 2, place)
    assert wire.calls() == [
        *("await note of 4", "receive", "send", "note 0 of 4"),
        *("await note of 6", "receive", "send", "note 1 of 6"),
    ]
    assert hidden.tolist() == [7.0, 7.0]
    transport.settle()
    assert len(wire.calls()) == 8, "nothing is left to settle"


@pytest.mark.usefixtures("cuda")
def test_a_pass_of_captured_steps_enqueues_everything_before_it_waits(wire: Wire) -> None:
    transport, wire.notes = transport_of(), [0, 0]
    transport.runs_ahead = True
    hidden = torch.zeros(2)
    transport.receive(hidden, 0, 3)
    transport.send(hidden, 2, 3)
    transport.receive(hidden, 2, 3)
    assert wire.calls() == ["receive", "send", "receive"]
    transport.settle()
    assert wire.calls()[3:] == ["await note of 3", "note 0 of 3", "await note of 3"]
    before = len(wire.log)
    transport.finish()
    assert wire.log[before:] == [("wait", -1, None)] * 2, "the note's, and the transfer's, whose copy can then go"


@pytest.mark.usefixtures("cuda")
def test_each_direction_has_a_group_of_its_own(wire: Wire) -> None:
    transport, wire.notes = transport_of(rank=1), [0, 0]
    for peer in (0, 2):
        transport.send(torch.zeros(1), peer, 0)
        transport.receive(torch.zeros(1), peer, 0)
    groups = {(what, peer): group for what, peer, group in wire.log if group}
    assert groups["receive", 0] == groups["send", 2] == "group 1"
    assert groups["send", 0] == groups["receive", 2] == "group 2"


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.usefixtures("cuda")
def test_a_hand_over_that_is_another_one_is_an_error(wire: Wire, runs_ahead: bool) -> None:
    transport, wire.notes = transport_of(), [0, 2]
    transport.runs_ahead = runs_ahead

    def receive_two() -> None:
        for place in (0, 1):
            transport.receive(torch.zeros(1), 0, place)
        transport.settle()

    with pytest.raises(
        RuntimeError, match="rank 0 sends nothing any more: rank 0 sent hand-over 2 where 1 was to come"
    ):
        receive_two()


@pytest.mark.usefixtures("cuda")
def test_a_device_that_does_not_end_its_work_is_an_error_within_the_limit(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = NCCLTransport(noticing, 1, CPU, timedelta(seconds=0.05))
    monkeypatch.setattr("support.fake_cuda.FakeEvent.query", lambda _: False)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"the device does not end a step: its work did not end within parallel\."):
        transport.send(torch.zeros(1), 0, 0)
    assert time.monotonic() - began < 5


@pytest.mark.usefixtures("cuda")
def test_pairs_are_connected_once_and_in_one_order(wire: Wire) -> None:
    transport, wire.value = transport_of(rank=1), 0
    transport.connect((0, 1, 0), never)
    assert [(what, peer) for what, peer, group in wire.log if group] == [("receive", 0), ("send", 0)]
    transport.connect((0, 1, 0), never)
    assert len(wire.calls()) == 2
    wire.value = 3
    with pytest.raises(RuntimeError, match="NCCL brought 3 from rank 2, which had sent"):
        transport.connect((0, 2, 1, 0), never)


@pytest.mark.usefixtures("cuda")
def test_a_rank_stops_connecting_when_another_one_has_failed(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    has_failed, has_ended = threading.Event(), threading.Event()

    def irecv(*arguments: Any, **named: Any) -> Wire:
        if not has_failed.is_set():
            has_failed.set()
            has_ended.wait(5)
        return wire.irecv(*arguments, **named)

    monkeypatch.setattr(torch.distributed, "irecv", irecv)
    transport, began = NCCLTransport(noticing, 1, CPU, timedelta(seconds=60)), time.monotonic()
    wire.value = 0
    transport.connect((0, 1, 0), has_failed.is_set)
    assert time.monotonic() - began < 4
    has_ended.set()
    transport.connect((0, 1, 0), never)
    assert [what for what, peer, group in wire.log if group].count("send") >= 1, "the pairs were not connected yet"


@pytest.mark.usefixtures("cuda")
def test_communicators_are_aborted_only_when_a_rank_was_lost(wire: Wire) -> None:
    transport = transport_of()
    transport.close(is_lost=False)
    assert wire.aborted == []
    transport.close(is_lost=True)
    assert wire.aborted == ["group 1", "group 2"]


def test_work_that_never_ends_is_left_behind_and_errors_are_passed_on() -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        within(LIMIT, fail, "a thing")
    with pytest.raises(RuntimeError, match=r"a thing did not come within 0\.05 s"):
        within(timedelta(seconds=0.05), lambda: time.sleep(0.5), "a thing")


def test_nccl_has_the_interface_of_gloo_and_keeps_what_a_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_transport.os, "environ", {"TORCH_NCCL_ENABLE_MONITORING": "1"})
    set_nccl_variables("wg0")
    assert os.environ == {**NCCL_VARIABLES, "NCCL_SOCKET_IFNAME": "=wg0", "TORCH_NCCL_ENABLE_MONITORING": "1"}
