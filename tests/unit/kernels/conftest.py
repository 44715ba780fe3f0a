"""The kernels of each instruction set, those of this processor unless thorough or slow tests run, and one thread.

Tiny tensors gain nothing from more threads, and lose much where the machine is shared.
"""

from collections.abc import Iterator

import pytest
import torch
from support.packed_matrices import kernels_for, native_kernels

from graphcore.compiler import prebuilt_name, targets_here
from graphcore.kernels.cpu.library import PREBUILT, SOURCES, prebuilt_library

LEVELS = {  # when tests run with the library of a level
    "x86-64-v3": pytest.mark.thorough,  # AVX2
    "x86-64-v3-vnni": pytest.mark.slow,
    "x86-64": pytest.mark.slow,  # SSE2, which is also what plain vectors become
}


def distinct_targets() -> list[object]:
    """Return "native", for the library that engines use on this processor, and the levels that have another library."""
    native = prebuilt_library()
    same = [one.name for one in targets_here() if native == PREBUILT / prebuilt_name(SOURCES, one)]
    return ["native", *(pytest.param(level, marks=mark) for level, mark in LEVELS.items() if level not in same)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", params=distinct_targets())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The kernels for each instruction set, built once for all tests."""
    if request.param == "native":
        return native_kernels()
    return kernels_for(request.param, tmp_path_factory.getbasetemp() / "kernels")
