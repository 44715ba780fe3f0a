"""Page-aligned, pinned (page-locked) host memory: a GPU copies from it asynchronously, and its kernels can read it.

A locked page must not hold other data, because CUDA refuses a copy from memory that is only partly locked. Source: CUDA
Driver API, "API synchronization behavior": regions must be registered entirely or not at all.

`Tensor.pin_memory` would make a second copy, with its size rounded up to a power of two. Runs of pages are locked
rather than tensors, because a page that two tensors share may be locked only once.

No interface tells how much memory may be locked. Windows and WSL stop at about half of the RAM, a container at
RLIMIT_MEMLOCK or less. The limit is found by locking the memory that will be used, group by group, until the machine
refuses.
"""

import ctypes
import mmap
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped (driver_types.h)
DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER (cuda.h)

Key = TypeVar("Key", bound=Hashable)


class Registrar(Protocol):
    """The functions of a driver that lock and unlock memory."""

    def register(self, address: int, nbytes: int) -> str:
        """Lock memory. Return an error message; empty if it succeeded."""

    def unregister(self, address: int) -> None:
        """Unlock the memory that was locked at an address."""

    def device_address(self, address: int) -> int | None:
        """Return the device address of a byte of locked memory; None if kernels cannot read it."""


@dataclass(frozen=True)
class Locked(Generic[Key]):
    """The result of `Pins.add_most`: which tensors are locked.

    Attributes:
        keys: keys of the tensors that are locked.
        is_ring: True if the ring is locked.
        obstacle: reason why the other tensors are not locked; empty if all are.
    """

    keys: frozenset[Key]
    is_ring: bool
    obstacle: str


@dataclass
class Pins:
    """A set of memory that stays locked until `close`.

    Attributes:
        addresses: start addresses of the locked runs of pages.
        held: tensors in the locked memory, kept alive until it is unlocked.
    """

    registrar: Registrar
    addresses: list[int] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)

    def add(self, tensors: Iterable[Tensor]) -> str:
        """Lock all of the tensors' memory, or none of it. Return an error message; empty if it succeeded."""
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

    def add_most(self, tensors: Mapping[Key, Tensor], ring: Tensor) -> Locked[Key]:
        """Lock as many whole tensors as the machine allows, and the ring if some of them cannot be locked.

        The locked tensors are spread evenly over the order of use, so that the others have time to pass through the
        ring. After a refusal the last one is unlocked again, to leave room for other memory that will be locked.

        Args:
            tensors: tensors by key, in the order of use.
            ring: memory that the other tensors go through. If it cannot be locked, nothing is.
        """
        obstacle = self.add([ring])
        if obstacle:
            return Locked(frozenset(), False, obstacle)
        units = spread(pages_apart(tensors))
        for number, unit in enumerate(units):
            obstacle = self.add(tensors[key] for key in unit)
            if obstacle:
                locked = units[: max(number - 1, 0)]
                self._remove(tensors[key] for unit in units[len(locked) : number] for key in unit)
                return Locked(frozenset(key for unit in locked for key in unit), True, obstacle)
        self._remove([ring])
        return Locked(frozenset(tensors), False, "")

    def is_readable_by_kernels(self, tensor: Tensor) -> bool:
        """Return whether kernels can read a locked tensor at its host address, which Triton and captured graphs need.

        They can with unified addressing if the device can use host pointers for registered memory (all of Linux on
        x86-64). Source: CUDA Runtime API, cudaHostRegister, cudaDevAttrCanUseHostPointerForRegisteredMem.
        """
        return self.registrar.device_address(tensor.data_ptr()) == tensor.data_ptr()

    def close(self) -> None:
        """Unlock everything. No copy may be running."""
        self._unlock(self.addresses)
        self.addresses.clear()
        self.held.clear()

    def _remove(self, tensors: Iterable[Tensor]) -> None:
        """Unlock tensors that were added together and are not in use yet."""
        owners = list(tensors)
        addresses = [address for address, _ in page_runs(owners)]
        self._unlock(addresses)
        self.addresses = [address for address in self.addresses if address not in addresses]
        self.held = [one for one in self.held if not any(one is owner for owner in owners)]

    def _unlock(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self.registrar.unregister(address)


def page_runs(tensors: Iterable[Tensor], page: int = mmap.PAGESIZE) -> list[tuple[int, int]]:
    """Return the (address, bytes) of the disjoint runs of whole pages that hold the tensors."""
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


def pages_apart(tensors: Mapping[Key, Tensor]) -> list[list[Key]]:
    """Group the keys of tensors that lie in the same run of pages, such as slices of one table; keep their order."""
    runs = page_runs(tensors.values())
    units: dict[int, list[Key]] = {}
    for key, tensor in tensors.items():
        inside = (start for start, nbytes in runs if start <= tensor.data_ptr() < start + nbytes)
        units.setdefault(next(inside, 0), []).append(key)
    return list(units.values())


def spread(units: Sequence[list[Key]]) -> list[list[Key]]:
    """Reorder units so that every prefix is spread evenly over all of them: 0 4 2 6 1 5 3 7."""
    bits = max(len(units) - 1, 1).bit_length()
    return [units[index] for index in sorted(range(len(units)), key=lambda index: f"{index:0{bits}b}"[::-1])]


@dataclass(frozen=True)
class CudaRegistrar:
    """A registrar that locks memory with CUDA's runtime, mapped so that kernels can read it."""

    device: torch.device

    def register(self, address: int, nbytes: int) -> str:
        """Lock memory. Return an error message; empty if it succeeded."""
        # Without this, CUDA would create a context of half a gigabyte on the current device.
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch does not type it
            code = runtime.cudaHostRegister(address, nbytes, PORTABLE_AND_MAPPED)
            if int(code) == 0:
                return ""
            self._forget_error()
            return str(runtime.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        """Unlock the memory that was locked at an address."""
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # as above
            if int(runtime.cudaHostUnregister(address)) != 0:
                self._forget_error()

    def device_address(self, address: int) -> int | None:
        """Return the device address of a byte of locked memory; None if kernels cannot read it."""
        driver = ctypes.CDLL("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
        found = ctypes.c_uint64(0)
        with torch.cuda.device(self.device):
            code = driver.cuPointerGetAttribute(ctypes.byref(found), DEVICE_POINTER, ctypes.c_uint64(address))
        return found.value if code == 0 else None

    def _forget_error(self) -> None:
        """Clear the runtime's last error, which would otherwise be reported for the next kernel.

        Torch has no binding of cudaGetLastError, which clears it. A copy on the device calls it and raises the error.
        Source: aten/src/ATen/native/cuda/Copy.cu, copy_device_to_device, of torch 2.11 to 2.15.
        """
        with suppress(RuntimeError):
            pair = torch.zeros(2, device=self.device, dtype=torch.float32)
            pair[:1].copy_(pair[1:])
