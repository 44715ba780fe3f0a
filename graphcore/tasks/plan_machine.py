"""The machine and the rates that task=plan plans for, by numbers or by names of hardware, and the target on it.

Rates of names are the peaks of data sheets and standards, which no machine exceeds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from graphcore.config.byte_sizes import number_of_bytes
from graphcore.config.settings import Settings
from graphcore.device import DTYPES, resolve_device
from graphcore.engine.loading.runtime_config import ComputeTarget, refuse_graph
from graphcore.errors import ConfigError
from graphcore.kernels.backend import TritonBackend, find_backend
from graphcore.memory_limit import free_ram_nbytes
from graphcore.planning.machine import CPU, Machine, Speeds
from graphcore.registry import nearest

T = TypeVar("T")
PER_SECOND = "/s"
GB, GIB = 10**9, 1 << 30
# Bytes per second of 16 lanes in one direction, behind the line code of 128 of 130 bits. Source: PCI Express Base
# Specification 3.0, 4.0 and 5.0: 8, 16 and 32 GT/s a lane.
PCIE3, PCIE4, PCIE5 = (transfers * GB * 16 / 8 * 128 / 130 for transfers in (8, 16, 32))


@dataclass(frozen=True)
class GPU:
    """What task.gpu=NAME stands for.

    Attributes:
        nbytes: bytes of memory; the driver and a process's CUDA context take a part of it.
        bandwidth: bytes per second from its memory.
        link: bytes per second from RAM.
    """

    nbytes: int
    bandwidth: float
    link: float


def with_ecc(nbytes: int) -> int:
    """Return the memory that is usable with ECC on, in bytes: 15/16 of GDDR memory.

    Source: CUDA C++ Best Practices Guide, "Theoretical Bandwidth Calculation".
    """
    return nbytes * 15 // 16


# Memory and bandwidth, as NVIDIA states them: for GeForce the bits of its width x Gbit/s a pin / 8. Checked in November
# 2026 against pages that quote the data sheets, but for rtx4070, a10, l4 and h100-pcie, which are not checked yet.
GPUS: Mapping[str, GPU] = {
    "rtx3060": GPU(12 * GIB, 360 * GB, PCIE4),  # 192 bits x 15
    "rtx3090": GPU(24 * GIB, 936 * GB, PCIE4),  # 384 x 19.5; GA102 architecture whitepaper
    "rtx4070": GPU(12 * GIB, 504 * GB, PCIE4),  # 192 x 21
    "rtx4090": GPU(24 * GIB, 1008 * GB, PCIE4),  # 384 x 21; Ada architecture whitepaper
    "rtx5080": GPU(16 * GIB, 960 * GB, PCIE5),  # 256 x 30
    "rtx5090": GPU(32 * GIB, 1792 * GB, PCIE5),  # 512 x 28; RTX Blackwell architecture whitepaper
    "t4": GPU(with_ecc(16 * GIB), 320 * GB, PCIE3),  # T4 product brief PB-09256
    "a10": GPU(with_ecc(24 * GIB), 600 * GB, PCIE4),  # A10 data sheet
    "l4": GPU(with_ecc(24 * GIB), 300 * GB, PCIE4),  # L4 data sheet
    "l40s": GPU(with_ecc(48 * GIB), 864 * GB, PCIE4),  # L40S data sheet
    "a100": GPU(80 * GIB, 2039 * GB, PCIE4),  # A100 data sheet: 80 GB, SXM; ECC of HBM has bits of its own
    "a100-40gb": GPU(40 * GIB, 1555 * GB, PCIE4),  # A100 data sheet
    "h100": GPU(80 * GIB, 3350 * GB, PCIE5),  # H100 data sheet: SXM
    "h100-pcie": GPU(80 * GIB, 2000 * GB, PCIE5),  # H100 data sheet: PCIe
    "h200": GPU(140 * GIB, 4800 * GB, PCIE5),  # H200 data sheet; 143,771 MiB by nvidia-smi
}
# Sequential reads as the makers state them. sata, nvme4 and nvme5 are checked against pages that quote them; hdd and
# nvme3 are not checked yet.
DISKS: Mapping[str, float] = {
    "hdd": 0.21 * GB,  # Seagate BarraCuda 1 TB (ST1000DM010), its outer tracks
    "sata": 0.56 * GB,  # Samsung 870 EVO
    "nvme3": 3.5 * GB,  # PCIe 3.0 x4: Samsung 970 EVO Plus
    "nvme4": 7.45 * GB,  # PCIe 4.0 x4: Samsung 990 PRO
    "nvme5": 12.4 * GB,  # PCIe 5.0 x4: Crucial T700 2 TB
}
# RAM: transfers per second x 8 bytes x channels of 64 bits, two where the name has no number. Sources: JEDEC JESD79-4
# (DDR4), JESD79-5 (DDR5) and JESD209-5 (LPDDR5, LPDDR5X).
MEMORIES: Mapping[str, float] = {
    "ddr4-1ch": 25.6 * GB,  # DDR4-3200
    "ddr4": 51.2 * GB,
    "ddr4-8ch": 204.8 * GB,
    "ddr5-1ch": 44.8 * GB,  # DDR5-5600
    "ddr5": 89.6 * GB,
    "ddr5-8ch": 307.2 * GB,  # DDR5-4800, as servers with 8 and 12 channels have it
    "ddr5-12ch": 460.8 * GB,
    "lpddr5": 102.4 * GB,  # LPDDR5-6400, 128 bits
    "lpddr5x": 136.5 * GB,  # LPDDR5X-8533, 128 bits
}


def named(key: str, name: Any, known: Mapping[str, T]) -> T | None:
    """Return what the name of a setting stands for; None for None.

    Raises:
        ConfigError: the name is unknown.
    """
    if name is None:
        return None
    if str(name) not in known:
        close = nearest(str(name), known)
        raise ConfigError(f"unknown {key}={name}{close}; known: {', '.join(known)}", is_unknown=True)
    return known[str(name)]


def machine_of(settings: Settings, device_memory: Any, ram: Any, gpu: GPU | None = None) -> Machine:
    """Return the machine that is planned for.

    Args:
        device_memory, ram: sizes from the task's settings; None and None is this machine, unless a GPU is named.
        gpu: GPU that was named; a given `device_memory` takes the place of its memory.

    Raises:
        ConfigError: a size is invalid or contradicts another setting, or the graph cannot run on this machine.
    """
    if device_memory is None and gpu is not None:
        device_memory = gpu.nbytes
    if device_memory is None and ram is None:
        device = resolve_device(settings.device)
        refuse_graph(settings)
        return Machine.here(device)
    kind = "cpu" if device_memory is None else "cuda"
    if settings.device != "auto" and not settings.device.startswith(kind):
        wanted = (
            "leave task.gpu and task.device_memory out"
            if kind == "cuda"
            else "give task.gpu or task.device_memory, too"
        )
        raise ConfigError(f"device={settings.device} contradicts the machine that task=plan describes; {wanted}")
    if settings.model.fallback is not None:
        raise ConfigError(
            "task.gpu, task.device_memory and task.ram describe a machine for graphcore's own models; leave "
            "model.fallback out"
        )
    device_nbytes = None if device_memory is None else size_of("task.device_memory", device_memory)
    return Machine.described(device_nbytes, free_ram_nbytes() if ram is None else size_of("task.ram", ram))


def speeds_of(
    machine: Machine, link: Any, disk: Any, bandwidth: Any, memory: Any = None, gpu: GPU | None = None
) -> Speeds:
    """Return the given rates in bytes per second; a number takes the place of the one that a name stands for.

    Args:
        memory: name of RAM. Its rate is the bandwidth of a CPU, and the most at which a GPU copies from it.
        gpu: GPU that was named.

    Raises:
        ConfigError: a value is no rate, a name is unknown, or a name of RAM has no effect.
    """
    of_ram = named("task.memory", memory, MEMORIES)
    if of_ram is not None and gpu is None and machine.device.type != "cpu":
        raise ConfigError(
            f"task.memory={memory} has no effect on {machine.device}; give task.gpu, too, or leave it out"
        )
    rates = {
        "link": None if gpu is None else min(gpu.link, of_ram or gpu.link),
        "disk": None,
        "bandwidth": of_ram if gpu is None else gpu.bandwidth,
    }
    given = {"link": link, "disk": disk, "bandwidth": bandwidth}
    rates |= {name: rate_of(f"task.{name}", value) for name, value in given.items() if value is not None}
    return Speeds(**rates)


def size_of(key: str, value: Any) -> int:
    """Return the bytes of a size.

    Raises:
        ConfigError: the value is no size.
    """
    nbytes = number_of_bytes(key, value, "is no size; write whole bytes, or a number with a unit: 14GiB, 600MB")
    if not nbytes:
        raise ConfigError(f"{key}={value} must be more than 0 bytes; write it as 14GiB, or leave it out")
    return nbytes


def rate_of(key: str, value: Any) -> float:
    """Parse a rate in bytes per second: "25GB", "25GB/s", or for task.disk the name of a disk.

    Raises:
        ConfigError: the value is no rate.
    """
    names: Mapping[str, float] = DISKS if key == "task.disk" else {}
    if isinstance(value, str) and value in names:
        return names[value]
    amount = value.removesuffix(PER_SECOND) if isinstance(value, str) else value
    or_name = f"; or a name: {', '.join(names)}{nearest(str(value), names)}" if names else ""
    rate = number_of_bytes(key, amount, f"is no rate; write bytes per second with a unit: 3GB, 600MB/s{or_name}")
    if not rate:
        raise ConfigError(f"{key}={value} must be more than 0 bytes per second; write it as 3GB, or leave it out")
    return float(rate)


def target_on(machine: Machine, settings: Settings) -> ComputeTarget | None:
    """Return the target on a described machine; None for this machine.

    Another machine is assumed to have C++ kernels on its CPU if this one has them, to have Triton on its GPU, and to
    compute in bf16 unless a dtype is set.
    """
    if machine.is_here:
        return None
    on_gpu = machine.device.type == "cuda"
    dtype = DTYPES.get(settings.dtype.name, torch.bfloat16)
    backend = TritonBackend() if on_gpu else find_backend(CPU, settings.cache_folder)[0]
    return ComputeTarget(machine.device, dtype, backend, is_here=False)
