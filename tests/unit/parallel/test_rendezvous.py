"""Ranks that start again do not read what the ranks before them have left in the store."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # not exported for type checkers

from graphcore.parallel.rendezvous import store_of_start

SOON = timedelta(seconds=20)


def started(store: Store, world_size: int) -> list[Store]:
    """Return the stores of ranks that start together."""
    found: dict[int, Store] = {}

    def start(rank: int) -> None:
        found[rank] = store_of_start(store, rank, world_size, SOON)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in reversed(range(world_size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(world_size)]


def test_each_start_has_a_store_of_its_own() -> None:
    store = HashStore()
    for address in ("first", "second"):
        ranks = started(store, 3)
        assert not ranks[2].check(["address"])
        ranks[0].set("address", address)
        assert [one.get("address").decode() for one in ranks] == [address] * 3


def test_a_rank_that_does_not_come_is_named() -> None:
    store = HashStore()
    with pytest.raises(RuntimeError, match=r"rank 1 has not come within parallel\.timeout"):
        store_of_start(store, 0, 2, timedelta(seconds=0.1))
    with pytest.raises(RuntimeError, match="rank 0 has not come"):
        store_of_start(store, 1, 2, timedelta(seconds=0.1))
