"""The kernels of each instruction set, and one thread for every test here.

Tiny tensors gain nothing from more threads, and lose much where the machine is shared.
"""

from collections.abc import Iterator

import pytest
import torch
from packed_matrices import kernels_for, native_kernels

from graphcore.compiler import prebuilt_name, targets_here
from graphcore.kernels.cpu.library import PREBUILT, SOURCES, prebuilt_library

LEVELS = ("x86-64-v3-vnni", "x86-64-v3", "x86-64")  # AVX-VNNI; AVX2; SSE2, which is also what plain vectors become


def distinct_targets() -> list[str]:
    """Return "native", for the library that engines use on this processor, and the levels that have another library."""
    native = prebuilt_library()
    same = [one.name for one in targets_here() if native == PREBUILT / prebuilt_name(SOURCES, one)]
    return ["native", *(level for level in LEVELS if level not in same)]


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
