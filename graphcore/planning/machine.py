"""The machine that a plan is for: this one in its current state, or another one from a description.

    link        RAM -> device
    disk        files -> RAM
    bandwidth   the device's memory -> its processors

A run is planned for this machine only; `task=plan` can also plan for others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from graphcore import memory_limit
from graphcore.config.byte_sizes import both_in_words
from graphcore.errors import PlanError
from graphcore.planning.prediction import Rates

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
# Bytes of RAM that a process takes in addition to its plan: compiled code, threads, unused parts of allocations. The
# most that was measured is 106 MB, with compiled prefill.
RESERVE_NBYTES = 128 << 20
# Share of the plain memory read rate that products reach in whole decode steps of dense and packed models
# (66 to 90 %; docs/lab/decode_cpu.md and docs/lab/gpu.md have later shares).
PRODUCT_SHARE = 0.8
COPY_SHARE = 0.5  # share of the read rate that a copy within RAM reaches, as it reads and writes


@dataclass(frozen=True)
class Memory:
    """The memory of a device.

    Attributes:
        device: name of the device, "cpu" or "cuda:N".
        free_nbytes: bytes that can still be allocated.
        physical_nbytes: bytes in all.
    """

    device: str
    free_nbytes: int
    physical_nbytes: int


@dataclass(frozen=True)
class Machine:
    """A machine that runs models: its device, and the memory that can be allocated.

    Attributes:
        device: device that computes.
        memory: memory of that device.
        ram_nbytes: free bytes of RAM; if the device is a CPU, the same as its memory.
        is_here: True for this machine, whose page cache and speeds can be measured.
    """

    device: torch.device
    memory: Memory
    ram_nbytes: int
    is_here: bool

    @classmethod
    def here(cls, device: torch.device) -> "Machine":
        """Return this machine with the memory that is free now."""
        ram = free_device_nbytes(CPU)
        if device.type != "cpu":
            memory = Memory(str(device), free_device_nbytes(device), physical_device_nbytes(device))
            return cls(device, memory, max(0, ram - RESERVE_NBYTES), is_here=True)
        left = max(0, ram - RESERVE_NBYTES)
        return cls(device, Memory(str(device), left, physical_device_nbytes(device)), left, is_here=True)

    def shared(self, processes: int, on_device: int) -> "Machine":
        """Return the part of the machine's memory that each of some processes may take.

        Args:
            on_device: number of the processes whose device this is; all of them on a CPU.
        """
        part = self.memory.free_nbytes // on_device
        return replace(self, memory=replace(self.memory, free_nbytes=part), ram_nbytes=self.ram_nbytes // processes)

    @classmethod
    def described(cls, device_nbytes: int | None, ram_nbytes: int) -> "Machine":
        """Return another machine from a description.

        Args:
            device_nbytes: free bytes on its GPU; None for a machine without a GPU.
            ram_nbytes: free bytes of its RAM.
        """
        left = max(0, ram_nbytes - RESERVE_NBYTES)
        if device_nbytes is None:
            return cls(CPU, Memory(str(CPU), left, ram_nbytes), left, is_here=False)
        return cls(GPU, Memory(str(GPU), device_nbytes, device_nbytes), left, is_here=False)


@dataclass(frozen=True)
class Speeds:
    """Known speeds of a machine, in bytes per second; None if unknown.

    Attributes:
        link: rate at which a GPU copies from locked RAM.
        disk: rate at which files are read into RAM.
        bandwidth: rate at which the device reads its memory when it does nothing else.
    """

    link: float | None = None
    disk: float | None = None
    bandwidth: float | None = None

    def arrival(self, machine: Machine, tier: str, per_stored: float = 1.0) -> float | None:
        """Return the bytes/s at which groups move into slots; None if a rate that this depends on is unknown.

        Args:
            tier: tier where the weights wait, "disk" or "host".
            per_stored: bytes that move into slots for a byte of the files.
        """
        disk = None if self.disk is None else self.disk * per_stored
        if machine.device.type == "cpu":
            copied = None if self.bandwidth is None else COPY_SHARE * self.bandwidth
            return disk if tier == "disk" else copied
        ways = [self.link] if tier == "host" else [self.link, disk]
        known = [rate for rate in ways if rate is not None]
        return min(known) if len(known) == len(ways) else None

    def rates(
        self, machine: Machine, tier: str, moves: bool, per_stored: float = 1.0, offloads: bool = False
    ) -> Rates | None:
        """Return the rates for a prediction; None if one that it depends on is unknown.

        Args:
            machine, tier, per_stored: as for `arrival`.
            moves: True if a step waits for weights.
            offloads: True if keys and values are read from files.
        """
        arrival = self.arrival(machine, tier, per_stored) if moves else float("inf")
        if arrival is None or self.bandwidth is None or (offloads and self.disk is None):
            return None
        is_copied_in_ram = machine.device.type == "cpu" and tier == "host"
        busy, offload = 1.0 if is_copied_in_ram else 0.0, (self.disk if offloads else None) or math.inf
        return Rates(arrival, PRODUCT_SHARE * self.bandwidth, busy, offload)

    def missing(self, machine: Machine, tier: str, moves: bool, offloads: bool = False) -> Sequence[str]:
        """Return the names of the unknown speeds that `rates` needs."""
        needed = ["bandwidth"]
        if moves and machine.device.type != "cpu":
            needed.append("link")
        if (moves and tier == "disk") or offloads:
            needed.append("disk")
        return [name for name in needed if vars(self)[name] is None]


def free_device_nbytes(device: torch.device) -> int:
    """Return the bytes of memory that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return memory_limit.free_ram_nbytes()


def check_free(purpose: str, needed: int, free: int, instead: str) -> None:
    """Check that enough memory is free.

    Args:
        purpose: use and place of the memory, for the message.
        needed, free: numbers of bytes.
        instead: advice in case of failure.

    Raises:
        PlanError: fewer bytes are free than needed.
    """
    if needed > free:
        takes, has = both_in_words(needed, free)
        raise PlanError(f"{purpose} takes {takes}, {has} are free; {instead}")


def physical_device_nbytes(device: torch.device) -> int:
    """Return the bytes of memory that a device has in all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return memory_limit.physical_ram_nbytes()
