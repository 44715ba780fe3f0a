"""Programmatic dependent launch (PDL): kernels whose programs start before the preceding kernels have ended.

A kernel takes about two microseconds to start and to end, in which little memory moves. With PDL, the next kernel's
programs start as soon as all programs of this one have allowed it, and wait. Every program of every dependent kernel
waits before it reads or writes anything; so when a kernel has ended, all kernels before it have ended, too, and memory
may be reused in stream order.

Small kernels let the next one start at once, products only after their loops: programs that start while others end are
not spread evenly over the multiprocessors, and a product is as slow as the multiprocessor with most of them.
Prefetching weights before the wait was tried: docs/lab/gpu.md.

Captured graphs use PDL (`pdl.py`).
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
