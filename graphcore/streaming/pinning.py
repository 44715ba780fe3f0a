"""Locks memory where it lies, so that a GPU can copy from it by itself.

`Tensor.pin_memory` would make a second copy, of a size rounded up to a power of two. Pages are locked as runs, because
what two tensors share a page of may be locked only once.
"""

import mmap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Registrar(Protocol):
    """What a driver offers for locking memory."""

    def register(self, address: int, nbytes: int) -> str:
        """Lock memory; return why that failed, or nothing."""

    def unregister(self, address: int) -> None:
        """Unlock what was locked at that address."""


@dataclass(frozen=True)
class CudaRegistrar:
    """The driver of a GPU. Not yet run on hardware."""

    device: torch.device

    def register(self, address: int, nbytes: int) -> str:
        """Lock memory; return why that failed, or nothing."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch does not type it
        code = int(runtime.cudaHostRegister(address, nbytes, 0))
        if code == 0:
            return ""
        # The runtime remembers the error, and the next kernel would be blamed for it. Torch's binding cannot ask for
        # it; a launch that torch checks does (c10/cuda/CUDAException.h: cudaGetLastError reads and forgets).
        with suppress(RuntimeError):
            torch.empty(1, device=self.device).fill_(0)
        return str(runtime.cudaGetErrorString(runtime.cudaError(code)))

    def unregister(self, address: int) -> None:
        """Unlock what was locked at that address."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # as above


@dataclass
class Pins:
    """Memory that is locked until `close`; whoever owns it keeps it at least as long.

    Attributes:
        held: keeps the memory alive.
    """

    registrar: Registrar
    addresses: list[int] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)

    def add(self, tensors: Iterable[Tensor]) -> str:
        """Lock all of the tensors' memory, or none of it; return why not, or nothing."""
        owners = list(tensors)
        locked: list[int] = []
        for address, nbytes in page_runs(owners):
            obstacle = self.registrar.register(address, nbytes)
            if obstacle:
                self._unlock(locked)
                return obstacle
            locked.append(address)
        self.addresses += locked
        self.held += owners
        return ""

    def close(self) -> None:
        """Unlock everything; no copy may be under way."""
        self._unlock(self.addresses)
        self.addresses.clear()
        self.held.clear()

    def _unlock(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self.registrar.unregister(address)


def page_runs(tensors: Iterable[Tensor], page: int = mmap.PAGESIZE) -> list[tuple[int, int]]:
    """Return address and bytes of the runs of whole pages that the tensors' bytes lie in; no page is in two."""
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors if tensor.nbytes)
    runs: list[tuple[int, int]] = []
    for first, last in spans:
        begin, end = first // page * page, -(-last // page) * page
        if runs and begin < sum(runs[-1]):
            start, nbytes = runs[-1]
            runs[-1] = (start, max(nbytes, end - start))
        else:
            runs.append((begin, end - begin))
    return runs
