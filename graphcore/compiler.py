"""Finds a C++ compiler, and builds a shared library from the kernels' sources for a processor.

This file imports only the standard library: the build hook (hatch_build.py) loads it by its path, where neither torch
nor graphcore is installed yet.

    built          when                    for                               by
    in advance     pip installs            each of this machine's TARGETS    g++ or clang++, else ziglang from PyPI
    at first use   no built library fits   this processor (-march=native)    g++ or clang++
"""

import errno
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

# The sources need no C++ runtime (native/team.h), so a library loads with any libstdc++.
NO_RUNTIME = ("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics")
LINK = ("-Wl,--as-needed", "-static-libgcc") if sys.platform == "linux" else ()
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", *NO_RUNTIME, "-Wno-psabi", "-Wno-ignored-optimization-argument")
# Unpacking and rounding match ggml bit by bit, random draws and quantisation match torch: no contraction into fused
# multiply-adds.
# GCC 12's induction variable pass miscompiles the unpacking loop over a group's rows (the loop ends before it begins;
# tests/unit/kernels would fail); clang has no such flag and would warn.
EXACT_SOURCES = frozenset({"bf16_pairs.cpp", "draw.cpp", "heads.cpp", "matrix.cpp", "quantize.cpp"})
EXACT_FLAGS = ("-ffp-contract=off", "-fno-ivopts")
OLD_GLIBC = "2.17"  # released in 2012; ziglang links against it, so that a library loads on any Linux that runs torch
NAMES = ("g++", "clang++", "c++")  # in Inductor's order


class CompilerError(Exception):
    """The compiler rejected the sources; the message is one line."""


@dataclass(frozen=True)
class Target:
    """A kind of processor that libraries are built for in advance.

    Attributes:
        name: name of the target in the library's file name.
        cpu: flags that choose the processor, for g++ and clang++.
        zig_cpu: name of the processor in ziglang's compiler.
        needs: flags of /proc/cpuinfo that the code relies on; Linux lists only those that it has enabled.
        more: further flags, for any compiler.
    """

    name: str
    cpu: tuple[str, ...]
    zig_cpu: str
    needs: frozenset[str] = frozenset()
    more: tuple[str, ...] = ()


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "pni", "ssse3", "sse4_1", "sse4_2"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}

