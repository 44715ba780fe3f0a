"""Programmatic dependent launch (PDL): kernels may start before the preceding ones have ended.

Captured graphs use it on GPUs that support it, unless it is turned off (`dependent_launches=off`).
`dependent_launch.py` has the device functions that kernels call for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

FIRST_CAPABILITY = (9, 0)  # compute capability of Hopper

_is_on: ContextVar[bool] = ContextVar("dependent_launches", default=False)


def supports_pdl(device: torch.device) -> bool:
    """Return whether kernels of the device can be launched dependently."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


@contextmanager
def dependent_launches(is_on: bool) -> Iterator[None]:
    """Launch this thread's kernels with PDL inside the block, if `is_on`; the device must support it."""
    before = _is_on.set(is_on)
    try:
        yield
    finally:
        _is_on.reset(before)


def pdl_options() -> dict[str, bool]:
    """Return the options of a launch: the kernel's constant DEPENDENT, and Triton's launch_pdl."""
    return {"DEPENDENT": True, "launch_pdl": True} if _is_on.get() else {"DEPENDENT": False}
