"""The rendezvous of ranks in a key-value store that may hold keys of an earlier start.

    rank r   joining/r = its nonce         waits for answer/<nonce>         joined/<start>/r = 1
    rank 0   reads joining/r, again and again, answers each nonce with the number of its start, until all have joined

torchrun starts ranks again with the store of the ranks before them (its static rendezvous, --master-addr), and gloo
would read their addresses. Counts of restarts, which torchrun sets, differ between hosts of which one was lost.
"""

import time
from datetime import timedelta
from uuid import uuid4

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not exported for type checkers

POLL = 0.02  # seconds between two looks at the store


def store_of_start(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a part of the store that only the ranks of one start write to.

    Raises:
        RuntimeError: the others did not come in time.
    """
    end = time.monotonic() + timeout.total_seconds()
    start = _lead(store, world_size, end) if rank == 0 else _join(store, rank, end)
    return PrefixStore(f"graphcore/{start}", store)


def _lead(store: Store, world_size: int, end: float) -> str:
    """Wait on rank 0 until all other ranks have joined; return the key prefix of this start."""
    start = uuid4().hex
    missing = set(range(1, world_size))
    while missing:
        for rank in [*missing]:
            if store.check([f"joining/{rank}"]):
                store.set(f"answer/{store.get(f'joining/{rank}').decode()}", start)
            if store.check([f"joined/{start}/{rank}"]):
                missing.discard(rank)
        _pause(end, f"rank {min(missing, default=0)} has not come")
    return start


def _join(store: Store, rank: int, end: float) -> str:
    """Join the start of rank 0, and return its name."""
    nonce = uuid4().hex
    store.set(f"joining/{rank}", nonce)
    while not store.check([f"answer/{nonce}"]):
        _pause(end, "rank 0 has not come")
    start: str = store.get(f"answer/{nonce}").decode()
    store.set(f"joined/{start}/{rank}", "1")
    return start


def _pause(end: float, missing: str) -> None:
    if time.monotonic() > end:
        raise RuntimeError(f"{missing} within parallel.timeout")
    time.sleep(POLL)
