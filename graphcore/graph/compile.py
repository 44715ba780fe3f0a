"""torch.compile as this engine uses it: one whole graph per kind of function and shape, with no silent fallback.

    kind = (block spec, batch, decode | prefill)      layers of a kind share its graph

A prefill chunk's length is a symbol of the graph: one compilation serves every length from 2 tokens up, and no prompt
is padded. (Measured on SmolLM2: a graph compiled for exactly 256 tokens is no faster.)
"""

import errno
import functools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphcore.errors import GraphcoreError, GraphError

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
P = ParamSpec("P")
R = TypeVar("R")


def fresh_copy(function: Callable[P, R], name: str) -> Callable[P, R]:
    """Return the same function over a code object of its own.

    Dynamo keeps its graphs and its recompile limit per code object. With one object per kind, kinds do not look
    through each other's guards and a second engine in the process does not use up the limit of the first.
    """
    assert isinstance(function, FunctionType), f"{function!r} is no plain function"
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compile_whole(function: Callable[P, R], name: str) -> Callable[P, R]:
    """Return `function` compiled as one graph at its first call.

    Dimensions are static unless the first call's tensors are marked (`mark_length`). A graph break raises. On a GPU
    Inductor would time several shapes of each reduction and keep the fastest; they sum in different orders, so a
    second run might not repeat the first one's bits. With `deterministic` it chooses by rule.
    """
    options: dict[str, str | int | bool | Callable[..., object]] = {"triton.cudagraphs": False, "deterministic": True}
    return torch.compile(fresh_copy(function, name), fullgraph=True, dynamic=False, options=options)


@contextmanager
def compile_cache(folder: Path | None) -> Iterator[None]:
    """Have Inductor keep what is compiled inside the block in `folder`; None leaves Inductor's default.

    Inductor takes the folder from the environment alone. A user's own setting wins. The environment is restored when
    the block ends, so that neither another engine nor a child process inherits it.
    """
    before = os.environ.get(CACHE_VARIABLE)
    if folder is None or (before is not None and not _is_inductors_own(Path(before))):
        with _explained(folder):
            yield
        return
    os.environ[CACHE_VARIABLE] = str(folder)
    try:
        with _explained(folder):
            yield
    finally:
        del os.environ[CACHE_VARIABLE]
        if before is not None:
            os.environ[CACHE_VARIABLE] = before


@contextmanager
def _explained(folder: Path | None) -> Iterator[None]:
    """Raise a one-line error where compiled code cannot be kept; Inductor's own takes several screens.

    Raises:
        GraphError: the compiled code cannot be kept.
    """
    try:
        yield
    except GraphcoreError:
        raise
    except (RuntimeError, OSError) as error:
        failure: BaseException | None = error
        while failure is not None and not (isinstance(failure, OSError) and failure.errno in UNWRITABLE):
            failure = failure.__context__
        if failure is None:
            raise
        raise GraphError(
            f"{failure.filename or folder}: compiled code cannot be kept ({failure.strerror}); free space, set another "
            "cache_dir, or use graph=eager"
        ) from error


def _is_inductors_own(folder: Path) -> bool:
    """Return whether the folder is the default, which Inductor writes into the environment when it is first asked."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")


@contextmanager
def compiler_loading(device: torch.device, is_needed: bool) -> Iterator[None]:
    """Load the compiler for a device in a thread while the block runs, and wait for it at the block's end.

    Importing Dynamo and Inductor and probing the processor takes two seconds; reading and unpacking weights leaves a
    core idle meanwhile. A compiler that does not work is reported by the first real compilation.
    """
    thread = threading.Thread(target=load_compiler, args=(device,), name="compiler-loading", daemon=True)
    if is_needed:
        # Where torch is built for CUDA and there is no GPU, the first thread that traces puts a stand-in of its own in
        # the place of the device's guard, and torch 2.11 goes on using it when that thread is gone
        # (ensureCUDADeviceGuardSet in c10/core/impl): so it is this thread's.
        with FakeTensorMode():
            thread.start()
    try:
        yield
    finally:
        if is_needed:
            thread.join()


@functools.cache
def load_compiler(device: torch.device) -> None:
    """Import the compiler and compile something small for the device, once, so that everything is loaded.

    What a GPU runs is not compiled for the processor too: on a machine that has never compiled, Inductor first tries
    the processor's vector instructions with the C++ compiler, which took most of a minute (docs/numbers.md).
    """
    with torch.inference_mode(), suppress(RuntimeError, OSError):
        compile_whole(_increment, "increment")(torch.zeros(64, device=device, dtype=torch.float32))


def _increment(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def mark_length(*tensors: torch.Tensor, dim: int = 1) -> None:
    """Make a dimension of each tensor, tokens by default, symbolic in the graph that is compiled next."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, dim)


@dataclass
class CompileReport:
    """Time and cache use of compilations.

    Attributes:
        seconds: float, wall time in seconds.
        cache_hits: int, graphs that came from the cache on disk.
        cache_misses: int, graphs that were compiled anew.
    """

    seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0


@contextmanager
def measure_compile() -> Iterator[CompileReport]:
    """Measure what is compiled inside the block; the report is complete when the block ends."""
    report = CompileReport()
    began, hits, misses = time.perf_counter(), *_cache_counts()
    try:
        yield report
    finally:
        report.seconds = time.perf_counter() - began
        now_hits, now_misses = _cache_counts()
        report.cache_hits, report.cache_misses = now_hits - hits, now_misses - misses


def _cache_counts() -> tuple[int, int]:
    """Return how many graphs Inductor has found and not found in its cache since the process began.

    Where nothing has been compiled, Dynamo is not imported: importing it takes longer than loading many a model.
    """
    if "torch._dynamo" not in sys.modules:
        return 0, 0
    inductor = torch._dynamo.utils.counters["inductor"]
    return inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
