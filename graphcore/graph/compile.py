"""torch.compile as this engine uses it: one whole graph per kind of function and shape, with no silent fallback.

    kind = (block spec, batch, decode | prefill)      layers of a kind share its graph

A prefill chunk's length is a dynamic dimension: one compilation serves every length from 2 tokens up, and no prompt is
padded. (Measured on SmolLM2: a graph compiled for exactly 256 tokens is no faster.)
"""

import errno
import functools
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from graphcore.build_folder import TEMPORARY, build_folder, is_one_word, obstacle, temporary_folder
from graphcore.device import cpu_name
from graphcore.errors import GraphcoreError, GraphError
from graphcore.threads import start_thread

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR)
NO_ROOM = os.strerror(errno.ENOSPC)
P = ParamSpec("P")
R = TypeVar("R")
OPTIONS: Mapping[str, str | int | bool | Callable[..., object]] = {
    "triton.cudagraphs": False,
    "deterministic": True,
    "cpp.min_chunk_size": 1 << 16,  # elements for each thread: with 512, the norm of a single token has several threads
}
"""Inductor's options of all compiled code, also in packages (artefacts.py), so that both compute the same bits."""

_log = logging.getLogger(__name__)
_packages: Counter[bool] = Counter()  # packages that were loaded, by whether they came from the cache


class CompiledCodeError(GraphError):
    """Compiled code cannot be written to its folder."""


