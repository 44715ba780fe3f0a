"""llama-bench as a peer: which binary runs, with which options, and what is read from its answer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from instruction_sets import LIMIT, VARIABLES, environment_of
from instruction_sets import __file__ as LIMITS
from peers import llama_bench
from peers.llama_bench import IK_LLAMA_BENCH, IK_LLAMA_CPP, LLAMA_BENCH, LLAMA_CPP

pytestmark = pytest.mark.thorough

BENCHMARKS = Path(LIMITS).parent
SCRIPT = """#!/bin/sh
echo "$@" > {log}
echo '[{{"n_prompt": 256, "n_gen": 0, "avg_ts": 512.5}}, {{"n_prompt": 0, "n_gen": 128, "avg_ts": 41.25}}]'
"""


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of builds whose binaries write their options into a file beside them."""
    monkeypatch.setattr(llama_bench, "builds_folder", lambda: tmp_path)
    for name in (f"{LLAMA_CPP.package}-native", f"{IK_LLAMA_CPP.package}-native", f"{IK_LLAMA_CPP.package}-avx2"):
        binary = tmp_path / name / "bin" / "llama-bench"
        binary.parent.mkdir(parents=True)
        binary.write_text(SCRIPT.format(log=binary.with_name("asked")), encoding="utf-8")
        binary.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("peer", "instruction_set", "folder", "more"),
    [
        (LLAMA_BENCH, "native", f"{LLAMA_CPP.package}-native", ""),
        (IK_LLAMA_BENCH, "native", f"{IK_LLAMA_CPP.package}-native", " -rtr 1"),
        (IK_LLAMA_BENCH, "avx2", f"{IK_LLAMA_CPP.package}-avx2", " -rtr 1"),
    ],
)
def test_the_binary_of_the_instruction_set_is_asked_for_both_rates(
    peer, instruction_set: str, folder: str, more: str, builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, instruction_set)
    found = peer.load("model.gguf", 3, 512).timed_run(256, 128)
    assert found == {"prefill": 512.5, "decode": 41.25}
    asked = (builds / folder / "bin" / "asked").read_text(encoding="utf-8").strip()
    assert asked == f"-m model.gguf -t 3{more} -p 256 -n 128 -r 1 -o json"


def test_llama_cpp_is_asked_for_a_depth(builds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT, "native")
    LLAMA_BENCH.load("model.gguf", 3, 512).timed_run(256, 128, 4096)
    asked = (builds / f"{LLAMA_CPP.package}-native" / "bin" / "asked").read_text(encoding="utf-8").strip()
    assert asked == "-m model.gguf -t 3 -p 256 -n 128 -d 4096 -r 1 -o json"


def test_ik_llama_cpps_prefill_at_a_depth_is_the_difference_of_two_prompts(
    builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT, "native")
    binary = builds / f"{IK_LLAMA_CPP.package}-native" / "bin" / "llama-bench"
    rows = [
        {"n_prompt": 4352, "n_gen": 0, "avg_ns": 9_000_000_000},
        {"n_prompt": 4096, "n_gen": 0, "avg_ns": 8_000_000_000},
        {"n_prompt": 4096, "n_gen": 32, "avg_ns": 2_000_000_000, "avg_ts": 16.0},
    ]
    binary.write_text(f"#!/bin/sh\necho \"$@\" > '{binary.with_name('asked')}'\necho '{json.dumps(rows)}'\n")
    found = IK_LLAMA_BENCH.load("model.gguf", 3, 512).timed_run(256, 32, 4096)
    assert found == {"prefill": 256.0, "decode": 16.0}
    asked = binary.with_name("asked").read_text(encoding="utf-8").strip()
    assert asked == "-m model.gguf -t 3 -rtr 1 -p 4096,4352 -n 0 -gp 4096,32 -r 1 -o json"


def test_a_script_that_the_package_leaves_out_is_written(tmp_path: Path) -> None:
    sources = tmp_path / IK_LLAMA_CPP.package / "ik-1.0" / "vendor" / "ik_llama.cpp"
    (sources / "common").mkdir(parents=True)
    for name in ("CMakeLists.txt", "common/build-info.cpp.in"):
        (sources / name).touch()
    assert IK_LLAMA_CPP.sources(tmp_path) == sources
    assert "configure_file" in (sources / "common/cmake/build-info-gen-cpp.cmake").read_text(encoding="utf-8")


def test_a_process_for_avx2_is_told_so_in_words_that_torch_and_onednn_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    own, native = environment_of("avx2"), environment_of("native")
    assert (own["ATEN_CPU_CAPABILITY"], own["ONEDNN_MAX_CPU_ISA"], own[LIMIT]) == ("avx2", "AVX2", "avx2")
    assert not VARIABLES.keys() & native.keys()
    with pytest.raises(ValueError, match="AVX2 is no instruction set; use native, avx-vnni, avx2"):
        environment_of("AVX2")


def test_a_limited_process_takes_or_builds_a_library_for_avx2() -> None:
    code = (
        "from instruction_sets import apply_limit; apply_limit()\n"
        "from graphcore.kernels.cpu import library\n"
        "print(any(flag.startswith('avx512') for flag in library.cpu_flags()), *library.native_flags())\n"
        "found = library.prebuilt_library(); print(found.name if found else 'none')"
    )
    path = os.pathsep.join([str(BENCHMARKS), str(BENCHMARKS.parent)])
    own = {**environment_of("avx2"), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "False -march=x86-64-v3"
    assert "v4" not in second
