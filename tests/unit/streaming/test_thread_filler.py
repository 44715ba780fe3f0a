"""The threads by themselves: what a ticket waits for, and how each way of failing ends."""

import errno
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from byte_conversions import FILE, ByteConversion, conversion, filler_of, live_threads
from support.fake_sources import FakeSource, numbered_bytes
from torch import Tensor

from graphcore.checkpoint.file_bytes import FileSpan
from graphcore.errors import CheckpointError, StreamingError
from graphcore.streaming import thread_filler
from graphcore.streaming.fill_jobs import file_jobs
from graphcore.streaming.thread_filler import ThreadFiller
from graphcore.streaming.timeline import Timeline

SECONDS = 2.0  # in which everything must have ended
CONTENT = numbered_bytes(1 << 20)
Make = Callable[..., ThreadFiller]


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that makes fillers, which must end with the test."""
    made: list[ThreadFiller] = []

    def of(source: FakeSource, **sizes: int) -> ThreadFiller:
        made.append(filler_of(source, **sizes))
        return made[-1]

    yield of
    for filler in made:
        ended_in_time(filler.close)
        assert live_threads(filler) == []


def ended_in_time(act: Callable[[], object]) -> BaseException | None:
    """Do something in a thread of its own; return what it raised. It must have ended soon."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:  # noqa: BLE001  # whatever it is, the test looks at it
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), f"not over after {SECONDS} s"
    return raised[0] if raised else None


def place(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_a_ticket_is_over_when_every_byte_is_there(make: Make) -> None:
    out = place(len(CONTENT))
    conversions = [conversion(at, 1000, out=out[at : at + 1000]) for at in range(0, 1_000_000, 1000)]
    filler = make(FakeSource(FILE, CONTENT))
    filler.wait(filler.begin(1, file_jobs(conversions), None))
    assert torch.equal(out[:1_000_000], CONTENT[:1_000_000])


def test_slots_that_were_made_for_inference_are_written(make: Make) -> None:
    """Engines allocate in inference mode, and then no other thread may write."""
    with torch.inference_mode():
        out = place(1000)
    filler = make(FakeSource(FILE, CONTENT))
    filler.wait(filler.begin(1, file_jobs([conversion(300, 1000, out=out)]), None))
    assert torch.equal(out, CONTENT[300:1300])


def test_a_slot_is_not_written_before_it_is_released_though_it_is_read_for(make: Make) -> None:
    out, is_read = place(100), threading.Event()
    filler = make(FakeSource(FILE, CONTENT, on_read=lambda offset, nbytes: offset and is_read.set()))
    first = filler.begin(1, file_jobs([conversion(0, 100, out=out)]), None)
    filler.wait(first)
    second = filler.begin(2, file_jobs([conversion(8192, 100, out=out)]), first)
    assert is_read.wait(SECONDS)
    assert torch.equal(out, CONTENT[:100])
    assert second.unwritten == 1
    filler.release(first)
    filler.wait(second)
    assert torch.equal(out, CONTENT[8192:8292])


@pytest.mark.parametrize("num_jobs", [1, 3])
def test_a_file_that_changed_while_it_was_read_fails_the_ticket(make: Make, num_jobs: int) -> None:
    source = FakeSource(FILE, CONTENT)
    filler = make(source)
    jobs = [job for at in range(num_jobs) for job in file_jobs([conversion(300_000 * at, 100)])]
    filler.wait(filler.begin(1, jobs, None))
    assert source.checks == 1  # once all of it is read
    source.change = CheckpointError("model.safetensors: it changed")
    with pytest.raises(CheckpointError, match="it changed"):
        filler.wait(filler.begin(1, jobs, None))


def test_jobs_that_share_a_buffer_never_wait_for_a_slot_with_it(make: Make) -> None:
    """The slot would wait for the ticket before, and that one for the buffer."""
    filler = make(FakeSource(FILE, CONTENT), num_threads=4, buffer_nbytes=4096, large_nbytes=16384)

    def passes() -> None:
        after = None
        out = place(9000)
        for _ in range(150):
            jobs = [job for at in range(3) for job in file_jobs([conversion(9000 * at, 9000, out=out)])]
            ticket = filler.begin(1, jobs, after)
            following = filler.begin(2, jobs[:2], ticket)
            filler.wait(ticket)
            filler.release(ticket)
            after = following
            filler.wait(following)
            filler.release(following)

    assert ended_in_time(passes) is None


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (CheckpointError("model.safetensors: it shrank"), CheckpointError, "^model.safetensors: it shrank$"),
        (
            OSError(errno.EIO, "Input/output error"),
            StreamingError,
            "group 7 could not be read: OSError: .*Input/output",
        ),
        (SystemExit(3), StreamingError, "^weights of group 7 could not be read: SystemExit: 3$"),
        (MemoryError("no room"), StreamingError, "group 7 could not be read: MemoryError: no room"),
        (KeyboardInterrupt(), StreamingError, "group 7 could not be read: KeyboardInterrupt"),
    ],
)
def test_what_goes_wrong_in_a_thread_is_told_to_who_waits_and_the_threads_live_on(
    make: Make, raised: BaseException, kind: type[Exception], said: str
) -> None:
    def fail(offset: int, nbytes: int) -> None:
        if offset == 0:
            raise raised

    filler = make(FakeSource(FILE, CONTENT, fail))
    bad = filler.begin(7, file_jobs([conversion(0, 100), conversion(600_000, 100)]), None)
    error = ended_in_time(lambda: filler.wait(bad))
    assert isinstance(error, kind)
    with pytest.raises(kind, match=said):
        filler.wait(bad)
    ended_in_time(lambda: filler.cancel([bad]))
    out = place(50)
    filler.wait(filler.begin(8, file_jobs([conversion(8192, 50, out=out)]), None))
    assert torch.equal(out, CONTENT[8192:8242])


