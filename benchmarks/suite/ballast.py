"""A fence around a GPU's memory: a process of its own holds all of it but as much as a part may use.

    python ballast.py BYTES_TO_LEAVE_FREE        says "ready", holds until its standard input ends

The fence is a wall, not a promise: an allocation beyond it fails.
"""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

INTERVAL = 0.02  # seconds between two looks at the free memory
NOT_FOR_US = 4 << 20  # bytes that a driver may round up to


@contextmanager
def fenced(device: torch.device, nbytes: int) -> Iterator[int]:
    """Leave that many bytes of the device's memory free while the block runs; yield what really is free.

    On the CPU, in a dry run, nothing is held.

    Raises:
        RuntimeError: the memory could not be held.
    """
    if device.type != "cuda":
        yield nbytes
        return
    torch.empty(1, device=device)  # the driver's own memory for this process is taken before the fence stands
    command = [sys.executable, __file__, str(nbytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None, "it has a pipe"
        assert holder.stdout is not None, "it has a pipe"
        try:
            if holder.stdout.readline().strip() != "ready":
                raise RuntimeError(f"could not leave {nbytes} bytes free; the message is above")
            yield torch.cuda.mem_get_info(device)[0]
        finally:
            holder.stdin.close()


class FreeWatch:
    """The least free memory of a device while the block runs; other processes must not change theirs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.least = self._free()

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 0

    def __enter__(self) -> "FreeWatch":
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.least = min(self.least, self._free())

    def _sample(self) -> None:
        while not self._ended.wait(INTERVAL):
            self.least = min(self.least, self._free())


def hold(nbytes_free: int) -> None:
    """Take all memory but that, and keep it until standard input ends."""
    torch.empty(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(max(0, free - nbytes_free - NOT_FOR_US), dtype=torch.uint8, device="cuda")
    print("ready", flush=True)
    sys.stdin.read()
    del held


if __name__ == "__main__":
    hold(int(sys.argv[1]))
