"""The machine that a plan is for: this one, as it is now, or another one, as it is described.

    link        RAM -> device
    disk        files -> RAM
    bandwidth   the device's memory -> what multiplies

A run is planned for this machine alone; `task=plan` also answers for others. A machine with device memory has a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphcore.weights.plan import free_nbytes, physical_nbytes
from graphcore.weights.plan_streaming import Memory
from graphcore.weights.prediction import Rates

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
# Of RAM: what a process takes besides its plan, once it is made: the compiler's code, threads, allocators' remainders.
# Seen are 106 MB with compiled prefill.
RESERVE_NBYTES = 128 << 20
# Of the rate at which memory is read by doing nothing else, what products reach in whole decode steps of dense and
# packed models (docs/numbers.md: 66 to 90 %).
PRODUCT_SHARE = 0.8
COPY_SHARE = 0.5  # of the same, what a copy within RAM moves: it reads and writes


@dataclass(frozen=True)
class Machine:
    """Memory that can be taken.

    Attributes:
        device: that computes.
        memory: of that device.
        ram_nbytes: free in RAM; the device's own where that is a CPU.
        is_here: this machine, whose files, page cache and speeds can be looked at.
    """

    device: torch.device
    memory: Memory
    ram_nbytes: int
    is_here: bool

    @classmethod
    def here(cls, device: torch.device) -> "Machine":
        """Return this machine as it is now."""
        ram = free_nbytes(CPU)
        if device.type != "cpu":
            memory = Memory(str(device), free_nbytes(device), physical_nbytes(device))
            return cls(device, memory, max(0, ram - RESERVE_NBYTES), is_here=True)
        left = max(0, ram - RESERVE_NBYTES)
        return cls(device, Memory(str(device), left, physical_nbytes(device)), left, is_here=True)

    @classmethod
    def described(cls, device_nbytes: int | None, ram_nbytes: int) -> "Machine":
        """Return another machine.

        Args:
            device_nbytes: free on its GPU; None is a machine without one.
            ram_nbytes: free in its RAM.
        """
        left = max(0, ram_nbytes - RESERVE_NBYTES)
        if device_nbytes is None:
            return cls(CPU, Memory(str(CPU), left, ram_nbytes), left, is_here=False)
        return cls(GPU, Memory(str(GPU), device_nbytes, device_nbytes), left, is_here=False)


@dataclass(frozen=True)
class Speeds:
    """Bytes per second that are given; None is not known.

    Attributes:
        link: at which a GPU copies from locked RAM.
        disk: at which files are read into RAM.
        bandwidth: at which the device's memory is read by doing nothing else.
    """

    link: float | None = None
    disk: float | None = None
    bandwidth: float | None = None

    def arrival(self, machine: Machine, tier: str) -> float | None:
        """Return the bytes/s at which groups arrive in slots; None where a rate that it takes is not known.

        Args:
            tier: where weights wait, "disk" or "host".
        """
        if machine.device.type == "cpu":
            copied = None if self.bandwidth is None else COPY_SHARE * self.bandwidth
            return self.disk if tier == "disk" else copied
        ways = [self.link] if tier == "host" else [self.link, self.disk]
        known = [rate for rate in ways if rate is not None]
        return min(known) if len(known) == len(ways) else None

    def rates(self, machine: Machine, tier: str, moves: bool) -> Rates | None:
        """Return what a prediction needs, or None where a rate that it takes is not known."""
        arrival = self.arrival(machine, tier) if moves else float("inf")
        if arrival is None or self.bandwidth is None:
            return None
        return Rates(arrival, PRODUCT_SHARE * self.bandwidth)

    def missing(self, machine: Machine, tier: str, moves: bool) -> Sequence[str]:
        """Return the names of the rates that `rates` takes and that are not known."""
        needed = ["bandwidth"]
        if moves and machine.device.type != "cpu":
            needed.append("link")
        if moves and tier == "disk":
            needed.append("disk")
        return [name for name in needed if vars(self)[name] is None]
