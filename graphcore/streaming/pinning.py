"""Locks memory where it lies, so that a GPU can copy from it by itself, and kernels can read it.

`Tensor.pin_memory` would make a second copy, of a size rounded up to a power of two. Pages are locked as runs, because
what two tensors share a page of may be locked only once.

How much may be locked nobody says: Windows and WSL stop at about half of the RAM, a container at RLIMIT_MEMLOCK or
less. So it is found out by locking what is going to be used, group by group, until the machine refuses.
"""

import mmap
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


class Registrar(Protocol):
    """What a driver offers for locking memory."""

    def register(self, address: int, nbytes: int) -> str:
        """Lock memory; return why that failed, or nothing."""

    def unregister(self, address: int) -> None:
        """Unlock what was locked at that address."""

    def device_address(self, address: int) -> int | None:
        """Return where kernels find a byte of locked memory; None if they cannot read it."""


@dataclass(frozen=True)
class Locked(Generic[Key]):
    """What the machine allowed.

    Attributes:
        keys: of the tensors that are locked, each whole.
        is_ring: whether the ring is, too.
        obstacle: why the rest is not; empty if there is none.
    """

    keys: frozenset[Key]
    is_ring: bool
    obstacle: str


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

    def add_most(self, tensors: Mapping[Key, Tensor], ring: Tensor) -> Locked[Key]:
        """Lock as many of the tensors as the machine allows, each whole; and the ring, if not all of them are.

        They are spread evenly over the order of use, so that those that go through the ring have time to get there.
        One is given back after a refusal: something has to be left for what else will be locked.

        Args:
            ring: memory that what is not locked will go through; without it nothing is locked.
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
        """Return whether kernels find a locked tensor at its own address, as Triton and captured graphs take it.

        It is so with unified addressing, where the device can use host pointers for registered memory (all of Linux on
        x86-64). Source: CUDA Runtime API, cudaHostRegister, cudaDevAttrCanUseHostPointerForRegisteredMem.
        """
        return self.registrar.device_address(tensor.data_ptr()) == tensor.data_ptr()

    def close(self) -> None:
        """Unlock everything; no copy may be under way."""
        self._unlock(self.addresses)
        self.addresses.clear()
        self.held.clear()

    def _remove(self, tensors: Iterable[Tensor]) -> None:
        """Unlock tensors that were added together and nobody uses yet."""
        owners = list(tensors)
        addresses = [address for address, _ in page_runs(owners)]
        self._unlock(addresses)
        self.addresses = [address for address in self.addresses if address not in addresses]
        self.held = [one for one in self.held if not any(one is owner for owner in owners)]

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


def pages_apart(tensors: Mapping[Key, Tensor]) -> list[list[Key]]:
    """Return the keys in their order, those together whose tensors lie in one run of pages: slices of one table."""
    runs = page_runs(tensors.values())
    units: dict[int, list[Key]] = {}
    for key, tensor in tensors.items():
        inside = (start for start, nbytes in runs if start <= tensor.data_ptr() < start + nbytes)
        units.setdefault(next(inside, 0), []).append(key)
    return list(units.values())


def spread(units: Sequence[list[Key]]) -> list[list[Key]]:
    """Return them in an order of which any beginning is spread evenly over all: 0 4 2 6 1 5 3 7."""
    bits = max(len(units) - 1, 1).bit_length()
    return [units[index] for index in sorted(range(len(units)), key=lambda index: f"{index:0{bits}b}"[::-1])]
