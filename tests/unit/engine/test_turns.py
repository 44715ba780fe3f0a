"""Turns alone: one at a time, first come first served, given back by whoever goes away, refused where it would hang."""

import asyncio
import contextlib
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from graphcore.engine.turns import DriverMark, Turn, Turns
from graphcore.errors import BusyError, ConfigError

SECONDS = 10.0


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


@pytest.fixture(autouse=True)
def notice_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have turns tell that they wait: one that stands in line may yet be refused."""
    wait_at_gate = Turn.wait_at_gate

    def wait(self: Turn) -> None:
        self.is_waiting = True
        wait_at_gate(self)

    monkeypatch.setattr(Turn, "is_waiting", False, raising=False)
    monkeypatch.setattr(Turn, "wait_at_gate", wait)


def wait_for_line(turns: Turns, length: int) -> None:
    """Return when one turn is held and the others, of that many in all, wait for it."""
    given_up = threading.Event()
    timer = threading.Timer(SECONDS, given_up.set)
    timer.start()
    while 1 + sum(turn.is_waiting for turn in turns._line.copy()) != length:
        assert not given_up.is_set(), f"{len(turns._line)} in line, {length} expected"
    timer.cancel()


def stream(turns: Turns, steps: int = 3) -> Iterator[int]:
    """Stand for an engine's stream: hold a turn while suspended."""
    turn = turns.ask("stream")

    def events() -> Iterator[int]:
        with turn:
            for number in range(steps):
                with turn.step():
                    made = number
                yield made

    return events()


def test_threads_never_compute_together_and_nobody_is_left_waiting() -> None:
    turns, inside, most = Turns(), [], []

    def work() -> None:
        for _ in range(500):
            with turns.ask("generate") as turn, turn.step():
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [in_thread(work) for _ in range(8)]
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert len(most) == 8 * 500
    assert set(most) == {1}


def test_turns_come_in_the_order_in_which_they_were_asked_for() -> None:
    turns, order = Turns(), []

    def work(number: int) -> None:
        with turns.ask("generate"):
            order.append(number)

    with turns.ask("generate"):
        threads = []
        for number in range(6):
            threads.append(in_thread(lambda number=number: work(number)))
            wait_for_line(turns, number + 2)
    for thread in threads:
        thread.join(SECONDS)
    assert order == list(range(6))


@pytest.mark.parametrize("way", ["to its end", "closed", "dropped", "in a cycle", "failed"])
def test_a_stream_gives_its_turn_back_however_it_goes_away(way: str) -> None:
    turns, order = Turns(), []
    events: list[object] = [stream(turns)]
    next(events[0])

    def work() -> None:
        with turns.ask("generate"):
            order.append("generate")

    thread = in_thread(work)
    wait_for_line(turns, 2)
    assert not order
    if way == "to its end":
        assert list(events[0]) == [1, 2]
    elif way == "closed":
        events[0].close()
    elif way == "failed":
        with contextlib.suppress(RuntimeError):
            events[0].throw(RuntimeError())
    elif way == "dropped":
        events.clear()
    else:
        events.append(events)
        del events
        gc.collect()
    thread.join(SECONDS)
    assert order == ["generate"]


def test_streams_that_the_garbage_collector_ends_anywhere_block_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections run between any two instructions, those of waiting and of leaving a turn among them."""
    turns, done = Turns(), []
    before = gc.get_threshold()

    class Holder:
        def __init__(self) -> None:
            self.events, self.itself = stream(turns), self
            next(self.events)

    def abandon() -> None:
        for _ in range(6):
            Holder()
        done.append(1)

    def work() -> None:
        for _ in range(40):
            with turns.ask("generate") as turn, turn.step():
                pass
        done.append(1)

    def collect() -> None:
        while len(done) < 5:
            gc.collect(0)

    monkeypatch.setattr("graphcore.engine.turns.PATIENCE", 0.01)
    gc.set_threshold(3)
    try:
        threads = [*(in_thread(work) for _ in range(3)), *(in_thread(abandon) for _ in range(2))]
        collector = in_thread(collect)
        for thread in threads:
            thread.join(SECONDS)
    finally:
        gc.set_threshold(*before)
        alive = [thread for thread in threads if thread.is_alive()]
        done.extend([1] * 5)
        collector.join(SECONDS)
    assert not alive


def test_a_stream_in_a_cycle_that_nobody_can_reach_is_no_reason_to_refuse() -> None:
    turns = Turns()
    events: list[object] = [stream(turns)]
    next(events[0])
    events.append(events)
    gc.disable()
    try:
        del events
        with turns.ask("generate") as turn, turn.step():
            pass
    finally:
        gc.enable()


def test_a_stream_that_nobody_can_reach_is_no_reason_to_refuse_while_another_thread_collects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python collects in one thread at a time: what another asks for meanwhile does nothing."""
    turns, began, go_on = Turns(), threading.Event(), threading.Event()

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            began.set()
            assert go_on.wait(SECONDS)

    collect = gc.collect
    asked = []

    def collect_and_go_on(generation: int = 2) -> int:
        asked.append(collect(generation))
        go_on.set()
        return asked[-1]

    gc.disable()
    try:
        Garbage()
        collector = in_thread(collect)
        assert began.wait(SECONDS)
        monkeypatch.setattr(gc, "collect", collect_and_go_on)
        events: list[object] = [stream(turns)]
        next(events[0])
        events.append(events)
        del events
        with turns.ask("generate") as turn, turn.step():
            pass
        assert asked[0] == 0
    finally:
        go_on.set()
        gc.enable()
    collector.join(SECONDS)