def test_a_weight_that_does_not_fit_its_place_is_an_error(make: Make) -> None:
    small = ByteConversion("up_proj.weight", (FileSpan(FILE, 0, 100),), place(99))
    filler = make(FakeSource(FILE, CONTENT))
    error = ended_in_time(lambda: filler.wait(filler.begin(1, file_jobs([small]), None)))
    assert isinstance(error, StreamingError)
    assert "weights of group 1 could not be read: RuntimeError" in str(error)


def test_a_file_that_changed_is_found_after_the_last_byte_of_a_group(make: Make) -> None:
    source = FakeSource(FILE, CONTENT)
    filler = make(source)
    filler.wait(filler.begin(1, file_jobs([conversion(0, 9), conversion(500_000, 9)]), None))
    assert source.checks == 1
    source.change = CheckpointError("it was written to")
    with pytest.raises(CheckpointError, match="it was written to"):
        filler.wait(filler.begin(2, file_jobs([conversion(0, 9), conversion(500_000, 9)]), None))


class Deadly(FakeSource):
    """A read of it kills the thread that reads, past any handler: the thread's own bookkeeping fails."""

    victim: ThreadFiller

    def read_into(self, space: Tensor, offset: int, nbytes: int) -> int:
        def end(number: int, ticket: object, fault: object) -> None:
            raise SystemExit

        self.victim._end = end  # type: ignore[method-assign]
        return super().read_into(space, offset, nbytes)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_dead_thread_is_an_error_at_once_and_ever_after_and_nothing_waits_for_it(
    make: Make, num_threads: int
) -> None:
    source = Deadly(FILE, CONTENT)
    filler = source.victim = make(source, num_threads=num_threads)
    ticket = filler.begin(1, file_jobs([conversion(0, 100)]), None)
    for act in (
        lambda: filler.wait(ticket),
        lambda: filler.wait(ticket),
        lambda: filler.begin(2, file_jobs([conversion(0, 100)]), None),
    ):
        error = ended_in_time(act)
        assert isinstance(error, StreamingError)
        assert str(error).startswith("thread graphcore-fill-")
        assert str(error).endswith(", which reads weights, has died; load the model again")
    assert ended_in_time(lambda: filler.cancel([ticket])) is None


def test_cancelled_jobs_that_wait_for_a_slot_leave_and_do_not_write(make: Make) -> None:
    out, is_read = place(100), threading.Event()
    filler = make(FakeSource(FILE, CONTENT, on_read=lambda offset, nbytes: offset and is_read.set()))
    first = filler.begin(1, file_jobs([conversion(0, 100, out=out)]), None)
    filler.wait(first)
    second = filler.begin(2, file_jobs([conversion(8192, 100, out=out)]), first)
    assert is_read.wait(SECONDS)
    assert ended_in_time(lambda: filler.cancel([second])) is None
    assert torch.equal(out, CONTENT[:100])


