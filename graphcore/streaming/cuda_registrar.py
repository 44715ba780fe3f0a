"""Locks memory for a GPU through CUDA's runtime. Not yet run on hardware."""

import ctypes
import os
from contextlib import suppress
from dataclasses import dataclass

import torch

PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegisterPortable, cudaHostRegisterMapped (driver_types.h)
DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER (cuda.h)


@dataclass(frozen=True)
class CudaRegistrar:
    """The driver of a GPU; what it locks, kernels can read."""

    device: torch.device

    def register(self, address: int, nbytes: int) -> str:
        """Lock memory; return why that failed, or nothing."""
        # On whatever device is current, a context of half a gigabyte would be made.
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch does not type it
            code = runtime.cudaHostRegister(address, nbytes, PORTABLE_AND_MAPPED)
            if int(code) == 0:
                return ""
            self._forget_error()
            return str(runtime.cudaGetErrorString(code))

    def unregister(self, address: int) -> None:
        """Unlock what was locked at that address."""
        with torch.cuda.device(self.device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # as above
            if int(runtime.cudaHostUnregister(address)) != 0:
                self._forget_error()

    def device_address(self, address: int) -> int | None:
        """Return where kernels find a byte of locked memory; None if they cannot read it."""
        driver = ctypes.CDLL("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
        found = ctypes.c_uint64(0)
        with torch.cuda.device(self.device):
            code = driver.cuPointerGetAttribute(ctypes.byref(found), DEVICE_POINTER, ctypes.c_uint64(address))
        return found.value if code == 0 else None

    def _forget_error(self) -> None:
        """Have the runtime forget a refusal, for which the next kernel would be blamed.

        Torch's binding cannot ask for it (cudaGetLastError reads and forgets), but a copy on the device does, and
        raises it. Source: aten/src/ATen/native/cuda/Copy.cu, copy_device_to_device, of torch 2.11 to 2.15.
        """
        with suppress(RuntimeError):
            pair = torch.zeros(2, device=self.device)
            pair[:1].copy_(pair[1:])
