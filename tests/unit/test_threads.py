"""Limits of threads: which one is named, and that no component leaves a thread or a request behind at one."""

import ast
import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.processes import write_groups

import graphcore
from graphcore import threads
from graphcore.compiler import build_libraries, find_own_compiler
from graphcore.device import use_threads
from graphcore.engine.batching.interface import NoBatching
from graphcore.engine.masks import MaskThreads, NextTokens
from graphcore.engine.queue import RequestQueue
from graphcore.engine.ring.heartbeat import begin_heartbeat
from graphcore.engine.ring.saved_parts import CacheParts
from graphcore.errors import ThreadLimitError
from graphcore.graph import compile as graph_compile
from graphcore.kernels.cpu.library import SOURCES
from graphcore.parallel.liveness import Liveness
from graphcore.parallel.nccl_transport import within
from graphcore.progress import ignore_progress
from graphcore.serving.serve_settings import ServeSettings
from graphcore.serving.served_model import ServedModel
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline
from graphcore.tasks.termination import PatientProcess
from graphcore.threads import ThreadLimit, ThreadPool, naming_limit, start_threads, tight_limits
from graphcore.tokenizer.deep_stack import run_in_deep_stack

SECONDS = 20.0
V2 = ("0::/app/job", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
V1 = ("3:pids:/box", "31 24 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids")


@pytest.mark.parametrize(
    ("lines", "files", "named"),
    [
        (
            V2,
            {"app/job/pids.max": "max", "app/job/pids.current": "3", "app/pids.max": "9", "app/pids.current": "6"},
            "app",
        ),
        (V2, {"app/job/pids.max": "9", "app/job/pids.current": "5"}, None),
        (V2, {"app/job/pids.max": "9", "app/job/pids.current": "6"}, "app/job"),
        (V1, {"pids/box/pids.max": "2", "pids/box/pids.current": "2"}, "pids/box"),
        (V1, {"pids/box/pids.max": "max", "pids/box/pids.current": "2"}, None),
        (V1, {}, None),
    ],
)
def test_the_group_whose_limit_leaves_no_room_is_named(
    tmp_path: Path, lines: tuple[str, str], files: Mapping[str, str], named: str | None
) -> None:
    found = [limit.name for limit in tight_limits(4, write_groups(tmp_path, *lines, files))]
    assert found == ([] if named is None else [str(tmp_path / "sys/fs/cgroup" / named / "pids.max")])


def test_the_limits_of_the_machine_and_of_a_user_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_groups(tmp_path, *V2, {})
    (root / "proc/loadavg").write_text("0.1 0.2 0.3 1/90 1234\n")
    (root / "proc/sys/kernel").mkdir(parents=True)
    (root / "proc/sys/kernel/threads-max").write_text("93\n")
    assert [(limit.most, limit.used) for limit in tight_limits(4, root)] == [(93, 90)]
    assert [*tight_limits(3, root)] == []
    (root / "proc/self/status").write_text("Name:\tpython\nCapEff:\t0000000000000000\n")
    for process, (user, count) in {"7": (1000, 20), "8": (1000, 15), "9": (1001, 30)}.items():
        (root / "proc" / process).mkdir()
        (root / "proc" / process / "status").write_text(f"Uid:\t{user}\t0\t0\t0\nThreads:\t{count}\n")
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("resource.getrlimit", lambda _: (36, 36))
    assert next(tight_limits(2, root)) == ThreadLimit("the user's limit (RLIMIT_NPROC)", 36, 35, "raise it (ulimit -u)")
    assert [*tight_limits(1, root)] == []
    (root / "proc/self/status").write_text("CapEff:\t0000000001000000\n")  # CAP_SYS_RESOURCE
    assert [*tight_limits(2, root)] == []


START = threading.Thread.start
LIMIT = ThreadLimit("/sys/fs/cgroup/app/pids.max", 6, 6, "raise it (docker run --pids-limit)")


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """A function that lets the system start a number of threads from now on; at the next one, a limit is reached."""
    left, reached = [0], list[ThreadLimit]()

    def start(thread: threading.Thread) -> None:
        if not left[0]:
            reached[:] = [LIMIT]
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        START(thread)

    def of(most: int) -> None:
        left[0], reached[:] = most, []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        patch.setattr(threads, "tight_limits", lambda needed: iter(reached))
        yield of


def test_of_several_threads_all_start_or_none_and_no_function_is_called(limited: Callable[[int], None]) -> None:
    before, called = {*threading.enumerate()}, list[int]()
    for most in range(4):
        limited(most)
        with pytest.raises(
            ThreadLimitError, match=rf"thread t{most} of 4 cannot be started: .* allows 6 .* and 6 exist"
        ):
            start_threads({f"t{number}": partial(called.append, number) for number in range(4)})
        assert ({*threading.enumerate()}, called) == (before, []), most
    limited(4)
    for thread in start_threads({f"t{number}": partial(called.append, number) for number in range(4)}):
        thread.join(SECONDS)
    assert sorted(called) == [0, 1, 2, 3]


def test_a_pool_goes_on_with_the_threads_that_it_has(limited: Callable[[int], None]) -> None:
    """Its first work holds the only thread, so the second is queued behind it."""
    may_end = threading.Event()
    limited(1)
    with ThreadPool(4, "pool") as pool:
        first, second = pool.submit(may_end.wait, SECONDS), pool.submit(divmod, 7, 2)
        may_end.set()
        assert (first.result(SECONDS), second.result(SECONDS)) == (True, (3, 1))
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 7, 0).result(SECONDS)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(divmod, 7, 2)


