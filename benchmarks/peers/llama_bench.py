"""llama-bench of llama.cpp and of ik_llama.cpp, built from the sources in their Python packages.

A build takes minutes (ik_llama.cpp: 15 on two cores) and is kept in benchmarks/ of graphcore's cache folder, one for
each instruction set. cmake, make and a C++ compiler are needed. Decode starts from an empty cache, or at the depth.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from instruction_sets import current_set
from peer import Peer, TimedEngine

from peers.llama_cpp_engine import gguf_weight_nbytes

COMMON = ("-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DGGML_CCACHE=OFF")
AVX2 = ("-DGGML_NATIVE=OFF", "-DGGML_AVX=ON", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON")
FLAGS = {
    "native": ("-DGGML_NATIVE=ON",),
    "avx-vnni": (*AVX2, "-DGGML_AVX_VNNI=ON"),  # ik_llama.cpp has no such option, and uses AVX2
    "avx2": AVX2,
}
# A script of ik_llama.cpp that its package leaves out; it asks git for a version.
BUILD_INFO = Path("common/cmake/build-info-gen-cpp.cmake")
BUILD_INFO_TEXT = """set(BUILD_NUMBER 0)
set(BUILD_COMMIT "package")
set(BUILD_COMPILER "unknown")
set(BUILD_TARGET "unknown")
set(COMMON_FOLDER "${CMAKE_CURRENT_LIST_DIR}/..")
configure_file("${COMMON_FOLDER}/build-info.cpp.in" "${COMMON_FOLDER}/build-info.cpp" @ONLY)
"""


@dataclass(frozen=True)
class BenchSource:
    """A project that has a llama-bench.

    Attributes:
        package: its Python package, with the version.
        folder: of the sources, in vendor/ of the source package.
        options: further options of llama-bench.
        has_depth: True if it fills the cache with `-d` tokens first. Otherwise a prefill at a depth is the difference
            of two prompts, and a decode follows a prompt of that length (`-gp`).
    """

    package: str
    folder: str
    options: tuple[str, ...] = ()
    has_depth: bool = True

    def binary(self, cache: Path) -> Path:
        """Return llama-bench for this process's instruction set, built now if it is not there."""
        name = current_set()
        build = cache / f"{self.package}-{name}"
        binary = build / "bin" / "llama-bench"
        if not binary.exists():
            sources = self.sources(cache)
            self._run("cmake", "-S", str(sources), "-B", str(build), *COMMON, *FLAGS[name])
            self._run("cmake", "--build", str(build), "--target", "llama-bench", "-j", str(os.cpu_count() or 1))
        return binary

    def sources(self, cache: Path) -> Path:
        """Return the folder of the sources, downloaded now if they are not there."""
        own = cache / self.package
        if not own.exists():
            with tempfile.TemporaryDirectory(dir=cache) as scratch:
                fetch = ("download", "--no-deps", "--no-binary=:all:", f"--dest={scratch}", self.package)
                self._run(sys.executable, "-m", "pip", *fetch)
                (archive,) = Path(scratch).glob("*.tar.gz")
                with tarfile.open(archive) as tar:
                    tar.extractall(Path(scratch) / "unpacked", filter="data")
                (Path(scratch) / "unpacked").rename(own)
        (found,) = own.glob(f"*/vendor/{self.folder}/CMakeLists.txt")
        info = found.parent / BUILD_INFO
        if not info.exists() and (found.parent / "common" / "build-info.cpp.in").exists():
            info.parent.mkdir(exist_ok=True)
            info.write_text(BUILD_INFO_TEXT, encoding="utf-8")
        return found.parent

    @staticmethod
    def _run(*command: str) -> None:
        print(*command, file=sys.stderr)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def builds_folder() -> Path:
    """Return the folder of sources and builds."""
    from graphcore.config.compose import compose_settings

    folder = compose_settings([]).cache_folder / "benchmarks" / "llama-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class LlamaBench(TimedEngine):
    """Starts llama-bench for each run; it loads the model, and warms up, before it measures."""

    def __init__(self, source: BenchSource, path: str, threads: int, context: int) -> None:
        self.source, self.path = source, path
        self.command = [str(source.binary(builds_folder())), "-m", path, "-t", str(threads), *source.options]

    def weight_nbytes(self) -> int:
        return gguf_weight_nbytes(self.path)

    def timed_run(self, prompt_tokens: int, new_tokens: int, depth: int = 0, sequences: int = 1) -> dict[str, object]:
        self.refuse(sequences=sequences)
        if depth and not self.source.has_depth:
            return self._at_depth(prompt_tokens, new_tokens, depth)
        sizes = ["-p", str(prompt_tokens), "-n", str(new_tokens), *(("-d", str(depth)) if depth else ())]
        rows = self._rows(*sizes)
        (prefill,) = (row["avg_ts"] for row in rows if row["n_prompt"])
        (decode,) = (row["avg_ts"] for row in rows if row["n_gen"])
        return {"prefill": prefill, "decode": decode}

    def _at_depth(self, prompt_tokens: int, new_tokens: int, depth: int) -> dict[str, object]:
        prompts = f"{depth},{depth + prompt_tokens}"
        rows = self._rows("-p", prompts, "-n", "0", "-gp", f"{depth},{new_tokens}")
        by_length = sorted((row["n_prompt"], row["avg_ns"]) for row in rows if not row["n_gen"])
        (_, short), (_, long) = by_length
        if long <= short:
            raise SystemExit(
                f"{self.path}: the longer prompt took less time than the shorter; run it on an idle machine"
            )
        (decode,) = (row["avg_ts"] for row in rows if row["n_gen"])
        return {"prefill": prompt_tokens / (long - short) * 1e9, "decode": decode}

    def _rows(self, *sizes: str) -> list[dict[str, float]]:
        done = subprocess.run(
            [*self.command, *sizes, "-r", "1", "-o", "json"], check=True, capture_output=True, text=True
        )
        rows: list[dict[str, float]] = json.loads(done.stdout)
        return rows


LLAMA_CPP = BenchSource("llama-cpp-python==0.3.36", "llama.cpp")
IK_LLAMA_CPP = BenchSource("ik-llama-cpp-python==0.1.5", "ik_llama.cpp", ("-rtr", "1"), has_depth=False)
LLAMA_BENCH = Peer("llama-bench", partial(LlamaBench, LLAMA_CPP))
IK_LLAMA_BENCH = Peer("ik-llama-bench", partial(LlamaBench, IK_LLAMA_CPP))
