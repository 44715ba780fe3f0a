"""What the machine can do, on machines of every kind: what torch says of CUDA is set by the test."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphcore.compiler import find_compiler
from graphcore.device import cpu_name, find_cpp_compiler, product_dtype, resolve_device, resolve_dtype
from graphcore.errors import ConfigError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def with_two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("without_cuda")
def test_without_cuda_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert resolve_device("auto") == resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device=cuda was asked for, but torch \S+ sees no CUDA device"):
        resolve_device("cuda")


@pytest.mark.usefixtures("with_two_cuda_devices")
def test_with_cuda_auto_is_its_first_device_and_any_can_be_named() -> None:
    assert resolve_device("auto") == resolve_device("cuda") == CUDA
    assert resolve_device("cuda:1") == torch.device("cuda", 1)
    assert resolve_device("cpu") == CPU
    with pytest.raises(ConfigError, match=r"device=cuda:2 was asked for, but there are 2"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "meta", "mps", "cpu:a b", "cpu:0", "cpu:1"])
def test_what_is_no_device_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="device="):
        resolve_device(name)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_named_dtype_is_taken_whatever_is_stored(name: str, dtype: torch.dtype, device: torch.device) -> None:
    assert resolve_dtype(name, "float32", device) == dtype
    assert resolve_dtype(name, None, device) == dtype


@pytest.mark.parametrize(
    ("stored", "device", "supports_bf16", "expected"),
    [
        ("float32", CPU, True, torch.float32),
        ("bfloat16", CPU, True, torch.bfloat16),
        ("float16", CPU, True, torch.bfloat16),
        (None, CPU, True, torch.bfloat16),
        ("float32", CUDA, True, torch.bfloat16),
        ("bfloat16", CUDA, False, torch.float16),
        (None, CUDA, False, torch.float16),
    ],
)
def test_auto_dtype_suits_the_weights_and_the_device(
    stored: str | None,
    device: torch.device,
    supports_bf16: bool,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supports_bf16)
    assert resolve_dtype("auto", stored, device) == expected


def test_processor_has_a_name() -> None:
    assert cpu_name().strip()


def compilers(folder: Path, **scripts: str) -> str:
    for name, script in scripts.items():
        path = folder / name.replace("gxx", "g++").replace("clangxx", "clang++")
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    return str(folder)


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        ({}, None),
        ({"gxx": "exit 1"}, None),
        ({"gxx": "exit 0"}, "g++"),
        ({"gxx": "exit 1", "clangxx": "exit 0"}, "clang++"),
        ({"clangxx": "exit 0"}, "clang++"),
    ],
)
def test_a_compiler_counts_only_if_it_works(
    scripts: dict[str, str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", compilers(tmp_path, **scripts))
    monkeypatch.delenv("CXX", raising=False)
    find_compiler.cache_clear()
    try:
        found = find_cpp_compiler()
    finally:
        find_compiler.cache_clear()
    assert found == (expected and str(tmp_path / expected))


def test_a_compiler_that_cxx_names_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor runs that one and no other."""
    monkeypatch.setenv("PATH", compilers(tmp_path, gxx="exit 0"))
    monkeypatch.setenv("CXX", "/bin/false")
    find_compiler.cache_clear()
    try:
        assert find_cpp_compiler() is None
    finally:
        find_compiler.cache_clear()


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
@pytest.mark.parametrize("is_fast", [True, False])
def test_16_bit_matrices_are_multiplied_in_float32_where_the_library_cannot(
    dtype: torch.dtype, name: str, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda: is_fast)
    product_dtype.cache_clear()
    try:
        assert product_dtype(dtype) is (dtype if is_fast else torch.float32)
        assert product_dtype(torch.float32) is torch.float32
    finally:
        product_dtype.cache_clear()


FREE_BETWEEN = """
import psutil, torch
from graphcore import device
{call}
torch.ones(16 << 20, dtype=torch.uint8)  # freed: from now on glibc takes what is no larger from its heap
large, small = [], []
for _ in range(64):
    large.append(torch.ones(1 << 20, dtype=torch.uint8))
    small.append(torch.ones(100 << 10, dtype=torch.uint8))  # too large for a gap that was there before
before = psutil.Process().memory_info().rss
large.clear()
print(before - psutil.Process().memory_info().rss)
"""


@pytest.mark.thorough
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how glibc keeps memory")
@pytest.mark.parametrize(
    ("call", "least", "most"), [("", 0, 48 << 20), ("device.return_blocks_when_freed()", 60 << 20, 65 << 20)]
)
def test_large_blocks_between_small_ones_go_back_to_the_system_when_they_are_freed(
    call: str, least: int, most: int
) -> None:
    """64 MiB in 64 blocks; glibc left alone returns those at the end of its heap only."""
    source = FREE_BETWEEN.format(call=call)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most
