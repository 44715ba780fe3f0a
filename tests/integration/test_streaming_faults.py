"""What can go wrong with a file that is read again for every token: one clear error, at once, and no token after it.

The model is small, so a whole pass takes milliseconds; two seconds are allowed from the fault to the error.
"""

import errno
import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
import torch
from support.queues import Paced
from support.streaming import collect_until, fill_threads, load, stream_of, unwrap, wrap
from support.tiny_models import TinyModel

from graphcore import Engine
from graphcore.engine.request import Request
from graphcore.errors import CheckpointError, ConfigError, GraphcoreError, StreamingError
from graphcore.streaming.read_ticket import ReadTicket

SECONDS = 2.0
PROMPT = list(range(1, 21))
Tiny = Callable[[str], TinyModel]


@pytest.fixture
def folder(tiny_model: Tiny, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_model("llama3").folder, tmp_path / "llama3"))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    gc.collect()  # engines that other tests forgot
    before = fill_threads()
    yield
    assert collect_until(lambda: fill_threads() == before), fill_threads()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def replace(path: Path) -> None:
    shutil.copy(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def overwrite(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        stream.write(b"\0" * 4096)
    now = time.time_ns()  # a file system may count coarsely
    os.utime(path, ns=(now, now))


def overwrite_and_keep_the_time(path: Path) -> None:
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def append(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"more")


DAMAGES = {
    truncate: r"it shrank|the file now ends at",
    replace: "another file has taken its place",
    overwrite: "it was written to;",
    overwrite_and_keep_the_time: "it was written to and its time set back",
    append: "it grew from",
    Path.unlink: "it was deleted",
}


@pytest.mark.parametrize(
    ("damage", "overrides"),
    [  # every damage, and whoever reads finds one that makes a read short and one that does not
        *((damage, ()) for damage in DAMAGES),
        *((damage, (f"streaming.{way}",)) for damage in (truncate, overwrite) for way in ("mode=sync", "prefetch=3")),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_a_file_that_changes_in_mid_stream_ends_the_generation_with_one_error(
    folder: Path, damage: Callable[[Path], None], overrides: tuple[str, ...]
) -> None:
    with load(folder, *overrides) as engine:
        events = Paced(engine, PROMPT, 100)
        for _ in range(5):
            next(events)
        slots = engine.plan.groups.num_slots
        damage(weights(folder))
        began, tokens = time.perf_counter(), 0
        with pytest.raises(CheckpointError, match=DAMAGES[damage]) as raised:  # noqa: PT012  # tokens are counted
            for _ in events:
                tokens += 1
        assert time.perf_counter() - began < SECONDS
        assert tokens <= 1, f"what {slots} slots held by then may end one step, no more"
        assert str(weights(folder)) in str(raised.value)
        assert "again" in str(raised.value)
        with pytest.raises(CheckpointError, match=DAMAGES[damage]):  # and so does whatever comes after
            engine.generate([PROMPT], max_new_tokens=1)


def test_a_file_that_is_unreadable_in_mid_stream_is_an_error_that_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load(folder) as engine:
        events = Paced(engine, PROMPT, 100)
        expected = [next(events).token_id for _ in range(3)]

        def fail(*arguments: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", fail)
            with pytest.raises(
                CheckpointError, match=r"cannot be read at byte \d+: Input/output error; check the disk"
            ):
                list(events)
        again = [event.token_id for event in engine.stream(PROMPT, max_new_tokens=3)]
        assert again == expected  # a cable that was put back


def test_a_read_that_comes_short_is_an_error(folder: Path) -> None:
    with load(folder) as engine:
        expected = engine.generate([PROMPT], max_new_tokens=4)[0].token_ids
        wrap(engine, lacking=1)
        with pytest.raises(CheckpointError, match=r"model.safetensors: \d+ of \d+ bytes came from byte"):
            engine.generate([PROMPT], max_new_tokens=4)
        unwrap(engine)
        assert engine.generate([PROMPT], max_new_tokens=4)[0].token_ids == expected


def is_reader() -> bool:
    """Return whether this thread reads weights, and does not compute."""
    return threading.current_thread().name.startswith("graphcore-fill")


@pytest.mark.parametrize("raised", [SystemExit(1), MemoryError("no room"), AssertionError("not aligned")], ids=repr)
@pytest.mark.parametrize("place", ["prefill", "decode"])
def test_a_reader_that_fails_is_an_error_and_the_engine_works_again(
    folder: Path, raised: BaseException, place: str
) -> None:
    with load(folder) as engine:
        expected = engine.generate([PROMPT], max_new_tokens=6)[0].token_ids
        at = 3 if place == "prefill" else 40

        def fail(number: int) -> None:
            if number >= at and is_reader():
                raise raised

        wrap(engine, fail)
        events = Paced(engine, PROMPT, 100)
        began = time.perf_counter()
        with pytest.raises(StreamingError, match=f"weights of group [0-9]+ could not be read: {type(raised).__name__}"):  # noqa: PT012
            for event, token_id in zip(events, expected * 20, strict=False):
                assert place == "decode", "a token came before all weights were read"
                assert event.token_id == token_id or event.row == 0
        assert time.perf_counter() - began < SECONDS
        unwrap(engine)
        assert engine.generate([PROMPT], max_new_tokens=6)[0].token_ids == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_that_dies_means_that_the_model_must_be_loaded_again(folder: Path) -> None:
    with load(folder) as engine:
        engine.generate([PROMPT], max_new_tokens=2)
        filler = stream_of(engine).filler
        assert filler is not None

        def die(number: int, ticket: object, fault: object) -> None:
            raise SystemExit

        filler._end = die  # type: ignore[method-assign]
        for _ in range(2):
            began = time.perf_counter()
            with pytest.raises(StreamingError, match=r"^thread graphcore-fill-\d, which reads weights, has died; load"):
                engine.generate([PROMPT], max_new_tokens=50)
            assert time.perf_counter() - began < SECONDS


@pytest.mark.parametrize("place", ["prefill", "decode", "embedding"])
def test_ctrl_c_ends_the_generation_and_the_engine_works_again(folder: Path, place: str) -> None:
    with load(folder) as engine:
        expected = engine.generate([PROMPT], max_new_tokens=6)[0].token_ids
        pressed = threading.Event()

        def press(number: int) -> None:
            if (
                is_reader() == (place != "embedding")
                and number >= (60 if place == "decode" else 2)
                and not pressed.is_set()
            ):
                pressed.set()
                os.kill(os.getpid(), signal.SIGINT)

        wrap(engine, press)
        began = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT], max_new_tokens=100)
        assert time.perf_counter() - began < SECONDS
        for _ in range(2):
            assert engine.generate([PROMPT], max_new_tokens=6)[0].token_ids == expected


def test_an_error_while_ctrl_c_is_being_handled_leaves_an_engine_that_works(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while it is waited for that threads are out of their reads."""
    end, interrupted = Request.end, threading.Event()

    def end_noted(request: Request, reason: str) -> None:
        end(request, reason)
        if reason == "interrupted":
            interrupted.set()

    monkeypatch.setattr(Request, "end", end_noted)
    with load(folder) as engine:
        expected = engine.generate([PROMPT], max_new_tokens=6)[0].token_ids
        filler = stream_of(engine).filler
        assert filler is not None
        cancel, wait = filler.cancel, filler.wait
        presses: list[str] = []

        def wait_pressed(ticket: ReadTicket) -> None:
            if not presses:
                presses.append("while a group is waited for")
                os.kill(os.getpid(), signal.SIGINT)
                assert interrupted.wait(SECONDS)  # the main thread has ended the request before the pass is over
            wait(ticket)

        def cancel_pressed(tickets: Collection[ReadTicket]) -> None:
            if len(presses) == 1:
                presses.append("while reads are given up")
                raise ZeroDivisionError
            cancel(tickets)

        filler.wait = wait_pressed  # type: ignore[method-assign]
        filler.cancel = cancel_pressed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPT], max_new_tokens=100)
        assert engine.generate([PROMPT], max_new_tokens=6)[0].token_ids == expected
        assert len(presses) == 2


def test_an_engine_that_is_closed_during_a_generation_ends_it_and_its_threads(folder: Path) -> None:
    before = fill_threads()
    engine = load(folder)
    assert len(fill_threads()) > len(before)
    events = Paced(engine, PROMPT, 100)
    next(events)
    next(events)
    events.close_engine()
    assert fill_threads() == before
    with pytest.raises(ConfigError, match="this engine is closed; load it again"):
        next(events)
    with pytest.raises(ConfigError, match="this engine is closed; load it again"):
        engine.generate([PROMPT])
    engine.close()


def test_an_engine_that_is_closed_by_another_thread_ends_the_generation_with_an_error(folder: Path) -> None:
    began, found = threading.Event(), []
    engine = load(folder)
    events = Paced(engine, PROMPT, 100)

    def generate() -> None:
        try:
            for _ in events:
                began.set()
        except GraphcoreError as error:
            found.append(str(error))

    thread = threading.Thread(target=generate)
    thread.start()
    assert began.wait(SECONDS)
    events.close_engine()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert found
    assert "closed" in found[0]


def test_a_forgotten_engine_ends_its_threads_and_closes_its_files(folder: Path) -> None:
    before, files = fill_threads(), open_files()
    engine = load(folder)
    engine.generate([PROMPT], max_new_tokens=2)
    assert len(fill_threads()) > len(before)
    del engine
    assert collect_until(lambda: fill_threads() == before), fill_threads()
    assert open_files() <= files


def test_two_engines_stream_the_same_file_at_once_without_disturbing_each_other(folder: Path) -> None:
    with load(folder) as first, load(folder, "streaming.layer_group_size=2") as second:
        alone = first.generate([PROMPT], max_new_tokens=20)[0].token_ids
        together = [
            (one.token_id, other.token_id)
            for one, other in zip(
                first.stream(PROMPT, max_new_tokens=20), second.stream(PROMPT, max_new_tokens=20), strict=True
            )
        ]
        assert together == [(token_id, token_id) for token_id in alone]
        first.close()
        assert second.generate([PROMPT], max_new_tokens=20)[0].token_ids == alone


@pytest.mark.thorough
def test_two_engines_run_in_two_threads(folder: Path) -> None:
    with load(folder) as first, load(folder, "streaming.prefetch=2") as second:
        expected = first.generate([PROMPT], max_new_tokens=30)[0].token_ids
        found: dict[int, tuple[int, ...]] = {}

        def run(number: int, engine: Engine) -> None:
            found[number] = engine.generate([PROMPT], max_new_tokens=30)[0].token_ids

        threads = [threading.Thread(target=run, args=item) for item in enumerate((first, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * SECONDS)
        assert found == {0: expected, 1: expected}


def test_a_fault_in_logits_hidden_states_and_scoring_is_told_too(folder: Path) -> None:
    ids = torch.tensor([PROMPT])
    with load(folder) as engine:
        engine.logits(ids)
        truncate(weights(folder))
        for act in (
            lambda: engine.logits(ids),
            lambda: engine.logits(ids, output_hidden_states=True),
            lambda: engine.forward(torch.zeros(1, 4, 64)),
            lambda: list(engine.runner.logit_slices(PROMPT, 0)),
        ):
            with pytest.raises(CheckpointError, match=r"shrank|now ends at"):
                act()


def test_a_file_that_goes_while_the_model_loads_leaves_nothing_behind(folder: Path, tiny_model: Tiny) -> None:
    files = open_files()

    def damage(stage: str, _group: int | None, done: int, total: int) -> None:
        if stage == "load" and done == total:
            weights(folder).unlink()

    with pytest.raises(CheckpointError, match=r"model.safetensors: no such file"):
        Engine.load(folder, device="cpu", graph="eager", streaming="on", on_progress=damage)
    gc.collect()
    assert open_files() <= files
