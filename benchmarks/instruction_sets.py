"""The instruction sets that engines are compared with: the processor's own, or AVX2 on a processor that has more.

Torch and oneDNN read variables when they are imported; graphcore chooses its library by the flags of the processor.
"""

import os

SETS = ("native", "avx2")
LIMIT = "GRAPHCORE_LIMIT_CPU"  # variable of an engine's process, and of tests
VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
OVER_AVX2 = ("avx512", "avx_vnni", "amx")  # beginnings of the names of what is left out


def environment_of(instruction_set: str) -> dict[str, str]:
    """Return the environment of an engine's process."""
    return {**os.environ, LIMIT: instruction_set, **(VARIABLES if instruction_set == "avx2" else {})}


def current_set() -> str:
    """Return the instruction set that this process was started for."""
    return os.environ.get(LIMIT, "native")


def apply_limit() -> None:
    """Let graphcore see only the flags of the instruction set that this process was started for."""
    if current_set() == "native":
        return
    from graphcore import device
    from graphcore.kernels.cpu import library

    flags = frozenset(flag for flag in device.cpu_flags() if not flag.startswith(OVER_AVX2))
    for module in (device, library):
        setattr(module, "cpu_flags", lambda: flags)  # noqa: B010 - both names of the function
