"""The instruction sets that engines are compared with: the processor's own, or less on a processor that has more.

    native      all that the processor has
    avx-vnni    AVX2 and AVX-VNNI, as recent laptops have
    avx2        AVX2

Torch and oneDNN read variables when they are imported; graphcore chooses its library by the flags of the processor.
"""

import os
from importlib.util import find_spec

LIMIT = "GRAPHCORE_LIMIT_CPU"  # variable of an engine's process, and of tests
VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LEFT_OUT = {"avx-vnni": ("avx512", "amx"), "avx2": ("avx512", "avx_vnni", "amx")}  # beginnings of names of features
BUILD_FLAGS = {  # of a library that is built because none was built in advance
    "avx-vnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx2": ("-march=x86-64-v3",),
}
SETS = ("native", *LEFT_OUT)


def environment_of(instruction_set: str) -> dict[str, str]:
    """Return the environment of an engine's process.

    Raises:
        ValueError: no instruction set is called that.
    """
    if instruction_set not in SETS:
        raise ValueError(f"{LIMIT}={instruction_set} is no instruction set; use {', '.join(SETS)}")
    return {**os.environ, LIMIT: instruction_set, **(VARIABLES if instruction_set in LEFT_OUT else {})}


def current_set() -> str:
    """Return the instruction set that this process was started for."""
    return os.environ.get(LIMIT, "native")


def apply_limit() -> None:
    """Let graphcore use only the instruction set that this process was started for; call it before an engine loads."""
    if current_set() == "native" or not find_spec("graphcore"):
        return
    from graphcore import device
    from graphcore.kernels.cpu import library

    left_out, build_flags = LEFT_OUT[current_set()], BUILD_FLAGS[current_set()]
    flags = frozenset(flag for flag in device.cpu_flags() if not flag.startswith(left_out))
    for module in (device, library):
        setattr(module, "cpu_flags", lambda: flags)  # noqa: B010 - both names of the function
    setattr(library, "native_flags", lambda: build_flags)  # noqa: B010
    for chosen in (library.prebuilt_library, library.build_library):
        chosen.cache_clear()
