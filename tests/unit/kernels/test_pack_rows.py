"""Packing a matrix range by range, straight into its place.

The whole matrix's packed bytes are compared with libggml's weights in test_packed.py; here ranges are compared with it.
"""

import threading
from pathlib import Path

import pytest
import torch
from support.cases import in_case
from support.packed_matrices import KERNEL_FORMATS, native_kernels, stored_matrix
from torch import Tensor

from graphcore.kernels.cpu.kernel_packing import KernelPacking
from graphcore.quant import FORMATS

ROWS, BLOCKS = 53, 5
TASKS = Path("/proc/self/task")  # a folder for each thread of this process
UNTOUCHED = 0xA5


def garbage(nbytes: int, byte: int = UNTOUCHED) -> Tensor:
    """Return a buffer that something else was in."""
    return torch.full((nbytes,), byte, dtype=torch.uint8)


def test_ranges_make_the_matrix_that_packing_it_whole_makes() -> None:
    for name in KERNEL_FORMATS:
        with in_case(name):
            matrix = stored_matrix(name, ROWS, FORMATS[name].block_elements * BLOCKS, is_tame=False)
            packing = matrix.packing(native_kernels())
            out = garbage(packing.nbytes)
            for begin, end in ((16, 48), (48, ROWS), (0, 16)):
                packing.pack_rows(matrix.rows[begin:end], begin, out, threads=1)
            packing.write_scale(out, matrix.scale)
            assert torch.equal(out, matrix.packed(native_kernels()))


def test_nothing_of_what_was_in_the_buffer_stays() -> None:
    """Not even where scales are padded to whole vectors: equal matrices have equal bytes."""
    for name in KERNEL_FORMATS:
        with in_case(name):
            for blocks in (1, 3, BLOCKS, 17):
                matrix = stored_matrix(name, ROWS, FORMATS[name].block_elements * blocks)
                packing = matrix.packing(native_kernels())
                ones, others = garbage(packing.nbytes), garbage(packing.nbytes, 0xFF - UNTOUCHED)
                for out in (ones, others):
                    packing.pack_rows(matrix.rows, 0, out)
                    packing.write_scale(out, matrix.scale)
                assert torch.equal(ones, others)


def test_a_range_writes_its_own_groups_and_nothing_else() -> None:
    for name in KERNEL_FORMATS:
        with in_case(name):
            matrix = stored_matrix(name, ROWS, FORMATS[name].block_elements * BLOCKS)
            packing = matrix.packing(native_kernels())
            out = garbage(packing.nbytes)
            packing.pack_rows(matrix.rows[16:32], 16, out)
            before, after = packing.offset(16), packing.offset(32)
            assert torch.equal(out[before:after], matrix.packed(native_kernels())[before:after])
            assert (out[:before] == UNTOUCHED).all()
            assert (out[after:] == UNTOUCHED).all()


def test_rows_may_begin_at_an_odd_address_and_lie_apart() -> None:
    for name in KERNEL_FORMATS:
        with in_case(name):
            matrix = stored_matrix(name, ROWS, FORMATS[name].block_elements * BLOCKS, is_tame=False)
            packing, width = matrix.packing(native_kernels()), matrix.rows.shape[1]
            spread = garbage(3 + ROWS * (width + 5)).narrow(0, 3, ROWS * (width + 5)).view(ROWS, -1)[:, :width]
            assert spread.data_ptr() % 2
            spread.copy_(matrix.rows)
            assert torch.equal(packing.pack(spread, matrix.scale), matrix.packed(native_kernels()))


def test_every_number_of_threads_packs_the_same() -> None:
    matrix = stored_matrix("q6_k", ROWS, 512)
    packing = matrix.packing(native_kernels())
    for threads in (1, 2, 7):
        assert torch.equal(packing.pack(matrix.rows, threads=threads), matrix.packed(native_kernels()))


@pytest.mark.skipif(not TASKS.exists(), reason="only Linux lists a process's threads there")
def test_one_thread_asked_for_is_one_thread_run() -> None:
    """The readers' threads pack on themselves: OpenMP would keep a team of helpers for each of them."""
    matrix = stored_matrix("q4_k", 64, 256)
    packing = matrix.packing(native_kernels())
    counts: list[int] = []

    def pack() -> None:
        before = set(TASKS.iterdir())
        packing.pack(matrix.rows, threads=1)
        counts.append(len(set(TASKS.iterdir()) - before))

    thread = threading.Thread(target=pack)
    torch.set_num_threads(3)
    thread.start()
    thread.join()
    torch.set_num_threads(1)
    assert counts == [0]


@pytest.mark.parametrize(
    ("begin", "end", "complaint"), [(8, 24, "groups of 16"), (16, 40, "rows 16"), (48, 64, "rows 48")]
)
def test_ranges_that_would_cut_a_group_are_refused(begin: int, end: int, complaint: str) -> None:
    packing = KernelPacking("q8_0", ROWS, 32, native_kernels())
    with pytest.raises(AssertionError, match=complaint):
        packing.pack_rows(torch.zeros(end - begin, 34, dtype=torch.uint8), begin, garbage(packing.nbytes))
