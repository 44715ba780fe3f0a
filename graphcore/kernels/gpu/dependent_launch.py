"""Kernels that begin before those in front of them have ended: programmatic dependent launch.

A kernel takes about two microseconds to begin and to end, in which little memory moves. Launched dependently, the next
one's programs begin as soon as all of this one's have let them, and wait there. Every program of every dependent kernel
waits before it reads or writes anything; then a kernel that has ended implies that all before it have, and memory may
be used again in the old order.

Small kernels let the next one begin at once, products only behind their loops: programs that begin while others leave
are not spread evenly over the multiprocessors, and a product is as slow as the one with most of them. Asking for
weights before the wait was tried: docs/lab/gpu.md.

Captured graphs run so (`pdl.py`).
Source: CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, griddepcontrol.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """Let the next kernel's programs begin as soon as all of this one's have come here."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    """Wait until all kernels before this one have ended."""
    if DEPENDENT:
        gdc_wait()
