"""Programmatic dependent launch (PDL): kernels may begin before those in front of them have ended.

Captured graphs use it on GPUs that have it, unless the settings say no (`dependent_launches=off`).
`dependent_launch.py` says what the kernels do about it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

FIRST_CAPABILITY = (9, 0)  # of a Hopper

_is_on: ContextVar[bool] = ContextVar("dependent_launches", default=False)


def supports_pdl(device: torch.device) -> bool:
    """Return whether kernels of the device can be launched dependently."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


@contextmanager
def dependent_launches(is_on: bool) -> Iterator[None]:
    """Launch the kernels of this thread dependently inside the block, if `is_on`; the device can do it."""
    before = _is_on.set(is_on)
    try:
        yield
    finally:
        _is_on.reset(before)


def pdl_options() -> dict[str, bool]:
    """Return the options of a launch: a kernel's DEPENDENT, and what Triton is told."""
    return {"DEPENDENT": True, "launch_pdl": True} if _is_on.get() else {"DEPENDENT": False}
