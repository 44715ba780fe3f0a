"""The device, compute dtype and C++ compiler that this machine offers."""

import ctypes
import functools
import gc
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphcore.compiler import find_compiler
from graphcore.config.dtype_names import real_name
from graphcore.config.validate import check_device_name
from graphcore.errors import ConfigError, GraphError
from graphcore.processors import usable_processors
from graphcore.threads import refuse_many_threads

MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD (malloc.h)
RETURNED_NBYTES = 128 << 10  # glibc's initial threshold
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu", "cuda" or "cuda:N" names.

    Raises:
        ConfigError: the device does not exist, or graphcore does not run on it.
    """
    check_device_name(name)
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name} was asked for, but torch {torch.__version__} sees no CUDA device; use device=cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def device_of_rank(name: str, local_rank: int) -> torch.device:
    """Return the device of one of several processes on this machine.

    "auto" and "cuda" give each process the GPU of its number; more processes than GPUs share them in turn. A GPU that
    is named with its number is kept.

    Args:
        local_rank: number of the process among those of the machine.

    Raises:
        ConfigError: as `resolve_device`.
    """
    device = resolve_device(name)
    if device.type != "cuda" or name not in ("auto", "cuda"):
        return device
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return the name of a dtype in conf/dtype: "bf16" for torch.bfloat16 or "bfloat16". Other text is unchanged.

    Raises:
        ConfigError: graphcore does not compute in this dtype.
    """
    names = {str(known): name for name, known in DTYPES.items()}
    if isinstance(dtype, torch.dtype) and str(dtype) not in names:
        raise ConfigError(f"dtype={dtype} is not a compute dtype; use {', '.join(names)} or 'auto'")
    return real_name(str(dtype))


def resolve_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """Return the compute dtype: the one named, or for "auto" one that suits the weights and the device.

    Args:
        name: auto, fp32, bf16 or fp16.
        stored: the checkpoint's own dtype ("float32", "bfloat16", "float16"), or None.
        device: device that computes.
    """
    if name != "auto":
        return DTYPES[name]
    if stored == "float32" and device.type == "cpu":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16
    return torch.bfloat16


@functools.cache
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which this processor multiplies matrices of `dtype` fast: float32 without AVX-512.

    Without AVX-512, torch multiplies 16-bit matrices without a library: at 10 GFLOP/s on AVX2; float32 reaches 80.
    """
    if dtype is torch.float32:
        return dtype
    library = torch.ops.mkldnn
    is_there = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # torch does not type it
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return dtype if is_there and getattr(library, name)() else torch.float32


@functools.cache
def cpu_name() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the processor's features that Linux has enabled, as /proc/cpuinfo names them; empty on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, ()))


def find_cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would run, if it exists and works.

    Raises:
        GraphError: the compiler could not be tried.
    """
    try:
        return find_compiler("-fopenmp")
    except OSError as error:
        raise GraphError(f"no C++ compiler could be tried: {error}; make room there, or set TMPDIR") from error


def use_threads(asked: int | None, processes: int = 1) -> None:
    """Set the number of threads that torch and graphcore's kernels compute with.

    Args:
        asked: number of threads; None for torch's default, limited to the processors that this process may use.
        processes: processes that share these processors, which torchrun tells to take one thread each.

    Raises:
        ThreadLimitError: the system does not start that many.
    """
    usual = torch.get_num_threads() if processes == 1 else max(1, usable_processors() // processes)
    threads = asked or min(usual, usable_processors())
    refuse_many_threads(threads - 1, "torch's threads")  # torch would end the process
    torch.set_num_threads(threads)


def return_freed_memory() -> None:
    """Return freed memory to the system; glibc would keep it.

    Reading a tokenizer of 262144 tokens leaves glibc with 200 MB of unused memory. Source: malloc_trim(3).
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def collect_garbage(device: torch.device) -> None:
    """Free tensors that only cycles of objects still refer to, and return a GPU's unused memory to the driver.

    Programs and tables refer to each other, so a closed model is freed by Python's garbage collector alone, which may
    run much later: another model would be refused for want of memory.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def return_blocks_when_freed() -> None:
    """Return each block of 128 KiB or more to the system as soon as it is freed, from now on.

    glibc does this initially, but it raises the threshold when a large block is freed. Blocks under the threshold come
    from a heap, where a small block behind freed ones keeps them from being returned. Source: mallopt(3),
    M_MMAP_THRESHOLD.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, RETURNED_NBYTES)


def on_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Return numbers as a tensor on a device, without waiting for the GPU."""
    is_gpu = device.type == "cuda"  # a copy from memory that is not pinned would wait for the whole stream
    return torch.tensor(values, dtype=dtype, pin_memory=is_gpu, device="cpu").to(device, non_blocking=is_gpu)
