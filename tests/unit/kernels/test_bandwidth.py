"""The reader reads every byte of its buffer, with any number of threads."""

from pathlib import Path

import numpy as np
import pytest
import torch

from graphcore.kernels.bandwidth import measure_read_bandwidth, native_sum
from graphcore.kernels.library import build_library


@pytest.fixture(scope="module")
def library() -> Path:
    """The kernels' library, from the cache that runs use."""
    path = build_library(Path("~/.cache/graphcore/kernels").expanduser())
    if path is None:
        pytest.skip("no C++ compiler")
    return path


@pytest.mark.parametrize("lines", [1, 2, 3, 1000])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_reader_sums_every_word(library: Path, lines: int, threads: int) -> None:
    words = np.random.default_rng(lines).integers(0, 2**64, 8 * lines, dtype=np.uint64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = native_sum(torch.from_numpy(words.view(np.int64)), library)
    finally:
        torch.set_num_threads(before)
    assert found % 2**64 == int(words.sum(dtype=np.uint64))


def test_a_buffer_that_is_no_whole_number_of_lines_is_our_mistake(library: Path) -> None:
    with pytest.raises(AssertionError, match="100 bytes"):
        native_sum(torch.zeros(100, dtype=torch.uint8), library)


def test_the_better_reader_counts(library: Path) -> None:
    found = measure_read_bandwidth(torch.device("cpu"), library, nbytes=64 * 10**5, repeats=2)
    assert found.native is not None
    assert found.best == max(found.torch, found.native)
    assert 1e8 < found.best < 1e13
    assert found.nbytes == 64 * 10**5


def test_without_kernels_torch_alone_reads() -> None:
    found = measure_read_bandwidth(torch.device("cpu"), None, nbytes=6400, repeats=1)
    assert found.native is None
    assert found.best == found.torch
