"""Networks of their own, joined by a switch with a rate and a latency: what processes on several machines see.

    network namespace 0   10.77.0.1 on device `cable` --.
    network namespace 1   10.77.0.2 on device `cable` ---+-- this file's process: each packet waits, then goes on
    ...                                               --'

For kernels without netem. Needs root, and /dev/net/tun. A namespace sends one packet after another at the rate, and
each arrives later by the latency. The process that passes packets on goes before all others of the machine.
"""

import ctypes
import fcntl
import os
import selectors
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEVICE = "cable"
SWITCH = str(Path(__file__).resolve())
CLONE_NEWNET = 0x40000000  # sched.h
TUNSETIFF = 0x400454CA  # linux/if_tun.h, likewise the flags
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
DESTINATION = slice(16, 20)  # of an IPv4 header
MOST_NBYTES = 65536
MANY = 64  # packets of a device that are taken before others have their turn
READY = "ready"


def address_of(rank: int) -> str:
    """Return the IPv4 address of a namespace's device."""
    return f"10.77.0.{rank + 1}"


@contextmanager
def slow_network(count: int, rate: float, latency: float) -> Iterator[list[list[str]]]:
    """Make namespaces, and yield for each the beginning of a command that runs in it.

    Args:
        rate: bytes per second.
        latency: seconds that a packet takes besides.

    Raises:
        OSError: this user may not make namespaces or devices.
    """
    names = [f"graphcore-{os.getpid()}-{rank}" for rank in range(count)]
    made: list[str] = []
    switch = None
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        command = [sys.executable, SWITCH, str(rate), str(latency), *names]
        switch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert switch.stdout is not None, "it is a pipe"
        if switch.stdout.readline().strip() != READY:
            raise OSError(switch.communicate()[1].strip().rpartition("\n")[2])
        inside = [["ip", "netns", "exec", name] for name in names]
        for rank, prefix in enumerate(inside):
            _run(*prefix, "ip", "address", "add", f"{address_of(rank)}/24", "dev", DEVICE)
            _run(*prefix, "ip", "link", "set", DEVICE, "up")
            _run(*prefix, "ip", "link", "set", "lo", "up")
        yield inside
    finally:
        if switch is not None:
            switch.kill()
            switch.communicate()
        for name in made:
            _run("ip", "netns", "del", name)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command)}: {error.stderr.strip()}") from error


def open_device(name: str) -> int:
    """Return a file descriptor of a new device in a network namespace; each read and write is one packet."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/var/run/netns/{name}").open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


class Switch:
    """Passes packets from device to device, each when it is due.

    Args:
        devices: file descriptor of each namespace's device, in the order of addresses.
        rate, latency: as for `slow_network`.
    """

    def __init__(self, devices: Sequence[int], rate: float, latency: float) -> None:
        self._devices, self._rate, self._latency = devices, rate, latency
        self._free_at = dict.fromkeys(devices, 0.0)
        self._waiting: dict[int, list[tuple[float, int, bytes]]] = {device: [] for device in devices}
        self._selector = selectors.DefaultSelector()
        for device in devices:
            self._selector.register(device, selectors.EVENT_READ)

    def run(self) -> None:
        """Pass packets on until the process is killed."""
        while True:
            due = min((queue[0][0] for queue in self._waiting.values() if queue), default=None)
            wait = None if due is None else max(0.0, due - time.perf_counter())
            for key, _ in self._selector.select(wait):
                self._take(key.fd)
            self._give(time.perf_counter())

    def _take(self, device: int) -> None:
        for _ in range(MANY):
            try:
                packet = os.read(device, MOST_NBYTES)
            except BlockingIOError:
                return
            target = packet[DESTINATION][-1] - 1
            if packet[0] >> 4 == 4 and 0 <= target < len(self._devices):  # IPv6 asks for routers, which are not there
                sent = max(self._free_at[device], time.perf_counter()) + len(packet) / self._rate
                self._free_at[device] = sent
                self._waiting[device].append((sent + self._latency, self._devices[target], packet))

    def _give(self, now: float) -> None:
        for queue in self._waiting.values():
            count = next((at for at, (due, *_) in enumerate(queue) if due > now), len(queue))
            for _, target, packet in queue[:count]:
                os.write(target, packet)
            del queue[:count]


if __name__ == "__main__":
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a network does not wait for busy processors
    devices = [open_device(name) for name in sys.argv[3:]]
    print(READY, flush=True)
    Switch(devices, float(sys.argv[1]), float(sys.argv[2])).run()
