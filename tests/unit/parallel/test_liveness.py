"""Ranks that load notice at once that another one has ended, wherever they are."""

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]  # not exported

from graphcore.parallel import process_group
from graphcore.parallel.liveness import Liveness

LIMIT = timedelta(seconds=30)
SOON = 5.0  # seconds; far less than the limit, in which nobody waits in these tests


def on_all(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    """Return what each rank's thread returns, or the error that it raises."""
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:  # noqa: BLE001  # tests look at it
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[Liveness]]]:
    """A function that starts the heartbeats of a number of ranks, through real connections."""
    monkeypatch.setenv(process_group.INTERFACE, "lo")
    made: list[Liveness] = []

    def start(ranks: int, interval: float = 0.01) -> list[Liveness]:
        store = HashStore()
        made.extend(
            on_all(ranks, lambda rank: Liveness(ProcessGroupGloo(store, rank, ranks, LIMIT), ranks, LIMIT, interval))
        )
        return made

    yield start
    for one in made:
        one.close()


def noticed(one: Liveness) -> RuntimeError:
    """Return the error with which a rank that reads weights notices that another has ended."""
    end = time.monotonic() + SOON
    while time.monotonic() < end:
        try:
            one.check()
        except RuntimeError as error:
            return error
        time.sleep(0.005)
    raise AssertionError("nobody has noticed")


def test_all_ranks_notice_one_that_ends_while_they_read_weights(ring: Any) -> None:
    first, lost, other, last = ring(4)
    lost.close()  # as the system closes the connections of a process that was killed
    for one in (first, other, last):
        assert isinstance(noticed(one), RuntimeError)
        assert one.has_failure


def test_a_rank_that_answers_no_beat_is_lost_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has vanished closes no connection."""
    monkeypatch.setenv(process_group.INTERFACE, "lo")
    store = HashStore()
    group, _silent = on_all(2, lambda rank: ProcessGroupGloo(store, rank, 2, LIMIT))
    one = Liveness(group, 2, timedelta(seconds=0.2), 0.01)
    assert isinstance(noticed(one), RuntimeError)
    one.close()


class Beat:
    """A beat that does not end at its limit, as over a network whose driver hangs."""

    def __init__(self) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()

    def allgather(self, *_: object) -> "Beat":
        return self

    def wait(self) -> None:
        self.began.set()
        assert self.may_end.wait(60)
        raise RuntimeError("the connection is closed")


def test_closing_does_not_wait_for_a_beat_that_never_ends() -> None:
    hung = Beat()
    one = Liveness(hung, 2, timedelta(seconds=0.05), 0.01)
    assert hung.began.wait(SOON)
    closing = threading.Thread(target=one.close, daemon=True)
    closing.start()
    closing.join(SOON)
    assert not closing.is_alive()
    assert one._thread.is_alive()
    assert one._thread.daemon
    assert one._group is hung, "the group was freed under a beat"
    hung.may_end.set()
    one._thread.join(SOON)
    assert one.has_failure


def test_a_rank_that_waits_for_others_notices_one_that_ends(ring: Any) -> None:
    first, lost, other = ring(3)
    began = time.monotonic()

    def work(rank: int) -> None:
        if rank == 1:
            time.sleep(0.05)
            lost.close()
        elif rank == 0:
            first.arrive()
        else:
            noticed(other)

    found = on_all(3, work)
    assert isinstance(found[0], RuntimeError)
    assert found[1:] == [None, None]
    assert time.monotonic() - began < SOON


def test_ranks_wait_for_the_last_one_and_no_longer(ring: Any) -> None:
    ranks = ring(3, interval=20.0)
    last_came = 0.0

    def work(rank: int) -> float:
        nonlocal last_came
        for number in range(4):
            if rank == number % 3:
                time.sleep(0.02)
                last_came = time.monotonic()
            ranks[rank].arrive()
            assert time.monotonic() - last_came < SOON, "a rank waited for its interval"
        ranks[rank].end()
        return time.monotonic()

    began = time.monotonic()
    found = on_all(3, work)
    assert all(isinstance(one, float) for one in found), found
    assert time.monotonic() - began < SOON


def test_all_ranks_learn_at_once_that_loading_has_failed_on_one(ring: Any) -> None:
    first, failing = ring(2)
    assert not first.has_failure

    def work(rank: int) -> None:
        if rank:
            failing.arrive(has_failed=True)
            return
        end = time.monotonic() + SOON
        while not first.has_failure:
            assert time.monotonic() < end
            time.sleep(0.005)
        first.check()  # the rank is there, and will say what has failed
        first.arrive()

    assert on_all(2, work) == [None, None]
