"""Finds or builds the library of C++ kernels: built by pip if possible, else once per machine, in the cache folder.

The sources include no torch headers, so that they build in seconds; Python calls plain functions through ctypes, and
compiled steps call two of them as torch's ops (torch_ops.py). The
compiler targets the native processor, and the sources select AVX-512 VNNI, AVX-VNNI, AVX2 or plain vectors by its
predefined macros (graphcore/compiler.py lists processors and compilers). AVX512-BF16 is asked for at run time.
"""

import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from graphcore.build_folder import build_folder, temporary_folder
from graphcore.checked_file import read_checked, write_checked
from graphcore.compiler import (
    Compiler,
    CompilerError,
    build_libraries,
    find_own_compiler,
    fingerprint,
    prebuilt_name,
    targets_here,
)
from graphcore.device import cpu_flags, cpu_name
from graphcore.errors import GraphError
from graphcore.kernels.cpu import torch_ops
from graphcore.progress import Progress, ignore_progress
from graphcore.quant.registry import FORMATS
from graphcore.threads import naming_limit

SOURCES = Path(__file__).parent / "native"
PREBUILT = Path(__file__).parent / "built"  # hatch_build.py puts the libraries there

# Numbers of the C interface (native/encodings.h, native/activations.h).
FORMAT_NUMBERS = dict(
    sorted(
        ((one.name, one.kernel_number) for one in FORMATS.values() if one.kernel_number is not None),
        key=lambda pair: pair[1],
    )
)
DTYPE_NUMBERS = {
    torch.float32: FORMAT_NUMBERS["f32"],
    torch.float16: FORMAT_NUMBERS["f16"],
    torch.bfloat16: FORMAT_NUMBERS["bf16"],
}
ROUNDINGS = {"float": 0, "block": 1, "token": 2, "wide": 3}


def native_flags() -> tuple[str, ...]:
    """Return the compiler flags that enable all instructions of this processor."""
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)


def find_library(folder: Path, on_progress: Progress = ignore_progress) -> Path | None:
    """Return the library's file: a compatible prebuilt one, else the one in the folder, which is built now if missing.

    Args:
        folder: folder of libraries that are built at their first use.
        on_progress: function called in the stage "build kernels" if the library is built now.

    Returns:
        The file; None if there is neither a compatible prebuilt library nor a compiler.

    Raises:
        GraphError: the build failed, as in `build_library`.
    """
    return prebuilt_library() or build_library(folder, on_progress=on_progress)


def find_runnable_library(kept: Path, on_progress: Progress = ignore_progress) -> tuple[Path | None, str]:
    """Return a library that this process can load, and a note if the next start has to build it again.

    Args:
        kept: folder of libraries that are built at their first use. If it is not writable, or mounted noexec, a
            temporary folder is used instead.
        on_progress: the same as in `find_library`.

    Returns:
        The file, or None as in `find_library`; and the note, which may be empty.

    Raises:
        GraphError: the build failed, or the library cannot be loaded from any folder.
    """
    try:
        library = find_library(kept, on_progress)
    except GraphError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        folder, note = build_folder(kept)
        return find_library(folder, on_progress), note
    if library is None or loads(library):
        return library, ""
    temporary = temporary_folder()  # the library's folder may be mounted noexec
    copied = None if temporary is None else Path(shutil.copy(library, temporary))
    if copied is None or not loads(copied):
        raise GraphError(f"{library} cannot be loaded; set cache_dir to another folder")
    return copied, ""


def can_have_kernels() -> bool:
    """Return whether a library is prebuilt or could be built, without building one."""
    try:
        return prebuilt_library() is not None or find_own_compiler() is not None
    except OSError:  # no disk space to try a compiler; the build itself reports the error
        return True


@functools.cache
def prebuilt_library() -> Path | None:
    """Return the best library that was prebuilt from these sources and runs on this processor, or None."""
    for target in targets_here():
        path = PREBUILT / prebuilt_name(SOURCES, target)
        if target.needs <= cpu_flags() and path.exists() and loads(path):
            return path
    return None


def loads(path: Path) -> bool:
    """Return whether this system can load the library, which may have been built for a newer system."""
    try:
        open_library(str(path))
    except OSError:
        return False
    return True


