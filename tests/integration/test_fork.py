"""A process forked from one that has loaded a model has none of its threads: it is told so, and does not hang."""

import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.queues import Paced

from graphcore import Engine
from graphcore.errors import GraphError

pytestmark = pytest.mark.thorough

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3"
PROMPT = [[1, 2, 3]]
SECONDS = 20


def in_fork(call: Callable[[], object]) -> str:
    """Return what the call gives in a forked process, or its error; fail if there is nothing after a while."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = repr(call())
        except GraphError as error:
            said = f"GraphError: {error}"
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    try:
        answered, _, _ = select.select([reading], [], [], SECONDS)
        if not answered:
            os.kill(pid, 9)
        assert answered, "the forked process hangs"
        return os.read(reading, 10_000).decode()
    finally:
        os.close(reading)
        os.waitpid(pid, 0)


def tokens(engine: Engine) -> list[int]:
    return list(engine.generate(PROMPT, max_new_tokens=4)[0].token_ids)


@pytest.mark.parametrize("graph", ["auto", "eager"])
def test_a_forked_process_is_refused_by_name(graph: str) -> None:
    with Engine.load(TINY, graph=graph, overrides=["threads=2"]) as engine:
        right = tokens(engine)
        for call in (lambda: tokens(engine), lambda: Engine.load(TINY, overrides=["threads=2"])):
            said = in_fork(call)
            assert said.startswith(
                f"GraphError: this process was forked from process {os.getpid()} after that had loaded"
            )
            assert "threads=1" in said
        assert tokens(engine) == right


# A vocabulary of which torch writes one row with several threads: a forked process would wait for them.
WIDE = (
    "threads=2",
    "model=qwen3",
    "model.num_hidden_layers=1",
    "model.random_config.hidden_size=64",
    "model.random_config.intermediate_size=64",
    "context_length=64",
)
CALLS: dict[str, Callable[[Engine], object]] = {
    "stream": lambda engine: next(engine.stream([1])),
    "sampled": lambda engine: engine.generate([1], max_new_tokens=2, temperature=1.0),
    "longer": lambda engine: engine.generate([1, 2, 3, 4], max_new_tokens=2),
    "warm_up": lambda engine: engine.warm_up(),
    "logits": lambda engine: engine.logits([[1, 2]]),
    "forward": lambda engine: engine.forward(torch.zeros(1, 2, engine.config.hidden_size)),
}


@pytest.fixture(scope="module")
def wide() -> Iterator[Engine]:
    """An engine that has prepared one kind of call, and has the others' programs to record yet."""
    with Engine.load("random:", overrides=WIDE) as engine:
        engine.generate(PROMPT, max_new_tokens=2)
        yield engine


@pytest.mark.parametrize("name", CALLS)
def test_a_forked_process_is_refused_before_anything_is_recorded(wide: Engine, name: str) -> None:
    assert in_fork(lambda: CALLS[name](wide)).startswith("GraphError: this process was forked")


def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks(wide: Engine) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        stream = Paced(wide, [1, 2], 2)
        next(stream)
        has_begun.set()
        may_end.wait()
        stream.close()

    holder = threading.Thread(target=hold)
    holder.start()
    has_begun.wait(SECONDS)
    try:
        assert in_fork(lambda: wide.generate(PROMPT, max_new_tokens=2)).startswith("GraphError: this process was")
    finally:
        may_end.set()
        holder.join()


def test_a_forked_process_cannot_go_on_with_a_stream(wide: Engine) -> None:
    events = wide.stream([1, 2], max_new_tokens=3)
    next(events)
    assert in_fork(lambda: next(events)).startswith("GraphError: this process was forked")
    assert len(list(events)) == 2


def test_with_one_thread_a_forked_process_computes() -> None:
    before = torch.get_num_threads()
    try:
        with Engine.load(TINY, graph="eager", overrides=["threads=1"]) as engine:
            assert in_fork(lambda: tokens(engine)) == repr(tokens(engine))
    finally:
        torch.set_num_threads(before)
