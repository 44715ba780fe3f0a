"""The instruction sets that engines are compared with: the processor's own, or AVX2 on a processor that has more.

Torch and oneDNN read variables when they are imported; graphcore chooses its library by the flags of the processor.
"""

import os

SETS = ("native", "avx2")
LIMIT = "GRAPHCORE_LIMIT_CPU"  # variable of an engine's process, and of tests
VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
OVER_AVX2 = ("avx512", "avx_vnni", "amx")  # beginnings of the names of what is left out
BUILD_FLAGS = ("-march=x86-64-v3",)  # of a library that is built because none was built in advance


def environment_of(instruction_set: str) -> dict[str, str]:
    """Return the environment of an engine's process.

    Raises:
        ValueError: no instruction set is called that.
    """
    if instruction_set not in SETS:
        raise ValueError(f"{LIMIT}={instruction_set} is no instruction set; use {' or '.join(SETS)}")
    return {**os.environ, LIMIT: instruction_set, **(VARIABLES if instruction_set == "avx2" else {})}


def current_set() -> str:
    """Return the instruction set that this process was started for."""
    return os.environ.get(LIMIT, "native")


def apply_limit() -> None:
    """Let graphcore use only the instruction set that this process was started for; call it before an engine loads."""
    if current_set() == "native":
        return
    from graphcore import device
    from graphcore.kernels.cpu import library

    flags = frozenset(flag for flag in device.cpu_flags() if not flag.startswith(OVER_AVX2))
    for module in (device, library):
        setattr(module, "cpu_flags", lambda: flags)  # noqa: B010 - both names of the function
    setattr(library, "native_flags", lambda: BUILD_FLAGS)  # noqa: B010
    for chosen in (library.prebuilt_library, library.build_library):
        chosen.cache_clear()
