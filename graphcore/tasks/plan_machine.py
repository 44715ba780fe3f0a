"""The machine and the speeds that task=plan was asked to plan for, and what the settings come to there."""

from dataclasses import replace
from typing import Any

import torch

from graphcore.config.byte_sizes import parse_nbytes
from graphcore.config.settings import Settings
from graphcore.device import DTYPES, resolve_device
from graphcore.engine.assembly import Choices, choices_on, choose, find_kernels, refuse_graph
from graphcore.engine.machine import CPU, Machine, Speeds
from graphcore.engine.model import Model
from graphcore.errors import ConfigError
from graphcore.memory_limit import free_nbytes

PER_SECOND = "/s"


def machine_of(settings: Settings, device_memory: Any, ram: Any) -> Machine:
    """Return the machine that is planned for, and refuse a graph that cannot run on this one.

    Args:
        device_memory, ram: as the task has them; None and None is this machine.

    Raises:
        ConfigError: a size is none, or another setting contradicts it.
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
    return Machine.described(device_nbytes, free_nbytes() if ram is None else size_of("task.ram", ram))


def speeds_of(link: Any, disk: Any, bandwidth: Any) -> Speeds:
    """Return the rates that were given, as bytes per second.

    Raises:
        ConfigError: one is no rate.
    """
    given = {"link": link, "disk": disk, "bandwidth": bandwidth}
    return Speeds(**{name: None if value is None else rate_of(f"task.{name}", value) for name, value in given.items()})


def size_of(key: str, value: Any) -> int:
    """Return the bytes of a size that has to be one.

    Raises:
        ConfigError: it is none.
    """
    nbytes = parse_nbytes(key, value)
    if not nbytes:
        raise ConfigError(f"{key}={value} must be more than 0 bytes; write it as 14GiB, or leave it out")
    return nbytes


def rate_of(key: str, value: Any) -> float:
    """Return the bytes per second of a rate: "25GB" or "25GB/s".

    Raises:
        ConfigError: it is none.
    """
    return float(size_of(key, value.removesuffix(PER_SECOND) if isinstance(value, str) else value))


def choices_for(machine: Machine, settings: Settings, model: Model) -> Choices:
    """Return what the settings come to on a machine.

    Of another one it is taken that its CPU has kernels where this one has, that its GPU has Triton, and that it
    computes in bf16 where nothing else was asked for.

    Raises:
        ConfigError: the model cannot do what was asked.
    """
    if machine.is_here:
        return choose(settings, model)
    on_gpu = machine.device.type == "cuda"
    dtype = DTYPES.get(settings.dtype.name, torch.bfloat16)
    library = None if on_gpu else find_kernels(settings.cache_folder, CPU)[0]
    return replace(choices_on(settings, model, machine.device, dtype, library, on_gpu), notes=())
