"""A CUDA device that is not there, for a compiler that only has to write code for it.

Tensors on it are fake. What Inductor asks about the device is answered for one card; nothing is allocated, run or
timed. The answers hold until the process ends, so this belongs into a process of its own.
"""

import ctypes
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from gpu_compile import AbsentGpu

CAPABILITY = 90
HOPPER = SimpleNamespace(  # an H200, as far as a compiler asks
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    shared_memory_per_block_optin=232448,
    L2_cache_size=60 << 20,
    total_memory=140 << 30,
)
# A CPU build of torch has no guard for CUDA devices, and asks it whenever a tensor says that it is on one, even a fake
# one. A CUDA build without a GPU puts the same no-op in its place (torch/csrc/Module.cpp, ensureCUDADeviceGuardSet).
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void set_guard() {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
"""


def pretend(compiler: str) -> None:
    """Have fake tensors on "cuda" work, and Inductor write Triton kernels for them. Args: compiler: of C++."""
    if torch.version.cuda is None:
        _set_guard(compiler)
    import torch._inductor.scheduler as scheduler
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime.hints import DeviceProperties
    from triton.runtime import driver

    driver.set_active(AbsentGpu(CAPABILITY))
    scheduler.has_triton = lambda *_: True
    DeviceProperties.create = classmethod(_properties)
    torch.cuda.get_device_properties = lambda *_: HOPPER
    torch.cuda.get_device_capability = lambda *_: (HOPPER.major, HOPPER.minor)
    CudaInterface.get_device_properties = staticmethod(lambda *_: HOPPER)
    CudaInterface.get_compute_capability = staticmethod(lambda *_: CAPABILITY)
    CudaInterface.is_bf16_supported = staticmethod(lambda *_, **__: True)


def _properties(cls: type, device: torch.device) -> object:
    names = ("multi_processor_count", "major", "regs_per_multiprocessor", "max_threads_per_multi_processor")
    known = {name: getattr(HOPPER, name) for name in (*names, "max_threads_per_block", "warp_size")}
    return cls(type=device.type, index=device.index or 0, cc=CAPABILITY, **known)


def _set_guard(compiler: str) -> None:
    """Build and load what puts the guard in its place: C++ that names no CUDA header, in about a second."""
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD, encoding="ascii")
        flags = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10"]
        subprocess.run([compiler, str(source), *flags, "-o", str(library)], check=True)
        ctypes.CDLL(str(library)).set_guard()