def test_a_turn_that_is_interrupted_while_it_waits_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphcore.engine.turns.PATIENCE", 0.01)  # a signal right before a wait does not end it
    turns = Turns()
    events = [stream(turns)]

    def hold() -> None:
        next(events[0])

    in_thread(hold).join(SECONDS)

    def interrupt() -> None:
        wait_for_line(turns, 2)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    interrupter = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt), turns.ask("generate"):
        pytest.fail("the turn is another's")
    interrupter.join(SECONDS)
    assert len(turns._line) == 1
    events.clear()
    with turns.ask("generate") as turn, turn.step():
        assert len(turns._line) == 1
    assert not turns._line


def test_a_stream_that_another_thread_has_taken_over_is_waited_for() -> None:
    turns, order = Turns(), []
    events = stream(turns)
    next(events)
    with pytest.raises(BusyError):
        turns.ask("generate").__enter__()
    taken, go_on = threading.Event(), threading.Event()

    def finish() -> None:
        next(events)
        taken.set()
        assert go_on.wait(SECONDS)
        order.extend(events)

    thread = in_thread(finish)
    assert taken.wait(SECONDS)

    def release() -> None:
        wait_for_line(turns, 2)
        go_on.set()

    in_thread(release)
    with turns.ask("generate"):
        order.append("generate")
    thread.join(SECONDS)
    assert order == [2, "generate"]


def test_a_pool_s_thread_waits_for_a_stream_that_an_earlier_job_of_it_left() -> None:
    """Jobs of a pool share their thread's context: what one has begun is not around the next."""
    turns, order = Turns(), []
    with ThreadPoolExecutor(1) as pool:
        events = pool.submit(stream, turns).result()
        assert pool.submit(next, events).result() == 0

        def work() -> None:
            with turns.ask("generate"):
                order.append("generate")

        job = pool.submit(work)
        wait_for_line(turns, 2)
        order += list(events)
        job.result(SECONDS)
    assert order == [1, 2, "generate"]


def test_a_call_inside_the_loop_of_one_job_of_a_pool_is_refused() -> None:
    turns = Turns()

    def nested() -> None:
        for _ in stream(turns):
            with turns.ask("logits"):
                pytest.fail("it cannot have its turn")

    with ThreadPoolExecutor(1) as pool, pytest.raises(BusyError, match=r"^logits\(\) was called inside stream\(\)"):
        pool.submit(nested).result(SECONDS)
    assert not turns._line


def test_an_event_loop_does_not_wait_and_says_what_would() -> None:
    turns = Turns()

    async def consume(seen: list[int], began: asyncio.Event) -> None:
        for number in stream(turns):
            seen.append(number)
            began.set()
            await asyncio.sleep(0)

    async def main() -> list[int]:
        seen: list[int] = []
        began = asyncio.Event()

        async def ask() -> None:
            await began.wait()
            with pytest.raises(BusyError, match=r"generate\(\) would stop this thread's event loop.*asyncio.to_thread"):
                turns.ask("generate").__enter__()

        await asyncio.gather(consume(seen, began), ask())
        return seen

    assert asyncio.run(main()) == [0, 1, 2]
    assert not turns._line


def test_a_call_of_the_same_task_in_another_thread_is_refused() -> None:
    turns = Turns()

    def generate() -> None:
        with turns.ask("generate"):
            pass

    async def main() -> None:
        events = stream(turns)
        await asyncio.to_thread(next, events)
        with pytest.raises(BusyError, match="inside stream"):
            await asyncio.wait_for(asyncio.to_thread(generate), SECONDS)
        events.close()
        await asyncio.to_thread(generate)

    asyncio.run(main())


def test_tasks_that_run_their_streams_in_threads_take_turns() -> None:
    turns, order = Turns(), []

    async def consume(number: int) -> None:
        events = stream(turns)
        while await asyncio.to_thread(next, events, None) is not None:
            order.append(number)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(5))
        await asyncio.wait_for(asyncio.gather(*map(consume, range(4))), SECONDS)

    asyncio.run(main())
    assert len(order) == 12
    assert [order[at : at + 3] for at in range(0, 12, 3)] == [[order[at]] * 3 for at in range(0, 12, 3)]
    assert sorted(order[::3]) == [0, 1, 2, 3]


def test_closing_waits_for_a_step_and_ends_everybody_else() -> None:
    turns, began, go_on, found = Turns(), threading.Event(), threading.Event(), []

    def compute() -> None:
        try:
            with turns.ask("generate") as turn:
                with turn.step():
                    began.set()
                    assert go_on.wait(SECONDS)
                    found.append("step")
                with turn.step():
                    found.append("a step after the end")
        except ConfigError as error:
            found.append(str(error))

    def wait() -> None:
        try:
            with turns.ask("generate"):
                found.append("a turn after the end")
        except ConfigError as error:
            found.append(str(error))

    threads = [in_thread(compute)]
    assert began.wait(SECONDS)
    threads.append(in_thread(wait))
    wait_for_line(turns, 2)

    def close() -> None:
        turns.close()
        found.append("closed")

    threads.append(in_thread(close))
    threads[1].join(SECONDS)
    assert found == ["this engine is closed; load it again"]
    go_on.set()
    for thread in threads:
        thread.join(SECONDS)
    assert found[1] == "step"
    assert sorted(found[2:]) == ["closed", "this engine is closed; load it again"]
    with pytest.raises(ConfigError, match="closed"):
        turns.ask("generate").__enter__()
    assert not turns._line


def test_contexts_keep_no_mark_alive_and_do_not_grow() -> None:
    turns = Turns()
    marks = [weakref.ref(turns.ask("generate").mark) for _ in range(100)]
    assert not any(mark() for mark in marks)
    kept = DriverMark.put_here()
    assert kept.is_here()
    from graphcore.engine import turns as module

    assert len(module._marks.get()) <= 3
