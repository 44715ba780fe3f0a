"""torch.compile as this engine uses it: whole graphs, one per kind, and a recompile limit that nobody shares."""

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import graphcore.graph.compile as compiling
from graphcore.build_folder import temporary_folder
from graphcore.errors import GraphError, StreamingError
from graphcore.graph.compile import (
    CACHE_VARIABLE,
    call_compiling,
    code_folder,
    compile_cache,
    compile_whole,
    fresh_copy,
    mark_length,
    measure_compile,
)

pytestmark = pytest.mark.thorough

LIMIT = torch._dynamo.config.recompile_limit


def doubled(x: Tensor, *, shift: float = 1.0) -> Tensor:
    return x * 2 + shift


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_a_fresh_copy_is_the_same_function_over_a_code_object_of_its_own() -> None:
    copy = fresh_copy(doubled, "kind_7")
    assert copy.__name__ == copy.__code__.co_name == "kind_7"
    assert copy.__code__ is not doubled.__code__
    assert copy(torch.ones(1), shift=5.0).item() == 7.0
    assert copy(torch.ones(1)).item() == 3.0
    assert doubled.__name__ == "doubled"


def test_a_method_or_builtin_is_no_plain_function() -> None:
    with pytest.raises(AssertionError, match="is no plain function"):
        fresh_copy(torch.ones(1).add, "kind")


@pytest.mark.usefixtures("_traced_only")
def test_more_kinds_than_the_recompile_limit_compile_each_once() -> None:
    before = graphs()
    kinds = [compile_whole(doubled, f"kind_{size}") for size in range(2, LIMIT + 6)]
    for _ in range(2):
        for size, run in enumerate(kinds, start=2):
            assert run(torch.ones(size)).tolist() == [3.0] * size
    assert graphs() - before == len(kinds)


@pytest.mark.usefixtures("_traced_only")
def test_without_copies_the_limit_would_be_hit() -> None:
    """What the copies are for; if torch ever drops the limit, they can go."""
    shared = torch.compile(doubled, fullgraph=True, dynamic=False, options={})
    for size in range(2, LIMIT + 2):
        shared(torch.ones(size))
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        shared(torch.ones(LIMIT + 2))