def test_a_process_that_cannot_be_started_names_the_limit_and_other_errors_stay() -> None:
    with pytest.raises(ThreadLimitError, match=r"^a compiler cannot be started: "), naming_limit("a compiler"):
        raise BlockingIOError(11, "Resource temporarily unavailable")
    for error in (FileNotFoundError(2, "no such file"), RuntimeError("another")):
        with pytest.raises(type(error)), naming_limit("a compiler"):
            raise error


def test_threads_that_torch_would_start_are_refused_before_it_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a limit that leaves room for one: where their number is set, and before the engine's thread starts."""
    monkeypatch.setattr(threads, "tight_limits", lambda needed: iter([LIMIT] if needed > 1 else []))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    use_threads(2)  # torch starts one beside the caller's
    said = r"\(2 in all; .* threads changes that\) cannot be started: /sys/fs/cgroup/app/pids\.max allows 6 .*, and 6"
    for start in (lambda: use_threads(3), run_alone, submit):
        with pytest.raises(ThreadLimitError, match=said):
            start()


class NoGroup:
    """A process group that nobody asks for anything."""

    def allgather(self, *_: object) -> None:
        raise RuntimeError("no beat is sent")


def queue_of() -> RequestQueue:
    return RequestQueue(NoBatching(), 10, lambda: None, ignore_progress, lambda: None)


def fill() -> None:
    ThreadFiller({}, 4, 0, 0, Timeline())


def submit() -> None:
    queue, request = queue_of(), Request()
    try:
        queue.submit([cast("Any", request)], "submit", waits=False)
    finally:
        assert not queue._waiting, "a request that nobody has a handle of waits"


class Request:
    """What a queue asks of a request before it waits."""

    mask, output = None, type("Output", (), {})()


def run_alone() -> None:
    queue = queue_of()
    try:
        queue.run_alone("logits", lambda: None)
    finally:
        assert not queue._jobs


def save_part() -> None:
    copies = type("Copies", (), {"copy_out": lambda self, ids: object()})()
    parts = CacheParts(cast("Any", type("Ranks", (), {"rank": 0})()), copies)
    try:
        parts.do({"step": "save", "job": 0, "ids": [1], "file": "cache"}, dict)  # all ranks hear of the job's error
        parts.check(0)
    finally:
        parts.close()


def load_compiler() -> None:
    with graph_compile.compiler_loading(torch.device("cpu"), is_needed=True):
        raise AssertionError("the block runs without the thread")


def load_served() -> None:
    asyncio.run(ServedModel("tiny", ServeSettings(), lambda: cast("Any", None)).load())


COMPONENTS: Mapping[str, tuple[int, Callable[[], object]]] = {
    "threads that fill slots": (4, fill),
    "a queue's thread for a request": (1, submit),
    "a queue's thread for a call": (1, run_alone),
    "a mask's thread": (1, lambda: MaskThreads().submit(lambda: NextTokens(), is_first=True)),
    "a ring's heartbeat": (1, lambda: begin_heartbeat(queue_of(), 1.0)),
    "a part of a saved cache": (1, save_part),
    "beats while ranks load": (1, lambda: Liveness(NoGroup(), 2)),
    "NCCL's communicators": (1, lambda: within(timedelta(seconds=1), lambda: None, "they")),
    "the compiler": (1, load_compiler),
    "a server's loading": (1, load_served),
    "a pool": (1, lambda: ThreadPool(3, "pool").submit(divmod, 1, 1)),
    "signals": (1, lambda: PatientProcess().begin()),
}


def test_a_component_at_the_limit_raises_one_line_and_leaves_no_thread(limited: Callable[[int], None]) -> None:
    for name, (needed, start) in COMPONENTS.items():
        for most in range(needed):
            before = {*threading.enumerate()}
            limited(most)
            with pytest.raises(ThreadLimitError) as raised:
                start()
            said = str(raised.value)
            assert "cannot be started: /sys/fs/cgroup/app/pids.max allows 6 processes and threads, and 6" in said, name
            assert {*threading.enumerate()} == before, f"{name}: {most} of {needed} threads"


def test_a_grammar_s_thread_at_the_limit_is_no_fault_of_the_grammar(
    limited: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphcore.tokenizer.deep_stack.tight_limits", lambda needed: iter([needed]))
    limited(0)
    with pytest.raises(ThreadLimitError, match=r"pids\.max allows 6"):
        run_in_deep_stack(lambda: None, 10)


def test_compilers_at_the_limit_have_ended_when_the_error_comes(
    limited: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = find_own_compiler()
    if compiler is None:
        pytest.skip("the machine has no C++ compiler")
    monkeypatch.setattr("graphcore.compiler._compile_part", lambda *_: tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4), raising=False)
    before = {*threading.enumerate()}
    limited(0)
    with pytest.raises(ThreadLimitError, match="compilers cannot be started"), naming_limit("compilers"):
        build_libraries(compiler, SOURCES, {tmp_path / "kernels.so": ()})
    assert {*threading.enumerate()} == before


def test_every_thread_is_started_by_the_functions_that_name_the_limit() -> None:
    """A component that is added tomorrow, too. `compiler.py` is loaded where graphcore is not installed yet."""
    package = Path(graphcore.__file__).parent
    exempt = {package / "threads.py", package / "compiler.py"}
    found = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        if path not in exempt
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("Thread", "ThreadPoolExecutor", "start_new_thread", "Timer")
    ]
    assert found == []
