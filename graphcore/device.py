"""What this machine can do: the device, the dtype that suits it, and whether there is a compiler for its kernels."""

import ctypes
import functools
import platform
from pathlib import Path

import torch

from graphcore.compiler import find_compiler
from graphcore.errors import ConfigError, GraphError
from graphcore.processors import usable_processors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu", "cuda" or "cuda:N" names.

    Raises:
        ConfigError: it is not there, or graphcore does not run on it.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name} is no device; use auto, cpu, cuda or cuda:N", is_unknown=True) from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ConfigError(f"device={name} is not supported; use auto, cpu, cuda or cuda:N", is_unknown=True)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name} was asked for, but torch {torch.__version__} sees no CUDA device; use device=cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return what conf/dtype calls a dtype: "bf16" for torch.bfloat16. Any other text is returned as it is.

    Raises:
        ConfigError: graphcore does not compute in it.
    """
    names = {str(known): name for name, known in DTYPES.items()}
    if isinstance(dtype, torch.dtype) and str(dtype) not in names:
        raise ConfigError(f"dtype={dtype} is none that graphcore computes in; use {', '.join(names)} or 'auto'")
    return names.get(str(dtype), str(dtype))


def resolve_dtype(name: str, stored: str | None, device: torch.device) -> torch.dtype:
    """Return the compute dtype: the one named, or for "auto" one that the weights and the device are made for.

    Args:
        name: auto, fp32, bf16 or fp16.
        stored: the checkpoint's own dtype ("float32", "bfloat16", "float16"), or None.
        device: where it computes.
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
    """Return the dtype in which this processor multiplies matrices of `dtype` fast: without AVX-512 it is float32.

    Elsewhere torch multiplies 16-bit matrices without a library: on AVX2 at 10 GFLOP/s, where float32 gives 80.
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
    """Return what the processor can do and Linux has enabled, in the words of /proc/cpuinfo; elsewhere nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    flags = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return frozenset(next(flags, ()))


def find_cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would run, if one is there and works.

    Raises:
        GraphError: none could be tried.
    """
    try:
        return find_compiler("-fopenmp")
    except OSError as error:
        raise GraphError(f"no C++ compiler could be tried: {error}; make room there, or set TMPDIR") from error


def use_threads(asked: int | None) -> None:
    """Have torch, and graphcore's kernels after it, compute with that many threads.

    Args:
        asked: None is what torch would take, but no more than the processors that this process may use.
    """
    torch.set_num_threads(asked or min(torch.get_num_threads(), usable_processors()))


def return_freed_memory() -> None:
    """Give what the process has freed back to the system, where the C library keeps it unless it is asked.

    Reading a tokenizer of 262144 tokens leaves glibc with 200 MB that nobody uses. Source: malloc_trim(3).
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