def branches_on_data(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def breaks_the_graph(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def calls_what_cannot_be_traced(x: Tensor) -> Tensor:
    return torch.compiler.disable(doubled)(x)


@pytest.mark.usefixtures("_traced_only")
@pytest.mark.parametrize("broken", [branches_on_data, breaks_the_graph, calls_what_cannot_be_traced])
def test_what_cannot_be_one_graph_raises_and_never_runs_eager(broken: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compile_whole(broken, "broken")(torch.ones(3))


@pytest.mark.usefixtures("_traced_only")
def test_a_marked_length_is_a_symbol_and_others_are_not() -> None:
    run = compile_whole(doubled, "prefill")
    first = torch.ones(2, 128, 3)
    mark_length(first)
    run(first)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens in (2, 3, 127, 128, 129, 200):
            assert run(torch.ones(2, tokens, 3)).shape == (2, tokens, 3)
        with pytest.raises(RuntimeError, match="recompile"):
            run(torch.ones(3, 128, 3))
        with pytest.raises(RuntimeError, match="recompile"):
            run(torch.ones(2, 128, 4))


@pytest.mark.usefixtures("_traced_only")
def test_an_unmarked_length_is_a_number() -> None:
    run = compile_whole(doubled, "decode")
    run(torch.ones(1, 4))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="recompile"):
        run(torch.ones(1, 5))


def test_report_counts_what_was_compiled_and_how_long_it_took(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x = torch.arange(5.0)
    with measure_compile() as cold:
        first = compile_whole(doubled, "counted")(x)
        assert cold.seconds == 0.0
    with measure_compile() as warm:
        second = compile_whole(doubled, "counted")(x)
    assert (cold.cache_hits, cold.cache_misses) == (0, 1)
    assert (warm.cache_hits, warm.cache_misses) == (1, 0)
    assert cold.seconds > 0
    assert first.tolist() == second.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_report_is_complete_even_if_the_compiled_function_raises() -> None:
    with pytest.raises(ZeroDivisionError), measure_compile() as report:
        _ = 1 / 0
    assert report.seconds > 0


def test_the_cache_folder_holds_inside_the_block_only_and_a_users_own_wins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    default = Path(tempfile.gettempdir()) / "torchinductor_somebody"
    ours, theirs = tmp_path / "compiled", tmp_path / "theirs"
    for before, expected in ((None, ours), (str(default), ours), (str(theirs), theirs)):
        if before is None:
            monkeypatch.delenv(CACHE_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(CACHE_VARIABLE, before)
        folder, note = code_folder(tmp_path, torch.device("cpu"))
        assert expected in (folder, folder.parent)
        assert note == ""
        with compile_cache(folder):
            assert os.environ[CACHE_VARIABLE] == str(folder)
        assert os.environ.get(CACHE_VARIABLE) == before


def test_a_users_own_folder_that_cannot_be_used_is_replaced_for_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    folder, note = code_folder(tmp_path, torch.device("cpu"))
    assert os.environ[CACHE_VARIABLE] == str(folder) != str(tmp_path / "file")  # importing Dynamo would fail else
    assert f"set {CACHE_VARIABLE} to" in note


def test_a_folder_with_spaces_is_reached_through_a_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Inductor gives g++ a command that is split at spaces; the code is kept all the same."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    link, note = code_folder(tmp_path / "with a space", torch.device("cpu"))
    assert " " not in str(link)
    assert link.resolve().parent == tmp_path / "with a space" / "compiled"
    assert note == ""
    assert code_folder(tmp_path / "with a space", torch.device("cpu"))[0] == link
    assert call_compiling(link, compile_whole(doubled, "linked"), torch.ones(3)).tolist() == [3.0] * 3
    assert any(link.resolve().iterdir())


def test_code_that_finds_no_room_goes_into_a_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor import codecache

    write = codecache.write

    def refuse_here(*given: object, **named: object) -> object:
        if os.environ[CACHE_VARIABLE] == str(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*given, **named)

    monkeypatch.setattr(codecache, "write", refuse_here)
    assert call_compiling(tmp_path, compile_whole(doubled, "moved"), torch.ones(11)).tolist() == [3.0] * 11
    assert f"{tmp_path}: compiled code cannot be kept (No space left on device)" in caplog.text
    assert f"it is kept in {temporary_folder()}" in caplog.text


def test_a_compiler_without_room_for_its_own_files_counts_as_a_full_folder(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="compiled code cannot be kept"), compile_cache(tmp_path):
        raise RuntimeError("g++: fatal error: error writing to /tmp/x.s: No space left on device")


def test_this_thread_traces_before_the_one_that_loads_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch 2.11 for CUDA, without a GPU, crashes at the next compilation."""
    order: list[str] = []

    class Tracing(FakeTensorMode):
        def __enter__(self) -> "Tracing":
            order.append(threading.current_thread().name)
            return super().__enter__()

    monkeypatch.setattr(compiling, "load_compiler", lambda _device: order.append(threading.current_thread().name))
    monkeypatch.setattr(compiling, "FakeTensorMode", Tracing)
    with compiling.compiler_loading(torch.device("cpu"), is_needed=True):
        pass
    assert order == [threading.current_thread().name, "compiler-loading"]


def test_the_compiler_is_loaded_for_the_device_that_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU runs must not wait for the C++ compiler."""
    seen: list[str] = []
    monkeypatch.setattr(compiling, "compile_whole", lambda _function, _name: lambda x: seen.append(x.device.type))
    compiling.load_compiler(torch.device("meta"))
    assert seen == ["meta"]


def test_no_reduction_is_chosen_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions of other shapes sum in another order: what a GPU computes would depend on which was fastest."""
    given: list[dict[str, object]] = []
    monkeypatch.setattr(torch, "compile", lambda _function, **how: given.append(how["options"]))
    compile_whole(doubled, "kind_8")
    (options,) = given
    torch._inductor.config.patch(options)  # each is a setting of the installed torch
    assert options["deterministic"] is True


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "No space left"), (errno.EROFS, "Read-only file system")]
)
def test_compiled_code_that_cannot_be_kept_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("torch._inductor.codecache.write_atomic", refuse)
    monkeypatch.setattr("torch._inductor.codecache.write", refuse)
    with (
        pytest.raises(GraphError, match=rf"compiled code cannot be kept \({reason}.*graph=eager"),
        compile_cache(tmp_path),
    ):
        compile_whole(doubled, "unkept")(torch.ones(7))


def test_what_fails_for_another_reason_is_passed_on(tmp_path: Path) -> None:
    def fail() -> None:
        try:
            raise PermissionError(errno.EACCES, "no")
        except OSError as error:
            raise StreamingError("gone") from error

    with pytest.raises(StreamingError, match="gone"), compile_cache(tmp_path):
        fail()