# Best first. Plain x86-64 is for processors from before 2013: with less optimisation, it builds in a third of the time.
TARGETS: Mapping[str, tuple[Target, ...]] = {
    "x86_64": (
        Target("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), "x86_64_v4+avx512vnni", _V4),
        Target("x86-64-v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), "x86_64_v3+avxvnni", _V3 | {"avx_vnni"}),
        Target("x86-64-v3", ("-march=x86-64-v3",), "x86_64_v3", _V3),
        Target("x86-64", ("-march=x86-64",), "x86_64", more=("-O1",)),
    ),
    "aarch64": (Target("aarch64", (), "generic"),),
}


@dataclass(frozen=True)
class Compiler:
    """A compiler that works on this machine.

    Attributes:
        command: words of the command that compiles a source.
        link: words of the command that links a library.
        is_zig: True for ziglang's compiler.
    """

    command: tuple[str, ...]
    link: tuple[str, ...]
    is_zig: bool = False

    def flags_for(self, target: Target) -> tuple[str, ...]:
        """Return the flags that choose a processor."""
        return (*((f"-mcpu={target.zig_cpu}",) if self.is_zig else target.cpu), *target.more)


@functools.cache
def find_compiler(*flags: str) -> str | None:
    """Return the machine's C++ compiler, if it exists and builds a one-line program with these flags.

    Inductor uses the compiler that CXX names, so a CXX that does not work means no compiler, whatever else exists.

    Raises:
        OSError: the disk has no room for the program.
    """
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else NAMES:
        path = shutil.which(name)
        if path is not None and _builds_a_line(path, flags):
            return path
    return None


def _builds_a_line(compiler: str, flags: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("int main() { return 0; }\n", encoding="utf-8")
        done = _run([compiler, *flags, str(source), "-o", str(Path(folder) / "probe")], Path(folder))
        return done.returncode == 0


def compiler_version(compiler: str) -> str:
    """Return the first line of what a compiler says about its version."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def find_own_compiler() -> Compiler | None:
    """Return the machine's own compiler if it supports everything that the kernels' sources use."""
    path = find_compiler("-std=c++20", "-pthread", *LINK)
    return None if path is None else Compiler((path,), (path, *LINK))


def find_ziglang() -> Compiler | None:
    """Return the compiler of the package ziglang, if it is installed for this Python."""
    spec = find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    zig = Path(spec.submodule_search_locations[0]) / "zig"
    if not zig.exists():
        return None
    target = ("-target", f"{platform.machine()}-linux-gnu.{OLD_GLIBC}")
    return Compiler((str(zig), "c++", *target), (str(zig), "cc", *target, "-s", "-lm"), is_zig=True)


def targets_here() -> tuple[Target, ...]:
    """Return the targets that kernels are built for in advance on this kind of machine, best first."""
    return TARGETS.get(platform.machine(), ()) if sys.platform == "linux" else ()


def fingerprint(sources: Path, *words: str) -> str:
    """Return a name for a library made from the sources; other words, flags or sources give another name."""
    digest = sha256("\0".join((*words, *FLAGS, *EXACT_FLAGS)).encode())
    for source in sorted(sources.glob("*.*")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def prebuilt_name(sources: Path, target: Target) -> str:
    """Return the file name of the library that is built in advance for a target; it changes with the sources."""
    return f"kernels-{target.name}-{fingerprint(sources, *target.cpu, *target.more)}.so"


def build_libraries(
    compiler: Compiler,
    sources: Path,
    libraries: Mapping[Path, Sequence[str]],
    on_part: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Build several libraries of the same sources, compiling all parts in parallel.

    Args:
        libraries: flags that choose the processor, for each library's file; the file's folder exists, the file does
            not.
        on_part: function called with the number of compiled parts, and of all parts.

    Raises:
        CompilerError: the compiler rejects the sources.
        OSError: the disk has no room.
    """
    with tempfile.TemporaryDirectory(dir=next(iter(libraries)).parent) as scratch, _workers() as pool:
        parts: dict[Path, list[Future[Path]]] = {}
        for index, (path, flags) in enumerate(libraries.items()):
            folder = Path(scratch) / str(index)
            folder.mkdir()
            largest_first = sorted(sources.glob("*.cpp"), key=lambda one: one.stat().st_size, reverse=True)
            run = functools.partial(_compile_part, compiler, (*FLAGS, *flags), folder)
            parts[path] = [pool.submit(run, source) for source in largest_first]
        compiling = [future for futures in parts.values() for future in futures]
        on_part(0, len(compiling))
        for done, _ in enumerate(as_completed(compiling), start=1):
            on_part(done, len(compiling))
        for path, futures in parts.items():
            built = [str(future.result()) for future in futures]
            whole = Path(scratch) / path.name
            _run_or_raise([*compiler.link, "-shared", "-pthread", *built, "-o", str(whole)], Path(scratch))
            whole.replace(path)


def _workers() -> ThreadPoolExecutor:
    """Return a pool with one thread for each processor that this process may use."""
    return ThreadPoolExecutor(len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count())


def _compile_part(compiler: Compiler, flags: Sequence[str], folder: Path, source: Path) -> Path:
    built = folder / f"{source.stem}.o"
    exact = EXACT_FLAGS if source.name in EXACT_SOURCES else ()
    _run_or_raise([*compiler.command, *flags, *exact, "-c", str(source), "-o", str(built)], folder.parent)
    return built


def _run_or_raise(command: Sequence[str], scratch: Path) -> None:
    done = _run(command, scratch)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise CompilerError(f"{command[0]} could not build graphcore's kernels: {first.strip()}")


def _run(command: Sequence[str], scratch: Path) -> subprocess.CompletedProcess[str]:
    """Return the result of a compiler run; its extra output files go to the scratch folder.

    Raises:
        OSError: the disk has no room; the compiler itself may be fine.
    """
    places = {"TMPDIR": str(scratch), "ZIG_LOCAL_CACHE_DIR": str(scratch), "ZIG_GLOBAL_CACHE_DIR": str(scratch)}
    environment = {**os.environ, **places, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    no_room = os.strerror(errno.ENOSPC)
    if done.returncode and (no_room in done.stderr or "NoSpaceLeft" in done.stderr):
        raise OSError(errno.ENOSPC, no_room, str(scratch))
    return done
