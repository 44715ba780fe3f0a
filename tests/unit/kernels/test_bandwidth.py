"""The reader reads every byte of its buffer, with any number of threads."""

from itertools import product as every_pair

import numpy as np
import pytest
import torch
from support.cases import in_case
from support.packed_matrices import native_backend

from graphcore.kernels.backend import TorchBackend
from graphcore.kernels.bandwidth import LEAST_NBYTES, measure_read_bandwidth, native_sum, read_buffer


def test_the_reader_sums_every_word() -> None:
    for lines, threads in every_pair([1, 2, 3, 1000], [1, 2, 3]):
        with in_case(lines, threads):
            words = np.random.default_rng(lines).integers(0, 2**64, 8 * lines, dtype=np.uint64)
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                found = native_sum(torch.from_numpy(words.view(np.int64)), native_backend())
            finally:
                torch.set_num_threads(before)
            assert found % 2**64 == int(words.sum(dtype=np.uint64))


def test_a_buffer_that_is_no_whole_number_of_lines_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="100 bytes"):
        native_sum(torch.zeros(100, dtype=torch.uint8), native_backend())


def test_the_better_reader_counts() -> None:
    found = read_buffer(64 * 10**5, native_backend(), repeats=2)
    assert found.native is not None
    assert found.best == max(found.torch, found.native)
    assert 1e8 < found.best < 1e13
    assert found.nbytes == 64 * 10**5


def test_without_kernels_torch_alone_reads() -> None:
    found = read_buffer(6400, TorchBackend(), repeats=1)
    assert found.native is None
    assert found.best == found.torch


@pytest.mark.parametrize(
    ("free", "nbytes"), [(8 * LEAST_NBYTES, 3 * LEAST_NBYTES), (4 * LEAST_NBYTES, 2 * LEAST_NBYTES)]
)
def test_the_buffer_takes_half_of_what_is_free_at_most(monkeypatch: pytest.MonkeyPatch, free: int, nbytes: int) -> None:
    monkeypatch.setattr("graphcore.memory_limit.free_ram_nbytes", lambda root: free)
    found = measure_read_bandwidth(torch.device("cpu"), TorchBackend(), nbytes=3 * LEAST_NBYTES, repeats=1)
    assert found is not None
    assert found.nbytes == nbytes


def test_where_a_buffer_would_lie_in_caches_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphcore.memory_limit.free_ram_nbytes", lambda root: 2 * LEAST_NBYTES - 1)
    monkeypatch.setattr(torch, "ones", lambda *given: pytest.fail("memory was taken"))
    assert measure_read_bandwidth(torch.device("cpu"), TorchBackend()) is None
