"""Each device has its backend; C++ kernels run from a temporary folder if they cannot run where they are kept."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graphcore.build_folder import temporary_folder
from graphcore.compiler import Compiler
from graphcore.errors import GraphError
from graphcore.kernels import backend as module
from graphcore.kernels.backend import (
    Backend,
    NativeBackend,
    TorchBackend,
    TritonBackend,
    find_backend,
    prebuilt_backend,
)
from graphcore.kernels.cpu import library
from graphcore.kernels.gpu import registration
from graphcore.kernels.ops.attend import attend
from graphcore.kernels.ops.attention_parameters import AttentionParameters
from graphcore.kernels.ops.gated_delta import DeltaParts, delta_heads

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_compiler_that_refuses_the_kernels_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "old-g++"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: C++20 is unknown' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(library, "find_own_compiler", lambda: Compiler((str(compiler),), (str(compiler),)))
    monkeypatch.setattr(library, "prebuilt_library", lambda: None)
    found, note = find_backend(CPU, tmp_path)
    assert found == TorchBackend()
    assert "old-g++ could not build graphcore's kernels: kernels.cpp:1: error: C++20 is unknown" in note


def test_kernels_that_cannot_be_kept_are_built_in_a_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(folder: Path, _: object) -> Path:
        if folder != temporary_folder():
            raise GraphError("cannot be kept") from OSError(30, "Read-only file system")
        return folder / "kernels.so"

    monkeypatch.setattr(library, "find_library", find)
    (tmp_path / "kernels").touch()  # a file where the folder should be
    found, note = find_backend(CPU, tmp_path)
    assert isinstance(found, NativeBackend)
    assert Path(found.library).parent == temporary_folder()
    assert f"{tmp_path}/kernels cannot keep built code (File exists): a temporary folder has it" in note


def test_kernels_that_may_not_run_where_they_are_kept_run_from_a_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept = tmp_path / "kernels.so"
    kept.touch()
    monkeypatch.setattr(library, "find_library", lambda *_: kept)
    monkeypatch.setattr(library, "loads", lambda path: path != kept)
    temporary = temporary_folder()
    assert temporary is not None
    assert find_backend(CPU, tmp_path) == (NativeBackend(str(temporary / "kernels.so")), "")
    monkeypatch.setattr(library, "loads", lambda _: False)
    assert "kernels.so cannot be loaded" in find_backend(CPU, tmp_path)[1]


@pytest.mark.parametrize("built", [None, Path("kernels.so")])
@pytest.mark.parametrize("has_triton", [True, False])
def test_a_gpu_computes_with_triton_where_it_is_installed(
    has_triton: bool, built: Path | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """C++ kernels that are there pack its weights in RAM; none are built for it."""
    monkeypatch.setattr(module, "prebuilt_library", lambda: built)
    monkeypatch.setattr(registration, "MODULES", ())
    monkeypatch.setattr(registration, "find_spec", lambda _: object() if has_triton else None)
    assert find_backend(CUDA, tmp_path) == (TritonBackend(str(built or "")) if has_triton else TorchBackend(), "")
    assert prebuilt_backend(CUDA) == TorchBackend()


def arguments_of(op: Callable[..., object], call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the arguments, by name, with which a backend's method calls an op."""
    monkeypatch.setattr(module, op.__name__, lambda *given, **named: inspect.signature(op).bind(*given, **named))
    found: inspect.BoundArguments = call()
    found.apply_defaults()
    return found.arguments


@pytest.mark.parametrize(
    ("backend", "file"), [(TorchBackend(), ""), (TritonBackend(), ""), (NativeBackend("kernels.so"), "kernels.so")]
)
def test_a_backend_calls_each_op_with_its_own_library(
    backend: Backend, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, k_cache, v_cache, table, starts, counts, sinks = (torch.tensor([one]) for one in range(9))
    how = AttentionParameters(7, 0.5, sinks, cap=30.0)
    where = {"k_cache": k_cache, "v_cache": v_cache, "table": table, "starts": starts, "counts": counts}
    asked = {**where, "window": 7, "scale": 0.5, "sinks": sinks, "library": file, "cap": 30.0, "values_from": 0}
    place = (k_cache, v_cache, table), (starts, counts)
    found = arguments_of(attend, lambda: backend.attend(q, k, v, *place, how), monkeypatch)
    assert found == {"query": q, "key": k, "value": v, **asked}
    parts = DeltaParts(*torch.arange(13.0).split(1), key_heads=2, eps=1e-6, tiled=True)
    found = arguments_of(delta_heads, lambda: backend.delta_heads(parts), monkeypatch)
    assert found == {"parts": parts._replace(library=file)}
