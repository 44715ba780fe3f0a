"""Copies that leave a device: on a stream of their own, to locked memory, and read once they are made."""

from collections.abc import Iterator

import pytest
import torch
from support.fake_cuda import FakeCuda
from test_page_allocator import CHUNK, CONTEXT, caches_of, equal, seen, write
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphcore.kvcache import host_copies
from graphcore.kvcache.buffers import LayerCache
from graphcore.kvcache.forward_sequences import ForwardSequencePool, ForwardSequences
from graphcore.kvcache.host_copies import CopyStream, HostCopies
from graphcore.kvcache.page_allocator import PageAllocator

DEVICE = torch.device("cuda", 0)


class Blocking(TorchDispatchMode):
    """Fails if a copy to locked memory makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[Tensor] = []
        self.num_copies = 0

    def locked_like(self, tensor: Tensor) -> Tensor:
        self.locked.append(torch.full_like(tensor, 77))  # what it holds before the copy is nonsense
        return self.locked[-1]

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> object:  # type: ignore[no-untyped-def]
        if function is torch.ops.aten.copy_.default and any(args[0] is one for one in self.locked):
            assert [*args[2:], *(kwargs or {}).values()] == [True], "a copy that makes the host wait"
            self.num_copies += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FakeCuda, Blocking]]:
    """A device that is not there; nothing may be brought from it but by its copy stream."""
    fake, mode = FakeCuda.install(monkeypatch), Blocking()
    monkeypatch.setattr(host_copies, "locked_like", mode.locked_like)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: fake.log.append(f"kept for {stream.name}"))
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: pytest.fail("a copy that makes the host wait"))
    with mode:
        yield fake, mode


def on_device(name: str) -> tuple[PageAllocator, tuple[LayerCache, ...]]:
    """Return an allocator whose copies leave as from a device."""
    pages, caches = caches_of(name)
    pages.to_host = CopyStream(DEVICE).begin
    return pages, caches


def run_tokens(pages: PageAllocator, caches: tuple[LayerCache, ...], row: int, end: int, seed: int) -> None:
    """Give a row the pages of its tokens, a chunk after another, and write to them."""
    for begin in range(0, end, CHUNK):
        assert pages.reserve(row, begin, min(begin + CHUNK, end))
        write(pages, caches, row, end, seed)
    pages.free_before_window(row, end)


def test_copies_wait_for_what_computes_and_the_host_for_copies_only_where_it_reads(
    cuda: tuple[FakeCuda, Blocking],
) -> None:
    fake, mode = cuda
    parts = [(torch.arange(6.0).view(2, 3), torch.arange(4).view(2, 2)), (torch.ones(2), torch.zeros(0))]
    copies = CopyStream(DEVICE).begin(parts)
    order = ["side 0 waits for main", "in side 0", *["kept for side 0"] * 4, "in main", "event 0 recorded in side 0"]
    assert fake.log == order
    assert mode.num_copies == 4
    both = copies + HostCopies([(torch.ones(1), torch.ones(2))])
    assert fake.log == order
    read = both.read()
    assert fake.log == [*order, "event 0 waited for"]
    assert [[each.tolist() for each in part] for part in read] == [
        [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [[0, 1], [2, 3]]],
        [[1.0, 1.0], []],
        [[1.0], [1.0, 1.0]],
    ]
    assert CopyStream(DEVICE).begin([]).read() == ()


@pytest.mark.parametrize("name", ["full", "ring", "both", "states"])
def test_a_sequence_that_is_swapped_out_leaves_on_the_copy_stream_and_comes_back_whole(
    name: str, cuda: tuple[FakeCuda, Blocking]
) -> None:
    fake, mode = cuda
    pages, caches = on_device(name)
    run_tokens(pages, caches, 0, 13, seed=1)
    before = seen(pages, caches, 0, 13)
    kept = pages.copy_out(0, 13)
    assert mode.num_copies == 2 * len(caches)
    assert not any("waited" in line for line in fake.log)
    pages.free(0)
    run_tokens(pages, caches, 1, CONTEXT, seed=2)  # into the pages that were freed
    pages.free(1)
    assert pages.copy_in(2, kept)
    assert sum("waited" in line for line in fake.log) == 1
    assert equal(seen(pages, caches, 2, 13), before)


@pytest.mark.parametrize("name", ["both", "states"])
def test_pages_that_are_lent_leave_on_the_copy_stream_and_are_put_back(
    name: str, cuda: tuple[FakeCuda, Blocking]
) -> None:
    fake, mode = cuda
    pages, caches = on_device(name)
    for row in range(2):
        run_tokens(pages, caches, row, CONTEXT - 1, seed=row)
    before = [seen(pages, caches, row, CONTEXT - 1) for row in range(2)]
    with pages.lending(range(2)):
        for row in range(2):
            run_tokens(pages, caches, row, CONTEXT, seed=9)
        assert mode.num_copies > 0
        assert not any("waited" in line for line in fake.log)
    assert any("waited" in line for line in fake.log)
    assert all(equal(seen(pages, caches, row, CONTEXT - 1), before[row]) for row in range(2))


@pytest.mark.parametrize("name", ["both", "states"])
def test_forward_states_leave_on_the_copy_stream(name: str, cuda: tuple[FakeCuda, Blocking]) -> None:
    fake, _ = cuda
    pages, caches = on_device(name)
    pool = ForwardSequencePool(pages)
    state, other = ForwardSequences(pool), ForwardSequences(pool)
    with pool.in_rows(state, 1, 0, 9):
        run_tokens(pages, caches, 0, 9, seed=1)
        expected = seen(pages, caches, 0, 9)
    assert not any("waited" in line for line in fake.log)
    with pool.in_rows(other, 2, 0, CONTEXT):  # needs all pages: the first state is swapped out
        for row in range(2):
            run_tokens(pages, caches, row, CONTEXT, seed=2 + row)
    assert state.rows[0].swapped is not None
    other.drop()
    with pool.in_rows(state, 1, 9, 10):
        assert equal(seen(pages, caches, 0, 9), expected)
