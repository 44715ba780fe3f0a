"""What the machine does at best, measured in the process whose numbers are compared with it.

    copy     bytes read and written per second by copying within the device's memory     bounds decode
    read     bytes read per second by a sum over float32
    h2d      bytes per second from page-locked host memory to the device                 bounds streaming
    gemm     bf16 multiply-adds, two operations each, of a large square product          bounds prefill

On the CPU, in a dry run, the same code runs between ordinary buffers.
"""

import time
from collections.abc import Callable

import torch

PASSES = 5  # timed groups
INNER = 4  # calls in each group


def seconds_of(work: Callable[[], object], device: torch.device) -> list[float]:
    """Return the seconds of one call, in each of some groups of calls, after one that is not timed."""
    work()
    found = []
    for _ in range(PASSES):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(INNER):
                work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / INNER)
        else:
            began = time.perf_counter()
            for _ in range(INNER):
                work()
            found.append((time.perf_counter() - began) / INNER)
    return found


def copy_rates(device: torch.device, nbytes: int) -> list[float]:
    """Return GB/s of copying within the device, bytes read and bytes written together."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return [2 * nbytes / each / 1e9 for each in seconds_of(lambda: target.copy_(source), device)]


def read_rates(device: torch.device, nbytes: int) -> list[float]:
    """Return GB/s of a sum over float32."""
    source = torch.ones(nbytes // 4, device=device)
    out = torch.empty((), device=device)
    return [nbytes / each / 1e9 for each in seconds_of(lambda: torch.sum(source, dim=0, out=out), device)]


def transfer_rates(device: torch.device, nbytes: int, to_device: bool = True) -> list[float]:
    """Return GB/s of one stream of copies from page-locked host memory, or back."""
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    other = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target, source = (other, host) if to_device else (host, other)
    return [nbytes / each / 1e9 for each in seconds_of(lambda: target.copy_(source, non_blocking=True), device)]


def gemm_rates(device: torch.device, size: int, rows: int | None = None) -> list[float]:
    """Return TFLOP/s of [rows, size] x [size, size] in bf16."""
    rows = size if rows is None else rows
    x = torch.randn(rows, size, dtype=torch.bfloat16, device=device)
    weight = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    out = torch.empty(rows, size, dtype=torch.bfloat16, device=device)
    flops = 2 * rows * size * size
    return [flops / each / 1e12 for each in seconds_of(lambda: torch.mm(x, weight.T, out=out), device)]
