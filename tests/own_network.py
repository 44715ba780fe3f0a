"""A network of one's own for what a test starts, so that it reaches nothing else and has all ports to itself."""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000  # sched.h
SIOCGIFFLAGS, SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
IFF_UP = 1  # linux/if.h
REQUEST = "16sh22x"  # struct ifreq: name, flags


@contextmanager
def own_network() -> Iterator[None]:
    """Run the block, and what it starts, in a network with a loopback device alone; without the right to, in this one.

    Only this thread changes its network.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as before:  # noqa: PTH123 - a namespace is no file with a path of its own
        if libc.unshare(CLONE_NEWNET):
            yield
            return
        try:
            switch_on(b"lo")
            yield
        finally:
            if libc.setns(before.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def switch_on(device: bytes) -> None:
    with socket.socket() as any_socket:
        _, flags = struct.unpack(REQUEST, fcntl.ioctl(any_socket, SIOCGIFFLAGS, struct.pack(REQUEST, device, 0)))
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack(REQUEST, device, flags | IFF_UP))