def test_cancel_returns_when_no_thread_is_in_a_read(make: Make) -> None:
    began, may_go = threading.Event(), threading.Event()

    def wait(offset: int, nbytes: int) -> None:
        began.set()
        assert may_go.wait(SECONDS)

    filler = make(FakeSource(FILE, CONTENT, wait))
    ticket = filler.begin(1, file_jobs([conversion(0, 100)]), None)
    assert began.wait(SECONDS)
    cancelling = threading.Thread(target=filler.cancel, args=([ticket],))
    cancelling.start()
    cancelling.join(0.05)
    assert cancelling.is_alive()
    may_go.set()
    cancelling.join(SECONDS)
    assert not cancelling.is_alive()


class Hanging(FakeSource):
    """A disk that answers no read from some offset on, until it is told to."""

    def __init__(self, first: int) -> None:
        super().__init__(FILE, CONTENT, self._hang)
        self.first, self.is_hanging, self.answers = first, threading.Event(), threading.Event()

    def _hang(self, offset: int, nbytes: int) -> None:
        if offset >= self.first:
            self.is_hanging.set()
            assert self.answers.wait(SECONDS * 5)


def test_a_read_that_does_not_return_is_left_behind_and_its_memory_is_not_freed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread goes on when the disk answers: into its own buffer, not into the slot, and ends."""
    monkeypatch.setattr(thread_filler, "PATIENCE", 0.0)
    source, out = Hanging(8192), place(100)
    filler = make(source, num_threads=2)
    filler.wait(filler.begin(1, file_jobs([conversion(0, 100, out=out)]), None))
    later = place(100)
    kept = weakref.ref(later.untyped_storage())
    filler.begin(2, file_jobs([conversion(8192, 100, out=later)]), None)
    del later
    assert source.is_hanging.wait(SECONDS)
    for _ in range(2):
        assert ended_in_time(filler.close) is None
        gc.collect()
        assert filler.is_reading
    assert [thread.daemon for thread in live_threads(filler)] == [True]
    assert kept() is not None, "the slot was freed under a read"
    source.answers.set()
    for thread in filler._threads:
        thread.join(SECONDS)
    assert not filler.is_reading
    assert torch.equal(out, CONTENT[:100])


def test_waits_for_a_disk_that_gives_no_answer_end_when_the_engine_is_closed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_filler, "PATIENCE", 0.0)
    source = Hanging(8192)
    filler = make(source, num_threads=2)
    ticket = filler.begin(2, file_jobs([conversion(8192, 100)]), None)
    assert source.is_hanging.wait(SECONDS)
    monkeypatch.setattr(thread_filler, "LIVELINESS_SECONDS", 0.01)
    given_up: list[StreamingError] = []

    def wait() -> None:
        with pytest.raises(StreamingError) as raised:
            filler.wait(ticket)
        given_up.append(raised.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive(), "a wait has ended though nobody closes the engine"
    filler.end_waits()
    waiting.join(SECONDS)
    assert len(given_up) == 1
    for act in (lambda: filler.wait(ticket), lambda: filler.cancel([ticket])):
        error = ended_in_time(act)
        assert isinstance(error, StreamingError)
        assert "has not answered for 0 s while groups [2] are read and the engine is being closed" in str(error)
    source.answers.set()


def test_close_ends_threads_that_wait_for_a_slot_and_says_so_to_who_waits(make: Make) -> None:
    filler = make(FakeSource(FILE, CONTENT))
    out = place(100)
    first = filler.begin(1, file_jobs([conversion(0, 100, out=out)]), None)
    second = filler.begin(2, file_jobs([conversion(4096, 100, out=out)]), first)
    assert ended_in_time(filler.close) is None
    assert live_threads(filler) == []
    for act in (lambda: filler.wait(second), lambda: filler.begin(3, [], None)):
        error = ended_in_time(act)
        assert isinstance(error, StreamingError)
        assert str(error) == "this engine is closed and reads no more weights; load it again"
    assert torch.equal(out[:1], CONTENT[:1]) or not out.any()


def test_threads_that_fill_leave_torch_s_own_number_of_threads_alone() -> None:
    """Of the thread that made them, and of threads that are made later."""
    before, later = torch.get_num_threads(), []
    filler = ThreadFiller({}, 2, 0, 0, Timeline())
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    filler.close()
    assert [torch.get_num_threads(), *later] == [before, before]
