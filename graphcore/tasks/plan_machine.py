"""The machine and the rates that task=plan plans for, and the target on that machine."""

from typing import Any

import torch

from graphcore.config.byte_sizes import number_of_bytes
from graphcore.config.settings import Settings
from graphcore.device import DTYPES, resolve_device
from graphcore.engine.loading.runtime_config import ComputeTarget, refuse_graph
from graphcore.errors import ConfigError
from graphcore.kernels.backend import TritonBackend, find_backend
from graphcore.memory_limit import free_ram_nbytes
from graphcore.planning.machine import CPU, Machine, Speeds

PER_SECOND = "/s"


def machine_of(settings: Settings, device_memory: Any, ram: Any) -> Machine:
    """Return the machine that is planned for.

    Args:
        device_memory, ram: sizes from the task's settings; None and None is this machine.

    Raises:
        ConfigError: a size is invalid or contradicts another setting, or the graph cannot run on this machine.
    """
    if device_memory is None and ram is None:
        device = resolve_device(settings.device)
        refuse_graph(settings)
        return Machine.here(device)
    kind = "cpu" if device_memory is None else "cuda"
    if settings.device != "auto" and not settings.device.startswith(kind):
        wanted = "leave task.device_memory out" if kind == "cuda" else "give task.device_memory, too"
        raise ConfigError(f"device={settings.device} contradicts the machine that task=plan describes; {wanted}")
    if settings.model.fallback is not None:
        raise ConfigError(
            "task.device_memory and task.ram describe a machine for graphcore's own models; leave model.fallback out"
        )
    device_nbytes = None if device_memory is None else size_of("task.device_memory", device_memory)
    return Machine.described(device_nbytes, free_ram_nbytes() if ram is None else size_of("task.ram", ram))


def speeds_of(link: Any, disk: Any, bandwidth: Any) -> Speeds:
    """Return the given rates in bytes per second.

    Raises:
        ConfigError: a value is no rate.
    """
    given = {"link": link, "disk": disk, "bandwidth": bandwidth}
    return Speeds(**{name: None if value is None else rate_of(f"task.{name}", value) for name, value in given.items()})


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
    """Return the bytes per second of a rate: "25GB" or "25GB/s".

    Raises:
        ConfigError: the value is no rate.
    """
    amount = value.removesuffix(PER_SECOND) if isinstance(value, str) else value
    rate = number_of_bytes(key, amount, "is no rate; write bytes per second with a unit: 3GB, 600MB/s")
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
