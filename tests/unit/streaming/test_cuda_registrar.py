"""What is asked of CUDA's runtime and driver, which are replaced. No GPU is proved by this."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from graphcore.streaming.pinned_memory import DEVICE_POINTER, PORTABLE_AND_MAPPED, CudaRegistrar


class Code:
    """An error code as torch binds it: no int, but it can be made one."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __int__(self) -> int:
        return self.code


@dataclass
class Runtime:
    """CUDA's runtime, which remembers an error until somebody asks."""

    code: int = 0
    remembered: int = 0
    calls: list[tuple[object, ...]] = field(default_factory=list)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Code:
        return self._answer(address, nbytes, flags)

    def cudaHostUnregister(self, address: int) -> Code:
        return self._answer(address)

    def cudaGetErrorString(self, error: Code) -> str:
        return {2: "out of memory", 712: "part or all of the requested memory range is already mapped"}[int(error)]

    def _answer(self, *arguments: int) -> Code:
        self.calls.append((DEVICES[-1], *arguments))
        self.remembered = self.code or self.remembered
        return Code(self.code)


DEVICES = [torch.device("cuda", 0)]
SECOND = torch.device("cuda", 1)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Return a runtime in the place of torch's, whose copies raise and forget what it remembers."""
    runtime, zeros = Runtime(), torch.zeros

    class Checked:
        def __getitem__(self, part: object) -> "Checked":
            return self

        def copy_(self, source: object) -> None:
            remembered, runtime.remembered = runtime.remembered, 0
            if remembered:
                raise RuntimeError("CUDA error")

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        DEVICES.append(device)
        yield
        DEVICES.pop()

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(
        torch,
        "zeros",
        lambda size, dtype=None, device=None: Checked() if device == SECOND else zeros(size, dtype=dtype),
    )
    return runtime


def test_memory_is_locked_for_kernels_too_and_on_the_device_that_is_meant(runtime: Runtime) -> None:
    registrar = CudaRegistrar(SECOND)
    assert registrar.register(4096, 8192) == ""
    registrar.unregister(4096)
    assert runtime.calls == [(SECOND, 4096, 8192, PORTABLE_AND_MAPPED), (SECOND, 4096)]
    assert [torch.device("cuda", 0)] == DEVICES


@pytest.mark.parametrize("code", [2, 712])
def test_a_refusal_is_returned_in_words_and_forgotten(runtime: Runtime, code: int) -> None:
    registrar = CudaRegistrar(SECOND)
    runtime.code = code
    assert registrar.register(4096, 8192) == runtime.cudaGetErrorString(Code(code))
    assert runtime.remembered == 0
    registrar.unregister(4096)
    assert runtime.remembered == 0
    runtime.code = 0
    assert registrar.register(4096, 8192) == ""


@pytest.mark.parametrize(("code", "expected"), [(0, 12288), (1, None)])
def test_the_driver_is_asked_where_kernels_find_locked_memory(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, code: int, expected: int | None
) -> None:
    class Driver:
        def cuPointerGetAttribute(self, found: object, attribute: int, address: ctypes.c_uint64) -> int:
            assert attribute == DEVICE_POINTER
            assert DEVICES[-1] == SECOND
            found._obj.value = address.value  # type: ignore[attr-defined]
            return code

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert CudaRegistrar(SECOND).device_address(12288) == expected
