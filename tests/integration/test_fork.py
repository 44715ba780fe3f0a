"""A process forked from one that has loaded a model has none of its threads: it is told so, and does not hang."""

import os
import select
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from graphcore import Engine
from graphcore.errors import GraphError

TINY = Path(__file__).parents[1] / "golden" / "tiny" / "qwen3"
PROMPT = [[1, 2, 3]]
SECONDS = 60


def in_fork(call: Callable[[], object]) -> str:
    """Return what the call gives in a forked process, or its error; fail if there is nothing after a minute."""
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


def test_with_one_thread_a_forked_process_computes() -> None:
    before = torch.get_num_threads()
    try:
        with Engine.load(TINY, graph="eager", overrides=["threads=1"]) as engine:
            assert in_fork(lambda: tokens(engine)) == repr(tokens(engine))
    finally:
        torch.set_num_threads(before)