def fresh_copy(function: Callable[P, R], name: str) -> Callable[P, R]:
    """Return a copy of the function with its own code object.

    Dynamo keeps its graphs and its recompile limit per code object. With one code object per kind, a call checks only
    the guards of its own kind, and a second engine in the process does not use up the limit of the first.
    """
    assert isinstance(function, FunctionType), f"{function!r} is no plain function"
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def compile_whole(function: Callable[P, R], name: str, is_guarded: bool = True) -> Callable[P, R]:
    """Return `function` compiled as one graph at its first call.

    Dimensions are static unless the first call's tensors are marked (`mark_length`). A graph break raises an error. On
    a GPU, Inductor would autotune reductions by timing; their summation orders differ, so results could change from run
    to run. `deterministic` makes it choose by rule.

    Args:
        is_guarded: False if all calls' arguments are like the first's, but for what is in tensors; they are then not
            compared with it, which takes a tenth of a decode step of 30 small layers. (Inductor's code still checks
            the sizes of tensors.)
    """
    options = dict(OPTIONS) if is_guarded else {**OPTIONS, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    return torch.compile(fresh_copy(function, name), fullgraph=True, dynamic=False, options=options)


class FunctionMaker(Protocol):
    """Makes the fast form of a module's function, such as `Block.forward` or `Head.forward`."""

    def __call__(
        self,
        function: Callable[..., R],
        name: str,
        module: nn.Module,
        arguments: Sequence[Any],
        lengths: Sequence[tuple[Tensor, int]] = (),
    ) -> Callable[..., R]:
        """Return the function, for all modules like this one.

        Args:
            function: function of a module and of the arguments.
            name: name of the result, different for each.
            arguments: example arguments; a tensor, a `Span` or None each.
            lengths: tensors among the arguments, each with a dimension whose size differs from call to call.
        """


@dataclass(frozen=True)
class JustInTime:
    """Compiles functions in this process, by calling each once with its example arguments.

    Calls of a function whose first argument has a length that differs from call to call are guarded; all others have
    arguments like the example, because a function serves one kind of module.

    Attributes:
        cache_dir: folder of the compiled-code cache; None uses Inductor's default.
        on_compile: function called with the name of each function before it is compiled.
    """

    cache_dir: Path | None
    on_compile: Callable[[str], None] = lambda name: None

    def __call__(
        self,
        function: Callable[..., R],
        name: str,
        module: nn.Module,
        arguments: Sequence[Any],
        lengths: Sequence[tuple[Tensor, int]] = (),
    ) -> Callable[..., R]:
        """Return the compiled function, as `FunctionMaker` does."""
        self.on_compile(name)
        has_a_length = any(arguments[0] is tensor for tensor, _ in lengths)
        run = compile_whole(function, name, is_guarded=has_a_length)
        for tensor, dim in lengths:
            mark_length(tensor, dim=dim)
        call_compiling(self.cache_dir, run, module, *arguments)
        return run


def code_folder(cache_dir: Path, device: torch.device) -> tuple[Path, str]:
    """Return the folder for code that is compiled for this machine, and a note if the code is not cached for later.

    Inductor's cache keys include the graph, Inductor's version and its options; the folder's name adds torch's version
    and the processor, because compiled code uses that processor's instruction set. A TORCHINDUCTOR_CACHE_DIR that the
    user set takes precedence; if that folder is unusable, the variable is replaced for this process, because Dynamo
    creates the folder when it is imported.
    """
    asked = os.environ.get(CACHE_VARIABLE)
    if asked is not None and not _is_inductors_own(Path(asked)):
        folder, note = build_folder(Path(asked), CACHE_VARIABLE)
        if note:
            os.environ[CACHE_VARIABLE] = str(folder)
        return _without_spaces(folder), note
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    key = sha256(f"{torch.__version__} {machine} {torch.backends.cpu.get_cpu_capability()}".encode()).hexdigest()[:16]
    folder, note = build_folder(cache_dir / "compiled" / key)
    return _without_spaces(folder), note


def _without_spaces(folder: Path) -> Path:
    """Return the folder, or a symlink without spaces to it: Inductor splits its compiler commands at spaces."""
    temporary = None if is_one_word(folder.absolute()) else temporary_folder()
    if temporary is None:
        return folder
    link = temporary / sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    with suppress(FileExistsError):
        link.symlink_to(folder.absolute(), target_is_directory=True)
    return link


def call_compiling(folder: Path | None, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
    """Return the result of a function whose call compiles code into a folder, as `compile_cache` does.

    If the folder turns out to have no room, the code goes into a temporary folder, and a warning says so.

    Raises:
        CompiledCodeError: there is no temporary folder with room either.
    """
    try:
        with compile_cache(folder):
            return function(*arguments, **named)
    except CompiledCodeError as error:
        temporary = temporary_folder()
        if temporary is None:
            raise
        _log.warning("%s; until this process ends, it is kept in %s", error, temporary)
        with compile_cache(temporary):
            return function(*arguments, **named)


@contextmanager
def compile_cache(folder: Path | None) -> Iterator[None]:
    """Make Inductor cache the code that is compiled inside the block in `folder`; None leaves Inductor's default.

    Inductor reads the folder from the environment only. The environment is restored when the block ends, so that
    neither another engine nor a child process inherits it. If the usual temporary folder is unusable, the C++ compiler
    gets another.

    Raises:
        CompiledCodeError: the compiled code cannot be stored in the folder.
    """
    places = {} if folder is None else {CACHE_VARIABLE: str(folder)}
    if obstacle(Path(os.environ.get("TMPDIR", TEMPORARY[0]))) is not None:
        scratch = temporary_folder()
        places |= {} if scratch is None else {"TMPDIR": str(scratch)}
    before = {name: os.environ.get(name) for name in places}
    os.environ.update(places)
    try:
        with _explained(folder):
            yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _explained(folder: Path | None) -> Iterator[None]:
    """Replace Inductor's error of several screens by one line if compiled code cannot be stored.

    Raises:
        CompiledCodeError: the compiled code cannot be stored.
    """
    try:
        yield
    except GraphcoreError:
        raise
    except (RuntimeError, OSError) as error:
        failure: BaseException | None = error
        while failure is not None and not _is_unwritable(failure):
            failure = failure.__context__
        if failure is None:
            raise
        place = (failure.filename if isinstance(failure, OSError) else None) or folder
        reason = failure.strerror if isinstance(failure, OSError) else NO_ROOM
        raise CompiledCodeError(
            f"{place}: compiled code cannot be kept ({reason}); free space, set another cache_dir, or use graph=eager"
        ) from error


def _is_unwritable(failure: BaseException) -> bool:
    """Return whether a failure means that a folder cannot be written: an OSError, or the C++ compiler's message."""
    if isinstance(failure, OSError):
        return failure.errno in UNWRITABLE
    return NO_ROOM in str(failure)


def _is_inductors_own(folder: Path) -> bool:
    """Return whether the folder is Inductor's default, which Inductor itself writes into the environment."""
    return folder.parent == Path(tempfile.gettempdir()) and folder.name.startswith("torchinductor_")


@contextmanager
def compiler_loading(device: torch.device, is_needed: bool) -> Iterator[None]:
    """Load the compiler for a device in a background thread while the block runs, and join the thread at its end.

    Importing Dynamo and Inductor and probing the processor takes two seconds, and loading weights leaves a core idle.
    If the compiler does not work, the first real compilation reports the error.
    """
    thread: threading.Thread | None = None
    if is_needed:
        # In a CUDA build of torch without a GPU, the first thread that traces installs a thread-owned stand-in for the
        # device guard, and torch 2.11 still uses it after that thread has ended (ensureCUDADeviceGuardSet in
        # c10/core/impl). Tracing here first makes this thread the owner.
        with FakeTensorMode():
            thread = start_thread(functools.partial(load_compiler, device), "compiler-loading")
    try:
        yield
    finally:
        if thread is not None:
            thread.join()


@functools.cache
def load_compiler(device: torch.device) -> None:
    """Import the compiler and compile a trivial function for the device, once per process, to load all its parts.

    For a GPU nothing is compiled for the CPU: the first CPU compilation on a machine makes Inductor probe the vector
    instructions with the C++ compiler, which took most of a minute (docs/lab/gpu.md).
    """
    with torch.inference_mode(), suppress(RuntimeError, OSError):
        compile_whole(_increment, "increment")(torch.zeros(64, device=device, dtype=torch.float32))


def _increment(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def mark_length(*tensors: torch.Tensor, dim: int = 1) -> None:
    """Make a dimension of each tensor (by default 1, the tokens) dynamic in the graph that is compiled next."""
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, dim)


@dataclass
class CompileReport:
    """Time and cache use of compilations.

    Attributes:
        seconds: float, wall time in seconds.
        cache_hits: int, graphs or packages that came from the cache on disk.
        cache_misses: int, graphs or packages that were compiled anew.
    """

    seconds: float = 0.0
    cache_hits: int = 0
    cache_misses: int = 0


@contextmanager
def measure_compile() -> Iterator[CompileReport]:
    """Measure the compilations inside the block; the report is complete when the block ends."""
    report = CompileReport()
    began, hits, misses = time.perf_counter(), *_cache_counts()
    try:
        yield report
    finally:
        report.seconds = time.perf_counter() - began
        now_hits, now_misses = _cache_counts()
        report.cache_hits, report.cache_misses = now_hits - hits, now_misses - misses


def count_package(is_cached: bool) -> None:
    """Count a package that was loaded, for `measure_compile`."""
    _packages[is_cached] += 1


def _cache_counts() -> tuple[int, int]:
    """Return cache hits and misses since the process began, of Inductor's graphs and of packages.

    If nothing was compiled, Dynamo is not imported: the import takes longer than loading many models.
    """
    hits, misses = _packages[True], _packages[False]
    if "torch._dynamo" in sys.modules:
        inductor = torch._dynamo.utils.counters["inductor"]
        hits, misses = hits + inductor["fxgraph_cache_hit"], misses + inductor["fxgraph_cache_miss"]
    return hits, misses
