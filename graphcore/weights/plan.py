"""What will lie where, in bytes, before anything is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from graphcore.errors import PlanError

GIB = 1 << 30


@dataclass(frozen=True)
class Plan:
    """Bytes on the device.

    Attributes:
        group_nbytes: weights of each group, in order of use.
        kv_nbytes: static keys and values of all layers.
        device: where they lie.
    """

    group_nbytes: Sequence[int]
    kv_nbytes: int
    device: str

    @property
    def weight_nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.group_nbytes)

    @property
    def total_nbytes(self) -> int:
        """Bytes that must fit."""
        return self.weight_nbytes + self.kv_nbytes

    def check_fits(self, free_nbytes: int) -> None:
        """Return if everything fits.

        Raises:
            PlanError: it does not; the message has both figures and what to change.
        """
        if self.total_nbytes > free_nbytes:
            raise PlanError(
                f"streaming=off needs {gib(self.total_nbytes)} on {self.device} (weights {gib(self.weight_nbytes)}, kv "
                f"cache {gib(self.kv_nbytes)}), {gib(free_nbytes)} are free; use a smaller model, dtype or "
                "context_length"
            )


def free_nbytes(device: torch.device) -> int:
    """Return the memory that can still be taken on a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def gib(nbytes: int) -> str:
    """Return the size in GiB, for people."""
    return f"{nbytes / GIB:.2f} GiB"
