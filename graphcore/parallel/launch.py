"""What torchrun says about a process, and the network interface that its process group is bound to.

Whoever reaches the process group reads and writes the residual stream and rank 0's messages: nothing is encrypted, and
nobody is asked for a password. So it is bound to one interface, and to none that others reach unless that is asked for.
"""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from graphcore.config.settings import ParallelSettings
from graphcore.errors import ConfigError

LOOPBACK = "lo"
SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface (netdevice(7))
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A process's place among those that torchrun has started.

    Attributes:
        rank: number of the process, from 0 on.
        world_size: number of processes.
        local_world_size: number of those on this machine.
        address: address of the rendezvous, which every rank connects to.
        local_rank: number of the process among those on this machine.
    """

    rank: int
    world_size: int
    local_world_size: int
    address: str
    local_rank: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the launch that torchrun's variables in an environment describe.

        Raises:
            ConfigError: torchrun has not started this process, or a variable is wrong.
        """
        missing = [name for name in VARIABLES if name not in environment]
        if missing:
            raise ConfigError(
                f"parallel=ring: {missing[0]} is not set, so torchrun has not started this process; start it with "
                "torchrun --nproc-per-node 2 run.py parallel=ring ..., or leave parallel=ring out"
            )
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK"):
            if not environment.get(name, "0").isdecimal():
                raise ConfigError(f"parallel=ring: {name}={environment[name]} is no number; torchrun sets it to one")
        rank, world_size, local = (int(environment[name]) for name in VARIABLES[:3])
        if rank >= world_size:
            raise ConfigError(f"parallel=ring: RANK={rank} is none of WORLD_SIZE={world_size} ranks, 0 is the first")
        local_rank = int(environment.get("LOCAL_RANK", rank))  # a launcher of one machine may leave it out
        return cls(rank, world_size, local, environment["MASTER_ADDR"], local_rank)

    @property
    def is_one_machine(self) -> bool:
        """Whether all processes are on this machine."""
        return self.local_world_size == self.world_size


def interface_of(settings: ParallelSettings, launch: Launch) -> str:
    """Return the network interface to bind the process group to.

    Raises:
        ConfigError: there is no such interface, it is needed and not named, or others reach it and `parallel.open` is
            false.
    """
    name = settings.interface or LOOPBACK
    if settings.interface is None and not launch.is_one_machine:
        raise ConfigError(
            f"parallel=ring: {launch.world_size} ranks on several machines need a network interface; name that of your "
            "private network or WireGuard (ip address lists them): parallel.interface=wg0 parallel.open=true"
        )
    address = address_of(name)
    if not address.is_loopback and not settings.open:
        raise ConfigError(
            f"parallel.interface={name} has the address {address}, which other machines reach, and ranks neither "
            "encrypt nor ask who connects; on a private network or WireGuard add parallel.open=true"
        )
    return name


def address_of(interface: str) -> ipaddress.IPv4Address:
    """Return the IPv4 address of a network interface of this machine.

    Raises:
        ConfigError: there is no such interface, or it has no IPv4 address.
    """
    known = [name for _, name in socket.if_nameindex()]
    if interface not in known:
        raise ConfigError(
            f"parallel.interface={interface} is no network interface; this machine has {', '.join(known)}"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            raise ConfigError(f"parallel.interface={interface} has no IPv4 address ({error.strerror})") from error
    return ipaddress.IPv4Address(found[20:24])
