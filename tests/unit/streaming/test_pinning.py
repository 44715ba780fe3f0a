"""Locking memory where it lies: by whole pages, all of it or none, within what the machine allows."""

from dataclasses import dataclass, field

import pytest
import torch

from graphcore.streaming.filler import aligned_buffer
from graphcore.streaming.pinning import CudaRegistrar, Pins, page_runs

PAGE = 4096


@dataclass
class Driver:
    """Locks pages up to a quota, and no page twice."""

    quota: int = 1 << 30
    locked: dict[int, int] = field(default_factory=dict)

    def register(self, address: int, nbytes: int) -> str:
        pages = {page for start, size in self.locked.items() for page in range(start // PAGE, (start + size) // PAGE)}
        assert address % PAGE == nbytes % PAGE == 0
        assert not pages & set(range(address // PAGE, (address + nbytes) // PAGE)), "already locked"
        if sum(self.locked.values()) + nbytes > self.quota:
            return "out of memory"
        self.locked[address] = nbytes
        return ""

    def unregister(self, address: int) -> None:
        del self.locked[address]


def test_every_byte_is_locked_and_no_page_twice() -> None:
    """Rows of one table, tensors that share a page, and tensors that lie inside others, as a store has them."""
    table = aligned_buffer(10 * PAGE)
    tensors = [table[: 5 * PAGE + 100], table[5 * PAGE + 100 :], table[300:400], aligned_buffer(3 * PAGE)]
    tensors += [torch.zeros(5, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8), torch.zeros(7)]
    driver = Driver()
    pins = Pins(driver)
    assert pins.add(tensors) == ""
    for tensor in tensors:
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert any(start <= first and last <= start + size for start, size in driver.locked.items()) or first == last
    assert sum(driver.locked.values()) <= 10 * PAGE + 3 * PAGE + 4 * PAGE
    pins.close()
    assert driver.locked == {}


def test_memory_that_shares_a_page_is_one_run_and_other_memory_is_not() -> None:
    whole = aligned_buffer(8 * PAGE)
    start = whole.data_ptr()
    parts = [whole[10:20], whole[PAGE - 1 : PAGE + 1], whole[3 * PAGE : 4 * PAGE], whole[4 * PAGE : 4 * PAGE + 1]]
    assert page_runs(parts, PAGE) == [
        (start, 2 * PAGE),
        (start + 3 * PAGE, PAGE),
        (start + 4 * PAGE, PAGE),
    ]


def test_what_does_not_fit_leaves_nothing_locked_and_says_why() -> None:
    driver = Driver(quota=5 * PAGE)
    pins = Pins(driver)
    assert pins.add([aligned_buffer(2 * PAGE)]) == ""
    before = dict(driver.locked)
    assert pins.add([aligned_buffer(2 * PAGE), aligned_buffer(2 * PAGE)]) == "out of memory"
    assert driver.locked == before
    assert pins.add([aligned_buffer(3 * PAGE)]) == ""


class Runtime:
    """CUDA's runtime as torch binds it, which remembers an error until somebody asks."""

    def __init__(self, code: int) -> None:
        self.code, self.remembered = code, 0
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        self.remembered = self.code
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append((address,))
        return 0

    def cudaError(self, code: int) -> int:
        return code

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]


def test_the_driver_s_refusal_is_returned_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, empty = Runtime(2), torch.empty

    def checked(*size: int, device: torch.device) -> torch.Tensor:
        remembered, runtime.remembered = runtime.remembered, 0
        if remembered:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*size, device=device)

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "empty", checked)
    registrar = CudaRegistrar(torch.device("cpu"))
    assert registrar.register(4096, 8192) == "out of memory"
    assert runtime.remembered == 0
    runtime.code = 0
    assert registrar.register(4096, 8192) == ""
    registrar.unregister(4096)
    assert runtime.calls == [(4096, 8192, 0), (4096, 8192, 0), (4096,)]
