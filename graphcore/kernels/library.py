"""The C++ kernels as a loaded library: built once per machine with its own compiler, kept in the cache folder.

The sources name no torch header, so that they build in seconds; Python calls plain functions through ctypes. The
compiler is told to use what this processor has (-march=native), and the sources choose by what it then defines:
AVX-512 VNNI, AVX2, or plain vectors.
"""

import ctypes
import functools
import os
import platform
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from graphcore.device import cpu_name, find_cpp_compiler
from graphcore.errors import GraphError

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-Wno-psabi")
# Unpacking is bit by bit as ggml does it: no contraction into fused operations. And GCC 12's induction variable pass
# gets its loop over a group's rows wrong (the loop ends before it begins; tests/unit/kernels would see it).
EXACT_SOURCES = frozenset({"matrix.cpp"})
EXACT_FLAGS = ("-ffp-contract=off", "-fno-ivopts")


def native_flags() -> tuple[str, ...]:
    """Return the flags that have the compiler use all of this processor."""
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)


@functools.cache
def build_library(folder: Path, target: Sequence[str] | None = None) -> Path | None:
    """Return the library's file, built now if the folder does not have it; None without a working compiler.

    Args:
        folder: where built libraries are kept.
        target: flags that choose the processor; None is this one.

    Raises:
        GraphError: the compiler refuses the sources, or the folder cannot be written to; the message says what.
    """
    compiler = find_cpp_compiler()
    if compiler is None:
        return None
    flags = (*FLAGS, *(native_flags() if target is None else target))
    path = folder / f"kernels-{_fingerprint(compiler, flags)}.so"
    try:
        if not _is_whole(path):
            _build(compiler, flags, path)
    except OSError as error:
        raise GraphError(
            f"graphcore's kernels cannot be kept in {folder}: {error.strerror}; set cache_dir to a folder that can be "
            "written to"
        ) from error
    return path


def _build(compiler: str, flags: Sequence[str], path: Path) -> None:
    """Build the library at `path`, and what it hashes to beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        built = Path(scratch) / "kernels.so"
        _compile(compiler, flags, Path(scratch))
        digest = Path(scratch) / "digest"
        digest.write_text(sha256(built.read_bytes()).hexdigest(), encoding="ascii")
        built.replace(path)  # another process may build the same: the last one wins
        digest.replace(path.with_suffix(".sha256"))


def _is_whole(path: Path) -> bool:
    """Return whether the library is there as it was built: loading one that was cut short would end the process."""
    digest = path.with_suffix(".sha256")
    if not path.exists() or not digest.exists():
        return False
    return sha256(path.read_bytes()).hexdigest() == digest.read_text(encoding="ascii")


def _fingerprint(compiler: str, flags: Sequence[str]) -> str:
    """Return a name for what the compiler would make of these sources on this processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = sha256("\0".join((cpu_name(), version, *flags, *EXACT_FLAGS)).encode())
    for source in sorted(SOURCES.glob("*.*")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, flags: Sequence[str], folder: Path) -> None:
    """Build kernels.so in the folder, its parts side by side."""

    def run(*arguments: str) -> None:
        done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise GraphError(f"{compiler} could not build graphcore's kernels: {first.strip()}; update the compiler")

    def compile_part(source: Path) -> str:
        built = str(folder / f"{source.stem}.o")
        exact = EXACT_FLAGS if source.name in EXACT_SOURCES else ()
        run(*flags, *exact, "-c", str(source), "-o", built)
        return built

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        parts = list(pool.map(compile_part, sorted(SOURCES.glob("*.cpp"))))
    run(*flags, "-shared", *parts, "-o", str(folder / "kernels.so"))


class Matrix(ctypes.Structure):
    """One weight matrix as the kernels see it; mirrors native/matrix.h."""

    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


@functools.cache
def open_library(path: str) -> ctypes.CDLL:
    """Return the library with its functions' types set; loaded once per process."""
    library = ctypes.CDLL(path)
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
    matrix = ctypes.POINTER(Matrix)
    signatures = {
        "team": (pointer, [number]),
        "team_free": (None, [pointer]),
        "packed_nbytes": (size, [number, number, number]),
        "pack": (None, [number, number, number, number, pointer, size, pointer]),
        "unpack": (None, [number, matrix, number, pointer]),
        "rows": (None, [matrix, pointer, number, number, pointer]),
        "linear": (None, [number, matrix, pointer, number, number, number, pointer, pointer]),
        "run": (None, [pointer, pointer, number, pointer, size, size]),
        "attend_chunk": (None, [number, pointer]),
        "read": (ctypes.c_uint64, [number, pointer, size]),
        "attend_floats": (size, [number, number]),
        "activations_nbytes": (size, [number, number]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"graphcore_{name}")  # kept by the library; indexing would make a new one each time
        function.restype, function.argtypes = result, arguments
    return library
