"""Whether kernels are launched dependently, so that they may begin before those in front of them have ended.

Captured graphs are, on GPUs that can do it; `dependent_launch.py` says what the kernels do about it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

FIRST_CAPABILITY = (9, 0)  # of a Hopper

_is_on: ContextVar[bool] = ContextVar("dependent_launches", default=False)


@contextmanager
def dependent_launches(device: torch.device) -> Iterator[None]:
    """Launch the kernels of this thread dependently inside the block, if the device can do it."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
    before = _is_on.set(can)
    try:
        yield
    finally:
        _is_on.reset(before)


def dependence() -> dict[str, bool]:
    """Return the options of a launch: a kernel's DEPENDENT, and what Triton is told."""
    return {"DEPENDENT": True, "launch_pdl": True} if _is_on.get() else {"DEPENDENT": False}