@functools.cache
def build_library(
    folder: Path, target: Sequence[str] | None = None, on_progress: Progress = ignore_progress
) -> Path | None:
    """Return the library's file, built now if the folder does not have it; None without a working compiler.

    Args:
        folder: folder of built libraries.
        target: compiler flags of the target processor; None for this machine's.
        on_progress: function called in the stage "build kernels", with the number of compiled sources and of all.

    Raises:
        GraphError: the compiler rejects the sources, or the folder cannot be written to; the message says why.
    """
    try:
        compiler = find_own_compiler()
        if compiler is None:
            return None
        flags = native_flags() if target is None else tuple(target)
        path = folder / f"kernels-{_name(compiler, flags)}.so"
        if read_checked(path) is None:  # loading a damaged library could crash the process
            with naming_limit("a compiler of graphcore's kernels"):
                _build(compiler, flags, path, on_progress)
    except CompilerError as error:
        raise GraphError(f"{error}; update the compiler") from error
    except OSError as error:
        raise GraphError(
            f"graphcore's kernels cannot be kept in {folder}: {error.strerror}; set cache_dir to a folder that can be "
            "written to"
        ) from error
    return path


def _build(compiler: Compiler, flags: Sequence[str], path: Path, on_progress: Progress) -> None:
    """Build the library at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / "kernels.so"
        build_libraries(
            compiler, SOURCES, {built: flags}, lambda done, total: on_progress("build kernels", None, done, total)
        )
        write_checked(path, built.read_bytes())


def _name(compiler: Compiler, flags: Sequence[str]) -> str:
    """Return a fingerprint of sources, compiler, flags and processor, which names the library."""
    version = subprocess.run([*compiler.command, "--version"], capture_output=True, text=True, check=False).stdout
    return fingerprint(SOURCES, cpu_name(), version, *compiler.link, *flags)


class Matrix(ctypes.Structure):
    """The kernels' struct of one weight matrix; the fields mirror native/matrix.h."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


@functools.cache
def open_library(path: str) -> ctypes.CDLL:
    """Return the loaded library, with the types of its functions set; loaded once per process."""
    library = ctypes.CDLL(path)
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
    matrix = ctypes.POINTER(Matrix)
    signatures = {
        "share_threads": (None, [pointer, pointer]),
        "seconds_late": (ctypes.c_double, [number]),
        "packed_nbytes": (size, [number, number, number]),
        "unpacks": (ctypes.c_bool, [number]),
        "pack": (None, [number, number, number, number, pointer, size, pointer]),
        "can_quantize": (ctypes.c_bool, [number]),
        "quantize": (None, [number, number, number, ctypes.c_int64, pointer, pointer, pointer]),
        "pack_level_planes": (None, [number, number, number, pointer, size, pointer]),
        "unpack": (None, [number, matrix, number, pointer]),
        "rows": (None, [matrix, pointer, number, number, pointer]),
        "products": (None, [number, pointer, number, number, number, number, pointer, number]),
        "has_panels": (ctypes.c_bool, []),
        "has_amx": (ctypes.c_bool, []),
        "panels": (None, [number, ctypes.c_bool, pointer, number, number, pointer, number]),
        "draw_nbytes": (size, [number]),
        "draw": (None, [number, pointer, number, number, pointer]),
        "run": (None, [number, pointer, pointer, number, pointer, number, pointer, size, size]),
        "attend_chunk": (None, [number, pointer]),
        "norm_rows": (None, [number, pointer]),
        "rotate_rows": (None, [number, pointer]),
        "gate_rows": (None, [number, pointer]),
        "add_rows": (None, [number, pointer]),
        "experts": (None, [number, pointer]),
        "read": (ctypes.c_uint64, [number, pointer, size]),
        "attend_floats": (size, [number, number, number]),
        "delta_heads": (None, [number, pointer]),
        "delta_floats": (size, [number, number]),
        "gated_convolution": (None, [number, pointer]),
        "activations_nbytes": (size, [number, number]),
        "implement_torch_ops": (number, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"graphcore_{name}")  # ctypes caches attributes, but not items
        function.restype, function.argtypes = result, arguments
    library.graphcore_share_threads(*_openmp_functions())
    torch_ops.implement(library, path)
    return library


def _openmp_functions() -> tuple[ctypes.c_void_p | None, ctypes.c_void_p | None]:
    """Return the addresses of libgomp's GOMP_parallel and omp_get_thread_num; None if torch uses another OpenMP.

    torch loads its OpenMP library for all modules of the process.
    """
    everything = ctypes.CDLL(None)
    try:
        region, number = everything.GOMP_parallel, everything.omp_get_thread_num
    except AttributeError:
        return None, None
    return ctypes.cast(region, ctypes.c_void_p), ctypes.cast(number, ctypes.c_void_p)
