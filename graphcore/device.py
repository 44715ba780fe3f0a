"""What this machine can do: the device, the dtype that suits it, and whether there is a compiler for its kernels."""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from graphcore.errors import ConfigError

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
        raise ConfigError(f"device={name} is no device; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise ConfigError(f"device={name} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device={name} was asked for, but torch {torch.__version__} sees no CUDA device; use device=cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


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
def cpu_name() -> str:
    """Return the processor's model name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@functools.cache
def find_cpp_compiler() -> str | None:
    """Return the C++ compiler that Inductor would run, if one is there and works; it is asked to build a line.

    Inductor takes the one that CXX names, so a CXX that does not work is no compiler, whatever else there is.
    """
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.cpp"
            source.write_text("int main() { return 0; }\n", encoding="utf-8")
            command = [path, "-fopenmp", str(source), "-o", str(Path(folder) / "probe")]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return path
    return None


def return_freed_memory() -> None:
    """Give what the process has freed back to the system, where the C library keeps it unless it is asked.

    Reading a tokenizer of 262144 tokens leaves glibc with 200 MB that nobody uses. Source: malloc_trim(3).
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
